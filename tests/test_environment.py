"""Worlds of users: the page's examples work, with nothing but copied files, and slips are found."""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import evaluate
import runtime
from adapters.trl import SCHEMAS, TravelEnv, travel_reward
from format_plan import itinerary
from runtime import Mistake, read_jsonl, write_jsonl
from sandbox import Sandbox, parse
from travel.solver import searches, solve, solve_report

PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
FILES = {re.search(r"# (\w+\.py)", text)[1]: text
         for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
COMMANDS = {re.search(r"--env (\w+)", text)[1]: text.splitlines()
            for text in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[::-1]}
MISSING = [name for name in ("gymnasium", "mcp") if not importlib.util.find_spec(name)]
ICE = SimpleNamespace(reset=lambda seed: (0, {}), step=lambda move: (1, 1.0, True, False, {}),
                      close=lambda: None)
SERVER = """
import json, sys
tools = {"tools": [{"name": "price", "description": "A price.", "inputSchema": {}}]}
for asked in map(json.loads, sys.stdin):
    if "id" in asked:
        price = {"lamp": "12"}.get(asked["params"].get("arguments", {}).get("thing"))
        result = tools if price is None else {"content": [{"type": "text", "text": price}]}
        print('{"jsonrpc": "2.0", "method": "notifications/message"}')
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
TASKS = [{"id": str(n), "rooms": ["den"], "cat": "den", "patience": 3, "secret": n}
         for n in range(1, 5)]


@pytest.fixture
def folder(tmp_path):
    """A folder with the example worlds of the page, and tasks of two of them."""
    for name, text in FILES.items():
        text = SERVER if name == "stock_server.py" and "mcp" in MISSING else text
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_jsonl(tmp_path / "tasks.jsonl", TASKS)
    return tmp_path


def opened(path):
    return runtime.open_world(Namespace(env=str(path), max_turns=5))


def call(tool, arguments):
    """A reply that calls a tool. arguments: JSON"""
    return f'<think>.</think><tool_call>{{"name": "{tool}", "arguments": {arguments}}}</tool_call>'


# ---------------------------------------------------------------------------------------- the page

@pytest.mark.parametrize("way, said", {
    "sums": "End with the number.\n--- user\nWhat is 1 + 1?\n---\n|reward right: 0.97",
    "guess": "--- user\nFind my number from 1 to 9.\n---\n|5}: 'too high'|reward reward: 1",
    "lake": "HFFG\nYou are in row 0, column 0.|move {'to': 'left'}: 'row 0, column ",
    "stock": '"name": "price", "description": |price {\'thing\': \'lamp\'}: \'12\'',
    "counter": "--- user\nCount to three.\n---\n|increment {'by': 1}: '1'",
    "cat_world": "none).\n--- user|Look {'room': 101}: 'the cat'|score: {'success': 1.0}"}.items())
def test_each_way_of_the_page_is_short_and_is_checked(way, said, folder, monkeypatch, capsys):
    assert 10 <= len([line for line in FILES[f"{way}.py"].splitlines() if line.strip()]) <= 45
    if "gymnasium" in MISSING:
        monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda *_, **__: ICE))
    monkeypatch.chdir(folder)
    make, check, *_ = COMMANDS[way]
    subprocess.run(make, shell=True, check=True)
    evaluate.main(check.split()[2:])
    shown = capsys.readouterr().out
    assert all(part in shown for part in said.split("|"))


@pytest.mark.slow
def test_the_pages_commands_lead_from_the_world_to_a_page_of_curves(folder):
    """Every command of the page as it stands, in a folder beside the clone, with few steps; SFT and
    GRPO in nothing but the files that README says to copy."""
    more = {"sft.py": "--epochs 0.5", "grpo.py": "--steps 1 --prompts 2 --group 2",
            "evaluate.py": "--limit 9"}
    copies = {"sft.py": ("sft.py", "zero3.py", "runtime.py"),
              "grpo.py": ("grpo.py", "zero3.py", "runtime.py", "sandbox.py")}
    for line in COMMANDS["cat_world"]:
        script = line.split()[1]
        for name in copies.get(script, ()):
            shutil.copy(ROOT / name, folder)
        where, path = (script, "") if script in copies else (
            ROOT / script if script == "evaluate.py" else script, str(ROOT))
        line = line.replace("base=out/cat/base sft=out/cat/sft ", "")  # one engine instead of three
        line = line.replace(f"python {script}", f"{sys.executable} {where}", 1)
        done = subprocess.run(f"{line} {more.get(script, '')}", shell=True, cwd=folder, text=True,
                              capture_output=True, env=os.environ | {"PYTHONPATH": path})
        for name in copies.get(script, ()):
            (folder / name).unlink()
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        if script == "sft.py":
            assert "'failed': 1" in done.stdout, "6: the cat is in the third room, the patience 2"
    page = (folder / "out" / "cat" / "report.html").read_text(encoding="utf-8")
    assert "eval/rl" in page and "rl/rollouts" in page and '"dlogp_mean":[' in page
    assert len(read_jsonl(folder / "out" / "cat" / "eval" / "rl" / "episodes.jsonl")) == 9
    table = (folder / "out" / "cat" / "eval" / "table.md").read_text()
    assert "| success " in table and "| stop: " in table and "cs_micro" not in table


def test_the_pages_class_is_a_world_whose_methods_are_the_tools(folder):
    world = opened(f"{folder / 'guess.py'}:Guess")
    episode = world.episode(world.load_task(TASKS[3]), "0", Namespace(max_turns=5))
    assert world.verdict(episode)[1] == {"success": 0.0, "reward": 0.0}
    for wrong in '{"n": 4}', '"4"', "[]", '{"number": "x"}', '{"number": 4, "self": 4}':
        assert episode.act(parse(call("guess", wrong))).startswith("Error: "), wrong
    episode.step(call("guess", '{"number": 4}'))
    episode.step("<think>.</think><answer>4</answer>")
    plan, score, strict = world.verdict(episode)
    assert (plan, score["success"], strict, world.reward(score, "reward")) == ("4", 1.0, 1.0, 1.0)


WALK = """
import asyncio

class Walk:
    '''One lane of ice; the third step breaks it.'''

    async def reset(self, **row):
        self.done, self.steps, self.loop = False, 0, asyncio.get_running_loop()
        return row.get("seen")

    async def go(self, steps: int):
        '''Go on.

        Args:
            steps: How many.
        '''
        assert asyncio.get_running_loop() is self.loop, "a connection outlives a call"
        self.steps += steps
        self.done = self.steps > 2
        return self.steps

    def odd(self, kind: str):
        '''Return a value of a kind.

        Args:
            kind: Of which kind.
        '''
        return {"none": None, "dict": {"lamp": 1}}[kind]

    async def get_reward(self, answer):
        return answer == "safe" and not self.done
"""


@pytest.fixture
def walk(folder):
    """walk(row) -> (world, episode) of an async class with `done` and get_reward(self, answer)."""
    (folder / "walk.py").write_text(WALK)
    world = opened(f"{folder / 'walk.py'}:Walk")
    return lambda row: (world, world.episode({"id": "0", **row}, "0", Namespace(max_turns=5)))


def go(steps):
    return call("go", f'{{"steps": {steps}}}')


def test_async_methods_are_awaited_in_one_loop_and_the_reward_sees_the_answer(walk):
    for answer, reward in (("safe", 1), ("no", 0)):
        world, episode = walk({"query": "Walk.", "seen": "Ice."})
        assert episode.messages[1]["content"] == "Walk.\nIce."
        assert episode.step(go(1)) == "1" and episode.step(go(1)) == "2"
        episode.step(f"<think>.</think><answer>{answer}</answer>")
        assert world.verdict(episode)[1] == {"success": reward, "reward": reward}


def test_a_lost_game_ends_the_play_and_stays_in_the_loss(walk):
    from grpo import OVERLENGTH

    world, episode = walk({"query": "Walk."})
    assert (episode.step(go(3)), episode.stop, episode.step(go(1))) == ("3", "done", None)
    assert world.verdict(episode)[1]["reward"] == 0 and episode.stop not in OVERLENGTH


def test_a_prompt_of_messages_is_read_whole_or_refused(walk):
    system, user, reply = ({"role": role, "content": role.title()}
                           for role in ("system", "user", "assistant"))
    ours, asked = walk({"prompt": [system, user]})[1].messages
    assert asked["content"] == "User" and ours["content"].startswith("System\n\nThink first")
    assert walk({"prompt": [user], "seen": "Ice."})[1].messages[1]["content"] == "User\nIce."
    for prompt in ([user, reply, user], [system], [user | {"content": [{"text": "Walk."}]}]):
        with pytest.raises(Mistake, match="'prompt'"):
            walk({"prompt": prompt})


def test_a_tool_that_returns_no_text_is_a_slip_of_the_class(walk):
    _, episode = walk({"query": "Walk."})
    for kind in "none", "dict":
        with pytest.raises(TypeError, match=r"odd\(\)"):
            episode.sandbox.call("odd", {"kind": kind})
    with pytest.raises(TypeError, match=r"reset\(\)"):
        walk({"query": "Walk.", "seen": ["Ice.", {}]})  # as gymnasium's reset


def test_arpo_refuses_a_class_that_it_cannot_fork(folder):
    world = opened(f"{folder / 'guess.py'}:Guess")
    episode = world.episode(world.load_task(TASKS[0]), "seed", Namespace(max_turns=5))
    with pytest.raises(Mistake, match="Guess"):
        episode.fork("check")  # as arpo.py's read_inputs does
    with pytest.raises(Mistake, match="careless"):  # it has a solver
        evaluate.player(Namespace(env="guess.py:Guess", seed=0), "careless", "", world, [])


def test_flags_are_read_without_torch_and_folders_that_were_not_copied_are_named(folder):
    for name in ("grpo.py", "runtime.py", "sandbox.py"):
        shutil.copy(ROOT / name, folder)
    for words, status, said in (
            ("--help", 0, "--prompts"), ("--env cat_world.py --promts 4", 2, "--promts"),
            ("--prompts 4", 2, "travel/"), ("--env guess.py:Guess", 2, "adapters/"),
            ("--env there/none.py:Guess", 2, "none.py is not a file"),
            ("--env sandbox.py", 2, "FILE.py:CLASS"), ("--env cat_world.py", 1, "rl.jsonl is not")):
        done = subprocess.run([sys.executable, "grpo.py", *words.split()], cwd=folder, text=True,
                              capture_output=True, env=os.environ | {"PYTHONPATH": ""})
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
        assert done.stderr.count("\n") == (status != 0), "a line; zero3.py, with torch, is not here"


# ------------------------------------------------------------------------------------- TRL

def test_the_solvers_plan_earns_5_in_trls_environment_through_its_tools(trip, mini):
    from transformers.utils import get_json_schema

    task = trip[0]
    env = TravelEnv()
    env.reset(task=task)
    names = [name for name in dir(env) if name[0].isupper()]
    schemas = [get_json_schema(getattr(env, name))["function"] for name in names]
    told = [schema | {"return": {"type": "string"}} for schema in SCHEMAS]  # as our model reads it
    assert schemas == sorted(told, key=lambda schema: schema["name"])
    assert {schema["name"] for schema in schemas} == env.sandbox.tools
    for step in searches(task, solve_report(task, mini).journey):
        said = getattr(env, step.tool)(**step.arguments)
        assert said == Sandbox(mini).call(step.tool, step.arguments) and "Invalid" not in said
    plan = itinerary(solve(task, mini))
    said = [[{"role": "assistant", "content": text}] for text in (plan, "no plan")]
    assert travel_reward(said, [env, env]) == [5.0, 0.0]


# ---------------------------------------------------------------------------------- slips in worlds

@pytest.mark.parametrize("old, new, said", [
    ("right = float(", "right = 1 / 0 * float(", ZeroDivisionError),
    ("return Episode(task,", "return Episode(tasks,", NameError),
    ('return score["success"]', 'return score["sucess"]', KeyError)])
def test_a_slip_in_a_world_is_found_by_check_and_keeps_its_traceback(old, new, said, folder):
    file = folder / f"slip_{said.__name__}.py"  # a name of its own, since modules stay in memory
    file.write_text(FILES["cat_world.py"].replace(old, new), encoding="utf-8")
    with pytest.raises(said) as error:
        evaluate.main(["--env", str(file), "--tasks", str(folder / "tasks.jsonl"), "--check"])
    assert Path(error.traceback[-1].path) == file
