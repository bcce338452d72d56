"""An axis makes a table and a picture of several runs, with the papers' numbers beside them."""

import pytest
from conftest import ROOT, Letters

import evaluate
from recipes import axes, claims
from runtime import Template, write_jsonl
from travel.constraints import COMMONSENSE, HARD, summary
from travel.world import Travel


def evaluated(folder, wins, updates=()):
    """Write OUT/eval/rl of a run with a task per number of wins; at most two succeed strictly."""
    rows = [{"task": {"id": f"t{i}"}, "score": {"success": win, "cs_micro": (1 + win) / 2,
                                                "hard_macro": None if i else win},
             "strict": float(win and i < 2)} for i, win in enumerate(wins)]
    rows.append({"task": {"id": "t"}})  # was not judged
    write_jsonl(folder / "eval" / "rl" / "episodes.jsonl", rows)
    lines = [{"step": 0, "val_success": 0.1}]
    for step, (success, tokens) in enumerate(updates, 1):
        learn = 93.0 if tokens == 1000 else 3.0
        lines.append({"step": step, "success": success, "loss_tokens": tokens, "sync_s": 1.0,
                      "play_s": 2.0, "judge_s": 0.5, "learn_s": learn, "val_s": 99.0})
    if updates:
        write_jsonl(folder / "rl" / "log.jsonl", lines)
    return folder / "eval" / "rl"


def cells(text):
    """The cells of a markdown table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_table_of_an_axis_by_hand(tmp_path, capsys):
    one = evaluated(tmp_path / "a", [1.0, 1.0, 0.0, 1.0], [(0.1, 1000), (0.3, 3000)])
    two = evaluated(tmp_path / "b", [1.0, 0.0, 0.0, 0.0], [(0.2, 2000), (0.4, 4000)])
    sft = evaluated(tmp_path / "c", [0.0, 0.0, 0.0, 0.0])
    none = tmp_path / "none" / "eval" / "rl"
    runs = [f"sft={sft}", f"sum={one}", f"macro={none}", f"sum={two}"]
    axes.main(["--axis", "reward", "--out", str(tmp_path), "--tasks", "a.jsonl", "--runs", *runs])
    table = (tmp_path / "reward.md").read_text()
    assert table in capsys.readouterr().out
    head, _, *lines = cells(table)
    assert head[1:3] == ["paper, 1,000 test queries, 1.5B / 3B / 7B",
                         "ours, 4 tasks of a.jsonl: mean (each seed)"]
    # settings that only the paper ran come last
    assert [line[0] for line in lines] == ["sft", "sum", "macro", "success", "curriculum",
                                          "base"]
    assert lines[3][:3] == ["success", "33.8 / 46.6 / 60.9", "not run"]
    # 75% and 25%, mean 50; tasks 1.0 0.5 0.0 0.5; strict 2 and 1 of 4; 10,000 tokens in 4 updates
    # of 6.5 s, one of which was held up
    assert lines[1][:3] == ["sum", "33.1 / 47.0 / 62.8", "50.0 (75.0, 25.0)"]
    # half of the plays pass all of commonsense, the others half of it; of the two that reached the
    # hard constraints both passed
    assert head[6:11] == ["commonsense micro", "commonsense macro", "hard micro", "hard macro",
                          "strict"]
    assert lines[1][4:] == ["", "", "75.0 / 95.1 / 97.6 / 96.9", "- / 71.6 / 82.5 / 87.4",
                            "- / 51.4 / 64.8 / 78.7", "100.0 / 33.4 / 47.6 / 66.5", "37.5", "2,500",
                            "6.5", "2"]
    low, high = map(float, lines[1][3].split(" to "))
    assert low == pytest.approx(12.5, abs=6.3) and high == pytest.approx(87.5, abs=6.3)
    assert lines[0][1:4] == ["6.9 / 12.2 / 19.7", "0.0 (0.0)", "0.0 to 60.2"]
    assert lines[0][4].startswith("-50.0 (-") and lines[0][10:] == ["0.0", "", "", "0"]
    assert lines[2][1:3] == ["30.1 / 48.2 / 58.9", "not run"] and not any(lines[2][10:])
    assert {len(line) for line in lines} == {len(head)}


def test_hard_micro_pools_the_constraints_of_all_plans(tmp_path, mini):
    """One plan meets its budget, another two of its four constraints: 3 of 5, which is 60%. A mean
    of the plans' shares would be 75%."""
    free = dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))
    bound = free | {"house rule": "pets", "cuisine": ["French"], "transportation": "no flight"}
    right, wrong, absent = [True, None], [False, "why"], [None, None]
    rows = [{"task": {"id": name, "org": "", "local_constraint": wishes}, "strict": 0.0,
             "stop": "answer", "messages": [], "score": summary({
                 **dict.fromkeys(COMMONSENSE, right), **dict.fromkeys(HARD, absent), **checks})}
            for name, wishes, checks in (
                ("budget", free, {"valid_cost": right}),
                ("four", bound, {"valid_cost": right, "valid_cuisine": right,
                                 "valid_room_rule": wrong, "valid_transportation": wrong}))]
    assert evaluate.measure(rows, Travel(mini).lines)["hard_micro"] == pytest.approx(0.6)
    write_jsonl(tmp_path / "eval" / "rl" / "episodes.jsonl", rows)
    axes.main(["--axis", "noise", "--out", str(tmp_path), "--runs", f"0%={tmp_path}/eval/rl"])
    head, _, line = cells((tmp_path / "noise.md").read_text())[:3]
    assert line[head.index("hard micro")] == "60.0"
    # the same plan, four constraints of which were not reached
    rows[1]["score"] = summary(dict.fromkeys((*COMMONSENSE, *HARD), absent))
    assert evaluate.measure(rows, Travel(mini).lines)["hard_micro"] == pytest.approx(0.2)


def test_a_teachers_episodes_are_counted_by_level(tmp_path):
    file, template = tmp_path / "sft.jsonl", Template(Letters(), "letters")
    write_jsonl(file, [
        {"task": {"id": str(calls), "level": level}, "calls": calls, "answer": answer,
         "messages": [{"role": "user", "content": "a" * calls}]}
        for level, calls, answer in (
            ("easy", 2, "abcd"), ("easy", 4, "abcdef"), ("hard", 9, None))])
    around = len(template.encode(template.text([{"role": "user", "content": ""}])))
    lines = cells(axes.episodes_table([str(file)], template))
    assert lines[2:6] == [
        ["easy", "2", "3.0", f"{around + 3}.0", "5.0"], ["medium", "0", "", "", ""],
        ["hard", "1", "9.0", f"{around + 9}.0", "0.0"],
        ["all", "3", "5.0", f"{around + 5}.0", "3.3"]]
    assert lines[6] == ["paper, easy", "627 (52.3%)", "8.8", "10,100.0", "1,204.7"]


def test_a_claim_holds_if_the_interval_of_two_binomials_leaves_0_out(tmp_path):
    # 34.9 - 30.1; 1.96 * sqrt((0.349 * 0.651 + 0.301 * 0.699) / 1000) = 4.10
    gap = claims.papers_gap("reward/curriculum/1.5b", "reward/macro/1.5b")
    assert gap == pytest.approx((0.048, 0.0070, 0.0890), abs=1e-4)
    assert claims.cell(gap, ">") == "+4.8 (+0.7 to +8.9) holds"
    assert claims.cell(gap, "<").endswith(" against") and claims.cell(gap, "=").endswith(" against")
    unclear = claims.papers_gap("reward/curriculum/3b", "reward/macro/3b")
    assert claims.cell(unclear, ">").endswith(" cannot be told")
    # Bamboogle's 125 questions are a seventh of the mean: sqrt((.528 * .472 + .376 * .624) / 125)
    change, low, high = claims.papers_gap("ood/macro/7b", "ood/sum/7b")
    assert (change, high - low) == pytest.approx((0.062, 2 * 1.96 * 0.06222 / 7), abs=1e-4)


def test_our_runs_stand_beside_the_papers_claims(tmp_path):
    good = evaluated(tmp_path / "a", [1.0] * 30 + [0.0] * 10)
    bad = evaluated(tmp_path / "b", [1.0] * 10 + [0.0] * 30)
    runs = axes.read_runs([f"hard={good}", f"easy={bad}", f"sum={good}", f"curriculum={bad}"])
    lines = {line[1]: line[-1] for line in claims.takeaways(runs)}
    assert lines["easy > hard at 3B"].startswith("-50.0 (")
    assert lines["easy > hard at 3B"].endswith(" against")
    assert lines["sum > curriculum at 7B"].endswith(" holds")
    assert lines["mixed > easy at 3B"] == lines["macro > sum at 7B, out of domain"] == ""
    assert {line[1]: line[-1] for line in claims.takeaways(runs, "7b")}["easy > hard at 3B"] == ""


def test_the_page_has_what_the_command_prints():
    assert claims.page({}) in (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
