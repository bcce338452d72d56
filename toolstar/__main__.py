"""
The commands of the tools world; the file of each says what it reads, writes and does.

    (1) index, serve   search over passages: make an index, answer as a server (retriever.py)
    (2) sets           Tool-Star's twelve evaluation sets as tasks (sets.py)
    (3) convert, tir   data for SFT and RL: the published files, or new ones from questions
                       (published.py, tir.py)
    (4) pairs          judged plays as pairs for dpo.py (pairs.py)
    (5) scores         plays of the twelve sets in a table beside the paper's numbers (scores.py)

The stages play and train in this world: python evaluate.py --env tools, grpo.py --env tools.

    python -m toolstar index   --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 --out index
    python -m toolstar serve   --retriever index --port 8000
    python -m toolstar sets    --sets my/sets --out data/sets
    python -m toolstar convert --sft final_sft.json --rl rl.parquet --out data
    python -m toolstar tir     --database my/world --tasks my/questions.jsonl \\
        --url http://localhost:8000/v1 --model Qwen2.5-3B-Instruct --out out/tir
    python -m toolstar pairs   --episodes out/rl/rollouts --out out/pairs
    python -m toolstar scores  --tasks data/sets/tasks.jsonl --runs out/eval/rl --out out/scores

[1] Tool-Star, arXiv:2505.16410
"""
import importlib

import runtime
from evaluate import endpoint, play_flags
from runtime import COUNT, NATURAL, PORT, SHARE, Help, Parser


def flags(argv=None):
    p = Parser(prog="python -m toolstar", description=__doc__, formatter_class=Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(name, function, words, **settings):
        """function: module.name, imported when the command runs, since retriever.py needs torch."""
        p = commands.add_parser(name, help=words, description=words, formatter_class=Help)
        p.set_defaults(function=function, **settings)
        return p

    add = command("index", "retriever.build_index", "make an index of E5 vectors").add_argument
    add("--corpus", required=True, help="jsonl file, {id, contents} per line")
    add("--encoder", required=True, help="E5-style HF folder or hub name")
    add("--out", required=True, help="folder of the index; an interrupted build resumes from it")
    add("--vectors", metavar="FILE", help="take the vectors from a flat faiss index of the same "
        "corpus and encoder, such as FlashRAG's e5_Flat.index, instead of encoding the corpus")
    add("--batch", type=COUNT, default=512, help="passages per forward pass of the encoder")
    add("--devices", nargs="+", help="torch devices; default: all GPUs, else the CPU")
    add = command("serve", "retriever.serve", "answer POST /retrieve").add_argument
    add("--retriever", default="bm25", help="bm25, or an index folder")
    add("--corpus", default="database/qa/corpus.jsonl", help="jsonl for bm25")
    add("--devices", nargs="+", help="torch devices; default: all GPUs, else the CPU")
    add("--topk", type=COUNT, default=5, help="passages per query if a request has no topk")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    add("--port", type=PORT, default=8000, help="port to listen on; 0: any free port")
    add = command("sets", "sets.write_tasks", "turn evaluation sets into tasks").add_argument
    add("--sets", required=True, help="folder of the published sets")
    add("--sample", type=NATURAL, help="number of questions per set, always the same ones; 0: all; "
        "default: as many as in the paper")
    add("--out", required=True, help="folder to write tasks.jsonl into")
    add = command("convert", "published.convert", "convert Tool-Star's published data").add_argument
    add("--sft", metavar="FILE", help="the 54K chains: json, jsonl or parquet")
    add("--rl", metavar="FILE", help="the 10K tasks: parquet, json or jsonl")
    add("--sets", metavar="DIR", help="folder of evaluation sets, whose questions are dropped")
    add("--out", required=True, help="folder to write into")
    tir = command("tir", "tir.tir", "make chains for SFT and tasks for RL from questions",
                  failure_rate=0.0, helpers="")
    add = tir.add_argument
    add("--tasks", required=True, metavar="JSONL", help="questions with golds and check")
    add("--database", required=True, help="the world's folder, with tools.json")
    add("--samples", type=COUNT, default=3, help="samples per task and mode [1]")
    add("--right", type=COUNT, default=1, help="how many samples of dr must be right for a task to "
        "need no tools")
    add("--max-calls", type=NATURAL, default=5, help="refuse chains with more calls [1]")
    add("--limit", type=COUNT, help="use only the first LIMIT tasks")
    add("--sets", metavar="DIR", help="evaluation sets (sets.py), whose questions are left out")
    add("--system-prompt", default="full", help="full, short or a file")
    play_flags(tir, "out/tir", 4096)
    tir.set_defaults(temperature=1.0, top_p=1.0, max_context=16384, max_turns=9, concurrency=32)
    add = command("pairs", "pairs.make_pairs", "pair right plays with wrong ones").add_argument
    add("--episodes", nargs="+", required=True, metavar="JSONL|DIR", help="judged episodes")
    add("--out", required=True, help="folder to write the pairs into")
    add("--held-out", type=SHARE, default=0.1, help="share of the questions held out in val.jsonl")
    add("--by", default="reward", help="key that is compared: reward, strict, or a number of the "
        "score")
    add("--chosen", type=float, default=1.0, help="a chosen play has this value or more")
    add("--rejected", type=float, default=1.0, help="a rejected play has less than this")
    add("--per-question", type=COUNT, default=4, help="maximum number of pairs per question")
    add("--fewer-calls", action="store_true", help="also pair right plays of equal reward; the one "
        "with fewer calls is chosen")
    add("--principles", metavar="FILE", help="remove this text from the system prompts")
    add("--seed", type=NATURAL, default=0, help="seed of the held-out questions and of the choice "
        "among equal pairs")
    add = command("scores", "scores.write_table", "score plays of the twelve sets").add_argument
    add("--tasks", required=True, help="tasks.jsonl of sets.py")
    add("--runs", nargs="+", required=True, metavar="[NAME=]FOLDER", help="episodes of evaluate.py")
    add("--judge", type=endpoint, metavar="URL=MODEL", help="OpenAI-compatible endpoint that "
        "compares answers with golds; default: only equal answers are right")
    add("--judge-key", metavar="FILE", help="file that holds the endpoint's API key")
    add("--out", required=True, help="folder for table.md, table.json and the judge's verdicts")
    return p.parse_args(argv)


def main(argv=None):
    args = flags(argv)
    module, function = args.function.split(".")
    run = getattr(importlib.import_module(f"toolstar.{module}"), function)
    runtime.run(f"toolstar {args.command}", run, args)


if __name__ == "__main__":
    main()
