"""bench/gpu.py: its messages without a GPU, and the arithmetic of its figures."""
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def gpu():
    return load("gpu")


@pytest.fixture(scope="module")
def trainer():
    return load("gpu_trainer")


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
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


def test_flops_count_weights_the_head_of_policy_tokens_and_causal_attention_by_hand(trainer):
    config = SimpleNamespace(num_hidden_layers=10, hidden_size=1000, vocab_size=100_000,
                             tie_word_embeddings=True)
    # 1.1e9 weights, of which the head 1e8: two rows of 4,000 and 6,000 tokens, 1,000 of the policy
    work = trainer.flops(config, 1.1e9, [4000, 6000], 1000)
    assert work == pytest.approx(6e9 * 1e4 + 6e8 * 1000 + 6e4 * (16e6 + 36e6))
    config.tie_word_embeddings = False  # then the embedding, which computes nothing, is another 1e8
    assert trainer.flops(config, 1.2e9, [4000, 6000], 1000) == pytest.approx(work)


def test_rows_are_a_quarter_the_policys_and_end_with_a_reply(trainer):
    args = SimpleNamespace(mean=10_000, most=30_000, micros=4, pack_tokens=32_768)
    weighted = trainer.make_rows(args, 1000)
    policy, tokens = (sum(each) for each in zip(*(
        (sum(s.mask), len(s.mask)) for s, _ in weighted), strict=True))
    assert 0.24 < policy / tokens < 0.27 and 0.85 < tokens / (4 * 32_768) < 1.3
    assert all(len(s.ids) == len(s.mask) == len(s.logps) <= 30_000 for s, _ in weighted)
    assert all((s.mask[0], s.mask[-1]) == (0, 1) for s, _ in weighted)
    assert sum(weight * sum(s.mask) for s, weight in weighted) == pytest.approx(1)


def test_parts_that_do_not_fit_the_budget_are_skipped_and_named_and_no_old_run_counts(
        gpu, tmp_path):
    (tmp_path / "rl").mkdir()
    words = ["--rehearse", "--budget", "0.01", "--out", tmp_path]
    done = subprocess.run([sys.executable, "bench/gpu.py", *words], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    for part, minutes in gpu.PARTS.items():
        said = f"skipped: 0.0 minutes are left, and it needs about {minutes} minutes"
        assert f"| {part} |  | {said} |" in report
    assert not (tmp_path / "rl").exists()


@pytest.mark.slow
def test_the_trainers_part_runs_on_a_cpu_and_measures_what_a_cpu_can(tmp_path):
    done = subprocess.run([sys.executable, "bench/gpu.py", "--rehearse", "--parts", "trainer",
                           "--out", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if "trainer" in line]
    assert len(rows) == 9 and sum("tokens_s" in row for row in rows) == 5
    assert sum("a GPU is needed" in row for row in rows) == 4


PACKED = """if True:
    import json, sys
    import torch
    from torch.nn.attention import varlen
    sys.path.insert(0, "bench")
    import gpu_trainer

    def attention(q, k, v, begins, *_, scale, window_size, enable_gqa):  # PyTorch's is for CUDA
        assert window_size == (-1, 0) and enable_gqa
        parts = [each.transpose(0, 1)[None].split(begins.diff().tolist(), 2) for each in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        rows = [sdpa(*row, is_causal=True, scale=scale, enable_gqa=True) for row in zip(*parts)]
        return torch.cat(rows, 2)[0].transpose(0, 1)

    varlen.varlen_attn = attention
    sys.argv[1:] = "--shape rehearsal --mean 100 --most 300 --pack-tokens 512".split()
    bench = gpu_trainer.Bench(gpu_trainer.flags())
    bench.trainer.optimizer.param_groups[0]["lr"] = 0.0
    found = [bench.update()[0]]
    change_back = gpu_trainer.varlen(bench)
    found.append(bench.update()[0] if bench.packed else None)
    change_back()
    found.append(bench.update()[0] if not bench.packed else None)
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_variant_of_packed_rows_learns_what_padded_rows_do():
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", PACKED], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | alone | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    padded, packed, again = json.loads(done.stdout.splitlines()[-1])
    assert packed == pytest.approx(padded, rel=1e-4) and again == pytest.approx(padded, rel=1e-6)
    assert padded["gnorm"] > 0


def test_a_report_names_what_failed_and_is_written_as_it_grows(gpu, tmp_path):
    report = gpu.Report(tmp_path)
    report.add("one", True, "1")
    report.add("two", False, "no")
    report.add("three", None, "3")
    assert report.failed() == ["two"]
    assert (tmp_path / "report.md").read_text().splitlines()[2:] == [
        "| one | pass | 1 |", "| two | FAIL | no |", "| three |  | 3 |"]
