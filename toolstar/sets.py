r"""
Read the twelve evaluation sets of Tool-Star [1], as they were published, as tasks.

    (1) read     turn SETS/<set>.jsonl, .json, .csv or .parquet, or a folder SETS/<set>, into tasks.
                 A row that cannot be used is listed with its cause, and missing sets are named
    (2) compare  drop training questions that occur in these sets (--sets of tir.py)

evaluate.py plays the tasks, and scores.py prints the results beside the paper's.

Reads   a folder of sets: aime24 aime25 math500 math gsm8k webwalker hotpotqa 2wiki musique
        bamboogle gaia hle, each a file or a folder of that name
Writes  OUT/tasks.jsonl, OUT/remarks.jsonl
[1] Tool-Star, arXiv:2505.16410

    python -m toolstar.sets read --sets my/sets --out data/sets
"""
import random
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from runtime import NATURAL, Help, Parser, run, write_jsonl
from toolstar import verdict
from toolstar.files import SUFFIXES, golds_of, read_rows, splits_of, suffix_of
from toolstar.text import normalize


class Set(NamedTuple):
    """An evaluation set of [1]."""
    names: tuple  # of its files and folders, as `squeezed` returns them
    n: int  # number of questions in [1]
    check: str  # "math" or "qa"
    score: str  # the metric that [1] reports
    paper: float | None = None  # score of its 3B model in %; None: not found in print


SETS = {
    "aime24": Set(("aime24", "aime2024"), 30, "math", "right", 20.0),
    "aime25": Set(("aime25", "aime2025"), 30, "math", "right", 16.7),
    "math500": Set(("math500",), 500, "math", "right"),
    "math": Set(("math", "hendrycksmath", "competitionmath"), 500, "math", "right", 82.6),
    "gsm8k": Set(("gsm8k",), 500, "math", "right", 85.0),
    "webwalker": Set(("webwalker", "webwalkerqa"), 200, "qa", "f1", 20.8),
    "hotpotqa": Set(("hotpotqa",), 200, "qa", "f1", 51.9),
    "2wiki": Set(("2wiki", "2wikimultihopqa"), 200, "qa", "f1"),
    "musique": Set(("musique",), 200, "qa", "f1"),
    "bamboogle": Set(("bamboogle",), 125, "qa", "f1", 52.5),
    "gaia": Set(("gaia",), 103, "qa", "right", 15.5),
    "hle": Set(("hle",), 500, "qa", "right", 8.0),
}
TEN, PAPER_MEAN = [*SETS][:10], 46.1  # the sets without GAIA and HLE, and the paper's mean of them
QUESTION = ("question", "problem", "query")  # names of columns, as `squeezed` returns them
GOLDS = ("goldenanswers", "golds", "finalanswer", "groundtruth", "answer", "answers", "solution")
IDS = ("id", "uniqueid", "taskid", "idx", "index")
WEB = ("webwalker", "gaia", "hle")  # [1] plays these with web search and a browser
TRAINING = ("math", "gsm8k", "hotpotqa", "2wiki", "musique")  # these have a training split


# ---------------------------------------------------------------- files

def squeezed(name):
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def find_sets(folder):
    """({set: lists of files, one per split, in order of preference}, [other names in the folder]).

    Files of a training split are used only for a set that has no training split: some copies of
    aime24 on the hub call their only split "train". ValueError if the path is not a folder or holds
    a set twice.
    """
    folder, found, others = Path(folder), {}, []
    if not folder.is_dir():
        raise ValueError(f"--sets {folder} is not a folder; name one that holds the sets "
                         f"{', '.join(SETS)}, each as a file such as gsm8k.jsonl or as a folder")
    for path in sorted(folder.iterdir()):
        plain = squeezed(path.name if path.is_dir() else path.name.split(".")[0])
        known = [name for name, one in SETS.items() if plain in one.names]
        if not known or not (path.is_dir() or suffix_of(path) in SUFFIXES):
            others.append(path.name)
            continue
        if known[0] in found:
            raise ValueError(f"{path} and {found[known[0]][0][0]} are both {known[0]}: remove one")
        lists, training = splits_of(path) if path.is_dir() else ([[path]], [])
        if not lists and training and known[0] not in TRAINING:
            lists = [training]
        found[known[0]] = lists or [[]]
    return found, others


# ---------------------------------------------------------------- tasks

def load_sets(folder, sample=0):
    """(tasks, remarks {set, file, row, cause}, missing sets) of a folder of published sets.

    A remark names a row that was left out, or an id that was changed to make it unique.
    sample: number of questions per set, always the same ones; 0: all; None: as many as in [1].
    """
    found, others = find_sets(folder)
    tasks, remarks = [], [{"set": "", "file": name, "row": 0, "cause": "is none of the sets"}
                          for name in others]
    for name in SETS:
        kept, dropped = load_first(name, found.get(name, []))
        most = SETS[name].n if sample is None else sample
        drawn = set(range(len(kept)))
        if most and len(kept) > most:
            drawn = set(random.Random(f"0/{name}").sample(range(len(kept)), most))
        for i, (where, task) in enumerate(kept):
            if i in drawn:
                tasks.append(task)
            else:
                dropped.append(where | {"cause": "not drawn"})
        remarks += dropped
    return tasks, remarks, [name for name in SETS if name not in found]


def questions_of(folder):
    """(tasks, missing sets) of a folder; ValueError if it holds no question at all."""
    tasks, _, missing = load_sets(folder)
    if not tasks:
        raise ValueError(f"{folder} holds no question of an evaluation set; python -m "
                         "toolstar.sets read says what is wrong with each file")
    return tasks, missing


def load_first(name, lists):
    """load_set of the first list of files that holds a task, else of the first list."""
    first = None
    for files in lists:
        kept, remarks = load_set(name, files)
        if kept:
            return kept, remarks
        first = first or remarks
    nothing = {"set": name, "file": "", "row": 0, "cause": "a folder without a split for "
               "evaluation, such as test.jsonl; files named train are not read"}
    return [], first or [nothing] * (lists == [[]])


def load_set(name, files):
    """([(where, task)], remarks) of the files of a set. Repeated ids get a number."""
    kept, remarks, ids, asked, number = [], [], {}, {}, 0
    for path in files:
        rows = read_rows(path)
        if not rows:
            remarks.append({"set": name, "file": str(path), "row": 0, "cause": "an empty file"})
        for i, row in rows:
            number += 1
            where = {"set": name, "file": str(path), "row": i}
            task, cause = load_row(name, row, number)
            same = task and normalize(task["query"])
            if task and task["check"] == "math":  # 3 + 4 is not 3 - 4
                same = " ".join(task["query"].lower().strip(" .?!").split())
            if not cause and same and same in asked:
                cause = ("a repeated question" if asked[same] == task["golds"]
                         else "a repeated question with another answer")
            if cause:
                remarks.append(where | {"cause": cause})
                continue
            asked[same] = task["golds"]
            own = task["id"]
            while task["id"] in ids:
                ids[own] += 1
                task["id"] = f"{own}~{ids[own]}"
            ids[task["id"]] = 1
            if task["id"] != own:
                remarks.append(where | {"cause": f"a repeated id, kept as {task['id']}"})
            kept.append((where, task))
    return kept, remarks


def load_row(name, row, number):
    """(task, "") of a row, or (None, why it cannot be used). number: its id if it has none."""
    if isinstance(row, ValueError):
        return None, str(row)
    if not isinstance(row, dict):
        return None, f"a {type(row).__name__}, not an object"
    values = {squeezed(key): value for key, value in row.items() if value not in (None, "", [])}
    query = next((values[key] for key in QUESTION if key in values), None)
    columns = ", ".join(map(str, row))
    if not isinstance(query, str) or not query.strip():
        return None, f"no question in its columns {columns:.200}"
    if name == "hle" and values.get("image"):
        return None, "needs an image"
    if name == "gaia" and values.get("filename"):
        return None, "needs a file"
    if str(values.get("answerable")).lower() in ("false", "0", "0.0"):
        return None, "has no answer by design"
    golds = golds_in(values, SETS[name].check)
    if not golds:
        return None, f"no gold answer in its columns {columns:.200}"
    own = next((values[key] for key in IDS if key in values), number)
    return {"id": f"{name}/{own}", "set": name, "query": query, "golds": golds,
            "check": SETS[name].check}, ""


def golds_in(values, check):
    r"""The right answers of a row, from a column, after "####" or in a solution's box; [] if none.

    values: {squeezed name of a column: its value}.
    """
    found = []
    for key in GOLDS:
        value = values.get(key)
        if isinstance(value, str) and check == "math":
            solved = "####" in value or "\\boxed" in value or "\\fbox" in value
            if key == "solution" and not solved:
                continue
            if solved:
                value = value.rpartition("####")[2] if "####" in value else verdict.unboxed(value)
        found = [gold.strip() for gold in golds_of(value) if gold.strip() not in ("", "?")]
        if found:
            break
    more = golds_of(values.get("answeraliases"))
    return [*dict.fromkeys(found + [gold for gold in more if found and gold.strip()])]


def contaminated(tasks, sets):
    """(tasks whose question is in no set, [{"id", "query", "same as"}] of the others).

    tasks: tasks, or episodes with a "task". sets: tasks from load_sets. Two questions are the same
    if text.normalize makes them equal.
    """
    asked = {normalize(task["query"]): task["id"] for task in sets}
    clean, dropped = [], []
    for row in tasks:
        task = row.get("task", row)
        plain = normalize(task["query"])
        if plain and plain in asked:
            dropped.append({"id": task["id"], "query": task["query"], "same as": asked[plain]})
        else:
            clean.append(row)
    return clean, dropped


# ---------------------------------------------------------------- main

def read(args):
    """Write the tasks and the remarks of --sets, and print a line per set."""
    tasks, remarks, absent = load_sets(args.sets, args.sample)
    counts, causes = Counter(task["set"] for task in tasks), {}
    for remark in remarks:
        cause = "a repeated id" if "id, kept" in remark["cause"] else remark["cause"]
        causes.setdefault(remark["set"], Counter())[cause] += 1
    for name in ["", *SETS]:
        told = [f"{times} {cause}" for cause, times in causes.get(name, Counter()).items()]
        if name in absent:
            told = [f"no {name}.jsonl, .json, .csv, .parquet (or .gz) and no folder {name} in "
                    f"{args.sets}"]
        if name or told:
            print("; ".join([f"{name or 'other names':12} {counts[name]:5} tasks", *told]))
    if not tasks:
        raise ValueError(f"{args.sets} holds no question with an answer, see above")
    write_jsonl(Path(args.out) / "remarks.jsonl", remarks)
    write_jsonl(Path(args.out) / "tasks.jsonl", tasks)


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    commands = p.add_subparsers(dest="command", required=True)
    add = commands.add_parser("read", help="turn published sets into tasks").add_argument
    add("--sets", required=True, help="folder of the published sets")
    add("--sample", type=NATURAL, help="number of questions per set, always the same ones; 0: all; "
        "default: as many as in the paper")
    add("--out", required=True, help="folder to write tasks.jsonl and remarks.jsonl into")
    return p.parse_args(argv)


def main(argv=None):
    run("toolstar.sets", read, flags(argv))


if __name__ == "__main__":
    main()
