"""
Pair right plays with wrong ones of the same question: the self-critic's data, for dpo.py.

    (1) read    judged episodes of any world: grpo.py's rollouts, evaluate.py's episodes.jsonl.
                What teaches nothing is left out and counted: no reward, no reply, a broken tool, a
                play seen before. Plays of one question and one prompt are a group
    (2) pair    in each group, plays that earned --chosen or more with plays below --rejected.
                First those in which each play is new, the rejected one kept the format, and both
                are about as long: else format and length are what there is to learn. With
                --fewer-calls, then, two right plays of equal reward, the one of fewer calls chosen
    (3) split   questions, not pairs, into those to learn from and those held out
    (4) write   {task, prompt, chosen, rejected, rewards, calls, stops}; the last five are lists or
                messages of chosen and rejected

Tool-Star [1] shows the policy its reward's principles while it plays for pairs. Play with a system
prompt that holds such a text, and --principles FILE takes it out again of what is trained on;
without the flag it stays. How many plays and pairs there should be, [1] does not say.
[1] Tool-Star, arXiv:2505.16410, app. B.1, algorithm 1

Reads   jsonl files of episodes, or folders of them
Writes  OUT/train.jsonl and, unless --held-out is 0, OUT/val.jsonl

    python -m toolstar.pairs --episodes out/rl/rollouts --out out/pairs
    python -m toolstar.pairs --episodes out/play/rl/episodes.jsonl --by success --out out/pairs
"""
import random
from collections import Counter
from itertools import permutations, product
from pathlib import Path
from typing import NamedTuple

from evaluate import mean
from runtime import COUNT, NATURAL, SHARE, Help, Parser, read_jsonl, run, write_jsonl
from toolstar.text import normalize


class Play(NamedTuple):
    """A judged episode as pairs see it."""
    task: dict
    prompt: list  # messages before the first reply
    said: list  # messages from there on
    reward: float
    calls: int
    stop: str

    @property
    def replies(self):
        """What the policy said; what tools answered is not the policy's."""
        return [message["content"] for message in self.said if message["role"] == "assistant"]

    @property
    def length(self):
        """Characters of the replies."""
        return sum(map(len, self.replies))


# ---------------------------------------------------------------- plays

def files_of(paths):
    """The jsonl files that paths name, folders' in their order of names."""
    files = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no *.jsonl in {' '.join(paths)}; --episodes names files of episodes, "
                         "or folders like OUT/rollouts")
    return files


def worth(row, by):
    """What an episode earned: a number of its own or of its score; None if there is none."""
    found = row.get(by)
    found = (row.get("score") or {}).get(by) if found is None else found
    return float(found) if isinstance(found, (int, float)) and found == found else None


def read_play(row, by, principles):
    """A row as a Play, or in words why it is left out. KeyError where it is no episode."""
    messages, reward = row["messages"], worth(row, by)
    roles = [message["role"] for message in messages]
    if reward is None:
        return f"no {by}"
    if "assistant" not in roles:
        return "no reply"
    if any(call.get("status") == "broken" for call in row.get("tools", ())):
        return "a tool was broken"
    first = roles.index("assistant")
    prompt = [without(message, principles) for message in messages[:first]]
    # what is no task and no number of calls is a TypeError here
    play = Play({**row["task"]}, prompt, messages[first:], reward, row["calls"] + 0, row["stop"])
    return play if play.length else "no reply"


def without(message, principles):
    """A message of the prompt less the text of --principles."""
    before, found, after = message["content"].partition(principles or "\0")
    return message | {"content": before.rstrip() + after} if found else message


def read_plays(args):
    """{question: its plays}, and how many were left out, by cause."""
    principles = args.principles and Path(args.principles).read_text(encoding="utf-8").strip()
    groups, seen, left_out, stripped = {}, set(), Counter(), 0
    for path in files_of(args.episodes):
        for line, row in enumerate(read_jsonl(path), 1):
            try:
                play = read_play(row, args.by, principles)
                stripped += bool(principles) and principles in str(row["messages"][0]["content"])
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"{path}, line {line}: no judged episode ({error!r}); want what "
                                 "grpo.py or evaluate.py writes") from None
            if isinstance(play, str):
                left_out[play] += 1
                continue
            kind = args.by == "reward" and row.get("kind")  # a curriculum's changes
            key = str(play.task.get("id")), f"{play.prompt} {kind}"
            if (key, str(play.said)) in seen:
                left_out["seen before"] += 1
                continue
            seen.add((key, str(play.said)))
            groups.setdefault(key, []).append(play)
    if principles and not stripped:
        raise ValueError(f"no system prompt holds the text of {args.principles}: was it played "
                         "with it?")
    return groups, left_out


# ---------------------------------------------------------------- pairs

def candidates(plays, args):
    """[(kind, chosen, rejected)] of a group: kind 0 by reward, 1 by fewer calls."""
    right = [play for play in plays if play.reward >= args.chosen]
    wrong = [play for play in plays if play.reward < args.rejected]
    found = [(0, *pair) for pair in product(right, wrong) if pair[0].reward > pair[1].reward]
    if args.fewer_calls:
        found += [(1, a, b) for a, b in permutations(right, 2)
                  if a.reward == b.reward and a.calls < b.calls]
    return [(kind, a, b) for kind, a, b in found if a.replies != b.replies]


def pair_up(plays, args, rng):
    """At most --per-question pairs of a group, the best first: [(chosen, rejected)]."""
    left, used, pairs = candidates(plays, args), Counter(), []
    rng.shuffle(left)  # what is equal below is left to chance

    def burden(candidate):
        kind, chosen, rejected = candidate
        return (kind, used[id(chosen)] + used[id(rejected)], rejected.stop != "answer",
                abs(chosen.length - rejected.length))

    while left and len(pairs) < args.per_question:
        best = min(left, key=burden)
        left.remove(best)
        pairs.append(best[1:])
        used.update(map(id, best[1:]))
    return pairs


def as_row(chosen, rejected):
    """A pair as dpo.py reads it."""
    both = chosen, rejected
    return {"task": chosen.task, "prompt": chosen.prompt, "chosen": chosen.said,
            "rejected": rejected.said, "rewards": [play.reward for play in both],
            "calls": [play.calls for play in both], "stops": [play.stop for play in both]}


def describe_pairs(pairs):
    """What of two sides, beside the reward, could be learnt, in words."""
    lengths = [mean([pair[side].length for pair in pairs]) for side in (0, 1)]
    calls = [mean([pair[side].calls for pair in pairs]) for side in (0, 1)]
    kept = mean([pair[1].stop == "answer" for pair in pairs])
    return (f"chosen {lengths[0]:.0f} characters and {calls[0]:.1f} calls, rejected "
            f"{lengths[1]:.0f} and {calls[1]:.1f}; {kept:.0%} of the rejected end in an answer")


def make_pairs(args):
    groups, left_out = read_plays(args)
    if not groups and not left_out:
        raise ValueError(f"{', '.join(args.episodes)}: no episode is there; evaluate.py plays some")
    parts, asked = {"train": [], "val": []}, Counter()
    for key in sorted(groups):
        # by the question alone, whatever its id: what one cycle holds out, the next one does, too
        question = normalize(str(groups[key][0].task.get("query", key[0]))) or key[0]
        rng = random.Random(f"{args.seed}/{question}")
        part = "val" if rng.random() < args.held_out else "train"
        pairs = pair_up(groups[key], args, rng)
        parts[part] += pairs
        asked[part] += bool(pairs)
    for cause, count in left_out.items():
        print(f"{count} plays left out: {cause}")
    if not parts["train"] or (args.held_out and not parts["val"]):
        many = sum(len(plays) for plays in groups.values())
        raise ValueError(f"no pair{' to hold out' * bool(parts['train'])} in {many} plays of "
                         f"{len(groups)} questions: in none of these one play earned "
                         f"{args.chosen} or more and another less than {args.rejected}; play more "
                         "questions or each more often, or see --by and --held-out")
    for path in [Path(args.out) / f"{part}.jsonl" for part in parts]:
        if path.exists() and not all("'chosen': [" in str(row) for row in read_jsonl(path)[:1]):
            raise ValueError(f"{path} holds no pairs: choose another --out, or remove it")
    for part, pairs in parts.items():
        path = Path(args.out) / f"{part}.jsonl"
        path.unlink(missing_ok=True)  # of another --held-out
        if pairs:
            write_jsonl(path, [as_row(*pair) for pair in pairs])
            print(f"{path}: {len(pairs)} pairs of {asked[part]} questions; "
                  f"{describe_pairs(pairs)}")


# ---------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("--episodes", nargs="+", required=True, metavar="JSONL|DIR", help="judged episodes")
    add("--out", required=True, help="folder of the pairs")
    add("--held-out", type=SHARE, default=0.1, help="share of the questions not to learn from")
    add("--by", default="reward", help="what plays earned: reward, strict, or a part of the score")
    add("--chosen", type=float, default=1.0, help="a chosen play earned so much, or more [1]")
    add("--rejected", type=float, default=1.0, help="a rejected play earned less [1]")
    add("--per-question", type=COUNT, default=4, help="pairs of a question, at most")
    add("--fewer-calls", action="store_true", help="also pairs of right plays of equal reward, the "
        "one of fewer calls chosen")
    add("--principles", metavar="FILE", help="text that system prompts of the plays hold, and "
        "those of the pairs shall not")
    add("--seed", type=NATURAL, default=0, help="of what is held out, and of a choice among equals")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    run("toolstar.pairs", make_pairs, args)


if __name__ == "__main__":
    main()
