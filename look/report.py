"""
Look at a run: write one page with everything in it.

    (1) find    find every log.jsonl and every file of episodes below RUN_DIR, also of a run that is
                still writing, and change none of them
    (2) choose  every evaluation and, if there are more than MOST plays of training, those of evenly
                spread updates
    (3) write   write curves, scores, failures by check, and each episode with its plan, verdicts,
                tool calls and turns; pairs side by side; training plays token by token

The page is a single file that needs no server and no network. It shows a model's text only as text,
never as HTML.

Reads   log.jsonl, episodes.jsonl, rollouts/*.jsonl, microscope/*.jsonl, pairs/*.jsonl
Writes  OUT/report.html

    python -m look.report out/tiny          # or a part of it: out/tiny/rl, out/tiny/eval
"""
import base64
import contextlib
import gzip
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for python look/report.py
import evaluate
import runtime
from evaluate import STOPS, interval, mean, name_of, plays_of
from runtime import Help, Mistake, Parser
from travel.world import LEVELS

RULES = Path(__file__).parents[1] / "docs" / "rules.md"  # a sentence for each check of travel
MOST = 5000  # episodes that a page holds besides those of evaluations
PLAYS = 400  # most plays that are shown token by token
MEANS = ("success", "strict", "reward", "turns", "calls", "tokens")


def finite(text):
    """A JSON number as a float; None for NaN and infinities, which a browser does not read."""
    return float(text) if math.isfinite(float(text)) else None


def scan(path, start=0):
    """Yield (offset, record) of each whole line; a last line without a line break is skipped, since
    it is still being written."""
    with open(path, "rb") as lines:
        lines.seek(start)
        for number, line in enumerate(lines, 1):
            if line.strip() and line.endswith(b"\n"):
                try:
                    yield start, json.loads(line, parse_constant=finite, parse_float=finite)
                except (ValueError, RecursionError) as error:
                    raise Mistake(f"{path}, line {number}: not JSON ({error})") from None
            start += len(line)


def log_rows(log):
    """{step: {key: number}} of a training log. If a resumed run has logged a step again, the last
    line counts."""
    rows = {}
    for _, row in scan(log):
        if not isinstance(row, dict):
            raise Mistake(f"{log} is not a training log: a line of it is {str(row)[:60]}")
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        if "step" in numbers:
            step = numbers.pop("step")
            # a validation has a line of its own for the step of an update
            rows[step] = (rows.get(step, {}) if "val_success" in numbers else {}) | numbers
    return rows


# --------------------------------------------------------------------------------------- the page

def write_report(folder, out):
    """Write OUT/report.html from the logs and episodes below a folder."""
    logs, sources = find_records(folder)
    entries = [entry for name, files in sources.items() for entry in entries_of(name, files)]
    kept = choose(entries)
    seen = [entry for entry in kept if entry["tokens_at"]]
    for entry in seen[::math.ceil(len(seen) / PLAYS) or 1]:
        entry["play"] = entry["tokens_at"][0]
    index = page_index(sources, entries, kept) | {"run": str(folder), "logs": logs}
    index["rules"] = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", RULES.read_text(), re.MULTILINE))
    # in ASCII and without "<", so that an HTML parser finds no tag in it
    index = json.dumps(index, separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    head, middle, tail = re.split("<!-- (?:index|episodes) -->", template)
    page = out / "report.html"
    with runtime.replacing(page) as file:
        file.write(f'{head}<script type="application/json" id="index">{index}</script>{middle}')
        for number, entry in enumerate(kept):
            file.write(packed(f"e{number}", entry["file"], entry["offset"]))
            if "play" in entry:
                file.write(packed(f"t{number}", *entry["tokens_at"][1:]))
        file.write(tail)
    size = page.stat().st_size / 1e6
    print(f"{page}: {len(kept)} of {len(entries)} episodes, {size:.1f} MB; open it in a browser")


def packed(name, path, offset):
    """A record in the page, compressed: the page unpacks the episodes that are opened."""
    _, record = next(scan(path, offset))
    data = base64.b64encode(gzip.compress(json.dumps(record).encode(), mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{data}</script>\n'


def time_of(path):
    """When the evaluated model was saved, where that is known: a clone's files are all of now."""
    settings = path.with_name("settings.json")
    known = json.loads(settings.read_text()) if settings.exists() else {}
    return known.get("saved") or path.stat().st_mtime


def find_records(folder):
    """([{name, columns: {key: [number per step]}} of each log], {name: files of episodes})."""
    logs, sources, paths = [], {}, list(folder.rglob("*.jsonl"))
    paths.sort(key=lambda path: (path.parent.parent, time_of(path), path))
    for path in paths:
        name = path.parent.relative_to(folder).as_posix()
        name = folder.resolve().name if name == "." else name
        if path.name == "log.jsonl":
            rows = log_rows(path)
            columns = {key: [row.get(key) for row in rows.values()]
                       for key in sorted(set().union(*rows.values()))}
            logs.append({"name": name, "columns": columns | {"step": list(rows)}})
        elif path.name == "episodes.jsonl" or path.parent.name in ("rollouts", "pairs"):
            sources.setdefault(name, []).append(path)
    if not logs and not sources:
        raise Mistake(f"{folder}: no log.jsonl, episodes.jsonl or rollouts/ anywhere below it; "
                      "name the folder of a run, such as out/tiny")
    return logs, sources


def entries_of(source, files):
    """The episodes of a folder, reduced to what the list and the tables of the page show."""
    seen, played = Counter(), set()
    for path in files:
        step = "" if path.name == "episodes.jsonl" else path.stem
        plays = seen_plays(path)
        for number, (offset, row) in enumerate(scan(path)):
            pair = "chosen" in row
            if not pair and not {"task", "messages", "stop"} <= {*row}:
                raise Mistake(f"{path}: a line is not an episode: {str(row)[:60]}; delete it")
            score = row.get("score") or {}
            task = row.get("task", {"query": row["prompt"][-1]["content"]} if pair else {})
            if not step and "id" in task:  # each play counts once, as in evaluate.py
                if name_of(task) in played:
                    continue
                played.add(name_of(task))
            name, level = str(task.get("id", "?")), str(task.get("level") or "") or None
            key = "/".join(filter(None, (source, step, name))).encode("utf-8", "replace").decode()
            seen[key] += 1
            entry = {"source": source, "step": step, "file": path, "offset": offset, "pair": pair}
            entry["tokens_at"] = plays[number] if number < len(plays) else None
            entry["key"] = key if seen[key] == 1 else f"{key} #{seen[key]}"
            entry["task"] = {"id": name, "level": level, "query": str(task.get("query", ""))[:1000]}
            entry |= {name: None if pair else row.get(name) for name in ("stop", *MEANS)}
            entry["success"] = score.get("success")
            if entry["success"] is not None:
                entry["score"] = {"success": entry["success"]}
            entry["checks"] = {check: found[0] for check, found in score.get("checks", {}).items()}
            yield entry


def seen_plays(path):
    """[(name, file, offset)] of the plays of a file of rollouts that --microscope kept, in its
    order."""
    tokens = path.parent.with_name("microscope") / path.name
    if path.parent.name != "rollouts" or not tokens.exists():
        return []
    return [(row["name"], tokens, offset) for offset, row in scan(tokens)]


def choose(entries):
    """All entries of evaluations; of the others those of every so-many-th update, if there are more
    than MOST."""
    updates = Counter((entry["source"], entry["step"]) for entry in entries if entry["step"])
    kept = {*list(updates)[::math.ceil(updates.total() / MOST) or 1]}
    return [entry for entry in entries
            if not entry["step"] or (entry["source"], entry["step"]) in kept]


def page_index(sources, entries, kept):
    """The data of the page without the logs: each folder's numbers, and the list of episodes."""
    checks = list(dict.fromkeys(check for entry in entries for check in entry["checks"]))
    levels = {entry["task"]["level"] for entry in entries} - {None}
    stops = {str(entry["stop"]) for entry in entries if entry["stop"]}
    standings, tasks, shown = [], {}, []
    for name, files in sources.items():
        rows = [entry for entry in entries if entry["source"] == name]
        told = {"name": name, "temperature": temperature(files[0].with_name("settings.json"))}
        standings.append(told | standing(rows, checks))
    for entry in kept:
        row = {key: entry[key] for key in ("key", "step", "stop", "success", "reward", "pair")}
        row["play"] = entry.get("play")
        row["source"] = list(sources).index(entry["source"])
        row["task"] = tasks.setdefault(tuple(entry["task"].values()), len(tasks))
        row["failed"] = [check for check, passed in entry["checks"].items() if passed is False]
        shown.append(row)
    return {"total": len(entries), "sources": standings, "tasks": list(tasks), "episodes": shown,
            "checks": checks, "stops": ordered(stops, STOPS), "levels": ordered(levels, LEVELS)}


def ordered(found, usual):
    """The values that were found: the usual ones in their order, then those of other worlds."""
    return [value for value in usual if value in found] + sorted(found - {*usual})


def temperature(file):
    """The temperature in a folder's settings, None if it is unknown."""
    with contextlib.suppress(ValueError, AttributeError, FileNotFoundError):
        return json.loads(file.read_text()).get("temperature")


def task_means(rows):
    """The success of each task: a mean over its plays."""
    return [mean(plays) for plays in plays_of(rows).values()]


def standing(rows, checks):
    """A folder's line in the tables of the page: means over all its episodes."""
    plays = plays_of(rows)
    found = {key: mean(row[key] for row in rows) for key in MEANS}
    found |= {"episodes": len(rows), "interval": interval(task_means(rows)) if plays else None}
    found["pairs"] = bool(rows) and all(row["pair"] for row in rows)
    found["evaluated"] = not any(row["step"] for row in rows)
    found["pass"] = evaluate.pass_at(plays) if found["evaluated"] else {}
    found["stops"] = {stop: mean(row["stop"] == stop for row in rows)
                      for stop in {row["stop"] for row in rows}}
    levels = {row["task"]["level"] for row in rows} - {None}
    found["levels"] = {level: mean(row["success"] for row in rows if row["task"]["level"] == level)
                       for level in levels}
    found["checks"] = {}
    for check in checks:
        verdicts = [row["checks"].get(check) for row in rows]
        found["checks"][check] = [verdicts.count(False), len(rows) - verdicts.count(None)]
    return found


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("run", metavar="RUN_DIR",
        help="folder of a run: its logs and episodes may lie anywhere below")
    add("--out", help="folder to write into (default: RUN_DIR)")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    runtime.run("look.report", write_report, Path(args.run), Path(args.out or args.run))


if __name__ == "__main__":
    main()
