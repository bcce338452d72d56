"""
Write the submission of an evaluated agent to TravelPlanner's leaderboard, and print its rates.

Reads   OUT/AGENT/episodes.jsonl of evaluate.py, the database
Writes  OUT/AGENT/submission.jsonl; prints the rates

    python evaluate.py --model rl=out/7b/rl/best --tasks osunlp/TravelPlanner --split validation \\
        --database database/full
    python -m travel.leaderboard out/eval/rl --split validation

The six rates follow the leaderboard's rules (`official` in constraints.py) and divide by the
split's fixed numbers, hard micro by all constraints of the split. Only the first play of each task
counts. The constraints of the test split are not published, so its plans are written but not
judged.
"""
import json
from pathlib import Path

from evaluate import read_episodes
from runtime import Help, Mistake, Parser, run, write_jsonl
from sandbox import open_database
from travel.constraints import HARD, score

# the leaderboard's denominators: (number of queries, number of hard constraints in them)
SIZES = {"train": (45, 105), "validation": (180, 420), "test": (1000, 2290)}


def official_rates(rows, split, database):
    """The leaderboard's rates, {name: rate in [0, 1]}: all six if the rows are judged, else only
    the delivery rate."""
    plans, asked = SIZES[split]
    rates = {"delivery rate": sum(bool(row["plan"]) for row in rows) / plans}
    scores = [score(row["task"], row["plan"], database, "official")
              for row in rows if "score" in row]
    if not scores:
        return rates
    passed = sum(each["checks"][name][0] is True for each in scores for name in HARD)
    return rates | {
        "commonsense micro rate": sum(each["cs_micro"] for each in scores) / plans,
        "commonsense macro rate": sum(each["cs_macro"] for each in scores) / plans,
        "hard micro rate": passed / asked,
        "hard macro rate": sum(each["hard_macro"] for each in scores) / plans,
        "final pass rate": sum(each["success"] for each in scores) / plans}


def submission(rows):
    """The lines of the submission, in the order of the queries."""
    lines = [{"idx": int(row["task"].get("idx", row["task"]["id"])), "query": row["task"]["query"],
              "plan": row["plan"]} for row in rows]
    return sorted(lines, key=lambda line: line["idx"])


def hand_in(args):
    """Write the submission, and print the rates."""
    file = args.folder / "episodes.jsonl"
    rows = [row for row in read_episodes(file).values() if not row["task"].get("sample")]
    for row in rows:
        number = row["task"].get("idx", row["task"]["id"])
        if "query" not in row["task"] or "plan" not in row or not str(number).isdecimal():
            raise Mistake(f"{file}: task {number!r} is not of the {args.split} split, whose ids "
                          "are numbers; evaluate.py --split plays those")
    if not rows:
        raise Mistake(f"{file} is missing or empty; evaluate.py writes it")
    lines, file = submission(rows), args.folder / "submission.jsonl"
    write_jsonl(file, lines)
    if len(lines) != SIZES[args.split][0]:
        print(f"{file} has {len(lines)} lines, not the split's {SIZES[args.split][0]}")
    played = args.folder / "settings.json"
    tables = args.database or json.loads(played.read_text(encoding="utf-8"))["database"]
    for name, rate in official_rates(rows, args.split, open_database(tables)).items():
        print(f"{name:24} {100 * rate:5.1f}")


def main(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    p.add_argument("folder", type=Path, help="folder with an agent's episodes.jsonl")
    p.add_argument("--split", choices=SIZES, required=True, help="the split that was played")
    p.add_argument("--database", help="folder of the tables; default: as in the evaluation")
    run("travel.leaderboard", hand_in, p.parse_args(argv))


if __name__ == "__main__":
    main()
