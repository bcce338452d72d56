"""What protects a run: one writer, no orphans, one-line errors, no broken file read or saved."""
import importlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import ROOT, SFT, flags_of, train

import runtime
from runtime import Mistake, read_jsonl, write_jsonl

PATIENCE = 60  # seconds; what takes longer hangs


def start(text, *words, command=(sys.executable,), **variables):
    """Start a program -> (its process, its first line)."""
    file = Path(words[0]) / "program.py"
    file.write_text(textwrap.dedent(text))
    child = subprocess.Popen([*command, str(file), *map(str, words)], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=os.environ | variables)
    return child, child.stdout.readline().split()


def gone(pid):
    """Whether a process ends; a zombie counts as ended."""
    for _ in range(10 * PATIENCE):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


# -------------------------------------------------------------------------------------- one writer

HOLDER = """
    import os, sys, time
    from runtime import lock_folder, run
    run("stage.py", lock_folder, sys.argv[1] + "/out")
    child = os.fork() if "fork" in sys.argv else 0
    if child or "fork" not in sys.argv:
        print(os.getpid(), child, flush=True)
    time.sleep(60)
"""


def hold_again(folder):
    """The message of a second writer."""
    text = ("import sys; from runtime import lock_folder, run; "
            "run('stage.py', lock_folder, sys.argv[1])")
    done = subprocess.run([sys.executable, "-c", text, folder / "out"], cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stderr


def test_a_second_writer_is_refused_in_one_line_until_the_first_is_killed(tmp_path):
    child, (pid, _) = start(HOLDER, tmp_path)
    code, said = hold_again(tmp_path)
    assert code == 1 and said.count("\n") == 1
    assert f"another run is writing to {tmp_path}/out" in said
    child.kill()
    child.communicate()
    assert hold_again(tmp_path) == (0, "")


def test_a_child_that_outlives_a_killed_writer_holds_no_lock(tmp_path):
    child, (_, grandchild) = start(HOLDER, tmp_path, "fork")
    child.kill()
    child.wait()
    assert not Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].startswith(" Z")
    code, _ = hold_again(tmp_path)
    os.kill(int(grandchild), signal.SIGKILL)
    child.communicate()
    assert code == 0


def test_only_rank_0_holds_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    runtime.lock_folder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------- no orphan

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


@LINUX
def test_a_spawned_child_dies_with_a_killed_parent(tmp_path):
    child, (pid,) = start("""
        import multiprocessing, os, time
        from runtime import die_with_parent

        def play():
            die_with_parent()
            print(os.getpid(), flush=True)
            time.sleep(600)

        if __name__ == "__main__":
            multiprocessing.get_context("spawn").Process(target=play).start()
            time.sleep(600)
        """, tmp_path)
    child.kill()
    assert gone(pid)
    child.communicate()


@LINUX
def test_ranks_die_with_a_killed_torchrun(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                "1")
    child, (pid,) = start("""
        import os, time
        from runtime import die_with_parent
        die_with_parent()
        print(os.getpid(), flush=True)
        time.sleep(600)
        """, tmp_path, command=torchrun)
    child.kill()
    assert gone(pid)
    child.communicate()


def test_a_process_that_is_not_part_of_a_run_survives_its_parent():
    text = "from runtime import die_with_parent; die_with_parent()"
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{text}'; exit $?"], cwd=ROOT,
                          timeout=PATIENCE)
    assert done.returncode == 0


# ---------------------------------------------------------------------------------------- one line

def test_a_mistake_is_one_line_and_everything_else_keeps_its_traceback():
    def fail(error):
        raise error

    with pytest.raises(SystemExit) as stopped:
        runtime.run("x.py", fail, Mistake("a.jsonl is not a file"))
    assert stopped.value.code == "x.py: a.jsonl is not a file"
    for error in (ValueError("too many values to unpack"), KeyError("x"), OSError("no room")):
        with pytest.raises(type(error)):
            runtime.run("x.py", fail, error)


def test_an_interrupt_is_one_line(capsys):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        runtime.run("x.py", fail)
    assert stopped.value.code == 130
    said = "x.py: interrupted; repeat the command to continue\n"
    assert capsys.readouterr().err == said


BAD = [("sft", words) for words in (
    "--batch 0", "--batch 2.5", "--steps -1", "--epochs 0", "--lr -1", "--lr nan", "--warmup 2",
    "--cutoff 0", "--pack-tokens -4", "--save-every -1", "--min-lr 1.5", "--seed x",
    "--date x")]
BAD += [(stage, words) for stage in ("grpo", "arpo") for words in (
    "--prompts 0", "--group 0", "--temperature 0", "--context -1", "--max-turns 0", "--steps -1",
    "--turn-tokens 0", "--concurrency 0", "--tp 0", "--tp 3", "--failure-rate 2", "--decay 2",
    "--clip-low 1.2", "--clip-high -1", "--minibatches 0", "--val-every 0",
    "--gpu-memory 60", "--loss-norm sum", "--lr inf")]
BAD += [("arpo", "--initial -1"), ("arpo", "--branch both"), ("look.memory", "grpo --gpus 0"),
        ("look.memory", "grpo --gpu-gib 0"), ("look.memory", "sft --cutoff -1"),
        ("look.memory", "ppo")]


@pytest.mark.parametrize("stage, words", BAD)
def test_a_flag_out_of_bounds_is_one_line_that_names_it(stage, words, capsys):
    module = importlib.import_module(stage)
    with pytest.raises(SystemExit) as stopped:
        module.flags(words.split()) if stage == "look.memory" else flags_of(module, words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    flag = "stage" if words == "ppo" else words.split()[-2]
    assert flag in said and "--help lists the flags" in said


# ------------------------------------------------------------------------------------------ models

def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_saved_files_can_be_read_as_the_umask_says(mask, tmp_path):
    def save():
        with runtime.new_model(tmp_path / "out") as part:
            part.mkdir()
            (part / "config.json").write_text("{}")
            (part / "model.safetensors").touch(0o600)
        return {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}

    before = os.umask(mask)
    modes = save()
    os.umask(before)
    assert modes == {0o666 & ~mask}


# ------------------------------------------------------------------------------------- checkpoints

def test_nan_stops_with_the_update_the_checkpoint_and_a_remedy(tmp_path):
    runtime.check_finite(tmp_path, 5, loss=1.0, gnorm=0.0)
    with pytest.raises(Mistake, match="update 5: loss is nan and gnorm is inf.*lower --lr"):
        runtime.check_finite(tmp_path, 5, loss=float("nan"), gnorm=float("inf"))


# ------------------------------------------------------------------------------------------ stages

def test_a_stage_whose_loss_is_nan_stops_and_does_not_save_it(
        tiny_model, episodes, tmp_path):
    said = train("sft.py", tmp_path / "sft", SFT, "--lr 1e37 --warmup 0", "--model", tiny_model,
                 "--data", episodes, status=1)
    assert ": loss is " in said.splitlines()[-1] and "--lr" in said.splitlines()[-1]
    rows = read_jsonl(tmp_path / "sft" / "log.jsonl")
    assert all(row["loss"] < float("inf") for row in rows) and len(rows) < 16
    assert not (tmp_path / "sft" / "config.json").exists()


@pytest.mark.parametrize("rows, words", [
    ([{"messages": [{"role": "user", "content": "x"}]}, {}], ":2: its 'messages' are not a"),
    ([{"messages": [{"role": "user"}]}], ":1: its 'messages' are not a conversation"),
    ([{"messages": [{"role": "user", "content": None}]}], ":1: its 'messages' are not a"),
    ([{"messages": [{"role": "user", "content": "x"}]}], "rows.jsonl: no episode to train on"),
    ([], "rows.jsonl: no episode to train on")])
def test_rows_that_are_no_episodes_are_named(rows, words, template, tmp_path):
    import sft

    write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(Mistake, match=words):
        sft.load_samples(tmp_path / "rows.jsonl", template, 1000)


@pytest.mark.parametrize("stage, words, last", [
    ("sft.py", "--data {here}/none.jsonl", "none.jsonl is not a file"),
    ("arpo.py", "--tasks {here}/cut.jsonl", "cut.jsonl, line 1: not JSON")])
def test_a_stage_ends_with_one_line_about_its_data(stage, words, last, tiny_model, tmp_path):
    (tmp_path / "cut.jsonl").write_text('{"messages": [{"role": "us')
    said = train(stage, tmp_path / "out", f"--model {tiny_model}", words.format(here=tmp_path),
                 status=1)
    assert last in said and "Traceback (most recent call last)" not in said.split("=====")[0]
