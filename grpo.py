"""
GRPO on TravelPlanner: play every query G times, push up the plays that scored above their group.

    (1) take P queries and play each one G times with vLLM: a group. No episode waits for another: a finished turn is
        answered by the sandbox at once and goes back into the engine's running batch
    (2) reward r of an episode: evaluate.judge turns its answer into a plan and a score, evaluate.reward the score into
        a number [1 sec. 3]
    (3) advantage A = (r - mean of the group) / (std of the group + 1e-6), one number per episode [2]
    (4) an overlength episode (stopped by the turn or the context limit) counts in that mean and std, but its tokens
        leave the loss and its denominator [1], unless --keep-overlength
    (5) loss = - mean over queries of ( sum over the group's policy tokens of min(w A, clip(w) A) / the group's policy
        tokens ), w = pi / pi_old, with pi_old as the engine reported it while playing
    (6) copy the new weights into vLLM and go to (1)

Departs from [2]: (4), the token mean of (5) [3], clip-higher [3], and there is no KL term and no reference model.
[1] STAR, arXiv:2603.21972   [2] DeepSeekMath, arXiv:2402.03300 sec. 4.1   [3] DAPO, arXiv:2503.14476 sec. 3

Reads   a HF folder (from sft.py), tasks (from synth.py), the database ($STAR_DATABASE or --database)
Writes  OUT/ (a HF folder), OUT/best/ (best on --val), OUT/log.jsonl, OUT/rollouts/<step>.jsonl, OUT/checkpoints/

1 GPU   torchrun --standalone grpo.py --model out/sft --tasks data/rl.jsonl --out out/rl
8 GPUs  torchrun --standalone --nproc_per_node 8 grpo.py --model out/sft --tasks data/rl.jsonl --out out/rl

For another task, supply the names imported from sandbox and evaluate; nothing below knows about travel.
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
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from evaluate import judge, load_task, read_jsonl, reward, score, write_jsonl
from sandbox import Episode, Sandbox, open_database, system_prompt

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden size, V vocabulary.
# A rollout is a flat list of P * G samples.
OVERLENGTH = ("turns", "context")  # the two stops that (4) masks


def flags():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    # what
    add("--model",      default="out/sft", help="HF folder or hub name to start from")
    add("--tasks",      default="data/rl.jsonl", help="queries to play, one task per line")
    add("--val",        help="tasks to validate on; the checkpoint with the highest success is kept in OUT/best")
    add("--database",   help="folder of the travel database; default $STAR_DATABASE, else database/mini")
    add("--out",        default="out/rl", help="folder of the trained model, its log, rollouts and checkpoints")
    # play
    add("--prompts",    type=int,   default=32, help="P, queries per update, all ranks together [1]")
    add("--group",      type=int,   default=8, help="G, plays per query [1]")
    add("--temperature", type=float, default=1.0, help="of sampling and of the loss alike [1]")
    add("--context",    type=int,   default=30000, help="longest episode in tokens, prompt included [1]")
    add("--max-turns",  type=int,   default=60, help="most replies per episode [1]")
    add("--turn-tokens", type=int,  default=8192, help="longest reply; a longer one is a format error")
    add("--max-seconds", type=float, default=3600, help="an episode older than this ends as overlength")
    add("--concurrency", type=int,  default=256, help="episodes an engine keeps in flight")
    add("--tp",         type=int,   default=1, help="ranks that share an engine and its weights: tensor parallel")
    add("--failure-rate", type=float, default=0.0, help="probability that a tool call fails [1 sec. 5]")
    add("--system-prompt", default="full", help="full, short, or a file")
    # learn
    add("--reward",     default="sum", choices=["sum", "macro", "success", "curriculum"], help="[1 sec. 3]")
    add("--epochs",     type=float, default=5, help="passes over the tasks [1]")
    add("--steps",      type=int,   default=0, help="stop after this many updates; 0: as --epochs says")
    add("--lr",         type=float, default=2e-6, help="learning rate, constant [1] between warm-up and decay")
    add("--warmup",     type=int,   default=0, help="updates of linear warm-up: AdamW's first are the least certain")
    add("--decay",      type=float, default=0.0, help="last part of the updates, 0 to 1, in which the rate falls to 0")
    add("--clip-low",   type=float, default=0.2, help="w is clipped at 1 minus this [2]")
    add("--clip-high",  type=float, default=0.28, help="w is clipped at 1 plus this, the higher clip of [3]")
    add("--loss-norm",  default="group", choices=["group", "batch"], help="(5): tokens of the group [1] or batch [3]")
    add("--no-std",     action="store_true", help="advantage without division by the group's std")
    add("--keep-overlength", action="store_true", help="not (4): such plays stay in the loss, so loops are unlearnt")
    add("--drop-uniform", action="store_true", help="DAPO as in [1]: groups of equal reward leave the batch")
    add("--refill",     type=int,   default=0, help="batches played, at most, to replace these [3]")
    add("--minibatches", type=int,  default=1, help="updates per batch of queries [1: 1]")
    add("--recompute",  action="store_true", help="pi_old by a forward of the trainer instead of the engine's report")
    add("--tis-cap",    type=float, default=0.0, help="with --recompute: times min(trainer / engine, this); 0: off")
    add("--weight-decay", type=float, default=0.0, help="AdamW's decoupled decay")
    add("--grad-clip",  type=float, default=1.0, help="gradients are scaled down to this norm")
    add("--seed",       type=int,   default=0, help="order of the tasks, and every sampled token")
    # memory
    add("--pack-tokens", type=int,  default=32768, help="tokens per micro-batch, padding included")
    add("--logp-chunk", type=int,   default=1024, help="tokens whose logits exist at a time")
    add("--attn",       default="auto", choices=["auto", "flash_attention_2", "sdpa"], help="auto: flash if installed")
    add("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them in backward")
    add("--gpu-memory", type=float, default=0.6, help="fraction of a GPU the engine may fill while the trainer waits")
    # running
    add("--max-dlogp",  type=float, default=0.0, help="bound on the first sync's mean |dlogp|; 0: 1e-4, bf16 0.05")
    add("--val-every",  type=int,   default=10, help="updates between validations")
    add("--val-temperature", type=float, default=0.6, help="of validation plays [1]")
    add("--max-hours",  type=float, default=0.0, help="save and stop after this long; 0: no limit")
    add("--save-every", type=int,   default=0, help="updates between checkpoints to resume from; 0: none")
    add("--resume",     action="store_true", help="go on from the last checkpoint in --out, if there is one")
    # planning
    add("--plan",       action="store_true", help="print what will fill each GPU, without one, and leave; 1: too much")
    add("--gpus",       type=int,   default=8, help="--plan for this many, all nodes together")
    add("--gpu-gib",    type=float, default=80, help="--plan for GPUs of this much memory")
    a = p.parse_args()
    ranks = a.gpus if a.plan else int(os.environ.get("WORLD_SIZE", 1))
    if a.refill and not a.drop_uniform:
        p.error("--refill replaces what --drop-uniform drops")
    if a.tp < 1 or ranks % a.tp:
        p.error(f"--tp {a.tp} does not divide {ranks} ranks into engines")
    return a


# --------------------------------------------------------------------------------------------------------- rollout


@dataclass
class Sample:
    """One play of one query: exactly the tokens the engine saw and said."""
    episode: Episode
    query: int                                  # index of its group in the step
    name: str                                   # seeds its sampling: the same name, the same tokens
    ids: list = field(default_factory=list)     # prompt, replies, observations
    mask: list = field(default_factory=list)    # 1 on the policy's tokens
    logps: list = field(default_factory=list)   # the engine's log pi of those, 0 elsewhere
    began: float = field(default_factory=time.time)
    # set when it has ended
    stop: str = ""
    record: dict = None                         # what is written to OUT/rollouts
    reward: float = 0.0
    advantage: float = 0.0
    old_logps: torch.Tensor = None              # with --recompute: the trainer's log pi of the policy tokens


def new_sample(task, query, name, database, tokenizer, a):
    """A fresh episode with its prompt tokenised. Raises ValueError when the prompt alone fills the context."""
    sandbox = Sandbox(database, a.failure_rate, seed=f"failures/{name}")
    s = Sample(Episode(task, sandbox, a.max_turns, system_prompt(a.system_prompt)), query, name)
    prompt = tokenizer.apply_chat_template(s.episode.messages, tokenize=False, add_generation_prompt=True)
    append(s, tokenizer.encode(prompt, add_special_tokens=False))
    if len(s.ids) >= a.context:
        raise ValueError(f"task {task['id']}: its prompt has {len(s.ids)} tokens; raise --context above {a.context}")
    return s


def append(s, ids, logps=None):
    """Tokens of the world (mask 0), or with their log-probabilities those of the policy (mask 1)."""
    s.ids += ids
    s.mask += [int(logps is not None)] * len(ids)
    s.logps += logps or [0.0] * len(ids)


def submit(engine, s, tokenizer, temperature, top_p, a):
    """Ask the engine for the sample's next reply."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    name = f"{s.name}/{s.episode.turns}"
    engine.add_request(name, {"prompt_token_ids": list(s.ids)}, SamplingParams(
        temperature=temperature, top_p=top_p, logprobs=0,
        seed=random.Random(f"{a.seed}/{name}").getrandbits(31),
        max_tokens=min(a.turn_tokens, a.context - len(s.ids)), stop_token_ids=[tokenizer.eos_token_id],
        detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY))
    return name


def play_turn(s, output, tokenizer, a):
    """Take in a finished reply and answer it. True when the episode goes on and the engine is to speak again."""
    ids = list(output.token_ids)
    append(s, ids, [entry[token].logprob for token, entry in zip(ids, output.logprobs)])
    closed = ids[-1:] == [tokenizer.eos_token_id]
    reply = tokenizer.decode(ids[:-1] if closed else ids)
    if not closed:  # cut short by the context, or by --turn-tokens: a reply that does not end breaks the protocol
        s.episode.messages.append({"role": "assistant", "content": reply})
        s.episode.stop = "context" if len(s.ids) >= a.context else "format"
        return False
    observation = s.episode.step(reply)
    if observation is None:
        return False
    header = f"\n<|im_start|>user\n{s.episode.observation_message(observation)}<|im_end|>\n<|im_start|>assistant\n"
    append(s, tokenizer.encode(header, add_special_tokens=False))
    if len(s.ids) >= a.context or agreed(time.time() - s.began > a.max_seconds, a):
        s.episode.stop = "context"
    return not s.episode.stop


def rollout(llm, tokenizer, database, tasks, name, group, temperature, top_p, a):
    """(1) Play each task `group` times. -> this engine's samples; groups are whole, their order is that of finishing.

    Engines draw the next query from one counter, so that none idles while another still has a queue.
    """
    engine, live, done, queries = llm.llm_engine, {}, [], shared_counter(name, len(tasks), a)
    engines = int(os.environ.get("WORLD_SIZE", 1)) // a.tp
    fair = math.ceil(len(tasks) / engines) * group  # the first may not take all at once
    room = max(group, min(a.concurrency, fair))
    while True:
        while len(live) + group <= room and (query := next(queries, None)) is not None:
            for g in range(group):
                s = new_sample(tasks[query], query, f"{name}/{query}/{g}", database, tokenizer, a)
                live[submit(engine, s, tokenizer, temperature, top_p, a)] = s
        if not live:
            return done if leads(a) else []
        for output in engine.step():
            if output.finished:
                s, reply = live.pop(output.request_id), output.outputs[0]
                if play_turn(s, reply, tokenizer, a):
                    live[submit(engine, s, tokenizer, temperature, top_p, a)] = s
                else:
                    done.append(s)


def leads(a):
    """Whether this rank is the first of its engine. With --tp the others play the same episodes, and keep quiet."""
    return int(os.environ.get("RANK", 0)) % a.tp == 0


def agreed(value, a):
    """What the first rank of this engine says, on all its ranks: they must ask for the same turns in the same order."""
    if a.tp == 1:
        return value
    from vllm.distributed import get_tp_group
    return get_tp_group().broadcast_object(value)


def shared_counter(name, n, a):
    """Yield 0 .. n-1, each number to one engine only: whoever is free takes the next."""
    store = dist.distributed_c10d._get_default_store()
    while (i := agreed(leads(a) and store.add(name, 1) - 1, a)) < n:
        yield i


def judge_all(samples, database, kind):
    """(2) answer -> plan -> score -> reward, on the rank that played it. `strict` counts only unhacked success."""
    for s in samples:
        task = s.episode.task
        plan, verdict = judge(task, s.episode.answer, database)
        strict = score(task, plan, database, "strict")["success"] if verdict["success"] else 0.0
        s.stop, s.reward = s.episode.stop, reward(verdict, kind)
        s.record = s.episode.record() | {"plan": plan, "score": verdict, "strict": strict, "reward": s.reward}
        s.episode = None  # with its sandbox: samples travel between ranks


def reward_kind(kind, progress):
    """The curriculum's reward at a fraction `progress` of training: SUM for 2/5, MACRO for 2/5, SUCCESS [1 sec. 3]."""
    if kind != "curriculum":
        return kind
    return "sum" if progress < 2 / 5 else "macro" if progress < 4 / 5 else "success"


def batch_of(step, n, size, seed):
    """Indices of update `step`'s episodes: consecutive cuts of a new shuffle each epoch, a function of step alone."""
    places = range(step * size, (step + 1) * size)
    order = {e: random.Random(f"{seed}/{e}").sample(range(n), n) for e in {i // n for i in places}}
    return [order[i // n][i % n] for i in places]


# ------------------------------------------------------------------------------------------------------------ loss


def group_advantages(samples, a):
    """(3) (4) Set each sample's advantage from the rewards of all plays of its query. -> {query: its samples}"""
    groups = {}
    for s in samples:
        groups.setdefault(s.query, []).append(s)
    for group in groups.values():
        rewards = torch.tensor([s.reward for s in group], dtype=torch.float64)
        advantages = rewards - rewards.mean()
        if not a.no_std:
            advantages = advantages / (rewards.std(correction=0) + 1e-6)
        for s, advantage in zip(group, advantages.tolist()):
            s.advantage = advantage
    return groups


def token_weights(groups, a):
    """(4) (5) What a policy token counts in the loss. -> [(sample, weight)], samples without loss left out

    --loss-norm group: 1 / tokens of its group / number of groups. batch: 1 / tokens of the batch.
    """
    kept = [[s for s in group if a.keep_overlength or s.stop not in OVERLENGTH] for group in groups.values()
            if not (a.drop_uniform and max(s.reward for s in group) == min(s.reward for s in group))]
    tokens = [sum(sum(s.mask) for s in group) for group in kept]
    n_groups, n_tokens = sum(n > 0 for n in tokens), sum(tokens)
    # equal rewards: no advantage, no gradient, no work; if all are such, engine and trainer are still compared
    teaches = [any(s.advantage for s in group) for group in kept]
    return [(s, 1 / n / n_groups if a.loss_norm == "group" else 1 / n_tokens)
            for group, n, worth in zip(kept, tokens, teaches) if worth or not any(teaches) for s in group]


def policy_loss(logps, old_logps, advantage, weight, a):
    """(5) Clipped surrogate of a micro-batch, all (N,); `weight` is 1 / denominator. -> loss, (N,) clipped -1 0 1"""
    w = torch.exp(logps - old_logps)
    clipped = w.clamp(1 - a.clip_low, 1 + a.clip_high)
    loss = -(torch.min(w * advantage, clipped * advantage) * weight).sum()
    with torch.no_grad():
        side = ((w > 1 + a.clip_high) & (advantage > 0)).float() - ((w < 1 - a.clip_low) & (advantage < 0)).float()
    return loss, side


def learn(engine, weighted, packed, rank, world, device, a):
    """(5) One update on [(sample, weight)] of all ranks. -> statistics of its policy tokens, the same on every rank"""
    micros = cut([len(s.ids) for s, _ in weighted], world, a.pack_tokens, packed)[rank]
    stats = torch.zeros(6, device=device)  # loss, entropy, |dlogp|, clipped low, clipped high, tokens
    worst = torch.zeros((), device=device)
    for micro in micros:
        batch = [weighted[i] for i in micro]
        logps, entropy = engine(*collate([vars(s) for s, _ in batch], packed, device), a.temperature)
        if batch:
            engine_logps, advantage, weight = per_token(batch, device)
            old_logps, correction = engine_logps, 1.0
            if a.recompute:
                old_logps = torch.cat([s.old_logps for s, _ in batch]).to(device)
                correction = torch.exp(old_logps - engine_logps).clamp(max=a.tis_cap) if a.tis_cap else 1.0
            loss, side = policy_loss(logps, old_logps, advantage, weight * correction, a)
            gap = (logps.detach() - engine_logps).abs()
            worst = torch.maximum(worst, gap.max())
            stats += torch.stack([loss.detach(), entropy.sum(), gap.sum(), (side < 0).sum(), (side > 0).sum(),
                                  torch.ones_like(gap).sum()])
        # DeepSpeed takes the mean over ranks, we want the sum
        engine.backward((loss if batch else logps.sum() * 0) * world)
    dist.all_reduce(stats)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if weighted:  # the same on every rank: all plays may have been overlength
        engine.step()
    loss, *sums, n = stats.tolist()
    entropy, gap, low, high = [x / max(n, 1) for x in sums]
    return {"loss": loss, "clip_low": low, "clip_high": high, "entropy": entropy,
            "gnorm": float(engine.get_global_grad_norm() or 0) if weighted else 0.0, "dlogp_mean": gap,
            "dlogp_max": worst.item(), "loss_tokens": int(n)}


@torch.no_grad()
def recompute_logps(engine, weighted, packed, rank, world, device, a):
    """--recompute: set old_logps of every sample by a forward of the trainer before its first update."""
    mine = cut([len(s.ids) for s, _ in weighted], world, a.pack_tokens, packed)[rank]
    logps = {}
    for micro in mine:
        batch = [weighted[i][0] for i in micro]
        flat, _ = engine(*collate([vars(s) for s in batch], packed, device), a.temperature)
        if batch:
            logps |= dict(zip(micro, flat.cpu().split([sum(s.mask) for s in batch])))
    parts = [None] * world
    dist.all_gather_object(parts, logps)  # the next cut may deal a sample to another rank
    for i, old in (pair for part in parts for pair in part.items()):
        weighted[i][0].old_logps = old


def per_token(batch, device):
    """[(sample, weight)] -> engine's logps, advantage, weight of their policy tokens, each (N,), in collate's order"""
    logps = [l for s, _ in batch for l, m in zip(s.logps, s.mask) if m]
    spread = lambda values: torch.cat([torch.as_tensor(value, dtype=torch.float32).expand(sum(s.mask))
                                       for (s, _), value in zip(batch, values)]).to(device)
    advantage, weight = spread(s.advantage for s, _ in batch), spread(w for _, w in batch)
    return torch.tensor(logps, device=device), advantage, weight


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


def load_engine(a, device):
    """The vLLM engine of this rank, or with --tp its part of one, in this process, beside the trainer."""
    cuda = device.type == "cuda"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights are handed over in memory
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if cuda else "ERROR")
    if not cuda:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads share the cores
    from vllm import LLM

    # a prompt read in pieces would have to rewind its request's seeded generator, which a CPU's generator cannot; and
    # the cache holds whole blocks, of 128 on a CPU unless told: each turn would read the rest of its last one again
    cpu = dict(enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=max(a.context, 8192),
               block_size=32)
    gpu = dict(gpu_memory_utilization=a.gpu_memory, enable_sleep_mode=True)
    llm = LLM(a.model, dtype="bfloat16" if cuda else "float32", max_model_len=a.context, max_num_seqs=a.concurrency,
              enable_prefix_caching=True, logprobs_mode="processed_logprobs",  # log pi at the sampling temperature
              distributed_executor_backend="external_launcher", tensor_parallel_size=a.tp, seed=a.seed,
              **(gpu if cuda else cpu))
    if cuda:
        llm.sleep(level=2)  # its weights are sent again before every play
    return llm


def sync_weights(llm, engine, device):
    """(6) Copy the trainer's weights into the engine, one parameter at a time. Every rank takes part.

    The order matters on a GPU: weights written before the engine's memory is awake are lost. Without the iterator,
    reload_weights would read the folder on disk again and the policy would never change.
    """
    if device.type == "cuda":
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=full_weights(engine)))
    if device.type == "cuda":
        llm.wake_up(tags=["kv_cache"])
    if not llm.reset_prefix_cache():  # cached keys and values belong to the old weights
        raise RuntimeError("the engine still holds cache blocks of the old weights")


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
        return plan(a, a.context)
    rank, world, device = setup()
    tokenizer, policy, packed = load(a, device)
    database = open_database(a.database)
    tasks, val = load_tasks(a.tasks), load_tasks(a.val) if a.val else []
    engine = zero3(policy, a, world, device)
    steps = a.steps or math.ceil(a.epochs * len(tasks) / a.prompts)
    start, interrupted, began = restore(engine, a.out, a.resume, rank), Interrupt(), time.time()
    checked = False  # that the engine's weights are the trainer's
    llm = load_engine(a, device)
    if rank == 0:
        print(f"{len(tasks)} tasks, {steps} updates of {a.prompts} x {a.group} plays, {world} ranks, "
              f"{'packed' if packed else 'padded'} rows, reward {a.reward}, flags {json.dumps(vars(a))}")
    for step in range(start, steps + 1):
        clock = [time.time()]
        # (6) the engine gets the weights of `step` updates
        sync_weights(llm, engine, device)
        clock.append(time.time())
        if val and (step % a.val_every == 0 or step == steps):
            log(validate(llm, tokenizer, database, val, step, engine, rank, a), rank, a, step)
        if step == steps:
            break
        clock.append(time.time())
        # (1) (2) play and judge
        kind = reward_kind(a.reward, step / steps)
        samples, judged = play(llm, tokenizer, database, tasks, step, steps, kind, a)
        if device.type == "cuda":
            llm.sleep(level=2)
        clock.append(time.time())
        # (3) (4) (5) learn
        groups = group_advantages(samples, a)
        ramp = min(1, (step + 1) / (a.warmup + 1), (steps - step) / max(1, a.decay * steps))
        lr = engine.optimizer.param_groups[0]["lr"] = a.lr * ramp
        updates = [token_weights(part, a) for part in split(groups, a.minibatches)]
        if a.recompute:
            recompute_logps(engine, sum(updates, []), packed, rank, world, device, a)
        stats = [learn(engine, weighted, packed, rank, world, device, a) for weighted in updates]
        clock.append(time.time())

        line = describe(samples, groups) | stats[0] | {"kind": kind, "lr": lr}
        line |= timings(samples, updates, clock, judged)
        if rank == 0:
            records = [s.record | {"advantage": s.advantage} for s in samples]
            write_jsonl(Path(a.out) / "rollouts" / f"{step + 1:05d}.jsonl", records)
        log(line, rank, a, step + 1, steps)
        if not checked and line["loss_tokens"]:
            check_sync(line, device, a)
            checked = True
        last = interrupted(device, bool(a.max_hours) and time.time() - began > a.max_hours * 3600)
        if last or (a.save_every and (step + 1) % a.save_every == 0):
            save_checkpoint(engine, a.out, step + 1, rank)
        if last:
            sys.exit(f"stopped and saved after update {step + 1}; the same command with --resume goes on")
    save_model(engine, tokenizer, a.out, rank)


def play(llm, tokenizer, database, tasks, step, steps, kind, a):
    """(1) (2) A judged batch of update `step`. -> samples of all ranks, seconds of judging

    With --refill [3]: more batches until --prompts groups have unequal rewards. What is played after these is left out.
    """
    samples, judge_s = [], 0.0
    for more in range(a.refill + 1):
        batch = [tasks[i] for i in batch_of(step + more * steps, len(tasks), a.prompts, a.seed)]
        name = f"play/{step}" + f"+{more}" * (more > 0)
        played = rollout(llm, tokenizer, database, batch, name, a.group, a.temperature, 1.0, a)
        began = time.time()
        judge_all(played, database, kind)
        for s in played:
            s.query += more * a.prompts
        samples += gather(played)
        judge_s += time.time() - began
        rewards = {}
        for s in samples:
            rewards.setdefault(s.query, set()).add(s.reward)
        useful = [query for query, values in rewards.items() if len(values) > 1]
        if a.refill and len(useful) >= a.prompts:
            return [s for s in samples if s.query <= useful[a.prompts - 1]], judge_s
    return samples, judge_s


def check_sync(line, device, a):
    """Stop where engine and trainer give the same tokens different log-probabilities (a NaN counts as different)."""
    bound = a.max_dlogp or (0.05 if device.type == "cuda" else 1e-4)
    if not line["dlogp_mean"] <= bound:
        sys.exit(f"engine and trainer disagree: mean |dlogp| {line['dlogp_mean']:.1e} after the first sync, bound "
                 f"{bound:.0e}; the weights did not arrive, or raise --max-dlogp if the model's dtype explains it")


def load_tasks(path):
    """A jsonl of tasks, ours or in the published form."""
    tasks = [load_task(row) for row in read_jsonl(path)]
    if not tasks:
        sys.exit(f"{path}: holds no task; synth.py tasks writes some")
    return tasks


def validate(llm, tokenizer, database, val, step, engine, rank, a):
    """Play the validation tasks once each; a success rate above all before puts the weights in OUT/best."""
    samples = rollout(llm, tokenizer, database, val, f"val/{step}", 1, a.val_temperature, 0.95, a)
    judge_all(samples, database, "success")
    scores = [s.reward for s in gather(samples)]
    success = sum(scores) / len(scores)
    before = [row["val_success"] for row in read_jsonl(Path(a.out) / "log.jsonl") if "val_success" in row]
    dist.barrier()
    if success > max(before, default=-1):
        save_model(engine, tokenizer, Path(a.out) / "best", rank)
    return {"val_success": success}


def split(groups, n):
    """{query: samples} -> n dictionaries of as equal a number of queries as can be, each for one update."""
    names = sorted(groups)
    return [{q: groups[q] for q in names[i::n]} for i in range(n) if names[i::n]]


def gather(samples):
    """All ranks' samples, on every rank, in an order that does not depend on who finished first."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, samples)
    return sorted((s for part in parts for s in part), key=lambda s: (s.query, s.name))


def describe(samples, groups):
    """What the plays of a step looked like: means over episodes."""
    mean = lambda values: sum(values) / len(samples)
    parts = ("cs_micro", "cs_macro", "hard_micro", "hard_macro", "success")
    scores = {part: mean(s.record["score"][part] for s in samples) for part in parts}
    return {"reward": mean(s.reward for s in samples), **scores,
            "strict": mean(s.record["strict"] for s in samples), "format": mean(s.stop == "format" for s in samples),
            "overlength": mean(s.stop in OVERLENGTH for s in samples),
            "turns": mean(s.record["turns"] for s in samples), "calls": mean(s.record["calls"] for s in samples),
            "tokens": mean(len(s.ids) for s in samples), "policy_tokens": mean(sum(s.mask) for s in samples),
            "failures": mean(s.record["failures"] for s in samples),
            "uniform": sum(len({s.reward for s in g}) == 1 for g in groups.values()) / len(groups)}


def timings(samples, updates, clock, judged):
    """Seconds of each part of the step; tokens per second of play (sampled) and of learning (rows of the loss)."""
    sync, val, played, learned = (b - a for a, b in zip(clock, clock[1:]))
    play = played - judged
    return {"sync_s": sync, "val_s": val, "play_s": play, "judge_s": judged, "learn_s": learned,
            "play_tps": sum(sum(s.mask) for s in samples) / play,
            "learn_tps": sum(len(s.ids) for update in updates for s, _ in update) / learned} | gpu_gib()


def log(line, rank, a, step, steps=None):
    """One line on the screen, the same dict in log.jsonl."""
    if rank or not line:
        return
    line = {"step": step} | line
    with open(Path(a.out) / "log.jsonl", "a") as f:
        f.write(json.dumps(line) + "\n")
    if "val_success" in line:
        print(f"step {step:4d} | validation success {line['val_success']:.3f}", flush=True)
    if "reward" in line:
        print("step {step:4d}/{steps} | reward {reward:5.2f} | success {success:.2f} | strict {strict:.2f} | "
              "format {format:.2f} | over {overlength:.2f} | turns {turns:4.1f} | tokens {tokens:5.0f} | "
              "uniform {uniform:.2f} | loss {loss:+.4f} | clip {clip_low:.3f} {clip_high:.3f} | "
              "entropy {entropy:.3f} | gnorm {gnorm:5.2f} | dlogp {dlogp_mean:.1e} {dlogp_max:.1e} | lr {lr:.1e} | "
              "play {play_s:.0f}s sync {sync_s:.1f}s learn {learn_s:.0f}s".format(steps=steps, **line), flush=True)


if __name__ == "__main__":
    main()
