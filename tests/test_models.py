"""Every architecture trains right, or is refused with the reason before anything is spent.

docs/models.md holds the table that these tests measure.
"""
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, SEED, SFT, Plain, train
from families import samples, tiny_lm
from test_template import CHATML, FORMS, tokenizer_of

import runtime
import sft
from runtime import Template, read_jsonl

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \| `([^`]+)` \| (packed|padded|refused[^|]*?) \|$", PAGE, re.M)
TABLE = {name: outcome for _, name, outcome in ROWS}


@pytest.fixture(scope="module")
def plain():
    """A template whose tokens the tiny models have."""
    return Template(tokenizer_of(CHATML), "tiny")


def logps_of(lm, sample):
    """A model's own log-probabilities of a sample's replies, each from all of its logits."""
    ids = torch.tensor([sample.ids])
    with torch.no_grad():
        whole = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[:, :-1], -1)
    found = whole.gather(-1, ids[:, 1:, None]).flatten()
    return found[torch.tensor(sample.mask[1:]).bool()]


def measured(lm, template, checkpointing=True):
    """What load makes of a model -> Policy, whether it packs."""
    if checkpointing and lm.supports_gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    runtime.make_repeatable(lm)
    return runtime.measured(lm, sft.Policy, sft.collate, template, True)


def test_the_table_is_long():
    assert len(TABLE) == len(ROWS) >= 50, len(TABLE)
    assert {"packed", "padded"} < set(TABLE.values())


@pytest.mark.parametrize("name", TABLE)
def test_an_architecture_trains_right_or_is_refused(name, plain, tmp_path):
    lm, rows = tiny_lm(name, SEED), samples(SEED)
    if TABLE[name].startswith("refused"):
        reason = TABLE[name].partition(": ")[2]
        for std in (0, 0.2):  # as it is initialised, and with larger weights
            with pytest.raises(ValueError, match=f"^tiny: .*{reason}"):
                measured(tiny_lm(name, SEED, std), plain)
        return
    lm.eval()
    own = torch.cat([logps_of(lm, row) for row in rows])
    policy, packed = measured(lm, plain)
    assert packed == (TABLE[name] == "packed"), packed
    found = {packed: policy(*sft.collate(rows, packed, "cpu"))[0] for packed in {False, packed}}
    assert all((logps - own).abs().max() <= 2e-5 for logps in found.values())
    before = [weight.clone() for weight in lm.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    (-found[packed].mean()).backward()
    optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, lm.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2
    runtime.write_model(lm, plain, lm.state_dict(), tmp_path)
    again = type(lm).from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(torch.cat([logps_of(again, row) for row in rows]),
                               policy(*sft.collate(rows, packed, "cpu"))[0], atol=1e-4, rtol=0)
