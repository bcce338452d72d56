"""
Pair right plays with wrong plays of the same question, as data for dpo.py: self-critic DPO [1].

    (1) read    judged episodes of any world: rollouts of grpo.py, episodes.jsonl of evaluate.py.
                Episodes without reward or reply, with a broken tool, or seen before are left out
                and counted. Plays of the same question and prompt form a group
    (2) pair    in each group, plays with a reward of --chosen or more with plays below --rejected.
                Pairs come first whose plays are in few other pairs, whose rejected play kept the
                format, and whose plays have similar lengths, so that DPO does not learn format and
                length alone. With --fewer-calls, then pairs of right plays with equal rewards, of
                which the one with fewer calls is chosen
    (3) split   hold out a share of the questions, with all their pairs
    (4) write   {task, prompt, chosen, rejected, rewards, calls, stops}: prompt holds the messages
                that both plays share, chosen and rejected those from the first difference on;
                rewards, calls and stops are lists of two, for chosen and rejected

Tool-Star [1] shows the policy the principles of its reward while it plays for pairs. To do the
same, play with a system prompt that contains them, and remove them from the pairs by --principles
FILE. [1] does not say how many plays and pairs it used.
[1] Tool-Star, arXiv:2505.16410, app. B.1, algorithm 1

Reads   jsonl files of episodes, or folders of them
Writes  OUT/train.jsonl and, unless --held-out is 0, OUT/val.jsonl

    python -m toolstar pairs --episodes out/rl/rollouts --out out/pairs
    python -m toolstar pairs --episodes out/play/rl/episodes.jsonl --by success --out out/pairs
"""
import random
from collections import Counter
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

from evaluate import mean
from runtime import Mistake, read_jsonl, write_jsonl
from toolstar.text import normalize


def plays_of(args):
    """({(question, prompt): its plays}, Counter of the plays left out by cause)."""
    told = args.principles and Path(args.principles).read_text(encoding="utf-8").strip()
    groups, left_out, files, found = {}, Counter(), [], not told
    for path in map(Path, args.episodes):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for path in files:
        for line, row in enumerate(read_jsonl(path), 1):
            try:
                messages = row["messages"]
                worth = row.get(args.by, (row.get("score") or {}).get(args.by))
                first = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), 0)
                prompt = messages[:first]
                if told:
                    found = found or any(told in one["content"] for one in prompt)
                    prompt = [one | {"content": one["content"].replace(told, "").rstrip()}
                              for one in prompt]
                play = SimpleNamespace(
                    task=row["task"], prompt=prompt, said=messages[first:], reward=worth,
                    calls=row["calls"], stop=row["stop"],
                    replies=[one["content"] for one in messages if one["role"] == "assistant"])
                play.length = sum(map(len, play.replies))
                kind = row.get("reward_name") if args.by == "reward" else None
                group = groups.setdefault((str(play.task.get("id")), f"{prompt} {kind}"), [])
            except (KeyError, TypeError, AttributeError) as error:
                raise Mistake(f"{path}, line {line} is not a judged episode of grpo.py or "
                              f"evaluate.py ({error!r})") from None
            cause = (f"no {args.by}" if worth is None or worth != worth else
                     "no reply" if not play.length else
                     "a tool was broken" if any(call.get("status") == "broken"
                                                for call in row.get("tools", ())) else
                     "seen before" if any(one.said == play.said for one in group) else "")
            if cause:
                left_out[cause] += 1
            else:
                group.append(play)
    if not found:
        raise Mistake(f"no episode's prompt contains the text of {args.principles}")
    return groups, left_out


# ---------------------------------------------------------------- pairs

def pair_up(plays, args, rng):
    """At most --per-question pairs of a group, the best first: [(chosen, rejected)]."""
    right = [play for play in plays if play.reward >= args.chosen]
    left = [(0, a, b) for a in right for b in plays
            if b.reward < args.rejected and b.reward < a.reward and a.replies != b.replies]
    if args.fewer_calls:
        left += [(1, a, b) for a, b in permutations(right, 2)
                 if a.reward == b.reward and a.calls < b.calls]
    used, pairs = Counter(), []
    rng.shuffle(left)  # a random choice among candidates of equal burden

    def burden(candidate):
        kind, chosen, rejected = candidate
        return (kind, used[id(chosen)] + used[id(rejected)], rejected.stop != "answer",
                abs(chosen.length - rejected.length))

    while left and len(pairs) < args.per_question:
        left.remove(best := min(left, key=burden))
        pairs.append(best[1:])
        used.update(map(id, best[1:]))
    return pairs


def as_row(chosen, rejected):
    """A pair as dpo.py reads it. What both plays share before they first differ is the prompt, but
    never the last reply of either: a play that was cut may be the beginning of the other."""
    both = chosen, rejected
    most = min(max(i for i, one in enumerate(play.said) if one["role"] == "assistant")
               for play in both)
    past = next((i for i in range(most) if chosen.said[i] != rejected.said[i]), most)
    return {"task": chosen.task, "prompt": chosen.prompt + chosen.said[:past],
            "chosen": chosen.said[past:], "rejected": rejected.said[past:],
            **{f"{name}s" if name != "calls" else name: [getattr(play, name) for play in both]
               for name in ("reward", "calls", "stop")}}


def make_pairs(args):
    groups, left_out = plays_of(args)
    parts = {"train": [], "val": []}
    for key in sorted(groups):
        if not groups[key]:
            continue
        # the question decides, not its id, so that every cycle holds out the same questions
        question = normalize(str(groups[key][0].task.get("query", key[0]))) or key[0]
        rng = random.Random(f"{args.seed}/{question}")
        part = "val" if rng.random() < args.held_out else "train"
        parts[part] += pair_up(groups[key], args, rng)
    for cause, count in left_out.items():
        print(f"{count} plays left out: {cause}")
    if not parts["train"] or (args.held_out and not parts["val"]):
        raise Mistake(f"no pair for train or val: of {len(groups)} questions "
                      f"none has one play with a reward of {args.chosen} or more and another "
                      f"below {args.rejected}; play more questions or each more often")
    for part, pairs in parts.items():
        if pairs:
            write_jsonl(Path(args.out) / f"{part}.jsonl", [as_row(*pair) for pair in pairs])
        lengths = [mean([pair[side].length for pair in pairs]) for side in (0, 1)] if pairs else []
        print(f"{part}: {len(pairs)} pairs; characters of chosen and rejected: {lengths}")
