"""Each diff in variants/ makes a stage of grpo.py whose loss is the one that its head states."""
import importlib.util
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, Plain, flags_of, train

import grpo
from runtime import read_jsonl

DIFFS = sorted((ROOT / "variants").glob("*.diff"))
NAMES = [diff.stem for diff in DIFFS]
OLD = {"a": [-1.0, -2.0], "b": [-1.5, -0.5, -3.0], "c": [-2.5, -1.0], "d": [-0.7]}
NEW = {"a": [-0.5, -2.2], "b": [-1.5, -0.9, -2.4], "c": [-2.0, -1.3], "d": [-0.8]}
REF = {"a": [-0.9, -1.9], "b": [-1.2, -0.8, -2.0], "c": [-2.2, -1.1], "d": [-0.6]}
REWARDS = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 1.0}  # a and b are one group, c and d another


class Table(torch.nn.Module):
    """A policy whose log pi of token i is number i of a table, whatever stands before it."""

    def __init__(self, logps):
        super().__init__()
        flat = [logp for play in logps.values() for logp in play]
        self.table = torch.nn.Parameter(torch.tensor([0.0, *flat]))

    def forward(self, ids, positions, keep, temperature=1.0):
        logps = self.table[ids[:, 1:]][keep[:, 1:]]
        return logps, torch.zeros_like(logps)


def plays():
    """The four plays as samples: a prompt of one token, then the play's."""
    made, token = [], 1
    for number, (name, old) in enumerate(OLD.items()):
        ids = [0, *range(token, token + len(old))]
        made.append(grpo.Sample(None, number // 2, name, ids, [0] + [1] * len(old), [0.0, *old],
                                stop="answer", reward=REWARDS[name]))
        token += len(old)
    return made


def expected(name, new, args):
    """The loss by hand. new: {play: its log-probabilities as a tensor}."""
    old, ref = ({play: torch.tensor(logps) for play, logps in table.items()}
                for table in (OLD, REF))
    w = {play: (new[play] - old[play]).exp() for play in new}
    one = 0.5 / (0.5 + 1e-6)  # the advantage of a, and minus that of b; c and d have none

    def smaller(ratio, advantage):
        bounded = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
        return torch.min(ratio * advantage, bounded * advantage)

    if name == "gspo":
        s = {play: (new[play] - old[play]).mean().exp() for play in "ab"}
        return -(smaller(s["a"], one) + smaller(s["b"], -one)) / 2 / 2
    if name == "cispo":
        kept = {play: w[play].clamp(max=1.28).detach() for play in "ab"}
        return -((kept["a"] * one * new["a"]).sum() - (kept["b"] * one * new["b"]).sum()) / 5 / 2
    if name == "dr-grpo":
        total = smaller(w["a"], 0.5).sum() + smaller(w["b"], -0.5).sum()
        return -total / args.context / 2 / 2
    if name == "rloo":  # the mean reward of the other play: 0 for a, 1 for b
        return -(smaller(w["a"], 1.0).sum() + smaller(w["b"], -1.0).sum()) / 5 / 2
    if name == "kl":
        far = {play: ref[play] - new[play] for play in new}
        k3 = {play: (far[play].exp() - far[play] - 1).sum() for play in new}
        distance = (k3["a"] + k3["b"]) / 5 / 2 + (k3["c"] + k3["d"]) / 3 / 2
        return (-(smaller(w["a"], one).sum() + smaller(w["b"], -one).sum()) / 5 / 2
                + args.beta * distance)
    if name == "on-policy-distillation":
        total = {play: smaller(w[play], ref[play] - old[play]).sum() for play in new}
        return -(total["a"] + total["b"]) / 5 / 2 - (total["c"] + total["d"]) / 3 / 2
    if name == "train-results":  # a tool wrote the second token of b
        new_b = new["b"][1]
        w["b"] = torch.stack([w["b"][0], (new_b - new_b.detach()).exp(), w["b"][2]])
        return -(smaller(w["a"], one).sum() + smaller(w["b"], -one).sum()) / 5 / 2
    raise KeyError(f"write down the loss of variants/{name}.diff here")


@pytest.fixture(params=NAMES)
def variant(request, tmp_path):
    """(name, its module), made by the command that the README gives."""
    made = tmp_path / f"grpo_{request.param.replace('-', '_')}.py"
    patch = subprocess.run(["patch", "-o", made, ROOT / "grpo.py", ROOT / "variants" /
                            f"{request.param}.diff"], capture_output=True, text=True)
    assert not patch.returncode and "FAILED" not in patch.stdout, (
        f"variants/{request.param}.diff no longer applies to grpo.py. Mend it by hand: apply it "
        f"with patch, edit the result, and diff -U2 it against grpo.py\n{patch.stdout}")
    ruff = [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", made]
    assert not subprocess.run(ruff).returncode
    spec = importlib.util.spec_from_file_location(made.stem, made)
    module = importlib.util.module_from_spec(spec)
    sys.modules[made.stem] = module
    spec.loader.exec_module(module)
    yield request.param, module
    del sys.modules[made.stem]


def test_a_variants_loss_and_gradient_are_those_of_its_equation(variant, one_rank):
    name, module = variant
    words = "--teacher T" if name == "on-policy-distillation" else ""
    args = flags_of(module, f"--context 400 {words}")
    args.reference = args.of_teacher = Table(REF).requires_grad_(False)
    trainer = Plain(Table(NEW))
    samples = plays()
    if name == "train-results":
        samples[1].logps[2] = module.NOT_SAMPLED
    in_loss = module.token_weights(module.group_advantages(samples), args)
    line = module.learn(trainer, in_loss, False, 0, 1, torch.device("cpu"), args)
    by_hand = Table(NEW)
    cuts = by_hand.table[1:].split([len(old) for old in OLD.values()])
    loss = expected(name, dict(zip(OLD, cuts, strict=True)), args)
    loss.backward()
    assert trainer.steps == 1
    assert line["loss"] == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(trainer.module.table.grad, by_hand.table.grad, atol=1e-6, rtol=1e-5)


def test_a_variant_changes_few_lines_and_says_what_it_is():
    for diff in DIFFS:
        head, changes = diff.read_text().split("--- grpo.py\n")
        changed = sum(line[:1] == "+" for line in changes.splitlines()[1:])
        assert changed <= 15, (diff, changed)
        words = " ".join(head.split())
        assert all(part in words for part in ("arXiv:", "What changes:", "What to expect:")), diff


@pytest.mark.slow
def test_a_variant_trains(variant, babble, student, tmp_path, monkeypatch):
    name, module = variant
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = f"--teacher {student}" if name == "on-policy-distillation" else ""
    out = tmp_path / "rl"
    train(module.__file__, out, babble, "--steps 2", words)
    assert [line["step"] for line in read_jsonl(out / "log.jsonl")] == [1, 2]
