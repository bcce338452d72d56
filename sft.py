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
[1] STAR, arXiv:2603.21972, app. C.2   [2] SFTScripts in the code released with [1]

Reads   a HF folder or hub name, a jsonl of episodes (anything with "messages")
Writes  OUT/ (a HF folder: safetensors, config, tokenizer), OUT/log.jsonl, OUT/checkpoints/

    torchrun --standalone --nproc_per_node 8 sft.py --model Qwen/Qwen2.5-7B-Instruct --out out/sft

Nothing below knows about travel: to imitate something else, supply other "messages".
"""
import heapq
import math
import random
import time
from itertools import zip_longest
from typing import NamedTuple

import runtime
from runtime import AMOUNT, COUNT, NATURAL, POSITIVE, SEED, SHARE, Help, Mistake, Parser

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden
# size, V vocabulary.


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
    add("--cutoff", type=COUNT, default=20480, help="most tokens of an episode; longer ones are "
        "dropped [2]")
    add("--seed", type=SEED, default=0, help="seed of the order of the episodes")
    runtime.trainer_flags(p, 20480)
    return p.parse_args()


if __name__ == "__main__":
    runtime.run(__file__, flags)  # --help and a wrong flag end here, before torch is imported
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

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
            tokens = template.encode(message["content"]) + [template.end] * (not continues)
        else:
            tokens = template.between(message)
        rendered.ids.extend(tokens)
        in_loss = is_reply and not message.get("untrained")
        rendered.mask.extend([int(in_loss)] * len(tokens))
    return rendered


def load_samples(path, template, cutoff):
    """Read and render the episodes of a file -> samples, and the number of dropped episodes: those
    that were judged and failed, of more than `cutoff` tokens, or without a reply."""
    samples, rows = [], runtime.read_jsonl(path)
    for line, episode in enumerate(rows, 1):
        if (episode.get("score") or {}).get("success") == 0:
            continue
        try:
            messages = runtime.read_talk(episode.get("messages"), template, episode.get("tools"))
            sample = render(messages, template)
        except ValueError as error:
            raise Mistake(f"{path}:{line}: {error}") from None
        if episode.get("stop") in ("format", "context", "length") and sample.mask[-1]:
            sample.ids.pop()  # the last reply was cut off: its end token was never sampled
            sample.mask.pop()
        if len(sample.ids) <= cutoff and any(sample.mask):
            samples.append(sample)
    if not samples:
        raise Mistake(f"{path}: no episode to train on (of at most --cutoff {cutoff} tokens)")
    return samples, len(rows) - len(samples)


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

class Policy(torch.nn.Module):
    """A causal language model that returns log-probabilities of chosen tokens instead of logits."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        # replace the head's forward: ZeRO-3 then gathers its weight once per pass, not per chunk
        lm.get_output_embeddings().forward = self.head

    def head(self, hidden, targets, temperature):
        """(N, H), (N,) -> log pi and entropy of the targets, (N,) each, without (N, V) logits."""
        weight = self.lm.get_output_embeddings().weight  # (V, H)
        return runtime.chunked_logps()(hidden, weight, targets, temperature)

    def forward(self, ids, positions, keep, temperature=1.0):
        """ids, positions, keep, (B, T) each -> logps, entropy of the tokens to keep, (N,) each"""
        # use_cache=False is needed: otherwise packed samples attend to each other under sdpa
        hidden = self.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
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
    positions = range(max(len(ids) for ids, _ in rows))
    if packed:
        positions = [i for ids, _ in rows for i in range(len(ids))]
        rows = [tuple(sum(column, []) for column in zip(*rows, strict=True))]
    width = len(positions)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows], device=device)
    keep = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], device=device)
    return ids, torch.tensor([positions], device=device).expand(len(rows), -1), keep.bool()


def micro_batches(lengths, ranks, budget, packed):
    """Split a batch into micro-batches of at most `budget` tokens, padding included, and deal them
    to the ranks: [rank][micro-batch] -> indices. A longer sample is a micro-batch of its own.

    Every rank gets the same number of micro-batches, else ZeRO-3 hangs. At each one all ranks wait
    for the slowest, so they shall be equal. Packed: the longest sample first, each goes into the
    smallest micro-batch. Padded: samples of neighbouring lengths, which need little padding.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)

    def size(micro):
        chosen = [lengths[i] for i in micro] or [0]
        return sum(chosen) if packed else max(chosen) * len(micro)

    def neighbours(most):
        micros = []
        for i in order:
            if micros and lengths[micros[-1][0]] * (len(micros[-1]) + 1) <= most:
                micros[-1].append(i)
            else:
                micros.append([i])
        return micros

    count = ranks * max(1, math.ceil(min(sum(lengths) / budget, len(lengths)) / ranks))
    while True:
        if packed:
            micros, heap = [[] for _ in range(count)], [(0, k) for k in range(count)]
            for i in order:
                used, k = heap[0]
                micros[k].append(i)
                heapq.heapreplace(heap, (used + lengths[i], k))
        else:
            most = sum(lengths) / count
            while len(micros := neighbours(most)) > count:
                most *= 1.005
            # a 7B model spends as much time on attention as on all else in a row of 40K tokens
            micros.sort(key=lambda m: size(m) * (1 + lengths[m[0]] / 40_000), reverse=True)
            micros += [[]] * (count - len(micros))
        if all(len(micro) < 2 or size(micro) <= budget for micro in micros):
            return [micros[rank::ranks] for rank in range(ranks)]
        count += ranks


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
    rank, ranks, device = runtime.setup()
    runtime.lock_folder(args.out)
    # (1) render the episodes
    template = runtime.load_template(args.model)
    samples, dropped = load_samples(args.data, template, args.cutoff)
    policy, packed = runtime.load(args, template, device, Policy, collate)
    trainer = runtime.zero3(policy, args, device)
    steps = args.steps or math.ceil(args.epochs * len(samples) / args.batch)
    start = runtime.restore(trainer, args)
    interrupted = runtime.watch_sigterm()
    runtime.say(f"sft: {len(samples)} episodes ({dropped} dropped), {steps} updates of "
                f"{args.batch}, {ranks} ranks, {'packed' if packed else 'padded'} rows")
    for step in range(start, steps):
        began = time.time()
        # (2) the batch of this update, and the micro-batches of this rank
        batch = [samples[i] for i in batch_of(step, len(samples), args.batch, args.seed)]
        micros = micro_batches([len(s.ids) for s in batch], ranks, args.pack_tokens, packed)[rank]
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
        if rank == 0:
            log({"step": step + 1, "loss": loss, "entropy": total[1].item(), "gnorm": gnorm,
                 "lr": lr, "policy_tokens": n_tokens, "tokens": sum(len(s.ids) for s in batch),
                 "seconds": time.time() - began}, steps, args)
        runtime.save_checkpoint(trainer, args, step + 1, last=interrupted(device))
    runtime.save_model(trainer, template, args.out)
    runtime.say(f"{args.out}: done. Next: python grpo.py --model {args.out} --tasks TASKS")
    dist.destroy_process_group()


def log(line, steps, args):
    """Print one line and append all numbers to log.jsonl."""
    print("step {step:5d}/{steps} | loss {loss:.4f} | entropy {entropy:.3f} | gnorm {gnorm:6.2f} | "
          "lr {lr:.2e} | {speed:6.0f} tokens/s".format(
              steps=steps, speed=line["tokens"] / line["seconds"], **line), flush=True)
    runtime.write_log(line, args)


if __name__ == "__main__":
    runtime.run_ranks(main)
