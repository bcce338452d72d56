"""
What it costs to import each module of the house, and what heavy ones that pulls in.

    python bench/bench_import.py

Every module is imported in fresh processes, alone and with torch loaded before the clock starts;
the best of --rounds is printed. All but the trainers should take less than half a second alone.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "openai", "fastapi", "numpy")
CODE = """
import json, sys, time
first, name, *heavy = sys.argv[1:]
if first:
    __import__(first)
before, start = set(sys.modules), time.perf_counter()
__import__(name)
seconds = time.perf_counter() - start
print(json.dumps([seconds, [each for each in heavy if each in sys.modules.keys() - before]]))
"""


def measure(name, first, rounds):
    """(seconds, heavy modules that came along) of an import, the best of a few processes."""
    command = [sys.executable, "-W", "ignore", "-c", CODE, first, name, *HEAVY]
    lines = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
             for _ in range(rounds)]
    return min(json.loads(line.splitlines()[-1]) for line in lines)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3, help="processes per module and way")
    args = p.parse_args()
    print(f"{'module':14} {'alone':>8} {'after torch':>12}   pulls in")
    for path in sorted(ROOT.glob("*.py")):
        alone, heavy = measure(path.stem, "", args.rounds)
        after, _ = measure(path.stem, "torch", args.rounds)
        print(f"{path.stem:14} {alone:6.2f} s {after:10.2f} s   {', '.join(heavy)}", flush=True)


if __name__ == "__main__":
    main()
