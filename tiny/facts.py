"""
A tiny world of facts for the tools: its passages, pages and tasks, and episodes of a solver.

    (1) world     write worlds of invented places: passages to search, pages to browse, and tasks
                  of five families, each with the tools that it needs; 60 worlds to train in and one
                  that is held out
    (2) episodes  the solver plays tasks through the real tools. All that it says occurs in the
                  question or in a tool's result, so that a tiny model can copy it. In a third of
                  the tasks it answers from memory, as the teachers of real data do; the student
                  does not know these answers, and must find out in RL that it needs the tool
    (3) drills    write reading exercises, for a base model
    (4) pages     serve the pages by HTTP, to this machine only

A model cannot solve the held-out world by memory: with any seed, one fifth of all names, of all
people and of all blocks of ten numbers occur only there, also as answers, and so does one of the
five wordings of each question. The words in names are the same in all worlds.

Reads   database/words/names.txt, database/prompts/*-tiny.*; (2) tasks and a world's folder
Writes  (1) OUT/train and OUT/val, worlds for --database: corpus.jsonl, pages/*.html, tools.json;
        OUT/sft-tasks.jsonl, rl.jsonl, val.jsonl   (2) jsonl of episodes

database/tools is OUT/val of `world --seed 0`.

    python -m tiny.facts world    --out out/facts
    python -m tiny.facts episodes --database out/facts/train --tasks out/facts/sft-tasks.jsonl \\
        --out out/facts/sft.jsonl
    python -m tiny.facts drills   --out out/facts/drills.jsonl
    python -m tiny.facts pages    --database out/facts/train out/facts/val
"""
import contextlib
import json
import random
import re
from collections import Counter, namedtuple
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import runtime
from runtime import COUNT, PORT, Mistake, load_tasks, write_jsonl, write_text
from sandbox import PROMPTS, entries, final_turn, turn
from synth import portions, stable_draw
from tiny.worlds import POOLS

# {kind of sentence: its wordings}; the last wording of a question is for the held-out world only
FORMS = {name: [" ".join(form.split()) for form in re.split(r"\s/(?=\s)", forms)]
         for name, forms in entries(PROMPTS / "tools-tiny.txt").items()}
PAGE = (PROMPTS / "page-tiny.html").read_text(encoding="utf-8")
ATTRIBUTES = {"sight": ("year", "height", "visitors", "keeper"),
              "town": ("year", "people", "mayor")}
RANGES = {"year": (1100, 1999), "height": (10, 999), "visitors": (100, 9999), "people": (100, 9999)}
NAMES = {"sight": ("sight words", "nouns", "sight nouns"), "town": ("prefixes", "nouns")}
COMPUTE = {  # kind of word problem: (the program, a function of its numbers that gives the result)
    "boxes": ("{a} * {b} + {c}", lambda a, b, c, d: a * b + c),
    "prices": ("{a} * {b} + {c} * {d}", lambda a, b, c, d: a * b + c * d),
    "stock": ("{a} - {b} + {c}", lambda a, b, c, d: a - b + c),
    "rows": ("({a} + {b}) * {c}", lambda a, b, c, d: (a + b) * c),
    "rest": ("({a} - {b}) * {c}", lambda a, b, c, d: (a - b) * c)}
BOTH = {"subtract": ("{} - {}", lambda a, b: a - b), "add": ("{} + {}", lambda a, b: a + b),
        "divide": ("{} // {}", lambda a, b: a // b), "years": ("{} - {}", lambda a, b: a - b)}
BY_HEART = 0.35  # share of the tasks that need tools in which the solver answers from memory
SLIPS = ("prnt", "pint", "prit")  # misspellings of print; one in ten episodes makes one
# told: the attributes that its passage states; linked: an attribute on its page only, or None
Place = namedtuple("Place", "name facts told linked")


# ---------------------------------------------------------------- worlds

def is_held_out(thing):
    """Whether a name or a number belongs to the held-out world, as one fifth of them do.

    The ten numbers with the same leading digits belong to the same side; numbers below ten are
    never held out.
    """
    if isinstance(thing, int):
        return thing > 9 and is_held_out(f"{thing // 10}x")
    return stable_draw(f"tools {thing}") % 5 == 0


def draw_until(draw, held_out):
    """The first draw() that is held out, or the first that is not."""
    return next(thing for thing in iter(draw, None) if is_held_out(thing) == held_out)


def draw_fact(rng, attribute, held_out):
    """A value as text: a number in the attribute's range, or the name of a person."""
    if attribute in RANGES:
        return str(draw_until(lambda: rng.randint(*RANGES[attribute]), held_out))
    pools = POOLS["meal words"], POOLS["states"]  # no place's name has these words
    return draw_until(lambda: " ".join(map(rng.choice, pools)), held_out)


def draw_name(rng, names):
    """The name of a town (two words) or of a sight (three). Most names differ from another one in a
    single word, so that a careless reader confuses them. names: those drawn before."""
    kind = rng.choices(("sight", "town"), (5, 1))[0]
    words = [rng.choice(POOLS[pool]) for pool in NAMES[kind]]
    alike = [name.split() for name in names[-20:] if len(name.split()) == len(words)]
    if alike and rng.random() < 0.6:
        i, other = rng.randrange(len(words)), rng.choice(alike)
        words = [*other[:i], words[i], *other[i + 1:]]
    return " ".join(words)


def draw_places(rng, n, held_out, taken):
    """The n places of a world. taken: names to avoid, to which theirs are added. A sixth of the
    places have one attribute on their page only."""
    places, names = [], []
    while len(places) < n:
        name = draw_until(lambda: draw_name(rng, names), held_out)
        if name in taken:
            continue
        taken.add(name)
        names.append(name)
        kind = "sight" if len(name.split()) == 3 else "town"
        values = {key: draw_fact(rng, key, held_out) for key in ATTRIBUTES[kind]}
        told = rng.sample(ATTRIBUTES[kind], rng.choice((2, 2, 3)))
        linked = told.pop() if rng.random() < 1 / 6 else None
        places.append(Place(name, values, told, linked))
    return places


def state_fact(rng, place, attribute, subject="It"):
    """A sentence that states one attribute of a place."""
    form = rng.choice(FORMS[f"fact {attribute}"])
    return form.format(it=subject, value=place.facts[attribute])


def write_passage(rng, place, places, port):
    """The passage of a place: its facts, the address of its page, sometimes a neighbour."""
    first, *rest = place.told
    said = [state_fact(rng, place, key) for key in rest]
    if place.linked:
        url = f"http://127.0.0.1:{port}/{page_name(place)}"
        said.append(rng.choice(FORMS["link"]).format(url=url, attribute=place.linked))
    elif len(said) < 2 and rng.random() < 0.5:
        said.append(rng.choice(FORMS["near"]).format(other=rng.choice(places).name))
    text = " ".join([state_fact(rng, place, first, place.name), *rng.sample(said, len(said))])
    return f'"{place.name}"\n{text}'


def page_name(place):
    return place.name.replace(" ", "-") + ".html"


def page_lines(rng, place, before):
    """What the page of a place says: all its facts, and one fact of the place before it."""
    told = [state_fact(rng, place, key, place.name) for key in place.facts]
    told.append(state_fact(rng, before, rng.choice(list(before.facts)), before.name))
    welcome = rng.choice(FORMS["welcome"]).format(name=place.name)
    return [welcome, *rng.sample(told, len(told))]


def write_page(rng, place, before, after):
    """The page of a place, with links to two others."""
    links = [f'<a href="{page_name(other)}">{other.name}</a>' for other in (before, after)]
    text = "\n".join(f"<p>{line}</p>" for line in page_lines(rng, place, before))
    return PAGE.format(title=place.name, links=" ".join(links), text=text)


def write_folder(rng, folder, worlds, port):
    """Write a folder for one or more worlds: corpus, pages and tools.json."""
    passages = [write_passage(rng, place, places, port) for places in worlds for place in places]
    rng.shuffle(passages)
    write_jsonl(folder / "corpus.jsonl",
                [{"id": str(i), "contents": text} for i, text in enumerate(passages)])
    for old in (folder / "pages").glob("*.html"):
        old.unlink()  # else a page of another seed would be served, too
    linked = [place for places in worlds for place in places if place.linked]
    for i, place in enumerate(linked):
        page = write_page(rng, place, linked[i - 1], linked[(i + 1) % len(linked)])
        write_text(folder / "pages" / page_name(place), page)
    settings = {"grammar": "turns", "tools": ["Search", "Python", "Browse"],
                "corpus": "corpus.jsonl", "top_k": 2, "max_calls": 6,
                "allow": [f"127.0.0.1:{port}"]}
    write_text(folder / "tools.json", json.dumps(settings, indent=2) + "\n")


# ---------------------------------------------------------------- tasks

def word_task(rng, key, held_out, gold, asks=(), program=None, **slots):
    """A task: its question in a random wording (the last one is held out), its gold, and what the
    solver needs: asks, [[place, attribute]] to look up, and the program to run on their values."""
    number = rng.randrange(len(FORMS[key]) - (not held_out))
    return {"query": FORMS[key][number].format(**slots), "golds": [str(gold)],
            "check": "math" if str(gold).isdigit() else "qa", "template": f"{key} {number}",
            "asks": list(asks), "program": program}


def ask_compute(rng, places, held_out):
    """A word problem of two or three operations on numbers of two or three digits."""
    kind = rng.choice(list(COMPUTE))
    program, value_of = COMPUTE[kind]
    a, b, c, d = (draw_until(lambda: rng.randint(10, rng.choice((99, 999))), held_out)
                  for _ in "abcd")
    numbers = {"a": max(a, b), "b": min(a, b), "c": c, "d": d}
    gold = value_of(**numbers)
    if a == b or is_held_out(gold) != held_out:
        return None
    return word_task(rng, f"compute {kind}", held_out, gold, program=program.format(**numbers),
                     things=rng.choice(FORMS["things"]), **numbers)


def ask_fact(rng, places, held_out, linked=False):
    """A question about an attribute in a place's passage or, with linked, on its page. The two
    kinds of question look the same; only the passage shows which one it is."""
    place = rng.choice(places)
    attribute = place.linked if linked else rng.choice(place.told)
    return attribute and word_task(rng, f"lookup {attribute}", held_out, place.facts[attribute],
                                   [[place.name, attribute]], name=place.name)


def ask_both(rng, places, held_out):
    """A question about the difference, sum or (whole) ratio of an attribute of two places."""
    attribute = rng.choice(list(RANGES))
    kind = "years" if attribute == "year" else rng.choice(("subtract", "add", "divide"))
    program, value_of = BOTH[kind]
    telling = [place for place in places if attribute in place.told]
    if len(telling) < 2:
        return None
    for _ in range(1000):  # about one in 200 pairs of heights has a whole ratio
        asks = [(place, int(place.facts[attribute])) for place in rng.sample(telling, 2)]
        (first, a), (second, b) = asks
        gold = value_of(a, b)
        whole = a > b and (kind != "divide" or a % b == 0)
        if whole and (gold < 10 or is_held_out(gold) == held_out):
            return word_task(rng, f"both {kind}", held_out, gold,
                             [[place.name, attribute] for place, _ in asks], program,
                             attribute=attribute, first=first.name, second=second.name)
    return None


def ask_neither(rng, places, held_out):
    """A question that contains its answer: the larger of two numbers, a word of a name."""
    kind, name = rng.choice(("larger", "smaller", "first", "last")), rng.choice(places).name
    a, b = (draw_until(lambda: rng.randint(10, rng.choice((99, 999))), held_out) for _ in "ab")
    first, *_, last = name.split()
    gold = {"larger": max(a, b), "smaller": min(a, b), "first": first, "last": last}[kind]
    things = f"word of {name}" if kind in ("first", "last") else f"of {a} and {b}"
    task = word_task(rng, f"neither {kind}", held_out, gold, a=a, b=b, name=name)
    return a != b and task | {"reason": f"the {kind} {things} is {gold}"}


FAMILIES = {  # (percentage, tools needed, function that draws a task, or None if it fails)
    "compute": (30, ["python"], ask_compute), "lookup": (25, ["search"], ask_fact),
    "both": (25, ["search", "python"], ask_both),
    "page": (10, ["search", "browse"], partial(ask_fact, linked=True)),
    "neither": (10, [], ask_neither)}


def make_tasks(rng, n, part, places, held_out, asked):
    """n tasks in the families' shares. asked: questions to avoid, to which theirs are added."""
    shares, tasks = portions(n, [share for share, *_ in FAMILIES.values()]), []
    for (family, (_, needs, ask)), share in zip(FAMILIES.items(), shares, strict=True):
        for _ in range(share):
            draws = (ask(rng, places, held_out) for _ in range(2000))
            task = next((task for task in draws if task and task["query"] not in asked), None)
            if task is None:
                raise Mistake(f"too few places for {n} tasks of {part}: found no new question "
                              f"of {family}; raise --places and --held-out, or lower --{part}")
            asked.add(task["query"])
            tasks.append({"family": family, "needs": needs, **task})
    rng.shuffle(tasks)
    return [{"id": f"{part}-{i:05d}", **task} for i, task in enumerate(tasks)]


def world(args):
    """Write the worlds and the tasks. SFT asks about the places of two thirds of the training
    worlds and RL about the others, so that RL pays for no fact that SFT may have memorised."""
    if args.worlds < 2:
        raise Mistake("--worlds must be at least 2: SFT and RL ask about different worlds")
    if args.worlds * args.places > 12_000 or args.held_out > 2000:
        raise Mistake("there are too few names: --worlds times --places may be at most 12,000, "
                      "and --held-out 2,000")
    out, rng, taken = Path(args.out), random.Random(f"tools/{args.seed}"), set()
    train = [draw_places(rng, args.places, False, taken) for _ in range(args.worlds)]
    val = [draw_places(rng, args.held_out, True, taken)]
    cut, asked, tasks = 2 * args.worlds // 3, set(), {}
    for part, worlds in ("sft", train[:cut]), ("rl", train[cut:]), ("val", val):
        places = [place for world in worlds for place in world]
        tasks[part] = make_tasks(rng, getattr(args, part), part, places, part == "val", asked)
    known = random.Random(f"tools by heart/{args.seed}")  # not of the worlds' generator
    for task in tasks["sft"]:
        if task["needs"] and known.random() < BY_HEART:
            task["by_heart"] = True
    programs = [task for task in tasks["sft"]
                if "python" in task["needs"] and "by_heart" not in task]
    for task in programs[:args.sft // 10]:
        task["slip"] = rng.choice(SLIPS)
    write_folder(rng, out / "train", train, args.port)
    write_folder(rng, out / "val", val, args.port)
    for part, file in ("sft", "sft-tasks"), ("rl", "rl"), ("val", "val"):
        write_jsonl(out / f"{file}.jsonl", tasks[part])
        print(f"{out / file}.jsonl: {len(tasks[part])} tasks")


# ---------------------------------------------------------------- episodes

def read_fact(text, name, attribute):
    """(value, thought): a place's attribute, or the address of the page that states it, and the
    words in which the solver reads it; (None, "") if the text has neither.

    The thought quotes the text from the place's name on. A tiny model copies well, but among
    passages that look the same it does not tell whose "It" a sentence is about.
    """
    fact = f"the {attribute} of {name}"
    fills = {"it": f"(?:It|{re.escape(name)})", "value": r"(\d+|[A-Z]\w+ [A-Z]\w+)",
             "url": r"(http://\S+\.html)", "attribute": attribute}
    for kind in f"fact {attribute}", "link":
        for form in FORMS[kind]:
            sentence = re.sub(r"\\{(\w+)\\}", lambda found: fills[found[1]], re.escape(form))
            if found := re.search(rf"(?:^|[\s.]){sentence}", text):
                quote = text[text.rindex(name, 0, found.end()):found.end()]
                told = "" if kind == "link" else f" {fact} is {found[1]}"
                return found[1], f"{fact}: {quote}{told}"
    return None, ""


def solution(task):
    """A generator of the solver's replies to a task; send it the tools' results.

    The solver reads all values from the results. Its thoughts repeat what it has read, so that a
    tiny model can copy the next call and the answer from nearby.
    """
    known = said = ""
    values, asked = [], [f"the {attribute} of {name}" for name, attribute in task["asks"]]
    for i, (name, attribute) in enumerate(task["asks"]):
        thought = f"{said}search {' and '.join(asked[i:])}"
        seen = yield turn(thought, "Search", {"query": f"the {name}"})
        # a passage begins with its quoted title and ends before the number of the next one
        passage = re.split(r"\n\s*Doc \d+ ", seen.partition(f'"{name}"\n')[2])[0]
        value, read = read_fact(passage, name, attribute)
        if value and value.startswith("http"):
            query = f"{attribute} of {name}"
            seen = yield turn(f"{known}{read}", "Browse", {"url": value, "query": query})
            value, read = read_fact(seen, name, attribute)
        if value is None:
            yield final_turn(f"{asked[i]} is not to be found", "unknown")
            return
        said = f"{known}{read}: "
        known += f"{asked[i]} is {value}: "
        values.append(value)
    if task["program"]:
        program = task["program"].format(*values)
        code = f"print({program})"
        slip = code.replace("print", task.get("slip", "print"))
        seen = yield turn(f"{said}compute {program}", "Python", {"code": slip})
        if slip != code and "NameError" in seen:
            seen = yield turn(f"{task['slip']} is misspelt: print", "Python", {"code": code})
        said, values = f"it comes to {seen.strip()}: ", [seen.strip()]
    elif not task["asks"]:  # the question contains the answer
        said, values = f"no tool is needed, {task['reason']}: ", task["golds"]
    # the blank makes the answer's tokens the same as in the thought
    yield final_turn(f"{said}the answer", f" {values[-1]}")


def from_memory(task):
    """A generator of the solver's only reply if it answers from memory."""
    yield final_turn("from memory: the answer", f" {task['golds'][0]}")


def play_solution(task, episode):
    """Play an Episode to its end with the solver's replies."""
    replies = from_memory(task) if "by_heart" in task else solution(task)
    seen = episode.step(next(replies))
    while seen is not None:
        seen = episode.step(replies.send(seen))
    return episode


def episodes(args):
    """Play tasks with the solver through the world's tools and write the right episodes; the others
    are counted."""
    from toolstar.tools import open_world

    tools, rows, refused = open_world(args), [], Counter()
    for task in load_tasks(args.tasks, tools.load_task):
        episode = play_solution(task, tools.episode(task, args.seed, args))
        answer, score, _ = tools.verdict(episode)
        if episode.stop == "answer" and score["success"] == 1:
            rows.append(episode.record("solver") | {"plan": answer, "score": score})
        else:
            refused[f"{task.get('family')}: {episode.stop}"] += 1
    tools.close()
    if not rows:
        raise Mistake(f"no episode of {args.tasks} is right; refused: {dict(refused)}; --tasks "
                      "and --database must come from the same run of `world`")
    write_jsonl(args.out, rows)
    print(f"{args.out}: {len(rows)} episodes; refused: {dict(refused)}")


# ---------------------------------------------------------------- drills

def drills(args):
    """Write reading exercises for a base model, about worlds of their own: what passages state and
    what questions ask, in the words of the solver's thoughts but without tool calls."""
    rng, rows = random.Random(f"tools drills/{args.seed}"), []
    while len(rows) < args.n:
        places = draw_places(rng, 30, False, set())
        for shown, said in (drill_passages(rng, places, args.port), drill_page(rng, places),
                            drill_questions(rng, places)):
            rows.append({"messages": [{"role": "user", "content": "\n".join(shown)},
                                      {"role": "assistant", "content": "\n".join(said)}]})
    write_jsonl(args.out, rows[:args.n])
    print(f"{args.out}: {args.n} rows")


def drill_passages(rng, places, port):
    """(passages of two or three places, a fact of each in random order), as lists of lines."""
    n, said = rng.choice((2, 3)), []
    start = rng.randrange(len(places) - n)  # neighbours in the list have similar names
    shown = [f"Doc {i} {write_passage(rng, place, places, port)}"
             for i, place in enumerate(places[start:start + n], 1)]
    for place, passage in zip(places[start:start + n], shown, strict=True):
        key = rng.choice([key for key in (*place.told, place.linked) if key])
        said.append(read_fact(passage, place.name, key)[1])
    return shown, rng.sample(said, len(said))


def drill_page(rng, places):
    """(the page of a place as Browse shows it, three facts), as lists of lines."""
    before, place = rng.sample(places, 2)
    shown = page_lines(rng, place, before)
    said = [read_fact("\n".join(shown), place.name, key)[1]
            for key in rng.sample(list(place.facts), 3)]
    return [place.name, "", place.name, *shown], said


def drill_questions(rng, places):
    """(three questions, for each what to search or compute, or its answer), as lists of lines."""
    shown, said = [], []
    while len(shown) < 3:
        if task := rng.choice((ask_compute, ask_fact, ask_both, ask_neither))(rng, places, False):
            shown.append(task["query"])
            asked = [f"the {attribute} of {name}" for name, attribute in task["asks"]]
            if asked:
                said.append(f"search {' and '.join(asked)}")
            elif task["program"]:
                said.append(f"compute {task['program']}")
            else:
                said.append(task["reason"])
    return shown, said


# ---------------------------------------------------------------- pages

class PageServer(ThreadingHTTPServer):
    """Serves the pages of worlds to this machine only. All pages are read at the start, so that a
    request cannot reach any other file."""

    request_queue_size = 128  # many plays may ask at once

    def __init__(self, folders, port):
        self.texts = {f"/{path.name}": path.read_bytes() for folder in folders
                      for path in (Path(folder) / "pages").glob("*.html")}
        if not self.texts:
            raise Mistake(f"no pages/*.html in {' or '.join(map(str, folders))}; "
                          "python -m tiny.facts world writes some")
        super().__init__(("127.0.0.1", port), PageHandler)


class PageHandler(BaseHTTPRequestHandler):
    timeout = 10  # seconds, for a client that sends no request

    def do_GET(self):
        text = self.server.texts.get(self.path)
        self.send_response(404 if text is None else 200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(text or b"")))
        self.end_headers()
        self.wfile.write(text or b"")

    def log_message(self, *words):
        """Print nothing: a line per request would hide the output of a run."""


def pages(args):
    with PageServer(args.database, args.port) as server:
        print(f"{len(server.texts)} pages on http://127.0.0.1:{server.server_port}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


# ---------------------------------------------------------------- main

def flags(argv=None):
    p = runtime.Parser(description=__doc__, formatter_class=runtime.Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(run, words, **settings):
        p = commands.add_parser(run.__name__, help=words, description=words,
                                formatter_class=runtime.Help)
        p.set_defaults(run=run, **settings)
        return p.add_argument

    add = command(world, "write worlds of facts and their tasks")
    add("--out", required=True, help="folder to write into")
    add("--seed", type=int, default=0, help="the same seed gives the same files")
    add("--worlds", type=COUNT, default=60, help="number of training worlds; they share one corpus")
    add("--places", type=COUNT, default=40, help="places per training world; each has a passage")
    add("--held-out", type=COUNT, default=400, help="places of the held-out world")
    add("--sft", type=COUNT, default=2400, help="number of tasks for the solver's episodes")
    add("--rl", type=COUNT, default=960, help="number of tasks for RL")
    add("--val", type=COUNT, default=400, help="number of held-out tasks")
    add("--port", type=PORT, default=8123, help="port of the pages' server, in the passages' URLs")
    add = command(episodes, "play tasks with the solver through the real tools",
                  failure_rate=0.0, max_turns=7, system_prompt="short")
    add("--tasks", required=True, metavar="JSONL", help="file of tasks that `world` wrote")
    add("--database", required=True, help="the world's folder, with tools.json")
    add("--out", required=True, help="file to write the episodes into")
    add("--seed", type=int, default=0, help="seed of the world's random events")
    add = command(drills, "write reading exercises, for a base model")
    add("--n", type=COUNT, default=9000, help="number of exercises")
    add("--out", required=True, help="file to write the messages into")
    add("--seed", type=int, default=0, help="the same seed gives the same file")
    add("--port", type=PORT, default=8123, help="port in the pages' URLs")
    add = command(pages, "serve the pages of worlds to this machine only")
    add("--database", nargs="+", required=True, metavar="DIR", help="folders of worlds")
    add("--port", type=PORT, default=8123, help="port; 0: any free port")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    runtime.run("tiny.facts", args.run, args)


if __name__ == "__main__":
    main()
