"""A second world, a calculator in 50 lines, is trained and measured by the stages as they are."""
import re

import pytest
import torch
from conftest import ROOT, Plain, Replies, flags_of

import arpo
import grpo
from evaluate import Travel, main, open_world, read_jsonl, write_jsonl

FILE = ROOT / "tests" / "calculator.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A file of sums to be found."""
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    write_jsonl(path, [{"id": f"sum-{i}", "query": f"What is {i} + {i * i}?", "sum": i + i * i}
                       for i in range(6)])
    return path


def add(name, text):
    """A policy that calls the tool and says what it said, in the even plays of a group."""
    a, b = re.search(r"What is (\d+) \+ (\d+)", text).groups()
    told = re.search(r"<tool_response>\n(\d+)<", text)
    if not told:
        call = f'{{"name": "Add", "arguments": {{"a": {a}, "b": {b}}}}}'
        return f"<think>a sum</think><tool_call>{call}</tool_call>", 0.5
    right = int(name.split("/")[3]) % 2 == 0
    return f"<think>told</think><answer>{told[1] if right else -1}</answer>", 0.5


@pytest.mark.parametrize("stage", [grpo, arpo])
def test_a_stage_plays_judges_and_learns_in_a_world_it_has_never_heard_of(
        stage, one_rank, sums, tokenizer, policy):
    args = flags_of(stage, f"--env {FILE} --tasks {sums} --prompts 3 --group 4 --context 800")
    world, engine = open_world(args), Plain(policy)
    tasks = stage.load_tasks(args.tasks, world.load_task)
    samples, _ = stage.play_batch(Replies(tokenizer, add), tokenizer, world, tasks, 0, 1,
                                  "success", args)
    groups = stage.group_advantages(samples)
    told = stage.describe(samples, groups, world.parts)
    assert told["reward"] == told["success"] == told["strict"] == 0.5 and told["called"] == 1
    assert told["calls"] == 1 and told["turns"] == 2 and "cs_micro" not in told
    line = stage.learn(engine, stage.token_weights(groups, args), False, 0, 1, CPU, args)
    assert line["gnorm"] > 0 and line["loss_tokens"] == sum(sum(s.mask) for s in samples)


def test_an_agent_is_measured_in_it_and_the_table_has_its_numbers(
        tiny_model, sums, tmp_path, capfd):
    words = f"""--env {FILE} --model tiny={tiny_model} --tasks {sums} --max-context 400
                --max-turns 3 --max-tokens 24 --out {tmp_path}"""
    main(words.split())
    assert "calculator: closed" in capfd.readouterr().out
    rows = read_jsonl(tmp_path / "tiny" / "episodes.jsonl")
    assert {row["task"]["id"] for row in rows} == {f"sum-{i}" for i in range(6)}
    assert all(row["reward"] == row["score"]["words"] for row in rows)
    table = (tmp_path / "table.md").read_text()
    for line in ("success", "success, strict", "called", "words", "stop: turns"):
        assert f"| {line} | " in table
    assert "cs_micro" not in table and "official" not in table


def test_a_task_that_the_world_refuses_is_named_with_its_row(sums, tmp_path):
    bad = tmp_path / "bad.jsonl"
    write_jsonl(bad, [*read_jsonl(sums), {"id": "odd", "query": "?", "sum": "3"}])
    with pytest.raises(SystemExit, match=r"bad.jsonl, row 7: 'sum' must be a whole number"):
        main(["--env", str(FILE), "--tasks", str(bad), "--model", "x"])


def test_a_reward_that_the_world_does_not_know_is_refused_with_those_it_knows(sums, monkeypatch):
    words = f"grpo.py --env {FILE} --reward macro --tasks {sums}"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit, match="--reward macro: this world knows talk, success"):
        grpo.main()


def test_the_contract_is_what_both_worlds_have():
    world = open_world(flags_of(grpo, f"--env {FILE}"))
    members, travels = ({name for name in dir(kind) if not name.startswith("_")}
                        for kind in (type(world), Travel))
    assert members == travels == {"kinds", "parts", "stops", "slow", "load_task", "episode",
                                  "verdict", "reward", "close"}
    assert len([line for line in FILE.read_text().splitlines() if line.strip()]) <= 60
