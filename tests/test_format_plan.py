"""Itinerary text becomes the plan that it states, and nothing else; a bad formatter fails only one
answer.

    STAR_TEST_DATA=../shared pytest tests/test_format_plan.py
"""
import json
import re

import hypothesis
import pytest
import styles
from conftest import endpoint
from hypothesis import strategies as st

from evaluate import ChatError, Refused
from format_plan import (
    FIELDS,
    LONGEST_LINE,
    MOST_LINES,
    SLOTS,
    Reader,
    clean_day,
    days_in,
    format_plan,
    read_plan,
)
from runtime import read_jsonl
from travel.constraints import judge, reward, score
from travel.world import Travel, load_task


def parse_plan(text, task, database):
    return read_plan(text, task, database)[0]


EMPTY = dict.fromkeys(FIELDS, "-")


@pytest.fixture(scope="module")
def plans(mini):
    """[(task, plan)] of the small world; all plans succeed."""
    return styles.solved(mini, 6, "plans")


@pytest.fixture(scope="module")
def trip(mini):
    """A three-day trip of the small world: its task, and names in its city."""
    task, plan = next(pair for pair in styles.solved(mini, 9, "trip") if pair[0]["days"] == 3)
    city = plan[1]["current_city"]
    names = {"city": city, "org": task["org"], "hotel": mini.hotels(city)[0].name.strip(),
             "inn": mini.hotels(city)[1].name.strip(),
             "eat": [row.name.strip() for row in mini.restaurants(city)],
             "see": [row.name.strip() for row in mini.attractions(city)]}
    return {**task, "names": names}


@pytest.fixture
def read(trip, mini):
    """read(text): the plan in a text about the trip, with the braces filled."""
    return lambda text: parse_plan(text.format(**trip["names"]), trip, mini)


@pytest.fixture(scope="module")
def human(official, test_data):
    """[(task, plan)] of the 45 human plans; "City(State)" is "City"."""
    rows = read_jsonl(test_data / "travelplanner" / "train_45.jsonl")
    return [(load_task(row), [clean_day(day, number) for number, day in enumerate(
        filter(None, row["annotated_plan"]), 1)]) for row in rows]


# ---------------------------------------------------------------- what it reads
def successes(database, plans, style):
    """How many of these plans succeed after they are written in a style and read back."""
    return sum(score(task, parse_plan(text, task, database), database)["success"]
               for task, text, _ in styles.texts(database, plans, style))


@pytest.mark.parametrize("style", styles.STATED)
def test_a_good_plan_written_in_a_style_still_succeeds(mini, plans, style):
    assert successes(mini, plans, style) == len(plans)


@pytest.mark.parametrize("style", styles.STATED)
def test_human_plans_written_in_a_style_still_succeed(official, human, style):
    good = [(task, plan) for task, plan in human if score(task, plan, official)["success"]]
    assert len(good) == 44
    found = successes(official, good, style)
    assert found >= 0.97 * len(good), f"{found} of {len(good)}"


@pytest.mark.parametrize("style", styles.STATED)
def test_an_invented_name_is_never_replaced_by_a_known_one(mini, plans, style):
    for i in range(4):
        bad = styles.spoilt(mini, plans, f"bad {i}")
        for task, text, plan in styles.texts(mini, bad, style):
            read_back = parse_plan(text, task, mini)
            assert score(task, read_back, mini)["success"] == 0
            for ours, day in zip(read_back or [], plan, strict=False):
                for slot in SLOTS:
                    told = styles.values_of(day, slot)
                    more = {*styles.values_of(ours, slot)} - {*told}
                    assert not any(known(mini, slot, place) for place in more), (more, told)


def known(database, slot, place):
    name, _, city = place.rpartition(", ")
    rows = getattr(database, styles.TABLES[slot])(city)
    return any(row.name.strip() == name for row in rows)


def test_recorded_itineraries_earn_the_references_reward(official, human, test_data):
    tasks, same, pairs = {task["idx"]: task for task, _ in human}, 0, 0
    for pair in read_jsonl(test_data / "parity" / "nl_pairs.jsonl"):
        task = tasks[pair["idx"]]
        ours = reward(score(task, parse_plan(pair["text"], task, official), official), "sum")
        theirs = sum(value or 0 for value in pair["star_scores"].values())
        same += abs(ours - theirs) < 1e-9
        pairs += 1
    assert pairs == 108 and same >= 93, f"{same} of {pairs} rewards"


@pytest.mark.parametrize("text", ["", None, 7, "I could not find a plan.", "Day 1:\nDay 2:", "[]",
                                  "{}", '{"days": 3}', "Day \u017fix: nothing", "Day 0",
                                  '[{"days": %s}]' % ("9" * 5000), "[" + "9" * 5000 + "]"])
def test_text_without_a_plan_gives_none(mini, trip, text):
    assert parse_plan(text, trip, mini) is None


@pytest.mark.parametrize("said, name", [
    ("Lunch: {eat[0]} - Rooftop Annex, {city}", "{eat[0]} - Rooftop Annex"),
    ("Lunch: [{eat[0]}] Rooftop Annex", "{eat[0]} Rooftop Annex"),
    ("Lunch: The {eat[0]}", "The {eat[0]}"), ("Lunch: {eat[0]}x", "{eat[0]}x"),
    ("Lunch: French Quarter", "French Quarter"), ("Lunch: At The Hut", "The Hut"),
    ("Lunch: On the Way Diner", "On the Way Diner"), ("Lunch: Home Plate", "Home Plate"),
    ("Lunch: {eat[0]} - American, Cafe", "{eat[0]}"), ("Lunch: {eat[0]} – $20 each", "{eat[0]}"),
    ("Lunch: [{eat[0]}] or [The Ritz Palace]", "{eat[0]}"),
    ("Lunch: [{eat[0]}] ($52 x 2 = $104), 1 table, minimum 2 hours", "{eat[0]}"),
    ("Lunch: {eat[0]}. Cost: $20. Phone: (410) 576-3800", "{eat[0]}"),
    ("Lunch: 2. [{eat[0]}]", "{eat[0]}"), ("**Lunch:** {eat[0]} *($9)*", "{eat[0]}"),
    ("Lunch (12:30 PM, ~$20): {eat[0]}", "{eat[0]}")])
def test_a_name_is_read_completely_and_without_further_words(read, trip, said, name):
    day, = read(f"Day 1: {{city}}\n{said}\nDinner: {{eat[2]}}")
    city = trip["names"]["city"]
    assert day["lunch"] == f"{name}, {{city}}".format(**trip["names"])
    assert day["dinner"] == "{eat[2]}, {city}".format(**trip["names"])
    assert day["current_city"] == city


@pytest.mark.parametrize("nothing", [
    "-", "[None]", "n/a", "[TBD]", "-, Cost: $0", "- (on the road)", "N/A (travel)",
    "None - flying home", "[Not provided - traveling]", "On your own", "", "On flight", "En route",
    "In-flight meal", "At home", "At Home", "Return home", "Home (end of trip)"])
def test_a_blank_item_fills_no_slot_and_ends_no_day(read, nothing):
    for slot in ("Breakfast", "Attraction", "Accommodation", "Transportation"):
        day, = read(f"Day 1: {{city}}\n{slot}: {nothing}\nDinner: {{eat[0]}}")
        assert day[slot.lower()] == "-" != day["dinner"]


@pytest.mark.parametrize("note", [
    "Note: dinner at the inn is not included.", "Cost: $20", "**Running total: $310**",
    "Tips:\nBring water.", "Backup: {eat[2]}", "Avoid dinner at {eat[2]}.",
    "## Notes\n- Be early."])
def test_text_between_items_is_ignored(read, trip, note):
    plan = read(f"Day 1: {{city}}\nBreakfast: {{eat[0]}}\n{note}\nDinner: {{eat[1]}}\n"
                f"Accommodation: {{hotel}}\nDay 2: {{city}}\nDinner: {{eat[3]}}")
    names = trip["names"]
    assert plan[0]["dinner"] == "{eat[1]}, {city}".format(**names)
    assert plan[0]["accommodation"] == "{hotel}, {city}".format(**names)
    assert [day["lunch"] for day in plan] == ["-", "-"]


# ---------------------------------------------------------------- cities and rides
WAY = "from {org} to {city}"


@pytest.mark.parametrize("said, ride", [
    ("Flight from {org} to {city} [F999] | $80 | Departure: 09:10 | Arrival: 10:25",
     f"Flight Number: F999, {WAY}"),
    ("Flight from {org} to {city}: 2. [F999]", f"Flight Number: F999, {WAY}"),
    ("Flight from {org} to Lake Fen: 2. [F999]", "Flight Number: F999, from {org} to Lake Fen"),
    ("✈️ Flight F999: {org} → {city}, 08:00–10:00", f"Flight Number: F999, {WAY}"),
    ("Drive from {org} to {city} (5h 40m, $30)", f"Self-driving, {WAY}"),
    ("Transportation: Rental car, from {org} to {city}", f"Self-driving, {WAY}"),
    ("Transportation: By car, from {org} to {city}", f"Self-driving, {WAY}"),
    ("Transportation: On flight F999 from {org} to {city}", f"Flight Number: F999, {WAY}"),
    ("Transportation: from {org} to {city}, cost: 30", f"Self-driving, {WAY}"),
    ("Transportation: {org} to {city} by taxi, $9", f"Taxi, {WAY}"),
    # what is not said is not added, and what is unknown stays
    ("Transportation: Flight F999, $80", "Flight Number: F999"), ("Transportation: Taxi", "Taxi"),
    ("Transportation: Train from {org} to {city}", "Train from {org} to {city}"),
    ("Transportation: By train, from {org} to {city}", "By train, from {org} to {city}"),
    ("Transportation: Self-driving by train from {org} to {city} (3h)",
     "Self-driving by train from {org} to {city} (3h)"),
    # within a city there is no ride
    ("Transportation: Walking", "-"), ("Transportation: Local taxi as needed", "-"),
    # two rides are two
    ("Taxi from {org} to {city}\nTaxi from {org} to {city}", f"Taxi, {WAY}"),
    ("Taxi from {org} to {city}\nFlight from {city} to {org} [F999]",
     f"Taxi, {WAY}; Flight Number: F999, from {{city}} to {{org}}")])
def test_a_ride_is_a_number_or_a_mode_and_its_cities(read, trip, said, ride):
    day, = read(f"Day 1: {{org}} to {{city}}\n{said}\nDinner: {{eat[0]}}")
    assert day["transportation"] == ride.format(**trip["names"])


@pytest.mark.parametrize("after, dinner", [
    ("Day 1: {city}\nDinner: {eat[1]}\nDay 2: {city}\nLunch: {eat[2]}", 1),  # shorter, and the plan
    ("Day 1: {city}\nDinner: {eat[1]}", 0),  # no second day
    ("Day 1: {city}\nDinner: {eat[1]}\nDay 2: {city}\nCurrent City: {city}", 0),  # nothing on it
    ("Day 1:\nDinner: $20\nDay 2:\nTransportation: -\nLunch: $9", 0)])  # prices
def test_the_last_version_that_says_something_about_every_day_counts(read, trip, after, dinner):
    plan = read("Day 1: {city}\nLunch: {eat[2]}\nDinner: {eat[0]}\nDay 2: {city}\nLunch: {eat[3]}\n"
                "\nAfter some thought:\n\n" + after)
    assert plan[0]["dinner"] == f"{trip['names']['eat'][dinner]}, {trip['names']['city']}"


def test_a_place_without_a_city_on_the_way_home_is_looked_for_before_it(read, trip):
    plan = read("Day 1: {city} to {org}\nLunch: [Fake Cafe]\nDinner: {eat[0]}")
    assert plan[0]["lunch"] == "Fake Cafe, {city}".format(**trip["names"])
    assert plan[0]["dinner"] == "{eat[0]}, {city}".format(**trip["names"])


@pytest.mark.parametrize("text, idle, share", [
    ("Day 1: {city}\nLunch: {eat[0]}\nWhat a day!\n- Cost: $3\nDinner: {eat[1]}",
     ["What a day!", "Cost: $3"], 2 / 5),
    ('[{{"day": 1, "lunch": "{eat[0]}", "mood": "good", "dinner": "-"}}]', ["mood: good"], 1 / 4)])
def test_text_that_was_not_read_is_returned(mini, trip, text, idle, share):
    plan, unread, part = read_plan(text.format(**trip["names"]), trip, mini)
    assert plan[0]["lunch"].startswith(trip["names"]["eat"][0])
    assert (unread, part) == (idle, share)
    assert read_plan(None, trip, mini) == (None, [], None)


# ---------------------------------------------------------------- what it survives
def assert_is_plan(plan, org):
    for day in plan or []:
        assert set(day) == {"day", *FIELDS}
        assert all(isinstance(day[field], str) for field in FIELDS), day
        assert all(day[field] for field in FIELDS[1:]), day
        assert day["current_city"] or not org  # nobody knows where a journey from "" starts


RUNS = (" ", "\t", "\n", "[", "[{", "]", "(", "{", "1", "-", ":", ".", ",", ";", "|", "$9", "_",
        "~~", "a", "A", "•", "- ", "a ", "A ", "1 ", "(a", "A, ", "from ", " to ", "from A to B ",
        "Day 1", "Day 1\n", "x\n", "F1234 ", "A, B;", '[{"day":', '{"a', "visit X, lunch at ",
        "-> ", "🍷")


@pytest.mark.parametrize("run", RUNS)
def test_a_megabyte_of_anything_is_cut_and_judged(mini, trip, run):
    """A pattern that takes quadratic time on it does not end within a test."""
    for frame in ("{0}", "Day 1: {0}\nLunch: Nowhere{0}x\n", "Day 1\nCurrent City: Glen{0}x\n{0}",
                  "Day 1\nTransportation: Taxi{0}from A{0}to B\nAttraction: {0}"):
        _, verdict = judge(trip, frame.format(run * (10**6 // len(run))), mini)
        assert verdict["success"] == 0 and len(verdict["unread"]) <= MOST_LINES
        assert all(len(line) <= LONGEST_LINE for line in verdict["unread"])


PIECES = st.sampled_from([
    "Day 1", "\n", "Day 2:", "Lunch:", " at ", "[", "]", "|", ", ", "; ", "-", "**", "Visit ",
    "from ", " to ", "F1234", "$", "(", ")", '{"day": ', '"', "{", "}", "\0", "Check into ",
    "Accommodation", "same hotel", "| Day | City |", "10:00", "Total", "Current City:", "é",
    "Transportation:", "Corrected Day 1:", "Revised Lunch:", " instead of ", "~~", "\ue000"])


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    text=st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=60).map("".join),
    org=st.sampled_from(["", "Nowhere"]))
def test_any_text_gives_days_of_strings_or_none(mini, text, org):
    assert_is_plan(parse_plan(text, {"org": org, "days": 3}, mini), org)


# ---------------------------------------------------------------- plans by an LLM
@pytest.fixture
def formatter():
    """(url, play): play(*script) sets what the endpoint answers, one entry a request of which the
    last stays, and returns what it is asked."""
    script = []

    def reply(request):
        return script[min(len(asked), len(script)) - 1]

    def play(*said):
        script[:] = said
        asked.clear()
        return asked

    with endpoint(reply) as (url, asked):
        yield url, play


PLAN = [{**EMPTY, "day": 1, "current_city": "from A to B", "attraction": "Zoo, B;",
         "transportation": "Self-driving, from A to B"}]
LISTED = json.dumps(PLAN)


def test_an_llm_formats_and_is_asked_once_more_if_its_reply_has_no_days(formatter):
    url, play = formatter
    days = [{**PLAN[0], "current_city": "from A(Texas) to B", "attraction": ["Zoo, B"],
             "transportation": "Driving, from A(Texas) to B", "dinner": None}]
    asked = play("no JSON here", f"Here you are:\n```json\n{json.dumps(days)}\n```")
    assert format_plan("Day 1 ...", {"query": "q"}, "m", url)[0] == PLAN
    assert len(asked) == 2 and asked[0]["temperature"] == 0


def test_an_llms_verdict_that_there_is_no_plan_counts_and_two_replies_without_one_raise(formatter):
    url, play = formatter
    asked = play("I cannot", "I cannot", "[]")
    with pytest.raises(Refused, match="two replies without a list of days"):
        format_plan("Day 1 ...", {}, "m", url)
    assert len(asked) == 2
    assert format_plan("Day 1 ...", {}, "m", url)[0] is None


@pytest.mark.parametrize("reply, days", [
    (LISTED, 1), (f"Draft: {json.dumps(PLAN)} Plan: {json.dumps(PLAN * 2)}", 2), ("prose", None),
    (f"{json.dumps(PLAN * 2)} and a last thought: {json.dumps(PLAN)}", 2), ("[]", 0),
    ('{"breakfast": "X"}', None), ('[["a", "b"]]', None), ('[{"day": 1}]', None),
    ("[" * 99_999, None),
    (json.dumps({"plan": PLAN}), 1), ('[{"breakfast": {"name": "X"}, "lunch": 3}]', 1),
    (LISTED[:-3], None), ("[" + "9" * 5000 + "]", None), ('[{"day": "\ud800"' + "}]" * 9, None)])
def test_the_longest_list_of_days_in_a_formatters_reply_counts(reply, days):
    found = days_in(reply)
    assert (None if found is None else len(found)) == days


def test_of_equally_long_lists_of_days_the_last_counts():
    draft = json.dumps([PLAN[0] | {"dinner": "Draft, B"}])
    assert days_in(f"Draft: {draft} Plan: {LISTED}") == PLAN


@pytest.mark.parametrize("turn, why", [
    ("I see no plan here.", "without a list of days"), ("[[1, 2]]", "without a list of days"),
    ('{"days": {"1": "Zoo"}}', "without a list of days"), ("", "a reply without text"),
    (400, "status 400|Error code: 400"), ("x" * 3_000_000, "3,000,000 characters")])
def test_a_formatter_that_fails_on_an_answer_fails_that_answer_only(
        formatter, mini, trip, turn, why):
    url, play = formatter
    read = Reader((url, "m"))
    play(turn)
    plan, unread, share, costs = read.read("a bad answer", trip, mini)
    assert plan is None and share == costs["formatter failed"] == 1.0 and re.search(why, unread[0])
    play(LISTED)
    assert read.read("a good answer", trip, mini) == (
        PLAN, [], None, {"formatter failed": 0.0, "formatter tokens": 77})
    verdict = judge(trip, "a bad answer", mini, read)[1]
    assert verdict["success"] == 0 and verdict["formatter failed"] == 1.0
    assert verdict["answer lines not read"] == 1.0 and re.search(why, verdict["unread"][0])


def test_an_endpoint_at_fault_fails_no_answer(formatter, mini, trip):
    url, play = formatter
    play(401)
    with pytest.raises(ChatError, match=url):
        Reader((url, "m")).read("a good answer", trip, mini)
    assert Travel(mini, reader=Reader((url, "m"))).judges > 1, "verdicts are asked for together"
