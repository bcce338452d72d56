"""
Supervised fine-tuning: teach a model to play by imitating the replies of successful episodes.

    (1) render each episode with the chat template into token ids and a mask: 1 on the policy's replies and their
        end token, 0 on the prompt, the observations and the template
    (2) draw a batch of episodes, cut it into micro-batches by tokens, the same number of them on every rank
    (3) loss = - sum over policy tokens of log pi / policy tokens of the whole batch, all ranks
    (4) AdamW with linear warm-up and cosine decay under DeepSpeed ZeRO-3; go to (2)

Departs from the paper's LLaMA-Factory set-up [1, app. C] in two places: episodes longer than --cutoff are dropped and
counted instead of cut in the middle, and the loss is a mean over the batch's tokens, not over each micro-batch's.
[1] STAR, arXiv:2603.21972

Reads   a HF folder or hub name, a jsonl of episodes (anything with "messages")
Writes  OUT/ (a HF folder: safetensors, config, tokenizer), OUT/log.jsonl, OUT/checkpoints/ (to resume from)

1 GPU   torchrun --standalone sft.py --model Qwen/Qwen2.5-1.5B-Instruct --data data/sft.jsonl --out out/sft
8 GPUs  torchrun --standalone --nproc_per_node 8 sft.py --model Qwen/Qwen2.5-7B-Instruct --data data/sft.jsonl
no GPU  python tiny.py model --corpus data/drills.jsonl --out out/tiny/init     a 2M-parameter Qwen2 to try it with

For another task, supply episodes with "messages" and read_jsonl; nothing below knows about travel.
"""
import argparse
import datetime
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from evaluate import read_jsonl

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden size, V vocabulary.


def flags():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    # what
    add("--model",      default="Qwen/Qwen2.5-7B-Instruct", help="HF folder or hub name to start from")
    add("--data",       default="data/sft.jsonl", help="episodes to imitate, one per line, with 'messages'")
    add("--out",        default="out/sft", help="folder of the trained model, its log and its checkpoints")
    # optimisation
    add("--epochs",     type=float, default=4, help="passes over the data [1: 4, and 6 for 1.5B]")
    add("--batch",      type=int,   default=32, help="episodes per update, all ranks together [1]")
    add("--lr",         type=float, default=5e-6, help="peak learning rate [1]")
    add("--warmup",     type=float, default=0.1, help="fraction of the updates with rising learning rate [1]")
    add("--min-lr",     type=float, default=0.0, help="the cosine ends at this fraction of --lr")
    add("--weight-decay", type=float, default=0.0, help="AdamW's decoupled decay")
    add("--grad-clip",  type=float, default=1.0, help="gradients are scaled down to this norm")
    add("--seed",       type=int,   default=0, help="order of the episodes")
    add("--steps",      type=int,   default=0, help="stop after this many updates; 0: as --epochs says")
    # memory
    add("--cutoff",     type=int,   default=20480, help="longest episode in tokens; longer ones are dropped [1]")
    add("--pack-tokens", type=int,  default=20480, help="tokens per micro-batch, padding included")
    add("--logp-chunk", type=int,   default=1024, help="tokens whose logits exist at a time")
    add("--attn",       default="auto", choices=["auto", "flash_attention_2", "sdpa"], help="auto: flash if installed")
    add("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them in backward")
    # running
    add("--save-every", type=int,   default=0, help="updates between checkpoints to resume from; 0: none")
    add("--resume",     action="store_true", help="go on from the last checkpoint in --out, if there is one")
    # planning
    add("--plan",       action="store_true", help="print what will fill each GPU, without one, and leave; 1: too much")
    add("--gpus",       type=int,   default=8, help="--plan for this many, all nodes together")
    add("--gpu-gib",    type=float, default=80, help="--plan for GPUs of this much memory")
    return p.parse_args()


# ------------------------------------------------------------------------------------------------------------ data


def render(messages, tokenizer):
    """Messages -> (ids, mask), token for token what an engine sees and says when it plays them.

    Replies are tokenised on their own, as sampled tokens are, and never across a template boundary. The end token
    belongs to the reply (mask 1), the newline after it to the template (mask 0):

        <|im_start|>assistant\\n  think  call  <|im_end|>  \\n<|im_start|>user\\n ...
              0                    1     1        1            0
    """
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    ids = encode(tokenizer.apply_chat_template(messages[:first], tokenize=False, add_generation_prompt=True))
    mask = [0] * len(ids)
    for previous, message in zip([None] + messages[first:], messages[first:]):
        if message["role"] == "assistant":
            if previous is not None:
                tokens = encode("<|im_start|>assistant\n")
                ids, mask = ids + tokens, mask + [0] * len(tokens)
            tokens, value = encode(message["content"]) + [tokenizer.eos_token_id], 1
        else:
            tokens, value = encode(f"\n<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"), 0
        ids, mask = ids + tokens, mask + [value] * len(tokens)
    return ids, mask


def load_samples(path, tokenizer, cutoff):
    """A jsonl of episodes -> samples {"ids", "mask"}; those longer than `cutoff` tokens are dropped and counted."""
    samples, too_long = [], 0
    for line, episode in enumerate(read_jsonl(path), 1):
        if not isinstance(episode.get("messages"), list):
            sys.exit(f"{path}:{line}: no 'messages' list; each line must be an episode as synth.py writes them")
        ids, mask = render(episode["messages"], tokenizer)
        if len(ids) > cutoff or not any(mask):
            too_long += 1
        else:
            samples.append({"ids": ids, "mask": mask})
    if not samples:
        sys.exit(f"{path}: no episode to train on ({too_long} longer than --cutoff {cutoff} or without a reply)")
    return samples, too_long


def batch_of(step, n, size, seed):
    """Indices of update `step`'s episodes: consecutive cuts of a new shuffle each epoch, a function of step alone."""
    places = range(step * size, (step + 1) * size)
    order = {e: random.Random(f"{seed}/{e}").sample(range(n), n) for e in {i // n for i in places}}
    return [order[i // n][i % n] for i in places]


# ------------------------------------------------------------------------------------------------------------ loss


class ChunkedLogps(torch.autograd.Function):
    """log pi and entropy of given tokens from hidden states, without ever holding the (N, V) logits.

    (N, H), (V, H), (N,) -> (N,), (N,). Forward and backward walk over chunks of `chunk` tokens; backward computes the
    chunk's logits again. With p = softmax(h W^T / t): d logp_y / d logits = (onehot_y - p) / t. No gradient flows
    through the entropy, which is only watched.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        logps, entropy = torch.empty(2, len(hidden), dtype=torch.float32, device=hidden.device)
        for i in range(0, len(hidden), chunk):
            logits = (hidden[i : i + chunk] @ weight.T).float().div_(temperature)  # (chunk, V)
            total = logits.logsumexp(-1)
            logps[i : i + chunk] = logits.gather(-1, targets[i : i + chunk, None]).squeeze(-1) - total
            p = (logits - total[:, None]).exp_()
            entropy[i : i + chunk] = total - logits.mul_(p).sum(-1)  # - sum p log p = log Z - sum p l
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), ctx.chunk):
            h, y, g = hidden[i : i + ctx.chunk], targets[i : i + ctx.chunk, None], grad[i : i + ctx.chunk, None].float()
            logits = (h @ weight.T).float().div_(ctx.temperature)  # (chunk, V)
            d = torch.softmax(logits, -1).mul_(-g).scatter_add_(-1, y, g).div_(ctx.temperature).to(h.dtype)
            grad_hidden[i : i + ctx.chunk] = d @ weight
            grad_weight += d.T @ h
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


class Policy(torch.nn.Module):
    """A causal language model whose forward gives log-probabilities and entropies of chosen tokens, never logits."""

    def __init__(self, lm, chunk):
        super().__init__()
        self.lm, self.chunk = lm, chunk
        # the head's own forward is replaced, so that ZeRO-3 gathers its weight once per pass and not once per chunk
        lm.lm_head.forward = lambda hidden, targets, t: ChunkedLogps.apply(hidden, lm.lm_head.weight, targets, t, chunk)

    def forward(self, ids, positions, keep, temperature=1.0):
        """ids, positions (B, T), keep (B, T) True on the tokens asked for -> their logps (N,), entropy (N,)"""
        # without use_cache=False, packed samples attend to each other under sdpa
        hidden = self.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]  # (B, T, H)
        return self.lm.lm_head(hidden[:, :-1][keep[:, 1:]], ids[:, 1:][keep[:, 1:]], temperature)


def collate(samples, packed, device):
    """A micro-batch of samples -> ids, positions, keep, each (B, T).

    Packed: one row, positions restart with each sample, from which the variable-length attention reads the borders.
    Padded: a row per sample, on the right, where no real token attends to it. No samples (a rank without work still
    makes its forward, or ZeRO-3 hangs): one row of two tokens whose loss is multiplied by zero.
    """
    if not samples:
        return torch.zeros(1, 2, dtype=torch.long, device=device), torch.arange(2, device=device)[None], \
            torch.tensor([[False, True]], device=device)
    rows = [sum((s["ids"] for s in samples), [])] if packed else [s["ids"] for s in samples]
    keeps = [sum((s["mask"] for s in samples), [])] if packed else [s["mask"] for s in samples]
    width = max(map(len, rows))
    positions = [i for s in samples for i in range(len(s["ids"]))] if packed else list(range(width))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows], device=device)
    keep = torch.tensor([k + [0] * (width - len(k)) for k in keeps], device=device).bool()
    return ids, torch.tensor([positions], device=device).expand(len(rows), -1), keep


def cut(lengths, world, budget, packed):
    """Cut a batch into micro-batches: [rank][micro] -> indices. Equal counts on all ranks, tokens balanced.

    A micro-batch holds at most `budget` tokens (padding included when not packed) or a single sample. Samples go in
    by falling length, so padding is small; micro-batches are dealt by falling cost to the rank with the least so far.
    """
    micros = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        last = micros[-1] if micros else None
        cost = lambda: sum(lengths[j] for j in [*last, i]) if packed else lengths[last[0]] * (len(last) + 1)
        if last and cost() <= budget:
            last.append(i)
        else:
            micros.append([i])
    ranks, most = [[] for _ in range(world)], math.ceil(len(micros) / world)
    tokens = lambda micros: sum(lengths[i] for micro in micros for i in micro)
    for micro in sorted(micros, key=lambda micro: -tokens([micro])):
        min((r for r in ranks if len(r) < most), key=tokens).append(micro)
    return [r + [[]] * (most - len(r)) for r in ranks]


def learning_rate(step, steps, a):
    """Linear warm-up over the first --warmup of the updates, then a cosine down to --min-lr times the peak."""
    warm = max(1, round(a.warmup * steps))
    if step < warm:
        return a.lr * (step + 1) / warm
    return a.lr * (a.min_lr + (1 - a.min_lr) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


# -------------------------------------------------------------------------------------------------------- machines


def setup():
    """Join the other ranks (torchrun's environment, or one rank without it). -> rank, world, device"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # DeepSpeed looks for ninja
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False,
                               timeout=datetime.timedelta(hours=4))  # ranks wait for the longest episode of all
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def require(model, *names):
    """Stop with a sentence where the folder lacks one of the files. What may be a hub's name passes."""
    missing = [str(file) for file in (Path(model) / name for name in names) if not file.exists()]
    if missing and (Path(model).exists() or model.count("/") != 1 or model[0] in "/."):
        sys.exit(f"no {' and no '.join(missing)}: --model takes a HF folder with weights, config and tokenizer, "
                 "or a hub name such as Qwen/Qwen2.5-7B-Instruct")


def load(a, device):
    """--model -> tokenizer, Policy (float32 on a CPU, bfloat16 on a GPU), whether micro-batches are packed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import is_flash_attn_2_available

    require(a.model, "config.json", "tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    attn = a.attn if a.attn != "auto" else "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    lm = AutoModelForCausalLM.from_pretrained(
        a.model, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, attn_implementation=attn)
    if not a.no_checkpointing:
        lm.gradient_checkpointing_enable()
    lm.train()
    return tokenizer, Policy(lm, a.logp_chunk), attn == "flash_attention_2"


def zero3(policy, a, world, device):
    """Shard parameters, gradients and AdamW's moments over all ranks. -> a DeepSpeed engine

    The loop owns the gradient accumulation: any number of engine.backward, then one engine.step.
    """
    import deepspeed

    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(policy.parameters(), lr=a.lr, betas=(0.9, 0.999), weight_decay=a.weight_decay)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 3, "overlap_comm": cuda, "contiguous_gradients": True},
        "bf16": {"enabled": cuda}, "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": a.grad_clip, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def full_weights(engine):
    """Yield (HF name, full tensor), one parameter at a time. Every rank must walk the whole of it, in step."""
    import deepspeed

    for name, parameter in engine.module.lm.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.data


def save_model(engine, tokenizer, out, rank):
    """Write a plain HF folder. Every rank takes part; rank 0 writes under another name and renames when whole."""
    state = {}
    for name, tensor in full_weights(engine):
        if rank == 0:
            state[name] = tensor.to("cpu", copy=True)
    if rank == 0:
        part = Path(f"{out}.part")
        shutil.rmtree(part, ignore_errors=True)
        engine.module.lm.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        Path(out).mkdir(parents=True, exist_ok=True)
        for file in sorted(part.iterdir(), key=lambda f: f.name == "config.json"):  # config.json, last, marks it whole
            os.replace(file, Path(out) / file.name)
        part.rmdir()
    dist.barrier()


def save_checkpoint(engine, out, step, rank):
    """Everything needed to go on after `step` updates. It counts once last.json names it; the last two are kept."""
    folder = Path(out) / "checkpoints"
    engine.save_checkpoint(folder, tag=f"step-{step}", save_latest=False)
    dist.barrier()  # every rank's shard is on disk
    if rank == 0:
        mark = {"step": step, "world": dist.get_world_size(), "log_bytes": (Path(out) / "log.jsonl").stat().st_size}
        (folder / "last.json.part").write_text(json.dumps(mark))
        os.replace(folder / "last.json.part", folder / "last.json")
        number = lambda f: int(f.name[5:])
        whole = sorted((f for f in folder.glob("step-*") if number(f) <= step), key=number)
        for old in set(folder.glob("step-*")) - set(whole[-2:]):  # a later one is half of a save that was killed
            shutil.rmtree(old)
    dist.barrier()


def restore(engine, out, resume, rank):
    """The number of updates already made: 0, or with `resume` those of the last checkpoint, which is loaded.

    log.jsonl is cut back to where the checkpoint was made, so that a resumed log reads as an unbroken one.
    """
    last, log = Path(out) / "checkpoints" / "last.json", Path(out) / "log.jsonl"
    if not resume and (last.exists() or log.exists()):
        sys.exit(f"{out} already holds a run: add --resume to go on with it, or choose another --out")
    dist.barrier()  # all have looked before the log is made
    step = 0
    if last.exists():
        mark = json.loads(last.read_text())
        if mark["world"] != dist.get_world_size():
            sys.exit(f"{last}: saved by {mark['world']} ranks, and ZeRO-3 shards load only into as many; "
                     f"start {mark['world']} ranks, not {dist.get_world_size()}")
        engine.load_checkpoint(last.parent, tag=f"step-{mark['step']}")
        step = mark["step"]
    if rank == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as f:
            f.truncate(mark["log_bytes"] if step else 0)
    dist.barrier()
    return step


def gpu_gib():
    """GiB of this GPU in use, by anyone. After learning that is the peak of it: torch keeps what it once took."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_gib": (total - free) / 2**30}


class Interrupt:
    """True once any rank has got SIGTERM, or its `also` is true: the loop then saves a checkpoint and leaves.

    torchrun kills what has not left 30 s after a SIGTERM: give it --shutdown-timeout as long as an update takes.
    """

    def __init__(self):
        self.mine = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "mine", True))

    def __call__(self, device, also=False):
        flag = torch.tensor(float(self.mine or also), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # every rank must reach it
        return bool(flag)


# -------------------------------------------------------------------------------------------------------- planning


def memory(config, n, a, longest):
    """What `n` parameters put on each GPU: [(what, GiB, moments)], and the contexts of `longest` that the cache holds.

    Moments: play, logits (backward through the head), layer (through the last layer), step (AdamW's). From the sources
    of DeepSpeed 0.19.8 (zero3 leaves it a bucket of 5e8 numbers, 1e9 live parameters and updates of 1e9 at a time), of
    Qwen2 in transformers 5.19 with an attention that makes no T x T matrix, and of ChunkedLogps.
    """
    h, i, v, layers = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers
    heads = config.num_key_value_heads
    kv = heads * (getattr(config, "head_dim", None) or h // config.num_attention_heads)
    t, c, shard, tp = max(a.pack_tokens, longest), a.logp_chunk, n / a.gpus, vars(a).get("tp", 1)
    layer = t * (20 * h + 4 * kv + 8 * i)  # two norms in float32 16 h, query and its output 4 h, MLP 8 i
    always, backward = "play logits layer step", "logits layer"
    rows = [
        ("parameters, bf16 shard", 2 * shard, always),
        ("master weights, fp32 shard", 4 * shard, always),
        ("gradients, fp32 shard", 4 * shard, always),
        ("AdamW's moments, fp32 shards", 8 * shard, always),
        ("gradients' bucket, bf16", 2 * 5e8, always),
        ("bucket's copy to be sent", 2 * min(n, 5e8), "layer"),
        ("gathered parameters, bf16", 2 * min(n, 1e9) * (a.gpus > 1), backward),
        ("every layer's activations", layer * layers, backward) if a.no_checkpointing else
        ("every layer's input", 2 * t * h * layers, backward),
        ("a layer's activations, again", layer * (not a.no_checkpointing), "layer"),
        ("its gradients on the way", t * (4 * i + 2 * h), "layer"),
        ("last norm and hidden states", t * 12 * h, "logits"),
        ("logits, head's gradient", max(14 * c * v, 12 * c * v + 4 * v * h, 6 * c * v + 6 * v * h), "logits"),
        ("tied head's gradient", 2 * v * h * config.tie_word_embeddings, "layer"),
        ("AdamW's copy and root", 8 * min(shard, 1e9), "step"),
        ("CUDA, NCCL, waste (assumed)", 4 * 2**30, always)]
    contexts = math.inf
    if "gpu_memory" in a:
        weights, work = 2 * n / tp, 2 * 2**30
        cache = a.gpu_memory * a.gpu_gib * 2**30 - weights - work
        contexts = cache / (4 * layers * kv / min(tp, heads) * longest)
        rows += [("engine's weights, bf16", weights, "play"), ("engine's KV cache", cache, "play"),
                 ("engine's work (assumed)", work, "play")]
    return [(what, size / 2**30, where) for what, size, where in rows if size], contexts


def excess(config, n, a, longest):
    """0 where a plan fits; else the GiB too many, over all moments, and what is missing of one context."""
    rows, contexts = memory(config, n, a, longest)
    totals = [sum(size for _, size, where in rows if m in where) for m in ("play", "logits", "layer", "step")]
    return sum(max(0, total - a.gpu_gib) for total in totals) + max(0, 1 - contexts)


def remedy(config, n, a, longest):
    """The flags to turn where a plan does not fit: if need be more GPUs, the fewest flags, the cheapest. -> words"""
    turns = {"gpus": [a.gpus * k for k in (2, 4, 8)],
             "tp": [k for k in (2, 4, 8) if a.gpus % k == 0 == config.num_attention_heads % k],
             "gpu_memory": [k / 20 for k in range(18, 1, -1)], "logp_chunk": [512, 256], "pack_tokens": [longest],
             "no_checkpointing": [False]}
    names = [name for name in turns if name in a]
    trials = [argparse.Namespace(**vars(a) | dict(zip(names, values)))
              for values in itertools.product(*([vars(a)[name], *turns[name]] for name in names))]
    turned = lambda b: {name: vars(b)[name] for name in reversed(names) if vars(b)[name] != vars(a)[name]}
    best = min(trials, key=lambda b: (excess(config, n, b, longest), b.gpus, len(turned(b))))
    words = [f"--{name.replace('_', '-')} {value}" if value else "no --no-checkpointing"
             for name, value in turned(best).items()]
    if excess(config, n, best, longest):
        return f"no flag but a shorter context helps; the nearest is {' '.join(words) or 'this'}"
    return f"it fits with {' '.join(words)}"


def plan(a, longest):
    """--plan: print what fills each GPU at each moment of an update. Exits with status 1 where it does not fit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    require(a.model, "config.json")
    config = AutoConfig.from_pretrained(a.model)
    with torch.device("meta"):
        n = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    rows, contexts = memory(config, n, a, longest)
    moments = ["play"] * ("gpu_memory" in a) + ["logits", "layer", "step"]
    rows = [(what, [size * (m in where) for m in moments]) for what, size, where in rows]
    rows.append((f"of {a.gpu_gib:g} GiB", [sum(column) for column in zip(*(sizes for _, sizes in rows))]))
    print(f"{a.model}: {n:,} parameters on {a.gpus} GPUs, {max(a.pack_tokens, longest)} tokens at a time\n"
          f"{'GiB on each GPU':30}" + "".join(f"{m:>8}" for m in moments))
    for what, sizes in rows:
        print(f"{what:30}" + "".join(f"{size:8.1f}" if size else " " * 8 for size in sizes))
    if contexts < math.inf:
        print(f"an engine's KV cache holds {contexts:.1f} contexts of {longest} tokens")
    if excess(config, n, a, longest):
        sys.exit(f"this does not fit; {remedy(config, n, a, longest)}")


# ------------------------------------------------------------------------------------------------------------ main


def main():
    a = flags()
    if a.plan:
        return plan(a, a.cutoff)
    rank, world, device = setup()
    tokenizer, policy, packed = load(a, device)
    # (1) episodes into ids and masks
    samples, too_long = load_samples(a.data, tokenizer, a.cutoff)
    engine = zero3(policy, a, world, device)
    steps = a.steps or math.ceil(a.epochs * len(samples) / a.batch)
    start, interrupted = restore(engine, a.out, a.resume, rank), Interrupt()
    if rank == 0:
        print(f"sft: {len(samples)} episodes ({too_long} dropped), {steps} updates of {a.batch}, {world} ranks, "
              f"{'packed' if packed else 'padded'} rows, "
              f"{sum(p.ds_numel for p in policy.parameters()) / 1e6:.1f}M parameters")
    for step in range(start, steps):
        began = time.time()
        # (2) the batch of this update, and this rank's share of it
        batch = [samples[i] for i in batch_of(step, len(samples), a.batch, a.seed)]
        micros = cut([len(s["ids"]) for s in batch], world, a.pack_tokens, packed)[rank]
        n_tokens = sum(sum(s["mask"]) for s in batch)
        # (3) one denominator for the whole batch; DeepSpeed takes the mean over ranks, we want the sum
        total = torch.zeros(2, device=device)
        for micro in micros:
            logps, entropy = engine(*collate([batch[i] for i in micro], packed, device))
            engine.backward(-logps.sum() * bool(micro) / n_tokens * world)
            total += torch.stack([-logps.detach().sum(), entropy.sum()]) * bool(micro) / n_tokens
        # (4)
        lr = engine.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, a)
        engine.step()
        dist.all_reduce(total)
        line = {"step": step + 1, "loss": total[0].item(), "entropy": total[1].item(),
                "gnorm": float(engine.get_global_grad_norm()), "lr": lr, "policy_tokens": n_tokens,
                "tokens": sum(len(s["ids"]) for s in batch), "seconds": time.time() - began} | gpu_gib()
        log(line, steps, a.out, rank)
        last = interrupted(device)
        if last or (a.save_every and (step + 1) % a.save_every == 0):
            save_checkpoint(engine, a.out, step + 1, rank)
        if last:
            sys.exit(f"sft: SIGTERM, saved after update {step + 1}; the same command with --resume goes on")
    save_model(engine, tokenizer, a.out, rank)


def log(line, steps, out, rank):
    """One line on the screen, the same dict in log.jsonl."""
    if rank == 0:
        print("step {step:5d}/{steps} | loss {loss:.4f} | entropy {entropy:.3f} | gnorm {gnorm:6.2f} | lr {lr:.2e} | "
              "{speed:6.0f} tokens/s".format(steps=steps, speed=line["tokens"] / line["seconds"], **line), flush=True)
        with open(Path(out) / "log.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
