"""Exact plans of least cost.
"""
import itertools
import json
import math
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

ROOM_TYPES = {"entire room": "Entire home/apt", "private room": "Private room", "shared room": "Shared room"}
SEARCHES = {"hotels": ("SearchAccommodation", ("Accommodation",)),  # table: its tool, its lines of an itinerary
            "restaurants": ("SearchRestaurant", ("Breakfast", "Lunch", "Dinner")),
            "attractions": ("SearchAttraction", ("Attraction",))}
# ---- solve --------------------------------------------------------------------------------------------------------
class Report(NamedTuple):
    """What the solver knows about a task."""

    plan: list | None  # a plan of least cost that passes `strict`; None when there is none
    cost: float        # dollars of the cheapest honest plan, budget or not; inf when there is none
    choices: int       # sets of cities to visit for which a plan within the budget exists
    reason: str        # why there is no plan, "" when there is one


class Meal(NamedTuple):
    cost: float  # dollars a person
    mask: int    # bit i: it serves the i-th wanted cuisine
    name: str


@lru_cache(maxsize=None)
def venues(database, table, city):
    """{name: rows} of the hotels, restaurants or attractions an honest plan may use, in file order.

    The rows are all that a judge may read the name as: those of that name, and `star`'s own choice, the first row whose
    name contains it. All of them must satisfy, and the dearest counts.
    """
    rows, same, found = getattr(database, table)(city), {}, {}
    for row in rows:
        same.setdefault(row.name.strip().lower(), []).append(row)
    for alike in same.values():
        name = alike[0].name.strip()
        if name not in ("", "-") and "\n" not in name and not (table == "attractions" and ";" in name):
            found[name] = (next(row for row in rows if name in row.name), *alike)
    return found


def lodgings(task, database, city):
    """The allowed hotels: [(dollars a night, minimum nights, name)], cheapest first."""
    wish, people, found = task["local_constraint"], task["people_number"], []
    rule, room = wish.get("house rule"), wish.get("room type")
    for name, rows in venues(database, "hotels", city).items():
        types = {row.room_type for row in rows}
        if rule and any(f"No {rule}" in row.house_rules for row in rows):
            continue
        if room == "not shared room" and "Shared room" in types or room in ROOM_TYPES and types != {ROOM_TYPES[room]}:
            continue
        cost = max(row.price * math.ceil(people / max(1, row.maximum_occupancy)) for row in rows)
        found.append((cost, max(row.minimum_nights for row in rows), name))
    return sorted(found)


@lru_cache(maxsize=4096)
def menu(database, city, wanted):
    """The city's meals, cheapest first; `wanted` is a tuple of cuisines."""
    meals = []
    for name, rows in venues(database, "restaurants", city).items():
        mask = sum(1 << i for i, cuisine in enumerate(wanted) if all(cuisine in row.cuisines for row in rows))
        meals.append(Meal(max(row.cost for row in rows), mask, name))
    return sorted(meals)


def cheapest_meals(meals, need):
    """For every set of cuisines (a mask) the cheapest `need` or more meals that serve it: {mask: (cost, meals)}.

    Such a choice is a cover in which every meal adds a cuisine and is the cheapest of its mask, filled up with the
    cheapest of the others; so it is enough to go through those covers.
    """
    kinds, best = {}, {}
    for meal in meals:
        kinds.setdefault(meal.mask, meal)
    covers = [((), 0)]
    for mask, meal in kinds.items():
        covers += [((*cover, meal), have | mask) for cover, have in covers if mask & ~have]
    for cover, have in covers:
        others = [meal for meal in meals[:need + len(cover)] if meal not in cover]
        picks = (*cover, *others[:max(0, need - len(cover))])
        if len(picks) >= need:
            cost = sum(meal.cost for meal in picks)
            for mask in submasks(have):
                if mask not in best or cost < best[mask][0]:
                    best[mask] = (cost, picks)
    return best


def submasks(mask):
    return [m for m in range(mask + 1) if m & mask == m]


@lru_cache(maxsize=1 << 17)
def drive(database, a, b):
    """The distance row of a pair that can be driven within a day, else None."""
    row = database.distance(a, b)
    return row if row and row.duration and "day" not in row.duration and row.km is not None else None


def ways(task, database, mode, a, b, date):
    """[(dollars, the plan's words)] from a to b, cheapest first: "road" is self-driving, "air" a flight or, as judges
    allow, a taxi."""
    row, people, found = drive(database, a, b), task["people_number"], []
    if mode == "air":
        for flight in database.flights(a, b, date):
            found.append((flight.price * people, f"Flight Number: {flight.number}, from {a} to {b}, Departure Time: "
                                                 f"{flight.departure}, Arrival Time: {flight.arrival}"))
    if row:
        word, per_km, seats = ("Self-driving", 0.05, 5) if mode == "road" else ("Taxi", 1, 4)
        cost = int(row.km * per_km)  # dollars a car
        found.append((cost * math.ceil(people / seats), f"{word}, from {a} to {b}, duration: {row.duration}, "
                                                        f"distance: {row.distance}, cost: {cost}"))
    return sorted(found)


def leg_cost(*leg):
    return next((cost for cost, _ in ways(*leg)), math.inf)


def modes(task):
    """A trip is by air (with taxis) or by road: the judges forbid to mix. Driving is never dearer than a taxi."""
    wish = task["local_constraint"].get("transportation")
    return {"no flight": ("road",), "no self-driving": ("air",)}.get(wish, ("air", "road"))


def stop_cities(task, database):
    """The cities a trip may visit: dest itself on 3 days, else those of the state dest."""
    cities = [task["dest"]] if task["days"] == 3 else database.states.get(task["dest"], [])
    return [city for city in cities if city in database.cities and city != task["org"]]


def stay_costs(task, database, cities):
    """(nights + 1, 2^cuisines, cities): dollars of so many nights in a city, with three meals and a sight on every day
    without travel, serving those cuisines; inf where the city has too little."""
    people, wanted = task["people_number"], tuple(task["local_constraint"].get("cuisine") or ())
    longest = task["days"] - task["visiting_city_number"]
    costs = np.full((longest + 1, 1 << len(wanted), len(cities)), np.inf)
    for c, city in enumerate(cities):
        hotels, meals = lodgings(task, database, city), menu(database, city, wanted)
        sights = len(venues(database, "attractions", city))
        for nights in range(1, longest + 1):
            hotel = next((cost for cost, least, _ in hotels if least <= nights), math.inf)
            if hotel < math.inf and sights >= nights - 1:
                for mask, (meal, _) in cheapest_meals(meals, 3 * (nights - 1)).items():
                    costs[nights, mask, c] = nights * hotel + people * meal
    return costs


def route_costs(task, database, mode, cities, stay):
    """(cities,) * visiting_city_number: the least cost of a trip to these cities in this order, budget or not."""
    dates, number, full = task["date"], task["visiting_city_number"], stay.shape[1] - 1
    total = task["days"] - 1  # nights
    cost = partial(leg_cost, task, database, mode)
    first = np.array([cost(task["org"], city, dates[0]) for city in cities])
    last = np.array([cost(city, task["org"], dates[total]) for city in cities])
    # by (nights spent, cuisines served)
    best = {(n, mask): first + stay[n, mask] for n in range(1, total - number + 2) for mask in range(full + 1)}
    for position in range(2, number + 1):
        longer = {}
        for spent in sorted({spent for spent, _ in best}):
            hop = np.array([[cost(a, b, dates[spent]) if a != b else math.inf for b in cities] for a in cities])
            for had in range(full + 1):
                here = best[spent, had][..., None] + hop
                for n in range(1, total - spent - (number - position) + 1) if position < number else [total - spent]:
                    for mask in submasks(full & ~had) if position < number else [full & ~had]:
                        key, trip = (spent + n, had | mask), here + stay[n, mask]
                        longer[key] = np.minimum(longer[key], trip) if key in longer else trip
        best = longer
    out = best[total, full] + last
    if number == 3:
        out[np.arange(len(cities)), :, np.arange(len(cities))] = np.inf  # no city twice
    return out


def least_costs(task, database):
    """{mode: array over routes} and the cities its axes stand for."""
    cities, number = stop_cities(task, database), task["visiting_city_number"]
    if task["org"] not in database.cities or not 1 <= number <= min(3, len(cities), task["days"] - 1):
        return {mode: np.empty(0) for mode in modes(task)}, cities
    stay = stay_costs(task, database, cities)
    return {mode: route_costs(task, database, mode, cities, stay) for mode in modes(task)}, cities


def cheapest_route(costs, cities):
    """(dollars, mode, route) of least cost; (inf, ...) where no route can be gone."""
    mode = min(costs, key=lambda name: costs[name].min(initial=math.inf))
    cost = float(costs[mode].min(initial=math.inf))
    best = np.unravel_index(costs[mode].argmin(), costs[mode].shape) if cost < math.inf else ()
    return cost, mode, [cities[i] for i in best]


def solve_report(task, database):
    """Exact over honest plans: they leave on the first day, return on the last and pass `strict`. One hotel per city is
    enough: no two are cheaper than the cheapest one whose minimum nights the whole stay meets."""
    costs, cities = least_costs(task, database)
    cost, mode, route = cheapest_route(costs, cities)
    if cost == math.inf or cost > task["budget"]:
        return Report(None, cost, 0, explain(task, database, cost))
    within = np.argwhere(np.minimum.reduce(list(costs.values())) <= task["budget"])
    return Report(cheapest_plan(task, database, mode, route), cost, len({frozenset(r) for r in within.tolist()}), "")


def solve(task, database):
    """A plan of least cost that scores success under `star` and `strict`, or None when no honest plan exists."""
    return solve_report(task, database).plan


def explain(task, database, cost):
    """Why no plan exists, in a few words."""
    if cost < math.inf:
        return f"least cost {cost:.0f} is over the budget {task['budget']}"
    cities = stop_cities(task, database)
    if task["org"] not in database.cities:
        return f"{task['org']} is not among the cities of {database.folder}"
    if len(cities) < task["visiting_city_number"]:
        return f"{task['dest']} has {len(cities)} cities to visit, {task['visiting_city_number']} are asked for"
    for a, b, date in ((task["org"], None, task["date"][0]), (None, task["org"], task["date"][-1])):
        if not any(ways(task, database, mode, a or c, b or c, date) for mode in modes(task) for c in cities):
            return f"no way from {a or task['dest']} to {b or task['dest']} on {date}"
    for name, wish in task["local_constraint"].items():
        eased = {**task, "local_constraint": {**task["local_constraint"], name: None}}
        if wish and cheapest_route(*least_costs(eased, database))[0] < math.inf:
            return f"no plan with {name} {wish}"
    return f"too few places or ways in {task['dest']} for all that is asked"


def splits(total, parts):
    """All ways to cut `total` nights into `parts` stays of at least one night."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, total))]


def cheapest_plan(task, database, mode, route):
    """The least cost plan along a route: every split of the nights, every city for every cuisine."""
    wanted = tuple(task["local_constraint"].get("cuisine") or ())
    stay, best = stay_costs(task, database, route), (math.inf,)
    for nights in splits(task["days"] - 1, len(route)):
        travel = sum(leg_cost(task, database, mode, *leg) for leg in legs(task, route, nights))
        for owners in itertools.product(range(len(route)), repeat=len(wanted)):
            masks = [sum(1 << i for i, owner in enumerate(owners) if owner == c) for c in range(len(route))]
            cost = travel + sum(stay[n, mask, c] for c, (n, mask) in enumerate(zip(nights, masks)))
            best = min(best, (cost, nights, masks))
    _, nights, masks = best
    hotels = [next(h[2] for h in lodgings(task, database, c) if h[1] <= n) for c, n in zip(route, nights)]
    meals = [[meal.name for meal in cheapest_meals(menu(database, city, wanted), 3 * (n - 1))[mask][1]]
             for city, n, mask in zip(route, nights, masks)]
    sights = [list(venues(database, "attractions", city))[:n - 1] for city, n in zip(route, nights)]
    rides = [ways(task, database, mode, *leg)[0][1] for leg in legs(task, route, nights)]
    return lay_out(task, route, nights, rides, hotels, meals, sights)


def legs(task, route, nights):
    """[(from, to, date)] of a trip."""
    days = [0, *itertools.accumulate(nights)]
    return [(a, b, task["date"][day]) for a, b, day in zip([task["org"], *route], [*route, task["org"]], days)]


def lay_out(task, route, nights, rides, hotels, meals, sights):
    """The plan: meals beyond three for every full day go to the day of arrival, then to that of leaving."""
    plan = [dict.fromkeys(("transportation", "breakfast", "attraction", "lunch", "dinner", "accommodation"), "-")
            for _ in task["date"]]
    start = 0
    for c, city in enumerate(route):
        end, full = start + nights[c], range(start + 1, start + nights[c])
        slots = [(day, slot) for day in full for slot in ("breakfast", "lunch", "dinner")]
        slots += [(start, slot) for slot in ("dinner", "lunch", "breakfast")]
        slots += [(end, slot) for slot in ("breakfast", "lunch", "dinner")]
        for (day, slot), name in zip(slots, meals[c]):
            plan[day][slot] = f"{name}, {city}"
        for day in range(start, end):
            plan[day]["accommodation"] = f"{hotels[c]}, {city}"
        for i, day in enumerate(full):
            plan[day]["attraction"] = "".join(f"{name}, {city};" for name in sights[c][i::len(full)])
        plan[start]["current_city"] = f"from {([task['org']] + route)[c]} to {city}"
        plan[start]["transportation"] = rides[c]
        for day in full:
            plan[day]["current_city"] = city
        start = end
    plan[start]["current_city"], plan[start]["transportation"] = f"from {route[-1]} to {task['org']}", rides[-1]
    return [{"day": i + 1, "current_city": day.pop("current_city"), **day} for i, day in enumerate(plan)]


def itinerary(plan):
    """The plan as an agent's answer: names and flight numbers in brackets, the cities once a day."""
    lines = []
    for day in plan:
        where, way = day["current_city"].removeprefix("from "), day["transportation"]
        lines.append(f"Day {day['day']}: {where}")
        if way.startswith("Flight Number: "):
            lines.append(f"Flight from {where} [{way.split(',')[0].removeprefix('Flight Number: ')}]")
        elif way != "-":
            lines.append(f"{way.split(',')[0]} from {where}")
        for slot in ("breakfast", "attraction", "lunch", "dinner", "accommodation"):
            if day[slot] != "-":
                lines.append(f"{slot.capitalize()}: [{day[slot].rstrip(';').rsplit(', ', 1)[0]}]")
    return "\n".join(lines)

def searches(task, plan):
    """[(thought, tool, arguments)] that tell all the plan is made of, in the order an agent would ask."""
    mode, route = mode_of(plan), [ends(day)[1] for day in plan[:-1] if day["transportation"] != "-"]
    steps = [(f"cities in {task['dest']}", "SearchCity", {"state": task["dest"]})] if len(route) > 1 else []
    for day in plan:
        if day["transportation"] != "-":
            steps += way_searches(task, mode, *ends(day), task["date"][day["day"] - 1], day["transportation"])
    return steps + [step for city in route for step in city_searches(city)]


def city_searches(city):
    return [(f"{table} in {city}", tool, {"city": city}) for table, (tool, _) in SEARCHES.items()]


def way_searches(task, mode, a, b, date, way):
    """Flights first, unless the wish is not to fly or the way out has shown that the trip goes by road; then a road."""
    steps, free = [], not task["local_constraint"].get("transportation")
    if mode == "air" or free and a == task["org"]:
        steps.append((f"flight from {a} to {b}", "SearchFlight", {"departure": a, "destination": b, "date": date}))
    if not way.startswith("Flight"):
        word = "driving" if mode == "road" else "taxi"
        arguments = {"departure": a, "destination": b, "mode": word}
        steps.append((f"{word} from {a} to {b}", "GoogleDistanceMatrix", arguments))
    return steps


def mode_of(plan):
    return "road" if plan[0]["transportation"].startswith("Self-driving") else "air"


def ends(day):
    return day["current_city"].removeprefix("from ").split(" to ")


def replies(steps, last, plan):
    """The turns of an agent that makes these searches and then gives this plan."""
    return [*(turn(*step) for step in steps), f"<think>{last}</think>\n<answer>\n{itinerary(plan)}\n</answer>"]


def turn(thought, tool, arguments):
    words = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<think>{thought}</think>\n<tool_call>{words}</tool_call>"


def solver_replies(task, database):
    """The turns of the solver as an agent to be evaluated: its least cost plan, or the reason why there is none."""
    report = solve_report(task, database)
    if report.plan:
        return replies(searches(task, report.plan), "the plan", report.plan)
    return [f"<think>{report.reason}</think>\n<answer>\nNo plan: {report.reason}\n</answer>"]
