"""
Judge plans: TravelPlanner's thirteen constraints under three rule sets, the score, the reward.

    (1) read    each field of a plan's days, as text, into the rows of the database that it names
    (2) check   eight commonsense constraints, then up to five hard ones, which are reached only by
                plans that are complete and name nothing that the database does not hold
    (3) score   shares of what passed; reward makes one number of them

Rule sets. `star` is what the STAR release rewards and the base of everything here. `official` is
the TravelPlanner leaderboard's own code, which differs at C1 to C12. `strict` is star and then
STRICT on top: what star passes is looked at once more for the holes that RL learns to use, so
strict never passes what star fails. docs/rules.md says what the marks B1 to B33 and C1 to C12 are.

Where the references raise on a malformed plan, the check that met the malformed value is False with
a reason. A key that the task itself lacks is the caller's error: KeyError, naming the key.
"""
import ast
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from format_plan import MEALS, MODE, OTHER_MODE, TABLE_OF, pattern, read_plan

FIELDS = ("transportation", *TABLE_OF)
PLACES = ("current_city", *FIELDS)
EMPTY = ("", "-")
NOT_NEEDED = "You don't need to fill in the information for this or later days."
HOUSE_RULES = ("smoking", "parties", "children under 10", "visitors", "pets")
ROOM_TYPES = {"entire room": "Entire home/apt", "private room": "Private room",
              "shared room": "Shared room"}
SCORES = ("cs_micro", "cs_macro", "hard_micro", "hard_macro", "success")
LONGEST = 2000  # characters: "from .. to" is looked for only so far


def need(task, key):
    """task[key], or a KeyError that says whose fault it is."""
    if key not in task:
        raise KeyError(f"the task {task.get('id', '')!r} has no {key!r}: every task needs it")
    return task[key]


def literal(text):
    """The Python literal in a string, never evaluated; the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def check_task(task, database=None):
    """ValueError if no plan can be right for a task: by its people, budget, cities or wishes."""
    people, budget, number = (need(task, key) for key in
                              ("people_number", "budget", "visiting_city_number"))
    if type(people) is not int or people < 1:
        raise ValueError(f"'people_number' is {people!r:.60}; it must be a whole number from 1")
    if type(budget) not in (int, float) or not 0 < budget < math.inf:
        raise ValueError(f"'budget' is {budget!r:.60}; it must be a number of dollars above 0")
    if type(number) is not int or not 0 < number < max(2, need(task, "days")):
        raise ValueError(f"'visiting_city_number' is {number!r:.60}; a trip of {task['days']} days "
                         f"visits 1 to {max(1, task['days'] - 1)} cities")
    wishes = task.get("local_constraint") or {}
    for key, known in (("house rule", HOUSE_RULES), ("room type", (*ROOM_TYPES, "not shared room")),
                       ("transportation", (*FORBIDDEN.values(),))):
        if wishes.get(key) and wishes[key] not in known:
            raise ValueError(f"{key!r} is {wishes[key]!r:.60}; it must be null or one of "
                             f"{', '.join(known)}")
    if database is not None:
        check_places(task, database)


def check_places(task, database):
    """ValueError if a trip cannot go to the task's destination."""
    org, dest, number = (need(task, key) for key in ("org", "dest", "visiting_city_number"))
    if org not in database.cities:
        raise ValueError(f"'org' is {org!r:.60}, which is no city of the tables")
    inside = [city for city, state in database.cities.items() if state == dest and city != org]
    if dest == org or not inside and dest not in database.cities:
        raise ValueError(f"'dest' is {dest!r:.60}, which is no other city or state of the tables")
    if task["days"] > 3 and len(inside) < number:
        raise ValueError(f"'dest' is {dest!r:.60}: {len(inside)} cities, not {number} to visit")


# ---------------------------------------------------------------------------------------- reading
# What the fields of a plan say. The records have slots because score reads them hundreds of times a
# plan: with NamedTuples it is a tenth slower.

# B2: from\s+(.+?)\s+to\s+([^,]+), in two parts, so that its time stays linear
FROM, TO = re.compile(r"from\s++(?=\S)"), re.compile(r"(?<!\s)\s++to\s+([^,]+)")
# C2 and C3: the first of these words that occurs
OFFICIAL_MODES = (("taxi", "taxi"), ("self-driving", "driving"), ("flight", "flight"))
OFFICIAL_KINDS = (("flight number", "flight"), ("self-driving", "driving"), ("taxi", "taxi"))
FORBIDDEN = {"flight": "no flight", "driving": "no self-driving"}  # by which wish
KNOWN_RIDE = re.compile(r"(?:flight|taxi|self-driving)\b", re.I)  # strict's
NUMBER = re.compile(r"\bF\d{3,9}\b")
# strict's, for meals on a day of travel: the latest arrival before one in the city of arrival, the
# earliest departure after one in the city that is left
HOURS = {"breakfast": ("11:00", "05:00"), "lunch": ("15:30", "11:00"),
         "dinner": ("23:00", "16:30")}
CLOCK = re.compile(r"\b(\d?\d):(\d\d)\s*(?:([ap])\.?m\b)?", re.I)
LABEL = re.compile(r"\b(?:(depart|leav)|arriv|land(?:s|ing)?\b)", re.I)
AMOUNT = re.compile(r"(\d[\d,]*(?:\.\d+)?)\s*(h|:|mi(?!n))?", re.I)
DETAILS = {  # of a ride, as it states them: "45 min break" is no duration of it
    "duration": pattern(r"""\b((?:\d days?,? )?\d{1,2}(?:\.\d)? ?(?:hours?|hrs?|h)(?![a-z])
        (?:,? and)? ?(?:\d{1,2} ?(?:min\w{0,4}|m)\b)?|\d{1,3} ?min\w{0,4})
        (?= ?(?:(?:by )?(?:car|driv\w{1,3}|ride|flight|trip)\b ?)?(?:$|[,;.)|]))"""),
    "distance": pattern(r"\b(\d[\d,]{0,8}(?:\.\d{1,9})? ?(?:km|kilometers|miles|mi)\b)"),
    "cost": pattern(r"""(?:\$ ?|cost:? ?(?:(?:of|is|about) )?~?)(\d[\d,]{0,8}(?:\.\d{1,9})?)
        (?:,? ?/? ?(?:(?P<share>per person|person|each|pp\b|a head)|
        (?P<both>round|return|both ways)))?""")}
UNITS = {"h": 60, ":": 60, "mi": 1.609}  # minutes of an hour, kilometres of a mile


@dataclass(slots=True)
class Venue:
    """What a meal, attraction or hotel text names."""

    field: str
    text: object  # as written; a str if all is well
    name: str = None  # None where the field is no text
    city: str = None
    rows: tuple = ()  # of that city, whose name contains that name (B4)
    exact: tuple = ()  # of that city, whose name is that name, case and outer spaces aside (strict)


@dataclass(slots=True)
class Ride:
    """What a transportation text is taken for, what it costs, and what is wrong with it."""

    mode: str  # "flight", "taxi", "driving", or "" for none of them (official only)
    breaks: tuple  # the transportation constraints it breaks; None is none
    route: tuple  # (origin, destination), or (None, None)
    fault: str  # why the sandbox does not know it, or ""
    flight: object = None  # its row
    car: int = 0  # dollars for every five people
    taxi: int = 0  # dollars for every four people


@dataclass(slots=True)
class Day:
    """One examined day. "Filled" is neither falsy nor exactly "-" (B6)."""

    number: int  # from 1
    item: dict  # the day as the agent wrote it
    city: object  # current_city, a str if all is well
    ends: tuple  # (from, to) on a day of travel, (None, None) if that cannot be read, else (city,)
    move: object  # the transportation if filled, else None
    ride: object  # its Ride; None where move is None or no text
    meals: tuple  # of Venue, one for each filled meal
    sights: tuple  # of Venue, one for each attraction that is looked at (B15)
    bed: tuple  # of the hotel's Venue, if there is one
    venues: tuple  # all of these


@dataclass(slots=True)
class Trip:
    """A plan made ready for the checks."""

    task: dict
    database: object
    official: bool
    strict: bool  # a name is a row's whole name, and all rows of that name count
    days: list  # of Day: the first task["days"] of the plan (B1)
    more: int  # days behind those that are not empty


def cut_state(city):
    """C1: "City(State)" is "City", and "City (State)" is "City ", which no table holds."""
    name, bracket, rest = city[:LONGEST].partition("(")
    return name if bracket and ")" in rest and "\n" not in name else city


def find_way(text, at=0):
    """(origin, destination, end) of the first "from .. to .." of a text, or None."""
    to = None
    for start in FROM.finditer(text, at):
        if to is None or to.start() < start.end():
            to = TO.search(text, start.end())
        if to is None:
            break
        if text.find("\n", start.end(), to.start()) < 0:
            return text[start.end():to.start()], to[1], to.end()
    return None


def from_to(text, official):
    """(origin, destination) of the first "from .. to ..", or (None, None)."""
    found = find_way(text[:LONGEST])
    if not found:
        return None, None
    return tuple(map(cut_state, found[:2])) if official else found[:2]


def read_venue(text, field, database, official):
    """The Venue of a text: split at the last comma, the name no further back than its line (B3)."""
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
    """The Venues in a field: any number of attractions, each ended by ";" (B15), else one."""
    texts = text.split(";")[:-1] if field == "attraction" else [text]
    return tuple([read_venue(part, field, database, official) for part in texts])


def read_ride(text, city, database, official):
    """The Ride of a transportation text; if it names no cities, current_city does (B12)."""
    route = from_to(text, official)
    if route[0] is None and city is not None:
        route = from_to(city, official)
    low = text.lower()
    if official:  # C2, C3, C4: one text, three readings
        mode = next((mode for word, mode in OFFICIAL_MODES if word in low), "")
        kind = next((kind for word, kind in OFFICIAL_KINDS if word in low), "")
        breaks = tuple(f"no {word.lower()}" for word in ("Flight", "Self-driving") if word in text)
    else:  # B5
        mode = kind = "flight" if "flight" in low else "taxi" if "taxi" in low else "driving"
        breaks = (FORBIDDEN.get(mode),)
    if kind == "flight":
        flight, fault = find_flight(database, text, route)
        return Ride(mode, breaks, route, fault, flight)
    km, fault = find_road(database, route) if kind else (0, "")
    car = int(km * 0.05) if kind == "driving" else 0
    return Ride(mode, breaks, route, fault, None, car, int(km) if kind == "taxi" else 0)


def find_flight(database, text, route):
    """(row, fault) of the flight in a text: number, origin and destination are one row's (B13)."""
    if "Flight Number: " not in text:
        return None, 'a flight needs "Flight Number: " and its number'
    number = text.split("Flight Number: ")[1].split(",")[0]
    flight = database.flight(number)
    if flight is None:
        return None, f"there is no flight {number:.40}"
    if (flight.origin, flight.destination) != route:
        return flight, f"flight {number} goes from {flight.origin} to {flight.destination}"
    return flight, ""


def find_road(database, route):
    """(kilometres, fault) between two cities; a road of more than a day is no way to go (B14)."""
    row = None if route[0] is None else database.distance(*route)
    if row is None or row.km is None or not row.duration:
        return 0, f"no road is known from {route[0]!s:.40} to {route[1]!s:.40}"
    if "day" in row.duration:
        return 0, f"the road from {row.origin} to {row.destination} takes more than a day"
    return row.km, ""


@lru_cache(maxsize=1 << 16)  # the plans of a group and of a run have many days in common
def read_fields(texts, database, official):
    """The texts of PLACES, in this order -> what a Day says of them, from `ends` on."""
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


def read_trip(task, plan, database, official):
    """The Trip, or a sentence where days, plan or a day are not of the form they must have."""
    length = need(task, "days")
    if not isinstance(length, int):
        return "the task's days is not a whole number"
    if not isinstance(plan, (list, tuple)):
        return f"the plan is a {type(plan).__name__}, not a list of days"
    days = []
    for number, item in enumerate(plan[: max(length, 0)], 1):
        if not isinstance(item, dict):
            return f"day {number} is a {type(item).__name__}, not a table of fields"
        texts = tuple(map(item.get, PLACES))
        try:
            told = read_fields(texts, database, official)
        except TypeError:  # a field that is a list or a table cannot be remembered
            told = read_fields.__wrapped__(texts, database, official)
        days.append(Day(number, item, texts[0], *told))
    more = sum(map(bool, plan[len(days):]))
    return Trip(task, database, official, False, days, more)


# ------------------------------------------------------------------------------------ commonsense
# Each check takes a Trip and returns what is wrong, a sentence that names day and field, or None.


def is_not_absent(trip):
    """All days and fields are there, the right number of cities, at least half of the places."""
    length, complete = trip.task["days"], 0
    if length < 1:
        return f"the task has {length} days"
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
        if reason := empty_field(trip, day, day.item):
            return reason
    filled = len([value for day in trip.days for value in day.item.values()
                  if value and value != "-"])
    enough = filled >= 3 * length  # B11
    return None if enough else f"only {filled} of {6 * length} places are filled in"


def wrong_cities(trip):
    """B8: the trip starts at the origin and visits as many cities as were asked for."""
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
    """Why a day 1 of travel does not leave from the origin, or None."""
    if day.number != 1 or len(day.ends) != 2 or day.ends[0] == need(trip.task, "org"):
        return None
    return f"day 1: the trip starts at {day.ends[0]!s:.40}, not at {trip.task['org']}"


def empty_field(trip, day, item):
    """B9, B10: every day has every field; "" and "-" stand only where nothing is called for."""
    if not isinstance(day.city, str):
        return f"day {day.number}: current_city is not text"
    for field in FIELDS:
        if field not in item:
            return f"day {day.number} has no {field}"
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
    """Everything named is in the database (B12 to B15)."""
    for day in trip.days:
        if trip.official and "transportation" not in day.item:  # C7
            return f"day {day.number} has no transportation"
        if day.move is not None and (day.ride is None or day.ride.fault):
            fault = day.ride.fault if day.ride else "is not text"
            return f"day {day.number}: transportation: {fault}"
        for venue in day.venues:
            if venue.name is None:
                return f"day {day.number}: {venue.field} is not text"
            if not venue.rows:
                lost = f"{venue.name!r:.80} in {venue.city!r:.40}"
                return f"day {day.number}: {venue.field}: there is no {lost}"
    return None


def repeated(trip, part):
    """No text of the days' meals, or of their sights, twice (B16); in strict no row of theirs."""
    seen = set()
    for day in trip.days:
        for venue in getattr(day, part):
            if venue.name is None:
                if part == "sights":
                    return f"day {day.number}: {venue.field} is not text"
                if isinstance(venue.text, (list, dict)):
                    continue  # met by the sandbox check
            name = trip.strict and venue.exact or venue.text
            if name in seen:
                return f"day {day.number}: {venue.field} repeats {venue.text!r:.80}"
            seen.add(name)
    return None


def is_valid_accommodation(trip):
    """Minimum nights are stayed, where exactly one row matches (B17); in strict those of all."""
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
    """A closed round of known cities, each visited in one stay, in the state asked for (B18)."""
    stops = []
    for day in trip.days:
        if day.ends[0] is None:
            return f'day {day.number}: current_city must be a city or "from A to B"'
        if reason := wrong_start(trip, day):
            return reason
        stops += day.ends
    if len(stops) < 3 or stops[0] != stops[-1]:
        return "current_city: the trip does not come back to where it started"
    return broken_round(stops) or strange_stop(trip, stops)


def broken_round(stops):
    """Why the cities of a trip are not one stay each, or None. A travel day has two stops."""
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
    """A stop that is no known city, or on more than three days outside of the state; or None."""
    cities = trip.database.cities
    long = trip.task["days"] > 3
    dest = need(trip.task, "dest") if long or not trip.official else None  # C12
    for city in stops:
        if city not in cities:
            return f"current_city: {city!r:.40} is not a city of the sandbox"
    for city in stops[1:-1] if long else ():
        if cities[city] != dest:
            return f"current_city: {city} is not in {dest}"
    return None


def is_valid_transportation(trip):
    """There is a way out on the first day, and no car is left behind or found on the way (B19)."""
    if trip.days and trip.days[0].move is None:
        return "day 1: no transportation"
    modes = set()
    for day in trip.days:
        if day.ride is not None and trip.strict:
            modes |= stated(day.move)[0]  # all that the text names
        elif day.ride is not None:
            modes.add(day.ride.mode)
        elif day.move is not None:
            return f"day {day.number}: transportation is not text"
    if "driving" in modes and ("flight" in modes or "taxi" in modes):
        return f"transportation: {' and '.join(sorted(modes - {''}))} do not go together"
    return None


def is_valid_information_in_current_city(trip):
    """Every field names a city of its day (B20)."""
    reasons = ((day, out_of_town(trip, day)) for day in trip.days)
    return next((f"day {day.number}: {reason}" for day, reason in reasons if reason), None)


def out_of_town(trip, day):
    """The first field of the day that does not name a city of the day, or None."""
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
    last = cities[-1] if cities else ""
    for venue in venues:
        if venue.name is None:
            return f"{venue.field} is not text"
        if last in venue.text:
            continue
        if venue.field == "accommodation" or not any(city in venue.text for city in cities):
            return f"{venue.field} is not in {' or '.join(day.ends):.80}"
    return None


# ------------------------------------------------------------------------------------------- hard
# Reached only by plans that pass GATE, so every filled field is text and every name has a row.
# wanted: what the query asks for.


def rows_of(trip, venue):
    """The rows that must satisfy a hard check: the first match (B4); in strict all of that name."""
    return venue.exact if trip.strict else venue.rows[:1]


def nights_of(trip):
    """(day number, row) of every night."""
    return [(day.number, row) for day in trip.days for venue in day.bed
            for row in rows_of(trip, venue)]


def valid_cuisine(trip, wanted):
    """Every cuisine asked for is served at some meal away from home (B21)."""
    names = wanted if isinstance(wanted, (str, list, tuple, dict)) else [wanted]
    if not all(isinstance(cuisine, str) for cuisine in names):
        return "the task's cuisine is not a list of names"
    if trip.official and len(set(wanted)) < len(wanted):  # C10: the official code has no verdict
        return "the task's cuisine names one twice"
    missing, org = list(wanted), need(trip.task, "org")
    for day in trip.days:
        for venue in day.meals:
            if venue.city == org and trip.official:  # C10: the rest of the day is not looked at
                break
            if venue.city != org:
                served = [row.cuisines for row in rows_of(trip, venue)]
                missing = [cuisine for cuisine in missing
                           if not all(cuisine in cuisines for cuisines in served)]
    return f"meals: none serves {missing[0]}" if missing else None


def valid_room_rule(trip, wanted):
    """No hotel forbids what was asked for (B23)."""
    for number, row in nights_of(trip):
        if wanted in HOUSE_RULES and f"No {wanted}" in row.house_rules:
            return f"day {number}: accommodation: {row.name} has the rule No {wanted}"
    return None


def valid_room_type(trip, wanted):
    """Every hotel has the kind of room asked for; an unknown kind passes (B22)."""
    kind = ROOM_TYPES.get(wanted) if isinstance(wanted, str) else None
    for number, row in nights_of(trip):
        shared = wanted == "not shared room" and row.room_type == "Shared room"
        if shared or kind and row.room_type != kind:
            return (f"day {number}: accommodation: {row.name} is a {row.room_type}, "
                    f"not the {wanted} asked for")
    return None


def valid_transportation(trip, wanted):
    """No day travels in the way that was ruled out (B24)."""
    for day in trip.days:
        breaks = day.ride.breaks if day.ride else ()
        if trip.strict and day.ride:
            breaks = [FORBIDDEN.get(mode) for mode in stated(day.move)[0]]
        if wanted in breaks:
            return f"day {day.number}: transportation breaks {wanted!r}"
    return None


def valid_cost(trip, _):
    """Everything stays within the budget (B25); of several rows of a name the dearest counts."""
    people, budget = need(trip.task, "people_number"), need(trip.task, "budget")
    if not isinstance(people, (int, float)) or not isinstance(budget, (int, float)):
        return "the task's people_number and budget must be numbers"
    total, cars, taxis = 0, math.ceil(people / 5), math.ceil(people / 4)
    for day in trip.days:
        if day.ride is not None:
            seat = day.ride.flight.price if day.ride.flight else 0
            total += seat * people + day.ride.car * cars + day.ride.taxi * taxis
        for venue in day.meals:
            total += people * max([row.cost for row in rows_of(trip, venue)])
        for venue in day.bed:
            total += max([row.price * math.ceil(people / (row.maximum_occupancy or 1))
                          for row in rows_of(trip, venue)])
    return f"the plan costs ${total:g}, the budget is ${budget:g}" if total > budget else None


# ----------------------------------------------------------------------------------------- strict
# What strict asks of a check that star has passed, of the Trip that strict_trip gives.


def strict_trip(trip):
    """The plan as strict reads it: with the attraction after the last ";" (B15), all of it text."""
    days = []
    for day in trip.days:
        sights, more = day.item.get("attraction"), ()
        last = sights.rpartition(";")[2].strip() if isinstance(sights, str) else ""
        if last not in EMPTY:
            more = read_venues(last + ";", "attraction", trip.database, False)
        if more or None in [venue.name for venue in day.venues]:
            meals, sights, bed = (tuple(venue for venue in part if venue.name is not None)
                                  for part in (day.meals, day.sights + more, day.bed))
            day = replace(day, meals=meals, sights=sights, bed=bed, venues=meals + sights + bed)
        days.append(day)
    return replace(trip, strict=True, days=days)


def strict_absent(trip):
    """The plan has the task's days and their fields, no others; fields are strings, and a blank one
    is an empty one (B1, B6, B9, B11)."""
    if trip.more:
        return f"the plan has {trip.more} days more than the task"
    for day in trip.days:
        number = day.item.get("day", day.item.get("days", day.number))
        if number not in (day.number, str(day.number)):
            return f"day {day.number} says that it is day {number!r:.20}"
        if more := day.item.keys() - {"day", "days", *PLACES}:
            return f"day {day.number} has {len(more)} fields more, like {min(map(str, more)):.40}"
        for field in FIELDS:
            if not isinstance(day.item[field], str):
                return f"day {day.number}: {field} is not text"
        if reason := empty_field(trip, day, {field: day.item[field].strip() for field in FIELDS}):
            return reason
    return None


def strict_sandbox(trip):
    """Names are whole names of rows (B4), rides are rides and as their rows say (B5, B13, B14)."""
    for day in trip.days:
        if day.ride and (reason := wrong_ride(trip, day)):
            return f"day {day.number}: transportation: {reason}"
        for venue in day.venues:
            if not venue.exact:
                return (f"day {day.number}: {venue.field}: {venue.text!r:.80} "
                        "is not the whole name and city of any")
    return None


@lru_cache(maxsize=1 << 16)
def stated(move):
    """What a ride's text says: (the modes it names, [(detail, its amount or clock time)])."""
    text, details, end = move[:LONGEST], [], 0
    modes = {word.lastgroup for word in MODE.finditer(text)}
    for clock in CLOCK.finditer(text):
        labels = LABEL.findall(text, end, clock.start())
        late, end = not labels[-1] if labels else bool(details), clock.end()
        hour = int(clock[1]) % 12 + 12 * (clock[3] in "pP") if clock[3] else int(clock[1])
        details.append(("arrival" if late else "departure", f"{hour:02d}:{clock[2]}"))
    for word, detail in DETAILS.items():
        for found in detail.finditer(text):
            kind = "" if found.lastgroup is None else f", {found.lastgroup}"
            details.append((word + kind, amount(found[1])))
    return modes, details


@lru_cache(maxsize=1 << 16)
def amount(text):
    """The minutes, kilometres or dollars that a text comes to."""
    return sum(float(number.replace(",", "")) * UNITS.get(unit.lower(), 1)
               for number, unit in AMOUNT.findall(text))


def wrong_ride(trip, day):
    """Why a ride is unknown, more than one, flies on another date or is not as it states (5% off),
    or None."""
    ride, dates, people = day.ride, trip.task.get("date"), trip.task.get("people_number")
    flight, heads = ride.flight, people if isinstance(people, int) and people > 0 else 1
    text = day.move[:LONGEST]
    if not KNOWN_RIDE.match(text.strip()):
        return f"{text!r:.40} does not begin with Flight, Taxi or Self-driving"
    first = find_way(text)
    if len({*NUMBER.findall(text)}) > 1 or first and find_way(text, first[2]):
        return f"{text!r:.80} holds more than one ride"
    for city in filter(None, ride.route):
        text = text.replace(city, "")  # "from Walker to Bus Stop" says nothing of a bus
    if other := OTHER_MODE.search(text):
        return f"{other[0]} is no ride"
    if flight is None:
        row, cost = trip.database.distance(*ride.route), ride.car or ride.taxi
        costs = [cost, cost * math.ceil(heads / (5 if ride.car else 4))]
        true = {"duration": [amount(row.duration)], "distance": [row.km], "cost": costs,
                "cost, share": [*costs, *(each / heads for each in costs)],
                "cost, both": [2 * each for each in costs]}
    elif not isinstance(dates, list) or len(dates) < day.number:
        return f"the task gives no date for day {day.number}"
    elif flight.date != dates[day.number - 1]:
        return f"flight {flight.number} flies on {flight.date}, not on {dates[day.number - 1]}"
    else:
        true = {"departure": [flight.departure], "arrival": [flight.arrival],
                "cost": [flight.price, flight.price * heads], "cost, share": [flight.price]}
    for word, said in stated(day.move)[1]:
        if said not in true.get(word, [said]) and (isinstance(said, str) or not any(
                abs(said - value) <= max(1, value / 20) for value in true[word])):
            return f"the {word} is {true[word][0]}, not {said}"
    return None


def strict_city(trip):
    """The trip starts at home, however day 1 reads (B8), and a short one goes to dest too (B18)."""
    for day in trip.days:
        if day.city.strip() not in (day.ends[0], f"from {day.ends[0]} to {day.ends[-1]}"):
            return f"day {day.number}: current_city says more than its cities: {day.city!r:.80}"
    stops, cities = [city for day in trip.days for city in day.ends], trip.database.cities
    org, dest = need(trip.task, "org"), need(trip.task, "dest")
    if stops[0] != org:
        return f"day 1: the trip starts at {stops[0]}, not at {org}"
    to_city = trip.task["days"] <= 3 and isinstance(dest, str) and dest in cities  # else a state
    for city in stops[1:-1]:
        if dest != (city if to_city else cities[city]):
            return f"current_city: the trip goes to {city}, not to {dest}"
    return None


def strict_current_city(trip):
    """Venues lie in a city of the day, and the ride follows current_city (B20)."""
    for day in trip.days:
        if day.ride and len(day.ends) < 2:
            return f"day {day.number}: transportation leaves {day.ends[0]:.40} on a day at rest"
        if day.ride and day.ride.route != day.ends:
            return f"day {day.number}: transportation does not go from {' to '.join(day.ends):.80}"
        for venue in day.venues:
            if venue.city not in (day.ends[-1:] if venue.field == "accommodation" else day.ends):
                return f"day {day.number}: {venue.field} is not in {' or '.join(day.ends):.80}"
        for venue in day.meals if day.ride else ():
            if reason := untimely(day.move, venue.field, venue.city == day.ends[-1]):
                return f"day {day.number}: {reason}"
    return None


def untimely(move, field, arriving):
    """Why a meal does not fit the times that the ride of its day states, or None. arriving: it is
    in the city of arrival, not in the one that is left."""
    said = dict(reversed(stated(move)[1]))
    leaves, lands = said.get("departure", "00:00"), said.get("arrival", "")
    latest, earliest = HOURS[field]
    if arriving and lands and (lands > latest or lands < leaves):
        return f"{field} comes before the arrival at {lands}"
    if not arriving and "departure" in said and leaves < earliest:
        return f"{field} comes after the departure at {leaves}"
    return None


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
GATE = ("is_not_absent", "is_valid_information_in_sandbox")  # the hard checks lie behind these
HARD = {  # name: (key of local_constraint, check)
    "valid_cost": (None, valid_cost),
    "valid_room_rule": ("house rule", valid_room_rule),
    "valid_room_type": ("room type", valid_room_type),
    "valid_cuisine": ("cuisine", valid_cuisine),
    "valid_transportation": ("transportation", valid_transportation),
}
STRICT = {  # what strict looks at again; all other checks are run again over its own Trip
    "is_not_absent": strict_absent,
    "is_valid_information_in_sandbox": strict_sandbox,
    "is_valid_information_in_current_city": strict_current_city,
    "is_reasonable_visiting_city": strict_city,
}
RULES = ("star", "official", "strict")


def score(task, plan, database, rules="star"):
    """The verdict on a plan: five scores in [0, 1] and "checks": {name: [verdict, reason or None]}.

    A verdict is True, False, or None where the check does not apply or was not reached. Never
    raises on a plan; KeyError for a key that the task lacks.
    """
    if rules not in RULES:
        raise ValueError(f"rules is {rules!r}; it must be one of {', '.join(RULES)}")
    checks = {name: [None, None] for name in (*COMMONSENSE, *HARD)}
    trip = read_trip(task, plan, database, rules == "official") if plan else None
    if not isinstance(trip, Trip):  # no plan (B26), or a sentence about it
        return summary(checks | {name: [trip and False, trip] for name in COMMONSENSE})
    strict = strict_trip(trip) if rules == "strict" else None
    for name, check in COMMONSENSE.items():
        again = STRICT.get(name, check)
        checks[name] = outcome(check(trip) or strict and again(strict))
    if checks[GATE[0]][0] and checks[GATE[1]][0]:
        judge_hard(trip, strict, checks)
    return summary(checks)


def outcome(reason):
    """[True, None], or [False, reason on one line]; names in the tables may hold line breaks."""
    return [False, " ".join(reason.split())] if reason else [True, None]


def judge_hard(trip, strict, checks):
    """Fill in the hard checks that apply. strict: the Trip as strict reads it, or None."""
    asked = trip.task.get("local_constraint", {})
    if trip.official:
        need(trip.task, "local_constraint")
    if isinstance(asked, str):  # B27
        asked = literal(asked)
    for name, (key, check) in HARD.items():
        if key and not isinstance(asked, dict):
            checks[name] = [False, "the task's local_constraint is not a table of constraints"]
            continue
        if key and trip.official and key not in asked:  # C9
            raise KeyError(f"the task {trip.task.get('id', '')!r} has no {key!r} "
                           "in its local_constraint")
        wanted = asked.get(key) if key else "the budget"
        if not wanted and (wanted is None or key == "cuisine" or not trip.official):  # C9
            continue
        checks[name] = outcome(check(trip, wanted) or strict and check(strict, wanted))


def summary(checks):
    """The five scores of a set of checks (B26): micro is a share, the others are all or nothing."""
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


def reward(score, kind):
    """A score as a number [STAR, section 3]: "sum" of all five parts, 0 to 5; "macro" of the three
    that are all or nothing, 0 to 3; "success", 0 or 1."""
    names = {"sum": SCORES, "macro": ("cs_macro", "hard_macro", "success"), "success": ("success",)}
    if kind not in names:
        raise ValueError(f"reward kind is {kind!r}; it must be one of {', '.join(names)}")
    return sum(score[name] for name in names[kind])


def judge(task, answer, database, reader=None):
    """(plan, score) of an itinerary text; no answer, or no plan in it, scores zero.

    The score is star's, with "official" and "strict" beside it: success by the other two rule sets.
    reader: a format_plan.Reader; without one the rules read. If it asks an LLM, the score has
    "formatter failed" and "formatter tokens", too.
    """
    plan, unread, share, *costs = (reader.read if reader else read_plan)(answer, task, database)
    verdict = score(task, plan, database) | {"unread": unread, "answer lines not read": share}
    verdict |= costs[0] if costs else {}
    for rules in ("official", "strict"):
        verdict[rules] = score(task, plan, database, rules)["success"]
    return plan, verdict
