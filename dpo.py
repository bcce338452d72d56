"""
DPO: of two plays of a question, make the better one likelier and the other one less likely.

A policy is its own judge [1]: the reward it gives an episode is beta times delta, where delta =
log pi - log pi_ref says how much likelier it has become since training began. Fitted to pairs as a
judge is, P(chosen is better) = sigmoid(reward of chosen - reward of rejected), it needs no reward
model, no value function and no play. What is left is a loss on two texts:

    (1) render both episodes of each pair as sft.py does: token ids, and a mask that is 1 on the
        policy's replies and 0 on the prompt and on what the tools answered
    (2) the reference: log pi_ref of every episode's policy tokens together, by the weights that
        training begins with. It is taken once and kept, so that no second model is in memory
    (3) draw a batch of pairs. A pass without gradients gives log pi of its episodes, and with it
        margin = beta (delta of chosen - delta of rejected)
    (4) loss = - mean over pairs of log sigmoid(margin). Its gradient is a mean of beta
        sigmoid(-margin) grad (log pi of rejected - log pi of chosen): once margins are known every
        episode has a weight of its own, and needs its partner in no micro-batch and on no rank
    (5) a second pass takes that gradient; AdamW with linear warm-up and cosine decay; go to (3)

A pair that is told apart pulls no more: sigmoid(-margin) falls to 0, the later the smaller beta is.
Only the difference counts: both episodes may become less likely, the rejected one faster, and
delta_chosen in the log shows it. --nll [3] holds against it.

Departs from [2], which trains LoRA weights at 5e-6: here all weights are trained, at a tenth of it.
[1] DPO, arXiv:2305.18290   [2] Tool-Star, arXiv:2505.16410   [3] arXiv:2404.19733, eq. 1
[4] length-normalised DPO, arXiv:2411.15124

Reads   a HF folder or hub name, a jsonl of pairs {prompt, chosen, rejected, rewards}
Writes  OUT/ (a HF folder), OUT/log.jsonl, OUT/reference.jsonl, OUT/checkpoints/

    python -m toolstar.pairs --episodes out/rl/rollouts --out out/pairs
    torchrun --standalone --nproc_per_node 8 dpo.py --model out/rl --data out/pairs/train.jsonl

Nothing below knows about tools or travel: for another task, supply other pairs.
"""
import datetime
import hashlib
import logging
import math
import os
import random
import sys
import time
import warnings
from array import array
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import runtime
from runtime import AMOUNT, COUNT, NATURAL, POSITIVE, SHARE, Help, Parser

# Shapes: P pairs, B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H
# hidden size, V vocabulary. (2, P): of the chosen episodes, then of the rejected ones.
LOGITS = 30_000_000  # numbers: the loss never holds more logits at a time (120 MB in float32)
FALLING = -10  # mean delta of chosen episodes below which the log warns: e^10 times less likely


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("what").add_argument
    add("--model", default="out/rl", help="HF folder or hub name to start from")
    add("--data", default="out/pairs/train.jsonl", help="pairs to learn from, one per line")
    add("--val", help="pairs to measure preference accuracy on, at the end")
    add("--out", default="out/dpo", help="folder of the trained model, its log and checkpoints")
    add = p.add_argument_group("learn").add_argument
    add("--beta", type=POSITIVE, default=0.1, help="the smaller, the farther the policy may go [1]")
    add("--nll", type=AMOUNT, default=0.0, help="weight of - log pi per token of the chosen [3]")
    add("--length-norm", action="store_true", help="delta per token, for a beta of about 5 [4]")
    add("--epochs", type=POSITIVE, default=1, help="passes over the pairs")
    add("--steps", type=NATURAL, default=0, help="updates; 0: as many as --epochs says")
    add("--batch", type=COUNT, default=32, help="pairs per update, all ranks together")
    add("--lr", type=AMOUNT, default=5e-7, help="peak learning rate")
    add("--warmup", type=SHARE, default=0.1, help="first share of the updates, of rising rate [2]")
    add("--min-lr", type=SHARE, default=0.0, help="the cosine ends at this share of --lr")
    add("--seed", type=NATURAL, default=0, help="of the order of the pairs")
    add = p.add_argument_group("memory (python -m look.memory dpo tells what fits)").add_argument
    add("--cutoff", type=COUNT, default=8192, help="tokens of an episode; longer are dropped [2]")
    add("--pack-tokens", type=COUNT, default=16384, help="tokens per micro-batch, with padding")
    add("--attn", default="auto", choices=["auto", "flash_attention_2", "sdpa"],
        help="attention of the trainer; auto: flash attention where it is installed")
    add("--no-checkpointing", action="store_true", help="keep all activations for the backward")
    add = p.add_argument_group("running").add_argument
    add("--val-every", type=NATURAL, default=0, help="updates between looks at --val; 0: its end")
    add("--save-every", type=NATURAL, default=0, help="updates between checkpoints; 0: none")
    add("--resume", action="store_true", help="go on from the last checkpoint in OUT, if any")
    return p.parse_args()


# ------------------------------------------------------------------------------------------- data

class Rendered(NamedTuple):
    """An episode as tokens."""
    ids: list  # prompt, replies, observations
    mask: list  # 1 on the policy's tokens


class Pair(NamedTuple):
    """Two plays of a question as tokens."""
    chosen: Rendered
    rejected: Rendered


def render(messages, template):
    """Messages -> (ids, mask), token for token what an engine sees and says when it plays them.

    Replies are tokenised on their own, as sampled tokens are, and never across a template boundary.
    The end token belongs to the reply (mask 1), the newline after it to the template (mask 0):

        <|im_start|>assistant\n  think  call  <|im_end|>  \n<|im_start|>user\n ...
              0                    1     1        1            0
    """
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    rendered = Rendered(template.prompt(messages[:first]), [])
    rendered.mask.extend([0] * len(rendered.ids))
    for message, after in zip_longest(messages[first:], messages[first + 1:]):
        said = message["role"] == "assistant"
        if said:
            goes_on = after and after["role"] == "result"  # the reply, behind the result
            tokens = template.encode(message["content"]) + [template.end] * (not goes_on)
        else:
            tokens = template.between(message)
        rendered.ids.extend(tokens)
        rendered.mask.extend([int(said)] * len(tokens))
    return rendered


def read_pair(row, template, cutoff):
    """A row of --data -> its Pair, or in words why nothing is learnt from it.

    Both sides go on from "prompt"; without one they are whole conversations.
    """
    try:
        sides = [row.get("prompt", []) + row[side] for side in Pair._fields]
        better, worse = map(float, row["rewards"])
    except KeyError as error:
        return f"no {error}"
    except (AttributeError, TypeError, ValueError):
        return "want lists of messages, and two numbers as rewards, of chosen and rejected"
    if not all(map(runtime.is_talk, sides)):
        return "a message is no role and content, or not every second one is a reply"
    asked = [list(takewhile(lambda m: m["role"] != "assistant", side)) for side in sides]
    said = [[m["content"] for m in side if m["role"] == "assistant"] for side in sides]
    if not all("".join(replies).strip() for replies in said):
        return "a side has no reply"
    if said[0] == said[1]:
        return "both sides have the same replies"
    if asked[0] != asked[1] or not asked[0] or len(row.get("prompt", [])) > len(asked[0]):
        return "the prompts of both sides differ, are empty, or hold a reply"
    if not better >= worse:
        return "rejected earned more than chosen"
    pair = Pair(*(render(side, template) for side in sides))
    stops = row["stops"] if isinstance(row.get("stops"), list) else []
    for episode, stop in zip(pair, stops, strict=False):
        if stop != "answer" and episode.mask[-1]:  # it may be cut off: nobody said that it ends
            episode.ids.pop()
            episode.mask.pop()
    too_long = max(len(episode.ids) for episode in pair) > cutoff
    return f"a side is longer than --cutoff {cutoff}" if too_long else pair


def load_pairs(path, template, cutoff, rank):
    """Pairs of a file; those left out are counted by cause. ValueError if none is left."""
    read, causes = [read_pair(row, template, cutoff) for row in runtime.read_jsonl(path)], {}
    for line, cause in enumerate(read, 1):
        if isinstance(cause, str):
            causes.setdefault(cause, []).append(line)
    left_out = [f"{len(lines)} left out, the first in line {lines[0]}: {cause}"
                for cause, lines in causes.items()]
    if all(isinstance(pair, str) for pair in read):
        raise ValueError(f"{path}: no pair to train on; {'; '.join(left_out) or 'it is empty'}")
    if left_out and rank == 0:
        print("\n".join(f"{path}: {text}" for text in left_out))
    return [pair for pair in read if isinstance(pair, Pair)]


def episodes_of(pairs):
    """[Pair] -> the episodes, chosen ones first."""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def batch_of(step, n, size, seed):
    """Indices of update `step`'s episodes: cuts of a new shuffle each epoch, a function of step."""
    places = range(step * size, (step + 1) * size)
    epochs = {place // n for place in places}
    order = {epoch: random.Random(f"{seed}/{epoch}").sample(range(n), n) for epoch in epochs}
    return [order[place // n][place % n] for place in places]


# ------------------------------------------------------------------------------------------- loss

@torch.no_grad()
def sum_logps(engine, rows, packed, rank, ranks, device, args):
    """(3) log pi of each episode's policy tokens together -> (2, P) float64, on every rank."""
    sums = torch.zeros(len(rows), dtype=torch.float64, device=device)
    for micro in deal([len(row.ids) for row in rows], ranks, args.pack_tokens, packed)[rank]:
        batch = [rows[i] for i in micro]
        logps, _ = engine(*collate(batch, packed, device))
        if batch:  # a rank without work makes its forward all the same
            parts = logps.double().split([sum(row.mask) for row in batch])
            sums[micro] = torch.stack([part.sum() for part in parts])
    dist.all_reduce(sums)  # one rank has an episode, the others zeros: nothing is rounded
    return sums.view(2, -1)


def preference(logps, reference, rows, args):
    """(3) (4) The loss of P pairs -> its derivative by each log pi, (2, P); {name: number} to log.

    logps, reference: (2, P), log pi and log pi_ref of the episodes in `rows`.
    """
    tokens = torch.tensor([sum(row.mask) for row in rows], device=logps.device).view(2, -1)
    logps = logps.clone().requires_grad_()
    delta = logps - reference
    chosen, rejected = args.beta * (delta / tokens if args.length_norm else delta)
    margin = chosen - rejected  # (P,)
    loss = (-F.logsigmoid(margin) - args.nll * logps[0] / tokens[0]).mean()
    (weights,) = torch.autograd.grad(loss, logps)
    each = logps.sum(1) / tokens.sum(1)
    numbers = {"loss": loss, "accuracy": (margin > 0).double().mean(), "margin": margin.mean(),
               "delta_chosen": delta[0].mean(), "delta_rejected": delta[1].mean(),
               "logp_chosen": each[0], "logp_rejected": each[1]}
    return weights, {name: number.item() for name, number in numbers.items()}


def learn_pairs(engine, rows, reference, packed, rank, ranks, device, args):
    """(3) (4) (5) One update -> {name: number} to log"""
    logps = sum_logps(engine, rows, packed, rank, ranks, device, args)
    weights, numbers = preference(logps, reference, rows, args)
    for micro in deal([len(row.ids) for row in rows], ranks, args.pack_tokens, packed)[rank]:
        batch = [rows[i] for i in micro]
        logps, _ = engine(*collate(batch, packed, device))  # (N,)
        loss = logps.sum() * 0
        if batch:
            counts = torch.tensor([sum(row.mask) for row in batch], device=device)
            weight = weights.flatten()[micro].float().repeat_interleave(counts)  # (N,)
            loss = (logps * weight).sum()
        engine.backward(loss * ranks)  # DeepSpeed takes the mean over ranks, we want the sum
    engine.step()
    return numbers | {"gnorm": float(engine.get_global_grad_norm())}


def fingerprint(policy, rows):
    """What the reference hangs on, as a hash: every weight, every token and its mask."""
    digest = hashlib.sha256()
    for p in policy.parameters():
        digest.update(p.detach().flatten().view(torch.uint8).numpy())
    for row in rows:
        digest.update(array("i", [len(row.ids), *row.ids, *row.mask]).tobytes())
    return digest.hexdigest()


def take_reference(engine, rows, known, start, packed, rank, ranks, device, args):
    """(2) log pi_ref of all episodes, (2, P): what OUT/reference.jsonl holds, or made and kept.

    known: fingerprint() of the weights and episodes that training begins with. After `start`
    updates these weights are gone, and nothing can be made.
    """
    file = Path(args.out) / "reference.jsonl"
    head, *kept = runtime.read_jsonl(file) if file.exists() else [None]
    if head == {"of": known}:
        sums = [[pair[side] for pair in kept] for side in Pair._fields]
        return torch.tensor(sums, dtype=torch.float64, device=device)
    if start:
        raise ValueError(f"{file} is not of this --model, --data and --val, with which {args.out} "
                         "began: go on with those, or choose another --out")
    sums = sum_logps(engine, rows, packed, rank, ranks, device, args)
    if rank == 0:  # all have looked before sum_logps let any rank go
        runtime.write_jsonl(file, [{"of": known}] + [
            dict(zip(Pair._fields, pair, strict=True)) for pair in sums.T.tolist()])
    return sums


class ChunkedLogps(torch.autograd.Function):
    """log pi and entropy of given tokens from hidden states, without ever holding (N, V) logits.

    (N, H), (V, H), (N,) -> (N,), (N,). Forward and backward walk over chunks of `chunk` tokens, and
    backward computes a chunk's logits again. With p = softmax(h W^T / t): d logp_y / d logits =
    (onehot_y - p) / t. No gradient flows through the entropy, which is only watched.
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
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), ctx.chunk):
            h, y = hidden[i : i + ctx.chunk], targets[i : i + ctx.chunk, None]
            g = grad[i : i + ctx.chunk, None].float()
            logits = (h @ weight.T).float().div_(ctx.temperature)  # (chunk, V)
            d = torch.softmax(logits, -1).mul_(-g).scatter_add_(-1, y, g)
            d = d.div_(ctx.temperature).to(h.dtype)
            grad_hidden[i : i + ctx.chunk] = d @ weight
            grad_weight += d.T @ h
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


class Policy(torch.nn.Module):
    """A causal language model that gives log-probabilities of chosen tokens, never logits."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        # the head's own forward is replaced: ZeRO-3 gathers its weight once per pass, not per chunk
        lm.lm_head.forward = self.head

    def head(self, hidden, targets, temperature):
        weight = self.lm.lm_head.weight  # (V, H)
        chunk = max(1, min(1024, LOGITS // len(weight)))
        return ChunkedLogps.apply(hidden, weight, targets, temperature, chunk)

    def forward(self, ids, positions, keep, temperature=1.0):
        """(B, T) each: ids, positions, keep (True on tokens asked for) -> logps, entropy, (N,)"""
        # without use_cache=False, packed samples attend to each other under sdpa
        hidden = self.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        return self.lm.lm_head(hidden[:, :-1][keep[:, 1:]], ids[:, 1:][keep[:, 1:]], temperature)


def collate(samples, packed, device):
    """A micro-batch of what has ids and mask -> ids, positions, keep, each (B, T).

    Packed: one row, in which positions restart with each sample, from which the variable-length
    attention reads the borders. Padded: a row per sample, on the right, where no real token attends
    to it. No samples: two tokens, because ZeRO-3 hangs unless a rank without work makes its forward
    too; their loss is multiplied by zero.
    """
    rows = [(list(s.ids), list(s.mask)) for s in samples] or [([0, 0], [0, 1])]
    positions = range(max(len(ids) for ids, _ in rows))
    if packed:
        positions = [i for ids, _ in rows for i in range(len(ids))]
        rows = [tuple(sum(column, []) for column in zip(*rows, strict=True))]
    width = len(positions)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows], device=device)
    keep = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], device=device)
    return ids, torch.tensor([positions], device=device).expand(len(rows), -1), keep.bool()


def pack(lengths, budget, packed):
    """Cut a batch into micro-batches [[index]] of at most `budget` tokens, or of a single sample.

    Padding counts, unless packed; samples go in by falling length, so it is small.
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


def deal(lengths, ranks, budget, packed):
    """A batch's micro-batches, dealt out to the ranks: [rank][micro] -> indices.

    All ranks get as many, or ZeRO-3 hangs, and about as many tokens: the longest goes first, each
    to the rank with the least so far.
    """
    micros = [(sum(lengths[i] for i in micro), micro) for micro in pack(lengths, budget, packed)]
    most, hands, held = math.ceil(len(micros) / ranks), [[] for _ in range(ranks)], [0] * ranks
    for tokens, micro in sorted(micros, key=lambda pair: -pair[0]):
        r = min((r for r in range(ranks) if len(hands[r]) < most), key=held.__getitem__)
        hands[r].append(micro)
        held[r] += tokens
    return [hand + [[]] * (most - len(hand)) for hand in hands]


def learning_rate(step, steps, args):
    """Linear warm-up over the first --warmup of the updates, then a cosine down to --min-lr."""
    warm = max(1, round(args.warmup * steps))
    if step < warm:
        return args.lr * (step + 1) / warm
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
    return args.lr * (args.min_lr + (1 - args.min_lr) * cosine)


# --------------------------------------------------------------------------------------- machines

def setup():
    """Join the other ranks, as torchrun started them -> rank, ranks, device"""
    if "RANK" not in os.environ:
        sys.exit(f"start it with torchrun --standalone --nproc_per_node 1 {sys.argv[0]} ...")
    runtime.die_with_parent()
    cuda = bool(runtime.visible_gpus())
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # there is ninja
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    deepspeed.init_distributed(  # ranks wait for the longest episode of all
        dist_backend="nccl" if cuda else "gloo", verbose=False, timeout=datetime.timedelta(hours=4))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def load(args, template, device):
    """--model -> Policy in float32 on a CPU, bfloat16 on a GPU; whether to pack rows"""
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available

    flash = args.attn == "flash_attention_2" or args.attn == "auto" and is_flash_attn_2_available()
    lm = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        attn_implementation="flash_attention_2" if flash else "sdpa")
    runtime.check_weights(lm, template)
    if not args.no_checkpointing:
        lm.gradient_checkpointing_enable()
    lm.train()
    return Policy(lm), flash


def zero3(policy, lr, device):
    """Shard parameters, gradients and AdamW's moments over all ranks -> a DeepSpeed engine, in
    which the loop accumulates gradients: any number of engine.backward, then one engine.step."""
    import deepspeed

    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    config = {
        "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False,
        # a layer is gathered as a whole: hooks at each of its parts cost time (docs/results.md)
        "zero_optimization": {"stage": 3, "overlap_comm": cuda, "leaf_module": {
            "classes": sorted(policy.lm._no_split_modules or ())}}, "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda}, "data_types": {"grad_accum_dtype": "fp32"}}
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def full_weights(engine):
    """Yield (HF name, full tensor), one by one. Every rank must walk the whole of it, in step."""
    import deepspeed

    for name, parameter in engine.module.lm.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.data


def save_model(engine, template, out, rank):
    """Write a plain HF folder, whole or not at all. Every rank takes part."""
    state = {name: tensor.to("cpu", copy=True) if rank == 0 else None
             for name, tensor in full_weights(engine)}
    if rank == 0:
        with runtime.new_model(out) as part:
            engine.module.lm.save_pretrained(part, state_dict=state)
            template.tokenizer.save_pretrained(part)
    dist.barrier()


# ------------------------------------------------------------------------------------------- main

def main():
    args = flags()
    rank, ranks, device = setup()
    runtime.lock_folder(args.out)
    # (1) pairs into ids and masks
    template = runtime.load_template(args.model)
    pairs, val = (load_pairs(path, template, args.cutoff, rank) if path else []
                  for path in (args.data, args.val))
    policy, packed = load(args, template, device)
    known = fingerprint(policy, episodes_of(pairs + val))
    engine = zero3(policy, args.lr, device)
    n, steps = len(pairs), args.steps or math.ceil(args.epochs * len(pairs) / args.batch)
    start = runtime.restore(engine, args.out, args.resume, rank)
    interrupted = runtime.watch_sigterm()
    if rank == 0:
        print(f"dpo: {n} pairs, {len(val)} held out, {steps} updates of {args.batch}, {ranks} "
              f"ranks, {'packed' if packed else 'padded'} rows", flush=True)
    machine = packed, rank, ranks, device, args
    # (2) before the first update, or as it was then
    reference = take_reference(engine, episodes_of(pairs + val), known, start, *machine)
    for step in range(start, steps):
        began = time.time()
        # (3) (4) (5)
        drawn = batch_of(step, n, args.batch, args.seed)
        rows = episodes_of([pairs[i] for i in drawn])
        lr = engine.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        numbers = learn_pairs(engine, rows, reference[:, drawn], *machine)
        runtime.check_finite(args.out, step + 1, loss=numbers["loss"], gnorm=numbers["gnorm"])
        line = {"step": step + 1, **numbers, "lr": lr, "tokens": sum(len(row.ids) for row in rows),
                "policy_tokens": sum(sum(row.mask) for row in rows), "seconds": time.time() - began}
        if val and (step + 1 == steps or (args.val_every and (step + 1) % args.val_every == 0)):
            logps = sum_logps(engine, episodes_of(val), *machine)
            _, numbers = preference(logps, reference[:, n:], episodes_of(val), args)
            line |= {f"val_{name}": number for name, number in numbers.items()}
        log(line, steps, args.out, rank)
        runtime.save_checkpoint(engine, args, step + 1, rank, last=interrupted(device))
    runtime.check_parameters(engine, args.out, steps)
    save_model(engine, template, args.out, rank)
    dist.destroy_process_group()


def log(line, steps, out, rank):
    """One line on the screen, the same dict in log.jsonl."""
    if rank == 0:
        form = ("step {step:5d}/{steps} | loss {loss:.4f} | accuracy {accuracy:.2f} | margin "
                "{margin:+.3f} | delta {delta_chosen:+.2f} {delta_rejected:+.2f} | gnorm "
                "{gnorm:6.2f} | lr {lr:.2e} | {speed:6.0f} tokens/s")
        form += " | held-out accuracy {val_accuracy:.3f}" * ("val_accuracy" in line)
        print(form.format(steps=steps, speed=line["tokens"] / line["seconds"], **line), flush=True)
        if line["delta_chosen"] < FALLING:
            print(f"warning: delta_chosen is below {FALLING}: chosen episodes become unlikely, "
                  "too; --nll, a larger --beta or a lower --lr holds them", flush=True)
        runtime.append_jsonl(Path(out) / "log.jsonl", line)


if __name__ == "__main__":
    runtime.run(sys.argv[0], main)
