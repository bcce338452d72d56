"""The first hour of a new user: no file of theirs is changed, each mistake is one line, also under
torchrun, and waits are announced."""
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT, flags_of, train

import evaluate
import runtime
import synth
from format_plan import itinerary
from sandbox import Database
from tiny.__main__ import main as tiny
from travel import leaderboard

# ------------------------------------------------------------------------------------ whose file

THEIRS = {
    "notes.md": "# notes\nline 2\nlast line, no newline at the end",
    "words.txt": "\n\nwords after blank lines",
    "conf.json": '{\n "lr": 1e-6\n}',
    "line.json": '{"lr": 1e-6}',
    "commented.json": '{"lr": 1e-6} // a comment',
    "broken.json": '{"lr": 1e-6',
    "prompt.jinja": "{{ messages }} and no newline",
    "table.csv": "a,b\n1,2\n3,4",
    "mixed.jsonl": '{"id": "syn-0000001", "query": "?"}\nmy own note',
    "number.jsonl": '{"id": "syn-0000001", "query": "?"}\n5',
}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    for name, text in THEIRS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 3 + b"\n\x00\xff")
    (tmp_path / "tasks.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    return {path: path.read_bytes() for path in tmp_path.iterdir()}


def refused(main, *words):
    """The line with which a program refuses a command line."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, words)))
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
    return stop.value.code


def test_no_command_changes_a_file_that_it_did_not_make(theirs, tmp_path, trip):
    runtime.write_jsonl(tmp_path / "good", [trip[0]])
    for path in [path for path in theirs if path.name != "tasks.jsonl"]:
        for words in (["tasks", "--n", 1], ["episodes", "--tasks", "good"],
                      ["queries", "--tasks", "good", "--endpoint", "http://127.0.0.1:9/v1=m"]):
            assert path.name in refused(synth.main, *words, "--out", path.name)
        assert path.name in refused(tiny, "drills", "--n", 2, "--worlds", 1, "--out", path.name)
    assert {path: path.read_bytes() for path in theirs} == theirs


def test_tiny_overwrites_no_table_no_model_and_no_conversations(tmp_path, tiny_model):
    shutil.copytree(ROOT / "database" / "mini", tmp_path / "world")
    table = next((tmp_path / "world").rglob("*.csv"))
    table.write_text("theirs\n")
    assert "choose another --out" in refused(tiny, "world", "--out", tmp_path / "world")
    assert table.read_text() == "theirs\n"
    talks = tmp_path / "talks.jsonl"
    runtime.write_jsonl(talks, [{"messages": [{"role": "user", "content": "mine"}]}])
    before = talks.read_bytes()
    words = ["drills", "--n", 2, "--worlds", 1, "--out", talks]
    assert "choose another --out" in refused(tiny, *words)
    assert talks.read_bytes() == before
    weights = (tiny_model / "model.safetensors").read_bytes()
    assert "already holds a model" in refused(
        tiny, "model", "--corpus", talks, "--out", tiny_model)
    assert (tiny_model / "model.safetensors").read_bytes() == weights


def test_readers_leave_the_last_line_of_a_live_run_as_it_is(tmp_path):
    row = {"task": {"id": "1", "idx": 1, "query": "?"}, "messages": [], "stop": "answer",
           "plan": None}
    file = tmp_path / "episodes.jsonl"
    file.write_text(json.dumps(row) + '\n{"task": {"id": "2", "que')
    (tmp_path / "settings.json").write_text('{"database": null}')
    before = file.read_bytes()
    leaderboard.main([str(tmp_path), "--split", "validation"])
    assert len(evaluate.read_episodes(file)) == 1 and file.read_bytes() == before
    assert len(evaluate.read_episodes(file, recover=True)) == 1
    assert file.read_bytes() == json.dumps(row).encode() + b"\n", "its writer cuts it off"


@pytest.mark.parametrize("content, fix", [
    (gzip.compress(b'{"id": 1}\n', mtime=0), "gunzip it"),
    ('{"id": 1}\n'.encode("utf-16"), "UTF-8"),
    (b'[\n{"id": 1}\n]\n', "jq -c '.[]'"), (b'{"id": 1}\n{\n', "line 2: not JSON")])
def test_a_file_in_another_form_names_the_way_out(tmp_path, content, fix):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jsonl, line \d") as error:
        runtime.read_jsonl(tmp_path / "x.jsonl")
    assert fix in str(error.value)


# ---------------------------------------------------------------------------------------- models

def changed(tiny_model, folder, **config):
    """A copy of the tiny model with another config."""
    shutil.copytree(tiny_model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def edit_weights(folder, edit):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_with_missing_misshapen_or_broken_weights_is_neither_trained_nor_played(
        tiny_model, tmp_path, template):
    import torch

    import sft

    def spoil(state):
        state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")

    folders = {
        "layers": changed(tiny_model, tmp_path / "layers", num_hidden_layers=6,
                          layer_types=["full_attention"] * 6),
        "wide": changed(tiny_model, tmp_path / "wide", intermediate_size=640),
        "headless": edit_weights(changed(tiny_model, tmp_path / "headless"),
                                 lambda state: state.pop("lm_head.weight")),
        "nan": edit_weights(changed(tiny_model, tmp_path / "nan"), spoil)}
    args = flags_of(sft, f"--no-checkpointing --out {tmp_path}/out")
    for name, said in {"layers": r"lack model\.layers\.[45]\S+ \(24 tensors", "headless": "lm_head",
                       "wide": "in this shape", "nan": "not finite"}.items():
        args.model = folders[name]
        with pytest.raises(ValueError, match=said):
            sft.load(args, template, torch.device("cpu"))
    args.model = tiny_model
    sft.load(args, template, torch.device("cpu"))
    runtime.check_values(tiny_model)
    with pytest.raises(ValueError, match=r"up_proj\.weight holds values that are not finite"):
        runtime.check_values(folders["nan"])


@pytest.mark.parametrize("change, said", [
    ({"architectures": ["Qwen2ForSequenceClassification"]}, "not a causal language model"),
    ({"architectures": ["BertModel"]}, "is a BertModel, not a causal language model"),
    ({"model_type": "t5", "is_encoder_decoder": True}, r"is an encoder-decoder \(t5\)")])
def test_a_model_of_another_kind_is_refused(tiny_model, tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        runtime.check_model(changed(tiny_model, tmp_path / "m", **change))


@pytest.mark.parametrize("name, text, said", [
    ("tokenizer.json", "{}", "tokenizer.json has no 'model'"),
    ("generation_config.json", "{", "generation_config.json is not JSON")])
def test_a_broken_file_of_a_model_is_named(tiny_model, tmp_path, name, text, said):
    folder = changed(tiny_model, tmp_path / "m")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        runtime.check_model(folder)


def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(tiny_model, monkeypatch):
    with pytest.raises(ValueError, match="is a file; name the folder"):
        runtime.check_model(tiny_model / "model.safetensors")
    for path in ("/no/such/model", "out/7b/rl/best", "./model", "a=b"):
        with pytest.raises(ValueError, match="is not a folder; is the path right"):
            runtime.check_model(path)
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match="docs/rl is not a folder; is the path right"):
        runtime.check_model("docs/rl")  # docs/ is here
    runtime.check_model("Qwen/Qwen2.5-7B-Instruct")
    runtime.check_model("gpt2")


@pytest.mark.parametrize("messages, said", [
    ([{"role": "system", "content": "s"}, {"role": "tool", "content": "t"}], "message 2 .* 'tool'"),
    ([{"from": "human", "value": "q"}], "message 1 is not a table of a 'role'"),
    ([{"role": "user", "content": None}], "message 1 is not a table"),
    ([{"role": "user", "content": [{"type": "text"}]}], "message 1 is not a table"),
    ([{"role": "User", "content": "q"}], "message 1 has the role 'User', not system or user"),
    ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2, ""),
    ([{"role": "user", "content": "q"}, *[{"role": "assistant", "content": "a"}] * 2],
     "message 3 has the role 'assistant', not user or result")])
def test_what_is_wrong_with_a_conversation_names_the_message(messages, said):
    assert re.match(said or "$", runtime.talk_fault(messages))


EXITS = """
from calculator import Calculator

def leave(*_):
    raise SystemExit(0)

def open_world(args):
    world = Calculator()
    world.MEMBER = leave
    return world
"""


@pytest.mark.parametrize("member", ["load_task", "episode", "verdict", "reward", "open_world"])
def test_a_world_that_exits_is_one_line_that_names_it(tmp_path, monkeypatch, member):
    monkeypatch.chdir(tmp_path)
    name, text = f"{member}_world.py", EXITS.replace("MEMBER", member)
    if member == "open_world":
        text = "def open_world(args):\n    raise SystemExit(0)"
    Path(name).write_text(text)
    Path("tasks.jsonl").write_text('{"id": "a", "query": "2 + 3", "sum": 5}\n')
    said = refused(evaluate.main, "--env", name, "--tasks", "tasks.jsonl", "--check")
    assert f"--env {name}: {member}" in said and "SystemExit" in said


def test_a_folder_in_the_place_of_the_index_is_named(tmp_path):
    shutil.copytree(ROOT / "database" / "mini", tmp_path / "mini",
                    ignore=shutil.ignore_patterns("*.index*"))
    (tmp_path / "mini" / "sandbox.index").mkdir()
    with pytest.raises(ValueError, match=r"sandbox\.index is a folder where the index belongs"):
        Database(tmp_path / "mini")


# ------------------------------------------------------------------------------- one line, and 130

def last_lines(done):
    assert "Traceback" not in done.stdout
    return done.stderr.splitlines()


def test_the_sentence_is_the_last_line_under_torchrun_and_the_only_one_without(
        tiny_model, tmp_path):
    stage = ["grpo.py", "--model", tiny_model, "--env", "tests/babble.py", "--tasks",
             tmp_path / "tasks.jsonl", "--out", tmp_path / "out"]
    runtime.write_jsonl(tmp_path / "tasks.jsonl", [{"id": "a", "query": "Go on", "turns": 1,
                                                    "success": 0.5}])
    stage += ["--reward", "sumo"]
    said = "--reward sumo: the rewards of this world are"
    variables = {name: value for name, value in os.environ.items() if name != "RANK"}
    under = subprocess.run([Path(sys.executable).parent / "torchrun", "--standalone",
                            "--nproc_per_node", "2", *stage], cwd=ROOT, env=variables,
                           capture_output=True, text=True, timeout=300)
    assert under.returncode == 1 and said in last_lines(under)[-1]
    assert under.stderr.count(said) == 1
    alone = subprocess.run([sys.executable, *stage], cwd=ROOT, env=variables, capture_output=True,
                           text=True, timeout=300)
    assert alone.returncode == 1 and said in last_lines(alone)[-1]
    assert "FAILED" not in alone.stderr and alone.stderr.count(said) == 1
    wrong = subprocess.run([sys.executable, *stage, "--lrr", "1"], cwd=ROOT, env=variables,
                           capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and len(last_lines(wrong)) == 1, "no rank is started for it"


def test_a_stage_started_without_torchrun_trains_and_an_interrupt_is_one_line(
        tiny_model, episodes, tmp_path):
    command = [sys.executable, "sft.py", "--model", tiny_model, "--data", episodes, "--steps",
               "100000", "--batch", "2", "--out", tmp_path / "out"]
    variables = {name: value for name, value in os.environ.items() if name != "RANK"}
    running = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for line in running.stdout:
        if line.startswith("step     2/"):
            break
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    _, said = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGINT
    assert said.splitlines()[-1].startswith("sft.py: interrupted; what was saved is kept")
    assert "Traceback" not in said and said.count("interrupted") == 1
    assert not (tmp_path / "out" / ".writer").exists(), "the rank is gone, too"


def test_the_end_of_a_stage_names_the_folder_and_the_next_command(student):
    text = train("sft.py", student.parent / "again", "--batch 4 --steps 1 --pack-tokens 400",
                 "--model", student, "--data",
                 student.parent.parent / "episodes0" / "episodes.jsonl")
    assert f"{student.parent}/again: the model after 1 updates; loss went from" in text
    assert f"Next: python grpo.py --model {student.parent}/again" in text


@pytest.mark.parametrize("stage", ["sft"])
def test_a_stage_does_not_overwrite_a_model_that_it_did_not_train(stage, tiny_model, episodes,
                                                                  tmp_path):
    folder = changed(tiny_model, tmp_path / "downloaded")
    before = (folder / "model.safetensors").read_bytes()
    said = train("sft.py", folder, "--steps 1 --model", tiny_model, "--data", episodes, status=1)
    assert "already holds a model, which was not trained there" in said
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("program", ["sft.py", "grpo.py", "arpo.py", "dpo.py",
                                     "-m toolstar.retriever"])
def test_an_interrupt_while_torch_loads_is_one_line(tmp_path, program):
    (tmp_path / "torch.py").write_text("import os, signal, time\n"
                                       "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    done = subprocess.run(
        [sys.executable, *program.split()], cwd=ROOT, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)  # 130 in a shell, both
    assert re.fullmatch(r"\w+\.py: interrupted\n", done.stderr)


def test_a_missing_environment_names_the_line_to_type(tmp_path):
    for program in ("synth.py tasks --out x", "sft.py", "qa_eval.py"):
        done = subprocess.run([sys.executable, "-S", *program.split()], cwd=ROOT, text=True,
                              capture_output=True, env=os.environ | {"PYTHONPATH": ""})
        assert done.returncode == 1 and len(last_lines(done)) == 1, done.stderr
        assert "No module named" in done.stderr and ". .venv/bin/activate" in done.stderr


def test_numpy_and_tqdm_alone_draw_solve_and_show_tasks(tmp_path):
    code = f"""
        import sys

        class Only:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {{"torch", "transformers", "vllm", "deepspeed",
                                              "tokenizers", "safetensors", "pandas", "httpx",
                                              "openai", "matplotlib", "jinja2", "huggingface_hub"}}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Only())
        if __name__ == "__main__":
            import evaluate, synth
            from look import report

            synth.main("tasks --n 20 --workers 1 --out {tmp_path}/tasks.jsonl".split())
            evaluate.main("--agent solver --processes 1 --tasks {tmp_path}/tasks.jsonl "
                          "--out {tmp_path}/eval".split())
            report.main(["{tmp_path}/eval"])
    """
    file = tmp_path / "first.py"
    file.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| success " in done.stdout and (tmp_path / "eval" / "report.html").exists()


# ------------------------------------------------------------------------------------------ waits

def test_a_silent_endpoint_is_reported_once_at_the_first_failure(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    for _ in range(2):
        with pytest.raises(runtime.ChatError):
            runtime.chat(url, "m", [{"role": "user", "content": "?"}], retries=3)
    said = capsys.readouterr().err
    assert said == f"{url} does not answer; asking again, up to 3 times per request\n"


def test_a_key_that_no_header_can_carry_names_its_file(tmp_path):
    (tmp_path / "key").write_text("sk-ü\n")
    with pytest.raises(ValueError, match="key: not an API key"):
        runtime.read_key(tmp_path / "key")
    (tmp_path / "key").write_text("sk-1\n")
    assert runtime.read_key(tmp_path / "key") == "sk-1" and runtime.read_key(None) is None


@pytest.mark.parametrize("op", ["deepspeed_shm_comm", "cpu_adam"])  # of a CPU, of --offload
def test_the_lock_of_a_build_that_was_killed_goes_and_a_missing_compiler_is_named(
        op, tmp_path, monkeypatch, capsys):
    folder = tmp_path / op
    folder.mkdir()
    (folder / "lock").touch()
    os.utime(folder / "lock", (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    runtime.prepare_op(op)
    said = capsys.readouterr()
    assert not (folder / "lock").exists() and "was left by a killed process" in said.out
    assert "compiling DeepSpeed's op, once" in said.err
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="no-such-compiler, which is missing; .* apt install g"):
        runtime.prepare_op(op)
    (folder / f"{op}.so").touch()
    runtime.prepare_op(op)
    assert capsys.readouterr().err == "", "nothing is compiled"


def test_ten_updates_with_nothing_to_learn_are_reported(tmp_path, capsys):
    rows = [{"uniform": 1.0}] * 9
    runtime.write_jsonl(tmp_path / "log.jsonl", rows)
    runtime.warn_uniform(tmp_path)
    runtime.write_jsonl(tmp_path / "log.jsonl", [{"uniform": 0.9}, *rows])
    runtime.warn_uniform(tmp_path)
    assert capsys.readouterr().out == ""
    runtime.write_jsonl(tmp_path / "log.jsonl", [*rows, {"val_success": 1.0}, {"uniform": 1.0}])
    runtime.warn_uniform(tmp_path)
    assert "uniform was 1.00 for 10 updates" in capsys.readouterr().out


def test_the_tasks_drawn_so_far_are_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    synth.main(f"tasks --n 3 --workers 1 --out {tmp_path}/t.jsonl".split())
    said = capsys.readouterr()
    assert "3/3" in said.err and f"{tmp_path}/t.jsonl: 3 tasks" in said.out


# --------------------------------------------------------------------------- a query of one's own

def test_a_query_of_your_own_is_played_and_printed(tmp_path):
    done = subprocess.run(
        [sys.executable, "evaluate.py", "--agent", "person", "--ask", "Plan a trip to Denver.",
         "--out", tmp_path / "none"], cwd=ROOT, input="<answer>Day 1: rest</answer>\n",
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Plan a trip to Denver." in done.stdout and "Day 1: rest" in done.stdout
    assert "the episode stopped: answer" in done.stdout and not (tmp_path / "none").exists()


def test_a_person_sees_which_check_failed(tmp_path, trip):
    task, plan, _ = trip
    runtime.write_jsonl(tmp_path / "t.jsonl", [task])
    homeless = re.sub("(?m)^Accommodation: .*$", "Accommodation: [No Such Place]", itinerary(plan))
    for out, answer, said in (("none", "Day 1: rest", "no plan was read from the answer"),
                              ("wrong", homeless, "is_valid_information_in_sandbox *FAILED: ")):
        done = subprocess.run(
            [sys.executable, "evaluate.py", "--agent", "person", "--tasks", tmp_path / "t.jsonl",
             "--out", tmp_path / out], cwd=ROOT, input=f"<answer>{answer}</answer>\n",
            capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert re.search(said, done.stdout) and "success 0, reward" in done.stdout


def test_a_home_that_the_shell_left_alone_is_expanded():
    p = runtime.Parser()
    p.add_argument("--out")
    home = str(Path.home())
    assert p.parse_args(["--out=~/x"]).out == p.parse_args(["--out", "~/x"]).out == f"{home}/x"
    assert p.parse_args(["--out", "a~b"]).out == "a~b"
