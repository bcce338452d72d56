"""bench/gpu.py: the arithmetic of its figures, what it says of cases that fail, and a rehearsal."""
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "bench" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report_of(folder, *words):
    """{claim: (verdict, measured)} of the script on the CPU."""
    subprocess.run([sys.executable, "bench/gpu.py", "--out", folder, *words], cwd=ROOT,
                   env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True)
    rows = (folder / "report.md").read_text().replace("\\|", "/").splitlines()[2:]
    return {claim: tuple(rest) for claim, *rest in
            (row.strip("| ").replace(" |  | ", " | - | ").split(" | ") for row in rows)}


def test_flops_count_weights_the_head_of_policy_tokens_and_causal_attention_by_hand(gpu):
    config = SimpleNamespace(num_hidden_layers=10, hidden_size=1000, vocab_size=100_000,
                             tie_word_embeddings=True)
    # 1.1e9 weights, of which the head 1e8: two rows of 4,000 and 6,000 tokens, 1,000 of the policy
    work = gpu.flops(config, 1.1e9, [4000, 6000], 1000)
    assert work == pytest.approx(6e9 * 1e4 + 6e8 * 1000 + 6e4 * (16e6 + 36e6))
    config.tie_word_embeddings = False  # then the embedding, which computes nothing, is another 1e8
    assert gpu.flops(config, 1.2e9, [4000, 6000], 1000) == pytest.approx(work)


@pytest.mark.slow
def test_a_rehearsal_measures_an_update_and_keeps_activations_without_changing_a_bit(tmp_path):
    report = report_of(tmp_path, "--parts", "numbers", "speed")
    assert not [claim for claim, (verdict, _) in report.items() if verdict == "FAILED"], report
    assert report[next(claim for claim in report if "cosine" in claim)][0] == "passed"
    kept = [told for claim, (_, told) in report.items() if "--keep-activations" in claim]
    assert len(kept) == 3 and all("bit for bit" in told for told in kept)
