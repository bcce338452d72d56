"""The leaderboard's rates have its own denominators, and its file its own format."""
import copy
import json

from test_evaluate import rows_of

from runtime import read_jsonl, write_jsonl
from travel import leaderboard
from travel.leaderboard import official_rates, submission


def test_c11_the_rates_are_over_all_plans_of_the_split_and_all_constraints_asked(trip, mini):
    rates = official_rates(rows_of(trip, mini, [1, 1, 1, 0]), "validation", mini)
    assert rates == {
        "delivery rate": 3 / 180, "commonsense micro rate": 3 * 8 / 1440,
        "commonsense macro rate": 3 / 180, "hard micro rate": 3 * 2 / 420,
        "hard macro rate": 3 / 180, "final pass rate": 3 / 180}


def test_c11_a_plan_whose_hard_constraints_were_not_reached_counts_as_failed(trip, mini):
    rows = rows_of(trip, mini, [1, 1])
    rows[0]["plan"][1]["dinner"] = "Nowhere Diner, Nowhere"
    rates = official_rates(rows, "train", mini)
    assert rates["hard macro rate"] == rates["final pass rate"] == 1 / 45
    assert rates["hard micro rate"] == 2 / 105


def test_of_the_test_split_only_the_delivery_is_known(mini):
    rows = [{"task": {"id": str(i), "idx": i, "query": "?"}, "plan": plan}
            for i, plan in enumerate([None, [{"day": 1}]])]
    assert official_rates(rows, "test", mini) == {"delivery rate": 1 / 1000}
    assert [line["plan"] for line in submission(rows)] == [None, [{"day": 1}]]


def test_the_command_hands_in_the_first_plays_and_prints_the_rates(
        trip, mini, tmp_path, capsys):
    rows = rows_of(trip, mini, [1, 0])
    again = copy.deepcopy(rows[0])
    again["task"]["sample"] = 1
    write_jsonl(tmp_path / "episodes.jsonl", [*rows, again])
    played = json.dumps({"database": str(mini.folder)})
    (tmp_path / "settings.json").write_text(played)  # the tables that the rates are of
    leaderboard.main([str(tmp_path), "--split", "train"])
    assert read_jsonl(tmp_path / "submission.jsonl") == submission(rows)
    said = capsys.readouterr().out
    assert "has 2 lines, not the split's 45" in said
    assert f"final pass rate {100 / 45:14.1f}" in said
