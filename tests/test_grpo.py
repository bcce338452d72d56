"""GRPO: token-exact play, advantages and loss by hand, the same update however it is cut, killed runs, real ranks."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

import grpo
import sft
import synth
from evaluate import load_task, read_jsonl, write_jsonl
from sandbox import SHORT_PROMPT, Episode, Sandbox

FLAGS = Namespace(
    context=4000,
    turn_tokens=500,
    max_turns=10,
    max_seconds=1e9,
    tp=1,
    failure_rate=0.0,
    system_prompt="short",
    seed=0,
    no_std=False,
    keep_overlength=False,
    drop_uniform=False,
    loss_norm="group",
    clip_low=0.2,
    clip_high=0.28,
)


def flags(**changes):
    return Namespace(**{**vars(FLAGS), **changes})


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tasks(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    words = f"synth.py tasks --database database/mini --n 6 --days 3 --out {out}"
    subprocess.run([sys.executable, *words.split()], cwd=root, check=True, capture_output=True)
    return out


# -------------------------------------------------------------------------------------------------------- rollout


def output(tokenizer, reply, closed=True):
    """What the engine hands over when it has said `reply`."""
    ids = tokenizer.encode(reply, add_special_tokens=False) + [tokenizer.eos_token_id] * closed
    return SimpleNamespace(token_ids=ids, logprobs=[{t: SimpleNamespace(logprob=-0.5)} for t in ids])


def play_script(task, replies, database, tokenizer, a=FLAGS):
    s = grpo.new_sample(task, 0, "play/0/0/0", database, tokenizer, a)
    for reply in replies:
        if not grpo.play_turn(
            s, reply if isinstance(reply, SimpleNamespace) else output(tokenizer, reply), tokenizer, a
        ):
            break
    return s


@pytest.fixture(scope="module")
def solved(tasks, mini, root, tmp_path_factory):
    out = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    words = f"synth.py episodes --database database/mini --tasks {tasks} --out {out}"
    subprocess.run([sys.executable, *words.split()], cwd=root, check=True, capture_output=True)
    return read_jsonl(out)


def test_played_tokens_are_those_that_sft_renders(solved, mini, tokenizer):
    for episode in solved:
        s = play_script(
            episode["task"], [m["content"] for m in episode["messages"] if m["role"] == "assistant"], mini, tokenizer
        )
        assert s.episode.stop == "answer" and (s.ids, s.mask) == sft.render(s.episode.messages, tokenizer)
        assert [m for l, m in zip(s.logps, s.mask)] == [int(l == -0.5) for l in s.logps]


def test_a_breach_of_the_protocol_ends_the_episode_with_reward_zero(solved, mini, tokenizer):
    s = play_script(solved[0]["task"], ["no tags at all"], mini, tokenizer)
    grpo.judge_all([s], mini, "sum")
    assert s.stop == "format" and s.reward == 0 and sum(s.mask) > 0


def test_a_reply_that_does_not_end_is_a_format_error_and_at_the_context_overlength(solved, mini, tokenizer):
    reply = "<think>a</think>\n<answer>b</answer>"
    assert (
        play_script(solved[0]["task"], [output(tokenizer, reply, closed=False)], mini, tokenizer).episode.stop
        == "format"
    )
    prompt = len(grpo.new_sample(solved[0]["task"], 0, "x", mini, tokenizer, FLAGS).ids)
    tight = flags(context=prompt + len(output(tokenizer, reply).token_ids) - 1)
    s = play_script(solved[0]["task"], [output(tokenizer, reply, closed=False)], mini, tokenizer, tight)
    assert s.episode.stop == "context" and s.episode.answer is None


def test_an_observation_that_fills_the_context_ends_the_episode(solved, mini, tokenizer):
    replies = [m["content"] for m in solved[0]["messages"] if m["role"] == "assistant"]
    prompt = len(grpo.new_sample(solved[0]["task"], 0, "x", mini, tokenizer, FLAGS).ids)
    s = play_script(solved[0]["task"], replies, mini, tokenizer, flags(context=prompt + 60))
    assert s.episode.stop == "context"


def test_a_prompt_longer_than_the_context_is_refused_with_the_fix(solved, mini, tokenizer):
    with pytest.raises(ValueError, match="raise --context above 20"):
        grpo.new_sample(solved[0]["task"], 0, "x", mini, tokenizer, flags(context=20))


# ----------------------------------------------------------------------------------------------------------- loss


def sample(query, reward, tokens=4, stop="answer", name=""):
    return grpo.Sample(
        None,
        query,
        name,
        ids=[1] * (tokens + 2),
        mask=[0, 0] + [1] * tokens,
        logps=[0.0] * (tokens + 2),
        stop=stop,
        reward=reward,
    )


def test_advantages_by_hand():
    samples = [sample(0, r) for r in (0.0, 1.0, 1.0, 2.0)] + [sample(1, 3.0), sample(1, 3.0)]
    grpo.group_advantages(samples, FLAGS)
    root2 = math.sqrt(2)
    assert [s.advantage for s in samples] == pytest.approx([-root2, 0, 0, root2, 0, 0], abs=1e-5)
    grpo.group_advantages(samples, flags(no_std=True))
    assert [s.advantage for s in samples] == [-1, 0, 0, 1, 0, 0]


def test_overlength_leaves_the_loss_and_its_denominator_but_not_the_statistics():
    samples = [sample(0, 0.0, 10, "context"), sample(0, 1.0, 4), sample(0, 2.0, 6), sample(0, 1.0, 90, "turns")]
    groups = grpo.group_advantages(samples, FLAGS)
    assert samples[1].advantage == 0 and samples[2].advantage == pytest.approx(math.sqrt(2), abs=1e-5)
    weighted = grpo.token_weights(groups, FLAGS)
    assert [(s.reward, w) for s, w in weighted] == [(1.0, 0.1), (2.0, 0.1)]


def test_keep_overlength_puts_such_plays_into_the_loss_and_its_denominator():
    samples = [sample(0, 0.0, 10, "context"), sample(0, 1.0, 4), sample(0, 1.0, 36, "turns"), sample(1, 0.0, 7, "turns")]
    weighted = grpo.token_weights(grpo.group_advantages(samples, FLAGS), flags(keep_overlength=True))
    assert [(s.stop, w) for s, w in weighted] == [(s.stop, 1 / 50 / 2) for s in samples[:3]]
    assert samples[0].advantage == pytest.approx(-math.sqrt(2), abs=1e-5)


def test_token_weights_by_hand():
    samples = [sample(0, 1.0, 2), sample(0, 0.0, 6), sample(1, 1.0, 12), sample(1, 1.0, 4), sample(2, 0.0, 5, "turns")]
    groups = grpo.group_advantages(samples, FLAGS)
    assert [w for _, w in grpo.token_weights(groups, FLAGS)] == [1 / 16] * 2
    assert [w for _, w in grpo.token_weights(groups, flags(loss_norm="batch"))] == [1 / 24] * 2
    assert [w for _, w in grpo.token_weights(groups, flags(drop_uniform=True))] == [1 / 8] * 2


def test_groups_of_equal_reward_count_in_the_denominator_and_are_not_computed_unless_there_is_nothing_else():
    equal = [sample(0, 1.0, 12), sample(0, 1.0, 4)]
    assert [w for _, w in grpo.token_weights(grpo.group_advantages(equal, FLAGS), FLAGS)] == [1 / 16] * 2
    groups = grpo.group_advantages([*equal, sample(1, 1.0, 2), sample(1, 0.0, 6)], FLAGS)
    assert [(s.query, w) for s, w in grpo.token_weights(groups, FLAGS)] == [(1, 1 / 16)] * 2


def test_policy_loss_by_hand():
    w = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    loss, side = grpo.policy_loss(w.log(), torch.zeros(5), advantage, torch.full((5,), 0.2), FLAGS)
    # 2, clipped 2.56, 1, unclipped -3, clipped -1.6
    assert loss.item() == pytest.approx(-(2 + 2.56 + 1 - 3 - 1.6) / 5) and side.tolist() == [0, 1, 0, 0, -1]


def test_one_step_raises_the_probability_of_the_rewarded_tokens_and_lowers_the_others():
    logits = torch.zeros(2, 3, requires_grad=True)
    logps = torch.log_softmax(logits, -1)[:, 0]
    loss, _ = grpo.policy_loss(logps, logps.detach(), torch.tensor([1.0, -1.0]), torch.full((2,), 0.5), FLAGS)
    loss.backward()
    after = torch.log_softmax(logits - logits.grad, -1)[:, 0]
    assert after[0] > logps[0] and after[1] < logps[1]


def test_curriculum_is_sum_then_macro_then_success():
    kinds = [grpo.reward_kind("curriculum", i / 10) for i in range(10)]
    assert kinds == ["sum"] * 4 + ["macro"] * 4 + ["success"] * 2 and grpo.reward_kind("macro", 0) == "macro"


def test_minibatches_share_out_the_queries():
    groups = {q: [sample(q, 0.0)] for q in range(7)}
    parts = grpo.split(groups, 3)
    assert sorted(q for p in parts for q in p) == list(range(7)) and [len(p) for p in parts] == [3, 2, 2]


# ------------------------------------------------------------------------------------------------------- planning

GIB = 2**30


def shape(folder, size):
    """A folder with the config of a Qwen2.5 and nothing else."""
    from transformers import Qwen2Config

    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = {
        "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
        "3B": (2048, 36, 16, 2, 11008, 151936, True),
        "7B": (3584, 28, 28, 4, 18944, 152064, False),
    }[size]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    config.save_pretrained(folder)
    return config


def planned(monkeypatch, capsys, *words):
    """What `grpo.py --plan` prints as {row: its numbers}, and what it exits with."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--plan", *map(str, words)])
    try:
        status = grpo.main()
    except SystemExit as stop:
        status = stop.code
    lines = capsys.readouterr().out.splitlines()
    return {line[:30].strip(): [float(word) for word in line[30:].split()] for line in lines[2:-1]}, status, lines


def test_the_plan_of_7b_by_hand(tmp_path, monkeypatch, capsys):
    config, n = shape(tmp_path, "7B"), 7_615_616_512
    rows, status, lines = planned(monkeypatch, capsys, "--model", tmp_path, "--gpus", 16)
    assert status is None and f"{n:,} parameters" in lines[0] and "19.9 contexts of 30000 tokens" in lines[-1]
    assert rows["AdamW's moments, fp32 shards"] == [3.5] * 4 and rows["engine's weights, bf16"] == [14.2]
    a = Namespace(pack_tokens=32768, logp_chunk=1024, gpus=16, no_checkpointing=False, tp=1, gpu_memory=0.6, gpu_gib=80)
    sizes, contexts = grpo.memory(config, n, a, 30000)
    sizes = {what: size * GIB for what, size, _ in sizes}
    assert sizes == pytest.approx(
        {
            "parameters, bf16 shard": 2 * n / 16,
            "master weights, fp32 shard": 4 * n / 16,
            "gradients, fp32 shard": 4 * n / 16,
            "AdamW's moments, fp32 shards": 8 * n / 16,
            "gradients' bucket, bf16": 1e9,
            "bucket's copy to be sent": 1e9,
            "gathered parameters, bf16": 2e9,
            "every layer's input": 6.125 * GIB,  # 28 x 32768 x 3584 x 2
            "a layer's activations, again": 6.875 * GIB,  # 32768 x (20 x 3584 + 4 x 512 + 8 x 18944)
            "its gradients on the way": 2.53125 * GIB,  # 32768 x (4 x 18944 + 2 x 3584)
            "last norm and hidden states": 1.3125 * GIB,  # 32768 x 12 x 3584
            "logits, head's gradient": 4_204_265_472,  # 6 x 152064 x (1024 + 3584)
            "AdamW's copy and root": 8 * n / 16,
            "CUDA, NCCL, waste (assumed)": 4 * GIB,
            "engine's weights, bf16": 2 * n,
            "engine's KV cache": 46 * GIB - 2 * n,
            "engine's work (assumed)": 2 * GIB,
        }
    )
    assert contexts == pytest.approx((46 * GIB - 2 * n) / (57_344 * 30000))
    two = {w: size * GIB for w, size, _ in grpo.memory(config, n, Namespace(**vars(a) | {"gpus": 32, "tp": 2}), 30000)[0]}
    assert all(two[w] == pytest.approx(sizes[w] / 2) for w in sizes if "shard" in w or w == "engine's weights, bf16")


@pytest.mark.parametrize(
    "words,turn",
    [
        ("--gpus 2", "--gpu-memory 0.5 --gpus 4"),
        ("--gpu-memory 0.9", "--gpu-memory 0.7"),
        ("--gpu-memory 0.2", "--gpu-memory 0.7"),
        ("--gpu-gib 27.3 --gpus 32", "--tp 2"),
        ("--no-checkpointing", "no --no-checkpointing"),
        ("--pack-tokens 200000", "--pack-tokens 30000"),
        ("--logp-chunk 32768", "--logp-chunk 512"),
        ("--context 300000", "no flag but a shorter context helps"),
    ],
)
def test_where_it_does_not_fit_the_plan_names_the_flag_and_fails(words, turn, tmp_path, monkeypatch, capsys):
    shape(tmp_path, "7B")
    _, status, _ = planned(monkeypatch, capsys, "--model", tmp_path, *words.split())
    assert status.startswith("this does not fit") and turn in status
    if turn.startswith("--"):  # and it is true
        assert planned(monkeypatch, capsys, "--model", tmp_path, *words.split(), *turn.split())[1] is None


def test_a_sample_is_never_cut_so_packing_less_than_a_context_saves_nothing(tmp_path, monkeypatch, capsys):
    shape(tmp_path, "1.5B")
    one, two = (planned(monkeypatch, capsys, "--model", tmp_path, "--pack-tokens", t) for t in (30000, 1000))
    assert one == two and "30000 tokens at a time" in one[2][0]


def test_a_plan_of_a_missing_folder_says_so_in_a_line(tmp_path, monkeypatch, capsys):
    status = planned(monkeypatch, capsys, "--model", tmp_path / "nothing")[1]
    assert status.startswith(f"no {tmp_path}/nothing/config.json: --model takes")


@pytest.mark.parametrize("words,ranks", [("--plan --gpus 6 --tp 4", 6), ("--tp 2", 3), ("--tp 0", 3)])
def test_ranks_that_make_no_whole_engines_are_refused(words, ranks, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        grpo.flags()
    assert stop.value.code == 2 and f"does not divide {ranks} ranks into engines" in capsys.readouterr().err


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that tensors made under it held at once, on any device, the one without storage too."""

    def __init__(self, known):
        super().__init__()
        self.known, self.now, self.peak = {t.untyped_storage()._cdata for t in known}, 0, 0

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and (key := (storage := t.untyped_storage())._cdata) not in self.known:
                weakref.finalize(storage, self.free, key, storage.nbytes())
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out


def blockwise(module, q, k, v, *_, **__):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0].transpose(1, 2), None


@pytest.mark.parametrize(
    "size,tokens,keep,moment",
    [("7B", 30000, False, "layer"), ("3B", 30000, False, "layer"), ("1.5B", 4096, False, "logits"), ("7B", 30000, True, "logits")],
)
def test_planned_activations_are_those_of_the_real_model_without_storage(size, tokens, keep, moment, tmp_path):
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("blockwise", blockwise)
    config = shape(tmp_path, size)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="blockwise")
        ids = torch.zeros(1, tokens, dtype=torch.long)
    lm.train()
    if not keep:
        lm.gradient_checkpointing_enable()
    for p in lm.parameters():  # ZeRO-3 takes a gradient away as soon as it is there
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    policy = grpo.Policy(lm, 1024)
    with Peak(lm.parameters()) as peak:
        hidden = lm.base_model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False)[0]
        logps, _ = policy.lm.lm_head(hidden[0, :-1], ids[0, 1:], 1.0)
        del hidden
        logps.sum().backward()
    a = Namespace(pack_tokens=0, logp_chunk=1024, gpus=8, no_checkpointing=keep)
    own = ("shard", "bucket", "gathered", "CUDA")
    rows = [row for row in grpo.memory(config, 0, a, tokens)[0] if not any(word in row[0] for word in own)]
    assert sum(size for _, size, where in rows if moment in where) == pytest.approx(peak.peak / GIB, rel=0.01)


def test_planned_states_are_those_of_zero3(tiny_model, root, tmp_path):
    script = """if True:
        import json, sys, torch, grpo
        from types import SimpleNamespace
        from transformers import AutoModelForCausalLM
        rank, world, device = grpo.setup()
        policy = grpo.Policy(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16), 64)
        a = SimpleNamespace(lr=1e-3, weight_decay=0.0, grad_clip=1.0)
        engine = grpo.zero3(policy, a, world, SimpleNamespace(type="cuda"))  # what a GPU gets, in this machine's memory
        logps, _ = engine(torch.ones(1, 9).long(), torch.arange(9)[None], torch.ones(1, 9).bool())
        engine.backward(logps.sum())
        engine.step()
        z = engine.optimizer
        moments = [t for state in z.optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
        size = lambda *tensors: sum(t.nbytes for t in tensors)
        if rank == 0:
            json.dump([size(z.lp_param_buffer), size(*z.fp32_partitioned_groups_flat), size(z.grad_partitions_flat_buffer),
                       size(*moments), size(*(b.buffer for b in z.ipg_buckets.values())), engine.zero_max_live_parameters(),
                       z.sub_group_size], open(sys.argv[2], "w"))
    """
    (tmp_path / "states.py").write_text(script)
    words = f"-m torch.distributed.run --standalone --nproc_per_node 2 {tmp_path}/states.py {tiny_model} {tmp_path}/states.json"
    subprocess.run([sys.executable, *words.split()], cwd=root, check=True, capture_output=True, timeout=600)
    n = sum(t.numel() for t in weights(tiny_model).values())
    a = Namespace(pack_tokens=0, logp_chunk=1, gpus=2, no_checkpointing=False)
    config = json.loads((tiny_model / "config.json").read_text())
    rows, _ = grpo.memory(SimpleNamespace(**config), n, a, 1)
    found = json.loads((tmp_path / "states.json").read_text())
    assert found[:5] == pytest.approx([size * GIB for _, size, _ in rows[:5]], rel=1e-3) and found[5:] == [1e9, 1e9]


# ------------------------------------------------------------------------------------------------- whole processes


def command(model, tasks, out, ranks, *more):
    words = f"""-m torch.distributed.run --standalone --nproc_per_node {ranks} grpo.py --model {model} --tasks {tasks}
        --out {out} --database database/mini --system-prompt short --prompts 2 --group 4 --steps 4 --lr 1e-3
        --warmup 1 --decay 0.5 --context 800 --max-turns 4 --turn-tokens 300 --concurrency 8 --save-every 1 --resume"""
    return [sys.executable, *words.split(), *map(str, more)]


def run(root, *args):
    done = subprocess.run(command(*args), cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def student(solved, root, tmp_path_factory):
    """A tiny model that has seen a few episodes: it makes calls, some right, so that rewards differ."""
    folder = tmp_path_factory.mktemp("student")
    rows = [{"messages": e["messages"][:4] + e["messages"][-1:]} for e in solved]  # a call, what it says, and the plan
    write_jsonl(folder / "episodes.jsonl", rows)
    sft.make_tiny([folder / "episodes.jsonl"], folder / "init", seed=0)
    words = f"""sft.py --model {folder}/init --data {folder}/episodes.jsonl --out {folder}/sft --batch 3 --steps 60
        --lr 3e-3 --no-checkpointing"""
    subprocess.run([sys.executable, *words.split()], cwd=root, check=True, capture_output=True)
    return folder / "sft"


@pytest.fixture(scope="module")
def unbroken(student, tasks, root, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    run(root, student, tasks, out, 1, "--val", tasks, "--val-every", 4)
    return out


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def updates(out):
    return [line for line in read_jsonl(out / "log.jsonl") if "reward" in line]


def test_engine_and_trainer_agree_after_every_sync(unbroken):
    lines = updates(unbroken)
    assert len(lines) == 4 and all(l["dlogp_mean"] <= 1e-4 for l in lines)


def test_the_learning_rate_warms_up_stays_and_falls_linearly_to_zero(unbroken):
    assert [line["lr"] for line in updates(unbroken)] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_updates_change_the_weights_and_the_log_holds_every_key(unbroken, student):
    before, after = weights(student), weights(unbroken)
    assert any(not torch.equal(before[n], after[n]) for n in before)
    keys = {key for line in read_jsonl(unbroken / "log.jsonl") for key in line}
    assert {
        "reward",
        "cs_micro",
        "cs_macro",
        "hard_micro",
        "hard_macro",
        "success",
        "strict",
        "format",
        "overlength",
        "turns",
        "tokens",
        "uniform",
        "loss",
        "clip_low",
        "clip_high",
        "entropy",
        "gnorm",
        "dlogp_mean",
        "dlogp_max",
        "lr",
        "play_s",
        "judge_s",
        "sync_s",
        "learn_s",
        "play_tps",
        "learn_tps",
        "val_success",
    } <= keys
    episode = read_jsonl(unbroken / "rollouts" / "00001.jsonl")[0]
    assert {"task", "messages", "answer", "stop", "plan", "score", "reward", "advantage"} <= set(episode)
    assert (unbroken / "best" / "config.json").exists()


def test_a_killed_run_resumes_to_the_same_weights(student, tasks, root, unbroken, tmp_path):
    more = ("--val", tasks, "--val-every", 4)
    with open(tmp_path / "killed.txt", "w") as screen:
        process = subprocess.Popen(
            command(student, tasks, tmp_path, 1, *more), cwd=root, stdout=screen, stderr=screen, start_new_session=True
        )
        log = tmp_path / "log.jsonl"
        while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 2):
            time.sleep(0.01)
        assert process.poll() is None, (tmp_path / "killed.txt").read_text()[-3000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run(root, student, tasks, tmp_path, 1, *more)
    whole, resumed = weights(unbroken), weights(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_two_ranks_learn_what_one_learns(student, tasks, root, unbroken, tmp_path):
    run(root, student, tasks, tmp_path, 2, "--steps", 1)
    one, two = (updates(out)[0] for out in (unbroken, tmp_path))
    for key in ("reward", "tokens", "policy_tokens", "loss", "entropy", "gnorm"):
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


def test_an_engine_of_two_ranks_plays_the_tokens_that_one_plays_and_gets_the_weights(student, tasks, root, unbroken, tmp_path):
    run(root, student, tasks, tmp_path, 2, "--tp", 2, "--steps", 2)
    one, two = ([e["messages"] for e in read_jsonl(out / "rollouts" / "00001.jsonl")] for out in (unbroken, tmp_path))
    assert len(one) == 8 and one == two
    assert len(updates(tmp_path)) == 2 and all(line["dlogp_mean"] <= 1e-4 for line in updates(tmp_path))


@pytest.mark.parametrize("max_turns", [4, 1])
def test_refill_plays_until_enough_groups_differ_or_its_batches_are_spent(max_turns, student, tasks, root, tmp_path):
    words = ("--drop-uniform", "--refill", 2, "--prompts", 2, "--steps", 1, "--max-turns", max_turns)
    run(root, student, tasks, tmp_path, 1, *words)
    rows = list(read_jsonl(tmp_path / "rollouts" / "00001.jsonl"))
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    assert all(len({row["task"]["id"] for row in group}) == 1 for group in groups)
    useful = [len({row["reward"] for row in group}) > 1 for group in groups]
    if max_turns == 4:
        assert sum(useful) == 2 and useful[-1], "the surplus is left out"
    else:
        assert useful == [False] * 6, "one turn is never enough for a plan: all three batches earn nothing"
    (line,) = updates(tmp_path)
    assert line["uniform"] == 1 - sum(useful) / len(useful)


def test_official_tasks_at_a_context_of_30k_train_on_two_ranks(test_data, tiny_model, root, tmp_path):
    tasks = [load_task(row) for row in read_jsonl(test_data / "travelplanner" / "val_102.jsonl")[:2]]
    write_jsonl(tmp_path / "tasks.jsonl", tasks)
    run(
        root,
        tiny_model,
        tmp_path / "tasks.jsonl",
        tmp_path / "out",
        2,
        "--database",
        test_data / "travelplanner" / "database",
        "--system-prompt",
        "full",
        "--context",
        30000,
        "--turn-tokens",
        200,
        "--steps",
        1,
    )
    assert read_jsonl(tmp_path / "out" / "log.jsonl")[0]["dlogp_mean"] <= 1e-4
