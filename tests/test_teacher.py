"""The solver as a teacher: its thoughts are true, known at that point, and consistent."""
import re

import pytest
from conftest import SEED

import synth
from runtime import read_jsonl
from sandbox import parse
from travel import solver
from travel.constraints import score

NUMBER = r"\d+(?:[.:]\d+)*"
TERM = rf"\$?{NUMBER}(?: x \d+(?: (?:rooms|cars|people))?)?"
EQUATION = rf"((?:{TERM})(?: [+-] {TERM})*) = \$?({NUMBER})"


def played(folder, database, n):
    """n episodes like the paper's on a database, with a dead end where there is one in 3 of 4."""
    words = ["--database", database.folder, "--seed", SEED, "--workers", 2]
    for command in (["tasks", "--like", "paper", "--n", n, "--out", folder / "tasks.jsonl"],
                    ["episodes", "--tasks", folder / "tasks.jsonl", "--exploring", 0.75,
                     "--out", folder / "episodes.jsonl"]):
        synth.main([str(word) for word in [*command, *words]])
    return [(row, database) for row in read_jsonl(folder / "episodes.jsonl")]


@pytest.fixture(scope="module")
def lessons(mini, tmp_path_factory):
    rows = played(tmp_path_factory.mktemp("mini"), mini, 150)
    assert len(rows) >= 146
    return rows


@pytest.fixture(scope="module")
def official_lessons(official, tmp_path_factory):
    return played(tmp_path_factory.mktemp("official"), official, 60)


@pytest.fixture(params=["mini", pytest.param("official", marks=pytest.mark.slow)])
def rows(request):
    return request.getfixturevalue({"mini": "lessons", "official": "official_lessons"}[
        request.param])


def thoughts(row):
    """[(thought, messages shown before it)] of an episode."""
    said = []
    for i, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            thought = re.search(r"(?s)<think>(.*?)</think>", message["content"])[1]
            said.append((thought, [each["content"] for each in row["messages"][1:i:2]]))
    return said


def value(text):
    return float(text) if ":" not in text else text


def numbers(text):
    return {value(each) for each in re.findall(NUMBER, re.sub(r"(?<=\d),(?=\d{3})", "", text))}


def without_names(text):
    return re.sub(r"\[[^\]]*\]", "[]", text)


def worked_out(sides):
    """The value of the left side of an equation."""
    total, sign = 0, 1
    for part in re.split(r" ([+-]) ", sides):
        if part in "+-":
            sign = 1 if part == "+" else -1
        else:
            cost, _, times = part.replace("$", "").partition(" x ")
            total += sign * float(cost) * int(re.match(r"\d*", times)[0] or 1)
    return total


@pytest.mark.slow
def test_every_number_of_a_thought_is_in_the_query_or_was_seen_or_is_a_sum_spelled_out(rows):
    for row, _ in rows:
        task, sums = row["task"], set()  # sums: of this thought and of those before
        most = max(task["people_number"], task["days"])  # rooms, cars, nights, people, cities
        for thought, shown in thoughts(row):
            known = numbers("\n".join(shown)) | {float(task["budget"])} | sums
            text = without_names(thought)
            while found := re.search(EQUATION, text):
                assert worked_out(found[1]) == pytest.approx(float(found[2])), thought
                for cost in re.findall(rf"\$({NUMBER})", found[1]):
                    assert value(cost) in known, (cost, thought)
                known.add(value(found[2]))
                sums.add(value(found[2]))
                text = text[:found.start()] + text[found.end():]
            for dollars, number in re.findall(rf"(\$?)({NUMBER})", text):
                fits = value(number) in known
                assert fits or not dollars and value(number) <= most, (number, thought)


def test_names_and_prices_in_thoughts_were_shown_before(rows):
    link = r"\](?: costs| for| at|,| would be| is cheaper at| is|, )? \$"
    for row, _ in rows:
        for thought, shown in thoughts(row):
            seen = re.sub(r" +\]", "]", "\n".join(shown))
            for name in re.findall(r"\[([^\]]+)\]", thought):
                assert f"[{name}]" in seen, (name, thought)
            for name, price in re.findall(rf"\[([^\]]+){link}({NUMBER})", thought):
                said = re.findall(rf"\[{re.escape(name)}\] (?:Avg. Cost )?\$({NUMBER})", seen)
                assert value(price) in map(value, said), (name, price, thought)


def test_the_last_thoughts_sum_is_the_judges_and_within_the_budget(rows):
    for row, database in rows:
        last, _ = thoughts(row)[-1]
        total = float(re.findall(rf" = \$({NUMBER}),? (?:within|of) \$", last)[-1])
        said = score(row["task"] | {"budget": -1}, row["plan"], database)["checks"]["valid_cost"]
        assert total == float(re.search(r"costs \$([\d.e+]+)", said[1])[1])
        assert total <= row["task"]["budget"]


def test_a_choice_that_was_given_up_does_not_come_back(rows):
    for row, _ in rows:
        for thought, shown in thoughts(row):
            if "dead end" in thought and not re.search("budget|more than", thought):
                ended = parse(row["messages"][2 * len(shown) - 2]["content"]).arguments.values()
                later = [parse(each["content"]) for each in row["messages"][2 * len(shown):-1:2]]
                asked = {city for call in later for city in call.arguments.values()}
                assert not asked & set(ended) - {row["task"]["org"], "driving", "taxi"}, thought
            for city in re.findall(r"(?:In |^|\. )((?:[A-Z][\w.']* ?)+?) "
                                   r"(?:is out|nothing fits|is a dead end|has no hotel)", thought):
                assert f"to {city}\n" not in row["answer"], (city, thought)
            for bed in re.findall(r"(?:W|w)ith \[([^\]]+)\](?: it is|, so)", thought):
                assert f"Accommodation: [{bed}]" not in row["answer"], (bed, thought)


def test_a_dead_end_is_one(rows):
    """By the tables themselves: no way on that day, no bed that fits, or a sum over the budget."""
    for row, database in rows:
        task, wish = row["task"], row["task"]["local_constraint"]
        days = {(task["org"], 0): task["date"][0], (task["org"], 1): task["date"][-1]}
        for thought, shown in thoughts(row):
            if "dead end" not in thought:
                continue
            if found := re.search(r"(?:no way|othing goes) from (.+?) to (.+?) on that day by",
                                  thought):
                a, b = found.groups()
                date = days[task["org"], int(b == task["org"])]
                flies = wish["transportation"] != "no flight"
                assert not (flies and database.flights(a, b, date))
                assert not solver.drive(database, a, b)
                assert len(shown) >= 2 and "Search" not in shown[-1][:40]
            elif found := re.search(r"= \$([\d.]+) is more than|= \$([\d.]+), and the budget is",
                                    thought):
                assert float(found[1] or found[2]) > task["budget"]
            else:
                city = parse(row["messages"][2 * len(shown) - 2]["content"]).arguments["city"]
                assert not [bed for bed in solver.lodgings(task, database, city)
                            if bed.nights <= task["days"] - task["visiting_city_number"]]
