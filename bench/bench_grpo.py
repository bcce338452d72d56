"""
Measure the overhead of grpo.py as ratios, whose two sides are measured in one run.

    loss     peak memory of a forward and backward pass with log-probabilities of --tokens tokens
             over a vocabulary of 152K, divided by that of the same small model without them; the
             memory of the imports is subtracted from both
    learn    tokens/s of learn() under ZeRO-3 with its optimiser step, divided by those of a plain
             forward and backward pass of the transformers model on the same micro-batches (logits
             of the policy tokens, log_softmax, autograd)
    padding  the share of padding in the learned rows
    play     tokens/s of the multi-turn rollout, divided by those of single-turn `generate` with the
             same numbers of prompt tokens (prompt and observations of an episode), of reply tokens
             and of plays in flight
    against  tokens/s of play and learn in whole runs of grpo.py, divided by those of another
             checkout that plays the same

Both sides take turns, and medians are printed. Beside each ratio of clock time is one of CPU time,
which other work on the machine disturbs less. Goals: loss at most 1.3, learn and play at least
0.85, padding below 10%, against at least 0.98.

    python bench/bench_grpo.py --model out/tiny/sft --tasks out/tiny/data/val.jsonl
    python bench/bench_grpo.py --only against --against DIR --model ... --tasks ...
"""
import argparse
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402, the path comes first

import grpo  # noqa: E402
import runtime  # noqa: E402
import zero3  # noqa: E402
from runtime import read_jsonl  # noqa: E402
from sandbox import open_database  # noqa: E402
from travel.world import Travel  # noqa: E402

VOCABULARY = 151936  # Qwen2.5's
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}  # what torchrun sets for a single rank


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--only", nargs="+", default=["loss", "play", "learn"], help="parts to measure")
    add("--model", help="tiny model that plays, from run.sh tiny")
    add("--tasks", help="its tasks")
    add("--plays", type=int, default=64, help="episodes per update, in groups of 8")
    add("--rounds", type=int, default=5, help="repetitions; medians are printed")
    add("--pack-tokens", type=int, default=4096, help="tokens per micro-batch of learn()")
    add("--tokens", type=int, default=32768, help="loss: number of tokens")
    add("--against", metavar="DIR", help="another checkout of this repository")
    add("--memory", choices=["own", "loss"], help="(inner use) print one peak and stop")
    return p.parse_args()


def clocks():
    """(seconds of the clock, CPU seconds of this process)."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def ratio(seconds, others):
    """The median of others / seconds over the rounds, as text."""
    wall, cpu = (torch.stack(others) / torch.stack(seconds)).median(0).values.tolist()
    return f"{wall:.2f} (CPU time {cpu:.2f})"


def settings(args):
    """The flags of grpo.py that all parts share."""
    return f"""--model {args.model} --tasks {args.tasks} --context 1024 --max-turns 30 --lr 0
        --turn-tokens 256 --system-prompt short --concurrency {args.plays} --keep-activations 100000
        --pack-tokens {args.pack_tokens} --prompts {args.plays // 8}""".split()


# ----------------------------------------------------------------------------------------- memory


def resident():
    """The peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_memory(variant, tokens):
    """The MiB that a forward and backward pass of a small model with the real vocabulary needs.

    own: without log-probabilities.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    before = resident()
    policy = zero3.Policy(Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        max_position_embeddings=tokens)))
    ids = torch.randint(0, VOCABULARY, (tokens // 1024, 1024))
    positions, keep = torch.arange(1024).expand_as(ids), torch.ones_like(ids, dtype=torch.bool)
    if variant == "loss":
        policy(ids, positions, keep)[0].sum().backward()
    else:
        hidden = policy.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        (hidden.sum() + policy.lm.lm_head.weight.sum()).backward()
    return resident() - before


def bench_memory(args):
    own, loss = (float(subprocess.run(
        [sys.executable, __file__, "--memory", variant, "--tokens", str(args.tokens)],
        stdout=subprocess.PIPE, text=True, check=True).stdout) for variant in ("own", "loss"))
    chunk = min(1024, zero3.LOGITS // VOCABULARY)
    print(f"loss: {loss:.0f} MiB with log-probabilities of {args.tokens} tokens, {chunk} at a "
          f"time, {own:.0f} MiB without: {loss / own:.2f} x", flush=True)


# ------------------------------------------------------------------------------------------- play


def bench_play(llm, template, world, tasks, args, rounds):
    """Print the figures of play; return the samples of the last round."""
    from vllm import SamplingParams

    ours, theirs, speeds = [], [], []
    for i in range(rounds + 1):  # the first one warms up
        llm.reset_prefix_cache()
        began = clocks()
        samples = grpo.rollout(llm, template, world, tasks, f"bench/{i}", args.group, 1.0, 1.0,
                               args)
        ours.append(clocks() - began)
        speeds.append(sum(map(grpo.sampled, samples)) / ours[-1][0].item())
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": [t for t, m in zip(s.ids, s.mask, strict=True) if not m]}
                   for s in samples]
        params = [SamplingParams(temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True,
                                 max_tokens=sum(s.mask), seed=j) for j, s in enumerate(samples)]
        began = clocks()
        llm.generate(prompts, params, use_tqdm=False)
        theirs.append(clocks() - began)
        turns = sum(s.episode.turns for s in samples)
        grpo.judge_all(samples, world, "sum")
    if rounds:
        print(f"play: {median(speeds[1:]):.0f} policy tokens/s in {turns} turns, "
              f"{ratio(ours[1:], theirs[1:])} of single-turn generate over the same tokens, "
              f"{len(samples)} in flight", flush=True)
    return samples


# ------------------------------------------------------------------------------------------ learn


def bare(lm, ids, positions, keep):
    """Forward and backward of the plain model: policy tokens' logits, log_softmax, autograd."""
    hidden = lm.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    logps = lm.lm_head(hidden[:, :-1][keep[:, 1:]]).log_softmax(-1)
    logps.gather(-1, ids[:, 1:][keep[:, 1:]][:, None]).mean().backward()


def bench_learn(engine, lm, samples, device, args, rounds, what):
    weighted = grpo.token_weights(grpo.group_advantages(samples), args)
    sizes = [len(s.ids) for s, _ in weighted]
    (micros,) = zero3.micro_batches(sizes, 1, args.pack_tokens, False)
    batches = [zero3.collate([weighted[i][0] for i in micro], False, device) for micro in micros]
    rows, ours, theirs = sum(ids.numel() for ids, _, _ in batches), [], []
    for _ in range(rounds + 1):  # the first one warms up
        began = clocks()
        grpo.learn(engine, weighted, False, 0, 1, device, args)
        ours.append(clocks() - began)
        began = clocks()
        for batch in batches:
            bare(lm, *batch)
        theirs.append(clocks() - began)
        lm.zero_grad()
    speed = sum(sizes) / torch.stack(ours[1:]).median(0).values[0].item()
    print(f"learn, lengths {what} ({min(sizes)} to {max(sizes)}): {speed:.0f} tokens/s, "
          f"{ratio(ours[1:], theirs[1:])} of a bare forward and backward of {len(micros)} "
          f"micro-batches; padding {1 - sum(sizes) / rows:.1%}", flush=True)


def spread(samples):
    """The samples with log-normal lengths of median 500 and log-deviation 0.5, within 200 to 1000:
    each is cut, or its turns are repeated."""
    draw = random.Random(0)
    for s in samples:
        wanted, prompt = 0, s.mask.index(1)
        while not 200 <= wanted <= 1000:
            wanted = round(500 * math.exp(draw.gauss(0, 0.5)))
        times = math.ceil(wanted / (len(s.ids) - prompt))
        s.ids, s.mask, s.logps = ((x[:prompt] + x[prompt:] * times)[:wanted]
                                  for x in (s.ids, s.mask, s.logps))
    return samples


def bench_here(args):
    """Measure play and learn beside the plain work, in this process."""
    os.environ.update(ALONE)
    sys.argv = ["grpo.py", *settings(args)]
    own = grpo.flags()
    rank, ranks, device = zero3.setup()
    template = runtime.load_template(own.model)
    policy, _ = zero3.load(own, template, device)
    engine, llm = zero3.shard(policy, own, device), zero3.load_engine(own, device)
    world, rounds = Travel(open_database("database/mini")), args.rounds
    tasks = runtime.load_tasks(own.tasks, world.load_task)[: own.prompts]
    samples = bench_play(llm, template, world, tasks, own, rounds * ("play" in args.only))
    if "learn" in args.only:
        from transformers import AutoModelForCausalLM

        lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
        bench_learn(engine, lm, samples, device, own, rounds, "as played")
        bench_learn(engine, lm, spread(samples), device, own, rounds, "log-normal")


# ---------------------------------------------------------------------------------------- against


def whole_run(checkout, args, out):
    """(log, CPU seconds) of a run of a checkout's grpo.py."""
    words = [*settings(args), "--database", ROOT / "database" / "mini", "--steps", 4, "--out", out]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "grpo.py", *map(str, words)], cwd=checkout, check=True,
                   env=os.environ | ALONE | {"PYTHONPATH": str(checkout)}, capture_output=True)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return read_jsonl(out / "log.jsonl"), cpu


def bench_against(args):
    """Run both checkouts in turns; every second round starts with the other checkout."""
    sides, ratios = {"here": ROOT, "there": Path(args.against).resolve()}, []
    args.model, args.tasks = (Path(path).resolve() for path in (args.model, args.tasks))
    for i in range(args.rounds):
        logs, cpu = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            for side in [*sides][:: -1 if i % 2 else 1]:
                logs[side], cpu[side] = whole_run(sides[side], args, Path(folder) / side)
        pairs = [*zip(logs["here"], logs["there"], strict=True)]
        assert all(a[key] == b[key] for a, b in pairs for key in ("tokens", "policy_tokens"))
        for a, b in pairs[1:]:  # the first update warms up
            ratios.append([b["play_s"] / a["play_s"], b["learn_s"] / a["learn_s"]])
        play, learn = map(median, zip(*ratios, strict=True))
        print(f"against {args.against}: play {play:.3f}, learn {learn:.3f} of its tokens/s, median "
              f"of {len(ratios)} updates; CPU seconds of this round's runs {cpu['here']:.1f} here, "
              f"{cpu['there']:.1f} there", flush=True)


def main():
    args = flags()
    if args.memory:
        return print(peak_memory(args.memory, args.tokens))
    if "loss" in args.only:
        bench_memory(args)
    if args.model and {"play", "learn"} & {*args.only}:
        bench_here(args)
    if args.against:
        bench_against(args)


if __name__ == "__main__":
    main()
