"""The report is one file that loads nothing, and shows exactly what happened."""
import base64
import gzip
import json
import math
import os
import re
import select
import shutil
import subprocess
import time
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest

from look import report
from runtime import read_jsonl, write_jsonl
from sandbox import Episode, Sandbox
from travel.constraints import judge, reward
from travel.solver import solve

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
CALL = ('<think>look around</think>\n<tool_call>{"name": "SearchCity", "arguments": '
        '{"state": "Nowhere"}}</tool_call>')
HOSTILE = ["</script><script>document.title = 'owned'</script>",
           "<img src=x onerror=\"document.title = 'owned'\">", "<!--<script>", "\u2028\u2029",
           "a\x00b", "\ud800 alone \udfff", "&lt;b&gt;", "${7 * 7}"]


# ---------------------------------------------------------------------------------------- records


def trip(database):
    """(task, plan): the first three-day trip that the solver finds."""
    asked = dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))
    for org in database.cities:
        for dest in database.cities:
            task = {"query": "?", "org": org, "dest": dest, "days": 3, "visiting_city_number": 1,
                    "date": ["2022-03-10", "2022-03-11", "2022-03-12"], "people_number": 2,
                    "budget": 99999, "level": "easy", "local_constraint": asked}
            if org != dest and (plan := solve(task, database)):
                return task, plan
    raise AssertionError("the small world has no trip")


def played(task, plan, database, last=None, **more):
    """A record: one call, then the plan as an answer, or another last reply."""
    episode = Episode(task, Sandbox(database), system_prompt="Plan trips.")
    episode.step(CALL)
    episode.step(last or f"<think>done</think>\n<answer>{json.dumps(plan)}</answer>")
    found, verdict = judge(task, episode.answer, database)
    assert (found is None) == bool(last or not plan)
    strict = verdict.pop("strict")
    return episode.record("m") | {"plan": found, "score": verdict, "strict": strict,
                                  "reward": reward(verdict, "sum")} | more


@pytest.fixture(scope="module")
def run(tmp_path_factory, mini):
    """Two evaluations of six tasks, two updates of rollouts, two tasks thrice; logs of RL, SFT."""
    folder, (task, plan) = tmp_path_factory.mktemp("run"), trip(mini)
    tasks = [task | {"id": f"t{i}", "level": ("easy", "medium", "hard")[i % 3],
                     "query": f"Trip number {i}, please."} for i in range(6)]
    absent = json.loads(json.dumps(plan))
    absent[1]["dinner"] = f"Nowhere Diner, {absent[1]['current_city']}"
    after = [played(task, plan, mini, tokens=100 + i) for i, task in enumerate(tasks)]
    after[1] = played(tasks[1], absent, mini, tokens=101)
    after[2] = played(tasks[2] | {"budget": 1}, plan, mini, tokens=102)
    after[3] = played(tasks[3], None, mini, "no format", tokens=103)
    before = [played(task, None, mini, "no format") for task in tasks]
    write_jsonl(folder / "eval" / "before" / "episodes.jsonl", before)
    write_jsonl(folder / "eval" / "after" / "episodes.jsonl", after)
    (folder / "eval" / "after" / "settings.json").write_text('{"temperature": 0.6}')
    for step in (1, 2):
        rows = [played(tasks[i] | {"id": f"r{i}"}, plan if k else None, mini, advantage=k - 1.0)
                for i in (0, 1) for k in range(3)]
        write_jsonl(folder / "rl" / "rollouts" / f"{step:05d}.jsonl", rows)
    log = [{"step": i, "success": i / 9, "reward": float(i), "entropy": 1 / i, "format": 0.1,
            "overlength": 0.0, "dlogp_mean": 1e-6, "dlogp_max": 1e-5, "reward_name": "sum"}
           for i in range(1, 9)]
    log += [log[6] | {"reward": 70.0}, log[7] | {"entropy": float("nan")}]
    log += [{"step": 8, "val_success": 0.5}]  # a line of its own, as the stages write it
    write_jsonl(folder / "rl" / "log.jsonl", log)
    with open(folder / "rl" / "log.jsonl", "a") as file:
        file.write('{"step": 9, "rew')  # it is being written
    steps = [{"step": i, "loss": 2 / i, "entropy": 1.0, "gnorm": 3.0} for i in range(1, 60)]
    write_jsonl(folder / "sft" / "log.jsonl", steps)
    report.main([str(folder)])
    return folder


def contents(page):
    """(index, [record]) of a page, decoded as in a browser."""
    text = page.read_text(encoding="utf-8")
    index = re.search(r'<script type="application/json" id="index">(.*?)</script>', text, re.S)[1]
    packed = re.findall(r'<script type="text/plain" id="e(\d+)">(.*?)</script>', text)
    index = json.loads(index)
    assert [int(number) for number, _ in packed] == list(range(len(index["episodes"])))
    return index, [json.loads(gzip.decompress(base64.b64decode(data))) for _, data in packed]


def page_of(folder, *words, out=None):
    """(index, [record]) of a folder."""
    report.main([str(folder), "--out", str(out or folder), *words])
    return contents((out or folder) / "report.html")


def source(index, name):
    """The numbers of a folder in the page's tables."""
    return next(source for source in index["sources"] if source["name"] == name)


# ------------------------------------------------------------------------------ what is in a page


def test_the_page_holds_every_episode_whole(run):
    index, records = contents(run / "report.html")
    names = [source["name"] for source in index["sources"]]
    assert sorted(names) == ["eval/after", "eval/before", "rl/rollouts"]
    assert index["total"] == len(records) == 24
    shown = [record for entry, record in zip(index["episodes"], records, strict=True)
             if names[entry["source"]] == "eval/after"]
    assert shown == read_jsonl(run / "eval" / "after" / "episodes.jsonl")
    assert len({entry["key"] for entry in index["episodes"]}) == 24


def test_the_standings_are_those_of_the_table(run):
    index, _ = contents(run / "report.html")
    after = source(index, "eval/after")
    assert (after["episodes"], after["success"], after["temperature"]) == (6, 0.5, 0.6)
    assert after["levels"] == {"easy": 0.5, "medium": 0.5, "hard": 0.5}
    assert index["levels"] == ["easy", "medium", "hard"] and index["stops"] == ["answer", "format"]
    # the one without a plan was not judged, nor did the one with the invented diner get so far
    assert after["checks"]["is_valid_information_in_sandbox"] == [1, 5]
    assert after["checks"]["valid_cost"] == [1, 4]
    assert after["stops"] == {"answer": 5 / 6, "format": 1 / 6} and after["tokens"] == 102.5
    assert after["official"] == after["strict"] == 0.5
    assert source(index, "rl/rollouts")["pass"] == {}, "the plays of a group are no evaluation"
    low, high = after["interval"]
    assert 0 <= low < 0.5 < high <= 1


def test_a_log_is_read_as_a_resumed_and_unfinished_run_left_it(run):
    index, _ = contents(run / "report.html")
    rl = next(log["columns"] for log in index["logs"] if log["name"] == "rl")
    assert rl["step"] == list(range(1, 9)) and rl["reward"][6] == 70
    assert rl["val_success"] == [None] * 7 + [0.5]
    assert rl["entropy"][7] is None and "reward_name" not in rl


def test_samples_are_told_apart_and_give_pass_at_k(run, tmp_path):
    rows = read_jsonl(run / "eval" / "after" / "episodes.jsonl")[:2]
    again = [row | {"task": row["task"] | {"sample": 1}} for row in rows]
    write_jsonl(tmp_path / "m" / "episodes.jsonl", rows + again)
    write_jsonl(tmp_path / "empty" / "episodes.jsonl", [])
    index, _ = page_of(tmp_path)
    assert [entry["key"] for entry in index["episodes"]] == ["m/t0", "m/t1", "m/t0 #2", "m/t1 #2"]
    assert source(index, "m")["pass"] == {"pass@1": 0.5, "pass@2": 0.5}
    assert source(index, "empty")["pass"] == {}


def test_a_play_that_stands_twice_in_a_file_is_shown_once(run, tmp_path):
    rows = read_jsonl(run / "eval" / "after" / "episodes.jsonl")[:2]
    write_jsonl(tmp_path / "m" / "episodes.jsonl", [*rows, rows[0] | {"answer": "a later one"}])
    index, _ = page_of(tmp_path)
    assert [entry["key"] for entry in index["episodes"]] == ["m/t0", "m/t1"]


@pytest.mark.parametrize("part, episodes, logs", [
    ("rl", 12, 1), ("rl/rollouts", 12, 0), ("sft", 0, 1), ("eval", 12, 0), ("eval/after", 6, 0)])
def test_any_folder_of_ours_makes_a_page(run, tmp_path, part, episodes, logs):
    index, records = page_of(run / part, out=tmp_path / part)
    assert (len(records), len(index["logs"])) == (episodes, logs)
    names = [one["name"] for one in index["sources"] + index["logs"]]
    assert part.split("/")[-1] in names or part == "eval"


@pytest.mark.parametrize("limit, evaluated, trained", [(20, 12, 6), (14, 12, 0), (6, 6, 0)])
def test_of_too_many_episodes_whole_tasks_are_chosen_and_evaluations_first(
        run, tmp_path, limit, evaluated, trained):
    index, _ = page_of(run, "--episodes", str(limit), out=tmp_path)
    names = [index["sources"][entry["source"]]["name"] for entry in index["episodes"]]
    assert names.count("rl/rollouts") == trained and len(names) == evaluated + trained
    assert names.count("eval/after") == names.count("eval/before") and index["total"] == 24
    assert source(index, "eval/after")["episodes"] == 6, "the tables are of all episodes"


def test_rollouts_are_chosen_from_all_of_the_training(run, tmp_path):
    index, _ = page_of(run / "rl", "--episodes", "6", out=tmp_path)
    assert {entry["step"] for entry in index["episodes"]} == {"00001", "00002"}


def test_a_running_job_is_read_and_left_alone(run, tmp_path):
    """A file that another process appends to is never cut, whatever is asked for."""
    text = (run / "eval" / "after" / "episodes.jsonl").read_text()
    file = tmp_path / "eval" / "rl" / "episodes.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(text + text[:99])
    assert len(page_of(tmp_path)[1]) == 6
    assert file.read_text() == text + text[:99]


class Calculator:
    """Another world's sandbox."""

    tools = ("Add",)

    def call(self, name, arguments):
        return str(sum(arguments.values()))


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """A page of two episodes of a world with numbers instead of checks, and levels for only one."""
    folder, rows = tmp_path_factory.mktemp("calculator"), []
    tasks = {"id": 7, "level": 2, "query": "1 + 1?"}, {"query": "?" * 9999}
    for task, right in zip(tasks, (1.0, 0.0), strict=True):
        episode = Episode(task, Calculator())
        episode.step('<think>.</think><tool_call>{"name": "Add", "arguments": {"a": 1, "b": 1}}'
                     "</tool_call>")
        episode.step("<think>.</think><answer>2</answer>")
        verdict = {"digits": 0.25, "success": right}
        rows.append(episode.record("m") | {"plan": "2", "score": verdict, "reward": right,
                                           "strict": right, "tokens": None})
    write_jsonl(folder / "sums" / "episodes.jsonl", rows)
    report.main([str(folder)])
    return folder


def test_another_worlds_episodes_make_a_page(calculator):
    index, records = contents(calculator / "report.html")
    assert index["checks"] == [] and index["levels"] == ["2"]
    assert index["tasks"] == [["7", "2", "1 + 1?"], ["?", None, "?" * 1000]]
    assert [entry["key"] for entry in index["episodes"]] == ["sums/7", "sums/?"]
    assert source(index, "sums")["success"] == 0.5 and source(index, "sums")["official"] is None
    assert records[0]["score"] == {"digits": 0.25, "success": 1.0}


def test_the_page_asks_for_nothing(run, root):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and not re.search(r"https?://", page)
    code = (root / "look" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\bsrc=|url\(|@import"
                         r"|\bfetch\b|\beval\b|import\(", code)
    assert all(len(line) <= 120 and line == line.rstrip() for line in code.splitlines())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, mini):
    """A page of one episode in which all text of models and files is hostile."""
    folder, (task, plan) = tmp_path_factory.mktemp("hostile"), trip(mini)
    said = "\n".join(HOSTILE)
    row = played(task | {"id": said, "query": said, "level": HOSTILE[0]}, plan, mini)
    row["messages"] += [
        {"role": "assistant", "content": f"<think>{said}</think>{said}<answer>{said}"},
        {"role": "user", "content": "y" * 1_000_000},
        {"role": "assistant", "content": "<think>" * 100_000},
        {"role": "assistant", "content": "<think></think>" * 9999}]
    row["plan"][0]["dinner"], row["plan"][1]["lunch"] = said, ["no", {"text": 1e999}]
    row["score"]["checks"]["is_not_absent"] = [False, f"day 1: dinner: {said}"]
    path = folder / "<b>eval" / "episodes.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(row) + "\n" + json.dumps(row)[:99], encoding="ascii")
    report.main([str(folder)])
    return folder


def test_hostile_text_is_inert_in_the_file(hostile):
    page = (hostile / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 3
    index, (record,) = contents(hostile / "report.html")
    assert index["tasks"][0][0] == "\n".join(HOSTILE)
    assert record["messages"][-3]["content"] == "y" * 1_000_000
    assert record["plan"][1]["lunch"] == ["no", {"text": None}]


def token_play(name, said, parent="", shared=0, reward=0.0, advantage=0.0, learnt=True):
    """A line of --microscope: three tokens of the world, those of a reply, one observation, one."""
    n = len(said) + 1
    row = {"name": name, "query": 0, "parent": parent, "shared": shared, "reward": reward,
           "advantage": advantage, "tokens": ["p", "q", "r", *said, "<obs>", "end"],
           "mask": [0, 0, 0] + [1] * len(said) + [0, 1], "engine": [-0.5] * n, "clip": [0.8, 1.28]}
    if learnt:
        row |= {"trainer": [-0.25] * n, "w": [1.5] + [1.0] * (n - 1), "side": [1] + [0] * (n - 1),
                "gain": [advantage] * n, "entropy": [0.125] * n}
    return row


@pytest.fixture(scope="module")
def lens(tmp_path_factory, mini):
    """A page with three plays of a query token by token, a pair, and an episode with tools."""
    folder, (task, plan) = tmp_path_factory.mktemp("lens"), trip(mini)
    said, task = "\n".join(HOSTILE), task | {"id": "t"}
    plays = [token_play("play/0/0/0", ["go", " on\n"], reward=1.0, advantage=1.5),
             token_play("play/0/0/1", HOSTILE, parent="play/0/0/0", shared=5, advantage=-0.5),
             token_play("play/0/0/2", ["x"], learnt=False)]
    for play in plays:
        play["group"] = [{key: row[key] for key in ("name", "parent", "shared", "reward",
                                                    "advantage")}
                         | {"length": len(row["mask"]), "prompt": 3, "stop": "answer"}
                         for row in plays]
    write_jsonl(folder / "rl" / "rollouts" / "00002.jsonl",
                [played(task, plan, mini, advantage=play["advantage"]) for play in plays])
    write_jsonl(folder / "rl" / "microscope" / "00002.jsonl", plays)
    prompt = [{"role": "system", "content": "Ask."}, {"role": "user", "content": said}]
    sides = [[{"role": "assistant", "content": CALL}, {"role": "user", "content": said},
              {"role": "assistant", "content": f"<answer>{end}</answer>"}] for end in ("1", said)]
    write_jsonl(folder / "dpo" / "pairs" / "train.jsonl", [
        {"task": {"id": "q", "query": said}, "prompt": prompt, "chosen": sides[0],
         "rejected": sides[1], "rewards": [1.0, 0.25], "calls": [1, 1], "stops": ["answer"] * 2},
        {"prompt": prompt, "chosen": sides[0], "rejected": "none"}])
    call = {"name": "Python", "arguments": {"code": said}, "status": "timeout", "seconds": 10.25,
            "cached": False, "repeated": True}
    messages = [{"role": "user", "content": "?"},
                {"role": "assistant", "content": "<search>a tower</search>"},
                {"role": "result", "content": " <result>\nDoc 1\n</result>"},
                {"role": "assistant", "content": f"<think>.</think><python>{said}</python>"},
                {"role": "result", "content": f" <result>\n{said}\n</result>"},
                {"role": "assistant", "content": "<answer>2</answer>"}]
    write_jsonl(folder / "tools" / "episodes.jsonl", [{
        "task": {"id": "w", "query": "?"}, "messages": messages, "stop": "answer", "turns": 3,
        "tools": [{"name": "Search", "arguments": {"query": "a tower"}, "status": "ok",
                   "seconds": 0.5, "cached": True}, call],
        "helped": [{"helper": "debugger", "turn": 2, "before": said, "tokens": 41}, said]}])
    report.main([str(folder)])
    return folder


def test_pairs_count_in_no_table(lens):
    index, _ = contents(lens / "report.html")
    assert source(index, "dpo/pairs")["pairs"] and not source(index, "tools")["pairs"]
    assert [entry["key"] for entry in index["episodes"] if entry["pair"]] == [
        "dpo/pairs/train/q", "dpo/pairs/train/?"]


# ---------------------------------------------------------------------------------- in a browser


class Browser:
    """A headless Chromium, controlled through two pipes; all tests share it."""

    def __init__(self, profile):
        self.answers, theirs = os.pipe()
        ours, self.orders = os.pipe()
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--window-size=1400,1000", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ours} 4>&{theirs}', "bash", *words],
            pass_fds=(ours, theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours)
        os.close(theirs)
        self.number, self.buffer, self.events, self.session = 0, b"", [], {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        self.number += 1
        order = {"id": self.number, "method": method, "params": parameters} | self.session
        os.write(self.orders, json.dumps(order).encode() + b"\0")
        return self.until(lambda message: message.get("id") == self.number)["result"]

    def until(self, wanted, seconds=600):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while b"\0" in self.buffer:
                line, self.buffer = self.buffer.split(b"\0", 1)
                message = json.loads(line)
                self.events.append(message)
                if wanted(message):
                    return message
            if select.select([self.answers], [], [], 1)[0]:
                self.buffer += os.read(self.answers, 1 << 20)
            assert self.process.poll() is None, "Chromium has ended"
        raise AssertionError("Chromium does not answer")

    def open(self, page, **state):
        """Open a page with this state in its address, and wait until it is drawn."""
        self.ask("Page.navigate", url="about:blank")
        self.events.clear()
        self.ask("Page.navigate", url=f"{page.as_uri()}#{urlencode(state)}")
        self.until(lambda message: message.get("method") == "Page.loadEventFired")
        if "ep" in state:
            self.wait("document.querySelector('#view h3')")

    def js(self, expression):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True,
                         awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression):
        for _ in range(600):
            if self.js(f"Boolean({expression})"):
                return
            time.sleep(0.1)
        raise AssertionError(f"never came true: {expression}")

    def count(self, selector):
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def texts(self, selector):
        nodes = f"document.querySelectorAll({json.dumps(selector)})"
        return self.js(f"[...{nodes}].map(node => node.textContent)")

    def press(self, key):
        """Press and release a key."""
        code = {"ArrowDown": 40, "ArrowUp": 38, "Escape": 27}.get(key, ord(key[0].upper()))
        typed = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                     **typed if kind == "keyDown" else {})

    def keys(self):
        return self.js("[...document.querySelectorAll('#list a')].map(node => node.dataset.key)")

    def complaints(self):
        """Console messages, uncaught errors and requests other than for the page itself."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        seen = [event for event in self.events if event.get("method") in kinds]
        asked = [event["params"]["request"]["url"] for event in self.events
                 if event.get("method") == "Network.requestWillBeSent"]
        page = r"file:.*/report\.html(#.*)?|about:blank"
        return seen + [url for url in asked if not re.fullmatch(page, url)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        missing = "no chromium here; apt-get install chromium"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    os.write(browser.orders, b'{"id": 0, "method": "Browser.close"}\0')
    browser.process.wait(60)


def test_an_error_of_a_page_would_be_seen(browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<img src=nothing.png><script>console.error('so'); boom()</script>")
    browser.open(page)
    assert len(browser.complaints()) >= 3


def test_curves_scores_and_failures_are_drawn(browser, run):
    browser.open(run / "report.html")
    assert browser.complaints() == []
    assert browser.texts("figcaption") == [
        "loss per policy token", "entropy, nats", "gradient norm", "success", "reward",
        "format errors and overlength", "entropy, nats", "|Δ logp|, engine to trainer",
        "success by level, per cent"]
    assert browser.texts("figure .legend")[2] == "gnorm3thick: running mean of 5"
    assert browser.count("figure path:not(.noisy)") == 3 + 2 + 1 + 2 + 1 + 2
    assert browser.texts("figure rect title")[:3] == [
        "eval/before: 0.0", "eval/after: 50.0", "eval/before: 0.0"]
    assert browser.count("figure path.noisy") == 3, "only SFT has enough steps to be smoothed"
    assert browser.js("document.querySelector('figure circle').getAttribute('cx') > 0")
    assert "success0.889val_success0.5" in browser.texts("figure .legend")[3]
    after = next(row for row in browser.texts("#means tr") if row.startswith("eval/after"))
    assert "50.0" in after and "83.3" in after and "0.6" in after
    cost = next(row for row in browser.texts("#bars tr") if row.startswith("valid_cost"))
    assert "25.0" in cost
    assert browser.js("document.title") == str(run)


AFTER, BEFORE = [f"eval/after/t{i}" for i in range(6)], [f"eval/before/t{i}" for i in range(6)]
ROLLOUTS = [f"rl/rollouts/{step}/r{i}{play}" for step in ("00001", "00002") for i in (0, 1)
            for play in ("", " #2", " #3")]


@pytest.mark.parametrize("state, keys", [
    ({"view": "episodes"}, AFTER + BEFORE + ROLLOUTS),
    ({"source": "eval/after"}, AFTER),
    ({"source": "eval/before", "level": "hard"}, [BEFORE[2], BEFORE[5]]),
    ({"outcome": "success", "source": "eval/after"}, [AFTER[0], AFTER[4], AFTER[5]]),
    ({"outcome": "fail", "source": "rl/rollouts"}, [key for key in ROLLOUTS if "#" not in key]),
    ({"check": "is_valid_information_in_sandbox"}, [AFTER[1]]),
    ({"check": "valid_cost"}, [AFTER[2]]),
    ({"stop": "format"}, [AFTER[3], *BEFORE]),
    ({"q": "NUMBER 4"}, [AFTER[4], BEFORE[4]]),
    ({"q": "r1", "level": "medium"}, [key for key in ROLLOUTS if "/r1" in key]),
    ({"q": "nothing says this"}, []),
    ({"q": "ROLLOUTS/00002/R1"}, [key for key in ROLLOUTS if "00002/r1" in key]),
    ({"q": "nowhere diner"}, [AFTER[1]]),  # of a dialogue
    ({"q": "plan trips"}, []),  # of the system prompt, which all have
], ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "")
def test_filters_show_exactly_those(browser, run, state, keys):
    browser.open(run / "report.html", **state)
    browser.wait("search.done")
    assert sorted(browser.keys()) == sorted(keys)
    assert browser.texts("#shown")[0].startswith(f"{len(keys)} of 24 episodes")
    assert browser.complaints() == []


def test_choosing_typing_and_walking_end_up_in_the_address(browser, run):
    browser.open(run / "report.html", view="episodes")
    for name, value, event in (("level", "hard", "onchange"), ("q", "t", "oninput")):
        browser.js(f"(() => {{ const node = document.getElementById('{name}'); "
                   f"node.value = '{value}'; node.{event}({{target: node}}); }})()")
    assert len(browser.keys()) == 4 and "level=hard&q=t" in browser.js("location.hash")
    for key, at in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        browser.press(key)
        assert browser.js("document.querySelector('#list .on').dataset.key") == browser.keys()[at]
    name = json.dumps(browser.keys()[1].split("/")[-1])
    browser.wait(f"document.querySelector('#view h3')?.textContent === {name}")
    assert browser.complaints() == []


def test_an_episode_shows_its_turns_verdicts_and_the_offending_cell(browser, run):
    browser.open(run / "report.html", ep="eval/after/t1")
    assert browser.count("#view details") == 4  # system, query, two turns
    assert browser.count("#view details[open]") == 0
    assert browser.texts("#view summary")[2].startswith("1 SearchCity(state=Nowhere) → ")
    assert browser.texts("#view .text")[2] == "look around"
    city = read_jsonl(run / "eval/after/episodes.jsonl")[1]["plan"][1]["current_city"]
    (cell,) = browser.texts(".days .off")
    assert cell.partition("there is")[0] == f"dinnerNowhere Diner, {city}"
    mark = browser.js("document.querySelector('.off small').dataset.check")
    assert mark == "is_valid_information_in_sandbox"
    place = browser.js("({...document.querySelector('.days .off').dataset})")
    assert place == {"day": "2", "field": "dinner"}
    verdicts = browser.texts("#view .checks > div > div")
    assert "✓is_not_absent" in verdicts and "–valid_cost" in verdicts
    why = "✗is_valid_information_in_sandbox: day 2: dinner: "
    assert any(line.startswith(why) for line in verdicts)
    assert "reward" in browser.texts(".fact")[0] and "official 0" in browser.texts(".fact")[0]
    assert browser.complaints() == []


@pytest.mark.parametrize("reason, place", [
    ("day 2: accommodation: X asks for 3 nights", [2, "accommodation", "X asks for 3 nights"]),
    ("meals: none serves", [0, "meals", "none serves"]),
    ("day 3: no dinner", [3, "dinner", None]),
    ("day 1 has no lunch", [1, "lunch", None]),
    ("current_city: Ely is", [0, "current_city", "Ely is"]),
    ("day 2: lunch repeats 'dinner'", [2, "lunch", None]),
    ("2 of 3 days are filled in", [0, None, None]),
])
def test_a_reason_names_day_and_field(browser, run, reason, place):
    browser.open(run / "report.html", ep="eval/after/t2")
    found = browser.js(f"(() => {{ const [, day, field, rest] = PLACE.exec({json.dumps(reason)}); "
                       "return [+(day ?? 0), field ?? null, rest ?? null]; })()")
    assert found == place


def test_roles_are_shown_on_demand_with_no_invented_number(browser, run):
    browser.open(run / "report.html", ep="eval/after/t1")
    display = "getComputedStyle(document.querySelector('.role')).display"
    assert browser.js(display) == "none"
    browser.js("document.querySelectorAll('#view label input')[1].click()")
    browser.wait("document.querySelector('.ribbon')")
    assert browser.js(display) != "none"
    record = read_jsonl(run / "eval" / "after" / "episodes.jsonl")[1]
    said = {True: 0, False: 0}
    for message in record["messages"]:
        said[message["role"] == "assistant"] += len(message["content"])
    note = browser.texts("#view p.note")[0]
    assert all(f"{characters:,} characters" in note for characters in said.values())
    assert "101 tokens; no count by role" in note
    assert "policy, mask 1" in browser.texts(".policy .role")[0]
    assert "world, mask 0" in browser.texts(".world .role")[0]
    browser.open(run / "report.html", ep="eval/before/t1", roles=1)
    assert "token" not in browser.texts("#view p.note")[0], "the record counts none"


def test_without_a_log_a_page_opens_on_a_failed_play_beside_a_good_one(browser, run, tmp_path):
    page_of(run / "eval", out=tmp_path)
    for width in (1280, 390):
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                    deviceScaleFactor=1, mobile=False)
        browser.open(tmp_path / "report.html")
        browser.wait("document.querySelectorAll('.fact h3').length === 2")
        assert browser.texts(".fact h3") == ["before", "after"]
        assert browser.texts(".fact .tag")[::2] == ["fail", "success"]
        title = browser.js("document.querySelector('[data-check] span').title")
        assert title.startswith("All days and fields are there")
        browser.js("document.querySelector('nav a').click()")
        browser.wait("document.getElementById('episodes').hidden")
    browser.ask("Emulation.clearDeviceMetricsOverride")
    assert browser.complaints() == []


def test_what_is_the_same_for_everyone_is_left_out_and_counted(browser, run):
    browser.open(run / "report.html")
    checks = contents(run / "report.html")[0]["checks"]
    shown = [name for name in browser.texts("#bars th")[1:] if name in checks]
    assert "valid_cost" in shown and "is_valid_attractions" not in shown
    left = f"{len(checks) - len(shown)} checks left out: 0.0 or 100.0 for everyone"
    assert browser.texts("#overview p.note")[-1].startswith(left)


def test_two_plays_of_a_task_stand_side_by_side(browser, run):
    browser.open(run / "report.html", ep="eval/after/t1", vs="eval/before/t1")
    assert browser.texts(".fact h3") == ["eval/after", "eval/before"]
    assert browser.count(".plan") == 2
    assert browser.texts("#vs option")[1:] == ["✗ eval/before/t1"]
    browser.open(run / "report.html", ep="rl/rollouts/00001/r0 #2")
    others = len(browser.texts("#vs option")) - 1
    assert others == 5, "the group's other plays, and the next update's"
    assert "advantage 0" in browser.texts(".fact")[0]


def test_another_worlds_episode_is_shown_without_days_and_checks(browser, calculator):
    browser.open(calculator / "report.html", level="2", ep="sums/7")
    assert browser.keys() == ["sums/7"] and browser.count("#bars") == 0
    assert browser.texts(".plan .text") == ["2"] and browser.count(".plan .day") == 0
    assert browser.texts(".checks .numbers > div") == ["digits 0.25", "success 1"]
    assert browser.texts("#view h2") == ["Score", "Answer", "Dialogue"]
    assert browser.texts("#view summary")[2] == "1 Add(a=1, b=1) → 2"
    assert browser.complaints() == []


def test_hostile_text_stays_text(browser, hostile):
    browser.open(hostile / "report.html")
    assert browser.texts("#means td:first-child, #means th")[-1:] != []
    assert browser.complaints() == []
    key = contents(hostile / "report.html")[0]["episodes"][0]["key"]
    browser.open(hostile / "report.html", ep=key, roles=1, open=1)
    assert browser.complaints() == [] and browser.js("document.title") == str(hostile)
    assert browser.count("img, b b, #view script") == 0
    lone = re.compile("[\ud800-\udfff\ufffd]")  # on their way here they are replaced
    said = [lone.sub("?", part) for part in browser.texts("#view .text")]
    for text in HOSTILE:
        assert any(lone.sub("?", text) in part for part in said), text
    assert "show all 1,000,000 characters" in browser.texts("#view button")
    characters = "document.querySelector('#view').textContent.length"
    assert browser.js(characters) < 300_000
    browser.js("[...document.querySelectorAll('#view button')]"
               ".find(b => b.textContent.includes('1,000,000')).click()")
    assert browser.js(characters) > 1_000_000
    assert browser.texts(".days .off small")[0].startswith("</script>")


def test_a_play_is_shown_token_by_token_with_its_numbers(browser, lens):
    browser.open(lens / "report.html", ep="rl/rollouts/00002/t", tokens=1, at=0)
    assert browser.texts(".token") == ["go", " on⏎\n", "end"]
    assert browser.count(".token.clipped") == 1 and browser.count(".token.up") == 3
    shown = browser.texts(".lens")[0]
    for fact in ("token 3, mask 1", "log p of the engine -0.5", "of the trainer -0.25", "w 1.5",
                 "clipped from above", "advantage 1.5", "entropy 0.125"):
        assert fact in shown, fact
    assert browser.texts(".spoken summary")[0].startswith("world, mask 0 · 3 tokens")
    right = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
    browser.js(f"document.querySelector('.spoken').dispatchEvent({right})")
    assert "token 4, mask 1" in browser.texts(".lens")[0]
    assert "clipped from above" not in browser.texts(".lens")[0]
    assert browser.complaints() == []


def test_forks_are_a_tree_whose_lines_lead_to_the_plays(browser, lens):
    browser.open(lens / "report.html", ep="rl/rollouts/00002/t #2", tokens=1)
    assert [text.split()[0] for text in browser.texts(".tree a")] == ["0", "1", "2"]
    assert browser.texts(".tree .on")[0].startswith("1 ")
    left = "[...document.querySelectorAll('.tree .bar')].map(bar => parseFloat(bar.style.left))"
    longest = 3 + len(HOSTILE) + 2
    assert browser.js(left) == pytest.approx([0, 500 / longest, 300 / longest], abs=0.01)
    assert "ep=rl%2Frollouts%2F00002%2Ft&" in browser.js(
        "document.querySelector('.tree a').getAttribute('href')")
    browser.open(lens / "report.html", ep="rl/rollouts/00002/t #3", tokens=1)
    assert any("left this play out" in text for text in browser.texts("#view .fact"))


def test_tool_calls_say_how_they_went_and_helpers_are_marked(browser, lens):
    browser.open(lens / "report.html", ep="tools/w")
    rows = browser.texts(".tools tr")
    assert rows[1] == "1Searcha towerok0.5 scached"
    assert rows[2].startswith("2Python") and rows[2].endswith("timeout10.3 srepeated")
    turns = browser.texts("#view summary")[1:]
    assert turns[0] == "1 Search(a tower)ok0.5 scached → Doc 1"
    assert "timeout" in turns[1] and "helped: debugger" in turns[1]
    assert browser.texts(".help .tag")[0] == "debugger" and browser.count(".help") == 2
    assert browser.complaints() == []


def test_the_two_plays_of_a_pair_are_shown_side_by_side(browser, lens):
    browser.open(lens / "report.html", ep="dpo/pairs/train/q")
    assert browser.texts(".pair h3") == ["chosen", "rejected"]
    assert [text.split("stop")[0] for text in browser.texts(".pair .fact")] == [
        "chosenreward 11 call", "rejectedreward 0.251 call"]
    assert browser.texts("h2 .note")[-1] == "the first 2 messages are the same"
    browser.open(lens / "report.html", ep="dpo/pairs/train/?")
    assert browser.texts(".pair h3") == ["chosen", "rejected"] and browser.complaints() == []


@pytest.mark.parametrize("state", [
    {"ep": "rl/rollouts/00002/t #2", "tokens": 1, "at": 0}, {"ep": "tools/w", "open": 1},
    {"ep": "dpo/pairs/train/q", "open": 1}], ids=["tokens", "tools", "pairs"])
def test_hostile_text_stays_text_in_every_view(browser, lens, state):
    browser.open(lens / "report.html", **state)
    assert browser.complaints() == [] and browser.js("document.title") == str(lens)
    assert browser.count("img, b b, #view script") == 0
    text = browser.js("document.querySelector('#view').textContent")
    assert all(hostile in text for hostile in HOSTILE[:3] + HOSTILE[6:])


def test_a_search_goes_through_dialogues_and_marks_the_turns_it_finds(browser, run):
    browser.open(run / "report.html", ep=AFTER[1], q="nowhere diner")
    browser.wait("search.done && search.hits.size === 1")
    assert browser.texts("#view summary .found") == ["found"]
    found = "document.querySelector('#view .found').closest('details')"
    assert browser.js(f"{found}.querySelector('summary').textContent").startswith("2 answer")
    browser.js("(() => { q.value = 'nowhere diners'; q.oninput({ target: q }); })()")
    browser.wait("search.q === 'nowhere diners' && search.done")
    assert browser.keys() == [] and browser.js("search.all") == 1, "a longer word is in no other"
    assert browser.complaints() == []


def test_plays_with_tokens_are_marked_and_can_be_filtered(browser, lens, run):
    browser.open(lens / "report.html", view="episodes")
    marked = [row for row in browser.texts("#list a") if "tokens" in row]
    assert len(browser.keys()) == 6 and len(marked) == 3
    browser.open(lens / "report.html", seen="with tokens")
    assert browser.keys() == [f"rl/rollouts/00002/t{play}" for play in ("", " #2", " #3")]
    browser.open(run / "report.html", view="episodes")
    hidden = "getComputedStyle(document.querySelector('#filters #seen')).display"
    assert browser.js(hidden) == "none", "no play of that run has tokens"


def test_verdicts_with_a_dash_explain_it(browser, run):
    browser.open(run / "report.html", ep=AFTER[1])
    assert browser.texts(".checks small")[0].startswith("– not judged: ")
    judged = [passed for passed, _ in
              read_jsonl(run / "eval/after/episodes.jsonl")[0]["score"]["checks"].values()]
    browser.open(run / "report.html", ep=AFTER[0])
    assert browser.count(".checks small") == (None in judged)


def test_the_answer_of_a_world_with_checks_is_shown_as_it_is(browser, tmp_path):
    row = {"task": {"id": "t", "query": "?"}, "messages": [], "stop": "answer", "plan": "2",
           "score": {"success": 1.0, "checks": {"fast": [True, None]}}, "strict": 1.0}
    write_jsonl(tmp_path / "m" / "episodes.jsonl", [row])
    report.main([str(tmp_path)])
    browser.open(tmp_path / "report.html", ep="m/t")
    assert browser.texts("#view h2") == ["Verdicts", "Answer", "Dialogue"]
    assert browser.texts(".plan .text") == ["2"] and browser.texts(".checks") == ["✓fast"]


def test_noisy_curves_have_a_running_mean(browser, run):
    browser.open(run / "report.html")
    values = [1.0, 2.0, 6.0, 1.0]
    points = json.dumps(list(enumerate(values)))
    assert browser.js(f"runningMean({points}, 2)") == [[0, 1], [1, 1.5], [2, 4], [3, 3.5]]
    widths = {1: 1, 19: 1, 20: 5, 100: 5, 101: 6, 1000: 50}
    assert browser.js(f"{list(widths)}.map(n => windowOf({{ length: n }}))") == [*widths.values()]


@pytest.mark.slow
def test_five_thousand_episodes_open(browser, tmp_path, mini):
    task, plan = trip(mini)
    row = played(task, plan, mini)
    row["messages"] = [row["messages"][i % len(row["messages"])] | {"content": f"{i} " * 100}
                       for i in range(20)]
    rows = (row | {"task": task | {"id": f"t{i}"}} for i in range(5000))
    write_jsonl(tmp_path / "many" / "episodes.jsonl", rows)
    report.main([str(tmp_path)])
    browser.open(tmp_path / "report.html", ep="many/t4999")
    print(f"{(tmp_path / 'report.html').stat().st_size / 1e6:.1f} MB, ready after "
          f"{browser.js('document.documentElement.dataset.readyMs')} ms")
    assert browser.texts("#shown")[0].startswith("5,000 of 5,000") and 0 < len(browser.keys()) < 60
    assert browser.texts("#view h3")[0] == "t4999" and browser.complaints() == []
    browser.js("document.getElementById('list').scrollTop = 46 * 2500")
    browser.wait("[...document.querySelectorAll('#list a')]"
                 ".some(a => a.dataset.key === 'many/t2500')")
    began = time.monotonic()
    browser.js("(() => { q.value = 'no such words'; q.oninput({ target: q }); })()")
    browser.wait("search.done && search.q === 'no such words'")
    print(f"all dialogues are searched in {time.monotonic() - began:.1f} s")
    assert browser.keys() == [] and browser.js("search.seen") == 5000


# ------------------------------------------------------------------------------------ microscope


def test_the_microscope_writes_what_learn_saw_of_each_token(tmp_path, one_rank, template):
    """Two plays, of which the second was not in the loss; line n is that of line n of rollouts."""
    import torch

    from grpo import Sample
    from look.microscope import write_tokens

    plays = []
    for name, reply in (("play/0/0", "day 1"), ("play/0/1", "\N{HOT BEVERAGE}")):
        ids = template.encode(reply)
        plays.append(Sample(None, 0, name, [template.end, *ids], [0] + [1] * len(ids),
                            [0.0] + [-0.5] * len(ids), stop="answer", advantage=1.5))
    n = len(plays[0].ids) - 1
    logps, old = torch.full((n,), -0.25), torch.full((n,), -0.5)
    clipped = torch.tensor([1.0] + [0.0] * (n - 1))
    gain, entropy = torch.full((n,), 1.5), torch.full((n,), 0.125)
    seen = [([(plays[0], 0.1)], logps, old, gain, entropy, clipped)]
    args = SimpleNamespace(clip_low=0.2, clip_high=0.28)
    write_tokens(tmp_path / "microscope" / "00001.jsonl", plays, seen, template, args)
    learnt, left = read_jsonl(tmp_path / "microscope" / "00001.jsonl")
    assert "".join(learnt["tokens"][1:]) == "day 1" and left["tokens"][-1] == "\N{HOT BEVERAGE}"
    assert learnt["w"] == pytest.approx([math.exp(0.25)] * n) and learnt["side"][:2] == [1, 0]
    assert learnt["engine"] == [-0.5] * n and learnt["trainer"] == [-0.25] * n
    assert "w" not in left and left["clip"] == [0.8, 1.28] and len(left["group"]) == 2


# ---------------------------------------------------------------------------------------- mistakes


def test_a_folder_that_is_none_is_told_in_one_line(run):
    with pytest.raises(SystemExit, match="is not a folder") as stop:
        report.main([str(run / "nothing")])
    assert str(stop.value).startswith("look.report: ") and "\n" not in str(stop.value)
    assert not (run / "nothing").exists()


def test_a_broken_line_within_a_file_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 2}\n')
    with pytest.raises(SystemExit, match="log.jsonl, line 2: not JSON"):
        report.main([str(tmp_path)])
