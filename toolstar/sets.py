r"""
Read the twelve evaluation sets of Tool-Star [1], as they were published, as tasks.

    (1) read     turn SETS/<set>.jsonl, .json, .csv or .parquet, or a folder SETS/<set>, into tasks.
                 Rows that cannot be used are counted by cause, and missing sets are named
    (2) compare  drop training questions that occur in these sets (--sets of tir.py)

evaluate.py plays the tasks, and scores.py prints the results beside the paper's.

Reads   a folder of sets: aime24 aime25 math500 math gsm8k webwalker hotpotqa 2wiki musique
        bamboogle gaia hle, each a file or a folder of that name
Writes  OUT/tasks.jsonl
[1] Tool-Star, arXiv:2505.16410

    python -m toolstar.sets read --sets my/sets --out data/sets
"""
import csv
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from runtime import NATURAL, Help, Mistake, Parser, read_jsonl, run, write_jsonl
from toolstar import verdict
from toolstar.text import MISSING, golds_of, normalize


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
TRAINING = ("math", "gsm8k", "hotpotqa", "2wiki", "musique")  # these have a training split
NO = ("no", "false", "0", "0.0")  # how a column says that something is not so
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
SPLITS = ("test", "main", "validation", "dev", "val", "")  # in order of preference; "": any file


# ---------------------------------------------------------------- files

def read_rows(path):
    """The rows of a published file: dicts without the values that are missing."""
    path = Path(path)
    if not path.is_file():
        raise Mistake(f"{path} is not a file")
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise Mistake(f"{path} needs pyarrow: pip install pyarrow") from None
        rows = parquet.read_table(path).to_pylist()
    elif path.suffix == ".csv":
        csv.field_size_limit(2**30)
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    else:
        try:  # a list, an object, or an object that holds the list
            found = json.loads(path.read_text(encoding="utf-8-sig"))
            rows = found if isinstance(found, list) else found.get("data", [found])
        except ValueError:  # a row per line
            rows = read_jsonl(path)
    if odd := [row for row in rows if not isinstance(row, dict)]:
        raise Mistake(f"{path}: a row must be an object of named values, not {odd[0]!r:.80}")
    return [{key: value for key, value in row.items() if not is_missing(value)} for row in rows]


def is_missing(value):
    """Whether a value is one of the many ways to say that there is none."""
    return value is None or value != value or value == [] or (  # NaN differs from itself
        isinstance(value, str) and value.strip() in MISSING)


def squeezed(name):
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def find_sets(folder):
    """{set: lists of files, one per split, in order of preference}.

    Files of a training split are used only for a set that has no training split: some copies of
    aime24 on the hub call their only split "train". A Mistake if a set is there twice.
    """
    found = {}
    if not Path(folder).is_dir():
        raise Mistake(f"{folder} is not a folder; it must hold the sets, see toolstar/sets.py")
    for path in sorted(Path(folder).iterdir()):
        plain = squeezed(path.name if path.is_dir() else path.stem)
        name = next((name for name, one in SETS.items() if plain in one.names), None)
        if name is None or not (path.is_dir() or path.suffix in SUFFIXES):
            continue
        if name in found:
            raise Mistake(f"{path} and {found[name][-1][0]} are both {name}: remove one")
        files = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
        if name in TRAINING:
            files = [each for each in files if "train" not in str(each.relative_to(path)).lower()]
        lists = [[each for each in files if split in str(each.relative_to(path)).lower()]
                 for split in SPLITS]
        found[name] = list(filter(None, lists)) if path.is_dir() else [[path]]
    return found


def load_sets(folder, sample=0):
    """(tasks, {set: Counter of the rows that were left out, by cause}) of published sets.

    sample: number of questions per set, always the same ones; 0: all; None: as many as in [1].
    """
    tasks, causes = [], {}
    for name, lists in find_sets(folder).items():
        for files in lists or [[]]:  # the first split with answers; some test splits have none
            kept, causes[name] = load_set(name, files)
            if kept:
                break
        most = SETS[name].n if sample is None else sample
        if most and len(kept) > most:
            drawn = sorted(random.Random(f"0/{name}").sample(range(len(kept)), most))
            causes[name]["not drawn"] = len(kept) - most
            kept = [kept[i] for i in drawn]
        tasks += kept
    # mixed, always in the same way, so that --limit takes some of each set
    return sorted(tasks, key=lambda task: random.Random(task["id"]).random()), causes


def questions_of(folder):
    """The tasks of a folder of sets; a Mistake if it holds no question at all."""
    tasks, causes = load_sets(folder)
    if not tasks:
        raise Mistake(f"{folder} holds no question of the sets {', '.join(SETS)}, each a file "
                      f"such as gsm8k.jsonl or a folder: {causes}")
    return tasks


def load_set(name, files):
    """(tasks, Counter of the rows that were left out, by cause) of the files of a set."""
    kept, causes, ids, asked = [], Counter(), Counter(), set()
    for number, row in enumerate((row for path in files for row in read_rows(path)), 1):
        task, cause = load_row(name, row, number)
        if cause:
            causes[cause] += 1
            continue
        same = normalize(task["query"])
        if task["check"] == "math":  # 3 + 4 is not 3 - 4
            same = " ".join(task["query"].lower().strip(" .?!").split())
        if same in asked:
            causes["a repeated question"] += 1
            continue
        asked.add(same)
        ids[task["id"]] += 1
        task["id"] += f"~{ids[task['id']]}" * (ids[task["id"]] > 1)
        kept.append(task)
    return kept, causes


def load_row(name, row, number):
    """(task, "") of a row, or (None, why it cannot be used). number: its id if it has none."""
    values = {squeezed(key): value for key, value in row.items()}
    query = next((values[key] for key in QUESTION if key in values), None)
    if not isinstance(query, str) or not query.strip():
        return None, f"no question in its columns {', '.join(map(str, row)):.200}"
    if name == "hle" and str(values.get("image", "no")).lower() not in NO:
        return None, "needs an image"
    if name == "gaia" and "filename" in values:
        return None, "needs a file"
    if str(values.get("answerable")).lower() in NO:
        return None, "has no answer by design"
    golds = golds_in(values, SETS[name].check)
    if not golds:
        return None, f"no gold answer in its columns {', '.join(map(str, row)):.200}"
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
    """Write the tasks of --sets, and print a line per set."""
    tasks, causes = load_sets(args.sets, args.sample)
    counts = Counter(task["set"] for task in tasks)
    for name in SETS:
        told = [f"{times} {cause}" for cause, times in causes.get(name, Counter()).items()]
        missing = [] if name in causes else [f"no file or folder of that name in {args.sets}"]
        print("; ".join([f"{name:12} {counts[name]:5} tasks", *told, *missing]))
    if not tasks:
        raise Mistake(f"{args.sets} holds no question with an answer, see above")
    write_jsonl(Path(args.out) / "tasks.jsonl", tasks)


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("command", choices=("read",), help="turn published sets into tasks")
    add("--sets", required=True, help="folder of the published sets")
    add("--sample", type=NATURAL, help="number of questions per set, always the same ones; 0: all; "
        "default: as many as in the paper")
    add("--out", required=True, help="folder to write tasks.jsonl into")
    return p.parse_args(argv)


def main(argv=None):
    run("toolstar.sets", read, flags(argv))


if __name__ == "__main__":
    main()
