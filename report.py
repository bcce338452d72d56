"""Look at runs: the page, curves, axes, a trace, TensorBoard and wandb.
"""
import argparse
import base64
import gzip
import json
import math
import os
import re
from functools import partial
from pathlib import Path
from statistics import median

from constraints import COMMONSENSE, HARD
from evaluate import COUNTS, STOPS, by_task, interval, mean, pass_at, read_jsonl, read_played, scan, span, task_rates

def log_rows(log):
    """A training log's rows in the order of steps. A resumed run goes over some steps again: the last word counts."""
    rows = {row["step"]: row for _, row in scan(log, True, **FINITE) if "step" in row}
    return [rows[step] for step in sorted(rows)]


def curves(log, picture):
    """Draw success, reward, entropy and |dlogp| over the steps of a training log into a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot

    rows = log_rows(log)
    panels = {"success": ("success", "strict", "val_success"), "reward": ("reward",), "entropy": ("entropy",),
              "|dlogp|, engine to trainer": ("dlogp_mean", "dlogp_max")}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True)
    for axis, (title, keys) in zip(axes.flat, panels.items()):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                axis.plot(*zip(*points), label=key, marker="." if key == "val_success" else None)
                axis.legend()
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[1][1].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def trace(spec):
    """Print an episode as a dialogue. spec: an episodes.jsonl, or one and :ID."""
    path, _, name = spec.partition(".jsonl:")
    rows = read_jsonl(path + ".jsonl" if name else path)
    rows = [row for row in rows if not name or row["task"].get("id") == name]
    if not rows:
        raise ValueError(f"{spec}: no such episode")
    for message in rows[0]["messages"]:
        print(f"--- {message['role']}\n{message['content']}\n")
    print(f"--- stop: {rows[0]['stop']}")
    for check, (passed, reason) in rows[0].get("score", {}).get("checks", {}).items():
        print(f"{'-' if passed is None else 'ok' if passed else 'NO':3} {check}{': ' + reason if reason else ''}")


# ---------------------------------------------------------------------------------------------------------------- axis

# Success on TravelPlanner's test set in per cent, 1.5B / 3B / 7B, from the tables of STAR, arXiv:2603.21972, section 4:
# rewards under GRPO; algorithms under MACRO, at 7B under SUM; data with 3B and the curriculum; scale at its best, which
# is ARPO with MACRO, GRPO with the curriculum, GRPO with SUM. Of failing tools it says in words that up to 5% do no
# harm and 10% do.
PAPER = {
    "reward": {"sft": "6.9 / 12.2 / 19.7", "sum": "33.1 / 47.0 / 62.8", "macro": "30.1 / 48.2 / 58.9",
               "success": "33.8 / 46.6 / 60.9", "curriculum": "34.9 / 49.9 / 57.0"},
    "algorithm": {"sft": "6.9 / 12.2 / 19.7", "grpo": "30.1 / 48.2 / 62.8", "dapo": "36.9 / 45.6 / 58.4",
                  "arpo": "37.5 / 47.5 / 58.3"},
    "data": {"sft": "- / 12.2 / -", "100-prompts": "- / 37.5 / -", "1000-prompts": "- / 49.9 / -",
             "easy": "- / 45.3 / -", "medium": "- / 41.1 / -", "hard": "- / 25.9 / -", "mixed": "- / 49.9 / -"},
    "noise": {},
    "scale": {"1.5b-sft": "6.9", "1.5b": "37.5", "3b-sft": "12.2", "3b": "49.9", "7b-sft": "19.7", "7b": "62.8"},
}
# and its minutes per update, on 8, 8 and 16 A100-80G
PAPER_MINUTES = {"grpo": "8.0 / 8.6 / 9.0", "dapo": "8.2 / 8.9 / 9.5", "arpo": "9.5 / 13.3 / 13.3"}
UPDATE_SECONDS = ("sync_s", "play_s", "judge_s", "learn_s")


def read_runs(specs):
    """["NAME=OUT/eval/rl", ...] -> {NAME: [(episodes, updates)]}, a pair per seed: OUT/rl/log.jsonl's lines of RL."""
    runs = {}
    for spec in specs:
        name, _, folder = spec.partition("=")
        seeds, folder = runs.setdefault(name, []), Path(folder)
        log = folder.parent.parent / folder.name / "log.jsonl"
        lines = read_jsonl(log) if log.exists() else []
        if (folder / "episodes.jsonl").exists():
            seeds.append((read_played(folder / "episodes.jsonl"), [line for line in lines if "loss_tokens" in line]))
        else:
            print(f"{name}: {folder} holds no episodes.jsonl yet")
    return runs


def axis_row(seeds):
    """Cells of one setting from its [(episodes, updates)]; the interval is over tasks, each the mean of its seeds."""
    if not seeds:
        return ["not run"] + [""] * 5
    wins = [task_rates(rows) for rows, _ in seeds]
    rows = [row for rows, _ in seeds for row in rows]
    lines = [line for _, lines in seeds for line in lines]
    tokens = mean(line["loss_tokens"] for line in lines)
    seconds = median(sum(line[key] for key in UPDATE_SECONDS) for line in lines) if lines else 0
    means = [mean(rates.values()) for rates in wins]
    return [f"{100 * mean(means):.1f} ({', '.join(f'{100 * win:.1f}' for win in means)})",
            span(*interval(list(task_rates(rows).values()))), f"{100 * mean(row['strict'] for row in rows):.1f}",
            f"{tokens:,.0f}" if lines else "", f"{seconds:.1f}" if lines else "",
            ", ".join(sorted({str(len(lines)) for _, lines in seeds}))]


def axis_table(axis, runs):
    """Markdown: the paper's number of each setting, and ours from {setting: [(episodes, updates)]}."""
    lines = [["setting", "paper, test, 1.5B / 3B / 7B", "ours: mean (each seed)", "95% over tasks", "strict",
              "trained policy tokens / update", "s / update, median", "updates"]]
    settings = [*runs, *(name for name in PAPER[axis] if name not in runs)]  # what only the paper has stands below
    lines += [[name, PAPER[axis].get(name, ""), *axis_row(runs.get(name, []))] for name in settings]
    if axis == "algorithm":
        lines = [[*line, PAPER_MINUTES.get(line[0], "")] for line in lines]
        lines[0][-1] = "paper, min / update"
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def axis_curves(axis, runs, picture):
    """Draw the success of the training plays over the updates: a colour per setting, seeds thin, their mean thick.

    Both are means over the last 5 updates; plays of other tasks (axis data) or of failing tools (noise) differ.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot

    trained = {name: [[line["success"] for line in lines] for _, lines in seeds if lines]
               for name, seeds in runs.items()}
    figure, plot = pyplot.subplots(figsize=(8, 5))
    for color, name in enumerate(name for name in trained if trained[name]):
        curves = [[100 * mean(c[max(0, i - 4) : i + 1]) for i in range(len(c))] for c in trained[name]]
        for curve in curves:
            plot.plot(range(1, len(curve) + 1), curve, color=f"C{color}", linewidth=0.6, alpha=0.6)
        middle = [mean(points) for points in zip(*curves)]
        plot.plot(range(1, len(middle) + 1), middle, color=f"C{color}", linewidth=2.2, label=name)
    plot.set(xlabel="update", ylabel="success of the training plays, %", title=axis)
    plot.grid(alpha=0.3)
    plot.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def compare_runs(a):
    """--axis: OUT/AXIS.md and OUT/AXIS.png of the --runs."""
    runs = read_runs(a.runs)
    Path(a.out).mkdir(parents=True, exist_ok=True)
    axis_curves(a.axis, runs, Path(a.out) / f"{a.axis}.png")
    text = axis_table(a.axis, runs)
    (Path(a.out) / f"{a.axis}.md").write_text(text)
    print(text)


# ------------------------------------------------------------------------------------------------------ the report page
# One HTML file of any folder of ours. Episodes are read line by line, and only what the page's list shows stays in
# memory; each whole record goes from its place in the file into an element of its own, packed (5,000 long episodes are
# else too much for a browser), and is read when it is opened.

dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False)


def finite(text):
    """A JSON number as a float; None for NaN and infinities, which a browser does not read."""
    return float(text) if math.isfinite(float(text)) else None


FINITE = {"parse_constant": finite, "parse_float": finite}


def write_report(run, out, limit):
    """Write OUT/report.html of a folder that holds log.jsonl, episodes.jsonl or rollouts/ anywhere below."""
    logs, folders = find_records(Path(run))
    entries = [entry for name, files in folders.items() for entry in gather(name, files)]
    kept = choose(entries, limit)
    sources, tasks, shown = list(folders), {}, []
    for entry in kept:
        place = tasks.setdefault((entry["id"], entry["level"], entry["query"]), len(tasks))
        row = {key: entry[key] for key in ("key", "step", "stop", "success", "reward", "failed")}
        shown.append(row | {"source": sources.index(entry["source"]), "task": place})
    standings = [standing(name, [entry for entry in entries if entry["source"] == name]) for name in sources]
    for one, files in zip(standings, folders.values()):
        settings = files[0].with_name("settings.json")
        one["temperature"] = json.loads(settings.read_text())["temperature"] if settings.exists() else None
    index = {"run": str(run), "total": len(entries), "checks": [*COMMONSENSE, *HARD], "logs": logs,
             "levels": ordered(("easy", "medium", "hard"), [entry["level"] for entry in entries]),
             "stops": ordered(STOPS, [entry["stop"] for entry in entries]),
             "sources": standings, "tasks": list(tasks), "episodes": shown}
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    head, middle, tail = re.split("<!-- (?:index|episodes) -->", template)
    page = Path(out) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    temporary = page.with_name(f".{page.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        # JSON that no HTML parser mistakes for anything else: ASCII, and without "<"
        file.writelines([head, '<script type="application/json" id="index">', dumps(index).replace("<", "\\u003c"),
                         "</script>", middle])
        for i, entry in enumerate(kept):
            packed = base64.b64encode(gzip.compress(dumps(reread(*entry["at"])).encode(), mtime=0)).decode()
            file.write(f'<script type="text/plain" id="e{i}">{packed}</script>\n')
        file.write(tail)
    os.replace(temporary, page)
    print(f"{page}: {len(kept)} of {len(entries)} episodes, {page.stat().st_size / 1e6:.1f} MB")


def reread(path, offset):
    """The record at an offset of a jsonl file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.readline(), **FINITE)


def find_records(run):
    """([{name, columns: {key: [number per step]}}], {folder: its files of episodes}) below a folder."""
    logs, folders = [], {}
    for path in sorted(run.rglob("*.jsonl"), key=lambda path: (path.parent.parent, path.stat().st_mtime_ns, path)):
        name = path.parent.relative_to(run).as_posix() if path.parent != run else run.resolve().name
        if path.name == "log.jsonl":
            rows = log_rows(path)
            keys = {key for row in rows for key, value in row.items() if isinstance(value, (int, float))}
            logs.append({"name": name, "columns": {key: [row.get(key) for row in rows] for key in sorted(keys)}})
        elif path.name == "episodes.jsonl" or path.parent.name == "rollouts":
            folders.setdefault(name, []).append(path)
    if not logs and not folders:
        raise ValueError(f"{run} holds no log.jsonl, no episodes.jsonl and no rollouts/: name the folder of a run")
    return logs, folders


def gather(source, files):
    """What the page's list and tables say of each episode of a folder."""
    seen = {}
    for path in files:
        step = "" if path.name == "episodes.jsonl" else path.stem
        for offset, row in scan(path, True, **FINITE):
            task, score = row["task"], row.get("score") or {}
            checks = score.get("checks") or {}
            name = str(task.get("id", task.get("idx", "?")))
            key = "/".join(filter(None, (source, step, name))).encode("utf-8", "replace").decode()
            seen[key] = seen.get(key, 0) + 1
            entry = {key: row.get(key) for key in ("stop", "strict", *COUNTS)} | {
                "key": key if seen[key] == 1 else f"{key} #{seen[key]}", "source": source, "step": step, "id": name,
                "level": task.get("level"), "query": str(task.get("query", ""))[:1000], "at": (path, offset)}
            entry["success"] = score.get("success", score.get("em"))  # em: question answering
            entry["official"] = (row.get("official") or {}).get("success")
            entry["judged"] = [check for check, verdict in checks.items() if verdict[0] is not None]
            entry["failed"] = [check for check, verdict in checks.items() if verdict[0] is False]
            yield entry


def choose(entries, limit):
    """At most limit of them, tasks evenly spread and kept whole, so that what can be compared stays; rollouts last."""
    kept = []
    for training in (False, True):
        units, room = {}, limit - len(kept)
        for i, entry in enumerate(entries):
            if bool(entry["step"]) == training:
                units.setdefault((entry["step"], entry["id"]), []).append(i)
        units = list(units.values())
        number = len(units)
        while sum(map(len, picked := [units[i * len(units) // number] for i in range(number)])) > room:
            number = number * 99 // 100
        kept += [i for unit in picked for i in unit]
    return [entries[i] for i in sorted(kept)]


def standing(name, rows):
    """A folder's line of the page's tables: means over all its episodes."""
    plays = by_task((row["id"], row["success"]) for row in rows if row["success"] is not None)
    tasks = [mean(values) for values in plays.values()]
    levels, stops = ({row[key] for row in rows} - {None} for key in ("level", "stop"))
    return {key: mean(row[key] for row in rows) for key in ("success", "official", "strict", *COUNTS)} | {
        "name": name, "episodes": len(rows), "interval": interval(tasks) if tasks else None,
        "levels": {level: mean(row["success"] for row in rows if row["level"] == level) for level in levels},
        "stops": {stop: mean(row["stop"] == stop for row in rows) for stop in stops},
        "checks": {check: [sum(check in row["failed"] for row in rows), sum(check in row["judged"] for row in rows)]
                   for check in (*COMMONSENSE, *HARD)},
        "pass": {} if any(row["step"] for row in rows) else pass_at(plays)}


def ordered(first, found):
    """The values that occur, those of first in its order, then others."""
    return [value for value in first if value in found] + sorted(set(filter(None, found)) - set(first))


def export(log, to, folder):
    """Write a training log as TensorBoard's events into FOLDER/tensorboard, or as a run of wandb."""
    rows = [(row.pop("step"), {key: value for key, value in row.items() if isinstance(value, (int, float))})
            for row in log_rows(log)]
    try:
        if to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        else:
            import wandb
    except ImportError:
        raise ValueError(f"--to {to} needs a package that is not here: pip install {to}") from None
    if to == "tensorboard":
        with SummaryWriter(Path(folder) / "tensorboard") as writer:
            for step, numbers in rows:
                for key, value in numbers.items():
                    writer.add_scalar(key, value, step)
        return
    with wandb.init(project="star", name=str(Path(log).parent), dir=folder) as run:
        for step, numbers in rows:
            run.log(numbers, step=step)


# ---------------------------------------------------------------------------------------------------------------- main


def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("run",           nargs="?", metavar="RUN_DIR", help="write OUT/report.html: all that is to be seen of this folder")
    add("--out",         help="folder to write into [default: RUN_DIR]")
    add("--episodes",    type=int, default=5000, help="most episodes in the page; of more, evenly chosen")
    add("--curves",      action="store_true", help="draw RUN_DIR/log.jsonl into OUT/curves.png instead")
    add("--to",          choices=("tensorboard", "wandb"), help="hand RUN_DIR/log.jsonl to it instead")
    add("--trace",       metavar="EPISODES.jsonl[:ID]", help="print one episode as a dialogue instead")
    add("--axis",        choices=PAPER, help="tabulate the --runs beside the paper's numbers: OUT/AXIS.md, AXIS.png")
    add("--runs",        nargs="+", default=[], metavar="NAME=OUT/eval/rl", help="evaluated runs; a name per setting, "
        "once for each seed; OUT/rl/log.jsonl tells of their training")
    return p.parse_args(argv)


def look(a):
    if a.trace:
        return trace(a.trace)
    if a.axis:
        a.out = a.out or "out/eval"
        return compare_runs(a)
    if not a.run:
        raise ValueError("name the folder of a run, or --trace or --axis; --help says more")
    a.out = a.out or a.run
    if a.to:
        return export(Path(a.run) / "log.jsonl", a.to, a.out)
    if a.curves:
        Path(a.out).mkdir(parents=True, exist_ok=True)
        return curves(Path(a.run) / "log.jsonl", Path(a.out) / "curves.png")
    return write_report(a.run, a.out, a.episodes)


def main(argv=None):
    try:
        look(flags(argv))
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"report.py: {error}") from None


if __name__ == "__main__":
    main()
