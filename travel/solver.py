"""
An exact solver: `solve` finds a task's cheapest honest plan, or proves that there is none.

    (1) price   the hotels and meals of each city, and the rides between cities
    (2) sum     for each split of the nights and each assignment of cuisines to cities, the costs of
                all routes at once, in an array with one axis per city of the route
    (3) plan    choose the hotels, meals and rides of least cost, and lay them out day by day
    (4) play    play as an agent: search all parts of the plan, then answer with the plan

An honest plan leaves on the first day, returns on the last, and passes `strict`. One hotel per city
is enough: no two hotels cost less than the cheapest one whose minimum nights the stay reaches.
"""
import itertools
import math
import random
from collections import namedtuple
from functools import cache, lru_cache, partial

import numpy as np

from format_plan import FIELDS, MEALS, itinerary
from sandbox import final_turn, turn
from travel.constraints import ROADS, find_road, has_other_room, has_rule, untimely

SEARCHES = {"hotels": "SearchAccommodation", "restaurants": "SearchRestaurant",
            "attractions": "SearchAttraction"}  # table: its tool

Lodging = namedtuple("Lodging", "cost nights name")  # dollars per night for all; minimum nights
Meal = namedtuple("Meal", "cost mask name")  # dollars per person; bit i: serves the i-th cuisine
# a ride from a to b. cost: dollars for all; words: its text in a plan; flight, road: its row or ()
Way = namedtuple("Way", "cost words a b date flight road")
Stay = namedtuple("Stay", "city nights bed meals sights")  # three meals and one sight per full day
Journey = namedtuple("Journey", "mode route stays ways")  # all parts of a plan
Search = namedtuple("Search", "thought tool arguments")  # a tool call and the thought before it
# journey: the cheapest one within the budget; None: `reason` says why there is none. cost: dollars
# of the cheapest journey with any budget, or inf
Report = namedtuple("Report", "journey cost reason")


# ---------------------------------------------------------------- (1) price

@cache
def places(database, table, city):
    """{name: rows} of the places in a city that an honest plan may name, in the order of the file.

    table: "hotels", "restaurants" or "attractions". The rows are those that a judge may take the
    name for: the first row whose name contains it (star), and all rows of that name (strict). A
    plan must be right for all of them, so the dearest counts.
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
    """The hotels of a city that satisfy the task's wishes, cheapest first."""
    wish, people, found = task["local_constraint"], task["people_number"], []
    for name, rows in places(database, "hotels", city).items():
        if not any(has_rule(wish, row) or has_other_room(wish, row) for row in rows):
            rooms = [row.price * math.ceil(people / max(1, row.maximum_occupancy)) for row in rows]
            found.append(Lodging(max(rooms), max(row.minimum_nights for row in rows), name))
    return sorted(found)


def cuisines(task):
    """The wanted cuisines, a tuple. Sets of them are bit masks."""
    return tuple(task["local_constraint"].get("cuisine") or ())


@lru_cache(maxsize=4096)
def menu(database, city, wanted):
    """The meals in a city, cheapest first. wanted: the task's cuisines."""
    meals = []
    for name, rows in places(database, "restaurants", city).items():
        mask = sum(1 << i for i, cuisine in enumerate(wanted)
                   if all(cuisine in row.cuisines for row in rows))
        meals.append(Meal(max(row.cost for row in rows), mask, name))
    return sorted(meals)


@lru_cache(maxsize=4096)
def cheapest_meals(database, city, wanted, need):
    """{mask: (dollars per person, meals)}: the cheapest choice of `need` or more different meals
    that serve the cuisines of the mask.

    Such a choice consists of a cover, in which every meal adds a cuisine and is the cheapest of its
    mask, and of the cheapest other meals. So it is enough to try all covers.
    """
    meals, kinds, best = menu(database, city, wanted), {}, {}
    for meal in meals:
        kinds.setdefault(meal.mask, meal)
    covers = [((), 0)]
    for mask, meal in kinds.items():
        covers += [((*cover, meal), have | mask) for cover, have in covers if mask & ~have]
    for cover, have in covers:
        others = [meal for meal in meals[:need + len(cover)] if meal not in cover]
        picks = (*cover, *others[:max(0, need - len(cover))])
        cost = sum(meal.cost for meal in picks) if len(picks) >= need else math.inf
        for mask in range(have + 1):
            if mask & have == mask and cost < best.get(mask, (math.inf,))[0]:
                best[mask] = (cost, picks)
    return best


@lru_cache(maxsize=1 << 17)
def drive(database, a, b):
    """The road from a to b, a row; None if there is none or it takes more than a day."""
    return find_road(database, (a, b))[0]


def modes(task):
    """The allowed modes of a task: "air", by flights and taxis, and "road", by self-driving. A plan
    must not mix them. Self-driving never costs more than a taxi."""
    wish = task["local_constraint"].get("transportation")
    return {"no flight": ("road",), "no self-driving": ("air",)}.get(wish, ("air", "road"))


def goes(task, database, a, b, date):
    """Whether a flight or a road that the task allows goes from a to b on a date."""
    flies = task["local_constraint"].get("transportation") != "no flight"
    return bool(flies and database.flights(a, b, date) or drive(database, a, b))


def ways(task, database, mode, a, b, date):
    """The Ways from a to b on a date, cheapest first: for "air" flights and a taxi, for "road"
    self-driving."""
    road, people, found = drive(database, a, b), task["people_number"], []
    for flight in database.flights(a, b, date) if mode == "air" else ():
        words = (f"Flight Number: {flight.number}, from {a} to {b}, Departure Time: "
                 f"{flight.departure}, Arrival Time: {flight.arrival}")
        found.append(Way(flight.price * people, words, a, b, date, flight, ()))
    if road:
        kind = "self-driving" if mode == "road" else "taxi"
        per_km, seats = ROADS[kind]
        cost = int(road.km * per_km)  # dollars of one car
        words = (f"{kind.capitalize()}, from {a} to {b}, duration: {road.duration}, distance: "
                 f"{road.distance}, cost: {cost}")
        found.append(Way(cost * math.ceil(people / seats), words, a, b, date, (), road))
    return sorted(found)


# ---------------------------------------------------------------- (2) sum

def stop_cities(task, database):
    """The cities that a trip may visit: dest for 3 days, else the cities of the state dest."""
    cities = [task["dest"]] if task["days"] == 3 else database.states.get(task["dest"], [])
    return [city for city in cities if city in database.cities and city != task["org"]]


def splits(task):
    """All divisions of the nights among the cities of a route, with one night or more each."""
    total, number = task["days"] - 1, task["visiting_city_number"]
    counts = itertools.product(range(1, total + 1), repeat=number)
    return [nights for nights in counts if sum(nights) == total]


def shares(task):
    """Yield all assignments of the cuisines to the cities of a route, as one mask per city."""
    cities = range(task["visiting_city_number"])
    for owners in itertools.product(cities, repeat=len(cuisines(task))):
        yield [sum(1 << i for i, owner in enumerate(owners) if owner == c) for c in cities]


def stay_costs(task, database, cities):
    """Dollars of n nights in a city whose meals serve the cuisines of a mask: an array with the
    shape (longest stay + 1, 2^cuisines, cities). Each day without travel has three meals and a
    sight; inf if the city has too few."""
    people, wanted = task["people_number"], cuisines(task)
    longest = task["days"] - task["visiting_city_number"]
    costs = np.full((longest + 1, 1 << len(wanted), len(cities)), np.inf)
    for c, city in enumerate(cities):
        beds, sights = lodgings(task, database, city), len(places(database, "attractions", city))
        for n in range(1, min(longest, sights + 1) + 1):
            bed = min((bed.cost for bed in beds if bed.nights <= n), default=math.inf)
            for mask, (meal, _) in cheapest_meals(database, city, wanted, 3 * (n - 1)).items():
                costs[n, mask, c] = n * bed + people * meal
    return costs


def fares(task, database, mode, origins, goals, day):
    """Dollars of the cheapest ways on a day, an array (origins, goals); inf within a city."""
    def fare(a, b):
        found = ways(task, database, mode, a, b, task["date"][day]) if a != b else ()
        return found[0].cost if found else math.inf

    return np.array([[fare(a, b) for b in goals] for a in origins])


def trip_costs(task, database, mode, cities, stay):
    """Yield (nights, masks, costs) for each split of the nights and assignment of the cuisines.

    stay: from stay_costs. costs: dollars of all routes without the way home, an array with one axis
    over `cities` per city of the route.
    """
    ride = partial(fares, task, database, mode)
    out = ride([task["org"]], cities, 0)[0]
    hops = {day: ride(cities, cities, day) for day in range(1, task["days"] - 1)}
    for nights, masks in itertools.product(splits(task), shares(task)):
        day, costs = nights[0], out + stay[nights[0], masks[0]]
        for n, mask in zip(nights[1:], masks[1:], strict=True):
            costs = costs[..., None] + (hops[day] + stay[n, mask])
            day += n
        yield nights, masks, costs


def least_costs(task, database):
    """({mode: dollars of each route, an array with one axis per city of the route}, the cities
    along each axis)."""
    cities, number = stop_cities(task, database), task["visiting_city_number"]
    most = min(3, len(cities), task["days"] - 1)
    if task["org"] not in database.cities or not 1 <= number <= most:
        return {mode: np.empty(0) for mode in modes(task)}, cities
    stay, found, every = stay_costs(task, database, cities), {}, np.arange(len(cities))
    for mode in modes(task):
        best = np.full((len(cities),) * number, np.inf)
        for _, _, costs in trip_costs(task, database, mode, cities, stay):
            np.minimum(best, costs, out=best)
        if number == 3:
            best[every, :, every] = np.inf  # no city twice
        found[mode] = best + fares(task, database, mode, cities, [task["org"]], -1)[:, 0]
    return found, cities


def cheapest_route(costs, cities):
    """(dollars, mode, route) of the cheapest route; dollars is inf if there is none."""
    cost, mode = min((costs[mode].min(initial=math.inf), mode) for mode in costs)
    best = np.unravel_index(costs[mode].argmin(), costs[mode].shape) if cost < math.inf else ()
    return float(cost), mode, [cities[i] for i in best]


def solve_report(task, database):
    """The Report on a task."""
    costs, cities = least_costs(task, database)
    cost, mode, route = cheapest_route(costs, cities)
    if cost == math.inf or cost > task["budget"]:
        return Report(None, cost, explain(task, database, cost))
    return Report(cheapest_journey(task, database, mode, route), cost, "")


def solve(task, database):
    """A plan of least cost that succeeds under `star` and `strict`; None if no plan exists."""
    journey = solve_report(task, database).journey
    return lay_out(task, journey) if journey else None


def explain(task, database, cost):
    """The reason why no plan exists, in words. cost: of the cheapest route."""
    if cost < math.inf:
        return f"least cost {cost:.0f} is over the budget {task['budget']}"
    cities, number, dest = stop_cities(task, database), task["visiting_city_number"], task["dest"]
    if len(cities) < number:
        return f"{dest} has {len(cities)} cities to visit, {number} are asked for"
    for name, wish in task["local_constraint"].items():
        eased = task | {"local_constraint": task["local_constraint"] | {name: None}}
        if wish and cheapest_route(*least_costs(eased, database))[0] < math.inf:
            return f"no plan with {name} {wish}"
    return f"too few places in {dest}, or ways from {task['org']} and back, for all that is asked"


# ---------------------------------------------------------------- (3) plan

def legs(task, route, nights):
    """[(from, to, date)] of the rides of a trip."""
    stops, days = [task["org"], *route, task["org"]], [0, *itertools.accumulate(nights)]
    return [(stops[i], stops[i + 1], task["date"][day]) for i, day in enumerate(days)]


def cheapest_journey(task, database, mode, route):
    """The cheapest Journey along a route."""
    trips = trip_costs(task, database, mode, route, stay_costs(task, database, route))
    # the axes of costs are the route's cities, and [0, 1, ..] visits them in their order
    _, nights, masks = min((costs[*range(len(route))], nights, masks)
                           for nights, masks, costs in trips)
    stays = []
    for city, n, mask in zip(route, nights, masks, strict=True):
        bed = next(bed for bed in lodgings(task, database, city) if bed.nights <= n)
        _, meals = cheapest_meals(database, city, cuisines(task), 3 * (n - 1))[mask]
        sights = list(places(database, "attractions", city))
        stays.append(Stay(city, n, bed, meals, sights[:n - 1]))
    cheapest = [ways(task, database, mode, *leg)[0] for leg in legs(task, route, nights)]
    return Journey(mode, route, stays, cheapest)


def lay_out(task, journey):
    """The plan of a journey: a list of days. Meals beyond three per full day go to the days of
    arrival and departure, where the times of the rides allow them if possible."""
    plan = [{"day": day, **dict.fromkeys(FIELDS, "-")} for day in range(1, task["days"] + 1)]
    starts = [0, *itertools.accumulate(stay.nights for stay in journey.stays)]
    for start, way in zip(starts, journey.ways, strict=True):
        plan[start] |= {"current_city": f"from {way.a} to {way.b}", "transportation": way.words}
    for i, (city, nights, bed, meals, sights) in enumerate(journey.stays):
        start = starts[i]
        comes, goes = (way.flight or way.road for way in journey.ways[i:i + 2])
        arrival, *full, leaving = plan[start:start + nights + 1]
        slots = [(day, slot) for day in full for slot in MEALS]
        edges = [(arrival, slot, comes) for slot in MEALS[::-1]]
        edges += [(leaving, slot, goes) for slot in MEALS]
        edges.sort(key=lambda edge: bool(untimely(edge[2], edge[1], edge[0] is arrival)))
        slots += [(day, slot) for day, slot, _ in edges]
        for (day, slot), meal in zip(slots, meals, strict=False):
            day[slot] = f"{meal.name}, {city}"
        for day, sight in zip(full, sights, strict=True):
            day |= {"current_city": city, "attraction": f"{sight}, {city};"}
        for day in arrival, *full:
            day["accommodation"] = f"{bed.name}, {city}"
    return plan


# ---------------------------------------------------------------- (4) play

def searches(task, journey):
    """The searches for all parts of a plan, in the order in which an agent would make them."""
    steps = [state_search(task["dest"])] if len(journey.stays) > 1 else []
    for way in journey.ways:
        steps += way_searches(task, journey.mode, way.a, way.b, way.date, bool(way.flight))
    return steps + [Search(f"{table} in {stay.city}", tool, {"city": stay.city})
                    for stay in journey.stays for table, tool in SEARCHES.items()]


def state_search(state):
    return Search(f"cities in {state}", "SearchCity", {"state": state})


def way_searches(task, mode, a, b, date, flies):
    """The searches for a way. Flights come first, unless the group does not fly or the first way
    has shown that the trip goes by road; then the road, unless the way is a flight."""
    steps, pair = [], {"departure": a, "destination": b}
    free = not task["local_constraint"].get("transportation")
    if mode == "air" or free and a == task["org"]:
        steps.append(Search(f"flight from {a} to {b}", "SearchFlight", pair | {"date": date}))
    if not flies:
        pair["mode"] = "driving" if mode == "road" else "taxi"
        steps.append(Search(f"{pair['mode']} from {a} to {b}", "GoogleDistanceMatrix", pair))
    return steps


def spoil(plan, draw):
    """Put none, one or two mistakes into a plan."""
    first, last, full = plan[0], plan[-1], next(day for day in plan if day["attraction"] != "-")
    city = full["current_city"]
    other = "Taxi" if last["transportation"].startswith("Self-driving") else "Self-driving"
    mistakes = [
        (first, "accommodation", f"Ritz, {city}"), (first, "accommodation", "-"),
        (full, "lunch", full["dinner"]), (full, "dinner", f"Cafe Paris, {city}"),
        (full, "breakfast", "-"), (full, "attraction", f"Eiffel Tower, {city};"),
        (full, "attraction", full["attraction"] * 2), (last, "transportation", other)]
    for day, cell, text in draw.sample(mistakes, draw.choice((0, 0, 1, 2))):
        day[cell] = text


def solver_replies(task, database, careless=False):
    """The solver's replies as an agent: searches and the cheapest plan, or the reason why there is
    none. careless: about half of the plans have a mistake or two."""
    journey, _, reason = solve_report(task, database)
    if reason:
        return [final_turn(reason, f"No plan: {reason}")]
    plan = lay_out(task, journey)
    if careless:
        spoil(plan, random.Random(f"careless/{task['id']}"))
    answer = itinerary(plan)
    return [*(turn(*step) for step in searches(task, journey)), final_turn("the plan", answer)]
