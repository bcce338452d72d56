"""
Small seeded tables like TravelPlanner's, with names that a tiny model can copy.
"""
import csv
import io
import itertools
import math
import random
from operator import itemgetter
from pathlib import Path

import runtime
import synth
from runtime import Mistake
from sandbox import entries
from travel.constraints import ROOM_TYPES

WORDS = Path(__file__).parent.parent / "database" / "words"
# The pools of words for names. No word is in two pools, so that a word shows what kind of place it
# names. All worlds use the same pools, so that a tiny model can copy names that it has never seen.
POOLS = {name: words.split() for name, words in entries(WORDS / "names.txt").items()}
FILLERS = ("Tea", "BBQ", "Seafood", "Cafe", "Pizza", "Bakery")
MONTHS = [synth.days_of(f"2022-{month:02d}") for month in range(1, 13)]
WINDING = 1.25  # km by road per km of straight line


def make_world(seed, dates=synth.MARCH, avoid=frozenset()):
    """The tables of a small world: {path in the database folder: text}. The same seed gives the
    same bytes. avoid: names of cities that must not be used."""
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
    """({state: [city]}, {city: (x, y) in km}): 14 states of 3 or 4 cities on a plane.

    Each noun is in the names of two cities of different states, so that training also meets the
    words of a city that is reserved for validation.
    """
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
    """The rows of hotels, of restaurants and of attractions. Within a state no two places of a kind
    have the same first word, so that a model cannot confuse the results of two searches."""
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
        rules = ()  # an incomplete row, which the sandbox drops, as in the official tables
    price = base * rng.uniform(0.5, 2.2) * (0.6 if room == "Shared room" else 1)
    nights, people = float(rng.choice((1, 1, 2, 2, 3, 3))), rng.choice((1, 2, 2, 3, 4, 6))
    return [f"{word} {rng.choice(POOLS['hotel nouns'])}", room, 10.0 * round(price / 10), nights,
            float(rng.randint(1, 5)), " & ".join(f"No {rule}" for rule in rules), people, city]


def make_roads(rng, where):
    """Rows of distance.csv. A few pairs have no row, a few an empty one, some take over a day."""
    rows = []
    for a, b in itertools.combinations(where, 2):
        fate, km = rng.random(), max(20, round(WINDING * math.dist(where[a], where[b])))
        if fate < 0.04:
            continue
        for origin, goal, length in ((a, b, km), (b, a, km + rng.randint(-3, 3))):
            known = [road_hours(length), f"{length:,} km"] if fate > 0.07 else ["", ""]
            rows.append([origin, goal, "", *known])
    rng.shuffle(rows)
    # as in the official table, a pair is repeated, and its first row counts
    twice = next(row for row in rows if row[3] and "day" not in row[3])
    return rows + [[*twice[:3], "9 mins", "9 km"]]


def road_hours(km):
    """The duration of a drive at 90 km/h, in the words of the official table."""
    hours, minutes = divmod(round(km / 90 * 60), 60)
    if hours >= 24:
        return f"{hours // 24} day {hours % 24} hours"
    return f"{hours} hours {minutes} mins" if hours else f"{minutes} mins"


def make_flights(rng, states, where, dates):
    """Rows of the flights table, in the order of their numbers. A city has flights to all cities of
    another state on every second date, with gaps, so that a trip of 3, 5 or 7 days can fly out and
    back. The numbers of flights in one list differ in their first two digits."""
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
    """[(city, city, parity of the dates)] of the flights. Most pairs are too far apart to drive."""
    links, degree = {}, dict.fromkeys(where, 0)
    for city in rng.sample(list(where), 33):
        far, least = [], 2160 if len(links) % 9 else 600  # km by road
        for state, cities in states.items():
            nearest = min(math.dist(where[city], where[other]) for other in cities)
            if city not in cities and WINDING * nearest > least:
                far.append((state, max(degree[other] for other in cities)))
        if not far:
            continue
        # among the states far enough away, choose one with few flights
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
        if path.exists() and path.read_bytes() != text.encode():
            raise Mistake(f"{path} belongs to another database: choose another --out, or "
                          "remove it")
        runtime.write_text(path, text)


def world(args):
    runtime.lock_folder(args.out)
    if not args.worlds:
        write_world(args.out, args.seed)
    for number in range(args.worlds or 0):
        folder = Path(args.out) / f"world-{number:02d}"
        write_world(folder, f"{args.seed}.{number}", avoid=HOME)
    print(f"{args.out}: {args.worlds or 1} worlds. Next: python synth.py tasks --database "
          f"{args.out} --out FILE")
