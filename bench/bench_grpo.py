"""
What GRPO's machinery costs beside the bare work, as ratios measured in one run.

    loss     peak memory of a forward and backward with log-probabilities of --tokens tokens over a vocabulary of
             152K, over that of the same small model without them, above what the imports take
    learn    tokens/s of learn() under ZeRO-3 with its optimiser step, over a plain forward and backward of the
             transformers model on the same micro-batches: logits of the policy tokens, log_softmax, autograd
    padding  share of the learned rows that is padding
    play     tokens/s of the multi-turn rollout, over plain single-turn `generate` of the same tokens: each prompt as
             long as an episode's prompt and observations, each reply as long as its replies, as many in flight

Both sides of a ratio take turns, and medians are printed. Ratios of CPU time stand beside those of the clock: other
work on the machine disturbs them less. Goals: loss at most 1.3, learn and play at least 0.85, padding below 10%.

    python tests/bench_grpo.py --model out/tiny/sft --tasks out/tiny/data/rl.jsonl
"""
import argparse
import math
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import grpo
from sandbox import open_database

VOCABULARY = 151936  # Qwen2.5's


def flags():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--only", nargs="+", default=["loss", "play", "learn"], help="parts to measure")
    add("--model", help="a tiny model that plays, from run.sh tiny")
    add("--tasks", help="tasks for it")
    add("--plays", type=int, default=64, help="episodes, in groups of 8")
    add("--rounds", type=int, default=5, help="repetitions; medians are printed")
    add("--pack-tokens", type=int, default=4096, help="of learn()")
    add("--tokens", type=int, default=32768, help="of the loss's memory measurement")
    add("--logp-chunk", type=int, nargs="+", default=[1024, 128], help="of the loss's memory; 1024: grpo.py's own")
    add("--memory", choices=["hidden", "logps"], help="(inner use) print the peak of one variant and stop")
    return p.parse_args()


def clocks():
    """Seconds of the clock and of this process's CPU time."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def ratio(seconds, others):
    """Median of others / seconds, round by round, as text."""
    wall, cpu = (torch.stack(others) / torch.stack(seconds)).median(0).values.tolist()
    return f"{wall:.2f} (CPU time {cpu:.2f})"


# ---------------------------------------------------------------------------------------------------------- memory


def peak_memory(variant, tokens, chunk):
    """MiB that one forward and backward of a small model with the real vocabulary adds at its peak."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    resident = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before = resident()
    policy = grpo.Policy(Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, max_position_embeddings=tokens)), chunk)
    ids = torch.randint(0, VOCABULARY, (tokens // 1024, 1024))
    positions, keep = torch.arange(1024).expand_as(ids), torch.ones_like(ids, dtype=torch.bool)
    if variant == "logps":
        policy(ids, positions, keep)[0].sum().backward()
    else:
        hidden = policy.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        (hidden.sum() + policy.lm.lm_head.weight.sum()).backward()
    return resident() - before


def bench_memory(a):
    run = lambda variant, chunk: float(subprocess.run(
        [sys.executable, __file__, "--memory", variant, "--tokens", str(a.tokens), "--logp-chunk", str(chunk)],
        stdout=subprocess.PIPE, text=True, check=True).stdout)
    hidden = run("hidden", 1)
    for chunk in a.logp_chunk:
        logps = run("logps", chunk)
        print(f"loss: {logps:.0f} MiB with log-probabilities of {a.tokens} tokens, {chunk} at a time, "
              f"{hidden:.0f} MiB without: {logps / hidden:.2f} x", flush=True)


# ------------------------------------------------------------------------------------------------------------- play


def bench_play(llm, tokenizer, database, tasks, a, rounds):
    """Print play's figures. -> samples of the last round"""
    from vllm import SamplingParams

    ours, theirs, speeds = [], [], []
    for i in range(rounds + 1):  # the first one warms up
        llm.reset_prefix_cache()
        began = clocks()
        samples = grpo.rollout(llm, tokenizer, database, tasks, f"bench/{i}", a.group, 1.0, 1.0, a)
        ours.append(clocks() - began)
        speeds.append(sum(sum(s.mask) for s in samples) / ours[-1][0].item())
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": [t for t, m in zip(s.ids, s.mask) if not m]} for s in samples]
        params = [SamplingParams(temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True, max_tokens=sum(s.mask),
                                 seed=j) for j, s in enumerate(samples)]
        began = clocks()
        llm.generate(prompts, params, use_tqdm=False)
        theirs.append(clocks() - began)
        turns = sum(s.episode.turns for s in samples)
        grpo.judge_all(samples, database, "sum")
    if rounds:
        print(f"play: {sorted(speeds[1:])[rounds // 2]:.0f} policy tokens/s in {turns} turns, "
              f"{ratio(ours[1:], theirs[1:])} of single-turn generate over the same tokens, {len(samples)} in flight",
              flush=True)
    return samples


# ------------------------------------------------------------------------------------------------------------ learn


def bare(lm, ids, positions, keep):
    """Forward and backward of the plain model: logits of the policy tokens, log_softmax, autograd."""
    hidden = lm.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    logps = lm.lm_head(hidden[:, :-1][keep[:, 1:]]).log_softmax(-1).gather(-1, ids[:, 1:][keep[:, 1:]][:, None])
    logps.mean().backward()


def bench_learn(engine, lm, samples, device, a, rounds, what):
    weighted = grpo.token_weights(grpo.group_advantages(samples, a), a)
    micros = grpo.cut([len(s.ids) for s, _ in weighted], 1, a.pack_tokens, False)[0]
    batches = [grpo.collate([vars(weighted[i][0]) for i in micro], False, device) for micro in micros]
    tokens, rows = sum(len(s.ids) for s, _ in weighted), sum(ids.numel() for ids, _, _ in batches)
    ours, theirs = [], []
    for _ in range(rounds + 1):  # the first one warms up
        began = clocks()
        grpo.learn(engine, weighted, False, 0, 1, device, a)
        ours.append(clocks() - began)
        began = clocks()
        for batch in batches:
            bare(lm, *batch)
        theirs.append(clocks() - began)
        lm.zero_grad()
    speed = tokens / torch.stack(ours[1:]).median(0).values[0].item()
    sizes = [len(s.ids) for s, _ in weighted]
    print(f"learn, lengths {what} ({min(sizes)} to {max(sizes)}): {speed:.0f} tokens/s, {ratio(ours[1:], theirs[1:])} "
          f"of a bare forward and backward of {len(micros)} micro-batches; padding {1 - tokens / rows:.1%}", flush=True)


def spread(samples, deviation):
    """The samples at lengths of a log-normal of median 500 and that log-deviation within 200..1000, turns repeated."""
    draw = random.Random(0)
    for s in samples:
        wanted, prompt = 0, s.mask.index(1)
        while not 200 <= wanted <= 1000:
            wanted = round(500 * math.exp(draw.gauss(0, deviation)))
        times = math.ceil(wanted / (len(s.ids) - prompt))
        s.ids, s.mask, s.logps = ((x[:prompt] + x[prompt:] * times)[:wanted] for x in (s.ids, s.mask, s.logps))
    return samples


def main():
    a = flags()
    if a.memory:
        return print(peak_memory(a.memory, a.tokens, a.logp_chunk[0]))
    if "loss" in a.only:
        bench_memory(a)
    if not a.model or not set(a.only) & {"play", "learn"}:
        return
    sys.argv = f"""grpo.py --model {a.model} --tasks {a.tasks} --context 1024 --max-turns 10 --turn-tokens 256
        --system-prompt short --concurrency {a.plays} --pack-tokens {a.pack_tokens} --no-checkpointing --lr 0""".split()
    b = grpo.flags()
    rank, world, device = grpo.setup()
    tokenizer, policy, _ = grpo.load(b, device)
    engine, llm = grpo.zero3(policy, b, world, device), grpo.load_engine(b, device)
    database, tasks = open_database("database/mini"), grpo.load_tasks(b.tasks)[: a.plays // 8]
    samples = bench_play(llm, tokenizer, database, tasks, b, a.rounds if "play" in a.only else 0)
    if "learn" in a.only:
        from transformers import AutoModelForCausalLM

        lm = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa").train()
        bench_learn(engine, lm, samples, device, b, a.rounds, "as played")
        for deviation in (0.3, 0.5):
            bench_learn(engine, lm, spread(samples, deviation), device, b, a.rounds, f"log-normal {deviation}")


if __name__ == "__main__":
    main()
