"""An axis makes a table and a picture of several runs, with the papers' numbers beside them."""
import json

import pytest

import evaluate
from recipes import axes
from runtime import write_jsonl, write_text
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
    said = capsys.readouterr().out
    assert said.startswith(f"macro: no judged episodes in {none} yet\n{table}\n")
    assert said.splitlines()[-1].startswith(f"{tmp_path}/reward.md: ")
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
    rows = [{"task": {"id": name, "local_constraint": wishes}, "strict": 0.0, "stop": "answer",
             "messages": [], "score": summary({**dict.fromkeys(COMMONSENSE, right),
                                               **dict.fromkeys(HARD, absent), **checks})}
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


def test_an_axis_has_differences_and_the_size_of_a_study_that_would_find_them(tmp_path):
    made = {"sum": ([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
            "macro": ([1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]),
            "success": ([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0])}
    runs = [f"{name}={evaluated(tmp_path / f'{name}{seed}', wins, [(0.1, 1000)])}"
            for name, seeds in made.items() for seed, wins in enumerate(seeds)]
    axes.main(["--axis", "reward", "--out", str(tmp_path), "--runs", *runs])
    head, _, *lines = cells((tmp_path / "reward.md").read_text())
    assert head[4:6] == ["minus the first trained", "tasks, seeds to tell"]
    assert lines[0][4:6] == ["", ""]
    # of tasks 0, 1/2, 1, 0, whose variance is 11/48; of seeds 1/4, 1/2, 1/32: 7.84 x over 9/64
    assert lines[1][4].startswith("+37.5 (") and lines[1][5] == "13, 2"
    # of tasks 0, -1/2, 1/2, 0; of seeds 0, 0: nothing to tell
    assert lines[2][4].startswith("+0.0 (-") and lines[2][5] == "-, -"
    other = evaluated(tmp_path / "other", [])
    write_jsonl(other / "episodes.jsonl", [{"task": {"id": "else"}, "score": {"success": 1.0},
                                            "strict": 1.0}])
    axes.main(["--axis", "reward", "--out", str(tmp_path), "--runs", *runs, f"sft={other}"])
    lines = cells((tmp_path / "reward.md").read_text())
    (sft,) = (line for line in lines if line[0] == "sft")
    assert sft[4:6] == ["no task in common", ""]


def test_algorithms_are_shown_with_minutes_and_gpu_hours_beside_the_papers(tmp_path):
    one = evaluated(tmp_path / "a", [1.0, 0.0], [(0.1, 1000), (0.2, 2000), (0.3, 2000)])
    two = evaluated(tmp_path / "b", [1.0, 0.0], [(0.1, 2000)])
    axes.main(["--axis", "algorithm", "--out", str(tmp_path), "--gpus", "16", "--runs",
               f"arpo={one}", f"arpo-released={two}"])
    head, _, arpo, released, *others = cells((tmp_path / "algorithm.md").read_text())
    assert [cell.split(",")[0] for cell in head[-4:]] == ["min / update", "paper", "GPU hours",
                                                          "paper"]
    # updates of 96.5, 6.5 and 6.5 s, each after 99 s of validation: 406.5 s of 16 GPUs
    assert (arpo[0], *arpo[-4:]) == ("arpo", "0.11", "9.5 / 13.3 / 13.3", "1.8", "195 / 273 / 547")
    assert (released[0], *released[-4:]) == ("arpo-released", "0.11", "", "0.5", "")
    assert {len(line) for line in others} == {len(head)}


def answered(folder, **told):
    """Write OUT/qa of a run: the numbers of qa_eval.py."""
    write_text(folder / "qa" / "tax.json", json.dumps(told))
    return folder / "qa"


def test_the_scores_on_questions_are_printed_beside_the_papers(tmp_path, capsys):
    one = answered(tmp_path / "a", rl={"em": 0.3, "sets": {"nq": 0.2, "popqa": 0.4}})
    two = answered(tmp_path / "b", rl={"em": 0.2, "sets": {"nq": 0.2, "popqa": 0.2}})
    runs = [f"macro={one}/rl", f"macro={two}/rl", f"sft={tmp_path}/none/qa/sft"]
    axes.main(["--axis", "reward", "--questions", "--out", str(tmp_path), "--runs", *runs])
    assert "sft: no answered questions in" in capsys.readouterr().out
    head, _, *lines = cells((tmp_path / "reward-questions.md").read_text())
    assert head == ["setting", "paper, exact match, mean of its seven sets, 1.5B / 3B / 7B",
                    "ours, mean of 2 sets (each seed)", "nq", "popqa", "triviaqa", "hotpotqa",
                    "2wikimultihopqa", "musique", "bamboogle"]
    made = {line[0]: line[1:] for line in lines}
    assert made["macro"][:3] == ["25.6 / 34.2 / 42.9", "25.0 (30.0, 20.0)",
                                 "20.0 / 29.6 / 37.0 / 42.2"]
    assert made["sft"][:3] == ["11.5 / 30.7 / 41.9", "not run", "- / 13.5 / 35.1 / 41.2"]
    assert made["search-r1"][:2] == ["25.0 / 32.5 / 38.5", "not run"]
    assert {len(line) for line in lines} == {len(head)}


def test_the_hack_gauge_of_an_axis_covers_the_last_tenth_of_updates(tmp_path):
    runs = []
    for seed, last in enumerate((0.5, 0.1)):
        folder = evaluated(tmp_path / f"{seed}", [1.0, 0.0], [(0.1, 1000)] * 20)
        log = tmp_path / f"{seed}" / "rl" / "log.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        for row in rows:
            end = row["step"] > 18  # two of twenty
            row |= {"gap": last if end else 9.0, "decorative": 0.25, "reward": float(row["step"])}
        write_jsonl(log, rows)
        runs.append(f"released={folder}")
    sft = evaluated(tmp_path / "sft", [0.0, 0.0])
    axes.main(["--axis", "tool-reward", "--runs", f"sft={sft}", *runs, "--out", str(tmp_path)])
    head, _, *lines = cells((tmp_path / "tool-reward.md").read_text())
    assert head[-3:] == ["gap, last tenth", "decorative, last tenth", "reward, last tenth"]
    made = {line[0]: line for line in lines}
    assert made["released"][-3:] == ["0.300", "0.250", "19.500"]
    assert made["sft"][-3:] == ["", "", ""] and made["sft"][2].startswith("0.0")
    assert made["answer"][1:3] == ["50.4 / 50.3 / 83.1 / 80.2", "not run"]
    assert {len(line) for line in lines} == {len(head)}


def test_an_axis_is_a_table_and_a_picture(tmp_path, capsys):
    one = evaluated(tmp_path / "a", [1.0, 0.0], [(0.1, 1000), (0.3, 3000)])
    runs = [f"0%={one}", f"5%={tmp_path}/none/eval/rl"]
    axes.main(["--axis", "noise", "--runs", *runs, "--out", str(tmp_path / "axis")])
    table = (tmp_path / "axis" / "noise.md").read_text()
    assert table in capsys.readouterr().out
    assert "failures in up to 5% of the calls do no harm, in 10% they do" in table
    assert (tmp_path / "axis" / "noise.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_file_of_a_running_evaluation_is_read_and_left_alone(tmp_path, capsys):
    file = evaluated(tmp_path, [1.0, 0.0]) / "episodes.jsonl"
    text = file.read_text()
    file.write_text(text + text[:40])
    axes.main(["--axis", "noise", "--runs", f"0%={file.parent}", "--out", str(tmp_path)])
    assert "| 0% |  | 50.0 (50.0) |" in capsys.readouterr().out
    assert file.read_text() == text + text[:40]


@pytest.mark.parametrize("words, message", [
    (["--axis", "noise"], "--runs"),
    (["--runs", "a={tmp}"], "--axis"),
    (["--axis", "noise", "--runs", "{tmp}"], "is not NAME=OUT/eval/rl"),
    (["--axis", "noise", "--runs", "0%={tmp}"], "train and evaluate them first"),
    (["--axis", "noise", "--questions", "--runs", "0%={tmp}/qa/rl"], "QA=DIR RETRIEVER=URL"),
])
def test_missing_inputs_of_an_axis_are_named_in_one_line(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        axes.main([word.format(tmp=tmp_path) for word in words])
    said = str(stop.value) if isinstance(stop.value.code, str) else capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written"
