"""
Itinerary text -> plan: an agent's answer becomes TravelPlanner's list of days.

    (1) lines   markdown and JSON become plain lines
    (2) days    "Day 2: ..." opens a day; a line that begins with a label ("Lunch: ...") or with a
                mode of travel gives one of its fields, and the first one counts; other lines are
                ignored
    (3) names   a name ends at its bracket, else before a remark on it: a price, a cuisine
    (4) plan    fields are put into TravelPlanner's form; a place without a city gets the day's city

The rules read the format that database/prompts/system.txt states, and its natural variants. They
add and correct nothing: a name that is not in the database stays as it was written, so that the
judge can call it a hallucination. The database only shows where a name ends. Every other text is
for format_plan, which asks an LLM, as STAR does (arXiv:2603.21972).

Reads   FILE.jsonl: episodes (task, answer), or texts (text, and org as context)
Writes  stdout: each record with its "plan" (null if the text has none)

    python format_plan.py FILE.jsonl --database DIR > plans.jsonl
    python format_plan.py FILE.jsonl --reader http://localhost:8000/v1=MODEL
"""
import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from itertools import islice, pairwise

from evaluate import Refused, chat, endpoint, read_key, spoken
from runtime import Mistake, Parser, read_jsonl, run
from sandbox import PROMPTS, Action, Episode, open_database

MEALS = ("breakfast", "lunch", "dinner")
SLOTS = ("breakfast", "attraction", "lunch", "dinner", "accommodation")
FIELDS = ("current_city", "transportation", *SLOTS)
TABLE_OF = {**dict.fromkeys(MEALS, "restaurants"), "attraction": "attractions",
            "accommodation": "hotels"}
LONGEST_TEXT, LONGEST_LINE, MOST_LINES = 200_000, 2_000, 2_000  # longer ones are cut
MOST_PIECES = 60  # attractions or rides of a day that are read
CONCURRENCY = 32  # answers that a formatter reads at once
COSTS = "formatter failed", "formatter tokens"  # the formatter's entries in a score


# Every quantifier over free text is bounded or ends the pattern: matching takes linear time.

def pattern(text):
    """Compile a pattern that ignores case; line breaks and indentation in it are ignored."""
    return re.compile(re.sub(r"\n\s*", "", text), re.I)


# ---------------------------------------------------------------- (1) lines
TYPOGRAPHY = str.maketrans("’‘“”：，；（）【】［］｜→\u00a0\u3000\t", "''\"\":,;()[][]|>   ",
                           "*`\r\ufe0f")
STRUCK = re.compile(r"~~[^~\n]{0,300}~~")
BULLET = re.compile(r"(?:[^\w\[\"'($~@]{1,9}|\d{1,2}[.)] )*")  # also numbers, emoji, "|" of tables
JSON_START = re.compile(r"[\[{](?=\s{0,99}[\[\]{\"])")


def read_lines(text):
    """Yield (whether the line is a bullet or indented, the plain line)."""
    text = STRUCK.sub("", unfold_json(text[:LONGEST_TEXT]).translate(TYPOGRAPHY))
    for raw in filter(str.strip, text.split("\n")):
        bullet = BULLET.match(raw[:LONGEST_LINE]).end()
        if line := raw[bullet:LONGEST_LINE].strip():
            yield bullet > 0 and not raw.startswith(("#", "|")), line


def json_values(text):
    """Yield (begin, end, value) of the JSON lists and objects in a text, at most 40."""
    decoder, end = json.JSONDecoder(strict=False), 0
    for start in islice(JSON_START.finditer(text), 40):
        if start.start() >= end:
            with suppress(ValueError, RecursionError):
                value, end = decoder.raw_decode(text, start.start())
                yield start.start(), end, value


def unfold_json(text):
    """The text, in which each JSON value that holds days is replaced by lines."""
    parts, at = [], 0
    for start, end, value in json_values(text):
        with suppress(RecursionError):
            lines = list(islice(json_lines(value), MOST_LINES))
            if any(map(DAY.match, lines)):
                parts, at = [*parts, text[at:start], *lines], end
    return "\n".join([*parts, text[at:]])


def json_lines(value, key="", depth=0):
    """Yield a JSON value as lines: "Day N", "key: text"."""
    if isinstance(value, list) and depth < 9:
        for number, one in enumerate(value, 1):
            if isinstance(one, dict) and {*one} & {*FIELDS} and not {*one} & {"day", "days"}:
                one = {"day": number} | one
            yield from json_lines(one, key, depth + 1)
    elif isinstance(value, dict) and depth < 9:
        if "name" in value:
            yield f"{key}: {value['name']}" + (f", {value['city']}" if "city" in value else "")
            return
        if "flight_number" in value or "mode" in value:
            value = {key: " ".join(f"{k} {v}" for k, v in value.items() if v)}
        for name, one in sorted(value.items(), key=lambda item: item[0] not in ("day", "days")):
            name = str(name).replace("_", " ")
            if name in ("day", "days") and isinstance(one, (int, str)):
                yield f"Day {str(one).lower().removeprefix('day')}"
                continue
            if isinstance(one, dict) and DAY.match(name):
                yield name
            yield from json_lines(one, name, depth + 1)
    elif value is not None:
        yield f"{key}: {value}"


# ---------------------------------------------------------------- (2) days
DAY = pattern(r"""[(\[]?days? ?[-#:]? ?(\d{1,2})\b[^\w$\[(~"']{0,9}""")
TIME = r"(?:(?:early |late )?(?:morning|afternoon|evening|night) ?[:|–—-]? ?)?"
LABELS = {
    "current_city": "current city|city|location|destination",
    "transportation": "transport(?:ation)?|travel|getting (?:there|around|back)|flight number",
    "breakfast": "breakfast", "lunch": "lunch", "dinner": "dinner",
    "attraction": "attractions?|activit(?:y|ies)|sights?|sightseeing|see|visits?|places to visit",
    "accommodation": "accommodations?|hotel|lodging|stay|overnight|check[ -]?in"}
FIELD = pattern(rf"""{TIME}(?P<revised>(?:revised|updated|corrected|adjusted|final|new) )?
    (?:{'|'.join(f'(?P<{slot}>{words})' for slot, words in LABELS.items())})
    (?: ?\d)?(?: ?\([^()]{{0,40}}\))?(?: ?[:=|·] ?| [–—-] | ?(?:at|to) (?=(?-i:[\[A-Z]))|$)""")
RIDE = pattern(rf"""{TIME}(?:take (?:an? )?)?(?P<transportation>
    (?:flight|fly|taxi|self-? ?driv(?:e|ing)|driv(?:e|ing))\b(?! ?time))""")
SECTION = pattern(r"""(?:(?-i:[A-Z])[\w&'-]{0,20} ){0,3}(?:costs?|budget|expenses?|summary|
    breakdown|notes?|tips?|highlights?|totals?|checks?|alternatives?)\b[:(*-]{0,3}$""")


class Day:
    """What a text says about a day: its number, its title, and {slot: [text, ..]}; `appendix` has
    what stands in a section after the day (costs, notes), which is not about the last day."""

    def __init__(self, number, title):
        self.number, self.title, self.fields, self.appendix = number, title, {}, {}
        self.target = self.fields

    def add(self, slot, text, revised=False):
        """Keep a field's text, if it is the first, a correction, a further sight or ride."""
        texts = self.target.setdefault(slot, [])
        several = slot in ("attraction", "transportation") and len(texts) < MOST_PIECES
        if revised or not texts or several:
            texts[:] = [text] if revised else [*texts, text]

    def is_told(self):
        """Whether a field besides the city says something; a price alone says nothing."""
        return any(not NOTHING.match(text) for slot, texts in self.fields.items()
                   for text in texts if slot != "current_city")


def read_days(lines, names):
    """(2) lines -> (days, unused lines). A text may give its days several times, as a draft and a
    final plan: the last version that says something about every day counts."""
    versions, day, slot, unused = [[]], Day(0, ""), None, []
    for listed, line in lines:
        heading = DAY.match(line)
        if heading:
            line = line[heading.end():]
            number = int(heading[1])
            if number != day.number or not FIELD.match(line):
                if number <= day.number:
                    versions.append([])
                day, slot = Day(number, line), None
                versions[-1].append(day)
        found = FIELD.match(line) or RIDE.match(line)
        if found and (found.re is FIELD or FLIGHT_NUMBER.search(line) or names.route(line)):
            slot = found.lastgroup
            if text := line[found.end() if found.re is FIELD else found.start(slot):]:
                day.add(slot, text, found.re is FIELD and found["revised"])
                slot = None
        elif slot and listed:
            day.add(slot, line)  # below a label without text
        elif not heading:
            unused.append(line)
            slot = None
            if SECTION.match(line):
                day.target = day.appendix
    for days in versions:
        for each in days[:-1]:
            each.fields = each.appendix | each.fields

    def told(days):
        number = sum(map(Day.is_told, days))
        return number, number - len(days)

    return max(reversed(versions), key=told), unused


# ---------------------------------------------------------------- (3) names
LABEL = r"""(?:average|avg|costs?|prices?|cuisines?|address|room type|rat(?:ed|ings?)|contact|
    phone|website|minimum|max\w{0,5}|reviews?|house rules?|note|per)\b"""
KIND = r"""(?:american|italian|mexican|indian|chinese|french|mediterranean|seafood|pizza|fast food|
    desserts?|tea|cafe|bbq|bakery|free|private|shared|entire)\b"""
REMARK = pattern(rf""" ?[|;·★⭐>]|,? ?\$\d|(?:,| [–—-]| ?\() ?(?:[~≈$\d]|{LABEL}|{KIND})|
    (?: [–—-]| ?\() ?(?-i:(?!the [A-Z])[a-z])|
    \ instead of | or |[.,]?\ ?$""")
DETAIL = pattern(rf"""[~≈$\d]|{LABEL}|[A-Z][\w ]{{0,20}}:""")
SENTENCE = re.compile(r" ?\. ")  # after a name of the database
NOTHING = pattern(r"""[\W_]*(?:(?:none|n/?a|nil|null|tbd|not|no|free|on your own|nothing|skip)\b
    (?! ?(?-i:[A-Z&'.]))|\$|$)|-+\ ?(?:[(,.;|$]|$)""")
UNDERWAY = pattern(r"""[\W_]*(?:(?:on|in|at|en|during)[ -](?:the |a )?(?:flight|plane|board|way|
    road|route|home|transit|airport)|(?:return |returning |back )?home)\b
    (?! ?(?-i:[A-Z&'.]))""")
LEAD = pattern(r"""\A(?:\d{1,2}[.)]|at|visit|explore|check(?: |-)?in(?:to| to| at)?|stay at)
    \ (?=["'\[@\d]|(?-i:[A-Z]))""")
JOINT = re.compile(r"(?: ?\([^()]{0,60}\))?(?:,? (?:and|&) | ?[,;/·>] ?)")
COMMA = re.compile(r", ?| ?\(| in ")  # before a city
END = re.compile(r" ?(?:[,;.:|()\]]|$)| [–—-]")  # after it
STATE = re.compile(r"(?:, ?| ?\()([A-Z]{2}\b|[A-Z][a-z]{1,15}(?: [A-Z][a-z]{1,15})?)\)?")
ARROW = pattern(r"(?:, ?(?-i:[A-Z])[\w ]{1,20}| ?\([^()]{0,40}\))? ?(?:\bto\b|[-=]?>|–|—|-|➜) ?")
ROUTE = pattern(r"""^(?:.{0,60}\bfrom )?(?-i:(?=[A-Z]))([^|;,()]{1,60}?) to
    \ ((?-i:(?=[A-Z]))[^|;,:()\[]{1,60}?)(?= ?(?:[|;,:()\[.]|$))""")


class Names:
    """The cities and venues of a database: finds them in a text, and where their names end."""

    def __init__(self, database):
        self.database = database
        self.cities = dict.fromkeys((*database.hotel_cities, *database.restaurant_cities,
                                     *database.attraction_cities), "") | database.cities
        names = sorted(map(re.escape, self.cities), key=len, reverse=True)
        self.city = re.compile(rf"(?<!\w)(?:{'|'.join(names)})(?!\w)")

    @lru_cache(maxsize=4096)  # noqa: B019  lives as long as its database
    def stored(self, table, city):
        """[(the name as a text shows it, the name)] of a city's places, longest first."""
        names = {row.name.strip() for row in getattr(self.database, table)(city)}
        return sorted(((name.translate(TYPOGRAPHY).lower(), name) for name in names),
                      key=lambda pair: (-len(pair[0]), pair))

    def known(self, text, slot, cities):
        """(length, name, city) of the longest place of these cities that begins a text."""
        low = text[:300].lower()
        found = ((len(shown), name, city) for city in cities
                 for shown, name in self.stored(TABLE_OF[slot], city)
                 if low.startswith(shown) and not low[len(shown):len(shown) + 1].isalnum())
        return max(found, key=lambda each: each[0], default=(0, "", cities[0]))

    def route(self, text):
        """(from, to, begin, end) of the first route in a text, "A to B" or "A -> B", or None."""
        text = text[:400]
        cities = list(self.city.finditer(text))
        for a, b in pairwise(cities):
            if ARROW.fullmatch(text, a.end(), b.start()):
                return a[0], b[0], a.start(), b.end()
        found = ROUTE.search(text)
        return found and (found[1], found[2], found.start(1), found.end(2))

    def city_after(self, text, at):
        """(where the name ends, city, where the city and its state end) of the first ", City" in a
        text; None without one. at: from where it is searched."""
        for comma in COMMA.finditer(text, at):
            if (city := self.city.match(text, comma.end())) and END.match(text, city.end()):
                state = STATE.match(text, city.end())
                known = state and (len(state[1]) == 2 or state[1] == self.cities[city[0]])
                return comma.start(), city[0], state.end() if known else city.end()
        return None

    def place(self, text, slot, cities):
        """("Name, City", rest of the text) of the place at the beginning of a text."""
        size, name, home = self.known(text, slot, cities)
        at = size
        if not size and text[0] in '["':
            close = text.find("]" if text[0] == "[" else '"',
                              1 + self.known(text[1:], slot, cities)[0])
            inner = text[1:close] if close > 0 else text[1:]
            size, name, home = self.known(inner, slot, cities)
            at, text = size or len(inner), inner + (text[close + 1:] if close > 0 else "")
        end = at if size and SENTENCE.match(text, at) else REMARK.search(text, at).start()
        found = self.city_after(text[:end], at)
        joint = JOINT.match(text, at) if slot == "attraction" and size and not (
            found and found[0] == at) else None
        more = text[joint.end():] if joint else ""
        if more.startswith("[") or more and self.known(more, slot, cities)[0]:
            return f"{name}, {home}", text[at:]
        if found:
            place = name if found[0] == size else text[:found[0]].strip()
            return f"{place}, {found[1]}", text[found[2]:]
        head, comma, tail = text[:end].rpartition(", ")
        if comma and len(head) >= at and tail[:1].isupper():
            return f"{head}, {tail.strip()}", text[end:]  # an unknown city
        return f"{name if end == size else text[:end].strip(' ,.')}, {home}", text[end:]

    def places(self, text, slot, cities):
        """Yield "Name, City" of a field: its place, or all its sights."""
        for part in islice(text.split(";"), MOST_PIECES) if slot == "attraction" else [text]:
            for _ in range(20):
                part = part.strip()
                for _ in range(2):
                    known = self.known(part.lstrip('["'), slot, cities)[0]
                    part = part if known or UNDERWAY.match(part) else LEAD.sub("", part, 1)
                if not known and (NOTHING.match(part.lstrip('["')) or UNDERWAY.match(part)
                                  or part[0].islower() or DETAIL.match(part)):
                    break
                place, rest = self.place(part, slot, cities)
                yield place
                joint = JOINT.match(rest)
                if slot != "attraction" or not joint:
                    break
                part = rest[joint.end():]


names_of = cache(Names)  # collected once per database


# ---------------------------------------------------------------- (4) plan
RIDES = {"flight": "Flight", "taxi": "Taxi", "driving": "Self-driving"}
MODE = pattern(r"""(?<![\w-])(?:(?:by|in|via|take) (?:an? )?)?(?:
    (?P<flight>flights?\b|fly(?:ing)?\b|airline|(?:air)?plane\b)|
    (?P<taxi>(?:taxi|cab|uber|lyft)\b)|
    (?P<driving>self-? ?driv\w{0,9}|driv\w{1,9}\b(?! (?:time|dist|dur))|
    (?:(?:rental|rented|hire) )?cars?\b|rental\b))""")
FLIGHT_NUMBER = re.compile(r"\bF\d{3,9}\b")


def ride(text, names):
    """A ride in TravelPlanner's form, without its times, lengths and prices, which are in the
    database; as it is written if its mode is none that we know; "-" if it is none."""
    number, route, mode = FLIGHT_NUMBER.search(text), names.route(text), MODE.match(text)
    if NOTHING.match(text.strip("[] ")) or not (number or route or mode):
        return "-"
    before, after = (text[:route[2]], text[route[3]:]) if route else (text, "")
    before = before.removesuffix("from ").strip(" :,.-")
    mode = MODE.fullmatch(before) if before else MODE.search(after)
    if not number and not mode and (before or after[:1] not in ("", ",")):
        return text.replace("$", "")
    kind = RIDES[mode.lastgroup] if mode else "Self-driving"
    kind = f"Flight Number: {number[0]}" if number else kind
    return f"{kind}, from {route[0]} to {route[1]}" if route else kind


def ends_of_day(day, before, names):
    """(start, end): the cities of a day, equal on a day without travel. before: the end of the day
    before, which is this day's city unless the text names another."""
    label, title = next(iter(day.fields.get("current_city", ())), ""), day.title
    for text in filter(None, (label, title)):
        if route := names.route(text):
            return route[:2]
    rides = [route for text in day.fields.get("transportation", ()) if (route := names.route(text))]
    found = names.city.search(label or title)
    named = label.split(",")[0].strip(" .[]\"'") or before
    city = found[0] if found else named  # also one that is not in the database
    if rides and (not label or city in (rides[0][0], rides[-1][1])):
        return rides[0][0], rides[-1][1]
    return city, city


def fill_day(day, before, home, names):
    """(the plan of a day, the city where it ends). before: where the day before ended."""
    start, end = ends_of_day(day, before, names)
    filled = {"day": day.number, **dict.fromkeys(FIELDS, "-")}
    filled["current_city"] = f"from {start} to {end}" if start != end else end
    rides = [ride(text, names) for text in day.fields.get("transportation", ())]
    rides = dict.fromkeys(each for each in rides if each != "-")
    filled["transportation"] = "; ".join(rides) or "-"
    cities = list(dict.fromkeys([start, end] if end == home else [end, start]))
    for slot in SLOTS:
        places = [place for text in day.fields.get(slot, ()) for place in names.places(
            text, slot, [end] if slot == "accommodation" else cities)]
        if places:
            filled[slot] = ("".join(f"{each};" for each in places) if slot == "attraction"
                            else places[0])
    return filled, end


def read_plan(text, task, database):
    """(plan, unused lines, their share of all lines or None if there is no text).

    plan: TravelPlanner's list of days, or None if the text has none. Never raises.
    """
    if not isinstance(text, str):
        return None, [], None
    names, home, plan = names_of(database), task.get("org") or "", []
    lines = list(islice(read_lines(text), MOST_LINES))
    days, unused = read_days(lines, names)
    city = home
    for day in days:
        filled, city = fill_day(day, city, home, names)
        plan.append(filled)
    has_fields = any(day[slot] != "-" for day in plan for slot in FIELDS[1:])
    return plan if has_fields else None, unused, len(unused) / max(len(lines), 1)


def itinerary(plan):
    """The plan as an agent's answer, in the format that the system prompt states."""
    lines, home = [], plan[0]["current_city"].removeprefix("from ").partition(" to ")[0]
    for day in plan:
        where, ride = day["current_city"].removeprefix("from "), day["transportation"]
        start, _, end = where.partition(" to ")
        here = start if end == home else end or start
        lines.append(f"Day {day['day']}: {where}")
        if ride.startswith("Flight Number: "):
            number = ride.split(",")[0].removeprefix("Flight Number: ")
            lines.append(f"Flight from {where} [{number}]")
        elif ride != "-":
            lines.append(f"{ride.split(',')[0]} from {where}")
        for slot in SLOTS:
            for place in day[slot].split(";") if slot == "attraction" else [day[slot]]:
                name, _, city = place.rpartition(", ")
                if name:
                    there = f", {city}" if city != here else ""
                    lines.append(f"{slot.capitalize()}: [{name}]{there}")
    return "\n".join(lines)


# ---------------------------------------------------------------- by an LLM
IN_BRACKETS = re.compile(r" ?\([^()]{0,60}\)")
STATE_OF_PLACE = re.compile(r"(,[^,;()]{1,60})\([^();]{0,60}\)(?= ?(?:;|$))")


def days_in(reply):
    """The days in a formatter's reply; of several lists, such as a draft and the plan, the longest
    and of equal ones the last. None without a list of days."""
    values = [value for _, _, value in json_values(reply)]
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    found = [value for value in values if isinstance(value, list) and all(
        isinstance(day, dict) and len(day.keys() & {*FIELDS}) > 1 for day in value)]
    return max(reversed(found), key=len, default=None)


def clean_day(day, number):
    """A day as an LLM wrote it -> the eight fields, with driving in uniform words and "City(State)"
    as "City"; the brackets of a name stay."""
    clean = {"day": number}
    for field in FIELDS:
        value = day.get(field) or "-"
        value = ";".join(map(str, value)) + ";" if isinstance(value, list) else str(value).strip()
        value = STATE_OF_PLACE.sub(r"\1", value) if field in SLOTS else IN_BRACKETS.sub("", value)
        mode = MODE.match(value) if field == "transportation" else None
        if mode and "Flight Number" not in value:
            value = RIDES[mode.lastgroup] + value[mode.end():]
        clean[field] = value
    return clean


class Reading(Episode):
    """The question which plan an itinerary has, as an episode that evaluate.py can play: it ends
    with a reply that has a list of days, the .plan, for which it asks twice."""

    plan = None

    def __init__(self, text, task):
        ask = f"Request:\n{task.get('query', '')}\n\nItinerary:\n{text[:LONGEST_TEXT]}"
        super().__init__(task | {"query": ask}, None, max_turns=1, strict=False, parse=self.parse,
                         system_prompt=(PROMPTS / "itinerary.txt").read_text(encoding="utf-8"))

    def parse(self, reply):
        days = days_in(spoken(reply))
        if days is None:
            return Action("error")
        self.plan = [clean_day(day, i) for i, day in enumerate(days, 1)] or None
        return Action("answer")

    def act(self, action):
        return "There is no list of days in it. Reply with the JSON list and nothing else."


def format_plan(text, task, model, url, **options):
    """(plan or None, tokens used) of an itinerary text, read by an LLM. Refused if its replies have
    no list of days, for which it is asked twice, or the endpoint refuses.

    options: those of evaluate.chat.
    """
    reading, tokens = Reading(text, task), 0
    for temperature in 0.0, 1.0:
        reply = chat(url, model, reading.messages, temperature, max_tokens=8192, **options)
        tokens += reply.tokens
        if reading.parse(reply).kind == "answer":
            return reading.plan, tokens
    raise Refused(f"{url}: two replies without a list of days, from model {model}")


class Reader:
    """Turns answers into plans by rules, or by an LLM (the formatter). Threads may share it.

    An answer on which the formatter fails is judged as an answer without a plan, and counted. If
    the endpoint itself is at fault, the run ends with evaluate.chat's ChatError, since an unread
    answer must not be judged as a bad one."""

    def __init__(self, endpoint=None, key=None):
        self.endpoint, self.key = endpoint, key
        self.asked = lru_cache(10_000)(self._ask)
        self.known = {}  # what the policy has read: {(text, query): as of _ask}

    def read(self, text, task, database):
        """(plan, unused lines, their share, costs). The first three are as in read_plan; an LLM
        does not report which lines it used."""
        key = text, task.get("query", "")
        if not self.endpoint and key not in self.known:
            return *read_plan(text, task, database), {}
        answered = isinstance(text, str)
        plan, problem, tokens = (self.known.get(key) or self.asked(*key)) if answered else (
            None, None, 0)
        unread = [f"the formatter failed: {problem}"] if problem else []
        costs = dict(zip(COSTS, (float(len(unread)), tokens), strict=True))
        return plan, unread, 1.0 if problem else None, costs

    def read_by(self, play, episodes, fits=None):
        """Yield these episodes once a model has read their answers; read() then has its plans.
        play(readings) plays the Readings; fits(messages): whether its context has room for them."""
        readings = {}
        for episode in episodes:
            key = episode.answer, episode.task["query"]
            reading = Reading(episode.answer or "", episode.task)
            if episode.answer is not None and (not fits or fits(reading.messages)):
                readings[reading] = key, episode
                continue
            if episode.answer is not None:
                self.known[key] = None, "it does not fit into the context", 0
            yield episode
        for reading in play(iter(readings)):
            key, episode = readings[reading]
            problem = None if reading.stop == "answer" else f"no list of days ({reading.stop})"
            self.known[key] = reading.plan, problem, reading.tokens or 0
            yield episode

    def _ask(self, text, query):
        """(plan, why there is none or None, tokens used)."""
        url, model = self.endpoint
        try:
            plan, tokens = format_plan(text, {"query": query}, model, url, api_key=self.key)
            return plan, None, tokens
        except Refused as error:
            return None, str(error), 0


def add_reader_flags(parser):
    """Add the flags that choose how answers become plans."""
    add = parser.add_argument
    add("--reader", type=reader_name, metavar="rules|policy|URL=MODEL", help="how an answer "
        "becomes a plan: rules (default), which read the stated format; or the LLM MODEL at an "
        "OpenAI-compatible endpoint, as in the STAR paper; or, in evaluate.py alone, policy: the "
        "model that plays")
    add("--reader-key", metavar="FILE", help="file that holds the API key of --reader")


def reader_name(text):
    """A flag type: None for rules, "policy", or (URL, MODEL)."""
    return {"rules": None, "policy": text}[text] if text in ("rules", "policy") else endpoint(text)


def open_reader(args):
    """The Reader that these flags choose; for a command without them, the rules."""
    reader, key = getattr(args, "reader", None), getattr(args, "reader_key", None)
    if reader == "policy":
        raise Mistake("--reader policy is for evaluate.py, where a model plays and then reads")
    if key and not reader:
        raise Mistake("--reader-key is the key of --reader URL=MODEL")
    return Reader(reader, read_key(key))


# ---------------------------------------------------------------- main
def read_all(args):
    """Print the rows of a file with their plans."""
    database, reader, rows = open_database(args.database), open_reader(args), read_jsonl(args.file)
    for number, row in enumerate(rows, 1):
        if not {"answer", "text"} & {*row}:
            raise Mistake(f"{args.file}, line {number}: needs an answer or a text")
    texts = [(row.get("answer", row.get("text")), row.get("task", row)) for row in rows]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        read = pool.map(lambda text, task: reader.read(text, task, database.of(task)),
                        *zip(*texts, strict=True))
        for number, (row, (plan, unread, *_)) in enumerate(zip(rows, read, strict=True), 1):
            if args.reader and unread:
                print(f"{args.file}, line {number}: {unread[0]}", file=sys.stderr)
            print(json.dumps({**row, "plan": plan}, ensure_ascii=False))


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="jsonl file of episodes or texts")
    parser.add_argument("--database", metavar="DIR", help="folder of the tables whose names the "
        "rules look for (default: $STAR_DATABASE, else database/mini)")
    add_reader_flags(parser)
    run("format_plan.py", read_all, parser.parse_args(argv))


if __name__ == "__main__":
    main()
