"""
Judge plans: TravelPlanner's thirteen constraints under three rule sets, the score, the reward.

    (1) read    find the rows of the database that each field of a plan's days names
    (2) check   eight commonsense constraints, then up to five hard ones; the hard ones are checked
                only if the plan is complete and all that it names is in the database
    (3) score   the shares of constraints that passed; reward() makes one number of them

There are three rule sets. `star` computes the reward of the STAR release. `official` computes what
the TravelPlanner leaderboard's code computes, which differs from star at C1 to C12. `strict` runs
every check a second time, on a Trip that is marked strict: this closes the loopholes of star that
RL learns to use, and never passes a plan that star fails. docs/rules.md explains the marks B1 to
B33 and C1 to C12.

A malformed value in a plan makes the check that reads it False, with a reason, even where the two
reference programs raise an exception. A task without a needed key is the caller's Mistake.
"""
import ast
import math
import re
from dataclasses import dataclass
from functools import lru_cache, partial

from format_plan import MEALS, MOST_PIECES, TABLE_OF, read_plan
from runtime import Mistake
from sandbox import Flight

FIELDS = ("transportation", *TABLE_OF)
PLACES = ("current_city", *FIELDS)
EMPTY = ("", "-")
NOT_NEEDED = "You don't need to fill in the information for this or later days."
HOUSE_RULES = ("smoking", "parties", "children under 10", "visitors", "pets")
ROOM_TYPES = {"entire room": "Entire home/apt", "private room": "Private room",
              "shared room": "Shared room"}
SCORES = ("cs_micro", "cs_macro", "hard_micro", "hard_macro", "success")
LONGEST = 2000  # characters in which "from .. to" is searched for


def need(task, key):
    """task[key], or a Mistake that names the task and the key."""
    if key not in task:
        raise Mistake(f"the task {task.get('id', '')!r} has no {key!r}: every task needs it")
    return task[key]


def literal(value):
    """The value of a text that is a Python literal; what is none stays as it is."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value


# ---------------------------------------------------------------------------------------- reading
# Records of what the fields of a plan say. They are dataclasses with slots because score() reads
# them hundreds of times per plan; with NamedTuples it is 10% slower.

# B2: from\s+(.+?)\s+to\s+([^,]+), in two parts, so that it takes linear time
FROM, TO = re.compile(r"from\s++(?=\S)"), re.compile(r"(?<!\s)\s++to\s+([^,]+)")
ROADS = {"self-driving": (0.05, 5), "taxi": (1, 4)}  # {kind: (dollars per km, seats of a car)}
# only for strict: the three forms of a ride
RIDE = re.compile(r"(Flight Number: F\d+|Taxi|Self-driving),? from ([^,]+?) to ([^,]+)", re.I)
NUMBER = re.compile(r"\bF\d{3,9}\b")
TIME_UNIT = re.compile(r"(\d+) (hour|min)")
# {meal: (latest arrival before it in the city of arrival, earliest departure after it)}
HOURS = {"breakfast": ("11:00", "05:00"), "lunch": ("15:30", "11:00"),
         "dinner": ("23:00", "16:30")}


@dataclass(slots=True)
class Venue:
    """The place that the text of a meal, attraction or hotel names."""

    field: str
    text: object  # as written; a str unless the plan is malformed
    name: str = None  # None if the field is not text
    city: str = None
    rows: tuple = ()  # rows of the city whose name contains this name (B4)
    exact: tuple = ()  # rows of the city whose name equals it, ignoring case and outer blanks


@dataclass(slots=True)
class Ride:
    """The ride in a transportation text: its kind, its cost, and what is wrong with it."""

    mode: str  # "flight", "taxi", "self-driving"; official only: "" for none of them
    breaks: tuple  # the wishes on transportation that it breaks
    route: tuple  # (origin, destination), or (None, None)
    fault: str = ""  # why it is not in the database, or ""
    row: object = None  # its flight or its road in the database; None if it has a fault
    cost: int = 0  # dollars per ticket or car
    seats: int = 1  # people per ticket or car


@dataclass(slots=True)
class Day:
    """One day of a plan. A field is filled if it is neither falsy nor exactly "-" (B6)."""

    number: int  # counted from 1
    item: dict  # the day as the agent wrote it
    city: object  # current_city; a str unless the plan is malformed
    ends: tuple  # (from, to) on a day of travel, (None, None) if these cannot be read, else (city,)
    move: object  # the transportation if filled, else None
    ride: object  # its Ride; None if move is None or not text
    meals: tuple  # Venues of the filled meals
    sights: tuple  # Venues of the attractions that count (B15)
    bed: tuple  # the Venue of the hotel; () if there is none
    venues: tuple  # meals + sights + bed


@dataclass(slots=True)
class Trip:
    """A plan as the checks read it."""

    task: dict
    database: object
    official: bool
    strict: bool  # a name must be the whole name of rows, and all these rows count (B4)
    days: list  # the Days of the plan, up to task["days"] (B1)
    more: int  # number of further days that are not empty


def cut_state(city):
    """C1: "City(State)" becomes "City"; "City (State)" becomes "City ", which is in no table."""
    name, bracket, rest = city[:LONGEST].partition("(")
    return name if bracket and ")" in rest and "\n" not in name else city


def from_to(text, official):
    """(origin, destination) of the first "from .. to .." in a text, or (None, None)."""
    text, to = text[:LONGEST], None
    for start in FROM.finditer(text):
        if to is None or to.start() < start.end():
            to = TO.search(text, start.end())
        if to is None:
            break
        if text.find("\n", start.end(), to.start()) < 0:
            route = text[start.end():to.start()], to[1]
            return tuple(map(cut_state, route)) if official else route
    return None, None


def read_venue(text, field, database, official):
    """The Venue of a text: the name before the last comma, within its line, and the city (B3)."""
    comma, name, city = text.rfind(","), "-", "-"
    if comma not in (-1, len(text) - 1):
        name = text[text.rfind("\n", 0, comma) + 1 : comma].strip()
        city = text[comma + 1 :].strip()
        city = cut_state(city).strip() if official else city
    rows = getattr(database, TABLE_OF[field])(city)
    whole = text[: max(comma, 0)].strip().casefold()
    exact = tuple(row for row in rows if row.name.strip().casefold() == whole)
    return Venue(field, text, name, city, tuple(row for row in rows if name in row.name), exact)


def read_venues(text, field, database, official):
    """The Venues in a field: one, or for attractions one per text that ends with ";" (B15). What
    follows the first MOST_PIECES attractions counts as one more, which no table has."""
    texts = [text]
    if field == "attraction":
        texts = text.split(";", MOST_PIECES)
        texts = texts if ";" in texts[-1] else texts[:-1]
    return tuple([read_venue(part, field, database, official) for part in texts])


def read_ride(text, city, database, official):
    """The Ride of a transportation text; its cities may be in `city`, the current_city (B12)."""
    route = from_to(text, official)
    if route[0] is None and city is not None:
        route = from_to(city, official)
    low = text.lower()
    if official:  # three checks read the text in three ways
        mode = first_word(low, "taxi", "self-driving", "flight")  # C2
        kind = first_word(low, "flight number", "self-driving", "taxi")  # C3
        words = [word.lower() for word in ("Flight", "Self-driving") if word in text]  # C4
    else:  # B5
        mode = kind = first_word(low, "flight", "taxi") or "self-driving"
        words = [mode]
    ride = Ride(mode, tuple(f"no {word}" for word in words if word != "taxi"), route)
    if kind.startswith("flight"):
        ride.row, ride.fault = find_flight(database, text, route)
        ride.cost = ride.row.price if ride.row else 0
    elif kind:
        ride.row, ride.fault = find_road(database, route)
        per_km, ride.seats = ROADS[kind]
        ride.cost = int(ride.row.km * per_km) if ride.row else 0
    return ride


def first_word(text, *words):
    """The first of the words that a text contains, else ""."""
    return next((word for word in words if word in text), "")


def find_flight(database, text, route):
    """(row, fault) of the flight in a text; its number and its cities must be of one row (B13)."""
    if "Flight Number: " not in text:
        return None, 'a flight needs "Flight Number: " and its number'
    number = text.split("Flight Number: ")[1].split(",")[0]
    flight = database.flight(number)
    if flight is None:
        return None, f"there is no flight {number:.40}"
    if (flight.origin, flight.destination) != route:
        return None, f"flight {number} goes from {flight.origin} to {flight.destination}"
    return flight, ""


def find_road(database, route):
    """(row, fault) of the road between two cities, which may take up to a day (B14)."""
    row = None if route[0] is None else database.distance(*route)
    if row is None or row.km is None or not row.duration:
        return None, f"no road is known from {route[0]!s:.40} to {route[1]!s:.40}"
    if "day" in row.duration:
        return None, f"the road from {row.origin} to {row.destination} takes more than a day"
    return row, ""


@lru_cache(maxsize=1 << 16)  # the plans of a group, and of a run, share many days
def read_fields(texts, database, official):
    """The fields of a Day from `ends` on. texts: the values of PLACES, in their order."""
    city, move, *named = texts
    home = city[:LONGEST] if isinstance(city, str) else None
    ends = (cut_state(home) if home and official else home,)
    if home and "from" in home:
        ends = from_to(home, official)
    if not move or move == "-":
        move = None
    ride = read_ride(move, home, database, official) if isinstance(move, str) else None
    parts = []
    for field, text in zip(TABLE_OF, named, strict=True):
        if isinstance(text, str):
            parts.append(read_venues(text, field, database, official) if text not in EMPTY else ())
        else:
            parts.append((Venue(field, text),) if text else ())
    breakfast, lunch, dinner, sights, bed = parts
    meals = breakfast + lunch + dinner
    return ends, move, ride, meals, sights, bed, meals + sights + bed


def read_trip(task, plan, database, rules):
    """The Trip of a plan; a sentence with the reason if the plan is not a list of dicts."""
    official, strict = rules == "official", rules == "strict"
    length = need(task, "days")
    if not isinstance(length, int):
        return "the task's days is not a whole number"
    if not isinstance(plan, (list, tuple)):
        return f"the plan is a {type(plan).__name__}, not a list of days"
    days = []
    for number, item in enumerate(plan[: max(length, 0)], 1):
        if not isinstance(item, dict):
            return f"day {number} is a {type(item).__name__}, not a table of fields"
        if strict and isinstance(item.get("attraction"), str):
            item = item | {"attraction": with_end(item["attraction"])}
        texts = tuple(map(item.get, PLACES))
        try:
            told = read_fields(texts, database, official)
        except TypeError:  # a list or a dict in a field cannot be a key of the cache
            told = read_fields.__wrapped__(texts, database, official)
        days.append(Day(number, item, texts[0], *told))
    more = sum(map(bool, plan[len(days):]))
    return Trip(task, database, official, strict, days, more)


def with_end(sights):
    """B15: the attractions of a day, in which the last one ends with ";" as all others do."""
    ended, mark, last = sights.rpartition(";")
    return f"{ended}{mark}{last.strip()};" if last.strip() not in EMPTY else sights


# ------------------------------------------------------------------------------------ commonsense
# Each check takes a Trip and returns None if it passes, else a reason that names day and field.


def is_not_absent(trip):
    """All days and fields are there, the number of cities is right, half of the fields are filled.
    In strict there are no other days and fields (B1, B11), and they hold texts (B6, B9)."""
    length, complete = trip.task["days"], 0
    if length < 1:
        return f"the task has {length} days"
    if trip.strict and trip.more:
        return f"the plan has {trip.more} days more than the task"
    for day in trip.days:
        if trip.official and day.item and "current_city" not in day.item:
            return f"day {day.number} has no current_city"
        told = day.item if trip.official else day.city  # B7, C7
        complete += bool(told) and day.city != NOT_NEEDED
    if complete != length:
        return f"{complete} of {length} days are filled in"
    counted = trip.official or "visiting_city_number" in trip.task
    if counted and (reason := wrong_cities(trip)):
        return reason
    for day in trip.days:
        if reason := trip.strict and odd_field(day) or empty_field(trip, day):
            return reason
    filled = len([value for day in trip.days for value in day.item.values()
                  if value and value != "-"])
    enough = filled >= 3 * length  # B11
    return None if enough else f"only {filled} of {6 * length} places are filled in"


def wrong_cities(trip):
    """B8: the trip must start at the origin and visit the number of cities asked for."""
    visited = set()
    for day in trip.days:
        if not isinstance(day.city, str):
            return f"day {day.number}: current_city is not text"
        if trip.official and day.ends[0] is None:  # C8
            return f'day {day.number}: current_city must say "from A to B"'
        if reason := wrong_start(trip, day):
            return reason
        visited.update(day.ends)
    visited.discard(need(trip.task, "org"))
    number = need(trip.task, "visiting_city_number")
    if len(visited) != number:
        return f"the trip visits {len(visited)} cities, not {number}"
    return None


def wrong_start(trip, day):
    """The reason if day 1 is a day of travel that does not start at the origin, or None."""
    if day.number != 1 or len(day.ends) != 2 or day.ends[0] == need(trip.task, "org"):
        return None
    return f"day 1: the trip starts at {day.ends[0]!s:.40}, not at {trip.task['org']}"


def odd_field(day):
    """The reason if a field is none of a day's, holds no text or another day's number, or None."""
    for key in {"day", "days"} & day.item.keys():
        if str(day.item[key]) != str(day.number):
            return f"day {day.number} says that it is day {day.item[key]!r:.20}"
    if more := day.item.keys() - {"day", "days", *PLACES}:
        return f"day {day.number} has {len(more)} fields more, like {min(map(str, more)):.40}"
    texts = (field for field in FIELDS if not isinstance(day.item[field], str))
    return next((f"day {day.number}: {field} is not text" for field in texts), None)


def empty_field(trip, day):
    """B9, B10: every day must have every field; "" and "-" are allowed only if nothing is needed.
    In strict so are blanks (B6)."""
    item = day.item
    if not isinstance(day.city, str):
        return f"day {day.number}: current_city is not text"
    for field in FIELDS:
        if field not in item:
            return f"day {day.number} has no {field}"
    if trip.strict:
        item = {field: item[field].strip() for field in FIELDS}
    at_rest = "from " not in day.city
    if item["transportation"] in EMPTY and (not at_rest or "to " in day.city):
        return f"day {day.number}: no transportation on a day of travel"
    if item["accommodation"] in EMPTY and day.number != trip.task["days"]:
        return f"day {day.number}: no accommodation for the night"
    if not at_rest:
        return None
    if item["attraction"] in EMPTY and not (trip.official and " to " in day.city):  # C7
        return f"day {day.number}: no attraction"
    for field in MEALS:
        if item[field] in EMPTY:
            return f"day {day.number}: no {field}"
    return None


def is_valid_information_in_sandbox(trip):
    """All that the plan names is in the database (B12 to B15); in strict by its whole name."""
    for day in trip.days:
        if trip.official and "transportation" not in day.item:  # C7
            return f"day {day.number} has no transportation"
        fault = wrong_ride(trip, day) if day.ride else day.move is not None and "is not text"
        if fault:
            return f"day {day.number}: transportation: {fault}"
        for venue in day.venues:
            if venue.name is None:
                return f"day {day.number}: {venue.field} is not text"
            if trip.strict and not venue.exact:
                return (f"day {day.number}: {venue.field}: {venue.text!r:.80} "
                        "is not the whole name and city of any")
            if not venue.rows:
                lost = f"{venue.name!r:.80} in {venue.city!r:.40}"
                return f"day {day.number}: {venue.field}: there is no {lost}"
    return None


def wrong_ride(trip, day):
    """Why a ride is not in the database, or None. In strict it must be exactly one of three forms,
    and a flight must be on the day's date. What stands behind the route is not read: the row
    counts, whatever is said of it (B5, B13, B14)."""
    ride, text, dates = day.ride, day.move.strip(), trip.task.get("date")
    if ride.fault or not trip.strict:
        return ride.fault
    form = RIDE.match(text)
    if not form or form.groups()[1:] != ride.route or not form[1].lower().startswith(ride.mode):
        return f"{text!r:.80} is no Flight Number: F.., Self-driving or Taxi, from A to B"
    if len({*NUMBER.findall(text)}) > 1 or len(FROM.findall(text)) > 1:
        return f"{text!r:.80} holds more than one ride"
    if ride.mode != "flight":
        return None
    if not isinstance(dates, list) or len(dates) < day.number:
        return f"the task gives no date for day {day.number}"
    flight, date = ride.row, dates[day.number - 1]
    if flight.date != date:
        return f"flight {flight.number} flies on {flight.date}, not on {date}"
    return None


def repeated(trip, part):
    """No text occurs twice among all meals, or among all sights (B16); in strict no row does."""
    seen = set()
    for day in trip.days:
        for venue in getattr(day, part):
            if venue.name is None:
                if part == "sights":
                    return f"day {day.number}: {venue.field} is not text"
                if isinstance(venue.text, (list, dict)):
                    continue  # the sandbox check reports it
            name = trip.strict and venue.exact or venue.text
            if name in seen:
                return f"day {day.number}: {venue.field} repeats {venue.text!r:.80}"
            seen.add(name)
    return None


def is_valid_accommodation(trip):
    """Each stay has the hotel's minimum nights, if exactly one row matches (B17); in strict, those
    of all rows."""
    stays = []  # [hotel, rows, first day, nights]
    for day in trip.days:
        if "accommodation" not in day.item:
            return f"day {day.number} has no accommodation"
        text, bed = day.item["accommodation"], day.bed
        if not isinstance(text, str) and (text or trip.official):  # C8
            return f"day {day.number}: accommodation is not text"
        rows = bed[0].exact if bed and trip.strict else bed[0].rows if bed else ()
        hotel = rows if trip.strict else text
        if stays and stays[-1][0] == hotel:
            stays[-1][3] += 1
        else:
            stays.append([hotel, rows, day.number, 1])
    for _, rows, first, nights in stays:
        for row in rows if trip.strict or len(rows) == 1 else ():
            if nights < row.minimum_nights:
                return (f"day {first}: accommodation: {row.name} asks for {row.minimum_nights:g} "
                        f"nights, the plan stays {nights}")
    return None


def is_reasonable_visiting_city(trip):
    """The trip is a round through known cities of the right state, one stay in each (B18). In
    strict it starts at the origin in any case (B8), and current_city says nothing else."""
    stops = []
    for day in trip.days:
        if day.ends[0] is None:
            return f'day {day.number}: current_city must be a city or "from A to B"'
        if reason := wrong_start(trip, day):
            return reason
        if trip.strict and day.city.strip() not in (day.ends[0], "from " + " to ".join(day.ends)):
            return f"day {day.number}: current_city says more than its cities: {day.city!r:.80}"
        stops += day.ends
    if len(stops) < 3 or stops[0] != stops[-1]:
        return "current_city: the trip does not come back to where it started"
    if trip.strict and stops[0] != need(trip.task, "org"):
        return f"day 1: the trip starts at {stops[0]}, not at {trip.task['org']}"
    return broken_round(stops) or strange_stop(trip, stops)


def broken_round(stops):
    """Why a city is visited twice or only passed, or None. A day of travel has two stops."""
    last, seen = len(stops) - 1, set()
    for i, city in enumerate(stops):
        if i and city == stops[i - 1]:
            continue
        if city in seen and i not in (0, last):
            return f"current_city: {city:.40} is visited twice"
        if 0 < i < last and city != stops[i + 1]:
            return f"current_city: the trip only passes through {city:.40}"
        seen.add(city)
    return None


def strange_stop(trip, stops):
    """The reason if a stop is an unknown city or, in more than three days, in another state; in
    strict also if a trip of three days does not visit dest."""
    cities = trip.database.cities
    long = trip.task["days"] > 3
    dest = need(trip.task, "dest") if long or not trip.official else None  # C12
    for city in stops:
        if city not in cities:
            return f"current_city: {city!r:.40} is not a city of the sandbox"
    for city in stops[1:-1] if long else ():
        if cities[city] != dest:
            return f"current_city: {city} is not in {dest}"
    to_city = isinstance(dest, str) and dest in cities  # else a state
    for city in stops[1:-1] if trip.strict and not long else ():
        if dest != (city if to_city else cities[city]):
            return f"current_city: the trip goes to {city}, not to {dest}"
    return None


def is_valid_transportation(trip):
    """Day 1 has transportation, and self-driving is not mixed with flights or taxis (B19)."""
    if trip.days and trip.days[0].move is None:
        return "day 1: no transportation"
    modes = set()
    for day in trip.days:
        if day.ride is not None:
            modes.add(day.ride.mode)
        elif day.move is not None:
            return f"day {day.number}: transportation is not text"
    if "self-driving" in modes and len(modes - {""}) > 1:
        return f"transportation: {' and '.join(sorted(modes - {''}))} do not go together"
    return None


def is_valid_information_in_current_city(trip):
    """Every filled field names a city of its day (B20); in strict it is there, and each ride goes
    between the cities of its day at a time that leaves room for the meals."""
    reasons = ((day, out_of_town(trip, day)) for day in trip.days)
    return next((f"day {day.number}: {reason}" for day, reason in reasons if reason), None)


def out_of_town(trip, day):
    """The reason of the first field of a day that names no city of the day, or None."""
    cities, move, venues = day.ends, day.item.get("transportation", "-"), day.venues
    if not isinstance(day.city, str):
        return "there is no current_city"
    if trip.official:
        cities = cities if len(cities) == 2 else tuple(cities[0])  # C5: the letters of the name
        move = day.move or "-"  # C6
    elif cities[0] is None and move == "-" and not venues:
        return None
    if None in cities or not cities and venues:
        return 'current_city must be a city or "from A to B"'
    if not isinstance(move, str):
        return "transportation is not text"
    for city in cities if move != "-" else ():
        if city not in move:
            return f"transportation does not name {city:.40}"
    if trip.strict and day.ride and len(cities) < 2:
        return f"transportation leaves {cities[0]:.40} on a day at rest"
    if trip.strict and day.ride and day.ride.route != cities:
        return f"transportation does not go from {' to '.join(cities):.80}"
    for venue in venues:
        if venue.name is None:
            return f"{venue.field} is not text"
        told = [venue.city] if trip.strict else venue.text
        if cities[-1] in told:
            continue
        if venue.field == "accommodation" or not any(city in told for city in cities):
            return f"{venue.field} is not in {' or '.join(day.ends):.80}"
    for venue in day.meals if trip.strict and day.ride and day.ride.row else ():
        if reason := untimely(day.ride.row, venue.field, venue.city == cities[-1]):
            return reason
    return None


def untimely(row, field, arriving):
    """The reason if a meal is at a time of the day's ride, or None. row: of the flight or the road.
    arriving: the meal is in the city of arrival. On a road one may set out at any time from 05:00,
    so it only binds breakfast and lunch on arrival."""
    latest, earliest = HOURS[field]
    if isinstance(row, Flight):
        leaves, lands = row.departure, row.arrival
    elif arriving and field != "dinner":
        took = dict(map(reversed, TIME_UNIT.findall(row.duration)))
        leaves, lands = "05:00", f"{5 + int(took.get('hour', 0)):02}:{int(took.get('min', 0)):02}"
    else:
        return None
    if arriving and (lands > latest or lands < leaves):
        return f"{field} comes before the arrival at {lands}"
    if not arriving and leaves < earliest:
        return f"{field} comes after the departure at {leaves}"
    return None


# ------------------------------------------------------------------------------------------- hard
# Only plans that pass GATE reach these checks, so every filled field is text and every name has a
# row. wanted: the value of the task's constraint.


def rows_of(trip, venue):
    """The rows that a hard check reads: the first match (B4); in strict, all of that name."""
    return venue.exact if trip.strict else venue.rows[:1]


def nights_of(trip):
    """(day number, row) of every night."""
    return [(day.number, row) for day in trip.days for venue in day.bed
            for row in rows_of(trip, venue)]


def valid_cuisine(trip, wanted):
    """Every wanted cuisine is served at a meal outside of the origin (B21)."""
    names = wanted if isinstance(wanted, (str, list, tuple, dict)) else [wanted]
    if not all(isinstance(cuisine, str) for cuisine in names):
        return "the task's cuisine is not a list of names"
    if trip.official and len(set(wanted)) < len(wanted):  # C10: the official code gives no verdict
        return "the task's cuisine names one twice"
    missing, org = list(wanted), need(trip.task, "org")
    for day in trip.days:
        for venue in day.meals:
            if venue.city == org and trip.official:  # C10: the rest of the day does not count
                break
            if venue.city != org:
                served = [row.cuisines for row in rows_of(trip, venue)]
                missing = [cuisine for cuisine in missing
                           if not all(cuisine in cuisines for cuisines in served)]
    return f"meals: none serves {missing[0]}" if missing else None


def has_rule(wish, row):
    """Whether a hotel has a house rule against the wish (B23)."""
    rule = wish.get("house rule")
    return rule in HOUSE_RULES and f"No {rule}" in row.house_rules


def has_other_room(wish, row):
    """Whether a hotel's rooms are of another kind than the wish; an unknown one fits all (B22)."""
    room = wish.get("room type")
    if room == "not shared room":
        return row.room_type == "Shared room"
    return isinstance(room, str) and row.room_type != ROOM_TYPES.get(room, row.room_type)


def valid_room_rule(trip, wanted):
    """No hotel has a house rule against the wish."""
    for number, row in nights_of(trip):
        if has_rule({"house rule": wanted}, row):
            return f"day {number}: accommodation: {row.name} has the rule No {wanted}"
    return None


def valid_room_type(trip, wanted):
    """Every hotel has the wanted kind of room."""
    for number, row in nights_of(trip):
        if has_other_room({"room type": wanted}, row):
            return (f"day {number}: accommodation: {row.name} is a {row.room_type}, "
                    f"not the {wanted} asked for")
    return None


def valid_transportation(trip, wanted):
    """No day uses the forbidden transportation (B24)."""
    for day in trip.days:
        breaks = day.ride.breaks if day.ride else ()
        if wanted in breaks:
            return f"day {day.number}: transportation breaks {wanted!r}"
    return None


def valid_cost(trip, _):
    """The plan's cost is within the budget (B25); of several rows of a name the dearest counts."""
    people, budget = need(trip.task, "people_number"), need(trip.task, "budget")
    if not isinstance(people, (int, float)) or not isinstance(budget, (int, float)):
        return "the task's people_number and budget must be numbers"
    total = 0
    for day in trip.days:
        if day.ride is not None:
            total += day.ride.cost * math.ceil(people / day.ride.seats)
        for venue in day.meals:
            total += people * max([row.cost for row in rows_of(trip, venue)])
        for venue in day.bed:
            total += max([row.price * math.ceil(people / (row.maximum_occupancy or 1))
                          for row in rows_of(trip, venue)])
    return f"the plan costs ${total:g}, the budget is ${budget:g}" if total > budget else None


# ------------------------------------------------------------------------------------------ score

COMMONSENSE = {
    "is_not_absent": is_not_absent,
    "is_valid_information_in_sandbox": is_valid_information_in_sandbox,
    "is_valid_information_in_current_city": is_valid_information_in_current_city,
    "is_reasonable_visiting_city": is_reasonable_visiting_city,
    "is_valid_restaurants": partial(repeated, part="meals"),
    "is_valid_attractions": partial(repeated, part="sights"),
    "is_valid_transportation": is_valid_transportation,
    "is_valid_accommodation": is_valid_accommodation,
}
GATE = ("is_not_absent", "is_valid_information_in_sandbox")  # plans must pass these before HARD
HARD = {  # name: (key of local_constraint, check)
    "valid_cost": (None, valid_cost),
    "valid_room_rule": ("house rule", valid_room_rule),
    "valid_room_type": ("room type", valid_room_type),
    "valid_cuisine": ("cuisine", valid_cuisine),
    "valid_transportation": ("transportation", valid_transportation),
}
RULES = ("star", "official", "strict")


def score(task, plan, database, rules="star"):
    """The score of a plan: the five SCORES in [0, 1], and "checks": {name: [verdict, reason]}.

    A verdict is True, False, or None if the check does not apply ("no such wish") or was not
    reached; the reason is a text or None. rules: one of RULES, else ValueError. No plan makes this
    raise; a task that lacks a key raises Mistake.
    """
    if rules not in RULES:
        raise ValueError(f"rules is {rules!r}; it must be one of {', '.join(RULES)}")
    asked, checks = asked_of(task), {name: [None, None] for name in COMMONSENSE}
    checks |= {name: [None, None if name in asked else "no such wish"] for name in HARD}
    passes = ("star", "strict") if rules == "strict" else (rules,)
    trips = [read_trip(task, plan, database, each) if plan else None for each in passes]
    if not isinstance(trips[0], Trip):  # no plan (B26), or a sentence about it
        found = [trips[0] and False, trips[0] or "no plan"]
        return summary(checks | dict.fromkeys(COMMONSENSE, found))
    for name, check in COMMONSENSE.items():
        checks[name] = outcome(check, trips)
    if checks[GATE[0]][0] and checks[GATE[1]][0]:
        judge_hard(trips, checks)
    return summary(checks)


def outcome(check, trips, *wanted):
    """[True, None] if a check passes on all Trips, else [False, the first reason on one line]."""
    for trip in trips:
        if reason := check(trip, *wanted):
            return [False, " ".join(reason.split())]
    return [True, None]


def judge_hard(trips, checks):
    """Fill in the hard checks that apply."""
    trip = trips[0]
    asked = literal(trip.task.get("local_constraint", {}))  # B27
    if trip.official:
        need(trip.task, "local_constraint")
    for name, (key, check) in HARD.items():
        if key and not isinstance(asked, dict):
            checks[name] = [False, "the task's local_constraint is not a table of constraints"]
            continue
        if key and trip.official and key not in asked:  # C9
            raise Mistake(f"the task {trip.task.get('id', '')!r} has no {key!r} "
                          "in its local_constraint")
        wanted = asked.get(key) if key else "the budget"
        if not wanted and (wanted is None or key == "cuisine" or not trip.official):  # C9
            continue
        checks[name] = outcome(check, trips, wanted)


def summary(checks):
    """The five scores of checks (B26): micro is the share that passed, the others are 0 or 1."""
    common = [checks[name][0] for name in COMMONSENSE]
    hard = [checks[name][0] for name in HARD]
    right, asked = hard.count(True), len(hard) - hard.count(None)
    cs_macro, hard_macro = all(common), asked == right > 0
    return {
        "cs_micro": common.count(True) / len(common),
        "cs_macro": float(cs_macro),
        "hard_micro": right / asked if asked else 0.0,
        "hard_macro": float(hard_macro),
        "success": float(cs_macro and hard_macro),
        "checks": checks,
    }


def asked_of(task):
    """The names of the hard checks that apply to a task: the budget, and one per wish."""
    wishes = literal(task.get("local_constraint"))
    wishes = wishes if isinstance(wishes, dict) else {}
    return [name for name, (key, _) in HARD.items() if not key or wishes.get(key)]


def hard_counts(task, checks):
    """(met, asked): how many of a task's hard constraints a plan meets; those that were not reached
    are not met. The paper's hard micro is sum(met) / sum(asked) over plans."""
    asked = asked_of(task)
    return sum(checks[name][0] is True for name in asked), len(asked)


def reward(score, kind):
    """The reward for a score [STAR, section 3]: "sum" adds all five SCORES, 0 to 5; "macro" adds
    the three that are 0 or 1, 0 to 3; "success" is 0 or 1."""
    names = {"sum": SCORES, "macro": ("cs_macro", "hard_macro", "success"), "success": ("success",)}
    return sum(score[name] for name in names[kind])


def judge(task, answer, database, reader=None):
    """(plan, score) of an itinerary in text; without a plan in it all scores are 0.

    The score is star's; it also has "official" and "strict", the success by the other rule sets.
    reader: a format_plan.Reader; default: the reader by rules. If it asks an LLM, the score also
    has "formatter failed" and "formatter tokens".
    """
    plan, unread, share, *costs = (reader.read if reader else read_plan)(answer, task, database)
    verdict = score(task, plan, database) | {"unread": unread, "answer lines not read": share}
    verdict |= costs[0] if costs else {}
    for rules in ("official", "strict"):
        verdict[rules] = score(task, plan, database, rules)["success"]
    return plan, verdict
