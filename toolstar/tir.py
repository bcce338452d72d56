"""
Make the training data of the tools world, as Tool-Star's synthesis does [1].

    (1) dr       answer each question --samples times by language alone ("direct reasoning")
    (2) prompt   answer it --samples times with the world's tools
    (3) hint     answer it --samples times from a thought of (1). The thought is cut after a
                 sentence of doubt, or the answer is added to it and doubted; then a hint to use a
                 tool is added, and the model continues with tools
    (4) quality  refuse a sample of (2) or (3) that has no call or too many, a repeated call, an
                 unpaired tag, a broken tool or no answer
    (5) choose   if (1) is right, SFT learns to answer without tools. Else, if (2) or (3) is right,
                 SFT learns the right chain with the fewest calls. Else the task goes to RL

A language model plays, in vLLM or at --url, an endpoint that continues a begun assistant message,
as vLLM's does.
[1] Tool-Star, arXiv:2505.16410, section 3; its code for this is not released

Reads   a world's folder, tasks; database/prompts/direct.txt, doubts.txt and hints.txt
Writes  OUT/samples.jsonl, a line per sample: a run that was killed resumes from it, and another
        --right or --max-calls chooses again from it. OUT/sft.jsonl, rl.jsonl

    python -m toolstar tir --database my/world --tasks my/questions.jsonl \\
        --url http://localhost:8000/v1 --model Qwen2.5-3B-Instruct --out out/tir
"""
import random
import re
from collections import Counter
from functools import partial

import evaluate
import runtime
from evaluate import name_of
from runtime import Mistake
from sandbox import PROMPTS, entries, fill
from toolstar.sets import contaminated, questions_of
from toolstar.verdict import bare

MODES = ("dr", "prompt", "hint")
SETTINGS = ("database", "temperature", "top_p", "max_context", "max_turns", "max_tokens",
            "system_prompt", "lenient", "seed")  # flags that all samples of a folder share
KEPT = "samples.jsonl"
DOUBTS = (PROMPTS / "doubts.txt").read_text(encoding="utf-8").split("\n")
DOUBT = re.compile(rf"\b(?:{'|'.join(re.escape(words) for words in DOUBTS if words)})\b", re.I)
HINTS = entries(PROMPTS / "hints.txt")
SENTENCE_END = re.compile(r"[.?!](?=\s|$)|\n|$")
PAIRED = re.compile(r"<(/?)(think|answer|search|python|browse|tool_call)>")
DIRECT = {"turns": "the answer and nothing else: a name, a number, a few words",
          "tags": r"\[ \boxed{the answer} \]"}  # for the prompt of (1): the content of <answer>
SHORT_DIRECT = "You answer questions. Reply <think>...</think><answer>...</answer>."


# ---------------------------------------------------------------- samples

def direct_prompt(name, grammar):
    """The system prompt of (1), which mentions no tools. name: "short", or any other."""
    if name == "short":
        return SHORT_DIRECT
    text = (PROMPTS / "direct.txt").read_text(encoding="utf-8").strip()
    return text.replace("{answer}", DIRECT[grammar])


def begin(args, world, task):
    """The Episode of a sample; one of (1) has no tools, one of (3) has the start of a reply."""
    episode = world.episode(task, f"{args.seed}/{name_of(task)}", args)
    episode.strict = not args.lenient
    if mode_of(task) == "dr":
        episode.sandbox.tools = frozenset()  # a call breaks the format
        prompt = direct_prompt(args.system_prompt, world.settings.grammar)
        episode.messages[0] = {"role": "system", "content": prompt}
    if "begun" in task:
        episode.messages.append({"role": "assistant", "content": task["begun"]})
    return episode


def mode_of(task):
    return task["sample"].partition("-")[0]


def play_samples(args, todo):
    """Yield the judged record of each sample as it ends."""
    from toolstar.tools import open_world

    world = open_world(args)
    # 40 retries, so that some minutes of downtime do not end a run of days
    played = evaluate.play_model(args, args.model, world, (
        begin(args, world, task) for task in todo), retries=40)
    for episode, answer, score, strict in runtime.judged(world, played):
        yield episode.record(args.model) | {
            "plan": answer, "score": score, "strict": strict,
            "reward": world.reward(score, world.rewards[0]),
            "tokens": getattr(episode, "tokens", None)}
    world.close()


# ---------------------------------------------------------------- hints

def hint_at_doubt(rng, thought, hint):
    """The thought up to the end of a random sentence of doubt, with the hint appended; None if no
    sentence of it expresses doubt."""
    ends = {SENTENCE_END.search(thought, doubt.end()).end() for doubt in DOUBT.finditer(thought)}
    return f"{thought[:rng.choice(sorted(ends))].rstrip()} {hint}" if ends else None


def begin_with_hint(seed, task, chain, tools):
    """(the start of the reply in a sample of (3), "doubt" or "answer").

    chain: the record of an answered sample of (1). tools: names of the world's tools. Samples with
    an even number cut the thought at a doubt; those with an odd number, and those whose thought has
    no doubt, add the answer and doubt it.
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
    """Yield the samples that are still to be played; those of (3) once their sample of (1) is done.

    rows: {name: record} of the samples that were played; tools: names of the world's tools.
    """
    for task in tasks:
        for mode in MODES:
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
    """Whether all tags of a text are closed in the right order, and none is nested in its like."""
    opened = []
    for closing, name in PAIRED.findall(text):
        if closing and (not opened or opened.pop() != name) or not closing and name in opened:
            return False
        opened += [] if closing else [name]
    return not opened


def fault_of(row, most):
    """(4) Why a sample's record is refused, or "". most: the most calls of a chain."""
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


def choose(rows, args):
    """(5) The record of a task from which SFT learns, or None. rows: the records of its samples. A
    sample is right if its answer is and (4) does not refuse it."""
    good = [row for row in rows if row["strict"] == 1 and not fault_of(row, args.max_calls)]
    direct = [row for row in good if mode_of(row["task"]) == "dr"]
    if len(direct) >= args.right:
        return direct[0]
    chains = [row for row in good if mode_of(row["task"]) != "dr"]
    return min(chains, key=lambda row: len(row["tools"]), default=None)


def as_episode(row, prompt):
    """A sample's record as an episode for SFT, with the system prompt of (2): under the prompt with
    tools a model must also learn when to answer without them."""
    ours = ("sample", "begun", "hint")
    task = {key: value for key, value in row["task"].items() if key not in ours}
    messages = [{"role": "system", "content": prompt}, *row["messages"][1:]]
    return row | {"task": task, "messages": messages, "source": mode_of(row["task"])}


# ---------------------------------------------------------------- tir

def play_missing(args, folder, tasks, tools):
    """(1) to (3) Play the samples that samples.jsonl lacks, then sort the file into the order of
    the tasks. Returns the records of all samples in this order."""
    file = folder / KEPT
    rows = evaluate.read_episodes(file, recover=True)
    now = {task["id"]: task for task in tasks}
    if any(not now.get(row["task"]["id"], {}).items() <= row["task"].items()
           for row in rows.values()):
        raise Mistake(f"{folder}: other tasks with these ids were played; choose another --out")
    for what in "dr, prompt", "hint":  # (3) starts from (1), so it is a second round
        todo = list(wanted_samples(args, tasks, rows, tools))
        append = evaluate.append_rows if args.url else evaluate.in_processes
        append(file, what, partial(play_samples, args), todo, args)
        rows = evaluate.read_episodes(file)
        for task in todo if args.show else ():
            evaluate.print_episode(rows[name_of(task)])
    names = [f"{task['id']}/{mode}-{k}" for task in tasks for mode in MODES
             for k in range(args.samples)]
    wanted = {name: rows.pop(name) for name in names if name in rows}
    runtime.write_jsonl(file, [*wanted.values(), *rows.values()])
    return list(wanted.values())


def tir(args):
    """Play the samples, choose among them, and write the files."""
    from toolstar.tools import open_world, system_prompt

    if len(evaluate.named_paths(args.model)) > 1:
        raise Mistake("--model: one model plays")
    args.model, = evaluate.named_paths(args.model).values()
    world = open_world(args)
    world.close()  # play_samples opens its own
    tasks = runtime.load_tasks(args.tasks, world.load_task, args.limit)
    tasks, dropped = contaminated(tasks, questions_of(args.sets) if args.sets else [])
    settings = evaluate.model_settings(args.model, args.url)  # the same path may hold other weights
    settings |= {key: getattr(args, key) for key in SETTINGS}
    runtime.lock_folder(args.out)
    folder = evaluate.open_folder(args.out, "", settings, KEPT)
    rows = play_missing(args, folder, tasks, world.settings.tools)
    # (4) (5)
    by_task, sft, rl = {task["id"]: [] for task in tasks}, [], []
    for row in rows:
        by_task[row["task"]["id"]].append(row)
    prompt = system_prompt(args.system_prompt, world.settings)
    for task in tasks:
        if row := choose(by_task[task["id"]], args):
            sft.append(as_episode(row, prompt))
        else:
            rl.append(task)
    runtime.write_jsonl(folder / "sft.jsonl", sft)
    runtime.write_jsonl(folder / "rl.jsonl", rl)
    faults = Counter(fault_of(row, args.max_calls) for row in rows)
    print(f"{folder}: {len(tasks)} tasks, {len(sft)} episodes for SFT "
          f"{dict(Counter(row['source'] for row in sft))}, {len(rl)} tasks for RL; {len(dropped)} "
          f"left out, since their questions are in an evaluation set; {len(rows)} samples, refused:"
          f" {({fault: n for fault, n in faults.items() if fault})}")
