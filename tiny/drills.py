"""
Training data for a tiny model that is not pre-trained: exercises in copying and comparing rows, and
whole episodes of the solver.
"""
import argparse
import itertools
import random
import re
import tempfile
from functools import partial
from pathlib import Path

import runtime
import sandbox
import synth
from format_plan import MEALS
from runtime import Mistake
from sandbox import Sandbox, observation_message, open_database
from tiny.worlds import HOME, MONTHS, write_world
from travel import solver, teacher
from travel.constraints import ROOM_TYPES
from travel.solver import SEARCHES
from travel.world import LEVELS


def drills(args):
    """Write exercises or episodes from many worlds, since in a single one a model would memorise
    the names. None of their cities is in database/mini."""
    runtime.lock_file(args.out)
    if Path(args.out).exists():
        raise Mistake(f"{args.out} exists: choose another --out, or remove it")
    with runtime.workers(args.workers) as pool:
        parts = pool.map(partial(world_rows, args), range(args.worlds))
        parts = list(runtime.progress(parts, args.out, args.worlds, unit="world"))
    rows = [row for part in parts for row in part]
    random.Random(args.seed).shuffle(rows)
    runtime.write_jsonl(args.out, rows)
    print(f"{args.out}: {len(rows)} rows from {args.worlds} worlds")


def world_rows(args, number):
    """A world's share of the rows. The worlds are in different months, because in one month a model
    could not learn from which days on no trip can start."""
    dates, n = MONTHS[number % 12], synth.portions(args.n, [1] * args.worlds)[number]
    with tempfile.TemporaryDirectory() as folder:
        write_world(folder, f"{args.seed}.{number}", dates, HOME)
        if args.episodes:
            rows = world_episodes(args, number, folder, dates)
        else:
            rng, database = random.Random(f"drills/{args.seed}/{number}"), open_database(folder)
            rows = (make_drill(rng, database, dates, args.careful, args.tours)
                    for _ in itertools.count())
        return list(itertools.islice(rows, n))


def world_episodes(args, number, folder, dates):
    """Yield successful episodes of the solver. A share of them is by a careful teacher, which
    compares the rows of a list before it chooses one; the others are by a hasty one, which gives no
    reasons."""
    settings = argparse.Namespace(
        seed=f"{args.seed}.{number}", prefix=f"world-{number}", database=folder, like="tiny",
        days=[5 if args.tours else 3], dead_ends=[], dates=dates, split="train",
        system_prompt="short", failure_rate=0.0, max_turns=60)
    rng, database = random.Random(f"episodes/{settings.seed}"), synth.open_once(folder)
    careful = rng.random() < args.careful
    for index in itertools.count():
        task = synth.make_task(settings, index)
        if task is None:
            continue
        guide = teacher.Teacher(rng, task, database)
        if args.tours:
            steps, journey = tour(guide)
        else:
            journey = in_order(guide.good_draft(), database)
            steps = solver.searches(task, journey)
        if journey is None:
            continue
        style = "hasty"
        if careful:
            steps, journey = weighed(steps, task, database, journey)
            style = "careful"
        row = synth.play_out(settings, task, database, steps, "the plan", journey, style, numbered)
        if "refused" not in row:  # else the same kind of teacher plays the next task instead
            yield row
            careful = rng.random() < args.careful


def numbered(answer, shown):
    """An answer with the number of its row before each name that the tools showed.

    A tiny model easily learns to choose numbers without repetition and to copy the name after each
    number. It does not learn to choose names in this way.
    """
    rows = {name: number for number, name in re.findall(r"(?m)^(\d+)\. (\[[^]\n]+\])", shown)}

    def number(line):
        label, name = line.groups()
        return f"{label}: {rows[name]}. {name}" if name in rows else line[0]

    return re.sub(r"(?m)^(\w+|Flight from [^[\n]+?):? (\[[^]\n]+\])$", number, answer)


def tour(guide):
    """(searches, Journey) of a traveller who looks for a hotel in the state's cities in the order
    of SearchCity, turns back from those in which none fits, and spends two nights in each of the
    first two others; ([], None) if such a trip lacks hotels, rides or meals.

    A thought begins with the words before the city's name in the list, where a tiny model finds it.
    """
    task, database, looks, beds, before = guide.task, guide.database, [], {}, "cities:\n"
    for city in solver.stop_cities(task, database):
        if len(beds) < 2:
            looks.append(solver.Search(before + city, SEARCHES["hotels"], {"city": city}))
            before = f"after {city}, "
            _, name = weigh_hotels(task, database.hotels(city))
            if name:
                beds[city] = named(task, database, city)[name]
    route, nights = list(beds), [2, 2]
    if len(route) < 2 or not (meals := guide.draft_meals(route, nights, 0.5)):
        return [], None
    rides = [solver.ways(task, database, guide.mode, *leg)
             for leg in solver.legs(task, route, nights)]
    if not all(rides):
        return [], None
    rides = [next((way for way in ways if way.flight), ways[0]) for ways in rides]
    sights = [list(solver.places(database, "attractions", city))[:1] for city in route]
    stays = list(map(solver.Stay, route, nights, beds.values(), meals, sights))
    journey = in_order(solver.Journey(guide.mode, route, stays, rides), database)
    first, ride, *others = solver.searches(task, journey)
    way = ", ".join([task["org"], *route, task["org"]])
    ride = ride._replace(thought=f"route: {way}\n{ride.thought}")
    others = [step for step in others if step.tool != SEARCHES["hotels"]]
    return [first, *looks, ride, *others], journey


def named(task, database, city):
    """{name: Lodging} of the hotels of a city that satisfy the task's wishes."""
    return {bed.name: bed for bed in solver.lodgings(task, database, city)}


def in_order(journey, database):
    """The journey with only three of the meals in each city, in the order of the database's list.
    """
    stays = []
    for stay in journey.stays:
        order = list(solver.places(database, "restaurants", stay.city))
        meals = sorted(stay.meals[:3], key=lambda meal: order.index(meal.name))
        stays.append(stay._replace(meals=meals))
    return journey._replace(stays=stays)


def weighed(steps, task, database, journey):
    """(a careful teacher's searches, the journey with the hotel and the meals that it chooses). Its
    thought after a list of hotels or restaurants goes through the rows until a wish is decided."""
    stays, notes, found = {stay.city: stay for stay in journey.stays}, [], []
    state = dict.fromkeys(solver.cuisines(task), "ok")
    for step in steps:
        found.append(step._replace(thought="\n".join([*notes, step.thought])))
        city, notes = step.arguments.get("city"), []
        stay = stays.get(city)
        if step.tool == SEARCHES["hotels"]:
            notes, bed = weigh_hotels(task, database.hotels(city))
            if stay:
                stays[city] = stay._replace(bed=named(task, database, city)[bed])
        elif step.tool == SEARCHES["restaurants"]:
            notes, names = weigh_meals(task, database.restaurants(city), stay.meals, state)
            menu = {meal.name: meal for meal in solver.menu(database, city, solver.cuisines(task))}
            stays[city] = stay._replace(meals=[menu[name] for name in names])
    return found, journey._replace(stays=list(stays.values()))


def weigh_hotels(task, rows):
    """(the lines that compare the hotels of a list, the name of the first that fits or None).

    The first line says what is wanted, in the words of the rows. Then each line quotes the relevant
    parts of a row, each followed by "ok" or "no", up to the first "no".
    """
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
                       row.minimum_nights <= 2))
        lines.append("")
        for quote, fits in points:
            lines[-1] += f"{quote} {'ok' if fits else 'no'}"
            if not fits:
                break
        else:
            return [*lines, f"Accommodation: {number}. [{row.name}]"], row.name
    return lines, None


def weigh_meals(task, rows, meals=(), state=None):
    """(the lines that compare the restaurants of a list, the names chosen for a day's meals).
    state: {wanted cuisine: "ok", or "done" once it is served}, which is updated.

    The lines end when all wanted cuisines are served. The names are first restaurants that serve
    one, then those of `meals`, then any.
    """
    state, taken = state or dict.fromkeys(solver.cuisines(task), "ok"), []
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


def make_drill(rng, database, dates, careful=0.0, tours=False):
    """A random exercise, as messages.

    Most are in copying: the next search for a query's way out or back by air or by road, flights
    out and back, or a day from the lists of a city. careful: the share of exercises in comparing
    the rows of a list with a query's wishes. tours: a third is in the next search of a tour.
    """
    if tours and rng.random() < 1 / 3:
        return exchange(*drill_tour(rng, database, dates, careful))
    kind = rng.choices(("air", "road", "flights", "lists"), (2, 1, 2, 6))[0]
    if careful and rng.random() < careful:
        kind = rng.choices(("wishes", "rooms", "rules", "meals"), (8, 8, 4, 6))[0]
    ends = None  # [(from, to, date)] of a task that suits the exercise: out and back
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
    return exchange(shown, said)


def exchange(shown, said):
    messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
    return {"messages": messages}


def is_possible(kind, task, database):
    """Whether a task has what an exercise shows: ways out and back, or wishes and a fitting row."""
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
    """A tool's result as the model sees it."""
    return observation_message(Sandbox(database).call(tool, arguments))["content"]


def drill_ways(rng, task, ends, mode, database):
    """(a query with the results so far, the next search), as texts."""
    if mode == "road" and database.flights(*ends[0]):
        task["local_constraint"]["transportation"] = "no flight"  # else the solver would fly
    steps = [step for leg in ends for step in solver.way_searches(task, mode, *leg, mode == "air")]
    done = rng.randrange(len(steps))
    query = synth.write_query(rng, task, synth.GRAMMARS["tiny"])
    seen = [see(database, step.tool, step.arguments) for step in steps[:done]]
    return "\n".join([query, *seen]), sandbox.turn(*steps[done])


def drill_tour(rng, database, dates, careful):
    """(a query with the thoughts and results so far, the next search for a hotel or ride), as
    texts."""
    steps = []
    while not steps:
        task = synth.sample_task(rng, database, 5, rng.choice(LEVELS), "tiny", dates)
        if task:
            task["budget"] = synth.close_budget(rng, task, database)
            if task["budget"]:
                steps, journey = tour(teacher.Teacher(rng, task, database))
    if rng.random() < careful:
        steps, _ = weighed(steps, task, database, journey)
    done = rng.randrange(1, len(steps) - 4)  # the last four: meals and sights of two cities
    seen = [f"{step.thought}\n{see(database, step.tool, step.arguments)}" for step in steps[:done]]
    query = synth.write_query(rng, task, synth.GRAMMARS["tiny"])
    return "\n".join([query, *seen]), sandbox.turn(*steps[done])


def drill_flights(rng, ends, database):
    """(lists of flights out and back, on random dates; a flight of each), as texts."""
    shown, said, words = [], [], ("departure", "destination", "date")
    for a, b, _ in rng.sample(ends, 2):
        ride = a, b, rng.choice(database.flight_dates(a, b))
        shown.append(see(database, "SearchFlight", dict(zip(words, ride, strict=True))))
        line = f"Flight from {a} to {b} [{rng.choice(database.flights(*ride)).number}]"
        said.append(numbered(line, shown[-1]))
    return "\n".join(shown), "\n".join(said)


def drill_lists(rng, city, database):
    """(the lists of a city; three meals and a hotel for two nights, then these again with the
    sights), as texts. The repetition teaches that an answer repeats the choices of its thoughts."""
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
    return shown, numbered("\n".join(lines), shown)


def drill_weighing(rng, task, kind, database):
    """(a query with a city's list of hotels or restaurants, the lines that compare its rows); or
    (a query, its wishes in the words of the lists). Both are texts."""
    city, query = task["dest"], synth.write_query(rng, task, synth.GRAMMARS["tiny"])
    if kind == "wishes":
        return query, "\n".join(weigh_hotels(task, [])[0] + weigh_meals(task, [])[0])
    shown = [query, see(database, SEARCHES["hotels"], {"city": city})]
    lines, _ = weigh_hotels(task, database.hotels(city))
    if kind == "meals":
        shown.append(see(database, SEARCHES["restaurants"], {"city": city}))
        lines, _ = weigh_meals(task, database.restaurants(city))
    return "\n".join(shown), "\n".join(lines)
