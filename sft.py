"""
Supervised fine-tuning: teach a model to play by imitating the replies of successful episodes.

    (1) render each episode with the chat template into token ids and a mask: 1 on the policy's
        replies and their end tokens, 0 on the prompt, the observations and the template
    (2) draw a batch of episodes and split it into micro-batches, the same number on every rank
    (3) loss = - sum over policy tokens of log pi / policy tokens of the whole batch, all ranks;
        on --val as well, without learning from it
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
import math
import time

import runtime
from runtime import AMOUNT, COUNT, NATURAL, POSITIVE, SEED, SHARE, Help, Mistake, Parser


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("files").add_argument
    add("--model", default="Qwen/Qwen2.5-7B-Instruct", help="HF folder or hub name to start from")
    add("--data", default="data/sft.jsonl", help="episodes to imitate, one per line")
    add("--val", help="held-out episodes; their loss is measured every --val-every and at the end")
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
    add("--val-every", type=COUNT, default=20, help="updates between two measurements on --val")
    add("--seed", type=SEED, default=0, help="seed of the order of the episodes")
    runtime.trainer_flags(p, 20480)
    p.idle = [("val_every", "without", "val")]
    return p.parse_args()


if __name__ == "__main__":  # what is wrong ends here, before torch is imported; so does --help
    args = runtime.run(__file__, flags)
    runtime.run(__file__, runtime.need_files, args.data, args.val)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zero3  # noqa: E402

# ------------------------------------------------------------------------------------------- data

def load_samples(path, template, cutoff):
    """Read and render the episodes of a file -> samples, and {cause: number} of dropped episodes:
    those that were judged and failed, of more than `cutoff` tokens, or without a reply to train on.
    """
    samples, dropped = [], {"failed": 0, "too long": 0, "without reply": 0}
    for line, episode in enumerate(runtime.read_jsonl(path), 1):
        with runtime.at_row(path, line):
            if (episode.get("score") or {}).get("success") == 0:
                dropped["failed"] += 1
                continue
            messages = runtime.read_talk(episode.get("messages"), template, episode)
            sample = runtime.render(messages, template)
        if episode.get("stop") in ("format", "context", "length") and sample.mask[-1]:
            sample.ids.pop()  # the last reply was cut off: its end token was never sampled
            sample.mask.pop()
        if len(sample.ids) > cutoff:
            dropped["too long"] += 1
        elif not any(sample.mask):
            dropped["without reply"] += 1
        else:
            samples.append(sample)
    if not samples:
        raise Mistake(f"{path}: no episode to train on; dropped: {dropped} (--cutoff {cutoff})")
    return samples, dropped


# ------------------------------------------------------------------------------------------- loss

def loss_of(batch, trainer, packed, rank, ranks, device, args):
    """(2) (3) -> loss and entropy, means over the policy tokens of a batch on all ranks, and the
    number of these tokens. Adds the batch to the gradient, unless that is off. Every rank takes
    part."""
    micros = zero3.micro_batches([len(s.ids) for s in batch], ranks, args.pack_tokens, packed)[rank]
    n_tokens = sum(sum(s.mask) for s in batch)
    total = torch.zeros(2, device=device)
    for micro in micros:
        logps, entropy = trainer(*zero3.collate([batch[i] for i in micro], packed, device))
        # bool(micro): a rank without work still runs a forward, or ZeRO-3 hangs
        loss = -logps.sum() * bool(micro) / n_tokens
        if torch.is_grad_enabled():  # DeepSpeed averages over ranks, the loss is a sum over them
            trainer.backward(loss * ranks)
        total += torch.stack([loss, entropy.sum() * bool(micro) / n_tokens]).detach()
    dist.all_reduce(total)
    return *total.tolist(), n_tokens


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
    # (1) render the episodes
    template = runtime.load_template(args.model)
    samples, dropped = load_samples(args.data, template, args.cutoff)
    val, val_dropped = load_samples(args.val, template, args.cutoff) if args.val else ([], {})
    policy, packed = zero3.load(args, template, device)
    trainer = zero3.shard(policy, args, device)
    steps = args.steps or math.ceil(args.epochs * len(samples) / args.batch)
    start = zero3.restore(trainer, args)
    interrupted = zero3.watch_sigterm()
    runtime.say(f"sft: {len(samples)} episodes; dropped: {dropped}")
    if val:
        runtime.say(f"held out: {len(val)} episodes; dropped: {val_dropped}")
    runtime.say(f"{steps} updates of {args.batch}, {ranks} ranks, "
                f"{'packed' if packed else 'padded'} rows")
    for step in range(start, steps):
        began = time.time()
        # (2) (3) the batch of this update
        batch = [samples[i] for i in zero3.batch_of(step, len(samples), args.batch, args.seed)]
        loss, entropy, n_tokens = loss_of(batch, trainer, packed, rank, ranks, device, args)
        # (4)
        lr = trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        trainer.step()
        gnorm = float(trainer.get_global_grad_norm())
        zero3.check_finite(args.out, step + 1, loss=loss, gnorm=gnorm)
        line = {"step": step + 1, "loss": loss, "entropy": entropy, "gnorm": gnorm, "lr": lr,
                "policy_tokens": n_tokens, "tokens": sum(len(s.ids) for s in batch),
                "seconds": time.time() - began}
        if val and ((step + 1) % args.val_every == 0 or step + 1 == steps):
            with torch.no_grad():
                line["val_loss"] = loss_of(val, trainer, packed, rank, ranks, device, args)[0]
        if rank == 0:
            log(line, steps, args)
        zero3.save_checkpoint(trainer, args, step + 1, last=interrupted(device))
    zero3.save_model(trainer, template, args.out)
    runtime.say(f"{args.out}: done. Next: python grpo.py --model {args.out} --tasks TASKS")
    dist.destroy_process_group()


def log(line, steps, args):
    """Print one line and append all numbers to log.jsonl."""
    form = ("step {step:5d}/{steps} | loss {loss:.4f} | entropy {entropy:.3f} | gnorm {gnorm:6.2f} "
            "| lr {lr:.2e} | {speed:6.0f} tokens/s")
    form += " | held-out loss {val_loss:.4f}" * ("val_loss" in line)
    print(form.format(steps=steps, speed=line["tokens"] / line["seconds"], **line), flush=True)
    runtime.write_log(line, args)


if __name__ == "__main__":
    runtime.run_ranks(main)
