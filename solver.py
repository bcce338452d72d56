"""
Exact plans of least cost: `solve` finds a task's cheapest honest plan, or proves there is none.

A trip is a route of cities, a split of the nights, and a mode: by road, or by air and taxi. Given
these, each city costs its cheapest allowed hotel for the whole stay and the cheapest set of meals
that serves its share of the wanted cuisines. So all routes are summed up at once, as arrays with an
axis per city. Honest plans leave on the first day, return on the last and pass `strict`.

As an agent the solver makes the searches that its plan is made of, and then gives it as its answer.
"""
import itertools
import json
import math
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np

from constraints import ROOM_TYPES
from format_plan import itinerary

SLOTS = ("transportation", "breakfast", "attraction", "lunch", "dinner", "accommodation")
SEARCHES = {  # table: its tool, its lines of an itinerary
    "hotels": ("SearchAccommodation", ("Accommodation",)),
    "restaurants": ("SearchRestaurant", ("Breakfast", "Lunch", "Dinner")),
    "attractions": ("SearchAttraction", ("Attraction",)),
}


class Report(NamedTuple):
    """What the solver knows about a task."""
    plan: list | None  # a plan of least cost that passes `strict`; None when there is none
    cost: float  # dollars of the cheapest honest plan, budget or not; inf when there is none
    choices: int  # sets of cities to visit for which a plan within the budget exists
    reason: str  # why there is no plan, "" when there is one


class Meal(NamedTuple):
    cost: float  # dollars a person
    mask: int  # bit i: it serves the i-th wanted cuisine
    name: str


# ---------------------------------------------------------------- what a city and a way cost

@cache
def venues(database, table, city):
    """{name: rows} of the hotels, restaurants or attractions an honest plan may use, in file order.

    The rows are all that a judge may read the name as: those of that name, and `star`'s own choice,
    the first row whose name contains it. All of them must satisfy, and the dearest counts.
    """
    rows, same, found = getattr(database, table)(city), {}, {}
    for row in rows:
        same.setdefault(row.name.strip().lower(), []).append(row)
    for alike in same.values():
        name = alike[0].name.strip()
        splits_list = table == "attractions" and ";" in name
        if name not in ("", "-") and "\n" not in name and not splits_list:
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
        if room == "not shared room" and "Shared room" in types:
            continue
        if room in ROOM_TYPES and types != {ROOM_TYPES[room]}:
            continue
        cost = max(row.price * math.ceil(people / max(1, row.maximum_occupancy)) for row in rows)
        found.append((cost, max(row.minimum_nights for row in rows), name))
    return sorted(found)


@lru_cache(maxsize=4096)
def menu(database, city, wanted):
    """The city's meals, cheapest first; `wanted` is a tuple of cuisines."""
    meals = []
    for name, rows in venues(database, "restaurants", city).items():
        mask = sum(1 << i for i, cuisine in enumerate(wanted)
                   if all(cuisine in row.cuisines for row in rows))
        meals.append(Meal(max(row.cost for row in rows), mask, name))
    return sorted(meals)


def cheapest_meals(meals, need):
    """For every set of cuisines (a mask) the cheapest `need` or more meals that serve it:
    {mask: (cost, meals)}.

    Such a choice is a cover in which every meal adds a cuisine and is the cheapest of its mask,
    filled up with the cheapest of the others; so it is enough to go through those covers.
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


def cuisines(task):
    return tuple(task["local_constraint"].get("cuisine") or ())


@lru_cache(maxsize=1 << 17)
def drive(database, a, b):
    """The distance row of a pair that can be driven within a day, else None."""
    row = database.distance(a, b)
    known = row and row.duration and row.km is not None
    return row if known and "day" not in row.duration else None


def ways(task, database, mode, a, b, date):
    """[(dollars, the plan's words)] from a to b, cheapest first: "road" is self-driving, "air" a
    flight or, as judges allow, a taxi."""
    row, people, found = drive(database, a, b), task["people_number"], []
    if mode == "air":
        for flight in database.flights(a, b, date):
            found.append((flight.price * people,
                          f"Flight Number: {flight.number}, from {a} to {b}, Departure Time: "
                          f"{flight.departure}, Arrival Time: {flight.arrival}"))
    if row:
        word, per_km, seats = ("Self-driving", 0.05, 5) if mode == "road" else ("Taxi", 1, 4)
        cost = int(row.km * per_km)  # dollars a car
        found.append((cost * math.ceil(people / seats),
                      f"{word}, from {a} to {b}, duration: {row.duration}, "
                      f"distance: {row.distance}, cost: {cost}"))
    return sorted(found)


def leg_cost(*leg):
    return next((cost for cost, _ in ways(*leg)), math.inf)


def modes(task):
    """A trip is by air (with taxis) or by road, which judges forbid to mix. Driving is never dearer
    than a taxi."""
    wish = task["local_constraint"].get("transportation")
    return {"no flight": ("road",), "no self-driving": ("air",)}.get(wish, ("air", "road"))


def stop_cities(task, database):
    """The cities a trip may visit: dest itself on 3 days, else those of the state dest."""
    cities = [task["dest"]] if task["days"] == 3 else database.states.get(task["dest"], [])
    return [city for city in cities if city in database.cities and city != task["org"]]


# ---------------------------------------------------------------- all routes at once

def stay_costs(task, database, cities):
    """(nights + 1, 2^cuisines, cities): dollars of so many nights in a city, with three meals and a
    sight on every day without travel, serving those cuisines; inf where the city has too little."""
    people, wanted = task["people_number"], cuisines(task)
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
    """(cities,) * number: the least cost of a trip to these cities in this order, budget or not.

    Peel off the last city. After k cities, n nights and the cuisines m the least cost is
        best_1[n, m][a]        = way(home, a) + stay[n, m, a]
        best_k[n, m][.., a, b] = min over n' < n and m' within m of
                                 best_{k-1}[n', m'][.., a] + way(a, b) + stay[n - n', m - m', b]
    and a trip costs best_number[all nights, all cuisines][.., z] + way(z, home).
    """
    dates, number, full = task["date"], task["visiting_city_number"], stay.shape[1] - 1
    total = task["days"] - 1  # nights
    way = partial(leg_cost, task, database, mode)
    out = np.array([way(task["org"], city, dates[0]) for city in cities])
    home = np.array([way(city, task["org"], dates[total]) for city in cities])
    best = {(n, mask): out + stay[n, mask]
            for n in range(1, total - number + 2) for mask in range(full + 1)}
    for k in range(2, number + 1):
        longer, hops = {}, {}
        for (spent, had), here in best.items():
            if spent not in hops:
                hops[spent] = np.array([[way(a, b, dates[spent]) if a != b else math.inf
                                         for b in cities] for a in cities])
            arrived, left = here[..., None] + hops[spent], total - spent
            for n in range(1, left - (number - k) + 1) if k < number else [left]:
                for mask in submasks(full & ~had) if k < number else [full & ~had]:
                    key, trip = (spent + n, had | mask), arrived + stay[n, mask]
                    longer[key] = np.minimum(longer[key], trip) if key in longer else trip
        best = longer
    trips = best[total, full] + home
    if number == 3:
        trips[np.arange(len(cities)), :, np.arange(len(cities))] = np.inf  # no city twice
    return trips


def least_costs(task, database):
    """{mode: array over routes} and the cities its axes stand for."""
    cities, number = stop_cities(task, database), task["visiting_city_number"]
    most = min(3, len(cities), task["days"] - 1)
    if task["org"] not in database.cities or not 1 <= number <= most:
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
    """Exact over honest plans. One hotel per city is enough: no two are cheaper than the cheapest
    one whose minimum nights the whole stay meets."""
    costs, cities = least_costs(task, database)
    cost, mode, route = cheapest_route(costs, cities)
    if cost == math.inf or cost > task["budget"]:
        return Report(None, cost, 0, explain(task, database, cost))
    within = np.argwhere(np.minimum.reduce(list(costs.values())) <= task["budget"])
    choices = {frozenset(route) for route in within.tolist()}
    return Report(cheapest_plan(task, database, mode, route), cost, len(choices), "")


def solve(task, database):
    """A plan of least cost that scores success under `star` and `strict`, or None: none exists."""
    return solve_report(task, database).plan


def explain(task, database, cost):
    """Why no plan exists, in a few words."""
    if cost < math.inf:
        return f"least cost {cost:.0f} is over the budget {task['budget']}"
    cities, org, dest, dates = stop_cities(task, database), task["org"], task["dest"], task["date"]
    number = task["visiting_city_number"]
    if org not in database.cities:
        return f"{org} is not among the cities of {database.folder}"
    if len(cities) < number:
        return f"{dest} has {len(cities)} cities to visit, {number} are asked for"
    for a, b, date in ((org, None, dates[0]), (None, org, dates[-1])):
        if not any(ways(task, database, mode, a or city, b or city, date)
                   for mode in modes(task) for city in cities):
            return f"no way from {a or dest} to {b or dest} on {date}"
    for name, wish in task["local_constraint"].items():
        eased = {**task, "local_constraint": {**task["local_constraint"], name: None}}
        if wish and cheapest_route(*least_costs(eased, database))[0] < math.inf:
            return f"no plan with {name} {wish}"
    return f"too few places or ways in {dest} for all that is asked"


# ---------------------------------------------------------------- the plan

def splits(total, parts):
    """All ways to cut `total` nights into `parts` stays of at least one night."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True)]


def legs(task, route, nights):
    """[(from, to, date)] of a trip."""
    stops, days = [task["org"], *route, task["org"]], [0, *itertools.accumulate(nights)]
    return [(stops[i], stops[i + 1], task["date"][day]) for i, day in enumerate(days)]


def cheapest_plan(task, database, mode, route):
    """The least cost plan along a route, of all splits of nights and all places for cuisines."""
    wanted, cities = cuisines(task), range(len(route))
    stay, best = stay_costs(task, database, route), (math.inf,)
    for nights in splits(task["days"] - 1, len(route)):
        travel = sum(leg_cost(task, database, mode, *leg) for leg in legs(task, route, nights))
        for owners in itertools.product(cities, repeat=len(wanted)):
            masks = [sum(1 << i for i, owner in enumerate(owners) if owner == c) for c in cities]
            cost = travel + sum(stay[nights[c], masks[c], c] for c in cities)
            best = min(best, (cost, nights, masks))
    _, nights, masks = best
    hotels, meals, sights = [], [], []
    for city, n, mask in zip(route, nights, masks, strict=True):
        hotels.append(next(name for _, least, name in lodgings(task, database, city) if least <= n))
        menus = cheapest_meals(menu(database, city, wanted), 3 * (n - 1))
        meals.append([meal.name for meal in menus[mask][1]])
        sights.append(list(venues(database, "attractions", city))[:n - 1])
    rides = [ways(task, database, mode, *leg)[0][1] for leg in legs(task, route, nights)]
    return lay_out(task, route, nights, rides, hotels, meals, sights)


def lay_out(task, route, nights, rides, hotels, meals, sights):
    """The plan's days. Meals beyond three for every full day go to the day of arrival, then to that
    of leaving."""
    plan = [dict.fromkeys(SLOTS, "-") for _ in task["date"]]
    start, home = 0, task["org"]
    for c, city in enumerate(route):
        end, full = start + nights[c], range(start + 1, start + nights[c])
        places = [(day, slot) for day in full for slot in ("breakfast", "lunch", "dinner")]
        places += [(start, slot) for slot in ("dinner", "lunch", "breakfast")]
        places += [(end, slot) for slot in ("breakfast", "lunch", "dinner")]
        for (day, slot), name in zip(places, meals[c], strict=False):
            plan[day][slot] = f"{name}, {city}"
        for day in range(start, end):
            plan[day]["accommodation"] = f"{hotels[c]}, {city}"
        for i, day in enumerate(full):
            shown = sights[c][i::len(full)]
            plan[day]["attraction"] = "".join(f"{name}, {city};" for name in shown)
            plan[day]["current_city"] = city
        plan[start]["current_city"] = f"from {([home] + route)[c]} to {city}"
        plan[start]["transportation"] = rides[c]
        start = end
    plan[start]["current_city"] = f"from {route[-1]} to {home}"
    plan[start]["transportation"] = rides[-1]
    return [{"day": number, "current_city": day.pop("current_city"), **day}
            for number, day in enumerate(plan, 1)]


# ---------------------------------------------------------------- the solver as an agent

def mode_of(plan):
    return "road" if plan[0]["transportation"].startswith("Self-driving") else "air"


def ends(day):
    return day["current_city"].removeprefix("from ").split(" to ")


def searches(task, plan):
    """[(thought, tool, arguments)] that tell all a plan is made of, in the order an agent would
    ask."""
    mode = mode_of(plan)
    travel = [day for day in plan if day["transportation"] != "-"]
    route, steps = [ends(day)[1] for day in travel[:-1]], []
    if len(route) > 1:
        steps.append((f"cities in {task['dest']}", "SearchCity", {"state": task["dest"]}))
    for day in travel:
        date = task["date"][day["day"] - 1]
        steps += way_searches(task, mode, *ends(day), date, day["transportation"])
    return steps + [step for city in route for step in city_searches(city)]


def city_searches(city):
    return [(f"{table} in {city}", tool, {"city": city}) for table, (tool, _) in SEARCHES.items()]


def way_searches(task, mode, a, b, date, way):
    """Flights first, unless the wish is not to fly or the way out has shown that the trip goes by
    road; then a road."""
    steps, free = [], not task["local_constraint"].get("transportation")
    if mode == "air" or free and a == task["org"]:
        arguments = {"departure": a, "destination": b, "date": date}
        steps.append((f"flight from {a} to {b}", "SearchFlight", arguments))
    if not way.startswith("Flight"):
        word = "driving" if mode == "road" else "taxi"
        arguments = {"departure": a, "destination": b, "mode": word}
        steps.append((f"{word} from {a} to {b}", "GoogleDistanceMatrix", arguments))
    return steps


def turn(thought, tool, arguments):
    """The reply that thinks this and makes this call."""
    words = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<think>{thought}</think>\n<tool_call>{words}</tool_call>"


def final_turn(thought, answer):
    """The reply that thinks this and gives this answer."""
    return f"<think>{thought}</think>\n<answer>\n{answer}\n</answer>"


def solver_replies(task, database):
    """The turns of the solver as an agent: its least cost plan, or the reason why there is none."""
    report = solve_report(task, database)
    if not report.plan:
        return [final_turn(report.reason, f"No plan: {report.reason}")]
    calls = [turn(*step) for step in searches(task, report.plan)]
    return [*calls, final_turn("the plan", itinerary(report.plan))]


def replies(steps, last, plan):
    return [*(turn(*step) for step in steps), final_turn(last, itinerary(plan))]
