"""
Measure the speed of the tools world. Each figure is printed beside its bound.

    python bench/bench_tools.py                 all figures
    python bench/bench_tools.py --only P1 P3    some of them

Programs (toolstar/jail.py):
    P1   calls per second and core
    P2   latency of a call
    P3   speed, compared with a new interpreter that imports numpy and sympy
    P4   speed, compared with a new pool of processes for each call, as Tool-Star's code makes it
    P5   speed over HTTP, compared with a server that starts an interpreter for each request
    P6   wrong answers with 128 callers of 2 workers
    P7   wrong answers and leaks after --soak calls, a tenth of them hostile
    P8   time until the next call is answered after a kill
Play (runtime.py):
    P10  speed of play with slow tools, compared with instant tools
    P11  speed of play with slow tools, compared with rounds in lock-step
    P13  speed of a second run, which finds all answers in the cache

The two sides of a ratio are measured in turns, so that a busy machine slows both.
"""
import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = str(ROOT), str(ROOT / "tests")
from hostile import IDLE, PROGRAMS, Host, below  # noqa: E402

from evaluate import open_engine, play_vllm  # noqa: E402
from sandbox import Action, Episode  # noqa: E402
from toolstar.jail import Jail  # noqa: E402
from toolstar.run_code import Remote  # noqa: E402
from toolstar.tools import Tools, read_settings  # noqa: E402

TURNS, TOKENS, PLACES = 4, 48, 64  # turns per episode, tokens per reply, plays in the engine

SIMPLE = "print(2+3)"
SYMBOLIC = "import numpy, sympy\nprint(sympy.Integer(2) + 3, numpy.arange(5).sum())"


def timed(call, count):
    """The seconds of each of `count` calls."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def say(name, what, bound):
    print(f"{name:4}{what}   (bound: {bound})", flush=True)


def memory(pid):
    """The resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---------------------------------------------------------------- Python

def used(jail):
    """The CPU seconds of this process and of a jail's idle workers with their forks."""
    ticks = 0
    for worker in jail.idle:
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += sum(map(int, fields[11:15]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def p1(args):
    """Calls from as many threads as wait in a rollout, so that no worker is idle. Other work on the
    cores lowers the rate by the clock, but hardly the rate per CPU second."""
    workers = len(os.sched_getaffinity(0))
    with Jail(workers) as jail, ThreadPoolExecutor(PLACES) as pool:
        while len(jail.idle) <= workers:
            time.sleep(0.1)
        list(pool.map(jail.run, [SIMPLE] * 20 * workers))
        start, before = time.perf_counter(), used(jail)
        list(pool.map(jail.run, [SIMPLE] * args.calls))
        rate = args.calls / (time.perf_counter() - start) / workers
        cost = (used(jail) - before) / args.calls
    say("P1", f"{rate:.0f} calls/s and core on {workers} cores; {1 / cost:.0f} in a second of CPU",
        "200")


def p2(args):
    with Jail(1) as jail:
        timed(lambda: jail.run(SIMPLE), 20)
        times = sorted(timed(lambda: jail.run(SIMPLE), args.calls))
    middle, late = times[len(times) // 2] * 1e3, times[len(times) * 99 // 100] * 1e3
    say("P2", f"p50 {middle:.1f} ms, p99 {late:.1f} ms", "6, 30")


def p3(args):
    def fresh():
        subprocess.run([sys.executable, "-c", SYMBOLIC], check=True, stdout=subprocess.DEVNULL)

    with Jail(1) as jail:
        jail.run(SYMBOLIC)
        cold, warm = [], []
        for _ in range(args.rounds):
            cold += timed(fresh, 1)
            warm += timed(lambda: jail.run(SYMBOLIC), 10)
    ratio = statistics.median(cold) / statistics.median(warm)
    say("P3", f"{ratio:.0f} times as fast as a fresh interpreter "
        f"({statistics.median(warm) * 1e3:.1f} ms, {statistics.median(cold) * 1e3:.0f} ms)", "20")


def import_first():
    """The imports of the workers in Tool-Star's code."""
    import numpy  # noqa: F401
    import sympy  # noqa: F401


def p4(args):
    def reference():
        with ProcessPoolExecutor(initializer=import_first) as pool:
            return pool.submit(abs, -5).result()  # less work than any program

    with Jail(1) as jail:
        jail.run(SYMBOLIC)
        cold, warm = [], []
        for _ in range(args.rounds):
            cold += timed(reference, 1)
            warm += timed(lambda: jail.run(SYMBOLIC), 10)
    ratio = statistics.median(cold) / statistics.median(warm)
    say("P4", f"{ratio:.0f} times as fast as a pool for each call", "10")


class Fresh(BaseHTTPRequestHandler):
    """The simplest server of POST /run_code, with a new interpreter for each request."""

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        done = subprocess.run([sys.executable, "-c", SYMBOLIC], capture_output=True)
        self.send_response(200)
        self.end_headers()
        reply = {"status": "Success", "run_result": {
            "status": "Finished", "stdout": done.stdout.decode(), "stderr": ""}}
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        """Print no line per request."""


def p5(args):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cores = len(os.sched_getaffinity(0))
    ours = subprocess.Popen([sys.executable, "-m", "toolstar.jail", "serve", "--port", str(port)],
                            cwd=ROOT)
    theirs = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    try:
        with ThreadPoolExecutor(2 * cores + 1) as pool:
            pool.submit(theirs.serve_forever)
            fast = Remote(f"http://127.0.0.1:{port}")
            slow = Remote(f"http://127.0.0.1:{theirs.server_port}")
            while fast.run(SIMPLE).status != "ok":
                time.sleep(0.1)

            def rate(remote, program, count):
                start = time.perf_counter()
                list(pool.map(remote.run, [program] * count))
                return count / (time.perf_counter() - start) / cores

            simple = rate(fast, SIMPLE, args.calls)
            ratio = rate(fast, SYMBOLIC, args.calls) / rate(slow, SYMBOLIC, 5 * args.rounds)
            theirs.shutdown()
    finally:
        ours.terminate()
        ours.wait()
    say("P5", f"{simple:.0f} calls/s and core over HTTP, {ratio:.1f} times an interpreter for each "
        "request", "120, 5")


def p6(args):
    with Jail(2) as jail, ThreadPoolExecutor(128) as pool:
        results = list(pool.map(lambda i: jail.run("print(input())", str(i)), range(args.calls)))
    wrong = sum(result.stdout != f"{i}\n" for i, result in enumerate(results))
    say("P6", f"{wrong} of {args.calls} answers lost or another's, 128 callers on 2 workers", "0")


def p7(args):
    """--soak calls, a tenth of them hostile; hostile programs that wait have a short time limit."""
    def full():
        """Wait until no worker is starting, since each has descriptors and processes."""
        while len(jail.idle) <= jail.workers:
            time.sleep(0.1)

    with Jail(2) as jail:
        host = Host(args.folder)
        attacks = [(host.fill(program), outcomes >= IDLE) for *_, outcomes, program in PROGRAMS]
        jail.run(SIMPLE)
        timed(lambda: [jail.run(program, "", 0.05) for program, _ in attacks], 1)
        full()
        files, rss = set(os.listdir(args.folder)), memory(os.getpid())
        descriptors, wrong = len(os.listdir("/proc/self/fd")), 0
        for i in range(args.soak):
            if i % 10 == 9:
                program, idle = attacks[i // 10 % len(attacks)]
                jail.run(program, "", 0.05 if idle else 2)
            else:
                wrong += jail.run(SIMPLE).stdout != "5\n"
        full()
        grown = memory(os.getpid()) - rss
        left = len(os.listdir("/proc/self/fd")) - descriptors
        processes = len(below(os.getpid())) - 2 * (jail.workers + 1)
        more = len(set(os.listdir(args.folder)) - files)
    say("P7", f"after {args.soak} calls {wrong} wrong; {processes} processes, {left} descriptors, "
        f"{more} files left; parent {grown:+.1f} MB", "0; 0, 0, 0; 5")
    host.close()


def p8(args):
    """The time until the next call is answered, after a killed program and a killed worker."""
    with Jail(1) as jail:
        programs, workers = [], []
        for _ in range(args.rounds):
            jail.run("while True: pass", "", 0.1)
            programs += timed(lambda: jail.run(SIMPLE), 1)
        for _ in range(args.rounds):
            while len(jail.idle) < 2:
                time.sleep(0.05)
            os.kill(jail.idle[-1].pid, signal.SIGKILL)
            workers += timed(lambda: jail.run(SIMPLE), 1)
    say("P8", f"{statistics.median(programs) * 1e3:.0f} ms after a program was killed, "
        f"{statistics.median(workers) * 1e3:.0f} ms after a worker was (at most "
        f"{max(workers) * 1e3:.0f} ms)", "300 ms")


# ---------------------------------------------------------------- play

class Sleeper:
    """A tool whose calls take the seconds in `waits`."""
    tools = ("Wait",)

    def __init__(self, waits):
        self.waits = list(waits)

    def call(self, name, arguments):
        time.sleep(self.waits.pop())
        return "waited"


class Waiting(Episode):
    """An episode that takes every reply for a call, TURNS - 1 times, and then ends."""

    def begin(self, reply):
        self.messages.append({"role": "assistant", "content": reply})
        self.turns += 1
        if self.turns == TURNS:
            self.stop = "answer"
            return None
        return Action("call", "Wait", {})


def drawn(kind, i):
    """The seconds of the calls of episode i. Pareto: a mean of about 1, a tail up to 10."""
    rng = random.Random(f"{kind}/{i}")
    if kind == "1 s Pareto":
        return [min(10.0, rng.paretovariate(1.5) / 3) for _ in range(TURNS)]
    return [{"0 ms": 0.0, "100 ms": 0.1, "1 s": 1.0}[kind]] * TURNS


def make_waiting(kind, count):
    return [Waiting({"id": i, "query": f"question {i}"}, Sleeper(drawn(kind, i)), 99, "short")
            for i in range(count)]


def overlapped(engine, kind, args):
    """(tokens sampled, seconds) of play_vllm, whose engine works while tools run."""
    llm, template = engine
    episodes, start = make_waiting(kind, args.episodes), time.perf_counter()
    played = play_vllm(llm, template, episodes, 4000, temperature=1.0, top_p=1.0,
                       max_tokens=TOKENS, concurrency=PLACES, slow=True)
    count = sum(1 for _ in played)
    seconds = time.perf_counter() - start
    assert count == args.episodes
    return sum(said(template, episode) for episode in episodes), seconds


def lock_step(engine, kind, args):
    """(tokens sampled, seconds) of the same plays in rounds: sample a reply for all plays of a
    batch, then wait for all their tools."""
    llm, template = engine
    from vllm import SamplingParams

    episodes, start = make_waiting(kind, args.episodes), time.perf_counter()
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, detokenize=False,
                              stop_token_ids=sorted(template.ends), seed=0)
    with ThreadPoolExecutor(PLACES) as pool:
        for first in range(0, len(episodes), PLACES):
            batch = [(e, template.prompt(e.messages)) for e in episodes[first:first + PLACES]]
            while batch:
                prompts = [{"prompt_token_ids": list(ids)} for _, ids in batch]
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
                actions = []
                for (episode, ids), output in zip(batch, outputs, strict=True):
                    ids += output.outputs[0].token_ids
                    actions.append(episode.begin(template.reply(output.outputs[0].token_ids)[0]))
                going = [(play, action) for play, action in zip(batch, actions, strict=True)
                         if action]
                told = list(pool.map(lambda pair: pair[0][0].act(pair[1]), going))
                batch = [play for play, _ in going]
                for (episode, ids), observation in zip(batch, told, strict=True):
                    episode.finish(observation)
                    ids += template.between(episode.messages[-1])
    seconds = time.perf_counter() - start
    return sum(said(template, episode) for episode in episodes), seconds


def said(template, episode):
    """The number of tokens in an episode's replies."""
    return sum(len(template.encode(message["content"])) for message in episode.messages
               if message["role"] == "assistant")


def p10(args):
    """Play with slow tools, compared with instant tools and (P11) with rounds in lock-step."""
    if not args.model:
        print("P10 and P11 need --model, a checkpoint")
        return
    engine = open_engine(args.model, 4000, PLACES)
    overlapped(engine, "0 ms", args)  # warm
    rates = {}
    for kind in ("0 ms", "100 ms", "1 s", "1 s Pareto", "0 ms"):
        tokens, seconds = overlapped(engine, kind, args)
        rates.setdefault(kind, []).append(tokens / seconds)
        print(f"    {kind:10} {tokens} tokens in {seconds:.1f} s", flush=True)
    longest = max(sum(drawn("1 s Pareto", i)[1:]) for i in range(args.episodes))
    print(f"    with the Pareto's waits alone one play takes {longest:.0f} s")
    instant = statistics.mean(rates.pop("0 ms"))
    for kind, (rate,) in rates.items():
        say("P10", f"play with tools of {kind}: {rate / instant:.2f} of play with instant tools",
            ">= 0.85")
    tokens, seconds = lock_step(engine, "1 s Pareto", args)
    ratio = rates["1 s Pareto"][0] / (tokens / seconds)
    say("P11", f"against lock-step rounds, tools of 1 s Pareto: {ratio:.1f} times", ">= 3")


def p13(args):
    """The same searches and programs twice, through a world with a cache."""
    settings = read_settings(ROOT / "database" / "tools")
    settings.tools, settings.cache_python = ["Search", "Python"], True
    settings.cache = str(args.folder / "cache.sqlite")
    world, rounds = Tools(settings), []
    asked = [("Search", {"query": f"tower {i}"}) for i in range(100)]
    asked += [("Python", {"code": f"print({i} ** 2)"}) for i in range(100)]
    for _ in "first", "again":
        start = time.perf_counter()
        cached = sum(world.answer(*call)[2] for call in asked)
        rounds.append((cached / len(asked), time.perf_counter() - start))
    world.close()
    (_, first), (rate, again) = rounds
    say("P13", f"a replay finds {rate:.0%} in the cache and takes {again / first:.2%} of the "
        f"seconds, {again / len(asked) * 1e3:.2f} ms a call", "100%; 1% of what a slow tool takes")


FIGURES = {"P1": p1, "P2": p2, "P3": p3, "P4": p4, "P5": p5, "P6": p6, "P7": p7, "P8": p8,
           "P10": p10, "P13": p13}


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=FIGURES, default=[*FIGURES],
                   help="figures to measure (all)")
    p.add_argument("--calls", type=int, default=1000, help="calls per rate (1000)")
    p.add_argument("--rounds", type=int, default=5, help="rounds per comparison (5)")
    p.add_argument("--soak", type=int, default=10_000, help="P7: number of calls (10,000)")
    p.add_argument("--model", help="P10 and P11: any checkpoint")
    p.add_argument("--episodes", type=int, default=2048, help="P10 and P11: plays per kind (2048)")
    return p.parse_args()


def main():
    args = flags()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        args.folder = tempfile.tempdir = Path(folder)  # P7 counts the files that are left in it
        for name in args.only:
            FIGURES[name](args)


if __name__ == "__main__":
    main()
