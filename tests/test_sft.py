"""SFT: the trained tokens, and equal gradients and weights for any division and interruption."""
import copy
import math
import random
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import SEED, SFT, Plain, train, train_broken, weights
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime
import sft
from evaluate import play_replies
from runtime import Mistake, read_jsonl, write_jsonl
from sandbox import Episode, Sandbox
from travel.world import Travel, load_task

EPISODE = [
    {"role": "system", "content": "You plan trips."},
    {"role": "user", "content": "From Port Marble to Lake Fern."},
    {"role": "assistant", "content": "<think>hotels</think>\n<tool_call>{}</tool_call>"},
    {"role": "user", "content": "<tool_response>\n1. [Amber Inn] $43.0\n</tool_response>"},
    {"role": "assistant", "content": "<think>done</think>\n<answer>Day 1: [Amber Inn]</answer>"},
]


@pytest.fixture(scope="module")
def samples():
    """Nine episodes of random tokens."""
    draw, made = random.Random(SEED), []
    for _ in range(9):
        n = draw.randint(8, 60)
        ids, mask = ([draw.randrange(top) for _ in range(n)] for top in (300, 2))
        made.append(sft.Rendered(ids, [0, 0, 0, *mask[3:-1], 1]))
    return made


# ------------------------------------------------------------------------------------------- data


def test_rendered_ids_are_the_chat_templates(template):
    ids, _ = sft.render(EPISODE, template)
    text = template.tokenizer.apply_chat_template(EPISODE, tokenize=False)
    whole = template.encode(text)
    assert ids == whole[: len(ids)] and template.tokenizer.decode(whole[len(ids) :]) == "\n"


def test_the_mask_covers_replies_and_their_end_token_and_nothing_else(template):
    ids, mask = sft.render(EPISODE, template)
    trained = template.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    replies = [m["content"] for m in EPISODE if m["role"] == "assistant"]
    assert trained == "".join(f"{reply}<|im_end|>" for reply in replies)


def test_an_episode_over_the_cutoff_is_dropped_whole(template, tmp_path):
    rows = [{"messages": [*EPISODE[:4], {"role": "assistant", "content": "7" * n}]}
            for n in (1, 9, 30, 50)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    lengths = [len(sft.render(row["messages"], template).ids) for row in rows]
    kept, dropped = sft.load_samples(tmp_path / "rows.jsonl", template, lengths[1])
    assert [len(sample.ids) for sample in kept] == lengths[:2] and dropped == 2


def test_a_line_without_messages_is_named(template, tmp_path):
    write_jsonl(tmp_path / "bad.jsonl", [{"messages": EPISODE}, {"query": "?"}])
    with pytest.raises(Mistake, match=r"bad.jsonl:2: its 'messages'"):
        sft.load_samples(tmp_path / "bad.jsonl", template, 1000)


@pytest.mark.parametrize("odd", [
    [*EPISODE[:3], EPISODE[2]], [*EPISODE[:4], EPISODE[3], EPISODE[4]],
    [*EPISODE[:3], {"role": "tool", "content": "1."}, EPISODE[4]],
    [*EPISODE[:3], EPISODE[0], EPISODE[4]]], ids=["two replies", "two queries", "tool", "system"])
def test_turns_that_no_play_has_are_refused(odd, template, tmp_path):
    write_jsonl(tmp_path / "bad.jsonl", [{"messages": EPISODE}, {"messages": odd}])
    with pytest.raises(Mistake, match=r"bad.jsonl:2: its 'messages'"):
        sft.load_samples(tmp_path / "bad.jsonl", template, 1000)


def test_every_epoch_visits_every_episode_once_in_another_order():
    drawn = [i for step in range(15) for i in sft.batch_of(step, 10, 4, SEED)]
    epochs = [drawn[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=70), st.integers(1, 9),
       st.integers(100, 9000), st.booleans())
def test_every_sample_is_dealt_once_within_the_budget_and_ranks_get_as_many_micro_batches(
        lengths, ranks, budget, packed):
    hands = sft.micro_batches(lengths, ranks, budget, packed)
    assert sorted(i for hand in hands for micro in hand for i in micro) == [*range(len(lengths))]
    assert len(hands) == ranks and len({len(hand) for hand in hands}) == 1
    for micro in (micro for hand in hands for micro in hand if len(micro) > 1):
        sizes = [lengths[i] for i in micro]
        assert (sum(sizes) if packed else len(micro) * max(sizes)) <= budget


def seconds(micro, lengths, packed):
    """What a micro-batch of a 7B model takes, in tokens' worth of products; attention by row."""
    rows = [lengths[i] if packed else max(lengths[j] for j in micro) for i in micro]
    return sum(n + n * n / 51_000 for n in rows)


def efficiency(hands, lengths, packed):
    """The time for real tokens, divided by the time of ranks that wait for the slowest."""
    spent = sum(max(seconds(micro, lengths, packed) for micro in together)
                for together in zip(*hands, strict=True))
    return seconds(range(len(lengths)), lengths, True) / spent / len(hands)




@pytest.mark.parametrize("packed", [True])
@pytest.mark.parametrize("sigma, least", [(0.3, 0.94), (0.5, 0.87), (0.8, 0.88)])
def test_sixteen_ranks_hardly_wait_for_each_other(sigma, least, packed):
    found = []
    for seed in range(20):
        draw = random.Random(f"{SEED}/{seed}")
        lengths = [min(30_000, max(500, round(10_300 * math.exp(
            draw.gauss(-sigma * sigma / 2, sigma))))) for _ in range(256)]
        hands = sft.micro_batches(lengths, 16, 32_768, packed)
        found.append(efficiency(hands, lengths, packed))
    assert sum(found) / len(found) >= least - 0.01 * (not packed), "padding costs a little more"








def test_the_learning_rate_warms_up_and_follows_a_cosine():
    args = Namespace(lr=1.0, warmup=0.1, min_lr=0.0)
    rates = [sft.learning_rate(step, 100, args) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    cosine = 0.5 * (1 + math.cos(math.pi * 89 / 90))
    assert rates[55] == pytest.approx(0.5) and rates[99] == pytest.approx(cosine)


# ------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_logps_entropy_and_gradients_are_those_of_whole_logits(chunk, monkeypatch):
    torch.manual_seed(SEED)
    head = torch.nn.Linear(5, 11, bias=False)
    lm = SimpleNamespace(get_output_embeddings=lambda: head)
    monkeypatch.setattr(runtime, "LOGITS", chunk * 11)
    hidden, weight = torch.randn(7, 5, requires_grad=True), head.weight
    targets, grad, t = torch.tensor([0, 3, 10, 3, 2, 7, 7]), torch.randn(7), 0.7
    logps, entropy = sft.Policy.head(SimpleNamespace(lm=lm), hidden, targets, t)
    found = torch.autograd.grad((logps * grad).sum(), (hidden, weight))
    whole = torch.log_softmax(hidden @ weight.T / t, -1)
    chosen = whole.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logps, chosen)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1))
    torch.testing.assert_close(found, torch.autograd.grad((chosen * grad).sum(), (hidden, weight)))




def gradient(policy, samples, micros, packed):
    """The summed gradient of these micro-batches' losses."""
    engine = Plain(policy)
    for micro in micros:
        logps, _ = engine(*sft.collate([samples[i] for i in micro], packed, "cpu"))
        engine.backward(-logps.sum() * bool(micro) / 100)
    return engine.gradient()


@pytest.fixture(scope="module")
def alone(policy, samples):
    """The gradient of the samples, computed one by one."""
    return gradient(policy, samples, [[i] for i in range(len(samples))], False)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [120, 10_000])
def test_the_gradient_depends_neither_on_micro_batches_nor_on_packing(
        policy, samples, alone, packed, budget):
    micros = sft.micro_batches([len(sample.ids) for sample in samples], 1, budget, packed)[0]
    found = gradient(policy, samples, micros, packed)
    assert (found - alone).norm() <= 5e-6 * alone.norm()  # float32 keeps seven digits of each sum
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=4e-6 * alone.abs().max().item())


def test_a_rank_without_work_makes_its_forward_and_adds_nothing(policy, samples):
    worked = gradient(policy, samples, [[0, 1]], False)
    assert torch.equal(gradient(policy, samples, [[0, 1], []], False), worked)


def test_gradient_checkpointing_changes_no_gradient(policy, samples):
    plain = gradient(policy, samples, [[0, 1, 2]], False)
    saver = sft.Policy(copy.deepcopy(policy.lm))
    saver.lm.gradient_checkpointing_enable()
    saver.lm.train()
    torch.testing.assert_close(gradient(saver, samples, [[0, 1, 2]], False), plain)


# -------------------------------------------------------------------------------------- processes


def test_a_tiny_model_learns_all_that_there_is_to_learn(student):
    losses = [line["loss"] for line in read_jsonl(student / "log.jsonl")]
    floor = 3 * math.log(10) / 6  # three of a reply's six tokens are digits drawn at random
    assert len(losses) == 16 and losses[0] > 4 and floor - 0.1 < losses[-1] < floor + 0.6


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tiny_model, episodes, student, tmp_path):
    train("sft.py", tmp_path / "sft", SFT, "--model", tiny_model, "--data", episodes, ranks=2)
    one, two = (read_jsonl(out / "log.jsonl") for out in (student, tmp_path / "sft"))
    for key, digits in (("loss", 1e-3), ("gnorm", 1e-2)):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=digits)


@pytest.mark.slow
def test_a_run_that_was_stopped_and_killed_ends_with_the_same_weights_and_log(
        tiny_model, episodes, student, tmp_path):
    train_broken("sft.py", tmp_path / "sft", SFT, "--model", tiny_model, "--data", episodes)
    one, two = weights(student), weights(tmp_path / "sft")
    assert all(torch.equal(one[name], two[name]) for name in one)
    one, two = ([[line["step"], line["loss"]] for line in read_jsonl(out / "log.jsonl")]
                for out in (student, tmp_path / "sft"))
    assert one == two


def test_an_existing_run_is_not_overwritten(student):
    with pytest.raises(Mistake, match="already holds a run: --resume continues it"):
        runtime.restore(None, SimpleNamespace(out=student, resume=False))




@pytest.mark.slow
def test_an_official_episode_takes_a_step_whole(official, test_data, tiny_model, tmp_path):
    task = load_task(read_jsonl(test_data / "travelplanner" / "val_102.jsonl")[0])
    episode = play_replies(Travel(official), Episode(task, Sandbox(official)))
    write_jsonl(tmp_path / "solved.jsonl", [episode.record()])
    train("sft.py", tmp_path / "sft", "--model", tiny_model, "--data", tmp_path / "solved.jsonl",
          "--batch 1 --steps 1 --keep-activations 100000")
    (line,) = read_jsonl(tmp_path / "sft" / "log.jsonl")
    assert line["tokens"] > 5000 and math.isfinite(line["loss"])
