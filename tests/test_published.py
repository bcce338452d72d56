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
    words = ["convert", "--from", "tool-star", "--out", str(folder / "out"), *flags]
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

TALK = [{"from": "system", "value": SYSTEM}, {"from": "human", "value": "Which lake?"},
        {"from": "gpt", "value": CHAIN}]
FORMS = {
    "alpaca": ALPACA,
    "alpaca with a system prompt": {"system": SYSTEM, "instruction": "Which lake?", "input": "",
                                    "output": CHAIN, "history": []},
    "sharegpt": {"conversations": TALK},
    "sharegpt with a column for the system": {"system": SYSTEM, "conversations": TALK[1:]},
    "openai": {"messages": [{"role": role, "content": turn["value"]} for role, turn in zip(
        ("system", "user", "assistant"), TALK, strict=True)]},
    "a list as text": {"conversations": json.dumps(TALK)},
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
    made, report = convert(tmp_path, [ALPACA | {"output": DIRECT}])
    assert [m["role"] for m in made["sft"][0]["messages"]] == ["system", "user", "assistant"]
    assert learnt(made["sft"][0]["messages"])[1] == DIRECT + "<|im_end|>"
    assert report["sft"]["odd, and kept"] == {}


REFUSED = {
    "not JSON": '{"instruction": ',
    "it is not an object with columns": [1, 2],
    "neither instruction and output nor conversations; columns: answer, question":
        {"question": "a", "answer": "b"},
    "it has a history of earlier turns": ALPACA | {"history": [["a", "b"]]},
    "an input that is not text": ALPACA | {"input": ["q"]},
    "no question": ALPACA | {"instruction": " ", "input": ""},
    "a reply that is not text": ALPACA | {"output": None},
    "no reply before the first result": ALPACA | {"output": "<result>42</result>"},
    "a <result> without its </result>, or the reverse": ALPACA | {"output": "<result>42"},
    "a turn with an unknown role, or without text":
        {"messages": [{"role": "judge", "content": "1"}]},
}


def test_rows_that_cannot_be_used_are_counted_by_cause_with_their_lines(tmp_path):
    rows = [*REFUSED.values(), ALPACA, ALPACA | {"output": "a</result>b"}]
    made, report = convert(tmp_path, rows)
    assert len(made["sft"]) == 1
    causes = list(REFUSED)
    expected = {cause: {"count": 1, "lines": [i]} for i, cause in enumerate(causes, 1)}
    expected["a <result> without its </result>, or the reverse"] = {"count": 2, "lines": [9, 12]}
    assert report["sft"]["refused"] == expected
    assert (report["sft"]["rows"], report["sft"]["kept"]) == (12, 1)


@pytest.mark.parametrize("output, odd", [
    ("<think>a</think>", "no answer"),
    ("<search>a</search><think>b</think>" + DIRECT, "the numbers of results and calls differ"),
    ("<think>a</think>\n<result>b</result>\n" + DIRECT, "a result without a call")])
def test_odd_chains_are_kept_and_noted(tmp_path, output, odd):
    made, report = convert(tmp_path, [ALPACA, ALPACA | {"output": output}])
    assert len(made["sft"]) == 2 and as_tags(made["sft"][1]["messages"], True) == output
    assert report["sft"]["odd, and kept"][odd] == {"count": 1, "lines": [2]}


def test_the_published_prompt_is_kept_and_written_where_a_stage_can_take_it(tmp_path):
    rows = [ALPACA, ALPACA, ALPACA | {"instruction": "Another."}]
    _, report = convert(tmp_path, rows)
    assert (tmp_path / "out" / "system.txt").read_text() == SYSTEM + "\n"
    assert report["sft"]["system prompts"] == 2


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
    assert made["rl"] == [{"id": "hotpot-7", "query": "Which lake?", "golds": ["Mol"],
                           "check": "qa", "data_source": "hotpot", "ability": "qa"}]
    assert load_tasks(tmp_path / "out" / "rl.jsonl", lambda row: Tools.load_task(None, row))


def test_a_column_question_goes_before_the_prompt_and_tables_may_be_written_as_text(tmp_path):
    row = VERL | {"question": "How deep?", "extra_info": "{'index': 3}",
                  "reward_model": '{"ground_truth": "12 m"}'}
    made, _ = convert(tmp_path, None, [row, VERL | {"prompt": str(VERL["prompt"])},
                                       VERL | {"prompt": "Plainly?", "extra_info": None}])
    assert [(task["id"], task["query"], task["golds"]) for task in made["rl"]] == [
        ("hotpot-3", "How deep?", ["12 m"]), ("hotpot-7", "Which lake?", ["Mol"]),
        ("hotpot-3-2", "Plainly?", ["Mol"])]


@pytest.mark.parametrize("ability, check", [("math", "math"), ("MATH", "math"), ("qa", "qa"),
                                            ("fact-reasoning", "qa"), ("QA", "qa")])
def test_the_check_follows_the_ability(tmp_path, ability, check):
    made, _ = convert(tmp_path, None, [VERL | {"ability": ability}])
    assert made["rl"][0]["check"] == check


@pytest.mark.parametrize("gold", [
    "Mol", " \\frac{1}{2}", "[1, 2]", "[0, \\infty)", "(a, b]", ["Mol", "Lake Mol"], ["[1, 2]"]])
def test_golds_are_kept_as_they_are(tmp_path, gold):
    made, report = convert(tmp_path, None, [truth(gold), truth({"target": gold})])
    for task in made["rl"]:
        assert task["golds"] == (gold if isinstance(gold, list) else [gold])
        assert "ground_truth" not in task
    assert report["rl"]["odd, and kept"].keys() == {"a repeated question"}


def test_questions_that_occur_twice_and_torn_golds_are_kept_and_noted(tmp_path):
    rows = [truth("Mol"), truth("mol"), VERL | {"ability": "math", "reward_model": {
        "ground_truth": "1}^N"}, "question": "Torn?"}]
    made, report = convert(tmp_path, None, rows)
    assert [task["golds"] for task in made["rl"]] == [["Mol"], ["mol"], ["1}^N"]]
    noted = {cause: found["lines"] for cause, found in report["rl"]["odd, and kept"].items()}
    assert noted == {"a repeated question with other golds": [2],
                     "a gold with unbalanced braces": [3]}


@pytest.mark.parametrize("gold, golds, printed", [
    ("['Mol', \"Orm's lake\"]", ["Mol", "Orm's lake"], True), ("['12', '13']", ["12", "13"], True),
    ("[Mol, Lake Mol]", ["Mol", "Lake Mol"], True), (["['Mol', 'Orm']"], ["Mol", "Orm"], True),
    (42, ["42"], False), (["Mol", ""], ["Mol"], False)])
def test_printed_lists_are_split_and_the_published_text_is_kept(tmp_path, gold, golds,
                                                                       printed):
    made, report = convert(tmp_path, None, [truth(gold)])
    assert (made["rl"][0]["golds"], made["rl"][0]["ground_truth"]) == (golds, gold)
    assert report["rl"]["odd, and kept"] == (
        {"golds are a printed list": {"count": 1, "lines": [1]}} if printed else {})


def test_rows_that_are_no_tasks_are_counted_by_cause(tmp_path):
    rows = [VERL, truth(None), truth([]), VERL | {"ability": "judge"}, "oops",
            {"text": "a", "label": 1}, {key: VERL[key] for key in VERL if key != "ability"}]
    made, report = convert(tmp_path, None, rows)
    assert len(made["rl"]) == 1
    assert {cause: found["lines"] for cause, found in report["rl"]["refused"].items()} == {
        "no gold": [2, 3], "ability 'judge' is neither of math nor of qa": [4],
        "not JSON": [5], "no question; columns: label, text": [6],
        "ability None is neither of math nor of qa": [7]}


def test_an_empty_column_names_no_row(tmp_path):
    row = VERL | {"id": None, "data_source": None, "extra_info": {"index": None}}
    assert convert(tmp_path, None, [row])[0]["rl"][0]["id"] == "rl-1"
    assert convert(tmp_path, [ALPACA | {"id": None}])[0]["sft"][0]["task"]["id"] == "sft-1"


def test_ids_that_occur_twice_are_counted_and_made_unique(tmp_path):
    rows = [VERL | {"id": name} for name in ("7", "7", "7-2", "7", 8, "8")]
    made, report = convert(tmp_path, None, rows)
    assert [task["id"] for task in made["rl"]] == ["7", "7-3", "7-2", "7-4", "8", "8-2"]
    assert report["rl"]["duplicated ids"] == 3
    assert convert(tmp_path, [ALPACA | {"id": 1}] * 2)[1]["sft"]["duplicated ids"] == 1


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
    assert report["rl"]["contaminated"] == [{"id": "hotpot-7"} | same]
    assert "gsm8k" in report["sets"]["missing"] and report["sets"]["questions"] == 1


@pytest.mark.parametrize("rows, why", [
    ([{"a": 1}], "none of its 1 rows can be used: neither instruction and output"),
    ([], "none of its 0 rows can be used: it is empty")])
def test_a_file_of_other_columns_is_one_line_and_nothing_is_written(tmp_path, rows, why):
    with pytest.raises(SystemExit) as stopped:
        convert(tmp_path, rows, [VERL])
    assert why in str(stopped.value) and "\n" not in str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_a_list_that_is_cut_off_is_named(tmp_path):
    (tmp_path / "sft.json").write_text('[{"instruction": "a", ')
    with pytest.raises(SystemExit, match=r"sft.json: not JSON .*; download it again"):
        tir.main(["convert", "--sft", str(tmp_path / "sft.json"), "--out", str(tmp_path / "out")])


def test_without_a_file_to_convert_the_flags_are_named(tmp_path):
    with pytest.raises(SystemExit, match="--sft FILE, --rl FILE or both"):
        tir.main(["convert", "--out", str(tmp_path)])


def test_without_pyarrow_parquet_is_one_line_that_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rl.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(SystemExit, match=r"rl.parquet: reading parquet needs pyarrow "
                                         r"\(pip install pyarrow\).*jsonl") as error:
        tir.main(["convert", "--rl", str(tmp_path / "rl.parquet"), "--out", str(tmp_path / "p")])
    assert "\n" not in str(error.value)


def test_parquet_gives_the_same_tasks(tmp_path):
    if not importlib.util.find_spec("pyarrow"):
        # only the list for GPUs, where the recipes run, has it
        assert not (os.environ.get("CI") and shutil.which("nvidia-smi")), "pyarrow is missing"
        pytest.skip("pyarrow is not installed, nor in requirements-cpu.txt")
    from pyarrow import Table, parquet

    words = ["convert", "--rl", str(tmp_path / "rl.parquet"), "--out", str(tmp_path / "p")]
    (tmp_path / "rl.parquet").write_bytes(b"PAR1")
    with pytest.raises(SystemExit, match="rl.parquet"):
        tir.main(words)
    parquet.write_table(Table.from_pylist([VERL, VERL]), tmp_path / "rl.parquet")
    tir.main(words)
    made, _ = convert(tmp_path, None, [VERL, VERL])
    assert read_jsonl(tmp_path / "p" / "rl.jsonl") == made["rl"]


def test_a_long_text_of_open_tags_is_read_in_linear_time():
    text = "<think>" + " " * 200_000 + "<result>" * 50_000
    with pytest.raises(published.Refused):
        published.split_results(text)
