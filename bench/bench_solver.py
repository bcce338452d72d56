"""
Measure the exact solver on the official database, in milliseconds of CPU time.

    STAR_TEST_DATA=../shared python bench/bench_solver.py            about a minute
    STAR_TEST_DATA=../shared python bench/bench_solver.py --n 100    a quick look

Solves --n tasks drawn as in the paper, then the 147 official queries, and prints the median, the
99th percentile and the slowest by number of days. One solve before them fills the caches and does
not count.
"""
import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import synth  # noqa: E402
from runtime import load_tasks  # noqa: E402
from travel import solver  # noqa: E402
from travel.world import load_task  # noqa: E402


def seconds(task, database):
    began = time.process_time()
    solver.solve(task, database)
    return time.process_time() - began


def table(name, tasks, database):
    """Print a line per number of days."""
    seconds(tasks[0], database)
    for days in sorted({task["days"] for task in tasks}):
        times = sorted(1000 * seconds(task, database) for task in tasks if task["days"] == days)
        print(f"{name:18} {days:4} {len(times):6} {statistics.median(times):8.2f} "
              f"{times[len(times) * 99 // 100]:8.2f} {times[-1]:8.2f}")


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--n", type=int, default=1000, help="number of drawn tasks (1000)")
    p.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")
    args = p.parse_args()
    folder = Path(os.environ["STAR_TEST_DATA"]) / "travelplanner"
    words = f"tasks --like paper --seed {args.seed} --database {folder / 'database'} --out -"
    settings = synth.flags(words.split())
    drawn = (synth.make_task(settings, index) for index in itertools.count())
    tasks = list(itertools.islice(filter(None, drawn), args.n))
    official = [task for name in ("train_45", "val_102")
                for task in load_tasks(folder / f"{name}.jsonl", load_task)]
    print(f"{'milliseconds':18} days  tasks   median      p99  slowest")
    database = synth.open_once(settings.database)
    table("like the paper's", tasks, database)
    table("official queries", official, database)


if __name__ == "__main__":
    main()
