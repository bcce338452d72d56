"""Checks before an engine starts, and engines that share the tasks give the same table."""
import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, SEED

import evaluate
import runtime


def python(code, **variables):
    """Run a few lines in a new process with only these of vLLM's variables."""
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith(("VLLM", "CUDA", "PYTORCH_NVML"))}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=inherited | variables, timeout=120)


def test_variables_are_set_before_the_first_look_at_cuda():
    done = python("""if True:
        import os, torch
        seen, look = [], torch.cuda.device_count

        def looked():
            seen.append(dict(os.environ))
            return look()

        torch.cuda.device_count = torch.cuda.is_available = looked
        import runtime
        runtime.engine_settings(100, 1, 1, 0.5)
        for name, value in (("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
                            ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
                            ("VLLM_USE_FLASHINFER_SAMPLER", "0")):
            assert seen and all(now.get(name) == value for now in seen), (name, seen)
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("start", [
    "import runtime; runtime.engine_settings(100, 1, 1, 0.5)", "import sft; sft.setup()",
    "import grpo; grpo.setup()", "import arpo; arpo.setup()"])
@pytest.mark.parametrize("visible, stops", [(None, True), ("0,1", True), ("", False)])
def test_a_build_for_gpus_that_sees_none_stops_unless_the_cpu_is_meant(start, visible, stops):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = python("import torch; torch.version.cuda = '13.0'; torch.cuda.device_count = lambda: 0\n"
                  "torch.distributed.init_process_group = lambda *_, **__: exit(0)\n" + start,
                  RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **variables)
    assert done.returncode == stops, done.stderr
    assert ("R580" in done.stderr) == stops


@pytest.mark.parametrize("chosen, count, names", [
    (None, 2, ["0", "1"]), ("2,3", 2, ["2", "3"]), ("MIG-a", 1, ["MIG-a"]), ("", 0, [])])
def test_visible_gpus_are_those_of_the_variable(monkeypatch, chosen, count, names):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert runtime.visible_gpus() == names


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A file of seven tasks of the mini world."""
    out = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    words = f"synth.py tasks --n 7 --days 3 --like tiny --seed {SEED} --workers 2 --out {out}"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, capture_output=True)
    return out


def table(out, tasks, *words):
    evaluate.main(["--tasks", str(tasks), "--out", str(out), *words])
    return (out / "table.md").read_text()


@pytest.mark.slow
def test_two_real_engines_give_the_table_of_one(tiny_model, tasks, tmp_path, monkeypatch):
    words = f"""--model tiny={tiny_model} --system-prompt short --max-turns 2 --max-tokens 24
                --max-context 600""".split()
    one = table(tmp_path / "1", tasks, *words)
    monkeypatch.setattr(runtime, "visible_gpus", lambda: ["0", "1"])  # the engines see none of them
    assert table(tmp_path / "2", tasks, *words) == one and "| 7 " in one


def rows_of(tasks):
    """Stands for an engine's plays, in a process of its own."""
    for task in tasks:
        if task == "bad":
            raise ValueError("a slip")
        if task == "slow":
            time.sleep(600)
        yield os.environ.get("CUDA_VISIBLE_DEVICES"), task


def shared(tasks, gpus, monkeypatch, tp=1):
    monkeypatch.setattr(runtime, "visible_gpus", lambda: gpus)
    return evaluate.in_processes(rows_of, tasks, SimpleNamespace(url=None, tp=tp))


def test_every_engine_has_its_gpus_and_a_share_of_the_tasks(monkeypatch):
    found = list(shared("abcd", ["2", "3", "6", "7"], monkeypatch, tp=2))
    assert sorted(found) == [("2,3", "a"), ("2,3", "c"), ("6,7", "b"), ("6,7", "d")]


def test_an_engine_that_fails_stops_the_run_and_loses_no_row_of_the_others(monkeypatch, capfd):
    rows, found = shared(["a", "bad", "c", "d"], ["0", "1"], monkeypatch), []
    with pytest.raises(SystemExit, match="stopped early"):
        found.extend(iter(lambda: next(rows), None))
    assert {task for _, task in found} >= {"a", "c"} and "a slip" in capfd.readouterr().err


def test_a_caller_that_stops_early_leaves_no_process_behind(monkeypatch):
    rows = shared(["a", "slow"], ["0", "1"], monkeypatch)
    assert next(rows)[1] == "a"
    rows.close()
    for child in multiprocessing.active_children():
        child.join(60)
    assert not multiprocessing.active_children()
