"""
The laptop's world: what a model of 2M parameters needs to learn in minutes what a large one knows.

    (1) world   tables like TravelPlanner's, small and seeded, whose names a tiny model can copy; or
                many such worlds, none of which has a city of the one that ships
    (2) drills  for want of pre-training: exercises in copying and in weighing rows, or whole
                episodes of the solver, from worlds other than the one it will play in
    (3) model   a random Qwen2 with induction heads, and a tokenizer made for copying

Reads   for (3) files of messages
Writes  the tables' CSVs; jsonl of messages or episodes; a model folder

    python tiny.py world  --seed 0 --out database/mini
    python tiny.py world  --worlds 24 --seed 7 --out data/worlds
    python tiny.py drills --n 6000 --worlds 48 --out data/drills.jsonl
    python tiny.py model  --corpus data/drills.jsonl data/sft.jsonl --out out/init
"""
import argparse
import calendar
import csv
import io
import itertools
import math
import os
import random
import re
import tempfile
from functools import partial
from operator import itemgetter
from pathlib import Path

import evaluate
import solver
import synth
from constraints import ROOM_TYPES
from evaluate import COUNT, LEVELS, SHARE, Help, Parser
from format_plan import MEALS
from sandbox import Sandbox, observation_message, open_database
from solver import SEARCHES

WORDS = Path(__file__).parent / "database" / "words"
# The word pools of the small worlds. They share no word, so that a word says what kind of place it
# names, and every world draws on the same ones: a tiny model that can copy them copies the names of
# cities it has never seen.
POOLS = {name: words.split() for name, words in synth.entries(WORDS / "names.txt").items()}
FILLERS = ("Tea", "BBQ", "Seafood", "Cafe", "Pizza", "Bakery")
MONTHS = [[f"2022-{month:02d}-{day + 1:02d}" for day in range(calendar.monthrange(2022, month)[1])]
          for month in range(1, 13)]
WINDING = 1.25  # km by road per km as the crow flies


# ---------------------------------------------------------------- (1) world

def make_world(seed, dates=synth.MARCH, avoid=frozenset()):
    """The tables of a small world as {path in the database folder: text}; same seed, same bytes.
    avoid: names that none of its cities has."""
    rng = random.Random(f"world/{seed}")
    states, where = make_map(rng, avoid)
    hotels, meals, sights = make_places(rng, states, where)
    roads, flights = make_roads(rng, where), make_flights(rng, states, where, dates)
    lines = [f"{city}\t{state}" for state, cities in states.items() for city in cities]
    return {
        "background/citySet_with_states.txt": "\n".join(lines),
        "clean_accommodations_2022.csv": to_csv(
            ",NAME,room type,price,minimum nights,review rate number,house_rules,"
            "maximum occupancy,city", hotels),
        "clean_restaurant_2022.csv": to_csv(
            ",Name,City,Cuisines,Average Cost,Aggregate Rating", meals),
        "attractions.csv": to_csv(
            "Name,Latitude,Longitude,Address,Phone,Website,City", sights),
        "distance.csv": to_csv("origin,destination,cost,duration,distance", roads),
        "clean_Flights_2022.csv": to_csv(
            "Flight Number,Price,DepTime,ArrTime,ActualElapsedTime,FlightDate,OriginCityName,"
            "DestCityName,Distance", flights)}


def to_csv(head, rows):
    out = io.StringIO()
    if head.startswith(","):  # a column without a name holds the row's number
        rows = [[i, *row] for i, row in enumerate(rows)]
    csv.writer(out, lineterminator="\n").writerows([head.split(","), *rows])
    return out.getvalue()


def make_map(rng, avoid=frozenset()):
    """14 states of 3 or 4 cities on a plane: {state: [city]}, {city: (x, y) in km}. Each noun names
    two cities of different states: training meets the words of a reserved city all the same."""
    nouns = rng.sample(POOLS["nouns"], 24)
    sizes, names = [4] * 6 + [3] * 8, []  # 48 cities
    rng.shuffle(sizes)
    for noun in nouns + rng.sample(nouns, 24):
        near = [name for name in names if name.endswith(noun)] + names[-2:]
        used = {name.split()[0] for name in near}
        unused = [prefix for prefix in POOLS["prefixes"]
                  if prefix not in used and f"{prefix} {noun}" not in avoid]
        names.append(f"{rng.choice(unused)} {noun}")
    states, where = {}, {}
    for state, size in zip(rng.sample(POOLS["states"], 14), sizes, strict=True):
        x, y = rng.uniform(0, 5200), rng.uniform(0, 2600)
        states[state] = [names.pop() for _ in range(size)]
        for city in states[state]:
            where[city] = (x + rng.uniform(-180, 180), y + rng.uniform(-180, 180))
    return states, where


def make_places(rng, states, where):
    """The rows of hotels, of restaurants and of attractions. No two of a kind share a first word
    within a state: what one observation says cannot be mixed up with what the next one does."""
    hotels, meals, sights = [], [], []
    for cities in states.values():
        beds, foods, views = (rng.sample(POOLS[pool], len(POOLS[pool]))
                              for pool in ("hotel words", "meal words", "sight words"))
        for city in cities:
            base = rng.choice((60, 80, 100, 130))  # dollars a night
            for _ in range(rng.choice((3, 4, 4))):
                hotels.append(make_hotel(rng, beds.pop(), base, city))
            for _ in range(rng.choice((6, 6, 6, 7))):
                mixed = rng.random() < 0.4
                kinds = rng.sample(synth.CUISINES, 2) if mixed else [
                    rng.choice(synth.CUISINES), rng.choice(FILLERS)]
                name = f"{foods.pop()} {rng.choice(POOLS['meal nouns'])}"
                meals.append([name, city, ", ".join(kinds), rng.randint(10, 70),
                              rng.randint(20, 49) / 10])
            x, y = (round(km / 100, 2) for km in where[city])
            for _ in range(3):
                noun, number = rng.choice(POOLS["sight nouns"]), rng.randint(1, 9)
                address, phone = f"{number} {rng.choice(POOLS['nouns'])} St", rng.randint(100, 999)
                website = f"{noun.lower()}.org" if rng.random() > 0.03 else ""
                sights.append([f"{views.pop()} {noun}", x, y, address, phone, website, city])
    for rows in (hotels, meals, sights):
        rng.shuffle(rows)
    return hotels, meals, sights


def make_hotel(rng, word, base, city):
    room = rng.choices(tuple(ROOM_TYPES.values()), (5, 5, 2))[0]
    rules = rng.sample(synth.RULE_WISHES, rng.choice((1, 1, 2)))
    if rng.random() < 0.04:
        rules = ()  # an incomplete row, which the sandbox drops as it does the official ones
    price = base * rng.uniform(0.5, 2.2) * (0.6 if room == "Shared room" else 1)
    nights, people = float(rng.choice((1, 1, 2, 2, 3, 3))), rng.choice((1, 2, 2, 3, 4, 6))
    return [f"{word} {rng.choice(POOLS['hotel nouns'])}", room, 10.0 * round(price / 10), nights,
            float(rng.randint(1, 5)), " & ".join(f"No {rule}" for rule in rules), people, city]


def make_roads(rng, where):
    """Rows of distance.csv: most pairs, some with no row, some empty, some of more than a day."""
    rows = []
    for a, b in itertools.combinations(where, 2):
        fate, km = rng.random(), max(20, round(WINDING * math.dist(where[a], where[b])))
        if fate < 0.04:
            continue
        for origin, goal, length in ((a, b, km), (b, a, km + rng.randint(-3, 3))):
            known = [road_hours(length), f"{length:,} km"] if fate > 0.07 else ["", ""]
            rows.append([origin, goal, "", *known])
    rng.shuffle(rows)
    # the official table repeats pairs too, and the first row of a pair counts
    twice = next(row for row in rows if row[3] and "day" not in row[3])
    return rows + [[*twice[:3], "9 mins", "9 km"]]


def road_hours(km):
    """The time of a drive at 90 km/h, in the words of the official table."""
    hours, minutes = divmod(round(km / 90 * 60), 60)
    if hours >= 24:
        return f"{hours // 24} day {hours % 24} hours"
    return f"{hours} hours {minutes} mins" if hours else f"{minutes} mins"


def make_flights(rng, states, where, dates):
    """Rows of the flights table, in the order of their numbers. A city flies to all cities of
    another state, on every second date with some gaps, so that a trip of 3, 5 or 7 days can fly out
    and back. Flights shown together differ in the first two digits of their numbers."""
    free = {block: rng.sample(range(100), 100) for block in range(10, 100)}  # unused numbers
    rows = []
    for a, b, odd in make_links(rng, states, where):
        km, fare = math.dist(where[a], where[b]), rng.uniform(0.05, 0.09)
        for (origin, goal), date in itertools.product(((a, b), (b, a)), dates[odd::2]):
            if rng.random() < 0.1:
                continue
            blocks = [block for block, numbers in free.items() if numbers]
            for block in rng.sample(blocks, rng.choice((2, 2, 2, 3))):
                minutes = round(30 + km / 13 + rng.randint(-9, 9))
                leaves = rng.randrange(300, 1200, 5)
                price = round(30 + fare * km * rng.uniform(0.5, 1.8))
                times = [f"{time // 60 % 24:02d}:{time % 60:02d}"
                         for time in (leaves, leaves + minutes)]
                length = f"{minutes // 60} hours {minutes % 60} minutes"
                rows.append([f"F{block}{free[block].pop():02d}", price, *times, length, date,
                             origin, goal, float(round(km / 1.609))])
    return sorted(rows)


def make_links(rng, states, where):
    """[(city, city, parity of the dates)] of the flights. Nearly all are too far apart to drive."""
    links, degree = {}, dict.fromkeys(where, 0)
    for city in rng.sample(list(where), 33):
        far, least = [], 2160 if len(links) % 9 else 600  # km by road
        for state, cities in states.items():
            nearest = min(math.dist(where[city], where[other]) for other in cities)
            if city not in cities and WINDING * nearest > least:
                far.append((state, max(degree[other] for other in cities)))
        if not far:
            continue
        # of the states that far, one that few flights go to
        state, _ = min(rng.sample(far, len(far)), key=itemgetter(1))
        odd = rng.randrange(2)
        for other in states[state]:
            if (other, city) not in links and (city, other) not in links:
                links[city, other] = odd
                degree[city] += 1
                degree[other] += 1
    return [(*pair, odd) for pair, odd in links.items()]


HOME = frozenset(make_map(random.Random("world/0"))[1])  # the cities of database/mini


def write_world(folder, seed, dates=synth.MARCH, avoid=frozenset()):
    for name, text in make_world(seed, dates, avoid).items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def world(args):
    evaluate.hold(args.out)
    if not args.worlds:
        write_world(args.out, args.seed)
    for number in range(args.worlds or 0):
        folder = Path(args.out) / f"world-{number:02d}"
        write_world(folder, f"{args.seed}.{number}", avoid=HOME)


# ---------------------------------------------------------------- (2) drills

def drills(args):
    """Exercises or episodes of many worlds without a city of the one that ships: in a single one a
    model would learn names by heart."""
    evaluate.hold_file(args.out)
    with evaluate.workers(args.workers) as pool:
        parts = pool.map(partial(world_rows, args), range(args.worlds), chunksize=1)
    rows = [row for part in parts for row in part]
    random.Random(args.seed).shuffle(rows)
    evaluate.write_jsonl(args.out, rows)
    print(f"{args.out}: {len(rows)} rows from {args.worlds} worlds")


def world_rows(args, number):
    """A world's share of the rows. Worlds differ in their month: of one alone, the days on which no
    trip may start would never be learnt as such."""
    dates, n = MONTHS[number % 12], synth.portions(args.n, [1] * args.worlds)[number]
    with tempfile.TemporaryDirectory() as folder:
        write_world(folder, f"{args.seed}.{number}", dates, HOME)
        if args.episodes:
            rows = world_episodes(args, number, folder, dates)
        else:
            rng, database = random.Random(f"drills/{args.seed}/{number}"), open_database(folder)
            rows = (make_drill(rng, database, dates, args.careful) for _ in itertools.count())
        return list(itertools.islice(rows, n))


def world_episodes(args, number, folder, dates):
    """Episodes of the solver, all successful. A share is a careful teacher's, who weighs the rows
    of a list before taking one; the others are a hasty one's, who gives no reason."""
    settings = argparse.Namespace(
        seed=f"{args.seed}.{number}", prefix=f"world-{number}", database=folder, like="tiny",
        days=[3], dates=dates, split="train", system_prompt="short", failure_rate=0.0, max_turns=60)
    rng, database = random.Random(f"episodes/{settings.seed}"), synth.open_once(folder)
    careful = rng.random() < args.careful
    for index in itertools.count():
        task = synth.make_task(settings, index)
        if task is None:
            continue
        journey = in_order(synth.Teacher(rng, task, database).good_draft(), database)
        steps, style = solver.searches(task, journey), "hasty"
        if careful:
            steps, journey = weighed(steps, task, database, journey)
            style = "careful"
        row = synth.play_out(settings, task, database, steps, "the plan", journey, style)
        if "refused" not in row:  # else the same teacher plays the next task in its place
            yield row
            careful = rng.random() < args.careful


def in_order(journey, database):
    """The journey with three meals of those it has, in the order of their list."""
    (stay,) = journey.stays
    order = list(solver.places(database, "restaurants", stay.city))
    meals = sorted(stay.meals[:3], key=lambda meal: order.index(meal.name))
    return journey._replace(stays=[stay._replace(meals=meals)])


def weighed(steps, task, database, journey):
    """A careful teacher's searches, and the journey with the hotel and the restaurants they come
    to: the thought after a list of either goes through its rows, as far as a wish decides."""
    (stay,) = journey.stays
    said, notes, found = {}, [], []
    said[SEARCHES["hotels"]], bed = weigh_hotels(task, database.hotels(stay.city))
    said[SEARCHES["restaurants"]], names = weigh_meals(
        task, database.restaurants(stay.city), stay.meals)
    for step in steps:
        found.append(step._replace(thought="\n".join([*notes, step.thought])))
        notes = said.get(step.tool, [])
    beds = {bed.name: bed for bed in solver.lodgings(task, database, stay.city)}
    meals = {meal.name: meal for meal in solver.menu(database, stay.city, solver.cuisines(task))}
    stay = stay._replace(bed=beds[bed], meals=[meals[name] for name in names])
    return found, journey._replace(stays=[stay])


def weigh_hotels(task, rows):
    """The lines that weigh a list, and the name of the hotel they take: the first that fits, None
    where none does. What is wanted is said first, in the words of the rows; then a line a row
    quotes what matters of it, with "ok" or "no" behind each, as far as the first "no"."""
    room, rule = (task["local_constraint"].get(name) for name in ("room type", "house rule"))
    rooms = [kind for kind in ROOM_TYPES.values()
             if kind == ROOM_TYPES.get(room) or room == "not shared room" and kind != "Shared room"]
    wishes = [f"{kind} ok" for kind in rooms] + [f"No {rule} no"] * bool(rule)
    lines = ["wanted: " + (", ".join(wishes) or "any")]
    for number, row in enumerate(rows, 1):
        points = [(f"{number}. [{row.name}] ${row.price}. Room Type: {row.room_type}",
                   not room or row.room_type in rooms)]
        for i, ban in enumerate(row.house_rules.split(" & ")):
            points.append((f"{' & ' if i else ', House Rules: '}{ban}", ban != f"No {rule}"))
        points.append((f", Minimum Nights: {row.minimum_nights:g}",
                       row.minimum_nights < task["days"]))
        lines.append("")
        for quote, fits in points:
            lines[-1] += f"{quote} {'ok' if fits else 'no'}"
            if not fits:
                break
        else:
            return [*lines, f"Accommodation: {number}. [{row.name}]"], row.name
    return lines, None


def weigh_meals(task, rows, meals=()):
    """The lines that weigh a list by the cuisines wanted, as far as all are served; and the names
    they take, in the order of a day's meals: those that serve, then of `meals`, then any."""
    state, taken = dict.fromkeys(solver.cuisines(task), "ok"), []
    own = {meal.name for meal in meals}

    def take(number, row):
        lines.append(f"{MEALS[len(taken)].title()}: {number}. [{row.name}]")
        taken.append(row.name)

    def wishes():
        return "wanted: " + (", ".join(map(" ".join, state.items())) or "any")

    lines = [wishes()]
    for number, row in enumerate(rows, 1):
        if "ok" not in state.values():
            break
        kinds = row.cuisines.split(", ")
        words = ", ".join(f"{kind} {state.get(kind, 'no')}" for kind in kinds)
        lines.append(f"{number}. [{row.name}] Avg. Cost ${row.cost:g}. Cuisines: {words}")
        if any(state.get(kind) == "ok" for kind in kinds):
            take(number, row)
            state.update((kind, "done") for kind in kinds if kind in state)
            lines.append(wishes())
    for number, row in sorted(enumerate(rows, 1), key=lambda pair: pair[1].name not in own):
        if len(taken) < len(MEALS) and row.name not in taken:
            take(number, row)
    return lines, taken


def make_drill(rng, database, dates, careful=0.0):
    """One exercise in copying what is shown: a query's next search for its way out or back by air
    or by road, flights out and back, or a day out of the lists of a city. careful: the share of
    exercises in weighing the rows of a list by a query's wishes."""
    kind = rng.choices(("air", "road", "flights", "lists"), (2, 1, 2, 6))[0]
    if careful and rng.random() < careful:
        kind = rng.choices(("wishes", "rooms", "rules", "meals"), (14, 3, 3, 6))[0]
    ends = None  # of a task that this can be asked about: its ways out and back
    while not ends:
        task = synth.sample_task(rng, database, 3, rng.choice(LEVELS), "tiny", dates)
        if task and is_possible(kind, task, database):
            ends = solver.legs(task, [task["dest"]], [2])
    task["budget"] = 10 * rng.randint(20, 300)
    if kind == "flights":
        shown, said = drill_flights(rng, ends, database)
    elif kind == "lists":
        shown, said = drill_lists(rng, task["dest"], database)
    elif kind in ("wishes", "rooms", "rules", "meals"):
        shown, said = drill_weighing(rng, task, kind, database)
    else:
        shown, said = drill_ways(rng, task, ends, kind, database)
    messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
    return {"messages": messages}


def is_possible(kind, task, database):
    """Whether there is what a drill shows, both out and back, or a row that fits."""
    wish = task["local_constraint"]
    if kind == "wishes":
        return any(wish[name] for name in ("room type", "house rule", "cuisine"))
    if kind in ("rooms", "rules"):
        _, taken = weigh_hotels(task, database.hotels(task["dest"]))
        return bool(taken) and wish["room type" if kind == "rooms" else "house rule"] is not None
    if kind == "meals":
        return bool(wish["cuisine"])
    return all({"air": "air" in solver.modes(task) and database.flights(a, b, date),
                "road": "road" in solver.modes(task) and solver.drive(database, a, b),
                "flights": database.flight_dates(a, b), "lists": True}[kind]
               for a, b, date in solver.legs(task, [task["dest"]], [2]))


def see(database, tool, arguments):
    """What a tool's answer looks like to the model."""
    return observation_message(Sandbox(database).call(tool, arguments))["content"]


def drill_ways(rng, task, ends, mode, database):
    """A query and the searches so far -> the next search."""
    if mode == "road" and database.flights(*ends[0]):
        task["local_constraint"]["transportation"] = "no flight"  # else it would be gone by air
    steps = [step for leg in ends for step in solver.way_searches(task, mode, *leg, mode == "air")]
    done = rng.randrange(len(steps))
    query = synth.write_query(rng, task, synth.GRAMMARS["tiny"])
    seen = [see(database, step.tool, step.arguments) for step in steps[:done]]
    return "\n".join([query, *seen]), solver.turn(*steps[done])


def drill_flights(rng, ends, database):
    """Flights out and back, on any date -> one of each, in that order."""
    shown, said, words = [], [], ("departure", "destination", "date")
    for a, b, _ in rng.sample(ends, 2):
        ride = a, b, rng.choice(database.flight_dates(a, b))
        shown.append(see(database, "SearchFlight", dict(zip(words, ride, strict=True))))
        line = f"Flight from {a} to {b} [{rng.choice(database.flights(*ride)).number}]"
        said.append(synth.numbered(line, shown[-1]))
    return "\n".join(shown), "\n".join(said)


def drill_lists(rng, city, database):
    """The lists of a city -> three meals and a hotel for two nights, and again among the sights:
    an answer takes what its thoughts took."""
    tables = rng.sample(list(SEARCHES), len(SEARCHES))
    shown = "\n".join(see(database, SEARCHES[table], {"city": city}) for table in tables)
    hotels = [name for name, rows in solver.places(database, "hotels", city).items()
              if all(row.minimum_nights <= 2 for row in rows)]
    meals = rng.sample(list(solver.places(database, "restaurants", city)), len(MEALS))
    taken = [f"{meal.title()}: [{name}]" for meal, name in zip(MEALS, meals, strict=True)]
    taken += [f"Accommodation: [{name}]" for name in rng.sample(hotels, min(1, len(hotels)))]
    sights = solver.places(database, "attractions", city)
    plan = taken + [f"Attraction: [{name}]" for name in sights]
    lines = rng.sample(taken, len(taken)) + rng.sample(plan, len(plan))
    return shown, synth.numbered("\n".join(lines), shown)


def drill_weighing(rng, task, kind, database):
    """A query and a city's lists as far as one of hotels or restaurants -> that list weighed; or a
    query alone -> its wishes in the words of the lists."""
    city, query = task["dest"], synth.write_query(rng, task, synth.GRAMMARS["tiny"])
    if kind == "wishes":
        return query, "\n".join(weigh_hotels(task, [])[0] + weigh_meals(task, [])[0])
    shown = [query, see(database, SEARCHES["hotels"], {"city": city})]
    lines, _ = weigh_hotels(task, database.hotels(city))
    if kind == "meals":
        shown.append(see(database, SEARCHES["restaurants"], {"city": city}))
        lines, _ = weigh_meals(task, database.restaurants(city))
    return "\n".join(shown), "\n".join(lines)


# ---------------------------------------------------------------- (3) model

def read_phrases(file):
    """A file's phrases. "@" and the ends of lines stand between them."""
    with evaluate.naming(file):
        return re.split("[@\n]", Path(file).read_text(encoding="utf-8").strip("\n"))


# What the tools and the protocol say over and over, and the pairs of digits: a token each, so that
# episodes are short. "3. [" stands before a row's name, in observations and answers alike: there
# induction heads find the name of that row.
PHRASES = [
    *(f"{i:02d}" for i in range(100)),
    *(f"{i}. [" for i in range(1, 10)),
    *(f"{to}2022-{month:02d}-" for to in ("", " to ") for month in range(1, 13)),
    *read_phrases(WORDS / "phrases.txt")]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def embed_classes(lm, rows, rank=32):
    """Embed tokens half at random and half by their neighbours in the rows of ids: tokens of a kind
    (names of hotels, digits) start alike, as in any trained model. Positive pointwise mutual
    information with the tokens before and after, and its largest singular vectors (Levy and
    Goldberg, 2014)."""
    import torch

    size, width = lm.model.embed_tokens.weight.shape
    counts = torch.zeros(size, 2 * size)
    for ids in map(torch.tensor, rows):
        counts.index_put_((ids[1:], ids[:-1]), torch.ones(1), accumulate=True)
        counts.index_put_((ids[:-1], size + ids[1:]), torch.ones(1), accumulate=True)
    chance = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    information = (counts / chance.clamp(min=1e-9)).clamp(min=1).log()
    u, s, _ = torch.svd_lowrank(information, q=rank)
    turned = torch.linalg.qr(torch.randn(width, rank))[0].T  # into the model's width
    kinds = torch.nn.functional.normalize(u * s.sqrt(), dim=-1) @ turned
    mixed = torch.randn(size, width) + kinds * width**0.5
    lm.model.embed_tokens.weight.copy_(0.1 * 0.5**0.5 * mixed)


def wire_induction(lm):
    """Give a random tiny Qwen2 what every pre-trained model has: induction heads, which find the
    last place where the current token stood and say what came after it (arXiv:2209.11895). Training
    would spend most of its budget on it.

    Heads of layer 0 look one token back, by their biases: b and b turned by one position meet at
    distance 1 under RoPE, and its fast frequencies make that sharp. What they read they write into
    a subspace Q, in which heads of layer 1 look for the current token; its slow frequencies leave
    the meeting alone at any distance. The token found is written out as it was embedded, which the
    head, starting as the embedding, reads as that token.
    """
    import torch

    config = lm.config
    lm.lm_head.weight.copy_(lm.model.embed_tokens.weight)
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    back, find = lm.model.layers[0].self_attn, lm.model.layers[1].self_attn
    d = config.hidden_size // config.num_attention_heads
    share = config.num_attention_heads // config.num_key_value_heads  # queries of one key
    # radians per token, (d / 2,)
    angle = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2) / d)
    fast, slow = 6.0 * (angle > 0.02), 2.0 * (angle < 0.002).repeat(2)[:, None]

    def subspace():
        return torch.linalg.qr(torch.randn(config.hidden_size, d))[0]  # (H, d), orthonormal columns

    for key in range(config.num_key_value_heads):
        q, kv = slice(key * share * d, (key * share + 1) * d), slice(key * d, (key + 1) * d)
        previous, written, said = subspace(), subspace(), subspace()
        back.q_proj.bias[q] = torch.cat([fast, 0 * fast])
        back.k_proj.bias[kv] = torch.cat([fast * angle.cos(), fast * angle.sin()])
        back.v_proj.weight[kv], back.o_proj.weight[:, q] = 0.3 * previous.T, written
        find.q_proj.weight[q], find.k_proj.weight[kv] = slow * previous.T, slow * written.T
        # loud: it may find many tokens at once
        find.v_proj.weight[kv], find.o_proj.weight[:, q] = 8.0 * said.T, said


def make_tokenizer(texts, vocabulary, phrases=PHRASES):
    """A byte-level BPE made for copying: words are split from their punctuation and numbers into
    pairs of digits, so that a name or a date is the same few tokens wherever it stands."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # Qwen's own split (transformers puts it into every Qwen2 tokenizer it loads)
    pieces = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                   r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special, show_progress=False)
    # the merges see what the phrases leave
    phrase = re.compile("|".join(map(re.escape, sorted(phrases, key=len, reverse=True))))
    bpe.train_from_iterator((piece for text in texts for piece in phrase.split(text)), trainer)
    bpe.add_special_tokens(special)
    bpe.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHATML, clean_up_tokenization_spaces=False)


def read_talks(path):
    """The messages of each row of a jsonl file."""
    talks = []
    for number, row in enumerate(evaluate.read_jsonl(path), 1):
        talk = row.get("messages") if isinstance(row, dict) else None
        if not isinstance(talk, list) or not talk or not evaluate.is_talk(talk):
            raise ValueError(f"{path}, record {number}: no messages by turns, each with a "
                             f"role and a content, but {str(row)[:60]}")
        talks.append(talk)
    if not talks:
        raise ValueError(f"{path} holds no messages; `tiny.py drills` writes some")
    return talks


def make_tiny(corpus, out, seed, width=192, vocabulary=2048, phrases=PHRASES):
    """Write a random Qwen2 of 4 layers and a tokenizer made from jsonl files of messages."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    talks = [talk for path in corpus for talk in read_talks(path)]
    texts = [message["content"] for talk in talks for message in talk]
    tokenizer = make_tokenizer(texts, vocabulary, phrases)
    torch.manual_seed(seed)
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=4,
        intermediate_size=width * 8 // 3 // 64 * 64, num_attention_heads=width // 32,
        num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=False,  # tied weights go stale in vLLM's CPU build
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    rows = []
    for talk in talks[:3000]:
        asks = talk[-1]["role"] == "user"
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=asks)
        rows.append(tokenizer.encode(text if asks else text.removesuffix("\n")))
    with torch.no_grad():
        embed_classes(lm, rows)
        wire_induction(lm)
    lm.save_pretrained(out)
    tokenizer.save_pretrained(out)
    count = sum(weight.numel() for weight in lm.parameters())
    print(f"{out}: {count / 1e6:.1f}M random parameters, {len(tokenizer)} tokens")


def heads_of_32(text):
    width = COUNT(text)
    if width % 64:
        raise argparse.ArgumentTypeError(f"{text} must be a multiple of 64, two heads of 32")
    return width


def model(args):
    evaluate.hold(args.out)
    phrases = read_phrases(args.phrases) if args.phrases else PHRASES
    make_tiny(args.corpus, args.out, args.seed, args.width, phrases=phrases)


# ---------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(run, words):
        p = commands.add_parser(run.__name__, help=words, description=words, formatter_class=Help)
        p.set_defaults(run=run)
        p.add_argument("--seed", type=int, default=0, help="the same seed gives the same files")
        p.add_argument("--out", required=True, help="file or folder that is written")
        return p.add_argument

    add = command(world, "write the tables of a small world, or of many")
    add("--worlds", type=COUNT, help="that many worlds, each in a folder world-*, without the "
        "cities of the one that ships; unset: one world, in --out itself")
    add = command(drills, "write exercises or episodes from other worlds")
    add("--n", type=COUNT, default=4000, help="number of exercises, or of episodes")
    add("--worlds", type=COUNT, default=8, help="number of worlds that share them")
    add("--episodes", action="store_true", help="write whole episodes of the solver")
    add("--careful", type=SHARE, default=0.0,
        help="share of them in which the rows of lists are weighed one by one")
    add("--workers", type=COUNT, default=os.cpu_count(), help="processes; all give the same file")
    add = command(model, "write a random Qwen2 of 2M parameters and its tokenizer")
    add("--corpus", nargs="+", required=True, metavar="JSONL",
        help="files of messages to make the tokenizer of")
    add("--width", type=heads_of_32, default=192,
        help="hidden size, in heads of 32; 192: 2M parameters")
    add("--phrases", metavar="FILE", help="what is a token each, beside single digits; unset: the "
        "travel world's phrases and pairs of digits")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    evaluate.run("tiny.py", args.run, args)


if __name__ == "__main__":
    main()
