"""Judge plans: the 13 constraints of TravelPlanner under three rule sets, the score and the reward.
"""
import ast
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from format_plan import parse_plan

MEALS = ("breakfast", "lunch", "dinner")
VENUES = (*MEALS, "attraction", "accommodation")
FIELDS = ("transportation", *VENUES)
PLACES = ("current_city", *FIELDS)
EMPTY = ("", "-")
NOT_NEEDED = "You don't need to fill in the information for this or later days."
HOUSE_RULES = ("smoking", "parties", "children under 10", "visitors", "pets")
ROOM_TYPES = {"shared room": "Shared room", "private room": "Private room", "entire room": "Entire home/apt"}
SCORES = ("cs_micro", "cs_macro", "hard_micro", "hard_macro", "success")
LONGEST = 2000  # characters: a longer field is searched for "from .. to" only so far, and is not kept in a memo

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


# ------------------------------------------------------------------------------------------------------------- reading
# What the fields of a plan say: pure functions of text and database, each with a bounded memo, because the plans of a
# group and of a run repeat the same few thousand field texts. The records have slots because score reads them hundreds
# of times a plan: with NamedTuples it is a tenth slower.

# B2: from\s+(.+?)\s+to\s+([^,]+), written so that its time stays linear in a run of spaces
FROM_TO = re.compile(r"from\s++(\S(?:.*?\S)??)\s++to\s+([^,]+)")
STATE = re.compile(r"(.*?)\([^)]*\)")
OFFICIAL_MODES = (("taxi", "taxi"), ("self-driving", "driving"), ("flight", "flight"))  # C2, the first that occurs
OFFICIAL_KINDS = (("flight number", "flight"), ("self-driving", "driving"), ("taxi", "taxi"))  # C3


@dataclass(slots=True)
class Venue:
    """What a meal, attraction or hotel text names."""

    name: str
    city: str
    rows: tuple  # of that city, whose name contains that name (B4)
    exact: tuple  # of that city, whose name is that name, case and outer spaces aside (strict)


@dataclass(slots=True)
class Ride:
    """What a transportation text is taken for, what it costs, and what is wrong with it."""

    mode: str  # "flight", "taxi", "driving", or "" for none of them (official only)
    breaks: tuple  # the transportation constraints it breaks
    route: tuple  # (origin, destination), or (None, None)
    flight: object  # its row, or None
    car: int  # dollars for every five people
    taxi: int  # dollars for every four people
    fault: str  # why the sandbox does not know it, or ""


@dataclass(slots=True)
class Day:
    """One examined day. "Filled" is B6: neither falsy nor exactly "-"."""

    number: int  # from 1
    item: dict  # the day as the agent wrote it
    city: object  # current_city, a str if all is well
    ends: tuple  # (from, to) on a day of travel, (None, None) if that cannot be read, else (city,)
    move: object  # the transportation if filled, else None
    ride: object  # its Ride; None where move is None or no text
    meals: tuple  # of (field, text, Venue), one for each filled meal; Venue is None where the field is no text
    sights: tuple  # the same for each attraction that is looked at (B15)
    bed: tuple  # the same for the hotel, if any


@dataclass(slots=True)
class Trip:
    """A plan made ready for the checks."""

    task: dict
    database: object
    official: bool
    strict: bool  # a name is a row's whole name, and all rows of that name count
    days: list  # of Day: the first task["days"] of the plan (B1)


@lru_cache(maxsize=8)
def memo(database, official):
    """What texts say, for one database and reading: {current_city: ends}, {(transportation, current_city): Ride} and
    for each of VENUES {text: what read_names found}."""
    return {}, {}, {field: {} for field in VENUES}


def keep(found, text, value):
    """Put into a memo that stays small: no text longer than any real field, and a full memo starts anew."""
    if len(text[0] if isinstance(text, tuple) else text) <= LONGEST:
        if len(found) >= 1 << 16:
            found.clear()
        found[text] = value
    return value


def cut_state(city):
    """C1: "City(State)" is "City"; "City (State)" is "City " with a space at its end, which no table holds."""
    found = STATE.match(city[:LONGEST])
    return found[1] if found else city


def from_to(text, official):
    """(origin, destination) of the first "from .. to ..", or (None, None)."""
    found = FROM_TO.search(text[:LONGEST])
    if not found:
        return None, None
    return tuple(map(cut_state, found.groups())) if official else found.groups()


def read_ends(text, official):
    """The cities of a current_city text: both ends where it says "from", else itself."""
    if "from" in text:
        return from_to(text, official)
    return (cut_state(text) if official else text,)


def read_venue(database, text, field, official):
    """The Venue of a text: split at the last comma, the name no further back than its line (B3)."""
    comma, name, city = text.rfind(","), "-", "-"
    if comma not in (-1, len(text) - 1):
        name, city = text[text.rfind("\n", 0, comma) + 1 : comma].strip(), text[comma + 1 :].strip()
        city = cut_state(city).strip() if official else city
    table = {"attraction": database.attractions, "accommodation": database.hotels}.get(field, database.restaurants)
    rows, whole = table(city), text[: max(comma, 0)].strip().casefold()
    exact = tuple(row for row in rows if row.name.strip().casefold() == whole)
    return Venue(name, city, tuple(row for row in rows if name in row.name), exact)


def read_names(database, text, field, official):
    """((field, text, Venue), ...) of the venues that a field names: any number of attractions, else one."""
    texts = text.split(";")[:-1] if field == "attraction" else [text]  # B15
    return tuple([(field, text, read_venue(database, text, field, official)) for text in texts])


def read_ride(database, text, city, official):
    """The Ride of a transportation text; where the text names no cities, current_city does (B12)."""
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
        breaks = {"flight": ("no flight",), "driving": ("no self-driving",)}.get(mode, ())
    if kind == "flight":
        flight, fault = find_flight(database, text, route)
        return Ride(mode, breaks, route, flight, 0, 0, fault)
    km, fault = find_road(database, route) if kind else (0, "")
    car, taxi = int(km * 0.05) * (kind == "driving"), int(km) * (kind == "taxi")
    return Ride(mode, breaks, route, None, car, taxi, fault)


def find_flight(database, text, route):
    """(row, fault) of the flight that a text names: number, origin and destination must be one row (B13)."""
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


def read_day(number, item, database, official, known):
    """One item of a plan as a Day; known: the memo."""
    cities, rides, names = known
    city, move, ride, parts = item.get("current_city"), item.get("transportation"), None, []
    home = city[:LONGEST] if isinstance(city, str) else None
    if not move or move == "-":
        move = None
    elif isinstance(move, str):
        ride = rides.get((move, home)) or keep(rides, (move, home), read_ride(database, move, home, official))
    for field, texts in names.items():
        value, found = item.get(field), ()
        if value and value != "-":
            found = texts.get(value) if isinstance(value, str) else ((field, value, None),)
            if found is None:
                found = keep(texts, value, read_names(database, value, field, official))
        parts.append(found)
    breakfast, lunch, dinner, sights, bed = parts
    ends = (None,) if home is None else cities.get(home) or keep(cities, home, read_ends(home, official))
    return Day(number, item, city, ends, move, ride, breakfast + lunch + dinner, sights, bed)


def read_trip(task, plan, database, official):
    """The Trip, or a sentence where the task's days, the plan or a day of it is not of the form it must have."""
    length = need(task, "days")
    if not isinstance(length, int):
        return "the task's days is not a whole number"
    if not isinstance(plan, (list, tuple)):
        return f"the plan is a {type(plan).__name__}, not a list of days"
    items = plan[: max(length, 0)]
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            return f"day {number} is a {type(item).__name__}, not a table of fields"
    known = memo(database, official)
    days = [read_day(number, item, database, official, known) for number, item in enumerate(items, 1)]
    return Trip(task, database, official, False, days)


# --------------------------------------------------------------------------------------------------------- commonsense
# Each check takes a Trip and returns what is wrong, as a sentence that names day and field, or None when it passes.


def is_not_absent(trip):
    """All days are there, all fields on them, the right number of cities, and at least half of the places filled in."""
    length, complete = trip.task["days"], 0
    if length < 1:
        return f"the task has {length} days"
    for day in trip.days:
        if trip.official and day.item and "current_city" not in day.item:
            return f"day {day.number} has no current_city"
        complete += bool(day.item if trip.official else day.city) and day.city != NOT_NEEDED  # B7, C7
    if complete != length:
        return f"{complete} of {length} days are filled in"
    reason = wrong_cities(trip) if trip.official or "visiting_city_number" in trip.task else None
    for day in trip.days:
        reason = reason or empty_field(trip, day, day.item)
    if reason:
        return reason
    filled = sum([1 for day in trip.days for value in day.item.values() if value and value != "-"])
    return f"only {filled} of {6 * length} places are filled in" if filled < 3 * length else None  # B11


def wrong_cities(trip):
    """B8: the trip starts at the origin and visits as many cities as were asked for."""
    visited = set()
    for day in trip.days:
        if not isinstance(day.city, str):
            return f"day {day.number}: current_city is not text"
        if trip.official and day.ends[0] is None:  # C8
            return f'day {day.number}: current_city must say "from A to B"'
        if day.number == 1 and len(day.ends) == 2 and day.ends[0] != need(trip.task, "org"):
            return f"day 1: the trip starts at {day.ends[0]!s:.40}, not at {trip.task['org']}"
        visited.update(day.ends)
    visited.discard(need(trip.task, "org"))
    number = need(trip.task, "visiting_city_number")
    return None if len(visited) == number else f"the trip visits {len(visited)} cities, not {number}"


def empty_field(trip, day, item):
    """B9, B10: every field is a key of every day, and is "" or "-" only where nothing is called for."""
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
            return f"day {day.number}: transportation: {day.ride.fault if day.ride else 'is not text'}"
        for field, _, venue in day.meals + day.sights + day.bed:
            if venue is None:
                return f"day {day.number}: {field} is not text"
            if not venue.rows:
                return f"day {day.number}: {field}: there is no {venue.name!r:.80} in {venue.city!r:.40}"
    return None


def is_valid_restaurants(trip):
    """No meal text twice (B16)."""
    return repeated(trip, "meals")


def is_valid_attractions(trip):
    """No attraction text twice (B16)."""
    return repeated(trip, "sights")


def repeated(trip, part):
    """The first meal or attraction whose text stood there before, or None."""
    seen = set()
    for day in trip.days:
        for field, text, venue in getattr(day, part):
            if venue is None and part == "sights":
                return f"day {day.number}: {field} is not text"
            if isinstance(text, (list, dict)):
                continue  # met by the sandbox check
            if text in seen:
                return f"day {day.number}: {field} repeats {text!r:.80}"
            seen.add(text)
    return None


def is_valid_accommodation(trip):
    """A hotel's minimum nights are stayed, which is only looked at where exactly one row matches (B17)."""
    stays = []  # [text, rows, first day, nights]
    for day in trip.days:
        if "accommodation" not in day.item:
            return f"day {day.number} has no accommodation"
        text = day.item["accommodation"]
        if not isinstance(text, str) and (text or trip.official):  # C8
            return f"day {day.number}: accommodation is not text"
        if stays and stays[-1][0] == text:
            stays[-1][3] += 1
        else:
            stays.append([text, day.bed[0][2].rows if day.bed else (), day.number, 1])
    for _, rows, first, nights in stays:
        if len(rows) == 1 and nights < rows[0].minimum_nights:
            return short_stay(first, rows[0], nights)
    return None


def short_stay(first, row, nights):
    """The sentence about a hotel that is left too early."""
    return f"day {first}: accommodation: {row.name} asks for {row.minimum_nights:g} nights, the plan stays {nights}"


def is_reasonable_visiting_city(trip):
    """A closed round of known cities, each visited in one stay, in the state asked for (B18)."""
    stops = []
    for day in trip.days:
        if day.ends[0] is None:
            return f'day {day.number}: current_city must be a city or "from A to B"'
        if day.number == 1 and len(day.ends) == 2 and day.ends[0] != need(trip.task, "org"):
            return f"day 1: the trip starts at {day.ends[0]:.40}, not at {trip.task['org']}"
        stops += day.ends
    if len(stops) < 3 or stops[0] != stops[-1]:
        return "current_city: the trip does not come back to where it started"
    return broken_round(stops) or strange_stop(trip, stops)


def broken_round(stops):
    """Why the cities of a trip are not one stay each, or None. Both ends of a travel day count as stops."""
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
    """A stop that is no known city, or lies outside the state of a trip of more than three days; or None."""
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
        if day.ride is not None:
            modes.add(day.ride.mode)
        elif day.move is not None:
            return f"day {day.number}: transportation is not text"
    if "driving" in modes and ("flight" in modes or "taxi" in modes):
        return f"transportation: {' and '.join(sorted(modes - {''}))} do not go together"
    return None


def is_valid_information_in_current_city(trip):
    """Every field names a city of its day (B20)."""
    for day in trip.days:
        reason = out_of_town(trip, day)
        if reason:
            return f"day {day.number}: {reason}"
    return None


def out_of_town(trip, day):
    """The first field of the day that does not name a city of the day, or None."""
    cities, move, venues = day.ends, day.item.get("transportation", "-"), day.meals + day.sights + day.bed
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
    for field, text, venue in venues:
        if venue is None:
            return f"{field} is not text"
        if last not in text and (field == "accommodation" or not any([city in text for city in cities])):
            return f"{field} is not in {' or '.join(day.ends):.80}"
    return None


# ---------------------------------------------------------------------------------------------------------------- hard
# Reached only by plans that pass GATE, so every filled field is text and every name has a row. wanted: what was asked.


def rows_of(trip, venue):
    """The rows that must satisfy a hard check: the first match (B4); for strict all of exactly that name."""
    return venue.exact if trip.strict else venue.rows[:1]


def valid_cuisine(trip, wanted):
    """Every cuisine asked for is served at some meal away from home (B21)."""
    if not isinstance(wanted, (str, list, tuple, dict)) or not all(isinstance(cuisine, str) for cuisine in wanted):
        return "the task's cuisine is not a list of names"
    if trip.official and len(set(wanted)) < len(wanted):  # C10: the leaderboard's code has no verdict here
        return "the task's cuisine names one twice"
    missing, org = list(wanted), need(trip.task, "org")
    for day in trip.days:
        for _, _, venue in day.meals:
            if venue.city == org and trip.official:  # C10: the rest of the day is not looked at
                break
            if missing and venue.city != org:
                rows = rows_of(trip, venue)
                missing = [cuisine for cuisine in missing if any([cuisine not in row.cuisines for row in rows])]
    return f"meals: none serves {missing[0]}" if missing else None


def hotels(trip):
    """(day number, row) of every night."""
    return [(day.number, row) for day in trip.days for _, _, venue in day.bed for row in rows_of(trip, venue)]


def valid_room_rule(trip, wanted):
    """No hotel forbids what was asked for (B23)."""
    for number, row in hotels(trip):
        if wanted in HOUSE_RULES and f"No {wanted}" in row.house_rules:
            return f"day {number}: accommodation: {row.name} has the rule No {wanted}"
    return None


def valid_room_type(trip, wanted):
    """Every hotel has the kind of room asked for; an unknown kind passes (B22)."""
    for number, row in hotels(trip):
        kind = ROOM_TYPES.get(wanted, row.room_type) if isinstance(wanted, str) else row.room_type
        if row.room_type != kind or (wanted == "not shared room" and row.room_type == "Shared room"):
            return f"day {number}: accommodation: {row.name} is a {row.room_type}, not the {wanted} asked for"
    return None


def valid_transportation(trip, wanted):
    """No day travels in the way that was ruled out (B24)."""
    for day in trip.days:
        breaks = day.ride.breaks if day.ride else ()
        if trip.strict and day.ride and "driving" in day.move.lower():  # "Self-driving, cheaper than a taxi" is no taxi
            breaks += ("no self-driving",)
        if wanted in breaks:
            return f"day {day.number}: transportation breaks {wanted!r}"
    return None


def valid_cost(trip, _):
    """Everything together stays within the budget (B25); of several rows of a name the dearest counts (strict)."""
    people, budget = need(trip.task, "people_number"), need(trip.task, "budget")
    if not isinstance(people, (int, float)) or not isinstance(budget, (int, float)):
        return "the task's people_number and budget must be numbers"
    total, cars, taxis = 0, math.ceil(people / 5), math.ceil(people / 4)
    for day in trip.days:
        if day.ride is not None:
            seat = day.ride.flight.price if day.ride.flight else 0
            total += seat * people + day.ride.car * cars + day.ride.taxi * taxis
        for _, _, venue in day.meals:
            rows = rows_of(trip, venue)
            total += people * (rows[0].cost if len(rows) == 1 else max([row.cost for row in rows]))
        for _, _, venue in day.bed:
            rooms = [row.price * math.ceil(people / (row.maximum_occupancy or 1)) for row in rows_of(trip, venue)]
            total += max(rooms)
    return f"the plan costs ${total:g}, the budget is ${budget:g}" if total > budget else None


# -------------------------------------------------------------------------------------------------------------- strict
# What strict asks of a check that star has passed, of the Trip that strict_trip gives.


def strict_trip(trip):
    """The plan as strict reads it: with the attraction after the last semicolon (B15), without what is no text."""
    days, known = [], memo(trip.database, False)[2]["attraction"]
    for day in trip.days:
        sights, last = day.item.get("attraction"), ""
        if isinstance(sights, str):
            last = sights.rpartition(";")[2].strip()
        if last not in EMPTY:
            last += ";"
            more = known.get(last) or keep(known, last, read_names(trip.database, last, "attraction", False))
            day = replace(day, sights=day.sights + more)
        if any([venue is None for _, _, venue in day.meals + day.sights + day.bed]):
            parts = [tuple(named for named in part if named[2]) for part in (day.meals, day.sights, day.bed)]
            day = replace(day, meals=parts[0], sights=parts[1], bed=parts[2])
        days.append(day)
    return replace(trip, strict=True, days=days)


def strict_absent(trip):
    """Fields are strings, and a blank one is an empty one (B6, B9)."""
    for day in trip.days:
        for field in FIELDS:
            if not isinstance(day.item[field], str):
                return f"day {day.number}: {field} is not text"
        reason = empty_field(trip, day, {field: day.item[field].strip() for field in FIELDS})
        if reason:
            return reason
    return None


def strict_sandbox(trip):
    """Names are whole names of rows (B4), and flights fly on the day, at the times that are given (B13)."""
    for day in trip.days:
        reason = wrong_flight(trip, day)
        if reason:
            return f"day {day.number}: transportation: {reason}"
        for field, text, venue in day.meals + day.sights + day.bed:
            if not venue.exact:
                return f"day {day.number}: {field}: {text!r:.80} is not the whole name and city of any"
    return None


def wrong_flight(trip, day):
    """Why the day's flight does not fly on its date or at its stated times, or None."""
    flight, dates = day.ride and day.ride.flight, trip.task.get("date")
    if flight is None:
        return None
    if not isinstance(dates, list) or len(dates) < day.number:
        return f"the task gives no date for day {day.number}"
    if flight.date != dates[day.number - 1]:
        return f"flight {flight.number} flies on {flight.date}, not on {dates[day.number - 1]}"
    for word, time in (("Departure Time", flight.departure), ("Arrival Time", flight.arrival)):
        stated = re.search(word + r":\s*(\d?\d:\d\d)", day.move[:LONGEST])
        if stated and stated[1].zfill(5) != time:
            return f"the {word.lower()} of flight {flight.number} is {time}, not {stated[1]}"
    return None


def strict_restaurants(trip, part="meals"):
    """No restaurant twice, however its name is spelled (B16)."""
    seen = set()
    for day in trip.days:
        for field, _, venue in getattr(day, part):
            if venue.exact and venue.exact in seen:
                return f"day {day.number}: {field} repeats {venue.exact[0].name}"
            seen.add(venue.exact)
    return None


def strict_attractions(trip):
    """No attraction twice, however its name is spelled (B16)."""
    return strict_restaurants(trip, "sights")


def strict_accommodation(trip):
    """The minimum nights of every row that has the name; a short name does not dodge them (B17)."""
    first = 1
    for rows, run in groupby([day.bed[0][2].exact if day.bed else () for day in trip.days]):
        nights = len(list(run))
        for row in rows:
            if nights < row.minimum_nights:
                return short_stay(first, row, nights)
        first += nights
    return None


def strict_city(trip):
    """The trip starts at home, however day 1 is written (B8), and a short one goes to dest too (B18)."""
    stops, cities = [city for day in trip.days for city in day.ends], trip.database.cities
    org, dest = need(trip.task, "org"), need(trip.task, "dest")
    if stops[0] != org:
        return f"day 1: the trip starts at {stops[0]}, not at {org}"
    to_city = trip.task["days"] <= 3 and isinstance(dest, str) and dest in cities  # else dest is a state
    for city in stops[1:-1]:
        if dest != (city if to_city else cities[city]):
            return f"current_city: the trip goes to {city}, not to {dest}"
    return None


def strict_current_city(trip):
    """Venues lie in a city of the day and the ride follows current_city, instead of merely naming it (B20)."""
    for day in trip.days:
        if day.ride and len(day.ends) == 2 and day.ride.route != day.ends:
            return f"day {day.number}: transportation does not go from {' to '.join(day.ends):.80}"
        for field, _, venue in day.meals + day.sights + day.bed:
            if venue.city not in (day.ends[-1:] if field == "accommodation" else day.ends):
                return f"day {day.number}: {field} is not in {' or '.join(day.ends):.80}"
    return None


# --------------------------------------------------------------------------------------------------------------- score

COMMONSENSE = {
    "is_not_absent": is_not_absent,
    "is_valid_information_in_sandbox": is_valid_information_in_sandbox,
    "is_valid_information_in_current_city": is_valid_information_in_current_city,
    "is_reasonable_visiting_city": is_reasonable_visiting_city,
    "is_valid_restaurants": is_valid_restaurants,
    "is_valid_attractions": is_valid_attractions,
    "is_valid_transportation": is_valid_transportation,
    "is_valid_accommodation": is_valid_accommodation,
}
GATE = ("is_not_absent", "is_valid_information_in_sandbox")  # the hard checks are reached through these two
HARD = {  # name: (key of local_constraint, check)
    "valid_cost": (None, valid_cost),
    "valid_room_rule": ("house rule", valid_room_rule),
    "valid_room_type": ("room type", valid_room_type),
    "valid_cuisine": ("cuisine", valid_cuisine),
    "valid_transportation": ("transportation", valid_transportation),
}
STRICT = {  # commonsense checks that strict looks at again; hard ones are run a second time over the exact rows
    "is_not_absent": strict_absent,
    "is_valid_information_in_sandbox": strict_sandbox,
    "is_valid_information_in_current_city": strict_current_city,
    "is_reasonable_visiting_city": strict_city,
    "is_valid_restaurants": strict_restaurants,
    "is_valid_attractions": strict_attractions,
    "is_valid_accommodation": strict_accommodation,
}
RULES = ("star", "official", "strict")
read_constraint = lru_cache(maxsize=4096)(literal)


def score(task, plan, database, rules="star"):
    """The verdict on a plan: five scores in [0, 1] and "checks": {name: [True | False | None, reason or None]}.

    None: the check does not apply, or was not reached. Never raises on a plan; KeyError for a key the task lacks.
    """
    if rules not in RULES:
        raise ValueError(f"rules is {rules!r}; it must be one of {', '.join(RULES)}")
    trip = read_trip(task, plan, database, rules == "official") if plan else None
    if not isinstance(trip, Trip):
        return summary({name: [trip and False, trip] for name in COMMONSENSE} | {name: [None, None] for name in HARD})
    strict, checks = strict_trip(trip) if rules == "strict" else None, {}
    for name, check in COMMONSENSE.items():
        reason = check(trip)
        if strict and reason is None and name in STRICT:
            reason = STRICT[name](strict)
        checks[name] = [True, None] if reason is None else failure(reason)
    checks |= {name: [None, None] for name in HARD}
    if checks[GATE[0]][0] and checks[GATE[1]][0]:
        judge_hard(trip, strict, checks)
    return summary(checks)


def failure(reason):
    """[False, reason on one line]; names in the tables may hold line breaks."""
    return [False, " ".join(reason.split())]


def judge_hard(trip, strict, checks):
    """Fill in the hard checks that apply; trip and strict are the same plan, strict None for the other rule sets."""
    asked = trip.task.get("local_constraint", {}) if not trip.official else need(trip.task, "local_constraint")
    asked = read_constraint(asked) if isinstance(asked, str) else asked  # B27
    for name, (key, check) in HARD.items():
        if key and not isinstance(asked, dict):
            checks[name] = [False, "the task's local_constraint is not a table of constraints"]
            continue
        if key and trip.official and key not in asked:  # C9
            raise KeyError(f"the task {trip.task.get('id', '')!r} has no {key!r} in its local_constraint")
        wanted = asked.get(key) if key else None
        applies = wanted is not None if trip.official and key != "cuisine" else wanted  # C9
        if applies or not key:
            reason = check(trip, wanted) or (check(strict, wanted) if strict else None)
            checks[name] = [True, None] if reason is None else failure(reason)


def summary(checks):
    """The five scores of a set of checks (B26): micro is the share that passed, the others are all or nothing."""
    common, hard = [checks[name][0] for name in COMMONSENSE], [checks[name][0] for name in HARD]
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
    """ "sum" 0..5: all five scores | "macro" 0..3: the all-or-nothing ones | "success" 0..1 (paper section 3)."""
    names = {"sum": SCORES, "macro": ("cs_macro", "hard_macro", "success"), "success": ("success",)}
    if kind not in names:
        raise ValueError(f"reward kind is {kind!r}; it must be one of {', '.join(names)}")
    return sum(score[name] for name in names[kind])


def judge(task, answer, database, rules="star"):
    """(plan, score) of an itinerary text; no answer, or no plan in it, scores zero."""
    plan = parse_plan(answer, task, database) if answer is not None else None
    return plan, score(task, plan, database, rules)
