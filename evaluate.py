"""
Measure agents: play a world's tasks with any of them, judge what they answer, and compare.

    (1) play     every task to its end, no episode waiting for another: a checkpoint in vLLM, tokens
                 in and tokens out; an OpenAI-compatible endpoint; the exact solver; or a person
    (2) judge    the world's verdict on each episode, appended to OUT/AGENT/episodes.jsonl
    (3) report   one table of all agents: success by rule set and level, each constraint, pass@k,
                 with bootstrap intervals over tasks

The stages share what stands here and in sandbox.py: records, tasks, the world, the engine.
[1] STAR, arXiv:2603.21972 app. D

Reads   tasks, ours or as published; checkpoints, which are HF folders or hub names
Writes  OUT/AGENT/episodes.jsonl, settings.json, scores.json; OUT/table.md; plays what OUT lacks

    python evaluate.py --model base=A sft=out/sft rl=out/rl --tasks data/val.jsonl --out out/eval
    python evaluate.py --model A --tasks osunlp/TravelPlanner --split validation --database DIR
"""
import argparse
import contextlib
import csv
import datetime
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from queue import Empty

from constraints import SCORES, judge, literal, need, reward, score  # noqa: F401, handed on
from engine import (  # noqa: F401, handed on
    Asks,
    add_request,
    load_engine,
    name_of,
    open_calls,
    open_engine,
    play_vllm,
    renew_head,
    shared_counter,
    used_gib,
    visible_gpus,
)
from format_plan import NO_ROOM, ChatError, chat, parse_plan
from guard import (  # noqa: F401, handed on
    AMOUNT,
    COUNT,
    NATURAL,
    PART,
    PORT,
    POSITIVE,
    SHARE,
    Parser,
    deaf,
    die_with_parent,
    hold,
    hold_file,
    naming,
    progress,
    run,
    watch_sigterm,
    web_address,
    workers,
)
from records import (  # noqa: F401, handed on
    append_jsonl,
    read_jsonl,
    recover_jsonl,
    replacing,
    write_jsonl,
    write_text,
)
from sandbox import Episode, Sandbox, open_database, system_prompt
from solver import solver_replies
from template import Template, check_weights, is_talk, load_template  # noqa: F401, handed on
from whole import (  # noqa: F401, handed on
    check_config,
    check_finite,
    check_model,
    check_parameters,
    new_model,
    restore,
    save_checkpoint,
)

LEVELS = ("easy", "medium", "hard")
STOPS = ("answer", "format", "turns", "context")
COUNTS = ("reward", "turns", "calls", "tokens")  # means of numbers; all other lines are shares
SETTINGS = ("env", "database", "temperature", "top_p", "max_context", "max_turns", "max_tokens",
            "system_prompt", "failure_rate", "seed")


# ------------------------------------------------------------------------------------------ tasks

def load_task(row):
    """A published record (TravelPlanner's or STAR's) as our task; errors name the key."""
    task = {key: value for key, value in row.items()
            if key not in ("reference_information", "annotated_plan")}
    for key in ("date", "days", "people_number", "budget", "visiting_city_number", "constraint",
                "local_constraint"):
        if isinstance(task.get(key), str):
            task[key] = literal(task[key])
    asked = task.pop("constraint", None) or task.get("local_constraint") or {}
    if not isinstance(asked, dict):
        raise ValueError(f"'local_constraint' must be a table of constraints, not {asked!r:.60}")
    task["local_constraint"] = {"house rule": asked.get("house rule", asked.get("room rule"))} | {
        key: asked.get(key) for key in ("cuisine", "room type", "transportation")}
    for key, kind in {"org": str, "dest": str, "date": list, "days": int, "people_number": int,
                      "budget": (int, float), "query": str}.items():
        if not isinstance(need(task, key), kind):
            raise ValueError(f"{key!r} is {task[key]!r:.60}, which is of the wrong type")
    for key in ("days", "people_number"):
        if task[key] < 1:
            raise ValueError(f"{key!r} is {task[key]!r:.60}; it must be one at least")
    task.setdefault("id", str(task.get("idx", "?")))
    task.setdefault("level", "easy")
    # 1, 2, 3 cities on 3, 5, 7 days, as the benchmark has it
    task.setdefault("visiting_city_number", task["days"] // 2)
    check_words(task)
    return task


def check_words(task):
    """ValueError where a task's words are none: its days, wishes, id and level."""
    try:
        [datetime.date.fromisoformat(day) for day in task["date"]]
    except (TypeError, ValueError):
        raise ValueError(f"'date' is {task['date']!r:.60}, not days like 2022-03-01") from None
    if len(task["date"]) != task["days"]:
        raise ValueError(f"'date' has {len(task['date'])} of the trip's {task['days']} days")
    words = {key: task[key] for key in ("id", "level")} | task["local_constraint"]
    for key, value in words.items():
        several = value if isinstance(value, list) and key == "cuisine" else [value]
        if not all(one is None or isinstance(one, str) or key == "id" and isinstance(one, int)
                   for one in several):
            raise ValueError(f"{key!r} is {value!r:.60}, which is of the wrong type")
    if not isinstance(task["visiting_city_number"], int) or not math.isfinite(task["budget"]):
        raise ValueError("'visiting_city_number' and 'budget' must be numbers")


def find_tasks(source, split):
    """The file of tasks: a file, or SPLIT.csv or .jsonl of a folder or of a data set on the hub."""
    if source is None:
        raise ValueError("--tasks FILE.jsonl is needed; python synth.py tasks writes one")
    path, names = Path(source), (f"{split}.csv", f"{split}.jsonl")
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and path.suffix not in (".csv", ".jsonl")
    if path.is_file() or not (path.is_dir() or on_hub):
        return path
    if not split:
        raise ValueError(f"{source} is a data set: name a file of it, or the part by --split")
    if path.is_dir():
        for name in names:
            if (path / name).exists():
                return path / name
        raise ValueError(f"{source} holds neither {names[0]} nor {names[1]}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(source, names[0], repo_type="dataset"))
    except (OSError, EntryNotFoundError) as error:
        raise ValueError(f"{source} is no folder here, and the hub gives no {names[0]} of it "
                         f"({type(error).__name__}): hf download {source} --repo-type dataset "
                         "--local-dir DIR where it can be had, then name DIR") from None


def read_csv_rows(path):
    """The rows of a csv file as tables, without the fields that are empty."""
    csv.field_size_limit(1 << 30)  # the reference information makes fields of megabytes
    with naming(path), open(path, encoding="utf-8-sig", newline="") as file:
        try:
            return [{key: value for key, value in row.items() if key and value}
                    for row in csv.DictReader(file)]
        except csv.Error as error:
            raise ValueError(f"{path}: no csv ({error}); fetch it again") from None


def load_tasks(source, load=load_task, limit=None, split=None):
    """The tasks of a file (jsonl of tasks or of episodes, or csv) or of a data set, by `load`.

    The published test split says no more than level, days and query: its tasks can be played for
    the leaderboard, not judged. Errors name the file, the row and the key.
    """
    path, tasks = find_tasks(source, split), []
    rows = read_csv_rows(path) if path.suffix == ".csv" else read_jsonl(path)
    for number, row in enumerate(rows[:limit]):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number + 1}: a task is a table of keys: {row!r:.40}")
        row = row["task"] if isinstance(row.get("task"), dict) else row
        row = row if row.keys() & {"id", "idx"} else row | {"id": str(number), "idx": number}
        try:
            if split == "test" and "days" in row and "org" not in row:
                told = {key: row[key] for key in ("idx", "level", "days", "query") if key in row}
                tasks.append({"id": str(row.get("id", row.get("idx")))} | told)
            else:
                tasks.append(load(row))
        except (KeyError, ValueError) as error:
            why = error.args[0] if " " in str(error.args[0]) else repr(error)
            raise ValueError(f"{path}, row {number + 1}: {why}") from None
    if not tasks:
        raise ValueError(f"{path}: holds no task; python synth.py tasks writes some")
    twice = [i for i, times in Counter(str(task["id"]) for task in tasks).items() if times > 1]
    if twice:
        raise ValueError(f"{path}: two tasks have the id {twice[0]!r}, which tells episodes apart")
    return tasks


# ------------------------------------------------------------------------------------------ world

class Travel:
    """The travel world as the stages see it: another world has these members and needs no more."""

    kinds = ("sum", "macro", "success")  # of reward, dense to sparse; three make a curriculum
    parts = SCORES  # names of the score's numbers whose means are logged; "success" is one of them
    stops = ()  # strings that end a reply besides the end token
    slow = False  # whether tools are waited for in threads

    def __init__(self, database):
        self.database = database

    def load_task(self, row):
        """A row of a file as a task with an "id"; KeyError or ValueError that names the key."""
        task = load_task(row)
        database = self.database.of(task)  # or it says that the task is of no world here
        if task["org"] not in database.cities:
            raise ValueError(f"'org' is {task['org']!r:.60}, which is no city of "
                             f"{database.folder}: --database names the folder of the tables")
        return task

    def episode(self, task, seed, args):
        """An Episode, ready to be played. seed: of what chance decides in the world."""
        sandbox = Sandbox(self.database.of(task), args.failure_rate, seed)
        return Episode(task, sandbox, args.max_turns, system_prompt(args.system_prompt))

    def verdict(self, episode):
        """(plan, score, strict success); the score is None where a task has nothing to judge by."""
        database = self.database.of(episode.task)
        if "org" not in episode.task:  # it is of the published test split
            return parse_plan(episode.answer, episode.task, database), None, None
        plan, verdict = judge(episode.task, episode.answer, database)
        return plan, verdict, verdict.pop("strict")

    def reward(self, verdict, kind):
        """The score as a number, by one of the kinds."""
        return reward(verdict, kind)

    def close(self):
        """Give back what the world holds."""


def open_world(args):
    """The world of --env: travel, tools, or what open_world(args) of a module or file returns."""
    if args.env == "travel":
        return Travel(open_database(args.database))
    name = {"tools": "toolstar.tools"}.get(args.env, args.env)
    try:
        module = load_module(name)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"--env {args.env}: {error}; it is travel, tools, or a module or file "
                         "with open_world(args)") from None
    if not hasattr(module, "open_world"):
        raise ValueError(f"--env {args.env}: it has no function open_world(args)")
    return module.open_world(args)


def load_module(name):
    """The module of this name, or of this file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    sys.path.append(str(Path(name).resolve().parent))  # what stands beside it
    spec = importlib.util.spec_from_file_location(name, name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------- agents

def play(generate, episodes, concurrency=8):
    """Play text-level episodes with generate(messages) -> reply; yields each as it ends.

    Every episode has a thread of its own: a slow reply holds up nobody else. After a failure no
    episode starts; those that still come to their end are handed over before it is raised.
    """
    waiting, failure, episodes = set(), None, iter(episodes)
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            for episode in islice(episodes, 0 if failure else concurrency - len(waiting)):
                waiting.add(pool.submit(play_one, generate, episode))
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                failure = failure or future.exception()
            yield from (future.result() for future in done if not future.exception())
    if failure:
        raise failure


def play_one(generate, episode):
    """One episode to its end."""
    while not episode.stop:
        try:
            episode.step(generate(episode.messages))
        except ChatError as error:
            if not NO_ROOM.search(str(error)):
                raise
            episode.stop = "context"
    return episode


def ask_person(messages):
    """generate(messages) that shows the last message and reads a reply from the terminal."""
    told = "\n\n".join(one["content"] for one in messages[-1 if len(messages) > 2 else 0:])
    print(f"\n{told}\n\n<tool_call>...</tool_call> or <answer>...</answer>, "
          "over as many lines as you like:", file=sys.stderr)
    ends = ("</answer>", "</tool_call>", "</search>", "</python>", "</browse>")
    text = input("> ")
    while not text.rstrip().endswith(ends):
        text += "\n" + input()
    return text if "<think>" in text else f"<think></think>{text}"


def play_solver(database, episode):
    """One episode of the solver: its searches through the tools, then its plan as the answer."""
    for reply in solver_replies(episode.task, database.of(episode.task)):
        if episode.step(reply) is None:
            break
    return episode


# ----------------------------------------------------------------------------------------- report

def mean(values):
    """The mean of numbers, None of nothing."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def lines_of(row):
    """{line of the table: number or None} that one episode tells."""
    found = {}
    if "score" in row:
        score, task = row["score"], row["task"]
        success = score["success"]
        found = {"success": success, "success, official": score.get("official"),
                 "success, strict": row["strict"],
                 "hack gauge: star - strict": success - row["strict"]}
        found |= {f"success, {level}": success if task.get("level") == level else None
                  for level in LEVELS}
        if "family" in task:  # of tasks that say what tools they need
            used = {call["name"].lower() for call in row.get("tools", ())}
            needs = set(task.get("needs", ()))
            found |= {f"success, {task['family']}": success,
                      f"tools as needed, {task['family']}": used >= needs if needs else not used}
        found |= {name: value for name, value in score.items()
                  if isinstance(value, float) and name not in ("success", "official")}
        found |= {f"{name} per episode": value for name, value in score.items()
                  if type(value) is int}
        found |= {name: passed for name, (passed, _) in score.get("checks", {}).items()}
    stops = STOPS + ("calls",) * ("tools" in row)
    return found | {f"stop: {stop}": row["stop"] == stop for stop in stops}


def measure(rows):
    """{line of the table: number} over the episodes of one agent."""
    told = [lines_of(row) for row in rows]
    lines = dict.fromkeys(line for lines in told for line in lines)
    replies = [reply < row["errors"] for row in rows if "errors" in row
               for reply in range(row["turns"])]
    found = {"episodes": len(rows)} | {line: mean(one.get(line) for one in told) for line in lines}
    found["replies that break the format"] = mean(replies)
    return found | {name: mean(row.get(name) for row in rows) for name in COUNTS}


def plays_of(rows):
    """{task id: [success of each play]} of judged episodes."""
    plays = {}
    for row in rows:
        if "score" in row:
            plays.setdefault(row["task"]["id"], []).append(row["score"]["success"])
    return plays


def pass_at(plays):
    """{"pass@k": chance that one of k plays of a task succeeds}, k = 1, 2, 4, .. n; {} if n is 1.

    plays: {task id: its n plays' success}. k of n plays, c of them right, all miss with chance
    C(n - c, k) / C(n, k), which is without bias (arXiv:2107.03374 eq. 1).
    """
    most = min(map(len, plays.values()), default=1)
    sizes = sorted({2**i for i in range(most.bit_length())} | {most}) if most > 1 else []
    counts = [(len(values), int(sum(values))) for values in plays.values()]
    return {f"pass@{k}": mean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts)
            for k in sizes}


def interval(values, least=0.0, rounds=10_000):
    """The 95% interval of a mean of shares: of as many values drawn with replacement, many times.

    least: the smallest value there can be, -1 of differences.
    """
    import numpy as np

    rng, values = np.random.default_rng(0), np.asarray(values, float)
    draws = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(rounds)]
    return widened(*np.percentile(draws, [2.5, 97.5]), len(values), least)


def widened(low, high, n, least=0.0):
    """An interval of draws of n values. Where all were the same, they tell nothing: then as wide
    as a binomial's of 0 in n."""
    width = 1 - 0.025 ** (1 / n) if high - low < 1e-12 else 0.0
    return [float(max(least, low - width)), float(min(1.0, high + width))]


def span(low, high, sign=""):
    """An interval of shares in percent."""
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}"


def table(played):
    """(markdown, {agent: numbers}) of {agent: its episodes}, side by side."""
    plays = {name: plays_of(rows) for name, rows in played.items()}
    wins = {name: {task: mean(values) for task, values in each.items()}
            for name, each in plays.items()}
    report = {name: measure(rows) | pass_at(plays[name]) for name, rows in played.items()}
    lines = dict.fromkeys(line for numbers in report.values() for line, value in numbers.items()
                          if value is not None)
    cells = {line: [show(line, numbers.get(line)) for numbers in report.values()] for line in lines}
    for column, (name, numbers) in enumerate(report.items()):
        if wins[name]:
            numbers["success interval"] = interval(list(wins[name].values()))
            cells["success"][column] += f" ({span(*numbers['success interval'])})"
    last, blank = list(wins)[-1], [""] * (len(played) - 1)
    for other in list(wins)[:-1]:
        both = wins[other].keys() & wins[last].keys()
        if both:
            change = [wins[last][task] - wins[other][task] for task in wins[other] if task in both]
            found = report[last][f"success minus {other}'s"] = [mean(change), *interval(change, -1)]
            cells[f"success of {last} minus {other}"] = [
                *blank, f"{100 * found[0]:+.1f} ({span(*found[1:], '+')})"]
    rows = [["", *played], ["---"] * (len(played) + 1)]
    rows += [[line, *row] for line, row in cells.items()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows), report


def show(line, value):
    """A number of the table as text: shares in percent."""
    if value is None:
        return "-"
    if line in COUNTS or line.endswith((" per episode", "seconds")):
        return f"{value:.1f}"
    return str(value) if line == "episodes" else f"{100 * value:.1f}"


# ------------------------------------------------------------------------------------------- main

class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and behind each flag its default, if it has one."""

    def _get_help_string(self, action):
        plain = action.default in (None, []) or action.default is False  # 0 is shown
        return action.help if plain else super()._get_help_string(action)


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("agent").add_argument
    add("--model", nargs="+", default=[], metavar="[NAME=]PATH",
        help="checkpoint folders, hub names, or models of --url; the first = ends the NAME, but "
             "what exists as it stands is a path")
    add("--agent", choices=("model", "solver", "person"), default="model",
        help="solver: the exact solver, through the tools; person: you, in the terminal")
    add("--url", type=web_address, metavar="URL",
        help="OpenAI-compatible endpoint, http://host:port/v1, that plays instead of vLLM; its "
        "replies hold their thoughts, so that it runs without a reasoning parser")
    add("--key", metavar="FILE", help="file that holds its API key")
    add("--tp", type=COUNT, default=1, help="GPUs that share one model")
    add("--processes", type=NATURAL, default=0, help="engines that share the tasks; 0: one per "
        "--tp GPUs, and one on a CPU; any number gives the same table")
    add("--gpu-memory", type=PART, default=0.9, help="share of a GPU that vLLM may take")
    add = p.add_argument_group("tasks").add_argument
    add("--tasks", metavar="FILE|DIR|HUB_ID", help="tasks, ours or as published; with --split a "
        "folder of SPLIT.csv or SPLIT.jsonl, or a data set on the hub (osunlp/TravelPlanner)")
    add("--env", default="travel", help="travel, tools, or a module or file with open_world(args)")
    add("--database", help="folder of the world's data; unset: $STAR_DATABASE, else what ships")
    add("--limit", type=COUNT, help="play only the first so many tasks")
    add("--samples", type=COUNT, default=1, help="plays per task; several add pass@k")
    add("--split", choices=("train", "validation", "test"), help="which part of a data set")
    add = p.add_argument_group("play").add_argument
    add("--temperature", type=AMOUNT, default=0.6, help="of the sampling [1]")
    add("--top-p", type=PART, default=0.95, help="of the sampling [1]")
    add("--max-context", type=COUNT, default=32768, help="tokens per episode [1]")
    add("--max-turns", type=COUNT, default=60, help="replies per episode [1]")
    add("--max-tokens", type=COUNT, default=4096, help="tokens per reply")
    add("--system-prompt", default="full", help="full, short or a file: the checkpoint's own")
    add("--failure-rate", type=SHARE, default=0.0, help="probability that a tool call fails")
    add("--concurrency", type=COUNT, default=64, help="episodes in flight")
    add("--seed", type=int, default=0, help="of the sampling and the failures")
    add("--out", default="out/eval", help="a folder per agent, and table.md; a rerun goes on")
    args = p.parse_args(argv)
    if args.agent != "model" and (args.model or args.url):
        p.error(f"--agent {args.agent} plays by itself; leave --model and --url out")
    return args


def named_paths(specs):
    """{name: path} of [NAME=]PATH; without a name, the end of the path that sets it apart."""
    named = [(None, spec) if "=" not in spec or Path(spec).exists() else spec.split("=", 1)
             for spec in specs]
    for spec, (name, path) in zip(specs, named, strict=True):
        if not path.strip() or not (name is None or re.fullmatch(r"\w[\w.-]*", name)):
            raise ValueError(f"--model {spec!r} is not [NAME=]PATH, NAME of letters, digits, .-_")
    parts = [[part for part in Path(path).parts if part not in "/."] for _, path in named]
    found = {}
    for (name, path), own in zip(named, parts, strict=True):
        short = [n for n in range(1, len(own)) if [one[-n:] for one in parts].count(own[-n:]) == 1]
        found[name or "-".join(own[-short[0] :] if short else own)] = path
    if not named or len(found) < len(named):
        raise ValueError("--model wants one or more checkpoints, each with a name of its own")
    return found


def read_episodes(path):
    """{name of the play: its record} of the episodes in a file, each play once; {} without one."""
    rows = {}
    for number, row in enumerate(recover_jsonl(path), 1):
        whole = isinstance(row, dict) and row.keys() >= {"task", "messages", "stop"}
        if not whole or not isinstance(row["task"], dict) or "id" not in row["task"]:
            raise ValueError(f"{path}, record {number}: no episode, but {str(row)[:60]}; delete "
                             "it, and its task is played again")
        rows.setdefault(name_of(row["task"]), row)
    return rows


def open_folder(out, name, settings, kept="episodes.jsonl"):
    """OUT/name, whose episodes were played in one way: going on in another is refused."""
    folder = Path(out) / name
    file, episodes = folder / "settings.json", folder / kept
    if not episodes.exists() or not episodes.stat().st_size:
        file.unlink(missing_ok=True)  # nothing was played: the next play says how it is
        return folder
    try:
        before = json.loads(file.read_text()) if file.exists() else settings
        changed = [f"{key} was {before.get(key)!r} and is {value!r}"
                   for key, value in settings.items() if before.get(key) != value]
    except (ValueError, AttributeError):
        raise ValueError(f"{file} is broken, so that nobody knows how {episodes.name} was played: "
                         f"remove {folder}, or choose another --out") from None
    if changed:
        raise ValueError(f"{folder} was played otherwise ({'; '.join(changed)}): "
                         "choose another --out or remove it")
    return folder


def keep_play(folder, settings, row, kept="episodes.jsonl"):
    """Append an episode to OUT/name; with the first one it is settled how all are played."""
    if not (folder / "settings.json").exists():
        write_text(folder / "settings.json", json.dumps(settings, indent=1))
    append_jsonl(folder / kept, row)


def play_agent(args, folder, settings, tasks):
    """(1) (2) Play what OUT/name lacks of an agent's episodes, and append each as it ends."""
    done = read_episodes(folder / "episodes.jsonl")
    left = [task for task in tasks if name_of(task) not in done]
    if any(done.get(name_of(task), {"task": task})["task"] != task for task in tasks):
        raise ValueError(f"{folder}: other tasks of these ids were played; choose another --out")
    rows, wins = partial(play_rows, args, folder.name, settings["model"]), []
    if args.agent != "person":  # who needs the terminal
        rows = partial(apart, "evaluate.py", rows, args=args)
    bar = progress(rows(left) if left else (), folder.name, len(tasks), len(tasks) - len(left))
    for row in bar:
        keep_play(folder, settings, row)
        if "score" in row:
            wins.append(row["score"]["success"])
            bar.set_postfix_str(f"success {mean(wins):.3f}", refresh=False)


def play_rows(args, name, path, tasks):
    """Yield the judged record of each task's episode as it ends."""
    world = open_world(args)
    for episode in player(args, path, world, tasks):
        plan, verdict, strict = world.verdict(episode)
        row = episode.record(name) | {"plan": plan, "tokens": getattr(episode, "tokens", None)}
        if verdict is not None:
            reward = world.reward(verdict, world.kinds[0])
            row |= {"score": verdict, "reward": reward, "strict": strict}
        yield row
    world.close()


def player(args, path, world, tasks):
    """The tasks' episodes as they end, played by solver, person, endpoint or a vLLM engine."""
    def begin(task):
        episode = world.episode(task, f"{args.seed}/{name_of(task)}", args)
        episode.strict = False  # told of a broken format, as the reference's inference does
        return episode

    episodes = map(begin, tasks)
    if args.agent == "solver":
        if not hasattr(world, "database") or "org" not in tasks[0]:
            raise ValueError("--agent solver plays tasks of travel that tell all of a trip")
        return map(partial(play_solver, world.database), episodes)
    if args.agent == "person":
        return play(ask_person, episodes, 1)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    if args.url and world.stops:
        raise ValueError("--url plays in turns; here results stand within a reply (grammar tags)")
    key = Path(args.key).read_text().strip() if args.key else None
    asks, generate = Asks(), args.url and partial(chat, args.url, path, **sampling, api_key=key)
    if hasattr(world, "help"):  # the tools' world, whose plays have helpers: who plays, as a rule
        world.help(asks, generate)
    if args.url:
        return play(generate, episodes, args.concurrency)
    llm, template = open_engine(path, args.max_context, args.concurrency, args.tp, args.gpu_memory)
    return play_vllm(llm, template, episodes, args.max_context, **sampling, seed=args.seed,
                     concurrency=args.concurrency, stops=world.stops, slow=world.slow, asks=asks)


def apart(program, rows_of, tasks, args):
    """Yield what rows_of(tasks) yields in processes of their own, --processes of them, each over a
    share of the tasks: only the end of a process gives back all of an engine's memory."""
    if args.url:  # no engine here
        yield from rows_of(tasks)
        return
    context, gpus = get_context("spawn"), []
    if getattr(args, "agent", "model") == "model":  # the solver needs none
        gpus = visible_gpus()
    if not gpus:
        # vLLM's CPU build says on which NUMA node it stands, whoever asks; read when torch starts
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    n = min(args.processes or max(1, len(gpus) // args.tp), len(tasks))
    rows, children = context.Queue(), []
    for i in range(n):
        own = gpus[i * args.tp:(i + 1) * args.tp]
        children.append(context.Process(target=hand_over,
                                        args=(program, rows_of, tasks[i::n], own, rows)))
        with deaf():
            children[-1].start()
    alive, said = True, []
    try:
        while alive:
            alive = any(child.is_alive() for child in children)
            with contextlib.suppress(Empty):
                while True:
                    row = rows.get(timeout=0.5)
                    if isinstance(row, dict):
                        yield row
                    else:
                        said.append(row)
    finally:  # a caller that fails, for want of disk say, does not wait for those who still play
        for child in children:
            child.terminate()
            child.join()
    if said:  # by all of them, as a rule: of the model's folder say
        raise SystemExit(said[0])
    if any(child.exitcode for child in children):
        raise SystemExit(f"{program}: stopped early; the same command goes on where it was")


def hand_over(program, rows_of, tasks, gpus, rows):
    """In a process of its own, which sees these GPUs: put the tasks' rows into a queue, and at last
    the line that says what went wrong."""
    die_with_parent()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def work():
        for row in rows_of(tasks):
            rows.put(row)

    try:
        run(program, work)
    except SystemExit as error:
        rows.put(str(error.code))
        raise SystemExit(1) from None


def evaluate(args):
    """Play, judge, report."""
    world = open_world(args)
    tasks = load_tasks(args.tasks, world.load_task, args.limit, args.split)
    world.close()  # the players open their own
    tasks = [task | ({"sample": k} if k else {}) for task in tasks for k in range(args.samples)]
    with naming(args.system_prompt):
        system_prompt(args.system_prompt)
    wanted, played = [name_of(task) for task in tasks], {}
    agents = named_paths(args.model) if args.agent == "model" else {args.agent: None}
    for path in agents.values() if args.agent == "model" and not args.url else ():
        check_model(path)
    common = {key: getattr(args, key) for key in SETTINGS}
    common["database"] = args.database or os.environ.get("STAR_DATABASE")
    settings = {name: {"model": path} | common for name, path in agents.items()}
    hold(args.out)
    folders = {name: open_folder(args.out, name, chosen) for name, chosen in settings.items()}
    for name, folder in folders.items():
        play_agent(args, folder, settings[name], tasks)
    # (3)
    for name, folder in folders.items():
        rows = read_episodes(folder / "episodes.jsonl")
        played[name] = [rows[task] for task in wanted if task in rows]  # whoever ended first
    text, report = table(played)
    for name, folder in folders.items():
        write_text(folder / "scores.json", json.dumps(report[name], indent=1))
    write_text(Path(args.out) / "table.md", text)
    print(text)


def main(argv=None):
    run("evaluate.py", evaluate, flags(argv))


if __name__ == "__main__":
    main()
