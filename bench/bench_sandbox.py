"""
Measure the sandbox and the judge at full scale.

    STAR_TEST_DATA=../shared nice python bench/bench_sandbox.py

For a database with --rows flights it prints the time to build the index, the time and memory to
open it, the latency of each tool (median and 99th percentile), the time of a plain scan of the
table for comparison, the memory of eight processes together, and the time to play broken replies
and to parse garbage; then the number of plans judged per second. Unless --world names a database,
the flights are random and the other tables official. The plans are recorded ones.
"""
import argparse
import csv
import datetime
import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from sandbox import TABLES, Database, Episode, Sandbox, find_sources, parse  # noqa: E402
from travel.constraints import RULES, score  # noqa: E402

SHARED = Path(os.environ.get("STAR_TEST_DATA", ROOT.parent / "shared"))
CITIES, FLIGHTS = TABLES["cities"], TABLES["flights"]
CALL = ('<think>x</think><tool_call>{"name": "SearchCity", "arguments": {"state": "Texas"}}'
        '</tool_call>')
PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "\x00",
         "[" * 50, '{"name": "SearchCity", ', '"arguments": {"state": "Texas"}}', '{"name": 5',
         "NaN", "null", "9" * 5000, "\\ud800", "東京", "\n", CALL]
# the program of a process whose memory is measured: prints two lines, then waits for one
OPEN = """
import json, sys, time

def memory():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

sys.path.insert(0, sys.argv[1])
before, start = memory(), time.perf_counter()
import sandbox
imported = time.perf_counter()
database = sandbox.Database(sys.argv[2])
opened = time.perf_counter()
print(f"{imported - start:.3f} {opened - imported:.3f} {memory() - before:.1f}", flush=True)
world = sandbox.Sandbox(database)
for line in open(sys.argv[3]):
    world.call(*json.loads(line))
print(f"{memory() - before:.1f}", flush=True)
sys.stdin.readline()
"""


def link_world(folder, tables, without=()):
    """Make a folder with links to the tables of another folder, to build a new index in it."""
    for name, path in find_sources(tables).items():
        if name not in without:
            (folder / TABLES[name].subfolder).mkdir()
            (folder / TABLES[name].subfolder / path.name).symlink_to(path.resolve())


def make_flights(folder, rows, seed=0):
    """Write a random flights table with the size and shape of the published one."""
    rng = random.Random(seed)
    lines = (folder / CITIES.subfolder / CITIES.file).read_text(encoding="utf-8").split("\n")
    cities = [line.split("\t")[0] for line in lines]
    weights = [1 / (1 + i) ** 0.5 for i in range(len(cities))]  # some airports have more flights
    rng.shuffle(cities)
    routes = list({tuple(rng.choices(cities, weights, k=2)) for _ in range(9000)})
    traffic = [1 / (1 + i) ** 0.5 for i in range(len(routes))]
    days = [datetime.date(2022, 1, 1) + datetime.timedelta(day) for day in range(181)]
    with open(folder / FLIGHTS.file, "w", encoding="utf-8") as out:
        out.write("Flight Number,Price,DepTime,ArrTime,ActualElapsedTime,"
                  "FlightDate,OriginCityName,DestCityName,Distance\n")
        for i in range(rows):
            if i % 100_000 == 0:
                drawn = rng.choices(routes, traffic, k=100_000)
            (a, b), price, miles = drawn[i % 100_000], 20 + i * 37 % 900, 100 + i * 17 % 2400
            h, m, date = i * 7 % 24, i * 13 % 60, days[i * 31 % len(days)]
            out.write(f"F{3_488_000 + i},{price},{h:02}:{m:02},{(h + 2) % 24:02}:{m:02},"
                      f"2 hours {m} minutes,{date},{a},{b},{miles}.0\n")


def make_calls(database, path, count, seed=1):
    """Calls as agents make them: frequent routes more often, one in ten for an unknown city."""
    with open(path, newline="", encoding="utf-8") as file:
        header = next(csv.reader(file))
        rows = csv.DictReader(islice(file, 0, None, 99), header)
        flown = [[row["OriginCityName"], row["DestCityName"], row["FlightDate"]] for row in rows]
    dates = sorted({date for _, _, date in flown})
    cities, states = list(database.cities), list(database.states)
    rng, calls = random.Random(seed), []
    for i in range(count):
        (a, b, _), date, city = rng.choice(flown), rng.choice(dates), rng.choice(cities)
        if rng.random() < 0.1:
            b = city = "Atlantis"
        calls.append([("SearchFlight", {"departure": a, "destination": b, "date": date}),
                      ("GoogleDistanceMatrix", {"departure": a, "destination": b, "mode": "taxi"}),
                      ("SearchCity", {"state": rng.choice(states)}),
                      ("SearchRestaurant", {"city": city}), ("SearchAttraction", {"city": city}),
                      ("SearchAccommodation", {"city": city})][i % 6])
    return calls


def bench_calls(database, calls):
    """Print the latency of each tool; return the seconds of the flight searches."""
    world, times = Sandbox(database), {}
    for name, arguments in calls:
        start = time.perf_counter()
        world.call(name, arguments)
        times.setdefault(name, []).append(time.perf_counter() - start)
    for name, seconds in [*times.items(), ("all tools", sum(times.values(), []))]:
        print(f"call        {name:22} median {quantile(seconds, 0.5) * 1e6:6.1f} us   "
              f"p99 {quantile(seconds, 0.99) * 1e6:6.1f} us")
    return times["SearchFlight"]


def quantile(values, share):
    return sorted(values)[int(len(values) * share)]


def bench_scan(path, calls, flight_seconds):
    """Print the time of the same flight searches by scanning the columns, as the reference does."""
    columns = ["OriginCityName", "DestCityName", "FlightDate"]
    try:
        import pandas

        how, frame = "pandas", pandas.read_csv(path, usecols=columns)
        data = [frame[column] for column in columns]
    except ImportError:
        import numpy

        how = "numpy over object arrays (pandas is not installed)"
        with open(path, newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows)
            at = [header.index(column) for column in columns]
            texts = zip(*([row[i] for i in at] for row in rows), strict=True)
            data = [numpy.array(column, dtype=object) for column in texts]
    times = []
    for _, asked in calls:
        start = time.perf_counter()
        (data[0] == asked["departure"]) & (data[1] == asked["destination"]) & (
            data[2] == asked["date"])
        times.append(time.perf_counter() - start)
    middle = quantile(times, 0.5)
    print(f"scan        {middle * 1e3:.0f} ms a flight search by {how}, "
          f"{middle / quantile(flight_seconds, 0.5):,.0f} times SearchFlight's")


def bench_processes(count, folder, calls_file):
    """Start processes that open the database and make the calls -> (their lines, MiB together)."""
    command = [sys.executable, "-c", OPEN, ROOT, folder, calls_file]
    started = [subprocess.Popen([*map(str, command)], text=True, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE) for _ in range(count)]
    lines = [(process.stdout.readline(), process.stdout.readline()) for process in started]
    total = sum(pss(process.pid) for process in started)
    for process in started:
        process.communicate("\n")
    return lines, total


def pss(pid):
    """The proportional memory of a process in MiB: shared pages are divided by their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def bench_protocol(database, count=100_000, seed=0):
    """Time the play of broken replies, of which none may raise, and parse() on garbage."""
    rng, episode, start = random.Random(seed), None, time.perf_counter()
    for i in range(count):
        if episode is None or episode.stop:
            episode = Episode({"query": "go"}, Sandbox(database, 0.1, i), strict=False)
        episode.step("".join(rng.choices(PARTS, k=rng.randrange(10))))
    seconds = time.perf_counter() - start
    print(f"fuzz        {count:,} replies through Episode.step in {seconds:.1f} s, none raised")
    slowest = 0
    for part in [*PARTS, CALL[:-30], "<", '{"a":', "\\"]:
        text, start = (part * (1_000_000 // len(part) + 1))[:1_000_000], time.perf_counter()
        parse(text)
        slowest = max(slowest, time.perf_counter() - start)
    print(f"parse       {slowest * 1e3:.1f} ms at most for a megabyte of garbage")


def bench_score(rounds):
    """Print how many recorded plans one core judges per second, on the official tables."""
    database = Database(SHARED / "travelplanner" / "database")
    with gzip.open(SHARED / "parity" / "cases.jsonl.gz", "rt", encoding="utf-8") as file:
        cases = [(case["task"], case["plan"]) for case in map(json.loads, file)]
    for rules in RULES:
        whole = [case for case in cases if is_whole(*case, database, rules)]
        rates = []
        for _ in range(rounds):
            start = time.perf_counter()
            for task, plan in whole:
                score(task, plan, database, rules)
            rates.append(len(whole) / (time.perf_counter() - start))
        print(f"score       {rules:9} {quantile(rates, 0.5):8,.0f} plans/s over {len(whole):,} "
              f"plans, {max(rates):,.0f} at best")


def is_whole(task, plan, database, rules):
    """Whether a task has all its keys; some recorded tasks lack one on purpose."""
    try:
        score(task, plan, database, rules)
    except KeyError:
        return False
    return True


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--world", type=Path, help="folder of tables to use instead of random flights")
    p.add_argument("--rows", type=int, default=3_830_000, help="number of random flights")
    p.add_argument("--calls", type=int, default=60_000, help="number of tool calls to time")
    p.add_argument("--scans", type=int, default=20, help="number of scans to time; 0: none")
    p.add_argument("--rounds", type=int, default=20, help="how often all plans are judged")
    return p.parse_args()


def main():
    args = flags()
    folder = Path(tempfile.mkdtemp())
    try:
        if args.world:
            link_world(folder, args.world)
        else:
            link_world(folder, SHARED / "travelplanner" / "database", without=["flights"])
            make_flights(folder, args.rows)
        start = time.perf_counter()
        database = Database(folder)
        seconds, size = time.perf_counter() - start, database.index.stat().st_size / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"index       {database.counts['flights'][0]:,} flights, {size:.0f} MiB, built in "
              f"{seconds:.1f} s, {peak:.0f} MiB at most")
        path, calls_file = find_sources(folder)["flights"], folder / "calls.jsonl"
        calls = make_calls(database, path, args.calls)
        flight_seconds = bench_calls(database, calls)
        calls_file.write_text("\n".join(map(json.dumps, calls[:6000])))
        [(opened, used)], one = bench_processes(1, folder, calls_file)
        imported, opened, resident = opened.split()
        print(f"open        import {imported} s, warm index {opened} s, {resident} MiB beyond the "
              f"interpreter, {used.strip()} MiB after 6,000 calls")
        _, eight = bench_processes(8, folder, calls_file)
        print(f"memory      1 process {one:.0f} MiB, 8 processes {eight:.0f} MiB together (Pss), "
              f"{eight - one:.0f} MiB more")
        bench_protocol(database)
        searches = [call for call in calls if call[0] == "SearchFlight"][:args.scans]
        if searches:
            bench_scan(path, searches, flight_seconds)
    finally:
        shutil.rmtree(folder)
    bench_score(args.rounds)


if __name__ == "__main__":
    main()
