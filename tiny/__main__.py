"""
Make what a laptop needs to train a model of 3M parameters in the travel world.

    (1) world   small seeded tables like TravelPlanner's, whose names a tiny model can copy; or many
                such worlds, without any city of the one that ships with the repository
    (2) drills  a substitute for pre-training: exercises in copying and comparing rows, or whole
                episodes of the solver, in other worlds than the one in which the model will play
    (3) model   a random Qwen2 with induction heads, and a tokenizer made for copying

Reads   (3) files of messages
Writes  (1) the tables as CSV  (2) a jsonl file of messages or episodes  (3) a model folder

    python -m tiny world  --seed 0 --out database/mini
    python -m tiny world  --worlds 24 --seed 7 --out data/worlds
    python -m tiny drills --n 6000 --worlds 48 --out data/drills.jsonl
    python -m tiny model  --corpus data/drills.jsonl data/sft.jsonl --out out/init
"""
import os

import runtime
from runtime import COUNT, SEED, SHARE, Help, Parser
from tiny.drills import drills
from tiny.model import model
from tiny.worlds import world


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(run, words):
        p = commands.add_parser(run.__name__, help=words, description=words, formatter_class=Help)
        p.set_defaults(run=run)
        p.add_argument("--seed", type=SEED, default=0, help="the same seed gives the same files")
        p.add_argument("--out", required=True, help="file or folder to write")
        return p.add_argument

    add = command(world, "write the tables of a small world, or of many")
    add("--worlds", type=COUNT, help="number of worlds, each in a folder world-*, without the "
        "cities of database/mini; default: one world, in --out itself")
    add = command(drills, "write exercises or episodes from other worlds")
    add("--n", type=COUNT, default=4000, help="number of exercises or episodes")
    add("--worlds", type=COUNT, default=8, help="number of worlds that they come from")
    add("--episodes", action="store_true", help="write whole episodes of the solver")
    add("--tours", action="store_true", help="five days in two cities, in which the teacher turns "
        "back from cities without a hotel that fits: all episodes, or a third of the exercises; "
        "default: three days in one city")
    add("--careful", type=SHARE, default=0.0,
        help="share of them in which the rows of lists are compared one by one")
    add("--workers", type=COUNT, default=len(os.sched_getaffinity(0)),
        help="number of processes, which does not change the file")
    add = command(model, "write a tiny random Qwen2 and its tokenizer")
    add("--corpus", nargs="+", required=True, metavar="JSONL",
        help="files of messages from which the tokenizer is made")
    add("--width", type=COUNT, default=192,
        help="hidden size, a multiple of 64; 192: 2M parameters, 256: 3M")
    add("--phrases", metavar="FILE", help="phrases that become one token each, with single digits; "
        "default: the travel world's phrases and pairs of digits")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    runtime.run("tiny", args.run, args)


if __name__ == "__main__":
    main()
