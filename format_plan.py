"""
Itinerary text -> plan: an agent's answer becomes TravelPlanner's list of days.

    (1) lines   JSON, tables and markdown become plain lines
    (2) days    "Day 2: ..." opens a day; a line that begins with a label ("Lunch: ...") or a verb
                ("Check into ...") gives one of the day's fields; every other line is ignored
    (3) names   a name ends where a remark on it begins: a price, a cuisine, an alternative
    (4) plan    fields are put into TravelPlanner's form; a place without a city gets the day's city

The reader adds and corrects nothing: a name that is not in the database stays as it was written, so
that the judge can call it a hallucination. The database only shows where a name ends.
database/prompts/system.txt states the format; parse_plan reads it and its variants by rules,
offline. For free prose there is format_plan, which asks an LLM, as STAR does (arXiv:2603.21972).

Reads   FILE.jsonl: episodes (task, answer), or texts (text, and org as context)
Writes  stdout: each record with its "plan" (null if the text has none)

    python format_plan.py FILE.jsonl --database DIR > plans.jsonl
    python format_plan.py FILE.jsonl --reader http://localhost:8000/v1=MODEL
"""
import argparse
import concurrent.futures
import json
import re
import sys
import threading
from contextlib import suppress
from functools import cache
from itertools import groupby, islice

from runtime import (
    LONGEST_REPLY,
    ChatError,
    Parser,
    Refused,
    chat,
    endpoint,
    errors_name,
    read_key,
    run,
    spoken,
)
from sandbox import PROMPTS, open_database

MEALS = ("breakfast", "lunch", "dinner")
SLOTS = ("breakfast", "attraction", "lunch", "dinner", "accommodation")
FIELDS = ("current_city", "transportation", *SLOTS)
TABLE_OF = {**dict.fromkeys(MEALS, "restaurants"), "attraction": "attractions",
            "accommodation": "hotels"}
LONGEST_LINE = 2_000  # characters; longer lines are cut before they are searched
CONCURRENCY = 32  # answers that a formatter reads at once
COSTS = "formatter failed", "formatter tokens"  # the formatter's entries in a score
MOST_VALUES, MOST_LINES = 40, 2_000  # read at most these numbers of JSON values and lines of a text


# Patterns are applied to text with single blanks. Every quantifier over free text is bounded or
# ends the pattern, so that matching takes linear time; tests/test_format_plan.py times each one.

def pattern(text):
    """Compile a pattern that ignores case; line breaks and indentation in it are ignored."""
    return re.compile(re.sub(r"\n\s*", "", text), re.I)


# ---------------------------------------------------------------- (1) lines
TYPOGRAPHY = str.maketrans("’‘“”：，；（）【】［］｜、\u00a0\u202f\u3000\t\r",
                           "''\"\":,;()[][]|;     ", "*`\0\ufe0f")
STRUCK = re.compile(r"~~[^~\n]{0,300}~~|(?<![^\W_])_+|_+(?![^\W_])")  # and __underlined__
BLANKS = re.compile(r"[^\S\n]+")
GAP, SEAM = re.compile(r"\s{2,9}|\n"), "\ue000"  # SEAM replaces a line break or gap inside a name
LINK = re.compile(r"\]\((?:https?:|www)[^\s()]{0,300}(?:\([^\s()]{0,99}\))?[^\s()]{0,99}\)")
TAG, BREAK = pattern("</?(?:b|i|em|strong)>"), pattern("<br ?/?>")
CELLS = re.compile(r"(?<!\\)\|")
JSON_START = re.compile(r"[\[{](?=\s{0,99}[\[{\"'])")
BULLET = re.compile(  # bullets, numbers, boxes and emoji before the text of a line
    r"(?:[-+•·●▪‣◦–—>]+ +|#+ +|[•·●▪‣◦–—]+|\d{1,2}[.)] +|\[[ xX]?\] +|\d\u20e3 *|"
    r"[^\w\s\[\](){\"'$#@&!?.,:;/\\|<>=+~^%-] *)*")


def plain(text):
    """The text without emphasis, struck-out words, typographic characters and repeated blanks."""
    return BLANKS.sub(" ", STRUCK.sub("", text.translate(TYPOGRAPHY)))


def read_lines(text, names):
    """Yield (whether it is a bullet or indented, plain line); a line with several fields is split.
    """
    text = unfold_json(text[:LONGEST_REPLY])
    for name, joined in names.gapped:
        text = text.replace(name, joined)
    text = LINK.sub("]", TAG.sub("", plain(text)))
    for is_table, block in groupby(text.split("\n"), lambda raw: raw.lstrip().startswith("|")):
        lines = "\n".join(table_lines([*block]) if is_table else block)  # noqa: B031, used once
        for raw in BREAK.sub("\n", lines).split("\n"):
            line = raw[:LONGEST_LINE].strip()
            bullet = BULLET.match(line).end()
            listed = bool(bullet or raw.startswith(" ")) and not line.startswith("#")
            for part in filter(None, map(str.strip, NEXT.split(line[bullet:]))):
                yield listed, part


def table_lines(block):
    """Yield a markdown table as lines. Its columns or its rows may be days, or it is one day's."""
    rows = [[BREAK.sub("; ", cell.replace("\\|", "|")).strip() for cell in CELLS.split(raw)[1:]]
            for raw in map(str.strip, block)]
    rules = [not any(cell.strip(":- ") for cell in row) for row in rows]
    head = rows[0] if rules[1:2] == [True] else [""]
    rows = [row for row, rule in zip(rows, rules, strict=True) if not rule and row is not head]
    days = [i for i, cell in enumerate(head) if DAY.match(cell)]
    fields = [i for i, cell in enumerate(head) if i and FIELD.fullmatch(f"{cell}:")]
    of_days, current = head[0].lower() in ("day", "days", "date"), ""
    for i in days if len(days) > 1 else ():
        yield from [head[i], *(f"{row[0]}: {row[i]}" for row in rows if i < len(row))]
    for row in rows if len(days) < 2 else ():
        if of_days and row[0] not in ("", current):
            current = row[0]
            yield current if DAY.match(current) or DATE.match(current) else f"Day {current}"
        labels = [i for i, cell in enumerate(row) if cell and FIELD.fullmatch(f"{cell}:")]
        if len(fields) > 1:
            yield from (f"{head[i]}: {cell}" if i in fields else cell
                        for i, cell in enumerate(row[:len(head)]) if i)
        elif labels:
            yield f"{row[labels[0]]}: " + " | ".join(row[labels[0] + 1:])
        else:
            yield from row[of_days:]


def unfold_json(text):
    """The text, in which each JSON value that contains days is replaced by lines."""
    decoder, parts, at, days = json.JSONDecoder(strict=False), [], 0, 0
    for start in islice(JSON_START.finditer(text), MOST_VALUES):
        lines = []
        if start.start() >= at:
            with suppress(ValueError, RecursionError):
                value, end = decoder.raw_decode(text, start.start())
                lines = list(islice(json_lines(value, number=days + 1), MOST_LINES))
        if any(map(DAY.match, lines)):
            days += 1
            parts += [text[at:start.start()], *lines]
            at = end
    return "\n".join([*parts, text[at:]])


def json_lines(value, key="", number=0, depth=0):
    """Yield a JSON value as lines: "Day N", "key: text". number: for a day without its own."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = "; ".join(value)
    if isinstance(value, list):
        for n, one in enumerate(value if depth < 9 else (), 1):
            yield from json_lines(one, key, number and n, depth + 1)
        return
    if not isinstance(value, dict):
        if value is not None:
            yield f"{key}: {value}"
        return
    table = {plain(str(k)).replace("_", " ").lower(): v for k, v in value.items()}
    texts = {k: v for k, v in table.items() if isinstance(v, str)}
    day = next((table.pop(k) for k in ("day", "days", "day number") if k in table), None)
    labels = [k for k in table if FIELD.fullmatch(f"{k}:")]
    name = next((texts[k] for k in texts if KEY.fullmatch(f"{k}:")), "")
    if isinstance(day, (int, str)) or DAY.match(key) or number and len(labels) > 1:
        title = str(day or key or number)
        yield title if DAY.match(title) else f"Day {title if title.isdecimal() else number}"
        table.pop("date", None)
    elif name or "transport" in key or "flight" in key:
        kind = next((texts[k] for k in ("type", "slot", "category", "meal") if k in texts), key)
        place = [name, *(texts[k] for k in ("city", "location") if k in texts)]
        parts = place if name else [f"{k}: {v}" for k, v in table.items()]
        yield f"{kind}: {', '.join(parts)}"
        return
    for k, v in table.items() if depth < 9 else ():
        yield from json_lines(v, k, number * (day is None and not labels), depth + 1)


# ---------------------------------------------------------------- (2) days
NUMBERS = {word: n for n, word in enumerate(
    ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], 1)}
FIX = r"(?:correct|revis|updat|adjust|chang|amend|new|final)\w{0,6}"
DAY = pattern(rf"""(?P<fix>{FIX}(?: to| for| on)?[ :,–—-]{{1,3}})?[(\[<=_-]{{0,9}} ?(?:the )?
    (?:days?[ _]?[-:#]? ?|d(?=\d))(?P<n>\d{{1,2}}|{'|'.join(NUMBERS)})(?![\w-]\d|\w)
    (?:/\d| of \d)?(?! (?!from|to)(?-i:[a-z]{{2}}))[^\w$~\[({{"']{{0,9}}""")
MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
DATE = pattern(rf"""(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]{{0,6}},? )?(?:{MONTH}\.? \d{{1,2}}|
    \d{{1,2}}(?:st|nd|rd|th)? {MONTH}|\d{{4}}-\d\d-\d\d)(?:st|nd|rd|th)?(?:,? \d{{4}})?\b""")
LABELS = {
    "current_city": "current[ _]city|city|cities|location|destination|route|where",
    "transportation": r"""transport(?:ation)?|travel|getting (?:there|around|back|home)|train|bus|
        return(?: trip)?|(?:take |catch )?(?:an? |the |your )?(?:flights?|taxi|cab|uber)|fly|
        flight (?:number|no\.?)|(?:self-? ?)?driv(?:e|ing)|(?:rental |hire )?car|rental""",
    "breakfast": "breakfast|brunch|b(?= ?:)", "lunch": "lunch|l(?= ?:)",
    "dinner": "dinner|supper|d(?= ?:)",
    "attraction": r"""attractions?|activit(?:y|ies)|sightseeing|sights?|visits?|explore|
        (?:places|things) to (?:visit|see|do)""",
    "accommodation": r"""accommodations?|hotel|lodging|stay(?:ing)?|overnight(?: stay)?|airbnb|
        check-? ?in|where to stay|sleep|night(?= ?:)"""}
ANY_LABEL = f"(?:{'|'.join(LABELS.values())})"
CLOCK = r"\d{1,2}(?::\d\d)? ?(?:[ap]\.?m\.?)?"
TIME = rf"""(?:(?:(?:early |late |mid-?)?(?:morning|noon|midday|afternoon|evening|night)\b|
    \(?{CLOCK}(?: ?(?:-|–|to) ?{CLOCK})?)(?: ?\([^()]{{0,40}}\))? ?[:|)–—-]{{0,3}} ?)?"""
KIND = r"""(?:(?:main|optional|outbound|inbound|return|first|second|third|day|additional|suggested|
    recommended|planned|other|local|morning|afternoon|evening|today's) ){0,2}(?:meals?: ?)?"""
FIELD = pattern(rf"""{TIME}(?:(?P<revised>{FIX}) )?{KIND}(?:(?:have|enjoy|eat|grab) )?
    (?:{'|'.join(f'(?P<{slot}>{words})' for slot, words in LABELS.items())})
    (?:\ (?:to (?:consider|visit|see)|details?|plan|mode|time|venue|restaurant|spots?|options?|
    choice|visits?|name|stop))?\ ?#?\d? ?(?:[^\w\s!-~–—] ?)?(?:\([^()]{{0,60}}\) ?)?
    (?:[:=|@]| [-–—·] ?| (?:at|is)\b(?: {CLOCK}:?)?(?= )|$) ?""")
STAY = r"""(?:check(?:ing)?[ -]?in(?:to| to| at)?|sleep at|
    (?:stay(?:ing)?|spend the night|overnight)(?: overnight| the night)? (?:at|in))"""
VISIT = r"(?:visit(?:ing)?|explor(?:e|ing)|tour|see|stroll through|walk along)"
VERB = pattern(rf"""{TIME}(?:then |finally )?(?:(?P<accommodation>{STAY} )|(?P<attraction>{VISIT} )|
    (?P<transportation>(?=(?:(?:take|catch|board|your|an?|the|outbound|return|by|early) ){{0,3}}
    (?:flights?|fly|taxi|cab|uber|lyft|(?:self-? ?)?driv(?:e|ing)|travel|transfer|car|
    return)\b)))""")
NEXT = pattern(rf"""(?<=[^\s|;•·]) ?[|;•·]{{1,3}} ?(?={KIND}{ANY_LABEL} ?\d?(?: ?:| [–—-] ))|
    [.,] (?={ANY_LABEL} ?:)|(?<=[.;|!]) (?=day \d\d?:)""")  # what separates the fields of a line
RIDE = re.compile("(?P<transportation>)")  # matches any line
KEY = pattern(r"""(?:(?:restaurant|venue|place|hotel|property|attraction)(?: name)?|name|
    description|details) ?[:=] ?""")
RIDE_LINE = pattern(r"(?:depart|arriv|duration|distance|costs?\b|price|fare|flight n)[^:]{0,20}:")
DETAIL_LINE = pattern(rf"""{RIDE_LINE.pattern}|(?:from|to|average|avg|entry|cuisine|room type|note|
    house rule|rating|phone|website|address|minimum|max)[^:]{{0,20}}:""")
SECTION = pattern(r"""(?:[\w&'-]{1,20} ){0,3}(?:costs?|budget|expenses?|summary|breakdown|notes?|
    tips?|highlights?|totals?|overview|reminders?|recommendations?|considerations?|information|
    alternatives?|backups?|options)\b(?: [\w&'()-]{1,20}){0,4} ?:?$|why (?:this|it)\b""")
MONEY = pattern(r"(?:(?:approx\w{0,9}\.?|about|around|estimated|total)(?: cost)?:? )?~?\$ ?\d")


class Day:
    """What a text says about one day, as {slot: [text, ..]}: `fields` from the lines of the day,
    `appendix` from sections after the last day (costs, notes), and `corrections`. `target` is the
    one that new lines go to."""

    def __init__(self, number, title):
        self.number, self.title = number, title
        self.fields, self.appendix, self.corrections = {}, {}, {}
        self.target = self.fields

    def add(self, slot, text, corrects=False):
        """Keep a field's text if the field is empty or takes several -> whether it was kept"""
        texts = (self.corrections if corrects else self.target).setdefault(slot, [])
        kept = not texts or slot in ("attraction", "transportation")
        texts += [text] * kept
        return kept

    def add_below(self, slot, line, city):
        """Keep a line below a label without text -> whether it was kept. city: the line's match if
        it names a city."""
        texts = self.target.setdefault(slot, [])
        if texts and (slot == "transportation" or city):
            texts[-1] += ", " + line[city.end() if city and slot != "transportation" else 0:]
            return True
        kept = not city and not DETAIL_LINE.match(line) and (not texts or slot == "attraction")
        if kept or slot == "transportation":
            key = KEY.match(line)
            texts.append(line[key.end():] if key else line)
        return kept


def read_days(lines, names):
    """(2) lines -> (days, unused lines)."""
    versions, day, slot, nested, corrects, unused = [], Day(0, ""), None, False, False, []
    numbered = any(DAY.match(line) for _, line in lines)
    for listed, line in lines:
        heading = DAY.match(line) if numbered else None if listed else DATE.match(line)
        if heading and not MONEY.match(line, heading.end()):  # otherwise it is a row of costs
            line, slot, nested = line[heading.end():], None, False
            field = FIELD.match(line)
            day, corrects = open_day(heading.groupdict(), field, line, versions, day)
            if not field:
                continue
        field = FIELD.match(line) or verb(line, names)
        kind = field.lastgroup if field else None
        below = nested and (listed or not day.target.get(slot)) and (
            kind in (None, "current_city") or kind == slot == "transportation")
        if below and day.add_below(slot, line, field):
            continue
        if field and not below:
            empty = field.end() == len(line)
            nested, slot = empty or nested and kind == slot, kind
            with_label = field.re is VERB or MODE.match(field[kind])  # "Visit X", "Taxi: A to B"
            text = line[field.start(kind) if with_label else field.end():]
            if empty or day.add(kind, text, corrects or field.groupdict().get("revised")):
                continue
        elif SECTION.match(line):
            day.target, slot, nested = day.appendix, None, False
        elif slot == "transportation" and day.target is day.fields and RIDE_LINE.match(line):
            day.fields.setdefault(slot, [""])[-1] += f", {line}"
            continue
        unused.append(line)
    return best_version(versions), unused


def open_day(heading, field, title, versions, day):
    """(the Day of a heading, whether the heading corrects an earlier day)."""
    word = (heading.get("n") or str(day.number + 1)).casefold()  # casefold: also for the long s
    number = NUMBERS.get(word) or int(word)
    if heading.get("fix") or field and field["revised"]:
        for earlier in [one for days in versions for one in days if one.number == number][-1:]:
            return earlier, True
    if number != day.number or not field:
        if not versions or number <= day.number:
            versions.append([])
        day = Day(number, "" if field and field.lastgroup in SLOTS else title)
        versions[-1].append(day)
    return day, False


def best_version(versions):
    """A text may give its days several times, as a draft and a final plan: the version with the
    most fields, and of equal ones the last."""
    for days in versions:
        for day in days:
            appendix = day.appendix if day is not days[-1] else {}
            day.fields = appendix | day.fields | day.corrections
    return max(reversed(versions), key=lambda days: sum(len(day.fields) for day in days),
               default=[])


def verb(line, names):
    """The match of a line that begins with a verb ("Check into ..") or gives a ride's route."""
    found = VERB.match(line) or RIDE.match(line)
    if found.lastgroup != "transportation":
        return found
    route = names.route(line)
    if FLIGHT_NUMBER.search(line):
        return found if route or found.re is VERB else None
    return found if route and route[0] and found.re is VERB else None


# ---------------------------------------------------------------- (3) names
CUISINE = r"""(?:american|italian|mexican|indian|chinese|french|mediterranean|seafood|pizza|
    fast food|desserts?|tea|cafe|bbq|bakery)\b"""
DETAIL = r"""(?:average|avg|costs?|prices?|cuisines?|address|room type|rat(?:ing|ed)|contact|phone|
    website|minimum|max\w{0,5}|reviews?|house rules?|free|(?:private|shared|entire) (?:room|home)|
    per|usd|child\w{0,4}|allow\w{0,3}|no|flight|approx\w{0,9}|about|around|entry|admission|note|closed|
    open)\b"""
REMARK = pattern(rf""" ?[|;→←⭐★]| [·@] | ?\[(?=\$)|,? ?[~≈]?\$ ?\d|,?\.? ?$|
    [,.] (?={DETAIL}|{CUISINE}|(?-i:[a-z$~]))|
    :? ?(?:[-–—:]{{1,3}}|\b) (?={DETAIL} ?[:$~\d]|[~≈]?\$)|
    \ ?[-–—:]{{1,3}} (?={DETAIL}|{CUISINE}|[\d.,]{{1,6}} ?(?:/|per\b|night|star|usd)|
    (?-i:(?!the [A-Z])[a-z])|(?-i:[A-Z][\w'-]{{0,20}} (?!(?:of|and|the|in|de|at|by|la) )[a-z]))|
    (?<!\b(?-i:[A-Z]))(?<!\b(?-i:[A-Z][a-z]))(?<!\bAve)[.!] (?=["']?(?-i:[A-Z]))|
    \ (?:or|instead of|rather than|before|after|then|where|which|followed by) |
    \ (?:for|at|around|near|with|in|by) (?=[~$\d]|
    (?:(?:an?|the|your) )?(?!(?:an?|the|your|of) )(?-i:[a-z]{{2}}))""")  # where a name ends
ASIDE = pattern(rf"""\A(?-i:[a-z~])|[$\d:]|\b{CUISINE}|\b{DETAIL}|included\b|
    friendly\b""")  # a remark in parentheses after a name, not part of it
PAREN = re.compile(r" ?\(((?:[^()]|\([^()]{0,40}\)){0,120})\)")
NOTHING = pattern(r"""\W{0,60}$|\(|[-–—]{1,5} ?(?:[(,.;|$]|$)|free\W{0,9}$|(?:none|n/?a|nil|null|
    nothing|tbd|included|on your own|skip(?:ped)?|travel(?:ing)? day|departure|rest|leisure|
    not (?:applicable|needed|required|planned|specified|available|provided|included)|
    no (?:breakfast|lunch|dinner|meals?|attractions?|accommodations?|transport(?:ation)?|travel|
    stay)|(?:back |at |return(?:ing)? )?home|check(?:ing)?[ -]?out|in[- ]flight|in transit|en route|
    on the (?:road|way|go|flight|plane)|free (?:time|day|morning|afternoon|evening))\b
    (?! (?-i:[A-Z])| ?[&'])""")
LEAD = pattern(rf"""(?:(?-i:the)|at|to|we|in|into|try|eat|dine|go|enjoy|have|head to|
    {VISIT}|{STAY}|(?:have |enjoy |eat |grab )?(?:an? )?(?:quick |light )?
    (?:breakfast|lunch|dinner|meal|bite) at) |\d{{1,2}}[.)] |[\s:;,.|–—-]+|
    \(?\d{{1,2}}:\d\d ?(?:[ap]\.?m\.?)?\)? ?|
    (?-i:[A-Z][a-z]{{1,15}}(?: [a-z'-]{{1,15}}){{1,6}} (?:at|in|to) (?=[\["A-Z]))|
    instead of [^;]{{1,120}}?, (?=(?:stay|eat|go|visit|try|have|dine|head|book|we)\b)""")
SAME = pattern(r"""(?:(?:stay|return|back|overnight|at|to|in|the) ){0,4}same(?: (?:hotel|place|
    accommodation|lodging|as (?:above|before|(?:on )?(?:day|night) \w{1,5}|
    (?:the )?(?:previous|last) (?:night|day))))?""")
WHOLE_STAY = pattern(r"(?:entire|whole) (?:stay|trip)|(?:both|all|for \w{1,5}) nights(?! min)")
SIGHTS = re.compile(";| · ")
JOINT = re.compile(r",? (?:and|&|\+|then) |[,/&+] ?(?=[\[A-Z])")
SEPARATOR = re.compile(r" ?, ?| ?\(| in | [-–—] | at ")
STATE = re.compile(r"(?:, ?| ?\()([A-Z]{2}\b|[A-Z][\w ]{1,30})(?: \d{5})?(?:, USA)?\)?")
OPEN, CLOSE = re.compile(r"\[\"|\[|\"|"), {'["': '"]', "[": "]", '"': '"'}
WORD = re.compile(r"\w+|.")
ROUTE = pattern(r"\bfrom:? (?=(?-i:[A-Z]))([^|;]{1,60}?),? ?(?:\bto\b|→|->|—|–):? ?([^|;]{1,60})")
ARROW = pattern(r"""(?:, ?(?-i:[A-Z])[\w ]{1,20}| ?\([^()]{0,40}\))? ?
    (?:\bto\b|[→➔➡➜➝⇒⟶»✈🛫🚗🚕🚙]|-{0,2}>|=>|–|—|-) ?(?:travel to )?""")
CITY_END = pattern(r""" ?$| ?[,;:|()\[\]→!"]|\.(?= |$)| [-–—→]| (?:on|at|by|via|for|with|using|in|
    and|then|depart\w{0,6}|arriv\w{0,6}|duration|back|flight)\b""")
MOVE = pattern(r"""travel|arriv|fl(?:y|ight)|driv|head|return|transfer|journey|welcome|taxi|self|
    road|move|back|trip|by |(?:rental )?car\b|train|bus\b""")


class Names:
    """The cities and venues of a database: finds them in a text, and where their names end."""

    def __init__(self, database):
        self.database, self.cities, self.stored = database, dict(database.cities), {}
        self.gapped = []  # (name with a line break or gap inside, the same with SEAM)
        for table in ("hotels", "restaurants", "attractions"):
            for city in getattr(database, f"{table[:-1]}_cities"):
                self.cities.setdefault(city, "")
                for name in [row.name.strip() for row in getattr(database, table)(city)]:
                    joined = GAP.sub(SEAM, name)
                    self.gapped += [(name, joined)] * (joined != name)
                    key = plain(joined).strip()
                    word = WORD.match(key + " ")[0].lower()
                    self.stored.setdefault((table, city, word), []).append((key.lower(), key, name))
        for rows in self.stored.values():
            rows.sort(key=lambda row: -len(row[0]))
        initials = {}  # alternatives that differ in their first letter are searched fastest
        for city in sorted(self.cities, key=len, reverse=True):
            initials.setdefault(re.escape(city[:1]), []).append(re.escape(city[1:]))
        self.city_names = re.compile("|".join(
            rf"{first}(?<!\w{first})(?:{'|'.join(rest)})(?![^\W_])"
            for first, rest in initials.items()) or "(?!)")

    def known(self, text, slot, cities):
        """(length, name as stored, city) of the longest venue of these cities that begins a text;
        length 0 if none does."""
        low, best = text[:300].lower(), (0, "", cities[0])
        word = WORD.match(low + " ")[0]
        for city in cities:
            for lower, key, name in self.stored.get((TABLE_OF[slot], city, word), ()):
                size = len(lower)
                if low.startswith(lower) and size > best[0] and not text[size:size + 1].isalnum():
                    best = size, name if text[:size] == key else text[:size], city
                    break
        return best

    def cities_in(self, text):
        """The matches of the cities in a text, without the states that follow them."""
        found = list(self.city_names.finditer(text, 0, 400))
        return [city for before, city in zip([None, *found], found, strict=False)
                if not before or self.cities[before[0]] != city[0]
                or text[before.end():city.start()].strip(" ,(")]

    def city(self, text):
        """The city at the beginning of a text, as it is written, without its state."""
        text = text.lstrip(" :[\"'(")
        found = self.city_names.match(text)
        known = found and CITY_END.match(text, found.end())
        return found[0] if known else text[:CITY_END.search(text).start()].strip(" .:]\"'")

    def route(self, text):
        """(from, to, begin, end) of the first route in a text: "from A to B", "A -> B", or "to B",
        which gives ("", B, ..); None without a route."""
        text = text[:400]
        for found in ROUTE.finditer(text):
            start, end = self.city(found[1]), self.city(found[2])
            if end[:1].isupper():
                named = start in self.cities or start[:1].isupper() and not MOVE.match(start)
                start = start if named else ""
                return start, end, found.start(), text.index(end, found.start(2)) + len(end)
        cities = self.cities_in(text)
        for one, two in zip(cities, cities[1:], strict=False):
            if one[0] != two[0] and ARROW.fullmatch(text, one.end(), two.start()):
                return one[0], two[0], one.start(), two.end()
        to = next((city for city in cities
                   if text[:city.start()].endswith((" to ", " for "))), None)
        return to and ("", to[0], to.start() - 3, to.end())

    def city_at(self, text, at, last):
        """(city, end) of the known city at position `at`, after its state; ("", at) if there is
        none. last: whether the text must end there."""
        found = self.city_names.match(text, at)
        end = found.end() if found else at
        state = found and STATE.match(text, end)
        if state and (len(state[1]) == 2 or state[1] == self.cities[found[0]]):
            end = state.end()
        end += text.startswith(")", end)
        done = not text[end:].strip(" .,") or text.startswith(" (", end) \
            or not last and JOINT.match(text, end)
        return (found[0], end) if found and done else ("", at)

    def venue(self, text, slot, cities):
        """("Name, City", rest of the text) of the venue at the beginning of a text. Its name ends
        with a name from the database, at a closing bracket, or where REMARK matches."""
        size, name, home = self.known(text, slot, cities)
        at, opener = size, "" if size else OPEN.match(text)[0]
        if opener:
            size, name, home = self.known(text[len(opener):], slot, cities)
            close = text.find(CLOSE[opener], len(opener) + size)
            inner = text[len(opener):close if close > 0 else len(text)]
            text = inner + (text[close + len(opener):] if close > 0 else "")
            at = size or len(inner)
        text = text[:at] + PAREN.sub(
            lambda aside: "" if ASIDE.search(aside[1]) and not self.city_names.fullmatch(aside[1])
            else aside[0], text[at:])
        end = max(at, REMARK.search(text, at).start())
        piece, rest = text[:end], text[end:]
        second = SEPARATOR.match(piece, at)  # "[The Museum, Houston], Houston": the second counts
        for separator in filter(None, [second, *SEPARATOR.finditer(piece, size)]):
            city, after = self.city_at(piece, separator.end(), slot != "attraction")
            if city:
                name = name if size == separator.start() else piece[:separator.start()].strip()
                return f"{name}, {city}", piece[after:] + rest
        joint = JOINT.match(piece, size) if size and slot == "attraction" else None
        more = piece[joint.end():] if joint else ""
        if more.startswith("[") or joint and self.known(more, slot, cities)[0]:
            return f"{name}, {home}", piece[size:] + rest
        if size == len(piece):
            return f"{name}, {home}", rest
        head, comma, tail = piece.rpartition(",")
        if comma and tail.strip()[:1].isupper() and len(head) >= size:
            return f"{head.strip()}, {tail.strip()}", rest  # a city that is not in the database
        return f"{piece.strip(' ,')}, {home}", rest

    def venues(self, text, slot, cities):
        """Yield "Name, City" of a field: its venue, or all its sights."""
        for part in islice(SIGHTS.split(text), 60) if slot == "attraction" else [text]:
            for _ in range(20):
                part = self.without_lead(part.strip(), slot, cities)
                bare = part.lstrip('["')
                if not self.known(bare, slot, cities)[0] and (
                        NOTHING.match(bare) or MONEY.match(bare) or part[0].islower()
                        or REMARK.match(part)):
                    break
                place, rest = self.venue(part, slot, cities)
                yield place.replace(SEAM, " ")
                joint = None if REMARK.match(rest) else JOINT.match(rest)
                if slot != "attraction" or not joint and "[" not in rest:
                    break
                part = rest[joint.end() if joint else rest.index("["):]

    def without_lead(self, text, slot, cities):
        """A field's text from the name on: without "at", "Visit", "Enjoy a quick bite at"."""
        for _ in range(8):
            lead = LEAD.match(text)
            if not lead or NOTHING.match(text) or self.known(text, slot, cities)[0] and \
                    not self.known(text[lead.end():], slot, cities)[0]:
                break
            text = text[lead.end():]
        return text


names_of = cache(Names)  # collected once per database


# ---------------------------------------------------------------- (4) plan
RIDES = {"flight": "Flight", "taxi": "Taxi", "driving": "Self-driving"}
MODE = pattern(r"""(?<![\w-])(?<!no )(?<!not )(?<!without )(?:(?P<flight>flights?\b|fly(?:ing)?\b|
    airline|(?:air)?plane\b)|(?P<taxi>(?:taxi|cab|uber|lyft)\b)|(?P<driving>self-? ?driv\w{0,9}|
    driv\w{1,9}\b(?! (?:time|dist|dur))|(?:(?:rental|rented|hire) )?cars?\b|rental\b))""")
OTHER_MODE = pattern(r"""\b(?:train|bus|ferry|walk(?:ing)?|boat|shuttle|metro|subway|tram|
    bik(?:e|ing))\b""")
LOCAL = pattern(r"\b(?:local|(?:as|if) needed|within|around|downtown|on foot|in the city)\b")
FLIGHT_NUMBER = pattern(r"""\b((?-i:F)\d{3,9})\b|\bflight ?(?:number|no\.?|#)?:? ?\[?
    ((?-i:[A-Z]){1,3} ?\d{2,7})\b""")
PARTS, FIRST_PART, DIGIT = re.compile(r", |[;|()→]"), re.compile(r"[^,;|(\[]*"), re.compile(r"\d")
BACK = pattern(r"\b(?:return|home)\b")
CAPITALS = re.compile(r"[A-Z][\w.'-]{0,20}(?: [A-Z][\w.'-]{0,20}){0,3}")
NO_CITY = pattern(r"""\b(?:day|\w{3,6}day|explor|adventure|sight|cultur|free|relax|arriv|depart|
    final|tour|museum|morning|local|discover|histor|fun|arts?\b|more|travel|return|home|rest|leisure|
    trip|nature|downtown|city|highlight|experience|itinerary|plan|full|march|april)""")


def ends_of_day(day, before, home, names):
    """(start, end): the cities of a day, equal on a day without travel. before: the end of the
    previous day, which is also this day's city unless the day names another."""
    routes = [route for text in day.fields.get("transportation", ())
              if (route := names.route(text))]
    ride = (routes[0][0] or before, routes[-1][1]) if routes else None
    label = next(iter(day.fields.get("current_city", ())), "")
    title = DATE.sub("", label or day.title, 1).strip(" :;-–—,.()|[]")
    route = names.route(title) or (
        " to " in title.lower() and names.route(f"from {title}")) or None
    if route and route[0]:
        return route[:2]
    if route and (not ride or route[1] in ride):  # "Travel to B"
        return ride[0] if ride else before, route[1]
    known = [city[0] for city in names.cities_in(title)]
    if ride and (not label or {names.city(label), *known} & {*ride}):
        return ride
    if label and names.city(label):
        return names.city(label), names.city(label)
    if known:
        comes = MOVE.match(title) and not title.lower().startswith("depart")
        return before if comes else known[-1], known[-1]
    if CAPITALS.fullmatch(title) and not NO_CITY.search(title):
        return title, title  # a city that is not in the database
    return before, home if BACK.search(title) else before


def ride(text, names):
    """A ride in TravelPlanner's form, with the cities and figures of the text."""
    number, route = FLIGHT_NUMBER.search(text), names.route(text)
    if NOTHING.match(text.strip("[] ")) or MONEY.match(text):
        return "-"
    before, after = (text[:route[2]], text[route[3]:]) if route else (text, "")
    words = before + FIRST_PART.match(after)[0] if route else FIRST_PART.match(before)[0]
    mode, other = MODE.search(words) or MODE.search(f"{before} {after}"), OTHER_MODE.search(words)
    if not route and not number and (not mode or LOCAL.search(words)):
        bare = text.lower().startswith("cost") and not other
        return f"Self-driving, {text.replace('$', '')}" if bare else "-"  # "-": within the city
    parts = [words.strip(" .,") if other else RIDES[mode.lastgroup] if mode else "Self-driving"]
    if number:
        parts = [f"Flight Number: {number[1] or number[2]}"]
        before, after = (FLIGHT_NUMBER.sub("", side) for side in (before, after))
    if route:
        parts.append(f"from {route[0]} to {route[1]}" if route[0] else f"to {route[1]}")
    for part in PARTS.split(f"{before}|{after}"):  # times, lengths and prices, not remarks
        part = part.strip(" .:[]=")
        if DIGIT.search(part) and not MODE.search(part):
            parts.append(part)
    return ", ".join(parts)


def rides(texts, names):
    """The rides of a day as one field, without repetitions."""
    found, joined = [], []
    for text in texts:
        if (joined and FLIGHT_NUMBER.search(text) and not names.route(text)
                and not FLIGHT_NUMBER.search(joined[-1])):
            joined[-1] += f", {text}"  # "Flight from A to B" and its number in a field of its own
        else:
            joined.append(text)
    for text in joined:
        one = ride(text, names)
        if one != "-" and (not found or names.route(text)
                           and not any(one in kept for kept in found)):
            found.append(one)
    return "; ".join(found) or "-"


def fill_day(day, plan, before, home, names):
    """(the plan of a day, the city where the day ends). plan: the days before it; before: (the last
    of their Days or None, the city where it ends)."""
    last, city = before
    start, end = ends_of_day(day, city, home, names)
    filled = {"day": day.number, **dict.fromkeys(FIELDS, "-")}
    filled["current_city"] = f"from {start} to {end}" if start != end else end
    filled["transportation"] = rides(day.fields.get("transportation") or [
        day.title if FLIGHT_NUMBER.search(day.title) else ""], names)
    cities = list(dict.fromkeys([start, end] if end == home else [end, start]))
    stays = day.fields.get("accommodation")
    if not stays and last and start == end == city:  # "X (for the entire stay)" is written once
        stays = [text for text in last.fields.get("accommodation", ()) if WHOLE_STAY.search(text)]
        day.fields["accommodation"] = stays
    for slot in SLOTS:
        places = [place for text in day.fields.get(slot, ()) for place in names.venues(
            text, slot, [end] if slot == "accommodation" else cities)]
        if slot == "attraction":
            filled[slot] = "".join(f"{place};" for place in places) or "-"
        elif places:
            filled[slot] = places[0]
    if plan and stays and SAME.fullmatch(PAREN.sub("", stays[0]).strip(" .[]-")):
        filled["accommodation"] = plan[-1]["accommodation"]
    return filled, end


def read_plan(text, task, database):
    """(plan, unused lines, their share of all lines or None if there is no text).

    plan: TravelPlanner's list of days, or None if the text has none. Never raises.
    """
    if not isinstance(text, str):
        return None, [], None
    names, home = names_of(database), task.get("org") or ""
    lines = list(islice(read_lines(text, names), MOST_LINES))
    days, unused = read_days(lines, names)
    plan, city = [], home
    for last, day in zip([None, *days], days, strict=False):
        filled, city = fill_day(day, plan, (last, city), home, names)
        plan.append(filled)
    has_fields = any(day[slot] != "-" for day in plan for slot in FIELDS[1:])
    return plan if has_fields else None, unused, len(unused) / max(len(lines), 1)


def parse_plan(text, task, database):
    """The plan of an itinerary text, or None."""
    return read_plan(text, task, database)[0]


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
LIST_START = re.compile(r"\[(?=\s{0,99}[{\]])")


class NoPlan(ValueError):
    """A formatter's replies hold no list of days."""


def days_in(reply):
    """The days in a formatter's reply. Of several lists, such as a draft and the plan, the longest,
    and of equally long ones the last; [] for an empty list, None without a list of days."""
    decoder, at, best = json.JSONDecoder(strict=False), 0, None
    for start in islice(LIST_START.finditer(reply), MOST_VALUES):
        if start.start() >= at:
            with suppress(ValueError, RecursionError):
                days, at = decoder.raw_decode(reply, start.start())
                if all(isinstance(day, dict) and len(day.keys() & {*FIELDS}) > 1 for day in days) \
                        and len(days) >= len(best or []):
                    best = days
    return best


def format_plan(text, task, model, url, **options):
    """(plan or None, tokens used) of an itinerary text, read by an LLM; NoPlan or ChatError.

    options: those of runtime.chat. If a reply has no list of days, the LLM is asked once more."""
    prompt, tokens = (PROMPTS / "itinerary.txt").read_text(encoding="utf-8"), 0
    ask = f"Request:\n{task.get('query', '')}\n\nItinerary:\n{text[:LONGEST_REPLY]}"
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": ask}]
    for _ in range(2):
        reply = chat(url, model, messages, 0.0, max_tokens=8192, **options)
        tokens += reply.tokens
        days = days_in(spoken(reply))
        if days is not None:
            return [clean_day(day, i) for i, day in enumerate(days, 1)] or None, tokens
    error = NoPlan(f"{url}: two replies without a list of days, from model {model}")
    error.tokens = tokens
    raise error


def clean_day(day, number):
    """A day as an LLM wrote it -> the eight fields, with cities and driving in uniform words."""
    clean = {"day": number}
    for field in FIELDS:
        value = day.get(field) or "-"
        value = ";".join(map(str, value)) + ";" if isinstance(value, list) else str(value).strip()
        if field in ("current_city", "transportation"):
            value = IN_BRACKETS.sub("", value)
        mode = MODE.match(value) if field == "transportation" else None
        if mode and "Flight Number" not in value:
            value = RIDES[mode.lastgroup] + value[mode.end():]
        clean[field] = value
    return clean


class Reader:
    """Turns answers into plans by rules, or by an LLM (the formatter) with many requests at a time.

    An answer on which the formatter fails is judged as an answer without a plan, and counted. If
    the formatter answers nothing for `bound` seconds, the run ends. counts: answers sent to the
    formatter, failures, and the tokens of all its replies."""

    def __init__(self, endpoint=None, key=None, bound=300, retries=3):
        self.endpoint, self.key = endpoint, key
        self.bound, self.retries = bound, retries  # seconds for a request, its tries
        self.counts = {"asked": 0, "failed": 0, "tokens": 0}
        self.pool, self.futures, self.lock = None, {}, threading.Lock()

    def prefetch(self, answers):
        """Start to read [(text, task)] without waiting -> the Futures of the formatter's replies"""
        asked = answers if self.endpoint else ()
        return [self._future(text, task) for text, task in asked if isinstance(text, str)]

    def read(self, text, task, database):
        """(plan, unused lines, their share, costs). The first three are as in read_plan; an LLM
        does not report which lines it used."""
        if not self.endpoint:
            return *read_plan(text, task, database), {}
        if not isinstance(text, str):  # no answer, and nothing to pay for
            return None, [], None, dict(zip(COSTS, (0.0, 0), strict=True))
        try:
            plan, problem, tokens = self._future(text, task).result(2 * self.bound)
        except concurrent.futures.TimeoutError:
            plan, tokens = None, 0
            problem = f"{self.endpoint[0]} gave no reply within {2 * self.bound} s"
        costs = dict(zip(COSTS, (float(bool(problem)), tokens), strict=True))
        if problem:
            self._count(failed=1)
            return None, [f"the formatter failed: {problem}"], 1.0, costs
        return plan, [], None, costs

    def close(self):
        """Cancel the requests that have not been sent."""
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, text, task):
        name = text, task.get("query", "")
        with self.lock:
            self.pool = self.pool or concurrent.futures.ThreadPoolExecutor(CONCURRENCY)
            if len(self.futures) > 10_000:
                del self.futures[next(iter(self.futures))]  # the oldest
            if name not in self.futures:
                self.futures[name] = self.pool.submit(self._ask, text, task)
            return self.futures[name]

    def _ask(self, text, task):
        """(plan, why there is none or None, tokens used). While the endpoint answers no request,
        wait: an unread answer must not be judged as a bad one. ChatError after `bound` seconds."""
        url, model = self.endpoint
        try:
            plan, tokens = format_plan(text, task, model, url, api_key=self.key,
                                       timeout=self.bound / 4, retries=self.retries,
                                       patience=self.bound)
            found = plan, None, tokens
        except (Refused, NoPlan) as error:
            found = None, str(error), getattr(error, "tokens", 0)
        except ChatError as error:
            raise ChatError(f"{error}; repair it, then repeat this command, which resumes from "
                            "what was saved") from None
        self._count(asked=1, tokens=found[2])
        return found

    def _count(self, **more):
        with self.lock:
            for name, number in more.items():
                self.counts[name] += number


def reader_of(text):
    """A flag type: "rules" -> None, URL=MODEL -> (URL, MODEL)."""
    return None if text == "rules" else endpoint(text)


def add_reader_flags(parser):
    """Add the flags that choose how answers become plans."""
    add = parser.add_argument
    add("--reader", type=reader_of, metavar="rules|URL=MODEL", help="how an answer becomes a plan: "
        "rules (default), or the LLM MODEL at an OpenAI-compatible endpoint, as in the STAR paper")
    add("--reader-key", metavar="FILE", help="file that holds the API key of --reader")


def open_reader(args):
    """The Reader that these flags choose; for a command without them, the rules."""
    return Reader(getattr(args, "reader", None), read_key(getattr(args, "reader_key", None)))


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
    database, reader = open_database(args.database), open_reader(args)
    rows = list(read_texts(args.file))  # check every line before the first request
    reader.prefetch([(text, task) for _, task, text in rows])
    for row, task, text in rows:
        plan = reader.read(text, task, database.of(task))[0]
        print(json.dumps({**row, "plan": plan}, ensure_ascii=False))
    if args.reader:
        print(f"format_plan.py: {reader.counts}", file=sys.stderr)
    reader.close()


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="jsonl file of episodes or texts")
    parser.add_argument("--database", metavar="DIR", help="folder of the tables whose names the "
        "rules look for (default: $STAR_DATABASE, else database/mini)")
    add_reader_flags(parser)
    run("format_plan.py", read_all, parser.parse_args(argv))


if __name__ == "__main__":
    main()
