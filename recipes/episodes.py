"""
Count episodes as the paper's Table 8 does: trajectories, calls and tokens by level.

Reads   a file of episodes, such as DATA/sft.jsonl; the tokenizer of a model; docs/paper.json
Writes  a table on the terminal, beside the paper's numbers [STAR, arXiv:2603.21972]

    python -m recipes.episodes --episodes data/full/sft.jsonl --model Qwen/Qwen2.5-7B-Instruct
"""
import runtime
from evaluate import mean, read_episodes
from recipes.axes import TABLES
from runtime import Help, Mistake, Parser
from travel.world import LEVELS


def count(row, template):
    """(calls, tokens of the whole conversation, tokens of the plan) of an episode."""
    text = template.text(row["messages"])
    return row["calls"], len(template.encode(text)), len(template.encode(row["answer"] or ""))


def table(rows, template):
    """Markdown: a row for each level and one for all, then the paper's."""
    head = ["", "trajectories", "calls, mean", "tokens, mean", "tokens of the plan, mean"]
    lines, counted = [head, ["---"] * len(head)], [count(row, template) for row in rows]
    for level in (*LEVELS, "all"):
        chosen = [numbers for row, numbers in zip(rows, counted, strict=True)
                  if level in ("all", row["task"].get("level"))]
        means = [mean(column) for column in zip(*chosen, strict=True)]
        lines.append([level, f"{len(chosen):,}", *(f"{value:,.1f}" for value in means)])
    for level, (n, share, *means) in TABLES["levels"]["rows"].items():
        lines.append([f"paper, {level}", f"{n:,} ({share:g}%)", *(f"{x:,.1f}" for x in means)])
    lines = [line + [""] * (len(head) - len(line)) for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help, prog="python -m recipes.episodes")
    p.add_argument("--episodes", required=True, metavar="FILE", help="file of episodes")
    p.add_argument("--model", required=True, metavar="PATH", help="folder or hub name whose "
                   "tokenizer and chat template count the tokens")
    return p.parse_args(argv)


def tabulate(args):
    rows = [*read_episodes(args.episodes).values()]
    if not rows:
        raise Mistake(f"{args.episodes}: no episodes; synth.py episodes makes them")
    print(table(rows, runtime.load_template(args.model)))


def main(argv=None):
    runtime.run("recipes.episodes", tabulate, flags(argv))


if __name__ == "__main__":
    main()
