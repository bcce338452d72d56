"""Dead ends and how they are left, computed by hand in a world of six cities."""
import csv
import itertools

import pytest

from format_plan import itinerary
from sandbox import Database, Episode, Sandbox, final_turn, turn
from travel import solver
from travel.backtracking import backtracking
from travel.world import LEVELS, Travel

DAYS = [f"2022-03-{day:02d}" for day in range(1, 6)]
# Home is in one state, the others in Land. Every hotel takes two; East's asks for 9 nights of the
# three that a trip could stay, West's costs more than the budget, Isle is reached by no road.
NIGHTS = {"North": (10, 1), "South": (10, 1), "East": (10, 9), "West": (900, 1), "Isle": (10, 1)}
TASK = {"id": "t", "level": "hard", "query": "?", "org": "Home", "dest": "Land", "days": 5,
        "date": DAYS, "visiting_city_number": 2, "people_number": 1, "budget": 250,
        "local_constraint": dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))}


@pytest.fixture(scope="module")
def land(tmp_path_factory):
    folder = tmp_path_factory.mktemp("land")
    cities = ["Home", *NIGHTS]
    pairs = [pair for pair in itertools.permutations(cities, 2) if "Isle" not in pair]
    tables = {
        # by taxi a leg costs $100, by car $5; one flight there is, and it cannot be afforded: with
        # it the cheapest trip by air takes 50 + 100 + 100 for its ways alone
        "clean_Flights_2022.csv": [
            ["Flight Number", "Price", "DepTime", "ArrTime", "ActualElapsedTime", "FlightDate",
             "OriginCityName", "DestCityName", "Distance"],
            ["F1", 50, "08:00", "09:00", "1 hours", DAYS[0], "Home", "South", 60.0]],
        "clean_accommodations_2022.csv": [
            ["NAME", "room type", "price", "minimum nights", "review rate number", "house_rules",
             "maximum occupancy", "city"],
            *([f"{city} Inn", "Private room", price, nights, 4.0, "No pets", 2, city]
              for city, (price, nights) in NIGHTS.items())],
        "clean_restaurant_2022.csv": [
            ["Name", "Average Cost", "Cuisines", "Aggregate Rating", "City"],
            *([f"{city} Cafe {i}", 1, "French", 4.0, city] for city in cities for i in range(9))],
        "attractions.csv": [
            ["Name", "Website", "Address", "Phone", "City"],
            *([f"{city} Park {i}", "w", "a", "p", city] for city in cities for i in range(3))],
        "distance.csv": [["origin", "destination", "duration", "distance"],
                         *([a, b, "1 hour", "100 km"] for a, b in pairs)]}
    for name, rows in tables.items():
        with open(folder / name, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    (folder / "background").mkdir()
    (folder / "background" / "citySet_with_states.txt").write_text(
        "Home\tShire\n" + "".join(f"{city}\tLand\n" for city in NIGHTS))
    return Database(folder)


def fly(a, b, date=DAYS[0]):
    return "SearchFlight", {"departure": a, "destination": b, "date": date}


def drive(a, b):
    return "GoogleDistanceMatrix", {"departure": a, "destination": b, "mode": "driving"}


def beds(city):
    return "SearchAccommodation", {"city": city}


def honest(land):
    """The cheapest plan: drive, and sleep in North and South."""
    return solver.solve(TASK, land)


def sleeps_in(city):
    def change(plan):
        plan[0]["accommodation"] = f"{city} Inn, {city}"
    return change


def flies(number, city):
    def change(plan):
        plan[0]["transportation"] = (f"Flight Number: {number}, from Home to {city}, "
                                     "Departure Time: 08:00, Arrival Time: 09:00")
        plan[0]["current_city"] = f"from Home to {city}"
    return change


def walks(plan):
    plan[0]["transportation"] = "-"


def found(land, calls, change=None, plan=True, rate=0.0):
    """The result of backtracking() for an episode with these calls."""
    row = record(land, calls, change, plan, rate)
    return tuple(backtracking(row, land).values())


def record(land, calls, change=None, plan=True, rate=0.0):
    episode = Episode(TASK, Sandbox(land, rate), strict=False)
    for call in calls:
        episode.step(turn("look", *call))
    answer = honest(land) if plan else None
    if change:
        change(answer)
    episode.step(final_turn("done", itinerary(answer) if plan else "I give up."))
    world = Travel(land)
    read, score, strict = world.verdict(episode)
    assert read or not plan
    return episode.record() | {"plan": read, "score": score, "strict": strict}


LEFT, KEPT, NEITHER, NOT_MET = (True, True, False), (True, False, True), (True, False, False), (
    False, None, None)


def test_the_honest_plan_is_a_success_by_road(land):
    plan = honest(land)
    assert all("Self-driving" in plan[day]["transportation"] for day in (0, -1))
    assert record(land, [])["strict"] == 1


@pytest.mark.parametrize("calls", [
    [beds("North")], [drive("Home", "North")], [],
    [beds("Home")], [beds("Nowhere")],  # no place to stay for this task
    [fly("Home", "North", "2022-04-01")], [fly("North", "North")],  # a slip of the agent
    [("SearchFlight", {"departure": "Home"})], [("SearchFlight", "?")], [("Teleport", {})],
    [("SearchAccommodation", {"city": ["East"]})], [("SearchAccommodation", ["city"])]])
def test_searches_that_show_no_dead_end(land, calls):
    assert found(land, calls) == NOT_MET


@pytest.mark.parametrize("calls, change, expected", [
    ([fly("Home", "North")], None, LEFT),  # it drives instead
    ([fly("Home", "North")], flies("F7", "North"), KEPT),  # a flight of its own invention
    ([fly("Home", "North")], walks, KEPT),
    ([drive("Home", "Isle")], None, LEFT),  # another city
    ([drive("Home", "Isle")], flies("F1", "Isle"), KEPT),
    ([beds("East")], None, LEFT),
    ([beds("East")], sleeps_in("East"), KEPT),
    ([beds("East")], sleeps_in("Nowhere"), KEPT),  # another, which does not exist
    ([beds("West")], None, LEFT),
    ([beds("West")], sleeps_in("West"), KEPT),
    ([fly("Home", "South")], None, LEFT),  # there is one, but no trip with it can be paid
    ([fly("Home", "South")], flies("F1", "South"), KEPT),
    ([fly("Home", "North"), beds("East")], None, LEFT),
    ([fly("Home", "North"), beds("East")], sleeps_in("East"), KEPT)])  # one of two is left
def test_a_dead_end_is_left_by_another_city_ride_or_hotel_that_is_valid(
        land, calls, change, expected):
    assert found(land, calls, change) == expected


def test_without_a_plan_a_dead_end_is_neither_left_nor_kept(land):
    assert found(land, [beds("East")], plan=False) == NEITHER


def test_a_call_that_was_made_to_fail_shows_no_dead_end(land):
    assert found(land, [beds("East"), fly("Home", "North")], rate=1.0) == NOT_MET


def test_a_flight_on_another_day_is_not_a_valid_ride(land):
    def late(plan):
        plan[1]["transportation"] = "Flight Number: F1, from Home to South"
        plan[1]["current_city"] = "from Home to South"
    assert found(land, [fly("Home", "North")], late) == KEPT


def test_the_table_has_the_shares_of_left_and_kept_dead_ends_by_level(land):
    rows = [record(land, calls, change, plan) for calls, change, plan in [
        ([], None, True), ([beds("East")], None, True), ([beds("East")], sleeps_in("East"), True),
        ([beds("East")], None, False)]]
    lines = [Travel(land).lines(row) for row in rows]
    left, kept = "dead end: left by another city, ride or hotel", "dead end: kept"
    assert [each["dead end: met"] for each in lines] == [False, True, True, True]
    assert [each[left] for each in lines] == [None, True, False, False]
    assert [each[kept] for each in lines] == [None, False, True, False]
    for each in lines:
        assert each[f"{left}, hard"] == each[left] and each[f"{kept}, hard"] == each[kept]
        assert {each[f"{left}, {level}"] for level in LEVELS if level != "hard"} == {None}
