"""ARPO: the law of forking, whole groups, a shared past, both attributions; with nothing to fork it is GRPO."""
import itertools
import math
import random
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import arpo
import grpo
import sft
from evaluate import read_jsonl, write_jsonl

DEFAULTS = dict(
    context=4000, turn_tokens=500, max_turns=6, max_seconds=1e9, failure_rate=0.0, system_prompt="short", seed=0, concurrency=64, tp=1,
    group=8, start=0, branch="paper", weight=0.2, branch_base=0.5, threshold=0.5, branches=1, entropy_tokens=20, entropy_top=10,
    branch_penalty=0.0, attribution="soft", keep_gradient=False, entropy_advantage=0.0,
    no_std=False, keep_overlength=False, drop_uniform=False, loss_norm="group", clip_low=0.2, clip_high=0.28)
CALL = '<think>look</think>\n<tool_call>{"name": "SearchCity", "arguments": {"state": "nowhere"}}</tool_call>'
ANSWER, BREACH = "<think>done</think>\n<answer>no plan</answer>", "no tags at all"


def flags(**changes):
    return Namespace(**{**DEFAULTS, **changes})


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


# ---------------------------------------------------------------------------------------------------- the law


def forks_per_decision(rise, a, n=4000):
    """Of n plays that come to a decision with dE = rise, the fraction that forks. V = e: nats are units of E."""
    forked = 0
    for i in range(n):
        s = arpo.Sample(Fake(), 0, f"play/0/{i}", names=["a", "b"], baseline=1.0)
        tokens = [1.0 + rise] if a.branch == "paper" else [(1.0 + rise) / 4] * 4
        forked += len(arpo.branch(s, tokens, 1.0, a)) > 0
    return forked / n


class Fake:
    """As much of an episode as a decision needs."""
    turns = 1

    def __init__(self):
        self.sandbox = SimpleNamespace(seed="")

    def fork(self):
        return Fake()


@pytest.mark.parametrize("rise", [-9.0, -1.0, -0.25, 0.0, 0.25, 1.0, 9.0])
def test_released_forks_with_probability_half_plus_w_times_the_rise(rise):
    for weight in (0.2, 0.5):
        expected = min(max(0.5 + weight * rise, 0), 1)
        assert forks_per_decision(rise, flags(branch="released", weight=weight)) == pytest.approx(expected, abs=0.03)


def test_paper_forks_exactly_above_the_threshold():
    assert [forks_per_decision(rise, flags(), 50) for rise in (-1.0, -0.01, 0.0, 0.01, 1.0)] == [0, 0, 0, 1, 1]
    strict = flags(threshold=0.6, weight=0.4)
    assert [forks_per_decision(rise, strict, 50) for rise in (0.24, 0.26)] == [0, 1]


def test_forks_in_a_row_become_less_likely_with_the_branch_penalty():
    a = flags(branch="released", branch_penalty=0.25)
    assert [arpo.chance(0.5, c, a) for c in range(6)] == pytest.approx([0.6, 0.45, 0.3, 0.15, 0, 0])
    s = arpo.Sample(Fake(), 0, "play/0/0", names=list("abc"), baseline=0.0)
    sure, never = flags(branch="released", branch_base=2.0), flags(branch="released", branch_base=-2.0)
    twins = arpo.branch(s, [0.0], 1.0, sure) + arpo.branch(s, [0.0], 1.0, sure)
    assert (s.streak, [t.streak for t in twins]) == (2, [1, 2])
    arpo.branch(s, [0.0], 1.0, never)
    assert s.streak == 0


def entry(*p):
    return {i: SimpleNamespace(logprob=math.log(x) if x else -math.inf) for i, x in enumerate(p)}


def test_entropy_by_hand():
    a = flags(entropy_tokens=2)
    rows = [entry(0.5, 0.5), entry(1.0, 0.0), entry(0.25, 0.25)]
    assert arpo.entropy(rows, a) == pytest.approx([math.log(2), 0.0])
    assert arpo.entropy(rows, flags(entropy_advantage=0.2)) == pytest.approx([math.log(2), 0.0, 0.5 * math.log(4)])


def test_the_papers_entropy_is_a_mean_and_the_released_codes_a_sum_of_the_first_tokens():
    for law, expected in ("paper", 2.0), ("released", 4.0):
        s = arpo.Sample(Fake(), 0, "play/0/0", names=["a"], baseline=1.0)
        arpo.branch(s, [3.0, 5.0, 100.0], 2.0, flags(branch=law, entropy_tokens=2))
        assert s.decisions == [(expected, expected - 1.0)]


# ------------------------------------------------------------------------------------------------------ rollout


class Engine:
    """Says what `script(request id, prompt)` returns, in a random order of finishing; each first token as sure as it likes."""

    def __init__(self, tokenizer, script, seed):
        self.tokenizer, self.script, self.rng, self.waiting, self.requests = tokenizer, script, random.Random(seed), {}, []

    def add_request(self, name, prompt, params):
        self.waiting[name] = prompt["prompt_token_ids"]
        self.requests.append((name, prompt["prompt_token_ids"], params))

    def step(self):
        name = self.rng.choice(sorted(self.waiting))
        text, doubt = self.script(name, self.waiting.pop(name))
        ids = self.tokenizer.encode(text, add_special_tokens=False) + [self.tokenizer.eos_token_id]
        rest = (1 - doubt) / 2
        entries = [{t: SimpleNamespace(logprob=math.log(0.5 + rest)), -1: SimpleNamespace(logprob=math.log(0.5 - rest or 1e-9))}
                   for t in ids]
        reply = SimpleNamespace(token_ids=ids, logprobs=entries)
        return [SimpleNamespace(finished=True, request_id=name, outputs=[reply])]


def play(script, tokenizer, database, monkeypatch, a, tasks=3, module=arpo, seed=0):
    monkeypatch.setattr(module, "shared_counter", lambda name, n, a: iter(range(n)))
    engine = Engine(tokenizer, script, seed)
    rows = [{"id": f"t{i}", "query": f"Where to, traveller {i}?"} for i in range(tasks)]
    samples = module.rollout(SimpleNamespace(llm_engine=engine), tokenizer, database, rows, "play/0", a.group, 1.0, 1.0, a)
    return samples, engine


def wander(seed, endings=(CALL, CALL, ANSWER, BREACH)):
    """A policy of random replies and random doubts."""
    return lambda name, prompt: (random.Random(f"{seed}{name}").choice(endings), random.Random(f"{seed}{name}d").random())


ENDINGS = {"answer": [ANSWER], "format": [BREACH], "turns": [CALL], "mixed": [CALL, CALL, ANSWER, BREACH]}


@pytest.mark.parametrize("law,ending", list(itertools.product(("paper", "released"), [*ENDINGS, "context"])))
def test_every_group_ends_with_g_whatever_ends_it(law, ending, tokenizer, mini, monkeypatch):
    for seed, group, start, branches in itertools.product(range(3), (1, 5, 8), (0, 1, 8), (1, 3)):
        a = flags(branch=law, group=group, start=start, branches=branches, concurrency=8, context=420 if ending == "context" else 4000)
        samples, _ = play(wander(seed, ENDINGS.get(ending, [CALL])), tokenizer, mini, monkeypatch, a, seed=seed)
        assert Counter(s.query for s in samples) == {0: group, 1: group, 2: group}
        assert {s.name for s in samples} == {f"play/0/{q}/{g}" for q in range(3) for g in range(group)}
        assert ending == "mixed" or {s.episode.stop for s in samples} == {ending}
        assert all(s.past or s.filled or int(s.name[-1]) < (start or (group + 1) // 2) for s in samples)


def test_forks_share_their_past_token_for_token_and_go_their_own_way(tokenizer, mini, monkeypatch):
    forks = 0
    for law, seed in itertools.product(("paper", "released"), range(4)):
        a = flags(branch=law, failure_rate=0.3)
        samples, engine = play(wander(seed), tokenizer, mini, monkeypatch, a, seed=seed)
        by_name = {s.name: s for s in samples}
        for s in samples:
            assert len(s.ids) == len(s.mask) == len(s.logps)
            for name, n in s.past.items():
                parent = by_name[name]
                assert (s.ids[:n], s.mask[:n], s.logps[:n]) == (parent.ids[:n], parent.mask[:n], parent.logps[:n])
                assert s.ids is not parent.ids and s.episode.messages is not parent.episode.messages
            if s.past:
                forks += 1
                parent, n = list(s.past.items())[-1]
                assert n == s.shared and s.mask[n - 1] == 0 and s.mask[n] == 1  # an observation lies behind it, a reply ahead
                shared = 2 + 2 * s.depth
                assert s.episode.messages[:shared] == by_name[parent].episode.messages[:shared]
                assert s.episode.sandbox is not by_name[parent].episode.sandbox
                first = next(prompt for name, prompt, _ in engine.requests if name == f"{s.name}/{s.depth}")
                assert first == s.ids[:n]  # what the engine was asked is what it had read for the parent
    assert forks > 20


def test_a_fork_inherits_the_failures_so_far_and_draws_its_own_later(tokenizer, mini):
    a = flags(failure_rate=0.5, branch_base=2.0)
    s = arpo.new_sample({"id": "t", "query": "q"}, 0, "play/0/0/0", mini, tokenizer, a)
    for _ in range(4):
        s.episode.step(CALL)
    s.names = ["play/0/0/1"]
    (twin,) = arpo.branch(s, [1.0], 1.0, a)
    assert (twin.episode.failures, twin.episode.turns, twin.episode.sandbox.draws) == (s.episode.failures, 4, 4)
    here, there = ([x.episode.sandbox.call("SearchCity", {"state": "x"}) for _ in range(30)] for x in (s, twin))
    assert here != there


def test_an_observation_is_decided_on_once(tokenizer, mini, monkeypatch):
    # paper: doubt after the first observation alone; a fork's reply to that same observation must not fork again
    script = lambda name, prompt: (CALL if name.endswith("/0") else ANSWER, 0.9 if name.endswith("/1") else 0.1)
    samples, _ = play(script, tokenizer, mini, monkeypatch, flags(group=4, start=1, branches=1), tasks=1)
    assert sum(bool(s.past) for s in samples) == 1 and sum(s.filled for s in samples) == 2


def test_what_is_left_is_begun_at_once_and_from_scratch(tokenizer, mini, monkeypatch):
    samples, engine = play(lambda name, prompt: (ANSWER, 0.5), tokenizer, mini, monkeypatch, flags(start=2), tasks=1)
    assert [s.filled for s in samples] == [False] * 2 + [True] * 6 and not any(s.past for s in samples)
    assert len(engine.requests) == 8 and len(engine.waiting) == 0


def test_baselines_are_a_plays_own(tokenizer, mini, monkeypatch):
    script = lambda name, prompt: (CALL, 0.2 + 0.1 * int(name.split("/")[2]))  # each query with a doubt of its own
    for law in ("paper", "released"):
        samples, _ = play(script, tokenizer, mini, monkeypatch, flags(branch=law))
        assert all(abs(rise) < 1e-9 for s in samples for _, rise in s.decisions)
        assert len({round(s.baseline, 9) for s in samples if not s.filled and s.baseline is not None}) == 3


def test_the_likeliest_tokens_are_asked_for_only_while_something_can_fork(tokenizer, mini, monkeypatch):
    _, engine = play(wander(0), tokenizer, mini, monkeypatch, flags(start=8))
    assert {params.logprobs for _, _, params in engine.requests} == {0}
    _, engine = play(wander(0), tokenizer, mini, monkeypatch, flags(start=8, entropy_advantage=0.2))
    assert {params.logprobs for _, _, params in engine.requests} == {10}


def test_all_entropies_are_there_for_the_entropy_weighted_advantage(tokenizer, mini, monkeypatch):
    for law in ("paper", "released"):
        samples, _ = play(wander(1), tokenizer, mini, monkeypatch, flags(branch=law, entropy_advantage=0.2))
        assert all(len(s.entropies) == sum(s.mask) for s in samples)


# --------------------------------------------------------------------------------------------------------- loss


def family():
    """a; b forked from a after 4 tokens; c from b after 6; d by itself. Two prompt tokens each, the rest the policy's."""
    make = lambda name, n, reward, **more: arpo.Sample(None, 0, name, ids=[1] * n, mask=[0, 0] + [1] * (n - 2), logps=[0.0] * n,
                                                       stop="answer", reward=reward, entropies=[1.0] * (n - 2), **more)
    return [make("a", 7, 1.0), make("b", 8, 3.0, past={"a": 4}, shared=4), make("c", 7, 5.0, past={"a": 4, "b": 6}, shared=6),
            make("d", 5, 7.0)]


def gradients(samples, a):
    """d loss / d (log pi of a policy token), {sample: (its policy tokens)}, at w = 1."""
    weighted = arpo.token_weights(arpo.group_advantages(samples, a), a)
    logps, advantage, weight = arpo.per_token(weighted, "cpu")
    logps.requires_grad_()
    arpo.policy_loss(logps, logps.detach(), advantage, weight, a)[0].backward()
    return dict(zip((s.name for s, _ in weighted), logps.grad.split([sum(s.mask) for s, _ in weighted])))


def test_soft_attribution_trains_every_row_with_its_own_advantage():
    found = gradients(family(), flags(no_std=True))  # advantages -3 -1 1 3; 5 + 6 + 5 + 3 policy tokens
    for name, advantage, n in (("a", -3, 5), ("b", -1, 6), ("c", 1, 5), ("d", 3, 3)):
        assert found[name].tolist() == pytest.approx([-advantage / 19] * n)


def test_hard_attribution_trains_a_shared_token_once_with_the_mean_of_its_descendants():
    found = gradients(family(), flags(no_std=True, attribution="hard"))
    # sampled tokens: a 5, b 6 - 2, c 5 - 4, d 3 = 13. The first two belong to a, b, c; the next two of b to b and c
    assert (found["a"][:2] + found["b"][:2] + found["c"][:2]).tolist() == pytest.approx([1 / 13] * 2)  # mean of -3 -1 1
    assert found["a"][2:].tolist() == pytest.approx([3 / 13] * 3)
    assert (found["b"][2:4] + found["c"][2:4]).tolist() == pytest.approx([0, 0], abs=1e-6)  # mean of -1 and 1
    assert found["b"][4:].tolist() == pytest.approx([1 / 13] * 2) and found["c"][4:].tolist() == pytest.approx([-1 / 13])
    assert found["d"].tolist() == pytest.approx([-3 / 13] * 3)


def test_hard_attribution_leaves_overlength_rows_out():
    samples = family()
    samples[1].stop = "context"  # b: counts in the mean of the rewards, but not in what its ancestors' tokens learn
    found = gradients(samples, flags(no_std=True, attribution="hard"))
    assert "b" not in found and (found["a"][:2] + found["c"][:2]).tolist() == pytest.approx([1 / 11] * 2)
    assert found["c"][2:].tolist() == pytest.approx([-1 / 11] * 3)


def test_without_forks_both_attributions_weigh_as_grpo():
    plain = [vars(s) for s in family()]
    plain[1]["stop"] = "turns"
    keys = ("query", "name", "ids", "mask", "logps", "stop", "reward")
    theirs = [grpo.Sample(None, **{k: s[k] for k in keys}) for s in plain]
    for attribution, norm, keep in itertools.product(("soft", "hard"), ("group", "batch"), (False, True)):
        a = flags(attribution=attribution, loss_norm=norm, keep_overlength=keep)
        ours = [arpo.Sample(None, **{k: s[k] for k in keys}) for s in plain]
        one = arpo.per_token(arpo.token_weights(arpo.group_advantages(ours, a), a), "cpu")
        two = grpo.per_token(grpo.token_weights(grpo.group_advantages(theirs, a), a), "cpu")
        assert all(torch.equal(x, y) for x, y in zip(one, two))


def test_a_kept_gradient_has_the_clipped_value_and_the_bounds_slope():
    logw = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log().requires_grad_()
    advantage, weight = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0]), torch.ones(5)
    for keep, slope in (False, 0.0), (True, -2 * 1.28):
        loss, side = arpo.policy_loss(logw, torch.zeros(5), advantage, weight, flags(keep_gradient=keep))
        (grad,) = torch.autograd.grad(loss, logw)
        assert loss.item() == pytest.approx(-(2 * 1.28 - 2 * 1.5 + 2 * 0.5 - 2 * 0.8 + 2 * 1.1))
        assert grad.tolist() == pytest.approx([slope, 3.0, -1.0, 0.0, -2.2]) and side.tolist() == [1, 0, 0, -1, 0]


def test_unsure_tokens_weigh_more_with_the_entropy_advantage():
    samples = family()[:1] + family()[3:]
    samples[0].entropies, samples[1].entropies = [0.0, 2.0, 0.0, 2.0, 0.0], [2.0, 0.0, 2.0]
    found = gradients(samples, flags(no_std=True, entropy_advantage=0.2))  # mean 1, std 1: z is -1 or 1
    assert found["a"].tolist() == pytest.approx([3 * z / 8 for z in (0.8, 1.2, 0.8, 1.2, 0.8)], rel=1e-4)
    assert found["d"].tolist() == pytest.approx([-3 * z / 8 for z in (1.2, 0.8, 1.2)], rel=1e-4)


# --------------------------------------------------------------------------------------------- whole processes


@pytest.fixture(scope="module")
def student(root, tmp_path_factory):
    """A tiny model that has seen a call and then an answer: rewards differ, and there are observations to fork at."""
    folder = tmp_path_factory.mktemp("student")
    synth = [sys.executable, "synth.py"]
    run = lambda *command: subprocess.run([*map(str, command)], cwd=root, check=True, capture_output=True)
    run(*synth, "tasks", "--database", "database/mini", "--n", 6, "--days", 3, "--out", folder / "tasks.jsonl")
    run(*synth, "episodes", "--database", "database/mini", "--tasks", folder / "tasks.jsonl", "--out", folder / "solved.jsonl")
    rows = [{"messages": e["messages"][:4] + e["messages"][-1:]} for e in read_jsonl(folder / "solved.jsonl")]
    write_jsonl(folder / "episodes.jsonl", rows)
    sft.make_tiny([folder / "episodes.jsonl"], folder / "init", seed=0)
    run(sys.executable, "sft.py", "--model", folder / "init", "--data", folder / "episodes.jsonl", "--out", folder / "sft",
        "--batch", 3, "--steps", 60, "--lr", 3e-3, "--no-checkpointing")
    return folder


def train(script, student, root, out, *more):
    command = [sys.executable, script, "--model", student / "sft", "--tasks", student / "tasks.jsonl", "--out", out, "--database", "database/mini",
               "--system-prompt", "short", "--prompts", 2, "--group", 4, "--steps", 2, "--lr", 1e-3, "--context", 800, "--max-turns", 4,
               "--turn-tokens", 300, "--concurrency", 8, "--no-checkpointing", *more]
    done = subprocess.run([*map(str, command)], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_jsonl(out / "log.jsonl")


def test_with_nothing_to_fork_it_plays_and_learns_exactly_as_grpo(student, root, tmp_path):
    from safetensors.torch import load_file

    train("grpo.py", student, root, tmp_path / "grpo")
    train("arpo.py", student, root, tmp_path / "arpo", "--weight", 0, "--start", 4)
    for step in ("00001", "00002"):
        one, two = (read_jsonl(tmp_path / name / "rollouts" / f"{step}.jsonl") for name in ("grpo", "arpo"))
        assert one == two
    before, one, two = (load_file(f / "model.safetensors") for f in (student / "sft", tmp_path / "grpo", tmp_path / "arpo"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(before[name], one[name]) for name in one)


def test_a_real_engine_forks_and_still_agrees_with_the_trainer(student, root, tmp_path):
    lines = train("arpo.py", student, root, tmp_path, "--branch", "released", "--branch-base", 0.9, "--attribution", "hard",
                  "--entropy-advantage", 0.2, "--keep-gradient", "--branch-penalty", 0.05)
    for line in lines:
        assert line["dlogp_mean"] <= 1e-4 and line["forks"] + line["filled"] == 2 and line["forks"] > 0
        assert {"fork_depth", "prefixes", "entropy_after", "entropy_rise"} <= set(line)
    assert all(len(read_jsonl(f)) == 8 for f in (tmp_path / "rollouts").iterdir())
