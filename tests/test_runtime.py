"""What protects a run: one writer, no orphans, one-line errors, no broken file read or saved."""
import errno
import importlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SFT, flags_of, train

import runtime
from runtime import append_jsonl, load_template, read_jsonl, write_jsonl

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
    assert f"another run (pid {pid} on " in said and f"is writing to {tmp_path}/out" in said
    child.kill()
    child.communicate()
    assert hold_again(tmp_path) == (0, "")
    assert not (tmp_path / "out").exists(), "a lock is left, or a folder of which nothing came"


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


@LINUX
def test_a_rank_whose_torchrun_was_gone_before_it_asked_ends_at_once(tmp_path):
    text = "from runtime import die_with_parent; die_with_parent()"
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{text}'; exit $?"], cwd=ROOT,
                          env=os.environ | {"TORCHELASTIC_RUN_ID": "x"}, timeout=PATIENCE)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_process_that_is_not_part_of_a_run_survives_its_parent():
    text = "from runtime import die_with_parent; die_with_parent()"
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{text}'; exit $?"], cwd=ROOT,
                          timeout=PATIENCE)
    assert done.returncode == 0


# ---------------------------------------------------------------------------------------- one line

@pytest.mark.parametrize("error, words", [
    (ValueError("rows.jsonl, line 3:\n  no JSON"), "x.py: rows.jsonl, line 3: no JSON"),
    (KeyError("no 'org' in task 7"), "x.py: no 'org' in task 7"),
    (FileNotFoundError(errno.ENOENT, "No such file", "a.jsonl"),
     "x.py: a.jsonl: No such file; is the path right?"),
    (OSError(errno.ENOSPC, "No space left", "out/a"),
     "x.py: out/a: No space left; free some space, then repeat the command"),
    (SystemExit("update 3: loss is nan"), "update 3: loss is nan")])
def test_what_a_user_can_mend_is_one_line(error, words):
    def fail():
        raise error

    with pytest.raises(SystemExit) as stopped:
        runtime.run("x.py", fail)
    assert stopped.value.code == words


def test_an_interrupt_is_one_line(capsys):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        runtime.run("x.py", fail)
    assert stopped.value.code == 130
    said = "x.py: interrupted; what was saved is kept, repeat the command to continue\n"
    assert capsys.readouterr().err == said


def test_torchrun_shows_the_line_at_its_end_and_ranks_say_it_once(tmp_path):
    child, _ = start("""
        import sys
        from runtime import run
        print(flush=True)
        run("stage.py", open, sys.argv[1] + "/none")
        """, tmp_path, command=(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"))
    said = child.communicate(timeout=PATIENCE)[1].splitlines()
    line = f"stage.py: {tmp_path}/none: No such file or directory; is the path right?"
    assert child.returncode == 1 and said.count(line) == 1
    assert said[-1] == line, "it comes after torchrun's own words"


@pytest.mark.parametrize("path", ["a.jsonl", "folder/a.jsonl"])
def test_an_error_of_the_disk_names_the_file_that_was_being_written(path):
    with pytest.raises(OSError) as error, runtime.errors_name(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert error.value.filename == path


def test_a_record_that_finds_no_room_names_its_file():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_jsonl("/dev/full", {"a": 1})


BAD = [("sft", words) for words in (
    "--batch 0", "--batch 2.5", "--steps -1", "--epochs 0", "--lr -1", "--lr nan", "--warmup 2",
    "--cutoff 0", "--pack-tokens -4", "--save-every -1", "--min-lr 1.5", "--seed x",
    "--date x")]
BAD += [(stage, words) for stage in ("grpo", "arpo") for words in (
    "--prompts 0", "--group 0", "--temperature 0", "--context -1", "--max-turns 0", "--steps -1",
    "--turn-tokens 0", "--concurrency 0", "--tp 0", "--tp 3", "--failure-rate 2", "--decay 2",
    "--clip-low 1.2", "--clip-high -1", "--minibatches 0", "--refill 2", "--val-every 0",
    "--gpu-memory 60", "--tis-cap -1", "--loss-norm sum", "--lr inf")]
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


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def remove(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize("spoil, words", [
    (remove("config.json"), "config.json is missing: is .* a model folder"),
    (cut("config.json", 40), "config.json is not JSON"),
    (write("config.json", "[]"), "config.json holds no JSON object"),
    (write("config.json", "{}"), "config.json has no 'model_type'"),
    (remove("tokenizer.json"), "has no tokenizer; copy tokenizer.json"),
    (cut("tokenizer.json", 1000), "tokenizer.json is not JSON"),
    (remove("model.safetensors"), "has no weights; copy model.safetensors there"),
    (cut("model.safetensors", 0), r"model.safetensors is truncated or damaged \(0 bytes\)"),
    (cut("model.safetensors", 2000), "model.safetensors is truncated or damaged"),
    (cut("model.safetensors", 100_000), "model.safetensors is truncated or damaged"),
    (write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
     "model.safetensors is truncated or damaged")])
def test_a_broken_model_folder_is_named_before_it_is_loaded(spoil, words, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    load_template(folder)
    spoil(folder)
    with pytest.raises(ValueError, match=f"^{folder}.*{words}") as error:
        load_template(folder)
    assert "\n" not in str(error.value)


def test_a_missing_model_is_reported_in_one_line():
    with pytest.raises(ValueError, match="^nobody/nothing is not a folder here, and") as error:
        load_template("nobody/nothing")
    assert "\n" not in str(error.value)


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


def test_a_model_that_finds_no_room_leaves_nothing_and_the_old_one_whole(tiny_model, tmp_path):
    out = shutil.copytree(tiny_model, tmp_path / "out")
    child, _ = start("""
        import resource, sys
        from transformers import AutoModelForCausalLM
        from runtime import new_model, run

        def save():
            lm = AutoModelForCausalLM.from_pretrained(sys.argv[2])
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            with new_model(sys.argv[2]) as part:
                lm.save_pretrained(part)
        print(flush=True)
        run("stage.py", save)
        """, tmp_path, out)
    said = child.communicate(timeout=PATIENCE)[1].strip().splitlines()
    assert child.returncode == 1 and said[-1].startswith(f"stage.py: {out}.part: ")
    assert not Path(f"{out}.part").exists()
    runtime.check_model(out)


# ------------------------------------------------------------------------------------- checkpoints

@pytest.fixture
def run_folder(one_rank, tmp_path):
    """OUT after three saved updates: two checkpoints and a log."""
    for step in (1, 2, 3):
        append_jsonl(tmp_path / "log.jsonl", {"step": step})
        with runtime.new_checkpoint(tmp_path, step, 0) as tag:
            tag.mkdir(parents=True)
            for name in ("model.pt", "optimizer.pt"):
                torch.save({"x": torch.arange(1000) + step}, tag / name)
    append_jsonl(tmp_path / "log.jsonl", {"step": 4})
    return tmp_path


def flip(file, at=None):
    """Change a byte: in the middle of a tensor, or the first of the last `at`."""
    text = bytearray(file.read_bytes())
    text[text.rfind(at) if at else len(text) // 2] ^= 0x80
    file.write_bytes(text)


def left(out):
    return sorted(tag.name for tag in (out / "checkpoints").iterdir())


def test_the_newest_checkpoint_and_the_one_before_are_kept_and_the_log_is_cut_back(run_folder):
    assert left(run_folder) == ["step-2", "step-3"]
    assert runtime.newest_checkpoint(run_folder, True, 0) == 3
    assert [row["step"] for row in read_jsonl(run_folder / "log.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("harm", [
    "a flipped byte", "a flipped byte of a name", "half a file", "a file less", "no mark"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken(harm, run_folder, capsys):
    file = run_folder / "checkpoints" / "step-3" / "optimizer.pt"
    if harm == "a flipped byte":
        flip(file)
    elif harm == "a flipped byte of a name":
        flip(file, b"optimizer/data.pkl")
    elif harm == "half a file":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "a file less":
        file.unlink()
    else:
        (file.parent / "mark.json").write_text('{"ste')
    assert runtime.newest_checkpoint(run_folder, True, 0) == 2
    assert "step-3" in capsys.readouterr().out and left(run_folder) == ["step-2"]
    assert [row["step"] for row in read_jsonl(run_folder / "log.jsonl")] == [1, 2]


def test_if_both_checkpoints_are_damaged_the_folder_to_remove_is_named_and_removing_it_starts_again(
        run_folder):
    for step in (2, 3):
        flip(run_folder / "checkpoints" / f"step-{step}" / "model.pt")
    with pytest.raises(SystemExit, match=f"^{run_folder}/checkpoints: no checkpoint in it is"):
        runtime.newest_checkpoint(run_folder, True, 0)
    shutil.rmtree(run_folder / "checkpoints")
    assert runtime.newest_checkpoint(run_folder, True, 0) == 0
    assert read_jsonl(run_folder / "log.jsonl") == []


@pytest.mark.parametrize("error, words", [
    (RuntimeError("basic_ios::clear: iostream error"), "step-4 could not be written; free some"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2304 vs 2196"),
     "step-4 could not be written; free some space"),
    (OSError(errno.ENOSPC, "No space left on device"), "step-4")])
def test_a_checkpoint_that_finds_no_room_is_named_and_leaves_nothing(error, words, run_folder):
    with pytest.raises(OSError, match=words), runtime.new_checkpoint(run_folder, 4, 0) as tag:
        tag.mkdir()
        raise error
    assert left(run_folder) == ["step-2", "step-3"]


def test_a_checkpoint_that_a_killed_save_left_without_a_mark_does_not_count(run_folder):
    (run_folder / "checkpoints" / "step-3" / "mark.json").unlink()
    assert runtime.newest_checkpoint(run_folder, True, 0) == 2 and left(run_folder) == ["step-2"]


def test_a_log_that_has_lost_lines_is_not_filled_with_zeros(run_folder, capsys):
    os.truncate(run_folder / "log.jsonl", 20)
    assert runtime.newest_checkpoint(run_folder, True, 0) == 3
    assert read_jsonl(run_folder / "log.jsonl") == [{"step": 1}]
    assert "log.jsonl has lost lines" in capsys.readouterr().out


def test_nan_stops_with_the_update_the_checkpoint_and_a_remedy(run_folder):
    runtime.check_finite(run_folder, 5, loss=1.0, gnorm=0.0)
    with pytest.raises(SystemExit) as stopped:
        runtime.check_finite(run_folder, 5, loss=float("nan"), gnorm=float("inf"))
    said = stopped.value.code
    assert said.startswith("update 5: loss is nan and gnorm is inf")
    assert "checkpoints/step-3 is the last good checkpoint" in said and "a lower --lr" in said


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
    ([["no", "episode"]], ":1: no list of 'messages'"),
    ([{"messages": [{"role": "user", "content": "x"}]}, {}], ":2: no list of 'messages'"),
    ([{"messages": [{"role": "user"}]}], ":1: message 1 is not a table of a 'role' and a text"),
    ([{"messages": [{"role": "user", "content": None}]}], ":1: message 1 is not a table"),
    ([{"messages": [{"role": "user", "content": "x"}]}], "rows.jsonl: no episode to train on"),
    ([{"messages": [{"role": "assistant", "content": "x"}]}], ":1: message 1 is a reply, with"),
    ([], "rows.jsonl: no episode to train on")])
def test_rows_that_are_no_episodes_are_named(rows, words, template, tmp_path):
    import sft

    write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(SystemExit, match=words):
        sft.load_samples(tmp_path / "rows.jsonl", template, 1000)


@pytest.mark.parametrize("stage, words, last", [
    ("sft.py", "--data {here}/none.jsonl", "none.jsonl: No such file or directory; is the path"),
    ("sft.py", "--data {here}/cut.jsonl", "cut.jsonl, line 1: not JSON"),
    ("grpo.py", "--tasks {here}/none.jsonl", "none.jsonl: No such file or directory; is the path"),
    ("arpo.py", "--tasks {here}/cut.jsonl", "cut.jsonl, line 1: not JSON")])
def test_a_stage_ends_with_one_line_about_its_data(stage, words, last, tiny_model, tmp_path):
    (tmp_path / "cut.jsonl").write_text('{"messages": [{"role": "us')
    said = train(stage, tmp_path / "out", f"--model {tiny_model}", words.format(here=tmp_path),
                 status=1).splitlines()
    assert last in said[-1] and not any("Traceback" in line for line in said)
    assert not (tmp_path / "out").exists()
