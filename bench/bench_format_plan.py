"""
Measure how well, how fast and how safely the rules of format_plan.py read itineraries.

    python bench/bench_format_plan.py [--database DIR]     texts per second, hostile texts
    python bench/bench_format_plan.py --mutants 100000     mutated texts and the slowest; minutes
    python bench/bench_format_plan.py --human FILE --database DIR   successes read by style

It uses one process. The texts are solved plans, written in the styles of tests/styles.py; the
fastest of several rounds counts. FILE is TravelPlanner's train split as jsonl, with human plans.
"""
import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import styles  # noqa: E402

from format_plan import parse_plan  # noqa: E402
from runtime import read_jsonl  # noqa: E402
from sandbox import open_database  # noqa: E402
from travel.constraints import score  # noqa: E402
from travel.leaderboard import leaderboard_field  # noqa: E402
from travel.world import load_task  # noqa: E402


def seconds_of(rows, database):
    """The CPU seconds for reading rows of (task, text)."""
    start = time.process_time()
    for task, text in rows:
        parse_plan(text, task, database)
    return time.process_time() - start


def speed(args, database):
    """Print texts per second, and the time for each hostile text."""
    plans = styles.solved(database, args.plans, "bench")
    rows = [row[1:3] for row in styles.texts(database, plans, styles.STATED, "bench")]
    seconds_of(rows, database)  # fill the caches
    best = min(seconds_of(rows, database) for _ in range(args.rounds))
    size = sum(len(text) for _, text in rows) / len(rows)
    print(f"{len(rows) / best:,.0f} texts/s, of {size:,.0f} characters each")
    for name, text in styles.HOSTILE.items():
        seconds = seconds_of([({"org": "Nowhere"}, text)], database)
        print(f"{name:20} {seconds:7.3f} s for {len(text):,} characters")


def mutants(args, database):
    """Read mutated texts, of which none may raise."""
    rng, slowest, found = styles.random_of("mutants"), (0, ""), 0
    plans = styles.solved(database, args.plans, "mutants")
    texts = [row[1:3] for row in styles.texts(
        database, plans, {**styles.STATED, **styles.FREE}, "mutants")]
    for i in range(args.mutants):
        task, text = texts[i % len(texts)]
        text = styles.mutate(text, rng)
        start = time.process_time()
        found += parse_plan(text, task, database) is not None
        slowest = max(slowest, (time.process_time() - start, text))
    print(f"{args.mutants:,} mutated texts, a plan in {found:,}, none raised; the slowest took "
          f"{1000 * slowest[0]:.1f} ms ({len(slowest[1]):,} characters)")


def human(args, database):
    """Print for each style how many successful human plans still succeed once they are written in
    it and read, and how many spoilt plans do."""
    plans = []
    for row in read_jsonl(args.human):
        days = [{"day" if key == "days" else key: leaderboard_field(key, value)
                 for key, value in day.items()} for day in row["annotated_plan"] if day]
        plans.append((load_task(row), days))
    good = [(task, plan) for task, plan in plans if score(task, plan, database)["success"]]
    bad = styles.spoilt(database, plans, "bad") + styles.spoilt(database, plans, "bad too")
    print(f"{'style':22} read, of {len(good)}   false, of {len(bad)} spoilt")
    for name, style in {**styles.STATED, **styles.FREE}.items():
        wins = [sum(score(task, parse_plan(text, task, database), database)["success"]
                    for _, task, text, _ in styles.texts(database, each, {name: style}, "human"))
                for each in (good, bad)]
        left = "" if name in styles.STATED else "   left to the LLM formatter"
        print(f"{name:22} {wins[0]:4.0f} {wins[1]:14.0f}{left}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--database", metavar="DIR", help="folder of tables (default: $STAR_DATABASE, else mini)")
    add("--plans", type=int, default=4, help="number of plans, each written in every style")
    add("--rounds", type=int, default=10, help="number of rounds, of which the fastest counts")
    add("--mutants", type=int, default=0, help="number of mutated texts to read")
    add("--human", metavar="FILE", help="write the human plans of this file in every style")
    args = parser.parse_args()
    work = mutants if args.mutants else human if args.human else speed
    work(args, open_database(args.database))


if __name__ == "__main__":
    main()
