"""
Faults of agentic RL and how they look: train tiny with each, and put its log beside the right one.

    (1) copy    copy grpo.py, zero3.py and runtime.py, apply a diff of variants/faults/, and lift
                what would stop the stage (the bound on dlogp_mean, the comparison of weights), so
                that the curves go on
    (2) train   train each copy on the CPU, from the same SFT model for the same updates; the right
                stage too, with several seeds and with the flags that a fault needs
    (3) write   write a page: a table of the log's keys, a picture of them, and each fault

A run that has ended is not repeated. bash run.sh tiny makes the model, the tasks and their worlds.

Reads   a HF folder, tasks and worlds of tiny, variants/faults/*.diff
Writes  OUT/NAME/ (each run), PAGE/faults.md, PAGE/faults.png

    python variants/faults.py --page docs
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import runtime  # noqa: E402
from runtime import COUNT, Help, Mistake, Parser  # noqa: E402

FAULTS = {diff.stem: diff for diff in sorted((ROOT / "variants" / "faults").glob("*.diff"))}
FIELDS = "Happened", "To see", "Not to see", "Stopped by", "Flags"  # of a diff's head
# at a temperature of 1, temperature-missing would not show; overlength plays are not in the loss
TINY = """--system-prompt short --max-turns 9 --lr 1.5e-4 --decay 0.5 --temperature 0.8
          --context 1024 --turn-tokens 256 --concurrency 64 --keep-activations 4096
          --pack-tokens 4096 --resume"""
KEYS = ("reward", "success", "overlength", "uniform", "tokens", "loss_tokens", "entropy", "gnorm",
        "clip_low", "clip_high", "dlogp_mean", "dlogp_max")
DRAWN = ("success", "loss_tokens", "entropy", "dlogp_mean")
BOUND, BF16 = 1e-4, 0.05  # grpo.py's on dlogp_mean, in float32 and bfloat16


def flags():
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("--model", default="out/tiny/sft", help="SFT model to start from")
    add("--tasks", default="out/tiny/data/rl.jsonl", help="queries to play")
    add("--database", default="out/tiny/data/worlds", help="the worlds of the queries")
    add("--steps", type=COUNT, default=20, help="updates of each run")
    add("--prompts", type=COUNT, default=4, help="queries per update")
    add("--group", type=COUNT, default=4, help="plays per query")
    add("--reward", default="macro", help="the reward of each run")
    add("--seeds", type=COUNT, default=3, help="right runs, to see what a seed changes")
    add("--ranks", type=COUNT, default=2, help="processes of each run")
    add("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME",
        help=f"some of the faults: {', '.join(FAULTS)}")
    add("--out", default="out/faults", help="folder of the runs")
    add("--page", help="folder of faults.md and faults.png (default: OUT)")
    return p.parse_args()


def read_fault(name):
    """A diff of variants/faults -> {field: text}, with its first sentence as "what" """
    head, diff = re.split(r"^(?=--- )", FAULTS[name].read_text(), maxsplit=1, flags=re.MULTILINE)
    what, *fields = re.split(rf"^({'|'.join(FIELDS)}): ", head, flags=re.MULTILINE)
    texts = [" ".join(text.split()) for text in fields[1::2]]
    return {"what": what.strip(), "Flags": "", "diff": diff} | dict(
        zip(fields[::2], texts, strict=True))


def train(name, more, args, fault=None):
    """(1) (2) Train a copy of the stage with a fault, or the right one -> the lines of its log"""
    out = Path(args.out) / name.replace(" ", "_")
    ended, code = out / "ended", out / "code"
    command = ["torchrun", "--standalone", "--nproc_per_node", args.ranks, code / "grpo.py",
               "--model", args.model, "--tasks", args.tasks, "--database", args.database,
               "--steps", args.steps, "--prompts", args.prompts, "--group", args.group,
               "--reward", args.reward, *TINY.split(), *more.split(), "--out", out]
    command = shlex.join(map(str, command))
    if not ended.exists():
        code.mkdir(parents=True, exist_ok=True)
        for file in ("grpo.py", "runtime.py", "zero3.py"):
            shutil.copy(ROOT / file, code)
        if fault:
            file = re.match("--- (.+)", fault["diff"])[1]
            subprocess.run(["patch", "-s", code / file], input=fault["diff"], text=True, check=True)
        stage = (code / "grpo.py").read_text().replace("zero3.check_weights(llm, trainer)", "pass")
        stage = re.sub(r"(?m)^MAX_DLOGP = .*", 'MAX_DLOGP = {"cpu": math.inf, "cuda": math.inf}',
                       stage)
        runtime.write_text(code / "grpo.py", stage)
        print(f"{name}: {command}", flush=True)
        with open(out / "said.txt", "w") as said:
            done = subprocess.run(shlex.split(command), stdout=said, stderr=said,
                                  env=os.environ | {"PYTHONPATH": str(ROOT),
                                                    "CUDA_VISIBLE_DEVICES": ""})
        if done.returncode:
            raise Mistake(f"{name} ended early: see {out}/said.txt")
        runtime.write_text(ended, command)
    if ended.read_text() != command:
        raise Mistake(f"{out} was made by another command, see {ended}: choose another --out")
    rows = runtime.read_jsonl(out / "log.jsonl")
    for row in rows:  # w is 1 in the first of an update's minibatches, so look at all of them
        for key in ("clip_low", "clip_high"):
            row[key] = mean(part[key] for part in (row, *row["minibatches"]))
    return rows


def late(rows, key):
    """The mean of a key over the last quarter of a run's updates."""
    return mean(row[key] for row in rows[-max(1, len(rows) // 4):])


def table_of(runs, right, seeds, faults):
    """late() of each run. Bold: further from the right run than twice the range of the `seeds`; not
    for a fault with flags of its own, which changes what is usual. runs: {name: log}; right:
    {fault: name of its right run}; faults: {name: read_fault(name)}"""
    lines = [["", *KEYS, "stops", "stops in bf16"], ["---"] * (len(KEYS) + 3)]
    for name, rows in runs.items():
        cells = []
        for key in KEYS:
            value, known = late(rows, key), [late(runs[seed], key) for seed in seeds]
            bold = right.get(name) == seeds[0] and (
                abs(value - known[0]) > 2 * (max(known) - min(known)))
            cell = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
            cells.append(f"**{cell}**" if bold else cell)
        for bound in (BOUND, BF16):
            over = [f"update {row['step']}" for row in rows if not row["dlogp_mean"] <= bound]
            cells += (over or ["–"])[:1]
        if name in faults and "check_weights" in faults[name]["Stopped by"]:
            cells[-1] = "weights"
        lines.append([name, *cells])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw(runs, right, seeds, picture):
    """A row of plots for each fault, which is red; its right run is black."""
    from matplotlib.figure import Figure  # pyplot would look for a screen

    figure = Figure(figsize=(1.8 * len(DRAWN), 1.3 * len(right)))
    grid = figure.subplots(len(right), len(DRAWN), squeeze=False)
    for plots, (name, its_right) in zip(grid, right.items(), strict=True):
        for plot, key in zip(plots, DRAWN, strict=True):
            for run in (*seeds, its_right, name):
                color = {name: "tab:red", its_right: "black"}.get(run, "silver")
                plot.plot([row["step"] for row in runs[run]], [row[key] for row in runs[run]],
                          color, linewidth=1)
            if key == "dlogp_mean":
                plot.axhline(BOUND, color="tab:red", linestyle=":")
                plot.set_yscale("log")
            plot.tick_params(which="both", labelsize=5)
        plots[0].set_ylabel(name, fontsize=7)
    for plot, key in zip(grid[0], DRAWN, strict=True):
        plot.set_title(key, fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(picture, dpi=100)


def page_of(faults, table, args):
    """The text of faults.md."""
    size = f"{args.steps} updates of {args.prompts} x {args.group} plays on {args.ranks} ranks"
    parts = [f"""# Faults of agentic RL, and how they look

Each fault is a diff in `variants/faults/`, and this page was made by

    python {shlex.join(sys.argv)}

which trains on a CPU, from the SFT model of `bash run.sh tiny`: {size}
in each run. Numbers are means over the last quarter of the updates, of the first minibatch if there
are several; `clip_*` are over all. A number is bold if it differs from that of the right run by
more than twice what the right runs of {args.seeds} seeds differ; with so few plays that can be
chance, too, and the other numbers are no evidence. A fault with flags of its own has no bold ones.
`stops` is the update at which `grpo.py` ends because `dlogp_mean` is above {BOUND}, the bound in
float32; here it is lifted, to see what follows. `stops in bf16` is the same for the bound in
bfloat16, {BF16}, with the numbers of these float32 runs: on a GPU it stops only what is gross.
There `weights` means that `zero3.check_weights` ends the run before its second update, because the
engine's weights are not the trainer's, in any precision. So after changing a stage run two updates
of it on a CPU: what float32 stops in update 1 or 2, bfloat16 may hide for the whole run.


{table}
![Red: with the fault. Black: the right run. Grey: right runs of other seeds](faults.png)
"""]
    for name, fault in faults.items():
        lines = [f"* {field}: {fault[field]}" for field in FIELDS if fault.get(field)]
        parts.append(f"## {name}\n\n{fault['what']}\n\n```diff\n{fault['diff']}```\n\n"
                     + "\n".join(lines) + "\n")
    return "\n".join(parts)


def main():
    args = flags()
    faults = {name: read_fault(name) for name in args.only}
    seeds = [f"right --seed {n}" for n in range(args.seeds)]
    right = {name: f"right {fault['Flags']}" if fault["Flags"] else seeds[0]
             for name, fault in faults.items()}
    runs = {name: train(name, name.removeprefix("right "), args)
            for name in dict.fromkeys([*seeds, *right.values()])}
    runs |= {name: train(name, fault["Flags"], args, fault) for name, fault in faults.items()}
    page = Path(args.page or args.out)
    draw(runs, right, seeds, page / "faults.png")
    runtime.write_text(page / "faults.md", page_of(faults, table_of(runs, right, seeds, faults),
                                                   args))
    print(f"{page}/faults.md: {len(faults)} faults; see also {page}/faults.png")


if __name__ == "__main__":
    runtime.run("variants/faults.py", main)
