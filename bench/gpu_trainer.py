"""
Measure an update of the trainer on one GPU: grpo.py's learn() as it is, then with one setting
changed at a time, all in one process. bench/gpu.py calls this; it also runs by itself without vLLM
(with torch 2.11 or later and DeepSpeed, which is pure Python).

    base             as in grpo.py
    cuDNN off        PyTorch's other kernels for attention
    widths free      rows as wide as the longest one, not a multiple of 512
    native linear    PyTorch's linear layer instead of DeepSpeed's
    not fused        AdamW in several kernels
    varlen           packed rows, with PyTorch's attention for rows of several samples
    compiled         every layer by torch.compile
    keep half, all   keep the activations of half or all of the layers for the backward pass

The model has random weights. The rows have log-normal lengths (mean --mean, at most --most), and a
quarter of their tokens are the policy's. `first` is the first update, in which all shapes are new;
all other numbers are of later updates with the same rows. MFU counts 6 FLOPs per weight and token
(of the head: per policy token) and causal attention, but no recomputation. `busy` is the share of
the time in which the GPU computed. A line of JSON per variant goes to standard output.
"""
import argparse
import contextlib
import json
import math
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
NATIVE = {}  # PyTorch's functions, before DeepSpeed replaces them

SHAPES = {  # Qwen2.5: hidden and intermediate size, layers, query and key heads, vocabulary, tied
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "rehearsal": (128, 256, 2, 2, 1, 4096, True)}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "tie_word_embeddings")
DENSE = {  # bfloat16 FLOP/s without sparsity, from the makers' data sheets
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "A10G": 70e12,
    "L40S": 362e12, "L4": 121e12, "3090": 71e12, "4090": 165e12, "5090": 210e12}


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--shape", choices=SHAPES, default="1.5b", help="size of the Qwen2.5 whose shape is used")
    add("--mean", type=int, default=10_000, help="mean tokens per row")
    add("--most", type=int, default=30_000, help="tokens of the longest row")
    add("--pack-tokens", type=int, default=32_768, help="tokens per micro-batch")
    add("--micros", type=int, default=4, help="approximate number of micro-batches per update")
    add("--seconds", type=float, default=240, help="seconds after which no variant starts")
    return p.parse_args()


def flops(config, n, lengths, policy):
    """The FLOPs of an update: forward and backward pass of all weights (of the head for policy
    tokens only) and causal attention."""
    head = config.hidden_size * config.vocab_size
    body = n - head * (1 if config.tie_word_embeddings else 2)
    attention = 6 * config.num_hidden_layers * config.hidden_size
    return 6 * body * sum(lengths) + 6 * head * policy + attention * sum(
        length * length for length in lengths)


def make_rows(args, words):
    """Plays of random tokens; observations and replies alternate, with 3 to 1 tokens."""
    from grpo import Sample

    draw, samples = random.Random(0), []
    while sum(len(s.ids) for s in samples) < args.micros * args.pack_tokens * 0.9:
        n = round(args.mean * math.exp(draw.gauss(-0.125, 0.5)))  # sigma 0.5
        n = max(64, min(args.most, n))
        mask = [0, *(([0] * 540 + [1] * 180) * (n // 720 + 1))[1 - n:]]  # it ends with a reply
        samples.append(Sample(None, 0, f"{len(samples)}", draw.choices(range(words), k=n), mask,
                              [-10.0 * m for m in mask], advantage=draw.choice((-1.0, 1.0))))
    tokens = sum(sum(s.mask) for s in samples)
    return [(s, 1 / tokens) for s in samples]


class Bench:
    """The trainer and its rows, to measure updates with them."""

    def __init__(self, args):
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        import grpo
        import runtime

        NATIVE["linear"] = torch.nn.functional.linear
        self.grpo, self.torch, self.args = grpo, torch, args
        sys.argv = f"grpo.py --lr 1e-6 --pack-tokens {args.pack_tokens}".split()
        self.flags = grpo.flags()
        self.rank, self.ranks, self.device = runtime.setup()
        self.cuda = self.device.type == "cuda"
        config = Qwen2Config(**dict(zip(NAMES, SHAPES[args.shape], strict=True)),
                             max_position_embeddings=32768)
        config._attn_implementation = "sdpa"
        with torch.device(self.device):  # draw them on the GPU, since a CPU takes a minute
            lm = Qwen2ForCausalLM(config)
        self.lm = lm.to(torch.bfloat16 if self.cuda else torch.float32).train()
        self.config, self.n = config, sum(p.numel() for p in lm.parameters())
        self.lm.gradient_checkpointing_enable()
        self.trainer = runtime.zero3(grpo.Policy(lm), self.flags, self.device)
        self.weighted, self.packed = make_rows(args, 1000), False

    def update(self):
        """(statistics of an update, its seconds, seconds of AdamW's step in it)."""
        step = self.trainer.step
        spent = []

        def timed():
            self.wait()
            began = time.perf_counter()
            step()
            self.wait()
            spent.append(time.perf_counter() - began)

        self.trainer.step = timed
        began = time.perf_counter()
        try:
            found = self.grpo.learn(self.trainer, self.weighted, self.packed, 0, 1, self.device,
                                    self.flags)
        finally:
            self.trainer.step = step
        self.wait()
        return found, time.perf_counter() - began, spent[0]

    def wait(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def busy(self):
        """The share of an update in which the GPU computes: its kernels' time / the clock's; None
        on a CPU, or if the profiler may not read the GPU's counters."""
        profiler = self.torch.profiler
        if not self.cuda:
            return None
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            _, seconds, _ = self.update()
        kernels = sum(each.self_device_time_total for each in profile.key_averages())
        return kernels / 1e6 / seconds or None

    def measure(self, name):
        """Make two updates, and one under the profiler -> a line of the table."""
        self.trainer.optimizer.zero_grad()  # what a variant that failed has left
        if self.cuda:
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()
        _, first, _ = self.update()
        _, seconds, step = self.update()
        lengths = [len(s.ids) for s, _ in self.weighted]
        work = flops(self.config, self.n, lengths, sum(sum(s.mask) for s, _ in self.weighted))
        line = {"variant": name, "tokens_s": sum(lengths) / seconds, "first_s": first,
                "update_s": seconds, "step_s": step, "busy": self.busy()}
        if self.cuda:
            cuda, card = self.torch.cuda, self.torch.cuda.get_device_name()
            peak = next((peak for key, peak in DENSE.items() if key in card), None)
            line |= {"mfu": peak and work / seconds / peak,
                     "allocated_gib": cuda.max_memory_allocated() / 2**30,
                     "reserved_gib": cuda.max_memory_reserved() / 2**30}
        print(json.dumps(line), flush=True)


# --------------------------------------------------------------------------------------- variants


def cudnn_off(bench):
    bench.torch.backends.cuda.enable_cudnn_sdp(False)
    return lambda: bench.torch.backends.cuda.enable_cudnn_sdp(True)


def native_linear(bench):
    functional = bench.torch.nn.functional
    deepspeeds, functional.linear = functional.linear, NATIVE["linear"]
    return lambda: setattr(functional, "linear", deepspeeds)


def not_fused(bench):
    (group,) = bench.trainer.optimizer.optimizer.param_groups
    group |= {"fused": False, "foreach": True}
    return lambda: group.update(fused=True, foreach=None)


def keep(share):
    def change(bench):
        layers = [each for each in bench.lm.modules() if hasattr(each, "gradient_checkpointing")
                  and type(each).__name__ in bench.lm._no_split_modules]
        for layer in layers[round((1 - share) * len(layers)):]:
            layer.gradient_checkpointing = False
        return lambda: [setattr(layer, "gradient_checkpointing", True) for layer in layers]
    return change


def varlen(bench):
    from torch.nn.attention import varlen
    from transformers import AttentionInterface

    def attend(module, q, k, v, mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_):
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))  # (T, heads, width)
        out = varlen.varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                                 scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out[None], None

    def use(attention, packed):
        bench.config._attn_implementation = attention
        bench.packed = bench.trainer.module.borders = packed

    AttentionInterface.register("varlen", attend)
    use("varlen", True)
    return lambda: use("sdpa", False)


def compiled(bench):
    layers = bench.lm.base_model.layers
    before = [layer.forward for layer in layers]
    for layer in layers:  # DeepSpeed's hooks stay outside
        layer.forward = bench.torch.compile(layer.forward, dynamic=True)
    return lambda: [setattr(*pair) for pair in
                    ((layer, "forward", old) for layer, old in zip(layers, before, strict=True))]


# {name: (function that changes the setting and returns one that undoes it, works on a CPU)}
VARIANTS = {
    "base": (lambda bench: lambda: None, True), "cuDNN off": (cudnn_off, False),
    "native linear": (native_linear, True),
    "not fused": (not_fused, False), "varlen": (varlen, False), "compiled": (compiled, False),
    "keep half": (keep(0.5), True), "keep all": (keep(1.0), True)}  # the last may fill the GPU


def head_gradient(bench):
    """Compare two ways to sum the head's weight gradient over chunks: after each product, or within
    it. The second is not in ChunkedLogps, because PyTorch has it for CUDA alone: the CPU would
    need the first one as well, and no test on a CPU could compare the two."""
    torch, (h, v) = bench.torch, (bench.config.hidden_size, bench.config.vocab_size)
    chunk = max(1, min(1024, bench.runtime.LOGITS // v))
    d, hidden = (torch.randn(chunk, width, device=bench.device, dtype=torch.bfloat16)
                 for width in (v, h))
    total = torch.zeros(v, h, device=bench.device)

    def timed(add):
        add()
        bench.wait()
        began = time.perf_counter()
        for _ in range(20):
            add()
        bench.wait()
        return (time.perf_counter() - began) / 20 * 1e3

    def apart():
        total.add_(d.T @ hidden)

    def at_once():
        torch.addmm(total, d.T, hidden, out_dtype=torch.float32, out=total)

    print(json.dumps({"variant": "head's weight gradient, ms a chunk", "apart": timed(apart)}),
          flush=True)
    print(json.dumps({"variant": "the same by addmm(out_dtype=float32)", "at_once": timed(at_once)}
                     ), flush=True)


@contextlib.contextmanager
def line_if_it_fails(name):
    """Print in a line what failed: out of memory, no compiler, no such kernel."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        print(json.dumps({"variant": name, "failed": " ".join(said.split())[:160]}), flush=True)


def main():
    args, began = flags(), time.time()
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": "127.0.0.1"})
    os.environ.setdefault("MASTER_PORT", "0")
    bench = Bench(args)
    for name, (change, on_cpu) in VARIANTS.items():
        if time.time() - began > args.seconds or not (bench.cuda or on_cpu):
            why = "a GPU is needed" if not bench.cuda and not on_cpu else "no time is left"
            print(json.dumps({"variant": name, "skipped": why}), flush=True)
            continue
        with line_if_it_fails(name):
            change_back = change(bench)
            try:
                bench.measure(name)
            finally:
                change_back()
    if bench.cuda:
        with line_if_it_fails("head's weight gradient"):
            head_gradient(bench)
    bench.torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
