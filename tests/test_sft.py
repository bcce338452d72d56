"""SFT: the trained tokens, and equal gradients and weights for any division and interruption."""
import math
import random
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import SEED, SFT, Plain, equal, last_rate, train, train_broken
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grpo import logps_of

import runtime
import sft
import zero3
from runtime import Mistake, read_jsonl, write_jsonl

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
        made.append(runtime.Rendered(ids, [0, 0, 0, *mask[3:-1], 1]))
    return made


# ------------------------------------------------------------------------------------------- data

def trained_on(sample, template):
    """The text of the tokens with mask 1."""
    ids = [i for i, m in zip(sample.ids, sample.mask, strict=True) if m]
    return template.tokenizer.decode(ids)


def test_ids_are_the_chat_templates_and_the_mask_covers_replies_and_their_end_token(template):
    rendered = runtime.render(EPISODE, template)
    whole = template.encode(template.tokenizer.apply_chat_template(EPISODE, tokenize=False))
    n = len(rendered.ids)
    assert rendered.ids == whole[:n] and template.tokenizer.decode(whole[n:]) == "\n"
    assert trained_on(rendered, template) == "".join(
        f"{m['content']}<|im_end|>" for m in EPISODE if m["role"] == "assistant")


def load(rows, template, tmp_path, cutoff=1000):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return sft.load_samples(tmp_path / "rows.jsonl", template, cutoff)


def test_an_episode_over_the_cutoff_is_dropped_whole_and_one_that_failed(template, tmp_path):
    rows = [{"messages": [*EPISODE[:4], {"role": "assistant", "content": "7" * n}]}
            for n in (1, 9, 30, 50)]
    lengths = [len(runtime.render(row["messages"], template).ids) for row in rows]
    rows += [rows[0] | {"score": score} for score in (None, {"success": 1.0}, {"success": 0.0})]
    kept, dropped = load(rows, template, tmp_path, lengths[1])
    assert [len(sample.ids) for sample in kept] == [*lengths[:2], lengths[0], lengths[0]]
    assert dropped == {"failed": 1, "too long": 2, "without reply": 0}


def test_end_tokens_are_trained_once_and_only_if_the_model_said_them(template, tmp_path):
    talk = EPISODE[:2]
    yes, ended = ([*talk, {"role": "assistant", "content": text}]
                  for text in ("yes", "yes<|im_end|>"))
    (one, two, cut, long), _ = load([{"messages": yes}, {"messages": ended}, *(
        {"messages": yes, "stop": stop} for stop in ("context", "length"))], template, tmp_path)
    assert one == two and trained_on(one, template) == "yes<|im_end|>"
    assert trained_on(cut, template) == "yes" and cut.ids == one.ids[:-1] == long.ids


def test_files_without_queries_or_replies_are_refused(template, tmp_path):
    for rows in ([], *([{"messages": talk}] for talk in ([], EPISODE[:2], EPISODE[2:]))):
        with pytest.raises(Mistake, match="rows.jsonl"):
            load(rows, template, tmp_path)


def test_every_epoch_visits_every_episode_once_in_another_order():
    drawn = [i for step in range(15) for i in zero3.batch_of(step, 10, 4, SEED)]
    epochs = [drawn[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5000), min_size=0, max_size=70), st.integers(1, 9),
       st.integers(100, 9000), st.booleans())
def test_every_sample_is_dealt_once_within_the_budget_and_ranks_get_as_many_micro_batches(
        lengths, ranks, budget, packed):
    hands = zero3.micro_batches(lengths, ranks, budget, packed)
    assert sorted(i for hand in hands for micro in hand for i in micro) == [*range(len(lengths))]
    assert len(hands) == ranks and len({len(hand) for hand in hands}) == 1 and hands[0]
    for micro in (micro for hand in hands for micro in hand if len(micro) > 1):
        sizes = [lengths[i] for i in micro]
        assert (sum(sizes) if packed else len(micro) * max(sizes)) <= budget


@pytest.mark.parametrize("packed, least", [(True, 0.94), (False, 0.84)])
def test_sixteen_ranks_hardly_wait_for_each_other(packed, least):
    """The tokens of a batch, divided by those of ranks that wait for the largest micro-batch."""
    draw = random.Random(SEED)
    lengths = [min(30_000, max(500, round(draw.lognormvariate(9.1, 0.5)))) for _ in range(256)]
    spent = 0
    for together in zip(*zero3.micro_batches(lengths, 16, 32_768, packed), strict=True):
        micros = [[lengths[i] for i in micro] for micro in together if micro]
        spent += max(sum(micro) if packed else max(micro) * len(micro) for micro in micros)
    assert sum(lengths) / 16 / spent >= least


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    args = Namespace(lr=1.0, warmup=0.1, min_lr=0.2)
    rates = [sft.learning_rate(step, 100, args) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    cosine = 0.5 * (1 + math.cos(math.pi * 89 / 90))
    assert [rates[55], rates[99]] == pytest.approx([0.6, 0.2 + 0.8 * cosine])


# ------------------------------------------------------------------------------------------- loss

@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_logps_entropy_and_gradients_are_those_of_whole_logits(chunk, monkeypatch):
    torch.manual_seed(SEED)
    head = torch.nn.Linear(5, 11, bias=False)
    lm = SimpleNamespace(get_output_embeddings=lambda: head)
    monkeypatch.setattr(zero3, "LOGITS", chunk * 11)
    hidden, weight = torch.randn(7, 5, requires_grad=True), head.weight
    targets, grad, t = torch.tensor([0, 3, 10, 3, 2, 7, 7]), torch.randn(7), 0.7
    logps, entropy = zero3.Policy.head(SimpleNamespace(lm=lm), hidden, targets, t)
    found = torch.autograd.grad((logps * grad).sum(), (hidden, weight))
    whole = torch.log_softmax(hidden @ weight.T / t, -1)
    chosen = whole.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logps, chosen)
    nats = -(whole.exp() * whole).sum(-1)
    torch.testing.assert_close(entropy, nats)
    torch.testing.assert_close(found, torch.autograd.grad((chosen * grad).sum(), (hidden, weight),
                                                          retain_graph=True))
    for share in (0.0, 1.0):  # an entropy bonus, alone and beside the log-probabilities
        logps, entropy = zero3.Policy.head(SimpleNamespace(lm=lm), hidden, targets, t)
        ours, theirs = ((share * one + two.square() if share else two.square()).sum()
                        for one, two in ((logps * grad, entropy), (chosen * grad, nats)))
        torch.testing.assert_close(
            torch.autograd.grad(ours, (hidden, weight)),
            torch.autograd.grad(theirs, (hidden, weight), retain_graph=True))


def test_the_heads_gradient_is_summed_over_chunks_in_float32(monkeypatch):
    torch.manual_seed(SEED)
    weight = (torch.randn(50, 16) / 4).bfloat16().requires_grad_()
    hidden, targets = torch.randn(900, 16).bfloat16(), torch.randint(50, (900,))
    exact = weight.detach().double().requires_grad_()
    whole = torch.log_softmax(hidden.double() @ exact.T, -1).gather(-1, targets[:, None])
    (wanted,) = torch.autograd.grad(whole.sum(), exact)
    monkeypatch.setattr(zero3, "LOGITS", 5 * 50)  # 180 chunks
    logps, _ = zero3.ChunkedLogps.apply(hidden, weight, targets, 1.0)
    (found,) = torch.autograd.grad(logps.sum(), weight)
    assert (found.double() - wanted).norm() < 0.006 * wanted.norm()


def learn(policy, samples, budget, packed, rank=0, ranks=1):
    """(loss, the engine that has its gradient) of a batch, or of a rank's part of it."""
    engine = Plain(policy)
    args = Namespace(pack_tokens=budget)
    return sft.loss_of(samples, engine, packed, rank, ranks, "cpu", args)[0], engine


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [120, 10_000])
def test_the_gradient_depends_neither_on_micro_batches_nor_on_packing(
        policy, samples, packed, budget, one_rank):
    (loss, engine), (found_loss, found_engine) = (
        learn(policy, samples, *how) for how in ((1, False), (budget, packed)))
    alone, found = engine.gradient(), found_engine.gradient()
    with torch.no_grad():
        by_hand = torch.cat([logps_of(policy, s, 1.0) for s in samples]).mean().item()
    assert found_loss == pytest.approx(loss, rel=1e-6) == pytest.approx(-by_hand, rel=1e-5)
    assert (found - alone).norm() <= 5e-6 * alone.norm()  # float32 keeps seven digits of each sum
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=4e-6 * alone.abs().max().item())


def test_a_rank_without_work_makes_its_forward_and_adds_nothing(policy, samples, one_rank):
    loss, engine = learn(policy, samples[:1], 10_000, False, rank=1, ranks=2)
    assert loss == 0 and not engine.gradient().any()


def test_held_out_episodes_are_measured_and_not_learned_from(policy, samples, one_rank):
    loss, _ = learn(policy, samples, 10_000, False)
    with torch.no_grad():
        held_out, engine = learn(policy, samples, 10_000, False)
    assert held_out == loss and all(p.grad is None for p in engine.module.parameters())


# -------------------------------------------------------------------------------------- processes

@pytest.mark.slow
def test_a_tiny_model_learns_all_that_there_is_to_learn(student):
    lines = read_jsonl(student / "log.jsonl")
    floor = 3 * math.log(10) / 6  # three of a reply's six tokens are digits drawn at random
    assert len(lines) == 16 and lines[0]["loss"] > 4
    assert floor - 0.1 < lines[-1]["loss"] < floor + 0.6
    assert last_rate(student) == lines[-1]["lr"] < 1e-3 / 50, "it has followed the cosine"


@pytest.mark.slow
def test_two_ranks_that_shard_no_weights_learn_what_one_learns(
        tiny_model, episodes, student, tmp_path):
    train("sft.py", tmp_path / "sft", SFT, "--model", tiny_model, "--data", episodes,
          "--keep-activations 200 --zero 2", ranks=2)
    one, two = (read_jsonl(out / "log.jsonl") for out in (student, tmp_path / "sft"))
    for key, digits in (("loss", 1e-3), ("gnorm", 1e-2)):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=digits)


@pytest.mark.slow
def test_ranks_recompute_the_same_layers_where_only_ones_micro_batch_is_large(
        tiny_model, episodes, tmp_path):
    rows = read_jsonl(episodes)
    for row in rows[::2]:
        row["messages"][1]["content"] *= 20
    write_jsonl(tmp_path / "uneven.jsonl", rows)
    for keep in 0, 300:
        train("sft.py", tmp_path / str(keep), SFT, "--steps 8 --batch 2 --model", tiny_model,
              "--data", tmp_path / "uneven.jsonl", f"--keep-activations {keep}", ranks=2)
    kept, none = (read_jsonl(tmp_path / str(keep) / "log.jsonl") for keep in (300, 0))
    assert len({line["tokens"] for line in none}) > 2, "both long, both short, one of each"
    for key in "loss", "gnorm":
        assert [line[key] for line in kept] == pytest.approx([line[key] for line in none], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_was_stopped_and_killed_ends_with_the_same_weights_and_log(
        tiny_model, episodes, student, tmp_path):
    train_broken("sft.py", tmp_path / "sft", SFT, "--model", tiny_model, "--data", episodes)
    assert equal(student, tmp_path / "sft")


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(tiny_model, episodes, tmp_path):
    said = train("sft.py", tmp_path / "sft", SFT, "--lr 1e37 --warmup 0", "--model", tiny_model,
                 "--data", episodes, status=1)
    assert ": loss is " in said.splitlines()[-1] and "--lr" in said.splitlines()[-1]
    rows = read_jsonl(tmp_path / "sft" / "log.jsonl")
    assert all(row["loss"] < float("inf") for row in rows) and len(rows) < 16
    assert not (tmp_path / "sft" / "config.json").exists()
