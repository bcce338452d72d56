"""
Measure the travel world in units of a fixed piece of plain Python, which makes the numbers of
different machines, and of a busy one, comparable.

    call    each tool: calls per piece
    score   the checks of each rule set on the solver's plans: plans per piece
    judge   the reader and all rule sets on these plans as text: texts per piece
    long    a megabyte of one repeated unit, read and judged: pieces for the slowest

Each round times the piece before and after the work; medians of the rounds are printed. With
--against every round measures this checkout and another in turns, and the ratio is printed as well:
above 1 this one is faster.

    python synth.py tasks --n 60 --out out/look/tasks.jsonl
    python bench/bench_world.py --tasks out/look/tasks.jsonl [--database DIR] [--against DIR]
"""
import argparse
import json
import random
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
UNITS = (" ", "[", "[{", "{\"a\":", "1", ",", ";", "|", "from A to B, ", "Day 1: ", "- ", "**",
         "Flight Number: F1, ", "Breakfast: X\n", "\n")


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--tasks", required=True, help="file of tasks that the solver solves")
    add("--database", help="folder of their tables; unset: $STAR_DATABASE, else database/mini")
    add("--against", metavar="DIR", help="another checkout of this repository")
    add("--rounds", type=int, default=7, help="repetitions; medians are printed")
    add("--code", metavar="DIR", help="(inner use) the checkout that this process measures")
    return p.parse_args()


def piece():
    """The seconds of the fixed piece of plain Python: texts, a dict and a sort."""
    began = time.process_time()
    words = {}
    for i in range(20_000):
        word = f"{i * 7919 % 10007}, {i}"
        words.setdefault(word[:3], []).append(word)
    sorted(" ".join(each) for each in words.values())
    return time.process_time() - began


def per_piece(work, things):
    """How often work(*thing) can be done in the time of a piece."""
    before = piece()
    began = time.process_time()
    for thing in things:
        work(*thing)
    spent = time.process_time() - began
    return len(things) * (before + piece()) / 2 / spent


def measure(args):
    """Yield a dict of figures for each line of stdin."""
    sys.path.insert(0, args.code)
    from format_plan import itinerary
    from runtime import load_tasks
    from sandbox import ARGUMENTS, Sandbox, open_database
    from travel.constraints import RULES, judge, score
    from travel.solver import solve
    from travel.world import Travel

    world, draw = Travel(open_database(args.database)), random.Random(0)
    tasks = load_tasks(args.tasks, world.load_task)
    plans = [(task, plan, world.database.of(task)) for task in tasks
             if (plan := solve(task, world.database.of(task)))]
    texts = [(task, itinerary(plan), database) for task, plan, database in plans]
    long = [(plans[0][0], "Day 1: " + unit * (1_000_000 // len(unit)), plans[0][2])
            for unit in UNITS]
    calls = {name: [] for name in ARGUMENTS}
    for task, _, database in islice(cycle(plans), 2000):
        cities = draw.sample(sorted(database.cities), 2)
        values = {"departure": task["org"], "destination": draw.choice([task["dest"], *cities]),
                  "date": draw.choice(task["date"]), "city": cities[0],
                  "state": database.cities[cities[1]]}
        for name, keys in ARGUMENTS.items():
            calls[name].append((Sandbox(database), name, {key: values[key] for key in keys}))
    for _ in sys.stdin:
        found = {f"call {name}": per_piece(Sandbox.call, each) for name, each in calls.items()}
        for rules in RULES:
            found[f"score {rules}"] = per_piece(lambda *plan, r=rules: score(*plan, r), plans)
        found["judge"] = per_piece(judge, texts)
        found["long"] = min(per_piece(judge, [each]) for each in long)
        yield found


def main():
    args = flags()
    if args.code:
        for found in measure(args):
            print(json.dumps(found), flush=True)
        return
    sides = {str(ROOT): []} | ({str(Path(args.against).resolve()): []} if args.against else {})
    words = [sys.executable, __file__, "--tasks", str(Path(args.tasks).resolve())]
    words += ["--database", args.database] if args.database else []
    started = {side: subprocess.Popen([*words, "--code", side], cwd=side, text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
               for side in sides}
    for i in range(args.rounds + 1):  # the first one warms up
        for side in [*sides][:: -1 if i % 2 else 1]:
            print("go", file=started[side].stdin, flush=True)
            sides[side].append(json.loads(started[side].stdout.readline()))
    for process in started.values():
        process.communicate()
    for name in sides[str(ROOT)][0]:
        speeds = [median(found[name] for found in rounds[1:]) for rounds in sides.values()]
        here = f"{speeds[0]:,.1f} per piece" if name != "long" else f"{1 / speeds[0]:.2f} pieces"
        beside = [f"{speeds[0] / speed:.2f} of the other checkout" for speed in speeds[1:]]
        print(f"{name:28} {', '.join([here, *beside])}")


if __name__ == "__main__":
    main()
