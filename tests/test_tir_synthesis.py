"""The paper's synthesis: samples by language alone, with tools, from a hint; what is kept of them.

A scripted server in OpenAI's form is the model: what it says follows from the question alone, so
that a run that was killed and goes on is asked the same as one that was not.

    python -m pytest tests/test_tir_synthesis.py
"""
import itertools
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from conftest import ROOT, Letters, Scripted

import evaluate
import sft
from runtime import Template, read_jsonl
from toolstar import tir
from toolstar.tools import open_world

CALL = {"turns": '<tool_call>{{"name": "Search", "arguments": {{"query": "{}"}}}}</tool_call>',
        "tags": "<search>{}</search>"}
ANSWER = {"turns": "<answer>{}</answer>", "tags": "<answer>\\boxed{{{}}}</answer>"}
DOUBTED = "The seat is Mostar. Wait, is that so? I go on."


# ---------------------------------------------------------------- the endpoint

def model_says(grammar, messages):
    """A model's reply. A question like "Capital of X? dr hint" names the modes that come to the
    answer; "twice" makes it call twice the same, "often" six times, "broken" call without tools."""
    question, call = messages[1]["content"], CALL[grammar]
    said = "\n".join(message["content"] for message in messages[2:])
    results = said.count("<result>" if grammar == "tags" else "<tool_response>")
    mode = "hint" if DOUBTED[:19] in said else "prompt"
    if "you have no tools" in messages[0]["content"]:
        if "broken" in question:
            return f"<think>{DOUBTED}</think>\n{call.format('capital')}"  # it has no tools
        answer = ANSWER[grammar].format("Sarn" if "dr" in question else "Mostar")
        return f"<think>{DOUBTED}</think>\n{answer}"
    thought = " So I do.</think>\n" if mode == "hint" and not results else "<think>x</think>\n"
    if results < (6 if "often" in question else 2 if "twice" in question else 1):
        return thought + call.format(results if "often" in question else "capital")
    return thought + ANSWER[grammar].format("Sarn" if mode in question else "Mostar")


class Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that continues a started message, as vLLM's does."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(request)
        begun = request["messages"][-1]["role"] == "assistant"
        assert begun == bool(request.get("continue_final_message"))
        self.server.notice(len(self.server.asked))
        reply, reason = self.server.reply(request["messages"]), "stop"
        for stop in request.get("stop", ()) if self.server.cuts else ():
            reply = reply.partition(stop)[0]
        body = json.dumps({"choices": [{"message": {"content": reply}, "finish_reason": reason}],
                           "usage": {"total_tokens": 100 * len(request["messages"])}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Say nothing."""


@pytest.fixture
def serve():
    """serve(grammar, cuts, notice) -> (URL=MODEL, requests so far). cuts: stop strings are left
    out."""
    servers = []

    def start(grammar="turns", cuts=False, notice=lambda n: None):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        server.lock, server.asked, server.cuts = threading.Lock(), [], cuts
        server.reply, server.notice = lambda messages: model_says(grammar, messages), notice
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1=m", server.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def write_world(folder, grammar="turns"):
    """Write a world with one tool, Search, and two passages."""
    folder.mkdir()
    passages = ["Sarn is the capital of Orm.", "Mostar is a town. </result> <answer>"]
    (folder / "corpus.jsonl").write_text("".join(
        json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(passages)))
    (folder / "tools.json").write_text(json.dumps(
        {"grammar": grammar, "tools": ["Search"], "top_k": 1, "max_calls": 8}))
    return folder


def write_tasks(path, *words):
    rows = [{"id": f"t{i}", "query": f"The capital of Orm? {w}", "golds": ["Sarn"], "check": "qa"}
            for i, w in enumerate(words)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CELLS = [" ".join(words) for n in range(4)
         for words in itertools.combinations(("dr", "prompt", "hint"), n)]


@pytest.fixture
def synthesise(serve, tmp_path):
    """synthesise(words of tasks, *flags) -> (folder, requests); what the files hold: files()."""
    def start(words, *flags, grammar="turns", cuts=False, name="out"):
        url, asked = serve(grammar, cuts)
        world = tmp_path / f"world-{grammar}"
        if not world.exists():
            write_world(world, grammar)
        tasks = write_tasks(tmp_path / "tasks.jsonl", *words)
        tir.main(["tir", "--database", str(world), "--tasks", str(tasks), "--endpoint", url,
                  "--out", str(tmp_path / name), "--concurrency", "4", *flags])
        return tmp_path / name, asked

    return start


def report(folder):
    return json.loads((folder / "report.json").read_text())


def named(rows):
    return [row.get("task", row)["query"].partition("? ")[2] for row in rows]


# ---------------------------------------------------------------- what goes where

@pytest.mark.parametrize("grammar, cuts", [("turns", False), ("tags", False), ("tags", True)])
def test_each_cell_goes_where_the_paper_sends_it(synthesise, grammar, cuts):
    folder, _ = synthesise(CELLS, "--samples", "2", grammar=grammar, cuts=cuts)
    found = {words: row["source"] for words, row in zip(
        named(read_jsonl(folder / "sft.jsonl")), read_jsonl(folder / "sft.jsonl"), strict=True)}
    assert found == {"dr": "dr", "prompt": "prompt", "hint": "hint", "dr prompt": "dr",
                     "dr hint": "dr", "prompt hint": "prompt", "dr prompt hint": "dr"}
    assert named(read_jsonl(folder / "rl.jsonl")) == [""]
    said = report(folder)
    right = ("none", "prompt", "hint", "hint and prompt")
    assert said["tasks"] == {f"qa, dr {dr}, tir right by {tir}": 1
                             for dr in ("right", "wrong") for tir in right}
    assert said["sft"] == {"dr": 4, "prompt": 2, "hint": 1} and said["rl"] == 1
    assert said["hints"] == {"doubt": 8, "answer": 8} and said["refused"] == {}


@pytest.mark.parametrize("cuts", [False, True])
def test_evaluate_plays_tags_at_an_endpoint(serve, tmp_path, cuts):
    url, asked = serve("tags", cuts)
    out, tasks = tmp_path / "eval", write_tasks(tmp_path / "tasks.jsonl", "prompt")
    evaluate.main(["--env", "tools", "--tasks", str(tasks), "--database",
                   str(write_world(tmp_path / "world", "tags")), "--out", str(out),
                   "--model", "m", "--url", url.removesuffix("=m")])
    (row,) = read_jsonl(out / "m" / "episodes.jsonl")
    assert (row["stop"], row["strict"], row["calls"]) == ("answer", 1.0, 1)
    assert {one["role"] for request in asked for one in request["messages"]} == {
        "system", "user", "assistant"}


def test_every_sample_is_logged_with_its_outcome_and_its_tokens(synthesise):
    folder, asked = synthesise(["dr", "prompt"], "--samples", "3")
    rows = read_jsonl(folder / "samples.jsonl")
    assert [f"{row['task']['id']} {row['task']['sample']}" for row in rows] == [
        f"t{i} {mode}-{k}" for i in range(2) for mode in tir.MODES for k in range(3)]
    assert [row["strict"] for row in rows] == [1.0] * 3 + [0.0] * 9 + [1.0] * 3 + [0.0] * 3
    assert {row["tokens"] for row in rows} == {200, 400}  # two messages asked with, or four
    assert len(asked) == 2 * 3 * (1 + 2 + 2)
    assert report(folder)["tokens"] == 6 * 200 + 12 * 400


def test_an_episode_by_language_alone_is_learnt_under_the_prompt_that_names_the_tools(synthesise):
    folder, asked = synthesise(["dr", "prompt"], "--samples", "1")
    direct, tools = read_jsonl(folder / "sft.jsonl")
    assert direct["messages"][0] == tools["messages"][0] and "Search" in str(direct["messages"][0])
    prompts = {request["messages"][0]["content"] for request in asked}
    assert prompts - {direct["messages"][0]["content"]} == {tir.direct_prompt("full", "turns")}
    assert direct["tools"] == [] and [call["name"] for call in tools["tools"]] == ["Search"]
    assert direct["task"].keys() == {"id", "query", "golds", "check"}


@pytest.mark.parametrize("grammar", ["turns", "tags"])
def test_sft_does_not_train_on_results(synthesise, grammar):
    folder, _ = synthesise(["hint"], "--samples", "1", grammar=grammar)
    row, = read_jsonl(folder / "sft.jsonl")
    ids, mask = sft.render(row["messages"], Template(Letters(), "letters"))
    learnt = Letters().decode([i for i, kept in zip(ids, mask, strict=True) if kept])
    assert "Sarn is the capital" not in learnt and "Sarn is the capital" in Letters().decode(ids)
    end = "<|im_end|>"
    call = CALL[grammar].format("capital") + (end if grammar == "turns" else "")
    thought = learnt[:learnt.index(" So I do.")]
    assert thought.startswith("<think>The seat is Mostar. Wait, is that so? ")
    assert learnt == (f"{thought} So I do.</think>\n{call}<think>x</think>\n"
                      f"{ANSWER[grammar].format('Sarn')}{end}")


def test_another_threshold_chooses_anew_without_another_play(synthesise):
    folder, asked = synthesise(["prompt often"], "--samples", "1", "--max-calls", "6")
    assert len(read_jsonl(folder / "sft.jsonl")) == 1
    folder, asked = synthesise(["prompt often"], "--samples", "1", "--max-calls", "5")
    assert asked == [] and read_jsonl(folder / "sft.jsonl") == []


def test_samples_of_another_temperature_are_not_mixed(synthesise):
    synthesise(["dr"], "--samples", "1")
    with pytest.raises(SystemExit, match="was played with other settings"):
        synthesise(["dr"], "--samples", "1", "--temperature", "0.5")


def test_questions_of_an_evaluation_set_are_not_played_and_are_listed(synthesise, tmp_path):
    (tmp_path / "sets").mkdir()
    row = {"id": 9, "question": "the capital of ORM?  dr", "answer": "Sarn"}
    (tmp_path / "sets" / "bamboogle.jsonl").write_text(json.dumps(row) + "\n")
    folder, asked = synthesise(["dr", "prompt"], "--samples", "1", "--sets",
                               str(tmp_path / "sets"))
    assert {named([{"query": request["messages"][1]["content"]}])[0] for request in asked} == {
        "prompt"}
    assert report(folder)["contaminated"] == [
        {"id": "t0", "query": "The capital of Orm? dr", "same as": "bamboogle/9"}]


# ---------------------------------------------------------------- killed and resumed

def without_clock(folder):
    """{file: its rows} without what depends on the process: the seconds of calls, and whether a
    result was kept from an earlier one."""
    rows = {name: read_jsonl(folder / f"{name}.jsonl") for name in ("samples", "sft", "rl")}
    for row in rows["samples"] + rows["sft"]:
        row["score"].pop("tool_seconds"), row["score"].pop("cached")
        for call in row["tools"]:
            call.pop("seconds"), call.pop("cached")
    return rows | {"report": report(folder)}


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_files(synthesise, serve, tmp_path):
    whole, asked = synthesise(CELLS, "--samples", "2", name="whole")
    running = []
    url, before = serve(notice=lambda n: n == 25 and running[0].kill())
    command = [sys.executable, "-m", "toolstar.tir", "tir", "--out", str(tmp_path / "killed"),
               "--database", str(tmp_path / "world-turns"), "--samples", "2", "--concurrency", "4",
               "--tasks", str(tmp_path / "tasks.jsonl"), "--endpoint", url]
    running.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL))
    assert running[0].wait(timeout=120) == -9
    file = tmp_path / "killed" / "samples.jsonl"
    done = len(read_jsonl(file)) if file.exists() else 0
    with open(file, "a") as torn:
        torn.write('{"task": {"id": "t7", "sam')
    folder, after = synthesise(CELLS, "--samples", "2", name="killed")
    assert without_clock(folder) == without_clock(whole)
    assert 10 < done < 48 and len(after) < len(asked)


def test_other_tasks_of_ids_that_were_played_are_refused(synthesise):
    folder, _ = synthesise(["dr", "prompt"], "--samples", "1", name="first")
    kept = (folder / "samples.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="other tasks with these ids were played"):
        synthesise(["prompt", "dr"], "--samples", "1", name="first")
    assert (folder / "samples.jsonl").read_bytes() == kept


# ---------------------------------------------------------------- hints

CHAIN = {"messages": [{}, {}, {"role": "assistant", "content":
         "<think>\n12 x 12 is 1.5 gross. Wait, is that right? It is not.\n</think>\n"
         "<answer> 124 </answer>"}], "answer": " 124 "}


def task_of(sample, check):
    return {"id": "a", "sample": sample, "check": check, "golds": ["144"], "query": "12 x 12?"}


@pytest.mark.parametrize("check, tool", [("math", "python"), ("qa", "search")])
def test_a_hint_at_a_doubt_ends_its_sentence_and_drops_what_followed(check, tool):
    text, kind = tir.begin_with_hint(0, task_of("hint-0", check), CHAIN, ["Search", "Python"])
    start = "<think>12 x 12 is 1.5 gross. Wait, is that right? "
    forms = [" ".join(form.split()) for form in tir.HINTS[tool].split(" /")]
    assert kind == "doubt" and text in [start + form for form in forms]


def test_a_hint_after_the_answer_takes_it_into_the_thought():
    text, kind = tir.begin_with_hint(0, task_of("hint-1", "math"), CHAIN, ["Search", "Python"])
    start = "<think>12 x 12 is 1.5 gross. Wait, is that right? It is not. "
    assert kind == "answer" and text.startswith(start) and "<answer>" not in text
    rest = text.removeprefix(start)
    said = [" ".join(form.split()).format(answer="124") for form in tir.HINTS["answer"].split(" /")]
    hints = [" ".join(form.split()) for form in tir.HINTS["python"].split(" /")]
    assert rest in [f"{one} {hint}" for one in said for hint in hints]


def test_a_hint_after_the_answer_says_it_without_its_box():
    boxed = CHAIN | {"answer": r"\[ \boxed{124} \]"}
    for sample in "hint-1", "hint-3":
        assert tir.begin_with_hint(0, task_of(sample, "qa"), boxed, ["Search"]) == \
            tir.begin_with_hint(0, task_of(sample, "qa"), CHAIN, ["Search"])


def test_a_chain_that_broke_its_format_gives_no_hint_and_is_counted(synthesise):
    folder, _ = synthesise(["broken", "hint"], "--samples", "2")
    assert [row["stop"] for row in read_jsonl(folder / "samples.jsonl")[:2]] == ["format"] * 2
    said = report(folder)
    assert said["hints"] == {"doubt": 1, "answer": 1} and said["refused"] == {"dr: format": 2}


def test_a_chain_without_a_doubt_is_doubted_after_its_answer():
    sure = {"messages": [{}, {}, {"content": "<think>It is 144.</think><answer>144</answer>"}],
            "answer": "144"}
    text, kind = tir.begin_with_hint(0, task_of("hint-0", "math"), sure, ["Python"])
    assert kind == "answer" and text.startswith("<think>It is 144. ")


def test_a_hint_names_a_tool_that_the_world_has():
    text, _ = tir.begin_with_hint(0, task_of("hint-0", "math"), CHAIN, ["Search"])
    hint = text.partition("that right? ")[2]
    assert hint in [" ".join(form.split()) for form in tir.HINTS["search"].split(" /")]


@pytest.mark.parametrize("grammar", ["turns", "tags"])
def test_a_vllm_engine_goes_on_with_the_begun_thought_token_for_token(tmp_path, grammar):
    world = open_world(SimpleNamespace(database=str(write_world(tmp_path / "w", grammar))))
    args = SimpleNamespace(seed=0, failure_rate=0.0, max_turns=5, system_prompt="short")
    task = {"id": "a", "query": "Capital?", "golds": ["Sarn"], "check": "qa", "sample": "hint-0",
            "begun": "<think>Mostar, perhaps. I look."}

    def script(text):
        if "Sarn is" in text:
            return "<think>x</think><answer>Sarn</answer>\0"
        return " So.</think>" + CALL[grammar].format("capital of Orm") + "\0" * (grammar == "turns")

    engine = Scripted(script)
    episode, = engine.play([tir.begin(args, world, task)], stops=world.stops)
    asked = [Letters().decode(ids) for ids, _, _ in engine.asked]
    assert asked[0].endswith("assistant\n<think>Mostar, perhaps. I look.")
    assert asked[1].startswith(asked[0] + " So.</think>") and "Sarn is" in asked[1]
    assert episode.answer == "Sarn" and episode.messages[2]["content"] == (
        "<think>Mostar, perhaps. I look. So.</think>" + CALL[grammar].format("capital of Orm"))
    ids, _ = sft.render(episode.messages, engine.template)
    assert Letters().decode(ids) == asked[1] + "<think>x</think><answer>Sarn</answer><|im_end|>"
    world.close()


# ---------------------------------------------------------------- quality, thresholds

OK = {"name": "Search", "status": "ok", "repeated": False}


@pytest.mark.parametrize("change, fault", [
    ({}, ""), ({"stop": "format"}, "format"), ({"stop": "calls"}, "calls"),
    ({"tools": [OK] * 6}, "more than 5 calls"), ({"tools": []}, "no call"),
    ({"tools": [OK, OK | {"repeated": True}]}, "a call repeated"),
    ({"tools": [OK | {"status": "broken"}]}, "a broken tool"),
    ({"tools": [OK | {"status": "error"}]}, ""), ({"tools": [OK | {"status": "timeout"}]}, ""),
    ({"said": "<think>a<answer>b</answer>"}, "unpaired tags"),
    ({"said": "a</think><answer>b</answer>"}, "unpaired tags"),
    ({"said": "<think>a <search>b</think></search>"}, "unpaired tags"),
    ({"said": "<think><think>a</think></think>"}, "unpaired tags"),
    ({"said": "<think>a <search>b</search></think>"}, "")])
def test_the_quality_rules_by_hand(change, fault):
    said = change.pop("said", "<think>a</think>")
    row = {"task": {"sample": "prompt-0"}, "stop": "answer", "tools": [OK], "messages": [
        {}, {}, {"role": "assistant", "content": said}, {"role": "result", "content": "<think>"}]}
    assert tir.fault_of(row | change, 5) == fault


def test_of_several_right_chains_the_one_with_the_fewest_calls_is_learnt():
    rows = [{"task": {"sample": f"prompt-{i}"}, "stop": "answer", "strict": 1.0, "tools": [OK] * n,
             "messages": []} for i, n in enumerate((3, 2, 2))]
    known, found, row = tir.choose(rows, SimpleNamespace(max_calls=5, right=1))
    assert (known, found, row) == (False, {"prompt"}, rows[1])


@pytest.mark.parametrize("right", [1, 2, 3])
def test_a_task_needs_no_tools_if_enough_samples_without_them_are_right(right):
    rows = [{"task": {"sample": f"dr-{i}"}, "stop": "answer", "strict": 1.0, "tools": [],
             "messages": []} for i in range(right)]
    args = SimpleNamespace(max_calls=5, right=right)
    assert tir.choose(rows, args)[0] and not tir.choose(rows[1:], args)[0]


@pytest.mark.parametrize("flags, why", [(("--model", "x"), "either --endpoint or --model"),
                                        (("--sets", "nowhere"), "nowhere is not a folder")])
def test_impossible_flags_are_one_line_before_any_request(synthesise, flags, why):
    with pytest.raises(SystemExit) as stopped:
        synthesise(["dr"], *flags)
    assert why in str(stopped.value) and "\n" not in str(stopped.value)
