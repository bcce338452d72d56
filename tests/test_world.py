"""A second world, a calculator in 50 lines, works in the stages without changes to them; the travel
world refuses tasks that no plan can solve."""
import math
import sys

import pytest
from conftest import ROOT, witness

from runtime import Mistake
from travel.world import Travel

FILE = ROOT / "tests" / "calculator.py"


def test_both_worlds_have_the_members_of_the_contract():
    sys.path.insert(0, str(FILE.parent))
    from calculator import Calculator

    members = {name for name in dir(Calculator) if not name.startswith("_")}
    optional = {"lines", "solver", "careless"}
    assert members | optional == {name for name in dir(Travel) if not name.startswith("_")}
    assert members == {"rewards", "logged", "stops", "slow", "load_task", "episode", "verdict",
                       "reward", "close"}


@pytest.mark.parametrize("change", [
    *({"people_number": value} for value in (0, -2, 0.5, None, True, 10**30)),
    *({"budget": value} for value in (0, math.nan, math.inf, "dear", "1,92", None, True, 10**400)),
    *({"visiting_city_number": value} for value in (0, 3, 1.5)), {"days": 2}, {"days": "three"},
    {"date": ["2022-03-02", "2022-03-01", "2022-03-03"]}, {"date": ["soon"] * 3}, {"query": None},
    {"org": "Atlantis"}, {"dest": "Atlantis"}, {"dest": "Norland"}, {"level": 3}, {"id": None},
    *({"local_constraint": {key: value}} for key, value in (
        ("house rule", "dancing"), ("room type", "castle"), ("transportation", "by train"),
        ("cuisine", 7), ("cuisine", "1,920"))), {"local_constraint": "nothing"}])
def test_a_travel_task_that_no_plan_can_solve_is_refused_with_its_key(mini, change):
    task = witness(mini)[0] | {"people_number": "2"}  # published files hold numbers as text
    assert Travel(mini).load_task(task)["people_number"] == 2
    assert Travel(mini).load_task(task | {"budget": "1,920"})["budget"] == 1920
    (key, value), = change.items()
    key = next(iter(value)) if isinstance(value, dict) else key
    with pytest.raises(Mistake, match=f"^'({key}|date)' "):
        Travel(mini).load_task(task | change)
    with pytest.raises(Mistake, match="has no 'org'"):
        Travel(mini).load_task({name: task[name] for name in task if name != "org"})
