"""Pairs: right plays with wrong ones of the same question, without a bias in format or length."""
import pytest

from runtime import read_jsonl, write_jsonl
from toolstar import __main__ as star


def play(question="q", said="<answer>7</answer>", reward=1.1, calls=1, stop="answer", system="S",
         **other):
    """A judged episode with one reply, or with the replies of a list."""
    replies = [said] if isinstance(said, str) else said
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "seen"}]
    return {"task": {"id": question, "query": question}, "messages": messages[:-1], "calls": calls,
            "stop": stop, "reward": reward, "score": {"success": float(reward >= 1)}} | other


@pytest.fixture
def made(tmp_path):
    """made(plays, words) -> their pairs."""
    def made(plays, *words):
        write_jsonl(tmp_path / "episodes.jsonl", plays)
        star.main(["pairs", "--episodes", str(tmp_path / "episodes.jsonl"), "--out", str(tmp_path),
                    "--held-out", "0", *words])
        return read_jsonl(tmp_path / "train.jsonl")
    return made


def replies(row, side):
    return [message["content"] for message in row[side] if message["role"] == "assistant"]


def test_a_pair_is_a_right_and_a_wrong_play_of_one_question(made):
    rows = made([play("a", "right", 1.1), play("a", "wrong", 0.4), play("b", "right", 1.0),
                 play("c", "wrong", -1.0)])
    (row,) = rows
    assert row == {
        "task": {"id": "a", "query": "a"}, "rewards": [1.1, 0.4], "calls": [1, 1],
        "stops": ["answer", "answer"],
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "right"}],
        "rejected": [{"role": "assistant", "content": "wrong"}]}


def test_the_prompt_holds_all_that_both_plays_share(made):
    shared, last = ["call 1", "call 2"], {"role": "user", "content": "seen"}
    right, wrong = play(said=[*shared, "7"]), play(said=[*shared, "call 3", "8"], reward=0.0)
    (row,) = made([right, wrong])
    assert row["prompt"] == right["messages"][:6] and row["prompt"][-1] == last
    assert (replies(row, "chosen"), replies(row, "rejected")) == (["7"], ["call 3", "8"])
    wrong["messages"][5] = last | {"content": "Error"}  # the same call, answered differently
    (row,) = made([right, wrong])
    assert row["prompt"] == right["messages"][:5]
    assert row["chosen"][0] == last and row["rejected"][0]["content"] == "Error"


def test_the_rejected_of_right_format_comes_first_and_then_the_nearest_length(made):
    plays = [play(said="r" * 50), play(said="w" * 50, reward=-1.0, stop="format"),
             play(said="w" * 90, reward=0.0), play(said="w" * 44, reward=0.0)]
    rows = made(plays, "--per-question", "3")
    assert [len(replies(row, "rejected")[0]) for row in rows] == [44, 90, 50]
    assert [row["stops"][1] for row in rows] == ["answer", "answer", "format"]


def test_with_fewer_calls_the_right_play_with_fewer_calls_is_chosen(made):
    plays = [play(said="one", calls=1), play(said="three", calls=3), play(said="wrong", reward=0.0),
             play("b", "no call", 1.0, 0), play("b", "a call, and worth more", 1.1, 1)]
    assert [row["rewards"][1] for row in made(plays)] == [0.0, 0.0]
    rows = made(plays, "--fewer-calls")
    assert [row["rewards"] for row in rows] == [[1.1, 0.0], [1.1, 0.0], [1.1, 1.1]]
    assert rows[-1]["calls"] == [1, 3] and replies(rows[-1], "chosen") == ["one"]


def test_plays_that_teach_nothing_are_left_out_and_counted(made, capsys):
    broken = play(said="broken", reward=0.0, tools=[{"status": "ok"}, {"status": "broken"}])
    unjudged = {key: value for key, value in play().items() if key not in ("reward", "score")}
    silent = play(said=[], reward=-1.0)
    silent["messages"] = silent["messages"][:1]
    rows = made([play(said="right"), play(said="right"), play(said="wrong", reward=0.0), broken,
                 unjudged, silent])
    assert len(rows) == 1
    said = capsys.readouterr().out
    for cause in ("seen before", "a tool was broken", "no reward", "no reply"):
        assert f"1 plays left out: {cause}" in said


def test_questions_are_held_out_whole_whatever_their_ids_and_the_same_ones_again(made, tmp_path):
    plays = [play(f"Question {i}{sign}", f"{right}", float(right)) | {"task": {
        "id": f"{name}-{i}", "query": f"Question {i}{sign}"}}
        for i in range(60) for name, sign in (("a", "?"), ("b", " ?")) for right in (0, 1)]
    held = []
    for some in plays, plays[:100]:
        sides = made(some, "--held-out", "0.3"), read_jsonl(tmp_path / "val.jsonl")
        learnt, out = ({row["task"]["id"][2:] for row in side} for side in sides)
        assert not learnt & out and len(learnt | out) == len(some) // 4
        held.append(out)
    assert held[1] == held[0] & set(map(str, range(25))) and 5 <= len(held[0]) <= 30


def test_principles_are_removed_from_the_pairs_or_kept(made, tmp_path):
    (tmp_path / "principles.txt").write_text("\nA right answer earns 1.\n")
    system = "You answer.\n\nA right answer earns 1."
    plays = [play(said="right", system=system), play(said="wrong", reward=0.0, system=system),
             play(said="plain", reward=0.0, system="You answer.")]
    rows = made(plays)
    assert len(rows) == 1 and rows[0]["prompt"][0]["content"] == system
    rows = made(plays, "--principles", str(tmp_path / "principles.txt"))
    assert len(rows) == 2, "without the principles the prompts are the same"
    assert {row["prompt"][0]["content"] for row in rows} == {"You answer."}
    with pytest.raises(SystemExit, match="no episode's prompt contains the text of"):
        made(plays[2:], "--principles", str(tmp_path / "principles.txt"))
