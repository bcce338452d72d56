"""
Measure backtracking: whether an agent that meets a dead end leaves it, from a judged episode.

    (1) meet   a search shows that no valid plan goes this way: there is no such flight, or no road
               of at most a day ("ride"); no hotel in a city fits the wishes and the longest stay
               ("hotel"); all plans that visit a city, or that fly, exceed the budget ("money")
    (2) leave  the final plan avoids it validly: all its rides exist on their days; all its hotels
               fit; it stays within the budget without that city, or without flying

An episode with several dead ends leaves them only if it leaves all. A search counts only if its
result is the database's, so an injected failure shows nothing. A plan keeps a dead end if it still
goes that way, or has an invalid ride, hotel or cost instead. Without a plan the episode neither
leaves nor keeps it.
"""
import math

from sandbox import Sandbox, observation_message, parse
from travel import constraints, solver
from travel.constraints import read_trip


def backtracking(row, database):
    """{"met", "left", "kept"}, each True or False, for a judged episode's record; left and kept are
    None if no dead end was met."""
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
    """Yield (tool, arguments) of the calls whose results are the database's."""
    world = Sandbox(database)
    for said, heard in zip(messages, messages[1:], strict=False):
        if said["role"] == "assistant":
            action = parse(said["content"])
            if action.kind == "call" and isinstance(action.arguments, dict) and (
                    observation_message(world.call(action.name, action.arguments)) == heard):
                yield action.name, action.arguments


def dead_ends(task, calls, database):
    """The set of dead ends that the calls show: ("ride",), ("hotel",), ("money", city), or
    ("money", None) if flying exceeds the budget."""
    cities = [task["org"], *solver.stop_cities(task, database)]
    found, costs = set(), None
    for name, arguments in calls:
        a, b, city = (arguments.get(key) for key in ("departure", "destination", "city"))
        if name in ("SearchFlight", "GoogleDistanceMatrix") and a in cities and b in cities:
            date, flight = arguments.get("date"), name == "SearchFlight"
            if a == b or flight and date not in task["date"]:
                continue  # a mistake in the call, not a dead end
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
    """The names of a city's hotels that fit the wishes and the longest possible stay."""
    longest = task["days"] - task["visiting_city_number"]
    return {bed.name for bed in solver.lodgings(task, database, city) if bed.nights <= longest}


def least_costs(task, database):
    """{city: dollars of the cheapest valid plan that visits it, None: of the cheapest that flies}.
    """
    costs, cities = solver.least_costs(task, database)
    found = {None: costs["air"].min(initial=math.inf) if "air" in costs else math.inf}
    for i, city in enumerate(cities):
        found[city] = min((each.take(i, axis).min(initial=math.inf)
                           for each in costs.values() if each.size for axis in range(each.ndim)),
                          default=math.inf)
    return found


def too_dear(costs, city, task):
    """Whether plans that visit a city (None: that fly) exist but exceed the budget."""
    return task["budget"] < costs[city] < math.inf


# ---------------------------------------------------------------------------------------- (2) leave

def leaves(end, trip):
    """Whether a plan validly avoids a dead end."""
    if end[0] == "ride":
        return rides_exist(trip)
    if end[0] == "hotel":
        return hotels_fit(trip)
    taken = (any(day.ride and day.ride.flight for day in trip.days) if end[1] is None else
             end[1] in (bed.city for day in trip.days for bed in day.bed))
    return not (taken or constraints.is_valid_information_in_sandbox(trip)
                or constraints.valid_cost(trip, None))


def rides_exist(trip):
    """Whether a plan has rides, and the database has each of them on its day."""
    travel = [day for day in trip.days if day.move is not None or len(day.ends) == 2]
    return bool(travel) and all(
        day.ride and not day.ride.fault and
        (day.ride.flight is None or day.ride.flight.date == trip.task["date"][day.number - 1])
        for day in travel)


def hotels_fit(trip):
    """Whether a plan has hotels, and each fits the wishes and the longest stay."""
    beds = [bed for day in trip.days for bed in day.bed]
    return bool(beds) and all(
        any(row.name.strip() in fitting(trip.task, trip.database, bed.city) for row in bed.rows[:1])
        for bed in beds)
