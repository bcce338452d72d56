"""
How many itineraries format_plan.parse_plan reads per second, and how long hostile texts take it.

    python bench/bench_format_plan.py [--database DIR] [--compare OTHER_format_plan.py]
    python bench/bench_format_plan.py --mutants 100000        some minutes

One process and one core: the 14 styles of tests/nl_styles.py and those of tests/styles.py, of
several rounds the fastest, after a first round that fills the caches. --compare takes turns with
another version of the file.
"""
import argparse
import importlib.util
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import nl_styles  # noqa: E402
import styles  # noqa: E402

import format_plan  # noqa: E402
from sandbox import open_database  # noqa: E402


def seconds_of(reader, rows, database):
    """Processor time that a reader takes for [(task, text)]."""
    start = time.process_time()
    for task, text in rows:
        reader.parse_plan(text, task, database)
    return time.process_time() - start


def load_reader(path):
    """The module in a file."""
    spec = importlib.util.spec_from_file_location("other_format_plan", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--database", metavar="DIR", help="folder of tables (default: $STAR_DATABASE, else mini)")
    add("--texts", type=int, default=140, help="itineraries in a round")
    add("--rounds", type=int, default=20, help="rounds, of which the fastest counts")
    add("--mutants", type=int, default=0, help="read so many mutated texts, which must not raise")
    add("--compare", metavar="FILE", help="another version of format_plan.py to measure beside it")
    return parser


def main():
    args = flags().parse_args()
    database = open_database(args.database)
    readers = {"this": format_plan}
    if args.compare:
        readers["other"] = load_reader(args.compare)
    for source in (nl_styles, styles):
        rows = [row[1:3] for row in source.examples(database, args.texts, "bench")]
        times = {name: [] for name in readers}
        for _ in range(args.rounds + 1):
            for name, reader in readers.items():
                times[name].append(seconds_of(reader, rows, database))
        for name, seconds in times.items():
            print(f"{name:12} {len(rows) / min(seconds[1:]):7,.0f} itineraries/s of "
                  f"{source.__name__}.py")
        if args.compare:
            print(f"{'this/other':12} {min(times['other'][1:]) / min(times['this'][1:]):7.3f}")
    rng, told = nl_styles.random_of("mutants"), 0
    texts = styles.examples(database, 450 if args.mutants else 0, "mutants")
    for i in range(args.mutants):
        _, task, text, _, _ = texts[i % len(texts)]
        told += format_plan.parse_plan(styles.mutate(text, rng), task, database) is not None
    if args.mutants:
        print(f"{args.mutants:,} mutated texts were read, a plan was found in {told:,}")
    for name, text in nl_styles.HOSTILE.items():
        seconds = seconds_of(format_plan, [({"org": "Nowhere"}, text)], database)
        print(f"{name:12} {seconds:7.2f} s for {len(text):,} characters")


if __name__ == "__main__":
    main()
