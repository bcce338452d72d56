"""
Itinerary text -> plan: an agent's free-form answer becomes TravelPlanner's list of days, which evaluate.py can judge.

    (1) text    JSON, tables and markdown unfold into plain lines
    (2) days    "Day 2: ...", "**Day 2 (March 20th)**" or a bare date opens a day; notes and cost tables close it
    (3) lines   a line is a field ("Lunch: ..."), prose with cues ("have lunch at ..., then visit ..."), an attribute of
                the ride before it ("Departure: 08:10"), or nothing; what it says becomes events (slot, text, how)
    (4) names   the longest name of the database's that stands at that place in the text, else the text as written
    (5) plan    a day's events become its slots; what they leave open (its city, the next night of a stay) is taken
                from the days before it

What the database does not know stays as it was written, so that the judge can call it a hallucination: a reader must
not repair. Only the wording of rides is made uniform, since "Driving" escapes the official judge.

parse_plan reads by rules: free, offline, the same every time; RL's reward uses it. format_plan asks an LLM, as the STAR
paper did [1], through chat, the project's one HTTP client. [1] arXiv:2603.21972

Reads   FILE.jsonl: episodes (task, answer), or texts (text, and org as context)
Writes  stdout: each line again with its "plan" (null where the text holds none), or the comparison

    python format_plan.py FILE.jsonl --database DIR > plans.jsonl
    python format_plan.py FILE.jsonl --llm-url http://localhost:8000/v1 --llm-model M --cache cache/plans > plans.jsonl
    python format_plan.py FILE.jsonl --compare --llm-url http://localhost:8000/v1 --llm-model M
"""
import argparse, ast, hashlib, http.client, json, os, random, re, sys, time, urllib.error, urllib.request
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from sandbox import open_database

MEALS = ("breakfast", "lunch", "dinner")
SLOTS = ("breakfast", "attraction", "lunch", "dinner", "accommodation")
FIELDS = ("current_city", "transportation", *SLOTS)
TABLES = {**dict.fromkeys(MEALS, "restaurants"), "attraction": "attractions", "accommodation": "hotels"}  # of Database
LONGEST_TEXT, LONGEST_LINE = 200_000, 4_000  # characters; what is longer is no itinerary and is cut


# ---------------------------------------------------------------- grammar
# Quantifiers over free text are bounded, so that no pattern is worse than linear in hostile text.

def words(text):
    """A pattern, written over several lines for the eye -> one compiled, case-blind pattern without the layout."""
    return re.compile(re.sub(r"\n\s*", "", text), re.I)


MONTH = (r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
         r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?")
WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b\.?"
DATE = words(rf"""(?:\b{WEEKDAY},?\s*)?
    (?:\b{MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?\b|\b\d{{1,2}}(?:st|nd|rd|th)?\s+{MONTH}|\b\d{{4}}-\d\d-\d\d\b|
    \b\d{{1,2}}/\d{{1,2}}(?:/\d{{2,4}})?\b)(?:,?\s*20\d\d\b)?(?:,?\s*\(?{WEEKDAY}\)?(?!\s(?-i:[A-Z])))?""")
CARDINALS = "one two three four five six seven eight nine ten".split()
ORDINALS = "first second third fourth fifth sixth seventh".split()
NUMBERS = {word: n for row in (CARDINALS, ORDINALS) for n, word in enumerate(row, 1)}
DAY = words(rf"""(?:on\s+)?(?:the\s+)?(?:days?\s*#?\s*(\d{{1,2}}|{'|'.join(CARDINALS)})\b
    (?:\s?(?:-|–|&|and|to)\s?(?:day\s*)?(\d{{1,2}})\b(?!:\d|\s*{MONTH}|[/-]))?|
    ({'|'.join(ORDINALS)})\s+day\b)\W{{0,3}}""")

# a field: label, colon, value
LABELS = {
    "city": r"current[ _]city|city|location|destination",
    "transportation": r"transportation|transport|travel|getting (?:there|around|back|home)|return|departure|train|bus|"
                      r"(?:rental )?car|flights?|flight (?:number|no\.?|details)|(?:self-?\s?)?driv(?:e|ing)|taxi",
    "breakfast": r"breakfast|brunch", "lunch": r"lunch", "dinner": r"dinner|supper|dining",
    "attraction": r"attractions?|activit(?:y|ies)|sightseeing|sights?|visits?|explore|"
                  r"(?:places|things) to (?:visit|see|do)",
    "accommodation": r"accommodations?|hotels?|lodging|stay|overnight(?: stay)?|check-?\s?in|where to stay|airbnb"}
LABEL = words(rf"""(?:(?:early|late|mid|morning|midday|noon|afternoon|evening|night|optional|main|outbound|inbound|
    return|first|second|third|additional|daily|suggested|recommended|planned|other|local|day)[\s-]+){{0,2}}
    (?:{'|'.join(f'(?P<{slot}>{label})' for slot, label in LABELS.items())})
    (?:\s+(?:visits?|spots?|details?|plan|time|venue|restaurant|for [\w ]{{1,30}}))?\s*#?\d{{0,2}}\s*
    (?:\([^()]{{0,60}}\)\s*)?(?::|\s[-–—|]\s|=|$)\s*""")
NEXT_FIELD = words(rf"\s*[|;•·]\s*(?=(?:{'|'.join(LABELS.values())})\s{{0,2}}\d?:)")

# prose: what announces a slot in a sentence
CUE = words(r"""(?<![\w'-])(?:
    (?P<breakfast>breakfast|brunch)|(?P<lunch>lunch)|(?P<dinner>dinner|supper)|
    (?P<out>check(?:ing|s)?[ -]?out(?= (?:of|from|at|by)\b|:|$))|
    (?P<accommodation>check(?:s|ing)?[ -]?in(?:to|\s+to|\s+at|\s*:)?|(?:stay(?:ing)?(?: overnight| the night| again)?|
    overnight(?: stay)?|spend(?:ing)? the night|sleep(?:ing)?|accommodation) (?:at|in)|accommodation)|
    (?P<transportation>self-?\s?driv(?:e|ing)|flights?|fly(?:ing)?|drive|driving|taxi|cab|train|bus)|
    (?P<attraction>visit(?:ing)?|explor(?:e|ing)|tour(?:ing)?|see|stop (?:at|by)|stroll (?:through|along)|discover|
    check out|head to))(?![\w'])""")
AT_A_PLACE = words(r"""\s*(?:\([^()]{0,40}\)\s*)?(?::|-|–|(?:at|from|in|with|is)\b|
    ,?\s*(?:head|go|try|visit|eat|we|stop|enjoy|dine|you)\b)""")
BRIDGE = words(r"""(?:[\s,;]|
    \b(?:and|then|before|after|followed|by|you|we|will|can|have|enjoy|eat|grab|take|a|your)\b){1,12}$""")
LEAD = words(r"""(?:(?:have|enjoy|grab|eat|dine|dining|try|start|breakfast|brunch|lunch|dinner|supper|meal|late|early|
    quick|light|delicious|nice|your|our|a|an|the|night|with|for|check|checking|check-in|stay|staying|overnight|spend|
    sleep|return|back|head|heading|go|going|continue|stop|finally|we|you|will)\s+){0,8}
    (?:at|to|into|in|from|by|visit|visiting|explore|exploring|tour|see|is|try|enjoy)\b:?\s+|
    [\s:;,.|)\]–—-]+|\d{1,2}[.)]\s*(?=\[)|(?:and|then|name:|finally|(?-i:the))\s+""")
CLOCK = r"\(?\d{1,2}(?::\d\d)?\s*(?:[ap]\.?m\.?)?(?:\s*(?:-|–|to)\s*\d{1,2}:?\d{0,2}\s*(?:[ap]\.?m\.?)?)?\)?"
TIME = words(rf"""(?:(?:early |late |mid-?)?(?:morning|noon|midday|afternoon|evening|night)\b\s*(?:{CLOCK})?|
    {CLOCK}(?=\s*[:|–—-]))(?:\s*[:|–—,-])?\s*""")

# what is no venue
NOTHING = words(r"""\W*$|-+\s*(?:\(|$|[.;|])|(?:none|n/?a|nil|null|nothing|tbd|there (?:is|are) no|skip(?:ped)?|
    not (?:applicable|needed|required|planned|specified|available|provided|included)|
    no (?:breakfast|lunch|dinner|meals?|attractions?|accommodations?|transportation|transport|travel|stay)|
    on the (?:road|way|go|flight|plane)|in[- ]flight|in transit|en route|rest|leisure|relax(?:ation)?|
    free (?:time|day|morning|afternoon|evening))\b(?!\s+(?-i:[A-Z])|\s*[&'])""")
MONEY = words(r"(?:(?:approx\w*\.?|about|around|estimated(?: cost)?:?|avg\.?|average)\s*)?~?\$\s?[\d,.]+|free\W*$")
ATTRIBUTE = words(r"""(?:depart(?:ure|s|ing)?|arriv(?:al|es|ing)|duration|distance|costs?|price|fare|route|from|to|
    airline|flight (?:number|no\.?))(?: (?:time|city|date))?\s*:""")
NOTE = words(r"""(?:\w+ ){0,2}(?:notes?|costs?|totals?|sub-?totals?|budget|price|address|phone|website|contact|rating|
    cuisines?|room type|house rules?|minimum nights|max(?:imum)? occupancy|review|tips?|reason|remaining|description|
    expenses?|date)\b[^:]{0,30}:""")
SECTION = words(r"""(?:\w+ ){0,3}(?:costs?|budget|expenses?|expenditure|summary|breakdown|notes?|tips?|highlights?|
    totals?|overview|reminders?|recommendations?|considerations?|constraints?|information|requirements?)\b
    [^:.]{0,40}:?$|
    (?:this|the) (?:plan|itinerary|trip|total|remaining|above|estimated)\b|(?:total|estimated|remaining|overall)\b|
    (?:important |key )?notes?:|please note|note that|in (?:total|summary)\b|unfortunately|i hope|
    enjoy your (?:\w+ )?(?:trip|stay|travels?|visit|vacation|journey|time)|safe travels|let me know|feel free""")
SAME = words(r"""(?:(?:stay|return|back|overnight|at|to|in|the) ){0,6}
    (?:same\b|as (?:above|before|day)|(?:previous|your|our|the) (?:hotel|accommodation)\b)""")
FOR_NIGHTS = words(r"""(?:entire|whole) (?:stay|trip|visit|duration)|throughout|
    (?:all|both|[2-9]|two|three|four) nights(?! min)""")

# rides and ways
MODES = {"flight": "Flight", "taxi": "Taxi", "car": "Self-driving"}
MODE = words(r"""\b(?<!no )(?<!without )(?:(?P<flight>flights?\b|fly|airline)|(?P<taxi>(?:taxi|cab|uber|lyft)\b)|
    (?P<car>self-?\s?driv\w*|driv\w+|(?:rental )?car\b))""")
OTHER_MODE = words(r"\b(?:train|bus|ferry|walk(?:ing)?|boat|shuttle)\b")
FLIGHT_NUMBER = words(r"""\b((?-i:F)\d{3,9})\b|\bflight\s*(?:number|no\.?|#)?:?\s*\[?((?-i:[A-Z]){1,3}\s?\d{2,7})\b""")
DETAILS = {"duration": words(r"""duration:?\s*([^,;|$()]{1,40}?)\s*(?=[,;|()]|$)|
                             \b(\d{1,2}\s*(?:hours?|hrs?|h)\b\s*(?:\d{1,2}\s*(?:min\w*|m)\b)?|\d{1,3}\s*min\w*)"""),
           "distance": words(r"\b(\d[\d,]{0,8}(?:\.\d+)?\s*(?:km|kilometers|miles|mi)\b)"),
           "cost": words(r"\$\s?(\d[\d,]{0,8}(?:\.\d+)?)|cost:?\s*~?(\d[\d,]{0,8}(?:\.\d+)?)")}
FROM_TO = words(r"\bfrom:?\s+(\S[^|;]{0,60}?),?\s*(?:\bto\b|→|->):?\s+(\S[^|;]{0,60})")
GUESS = words(r"\((?:[^()]{0,20}\b)?(?:assum|similar|based on|note|no )[^()]{0,200}\)")
TO = words(r"\b(?:to|for|into|in)\s+$")
ARROW = re.compile(r"\s*(?:to|→|->|➔|➡|➜|=>|–|—|-|>)\s*")
MOVE = words(r"""travel|depart|arriv|fl(?:y|ight)|driv|head|return|transfer|journey|welcome|taxi|self|road|move|relocat|
    explor|back|trip""")
TITLE = words(r"""\b(?:day|\w{3,6}day\b|explor|adventure|sight|cultur|free|relax|arriv|depart|final|tour|museum|morning|
    local|discover|histor|fun|arts?\b|more|travel|return|home|rest|leisure|trip|nature|downtown|city)""")

# where names and cities end
NAME_END = words(r"""\s*(?:$|[,;|)\]]|[.!?](?:\s|$)|[(\[]|:\s|\s[-–—]+\s|
    \s(?:or|and|for|in|before|after|then|around|where|which|followed|tonight|until)\b)""")
CITY_END = words(r"""\s*(?:[,;|(\[→:]|\s[-–—]|\.(?:\s|$)|[\])'"!?]|\s+(?:International |Intl )?Airport|$|
    \s(?:on|at|by|via|for|with|using|in|departing|and|then|departure|duration|flight|back)\b)""")
WRITTEN_END = words(r"""\s*(?:[|;→\[]|\s[-–—]\s*(?=~?\$|avg|cost|price|cuisine|rating|(?-i:[a-z]))|:\s|
    ,?\s*~?\$|[.!?]\s|$|\((?=[^)]{0,80}(?:[$\d:,]|cuisine|rat|cost|per|avg))|
    \s(?:for|at|around|before|after|followed|where|which|then|and then)\s+(?=[$\d]|(?-i:[a-z])))""")
ABOUT = words(r""",?\s*(?:average|avg|costs?|prices?|cuisines?|address|room type|rating|contact|phone|website|
    minimum|max\w*|review|house rules?)\b""")
REMARK = re.compile(r"\s+[-–—]\s|:\s")
CITY_LEAD = re.compile(r"\s*,\s*|\s*\(|\s+in\s+|\s+[-–—]\s+")
LAST_CITY = re.compile(r",\s*([A-Z][\w.' -]{1,40}?)\s*(?:\([^()]{0,60}\)\s*)?\.?\s*(?:$|(?=;))")
SENTENCE = re.compile(r"(?<!\bSt)(?<!\bMt)(?<!\bFt)[.!?]\s")
STATE = re.compile(r"\s*\([^()]{0,40}\)|,\s*[A-Z]{2}\b(?:\s+\d{5})?|\)")
NOT_A_CITY = words(r"""museum|zoo|garden|cent(?:er|re)\b|gallery|monument|memorial|theat|aquarium|tour|trail|mall|
    market|bridge|\bpark$|church|historic|entire home|(?:private|shared) room|^(?:tea|cafe|bbq|bakery|american|italian|
    mexican|indian|chinese|french|mediterranean|seafood|pizza|fast food|desserts)$""")


# ---------------------------------------------------------------- text
TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "\u00a0": " ", "\u202f": " ", "\t": " ", "\r": " ",
                             "*": None, "`": None, "\0": None})
BULLET = re.compile(r"(?:[-+•·●▪‣◦–—>#]+\s+|\d{1,2}[.)]\s+|[^\w\s\[\]({\"'$#@&!?.,:;/\\|<>=+~^%-]\s*)+")
NEW_DAY = words(rf"(?<=[.!?;])[ \t]+(?=(?:on )?(?:the )?(?:day \d|(?:{'|'.join(ORDINALS)}) day))")
LINK = re.compile(r"\]\((?:https?:|www)[^()\s]{0,300}\)")
DAY_KEYS = ("day", "days", "Day", "day number")


def plain(text):
    """Text without what markdown and word processors do to it; names are compared in this form."""
    return text.translate(TYPOGRAPHY).replace("\n", " ").replace("|", "¦").strip()


def unfold(text, database):
    """(1) text -> [(kind, plain line)], kind "head", "bullet", "line" or "field" (out of JSON or a table)."""
    text = text.translate(TYPOGRAPHY)
    for name, key in awkward_names(database):
        text = text.replace(name, key) if name in text else text
    value, lines, rows = load_json(text), [], []
    if value is not None:
        unfold_json(value, "", lines)
        return [("field", line.replace("\n", " ").strip()) for line in lines]
    for raw in (LINK.sub("]", NEW_DAY.sub("\n", text)) + "\n").split("\n"):
        line = raw[:LONGEST_LINE].strip()
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")])
            continue
        if rows:
            lines += [("field", row) for row in unfold_table(rows)]
            rows = []
        mark = BULLET.match(line)
        body = line[mark.end() if mark else 0:].strip("_ ")
        if body:
            lines.append(("head" if line[0] == "#" else "bullet" if mark or raw[0] in " \t" else "line", body))
    return lines


def load_json(text):
    """The dict, or the list of dicts, that a text holds as JSON or as a Python literal, or None."""
    start = re.search(r"\[\s*\{|\{\s*[\"']", text)
    text = text[start.start():] if start else ""
    if not re.search(r"[\"'](?:days?|plan)[\"' _\d]", text[:4000], re.I):
        return None
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)[0]
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text[:max(text.rfind("]"), text.rfind("}")) + 1])
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def unfold_json(value, key, lines, depth=0):
    """Append what load_json gave as "Day N" and "key: value" lines."""
    if depth > 8 or len(lines) > 2000 or value is None:
        return
    if isinstance(value, list) and not all(isinstance(v, str) for v in value):
        for v in value:
            unfold_json(v, key, lines, depth + 1)
    elif not isinstance(value, dict):
        lines.append(f"{key}: " + ("; ".join(value) if isinstance(value, list) else str(value)))
    elif isinstance(value.get("name"), str):
        lines.append(f"{key}: {value['name']}" + (f", {value['city']}" if isinstance(value.get("city"), str) else ""))
    elif "transport" in key or "flight" in key:
        lines.append(f"{key}: " + ", ".join(f"{k}: {v}".replace("_", " ") for k, v in value.items()))
    else:
        rest = {str(k).replace("_", " "): v for k, v in value.items()}
        number = next((k for k in DAY_KEYS if isinstance(rest.get(k), (int, str))), None)
        day = str(rest.pop(number)) if number else key
        if number or DAY.match(key):
            lines.append(day if DAY.match(day) else f"Day {day}")
        for k, v in rest.items():
            if k != "date":
                unfold_json(v, k, lines, depth + 1)


def unfold_table(rows):
    """A markdown table's cells -> lines. Days may be its rows or its columns; else each row is a line of its own."""
    rows = [row for row in rows if not all(re.fullmatch(r":?-*:?", cell) for cell in row)]
    head, body, lines = rows[0] if rows else [], rows[1:], []
    if sum(bool(DAY.match(cell)) for cell in head) >= 2:
        for i, day in enumerate(head):
            if DAY.match(day):
                lines += [day, *(f"{row[0]}: {row[i]}" for row in body if i < len(row))]
        return lines
    by_day = re.match("days?$", head[0], re.I) if head else None
    if by_day and not any(LABEL.match(name + ":") for name in head[1:]):
        return [f"Day {row[0]}: " + " ".join(row[1:]) for row in body]
    for row in body if by_day or not any(DAY.match(cell) for cell in head) else rows:
        if by_day or DAY.match(row[0]):
            lines.append(row[0] if DAY.match(row[0]) else f"Day {row[0]}")
            lines += [f"{name}: {cell}" for name, cell in zip(head[1:], row[1:]) if LABEL.match(name + ":")]
        else:
            slot = next((i for i, cell in enumerate(row) if LABEL.match(cell + ":")), None)
            lines.append(" | ".join(row) if slot is None else f"{row[slot]}: " + " | ".join(row[slot + 1:]))
    return lines


# ---------------------------------------------------------------- names
FIRST = re.compile(r"\w+|\S")


@lru_cache(maxsize=4096)
def names_in(database, table, city):
    """First word in lower case -> [(plain name in lower case, plain name, name as stored)], longest first."""
    index = {}
    for row in getattr(database, table)(city):
        if key := plain(row.name):
            index.setdefault(FIRST.match(key).group().lower(), {})[key] = row.name.strip()
    return {word: [(key.lower(), key, found[key]) for key in sorted(found, key=len, reverse=True)]
            for word, found in index.items()}


@lru_cache(maxsize=16)
def city_index(database):
    """First word -> the city names that start with it, longest first."""
    index = {}
    for city in {*database.cities, *database.hotel_cities, *database.restaurant_cities, *database.attraction_cities}:
        index.setdefault(FIRST.match(city).group(), []).append(city)
    return {word: sorted(found, key=len, reverse=True) for word, found in index.items()}


@lru_cache(maxsize=16)
def awkward_names(database):
    """[(name as stored without asterisks and the like, plain name)] where a line break or pipe would split the text."""
    names = {row.name for kind in ("hotel", "restaurant", "attraction")
             for city in getattr(database, f"{kind}_cities") for row in getattr(database, f"{kind}s")(city)}
    return sorted((name.translate(TYPOGRAPHY), plain(name)) for name in names if "\n" in name or "|" in name)


def city_at(text, at, database):
    """The known city that stands at this place in the text, or ""."""
    word = FIRST.match(text, at)
    for city in city_index(database).get(word.group(), ()) if word else ():
        if text.startswith(city, at) and not text[at + len(city):at + len(city) + 1].isalnum():
            return city
    return ""


def cities_within(text, database):
    """[(start, end, city)] of the known cities in a text, left to right."""
    found, end, index = [], 0, city_index(database)
    for word in FIRST.finditer(text):
        if word.start() >= end and word.group() in index and (city := city_at(text, word.start(), database)):
            end = word.start() + len(city)
            found.append((word.start(), end, city))
    return found


def city_name(text, database):
    """A city as it is written at the start of a text, without "(State)" and what follows."""
    text = text.strip(" :[\"'")
    if (city := city_at(text, 0, database)) and CITY_END.match(text, len(city)):
        return city
    return text[:CITY_END.search(text).start()].strip(" .:]\"'")


def city_after(text, at, database):
    """(city or "", end) of the known city that follows a name: ", City", "(City)", " in City", " - City(State)"."""
    lead = CITY_LEAD.match(text, at)
    city = city_at(text, lead.end(), database) if lead else ""
    if not city or not CITY_END.match(text, lead.end() + len(city)):
        return "", at
    state = STATE.match(text, lead.end() + len(city))
    return city, state.end() if state else lead.end() + len(city)


def name_at(text, at, table, cities, database):
    """(end, name, the cities that have it) of the longest name of the database that stands at this place, or None."""
    word, best = FIRST.match(text, at), None
    for city in cities if word else ():
        for lower, key, name in names_in(database, table, city).get(word.group().lower(), ()):
            end = at + len(key)
            if text[at:end].lower() == lower and NAME_END.match(text, end):
                if not best or end > best[0]:
                    best = (end, name if text[at:end] == key else text[at:end], [city])
                elif end == best[0]:
                    best[2].append(city)
                break
    return best


def venues(text, slot, cities, database, prose=False):
    """["Name, City", ...] that a text names: all attractions, else the first. cities: the day's, the likelier first."""
    text, at, found = text.split("|")[0], 0, []
    for _ in range(60):  # more steps than an honest list needs
        if at >= len(text):
            break
        name, city, at = known_venue(text, at, slot, cities, database)
        if not name and text[at] != "[" and (lead := LEAD.match(text, at)):
            at = lead.end()
            continue
        if not name:
            if prose and not (text[at].isupper() or text[at].isdigit() or text[at] in "[$"):
                break
            sentence = SENTENCE.search(text, at) if prose else None
            name, city, at = written_venue(text[:sentence.start()] if sentence else text, at, slot, database)
            name = "" if MONEY.match(name) else name
        if name:
            found.append(f"{name}, {city or cities[0]}".replace("¦", "|"))
        if slot != "attraction" or prose and text.startswith(". ", at):
            break
        if ABOUT.match(text, at) or REMARK.match(text, at):
            at = text.find(";", at) if ";" in text[at:] else len(text)
        elif text.startswith(" (", at) and ")" in text[at:at + 200]:
            at = text.index(")", at) + 1
    return found


def known_venue(text, at, slot, cities, database):
    """(name, city, end) of a venue that the database has in the day's cities or in the one written behind it."""
    bracket, table = text[at] == "[", TABLES[slot]
    hit = name_at(text, at, table, cities, database) or bracket and name_at(text, at + 1, table, cities, database)
    if not hit and "," in text[at:at + 160]:
        for _, _, city in cities_within(text[at:at + 160], database)[:3]:
            there = city not in cities and name_at(text, at + bracket, table, [city], database)
            if there and city_after(text, there[0] + (text[there[0]:there[0] + 1] == "]"), database)[0] == city:
                hit = there
    if not hit:
        return "", "", at
    end = hit[0] + (bracket and text[hit[0]:hit[0] + 1] == "]")
    city, end = city_after(text, end, database)
    close = text.find("]", end) if bracket else -1
    m = None if city else LAST_CITY.match(text, end, close if close > 0 else len(text))
    if m and not NOT_A_CITY.search(m[1]) and not name_at(text, m.start(1), table, cities, database):
        city, end = m[1], m.end()  # a city nobody knows stays wrong
    return hit[1], city or hit[2][0], end


def written_venue(text, at, slot, database):
    """(name, city or "", end) of a venue that the database does not have, as it is written."""
    stop = text.find(";", at) if slot == "attraction" and ";" in text[at:] else len(text)
    if text[at] == "[" and "]" in text[at:at + 200]:
        end = text.index("]", at) + 1
        if (inside := LAST_CITY.search(text, at, end - 1)) and city_at(inside[1], 0, database) == inside[1]:
            return text[at + 1:inside.start()], inside[1], end
        return text[at + 1:end - 1].strip(), *city_after(text, end, database)
    sights, last = slot == "attraction", LAST_CITY.search(text, at, stop)
    if last and not ABOUT.search(text, at, last.start()) and (not sights or text.count(",", at, stop) == 1):
        if city_at(last[1], 0, database) == last[1] or sights and not NOT_A_CITY.search(last[1]):
            return text[at:last.start()].strip(" \""), last[1], stop
    end = WRITTEN_END.search(text, at, stop).start()
    commas = [i for i in range(at, end) if text[i] == ","]
    for i in commas:
        city, after = city_after(text, i, database)
        if city:
            return text[at:i].strip(" \""), city, after
    about = ABOUT.search(text, at + 1, end)
    end = about.start() if about else end
    if not sights and (last := LAST_CITY.search(text, at, end)) and not NOT_A_CITY.search(last[1]):
        return text[at:last.start()].strip(" \""), last[1], max(end, at + 1)  # a city nobody knows stays as it is
    if commas and (sights or text[commas[-1] + 1:end].strip()[:1].islower()):
        end = commas[0 if sights else -1]
    return text[at:end].strip(" ,.\""), "", max(end, at + 1)


# ---------------------------------------------------------------- days and lines
def read_days(lines, trip, database):
    """(2) lines -> [[number, last number, heading, events]] in the order of the text; number 0 stands before day 1."""
    dated = not any(DAY.match(line) for _, line in lines)
    days, outside = [[0, 0, "", []]], False
    for kind, line in lines:
        date = DATE.match(line) if dated and kind != "bullet" and len(line) < 160 else None
        m = date or DAY.match(line)
        if m and MONEY.match(line, m.end()):
            continue  # a row of a cost table
        if m:
            now = days[-1][0]
            number = now + 1 if date else NUMBERS.get((m[1] or m[3]).lower()) or int(m[1])
            line = line[m.end():].lstrip(" :-–—,.")
            if 0 < number <= 31 and (number > now or number < now and (not outside or number == 1)):
                last = int(m[2]) if not date and m[2] else number
                days.append([number, min(max(number, last), 31), line, []])
                outside = False
                if not (FLIGHT_NUMBER.search(line) or len(line) > 90 or LABEL.match(line)):
                    continue
                line = DATE.sub("", line, 1).lstrip(" :-–—,.")
        if not line or outside:
            continue
        awaited = days[-1][3] and days[-1][3][-1][1:] == ["", "open"] and kind == "bullet"
        if SECTION.match(line) and not LABEL.match(line) and not awaited:
            outside = days[-1][0] > 0 and (outside or kind in ("line", "head"))
        else:
            for part in NEXT_FIELD.split(line):
                read_line(part, kind, days[-1][3], trip, database)
    return days


def read_line(line, kind, events, trip, database):
    """(3) Append what a line says to a day's events: [slot, text, how], how "field", "open", "prose" or "check-in"."""
    if events and events[-1][0] == "transportation" and ATTRIBUTE.match(line):
        events[-1][1] += ", " + line
        return
    if NOTE.match(line):
        return
    listed = events and events[-1][2] == "open" and kind in ("bullet", "field")
    clock = TIME.match(line)
    start = clock.end() if clock else 0
    label = LABEL.match(line) or LABEL.match(line, start)
    value = line[label.end():] if label else ""
    cue = CUE.search(value[:30]) if label and label.lastgroup == "attraction" else None
    if cue and cue.lastgroup in MEALS and AT_A_PLACE.match(value, cue.end()):
        label, line, start = None, value, 0  # "Activity: lunch at ..."
    if label:
        slot = label.lastgroup
        if slot == "transportation" and value and MODE.match(label[slot]):
            value = line[label.start():]  # the label says the mode
        events.append([slot, value, "field" if value else "open"])
        return
    said = prose_events(line[start:], trip, database)
    if said and listed and said[0][0] == events[-1][0] and not CUE.match(line, start):
        said = []  # an item of a list that holds a cue within its name
    if said:
        events += said
    elif listed or events and events[-1][1:] == ["", "open"]:
        events[-1][1] += ("; " if events[-1][1] else "") + line[start:]
    else:
        events.append(["?", line[start:], clock.group() if clock else ""])


def prose_events(line, trip, database):
    """The events that a sentence's cues announce; a word inside a city or a name of this trip's cities is no cue."""
    cues = list(CUE.finditer(line))
    spans = [(start, end) for start, end, _ in cities_within(line, database)]
    spans += [(word.start(), hit[0]) for word in FIRST.finditer(line) for table in set(TABLES.values())
              if (hit := name_at(line, word.start(), table, trip, database))] if cues else []
    kept = []
    for cue in cues:
        rest = line[cue.end():cue.end() + 200]
        if any(a <= cue.start() < b for a, b in spans):
            continue
        if cue.lastgroup in MEALS and not (AT_A_PLACE.match(rest) or line[:cue.start()].lower().endswith("for ")):
            continue
        if cue.lastgroup == "transportation" and not FLIGHT_NUMBER.search(cue[0] + rest) and not way_of(rest, database):
            continue
        if cue.lastgroup == "attraction" and kept and kept[-1].lastgroup in MEALS and cue.start() - kept[-1].end() < 6:
            continue  # "for lunch, head to ..."
        kept.append(cue)
    events = []
    for cue, following in zip(kept, [*(cue.start() for cue in kept[1:]), len(line)]):
        slot, said = cue.lastgroup, BRIDGE.sub("", line[cue.end():following])
        if slot == "transportation":
            said = line[cue.start():following]
            if events and events[-1][0] == slot:
                events[-1][1] += said
                continue
        events.append([slot, said, "check-in" if cue.group()[:5].lower() == "check" else "prose"])
    return events


def best_telling(days):
    """A text may tell its days several times (overview, plan, cost table): the fullest telling, of equals the later."""
    tellings = []
    for day in days:
        if tellings and day[0] > tellings[-1][-1][0]:
            tellings[-1].append(day)
        else:
            tellings.append([day])
    sizes = [sum(slot in FIELDS for day in run for slot, _, _ in day[3]) for run in tellings]
    return max(zip(sizes, map(len, tellings), range(len(tellings)), tellings))[3] if tellings else []


# ---------------------------------------------------------------- plan
def way_of(text, database):
    """(from, to) that a text speaks of; from is "" where it says only "to X"; None where it says neither."""
    if m := FROM_TO.search(text):
        a, b = city_name(m[1], database), city_name(m[2], database)
        nowhere = a[:1].islower() or MOVE.match(a) and not city_at(a, 0, database)  # "from there", "Travel to X"
        return ("" if nowhere else a, b) if b and not b[:1].islower() else None
    known = cities_within(text[:400], database)
    for (_, end, a), (start, _, b) in zip(known, known[1:]):
        if a != b and ARROW.fullmatch(text, end, start):
            return a, b
    return next((("", city) for start, _, city in known if TO.search(text, max(0, start - 6), start)), None)


def ends_of_day(heading, events, before, home, database):
    """(start, end): the cities of a day, equal on a day without travel. before: where the day before ended."""
    ways = [way_of(text, database) for slot, text, _ in events if slot == "transportation"]
    rides = [way for way in ways if way and way[0] != way[1]]
    ride = (rides[0][0] or before, rides[-1][1]) if rides else None
    label = next((text for slot, text, _ in events if slot == "city" and text), "")
    title = label or DATE.sub("", heading, 1).strip(" :-–—,.()|") if len(heading) < 90 else ""
    way = way_of(title if "from " in title.lower() else f"from {title}", database)
    if way:
        start = way[0] or (ride or [before])[0]
        return ride if ride and not way[0] and way[1] not in ride else (start, way[1])
    known = [city if start else city_name(title, database) for start, _, city in cities_within(title, database)]
    if label:
        city = city_name(label, database)
        return ride if ride and city in ride else (city, city)
    if ride:
        return ride
    if known:
        arrives = MOVE.match(title) and not title.lower().startswith(("depart", "explor"))
        return before if arrives else known[-1], known[-1]
    if ways and re.search(r"\b(?:return|home|back)\b", title, re.I):
        return before, home
    if re.fullmatch(r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*){0,3}", title) and not TITLE.search(title):
        return title, title  # a city nobody knows
    return before, before


def transportation(text, start, end, how, database):
    """A ride in TravelPlanner's words; cities that the text leaves out are the day's."""
    text = GUESS.sub("", text).replace("¦", "|")
    number = FLIGHT_NUMBER.search(text)
    way = number and way_of(text[number.start():], database) or way_of(text, database)
    a, b = way or ("", "")
    without = text.replace(a, "").replace(b, "")  # "from Taxi Falls" is no taxi
    m = MODE.search(without)
    mode = "Flight" if number else MODES[m.lastgroup] if m else ""
    if not mode and (way or text[:4].lower() in ("from", "cost")) and not OTHER_MODE.search(without):
        mode = "Self-driving"
    if not mode or mode != "Flight" and not way and (how == "field" or start == end):  # nothing to complete
        text = text.replace("$", "").strip(" .")
        return MODE.sub(lambda m: MODES[m.lastgroup], text, 1) if m or not mode else f"{mode}, {text}"
    start, end = (way[0] or start, way[1]) if way else (start, end)
    if mode == "Flight":
        row = database.flight(number[1]) if number and number[1] else None
        times = re.findall(r"\b\d{1,2}:\d\d\b(?:\s*[ap]\.?m\b)?", text, re.I)
        leaves, lands = (*times, *((row.departure, row.arrival) if row else ("-", "-"))[len(times):])[:2]
        number = (number[1] or number[2]) if number else "-"
        return f"Flight Number: {number}, from {start} to {end}, Departure Time: {leaves}, Arrival Time: {lands}"
    said = [(word, pattern.search(text)) for word, pattern in DETAILS.items()]
    details = [f"{word}: {m[m.lastindex].strip()}" for word, m in said if m]
    return ", ".join([f"{mode}, from {start} to {end}", *details])


def read_day(number, heading, events, before, home, database):
    """(5) One day's plan, and the city where it ends. before: where the day before ended."""
    start, end = ends_of_day(heading, events, before, home, database)
    city = f"from {start} to {end}" if start != end else end
    day = {"day": number, **dict.fromkeys(FIELDS, "-"), "current_city": city}
    cities = list(dict.fromkeys([start, end] if end == home else [end, start]))
    sights = []
    for slot, text, how in events:
        if slot == "transportation":
            if day[slot] == "-" and not NOTHING.match(text) and not MONEY.match(text):
                day[slot] = transportation(text, start, end, how, database)
        elif slot == "?":
            slot = slot_of(text, how, cities, database)
        if slot not in TABLES or day[slot] != "-" and slot != "attraction":
            continue  # of two lunches the first
        here, prose = [end] if slot == "accommodation" else cities, how not in ("field", "open")
        nothing = NOTHING.match(text) and not name_at(text, 0, TABLES[slot], here, database)
        if nothing or slot == "accommodation" and SAME.match(text):
            continue
        found = venues(text, slot, here, database, prose)
        if slot == "attraction":  # prose may speak of one sight twice; a list that does so is at fault, and stays so
            sights += [sight for sight in found if not prose or sight not in sights]
            day[slot] = ";".join(sights) + ";" if sights else "-"
        elif found:
            day[slot] = found[0]
    return day, end


def slot_of(text, clock, cities, database):
    """The slot of a line without label or cue that starts with a name: a sight, or a restaurant at a mealtime."""
    if name_at(text, 0, "attractions", cities, database):
        return "attraction"
    if not clock or not name_at(text, 0, "restaurants", cities, database):
        return "?"
    if "morning" in clock.lower():
        return "breakfast"
    return "dinner" if re.search("evening|night", clock, re.I) else "lunch"


def carry_stays(plan, telling):
    """Nights that the text gives once: "same hotel", or a check-in that is never repeated."""
    stays = [[text for slot, text, _ in day[3] if slot == "accommodation"] for day in telling]
    hows = {how for day in telling for slot, text, how in day[3] if slot == "accommodation" and text.strip()}
    for i, day in enumerate(plan[1:], 1):
        if day["accommodation"] == "-" and not day["current_city"].startswith("from "):
            told = hows == {"check-in"} or any(FOR_NIGHTS.search(text) for night in stays[:i] for text in night)
            if any(SAME.match(text) for text in stays[i]) or not stays[i] and told:
                day["accommodation"] = plan[i - 1]["accommodation"]


def parse_plan(text, task, database):
    """Itinerary text -> TravelPlanner's list of days, or None when the text holds no plan. No text makes it raise."""
    if not isinstance(text, str):
        return None
    lines, seen = unfold(text[:LONGEST_TEXT], database), {}
    for _, line in lines:
        for _, _, city in cities_within(line, database):
            seen[city] = seen.get(city, 0) + 1
    overview, *days = read_days(lines, sorted(seen, key=seen.get, reverse=True)[:8], database)
    telling = [[n, n, *day[2:]] for day in best_telling(days) for n in range(day[0], day[1] + 1)]
    if not any(slot == "accommodation" for day in telling for slot, _, _ in day[3]):
        hotels = [event for event in overview[3] if event[0] == "accommodation"]  # named once, for the whole trip
        telling = [[*day[:3], day[3] + hotels] for day in telling[:-1]] + telling[-1:]
    plan, home = [], task.get("org") or ""
    before = home
    for number, _, heading, events in telling:
        day, before = read_day(number, heading, events, before, home, database)
        plan.append(day)
    carry_stays(plan, telling)
    return plan if any(day[slot] != "-" for day in plan for slot in FIELDS[1:]) else None


def itinerary(plan):
    """The plan as an agent's answer: names and flight numbers in brackets, the cities once a day."""
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
PROMPT = """You turn travel itineraries into JSON. You get the traveller's request and the itinerary that an assistant
wrote for it. Reply with a JSON list and nothing else: one object per day of the trip, in order, each with these keys,
all strings but `day`.

day             the day's number, from 1
current_city    the city of the day; on a day of travel "from A to B", A and B being cities without their state
transportation  "Flight Number: F.., from A to B, Departure Time: .., Arrival Time: ..", or
                "Self-driving, from A to B, duration: .., distance: .., cost: ..", or
                "Taxi, from A to B, duration: .., distance: .., cost: .."; a rental car is self-driving; no "$"
breakfast, lunch, dinner    "Name, City"
attraction      "Name, City;" once for each attraction of the day, one after the other
accommodation   "Name, City" of where the night is spent

Write "-" where the itinerary has nothing for a key. Copy names exactly as the itinerary spells them, even where they
look wrong; never add, correct or complete anything from your own knowledge. Of alternatives take the first. Leave out
prices, cuisines, notes and cost tables.

Example of an itinerary:
Day 1, March 4: Taxi from Tulsa to Moab ($91). Dinner at Red Rock Diner (American, $12). Check into [Canyon Loft] | $80
Day 2, March 5: Breakfast: Sunup Cafe. Morning: visit Rim Overlook, then Fossil Hall. Night: same hotel.
Its JSON:
[{"day": 1, "current_city": "from Tulsa to Moab", "transportation": "Taxi, from Tulsa to Moab, cost: 91",
  "breakfast": "-", "attraction": "-", "lunch": "-", "dinner": "Red Rock Diner, Moab",
  "accommodation": "Canyon Loft, Moab"},
 {"day": 2, "current_city": "Moab", "transportation": "-", "breakfast": "Sunup Cafe, Moab",
  "attraction": "Rim Overlook, Moab;Fossil Hall, Moab;", "lunch": "-", "dinner": "-",
  "accommodation": "Canyon Loft, Moab"}]"""
LONGEST_PAUSE = 60  # seconds between two tries


class ChatError(RuntimeError):
    """An endpoint refused, or did not give a usable reply after all retries."""


def chat(url, model, messages, temperature=1.0, top_p=1.0, max_tokens=None, timeout=300, retries=6, pause=1.0,
         api_key=None):
    """The reply of an OpenAI-compatible endpoint, as text; ChatError when there is none.

    Status 408, 409, 425, 429 and 5xx, time-outs, broken connections, cut JSON and empty replies are tried again after
    pause x 1, 2, 4, ... seconds: half to all of it, by chance, so that many clients do not come back at once.
    """
    url = url.rstrip("/")
    url = url if url.endswith("/chat/completions") else url + "/chat/completions"
    body = {"model": model, "messages": messages, "temperature": temperature, "top_p": top_p}
    data = json.dumps({**body, "max_tokens": max_tokens} if max_tokens else body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    for attempt in range(retries + 1):
        wait = 0.0
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as response:
                text = json.loads(response.read())["choices"][0]["message"]["content"]
            if isinstance(text, str) and text.strip():
                return text
            problem = "an empty reply"
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}"
            if error.code not in (408, 409, 425, 429) and error.code < 500:
                raise ChatError(f"{url}: {problem}, not tried again: {said_by(error)}") from None
            after = error.headers.get("Retry-After", "")
            wait = float(after) if after.isdigit() else 0.0
        except (OSError, http.client.HTTPException) as error:  # time-outs, refused and broken connections
            problem = f"no connection ({error})"
        except (ValueError, KeyError, IndexError, TypeError):  # cut JSON, or JSON of another shape
            problem = "a reply that is no chat completion"
        if attempt < retries:
            time.sleep(min(LONGEST_PAUSE, max(wait, pause * 2 ** attempt * random.uniform(0.5, 1))))
    raise ChatError(f"{url}: {problem}, after {retries + 1} tries; last of model {model}") from None


def said_by(error):
    """The start of an HTTP error's body, for a message to the user."""
    try:
        return " ".join(error.read(300).decode(errors="replace").split())
    except (OSError, http.client.HTTPException):
        return ""


def format_plan(text, task, model, url, cache=None, retries=6, timeout=300, pause=1.0, api_key=None):
    """Itinerary text -> plan, or None when the model finds none. cache: a folder; what it holds costs no request."""
    ask = f"Request:\n{task.get('query', '')}\n\nItinerary:\n{text}"
    key = hashlib.sha256(json.dumps([model, PROMPT, ask]).encode()).hexdigest()
    path = Path(cache) / f"{key}.json" if cache else None
    if path and path.exists():
        return json.loads(path.read_text())
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": ask}]
    for _ in range(2):  # a reply without a list is asked for once more, and never cached
        reply = chat(url, model, messages, 0.0, timeout=timeout, retries=retries, pause=pause, api_key=api_key)
        days = load_json(reply)
        if isinstance(days, list):
            plan = [tidy(day, i) for i, day in enumerate(days, 1) if isinstance(day, dict)] or None
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f".{os.getpid()}.part")
                part.write_text(json.dumps(plan))
                os.replace(part, path)
            return plan
    return None


def tidy(day, number):
    """A day as an LLM wrote it -> the eight fields, "City(State)" and the words for driving made uniform."""
    out = {"day": number}
    for field in FIELDS:
        value = day.get(field)
        value = ";".join(map(str, value)) + ";" if isinstance(value, list) and value else str(value or "-").strip()
        if field in ("current_city", "transportation"):
            value = re.sub(r"\s*\([^()]{0,60}\)", "", value)
        if field == "transportation" and "Flight Number" not in value and (m := MODE.match(value)):
            value = MODES[m.lastgroup] + value[m.end():]
        out[field] = value
    return out


# ---------------------------------------------------------------- main
def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", help="episodes or texts, jsonl")
    add("--database", help="folder whose names ground the rules (default: $STAR_DATABASE, else database/mini)")
    add("--llm-url", help="OpenAI-compatible endpoint; with it an LLM reads the texts instead of the rules")
    add("--llm-model", help="the endpoint's model")
    add("--llm-key", metavar="FILE", help="file that holds the endpoint's API key")
    add("--cache", help="folder of the LLM's plans, by content hash (default: none)")
    add("--compare", action="store_true", help="run both, print each slot where they differ, and the share that agrees")
    return parser


def read_texts(path):
    """[(line, task, text)] of a jsonl file of episodes or texts."""
    rows = []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        try:
            row = json.loads(line)
            rows.append((row, row.get("task") or row, row["answer"] if "answer" in row else row["text"]))
        except (ValueError, KeyError, AttributeError) as error:
            raise SystemExit(f"{path}:{number}: needs a JSON object with an answer or a text ({error!r})") from None
    return rows


def differences(rules, llm):
    """([(day, field, by rules, by the LLM)] where two plans differ, blanks and case apart; slots compared)"""
    pairs = [(number, field, (one or {}).get(field), (other or {}).get(field))
             for number, (one, other) in enumerate(zip_longest(rules or [], llm or []), 1) for field in FIELDS]
    bare = [[re.sub(r"[\s;.]+", " ", value or "-").strip().lower() for value in pair[2:]] for pair in pairs]
    return [pair for pair, (one, other) in zip(pairs, bare) if one != other], len(pairs)


def main():
    a = flags().parse_args()
    if a.compare and not a.llm_url or a.llm_url and not a.llm_model:
        raise SystemExit("an LLM needs --llm-url and --llm-model")
    database, key = open_database(a.database), Path(a.llm_key).read_text().strip() if a.llm_key else None
    agree = total = 0
    for number, (row, task, text) in enumerate(read_texts(a.file), 1):
        rules = parse_plan(text, task, database) if a.compare or not a.llm_url else None
        asked = a.llm_url and text
        llm = format_plan(text, task, a.llm_model, a.llm_url, a.cache, api_key=key) if asked else None
        if not a.compare:
            print(json.dumps({**row, "plan": llm if a.llm_url else rules}, ensure_ascii=False))
            continue
        found, slots = differences(rules, llm)
        agree, total = agree + slots - len(found), total + slots
        for day, field, one, other in found:
            print(f"{task.get('id', f'line {number}')} day {day} {field}\n  rules  {one}\n  llm    {other}")
    if a.compare:
        print(f"{agree} of {total} slots agree ({agree / max(total, 1):.1%})")


if __name__ == "__main__":
    try:
        main()
    except (ChatError, OSError) as error:
        sys.exit(f"format_plan.py: {error}")
