"""
Does an agent leave a dead end? Read from a judged episode: its searches, its plan, the database.

    (1) meet   a search shows that no valid plan goes this way: there is no such flight, or no road
               within a day (ride); no hotel in the city fits the wishes and the longest stay
               (hotel); all plans that sleep in the city, or that fly, are over the budget (money)
    (2) leave  the plan goes another way, and validly: all its rides exist on their days; all its
               hotels fit; it is within the budget without that city, or without flying

An episode that meets several dead ends leaves them if it leaves all. A search counts if its answer
is what the database says; a call that was made to fail shows nothing. A plan that still has the
dead end, or an invalid ride, hotel or sum instead, keeps it. Without a plan, it does neither.
"""
import math

from sandbox import Sandbox, observation_message, parse
from travel import constraints, solver
from travel.constraints import read_trip


def backtracking(row, database):
    """{"met": .., "left": .., "kept": ..} of the record of a judged episode, True or False; left
    and kept are None where no dead end was met."""
    task = row["task"]
    ends = dead_ends(task, searches(row["messages"], database), database)
    if not ends:
        return {"met": False, "left": None, "kept": None}
    trip = read_trip(task, row["plan"], database, official=False) if row.get("plan") else None
    if not isinstance(trip, constraints.Trip):
        return {"met": True, "left": False, "kept": False}
    left = all(leaves(end, trip) for end in ends)
    return {"met": True, "left": left, "kept": not left}


# ----------------------------------------------------------------------------------------- (1) meet

def searches(messages, database):
    """The (tool, arguments) of the calls that the database answered."""
    world = Sandbox(database)
    for said, heard in zip(messages, messages[1:], strict=False):
        if said["role"] == "assistant":
            action = parse(said["content"])
            if action.kind == "call" and isinstance(action.arguments, dict) and (
                    observation_message(world.call(action.name, action.arguments)) == heard):
                yield action.name, action.arguments


def dead_ends(task, calls, database):
    """The dead ends that these calls show: ("ride",), ("hotel",), ("money", city) or ("money",
    None), which is to fly."""
    cities = [task["org"], *solver.stop_cities(task, database)]
    found, costs = set(), None
    for name, arguments in calls:
        a, b, city = (arguments.get(key) for key in ("departure", "destination", "city"))
        if name in ("SearchFlight", "GoogleDistanceMatrix") and a in cities and b in cities:
            date, flight = arguments.get("date"), name == "SearchFlight"
            if a == b or flight and date not in task["date"]:
                continue  # a slip, not a way to go
            exists = database.flights(a, b, date) if flight else solver.drive(database, a, b)
            if not exists:
                found.add(("ride",))
            elif flight:
                costs = costs or least_costs(task, database)
                if too_dear(costs, None, task):
                    found.add(("money", None))
        elif name == "SearchAccommodation" and city in cities[1:]:
            costs = costs or least_costs(task, database)
            if not fitting(task, database, city):
                found.add(("hotel",))
            elif too_dear(costs, city, task):
                found.add(("money", city))
    return found


def fitting(task, database, city):
    """Names of a city's hotels that fit the wishes and the longest stay in one city."""
    longest = task["days"] - task["visiting_city_number"]
    return {bed.name for bed in solver.lodgings(task, database, city) if bed.nights <= longest}


def least_costs(task, database):
    """{city: the least cost of a valid plan that visits it, or None: of one that flies}."""
    costs, cities = solver.least_costs(task, database)
    found = {None: costs["air"].min(initial=math.inf) if "air" in costs else math.inf}
    for i, city in enumerate(cities):
        found[city] = min((each.take(i, axis).min(initial=math.inf)
                           for each in costs.values() if each.size for axis in range(each.ndim)),
                          default=math.inf)
    return found


def too_dear(costs, city, task):
    """Whether money is all that rules out the plans of this city, or those that fly."""
    return task["budget"] < costs[city] < math.inf


# ---------------------------------------------------------------------------------------- (2) leave

def leaves(end, trip):
    """Whether a plan goes another way than this dead end, and validly."""
    if end[0] == "ride":
        return rides_exist(trip)
    if end[0] == "hotel":
        return hotels_fit(trip)
    taken = (any(day.ride and day.ride.flight for day in trip.days) if end[1] is None else
             end[1] in (bed.city for day in trip.days for bed in day.bed))
    return not (taken or constraints.is_valid_information_in_sandbox(trip)
                or constraints.valid_cost(trip, None))


def rides_exist(trip):
    """Whether the plan travels, and every ride is one of the database on its day."""
    travel = [day for day in trip.days if day.move is not None or len(day.ends) == 2]
    return bool(travel) and all(
        day.ride and not day.ride.fault and
        (day.ride.flight is None or day.ride.flight.date == trip.task["date"][day.number - 1])
        for day in travel)


def hotels_fit(trip):
    """Whether the plan sleeps in hotels, and every one fits the wishes and the longest stay."""
    beds = [bed for day in trip.days for bed in day.bed]
    return bool(beds) and all(
        any(row.name.strip() in fitting(trip.task, trip.database, bed.city) for row in bed.rows[:1])
        for bed in beds)
