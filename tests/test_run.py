"""run.sh: every flag exists, every input is an earlier stage's output, the numbers are the paper's, it goes on."""
import json
import os
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from conftest import ROOT

SIZES = ("tiny", "1.5b", "3b", "7b")
AXES = ("reward", "scale", "data", "algorithm", "noise")
COMMANDS = [(size, *more) for size in SIZES for more in ((), ("preflight",), *(("axis", axis) for axis in AXES))]
# flags of the stages that name what is read; all else that names a file or a folder is written
INPUTS = {"--model", "--data", "--tasks", "--val", "--make-tiny", "--exclude", "--curves", "--runs"}
# Written by hand from STAR, arXiv:2603.21972, appendices C and D, section 3 for the rewards and its main table for the
# choice of algorithm and reward by size.
PAPER = {
    "1.5b": {"base": "Qwen/Qwen2.5-1.5B-Instruct", "sft_epochs": "6", "algorithm": "arpo.py", "reward": "macro"},
    "3b": {"base": "Qwen/Qwen2.5-3B-Instruct", "sft_epochs": "4", "algorithm": "grpo.py", "reward": "curriculum"},
    "7b": {"base": "Qwen/Qwen2.5-7B-Instruct", "sft_epochs": "4", "algorithm": "grpo.py", "reward": "sum"},
}
PAPER_SFT = {"--batch": "32", "--lr": "5e-6", "--warmup": "0.1", "--cutoff": "20480"}
PAPER_RL = {"--prompts": "32", "--group": "8", "--epochs": "5", "--lr": "2e-6", "--temperature": "1.0",
            "--context": "30000", "--max-turns": "60"}
PAPER_PLAY = {"--temperature": "0.6", "--top-p": "0.95", "--max-context": "32768", "--max-turns": "60"}


def run_sh(folder, *words, **variables):
    """bash run.sh in a folder, none of its variables set but these."""
    inherited = {k: v for k, v in os.environ.items() if not re.match(
        "(DRY|MODEL|DATA|OUT|SEEDS?|GPUS|NNODES|NODE_RANK|STAR_DATABASE|ENDPOINT.*|QA|AXIS_.*|FLAGS_.*)$", k)}
    return subprocess.run(["bash", "run.sh", *words], cwd=folder, env=inherited | variables, capture_output=True,
                          text=True, timeout=120)


def printed(*words, **variables):
    """What DRY=1 prints."""
    done = run_sh(ROOT, *words, DRY="1", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stages_of(*words, **variables):
    """[(stage, output, words of its command)] as DRY=1 prints them."""
    found = re.findall(r"^# (\S+) -> (.+)\n(.+)$", printed(*words, **variables), re.MULTILINE)
    return [(name, output, shlex.split(command)) for name, output, command in found]


def dry(size, *more, **variables):
    """{stage: (output, words of its command)}"""
    return {name: (output, words) for name, output, words in stages_of(size, *more, **variables)}


def script(words):
    """The stage's file, and the words after it."""
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[at], words[at + 1:]


def arguments(words):
    """{flag: [its values]} of a command."""
    found, flag = {}, None
    for word in words:
        if word.startswith("--"):
            flag = found.setdefault(word, [])
        elif flag is not None:
            flag.append(word)
    return found


@lru_cache
def flags_of(name, *command):
    """The flags that a script, or the subcommand it is called with, explains in its --help."""
    done = subprocess.run([sys.executable, name, *command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


def value(stages, stage, flag):
    return arguments(script(stages[stage][1])[1])[flag][0]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_flag_of_every_command_exists(command):
    for stage, _, words in stages_of(*command):
        name, rest = script(words)
        unknown = arguments(rest).keys() - flags_of(name, *[word for word in rest[:1] if word[0] != "-"])
        assert not unknown, f"{command} {stage}: {name} knows no {sorted(unknown)}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_input_is_the_output_of_an_earlier_stage(command):
    if command[-1] == "scale" and command[0] != "tiny":
        pytest.skip("reads what the recipes of other sizes wrote")
    made = set()
    for stage, output, words in stages_of(*command, OUT="OUT", DATA="DATA"):
        for flag, values in arguments(script(words)[1]).items():
            for path in values if flag in INPUTS else ():
                path = path.split("=")[-1]
                if path.startswith(("OUT", "DATA")):
                    assert any(path == m or path.startswith(m + "/") for m in made), f"{stage}: who writes {path}?"
                else:
                    assert path.startswith("Qwen/"), f"{stage}: {path} comes from nowhere"
        written = arguments(script(words)[1])["--out"][0]
        assert output == written or output.startswith(written + "/"), f"{stage} writes {written}, not {output}"
        made.add(written)


@pytest.mark.parametrize("size", PAPER)
def test_hyper_parameters_are_the_papers(size):
    stages, paper = dry(size), PAPER[size]
    assert value(stages, "sft", "--model") == paper["base"]
    assert value(stages, "sft", "--epochs") == paper["sft_epochs"]
    assert script(stages["rl"][1])[0] == paper["algorithm"]
    assert value(stages, "rl", "--reward") == paper["reward"]
    for stage, numbers in (("sft", PAPER_SFT), ("rl", PAPER_RL), ("eval", PAPER_PLAY)):
        assert {flag: value(stages, stage, flag) for flag in numbers} == numbers
    assert value(stages, "rl-tasks", "--n") == "1000" and value(stages, "rl-tasks", "--levels") == "4:3:3"
    assert value(stages, "sft-tasks", "--n") == "1198" and value(stages, "sft-tasks", "--levels") == "627:373:198"
    assert value(stages, "sft-tasks", "--exclude") == value(stages, "rl", "--tasks"), "SFT and RL share no task"
    assert "--nproc_per_node 8" in " ".join(stages["sft"][1])


@pytest.mark.parametrize("gpus, base, rl", (("", 1, 2), ("1", 1, 1), ("2", 2, 2)))
def test_tiny_plays_with_two_ranks_and_imitates_with_one_unless_gpus_says_otherwise(gpus, base, rl):
    stages = dry("tiny", **({"GPUS": gpus} if gpus else {}))
    for stage, ranks in (("base", base), ("sft", base), ("rl", rl)):
        words = stages[stage][1]
        assert [words[i + 1] for i, word in enumerate(words) if word == "--nproc_per_node"] == [str(ranks)]


def test_the_checkpoint_that_is_evaluated_is_the_best_on_validation():
    stages = dry("3b", OUT="OUT")
    assert arguments(script(stages["eval"][1])[1])["--model"][-1].endswith("OUT/rl/best")
    assert value(stages, "rl", "--val") == value(stages, "eval", "--tasks")


def test_tiny_needs_no_hub_and_only_its_own_world():
    stages = dry("tiny", STAR_DATABASE="/elsewhere")
    text = " ".join(word for _, words in stages.values() for word in words)
    assert "Qwen/" not in text and "/elsewhere" not in text and "database/mini" in text


def test_variables_override_base_data_output_seed_and_ranks():
    stages = dry("7b", MODEL="/m", DATA="/d", OUT="/o o", SEED="7", GPUS="4", STAR_DATABASE="/b")
    assert value(stages, "sft", "--model") == "/m" and value(stages, "sft", "--data") == "/d/sft.jsonl"
    assert value(stages, "rl", "--out") == "/o o/rl" and value(stages, "rl", "--database") == "/b"
    assert value(stages, "sft", "--seed") == value(stages, "rl", "--seed") == "7"
    assert "--nproc_per_node 4" in " ".join(stages["rl"][1])
    assert value(dry("tiny", MODEL="/m"), "sft", "--model") == "/m" and "init" not in dry("tiny", MODEL="/m")


def test_several_nodes_meet_at_the_first():
    words = " ".join(dry("7b", NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")["rl"][1])
    assert "--nnodes 2 --node_rank 1 --nproc_per_node 8 --master_addr node0" in words and "--standalone" not in words


def test_an_unknown_size_is_answered_with_the_usage():
    done = subprocess.run(["bash", str(ROOT / "run.sh"), "70b"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "bash run.sh tiny" in done.stdout


# -------------------------------------------------------------------------------------------------------- the axes

SETTINGS = {  # by hand: the rows of each axis of tiny
    "reward": ["sft", "sum", "macro", "success", "curriculum"],
    "algorithm": ["sft", "grpo", "dapo", "arpo", "arpo-released"],
    "noise": ["sft", "0%", "5%", "10%"],
    "data": ["sft", "100-prompts", "200-prompts", "400-prompts", "easy", "medium", "hard", "mixed"],
}


def trained(stages):
    """{run: {flag: values, "script": file}} of an axis's trainings, and {setting: [runs]} of its table."""
    runs = {}
    for name, (_, words) in stages.items():
        if name.startswith("rl-") and script(words)[0] in ("grpo.py", "arpo.py"):
            flags = arguments(script(words)[1])
            runs[flags["--out"][0].removesuffix("/rl")] = flags | {"script": script(words)[0]}
    rows = {}
    for spec in arguments(script(list(stages.values())[-1][1])[1])["--runs"]:
        setting, _, folder = spec.partition("=")
        rows.setdefault(setting, []).append(re.sub("/eval/(rl|sft)$", "", folder))
    return runs, rows


@pytest.mark.parametrize("axis", SETTINGS)
def test_an_axis_trains_every_setting_with_every_seed_alike_from_one_checkpoint(axis):
    runs, rows = trained(dry("tiny", "axis", axis, OUT="OUT", SEEDS="3 5", AXIS_STEPS="7"))
    assert list(rows) == SETTINGS[axis]
    for setting, folders in rows.items():
        assert [folder[-3:] for folder in folders] == ["-s3", "-s5"], f"{setting}: a run per seed"
        for seed, folder in zip("35", folders):
            if setting != "sft":
                assert runs[folder]["--seed"] == [seed] and runs[folder]["--steps"] == ["7"]
                assert runs[folder]["--model"] == ["OUT/sft"] and "--resume" in runs[folder]
    assert len({tuple(flags["--lr"] + flags["--prompts"] + flags["--group"]) for flags in runs.values()}) == 1


def test_only_what_the_axis_names_changes_along_it():
    changes = {"reward": {"--reward"}, "algorithm": {"script", "--branch", "--drop-uniform"},
               "data": {"--tasks"}, "noise": {"--failure-rate"}}
    crossing = set()
    for axis, allowed in changes.items():
        runs, _ = trained(dry("tiny", "axis", axis, SEEDS="0"))
        flags = [{k: tuple(v) for k, v in run.items() if k not in ("--out", "script")} | {"script": run["script"]}
                 for run in runs.values()]
        differ = {key for one in flags for key in one if any(other.get(key) != one[key] for other in flags)}
        assert differ == allowed, axis
        crossing = crossing & set(runs) if crossing else set(runs)
    assert crossing == {"out/tiny/axis/runs/grpo-sum-mixed-400-fail-00-s0"}, "the axes cross in one run, made once"


def test_the_settings_of_an_axis_by_hand():
    runs, rows = trained(dry("tiny", "axis", "algorithm", SEEDS="0"))
    of = lambda setting: runs[rows[setting][0]]
    assert of("grpo")["script"] == of("dapo")["script"] == "grpo.py" and "--drop-uniform" in of("dapo")
    assert of("arpo")["script"] == "arpo.py" and of("arpo")["--branch"] == ["paper"]
    assert of("arpo-released")["--branch"] == ["released"] and "--drop-uniform" not in of("grpo")
    runs, rows = trained(dry("tiny", "axis", "noise", SEEDS="0"))
    assert [of(rate)["--failure-rate"] for rate in ("0%", "5%", "10%")] == [["0.00"], ["0.05"], ["0.10"]]
    runs, rows = trained(dry("3b", "axis", "data", SEEDS="0", DATA="DATA"))
    tasks = [of(s)["--tasks"][0][len("DATA/subsets/"):-len(".jsonl")] for s in list(rows)[1:]]
    assert tasks == ["mixed-100", "mixed-200", "mixed-500", "mixed-1000", "mixed-2000",
                     "easy-1000", "medium-1000", "hard-1000", "mixed-1000"]
    # [STAR]: five epochs of 1,000 tasks at 32 a step; data with 3B and the curriculum; algorithms under MACRO, 7B SUM
    assert of("easy")["--steps"] == ["157"] and of("easy")["--reward"] == ["curriculum"]
    for size, reward in (("1.5b", "macro"), ("3b", "macro"), ("7b", "sum")):
        runs, rows = trained(dry(size, "axis", "algorithm", SEEDS="0"))
        assert {tuple(run["--reward"]) for run in runs.values()} == {(reward,)}
        assert {run["script"] for run in runs.values()} == {"grpo.py", "arpo.py"} and of("grpo")["script"] == "grpo.py"


def test_the_checkpoints_of_an_axis_play_the_same_tasks_and_no_tool_fails():
    stages = dry("7b", "axis", "noise", OUT="OUT", AXIS_TASKS="9")
    plays = {name: arguments(script(words)[1]) for name, (_, words) in stages.items() if name.startswith("eval-")}
    assert len(plays) == 8 and {tuple(p["--tasks"] + p["--limit"]) for p in plays.values()} == {
        ("data/full/val.jsonl", "9")}
    assert not any("--failure-rate" in play for play in plays.values())
    run = "OUT/axis/runs/grpo-sum-mixed-1000-fail-10-s1"
    assert plays["eval-grpo-sum-mixed-1000-fail-10-s1"]["--model"] == [f"rl={run}/rl/best"]
    assert plays["eval-sft-s0"]["--model"] == ["sft=OUT/sft"]


def test_the_axis_of_scale_is_three_widths_of_tiny_or_the_three_sizes():
    stages = stages_of("tiny", "axis", "scale", OUT="OUT", DATA="DATA", SEEDS="0")
    inits = [(output, arguments(words)["--width"]) for name, output, words in stages if name == "init"]
    assert inits == [("OUT/axis/scale/width-128/init/config.json", ["128"]), ("OUT/init/config.json", ["192"]),
                     ("OUT/axis/scale/width-256/init/config.json", ["256"])]
    starts = [arguments(words)["--model"] for _, _, words in stages if script(words)[0] == "grpo.py"]
    assert starts == [["OUT/axis/scale/width-128/sft"], ["OUT/sft"], ["OUT/axis/scale/width-256/sft"]]
    stages = stages_of("7b", "axis", "scale", OUT="runs/mine")
    assert [name for name, *_ in stages] == ["axis-scale"], "nothing is trained"
    assert arguments(stages[0][2])["--runs"] == [
        "1.5b-sft=runs/1.5b/eval/sft", "1.5b=runs/1.5b/eval/rl", "3b-sft=runs/3b/eval/sft", "3b=runs/3b/eval/rl",
        "7b-sft=runs/mine/eval/sft", "7b=runs/mine/eval/rl"]


# ------------------------------------------------------------------------------------------------------- the chain


STAND_IN = '''#!/usr/bin/env bash
# stands for python and torchrun: notes the call, fails on the stage named in ./broken, else writes what --out names
echo "$*" >> calls
if [[ -s broken && "$*" == *"$(cat broken)"* ]]; then exit 3; fi
until [[ $# == 0 || $1 == --out ]]; do shift; done
case ${2:-} in
    "")  ;;
    *.*) mkdir -p "$(dirname "$2")"; echo made > "$2" ;;
    *)   mkdir -p "$2"; echo '{"loss_tokens": 64}' > "$2/log.jsonl"
         for f in config.json table.md tax.md curves.png hard-200.jsonl noise.md; do echo made > "$2/$f"; done ;;
esac
'''


def stand_in(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def house(tmp_path):
    """run.sh with a .venv that is already made, of stand-ins."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("run.sh", "requirements.txt", "requirements-cpu.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("python", "torchrun", "hf"):
        stand_in(tmp_path / ".venv" / "bin" / name, STAND_IN)
    gpu = subprocess.run("nvidia-smi", shell=True, capture_output=True).returncode == 0
    pins = "requirements.txt" if gpu else "requirements-cpu.txt"
    (tmp_path / ".venv" / "installed.txt").write_bytes((ROOT / pins).read_bytes())
    return tmp_path


def test_all_stages_run_in_order_once_and_the_time_is_told(house):
    first = run_sh(house, "tiny")
    assert first.returncode == 0, first.stderr
    calls = (house / "calls").read_text().splitlines()
    assert len(calls) == len(dry("tiny")) and "evaluate.py" in "".join(calls[-2:])
    assert re.search(r"^rl +\d+ s\n(.+\n)*all +\d+ s$", first.stdout, re.MULTILINE)
    second = run_sh(house, "tiny")
    assert second.returncode == 0 and (house / "calls").read_text().splitlines() == calls, "nothing is done twice"
    assert "done before" in second.stdout


def test_a_failed_stage_stops_the_chain_and_the_same_command_goes_on(house):
    (house / "broken").write_text("--model out/tiny/base ")
    failed = run_sh(house, "tiny")
    assert failed.returncode != 0 and "stage sft failed" in failed.stderr and "same command" in failed.stderr
    calls = (house / "calls").read_text().splitlines()
    assert "--model out/tiny/base " in calls[-1], "nothing runs after the stage that failed"
    (house / "broken").write_text("")
    assert run_sh(house, "tiny").returncode == 0
    again = (house / "calls").read_text().splitlines()[len(calls):]
    assert "--model out/tiny/base " in again[0] and len(calls) + len(again) == len(dry("tiny")) + 1


def test_an_output_that_a_killed_stage_left_in_half_does_not_count(house):
    assert run_sh(house, "tiny").returncode == 0
    (house / "out/tiny/data/rl.jsonl.unfinished").touch()  # as a kill in the middle of rl-tasks leaves it
    before = len((house / "calls").read_text().splitlines())
    assert run_sh(house, "tiny").returncode == 0
    again = (house / "calls").read_text().splitlines()[before:]
    assert len(again) == 1 and "rl.jsonl" in again[0] and not (house / "out/tiny/data/rl.jsonl.unfinished").exists()


def test_another_seed_and_folder_is_another_run(house):
    assert run_sh(house, "tiny", OUT="out/second", SEED="2").returncode == 0
    assert (house / "out/second/rl/config.json").exists() and not (house / "out/tiny").exists()
    assert "--seed 2" in (house / "calls").read_text()


def test_another_seed_of_an_axis_trains_what_is_missing_and_makes_the_table_anew(house):
    assert run_sh(house, "tiny", "axis", "noise", SEEDS="0").returncode == 0
    first = (house / "calls").read_text().splitlines()
    assert len(first) == len(dry("tiny", "axis", "noise", SEEDS="0")) and "evaluate.py --axis noise" in first[-1]
    assert run_sh(house, "tiny", "axis", "noise", SEEDS="0 4").returncode == 0
    again = (house / "calls").read_text().splitlines()[len(first):]
    assert len(again) == 3 + 4 + 1 and all("--seed 4 " in call for call in again[:-1])
    assert again[-1].count("-s0/eval/") == again[-1].count("-s4/eval/") == 4


def test_more_flags_of_a_stage_come_last(house):
    words = dry("tiny", FLAGS_rl="--lr 7 --no-std")["rl"][1]
    assert words[-3:] == ["--lr", "7", "--no-std"] and "7" not in dry("tiny", FLAGS_rl="--lr 7")["sft"][1]


# ------------------------------------------------------------------------------------------------------ preflight

SMI = """#!/usr/bin/env bash
# stands for nvidia-smi: two GPUs of 79 GiB
if [[ $1 == -L ]]; then echo "GPU 0: A"; echo "GPU 1: A"; else echo 81920; echo 81559; fi
"""


@pytest.fixture
def station(house, monkeypatch):
    """The house with two GPUs, a model and a teacher."""
    stand_in(house / "bin" / "nvidia-smi", SMI)
    monkeypatch.setenv("PATH", f"{house / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (house / ".venv" / "installed.txt").write_bytes((ROOT / "requirements.txt").read_bytes())
    (house / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model-1.safetensors"):
        (house / "model" / name).write_text("{}")
    return house


def test_preflight_comes_before_anything_is_spent_and_plans_what_is_run():
    for size in ("1.5b", "3b", "7b"):
        stages = list(dry(size))
        assert stages.index("preflight") < min(map(stages.index, ("sft-tasks", "episodes", "sft", "rl")))
        plans = [shlex.split(line) for line in printed(size, "preflight", NNODES="2", MASTER_ADDR="a").splitlines()
                 if " --plan " in line]
        recipe = dry(size)
        for words, stage, flag in zip(plans, ("sft", "rl"), ("--cutoff", "--context"), strict=True):
            plan = arguments(script(words)[1])
            assert script(words)[0] == script(recipe[stage][1])[0] and plan["--gpus"] == ["16"]
            assert plan[flag] == [value(recipe, stage, flag)] and plan["--model"] == [PAPER[size]["base"]]
            if "--plan" in flags_of(script(words)[0]):
                assert plan.keys() <= flags_of(script(words)[0])
    words = dry("7b", "preflight", NNODES="2", MASTER_ADDR="a")["preflight"][1]
    assert arguments(script(words)[1])["--prompts"] == ["16"], "a query for every rank"


def test_preflight_passes_once_and_says_what_it_saw(station):
    first = run_sh(station, "7b", "preflight", MODEL="model", ENDPOINT_KEY="key",
                   ENDPOINT="http://a/v1=m http://b/v1=n")
    assert first.returncode == 0 and "preflight passed: 2 ranks" in first.stderr, first.stderr
    calls = (station / "calls").read_text()
    assert "--gpus 2 --gpu-gib 79" in calls and "http://a/v1=m key" in calls and "http://b/v1=n key" in calls
    assert "hf " not in calls and not list((station / "out/7b/preflight").glob("*.safetensors"))
    run_sh(station, "7b", MODEL="model")
    again = (station / "calls").read_text()[len(calls):]
    assert "sft.py" in again and "--plan" not in again and "out/7b/preflight" not in again


@pytest.mark.parametrize("broken, variables, fix", [
    ("", {"GPUS": "4"}, "2 GPUs are seen on this node and 4 are asked for: GPUS=2"),
    ("sft.py --cutoff 20480 --plan", {}, "model is too large for 2 x 79 GiB: more GPUs"),
    ("grpo.py --context 30000 --plan", {}, "model is too large for 2 x 79 GiB: more GPUs"),
    ("Are you there", {"ENDPOINT": "http://a/v1=m"}, "http://a/v1=m: ENDPOINT=http://host:port/v1=MODEL of a server"),
    ("download", {"MODEL": "Qwen/none"}, "no Qwen/none: MODEL=a folder that is here, or a hub name"),
    ("out/7b/preflight", {}, "stage preflight failed, its words are above"),
])
def test_preflight_refuses_in_one_line_that_says_the_fix(station, broken, variables, fix):
    (station / "broken").write_text(broken)
    done = run_sh(station, "7b", **{"MODEL": "model"} | variables)
    assert done.returncode == 1 and fix in done.stderr.splitlines()[-1], done.stderr
    assert "episodes" not in (station / "calls").read_text(), "nothing is spent"


def test_preflight_asks_the_teacher_and_shows_its_key(tmp_path):
    heard = []

    class Teacher(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((self.path, self.headers["Authorization"], body["model"]))
            reply = json.dumps({"choices": [{"message": {"content": "Yes."}}]}).encode()
            self.send_response(200 if body["model"] == "m" else 404)
            self.end_headers()
            self.wfile.write(reply)

    server = HTTPServer(("127.0.0.1", 0), Teacher)
    Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "key").write_text("secret\n")
    for model, status in (("m", 0), ("other", 1)):
        endpoint = f"http://127.0.0.1:{server.server_port}/v1={model}"
        line = next(line for line in printed("7b", "preflight", ENDPOINT=endpoint, ENDPOINT_KEY=str(tmp_path / "key"))
                    .splitlines() if line.startswith("python -c"))
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
    server.shutdown()
    assert heard == [("/v1/chat/completions", "Bearer secret", "m"), ("/v1/chat/completions", "Bearer secret", "other")]


def test_preflight_wants_a_whole_model_disk_and_a_token_to_compare(station):
    last = lambda **variables: run_sh(station, "7b", "preflight", MODEL="model", **variables).stderr.splitlines()[-1]
    stand_in(station / "bin" / "df", "echo Filesystem; echo d 9000000 8000000 1000000 89% /")
    with open(station / "model" / "model-1.safetensors", "wb") as sparse:
        sparse.truncate(30 << 30)
    du = "#!/usr/bin/env bash\necho 15232 a; echo 15232 total\n"
    stand_in(station / "bin" / "du", du)  # of two bytes: 7,616 million parameters
    assert "1 of 685 GB of disk" in last() and "OUT=a larger one" in last()
    (station / "bin" / "df").unlink(), (station / "bin" / "du").unlink()
    (station / "model" / "model-1.safetensors").write_text("{}")
    stand_in(station / ".venv" / "bin" / "torchrun", STAND_IN.replace("64", "0"))
    assert "nothing was trained on: remove out/7b/preflight" in last()
    (station / "model" / "tokenizer_config.json").unlink()
    assert "no tokenizer_config.json in model: MODEL=a whole HF folder" in last()


def test_the_pins_are_exact():
    for name in ("requirements.txt", "requirements-cpu.txt"):
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            line = line.split("#")[0].strip()
            assert not line or re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line), f"{name}:{number}: {line}"
