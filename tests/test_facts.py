"""The tool world's facts and tasks: training has nothing that is held out, and every answer can be
found.
"""
import html
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
from conftest import ROOT, SEED

from runtime import read_jsonl
from sandbox import Episode, parse
from tiny import facts
from toolstar.retriever import BM25

FILES = {"sft": "sft-tasks.jsonl", "rl": "rl.jsonl", "val": "val.jsonl"}


def make(folder, *words):
    facts.main(["world", "--out", str(folder), *words])
    return folder


def contents(folder):
    """{path in the folder: bytes}"""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder made with the default sizes."""
    return make(tmp_path_factory.mktemp("facts"), "--seed", str(SEED))


@pytest.fixture(scope="module")
def tasks(made):
    """{part: tasks}"""
    return {part: read_jsonl(made / file) for part, file in FILES.items()}


@pytest.fixture(scope="module")
def searches(made):
    """{part: its world's BM25}"""
    train, val = (BM25(made / world / "corpus.jsonl") for world in ("train", "val"))
    return {"sft": train, "rl": train, "val": val}


# ---------------------------------------------------------------- files

def test_the_world_that_ships_is_the_held_out_one_of_seed_0_and_small(tmp_path):
    shipped = contents(ROOT / "database" / "tools")
    shipped.pop(Path("questions.jsonl"))  # for a person to play
    assert shipped == contents(make(tmp_path) / "val")
    assert sum(map(len, shipped.values())) < 1_000_000


def test_sft_and_rl_ask_about_different_places(tasks):
    places = {part: {name for task in rows for name, _ in task["asks"]}
              for part, rows in tasks.items()}
    assert places["sft"].isdisjoint(places["rl"]) and places["rl"]


# ---------------------------------------------------------------- held out

def texts(made, world, *files):
    """All text of a world's folder and of tasks, without URLs."""
    files = [*(made / file for file in files), *(made / world).rglob("*.*")]
    text = "\n".join(file.read_text() for file in files if file.name != "tools.json")
    return re.sub(r"http://\S+?\.html|\"id\": \"[^\"]+\"|utf-8", "", text)


def test_no_number_place_or_person_of_the_held_out_world_occurs_in_training(made):
    both = texts(made, "train", "sft-tasks.jsonl", "rl.jsonl"), texts(made, "val", "val.jsonl")
    people, places = ("|".join(facts.POOLS[pool]) for pool in ("states", "sight nouns"))
    for pattern in (r"\d\d+", rf"[A-Z]\w+ (?:{people})\b", rf"[A-Z]\w+ [A-Z]\w+ (?:{places})\b"):
        train, val = (set(re.findall(pattern, text)) for text in both)
        assert len(train) > 500 and len(val) > 60 and train.isdisjoint(val)


# ---------------------------------------------------------------- solver

def test_a_fact_is_read_with_the_words_from_the_name_of_its_place_on():
    read, url = partial(facts.read_fact, name="Old Park"), "http://x/o.html"
    text = f'"Old Park"\nOld Park rises 12 metres. It is near New Zoo. See {url} for its year.'
    fact = "the height of Old Park"
    assert read(text, attribute="height") == (
        "12", f"{fact}: Old Park rises 12 metres. {fact} is 12")
    assert read(text, attribute="year") == (url, f"the year of Old Park: {text.splitlines()[1]}")
    assert read(text, attribute="keeper") == (None, "")


@cache
def run_python(code):
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    return done.stdout or done.stderr.splitlines()[-1]


class SmallTools:
    """The simplest Search, Python and Browse, for one episode."""
    tools = ("Search", "Python", "Browse")

    def __init__(self, index, pages):
        self.index, self.pages = index, pages

    def call(self, name, arguments):
        if name == "Search":
            hits = self.index.search([arguments["query"]], 2)[0]
            return "\n".join(f"Doc {i} {hit['document']['contents']}"
                             for i, hit in enumerate(hits, 1))
        if name == "Python":
            return run_python(arguments["code"])
        text = (self.pages / arguments["url"].rsplit("/", 1)[1]).read_text()
        return html.unescape(re.sub("<[^>]+>", " ", text))


def play(made, searches, part, task):
    tools = SmallTools(searches[part], made / ("val" if part == "val" else "train") / "pages")
    return facts.play_solution(task, Episode(task, tools, 8, "Use tools."))


@pytest.fixture(scope="module")
def plays(made, tasks, searches):
    """Episodes of the solver on 100 held-out tasks and 100 for SFT, none answered from memory."""
    asked = {part: [task for task in tasks[part] if "by_heart" not in task]
             for part in ("val", "sft")}
    return [play(made, searches, part, task) for part, tasks in asked.items()
            for task in tasks[:100]]


def test_the_solver_answers_every_task_with_the_gold(plays):
    assert [episode.stop for episode in plays] == ["answer"] * 200
    assert [[episode.answer] for episode in plays] == [episode.task["golds"] for episode in plays]


def test_the_solver_calls_the_tools_that_the_task_needs_and_no_others(plays):
    for episode in plays:
        replies = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        called = [parse(reply).name.lower() for reply in replies[:-1]]
        assert {*called, "python"} == {*episode.task["needs"], "python"}
        slips = "slip" in episode.task
        assert called.count("python") == ("python" in episode.task["needs"]) + slips
        assert called.count("search") == len(episode.task["asks"])


def test_what_is_known_by_heart_is_answered_without_a_tool_in_sft_only(tasks, made, searches):
    known = [task for task in tasks["sft"] if "by_heart" in task]
    assert known and not any("by_heart" in task for task in tasks["rl"] + tasks["val"])
    for task in known[:40]:
        episode = play(made, searches, "sft", task)
        replies = [m for m in episode.messages if m["role"] == "assistant"]
        assert len(replies) == 1 and [episode.answer] == task["golds"]
