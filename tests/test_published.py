"""Tool-Star's published data in our form: results are masked, no row and no gold is lost.

Every file here is made by hand, in the forms that such data is published in.

    python -m pytest tests/test_published.py
"""
import importlib.util
import json
import os
import shutil
import sys

import pytest
from conftest import Letters

import sft
from runtime import Template, load_tasks, read_jsonl
from sandbox import PROMPTS
from toolstar import published, tir
from toolstar.tools import Tools, as_tags

SYSTEM = "Think, and call tools by tags."
CHAIN = ("<think>I search.</think>\n<search> lakes of Orm </search>\n<result>\nLake Mol\n</result>"
         "\n\n<think>I compute.</think>\n<python>\nprint(6*7)\n</python> <result>\n42\n</result>\n"
         "<think>Done.</think><answer>\\[ \\boxed{42} \\]</answer>")
DIRECT = "<think>I know.</think><answer>\\boxed{Mol}</answer>"
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
    tir.main(words)
    made = {part: read_jsonl(folder / "out" / f"{part}.jsonl") for part in ("sft", "rl")
            if (folder / "out" / f"{part}.jsonl").exists()}
    return made, json.loads((folder / "out" / "report.json").read_text())


def learnt(messages):
    """(all text that sft.py reads, the text that it trains on) of an episode's messages."""
    ids, mask = sft.render(messages, Template(Letters(), "letters"))
    return Letters().decode(ids), Letters().decode(
        [i for i, kept in zip(ids, mask, strict=True) if kept])


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
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", SYSTEM), ("user", "Which lake?"),
        ("assistant", "<think>I search.</think>\n<search> lakes of Orm </search>"),
        ("result", "\n<result>\nLake Mol\n</result>"),
        ("assistant", "\n\n<think>I compute.</think>\n<python>\nprint(6*7)\n</python>"),
        ("result", " <result>\n42\n</result>"),
        ("assistant", "\n<think>Done.</think><answer>\\[ \\boxed{42} \\]</answer>")]
    assert row["task"] == {"id": "sft-1", "query": "Which lake?"}
    assert (row["answer"], row["stop"], row["calls"], row["turns"]) == ("42", "answer", 2, 3)


def test_joined_the_messages_are_the_published_text_and_results_are_not_learnt(tmp_path):
    made, _ = convert(tmp_path, [ALPACA])
    messages = made["sft"][0]["messages"]
    seen, said = learnt(messages)
    assert as_tags(messages, tags=True) == CHAIN
    assert seen.endswith(CHAIN + "<|im_end|>")
    assert said == (CHAIN.replace("\n<result>\nLake Mol\n</result>", "")
                    .replace(" <result>\n42\n</result>", "") + "<|im_end|>")


def test_a_chain_without_tools_is_one_reply(tmp_path):
    made, _ = convert(tmp_path, [ALPACA | {"output": DIRECT}])
    assert [m["role"] for m in made["sft"][0]["messages"]] == ["system", "user", "assistant"]
    assert learnt(made["sft"][0]["messages"])[1] == DIRECT + "<|im_end|>"


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


def test_the_published_prompt_is_kept_and_written_where_a_stage_can_take_it(tmp_path):
    rows = [ALPACA, ALPACA, ALPACA | {"instruction": "Another."}]
    convert(tmp_path, rows)
    assert (tmp_path / "out" / "system.txt").read_text() == SYSTEM + "\n"


def test_a_row_without_a_prompt_gets_ours_of_grammar_tags(tmp_path):
    made, _ = convert(tmp_path, [{"instruction": "Which lake?", "output": DIRECT}])
    prompt = made["sft"][0]["messages"][0]["content"]
    assert prompt[:40] == (PROMPTS / "tags.txt").read_text()[:40]
    assert "<search>" in prompt and "<browse>" not in prompt


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


def test_a_column_question_goes_before_the_prompt_which_may_be_a_text(tmp_path):
    made, _ = convert(tmp_path, None, [VERL | {"question": "How deep?"},
                                       VERL | {"prompt": "Plainly?"}])
    assert [task["query"] for task in made["rl"]] == ["How deep?", "Plainly?"]


@pytest.mark.parametrize("ability, check", [("math", "math"), ("MATH", "math"), ("qa", "qa"),
                                            ("fact-reasoning", "qa"), ("QA", "qa")])
def test_the_check_follows_the_ability(tmp_path, ability, check):
    made, _ = convert(tmp_path, None, [VERL | {"ability": ability}])
    assert made["rl"][0]["check"] == check


@pytest.mark.parametrize("gold, golds", [
    ("Mol", ["Mol"]), (" \\frac{1}{2}", [" \\frac{1}{2}"]), ("[1, 2]", ["[1, 2]"]),
    (["Mol", "Lake Mol"], ["Mol", "Lake Mol"]), ("['12', '13']", ["12", "13"]), (42, ["42"])])
def test_golds_are_read_in_both_places(tmp_path, gold, golds):
    made, _ = convert(tmp_path, None, [truth(gold), truth({"target": gold})])
    assert [task["golds"] for task in made["rl"]] == [golds, golds]


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


def test_ids_that_occur_twice_are_made_unique(tmp_path):
    made, _ = convert(tmp_path, None, [VERL | {"id": name} for name in ("7", "7", 8)])
    assert [task["id"] for task in made["rl"]] == ["7", "7-2", "8"]


# ---------------------------------------------------------------- sets and files

def test_questions_of_an_evaluation_set_are_dropped_and_listed(tmp_path):
    (tmp_path / "sets").mkdir()
    row = {"id": 5, "question": "  which LAKE", "answer": "Mol"}
    (tmp_path / "sets" / "bamboogle.jsonl").write_text(json.dumps(row) + "\n")
    made, report = convert(tmp_path, [ALPACA, ALPACA | {"input": "Which one?"}],
                           [VERL, VERL | {"question": "How deep?"}],
                           "--sets", str(tmp_path / "sets"))
    assert [row["task"]["query"] for row in made["sft"]] == ["Which one?"]
    assert [row["query"] for row in made["rl"]] == ["How deep?"]
    same = {"query": "Which lake?", "same as": "bamboogle/5"}
    assert report["sft"]["contaminated"] == [{"id": "sft-1"} | same]
    assert report["rl"]["contaminated"] == [{"id": "hotpot-1"} | same]


@pytest.mark.parametrize("rows", [[{"a": 1}], []])
def test_a_file_of_other_columns_is_one_line_and_nothing_is_written(tmp_path, rows):
    with pytest.raises(SystemExit, match=f"sft.jsonl: none of its {len(rows)} rows can be used"):
        convert(tmp_path, rows, [VERL])
    assert not (tmp_path / "out").exists()


def test_without_a_file_to_convert_the_flags_are_named(tmp_path):
    with pytest.raises(SystemExit, match="--sft FILE, --rl FILE or both"):
        tir.main(["convert", "--out", str(tmp_path)])


def test_without_pyarrow_parquet_is_one_line_that_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rl.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(SystemExit, match=r"rl.parquet needs pyarrow: pip install pyarrow"):
        tir.main(["convert", "--rl", str(tmp_path / "rl.parquet"), "--out", str(tmp_path / "p")])


def test_parquet_gives_the_same_tasks(tmp_path):
    if not importlib.util.find_spec("pyarrow"):
        # only the list for GPUs, where the recipes run, has it
        assert not (os.environ.get("CI") and shutil.which("nvidia-smi")), "pyarrow is missing"
        pytest.skip("pyarrow is not installed, nor in requirements-cpu.txt")
    from pyarrow import Table, parquet

    words = ["convert", "--rl", str(tmp_path / "rl.parquet"), "--out", str(tmp_path / "p")]
    parquet.write_table(Table.from_pylist([VERL, VERL]), tmp_path / "rl.parquet")
    tir.main(words)
    made, _ = convert(tmp_path, None, [VERL, VERL])
    assert read_jsonl(tmp_path / "p" / "rl.jsonl") == made["rl"]


def test_a_long_text_of_open_tags_is_read_in_linear_time():
    text = "<think>" + " " * 200_000 + "<result>" * 50_000
    with pytest.raises(published.Refused):
        published.split_results(text)
