"""
The world an agent sees: the turn protocol and the TravelPlanner tools, and the tables behind them.

    (1) parse reads a reply: one <think>...</think>, then one <tool_call>{"name": ..., "arguments":
        ...}</tool_call> or one closed <answer>...</answer>; anything else is an error
    (2) Episode.step plays a turn, from a reply to an observation, until `stop` says why it ended:
        answer (given), format (the protocol was broken), turns (limit), context (the player ran out
        of tokens)
    (3) Sandbox.call answers a tool call, and phrases observations exactly as the benchmark's tools
    (4) Database holds the small tables in memory, and asks an index for flights, of which there are
        millions: an SQLite file, built once for all processes, and again when the CSV changes

Tools and observations are those of the benchmark [1]. The system prompt is ours: see README.md,
"Where this departs from the paper".
[1] TravelPlanner, arXiv:2402.01622

Reads   the tables of database/README.md, flat or with one folder per table
Writes  flights.index beside them, or in ~/.cache/star where that folder is not writable

    python sandbox.py check DIR     which tables are there, what is missing or different

For another world, give Episode a system prompt and an object with .call(name, arguments) -> str.
It must not raise, whatever a model asks for, and arpo.py must be able to copy it with copy.copy.
"""
import argparse
import contextlib
import copy
import csv
import fcntl
import hashlib
import itertools
import json
import os
import random
import re
import sqlite3
import sys
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

# ---------------------------------------------------------------- protocol

PROMPTS = Path(__file__).parent / "database" / "prompts"  # texts that models are given

def read_prompt(name="full"):
    """The text of --system-prompt: full (system.txt), short (tiny.txt, for tiny/), or a file."""
    known = {"full": PROMPTS / "system.txt", "short": PROMPTS / "tiny.txt"}
    return known.get(name, Path(name)).read_text(encoding="utf-8")


def entries(path):
    """Read a file of lines "name: text" -> {name: text}; an indented line continues the last."""
    lines = re.sub(r"\n +", " ", path.read_text(encoding="utf-8").strip()).split("\n")
    return dict(line.split(":", 1) for line in lines)


def fill(rng, forms, values):
    """Draw one of the alternatives that slashes separate, and fill in its {slots}."""
    form = rng.choice(re.split(r"\s/(?=\s)", forms))
    return " ".join(form.split()).format(**values)


def join_words(words):
    """["a", "b", "c"] -> "a, b and c"."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


class Action(NamedTuple):
    """What a reply asks for. kind "call": name, arguments; "answer": text; "error": why."""
    kind: str
    name: str = ""
    arguments: object = {}
    text: str = ""
    why: str = ""


def parse(reply, load=json.loads):
    """Read a reply by the turn protocol -> Action. It never raises, and takes linear time."""
    if not isinstance(reply, str):
        return Action("error", why="the reply is not a text")
    counts = {tag: (reply.count(f"<{tag}>"), reply.count(f"</{tag}>"))
              for tag in ("think", "tool_call", "answer")}
    if counts.pop("think") != (1, 1):
        return Action("error", why="a reply has exactly one <think>...</think>")
    if sorted(counts.values()) != [(0, 0), (1, 1)]:
        why = "after the thought comes exactly one closed <tool_call> or one closed <answer>"
        return Action("error", why=why)
    tag = "answer" if counts["answer"] == (1, 1) else "tool_call"
    thought, rest = map(str.strip, reply.split("</think>"))
    if not (thought.startswith("<think>") and rest.startswith(f"<{tag}>")
            and rest.endswith(f"</{tag}>")):
        return Action("error", why="nothing may stand beside <think>...</think> and "
                                   f"<{tag}>...</{tag}>, in this order")
    text = rest[len(tag) + 2:-len(tag) - 3].strip()
    return Action("answer", text=text) if tag == "answer" else parse_call(text, load)


def parse_call(text, load):
    """The Action of a tool call's JSON."""
    try:
        call = load(text)
        if "\\u" in text:  # half a surrogate pair can be neither tokenized nor written to a file
            json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return Action("error", why=f"the tool call is no valid JSON ({error})")
    if isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call:
        return Action("call", name=call["name"], arguments=call["arguments"])
    return Action("error", why='a tool call is a JSON object {"name": "...", "arguments": {...}}')


def mended(reply):
    """A reply with an empty thought and only what the authors' evaluation reads in it: its first
    closed <tool_call>, or else all after its first <answer>. The reply itself if it has neither."""
    call, closed, _ = reply.partition("<tool_call>")[2].partition("</tool_call>")
    if closed:
        return f"<think></think><tool_call>{call}</tool_call>"
    _, begun, answer = reply.partition("<answer>")
    answer = answer.rpartition("</answer>")[0] or answer
    return f"<think></think><answer>{answer}</answer>" if begun else reply


def turn(thought, tool, arguments):
    """A reply that calls a tool."""
    call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<think>{thought}</think>\n<tool_call>{call}</tool_call>"


def final_turn(thought, answer):
    """A reply that answers."""
    return f"<think>{thought}</think>\n<answer>\n{answer}\n</answer>"


class Episode:
    """One play of a task.

    max_turns: how many replies get an observation; one more reply may answer. system_prompt: by
    default database/prompts/system.txt. strict: whether a reply that breaks the protocol ends the
    episode; if not, its call or answer counts all the same (see mended), and without any its
    observation tells the agent what was wrong. parse: reply -> Action.
    """

    # numbers of tokens, set by the player: in the episode, before the last reply
    tokens = prompt_tokens = 0
    rewritten = None  # set by a world whose helpers change earlier messages (toolstar/)

    def __init__(self, task, sandbox, max_turns=60, system_prompt=None, strict=True,
                 parse=parse):
        self.task, self.sandbox, self.max_turns = task, sandbox, max_turns
        self.strict, self.parse = strict, parse
        self.messages = [{"role": "system", "content": system_prompt or read_prompt()},
                         {"role": "user", "content": task["query"]}]
        # stop: "", "answer", "format", "turns", "context"; in evaluation also "length" (the limit
        # of a reply's tokens cut it) and "refused" (by an endpoint); "done" by adapters/plain.py
        self.answer, self.stop = None, ""
        self.calls = self.turns = self.errors = 0  # errors: replies that break the protocol

    def step(self, reply):
        """Play one reply -> the observation, or None if the episode has ended."""
        action = self.begin(reply)
        return None if action is None else self.finish(self.act(action))

    def begin(self, reply):
        """Take a reply -> the Action that needs an observation, or None if the episode has ended.
        """
        if self.stop:
            return None
        self.messages.append({"role": "assistant", "content": reply})
        self.turns += 1
        action = self.parse(reply)
        if action.kind == "error":
            self.errors += 1
            action = action if self.strict else self.parse(mended(reply))
        tools = getattr(self.sandbox, "tools", (action.name,))
        known = action.kind != "call" or action.name in tools
        if action.kind == "answer":
            self.answer, self.stop = action.text, "answer"
        elif self.strict and (action.kind == "error" or not known):
            self.stop = "format"
        elif self.turns > self.max_turns:
            self.stop = "turns"  # this reply had to answer
        if self.stop:
            return None
        self.calls += action.kind == "call" and known
        return action

    def act(self, action):
        """The observation of an action. It may run in a thread, so it changes nothing here."""
        if action.kind == "error":
            return (f"Error: {action.why}. "
                    "Reply with one thought, then one tool call or the answer.")
        return self.sandbox.call(action.name, action.arguments)

    def finish(self, observation):
        """Append an observation to the messages."""
        self.messages.append(observation_message(observation))
        return observation

    def fork(self, seed):
        """An independent copy, whose world draws its random events from another seed."""
        twin = copy.copy(self)
        twin.sandbox, twin.messages = copy.copy(self.sandbox), list(self.messages)
        twin.sandbox.seed = seed
        return twin

    def record(self, model=""):
        """The episode as a line of jsonl."""
        return {"task": self.task, "model": model, "messages": self.messages,
                "answer": self.answer, "stop": self.stop, "calls": self.calls,
                "turns": self.turns, "errors": self.errors,
                "failures": getattr(self.sandbox, "failures", 0)}


def observation_message(observation):
    """The user turn that carries an observation."""
    return {"role": "user", "content": f"<tool_response>\n{observation}</tool_response>"}


# ---------------------------------------------------------------- tools

ARGUMENTS = {  # {tool: required arguments}. Models read the schemas in database/prompts/system.txt
    "SearchCity": ("state",),
    "SearchFlight": ("departure", "destination", "date"),
    "GoogleDistanceMatrix": ("departure", "destination"),  # and mode, which defaults to driving
    "SearchRestaurant": ("city",),
    "SearchAttraction": ("city",),
    "SearchAccommodation": ("city",),
}
REQUIRED = {  # what the error message asks for; "city" for all other tools
    "SearchFlight": "departure, destination and date",
    "GoogleDistanceMatrix": "departure, destination and mode",
    "SearchCity": "state"}
LISTS = {  # {tool: (table, word for a row, word before the city, form of a row)}
    "SearchAccommodation": (
        "hotels", "accommodation", "",
        "%s. [%s] $%s. Room Type: %s, House Rules: %s, Minimum Nights: %s, "
        "Maximum Occupancy: %s, Review Rate Number: %s"),
    "SearchRestaurant": (
        "restaurants", "restaurant", "city ", "%s. [%s] Avg. Cost $%s. Cuisines: %s. Rating: %s"),
    "SearchAttraction": (
        "attractions", "attraction", "city ", "%s. [%s](%s) Address: %s. Contact: %s"),
}
FLIGHT = ("%s. [%s] $%s. Departure: %s, Arrival: %s, Actual Elapsed Time: %s, "
          "Distance: %s miles")
NOTHING = "There is no %s. Please rethink your %s search and try again."


def list_rows(template, rows):
    """Rows as the tools print them: each ends with a newline, with an empty line in between."""
    width = template.count("%s") - 1  # the key is not printed
    return "\n".join([template % (i, *row[:width]) + "\n" for i, row in enumerate(rows, 1)])


class Sandbox:
    """The six tools for one episode. failure_rate: the probability that a call fails on purpose."""

    tools = frozenset(ARGUMENTS)

    def __init__(self, database, failure_rate=0.0, seed=0):
        self.database, self.failure_rate, self.seed = database, failure_rate, seed
        self.draws = self.failures = 0

    def example(self, name):
        """Arguments of a tool, for a person who plays and for evaluate.py --check."""
        optional = {"mode": "driving"} if name == "GoogleDistanceMatrix" else {}
        return dict.fromkeys(ARGUMENTS.get(name, ()), "a") | optional

    def call(self, name, arguments):
        """The observation of a tool call. A wrong call never raises: the observation says why."""
        if not isinstance(name, str) or name not in self.tools:
            shown = name[:80] if isinstance(name, str) else type(name).__name__
            return f"Error: there is no tool {shown!r}. The tools are {', '.join(ARGUMENTS)}."
        if self.failure_rate and self._fails():
            return f"Error: Current tool {name} is not available."
        try:
            # as the reference does: use `in` and [] on whatever the model wrote, and show Python's
            # own message if that fails
            if not all(argument in arguments for argument in ARGUMENTS[name]):
                return f"Invalid parameters. Please provide {REQUIRED.get(name, 'city')}."
            values = [arguments[argument] for argument in ARGUMENTS[name]]
            if name == "GoogleDistanceMatrix":
                return self._distance(*values, arguments.get("mode", "driving"))
            if name in LISTS:
                return self._list(name, *LISTS[name], *values)
            return self._flights(*values) if name == "SearchFlight" else self._cities(*values)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            return f"Tool calling error: {error}"

    def _fails(self):
        # a new generator per draw: the state is one number, so a copied sandbox draws the same
        self.draws += 1
        failed = random.Random(f"{self.seed}/{self.draws}").random() < self.failure_rate
        self.failures += failed
        return failed

    def _list(self, name, table, word, prefix, template, city):
        rows = getattr(self.database, table)(city) if isinstance(city, str) else ()
        if not rows:
            return NOTHING % (f"{word} in {city}", word)
        return (f"A {name} for {prefix}{city} found the following {len(rows)} {word}s:\n"
                + list_rows(template, rows))

    def _flights(self, departure, destination, date):
        texts = all(isinstance(value, str) for value in (departure, destination, date))
        rows = self.database.flights(departure, destination, date) if texts else ()
        if not rows:
            return NOTHING % (f"available flight from {departure} to {destination} on {date}",
                              "flight")
        return (f"A SearchFlight for {departure} to {destination} on {date} found the following "
                f"{len(rows)} flights:\n" + list_rows(FLIGHT, rows))

    def _cities(self, state):
        cities = self.database.states.get(state)
        if cities is None:
            return NOTHING % (f"city in {state}", "city")
        return (f"A SearchCity for state {state} found the following {len(cities)} cities:\n"
                + ", ".join(cities))

    def _distance(self, departure, destination, mode):
        strings = isinstance(departure, str) and isinstance(destination, str)
        row = self.database.distance(departure, destination) if strings else None
        if row is None:
            return ("No valid information found. "
                    "Please rethink your distance search and try again.")
        if not row.duration or not row.distance:
            return f"Sorry, we cannot find the distance between {departure} and {destination}."
        cost = int(row.km * 0.05) if "driving" in mode else int(row.km)
        if "day" in row.duration:
            return ("The required time exceeds a single day, we cannot provide the cost. "
                    "Please consider an alternative transportation instead.")
        return (f"A GoogleDistanceMatrix found the following information:\n"
                f"{mode}, from {departure} to {destination}, duration: {row.duration}, "
                f"distance: {row.distance}, cost: ${cost}")


HELP = "database/README.md lists the files"
# what pandas reads as a missing value in a CSV
MISSING = frozenset((
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"))


# ---------------------------------------------------------------- tables
# A row holds the fields that the tools print, then the key it is looked up by. Prices are in
# dollars: per room and night for a hotel, per person for a restaurant and a flight.

Hotel = namedtuple("Hotel", "name price room_type house_rules minimum_nights maximum_occupancy "
                            "review city")  # house_rules like "No pets & No smoking"
Restaurant = namedtuple("Restaurant", "name cost cuisines rating city")
Attraction = namedtuple("Attraction", "name website address phone city")
Flight = namedtuple("Flight", "number price departure arrival elapsed miles "
                              "origin destination date")  # times like "15:40"
City = namedtuple("City", "city state")
Distance = namedtuple("Distance", "duration distance km origin destination")  # "", None: unknown


def road(duration, distance, origin, destination):
    """A Distance from a duration like "10 hours 55 mins" and a distance like "1,144 km"."""
    km = float(distance.removesuffix(" km").replace(",", "")) if distance else None
    return Distance(duration, distance, km, origin, destination)


class Table(NamedTuple):
    row: object  # makes a row from its fields and its key
    file: str
    subfolder: str
    columns: dict  # {column of the CSV: its type}; numbers are printed as pandas prints them
    key: tuple  # columns that rows are looked up by
    kept: int  # rows of the published file in which no value is missing; the others are dropped


TABLES = {
    "flights": Table(Flight, "clean_Flights_2022.csv", "flights", {
        "Flight Number": str, "Price": int, "DepTime": str, "ArrTime": str,
        "ActualElapsedTime": str, "Distance": float,
    }, ("OriginCityName", "DestCityName", "FlightDate"), 3827361),
    "hotels": Table(Hotel, "clean_accommodations_2022.csv", "accommodations", {
        "NAME": str, "price": float, "room type": str, "house_rules": str, "minimum nights": float,
        "maximum occupancy": int, "review rate number": float,
    }, ("city",), 4285),
    "restaurants": Table(Restaurant, "clean_restaurant_2022.csv", "restaurants", {
        "Name": str, "Average Cost": int, "Cuisines": str, "Aggregate Rating": float,
    }, ("City",), 9551),
    "attractions": Table(Attraction, "attractions.csv", "attractions", {
        "Name": str, "Website": str, "Address": str, "Phone": str,
    }, ("City",), 5302),
    "distances": Table(road, "distance.csv", "googleDistanceMatrix", {
        "duration": str, "distance": str,
    }, ("origin", "destination"), 17602),
    "cities": Table(City, "citySet_with_states.txt", "background", {},
                    ("city", "state"), 312),
}


def find_sources(folder):
    """{table: path, or None if it is missing}, for the flat layout or a folder per table."""
    found = {}
    for name, table in TABLES.items():
        places = folder / table.file, folder / table.subfolder / table.file
        found[name] = next((path for path in places if path.is_file()), None)
    return found


def read_rows(path, table):
    """Yield the rows of a CSV. ValueError with the file and the line of one that is damaged."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True, delimiter="\t" if table.row is City else ",")
        try:
            # the list of cities has no header
            head = list(table.key) if table.row is City else next(lines, [])
            wanted = table.columns | dict.fromkeys(table.key, str)
            for column in wanted:
                if column not in head:
                    raise ValueError(f"column {column!r} is missing")
            kinds = [(head.index(column), kind) for column, kind in wanted.items()]
            for fields in filter(None, lines):  # without empty lines
                if len(fields) != len(head):
                    raise ValueError(f"{len(fields)} fields for {len(head)} columns")
                if table.row is road:
                    fields = ["" if text in MISSING else text for text in fields]
                elif not MISSING.isdisjoint(fields):
                    continue
                yield table.row(*[kind(fields[i]) for i, kind in kinds])
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path}, line {lines.line_num}: {error}; download it again, {HELP}"
                             ) from None


def read_table(path, table):
    """A CSV -> {key: its rows in file order}."""
    rows = {}
    for row in read_rows(path, table):
        rows.setdefault(row[-len(table.key):], []).append(row)
    return {key: tuple(found) for key, found in rows.items()}


# ---------------------------------------------------------------- index
# An SQLite file of the flights. `routes` has each pair of cities and the line of its first flight;
# `about` says which CSV the index was made of.

def identity(path):
    """What identifies the CSV of an index: if any of it changes, the index is built again."""
    stat = path.stat()
    return json.dumps([4, path.name, stat.st_size, stat.st_mtime_ns])


def fill_index(base, path):
    """Create the tables of an index and fill them."""
    stamp = identity(path)  # taken first: if the CSV changes meanwhile, the index is out of date
    base.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
    base.execute(f"CREATE TABLE flights ({', '.join(Flight._fields)})")
    base.executemany(f"INSERT INTO flights VALUES ({', '.join('?' * len(Flight._fields))})",
                     read_rows(path, TABLES["flights"]))
    base.execute("CREATE INDEX by_route ON flights (origin, destination, date)")
    base.execute("CREATE INDEX by_number ON flights (number)")
    base.execute("CREATE TABLE routes AS SELECT origin, destination, MIN(rowid) AS line "
                 "FROM flights GROUP BY origin, destination")
    base.execute("CREATE TABLE about AS SELECT ? AS identity", (stamp,))
    base.commit()


def connect(path, source):
    """A connection to the index of a CSV; sqlite3.DatabaseError if it is something else."""
    # immutable: SQLite takes no locks and looks for no changes; a changed index is another file
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True,
                           check_same_thread=False)
    if base.execute("SELECT identity FROM about").fetchall() != [(identity(source),)]:
        raise sqlite3.DatabaseError(f"{path} was made of another file")
    return base


def open_index(folder, source):
    """(path, connection) of the index, beside the tables or in the cache. If there is none, it is
    built under a temporary name and renamed, so that other processes find the old or the new one.
    """
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    beside, cached = folder / "flights.index", Path(f"~/.cache/star/{name}.index").expanduser()
    with open(source) as lock:
        for locked in False, True:
            if locked:  # one process builds, the others wait and find its index
                with contextlib.suppress(OSError):  # a file system without locks: each builds one
                    fcntl.flock(lock, fcntl.LOCK_EX)
            for path in beside, cached:
                with contextlib.suppress(sqlite3.Error):
                    return path, connect(path, source)
        # root may write anywhere, but a folder that is read-only for all is left alone
        writable = os.access(folder, os.W_OK) and folder.stat().st_mode & 0o222
        path = beside if writable else cached
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)  # of a killed build
        try:
            with contextlib.closing(sqlite3.connect(temporary)) as base:
                fill_index(base, source)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path, connect(path, source)


# ---------------------------------------------------------------- database

class Database:
    """The tables of a folder. Unknown names find nothing; rows come in file order.

    Raises FileNotFoundError or ValueError with the file that is missing or damaged.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is not a folder; {HELP}")
        sources = find_sources(self.folder)
        missing = [TABLES[name].file for name, path in sources.items() if path is None]
        if missing:
            raise FileNotFoundError(f"{self.folder}: no {', no '.join(missing)}; {HELP}")
        self._rows = {name: read_table(sources[name], table) for name, table in TABLES.items()
                      if table.row is not Flight}
        self.index, self._base = open_index(self.folder, sources["flights"])
        self.cities = dict(list(self._rows["cities"]))  # {city: state}
        self.states = {}  # {state: [city]}
        for city, state in self._rows["cities"]:
            self.states.setdefault(state, []).append(city)
        self.hotel_cities, self.restaurant_cities, self.attraction_cities = (
            [city for city, in self._rows[name]]
            for name in ("hotels", "restaurants", "attractions"))
        routes = self._base.execute("SELECT origin, destination FROM routes ORDER BY line")
        routes = routes.fetchall()
        # cities in the order in which the flights first name them
        order = {city: i for i, city in enumerate(dict.fromkeys(itertools.chain(*routes)))}
        self._destinations = {}
        for origin, destination in sorted(routes, key=lambda ends: order[ends[1]]):
            self._destinations.setdefault(origin, []).append(destination)

    def __reduce__(self):
        """Pickle the folder's name alone: loading a checkpoint opens the database again."""
        return type(self), (self.folder,)

    def of(self, task):
        """The database that a task is about: this one, for every task."""
        return self

    @property
    def worlds(self):
        """{name: Database} that `of` chooses from."""
        return {"": self}

    def hotels(self, city):
        return self._rows["hotels"].get((city,), ())

    def restaurants(self, city):
        return self._rows["restaurants"].get((city,), ())

    def attractions(self, city):
        return self._rows["attractions"].get((city,), ())

    def distance(self, origin, destination):
        """The first row of the pair, None if there is none."""
        return next(iter(self._rows["distances"].get((origin, destination), ())), None)

    def _select(self, what, *values):
        """The rows of flights that the index answers with."""
        with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair names nothing
            return self._base.execute(f"SELECT {what}", values).fetchall()
        return []

    def flights(self, origin, destination, date):
        """All flights from one city to another on a date, in file order."""
        where = "origin = ? AND destination = ? AND date = ? ORDER BY rowid"
        rows = self._select(f"* FROM flights WHERE {where}", origin, destination, date)
        return tuple(map(Flight._make, rows))

    def flight(self, number):
        """The flight of this number, None if there is none. Published numbers are unique."""
        rows = self._select("* FROM flights WHERE number = ? ORDER BY rowid LIMIT 1", number)
        return Flight(*rows[0]) if rows else None

    def flight_dates(self, origin, destination):
        """Sorted dates with a flight from origin to destination."""
        dates = self._select("DISTINCT date FROM flights WHERE origin = ? AND destination = ? "
                             "ORDER BY date", origin, destination)
        return tuple(date for date, in dates)

    def flight_destinations(self, origin):
        """Cities with any flight from origin."""
        return self._destinations.get(origin, ())

    def counts(self):
        """{table: number of its rows}."""
        found = {name: sum(map(len, rows.values())) for name, rows in self._rows.items()}
        return found | {"flights": self._base.execute("SELECT COUNT(*) FROM flights").fetchone()[0]}


class Country:
    """Several databases, one per subfolder world-*; a task's "world" names its own."""

    def __init__(self, folder, folders):
        self.folder = folder
        self.worlds = {path.name: Database(path) for path in sorted(folders)}

    def of(self, task):
        """The database that a task names; LookupError if there is none of that name."""
        name = task.get("world")
        if isinstance(name, str) and name in self.worlds:
            return self.worlds[name]
        raise LookupError(f"'world' is {name!r:.60}, which is not a folder of "
                          f"{self.folder}; it has {min(self.worlds)} to {max(self.worlds)}")


def open_database(path=None):
    """The Database or Country at `path`, else at $STAR_DATABASE, else in database/mini."""
    default = Path(__file__).parent / "database" / "mini"
    folder = Path(path or os.environ.get("STAR_DATABASE") or default)
    folders = [each for each in folder.glob("world-*") if each.is_dir()]
    return Country(folder, folders) if folders else Database(folder)


# ---------------------------------------------------------------- main

def check(folder):
    """Print the numbers of a folder's rows beside the published ones."""
    database = Database(folder)
    counts = database.counts()
    print(f"{'table':12} {'rows':>10} {'published':>10}")
    for name, table in TABLES.items():
        note = "" if counts[name] == table.kept else "  a part of the table, or another world"
        print(f"{name:12} {counts[name]:10,} {table.kept:10,}{note}")
    print(f"index: {database.index}")


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=["check"], help="exits with status 1 if a file is missing")
    p.add_argument("folder", type=Path, help="folder of the CSVs, flat or one folder per table")
    try:
        return check(p.parse_args().folder)
    except (OSError, ValueError) as error:
        return f"sandbox.py: {error}"


if __name__ == "__main__":
    sys.exit(main())
