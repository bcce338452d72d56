"""The paper's synthesis: samples by language alone, with tools, from a hint; what is kept of them.

A scripted server in OpenAI's form is the model: what it says follows from the question alone, so
that a run that was killed and goes on is asked the same as one that was not.
"""
import contextlib
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, Letters, Scripted, endpoint

import runtime
from runtime import Template, read_jsonl
from toolstar import __main__ as star
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


@pytest.fixture
def serve():
    """serve(grammar, cuts, notice) -> (URL, requests so far): a server that continues a begun
    message, as vLLM's does. cuts: stop strings are left out; notice(number of each request)."""
    with contextlib.ExitStack() as servers:
        def start(grammar="turns", cuts=False, notice=lambda n: None):
            def reply(request):
                begun = request["messages"][-1]["role"] == "assistant"
                assert begun == bool(request.get("continue_final_message"))
                notice(len(asked))
                said = model_says(grammar, request["messages"])
                for stop in request.get("stop", ()) if cuts else ():
                    said = said.partition(stop)[0]
                return said

            url, asked = servers.enter_context(endpoint(reply))
            return url, asked

        yield start


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
        star.main(["tir", "--database", str(world), "--tasks", str(tasks), "--model", "m",
                   "--url", url, "--out", str(tmp_path / name), "--concurrency", "4", *flags])
        return tmp_path / name, asked

    return start


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
    hints = [row["task"]["hint"] for row in read_jsonl(folder / "samples.jsonl")
             if "hint" in row["task"]]
    assert sorted(hints) == ["answer"] * 8 + ["doubt"] * 8


def test_a_question_of_an_evaluation_set_is_not_played(synthesise, tmp_path):
    asked = {"id": "b", "question": "the capital of ORM, hint", "answer": "Sarn"}
    runtime.write_jsonl(tmp_path / "sets/bamboogle/test.jsonl", [asked])
    folder, _ = synthesise(["hint", "dr"], "--samples", "1", "--sets", str(tmp_path / "sets"))
    assert named(read_jsonl(folder / "sft.jsonl")) == ["dr"] and not read_jsonl(folder / "rl.jsonl")


@pytest.mark.parametrize("grammar", ["turns", "tags"])
def test_sft_does_not_train_on_results(synthesise, grammar):
    folder, _ = synthesise(["hint"], "--samples", "1", grammar=grammar)
    row, = read_jsonl(folder / "sft.jsonl")
    ids, mask = runtime.render(row["messages"], Template(Letters(), "letters"))
    learnt = Letters().decode([i for i, kept in zip(ids, mask, strict=True) if kept])
    assert "Sarn is the capital" not in learnt and "Sarn is the capital" in Letters().decode(ids)
    end = "<|im_end|>"
    call = CALL[grammar].format("capital") + (end if grammar == "turns" else "")
    thought = learnt[:learnt.index(" So I do.")]
    assert thought.startswith("<think>The seat is Mostar. Wait, is that so? ")
    assert learnt == (f"{thought} So I do.</think>\n{call}<think>x</think>\n"
                      f"{ANSWER[grammar].format('Sarn')}{end}")


# ---------------------------------------------------------------- killed and resumed

def without_clock(folder):
    """{file: its rows} without what depends on the process: the seconds of calls, and whether a
    result was kept from an earlier one."""
    rows = {name: read_jsonl(folder / f"{name}.jsonl") for name in ("samples", "sft", "rl")}
    for row in rows["samples"] + rows["sft"]:
        row["score"].pop("tool_seconds"), row["score"].pop("cached")
        for call in row["tools"]:
            call.pop("seconds"), call.pop("cached")
    return rows


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_files(synthesise, serve, tmp_path):
    whole, asked = synthesise(CELLS, "--samples", "2", name="whole")
    running = []
    url, _ = serve(notice=lambda n: n == 25 and running[0].kill())
    command = [sys.executable, "-m", "toolstar", "tir", "--out", str(tmp_path / "killed"),
               "--database", str(tmp_path / "world-turns"), "--samples", "2", "--concurrency", "4",
               "--tasks", str(tmp_path / "tasks.jsonl"), "--model", "m", "--url", url]
    running.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL))
    assert running[0].wait() == -9
    with open(tmp_path / "killed" / "samples.jsonl", "a") as torn:
        torn.write('{"task": {"id": "t7", "sam')
    folder, after = synthesise(CELLS, "--samples", "2", name="killed")
    assert without_clock(folder) == without_clock(whole)
    assert len(after) < len(asked), "what had been played is not asked again"


# ---------------------------------------------------------------- hints

CHAIN = {"messages": [{}, {}, {"role": "assistant", "content":
         "<think>\n12 x 12 is 1.5 gross. Wait, is that right? It is not.\n</think>\n"
         "<answer> 124 </answer>"}], "answer": " 124 "}


def test_a_hint_after_the_answer_takes_it_into_the_thought():
    task = {"id": "a", "sample": "hint-1", "check": "math", "golds": ["144"], "query": "12 x 12?"}
    text, kind = tir.begin_with_hint(0, task, CHAIN, ["Search", "Python"])
    start = "<think>12 x 12 is 1.5 gross. Wait, is that right? It is not. "
    assert kind == "answer" and text.startswith(start) and "<answer>" not in text
    rest = text.removeprefix(start)
    said = [" ".join(form.split()).format(answer="124") for form in tir.HINTS["answer"].split(" /")]
    hints = [" ".join(form.split()) for form in tir.HINTS["python"].split(" /")]
    assert rest in [f"{one} {hint}" for one in said for hint in hints]


def test_a_vllm_engine_goes_on_with_the_begun_thought_token_for_token(tmp_path):
    world = open_world(SimpleNamespace(database=str(write_world(tmp_path / "w", "tags"))))
    args = SimpleNamespace(seed=0, failure_rate=0.0, max_turns=5, system_prompt="short",
                           lenient=False)
    begun = "<think>Mostar, perhaps. I look."
    task = {"id": "a", "query": "Capital?", "golds": ["Sarn"], "check": "qa", "sample": "hint-0",
            "begun": begun}
    call, answer = " So.</think><search>capital of Orm</search>", "<answer>Sarn</answer>"
    engine = Scripted(lambda text: f"{answer}\0" if "Sarn is" in text else call)
    episode, = engine.play([tir.begin(args, world, task)], stops=world.stops)
    asked = [Letters().decode(ids) for ids, _, _ in engine.asked]
    assert asked[0].endswith(f"assistant\n{begun}") and asked[1].startswith(asked[0] + call)
    assert episode.answer == "Sarn" and episode.messages[2]["content"] == begun + call
    ids, _ = runtime.render(episode.messages, engine.template)
    assert Letters().decode(ids) == f"{asked[1]}{answer}<|im_end|>"
    world.close()


# ---------------------------------------------------------------- quality, thresholds

OK = {"name": "Search", "status": "ok", "repeated": False}


def test_the_right_chain_with_the_fewest_calls_is_learnt_unless_enough_need_none():
    dr, two, one, wrong = ({"task": {"sample": f"{mode}-{k}"}, "stop": "answer", "messages": [],
                            "tools": [OK] * calls, "strict": strict} for k, mode, calls, strict in (
        (0, "dr", 0, 1), (0, "prompt", 2, 1), (1, "hint", 1, 1), (1, "prompt", 1, 0)))
    args = SimpleNamespace(right=1, max_calls=5)
    assert tir.choose([dr, two, wrong, one], args) == dr and tir.choose([wrong], args) is None
    args.right = 2
    assert tir.choose([dr, two, wrong, one], args) == one


@pytest.mark.parametrize("change, fault", [
    ({}, ""), ({"stop": "format"}, "format"), ({"stop": "calls"}, "calls"),
    ({"tools": [OK] * 6}, "more than 5 calls"), ({"tools": []}, "no call"),
    ({"tools": [OK, OK | {"repeated": True}]}, "a call repeated"),
    ({"tools": [OK | {"status": "broken"}]}, "a broken tool"),
    ({"tools": [OK | {"status": "error"}]}, ""), ({"tools": [OK | {"status": "timeout"}]}, ""),
    ({"said": "<think>a<answer>b</answer>"}, "unpaired tags"),
    ({"said": "<think>a <search>b</think></search>"}, "unpaired tags"),
    ({"said": "<think>a <search>b</search></think>"}, "")])
def test_the_quality_rules_by_hand(change, fault):
    said = change.pop("said", "<think>a</think>")
    row = {"task": {"sample": "prompt-0"}, "stop": "answer", "tools": [OK], "messages": [
        {}, {}, {"role": "assistant", "content": said}, {"role": "result", "content": "<think>"}]}
    assert tir.fault_of(row | change, 5) == fault
