"""Short drills: stages of one process and of two ranks are killed and lose nothing."""
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_killed_and_resumed_stages_end_with_the_results_of_undisturbed_ones(tmp_path):
    words = "--kills 2 --per-run 1 --stages data sft --no-more --out"
    done = subprocess.run([sys.executable, "tests/drill.py", *words.split(), tmp_path], cwd=ROOT,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    heads, *lines = [line.split() for line in done.stdout.rpartition("\n\n")[2].splitlines()]
    total = dict(zip(heads, lines[-1], strict=True))
    assert total["tried"] == total["recovered"] == total["equal"]
    assert {total[name] for name in ("lost", "doubled", "orphans", "litter")} == {"0"}
