"""docs/paper.json has every number of the papers once; every other place that prints one agrees."""
import ast
import json
import math
import os
import re
import shlex
import subprocess
from functools import cache
from itertools import product

import pytest
from conftest import ROOT, free_port
from test_run import arguments, flags_of, script

import synth
from recipes import axes, episodes
from toolstar import scores, sets

KNOWN = json.loads((ROOT / "docs" / "paper.json").read_text(encoding="utf-8"))
TABLES, FLAGS, AXES, FACTORS = (KNOWN[name] for name in ("tables", "flags", "axes", "factors"))
SIZES = ("1.5b", "3b", "7b")
NUMBER = r"-?[\d,]*\.?\d+"

# Sentences and comments that print numbers of the papers: a pattern with a group for each, and
# where they stand in docs/paper.json, as TABLE/ROW/COLUMN or FLAGS/--flag.
SENTENCES = [
    (r"(?:keeps|keep|solved|kept) ([\d,]+) of (?:the )?([\d,]+)",
     ("levels/all/number", "episodes/played/number")),
    (r"levels='(\d{3}) (\d{3}) (\d{3})'",
     ("levels/easy/number", "levels/medium/number", "levels/hard/number")),
    (r"up to (\d+)% do no harm and (\d+)% do",
     ("noise/failing/no harm up to", "noise/failing/harm at")),
    (r"top[- ](\d+),? .{0,20}?(\d+) calls", ("questions/--topk", "rl/--max-turns")),
    (r"([\d,]+) (?:synthetic |held-out )?queries choose", ("queries/validation/number",)),
    (r"([\d,]+) queries for RL", ("queries/rl/number",)),
    (r"kind for (\d)/5 of training, its second for (\d)/5",
     ("curriculum/sum/epochs", "curriculum/macro/epochs")),
    (r"LoRA weights at a learning rate of (\de-\d)", ("star-dpo/--lr",)),
    (r"\+ (\d\.\d) for any accuracy above 0", ("bonus/both tools/reward",)),
    (r"(\d+) questions at a time, (\d+) tries each \[1\]",
     ("judge/at once/number", "judge/tries/number")),
    (r"prompts of ([\d,]+) and responses of ([\d,]+) tokens",
     ("limits/tokens of a training prompt/number", "limits/tokens of a training response/number")),
    (r"(?<!and )responses of ([\d,]+) tokens \[4\]",
     ("limits/tokens of an evaluation's response/number",)),
    (r"(\d) calls in training; in evaluation (\d) of each tool",
     ("limits/calls in training/number", "limits/calls of each tool/number")),
    (r"(\d+)K chains for SFT and (\d+)K tasks for RL",
     ("published/sft/thousands", "published/rl/thousands")),
    (r"([\d.]+) on 200 synthetic queries and ([\d.]+) on the validation queries",
     ("reliability/synthetic/success", "reliability/validation/success")),
    (r"(\d+) easy, (\d+) medium, (\d+) hard",
     ("levels/easy/number", "levels/medium/number", "levels/hard/number")),
]
DEFAULTS = {"sft.py": ("sft",), "grpo.py": ("rl",), "arpo.py": ("rl",), "evaluate.py": ("play",),
            "qa_eval.py": ("play", "questions"), "pairs.py": ("star-pairs",)}
SINGLE = [("dpo.py", "--beta", "star-dpo/--beta"), ("tir.py", "--samples", "synthesis/--samples"),
          ("tir.py", "--max-calls", "synthesis/--max-calls")]


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


def numbers(text):
    return [float(one.replace(",", "")) for one in re.findall(NUMBER, text)]


def expected(axis, setting):
    """The papers' numbers that are printed beside a setting of an axis."""
    where = AXES[axis].get(setting)
    if where is None:
        return []
    table, row, *column = where.split("/")
    return [number(where)] if column else TABLES[table]["rows"][row]


def rows_of(markdown):
    """(head, rows of cells) of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")]
                 for line in block.replace("\\|", "¦").splitlines()]
        yield lines[0], lines[2:]


# ---------------------------------------------------------------- the file itself

def test_every_row_has_a_value_for_each_column():
    for name, table in TABLES.items():
        assert table.keys() == {"paper", "where", "columns", "what", "rows"}, name
        assert table["paper"] in KNOWN["papers"]
        for row, values in table["rows"].items():
            if table["columns"] != ["number"]:
                assert len(values) == len(table["columns"]), f"{name}/{row}"


def test_a_number_in_two_tables_of_the_papers_is_the_same():
    rewards, algorithms = TABLES["reward"]["rows"], TABLES["algorithm"]["rows"]
    assert algorithms["grpo"] == [*rewards["macro"][:2], rewards["sum"][2]]
    assert TABLES["ood-data"]["rows"]["mixed"] == TABLES["ood-data"]["rows"]["1000-prompts"]
    assert number("data/mixed/3b") == number("reward/curriculum/3b")
    for name in TABLES["ablation"]["columns"]:
        assert number(f"ablation/full/{name}") == number(f"sets/{name}/3b")
    levels = sum(number(f"levels/{level}/number") for level in ("easy", "medium", "hard"))
    assert levels == number("levels/all/number")


def test_a_recipe_takes_the_algorithm_and_reward_of_its_sizes_best_number():
    for size, recipe in KNOWN["recipes"].items():
        known = {("grpo.py", reward): number(f"reward/{reward}/{size}")
                 for reward in TABLES["reward"]["rows"] if reward != "sft"}
        known["arpo.py", "sum" if size == "7b" else "macro"] = number(f"algorithm/arpo/{size}")
        assert tuple(recipe["rl"]) == max(known, key=known.get)


# ---------------------------------------------------------------- where they are printed

@pytest.mark.parametrize("axis", AXES)
def test_an_axis_prints_the_papers_numbers(axis):
    (head, rows), = rows_of(axes.table_of(axis, {}))
    beside = next(n for n, cell in enumerate(head) if cell.startswith("paper"))
    assert ("1,000 test queries" in head[beside]) != axis.startswith("tool-")
    assert {row[0]: numbers(row[beside]) for row in rows} == {
        name: expected(axis, name) for name in AXES[axis]}
    if axis == "algorithm":
        for column, table in (-3, "minutes"), (-1, "gpu-hours"):
            assert head[column].startswith("paper, ")
            assert {row[0]: numbers(row[column]) for row in rows if row[column]} == (
                TABLES[table]["rows"])


@pytest.mark.parametrize("axis", KNOWN["questions"])
def test_the_questions_of_an_axis_stand_beside_the_papers_numbers(axis):
    settings = KNOWN["questions"]["all"] | KNOWN["questions"][axis]
    (head, rows), = rows_of(axes.questions_table(axis, {}))
    for row in rows:
        values = axes.numbers_at(settings[row[0]])
        assert row[1].split(" / ") == [f"{value:.1f}" if value else "-" for value in values]
    assert len(rows) == len(settings) and "seven sets" in head[1]


def compare(where, text, found):
    """Compare a cell, "ours / paper" or the paper's alone, with the papers' numbers of a setting
    and add their places, TABLE/ROW/COLUMN, to found."""
    table, row, *column = where.split("/")
    if row in TABLES.get(table, {"rows": ()})["rows"]:
        assert numbers(text.removeprefix("- / ")) == axes.numbers_at(where), where
        found |= {f"{table}/{row}/{one}" for one in column or TABLES[table]["columns"]}


def test_each_number_of_the_papers_tables_stands_in_a_cell_that_a_command_prints():
    found = set()
    for axis, places in AXES.items():
        (head, rows), = rows_of(axes.table_of(axis, {}))
        for cells in (row for row in rows if row[0] in places):
            table, _, row = places[cells[0]].partition("/")
            compare(f"{table}/{row}", cells[1], found)
            for key, name in axes.PARTS.items():
                compare(f"{table}-{key}/{row}", cells[head.index(name)], found)
            for key, name in ("minutes", -3), ("gpu-hours", -1):
                if axis == "algorithm":
                    compare(f"{key}/{row}", cells[name], found)
    for axis in KNOWN["questions"]:
        (head, rows), = rows_of(axes.questions_table(axis, {}))
        places = KNOWN["questions"]["all"] | KNOWN["questions"][axis]
        for cells in rows:
            table, _, row = places[cells[0]].partition("/")
            compare(f"{table}/{row}", cells[1], found)
            for name in head[3:]:
                compare(f"{table}-{name}/{row}", cells[head.index(name)], found)
    (_, rows), = rows_of(episodes.table([], None))
    for name, values in TABLES["levels"]["rows"].items():
        cells, = (row[1:] for row in rows if row[0] == f"paper, {name}")
        assert numbers(" ".join(cells)) == values
        found |= {f"levels/{name}/{column}" for column in TABLES["levels"]["columns"]}
    known = {f"{name}/{row}/{column}" for name, table in TABLES.items()
             if table["where"].startswith("Table ") and table["paper"] == "star"
             for row in table["rows"] for column in table["columns"]}
    assert sorted(known - found) == []
    assert len(known) >= 441


def test_tool_stars_table_prints_its_papers_numbers():
    known = TABLES["sets"]["rows"]
    assert {name: [one.paper, one.n] for name, one in sets.SETS.items()} == {
        name: values for name, values in known.items() if name in sets.SETS}
    assert known["mean of the first ten"][0] == sets.PAPER_MEAN
    judge = [scores.AT_ONCE, scores.TRIES]
    assert judge == [number("judge/at once/number"), number("judge/tries/number")]
    text = scores.compare({}, {})
    for values in known.values():
        assert values[0] is None or f"| {values[0]:.1f} |" in text


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_stages_defaults_are_the_papers(name):
    for table in DEFAULTS[name]:
        for flag in FLAGS[table]["values"]:
            assert default(name, flag) == number(f"{table}/{flag}"), f"{name} {flag}"


@pytest.mark.parametrize("name, flag, where", SINGLE)
def test_a_default_is_the_papers(name, flag, where):
    assert default(name, flag) == number(where)


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


@pytest.mark.parametrize("pattern, places", SENTENCES, ids=[one for one, _ in SENTENCES])
def test_sentences_print_the_papers_numbers(pattern, places):
    found = [(path.name, match.groups()) for path, text in texts().items()
             for match in re.finditer(pattern, re.sub(r"\s*\n\s*(?:# )?", " ", text))]
    assert found, "nothing prints this any more: give SENTENCES its new words, or drop it there"
    for name, groups in found:
        printed = [float(one.replace(",", "")) for one in groups]
        assert printed == [number(where) for where in places], name


def test_sft_help_prints_the_papers_epochs():
    epochs = {size: recipe["epochs"] for size, recipe in KNOWN["recipes"].items()}
    assert epochs["3b"] == epochs["7b"] == f"{default('sft.py', '--epochs'):.0f}"
    assert re.search(rf'"--epochs".*\b{epochs["1.5b"]}\b[^\n]*1\.5B', texts()[find("sft.py")])


# ---------------------------------------------------------------- docs/*.md

COMMANDS = sorted({command for page in ("paper.md", "results.md") for command in re.findall(
    r"(?:[A-Za-z_]+=(?:\"[^\"]*\"|\S+) )*bash run\.sh [a-zA-Z0-9.]\S*(?: axis [a-z]+)?",
    (ROOT / "docs" / page).read_text(encoding="utf-8").replace("`", "\n").replace(
        "tool-star-SIZE", "tool-star-7b").replace("SIZE", "7b").replace("axis NAME", "axis dpo"))
    if not re.search("run.sh (test|gpu)", command)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pages_recipes_are_commands_that_run(command):
    assert "torchrun" in (said := dry(command.replace("SEED=n", "SEED=1"))) or "--axis" in said


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


def test_the_page_has_a_study_for_each_axis_and_a_command_or_a_reason_in_every_row():
    assert {axis for _, axis, _ in STUDIES} == set(FACTORS)
    for name, cell in rows_of_paper_md():
        assert commands_in(cell, ["3b"]) or cell.startswith(("**Not here**", "the same with")), name


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


# what the papers print of a stage: in STAR's recipes, in Tool-Star's
STAGES = {"sft.py": (["sft"], ["star-sft"]), "grpo.py": (["rl"], ["star-rl"]),
          "arpo.py": (["rl"], []), "evaluate.py": (["play"], []),
          "qa_eval.py": (["play", "questions"], [])}
LONGER = {"--epochs", "--steps"}  # a study's RL counts updates; cycles after the first are ours


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({
    command for _, cell in rows_of_paper_md() for command in commands_in(cell, ["3b"])
    if "bash run.sh" in command and "reliability" not in command}))
def test_every_stage_of_a_command_has_the_papers_flags(command):
    """What the papers fix, in each run of each stage, but for trials of the machine."""
    star = "tool-star" in command
    lines = [shlex.split(line) for line in dry(command).splitlines() if ".py --" in line]
    seen = set()
    for words in (words for words in lines if "preflight" not in " ".join(words)):
        name, given = script(words)[0], arguments(words)
        for table in STAGES.get(name, ([], []))[star]:
            for flag, value in FLAGS[table]["values"].items():
                if flag in given or flag not in LONGER:
                    assert (flag, *given.get(flag, [default_text(name, flag)])) == (flag, value)
                    seen.add(name)
    assert seen >= {"sft.py"}


def default_text(name, flag):
    """A flag's default, as a command would say it."""
    value = default(name, flag)
    return f"{value:.0f}" if value == int(value) else f"{value}"


@pytest.mark.parametrize("command", [one for one, axis, size in STUDIES if axis == "scale"])
def test_scale_trains_every_reward_at_every_size_from_its_own_base(command):
    said = dry(command)
    made = set(re.findall(r"out/([0-9.]+b)/axis/runs/grpo-(\w+)-mixed-1000-fail-00-s0/rl ", said))
    rewards = FACTORS["scale"]["--reward"]
    assert made == set(product(SIZES, rewards))
    for size in SIZES:
        assert f"--model {KNOWN['recipes'][size]['base']} --data" in said
    table = shlex.split(said.strip().splitlines()[-1])
    rows = [spec.split("=")[0] for spec in arguments(table)["--runs"]]
    assert set(rows) == set(AXES["scale"]) and "--axis scale" in " ".join(table)


def test_amounts_and_levels_of_the_axis_of_data_are_the_papers_and_levels_are_of_other_tasks():
    lines = [shlex.split(line) for line in dry("bash run.sh 3b axis data").splitlines()
             if line.startswith("python synth.py")]
    given = {arguments(words)["--out"][0]: arguments(words) for words in lines}
    amounts = list(map(int, given["data/full/subsets"]["--sizes"]))
    assert amounts == TABLES["amounts"]["rows"]["mixed"]
    for level, mix in ("easy", "1 0 0"), ("medium", "0 1 0"), ("hard", "0 0 1"):
        n = f"{number('amounts/alone/number'):.0f}"
        drawn = given[f"data/full/subsets/{level}-{n}.jsonl"]
        assert [drawn["--n"], drawn["--levels"]] == [[n], mix.split()]
        words = next(words for words in lines if drawn["--out"][0] in words)
        assert synth.flags(words[2:]).levels == list(map(int, mix.split()))
        assert "data/full/pool.jsonl" in drawn["--exclude"]
    assert given["data/full/subsets"]["--tasks"] == ["data/full/pool.jsonl"]


def test_the_failures_of_the_axis_of_noise_are_those_that_the_paper_names():
    assert FACTORS["noise"]["--failure-rate"] == [0, *(
        share / 100 for share in TABLES["noise"]["rows"]["failing"])]


@pytest.mark.parametrize("command", sorted({
    command for _, cell in rows_of_paper_md() for command in commands_in(cell, ["3b"])
    if command.startswith("python ")}))
def test_the_pages_other_commands_have_no_unknown_flag(command):
    words = shlex.split(command)
    name, given = script(words)[0], arguments(words)
    several = name in ("synth.py", "-m toolstar.tir")
    flags = flags_of(name, *given.pop("")[:several])
    assert given.keys() <= flags


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


# tiny's widths stand beside the three sizes, all under GRPO with macro
WIDTHS = {f"width-{width}{end}": f"reward/{row}/{size}"
          for width, size in zip((128, 192, 256), SIZES, strict=True)
          for end, row in (("-sft", "sft"), ("", "macro"))}


def test_results_print_the_papers_numbers_beside_the_same_setting():
    seen = set()
    for section in texts()[ROOT / "docs" / "results.md"].split("\n## ")[1:]:
        for part in section.split("\n### "):
            axis = next(iter(re.findall(r"run\.sh tiny axis (\w+)", part)), None)
            for head, rows in rows_of(part):
                for column in (n for n, cell in enumerate(head) if "paper" in cell):
                    seen.add(axis)
                    assert "1,000 test queries" in head[column]
                    for row in rows:
                        name = row[0].split(",")[0]
                        wanted = [number(WIDTHS[name])] if axis == "scale" else \
                            expected(axis, name)
                        assert numbers(row[column]) == wanted, f"{axis}: {name}"
    assert seen == {"reward", "algorithm", "data", "scale"}


def test_columns_beside_the_papers_numbers_name_their_tasks():
    for head, _ in rows_of(texts()[ROOT / "docs" / "results.md"]):
        if any("paper" in cell for cell in head):
            ours, = (cell for cell in head if "mean (each seed)" in cell)
            assert "400 tiny tasks" in ours
