"""
DPO: of two plays of a question, make the better one more likely and the worse one less likely.

The policy is its own reward model [1]: it gives an episode the reward beta * delta, where delta =
log pi - log pi_ref is the change of its log-probability since training began. DPO fits this reward
to pairs by P(chosen is better) = sigmoid(reward of chosen - reward of rejected). It needs no
separate reward model, no value function and no playing, only a loss on pairs of texts:

    (1) render both episodes of each pair as sft.py does: token ids, and a mask that is 1 on the
        policy's replies and 0 on the prompt and the tools' results. Replies that both episodes
        share, before they first differ, belong to the prompt
    (2) reference: compute log pi_ref of each episode, summed over its policy tokens, with the
        weights that training starts from. Only these sums are kept, so no second model is needed
    (3) draw a batch of pairs. A forward without gradients gives log pi of its episodes, and from
        that margin = beta (delta of chosen - delta of rejected)
    (4) loss = - mean over pairs of log sigmoid(margin). Its gradient is the mean of beta
        sigmoid(-margin) grad (log pi of rejected - log pi of chosen). Given the margins, this is a
        weighted sum over episodes, so both sides of a pair need not share a micro-batch or a rank
    (5) a second forward, and a backward with these weights; AdamW with linear warm-up and cosine
        decay; go to (3)

The gradient of a pair vanishes as its margin grows, later if beta is smaller. Only the difference
counts, so both episodes can become less likely if the rejected one does so faster. Then
delta_chosen in the log falls; --nll [3] counteracts it.

Departs from [2], which trains LoRA weights at a learning rate of 5e-6: here all weights are
trained, at a tenth of that rate.
[1] DPO, arXiv:2305.18290   [2] Tool-Star, arXiv:2505.16410   [3] arXiv:2404.19733, eq. 1
[4] length-normalised DPO, arXiv:2411.15124

Reads   a HF folder or hub name, a jsonl of pairs {prompt, chosen, rejected, rewards}
Writes  OUT/ (a HF folder), OUT/log.jsonl, OUT/reference.jsonl, OUT/checkpoints/

    python -m toolstar.pairs --episodes out/rl/rollouts --out out/pairs
    torchrun --standalone --nproc_per_node 8 dpo.py --model out/rl --data out/pairs/train.jsonl

Nothing below knows about tools or travel: to learn other preferences, supply other pairs.
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
from bisect import bisect_left
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

try:
    import runtime  # noqa: I001, first: it reports Ctrl-C while torch loads
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from runtime import AMOUNT, COUNT, NATURAL, POSITIVE, SEED, SHARE, Help, Parser
except ModuleNotFoundError as error:
    sys.exit(f"{error}. {Path(__file__).name} needs runtime.py beside it, and the packages "
             "of requirements.txt: type `. .venv/bin/activate`")

# Shapes: P pairs, B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H
# hidden size, V vocabulary. (2, P): of the chosen episodes, then of the rejected ones.
LOGITS = 30_000_000  # the loss computes at most this many logits at a time (120 MB in float32)
FALLING = -10  # warn if the mean delta of chosen episodes is lower: e^10 times less likely


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("files").add_argument
    add("--model", default="out/rl", help="HF folder or hub name to start from")
    add("--data", default="out/pairs/train.jsonl", help="pairs to learn from, one per line")
    add("--val", help="held-out pairs to measure on, at the end and every --val-every")
    add("--out", default="out/dpo", help="folder of the trained model, its log and checkpoints")
    add = p.add_argument_group("learn").add_argument
    add("--beta", type=POSITIVE, default=0.1, help="scale of the reward; a smaller one lets the "
        "policy move farther from where it started [1]")
    add("--nll", type=AMOUNT, default=0.0, help="weight of an additional loss: the mean of - log "
        "pi over the tokens of the chosen episode [3]")
    add("--length-norm", action="store_true", help="divide delta by the number of policy tokens; "
        "use a --beta of about 5 with it [4]")
    add("--epochs", type=POSITIVE, default=1, help="passes over the pairs")
    add("--steps", type=NATURAL, default=0, help="number of updates; 0: set by --epochs")
    add("--batch", type=COUNT, default=32, help="pairs per update, all ranks together")
    add("--lr", type=AMOUNT, default=5e-7, help="peak learning rate")
    add("--warmup", type=SHARE, default=0.1, help="fraction of the updates, at the start, in which "
        "the learning rate rises linearly [2]")
    add("--min-lr", type=SHARE, default=0.0, help="the cosine ends at this fraction of --lr")
    add("--seed", type=SEED, default=0, help="seed of the order of the pairs")
    add = p.add_argument_group("memory (python -m look.memory dpo estimates it)").add_argument
    add("--cutoff", type=COUNT, default=8192, help="most tokens of an episode; a pair with a "
        "longer one is dropped [2]")
    add("--pack-tokens", type=COUNT, default=16384, help="most tokens of a micro-batch, padding "
        "included; a longer episode is a micro-batch of its own")
    add("--no-checkpointing", type=SHARE, nargs="?", const=1.0, default=0.0, metavar="SHARE",
        help="keep the activations of this share of the layers (of all without SHARE) instead of "
        "recomputing them: faster, but needs more memory")
    add("--offload", action="store_true", help="run AdamW on the CPU and keep its states in the "
        "host's memory: the same updates, slower")
    add("--lora", type=COUNT, default=0, metavar="R", help="train adapters of rank R at all linear "
        "layers instead of all weights; use about 10 times the --lr (runtime.py, add_adapters)")
    add = p.add_argument_group("running").add_argument
    add("--val-every", type=NATURAL, default=0, help="updates between two measurements on --val; "
        "0: only at the end")
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


class Pair(NamedTuple):
    """Two plays of a question as tokens."""
    chosen: Rendered
    rejected: Rendered


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


def read_pair(row, template, cutoff):
    """A row of --data -> its Pair, or the reason why it cannot be used, as text

    Both sides continue "prompt", and replies in the prompt, which they share, are not trained on.
    Without a prompt each side is a complete conversation.
    """
    try:
        past = row.get("prompt", [])
        sides = [past + row[side] for side in Pair._fields]
        better, worse = map(float, row["rewards"])
    except KeyError as error:
        return f"no {error}"
    except (AttributeError, TypeError, ValueError):
        return "chosen and rejected must be lists of messages, rewards two numbers"
    if not all(map(runtime.is_talk, sides)):
        return "a message has no role or content, or messages and replies do not alternate"
    prompts = [list(takewhile(lambda m: m["role"] != "assistant", side)) for side in sides]
    replies = [[m["content"] for m in side[len(past):] if m["role"] == "assistant"]
               for side in sides]
    if not all("".join(texts).strip() for texts in replies):
        return "a side has no reply"
    if replies[0] == replies[1]:
        return "both sides have the same replies"
    one, other = prompts
    if one != other or not one:
        return "the prompts of the two sides differ, or are empty"
    if not better >= worse:
        return "the rejected side has the higher reward"
    pair = Pair(*(render(side, template) for side in sides))
    for side, episode in zip(sides, pair, strict=True):
        size = past_tokens(past, side[len(past)], template)
        episode.mask[:size] = [0] * size
    stops = row["stops"] if isinstance(row.get("stops"), list) else []
    for episode, stop in zip(pair, stops, strict=False):
        if stop != "answer" and episode.mask[-1]:  # maybe cut off: the policy sampled no end token
            episode.ids.pop()
            episode.mask.pop()
    too_long = max(len(episode.ids) for episode in pair) > cutoff
    return f"a side is longer than --cutoff {cutoff}" if too_long else pair


def past_tokens(past, following, template):
    """The number of tokens in the messages that both sides share, 0 if none of them is a reply.
    following: the message after them."""
    if all(message["role"] != "assistant" for message in past):
        return 0
    if past[-1]["role"] != "assistant":
        return len(render(past, template).ids)
    # whether the last reply has an end token depends on what follows
    return len(render([*past, following], template).ids) - len(template.between(following))


def load_pairs(path, template, cutoff, rank):
    """The usable pairs of a file; prints how many others are dropped and why. ValueError if no pair
    is usable."""
    read, causes = [read_pair(row, template, cutoff) for row in runtime.read_jsonl(path)], {}
    for line, cause in enumerate(read, 1):
        if isinstance(cause, str):
            causes.setdefault(cause, []).append(line)
    dropped = [f"{len(lines)} dropped, the first in line {lines[0]}: {cause}"
               for cause, lines in causes.items()]
    if all(isinstance(pair, str) for pair in read):
        raise ValueError(f"{path}: no pair to train on; {'; '.join(dropped) or 'it is empty'}")
    if dropped and rank == 0:
        print("\n".join(f"{path}: {text}" for text in dropped))
    return [pair for pair in read if isinstance(pair, Pair)]


def episodes_of(pairs):
    """[Pair] -> all episodes: first the chosen ones, then the rejected ones"""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


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

@torch.no_grad()
def sum_logps(trainer, rows, packed, rank, ranks, device, args):
    """(3) log pi of each episode, summed over its policy tokens -> (2, P) float64, on every rank"""
    sums = torch.zeros(len(rows), dtype=torch.float64, device=device)
    lengths = [len(row.ids) for row in rows]
    for micro in deal(lengths, ranks, args.pack_tokens, packed, device)[rank]:
        batch = [rows[i] for i in micro]
        logps, _ = trainer(*collate(batch, packed, device))
        if batch:  # a rank without work still runs a forward, or ZeRO-3 hangs
            parts = logps.double().split([sum(row.mask) for row in batch])
            sums[micro] = torch.stack([part.sum() for part in parts])
    dist.all_reduce(sums)  # exact: one rank adds the value of an episode, all others add 0
    return sums.view(2, -1)


def preference(logps, reference, rows, args):
    """(3) (4) The loss of P pairs -> its derivatives with respect to log pi, (2, P), and {name:
    number} for the log

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


def learn_pairs(trainer, rows, reference, packed, rank, ranks, device, args):
    """(3) (4) (5) One update -> {name: number} for the log"""
    logps = sum_logps(trainer, rows, packed, rank, ranks, device, args)
    weights, numbers = preference(logps, reference, rows, args)
    lengths = [len(row.ids) for row in rows]
    for micro in deal(lengths, ranks, args.pack_tokens, packed, device)[rank]:
        batch = [rows[i] for i in micro]
        logps, _ = trainer(*collate(batch, packed, device))  # (N,)
        loss = logps.sum() * 0
        if batch:
            counts = torch.tensor([sum(row.mask) for row in batch], device=device)
            weight = weights.flatten()[micro].float().repeat_interleave(counts)  # (N,)
            loss = (logps * weight).sum()
        trainer.backward(loss * ranks)  # DeepSpeed averages over ranks, the loss is a sum
    trainer.step()
    return numbers | {"gnorm": float(trainer.get_global_grad_norm())}


def fingerprint(policy, rows):
    """A hash of what the reference depends on: every weight, every token and its mask."""
    digest = hashlib.sha256()
    for p in policy.parameters():
        digest.update(p.detach().cpu().flatten().view(torch.uint8).numpy())
    for row in rows:
        digest.update(array("i", [len(row.ids), *row.ids, *row.mask]).tobytes())
    return digest.hexdigest()


def take_reference(trainer, rows, known, start, packed, rank, ranks, device, args):
    """(2) log pi_ref of all episodes, (2, P): read from OUT/reference.jsonl, or computed and saved.

    known: fingerprint() of --model and the episodes. A run that resumes after `start` updates no
    longer has the weights to compute it.
    """
    file = Path(args.out) / "reference.jsonl"
    head, *kept = runtime.read_jsonl(file) if file.exists() else [None]
    if head == {"of": known}:
        sums = [[pair[side] for pair in kept] for side in Pair._fields]
        return torch.tensor(sums, dtype=torch.float64, device=device)
    if start:
        raise ValueError(f"{file} was computed for another --model, --data or --val: resume "
                         f"{args.out} with the same ones, or choose another --out")
    sums = sum_logps(trainer, rows, packed, rank, ranks, device, args)
    if rank == 0:  # sum_logps was a barrier: every rank has already looked for the file
        runtime.write_jsonl(file, [{"of": known}] + [
            dict(zip(Pair._fields, pair, strict=True)) for pair in sums.T.tolist()])
    return sums


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
    # (1) render the pairs
    template = runtime.load_template(args.model)
    pairs, val = (load_pairs(path, template, args.cutoff, rank) if path else []
                  for path in (args.data, args.val))
    policy, packed = load(args, template, device)
    known = fingerprint(policy, episodes_of(pairs + val))
    runtime.keep_settings(args)  # only once all inputs were read without an error
    trainer = zero3(policy, args.lr, device, args.offload)
    n, steps = len(pairs), args.steps or math.ceil(args.epochs * len(pairs) / args.batch)
    start = runtime.restore(trainer, args.out, args.resume, rank)
    interrupted = runtime.watch_sigterm()
    if rank == 0:
        print(f"dpo: {n} pairs, {len(val)} held out, {steps} updates of {args.batch}, {ranks} "
              f"ranks, {'packed' if packed else 'padded'} rows", flush=True)
    machine = packed, rank, ranks, device, args
    # (2) computed before the first update, or read if the run resumes
    reference = take_reference(trainer, episodes_of(pairs + val), known, start, *machine)
    for step in range(start, steps):
        began = time.time()
        # (3) (4) (5)
        drawn = batch_of(step, n, args.batch, args.seed)
        rows = episodes_of([pairs[i] for i in drawn])
        lr = trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        numbers = learn_pairs(trainer, rows, reference[:, drawn], *machine)
        runtime.check_finite(args.out, step + 1, loss=numbers["loss"], gnorm=numbers["gnorm"])
        line = {"step": step + 1, **numbers, "lr": lr, "tokens": sum(len(row.ids) for row in rows),
                "policy_tokens": sum(sum(row.mask) for row in rows), "seconds": time.time() - began}
        if val and (step + 1 == steps or (args.val_every and (step + 1) % args.val_every == 0)):
            logps = sum_logps(trainer, episodes_of(val), *machine)
            _, numbers = preference(logps, reference[:, n:], episodes_of(val), args)
            line |= {f"val_{name}": number for name, number in numbers.items()}
        log(line, steps, args, rank)
        runtime.save_checkpoint(trainer, args, step + 1, rank, last=interrupted(device))
    runtime.check_parameters(trainer, args.out, steps)
    save_model(trainer, template, args.out, rank)
    runtime.report_end(args, "accuracy", f"python evaluate.py --model {args.out} --tasks TASKS",
                       rank)
    dist.destroy_process_group()


def log(line, steps, args, rank):
    """Print one line and append all numbers to log.jsonl."""
    if rank == 0:
        form = ("step {step:5d}/{steps} | loss {loss:.4f} | accuracy {accuracy:.2f} | margin "
                "{margin:+.3f} | delta {delta_chosen:+.2f} {delta_rejected:+.2f} | gnorm "
                "{gnorm:6.2f} | lr {lr:.2e} | {speed:6.0f} tokens/s")
        form += " | held-out accuracy {val_accuracy:.3f}" * ("val_accuracy" in line)
        print(form.format(steps=steps, speed=line["tokens"] / line["seconds"], **line), flush=True)
        if line["delta_chosen"] < FALLING:
            print(f"warning: delta_chosen is below {FALLING}: the chosen episodes become unlikely "
                  "as well; use --nll, a larger --beta or a lower --lr", flush=True)
        runtime.write_log(line, args)


if __name__ == "__main__":
    runtime.run_ranks(main, flags)
