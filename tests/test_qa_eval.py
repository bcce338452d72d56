"""Question answering: scores, questions, an interrupted run, the tax table."""
import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import SEED, answering, endpoint
from test_retriever import Flaky, Recorder

import qa_eval
from sandbox import Episode
from toolstar import retriever


def ended(answer, golds, stop="answer"):
    """An episode that has ended."""
    episode = Episode({"id": "q", "query": "?", "golden_answers": golds}, None)
    episode.answer, episode.stop = answer, stop
    return episode


def read_rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# ---------------------------------------------------------------- score

def test_exact_match_gives_the_verdicts_of_the_hand_made_table():
    pairs = read_rows(Path(__file__).parent / "qa_em_pairs.jsonl")
    assert len(pairs) >= 200
    for answer, golds, verdict in pairs:
        same = any(qa_eval.normalize(answer) == qa_eval.normalize(gold) for gold in golds)
        assert same == bool(verdict), (answer, golds)
        # through the episode, an answer without text is missing, whatever it is normalised to
        em = qa_eval.qa_score(ended(answer, golds))["em"]
        assert em == bool(verdict and answer.strip()), (answer, golds)


@pytest.mark.parametrize("answer, golds, em, sub_em, f1", [
    ("the city of Hollin", ["Hollin"], 0, 1, 2 * (1 / 3) / (1 / 3 + 1)),  # 1 word of 3; all found
    ("Odda Brine", ["Brine", "Odda the Brine"], 1, 1, 1),
    ("Bri", ["Brine"], 0, 0, 0),
    ("red red blue", ["red blue blue"], 0, 0, 2 / 3),
    ("yes it is", ["yes"], 0, 1, 0),  # words of a verdict count only as a whole
    ("Yes.", ["yes"], 1, 1, 1),
    ("", ["x"], 0, 0, 0),
])
def test_scores_on_textbook_cases(answer, golds, em, sub_em, f1):
    score = qa_eval.qa_score(ended(answer, golds))
    assert score == {"em": em, "sub_em": sub_em, "f1": pytest.approx(f1)}


@pytest.mark.parametrize("stop", ["turns", "context", "format", ""])
def test_an_episode_without_an_end_is_wrong_even_if_it_holds_the_answer(stop):
    assert set(qa_eval.qa_score(ended("Hollin", ["Hollin"], stop)).values()) == {0}


CALL = '<think>x</think><tool_call>{"name": "Search", "arguments": {"query": "q"}}</tool_call>'


@pytest.mark.parametrize("reply, kind, text", [
    ("<think>x</think><answer>A</answer>", "answer", "A"),
    ("<think>x</think><answer>A</answer> or rather <answer>B</answer>", "answer", "B"),
    ("<think>x</think><answer>A</answer><answer>B", "error", None),  # the last one is not closed
    (CALL + "<answer>A</answer>", "error", None),
    (CALL + "<answer>A</answer><answer>B</answer>", "error", None),
    ("Hollin", "error", None),
])
def test_of_several_answers_the_last_one_counts(reply, kind, text):
    action = qa_eval.parse_qa(reply)
    assert action.kind == kind and (text is None or action.text == text)


# ---------------------------------------------------------------- play

def test_a_question_cannot_call_travel_tools():
    sandbox = qa_eval.SearchSandbox(Recorder())
    episode = Episode({"id": "q", "query": "?"}, sandbox, 9, qa_eval.QA_PROMPT, strict=False,
                      parse=qa_eval.parse_qa)
    call = '<think>x</think><tool_call>{"name": "%s", "arguments": {"%s": "Hollin"}}</tool_call>'
    said = episode.step(call % ("SearchFlight", "departure"))
    assert said == ("Error: there is no tool SearchFlight. "
                    "The only tool is Search with one argument, query.")
    assert episode.stop == "" and episode.calls == 0 and sandbox.retriever.asked == []
    assert "SearchFlight" not in qa_eval.QA_PROMPT
    said = episode.step(call % ("Search", "query")).splitlines()
    assert said[0] == "Doc 1(Title: Hollin) passage 0" and len(said) == 5 and episode.calls == 1


# ---------------------------------------------------------------- data

def flashrag(folder, name, split, count):
    path = folder / name / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"{split}_{i}", "question": f"{name} {i}?", "golden_answers": [str(i)],
             "metadata": {}} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(*words):
    return qa_eval.load_questions(qa_eval.command_flags(list(map(str, words))))


def test_flashrag_sets_are_read_from_test_or_else_dev_and_their_sizes_are_checked(tmp_path, capsys):
    flashrag(tmp_path, "bamboogle", "test", 125)
    flashrag(tmp_path, "musique", "dev", 30)
    flashrag(tmp_path, "nq", "dev", 7)
    flashrag(tmp_path, "nq", "test", 9)
    flashrag(tmp_path, "triviaqa", "train", 3)
    tasks = load("--data", tmp_path)
    counts = Counter(task["set"] for task in tasks)
    assert counts == {"nq": 9, "triviaqa": 3, "musique": 30, "bamboogle": 125}
    assert tasks[0] == {"id": "nq/test_0", "set": "nq", "query": "nq 0?", "golden_answers": ["0"]}
    said = capsys.readouterr().err
    assert "musique/dev.jsonl has 30 questions" in said and "nq/test.jsonl has 9" in said
    assert "bamboogle" not in said and "popqa has no test, dev or train.jsonl" in said
    assert sum(n for _, n in qa_eval.SETS.values()) == 51713


# ---------------------------------------------------------------- a whole run, with a scripted API

def test_a_retriever_that_dies_is_a_clear_stop_and_the_same_command_finishes(tmp_path, monkeypatch):
    monkeypatch.setattr(retriever.Remote.__init__, "__defaults__", (2, 0.02))
    golds = {task["query"]: task["golden_answers"][-1] for task in load()}

    def reply(request):
        """Search once, then answer."""
        query = request["messages"][1]["content"]
        if len(request["messages"]) > 2:
            return f"<think>x</think><answer>{golds[query]}</answer>"
        call = {"name": "Search", "arguments": {"query": query}}
        return f"<think>x</think><tool_call>{json.dumps(call)}</tool_call>"

    server, episodes = Flaky([200] * 20 + [500] * 1000), tmp_path / "good" / "episodes.jsonl"
    with answering(server) as found, endpoint(reply) as (url, asked):
        # a request has at most two searches, so 20 do not answer all questions
        words = ["--url", url, "--out", str(tmp_path), "--model", "good", "--retriever", found,
                 "--concurrency", "2"]
        with pytest.raises(SystemExit, match="^qa_eval.py: .*does not answer"):
            qa_eval.main(words)
        kept = episodes.read_text()
        finished = {row["task"]["query"] for row in read_rows(episodes)}
        assert 0 < len(finished) < 64
        with open(episodes, "a") as file:
            file.write('{"task": {"id": "qa/hop1-0')  # and a line torn by a kill
        server.script.clear()
        asked.clear()
        qa_eval.main(words)
    assert episodes.read_text().startswith(kept)
    played = Counter(row["task"]["query"] for row in read_rows(episodes))
    assert played == dict.fromkeys(golds, 1)
    assert not finished & {request["messages"][1]["content"] for request in asked}


# ---------------------------------------------------------------- table

def records(verdicts):
    """verdicts: id -> (em, stop)"""
    return [{"task": {"id": i, "set": i.partition("/")[0]}, "stop": stop, "answer": "x", "calls": 2,
             "strict": em, "reward": em, "turns": 3, "tokens": 9, "score": {
                 "em": em, "sub_em": em, "f1": em, "success": em}}
            for i, (em, stop) in verdicts.items()]


def test_the_average_is_over_sets_and_failures_are_counted_apart(tmp_path):
    base = {f"{name}/{i}": (float(name == "small"), "answer")
            for name, count in (("big", 90), ("small", 10)) for i in range(count)}
    other = base | {"big/0": (1.0, "answer"), "big/1": (0.0, "context"), "big/2": (0.0, "context"),
                    "big/3": (0.0, "turns"), "small/0": (0.0, "format")}
    args = qa_eval.command_flags(["--out", str(tmp_path), "--seed", str(SEED)])
    text = qa_eval.tax_table(args, {"base": records(base), "other": records(other)})
    report = json.loads((tmp_path / "tax.json").read_text())
    assert report["base"]["em"] == 0.5  # not 0.1, the mean over questions
    assert report["other"]["em"] == pytest.approx((1 / 90 + 9 / 10) / 2)
    counts = [report["other"][f"stop: {stop}"] for stop in ("context", "turns", "format")]
    assert counts == [0.02, 0.01, 0.01]
    assert "base: 50.0 (46.4 to 53.6) in the mean of the sets" in text
    assert ", minus base: -4.4 (-1" in text
