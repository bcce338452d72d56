"""
Count the mistakes of a tiny model in copying and in comparing rows. The checks of the judge say
which constraint a plan breaks; this says by which mistake.

    python bench/slips.py --database database/mini --runs sft=out/tiny/eval/sft rl=out/tiny/eval/rl
"""
import argparse
import itertools
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from evaluate import named_paths, read_episodes  # noqa: E402
from runtime import Help  # noqa: E402
from sandbox import open_database  # noqa: E402
from tiny.drills import weigh_hotels, weigh_meals  # noqa: E402
from travel.constraints import read_trip  # noqa: E402

KINDS = {"breakfast": "restaurant", "lunch": "restaurant", "dinner": "restaurant",
         "attraction": "attraction", "accommodation": "hotel"}
LISTS = {"hotel": "Accommodation", "restaurant": "Restaurant"}
VERDICT = re.compile(r" (?:ok|no|done)(?=,| &|$)")


def slips_of_plan(task, plan, database):
    """Yield a plan's mistakes that contradict the database."""
    trip = read_trip(task, plan, database, False)
    if isinstance(trip, str):
        yield "no plan"
        return
    eaten = Counter(meal.text for day in trip.days for meal in day.meals)
    if eaten and max(eaten.values()) > 1:
        yield "a restaurant twice"
    for day in trip.days:
        for venue in day.venues:
            if not venue.rows:
                known = getattr(database, KINDS[venue.field] + "_cities")
                yield f"no such {KINDS[venue.field]}" if venue.city in known else "not in that city"
        ride, date = day.ride, task["date"][min(day.number, task["days"]) - 1]
        if not ride:
            continue
        if ride.route[0] == ride.route[1]:
            yield "a ride from a city to itself"
        elif ride.flight is None and ride.mode == "flight":
            yield "no such flight"
        elif ride.flight and "goes from" in ride.fault:
            yield "a flight of another list"
        elif ride.flight and ride.flight.date != date:
            yield "a flight of another day"
        elif ride.fault:
            yield "a road that does not exist"


def slips_of_thought(row, database):
    """Yield for each list whether the thought after it compares its rows, the first mistake in that
    thought, and whether the plan uses other rows than those chosen there."""
    task = row["task"]
    lists = [("hotel", weigh_hotels(task, database.hotels(task["dest"]))[0]),
             ("restaurant", weigh_meals(task, database.restaurants(task["dest"]))[0])]
    for shown, said in itertools.pairwise(row["messages"]):
        for table, right in lists:
            if f"A Search{LISTS[table]} for" not in shown["content"]:
                continue
            thought = said["content"].removeprefix("<think>").split("</think>")[0].split("\n")
            if not thought[0].startswith("wanted: "):
                yield f"takes a {table} unweighed"
                continue
            yield f"weighs {table}s"
            taken = [line for line in thought if line.partition(": ")[0].lower() in KINDS]
            if row["answer"] and not {*taken} <= {*row["answer"].split("\n")}:
                yield f"{table}s weighed: others planned"
            if table == "restaurant":  # once the wishes are met, any restaurant is right
                right = right[:max(i for i, line in enumerate(right) if "wanted" in line) + 1]
            for line, true in zip(thought, right, strict=False):
                if line != true:
                    part = "wishes" if true.startswith("wanted: ") else "taken"
                    part = "row" if true[0].isdigit() else part
                    quoted = VERDICT.sub("", line) == VERDICT.sub("", true)
                    how = "misjudged" if quoted else "misquoted"
                    if line.split(" ")[0] != true.split(" ")[0]:  # the right line is missing
                        how = "left out"
                    yield f"{table}s weighed: {part} {how}"
                    break


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    p.add_argument("--database", required=True, help="folder of the tables")
    p.add_argument("--runs", nargs="+", required=True, metavar="NAME=FOLDER",
                   help="folders of evaluations, with episodes.jsonl")
    args = p.parse_args()
    database, found = open_database(args.database), {}
    for name, folder in named_paths(args.runs).items():
        plays = read_episodes(Path(folder) / "episodes.jsonl").values()
        counts = Counter()
        for row in plays:
            of = database.of(row["task"])
            counts.update({*slips_of_plan(row["task"], row["plan"], of),
                           *slips_of_thought(row, of)})
        found[name] = {}
        for slip, count in counts.items():
            table, weighed, _ = slip.partition(" weighed: ")
            found[name][slip] = 100 * count / (counts[f"weighs {table}"] if weighed else len(plays))
    print("| plays with |", " | ".join(found), "|\n| --- |", " --- |" * len(found))
    for slip in sorted(set().union(*found.values())):
        print(f"| {slip} |", " | ".join(f"{each.get(slip, 0):.1f}" for each in found.values()), "|")


if __name__ == "__main__":
    main()
