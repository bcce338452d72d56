"""docs/paper.json has every number of the papers once; defaults and studies agree with it."""
import ast
import json
import math
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from test_run import arguments, script, stages_of

KNOWN = json.loads((ROOT / "docs" / "paper.json").read_text(encoding="utf-8"))
TABLES, FLAGS, FACTORS = (KNOWN[name] for name in ("tables", "flags", "factors"))
SIZES = ("1.5b", "3b", "7b")
DEFAULTS = {"sft.py": ("sft",), "grpo.py": ("rl",), "arpo.py": ("rl",), "evaluate.py": ("play",),
            "qa_eval.py": ("play", "questions"), "toolstar/__main__.py": ("star-pairs",)}


def number(where):
    """The number at TABLE/ROW/COLUMN or FLAGS/--flag."""
    table, row, *column = where.split("/")
    if table in FLAGS:
        return float(FLAGS[table]["values"][row])
    columns, values = TABLES[table]["columns"], TABLES[table]["rows"][row]
    return values[columns.index(column[0]) if column else 0]


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_stages_defaults_are_the_papers(name):
    for table in DEFAULTS[name]:
        for flag in FLAGS[table]["values"]:
            assert default(name, flag) == number(f"{table}/{flag}"), f"{name} {flag}"


def default(name, flag):
    """The default of a flag, from the call that adds it."""
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) \
                and node.args[0].value == flag:
            return float(next(key.value.value for key in node.keywords if key.arg == "default"))
    assert name == "qa_eval.py", f"{name} has no flag {flag}"
    return default("evaluate.py", flag)  # which qa_eval.py takes over


# the studies that the paper made
STUDIES = [(axis, size) for axis in ("reward", "algorithm") for size in SIZES]
STUDIES += [("scale", "7b"), ("data", "3b"), ("noise", "3b")]


@pytest.mark.parametrize("axis, size", STUDIES)
def test_the_runs_of_a_study_have_the_papers_factors(axis, size):
    """Every run of RL: all that the paper holds fixed, and along the axis what it varies."""
    # with seed 0 one of the runs is the recipe's own
    runs = [(script(words)[0], arguments(words))
            for _, _, words in stages_of(size, "axis", axis, SEEDS="1")
            if "torchrun" in words and "--failure-rate" in words]
    updates = math.ceil(number("rl/--epochs") * number("queries/rl/number")
                        / number("rl/--prompts"))
    fixed = FLAGS["rl"]["values"] | {"--steps": str(updates)}
    for _, given in runs:  # --steps says where --epochs would end
        assert {flag: given[flag][0] for flag in fixed} == fixed
    varied = {"script": {name for name, _ in runs},
              "--reward": {given["--reward"][0] for _, given in runs},
              "--tasks": {given["--tasks"][0].split("/")[-1].removesuffix(".jsonl")
                          for _, given in runs},
              "--failure-rate": {float(given["--failure-rate"][0]) for _, given in runs}}
    factors = {name: values[size] if isinstance(values, dict) else values
               for name, values in FACTORS[axis].items()}
    assert varied == {name: set(values) for name, values in factors.items()}


# As little of each stage as makes a table: what the recipe's variable FLAGS_STAGE is set to
LITTLE = {"drills|episodes": "--n 40 --worlds 2", "val-tasks": "--n 8", "rl-tasks": "--n 16",
          "rl-grpo-.*": "--prompts 2 --group 2 --turn-tokens 16 --concurrency 4",
          "eval-.*": "--max-turns 1 --max-tokens 16 --concurrency 4"}


@pytest.mark.slow
def test_a_study_runs_to_its_table_at_tiny_size(tiny_model, tmp_path):
    variables = os.environ | {"OUT": str(tmp_path), "SEEDS": "0", "AXIS_STEPS": "1", "GPUS": "1",
                              "AXIS_TASKS": "2"}
    for stage in ("init", "base", "sft"):  # as if they had run
        shutil.copytree(tiny_model, tmp_path / stage)
    command = ["bash", "run.sh", "tiny", "axis", "memory"]
    said = subprocess.run(command, cwd=ROOT, env=variables | {"DRY": "1"}, check=True,
                          capture_output=True, text=True).stdout
    flags = {"FLAGS_" + re.sub("[^a-z0-9]", "_", name): words
             for name in re.findall(r"^# (\S+) -> ", said, re.MULTILINE)
             for stage, words in LITTLE.items() if re.fullmatch(stage, name)}
    done = subprocess.run(command, cwd=ROOT, env=variables | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    settings, file = ["sft", "other-worlds", "world-of-the-test"], tmp_path / "axis" / "memory.md"
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")]
                      for line in file.read_text().splitlines() if line.startswith("|")]
    ours = next(n for n, cell in enumerate(head) if cell.startswith("ours, 2 tasks"))
    assert [row[0] for row in rows if row[ours] != "not run"] == settings
    assert all(f"| {name} " in done.stdout for name in settings), "the table is printed"
