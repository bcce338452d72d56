"""Records are complete, play does not block, the table is right, a killed run resumes."""
import csv
import json
import multiprocessing
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from conftest import ROOT, SEED, Letters, Scripted

import evaluate
import runtime
from evaluate import play, table
from format_plan import itinerary
from runtime import ChatError, Mistake, load_tasks, read_jsonl, write_jsonl
from sandbox import Episode, Sandbox, parse, read_prompt
from toolstar.tools import Tools
from travel.constraints import HARD, hard_counts
from travel.world import Travel, load_task

CALL = ('<think>.</think><tool_call>{"name": "SearchCity", "arguments": {"state": "x"}}'
        '</tool_call>')
ANSWER = "<think>.</think><answer>done</answer>"


# ------------------------------------------------------------------------------------------ files


def test_records_come_back_as_they_were_written(tmp_path):
    file = tmp_path / "deep" / "x.jsonl"
    write_jsonl(file, [{"a": "é"}, {"a": "two\nlines"}])
    runtime.append_jsonl(file, {"a": "\ud800"})
    assert [row["a"] for row in read_jsonl(file)] == ["é", "two\nlines", "?"]  # half a pair
    assert [path.name for path in file.parent.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("bad", ['{"a": ', "[" * 100_000, "\xff"])
def test_a_broken_line_is_named(tmp_path, bad):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n\n' + bad.encode("latin-1") + b"\n")
    with pytest.raises(Mistake, match="x.jsonl, line 3: not JSON"):
        read_jsonl(tmp_path / "x.jsonl")


@pytest.mark.parametrize("torn, kept", [
    ('{"id": 1}\n{"id": 2}\n{"id"', 2), ('{"id": 1}\n', 1), ('{"id": 1}\n{"id": 2}', 1),
    ('{"id', 0), (None, 0)])
def test_a_line_that_a_killed_run_did_not_finish_is_cut_off(tmp_path, torn, kept):
    if torn is not None:
        (tmp_path / "x.jsonl").write_text(torn)
    assert [row["id"] for row in runtime.recover_jsonl(tmp_path / "x.jsonl")] == [1, 2][:kept]
    assert torn is None or (tmp_path / "x.jsonl").read_text().count("\n") == kept


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    with pytest.raises(KeyError), runtime.replacing(file) as out:
        out.write("half")
        out.flush()
        raise KeyError
    assert file.read_text() == "old"
    with runtime.replacing(file) as out:
        out.write("new")
    assert file.read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["x"]


# ------------------------------------------------------------------------------------------ tasks


def published(task, idx):
    """A row of the published csv, with literals as text and large reference information."""
    asked = {"house rule": None, "cuisine": ["Indian"], "room type": None, "transportation": None}
    return {"org": task["org"], "dest": task["dest"], "days": task["days"], "people_number": 2,
            "visiting_city_number": 1, "date": str(task["date"]), "local_constraint": str(asked),
            "budget": 1700, "query": f'Trip "{idx}",\nplease.', "level": "medium",
            "reference_information": "x" * 200_000}


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_published_task_becomes_ours(trip):
    row = published(trip[0], 7) | {"idx": 7, "constraint": "{'room rule': 'pets'}", "days": "3"}
    del row["visiting_city_number"], row["local_constraint"]
    task = load_task(row)
    assert (task["id"], task["days"], task["visiting_city_number"]) == ("7", 3, 1)
    assert task["date"] == trip[0]["date"] and "reference_information" not in task
    assert task["local_constraint"] == {
        "house rule": "pets", "cuisine": None, "room type": None, "transportation": None}
    assert load_task(task) == task, "what is ours already stays as it is"


NOTHING = dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))
TWO = NOTHING | {"cuisine": ["Chinese", "Fast Food"]}


@pytest.mark.parametrize("asked, wishes", [
    ({"cuisine": "['Chinese', 'Fast Food']"}, TWO), ({"cuisine": "['Chinese' 'Fast Food']"}, TWO),
    ({"cuisine": "Chinese, Fast Food"}, TWO), ({"cuisine": ["['Chinese', 'Fast Food']"]}, TWO),
    ({"cuisine": '["Chinese", "Fast Food"]'}, TWO),
    ({"cuisine": ["Chinese", None, "Fast Food"]}, TWO),
    ("{'cuisine': ['Chinese', 'Fast Food'], 'house rule': None}", TWO),
    ('{"cuisine": ["Chinese", "Fast Food"], "house rule": null}', TWO),
    ({"cuisine": "Chinese"}, NOTHING | {"cuisine": ["Chinese"]}),
    ({"cuisine": "None", "house rule": "None", "room type": "nan", "transportation": ""}, NOTHING),
    ({"cuisine": float("nan"), "house rule": float("nan")}, NOTHING), (float("nan"), NOTHING),
    ({"cuisine": [None]}, NOTHING),
    ({"cuisine": "[]"}, NOTHING), ('{"house rule": null}', NOTHING), ("None", NOTHING),
    ({"house rule": "pets", "cuisine": []}, NOTHING | {"house rule": "pets", "cuisine": []})])
def test_wishes_are_read_however_a_file_writes_them(trip, asked, wishes):
    task = load_task(trip[0] | {"local_constraint": asked})
    assert task["local_constraint"] == wishes and load_task(task) == task


@pytest.mark.parametrize("asked", [{"cuisine": 7}, {"cuisine": {"a": 1}}, {"cuisine": [["French"]]},
                                   {"house rule": ["pets"]}, {"house rule": "cats"}, "[1]", "pets"])
def test_wishes_that_are_none_of_ours_are_refused(trip, asked):
    with pytest.raises(Mistake, match="cuisine|house rule|local_constraint"):
        load_task(trip[0] | {"local_constraint": asked})


@pytest.mark.parametrize("row, words", [
    ({"org": 5}, "'org' is 5"), ({"date": "tomorrow"}, "'date' is"), ({"days": None}, "'days' is"),
    ({"days": 5}, "it must be 5 days"),
    ({"local_constraint": "[]("}, "'local_constraint' must be"), ({}, "has no 'org'"),
    ([], "a task is a JSON object, not []"), ({"query": 5}, "'query' is 5")])
def test_a_task_that_cannot_be_read_is_named_with_file_row_and_key(trip, tmp_path, row, words):
    task = {"id": "2"} | (trip[0] if row else {}) | row if isinstance(row, dict) else row
    write_jsonl(tmp_path / "x.jsonl", [trip[0] | {"id": "1"}, task])
    with pytest.raises(Mistake, match="^[^\n]*x.jsonl, row 2: .*" + re.escape(words)):
        load_tasks(tmp_path / "x.jsonl", load_task)


def test_a_published_data_set_is_a_folder(tmp_path, trip):
    write_csv(tmp_path / "validation.csv", [published(trip[0], i) for i in range(3)])
    rows = [published(trip[0], i) | {"idx": i + 1} for i in range(2)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    tasks = load_tasks(str(tmp_path), load_task, split="validation")
    assert [task["id"] for task in tasks] == ["0", "1", "2"]
    assert tasks[1] == load_task(published(trip[0], 1) | {"idx": 1})
    assert tasks[1]["query"] == 'Trip "1",\nplease.'
    assert [task["id"] for task in load_tasks(tmp_path, load_task, limit=1, split="train")] == ["1"]
    csv = load_tasks(tmp_path / "validation.csv", load_task)
    assert csv == tasks, "a csv is a file like any other"


def test_tasks_are_also_read_from_episodes(tmp_path, trip):
    write_jsonl(tmp_path / "x.jsonl", [{"task": trip[0], "answer": "?"}])
    assert [task["id"] for task in load_tasks(tmp_path / "x.jsonl", load_task)] == [trip[0]["id"]]


@pytest.mark.parametrize("source, split, words", [
    (None, None, "--tasks FILE"), (".", None, "needs --split"), (".", "test", "test.csv is not"),
    ("some/set", None, "needs --split"), ("empty.jsonl", None, "holds no task"),
    ("twice.jsonl", None, "two tasks with the same id"), ("none.jsonl", None, "none.jsonl is not")])
def test_missing_tasks_are_reported_with_cause(tmp_path, monkeypatch, trip, source, split, words):
    monkeypatch.chdir(tmp_path)
    write_jsonl("empty.jsonl", [])
    write_jsonl("twice.jsonl", [trip[0]] * 2)
    with pytest.raises(Mistake, match=words):
        load_tasks(source, load_task, split=split)


def test_the_published_training_queries_ask_105_hard_constraints(test_data):
    """As the leaderboard counts them; those of plans that reach none are asked as well."""
    tasks = load_tasks(test_data / "travelplanner" / "train_45.jsonl", load_task)
    unreached = dict.fromkeys(HARD, [None, None])
    assert [sum(each) for each in zip(*(hard_counts(task, unreached) for task in tasks),
                                      strict=True)] == [0, 105]


@pytest.mark.parametrize("name, size", [("train_45", 45), ("val_102", 102)])
def test_the_official_queries_are_tasks(test_data, name, size):
    tasks = load_tasks(test_data / "travelplanner" / f"{name}.jsonl", load_task)
    assert len(tasks) == size and all(task["days"] == len(task["date"]) for task in tasks)


def test_a_world_of_ones_own_reads_its_tasks_and_errors_name_file_row_and_key(tmp_path):
    rows = [{"query": "?", "secret": 1}, {"query": "!"}]
    write_jsonl(tmp_path / "test.jsonl", rows)

    def load(row):
        return row | {"twice": 2 * row["secret"]}

    with pytest.raises(KeyError, match="secret") as error:
        load_tasks(tmp_path, load, split="test")
    assert error.value.__notes__ == [f"in {tmp_path}/test.jsonl, row 2"]
    (task,) = load_tasks(tmp_path, load, 1, "test")
    assert task == {"query": "?", "secret": 1, "twice": 2, "id": "0", "idx": 0}
    write_jsonl(tmp_path / "one.jsonl", [{"idx": 7, "secret": 2}])
    assert load_tasks(tmp_path / "one.jsonl", load)[0]["id"] == "7"


def test_a_worlds_file_may_hold_dataclasses_and_import_what_stands_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("KINDS = ('one',)")
    (tmp_path / "world.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from beside_it import KINDS\n\n\n@dataclass\nclass World:\n    kinds: tuple = KINDS\n\n\n"
        "def open_world(args):\n    return World()\n")
    assert runtime.load_world(str(tmp_path / "world.py")).open_world(None).kinds == ("one",)


def test_a_data_set_on_the_hub_is_its_file(tmp_path, trip, monkeypatch):
    """From the hub client's own cache, where a fetched file lies."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "datasets--some--set"
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    write_csv(kept / "snapshots" / ("0" * 40) / "validation.csv", [published(trip[0], 0)])
    assert len(load_tasks("some/set", load_task, split="validation")) == 1


def test_the_test_split_is_played_and_not_judged(tmp_path, mini):
    """It says no more than level, days and query."""
    rows = [{"level": "easy", "days": 3, "query": f"Trip {i}?"} for i in range(2)]
    write_csv(tmp_path / "test.csv", rows)
    tasks = load_tasks(tmp_path, Travel(mini, test_split=True).load_task, split="test")
    assert tasks[1] == {"id": "1", "idx": 1, "level": "easy", "days": "3", "query": "Trip 1?"}
    episode = Episode(tasks[0], Sandbox(mini))
    episode.step(ANSWER)
    plan, verdict, strict = Travel(mini).verdict(episode)
    assert plan is verdict is strict is None
    text, report = table({"a": [episode.record() | {"plan": plan}]})
    assert "success" not in text and "reward" not in text and report["a"]["stop: answer"] == 1


# ------------------------------------------------------------------------------------------ world


def test_travel_is_a_world(trip, mini):
    task, plan, _ = trip
    world = Travel(mini)
    args = SimpleNamespace(failure_rate=0.5, max_turns=3, system_prompt="short")
    episode = world.episode(world.load_task(task), "7/w", args)
    assert (episode.max_turns, episode.messages[0]["content"]) == (3, read_prompt("short"))
    assert (episode.sandbox.failure_rate, episode.sandbox.seed) == (0.5, "7/w")
    episode.step(f"<think>.</think><answer>{itinerary(plan)}</answer>")
    found, verdict, strict = world.verdict(episode)
    assert found and strict == verdict["official"] == 1.0 and set(world.parts) <= verdict.keys()
    assert [world.reward(verdict, kind) for kind in world.kinds] == [5, 3, 1]
    assert world.stops == () and world.slow is False and world.close() is None


def test_a_world_is_travel_or_a_module_or_a_file(tmp_path, mini):
    world = runtime.open_world(evaluate.flags(["--database", str(mini.folder)]))
    assert isinstance(world, Travel)
    code = ("from travel.world import Travel\n\n\nclass World(Travel):\n"
            "    def __init__(self, args):\n        self.out = args.out\n")
    (tmp_path / "toy.py").write_text(code + "\n\ndef open_world(args):\n    return World(args)\n")
    args = evaluate.flags(["--env", str(tmp_path / "toy.py"), "--out", "there"])
    assert runtime.open_world(args).out == "there"
    module = runtime.open_world(evaluate.flags(["--env", "calculator"]))
    assert type(module).__module__ == "calculator"


# ------------------------------------------------------------------------------------------- play


def episode_of(mini, task, world=None, **options):
    return Episode(task, world or Sandbox(mini), system_prompt="s", **options)


def test_play_does_not_wait_for_the_slowest_episode(mini):
    """One episode's first reply comes only after all others have ended."""
    ended, total, finished = threading.Semaphore(0), 9, []

    def generate(messages):
        if messages[1]["content"] == "0" and len(messages) == 2:
            for _ in range(total - 1):
                assert ended.acquire(timeout=20), "the others wait for the slow one"
        return CALL if len(messages) == 2 else ANSWER

    episodes = (episode_of(mini, {"query": str(i)}) for i in range(total))
    for episode in play(generate, episodes, concurrency=3):
        finished.append(episode.task["query"])
        ended.release()
        assert episode.stop == "answer" and episode.turns == 2
    assert finished[-1] == "0" and len(finished) == total


def test_a_refused_request_ends_one_play_and_a_server_that_is_down_ends_the_run(mini):
    def generate(messages):
        said = {"full": runtime.Refused("status 400: no room", "context"),
                "bad": runtime.Refused("status 400: a policy"), "down": ChatError("status 500")}
        if messages[1]["content"] in said:
            raise said[messages[1]["content"]]
        return ANSWER

    episodes = [episode_of(mini, {"query": query}) for query in ("full", "bad", "good")]
    stops = {episode.task["query"]: episode.stop for episode in play(generate, episodes)}
    assert stops == {"full": "context", "bad": "refused", "good": "answer"}
    assert episodes[1].refusal == "status 400: a policy"
    episodes = [episode_of(mini, {"query": query}) for query in ("down", "good", "late")]
    kept = play(generate, episodes, concurrency=2)
    assert next(kept) is episodes[1], "what played beside it is kept"
    with pytest.raises(ChatError, match="status 500"):
        list(kept)


def replies(text):
    """Replies with as many calls as the query says, then with the answer."""
    asked = int(re.search(r"user\n(\d+)", text)[1])
    return (CALL if text.count("<tool_response>") < asked else ANSWER) + "<|im_end|>"


def numbered(mini, count):
    return [episode_of(mini, {"id": str(i), "query": str(i % 5)}) for i in range(count)]


def test_a_free_place_in_the_engine_is_filled_at_once(mini):
    engine = Scripted(replies)
    done = list(engine.play(numbered(mini, 20), concurrency=4))
    assert len(done) == 20 and all(episode.stop == "answer" for episode in done)
    said = [len(reply) for _, reply, _ in engine.asked]
    longest = 5 * max(said)  # the last episode to start may play on alone
    assert engine.steps < sum(said) / 4 + longest, "a free place is filled in the next step"


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_an_episode_is_the_tokens_of_its_messages_and_of_what_was_said(mini, end, slow):
    """Also where a reply ends by a stop string, without its end token."""
    engine = Scripted(lambda text: replies(text).removesuffix("<|im_end|>") + end)
    (done,) = engine.play([episode_of(mini, {"id": "0", "query": "3"})], slow=slow)
    ids, said, _ = engine.asked[-1]
    assert done.turns == 4 and done.tokens == len(ids) + len(said)
    text = Letters().apply_chat_template(done.messages).removesuffix("\n<|im_start|>assistant\n")
    assert Letters().decode(ids + said) + ("" if end else "<|im_end|>") == text


def test_a_reply_has_a_seed_of_its_own_whoever_else_is_playing(mini):
    def seeds(concurrency, seed):
        engine = Scripted(replies)
        list(engine.play(numbered(mini, 10), concurrency=concurrency, seed=seed))
        return sorted((len(ids), params.seed) for ids, _, params in engine.asked)

    alone = seeds(1, SEED)
    assert seeds(10, SEED) == alone != seeds(1, SEED + 1)
    assert len({seed for _, seed in alone}) == len(alone) == 30


@pytest.mark.parametrize("limit, said, stop", [
    (10, CALL, "length"), (400, "so<|im_end|>", "format"), (len(ANSWER), ANSWER + " ", "answer")])
def test_a_reply_that_max_tokens_cut_is_told_from_one_without_the_format(mini, limit, said, stop):
    task = {"id": "0", "query": "?"}
    (done,) = Scripted(lambda text: said).play([episode_of(mini, task)], max_tokens=limit)
    assert (done.stop, done.turns, done.errors) == (stop, 1, int(stop != "answer"))


def test_an_episode_that_fills_the_context_stops_there(mini):
    engine = Scripted(lambda text: "x" * 500)
    (done,) = engine.play([episode_of(mini, {"id": "0", "query": "?"}, strict=False)], 300)
    assert (done.stop, done.tokens, done.answer) == ("context", 300, None)
    with pytest.raises(Mistake, match="raise --max-context"):
        list(engine.play([Episode({"id": "0", "query": "?"}, Sandbox(mini))], 300))


def test_a_slow_tool_holds_up_neither_engine_nor_others(mini):
    ended = threading.Event()

    class Slow:
        def call(self, name, arguments):
            assert ended.wait(20), "the others wait for the slow tool"
            return "late"

    slow = episode_of(mini, {"id": "slow", "query": "1"}, Slow())
    order = []
    for episode in Scripted(replies).play([slow, *numbered(mini, 4)], concurrency=2, slow=True):
        order.append(episode.task["id"])
        if len(order) == 4:
            ended.set()
    assert order[-1] == "slow" and slow.messages[-2]["content"].startswith("<tool_response>\nlate")


# -------------------------------------------------------------------------------------- processes


def plays_of(tasks):
    """Stands for an engine's plays, in a process of its own."""
    for task in tasks:
        if task == "bad":
            raise ValueError("a slip")
        if task == "slow":
            time.sleep(600)
        yield os.environ.get("CUDA_VISIBLE_DEVICES"), task


def shared(tasks, gpus, monkeypatch, tp=1):
    monkeypatch.setattr(runtime, "visible_gpus", lambda: gpus)
    return evaluate.in_processes(plays_of, tasks, SimpleNamespace(url=None, tp=tp))


def test_every_engine_has_its_gpus_and_a_share_of_the_tasks(monkeypatch):
    found = list(shared("abcd", ["2", "3", "6", "7"], monkeypatch, tp=2))
    assert sorted(found) == [("2,3", "a"), ("2,3", "c"), ("6,7", "b"), ("6,7", "d")]


def test_an_engine_that_fails_stops_the_run_and_loses_no_row_of_the_others(monkeypatch, capfd):
    rows, found = shared(["a", "bad", "c", "d"], ["0", "1"], monkeypatch), []
    with pytest.raises(SystemExit, match="stopped early"):
        found.extend(iter(lambda: next(rows), None))
    assert {task for _, task in found} >= {"a", "c"} and "a slip" in capfd.readouterr().err


def test_a_caller_that_stops_early_leaves_no_process_behind(monkeypatch):
    rows = shared(["a", "slow"], ["0", "1"], monkeypatch)
    assert next(rows)[1] == "a"
    rows.close()
    for child in multiprocessing.active_children():
        child.join(60)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_two_real_engines_give_the_table_of_one(tmp_path, trip, mini, tiny_model, monkeypatch):
    words = f"""--model m={tiny_model} --system-prompt short --max-turns 2 --max-tokens 24
                --max-context 600 --samples 3""".split()
    evaluate.main(command(tmp_path, trip, mini, *words))
    one = (tmp_path / "out" / "table.md").read_text()
    monkeypatch.setattr(runtime, "visible_gpus", lambda: ["0", "1"])  # the engines see none of them
    evaluate.main(command(tmp_path, trip, mini, *words, "--out", str(tmp_path / "two")))
    assert (tmp_path / "two" / "table.md").read_text() == one


# ----------------------------------------------------------------------------------------- report


def rows_of(trip, mini, wins, name="m"):
    """Records of judged episodes, the i-th successful if wins[i]."""
    task, plan, _ = trip
    world, records = Travel(mini), []
    for i, win in enumerate(wins):
        episode = Episode(task | {"id": str(i), "idx": i}, Sandbox(mini))
        episode.step(f"<think>.</think><answer>{itinerary(plan)}</answer>" if win else "no format")
        found, verdict, strict = world.verdict(episode)
        records.append(episode.record(name) | {
            "plan": found, "score": verdict, "strict": strict, "tokens": 7,
            "reward": world.reward(verdict, "sum")})
    return records


def plain(text):
    """A table without the blanks that align it."""
    return re.sub(" +", " ", text)


def test_the_table_sets_agents_side_by_side(trip, mini):
    played = {"before": rows_of(trip, mini, [1, 0, 0, 0] * 10),
              "after": rows_of(trip, mini, [1, 1, 1, 0] * 10)}
    text, report = table(played, Travel(mini).lines)
    after = report["after"]
    assert report["before"]["success"] == 0.25 and after["stop: format"] == 0.25
    assert after["reward"] == 3.75
    assert after["success, official"] == after["success, strict"] == after["success, easy"] == 0.75
    assert after["hack gauge: star - strict"] == 0 and after["valid_cost"] == 1
    gain, low, high = after["success minus before's"]
    assert gain == 0.5 and 0.3 < low < 0.5 < high < 0.7
    assert len(set(map(len, text.splitlines()))) == 1, "the columns are aligned"
    text = plain(text)
    assert "| success | 25.0 (12.5 to " in text
    assert "| success of after minus before | | +50.0 (+" in text
    assert "| episodes | 40 | 40 |" in text and "| tokens | 7.0 | 7.0 |" in text


def test_families_have_their_success_and_whether_the_tools_were_those_needed():
    def row(family, needs, called, success):
        return {"task": {"id": f"{family} {called}", "family": family, "needs": needs},
                "stop": "answer", "strict": success, "score": {"success": success},
                "calls": len(called), "tools": [{"name": name} for name in called]}

    rows = [row("both", ["search", "python"], ["Search", "Python", "Browse"], 1.0),
            row("both", ["search", "python"], ["Search"], 1.0),
            row("neither", [], [], 0.0), row("neither", [], ["Search"], 1.0)]
    told = evaluate.measure(rows, partial(Tools.lines, None))
    assert told["success, both"] == 1 and told["tools as needed, both"] == 0.5
    assert told["success, neither"] == told["tools as needed, neither"] == 0.5
    assert told["success"] == 0.75 and "success, lookup" not in told


def test_a_table_line_without_any_number_is_left_out(trip, mini):
    rows = rows_of(trip, mini, [1])
    unjudged = [{key: row[key] for key in ("task", "messages", "stop")} for row in rows]
    text, report = table({"judged": rows, "unjudged": unjudged}, Travel(mini).lines)
    assert "success, easy" in text and "success, hard" not in text and "valid_cuisine" not in text
    assert report["judged"]["success, hard"] is None
    text = plain(text)
    assert "| valid_cost | 100.0 | - |" in text and "| tokens | 7.0 | - |" in text


def test_pass_at_k_by_hand():
    assert evaluate.pass_at({"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 0, 1]}) == {
        "pass@1": pytest.approx((1 / 4 + 0 + 3 / 4) / 3),
        # of a's 6 pairs 3 miss; every pair of c's holds a success
        "pass@2": pytest.approx((1 - 3 / 6 + 0 + 1) / 3),
        "pass@4": pytest.approx(2 / 3)}
    assert list(evaluate.pass_at({"a": [1.0] * 6})) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert evaluate.pass_at({"a": [1], "b": [0, 0]}) == evaluate.pass_at({}) == {}


def test_the_interval_is_that_of_a_mean():
    low, high = evaluate.interval([0, 1] * 50)
    assert low == pytest.approx(0.5 - 0.098, abs=0.02) and high == pytest.approx(0.598, abs=0.02)
    assert evaluate.interval([1, 1, 1]) == pytest.approx([0.025 ** (1 / 3), 1])
    # 3 of 100 could fail all the same, and a difference may be of either sign
    assert evaluate.interval([0] * 100) == pytest.approx([0, 0.0362], abs=1e-4)
    assert evaluate.interval([0] * 100, -1) == pytest.approx([-0.0362, 0.0362], abs=1e-4)


def test_with_samples_success_is_of_plays_and_its_interval_of_tasks(trip, mini):
    """Of four plays each that all go one way the spread is that of 8 tasks, not of 32 plays."""
    rows = [row | {"task": row["task"] | {"sample": k}}
            for row in rows_of(trip, mini, [1, 0] * 4) for k in range(4)]
    rows[0] = rows[4] | {"task": rows[0]["task"]}  # but for one play
    text, report = table({"m": rows})
    assert report["m"]["success"] == report["m"]["pass@1"] == 15 / 32
    assert report["m"]["pass@2"] == report["m"]["pass@4"] == 0.5 and "pass@4" in text
    low, high = report["m"]["success interval"]
    assert [low, high] == evaluate.interval([0.75] + [0, 1] * 3 + [0])
    assert high - low > 0.5, "32 plays would give 0.35"


# ----------------------------------------------------------------------------------- command line


def test_an_agent_is_named_by_the_end_of_its_path():
    assert evaluate.named_paths(["b=/x/sft"]) == {"b": "/x/sft"}
    assert evaluate.named_paths(["out/a/sft", "Qwen/Qwen2"]) == {
        "sft": "out/a/sft", "Qwen2": "Qwen/Qwen2"}
    for specs in ([], ["a=x", "a=y"], ["out/a/sft", "out/b/sft"]):
        with pytest.raises(Mistake, match="--model needs"):
            evaluate.named_paths(specs)


def test_a_folder_with_other_settings_is_refused(tmp_path):
    chosen = {"model": "x", "top_p": 0.9, "reader": ("http://host", "m")}
    folder = evaluate.open_folder(tmp_path, "m", chosen)
    runtime.append_jsonl(folder / "episodes.jsonl", {"task": {"id": "a"}})
    assert evaluate.open_folder(tmp_path, "m", chosen) == folder
    with pytest.raises(Mistake, match="top_p was 0.9 and is 1.0"):
        evaluate.open_folder(tmp_path, "m", chosen | {"top_p": 1.0})
    assert json.loads((folder / "settings.json").read_text())["top_p"] == 0.9


def test_new_weights_under_the_same_path_are_another_model(tmp_path):
    """runtime.new_model writes config.json last, whenever a model is saved."""
    (tmp_path / "config.json").write_text("{}")
    before = evaluate.model_settings(str(tmp_path))
    assert evaluate.model_settings(str(tmp_path)) == before
    os.utime(tmp_path / "config.json", (1, 1))
    after = evaluate.model_settings(str(tmp_path))
    assert before["model"] == after["model"] and before["saved"] != after["saved"]
    assert evaluate.model_settings("a/name", "http://host/v1") == {"model": "a/name"}
    assert evaluate.model_settings(None) == {"model": None}


@pytest.mark.parametrize("words, more", [
    ("holds no task", ["--tasks", "empty.jsonl", "--model", "m"]),
    ("--model needs", ["--tasks", "tasks.jsonl"]), ("none.jsonl", ["--tasks", "none.jsonl"])])
def test_mistakes_of_the_user_are_reported_in_one_line(tmp_path, monkeypatch, trip, words, more):
    monkeypatch.chdir(tmp_path)
    write_jsonl("empty.jsonl", [])
    write_jsonl("tasks.jsonl", [trip[0]])
    with pytest.raises(SystemExit, match=words) as stop:
        evaluate.main(more)
    assert "\n" not in str(stop.value)


def command(tmp_path, trip, mini, *more):
    """The command line that plays the trip, with --out in tmp_path."""
    write_jsonl(tmp_path / "tasks.jsonl", [trip[0]])
    return ["--tasks", str(tmp_path / "tasks.jsonl"), "--database", str(mini.folder), "--out",
            str(tmp_path / "out"), *more]


def test_the_solver_plays_through_the_tools_and_wins_and_a_rerun_plays_nothing(
        tmp_path, trip, mini, capsys):
    words = command(tmp_path, trip, mini, "--agent", "solver", "--samples", "2")
    evaluate.main(words)
    file = tmp_path / "out" / "solver" / "episodes.jsonl"
    rows = read_jsonl(file)
    assert [row["task"].get("sample", 0) for row in rows] == [0, 1]
    assert all(row["strict"] == row["score"]["official"] == 1 and row["calls"] for row in rows)
    evaluate.main(words)
    assert read_jsonl(file) == rows and re.search(
        r"\| pass@2 +\| 100\.0 +\|", capsys.readouterr().out)
    task, *more = trip
    other = task | {"budget": task["budget"] + 1}
    words = command(tmp_path, (other, *more), mini, "--agent", "solver", "--samples", "2")
    with pytest.raises(SystemExit, match="other tasks with these ids were played"):
        evaluate.main(words)
    assert read_jsonl(file) == rows


def test_a_careless_solver_stands_beside_the_exact_one_and_fails_by_its_mistakes(
        tmp_path, trip, mini):
    evaluate.main(command(tmp_path, trip, mini, "--agent", "careless", "solver"))
    careless, solver = (read_jsonl(tmp_path / "out" / name / "episodes.jsonl")[0]
                        for name in ("careless", "solver"))
    assert solver["score"]["success"] == 1 and solver["tokens"] is None
    failed = [reason for passed, reason in careless["score"]["checks"].values() if passed is False]
    assert any("there is no 'Ritz'" in reason for reason in failed)
    assert any("day 2: dinner repeats" in reason for reason in failed)
    told = (tmp_path / "out" / "table.md").read_text()
    assert re.search(r"success of solver minus careless +\| +\| \+100\.0", told)


@pytest.mark.parametrize("line, reply", [
    ("SearchFlight Fort Walnut, South Maple, 2022-03-29", ("SearchFlight", {
        "departure": "Fort Walnut", "destination": "South Maple", "date": "2022-03-29"})),
    ("SearchCity", ("SearchCity", {"state": ""})),
    ("SearchCity a, b", ("SearchCity", {"state": "a, b"})),
    ("SearchFlight a", ("SearchFlight", {"departure": "a"})),
    ("Guess 5", ("Guess", {"n": 5})), ("Guess five", ("Guess", {"n": "five"})),
    ('SearchCity {"state": "x"}', ("SearchCity", {"state": "x"}))])
def test_a_typed_line_is_a_call(mini, line, reply):
    sandbox = Sandbox(mini)
    tools = {tool: sandbox.example(tool) for tool in sandbox.tools} | {"Guess": {"n": 1}}
    action = parse(evaluate.typed_reply(line, tools))
    assert (action.name, action.arguments) == reply
    assert evaluate.typed_reply("Searchcity x", tools) is None
    assert parse(evaluate.typed_reply("answer 7", tools)).text == "7"


def test_a_person_plays_whatever_is_typed_and_ctrl_c_ends_at_once(tmp_path, trip, mini):
    """In a terminal: every nonsense has a prompt after it; an ended play is kept, and judged."""
    words = command(tmp_path, trip, mini, "--agent", "person", "--samples", "2")
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, str(ROOT / "evaluate.py"), *words])

    def shown(until, press=b""):
        """What is shown up to this text. press: a key to press again after each second without."""
        said = b""
        while until not in said:
            if press and not select.select([terminal], [], [], 1)[0]:
                os.write(terminal, press)
            else:
                said += os.read(terminal, 1 << 16)
        return said.decode(errors="replace")

    assert "SearchFlight departure, destination, date" in shown(b"\r\n> ")
    for typed, said in ((b"", ""), (b"help", "<tool_call>"), (b"\xff what", "what'?"),
                        (b"SearchCity {", "no valid JSON"), (b"<nonsense>", "Error: "),
                        (b"SearchCity Nowhere", "Nowhere")):
        os.write(terminal, typed + b"\n")
        assert said in shown(b"\r\n> ")
    os.write(terminal, f"answer\n{itinerary(trip[1])}\nend\n".encode())
    assert "success 1, reward" in shown(b"\r\n> ")
    os.write(terminal, b"SearchCity x\n")
    shown(b"\r\n> ")
    began = time.monotonic()
    os.write(terminal, b"\x03")
    # again, because Python sees a signal just before the read that it is to interrupt after it
    shown(b"interrupted; repeat the command to continue", press=b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert time.monotonic() - began < 5
    (row,) = read_jsonl(tmp_path / "out" / "person" / "episodes.jsonl")
    assert row["score"]["success"] == 1 and row["calls"] == 1 and row["errors"] == 2


def test_a_pipe_can_play_and_its_end_is_told(tmp_path, trip, mini):
    words = command(tmp_path, trip, mini, "--agent", "person", "--samples", "2")
    done = subprocess.run([sys.executable, ROOT / "evaluate.py", *words], capture_output=True,
                          text=True, input="\nno\nDay 1: at home\nend\nanswer\nDay 1: more")
    assert done.stderr.rstrip().endswith("the input has ended; repeat the command to continue")
    (row,) = read_jsonl(tmp_path / "out" / "person" / "episodes.jsonl")
    assert row["answer"] == "Day 1: at home" and "success 0, reward 0" in done.stdout


def test_answers_that_the_rules_do_not_read_are_told_with_the_fix(tmp_path, trip, mini):
    words = command(tmp_path, trip, mini, "--agent", "solver", "--env", str(tmp_path / "odd.py"))
    (tmp_path / "odd.py").write_text("""if True:
        from sandbox import final_turn
        from travel import world
        from travel.world import flags

        class Odd(world.Travel):
            def solver(self, task):
                yield final_turn(".", "First we rest.\\nThen we rest.\\nDay 1: rest")

        def open_world(args):
            return Odd(world.open_world(args).database)
    """)
    evaluate.main(words)
    text = (tmp_path / "out" / "table.md").read_text()
    assert "of its answer lines were not read by the rules; use --reader URL=MODEL" in text


@pytest.fixture
def endpoint_url():
    """The address of an endpoint that calls a tool and answers. In between, a model called sloppy
    breaks the format, and a reply of one called cut meets a limit of tokens. It reports 50 tokens
    for each message, unless the model is called mute."""
    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = (CALL, ANSWER)[len(asked["messages"]) > 2]
            if asked["model"] == "org/sloppy" and len(asked["messages"]) == 4:
                text = "no protocol"
            cut = asked["model"] == "org/cut" and len(asked["messages"]) == 4
            text = "<think>And then I" if cut else text
            choice = {"index": 0, "finish_reason": "length" if cut else "stop",
                      "message": {"role": "assistant", "content": text}}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                    "choices": [choice]}
            if asked["model"] != "org/mute":
                body["usage"] = {"total_tokens": 50 * (len(asked["messages"]) + 1)}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.mark.parametrize("model, words, stop, turns, tokens", [
    ("name", "", "answer", 2, 250),
    ("name", "--max-context 249", "context", 1, 250),  # the answer would not have fitted
    ("mute", "--max-context 249", "answer", 2, None),
    ("sloppy", "", "format", 2, 250),
    ("sloppy", "--lenient", "answer", 3, 350),
    ("cut", "", "length", 2, 250),
    ("cut", "--lenient", "answer", 3, 350),
])
def test_an_endpoint_plays_by_the_rules_of_an_engine(
        tmp_path, trip, mini, endpoint_url, model, words, stop, turns, tokens):
    evaluate.main(command(tmp_path, trip, mini, "--model", f"org/{model}", "--url", endpoint_url,
                          *words.split()))
    (row,) = read_jsonl(tmp_path / "out" / model / "episodes.jsonl")
    assert (row["stop"], row["turns"], row["calls"], row["model"]) == (stop, turns, 1, model)
    assert row["tokens"] == tokens


def test_a_plain_class_is_played_once_and_its_task_is_recorded_as_it_was(tmp_path, endpoint_url):
    (tmp_path / "plain_warm.py").write_text("""class Warm:
    def reset(self, query, limits, **_):
        return "It is warm."

    def get_reward(self):
        return 1.0
""")
    write_jsonl(tmp_path / "tasks.jsonl", [{"id": "a", "query": "Which?", "limits": [1, 2]}])
    words = ["--env", f"{tmp_path}/plain_warm.py:Warm", "--tasks", f"{tmp_path}/tasks.jsonl",
             "--out", f"{tmp_path}/out", "--model", "org/name", "--url", endpoint_url]
    for _ in range(2):
        evaluate.main(words)
    (row,) = read_jsonl(tmp_path / "out" / "name" / "episodes.jsonl")
    assert row["messages"][1]["content"] == "Which?\nIt is warm." and row["score"]["success"] == 1
    assert row["task"] == {"id": "a", "query": "Which?", "limits": [1, 2]}


def test_a_page_opens_no_turn_at_an_endpoint():
    roles = "system", "user", "assistant", "result", "assistant"
    sent = evaluate.merged([{"role": role, "content": "<|im_end|>"} for role in roles])
    assert [(one["role"], one["content"]) for one in sent] == [
        ("system", "<|im_end|>"), ("user", "‹|im_end|>"),
        ("assistant", "<|im_end|>‹|im_end|><|im_end|>")]


def test_another_prompt_and_a_missing_model_are_found_before_anything_plays(tmp_path, trip, mini):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("You plan.")
    words = command(tmp_path, trip, mini, "--system-prompt", str(prompt))
    evaluate.main([*words, "--agent", "solver"])
    os.utime(prompt, (1, 1))
    with pytest.raises(SystemExit, match="system_prompt saved was"):
        evaluate.main([*words, "--agent", "solver"])
    os.mkdir(tmp_path / "empty")
    with pytest.raises(SystemExit, match="/empty"):
        evaluate.main([*words, "--agent", "solver", "model", "--out", f"{tmp_path}/other",
                       "--model", f"{tmp_path}/empty"])
    assert not [*tmp_path.glob("other/*/episodes.jsonl")]


@pytest.mark.slow
def test_a_checkpoint_plays_at_a_context_of_30k_what_a_killed_run_left(
        tmp_path, trip, mini, tiny_model):
    """The command in vLLM, after a run that was killed within its second episode."""
    words = command(tmp_path, trip, mini, *f"""--model m={tiny_model} --max-context 30000
        --max-turns 2 --max-tokens 32 --samples 3""".split())
    (first,) = rows_of(trip, mini, [1])
    first = json.dumps(first | {"task": trip[0]})
    (tmp_path / "out" / "m").mkdir(parents=True)
    (tmp_path / "out" / "m" / "episodes.jsonl").write_text(f"{first}\n{first[:99]}")
    evaluate.main(words)
    lines = (tmp_path / "out" / "m" / "episodes.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in lines[1:]]
    assert lines[0] == first and sorted(row["task"]["sample"] for row in played) == [1, 2]
    assert all(row["tokens"] > 1000 and row["turns"] in (1, 2) for row in played)
    report = json.loads((tmp_path / "out" / "m" / "scores.json").read_text())
    assert report["episodes"] == 3 and "| tokens" in (tmp_path / "out" / "table.md").read_text()
    with pytest.raises(SystemExit, match="temperature was 0.6 and is 1.0"):
        evaluate.main([*words, "--temperature", "1.0"])
