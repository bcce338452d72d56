"""Endpoints: refusals, full contexts, limits, thoughts, restarts."""
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import styles
from conftest import SEED

import evaluate
import grpo
from format_plan import COSTS, Reader, itinerary, parse_plan
from runtime import (
    ChatError,
    NoRoom,
    Refused,
    chat,
    read_jsonl,
    with_thought,
    write_jsonl,
)
from toolstar.scores import ask_judge
from travel.constraints import SCORES
from travel.world import Travel, load_task

CALL = '<tool_call>{"name": "SearchCity", "arguments": {"state": "x"}}</tool_call>'
ANSWER = "<answer>done</answer>"
HELLO = [{"role": "user", "content": "Hello there"}]
FULL = [
    (400, "prompt is too long: 200251 tokens > 200000 maximum"),
    (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)"),
    (400, "input token count exceeds the maximum number of tokens"),
    (422, "`inputs` must have less than 8193 tokens. Given: 9000"),
    (422, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 and 512"),
    (400, "Input is too long for requested model."),
    (400, "The prompt is longer than the maximum model length of 32768"),
    (400, "too many tokens: total number of tokens in the prompt cannot exceed 4081"),
    (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"),
    (400, "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum "
          "context length is 2048 tokens"),
    (400, "the request exceeds the available context size"),
    (400, "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
    (400, "Prompt contains 40000 tokens, too large for model with 32768 maximum context length"),
    (400, "This model's maximum prompt length is 131072 but the request contains 537812 tokens."),
    (400, "Invalid request: Your request exceeded model token limit: 8192"),
    (400, "Range of input length should be [1, 30720]"), (400, "Prompt exceeds max length"),
    (400, "Please reduce the length of the messages or completion."),
    (413, '{"error": {"code": "context_length_exceeded"}}')]
FILTERS = [(400, "The response was filtered: in this context the prompt violates the policy"),
           (403, "flagged by moderation"), (451, "not in your country"), (422, "bad role"),
           (400, "too many tokens per minute"), (404, "no such conversation"),
           (429, "Request too large for m on tokens per min: Limit 30000, Requested 31000")]


def said(content, finish="stop", tokens=50, **message):
    """A chat completion; content None is null."""
    choice = {"finish_reason": finish, "message": {"role": "assistant", "content": content}
              | message}
    return 200, {"choices": [choice], "usage": {"total_tokens": tokens}}


def opened(port, answer):
    """Start a server that answers by answer(request's body) -> (status, JSON or text)."""
    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self):
            status, body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Retry-After-Ms", "20")
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # as many may come at once

    server = Server(("127.0.0.1", port), Endpoint)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.fixture
def serve():
    """serve(answer) -> (address, bodies of the requests so far); see opened()."""
    servers = []

    def start(answer):
        asked = []
        servers.append(opened(0, lambda body: asked.append(body) or answer(body)))
        return f"http://127.0.0.1:{servers[-1].server_port}/v1", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def play(body):
    """Reply with a call, then with the answer."""
    return said(f"<think>.</think>{(CALL, ANSWER)[len(body['messages']) > 2]}",
                tokens=50 * len(body["messages"]) + 50)


def but(text, *found):
    """An endpoint that plays, except the plays whose query holds the text: found, one a turn."""
    def answer(body):
        if text not in body["messages"][min(1, len(body["messages"]) - 1)]["content"]:
            return play(body)  # a greeting, too
        return found[min(len(body["messages"]) // 2, len(found)) - 1]
    return answer


@pytest.fixture
def run(tmp_path, trip, mini, capsys):
    """run(url, *words, n) -> ({id: row}, scores): evaluate.py on n copies of the trip, whose
    queries end with their numbers."""
    def start(url, *words, n=4):
        tasks = [trip[0] | {"id": f"t{i}", "query": f"Plan it. #{i}#"} for i in range(n)]
        write_jsonl(tmp_path / "tasks.jsonl", tasks)
        evaluate.main(["--tasks", str(tmp_path / "tasks.jsonl"), "--database", str(mini.folder),
                       "--out", str(tmp_path / "out"), "--model", "m", "--url", url, *words])
        rows = read_jsonl(tmp_path / "out" / "m" / "episodes.jsonl")
        assert len({row["task"]["id"] for row in rows}) == len(rows) == n
        assert "| success " in capsys.readouterr().out
        scores = json.loads((tmp_path / "out" / "m" / "scores.json").read_text())
        return {row["task"]["id"]: row for row in rows}, scores
    return start


# --------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize("found", [
    *FILTERS, said(None, "length"), said(None, "length", reasoning_content="I think"),
    said("So", "content_filter"), said("So", "sensitive"),
    said("<think>.</think>", tool_calls=[{"function": {"name": "x"}}]),
    said(None, refusal="I cannot help")], ids=lambda found: str(found)[:60])
def test_a_refused_play_is_counted_and_the_others_are_played(serve, run, found):
    url, asked = serve(but("#2#", found))
    rows, scores = run(url)
    assert [row["stop"] for row in rows.values()].count("answer") == 3
    assert (rows["t2"]["stop"], rows["t2"]["turns"]) == ("refused", 0)
    assert rows["t2"]["refusal"].startswith(url) and rows["t2"]["score"]["success"] == 0
    assert (scores["stop: refused"], scores["stop: answer"], scores["episodes"]) == (0.25, 0.75, 4)
    before = len(asked)
    assert run(url)[0] == rows and len(asked) == before, "a rerun asks for nothing"


def test_a_play_may_be_refused_later_and_keeps_its_turns(serve, run):
    rows, _ = run(serve(but("#1#", said(f"<think>.</think>{CALL}"), (400, "filtered")))[0])
    assert (rows["t1"]["stop"], rows["t1"]["turns"], rows["t1"]["calls"]) == ("refused", 1, 1)


@pytest.mark.parametrize("found", [
    said(""), said(None), said(" \n"), (200, {"error": {"message": "flagged"}}), (200, "<html>"),
    (200, "[" * 100_000), (200, {"choices": [7]}), said([{"type": "text"}]), (500, "no"),
    (502, "no"), said("<think>I th", "error"), said("<think>I th", "abort")],
    ids=lambda found: str(found)[:60])
def test_a_request_without_a_usable_reply_counts_as_refused(serve, found):
    url, _ = serve(lambda body: found if "there" in body["messages"][0]["content"] else play(body))
    with pytest.raises(Refused, match=rf"^{url}: .*flagged" if "flagged" in str(found) else url):
        chat(url, "m", HELLO, retries=1)


def test_an_endpoint_that_has_worked_is_waited_for(serve, monkeypatch):
    url, asked = serve(lambda body: (503, "loading") if len(asked) in down else said("a"))
    down = range(2, 6)
    assert [chat(url, "m", HELLO, retries=0) for _ in "ab"] == ["a", "a"] and len(asked) == 6
    monkeypatch.setattr("runtime.PATIENCE", 0.01)
    down = range(999)
    with pytest.raises(ChatError, match="loading"):
        chat(url, "m", HELLO, retries=0)


def test_a_request_that_gets_429_for_good_while_others_are_answered_is_refused(
        serve, monkeypatch):
    monkeypatch.setattr("runtime.PATIENCE", 0.01)
    url, _ = serve(lambda body: (429, "slow down") if "there" in str(body) else said("a"))
    chat(url, "m", [{"role": "user", "content": "Hi"}])
    with pytest.raises(Refused, match="slow down"):
        chat(url, "m", HELLO, retries=0)


def test_a_full_quota_is_reported_and_not_counted_as_a_refusal(serve):
    url, _ = serve(lambda body: (429, "insufficient_quota") if "there" in str(body)
                   else play(body))
    with pytest.raises(ChatError, match="insufficient_quota") as failure:
        chat(url, "m", HELLO, retries=1)
    assert not isinstance(failure.value, Refused)


@pytest.mark.parametrize("n, concurrency, most", [(4, 64, 4), (40, 4, 12), (40, 16, 32)])
@pytest.mark.parametrize("found", [(400, "no System role"), (401, "key expired"),
                                   (404, "no model m"), said(None, "length")])
def test_an_endpoint_that_refuses_every_play_stops_the_run_with_its_words(
        serve, run, tmp_path, found, n, concurrency, most):
    url, asked = serve(lambda body: found)
    words = found[1] if isinstance(found[1], str) else "cut the thought short"
    with pytest.raises(SystemExit, match=rf"{url}.*{words}"):
        run(url, "--concurrency", str(concurrency), n=n)
    assert not (tmp_path / "out" / "m" / "episodes.jsonl").exists(), "the next run plays all"
    assert found[0] in (401, 404) or len(asked) <= most


def test_a_rerun_with_one_refused_play_left_ends(serve, run, tmp_path):
    url, _ = serve(but("#3#", (400, "filtered")))
    run(url)
    file = tmp_path / "out" / "m" / "episodes.jsonl"
    write_jsonl(file, [row for row in read_jsonl(file) if row["stop"] != "refused"])
    assert run(url)[0]["t3"]["stop"] == "refused"


@pytest.mark.parametrize("found", [(400, "quota used up"), (403, "key expired")])
def test_plays_are_not_kept_once_an_endpoint_refuses_everything(
        serve, run, tmp_path, found):
    count = iter(range(1000))
    url, _ = serve(lambda body: play(body) if next(count) < 20 else found)
    with pytest.raises(SystemExit, match=found[1]):
        run(url, "--concurrency", "1", n=30)
    rows = read_jsonl(tmp_path / "out" / "m" / "episodes.jsonl")
    assert [row["stop"] for row in rows] == ["answer"] * 10
    url, _ = serve(play)
    assert {row["stop"] for row in run(url, n=30)[0].values()} == {"answer"}


# ------------------------------------------------------------------------------- contexts, limits

@pytest.mark.parametrize("status, words", FULL)
def test_a_full_context_is_recognised_by_what_the_server_says(serve, status, words):
    url, asked = serve(lambda body: (status, words))
    with pytest.raises(NoRoom):
        chat(url, "m", HELLO, max_tokens=9)
    assert len(asked) == 1


@pytest.mark.parametrize("status, words", FILTERS)
def test_other_refusals_are_not_taken_for_a_full_context(serve, status, words):
    url, _ = serve(lambda body: (status, words) if "there" in str(body) else play(body))
    with pytest.raises(Refused) as refused:
        chat(url, "m", HELLO)
    assert not isinstance(refused.value, NoRoom)


@pytest.mark.parametrize("words, limit, stop", [
    ("no", 4199, "context"), ("no", 4201, "refused"), ("content_filter", 4199, "refused")])
def test_a_full_context_is_recognised_by_what_was_sent(serve, run, words, limit, stop):
    url, _ = serve(but("#0#", said(f"<think>.</think>{CALL}", tokens=104), (400, words)))
    rows, _ = run(url, "--max-tokens", "4096", "--max-context", str(limit))
    assert (rows["t0"]["stop"], rows["t0"]["tokens"], rows["t1"]["stop"]) == (stop, 104, "answer")


def test_a_server_is_sent_the_limit_by_the_name_that_it_asks_for(serve):
    url, asked = serve(lambda body: (400, "Unsupported parameter: 'max_tokens'. Use "
                                     "'max_completion_tokens' instead.")
                       if "max_tokens" in body else play(body))
    for _ in range(3):
        assert ANSWER in chat(url, "m", [*HELLO] * 3, max_tokens=7)
    assert [body.get("max_tokens") for body in asked] == [7, None, None, None]
    assert [body.get("max_completion_tokens") for body in asked] == [None, 7, 7, 7]


@pytest.mark.parametrize("words, limit", [("", 4096), ("--max-tokens 0", None)])
def test_the_limit_of_a_reply_can_be_left_out(serve, run, words, limit):
    url, asked = serve(play)
    run(url, *words.split(), n=1)
    assert {body.get("max_tokens") for body in asked} == {limit}


# --------------------------------------------------------------------------------------- thoughts

@pytest.mark.parametrize("text, thought, whole", [
    (f"I think so.\n</think>\n\n{CALL}", None, f"<think>I think so.\n</think>\n\n{CALL}"),
    (CALL, "I think so.", f"<think>I think so.</think>\n{CALL}"),
    (CALL, "<think>\nI think so.</think>\n", f"<think>\nI think so.</think>\n{CALL}"),
    (f"b</think>{CALL}", "a ", f"<think>ab</think>{CALL}"),
    (f"<think>b</think>{CALL}", "a", f"<think>b</think>{CALL}"),
    (CALL, None, CALL), (CALL, "", CALL), (CALL, {"no": "text"}, CALL)])
def test_a_separate_thought_is_put_before_the_reply(text, thought, whole):
    assert with_thought(text, thought) == whole


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", None])
def test_separate_thoughts_and_those_without_an_opening_tag_keep_the_format(serve, run, name):
    def answer(body):
        text = (CALL, ANSWER)[len(body["messages"]) > 2]
        return said(text, **{name: "So."}) if name else said(f"So.\n</think>\n\n{text}")

    url, asked = serve(answer)
    rows, scores = run(url)
    assert scores["replies that break the format"] == 0 and scores["stop: answer"] == 1
    assert rows["t0"]["messages"][2]["content"].startswith("<think>So.")
    assert asked[-1]["messages"][2]["content"].startswith("<think>So."), "it is sent back, too"


def test_a_begun_message_keeps_its_own_thought(serve):
    url, _ = serve(lambda body: said("so.</think><answer>1</answer>", reasoning="no"))
    begun = [*HELLO, {"role": "assistant", "content": "<think>I think"}]
    assert chat(url, "m", begun) == "so.</think><answer>1</answer>"


def test_a_judge_may_think(serve):
    url, _ = serve(lambda body: said("Correct.", reasoning_content="Incorrect? No."))
    task = {"golds": ["1"], "query": "?"}
    assert ask_judge(lambda messages: chat(url, "m", messages), task, "1")[0] == "correct"


# -------------------------------------------------------------------------------------- formatters

@pytest.fixture(scope="module")
def answers(mini):
    """[(task, answer, plan)]: three versions of a solver's itinerary for each of 20 tasks."""
    found = []
    for i, (task, plan) in enumerate(styles.solved(mini, 20, "answers")):
        for note in range(3):
            text = f"{itinerary(plan)}\nNote {i}.{note}"
            found.append((load_task(task | {"id": f"t{i}-{note}"}), text,
                          parse_plan(text, task, mini)))
    return found


def formatter(answers):
    """answer(body) of a formatter that reads these answers; also what it has read so far."""
    plans, read = {text: json.dumps(plan) for _, text, plan in answers}, []

    def answer(body):
        text = body["messages"][-1]["content"].partition("Itinerary:\n")[2]
        if text in plans:
            read.append(text)
        return said(plans.get(text, "Hello."))
    return answer, read


def judged(answers, mini, reader=None):
    """The samples of grpo.py that end in these answers, judged as an update's."""
    world, samples = Travel(mini, reader=reader), []
    for number, (task, text, _) in enumerate(answers):
        episode = world.episode(task, 0, SimpleNamespace(
            failure_rate=0.0, max_turns=9, system_prompt="short"))
        episode.step(f"<think>.</think><answer>{text}</answer>")
        samples.append(grpo.Sample(episode, number, f"{number}", [1], [1], [0.0]))
    grpo.judge_all(samples, world, "sum")
    return samples


def test_an_evaluation_has_its_answers_read_side_by_side_and_keeps_their_order(
        serve, answers, mini, tmp_path):
    running, lock, most = [], threading.Lock(), []
    tasks = [task for task, text, _ in answers if text.endswith(".0")]
    write_jsonl(tmp_path / "tasks.jsonl", tasks)

    def slow(body):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.5)
        with lock:
            running.pop()
        text = body["messages"][-1]["content"].partition("Itinerary:\n")[2]
        return said(json.dumps(plans[text]))

    def evaluated(*words):
        out = tmp_path / f"out{len(words)}"
        evaluate.main(["--tasks", str(tmp_path / "tasks.jsonl"), "--database", str(mini.folder),
                       "--agent", "solver", "--out", str(out), *words])
        return read_jsonl(out / "solver" / "episodes.jsonl")

    url, asked = serve(slow)
    by_rules = evaluated()
    plans = {row["answer"]: row["plan"] for row in by_rules}
    rows = evaluated("--reader", f"{url}=m")
    assert len(asked) == len({row["answer"] for row in rows}) > 15 and max(most) > 8
    for row, rule in zip(rows, by_rules, strict=True):
        assert row["task"] == rule["task"] and row["plan"] == rule["plan"]
        assert (row["reward"], row["strict"]) == (rule["reward"], rule["strict"])
        assert row["score"]["formatter tokens"] == 50 and not row["score"]["formatter failed"]


def test_training_with_a_formatter_that_refuses_fails_and_restarts_spoils_no_reward(answers, mini):
    """3 of 60 answers are refused for good, a fifth of the first 80 requests fails, one restart."""
    rng, lock, asked, servers = random.Random(SEED), threading.Lock(), [], []
    answer, read = formatter(answers)
    refused = {text for _, text, _ in answers[7::20]}

    def restart():
        servers[0].shutdown()
        servers[0].server_close()
        time.sleep(1)
        servers.append(opened(servers[0].server_port, storm))

    def storm(body):
        with lock:
            asked.append(body)
            fails = len(asked) <= 80 and rng.random() < 0.2
            if len(asked) == 30:
                threading.Thread(target=restart).start()
        if fails:
            return rng.choice(((500, "no"), (503, "loading"), said("")))
        if any(text in body["messages"][-1]["content"] for text in refused):
            return 400, "content_filter"
        return answer(body)

    servers.append(opened(0, storm))
    reader = Reader((f"http://127.0.0.1:{servers[0].server_port}/v1", "m"))
    samples, by_rules = judged(answers, mini, reader), judged(answers, mini)
    assert len(servers) == 2 and reader.counts == {"asked": 60, "failed": 3, "tokens": 57 * 50}
    assert sorted(read) == sorted({text for _, text, _ in answers} - refused), "each is read once"
    for sample, rule, (_, text, _) in zip(samples, by_rules, answers, strict=True):
        score = sample.record["score"]
        assert score["formatter failed"] == (text in refused)
        assert sample.reward == (0 if text in refused else rule.reward)
        assert text not in refused or "content_filter" in score["unread"][0]
    servers[-1].shutdown()
    servers[-1].server_close()


def test_a_formatter_that_answers_nothing_is_waited_for_and_then_ends_the_run(
        serve, answers, mini):
    servers = [opened(0, formatter(answers)[0])]
    port, (task, text, plan) = servers[0].server_port, answers[0]
    servers[0].shutdown()
    servers[0].server_close()
    reader = Reader((f"http://127.0.0.1:{port}/v1", "m"), bound=60, retries=0)
    reader.prefetch([(text, task)])
    time.sleep(1)
    servers.append(opened(port, formatter(answers)[0]))
    assert reader.read(text, task, mini)[0] == plan and reader.counts["failed"] == 0
    servers[1].shutdown()
    servers[1].server_close()
    for url, said_so in ((f"http://127.0.0.1:{port}/v1", "no connection"),
                         (serve(lambda body: (401, "wrong key"))[0], "wrong key")):
        reader = Reader((url, "m"), bound=0.5, retries=0)
        with pytest.raises(ChatError, match=f"{url}.*{said_so}.*repair it, then repeat this"):
            reader.read(text, task, mini)


def test_the_log_of_a_run_has_the_costs_of_its_formatter(mini):
    assert Travel(mini).parts == SCORES
    assert Travel(mini, reader=Reader(("http://x/v1", "m"))).parts == SCORES + COSTS


# ------------------------------------------------------------------------------------------ drill

def test_no_play_is_lost_or_counted_twice_when_an_endpoint_refuses_fails_and_restarts(run):
    """40 plays; 2 are refused for good, a fifth of the first 60 requests fails, one restart."""
    rng, lock, asked, servers = random.Random(SEED), threading.Lock(), [], []

    def restart():
        servers[0].shutdown()
        servers[0].server_close()
        time.sleep(1)
        servers.append(opened(servers[0].server_port, answer))

    def answer(body):
        with lock:
            asked.append(body)
            fails = len(asked) <= 60 and rng.random() < 0.2
            if len(asked) == 30:
                threading.Thread(target=restart).start()
        if fails:
            return rng.choice(((500, "no"), (429, "busy"), (503, "loading"), said("")))
        if any(f"#{i}#" in body["messages"][1]["content"] for i in (7, 23)):
            return 400, "content_filter: in this context"
        return play(body)

    servers.append(opened(0, answer))
    url = f"http://127.0.0.1:{servers[0].server_port}/v1"
    rows, scores = run(url, "--concurrency", "8", n=40)
    assert len(servers) == 2 and len(asked) > 80
    assert {name for name, row in rows.items() if row["stop"] == "refused"} == {"t7", "t23"}
    assert all(row["turns"] == 2 for row in rows.values() if row["stop"] == "answer")
    assert (scores["stop: refused"], scores["stop: answer"]) == (0.05, 0.95)
    before = len(asked)
    assert run(url, "--concurrency", "8", n=40) == (rows, scores) and len(asked) == before
    servers[-1].shutdown()
    servers[-1].server_close()
