"""
Keep the outcomes of the runs in docs/results.md: the tasks that each solved, and its updates.

`keep` prints a line per run; `unpack` turns such lines into files that recipes/axes.py reads. So
the tables can be computed again, or with another statistic, without training.

    python bench/outcomes.py keep out/tiny-0/axis/runs/* > docs/outcomes.jsonl
    python bench/outcomes.py unpack docs/outcomes.jsonl --out out/axes
    python -m recipes.axes --axis reward --out out/axes --runs \\
        sum=out/axes/grpo-sum-mixed-400-fail-00-s0/eval/rl sum=...

Runs are comparable if they start from the same SFT checkpoint; `sft` is its sha256.
"""
import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from evaluate import name_of  # noqa: E402
from look.report import log_rows  # noqa: E402
from recipes.axes import read_runs  # noqa: E402

# keys of the training log that are kept for each update
UPDATE = ["success", "loss_tokens", "uniform", "sync_s", "play_s", "judge_s", "learn_s"]
EVALUATIONS = ["eval", "eval-failing"]  # folders of evaluations without and with failing tools


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def keep(runs):
    """Print a line for each run OUT/axis/runs/NAME: {run, sft, updates, eval: {tasks, success,
    strict, checks}}.

    updates: [numbers of UPDATE] per update. tasks: the sha256 of the tasks' ids. success, strict:
    a 0 or 1 per task, in the order of the ids. checks: the share that passed, in per cent of the
    plays to which the check applies.
    """
    for run in runs:
        model = "rl" if (run / "rl").exists() else "sft"
        weights = run.parents[2] / "sft" / "model.safetensors"
        home = run.parents[2]  # in the axis of scale, runs of different folders have one name
        name = f"{home.name}-{run.name}" if home.parent.name == "scale" else run.name
        line = {"run": name, "sft": digest(weights.read_bytes())}
        log = run / "rl" / "log.jsonl"
        rows = log_rows(log).values() if log.exists() else ()
        line["updates"] = [[float(f"{row[key]:.4g}") for key in UPDATE] for row in rows
                           if "loss_tokens" in row]
        for kind in EVALUATIONS:
            if not (run / kind / "table.md").exists():
                continue
            (episodes, _), = read_runs([f"{run.name}={run / kind / model}"])[run.name]
            episodes.sort(key=lambda episode: name_of(episode["task"]))
            checks = {}
            for episode in episodes:
                for check, (passed, _) in episode["score"]["checks"].items():
                    checks.setdefault(check, []).append(passed)
            known = {check: [passed for passed in each if passed is not None]
                     for check, each in checks.items()}
            line[kind] = {
                "tasks": digest("".join(name_of(each["task"]) for each in episodes).encode()),
                "success": "".join(str(int(episode["score"]["success"])) for episode in episodes),
                "strict": "".join(str(int(episode["strict"])) for episode in episodes),
                "checks": {check: round(100 * sum(each) / len(each), 1)
                           for check, each in known.items() if each}}
        if "eval" in line:
            print(json.dumps(line, separators=(",", ":")))


def unpack(file, out):
    """Write OUT/NAME/eval/rl/episodes.jsonl and OUT/NAME/rl/log.jsonl for each line, as
    recipes/axes.py reads them."""
    for line in map(json.loads, file.open()):
        model = "rl" if line["updates"] else "sft"
        files = {f"{model}/log.jsonl": [
            {"step": step} | dict(zip(UPDATE, update, strict=True))
            for step, update in enumerate(line["updates"], 1)]}
        for kind in EVALUATIONS:
            if kind in line:
                told = line[kind]
                files[f"{kind}/{model}/episodes.jsonl"] = [
                    {"task": {"id": f"{told['tasks']}-{number}"}, "score": {"success": won == "1"},
                     "strict": strictly == "1"}
                    for number, (won, strictly) in enumerate(
                        zip(told["success"], told["strict"], strict=True))]
        for name, rows in files.items():
            path = out / line["run"] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    command = commands.add_parser("keep", help="print a line per run")
    command.add_argument("runs", nargs="+", type=Path, metavar="OUT/axis/runs/NAME")
    command = commands.add_parser("unpack", help="write the files of the runs in such a file")
    command.add_argument("file", type=Path)
    command.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    keep(args.runs) if args.command == "keep" else unpack(args.file, args.out)


if __name__ == "__main__":
    main()
