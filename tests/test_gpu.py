"""bench/gpu.py: the arithmetic of its figures, what it says of cases that fail, and a rehearsal."""
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}


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


def test_rows_are_a_quarter_the_policys_and_end_with_a_reply(gpu):
    rows = gpu.make_rows([5000, 14336, 720], 1000)
    assert 0.24 < sum(sum(s.mask) for s, _ in rows) / 20056 < 0.27
    assert all(len(s.ids) == len(s.mask) == len(s.logps) for s, _ in rows)
    assert all((s.mask[0], s.mask[-1]) == (0, 1) for s, _ in rows)
    assert sum(weight * sum(s.mask) for s, weight in rows) == pytest.approx(1)


def test_without_a_gpu_it_says_so_and_names_every_case_that_no_time_is_left_for(gpu, tmp_path):
    report = report_of(tmp_path, "--budget", "0")
    assert "PyTorch sees none: this only rehearses" in report.pop("GPUs")[1]
    assert report.pop("versions")
    cases = {f"{part}, {case}" for part, cases in gpu.CASES.items() for case in cases}
    assert set(report) == cases and len(cases) == 9
    assert {told for _, told in report.values()} <= {"skipped: no time is left",
                                                     "skipped: vllm is not installed"}


def test_a_case_that_fails_is_told_with_its_reason(gpu, tmp_path):
    lines = []
    gpu.run_case("memory", "a case of none", tmp_path, 100, lambda *line: lines.append(line))
    assert lines == [("memory, a case of none", False, "KeyError: 'a case of none'")]


@pytest.mark.slow
def test_a_rehearsal_measures_an_update_and_keeps_activations_without_changing_a_bit(tmp_path):
    report = report_of(tmp_path, "--parts", "numbers", "speed")
    assert not [claim for claim, (verdict, _) in report.items() if verdict == "FAILED"], report
    assert report[next(claim for claim in report if "cosine" in claim)][0] == "passed"
    kept = [told for claim, (_, told) in report.items() if "--keep-activations" in claim]
    assert len(kept) == 3 and all("bit for bit" in told for told in kept)


PACKED = """if True:
    import json, sys
    import torch
    from torch.nn.attention import varlen
    sys.path.insert(0, "bench")
    import gpu, grpo, runtime

    def attention(q, k, v, begins, *_, scale, window_size):  # PyTorch's is for CUDA
        assert window_size == (-1, 0) and q.shape == k.shape
        parts = [each.transpose(0, 1)[None].split(begins.diff().tolist(), 2) for each in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        rows = [sdpa(*row, is_causal=True, scale=scale) for row in zip(*parts)]
        return torch.cat(rows, 2)[0].transpose(0, 1)

    varlen.varlen_attn = attention
    lm, args, device = gpu.start("rehearsal", "--pack-tokens 512")
    trainer = runtime.zero3(grpo.Policy(lm), args, device)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    rows, found = gpu.make_rows([100, 300, 90, 40], 1000), []

    def measure(name, packed=False):
        found.append(grpo.learn(trainer, rows, packed, 0, 1, device, args))

    measure("padded")
    gpu.varlen(lm, measure)
    measure("padded again")
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_packed_rows_learn_what_padded_rows_do():
    done = subprocess.run([sys.executable, "-c", PACKED], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | ALONE | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    padded, packed, again = json.loads(done.stdout.splitlines()[-1])
    assert packed == pytest.approx(padded, rel=1e-4) and again == pytest.approx(padded, rel=1e-6)
    assert padded["gnorm"] > 0
