"""The conformance kit: its answers are those of our stages, and it names planted departures."""
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, flags_of
from test_variants import CPU, NAMES, make

import arpo
import grpo

sys.path.insert(0, str(ROOT / "variants"))
import cases  # noqa: E402
import conform  # noqa: E402

CASES = json.loads(cases.CASES.read_text())
FLAGS = {"grpo-batch": "--loss-norm batch", "dapo": "--loss-norm batch --drop-uniform",
         "on-policy-distillation": "--teacher T"}


class Trainer:
    """The parts of an engine that learn() needs, for a policy whose log-probabilities are given.
    loss: the sum of what went backward."""

    def __init__(self, logps):
        self.logps, self.loss = logps, 0.0

    def __call__(self, ids, positions, keep, temperature):
        logps = self.logps[ids[:, 0] // 100, : ids.shape[1]][keep]
        return logps, torch.zeros_like(logps)

    def backward(self, loss):
        self.loss = self.loss + loss

    def step(self):
        """The weights stay."""

    def get_global_grad_norm(self):
        return 0.0


def loss_of(stage, case):
    """The loss and gradient that a stage's own functions compute."""
    name = case["objective"]
    args = flags_of(stage, f"--context {case['length']} --group 3 " + FLAGS.get(name, ""))
    wanted = {"clip_low", "clip_high", "beta", "tis_cap"} & vars(args).keys()
    vars(args).update({key: case[key.removeprefix("tis_")] for key in wanted})
    tables = {key: torch.tensor(case[key]) for key in ("logps", "reference", "teacher", "old")}
    logps = tables["logps"].requires_grad_()
    args.reference, args.of_teacher = Trainer(tables["reference"]), Trainer(tables["teacher"])
    samples = []
    for i, n in enumerate(case["real"].sum(1)):
        ids = [100 * i, *case["ids"][i, 1:n].tolist()]  # the first token tells the table's row
        samples.append(stage.Sample(None, int(case["group"][i]), f"{i:02}", ids,
                                    case["mask"][i, :n].tolist(), case["engine"][i, :n].tolist(),
                                    stop=case["stop"][i], reward=float(case["reward"][i])))
    (groups,) = stage.split(stage.group_advantages(samples), args)
    in_loss, trainer = stage.token_weights(groups, args), Trainer(logps)
    if name == "recompute":
        stage.recompute_logps(Trainer(tables["old"]), in_loss, False, 0, 1, CPU, args)
    stage.learn(trainer, in_loss, False, 0, 1, CPU, args)
    return trainer.loss.item(), torch.autograd.grad(trainer.loss, logps)[0]


@pytest.mark.parametrize("name", CASES["objectives"])
def test_our_stages_compute_what_they_say(name, one_rank, tmp_path):
    stage = make(name, tmp_path) if name in NAMES else arpo if name == "arpo" else grpo
    verdict, *_ = conform.judge(lambda case: loss_of(stage, case), CASES, name)
    assert verdict == "equal"


@pytest.mark.parametrize("objective, right, wrong, named", [
    ("grpo", "(s, weight) for s in group]", "(s, 1 / sum(s.mask) / sum(map(len, kept))) "
     "for s in group]", "mean over the tokens of each play, then over plays"),
    ("grpo", "correction=0", "correction=1", "std with ddof 1"),
    ("dapo", "tokens = [sum(sum(s.mask) for s in group) for group in kept]",
     "tokens = [sum(sum(s.mask) for s in group) for group in groups.values()]",
     "overlength plays kept in the denominator"),
    ("grpo-batch", "clamp(1 - args.clip_low, 1 + args.clip_high)",
     "clamp(1 - args.clip_high, 1 + args.clip_low)", "clip sides swapped"),
    ("kl", "away.exp() - away - 1", "(-away).exp() + away - 1", "KL of the other side")])
def test_a_departure_planted_in_a_stage_is_named(objective, right, wrong, named, one_rank,
                                                 tmp_path):
    stage = make("kl", tmp_path) if objective == "kl" else grpo
    text, path = Path(stage.__file__).read_text(), tmp_path / "planted.py"
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    stage = SimpleNamespace(**runpy.run_path(str(path)))
    verdict, factor, _ = conform.judge(lambda case: loss_of(stage, case), CASES, objective)
    assert verdict == named and factor is not None


def test_the_command_reads_a_file_and_says_what_departs(tmp_path):
    (tmp_path / "mine.py").write_text("def flat(case):\n"
        "    return None if case['objective'] == 'kl' else (1.0, 0 * case['logps'])\n")
    ran = subprocess.run([sys.executable, conform.__file__, tmp_path / "mine.py:flat", "--only",
                          "kl", "gspo"], capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1 and "not offered" in lines[1] and "gradient is 0" in lines[2]


def test_cases_json_is_what_its_command_makes(tmp_path, monkeypatch):
    def read():
        return json.loads(cases.CASES.read_text(), parse_float=lambda x: round(float(x), 9))

    kept = read()
    monkeypatch.setattr(cases, "CASES", tmp_path / "cases.json")
    cases.make()
    assert read() == kept


def test_the_pages_cell_computes_an_objective_from_the_file_alone():
    (cell,) = re.findall("```python\n(.*?)```", (ROOT / "docs/conform.md").read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", cell], cwd=ROOT, capture_output=True, text=True)
    loss, expected = map(float, ran.stdout.split())
    assert loss == pytest.approx(expected, rel=1e-9)
