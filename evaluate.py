"""Judge plans and measure agents: the constraints, the score, the reward, the play loop and the report.

What comes in: tasks (jsonl), a database folder, and an agent: a checkpoint folder in vLLM, an OpenAI-compatible
endpoint, or synth.py's solver. What goes out, per agent: episodes.jsonl, scores.json, and one table side by side.

(1) play     every task through sandbox.Episode, tokens in, tokens out, no barrier between turns
(2) judge    itinerary text -> plan (format_plan.parse_plan) -> 8 commonsense + 5 hard checks -> five scores
(3) report   success under three rule sets, by level, by constraint, with bootstrap intervals over tasks; pass@k;
             and of any run's folder a page to look at it (report.html)

Rule sets. `star` is what the STAR release rewards and the base of everything here. `official` is the TravelPlanner
leaderboard's own code; it differs at the places marked C1 to C12. `strict` is star and then STRICT on top: each check
that star passes is looked at once more for the holes that RL learns to use, so strict never passes what star fails.
The marks B1 to B33 and C1 to C12 number the recorded behaviours that tests/test_evaluate.py holds us to.

Where the references raise on a malformed plan, the check that met the malformed value is False with a reason.
A key that the task itself lacks is the caller's error: KeyError, naming the key.
"""

import argparse
import ast
import base64
import csv
import gzip
import json
import math
import os
import random
import re
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count, groupby, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from format_plan import ChatError, chat, parse_plan
from sandbox import SHORT_PROMPT, SYSTEM_PROMPT, Episode, Sandbox, open_database, parse

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


# ------------------------------------------------------------------------------------------------------------- records


def read_jsonl(path):
    """The records of a jsonl file, blank lines skipped. Errors name the file and the line."""
    return [row for _, row in scan(path)]


def scan(path, growing=False, **options):
    """(offset, record) of each line; growing: a last line without its end is still being written and is left out."""
    offset = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and not (growing and not line.endswith(b"\n")):
                try:
                    yield offset, json.loads(line, **options)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error}); mend or delete the line") from None
            offset += len(line)


def write_jsonl(path, rows):
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", errors="replace") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(temporary, path)


def append_jsonl(path, row):
    """Add one record and flush it, so that a killed run keeps every episode that ended."""
    with open(path, "a", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


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


def load_task(raw):
    """A published record (TravelPlanner's or STAR's) as our task; errors name the key and what it holds."""
    if not isinstance(raw, dict):
        raise ValueError(f"a task is a table of keys, not a {type(raw).__name__}")
    task = {key: value for key, value in raw.items() if key not in ("reference_information", "annotated_plan")}
    for key in ("date", "days", "people_number", "budget", "visiting_city_number", "constraint", "local_constraint"):
        if isinstance(task.get(key), str):
            task[key] = literal(task[key])
    asked = task.pop("constraint", None) or task.get("local_constraint") or {}
    name = task.get("id", task.get("idx", "?"))
    if not isinstance(asked, dict):
        raise ValueError(f"task {name}: 'local_constraint' must be a table of four constraints, not {asked!r:.60}")
    rule = asked.get("house rule", asked.get("room rule"))
    task["local_constraint"] = {"house rule": rule} | {
        key: asked.get(key) for key in ("cuisine", "room type", "transportation")
    }
    kinds = {"org": str, "dest": str, "date": list, "days": int, "people_number": int, "budget": (int, float)}
    for key, kind in kinds.items():
        if not isinstance(need(task, key), kind):
            raise ValueError(f"task {name}: {key!r} is {task[key]!r:.60}, which is of the wrong type")
    task.setdefault("id", str(name))
    task.setdefault("level", "easy")
    task.setdefault("visiting_city_number", task["days"] // 2)  # 1, 2, 3 of 3, 5, 7 days, as the benchmark has it
    return task


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


# ---------------------------------------------------------------------------------------------------------------- play


def play(generate, episodes, concurrency=8):
    """Play text-level episodes with generate(messages) -> reply; yields each as it ends.

    Every episode has a thread of its own: a slow reply holds up nobody else, and no turn waits for another. After a
    failure no episode starts; those that still come to their end are handed over before it is raised.
    """
    waiting, failure, episodes = set(), None, iter(episodes)
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            for episode in islice(episodes, 0 if failure else concurrency - len(waiting)):
                waiting.add(pool.submit(play_one, generate, episode))
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            failure = next(filter(None, (future.exception() for future in done)), failure)
            yield from (future.result() for future in done if not future.exception())
    if failure:
        raise failure


def play_one(generate, episode):
    """One episode to its end."""
    while not episode.stop:
        try:
            episode.step(generate(episode.messages))
        except ChatError as error:
            if "context" not in str(error):  # "maximum context length is ...", as vLLM and OpenAI say it
                raise
            episode.stop = "context"
    return episode


def api_generate(url, model, **options):
    """generate(messages) of an OpenAI-compatible endpoint; options are format_plan.chat's (temperature, top_p, ...)."""
    return partial(chat, url, model, **options)


def play_solver(database, episode):
    """One episode of synth.py's solver: its searches through the tools, then its plan as the answer."""
    from synth import solver_replies

    for reply in solver_replies(episode.task, database):
        if episode.step(reply) is None:
            break
    return episode


def engine(path, max_context, concurrency=64, tp=1, gpu_memory=0.9):
    """(vLLM engine, tokenizer) of a checkpoint folder or hub name: bf16 on GPUs, float32 on a CPU."""
    files = [Path(path) / name for name in ("tokenizer.json", "vocab.json", "tokenizer.model")]
    if Path(path).exists() and not any(file.exists() for file in files):
        raise ValueError(f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json of its base there")
    import torch

    cuda = torch.cuda.is_available()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not cuda:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM

    # a prompt read in pieces would have to rewind its request's seeded generator, which a CPU's generator cannot; and
    # the cache holds whole blocks, of 128 on a CPU unless told: each turn would read the rest of its last one again
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_context, 8192), "block_size": 32}
    place = {"gpu_memory_utilization": gpu_memory} if cuda else {"enforce_eager": True, **whole}
    llm = LLM(str(path), dtype="bfloat16" if cuda else "float32", max_model_len=max_context, max_num_seqs=concurrency,
              tensor_parallel_size=tp, enable_prefix_caching=True, **place)
    return llm, llm.get_tokenizer()


def play_vllm(llm, tokenizer, episodes, max_context, temperature=0.6, top_p=0.95, seed=0, max_tokens=None,
              concurrency=64):
    """Play episodes with a vLLM engine in this process; yields each as it ends, its number of tokens in .tokens.

    Tokens in, tokens out: what the engine said is never tokenised again, and the answer to a finished turn joins the
    very next step. Every reply has a seed of its own (seed, task, sample, turn), whoever else is playing. Tools answer
    in threads: a slow one (a search server) holds up neither the engine nor the other episodes.
    """
    engine, live, turns, numbers, episodes = llm.llm_engine, {}, {}, count(), iter(episodes)
    ask = partial(submit, engine, tokenizer, max_context, max_tokens, temperature, top_p, seed)
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            for episode in islice(episodes, concurrency - len(live)):
                number = str(next(numbers))
                live[number] = episode, prompt_ids(episode, tokenizer, max_context)
                ask(number, *live[number])
            if not live:
                return
            for output in engine.step() if len(live) > len(turns) else ():  # nothing to step when all wait for tools
                if output.finished:
                    said = list(output.outputs[0].token_ids)
                    turns[output.request_id] = pool.submit(
                        take_turn, *live[output.request_id], said, tokenizer, max_context)
            wait(turns.values(), timeout=0.001)  # s; tools take microseconds, so nearly all of them are in by then
            answered = [number for number, turn in turns.items() if turn.done()]
            for number in sorted(answered, key=lambda number: turns[number].exception() is not None):  # failures last
                turns.pop(number).result()
                episode, ids = live[number]
                if not episode.stop:
                    ask(number, episode, ids)
                    continue
                del live[number]
                episode.tokens = len(ids)
                yield episode


def prompt_ids(episode, tokenizer, max_context):
    """The ids of system prompt, query and the head of the first reply."""
    text = tokenizer.apply_chat_template(episode.messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) >= max_context:
        name = episode.task.get("id", "?")
        raise ValueError(f"task {name}: its prompt has {len(ids)} tokens; raise --max-context above {max_context}")
    return ids


def submit(engine, tokenizer, max_context, max_tokens, temperature, top_p, seed, number, episode, ids):
    """Ask the engine for the next reply of an episode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room, name = max_context - len(ids), f"{seed}/{name_of(episode.task)}/{episode.turns}"
    engine.add_request(number, {"prompt_token_ids": list(ids)}, SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=min(room, max_tokens or room), detokenize=False,
        stop_token_ids=[tokenizer.eos_token_id], output_kind=RequestOutputKind.FINAL_ONLY,
        seed=random.Random(name).getrandbits(31)))


def take_turn(episode, ids, said, tokenizer, max_context):
    """Play a reply's tokens and append them, and the observation's, to the episode's ids."""
    closed = said[-1:] == [tokenizer.eos_token_id]
    reply = tokenizer.decode(said[:-1] if closed else said)
    ids += said
    if not closed and len(ids) >= max_context:
        episode.messages.append({"role": "assistant", "content": reply})
        episode.stop = "context"
        return
    observation = episode.step(reply)
    if observation is None:
        return
    end = "" if closed else "<|im_end|>"  # a reply cut at max_tokens is closed for it
    text = f"{end}\n<|im_start|>user\n{episode.observation_message(observation)}<|im_end|>\n<|im_start|>assistant\n"
    ids += tokenizer.encode(text, add_special_tokens=False)
    if len(ids) >= max_context:
        episode.stop = "context"


# -------------------------------------------------------------------------------------------------------------- report

SIZES = {  # C11: the leaderboard's denominators: queries, queries x 8 checks, hard constraints asked
    "train": (45, 360, 105),
    "validation": (180, 1440, 420),
    "test": (1000, 8000, 2290),
}
STOPS = ("answer", "format", "turns", "context")
DESTINATIONS = {", destination in training": False, ", destination never in training": True}  # a task's `unseen`
COUNTS = ("reward", "turns", "calls", "tokens")  # means of numbers; every other line of the table is a share


def verdicts(task, plan, database):
    """What an episode's record says of its plan: star's score and reward, and whether the others pass it."""
    scores = {rules: score(task, plan, database, rules) for rules in RULES}
    return {
        "plan": plan,
        "score": scores["star"],
        "reward": reward(scores["star"], "sum"),
        "official": scores["official"],
        "strict": scores["strict"]["success"],
    }


def mean(values):
    """The mean of numbers, None of nothing."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def measure(rows):
    """{line of the table: number} over the episodes of one agent."""
    judged = [row for row in rows if "score" in row]
    star, tasks = [row["score"] for row in judged], [row["task"] for row in judged]
    replies = [parse(m["content"]).kind for row in rows for m in row["messages"] if m["role"] == "assistant"]
    found = {"episodes": len(rows), "success": mean(s["success"] for s in star)}
    found["success, official"] = mean(row["official"]["success"] for row in judged)
    found["success, strict"] = mean(row["strict"] for row in judged)
    found["hack gauge: star - strict"] = mean(row["score"]["success"] - row["strict"] for row in judged)
    for level in ("easy", "medium", "hard"):
        found[f"success, {level}"] = mean(s["success"] for s, t in zip(star, tasks) if t.get("level") == level)
    for name, unseen in DESTINATIONS.items():
        found[f"success{name}"] = mean(s["success"] for s, t in zip(star, tasks) if t.get("unseen") is unseen)
    found |= {name: mean(s[name] for s in star) for name in SCORES[:-1]}
    for name in (*COMMONSENSE, *HARD):
        found[name] = mean(s["checks"][name][0] for s in star)
    for stop in STOPS:
        found[f"stop: {stop}"] = mean(row["stop"] == stop for row in rows)
    found["replies that break the format"] = mean(kind == "error" for kind in replies)
    return found | {name: mean(row.get(name) for row in rows) for name in COUNTS}


def official_rates(rows, split):
    """The leaderboard's six rates of each task's first play, whose denominators are the split's own (C11)."""
    plans, checks, asked = SIZES[split]
    rows = [row for row in rows if not row["task"].get("sample")]
    scores, delivered = [row["official"] for row in rows if "official" in row], sum(bool(row["plan"]) for row in rows)
    if not scores:
        return {"delivery rate": delivered / plans}
    passed = [[score["checks"][name][0] is True for name in HARD] for score in scores]
    return {
        "delivery rate": delivered / plans,
        "commonsense micro rate": sum(score["cs_micro"] * 8 for score in scores) / checks,
        "commonsense macro rate": sum(score["cs_macro"] for score in scores) / plans,
        "hard micro rate": sum(map(sum, passed)) / asked,
        "hard macro rate": sum(score["hard_macro"] for score in scores) / plans,
        "final pass rate": sum(score["success"] for score in scores) / plans,
    }


def by_task(pairs):
    """{task id: [success of each play]} of (task id, success) pairs."""
    groups = {}
    for name, success in pairs:
        groups.setdefault(name, []).append(success)
    return groups


def task_rates(rows):
    """{task id: success, a mean over its plays} of episodes."""
    return {task: mean(plays) for task, plays in
            by_task((row["task"]["id"], row["score"]["success"]) for row in rows if "score" in row).items()}


def pass_at(plays):
    """{"pass@k": chance that one of k plays of a task succeeds} for k = 1, 2, 4, .. n; nothing where n is 1.

    plays: {task id: its n plays' success}. k of n plays, c of them right, all miss with chance C(n - c, k) / C(n, k),
    which is without bias (arXiv:2107.03374 eq. 1).
    """
    most = min(map(len, plays.values()), default=1)
    sizes = sorted({2**i for i in range(most.bit_length())} | {most}) if most > 1 else []
    counts = [(len(values), int(sum(values))) for values in plays.values()]
    return {f"pass@{k}": mean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) for k in sizes}


def interval(values, rounds=10_000):
    """The 95% bootstrap interval of a mean: as many values drawn with replacement, again and again."""
    import numpy as np

    rng, values = np.random.default_rng(0), np.asarray(values, float)
    draws = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(rounds)]
    return [float(end) for end in np.percentile(draws, [2.5, 97.5])]


def table(played, split=None):
    """(markdown, {agent: numbers}) of {agent: its episodes}, side by side."""
    plays = {name: by_task((row["task"]["id"], row["score"]["success"]) for row in rows if "score" in row)
             for name, rows in played.items()}
    wins = {name: task_rates(rows) for name, rows in played.items()}
    report = {name: measure(rows) | pass_at(plays[name]) | (official_rates(rows, split) if split else {})
              for name, rows in played.items()}
    lines = [["", *played], ["---"] * (len(played) + 1)]
    for line in report[next(iter(played))]:
        lines.append([line, *(show(line, numbers.get(line)) for numbers in report.values())])
    for column, (name, numbers) in enumerate(report.items(), 1):
        if wins[name]:
            numbers["success interval"] = interval(list(wins[name].values()))
            lines[3][column] += f" ({span(*numbers['success interval'])})"
    last = list(wins)[-1]
    unseen = {row["task"]["id"]: row["task"].get("unseen") for rows in played.values() for row in rows}
    for other in list(wins)[:-1]:
        for part, flag in {"": None, **DESTINATIONS}.items():
            change = [wins[last][task] - wins[other][task] for task in wins[other]
                      if task in wins[last] and (flag is None or unseen[task] is flag)]
            if change:
                report[last][f"success minus {other}'s{part}"] = [mean(change), *interval(change)]
                lines.append([f"success of {last} minus {other}{part}", *[""] * (len(played) - 1),
                              f"{100 * mean(change):+.1f} ({span(*interval(change), '+')})"])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines), report


def show(line, value):
    """A number of the table as text: shares in percent."""
    if value is None:
        return "-"
    return f"{value:.1f}" if line in COUNTS else f"{value}" if line == "episodes" else f"{100 * value:.1f}"


def span(low, high, sign=""):
    """An interval of shares in percent."""
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}"


def log_rows(log):
    """A training log's rows in the order of steps. A resumed run goes over some steps again: the last word counts."""
    rows = {row["step"]: row for _, row in scan(log, True, **FINITE) if "step" in row}
    return [rows[step] for step in sorted(rows)]


def curves(log, picture):
    """Draw success, reward, entropy and |dlogp| over the steps of a training log into a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot

    rows = log_rows(log)
    panels = {"success": ("success", "strict", "val_success"), "reward": ("reward",), "entropy": ("entropy",),
              "|dlogp|, engine to trainer": ("dlogp_mean", "dlogp_max")}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True)
    for axis, (title, keys) in zip(axes.flat, panels.items()):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                axis.plot(*zip(*points), label=key, marker="." if key == "val_success" else None)
                axis.legend()
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[1][1].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def trace(spec):
    """Print an episode as a dialogue. spec: an episodes.jsonl, or one and :ID."""
    path, _, name = spec.partition(".jsonl:")
    rows = read_jsonl(path + ".jsonl" if name else path)
    rows = [row for row in rows if not name or row["task"].get("id") == name]
    if not rows:
        raise ValueError(f"{spec}: no such episode")
    for message in rows[0]["messages"]:
        print(f"--- {message['role']}\n{message['content']}\n")
    print(f"--- stop: {rows[0]['stop']}")
    for check, (passed, reason) in rows[0].get("score", {}).get("checks", {}).items():
        print(f"{'-' if passed is None else 'ok' if passed else 'NO':3} {check}{': ' + reason if reason else ''}")


# ---------------------------------------------------------------------------------------------------------------- axis

# Success on TravelPlanner's test set in per cent, 1.5B / 3B / 7B, from the tables of STAR, arXiv:2603.21972, section 4:
# rewards under GRPO; algorithms under MACRO, at 7B under SUM; data with 3B and the curriculum; scale at its best, which
# is ARPO with MACRO, GRPO with the curriculum, GRPO with SUM. Of failing tools it says in words that up to 5% do no
# harm and 10% do.
PAPER = {
    "reward": {"sft": "6.9 / 12.2 / 19.7", "sum": "33.1 / 47.0 / 62.8", "macro": "30.1 / 48.2 / 58.9",
               "success": "33.8 / 46.6 / 60.9", "curriculum": "34.9 / 49.9 / 57.0"},
    "algorithm": {"sft": "6.9 / 12.2 / 19.7", "grpo": "30.1 / 48.2 / 62.8", "dapo": "36.9 / 45.6 / 58.4",
                  "arpo": "37.5 / 47.5 / 58.3"},
    "data": {"sft": "- / 12.2 / -", "100-prompts": "- / 37.5 / -", "1000-prompts": "- / 49.9 / -",
             "easy": "- / 45.3 / -", "medium": "- / 41.1 / -", "hard": "- / 25.9 / -", "mixed": "- / 49.9 / -"},
    "noise": {},
    "scale": {"1.5b-sft": "6.9", "1.5b": "37.5", "3b-sft": "12.2", "3b": "49.9", "7b-sft": "19.7", "7b": "62.8"},
}
# and its minutes per update, on 8, 8 and 16 A100-80G
PAPER_MINUTES = {"grpo": "8.0 / 8.6 / 9.0", "dapo": "8.2 / 8.9 / 9.5", "arpo": "9.5 / 13.3 / 13.3"}
UPDATE_SECONDS = ("sync_s", "play_s", "judge_s", "learn_s")


def read_runs(specs):
    """["NAME=OUT/eval/rl", ...] -> {NAME: [(episodes, updates)]}, a pair per seed: OUT/rl/log.jsonl's lines of RL."""
    runs = {}
    for spec in specs:
        name, _, folder = spec.partition("=")
        seeds, folder = runs.setdefault(name, []), Path(folder)
        log = folder.parent.parent / folder.name / "log.jsonl"
        lines = read_jsonl(log) if log.exists() else []
        if (folder / "episodes.jsonl").exists():
            seeds.append((read_played(folder / "episodes.jsonl"), [line for line in lines if "loss_tokens" in line]))
        else:
            print(f"{name}: {folder} holds no episodes.jsonl yet")
    return runs


def axis_row(seeds):
    """Cells of one setting from its [(episodes, updates)]; the interval is over tasks, each the mean of its seeds."""
    if not seeds:
        return ["not run"] + [""] * 5
    wins = [task_rates(rows) for rows, _ in seeds]
    rows = [row for rows, _ in seeds for row in rows]
    lines = [line for _, lines in seeds for line in lines]
    tokens = mean(line["loss_tokens"] for line in lines)
    seconds = median(sum(line[key] for key in UPDATE_SECONDS) for line in lines) if lines else 0
    means = [mean(rates.values()) for rates in wins]
    return [f"{100 * mean(means):.1f} ({', '.join(f'{100 * win:.1f}' for win in means)})",
            span(*interval(list(task_rates(rows).values()))), f"{100 * mean(row['strict'] for row in rows):.1f}",
            f"{tokens:,.0f}" if lines else "", f"{seconds:.1f}" if lines else "",
            ", ".join(sorted({str(len(lines)) for _, lines in seeds}))]


def axis_table(axis, runs):
    """Markdown: the paper's number of each setting, and ours from {setting: [(episodes, updates)]}."""
    lines = [["setting", "paper, test, 1.5B / 3B / 7B", "ours: mean (each seed)", "95% over tasks", "strict",
              "trained policy tokens / update", "s / update, median", "updates"]]
    settings = [*runs, *(name for name in PAPER[axis] if name not in runs)]  # what only the paper has stands below
    lines += [[name, PAPER[axis].get(name, ""), *axis_row(runs.get(name, []))] for name in settings]
    if axis == "algorithm":
        lines = [[*line, PAPER_MINUTES.get(line[0], "")] for line in lines]
        lines[0][-1] = "paper, min / update"
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def axis_curves(axis, runs, picture):
    """Draw the success of the training plays over the updates: a colour per setting, seeds thin, their mean thick.

    Both are means over the last 5 updates; plays of other tasks (axis data) or of failing tools (noise) differ.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot

    trained = {name: [[line["success"] for line in lines] for _, lines in seeds if lines]
               for name, seeds in runs.items()}
    figure, plot = pyplot.subplots(figsize=(8, 5))
    for color, name in enumerate(name for name in trained if trained[name]):
        curves = [[100 * mean(c[max(0, i - 4) : i + 1]) for i in range(len(c))] for c in trained[name]]
        for curve in curves:
            plot.plot(range(1, len(curve) + 1), curve, color=f"C{color}", linewidth=0.6, alpha=0.6)
        middle = [mean(points) for points in zip(*curves)]
        plot.plot(range(1, len(middle) + 1), middle, color=f"C{color}", linewidth=2.2, label=name)
    plot.set(xlabel="update", ylabel="success of the training plays, %", title=axis)
    plot.grid(alpha=0.3)
    plot.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def compare_runs(a):
    """--axis: OUT/AXIS.md and OUT/AXIS.png of the --runs."""
    runs = read_runs(a.runs)
    Path(a.out).mkdir(parents=True, exist_ok=True)
    axis_curves(a.axis, runs, Path(a.out) / f"{a.axis}.png")
    text = axis_table(a.axis, runs)
    (Path(a.out) / f"{a.axis}.md").write_text(text)
    print(text)


# ------------------------------------------------------------------------------------------------------ the report page
# One HTML file of any folder of ours. Episodes are read line by line, and only what the page's list shows stays in
# memory; each whole record goes from its place in the file into an element of its own, packed (5,000 long episodes are
# else too much for a browser), and is read when it is opened.

dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False)


def finite(text):
    """A JSON number as a float; None for NaN and infinities, which a browser does not read."""
    return float(text) if math.isfinite(float(text)) else None


FINITE = {"parse_constant": finite, "parse_float": finite}


def write_report(run, out, limit):
    """Write OUT/report.html of a folder that holds log.jsonl, episodes.jsonl or rollouts/ anywhere below."""
    logs, folders = find_records(Path(run))
    entries = [entry for name, files in folders.items() for entry in gather(name, files)]
    kept = choose(entries, limit)
    sources, tasks, shown = list(folders), {}, []
    for entry in kept:
        place = tasks.setdefault((entry["id"], entry["level"], entry["query"]), len(tasks))
        row = {key: entry[key] for key in ("key", "step", "stop", "success", "reward", "failed")}
        shown.append(row | {"source": sources.index(entry["source"]), "task": place})
    standings = [standing(name, [entry for entry in entries if entry["source"] == name]) for name in sources]
    for one, files in zip(standings, folders.values()):
        settings = files[0].with_name("settings.json")
        one["temperature"] = json.loads(settings.read_text())["temperature"] if settings.exists() else None
    index = {"run": str(run), "total": len(entries), "checks": [*COMMONSENSE, *HARD], "logs": logs,
             "levels": ordered(("easy", "medium", "hard"), [entry["level"] for entry in entries]),
             "stops": ordered(STOPS, [entry["stop"] for entry in entries]),
             "sources": standings, "tasks": list(tasks), "episodes": shown}
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    head, middle, tail = re.split("<!-- (?:index|episodes) -->", template)
    page = Path(out) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    temporary = page.with_name(f".{page.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        # JSON that no HTML parser mistakes for anything else: ASCII, and without "<"
        file.writelines([head, '<script type="application/json" id="index">', dumps(index).replace("<", "\\u003c"),
                         "</script>", middle])
        for i, entry in enumerate(kept):
            packed = base64.b64encode(gzip.compress(dumps(reread(*entry["at"])).encode(), mtime=0)).decode()
            file.write(f'<script type="text/plain" id="e{i}">{packed}</script>\n')
        file.write(tail)
    os.replace(temporary, page)
    print(f"{page}: {len(kept)} of {len(entries)} episodes, {page.stat().st_size / 1e6:.1f} MB")


def reread(path, offset):
    """The record at an offset of a jsonl file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.readline(), **FINITE)


def find_records(run):
    """([{name, columns: {key: [number per step]}}], {folder: its files of episodes}) below a folder."""
    logs, folders = [], {}
    for path in sorted(run.rglob("*.jsonl"), key=lambda path: (path.parent.parent, path.stat().st_mtime_ns, path)):
        name = path.parent.relative_to(run).as_posix() if path.parent != run else run.resolve().name
        if path.name == "log.jsonl":
            rows = log_rows(path)
            keys = {key for row in rows for key, value in row.items() if isinstance(value, (int, float))}
            logs.append({"name": name, "columns": {key: [row.get(key) for row in rows] for key in sorted(keys)}})
        elif path.name == "episodes.jsonl" or path.parent.name == "rollouts":
            folders.setdefault(name, []).append(path)
    if not logs and not folders:
        raise ValueError(f"{run} holds no log.jsonl, no episodes.jsonl and no rollouts/: name the folder of a run")
    return logs, folders


def gather(source, files):
    """What the page's list and tables say of each episode of a folder."""
    seen = {}
    for path in files:
        step = "" if path.name == "episodes.jsonl" else path.stem
        for offset, row in scan(path, True, **FINITE):
            task, score = row["task"], row.get("score") or {}
            checks = score.get("checks") or {}
            name = str(task.get("id", task.get("idx", "?")))
            key = "/".join(filter(None, (source, step, name))).encode("utf-8", "replace").decode()
            seen[key] = seen.get(key, 0) + 1
            entry = {key: row.get(key) for key in ("stop", "strict", *COUNTS)} | {
                "key": key if seen[key] == 1 else f"{key} #{seen[key]}", "source": source, "step": step, "id": name,
                "level": task.get("level"), "query": str(task.get("query", ""))[:1000], "at": (path, offset)}
            entry["success"] = score.get("success", score.get("em"))  # em: question answering
            entry["official"] = (row.get("official") or {}).get("success")
            entry["judged"] = [check for check, verdict in checks.items() if verdict[0] is not None]
            entry["failed"] = [check for check, verdict in checks.items() if verdict[0] is False]
            yield entry


def choose(entries, limit):
    """At most limit of them, tasks evenly spread and kept whole, so that what can be compared stays; rollouts last."""
    kept = []
    for training in (False, True):
        units, room = {}, limit - len(kept)
        for i, entry in enumerate(entries):
            if bool(entry["step"]) == training:
                units.setdefault((entry["step"], entry["id"]), []).append(i)
        units = list(units.values())
        number = len(units)
        while sum(map(len, picked := [units[i * len(units) // number] for i in range(number)])) > room:
            number = number * 99 // 100
        kept += [i for unit in picked for i in unit]
    return [entries[i] for i in sorted(kept)]


def standing(name, rows):
    """A folder's line of the page's tables: means over all its episodes."""
    plays = by_task((row["id"], row["success"]) for row in rows if row["success"] is not None)
    tasks = [mean(values) for values in plays.values()]
    levels, stops = ({row[key] for row in rows} - {None} for key in ("level", "stop"))
    return {key: mean(row[key] for row in rows) for key in ("success", "official", "strict", *COUNTS)} | {
        "name": name, "episodes": len(rows), "interval": interval(tasks) if tasks else None,
        "levels": {level: mean(row["success"] for row in rows if row["level"] == level) for level in levels},
        "stops": {stop: mean(row["stop"] == stop for row in rows) for stop in stops},
        "checks": {check: [sum(check in row["failed"] for row in rows), sum(check in row["judged"] for row in rows)]
                   for check in (*COMMONSENSE, *HARD)},
        "pass": {} if any(row["step"] for row in rows) else pass_at(plays)}


def ordered(first, found):
    """The values that occur, those of first in its order, then others."""
    return [value for value in first if value in found] + sorted(set(filter(None, found)) - set(first))


def export(log, to, folder):
    """Write a training log as TensorBoard's events into FOLDER/tensorboard, or as a run of wandb."""
    rows = [(row.pop("step"), {key: value for key, value in row.items() if isinstance(value, (int, float))})
            for row in log_rows(log)]
    try:
        if to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        else:
            import wandb
    except ImportError:
        raise ValueError(f"--to {to} needs a package that is not here: pip install {to}") from None
    if to == "tensorboard":
        with SummaryWriter(Path(folder) / "tensorboard") as writer:
            for step, numbers in rows:
                for key, value in numbers.items():
                    writer.add_scalar(key, value, step)
        return
    with wandb.init(project="star", name=str(Path(log).parent), dir=folder) as run:
        for step, numbers in rows:
            run.log(numbers, step=step)


# ---------------------------------------------------------------------------------------------------------- submission


def tidy(plan):
    """A plan in the leaderboard's words: "City(State)" is "City", and a drive is "Self-driving" (C1 to C4)."""
    return [{key: tidy_field(key, value) for key, value in day.items()} for day in plan]


def tidy_field(key, text):
    """One field of a day in the leaderboard's words."""
    if not isinstance(text, str):
        return text
    if key not in ("current_city", "transportation"):  # "Bar (The Old One), Ely(Nevada)": a name keeps its brackets
        return re.sub(r"(,[^,;(]*?)\s*\([^();]*\)(?=\s*(;|$))", r"\1", text) if key in FIELDS else text
    text = re.sub(r"\s*\([^()]*\)", "", text)
    if key == "transportation" and not re.search("flight|taxi|self-driving", text, re.I):
        text = re.sub(r"^\s*((driving|drive|car)\b[\s,:]*|(?=(from|cost)\b))", "Self-driving, ", text, flags=re.I)
    return text


def submission_faults(rows, split=None):
    """What the leaderboard would refuse, or crash on, in the rows of a submission; each names line, day and field."""
    faults = []
    if split and len(rows) != SIZES[split][0]:
        faults.append(f"the file has {len(rows)} lines, the {split} split has {SIZES[split][0]} queries")
    for line, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {"idx", "query", "plan"} <= row.keys():
            faults.append(f"line {line}: a line needs the keys idx, query and plan")
            continue
        if row["idx"] != line - 1 if split != "train" else row["idx"] not in (line - 1, line):
            faults.append(f"line {line}: idx is {row['idx']!r}; lines are in the order of the queries, from 0")
        if row["plan"] is not None and not isinstance(row["plan"], list):
            faults.append(f"line {line}: plan is a {type(row['plan']).__name__}, not a list of days")
            continue
        for number, day in enumerate(row["plan"] or [], 1):
            faults += [f"line {line}, day {number}, {fault}" for fault in day_faults(day)]
    return faults


def day_faults(day):
    """What is wrong with a day for the leaderboard's code; {} stands for a day that is not there."""
    if not isinstance(day, dict):
        return [f"all: it is a {type(day).__name__}, not a table of fields"]
    if not day:
        return []
    faults = [f"{key}: missing" for key in PLACES if key not in day]
    faults += [f"{key}: it is not text" for key in PLACES if key in day and not isinstance(day[key], str)]
    if faults:
        return faults
    if "days" not in day and "day" not in day:
        faults.append("day: missing")
    city, move = day["current_city"], day["transportation"]
    if "from" in city and from_to(city, True)[0] is None:
        faults.append('current_city: it must say "from A to B"')
    if "flight number" in move.lower() and "Flight Number: " not in move:
        faults.append('transportation: a flight is written "Flight Number: F1234567, from A to B, ..."')
    elif "flight number" in move.lower() and from_to(move, True)[0] is None and from_to(city, True)[0] is None:
        faults.append("transportation: the flight has no cities")
    if move not in EMPTY and not re.search("flight number|taxi|self-driving", move, re.I):
        faults.append("transportation: neither a flight number nor taxi nor self-driving, so it would go unjudged")
    return faults


# ---------------------------------------------------------------------------------------------------------------- main


def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument_group("agent").add_argument
    add("--model",       nargs="+", default=[], metavar="[NAME=]PATH", help="folders, hub names, or models of --url")
    add("--agent",       choices=("model", "solver"), default="model", help="solver: synth.py's, through the tools")
    add("--url",         help="an OpenAI-compatible endpoint, http://host:port/v1; without it vLLM plays here")
    add("--tp",          type=int,   default=1,     help="GPUs that share one model")
    add("--gpu-memory",  type=float, default=0.9,   help="share of the GPU that vLLM may take")
    add = p.add_argument_group("tasks").add_argument
    add("--tasks",       metavar="FILE|DIR|HUB_ID", help="a file of tasks, ours or the published form; with --split a "
                         "folder of SPLIT.csv or SPLIT.jsonl, or a data set on the hub (osunlp/TravelPlanner)")
    add("--database",    metavar="DIR", help="default: $STAR_DATABASE, else database/mini")
    add("--limit",       type=int,   help="play only the first N tasks")
    add("--samples",     type=int,   default=1,     help="plays per task; several add pass@k")
    add("--split",       choices=SIZES, help="what the tasks are: the leaderboard's rates and a submission.jsonl")
    add = p.add_argument_group("play").add_argument
    add("--temperature", type=float, default=0.6,   help="of the sampling [STAR app. D]")
    add("--top-p",       type=float, default=0.95,  help="of the sampling [STAR app. D]")
    add("--max-context", type=int,   default=32768, help="tokens per episode [STAR app. D]")
    add("--max-turns",   type=int,   default=60,    help="replies per episode [STAR app. D]")
    add("--max-tokens",  type=int,   default=4096,  help="tokens per reply")
    add("--system-prompt", default="full", metavar="full|short|FILE", help="what the checkpoint was trained on")
    add("--failure-rate", type=float, default=0.0,  help="share of tool calls that fail [STAR sec. 3]")
    add("--concurrency", type=int,   default=64,    help="episodes in flight")
    add("--seed",        type=int,   default=0,     help="of the sampling and the failures")
    add = p.add_argument_group("output").add_argument
    add("--out",         help="a folder per agent, table.md; a rerun plays what is missing (out/eval unless set)")
    add("--trace",       metavar="EPISODES.jsonl[:ID]", help="print one episode as a dialogue, and stop")
    add("--report",      metavar="RUN_DIR", help="write OUT/report.html (RUN_DIR's unless set): all that is to be seen")
    add("--report-episodes", type=int, default=5000, help="most episodes in the page; of more, evenly chosen")
    add("--curves",      metavar="RUN_DIR", help="draw RUN_DIR/log.jsonl into OUT/curves.png")
    add("--axis",        choices=PAPER, help="tabulate the --runs beside the paper's numbers: OUT/AXIS.md, AXIS.png")
    add("--runs",        nargs="+", default=[], metavar="NAME=OUT/eval/rl", help="evaluated runs; a name per setting, "
        "once for each seed; OUT/rl/log.jsonl tells of their training")
    add("--to",          choices=("tensorboard", "wandb"), help="hand the log of --curves to it instead")
    return p.parse_args(argv)


SETTINGS = ("database", "temperature", "top_p", "max_context", "max_turns", "max_tokens", "system_prompt",
            "failure_rate", "seed")


def agents(a):
    """{name: path} of the agents to compare; a name is the end of the path that tells it from the others."""
    if a.agent == "solver":
        return {"solver": None}
    named = [spec.partition("=") if re.match(r"[\w.-]+=", spec) else ("", "", spec) for spec in a.model]
    parts = [[part for part in Path(path).parts if part not in "/."] for _, _, path in named]
    found = {}
    for (name, _, path), ends in zip(named, parts):
        short = [n for n in range(1, len(ends)) if sum(other[-n:] == ends[-n:] for other in parts) == 1]
        found[name or "-".join(ends[-short[0] :] if short else ends)] = path
    if not named or len(found) < len(named):
        raise ValueError("--model wants one or more checkpoints with different names (or --agent solver)")
    return found


def find_tasks(source, split):
    """The file of tasks: a file itself, or SPLIT.csv or SPLIT.jsonl of a folder or of a data set on the hub."""
    path, names = Path(source), (f"{split}.csv", f"{split}.jsonl")
    named = path.suffix in (".csv", ".jsonl") or not re.fullmatch(r"[\w.-]+/[\w.-]+", source)
    if path.is_file() or named and not path.is_dir():
        return path
    if not split:
        raise ValueError(f"{source} is a data set: --split train, validation or test says which part of it")
    if path.is_dir():
        found = [path / name for name in names if (path / name).exists()]
        if not found:
            raise ValueError(f"{source} holds neither {names[0]} nor {names[1]}")
        return found[0]
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in names:
        try:
            return Path(hf_hub_download(source, name, repo_type="dataset"))
        except (OSError, EntryNotFoundError) as error:
            why = type(error).__name__
    raise ValueError(f"{source} is no folder here, and the hub gives no {' or '.join(names)} of it ({why}): fetch it "
                     f"where it can be had (hf download {source} --repo-type dataset --local-dir DIR) and name DIR")


def read_csv(path):
    """The rows of a published csv; its reference information makes fields of megabytes."""
    csv.field_size_limit(1 << 30)
    with open(path, encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if key and value} for row in csv.DictReader(file)]


def load_tasks(source, limit=None, split=None):
    """The tasks of a file or data set, in either form.

    The published test split says no more than level, days and query: it is played for the leaderboard, not judged.
    """
    if source is None:
        raise ValueError("--tasks FILE.jsonl is needed; python synth.py tasks writes one")
    path, tasks = find_tasks(source, split), []
    rows = read_csv(path) if path.suffix == ".csv" else read_jsonl(path)
    for number, row in enumerate(rows[:limit]):
        row = row if not isinstance(row, dict) or row.keys() & {"id", "idx"} else row | {"idx": number}
        told = split != "test" or "org" in row
        tasks.append(load_task(row) if told else {"id": str(row.get("id", row.get("idx")))} | {
            key: row[key] for key in ("idx", "level", "days", "query") if key in row})
    if not tasks:
        raise ValueError(f"{path}: holds no task; python synth.py tasks writes some")
    ids = [task["id"] for task in tasks]
    twice = next((name for name in ids if ids.count(name) > 1), None) if len(set(ids)) < len(ids) else None
    if twice is not None:
        raise ValueError(f"{path}: two tasks have the id {twice!r}; episodes are told apart by it")
    return tasks


def name_of(task):
    """What tells a play from the others: the task's id, and which sample of it."""
    return f"{task['id']}/{task.get('sample', 0)}"


def read_played(path):
    """The whole records of an episodes file; a last line that a killed run left half written is cut off."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
    return read_jsonl(path) if data else []


def open_folder(a, name, path):
    """OUT/name, which holds one way of playing: going on in another is refused."""
    folder = Path(a.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    settings, file = {"model": path} | {key: getattr(a, key) for key in SETTINGS}, folder / "settings.json"
    before = json.loads(file.read_text()) if file.exists() else settings
    changed = [f"{key} was {before.get(key)!r} and is {settings[key]!r}" for key in settings
               if before.get(key) != settings[key]]
    if changed:
        raise ValueError(f"{folder} was played otherwise ({'; '.join(changed)}): choose another --out or remove it")
    file.write_text(json.dumps(settings, indent=1))
    return folder


def play_agent(a, name, path, tasks):
    """Play what OUT/name/episodes.jsonl lacks of an agent's episodes and append each as it ends."""
    from tqdm import tqdm

    folder, database = Path(a.out) / name, open_database(a.database)
    done = {name_of(row["task"]) for row in read_played(folder / "episodes.jsonl")}
    left = [task for task in tasks if name_of(task) not in done]
    prompts = {"full": SYSTEM_PROMPT, "short": SHORT_PROMPT}
    prompt = prompts.get(a.system_prompt) or Path(a.system_prompt).read_text(encoding="utf-8")
    sandboxes = (Sandbox(database, a.failure_rate, f"{a.seed}/{name_of(task)}") for task in left)
    episodes = (Episode(task, box, a.max_turns, prompt, strict=False) for task, box in zip(left, sandboxes))
    wins = []
    bar = tqdm(player(a, path, episodes, database) if left else (), name, len(tasks), initial=len(tasks) - len(left))
    for episode in bar:
        plan = parse_plan(episode.answer, episode.task, database) if episode.answer is not None else None
        row = episode.record(name) | {"plan": plan, "tokens": getattr(episode, "tokens", None)}
        if "org" in episode.task:
            row |= verdicts(episode.task, plan, database)
            wins.append(row["score"]["success"])
            bar.set_postfix_str(f"success {mean(wins):.3f}", refresh=False)
        append_jsonl(folder / "episodes.jsonl", row)


def player(a, path, episodes, database):
    """The episodes as they end, played by the solver, an endpoint or a vLLM engine."""
    if a.agent == "solver":
        return map(partial(play_solver, database), episodes)
    if a.url:
        generate = api_generate(a.url, path, temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens)
        return play(generate, episodes, a.concurrency)
    llm, tokenizer = engine(path, a.max_context, a.concurrency, a.tp, a.gpu_memory)
    return play_vllm(llm, tokenizer, episodes, a.max_context, a.temperature, a.top_p, a.seed, a.max_tokens,
                     a.concurrency)


def submit_file(folder, rows, split):
    """Write the leaderboard's file of an agent and print what it would refuse."""
    rows = [(int(row["task"].get("idx", row["task"]["id"])), row) for row in rows if not row["task"].get("sample")]
    lines = [{"idx": idx, "query": row["task"]["query"], "plan": tidy(row["plan"] or []) or None}
             for idx, row in sorted(rows, key=lambda pair: pair[0])]
    write_jsonl(folder / "submission.jsonl", lines)
    for fault in submission_faults(lines, split):
        print(f"{folder / 'submission.jsonl'}, {fault}")


def run(function, *args):
    """Call it; what the user can mend is one line and not a traceback."""
    try:
        return function(*args)
    except (KeyError, ValueError, FileNotFoundError, ChatError) as error:
        text = error.args[0] if isinstance(error, KeyError) else error
        raise SystemExit(f"evaluate.py: {text}") from None


def evaluate(a):
    """Play, judge, report."""
    if a.trace:
        return trace(a.trace)
    if a.report:
        return write_report(a.report, a.out or a.report, a.report_episodes)
    if a.to:
        return export(Path(a.curves or ".") / "log.jsonl", a.to, a.out or a.curves)
    a.out = a.out or "out/eval"
    if a.axis:
        return compare_runs(a)
    if a.curves:
        Path(a.out).mkdir(parents=True, exist_ok=True)
        curves(Path(a.curves) / "log.jsonl", Path(a.out) / "curves.png")
        if not a.tasks:
            return None
    tasks = load_tasks(a.tasks, a.limit, a.split)
    tasks = [task | ({"sample": k} if k else {}) for task in tasks for k in range(a.samples)]
    chosen = agents(a)
    folders = {name: open_folder(a, name, path) for name, path in chosen.items()}
    for name, path in chosen.items():
        # (1) (2) in a process of its own: only its end gives back all of an engine's memory
        child = get_context("spawn").Process(target=run, args=(play_agent, a, name, path, tasks))
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"evaluate.py: {name} stopped early; the same command goes on where it was")
    # (3)
    wanted, played = {name_of(task) for task in tasks}, {}
    for name, folder in folders.items():
        rows = read_played(folder / "episodes.jsonl")
        played[name] = [row for row in rows if name_of(row["task"]) in wanted]
    text, report = table(played, a.split)
    for name, folder in folders.items():
        (folder / "scores.json").write_text(json.dumps(report[name], indent=1))
        if a.split:
            submit_file(folder, played[name], a.split)
    (Path(a.out) / "table.md").write_text(text)
    print(text)


def main(argv=None):
    run(evaluate, flags(argv))


if __name__ == "__main__":
    main()
