"""
Exact search of qa_eval.py over a million passages, against a plain numpy matmul on the same machine in the same run.

    python tests/bench_qa.py                       1M x 768: 1.5 GB under --folder, deleted at the end; about 2 minutes
    python tests/bench_qa.py --passages 100000     a quick look

Each round starts two processes, one after the other: ours maps the fp16 file and searches it as the server does, top 5;
numpy holds the matrix in memory as float32, twice the size, and does nothing but q @ matrix.T. Printed are the medians
over the rounds of queries per second, their ratio, and the peak memory of our process beyond the size of the file.
"""
import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

D, BATCHES = 768, (1, 16, 64)


def make_matrix(path, passages):
    """Random unit vectors as fp16, written a piece at a time."""
    draw = np.random.default_rng(0)
    with open(path, "wb") as file:
        for start in range(0, passages, 20_000):
            piece = draw.standard_normal((min(20_000, passages - start), D), dtype=np.float32)
            file.write((piece / np.linalg.norm(piece, axis=1, keepdims=True)).astype(np.float16).tobytes())


def queries(count):
    q = np.random.default_rng(count).standard_normal((count, D), dtype=np.float32)
    return q / np.linalg.norm(q, axis=1, keepdims=True)


def clock(search):
    """Queries per second at each batch size: the faster of two scans, after a first one that warms the page cache."""
    speeds = {}
    search(queries(1))
    for count in BATCHES:
        q, times = queries(count), []
        for _ in range(2):
            start = time.perf_counter()
            search(q)
            times.append(time.perf_counter() - start)
        speeds[count] = count / min(times)
    return speeds


def ours(path, passages):
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import torch

    import qa_eval
    matrix = qa_eval.Matrix(path, passages, D)
    return clock(lambda q: matrix.nearest(torch.from_numpy(q), 5))


def plain(path, passages):
    matrix = np.empty((passages, D), np.float32)
    matrix[:] = np.memmap(path, np.float16, "r", shape=(passages, D))
    return clock(lambda q: q @ matrix.T)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--passages", type=int, default=1_000_000, help="N")
    p.add_argument("--rounds", type=int, default=3, help="of both, in turn")
    p.add_argument("--folder", default=tempfile.gettempdir(), help="where the matrix lives meanwhile")
    p.add_argument("--part", choices=("ours", "plain"), help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.part:
        speeds = {"ours": ours, "plain": plain}[a.part](a.folder, a.passages)
        print(json.dumps({"speeds": speeds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        path = f"{folder}/matrix.f16"
        make_matrix(path, a.passages)
        found = {"ours": [], "plain": []}
        for _ in range(a.rounds):
            for part, runs in found.items():
                command = [sys.executable, __file__, "--part", part, "--folder", path, "--passages", str(a.passages)]
                runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    size, peak = a.passages * D * 2 / 2**20, max(run["peak"] for run in found["ours"])
    print(f"{a.passages:,} passages x {D}, top 5, medians of {a.rounds} rounds")
    for count in map(str, BATCHES):
        ours_, plain_ = (statistics.median(run["speeds"][count] for run in found[part]) for part in ("ours", "plain"))
        print(f"batch {count:>2}: ours {ours_:6.2f} queries/s, numpy matmul {plain_:6.2f}, ratio {ours_ / plain_:.2f}")
    print(f"peak memory {peak:,.0f} MiB = the fp16 matrix ({size:,.0f}) + {peak - size:,.0f} MiB")


if __name__ == "__main__":
    main()
