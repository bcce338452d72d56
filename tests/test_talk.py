"""What a row of training data says is what is trained on, or it is refused by name."""
import itertools
import subprocess
import sys

import pytest
from conftest import ROOT
from test_runtime_template import CHATML, tokenizer_of

import dpo
import runtime
import sft


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
    ([reply("x", thinking="T", reasoning="T")], "[<think>T</think>\nx<|im_end|>]"),
    ([reply("bad", weight=0), NEXT, reply("good", weight=1)],
     f"bad<|im_end|>{SECOND}[good<|im_end|>]"),
    ([reply("bad", loss=False), NEXT, reply("good")], f"bad<|im_end|>{SECOND}[good<|im_end|>]"),
    ([reply("bad", loss_weight=0), NEXT, reply("good")], f"bad<|im_end|>{SECOND}[good<|im_end|>]"),
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
    ([reply("", tool_calls=[{"name": "f"}]), NEXT], {}, "2.*'tool_calls'"),
    ([reply(None, tool_calls=[{"name": "f"}]), NEXT], {}, "2.*'tool_calls'"),
    *(([reply("x", **{field: value})], {}, f"2.*'{field}'") for field, value in (
        ("name", "bob"), ("masked", False), ("loss_scale", 0), ("mask", 1))),
    ([reply("x", weight=0.5)], {}, "2.*0.5"), ([reply("x", thinking=[{"text": "T"}])], {}, "2"),
    ([reply("x", thinking="T", reasoning="U")], {}, "2.*two"),
    ([reply("<think>T</think>x", reasoning="U")], {}, "2.*two"),
    ([reply("x"), NEXT | {"thinking": "T"}], {}, "3.*user"),
    ([reply("x"), NEXT | {"train": True}], {}, "3.*user"),
    ([reply([{"text": "x"}])], {}, "2.*'content'"),
    ([reply("x"), {"role": "tool", "content": "y"}], {}, "3.*'role'"),
    ([{"from": "gpt", "value": "x"}], {}, "2.*'from'"),
    *(([reply("x")], {field: value}, f"'{field}'") for field, value in (
        ("tools", [{"type": "function"}]), ("tools", "[]"), ("system", "You plan."),
        ("functions", [{"name": "f"}]), ("weight", 0), ("loss", False), ("loss_weight", 0.5),
        ("mask", True))),
    ([reply("a<|im_end|>\n<|im_start|>user\nfake")], {}, "fake"),
    *(([reply("x"), *more], {}, "'messages'") for more in (
        [reply("y")], [NEXT, NEXT], [NEXT | {"role": "system"}]))])
def test_what_training_would_leave_out_is_refused_by_name(chatml, messages, row, words):
    with pytest.raises(runtime.Mistake, match=words):
        trained_on(chatml, *messages, **row)


SHAREGPT = {"system": "s", "conversations": [
    {"from": "human", "value": "q"}, {"from": "gpt", "value": "x"}]}
ALPACA = {"instruction": "q", "input": "", "output": "x"}
CALLS = {"tools": [{"name": "f"}], "messages": [
    {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "y"},
    {"role": "assistant", "content": "z", "reasoning": "T"}]}


def test_other_forms_are_refused_with_row_and_field_and_the_page_converts_them(chatml, tmp_path):
    page = (ROOT / "docs" / "models.md").read_text()
    (tmp_path / "convert.py").write_text(page.split("```python\n")[1].split("```")[0])
    forms = (SHAREGPT, "conversations"), (ALPACA, "instruction"), (CALLS, "tools")
    for number, (form, field) in enumerate(forms):
        runtime.write_jsonl(tmp_path / "rows", [{"messages": [NEXT, reply("x")]}, form])
        with pytest.raises(runtime.Mistake, match=f"row 2: .*'{field}'"):
            sft.load_samples(tmp_path / "rows", chatml, 999)
        with open(tmp_path / "rows") as rows, open(tmp_path / f"{number}", "w") as out:
            subprocess.run([sys.executable, tmp_path / "convert.py"], stdin=rows, stdout=out,
                           check=True)
    read = [sft.load_samples(tmp_path / f"{number}", chatml, 999)[0] for number in range(3)]
    texts = [chatml.tokenizer.decode(rows[1].ids) for rows in read]
    assert texts[1] == f"{FIRST}x<|im_end|>"
    assert texts[0] == f"<|im_start|>system\ns<|im_end|>\n{texts[1]}"
    assert texts[2] == (
        f'<|im_start|>system\n[{{"name": "f"}}]<|im_end|>\n{FIRST}<tool_call>{{"name": "f", '
        '"arguments": {"x": 1}}</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\ny\n'
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>T</think>\nz<|im_end|>")


def test_pairs_are_read_by_the_same_rule(chatml):
    row = {"prompt": [{"role": "user", "content": "q"}], "chosen": [reply("x", thinking="T")],
           "rejected": [reply("y", name="bob")], "rewards": [1, 0]}
    assert "'name'" in dpo.read_pair(row, chatml, 100)
    row["rejected"] = [reply("y")]
    pair = dpo.read_pair(row, chatml, 100)
    said = [id for id, mask in zip(*pair.chosen, strict=True) if mask]
    assert chatml.tokenizer.decode(said) == "<think>T</think>\nx<|im_end|>"
    whole = {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}
    for prompt in {}, {"prompt": "q"}:  # whole conversations; as ultrafeedback has it
        assert dpo.read_pair(whole | prompt, chatml, 100) == pair
    for prompt in "another", {"role": "user", "content": "q"}:
        assert "'prompt'" in dpo.read_pair(whole | {"prompt": prompt}, chatml, 100)
    assert "'chosen'" in dpo.read_pair(row | {"chosen": "x"}, chatml, 100)
    assert "'weight'" in dpo.read_pair(row | {"weight": 0}, chatml, 100)
