"""What protects a run: one writer, no orphans, one-line mistakes, checkpoints, complete models."""
import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, flags_of, train

import runtime
import sft
import zero3
from runtime import Mistake, read_jsonl, write_jsonl, write_text


def start(text, folder, command=(sys.executable,)):
    """Start a program -> (its process, its first line)."""
    file = Path(folder) / "program.py"
    file.write_text(textwrap.dedent(text))
    child = subprocess.Popen([*command, str(file), str(folder)], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return child, child.stdout.readline().split()


# ---------------------------------------------------------------------------------------- processes

def test_a_second_writer_is_refused_until_the_first_is_killed_and_other_ranks_may_pass(
        tmp_path, monkeypatch):
    child, _ = start("""
        import sys, time
        from runtime import lock_folder
        lock_folder(sys.argv[1] + "/out")
        print("locked", flush=True)
        time.sleep(600)
        """, tmp_path)
    with pytest.raises(Mistake, match=f"{tmp_path}/out"):
        runtime.lock_folder(tmp_path / "out")
    monkeypatch.setenv("RANK", "1")  # of torchrun's; else it is a cluster's, of a node
    with pytest.raises(Mistake):
        runtime.lock_folder(tmp_path / "out")
    monkeypatch.setenv("LOCAL_RANK", "1")
    runtime.lock_folder(tmp_path / "out")
    monkeypatch.setenv("RANK", "0")
    child.kill()
    child.communicate()
    runtime.lock_folder(tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_ranks_die_with_a_killed_torchrun(tmp_path):
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    child, _ = start("""
        import signal
        from runtime import die_with_parent
        die_with_parent()
        print("ready", flush=True)
        signal.pause()
        """, tmp_path, command)
    child.kill()
    child.communicate()  # until the rank, which has the other end of the pipe, is gone


def test_a_build_that_was_killed_does_not_stop_the_next_start(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = Path(cpp_extension._get_build_directory("deepspeed_shm_comm", False)) / "lock"
    lock.touch()  # PyTorch would wait for whoever made it
    (lock.parent / ".ninja_deps").write_text("half a file")
    found = []
    (other := tmp_path / "cpu_adam" / "lock").parent.mkdir()
    other.touch()  # another op may be compiling now
    zero3.compile_op("deepspeed_shm_comm", lambda: found.append([*lock.parent.iterdir()]))
    assert other.exists()
    assert found == [[]] and tmp_path in lock.parents


# ----------------------------------------------------------------------------------------- one line

def test_a_mistake_is_one_line_and_everything_else_keeps_its_traceback(capsys):
    def fail(error):
        raise error

    with pytest.raises(SystemExit) as stopped:
        runtime.run("x.py", fail, Mistake("a.jsonl is not a file"))
    assert stopped.value.code == "x.py: a.jsonl is not a file"
    for error in (ValueError("too many values to unpack"), KeyError("x"), OSError("no room")):
        with pytest.raises(type(error)):
            runtime.run("x.py", fail, error)
    with pytest.raises(SystemExit) as stopped:
        runtime.run("x.py", fail, KeyboardInterrupt())
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "x.py: interrupted; repeat the command to continue\n"


@pytest.mark.parametrize("program, said", [
    ("import sys; sys.prefix = '/usr'; import torsh", "No module named 'torsh'. `. .venv/bin/"),
    ("print('line\\n' * 10**6)", ""), ("print('line')", "")])
def test_a_wrong_python_is_told_in_a_line_and_a_reader_that_has_gone_in_none(program, said):
    program = f"import runtime\nruntime.run('x.py', str)\n{program}"
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    told = child.stderr.read()
    assert told.count("\n") == bool(said) and said in told


BAD = [("sft", words) for words in ("--batch 2.5", "--lr nan", "--warmup 2", "--date x",
                                    "--keep-activations -1", "--lora 0", "--track excel")]
BAD += [("grpo", words) for words in ("--group 0", "--temperature 0", "--loss-norm sum",
                                      "--gpu-memory 60", "--failure-rate 2")]
BAD += [("arpo", "--branch both"), ("look.memory", "ppo")]
BAD += [(stage, "--val-every 7") for stage in ("sft", "grpo", "arpo", "dpo")]  # without effect
BAD += [("evaluate", words) for words in (
    "--url http://a/v1 --tp 2", "--url http://a/v1 --gpu-memory 1", "--key k", "--ask x --limit 3")]
BAD += [("synth", f"episodes --tasks t --out o {words}")
        for words in ("--key k", "--endpoint http://a/v1=m --exploring 0.5")]


@pytest.mark.parametrize("stage, words", BAD)
def test_a_flag_out_of_bounds_is_one_line_that_names_it(stage, words, capsys):
    module = importlib.import_module(stage)
    with pytest.raises(SystemExit) as stopped:
        flags_of(module, words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert ("stage" if words == "ppo" else words.split()[-2]) in said and "--help lists" in said


def test_a_stage_reads_its_inputs_before_it_loads_a_model(tiny_model, tmp_path):
    (tmp_path / "cut.jsonl").write_text('{"id": "a"}\n{"id": "b"')
    without = shutil.ignore_patterns("*.safetensors")  # so nothing could load it
    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=without)
    said = train("grpo.py", tmp_path / "out", f"--env tests/babble.py --model {model}",
                 f"--tasks {tmp_path}/cut.jsonl", status=1)
    (line,) = [line for line in said.splitlines() if "grpo.py" in line]
    assert "cut.jsonl, line 2" in line and "Traceback" not in said
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- checkpoints

@pytest.fixture
def resume(one_rank, tmp_path):
    """resume(flags, latest) continues in an OUT with three updates and a checkpoint of the second.
    latest: what its mark says otherwise; grown: so has its data."""
    out, data = tmp_path / "out", tmp_path / "data.jsonl"

    def resume(words, grown=False, **latest):
        line = {"lr": 1e-3, "reward_name": "sum"}
        words = f"--out {out} --data {data} --batch 4 {words}"
        write_text(data, "{}\n")
        shutil.rmtree(out, ignore_errors=True)
        assert zero3.restore(None, flags_of(sft, words.replace("1e-4 --seed 3", "1e-3"))) == 0
        write_text(data, "{}\n" * (1 + grown))
        write_jsonl(out / "log.jsonl", [{"step": step, **line} for step in (1, 2)])
        mark = {"step": 2, "log_bytes": (out / "log.jsonl").stat().st_size, "ranks": 1} | latest
        with open(out / "log.jsonl", "a") as log:
            log.write('{"step": 3, "lr": 0.001, "reward')
        write_text(out / "checkpoints" / "latest", json.dumps(mark))
        loaded = []

        def load_checkpoint(*_, tag, **__):
            loaded.append((tag, (out / "log.jsonl").read_text().count("step")))
        engine = SimpleNamespace(load_checkpoint=load_checkpoint)
        assert zero3.restore(engine, flags_of(sft, words)) == 2
        assert len(read_jsonl(out / "log.jsonl")) == 2
        assert loaded == [("step-2", 3)], "the log is cut after the checkpoint could be loaded"
    return resume


def test_other_flags_or_data_at_a_resume_are_told_in_a_line(resume, capsys):
    resume("--lr 1e-4 --seed 3 --resume")
    assert "lr, seed" in capsys.readouterr().out
    resume("--lr 1e-3 --resume", grown=True)
    assert "--data" in capsys.readouterr().out


@pytest.mark.parametrize("words, mark, told", [
    ("--resume", {"ranks": 4}, "--nproc_per_node 4"), ("--resume", {"zero": 2}, "--zero 2"),
    ("", {}, "--resume")])  # the last would begin anew
def test_a_run_is_neither_overwritten_nor_resumed_otherwise_divided(words, mark, told, resume):
    with pytest.raises(Mistake, match=told):
        resume(f"--lr 1e-3 {words}", **mark)


@pytest.mark.parametrize("log", ["", '{"step": 1}\n'])
def test_a_model_without_a_checkpoint_is_not_overwritten(one_rank, tmp_path, log):
    write_text(tmp_path / "config.json", "{}")
    if log:
        write_text(tmp_path / "log.jsonl", log)
    with pytest.raises(Mistake, match="checkpoint"):
        zero3.restore(None, flags_of(sft, f"--out {tmp_path} --resume"))


def test_nan_stops_with_the_update_the_checkpoint_and_a_remedy(tmp_path):
    zero3.check_finite(tmp_path, 5, loss=1.0, gnorm=0.0)
    with pytest.raises(Mistake, match="update 5.*nan.*inf.*--lr"):
        zero3.check_finite(tmp_path, 5, loss=float("nan"), gnorm=float("inf"))


def test_a_model_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    with pytest.raises(OSError), zero3.new_model(tmp_path / "out") as part:
        part.mkdir()
        (part / "config.json").write_text("{}")
        raise OSError("no room")
    assert not (tmp_path / "out").exists()
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: moved.append(a.name) or replace(a, b))
    with zero3.new_model(tmp_path / "out") as part:
        part.mkdir()
        (part / "config.json").write_text("{}")
        (part / "model.safetensors").write_text("weights")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors"}
    assert moved[-1] == "config.json" and not (tmp_path / "out.part").exists()


# ------------------------------------------------------------------------------------------- engine

def test_starting_the_engine_leaves_the_trainers_attention_as_it_is(tmp_path, monkeypatch):
    import torch

    (tmp_path / "vllm.py").write_text(  # what vLLM's import does on a GPU
        "import torch\ntorch.backends.cuda.enable_cudnn_sdp(False)\nLLM = lambda *_, **__: None")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    runtime.open_llm("model", 512, 4, 1, 0.5)
    del sys.modules["vllm"]
    assert torch.backends.cuda.cudnn_sdp_enabled()


# ------------------------------------------------------------------------------------------ tracker

def test_numbers_of_the_log_are_tracked_and_a_resumed_run_continues(tmp_path, monkeypatch):
    begun, rows = [], []
    board = SimpleNamespace(init=lambda **words: begun.append(words) or board,
                            log=lambda numbers, step: rows.append((step, numbers)))
    monkeypatch.setitem(sys.modules, "wandb", board)  # in the place of the package
    args = flags_of(sft, f"--track wandb --out {tmp_path}")
    for step in (1, 2):  # two processes
        runtime.open_tracker.cache_clear()
        runtime.write_log({"step": step, "loss": 0.5, "reward_name": "sum"}, args)
    assert rows == [(step, {"step": step, "loss": 0.5}) for step in (1, 2)]
    assert begun[0] == begun[1] and begun[0]["resume"] == "allow" and begun[0]["id"]
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 2
    runtime.open_tracker.cache_clear()
