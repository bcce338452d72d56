"""
The laptop's world: what a model of 2M parameters needs to learn in minutes what a large one knows.

    (1) world   tables like TravelPlanner's, small and seeded, whose names a tiny model can copy; or
                many such worlds, none of which has a city of the one that ships
    (2) drills  for want of pre-training: exercises in copying and in weighing rows, or whole
                episodes of the solver, from worlds other than the one it will play in
    (3) model   a random Qwen2 with induction heads, and a tokenizer made for copying

Reads   for (3) files of messages
Writes  the tables' CSVs; jsonl of messages or episodes; a model folder

    python -m tiny world  --seed 0 --out database/mini
    python -m tiny world  --worlds 24 --seed 7 --out data/worlds
    python -m tiny drills --n 6000 --worlds 48 --out data/drills.jsonl
    python -m tiny model  --corpus data/drills.jsonl data/sft.jsonl --out out/init
"""
import os

import runtime
from runtime import COUNT, SEED, SHARE, Help, Parser
from tiny.drills import drills
from tiny.model import heads_of_32, model
from tiny.worlds import world


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(run, words):
        p = commands.add_parser(run.__name__, help=words, description=words, formatter_class=Help)
        p.set_defaults(run=run)
        p.add_argument("--seed", type=SEED, default=0, help="the same seed gives the same files")
        p.add_argument("--out", required=True, help="file or folder that is written")
        return p.add_argument

    add = command(world, "write the tables of a small world, or of many")
    add("--worlds", type=COUNT, help="that many worlds, each in a folder world-*, without the "
        "cities of the one that ships; unset: one world, in --out itself")
    add = command(drills, "write exercises or episodes from other worlds")
    add("--n", type=COUNT, default=4000, help="number of exercises, or of episodes")
    add("--worlds", type=COUNT, default=8, help="number of worlds that share them")
    add("--episodes", action="store_true", help="write whole episodes of the solver")
    add("--careful", type=SHARE, default=0.0,
        help="share of them in which the rows of lists are weighed one by one")
    add("--workers", type=COUNT, default=os.cpu_count(), help="processes; all give the same file")
    add = command(model, "write a random Qwen2 of 2M parameters and its tokenizer")
    add("--corpus", nargs="+", required=True, metavar="JSONL",
        help="files of messages to make the tokenizer of")
    add("--width", type=heads_of_32, default=192,
        help="hidden size, in heads of 32; 192: 2M parameters")
    add("--phrases", metavar="FILE", help="what is a token each, beside single digits; unset: the "
        "travel world's phrases and pairs of digits")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    runtime.run("tiny", args.run, args)


if __name__ == "__main__":
    main()
