"""
What the tools world costs, each figure beside its bound.

    python bench/bench_tools.py                 all of it
    python bench/bench_tools.py --only P1 P3    some

Python (toolstar/jail.py): P1 calls per second of a core; P2 latency; P3 against a fresh interpreter
that imports numpy and sympy; P4 against a pool of processes made for each call, as the reference
makes it; P5 over HTTP, against a server that starts an interpreter for each request; P6 128 callers
of 2 workers; P7 a soak of --soak calls, a tenth of them hostile; P8 the call after a kill.
Ratios come from one run, in turns, so that a busy machine slows both sides.
"""
import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = str(ROOT), str(ROOT / "tests")
from hostile import IDLE, PROGRAMS, Host, below  # noqa: E402

from toolstar.jail import Jail, Remote  # noqa: E402

SIMPLE = "print(2+3)"
SYMBOLIC = "import numpy, sympy\nprint(sympy.factor(sympy.Symbol('x')**2 - 1), numpy.arange(5).sum())"


def timed(call, count):
    """Seconds of each of some calls."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def say(name, what, bound):
    print(f"{name:4}{what}   (bound: {bound})", flush=True)


def memory(pid):
    """MiB in memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---------------------------------------------------------------- Python

def p1(args):
    """All workers at once; the rate is of a core that is used, so that idle cores do not count."""
    workers = len(os.sched_getaffinity(0))
    with Jail(workers) as jail, ThreadPoolExecutor(workers) as pool:
        list(pool.map(jail.run, [SIMPLE] * 20 * workers))
        start = time.perf_counter()
        list(pool.map(jail.run, [SIMPLE] * args.calls))
        rate = args.calls / (time.perf_counter() - start)
    say("P1", f"{rate / workers:.0f} calls/s and core, on {workers}", "200")


def p2(args):
    with Jail(1) as jail:
        timed(lambda: jail.run(SIMPLE), 20)
        times = sorted(timed(lambda: jail.run(SIMPLE), args.calls))
    say("P2", f"p50 {times[len(times) // 2] * 1e3:.1f} ms, p99 {times[len(times) * 99 // 100] * 1e3:.1f} ms",
        "6, 30")


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
    import numpy  # noqa: F401
    import sympy  # noqa: F401


def run_here(program):
    """A program in this process, as the reference's pool runs it."""
    with contextlib.redirect_stdout(None):
        return subprocess._args_from_interpreter_flags() and program


def p4(args):
    def reference():
        with ProcessPoolExecutor(initializer=import_first) as pool:
            return pool.submit(run_here, SYMBOLIC).result()

    with Jail(1) as jail:
        jail.run(SYMBOLIC)
        cold, warm = [], []
        for _ in range(args.rounds):
            cold += timed(reference, 1)
            warm += timed(lambda: jail.run(SYMBOLIC), 10)
    ratio = statistics.median(cold) / statistics.median(warm)
    say("P4", f"{ratio:.0f} times as fast as a pool for each call", "10")


class Fresh(BaseHTTPRequestHandler):
    """POST /run_code, an interpreter for each request; programs and answers are the least there is."""

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        done = subprocess.run([sys.executable, "-c", SIMPLE], capture_output=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "Success", "run_result": {"status": "Finished", "stdout": "%s",'
                         b' "stderr": ""}}' % done.stdout.strip())

    def log_message(self, *_):
        """Say nothing."""


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
            rates = []
            for remote, count in (fast, args.calls), (slow, args.calls // 10):
                start = time.perf_counter()
                list(pool.map(remote.run, [SIMPLE] * count))
                rates.append(count / (time.perf_counter() - start) / cores)
            theirs.shutdown()
    finally:
        ours.terminate()
        ours.wait()
    say("P5", f"{rates[0]:.0f} calls/s and core over HTTP, {rates[0] / rates[1]:.1f} times an "
        "interpreter for each request", "120, 5")


def p6(args):
    with Jail(2) as jail, ThreadPoolExecutor(128) as pool:
        results = list(pool.map(lambda i: jail.run("print(input())", str(i)), range(args.calls)))
    wrong = sum(result.stdout != f"{i}\n" for i, result in enumerate(results))
    say("P6", f"{wrong} of {args.calls} answers lost or another's, 128 callers on 2 workers", "0")


def p7(args):
    """Hostile programs that run into the clock have little of it."""
    folder = Path("/tmp")
    with Jail(2) as jail:
        host = Host(args.folder)
        attacks = [(host.fill(program), outcomes >= IDLE) for *_, outcomes, program in PROGRAMS]
        jail.run(SIMPLE)
        timed(lambda: [jail.run(program, "", 0.05) for program, _ in attacks], 1)
        files, rss = set(os.listdir(folder)), memory(os.getpid())
        descriptors, wrong = len(os.listdir("/proc/self/fd")), 0
        for i in range(args.soak):
            if i % 10 == 9:
                program, idle = attacks[i // 10 % len(attacks)]
                jail.run(program, "", 0.05 if idle else 2)
            else:
                wrong += jail.run(SIMPLE).stdout != "5\n"
        time.sleep(3)  # a worker may be on its way
        grown = memory(os.getpid()) - rss
        left = len(os.listdir("/proc/self/fd")) - descriptors
        processes = len(below(os.getpid())) - 2 * (jail.workers + 1)
        host.close()
    say("P7", f"after {args.soak} calls {wrong} wrong, {processes} processes, {left} descriptors, "
        f"{len(set(os.listdir(folder)) - files)} files left, parent {grown:+.1f} MB", "0, 0, 0, 0, 5")


def p8(args):
    """A killed program, then a killed worker: the time until the next call has its answer."""
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


FIGURES = {"P1": p1, "P2": p2, "P3": p3, "P4": p4, "P5": p5, "P6": p6, "P7": p7, "P8": p8}


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=FIGURES, default=[*FIGURES], help="figures to take")
    p.add_argument("--calls", type=int, default=1000, help="that a rate is taken over")
    p.add_argument("--rounds", type=int, default=5, help="of a comparison")
    p.add_argument("--soak", type=int, default=10_000, help="calls of P7")
    p.add_argument("--folder", type=Path, help="an empty folder for P7's secrets; one of its own")
    return p.parse_args()


def main():
    import tempfile
    args = flags()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or Path(folder)
        for name in args.only:
            FIGURES[name](args)


if __name__ == "__main__":
    main()
