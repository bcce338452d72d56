"""Each diff in variants/ makes a stage of grpo.py whose loss is the one that its head states, and
each of variants/faults/ a wrong one."""
import copy
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from inspect import getsource
from pathlib import Path

import pytest
import torch
from babble import Babble
from conftest import ROOT, Plain, Replies, equal, flags_of, numbers, train, train_broken

import grpo
import zero3
from runtime import read_jsonl

NAMES = sorted(diff.stem for diff in (ROOT / "variants").glob("*.diff"))
# those that change more than the loss; a test of its own trains stretch
LOOPS = "kl", "on-policy-distillation", "recompute", "refill", "train-results"
FAULTS = sorted((ROOT / "variants" / "faults").glob("*.diff"))
CPU, WORLD = torch.device("cpu"), Babble()
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
        return logps, logps.square()  # no entropy, but a function of the parameters


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
    if name == "entropy":
        square = {play: new[play].square().sum() for play in new}
        bonus = (square["a"] + square["b"]) / 5 / 2 + (square["c"] + square["d"]) / 3 / 2
        return (-(smaller(w["a"], one).sum() + smaller(w["b"], -one).sum()) / 5 / 2
                - args.entropy * bonus)
    if name == "on-policy-distillation":
        total = {play: smaller(w[play], ref[play] - old[play]).sum() for play in new}
        return -(total["a"] + total["b"]) / 5 / 2 - (total["c"] + total["d"]) / 3 / 2
    if name == "recompute":  # the trainer's old policy is REF, the engine's OLD
        w = {play: (new[play] - ref[play]).exp() for play in "ab"}
        w_engine = {play: (ref[play] - old[play]).exp().clamp(max=args.tis_cap) for play in "ab"}
        return -((w_engine["a"] * smaller(w["a"], one)).sum()
                 + (w_engine["b"] * smaller(w["b"], -one)).sum()) / 5 / 2
    if name == "refill":  # c and d are left out, so one group counts
        return -(smaller(w["a"], one).sum() + smaller(w["b"], -one).sum()) / 5
    if name == "stretch":
        return -(smaller(w["a"], one).sum() + smaller(w["b"], -one).sum()) / 5 / 2
    if name == "train-results":  # a tool wrote the second token of b
        new_b = new["b"][1]
        w["b"] = torch.stack([w["b"][0], (new_b - new_b.detach()).exp(), w["b"][2]])
        return -(smaller(w["a"], one).sum() + smaller(w["b"], -one).sum()) / 5 / 2
    raise KeyError(f"write down the loss of variants/{name}.diff here")


@cache
def make(name, folder):
    """The module of a variant, made once in a folder, by the command that the README gives."""
    path = folder / f"grpo_{name.replace('-', '_')}.py"
    patch = subprocess.run(["patch", "-o", path, ROOT / "grpo.py", ROOT / "variants" /
                            f"{name}.diff"], capture_output=True, text=True)
    assert not patch.returncode and not re.search("FAILED|fuzz", patch.stdout), (
        f"variants/{name}.diff no longer applies to grpo.py. Mend it by hand: apply it "
        f"with patch, edit the result, and diff -U2 it against grpo.py\n{patch.stdout}")
    ruff = [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", path]
    assert not subprocess.run(ruff).returncode
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(name) -> the module of a variant."""
    folder = tmp_path_factory.mktemp("variants")
    return lambda name: make(name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_variants_loss_and_gradient_are_those_of_its_equation(name, made, one_rank):
    module = made(name)
    words = "--teacher T" if name == "on-policy-distillation" else ""
    args = flags_of(module, f"--context 400 --group 2 {words}")
    args.reference = args.of_teacher = Table(REF).requires_grad_(False)
    # the others change the loss alone, and read no flag that they have removed
    assert name in (*LOOPS, "stretch") or getsource(module.main) == getsource(grpo.main)
    read = re.findall(r"\bargs\.(\w+)", Path(module.__file__).read_text())
    assert {*read} <= vars(args).keys() | {"world_flags"}
    trainer = Plain(Table(NEW))
    samples = plays()
    if name == "train-results":
        samples[1].logps[2] = module.NOT_SAMPLED
    (groups,) = module.split(module.group_advantages(samples), args)
    in_loss = module.token_weights(groups, args)
    if name == "recompute":
        module.recompute_logps(Plain(Table(REF)), in_loss, False, 0, 1, CPU, args)
    for s in samples:
        s.fresh = 2  # stretch: earlier weights sampled the first token
    line = module.learn(trainer, in_loss, False, 0, 1, CPU, args)
    by_hand = Table(NEW)
    cuts = by_hand.table[1:].split([len(old) for old in OLD.values()])
    loss = expected(name, dict(zip(OLD, cuts, strict=True)), args)
    loss.backward()
    assert trainer.steps == 1
    assert line["loss"] == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(trainer.module.table.grad, by_hand.table.grad, atol=1e-6, rtol=1e-5)
    if name == "stretch":  # compared: the second token of a, and two of b
        assert line["dlogp_mean"] == pytest.approx((0.2 + 0.4 + 0.6) / 3)
        assert line["stale"] == pytest.approx(2 / 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_variant_trains(name, made, babble, student, tmp_path):
    words = f"--teacher {student}" if name == "on-policy-distillation" else ""
    train(made(name).__file__, tmp_path, babble, "--steps 1", words)
    assert [line["step"] for line in read_jsonl(tmp_path / "log.jsonl")] == [1]


# ---------------------------------------------------------------------------------------- refill

@pytest.mark.parametrize("differing, kinds", [(3, "...u."), (2, "..uu.."), (0, "u" * 12)])
def test_refill_plays_other_tasks_until_enough_groups_differ_or_its_batches_are_spent(
        differing, kinds, made, one_rank, template):
    def script(name, text):  # of play/0+extra/query/place in the group/turn: so many queries differ
        _, _, query, place, _ = name.split("/")
        return (place if int(query) < differing else "7"), 0.5

    module = made("refill")
    args = flags_of(module, "--refill 2 --prompts 4 --group 3 --context 4000")
    tasks = [{"id": f"{i}", "query": f"Go on, {i}.", "turns": 1 + i % 3, "success": 0.5}
             for i in range(12)]
    samples = module.play_until_full(Replies(template, script), template, WORLD, tasks, 0, "digits",
                                     args)
    groups = module.by_group(samples)
    assert "".join("u" if module.uniform(group) else "." for group in groups.values()) == kinds
    played = [{s.record["task"]["id"] for s in group} for group in groups.values()]
    assert all(len(ids) == 1 for ids in played) and len(set.union(*played)) == len(kinds)
    (kept,) = module.split(module.group_advantages(samples), args)
    assert len(kept) == max(1, kinds.count(".")), "one to compare with the engine"


# --------------------------------------------------------------------------------------- stretch

@pytest.fixture
def updates_of(made, one_rank, template):
    """updates_of(turns of each task, flags, rewards) -> [(samples, waiting)] of as many updates as
    there are rewards. Every reply is "1 2" and its end, four tokens."""
    module = made("stretch")

    def play(turns, words, rewards):
        tasks = [{"id": f"{i}", "query": f"Go on, {i}.", "turns": n, "success": 0.5}
                 for i, n in enumerate(turns)]
        args, waiting, found = flags_of(module, f"{words} --max-turns 9"), [], []
        llm = Replies(template, lambda *_: ("1 2", 0.5))
        for step, reward in enumerate(rewards):
            batch = [tasks[i] for i in zero3.batch_of(step, len(tasks), args.prompts, args.seed)]
            samples, waiting = module.play_stretch(llm, template, WORLD, batch, step,
                                                   step + 1 == len(rewards), waiting, reward, args)
            found.append((samples, copy.deepcopy(waiting)))
        return found
    return play


@pytest.mark.parametrize("k, replies", [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (99, 7)])
def test_a_play_waits_at_the_end_of_the_reply_in_which_it_has_sampled_k_tokens(
        k, replies, updates_of):
    (samples, waiting), *_, (_, left) = updates_of(
        (1, 7), f"--stretch {k} --group 2 --prompts 2", ["digits"] * 4)
    assert {s.record["turns"] for s in samples} == ({1, 7} if replies == 7 else {1})
    assert {s.episode.turns for s in waiting} == ({replies} if replies < 7 else set())
    assert not left, "the last update plays to the end"


def test_a_group_is_learnt_once_with_all_its_plays_and_none_is_lost(updates_of):
    found = updates_of((1, 2, 3, 4, 5, 6), "--stretch 5 --group 3 --prompts 2", ["digits"] * 6)
    names = [s.seed_name for samples, _ in found for s in samples]
    assert len(names) == len(set(names)) == 6 * 2 * 3 and any(waiting for _, waiting in found)
    for samples, waiting in found:
        groups = Counter((s.group, s.record["task"]["id"]) for s in samples)
        assert set(groups.values()) == {3}
        assert not {s.group for s in samples} & {s.group for s in waiting}


def test_where_no_group_is_whole_all_plays_get_another_stretch_under_the_same_weights(updates_of):
    (samples, waiting), _ = updates_of((2, 5), "--stretch 4 --group 2 --prompts 2", ["digits"] * 2)
    assert {s.record["turns"] for s in samples} == {2} and not any(s.fresh for s in samples)
    assert {s.episode.turns for s in waiting} == {2}


def test_a_group_is_judged_by_the_reward_in_force_when_it_is_whole(updates_of):
    _, (samples, _), _ = updates_of(
        (1, 2), "--stretch 4 --group 2 --prompts 2", ["digits", "apart", "digits"])
    assert {(s.record["turns"], s.record["reward_name"]) for s in samples} == {
        (2, "apart"), (1, "apart")}


@pytest.mark.slow
def test_a_stretched_run_is_the_same_on_two_ranks_and_after_a_kill(made, babble, tmp_path):
    stage = made("stretch").__file__
    words = f"{babble} --stretch 4 --steps 4"
    train(stage, tmp_path / "one", words)
    lines = read_jsonl(tmp_path / "one" / "log.jsonl")
    assert all(line["dlogp_mean"] <= 1e-4 for line in lines)
    assert max(line["stale"] for line in lines) > 0
    rows = [path.read_text().count("\n") for path in (tmp_path / "one" / "rollouts").iterdir()]
    assert sum(rows) == 4 * 2 * 8, "every query of every update is learnt"
    train_broken(stage, tmp_path / "killed", words, signals=["KILL"])
    assert equal(tmp_path / "one", tmp_path / "killed")
    train(stage, tmp_path / "two", words, "--steps 2 --decay 0", ranks=2)
    for one, two in zip(lines[:2], numbers(tmp_path / "two"), strict=False):
        for key in ("tokens", "stale", "reward", "loss", "gnorm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


# ---------------------------------------------------------------------------------------- faults

@pytest.mark.parametrize("diff", FAULTS, ids=lambda diff: diff.stem)
def test_a_fault_is_one_to_three_lines_that_apply(diff, tmp_path):
    changes = diff.read_text().partition("\n--- ")[2].splitlines()
    stage = ROOT / changes[0]
    patch = subprocess.run(["patch", "-o", tmp_path / stage.name, stage, diff], capture_output=True)
    assert not patch.returncode and b"fuzz" not in patch.stdout, patch.stdout
    assert sum(line[:1] == "+" for line in changes[2:]) <= 3
