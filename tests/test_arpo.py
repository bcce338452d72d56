"""ARPO: the rule for forks, whole groups, a shared past; without forks it equals GRPO."""
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import SEED, Replies, flags_of, numbers, train

import arpo
from runtime import read_jsonl, write_jsonl
from travel.world import Travel

CALL = ('<think>look</think>\n<tool_call>{"name": "SearchCity", "arguments": {"state": "nowhere"}}'
        "</tool_call>")
ANSWER, BREACH = "<think>done</think>\n<answer>no plan</answer>", "no tags at all"
LAWS = ("paper", "released")


def flags(words=""):
    short = "--system-prompt short --context 4000 --max-turns 6"
    return flags_of(arpo, f"--seed {SEED} {short} {words}")


@pytest.fixture(scope="module")
def world(mini):
    return Travel(mini)


# ---------------------------------------------------------------------------------------- the law

class Fake:
    """The parts of an episode that the decision to fork needs."""
    turns = 1

    def fork(self, seed):
        return Fake()


def share_of_forks(words, rise, n=2000):
    """Of plays at an observation where dE is `rise`; V = e, so that nats are units of E."""
    args, forks = flags(words), 0
    for i in range(n):
        s = arpo.Sample(Fake(), 0, f"play/0/{i}", baseline=1.0, entropies=[1.0 + rise])
        forks += arpo.branch(s, 1.0, ["a"], args) is not None
    return forks / n


@pytest.mark.parametrize("rise, weight", [(-9.0, 0.2), (-1.0, 0.2), (0.0, 0.2), (1.0, 0.5)])
def test_released_forks_with_probability_half_plus_w_times_the_rise(rise, weight):
    expected = min(max(0.5 + weight * rise, 0), 1)
    found = share_of_forks(f"--branch released --weight {weight}", rise)
    assert found == pytest.approx(expected, abs=0.06)  # more than five deviations


def test_paper_forks_exactly_where_entropy_has_risen():
    for rise, forks in (-0.01, 0), (0, 0), (0.01, 1):
        assert share_of_forks("--branch paper", rise, n=20) == forks


def entry(*chances):
    return {i: SimpleNamespace(logprob=math.log(p) if p else -math.inf)
            for i, p in enumerate(chances)}


def test_entropy_by_hand_of_the_first_tokens():
    rows = [entry(0.5, 0.5), entry(1.0, 0.0), entry(0.25, 0.25)]
    wanted = [math.log(2), 0.0, 0.5 * math.log(4)]
    assert arpo.entropy(rows) == pytest.approx(wanted)
    assert len(arpo.entropy([entry(0.5, 0.5)] * 50)) == arpo.PROBE


@pytest.mark.parametrize("law, expected", [("paper", 2.0), ("released", 2.0 * arpo.PROBE)])
def test_the_papers_entropy_is_a_mean_and_the_released_codes_a_sum_of_the_first_tokens(
        law, expected):
    s = arpo.Sample(Fake(), 0, "play/0/0", baseline=1.0, entropies=[3.0, 5.0] * (arpo.PROBE // 2))
    arpo.branch(s, 2.0, ["a"], flags(f"--branch {law}"))
    assert s.decisions == [(expected, expected - 1.0)]


@pytest.mark.parametrize("law, baseline", [("paper", 1.0), ("released", None)])
def test_a_fork_goes_on_from_its_parents_baseline_or_has_its_own(law, baseline):
    s = arpo.Sample(Fake(), 0, "play/0/0", baseline=1.0, entropies=[9.0])
    assert arpo.branch(s, 1.0, ["a"], flags(f"--branch {law} --weight 9")).baseline == baseline


def test_released_tosses_a_coin_at_every_observation_of_a_play():
    args, forks, episode = flags("--branch released --weight 0"), 0, Fake()
    for episode.turns in range(60):
        s = arpo.Sample(episode, 0, "play/0/0", baseline=1.0, entropies=[1.0])
        forks += arpo.branch(s, 1.0, ["a"], args) is not None
    assert 10 < forks < 50  # more than five deviations


# ---------------------------------------------------------------------------------------- rollout

@pytest.fixture
def play(one_rank, template, world):
    """play(script, flags) -> {name: sample} of three tasks, the engine that played them."""
    numbers = itertools.count()

    def play(script, words, tasks=3):
        args, llm = flags(words), Replies(template, script)
        rows = [{"id": f"t{i}", "query": f"Where to, traveller {i}?"} for i in range(tasks)]
        samples = arpo.rollout(llm, template, world, rows, f"play/{next(numbers)}", args.group,
                               1.0, 1.0, args)
        return {s.seed_name: s for s in samples}, llm
    return play


def wander(*endings, seed=SEED):
    """A policy with random replies and random entropies."""
    def script(name, text):
        draw = random.Random(f"{seed}{name}")
        return draw.choice(endings), draw.random()
    return script


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("stop, replies, context", [
    ("answer", [ANSWER], 4000), ("format", [BREACH], 4000), ("turns", [CALL], 4000),
    ("context", [CALL], 420), ("", [CALL, CALL, ANSWER, BREACH], 4000)])
def test_every_group_ends_with_g_whatever_ends_it(law, stop, replies, context, play):
    for group, start in (2, 0), (5, 1), (8, 0), (8, 8):
        samples, llm = play(wander(*replies), f"--branch {law} --group {group} --initial {start} "
                                              f"--concurrency 8 --context {context}")
        assert Counter(s.group for s in samples.values()) == dict.fromkeys(range(3), group)
        assert {name.split("/", 3)[3] for name in samples} == {str(g) for g in range(group)}
        assert not stop or {s.episode.stop for s in samples.values()} == {stop}
        assert not llm.running


@pytest.mark.parametrize("law", LAWS)
def test_forks_share_their_past_token_for_token_and_go_their_own_way(law, play):
    forks = 0
    for seed in range(4):
        script = wander(CALL, CALL, ANSWER, BREACH, seed=seed)
        words = f"--branch {law} --failure-rate 0.3"
        samples, llm = play(script, words)
        for s in samples.values():
            assert len(s.ids) == len(s.mask) == len(s.logps)
            if not s.parent:
                continue
            forks += 1
            n, parent, messages = s.shared, samples[s.parent], 2 + 2 * s.depth
            assert (s.ids[:n], s.mask[:n], s.logps[:n]) == (
                parent.ids[:n], parent.mask[:n], parent.logps[:n])
            assert s.mask[n - 1 : n + 1] == [0, 1]  # behind an observation, before a reply
            assert s.episode.messages[:messages] == parent.episode.messages[:messages]
            assert s.ids is not parent.ids and s.episode.messages is not parent.episode.messages
            assert s.episode.sandbox is not parent.episode.sandbox
            # its engine is asked for what it has read for the parent already
            assert llm.asked[f"{s.seed_name}/{s.depth}"][0] == s.ids[:n]
    assert forks > 0


def test_a_fork_inherits_the_failures_so_far_and_draws_its_own_later(template, world):
    args = flags("--failure-rate 0.5 --branch released --weight 9")
    s = arpo.new_sample({"id": "t", "query": "q"}, 0, "play/0/0/0", world, template, args)
    for _ in range(4):
        s.episode.step(CALL)
    s.baseline, s.entropies = 0.0, [1.0]
    twin = arpo.branch(s, 1.0, ["play/0/0/1"], args)
    assert (twin.episode.turns, twin.episode.sandbox.draws) == (4, 4)
    assert twin.episode.sandbox.failures == s.episode.sandbox.failures
    here, there = ([x.episode.sandbox.call("SearchCity", {"state": "x"}) for _ in range(30)]
                   for x in (s, twin))
    assert here != there


def test_paper_decides_on_an_observation_once(play):
    # doubt behind the first observation alone: a fork's reply to that same one must not fork again
    def script(name, text):
        turn = name.split("/")[-1]
        return (CALL if turn == "0" else ANSWER), (0.9 if turn == "1" else 0.1)

    samples, _ = play(script, "--group 4 --initial 1", tasks=1)
    assert [bool(samples[f"play/0/0/{g}"].parent) for g in range(4)] == [False, True, False, False]


def test_released_forks_at_every_observation_while_there_are_plays_to_begin(play):
    # the first reply's doubt is the baseline, every other's is a higher one, and so is the chance
    def script(name, text):
        return CALL, (0.0 if name.split("/")[-1] == "0" else 0.9)

    words = "--branch released --weight 1000 --group 4 --initial 4 --max-turns 3"
    samples, _ = play(script, words)
    assert not any(s.parent for s in samples.values())
    samples, _ = play(script, words.replace("--initial 4", "--initial 2"))
    assert all(s.parent for name, s in samples.items() if name[-1] in "23")


@pytest.mark.parametrize("law", LAWS)
def test_baselines_are_a_plays_own(law, play):
    # each query has a doubt of its own, the same at all of its turns: no entropy ever rises
    samples, _ = play(lambda name, _: (CALL, 0.2 + 0.1 * int(name.split("/")[2])),
                      f"--branch {law}")
    rises = [rise for s in samples.values() for _, rise in s.decisions]
    assert rises and max(map(abs, rises)) < 1e-9
    assert len({round(s.baseline, 9) for s in samples.values() if s.baseline is not None}) == 3


# ------------------------------------------------------------------------------------------- loss

def family():
    """Three samples of one query: a; b, forked from a after 4 tokens; c, from b after 6; and d
    alone. The prompt has two tokens."""
    def make(name, n, reward, **more):
        return arpo.Sample(None, 0, name, [1] * n, [0, 0] + [1] * (n - 2), [0.0] * n,
                           stop="answer", reward=reward, entropies=[1.0] * (n - 2), **more)

    return [make("a", 7, 1.0), make("b", 8, 3.0, parent="a", shared=4),
            make("c", 7, 5.0, parent="b", shared=6), make("d", 5, 7.0)]


def test_every_play_trains_its_shared_past_too_which_was_sampled_once():
    in_loss, root5 = arpo.token_weights(arpo.group_advantages(family()), flags()), math.sqrt(5)
    _, advantage, weight, _ = arpo.per_token(in_loss, "cpu")
    assert (advantage * weight).tolist() == pytest.approx(  # of 5 + 6 + 5 + 3 policy tokens
        [n / root5 / 19 for n in [-3] * 5 + [-1] * 6 + [1] * 5 + [3] * 3], rel=1e-4)
    assert [arpo.sampled(s) for s in family()] == [5, 8 - 4, 7 - 6, 3]


# -------------------------------------------------------------------------------------- processes

@pytest.mark.slow
def test_with_nothing_to_fork_it_plays_and_learns_exactly_as_grpo(babble, unbroken, tmp_path):
    train("arpo.py", tmp_path, babble, "--initial 8 --steps 2 --decay 0")
    for step in (1, 2):
        one, two = (read_jsonl(out / "rollouts" / f"{step:05d}.jsonl")
                    for out in (unbroken, tmp_path))
        assert one == two
    shared = [line for line in numbers(unbroken) if "reward" in line][:2]
    for one, two in zip(shared, numbers(tmp_path), strict=True):
        assert one == {key: two[key] for key in one}


@pytest.mark.slow
def test_a_real_engine_forks_and_still_agrees_with_the_trainer(babble, tmp_path):
    # three turns for certain, and with a weight of 0 names alone decide: no model has a say
    write_jsonl(tmp_path / "long.jsonl", [
        {"id": f"{i}", "query": f"Go on, {i}.", "turns": 3, "success": 0.5} for i in range(4)])
    said = train("arpo.py", tmp_path / "rl", babble, "--tasks", tmp_path / "long.jsonl", "--steps 2"
                 " --branch released --weight 0")
    assert "babble: closed" in said
    for line in read_jsonl(tmp_path / "rl" / "log.jsonl"):
        assert line["dlogp_mean"] <= 1e-4 and line["gnorm"] > 0 and 0 < line["forks"] <= 4
        assert {"entropy_after", "entropy_rise"} < line.keys()
        rows = read_jsonl(tmp_path / "rl" / "rollouts" / f"{line['step']:05d}.jsonl")
        begun = [(row["task"]["id"], row["messages"][2]["content"]) for row in rows]
        assert len(rows) == 16 and len(set(begun)) <= 16 - 2 * line["forks"]
