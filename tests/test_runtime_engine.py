"""Checks before an engine starts, and engines that share the tasks give the same table."""
import multiprocessing
import os
import subprocess
import sys
from functools import partial

import pytest
from conftest import ROOT, SEED

import evaluate
import runtime
from runtime import read_jsonl, write_jsonl
from travel.world import load_task


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


def test_processes_that_share_the_tasks_give_the_table_of_one_also_after_a_kill(tasks, tmp_path):
    words = ("--agent", "solver", "--processes")
    one, three = (table(tmp_path / n, tasks, *words, n) for n in "13")
    file = tmp_path / "3" / "solver" / "episodes.jsonl"
    rows = read_jsonl(file)
    write_jsonl(file, rows[4:])  # what the kill has left
    assert one == three == table(tmp_path / "3", tasks, *words, "2")
    assert len(read_jsonl(file)) == len(rows) == 7


@pytest.mark.slow
def test_two_real_engines_give_the_table_of_one(tiny_model, tasks, tmp_path):
    words = f"""--model tiny={tiny_model} --system-prompt short --max-turns 2 --max-tokens 24
                --max-context 600 --processes""".split()
    one, two = (table(tmp_path / n, tasks, *words, n) for n in "12")
    assert one == two and "| episodes | 7 |" in one


def test_a_process_that_fails_stops_the_run_and_loses_no_row_of_the_others(
        tasks, tmp_path, capfd, monkeypatch):
    bad = read_jsonl(tasks)[1]["id"]
    (tmp_path / "odd.py").write_text(f"""if True:
        from sandbox import open_database
        from travel.world import Travel, flags

        class Odd(Travel):
            def verdict(self, episode):
                if episode.task["id"] == "{bad}":
                    raise ValueError("a verdict that fails")
                return super().verdict(episode)

        def open_world(args):
            return Odd(open_database(args.database))
    """)
    words = f"--agent solver --env {tmp_path}/odd.py --limit 3 --processes 3".split()
    with pytest.raises(SystemExit, match="odd.py: verdict, task .*: a verdict that fails"):
        table(tmp_path, tasks, *words)
    assert len(read_jsonl(tmp_path / "solver" / "episodes.jsonl")) == 2


def test_a_caller_that_stops_early_leaves_no_process_behind(tasks, tmp_path):
    words = f"--agent solver --tasks {tasks} --out {tmp_path} --processes 3"
    args = evaluate.flags(words.split())
    play = partial(evaluate.play_rows, args, "solver", None, False)
    rows = evaluate.in_processes("evaluate.py", play, runtime.load_tasks(tasks, load_task), args)
    assert next(row for row in rows if row)["score"]["success"] == 1
    rows.close()
    assert not multiprocessing.active_children()
