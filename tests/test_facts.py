"""The tool world's facts and tasks: training has nothing that is held out, and every answer can be
found.

    python -m pytest tests/test_facts.py
"""
import html
import http.client
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import read_jsonl
from sandbox import Episode, parse
from tiny import facts
from toolstar.retriever import BM25

SEED = int(os.environ.get("TEST_SEED", "0"))
FILES = {"sft": "sft-tasks.jsonl", "rl": "rl.jsonl", "val": "val.jsonl"}
SMALL = "--worlds", "6", "--places", "40", "--held-out", "120", "--sft", "90", "--rl", "60"
FIRST = "|".join([*facts.POOLS["prefixes"], *facts.POOLS["sight words"]])  # words of a place's name
LAST = "|".join(facts.POOLS["sight nouns"])
CUES = {  # words of a sentence or of a question: what it is about
    "height": "metres|height|high|tall", "visitors": "visitors", "people": "people",
    "keeper": "kept|keeps|keeper|hands", "mayor": "led|who leads|mayor|care",
    "year": "built|since|dates|opened in|year|stood|younger|older"}


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


def world_of(made, part):
    return made / ("val" if part == "val" else "train")


# ---------------------------------------------------------------- files

def test_pages_of_an_earlier_seed_are_not_served(tmp_path):
    make(tmp_path / "a", "--seed", "3", *SMALL)
    again = make(tmp_path / "a", "--seed", "4", *SMALL)
    assert contents(again) == contents(make(tmp_path / "b", "--seed", "4", *SMALL))


def test_the_world_that_ships_is_the_held_out_one_of_seed_0_and_small(root, tmp_path):
    shipped = contents(root / "database" / "tools")
    shipped.pop(Path("questions.jsonl"))  # for a person to play
    assert shipped == contents(make(tmp_path) / "val")
    assert sum(map(len, shipped.values())) < 1_000_000


# ---------------------------------------------------------------- tasks

def test_families_have_their_shares_and_each_the_tools_that_it_needs(tasks):
    for rows in tasks.values():
        counts = Counter(task["family"] for task in rows)
        for family, share in zip(("compute", "lookup", "both", "page", "neither"),
                                 (30, 25, 25, 10, 10), strict=True):
            assert counts[family] == len(rows) * share // 100
        assert {task["family"]: " ".join(task["needs"]) for task in rows} == {
            "compute": "python", "lookup": "search", "both": "search python",
            "page": "search browse", "neither": ""}


def test_ids_and_questions_occur_once(tasks):
    rows = [task for part in tasks.values() for task in part]
    assert len(rows) == 3760
    for key in "id", "query":
        assert len({task[key] for task in rows}) == 3760


def test_sft_and_rl_ask_about_different_places(tasks):
    places = {part: {name for task in rows for name, _ in task["asks"]}
              for part, rows in tasks.items()}
    assert places["sft"].isdisjoint(places["rl"]) and places["rl"]


def test_no_gold_stands_in_a_question_that_needs_a_search(tasks):
    for rows in tasks.values():
        for task in rows:
            if "search" in task["needs"]:
                assert not re.search(rf"\b{task['golds'][0]}\b", task["query"])


def test_a_fifth_of_the_wordings_is_asked_in_the_held_out_world_alone(tasks):
    train = {task["template"] for part in ("sft", "rl") for task in tasks[part]}
    held_out = [task["template"] not in train for task in tasks["val"]]
    assert {template[-1] for template in train} == set("0123")
    assert all(new == task["template"].endswith("4")
               for new, task in zip(held_out, tasks["val"], strict=True))
    assert 0.12 < sum(held_out) / 400 < 0.28


# ---------------------------------------------------------------- held out

def texts(made, world, *files):
    """All text of a world's folder and of tasks, without URLs."""
    files = [*(made / file for file in files), *(made / world).rglob("*.*")]
    text = "\n".join(file.read_text() for file in files if file.name != "tools.json")
    return re.sub(r"http://\S+?\.html|\"id\": \"[^\"]+\"|utf-8", "", text)


@pytest.fixture(scope="module")
def both_sides(made):
    return texts(made, "train", "sft-tasks.jsonl", "rl.jsonl"), texts(made, "val", "val.jsonl")


def test_no_number_of_the_held_out_world_occurs_in_training(both_sides):
    train, val = (set(re.findall(r"\d\d+", text)) for text in both_sides)
    assert len(train) > 2000 and len(val) > 500 and train.isdisjoint(val)


def test_no_place_and_no_person_of_the_held_out_world_occurs_in_training(both_sides):
    people = "|".join(facts.POOLS["states"])
    places = "|".join(facts.POOLS["sight nouns"])
    for pattern in rf"[A-Z]\w+ (?:{people})\b", rf"[A-Z]\w+ [A-Z]\w+ (?:{places})\b":
        train, val = (set(re.findall(pattern, text)) for text in both_sides)
        assert len(train) > 500 and len(val) > 60 and train.isdisjoint(val)


def test_every_word_of_the_held_out_world_occurs_in_training(both_sides):
    train, val = (set(re.findall(r"[A-Za-z]+", text)) for text in both_sides)
    assert val <= train and len(train) < 450


def test_the_held_out_names_do_not_depend_on_the_seed(made, tmp_path):
    other = make(tmp_path, "--seed", str(SEED + 1), *SMALL)
    train, val = texts(other, "train"), texts(made, "val", "val.jsonl")
    assert set(re.findall(r"\d\d+", train)).isdisjoint(re.findall(r"\d\d+", val))


# ---------------------------------------------------------------- golds, found without the solver

def sentences(text):
    return re.findall(r"[^.]+(?:\.html[^.]*)?\.", re.sub(r"127\.0\.0\.1", "host", text))


def about(text):
    """The attribute that a sentence or a question names."""
    found = [key for key, cues in CUES.items() if re.search(rf"\b({cues})\b", text, re.I)]
    return found[0] if found else None


def read_all(made, part):
    """{(place, attribute): value} in all passages and pages."""
    known = {}
    for passage in read_jsonl(world_of(made, part) / "corpus.jsonl"):
        title, text = passage["contents"].split("\n")
        for sentence in sentences(text):
            said = sentence.replace(title.strip('"'), "It")
            value = re.search(r"\b\d+\b|\b(?!It\b)[A-Z]\w+ [A-Z]\w+", said)
            if value and "host" not in said and about(said):
                known[title.strip('"'), about(said)] = value[0]
    for path in (world_of(made, part) / "pages").iterdir():
        name = path.stem.replace("-", " ")
        for sentence in re.findall("<p>(.*)</p>", path.read_text()):
            if sentence.startswith(name) and about(sentence):
                said = sentence.removeprefix(name)
                value = re.search(r"\b\d+\b|\b[A-Z]\w+ [A-Z]\w+", said)[0]
                assert known.setdefault((name, about(sentence)), value) == value
    return known


def worked_out(task, known):
    """The answer to a question, from its words and {(place, attribute): value}."""
    query, kind = task["query"], task["template"].split()[1]
    numbers = [int(number) for number in re.findall(r"\d+", query)]
    if task["family"] == "compute":
        a, b, c, d = (*numbers, 0)[:4]
        return {"boxes": a * b + c, "prices": a * b + c * d, "stock": a - b + c,
                "rows": (a + b) * c, "rest": abs(a - b) * c}[kind]
    if task["family"] == "neither" and numbers:
        return max(numbers) if "larger" in query else min(numbers)
    names = re.findall(rf"\b(?:{FIRST}) [A-Z]\w+(?: (?:{LAST}))?", query)
    if task["family"] == "neither":
        return names[0].split()[0 if re.search("first|start", query) else -1]
    values = [known[name, about(query)] for name in names]
    if task["family"] != "both":
        value, = values
        return value
    a, b = sorted(map(int, values))
    if re.search("sum|together|added|^Add", query):
        return a + b
    return b // a if re.search("times|Divide", query) and b % a == 0 else b - a


@pytest.mark.parametrize("part", FILES)
def test_every_gold_can_be_worked_out_from_the_corpus_and_the_question(made, tasks, part):
    known = read_all(made, part)
    for task in tasks[part]:
        assert task["golds"] == [str(worked_out(task, known))], task


@pytest.mark.parametrize("part", FILES)
def test_search_shows_the_passage_that_is_needed_among_its_two(tasks, searches, part):
    asked = [name for task in tasks[part] for name, _ in task["asks"]]
    shown = [[hit["document"]["contents"].split("\n")[0].strip('"') for hit in hits]
             for hits in searches[part].search(asked, 2)]
    found = [name in titles for name, titles in zip(asked, shown, strict=True)]
    first = [name == titles[0] for name, titles in zip(asked, shown, strict=True)]
    rates = [sum(hits) / len(asked) for hits in (found, first)]
    print(f"{part}: of {len(asked)} searches {rates[0]:.2%} show it, {rates[1]:.2%} first")
    assert rates[0] >= 0.99


# ---------------------------------------------------------------- solver

@cache
def run_python(code):
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True,
                          timeout=60)
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
    tools = SmallTools(searches[part], world_of(made, part) / "pages")
    return facts.play_solution(task, Episode(task, tools, 8, "Use tools."))


@pytest.fixture(scope="module")
def plays(made, tasks, searches):
    """Episodes of the solver on 200 held-out tasks and 200 for SFT, none answered from memory."""
    asked = {part: [task for task in tasks[part] if "by_heart" not in task]
             for part in ("val", "sft")}
    return [play(made, searches, part, task) for part, tasks in asked.items()
            for task in tasks[:200]]


def test_the_solver_answers_every_task_with_the_gold(plays):
    assert [episode.stop for episode in plays] == ["answer"] * 400
    assert [[episode.answer] for episode in plays] == [episode.task["golds"] for episode in plays]


def test_the_solver_calls_the_tools_that_the_task_needs_and_no_others(plays):
    for episode in plays:
        replies = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        called = [parse(reply).name.lower() for reply in replies[:-1]]
        assert {*called, "python"} == {*episode.task["needs"], "python"}
        slips = "slip" in episode.task
        assert called.count("python") == ("python" in episode.task["needs"]) + slips
        assert called.count("search") == len(episode.task["asks"])


def test_every_number_and_name_that_the_solver_says_has_been_shown_to_it(plays):
    for episode in plays:
        seen = ""
        for message in episode.messages[1:]:
            if message["role"] == "assistant":
                for thing in re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", message["content"]):
                    assert thing in seen
            seen += message["content"]


def test_a_third_is_known_by_heart_and_answered_without_a_tool(tasks, made, searches):
    known = [task for task in tasks["sft"] if "by_heart" in task]
    needy = [task for task in tasks["sft"] if task["needs"]]
    assert abs(len(known) / len(needy) - 0.35) < 0.04 and all(task["needs"] for task in known)
    assert not any("by_heart" in task for task in tasks["rl"] + tasks["val"])
    for task in known[:40]:
        episode = play(made, searches, "sft", task)
        replies = [m for m in episode.messages if m["role"] == "assistant"]
        assert len(replies) == 1 and [episode.answer] == task["golds"]


def test_one_episode_in_ten_misspells_a_name_and_mends_it(tasks, made, searches):
    slips = [task for task in tasks["sft"] if "slip" in task]
    assert len(slips) == 240 and not any("slip" in task for task in tasks["rl"] + tasks["val"])
    for task in slips[:20]:
        episode = play(made, searches, "sft", task)
        shown = [m["content"] for m in episode.messages if "NameError" in m["content"]]
        assert len(shown) == 1 and episode.answer == task["golds"][0]


@pytest.mark.parametrize("seen", ["", "Error: Current tool Search is not available.",
                                  '"Solar Iron Zoo"', '"Solar Iron Zoo"\nhttp://a/b.html'])
def test_the_solver_says_so_when_a_tool_shows_nothing_of_use(seen):
    task = {"query": "How high is Solar Iron Zoo?", "asks": [["Solar Iron Zoo", "height"]],
            "program": None, "golds": ["12"]}
    tools = SimpleNamespace(tools=("Search", "Browse"), call=lambda name, arguments: seen)
    assert facts.play_solution(task, Episode(task, tools, 8, "")).answer == "unknown"


def test_the_solver_reads_the_place_asked_for_and_not_its_neighbour():
    text = ("Solar Iron Park is 77 metres high. Solar Iron Zoo is kept by Ember Sundal.\n"
            "Solar Iron Zoo stands 31 metres tall.")
    assert facts.find_fact(text, "Solar Iron Zoo", "height") == "31"
    assert facts.find_fact(text, "Solar Iron Zoo", "keeper") == "Ember Sundal"
    assert facts.find_fact(text, "Solar Iron Zoo", "year") is None


# ---------------------------------------------------------------- pages

@pytest.fixture(scope="module")
def server(made):
    with facts.PageServer([made / "train", made / "val"], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path):
    talk = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    talk.request("GET", path)
    answer = talk.getresponse()
    body = answer.read()
    talk.close()
    return answer.status, body


def test_the_server_gives_the_pages_of_all_worlds_byte_for_byte(server, made):
    for world in "train", "val":
        path = next((made / world / "pages").iterdir())
        assert get(server, f"/{path.name}") == (200, path.read_bytes())


@pytest.mark.parametrize("path", ["/", "/index.html", "/../corpus.jsonl", "/..%2fcorpus.jsonl",
                                  "//etc/passwd", "/pages/", "/../../val.jsonl", "*"])
def test_the_server_serves_nothing_but_pages(server, path):
    assert get(server, path) == (404, b"")


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("words, hint", [
    (("world", "--worlds", "1"), "--worlds must be at least 2"),
    (("world", "--worlds", "999"), "there are too few names"),
    (("world", "--worlds", "2", "--places", "5"), "raise --places"),
    (("pages", "--database", "nowhere"), "no pages/")])
def test_bad_input_is_one_line_that_names_the_fix_and_writes_nothing(words, hint, tmp_path):
    out = ("--out", str(tmp_path / "out")) if words[0] == "world" else ()
    with pytest.raises(SystemExit) as stopped:
        facts.main([*words, *out])
    assert hint in str(stopped.value) and "\n" not in str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_importing_it_pulls_in_neither_torch_nor_an_engine(root):
    heavy = "{'torch', 'transformers', 'tokenizers', 'vllm', 'openai'}"
    code = f"import sys, toolstar.tir; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
