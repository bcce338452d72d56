"""
Make the training data of the tools world: what Tool-Star's synthesis does [1], and what feeds it.

    (1) dr       each question is answered --samples times by language alone
    (2) prompt   as often with the world's tools in the loop
    (3) hint     as often from a thought of (1): a hint is put behind a sentence of doubt, or the
                 answer is taken into the thought and doubted; what followed is dropped, and the
                 thought goes on with tools
    (4) quality  a chain of (2) or (3) with no call or too many, with a repeated call or an unpaired
                 tag is refused; so is one whose tool broke, or that did not come to an answer
    (5) choose   answered by (1): SFT learns to answer it without tools. Else by (2) or (3): SFT
                 learns the chain with the fewest calls. By none: it is a task for RL

A language model plays, behind an endpoint or in vLLM, or the solver of the tiny world. The other
commands make that world (facts.py) and read the published data (published.py).
[1] Tool-Star, arXiv:2505.16410, section 3; its code for this is not released

Reads   a world's folder, tasks; database/prompts/direct.txt, doubts.txt and hints.txt
Writes  OUT/samples.jsonl, every outcome, line by line: a killed run goes on where it was; another
        --right or --max-calls chooses anew from it. OUT/sft.jsonl, rl.jsonl, report.json

    python -m toolstar.tir facts    --seed 0 --out out/facts
    python -m toolstar.tir episodes --database out/facts/train --tasks out/facts/sft-tasks.jsonl \\
        --out out/facts/sft.jsonl
    python -m toolstar.tir pages    --database out/facts/train out/facts/val --port 8123
    python -m toolstar.tir tir      --database my/world --tasks my/questions.jsonl \\
        --endpoint http://localhost:8000/v1=Qwen2.5-3B-Instruct --out out/tir
    python -m toolstar.tir convert  --from tool-star --sft final_sft.json --rl rl.parquet --out data
"""
import json
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path

import evaluate
import runtime
from evaluate import mean, name_of
from runtime import COUNT, NATURAL, PORT, SHARE, Help, Parser, endpoint, entries, fill
from sandbox import PROMPTS, final_turn
from toolstar.facts import drills, facts, from_memory, pages, solution, solver_episodes
from toolstar.published import convert
from toolstar.sets import contaminated, questions_of
from toolstar.verdict import bare

MODES = ("dr", "prompt", "hint")
SETTINGS = ("database", "temperature", "top_p", "max_context", "max_turns", "max_tokens",
            "system_prompt", "seed")  # what samples of one folder have in common
KEPT = "samples.jsonl"
DOUBTS = (PROMPTS / "doubts.txt").read_text(encoding="utf-8").split("\n")
DOUBT = re.compile(rf"\b(?:{'|'.join(re.escape(words) for words in DOUBTS if words)})\b", re.I)
HINTS = entries(PROMPTS / "hints.txt")
SENTENCE_END = re.compile(r"[.?!](?=\s|$)|\n|$")
PAIRED = re.compile(r"<(/?)(think|answer|search|python|browse|tool_call)>")
DIRECT = {"turns": "the answer and nothing else: a name, a number, a few words",
          "tags": r"\[ \boxed{the answer} \]"}  # in the prompt, what stands in <answer>
SHORT_DIRECT = "You answer questions. Reply <think>...</think><answer>...</answer>."


# ---------------------------------------------------------------- samples

def direct_prompt(name, grammar):
    """What (1) is told: the words of a model that has no tools."""
    if name == "short":
        return SHORT_DIRECT
    text = (PROMPTS / "direct.txt").read_text(encoding="utf-8").strip()
    return text.replace("{answer}", DIRECT[grammar])


def begin(args, world, task):
    """The Episode of a sample: of (1) without tools, of (3) begun with the words to go on from."""
    episode = world.episode(task, f"{args.seed}/{name_of(task)}", args)
    if mode_of(task) == "dr":
        episode.sandbox.tools = frozenset()  # a call breaks the format
        prompt = direct_prompt(args.system_prompt, world.settings.grammar)
        episode.messages[0] = {"role": "system", "content": prompt}
    if "begun" in task:
        episode.messages.append({"role": "assistant", "content": task["begun"]})
    return episode


def mode_of(task):
    return task["sample"].partition("-")[0]


def play_samples(args, worked, todo):
    """Yield the record of each sample as it ends: the episode, its score, whether it is right.
    worked: as in evaluate.play."""
    from toolstar.tools import open_world

    world = open_world(args)
    try:
        for episode in player(args, world, (begin(args, world, task) for task in todo), worked):
            answer, score, strict = world.verdict(episode)
            yield episode.record(model_of(args)) | {
                "plan": answer, "score": score, "strict": strict,
                "tokens": getattr(episode, "tokens", None)}
    finally:
        world.close()


def model_of(args):
    return args.endpoint[1] if args.endpoint else args.model or "solver"


def player(args, world, episodes, worked=False):
    """The episodes as they end, played by an endpoint, a vLLM engine or the solver."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    if args.endpoint:
        key = Path(args.key).read_text().strip() if args.key else None
        # asked patiently: a run of days must not end for one bad hour
        generate = partial(runtime.chat, *args.endpoint, **sampling, retries=40, api_key=key,
                           stops=world.stops)
        return evaluate.play(lambda messages: generate(merged(messages)), episodes,
                             args.concurrency, max_tokens=args.max_tokens, worked=worked)
    if args.model:
        llm, template = evaluate.open_engine(args.model, args.max_context, args.concurrency,
                                             args.tp, args.gpu_memory)
        return evaluate.play_vllm(llm, template, episodes, args.max_context, **sampling,
                                  seed=args.seed, concurrency=args.concurrency,
                                  stops=world.stops, slow=world.slow)
    return map(partial(play_solver_sample, world.settings.grammar == "tags"), episodes)


def merged(messages):
    """Messages as an endpoint knows them: replies and results that follow each other are one."""
    found = []
    for message in messages:
        said = message["role"] in ("assistant", "result")
        if said and found[-1]["role"] == "assistant":
            found[-1] = {"role": "assistant", "content": found[-1]["content"] + message["content"]}
        else:
            found.append({"role": "assistant", "content": message["content"]} if said else message)
    return found


def play_solver_sample(tags, episode):
    """One sample of the solver. By language alone it knows what the question itself answers, and
    what it has by heart."""
    from toolstar.tools import one_as_tags

    task, begun = episode.task, episode.messages[-1]["role"] == "assistant"
    replies = unaided(task) if mode_of(task) == "dr" else solution(task)
    reply = next(replies)
    while reply:
        if tags:
            reply = one_as_tags({"role": "assistant", "content": reply})
        if begun:
            reply, begun = " " + reply.removeprefix("<think>"), False
        seen = episode.step(reply)
        reply = None if seen is None else replies.send(seen)
    return episode


def unaided(task):
    """The solver's reply where it may call no tool."""
    if "by_heart" in task:
        yield from from_memory(task)
    elif task["asks"] or task["program"]:
        what = f"the {task['asks'][0][1]} of {task['asks'][0][0]}" if task["asks"] else "the result"
        yield final_turn(f"perhaps {what} is known to somebody: not to me", "unknown")
    else:
        yield from solution(task)


# ---------------------------------------------------------------- hints

def hint_at_doubt(rng, thought, hint):
    """The thought up to the end of a sentence of doubt, and the hint; None where nothing is
    doubted."""
    ends = {SENTENCE_END.search(thought, doubt.end()).end() for doubt in DOUBT.finditer(thought)}
    return f"{thought[:rng.choice(sorted(ends))].rstrip()} {hint}" if ends else None


def begin_with_hint(seed, task, chain, tools):
    """What a sample of (3) begins with -> (text, "doubt" or "answer"); tools: names, the world's.

    chain: the record of an answered sample of (1). Samples of even numbers look for a doubt, those
    of odd numbers doubt the answer, and so does a sample whose chain doubts nothing.
    """
    rng = random.Random(f"{seed}/{name_of(task)}")
    said = chain["messages"][2]["content"].rpartition("<answer>")[0]
    thought = " ".join(re.split(r"\s*</?think>\s*", said)).strip()
    wanted = ("Python", "Search") if task["check"] == "math" else ("Search", "Python")
    tool = next(name for name in (*wanted, "Browse") if name in tools)
    hint = fill(rng, HINTS[tool.lower()], {})
    text, kind = None, "doubt"
    if int(task["sample"].partition("-")[2]) % 2 == 0:
        text = hint_at_doubt(rng, thought, hint)
    if text is None:
        answer = fill(rng, HINTS["answer"], {"answer": bare(chain["answer"])})
        text, kind = f"{thought} {answer} {hint}".lstrip(), "answer"
    return f"<think>{text}", kind


def wanted_samples(args, tasks, rows, tools):
    """What is to be played now, by what has been: (1) and (2), and (3) where (1) is done."""
    for task in tasks:
        for mode in args.modes:
            for k in range(args.samples):
                sample = task | {"sample": f"{mode}-{k}"}
                if name_of(sample) in rows:
                    continue
                chain = rows.get(f"{task['id']}/dr-{k}")
                if mode != "hint":
                    yield sample
                elif chain and chain["stop"] == "answer":
                    begun, kind = begin_with_hint(args.seed, sample, chain, tools)
                    yield sample | {"begun": begun, "hint": kind}


# ---------------------------------------------------------------- quality, choice

def is_paired(text):
    """Whether each tag of the grammar is closed, and none within another of its name."""
    opened = []
    for closing, name in PAIRED.findall(text):
        if closing and (not opened or opened.pop() != name) or not closing and name in opened:
            return False
        opened += [] if closing else [name]
    return not opened


def fault_of(row, most):
    """Why quality refuses a sample's record, "" where it does not. most: calls of a chain."""
    calls, mode = row["tools"], mode_of(row["task"])
    said = "".join(message["content"] for message in row["messages"][2:]
                   if message["role"] == "assistant")
    faults = {row["stop"]: row["stop"] != "answer",
              f"more than {most} calls": len(calls) > most,
              "a call repeated": any(call["repeated"] for call in calls),
              "a broken tool": any(call["status"] == "broken" for call in calls),
              "unpaired tags": not is_paired(said),
              "no call": mode != "dr" and not calls}
    return next((fault for fault, found in faults.items() if found), "")


def least_right(right, samples):
    """How many samples must be right for --right: majority, all, or K of the samples."""
    known = {"majority": samples // 2 + 1, "all": samples}
    named = re.fullmatch(r"(\d+)of(\d+)", right)
    least = known.get(right, int(named[1]) if named and int(named[2]) == samples else 0)
    if not 1 <= least <= samples:
        raise ValueError(f"--right {right} is none of 1of{samples}, majority, all of the "
                         f"{samples} --samples")
    return least


def choose(task, rows, args):
    """(dr right?, {modes of (2) and (3) that are right}, the record for SFT or None) of a task.

    rows: its samples' records. Right is one that quality lets pass.
    """
    good = [row for row in rows if row["strict"] == 1 and not fault_of(row, args.max_calls)]
    by_mode = {mode: [row for row in good if mode_of(row["task"]) == mode] for mode in MODES}
    direct = by_mode["dr"]
    known = len(direct) >= least_right(args.right or f"1of{args.samples}", args.samples)
    chains = by_mode["prompt"] + by_mode["hint"]
    found = {mode for mode in MODES[1:] if by_mode[mode]}
    if known:
        return known, found, direct[0]
    return known, found, min(chains, key=lambda row: len(row["tools"]), default=None)


def as_episode(row, prompt):
    """A sample's record as an episode for SFT: its task as it was, and the prompt of (2), under
    which a model learns when to answer without tools, too."""
    ours = ("sample", "begun", "hint")
    task = {key: value for key, value in row["task"].items() if key not in ours}
    messages = [{"role": "system", "content": prompt}, *row["messages"][1:]]
    return row | {"task": task, "messages": messages, "source": mode_of(row["task"])}


def summary(rows, args):
    """{number: value} of one mode's samples: what came of them, and what they took."""
    faults = Counter(fault_of(row, args.max_calls) for row in rows)
    right = [row for row in rows if row["strict"] == 1]
    calls = [call for row in rows for call in row["tools"]]
    return {"samples": len(rows), "right": len(right),
            "kept": sum(not fault_of(row, args.max_calls) for row in right),
            "refused": {fault: n for fault, n in faults.most_common() if fault},
            "calls": mean(len(row["tools"]) for row in rows),
            "calls of right ones": mean(len(row["tools"]) for row in right),
            "failed calls": dict(Counter(call["status"] for call in calls
                                         if call["status"] != "ok").most_common()),
            "time-outs": sum(call["status"] == "timeout" for call in calls),
            "tokens": sum(row["tokens"] or 0 for row in rows)}


def report_on(args, tasks, rows, cells, chosen):
    """What report.json says. cells: {check: counts of (dr right?, modes that are right)}."""
    counts = {}
    for check, cell in cells.items():
        table = counts[check] = {}
        for dr in (True, False):
            table[f"dr {'right' if dr else 'wrong'}"] = {
                "tir wrong": cell[dr, ()], "tir right by prompt": cell[dr, ("prompt",)],
                "tir right by hint": cell[dr, ("hint",)],
                "tir right by both": cell[dr, ("hint", "prompt")]}
    hints = Counter(row["task"]["hint"] for row in rows if "hint" in row["task"])
    if "hint" in args.modes:  # (1) broke off, or did not come to an answer
        hints["nothing to go on from"] = len(tasks) * args.samples - hints.total()
    return {"model": model_of(args), "tasks": len(tasks), "samples": args.samples,
            "right": args.right or f"1of{args.samples}", "max calls": args.max_calls,
            "cells": counts, "sft": dict(Counter(row["source"] for row in chosen)),
            "rl": len(tasks) - len(chosen), "hints": dict(hints),
            "modes": {mode: summary([row for row in rows if mode_of(row["task"]) == mode], args)
                      for mode in args.modes}}


# ---------------------------------------------------------------- tir

def check_player(args, tasks):
    """Refuse what cannot be played, before anything is."""
    if args.endpoint and args.model:
        raise ValueError("--endpoint or --model plays, not both")
    if model_of(args) == "solver" and any("asks" not in task for task in tasks):
        raise ValueError(f"{args.tasks}: the solver plays tasks that `facts` wrote; name a model "
                         "by --endpoint or --model")
    if {*args.modes} - {*MODES} or "hint" in args.modes and "dr" not in args.modes:
        raise ValueError(f"--modes {','.join(args.modes)}: there are {', '.join(MODES)}, and hint "
                         "goes on from what dr has said")


def play_missing(args, folder, settings, tasks, tools):
    """(1) to (3) Play what samples.jsonl lacks of the tasks' samples -> their records, in order.
    The file is put into this order at last, whoever ended first."""
    file = folder / KEPT
    rows = evaluate.read_episodes(file)
    now = {task["id"]: task for task in tasks}
    if any(not now.get(row["task"]["id"], {}).items() <= row["task"].items()
           for row in rows.values()):
        raise ValueError(f"{folder}: other tasks of these ids were played; choose another --out")
    for what in "dr, prompt", "hint":  # hints need what (1) has said; the engine is opened for each
        todo = list(wanted_samples(args, tasks, rows, tools))
        worked = any(row["stop"] != "refused" for row in rows.values())
        rows_of = partial(play_samples, args, worked)
        if args.model:
            rows_of = partial(evaluate.apart, "toolstar.tir", rows_of, args=args)
        for row in runtime.progress(rows_of(todo) if todo else (), what, len(todo)):
            evaluate.keep_play(folder, settings, row, KEPT)
            rows[name_of(row["task"])] = row
    names = [f"{task['id']}/{mode}-{k}" for task in tasks for mode in args.modes
             for k in range(args.samples)]
    wanted = {name: rows.pop(name) for name in names if name in rows}
    runtime.write_jsonl(file, [*wanted.values(), *rows.values()])
    return list(wanted.values())


def tir(args):
    """Play, refuse, choose, and say what came of it."""
    from toolstar.tools import open_world, system_prompt

    least_right(args.right or f"1of{args.samples}", args.samples)
    world = open_world(args)
    world.close()  # who plays opens one of his own
    tasks = runtime.load_tasks(args.tasks, world.load_task, args.limit)
    tasks, dropped = contaminated(tasks, questions_of(args.sets)[0] if args.sets else [])
    check_player(args, tasks)
    settings = {"model": model_of(args)} | {key: getattr(args, key) for key in SETTINGS}
    runtime.lock_folder(args.out)
    folder = evaluate.open_folder(args.out, "", settings, KEPT)
    others = [name for name in ("sft.jsonl", "rl.jsonl") if (folder / name).exists()]
    if others and not (folder / KEPT).exists():
        raise ValueError(f"{folder} holds {others[0]}, but no {KEPT} that it could be of: choose "
                         "another --out")
    rows = play_missing(args, folder, settings, tasks, world.settings.tools)
    # (4) (5)
    by_task, cells, sft, rl = {task["id"]: [] for task in tasks}, {}, [], []
    for row in rows:
        by_task[row["task"]["id"]].append(row)
    prompt = system_prompt(args.system_prompt, world.settings)
    for task in tasks:
        known, found, row = choose(task, by_task[task["id"]], args)
        cells.setdefault(task["check"], Counter())[known, tuple(sorted(found))] += 1
        if row:
            sft.append(as_episode(row, prompt))
        else:
            rl.append(task)
    runtime.write_jsonl(folder / "sft.jsonl", sft)
    runtime.write_jsonl(folder / "rl.jsonl", rl)
    report = report_on(args, tasks, rows, cells, sft) | {"contaminated": dropped}
    runtime.write_text(folder / "report.json",
                        json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"{folder}: {len(tasks)} tasks, {len(sft)} episodes for SFT, {len(rl)} tasks for RL; "
          f"{len(dropped)} left out, which an evaluation set asks")


# ---------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    commands = p.add_subparsers(dest="command", required=True)

    def command(name, run, words, **settings):
        p = commands.add_parser(name, help=words, description=words, formatter_class=Help)
        p.set_defaults(run=run, **settings)
        return p.add_argument

    add = command("facts", facts, "write worlds of facts and their tasks")
    add("--out", required=True, help="folder that is written")
    add("--seed", type=int, default=0, help="the same seed gives the same files")
    add("--worlds", type=COUNT, default=60, help="number of worlds to train in, one corpus for all")
    add("--places", type=COUNT, default=40, help="places of each, a passage for every place")
    add("--held-out", type=COUNT, default=400, help="places of the held-out world")
    add("--sft", type=COUNT, default=2400, help="number of tasks for the solver's episodes")
    add("--by-heart", type=SHARE, default=0.35, help="share of those that need tools in which the "
        "solver knows the answer and calls none")
    add("--rl", type=COUNT, default=960, help="number of tasks for RL")
    add("--val", type=COUNT, default=400, help="number of held-out tasks")
    add("--port", type=PORT, default=8123, help="port of the pages' server, in the passages' URLs")
    add = command("episodes", solver_episodes, "play tasks with the solver through the real tools",
                  failure_rate=0.0, max_turns=7, system_prompt="short")
    add("--tasks", required=True, metavar="JSONL", help="file of tasks that facts wrote")
    add("--database", required=True, help="the world's folder: its tools.json says what tools are")
    add("--out", required=True, help="file of episodes that is written")
    add("--seed", type=int, default=0, help="of what chance decides in the world")
    add = command("drills", drills, "write exercises in reading, for a base model")
    add("--n", type=COUNT, default=6000, help="number of exercises")
    add("--out", required=True, help="file of messages that is written")
    add("--seed", type=int, default=0, help="the same seed gives the same file")
    add("--port", type=PORT, default=8123, help="port in the pages' URLs")
    add = command("pages", pages, "serve the pages of worlds, on this machine alone")
    add("--database", nargs="+", required=True, metavar="DIR", help="folders of worlds")
    add("--port", type=PORT, default=8123, help="port; 0 takes any that is free")
    tir_flags(command("tir", tir, "make SFT's chains and RL's tasks of questions [1]",
                      failure_rate=0.0, url=None))
    add = command("convert", convert, "read Tool-Star's published data")
    add("--from", dest="source", choices=("tool-star",), default="tool-star", help="whose data")
    add("--sft", metavar="FILE", help="the 54K chains: json, jsonl or parquet")
    add("--rl", metavar="FILE", help="the 10K tasks: parquet, json or jsonl")
    add("--sets", metavar="DIR", help="evaluation sets, whose questions are dropped")
    add("--database", help="world of grammar tags, whose system prompt the chains get; unset: the "
        "published one")
    add("--system-prompt", default="full", help="of --database: full, short or a file")
    add("--out", required=True, help="folder that is written")
    return p.parse_args(argv)


def tir_flags(add):
    """The flags of the command that samples."""
    add("--tasks", required=True, metavar="JSONL", help="questions with golds and check")
    add("--database", required=True, help="the world's folder: its tools.json says what tools are")
    add("--out", required=True, help="folder that is written; a killed run goes on there")
    add("--endpoint", type=endpoint, metavar="URL=MODEL", help="an OpenAI-compatible server that "
        "plays; it must go on with a begun message, as vLLM's does")
    add("--key", metavar="FILE", help="file that holds the endpoint's API key")
    add("--model", metavar="PATH", help="a checkpoint that plays in vLLM; without one and without "
        "--endpoint the solver plays, on tasks of facts")
    add("--samples", type=COUNT, default=3, help="of each task and mode [1]")
    add("--modes", type=lambda text: text.split(","), default="dr,prompt,hint",
        help="which of (1) to (3) are played")
    add("--right", help="how many samples of (1) must be right for a task to need no tools: 1of3, "
        "majority, all; unset: one")
    add("--max-calls", type=NATURAL, default=5, help="calls of a chain that is kept, at most [1]")
    add("--limit", type=COUNT, help="take only the first so many tasks")
    add("--sets", metavar="DIR", help="evaluation sets (sets.py), whose questions are left out")
    add("--system-prompt", default="full", help="full, short or a file")
    add("--temperature", type=float, default=1.0, help="of the sampling")
    add("--top-p", type=float, default=1.0, help="of the sampling")
    add("--max-tokens", type=NATURAL, default=4096, help="tokens per reply; 0: no limit but the "
        "context, and --endpoint is sent none")
    add("--max-context", type=COUNT, default=16384, help="tokens per episode, of --model")
    add("--max-turns", type=COUNT, default=9, help="tool calls per episode, then an answer")
    add("--concurrency", type=COUNT, default=32, help="episodes in flight")
    add("--tp", type=COUNT, default=1, help="GPUs that share one model")
    add("--processes", type=NATURAL, default=0, help="engines; 0: one per --tp GPUs")
    add("--gpu-memory", type=float, default=0.9, help="share of a GPU that vLLM may take")
    add("--seed", type=int, default=0, help="of hints, of what chance decides in the world, and of "
        "vLLM's sampling; an endpoint samples as it likes")


def main(argv=None):
    args = flags(argv)
    runtime.run("toolstar.tir", args.run, args)


if __name__ == "__main__":
    main()
