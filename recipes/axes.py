"""
Tabulate and draw an axis: one thing varied over several runs, beside the papers' numbers.

    (1) success    of each setting: the mean over its seeds, each seed's, and a 95% bootstrap
                   interval over tasks, where a task counts with all its plays
    (2) difference from the setting that was trained first, on the tasks that both have played, and
                   how many tasks or seeds would tell that difference from none
    (3) training   trained tokens and seconds of an update; a curve of success over the updates

`bash run.sh SIZE axis NAME` makes the runs of an axis and ends with this table.

Reads   OUT/eval/rl/episodes.jsonl of each run, and OUT/rl/log.jsonl if it was trained
Writes  OUT/AXIS.md and OUT/AXIS.png

    python -m recipes.axes --axis reward --out out/axes \\
        --runs sum=out/a/eval/rl sum=out/b/eval/rl macro=out/c/eval/rl
"""
import math
from pathlib import Path
from statistics import median

import runtime
from evaluate import interval, mean, name_of, plays_of, span
from look.report import drawing, log_rows, running_mean, scan, task_means
from runtime import Help, Parser

# Success on TravelPlanner's test set in per cent, 1.5B / 3B / 7B [STAR, arXiv:2603.21972 sec. 4].
# Rewards: under GRPO. Algorithms: under MACRO, at 7B under SUM. Data: 3B with the curriculum.
# Scale: the recipe of each size. Of failing tools it says that up to 5% do no harm and 10% do.
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
    # arXiv:2505.16410, ablation]. On masking it says only that without it the reward falls to -1
    "tool-reward": {"paper": "51.9 / 52.5 / 85.0 / 82.6", "answer": "50.4 / 50.3 / 83.1 / 80.2"},
    "tool-dpo": {"sft": "47.5 / 43.9 / 80.2 / 78.4", "rl": "49.8 / 48.3 / 82.8 / 77.8",
                 "rl+dpo": "51.9 / 52.5 / 85.0 / 82.6"},
    "tool-masking": {}, "tool-noise": {},
}
# minutes per update on 8, 8 and 16 A100-80G [STAR]
MINUTES = {"grpo": "8.0 / 8.6 / 9.0", "dapo": "8.2 / 8.9 / 9.5", "arpo": "9.5 / 13.3 / 13.3"}
HEAD = ["setting", "paper, test, 1.5B / 3B / 7B", "ours: mean (each seed)", "95% over tasks",
        "minus the first trained", "tasks, seeds to tell", "strict",
        "trained policy tokens / update", "s / update, median", "updates"]
TOOLS_HEAD = "paper, 3B: HotpotQA / Bamboogle / GSM8K / MATH"
GAUGE = ("gap", "decorative", "reward")  # in the tools world: means over the last tenth of updates


def read_runs(specs):
    """["NAME=OUT/eval/rl", ..] -> {NAME: [(episodes, RL's rows of OUT/rl/log.jsonl) per seed]}."""
    runs = {}
    for spec in specs:
        name, equals, folder = spec.partition("=")
        if not (name and equals and folder):
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
            print(f"{name}: no judged episodes in {folder} yet")
    if not any(runs.values()):
        raise ValueError("none of the --runs has judged episodes: train and evaluate them first "
                         "(bash run.sh SIZE axis NAME does)")
    return runs


# ------------------------------------------------------------------------------------- statistics

def difference(seeds, first):
    """Two cells: success minus that of the first trained setting, with its interval over tasks; and
    the tasks (with these seeds) and the seeds (with these tasks) that it takes to tell this
    difference from none in 80% of studies at a level of 5%, which is 2.8 standard errors."""
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
    within = span(*interval(of_tasks, -1), "+")
    return [f"{100 * change:+.1f} ({within})", ", ".join(needed)]


def last_tenth(seeds):
    """The cells of GAUGE: a mean over each seed's last tenth of updates, then over seeds."""
    ends = [updates[-math.ceil(len(updates) / 10):] for _, updates in seeds if updates]
    return [f"{mean(mean(row[key] for row in end) for end in ends):.3f}" if ends else ""
            for key in GAUGE]


# -------------------------------------------------------------------------- the table, the picture

def table_row(seeds, first):
    """The cells of a setting after the paper's number."""
    if not seeds:
        return ["not run"] + [""] * 7
    wins = [100 * mean(task_means(rows)) for rows, _ in seeds]
    rows = [row for rows, _ in seeds for row in rows]
    updates = [row for _, updates in seeds for row in updates]
    tokens = mean(row["loss_tokens"] for row in updates)
    took = [row["sync_s"] + row["play_s"] + row["judge_s"] + row["learn_s"] for row in updates]
    return [f"{mean(wins):.1f} ({', '.join(f'{win:.1f}' for win in wins)})",
            span(*interval(task_means(rows))),
            *(difference(seeds, first) if first and seeds is not first else ["", ""]),
            f"{100 * mean(row['strict'] for row in rows):.1f}",
            f"{tokens:,.0f}" if updates else "",
            f"{median(took):.1f}" if updates else "",
            ", ".join(sorted({str(len(updates)) for _, updates in seeds}))]


def table_of(axis, runs):
    """Markdown: the paper's number of each setting, and ours from {setting: its seeds}."""
    lines = [[*HEAD], ["---"] * len(HEAD)]
    first = next((seeds for seeds in runs.values() if seeds and seeds[0][1]), [])
    for name in runs | PAPER[axis]:  # settings that only the paper has come last
        lines.append([name, PAPER[axis].get(name, ""), *table_row(runs.get(name, []), first)])
    if axis == "algorithm":
        more = {"setting": "paper, min / update", "---": "---"} | MINUTES
        lines = [[*line, more.get(line[0], "")] for line in lines]
    if axis.startswith("tool-"):
        lines[0][1] = TOOLS_HEAD
        more = {"setting": [f"{key}, last tenth" for key in GAUGE], "---": ["---"] * len(GAUGE)}
        lines = [[*line, *more.get(line[0], last_tenth(runs.get(line[0], [])))] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw_success(axis, runs, picture):
    """Draw the success of the training plays, means over 5 updates; single seeds are thin."""
    # settings of data train on other tasks and those of noise with failing tools: the curves of
    # these two axes are not comparable
    trained = 0
    with drawing(picture, (8, 5)) as (plot,):
        for name, seeds in runs.items():
            wins = [[100 * row["success"] for row in updates] for _, updates in seeds if updates]
            lines = [running_mean(line, 5) for line in wins]
            middle = [mean(points) for points in zip(*lines, strict=False)]  # up to the shortest
            color = f"C{trained}"
            for line in lines:
                plot.plot(range(1, len(line) + 1), line, color, linewidth=0.6, alpha=0.6)
            if lines:
                plot.plot(range(1, len(middle) + 1), middle, color, linewidth=2.2, label=name)
                plot.legend()
                trained += 1
        plot.set(xlabel="update", ylabel="success of the training plays, %", title=axis)


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help, prog="python -m recipes.axes")
    add = p.add_argument
    add("--axis", choices=PAPER, required=True, help="which of the papers' numbers to print beside")
    add("--runs", nargs="+", required=True, metavar="NAME=OUT/eval/rl",
        help="evaluated runs: the setting's name and a folder of episodes; repeat a name per seed")
    add("--out", default="out/axes", help="folder to write AXIS.md and AXIS.png into")
    return p.parse_args(argv)


def tabulate(args):
    runs, out = read_runs(args.runs), Path(args.out)
    page, picture = out / f"{args.axis}.md", out / f"{args.axis}.png"
    draw_success(args.axis, runs, picture)
    text = table_of(args.axis, runs)
    runtime.write_text(page, text)
    print(f"{text}\n{page}: this table; open {picture} for success over the updates")


def main(argv=None):
    runtime.run("recipes.axes", tabulate, flags(argv))


if __name__ == "__main__":
    main()
