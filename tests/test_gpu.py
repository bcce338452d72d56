"""bench/gpu.py: what it says where no GPU is, and the arithmetic behind its figures."""
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_bench", ROOT / "bench" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    done = subprocess.run([sys.executable, "bench/gpu.py", "--out", tmp_path / "gpu"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and "sees no GPU here" in done.stderr
    assert not (tmp_path / "gpu").exists()


def test_utilisation_counts_weights_and_causal_attention_by_hand(gpu):
    config = SimpleNamespace(num_hidden_layers=10, hidden_size=1000)
    # 1e9 weights: 6e9 FLOPs a token; attention over 4,000 tokens: 6 x 10 x 1,000 x 4,000 = 2.4e8
    share = gpu.mfu(config, 1e9, tokens=1e4, length=4000, seconds=2, peak=312e12)
    assert share == pytest.approx(1e4 * 6.24e9 / 2 / 312e12) == pytest.approx(0.1)


def test_a_report_names_what_failed_and_is_written_as_it_grows(gpu, tmp_path):
    report = gpu.Report(tmp_path)
    report.add("one", True, "1")
    report.add("two", False, "no")
    report.add("three", None, "3")
    assert report.failed() == ["two"]
    assert (tmp_path / "report.md").read_text().splitlines()[2:] == [
        "| one | pass | 1 |", "| two | FAIL | no |", "| three |  | 3 |"]
