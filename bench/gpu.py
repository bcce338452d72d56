"""
Check and measure training on this machine's GPUs, offline, with random weights.

    bash run.sh gpu                # or: python bench/gpu.py, in any Python 3.11 to 3.13 that has
                                   # torch, transformers and deepspeed (docs/gpus.md: by hand)

    memory   learn() of grpo.py in full-size micro-batches, beside the plan of look/memory.py. An
             allocated block stands for the engine: it falls asleep and wakes up in each update
    numbers  an update in bfloat16 against one in float32: loss, gradient norm, cosine
    speed    tokens/s and MFU of learn(), then with one setting changed at a time; --words "--zero
             3" --words "--zero 2" measures both, each with vLLM imported first where it is there
    engine   needs vLLM: grpo.py is killed, resumed and run to its end
    learn    needs vLLM and what run.sh tiny has made (--tiny): its RL from its SFT model, and the
             curve beside that of its own RL, if it has run
    play     needs vLLM: tokens/s of 256 prompts of 2,000 tokens and replies of 512

Each case runs in a process of its own, so if one fails (out of memory, say), the next one still
runs. OUT/report.md has a line for each claim: passed, FAILED, or only measured. Without a GPU all
cases run on the CPU, with a small model: this rehearses the script and measures nothing.
"""
import argparse
import contextlib
import ctypes
import itertools
import json
import math
import operator
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from look import memory  # noqa: E402

memory.SHAPES["rehearsal"] = (256, 704, 4, 4, 2, 4096, True)
ASLEEP = 2  # GiB that a sleeping engine is assumed to keep
DENSE = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "A10G": 70e12, "L40S": 362e12,
         "3090": 71e12, "4090": 165e12}  # bfloat16 FLOP/s without sparsity, from data sheets
# memory: {case: (size, flags of grpo.py that are not run.sh's, GiB of the card)}; 0: all of it
CARDS = {"1.5b": ("1.5b", "", 0), "1.5b, the engine fills 0.6": ("1.5b", "--gpu-memory 0.6", 0),
         "3b": ("3b", "--gpu-memory 0.2 --keep-activations 0", 0),
         "0.5b on 24 GB": ("0.5b", "", 23.5), "7b, LoRA": ("7b", "--lora 32", 0)}


def say(claim, passed, measured):
    """Print a line of the report: whether a claim holds, or None if it is only a measurement."""
    print(json.dumps([claim, passed, measured]), flush=True)


# --------------------------------------------------------------------------------- card and trainer


class Card:
    """The first GPU's memory in GiB, with blocks that PyTorch does not know of. Without a GPU, an
    account of the blocks alone."""

    def __init__(self, device):
        import torch

        self.cuda, self.held = torch.cuda if device.type == "cuda" else None, 0
        self.gib = self.cuda.mem_get_info()[1] / 2**30 if self.cuda else 80.0

    def used(self):
        return self.gib - self.cuda.mem_get_info()[0] / 2**30 if self.cuda else self.held

    def hold(self, gib):
        """Allocate a block -> a function that frees it."""
        self.held += gib
        block = ctypes.c_uint64()
        driver = ctypes.CDLL("libcuda.so.1") if self.cuda else None
        if driver and driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(int(gib * 2**30))):
            raise MemoryError(f"{gib:.1f} GiB are asked for, and {self.gib - self.used():.1f} free")

        def free():
            self.held -= gib
            return driver and driver.cuMemFree_v2(block)
        return free

    def peak(self):
        """The most GiB that were used since the last reset: by PyTorch and by all else."""
        if not self.cuda:
            return self.held
        unused = self.cuda.max_memory_reserved() - self.cuda.memory_reserved()
        return self.used() + unused / 2**30

    def reset(self):
        if self.cuda:
            self.cuda.empty_cache()
            self.cuda.reset_peak_memory_stats()

    def clock(self):
        """The time at which the GPU has done all that it was asked to; on a CPU, this process's."""
        if not self.cuda:
            return time.process_time()
        self.cuda.synchronize()
        return time.perf_counter()


def start(size, words):
    """A language model with random weights, as grpo.py sets it up -> (model, flags, device)"""
    import torch
    from transformers import AutoModelForCausalLM

    import grpo
    import zero3

    sys.argv = ["grpo.py", "--lr", "1e-6", *words.split()]
    args = grpo.flags()
    _, _, device = zero3.setup()
    torch.manual_seed(0)
    with torch.device(device):  # draw them on the GPU, since a CPU takes a minute
        lm = AutoModelForCausalLM.from_config(
            memory.qwen(size), attn_implementation="sdpa",
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    if args.lora:
        zero3.add_adapters(lm, args)
    lm.eval()
    zero3.recompute_large(lm, args)
    zero3.fuse_norms(lm)
    return lm, args, device


def make_rows(lengths, vocabulary):
    """Plays of random tokens -> [(sample, weight)]. Observations and replies alternate, with 3 to 1
    tokens, and the engine's log-probabilities are those of a uniform policy."""
    from grpo import Sample

    draw, samples = random.Random(0), []
    for n in lengths:
        mask = [0, *(([0] * 540 + [1] * 180) * (n // 720 + 1))[1 - n:]]  # it ends with a reply
        samples.append(Sample(None, 0, f"{n}", draw.choices(range(vocabulary), k=n), mask,
                              [-math.log(vocabulary) * m for m in mask],
                              advantage=draw.choice((-1.0, 1.0))))
    tokens = sum(sum(s.mask) for s in samples)
    return [(s, 1 / tokens) for s in samples]


# ----------------------------------------------------------------------------------------- memory


def check_memory(case, cuda):
    """Three updates beside an engine that sleeps and wakes up, and the plan of look.memory."""
    import grpo
    import zero3

    size, words, gib = CARDS[case]
    words = ("--context {} --gpu-memory {} --keep-activations {} --zero {} ".format(
        *memory.RECIPES[size]) + words)
    if not cuda:
        size, words, gib = "rehearsal", f"{words} --context 512 --keep-activations 128", 0
    planned = memory.flags(["grpo", "--gpus", "1", *words.split()])
    pack = planned.pack_tokens = planned.keep_activations or planned.context
    lm, args, device = start(size, f"{words} --pack-tokens {pack}")
    card = Card(device)
    ballast = card.gib - gib if gib else 0
    if ballast:
        card.hold(ballast)
    adapters = sum(p.numel() for name, p in lm.named_parameters() if ".lora_" in name)
    shape = memory.Shape(lm.config, sum(p.numel() for p in lm.parameters()) - adapters, adapters)
    planned.gpu_gib = card.gib - ballast
    moments = {moment: memory.total(rows)
               for moment, rows in memory.by_moment(shape, planned)[0].items()}
    play, learn = moments.pop("play"), max(moments.values())
    assumed = memory.training(shape, planned, 1)[-1][1] / memory.GIB
    if max(play, learn) > planned.gpu_gib + assumed:
        say(f"memory, {case}", None, f"skipped: {max(play, learn):.1f} GiB are planned")
        return
    trainer = zero3.shard(zero3.Policy(lm), args, device)
    card.reset()
    rows = make_rows([planned.context, pack, pack], lm.config.vocab_size)
    awake, used = args.gpu_memory * planned.gpu_gib - ASLEEP, {"play": [], "learn": []}
    asleep = card.hold(ASLEEP)
    for _ in range(3):
        sleep = card.hold(awake)
        used["play"].append(card.used() - ballast)
        sleep()
        card.reset()
        grpo.learn(trainer, rows, False, 0, 1, device, args)
        used["learn"].append(card.peak() - ballast - ASLEEP)
        card.reset()
    asleep()
    for moment, plan in (("play", play), ("learn", learn)):
        most = max(used[moment])
        say(f"memory, {case}: {moment} takes at most what look.memory plans",
            most <= plan if card.cuda else None,
            f"{', '.join(f'{each:.1f}' for each in used[moment])} of {plan:.1f} GiB; CUDA, NCCL "
            f"and waste take {most - plan + assumed:.1f} of the {assumed:.1f} assumed")
    say(f"memory, {case}: the engine wakes up three times", True,
        f"{awake + ASLEEP:.1f} of {planned.gpu_gib:.1f} GiB")


# ---------------------------------------------------------------------------------------- numbers


def check_numbers(case, cuda):
    """Loss and gradient of an update in bfloat16 under ZeRO-3 against float32 without it."""
    import torch
    from deepspeed.utils import safe_get_full_grad

    import grpo
    import zero3

    size, tokens = ("0.5b", 4096) if cuda else ("rehearsal", 256)
    lm, args, device = start(size, f"--pack-tokens {tokens}")
    rows = make_rows([tokens, tokens // 2, tokens // 2], lm.config.vocab_size)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):  # equal weights, which are bfloat16's
        trainer, gradient = zero3.Policy(lm.to(torch.bfloat16).to(dtype)), {}
        if dtype == torch.float32:
            trainer.backward, trainer.get_global_grad_norm = torch.Tensor.backward, lambda: 0
            take = operator.attrgetter("grad")
        else:  # on a CPU, too, as on a GPU
            trainer = zero3.shard(trainer, args, SimpleNamespace(type="cuda"))
            take = safe_get_full_grad

        def step(gradient=gradient, take=take):
            gradient.update({name: take(p).float().cpu() for name, p in lm.named_parameters()})

        trainer.step = step
        loss = grpo.learn(trainer, rows, False, 0, 1, device, args)["loss"]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))
        found[dtype] = loss, norm, gradient
        lm.zero_grad()
    (loss, norm, exact), (rough_loss, rough_norm, rough) = found.values()
    dot = sum((exact[name].double() * rough[name].double()).sum().item() for name in exact)
    cosine = dot / norm / rough_norm
    say("numbers: an update in bfloat16 has the gradient of float32, cosine at least 0.98",
        cosine >= 0.98 and abs(rough_norm / norm - 1) <= 0.05,
        f"cosine {cosine:.4f}; gradient norm {rough_norm:.4g} of {norm:.4g}; "
        f"loss {rough_loss:.5f} of {loss:.5f}")


# ------------------------------------------------------------------------------------------ speed


def flops(config, n, lengths, policy):
    """The FLOPs of an update: forward and backward pass of all weights (of the head for policy
    tokens only) and causal attention; what is recomputed does not count."""
    head = config.hidden_size * config.vocab_size
    body = n - head * (1 if config.tie_word_embeddings else 2)
    attention = 6 * config.num_hidden_layers * config.hidden_size
    return 6 * body * sum(lengths) + 6 * head * policy + attention * sum(
        length * length for length in lengths)


def check_speed(case, cuda):
    """tokens/s of learn() with micro-batches of one play, and with one setting changed at a time.
    """
    import torch

    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    if find_spec("vllm"):  # in the trainer's process, as in grpo.py: it changes settings of PyTorch
        with told("import of vLLM"):
            import vllm  # noqa: F401
    torch.backends.cuda.enable_cudnn_sdp(cudnn)  # as open_llm does
    import grpo
    import zero3

    large = cuda and torch.cuda.get_device_properties(0).total_memory > 60 * 2**30
    size = "rehearsal" if not cuda else case if large else "0.5b"
    most = memory.RECIPES[size][2] if cuda else 300
    words = os.environ["GPU_WORDS"]
    title = f"speed, {size} {words}".strip()
    lm, args, device = start(size, f"--pack-tokens {most} {words}")
    n, card = sum(p.numel() for p in lm.parameters()), Card(device)
    lengths = [most * tenth // 10 for tenth in (3, 4, 4, 5, 5, 6, 6, 7, 8, 10)]
    rows = make_rows(lengths, lm.config.vocab_size)
    name = torch.cuda.get_device_name() if cuda else ""
    peak = next((peak for key, peak in DENSE.items() if key in name), math.nan)
    work = flops(lm.config, n, lengths, sum(sum(s.mask) for s, _ in rows))
    trainer = zero3.shard(zero3.Policy(lm), args, device)
    trainer.optimizer.param_groups[0]["lr"] = 0.0  # so that all updates are the same
    micros = zero3.micro_batches(lengths, 1, most, False)[0]
    sizes = sorted(len(micro) * max(lengths[i] for i in micro) for micro in micros)
    base = []

    def measure(name, packed=False):
        """The fastest of three equal updates; a rehearsal makes one."""
        trainer.optimizer.zero_grad()  # what a measurement that failed has left
        card.reset()
        seconds = math.inf
        for _ in range(3 if card.cuda else 1):
            began = card.clock()
            found = grpo.learn(trainer, rows, packed, 0, 1, device, args)
            seconds = min(seconds, card.clock() - began)
        base.append((seconds, found))
        say(f"{title}: {name}", None, f"{sum(lengths) / seconds:,.0f} tokens/s, "
            f"{base[0][0] / seconds:.2f} times base, MFU {work / seconds / peak:.2f}, "
            f"{card.peak():.1f} GiB, gradient norm {found['gnorm']:.6g}"
            + ", all statistics as base, bit for bit" * (found == base[0][1] and len(base) > 1))

    measure("base, every layer recomputed")
    for part in (1, 2, 3):
        with told(f"keep, {part}/3"):
            args.keep_activations = sizes[len(sizes) * part // 3 - 1]
            kept = sum(size <= args.keep_activations for size in sizes)
            measure(f"--keep-activations {args.keep_activations}: {kept} of {len(sizes)} "
                    "micro-batches kept")
    args.keep_activations = 0
    norms = [norm for norm in lm.modules() if "forward" in vars(norm) and "Norm" in str(type(norm))]
    fused = [norm.__dict__.pop("forward") for norm in norms]
    with told("norms"):
        measure(f"{len(norms)} norms by the model's own forward, not by PyTorch's rms_norm")
    for norm, forward in zip(norms, fused, strict=True):
        norm.forward = forward
    if card.cuda:
        with told("cuDNN"):
            torch.backends.cuda.enable_cudnn_sdp(False)
            measure("without cuDNN's attention, which vLLM's import turns off")
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        with told("varlen"):
            varlen(lm, measure)


@contextlib.contextmanager
def told(name):
    """Report what fails, so that the other measurements go on."""
    try:
        yield
    except Exception as error:
        say(f"speed: {name}", False, " ".join(f"{type(error).__name__}: {error}".split())[:200])


def varlen(lm, measure):
    """Packed rows, with PyTorch's attention for rows of several samples."""
    import torch
    from torch.nn.attention import varlen
    from transformers import AttentionInterface

    row = {}

    def borders(model, positional, named):
        starts = (named["position_ids"][0] == 0).nonzero().flatten()
        ends = starts.new_tensor([named["position_ids"].numel()])
        row["starts"] = torch.cat([starts, ends]).int()
        row["longest"] = int(row["starts"].diff().max())

    def attend(module, q, k, v, mask, scaling=None, **_):
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))  # (T, heads, width)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = varlen.varlen_attn(q, k, v, row["starts"], row["starts"], row["longest"],
                                 row["longest"], scale=scaling, window_size=(-1, 0))
        return out[None], None

    AttentionInterface.register("varlen", attend)
    hook = lm.base_model.register_forward_pre_hook(borders, with_kwargs=True)
    lm.config._attn_implementation = "varlen"
    try:
        measure("packed rows, PyTorch's varlen attention", packed=True)
    finally:
        lm.config._attn_implementation = "sdpa"
        hook.remove()


# ----------------------------------------------------------------------------------------- engine


def make_model(folder, size):
    """Write a model with random weights of this shape and a tokenizer made from the mini world."""
    import torch
    from transformers import AutoModelForCausalLM

    from sandbox import read_prompt
    from tiny.model import make_tokenizer

    tables = sorted((ROOT / "database" / "mini").glob("*.csv"))
    texts = [read_prompt("short"), *(table.read_text()[:20_000] for table in tables)]
    tokenizer, config = make_tokenizer(texts, 1024), memory.qwen(size)
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def torchrun(ranks, words, log, kill_after=0):
    """Run grpo.py by torchrun, its output into a log -> exit status. kill_after: send SIGKILL after
    this update."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(ranks), "grpo.py", *words.split()]
    with open(log, "w") as screen:
        process = subprocess.Popen(command, cwd=ROOT, stdout=screen, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    try:
        while process.poll() is None:
            if kill_after and f"step {kill_after:4d}/" in Path(log).read_text():
                break
            time.sleep(0.5)
    finally:  # also when this process is told to end; ranks end with the agent
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def check_engine(case, cuda):
    """GRPO is killed after update 2, resumed, and run to its end. In the travel world all plays of
    a random model would earn the same and no update would change the weights, so that a wrong sync
    would not show; the world of sums pays by the word."""
    import torch

    from runtime import read_jsonl, write_jsonl

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs torchrun's finally
    out, ranks = Path(os.environ["GPU_OUT"]).resolve() / case, max(1, torch.cuda.device_count())
    make_model(out / "model", case if cuda else "rehearsal")
    write_jsonl(out / "sums.jsonl", [{"id": str(i), "query": f"{i} + {i}?", "sum": 2 * i}
                                     for i in range(64)])
    context = 4096 if cuda else 512
    words = (f"--model {out}/model --tasks {out}/sums.jsonl --env tests/calculator.py --steps 3 "
             f"--reward talk --prompts {4 * ranks} --group 8 --context {context} --max-turns 3 "
             f"--turn-tokens {context // 8} --pack-tokens {2 * context} --lr 1e-3 --gpu-memory 0.4 "
             f"--save-every 1 --resume --out {out}/rl")
    torchrun(ranks, words, out / "killed.txt", kill_after=2)
    status = torchrun(ranks, words, out / "resumed.txt")
    log = out / "rl" / "log.jsonl"
    rows = [row for row in read_jsonl(log) if "reward" in row] if log.exists() else []
    if status or len(rows) != 3 or not (out / "rl" / "config.json").exists():
        raise RuntimeError(f"{len(rows)} updates; {last_words(out / 'resumed.txt')}")
    say(f"engine, {case}: grpo.py is killed after update 2, resumes and ends", True, "3 updates")
    gaps, bound = [row["dlogp_mean"] for row in rows], 0.05 if cuda else 1e-4
    say(f"engine, {case}: engine and trainer agree, mean |dlogp| at most {bound}",
        max(gaps) <= bound, ", ".join(f"{gap:.1e}" for gap in gaps))
    norms = [row["gnorm"] for row in rows]
    say(f"engine, {case}: every update takes a step", min(norms) > 0, f"gnorm {norms}")
    for row in rows:
        say(f"engine, {case}: update {row['step']}", None, f"sync with wake-up {row['sync_s']:.2f} "
            f"s, judge and sleep {row['judge_s']:.2f} s, play {row['play_tps']:,.0f} and learn "
            f"{row['learn_tps']:,.0f} tokens/s")


# ---------------------------------------------------------------------------------- learn and play


def check_learn(case, cuda):
    """RL of run.sh tiny, by its own command, from its SFT model: reward and gap of every twelve
    updates, beside those of the RL that has run there. On a CPU: two small updates."""
    from runtime import read_jsonl

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs torchrun's finally
    tiny, out = Path(os.environ["GPU_TINY"]), Path(os.environ["GPU_OUT"]) / case
    printed = subprocess.run(["bash", "run.sh", "tiny"], cwd=ROOT, capture_output=True, text=True,
                             env=os.environ | {"DRY": "1", "OUT": str(tiny)}).stdout
    (command,) = [line for line in printed.splitlines() if " grpo.py " in line]
    words = command.partition(" grpo.py ")[2] + f" --out {shlex.quote(str(out))}"
    words += " --gpu-memory 0.2" if cuda else " --steps 2 --prompts 2 --group 2"
    status = torchrun(1, words, out.with_suffix(".screen.txt"))
    curves = {name: [row for row in read_jsonl(folder / "log.jsonl") if "reward" in row]
              for name, folder in (("here", out), ("before", tiny / "rl"))
              if (folder / "log.jsonl").exists()}
    for first in range(0, len(curves.get("here", ())), 12):
        means = [f"{name}: " + ", ".join(
            f"{key} {sum(row[key] for row in rows) / len(rows):.3g}" for key in (
                "reward", "success", "strict", "entropy", "dlogp_mean", "play_s", "learn_s"))
            for name, curve in curves.items() if (rows := curve[first:first + 12])]
        say(f"learn, {case}: updates from {first + 1} on", None, "; ".join(means))
    say(f"learn, {case}: RL runs to its end", status == 0, f"{len(curves.get('here', ()))} updates"
        + (f"; {last_words(out.with_suffix('.screen.txt'))}" if status else ""))


def check_play(case, cuda):
    """tokens/s of an engine that has random weights and all of its requests at once."""
    from vllm import SamplingParams

    import runtime

    folder = Path(os.environ["GPU_OUT"]) / "play" / case
    make_model(folder, case if cuda else "rehearsal")
    many, reads, writes = (256, 2000, 512) if cuda else (4, 100, 16)
    llm = runtime.open_llm(folder, 4096, many, 1, 0.6)
    draw, clock = random.Random(0), time.perf_counter if cuda else time.process_time
    prompts = [{"prompt_token_ids": draw.choices(range(300), k=reads)} for _ in range(many)]
    sampling = [SamplingParams(max_tokens=writes, ignore_eos=True, seed=i, logprobs=0,
                               detokenize=False) for i in range(many)]
    for turn in ("first", "again, prompts in the cache"):
        began = clock()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds = clock() - began
        say(f"play, {case}: {many} replies of {writes} tokens after {reads}, {turn}", None,
            f"{many * writes / seconds:,.0f} sampled tokens/s, {seconds:.1f} s")


# ------------------------------------------------------------------------------------------- main

CASES = {"memory": [*CARDS], "numbers": ["0.5b"], "speed": ["1.5b"], "engine": ["0.5b"],
         "learn": ["tiny"], "play": ["1.5b"]}
NEEDS_VLLM = ("engine", "learn", "play")


def last_words(log):
    lines = [line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line] or lines or ["no output"]
    return told[-1].strip()[:200]


def run_case(part, case, words, out, tiny, seconds, add):
    """Run a case in a process of its own; add its lines to the report."""
    log = out / f"{part} {case} {words}.txt".replace(" .", ".").replace(" ", "-")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if part not in NEEDS_VLLM else {}
    told = {"GPU_OUT": str(out), "GPU_TINY": str(tiny.resolve()), "GPU_WORDS": words}
    with open(log, "w") as screen:
        process = subprocess.Popen([sys.executable, __file__, "--case", part, case], cwd=ROOT,
                                   env=os.environ | alone | told, stdout=subprocess.PIPE,
                                   stderr=screen, text=True)
        late = threading.Timer(seconds, process.terminate)
        late.start()
        for line in process.stdout:
            if line.startswith('["'):
                add(*json.loads(line))
        in_time = late.is_alive()
        late.cancel()
    if process.wait():
        add(f"{part}, {case} {words}".strip(), False,
            last_words(log) if in_time else f"took more than {seconds:.0f} s")


def describe(add):
    """Report versions, driver and GPUs -> whether there is a GPU."""
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    add("versions", None, f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}")
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        add("GPUs", None, "PyTorch sees none: this only rehearses the script, on the CPU")
        return False
    query = ("nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used "
             "--format=csv,noheader,nounits")
    for row in subprocess.run(query.split(), capture_output=True, text=True).stdout.splitlines():
        name, driver, total, used = row.split(", ")  # in MiB
        add("no other process uses the GPU", not used.isdigit() or int(used) < 1000,
            f"{name}, driver {driver}, {used} of {total} MiB are in use")
    return True


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for the report")
    p.add_argument("--parts", nargs="+", choices=CASES, default=[*CASES], help="parts to run (all)")
    p.add_argument("--budget", type=float, default=12, metavar="MINUTES",
                   help="stop after so many minutes (12)")
    p.add_argument("--words", action="append", metavar="FLAGS", help="flags of grpo.py for speed; "
                   "repeated, they are measured in turn")
    p.add_argument("--tiny", type=Path, default=Path("out/tiny"), metavar="FOLDER",
                   help="of run.sh tiny, for learn")
    p.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args, began = p.parse_args(), time.time()
    if args.case:
        import torch

        globals()[f"check_{args.case[0]}"](args.case[1], torch.cuda.is_available())
        return
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = ["| claim | | measured |\n", "| --- | --- | --- |\n"]

    def add(claim, passed, measured):
        verdict = {True: "passed", False: "FAILED", None: ""}[passed]
        print(f"{verdict:6} {claim}: {measured}", flush=True)
        rows.append(f"| {claim} | {verdict} | {measured} |\n".replace("|dlogp|", "\\|dlogp\\|"))
        (out / "report.md").write_text("".join(rows))  # after each line, so a crash loses none

    describe(add)
    for part in args.parts:
        lacking = [f"{name} is not installed" for name in
                   ["deepspeed"] + ["vllm"] * (part in NEEDS_VLLM) if not find_spec(name)]
        if part == "learn" and not (args.tiny / "sft" / "config.json").exists():
            lacking += [f"--tiny {args.tiny} has no SFT model; bash run.sh tiny makes one"]
        settings = args.words or [""] if part == "speed" else [""]
        for case, words in itertools.product(CASES[part], settings):
            seconds = 60 * args.budget - (time.time() - began)
            if lacking or seconds <= 0:
                add(f"{part}, {case} {words}".strip(), None, "skipped: " + (
                    lacking[0] if lacking else "no time is left"))
            else:
                run_case(part, case, words, out, args.tiny, seconds, add)
    failed = sum("| FAILED |" in row for row in rows)
    print(f"{failed} lines failed: {out}/report.md", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
