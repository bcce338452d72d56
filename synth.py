"""
Make the training data: solvable tasks, queries, episodes of a teacher, and the paper's data sets.

    (1) tasks     elements drawn as [1] and [2] draw them, kept if the budget allows a plan
    (2) queries   elements put into words: by a grammar, or by endpoints whose answers are checked
    (3) episodes  a teacher plays each task: the solver (travel/teacher.py) or endpoints. An episode
                  is kept if its plan, read back from the text, passes every check of `strict`
    (4) subsets   100 to 500 of RL's 1,000 tasks, and 2,000 that contain them [2]

Departs from [2]: (1) keeps tasks for which the solver finds a plan, while [2] estimates feasibility
from mean prices; (2) and (3) need no endpoint, but use models as [2] does if --endpoint names some.
[1] TravelPlanner, arXiv:2402.01622   [2] STAR, arXiv:2603.21972

Reads   a database folder (sandbox.py); tasks, ours or as published
Writes  jsonl, line by line, so that a killed run resumes; OUT.refused lists what was left out

    python synth.py tasks    --n 1000 --seed 1 --split train --out data/rl.jsonl
    python synth.py queries  --tasks data/rl.jsonl --endpoint http://a:8000/v1=M --out data/q.jsonl
    python synth.py episodes --tasks data/q.jsonl --exploring 0.4 --out data/sft.jsonl
    python synth.py subsets  --base data/rl.jsonl --tasks data/more.jsonl --out data/subsets
"""
import datetime
import hashlib
import itertools
import json
import math
import os
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path

import evaluate
import runtime
import sandbox
from evaluate import mean
from format_plan import itinerary
from runtime import COUNT, NATURAL, Mistake, Parser
from sandbox import PROMPTS, entries, fill, join_words, open_database
from travel import constraints, solver
from travel.dead_ends import begins_with, fitting
from travel.teacher import Lesson, Teacher, faults
from travel.world import LEVELS, Travel, load_task

# Tasks are drawn from these lists. If their order changes, a seed gives other tasks.
WISHES = ("house rule", "cuisine", "room type", "transportation")
RULE_WISHES = ("pets", "smoking", "children under 10", "parties", "visitors")
ROOM_WISHES = ("entire room", "private room", "shared room", "not shared room")
# how many of the benchmark's 45 + 102 public queries have which wishes
BENCHMARK = {"easy": {(): 15},
             "medium": {("house rule",): 19, ("cuisine",): 22, ("room type",): 16},
             "hard": {("house rule", "room type", "transportation"): 39,
                      ("house rule", "cuisine", "transportation"): 17,
                      ("house rule", "cuisine", "room type"): 12,
                      ("cuisine", "room type", "transportation"): 7}}
CUISINES = ("Chinese", "American", "Italian", "Mexican", "Indian", "Mediterranean", "French")
PRONOUNS = {"We": "I", "we": "I", "are": "am", "Our": "My", "our": "my", "us": "me",
            "ourselves": "myself"}  # {word of a group: word of one traveller}
SPELLED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# A query states a wish if it matches the wish's pattern; other wishes are stated by their names.
NOT_SHARED = r"(\b(not|non|never|without|avoid|rather than|neither)\b|n't)[^.]{0,30}shar|unshared"
STATED = {
    "pets": r"\bpet", "smoking": "smok", "children under 10": "child|kid",
    "parties": r"\bpart(ies|y\b(?! of))", "visitors": "visitor|guest",
    "entire room": "entire|whole (room|pla|ap|ho|un)", "private room": "private",
    "shared room": f"^(?!.*({NOT_SHARED})).*shar", "not shared room": NOT_SHARED,
    "no flight": "fl(ight|y)|air", "no self-driving": "driv|behind the wheel"}


def days_of(month):
    """The dates of a month like 2022-03."""
    first = datetime.date.fromisoformat(f"{month}-01")
    days = (first + datetime.timedelta(day) for day in range(31))
    return [f"{day}" for day in days if day.month == first.month]


MARCH = days_of("2022-03")
# One of the alternatives between slashes is drawn. "who 1" is about one traveller, "who 2" about
# more; "place" counts cities in the same way. The tiny grammar is short and writes
# dates as the tables do.
GRAMMARS = {like: entries(PROMPTS / f"queries-{like}.txt") for like in ("tiny", "paper")}


# ---------------------------------------------------------------- tasks

open_once = cache(open_database)  # in each process
load = partial(runtime.load_tasks, load=load_task)


def portions(n, weights):
    """Split n by weight into whole numbers that add up to n."""
    marks = [n * part // sum(weights) for part in itertools.accumulate(weights, initial=0)]
    return [end - start for start, end in itertools.pairwise(marks)]


def stable_draw(text):
    """A large pseudo-random number that depends on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


@cache
def reserved(database):
    """Cities that training never visits: all cities of some states, about an eighth of all cities.
    Hashes of the states' names decide which states."""
    cities = set()
    for state in sorted(database.states, key=stable_draw):
        if len(cities) + len(database.states[state]) <= len(database.cities) // 8 + 1:
            cities.update(database.states[state])
    return frozenset(cities)


def split_of(task, database):
    """"train", "val", or "" for neither. Both splits have no pair of places and no start date in
    common."""
    pair, kept = "|".join(sorted((task["org"], task["dest"]))), reserved(database)
    val_pair = not kept.isdisjoint(solver.stop_cities(task, database)) or stable_draw(pair) % 5 == 0
    val_date = stable_draw("from " + task["date"][0]) % 5 == 0
    if val_pair != val_date or task["org"] in kept:
        return ""
    return "val" if val_pair else "train"


def sample_task(rng, database, days, level, like, dates, kinds=None):
    """The elements of a task as [1] and [2] draw them, without budget and query; None if the draw
    is infeasible. A trip by air needs three flights out and three back to choose from; a trip by
    road is at most 600 km long on the way out [2]. In a small world one flight or any road will do.
    """
    people = 1
    if level != "easy":
        people = 2 if rng.random() < 0.5 else rng.randint(3, 8)
    wish, by_air = sample_wishes(rng, level, people, kinds), rng.random() < 0.9
    if wish["transportation"]:
        by_air = wish["transportation"] == "no self-driving"
    flights, longest = (3, 600) if like == "paper" else (1, math.inf)

    def connected(a, b, date, km=math.inf):
        if by_air:
            return len(database.flights(a, b, date)) >= flights
        road = solver.drive(database, a, b)
        return road and road.km <= km

    org = rng.choice(tuple(database.cities))
    home, cities = database.cities[org], database.flight_destinations(org)
    if not by_air:
        cities = [city for city in database.cities if connected(org, city, None, longest)]
    cities = [city for city in cities if database.cities.get(city, home) != home]
    if not cities:
        return None
    city = rng.choice(cities)
    starts = [date for date in dates[:len(dates) - days + 1] if connected(org, city, date)]
    if not starts:
        return None
    first = dates.index(rng.choice(starts))
    task = {"level": level, "org": org, "dest": city if days == 3 else database.cities[city],
            "days": days, "date": list(dates[first:first + days]),
            "visiting_city_number": days // 2, "people_number": people, "local_constraint": wish}
    stops = solver.stop_cities(task, database)
    return task if any(connected(city, org, task["date"][-1]) for city in stops) else None


def sample_wishes(rng, level, people, kinds=None):
    """{wish: its value, or None}. An easy task has no wish, a medium task has one. A hard task of
    [2] has two and also rules out a means of transport; one of the benchmark has any three of the
    four kinds, and always four cuisines where [2] has two or three. kinds: of BENCHMARK; None: as
    in [2]."""
    wish, benchmark = dict.fromkeys(WISHES), kinds is not None
    if not benchmark:
        kinds = ()
    if not benchmark and level == "medium":
        kinds = [rng.choice(("house rule", "cuisine", "room type"))]
    if not benchmark and level == "hard":
        pairs = ("house rule", "cuisine"), ("cuisine", "room type"), ("house rule", "room type")
        kinds = (*rng.choices(pairs, (3, 3, 4))[0], "transportation")
    if "transportation" in kinds:
        wish["transportation"] = rng.choice(("no flight", "no self-driving"))
    if "house rule" in kinds:
        wish["house rule"] = rng.choice(RULE_WISHES)
    if "cuisine" in kinds:
        number = 2 if level == "medium" else 4 if benchmark else rng.choice((2, 3))
        wish["cuisine"] = rng.sample(CUISINES, number)
    if "room type" in kinds:
        wish["room type"] = rng.choice(ROOM_WISHES if people <= 2 else ROOM_WISHES[:2])
    return wish


def paper_budget(task, database):
    """A budget as [1] sets it, from the lowest, mean and highest prices; None if there are none."""
    cities, days, org = solver.stop_cities(task, database), task["days"], task["org"]
    trips = [(org, city, task["date"][0]) for city in cities]
    trips += [(city, org, task["date"][-1]) for city in cities]
    rides = [flight.price for trip in trips for flight in database.flights(*trip)]
    roads = [solver.drive(database, a, b) for a, b, _ in trips]
    rides = rides or [int(road.km * 0.05) for road in roads if road]
    hotels = [row.price for city in cities for row in database.hotels(city)]
    meals = [row.cost for city in cities for row in database.restaurants(city)]
    if not (rides and hotels and meals):
        return None
    number = task["visiting_city_number"] + 1
    low, mid, high = (number * of(rides) + days * of(hotels) + 3 * days * of(meals)
                      for of in (min, mean, max))
    base = {3: (mid + low) / 2, 5: mid, 7: (mid + high) / 2}[days]
    factor = {"easy": 1, "medium": 0.75, "hard": 0.5}[task["level"]]
    return max(100, 100 * round(base * task["people_number"] * factor / 100))


def close_budget(rng, task, database):
    """A budget of which the cheapest plan takes 30 to 80%; None if there is no plan."""
    least, *_ = solver.cheapest_route(*solver.least_costs(task, database))
    return 10 * math.ceil(least / rng.uniform(0.3, 0.8) / 10) if least < math.inf else None


def cells_of(args):
    """The kinds of tasks that a file has in proportion, {(days, level, wishes, dead ends): its
    weight in the level}. wishes: of BENCHMARK if --like asks for it; None leaves them, and dead
    ends, to the draw."""
    wishes = BENCHMARK if args.like == "benchmark" else dict.fromkeys(LEVELS, {None: 1})
    return {(days, level, kinds, ends): weight for days in args.days for level in LEVELS
            for kinds, weight in wishes[level].items() for ends in args.dead_ends or [None]}


def most_dead_ends(database, days, level):
    """The most cities at the head of a state's list in which no hotel fits, while one fits in as
    many of the next ones as a trip visits, over all wishes of a level."""
    rules, rooms = (None, *RULE_WISHES), (None, *ROOM_WISHES)
    number, most = days // 2, 0
    for state, rule, room in itertools.product(database.states, rules, rooms):
        wishes = bool(rule) + bool(room)
        if days == 3 or wishes > {"easy": 0, "medium": 1, "hard": 2}[level]:
            continue
        trip = {"org": None, "dest": state, "days": days, "visiting_city_number": number,
                "people_number": 1, "local_constraint": {"house rule": rule, "room type": room}}
        fits = [bool(fitting(trip, database, city)) for city in database.states[state]]
        ends = fits.index(True) if any(fits) else 0
        if all(fits[ends:ends + number]) and len(fits) >= ends + number:
            most = max(most, ends)
    return most


def make_task(args, index):
    """The task of this index, or None if the draw is infeasible. It depends on nothing but the
    flags and the index."""
    rng, worlds = random.Random(f"{args.seed}/{index}"), open_once(args.database).worlds
    name = list(worlds)[stable_draw(f"world/{args.seed}/{index}") % len(worlds)]
    database = worlds[name]
    days, level, kinds, ends = (cells := list(cells_of(args)))[index % len(cells)]
    small = all(len(world.cities) < 100 for world in worlds.values())
    like = args.like if args.like in GRAMMARS else "tiny" if small else "paper"
    task = sample_task(rng, database, days, level, like, args.dates, kinds)
    if task is None or args.split not in ("all", split_of(task, database)):
        return None
    if ends is not None:
        if not begins_with(ends, task, database):
            return None
        task["dead_ends"] = ends
    if like == "paper":
        task["budget"] = paper_budget(task, database)
    else:
        task["budget"] = close_budget(rng, task, database)
    report = solver.solve_report(task, database) if task["budget"] else None
    plan = solver.lay_out(task, report.journey) if report and report.journey else None
    if constraints.score(task, plan, database, "strict")["success"] < 1:
        return None
    task["query"] = write_query(rng, task, GRAMMARS[like])
    if name:
        task["world"] = name
    ratio = round(report.cost / task["budget"], 3)
    task["tightness"] = {"least_cost": report.cost, "ratio": ratio}
    return {"id": f"{args.prefix}-{index:07d}"} | task


def key_of(task):
    """Two tasks with the same key are the same task, whatever their budget and words."""
    wishes = [task["local_constraint"].get(name) for name in WISHES]
    wishes = [sorted(wish) if isinstance(wish, list) else wish for wish in wishes]
    return json.dumps([task.get("world"), task["org"], task["dest"], task["days"], task["date"][0],
                       task["people_number"], *wishes])


def own_rows(path, *keys):
    """The rows that this command has already written; a Mistake if the file has rows without one of
    these keys."""
    def check(rows):
        if not all(isinstance(row, dict) and row.keys() >= {*keys} for row in rows):
            raise Mistake(f"{path} is no file of this command: choose another --out, or remove it")
    return runtime.recover_jsonl(path, check)


def tasks(args):
    """Draw a task per index until there are enough of every kind. To resume, a run only needs the
    index of the last task that was kept."""
    keys = {key_of(task) for path in args.exclude for task in load(path)}
    args.days = list(dict.fromkeys(args.days))
    args.dead_ends = list(dict.fromkeys(args.dead_ends))
    cells, lack, pairs = cells_of(args), {}, Counter()
    for level, n in zip(LEVELS, portions(args.n, args.levels), strict=True):
        each = sorted((cell for cell in cells if cell[1] == level), key=lambda cell: str(cell[2]))
        lack |= zip(each, portions(n, list(map(cells.get, each))), strict=True)
    kinds = list(cells)
    for days, level, _, ends in (cell for cell in cells if cell[3] and lack[cell]):
        most = max(most_dead_ends(world, days, level)
                   for world in open_once(args.database).worlds.values())
        if most < ends:
            raise Mistake(f"--dead-ends {ends}: the largest that this database has is {most} in "
                          f"{level} trips of {days} days; lower it, or change --days or --levels")

    def take(task):
        """Count a task and return True, unless it is known or its kind or pair is complete."""
        key, pair = key_of(task), (task["org"], task["dest"])
        wishes = tuple(filter(task["local_constraint"].get, WISHES))
        kind = (task["days"], task["level"], wishes if args.like == "benchmark" else None,
                task.get("dead_ends"))
        fits = lack.get(kind, 0) > 0 and key not in keys and pairs[pair] < args.per_pair
        if fits:
            keys.add(key)
            lack[kind] -= 1
            pairs[pair] += 1
        return fits

    kept = own_rows(args.out, "query", "tightness")
    last = int(kept[-1]["id"].rsplit("-", 1)[1]) if kept else -1
    if not all(map(take, kept)) or kept and make_task(args, last) != kept[-1]:
        raise Mistake(f"{args.out}: holds tasks that these flags do not ask for; choose another "
                      "--out, or remove it")
    index, draws = last + 1, 0  # draws: since the last new task
    bar = runtime.progress(None, args.out, args.n, len(kept), "task")
    with bar, runtime.workers(args.workers) as pool:
        while any(lack.values()):
            if draws > 200_000:
                raise Mistake(f"{args.out}: no new task in 200,000 draws, {lack} to go; lower "
                              "--n or --dead-ends, widen --days, raise --per-pair, or name a "
                              "--month in which the database has flights")
            block = [i for i in range(index, index + 1024) if lack[kinds[i % len(kinds)]]]
            for task in pool.map(partial(make_task, args), block, chunksize=16):
                if task and take(task):
                    runtime.append_jsonl(args.out, task)
                    bar.update()
                    draws = 0
                    if not any(lack.values()):
                        break  # the pool cancels the draws that it has not begun
            index, draws = index + 1024, draws + len(block)
    ratio = mean(row["tightness"]["ratio"] for row in runtime.read_jsonl(args.out)) or 0
    print(f"{args.out}: {args.n} tasks; the least cost is {ratio:.0%} of the budget on average. "
          f"Next: python synth.py episodes --tasks {args.out} --out FILE, or python evaluate.py "
          f"--tasks {args.out} --agent solver")


# ---------------------------------------------------------------- queries

def write_query(rng, task, grammar):
    """A query that states every element of the task, in one of the grammar's many forms."""
    numbers = {"n": task["people_number"], "cities": task["visiting_city_number"],
               "days": task["days"]}
    values = numbers | {f"{name}_word": in_words(n) for name, n in numbers.items()}
    values |= {"org": task["org"], "dest": task["dest"], "budget": task["budget"]}
    values |= PRONOUNS if numbers["n"] == 1 else {word: word for word in PRONOUNS}
    for end, i in ("first", 0), ("last", -1):
        values[end] = date = datetime.date.fromisoformat(task["date"][i])
        th = "th" if 10 < date.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
        values[f"{end}_th"] = f"{date.day}{th}"

    def draw(slot):
        return fill(rng, grammar[slot], values)

    who, place = f"who {min(numbers['n'], 2)}", f"place {min(numbers['cities'], 2)}"
    for slot in "ask", "trip", who, place, "dates", "money":
        values[slot.split()[0]] = draw(slot)
    wishes = [values["money"]]
    for name, wish in task["local_constraint"].items():
        if name == "cuisine" and wish:
            values["wish"], wish = join_words(wish), name
        if wish:
            wishes.append(draw(wish))
    rng.shuffle(wishes)
    parts = draw("frame"), *wishes, draw("end")
    return " ".join(part[0].upper() + part[1:] for part in parts if part)


def unstated(query, task):
    """The elements of a task that a query does not state; [] when it states them all."""
    days, cities, people = task["days"], task["visiting_city_number"], task["people_number"]
    ends = [datetime.date.fromisoformat(task["date"][i]) for i in (0, -1)]
    months = "|".join(f"{day:%B|%b}" for day in ends).lower()
    text = query.lower().replace(",", "")
    # without the numbers of dates and money
    bare = re.sub(rf"\b({months})\W+\d+|\d{{4}}-\d\d-\d\d|\b\d+(st|nd|rd|th)\b|\$\d+", " ", text)
    week, couple = "|week" if days == 7 else "", "|couple|pair|duo|both" if people == 2 else ""
    others = "(?!.?days?|.?night| cit| different| distinct)"
    holds = {
        "org": re.search(rf"\b{re.escape(task['org'].lower())}\b", text),
        "dest": re.search(rf"\b{re.escape(task['dest'].lower())}\b", text),
        "days": re.search(rf"{number_pattern(days)}[\s-]+(\w+ )?days?\b{week}", bare),
        "dates": all(re.search(rf"{day}|\b0?{day.day}(st|nd|rd|th)?\b", text) for day in ends),
        "month": re.search(rf"{months}|{ends[0]:%Y-%m}|\b0?{ends[0].month}/", text),
        "people": people == 1 or re.search(number_pattern(people) + others + couple, bare),
        "cities": cities == 1 or re.search(rf"{number_pattern(cities)}[^.]{{0,40}}\bcit", bare),
        "budget": re.search(rf"(?<![\d.]){task['budget']}(?!\d)", text)}
    # without the places: Indianapolis states no cuisine, Fairbanks no flight
    places = "|".join(re.escape(task[key].lower()) for key in ("org", "dest"))
    wished = re.sub(rf"\b({places})\b", " ", text)
    for wish in task["local_constraint"].values():
        for name in wish if isinstance(wish, list) else [wish]:
            if name:
                holds[name] = re.search(STATED.get(name, name.lower()), wished)
    return [name for name, found in holds.items() if not found]


def number_pattern(n):
    """A pattern that matches a number in figures or as a word."""
    return rf"(?<![\d-])\b({in_words(n)}|{n})\b"


def in_words(n):
    """A number as a word, or in figures if it is more than ten."""
    return SPELLED[n] if n < len(SPELLED) else str(n)


def endpoint_of(args, draw):
    """(name, generate) of an endpoint drawn at random. It retries often, so that some
    minutes of downtime do not end a run of days."""
    url, name = random.Random(f"{args.seed}/{draw}").choice(args.endpoint)
    options = {"temperature": args.temperature, "max_tokens": 8192, "retries": 40,
               "api_key": evaluate.read_key(args.key)}
    return name, partial(evaluate.chat, url, name, **options)


def paraphrase(args, task):
    """A task with a query that an endpoint wrote. A query that leaves out an element is tried
    again; after --tries the result is {"id", "refused": [reason]}."""
    ours = ("id", "level", "query", "tightness", "dead_ends")
    elements = {key: value for key, value in task.items() if key not in ours}
    prompt = (PROMPTS / "paraphrase.txt").read_text(encoding="utf-8")
    text = f"{prompt}\n{json.dumps(elements, ensure_ascii=False)}"
    for attempt in range(args.tries):
        _, generate = endpoint_of(args, f"{task['id']}/{attempt}")
        try:
            query = " ".join(evaluate.spoken(generate([{"role": "user", "content": text}])).split())
            missing = unstated(query.strip('"'), task)
        except evaluate.Refused as error:
            missing = [str(error)]
        if not missing:
            return task | {"query": query.strip('"')}
    return {"id": task["id"], "refused": missing}


def complete(make, args):
    """Process the tasks that --out lacks: endpoints in threads, the solver in processes. Then sort
    the file into task order. Refused tasks go into OUT.refused with the reasons, and are not tried
    again. After an error none is begun, and those that run are kept."""
    refused, todo, asking = f"{args.out}.refused", load(args.tasks), make is paraphrase
    if asking and not args.endpoint:
        raise Mistake("queries needs --endpoint URL=MODEL, which puts the tasks into words")
    order, kind = {task["id"]: i for i, task in enumerate(todo)}, "query" if asking else "task"
    if not Path(args.out).exists():
        Path(refused).unlink(missing_ok=True)  # of another run
    done = {row["id"] for row in own_rows(refused, "refused")}
    for row in own_rows(args.out, kind):
        task = row.get("task", row)
        done.add(task["id"])
        same = todo[order[task["id"]]] if task["id"] in order else task
        if task | ({"query": same["query"]} if asking else {}) != same:
            raise Mistake(f"{args.out}: holds another task {task['id']!r}; choose another --out")
    if not asking:
        open_once(args.database)  # before several threads do
    pool = ThreadPoolExecutor(args.concurrency) if args.endpoint else runtime.workers(args.workers)
    left = [pool.submit(append_made, make, args, task, refused) for task in todo
            if task["id"] not in done]
    bar = runtime.progress(as_completed(left), args.out, len(todo), len(todo) - len(left))
    try:
        for future in bar:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    rows = own_rows(args.out, kind)
    rows.sort(key=lambda row: order.get(row.get("task", row)["id"], -1))
    runtime.write_jsonl(args.out, rows)
    why = Counter(reason for row in own_rows(refused, "refused") for reason in row["refused"])
    wrong = f"; {refused} has the others: {dict(why.most_common(5))}" if why else ""
    following = "synth.py episodes --tasks" if asking else "sft.py --data"
    print(f"{args.out}: {len(rows)} of {len(todo)}{wrong}. Next: python {following} {args.out}")


def append_made(make, args, task, refused):
    """Append what make(args, task) returns to its file, in the thread or process that made it."""
    row = make(args, task)
    runtime.append_jsonl(refused if "refused" in row else args.out, row)


# ---------------------------------------------------------------- episodes

def make_episode(args, task):
    """An episode with an endpoint or the solver as teacher, or the reason why there is none."""
    rng, database = random.Random(f"{args.seed}/{task['id']}"), open_once(args.database).of(task)
    if args.endpoint:
        world, (name, generate) = Travel(database), endpoint_of(args, task["query"])
        episode = world.episode(task, args.seed, args)
        return accept(world, evaluate.play_one(generate, episode), name)
    reason = solver.solve_report(task, database).reason
    journey = None if reason else Teacher(rng, task, database).sensible_draft()
    if not journey:
        reason = reason or "names of several places"
        return {"id": task["id"], "model": "solver", "refused": [reason]}
    lesson = Lesson(rng, task, database, journey)
    steps, last, style = lesson.teach(rng.random() < args.exploring)
    return play_out(args, task, database, steps, last, journey, style)


def play_out(args, task, database, steps, last, journey, style, edit=None):
    """Play these searches of the solver, a last thought and this journey as the answer -> the
    episode's record, or why it is refused. edit: changes the answer by what the tools showed."""
    world = Travel(database)
    episode = world.episode(task, args.seed, args)
    for step in steps:
        episode.step(sandbox.turn(*step))
    answer = itinerary(solver.lay_out(task, journey))
    if edit:
        answer = edit(answer, "\n".join(message["content"] for message in episode.messages))
    episode.step(sandbox.final_turn(last, answer))
    return accept(world, episode, f"solver, {style}")


def accept(world, episode, model):
    """The record of an episode whose plan, read from its text, passes every check of `strict`; of
    any other episode, why it is refused."""
    plan, verdict, strict = world.verdict(episode)
    if strict == 1:
        return episode.record(model) | {"plan": plan, "score": verdict}
    wrong = [episode.stop] if episode.stop != "answer" else faults(verdict) or ["strict"]
    return {"id": episode.task["id"], "model": model, "refused": wrong}


# ---------------------------------------------------------------- subsets

def subsets(args):
    """Write sets of mixed levels, each of which contains the smaller ones. Their tasks are those of
    --base as far as these reach, then others of --tasks."""
    rows = {}
    for path in filter(None, (args.base, args.tasks)):
        for task in random.Random(args.seed).sample(found := load(path), len(found)):
            rows.setdefault(key_of(task), task)
    for size in args.sizes:
        chosen = []
        for level, n in zip(LEVELS, portions(size, (4, 3, 3)), strict=True):
            found = [task for task in rows.values() if task["level"] == level][:n]
            if len(found) < n:
                raise Mistake(f"a set of {size} needs {n} {level} tasks, and there are "
                              f"{len(found)}: name a file that has more with --tasks")
            chosen += found
        random.Random(f"{args.seed}/{size}").shuffle(chosen)
        runtime.write_jsonl(Path(args.out) / f"mixed-{size}.jsonl", chosen)
    print(f"{args.out}: {', '.join(f'mixed-{size}.jsonl' for size in args.sizes)}")


# ---------------------------------------------------------------- main

def flags(argv=None):
    everywhere, source, world, teachers = (Parser(add_help=False) for _ in range(4))
    add = everywhere.add_argument
    add("--seed", type=int, default=0, help="the same seed gives the same file")
    add("--out", required=True, help="file or folder to write; a killed run resumes there")
    add = source.add_argument
    add("--tasks", required=True, help="file of tasks or episodes, ours or published, jsonl or csv")
    add = world.add_argument
    add("--database", help="folder of the tables; unset: $STAR_DATABASE, else database/mini")
    add("--workers", type=COUNT, default=len(os.sched_getaffinity(0)),
        help="number of processes, which does not change the file")
    add = teachers.add_argument
    add("--endpoint", type=evaluate.endpoint, nargs="+", default=[], metavar="URL=MODEL",
        help="OpenAI-compatible servers, one drawn per task [2: two]")
    add("--key", metavar="FILE", help="file that holds the endpoints' API key")
    add("--concurrency", type=COUNT, default=32, help="requests at a time")
    add("--temperature", type=runtime.AMOUNT, default=1.0, help="of the endpoints' sampling")

    p = Parser(description=__doc__, formatter_class=runtime.Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(name, run, words, *parents):
        p = commands.add_parser(name, parents=[everywhere, *parents], help=words,
                                description=words, formatter_class=runtime.Help)
        p.set_defaults(run=run, system_prompt="full", failure_rate=0.0, max_turns=60)
        return p.add_argument

    add = command("tasks", tasks, "draw solvable tasks with queries", world)
    add("--n", type=COUNT, default=1000, help="number of tasks")
    add("--like", choices=[*GRAMMARS, "benchmark"], help="tiny: short queries, budgets near the "
        "least cost; paper: as [1] and [2] draw them; unset: tiny if the database has fewer than "
        "100 cities, else paper; benchmark: the same, with kinds of wishes in the proportions of "
        "[1]'s public queries")
    add("--days", type=int, nargs="+", choices=(3, 5, 7), default=[3, 5, 7], help="of the trips")
    add("--levels", type=NATURAL, nargs=3, default=[4, 3, 3], metavar=("EASY", "MEDIUM", "HARD"),
        help="the ratio of the levels [2]")
    add("--month", dest="dates", type=days_of, default="2022-03", metavar="YYYY-MM",
        help="month of all dates; the database must have flights in it")
    add("--split", choices=("all", "train", "val"), default="all",
        help="train and val share no pair of places and no start date")
    add("--dead-ends", type=NATURAL, nargs="+", default=[], metavar="K", help="only trips of "
        "which the K cities that a greedy traveller would take first (travel/dead_ends.py) have no "
        "hotel that fits, and the next ones have: as many tasks for each K; unset: any trip")
    add("--per-pair", type=COUNT, default=10**9, help="most tasks from one place to another")
    add("--exclude", nargs="*", default=[], help="files of tasks that must not be drawn again")
    add("--prefix", default="syn", help="prefix of the ids")
    add = command("queries", partial(complete, paraphrase), "put tasks into words by endpoints",
                  source, teachers)
    add("--tries", type=COUNT, default=4, help="answers per task before it is dropped")
    add = command("episodes", partial(complete, make_episode),
                  "let the solver or endpoints play tasks", source, world, teachers)
    add("--exploring", type=runtime.SHARE, default=0.0,
        help="share of the solver's episodes that turn back from a dead end, if the task has one")
    commands.choices["episodes"].idle = [
        ("exploring", "beside", "endpoint"), *((name, "without", "endpoint") for name in
                                               ("key", "concurrency", "temperature"))]
    add = command("subsets", subsets, "draw the paper's sets of other sizes around that of RL")
    add("--base", required=True, metavar="FILE", help="tasks of RL: a smaller set is a part")
    add("--tasks", metavar="FILE", help="other tasks, which sets larger than the base also have")
    add("--sizes", type=COUNT, nargs="+", default=[100, 200, 500, 2000],
        help="tasks of each set; what is drawn has levels at 4:3:3 [2]")
    return p.parse_args(argv)


def start(args):
    (runtime.lock_folder if args.command == "subsets" else runtime.lock_file)(args.out)
    args.run(args)


def main(argv=None):
    runtime.run("synth.py", start, flags(argv))


if __name__ == "__main__":
    main()
