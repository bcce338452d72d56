"""
GRPO: play every query G times, and push up the plays that scored above their group.

    (1) take P queries and play each one G times with vLLM: a group. No episode waits for another:
        a turn that the world has answered goes back into the engine's running batch
    (2) the world's verdict on an episode becomes its reward r, a number [1 sec. 3]
    (3) advantage A = (r - mean of the group) / (std of the group + 1e-6), one per episode [2]
    (4) an overlength episode (stopped by the turn or the context limit) counts in that mean and
        std, but its tokens leave the loss and its denominator [1], unless --keep-overlength
    (5) loss = - mean over queries of ( sum over the group's policy tokens of min(w A, clip(w) A) /
        the group's policy tokens ), w = pi / pi_old, with pi_old as the engine reported it
    (6) copy the new weights into vLLM and go to (1)

Departs from [2]: (4), the token mean of (5) [3], clip-higher [3], and there is neither a KL term
nor a reference model.
[1] STAR, arXiv:2603.21972   [2] DeepSeekMath, arXiv:2402.03300   [3] DAPO, arXiv:2503.14476

Reads   a HF folder (from sft.py), tasks (from synth.py), the world's data
Writes  OUT/ (a HF folder), OUT/best/ (best on --val), OUT/log.jsonl, OUT/rollouts/<step>.jsonl,
        OUT/checkpoints/, OUT/microscope/<step>.jsonl

    torchrun --standalone --nproc_per_node 8 grpo.py --model out/sft --tasks data/rl.jsonl

Nothing below knows about travel: for another task, --env names your world (evaluate.Travel).
"""
import datetime
import json
import logging
import math
import os
import random
import sys
import time
import warnings
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import runtime
from runtime import AMOUNT, COUNT, NATURAL, PART, POSITIVE, SHARE, Help, Parser
from sandbox import Episode

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden
# size, V vocabulary. A rollout is a flat list of P * G samples.
OVERLENGTH = ("turns", "context")  # the two stops that (4) masks
UNSAID = 1.0  # stands for the log pi of a token that no policy has sampled
LOGITS = 30_000_000  # numbers: the loss never holds more logits at a time (120 MB in float32)


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("what").add_argument
    add("--model", default="out/sft", help="HF folder or hub name to start from")
    add("--tasks", default="data/rl.jsonl", help="queries to play, one task per line")
    add("--val", help="tasks to validate on; the most successful checkpoint is kept in OUT/best")
    add("--env", default="travel", help="travel, tools, or a module or file with open_world(args)")
    add("--out", default="out/rl", help="folder of the model, its log, rollouts and checkpoints")
    add = p.add_argument_group("play").add_argument
    add("--prompts", type=COUNT, default=32, help="P, queries per update, all ranks together [1]")
    add("--group", type=COUNT, default=8, help="G, plays per query [1]")
    add("--temperature", type=POSITIVE, default=1.0, help="of the sampling and of the loss [1]")
    add("--context", type=COUNT, default=30000, help="tokens of an episode, with its prompt [1]")
    add("--max-turns", type=COUNT, default=60, help="replies per episode [1]")
    add("--turn-tokens", type=COUNT, default=8192, help="tokens of a reply, or a format error")
    add("--concurrency", type=COUNT, default=256, help="episodes that an engine keeps in flight")
    add("--tp", type=COUNT, default=1, help="ranks that share an engine (tensor parallel)")
    add = p.add_argument_group("learn").add_argument
    add("--reward", help="one of the world's kinds, its first if unset; or curriculum [1]")
    add("--epochs", type=POSITIVE, default=5, help="passes over the tasks [1]")
    add("--steps", type=NATURAL, default=0, help="updates; 0: as many as --epochs says")
    add("--lr", type=AMOUNT, default=2e-6, help="learning rate, constant until --decay [1]")
    add("--decay", type=SHARE, default=0.0, help="last share of updates, where the rate falls to 0")
    add("--clip-low", type=SHARE, default=0.2, help="w is clipped at 1 minus this [2]")
    add("--clip-high", type=AMOUNT, default=0.28, help="w is clipped at 1 plus this [3]")
    add("--loss-norm", default="group", choices=["group", "batch"], help="(5)'s tokens, [1] or [3]")
    add("--keep-overlength", action="store_true", help="not (4): loops are unlearnt")
    add("--drop-uniform", action="store_true", help="DAPO [1]: without groups of equal reward")
    add("--refill", type=NATURAL, default=0, help="batches to play, at most, in their place [3]")
    add("--minibatches", type=COUNT, default=1, help="updates per batch of queries [1]")
    add("--recompute", action="store_true", help="take pi_old from a forward of the trainer")
    add("--tis-cap", type=AMOUNT, default=0.0, help="then weigh by trainer / engine, at most this")
    add("--train-results", action="store_true", help="on what tools say, too; implies --recompute")
    add("--seed", type=NATURAL, default=0, help="of the order of the tasks and every sampled token")
    add = p.add_argument_group("memory (python -m look.memory grpo tells what fits)").add_argument
    add("--pack-tokens", type=COUNT, default=32768, help="tokens per micro-batch, with padding")
    add("--attn", default="auto", choices=["auto", "flash_attention_2", "sdpa"], help="auto: flash "
        "attention in the trainer where it is installed")
    add("--no-checkpointing", action="store_true", help="keep all activations for the backward")
    add("--gpu-memory", type=PART, default=0.6, help="share of a GPU that the engine may fill")
    add = p.add_argument_group("running").add_argument
    add("--max-dlogp", type=AMOUNT, default=0.0, help="bound on an update's mean |dlogp|; "
        "0: 1e-4 in float32, 0.05 in bfloat16")
    add("--val-every", type=COUNT, default=10, help="updates between validations")
    add("--save-every", type=NATURAL, default=0, help="updates between checkpoints; 0: none")
    add("--microscope", type=NATURAL, default=0, help="updates between those of which report.py "
        "shows every token; 0: none")
    add("--resume", action="store_true", help="go on from the last checkpoint in OUT, if any")
    args = runtime.parse_args(p)
    args.recompute |= args.train_results  # nobody sampled results: their pi_old is the trainer's
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.refill and not args.drop_uniform:
        p.error("--refill replaces what --drop-uniform drops")
    if args.tis_cap and not args.recompute:
        p.error("--tis-cap weighs what --recompute computes")
    if ranks % args.tp:
        p.error(f"--tp {args.tp} does not divide {ranks} ranks into engines")
    return args


# ---------------------------------------------------------------------------------------- rollout

@dataclass
class Sample:
    """One play of one query: exactly the tokens the engine saw and said."""
    episode: Episode
    query: int  # index of its group in the step
    name: str  # seeds its sampling: the same name, the same tokens
    ids: list = field(default_factory=list)  # prompt, replies, observations
    mask: list = field(default_factory=list)  # 1 on the policy's tokens
    logps: list = field(default_factory=list)  # the engine's log pi of those, 0 elsewhere
    # set when it has ended
    stop: str = ""
    record: dict = None  # what is written to OUT/rollouts
    reward: float = 0.0
    advantage: float = 0.0
    old_logps: torch.Tensor = None  # with --recompute: the trainer's log pi of the policy tokens


def new_sample(task, query, name, world, template, args):
    """A fresh play, its prompt in tokens. ValueError where the prompt alone fills the context."""
    s = Sample(world.episode(task, f"failures/{name}", args), query, name)
    append(s, template.prompt(s.episode.messages))
    if len(s.ids) >= args.context:
        raise ValueError(f"task {task['id']}: its prompt has {len(s.ids)} tokens; "
                         f"raise --context above {args.context}")
    return s


def append(s, ids, logps=None):
    """Tokens of the world (mask 0), or with their log-probabilities the policy's (mask 1)."""
    s.ids += ids
    s.mask += [int(logps is not None)] * len(ids)
    s.logps += logps or [0.0] * len(ids)


def submit(engine, s, world, template, temperature, top_p, args):
    """Ask the engine for the sample's next reply."""
    name = f"{s.name}/{s.episode.turns}"
    runtime.add_request(engine, name, s.ids, template, world.stops, f"{args.seed}/{name}",
                         max_tokens=min(args.turn_tokens, args.context - len(s.ids)),
                         temperature=temperature, top_p=top_p, logprobs=0)
    return name


def take_reply(s, output, template, args):
    """Take in a finished reply -> the Action that waits for an observation, or None at the end."""
    ids = list(output.token_ids)
    reported = zip(ids, output.logprobs, strict=True)
    append(s, ids, [likeliest[token].logprob for token, likeliest in reported])
    reply, closed = template.reply(ids)
    if not closed and not isinstance(output.stop_reason, str):  # cut short: it has no end
        s.episode.messages.append({"role": "assistant", "content": reply})
        s.episode.stop = "context" if len(s.ids) >= args.context else "format"
        return None
    return s.episode.begin(reply)


def take_observation(s, observation, template, args):
    """Hand the play an observation, if one came. True when the engine is to speak again."""
    if observation is None:
        return False
    s.episode.finish(observation)
    ids = template.between(s.episode.messages[-1], closed=s.ids[-1] in template.ends)
    ids = ids[:args.context - len(s.ids)]  # nobody reads on behind the limit
    s.episode.observation_tokens = len(ids)
    append(s, ids, [UNSAID] * len(ids) if args.train_results else None)
    if len(s.ids) >= args.context:
        s.episode.stop = "context"
    return not s.episode.stop


def rollout(llm, template, world, tasks, name, group, temperature, top_p, args):
    """(1) Play each task `group` times -> this engine's samples; groups are whole, in any order.

    Engines draw the next query from one counter, so that none idles while another has a queue.
    """
    engine, live, done = llm.llm_engine, {}, []
    queries = runtime.shared_counter(name, len(tasks), args)
    calls = runtime.open_calls(world.slow, len(tasks), group, args)

    def ask(s):
        live[submit(engine, s, world, template, temperature, top_p, args)] = s

    while True:
        while calls.free(live) >= group and (query := next(queries, None)) is not None:
            for g in range(group):
                ask(new_sample(tasks[query], query, f"{name}/{query}/{g}", world, template, args))
        if not live and not calls:
            calls.close()
            return done if calls.is_leader else []
        for output in engine.step() if live else ():
            if output.finished:
                s, reply = live.pop(output.request_id), output.outputs[0]
                calls.start(s, s.episode, take_reply(s, reply, template, args))
        for s, observation in calls.ready(block=not live):
            if take_observation(s, observation, template, args):
                ask(s)
            else:
                done.append(s)


def judge_all(samples, world, kind):
    """(2) episode -> verdict -> reward, on the rank that played it."""
    for s in samples:
        plan, score, strict = world.verdict(s.episode)
        s.stop, s.reward = s.episode.stop, world.reward(score, kind)
        s.record = s.episode.record() | {
            "plan": plan, "score": score, "strict": strict, "reward": s.reward, "kind": kind}
        # samples travel between ranks: without a sandbox, and numbers as bytes
        s.episode, s.ids, s.mask = None, array("i", s.ids), array("b", s.mask)
        s.logps = array("d", s.logps)


def reward_kind(kind, kinds, progress):
    """The reward in force at a fraction `progress` of training. "curriculum", dense to sparse: the
    world's first kind for 2/5, its second for 2/5, then its third [1 sec. 3]."""
    if kind != "curriculum":
        return kind or kinds[0]
    return kinds[0] if progress < 2 / 5 else kinds[1] if progress < 4 / 5 else kinds[2]


def batch_of(step, n, size, seed):
    """Indices of update `step`'s episodes: cuts of a new shuffle each epoch, a function of step."""
    places = range(step * size, (step + 1) * size)
    epochs = {place // n for place in places}
    order = {epoch: random.Random(f"{seed}/{epoch}").sample(range(n), n) for epoch in epochs}
    return [order[place // n][place % n] for place in places]


# ------------------------------------------------------------------------------------------- loss

def by_query(samples):
    """{query: its samples}, a group each."""
    groups = {}
    for s in samples:
        groups.setdefault(s.query, []).append(s)
    return groups


def uniform(group):
    """Whether all plays of a query earned the same."""
    return len({s.reward for s in group}) == 1


def group_advantages(samples):
    """(3) (4) Set advantages from the rewards of all plays of a query -> {query: its samples}"""
    groups = by_query(samples)
    for group in groups.values():
        rewards = torch.tensor([s.reward for s in group], dtype=torch.float64)
        rewards -= rewards[0].clone()  # so that equal ones have an advantage of exactly 0
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        for s, advantage in zip(group, advantages.tolist(), strict=True):
            s.advantage = advantage
    return groups


def token_weights(groups, args):
    """(4) (5) What a policy token counts -> [(sample, weight)], samples without loss left out

    --loss-norm group: 1 / tokens of its group / number of groups. batch: 1 / tokens of the batch.
    """
    kept = [[s for s in group if args.keep_overlength or s.stop not in OVERLENGTH]
            for group in groups.values()]
    tokens = [sum(sum(s.mask) for s in group) for group in kept]
    n_groups, n_tokens = sum(n > 0 for n in tokens), sum(tokens)
    # equal rewards: no advantage, no gradient, no work; if all are such, they stay all the same,
    # so that engine and trainer are compared
    teaches = [any(s.advantage for s in group) for group in kept]
    weighted = []
    for group, n, worth in zip(kept, tokens, teaches, strict=True):
        if n and (worth or not any(teaches)):  # n is 0 where all plays are left out
            weight = 1 / n_tokens if args.loss_norm == "batch" else 1 / n / n_groups
            weighted += [(s, weight) for s in group]
    return weighted


def policy_loss(logps, old_logps, advantage, weight, args):
    """(5) Clipped surrogate of a micro-batch, all (N,) -> loss, (N,) clipped low -1, 0, high 1

    weight: 1 / denominator.
    """
    w = torch.exp((logps - old_logps).clamp(max=20))  # inf times an advantage of 0 were NaN
    clipped = w.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss = -(torch.min(w * advantage, clipped * advantage) * weight).sum()
    with torch.no_grad():
        high = (w > 1 + args.clip_high) & (advantage > 0)
        low = (w < 1 - args.clip_low) & (advantage < 0)
    return loss, high.float() - low.float()


def learning_rate(step, steps, args):
    """Constant, but for the last --decay of the updates, in which it falls to 0."""
    return args.lr * min(1, (steps - step) / max(1, args.decay * steps))


def learn(engine, weighted, packed, rank, ranks, device, args, seen=None):
    """(5) One update on [(sample, weight)] of all ranks -> statistics of its policy tokens"""
    micros = deal([len(s.ids) for s, _ in weighted], ranks, args.pack_tokens, packed)[rank]
    watched = []
    for micro in micros:
        batch = [weighted[i] for i in micro]
        logps, entropy = engine(*collate([s for s, _ in batch], packed, device), args.temperature)
        loss = logps.sum() * 0  # of a rank without work, which makes its forward all the same
        if batch:
            engine_logps, advantage, weight = per_token(batch, device)
            said, old_logps = engine_logps != UNSAID, engine_logps
            if args.recompute:
                old_logps = torch.cat([s.old_logps for s, _ in batch]).to(device)
                if args.tis_cap:
                    tis = torch.exp(old_logps - engine_logps).clamp(max=args.tis_cap)
                    weight = weight * torch.where(said, tis, 1.0)
            loss, side = policy_loss(logps, old_logps, advantage, weight, args)
            gap = (logps.detach() - engine_logps).abs() * said
            watched.append((loss.detach(), entropy, gap, side, said))
            if seen is not None:  # for --microscope
                seen.append((batch, logps.detach(), old_logps, advantage, entropy, side))
        engine.backward(loss * ranks)  # DeepSpeed takes the mean over ranks, we want the sum
    # the same on every rank. Without an advantage AdamW's moments alone would move the weights
    moves = any(s.advantage for s, _ in weighted)
    if moves:
        engine.step()
    gnorm = float(engine.get_global_grad_norm() or 0) if moves else 0.0
    return statistics(watched, device) | {"gnorm": gnorm}


def statistics(watched, device):
    """[(loss, and (N,) each: entropy, |dlogp|, side, said) of a micro-batch] -> their means."""
    sums, worst = torch.zeros(7, device=device), torch.zeros((), device=device)
    for loss, entropy, gap, side, said in watched:
        sums += torch.stack([loss, entropy.sum(), gap.sum(), (side < 0).sum(), (side > 0).sum(),
                             torch.ones_like(gap).sum(), said.sum()])
        worst = torch.maximum(worst, gap.max())
    dist.all_reduce(sums)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    loss, entropy, gap, low, high, n, n_said = sums.tolist()
    entropy, low, high = (total / max(n, 1) for total in (entropy, low, high))
    return {"loss": loss, "clip_low": low, "clip_high": high, "entropy": entropy,
            "dlogp_mean": gap / max(n_said, 1), "dlogp_max": worst.item(), "loss_tokens": int(n)}


@torch.no_grad()
def recompute_logps(engine, weighted, packed, rank, ranks, device, args):
    """--recompute: set every sample's old_logps by a forward of the trainer before its update."""
    logps = {}
    for micro in deal([len(s.ids) for s, _ in weighted], ranks, args.pack_tokens, packed)[rank]:
        batch = [weighted[i][0] for i in micro]
        flat, _ = engine(*collate(batch, packed, device), args.temperature)
        if batch:
            parts = flat.cpu().split([sum(s.mask) for s in batch])
            logps |= dict(zip(micro, parts, strict=True))
    everyone = [None] * ranks
    dist.all_gather_object(everyone, logps)  # minibatches may deal a sample to another rank
    for part in everyone:
        for i, old_logps in part.items():
            weighted[i][0].old_logps = old_logps


def per_token(batch, device):
    """[(sample, weight)] -> engine's logps, advantage, weight of their policy tokens, each (N,)"""
    logps = [logp for s, _ in batch for logp, mask in zip(s.logps, s.mask, strict=True) if mask]
    counts = torch.tensor([sum(s.mask) for s, _ in batch])
    advantage = torch.tensor([s.advantage for s, _ in batch]).repeat_interleave(counts)
    weight = torch.tensor([weight for _, weight in batch]).repeat_interleave(counts)
    return torch.tensor(logps, device=device), advantage.to(device), weight.to(device)


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


def sync_weights(llm, engine, device):
    """(6) Copy the trainer's weights into the engine, one by one. Every rank takes part.

    The order matters on a GPU: weights written before the engine's memory is awake are lost.
    Without the iterator, reload_weights would read the folder on disk again and the policy would
    never change.
    """
    if device.type == "cuda":
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": full_weights(engine)})
    if device.type == "cuda":
        llm.wake_up(tags=["kv_cache"])
    else:
        llm.apply_model(runtime.renew_head)
    if not llm.reset_prefix_cache():  # cached keys and values belong to the old weights
        raise RuntimeError("the engine still holds cache blocks of the old weights")


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
    world, tasks, val, template = read_inputs(args)
    rank, ranks, device = setup()
    runtime.lock_folder(args.out)
    policy, packed = load(args, template, device)
    engine = zero3(policy, args.lr, device)
    steps = args.steps or math.ceil(args.epochs * len(tasks) / args.prompts)
    start = runtime.restore(engine, args.out, args.resume, rank)
    interrupted = runtime.watch_sigterm()
    llm = runtime.load_engine(args, device)
    if rank == 0:
        print(f"{len(tasks)} tasks, {steps} updates of {args.prompts} x {args.group} plays, "
              f"{ranks} ranks, {'packed' if packed else 'padded'} rows, "
              f"flags {json.dumps(vars(args))}")
    for step in range(start, steps + 1):
        clock = [time.time()]
        # (6) the engine gets the weights of `step` updates
        sync_weights(llm, engine, device)
        clock.append(time.time())
        if val and (step % args.val_every == 0 or step == steps):
            log(validate(llm, template, world, val, step, engine, rank, args), rank, args)
        if step == steps:
            break
        clock.append(time.time())
        # (1) (2) play and judge
        kind = reward_kind(args.reward, world.kinds, step / steps)
        samples, judged = play_batch(llm, template, world, tasks, step, steps, kind, args)
        play_gib = runtime.used_gib(device)
        if device.type == "cuda":
            llm.sleep(level=2)
        clock.append(time.time())
        # (3) (4) (5) learn
        groups = group_advantages(samples)
        lr = engine.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        updates = [token_weights(part, args) for part in split(groups, args)]
        if args.recompute:
            recompute_logps(engine, sum(updates, []), packed, rank, ranks, device, args)
        seen = [] if args.microscope and (step + 1) % args.microscope == 0 else None
        stats = [learn(engine, weighted, packed, rank, ranks, device, args, seen)
                 for weighted in updates]
        clock.append(time.time())
        for update in stats:
            runtime.check_finite(args.out, step + 1, loss=update["loss"], gnorm=update["gnorm"])
        line = {"step": step + 1} | describe(samples, groups, world.parts) | stats[0]
        line |= timings(samples, updates, clock, judged) | {"later": stats[1:], "kind": kind}
        line |= {"lr": lr, "play_gib": play_gib, "learn_gib": runtime.used_gib(device)}
        write_plays(f"{step + 1:05d}.jsonl", samples, seen, template, rank, args)
        log(line, rank, args, steps)
        check_sync(line, device, args)
        runtime.save_checkpoint(engine, args, step + 1, rank, last=interrupted(device))
    runtime.check_parameters(engine, args.out, steps)
    save_model(engine, template, args.out, rank)
    world.close()
    llm.llm_engine.engine_core.shutdown()  # ends the process group, too


def read_inputs(args):
    """World, tasks, tasks to validate on, template: all are looked at before anything is spent."""
    world = runtime.open_world(args)
    kinds = [*world.kinds, *["curriculum"] * (len(world.kinds) == 3)]
    if args.reward and args.reward not in kinds:
        sys.exit(f"--reward {args.reward}: this world knows {', '.join(kinds)}")
    tasks = runtime.load_tasks(args.tasks, world.load_task)
    val = runtime.load_tasks(args.val, world.load_task) if args.val else []
    template = runtime.load_template(args.model)
    for task in tasks + val:  # a prompt that fills the context
        new_sample(task, 0, "", world, template, args)
    return world, tasks, val, template


def play_batch(llm, template, world, tasks, step, steps, kind, args):
    """(1) (2) The judged plays of update `step` -> samples of all ranks, seconds of judging

    With --refill [3]: more batches until --prompts groups have unequal rewards; what is played
    after these is left out.
    """
    samples, judge_s = [], 0.0
    for more in range(args.refill + 1):
        places = batch_of(step + more * steps, len(tasks), args.prompts, args.seed)
        name = f"play/{step}" + f"+{more}" * (more > 0)
        played = rollout(llm, template, world, [tasks[i] for i in places], name, args.group,
                         args.temperature, 1.0, args)
        began = time.time()
        judge_all(played, world, kind)
        for s in played:
            s.query += more * args.prompts
        judge_s += time.time() - began
        samples += gather(played)
        useful = [query for query, group in by_query(samples).items() if not uniform(group)]
        if args.refill and len(useful) >= args.prompts:
            return [s for s in samples if s.query <= useful[args.prompts - 1]], judge_s
    return samples, judge_s


def check_sync(line, device, args):
    """Stop where engine and trainer give the same tokens different log-probabilities, or a NaN."""
    bound, gap = args.max_dlogp or (0.05 if device.type == "cuda" else 1e-4), line["dlogp_mean"]
    if not gap <= bound:
        sys.exit(f"update {line['step']}: engine and trainer disagree, mean |dlogp| {gap:.1e}, "
                 f"bound {bound:.0e}; weights did not arrive, or --max-dlogp if the dtype "
                 "explains it")


def validate(llm, template, world, val, step, engine, rank, args):
    """Play the validation tasks once each; the highest success so far is kept in OUT/best."""
    samples = rollout(llm, template, world, val, f"val/{step}", 1, 0.6, 0.95, args)  # as in [1]
    judge_all(samples, world, world.kinds[0])
    scores = [s.record["score"]["success"] for s in gather(samples)]
    success = sum(scores) / len(scores)
    rows = runtime.read_jsonl(Path(args.out) / "log.jsonl")
    before = [row["val_success"] for row in rows if "val_success" in row]
    dist.barrier()
    if success > max(before, default=-1):
        save_model(engine, template, Path(args.out) / "best", rank)
    return {"step": step, "val_success": success}


def split(groups, args):
    """(4) {query: samples} -> such dictionaries of nearly as many queries each, one for each update

    --drop-uniform: without the queries whose plays all earned the same.
    """
    names = [query for query in sorted(groups)
             if not (args.drop_uniform and uniform(groups[query]))]
    return [{query: groups[query] for query in names[i :: args.minibatches]}
            for i in range(max(1, min(args.minibatches, len(names))))]


def gather(samples):
    """All ranks' samples, on every rank, in an order that does not depend on who was first."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, samples)
    return sorted((s for part in parts for s in part), key=lambda s: (s.query, s.name))


def sampled(s):
    """Tokens that the engine sampled for this play."""
    return sum(s.mask) - s.logps.count(UNSAID)


def describe(samples, groups, parts):
    """What the plays of a step looked like: means over episodes, and uniform groups' share."""
    rows = [{"reward": s.reward} | {part: s.record["score"][part] for part in parts} | {
        "strict": s.record["strict"], "format": s.stop == "format",
        "overlength": s.stop in OVERLENGTH, "turns": s.record["turns"], "calls": s.record["calls"],
        "tokens": len(s.ids), "policy_tokens": sampled(s), "failures": s.record["failures"]}
            for s in samples]
    means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    return means | {"uniform": sum(map(uniform, groups.values())) / len(groups)}


def write_plays(name, samples, seen, template, rank, args):
    """The plays of an update into OUT/rollouts; what was `seen` of their tokens, if anything."""
    if rank == 0:
        records = [s.record | {"advantage": s.advantage} for s in samples]
        runtime.write_jsonl(Path(args.out) / "rollouts" / name, records)
    if seen is not None:
        from look.microscope import write_tokens

        write_tokens(Path(args.out) / "microscope" / name, samples, seen, template, args)


def timings(samples, updates, clock, judged):
    """Seconds of each part of a step; tokens per second sampled in play and learnt from."""
    sync, val, played, learned = (end - start for start, end in zip(clock, clock[1:], strict=False))
    play = played - judged
    return {"sync_s": sync, "val_s": val, "play_s": play, "judge_s": judged, "learn_s": learned,
            "play_tps": sum(map(sampled, samples)) / play,
            "learn_tps": sum(len(s.ids) for update in updates for s, _ in update) / learned}


def log(line, rank, args, steps=None):
    """One line on the screen, the same dict in log.jsonl."""
    if rank:
        return
    runtime.append_jsonl(Path(args.out) / "log.jsonl", line)
    if "val_success" in line:
        print("step {step:4d} | validation success {val_success:.3f}".format(**line), flush=True)
        return
    print("step {step:4d}/{steps} | reward {reward:5.2f} | success {success:.2f} | strict "
          "{strict:.2f} | format {format:.2f} | over {overlength:.2f} | turns {turns:4.1f} | "
          "tokens {tokens:5.0f} | uniform {uniform:.2f} | loss {loss:+.4f} | clip {clip_low:.3f} "
          "{clip_high:.3f} | entropy {entropy:.3f} | gnorm {gnorm:5.2f} | dlogp {dlogp_mean:.1e} "
          "{dlogp_max:.1e} | lr {lr:.1e} | play {play_s:.0f}s sync {sync_s:.1f}s "
          "learn {learn_s:.0f}s".format(steps=steps, **line), flush=True)


if __name__ == "__main__":
    runtime.run(sys.argv[0], main)
