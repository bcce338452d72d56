"""Two nodes run the RL stage of run.sh 7b; one is asked to leave, and the pair goes on.

The nodes are two torchrun agents on this machine, each with a core, a rank and a tiny model, over
gloo: run.sh's own commands and waiting, the trainer's sharding and the engine's play, all as on two
machines.
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from runtime import read_jsonl

pytestmark = pytest.mark.slow
STEPS = 5
FLAGS = f"""--steps {STEPS} --prompts 2 --group 2 --context 1024 --max-turns 3 --turn-tokens 64
    --concurrency 4 --system-prompt short --save-every 1 --pack-tokens 4096"""


@pytest.fixture(scope="module")
def disk(tiny_model, tmp_path_factory):
    """The nodes' shared disk: the repository, the environment, and the outputs of all stages before
    rl."""
    disk = tmp_path_factory.mktemp("disk")
    pins = ("requirements.txt", "requirements-cpu.txt")
    for name in ("run.sh", "recipes", "travel", "look", "database", *pins, *ROOT.glob("*.py")):
        (disk / Path(name).name).symlink_to(ROOT / name)
    (disk / ".venv").mkdir()
    for name in "bin", "lib", "pyvenv.cfg":  # Python looks for the others beside its own folder
        if (Path(sys.prefix) / name).exists():
            (disk / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    no_gpu = subprocess.run(["bash", "-c", "nvidia-smi -L"], capture_output=True).returncode != 0
    shutil.copy(ROOT / pins[no_gpu], disk / ".venv" / "installed.txt")
    words = f"synth.py tasks --database database/mini --n 4 --days 3 --out {disk}/data/rl.jsonl"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, capture_output=True)
    for name in ("val", "test", "sft-tasks", "sft"):
        shutil.copy(disk / "data" / "rl.jsonl", disk / "data" / f"{name}.jsonl")
    shutil.copytree(tiny_model, disk / "out" / "sft")
    for name in ("preflight/long.jsonl", "preflight/sft/config.json", "preflight/rl/config.json",
                 "eval/table.md"):
        (disk / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / "out" / name).write_text("as if it had run\n")
    return disk


@pytest.mark.parametrize("way, status", [("kill", 1), ("hang", 1), ("slow", 0)])
def test_a_rank_that_dies_ends_the_other_and_a_slow_one_does_not(way, status):
    # a rank that is not ended waits for ever, and torchrun for an hour
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--shutdown-timeout",
         "3600", "--nproc_per_node", "2", "tests/dying.py", way], cwd=ROOT, capture_output=True,
        text=True, timeout=900)
    assert done.returncode == status, done.stderr[-4000:]
    assert done.stdout.count("slow ended in order") == 2 * (way == "slow")


class Pair:
    """Both nodes, running bash run.sh 7b."""

    def __init__(self, disk):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "GPUS": "1", "HOW": "", "OUT": "out", "DATA": "data", "MODEL": "out/sft",
                    "STAR_DATABASE": "database/mini", "FLAGS_rl": FLAGS}
        self.screens, self.nodes = [disk / f"node{number}.txt" for number in range(2)], []
        cores = 2 * sorted(os.sched_getaffinity(0))
        for number, screen in enumerate(self.screens):
            with screen.open("w") as out:
                self.nodes.append(subprocess.Popen(
                    ["taskset", "-c", str(cores[number]), "bash", "run.sh", "7b"], cwd=disk,
                    env=os.environ | settings | {"NODE_RANK": str(number)}, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True))

    def wait_for(self, update):
        while f"step {update:4d}/{STEPS} " not in self.said(0):
            runs = all(node.poll() is None for node in self.nodes)
            assert runs, self.said(0) + self.said(1)
            time.sleep(0.1)

    def end(self):
        """The exit codes of the nodes."""
        return [node.wait() for node in self.nodes]

    def said(self, number):
        return self.screens[number].read_text()[-8000:]


@pytest.fixture
def pair(disk):
    """A function that starts a Pair; at the end both are killed."""
    started = []
    yield lambda: started.append(Pair(disk)) or started[-1]
    for node in (node for each in started for node in each.nodes):
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)  # torchrun too, and its ranks die with it
        node.wait()


def test_a_node_is_asked_to_leave_and_the_same_commands_go_on_to_the_end(pair, disk):
    out = disk / "out" / "rl"
    # node 0 gets SIGTERM: the update ends, then both save and leave
    first = pair()
    first.wait_for(1)
    os.killpg(first.nodes[0].pid, signal.SIGTERM)
    assert first.end() == [1, 1]
    saved = json.loads((out / "checkpoints" / "latest").read_text())["step"]
    assert 1 <= saved < STEPS and not (out / "config.json").exists()
    # the same commands, to the end; what was done is not done again
    second = pair()
    assert second.end() == [0, 0], second.said(0)
    assert f"step {saved:4d}/" not in second.said(0)
    lines = [line for line in read_jsonl(out / "log.jsonl") if "reward" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert (out / "best" / "config.json").exists() and (out / "config.json").exists()
