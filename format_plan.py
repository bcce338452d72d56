"""
Itinerary text -> plan: an agent's answer becomes TravelPlanner's list of days.

    (1) lines   JSON, tables and markdown become plain lines
    (2) days    "Day 2: ..." opens a day; a line that begins with a label ("Lunch: ...") or a verb
                ("Check into ...") tells one of its fields, and every other line is left alone
    (3) names   a name ends where a remark on it begins: a price, a cuisine, an alternative
    (4) plan    fields become TravelPlanner's words; a place without a city lies in the day's city

The reader completes, corrects and repairs nothing: a name that the database does not hold stays as
it was written, so that the judge can call it a hallucination. The database only helps to see where
a name ends. database/prompts/system.txt states the format; parse_plan reads it and its variants by
rules, offline. Free prose is for format_plan, which asks an LLM, as STAR did (arXiv:2603.21972).

Reads   FILE.jsonl: episodes (task, answer), or texts (text, and org as context)
Writes  stdout: each line again with its "plan" (null if the text has none)

    python format_plan.py FILE.jsonl --database DIR > plans.jsonl
    python format_plan.py FILE.jsonl --reader http://localhost:8000/v1=MODEL
"""
import argparse
import hashlib
import json
import re
import time
import uuid
from contextlib import suppress
from functools import cache, lru_cache
from itertools import groupby, islice
from pathlib import Path

from guard import Parser, naming, run, web_address
from sandbox import PROMPTS, open_database

MEALS = ("breakfast", "lunch", "dinner")
SLOTS = ("breakfast", "attraction", "lunch", "dinner", "accommodation")
FIELDS = ("current_city", "transportation", *SLOTS)
TABLE_OF = {**dict.fromkeys(MEALS, "restaurants"), "attraction": "attractions",
            "accommodation": "hotels"}
LONGEST_REPLY = 200_000  # characters; 32K tokens of English are some 130,000
LONGEST_LINE = 2_000  # characters; longer lines are cut before they are searched
MOST_VALUES, MOST_LINES = 40, 2_000  # JSON values that are tried in one text, lines out of one
# "maximum context length is ...", in all their words; no address or name of a model
NO_ROOM = re.compile(r"status 4(00|13|22)\b.*context|no context", re.DOTALL)


# ---------------------------------------------------------------- patterns
# Blanks are single when these are used, and every quantifier over free text is bounded, so that no
# pattern costs more than linear time.

def pattern(text):
    """Compile a pattern that ignores case; its line breaks and indentation are layout."""
    return re.compile(re.sub(r"\n\s*", "", text), re.I)


TYPOGRAPHY = str.maketrans("’‘“”：，；（）【】［］｜、\u00a0\u202f\u3000\t\r",
                           "''\"\":,;()[][]|;     ", "*`\0\ufe0f")
STRUCK = re.compile(r"~~[^~\n]{0,300}~~|(?<![^\W_])_+|_+(?![^\W_])")  # ~~gone~~, __underlined__
GAP, SEAM = re.compile(r"\s{2,9}|\n"), "\ue000"  # what is lost when a name is laid out in a line
BLANKS = re.compile(r"[^\S\n]+")
LINK = re.compile(r"\]\((?:https?:|www)[^\s()]{0,300}(?:\([^\s()]{0,99}\))?[^\s()]{0,99}\)")
BREAK, TAG = re.compile(r"<br ?/?>", re.I), re.compile(r"</?(?:b|i|em|strong)>", re.I)
JSON_START = re.compile(r"[\[{](?=\s{0,99}[\[{\"'])")
CELLS = re.compile(r"(?<!\\)\|")
# bullets, numbers, boxes and emoji before the text of a line
BULLET = re.compile(r"(?:[-+•·●▪‣◦–—>]+ +|#+ +|[•·●▪‣◦–—]+|\d{1,2}[.)] +|\[[ xX]?\] +|[\d]\u20e3 *|"
                    r"[^\w\s\[\](){\"'$#@&!?.,:;/\\|<>=+~^%-] *)*")

NUMBERS = {word: n for n, word in enumerate(
    "one two three four five six seven eight nine ten".split(), 1)}
FIX = r"(?:correct|revis|updat|adjust|chang|amend|new|final)\w{0,6}"
REVISED = pattern(rf"\b{FIX}\b")
DAY = pattern(rf"""(?P<fix>{FIX}(?: (?:to|for|on))?[ :,–—-]{{1,3}})?[(\[<=_-]{{0,9}} ?(?:the )?
    (?:days?[ _]?[-:#]? ?|d(?=\d))(?P<n>\d{{1,2}}|{'|'.join(NUMBERS)})(?![\w/-]\d|\w)
    (?:/\d| of \d)?(?! (?!from|to)(?-i:[a-z]{{2}}))[^\w$~\[({{"']{{0,9}}""")
MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
DATE = pattern(rf"""(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]{{0,6}},? )?(?:{MONTH}\.? \d{{1,2}}|
    \d{{1,2}}(?:st|nd|rd|th)? {MONTH}|\d{{4}}-\d\d-\d\d)(?:st|nd|rd|th)?(?:,? \d{{4}})?\b""")

LABELS = {
    "current_city": "current[ _]city|city|cities|location|destination|route|where",
    "transportation": r"""transport(?:ation)?|travel|getting (?:there|around|back|home)|train|bus|return(?: trip)?|
        (?:take |catch )?(?:an? |the |your )?(?:flights?|taxi|cab|uber)|fly|
        flight (?:number|no\.?)|(?:self-?\s?)?driv(?:e|ing)|(?:rental |hire )?car|rental""",
    "breakfast": r"breakfast|brunch|b(?= ?:)", "lunch": "lunch|l(?= ?:)",
    "dinner": "dinner|supper|d(?= ?:)",
    "attraction": r"""attractions?|activit(?:y|ies)|sightseeing|sights?|visits?|explore|
        (?:places|things) to (?:visit|see|do)""",
    "accommodation": r"""accommodations?|hotel|lodging|stay(?:ing)?|overnight(?: stay)?|
        check-?\s?in|where to stay|sleep|airbnb|night(?= ?:)"""}
NAMED = "|".join(f"(?P<{slot}>{words})" for slot, words in LABELS.items())
TIME = r"""(?:(?:early |late |mid-?)?(?:morning|noon|midday|afternoon|evening|night)\b|
    \(?\d{1,2}(?::\d\d)? ?(?:[ap]\.?m\.?)?(?: ?(?:-|–|to) ?\d{1,2}(?::\d\d)? ?(?:[ap]\.?m\.?)?)?)
    (?: ?\([^()]{0,40}\))? ?[:|)–—-]{0,3} ?"""
MORE = r"""(?:(?:main|optional|outbound|inbound|return|first|second|third|day|
    additional|suggested|recommended|planned|other|local|morning|afternoon|evening|today's) ){0,2}"""
FIELD = pattern(rf"""(?:{TIME})?(?:(?P<revised>{FIX}) )?{MORE}(?:meals?: ?)?(?:(?:have|enjoy|eat|grab) )?(?:{NAMED})
    (?:\ (?:to (?:consider|visit|see)|details?|plan|mode|time|venue|restaurant|spots?|options?|choice|visits?|name|stop))?
    \ ?#?\d? ?(?:[^\w\s!-~–—] ?)?(?:\([^()]{{0,60}}\) ?)?(?:[:=|@]| [-–—·] ?| (?:at|is)\b(?: \d\d?(?::\d\d)? ?
    (?:[ap]\.?m\.?)?:?)?(?= )|$) ?""")
VERB = pattern(rf"""(?:{TIME})?(?:then |finally )?(?:
    (?P<accommodation>(?:check(?:ing)?[ -]?in(?:to| to| at)?|stay(?:ing)?(?: overnight| the night)? (?:at|in)|
    spend the night (?:at|in)|overnight (?:at|in)|sleep at) )|
    (?P<attraction>(?:visit(?:ing)?|explor(?:e|ing)|tour|see|stroll through|walk along) )|
    (?P<transportation>(?=(?:(?:take|catch|board|your|an?|the|outbound|return|by|early|morning|evening) ){{0,3}}(?:flights?|fly|taxi|cab|uber|lyft|drive|driving|self-driving|
    travel|transfer|car|return|depart)\b)))""")
# where the next field of a line, or the next day, begins
NEXT = pattern(rf"""(?<=[^\s]) ?[|;•·]+ ?(?={MORE}(?:{'|'.join(LABELS.values())}) ?\d?(?: ?:| [–—-] ))|
    [.,] (?=(?:{'|'.join(LABELS.values())}) ?:)|(?<=[.;|!]) (?=day \d\d?:)""")
KEY = pattern(r"""(?:(?:restaurant|venue|place|hotel|property|attraction)(?: name)?|name|
    description|details) ?[:=] ?""")
RIDE_LINE = pattern(r"(?:depart|arriv|duration|distance|costs?\b|price|fare|flight n)[^:]{0,20}:")
DETAIL_LINE = pattern(rf"""{RIDE_LINE.pattern}|(?:from|to|average|avg|entry|cuisine|room type|house rule|rating|phone|website|address|minimum|max|note)
    [^:]{{0,20}}:""")
# a heading after which a plan's last day tells nothing more
SECTION = pattern(r"""(?:[\w&'-]+ ){0,3}(?:costs?|budget|expenses?|summary|breakdown|notes?|tips?|
    highlights?|totals?|overview|reminders?|recommendations?|considerations?|information|
    alternatives?|backups?|options)\b(?: [\w&'()-]+){0,4} ?:?$|why (?:this|it)\b""")

# what is no name, and where a name ends
CUISINE = r"""(?:american|italian|mexican|indian|chinese|french|mediterranean|seafood|pizza|
    fast food|desserts?|tea|cafe|bbq|bakery)\b"""
DETAIL = r"""(?:average|avg|costs?|prices?|cuisines?|address|room type|rating|rated|contact|phone|website|
    minimum|max\w*|reviews?|house rules?|free|(?:private|shared|entire) (?:room|home)|per|usd|
    child\w*|allow\w*|no|flight|approx\w*|about|around|entry|admission|note|closed|open)\b"""
NOTHING = pattern(r"""\W*$|\(|[-–—]+ ?(?:[(,.;|$]|$)|free\W*$|(?:none|n/?a|nil|null|nothing|tbd|included|on your own|skip(?:ped)?|
    not (?:applicable|needed|required|planned|specified|available|provided|included)|
    no (?:breakfast|lunch|dinner|meals?|attractions?|accommodations?|transport(?:ation)?|travel|stay)|
    (?:back |at |return(?:ing)? )?home|check(?:ing)?[ -]?out|travel(?:ing)? day|departure|
    on the (?:road|way|go|flight|plane)|in[- ]flight|in transit|en route|rest|leisure|
    free (?:time|day|morning|afternoon|evening))\b(?! (?-i:[A-Z])| ?[&'])""")
MONEY = pattern(r"(?:(?:approx\w*\.?|about|around|estimated|total)(?: cost)?:? )?~?\$ ?\d")
REMARK = pattern(rf""" ?[|;→←⭐★]| [·@] | ?\[(?=\$)|,? ?[~≈]?\$ ?\d|[,.] (?={DETAIL}|{CUISINE}|(?-i:[a-z$~]))|
    ,?\.? ?$|:? ?(?:[-–—:]+|\b) (?={DETAIL} ?[:$~\d]|[~≈]?\$)|
    \ ?[-–—:]+ (?={DETAIL}|{CUISINE}|[\d.,]+ ?(?:/|per\b|night|star|usd)|(?-i:(?!the [A-Z])[a-z])|
    (?-i:[A-Z][\w'-]* (?!of |and |the |in |de |at |by |la )[a-z]))|
    (?<!\b(?-i:[A-Z]))(?<!\b(?-i:[A-Z][a-z]))(?<!\bAve)[.!] (?=[\"']?(?-i:[A-Z]))|
    \ (?:or|instead of|rather than|before|after|then|where|which|followed by) |
    \ (?:for|at|around|near|with|in|by) (?=[~$\d]|(?:(?:an?|the|your) )?(?!(?:an?|the|your) )(?-i:(?!of)[a-z]{{2}}))""")

OPEN, CLOSE = re.compile(r"\[\"|\[|\"|"), {"[\"": "\"]", "[": "]", "\"": "\""}
WORD = re.compile(r"\w+|.")
SEPARATOR = re.compile(r" ?, ?| ?\(| in | [-–—] | at ")
STATE = re.compile(r"(?:, ?| ?\()([A-Z]{2}\b|[A-Z][\w ]{1,30})(?: \d{5})?(?:, USA)?\)?")
RIDE = re.compile("(?P<transportation>)")
PARTS = re.compile(r", |[;|()→]")
RIDES = {"flight": "Flight", "taxi": "Taxi", "driving": "Self-driving"}
MODE = pattern(r"""(?<![\w-])(?<!no )(?<!not )(?<!without )(?:(?P<flight>flights?\b|fly(?:ing)?\b|airline|
    (?:air)?plane\b)|(?P<taxi>(?:taxi|cab|uber|lyft)\b)|(?P<driving>self-?\s?driv\w{0,9}|
    driv\w{1,9}\b(?! (?:time|dist|dur))|(?:(?:rental|rented|hire) )?cars?\b|rental\b))""")
OTHER_MODE = pattern(r"\b(?:train|bus|ferry|walk(?:ing)?|boat|shuttle|metro|subway|tram|bik(?:e|ing))\b")
LOCAL = pattern(r"\b(?:local|as needed|if needed|within|around|downtown|walk\w{0,3}|on foot|in the city)\b")
FLIGHT_NUMBER = pattern(r"""\b((?-i:F)\d{3,9})\b|\bflight ?(?:number|no\.?|#)?:? ?\[?
    ((?-i:[A-Z]){1,3} ?\d{2,7})\b""")
WAY = pattern(r"\bfrom:? (?=(?-i:[A-Z]))([^|;]{1,60}?),? ?(?:\bto\b|→|->|—|–):? ?([^|;]{1,60})")
ARROW = pattern(r"""(?:, ?(?-i:[A-Z])[\w ]{1,20}| ?\([^()]{0,40}\))? ?(?:\bto\b|[→➔➡➜➝⇒⟶»✈🛫🚗🚕🚙]|-{0,2}>|=>|–|—|-)
    ️? ?(?:travel to )?""")
CITY_END = pattern(r""" ?$| ?[,;:|()\[\]→!"]|\.(?= |$)| [-–—→]| (?:on|at|by|via|for|with|using|in|and|then|
    depart\w{0,6}|arriv\w{0,6}|duration|back|flight)\b""")
MOVE = pattern(r"""travel|arriv|fl(?:y|ight)|driv|head|return|transfer|journey|welcome|taxi|self|
    road|move|back|trip|by |(?:rental )?car\b|train|bus\b""")
NO_CITY = pattern(r"""\b(?:day|\w{3,6}day|explor|adventure|sight|cultur|free|relax|arriv|depart|final|
    tour|museum|morning|local|discover|histor|fun|arts?\b|more|travel|return|home|rest|leisure|trip|
    nature|downtown|city|highlight|experience|itinerary|plan|full|march|april)""")
SAME = pattern(r"""(?:(?:stay|return|back|overnight|at|to|in|the) ){0,4}same(?: (?:hotel|accommodation|
    place|lodging|as (?:above|before|(?:on )?(?:day|night) \w{1,5}|(?:the )?(?:previous|last) (?:night|day))))?""")
LEAD = pattern(r"""(?:(?-i:the)|at|to|we|in|into|visit(?:ing)?|explor(?:e|ing)|try|tour|enjoy|have|head to|
    (?:have |enjoy |eat |grab )?(?:an? )?(?:quick |light )?(?:breakfast|lunch|dinner|meal|bite) at|
    see|stroll through|walk along|check(?:ing)?[ -]?in(?:to| to| at)?|sleep at|
    (?:stay(?:ing)?|spend the night|overnight)(?: overnight| the night)? (?:at|in)) |[\s:;,.|–—-]+|\d{1,2}[.)] |
    \(?\d{1,2}:\d\d ?(?:[ap]\.?m\.?)?\)? ?|(?-i:[A-Z][a-z]+(?: [a-z'-]+){1,6} (?:at|in|to) (?=[\["A-Z]))|
    instead of [^;]{1,120}?, (?=(?:stay|eat|go|visit|try|have|dine|head|book|we)\b)""")
PAREN = re.compile(r" ?\(((?:[^()]|\([^()]{0,40}\)){0,120})\)")
ASIDE = pattern(rf"(?-i:[a-z~$\d])|[^()]{{0,80}}(?:[$\d:]|\b{CUISINE}|\b{DETAIL}|included\b|friendly\b)")
JOINT = re.compile(r",? (?:and|&|\+|then) |[,/&+] ?(?=[\[A-Z])")


# ---------------------------------------------------------------- (1) lines
def plain(text):
    """A text without emphasis, struck-out words and typography, each run of blanks one blank."""
    return BLANKS.sub(" ", STRUCK.sub("", text.translate(TYPOGRAPHY)))


def read_lines(text, names):
    """Yield (is it a bullet or indented, plain line); a line of several fields becomes several."""
    text = unfold_json(text[:LONGEST_REPLY])
    for torn, whole in names.torn:
        text = text.replace(torn, whole)
    text = LINK.sub("]", TAG.sub("", plain(text)))
    text = "\n".join(BREAK.sub("; " if raw.lstrip().startswith("|") else "\n", raw)
                     for raw in text.split("\n"))
    raws = [raw[:LONGEST_LINE].rstrip() for raw in text.split("\n")]
    for is_table, block in groupby(raws, key=lambda raw: raw.lstrip().startswith("|")):
        for raw in table_lines(block) if is_table else block:
            line = raw.lstrip()
            bullet = BULLET.match(line).end()
            listed = (bullet or raw != line) and not line.startswith("#")
            for part in NEXT.split(line[bullet:]):
                yield bool(listed), part.strip()


def table_lines(block):
    """The rows of a markdown table as lines. Its days are columns, or rows, or tables."""
    rows = [[cell.replace("\\|", "|").strip() for cell in CELLS.split(raw.strip()[1:])]
            for raw in block]
    rule = [not any(cell.strip(":- ") for cell in row) for row in rows]
    head = rows[0] if rule[1:2] == [True] else [""]
    days = [i for i, cell in enumerate(head) if DAY.match(cell)]
    fields = [i for i, cell in enumerate(head) if i and FIELD.fullmatch(f"{cell}:")]
    of_days, told = re.match("days?$|date", head[0], re.I), ""
    rows = [row for row, empty in zip(rows, rule, strict=True) if not empty and row is not head]
    for i in days if len(days) > 1 else ():
        yield head[i]
        yield from (f"{row[0]}: {row[i]}" for row in rows if i < len(row))
    for row in rows if len(days) < 2 else ():
        if of_days and row[0] not in ("", told):
            told = row[0]
            yield told if DAY.match(told) or DATE.match(told) else f"Day {told}"
        label = next((i for i, cell in enumerate(row) if cell and FIELD.fullmatch(f"{cell}:")), None)
        if len(fields) > 1:
            yield from (f"{head[i]}: {cell}" if i in fields else cell
                        for i, cell in enumerate(row[:len(head)]) if i)
        elif label is not None:
            yield f"{row[label]}: " + " | ".join(row[label + 1:])
        else:
            yield from row[bool(of_days):]


def unfold_json(text):
    """The text with each of its JSON values that holds days told in lines."""
    decoder, parts, at, tried, days = json.JSONDecoder(strict=False), [], 0, 0, 0
    for start in JSON_START.finditer(text):
        if start.start() < at or tried >= MOST_VALUES:
            continue
        tried, lines = tried + 1, []
        with suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(text, start.start())
            lines = list(islice(json_lines(value, number=days + 1), MOST_LINES))
        if any(map(DAY.match, lines)):
            days += 1
            parts += [text[at:start.start()], *lines]
            at = end
    return "\n".join([*parts, text[at:]])


def json_lines(value, key="", number=0, depth=0):
    """Yield a JSON value as lines: "Day N", "key: text". number: of a day that has none."""
    table = {plain(str(k)).replace("_", " "): v for k, v in value.items()} \
        if isinstance(value, dict) else {}
    labels = {k for k in table if FIELD.fullmatch(f"{k}:")}
    own = next((table[k] for k in table if k.lower() in ("day", "days", "day number")), None)
    name = next((v for k, v in table.items() if KEY.fullmatch(f"{k}:") and isinstance(v, str)), "")
    if depth > 8 or value is None:
        return
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        yield f"{key}: {'; '.join(value)}"
    elif isinstance(value, list):
        for n, one in enumerate(value, 1):
            yield from json_lines(one, key, number and n, depth + 1)
    elif not table:
        yield f"{key}: {value}"
    elif isinstance(own, (int, str)) or DAY.match(key) or number and len(labels) > 1:
        own = key if own is None else str(own)
        yield own if DAY.match(own) else f"Day {own if own.isdecimal() else number}"
        for k, v in table.items():
            if k.lower() not in ("day", "days", "day number", "date"):
                yield from json_lines(v, k, 0, depth + 1)
    elif name or re.search("transport|flight", key, re.I):
        kind = next((table[k] for k in ("type", "slot", "category", "meal")
                     if isinstance(table.get(k), str)), key)
        city = [v for k, v in table.items() if k in ("city", "location") and isinstance(v, str)]
        yield f"{kind}: " + (", ".join([name, *city]) if name else ", ".join(
            f"{k}: {v}" for k, v in table.items()))
    else:
        for k, v in table.items():
            yield from json_lines(v, k, number, depth + 1)


# ---------------------------------------------------------------- (2) days
class Day:
    """What a text says of a day: {slot: [text, ..]}. What follows a closing heading is `late`."""

    def __init__(self, number, title):
        self.number, self.title, self.told, self.late, self.revised = number, title, {}, None, set()

    def tell(self, slot, text, revises=False):
        """Keep a field's text, unless the field has one already; a revision replaces it."""
        told = self.told if self.late is None else self.late
        if revises and slot not in self.revised:
            told[slot] = []
            self.revised.add(slot)
        kept = not told.get(slot) or slot in ("attraction", "transportation")
        if kept:
            told.setdefault(slot, []).append(text)
        return kept

    def tell_below(self, slot, line, city):
        """Keep a line below a label that has no text of its own. city: its match as a city."""
        texts = (self.told if self.late is None else self.late).setdefault(slot, [])
        key = KEY.match(line)
        if texts and (slot == "transportation" or city):
            texts[-1] += ", " + line[city.end() if city and slot != "transportation" else 0:]
            return True
        kept = not DETAIL_LINE.match(line) and not city and (not texts or slot == "attraction")
        if kept or slot == "transportation":
            texts.append(line[key.end():] if key else line)
        return kept


def read_days(lines, names):
    """(2) lines -> (days, the lines that told nothing). Of several tellings of a trip the fullest
    counts, of equals the last."""
    lines = [pair for pair in lines if pair[1]]
    runs, day, idle, slot, nested = [], Day(0, ""), [], None, False
    numbered, revises = any(DAY.match(line) for _, line in lines), False
    for listed, line in lines:
        heading = DAY.match(line) if numbered else None if listed else DATE.match(line)
        if heading and MONEY.match(line, heading.end()):  # a row of costs
            idle.append(line)
            continue
        if heading:
            line, slot, nested = line[heading.end():], None, False
            day, revises = open_day(heading.groupdict(), line, runs, day)
            if not FIELD.match(line):
                if FLIGHT_NUMBER.search(line):
                    day.tell("transportation", line)
                continue
        field = FIELD.match(line) or verb(line, names)
        inner = nested and (listed or not day.told.get(slot)) and (
            not field or field.lastgroup == "current_city" or slot == field.lastgroup == "transportation")
        if inner and day.tell_below(slot, line, field):
            continue
        if field and not inner:
            start, nested = field.end(), nested and field.lastgroup == slot
            slot = field.lastgroup
            start = field.start(slot) if field.re is VERB else start
            if start == len(line):
                nested = True
                continue
            if slot == "transportation" and MODE.match(field[slot] or line):
                start = field.start(slot)  # the label says the mode
            if day.tell(slot, line[start:], revises or bool(field.groupdict().get("revised"))):
                continue
        elif SECTION.match(line):
            day.late, slot, nested = {}, None, False
        elif slot == "transportation" and day.late is None and RIDE_LINE.match(line):
            day.told.setdefault(slot, [""])[-1] += f", {line}"
            continue
        idle.append(line)
    for day in [day for run in runs for day in run[:-1]]:  # what is late is late on a last day only
        day.told = (day.late or {}) | day.told
    return max(runs, key=lambda run: (sum(len(day.told) for day in run), runs.index(run)),
               default=[]), idle


def open_day(heading, title, runs, day):
    """(the day of a heading, is it an earlier one that is revised)."""
    word = (heading.get("n") or str(day.number + 1)).lower()
    number = NUMBERS.get(word) or int(word)
    earlier = [one for run in runs for one in run if one.number == number]
    field = FIELD.match(title)
    if earlier and (heading.get("fix") or field and REVISED.search(field[0])):
        return earlier[-1], True
    if number != day.number or not field:
        if not runs or number <= day.number:
            runs.append([])
        day = Day(number, "" if field and field.lastgroup in SLOTS else title)
        runs[-1].append(day)
    return day, False


def verb(line, names):
    """The match of a line that begins with a verb ("Check into ..") or with a ride and its way."""
    found = VERB.match(line) or FLIGHT_NUMBER.search(line) and RIDE.match(line)
    if found and found.lastgroup == "transportation":
        way = names.way(line)
        return found if way and way[0] or FLIGHT_NUMBER.search(line) else None
    return found


# ---------------------------------------------------------------- (3) names
class Names:
    """The cities and venues of a database, and where a text that holds them ends."""

    def __init__(self, database):
        self.database, self.cities = database, dict(database.cities)
        self.stored, self.torn = {}, []
        for table in ("hotels", "restaurants", "attractions"):
            for city in getattr(database, f"{table[:-1]}_cities"):
                self.cities.setdefault(city, "")
                for row in getattr(database, table)(city):
                    name = row.name.strip()
                    whole = GAP.sub(SEAM, name)
                    if whole != name:
                        self.torn.append((name, whole))
                    key = plain(whole).strip()
                    place = self.stored.setdefault((table, city, WORD.match(key + " ")[0].lower()), {})
                    place.setdefault(key, name)
        cities = sorted(map(re.escape, self.cities), key=len, reverse=True)
        self.city_names = re.compile(rf"(?<!\w)(?:{'|'.join(cities)})(?![^\W_])")

    def known(self, text, table, cities):
        """(length, name as stored, city) of the longest venue of these cities that begins a text."""
        best = (0, "", cities[0])
        word = WORD.match(text + " ")[0].lower()
        for city in cities:
            for key, name in self.stored.get((table, city, word), {}).items():
                size = len(key)
                if size > best[0] and text[:size].lower() == key.lower() \
                        and not text[size:size + 1].isalnum():
                    best = size, name if text[:size] == key else text[:size], city
        return best

    def cities_in(self, text):
        """The matches of the cities in a text; the state behind a city is none."""
        found = list(self.city_names.finditer(text))
        return [city for before, city in zip([None, *found], found)
                if not before or self.cities[before[0]] != city[0] or
                text[before.end():city.start()].strip(" ,(")]

    def city(self, text):
        """The city that begins a text, as it is written; a state is no part of it."""
        text = text.lstrip(" :[\"'(")
        found = self.city_names.match(text)
        known = found and CITY_END.match(text, found.end())
        return found[0] if known else text[:CITY_END.search(text).start()].strip(" .:]\"'")

    def way(self, text):
        """(from, to, span) of the first way in a text: "from A to B", "A -> B", or None."""
        for found in WAY.finditer(text):
            start, end = self.city(found[1]), self.city(found[2])
            if end[:1].isupper():
                start = start if start[:1].isupper() and not MOVE.match(start) else ""
                return start, end, (found.start(), text.index(end, found.start(2)) + len(end))
        cities = self.cities_in(text)
        for one, two in zip(cities, cities[1:]):
            if one[0] != two[0] and ARROW.fullmatch(text, one.end(), two.start()):
                return one[0], two[0], (one.start(), two.end())
        for city in cities:
            if text[:city.start()].endswith((" to ", " for ")):
                return "", city[0], (city.start() - 3, city.end())
        return None

    def city_at(self, text, at, last):
        """(city, end) of the known city at a place, its state skipped, or ("", at). last: nothing
        but the end of the text may follow."""
        found = self.city_names.match(text, at)
        if not found:
            return "", at
        end = found.end()
        state = STATE.match(text, end)
        if state and (len(state[1]) == 2 or state[1] == self.cities[found[0]]):
            end = state.end()
        end += text.startswith(")", end)
        done = not text[end:].strip(" .,") or text[end:end + 2] == " (" \
            or not last and JOINT.match(text, end)
        return (found[0], end) if done else ("", at)

    def is_name(self, aside):
        """Is what stands in parentheses behind a name a part of it, or a city?"""
        return not ASIDE.match(aside) or self.city_names.fullmatch(aside) is not None

    def venue(self, text, slot, cities):
        """("Name, City", rest of the text) of the venue that begins a text."""
        table, sights = TABLE_OF[slot], slot == "attraction"
        size, name, home = self.known(text, table, cities)
        opener = "" if size else OPEN.match(text)[0]
        if opener:  # [Name] or "Name"
            size, name, home = self.known(text[len(opener):], table, cities)
            close = text.find(CLOSE[opener], len(opener) + size)
            close = close if close > 0 else len(text)
            inner = text[len(opener):close]
            text, at = inner + text[close + len(opener):], size or len(inner)
        else:
            at = size
        text = text[:at] + PAREN.sub(
            lambda paren: paren[0] if self.is_name(paren[1]) else "", text[at:])
        end = max(at, REMARK.search(text, at).start())
        piece, rest = text[:end], text[end:]
        for sep in SEPARATOR.finditer(piece, size):
            city, after = self.city_at(piece, sep.end(), not sights)
            if city:
                name = name if size == sep.start() else piece[:sep.start()]
                return f"{name.strip()}, {city}", piece[after:] + rest
        if size and (joint := JOINT.match(piece, size)) and sights and (
                piece[joint.end()] == "[" or self.known(piece[joint.end():], table, cities)[0]):
            return f"{name}, {home}", piece[size:] + rest
        if size == len(piece):
            return f"{name}, {home}", rest
        head, comma, tail = piece.rpartition(",")
        if comma and tail.strip()[:1].isupper() and len(head) >= size:
            return f"{head.strip()}, {tail.strip()}", rest  # a city that nobody knows
        return f"{piece.strip(' ,')}, {home}", rest

    def venues(self, text, slot, cities):
        """Yield "Name, City" of a field: its venue, or all its sights."""
        for part in re.split(";| · ", text) if slot == "attraction" else [text]:
            part = part.strip()
            if NOTHING.match(part) and not self.known(part, TABLE_OF[slot], cities)[0]:
                continue
            for _ in range(20):
                while lead := LEAD.match(part):
                    rest = part[lead.end():]
                    if self.known(part, TABLE_OF[slot], cities)[0] and not self.known(
                            rest, TABLE_OF[slot], cities)[0]:
                        break
                    part = rest
                known = self.known(part.lstrip('["'), TABLE_OF[slot], cities)[0]
                bare = part.lstrip('["')
                if not known and (not part or NOTHING.match(bare) or MONEY.match(bare)
                                  or part[0].islower() or REMARK.match(part)):
                    break
                place, rest = self.venue(part, slot, cities)
                yield place.replace(SEAM, " ")
                joint = None if REMARK.match(rest) else JOINT.match(rest)
                if slot != "attraction" or not joint and "[" not in rest:
                    break
                part = rest[joint.end() if joint else rest.index("["):]


names_of = cache(Names)  # the names of a database are gathered once


# ---------------------------------------------------------------- (4) plan
def ends_of_day(day, before, home, names):
    """(start, end): the cities of a day, equal on a day without travel. before: the day before's
    end, which stays the city if a day does not say otherwise."""
    ways = [way[:2] for text in day.told.get("transportation", ()) if (way := names.way(text))]
    ride = (ways[0][0] or before, ways[-1][1]) if ways else None
    label = next(iter(day.told.get("current_city", ())), "")
    title = DATE.sub("", label or day.title, 1).strip(" :;-–—,.()|[]")
    way = names.way(title) or " to " in title.lower() and names.way(f"from {title}")
    if way and way[0]:
        return way[:2]
    if way and (not ride or way[1] in ride):  # "Travel to B"
        return ride[0] if ride else before, way[1]
    known = [city[0] for city in names.cities_in(title)]
    if ride and (not label or {names.city(label), *known} & {*ride}):
        return ride
    if label:
        return names.city(label), names.city(label)
    if known:
        comes = MOVE.match(title) and not title.lower().startswith("depart")
        return before if comes else known[-1], known[-1]
    if re.fullmatch(r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*){0,3}", title) and not NO_CITY.search(title):
        return title, title  # a city that nobody knows
    return before, home if re.search(r"\b(?:return|home)\b", title, re.I) else before


def ride(text, names):
    """A ride in TravelPlanner's words. Cities and figures are those that the text gives."""
    number, way = FLIGHT_NUMBER.search(text), names.way(text)
    if NOTHING.match(text.strip("[] ")) or MONEY.match(text):
        return "-"
    begin, end = way[2] if way else (len(text), len(text))
    before, after = text[:begin], text[end:]
    words = before + re.split(r"[,;|(\[]", after)[0]
    mode = MODE.search(words) or MODE.search(f"{before} {after}")
    other = OTHER_MODE.search(words)
    if not way and not number and (not mode or LOCAL.search(words)):
        bare = text.lower().startswith("cost") and not other
        return f"Self-driving, {text.replace('$', '')}" if bare else "-"  # "-": within the city
    kind = "Flight" if number else RIDES[mode.lastgroup] if mode else "Self-driving"
    parts = [words.strip(" .,") if other and not number else kind]
    if number:
        parts = [f"Flight Number: {number[1] or number[2]}"]
        before, after = (FLIGHT_NUMBER.sub("", side) for side in (before, after))
    if way:
        parts.append(f"from {way[0]} to {way[1]}" if way[0] else f"to {way[1]}")
    for part in PARTS.split(f"{before}|{after}"):  # times, lengths and prices, not remarks
        part = part.strip(" .:[]$=")
        if re.search(r"\d", part) and not MODE.search(part):
            parts.append(part)
    return ", ".join(parts)


def rides(texts, names):
    """The rides of a day in one field; the same one told again is none."""
    found = []
    for text in texts:
        one = ride(text, names)
        if one != "-" and not any(one in other or names.way(text) is None for other in found):
            found.append(one)
    return "; ".join(found) or "-"


def fill_day(day, before, home, names):
    """One day's plan, and the city where it ends. before: the plan of the day before, and its."""
    plan, city = before
    start, end = ends_of_day(day, city, home, names)
    filled = {"day": day.number, **dict.fromkeys(FIELDS, "-")}
    filled["current_city"] = f"from {start} to {end}" if start != end else end
    filled["transportation"] = rides(day.told.get("transportation", ()), names)
    cities = list(dict.fromkeys([start, end] if end == home else [end, start]))
    for slot in SLOTS:
        places = [place for text in day.told.get(slot, ()) for place in
                  names.venues(text, slot, [end] if slot == "accommodation" else cities)]
        if slot == "attraction":
            filled[slot] = "".join(f"{place};" for place in places) or "-"
        elif places:
            filled[slot] = places[0]
    stay = next(iter(day.told.get("accommodation", ())), "")
    if plan and SAME.fullmatch(PAREN.sub("", stay).strip(" .[]-")):
        filled["accommodation"] = plan[-1]["accommodation"]
    return filled, end


def read_plan(text, task, database):
    """(plan, the lines that told nothing, their share or None without a text).

    plan: TravelPlanner's list of days, or None if the text has none. Never raises.
    """
    if not isinstance(text, str):
        return None, [], None
    names, home = names_of(database), task.get("org") or ""
    lines = list(read_lines(text, names))
    days, idle = read_days(lines, names)
    plan, city = [], home
    for day in days:
        filled, city = fill_day(day, (plan, city), home, names)
        plan.append(filled)
    said = any(day[slot] != "-" for day in plan for slot in FIELDS[1:])
    share = len(idle) / max(sum(bool(line) for _, line in lines), 1)
    return plan if said else None, idle, share


def parse_plan(text, task, database):
    """The plan of an itinerary text, or None."""
    return read_plan(text, task, database)[0]


def itinerary(plan):
    """The plan as an agent's answer, in the format that the system prompt states."""
    lines, home = [], plan[0]["current_city"].removeprefix("from ").partition(" to ")[0]
    for day in plan:
        where, way = day["current_city"].removeprefix("from "), day["transportation"]
        start, _, end = where.partition(" to ")
        here = start if end == home else end or start
        lines.append(f"Day {day['day']}: {where}")
        if way.startswith("Flight Number: "):
            number = way.split(",")[0].removeprefix("Flight Number: ")
            lines.append(f"Flight from {where} [{number}]")
        elif way != "-":
            lines.append(f"{way.split(',')[0]} from {where}")
        for slot in SLOTS:
            for place in day[slot].split(";") if slot == "attraction" else [day[slot]]:
                name, _, city = place.rpartition(", ")
                if name:
                    there = f", {city}" if city != here else ""
                    lines.append(f"{slot.capitalize()}: [{name}]{there}")
    return "\n".join(lines)


# ---------------------------------------------------------------- by an LLM
class ChatError(ConnectionError):
    """An endpoint refused, or gave no usable reply however often it was asked."""


@lru_cache(maxsize=64)
def client_of(url, key, retries):
    """The openai package's client of an endpoint; threads may share it."""
    import openai

    # a proxy of the environment leads out into the world, not to a server of one's own
    web = openai.DefaultHttpxClient(trust_env=url.startswith("https:"))
    return openai.OpenAI(base_url=url, api_key=key, max_retries=retries, http_client=web)


class Reply(str):
    """The text of a reply. tokens: of the whole conversation with it, 0 where nobody says."""

    tokens = 0


def read_reply(body, stops=()):
    """The Reply in a chat completion. A stop that the endpoint has left out is put back. What is no
    completion raises, as what is no text does."""
    choice, usage = body["choices"][0], body.get("usage")
    text = "" + choice["message"]["content"]
    for stop in stops if choice.get("finish_reason") == "stop" else ():
        text += stop * (text.rfind(stop.replace("/", "")) > text.rfind(stop))
    reply = Reply(text)
    reply.tokens = usage.get("total_tokens", 0) if isinstance(usage, dict) else 0
    return reply


def beyond_openai(messages, stops):
    """What vLLM and SGLang are told beyond OpenAI's form: to go on with a last message of the
    assistant, to hand over the stop, too."""
    found = {"include_stop_str_in_output": True} if stops else {}
    if messages[-1]["role"] == "assistant":
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    return found


def chat(url, model, messages, temperature=1.0, top_p=1.0, max_tokens=None, timeout=300, retries=6,
         api_key=None, stops=()):
    """The Reply of an OpenAI-compatible endpoint; ChatError when there is none.

    stops: closing tags that end a reply, and belong to it. A last message of the assistant goes on.

    The openai package tries time-outs, broken connections and status 408, 409, 429 and 5xx again,
    with growing pauses; a reply without text (empty, cut, no chat completion) is tried again here.
    One of more than LONGEST_REPLY characters is refused as what it is, a context that ran over.
    """
    import openai

    base = url.rstrip("/").removesuffix("/chat/completions")
    ask = client_of(base, api_key or "none", retries).chat.completions.with_raw_response.create
    # half an emoji, with which a cut reply may end, cannot be sent
    messages = json.loads(json.dumps(messages, ensure_ascii=False).encode(errors="replace"))
    for tried in range(1, retries + 2):
        try:
            reply = ask(model=model, messages=messages, temperature=temperature, top_p=top_p,
                        max_tokens=max_tokens or openai.omit, timeout=timeout,
                        stop=list(stops) or openai.omit, extra_body=beyond_openai(messages, stops))
        except openai.APIStatusError as error:
            problem = f"status {error.status_code}"
            if error.status_code < 500 and error.status_code != 429:  # refused: the server says why
                raise ChatError(f"{url}: {problem} {error.response.text[:300]!r}") from None
            break
        except openai.APIError as error:
            problem = f"no connection: {error.__cause__ or error}"
            break
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            text = read_reply(reply.http_response.json(), stops)
            if len(text) > LONGEST_REPLY:
                raise ChatError(f"{url}: a reply of {len(text):,} characters fits into no context")
            if text.strip() or messages[-1]["role"] == "assistant":  # that one may be at its end
                return text
        problem = "a reply without text"
        time.sleep(min(8, 0.1 * 2 ** tried))
    raise ChatError(f"{url}: {problem}, after {retries} retries, from model {model}")


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
        days = json.loads(reply)
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
        mode = MODE.match(value) if field == "transportation" else None
        if mode and "Flight Number" not in value:
            value = RIDES[mode.lastgroup] + value[mode.end():]
        clean[field] = value
    return clean


# ---------------------------------------------------------------- main
def read_texts(path):
    """Yield (line, task, text) of a jsonl file of episodes or texts."""
    with naming(path), open(path, encoding="utf-8-sig") as file:
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
