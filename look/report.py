"""
Look at runs: one page of everything, or what a flag asks for instead.

Reads   log.jsonl, episodes.jsonl, rollouts/*.jsonl, microscope/*.jsonl, *pairs*.jsonl, also of jobs
        that run; changes none of them
Writes  OUT/report.html, which fetches nothing: curves, scores, failures by check, every episode
        with its plan, verdicts, tool calls and turns, pairs side by side, training plays token by
        token; or OUT/curves.png, tensorboard/, AXIS.md, AXIS.png

    python -m look.report out/tiny                      # also out/tiny/rl or out/tiny/eval alone
    python -m look.report --trace out/tiny/eval/rl/episodes.jsonl:val-0001658
    python -m look.report --axis reward --runs sum=out/a/eval/rl macro=out/c/eval/rl
"""
import base64
import contextlib
import gzip
import importlib.util
import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import median

import evaluate
import runtime
from evaluate import STOPS, interval, mean, name_of, plays_of
from runtime import COUNT, NATURAL, Help, Parser
from travel.world import LEVELS

# Success on TravelPlanner's test set in per cent, 1.5B / 3B / 7B [STAR, arXiv:2603.21972 sec. 4]:
# rewards under GRPO; algorithms under MACRO, at 7B under SUM; data with 3B and the curriculum;
# scale by the recipe of each size. Of failing tools it says that up to 5% do no harm and 10% do.
PAPER = {
    "reward": {"sft": "6.9 / 12.2 / 19.7", "sum": "33.1 / 47.0 / 62.8",
               "macro": "30.1 / 48.2 / 58.9", "success": "33.8 / 46.6 / 60.9",
               "curriculum": "34.9 / 49.9 / 57.0"},
    "algorithm": {"sft": "6.9 / 12.2 / 19.7", "grpo": "30.1 / 48.2 / 62.8",
                  "dapo": "36.9 / 45.6 / 58.4", "arpo": "37.5 / 47.5 / 58.3"},
    "data": {"sft": "- / 12.2 / -", "100-prompts": "- / 37.5 / -", "1000-prompts": "- / 49.9 / -",
             "easy": "- / 45.3 / -", "medium": "- / 41.1 / -", "hard": "- / 25.9 / -",
             "mixed": "- / 49.9 / -"},
    "noise": {}, "memory": {},
    "scale": {"1.5b-sft": "6.9", "1.5b": "37.5", "3b-sft": "12.2", "3b": "49.9",
              "7b-sft": "19.7", "7b": "62.8"},
    # F1 or right answers in per cent, 3B: HotpotQA / Bamboogle / GSM8K / MATH [Tool-Star,
    # arXiv:2505.16410, ablation]; of masking it says that without it the reward falls to -1
    "tool-reward": {"paper": "51.9 / 52.5 / 85.0 / 82.6", "answer": "50.4 / 50.3 / 83.1 / 80.2"},
    "tool-dpo": {"sft": "47.5 / 43.9 / 80.2 / 78.4", "rl": "49.8 / 48.3 / 82.8 / 77.8",
                 "rl+dpo": "51.9 / 52.5 / 85.0 / 82.6"},
    "tool-masking": {}, "tool-noise": {},
}
AXIS_HEAD = ["setting", "paper, test, 1.5B / 3B / 7B", "ours: mean (each seed)", "95% over tasks",
             "less the first trained", "tasks, seeds to tell", "strict",
             "trained policy tokens / update", "s / update, median", "updates"]
GAUGE = ("gap", "decorative", "reward")  # of the tools world: their means in the last tenth
CURVES = {"success": ("success", "strict", "val_success"), "reward": ("reward",),
          "entropy": ("entropy",), "|dlogp|, engine to trainer": ("dlogp_mean", "dlogp_max")}
MEANS = ("success", "official", "strict", "reward", "turns", "calls", "tokens")


def finite(text):
    """A JSON number as a float; None for NaN and infinities, which a browser does not read."""
    return float(text) if math.isfinite(float(text)) else None


def scan(path, start=0):
    """(offset, record) of each whole line; a last one without its end is still being written."""
    with open(path, "rb") as lines:
        lines.seek(start)
        for number, line in enumerate(lines, 1):
            if line.strip() and line.endswith(b"\n"):
                try:
                    yield start, json.loads(line, parse_constant=finite, parse_float=finite)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            start += len(line)


def log_rows(log):
    """{step: {key: number}} of a training log; of a step that was logged twice, the last."""
    rows = {}
    for _, row in scan(log):
        if not isinstance(row, dict):
            raise ValueError(f"{log} is no training's log: it holds {str(row)[:60]}")
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        if "step" in numbers:
            step = numbers.pop("step")
            # a validation's line stands beside the update's
            rows[step] = (rows.get(step, {}) if "val_success" in numbers else {}) | numbers
    return rows


@contextlib.contextmanager
def drawing(picture, size, rows=1, columns=1):
    """The panels of a figure, to draw on; it is then saved as a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen

    figure = Figure(figsize=size)
    figure.subplots(rows, columns, sharex=True)
    yield figure.axes
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    with runtime.errors_name(picture):
        figure.savefig(picture, dpi=120)


def curves(log, picture):
    """Draw success, reward, entropy and |dlogp| over the steps of a training log into a PNG."""
    rows = log_rows(log)
    with drawing(picture, (10, 6), 2, 2) as panels:
        for panel, (title, keys) in zip(panels, CURVES.items(), strict=True):
            panel.set_title(title)
            for key in keys:
                line = {step: row[key] for step, row in rows.items() if key in row}
                if line:
                    marker = "." if key == "val_success" else None
                    panel.plot(line.keys(), line.values(), label=key, marker=marker)
                    panel.legend()
        panels[2].set(xlabel="step")
        panels[3].set(xlabel="step", yscale="log")


def export(log, to, folder):
    """Write a training log as TensorBoard's events into FOLDER/tensorboard, or as a wandb run."""
    if not importlib.util.find_spec(to):
        raise ValueError(f"--to {to} needs a package that is not here: pip install {to}")
    rows = log_rows(log).items()
    if to == "wandb":
        import wandb

        with wandb.init(project="star", name=str(log.parent), dir=folder) as board:
            for step, numbers in rows:
                board.log(numbers, step=step)
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "tensorboard") as board:
        for step, numbers in rows:
            for key, value in numbers.items():
                board.add_scalar(key, value, step)


def is_episode(row):
    """Whether a record is an episode, of whatever world and version."""
    return (isinstance(row, dict) and isinstance(row.get("task"), dict)
            and isinstance(row.get("messages"), list) and "stop" in row)


def trace(spec):
    """Print an episode as a dialogue. spec: FILE.jsonl, which means its first, or FILE.jsonl:ID."""
    path, colon, name = spec.partition(".jsonl:")
    rows = (row for _, row in scan(f"{path}.jsonl" if colon else path))
    rows = (row for row in rows if is_episode(row))
    episode = next((row for row in rows if not colon or str(row["task"].get("id")) == name), None)
    if episode is None:
        raise ValueError(f"{spec}: no such episode")
    for message in episode["messages"]:
        print(f"--- {message['role']}\n{message['content']}\n")
    print(f"--- stop: {episode['stop']}")
    marks = {True: "ok", False: "NO", None: "-"}
    for check, (passed, reason) in episode.get("score", {}).get("checks", {}).items():
        print(f"{marks[passed]:3} {check}{': ' if reason else ''}{reason or ''}")


# ------------------------------------------------------------------------------------------- axes

def read_runs(specs):
    """["NAME=OUT/eval/rl", ..] -> {NAME: [(episodes, OUT/rl/log.jsonl's rows of RL) per seed]}."""
    runs = {}
    for spec in specs:
        name, named, folder = spec.partition("=")
        if not (name and named and folder):
            raise ValueError(f"--runs {spec!r} is not NAME=OUT/eval/rl")
        seeds, folder = runs.setdefault(name, []), Path(folder)
        file, log = folder / "episodes.jsonl", folder.parent.parent / folder.name / "log.jsonl"
        rows = {}  # each play once
        for _, row in scan(file) if file.exists() else ():
            if isinstance(row, dict) and isinstance(row.get("task"), dict) and "score" in row:
                rows.setdefault(name_of(row["task"]), row)
        logged = log_rows(log).values() if log.exists() else ()
        updates = [row for row in logged if "loss_tokens" in row]
        if rows:
            seeds.append((list(rows.values()), updates))
        else:
            print(f"{name}: {folder} holds no judged episodes yet")
    return runs


def task_means(rows):
    """The success of each task, a mean over its plays."""
    return [mean(plays) for plays in plays_of(rows).values()]


def compared(seeds, first):
    """Two cells: success less that of the setting trained first, its interval over tasks; and how
    many tasks, with these seeds, or seeds, with these tasks, tell such a difference from none in
    80% of studies, at a level of 5%: it is then 2.8 standard errors."""
    import numpy as np

    plays = [[plays_of(rows) for rows, _ in each] for each in (seeds, first)]
    tasks = sorted(set.intersection(*map(set, plays[0] + plays[1])))
    if not tasks:
        return ["no task in common", ""]
    ours, theirs = (np.array([[mean(wins[task]) for task in tasks] for wins in each])
                    for each in plays)  # (seeds, tasks)
    both = min(len(ours), len(theirs))
    of_tasks = ours.mean(0) - theirs.mean(0)
    of_seeds = ours[:both].mean(1) - theirs[:both].mean(1)
    change = of_tasks.mean()
    needed = ["-" if abs(change) < 1e-9 or len(each) < 2 or not each.var()
              else f"{math.ceil(each.var(ddof=1) * (2.8 / change) ** 2):,}"
              for each in (of_tasks, of_seeds)]
    told = f"{100 * change:+.1f} ({evaluate.span(*interval(of_tasks, -1), '+')})"
    return [told, ", ".join(needed)]


def axis_row(seeds, first):
    """A setting's cells behind the paper's; intervals are over tasks, each with all its plays."""
    if not seeds:
        return ["not run"] + [""] * 7
    wins = [100 * mean(task_means(rows)) for rows, _ in seeds]
    rows = [row for rows, _ in seeds for row in rows]
    updates = [row for _, updates in seeds for row in updates]
    tokens = mean(row["loss_tokens"] for row in updates)
    took = [row["sync_s"] + row["play_s"] + row["judge_s"] + row["learn_s"] for row in updates]
    return [f"{mean(wins):.1f} ({', '.join(f'{win:.1f}' for win in wins)})",
            evaluate.span(*interval(task_means(rows))),
            *(compared(seeds, first) if first and seeds is not first else ["", ""]),
            f"{100 * mean(row['strict'] for row in rows):.1f}",
            f"{tokens:,.0f}" if updates else "",
            f"{median(took):.1f}" if updates else "",
            ", ".join(sorted({str(len(updates)) for _, updates in seeds}))]


def axis_table(axis, runs):
    """Markdown: the paper's number of each setting, and ours from {setting: its seeds}."""
    lines = [[*AXIS_HEAD], ["---"] * len(AXIS_HEAD)]
    first = next((seeds for seeds in runs.values() if seeds and seeds[0][1]), [])
    for name in runs | PAPER[axis]:  # what only the paper has stands below
        lines.append([name, PAPER[axis].get(name, ""), *axis_row(runs.get(name, []), first)])
    if axis == "algorithm":  # the paper's on 8, 8 and 16 A100-80G
        minutes = {"setting": "paper, min / update", "---": "---", "grpo": "8.0 / 8.6 / 9.0",
                   "dapo": "8.2 / 8.9 / 9.5", "arpo": "9.5 / 13.3 / 13.3"}
        lines = [[*line, minutes.get(line[0], "")] for line in lines]
    if axis.startswith("tool-"):
        lines[0][1] = "paper, 3B: HotpotQA / Bamboogle / GSM8K / MATH"
        more = {"setting": [f"{key}, last tenth" for key in GAUGE], "---": ["---"] * len(GAUGE)}
        lines = [[*line, *more.get(line[0], gauge(runs.get(line[0], [])))] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def gauge(seeds):
    """The cells of GAUGE: a mean over each seed's last tenth of updates, then over seeds."""
    ends = [updates[-math.ceil(len(updates) / 10):] for _, updates in seeds if updates]
    return [f"{mean(mean(row[key] for row in end) for end in ends):.3f}" if ends else ""
            for key in GAUGE]


def axis_curves(axis, runs, picture):
    """Draw the success of the training plays, means over 5 updates; seeds are drawn thin."""
    # not alike on two axes: data trains on other tasks, noise plays with tools that fail
    trained = 0
    with drawing(picture, (8, 5)) as (plot,):
        for name, seeds in runs.items():
            wins = [[100 * row["success"] for row in updates] for _, updates in seeds if updates]
            lines = [[mean(line[max(0, i - 4) : i + 1]) for i in range(len(line))] for line in wins]
            middle = [mean(points) for points in zip(*lines, strict=False)]  # up to the shortest
            color = f"C{trained}"
            for line in lines:
                plot.plot(range(1, len(line) + 1), line, color, linewidth=0.6, alpha=0.6)
            if lines:
                plot.plot(range(1, len(middle) + 1), middle, color, linewidth=2.2, label=name)
                plot.legend()
                trained += 1
        plot.set(xlabel="update", ylabel="success of the training plays, %", title=axis)


# --------------------------------------------------------------------------------------- the page

def write_report(folder, out, limit, plays):
    """Write OUT/report.html of the logs and episodes anywhere below a folder.

    limit: most episodes; plays: most of them to be shown token by token.
    """
    logs, sources = find_records(folder)
    entries = [entry for name, files in sources.items() for entry in entries_of(name, files)]
    kept = choose(entries, limit)
    for entry in choose([entry for entry in kept if entry["seen"]], plays):
        entry["play"] = entry["seen"]["name"]
    index = page_index(sources, entries, kept) | {"run": str(folder), "logs": logs}
    # in ASCII and without "<", so that no HTML parser mistakes it for anything else
    index = json.dumps(index, separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    head, middle, tail = re.split("<!-- (?:index|episodes) -->", template)
    page = out / "report.html"
    with runtime.replacing(page) as file:
        file.write(f'{head}<script type="application/json" id="index">{index}</script>{middle}')
        for number, entry in enumerate(kept):
            if "play" in entry:
                file.write(packed(f"t{number}", entry["seen"]["file"], entry["seen"]["offset"]))
            file.write(packed(f"e{number}", entry["file"], entry["offset"]))
        file.write(tail)
    print(f"{page}: {len(kept)} of {len(entries)} episodes, {page.stat().st_size / 1e6:.1f} MB")


def packed(name, path, offset):
    """A record as the page has it, which unpacks what is opened: all would be too much for it."""
    _, record = next(scan(path, offset))
    data = base64.b64encode(gzip.compress(json.dumps(record).encode(), mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{data}</script>\n'


def find_records(folder):
    """([{name, columns: {key: [number per step]}} of each log], {name: files of episodes})."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name that of a run")
    logs, sources, paths = [], {}, list(folder.rglob("*.jsonl"))
    paths.sort(key=lambda path: (path.parent.parent, path.stat().st_mtime_ns, path))
    for path in paths:
        name = path.parent.relative_to(folder).as_posix()
        name = folder.resolve().name if name == "." else name
        if path.name == "log.jsonl":
            rows = log_rows(path)
            columns = {key: [row.get(key) for row in rows.values()]
                       for key in sorted(set().union(*rows.values()))}
            logs.append({"name": name, "columns": columns | {"step": list(rows)}})
        elif (path.name == "episodes.jsonl" or path.parent.name == "rollouts"
              or "pairs" in path.stem):
            sources.setdefault(name, []).append(path)
    if not logs and not sources:
        raise ValueError(f"{folder} holds no log.jsonl, no episodes.jsonl and no rollouts/")
    return logs, sources


def entries_of(source, files):
    """The records of a folder's episodes, cut down to what the page's list and tables say."""
    seen, played = Counter(), set()  # a folder has one file of episodes
    for path in files:
        step, plays = "" if path.name == "episodes.jsonl" else path.stem, seen_plays(path)
        for number, (offset, row) in enumerate(scan(path)):
            pair = isinstance(row, dict) and "chosen" in row
            if not pair and not is_episode(row):
                raise ValueError(f"{path}: a record is no episode, but {str(row)[:60]}; delete it")
            score = row.get("score") or {}
            task = row.get("task", {"query": row["prompt"][-1]["content"]} if pair else {})
            if not step and "id" in task:  # each play counts once, as evaluate.py has it
                if name_of(task) in played:
                    continue
                played.add(name_of(task))
            name, level = str(task.get("id", "?")), str(task.get("level") or "") or None
            key = "/".join(filter(None, (source, step, name))).encode("utf-8", "replace").decode()
            seen[key] += 1
            entry = {"source": source, "step": step, "file": path, "offset": offset, "pair": pair}
            entry["seen"] = plays[number] if number < len(plays) else None
            entry["key"] = key if seen[key] == 1 else f"{key} #{seen[key]}"
            entry["task"] = {"id": name, "level": level, "query": str(task.get("query", ""))[:1000]}
            entry |= {name: None if pair else row.get(name) for name in ("stop", *MEANS)}
            entry["success"] = score.get("success", score.get("em"))  # em: of answered questions
            entry["official"] = score.get("official")
            if entry["success"] is not None:
                entry["score"] = {"success": entry["success"]}
            entry["checks"] = {check: found[0] for check, found in score.get("checks", {}).items()}
            yield entry


def seen_plays(path):
    """What --microscope kept of a file of rollouts, a line per line: name, file, offset."""
    tokens = path.parent.with_name("microscope") / path.name
    if path.parent.name != "rollouts" or not tokens.exists():
        return []
    return [{"name": row["name"], "file": tokens, "offset": offset} for offset, row in scan(tokens)]


def choose(entries, limit):
    """At most limit of them: tasks evenly spread, each with all its plays; rollouts come last."""
    units, kept = {}, []
    for i, entry in enumerate(entries):
        units.setdefault((entry["step"], entry["task"]["id"]), []).append(i)
    for training in (False, True):
        picked = part = [plays for (step, _), plays in units.items() if bool(step) == training]
        number = len(part)
        while sum(map(len, picked)) > limit - len(kept):
            number = number * 99 // 100
            picked = [part[i * len(part) // number] for i in range(number)]
        kept += [i for plays in picked for i in plays]
    return [entries[i] for i in sorted(kept)]


def page_index(sources, entries, kept):
    """What the page shows besides logs: how each folder stands, and the list of episodes kept."""
    checks = list(dict.fromkeys(check for entry in entries for check in entry["checks"]))
    levels = {entry["task"]["level"] for entry in entries} - {None}
    stops = {entry["stop"] for entry in entries}
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
            "checks": checks, "stops": [stop for stop in STOPS if stop in stops],
            "levels": [level for level in LEVELS if level in levels] + sorted(levels - {*LEVELS})}


def temperature(file):
    """The temperature that a folder's settings name; None where nobody knows."""
    with contextlib.suppress(ValueError, AttributeError, FileNotFoundError):
        return json.loads(file.read_text()).get("temperature")


def standing(rows, checks):
    """A folder's line of the page's tables: means over all its episodes."""
    plays = plays_of(rows)
    found = {key: mean(row[key] for row in rows) for key in MEANS}
    found |= {"episodes": len(rows), "interval": interval(task_means(rows)) if plays else None}
    found["pairs"] = bool(rows) and all(row["pair"] for row in rows)
    found["pass"] = {} if any(row["step"] for row in rows) else evaluate.pass_at(plays)
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
    add("run", nargs="?", metavar="RUN_DIR", help="a folder with logs or episodes anywhere below")
    add("--out", help="folder to write into; unset: RUN_DIR, with --axis out/eval")
    add("--episodes", type=COUNT, default=5000, help="most episodes in the page, evenly chosen")
    add("--tokens", type=NATURAL, default=400, metavar="PLAYS",
        help="most training plays shown token by token, of those that --microscope kept")
    add("--curves", action="store_true", help="draw RUN_DIR/log.jsonl into OUT/curves.png")
    add("--to", choices=("tensorboard", "wandb"), help="send RUN_DIR/log.jsonl to it")
    add("--trace", metavar="EPISODES.jsonl[:ID]", help="print the episode of task ID, or the first")
    add("--axis", choices=PAPER, help="tabulate and draw the --runs beside the paper's numbers")
    add("--runs", nargs="+", default=[], metavar="NAME=OUT/eval/rl",
        help="evaluated runs, a NAME per setting, once for each seed; reads OUT/rl/log.jsonl too")
    args = p.parse_args(argv)
    if args.axis and not args.runs:
        p.error(f"--axis {args.axis} needs --runs NAME=OUT/eval/rl")
    if not (args.run or args.trace or args.axis):
        p.error("name the folder of a run, or --trace or --axis")
    return args


def find_log(folder):
    """RUN_DIR/log.jsonl; where it is missing, the folders below that have one are named."""
    log = Path(folder, "log.jsonl")
    if not log.is_file():
        below = sorted(str(path.parent) for path in Path(folder).glob("**/log.jsonl"))
        elsewhere = f"these do: {', '.join(below[:3])}" if below else "name that of a training"
        raise ValueError(f"{folder} holds no log.jsonl; {elsewhere}")
    return log


def look(args):
    out = Path(args.out or args.run or "out/eval")
    if args.trace:
        trace(args.trace)
    elif args.axis:
        runs = read_runs(args.runs)
        axis_curves(args.axis, runs, out / f"{args.axis}.png")
        text = axis_table(args.axis, runs)
        runtime.write_text(out / f"{args.axis}.md", text)
        print(text)
    elif args.to:
        export(find_log(args.run), args.to, out)
    elif args.curves:
        curves(find_log(args.run), out / "curves.png")
    else:
        write_report(Path(args.run), out, args.episodes, args.tokens)


def main(argv=None):
    runtime.run("look.report", look, flags(argv))


if __name__ == "__main__":
    main()
