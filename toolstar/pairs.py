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
    """The parts of a judged episode that pairs need."""
    task: dict
    prompt: list  # messages before the first reply
    said: list  # messages from there on
    reward: float
    calls: int
    stop: str

    @property
    def replies(self):
        """The texts of the policy's replies, without the results of tools."""
        return [message["content"] for message in self.said if message["role"] == "assistant"]

    @property
    def length(self):
        """The number of characters of the replies."""
        return sum(map(len, self.replies))


# ---------------------------------------------------------------- plays

def files_of(paths):
    """The jsonl files in paths; those of a folder in the order of their names."""
    files = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no *.jsonl in {' '.join(paths)}; --episodes names files of episodes, "
                         "or folders like OUT/rollouts")
    return files


def worth(row, by):
    """The number `by` in an episode's record or its score; None if there is none."""
    found = row.get(by)
    found = (row.get("score") or {}).get(by) if found is None else found
    return float(found) if isinstance(found, (int, float)) and found == found else None


def read_play(row, by, principles):
    """A row as a Play, or a text that says why it is left out. KeyError if it is no episode."""
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
    # a TypeError if the task is not a dict or calls is not a number
    play = Play({**row["task"]}, prompt, messages[first:], reward, row["calls"] + 0, row["stop"])
    return play if play.length else "no reply"


def without(message, principles):
    """A message of the prompt without the text of --principles."""
    before, found, after = message["content"].partition(principles or "\0")
    return message | {"content": before.rstrip() + after} if found else message


def read_plays(args):
    """({(task id, prompt): its plays}, Counter of the plays left out by cause)."""
    principles = args.principles and Path(args.principles).read_text(encoding="utf-8").strip()
    groups, seen, left_out, stripped = {}, set(), Counter(), 0
    for path in files_of(args.episodes):
        for line, row in enumerate(read_jsonl(path), 1):
            try:
                play = read_play(row, args.by, principles)
                stripped += bool(principles) and principles in str(row["messages"][0]["content"])
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"{path}, line {line} is not a judged episode of grpo.py or "
                                 f"evaluate.py ({error!r})") from None
            if isinstance(play, str):
                left_out[play] += 1
                continue
            kind = args.by == "reward" and row.get("kind")  # it changes in a curriculum
            key = str(play.task.get("id")), f"{play.prompt} {kind}"
            if (key, str(play.said)) in seen:
                left_out["seen before"] += 1
                continue
            seen.add((key, str(play.said)))
            groups.setdefault(key, []).append(play)
    if principles and not stripped:
        raise ValueError(f"no episode's system prompt contains the text of {args.principles}; "
                         "leave out --principles, or play with that prompt")
    return groups, left_out


# ---------------------------------------------------------------- pairs

def candidates(plays, args):
    """All pairs of a group, [(kind, chosen, rejected)]: kind 0 by reward, 1 by fewer calls."""
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
    rng.shuffle(left)  # a random choice among candidates of equal burden

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
    both, past = (chosen, rejected), common_past(chosen.said, rejected.said)
    return {"task": chosen.task, "prompt": chosen.prompt + chosen.said[:past],
            "chosen": chosen.said[past:], "rejected": rejected.said[past:],
            "rewards": [play.reward for play in both],
            "calls": [play.calls for play in both], "stops": [play.stop for play in both]}


def common_past(one, other):
    """How many messages two plays share before they first differ. The last reply of either is not
    among them: a play that was cut short may be the beginning of the other."""
    past = min(max(i for i, message in enumerate(said) if message["role"] == "assistant")
               for said in (one, other))
    return next((i for i in range(past) if one[i] != other[i]), past)


def describe_pairs(pairs):
    """How the two sides differ apart from the reward, in words: lengths, calls, formats."""
    lengths = [mean([pair[side].length for pair in pairs]) for side in (0, 1)]
    calls = [mean([pair[side].calls for pair in pairs]) for side in (0, 1)]
    kept = mean([pair[1].stop == "answer" for pair in pairs])
    return (f"chosen {lengths[0]:.0f} characters and {calls[0]:.1f} calls, rejected "
            f"{lengths[1]:.0f} and {calls[1]:.1f}; {kept:.0%} of the rejected end in an answer")


def make_pairs(args):
    groups, left_out = read_plays(args)
    if not groups and not left_out:
        raise ValueError(f"{', '.join(args.episodes)} holds no episode; evaluate.py writes some")
    parts, asked = {"train": [], "val": []}, Counter()
    for key in sorted(groups):
        # the question decides, not its id, so that every cycle holds out the same questions
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
                         f"{len(groups)} questions: no question has one play with a reward of "
                         f"{args.chosen} or more and another below {args.rejected}; play more "
                         "questions or each more often, or see --by and --held-out")
    for path in [Path(args.out) / f"{part}.jsonl" for part in parts]:
        if path.exists() and not all("'chosen': [" in str(row) for row in read_jsonl(path)[:1]):
            raise ValueError(f"{path} holds no pairs: choose another --out, or remove it")
    for part, pairs in parts.items():
        path = Path(args.out) / f"{part}.jsonl"
        path.unlink(missing_ok=True)  # the file of a run with another --held-out
        if pairs:
            write_jsonl(path, [as_row(*pair) for pair in pairs])
            print(f"{path}: {len(pairs)} pairs of {asked[part]} questions; "
                  f"{describe_pairs(pairs)}")


# ---------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("--episodes", nargs="+", required=True, metavar="JSONL|DIR", help="judged episodes")
    add("--out", required=True, help="folder to write the pairs into")
    add("--held-out", type=SHARE, default=0.1, help="share of the questions held out in val.jsonl")
    add("--by", default="reward", help="key that is compared: reward, strict, or a number of the "
        "score")
    add("--chosen", type=float, default=1.0, help="a chosen play has this value or more [1]")
    add("--rejected", type=float, default=1.0, help="a rejected play has less than this [1]")
    add("--per-question", type=COUNT, default=4, help="maximum number of pairs per question")
    add("--fewer-calls", action="store_true", help="also pair right plays of equal reward; the one "
        "with fewer calls is chosen")
    add("--principles", metavar="FILE", help="remove this text from the system prompts")
    add("--seed", type=NATURAL, default=0, help="seed of the held-out questions and of the choice "
        "among equal pairs")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    run("toolstar.pairs", make_pairs, args)


if __name__ == "__main__":
    main()
