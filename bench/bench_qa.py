"""
Compare toolstar/retriever.py with other code in the same run, since a machine's speed varies.

    python bench/bench_qa.py scan     exact search of a million vectors, and a plain numpy matmul
    python bench/bench_qa.py serve    requests per second to /retrieve over BM25

--before REV also measures the code of that commit.

scan   All contestants search in turns. Our code maps the fp16 file and finds the top 5, as the
       server does; numpy has the matrix in memory as float32, twice the size, and computes only
       q @ matrix.T. The peak memory is that of a process of its own. A million passages need 1.5 GB
       in --folder, which is deleted at the end, and 3 GB of memory for numpy.
serve  All servers run at once, and bursts of requests go to one after the other. A client sends one
       query over a new connection, waits for its five hits, and repeats. On a busy machine the CPU
       time of a request says more than the rate.
"""
import argparse
import asyncio
import contextlib
import importlib
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
D, BATCHES = 768, (1, 16, 64)


def check_out(revision, folder):
    """Extract the files of a commit into a folder."""
    archive = ["git", "archive", revision]
    files = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
    return folder


def print_medians(label, unit, speeds):
    """Print the medians of speeds {contestant: [one per round]}, and our ratios to the others."""
    medians = {name: statistics.median(runs) for name, runs in speeds.items()}
    line = f"{label}: " + ", ".join(f"{name} {median:.2f}" for name, median in medians.items())
    now = medians.pop("now")
    ratios = ", ".join(f"{now / median:.2f} of {name}" for name, median in medians.items())
    print(f"{line} {unit}" + (f"; now is {ratios}" if ratios else ""), flush=True)


# ---------------------------------------------------------------- scan

def make_matrix(path, passages):
    """Write random unit vectors as fp16, in pieces."""
    draw = np.random.default_rng(0)
    with open(path, "wb") as file:
        for start in range(0, passages, 20_000):
            piece = draw.standard_normal((min(20_000, passages - start), D), dtype=np.float32)
            piece /= np.linalg.norm(piece, axis=1, keepdims=True)
            file.write(piece.astype(np.float16).tobytes())


def draw_queries(count):
    q = np.random.default_rng(count).standard_normal((count, D), dtype=np.float32)
    return q / np.linalg.norm(q, axis=1, keepdims=True)


def matrix_search(code, path, passages):
    """The search of a checkout's Matrix: a function q -> (rows, scores) of the top 5."""
    import torch

    sys.path.insert(0, str(code))
    matrix = importlib.import_module("toolstar.retriever").Matrix(path, passages, D)
    sys.path.remove(str(code))
    for name in ("toolstar.retriever", "toolstar", "runtime"):
        del sys.modules[name]  # the next checkout has modules of the same names
    return lambda q: matrix.nearest(torch.from_numpy(q), 5)


def numpy_search(path, passages):
    """A plain matmul: a function q -> scores."""
    matrix = np.empty((passages, D), np.float32)
    matrix[:] = np.memmap(path, np.float16, "r", shape=(passages, D))
    return lambda q: q @ matrix.T


def scan(args, codes, folder):
    """Print the queries per second of exact search, and its memory."""
    path = folder / "matrix.f16"
    make_matrix(path, args.passages)
    alone = [sys.executable, __file__, "alone", "--folder", path, "--passages", str(args.passages)]
    peak = float(subprocess.run(alone, check=True, capture_output=True, text=True).stdout)
    size = args.passages * D * 2 / 2**20
    print(f"{args.passages:,} passages x {D}, top 5, medians of {args.rounds} rounds; peak memory "
          f"{peak:,.0f} MiB = the fp16 matrix ({size:,.0f}) + {peak - size:,.0f} MiB")
    searches = {name: matrix_search(code, path, args.passages) for name, code in codes.items()}
    searches["numpy"] = numpy_search(path, args.passages)
    for count in BATCHES:
        q, speeds = draw_queries(count), {name: [] for name in searches}
        for search in searches.values():
            search(q)  # warm
        for turn in range(args.rounds):
            order = list(searches) if turn % 2 else list(searches)[::-1]
            for name in order:
                start = time.perf_counter()
                searches[name](q)
                speeds[name].append(count / (time.perf_counter() - start))
        print_medians(f"batch {count:>2}", "queries/s", speeds)


def scan_alone(args):
    """Print the peak memory in MiB of a process that only searches with our code."""
    search = matrix_search(ROOT, args.folder, args.passages)
    for count in BATCHES:
        search(draw_queries(count))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


# ---------------------------------------------------------------- serve

def make_corpus(path, passages):
    """Write passages of a hundred words, with frequencies as in a natural language."""
    draw = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for i in range(passages):
            words = " ".join(f"w{n}" for n in draw.zipf(1.3, 100) % 50_000)
            file.write(json.dumps({"id": str(i), "contents": f'"Title {i}"\n{words}'}) + "\n")


@contextlib.contextmanager
def server(code, corpus, log):
    """Start a server from a checkout -> (port, process)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, code / "toolstar/retriever.py", "serve", "--retriever", "bm25"]
    paths = os.environ | {"PYTHONPATH": str(code)}  # the script imports modules of its checkout
    with open(log, "w") as out, psutil.Popen(
        [*command, "--corpus", corpus, "--port", str(port)], stdout=out, stderr=out, env=paths
    ) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield port, process
        finally:
            process.terminate()


async def ask(port, query):
    """Send one request over a new connection, like a client without a pool."""
    body = json.dumps({"queries": [query], "topk": 5, "return_scores": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                 b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    reply = await reader.read()
    writer.close()
    assert re.match(rb"HTTP/1.[01] 200 ", reply) and b'"result"' in reply, reply[:200]


async def burst(port, clients, requests):
    """The requests per second of this many clients at once."""
    words = np.random.default_rng(clients).integers(2, 2000, (requests, 6))
    queries = iter([" ".join(f"w{n}" for n in row) for row in words])

    async def client():
        for query in queries:  # all clients draw from one list
            answered = False
            while not answered:
                with contextlib.suppress(ConnectionError):
                    await ask(port, query)
                    answered = True

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return requests / (time.perf_counter() - start)


def serve(args, codes, folder):
    """Print the requests per second of the servers, and the CPU time of a request."""
    corpus = folder / "corpus.jsonl"
    make_corpus(corpus, args.passages)
    print(f"BM25 over {args.passages:,} passages, one query a request, {args.requests:,} requests "
          f"a burst, medians of {args.rounds} bursts")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(code, corpus, folder / f"{name}.log"))
                   for name, code in codes.items()}
        for port, _ in servers.values():
            asyncio.run(burst(port, 8, 200))  # warm
        for clients in (1, 16, 32, 64):
            speeds, costs = ({name: [] for name in servers} for _ in range(2))
            for turn in range(args.rounds):
                for name in list(servers) if turn % 2 else list(servers)[::-1]:
                    port, process = servers[name]
                    before = sum(process.cpu_times()[:2])
                    speeds[name].append(asyncio.run(burst(port, clients, args.requests)))
                    seconds = sum(process.cpu_times()[:2]) - before
                    costs[name].append(1000 * seconds / args.requests)
            print_medians(f"{clients:>2} clients", "requests/s", speeds)
            print_medians("   of the CPU", "ms a request", costs)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("scan", "serve", "alone"), metavar="scan|serve",
                   help="what to measure")
    p.add_argument("--passages", type=int, help="N; default: a million for scan, 20,000 for serve")
    p.add_argument("--rounds", type=int, default=5, help="measurements of each contestant (5)")
    p.add_argument("--requests", type=int, default=1000, help="requests per burst of serve")
    p.add_argument("--before", metavar="REV", help="a commit whose code is measured as well")
    p.add_argument("--folder", default=tempfile.gettempdir(), help="place for files while it runs")
    args = p.parse_args()
    args.passages = args.passages or {"serve": 20_000}.get(args.what, 1_000_000)
    if args.what == "alone":
        scan_alone(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        codes = {"now": ROOT}
        if args.before:
            codes["before"] = check_out(args.before, Path(folder) / "before")
        {"scan": scan, "serve": serve}[args.what](args, codes, Path(folder))


if __name__ == "__main__":
    main()
