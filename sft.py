"""
Supervised fine-tuning: teach a model to play by imitating the replies of successful episodes.

    (1) render each episode with the chat template into token ids and a mask: 1 on the policy's
        replies and their end tokens, 0 on the prompt, the observations and the template
    (2) draw a batch of episodes and split it into micro-batches, the same number on every rank
    (3) loss = - sum over policy tokens of log pi / policy tokens of the whole batch, all ranks
    (4) AdamW with linear warm-up and cosine decay under DeepSpeed ZeRO-3; go to (2)

Departs from the paper's released scripts [2] in two places: episodes longer than --cutoff are
dropped and counted instead of truncated, and the loss is a mean over the tokens of the batch
instead of a mean over each micro-batch.
[1] STAR, arXiv:2603.21972, app. C   [2] SFTScripts in the code released with [1]

Reads   a HF folder or hub name, a jsonl of episodes (anything with "messages")
Writes  OUT/ (a HF folder: safetensors, config, tokenizer), OUT/log.jsonl, OUT/checkpoints/

    torchrun --standalone --nproc_per_node 8 sft.py --model Qwen/Qwen2.5-7B-Instruct --out out/sft

Nothing below knows about travel: to imitate something else, supply other "messages".
"""
import datetime
import logging
import math
import os
import random
import sys
import time
import warnings
from bisect import bisect_left
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

try:
    import runtime  # noqa: I001, first: it reports Ctrl-C while torch loads
    import torch
    import torch.distributed as dist

    from runtime import AMOUNT, COUNT, NATURAL, POSITIVE, SEED, SHARE, Help, Parser
except ModuleNotFoundError as error:
    sys.exit(f"{error}. {Path(__file__).name} needs runtime.py beside it, and the packages "
             "of requirements.txt: type `. .venv/bin/activate`")

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden
# size, V vocabulary.
LOGITS = 30_000_000  # the loss computes at most this many logits at a time (120 MB in float32)


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("files").add_argument
    add("--model", default="Qwen/Qwen2.5-7B-Instruct", help="HF folder or hub name to start from")
    add("--data", default="data/sft.jsonl", help="episodes to imitate, one per line")
    add("--out", default="out/sft", help="folder of the trained model, its log and checkpoints")
    add = p.add_argument_group("learn").add_argument
    add("--epochs", type=POSITIVE, default=4, help="passes over the data [1: 4, and 6 for 1.5B]")
    add("--steps", type=NATURAL, default=0, help="number of updates; 0: set by --epochs")
    add("--batch", type=COUNT, default=32, help="episodes per update, all ranks together [1]")
    add("--lr", type=AMOUNT, default=5e-6, help="peak learning rate [1]")
    add("--warmup", type=SHARE, default=0.1, help="fraction of the updates, at the start, in which "
        "the learning rate rises linearly [1]")
    add("--min-lr", type=SHARE, default=0.0, help="the cosine ends at this fraction of --lr")
    add("--seed", type=SEED, default=0, help="seed of the order of the episodes")
    add = p.add_argument_group("memory (python -m look.memory sft estimates it)").add_argument
    add("--cutoff", type=COUNT, default=20480, help="most tokens of an episode; longer ones are "
        "dropped [2]")
    add("--pack-tokens", type=COUNT, default=20480, help="most tokens of a micro-batch, padding "
        "included; a longer episode is a micro-batch of its own")
    add("--no-checkpointing", type=SHARE, nargs="?", const=1.0, default=0.0, metavar="SHARE",
        help="keep the activations of this share of the layers (of all without SHARE) instead of "
        "recomputing them: faster, but needs more memory")
    add("--offload", action="store_true", help="run AdamW on the CPU and keep its states in the "
        "host's memory: the same updates, slower")
    add("--lora", type=COUNT, default=0, metavar="R", help="train adapters of rank R at all linear "
        "layers instead of all weights; use about 10 times the --lr (runtime.py, add_adapters)")
    add = p.add_argument_group("running").add_argument
    add("--save-every", type=NATURAL, default=0, help="updates between two checkpoints; 0: none")
    add("--resume", action="store_true", help="resume from the last checkpoint in OUT, if any")
    add("--track", type=runtime.tracker, metavar="TOOL", help="also log to wandb, tensorboard or "
        "trackio")
    return p.parse_args()


# ------------------------------------------------------------------------------------------- data

class Rendered(NamedTuple):
    """An episode as tokens."""
    ids: list  # prompt, replies, observations
    mask: list  # 1 on the policy's tokens, 0 elsewhere


def render(messages, template):
    """Messages -> (ids, mask), with exactly the tokens that playing this conversation would give.

    Each reply is tokenised by itself, like sampled tokens: no token spans a template boundary. The
    end token belongs to the reply (mask 1), the newline after it to the template (mask 0):

        <|im_start|>assistant\n  think  call  <|im_end|>  \n<|im_start|>user\n ...
              0                    1     1        1            0
    """
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    rendered = Rendered(template.prompt(messages[:first]), [])
    rendered.mask.extend([0] * len(rendered.ids))
    for message, following in zip_longest(messages[first:], messages[first + 1:]):
        is_reply = message["role"] == "assistant"
        if is_reply:
            # the role "result" stands within a reply, which continues after it: no end token yet
            continues = following and following["role"] == "result"
            tokens = template.encode(message["content"])
            ended = tokens[-1:] == [template.end]  # some data sets write the end token
            tokens += [template.end] * (not continues and not ended)
        else:
            tokens = template.between(message)
        rendered.ids.extend(tokens)
        rendered.mask.extend([int(is_reply)] * len(tokens))
    return rendered


def load_samples(path, template, cutoff):
    """Read and render the episodes of a file -> samples, and the number of dropped episodes: those
    of more than `cutoff` tokens or without a reply. SystemExit if a row is not an episode, or if no
    episode is left."""
    samples, dropped = [], 0
    for line, episode in enumerate(runtime.read_jsonl(path), 1):
        messages = episode.get("messages") if isinstance(episode, dict) else None
        fault = "no list of 'messages'"
        if isinstance(messages, list) and messages:
            fault = runtime.talk_fault(messages)
            if not fault and messages[0]["role"] == "assistant":
                fault = "message 1 is a reply, with no message before it"
        if fault:
            sys.exit(f"{path}:{line}: {fault}. An episode begins with system and user, then "
                     "assistant alternates with user or result; synth.py writes such episodes")
        sample = render(messages, template)
        if episode.get("stop") in ("format", "context") and sample.mask[-1]:
            sample.ids.pop()  # the last reply was cut off: its end token was never sampled
            sample.mask.pop()
        if len(sample.ids) > cutoff or not any(sample.mask):
            dropped += 1
        else:
            samples.append(sample)
    if not samples:
        sys.exit(f"{path}: no episode to train on ({dropped} are longer than --cutoff {cutoff} or "
                 "have no reply)")
    return samples, dropped


def batch_of(step, n, size, seed):
    """Indices of the samples of update `step`. They depend on the arguments alone, so a resumed run
    draws the same batches.

    Every epoch shuffles all n samples anew, and each update takes the next `size` of them.
    """
    places = range(step * size, (step + 1) * size)
    epochs = {place // n for place in places}
    order = {epoch: random.Random(f"{seed}/{epoch}").sample(range(n), n) for epoch in epochs}
    return [order[place // n][place % n] for place in places]


# ------------------------------------------------------------------------------------------- loss

class ChunkedLogps(torch.autograd.Function):
    """log pi and entropy of given tokens from hidden states, without (N, V) logits in memory.

    (N, H), (V, H), (N,) -> (N,), (N,). Forward and backward process `chunk` tokens at a time, and
    backward recomputes the logits of each chunk. With p = softmax(h W^T / t): d logp_y / d logits =
    (onehot_y - p) / t. The entropy is only logged: no gradient flows through it.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        logps, entropy = torch.empty(2, len(hidden), dtype=torch.float32, device=hidden.device)
        for i in range(0, len(hidden), chunk):
            logits = (hidden[i : i + chunk] @ weight.T).float().div_(temperature)  # (chunk, V)
            total = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[i : i + chunk, None]).squeeze(-1)
            logps[i : i + chunk] = chosen - total
            p = (logits - total[:, None]).exp_()
            entropy[i : i + chunk] = total - logits.mul_(p).sum(-1)  # - sum p log p
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        train_head = ctx.needs_input_grad[1]  # False with --lora
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if train_head else None
        for i in range(0, len(hidden), ctx.chunk):
            h, y = hidden[i : i + ctx.chunk], targets[i : i + ctx.chunk, None]
            g = grad[i : i + ctx.chunk, None].float()
            logits = (h @ weight.T).float().div_(ctx.temperature)  # (chunk, V)
            d = torch.softmax(logits, -1).mul_(-g).scatter_add_(-1, y, g)
            d = d.div_(ctx.temperature).to(h.dtype)
            grad_hidden[i : i + ctx.chunk] = d @ weight
            if train_head:
                grad_weight += d.T @ h
        return grad_hidden, grad_weight.to(weight.dtype) if train_head else None, None, None, None


class Policy(torch.nn.Module):
    """A causal language model that returns log-probabilities of chosen tokens instead of logits."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.borders = False  # whether to tell the layers where packed samples begin
        # replace the head's forward: ZeRO-3 then gathers its weight once per pass, not per chunk
        lm.get_output_embeddings().forward = self.head

    def head(self, hidden, targets, temperature):
        weight = self.lm.get_output_embeddings().weight  # (V, H)
        chunk = max(1, min(1024, LOGITS // len(weight)))
        return ChunkedLogps.apply(hidden, weight, targets, temperature, chunk)

    def forward(self, ids, positions, keep, temperature=1.0):
        """ids, positions, keep, (B, T) each -> logps, entropy of the tokens to keep, (N,) each"""
        borders = runtime.borders(positions) if self.borders else {}
        # use_cache=False is needed: otherwise packed samples attend to each other under sdpa
        hidden = self.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False,
                                    **borders)[0]
        head, kept = self.lm.get_output_embeddings(), keep[:, 1:]
        return head(hidden[:, :-1][kept], ids[:, 1:][kept], temperature)


def collate(samples, packed, device):
    """A micro-batch of samples, which have ids and a mask -> ids, positions, keep, each (B, T).

    Packed: all samples in one row. Positions restart at each sample, and the attention separates
    samples where they do. Padded: one row per sample, with the padding on the right: under causal
    attention no real token sees it. No samples: two dummy tokens, because a rank without work still
    has to run a forward, or ZeRO-3 hangs; the caller multiplies their loss by 0.
    """
    rows = [(list(s.ids), list(s.mask)) for s in samples] or [([0, 0], [0, 1])]
    positions = range(row_width(max(len(ids) for ids, _ in rows), device))
    if packed:
        positions = [i for ids, _ in rows for i in range(len(ids))]
        positions += range(row_width(len(positions), device) - len(positions))
        rows = [tuple(sum(column, []) for column in zip(*rows, strict=True))]
    width = len(positions)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows], device=device)
    keep = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], device=device)
    return ids, torch.tensor([positions], device=device).expand(len(rows), -1), keep.bool()


def pack(lengths, budget, packed):
    """Split a batch into micro-batches [[index]] of at most `budget` tokens; a sample longer than
    that is a micro-batch of its own.

    Unless packed, padding counts; going from long to short samples keeps it small.
    """
    def tokens(micro):
        return sum(lengths[i] for i in micro) if packed else lengths[micro[0]] * len(micro)

    micros = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if micros and tokens([*micros[-1], i]) <= budget:
            micros[-1].append(i)
        else:
            micros.append([i])
    return micros


def row_width(n, device):
    """The width of a row for n tokens: on a GPU, n rounded up to a multiple of 512. Shapes then
    repeat, and cuDNN seldom has to plan its attention for a new one, which is slow on Hopper
    (docs/notes.md)."""
    multiple = 1 if str(device) == "cpu" else 512
    return math.ceil(n / multiple) * multiple


def deal(lengths, ranks, budget, packed, device="cpu"):
    """Split a batch into micro-batches and deal them to the ranks: [rank][micro-batch] -> indices.

    Every rank gets the same number of micro-batches, else ZeRO-3 hangs. At each micro-batch all
    ranks wait for the slowest. So `budget` is lowered as far as the number of micro-batches per
    rank stays the same, which makes them equal in size, and those that take about the same time are
    computed at the same time.
    """
    lengths = [n if packed else row_width(n, device) for n in lengths]

    def rounds(budget):
        return math.ceil(len(pack(lengths, budget, packed)) / ranks)

    def work(micro):  # in a row of 40K tokens, attention costs as much as everything else (7B)
        rows = [lengths[i] if packed else lengths[micro[0]] for i in micro]
        return sum(n * (1 + n / 40_000) for n in rows)

    smallest = bisect_left(range(budget), -rounds(budget), key=lambda lower: -rounds(lower))
    micros = sorted(pack(lengths, smallest, packed), key=work, reverse=True)
    micros += [[]] * (-len(micros) % ranks)
    return [micros[rank::ranks] for rank in range(ranks)]


def learning_rate(step, steps, args):
    """Linear warm-up over the first --warmup of all updates, then a cosine down to --min-lr."""
    warm = max(1, round(args.warmup * steps))
    if step < warm:
        return args.lr * (step + 1) / warm
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
    return args.lr * (args.min_lr + (1 - args.min_lr) * cosine)


# --------------------------------------------------------------------------------------- machines

def setup():
    """Join the ranks that torchrun has started -> rank, ranks, device"""
    runtime.die_with_parent()
    cuda = bool(runtime.visible_gpus())
    runtime.prepare_op(None if cuda else "deepspeed_shm_comm")
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    # row shapes vary, and blocks of fixed size would leave unused gaps in the memory
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # DeepSpeed compiles with ninja, which is installed there
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    # Create the process group before DeepSpeed does, and DeepSpeed uses it. It would bind a group
    # of its own to a device, and NCCL would then create vLLM's groups by splits that need all
    # ranks, which is known to hang.
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=4))  # longer than any play
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def load(args, template, device):
    """Load --model, in bfloat16 on a GPU and float32 on a CPU -> Policy, whether to pack rows

    Rows are packed only with flash attention, and only if packing changes no log-probability.
    """
    from transformers import AutoModelForCausalLM

    runtime.check_precision(args.model)
    lm, loaded = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        output_loading_info=True, ignore_mismatched_sizes=True)  # check_weights refuses mismatches
    runtime.check_weights(lm, template, loaded)
    runtime.check_saving(lm, template, args.out)
    if args.lora:
        runtime.add_adapters(lm, template, args)
    flash = device.type == "cuda" and runtime.use_flash_attention(lm)
    recompute_layers(lm, 1 - args.no_checkpointing)
    runtime.make_repeatable(lm)
    return runtime.check_forwards(lm.to(device), Policy, collate, template, flash)


def recompute_layers(lm, share):
    """Recompute the activations of the first `share` of the layers in the backward pass. That pass
    begins with the last layers, so their memory is free again when the first are recomputed."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if share:
        lm.gradient_checkpointing_enable()
    layers = [each for each in lm.modules() if isinstance(each, GradientCheckpointingLayer)]
    for layer in layers[round(share * len(layers)):]:
        layer.gradient_checkpointing = False


def zero3(policy, lr, device, offload=False):
    """Shard parameters, gradients and AdamW's moments over all ranks -> the trainer, which is a
    DeepSpeed engine. offload: AdamW runs on the CPU, whose memory then holds gradients, moments and
    master weights.

    Gradients accumulate over any number of trainer.backward calls until trainer.step.
    """
    import deepspeed

    cuda = device.type == "cuda"
    trained = [p for p in policy.parameters() if p.requires_grad]  # with --lora only the adapters
    if offload:
        runtime.prepare_op("cpu_adam")
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(trained, lr=lr, weight_decay=0.0)
    else:
        # fused: one kernel, which needs no temporary copies of the moments (8 bytes a parameter)
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=cuda or None)
    config = {
        "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False,
        # gather whole layers: hooks on each of their modules cost time (docs/notes.md)
        "zero_optimization": {"stage": 3, "overlap_comm": cuda, "leaf_module": {
            "classes": sorted(policy.lm._no_split_modules or ())}, "offload_optimizer": {
                "device": "cpu" if offload else "none", "pin_memory": cuda}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda}, "data_types": {"grad_accum_dtype": "fp32"}}
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def full_weights(trainer):
    """Yield (HF name, full tensor), one by one. All ranks must iterate together, to the end.

    With --lora R, the adapters are merged into the layers' weights: W + alpha / R * B A.
    """
    import deepspeed

    adapted = {f"{name}.base_layer.weight": layer for name, layer
               in trainer.module.lm.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, parameter in trainer.module.lm.named_parameters():
        layer = adapted.get(name)
        if ".lora_" not in name:
            with deepspeed.zero.GatheredParameters([*layer.parameters()] if layer else [parameter]):
                weight = runtime.merge(layer) if layer else parameter.data
                yield name.replace(".base_layer", ""), weight


def save_model(trainer, template, out, rank):
    """Write a plain HF folder, complete or not at all; with --lora also its adapter. Every rank
    takes part."""
    state = {name: tensor.to("cpu", copy=True) if rank == 0 else None
             for name, tensor in full_weights(trainer)}
    adapter = runtime.adapter_weights(trainer.module.lm)
    if rank == 0:
        with runtime.new_model(out) as part:
            runtime.write_model(trainer.module.lm, template, state, part)
            runtime.write_adapter(trainer.module.lm, adapter, part / "adapter")
    dist.barrier()


# ------------------------------------------------------------------------------------------- main

def main():
    args = flags()
    rank, ranks, device = setup()
    runtime.lock_folder(args.out)
    # (1) render the episodes
    template = runtime.load_template(args.model)
    samples, dropped = load_samples(args.data, template, args.cutoff)
    policy, packed = load(args, template, device)
    runtime.keep_settings(args)  # only once all inputs were read without an error
    trainer = zero3(policy, args.lr, device, args.offload)
    steps = args.steps or math.ceil(args.epochs * len(samples) / args.batch)
    start = runtime.restore(trainer, args.out, args.resume, rank)
    interrupted = runtime.watch_sigterm()
    if rank == 0:
        print(f"sft: {len(samples)} episodes ({dropped} dropped), {steps} updates of {args.batch}, "
              f"{ranks} ranks, {'packed' if packed else 'padded'} rows, "
              f"{sum(p.ds_numel for p in policy.parameters()) / 1e6:.1f}M parameters")
    for step in range(start, steps):
        began = time.time()
        # (2) the batch of this update, and the micro-batches of this rank
        batch = [samples[i] for i in batch_of(step, len(samples), args.batch, args.seed)]
        micros = deal([len(s.ids) for s in batch], ranks, args.pack_tokens, packed, device)[rank]
        n_tokens = sum(sum(s.mask) for s in batch)
        # (3) one denominator for the whole batch. DeepSpeed averages over ranks, but the loss is a
        # sum over them: multiply by their number
        total = torch.zeros(2, device=device)
        for micro in micros:
            logps, entropy = trainer(*collate([batch[i] for i in micro], packed, device))
            # bool(micro): a rank without work still runs a forward, or ZeRO-3 hangs
            trainer.backward(-logps.sum() * bool(micro) / n_tokens * ranks)
            total += torch.stack([-logps.detach().sum(), entropy.sum()]) * bool(micro) / n_tokens
        # (4)
        lr = trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        trainer.step()
        dist.all_reduce(total)
        loss, gnorm = total[0].item(), float(trainer.get_global_grad_norm())
        runtime.check_finite(args.out, step + 1, loss=loss, gnorm=gnorm)
        log({"step": step + 1, "loss": loss, "entropy": total[1].item(), "gnorm": gnorm, "lr": lr,
             "policy_tokens": n_tokens, "tokens": sum(len(s.ids) for s in batch),
             "seconds": time.time() - began}, steps, args, rank)
        runtime.save_checkpoint(trainer, args, step + 1, rank, last=interrupted(device))
    runtime.check_parameters(trainer, args.out, steps)
    save_model(trainer, template, args.out, rank)
    runtime.report_end(args, "loss", f"python grpo.py --model {args.out} --tasks TASKS", rank)
    dist.destroy_process_group()


def log(line, steps, args, rank):
    """Print one line and append all numbers to log.jsonl."""
    if rank == 0:
        speed = line["tokens"] / line["seconds"]
        print("step {step:5d}/{steps} | loss {loss:.4f} | entropy {entropy:.3f} | gnorm "
              "{gnorm:6.2f} | lr {lr:.2e} | {speed:6.0f} tokens/s".format(
                  steps=steps, speed=speed, **line), flush=True)
        runtime.write_log(line, args)


if __name__ == "__main__":
    runtime.run_ranks(main, flags)
