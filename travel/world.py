"""
The travel world of the stages (docs/environment.md): TravelPlanner's tasks, tools and verdicts.

    (1) load_task   make a task from a record, ours or a published one; errors name the key
    (2) Travel      the world: episodes with the six tools, and verdicts on plans

--env travel opens this module by name. Its flags are --database, --system-prompt,
--failure-rate, --reader and --reader-key.
"""
import json
import os
import re
from contextlib import suppress

from format_plan import CONCURRENCY, COSTS, Reader, add_reader_flags, open_reader
from runtime import SHARE, Mistake
from sandbox import Episode, Sandbox, open_database, read_prompt
from travel.constraints import (
    HOUSE_RULES,
    ROOM_TYPES,
    SCORES,
    hard_counts,
    judge,
    literal,
    need,
    reward,
)
from travel.dead_ends import count_dead_ends
from travel.solver import solver_replies

PRINTED = ("date", "days", "people_number", "budget", "visiting_city_number", "constraint",
           "local_constraint")  # the keys whose values a published file holds as text
LEVELS = ("easy", "medium", "hard")
WISHES = {"house rule": HOUSE_RULES, "room type": (*ROOM_TYPES, "not shared room"),
          "transportation": ("no flight", "no self-driving")}
DATE = re.compile(r"\d{4}-\d\d-\d\d")
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")  # 1,920
LARGEST = 10**9  # of people and dollars; the solver's arithmetic ends at 10**16
NO_WISH = ("", "None", "none", "null", "nan", "NaN")  # how files write that there is no wish


def flags(parser):
    """The world's own flags, in addition to those of a stage."""
    add = parser.add_argument
    add("--database", default=os.environ.get("STAR_DATABASE"), metavar="FOLDER",
        help="folder of the tables, or of several databases world-*; the small one that ships with "
        "the repository if neither this nor $STAR_DATABASE is set")
    add("--system-prompt", default="full", metavar="NAME",
        help="full, short, or a file; evaluate a checkpoint with the prompt of its training")
    add("--failure-rate", type=SHARE, default=0.0,
        help="probability that a tool call is made to fail [STAR, sec. 4]")
    add_reader_flags(parser)


def open_world(args):
    """The world of a stage's flags."""
    try:
        read_prompt(args.system_prompt)
        database = open_database(args.database)
    except FileNotFoundError as error:
        raise Mistake(error) from None
    return Travel(database, getattr(args, "split", None) == "test", open_reader(args))


# ------------------------------------------------------------------------------------------ tasks

def load_task(row):
    """A task from a record of TravelPlanner, of STAR or of ours. A Mistake names the key."""
    task = {key: printed(value) if key in PRINTED else value for key, value in row.items()
            if key not in ("reference_information", "annotated_plan")}
    asked = wish_in(task.pop("constraint", None) or task.get("local_constraint")) or {}
    if not isinstance(asked, dict):
        raise Mistake(f"'local_constraint' must be a table of constraints, not {asked!r:.60}")
    wish = {key: wish_in(asked.get(key)) for key in (
        "house rule", "cuisine", "room type", "transportation")}
    wish["house rule"] = wish["house rule"] or wish_in(asked.get("room rule"))
    if isinstance(wish["cuisine"], (str, list)):  # also as text: Chinese, ['Chinese' 'French']
        names = map(wish_in, re.split(r"""[][,;'"]""", str(wish["cuisine"])))
        wish["cuisine"] = [name.strip() for name in names if name] or None
    task["local_constraint"] = wish
    task.setdefault("id", str(task.get("idx", "?")))
    task.setdefault("level", "easy")
    for key, right, demand in demands(task):
        if not right:
            raise Mistake(f"{key!r} is {(task | wish)[key]!r:.60}; it must be {demand}")
    return task


def printed(value):
    """The value that a file holds as JSON, as a Python literal or as a number like 1,920."""
    if isinstance(value, str):
        value = value.replace(",", "") if THOUSANDS.fullmatch(value) else value
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return literal(value)


def wish_in(value):
    """A wish of a task; None where none is stated, such as "None" or NaN."""
    return None if value != value or str(value).strip() in NO_WISH else value


def demands(task):
    """Yield (key, whether its value is right, what it must be), without which no plan can solve a
    task or be judged."""
    for key in "org", "dest", "query", "level":
        yield key, isinstance(need(task, key), str), "a text"
    yield "id", isinstance(task["id"], (str, int)), "a text or a number"
    for key in "days", "people_number":
        right = type(need(task, key)) is int and 0 < task[key] <= LARGEST
        yield key, right, f"a whole number from 1 to {LARGEST:,}"
    days, budget, date = task["days"], need(task, "budget"), need(task, "date")
    right = type(budget) in (int, float) and 0 < budget <= LARGEST
    yield "budget", right, f"a number of dollars above 0, at most {LARGEST:,}"
    cities = task.setdefault("visiting_city_number", days // 2)  # in 3, 5, 7 days 1, 2, 3 cities
    right = type(cities) is int and 0 < cities < max(2, days)
    yield "visiting_city_number", right, f"a whole number from 1 to {max(1, days - 1)}"
    right = isinstance(date, list) and len(date) == days and all(
        isinstance(day, str) and DATE.fullmatch(day) for day in date)
    yield "date", right and date == sorted(set(date)), f"{days} days in order, like 2022-03-01"
    wish = task["local_constraint"]
    for key, known in WISHES.items():
        yield key, wish[key] is None or wish[key] in known, f"null or one of {', '.join(known)}"
    right = wish["cuisine"] is None or isinstance(wish["cuisine"], list) and all(
        any(map(str.isalpha, name)) for name in wish["cuisine"])
    yield "cuisine", right, "null or a list of names"


# ------------------------------------------------------------------------------------------ world

class Travel:
    """The travel world. test_split: its tasks are of the published test split, which has only
    level, days and query, so they can be played for the leaderboard but not judged here."""

    rewards = ("sum", "macro", "success")  # dense to sparse; three make a curriculum
    logged = SCORES  # names of the score's numbers whose means are logged; "success" is one of them
    stops = ()  # strings that end a reply, in addition to the end token
    slow = False  # whether tools are called in threads

    def __init__(self, database, test_split=False, reader=None):
        self.database, self.test_split, self.reader = database, test_split, reader or Reader()
        self.logged = SCORES + COSTS * bool(self.reader.endpoint)
        self.judges = CONCURRENCY * bool(self.reader.endpoint)  # threads for verdicts; 0: none

    def load_task(self, row):
        """A task with an "id" from a row of a file; a Mistake names the key."""
        if self.test_split and "days" in row and "org" not in row:
            kept = {key: row[key] for key in ("idx", "level", "days", "query") if key in row}
            return {"id": str(row.get("id", row.get("idx")))} | kept
        task = load_task(row)
        try:
            database = self.database.of(task)
        except LookupError as error:  # the task is about none of our databases
            raise Mistake(error.args[0]) from None
        goals = database.states if task["days"] > 3 else database.cities
        for key, places in ("org", database.cities), ("dest", goals):
            if task[key] not in places:
                kind = "state" if places is database.states else "city"
                raise Mistake(f"{key!r} is {task[key]!r:.60}, which is no {kind} of "
                              f"{database.folder}: --database names the folder of the tables")
        return task

    def episode(self, task, seed, args):
        """A new Episode. seed: of the world's own random events."""
        sandbox = Sandbox(self.database.of(task), args.failure_rate, seed)
        return Episode(task, sandbox, args.max_turns, read_prompt(args.system_prompt))

    def verdict(self, episode):
        """(plan, score, strict success) of an episode; the last two are None if the task cannot be
        judged."""
        database = self.database.of(episode.task)
        if "org" not in episode.task:  # from the published test split
            return self.reader.read(episode.answer, episode.task, database)[0], None, None
        plan, verdict = judge(episode.task, episode.answer, database, self.reader)
        return plan, verdict, verdict.pop("strict")

    def reward(self, verdict, name):
        """The reward for a score, a float. name: one of self.rewards."""
        return reward(verdict, name)

    def close(self):
        """Nothing to close: the databases are read-only."""

    def lines(self, row):
        """The lines that this world adds to evaluate.py's table, {name: number or None}, for the
        record of a judged episode. hard_micro is of all constraints of all plans together."""
        success, level = row["score"]["success"], row["task"].get("level")
        found = {f"success, {name}": success if level == name else None for name in LEVELS}
        found |= {"success, official": row["score"].get("official"),
                  "hack gauge: star - strict": success - row["strict"],
                  "hard_micro": hard_counts(row["task"], row["score"]["checks"])}
        return found | count_dead_ends(row, self.database.of(row["task"]))

    def solver(self, task, careless=False):
        """The replies of the exact solver: its searches, then the cheapest plan."""
        if "org" not in task:
            raise Mistake("the solver cannot plan tasks of the published test split")
        return solver_replies(task, self.database.of(task), careless)

    def careless(self, task):
        """The same with mistakes in about half of the plans, which show what the checks say."""
        return self.solver(task, careless=True)
