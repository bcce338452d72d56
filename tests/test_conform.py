"""The conformance kit: its answers are those of our stages, and it names planted departures."""
import json
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, flags_of
from test_variants import CPU, made

import arpo
import grpo

sys.path.insert(0, str(ROOT / "variants"))
import conform  # noqa: E402

CASES = json.loads(conform.CASES.read_text())
FLAGS = {"grpo-batch": "--loss-norm batch", "dapo": "--loss-norm batch --drop-uniform",
         "on-policy-distillation": "--teacher T"}
VARIANTS = {"dr-grpo", "rloo", "gspo", "cispo", "kl", "recompute", "on-policy-distillation"}


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
    stage = made(name, tmp_path) if name in VARIANTS else arpo if name == "arpo" else grpo
    verdict, *_ = conform.judge(lambda case: loss_of(stage, case), CASES, name)
    assert verdict == "equal"


def swapped(stage, case):
    return loss_of(stage, case | {"clip_low": case["clip_high"], "clip_high": case["clip_low"]})


def reverse_kl(stage, case):
    """k3 with its arguments swapped; at beta 0 the stage has no KL term."""
    loss, gradient = loss_of(stage, case | {"beta": 0.0})
    ended = ~np.isin(case["stop"], grpo.OVERLENGTH)
    weight = np.zeros_like(case["logps"])
    for g in np.unique(case["group"][ended]):
        plays = ended & (case["group"] == g)
        weight[plays] = case["mask"][plays] / case["mask"][plays].sum() / 6  # of 7 groups, one ends
    far = case["logps"] - case["reference"]
    distance = (weight * (np.exp(far) - far - 1)).sum()
    return loss + case["beta"] * distance, gradient + case["beta"] * weight * (np.exp(far) - 1)


def changed(old, new):
    """A stage's loss with a line of its code replaced."""
    def loss(stage, case, folder):
        text = (ROOT / "grpo.py").read_text()
        assert old in text
    return loss


@pytest.mark.parametrize("objective, departure", [
    ("grpo", "mean over the tokens of each play, then over plays"),
    ("grpo", "std with ddof 1"), ("dapo", "overlength plays kept in the denominator"),
    ("grpo-batch", "clip sides swapped"), ("kl", "KL of the other side")])
def test_a_planted_departure_is_named(objective, departure, one_rank):
    ...
