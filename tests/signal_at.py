"""Run a stage that gets a signal at a chosen moment, so that no test races with a run.

    python tests/signal_at.py KILL 3 grpo.py --model out/sft ...

sends SIGKILL when the shards of the third checkpoint are written, and `latest`, which makes them
count, is about to take its name.
"""
import os
import runpy
import signal
import sys

_, name, times, *sys.argv = sys.argv
left = iter(range(int(times) - 1, -1, -1))


def hook(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("latest") and next(left, 1) == 0:
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


sys.addaudithook(hook)
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
