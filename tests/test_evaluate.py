"""The judge says what the references say, strict closes their holes, play waits for nobody, and a run can be resumed."""

import copy
import csv
import gzip
import json
import subprocess
import sys
import threading
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evaluate
from evaluate import COMMONSENSE, HARD, RULES, SCORES, judge, load_task, play, read_jsonl, reward, score, write_jsonl
from sandbox import Database, Episode, Sandbox
from synth import solve

MEALS = ("breakfast", "lunch", "dinner")


# ----------------------------------------------------------------------------------------------------------- the world


@cache
def world(folder):
    return Database(folder)


@cache
def witness(folder, days=3):
    """(task, plan): a trip by air in the small world, out on day 1 and back on the last, that every rule set passes."""
    database = world(folder)
    dates = [f"2022-03-{day:02d}" for day in range(1, 32)]
    for org in database.cities:
        for city in database.flight_destinations(org):
            if city not in database.cities or database.cities[city] == database.cities[org]:
                continue
            for first in range(len(dates) - days + 1):
                if not (database.flights(org, city, dates[first]) and database.flights(city, org, dates[first + days - 1])):
                    continue
                task = {"id": "w", "query": "?", "org": org, "dest": city if days == 3 else database.cities[city], "days": days,
                        "date": dates[first : first + days], "visiting_city_number": days // 2, "people_number": 2, "budget": 99999,
                        "level": "easy", "local_constraint": {"house rule": None, "cuisine": None, "room type": None,
                                                              "transportation": "no self-driving"}}
                plan = solve(task, database)
                if plan and plan[0]["transportation"].startswith("Flight") and plan[-1]["transportation"].startswith("Flight"):
                    return task, plan
    raise AssertionError("the small world has no trip by air")


@pytest.fixture
def trip(mini):
    """A fresh copy of the witness: (task, plan, city visited)."""
    task, plan = copy.deepcopy(witness(mini.folder))
    return task, plan, plan[1]["current_city"]


def failed(verdict):
    return {name for name, (passed, _) in verdict["checks"].items() if passed is False}


# -------------------------------------------------------------------------------------------------------------- parity


@cache
def cases(folder):
    with gzip.open(folder / "parity" / "cases.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def scored(case, database, rules):
    """Our verdict, or None where the task lacks a key, which is then what the error says."""
    try:
        return score(case["task"], case["plan"], database, rules)
    except KeyError as error:
        assert "\n" not in str(error) and "has no" in str(error)
        return None


def five(rules, scores, hard):
    if rules == "star":
        keys = ("commonsense_micro", "commonsense_macro", "hard_micro", "hard_macro")
        return [scores[f"{key}_score"] or 0 for key in keys] + [scores["success_pass"] or 0]
    asked = sum(passed is not None for passed in hard.values()) or 1
    return [scores["commonsense_true"] / 8, scores["commonsense_macro"], scores["hard_true"] / asked, scores["hard_macro"],
            scores["final_pass"]]


@pytest.mark.parametrize("rules", ["star", "official"])
def test_every_recorded_verdict_is_reproduced(test_data, official, rules):
    compared = 0
    for case in cases(test_data):
        recorded, ours = case[rules], scored(case, official, rules)
        if "raised" in recorded:  # ours judges, and what would not run does not succeed
            assert ours is None or ours["success"] == 0, case["id"]
            continue
        hard = recorded["hard"] or dict.fromkeys(HARD)
        theirs = (recorded["commonsense"] or dict.fromkeys(COMMONSENSE)) | hard
        assert {name: passed for name, (passed, _) in ours["checks"].items()} == theirs, case["id"]
        assert [ours[name] for name in SCORES] == five(rules, recorded["scores"], hard), case["id"]
        compared += 1
    assert compared > 3400


def test_a_false_check_has_a_reason_and_no_other_has(test_data, official):
    for case in cases(test_data):
        for rules in RULES:
            for passed, reason in (scored(case, official, rules) or {"checks": {}})["checks"].values():
                assert (passed is False) == bool(reason) and "\n" not in (reason or "")


def test_strict_never_passes_what_star_fails(test_data, official):
    gauge = 0
    for case in cases(test_data):
        star, strict = scored(case, official, "star"), scored(case, official, "strict")
        if star and strict:
            assert all(strict[name] <= star[name] for name in SCORES), case["id"]
            assert all(star["checks"][name][0] for name, (passed, _) in strict["checks"].items() if passed), case["id"]
            gauge += star["success"] - strict["success"]
    assert gauge > 100


def test_strict_passes_the_human_plans_that_star_passes(test_data, official):
    rows = [case for case in cases(test_data) if case["id"].startswith("r/annotated")]
    assert len(rows) >= 20
    for case in rows:
        assert score(case["task"], case["plan"], official, "strict")["success"] == score(case["task"], case["plan"], official)["success"]


# --------------------------------------------------------------------------------------------------------------- holes


def last_attraction(task, plan, city, database):
    plan[1]["attraction"] += f"Palace of Nowhere, {city}"


def any_name(task, plan, city, database):
    plan[1]["lunch"] = f", {city}"


def part_of_a_hotel(task, plan, city, database):
    name = plan[0]["accommodation"].rpartition(",")[0]
    for day in plan[:2]:
        day["accommodation"] = f"{name[:-2]}, {city}"


def another_date(task, plan, city, database):
    day = next(day for day in database.flight_dates(task["org"], city) if day != task["date"][0])
    flight = database.flights(task["org"], city, day)[0]
    plan[0]["transportation"] = f"Flight Number: {flight.number}, from {task['org']} to {city}"


def another_time(task, plan, city, database):
    number = plan[0]["transportation"].split("Flight Number: ")[1].split(",")[0]
    plan[0]["transportation"] = f"Flight Number: {number}, from {task['org']} to {city}, Departure Time: 00:01"


def wrong_way(task, plan, city, database):
    plan[0]["transportation"] = plan[2]["transportation"]


def another_destination(task, plan, city, database):
    task["dest"] = next(name for name in database.cities if name not in (city, task["org"]))


def no_meal(task, plan, city, database):
    plan[1]["breakfast"] = None


def blank_meal(task, plan, city, database):
    plan[1]["attraction"] = " "


def spelled_twice(task, plan, city, database):
    plan[1]["dinner"] = plan[1]["lunch"].replace(", ", ",  ")


def name_of_the_city(task, plan, city, database):
    elsewhere = next(row for name in database.restaurant_cities if name != city for row in database.restaurants(name))
    plan[1]["lunch"] = f"{elsewhere.name} from {city}\n{elsewhere.name}, {elsewhere.city}"


def cheaper_than_a_taxi(task, plan, city, database):
    road = next((a, b) for a in database.cities for b in database.cities
                if a != b and (row := database.distance(a, b)) and row.duration and "day" not in row.duration)
    plan[1]["transportation"] = f"Self-driving, from {road[0]} to {road[1]}, {city}: cheaper than a taxi"


HOLES = {
    last_attraction: "is_valid_information_in_sandbox",
    any_name: "is_valid_information_in_sandbox",
    part_of_a_hotel: "is_valid_information_in_sandbox",
    another_date: "is_valid_information_in_sandbox",
    another_time: "is_valid_information_in_sandbox",
    wrong_way: "is_valid_information_in_current_city",
    another_destination: "is_reasonable_visiting_city",
    no_meal: "is_not_absent",
    blank_meal: "is_not_absent",
    spelled_twice: "is_valid_restaurants",
    name_of_the_city: "is_valid_information_in_current_city",
    cheaper_than_a_taxi: "valid_transportation",
}


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_a_hole_of_star_is_closed_in_strict(trip, mini, hole):
    task, plan, city = trip
    assert all(score(task, plan, mini, rules)["success"] == 1 for rules in RULES)
    hole(task, plan, city, mini)
    assert score(task, plan, mini)["success"] == 1
    assert HOLES[hole] in failed(score(task, plan, mini, "strict"))


# ---------------------------------------------------------------------------------------------- one check, and no other


def drop_dinner(task, plan, city, database):
    plan[1]["dinner"] = "-"


def invent_a_restaurant(task, plan, city, database):
    plan[1]["dinner"] = f"Nowhere Diner, {city}"


def eat_elsewhere(task, plan, city, database):
    row = next(row for name in database.restaurant_cities if name != city for row in database.restaurants(name))
    plan[1]["dinner"] = f"{row.name}, {row.city}"


def eat_twice(task, plan, city, database):
    plan[1]["dinner"] = plan[1]["lunch"]


def look_twice(task, plan, city, database):
    plan[1]["attraction"] += plan[1]["attraction"].split(";")[0] + ";"


def drive_in_between(task, plan, city, database):
    task["local_constraint"]["transportation"] = None
    cheaper_than_a_taxi(task, plan, city, database)
    plan[1]["transportation"] = plan[1]["transportation"].replace(": cheaper than a taxi", "")


def stay_too_short(task, plan, city, database):
    long = next(row for row in database.hotels(city) if row.minimum_nights == 2)
    short = next(row for row in database.hotels(city) if row.minimum_nights == 1)
    plan[0]["accommodation"], plan[1]["accommodation"] = f"{long.name}, {city}", f"{short.name}, {city}"


def spend_too_much(task, plan, city, database):
    task["budget"] = 1


def break_a_house_rule(task, plan, city, database):
    hotel = next(row for row in database.hotels(city) if "No " in row.house_rules and row.minimum_nights <= 2)
    task["local_constraint"]["house rule"] = hotel.house_rules.split(" & ")[0].removeprefix("No ")
    for day in plan[:2]:
        day["accommodation"] = f"{hotel.name}, {city}"


def take_another_room(task, plan, city, database):
    name = plan[0]["accommodation"].rpartition(",")[0]
    kind = next(row.room_type for row in database.hotels(city) if row.name == name)
    task["local_constraint"]["room type"] = "private room" if kind != "Private room" else "entire room"


def want_what_nobody_serves(task, plan, city, database):
    task["local_constraint"]["cuisine"] = ["Martian"]


def fly_against_the_wish(task, plan, city, database):
    task["local_constraint"]["transportation"] = "no flight"


BREAKS = {
    drop_dinner: "is_not_absent",
    invent_a_restaurant: "is_valid_information_in_sandbox",
    eat_elsewhere: "is_valid_information_in_current_city",
    eat_twice: "is_valid_restaurants",
    look_twice: "is_valid_attractions",
    drive_in_between: "is_valid_transportation",
    stay_too_short: "is_valid_accommodation",
    spend_too_much: "valid_cost",
    break_a_house_rule: "valid_room_rule",
    take_another_room: "valid_room_type",
    want_what_nobody_serves: "valid_cuisine",
    fly_against_the_wish: "valid_transportation",
}


@pytest.mark.parametrize("wrong", BREAKS, ids=lambda wrong: wrong.__name__)
def test_breaking_one_constraint_fails_exactly_that_check(trip, mini, wrong):
    task, plan, city = trip
    wrong(task, plan, city, mini)
    verdict = score(task, plan, mini)
    assert failed(verdict) == {BREAKS[wrong]} and verdict["success"] == 0
    assert verdict["cs_micro"] == (7 / 8 if BREAKS[wrong] in COMMONSENSE else 1)


def test_a_long_trip_stays_in_the_state_asked_for(mini):
    task, plan = copy.deepcopy(witness(mini.folder, 5))
    assert score(task, plan, mini, "strict")["success"] == 1
    task["dest"] = next(state for state in mini.states if state != task["dest"])
    assert failed(score(task, plan, mini)) == {"is_reasonable_visiting_city"}


# -------------------------------------------------------------------------------------------------------------- scores


def test_an_unreached_check_counts_for_neither_side(trip, mini):
    task, plan, city = trip
    drop_dinner(task, plan, city, mini)
    verdict = score(task, plan, mini)
    assert all(verdict["checks"][name] == [None, None] for name in HARD)
    assert (verdict["hard_micro"], verdict["hard_macro"], verdict["cs_micro"]) == (0, 0, 7 / 8)


@pytest.mark.parametrize("plan", [None, [], {}, 0, ""])
def test_no_plan_scores_nothing(trip, mini, plan):
    verdict = score(trip[0], plan, mini)
    assert [verdict[name] for name in SCORES] == [0] * 5 and set(map(tuple, verdict["checks"].values())) == {(None, None)}


@pytest.mark.parametrize("scores, rewards", [
    ((1, 1, 1, 1, 1), (5, 3, 1)),
    ((0.875, 0, 1, 1, 0), (2.875, 1, 0)),
    ((0.5, 0, 0, 0, 0), (0.5, 0, 0)),
    ((1, 1, 0.75, 0, 0), (2.75, 1, 0)),
    ((0, 0, 0, 0, 0), (0, 0, 0)),
])
def test_rewards_by_hand(scores, rewards):
    assert tuple(reward(dict(zip(SCORES, scores)), kind) for kind in ("sum", "macro", "success")) == rewards
    with pytest.raises(ValueError, match="curriculum"):
        reward(dict(zip(SCORES, scores)), "curriculum")


@pytest.mark.parametrize("key", ["days", "org", "dest", "people_number", "budget"])
def test_a_key_the_task_lacks_is_named(trip, mini, key):
    task, plan, _ = trip
    del task[key]
    with pytest.raises(KeyError, match=key):
        score(task, plan, mini)


def test_constraints_in_a_string_are_read_and_never_run(trip, mini):
    task, plan, _ = trip
    task["local_constraint"] = "{'house rule': None, 'cuisine': None, 'room type': None, 'transportation': 'no flight'}"
    assert failed(score(task, plan, mini)) == {"valid_transportation"}
    task["local_constraint"] = "[].append(1/0)"
    assert "valid_transportation" in failed(score(task, plan, mini))


def test_judge_reads_the_text_of_a_plan(trip, mini):
    task, plan, _ = trip
    assert judge(task, None, mini)[0] is None and judge(task, "no plan here", mini)[1]["success"] == 0
    found, verdict = judge(task, json.dumps(plan), mini, "strict")
    assert found and verdict["success"] == 1, verdict["checks"]


# ---------------------------------------------------------------------------------------------------------------- fuzz

NESTED = "[" * 300 + "]" * 300
SMALL = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["", "-", " ", "from", "from a to b", "from  to ,", "Flight Number: ", "Flight Number: F1, from A to B", "taxi",
                     ";", ";;", "a,", ", a", ",", "a;b, c;", "\n,\n", "\x00", "\ud800", "from " * 999, " " * 9999, "from" + " " * 9999,
                     "(" * 9999, "x" * 99999, json.loads(NESTED)]))
JSON = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)
FIELD = st.sampled_from(["current_city", "day", *evaluate.FIELDS])


def check_fuzzed(task, plan, database):
    star, strict = score(task, plan, database), score(task, plan, database, "strict")
    score(task, plan, database, "official")
    assert all(0 <= strict[name] <= star[name] <= 1 for name in SCORES)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(JSON)
def test_any_json_is_judged(mini, plan):
    check_fuzzed(witness(mini.folder)[0], plan, mini)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 2), FIELD, JSON, st.sampled_from(["set", "drop", "whole", "join"])), min_size=1, max_size=4))
def test_a_plan_with_a_few_wild_values_is_judged(mini, changes):
    task, plan = copy.deepcopy(witness(mini.folder))
    for at, field, value, how in changes:
        if how == "whole":
            plan[at] = value
        elif isinstance(plan[at], dict) and how == "drop":
            plan[at].pop(field, None)
        elif isinstance(plan[at], dict):
            plan[at][field] = f"{plan[at].get(field)}{value}" if how == "join" and isinstance(value, str) else value
    check_fuzzed(task, plan, mini)


# ---------------------------------------------------------------------------------------------------------------- play


def test_play_waits_for_nobody(trip, mini):
    """One episode's first reply comes only after all others have ended."""
    ended, total = threading.Semaphore(0), 9

    def generate(messages):
        if "slow" in messages[1]["content"] and len(messages) == 2:
            for _ in range(total - 1):
                assert ended.acquire(timeout=20), "the others wait for the slow one"
        if len(messages) == 2:
            return '<think>.</think><tool_call>{"name": "SearchCity", "arguments": {"state": "x"}}</tool_call>'
        return "<think>.</think><answer>done</answer>"

    tasks = [trip[0] | {"query": "slow" if i == 0 else str(i)} for i in range(total)]
    finished = []
    for episode in play(generate, (Episode(task, Sandbox(mini)) for task in tasks), concurrency=3):
        finished.append(episode.task["query"])
        ended.release()
        assert episode.stop == "answer" and episode.turns == 2
    assert finished[-1] == "slow" and len(finished) == total


class Scripted:
    """An engine that says each reply one token a step, in as many steps as the reply has characters."""

    def __init__(self, tokenizer, script):
        self.llm_engine, self.tokenizer, self.script, self.running, self.steps, self.said = self, tokenizer, script, {}, 0, []

    def ask(self, _, __, context, max_tokens, *rest):
        name, episode, ids = rest[-3:]
        said = self.tokenizer.encode(self.script(episode))[: context - len(ids)]
        self.running[name] = [len(said), said]
        self.said.append(len(said))

    def step(self):
        self.steps += 1
        for entry in self.running.values():
            entry[0] -= 1
        done = [name for name, entry in self.running.items() if entry[0] <= 0]
        return [Output(name, self.running.pop(name)[1]) for name in done]


class Output:
    def __init__(self, name, ids):
        self.request_id, self.finished, self.outputs, self.token_ids = name, True, [self], ids


class Letters:
    """A tokenizer of one token a character; the end of a turn is one token."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens=False):
        return [0 if c == "\0" else ord(c) for c in text.replace("<|im_end|>", "\0")]

    def decode(self, ids):
        return "".join(map(chr, ids)).replace("\0", "<|im_end|>")

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


def replies(episode):
    if episode.turns < int(episode.task["query"]):
        return f'<think>{"." * 20}</think><tool_call>{{"name": "SearchCity", "arguments": {{"state": "x"}}}}</tool_call><|im_end|>'
    return "<think>.</think><answer>done</answer><|im_end|>"


def test_tokens_in_flight_never_wait_for_a_turn(trip, mini, monkeypatch):
    engine = Scripted(Letters(), replies)
    monkeypatch.setattr(evaluate, "submit", engine.ask)
    tasks = [trip[0] | {"query": str(i % 5)} for i in range(20)]
    episodes = [Episode(task, Sandbox(mini), system_prompt="s") for task in tasks]
    done = list(evaluate.play_vllm(engine, Letters(), episodes, 4000, concurrency=4))
    assert len(done) == 20 and all(episode.stop == "answer" for episode in done)
    longest = 5 * max(engine.said)  # the last episode to start may play on alone
    assert engine.steps < sum(engine.said) / 4 + longest, "a free place is filled in the next step"


def test_an_episode_is_the_tokens_of_its_messages(trip, mini, monkeypatch):
    engine, letters = Scripted(Letters(), replies), Letters()
    monkeypatch.setattr(evaluate, "submit", engine.ask)
    episode = Episode(trip[0] | {"query": "3"}, Sandbox(mini), system_prompt="s")
    (done,) = evaluate.play_vllm(engine, letters, [episode], 4000)
    text = letters.apply_chat_template(done.messages, False, True).removesuffix("\n<|im_start|>assistant\n")
    assert done.tokens == len(letters.encode(text))


def test_an_episode_that_fills_the_context_stops_there(trip, mini, monkeypatch):
    engine = Scripted(Letters(), lambda episode: "x" * 500)
    monkeypatch.setattr(evaluate, "submit", engine.ask)
    (done,) = evaluate.play_vllm(engine, Letters(), [Episode(trip[0], Sandbox(mini), system_prompt="s", strict=False)], 300)
    assert (done.stop, done.tokens, done.answer) == ("context", 300, None)
    with pytest.raises(ValueError, match="raise --max-context"):
        list(evaluate.play_vllm(engine, Letters(), [Episode(trip[0], Sandbox(mini))], 300))


# ------------------------------------------------------------------------------------------------ records and the report


def test_published_tasks_become_ours():
    row = {"org": "A", "dest": "B", "days": "3", "date": "['2022-03-01', '2022-03-02', '2022-03-03']", "people_number": 2,
           "budget": 900, "query": "?", "constraint": "{'room rule': 'pets', 'cuisine': None}", "idx": 7}
    task = load_task(row)
    assert task["days"] == 3 and task["date"][2] == "2022-03-03" and task["id"] == "7" and task["visiting_city_number"] == 1
    assert task["local_constraint"] == {"house rule": "pets", "cuisine": None, "room type": None, "transportation": None}
    assert load_task(task) == task
    with pytest.raises(KeyError, match="'org'"):
        load_task({key: value for key, value in row.items() if key != "org"})
    with pytest.raises(ValueError, match="'date'"):
        load_task(row | {"date": "tomorrow"})


def published(task, idx):
    """A row of the published csv: Python literals as text, reference information by the megabyte."""
    asked = {"house rule": None, "cuisine": ["Indian"], "room type": None, "transportation": None}
    return {"org": task["org"], "dest": task["dest"], "days": task["days"], "visiting_city_number": 1, "date": str(task["date"]),
            "people_number": 2, "local_constraint": str(asked), "budget": 1700, "query": f'Trip "{idx}",\nplease.', "level": "medium",
            "reference_information": "x" * 200_000}


def write_csv(path, rows):
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_published_data_set_is_a_folder(tmp_path, trip):
    task = trip[0]
    write_csv(tmp_path / "set" / "validation.csv", [published(task, i) for i in range(3)])
    write_jsonl(tmp_path / "set" / "train.jsonl", [published(task, i) | {"idx": i + 1} for i in range(2)])
    tasks = evaluate.load_tasks(str(tmp_path / "set"), split="validation")
    assert [(t["id"], t["idx"], t["budget"], t["days"], t["date"]) for t in tasks] == [(str(i), i, 1700, 3, task["date"]) for i in range(3)]
    assert tasks[1]["query"] == 'Trip "1",\nplease.' and tasks[0]["local_constraint"]["cuisine"] == ["Indian"]
    assert "reference_information" not in tasks[0]
    assert [t["id"] for t in evaluate.load_tasks(str(tmp_path / "set"), 1, "train")] == ["1"]
    assert evaluate.load_tasks(str(tmp_path / "set" / "validation.csv")) == tasks, "a csv is a file like any other"
    for words, source, split in (("--split train", tmp_path / "set", None), ("neither test.csv nor test.jsonl", tmp_path / "set", "test"),
                                 ("hf download some/set", "some/set", "validation"), ("--split train", "some/set", None)):
        with pytest.raises(SystemExit, match=words) as stop:
            evaluate.main(["--model", "m", "--tasks", str(source), "--out", str(tmp_path / "out")] + ["--split", split] * bool(split))
        assert "\n" not in str(stop.value)


def test_a_data_set_on_the_hub_is_its_file(tmp_path, trip, monkeypatch):
    """From the hub client's own cache, where a fetched file lies."""
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "datasets--some--set" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write_csv(snapshot / "validation.csv", [published(trip[0], 0)])
    (tmp_path / "datasets--some--set" / "refs").mkdir()
    (tmp_path / "datasets--some--set" / "refs" / "main").write_text("0" * 40)
    found = evaluate.find_tasks("some/set", "validation")
    assert found.samefile(snapshot / "validation.csv")


def test_the_test_split_is_played_for_the_leaderboard_and_not_judged(tmp_path, mini):
    """It says no more than level, days and query."""
    write_csv(tmp_path / "set" / "test.csv", [{"level": "easy", "days": 3, "query": f"Trip {i}?"} for i in range(2)])
    tasks = evaluate.load_tasks(str(tmp_path / "set"), split="test")
    assert tasks[1] == {"id": "1", "idx": 1, "level": "easy", "days": "3", "query": "Trip 1?"}
    rows = []
    for task in tasks:
        episode = Episode(task, Sandbox(mini))
        episode.step("<think>.</think><answer>.</answer>")
        rows.append(episode.record("m") | {"plan": [{"day": 1}] if task["idx"] else None, "tokens": 5})
    text, report = evaluate.table({"a": rows, "b": rows}, "test")
    assert report["a"]["delivery rate"] == 1 / 1000 and report["a"]["success"] is None and report["a"]["stop: answer"] == 1
    assert "| success | - | - |" in text and "success interval" not in report["a"]
    evaluate.submit_file(tmp_path, rows, "test")
    assert [row["plan"] for row in read_jsonl(tmp_path / "submission.jsonl")] == [None, [{"day": 1}]]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(ValueError, match="x.jsonl, line 3"):
        read_jsonl(tmp_path / "x.jsonl")
    write_jsonl(tmp_path / "y.jsonl", [{"a": "é"}])
    assert read_jsonl(tmp_path / "y.jsonl") == [{"a": "é"}] and len(list(tmp_path.iterdir())) == 2


def test_a_submission_is_put_in_the_leaderboards_words(trip):
    _, plan, city = trip
    plan[0]["current_city"], plan[0]["transportation"] = "from Reno(Nevada) to Ely (Nevada)", "Driving, from Reno(Nevada) to Ely, cost: 9"
    plan[1]["lunch"], plan[2]["transportation"] = "Bar (The Old One), Ely(Nevada)", "from Ely to Reno"
    days = evaluate.tidy(plan)
    assert days[0]["current_city"] == "from Reno to Ely" and days[0]["transportation"] == "Self-driving, from Reno to Ely, cost: 9"
    assert days[1]["lunch"] == "Bar (The Old One), Ely" and days[2]["transportation"] == "Self-driving, from Ely to Reno"
    assert evaluate.submission_faults([{"idx": 0, "query": "?", "plan": days}]) == []


def test_the_submission_check_names_line_day_and_field(trip):
    good, bad = {"idx": 0, "query": "?", "plan": trip[1]}, {"idx": 1, "query": "?", "plan": copy.deepcopy(trip[1])}
    bad["plan"][0]["transportation"] = "flight number F1"
    bad["plan"][1]["lunch"] = None
    del bad["plan"][2]["attraction"]
    faults = evaluate.submission_faults([good, bad, {"idx": 2}, {"idx": 9, "query": "?", "plan": None}], "validation")
    for words in ("4 lines", "line 2, day 1, transportation", "line 2, day 2, lunch", "line 2, day 3, attraction", "line 3", "line 4: idx"):
        assert any(words in fault for fault in faults), (words, faults)
    assert len(faults) == 6


def rows_of(trip, mini, wins):
    """Episode records, the i-th successful if wins[i]."""
    task, plan, _ = trip
    records = []
    for i, win in enumerate(wins):
        episode = Episode(task | {"id": str(i), "idx": i}, Sandbox(mini))
        episode.step("<think>.</think><answer>.</answer>" if win else "no format")
        records.append(episode.record("m") | evaluate.verdicts(episode.task, plan if win else None, mini))
    return records


def test_the_table_sets_checkpoints_side_by_side(trip, mini):
    played = {"before": rows_of(trip, mini, [1, 0, 0, 0] * 10), "after": rows_of(trip, mini, [1, 1, 1, 0] * 10)}
    text, report = evaluate.table(played, "validation")
    assert report["before"]["success"] == 0.25 and report["after"]["stop: format"] == 0.25
    assert report["after"]["replies that break the format"] == 0.25 and report["after"]["reward"] == 3.75
    assert report["after"]["final pass rate"] == 30 / 180 and report["after"]["hard micro rate"] == 30 * 2 / 420
    low, high = report["after"]["success minus before's"][1:]
    assert 0.3 < low < 0.5 < high < 0.7 and "+50.0 (" in text and "25.0 (12.5 to " in text
    assert not any("minus before's, " in line for line in report["after"]), "these tasks do not say whether they are new"


def test_the_gain_is_also_told_for_destinations_of_training_and_for_others(trip, mini):
    played = {"before": rows_of(trip, mini, [0, 0, 1, 0] * 10), "after": rows_of(trip, mini, [1, 0, 1, 0] * 10)}
    for rows in played.values():
        for i, row in enumerate(rows):
            row["task"]["unseen"] = i % 4 > 1
    text, report = evaluate.table(played)
    after = report["after"]
    assert after["success minus before's"][0] == 0.25 and after["success, destination in training"] == 0.5
    gain, low, high = after["success minus before's, destination in training"]
    assert gain == 0.5 and 0.2 < low < 0.5 < high < 0.8
    assert after["success minus before's, destination never in training"] == [0, 0, 0]
    assert "| success of after minus before, destination in training |  | +50.0 (+" in text


def test_pass_at_k_by_hand():
    assert evaluate.pass_at({"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 0, 1]}) == {
        "pass@1": pytest.approx((1 / 4 + 0 + 3 / 4) / 3),
        "pass@2": pytest.approx((1 - 3 / 6 + 0 + 1) / 3),  # of a's 6 pairs 3 miss; every pair of c's holds a success
        "pass@4": pytest.approx(2 / 3)}
    assert list(evaluate.pass_at({"a": [1.0] * 6})) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert evaluate.pass_at({"a": [1], "b": [0, 0]}) == evaluate.pass_at({}) == {}, "one play says nothing but success"


def test_with_samples_success_is_of_plays_and_its_interval_of_tasks(trip, mini):
    """Eight tasks of four plays each that all go one way: the spread is that of 8 tasks, not of 32 plays."""
    rows = [row | {"task": row["task"] | {"sample": k}} for row in rows_of(trip, mini, [1, 0] * 4) for k in range(4)]
    rows[0] = rows[4] | {"task": rows[0]["task"]}  # but for one play
    text, report = evaluate.table({"m": rows}, "validation")
    report = report["m"]
    assert report["success"] == report["pass@1"] == 15 / 32 and report["pass@2"] == report["pass@4"] == 0.5 and "pass@4" in text
    assert report["success interval"] == evaluate.interval([0.75] + [0, 1] * 3 + [0])
    low, high = report["success interval"]
    assert high - low > 0.5, "32 plays would give 0.35"
    assert report["final pass rate"] == 3 / 180, "the leaderboard sees the first play of each task"


def test_what_the_user_can_mend_is_one_line(tmp_path, trip):
    (tmp_path / "empty.jsonl").write_text("")
    write_jsonl(tmp_path / "tasks.jsonl", [trip[0]])
    for words, arguments in {
        "holds no task": ["--model", "m", "--tasks", str(tmp_path / "empty.jsonl")],
        "nowhere.jsonl": ["--model", "m", "--tasks", str(tmp_path / "nowhere.jsonl")],
        "--model wants": ["--tasks", str(tmp_path / "tasks.jsonl")],
    }.items():
        with pytest.raises(SystemExit, match=words) as stop:
            evaluate.main([*arguments, "--out", str(tmp_path / "out")])
        assert "\n" not in str(stop.value)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="no tokenizer"):
        evaluate.engine(tmp_path / "model", 100)


def test_a_checkpoint_is_played_and_a_killed_run_resumed(tmp_path, trip, mini, tiny_model):
    """The command in vLLM, after a run that was killed within its second episode."""
    tasks = [trip[0] | {"id": f"t{i}", "query": f"Trip {i}?"} for i in range(3)]
    write_jsonl(tmp_path / "tasks.jsonl", tasks)
    episode = Episode(tasks[0], Sandbox(mini))
    episode.step("<think>.</think><answer>.</answer>")
    first = json.dumps(episode.record("m") | evaluate.verdicts(tasks[0], trip[1], mini) | {"tokens": 7})
    (tmp_path / "out" / "m").mkdir(parents=True)
    (tmp_path / "out" / "m" / "episodes.jsonl").write_text(f"{first}\n{first[:99]}")
    command = ["--model", f"m={tiny_model}", "--tasks", str(tmp_path / "tasks.jsonl"), "--database", str(mini.folder), "--out",
               str(tmp_path / "out"), "--max-context", "1500", "--max-turns", "2", "--max-tokens", "32", "--system-prompt", "short"]
    evaluate.main(command)
    lines = (tmp_path / "out" / "m" / "episodes.jsonl").read_text().splitlines()
    assert lines[0] == first and [json.loads(line)["task"]["id"] for line in lines[1:]] in (["t1", "t2"], ["t2", "t1"])
    assert all(json.loads(line)["tokens"] > 60 and json.loads(line)["turns"] == 2 for line in lines[1:])
    report = json.loads((tmp_path / "out" / "m" / "scores.json").read_text())
    assert report["episodes"] == 3 and report["success"] == pytest.approx(1 / 3) and "m" in (tmp_path / "out" / "table.md").read_text()
    with pytest.raises(SystemExit, match="temperature was 0.6 and is 1.0"):
        evaluate.main([*command, "--temperature", "1.0"])


def test_a_checkpoint_plays_official_queries_at_a_context_of_30k(test_data, tiny_model, root, tmp_path):
    data = test_data / "travelplanner"
    words = f"""evaluate.py --model tiny={tiny_model} --tasks {data}/val_102.jsonl --database {data}/database --limit 2
        --max-context 30000 --max-turns 2 --max-tokens 64 --out {tmp_path}/eval"""
    subprocess.run([sys.executable, *words.split()], cwd=root, check=True, capture_output=True, timeout=300)
    played = read_jsonl(tmp_path / "eval" / "tiny" / "episodes.jsonl")
    assert len(played) == 2 and all({"messages", "stop", "plan", "score"} <= set(episode) for episode in played)
