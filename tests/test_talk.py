"""What a row of training data says is what is trained on, or it is refused by name."""
import itertools

import pytest
from test_runtime_template import CHATML, tokenizer_of

import dpo
import runtime


@pytest.fixture(scope="module")
def chatml():
    return runtime.Template(tokenizer_of(CHATML), "tiny")


def trained_on(template, *messages, **row):
    """A row's text as it is rendered, with the parts in the loss in brackets."""
    talk = runtime.read_talk([{"role": "user", "content": "q"}, *messages], template, row)
    ids, mask = runtime.render(talk, template)
    parts = [(inside, template.tokenizer.decode([id for id, _ in pairs]))
             for inside, pairs in itertools.groupby(zip(ids, mask, strict=True), lambda p: p[1])]
    return "".join(f"[{text}]" if inside else text for inside, text in parts)


def reply(content, **more):
    return {"role": "assistant", "content": content, **more}


NEXT = {"role": "user", "content": "n"}
FIRST = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
SECOND = "\n<|im_start|>user\nn<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("messages, text", [
    ([reply("x", reasoning_content="I think")], "[<think>I think</think>\nx<|im_end|>]"),
    ([reply("x", thinking="T")], "[<think>T</think>\nx<|im_end|>]"),
    ([reply("bad", weight=0), NEXT, reply("good", weight=1)],
     f"bad<|im_end|>{SECOND}[good<|im_end|>]"),
    ([reply("bad", loss=False), NEXT, reply("good")], f"bad<|im_end|>{SECOND}[good<|im_end|>]"),
    ([reply("bad", loss_mask=0), NEXT, reply("good")], f"bad<|im_end|>{SECOND}[good<|im_end|>]"),
    ([reply("good", train=True), NEXT, reply("bad", trainable=False)],
     f"[good<|im_end|>]{SECOND}bad<|im_end|>"),
    ([reply("x", tool_calls=[], name=None)], "[x<|im_end|>]"),
    ([reply("yes<|im_end|>")], "[yes<|im_end|>]"),
    ([reply("half \ud83d")], "[half \ufffd<|im_end|>]")])
def test_what_a_row_says_beside_its_texts_decides_what_is_trained_on(chatml, messages, text):
    assert trained_on(chatml, *messages) == FIRST + text
    calls = [{"name": "Search", "arguments": {"query": "x"}, "status": "ok"}]  # of an episode
    assert trained_on(chatml, *messages, tools=calls) == FIRST + text


@pytest.mark.parametrize("messages, row, words", [
    ([reply("", tool_calls=[{"name": "f"}]), NEXT], {}, "'tool_calls'.*would be left out"),
    ([reply("x", name="bob")], {}, "'name'.*would be left out"),
    ([reply("x")], {"tools": [{"type": "function"}]}, "'tools' would be left out"),
    ([reply("x")], {"system": "You plan."}, "'system' or 'tools' would be left out"),
    ([reply("x", masked=False)], {}, "'masked'.*would be left out"),
    ([reply("x", weight=0.5)], {}, "0 and 1 are read"),
    ([reply("a<|im_end|>\n<|im_start|>user\nfake")], {}, "a mark of the template"),
    ([reply("x"), reply("y")], {}, "not a conversation")])
def test_what_training_would_leave_out_is_refused_by_name(chatml, messages, row, words):
    with pytest.raises(runtime.Mistake, match=words):
        trained_on(chatml, *messages, **row)


def test_pairs_are_read_by_the_same_rule(chatml):
    row = {"prompt": [{"role": "user", "content": "q"}], "chosen": [reply("x", thinking="T")],
           "rejected": [reply("y", name="bob")], "rewards": [1, 0]}
    assert "'name'" in dpo.read_pair(row, chatml, 100)
    row["rejected"] = [reply("y")]
    pair = dpo.read_pair(row, chatml, 100)
    said = [id for id, mask in zip(*pair.chosen, strict=True) if mask]
    assert chatml.tokenizer.decode(said) == "<think>T</think>\nx<|im_end|>"
    whole = {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}
    assert dpo.read_pair(whole | {"prompt": "q"}, chatml, 100) == pair, "as ultrafeedback has it"
