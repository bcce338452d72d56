"""Tool-Star's published data in our form: results are masked, no row and no gold is lost.

Every file here is made by hand, in the forms that such data is published in.
"""
import json

import pytest

import runtime
from runtime import load_tasks, read_jsonl
from toolstar import __main__ as star
from toolstar import published
from toolstar.tools import Tools, as_tags

SYSTEM = "Think, and call tools by tags."
CHAIN = ("<think>I search.</think>\n<search> lakes of Orm </search>\n<result>\nLake Mol\n</result>"
         "\n\n<think>I compute.</think>\n<python>\nprint(6*7)\n</python> <result>\n42\n</result>\n"
         "<think>Done.</think><answer>\\[ \\boxed{42} \\]</answer>")
ALPACA = {"instruction": SYSTEM, "input": "Which lake?", "output": CHAIN}


def convert(folder, sft_rows=None, rl_rows=None, *flags, form="jsonl"):
    """Convert these rows -> ({file: its rows}, the report)."""
    words = ["convert", "--out", str(folder / "out"), *flags]
    for part, rows in ("sft", sft_rows), ("rl", rl_rows):
        if rows is not None:
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            text = "\n".join(lines) if form == "jsonl" else "[" + ",\n".join(lines) + "]"
            (folder / f"{part}.{form}").write_text(text, encoding="utf-8")
            words += [f"--{part}", str(folder / f"{part}.{form}")]
    star.main(words)
    made = {part: read_jsonl(folder / "out" / f"{part}.jsonl") for part in ("sft", "rl")
            if (folder / "out" / f"{part}.jsonl").exists()}
    return made, json.loads((folder / "out" / "report.json").read_text())


# ---------------------------------------------------------------- SFT

FORMS = {
    "the instruction is the prompt": ALPACA,
    "a column for the prompt": {"system": SYSTEM, "instruction": "Which lake?", "input": "",
                                "output": CHAIN, "history": []},
    "missing values": {"system": float("nan"), "instruction": SYSTEM, "input": "Which lake?",
                       "output": CHAIN, "history": None, "id": float("nan")},
}


@pytest.mark.parametrize("form", ["jsonl", "json"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_episode_with_results_of_their_own(tmp_path, name, form):
    made, _ = convert(tmp_path, [FORMS[name]], form=form)
    row, = made["sft"]
    assert as_tags(row["messages"], tags=True) == CHAIN
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", SYSTEM), ("user", "Which lake?"),
        ("assistant", "<think>I search.</think>\n<search> lakes of Orm </search>"),
        ("result", "\n<result>\nLake Mol\n</result>"),
        ("assistant", "\n\n<think>I compute.</think>\n<python>\nprint(6*7)\n</python>"),
        ("result", " <result>\n42\n</result>"),
        ("assistant", "\n<think>Done.</think><answer>\\[ \\boxed{42} \\]</answer>")]
    assert row["task"] == {"id": "sft-1", "query": "Which lake?"}
    assert (row["answer"], row["stop"], row["calls"], row["turns"]) == ("42", "answer", 2, 3)


REFUSED = [
    {"question": "a", "answer": "b"}, ALPACA | {"history": [["a", "b"]]},
    ALPACA | {"instruction": " ", "input": ""}, ALPACA | {"output": None},
    ALPACA | {"output": "<result>42</result>"}, ALPACA | {"output": "<result>42"},
    ALPACA | {"output": "a</result>b"}]


def test_rows_that_cannot_be_used_are_counted_by_cause_with_their_lines(tmp_path):
    made, report = convert(tmp_path, [*REFUSED, ALPACA])
    assert len(made["sft"]) == 1
    assert {cause: found["first lines"] for cause, found in report["sft"]["refused"].items()} == {
        "not an instruction, an input and an output without a history": [1, 2, 3, 4],
        "no reply before the first result": [5],
        "a <result> without its </result>, or the reverse": [6, 7]}
    assert (report["sft"]["rows"], report["sft"]["kept"]) == (8, 1)


# ---------------------------------------------------------------- RL

VERL = {"data_source": "hotpot", "prompt": [{"role": "system", "content": SYSTEM},
                                            {"role": "user", "content": "Which lake?"}],
        "ability": "qa", "reward_model": {"style": "rule", "ground_truth": "Mol"},
        "extra_info": {"index": 7, "split": "train"}}


def truth(gold, **more):
    return VERL | {"reward_model": {"ground_truth": gold}} | more


def test_a_row_of_verls_columns_is_a_task_of_the_world(tmp_path):
    made, _ = convert(tmp_path, None, [VERL])
    assert made["rl"] == [{"id": "hotpot-1", "query": "Which lake?", "golds": ["Mol"],
                           "check": "qa", "data_source": "hotpot", "ability": "qa"}]
    assert load_tasks(tmp_path / "out" / "rl.jsonl", lambda row: Tools.load_task(None, row))


def test_a_question_of_an_evaluation_set_is_dropped_and_listed(tmp_path):
    asked = {"id": "b", "question": "which lake", "answer": "Mol"}
    runtime.write_jsonl(tmp_path / "sets/bamboogle/test.jsonl", [asked])
    other = VERL | {"question": "Which river?"}
    made, report = convert(tmp_path, None, [VERL, other], "--sets", str(tmp_path / "sets"))
    assert [task["query"] for task in made["rl"]] == ["Which river?"]
    assert [row["same as"] for row in report["rl"]["contaminated"]] == ["bamboogle/b"]


@pytest.mark.parametrize("nothing", [float("nan"), None, "", "None"])
def test_rows_that_are_no_tasks_are_counted_by_cause(tmp_path, nothing):
    rows = [VERL, truth(nothing), VERL | {"ability": "judge"}, VERL | {"ability": nothing},
            VERL | {"prompt": nothing}, VERL | {"reward_model": nothing},
            VERL | {"reward_model": "text"}, VERL | {"data_source": nothing}]
    made, report = convert(tmp_path, None, rows)
    assert [task["id"] for task in made["rl"]] == ["hotpot-1", "rl-8"]
    assert {cause: found["first lines"] for cause, found in report["rl"]["refused"].items()} == {
        "no gold": [2, 6, 7], "ability 'judge' is neither mathematics nor a fact": [3],
        "ability '' is neither mathematics nor a fact": [4], "no question": [5]}


def test_a_long_text_of_open_tags_is_read_in_linear_time():
    text = "<think>" + " " * 200_000 + "<result>" * 50_000
    with pytest.raises(published.Refused):
        published.split_results(text)
