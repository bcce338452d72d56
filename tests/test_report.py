"""The report is one file that fetches nothing, shows what happened and nothing else, and opens with 5,000 episodes."""

import base64
import gzip
import json
import os
import re
import select
import shutil
import subprocess
import time
from urllib.parse import urlencode

import pytest

import evaluate
from evaluate import write_jsonl, write_report
from sandbox import Episode, Sandbox
from synth import solve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CALL = '<think>look around</think>\n<tool_call>{"name": "SearchCity", "arguments": {"state": "Nowhere"}}</tool_call>'
HOSTILE = ["</script><script>document.title = 'owned'</script>", "<img src=x onerror=\"document.title = 'owned'\">", "<!--<script>",
           "\u2028\u2029", "a\x00b", "\ud800 alone \udfff", "&lt;b&gt;", "${7 * 7}"]


# ----------------------------------------------------------------------------------------------------------- the world


def trip(database):
    """(task, plan): the first three-day trip that the solver finds."""
    for org in database.cities:
        for dest in database.cities:
            task = {"query": "?", "org": org, "dest": dest, "days": 3, "date": ["2022-03-10", "2022-03-11", "2022-03-12"],
                    "visiting_city_number": 1, "people_number": 2, "budget": 99999, "level": "easy",
                    "local_constraint": dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))}
            if org != dest and (plan := solve(task, database)):
                return task, plan
    raise AssertionError("the small world has no trip")


def played(task, plan, database, final="<think>done</think>\n<answer>Day 1: ...</answer>", **more):
    """A record: one call, then a last reply."""
    episode = Episode(task, Sandbox(database), system_prompt="Plan trips.")
    episode.step(CALL)
    episode.step(final)
    return episode.record("m") | evaluate.verdicts(task, plan, database) | more


@pytest.fixture(scope="module")
def run(tmp_path_factory, mini):
    """A run: two evaluations of six tasks, two updates of rollouts with two groups of three, logs of RL and SFT."""
    folder, (task, plan) = tmp_path_factory.mktemp("run"), trip(mini)
    tasks = [task | {"id": f"t{i}", "level": ("easy", "medium", "hard")[i % 3], "query": f"Trip number {i}, please."} for i in range(6)]
    absent = json.loads(json.dumps(plan))
    absent[1]["dinner"] = f"Nowhere Diner, {absent[1]['current_city']}"
    after = [played(t, plan, mini, tokens=100 + i) for i, t in enumerate(tasks)]
    after[1] = played(tasks[1], absent, mini, tokens=101)
    after[2] = played(tasks[2] | {"budget": 1}, plan, mini, tokens=102)
    after[3] = played(tasks[3], None, mini, "no format", tokens=103)
    before = [played(t, None, mini, "no format") for t in tasks]
    write_jsonl(folder / "eval" / "before" / "episodes.jsonl", before)
    write_jsonl(folder / "eval" / "after" / "episodes.jsonl", after)
    (folder / "eval" / "after" / "settings.json").write_text('{"temperature": 0.6}')
    for step in (1, 2):
        rows = [played(tasks[i] | {"id": f"r{i}"}, plan if k else None, mini, advantage=k - 1.0) for i in (0, 1) for k in range(3)]
        write_jsonl(folder / "rl" / "rollouts" / f"{step:05d}.jsonl", rows)
    log = [{"step": i, "success": i / 9, "reward": float(i), "entropy": 1 / i, "format": 0.1, "overlength": 0.0, "dlogp_mean": 1e-6,
            "dlogp_max": 1e-5, "kind": "sum"} for i in range(1, 9)]
    again = [log[6] | {"reward": 70.0}, log[7] | {"val_success": 0.5, "entropy": float("nan")}]
    write_jsonl(folder / "rl" / "log.jsonl", log + again)
    with open(folder / "rl" / "log.jsonl", "a") as file:
        file.write('{"step": 9, "rew')  # it is being written
    write_jsonl(folder / "sft" / "log.jsonl", [{"step": i, "loss": 2 / i, "entropy": 1.0, "gnorm": 3.0} for i in range(1, 60)])
    write_report(folder, folder, 5000)
    return folder


def contents(page):
    """(index, [episode]) of a page, read as a browser would."""
    text = page.read_text(encoding="utf-8")
    index = json.loads(re.search(r'<script type="application/json" id="index">(.*?)</script>', text, re.S)[1])
    packed = re.findall(r'<script type="text/plain" id="e(\d+)">(.*?)</script>', text)
    assert [int(number) for number, _ in packed] == list(range(len(index["episodes"])))
    return index, [json.loads(gzip.decompress(base64.b64decode(data))) for _, data in packed]


# ----------------------------------------------------------------------------------------------------- what is in it


def test_the_page_holds_every_episode_whole(run):
    index, records = contents(run / "report.html")
    names = [source["name"] for source in index["sources"]]
    assert sorted(names) == ["eval/after", "eval/before", "rl/rollouts"]
    assert index["total"] == len(records) == 24
    written = evaluate.read_jsonl(run / "eval" / "after" / "episodes.jsonl")
    shown = [record for entry, record in zip(index["episodes"], records) if names[entry["source"]] == "eval/after"]
    assert shown == written
    assert len({entry["key"] for entry in index["episodes"]}) == 24


def test_the_standings_are_those_of_the_table(run):
    index, _ = contents(run / "report.html")
    after = next(source for source in index["sources"] if source["name"] == "eval/after")
    assert (after["episodes"], after["success"], after["temperature"]) == (6, 0.5, 0.6)
    assert after["levels"] == {"easy": 0.5, "medium": 0.5, "hard": 0.5} and index["levels"] == ["easy", "medium", "hard"]
    assert after["checks"]["is_valid_information_in_sandbox"] == [1, 5]  # the one without a plan was not judged
    assert after["checks"]["valid_cost"] == [1, 4]  # nor did the one with the invented diner get so far
    assert after["stops"] == {"answer": 5 / 6, "format": 1 / 6} and after["tokens"] == 102.5
    low, high = after["interval"]
    assert 0 <= low < 0.5 < high <= 1


def test_a_log_is_read_as_a_resumed_and_unfinished_run_left_it(run):
    index, _ = contents(run / "report.html")
    rl = next(log["columns"] for log in index["logs"] if log["name"] == "rl")
    assert rl["step"] == list(range(1, 9)) and rl["reward"][6] == 70 and rl["val_success"] == [None] * 7 + [0.5]
    assert rl["entropy"][7] is None and "kind" not in rl


def test_samples_are_told_apart_and_give_pass_at_k(run, tmp_path):
    rows = evaluate.read_jsonl(run / "eval" / "after" / "episodes.jsonl")
    write_jsonl(tmp_path / "m" / "episodes.jsonl", rows[:2] + [row | {"task": row["task"] | {"sample": 1}} for row in rows[:2]])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "episodes.jsonl").write_text("")
    write_report(tmp_path, tmp_path, 5000)
    index, _ = contents(tmp_path / "report.html")
    assert [entry["key"] for entry in index["episodes"]] == ["m/t0", "m/t1", "m/t0 #2", "m/t1 #2"]
    assert {source["name"]: source["pass"] for source in index["sources"]} == {"m": {"pass@1": 0.5, "pass@2": 0.5}, "empty": {}}


def test_any_folder_of_ours_makes_a_page(run, tmp_path):
    for part, episodes, logs in (("rl", 12, 1), ("rl/rollouts", 12, 0), ("sft", 0, 1), ("eval", 12, 0), ("eval/after", 6, 0)):
        evaluate.main(["--report", str(run / part), "--out", str(tmp_path / part)])
        index, records = contents(tmp_path / part / "report.html")
        assert (len(records), len(index["logs"])) == (episodes, logs), part
    with pytest.raises(SystemExit, match="holds no log.jsonl"):
        evaluate.main(["--report", str(tmp_path / "nothing")])


def test_of_too_many_episodes_whole_tasks_are_chosen_and_evaluations_first(run, tmp_path):
    for limit, evaluated, trained in ((20, 12, 6), (14, 12, 0), (6, 6, 0)):
        write_report(run, tmp_path, limit)
        index, _ = contents(tmp_path / "report.html")
        names = [index["sources"][entry["source"]]["name"] for entry in index["episodes"]]
        assert (len(names) - names.count("rl/rollouts"), names.count("rl/rollouts")) == (evaluated, trained)
        assert names.count("eval/after") == names.count("eval/before") and index["total"] == 24
        after = next(source for source in index["sources"] if source["name"] == "eval/after")
        assert after["episodes"] == 6, "the tables are of all episodes"
    spread = {entry["step"] for entry in evaluate.choose(list(evaluate.gather("r", sorted((run / "rl" / "rollouts").iterdir()))), 6)}
    assert spread == {"00001", "00002"}


def test_the_page_asks_for_nothing(run, root):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and not re.search(r"https?://", page)
    code = (root / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\bsrc=|url\(|@import|\bfetch\b|\beval\b|import\(", code)
    assert all(len(line) <= 120 and line == line.rstrip() for line in code.splitlines())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, mini):
    """A page of one episode in which everything that a model or a file can say is hostile."""
    folder, (task, plan) = tmp_path_factory.mktemp("hostile"), trip(mini)
    said = "\n".join(HOSTILE)
    row = played(task | {"id": said, "query": said, "level": HOSTILE[0]}, plan, mini)
    row["messages"] += [{"role": "assistant", "content": f"<think>{said}</think>{said}<answer>{said}"},
                        {"role": "user", "content": "y" * 1_000_000},
                        {"role": "assistant", "content": "<think>" * 100_000}, {"role": "assistant", "content": "<think></think>" * 9999}]
    row["plan"][0]["dinner"], row["plan"][1]["lunch"] = said, ["no", {"text": 1e999}]
    row["score"]["checks"]["is_not_absent"] = [False, f"day 1: dinner: {said}"]
    path = folder / "<b>eval" / "episodes.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(row) + "\n" + json.dumps(row)[:99], encoding="ascii")
    write_report(folder, folder, 5000)
    return folder


def test_hostile_text_is_inert_in_the_file(hostile):
    page = (hostile / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 3
    index, (record,) = contents(hostile / "report.html")
    assert index["tasks"][0][0] == "\n".join(HOSTILE) and record["messages"][-3]["content"] == "y" * 1_000_000
    assert record["plan"][1]["lunch"] == ["no", {"text": None}]


# ---------------------------------------------------------------------------------------------------- in a browser


class Browser:
    """Headless Chromium, spoken to through a pair of pipes: one browser for all tests."""

    def __init__(self, profile):
        self.answers, theirs = os.pipe()
        ours, self.orders = os.pipe()
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--no-first-run",
                 f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(["bash", "-c", f'exec "$@" 3<&{ours} 4>&{theirs}', "bash", *words], pass_fds=(ours, theirs),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours), os.close(theirs)
        self.number, self.buffer, self.events, self.session = 0, b"", [], {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        self.number += 1
        os.write(self.orders, json.dumps({"id": self.number, "method": method, "params": parameters} | self.session).encode() + b"\0")
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
        """Go to a page afresh, with that state in its address, and wait until what it asks for is drawn."""
        self.ask("Page.navigate", url="about:blank")
        self.events.clear()
        self.ask("Page.navigate", url=f"{page.as_uri()}#{urlencode(state)}")
        self.until(lambda message: message.get("method") == "Page.loadEventFired")
        if "ep" in state:
            self.wait("document.querySelector('#view h3')")

    def js(self, expression):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression):
        for _ in range(600):
            if self.js(f"Boolean({expression})"):
                return
            time.sleep(0.1)
        raise AssertionError(f"never came true: {expression}")

    def texts(self, selector):
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")

    def keys(self):
        return self.js("[...document.querySelectorAll('#list a')].map(node => node.dataset.key)")

    def complaints(self):
        """Console messages, uncaught errors and requests other than for the page itself."""
        seen = [e for e in self.events if e.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")]
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return seen + [url for url in asked if not re.fullmatch(r"file:.*/report\.html(#.*)?|about:blank", url)]


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
    (tmp_path / "report.html").write_text("<img src=nothing.png><script>console.error('so'); boom()</script>")
    browser.open(tmp_path / "report.html")
    assert len(browser.complaints()) >= 3


def test_curves_scores_and_failures_are_drawn(browser, run):
    browser.open(run / "report.html")
    assert browser.complaints() == []
    assert browser.texts("figcaption") == [
        "success", "reward", "broken format and overlength", "entropy, nats", "|Δ logp|, engine to trainer", "loss per policy token",
        "entropy, nats", "gradient norm"]
    assert browser.js("document.querySelectorAll('figure path').length") == 2 + 1 + 2 + 1 + 2 + 3
    assert browser.js("document.querySelector('figure circle').getAttribute('cx') > 0")
    assert browser.texts("figure .legend span")[:2] == ["success0.889", "val_success0.5"]
    after = next(line for line in browser.texts("#means tr") if line.startswith("eval/after"))
    assert "50.0" in after and "83.3" in after and "0.6" in after
    cost = next(row for row in browser.texts("#bars tr") if row.startswith("valid_cost"))
    assert "25.0" in cost
    assert browser.js("document.title") == str(run)


def test_a_step_is_read_off_all_curves(browser, run):
    browser.open(run / "report.html", step=3)
    assert browser.texts("figure .legend b")[:2] == ["0.333", "–"] and browser.texts("h2 .note")[0] == "rl · update 3"
    browser.js("""(() => { const svg = document.querySelector('svg'), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 1})); })()""")
    assert browser.texts("h2 .note")[0] == "rl · update 8" and browser.texts("figure .legend b")[2] == "8"


AFTER, BEFORE = [f"eval/after/t{i}" for i in range(6)], [f"eval/before/t{i}" for i in range(6)]
ROLLOUTS = [f"rl/rollouts/{step}/r{i}{play}" for step in ("00001", "00002") for i in (0, 1) for play in ("", " #2", " #3")]


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
], ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "")
def test_filters_show_exactly_those(browser, run, state, keys):
    browser.open(run / "report.html", **state)
    assert sorted(browser.keys()) == sorted(keys)
    assert browser.texts("#shown")[0].startswith(f"{len(keys)} of 24 episodes") and browser.complaints() == []


def test_choosing_typing_and_walking_end_up_in_the_address(browser, run):
    browser.open(run / "report.html", view="episodes")
    browser.js("(() => { const level = document.getElementById('level'); level.value = 'hard'; level.onchange({target: level}); })()")
    browser.js("(() => { const q = document.getElementById('q'); q.value = 't'; q.oninput({target: q}); })()")
    assert len(browser.keys()) == 4 and "level=hard&q=t" in browser.js("location.hash")
    for key, at in (("j", 0), ("ArrowDown", 1), ("j", 2), ("k", 1)):
        browser.js(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")
        assert browser.js("document.querySelector('#list .on').dataset.key") == browser.keys()[at]
    browser.wait(f"document.querySelector('#view h3')?.textContent === {json.dumps(browser.keys()[1].split('/')[-1])}")
    assert browser.complaints() == []


def test_an_episode_shows_its_turns_verdicts_and_the_offending_cell(browser, run):
    browser.open(run / "report.html", ep="eval/after/t1")
    assert browser.js("document.querySelectorAll('#view details').length") == 4  # system, query, two turns
    assert browser.js("document.querySelectorAll('#view details[open]').length") == 0
    turn = browser.texts("#view summary")[2]
    assert turn.startswith("1 SearchCity(state=Nowhere) → ") and browser.texts("#view .text")[2] == "look around"
    assert [cell.partition("there is")[0] for cell in browser.texts("td.off")] == [
        f"Nowhere Diner, {json.loads((run / 'eval/after/episodes.jsonl').read_text().splitlines()[1])['plan'][1]['current_city']}"]
    assert browser.js("document.querySelector('td.off small').dataset.check") == "is_valid_information_in_sandbox"
    assert browser.js("document.querySelector('td.off').cellIndex") == 2 and browser.texts("th.off") == []
    verdicts = browser.texts("#view .checks > div")
    assert "✓is_not_absent" in verdicts and any(line.startswith("✗is_valid_information_in_sandbox: day 2: dinner: ") for line in verdicts)
    assert "–valid_cost" in verdicts and "reward" in browser.texts(".fact")[0]
    assert browser.complaints() == []


def test_marks_on_rows_days_and_the_whole_plan(browser, run):
    browser.open(run / "report.html", ep="eval/after/t2")
    assert browser.texts("td.off") == [] and any("the budget is $1" in line for line in browser.texts(".plan > div"))
    places = {"day 2: accommodation: X asks for 3 nights": [2, "accommodation", "X asks for 3 nights"], "meals: none serves": [0, "meals", "none serves"],
              "day 3: no dinner": [3, "dinner", None], "day 1 has no lunch": [1, "lunch", None], "current_city: Ely is": [0, "current_city", "Ely is"],
              "day 2: lunch repeats 'dinner'": [2, "lunch", None], "2 of 3 days are filled in": [0, None, None]}
    for reason, place in places.items():
        found = browser.js(f"(() => {{ const [, day, field, rest] = PLACE.exec({json.dumps(reason)}); return [+(day ?? 0), field ?? null, rest ?? null]; }})()")
        assert found == place, reason


def test_roles_are_shown_on_demand_with_no_invented_number(browser, run):
    browser.open(run / "report.html", ep="eval/after/t1")
    assert browser.js("getComputedStyle(document.querySelector('.role')).display") == "none"
    browser.js("document.querySelectorAll('#view label input')[1].click()")
    browser.wait("document.querySelector('.ribbon')")
    assert browser.js("getComputedStyle(document.querySelector('.role')).display") != "none"
    record = evaluate.read_jsonl(run / "eval" / "after" / "episodes.jsonl")[1]
    said = {role: sum(len(m["content"]) for m in record["messages"] if (m["role"] == "assistant") == role) for role in (True, False)}
    note = browser.texts("#view p.note")[0]
    assert f"{said[True]:,} characters" in note and f"{said[False]:,} characters" in note and "101 tokens, not by role" in note
    assert "policy, mask 1" in browser.texts(".policy .role")[0] and "world, mask 0" in browser.texts(".world .role")[0]
    browser.open(run / "report.html", ep="eval/before/t1", roles=1)
    assert "token" not in browser.texts("#view p.note")[0], "the record counts none"


def test_two_plays_of_a_task_stand_side_by_side(browser, run):
    browser.open(run / "report.html", ep="eval/after/t1", vs="eval/before/t1")
    assert browser.texts(".fact h3") == ["eval/after", "eval/before"] and browser.js("document.querySelectorAll('.plan').length") == 2
    assert browser.texts("#vs option")[1:] == ["✗ eval/before/t1"]
    browser.open(run / "report.html", ep="rl/rollouts/00001/r0 #2")
    assert len(browser.texts("#vs option")) == 6, "the group's other plays, and the next update's"
    assert "advantage 0" in browser.texts(".fact")[0]


def test_hostile_text_stays_text(browser, hostile):
    browser.open(hostile / "report.html")
    assert browser.texts("#means td:first-child, #means th")[-1:] != [] and browser.complaints() == []
    key = contents(hostile / "report.html")[0]["episodes"][0]["key"]
    browser.open(hostile / "report.html", ep=key, roles=1, open=1)
    assert browser.complaints() == [] and browser.js("document.title") == str(hostile)
    assert browser.js("document.querySelectorAll('img, b b, #view script').length") == 0
    said = browser.texts("#view .text")
    for text in HOSTILE:
        lone = re.compile("[\ud800-\udfff\ufffd]")  # on their way here they are replaced
        assert any(lone.sub("?", text) in lone.sub("?", part) for part in said), text
    assert "show all 1,000,000 characters" in browser.texts("#view button")
    assert browser.js("document.querySelector('#view').textContent.length") < 300_000
    browser.js("[...document.querySelectorAll('#view button')].find(b => b.textContent.includes('1,000,000')).click()")
    assert browser.js("document.querySelector('#view').textContent.length") > 1_000_000
    assert browser.texts("td.off small")[0].startswith("</script>")


def test_five_thousand_episodes_open(browser, tmp_path, mini, capsys):
    task, plan = trip(mini)
    row = played(task, plan, mini)
    row["messages"] = [row["messages"][i % len(row["messages"])] | {"content": f"{i} " * 100} for i in range(20)]
    write_jsonl(tmp_path / "many" / "episodes.jsonl", (row | {"task": task | {"id": f"t{i}"}} for i in range(5000)))
    write_report(tmp_path, tmp_path, 5000)
    browser.open(tmp_path / "report.html", ep="many/t4999")
    assert browser.texts("#shown")[0].startswith("5,000 of 5,000") and 0 < len(browser.keys()) < 60
    assert browser.texts("#view h3")[0] == "t4999" and browser.complaints() == []
    browser.js("document.getElementById('list').scrollTop = 46 * 2500")
    browser.wait("[...document.querySelectorAll('#list a')].some(a => a.dataset.key === 'many/t2500')")
    ready = browser.js("document.documentElement.dataset.readyMs")
    with capsys.disabled():
        print(f"\nreport.html, 5,000 episodes, {(tmp_path / 'report.html').stat().st_size / 1e6:.0f} MB: ready after {ready} ms")
