"""The report is one file that loads nothing, and shows exactly what happened."""
import base64
import copy
import gzip
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace
from urllib.parse import urlencode

import lxml.html
import pytest
from conftest import ROOT, need, witness

from look import report
from runtime import read_jsonl, write_jsonl
from sandbox import Episode, Sandbox
from travel.constraints import judge, reward

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
CALL = ('<think>look around</think>\n<tool_call>{"name": "SearchCity", "arguments": '
        '{"state": "Nowhere"}}</tool_call>')
HOSTILE = ["</script><script>document.title = 'owned'</script>",
           "<img src=x onerror=\"document.title = 'owned'\">", "<!--<script>", "\u2028\u2029",
           "a\x00b", "&lt;b&gt;", "${7 * 7}"]


# ---------------------------------------------------------------------------------------- records

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
    folder, (task, plan) = tmp_path_factory.mktemp("run"), copy.deepcopy(witness(mini))
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


# ------------------------------------------------------------------------------ what is in a page

def test_the_page_holds_every_episode_whole(run):
    index, records = contents(run / "report.html")
    names = [source["name"] for source in index["sources"]]
    assert sorted(names) == ["eval/after", "eval/before", "rl/rollouts"]
    assert index["total"] == len(records) == 24
    shown = [record for entry, record in zip(index["episodes"], records, strict=True)
             if names[entry["source"]] == "eval/after"]
    assert shown == read_jsonl(run / "eval" / "after" / "episodes.jsonl")


def test_the_plays_of_a_clone_stand_in_the_order_in_which_their_models_were_made(tmp_path):
    shutil.copytree(ROOT / "docs" / "plays", tmp_path / "plays", copy_function=shutil.copy)
    assert [*report.find_records(tmp_path / "plays")[1]] == ["base", "sft", "rl"]


def test_the_standings_are_those_of_the_table(run):
    index, _ = contents(run / "report.html")
    sources = {source["name"]: source for source in index["sources"]}
    after = sources["eval/after"]
    assert (after["episodes"], after["success"], after["temperature"]) == (6, 0.5, 0.6)
    assert after["levels"] == {"easy": 0.5, "medium": 0.5, "hard": 0.5}
    # the one without a plan was not judged, nor did the one with the invented diner get so far
    assert after["checks"]["is_valid_information_in_sandbox"] == [1, 5]
    assert after["checks"]["valid_cost"] == [1, 4]
    assert after["stops"] == {"answer": 5 / 6, "format": 1 / 6} and after["tokens"] == 102.5
    assert after["strict"] == 0.5
    assert sources["rl/rollouts"]["pass"] == {}, "the plays of a group are no evaluation"
    low, high = after["interval"]
    assert 0 <= low < 0.5 < high <= 1


def test_a_page_of_a_long_run_holds_evenly_spread_updates_each_whole(monkeypatch):
    monkeypatch.setattr(report, "MOST", 6)
    rows = [{"source": "rl", "step": str(step)} for step in range(4) for _ in range(3)]
    judged = [{"source": "eval", "step": ""}] * 9
    assert report.choose(judged + rows) == judged + rows[:3] + rows[6:9]
    assert report.choose(judged + rows[:6]) == judged + rows[:6] and report.choose([]) == []


def test_a_log_is_read_as_a_resumed_and_unfinished_run_left_it(run):
    index, _ = contents(run / "report.html")
    rl = next(log["columns"] for log in index["logs"] if log["name"] == "rl")
    assert rl["step"] == list(range(1, 9)) and rl["reward"][6] == 70
    assert rl["val_success"] == [None] * 7 + [0.5]
    assert rl["entropy"][7] is None and "reward_name" not in rl


def test_the_page_asks_for_nothing_and_makes_no_markup_of_text(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and not re.search(r"https?://", page)
    code = (ROOT / "look" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", code)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, mini):
    """A page of one episode in which all text of models and files is hostile."""
    folder, (task, plan) = tmp_path_factory.mktemp("hostile"), copy.deepcopy(witness(mini))
    said = "\n".join(HOSTILE)
    row = played(task | {"id": said, "query": said, "level": HOSTILE[0]}, plan, mini, tokens=9)
    row["messages"] += [
        {"role": "assistant", "content": f"<think>{said}</think>{said}<answer>{said}"},
        {"role": "user", "content": "y" * 1_000_000},
        {"role": "assistant", "content": "<think>" * 100_000},
        {"role": "assistant", "content": "<think></think>" * 9999}]
    row["plan"][0]["dinner"], row["plan"][1]["lunch"] = said, ["no", {"text": 1e999}]
    row["score"]["checks"]["is_not_absent"] = [False, f"day 1: dinner: {said}"]
    path = folder / "<b>eval" / "episodes.jsonl"
    path.parent.mkdir()
    text = json.dumps(row) + "\n" + json.dumps(row)[:99]  # another process is writing
    path.write_text(text, encoding="ascii")
    report.main([str(folder)])
    assert path.read_text(encoding="ascii") == text
    return folder


def test_hostile_text_is_inert_in_the_file(hostile):
    page = (hostile / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 3
    index, (record,) = contents(hostile / "report.html")
    assert index["tasks"][0][0] == "\n".join(HOSTILE)
    assert record["messages"][-3]["content"] == "y" * 1_000_000
    assert record["plan"][1]["lunch"] == ["no", {"text": None}]


# ---------------------------------------------------------------------------------- in a browser

def drawn(page, **state):
    """A page as Chromium draws it with this state in its address, and what its console says."""
    need("chromium", CHROMIUM)
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
               "--window-size=1400,2000",
               "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom",
               f"--user-data-dir={page.parent / 'profile'}", f"{page.as_uri()}#{urlencode(state)}"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600)
    return lxml.html.document_fromstring(done.stdout), re.findall("CONSOLE.*", done.stderr)


def texts(tree, xpath):
    return [node.text_content() for node in tree.xpath(xpath)]


def test_an_error_of_a_page_would_be_seen(tmp_path):
    (tmp_path / "x.html").write_text("<p>drawn<script>console.error('so'); boom()</script>")
    tree, said = drawn(tmp_path / "x.html")
    assert "drawn" in tree.text_content() and len(said) == 2


def test_curves_scores_and_failures_are_drawn(run):
    tree, said = drawn(run / "report.html")
    assert not said and tree.findtext(".//title") == str(run)
    assert len(texts(tree, "//figcaption")) == 9, "three of SFT, five of RL, and the levels"
    assert any("success0.889val_success0.5" in text for text in texts(tree, "//figure"))
    after = next(row for row in texts(tree, "//*[@id='means']//tr") if "eval/after" in row)
    assert "50.0" in after and "83.3" in after and "0.6" in after
    assert "25.0" in next(row for row in texts(tree, "//*[@id='bars']//tr") if "valid_cost" in row)


AFTER, BEFORE = [f"eval/after/t{i}" for i in range(6)], [f"eval/before/t{i}" for i in range(6)]
ROLLOUTS = [f"rl/rollouts/{step}/r{i}{play}" for step in ("00001", "00002") for i in (0, 1)
            for play in ("", " #2", " #3")]


@pytest.mark.parametrize("state, keys", [
    ({"view": "episodes"}, AFTER + BEFORE + ROLLOUTS),
    ({"outcome": "fail", "source": "rl/rollouts"}, [key for key in ROLLOUTS if "#" not in key]),
    ({"stop": "format", "level": "hard"}, [BEFORE[2], BEFORE[5]]),
    ({"check": "is_valid_information_in_sandbox", "q": "nowhere diner"}, [AFTER[1]])])
def test_filters_show_exactly_those(run, state, keys):
    tree, said = drawn(run / "report.html", **state)
    assert not said and sorted(tree.xpath("//*[@id='list']//a/@data-key")) == sorted(keys)
    assert tree.xpath("//*[@id='shown']")[0].text_content().startswith(f"{len(keys)} of 24")
    queries = {key.split()[0] for key in {*keys} & {*ROLLOUTS}}
    assert texts(tree, "//*[@class='dots']") == ["●●●"] * len(queries), "a dot for each play"
    view = texts(tree, "//*[@id='view']")[0]
    assert ("roles of the" in view) == ("tokens 1" in view or "advantage" in view)


def test_an_episode_shows_its_turns_verdicts_and_the_offending_cell(run):
    tree, said = drawn(run / "report.html", ep="eval/after/t1")
    assert not said and len(tree.xpath("//*[@id='view']//details")) == 4, "system, query, two turns"
    city = read_jsonl(run / "eval/after/episodes.jsonl")[1]["plan"][1]["current_city"]
    (cell,) = tree.xpath("//*[contains(@class, 'days')]//*[contains(@class, 'off')]")
    assert cell.text_content().startswith(f"dinnerNowhere Diner, {city}")
    assert (cell.get("data-day"), cell.get("data-field")) == ("2", "dinner")
    verdicts = texts(tree, "//*[@id='view']//*[contains(@class, 'checks')]/div/div")
    assert "✓is_not_absent" in verdicts and "–valid_cost" in verdicts
    assert any(line.startswith("✗is_valid_information_in_sandbox: day 2: dinner: ")
               for line in verdicts)


def test_hostile_text_stays_text(hostile):
    key = contents(hostile / "report.html")[0]["episodes"][0]["key"]
    for state in {}, {"ep": key, "roles": 1, "open": 1}:
        tree, said = drawn(hostile / "report.html", **state)
        assert not said and tree.findtext(".//title") == str(hostile)
        assert not tree.xpath("//img | //b//b | //*[@id='view']//script")
    view = tree.xpath("//*[@id='view']")[0].text_content()
    assert all(text in view for text in (HOSTILE[0], HOSTILE[1], HOSTILE[2], *HOSTILE[-2:]))
    assert "show all 1,000,000 characters" in view and len(view) < 300_000


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
    logps, old, gain, entropy = (torch.full((n,), x) for x in (-0.25, -0.5, 1.5, 0.125))
    clipped = torch.tensor([1.0] + [0.0] * (n - 1))
    micros = [([(plays[0], 0.1)], logps, old, gain, entropy, clipped)]
    args = SimpleNamespace(clip_low=0.2, clip_high=0.28)
    write_tokens(tmp_path / "microscope" / "00001.jsonl", plays, micros, template, args)
    learnt, left = read_jsonl(tmp_path / "microscope" / "00001.jsonl")
    assert "".join(learnt["tokens"][1:]) == "day 1" and left["tokens"][-1] == "\N{HOT BEVERAGE}"
    assert learnt["w"] == pytest.approx([math.exp(0.25)] * n) and learnt["side"][:2] == [1, 0]
    assert learnt["engine"] == [-0.5] * n and learnt["trainer"] == [-0.25] * n
    assert "w" not in left and left["clip"] == [0.8, 1.28] and len(left["group"]) == 2
