"""
Dead ends: whether a task leads into one, and whether an agent that meets one leaves it.

    (1) walk   the cities that a greedy traveller would take, and in which of them no hotel fits
    (2) meet   a search, unless it was made to fail, shows that no valid plan goes this way. "ride":
               there is no such flight, or no road of at most a day. "hotel": none in a city fits
               the wishes and the longest stay
    (3) leave  all rides of the plan exist on their days, or all its hotels fit; other plans keep
               it. A plan that leaves gives up a city of the dead ends, or chooses only another
               ride or hotel
"""
from sandbox import Sandbox, mended, observation_message, parse
from travel import solver
from travel.constraints import Trip, read_trip


def greedy_walk(task, database):
    """{city: whether a hotel there fits} of the cities that a greedy traveller takes, in its order.

    It goes through the cities of the state in the order in which SearchCity lists them, and takes
    each to which a flight or a road that the task allows goes from home on the first day. It stops
    when as many cities as the trip visits have a hotel that fits, or at the end of the list.
    """
    taken, home, first = {}, task["org"], task["date"][0]
    for city in solver.stop_cities(task, database):
        if sum(taken.values()) == task["visiting_city_number"]:
            break
        if solver.goes(task, database, home, city, first):
            taken[city] = bool(fitting(task, database, city))
    return taken


def begins_with(ends, task, database):
    """Whether no hotel fits in the first `ends` cities that SearchCity lists, but one in each of
    the next ones, as many as the trip visits, and a greedy traveller passes over none of these."""
    taken, listed = greedy_walk(task, database), solver.stop_cities(task, database)
    fits = [False] * ends + [True] * task["visiting_city_number"]
    return list(taken.values()) == fits and list(taken) == listed[:len(fits)]


def count_dead_ends(row, database, counted=("ride", "hotel")):
    """Four lines of evaluate.py's table for an episode's record: met, left in two ways, kept.
    counted: the kinds of dead ends."""
    task, met = row["task"], {end for end, _ in ends_met(row, database) if end[0] in counted}
    trip = read_trip(task, row["plan"], database, "star") if row.get("plan") else None
    planned, kinds = isinstance(trip, Trip), {kind for kind, *_ in met}
    left = planned and all({"ride": rides_exist, "hotel": hotels_fit}[kind](trip) for kind in kinds)
    ended = {city for _, *cities in met for city in cities} - {task["org"]}
    away = left and not ended <= {city for day in trip.days for city in day.ends}
    found = {"left by another city": away, "left by another hotel or ride": left and not away,
             "kept": planned and not left}
    return {"dead end: met": bool(met)} | {
        f"dead end: {name}": value if met else None for name, value in found.items()}


def visits(row, database):
    """Of an episode with a plan, (whether the next reply names a hotel of the list, whether the
    plan gives up the city) of each city in which it looked for a hotel and none fits."""
    task, read = row["task"], {}
    trip = read_trip(task, row["plan"], database, "star") if row.get("plan") else None
    if not isinstance(trip, Trip):
        return []
    for (kind, city, *_), reply in ends_met(row, database):
        if kind == "hotel":
            names = [bed.name for bed in database.hotels(city)]
            read.setdefault(city, any(name in reply for name in names))
    planned = {city for day in trip.days for city in day.ends}
    return [(seen, city not in planned) for city, seen in read.items()]


def ends_met(row, database):
    """Yield (dead end, the reply after it) of each search of an episode that showed a dead end."""
    world, messages = Sandbox(database), row["messages"]
    replies = [*(message["content"] for message in messages[2:]), ""]
    for said, heard, reply in zip(messages, messages[1:], replies, strict=False):
        if said["role"] == "assistant":
            call = parse(mended(said["content"]))  # as a lenient evaluation reads it
            if call.kind == "call" and heard == observation_message(
                    world.call(call.name, call.arguments)):
                yield from ((end, reply) for end in dead_end(row["task"], call, database))


def dead_end(task, call, database):
    """The dead end that a search shows: {("ride", from, to)}, {("hotel", city)} or set()."""
    asked = call.arguments if isinstance(call.arguments, dict) else {}
    a, b, city, date = map(asked.get, ("departure", "destination", "city", "date"))
    cities = [task["org"], *solver.stop_cities(task, database)]
    if call.name == "SearchAccommodation" and city in cities[1:]:
        return set() if fitting(task, database, city) else {("hotel", city)}
    if a not in cities or b not in cities or a == b:
        return set()
    found = solver.drive(database, a, b) if call.name == "GoogleDistanceMatrix" else (
        date not in task["date"] or database.flights(a, b, date))
    return set() if found else {("ride", a, b)}


def fitting(task, database, city):
    """The names of a city's hotels that fit the wishes and the longest stay of the trip."""
    longest = task["days"] - task["visiting_city_number"]
    return {bed.name for bed in solver.lodgings(task, database, city) if bed.nights <= longest}


def rides_exist(trip):
    days = [day for day in trip.days if day.move or len(day.ends) == 2]
    return bool(days) and all(day.ride and not day.ride.fault and (
        day.ride.mode != "flight" or day.ride.row.date == trip.task["date"][day.number - 1])
        for day in days)


def hotels_fit(trip):
    beds = [bed for day in trip.days for bed in day.bed]
    return bool(beds) and all(bed.rows and bed.rows[0].name.strip() in fitting(
        trip.task, trip.database, bed.city) for bed in beds)
