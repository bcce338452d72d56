"""Judge plans and measure agents: the constraints, the score, the reward, the play loop and the report.

What comes in: tasks (jsonl), a database folder, and an agent: a checkpoint folder in vLLM, an OpenAI-compatible
endpoint, or synth.py's solver. What goes out, per agent: episodes.jsonl, scores.json, and one table side by side.

(1) play     every task through sandbox.Episode, tokens in, tokens out, no barrier between turns
(2) judge    itinerary text -> plan (format_plan.parse_plan) -> 8 commonsense + 5 hard checks -> five scores
(3) report   success under three rule sets, by level, by constraint, with bootstrap intervals over tasks; pass@k;
             and of any run's folder a page to look at it (report.html)

Rule sets. `star` is what the STAR release rewards and the base of everything here. `official` is the TravelPlanner
leaderboard's own code; it differs at the places marked C1 to C12. `strict` is star and then STRICT on top: each check
that star passes is looked at once more for the holes that RL learns to use, so strict never passes what star fails.
The marks B1 to B33 and C1 to C12 number the recorded behaviours that tests/test_evaluate.py holds us to.

Where the references raise on a malformed plan, the check that met the malformed value is False with a reason.
A key that the task itself lacks is the caller's error: KeyError, naming the key.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import random
import re
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

from constraints import (COMMONSENSE, EMPTY, FIELDS, HARD, PLACES, RULES, SCORES, from_to, judge, literal, need,  # noqa: F401
                         reward, score)
from format_plan import ChatError, chat, parse_plan
from sandbox import SHORT_PROMPT, SYSTEM_PROMPT, Episode, Sandbox, open_database, parse
from solver import solver_replies


# ------------------------------------------------------------------------------------------------------------- records


def read_jsonl(path):
    """The records of a jsonl file, blank lines skipped. Errors name the file and the line."""
    return [row for _, row in scan(path)]


def scan(path, growing=False, **options):
    """(offset, record) of each line; growing: a last line without its end is still being written and is left out."""
    offset = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and not (growing and not line.endswith(b"\n")):
                try:
                    yield offset, json.loads(line, **options)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error}); mend or delete the line") from None
            offset += len(line)


def write_jsonl(path, rows):
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", errors="replace") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(temporary, path)


def append_jsonl(path, row):
    """Add one record and flush it, so that a killed run keeps every episode that ended."""
    with open(path, "a", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def load_task(raw):
    """A published record (TravelPlanner's or STAR's) as our task; errors name the key and what it holds."""
    if not isinstance(raw, dict):
        raise ValueError(f"a task is a table of keys, not a {type(raw).__name__}")
    task = {key: value for key, value in raw.items() if key not in ("reference_information", "annotated_plan")}
    for key in ("date", "days", "people_number", "budget", "visiting_city_number", "constraint", "local_constraint"):
        if isinstance(task.get(key), str):
            task[key] = literal(task[key])
    asked = task.pop("constraint", None) or task.get("local_constraint") or {}
    name = task.get("id", task.get("idx", "?"))
    if not isinstance(asked, dict):
        raise ValueError(f"task {name}: 'local_constraint' must be a table of four constraints, not {asked!r:.60}")
    rule = asked.get("house rule", asked.get("room rule"))
    task["local_constraint"] = {"house rule": rule} | {
        key: asked.get(key) for key in ("cuisine", "room type", "transportation")
    }
    kinds = {"org": str, "dest": str, "date": list, "days": int, "people_number": int, "budget": (int, float)}
    for key, kind in kinds.items():
        if not isinstance(need(task, key), kind):
            raise ValueError(f"task {name}: {key!r} is {task[key]!r:.60}, which is of the wrong type")
    task.setdefault("id", str(name))
    task.setdefault("level", "easy")
    task.setdefault("visiting_city_number", task["days"] // 2)  # 1, 2, 3 of 3, 5, 7 days, as the benchmark has it
    return task


# ---------------------------------------------------------------------------------------------------------------- play


def play(generate, episodes, concurrency=8):
    """Play text-level episodes with generate(messages) -> reply; yields each as it ends.

    Every episode has a thread of its own: a slow reply holds up nobody else, and no turn waits for another. After a
    failure no episode starts; those that still come to their end are handed over before it is raised.
    """
    waiting, failure, episodes = set(), None, iter(episodes)
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            for episode in islice(episodes, 0 if failure else concurrency - len(waiting)):
                waiting.add(pool.submit(play_one, generate, episode))
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            failure = next(filter(None, (future.exception() for future in done)), failure)
            yield from (future.result() for future in done if not future.exception())
    if failure:
        raise failure


def play_one(generate, episode):
    """One episode to its end."""
    while not episode.stop:
        try:
            episode.step(generate(episode.messages))
        except ChatError as error:
            if "context" not in str(error):  # "maximum context length is ...", as vLLM and OpenAI say it
                raise
            episode.stop = "context"
    return episode


def api_generate(url, model, **options):
    """generate(messages) of an OpenAI-compatible endpoint; options are format_plan.chat's (temperature, top_p, ...)."""
    return partial(chat, url, model, **options)


def play_solver(database, episode):
    """One episode of synth.py's solver: its searches through the tools, then its plan as the answer."""
    for reply in solver_replies(episode.task, database):
        if episode.step(reply) is None:
            break
    return episode


def engine(path, max_context, concurrency=64, tp=1, gpu_memory=0.9):
    """(vLLM engine, tokenizer) of a checkpoint folder or hub name: bf16 on GPUs, float32 on a CPU."""
    files = [Path(path) / name for name in ("tokenizer.json", "vocab.json", "tokenizer.model")]
    if Path(path).exists() and not any(file.exists() for file in files):
        raise ValueError(f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json of its base there")
    import torch

    cuda = torch.cuda.is_available()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not cuda:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM

    # a prompt read in pieces would have to rewind its request's seeded generator, which a CPU's generator cannot; and
    # the cache holds whole blocks, of 128 on a CPU unless told: each turn would read the rest of its last one again
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_context, 8192), "block_size": 32}
    place = {"gpu_memory_utilization": gpu_memory} if cuda else {"enforce_eager": True, **whole}
    llm = LLM(str(path), dtype="bfloat16" if cuda else "float32", max_model_len=max_context, max_num_seqs=concurrency,
              tensor_parallel_size=tp, enable_prefix_caching=True, **place)
    return llm, llm.get_tokenizer()


def play_vllm(llm, tokenizer, episodes, max_context, temperature=0.6, top_p=0.95, seed=0, max_tokens=None,
              concurrency=64):
    """Play episodes with a vLLM engine in this process; yields each as it ends, its number of tokens in .tokens.

    Tokens in, tokens out: what the engine said is never tokenised again, and the answer to a finished turn joins the
    very next step. Every reply has a seed of its own (seed, task, sample, turn), whoever else is playing. Tools answer
    in threads: a slow one (a search server) holds up neither the engine nor the other episodes.
    """
    engine, live, turns, numbers, episodes = llm.llm_engine, {}, {}, count(), iter(episodes)
    ask = partial(submit, engine, tokenizer, max_context, max_tokens, temperature, top_p, seed)
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            for episode in islice(episodes, concurrency - len(live)):
                number = str(next(numbers))
                live[number] = episode, prompt_ids(episode, tokenizer, max_context)
                ask(number, *live[number])
            if not live:
                return
            for output in engine.step() if len(live) > len(turns) else ():  # nothing to step when all wait for tools
                if output.finished:
                    said = list(output.outputs[0].token_ids)
                    turns[output.request_id] = pool.submit(
                        take_turn, *live[output.request_id], said, tokenizer, max_context)
            wait(turns.values(), timeout=0.001)  # s; tools take microseconds, so nearly all of them are in by then
            answered = [number for number, turn in turns.items() if turn.done()]
            for number in sorted(answered, key=lambda number: turns[number].exception() is not None):  # failures last
                turns.pop(number).result()
                episode, ids = live[number]
                if not episode.stop:
                    ask(number, episode, ids)
                    continue
                del live[number]
                episode.tokens = len(ids)
                yield episode


def prompt_ids(episode, tokenizer, max_context):
    """The ids of system prompt, query and the head of the first reply."""
    text = tokenizer.apply_chat_template(episode.messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) >= max_context:
        name = episode.task.get("id", "?")
        raise ValueError(f"task {name}: its prompt has {len(ids)} tokens; raise --max-context above {max_context}")
    return ids


def submit(engine, tokenizer, max_context, max_tokens, temperature, top_p, seed, number, episode, ids):
    """Ask the engine for the next reply of an episode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room, name = max_context - len(ids), f"{seed}/{name_of(episode.task)}/{episode.turns}"
    engine.add_request(number, {"prompt_token_ids": list(ids)}, SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=min(room, max_tokens or room), detokenize=False,
        stop_token_ids=[tokenizer.eos_token_id], output_kind=RequestOutputKind.FINAL_ONLY,
        seed=random.Random(name).getrandbits(31)))


def take_turn(episode, ids, said, tokenizer, max_context):
    """Play a reply's tokens and append them, and the observation's, to the episode's ids."""
    closed = said[-1:] == [tokenizer.eos_token_id]
    reply = tokenizer.decode(said[:-1] if closed else said)
    ids += said
    if not closed and len(ids) >= max_context:
        episode.messages.append({"role": "assistant", "content": reply})
        episode.stop = "context"
        return
    observation = episode.step(reply)
    if observation is None:
        return
    end = "" if closed else "<|im_end|>"  # a reply cut at max_tokens is closed for it
    text = f"{end}\n<|im_start|>user\n{episode.observation_message(observation)}<|im_end|>\n<|im_start|>assistant\n"
    ids += tokenizer.encode(text, add_special_tokens=False)
    if len(ids) >= max_context:
        episode.stop = "context"


# -------------------------------------------------------------------------------------------------------------- report

SIZES = {  # C11: the leaderboard's denominators: queries, queries x 8 checks, hard constraints asked
    "train": (45, 360, 105),
    "validation": (180, 1440, 420),
    "test": (1000, 8000, 2290),
}
STOPS = ("answer", "format", "turns", "context")
DESTINATIONS = {", destination in training": False, ", destination never in training": True}  # a task's `unseen`
COUNTS = ("reward", "turns", "calls", "tokens")  # means of numbers; every other line of the table is a share


def verdicts(task, plan, database):
    """What an episode's record says of its plan: star's score and reward, and whether the others pass it."""
    scores = {rules: score(task, plan, database, rules) for rules in RULES}
    return {
        "plan": plan,
        "score": scores["star"],
        "reward": reward(scores["star"], "sum"),
        "official": scores["official"],
        "strict": scores["strict"]["success"],
    }


def mean(values):
    """The mean of numbers, None of nothing."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def measure(rows):
    """{line of the table: number} over the episodes of one agent."""
    judged = [row for row in rows if "score" in row]
    star, tasks = [row["score"] for row in judged], [row["task"] for row in judged]
    replies = [parse(m["content"]).kind for row in rows for m in row["messages"] if m["role"] == "assistant"]
    found = {"episodes": len(rows), "success": mean(s["success"] for s in star)}
    found["success, official"] = mean(row["official"]["success"] for row in judged)
    found["success, strict"] = mean(row["strict"] for row in judged)
    found["hack gauge: star - strict"] = mean(row["score"]["success"] - row["strict"] for row in judged)
    for level in ("easy", "medium", "hard"):
        found[f"success, {level}"] = mean(s["success"] for s, t in zip(star, tasks) if t.get("level") == level)
    for name, unseen in DESTINATIONS.items():
        found[f"success{name}"] = mean(s["success"] for s, t in zip(star, tasks) if t.get("unseen") is unseen)
    found |= {name: mean(s[name] for s in star) for name in SCORES[:-1]}
    for name in (*COMMONSENSE, *HARD):
        found[name] = mean(s["checks"][name][0] for s in star)
    for stop in STOPS:
        found[f"stop: {stop}"] = mean(row["stop"] == stop for row in rows)
    found["replies that break the format"] = mean(kind == "error" for kind in replies)
    return found | {name: mean(row.get(name) for row in rows) for name in COUNTS}


def official_rates(rows, split):
    """The leaderboard's six rates of each task's first play, whose denominators are the split's own (C11)."""
    plans, checks, asked = SIZES[split]
    rows = [row for row in rows if not row["task"].get("sample")]
    scores, delivered = [row["official"] for row in rows if "official" in row], sum(bool(row["plan"]) for row in rows)
    if not scores:
        return {"delivery rate": delivered / plans}
    passed = [[score["checks"][name][0] is True for name in HARD] for score in scores]
    return {
        "delivery rate": delivered / plans,
        "commonsense micro rate": sum(score["cs_micro"] * 8 for score in scores) / checks,
        "commonsense macro rate": sum(score["cs_macro"] for score in scores) / plans,
        "hard micro rate": sum(map(sum, passed)) / asked,
        "hard macro rate": sum(score["hard_macro"] for score in scores) / plans,
        "final pass rate": sum(score["success"] for score in scores) / plans,
    }


def by_task(pairs):
    """{task id: [success of each play]} of (task id, success) pairs."""
    groups = {}
    for name, success in pairs:
        groups.setdefault(name, []).append(success)
    return groups


def task_rates(rows):
    """{task id: success, a mean over its plays} of episodes."""
    return {task: mean(plays) for task, plays in
            by_task((row["task"]["id"], row["score"]["success"]) for row in rows if "score" in row).items()}


def pass_at(plays):
    """{"pass@k": chance that one of k plays of a task succeeds} for k = 1, 2, 4, .. n; nothing where n is 1.

    plays: {task id: its n plays' success}. k of n plays, c of them right, all miss with chance C(n - c, k) / C(n, k),
    which is without bias (arXiv:2107.03374 eq. 1).
    """
    most = min(map(len, plays.values()), default=1)
    sizes = sorted({2**i for i in range(most.bit_length())} | {most}) if most > 1 else []
    counts = [(len(values), int(sum(values))) for values in plays.values()]
    return {f"pass@{k}": mean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) for k in sizes}


def interval(values, rounds=10_000):
    """The 95% bootstrap interval of a mean: as many values drawn with replacement, again and again."""
    import numpy as np

    rng, values = np.random.default_rng(0), np.asarray(values, float)
    draws = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(rounds)]
    return [float(end) for end in np.percentile(draws, [2.5, 97.5])]


def table(played, split=None):
    """(markdown, {agent: numbers}) of {agent: its episodes}, side by side."""
    plays = {name: by_task((row["task"]["id"], row["score"]["success"]) for row in rows if "score" in row)
             for name, rows in played.items()}
    wins = {name: task_rates(rows) for name, rows in played.items()}
    report = {name: measure(rows) | pass_at(plays[name]) | (official_rates(rows, split) if split else {})
              for name, rows in played.items()}
    lines = [["", *played], ["---"] * (len(played) + 1)]
    for line in report[next(iter(played))]:
        lines.append([line, *(show(line, numbers.get(line)) for numbers in report.values())])
    for column, (name, numbers) in enumerate(report.items(), 1):
        if wins[name]:
            numbers["success interval"] = interval(list(wins[name].values()))
            lines[3][column] += f" ({span(*numbers['success interval'])})"
    last = list(wins)[-1]
    unseen = {row["task"]["id"]: row["task"].get("unseen") for rows in played.values() for row in rows}
    for other in list(wins)[:-1]:
        for part, flag in {"": None, **DESTINATIONS}.items():
            change = [wins[last][task] - wins[other][task] for task in wins[other]
                      if task in wins[last] and (flag is None or unseen[task] is flag)]
            if change:
                report[last][f"success minus {other}'s{part}"] = [mean(change), *interval(change)]
                lines.append([f"success of {last} minus {other}{part}", *[""] * (len(played) - 1),
                              f"{100 * mean(change):+.1f} ({span(*interval(change), '+')})"])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines), report


def show(line, value):
    """A number of the table as text: shares in percent."""
    if value is None:
        return "-"
    return f"{value:.1f}" if line in COUNTS else f"{value}" if line == "episodes" else f"{100 * value:.1f}"


def span(low, high, sign=""):
    """An interval of shares in percent."""
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}"


# ---------------------------------------------------------------------------------------------------------- submission


def tidy(plan):
    """A plan in the leaderboard's words: "City(State)" is "City", and a drive is "Self-driving" (C1 to C4)."""
    return [{key: tidy_field(key, value) for key, value in day.items()} for day in plan]


def tidy_field(key, text):
    """One field of a day in the leaderboard's words."""
    if not isinstance(text, str):
        return text
    if key not in ("current_city", "transportation"):  # "Bar (The Old One), Ely(Nevada)": a name keeps its brackets
        return re.sub(r"(,[^,;(]*?)\s*\([^();]*\)(?=\s*(;|$))", r"\1", text) if key in FIELDS else text
    text = re.sub(r"\s*\([^()]*\)", "", text)
    if key == "transportation" and not re.search("flight|taxi|self-driving", text, re.I):
        text = re.sub(r"^\s*((driving|drive|car)\b[\s,:]*|(?=(from|cost)\b))", "Self-driving, ", text, flags=re.I)
    return text


def submission_faults(rows, split=None):
    """What the leaderboard would refuse, or crash on, in the rows of a submission; each names line, day and field."""
    faults = []
    if split and len(rows) != SIZES[split][0]:
        faults.append(f"the file has {len(rows)} lines, the {split} split has {SIZES[split][0]} queries")
    for line, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {"idx", "query", "plan"} <= row.keys():
            faults.append(f"line {line}: a line needs the keys idx, query and plan")
            continue
        if row["idx"] != line - 1 if split != "train" else row["idx"] not in (line - 1, line):
            faults.append(f"line {line}: idx is {row['idx']!r}; lines are in the order of the queries, from 0")
        if row["plan"] is not None and not isinstance(row["plan"], list):
            faults.append(f"line {line}: plan is a {type(row['plan']).__name__}, not a list of days")
            continue
        for number, day in enumerate(row["plan"] or [], 1):
            faults += [f"line {line}, day {number}, {fault}" for fault in day_faults(day)]
    return faults


def day_faults(day):
    """What is wrong with a day for the leaderboard's code; {} stands for a day that is not there."""
    if not isinstance(day, dict):
        return [f"all: it is a {type(day).__name__}, not a table of fields"]
    if not day:
        return []
    faults = [f"{key}: missing" for key in PLACES if key not in day]
    faults += [f"{key}: it is not text" for key in PLACES if key in day and not isinstance(day[key], str)]
    if faults:
        return faults
    if "days" not in day and "day" not in day:
        faults.append("day: missing")
    city, move = day["current_city"], day["transportation"]
    if "from" in city and from_to(city, True)[0] is None:
        faults.append('current_city: it must say "from A to B"')
    if "flight number" in move.lower() and "Flight Number: " not in move:
        faults.append('transportation: a flight is written "Flight Number: F1234567, from A to B, ..."')
    elif "flight number" in move.lower() and from_to(move, True)[0] is None and from_to(city, True)[0] is None:
        faults.append("transportation: the flight has no cities")
    if move not in EMPTY and not re.search("flight number|taxi|self-driving", move, re.I):
        faults.append("transportation: neither a flight number nor taxi nor self-driving, so it would go unjudged")
    return faults


# ---------------------------------------------------------------------------------------------------------------- main


def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument_group("agent").add_argument
    add("--model",       nargs="+", default=[], metavar="[NAME=]PATH", help="folders, hub names, or models of --url")
    add("--agent",       choices=("model", "solver"), default="model", help="solver: synth.py's, through the tools")
    add("--url",         help="an OpenAI-compatible endpoint, http://host:port/v1; without it vLLM plays here")
    add("--tp",          type=int,   default=1,     help="GPUs that share one model")
    add("--gpu-memory",  type=float, default=0.9,   help="share of the GPU that vLLM may take")
    add = p.add_argument_group("tasks").add_argument
    add("--tasks",       metavar="FILE|DIR|HUB_ID", help="a file of tasks, ours or the published form; with --split a "
                         "folder of SPLIT.csv or SPLIT.jsonl, or a data set on the hub (osunlp/TravelPlanner)")
    add("--database",    metavar="DIR", help="default: $STAR_DATABASE, else database/mini")
    add("--limit",       type=int,   help="play only the first N tasks")
    add("--samples",     type=int,   default=1,     help="plays per task; several add pass@k")
    add("--split",       choices=SIZES, help="what the tasks are: the leaderboard's rates and a submission.jsonl")
    add = p.add_argument_group("play").add_argument
    add("--temperature", type=float, default=0.6,   help="of the sampling [STAR app. D]")
    add("--top-p",       type=float, default=0.95,  help="of the sampling [STAR app. D]")
    add("--max-context", type=int,   default=32768, help="tokens per episode [STAR app. D]")
    add("--max-turns",   type=int,   default=60,    help="replies per episode [STAR app. D]")
    add("--max-tokens",  type=int,   default=4096,  help="tokens per reply")
    add("--system-prompt", default="full", metavar="full|short|FILE", help="what the checkpoint was trained on")
    add("--failure-rate", type=float, default=0.0,  help="share of tool calls that fail [STAR sec. 3]")
    add("--concurrency", type=int,   default=64,    help="episodes in flight")
    add("--seed",        type=int,   default=0,     help="of the sampling and the failures")
    add = p.add_argument_group("output").add_argument
    add("--out",         default="out/eval", help="a folder per agent, table.md; a rerun plays what is missing")
    return p.parse_args(argv)


SETTINGS = ("database", "temperature", "top_p", "max_context", "max_turns", "max_tokens", "system_prompt",
            "failure_rate", "seed")


def agents(a):
    """{name: path} of the agents to compare; a name is the end of the path that tells it from the others."""
    if a.agent == "solver":
        return {"solver": None}
    named = [spec.partition("=") if re.match(r"[\w.-]+=", spec) else ("", "", spec) for spec in a.model]
    parts = [[part for part in Path(path).parts if part not in "/."] for _, _, path in named]
    found = {}
    for (name, _, path), ends in zip(named, parts):
        short = [n for n in range(1, len(ends)) if sum(other[-n:] == ends[-n:] for other in parts) == 1]
        found[name or "-".join(ends[-short[0] :] if short else ends)] = path
    if not named or len(found) < len(named):
        raise ValueError("--model wants one or more checkpoints with different names (or --agent solver)")
    return found


def find_tasks(source, split):
    """The file of tasks: a file itself, or SPLIT.csv or SPLIT.jsonl of a folder or of a data set on the hub."""
    path, names = Path(source), (f"{split}.csv", f"{split}.jsonl")
    named = path.suffix in (".csv", ".jsonl") or not re.fullmatch(r"[\w.-]+/[\w.-]+", source)
    if path.is_file() or named and not path.is_dir():
        return path
    if not split:
        raise ValueError(f"{source} is a data set: --split train, validation or test says which part of it")
    if path.is_dir():
        found = [path / name for name in names if (path / name).exists()]
        if not found:
            raise ValueError(f"{source} holds neither {names[0]} nor {names[1]}")
        return found[0]
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in names:
        try:
            return Path(hf_hub_download(source, name, repo_type="dataset"))
        except (OSError, EntryNotFoundError) as error:
            why = type(error).__name__
    raise ValueError(f"{source} is no folder here, and the hub gives no {' or '.join(names)} of it ({why}): fetch it "
                     f"where it can be had (hf download {source} --repo-type dataset --local-dir DIR) and name DIR")


def read_csv(path):
    """The rows of a published csv; its reference information makes fields of megabytes."""
    csv.field_size_limit(1 << 30)
    with open(path, encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if key and value} for row in csv.DictReader(file)]


def load_tasks(source, limit=None, split=None):
    """The tasks of a file or data set, in either form.

    The published test split says no more than level, days and query: it is played for the leaderboard, not judged.
    """
    if source is None:
        raise ValueError("--tasks FILE.jsonl is needed; python synth.py tasks writes one")
    path, tasks = find_tasks(source, split), []
    rows = read_csv(path) if path.suffix == ".csv" else read_jsonl(path)
    for number, row in enumerate(rows[:limit]):
        row = row if not isinstance(row, dict) or row.keys() & {"id", "idx"} else row | {"idx": number}
        told = split != "test" or "org" in row
        tasks.append(load_task(row) if told else {"id": str(row.get("id", row.get("idx")))} | {
            key: row[key] for key in ("idx", "level", "days", "query") if key in row})
    if not tasks:
        raise ValueError(f"{path}: holds no task; python synth.py tasks writes some")
    ids = [task["id"] for task in tasks]
    twice = next((name for name in ids if ids.count(name) > 1), None) if len(set(ids)) < len(ids) else None
    if twice is not None:
        raise ValueError(f"{path}: two tasks have the id {twice!r}; episodes are told apart by it")
    return tasks


def name_of(task):
    """What tells a play from the others: the task's id, and which sample of it."""
    return f"{task['id']}/{task.get('sample', 0)}"


def read_played(path):
    """The whole records of an episodes file; a last line that a killed run left half written is cut off."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
    return read_jsonl(path) if data else []


def open_folder(a, name, path):
    """OUT/name, which holds one way of playing: going on in another is refused."""
    folder = Path(a.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    settings, file = {"model": path} | {key: getattr(a, key) for key in SETTINGS}, folder / "settings.json"
    before = json.loads(file.read_text()) if file.exists() else settings
    changed = [f"{key} was {before.get(key)!r} and is {settings[key]!r}" for key in settings
               if before.get(key) != settings[key]]
    if changed:
        raise ValueError(f"{folder} was played otherwise ({'; '.join(changed)}): choose another --out or remove it")
    file.write_text(json.dumps(settings, indent=1))
    return folder


def play_agent(a, name, path, tasks):
    """Play what OUT/name/episodes.jsonl lacks of an agent's episodes and append each as it ends."""
    from tqdm import tqdm

    folder, database = Path(a.out) / name, open_database(a.database)
    done = {name_of(row["task"]) for row in read_played(folder / "episodes.jsonl")}
    left = [task for task in tasks if name_of(task) not in done]
    prompts = {"full": SYSTEM_PROMPT, "short": SHORT_PROMPT}
    prompt = prompts.get(a.system_prompt) or Path(a.system_prompt).read_text(encoding="utf-8")
    sandboxes = (Sandbox(database, a.failure_rate, f"{a.seed}/{name_of(task)}") for task in left)
    episodes = (Episode(task, box, a.max_turns, prompt, strict=False) for task, box in zip(left, sandboxes))
    wins = []
    bar = tqdm(player(a, path, episodes, database) if left else (), name, len(tasks), initial=len(tasks) - len(left))
    for episode in bar:
        plan = parse_plan(episode.answer, episode.task, database) if episode.answer is not None else None
        row = episode.record(name) | {"plan": plan, "tokens": getattr(episode, "tokens", None)}
        if "org" in episode.task:
            row |= verdicts(episode.task, plan, database)
            wins.append(row["score"]["success"])
            bar.set_postfix_str(f"success {mean(wins):.3f}", refresh=False)
        append_jsonl(folder / "episodes.jsonl", row)


def player(a, path, episodes, database):
    """The episodes as they end, played by the solver, an endpoint or a vLLM engine."""
    if a.agent == "solver":
        return map(partial(play_solver, database), episodes)
    if a.url:
        generate = api_generate(a.url, path, temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens)
        return play(generate, episodes, a.concurrency)
    llm, tokenizer = engine(path, a.max_context, a.concurrency, a.tp, a.gpu_memory)
    return play_vllm(llm, tokenizer, episodes, a.max_context, a.temperature, a.top_p, a.seed, a.max_tokens,
                     a.concurrency)


def submit_file(folder, rows, split):
    """Write the leaderboard's file of an agent and print what it would refuse."""
    rows = [(int(row["task"].get("idx", row["task"]["id"])), row) for row in rows if not row["task"].get("sample")]
    lines = [{"idx": idx, "query": row["task"]["query"], "plan": tidy(row["plan"] or []) or None}
             for idx, row in sorted(rows, key=lambda pair: pair[0])]
    write_jsonl(folder / "submission.jsonl", lines)
    for fault in submission_faults(lines, split):
        print(f"{folder / 'submission.jsonl'}, {fault}")


def run(function, *args):
    """Call it; what the user can mend is one line and not a traceback."""
    try:
        function(*args)
    except (KeyError, ValueError, FileNotFoundError, ChatError) as error:
        text = error.args[0] if isinstance(error, KeyError) else error
        raise SystemExit(f"evaluate.py: {text}") from None


def evaluate(a):
    """Play, judge, report."""
    tasks = load_tasks(a.tasks, a.limit, a.split)
    tasks = [task | ({"sample": k} if k else {}) for task in tasks for k in range(a.samples)]
    chosen = agents(a)
    folders = {name: open_folder(a, name, path) for name, path in chosen.items()}
    for name, path in chosen.items():
        # (1) (2) in a process of its own: only its end gives back all of an engine's memory
        child = get_context("spawn").Process(target=run, args=(play_agent, a, name, path, tasks))
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"evaluate.py: {name} stopped early; the same command goes on where it was")
    # (3)
    wanted, played = {name_of(task) for task in tasks}, {}
    for name, folder in folders.items():
        rows = read_played(folder / "episodes.jsonl")
        played[name] = [row for row in rows if name_of(row["task"]) in wanted]
    text, report = table(played, a.split)
    for name, folder in folders.items():
        (folder / "scores.json").write_text(json.dumps(report[name], indent=1))
        if a.split:
            submit_file(folder, played[name], a.split)
    (Path(a.out) / "table.md").write_text(text)
    print(text)


def main(argv=None):
    run(evaluate, flags(argv))


# ---------------------------------------------------------------- until evaluate.py is written anew
# What qa_eval.py will find there; open_folder still serves this file's own calls as well.

def recover_jsonl(path):
    """The records that a killed run left, [] without a file; a line it did not finish is cut off."""
    if not Path(path).exists():
        return []
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return read_jsonl(path)


@contextlib.contextmanager
def replacing(path):
    """A text file under a temporary name, which takes the path's place once it is whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", errors="replace") as out:
            yield out
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def named_paths(specs):
    """{name: path} of [NAME=]PATH arguments; a name is the end of a path that tells it apart."""
    named = [spec.partition("=") if re.match(r"[\w.-]+=", spec) else ("", "", spec) for spec in specs]
    parts = [[part for part in Path(path).parts if part not in "/."] for _, _, path in named]
    found = {}
    for (name, _, path), ends in zip(named, parts):
        short = [n for n in range(1, len(ends)) if sum(other[-n:] == ends[-n:] for other in parts) == 1]
        found[name or "-".join(ends[-short[0] :] if short else ends)] = path
    if not named or len(found) < len(named):
        raise ValueError("--model wants one or more checkpoints with different names")
    return found


open_own_folder = open_folder


def open_folder(out, name, settings):  # noqa: F811
    """OUT/name, which holds one way of playing: going on in another is refused."""
    if not isinstance(settings, dict):
        return open_own_folder(out, name, settings)
    folder = Path(out) / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    before = json.loads(file.read_text()) if file.exists() else settings
    changed = [f"{key} was {before.get(key)!r} and is {settings[key]!r}" for key in settings
               if before.get(key) != settings[key]]
    if changed:
        raise ValueError(f"{folder} was played otherwise ({'; '.join(changed)}): choose another --out or remove it")
    file.write_text(json.dumps(settings, indent=1))
    return folder


if __name__ == "__main__":
    main()
