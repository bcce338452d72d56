"""DPO: the loss by hand and in plain torch, and equal gradients and weights for any division of
work."""
import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import SEED, Plain, equal, flags_of, last_rate, train, train_broken

import dpo
import runtime
import zero3
from runtime import Mistake, read_jsonl, write_jsonl

DPO = """--batch 4 --steps 8 --lr 1e-4 --save-every 1 --val-every 3 --resume --pack-tokens 600
         --cutoff 400"""
ASKED = [{"role": "system", "content": "Say digits."}, {"role": "user", "content": "Go on."}]


def says(*replies):
    """Messages of replies, with observations between them."""
    messages = []
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "More!"}]
    return messages[:-1]


def row(chosen=("9 8",), rejected=("1 0",), rewards=(1.0, 0.0), **other):
    return {"prompt": ASKED, "chosen": says(*chosen), "rejected": says(*rejected),
            "rewards": list(rewards), **other}


@pytest.fixture(scope="module")
def pairs():
    """Seven pairs of random tokens; the two episodes of a pair differ in length."""
    draw, made = random.Random(SEED), []
    for _ in range(7):
        sides = []
        for _ in range(2):
            n = draw.randint(8, 60)
            ids, mask = ([draw.randrange(top) for _ in range(n)] for top in (300, 2))
            sides.append(runtime.Rendered(ids, [0, 0, 0, *mask[3:-1], 1]))
        made.append(dpo.Pair(*sides))
    return made


@pytest.fixture(scope="module")
def reference(pairs):
    """Random log-probabilities of a reference, so that margins are not 0."""
    torch.manual_seed(SEED)
    tokens = torch.tensor([[sum(pair[side].mask) for pair in pairs] for side in (0, 1)])
    return -tokens * 7.0 + torch.randn(2, len(pairs), dtype=torch.float64)


# ------------------------------------------------------------------------------------------- loss

@pytest.fixture(scope="module")
def plain(tiny_model):
    """The tiny model in transformers, in float64, since float32 gives fewer than six digits of a
    gradient."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)


def plain_logps(lm, rendered):
    """The sum of log pi over an episode's policy tokens, in plain torch."""
    ids = torch.tensor([rendered.ids])
    logps = torch.log_softmax(lm(ids).logits[0, :-1], -1)
    each = logps.gather(-1, ids[0, 1:, None]).squeeze(-1)
    return (each * torch.tensor(rendered.mask[1:])).sum()


def plain_gradient(lm, pairs, reference, args):
    """The loss of pairs as in [1], and its gradient by autograd through both episodes."""
    losses = []
    lm.zero_grad()
    for pair, (ref_chosen, ref_rejected) in zip(pairs, reference.T, strict=True):
        chosen, rejected = (plain_logps(lm, side) for side in pair)
        n_chosen, n_rejected = (sum(side.mask) for side in pair)
        deltas = [chosen - ref_chosen, rejected - ref_rejected]
        if args.length_norm:
            deltas = [deltas[0] / n_chosen, deltas[1] / n_rejected]
        margin = args.beta * (deltas[0] - deltas[1])
        losses.append(-torch.log(1 / (1 + torch.exp(-margin))) - args.nll * chosen / n_chosen)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in lm.parameters()])


def our_gradient(policy, pairs, reference, args, packed=False):
    """The numbers of an update, and its gradient."""
    engine = Plain(policy)
    numbers = dpo.learn_pairs(engine, dpo.episodes_of(pairs), reference, packed, 0, 1, "cpu", args)
    return numbers, engine.gradient()


@pytest.mark.parametrize("words, budget, packed", [
    ("--beta 0.5", 1, False), ("--nll 0.3", 70, False), ("--beta 0.5", 10_000, False),
    ("--nll 1 --length-norm --beta 5", 200, True)])
def test_loss_and_gradient_are_those_of_plain_torch_however_they_are_divided(
        plain, pairs, reference, one_rank, words, budget, packed):
    args = flags_of(dpo, f"{words} --pack-tokens {budget}")
    loss, gradient = plain_gradient(plain, pairs, reference, args)
    policy = zero3.Policy(copy.deepcopy(plain))
    numbers, found = our_gradient(policy, pairs, reference, args, packed)
    assert numbers["loss"] == pytest.approx(loss, rel=1e-6)
    assert (found - gradient).norm() <= 1e-6 * gradient.norm()


def test_the_numbers_of_a_loss_computed_by_hand():
    rows = [SimpleNamespace(mask=[1] * n) for n in (10, 20, 10, 40)]  # chosen, chosen, rejected, ..
    logps = torch.tensor([[-10.0, -30.0], [-20.0, -40.0]], dtype=torch.float64)
    reference = torch.tensor([[-14.0, -28.0], [-18.0, -37.0]], dtype=torch.float64)
    # deltas +4 and -2, -2 and -3; margins 0.1 * 6 and 0.1 * 1
    weights, numbers = dpo.preference(logps, reference, rows, flags_of(dpo))
    assert numbers == pytest.approx({
        "loss": (math.log(1 + math.exp(-0.6)) + math.log(1 + math.exp(-0.1))) / 2, "accuracy": 1.0,
        "margin": 0.35, "delta_chosen": 1.0, "delta_rejected": -2.5, "logp_chosen": -40 / 30,
        "logp_rejected": -60 / 50})
    pull = [0.1 / (1 + math.exp(margin)) / 2 for margin in (0.6, 0.1)]
    assert weights.flatten().tolist() == pytest.approx([-pull[0], -pull[1], *pull])


def test_separated_pairs_have_no_weight_and_no_margin_overflows():
    rows = [SimpleNamespace(mask=[1])] * 4
    logps = torch.tensor([[1e4, -1e4], [0, 0]], dtype=torch.float64)
    weights, numbers = dpo.preference(logps, torch.zeros(2, 2), rows, flags_of(dpo))
    assert weights.flatten().tolist() == pytest.approx([0, -0.05, 0, 0.05])
    assert numbers["loss"] == pytest.approx(500) and numbers["accuracy"] == 0.5


def test_a_rank_without_work_makes_its_passes_and_adds_nothing(policy, pairs, reference, one_rank,
                                                               monkeypatch):
    args = flags_of(dpo)
    _, worked = our_gradient(policy, pairs, reference, args)
    deal = zero3.micro_batches
    monkeypatch.setattr(zero3, "micro_batches",
                        lambda *words: [hand + [[]] for hand in deal(*words)])
    _, found = our_gradient(policy, pairs, reference, args)
    assert torch.equal(found, worked)


# ------------------------------------------------------------------------------------------- data

def test_results_of_tools_are_masked_and_a_play_that_was_cut_off_has_no_end(template, tmp_path):
    sides = ("call", "9"), ("call", "call", "0")
    write_jsonl(tmp_path / "p.jsonl", [row(*sides), row(*sides, stops=["answer", "context"])])
    trained = [template.tokenizer.decode([i for i, m in zip(*side, strict=True) if m])
               for pair in dpo.load_pairs(tmp_path / "p.jsonl", template, 400) for side in pair]
    assert trained == [
        "call<|im_end|>9<|im_end|>", "call<|im_end|>call<|im_end|>0<|im_end|>",
        "call<|im_end|>9<|im_end|>", "call<|im_end|>call<|im_end|>0"]


PAST = [*says("5"), {"role": "user", "content": "More!"}, *says("4")]
RESULT = {"role": "result", "content": " <result>6</result>"}


@pytest.mark.parametrize("past, before", [
    (PAST, [{"role": "user", "content": "And?"}]),  # the sides begin with observations
    ([*PAST, {"role": "user", "content": "And?"}], []), ([*says("5"), RESULT], []),
    (says("5"), [RESULT])])
def test_replies_that_both_sides_share_are_tokens_of_the_prompt(template, past, before):
    sides = {"chosen": before + says("9", "8"), "rejected": before + says("1")}
    whole = {name: past + side for name, side in sides.items()}
    known = dpo.read_pair(row() | whole, template, 400)
    pair = dpo.read_pair(row() | sides | {"prompt": ASKED + past}, template, 400)
    for side, all_replies, replies in zip(pair, known, (("9", "8"), ("1",)), strict=True):
        assert side.ids == all_replies.ids
        said = [template.tokenizer.decode([i]) for i, m in zip(*side, strict=True) if m]
        assert said == [text for reply in replies for text in (reply, "<|im_end|>")]
        begin = side.mask.index(1)
        assert side.mask[begin:] == all_replies.mask[begin:]


BAD = {
    "two prompts": {"chosen": ASKED + says("9"), "rejected": ASKED[:1] + says("0"),
                    "rewards": [1, 0]},
    "equal replies": row(("9", "8"), ("9", "8")), "no replies": row(rejected=()),
    "two replies at once": row() | {"chosen": says("9") + says("8")},
    "the worse one chosen": row(rewards=(0.0, 1.0)), "too long": row(rejected=("0 " * 500,)),
    "a mark of the template": row(("a<|im_end|>b",)),
    "nothing to train on": row(rejected=("",)) | {"stops": ["answer", "format"]}}


@pytest.mark.parametrize("why", BAD)
def test_a_pair_that_teaches_nothing_is_counted_and_named(template, tmp_path, capsys, why):
    write_jsonl(tmp_path / "p.jsonl", [row(), BAD[why], row(("7",)), BAD[why]])
    assert len(dpo.load_pairs(tmp_path / "p.jsonl", template, 400)) == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{tmp_path}/p.jsonl: 2 dropped, the first in line 2: ")
    write_jsonl(tmp_path / "p.jsonl", [BAD[why]] * 3)
    with pytest.raises(Mistake, match="p.jsonl"):  # a run without a pair does not begin
        dpo.load_pairs(tmp_path / "p.jsonl", template, 400)


# -------------------------------------------------------------------------------------- reference

def test_the_reference_is_computed_by_the_starting_weights_and_read_by_a_resumed_run(
        policy, plain, pairs, one_rank, tmp_path):
    rows, common = dpo.episodes_of(pairs), (False, 0, 1, "cpu", flags_of(dpo, f"--out {tmp_path}"))
    found = dpo.take_reference(Plain(policy), rows, 0, *common)
    with torch.no_grad():
        logps = [[plain_logps(plain, pair[side]) for pair in pairs] for side in (0, 1)]
    torch.testing.assert_close(found, torch.tensor(logps), rtol=1e-6, atol=0)
    assert torch.equal(dpo.take_reference(None, rows, 5, *common), found), "to the last bit"
    with pytest.raises(Mistake, match="reference.jsonl is of .* pairs, and there are 1 now"):
        dpo.take_reference(None, rows[:2], 5, *common)


# -------------------------------------------------------------------------------------- processes

@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Files of pairs in which high digits are better than low ones: for training and held out."""
    draw, folder = random.Random(SEED), tmp_path_factory.mktemp("pairs")

    def spoken(low, high):
        return [" ".join(str(draw.randint(low, high)) for _ in range(3)) for _ in range(2)]
    for name, n in (("pairs", 24), ("val", 9)):
        write_jsonl(folder / f"{name}.jsonl", [row(spoken(5, 9), spoken(0, 4)) for _ in range(n)])
    return folder


@pytest.fixture(scope="module")
def words(student, digits):
    return f"{DPO} --model {student} --data {digits}/pairs.jsonl --val {digits}/val.jsonl"


@pytest.fixture(scope="module")
def critic(words, tmp_path_factory):
    """The student after dpo.py."""
    out = tmp_path_factory.mktemp("critic") / "dpo"
    train("dpo.py", out, words)
    return out


@pytest.mark.slow
def test_the_student_comes_to_prefer_high_digits_on_held_out_pairs_too(critic, digits, template):
    lines = read_jsonl(critic / "log.jsonl")
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6, 8]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-4), "all deltas are 0 at first"
    assert lines[-1]["loss"] < 0.6 and lines[-1]["accuracy"] == 1.0
    assert lines[-1]["val_accuracy"] >= 0.75 and lines[-1]["val_margin"] > 0
    assert last_rate(critic) == lines[-1]["lr"] < 1e-4 / 10, "it has followed the cosine"
    val = dpo.load_pairs(digits / "val.jsonl", template, 400)
    after = lines[-1]["val_logp_chosen"] * sum(sum(pair.chosen.mask) for pair in val)
    before = sum(read_jsonl(critic / "reference.jsonl")[0][24:])  # after the training pairs
    assert lines[-1]["val_delta_chosen"] == pytest.approx((after - before) / len(val), rel=1e-6)


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(words, critic, tmp_path):
    train("dpo.py", tmp_path / "dpo", words, ranks=2)
    one, two = (read_jsonl(out / "log.jsonl") for out in (critic, tmp_path / "dpo"))
    for key in ("loss", "delta_chosen", "gnorm", "val_loss"):
        assert [line[key] for line in two if key in line] == pytest.approx(
            [line[key] for line in one if key in line], rel=1e-2, abs=1e-3)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_weights_and_log(words, critic, tmp_path):
    train_broken("dpo.py", tmp_path / "dpo", words, signals=["KILL"])
    assert equal(critic, tmp_path / "dpo")
    one, two = ((out / "reference.jsonl").read_text() for out in (critic, tmp_path / "dpo"))
    assert one == two
