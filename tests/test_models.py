"""Every architecture trains right, or is refused with the reason before anything is spent.

docs/models.md holds the table that these tests measure.
"""
import json
import os
import re
import shutil
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, SEED, SFT, train
from families import samples, tiny_lm
from test_runtime_template import CHATML, tokenizer_of

import runtime
import sft
from runtime import Mistake, Template, read_jsonl

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \| `([^`]+)` \| (packed|padded|refused[^|]*?) \|$", PAGE, re.M)
TABLE = {name: outcome for _, name, outcome in ROWS}


@pytest.fixture(scope="module")
def plain():
    """A template with the tiny models' tokens."""
    return Template(tokenizer_of(CHATML), "tiny")


def logps_of(lm, sample):
    """The model's own log-probabilities of a sample's replies, each from all logits."""
    ids = torch.tensor([sample.ids])
    with torch.no_grad():
        whole = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[:, :-1], -1)
    found = whole.gather(-1, ids[:, 1:, None]).flatten()
    return found[torch.tensor(sample.mask[1:]).bool()]


def measured(lm, template, checkpointing=True):
    """What load makes of a model -> Policy, whether it packs."""
    if checkpointing and lm.supports_gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    return runtime.check_forwards(lm, sft.Policy, sft.collate, template, True)


def test_the_table_is_long():
    assert len(TABLE) == len(ROWS) >= 50, len(TABLE)
    assert {"packed", "padded"} < set(TABLE.values())


@pytest.mark.parametrize("name", TABLE)
def test_an_architecture_trains_right_or_is_refused(name, plain, tmp_path):
    lm, rows = tiny_lm(name, SEED), samples(SEED)
    if TABLE[name].startswith("refused"):
        for std in (0, 0.2):  # as it is initialised, and with larger weights
            with pytest.raises(Mistake, match="the log-probabilities of"):
                measured(tiny_lm(name, SEED, std), plain)
        return
    lm.eval()
    own = torch.cat([logps_of(lm, row) for row in rows])
    policy, packed = measured(lm, plain)
    assert packed == (TABLE[name] == "packed"), packed
    found = {packed: policy(*sft.collate(rows, packed, "cpu"))[0] for packed in {False, packed}}
    # float32 rounding: 3e-5 in MiniMax's experts, where the batch decides the order of sums
    assert all((logps - own).abs().max() <= 5e-5 for logps in found.values())
    before = [weight.clone() for weight in lm.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    (-found[packed].mean()).backward()
    optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, lm.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2
    lm.save_pretrained(tmp_path)
    again = type(lm).from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(torch.cat([logps_of(again, row) for row in rows]),
                               policy(*sft.collate(rows, packed, "cpu"))[0], atol=1e-4, rtol=0)


def test_dropout_is_off_in_layers_that_are_recomputed_too(plain, capsys):
    for name in ("gpt2", "seed_oss", "opt"):
        lm, rows = tiny_lm(name, SEED), samples(SEED)
        policy, _ = measured(lm, plain)
        assert policy.lm.is_gradient_checkpointing
        one, two = (policy(*sft.collate(rows, False, "cpu"))[0] for _ in range(2))
        assert torch.equal(one, two), name
    assert "off while training: attention_dropout 0.1, residual_dropout 0.1" in capsys.readouterr(
        ).out


def test_the_row_of_the_padding_token_gets_a_gradient(plain):
    lm = tiny_lm("qwen2", SEED)
    assert lm.get_input_embeddings().padding_idx == 0
    policy, _ = measured(lm, plain)
    rows = [Namespace(ids=[5, 0, 7, 8], mask=[0, 0, 1, 1])]
    policy(*sft.collate(rows, False, "cpu"))[0].sum().backward()
    assert lm.get_input_embeddings().weight.grad[0].abs().max() > 0


# ----------------------------------------------------------------------------- nothing is lost


FLAGS = [{"do_sample": False, "temperature": 0.7}, {"temperature": 0.9, "top_p": 0.6},
         {"do_sample": False, "top_k": 1}, {"min_p": 0.1}, {"num_beams": 1, "early_stopping": True},
         {"length_penalty": 2.0}, {"do_sample": True, "temperature": 0.6}, {"max_new_tokens": 64}]


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model for a test to damage."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def load(folder, out):
    args = Namespace(model=str(folder), out=str(out), keep_activations=100000, lora=0,
                     offload=False)
    return runtime.load(args, runtime.load_template(folder), torch.device("cpu"), sft.Policy,
                        sft.collate)[0].lm


def test_a_place_that_cannot_be_written_is_named_before_training(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        load(model, tmp_path / "file" / "out")


# ------------------------------------------------------------------------------------- resuming


def settings_of(model, data, **more):
    return Namespace(**{"model": str(model), "data": str(data), "out": None, "resume": True,
                        "lr": 1e-3, "seed": 0, "batch": 4, "steps": 2, "save_every": 1} | more)


@pytest.fixture
def started(tiny_model, episodes, tmp_path):
    """A run with a checkpoint -> resume(**changed flags)"""
    out = tmp_path / "run"
    runtime.keep_settings(settings_of(tiny_model, episodes, out=str(out)))
    mark = {"step": 1, "world": 1, "files": 0, "log_bytes": 0}
    (out / "checkpoints" / "step-1").mkdir(parents=True)
    (out / "checkpoints" / "step-1" / "mark.json").write_text(json.dumps(mark))

    def resume(**changed):
        words = {"model": tiny_model, "data": episodes, "out": str(out)} | changed
        runtime.keep_settings(settings_of(**words))
    return resume


@pytest.mark.parametrize("changed, words", [
    ({"lr": 1e-4}, "--lr was 0.001 and is 0.0001"), ({"seed": 9}, "--seed was 0 and is 9"),
    ({"batch": 2, "seed": 1}, "--batch was 4 and is 2; --seed was 0 and is 1"),
    ({"model": "Qwen/Qwen3-8B"}, "--model was .* and is Qwen/Qwen3-8B")],
    ids=["lr", "seed", "two", "model"])
def test_a_run_is_not_resumed_with_other_flags(changed, words, started):
    with pytest.raises(SystemExit, match=f"was started with other settings: {words}.*same ones"):
        started(**changed)


def test_a_run_is_resumed_with_flags_that_change_no_update(started):
    started()
    started(steps=9, save_every=5)


def test_a_run_is_resumed_where_its_files_are_elsewhere_but_not_if_they_changed(
        started, tiny_model, episodes, tmp_path):
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    data = shutil.copy(episodes, tmp_path / "moved.jsonl")
    started(model=moved, data=data)
    with open(data, "a") as file:
        file.write("\n")
    with pytest.raises(SystemExit, match="--data was .* and is .*moved.jsonl"):
        started(data=data)
    from safetensors.torch import load_file, save_file

    state = load_file(moved / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in state.items()}, moved / "model.safetensors",
              metadata={"format": "pt"})
    with pytest.raises(SystemExit, match="--model was"):
        started(model=moved)


@pytest.mark.slow
def test_a_stage_refuses_another_runs_checkpoint(tiny_model, episodes, tmp_path):
    words = "--model", tiny_model, "--data", episodes, SFT.replace("--steps 16", "")
    train("sft.py", tmp_path / "sft", *words, "--steps 1")
    told = train("sft.py", tmp_path / "sft", *words, "--steps 2 --seed 3", status=1)
    assert "was started with other settings: --seed was 0 and is 3" in told
    train("sft.py", tmp_path / "sft", *words, "--steps 2")
    assert len(read_jsonl(tmp_path / "sft" / "log.jsonl")) == 2


# ------------------------------------------------------------------------------------ build locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A build lock that is two minutes old."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "deepspeed_shm_comm" / "lock"
    file.parent.mkdir()
    file.touch()
    ago = file.stat().st_mtime - 120
    os.utime(file, (ago, ago))
    return file


# ------------------------------------------------------------------------------------ small ones


def test_end_tokens_are_trained_once_and_only_if_the_model_said_them(plain, tmp_path):
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    ended = [talk[0], {"role": "assistant", "content": "yes<|im_end|>"}]
    rows = [{"messages": talk}, {"messages": ended}, {"messages": talk, "stop": "context"}]
    runtime.write_jsonl(tmp_path / "rows.jsonl", rows)
    (one, two, cut), _ = sft.load_samples(tmp_path / "rows.jsonl", plain, 100)
    assert one == two and one.ids[-1] == plain.end
    assert cut.ids == one.ids[:-1] and cut.mask == one.mask[:-1]
