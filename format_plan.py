"""
Itinerary text -> plan: an agent's free-form answer becomes TravelPlanner's list of days.

    (1) text    JSON, tables and markdown unfold into plain lines
    (2) days    "Day 2: ...", "**Day 2 (March 20th)**" or a bare date opens a day; notes and cost
                tables close it
    (3) lines   a field ("Lunch: ..."), prose with cues ("have lunch at ..., then visit ...") or a
                detail of the ride before it ("Departure: 08:10") becomes events of its day
    (4) names   an event means the database's longest name at that place, else what is written
    (5) plan    events fill the day's slots; a city or night left open is that of the day before

What the database does not know stays as it was written, so that the judge can call it a
hallucination: a reader must not repair. Only rides are reworded, since "Driving" escapes the
official judge. parse_plan reads by rules, offline and the same every time; RL's reward uses it.
format_plan asks an LLM, as the STAR paper did (arXiv:2603.21972).

Reads   FILE.jsonl: episodes (task, answer), or texts (text, and org as context)
Writes  stdout: each line again with its "plan" (null where the text holds none)

    python format_plan.py FILE.jsonl --database DIR > plans.jsonl
    python format_plan.py FILE.jsonl --llm-url http://localhost:8000/v1 --llm-model M
"""
import argparse
import hashlib
import json
import re
import uuid
from collections import Counter, namedtuple
from functools import cache
from itertools import zip_longest
from pathlib import Path

import wording as w  # w.DAY, w.LABEL, ...: the patterns
from markup import TYPOGRAPHY, load_json, unfold
from runtime import LONGEST_REPLY, Parser, chat, errors_name, run, web_address
from sandbox import PROMPTS, open_database

MEALS = ("breakfast", "lunch", "dinner")
SLOTS = ("breakfast", "attraction", "lunch", "dinner", "accommodation")
FIELDS = ("current_city", "transportation", *SLOTS)
TABLE_OF = {**dict.fromkeys(MEALS, "restaurants"), "attraction": "attractions",
            "accommodation": "hotels"}
# What a line says of a slot, which is "?" if only a name can tell it. how: "field", "open" (a label
# whose values are in the lines below), "prose", "check-in", or the time of day before a "?".
Event = namedtuple("Event", "slot text how")
DayText = namedtuple("DayText", "number last heading events")  # "Days 2-4": number 2, last 4
Mention = namedtuple("Mention", "name city end")  # a venue in a text; end: where the text goes on


# ---------------------------------------------------------------- names
FIRST = re.compile(r"\w+|\S")


class Names:
    """The cities and venues of a database, and how a text writes them."""

    def __init__(self, database):
        self.database, cities, awkward = database, set(database.cities), set()
        self.venues = {}  # {(table, first word): {city: [(lower case, plain, as stored), ...]}}
        for table in ("hotels", "restaurants", "attractions"):
            for city in getattr(database, f"{table[:-1]}_cities"):
                cities.add(city)
                rows = getattr(database, table)(city)
                keys = [row.name.translate(TYPOGRAPHY).strip() for row in rows]
                keys = [key.replace("\n", " ").replace("|", "¦") for key in keys]  # as in texts
                stored = {key: row.name.strip() for key, row in zip(keys, rows, strict=True)}
                for key in filter(None, stored):
                    of_city = self.venues.setdefault((table, FIRST.match(key)[0].lower()), {})
                    of_city.setdefault(city, []).append((key.lower(), key, stored[key]))
                awkward |= {(name.translate(TYPOGRAPHY), key) for key, name in stored.items()}
        # a line break or a pipe within a name would split the text
        self.awkward = sorted(pair for pair in awkward if re.search(r"[\n|]", pair[0]))
        initials = {}  # alternatives that differ in their first letter are searched fastest
        for city in sorted(cities, key=len, reverse=True):
            end = r"(?!\w)" if FIRST.fullmatch(city) else r"(?![^\W_])"
            initials.setdefault(re.escape(city[0]), []).append(re.escape(city[1:]) + end)
        states = "|".join(map(re.escape, sorted(set(map(str, database.cities.values())))))
        self.city_tail = re.compile(rf"(?:{w.CITY_TAIL})|,\s*(?:{states})(?!\w)")
        self.cities = re.compile("|".join(rf"{initial}(?<!\w{initial})(?:{'|'.join(rest)})"
                                          for initial, rest in initials.items()))

    def city(self, text):
        """The city at the start of a text, as written, without "(State)" and what follows."""
        text = text.strip(" :[\"'")
        city = self.cities.match(text)
        known = city and w.CITY_END.match(text, city.end())
        return city[0] if known else text[:w.CITY_END.search(text).start()].strip(" .:]\"'")

    def city_after(self, text, at):
        """(city or "", end) where ", City", "(City)", " in City" or " - City(State)" follows."""
        lead = w.CITY_LEAD.match(text, at)
        city = lead and self.cities.match(text, lead.end())
        if not city or not w.CITY_END.match(text, city.end()):
            return "", at
        return city[0], (self.city_tail.match(text, city.end()) or city).end()

    def way(self, text):
        """(from, to) of a text: ("", to) where it says only "to X", None where it says neither."""
        if way := w.WAY.search(text):
            start, end = self.city(way[1]), self.city(way[2])
            if start[:1].islower() or w.MOVE.match(start) and not self.cities.match(start):
                start = ""  # "from there", "Travel to X"
            return (start, end) if end and not end[0].islower() else None
        cities = list(self.cities.finditer(text, 0, 400))
        for one, two in zip(cities, cities[1:], strict=False):
            if one[0] != two[0] and w.ARROW.fullmatch(text, one.end(), two.start()):
                return one[0], two[0]
        for city in cities:
            if w.TO.search(text, max(0, city.start() - 6), city.start()):
                return "", city[0]
        return None

    def venue(self, text, at, table, cities):
        """The longest name of a venue in these cities that stands at this place, or None."""
        found, word = [], FIRST.match(text, at)
        of_city = self.venues.get((table, word[0].lower())) if word else None
        for city in cities if of_city else ():
            for lower, key, name in of_city.get(city, ()):
                end, written = at + len(key), text[at:at + len(key)]
                if written.lower() == lower and w.NAME_END.match(text, end):
                    found.append(Mention(name if written == key else written, city, end))
        return max(found, key=lambda mention: mention.end) if found else None

    def known(self, text, at, table, cities):
        """The venue at this place, None where the database has none or the name goes on."""
        close = text.find("]", at, at + 200) if text[at] == "[" else -1  # where the name must end
        start = at + (close > 0)
        venue = self.venue(text, at, table, cities) or self.venue(text, start, table, cities)
        if not venue:
            return None
        city, end = self.city_after(text, venue.end)
        if venue.end <= close:
            if text[end:close].strip():
                return None
            city, end = (city, close + 1) if city else self.city_after(text, close + 1)
        elif not city:  # "X - Rooftop Annex", "X and Dragon Palace", "X, Atlantis" are not X
            alone = "," not in text[text.rfind(";", 0, at) + 1:at]  # in "A, B, C" no city is C
            more = w.GOES_ON.match(text, end) or alone and w.LAST_CITY.match(text, end)
            if more and not self.venue(text, more.start(1), table, cities):
                return None
        return Mention(venue.name, city or venue.city, end)

    def written(self, text, at, sights):
        """The venue at this place as the text writes it; the database does not have it."""
        if text[at] == "[" and "]" in text[at:at + 200]:
            end = text.index("]", at) + 1
            last = w.LAST_CITY.search(text, at, end - 1)
            if last and self.cities.fullmatch(last[1]):
                return Mention(text[at + 1:last.start()], last[1], end)
            return Mention(text[at + 1:end - 1].strip(), *self.city_after(text, end))
        stop = (text + ";").index(";", at) if sights else len(text)
        last = w.LAST_CITY.search(text, at, stop)
        if last and self.cities.fullmatch(last[1]) and not w.ABOUT.search(text, at, last.start()) \
                and (not sights or text.count(",", at, stop) == 1):
            comma = text.rfind(",", at, last.start())  # "White Plains, New York" is one city
            city, end = self.city_after(text, comma) if comma > 0 else ("", 0)
            name, city = (comma, city) if end > last.start(1) else (last.start(), last[1])
            return Mention(unquoted(text, at, name), city, stop)
        end = w.WRITTEN_END.search(text, at, stop).start()
        commas = [i for i in range(at, end) if text[i] == ","]
        for lead in [i for i in range(at, min(end + 2, stop)) if text[i] in ",("]:
            city, after = self.city_after(text, lead)
            if city and w.NAME_END.match(text, after):  # else it is within the name
                return Mention(unquoted(text, at, lead), city, after)
        last = w.LAST_CITY.search(text, at, end) if len(commas) == 1 or not sights else None
        if last:
            return Mention(unquoted(text, at, last.start()), last[1], max(end, at + 1))
        if commas and (sights or text[commas[-1] + 1:end].strip()[:1].islower()):
            end = commas[0] if sights else commas[-1]  # a list or a remark goes on
        return Mention(unquoted(text, at, end).removesuffix("."), "", max(end, at + 1))

    def venues_in(self, text, slot, cities, prose):
        """Yield "Name, City" of a slot's text: all its attractions, or its first venue.

        cities: the day's, the likelier first; there lies a venue whose city the text leaves out.
        """
        text, at = text.split("|")[0], 0
        for _ in range(60):  # more steps than an honest list needs
            if at >= len(text):
                return
            known = self.known(text, at, TABLE_OF[slot], cities)
            lead = None if known or text[at] == "[" else w.LEAD.match(text, at)
            if lead:
                at = lead.end()
                continue
            capital = text[at].isupper() or text[at].isdigit() or text[at] in "[$"
            if prose and not known and not capital:
                return
            sentence = w.SENTENCE.search(text, at) if prose else None
            rest = text[:sentence.start()] if sentence else text
            name, city, at = known or self.written(rest, at, slot == "attraction")
            if aside := w.BRACKETS.match(text, at):
                there, at = self.city_after(text, aside.end())
                city = there or city
            if name and (known or not w.MONEY.match(name) and not (
                    slot != "accommodation" and w.SAID.fullmatch(name[0].lower() + name[1:])
                    or prose and self.cities.fullmatch(name))):
                yield f"{name}, {city or cities[0]}".replace("¦", "|")
            if slot != "attraction" or prose and text.startswith(". ", at):
                return
            if address := w.ADDRESS.match(text, at):
                at = address.end()
            if w.ABOUT.match(text, at) or w.REMARK.match(text, at) or text.startswith(". ", at):
                at = (text + ";").index(";", at)


def unquoted(text, at, end):
    """A name as written from a place on, without quotes around it; '"The View" in the Park' keeps
    its own, the first of which stands before that place."""
    name = text[at:end].strip(' ,"')
    return f'"{name}' if name.count('"') % 2 and text[at - 1:at] == '"' else name


names_of = cache(Names)  # the names of a database are gathered once


# ---------------------------------------------------------------- days and lines
def read_days(lines, trip, names):
    """(2) lines -> ([DayText] as told, the lines that told nothing). trip: the text's cities."""
    openings = [w.DAY.match(line) for _, line in lines]
    dated, numbered = not any(openings), any(found and found[1] for found in openings)
    days, outside, idle = [DayText(0, 0, "", [])], False, []  # number 0 stands before day 1
    for (kind, line), opening in zip(lines, openings, strict=True):
        day = days[-1]
        idle.append(line)
        opening = w.DATED.match(line) if dated and kind != "bullet" else opening
        if opening and w.MONEY.match(line, opening.end()):
            continue  # a row of a cost table
        if opening and (dated or opening[1] or not numbered):  # else it may say "the next day"
            line = w.BESIDE_DAY.sub("", line[opening.end():], 1).lstrip(" :-–—,.")
            said = tells(line) or opening[0][:3].lower() in ("on ", "the")
            number, last = numbers_of(opening, day, said)
            again = number < day.number and (number == 1 or not outside)
            if number == 2 and not day.number and day.events:  # day 1 was not announced
                days[-1:] = [DayText(0, 0, "", []), day._replace(number=1, last=1)]
            if 0 < number <= 31 and (number > day.number or again):
                days.append(DayText(number, last, line, []))
                outside, idle = False, idle[:-1]
                rest = line[w.DATE_FIRST.match(line).end():]  # "24/7 Diner" further on is none
                if said or w.FLIGHT_NUMBER.search(line) or w.LABEL.match(rest):
                    for part in w.NEXT_FIELD.split(rest):
                        read_line(part, kind, days[-1].events, trip, names)
                continue
        if outside or not line:
            continue
        awaited = kind == "bullet" and day.events and day.events[-1][1:] == ("", "open")
        if day.number and w.SECTION.match(line) and not (awaited or w.LABEL.match(line)):
            outside = kind == "line"
            continue
        before = len(day.events), day.events[-1:]
        for part in w.NEXT_FIELD.split(line):
            read_line(part, kind, day.events, trip, names)
        slot, text, how = day.events[-1] if day.events else ("?", "", "")
        told = before != (len(day.events), day.events[-1:])
        if told and (slot != "?" or slot_of(text, how, trip, names) != "?"):
            idle.pop()
    return days, list(filter(None, idle))


def tells(line):
    """Is what follows "Day 3:" more than a title?"""
    return len(line) > 90 or line.endswith(".") and any(
        cue.lastgroup != "attraction" for cue in w.CUE.finditer(line))


def numbers_of(opening, day, said):
    """(first, last) of the days that a heading opens behind a day: "Days 2-4", "The next day"."""
    first, last, ordinal = opening.groups() if opening.re is w.DAY else ("", "", "")
    word = (first or ordinal).lower()
    later = 2 if (word or said) and not day.number and day.events else day.number + 1
    number = int(word) if word.isdecimal() else w.NUMBERS.get(word, later)
    return number, min(max(number, int(last or 0)), 31)


def read_line(line, kind, events, trip, names):
    """(3) Append what a line says to a day's events, or to the last of them."""
    slot, text, how = events[-1] if events else ("", "", "")
    if slot == "transportation" and w.ATTRIBUTE.match(line):
        events[-1] = Event(slot, f"{text}, {line}", how)
        return
    if w.NOTE.match(line):
        return
    if how == "open" and kind == "bullet" and text and (place := w.CITY_LABEL.match(line)):
        events[-1] = Event(slot, f"{text}, {line[place.end():]}", how)
        return
    clock = w.TIME.match(line)
    start = clock.end() if clock else 0
    label = w.LABEL.match(line) or w.LABEL.match(line, start)
    value = line[label.end():] if label else ""
    cue = w.CUE.search(value[:30]) if label and label.lastgroup == "attraction" else None
    if cue and cue.lastgroup in MEALS and w.AT_A_PLACE.match(value, cue.end()):
        label, line, start = None, value, 0  # "Activity: lunch at ..."
    if label:
        if label.lastgroup == "transportation" and value and w.MODE.match(label["transportation"]):
            value = line[label.start():]  # the label says the mode
        events.append(Event(label.lastgroup, value, "field" if value else "open"))
        return
    said, led = prose_events(line[start:], trip, names), w.CUE.match(line, start)
    listed = how == "open" and kind != "line"
    if said and (led or not listed or said[0].slot != slot):
        events += said
    elif listed or how == "open" and not text:  # an item of a list may hold a cue within its name
        item = line if clock and clock[0].strip().isalpha() else line[start:]  # "Morning Glory"
        events[-1] = Event(slot, f"{text}; {item}" if text else item, how)
    else:
        flies = w.FLIGHT_NUMBER.search(line, start) and names.way(line[start:])
        events.append(Event("transportation", line, "field") if flies else
                      Event("?", line[start:], clock[0] if clock else ""))


def prose_events(line, trip, names):
    """The events that a sentence's cues announce; a word within a name is no cue."""
    found = list(w.CUE.finditer(line))
    spans = [city.span() for city in names.cities.finditer(line)] if found else []
    for word in FIRST.finditer(line) if found else ():
        venues = (names.venue(line, word.start(), table, trip) for table in set(TABLE_OF.values()))
        spans += [(word.start(), venue.end) for venue in venues if venue]
    cues = []
    for cue in found:
        within = any(start <= cue.start() < end for start, end in spans)
        if not within and announces(cue, cues, line, names):
            cues.append(cue)
    events, begins = [], 0
    told = [name_before(cue, line, cues[:i]) for i, cue in enumerate(cues)]
    for cue, name, following, ahead in zip_longest(cues, told, cues[1:], told[1:]):
        end = ahead[0] if ahead else following.start() if following else len(line)
        text = name[1] if name else line[cue.end():end]
        text = w.BRIDGE.sub("", text) if following else text
        if cue.lastgroup == "attraction" and end == cue.end():
            continue  # "Head to X for lunch"
        if cue.lastgroup == "transportation":
            lead, text = line[begins:cue.start()], line[cue.start():end]
            if events and events[-1].slot == "transportation":
                text = events.pop().text + text
            elif not names.way(text) and (names.way(lead) or [""])[0]:  # "from A to B by Flight F1"
                text = lead + text
        begins = cue.end()
        how = "check-in" if cue[0][:5].lower() == "check" else "prose"
        events.append(Event(cue.lastgroup, text, how))
    return events


def name_before(cue, line, before):
    """(start, name) of a venue that stands before its meal: "X for lunch", "X (lunch)"."""
    if cue.lastgroup not in MEALS or w.AT_A_PLACE.match(line, cue.end()):
        return None
    begins = before[-1].end() if before else 0
    near = max(begins, cue.start() - 120)
    at = start = max([near, *(stop.end() for stop in w.STEP.finditer(line, near, cue.start()))])
    while lead := w.LEAD.match(line, at, cue.start()):
        at = lead.end()
    name = w.FOR_MEAL.match(line, at, cue.start())
    said = name and (" " in name[1].strip() or at > start + 1 or start == begins > 0)
    said = said and (name[0][-1] == " " or line[cue.end():][:1] in tuple("),;"))
    return (start, name[1]) if said and not w.MOVE.match(name[0]) else None


def announces(cue, before, line, names):
    """Does a cue announce an event? before: the cues that do so further left in the line."""
    rest = line[cue.end():cue.end() + 200]
    if cue.lastgroup in MEALS:
        return (w.AT_A_PLACE.match(rest) or name_before(cue, line, before)
                or rest[:1] in ", " and line[:cue.start()].lower().endswith("for "))
    if cue.lastgroup == "transportation":
        return w.FLIGHT_NUMBER.search(cue[0] + rest) or names.way(rest) or (
            w.BY.search(line[:cue.start()][-30:])
            and (names.way(line[:cue.start()][-200:]) or [""])[0])  # it says from where to where
    if cue.lastgroup == "attraction" and before and before[-1].lastgroup in MEALS:
        between = line[before[-1].end():cue.start()]  # "for lunch, head to ..." is one event
        return len(between) >= 6 or between[0] in ".!?"
    return True


def best_telling(days):
    """A text may tell its days several times: take the fullest telling, of equals the last."""
    starts = [i for i, day in enumerate(days) if not i or day.number <= days[i - 1].number]
    tellings = [days[i:j] for i, j in zip(starts, [*starts[1:], None], strict=False)]
    sizes = [sum(event.slot in FIELDS for day in run for event in day.events) for run in tellings]
    best = max(zip(sizes, map(len, tellings), starts, tellings, strict=True), default=[()])[-1]
    lasts = [after.number - 1 for after in best[1:]] + [99]  # "Days 2-3" end where day 3 begins
    return [day._replace(number=n) for day, last in zip(best, lasts, strict=False)
            for n in range(day.number, min(day.last, last) + 1)]


# ---------------------------------------------------------------- plan
def ends_of_day(told, before, home, names):
    """(start, end): a day's cities, equal on a day without travel. before: the day before's end.

    A way in the title counts for more than the rides, they for more than a city in the title.
    """
    ways = [names.way(event.text) for event in told.events if event.slot == "transportation"]
    rides = [way for way in ways if way and way[0] != way[1]]
    ride = (rides[0][0] or before, rides[-1][1]) if rides else None  # of the day as a whole
    label = next((it.text for it in told.events if it.slot == "city" and names.city(it.text)), "")
    title = label or w.DATE.sub("", told.heading, 1).strip(" :;-–—,.()|")
    title = re.sub(r"^[^\w\[\"'(]+", "", title)
    title = title if label or len(told.heading) < 90 else ""  # a paragraph is no title
    stated = names.way(title if "from " in title.lower() else f"from {title}")
    city = names.city(label)
    if stated and stated[0]:
        return stated
    if stated and (not ride or stated[1] in ride):  # "to X"
        return ride[0] if ride else before, stated[1]
    if ride and (stated or not label or city in ride):
        return ride
    if label:
        return city, city
    if known := list(names.cities.finditer(title)):
        titled = known[-1].start() or w.NO_CITY_TITLE.match(title[known[-1].end():].lstrip(" '"))
        city = known[-1][0] if titled else names.city(title)
        arrives = w.MOVE.match(title) and not title.lower().startswith(("depart", "explor"))
        return before if arrives else city, city
    if ways and re.search(r"\b(?:return|home|back)\b", title, re.I):
        return before, home
    unknown = re.fullmatch(r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*){0,3}", title)
    if unknown and not w.NO_CITY_TITLE.search(title):
        return title, title
    return before, before  # nothing tells, so the traveller stays


def transportation(text, start, end, names):
    """A ride in TravelPlanner's words; cities that the text leaves out are the day's."""
    text = w.GUESS.sub("", text).replace("¦", "|")
    number = w.FLIGHT_NUMBER.search(text)
    way = number and names.way(text[number.start():]) or names.way(text)
    bare = text
    for city in way or ():
        bare = bare.replace(city, "")  # "from Taxi Falls" is no taxi
    said = w.MODE.search(bare)
    mode = "Flight" if number else w.MODES.get(said and said.lastgroup, "")
    if not mode and (way or text[:4].lower() in ("from", "cost")) and not w.OTHER_MODE.search(bare):
        mode = "Self-driving"
    if not mode or mode != "Flight" and not way and start == end:
        text = text.replace("$", "").strip(" .")
        named = w.MODE.sub(lambda word: w.MODES[word.lastgroup], text, 1)
        return f"{mode}, {text}" if mode and not said else named
    start, end = (way[0] or start, way[1]) if way else (start, end)
    if mode == "Flight":
        row = names.database.flight(number[1]) if number and number[1] else None
        stored = (row.departure, row.arrival) if row else ("-", "-")
        clocks = w.AT_TIME.findall(text)
        times = [time for late, time in clocks if not late][:2]
        leaves, lands = [*times, *stored[len(times):]]
        lands = next((time for late, time in clocks if late), lands)
        number = number[1] or number[2] if number else "-"
        return (f"Flight Number: {number}, from {start} to {end}, "
                f"Departure Time: {leaves}, Arrival Time: {lands}")
    parts = [f"{mode}, from {start} to {end}"]
    for word, detail in w.DETAILS.items():
        if value := detail.search(text):
            parts.append(f"{word}: {value[value.lastindex].strip()}")
    return ", ".join(parts)


def fill_day(told, before, home, names):
    """(5) One day's plan, and the city where it ends. before: where the day before ended."""
    start, end = ends_of_day(told, before, home, names)
    city = f"from {start} to {end}" if start != end else end
    day = {"day": told.number, **dict.fromkeys(FIELDS, "-"), "current_city": city}
    cities = list(dict.fromkeys([start, end] if end == home else [end, start]))
    sights = []
    for slot, text, how in told.events:
        slot = slot_of(text, how, cities, names) if slot == "?" else slot
        nothing, prose = w.NO_VENUE.match(text), how not in ("field", "open")
        nothing_or_price = nothing or w.MONEY.match(text)
        if slot == "transportation" and day[slot] == "-" and not nothing_or_price:
            day[slot] = transportation(text, start, end, names)
        if slot not in TABLE_OF or day[slot] != "-" and slot != "attraction":
            continue  # of two lunches the first
        here = [end] if slot == "accommodation" else cities
        if nothing and not names.venue(text, 0, TABLE_OF[slot], here):
            continue
        if slot == "accommodation" and w.SAME.match(text):
            continue
        found = list(names.venues_in(text, slot, here, prose))
        if slot == "attraction":  # prose may come back to a sight; a list that does so is at fault
            sights += [sight for sight in found if not prose or sight not in sights]
            found = [";".join(sights) + ";"] if sights else []
        day[slot] = found[0] if found else "-"
    return day, end


def slot_of(text, clock, cities, names):
    """The slot of a line that only a name tells: a sight, or a restaurant at a mealtime."""
    if names.venue(text, 0, "attractions", cities):
        return "attraction"
    bed = re.search(r"\bnight\b|\(hotel", f"{clock}{text}", re.I)
    if bed and names.venue(text, 0, "hotels", cities) or bed and clock and "/night" in text:
        return "accommodation"
    part = clock.lower() if names.venue(text, 0, "restaurants", cities) else ""
    meal = "breakfast" if "morning" in part else "lunch"
    return "dinner" if re.search("evening|night", part) else meal if part else "?"


def carry_stays(plan, told):
    """Fill nights whose hotel is told once: "same hotel", or a check-in that is not repeated."""
    nights = [[event for event in day.events if event.slot == "accommodation"] for day in told]
    lasting = {stay.how for night in nights for stay in night if stay.text.strip()} == {"check-in"}
    for i, day in enumerate(plan[1:], 1):
        lasting = lasting or any(w.FOR_NIGHTS.search(stay.text) for stay in nights[i - 1])
        same = any(w.SAME.match(stay.text) for stay in nights[i]) or lasting and not nights[i]
        if same and day["accommodation"] == "-" and not day["current_city"].startswith("from "):
            day["accommodation"] = plan[i - 1]["accommodation"]


def read_plan(text, task, database):
    """(plan, the text's lines that the reader did not use, their share or None without a text).

    plan: TravelPlanner's list of days, or None where the text holds none. Never raises.
    """
    if not isinstance(text, str):
        return None, [], None
    names, home = names_of(database), task.get("org") or ""
    try:
        lines = list(unfold(text[:LONGEST_REPLY], names))
    except ValueError:  # Python reads and writes no number of more than 4,300 digits
        return None, [], 1.0
    cities = Counter(city for _, line in lines for city in names.cities.findall(line))
    (overview, *days), idle = read_days(lines, [city for city, _ in cities.most_common(8)], names)
    told = best_telling(days)
    if not any(event.slot == "accommodation" for day in told for event in day.events):
        hotels = [event for event in overview.events if event.slot == "accommodation"]
        told[:-1] = [day._replace(events=day.events + hotels) for day in told[:-1]]
    plan, end = [], home
    for day in told:
        filled, end = fill_day(day, end, home, names)
        plan.append(filled)
    carry_stays(plan, told)
    said = any(day[slot] != "-" for day in plan for slot in FIELDS[1:])
    return plan if said else None, idle, len(idle) / max(sum(bool(line) for _, line in lines), 1)


def parse_plan(text, task, database):
    """The plan of an itinerary text, or None."""
    return read_plan(text, task, database)[0]


def itinerary(plan):
    """The plan as an agent's answer: names and flight numbers in brackets, cities once a day."""
    lines = []
    for day in plan:
        where, way = day["current_city"].removeprefix("from "), day["transportation"]
        lines.append(f"Day {day['day']}: {where}")
        if way.startswith("Flight Number: "):
            number = way.split(",")[0].removeprefix("Flight Number: ")
            lines.append(f"Flight from {where} [{number}]")
        elif way != "-":
            lines.append(f"{way.split(',')[0]} from {where}")
        for slot in SLOTS:
            if day[slot] != "-":
                name = day[slot].rstrip(";").rsplit(", ", 1)[0]
                lines.append(f"{slot.capitalize()}: [{name}]")
    return "\n".join(lines)


# ---------------------------------------------------------------- by an LLM
def format_plan(text, task, model, url, cache=None, api_key=None):
    """Itinerary text -> plan, or None when the model finds none. cache: a folder of its plans."""
    prompt = (PROMPTS / "itinerary.txt").read_text(encoding="utf-8")
    ask = f"Request:\n{task.get('query', '')}\n\nItinerary:\n{text}"
    key = hashlib.sha256(json.dumps([model, prompt, ask]).encode()).hexdigest()
    path = Path(cache) / f"{key}.json" if cache else None
    if path and path.exists():
        return json.loads(path.read_text())
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": ask}]
    for _ in range(2):  # a reply without a list is asked for once more, and never kept
        reply = chat(url, model, messages, 0.0, max_tokens=8192, api_key=api_key)
        days = load_json(reply)
        if isinstance(days, list):
            plan = [clean_day(day, i) for i, day in enumerate(days, 1) if isinstance(day, dict)]
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f".{uuid.uuid4().hex}")  # no other thread writes this one
                part.write_text(json.dumps(plan or None))
                part.replace(path)
            return plan or None
    return None


def clean_day(day, number):
    """A day as an LLM wrote it -> the eight fields, with cities and driving in uniform words."""
    clean = {"day": number}
    for field in FIELDS:
        value = day.get(field) or "-"
        value = ";".join(map(str, value)) + ";" if isinstance(value, list) else str(value).strip()
        if field in ("current_city", "transportation"):
            value = re.sub(r"\s*\([^()]{0,60}\)", "", value)
        mode = w.MODE.match(value) if field == "transportation" else None
        if mode and "Flight Number" not in value:
            value = w.MODES[mode.lastgroup] + value[mode.end():]
        clean[field] = value
    return clean


# ---------------------------------------------------------------- main
def read_texts(path):
    """Yield (line, task, text) of a jsonl file of episodes or texts."""
    with errors_name(path), open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                task = row["task"] if isinstance(row.get("task"), dict) else row
                yield row, task, row["answer" if "answer" in row else "text"]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: needs a JSON object with an answer or a "
                                 f"text ({error!r:.80})") from None


def read_all(args):
    """Print the rows with their plans."""
    database = open_database(args.database)
    key = Path(args.llm_key).read_text().strip() if args.llm_key else None
    for row, task, text in list(read_texts(args.file)):  # all are looked at before one is paid
        if args.llm_url and text:
            plan = format_plan(text, task, args.llm_model, args.llm_url, args.cache, api_key=key)
        else:
            plan = parse_plan(text, task, database.of(task))
        print(json.dumps({**row, "plan": plan}, ensure_ascii=False))


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", help="jsonl file of episodes or texts")
    add("--database", metavar="DIR", help="folder of the tables whose names the rules look for "
        "(default: $STAR_DATABASE, else database/mini)")
    add("--llm-url", type=web_address, metavar="URL",
        help="let an LLM at this OpenAI-compatible endpoint read")
    add("--llm-model", metavar="NAME", help="the LLM's name at that endpoint")
    add("--llm-key", metavar="FILE", help="file that holds the endpoint's API key")
    add("--cache", metavar="DIR", help="folder that keeps the LLM's plans, so that the same text "
        "is not sent twice (default: none)")
    args = parser.parse_args(argv)
    if bool(args.llm_url) != bool(args.llm_model):
        parser.error("an LLM needs --llm-url and --llm-model")
    run("format_plan.py", read_all, args)


if __name__ == "__main__":
    main()
