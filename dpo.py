"""
DPO: of two plays of a question, make the better one more likely and the worse one less likely.

The policy is its own reward model [1]: it gives an episode the reward beta * delta, where delta =
log pi - log pi_ref is the change of its log-probability since training began. DPO fits this reward
to pairs by P(chosen is better) = sigmoid(reward of chosen - reward of rejected). It needs no
separate reward model, no value function and no playing, only a loss on pairs of texts:

    (1) render both episodes of each pair as sft.py does: token ids, and a mask that is 1 on the
        policy's replies and 0 on the prompt and the tools' results. Replies in a row's "prompt",
        which both sides share, are not trained on
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

Reads   a HF folder or hub name, a jsonl of pairs {prompt, chosen, rejected, rewards?}
Writes  OUT/ (a HF folder), OUT/log.jsonl, OUT/reference.jsonl, OUT/checkpoints/

    python -m toolstar pairs --episodes out/rl/rollouts --out out/pairs
    torchrun --standalone --nproc_per_node 8 dpo.py --model out/rl --data out/pairs/train.jsonl

Nothing below knows about tools or travel: to learn other preferences, supply other pairs.
"""
import math
import time
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import runtime
from runtime import AMOUNT, COUNT, NATURAL, POSITIVE, SEED, SHARE, Help, Mistake, Parser

# Shapes: P pairs, N policy tokens of a micro-batch. (2, P): of the chosen episodes, then of the
# rejected ones.


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
    add("--cutoff", type=COUNT, default=8192, help="most tokens of an episode; a pair with a "
        "longer one is dropped [2]")
    add("--val-every", type=NATURAL, default=0, help="updates between two measurements on --val; "
        "0: only at the end")
    runtime.trainer_flags(p, 16384)
    p.idle = [("val_every", "without", "val")]
    return p.parse_args()


if __name__ == "__main__":  # what is wrong ends here, before torch is imported; so does --help
    args = runtime.run(__file__, flags)
    runtime.run(__file__, runtime.need_files, args.data, args.val)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import zero3  # noqa: E402

# ------------------------------------------------------------------------------------------- data

class Pair(NamedTuple):
    """Two plays of a question as tokens."""
    chosen: runtime.Rendered
    rejected: runtime.Rendered


def read_pair(row, template, cutoff):
    """A row of --data -> its Pair, or the reason why it cannot be used, as text

    Both sides continue "prompt", and replies in the prompt, which they share, are not trained on.
    Without a prompt, or if it is a text, each side is a complete conversation.
    """
    past = row["prompt"] if isinstance(row.get("prompt"), list) else []
    for side in Pair._fields:
        if not isinstance(row.get(side), list):
            return f"'{side}' is no list of messages"
    try:
        sides = [runtime.read_talk([*past, *row[side]], template, row) for side in Pair._fields]
    except Mistake as mistake:
        return str(mistake)
    if not past and row.get("prompt") and row["prompt"] not in [m["content"] for m in sides[0]]:
        return "'prompt' is no list of messages, nor a text that the sides repeat"
    past = sides[0][:len(past)]
    one, other = [list(takewhile(lambda m: m["role"] != "assistant", side)) for side in sides]
    if one != other or not one:
        return "the prompts of the two sides differ, or are empty"
    if sides[0] == sides[1] or not all(row[side] for side in Pair._fields):
        return "both sides have the same replies, or one has none"
    better, worse = row.get("rewards", (1, 0))
    if better < worse:
        return "the rejected side has the higher reward"
    pair = Pair(*(runtime.render(side, template) for side in sides))
    stops = row.get("stops") or ["answer", "answer"]
    for side, episode, stop in zip(sides, pair, stops, strict=True):
        size = past_tokens(past, side[len(past)], template)
        episode.mask[:size] = [0] * size
        if stop != "answer" and episode.mask[-1]:  # maybe cut off: the policy sampled no end token
            episode.ids.pop()
            episode.mask.pop()
    if not all(any(episode.mask) for episode in pair):
        return "a side has no token to train on"
    too_long = max(len(episode.ids) for episode in pair) > cutoff
    return f"a side is longer than --cutoff {cutoff}" if too_long else pair


def past_tokens(past, following, template):
    """The number of tokens in the messages that both sides share, 0 if none of them is a reply.
    following: the message after them."""
    if all(message["role"] != "assistant" for message in past):
        return 0
    if past[-1]["role"] != "assistant":
        return len(runtime.render(past, template).ids)
    # whether the last reply has an end token depends on what follows
    return len(runtime.render([*past, following], template).ids) - len(template.between(following))


def load_pairs(path, template, cutoff):
    """The usable pairs of a file; prints how many others are dropped and why."""
    read = []
    for line, row in enumerate(runtime.read_jsonl(path), 1):
        with runtime.at_row(path, line):
            read.append(read_pair(row, template, cutoff))
    for cause in {cause for cause in read if isinstance(cause, str)}:
        runtime.say(f"{path}: {read.count(cause)} dropped, the first in line "
                    f"{read.index(cause) + 1}: {cause}")
    pairs = [pair for pair in read if isinstance(pair, Pair)]
    if not pairs:
        raise Mistake(f"{path}: no pair to train on")
    return pairs


def episodes_of(pairs):
    """[Pair] -> all episodes: first the chosen ones, then the rejected ones"""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


# ------------------------------------------------------------------------------------------- loss

@torch.no_grad()
def sum_logps(trainer, rows, packed, rank, ranks, device, args):
    """(3) log pi of each episode, summed over its policy tokens -> (2, P) float64, on every rank"""
    sums = torch.zeros(len(rows), dtype=torch.float64, device=device)
    lengths = [len(row.ids) for row in rows]
    for micro in zero3.micro_batches(lengths, ranks, args.pack_tokens, packed)[rank]:
        batch = [rows[i] for i in micro]
        logps, _ = trainer(*zero3.collate(batch, packed, device))
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
    for micro in zero3.micro_batches(lengths, ranks, args.pack_tokens, packed)[rank]:
        batch = [rows[i] for i in micro]
        logps, _ = trainer(*zero3.collate(batch, packed, device))  # (N,)
        loss = logps.sum() * 0
        if batch:
            counts = torch.tensor([sum(row.mask) for row in batch], device=device)
            weight = weights.flatten()[micro].float().repeat_interleave(counts)  # (N,)
            loss = (logps * weight).sum()
        trainer.backward(loss * ranks)  # DeepSpeed averages over ranks, the loss is a sum
    trainer.step()
    return numbers | {"gnorm": float(trainer.get_global_grad_norm())}


def take_reference(trainer, rows, start, packed, rank, ranks, device, args):
    """(2) log pi_ref of all episodes, (2, P). A run that resumes after `start` updates no longer
    has the weights to compute it: it reads what it has saved in OUT/reference.jsonl."""
    file = Path(args.out) / "reference.jsonl"
    if start:
        sums = torch.tensor(runtime.read_jsonl(file), dtype=torch.float64, device=device)
        if sums.numel() != len(rows):
            raise Mistake(f"{file} is of {sums.numel() // 2} pairs, and there are {len(rows) // 2} "
                          "now: use the --data and --val of before, or another --out")
        return sums
    sums = sum_logps(trainer, rows, packed, rank, ranks, device, args)
    if rank == 0:
        runtime.write_jsonl(file, sums.tolist())
    return sums


def learning_rate(step, steps, args):
    """Linear warm-up over the first --warmup of all updates, then a cosine down to --min-lr."""
    warm = max(1, round(args.warmup * steps))
    if step < warm:
        return args.lr * (step + 1) / warm
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
    return args.lr * (args.min_lr + (1 - args.min_lr) * cosine)


# ------------------------------------------------------------------------------------------- main

def main():
    args = flags()
    rank, ranks, device = zero3.setup()
    runtime.lock_folder(args.out)
    # (1) render the pairs
    template = runtime.load_template(args.model)
    pairs, val = (load_pairs(path, template, args.cutoff) if path else []
                  for path in (args.data, args.val))
    policy, packed = zero3.load(args, template, device)
    trainer = zero3.shard(policy, args, device)
    n, steps = len(pairs), args.steps or math.ceil(args.epochs * len(pairs) / args.batch)
    start = zero3.restore(trainer, args)
    interrupted = zero3.watch_sigterm()
    runtime.say(f"dpo: {n} pairs, {len(val)} held out, {steps} updates of {args.batch}, {ranks} "
                f"ranks, {'packed' if packed else 'padded'} rows")
    common = packed, rank, ranks, device, args
    # (2) computed before the first update, or read if the run resumes
    reference = take_reference(trainer, episodes_of(pairs + val), start, *common)
    for step in range(start, steps):
        began = time.time()
        # (3) (4) (5)
        drawn = zero3.batch_of(step, n, args.batch, args.seed)
        rows = episodes_of([pairs[i] for i in drawn])
        lr = trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        numbers = learn_pairs(trainer, rows, reference[:, drawn], *common)
        zero3.check_finite(args.out, step + 1, loss=numbers["loss"], gnorm=numbers["gnorm"])
        line = {"step": step + 1, **numbers, "lr": lr, "tokens": sum(len(row.ids) for row in rows),
                "policy_tokens": sum(sum(row.mask) for row in rows), "seconds": time.time() - began}
        if val and (step + 1 == steps or (args.val_every and (step + 1) % args.val_every == 0)):
            logps = sum_logps(trainer, episodes_of(val), *common)
            _, numbers = preference(logps, reference[:, n:], episodes_of(val), args)
            line |= {f"val_{name}": number for name, number in numbers.items()}
        if rank == 0:
            log(line, steps, args)
        zero3.save_checkpoint(trainer, args, step + 1, last=interrupted(device))
    zero3.save_model(trainer, template, args.out)
    runtime.say(f"{args.out}: done. Next: python evaluate.py --model {args.out} --tasks TASKS")
    dist.destroy_process_group()


def log(line, steps, args):
    """Print one line and append all numbers to log.jsonl."""
    form = ("step {step:5d}/{steps} | loss {loss:.4f} | accuracy {accuracy:.2f} | margin "
            "{margin:+.3f} | delta {delta_chosen:+.2f} {delta_rejected:+.2f} | gnorm "
            "{gnorm:6.2f} | lr {lr:.2e} | {speed:6.0f} tokens/s")
    form += " | held-out accuracy {val_accuracy:.3f}" * ("val_accuracy" in line)
    print(form.format(steps=steps, speed=line["tokens"] / line["seconds"], **line), flush=True)
    runtime.write_log(line, args)


if __name__ == "__main__":
    runtime.run_ranks(main)
