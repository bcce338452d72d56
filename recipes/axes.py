"""
Tabulate and draw an axis: one thing varied over several runs, beside the papers' numbers.

    (1) success    of each setting: the mean over its seeds, each seed's, and a 95% bootstrap
                   interval over tasks, where a task counts with all its plays
    (2) difference from the setting that was trained first, on the tasks that both have played, and
                   how many tasks or seeds are needed to detect that difference
    (3) columns    of the paper's tables: commonsense and hard constraints, micro and macro, where
                   hard micro is the share of all constraints of all plans; and success by rules
                   without loopholes (strict)
    (4) training   trained tokens and seconds of an update; a curve of success over the updates
    (5) questions  instead of all that, with --questions: exact match out of domain, set by set
    (6) dead ends  with --axis backtrack: success, dead ends met, left and kept, and how often a
                   city is given up after a reply that quotes its list of hotels, and after others;
                   by the number of a task's dead ends and by level
    (7) episodes   with --axis episodes: the calls and tokens of a teacher's episodes, by level

`bash run.sh SIZE axis NAME` makes the runs of an axis and ends with this table.

Reads   docs/paper.json; of each run OUT/eval/rl/episodes.jsonl and, if it was trained,
        OUT/rl/log.jsonl; with --questions OUT/qa/tax.json
Writes  OUT/AXIS.md and OUT/AXIS.png, or OUT/AXIS-questions.md

    python -m recipes.axes --axis reward --out out/axes \\
        --runs sum=out/a/eval/rl sum=out/b/eval/rl macro=out/c/eval/rl
    python -m recipes.axes --axis episodes --runs data/full/sft.jsonl \\
        --model Qwen/Qwen2.5-7B-Instruct
"""
import json
import math
from pathlib import Path
from statistics import median

import runtime
from evaluate import interval, mean, plays_of, pooled, read_episodes, span
from look.report import log_rows, task_means
from runtime import COUNT, Help, Mistake, Parser
from sandbox import open_database
from travel.constraints import hard_counts
from travel.dead_ends import count_dead_ends, greedy_walk, visits
from travel.world import LEVELS

FILE = Path(__file__).parent.parent / "docs" / "paper.json"  # the papers' numbers, each once
KNOWN = json.loads(FILE.read_text(encoding="utf-8"))
TABLES, AXES, QUESTIONS = KNOWN["tables"], KNOWN["axes"], KNOWN["questions"]
PARTS = {"cs_micro": "commonsense micro", "cs_macro": "commonsense macro",
         "hard_micro": "hard micro", "hard_macro": "hard macro"}  # key of a score: column
TRAINING = ["trained policy tokens / update", "s / update, median", "updates"]
GAUGE = ("gap", "decorative", "reward")  # in the tools world: means over the last tenth of updates
WORDS = {  # what a paper says of an axis without a table
    "noise": ("The paper's figure in words: failures in up to {:g}% of the calls do no harm, in "
              "{:g}% they do.", "noise/failing"),
    "tool-masking": ("The paper in words: without masking the reward falls to {:g}.",
                     "masking/unmasked")}


# ------------------------------------------------------------------------------ the papers' numbers

def numbers_at(where):
    """The numbers at TABLE/ROW or TABLE/ROW/COLUMN of docs/paper.json."""
    table, row, *column = where.split("/")
    values = TABLES[table]["rows"][row]
    return [values[TABLES[table]["columns"].index(column[0])]] if column else values


def of_size(places, size):
    """The places of the numbers of one size, where the paper has them."""
    return {name: f"{where}/{size}" if size in TABLES[where.split("/")[0]]["columns"]
            and where.count("/") == 1 else where for name, where in places.items()}


def paper_cell(places, setting, part=""):
    """What the paper prints of a setting, "" if nothing. part: a column other than success or the
    mean: a part of the score, or a set of questions; its numbers are in a table of their own."""
    table, _, row = places.get(setting, "").partition("/")
    table += f"-{part}" * bool(part)
    if row.split("/")[0] not in TABLES.get(table, {"rows": ()})["rows"]:
        return ""
    values = numbers_at(f"{table}/{row}")
    return " / ".join("-" if value is None else f"{value:g}" if value < 0 else f"{value:.1f}"
                      for value in values)


def beside(ours, paper):
    """ours / paper, where the paper has a number."""
    return f"{ours or '-'} / {paper}" if paper else ours


def paper_head(places, judged):
    """The head of the paper's column: what it was judged on, and which sizes its numbers are of."""
    if not places:
        return f"paper, {judged}"
    table, _, *column = next(iter(places.values())).split("/")
    sizes = {where.split("/")[-1] for where in places.values()} if column else {}
    columns = TABLES[table]["columns"] if not column else sizes if len(sizes) == 1 else []
    return ", ".join(["paper", judged] + [" / ".join(columns).upper()] * bool(columns))


# ------------------------------------------------------------------------------------------- runs

def read_runs(specs):
    """["NAME=OUT/eval/rl", ..] -> {NAME: [(episodes, RL's rows of OUT/rl/log.jsonl) per seed]}."""
    runs = {}
    for name, folder in map(named_folder, specs):
        seeds = runs.setdefault(name, [])
        file, log = folder / "episodes.jsonl", folder.parent.parent / folder.name / "log.jsonl"
        rows = [row for row in read_episodes(file).values() if "score" in row]
        logged = log_rows(log).values() if log.exists() else ()
        updates = [row for row in logged if "loss_tokens" in row]
        if rows:
            seeds.append((rows, updates))
        else:
            print(f"{name}: no judged episodes in {folder} yet")
    if not any(runs.values()):
        raise Mistake("none of the --runs has judged episodes: train and evaluate them first "
                      "(bash run.sh SIZE axis NAME does)")
    return runs


def read_answers(specs):
    """["NAME=OUT/qa/rl", ..] -> {NAME: [what OUT/qa/tax.json says of rl, per seed]}."""
    runs = {}
    for name, folder in map(named_folder, specs):
        file, seeds = folder.parent / "tax.json", runs.setdefault(name, [])
        scores = json.loads(file.read_text()) if file.exists() else {}
        if folder.name in scores:
            seeds.append(scores[folder.name])
        else:
            print(f"{name}: no answered questions in {folder} yet")
    if not any(runs.values()):
        raise Mistake("none of the --runs has answered questions: QA=DIR RETRIEVER=URL in front "
                      "of bash run.sh SIZE axis NAME asks them")
    return runs


def named_folder(spec):
    """(NAME, folder) of NAME=OUT/eval/rl."""
    name, equals, folder = spec.partition("=")
    if not (name and equals and folder):
        raise Mistake(f"--runs {spec!r} is not NAME=OUT/eval/rl")
    return name, Path(folder)


# ------------------------------------------------------------------------------------- statistics

def gaps(seeds, others):
    """(success of each task that all have played, success of each seed), minus those of others."""
    import numpy as np

    plays = [[plays_of(rows) for rows, _ in each] for each in (seeds, others)]
    tasks = sorted(set.intersection(*map(set, plays[0] + plays[1])))
    ours, theirs = (np.array([[mean(wins[task]) for task in tasks] for wins in each])
                    for each in plays)  # (seeds, tasks)
    both = min(len(ours), len(theirs))
    return ours.mean(0) - theirs.mean(0), ours[:both].mean(1) - theirs[:both].mean(1)


def difference(seeds, first):
    """Two cells: success minus that of the first trained setting, with its interval over tasks; and
    the numbers of tasks (with these seeds) and of seeds (with these tasks) that detect this
    difference in 80% of studies at a level of 5%: it must be 2.8 standard errors."""
    of_tasks, of_seeds = gaps(seeds, first)
    if not len(of_tasks):
        return ["no task in common", ""]
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
        return ["not run"] + [""] * (4 + len(PARTS) + len(TRAINING))
    wins = [100 * mean(task_means(rows)) for rows, _ in seeds]
    rows = [row for rows, _ in seeds for row in rows]
    updates = [row for _, updates in seeds for row in updates]
    tokens = mean(row["loss_tokens"] for row in updates)
    parts = [pooled([part_of(row, part) for row in rows]) for part in PARTS]
    return [f"{mean(wins):.1f} ({', '.join(f'{win:.1f}' for win in wins)})",
            span(*interval(task_means(rows))),
            *(difference(seeds, first) if first and seeds is not first else ["", ""]),
            *("" if part is None else f"{100 * part:.1f}" for part in parts),
            f"{100 * mean(row['strict'] for row in rows):.1f}",
            f"{tokens:,.0f}" if updates else "",
            f"{median(map(seconds, updates)):.1f}" if updates else "",
            ", ".join(sorted({str(len(updates)) for _, updates in seeds}))]


def part_of(row, part):
    """A part of an episode's score; of hard micro the counts, (constraints met, asked)."""
    if part == "hard_micro" and "checks" in row["score"]:
        return hard_counts(row["task"], row["score"]["checks"])
    return row["score"].get(part)


def seconds(update):
    """How long an update took, without its validation."""
    return sum(update[f"{part}_s"] for part in ("sync", "play", "judge", "learn"))


def table_of(axis, runs, tasks="", gpus=0, size=None):
    """Markdown: the paper's number of each setting, and ours from {setting: its seeds}.

    tasks: the name of what ours were judged on; gpus: of each run, for the hours that they took.
    """
    places, tools = of_size(AXES[axis], size), axis.startswith("tool-")
    judged = {row["task"]["id"] for seeds in runs.values() for rows, _ in seeds for row in rows}
    for name, seeds in runs.items():
        if any(len({row["task"]["id"] for row in rows}) < len(judged) for rows, _ in seeds):
            print(f"{name}: judged on fewer tasks than the others; evaluate it to its end")
    ours = f"ours, {len(judged):,} tasks{f' of {tasks}' if tasks else ''}: mean (each seed)"
    test = f"{TABLES['queries']['rows']['test'][0]:,} test queries"
    head = ["setting", paper_head(places, "3B" if tools else test), ours, "95% over tasks",
            "minus the first trained", "tasks, seeds to tell", *PARTS.values(), "strict", *TRAINING]
    lines = [head, ["---"] * len(head)]
    judged = list(filter(None, runs.values()))
    # that was trained, else the first
    first = next((seeds for seeds in judged if seeds[0][1]), judged and judged[0])
    for name in runs | places:  # settings that only the paper has come last
        cells = [name, paper_cell(places, name), *table_row(runs.get(name, []), first)]
        for column, part in enumerate(PARTS, 6):
            cells[column] = beside(cells[column], paper_cell(places, name, part))
        lines.append(cells)
    more = cost_cells(runs, gpus) if axis == "algorithm" else gauge_cells(runs) if tools else {}
    lines = [[*line, *more.get(line[0], more.get("", []))] for line in lines]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    words, where = WORDS.get(axis, ("", ""))
    return text + (f"\n{words.format(*numbers_at(where))}\n" if words else "")


def cost_cells(runs, gpus):
    """{setting: ours and the paper's minutes per update and GPU hours}."""
    found = {"setting": ["min / update, median", "paper, min / update, 1.5B / 3B / 7B",
                         "GPU hours, all of RL", "paper, A100 hours, 1.5B / 3B / 7B"],
             "---": ["---"] * 4, "": [""] * 4}
    for name in runs | AXES["algorithm"]:
        took = [row for _, updates in runs.get(name, []) for row in updates]
        hours = mean(sum(seconds(row) + row["val_s"] for row in updates) / 3600
                     for _, updates in runs.get(name, []) if updates)
        paper = [" / ".join(f"{value:g}" for value in TABLES[table]["rows"].get(name, ()))
                 for table in ("minutes", "gpu-hours")]
        found[name] = [f"{median(map(seconds, took)) / 60:.2f}" if took else "", paper[0],
                       f"{hours * gpus:.1f}" if hours and gpus else "", paper[1]]
    return found


def gauge_cells(runs):
    """{setting: the means of GAUGE in the last tenth of its updates}."""
    return {"setting": [f"{key}, last tenth" for key in GAUGE], "---": ["---"] * len(GAUGE),
            "": [""] * len(GAUGE)} | {name: last_tenth(seeds) for name, seeds in runs.items()}


def questions_table(axis, runs, size=None):
    """Markdown: exact match out of domain, the paper's mean over the sets and ours, set by set."""
    places = of_size(QUESTIONS["all"] | QUESTIONS.get(axis, {}), size)
    played = dict.fromkeys(name for seeds in runs.values() for one in seeds for name in one["sets"])
    sets = played | dict.fromkeys(name.removeprefix("ood-") for name in TABLES
                          if name.startswith("ood-") and not name.startswith("ood-data"))
    columns = paper_head(places, "right answers, mean of its seven sets")
    head = ["setting", columns, f"ours, mean of {len(played)} sets (each seed)", *sets]
    lines = [head, ["---"] * len(head)]
    for name in runs | places:
        seeds, cells = runs.get(name, []), ["not run", *[""] * len(sets)]
        if seeds:
            each = ", ".join(f"{100 * one['em']:.1f}" for one in seeds)
            cells = [f"{100 * mean(one['em'] for one in seeds):.1f} ({each})"]
            cells += [f"{100 * value:.1f}" if value is not None else "" for value in (
                mean(one["sets"].get(name) for one in seeds) for name in sets)]
        cells[1:] = map(beside, cells[1:], (paper_cell(places, name, one) for one in sets))
        lines.append([name, paper_cell(places, name), *cells])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def dead_ends_table(runs, database):
    """Markdown: of each setting's plays of each level and number K of dead ends, success and what
    became of cities in which no hotel fits: the mean of the seeds (each seed's)."""
    lines = []
    for name, seeds in runs.items():
        groups = {}  # {kind of task: [numbers of its plays] per seed}
        for number, (rows, _) in enumerate(seeds):
            for row in rows:
                task, world = row["task"], database.of(row["task"])
                ends = f"K = {list(greedy_walk(task, world).values()).count(False)}"
                told = {"success": row["score"]["success"]}
                told |= count_dead_ends(row, world, ["hotel"])
                seen = visits(row, world)
                told |= {"next reply quotes the list": mean(read for read, _ in seen),
                         "then the city is given up": mean(gone for read, gone in seen if read),
                         "otherwise": mean(gone for read, gone in seen if not read)}
                for group in "all", ends, task["level"]:
                    groups.setdefault(group, [[] for _ in seeds])[number].append(told)
        for group, played in sorted(groups.items()):
            each = [{key: mean(told[key] for told in plays) for key in told} for plays in played]
            lines.append([name, group, str(len(played[0])), *(shares(each, key) for key in told)])
    head = ["setting", "tasks", "plays per seed", *told]
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *lines))


def shares(seeds, key):
    """The mean of a number over the seeds that have it (each seed's), in percent."""
    found = [100 * seed[key] for seed in seeds if seed[key] is not None]
    return f"{mean(found):.1f} ({', '.join(f'{x:.1f}' for x in found)})" if found else ""


def episodes_table(files, template):
    """Markdown: calls and tokens of the episodes in these files by level, then the paper's."""
    head = ["", "trajectories", "calls, mean", "tokens, mean", "tokens of the plan, mean"]
    lines, counts = [head, ["---"] * len(head)], {level: [] for level in (*LEVELS, "all")}
    for row in (row for file in files for row in read_episodes(file).values()):
        texts = template.text(row["messages"]), row["answer"] or ""
        for level in {row["task"].get("level"), "all"} & counts.keys():
            counts[level].append((row["calls"], *(len(template.encode(text)) for text in texts)))
    if not counts["all"]:
        raise Mistake(f"--runs {' '.join(files)}: no episodes; synth.py episodes makes them")
    for level, found in counts.items():
        means = [mean(column) for column in zip(*found, strict=True)] or [None] * 3
        lines.append([level, f"{len(found):,}",
                      *("" if value is None else f"{value:,.1f}" for value in means)])
    for level, (n, share, *means) in TABLES["levels"]["rows"].items():
        lines.append([f"paper, {level}", f"{n:,} ({share:g}%)", *(f"{x:,.1f}" for x in means)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw_success(axis, runs, picture):
    """Draw the success of the training plays, means over 5 updates; single seeds are thin."""
    from matplotlib.figure import Figure  # pyplot would look for a screen

    # settings of data train on other tasks and those of noise with failing tools: the curves of
    # these two axes are not comparable
    figure = Figure(figsize=(8, 5))
    plot, trained = figure.subplots(), 0
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
    plot.grid(alpha=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def running_mean(values, width):
    """The mean of each value and up to width - 1 before it."""
    return [mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help, prog="python -m recipes.axes")
    add = p.add_argument
    add("--axis", choices=[*AXES, "episodes"], required=True,
        help="which of the papers' numbers to print beside")
    add("--runs", nargs="+", required=True, metavar="NAME=OUT/eval/rl",
        help="evaluated runs: the setting's name and a folder of episodes; repeat a name per seed. "
        "Of --axis episodes: files of episodes")
    add("--tasks", default="", help="name of what the runs were judged on, for the table's head")
    add("--gpus", type=COUNT, help="GPUs of each run, for the hours that it took")
    add("--size", help="size of the models, to print the paper's numbers of that size alone")
    add("--questions", action="store_true", help="tabulate the questions out of domain that "
        "qa_eval.py asked; --runs are then NAME=OUT/qa/rl")
    add("--database", help="of --axis backtrack: folder of the tables that the tasks are about")
    add("--model", metavar="PATH", help="of --axis episodes: folder or hub name of the model whose "
        "tokenizer counts the tokens")
    add("--out", default="out/axes", help="folder to write AXIS.md and AXIS.png into")
    return p.parse_args(argv)


def tabulate(args):
    out = Path(args.out)
    page, picture = out / f"{args.axis}.md", out / f"{args.axis}.png"
    if (args.axis == "episodes") != bool(args.model):
        raise Mistake("--axis episodes and --model need each other")
    if (args.axis == "backtrack" and not args.questions) != bool(args.database):
        raise Mistake("--axis backtrack, without --questions, and --database need each other")
    if args.questions:
        page, text = out / f"{args.axis}-questions.md", questions_table(
            args.axis, read_answers(args.runs), args.size)
    elif args.model:
        text = episodes_table(args.runs, runtime.load_template(args.model))
    else:
        runs = read_runs(args.runs)
        draw_success(args.axis, runs, picture)
        text = table_of(args.axis, runs, args.tasks, args.gpus or 0, args.size)
        if args.database:
            text += "\n" + dead_ends_table(runs, open_database(args.database))
    runtime.write_text(page, text)
    shown = "" if args.questions or args.model else f"; open {picture} for success over the updates"
    print(f"{text}\n{page}: this table{shown}")


def main(argv=None):
    runtime.run("recipes.axes", tabulate, flags(argv))


if __name__ == "__main__":
    main()
