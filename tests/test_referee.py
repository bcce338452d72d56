"""Published agents are judged rightly: a model reads itineraries that the rules were not made for,
before or after they are played, and kept plays are judged anew without playing. No model is asked:
a scripted server plays and reads.
"""
import json
import os
import re
from types import SimpleNamespace

import pytest
from conftest import Scripted, endpoint

import evaluate
from format_plan import Reader, open_reader
from runtime import Mistake, read_jsonl, write_jsonl
from sandbox import PROMPTS
from travel.constraints import judge

READS = (PROMPTS / "itinerary.txt").read_text(encoding="utf-8")


@pytest.fixture
def cases(trip):
    """{a task's query: (task, answer, whether it succeeds)}: a plan that succeeds, and the same
    plan for a traveller who asks for cuisines that it does not have. The answer has the shape of
    those in the STAR paper's appendix F, a hotel on its first night only; a server reads it."""
    task, plan, city = trip
    wish = task["local_constraint"] | {"cuisine": ["French", "Indian", "Mexican", "Chinese"]}
    return {query: (task | {"id": query, "query": query, "local_constraint": wishes},
                    f"#### Day 1: March 18 - Travel to {city}\n| Evening | Check into "
                    f"accommodation - [{plan[0]['accommodation']}] |\n{query}", wins)
            for query, wishes, wins in (("good", task["local_constraint"], True),
                                        ("cuisine", wish, False))}


@pytest.fixture
def server(cases, trip):
    """(URL of a server that plays and reads, requests for a play, requests for a reading)"""
    plays, readings = [], []

    def reply(request):
        system, user = (message["content"] for message in request["messages"][:2])
        if system != READS:
            plays.append(user)
            return f"<think>.</think><answer>{cases[user][1]}</answer>"
        readings.append(request["model"])
        assert request["temperature"] == 0
        assert any(answer in user for _, answer, _ in cases.values())
        return json.dumps(trip[1])

    with endpoint(reply) as (url, _):
        yield url, plays, readings


def right(rows, cases):
    """Whether the verdicts are those that the cases are made for, by star and by official."""
    for row in rows:
        wins = cases[row["task"]["id"]][2]
        checks = {name: passed for name, (passed, _) in row["score"]["checks"].items()}
        failed = [name for name, passed in checks.items() if passed is False]
        if (row["score"]["success"], row["score"]["official"]) != (wins, wins) or failed != (
                [] if wins else ["valid_cuisine"]):
            return False
    return len(rows) == len(cases)


def test_two_readers_on_the_same_plays_are_one_table(server, cases, mini, tmp_path, capsys):
    url, plays, readings = server
    write_jsonl(tmp_path / "tasks.jsonl", [task for task, *_ in cases.values()])
    (tmp_path / "theirs.txt").write_text("Plan the trip.")
    words = ["--model", "m", "--url", url, "--tasks", str(tmp_path / "tasks.jsonl"), "--database",
             str(mini.folder), "--system-prompt", str(tmp_path / "theirs.txt"), "--out",
             str(tmp_path)]
    file = tmp_path / "m" / "episodes.jsonl"

    evaluate.main(words)
    said = capsys.readouterr().out
    assert said.index("--reader policy") < said.index("| success"), "it is said before the plays"
    assert len(plays) == len(cases) and not readings
    by_rules = read_jsonl(file)
    assert not any(row["score"]["success"] for row in by_rules), "the rules are for our format"

    evaluate.main([*words, "--reader", f"{url}=reader"])
    assert len(plays) == len(cases) and readings == ["reader"] * len(cases)
    rows = read_jsonl(file)
    assert right(rows, cases) and [row["messages"] for row in rows] == [
        row["messages"] for row in by_rules]
    table = (tmp_path / "table.md").read_text()
    assert re.search(r"m by rules +\| m ", table)
    assert re.search(r"\| success +\| 0\.0 .*\| 50\.0 ", table)

    evaluate.main([*words, "--reader", "policy"])
    assert len(plays) == len(cases) and readings[len(cases):] == ["m"] * len(cases)
    assert right(read_jsonl(file), cases)
    assert [*read_jsonl(file)[0]["others"]] == ["rules", "reader"]

    evaluate.main(words)  # back, and nobody is asked
    assert len(plays) == len(cases) and len(readings) == 2 * len(cases)
    for before, after in zip(by_rules, read_jsonl(file), strict=True):
        assert after.items() >= before.items() and [*after["others"]] == ["reader", "policy"]
    with pytest.raises(SystemExit, match="max_turns"):
        evaluate.main([*words, "--max-turns", "3", "--reader", "policy"])
    os.utime(tmp_path / "theirs.txt", (1, 1))  # it was edited
    with pytest.raises(SystemExit, match="system_prompt saved"):
        evaluate.main(words)


def test_an_engine_reads_its_own_answers_and_is_asked_twice(cases, trip, mini):
    (task, answer, _), *_ = cases.values()
    plan = json.dumps(trip[1])

    def script(text):
        if "unreadable" in text:
            return "I cannot.<|im_end|>"
        return ("Well ..." if text.count("<|im_start|>assistant") < 2 else plan) + "<|im_end|>"

    texts = {"a": answer, "b": "unreadable", "c": None, "d": "much too long" * 99}
    episodes = [SimpleNamespace(task=task | {"id": name}, answer=text)
                for name, text in texts.items()]
    reader = Reader()
    read = reader.read_by(lambda readings: Scripted(script).play(readings, max_context=9000),
                          episodes, lambda messages: "much too long" not in messages[1]["content"])
    assert sorted(episode.task["id"] for episode in read) == ["a", "b", "c", "d"]
    scores = {name: judge(task, text, mini, reader)[1] for name, text in texts.items()}
    assert scores["a"]["success"] == scores["a"]["official"] == 1
    assert scores["a"]["formatter failed"] == 0 and scores["a"]["formatter tokens"] > len(plan)
    assert scores["b"]["formatter failed"] == scores["d"]["formatter failed"] == 1
    assert "formatter failed" not in scores["c"] and scores["c"]["success"] == 0


def test_only_a_model_that_plays_can_read_as_the_policy(trip, tmp_path, mini):
    write_jsonl(tmp_path / "tasks.jsonl", [trip[0]])
    with pytest.raises(SystemExit, match="policy"):
        evaluate.main(["--agent", "model", "solver", "--model", "m", "--url", "http://host/v1",
                       "--reader", "policy", "--tasks", str(tmp_path / "tasks.jsonl"),
                       "--database", str(mini.folder), "--out", str(tmp_path)])
    assert not list(tmp_path.glob("*/episodes.jsonl"))
    with pytest.raises(Mistake, match="policy"):  # as a trainer's flags would open it
        open_reader(SimpleNamespace(reader="policy"))
