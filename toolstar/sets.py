r"""
Read the twelve evaluation sets of Tool-Star [1] as tasks.

    (1) sets     turn SETS/<set>/test.jsonl, or dev.jsonl where test.jsonl has no answers, into
                 tasks. Rows that cannot be used are counted by cause, and missing sets are named
    (2) compare  drop training questions that occur in these sets (--sets of tir and
                 convert)

Two layouts exist: evaluation/data of Tool-Star's repository, whose rows are {question, answer}, and
FlashRAG's folder, {id, question, golden_answers}. Copies of other forms, say a set's own parquet
files, have to be renamed and converted by hand. evaluate.py plays the tasks, and scores.py prints
the results beside the paper's.

Reads   a folder of folders: aime24 aime25 math500 math gsm8k webwalker hotpotqa 2wiki (FlashRAG:
        2wikimultihopqa) musique bamboogle gaia hle
Writes  OUT/tasks.jsonl
[1] Tool-Star, arXiv:2505.16410

    python -m toolstar sets --sets my/sets --out data/sets
"""
import json
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from runtime import Mistake, read_jsonl, write_jsonl
from toolstar import verdict
from toolstar.text import MISSING, golds_of, normalize


class Set(NamedTuple):
    """An evaluation set of [1]."""
    n: int  # number of questions in [1]
    check: str  # "math" or "qa"
    score: str  # the metric that [1] reports
    paper: float | None = None  # score of its 3B model in %; None: not found in print


SETS = {
    "aime24": Set(30, "math", "right", 20.0),
    "aime25": Set(30, "math", "right", 16.7),
    "math500": Set(500, "math", "right"),
    "math": Set(500, "math", "right", 82.6),
    "gsm8k": Set(500, "math", "right", 85.0),
    "webwalker": Set(200, "qa", "f1", 20.8),
    "hotpotqa": Set(200, "qa", "f1", 51.9),
    "2wiki": Set(200, "qa", "f1"),
    "musique": Set(200, "qa", "f1"),
    "bamboogle": Set(125, "qa", "f1", 52.5),
    "gaia": Set(103, "qa", "right", 15.5),
    "hle": Set(500, "qa", "right", 8.0),
}
TEN, PAPER_MEAN = [*SETS][:10], 46.1  # the sets without GAIA and HLE, and the paper's mean of them
QUESTION = ("question", "problem")  # columns, in lower case and with _ for blanks
GOLDS = ("golden_answers", "final_answer", "answer", "solution")
NO = ("no", "false", "0", "0.0")  # how a column says that something is not so


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


def files_of(folder, name):
    """The files of a set, the preferred one first; [] without its folder. A Mistake if the folder
    has none."""
    place = Path(folder) / name
    if name == "2wiki" and not place.exists():
        place = Path(folder) / "2wikimultihopqa"  # FlashRAG's name
    found = [place / file for file in ("test.jsonl", "dev.jsonl") if (place / file).is_file()]
    if place.exists() and not found:
        raise Mistake(f"{place} holds neither test.jsonl nor dev.jsonl, see toolstar/sets.py")
    return found


def load_sets(folder, sample=0):
    """(tasks, {set: Counter of the rows that were left out, by cause}) of published sets.

    sample: number of questions per set, always the same ones; 0: all; None: as many as in [1].
    """
    tasks, causes = [], {}
    for name in SETS:
        kept = []
        for file in files_of(folder, name):  # the first with answers; some test splits have none
            kept, causes[name] = load_set(name, file)
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
        raise Mistake(f"{folder} holds no question of the sets {', '.join(SETS)}, each in a file "
                      f"such as gsm8k/test.jsonl: {causes}")
    return tasks


def load_set(name, file):
    """(tasks, Counter of the rows that were left out, by cause) of a file of a set."""
    kept, causes, ids, asked = [], Counter(), Counter(), set()
    for number, row in enumerate(read_rows(file), 1):
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
    values = {key.lower().replace(" ", "_"): value for key, value in row.items()}
    query = next((values[key] for key in QUESTION if key in values), None)
    if not isinstance(query, str) or not query.strip():
        return None, f"no question in its columns {', '.join(map(str, row)):.200}"
    if name == "hle" and str(values.get("image", "no")).lower() not in NO:
        return None, "needs an image"
    if name == "gaia" and "file_name" in values:
        return None, "needs a file"
    if str(values.get("answerable")).lower() in NO:
        return None, "has no answer by design"
    golds = golds_in(values, SETS[name].check)
    if not golds:
        return None, f"no gold answer in its columns {', '.join(map(str, row)):.200}"
    return {"id": f"{name}/{values.get('id', number)}", "set": name, "query": query, "golds": golds,
            "check": SETS[name].check}, ""


def golds_in(values, check):
    r"""The right answers of a row, from a column, after "####" or in a solution's box; [] if none.

    values: {column, as in GOLDS: its value}.
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
    more = golds_of(values.get("answer_aliases"))
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


def write_tasks(args):
    """Write the tasks of --sets, and print a line per set."""
    tasks, causes = load_sets(args.sets, args.sample)
    counts = Counter(task["set"] for task in tasks)
    for name in SETS:
        told = [f"{times} {cause}" for cause, times in causes.get(name, Counter()).items()]
        missing = [] if name in causes else [f"no folder of that name in {args.sets}"]
        print("; ".join([f"{name:12} {counts[name]:5} tasks", *told, *missing]))
    if not tasks:
        raise Mistake(f"{args.sets} holds no question with an answer, see above")
    write_jsonl(Path(args.out) / "tasks.jsonl", tasks)
