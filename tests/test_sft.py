"""Supervised fine-tuning: what is trained on, and that the gradient is the same however the work is cut and interrupted."""

import copy
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sft
from evaluate import load_task, read_jsonl, write_jsonl

EPISODE = [
    {"role": "system", "content": "You plan trips."},
    {"role": "user", "content": "From Port Marble to Lake Fern."},
    {"role": "assistant", "content": "<think>hotels</think>\n<tool_call>{}</tool_call>"},
    {"role": "user", "content": "<tool_response>\n1. [Amber Inn] $43.0\n</tool_response>"},
    {"role": "assistant", "content": "<think>done</think>\n<answer>Day 1: [Amber Inn]</answer>"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def policy(tiny_model):
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa")
    return sft.Policy(lm, chunk=64)


@pytest.fixture(scope="module")
def samples():
    rng = random.Random(0)
    lengths = [rng.randint(8, 60) for _ in range(9)]
    return [
        {
            "ids": [rng.randrange(300) for _ in range(n)],
            "mask": [0] * 3 + [rng.randrange(2) for _ in range(n - 4)] + [1],
        }
        for n in lengths
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twelve short episodes whose replies can be learnt."""
    path = tmp_path_factory.mktemp("sft") / "episodes.jsonl"
    write_jsonl(
        path, [{"messages": EPISODE[:3] + [{"role": "user", "content": f"{i}" * i}, EPISODE[4]]} for i in range(1, 13)]
    )
    return path


# ------------------------------------------------------------------------------------------------------------ data


def test_rendered_ids_are_the_chat_templates(tokenizer):
    ids, _ = sft.render(EPISODE, tokenizer)
    whole = tokenizer.encode(tokenizer.apply_chat_template(EPISODE, tokenize=False), add_special_tokens=False)
    assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]) == "\n"


def test_mask_covers_replies_and_their_end_token_and_nothing_else(tokenizer):
    ids, mask = sft.render(EPISODE, tokenizer)
    trained = tokenizer.decode([t for t, m in zip(ids, mask) if m])
    assert trained == "".join(m["content"] + "<|im_end|>" for m in EPISODE if m["role"] == "assistant")


def test_an_episode_over_the_cutoff_is_dropped_whole(tokenizer, data):
    lengths = [len(sft.render(e["messages"], tokenizer)[0]) for e in read_jsonl(data)]
    cutoff = sorted(lengths)[6]
    samples, too_long = sft.load_samples(data, tokenizer, cutoff)
    assert [len(s["ids"]) for s in samples] == [n for n in lengths if n <= cutoff] and too_long == sum(
        n > cutoff for n in lengths
    ) > 0


def test_a_line_without_messages_is_named(tokenizer, tmp_path):
    write_jsonl(tmp_path / "bad.jsonl", [{"messages": EPISODE}, {"query": "?"}])
    with pytest.raises(SystemExit, match=r"bad.jsonl:2: no 'messages'"):
        sft.load_samples(tmp_path / "bad.jsonl", tokenizer, 1000)


def test_every_epoch_visits_every_episode_once_in_another_order():
    drawn = [i for step in range(15) for i in sft.batch_of(step, 10, 4, seed=1)]
    epochs = [drawn[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and len(set(map(tuple, epochs))) == 6


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=70), st.integers(1, 9), st.integers(100, 9000), st.booleans()
)
def test_a_cut_deals_every_sample_once_within_the_budget_and_evenly(lengths, world, budget, packed):
    ranks = sft.cut(lengths, world, budget, packed)
    assert sorted(i for r in ranks for m in r for i in m) == list(range(len(lengths)))
    assert len(ranks) == world and len({len(r) for r in ranks}) == 1
    for micro in (m for r in ranks for m in r if len(m) > 1):
        cost = sum(lengths[i] for i in micro) if packed else len(micro) * max(lengths[i] for i in micro)
        assert cost <= budget


def test_learning_rate_warms_up_and_follows_a_cosine():
    a = Namespace(lr=1.0, warmup=0.1, min_lr=0.0)
    rates = [sft.learning_rate(step, 100, a) for step in range(100)]
    assert rates[:10] == [pytest.approx((i + 1) / 10) for i in range(10)]
    assert rates[55] == pytest.approx(0.5) and rates[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))


# ------------------------------------------------------------------------------------------------------------ loss


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_logps_entropy_and_gradients_are_those_of_whole_logits(chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    targets, g, t = torch.tensor([0, 3, 10, 3, 2, 7, 7]), torch.randn(7), 0.7
    logps, entropy = sft.ChunkedLogps.apply(hidden, weight, targets, t, chunk)
    (logps * g).sum().backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    whole = torch.log_softmax(hidden @ weight.T / t, -1)
    (whole.gather(-1, targets[:, None]).squeeze(-1) * g).sum().backward()
    torch.testing.assert_close(logps, whole.gather(-1, targets[:, None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1))
    torch.testing.assert_close(got, (hidden.grad, weight.grad))


def gradient(policy, samples, micros, packed):
    policy.zero_grad()
    for micro in micros:
        logps, _ = policy(*sft.collate([samples[i] for i in micro], packed, "cpu"))
        (-logps.sum() * bool(micro) / 100).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 120, 10_000])
def test_gradient_depends_neither_on_micro_batches_nor_on_packing(policy, samples, packed, budget):
    alone = gradient(policy, samples, [[i] for i in range(len(samples))], False)
    micros = sft.cut([len(s["ids"]) for s in samples], 1, budget, packed)[0]
    gradients = gradient(policy, samples, micros, packed)
    assert (gradients - alone).norm() <= 5e-6 * alone.norm()  # float32 keeps seven digits of each sum
    torch.testing.assert_close(gradients, alone, rtol=1e-4, atol=4e-6 * alone.abs().max().item())


def test_a_rank_without_work_makes_its_forward_and_adds_nothing(policy, samples):
    with_work = gradient(policy, samples, [[0, 1]], False)
    torch.testing.assert_close(gradient(policy, samples, [[0, 1], []], False), with_work, rtol=0, atol=0)


def test_gradient_checkpointing_changes_no_gradient(tiny_model, policy, samples):
    plain = gradient(policy, samples, [[0, 1, 2]], False)
    saver = copy.deepcopy(policy)
    saver.lm.lm_head.forward = sft.Policy(saver.lm, 64).lm.lm_head.forward
    saver.lm.gradient_checkpointing_enable()
    saver.lm.train()
    torch.testing.assert_close(gradient(saver, samples, [[0, 1, 2]], False), plain)


# ---------------------------------------------------------------------------------------------------- whole processes


def command(model, data, out, ranks=1, *more):
    words = f"""-m torch.distributed.run --standalone --nproc_per_node {ranks} sft.py --model {model} --data {data}
        --out {out} --batch 4 --steps 8 --lr 1e-3 --save-every 2 --resume --pack-tokens 400"""
    return [sys.executable, *words.split(), *more]


def run(root, *args):
    done = subprocess.run(command(*args), cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def unbroken(tiny_model, data, root, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    run(root, tiny_model, data, out)
    return out


def test_training_lowers_the_loss(unbroken):
    losses = [line["loss"] for line in read_jsonl(unbroken / "log.jsonl")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1


def test_two_ranks_learn_what_one_learns(tiny_model, data, root, unbroken, tmp_path):
    run(root, tiny_model, data, tmp_path, 2)
    for one, two in zip(read_jsonl(unbroken / "log.jsonl"), read_jsonl(tmp_path / "log.jsonl")):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4) and two["gnorm"] == pytest.approx(
            one["gnorm"], rel=1e-3
        )


def kill_after(root, lines, out, args):
    """Start a run and SIGKILL it with all its ranks once its log has that many lines."""
    with open(out / "killed.txt", "w") as screen:
        process = subprocess.Popen(command(*args), cwd=root, stdout=screen, stderr=screen, start_new_session=True)
        log = out / "log.jsonl"
        while process.poll() is None and (not log.exists() or log.read_text().count("\n") < lines):
            time.sleep(0.02)
        assert process.poll() is None, (out / "killed.txt").read_text()[-3000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_killed_run_resumes_to_the_same_weights(tiny_model, data, root, unbroken, tmp_path):
    kill_after(root, 3, tmp_path, (tiny_model, data, tmp_path))
    run(root, tiny_model, data, tmp_path)
    whole, resumed = weights(unbroken), weights(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [l["step"] for l in read_jsonl(tmp_path / "log.jsonl")] == list(range(1, 9))


def test_an_existing_run_is_not_overwritten(tiny_model, data, root, unbroken):
    words = [w for w in command(tiny_model, data, unbroken) if w != "--resume"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "already holds a run: add --resume" in done.stderr


def test_a_checkpoint_of_other_ranks_is_refused_in_one_sentence(tiny_model, data, root, unbroken):
    done = subprocess.run(
        command(tiny_model, data, unbroken, 2, "--steps", "9"), cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "saved by 1 ranks" in done.stderr
    assert json.loads((unbroken / "checkpoints" / "last.json").read_text())["step"] == 8


def test_official_episodes_at_a_context_of_30k_take_a_step(test_data, tiny_model, root, tmp_path):
    database = test_data / "travelplanner" / "database"
    write_jsonl(tmp_path / "tasks.jsonl", [load_task(row) for row in read_jsonl(test_data / "travelplanner" / "val_102.jsonl")[:2]])
    words = f"synth.py episodes --database {database} --like paper --tasks {tmp_path}/tasks.jsonl --out {tmp_path}/sft.jsonl"
    subprocess.run([sys.executable, *words.split()], cwd=root, check=True, capture_output=True)
    more = ("--batch", "2", "--steps", "1", "--cutoff", "30000", "--pack-tokens", "30000")
    run(root, tiny_model, tmp_path / "sft.jsonl", tmp_path / "out", 1, *more)
    line = read_jsonl(tmp_path / "out" / "log.jsonl")[0]
    assert line["tokens"] > 5000 and math.isfinite(line["loss"])


def test_the_plan_knows_no_engine_and_goes_by_the_cutoff(tiny_model, root):
    words = ["sft.py", "--plan", "--model", tiny_model, "--gpus", "4", "--cutoff", "30000"]
    done = subprocess.run([sys.executable, *map(str, words)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, head, *rows = done.stdout.splitlines()
    assert "on 4 GPUs, 30000 tokens at a time" in first and head.split()[-3:] == ["logits", "layer", "step"]
    assert not any("engine" in row for row in rows)
    done = subprocess.run([sys.executable, *map(str, words), "--gpu-gib", "1"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and "does not fit" in done.stderr
