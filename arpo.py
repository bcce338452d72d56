"""
ARPO: GRPO whose plays fork where an observation leaves the policy unsure. Read grpo.py first.

    (1) take P queries and play each one G times with vLLM: a group. No play waits for another: once
        the world has answered a turn, the play rejoins the engine's running batch
        G/2 plays start from scratch. The others are forks: they copy a play so far and continue it.
        dE is E, the entropy of a reply's first tokens, minus the E of the play's first reply:
          paper     fork before the reply if 0.5 + w dE > 0.5 [5], which means if dE > 0
          released  fork after the next observation with probability clip(0.5 + w dE, 0, 1) [5]
    (2) the world's verdict on a play becomes its reward r, a number [1 sec. 3]
    (3) advantage A = (r - mean of the group) / (std of the group + 1e-6), one per play [2]
    (4) an overlength play (stopped by the context limit [1] or the turn limit, which is our choice)
        counts in that mean and std, but its tokens are left out of the loss and its denominator
        [1], unless --keep-overlength
    (5) loss = - mean over queries of ( sum over the group's policy tokens of min(w A, clip(w) A) /
        the number of those tokens ), with w = pi / pi_old, where the engine reported pi_old
    (6) copy the new weights into vLLM and go to (1)
    (7) with --stretch K, no update waits for its longest play [4]. Every update begins P new
        queries. A play that has sampled K tokens in an update pauses after its reply, and resumes
        in the next update under the new weights. A group enters the loss once all its plays have
        ended. Every token keeps the pi_old of the weights that sampled it, so w is exact. A play
        pauses by its number of tokens, never by the clock, so the same seed gives the same run on
        any number of ranks

Departs from [2] in (4), in the mean over tokens in (5) [3] and in the higher upper clip bound [3];
there is no KL term and no reference model.
[1] STAR, arXiv:2603.21972   [2] DeepSeekMath, arXiv:2402.03300   [3] DAPO, arXiv:2503.14476
[4] partial rollouts: Kimi k1.5, arXiv:2501.12599; complete groups only: Agent Lightning 1.0
[5] ARPO, arXiv:2507.19849 and its released code   [6] AEPO, arXiv:2510.14545

Reads   a HF folder (from sft.py), tasks (from synth.py), the world's data
Writes  OUT/ (a HF folder), OUT/best/ (best on --val), OUT/log.jsonl, OUT/rollouts/<step>.jsonl,
        OUT/checkpoints/, OUT/microscope/<step>.jsonl

    torchrun --standalone --nproc_per_node 8 arpo.py --model out/sft --tasks data/rl.jsonl

Nothing below knows about travel: to train in another world, see docs/environment.md.
"""
import datetime
import logging
import math
import os
import random
import sys
import time
import warnings
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import count, pairwise, zip_longest
from pathlib import Path

try:
    import runtime  # noqa: I001, first: it reports Ctrl-C while torch loads
    import torch
    import torch.distributed as dist

    from runtime import (
        AMOUNT,
        COUNT,
        NATURAL,
        PART,
        POSITIVE,
        SEED,
        SHARE,
        Help,
        Parser,
        bounded,
    )
    from sandbox import Episode
except ModuleNotFoundError as error:
    sys.exit(f"{error}. {Path(__file__).name} needs runtime.py and sandbox.py beside it, and the "
             "packages of requirements.txt: type `. .venv/bin/activate`")

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden
# size, V vocabulary. A rollout is a flat list of P * G samples.
OVERLENGTH = ("turns", "context")  # the stops that (4) keeps out of the loss
NOT_SAMPLED = 1.0  # no log pi is positive: marks the tools' tokens that --train-results trains on
MAX_DLOGP = {"cpu": 1e-4, "cuda": 0.05}  # bounds on the mean |dlogp|, for float32 and bfloat16
PROBE, TOP = 20, 10  # E counts a reply's first 20 tokens, at each the 10 likeliest [5, code]
LOGITS = 30_000_000  # the loss computes at most this many logits at a time (120 MB in float32)


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("files").add_argument
    add("--model", default="out/sft", help="HF folder or hub name to start from")
    add("--tasks", default="data/rl.jsonl", help="queries to play, one task per line")
    add("--val", help="tasks to validate on; the checkpoint with the highest success is kept in "
        "OUT/best")
    add("--env", default="travel", help="the world to train in: travel, tools, or a module or file "
        "with a function open_world(args) (docs/environment.md)")
    add("--out", default="out/rl", help="folder of the model, its log, rollouts and checkpoints")
    play_flags(p.add_argument_group("play").add_argument)
    learn_flags(p.add_argument_group("learn").add_argument)
    machine_flags(p)
    args = runtime.parse_args(p)  # with the world's own flags
    args.recompute |= args.train_results  # for tokens of tools the engine reports no pi_old
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.refill and not args.drop_uniform:
        p.error("--refill replaces the groups that --drop-uniform drops: add --drop-uniform")
    if args.refill and args.stretch:
        p.error("--refill needs groups that end in one update, --stretch splits them: drop one")
    if args.tis_cap and not args.recompute:
        p.error("--tis-cap uses the log-probabilities of --recompute: add --recompute")
    if args.train_results and args.entropy_advantage:
        p.error("--entropy-advantage: the tokens of --train-results have no entropy; drop one flag")
    if args.stretch and args.recompute and not args.tis_cap:
        p.error("--stretch trains on tokens that earlier weights sampled, and --recompute takes "
                "the current weights' pi_old for them: add --tis-cap 2, or drop one")
    if ranks % args.tp:
        p.error(f"--tp {args.tp} does not divide {ranks} ranks into engines")
    if args.tp > 1:  # the ranks of an engine share memory, which expandable segments do not allow
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    return args


def play_flags(add):
    add("--prompts", type=COUNT, default=32, help="P, queries per update, all ranks together [1]")
    add("--group", type=bounded(int, 2), default=8, help="G, plays per query [1]")
    add("--temperature", type=POSITIVE, default=1.0, help="sampling temperature, also used in the "
        "loss [1]")
    add("--context", type=COUNT, default=30000, help="most tokens of a play, prompt included [1]")
    add("--max-turns", type=COUNT, default=60, help="most tool calls in a play, then an answer [1]")
    add("--turn-tokens", type=COUNT, default=8192, help="most tokens of a reply; a longer one is a "
        "format error")
    add("--concurrency", type=COUNT, default=256, help="most plays that an engine runs at a time")
    add("--tp", type=COUNT, default=1, help="ranks that share one engine (tensor parallelism)")
    add("--stretch", type=NATURAL, default=0, help="K: a play that has sampled K tokens in an "
        "update pauses after its reply until the next one (7); 0: every play ends in its update")
    add("--branch", default="paper", choices=["paper", "released"], help="when plays fork, see (1)")
    add("--initial", type=NATURAL, default=0, help="plays per query from scratch; 0: half of G [5]")
    add("--weight", type=AMOUNT, default=0.2, help="w in (1), for --branch released [5]")
    add("--branch-penalty", type=AMOUNT, default=0.0, help="chance lost per fork in a row [6]")


def learn_flags(add):
    add("--reward", help="one of the world's rewards, unset: its first; travel has sum, macro and "
        "success. curriculum: train with the first, then the second, then the third [1]")
    add("--epochs", type=POSITIVE, default=5, help="passes over the tasks [1]")
    add("--steps", type=NATURAL, default=0, help="number of updates; 0: set by --epochs")
    add("--lr", type=AMOUNT, default=2e-6, help="learning rate, constant until --decay [1]")
    add("--decay", type=SHARE, default=0.0, help="fraction of the updates, at the end, in which "
        "the learning rate falls linearly to 0")
    add("--clip-low", type=SHARE, default=0.2, help="clip w to at least 1 minus this [2]")
    add("--clip-high", type=AMOUNT, default=0.28, help="clip w to at most 1 plus this [3]")
    add("--loss-norm", default="group", choices=["group", "batch"], help="divide the loss by the "
        "tokens of each group and average over groups [1], or by the tokens of the batch [3]")
    add("--keep-gradient", action="store_true", help="keep gradients of tokens clipped above [6]")
    add("--entropy-advantage", type=AMOUNT, default=0.0, help="a: multiply the advantage of each "
        "token by 1 + a z, where z is its entropy, standardised over the update [6]")
    add("--keep-overlength", action="store_true", help="keep overlength plays in the loss, unlike "
        "(4); this punishes endless loops")
    add("--drop-uniform", action="store_true", help="drop groups whose plays all earned the same "
        "reward: DAPO in [1]")
    add("--refill", type=NATURAL, default=0, help="with --drop-uniform: play up to this many extra "
        "batches, until --prompts groups have unequal rewards [3]")
    add("--minibatches", type=COUNT, default=1, help="number of updates that a batch of queries is "
        "split into; 1, our choice, keeps all plays on-policy")
    add("--recompute", action="store_true", help="compute pi_old with a forward of the trainer "
        "instead of taking it from the engine")
    add("--tis-cap", type=AMOUNT, default=0.0, help="with --recompute: weight each token by "
        "min(pi_trainer / pi_engine, this); 0: off")
    add("--train-results", action="store_true", help="also train on the tools' output, for "
        "comparison; implies --recompute")
    add("--seed", type=SEED, default=0, help="seed of the order of the tasks and of sampling")


def machine_flags(p):
    add = p.add_argument_group("memory (python -m look.memory grpo estimates it)").add_argument
    add("--pack-tokens", type=COUNT, default=32768, help="most tokens of a micro-batch, padding "
        "included; a longer play is a micro-batch of its own")
    add("--no-checkpointing", type=SHARE, nargs="?", const=1.0, default=0.0, metavar="SHARE",
        help="keep the activations of this share of the layers (of all without SHARE) instead of "
        "recomputing them: faster, but needs more memory")
    add("--offload", action="store_true", help="run AdamW on the CPU and keep its states in the "
        "host's memory: the same updates, slower")
    add("--lora", type=COUNT, default=0, metavar="R", help="train adapters of rank R at all linear "
        "layers instead of all weights; use about 10 times the --lr (runtime.py, add_adapters)")
    add("--gpu-memory", type=PART, default=0.6, help="fraction of a GPU that the engine may fill")
    add = p.add_argument_group("running").add_argument
    add("--val-every", type=COUNT, default=10, help="updates between two validations")
    add("--save-every", type=NATURAL, default=0, help="updates between two checkpoints; 0: none")
    add("--microscope", type=NATURAL, default=0, help="N: write all tokens of every Nth update for "
        "the report; 0: never")
    add("--resume", action="store_true", help="resume from the last checkpoint in OUT, if any")
    add("--track", type=runtime.tracker, metavar="TOOL", help="also log to wandb, tensorboard or "
        "trackio")


# ---------------------------------------------------------------------------------------- rollout

@dataclass
class Sample:
    """One play of one query: exactly the tokens that the engine read and sampled."""
    episode: Episode
    query: int  # index of its group in the step
    name: str  # seeds the sampling: the same name gives the same tokens
    ids: list = field(default_factory=list)  # prompt, replies, observations
    mask: list = field(default_factory=list)  # 1 on the policy's tokens, 0 elsewhere
    logps: list = field(default_factory=list)  # the engine's log pi where mask is 1, 0 elsewhere
    starts: list = field(default_factory=lambda: [0])  # len(ids) at the start of each update
    parent: str = ""  # name of the play it was forked from, if any
    shared: int = 0  # tokens it has in common with its parent
    depth: int = 0  # turns it has in common with its parent
    streak: int = 0  # how many of its latest decisions in a row were to fork
    reply_entropies: list = field(default_factory=list)  # entropy() of its latest reply
    baseline: float = None  # E of its first reply
    decisions: list = field(default_factory=list)  # (E, dE) of each decision whether to fork
    entropies: list = field(default_factory=list)  # reply_entropies of all its replies
    gains: torch.Tensor = None  # with --entropy-advantage: factor on each policy token's advantage
    # set after the play has ended
    stop: str = ""
    record: dict = None  # the line written to OUT/rollouts
    reward: float = 0.0
    advantage: float = 0.0
    old_logps: torch.Tensor = None  # with --recompute: the trainer's log pi of the policy tokens


def new_sample(task, query, name, world, template, args):
    """Start a play with the tokens of its prompt. ValueError if these alone fill the context."""
    s = Sample(world.episode(task, f"failures/{name}", args), query, name)
    append(s, template.prompt(s.episode.messages))
    if len(s.ids) >= args.context:
        raise ValueError(f"task {task['id']}: its prompt has {len(s.ids)} tokens; "
                         f"raise --context above {args.context}")
    return s


def append(s, ids, logps=None):
    """Append tokens: the policy's, with their log-probabilities (mask 1), or others (mask 0)."""
    s.ids += ids
    s.mask += [int(logps is not None)] * len(ids)
    s.logps += logps or [0.0] * len(ids)


def submit(engine, s, world, template, temperature, top_p, args):
    """Ask the engine for the next reply of this play -> name of the request"""
    name = f"{s.name}/{s.episode.turns}"
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
    ids = ids[:args.context - len(s.ids)]  # drop what exceeds the context
    s.episode.observation_tokens = len(ids)  # for worlds that record the length
    append(s, ids, [NOT_SAMPLED] * len(ids) if args.train_results else None)
    if len(s.ids) >= args.context:
        s.episode.stop = "context"
    return not s.episode.stop


def entropy(logprobs, args):
    """Entropies in nats of a reply's first tokens, with --entropy-advantage of all its tokens."""
    positions = logprobs if args.entropy_advantage else logprobs[:PROBE]
    reported = [[token.logprob for token in likeliest.values()] for likeliest in positions]
    return [-sum(math.exp(logp) * logp for logp in row if logp > -math.inf) for row in reported]


def branch(s, log_v, names, args):
    """(1) Decide whether to fork here -> the fork, or None. names: the query's plays to start.

    The paper probes E with a few tokens after each observation, a request per turn. Here the reply
    is the probe, and only a fork costs a request, whose prompt is in the prefix cache.
    """
    probe, paper = s.reply_entropies[:PROBE], args.branch == "paper"
    now = sum(probe) / log_v / (max(len(probe), 1) if paper else 1)  # the released code sums up
    s.baseline = now if s.baseline is None else s.baseline
    if not names or paper and s.episode.turns == s.depth:
        return None  # no observation yet, or only the one at which its parent decided
    s.decisions.append((now, now - s.baseline))
    chance = (0.5 + args.weight * (now - s.baseline)) * max(0.0, 1 - args.branch_penalty * s.streak)
    coin = random.Random(f"{args.seed}/{s.name}/{s.episode.turns}/fork").random()
    if chance <= (0.5 if paper else coin):
        s.streak = 0
        return None
    s.streak += 1
    name = names.pop(0)
    return Sample(**vars(s) | {
        "name": name, "episode": s.episode.fork(f"failures/{name}"), "parent": s.name,
        "ids": list(s.ids), "mask": list(s.mask), "logps": list(s.logps), "decisions": [],
        "starts": list(s.starts), "entropies": list(s.entropies), "shared": len(s.ids),
        "depth": s.episode.turns, "baseline": s.baseline if paper else None})


def unforked(query, plays, left, args):
    """The query's plays that have not started, by name, once none of its plays can fork."""
    if any(s.query == query and not s.episode.stop and s.episode.turns < args.max_turns
           for s in plays):
        return []
    names, left[query] = left[query], []
    return names


def rollout(llm, template, world, tasks, name, group, temperature, top_p, args, carried=None,
            stretch=0):
    """(1) Play each task `group` times -> the samples of this engine, in complete groups

    All engines take the next query from one counter, so none idles while another has a queue.
    carried: (7) the plays of unfinished groups from the last update, which resume first; on return
    the list holds those for the next update. stretch: tokens after which a play pauses; 0: never.
    """
    engine, live, carried = llm.llm_engine, {}, [] if carried is None else carried
    done = [s for s in carried if s.episode.stop]
    resuming = [s for s in carried if not s.episode.stop]
    start, log_v = min(args.initial or (group + 1) // 2, group), math.log(len(template.tokenizer))
    begun = {s.name for s in carried}
    left = {s.query: [n for g in range(group)
                      if (n := f"{s.name.rpartition('/')[0]}/{g}") not in begun] for s in carried}
    queries = runtime.shared_counter(name, len(tasks), args)
    calls = runtime.open_calls(world.slow, len(tasks), group, args, len(resuming))

    def queue(s):
        if stretch and ages(s)[0] >= stretch:
            done.append(s)  # (7) it pauses
        else:
            live[submit(engine, s, world, template, temperature, top_p, args)] = s

    while True:
        while resuming and calls.free(live) > 0:
            queue(resuming.pop(0))
        while calls.free(live) >= start and (query := next(queries, None)) is not None:
            left[query] = [f"{name}/{query}/{g}" for g in range(start, group)]
            for g in range(start):
                queue(new_sample(tasks[query], query, f"{name}/{query}/{g}", world, template, args))
        if not live and not calls:
            calls.close()
            finished = take_finished_groups(done, group, carried)
            return finished if runtime.is_tp_leader(args) else []  # with --tp, one rank reports
        for output in engine.step() if live else ():
            if output.finished:
                s, reply = live.pop(output.request_id), output.outputs[0]
                s.reply_entropies = entropy(reply.logprobs, args)
                if fork := args.branch == "paper" and branch(s, log_v, left[s.query], args):
                    queue(fork)
                s.entropies += s.reply_entropies
                calls.start(s, s.episode, take_reply(s, reply, template, args))
        for s, observation in calls.ready(block=not live):
            if take_observation(s, observation, template, args):
                if fork := args.branch == "released" and branch(s, log_v, left[s.query], args):
                    queue(fork)
                queue(s)
            else:
                done.append(s)
                begun = [*live.values(), *calls.plays(), *resuming, *done]
                for n in unforked(s.query, begun, left, args):
                    queue(new_sample(s.episode.task, s.query, n, world, template, args))


def take_finished_groups(samples, group, carried):
    """(7) The samples of groups whose plays have all ended; `carried` then holds the others."""
    finished, carried[:] = [], []
    for plays in by_query(sorted(samples, key=lambda s: s.name)).values():
        ended = len(plays) == group and all(s.episode.stop for s in plays)
        (finished if ended else carried).extend(plays)
    return finished


def judge_all(samples, world, kind):
    """(2) Set stop, reward and record of each sample by the world's verdict on its episode."""
    world.prepare([s.episode for s in samples])  # a world may read all answers at once
    for s in samples:
        plan, score, strict = world.verdict(s.episode)
        s.stop, s.reward = s.episode.stop, world.reward(score, kind)
        s.record = s.episode.record() | {
            "plan": plan, "score": score, "strict": strict, "reward": s.reward, "kind": kind}
        # samples are pickled to other ranks: drop the episode, store numbers compactly
        s.episode, s.ids, s.mask = None, array("i", s.ids), array("b", s.mask)
        s.logps = array("d", s.logps)


def reward_kind(kind, kinds, progress):
    """The reward to use after a fraction `progress` of training.

    The curriculum goes from dense to sparse rewards: the world's first kind for 2/5 of training,
    its second for 2/5, then its third [1 sec. 3].
    """
    if kind != "curriculum":
        return kind or kinds[0]
    return kinds[0] if progress < 2 / 5 else kinds[1] if progress < 4 / 5 else kinds[2]


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

def by_query(samples):
    """Samples -> {query: its group of samples}"""
    groups = {}
    for s in samples:
        groups.setdefault(s.query, []).append(s)
    return groups


def uniform(group):
    """Whether all plays of a group earned the same reward."""
    return len({s.reward for s in group}) == 1


def group_advantages(samples):
    """(3) (4) Set advantages; overlength plays count in mean and std -> {query: its samples}"""
    groups = by_query(samples)
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
    set_gains(sum(kept, []), args)
    tokens = [sum(sum(s.mask) for s in group) for group in kept]
    n_groups, n_tokens = sum(n > 0 for n in tokens), sum(tokens)
    # A group of equal rewards has no gradient: skip it to save work. If all groups are like that,
    # keep them, so that the log still compares engine and trainer.
    has_gradient = [any(s.advantage for s in group) for group in kept]
    weighted = []
    for group, n, useful in zip(kept, tokens, has_gradient, strict=True):
        if n and (useful or not any(has_gradient)):  # n is 0 if all plays are overlength
            weight = 1 / n_tokens if args.loss_norm == "batch" else 1 / n / n_groups
            weighted += [(s, weight) for s in group]
    return weighted


def set_gains(samples, args):
    """--entropy-advantage: set the gains of all samples in the loss [6]."""
    entropies = torch.tensor([h for s in samples for h in s.entropies])
    for s in samples if args.entropy_advantage else ():
        z = (torch.tensor(s.entropies) - entropies.mean()) / (entropies.std(correction=0) + 1e-6)
        s.gains = 1 + args.entropy_advantage * z


def policy_loss(logps, old_logps, advantage, weight, args):
    """(5) The clipped loss of a micro-batch's tokens, all arguments (N,) -> loss, side

    weight: 1 / denominator. side: (N,), -1 where w is clipped below, 1 above, else 0.
    """
    w = torch.exp((logps - old_logps).clamp(max=20))  # without the bound, inf * 0 would be NaN
    clipped = w.clamp(1 - args.clip_low, 1 + args.clip_high)
    if args.keep_gradient:  # the value stays the same; the gradient is that of w at the bound
        clipped = clipped + (w > 1 + args.clip_high) * clipped.detach() * (logps - logps.detach())
    loss = -(torch.min(w * advantage, clipped * advantage) * weight).sum()
    with torch.no_grad():
        high = (w > 1 + args.clip_high) & (advantage > 0)
        low = (w < 1 - args.clip_low) & (advantage < 0)
    return loss, high.float() - low.float()


def learning_rate(step, steps, args):
    """Constant, then falling linearly to 0 over the last --decay of all updates."""
    return args.lr * min(1, (steps - step) / max(1, args.decay * steps))


def learn(trainer, weighted, packed, rank, ranks, device, args, seen=None):
    """(5) One update -> statistics of its policy tokens

    weighted: [(sample, weight)] of all ranks. seen: a list to fill for --microscope, or None.
    """
    micros = deal([len(s.ids) for s, _ in weighted], ranks, args.pack_tokens, packed, device)[rank]
    measured = []
    for micro in micros:
        batch = [weighted[i] for i in micro]
        logps, entropy = trainer(*collate([s for s, _ in batch], packed, device), args.temperature)
        loss = logps.sum() * 0  # a rank without work still runs a forward, or ZeRO-3 hangs
        if batch:
            engine_logps, advantage, weight, is_fresh = per_token(batch, device)
            was_sampled, old_logps = engine_logps != NOT_SAMPLED, engine_logps
            if args.recompute:
                old_logps = torch.cat([s.old_logps for s, _ in batch]).to(device)
                if args.tis_cap:
                    tis = torch.exp(old_logps - engine_logps).clamp(max=args.tis_cap)
                    weight = weight * torch.where(was_sampled, tis, 1.0)
            loss, side = policy_loss(logps, old_logps, advantage, weight, args)
            compared = was_sampled & is_fresh  # (7) older weights give other log-probabilities
            gap = (logps.detach() - engine_logps).abs() * compared
            measured.append((loss.detach(), entropy, gap, side, compared))
            if seen is not None:
                seen.append((batch, logps.detach(), old_logps, advantage, entropy, side))
        trainer.backward(loss * ranks)  # DeepSpeed averages over ranks, the loss is a sum
    # every rank agrees on this: if all advantages are 0, skip the step, because AdamW's momentum
    # would still move the weights
    moves = any(s.advantage for s, _ in weighted)
    if moves:
        trainer.step()
    gnorm = float(trainer.get_global_grad_norm() or 0) if moves else 0.0
    return statistics(measured, device) | {"gnorm": gnorm}


def statistics(measured, device):
    """Means over all policy tokens of all ranks, for the log.

    measured: [(loss, entropy, |dlogp|, side, compared)] of the micro-batches, loss a number and the
    others (N,).
    """
    sums, worst = torch.zeros(7, device=device), torch.zeros((), device=device)
    for loss, entropy, gap, side, compared in measured:
        sums += torch.stack([loss, entropy.sum(), gap.sum(), (side < 0).sum(), (side > 0).sum(),
                             torch.ones_like(gap).sum(), compared.sum()])
        worst = torch.maximum(worst, gap.max())
    dist.all_reduce(sums)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    loss, entropy, gap, low, high, n, n_compared = sums.tolist()
    entropy, low, high = (total / max(n, 1) for total in (entropy, low, high))
    return {"loss": loss, "clip_low": low, "clip_high": high, "entropy": entropy, "dlogp_mean":
            gap / max(n_compared, 1), "dlogp_max": worst.item(), "loss_tokens": int(n)}


@torch.no_grad()
def recompute_logps(trainer, weighted, packed, rank, ranks, device, args):
    """--recompute: set old_logps of all samples by a forward of the trainer, before its update."""
    logps = {}
    lengths = [len(s.ids) for s, _ in weighted]
    for micro in deal(lengths, ranks, args.pack_tokens, packed, device)[rank]:
        batch = [weighted[i][0] for i in micro]
        flat, _ = trainer(*collate(batch, packed, device), args.temperature)
        if batch:
            parts = flat.cpu().split([sum(s.mask) for s in batch])
            logps |= dict(zip(micro, parts, strict=True))
    everyone = [None] * ranks
    dist.all_gather_object(everyone, logps)  # learn may deal a sample to another rank
    for part in everyone:
        for i, old_logps in part.items():
            weighted[i][0].old_logps = old_logps


def per_token(batch, device):
    """[(sample, weight)] -> of each policy token: the engine's logp, advantage, weight, and whether
    the current weights sampled it; all (N,)"""
    logps = [logp for s, _ in batch for logp, mask in zip(s.logps, s.mask, strict=True) if mask]
    counts = torch.tensor([sum(s.mask) for s, _ in batch])
    advantage = torch.tensor([s.advantage for s, _ in batch]).repeat_interleave(counts)
    weight = torch.tensor([weight for _, weight in batch]).repeat_interleave(counts)
    if batch[0][0].gains is not None:
        advantage *= torch.cat([s.gains for s, _ in batch])
    is_fresh = [i >= s.starts[-1] for s, _ in batch for i, mask in enumerate(s.mask) if mask]
    return (torch.tensor(logps, device=device), advantage.to(device), weight.to(device),
            torch.tensor(is_fresh, device=device))


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


def sync_weights(llm, trainer, device):
    """(6) Copy the trainer's weights into the engine, tensor by tensor. Every rank takes part.

    The order matters on a GPU: weights written before the engine's memory is awake are lost.
    Without the iterator, reload_weights would read the folder on disk again and the policy would
    never change.
    """
    if device.type == "cuda":
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": full_weights(trainer)})
    if device.type == "cuda":
        llm.wake_up(tags=["kv_cache"])
    else:
        llm.apply_model(runtime.renew_head)
    if not llm.reset_prefix_cache():  # cached keys and values belong to the old weights
        raise RuntimeError("the engine did not drop the cached blocks of its old weights")


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
    world, tasks, val, template = read_inputs(args)
    rank, ranks, device = setup()
    runtime.lock_folder(args.out)
    runtime.keep_settings(args)
    policy, packed = load(args, template, device)
    trainer = zero3(policy, args.lr, device, args.offload)
    steps = args.steps or math.ceil(args.epochs * len(tasks) / args.prompts)
    start = runtime.restore(trainer, args.out, args.resume, rank)
    carried = runtime.restore_plays(args.out, start, rank, args.stretch)
    interrupted = runtime.watch_sigterm()
    llm = runtime.load_engine(args, device)
    if rank == 0:
        print(f"{len(tasks)} tasks, {steps} updates of {args.prompts} x {args.group} plays, "
              f"{ranks} ranks, {'packed' if packed else 'padded'} rows, "
              f"flags in {args.out}/settings.json")
    for step in range(start, steps + 1):
        clock = [time.time()]
        # (6) the engine gets the weights after `step` updates
        sync_weights(llm, trainer, device)
        clock.append(time.time())
        if val and (step % args.val_every == 0 or step == steps):
            log(validate(llm, template, world, val, step, trainer, rank, args), rank, args)
        if step == steps:
            break
        clock.append(time.time())
        # (1) (2) play and judge
        kind = reward_kind(args.reward, world.kinds, step / steps)
        samples, judged = play_batch(llm, template, world, tasks, step, steps, kind, carried, args)
        play_gib = runtime.used_gib(device)
        if device.type == "cuda":
            llm.sleep(level=2)
        clock.append(time.time())
        # (3) (4) (5) learn
        groups = group_advantages(samples)
        lr = trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args)
        updates = [token_weights(part, args) for part in split(groups, args)]
        if args.recompute:
            recompute_logps(trainer, sum(updates, []), packed, rank, ranks, device, args)
        seen = [] if args.microscope and (step + 1) % args.microscope == 0 else None
        stats = [learn(trainer, weighted, packed, rank, ranks, device, args, seen)
                 for weighted in updates]
        clock.append(time.time())
        for update in stats:
            runtime.check_finite(args.out, step + 1, loss=update["loss"], gnorm=update["gnorm"])
        line = {"step": step + 1} | describe(samples, groups, world.parts) | stats[0]
        line |= timings(samples, updates, clock, judged) | {"later": stats[1:], "kind": kind}
        line |= {"lr": lr, "play_gib": play_gib, "learn_gib": runtime.used_gib(device)}
        write_plays(f"{step + 1:05d}.jsonl", samples, seen, template, rank, args)
        log(line, rank, args, steps)
        check_sync(line, device)
        runtime.save_checkpoint(trainer, args, step + 1, rank, interrupted(device), carried)
    runtime.check_parameters(trainer, args.out, steps)
    save_model(trainer, template, args.out, rank)
    runtime.report_end(args, "success", f"python evaluate.py --model {args.out} --tasks TASKS",
                       rank)
    world.close()
    llm.llm_engine.engine_core.shutdown()  # also ends the process group


def read_inputs(args):
    """World, tasks, validation tasks, template. Checks every input before the engines start."""
    world = runtime.open_world(args)
    kinds = [*world.kinds, *["curriculum"] * (len(world.kinds) == 3)]
    if args.reward and args.reward not in kinds:
        sys.exit(f"--reward {args.reward}: the rewards of this world are {', '.join(kinds)}")
    tasks = runtime.load_tasks(args.tasks, world.load_task)
    val = runtime.load_tasks(args.val, world.load_task) if args.val else []
    template = runtime.load_template(args.model)
    for task in tasks + val:  # raises if a prompt fills the context
        new_sample(task, 0, "", world, template, args)
    runtime.check_world(world, tasks[0], args)
    return world, tasks, val, template


def play_batch(llm, template, world, tasks, step, steps, kind, carried, args):
    """(1) (2) Play and judge the batch of update `step` -> samples of all ranks, seconds to judge

    With --refill [3]: play extra batches until --prompts groups have unequal rewards, and leave
    out the groups after these. With --stretch (7): if no group is finished, which can happen in the
    first update, all plays get another stretch; in the last update every play runs to its end.
    """
    samples, judge_s = [], 0.0
    stretch = args.stretch if step + 1 < steps else 0
    for s in carried:
        s.query -= args.prompts  # groups of earlier updates come before those of this one
        s.starts.append(len(s.ids))
    for extra in count():
        drawn = batch_of(step + extra * steps, len(tasks), args.prompts, args.seed)
        batch = [] if extra and args.stretch else [tasks[i] for i in drawn]
        name = f"play/{step}" + f"+{extra}" * (extra > 0)
        played = rollout(llm, template, world, batch, name, args.group, args.temperature, 1.0, args,
                         carried, (extra + 1) * stretch)
        began = time.time()
        judge_all(played, world, kind)
        for s in played:
            s.query += extra * args.prompts
        judge_s += time.time() - began
        samples += gather(played)
        useful = [query for query, group in by_query(samples).items() if not uniform(group)]
        if args.refill and len(useful) >= args.prompts:
            return [s for s in samples if s.query <= useful[args.prompts - 1]], judge_s
        if samples and extra >= args.refill:
            return samples, judge_s


def check_sync(line, device):
    """Stop if engine and trainer disagree on the log-probabilities of the same tokens."""
    bound, gap = MAX_DLOGP[device.type], line["dlogp_mean"]
    if not gap <= bound:  # also stops at NaN
        sys.exit(f"update {line['step']}: engine and trainer disagree on the sampled tokens: mean "
                 f"|dlogp| is {gap:.1e}, more than {bound:.0e}. Did the engine get the weights? If "
                 "only its precision differs, raise MAX_DLOGP in this script")


def validate(llm, template, world, val, step, trainer, rank, args):
    """Play each validation task once; keep the model with the highest success in OUT/best."""
    samples = rollout(llm, template, world, val, f"val/{step}", 1, 0.6, 0.95, args)  # as in [1]
    judge_all(samples, world, world.kinds[0])
    scores = [s.record["score"]["success"] for s in gather(samples)]
    success = sum(scores) / len(scores)
    rows = runtime.read_jsonl(Path(args.out) / "log.jsonl")
    before = [row["val_success"] for row in rows if "val_success" in row]
    dist.barrier()  # every rank has read the log before rank 0 appends to it
    if success > max(before, default=-1):
        save_model(trainer, template, Path(args.out) / "best", rank)
    return {"step": step, "val_success": success}


def split(groups, args):
    """Split {query: samples} into --minibatches parts of nearly equal size, one for each update.

    --drop-uniform: queries whose plays all earned the same reward are left out.
    """
    names = [query for query in sorted(groups)
             if not (args.drop_uniform and uniform(groups[query]))]
    return [{query: groups[query] for query in names[i :: args.minibatches]}
            for i in range(max(1, min(args.minibatches, len(names))))]


def gather(samples):
    """The samples of all ranks, on every rank, in an order that does not depend on timing."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, samples)
    return sorted((s for part in parts for s in part), key=lambda s: (s.query, s.name))


def sampled(s):
    """Number of tokens that the engine sampled for this play."""
    return sum(s.mask[s.shared:]) - s.logps[s.shared:].count(NOT_SAMPLED)


def ages(s):
    """(7) [tokens sampled in this update, in the one before, ...] of a play"""
    counts = [sum(s.mask[i:]) - s.logps[i:].count(NOT_SAMPLED) for i in s.starts]
    return [more - less for more, less in pairwise([*counts, 0])][::-1]


def describe(samples, groups, parts):
    """The plays of a step in numbers: means over plays, and the fraction of uniform groups."""
    rows = [{"reward": s.reward} | {part: s.record["score"][part] for part in parts} | {
        "strict": s.record["strict"], "format": s.stop == "format",
        "overlength": s.stop in OVERLENGTH, "turns": s.record["turns"], "calls": s.record["calls"],
        "tokens": len(s.ids), "policy_tokens": sampled(s), "failures": s.record["failures"]}
            for s in samples]
    means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    by_age = [sum(counts) for counts in zip_longest(*map(ages, samples), fillvalue=0)]
    means |= {"groups": len(groups), "age_max": max(i for i, n in enumerate(by_age) if n or not i),
              "age": sum(i * n for i, n in enumerate(by_age)) / max(1, sum(by_age)),
              "stale": sum(by_age[1:]) / max(1, sum(by_age))}
    decided = [pair for s in samples for pair in s.decisions] or [(0.0, 0.0)]
    after, rise = (sum(values) / len(decided) for values in zip(*decided, strict=True))
    forks = [s for s in samples if s.parent]
    means |= {"forks": len(forks) / len(groups), "entropy_after": after, "entropy_rise": rise}
    return means | {"uniform": sum(map(uniform, groups.values())) / len(groups)}


def write_plays(name, samples, seen, template, rank, args):
    """Write the plays of an update to OUT/rollouts and, with --microscope, the tokens that learn
    has `seen` to OUT/microscope."""
    if rank == 0:
        records = [s.record | {"advantage": s.advantage} for s in samples]
        runtime.write_jsonl(Path(args.out) / "rollouts" / name, records)
    if seen is not None:
        from look.microscope import write_tokens  # every rank takes part

        write_tokens(Path(args.out) / "microscope" / name, samples, seen, template, args)


def timings(samples, updates, clock, judged):
    """Seconds of each part of a step, and tokens per second of playing and of learning."""
    sync, val, played, learned = (end - start for start, end in zip(clock, clock[1:], strict=False))
    play = played - judged
    return {"sync_s": sync, "val_s": val, "play_s": play, "judge_s": judged, "learn_s": learned,
            "play_tps": sum(map(sampled, samples)) / play,
            "learn_tps": sum(len(s.ids) for update in updates for s, _ in update) / learned}


def log(line, rank, args, steps=None):
    """Print one line and append all numbers to log.jsonl."""
    if rank:
        return
    runtime.write_log(line, args)
    if "val_success" in line:
        print("step {step:4d} | validation success {val_success:.3f}".format(**line), flush=True)
        return
    print("step {step:4d}/{steps} | reward {reward:5.2f} | success {success:.2f} | strict "
          "{strict:.2f} | format {format:.2f} | over {overlength:.2f} | turns {turns:4.1f} | "
          "tokens {tokens:5.0f} | uniform {uniform:.2f} | loss {loss:+.4f} | clip {clip_low:.3f} "
          "{clip_high:.3f} | entropy {entropy:.3f} | gnorm {gnorm:5.2f} | dlogp {dlogp_mean:.1e} "
          "{dlogp_max:.1e} | lr {lr:.1e} | play {play_s:.0f}s sync {sync_s:.1f}s "
          "learn {learn_s:.0f}s".format(steps=steps, **line), flush=True)
    runtime.warn_uniform(args.out)


if __name__ == "__main__":
    runtime.run_ranks(main, flags)
