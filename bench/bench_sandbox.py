"""
What the sandbox costs at full scale, in one run against a plain scan of the same table.

    STAR_TEST_DATA=../shared nice python tests/bench_sandbox.py

Makes a flights table of --rows rows in a temporary folder beside the official entity tables, builds its index, and
prints: time to build, time and memory to open, median and 99th percentile of each tool, the ratio to the scan, what
eight processes hold together, 100,000 broken replies played, and plans judged per second. Needs STAR_TEST_DATA
(travelplanner/ and parity/); the scan is pandas' where it is installed, else numpy's.
"""
import argparse, datetime, gzip, json, os, random, resource, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from sandbox import TABLES, Database, Episode, Sandbox  # noqa: E402

# the process whose memory is measured; it says "ready" and waits for a line
OPEN = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
memory = lambda: [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")][0] / 1024
before, start = memory(), time.perf_counter()
import sandbox
imported = time.perf_counter()
database = sandbox.Database(sys.argv[2])
opened = time.perf_counter()
print(f"{imported - start:.3f} {opened - imported:.3f} {memory() - before:.1f}", flush=True)
world = sandbox.Sandbox(database)
for line in open(sys.argv[3]):
    name, arguments = json.loads(line)
    world.call(name, arguments)
print(f"{memory() - before:.1f}", flush=True)
sys.stdin.readline()
"""


def make_world(folder, rows, seed=0):
    """Write a flights table of the published size and shape beside the official tables -> its routes and dates."""
    tables = Path(os.environ["STAR_TEST_DATA"]) / "travelplanner" / "database"
    for path in tables.rglob("*"):
        if path.is_file() and path.name != TABLES["flights"].file and not path.name.startswith("sandbox.index"):
            (folder / path.relative_to(tables)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(tables))
    rng = random.Random(seed)
    cities = [line.split("\t")[0] for line in (folder / "background" / TABLES["cities"].file).read_text().split("\n")]
    weights = [1 / (1 + i) ** 0.5 for i in range(len(cities))]  # some airports are hubs
    rng.shuffle(cities)
    routes = list({tuple(rng.choices(cities, weights, k=2)) for _ in range(9000)})
    dates = [str(datetime.date(2022, 1, 1) + datetime.timedelta(day)) for day in range(181)]
    sizes = [1 / (1 + i) ** 0.5 for i in range(len(routes))]
    with open(folder / TABLES["flights"].file, "w") as out:
        out.write("Flight Number,Price,DepTime,ArrTime,ActualElapsedTime,"
                  "FlightDate,OriginCityName,DestCityName,Distance\n")
        for start in range(0, rows, 100_000):
            for i, (a, b) in enumerate(rng.choices(routes, sizes, k=min(100_000, rows - start)), start):
                h, m = i * 7 % 24, i * 13 % 60
                out.write(f"F{3_488_000 + i},{20 + i * 37 % 900},{h:02}:{m:02},{(h + 2) % 24:02}:{m:02},"
                          f"2 hours {m} minutes,{dates[i * 31 % len(dates)]},{a},{b},{100 + i * 17 % 2400}.0\n")
    return routes, sizes, dates


def make_calls(routes, sizes, dates, cities, states, count, seed):
    """Calls as agents make them: routes by their traffic, one in ten with something that does not exist."""
    rng, calls = random.Random(seed), []
    for i in range(count):
        (a, b), date = rng.choices(routes, sizes)[0], rng.choice(dates)
        city, end = (rng.choice(cities), b) if rng.random() < 0.9 else ("Atlantis", "Atlantis")
        calls.append([("SearchFlight", {"departure": a, "destination": end, "date": date}),
                      ("GoogleDistanceMatrix", {"departure": a, "destination": b, "mode": "taxi"}),
                      ("SearchCity", {"state": rng.choice(states)}), ("SearchRestaurant", {"city": city}),
                      ("SearchAttraction", {"city": city}), ("SearchAccommodation", {"city": city})][i % 6])
    return calls


def quantiles(times):
    times = sorted(times)
    return times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6


def time_calls(world, calls):
    """{tool: [seconds]}"""
    times = {}
    for name, arguments in calls:
        start = time.perf_counter()
        world.call(name, arguments)
        times.setdefault(name, []).append(time.perf_counter() - start)
    return times


def scan_seconds(path, calls):
    """Median seconds of the same flight searches by scanning the columns, as the reference does -> name, seconds."""
    columns = ["OriginCityName", "DestCityName", "FlightDate"]
    try:
        import pandas
        name, frame = "pandas scan", pandas.read_csv(path, usecols=columns)
        data = [frame[column] for column in columns]
    except ImportError:
        import csv, numpy
        name = "numpy scan over object arrays (pandas is not installed)"
        with open(path, newline="") as file:
            data = [numpy.array(column, dtype=object) for column in zip(*(row[5:8] for row in csv.reader(file)))]
        data = [data[1], data[2], data[0]]
    times = []
    for _, arguments in calls:
        start = time.perf_counter()
        (data[0] == arguments["departure"]) & (data[1] == arguments["destination"]) & (data[2] == arguments["date"])
        times.append(time.perf_counter() - start)
    return name, sorted(times)[len(times) // 2]


def pss(pid):
    """MiB of a process, shared pages divided by those who share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def processes(count, folder, calls_file):
    """Start processes that open the database and play the calls -> their first lines, second lines, MiB together."""
    started = [subprocess.Popen([sys.executable, "-c", OPEN, str(ROOT), str(folder), str(calls_file)], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    lines = [(process.stdout.readline(), process.stdout.readline()) for process in started]
    total = sum(pss(process.pid) for process in started)
    for process in started:
        process.communicate("\n")
    return lines, total


def bench_fuzz(database, count=100_000, seed=0):
    """Play broken replies: nothing may raise."""
    rng = random.Random(seed)
    parts = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "\x00", "NaN", "null",
             "[" * 50, '{"name": "SearchCity", ', '"arguments": {"state": "Texas"}}', '{"name": 5', "9" * 5000,
             "\\ud800", "東京", "\n",
             '<think>x</think><tool_call>{"name": "SearchCity", "arguments": {"state": "Texas"}}</tool_call>']
    episode, start = None, time.perf_counter()
    for i in range(count):
        if episode is None or episode.stop:
            episode = Episode({"query": "go"}, Sandbox(database, 0.1, i), strict=False)
        episode.step("".join(rng.choices(parts, k=rng.randrange(10))))
    print(f"fuzz        {count:,} replies through Episode.step in {time.perf_counter() - start:.1f} s, none raised")


def is_whole(score, task, plan, database, rules):
    """False for the recorded tasks that lack a key on purpose: score tells its caller so."""
    try:
        score(task, plan, database, rules)
    except KeyError:
        return False
    return True


def bench_score(seconds=5):
    """evaluate.score over the recorded plans, repeated, on the official tables; plans/s of one core."""
    try:
        from evaluate import score
    except ImportError as error:
        print(f"score       skipped: {error}")
        return
    shared = Path(os.environ["STAR_TEST_DATA"])
    database = Database(shared / "travelplanner" / "database")
    with gzip.open(shared / "parity" / "cases.jsonl.gz", "rt", encoding="utf-8") as file:
        cases = [(case["task"], case["plan"]) for case in map(json.loads, file)]
    for rules in "star", "official", "strict":
        whole = [case for case in cases if is_whole(score, *case, database, rules)]
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for task, plan in whole:
                score(task, plan, database, rules)
            done += len(whole)
        print(f"score       {rules:9} {done / (time.perf_counter() - start):8,.0f} plans/s over {len(whole):,} plans")


def flags():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, default=3_830_000, help="flights")
    p.add_argument("--calls", type=int, default=60_000, help="tool calls to time")
    p.add_argument("--scans", type=int, default=20, help="flight searches by scanning")
    return p.parse_args()


def main():
    a = flags()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start = time.perf_counter()
        routes, sizes, dates = make_world(folder, a.rows)
        path = folder / TABLES["flights"].file
        size = path.stat().st_size / 2**20
        print(f"world       {a.rows:,} flights, {size:.0f} MiB, made in {time.perf_counter() - start:.0f} s")
        start = time.perf_counter()
        database = Database(folder)
        size = database.index.stat().st_size / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"index       {size:.0f} MiB, built in {time.perf_counter() - start:.1f} s, {peak:.0f} MiB at most")
        calls = make_calls(routes, sizes, dates, list(database.cities), list(database.states), a.calls, seed=1)
        calls_file = folder / "calls.jsonl"
        calls_file.write_text("\n".join(map(json.dumps, calls[:6000])))
        times = time_calls(Sandbox(database), calls)
        for name, seconds in [*times.items(), ("all tools", sum(times.values(), []))]:
            median, p99 = quantiles(seconds)
            print(f"call        {name:22} median {median:6.1f} us   p99 {p99:6.1f} us")
        one_lines, one = processes(1, folder, calls_file)
        imported, opened, resident = one_lines[0][0].split()
        print(f"open        import {imported} s, warm index {opened} s, {resident} MiB resident beyond the interpreter "
              f"({one_lines[0][1].strip()} MiB after 6,000 calls)")
        _, eight = processes(8, folder, calls_file)
        print(f"memory      1 process {one:.0f} MiB, 8 processes {eight:.0f} MiB together (Pss), "
              f"{eight - one:.0f} MiB more")
        bench_fuzz(database)
        searches = [call for call in calls if call[0] == "SearchFlight"]
        name, seconds = scan_seconds(path, searches[:a.scans])
        median, _ = quantiles(times["SearchFlight"])
        print(f"ratio       {name}: {seconds * 1e3:.0f} ms per flight search, "
              f"{seconds * 1e6 / median:,.0f} times SearchFlight's")
    bench_score()


if __name__ == "__main__":
    main()
