"""docs/paper.json has every number of the papers once; every other place that prints one agrees."""
import ast
import json
import math
import os
import re
import shlex
import subprocess
from functools import cache

import pytest
from conftest import ROOT, free_port
from test_run import arguments, script

KNOWN = json.loads((ROOT / "docs" / "paper.json").read_text(encoding="utf-8"))
TABLES, FLAGS, FACTORS = (KNOWN[name] for name in ("tables", "flags", "factors"))
SIZES = ("1.5b", "3b", "7b")
DEFAULTS = {"sft.py": ("sft",), "grpo.py": ("rl",), "arpo.py": ("rl",), "evaluate.py": ("play",),
            "qa_eval.py": ("play", "questions"), "pairs.py": ("star-pairs",)}


def find(name):
    """The path of the repository's file with this name."""
    found, = (path for path in texts() if path.name == name)
    return found


@cache
def texts():
    """{path: text} of all files that users read: code, recipes, pages."""
    paths = [path for ending in ("py", "sh", "md") for path in ROOT.rglob(f"*.{ending}")]
    hidden = {"tests", "out", "data", "runs"}
    return {path: path.read_text(encoding="utf-8") for path in paths
            if not any(part in hidden or part.startswith(".")
                       for part in path.relative_to(ROOT).parts)}


def number(where):
    """The number at TABLE/ROW/COLUMN or FLAGS/--flag."""
    table, row, *column = where.split("/")
    if table in FLAGS:
        return float(FLAGS[table]["values"][row])
    columns, values = TABLES[table]["columns"], TABLES[table]["rows"][row]
    return values[columns.index(column[0]) if column else 0]


def rows_of(markdown):
    """(head, rows of cells) of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")]
                 for line in block.replace("\\|", "¦").splitlines()]
        yield lines[0], lines[2:]


# ---------------------------------------------------------------- where they are printed


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_stages_defaults_are_the_papers(name):
    for table in DEFAULTS[name]:
        for flag in FLAGS[table]["values"]:
            assert default(name, flag) == number(f"{table}/{flag}"), f"{name} {flag}"


def default(name, flag):
    """The default of a flag, from the call that adds it."""
    for node in ast.walk(ast.parse(texts()[find(name)])):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) \
                and node.args[0].value == flag:
            return float(next(key.value.value for key in node.keywords if key.arg == "default"))
    assert name == "qa_eval.py", f"{name} has no flag {flag}"
    return default("evaluate.py", flag)  # which qa_eval.py takes over


def dry(command):
    """The commands that a recipe would run."""
    command = command.replace("=URL=MODEL", "=http://localhost:8000/v1=MODEL")
    return subprocess.run(command, shell=True, cwd=ROOT, env=os.environ | {"DRY": "1"}, text=True,
                          check=True, capture_output=True).stdout


# ---------------------------------------------------------------- docs/*.md


def rows_of_paper_md():
    """(what is in the paper, command) of each row of the page's tables of figures and tables."""
    return [(row[0], row[1]) for head, rows in rows_of(texts()[ROOT / "docs" / "paper.md"])
            if head[0] == "in the paper" for row in rows]


def commands_in(text, sizes):
    """The commands in a cell, with SIZE replaced by each size."""
    found = [one for one in re.findall(r"`([^`]+)`", text) if " " in one]
    return dict.fromkeys(command.replace("SIZE", size) for command in found for size in sizes)


# (command, axis, size) of each study of STAR that the page names
STUDIES = sorted({(command, *re.search(r"run\.sh (\S+) axis (\w+)", command).groups()[::-1])
                  for _, cell in rows_of_paper_md() if "tool-star" not in cell
                  for command in commands_in(cell, SIZES)
                  if re.search(r" axis (?!reliability)", command)})


@pytest.mark.parametrize("command, axis, size", STUDIES)
def test_the_runs_of_a_study_have_the_papers_factors(command, axis, size):
    """Every run of RL: all that the paper holds fixed, and along the axis what it varies."""
    lines = [shlex.split(line) for line in dry(command).splitlines() if " --failure-rate " in line]
    runs = [(script(words)[0], arguments(words)) for words in lines if "torchrun" in words]
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
LITTLE = {"base": "--steps 1", "sft": "--steps 1", "facts": "--sft 40 --rl 40 --val 40",
          "rl": "--prompts 2 --group 2 --turn-tokens 16 --concurrency 4",
          "eval": "--max-turns 1 --max-tokens 16 --concurrency 4"}
DRAWN = {"tiny": {"drills": "--n 40 --worlds 2", "episodes": "--n 40 --worlds 2",
                  "val-tasks": "--n 8", "rl-tasks": "--n 16"}, "tool-tiny": {"drills": "--n 40"}}


@pytest.mark.slow
@pytest.mark.parametrize("size, axis, settings", [
    ("tiny", "reward", ["sft", "sum", "macro", "success", "curriculum"]),
    ("tool-tiny", "masking", ["sft", "masked", "trained-on"])])
def test_a_study_of_the_page_runs_to_its_table_at_tiny_size(size, axis, settings, tmp_path):
    variables = os.environ | {"OUT": str(tmp_path), "SEEDS": "0", "AXIS_STEPS": "1", "GPUS": "1",
                              "AXIS_TASKS": "2", "PORT": str(free_port())}
    command = ["bash", "run.sh", size, "axis", axis]
    said = subprocess.run(command, cwd=ROOT, env=variables | {"DRY": "1"}, check=True,
                          capture_output=True, text=True).stdout
    stages = re.findall(r"^# (\S+) -> ", said, re.MULTILINE)
    little = {name: LITTLE[name.split("-")[0]] for name in stages
              if name in LITTLE or name.startswith(("rl-grpo-", "eval-"))}
    little |= {name: words for name, words in DRAWN[size].items() if name in stages}
    flags = {"FLAGS_" + re.sub("[^a-z0-9]", "_", name): words for name, words in little.items()}
    done = subprocess.run(command, cwd=ROOT, env=variables | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    file = tmp_path / "axis" / f"{'tool-' * (size != 'tiny')}{axis}.md"
    (head, rows), = rows_of(file.read_text())
    ours = next(n for n, cell in enumerate(head) if cell.startswith("ours, 2 tasks"))
    assert [row[0] for row in rows if row[ours] != "not run"] == settings
    assert all(f"| {name} " in done.stdout for name in settings), "the table is printed"
