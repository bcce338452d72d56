"""Endpoints: what a scripted server says becomes a Reply, Refused or ChatError."""
import contextlib
from functools import partial

import pytest
from conftest import answering, completion

import evaluate
import runtime
from evaluate import ChatError, Refused, chat
from runtime import with_thought
from sandbox import Episode, Sandbox

HELLO = [{"role": "user", "content": "Hello there"}]
CALL = '<tool_call>{"name": "SearchCity", "arguments": {"state": "x"}}</tool_call>'


def said(text, finish="stop", **message):
    return 200, completion(text, finish, 50, **message)


@pytest.fixture
def serve():
    """serve(answers) -> (address, bodies of the requests so far); the last answer is repeated."""
    with contextlib.ExitStack() as servers:
        def start(*answers):
            asked = []

            def answer(request):
                asked.append(request)
                return answers[min(len(asked), len(answers)) - 1]

            return f"{servers.enter_context(answering(answer))}/v1", asked

        yield start


def test_a_reply_comes_with_its_thought_and_tokens_after_errors_that_pass(serve):
    url, asked = serve((429, "slow down"), (503, "loading"),
                       said(CALL, reasoning_content="I think so."))
    reply = chat(url, "m", HELLO, max_tokens=7, stops=["</tool_call>"])
    assert reply == f"<think>I think so.</think>\n{CALL}" and reply.tokens == 50
    assert len(asked) == 3 and asked[2] == asked[0]
    assert (asked[0]["max_tokens"], asked[0]["stop"]) == (7, ["</tool_call>"])
    chat(url, "m", HELLO)
    assert not {"max_tokens", "stop"} & asked[3].keys(), "the limit is the server's"
    url, _ = serve(said(CALL, reasoning="I look."))  # as vLLM calls it
    assert chat(url, "m", HELLO) == f"<think>I look.</think>\n{CALL}"


@pytest.mark.parametrize("found, stop, words", [
    ((400, "This model's maximum context length is 4096 tokens."), "context", "4096"),
    ((400, {"error": {"message": "prompt is too long: 200251 tokens"}}), "context", "too long"),
    ((422, {"detail": {"code": "context_length_exceeded"}}), "context", "exceeded"),
    (said("7" * 300_000), "context", "300,000 characters"),
    ((400, "content_filter: it violates the policy"), "refused", "policy"),
    ((422, "bad role"), "refused", "bad role"), (said(""), "refused", "without text .stop"),
    (said(None, "length"), "length", "without text .length"),
    ((200, {"error": {"message": "flagged"}}), "refused", "flagged"),
    ((401, "wrong key"), None, "wrong key"), ((404, "no model m"), None, "no model m"),
    ((500, "on fire"), None, "on fire")], ids=lambda value: str(value)[:40])
def test_a_request_without_a_usable_reply_is_the_requests_fault_or_the_endpoints(
        serve, found, stop, words):
    url, asked = serve(found)
    with pytest.raises(ChatError, match=f"(?s)^{url}: .*{words}") as failure:
        chat(url, "m", HELLO, retries=1)
    assert getattr(failure.value, "stop", None) == stop
    # only what may pass is tried again; then a short question, also twice
    assert len(asked) == (4 if found[0] == 500 else 1)


FAULTS = {status: (status, "no") for status in (403, 413, 451, 500, 502, 503, 504, 529)} | {
    "hangs up": None, "half a JSON": (200, '{"choices": ['), "a web page": (200, "<html>"),
    "no choice": (200, {"choices": []}), "no text": said(None), "a list": said(["x"]),
    "a thought in blocks": said("x", reasoning=[{"text": "x"}]),
    "no message": (200, {"choices": [{"message": None, "finish_reason": "stop"}]})}


def played(fault, mini):
    """{number of the play: its stop} of 20 plays at an endpoint that fails in the 8th."""
    def answer(request):
        asked = request["messages"][-1]["content"]
        return fault if asked == "play 7" else said("<think>.</think><answer>x</answer>")

    plays = [Episode({"id": i, "query": f"play {i}"}, Sandbox(mini)) for i in range(20)]
    with answering(answer) as url:
        generate = partial(chat, f"{url}/v1", "m", retries=1)
        return {play.task["id"]: play.stop for play in evaluate.play(generate, plays)}


@pytest.mark.parametrize("kind", FAULTS)
def test_one_play_that_an_endpoint_cannot_answer_is_refused_and_19_others_end(kind, mini):
    assert played(FAULTS[kind], mini) == {i: "refused" if i == 7 else "answer" for i in range(20)}


@pytest.mark.parametrize("status", [401, 404, 429])
def test_a_wrong_key_or_model_and_a_spent_quota_end_the_run(status, mini):
    with pytest.raises(ChatError) as failure:
        played((status, "no"), mini)
    assert not isinstance(failure.value, Refused)


def test_a_server_that_is_gone_is_the_endpoints_fault():
    with pytest.raises(ChatError, match="after 0 retries, from model m") as failure:
        chat("http://127.0.0.1:9/v1", "m", HELLO, retries=0)
    assert not isinstance(failure.value, Refused)
    assert isinstance(failure.value, runtime.Mistake), "it ends a run in one line"


def test_a_reply_gets_back_the_closing_tag_that_a_server_cut_off(serve):
    url, _ = serve(said("<think>a</think><search>rain"), said("<search>rain</search>"),
                   said("<search>ra", "length"))
    replies = [chat(url, "m", HELLO, stops=["</search>", "</python>"]) for _ in range(3)]
    assert replies == ["<think>a</think><search>rain</search>", "<search>rain</search>",
                       "<search>ra"]


def test_a_begun_message_is_continued_and_keeps_its_own_thought(serve):
    url, asked = serve(said("so.</think><answer>1</answer>", reasoning_content="no"))
    begun = [*HELLO, {"role": "assistant", "content": "<think>I think"}]
    assert chat(url, "m", begun) == "so.</think><answer>1</answer>"
    assert asked[0]["continue_final_message"] and not asked[0]["add_generation_prompt"]


@pytest.mark.parametrize("text, thought, whole", [
    (f"I think so.\n</think>\n\n{CALL}", None, f"<think>I think so.\n</think>\n\n{CALL}"),
    (CALL, "I think so.", f"<think>I think so.</think>\n{CALL}"),
    (f"b</think>{CALL}", "a ", f"<think>ab</think>{CALL}"),
    (f"<think>b</think>{CALL}", "a", f"<think>b</think>{CALL}"),
    (CALL, None, CALL), (CALL, "", CALL)])
def test_a_separate_thought_is_put_before_the_reply(text, thought, whole):
    assert with_thought(text, thought) == whole
