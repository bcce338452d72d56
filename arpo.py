"""
ARPO: GRPO whose plays fork where an observation leaves the policy unsure. Read grpo.py first.

    (1) take P queries and play each one G times with vLLM: a group. No play waits for another: once
        the world has answered a turn, the play rejoins the engine's running batch
        G/2 plays start from scratch. The others are forks: they copy a play so far and continue it.
        dE is E, the entropy of a reply's first tokens, minus the E of the play's first reply:
          paper     fork before the reply if 0.5 + w dE > 0.5 [5], which means if dE > 0
          released  fork after the next observation with probability clip(0.5 + w dE, 0, 1) [5]
    (2) the world's verdict on a play becomes its reward r, a number [1 sec. 3]
    (3) advantage A = (r - mean of the group) / (std of the group + 1e-6), one per play [2]. The
        std is the population's: it divides by G, not by G - 1
    (4) an overlength play (stopped by the context limit [1] or the turn limit, which is our choice)
        counts in that mean and std, but its tokens are left out of the loss and its denominator
        [1], unless --keep-overlength
    (5) loss = - mean over queries of ( sum over the group's policy tokens of min(w A, clip(w) A) /
        the number of those tokens ), with w = pi / pi_old, where the engine reported pi_old. What
        forks share before they part counts once in each of them: [5]'s soft estimate
    (6) copy the new weights into vLLM and go to (1)

Departs from [2] in (4), in the mean over tokens in (5) [3] and in the higher upper clip bound [3];
there is no KL term and no reference model.
[1] STAR, arXiv:2603.21972   [2] DeepSeekMath, arXiv:2402.03300   [3] DAPO, arXiv:2503.14476
[5] ARPO, arXiv:2507.19849 and its released code

Reads   a HF folder (from sft.py), tasks (from synth.py), the world's data
Writes  OUT/ (a HF folder), OUT/best/ (best on --val), OUT/log.jsonl, OUT/rollouts/<step>.jsonl,
        OUT/checkpoints/, OUT/microscope/<step>.jsonl

    torchrun --standalone --nproc_per_node 8 arpo.py --model out/sft --tasks data/rl.jsonl

Nothing below knows about travel: to train in another world, see docs/environment.md.
"""
import math
import random
import time
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import runtime
from runtime import AMOUNT, COUNT, NATURAL, PART, POSITIVE, SEED, SHARE, Help, Mistake, Parser

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden
# size, V vocabulary. A rollout is a flat list of P * G samples.
OVERLENGTH = ("turns", "context")  # the stops that (4) keeps out of the loss
MAX_DLOGP = {"cpu": 1e-4, "cuda": 0.05}  # bounds on the mean |dlogp|, for float32 and bfloat16
PROBE, TOP = 20, 10  # E counts a reply's first 20 tokens, at each the 10 likeliest [5, code]


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("files").add_argument
    add("--model", default="out/sft", help="HF folder or hub name to start from")
    add("--tasks", default="data/rl.jsonl", help="queries to play, one task per line")
    add("--val", help="tasks to validate on; the checkpoint with the highest success is kept in "
        "OUT/best")
    add("--val-every", type=COUNT, default=10, help="updates between two validations")
    add("--env", default="travel", help="the world to train in: travel, tools, or a module or file "
        "with a function open_world(args) (docs/environment.md)")
    add("--out", default="out/rl", help="folder of the model, its log, rollouts and checkpoints")
    play_flags(p.add_argument_group("play").add_argument)
    learn_flags(p.add_argument_group("learn").add_argument)
    add = runtime.trainer_flags(p, 32768)
    add("--microscope", type=NATURAL, default=0, help="N: write all tokens of every Nth update for "
        "look.report; 0: none")
    p.idle = [("val_every", "without", "val")]
    return runtime.parse_args(p)  # with the world's own flags


def play_flags(add):
    add("--prompts", type=COUNT, default=32, help="P, queries per update, all ranks together [1]")
    add("--group", type=COUNT, default=8, help="G, plays per query [1]")
    add("--temperature", type=POSITIVE, default=1.0, help="sampling temperature, also used in the "
        "loss [1]")
    add("--context", type=COUNT, default=30000, help="most tokens of a play, prompt included [1]")
    add("--max-turns", type=COUNT, default=60, help="most tool calls in a play, then an answer [1]")
    add("--turn-tokens", type=COUNT, default=8192, help="most tokens of a reply; a longer one is a "
        "format error")
    add("--concurrency", type=COUNT, default=256, help="most plays that an engine runs at a time")
    add("--gpu-memory", type=PART, default=0.6, help="fraction of a GPU that the engine may fill")


def learn_flags(add):
    add("--reward", help="one of the world's rewards, unset: its first; travel has sum, macro and "
        "success. curriculum: train with the first, then the second, then the third [1]")
    add("--epochs", type=POSITIVE, default=5, help="passes over the tasks [1]")
    add("--steps", type=NATURAL, default=0, help="number of updates; 0: set by --epochs")
    add("--lr", type=AMOUNT, default=2e-6, help="learning rate of AdamW, constant until --decay "
        "[1]. The gradient's norm is clipped at 1, betas are 0.9 and 0.999, no weight decay")
    add("--decay", type=SHARE, default=0.0, help="fraction of the updates, at the end, in which "
        "the learning rate falls linearly to 0")
    add("--clip-low", type=SHARE, default=0.2, help="clip w to at least 1 minus this [2]")
    add("--branch", default="paper", choices=["paper", "released"], help="when plays fork, see (1)")
    add("--initial", type=NATURAL, default=0, help="plays per query from scratch; 0: half of G [5]")
    add("--weight", type=AMOUNT, default=0.2, help="w in (1) [5]")
    add("--clip-high", type=AMOUNT, default=0.28, help="clip w to at most 1 plus this [3]")
    add("--loss-norm", default="group", choices=["group", "batch"], help="divide the loss by the "
        "tokens of each group and average over groups [1], or by the tokens of the batch [3]")
    add("--keep-overlength", action="store_true", help="keep overlength plays in the loss, unlike "
        "(4); this punishes endless loops")
    add("--drop-uniform", action="store_true", help="drop groups whose plays all earned the same "
        "reward: DAPO in [1]")
    add("--minibatches", type=COUNT, default=1, help="number of updates that a batch of queries is "
        "split into; 1, our choice, keeps all plays on-policy")
    add("--seed", type=SEED, default=0, help="seed of the order of the tasks and of sampling")


if __name__ == "__main__":  # what is wrong ends here, before torch is imported; so does --help
    args = runtime.run(__file__, flags)
    runtime.run(__file__, runtime.need_files, args.tasks, args.val)
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zero3  # noqa: E402

# ---------------------------------------------------------------------------------------- rollout

@dataclass
class Sample:
    """One play of one query: exactly the tokens that the engine read and sampled."""
    episode: object  # a sandbox.Episode
    group: int  # index of its query in the batch: the plays of one query are a group
    seed_name: str  # seeds the sampling: the same name gives the same tokens
    ids: list = field(default_factory=list)  # prompt, replies, observations
    mask: list = field(default_factory=list)  # 1 on the policy's tokens, 0 elsewhere
    logps: list = field(default_factory=list)  # the engine's log pi where mask is 1, 0 elsewhere
    # set after the play has ended
    stop: str = ""
    record: dict = None  # the line written to OUT/rollouts
    reward: float = 0.0
    advantage: float = 0.0
    parent: str = ""  # name of the play it was forked from, if any
    shared: int = 0  # tokens it has in common with its parent
    depth: int = 0  # turns it has in common with its parent
    entropies: list = field(default_factory=list)  # of its latest reply's first tokens
    baseline: float = None  # E of its first reply
    decisions: list = field(default_factory=list)  # (E, dE) of each decision whether to fork


def new_sample(task, group, name, world, template, args):
    """Start a play with the tokens of its prompt. A Mistake if these alone fill the context."""
    s = Sample(world.episode(task, f"failures/{name}", args), group, name)
    append(s, template.prompt(s.episode.messages))
    if len(s.ids) >= args.context:
        raise Mistake(f"task {task['id']}: its prompt has {len(s.ids)} tokens; "
                      f"raise --context above {args.context}")
    return s


def append(s, ids, logps=None):
    """Append tokens: the policy's, with their log-probabilities (mask 1), or others (mask 0)."""
    s.ids += ids
    s.mask += [int(logps is not None)] * len(ids)
    s.logps += logps or [0.0] * len(ids)


def submit(engine, s, world, template, temperature, top_p, args):
    """Ask the engine for the next reply of this play -> name of the request"""
    name = f"{s.seed_name}/{s.episode.turns}"
    runtime.add_request(engine, name, s.ids, template, world.stops, f"{args.seed}/{name}",
                        max_tokens=min(args.turn_tokens, args.context - len(s.ids)),
                        temperature=temperature, top_p=top_p, logprobs=TOP)
    return name


def take_reply(s, output, template, args):
    """Append a finished reply -> the Action that the world has to answer; None if the play ends"""
    ids = list(output.token_ids)
    reported = zip(ids, output.logprobs, strict=True)  # {token: its logprob} at each position
    append(s, ids, [at_position[token].logprob for token, at_position in reported])
    reply, closed = template.reply(ids)
    if not closed and not isinstance(output.stop_reason, str):  # hit max_tokens: no end token
        s.episode.messages.append({"role": "assistant", "content": reply})
        s.episode.stop = "context" if len(s.ids) >= args.context else "format"
        return None
    return s.episode.begin(reply)


def take_observation(s, observation, template, args):
    """Append the observation (None: the play has ended) -> whether to ask for another reply"""
    if observation is None:
        return False
    s.episode.finish(observation)
    ids = template.between(s.episode.messages[-1], closed=s.ids[-1] in template.ends)
    append(s, ids[:args.context - len(s.ids)])  # drop what exceeds the context
    if len(s.ids) >= args.context and not s.episode.stop:  # a world may have ended the play
        s.episode.stop = "context"
    return not s.episode.stop


def entropy(logprobs):
    """Entropies in nats of a reply's first tokens."""
    reported = [[token.logprob for token in likeliest.values()] for likeliest in logprobs[:PROBE]]
    return [-sum(math.exp(logp) * logp for logp in row if logp > -math.inf) for row in reported]


def branch(s, log_v, names, args):
    """(1) Decide whether to fork here -> the fork, or None. names: the query's plays to start.

    The paper probes E with a few tokens after each observation, a request per turn. Here the reply
    is the probe, and only a fork costs a request, whose prompt is in the prefix cache.
    """
    paper = args.branch == "paper"  # E is a mean; in the released code it is a sum
    now = sum(s.entropies) / log_v / (max(len(s.entropies), 1) if paper else 1)
    s.baseline = now if s.baseline is None else s.baseline
    if not names or paper and s.episode.turns == s.depth:
        return None  # no observation yet, or only the one at which its parent decided
    s.decisions.append((now, now - s.baseline))
    chance = 0.5 + args.weight * (now - s.baseline)
    coin = random.Random(f"{args.seed}/{s.seed_name}/{s.episode.turns}/fork").random()
    if chance <= (0.5 if paper else coin):
        return None
    name = names.pop(0)
    return Sample(**vars(s) | {
        "seed_name": name, "episode": s.episode.fork(f"failures/{name}"), "parent": s.seed_name,
        "ids": list(s.ids), "mask": list(s.mask), "logps": list(s.logps), "decisions": [],
        "shared": len(s.ids), "depth": s.episode.turns,
        "baseline": s.baseline if paper else None})


def unforked(query, plays, left, args):
    """The query's plays that have not started, by name, once none of its plays can fork."""
    if any(s.group == query and not s.episode.stop and s.episode.turns < args.max_turns
           for s in plays):
        return []
    names, left[query] = left[query], []
    return names


def rollout(llm, template, world, tasks, name, group, temperature, top_p, args):
    """(1) Play each task `group` times -> the samples of this engine

    All engines take the next query from one counter, so none idles while another has a queue.
    """
    engine, live, done = llm.llm_engine, {}, []
    queries = runtime.shared_counter(name, len(tasks))
    calls = runtime.tool_calls_of_rank(world.slow, len(tasks), group, args)
    start, log_v = min(args.initial or (group + 1) // 2, group), math.log(len(template.tokenizer))
    left = {}  # {query: the names of its plays that have not started}

    def queue(s):
        live[submit(engine, s, world, template, temperature, top_p, args)] = s

    while True:
        while calls.room(live) >= start and (query := next(queries, None)) is not None:
            left[query] = [f"{name}/{query}/{g}" for g in range(start, group)]
            for g in range(start):
                queue(new_sample(tasks[query], query, f"{name}/{query}/{g}", world, template, args))
        if not live and not calls:
            calls.close()
            return done
        for output in engine.step() if live else ():
            if output.finished:
                s, reply = live.pop(output.request_id), output.outputs[0]
                s.entropies = entropy(reply.logprobs)
                if fork := args.branch == "paper" and branch(s, log_v, left[s.group], args):
                    queue(fork)
                calls.start(s, s.episode, take_reply(s, reply, template, args))
        for s, observation in calls.ready(block=not live):
            if take_observation(s, observation, template, args):
                if fork := args.branch == "released" and branch(s, log_v, left[s.group], args):
                    queue(fork)
                queue(s)
            else:
                done.append(s)
                begun = [*live.values(), *calls.plays(), *done]
                for n in unforked(s.group, begun, left, args):
                    queue(new_sample(s.episode.task, s.group, n, world, template, args))


def judge_all(samples, world, reward):
    """(2) Set stop, reward and record of each sample by the world's verdict on its episode."""
    # a world may judge several at a time
    verdicts = runtime.judged(world, [s.episode for s in samples])
    for s, (_, plan, score, strict) in zip(samples, verdicts, strict=True):
        s.stop, s.reward = s.episode.stop, world.reward(score, reward)
        s.record = s.episode.record() | {
            "plan": plan, "score": score, "strict": strict, "reward": s.reward,
            "reward_name": reward}
        # samples are pickled to other ranks: drop the episode, store numbers compactly
        s.episode, s.ids, s.mask = None, array("i", s.ids), array("b", s.mask)
        s.logps = array("d", s.logps)


def reward_name(chosen, rewards, progress):
    """The reward to use after a fraction `progress` of training. chosen: --reward, rewards: the
    world's rewards.

    The curriculum goes from dense to sparse rewards: the world's first kind for 2/5 of training,
    its second for 2/5, then its third [1 sec. 3].
    """
    if chosen != "curriculum":
        return chosen or rewards[0]
    return rewards[0] if progress < 2 / 5 else rewards[1] if progress < 4 / 5 else rewards[2]


# --------------------------------------------------------------------------------------- learning

def by_group(samples):
    """Samples -> {group: its samples}"""
    groups = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    return groups


def uniform(group):
    """Whether all plays of a group earned the same reward."""
    return len({s.reward for s in group}) == 1


def group_advantages(samples):
    """(3) (4) Set advantages; overlength plays count in mean and std -> {group: its samples}"""
    groups = by_group(samples)
    for group in groups.values():
        rewards = torch.tensor([s.reward for s in group], dtype=torch.float64)
        rewards -= rewards[0].clone()  # makes the advantages of equal rewards exactly 0
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        for s, advantage in zip(group, advantages.tolist(), strict=True):
            s.advantage = advantage
    return groups


def token_weights(groups, args):
    """(4) (5) The weight of each policy token in the loss -> [(sample, weight)], for the samples in
    the loss

    --loss-norm group: 1 / tokens of its group / number of groups. batch: 1 / tokens of the batch.
    """
    kept = [[s for s in group if args.keep_overlength or s.stop not in OVERLENGTH]
            for group in groups.values()]
    tokens = [sum(sum(s.mask) for s in group) for group in kept]
    n_groups, n_tokens = sum(n > 0 for n in tokens), sum(tokens)
    if not n_tokens:  # all plays are overlength: weigh 0, so that engine and trainer are compared
        return [(s, 0.0) for group in groups.values() for s in group]
    # A group of equal rewards has no gradient: skip it to save work. If all groups are like that,
    # keep them, for the same comparison. A loss with a term that does not vanish where the
    # advantages do (KL, say) must keep all groups, here and in learn's has_gradient.
    has_gradient = [any(s.advantage for s in group) for group in kept]
    in_loss = []
    for group, n, useful in zip(kept, tokens, has_gradient, strict=True):
        if n and (useful or not any(has_gradient)):  # n is 0 if all plays are overlength
            weight = 1 / n_tokens if args.loss_norm == "batch" else 1 / n / n_groups
            in_loss += [(s, weight) for s in group]
    return in_loss


def policy_loss(logps, old_logps, advantage, weight, counts, args):
    """(5) The clipped loss of a micro-batch's tokens, four arguments (N,) -> loss, clipped

    weight: 1 / denominator. counts: the number of tokens of each play, for losses of whole plays.
    clipped: (N,), -1 where w is clipped below, 1 above, else 0.
    """
    w = torch.exp((logps - old_logps).clamp(max=20))  # without the bound, inf * 0 would be NaN
    bounded = w.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss = -(torch.min(w * advantage, bounded * advantage) * weight).sum()
    with torch.no_grad():
        high = (w > 1 + args.clip_high) & (advantage > 0)
        low = (w < 1 - args.clip_low) & (advantage < 0)
    return loss, high.float() - low.float()


def learning_rate(step, steps, args):
    """Constant, then falling linearly to 0 over the last --decay of all updates."""
    return args.lr * min(1, (steps - step) / max(1, args.decay * steps))


def learn(trainer, in_loss, packed, rank, ranks, device, args, microscope=None):
    """(5) One update -> statistics of its policy tokens. in_loss: [(sample, weight)], all ranks.
    microscope: a list to fill for --microscope, or None."""
    lengths, micro_stats = [len(s.ids) for s, _ in in_loss], []
    micros = zero3.micro_batches(lengths, ranks, args.pack_tokens, packed)[rank]
    for micro in micros:
        batch = [in_loss[i] for i in micro]
        rows = zero3.collate([s for s, _ in batch], packed, device)
        logps, entropy = trainer(*rows, args.temperature)
        loss = logps.sum() * 0  # a rank without work still runs a forward, or ZeRO-3 hangs
        if batch:
            old_logps, advantage, weight, counts = per_token(batch, device)
            loss, clipped = policy_loss(logps, old_logps, advantage, weight, counts, args)
            gap = (logps.detach() - old_logps).abs()
            _, positions, keep = rows
            quarter = 4 * positions[keep] // args.context
            micro_stats.append((loss.detach(), entropy.detach(), gap, clipped, quarter))
            if microscope is not None:
                microscope.append((batch, logps.detach(), old_logps, advantage, entropy, clipped))
        trainer.backward(loss * ranks)  # DeepSpeed averages over ranks, the loss is a sum
    # every rank agrees on this: without a gradient skip the step, because AdamW's momentum would
    # still move the weights
    has_gradient = any(s.advantage * weight for s, weight in in_loss)
    if has_gradient:
        trainer.step()
    gnorm = float(trainer.get_global_grad_norm() or 0) if has_gradient else 0.0
    return statistics(micro_stats, device) | {"gnorm": gnorm}


def per_token(batch, device):
    """[(sample, weight)] -> of each policy token: engine's logp, advantage, weight, (N,) each; and
    the number of tokens of each sample"""
    mask = np.concatenate([s.mask for s, _ in batch]).astype(bool)
    logps = torch.from_numpy(np.concatenate([s.logps for s, _ in batch])[mask]).float()
    counts = torch.tensor([sum(s.mask) for s, _ in batch])
    advantage = torch.tensor([s.advantage for s, _ in batch]).repeat_interleave(counts)
    weight = torch.tensor([weight for _, weight in batch]).repeat_interleave(counts)
    return logps.to(device), advantage.to(device), weight.to(device), counts


def statistics(micro_stats, device):
    """Means over all policy tokens of all ranks, for the log. micro_stats: [(loss, entropy,
    |dlogp|, clipped, quarter)] of the micro-batches, loss a number and the others (N,). quarter: 0
    to 3, the part of the context a token lies in: a gap that grows with depth hides in the mean."""
    sums, worst = torch.zeros(6, device=device), torch.zeros((), device=device)
    depth = torch.zeros(2, 4, device=device)  # |dlogp| and number of the tokens of each quarter
    for loss, entropy, gap, clipped, quarter in micro_stats:
        sums += torch.stack([loss, entropy.sum(), gap.sum(), (clipped < 0).sum(),
                             (clipped > 0).sum(), torch.ones_like(gap).sum()])
        worst = torch.maximum(worst, gap.max())
        depth += torch.stack([quarter.bincount(gap, 4), quarter.bincount(minlength=4)])
    dist.all_reduce(sums)
    dist.all_reduce(depth)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    loss, *sums, n = sums.tolist()
    entropy, gap, low, high = (total / max(n, 1) for total in sums)
    return {"loss": loss, "clip_low": low, "clip_high": high, "entropy": entropy,
            "dlogp_mean": gap, "dlogp_max": worst.item(), "loss_tokens": int(n)} | {
                f"dlogp_{i}": gap / n for i, (gap, n) in enumerate(depth.T.tolist(), 1) if n}


# ------------------------------------------------------------------------------------------- main

def main():
    args = flags()
    if args.microscope:  # a copy of this file may lack the folder look/
        from look.microscope import write_tokens
    world, tasks, val, template = read_inputs(args)
    rank, ranks, device = zero3.setup()
    runtime.lock_folder(args.out)
    policy, packed = zero3.load(args, template, device)
    trainer = zero3.shard(policy, args, device)
    steps = args.steps or math.ceil(args.epochs * len(tasks) / args.prompts)
    start = zero3.restore(trainer, args)
    interrupted = zero3.watch_sigterm()
    llm = zero3.load_engine(args, device)
    runtime.say(f"{len(tasks)} tasks, {steps} updates of {args.prompts} x {args.group} plays, "
                f"{ranks} ranks, {'packed' if packed else 'padded'} rows")
    for step in range(start, steps + 1):
        clock = [time.time()]
        # (6) the engine gets the weights after `step` updates
        zero3.sync_weights(llm, trainer, device)
        zero3.check_weights(llm, trainer)
        clock.append(time.time())
        if val and (step % args.val_every == 0 or step == steps):
            validate(llm, template, world, val, step, trainer, args)
        if step == steps:
            break
        clock.append(time.time())
        # (1) (2) play and judge
        reward = reward_name(args.reward, world.rewards, step / steps)
        batch = [tasks[i] for i in zero3.batch_of(step, len(tasks), args.prompts, args.seed)]
        played = rollout(llm, template, world, batch, f"play/{step}", args.group, args.temperature,
                         1.0, args)
        dist.barrier()  # play_s is the time of the slowest engine
        clock.append(time.time())
        judge_all(played, world, reward)
        samples = gather(played)
        if device.type == "cuda":
            llm.sleep(level=2)
        clock.append(time.time())
        # (3) (4) (5) learn
        groups = group_advantages(samples)
        lr = trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        updates = [token_weights(part, args) for part in split(groups, args)]
        microscope = [] if args.microscope and (step + 1) % args.microscope == 0 else None
        stats = [learn(trainer, in_loss, packed, rank, ranks, device, args, microscope)
                 for in_loss in updates]
        clock.append(time.time())
        for update in stats:
            zero3.check_finite(args.out, step + 1, loss=update["loss"], gnorm=update["gnorm"])
        line = {"step": step + 1} | describe(samples, groups, world.logged) | stats[0]
        line |= {"minibatches": stats[1:], "reward_name": reward, "lr": lr}
        line |= timings(samples, sum(updates, []), clock)
        if microscope is not None:
            write_tokens(f"{args.out}/microscope/{step + 1:05d}.jsonl", samples, microscope,
                         template, args)
        if rank == 0:
            records = [s.record | {"advantage": s.advantage} for s in samples]
            runtime.write_jsonl(f"{args.out}/rollouts/{step + 1:05d}.jsonl", records)
            log(line, args, steps)
        check_sync(line, device)
        zero3.save_checkpoint(trainer, args, step + 1, interrupted(device))
    zero3.save_model(trainer, template, args.out)
    runtime.say(f"{args.out}: done. Next: python evaluate.py --model {args.out} --tasks TASKS")
    llm.llm_engine.engine_core.shutdown()  # also ends the process group
    world.close()


def read_inputs(args):
    """World, tasks, validation tasks, template. Checks every input before the engines start."""
    world = runtime.open_world(args)
    rewards = [*world.rewards, *["curriculum"] * (len(world.rewards) == 3)]
    if args.reward and args.reward not in rewards:
        raise Mistake(f"--reward {args.reward}: the rewards of this world are {', '.join(rewards)}")
    tasks = runtime.load_tasks(args.tasks, world.load_task)
    val = runtime.load_tasks(args.val, world.load_task) if args.val else []
    template = runtime.load_template(args.model)
    for task in tasks + val:  # raises if a prompt fills the context; record() closes a plain class
        new_sample(task, 0, "", world, template, args).episode.record()
    # a reply that answers, so that a slip in the world shows now
    s = new_sample(tasks[0], 0, "check", world, template, args)
    s.episode.fork("check")
    s.episode.begin("<think>.</think><answer>.</answer>")
    s.episode.stop = s.episode.stop or "turns"
    judge_all([s], world, world.rewards[0])
    return world, tasks, val, template


def check_sync(line, device):
    """Stop if engine and trainer disagree on the log-probabilities of the same tokens."""
    bound, gap = MAX_DLOGP[device.type], line["dlogp_mean"]
    if not gap <= bound:  # also stops at NaN
        raise Mistake(f"update {line['step']}: engine and trainer disagree on the sampled tokens: "
                      f"mean |dlogp| is {gap:.1e}, more than {bound:.0e}. Did the engine cut the "
                      "distribution (min_p, top_p, top_k) or use another temperature? If only its "
                      "precision differs, raise MAX_DLOGP in this script")


def validate(llm, template, world, val, step, trainer, args):
    """Play each validation task once; keep the model with the highest success in OUT/best."""
    samples = rollout(llm, template, world, val, f"val/{step}", 1, 0.6, 0.95, args)  # as in [1]
    judge_all(samples, world, world.rewards[0])
    scores = [s.record["score"]["success"] for s in gather(samples)]
    success, file = sum(scores) / len(scores), Path(args.out) / "log.jsonl"
    before = [row["val_success"] for row in runtime.read_jsonl(file) if "val_success" in row]
    dist.barrier()  # every rank has read the log before rank 0 appends to it
    if success > max(before, default=-1):
        zero3.save_model(trainer, template, Path(args.out) / "best")
    runtime.say(f"step {step:4d} | validation success {success:.3f}")
    if runtime.rank() == 0:
        runtime.write_log({"step": step, "val_success": success}, args)


def split(groups, args):
    """Split {group: samples} into --minibatches parts of nearly equal size, one for each update.

    --drop-uniform: queries whose plays all earned the same reward are left out; if all are like
    that, one stays, so that engine and trainer are compared.
    """
    kept = [group for group in sorted(groups)
            if not (args.drop_uniform and uniform(groups[group]))] or sorted(groups)[:1]
    return [{group: groups[group] for group in kept[i :: args.minibatches]}
            for i in range(max(1, min(args.minibatches, len(kept))))]


def gather(samples):
    """The samples of all ranks, on every rank, in an order that does not depend on timing."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, samples)
    return sorted((s for part in parts for s in part), key=lambda s: (s.group, s.seed_name))


def sampled(s):
    """Number of tokens that the engine sampled for this play."""
    return sum(s.mask[s.shared:])


def describe(samples, groups, logged):
    """The plays of a step in numbers: means over plays, and the fraction of uniform groups."""
    rows = [{"reward": s.reward} | {name: s.record["score"][name] for name in logged} | {
        "strict": s.record["strict"], "format": s.stop == "format",
        "overlength": s.stop in OVERLENGTH, "turns": s.record["turns"], "calls": s.record["calls"],
        "tokens": len(s.ids), "policy_tokens": sampled(s), "failures": s.record["failures"]}
            for s in samples]
    means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    decided = [pair for s in samples for pair in s.decisions] or [(0.0, 0.0)]
    after, rise = (sum(values) / len(decided) for values in zip(*decided, strict=True))
    forks = [s for s in samples if s.parent]
    means |= {"forks": len(forks) / len(groups), "entropy_after": after, "entropy_rise": rise}
    return means | {"uniform": sum(map(uniform, groups.values())) / len(groups)}


def timings(samples, in_loss, clock):
    """Seconds of each part of a step, and tokens per second of playing and of learning."""
    sync, val, play, judge, learned = (end - start for start, end in pairwise(clock))
    return {"sync_s": sync, "val_s": val, "play_s": play, "judge_s": judge, "learn_s": learned,
            "play_tps": sum(map(sampled, samples)) / play,
            "learn_tps": sum(len(s.ids) for s, _ in in_loss) / learned}


def log(line, args, steps):
    """Print one line and append all numbers to log.jsonl."""
    runtime.write_log(line, args)
    print("step {step:4d}/{steps} | reward {reward:5.2f} | success {success:.2f} | strict "
          "{strict:.2f} | format {format:.2f} | over {overlength:.2f} | turns {turns:4.1f} | "
          "tokens {tokens:5.0f} | uniform {uniform:.2f} | loss {loss:+.4f} | clip {clip_low:.3f} "
          "{clip_high:.3f} | entropy {entropy:.3f} | gnorm {gnorm:5.2f} | dlogp {dlogp_mean:.1e} "
          "{dlogp_max:.1e} | lr {lr:.1e} | play {play_s:.0f}s sync {sync_s:.1f}s "
          "learn {learn_s:.0f}s".format(steps=steps, **line), flush=True)


if __name__ == "__main__":
    runtime.run_ranks(main)
