"""Question answering: scores, questions, an interrupted run, the tax table."""
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_retriever import Flaky, Recorder, answering

import qa_eval
from runtime import Mistake
from sandbox import Episode
from toolstar import retriever

SEED = int(os.environ.get("TEST_SEED", 0))


def ended(answer, golds, stop="answer"):
    """An episode that has ended."""
    episode = Episode({"id": "q", "query": "?", "golden_answers": golds}, None)
    episode.answer, episode.stop = answer, stop
    return episode


def read_rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# ---------------------------------------------------------------- score

def test_a_gold_that_normalizes_to_nothing_is_no_part_of_every_answer():
    scores = [qa_eval.qa_score(ended(answer, ["A"]))["sub_em"] for answer in ("A", "B", "Paris")]
    assert scores == [1, 0, 0]


@pytest.mark.parametrize("golds, read", [
    ('["a", "b"]', ["a", "b"]), ("['a' 'b']", ["a", "b"]), ([["a", "b"]], ["a", "b"]), ("a", ["a"]),
    (["a", None], ["a"]), (5, ["5"])])
def test_golden_answers_are_read_in_all_their_forms(golds, read):
    row = {"id": 1, "question": "?", "golden_answers": golds}
    assert qa_eval.load_question(row, "nq", "x")["golden_answers"] == read


@pytest.mark.parametrize("golds", [[None], None, float("nan"), [], "[]", [[]]])
def test_a_question_without_golden_answers_is_refused(golds):
    with pytest.raises(Mistake, match="golden_answers are needed"):
        qa_eval.load_question({"id": 1, "question": "?", "golden_answers": golds}, "nq", "x")


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
@pytest.mark.parametrize("answer", ["Hollin", None])
def test_an_episode_without_an_end_is_wrong_even_if_it_holds_the_answer(stop, answer):
    assert set(qa_eval.qa_score(ended(answer, ["Hollin"], stop)).values()) == {0}


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


@pytest.mark.parametrize("arguments", [
    None, [], "Hollin", {}, {"query": ""}, {"query": " "}, {"query": 3}, {"query": ["a"]},
    {"queries": "a"}, {"query": "a", "topk": 50}])
def test_bad_search_arguments_come_back_as_text(arguments):
    sandbox = qa_eval.SearchSandbox(Recorder())
    assert sandbox.call("Search", arguments).startswith("Error: Search takes one argument")
    assert sandbox.retriever.asked == []


def test_the_default_questions_can_be_answered_from_the_default_corpus():
    tasks = qa_eval.load_questions(qa_eval.command_flags([]))
    bm25 = retriever.BM25(Path(qa_eval.__file__).parent / "database" / "qa" / "corpus.jsonl")
    assert 40 <= len(bm25.documents) <= 60 <= len(tasks)
    world = qa_eval.normalize(" ".join(d["contents"] for d in bm25.documents))
    found = bm25.search([task["query"] for task in tasks], 5)
    for task, hits in zip(tasks, found, strict=True):
        text = qa_eval.normalize(" ".join(hit["document"]["contents"] for hit in hits))
        golds = [qa_eval.normalize(gold) for gold in task["golden_answers"]]
        assert {"yes", "no"} & set(golds) or any(gold in world for gold in golds), task
        # one search is enough for one hop
        assert "hop2" in task["id"] or any(gold in text for gold in golds), task


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


def test_a_subsample_is_the_same_every_time_and_of_each_set(tmp_path):
    flashrag(tmp_path, "bamboogle", "test", 125)
    flashrag(tmp_path, "musique", "dev", 30)
    words = ["--data", tmp_path, "--sets", "musique", "bamboogle", "--sample", "50"]
    first = load(*words)
    assert first == load(*words) != load(*words, "--seed", "1")
    assert Counter(task["set"] for task in first) == {"musique": 30, "bamboogle": 50}


@pytest.mark.parametrize("line, said", [
    ('{"id": 1, "question": "?"}', "questions.jsonl, record 2: id, question and golden"),
    ('{"id": 1, "question": "?", "golden_answers": []}', "record 2: id, question and golden"),
    ('{"id": 1, "question": 3, "golden_answers": "x"}', "record 2: id, question and golden"),
    ("[1]", "record 2: id, question and golden"),
    ('{"id": 0, "question": "?", "golden_answers": "x"}', "occurs twice"),
    ('{"id": ', "line 2: not JSON")])
def test_a_bad_question_is_named(tmp_path, line, said):
    good = '{"id": 0, "question": "?", "golden_answers": ["x"]}'
    (tmp_path / "questions.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(Mistake, match=said):
        load("--data", tmp_path)


@pytest.mark.parametrize("words, said", [
    (["--data", "EMPTY", "--model", "x"], "holds no question, of its own or of FlashRAG"),
    (["--model", "x", "--retriever", "EMPTY"], "meta.json is missing"),
    (["--model", "x", "--corpus", "EMPTY/none.jsonl"], "none.jsonl is missing"),
    (["--model", "a=x", "a=y"], "its own NAME"), ([], "its own NAME")])
def test_mistakes_of_the_user_are_reported_in_one_line(tmp_path, words, said):
    words = [word.replace("EMPTY", str(tmp_path)) for word in words]
    with pytest.raises(SystemExit, match=f"^qa_eval.py: .*{said}"):
        qa_eval.main([*words, "--out", str(tmp_path / "out")])


# ---------------------------------------------------------------- a whole run, with a scripted API

class Agent:
    """An OpenAI-compatible API: the model "good" searches once and knows all answers, others know
    half."""

    def __init__(self):
        self.golds = {task["query"]: task["golden_answers"][-1] for task in load()}
        self.seen = []

    def __call__(self, request):
        query, turn = request["messages"][1]["content"], len(request["messages"])
        self.seen.append((request["model"], query, turn))
        knows = request["model"] == "good" or len(query) % 2
        answer = self.golds[query] if knows else "no idea"
        text = f"<think>x</think><answer>no, wait</answer><answer>{answer}</answer>"
        if turn == 2:
            call = {"name": "Search", "arguments": {"query": query}}
            text = f"<think>x</think><tool_call>{json.dumps(call)}</tool_call>"
        message = {"role": "assistant", "content": text}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


@pytest.fixture
def agent(tmp_path):
    """A function that plays and prints the table; its .seen lists the requests."""
    api = Agent()
    with answering(api) as url:
        def play(*words):
            qa_eval.main(["--url", f"{url}/v1", "--out", str(tmp_path), *words])
        play.golds, play.seen = api.golds, api.seen
        yield play


@pytest.mark.slow
def test_two_models_side_by_side(agent, tmp_path, capsys):
    models = ["--model", "base=weak", "rl=good"]
    agent(*models)
    report = json.loads((tmp_path / "tax.json").read_text())
    weak = np.mean([len(query) % 2 for query in agent.golds])
    assert report["base"]["em"] == pytest.approx(weak)
    assert {report["rl"][key] for key in ("em", "f1", "calls")} == {1}
    assert {report["rl"][key] for key in ("missing", "turns", "context")} == {0}
    text = (tmp_path / "tax.md").read_text()
    assert text in capsys.readouterr().out
    assert "| rl |" in text.splitlines()[0] and "100.0 (94.4 to 100.0)" in text
    assert f"| minus base |  |  | +{100 * (1 - weak):.1f} (" in text
    rows = read_rows(tmp_path / "rl" / "episodes.jsonl")
    assert len(rows) == 64 and len({row["task"]["id"] for row in rows}) == 64
    assert rows[0]["model"] == "rl" and rows[0]["messages"][0]["content"] == qa_eval.QA_PROMPT
    asked = len(agent.seen)
    agent(*models)
    assert len(agent.seen) == asked == 4 * 64  # all was there: nothing is asked twice
    with pytest.raises(SystemExit, match="topk was 5 and is 3"):
        agent(*models, "--topk", "3")
    file = tmp_path / "rl" / "episodes.jsonl"
    file.write_text(file.read_text().replace('"query": "', '"query": "Once, ', 1))
    with pytest.raises(SystemExit, match="other tasks with these ids"):
        agent(*models)
    shutil.rmtree(tmp_path / "rl")
    agent("--model", "rl=good", "--topk", "3")
    assert len(agent.seen) == asked + 2 * 64


def test_a_retriever_that_dies_is_a_clear_stop_and_the_same_command_finishes(
        agent, tmp_path, monkeypatch):
    monkeypatch.setattr(retriever.Remote.__init__, "__defaults__", (2, 0.02))
    server, episodes = Flaky([200] * 20 + [500] * 1000), tmp_path / "good" / "episodes.jsonl"
    with answering(server) as url:
        # a request has at most two searches, so 20 do not answer all questions
        words = ["--model", "good", "--retriever", url, "--concurrency", "2"]
        with pytest.raises(SystemExit, match="^qa_eval.py: .*does not answer"):
            agent(*words)
        kept = episodes.read_text()
        finished = {row["task"]["query"] for row in read_rows(episodes)}
        assert 0 < len(finished) < 64
        with open(episodes, "a") as file:
            file.write('{"task": {"id": "qa/hop1-0')  # and a line torn by a kill
        server.script.clear()
        agent.seen.clear()
        agent(*words)
    assert episodes.read_text().startswith(kept)
    played = Counter(row["task"]["query"] for row in read_rows(episodes))
    assert played == dict.fromkeys(agent.golds, 1)
    assert not finished & {query for _, query, _ in agent.seen}


# ---------------------------------------------------------------- table

def records(verdicts):
    """verdicts: id -> (em, stop)"""
    return [{"task": {"id": i, "set": i.partition("/")[0]}, "stop": stop, "answer": "x", "calls": 2,
             "score": {"em": em, "sub_em": em, "f1": em}} for i, (em, stop) in verdicts.items()]


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
    counts = [report["other"][key] for key in ("context", "turns", "missing", "calls")]
    assert counts == [2, 1, 1, 2.0]
    assert "| small | 10 | 100.0 (69.2 to 100.0) | 90.0 (70.0 to 100.0) |" in text
    assert "| **average** | 100 | 50.0 (46.4 to 53.6) |" in text


def test_an_answer_without_text_is_missing():
    (row,) = records({"nq/a": (0.0, "answer")})
    assert qa_eval.summarise([row])["missing"] == 0
    assert qa_eval.summarise([row | {"answer": " "}])["missing"] == 1


def test_no_right_answer_in_fifty_still_has_an_interval():
    assert qa_eval.cell(0.0, np.zeros(9), 50) == "0.0 (0.0 to 7.1)"
    assert qa_eval.cell(0.0, np.zeros(9), 50, "+") == "+0.0 (-7.1 to +7.1)"


def test_bootstrap_intervals_have_the_binomial_width():
    scores = np.zeros((2, 500))
    scores[:, :200] = 1  # p = 0.4
    draws = qa_eval.bootstrap(scores, 2000, np.random.default_rng(SEED))
    assert draws.std(0) == pytest.approx([0.0219, 0.0219], rel=0.1)
    assert np.array_equal(draws[:, 0], draws[:, 1])  # models are compared on the same draw


# ---------------------------------------------------------------- a real engine

@pytest.mark.slow
def test_a_checkpoint_is_played_by_vllm(tiny_model, tmp_path):
    pytest.importorskip("vllm")
    qa_eval.main(["--model", f"tiny={tiny_model}", "--sample", "6", "--max-turns", "2", "--lenient",
                  "--max-context", "1024", "--max-tokens", "32", "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "tiny" / "episodes.jsonl")
    assert len(rows) == 6 and {row["stop"] for row in rows} <= {"turns", "context", "answer"}
    report = json.loads((tmp_path / "tax.json").read_text())["tiny"]
    assert report["em"] == 0 and report["turns"] + report["context"] + report["missing"] <= 6
