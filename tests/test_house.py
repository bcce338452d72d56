"""The floor plan and the style: which file may import which, what may be repeated, what must be
documented."""
import ast
import difflib
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

TOP = sorted(path.name for path in ROOT.glob("*.py")
             if not path.name.startswith("grpo_"))  # variants, made by run.sh
ROOMS = ("travel", "toolstar", "tiny", "look", "recipes", "adapters")
FILES = TOP + sorted(f"{path.parent.name}/{path.name}" for room in ROOMS
                     for path in (ROOT / room).glob("*.py"))
# the program of a model, run inside the jail
MAY_EXECUTE = {("toolstar/cell.py", "play"): {"compile", "exec"}}
# imported inside the functions that use them
HEAVY = ["vllm", "deepspeed", "transformers", "matplotlib", "openai", "fastapi", "uvicorn"]
WITHOUT_TORCH = ("sandbox.py", "runtime.py", "format_plan.py", "evaluate.py", "synth.py",
                 "travel/world.py", "travel/constraints.py", "travel/solver.py",
                 "travel/teacher.py")
# which modules of ours a file may import: those of its own room, and these
EVERYTHING = {path[:-3] for path in TOP} | set(ROOMS)
MAY_IMPORT = {
    "sandbox.py": set(), "runtime.py": set(), "zero3.py": {"runtime"},
    "sft.py": {"runtime", "zero3"}, "dpo.py": {"runtime", "zero3"},
    # look: --microscope
    **dict.fromkeys(("grpo.py", "arpo.py"), {"runtime", "zero3", "look"}),
    "evaluate.py": {"runtime", "sandbox"},
    "format_plan.py": {"runtime", "sandbox", "evaluate"},
    "synth.py": {"runtime", "sandbox", "evaluate", "format_plan", "travel"},
    "qa_eval.py": {"runtime", "sandbox", "evaluate", "toolstar"},
    "travel": {"runtime", "sandbox", "format_plan"},
    "travel/leaderboard.py": {"runtime", "sandbox", "evaluate"},
    "toolstar": {"runtime", "sandbox", "evaluate"},
    "adapters": {"runtime", "sandbox", "travel"},
    "look": EVERYTHING, "tiny": EVERYTHING, "recipes": EVERYTHING}
# the functions that may differ between the twins are ARPO; all others are equal to the letter
ARPO_ADDS = {"entropy", "branch", "unforked"}
ARPO_CHANGES = {"flags", "play_flags", "learn_flags", "Sample", "submit", "rollout", "read_inputs",
                "describe", "sampled"}


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def tree(name):
    return ast.parse(text_of(name), name)


def functions(name):
    """The top-level functions and classes of a file, {name: source}."""
    text, kinds = text_of(name), (ast.FunctionDef, ast.ClassDef)
    return {node.name: ast.get_source_segment(text, node)
            for node in ast.parse(text).body if isinstance(node, kinds)}


def imports(name):
    """The first names of all modules that a file imports."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports by full name, please"
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", ("sft.py", "grpo.py", "arpo.py", "dpo.py"))
def test_torchrun_leaves_the_flags_of_a_stage_alone(name):
    # argparse completes flags, and torchrun looks at those behind the script's name, too
    from torch.distributed.run import get_args_parser

    theirs = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    ours = re.findall(r'add\("(--[a-z-]+)"', (ROOT / name).read_text())
    assert ours and not [flag for flag in ours if any(each.startswith(flag) for each in theirs)]


# ---------------------------------------------------------------------------------------- imports

def module_of(name):
    return name[:-3].replace("/", ".").removesuffix(".__init__")


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_what_the_floor_plan_allows(name):
    room = name.split("/")[0]
    allowed = MAY_IMPORT.get(name, MAY_IMPORT.get(room, set())) | {room, name[:-3]}
    extra = imports(name) & EVERYTHING - allowed
    assert not extra, f"{name} imports {extra}"


def test_imports_point_one_way():
    """No file imports one that imports it, however far away; those inside functions count."""
    files = {module_of(name): name for name in FILES}
    needs = {}
    for module, name in files.items():
        found = set()
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        needs[module] = found & files.keys() - {module}
    assert needs["zero3"] == {"runtime"} and not needs["runtime"] | needs["sandbox"]
    TopologicalSorter(needs).prepare()  # raises CycleError, which has the circle


def test_every_file_imports_without_the_engines_and_prints_nothing():
    light = [module_of(name) for name in WITHOUT_TORCH]
    others = [module_of(name) for name in FILES if name not in WITHOUT_TORCH
              and name != "toolstar/cell.py" and not name.endswith("__main__.py")]
    code = f"""if True:
        import importlib, sys
        for name in {light + others}:
            importlib.import_module(name)
            heavy = {HEAVY} + ["torch"] * (name in {light})
            assert not set(heavy) & set(sys.modules), (name, set(heavy) & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr + " (import these inside the functions that use them)"
    assert done.stdout == ""


# ------------------------------------------------------------------------------------------ style

@pytest.mark.parametrize("name", FILES)
def test_nothing_dangerous_is_called(name):
    exempt = {call for node in tree(name).body if isinstance(node, ast.FunctionDef)
              for call in ast.walk(node) if isinstance(call, ast.Call)
              and ast.unparse(call.func) in MAY_EXECUTE.get((name, node.name), ())}
    assert len(exempt) == sum(map(len, [MAY_EXECUTE[key] for key in MAY_EXECUTE if key[0] == name]))
    exempt = {call.lineno for call in exempt}
    for node in ast.walk(tree(name)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if called and node.lineno not in exempt:
            assert node.func.id not in ("eval", "exec", "compile", "__import__"), where
        if isinstance(node, ast.keyword):
            assert node.arg not in ("trust_remote_code", "allow_pickle", "shell"), where
        assert not isinstance(node, ast.Global), where
    assert not imports(name) & {"pickle", "dill", "marshal", "shelve", "requests", "pandas"}, name


# ------------------------------------------------------------------------------------------ twins

def test_the_stages_with_a_cosine_have_the_same():
    one, other = (functions(name)["learning_rate"] for name in ("sft.py", "dpo.py"))
    assert one == other


def test_arpo_is_grpo_plus_forking():
    grpo, arpo = functions("grpo.py"), functions("arpo.py")
    assert arpo.keys() - grpo.keys() == ARPO_ADDS and grpo.keys() <= arpo.keys()
    for name in sorted(grpo.keys() - ARPO_CHANGES):
        assert grpo[name] == arpo[name]
    assert [name for name in arpo if name in grpo] == list(grpo), "the same functions in order"


def test_arpo_is_a_small_diff():
    grpo, arpo = text_of("grpo.py").splitlines(), text_of("arpo.py").splitlines()
    diff = list(difflib.unified_diff(grpo, arpo, n=0))[2:]
    assert sum(line[0] in "+-" for line in diff) <= 90
