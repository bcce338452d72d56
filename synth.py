"""
Make the training data: small worlds, solvable tasks, queries, episodes of a teacher, and the paper's data sets.

    (1) world     tables like TravelPlanner's [1], small and seeded, whose names a tiny model can learn to copy
    (2) tasks     elements drawn as [1] and [2] draw them; kept if `solve` finds a plan within the budget
    (3) queries   elements put into words: by a grammar at once, or by endpoints, each answer checked [2]
    (4) episodes  a teacher plays through sandbox.Episode: the solver in three styles, an endpoint or a local model;
                  kept if the protocol was kept and the plan, read back from the text, scores success
    (5) subsets   100 to 2K tasks of mixed levels, and 1K of each level [2]

solve is exact. A trip is a route of cities, a split of the nights, and a mode (by road, or by air with taxis). Given
these, each city costs its cheapest allowed hotel and its cheapest cover of the wanted cuisines, so that all routes are
summed up as arrays, one axis per city.

Departs from [2]: (2) keeps what solve proves feasible, where [2] has a rule of thumb on average prices; (3) and (4)
need no endpoint, and take the paper's two paraphrasers and its teacher by --endpoint.
[1] TravelPlanner, arXiv:2402.01622   [2] STAR, arXiv:2603.21972

Reads   a database folder (sandbox.py)      Writes   jsonl of tasks or episodes, line by line: a killed run goes on

    python synth.py tasks    --n 1000 --seed 1 --split train --out data/rl.jsonl
    python synth.py queries  --tasks data/rl.jsonl --endpoint http://a:8000/v1=M http://b/v1=N --out data/said.jsonl
    python synth.py episodes --tasks data/tasks.jsonl --styles direct:5,exploring:3,backtracking:2 --out data/sft.jsonl
    python synth.py subsets  --tasks data/many.jsonl --exclude data/sft.jsonl --out data/subsets
"""
import argparse, calendar, csv, datetime, hashlib, json, math, os, random, re, sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np

from evaluate import (api_generate, append_jsonl, engine, judge, load_task, play, play_vllm, read_jsonl, score,
                      write_jsonl)
from sandbox import SHORT_PROMPT, SYSTEM_PROMPT, Episode, Sandbox, open_database
from solver import (cheapest_plan, cheapest_route, city_searches, drive, ends, lay_out, least_costs, leg_cost,  # noqa: F401
                    legs, lodgings, menu, mode_of, modes, replies, searches, solve, solve_report, splits, stop_cities,
                    venues, way_searches, ways)

# ---- constants ----------------------------------------------------------------------------------------------------
LEVELS = ("easy", "medium", "hard")
RULES = ("pets", "smoking", "children under 10", "parties", "visitors")
CUISINES = ("Chinese", "American", "Italian", "Mexican", "Indian", "Mediterranean", "French")
FILLERS = ("Tea", "BBQ", "Seafood", "Cafe", "Pizza", "Bakery")
ROOMS = ("entire room", "private room", "shared room", "not shared room")
MONTHS = [tuple(f"2022-{month:02d}-{day + 1:02d}" for day in range(calendar.monthrange(2022, month)[1]))
          for month in range(1, 13)]
MARCH = MONTHS[2]
WORDS = dict(enumerate("zero one two three four five six seven eight nine ten".split()))
# What a query must hold to state a wish; every other wish is stated by its own name.
NOT_SHARED = r"(\b(not|non|never|without|avoid|rather than|neither)\b|n't)[^.]{0,30}shar|unshared"
STATED = {"pets": r"\bpet", "smoking": "smok", "children under 10": "child|kid", "parties": r"\bpart(ies|y\b(?! of))",
          "visitors": "visitor|guest", "entire room": "entire|whole (room|pla|ap|ho|un)", "private room": "private",
          "shared room": f"^(?!.*({NOT_SHARED})).*shar", "not shared room": NOT_SHARED,
          "no flight": "fl(ight|y)|air", "no self-driving": "driv|behind the wheel"}
PARAPHRASE = """You are a traveller who writes to a travel agent. Put the elements below into one natural request of
two to five sentences, in your own words. State every one of them: origin, destination, number of days, both dates
with the month, number of people, number of cities if it is more than one, budget as a number in $, and each
constraint that is not null ("house rule" names what the accommodation must allow). Name the cuisines exactly. Add
nothing that is not there. Answer with the request only.

"""
# Short queries for a tiny model, with dates as the tools want them. Of the forms between slashes one is drawn.
BRIEF = {
    "ask": "Plan / Please plan / Help me plan / I need / Can you plan / We would like",
    "trip": "a {days}-day trip / {days} days / a trip of {days} days",
    "who": {1: "1 person / one person", 2: "{n} people / a group of {n}"},
    "place": {1: "{dest}", 2: "{cities} cities in {dest}"},
    "dates": "{iso1} to {iso2}",
    "money": "Budget ${budget}. / The budget is ${budget}. / At most ${budget}. / We have ${budget}.",
    "frame": """{ask} {trip} from {org} to {place}, {dates}, for {who}. /
        {ask} {trip} for {who} from {org} to {place}, {dates}. /
        {ask} {trip} from {org} to {place} for {who}. Dates: {dates}.""",
    "house rule": {"pets": "We bring pets. / Pets must be allowed.",
                   "smoking": "Smoking must be allowed. / We need a room for smoking.",
                   "children under 10": "We bring children under 10. / Children under 10 must be allowed.",
                   "parties": "Parties must be allowed. / We want to hold parties.",
                   "visitors": "Visitors must be allowed. / We expect visitors."},
    "cuisine": "We want {wish} food. / Meals: {wish}. / We like {wish} cuisine.",
    "room type": {"entire room": "We want an entire room. / Entire room only.",
                  "private room": "We want a private room. / Private room only.",
                  "shared room": "We want a shared room. / Shared room only.",
                  "not shared room": "We want a room that is not shared. / Not a shared room."},
    "transportation": {"no flight": "No flight. / We do not fly: no flight.",
                       "no self-driving": "No self-driving. / We do not drive: no self-driving."},
    "end": "",
}
# Queries of many forms, for synthesis without an endpoint.
ROUND = {
    "ask": """Could you plan / Could you put together / Can you help me arrange / Would you design / Can you draw up /
        Could you map out / Would you mind preparing / Could you work out / Can you organize / Could you sketch /
        Could you assist with / Can you come up with / Would you help me set up / Can you put into place""",
    "trip": """a {days}-day trip / a {days}-day itinerary / a travel plan of {days} days / a {days_word}-day journey /
        a {days_word}-day travel plan / a complete itinerary for {days} days / a getaway of {days_word} days""",
    "who": {1: "one person / a single traveler / a solo traveler / just 1 person",
            2: "{n} people / a group of {n} / a party of {n} / {n_word} travelers / {n_word} of us / a family of {n}"},
    "place": {1: "{dest} / the city of {dest} / {dest} and nowhere else",
              2: """{cities} cities in {dest} / {cities_word} different cities in {dest} /
                  {cities_word} cities of {dest} / {dest}, with stops in {cities} cities there"""},
    "dates": """from {month1} {th1} to {month2} {th2}, {year} / between {month1} {d1} and {month2} {d2}, {year} /
        from the {th1} of {month1} to the {th2} of {month2} {year} / from {iso1} until {iso2} /
        starting on {month1} {th1} and ending on {month2} {th2}, {year} / over {month1} {d1} - {month2} {d2}, {year}""",
    "money": """The budget is ${budget_comma}. / All in all it should cost no more than ${budget_comma}. /
        There is ${budget} to spend. / Please keep the total within ${budget_comma}. /
        We cannot go beyond ${budget} in total. /
        The budget for everything is set at ${budget_comma}. / A total of ${budget_comma} is available. /
        Spending must stay below ${budget_comma}. / ${budget_comma} has to cover the whole trip. /
        Our wallet allows ${budget_comma} at most. / Costs should add up to ${budget_comma} or less.""",
    "frame": """{ask} {trip} for {who} from {org} to {place}, {dates}? /
        {ask} {trip} for {who}, {dates}, leaving {org} for {place}? /
        {ask} {trip} {dates}? It is for {who}, who will set out from {org} and visit {place}. /
        There will be {who} traveling from {org} to {place} {dates}. {ask} {trip} for that? /
        We are thinking of {trip}, {dates}, to {place}. The trip starts in {org} and is for {who}. /
        I am looking for {trip} that takes {who} from {org} to {place} {dates}. /
        Starting in {org}, I need {trip} to {place}. Make it for {who}, {dates}. /
        Please plan {trip} to {place} for {who}. Departure is from {org}, and the dates are {dates}. /
        {ask} {trip}? The details: {who}, {dates}, departing from {org}, going to {place}. /
        Help me with {trip}: {who}, from {org} to {place}, {dates}. /
        {place} is where {who} would like to go. {ask} {trip} from {org}, {dates}? /
        How would {trip} from {org} to {place} look for {who}, {dates}? /
        Our plan is to leave {org} and see {place} {dates}. {ask} {trip} for {who}? /
        We have never been to {place}. {ask} {trip} there from {org}, {dates}, for {who}? /
        Time off is booked, now for {trip} {dates}: {who}, out of {org}, bound for {place}.""",
    "house rule": {
        "pets": """We travel with our pets, so the lodging has to accept them. / Pets must be welcome where we stay. /
            The accommodation should be pet-friendly. / Our pets are coming along and need to be allowed.""",
        "smoking": """Smoking should be allowed where we stay. / We need accommodations that permit smoking. /
            Some of us smoke, so the rooms must allow smoking. / The lodging has to be fine with smoking.""",
        "children under 10": """We bring children under 10, who must be welcome at the accommodation. /
            The place we stay has to accept children under 10. /
            We have kids under 10 with us, and they need to be allowed.""",
        "parties": """We would like to hold parties, so they must be allowed where we stay. /
            The accommodation should permit parties. / Lodgings that allow parties are a must.""",
        "visitors": """We expect visitors, so the lodging has to allow them. / Visitors must be allowed at our stay. /
            The accommodation should let us receive visitors."""},
    "cuisine": """We would love to try {wish} cuisine. / For meals, we are keen on {wish} food. /
        Along the way, {wish} dishes should be on the table. / Our tastes run to {wish} cooking. /
        Please include restaurants serving {wish} cuisine. / What we want to eat is {wish}. /
        No trip is complete without {wish} meals for us.""",
    "room type": {
        "entire room": "We want entire rooms to ourselves. / The stay should be an entire room. / Entire rooms only.",
        "private room": "We would like private rooms. / We are after private rooms. / Book private rooms only.",
        "shared room": "A shared room is what we want. / We look for shared rooms. / Choose a shared room for us.",
        "not shared room": """The rooms must not be shared. / We would rather not stay in a shared room. /
            Any room will do if it is not shared."""},
    "transportation": {
        "no flight": """We do not want to fly, so please no flights. / No flight, please: other transport only. /
            Flights are not an option for us. / We would rather avoid any flight.""",
        "no self-driving": """We will not be driving ourselves. / Self-driving is not an option for us. /
            Please leave out self-driving. / We would rather avoid self-driving altogether."""},
    "end": """ / / Thank you! / Thanks in advance. / Please take care of all meals, sights and stays. /
        I look forward to your plan.""",
}
GRAMMARS = {"tiny": BRIEF, "paper": ROUND}


# ---- tasks --------------------------------------------------------------------------------------------------------
open_once = lru_cache(maxsize=None)(open_database)


def stable_draw(text):
    """A large number that depends on the text only."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


@lru_cache(maxsize=None)
def reserved(database):
    """Cities no training task goes to: whole states, in an order that depends on their names only, up to an eighth."""
    cities = set()
    for state in sorted(database.states, key=stable_draw):
        if len(cities) + len(database.states[state]) <= len(database.cities) // 8 + 1:
            cities.update(database.states[state])
    return frozenset(cities)


def is_unseen(task, database):
    return any(city in reserved(database) for city in stop_cities(task, database))


def split_of(task, database):
    """"train", "val" or "" (neither): the two share no pair of places, in either direction, and no start date."""
    if task["org"] in reserved(database):
        return ""
    val_pair = is_unseen(task, database) or stable_draw("|".join(sorted((task["org"], task["dest"])))) % 5 == 0
    val_date = stable_draw("from " + task["date"][0]) % 5 == 0
    return "val" if val_pair and val_date else "" if val_pair or val_date else "train"


def sample_task(rng, database, level, days, like, dates):
    """The elements of a task as [1] and [2] draw them, without budget and query; None when this draw leads nowhere.

    A trip by air has three flights out and back to choose from, one by road is at most 600 km long each way [2]; in a
    small world any flight and any road will do.
    """
    people = 1 if level == "easy" else 2 if rng.random() < 0.5 else rng.randint(3, 8)
    wish = sample_wishes(rng, level, people)
    fly = {"no flight": False, "no self-driving": True}.get(wish["transportation"], rng.random() < 0.9)
    org, least, longest = rng.choice(tuple(database.cities)), *((3, 600) if like == "paper" else (1, math.inf))
    if fly:
        cities = database.flight_destinations(org)
    else:
        cities = [city for city in database.cities if (road := drive(database, org, city)) and road.km <= longest]
    cities = [city for city in cities if database.cities.get(city, database.cities[org]) != database.cities[org]]
    if not cities:
        return None
    city, starts = rng.choice(cities), dates[:len(dates) - days + 1]
    if fly:
        starts = [date for date in starts if len(database.flights(org, city, date)) >= least]
    if not starts:
        return None
    start = dates.index(rng.choice(starts))
    task = {"level": level, "org": org, "dest": city if days == 3 else database.cities[city], "days": days,
            "date": list(dates[start:start + days]), "visiting_city_number": {3: 1, 5: 2, 7: 3}[days],
            "people_number": people, "local_constraint": wish}
    if fly:
        back = any(len(database.flights(c, org, task["date"][-1])) >= least for c in stop_cities(task, database))
    else:
        back = any(drive(database, c, org) for c in stop_cities(task, database))
    return task if back else None


def sample_wishes(rng, level, people):
    wish = dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))
    if level == "easy":
        return wish
    if level == "medium":
        kinds = [rng.choice(("house rule", "cuisine", "room type"))]
    else:  # two of house rule (.35), cuisine (.30) and room type (.35)
        pairs = (("house rule", "cuisine"), ("cuisine", "room type"), ("house rule", "room type"))
        kinds, wish["transportation"] = rng.choices(pairs, (3, 3, 4))[0], rng.choice(("no flight", "no self-driving"))
    if "house rule" in kinds:
        wish["house rule"] = rng.choice(RULES)
    if "cuisine" in kinds:
        wish["cuisine"] = rng.sample(CUISINES, 2 if level == "medium" else rng.choice((2, 3)))
    if "room type" in kinds:
        wish["room type"] = rng.choice(ROOMS if people <= 2 else ROOMS[:2])
    return wish


def paper_budget(task, database):
    """As [1] sets it, from the lowest, mean and highest prices of ways, hotels and meals; None where one is missing."""
    cities, days, org = stop_cities(task, database), task["days"], task["org"]
    trips = [(org, c, task["date"][0]) for c in cities] + [(c, org, task["date"][-1]) for c in cities]
    ways = [flight.price for trip in trips for flight in database.flights(*trip)]
    ways = ways or [int(row.km * 0.05) for a, b, _ in trips if (row := drive(database, a, b))]
    hotels = [row.price for city in cities for row in database.hotels(city)]
    meals = [row.cost for city in cities for row in database.restaurants(city)]
    if not (ways and hotels and meals):
        return None
    number = {3: 2, 5: 3, 7: 4}[days]
    low, mid, high = (number * of(ways) + days * of(hotels) + 3 * days * of(meals) for of in (min, fmean, max))
    base = {3: (mid + low) / 2, 5: mid, 7: (mid + high) / 2}[days]
    factor = {"easy": 1, "medium": 0.75, "hard": 0.5}[task["level"]]
    return max(100, 100 * round(base * task["people_number"] * factor / 100))


def close_budget(rng, task, database):
    """A budget of which the cheapest plan takes 30 to 80%; None when there is no plan."""
    least = cheapest_route(*least_costs(task, database))[0]
    return 10 * math.ceil(least / rng.uniform(0.3, 0.8) / 10) if least < math.inf else None


def make_task(a, index):
    """The task of this index, which depends on the seed and the index alone; None when the draw is not solvable."""
    rng, database, cells = random.Random(f"{a.seed}/{index}"), open_once(a.database), list(quotas(a))
    task = sample_task(rng, database, *cells[index % len(cells)], a.like, a.dates)
    if task is None or a.split != "all" and split_of(task, database) != a.split:
        return None
    if a.split == "val" and a.unseen is not None and is_unseen(task, database) != (rng.random() < a.unseen):
        return None
    task["budget"] = paper_budget(task, database) if a.like == "paper" else close_budget(rng, task, database)
    report = solve_report(task, database) if task["budget"] else None
    if not report or not report.plan or not passes(task, report.plan, database):
        return None
    task["query"] = write_query(rng, task, GRAMMARS[a.like])
    if a.split == "val":
        task["unseen"] = is_unseen(task, database)
    ratio = round(report.cost / task["budget"], 3)
    return {"id": f"{a.prefix}-{index:07d}", **task,
            "tightness": {"least_cost": report.cost, "ratio": ratio, "city_choices": report.choices}}


def passes(task, plan, database):
    return all(score(task, plan, database, rules)["success"] == 1 for rules in ("star", "strict"))


def quotas(a):
    """{(level, days): how many tasks}, the levels' shares exactly, the days as evenly as can be."""
    shares = [cut(a.n, sum(a.levels[:i]), sum(a.levels[:i + 1]), sum(a.levels)) for i in range(len(LEVELS))]
    return {(level, days): cut(share, j, j + 1, len(a.days))
            for j, days in enumerate(a.days) for level, share in zip(LEVELS, shares)}


def cut(n, start, end, parts):
    """How many of n things lie between two marks of a scale: these numbers add up to n over the whole scale."""
    return n * end // parts - n * start // parts


def key_of(task):
    """Two tasks with the same key are the same task, whatever their budget and words."""
    wish = (task["local_constraint"].get(name) for name in ("house rule", "cuisine", "room type", "transportation"))
    return json.dumps([task["org"], task["dest"], task["days"], task["date"][0], task["people_number"],
                       *(sorted(value) if isinstance(value, list) else value for value in wish)])


def tasks(a):
    """Draw index after index until every (level, days) is full; to go on, a run needs the last index that was kept."""
    kept, quota = recover(a.out), quotas(a)
    keys, cells = {key_of(task) for path in a.exclude for task in read_tasks(path)}, list(quota)
    ends = Counter()
    for task in kept:
        keys.add(key_of(task))
        ends[task["org"], task["dest"]] += 1
        quota[task["level"], task["days"]] -= 1
    index = last = int(kept[-1]["id"].rsplit("-", 1)[1]) + 1 if kept else 0
    with get_context("fork").Pool(a.workers) as pool:
        while any(n > 0 for n in quota.values()):
            block = [i for i in range(index, index + 1024) if quota[cells[i % len(cells)]] > 0]
            for task in pool.imap(partial(make_task, a), block, chunksize=16):
                if task and quota[task["level"], task["days"]] > 0 and key_of(task) not in keys \
                        and ends[task["org"], task["dest"]] < a.per_pair:
                    keys.add(key_of(task))
                    ends[task["org"], task["dest"]] += 1
                    quota[task["level"], task["days"]] -= 1
                    append_jsonl(a.out, task)
                    last = index
            index += 1024
            if index - last > 200_000:
                wanted = {f"{level}, {days} days": n for (level, days), n in quota.items() if n > 0}
                raise SystemExit(f"{a.out}: no new task in 200,000 draws, {wanted} to go; lower --n, "
                                 "widen --days or raise --per-pair")
    rows = recover(a.out)
    ratios = sorted(row["tightness"]["ratio"] for row in rows) or [math.nan]
    spread = " ".join(f"{q}%: {ratios[len(ratios) * q // 100]:.2f}" for q in (5, 50, 95))
    counts = Counter(f"{row['level']} {row['days']} days" for row in rows)
    print(f"{len(rows)} tasks: {dict(counts)}; least cost / budget {spread}")


# ---- queries ------------------------------------------------------------------------------------------------------
def write_query(rng, task, grammar):
    """A query that states every element of the task, in one of the grammar's many forms."""
    number, people, budget = task["visiting_city_number"], task["people_number"], task["budget"]
    values = {"org": task["org"], "dest": task["dest"], "days": task["days"], "days_word": WORDS[task["days"]],
              "n": people, "n_word": WORDS[people], "cities": number, "cities_word": WORDS[number], "budget": budget,
              "budget_comma": f"{budget:,}"}
    for i, text in (1, task["date"][0]), (2, task["date"][-1]):
        date = datetime.date.fromisoformat(text)
        end = "th" if 10 < date.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
        values |= {f"iso{i}": text, f"month{i}": f"{date:%B}", f"d{i}": date.day, f"th{i}": f"{date.day}{end}"}
    values["year"] = task["date"][0][:4]
    for slot in ("ask", "trip", "who", "place", "dates", "money"):
        forms = grammar[slot]
        if isinstance(forms, dict):  # one, or more than one
            forms = forms[min(people if slot == "who" else number, 2)]
        values[slot] = draw_form(rng, forms, values)
    wishes = [values["money"]]
    for name, value in task["local_constraint"].items():
        if value:
            forms = grammar[name] if name == "cuisine" else grammar[name][value]
            wish = f"{', '.join(value[:-1])} and {value[-1]}" if name == "cuisine" else value
            wishes.append(draw_form(rng, forms, {"wish": wish}))
    rng.shuffle(wishes)
    parts = draw_form(rng, grammar["frame"], values), *wishes, draw_form(rng, grammar["end"], {})
    return " ".join(part[0].upper() + part[1:] for part in parts if part)


def draw_form(rng, forms, values):
    return " ".join(rng.choice(re.split(r"\s/(?=\s)", forms)).split()).format(**values)


def unstated(query, task):
    """The elements of a task that a query does not state; [] when it states them all."""
    text, number, people = query.lower().replace(",", ""), task["visiting_city_number"], task["people_number"]
    first, last = (datetime.date.fromisoformat(task["date"][i]) for i in (0, -1))
    months = f"{first:%B|%b}|{last:%B|%b}".lower()
    bare = re.sub(rf"\b({months})\W+\d+|\d{{4}}-\d\d-\d\d|\b\d+(st|nd|rd|th)\b|\$\d+", " ", text)  # other numbers
    holds = {
        "org": re.search(rf"\b{re.escape(task['org'].lower())}\b", text),
        "dest": re.search(rf"\b{re.escape(task['dest'].lower())}\b", text),
        "days": re.search(count(task["days"]) + r"[\s-]+(\w+ )?days?\b" + ("|week" if task["days"] == 7 else ""), bare),
        "dates": all(re.search(rf"{day}|\b0?{day.day}(st|nd|rd|th)?\b", text) for day in (first, last)),
        "month": re.search(rf"{months}|{first:%Y-%m}|\b0?{first.month}/", text),
        "people": people == 1 or re.search(count(people) + "(?!.?days?|.?night| cit| different| distinct)"
                                           + ("|couple|pair|duo|both" if people == 2 else ""), bare),
        "cities": number == 1 or re.search(count(number) + r"[^.]{0,40}\bcit", bare),
        "budget": re.search(rf"(?<![\d.]){task['budget']}(?!\d)", text)}
    for value in task["local_constraint"].values():
        for wish in value if isinstance(value, list) else [value] if value else []:
            holds[wish] = re.search(STATED.get(wish, wish.lower()), text)
    return [name for name, found in holds.items() if not found]


def count(n):
    return rf"(?<![\d-])\b({n}|{WORDS[n]})\b"


def back_translate(a, task, attempt):
    """One try of one endpoint: the row for the answers' file. An endpoint that keeps failing costs this try only."""
    url, model = random.Random(f"{a.seed}/{task['id']}/{attempt}").choice(a.endpoint)
    elements = {key: value for key, value in task.items() if key not in ("id", "level", "query", "tightness", "unseen")}
    request = [{"role": "user", "content": PARAPHRASE + json.dumps(elements, ensure_ascii=False)}]
    try:
        query = " ".join(generator(a, url, model)(request).split()).strip('"')
        missing = unstated(query, task)
    except RuntimeError as error:  # the client has tried again and again
        query, missing = "", [str(error)]
    return {"id": task["id"], "attempt": attempt, "model": model, "query": query, "missing": missing}


def generator(a, url, model):
    """generate(messages) -> reply of an endpoint, patient: a run of days should not end for one bad hour."""
    key = Path(a.key).read_text().strip() if a.key else None
    return api_generate(url, model, temperature=a.temperature, retries=10, pause=a.pause, api_key=key)


def queries(a):
    """Put each task into words by an endpoint drawn at random. Every answer is kept at once in a file beside --out; one
    that leaves an element out is tried again, and after --tries the task is dropped and counted."""
    path, todo = f"{a.out}.answers", read_tasks(a.tasks)
    answers = recover(path)
    with ThreadPoolExecutor(a.concurrency) as pool:
        for attempt in range(a.tries):
            tried = {row["id"] for row in answers if not row["missing"] or row["attempt"] >= attempt}
            again = [pool.submit(back_translate, a, task, attempt) for task in todo if task["id"] not in tried]
            for done in as_completed(again):
                answers.append(done.result())
                append_jsonl(path, answers[-1])
    good = {row["id"]: row["query"] for row in answers if not row["missing"]}
    write_jsonl(a.out, [task | {"query": good[task["id"]]} for task in todo if task["id"] in good])
    missing = Counter(name for row in answers for name in row["missing"]).most_common(5)
    print(f"{len(good)} queries, {len(todo) - len(good)} dropped after {a.tries} tries; most often missing: {missing}")


# ---- episodes -----------------------------------------------------------------------------------------------------

def numbered(text, shown):
    """An answer with the number of its row before each meal and attraction that the tools have shown.

    A tiny model easily learns to draw numbers without repetition, and to copy the name behind a number; names without
    repetition it does not. A hotel has none, because every night has the same: drawn like a meal, it would change.
    """
    rows = {name: number for number, name in re.findall(r"(?m)^(\d+)\. (\[[^]\n]+\])", shown)}
    number = lambda line: f"{line[1]}{rows[line[2]]}. {line[2]}" if line[2] in rows else line[0]
    return re.sub(r"(?m)^(?!Accommodation)(\w+: )(\[[^]\n]+\])$", number, text)


def draft(rng, task, database, costs, cities, greed):
    """A plan of random choices that keep the wishes, each the cheapest with probability greed: (mode, route, plan).

    None where the choices do not fit together. It flies where the budget allows it, as an agent would that asks for
    flights first.
    """
    fits = {mode: np.argwhere(array <= task["budget"]) for mode, array in costs.items()}
    mode = next(mode for mode in ("air", "road") if len(fits.get(mode, ())))
    route = [cities[i] for i in rng.choice(fits[mode].tolist())]
    nights = rng.choice(list(splits(task["days"] - 1, len(route))))
    hotels = [[hotel[2] for hotel in lodgings(task, database, city) if hotel[1] <= n] for city, n in zip(route, nights)]
    rides = [ways(task, database, mode, *leg) for leg in legs(task, route, nights)]
    sights = [list(venues(database, "attractions", city)) for city in route]
    meals = draft_meals(rng, task, database, route, nights, greed)
    if not (meals and all(hotels) and all(rides) and all(len(names) >= n - 1 for names, n in zip(sights, nights))):
        return None
    rides = [pick(rng, [ride for ride in leg if ride[1].startswith("Flight")] or leg, greed)[1] for leg in rides]
    sights = [rng.sample(names, n - 1) for names, n in zip(sights, nights)]
    hotels = [pick(rng, names, greed) for names in hotels]
    return mode, route, lay_out(task, route, nights, rides, hotels, meals, sights)


def pick(rng, options, greed):
    return options[0] if rng.random() < greed else rng.choice(options)


def draft_meals(rng, task, database, route, nights, greed):
    """Names per city: a restaurant for each wanted cuisine, then others; every second time a dinner on arrival."""
    wanted = tuple(task["local_constraint"].get("cuisine") or ())
    menus, chosen, served = [list(menu(database, city, wanted)) for city in route], [[] for _ in route], 0
    for i in range(len(wanted)):
        places = [c for c, meals in enumerate(menus) if any(meal.mask >> i & 1 for meal in meals)]
        if places and not served >> i & 1:
            c = rng.choice(places)
            meal = pick(rng, [meal for meal in menus[c] if meal.mask >> i & 1], greed)
            menus[c].remove(meal)
            chosen[c].append(meal.name)
            served |= meal.mask
    for c, n in enumerate(nights):
        need = max(3 * (n - 1) + (rng.random() < 0.5), len(chosen[c]))
        if len(chosen[c]) + len(menus[c]) < need:
            return None
        while len(chosen[c]) < need:
            chosen[c].append(menus[c].pop(0 if rng.random() < greed else rng.randrange(len(menus[c]))).name)
        rng.shuffle(chosen[c])
    return chosen


def good_draft(rng, task, database, costs, cities):
    """The first of 40 drafts that scores success, drawn ever more greedily, else the solver's own plan; and a draft
    whose only fault was its cost, or None."""
    dear = None
    for i in range(40):
        found = draft(rng, task, database, costs, cities, 0.3 + 0.6 * i / 40)
        wrong = faults(score(task, found[2], database, "strict")) if found else None
        if wrong == []:
            return found, dear
        if wrong == ["valid_cost"]:
            dear = found
    _, mode, route = cheapest_route(costs, cities)
    return (mode, route, cheapest_plan(task, database, mode, route)), dear


def faults(verdict):
    return [name for name, (passed, _) in verdict["checks"].items() if passed is False]


def side_looks(rng, task, database, mode, route):
    """One to three reasonable searches that turn out not to be needed."""
    others = [city for city in stop_cities(task, database) if city not in route]
    looks = [step for city in others for step in city_searches(city)]
    looks += [(f"cities in {state}", "SearchCity", {"state": state}) for state in {database.cities[c] for c in route}]
    mode, way = ("road", "Self-driving") if mode == "air" else ("air", "Flight")
    if mode in modes(task):
        for a, b, day in ((task["org"], route[0], task["date"][0]), (route[-1], task["org"], task["date"][-1])):
            looks += way_searches(task, mode, a, b, day, way)
    looks = rng.sample(looks, min(len(looks), rng.randint(1, 3)))
    return [(f"to compare: {thought}", *call) for thought, *call in looks]


def dead_end(rng, task, database, costs, cities, mode, route):
    """Searches that run into a dead end, and the thought that turns back from it: (steps, thought) or None."""
    other = next((name for name in costs if name != mode), None)
    a, b, dates = task["org"], route[0], task["date"]
    kinds = {"air": ("Flight", "flight"), "road": ("Self-driving", "road")}
    if other and costs[other].min() == math.inf and leg_cost(task, database, other, a, b, dates[0]) == math.inf:
        steps = way_searches(task, other, a, b, dates[0], kinds[other][0])[-1:]
        return steps, f"no {kinds[other][1]} from {a} to {b}, go back and look for another way"
    start = [(f"cities in {task['dest']}", "SearchCity", {"state": task["dest"]})]
    for i in rng.sample(range(len(cities)), len(cities)):
        city, least = cities[i], min(costs[mode].take(i, axis).min() for axis in range(costs[mode].ndim))
        if city in route or least <= task["budget"]:
            continue
        longest = task["days"] - task["visiting_city_number"]
        if not any(hotel[1] <= longest for hotel in lodgings(task, database, city)):
            return start + city_searches(city)[:1], f"{city} has no hotel that fits, go back and choose another city"
        for here, there, date in ((a, city, dates[0]), (city, a, dates[-1])):
            if leg_cost(task, database, mode, here, there, date) == math.inf:
                steps = way_searches(task, mode, here, there, date, kinds[mode][0])
                return start + steps, f"no {kinds[mode][1]} from {here} to {there}, go back and choose another city"
        if least < math.inf:
            why = f"with {city} the trip costs ${least:.0f} or more, over ${task['budget']}"
            return start + city_searches(city)[:2], f"{why}, go back and choose another city"
    return None


def teach(rng, task, database, style):
    """What the solver does as a teacher of this style: [(thought, tool, arguments)], last thought, plan, style.

    Where nothing can go wrong, backtracking comes to exploring."""
    costs, cities = least_costs(task, database)
    (mode, route, plan), dear = good_draft(rng, task, database, costs, cities)
    steps, last = searches(task, plan), "the plan"
    end = dead_end(rng, task, database, costs, cities, mode, route) if style == "backtracking" else None
    if end:
        rest = [step for step in steps if step[1:] not in [seen[1:] for seen in end[0]]]
        steps = end[0] + [(f"{end[1]}: {rest[0][0]}", *rest[0][1:]), *rest[1:]]
    elif style == "backtracking" and dear and dear[:2] == (mode, route):
        why, hotel = score(task, dear[2], database)["checks"]["valid_cost"][1], dear[2][0]["accommodation"]
        last = f"with {hotel.rsplit(', ', 1)[0]} {why}, go back and choose cheaper ones: the plan"
    elif style != "direct":
        style = "exploring"
        for look in side_looks(rng, task, database, mode, route):
            if look[1:] not in [step[1:] for step in steps]:
                steps.insert(rng.randint(1, len(steps)), look)
    return steps, last, plan, style


def account(task, database, plan):
    """The last thought before an answer: what ways, hotels and meals cost all together."""
    mode, dollars = mode_of(plan), Counter(ways=0, hotels=0, meals=0)
    for day, date in zip(plan, task["date"]):
        if day["transportation"] != "-":
            rides = ways(task, database, mode, *ends(day), date)
            dollars["ways"] += next(cost for cost, words in rides if words == day["transportation"])
        for slot in ("breakfast", "lunch", "dinner", "accommodation"):
            name, _, city = day[slot].rpartition(", ")
            if name and slot == "accommodation":
                dollars["hotels"] += next(cost for cost, _, hotel in lodgings(task, database, city) if hotel == name)
            elif name:
                cost = next(meal.cost for meal in menu(database, city, ()) if meal.name == name)
                dollars["meals"] += cost * task["people_number"]
    sums = " + ".join(f"{name} ${cost:g}" for name, cost in dollars.items())
    return f"{sums} = ${sum(dollars.values()):g}, within ${task['budget']:g}: the plan"


def make_episode(a, task):
    """An episode of the solver as teacher; the reason where there is no plan or it is not a success."""
    rng, database = random.Random(f"{a.seed}/{task['id']}"), open_once(a.database)
    report = solve_report(task, database)
    if not report.plan:
        return {"id": task["id"], "model": "solver", "refused": [report.reason]}
    steps, last, plan, style = teach(rng, task, database, rng.choices(list(a.styles), list(a.styles.values()))[0])
    last = last.removesuffix("the plan") + account(task, database, plan) if a.like == "paper" else last
    episode = Episode(task, Sandbox(database), system_prompt=a.prompt)
    for reply in replies(steps, last, plan):
        if a.like == "tiny":
            reply = numbered(reply, "\n".join(message["content"] for message in episode.messages))
        episode.step(reply)
    return accept(episode, f"solver, {style}", database)


def accept(episode, model, database):
    """The record of an episode that kept the protocol and whose plan, read from its text, scores success under both
    rule sets; of another one, why it did not."""
    plan, verdict = judge(episode.task, episode.answer, database)
    strict = score(episode.task, plan, database, "strict")  # it never passes what `star` fails
    if episode.stop == "answer" and strict["success"] == 1:
        return episode.record(model) | {"plan": plan, "score": verdict}
    wrong = faults(strict) if episode.stop == "answer" else [episode.stop]
    return {"id": episode.task["id"], "model": model, "refused": wrong}


def play_tasks(a, tasks):
    """What `accept` says of each task's episode, in any order: of the solver, of a local model, or of the endpoints,
    one drawn per task."""
    if not (a.endpoint or a.model):
        with get_context("fork").Pool(a.workers) as pool:
            yield from pool.imap(partial(make_episode, a), tasks, chunksize=4)
        return
    database, groups = open_once(a.database), {}
    for task in tasks:
        teacher = a.model or random.Random(f"{a.seed}/{task['id']}").choice(a.endpoint)
        groups.setdefault(teacher, []).append(Episode(task, Sandbox(database), system_prompt=a.prompt))
    for teacher, plays in groups.items():
        if a.model:
            ended = play_vllm(*engine(a.model, a.context, a.concurrency), plays, a.context, a.temperature, seed=a.seed)
        else:
            ended = play(generator(a, *teacher), plays, a.concurrency)
        for episode in ended:
            yield accept(episode, a.model or teacher[1], database)


def episodes(a):
    """Play what has not been played. What is refused is counted, and noted beside --out with its reason."""
    refused, tasks = f"{a.out}.refused", read_tasks(a.tasks)
    done = {row["task"]["id"] for row in recover(a.out)} | {row["id"] for row in recover(refused)}
    for row in play_tasks(a, [task for task in tasks if task["id"] not in done]):
        append_jsonl(refused if "refused" in row else a.out, row)
    order = {task["id"]: i for i, task in enumerate(tasks)}
    rows = sorted(recover(a.out), key=lambda row: order.get(row["task"]["id"], -1))
    write_jsonl(a.out, rows)
    # the paper's Table 8: episodes per level, tool calls, length of an episode and of its plan (words, not tokens)
    why = Counter(name for row in recover(refused) for name in row["refused"])
    levels, models = Counter(row["task"]["level"] for row in rows), Counter(row["model"] for row in rows)
    print(f"{len(rows)} episodes, {len(recover(refused))} refused {dict(why)}; {dict(levels)}, {dict(models)}; means: "
          f"{mean(row['calls'] for row in rows):.1f} tool calls, {mean_words(row['messages'][1:] for row in rows):.0f} "
          f"words, {mean(len(row['answer'].split()) for row in rows):.0f} words of plan")


def mean(values):
    return fmean([*values] or [0])


def mean_words(talks):
    return mean(sum(len(message["content"].split()) for message in talk) for talk in talks)


# ---- subsets ------------------------------------------------------------------------------------------------------
def subsets(a):
    """The paper's data sets: 100 to 2K of mixed levels, each within the next, and 1K of each level alone."""
    taken = {key_of(task) for path in a.exclude for task in read_tasks(path)}
    rows = [task for task in read_tasks(a.tasks) if key_of(task) not in taken]
    random.Random(a.seed).shuffle(rows)
    pools = [[task for task in rows if task["level"] == level] for level in LEVELS]
    sizes = {f"mixed-{n}": [cut(n, *marks) for marks in ((0, 4, 10), (4, 7, 10), (7, 10, 10))] for n in a.sizes}
    sizes |= {f"{level}-{a.alone}": [a.alone * (level == other) for other in LEVELS] for level in LEVELS}
    for level, pool, most in zip(LEVELS, pools, map(max, zip(*sizes.values()))):
        if len(pool) < most:
            raise SystemExit(f"{a.tasks}: {len(pool)} {level} tasks after exclusion, {most} are needed; make more, or "
                             "lower --sizes and --alone")
    for name, counts in sizes.items():
        chosen = [task for pool, n in zip(pools, counts) for task in pool[:n]]
        random.Random(f"{a.seed}/{name}").shuffle(chosen)
        write_jsonl(Path(a.out) / f"{name}.jsonl", chosen)
    print(f"{a.out}: " + " ".join(sizes))


# ---- files --------------------------------------------------------------------------------------------------------
def recover(path):
    """The rows a killed run left; a line it did not finish is cut off."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
    return read_jsonl(path) if data else []


def read_tasks(path):
    """Tasks from our own files, from episodes, or from the published sets (jsonl or csv)."""
    if str(path).endswith(".csv"):
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [row.get("task", row) for row in read_jsonl(path)]
    if not rows:
        raise SystemExit(f"{path}: holds no task; make some with `python synth.py tasks`")
    return [load_task(row) for row in rows]


def convert(a):
    """Rewrite tasks in the published sets' form, lists and dicts as text: `official` is TravelPlanner's, `star` the
    STAR release's, which says constraint and room rule; or back into ours."""
    rows = read_tasks(a.tasks)
    for row in rows if a.form != "ours" else []:
        for name in {"tightness", "unseen"} & row.keys():  # ours alone
            del row[name]
        row["date"], wish = str(row["date"]), row["local_constraint"]
        if a.form == "star":
            del row["local_constraint"]
            row["constraint"] = str({"room rule": wish.pop("house rule"), **wish})
        else:
            row["local_constraint"] = str(wish)
    write_jsonl(a.out, rows)


# ---- main ---------------------------------------------------------------------------------------------------------
def flags(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = {
        "seed": dict(type=int, default=0, help="the same seed gives the same file"),
        "out": dict(required=True, help="what is written; what stands there already is resumed"),
        "database": dict(default=None, help="folder of the tables (default: $STAR_DATABASE, else database/mini)"),
        "workers": dict(type=int, default=os.cpu_count(), help="processes; what is written does not depend on it"),
        "like": dict(choices=("tiny", "paper"), help="tiny: short queries and prompt, budgets near the least cost; "
                     "paper: as published (default: tiny where the database has fewer than 100 cities)"),
        "tasks": dict(required=True, help="file of tasks, ours or published, jsonl or csv"),
        "exclude": dict(nargs="*", default=[], help="files of tasks that must not come again"),
        "endpoint": dict(type=endpoint, nargs="+", default=[],
                         help="URL=MODEL of OpenAI-compatible servers, one drawn per task [STAR: two]"),
        "key": dict(metavar="FILE", help="holds the endpoints' API key"),
        "concurrency": dict(type=int, default=32, help="requests at a time"),
        "temperature": dict(type=float, default=1.0, help="of the endpoints or the local model"),
        "pause": dict(type=float, default=1.0, help="seconds before a failed request is first repeated"),
    }
    add = {}
    for function, words, own in (
            (tasks, "solvable tasks with queries", "seed out database workers like exclude"),
            (queries, "put the tasks into words by endpoints",
             "seed out tasks endpoint key concurrency temperature pause"),
            (episodes, "successful episodes of the solver, or of teachers",
             "seed out database workers like tasks endpoint key concurrency temperature pause"),
            (subsets, "the paper's data sets out of many tasks", "seed out tasks exclude"),
            (convert, "between our tasks and the published forms", "out tasks")):
        command = commands.add_parser(function.__name__, help=words)
        command.set_defaults(run=function)
        for flag in own.split():
            command.add_argument(f"--{flag}", **shared[flag])
        add[function] = command.add_argument
    add[tasks]("--n", type=int, default=1000, help="how many")
    add[tasks]("--days", type=numbers, default=[3, 5, 7], help="lengths of the trips, of 3,5,7")
    add[tasks]("--levels", type=numbers, default=[4, 3, 3], help="easy:medium:hard [STAR: 4:3:3]")
    add[tasks]("--dates", type=span, default=list(MARCH), help="first:last day of the trips (default: March 2022 [1])")
    add[tasks]("--split", choices=("all", "train", "val"), default="all",
               help="train and val share no pair of places and no start date")
    add[tasks]("--unseen", type=float, help="part of the draws of a val split that must go to cities never in training")
    add[tasks]("--per-pair", type=int, default=10**9, help="at most this many tasks from one place to another")
    add[tasks]("--prefix", default="syn", help="of the ids")
    add[queries]("--tries", type=int, default=4, help="of a task before it is dropped")
    add[episodes]("--styles", type=mix, default={"direct": 1}, help="direct:5,exploring:3,backtracking:2")
    add[episodes]("--model", help="folder or hub name of a teacher to play in vLLM here")
    add[episodes]("--context", type=int, default=32768, help="tokens of an episode of --model")
    add[subsets]("--sizes", type=numbers, default=[100, 200, 500, 1000, 2000], help="mixed at 4:3:3 [STAR]")
    add[subsets]("--alone", type=int, default=1000, help="tasks of one level alone [STAR]")
    add[convert]("--form", choices=("ours", "official", "star"), default="ours", help="the form that is written")
    return parser.parse_args(argv)


def numbers(text):
    return [int(part) for part in re.split("[:,]", text)]


def span(text):
    first, last = (datetime.date.fromisoformat(part) for part in text.split(":"))
    return [(first + datetime.timedelta(days=i)).isoformat() for i in range((last - first).days + 1)]


def mix(text):
    weights = {name: float(weight or 1) for name, _, weight in (part.partition(":") for part in text.split(","))}
    if not set(weights) <= {"direct", "exploring", "backtracking"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not like direct:5,exploring:3,backtracking:2")
    return weights


def endpoint(text):
    url, _, model = text.rpartition("=")
    if not url.startswith("http") or not model:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://host:8000/v1=MODEL")
    return url, model


def main(argv=None):
    a = flags(argv)
    if "like" in a:
        a.like = a.like or ("tiny" if len(open_once(a.database).cities) < 100 else "paper")
        a.prompt = SHORT_PROMPT if a.like == "tiny" else SYSTEM_PROMPT
    a.run(a)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        sys.exit(f"synth.py: {error}")
