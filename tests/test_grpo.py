"""GRPO: token-exact play, its numbers by hand, and equal updates for any division of work."""
import copy
import math
import random
import sys
import threading
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from babble import Babble
from conftest import SEED, Plain, Replies, flags_of, said, train, train_broken, weights, witness

import grpo
import runtime
import sft
from look.microscope import pieces, write_tokens
from runtime import read_jsonl, write_jsonl
from travel.solver import solver_replies
from travel.world import Travel, load_task

REPLY = "<think>a</think>\n<answer>b</answer>"
CPU = torch.device("cpu")
WORLD = runtime.CheckedWorld(Babble(), "babble")  # as open_world returns it


def flags(words=""):
    return flags_of(grpo, f"--seed {SEED} --system-prompt short --context 4000 {words}")


@pytest.fixture(scope="module")
def world(mini):
    return Travel(mini)


@pytest.fixture(scope="module")
def task(mini):
    return witness(mini)[0]


# ---------------------------------------------------------------------------------------- rollout


@pytest.fixture
def play(world, task, template):
    """play(replies or outputs of an engine, flags) -> the sample, even if it is unfinished."""
    def play(replies, args):
        s = grpo.new_sample(task, 0, "play/0/0/0", world, template, args)
        for reply in replies:
            output = said(template, reply) if isinstance(reply, str) else reply
            action = grpo.take_reply(s, output, template, args)
            if not action or not grpo.take_observation(s, s.episode.act(action), template, args):
                break
        return s
    return play


def test_played_tokens_are_those_that_sft_renders(play, task, mini, template):
    s = play(solver_replies(task, mini), flags())
    assert s.episode.stop == "answer" and s.episode.calls > 2
    assert (s.ids, s.mask) == sft.render(s.episode.messages, template)
    assert [int(logp != 0) for logp in s.logps] == s.mask


def test_a_breach_of_the_protocol_ends_the_episode_with_reward_zero(play, world):
    s = play(["no tags at all", REPLY], flags())
    grpo.judge_all([s], world, "sum")
    assert s.stop == "format" and s.reward == 0 and sum(s.mask) > 0
    assert (s.record["kind"], s.record["errors"]) == ("sum", 1)


def test_a_reply_that_does_not_end_is_a_format_error(play, template):
    s = play([said(template, REPLY, closed=False)], flags())
    assert s.episode.stop == "format" and s.episode.answer is None


def test_a_reply_that_the_context_cuts_short_is_overlength(play, template):
    cut = said(template, REPLY, closed=False)
    prompt = len(play([], flags()).ids)
    s = play([cut], flags(f"--context {prompt + len(cut.token_ids)}"))
    assert s.episode.stop == "context" and s.episode.answer is None


def test_an_observation_that_fills_the_context_ends_the_episode(play, task, mini):
    prompt, replies = len(play([], flags()).ids), list(solver_replies(task, mini))
    s = play(replies, flags(f"--context {prompt + 60}"))
    assert s.episode.stop == "context" and s.episode.turns < len(replies)
    assert len(s.ids) == len(s.mask) == len(s.logps) == prompt + 60, "nobody reads on behind it"


def test_a_reply_that_a_stop_string_ends_gets_its_end_token_from_the_template(play, template):
    call = '<think>a</think>\n<tool_call>{"name": "SearchCity", "arguments": {}}</tool_call>'
    stopped = said(template, call, closed=False)
    stopped.stop_reason = "</tool_call>"
    s = play([stopped], flags())
    where = len(s.mask) - s.mask[::-1].index(1)  # the first token behind the reply
    assert (s.ids[where], s.mask[where]) == (template.end, 0)
    assert not s.episode.stop and s.episode.turns == 1


def test_a_prompt_longer_than_the_context_is_refused_with_the_fix(play):
    with pytest.raises(ValueError, match="raise --context above 20"):
        play([], flags("--context 20"))


BABBLED = [{"id": f"{i}", "query": f"Go on, {i}.", "turns": 1 + i % 3, "success": 0.5}
           for i in range(5)]


def test_a_rollout_plays_every_task_g_times_in_whatever_order_replies_end(one_rank, template):
    llm, args = Replies(template, lambda *_: ("1 2", 0.5)), flags("--group 3 --concurrency 7")
    samples = grpo.rollout(llm, template, WORLD, BABBLED, "play/0", 3, 1.0, 1.0, args)
    assert Counter(s.query for s in samples) == dict.fromkeys(range(5), 3)
    assert all(s.episode.task == BABBLED[s.query] for s in samples)
    assert all(s.episode.stop == "answer" and s.episode.turns == 1 + s.query % 3 for s in samples)
    assert len({params.seed for _, params in llm.asked.values()}) == len(llm.asked)
    assert all(len(ids) + params.max_tokens <= 4000 for ids, params in llm.asked.values())


@pytest.mark.parametrize("differing, kinds", [(3, "...u."), (2, "..uu.."), (0, "u" * 12)])
def test_refill_plays_until_enough_groups_differ_or_its_batches_are_spent(
        differing, kinds, one_rank, template):
    def script(name, text):  # of play/0/query/place in the group/turn: so many queries differ
        _, _, query, place, _ = name.split("/")
        return (place if int(query) < differing else "7"), 0.5

    llm, args = Replies(template, script), flags("--drop-uniform --refill 2 --prompts 4 --group 3")
    samples, _ = grpo.play_batch(llm, template, WORLD, BABBLED, 0, 9, "digits", [], args)
    groups = grpo.by_query(samples)
    assert "".join("u" if grpo.uniform(group) else "." for group in groups.values()) == kinds
    assert all(len({s.record["task"]["id"] for s in group}) == 1 for group in groups.values())
    told = grpo.describe(samples, groups, Babble.parts)
    assert told["uniform"] == pytest.approx(kinds.count("u") / len(kinds))


def test_curriculum_is_the_worlds_first_kind_then_its_second_then_its_third():
    kinds = [grpo.reward_kind("curriculum", Travel.kinds, i / 10) for i in range(10)]
    assert kinds == ["sum"] * 4 + ["macro"] * 4 + ["success"] * 2


def test_a_reward_is_the_worlds_first_kind_unless_it_is_named():
    named = [grpo.reward_kind(kind, Travel.kinds, 0.5) for kind in (None, "success")]
    assert named == ["sum", "success"]


@pytest.mark.parametrize("words", ["--refill 1", "--tis-cap 2",
                                   "--refill 1 --drop-uniform --stretch 9", "--stretch -1",
                                   "--stretch 9 --recompute", "--stretch 9 --train-results"])
def test_a_flag_without_the_one_it_adds_to_is_refused(words):
    with pytest.raises(SystemExit):
        flags(words)


@pytest.mark.parametrize("words, ranks", [("--tp 2", 3), ("--tp 4", 2)])
def test_ranks_that_make_no_whole_engines_are_refused(words, ranks, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit):
        flags(words)
    assert f"does not divide {ranks} ranks into engines" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- stretch


REPLY_TOKENS = 4  # of "1 2" and its end


@pytest.fixture
def updates_of(one_rank, template):
    """updates_of(turns of each task, flags, kinds) -> [(whole samples, waiting)] of as many updates
    as there are kinds of reward. Every reply is "1 2"."""
    begun = 0  # the counter of an update's queries can be used only once

    def play(turns, words, kinds):
        nonlocal begun
        tasks = [{"id": f"{i}", "query": f"Go on, {i}.", "turns": n, "success": 0.5}
                 for i, n in enumerate(turns)]
        args, waiting, found = flags(words), [], []
        llm, first, begun = Replies(template, lambda *_: ("1 2", 0.5)), begun, begun + len(kinds)
        for step, kind in enumerate(kinds, first):
            samples, _ = grpo.play_batch(llm, template, WORLD, tasks, step, begun, kind, waiting,
                                         args)
            found.append((samples, copy.deepcopy(waiting)))
        return found
    return play


@pytest.mark.parametrize("k, replies", [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (99, 9)])
def test_a_play_waits_at_the_end_of_the_reply_in_which_it_has_sampled_k_tokens(
        k, replies, updates_of):
    words = f"--stretch {k} --group 2 --prompts 2 --max-turns 9"
    *early, (_, left) = updates_of((1, 7), words, ["digits"] * 4)
    learnt = [s for samples, _ in early for s in samples if s.record["turns"] == 7]
    for s in learnt:
        prompt = s.mask.index(1)
        said = [sum(s.mask[prompt:start]) for start in [*s.starts[1:], len(s.mask)]]
        whole = range(replies * REPLY_TOKENS, 7 * REPLY_TOKENS, replies * REPLY_TOKENS)
        assert said == [*whole, 7 * REPLY_TOKENS][:len(said)] and said[-1] == 7 * REPLY_TOKENS
    waited = -(-7 // replies) - 1
    assert all(len(s.starts) - 1 == waited for s in learnt) and bool(learnt) == (waited < 3)
    assert not left, "the last update plays to the end"


def test_a_group_is_learnt_once_with_all_its_plays_and_none_is_lost(updates_of):
    words = "--stretch 5 --group 3 --prompts 2 --max-turns 9"
    found = updates_of((1, 2, 3, 4, 5, 6), words, ["digits"] * 6)
    names = [[s.name for s in samples] for samples, _ in found]
    assert Counter(sum(names, [])) == dict.fromkeys({name for each in names for name in each}, 1)
    assert len(sum(names, [])) == 6 * 2 * 3 and any(waiting for _, waiting in found)
    for samples, waiting in found:
        groups = grpo.by_query(samples)
        assert all(len(group) == 3 and len({s.record["task"]["id"] for s in group}) == 1
                   for group in groups.values())
        begun, left = ({s.name.rpartition("/")[0] for s in some} for some in (samples, waiting))
        assert len(groups) == len(begun) >= 1 and not begun & left


def test_where_no_group_is_whole_all_plays_get_another_stretch_under_the_same_weights(updates_of):
    words = "--stretch 4 --group 2 --prompts 2 --max-turns 9"
    (samples, waiting), _ = updates_of((2, 5), words, ["digits"] * 2)
    assert {s.record["turns"] for s in samples} == {2}
    assert all(s.starts == [0] for s in samples), "the weights were the same, so nothing is stale"
    assert {s.episode.turns for s in waiting} == {2}


def test_a_group_is_judged_by_the_kind_in_force_when_it_is_whole(updates_of):
    words = "--stretch 4 --group 2 --prompts 2 --max-turns 9"
    first, second, _ = (samples for samples, _ in updates_of(
        (1, 2), words, ["digits", "apart", "digits"]))
    assert {(s.record["turns"], s.record["kind"]) for s in first} == {(1, "digits")}
    assert {(s.record["turns"], s.record["kind"]) for s in second} == {(2, "apart"), (1, "apart")}


def test_tokens_of_tools_do_not_count_for_a_stretch(updates_of):
    for words in "", "--train-results --tis-cap 2":
        words += " --stretch 9 --group 2 --prompts 2 --max-turns 9"
        (samples, waiting), _ = updates_of((1, 5), words, ["digits"] * 2)
        assert {s.episode.turns for s in waiting} == {3} and len(samples) == 2


def test_ages_by_hand():
    # two prompt tokens; 3 sampled, a tool's 2, then 1 sampled; waited twice; 4 sampled; waited; 2
    s = sample(0, 0.0)
    s.mask = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    s.logps = [-1.0 * m for m in s.mask]
    s.starts = [0, 7, 8, 12]
    assert grpo.ages(s) == [2, 4, 1, 3]  # 14 tokens, of which those before 12 are not fresh
    young = sample(0, 0.0, tokens=10)
    for each in s, young:
        each.record = {"score": {}, "strict": 0, "turns": 1, "calls": 0, "failures": 0}
    told = grpo.describe([s, young], grpo.by_query([s, young]), ())
    assert (told["age_max"], told["stale"]) == (3, pytest.approx(8 / 20))
    assert told["age"] == pytest.approx((1 * 4 + 2 * 1 + 3 * 3) / 20)


def test_a_checkpoint_gives_back_its_plays_and_refuses_another_stretch(tmp_path, updates_of):
    words = "--stretch 4 --group 2 --prompts 2 --max-turns 9"
    (_, waiting), _ = updates_of((1, 5), words, ["digits"] * 2)
    folder = tmp_path / "checkpoints" / "step-3"
    folder.mkdir(parents=True)
    for stretch in 0, 4:
        assert runtime.restore_plays(tmp_path, 0, 0, stretch) == []
    with pytest.raises(SystemExit, match="step-3 was saved with --stretch 0"):
        runtime.restore_plays(tmp_path, 3, 0, 4)
    torch.save((4, waiting), folder / "plays-0.pt")
    again = runtime.restore_plays(tmp_path, 3, 0, 4)
    assert waiting and [vars(s.episode).keys() for s in again] == [
        vars(s.episode).keys() for s in waiting]
    assert [(s.name, s.ids, s.mask, s.logps, s.starts, s.episode.messages) for s in again] == [
        (s.name, s.ids, s.mask, s.logps, s.starts, s.episode.messages) for s in waiting]
    for stretch in 0, 5:
        with pytest.raises(SystemExit, match="was saved with --stretch 4: resume with the same"):
            runtime.restore_plays(tmp_path, 3, 0, stretch)


def test_travel_episodes_go_on_alike_after_a_checkpoint(task, mini, world):
    replies = list(solver_replies(task, mini))
    for seed in range(8):
        here = world.episode(task, f"{SEED}/{seed}", flags("--failure-rate 0.5"))
        for reply in replies[:2]:
            here.step(reply)
        there = runtime.copy_by_pickle(here)
        for reply in replies[2:]:
            here.step(reply)
            there.step(reply)
        assert here.record() == there.record() and here.turns > 2
        assert world.verdict(here) == world.verdict(there)


class Locked(Babble):
    """A world whose episodes cannot be pickled."""

    def episode(self, task, seed, args):
        episode = super().episode(task, seed, args)
        episode.lock = threading.Lock()
        return episode


def test_a_world_whose_episodes_do_not_pickle_is_refused_before_an_engine_starts():
    world = runtime.CheckedWorld(Locked(), "locked.py")
    runtime.check_world(world, BABBLED[0], flags())
    with pytest.raises(ValueError, match="locked.py: an episode must pickle for --stretch, task"):
        runtime.check_world(world, BABBLED[0], flags("--stretch 9"))


def test_a_play_that_cannot_be_saved_or_loaded_is_one_line(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "check_parameters", lambda *_: None)
    trainer = SimpleNamespace(
        save_checkpoint=lambda out, tag, **_: (out / tag).mkdir(parents=True))
    args = SimpleNamespace(out=tmp_path, stretch=4, save_every=1)
    with pytest.raises(ValueError, match="--stretch: an episode that waits must pickle: TypeError"):
        runtime.save_checkpoint(trainer, args, 1, 0, False, [threading.Lock()])
    file = tmp_path / "checkpoints" / "step-1" / "plays-0.pt"
    torch.save((4, [Locked()]), file)
    monkeypatch.delattr(sys.modules[__name__], "Locked")
    with pytest.raises(ValueError, match="plays-0.pt does not load; .*: AttributeError: .*Locked"):
        runtime.restore_plays(tmp_path, 1, 0, 4)


# ------------------------------------------------------------------------------------------- loss


def sample(query, reward, tokens=4, stop="answer"):
    return grpo.Sample(None, query, "", ids=[1] * (tokens + 2), mask=[0, 0] + [1] * tokens,
                       logps=[0.0] * (tokens + 2), stop=stop, reward=reward)


def weighed(samples, words=""):
    """[(query, weight)] of the samples that are in the loss."""
    groups, args = grpo.group_advantages(samples), flags(words)
    return [(s.query, pytest.approx(weight)) for part in grpo.split(groups, args)
            for s, weight in grpo.token_weights(part, args)]


def test_advantages_by_hand():
    samples = [*(sample(0, r) for r in (0.0, 1.0, 1.0, 2.0)), sample(1, 3.0), sample(1, 3.0)]
    grpo.group_advantages(samples)
    wanted = [-math.sqrt(2), 0, 0, math.sqrt(2), 0, 0]
    assert [s.advantage for s in samples] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("plays", range(2, 17))
def test_equal_rewards_have_an_advantage_of_exactly_0_in_a_group_of_any_size(plays):
    for reward in (1.1, 0.1, 2.7, 1 / 3, -0.7):
        samples = [sample(0, reward) for _ in range(plays)]
        grpo.group_advantages(samples)
        assert not any(s.advantage for s in samples)


def test_groups_of_equal_reward_are_dropped_before_the_others_are_dealt_to_minibatches():
    samples = [sample(query, reward) for query in range(8) for reward in (0.0, float(query % 4))]
    args = flags("--drop-uniform --minibatches 4")
    parts = grpo.split(grpo.group_advantages(samples), args)  # queries 0 and 4 teach nothing
    assert list(map(list, parts)) == [[1, 6], [2, 7], [3], [5]]
    assert grpo.split(grpo.group_advantages(samples[:2]), args) == [{}]


def test_overlength_leaves_the_loss_and_its_denominator_but_not_the_statistics():
    samples = [sample(0, 0.0, 10, "context"), sample(1, 1.0, 4), sample(1, 2.0, 6),
               sample(1, 0.0, 90, "turns")]
    assert weighed(samples) == [(1, 1 / 10)] * 2
    assert samples[1].advantage == 0 and samples[2].advantage == pytest.approx(1.5**0.5, abs=1e-5)


def test_keep_overlength_puts_such_plays_into_the_loss_and_its_denominator():
    samples = [sample(0, 0.0, 10, "context"), sample(0, 1.0, 4), sample(0, 1.0, 36, "turns"),
               sample(1, 0.0, 7, "turns")]
    assert weighed(samples, "--keep-overlength") == [(0, 1 / 50 / 2)] * 3
    assert samples[0].advantage == pytest.approx(-math.sqrt(2), abs=1e-5)


@pytest.mark.parametrize("words, weight", [
    ("", 1 / 8 / 2), ("--loss-norm batch", 1 / 24), ("--drop-uniform", 1 / 8)])
def test_token_weights_by_hand(words, weight):
    samples = [sample(0, 1.0, 2), sample(0, 0.0, 6), sample(1, 1.0, 12), sample(1, 1.0, 4),
               sample(2, 0.0, 5, "turns")]
    assert weighed(samples, words) == [(0, weight)] * 2


@pytest.mark.parametrize("words", ["", "--loss-norm batch"])
def test_a_batch_of_overlength_plays_has_nothing_to_learn_and_moves_nothing(
        words, one_rank, policy):
    samples = [sample(0, 1.0, 5, "turns"), sample(0, 0.0, 4, "context")]
    assert grpo.token_weights(grpo.group_advantages(samples), flags(words)) == []
    engine = Plain(policy)
    line = learn(engine, [], words)
    assert (engine.steps, line["loss"], line["loss_tokens"], line["dlogp_mean"]) == (0, 0, 0, 0)


def test_groups_of_equal_reward_are_computed_only_if_there_is_nothing_else():
    equal = [sample(0, 1.0, 12), sample(0, 1.0, 4)]
    assert weighed(equal) == [(0, 1 / 16)] * 2
    assert weighed([*equal, sample(1, 1.0, 2), sample(1, 0.0, 6)]) == [(1, 1 / 8 / 2)] * 2


def test_policy_loss_by_hand():
    w = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantage, weight = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0]), torch.full((5,), 0.2)
    loss, side = grpo.policy_loss(w.log(), torch.zeros(5), advantage, weight, flags())
    # 2, clipped 2.56, 1, unclipped -3, clipped -1.6
    assert loss.item() == pytest.approx(-(2 + 2.56 + 1 - 3 - 1.6) / 5)
    assert side.tolist() == [0, 1, 0, 0, -1]


def test_one_step_raises_the_probability_of_rewarded_tokens_and_lowers_the_others():
    logits = torch.zeros(2, 3, requires_grad=True)
    logps = torch.log_softmax(logits, -1)[:, 0]
    advantage, weight = torch.tensor([1.0, -1.0]), torch.full((2,), 0.5)
    grpo.policy_loss(logps, logps.detach(), advantage, weight, flags())[0].backward()
    after = torch.log_softmax(logits - logits.grad, -1)[:, 0]
    assert after[0] > logps[0] and after[1] < logps[1]


def test_minibatches_share_out_the_queries():
    groups = {query: [sample(query, 0.0)] for query in range(7)}
    parts = grpo.split(groups, flags("--minibatches 3"))
    assert sorted(query for part in parts for query in part) == list(range(7))
    assert [len(part) for part in parts] == [3, 2, 2]


def test_the_learning_rate_stays_and_falls_linearly_to_zero_at_the_end():
    args = flags("--lr 1 --decay 0.5")
    rates = [grpo.learning_rate(step, 8, args) for step in range(8)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


# ----------------------------------------------------------------------------------------- update


def logps_of(policy, s, temperature):
    """log pi of a sample's policy tokens, from whole logits."""
    hidden = policy.lm.base_model(torch.tensor([s.ids]), use_cache=False)[0][0, :-1]
    whole = torch.log_softmax(hidden @ policy.lm.lm_head.weight.T / temperature, -1)
    chosen = whole.gather(-1, torch.tensor(s.ids[1:])[:, None]).squeeze(-1)
    return chosen[torch.tensor(s.mask[1:]).bool()]


def reported(s):
    """The engine's log pi of the policy tokens."""
    return torch.tensor(s.logps)[torch.tensor(s.mask).bool()]


@pytest.fixture
def weighted(policy):
    """Six plays of two queries with their weights; the engine's log-probabilities are slightly
    wrong."""
    draw, samples = random.Random(SEED), []
    noise = torch.Generator().manual_seed(SEED)
    for i in range(6):
        n = draw.randint(8, 40)
        ids, mask = ([draw.randrange(top) for _ in range(n)] for top in (300, 2))
        s = grpo.Sample(None, i % 2, f"{i}", ids, [0, 0, *mask[2:-1], 1], stop="answer", reward=i)
        with torch.no_grad():
            truth = logps_of(policy, s, 0.7)
        near = iter((truth + 0.3 * torch.randn(len(truth), generator=noise)).tolist())
        s.logps = [next(near) if m else 0.0 for m in s.mask]
        samples.append(s)
    return grpo.token_weights(grpo.group_advantages(samples), flags())


@pytest.fixture
def moved(policy):
    """A copy of the policy with other weights."""
    torch.manual_seed(SEED)
    copied = sft.Policy(copy.deepcopy(policy.lm))
    with torch.no_grad():
        copied.lm.lm_head.weight.add_(0.02 * torch.randn_like(copied.lm.lm_head.weight))
    return copied


def learn(engine, weighted, words, packed=False, ranks=1):
    """The statistics of an update; this process plays all ranks one after the other."""
    for rank in range(ranks):
        args = flags(f"--temperature 0.7 {words}")
        line = grpo.learn(engine, weighted, packed, rank, ranks, CPU, args)
    return line


def recompute(policy, weighted):
    args = flags("--temperature 0.7 --pack-tokens 50")
    grpo.recompute_logps(Plain(policy), weighted, False, 0, 1, CPU, args)


def test_recomputed_logps_are_the_trainers_own_and_not_what_the_engine_reported(
        one_rank, policy, weighted):
    recompute(policy, weighted)
    for s, _ in weighted:
        with torch.no_grad():
            torch.testing.assert_close(s.old_logps, logps_of(policy, s, 0.7), rtol=1e-4, atol=1e-5)
        assert (s.old_logps - reported(s)).abs().max() > 0.01


@pytest.mark.parametrize("words", ["", "--recompute", "--recompute --tis-cap 1.1"])
def test_an_update_has_the_loss_and_the_gradient_that_whole_logits_give_by_hand(
        words, one_rank, policy, moved, weighted):
    recompute(policy, weighted)
    engine, loss, gaps, sides = Plain(moved), 0.0, [], []
    line = learn(engine, weighted, words)
    for s, weight in weighted:
        logps, old = logps_of(moved, s, 0.7), s.old_logps if words else reported(s)
        ratio, a = torch.exp(logps - old), s.advantage
        capped = torch.exp(old - reported(s)).clamp(max=1.1) if "tis" in words else 1.0
        loss -= (weight * capped * torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a)).sum()
        gaps.append((logps - reported(s)).abs().detach())
        sides.append((ratio > 1.28) & (a > 0))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert line["dlogp_mean"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-3)
    assert line["dlogp_max"] == pytest.approx(torch.cat(gaps).max().item(), rel=1e-3)
    assert line["clip_high"] == pytest.approx(torch.cat(sides).float().mean().item(), abs=0.02)
    wanted = torch.autograd.grad(loss, list(moved.parameters()))
    wanted = torch.cat([grad.flatten() for grad in wanted])
    assert (engine.gradient() - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_an_episode_over_three_updates_each_token_is_weighed_by_its_own_log_probability(
        ranks, one_rank, policy, moved, weighted):
    plain, mixed = Plain(moved), Plain(sft.Policy(copy.deepcopy(moved.lm)))
    before = learn(plain, weighted, "--pack-tokens 60", ranks=ranks)
    loss, gaps = 0.0, []
    for i, (s, weight) in enumerate(weighted):  # some tokens are two updates old, some one, some 0
        s.starts = [0, *sorted((len(s.ids) * (i + 1) // 9, len(s.ids) * (i + 3) // 9))]
        logps, fresh = logps_of(moved, s, 0.7), torch.tensor([
            place >= s.starts[-1] for place, m in enumerate(s.mask) if m])
        w = torch.exp(logps - reported(s))
        loss -= (weight * torch.min(w * s.advantage, w.clamp(0.8, 1.28) * s.advantage)).sum()
        gaps.append((logps - reported(s)).abs()[fresh].detach())
    after = learn(mixed, weighted, "--pack-tokens 60", ranks=ranks)
    wanted = torch.autograd.grad(loss, list(moved.parameters()))
    wanted = torch.cat([grad.flatten() for grad in wanted])
    assert (mixed.gradient() / ranks - wanted).norm() < 1e-4 * wanted.norm()
    assert torch.equal(mixed.gradient(), plain.gradient()), "ages change nothing in the loss"
    if ranks == 1:  # the statistics of this test's last rank are its own, not those of all
        assert after["dlogp_mean"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-3)
        assert after["loss_tokens"] == before["loss_tokens"] > len(torch.cat(gaps)) > 0


def test_with_train_results_everything_after_the_prompt_is_trained_on(play, task, mini, template):
    replies = solver_replies(task, mini)
    plain, whole = play(replies, flags()), play(replies, flags("--train-results"))
    assert whole.ids == plain.ids and flags("--train-results").recompute
    start = plain.mask.index(1)
    assert whole.mask == [0] * start + [1] * (len(plain.mask) - start) != plain.mask
    said = [(logp, policy) for logp, policy in zip(whole.logps, plain.mask, strict=True)][start:]
    assert [logp == grpo.NOT_SAMPLED for logp, _ in said] == [not policy for _, policy in said]


def test_the_microscope_has_no_log_probabilities_of_tool_results(
        play, task, mini, template, one_rank, tmp_path):
    args = flags("--train-results")
    plain, whole = (play(solver_replies(task, mini), each) for each in (flags(), args))
    write_tokens(tmp_path / "1.jsonl", [whole], [], template, args)
    (row,), start = read_jsonl(tmp_path / "1.jsonl"), plain.mask.index(1)
    assert [logp is not None for logp in row["engine"]] == [bool(m) for m in plain.mask[start:]]
    assert all(logp is None or logp <= 0 for logp in row["engine"])


@pytest.mark.parametrize("words", ["--recompute", "--recompute --tis-cap 1.1"])
def test_of_a_token_that_no_policy_sampled_engine_and_trainer_do_not_disagree(
        words, one_rank, policy, moved, weighted):
    recompute(policy, weighted)
    wanted = Plain(moved)
    learn(wanted, weighted, "--recompute")
    for s, _ in weighted:
        s.logps = [grpo.NOT_SAMPLED if m else 0.0 for m in s.mask]
    engine = Plain(sft.Policy(copy.deepcopy(moved.lm)))
    line = learn(engine, weighted, words)
    assert line["dlogp_mean"] == line["dlogp_max"] == 0.0 and line["clip_high"] > 0
    assert (engine.gradient() - wanted.gradient()).norm() < 1e-6 * wanted.gradient().norm()
    assert [grpo.sampled(s) for s, _ in weighted] == [0] * len(weighted)


def test_the_gap_of_engine_and_trainer_is_a_mean_over_the_tokens_that_were_sampled(
        one_rank, policy, weighted):
    recompute(policy, weighted)
    whole, (first, _) = learn(Plain(policy), weighted[:1], ""), weighted[0]
    policy.zero_grad()
    last = max(i for i, m in enumerate(first.mask) if m)
    first.logps = [grpo.NOT_SAMPLED if m and i < last else logp
                   for i, (m, logp) in enumerate(zip(first.mask, first.logps, strict=True))]
    line = learn(Plain(policy), weighted[:1], "--recompute")
    assert line["dlogp_mean"] == pytest.approx(line["dlogp_max"]) and grpo.sampled(first) == 1
    assert line["loss_tokens"] == whole["loss_tokens"] == sum(first.mask)


@pytest.mark.parametrize("pack, packed, ranks", [
    (1, False, 1), (60, False, 1), (60, True, 1), (1, False, 2), (60, True, 3), (9999, False, 4)])
def test_the_gradient_is_the_same_over_micro_batches_packing_and_ranks(
        pack, packed, ranks, one_rank, policy, weighted):
    whole, cut = Plain(policy), Plain(copy.deepcopy(policy))
    cut.module = sft.Policy(cut.module.lm)
    learn(whole, weighted, "")
    learn(cut, weighted, f"--pack-tokens {pack}", packed, ranks)
    gap = cut.gradient() / ranks - whole.gradient()  # DeepSpeed takes the mean over ranks
    assert gap.norm() < 1e-5 * whole.gradient().norm()


def test_the_microscope_changes_no_bit_of_an_update(one_rank, policy, moved, weighted):
    plain, watched = Plain(moved), Plain(sft.Policy(copy.deepcopy(moved.lm)))
    args = flags("--temperature 0.7 --pack-tokens 50")
    lines = [grpo.learn(engine, weighted, False, 0, 1, CPU, args, seen)
             for engine, seen in ((plain, None), (watched, []))]
    assert lines[0] == lines[1] and torch.equal(plain.gradient(), watched.gradient())


def test_the_microscope_keeps_every_tokens_inputs_of_the_loss(
        one_rank, policy, moved, weighted, template, tmp_path):
    args, seen = flags("--temperature 0.7 --pack-tokens 50 --clip-low 0.1"), []
    grpo.learn(Plain(moved), weighted, False, 0, 1, CPU, args, seen)
    left_out = grpo.Sample(None, 1, "left", [5, 6], [0, 1], [0.0, -1.0], stop="turns", reward=0.0)
    samples = [s for s, _ in weighted] + [left_out]
    write_tokens(tmp_path / "00001.jsonl", samples, seen, template, args)
    *rows, last = read_jsonl(tmp_path / "00001.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["00001.jsonl"]
    for s, row in zip(samples[:-1], rows, strict=True):
        ratio = torch.exp(logps_of(moved, s, 0.7) - reported(s)).detach()
        assert row["w"] == pytest.approx(ratio.tolist(), rel=1e-3)
        assert row["engine"] == pytest.approx(reported(s).tolist(), rel=1e-5)
        trained = logps_of(moved, s, 0.7).tolist()
        assert row["trainer"] == pytest.approx(trained, rel=1e-3, abs=1e-5)
        a = s.advantage
        sides = [1 if w > 1.28 and a > 0 else -1 if w < 0.9 and a < 0 else 0 for w in row["w"]]
        assert row["side"] == sides
        assert row["gain"] == pytest.approx([a] * sum(s.mask), rel=1e-3)
        assert len(row["entropy"]) == sum(s.mask) and min(row["entropy"]) > 0
        assert (row["mask"], row["clip"]) == (s.mask, [0.9, 1.28])
        assert "".join(row["tokens"]) == template.tokenizer.decode(s.ids)
    assert any(side for row in rows for side in row["side"])
    assert "trainer" not in last and last["engine"] == [-1.0]
    assert [play["name"] for play in last["group"]] == ["1", "3", "5", "left"]


def test_a_character_of_several_tokens_is_shown_at_the_last_of_them(template):
    ids = template.encode("a\U0001f600b")
    assert len(ids) > 3 and template.tokenizer.decode(ids[:2]).endswith("\ufffd")
    texts = pieces(ids, template.tokenizer)
    assert "".join(texts) == "a\U0001f600b" and texts[-2:] == ["\U0001f600", "b"]
    assert "".join(pieces(ids[:2], template.tokenizer)) == template.tokenizer.decode(ids[:2])


def test_pieces_of_any_tokens_make_the_whole_text(template):
    draw, text = random.Random(SEED), "\u0351\U0001f600\u00e9\u4e2d a"
    letters = template.encode(text)
    for _ in range(2000):
        ids = draw.choices(letters if draw.random() < 0.5 else range(300), k=draw.randrange(40))
        texts = pieces(ids, template.tokenizer)
        assert len(texts) == len(ids) and "".join(texts) == template.tokenizer.decode(ids)


def test_plays_that_all_earned_the_same_are_compared_but_move_no_weight(
        one_rank, policy, weighted):
    for s, _ in weighted:
        s.advantage = 0.0
    engine = Plain(policy)
    line = learn(engine, weighted, "")
    assert (engine.steps, line["gnorm"], line["loss"]) == (0, 0.0, 0.0)
    assert line["dlogp_mean"] > 0 and not engine.gradient().any()
    weighted[0][0].advantage = 1.0
    learn(engine, weighted, "")
    assert engine.steps == 1


def test_a_ratio_beyond_all_numbers_is_clipped_and_stays_a_number():
    logps = torch.tensor([0.0, 0.0, -1.0], requires_grad=True)
    old, advantage = torch.tensor([-1e4, -1e4, -1.0]), torch.tensor([0.0, 1.0, 1.0])
    loss, side = grpo.policy_loss(logps, old, advantage, torch.ones(3), flags())
    loss.backward()
    assert loss.item() == pytest.approx(-2.28) and side.tolist() == [0, 1, 0]
    assert logps.grad.tolist() == [0, 0, -1]


@pytest.mark.parametrize("gap, device, stops", [
    (0.9e-4, "cpu", False), (1.1e-4, "cpu", True), (math.nan, "cpu", True),
    (0.04, "cuda", False), (0.06, "cuda", True)])
def test_a_run_stops_if_engine_and_trainer_disagree(gap, device, stops):
    line, device = {"step": 3, "dlogp_mean": gap}, torch.device(device)
    if not stops:
        return grpo.check_sync(line, device)
    with pytest.raises(SystemExit, match="update 3: engine and trainer disagree"):
        grpo.check_sync(line, device)


def test_best_holds_the_weights_of_the_first_step_with_the_highest_success(
        one_rank, policy, template, tmp_path):
    lm, args = copy.deepcopy(policy.lm), flags(f"--out {tmp_path}")
    engine = SimpleNamespace(module=SimpleNamespace(lm=lm))
    (tmp_path / "log.jsonl").touch()
    for step, success in enumerate((0.25, 0.75, 0.5, 0.75)):
        lm.lm_head.weight.data.fill_(step)
        llm = Replies(template, lambda *_: ("1", 0.5))
        val = [{"id": "v", "query": "?", "turns": 1, "success": success}]
        line = grpo.validate(llm, template, WORLD, val, step, engine, 0, args)
        assert line == {"step": step, "val_success": success}
        grpo.log(line, 0, args)
    assert (weights(tmp_path / "best")["lm_head.weight"] == 1).all()


# -------------------------------------------------------------------------------------- processes


def updates(out):
    return [line for line in read_jsonl(out / "log.jsonl") if "reward" in line]


def test_a_tiny_model_learns_what_is_rewarded(unbroken):
    digits = [line["digits"] for line in updates(unbroken)]
    first, *later = ((a + b) / 2 for a, b in pairwise(digits))
    # at this rate a seed may unlearn to end its replies later on; at a rate of 0 this fails (+0.2)
    assert len(digits) == 8 and max(later) > first + 1


def test_engine_and_trainer_agree_after_every_sync(unbroken):
    assert all(line["dlogp_mean"] <= 1e-4 for line in updates(unbroken))


def test_the_log_and_the_rollouts_hold_what_readers_look_for(unbroken):
    keys = """step reward success digits strict format overlength turns calls tokens policy_tokens
        failures uniform loss clip_low clip_high entropy gnorm dlogp_mean dlogp_max loss_tokens kind
        groups age age_max stale lr later sync_s val_s play_s judge_s learn_s play_tps learn_tps
        play_gib learn_gib"""
    for line in updates(unbroken):
        assert set(line) == set(keys.split())
        rows = read_jsonl(unbroken / "rollouts" / f"{line['step']:05d}.jsonl")
        assert line["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
        assert all({"task", "messages", "answer", "stop", "plan", "score", "advantage"}
                   <= row.keys() for row in rows)


def test_validation_keeps_the_best_model_and_the_end_is_another(unbroken, student):
    lines = [line for line in read_jsonl(unbroken / "log.jsonl") if "val_success" in line]
    assert [(line["step"], line["val_success"]) for line in lines] == [(0, 0.5), (4, 0.5), (8, 0.5)]
    first, best, last = (weights(out) for out in (student, unbroken / "best", unbroken))
    assert all(torch.equal(first[name], best[name]) for name in first)  # never more than at first
    assert all(not torch.equal(first[name], last[name]) for name in first)


def test_a_run_that_was_stopped_and_killed_ends_with_the_same_weights_and_log(
        unbroken, trained):
    out = trained("broken")
    for folder in ("", "best"):
        one, two = weights(unbroken / folder), weights(out / folder)
        assert all(torch.equal(one[name], two[name]) for name in one)
    one, two = ([[line.get(key) for key in ("step", "loss", "reward", "val_success")]
                 for line in read_jsonl(folder / "log.jsonl")] for folder in (unbroken, out))
    assert one == two


def test_with_the_microscope_every_nth_update_is_kept_in_the_order_of_its_rollouts(trained):
    out = trained("broken")  # whose weights are those of a run without
    kept = sorted(path.name for path in (out / "microscope").iterdir())
    assert kept == [f"{step:05d}.jsonl" for step in (2, 4, 6, 8)]
    for line in updates(out)[1::2]:
        name = f"{line['step']:05d}.jsonl"
        plays, rows = (read_jsonl(out / folder / name) for folder in ("rollouts", "microscope"))
        for play, row in zip(plays, rows, strict=True):
            assert (play["reward"], play["advantage"]) == (row["reward"], row["advantage"])
            assert all(message["content"] in "".join(row["tokens"])
                       for message in play["messages"] if message["role"] == "user")
        learnt = [row for row in rows if "trainer" in row]
        assert sum(len(row["w"]) for row in learnt) == line["loss_tokens"]


@pytest.mark.parametrize("words, slow", [
    ("--steps 1", False),
    pytest.param("--steps 2 --tp 2", False, marks=pytest.mark.slow),
    pytest.param("--steps 2 --tp 2", True, marks=pytest.mark.slow)])
def test_two_ranks_with_an_engine_each_or_half_of_one_learn_what_one_learns(
        words, slow, babble, unbroken, tmp_path, monkeypatch):
    if slow:
        monkeypatch.setenv("SLOW", str(tmp_path))
    train("grpo.py", tmp_path / "rl", babble, words, ranks=2)
    one, two = (updates(out)[0] for out in (unbroken, tmp_path / "rl"))
    for key in ("reward", "tokens", "policy_tokens", "loss", "entropy", "gnorm"):
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    one, two = ([row["messages"] for row in read_jsonl(out / "rollouts" / "00001.jsonl")]
                for out in (unbroken, tmp_path / "rl"))
    assert one == two
    assert all(line["dlogp_mean"] <= 1e-4 for line in updates(tmp_path / "rl"))
    called = [(tmp_path / rank).exists() for rank in "01"]
    assert called == [slow, False], "with --tp one rank calls the tools"


@pytest.fixture(scope="module")
def stretched(babble, tmp_path_factory):
    """The folder of a run with --stretch whose plays of three turns wait for the next update."""
    out = tmp_path_factory.mktemp("stretched") / "rl"
    train("grpo.py", out, babble, "--stretch 4")
    return out


@pytest.mark.slow
def test_with_a_stretch_plays_wait_and_engine_and_trainer_agree_on_fresh_tokens(stretched):
    lines = updates(stretched)
    assert all(line["dlogp_mean"] <= 1e-4 for line in lines)
    assert max(line["stale"] for line in lines) > 0 and max(line["age_max"] for line in lines) >= 1
    rows = [row for path in sorted((stretched / "rollouts").iterdir()) for row in read_jsonl(path)]
    assert len(rows) == 8 * 2 * 8, "every query of every update is learnt"


@pytest.mark.slow
def test_a_run_killed_with_waiting_plays_ends_with_the_same_weights_and_rollouts(
        stretched, babble, tmp_path):
    train_broken("grpo.py", tmp_path / "rl", babble, "--stretch 4")
    one, two = weights(stretched), weights(tmp_path / "rl")
    assert all(torch.equal(one[name], two[name]) for name in one)
    for path in (stretched / "rollouts").iterdir():
        assert path.read_bytes() == (tmp_path / "rl" / "rollouts" / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--tp 2"])
def test_two_ranks_stretch_as_one_does(words, stretched, babble, tmp_path):
    train("grpo.py", tmp_path / "rl", babble, "--stretch 4 --steps 3", words, ranks=2)
    one, two = updates(stretched)[:2], updates(tmp_path / "rl")[:2]
    for a, b in zip(one, two, strict=True):
        for key in ("groups", "tokens", "age_max", "stale", "reward", "loss", "gnorm"):
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
def test_official_tasks_at_a_context_of_30k_are_trained_on(test_data, tiny_model, tmp_path):
    rows = read_jsonl(test_data / "travelplanner" / "val_102.jsonl")[:2]
    write_jsonl(tmp_path / "tasks.jsonl", [load_task(row) for row in rows])
    train("grpo.py", tmp_path / "rl", "--model", tiny_model, "--tasks", tmp_path / "tasks.jsonl",
          "--database", test_data / "travelplanner" / "database", "--steps 1 --prompts 2 --group 2",
          "--context 30000 --turn-tokens 200 --concurrency 4")
    (line,) = updates(tmp_path / "rl")
    assert line["dlogp_mean"] <= 1e-4 and line["loss_tokens"] > 0 and line["tokens"] > 1000
