"""
Measure agents: play the tasks of a world with any agent, judge the answers, and compare.

    (1) play     every task to its end, without waiting for other episodes: a checkpoint in vLLM
                 (tokens in, tokens out), an OpenAI-compatible endpoint, the world's exact solver,
                 or a person
    (2) judge    append the world's verdict on each episode to OUT/AGENT/episodes.jsonl
    (3) report   one table of all agents: success, every number of the score, each check, pass@k,
                 with bootstrap intervals over tasks

[1] STAR, arXiv:2603.21972 app. D

Reads   tasks, ours or as published; checkpoints, which are HF folders or hub names
Writes  OUT/AGENT/episodes.jsonl, settings.json, scores.json; OUT/table.md. A rerun plays only the
        episodes that OUT lacks

    python evaluate.py --model base=A sft=out/sft rl=out/rl --tasks data/val.jsonl --out out/eval
    python evaluate.py --model out/rl --tasks data/val.jsonl --limit 1 --show
    python evaluate.py --model out/rl --ask "Plan a trip from Omaha to Denver for ..."
    python evaluate.py --model A --tasks osunlp/TravelPlanner --split validation --database DIR
"""
import contextlib
import json
import math
import os
import re
import sys
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from queue import Empty

import runtime
from runtime import AMOUNT, COUNT, NATURAL, PART, ChatError, Help, Parser, Refused, web_address

STOPS = ("answer", "format", "turns", "context")
MANY_REFUSALS = 8  # after so many refused plays in a row, check that the endpoint works at all
COUNTS = ("reward", "turns", "calls", "tokens")  # lines of the table that are not percentages
SETTINGS = ("env", "temperature", "top_p", "max_context", "max_turns", "max_tokens", "lenient",
            "seed")


# -------------------------------------------------------------------------------- playing by text

def play(generate, episodes, concurrency=8, max_context=math.inf, max_tokens=0, worked=False):
    """Play text-level episodes with generate(messages) -> reply; yields each as it ends.

    Every episode has its own thread, so that a slow reply delays nobody else. After a failure no
    new episode starts; those that still end are yielded before it is raised.

    A refused episode is held back until another one ends normally. If `concurrency` episodes in a
    row are refused (MANY_REFUSALS at least), or all that remain, blame() decides whether the
    endpoint is at fault. If so, the refused episodes are not yielded, and the next run plays them
    again. worked: whether an earlier run has episodes that were not refused.
    """
    waiting, refused, failure, episodes = set(), [], None, iter(episodes)
    tokens = []  # of each episode, if the endpoint counts them
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            stopped = failure or len(refused) >= max(MANY_REFUSALS, concurrency)
            for episode in islice(episodes, 0 if stopped else concurrency - len(waiting)):
                waiting.add(pool.submit(play_one, generate, episode, max_context, max_tokens))
            if not waiting and (failure or not refused):
                break
            if not waiting:
                failure = blame(generate, refused[-1], worked)
                yield from () if failure else refused
                refused = []
                continue
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                failure = failure or future.exception()
            ended = [future.result() for future in done if not future.exception()]
            refused += [episode for episode in ended if episode.stop == "refused"]
            ended = [episode for episode in ended if episode.stop != "refused"]
            if ended:
                tokens += [getattr(episode, "tokens", None) for episode in ended]
                worked, ended, refused = True, [*refused, *ended], []
                yield from ended
    if tokens and not any(tokens) and max_context < math.inf:
        print(f"warning: the endpoint reports no usage, so --max-context {max_context} had no "
              "effect", file=sys.stderr)
    if failure:
        raise failure


def blame(generate, episode, worked):
    """A ChatError if the endpoint has refused every play, or now refuses even a greeting under the
    system prompt of this refused episode; None if it only refuses some requests."""
    if not worked:
        return ChatError(f"every play was refused, the last one so: {episode.refusal}")
    try:
        generate([episode.messages[0], {"role": "user", "content": "Hello"}])
    except ChatError as error:
        return error


def play_one(generate, episode, max_context=math.inf, max_tokens=0):
    """Play one episode to its end. max_context: most tokens of the episode, as the endpoint counts
    them; max_tokens: most tokens of a reply, as generate requests."""
    while not episode.stop:
        try:
            reply = generate(episode.messages)
        except Refused as error:
            # a lower bound: the number of tokens in the last observation is unknown
            sent = (getattr(episode, "tokens", 0) or 0) + max_tokens
            full = isinstance(error, runtime.NoRoom) or error.may_be_length and sent >= max_context
            episode.stop, episode.refusal = "context" if full else "refused", str(error)
            break
        episode.tokens = getattr(reply, "tokens", 0) or None
        if (episode.tokens or 0) > max_context:  # an engine would have cut this reply
            episode.messages.append({"role": "assistant", "content": reply})
            episode.stop = "context"
            break
        with runtime.naming_world(f"{type(episode).__name__}.step", episode.task):
            episode.step(reply)
    return episode


def play_replies(world, episode):
    """Play one episode with the replies of the world's exact solver."""
    for reply in world.solver(episode.task):
        if episode.step(reply) is None:
            break
    return episode


def ask_person(messages, stops=()):
    """generate(messages) that shows the last message and reads a reply from the terminal."""
    shown = "\n\n".join(one["content"] for one in messages[-1 if len(messages) > 2 else 0:])
    print(f"\n{shown}\n\nType <tool_call>...</tool_call> or <answer>...</answer>, on one line or "
          "several:", file=sys.stderr)
    text = input("> ")
    while not text.rstrip().endswith(("</answer>", "</tool_call>", *stops)):
        text += "\n" + input()
    return text if "<think>" in text else f"<think></think>{text}"


# --------------------------------------------------------------------------------- playing in vLLM

def open_engine(path, max_context, concurrency=64, tp=1, gpu_memory=0.9):
    """(vLLM engine, Template) of a checkpoint folder or hub name."""
    template = runtime.load_template(path)
    settings = runtime.engine_settings(max_context, concurrency, tp, gpu_memory)
    return runtime.open_llm(path, **settings), template


def play_vllm(llm, template, episodes, max_context, temperature=0.6, top_p=0.95, seed=0,
              max_tokens=None, concurrency=64, stops=(), slow=True, asks=None):
    """Play episodes with a vLLM engine in this process; yields each as it ends, with .tokens.

    Each reply has its own seed (seed, task, sample, turn) and does not depend on other plays. slow:
    as in runtime.Calls; asks: questions that tools put to the same engine (toolstar.helpers).
    """
    live, numbers, episodes = {}, count(), iter(episodes)

    def ask(play):
        episode, ids = play
        number, room = str(next(numbers)), max_context - len(ids)
        live[number] = play
        runtime.add_request(llm.llm_engine, number, ids, template, stops,
                            f"{seed}/{name_of(episode.task)}/{episode.turns}",
                            temperature=temperature, top_p=top_p,
                            max_tokens=min(room, max_tokens or room))

    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(contextlib.closing(runtime.Calls(slow, concurrency)))
        if asks:  # closed first: a thread that waits for an answer would keep the calls open
            stack.enter_context(contextlib.closing(asks))
        while True:
            for episode in islice(episodes, max(calls.free(live), 0)):
                ask((episode, prompt_ids(episode, template, max_context)))
            if not live and not calls:
                return
            if asks:
                asks.submit(llm.llm_engine, template, max_context, seed, temperature, top_p)
            busy = live or asks and asks.running
            for output in llm.llm_engine.step() if busy else ():
                if output.finished and not (asks and asks.take(output, template)):
                    play = live.pop(output.request_id)
                    action = play_reply(*play, output.outputs[0], template, max_context)
                    calls.start(play, play[0], action)
            for (episode, ids), observation in calls.ready(not (live or asks and asks.running)):
                if observation is not None:
                    play_observation(episode, ids, observation, template, max_context)
                if not episode.stop:
                    ask((episode, ids))
                    continue
                episode.tokens = len(ids)
                yield episode


def prompt_ids(episode, template, max_context):
    """The ids of the system prompt, the query and the beginning of the first reply's turn."""
    ids = template.prompt(episode.messages)
    if len(ids) >= max_context:
        raise ValueError(f"task {episode.task.get('id', '?')}: its prompt has {len(ids)} tokens; "
                         f"raise --max-context above {max_context}")
    return ids


def play_reply(episode, ids, output, template, max_context):
    """Append a reply's tokens to the episode's -> the Action to answer, or None at the end."""
    sampled, episode.prompt_tokens = list(output.token_ids), len(ids)
    reply, closed = template.reply(sampled)
    ids += sampled
    if not closed and len(ids) >= max_context:
        episode.messages.append({"role": "assistant", "content": reply})
        episode.stop = "context"
        return None
    action = episode.begin(reply)
    episode.tokens = len(ids)  # a helper may read this while the action is answered
    return action


def play_observation(episode, ids, observation, template, max_context):
    """Append an observation's tokens to the episode's: what the agent sees next."""
    episode.finish(observation)
    if episode.rewritten:  # a helper has changed earlier messages
        ids[:] = episode.tokens_again(ids, template)
    else:
        new = template.between(episode.messages[-1], closed=ids[-1] in template.ends)
        episode.observation_tokens = len(new)
        ids += new
    if len(ids) >= max_context:
        episode.stop = "context"


def name_of(task):
    """The name of a play: its task's id and the number of the sample."""
    return f"{task['id']}/{task.get('sample', 0)}"


# ----------------------------------------------------------------------------------------- report

def mean(values):
    """The mean of the numbers that are not None; None if there are none."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def lines_of(row, stops=STOPS, world_lines=None):
    """{line of the table: number or None} of one episode.

    world_lines(row): the lines that a world adds for a judged episode.
    """
    found = {}
    if "score" in row:
        score = row["score"]
        found = {"success": score["success"], "success, strict": row["strict"]}
        found |= world_lines(row) if world_lines else {}
        found |= {name: value for name, value in score.items()
                  if isinstance(value, float) and name not in ("success", "official")}
        found |= {f"{name} per episode": value for name, value in score.items()
                  if type(value) is int}
        found |= {name: passed for name, (passed, _) in score.get("checks", {}).items()}
    return found | {f"stop: {stop}": row["stop"] == stop for stop in stops}


def measure(rows, world_lines=None):
    """{line of the table: number} over the episodes of one agent."""
    stops = dict.fromkeys((*STOPS, *(row["stop"] for row in rows)))
    each = [lines_of(row, stops, world_lines) for row in rows]
    lines = dict.fromkeys(line for numbers in each for line in numbers)
    replies = [reply < row["errors"] for row in rows if "errors" in row
               for reply in range(row["turns"])]
    found = {"episodes": len(rows)} | {line: mean(one.get(line) for one in each) for line in lines}
    found["replies that break the format"] = mean(replies)
    return found | {name: mean(row.get(name) for row in rows) for name in COUNTS}


def plays_of(rows):
    """{task id: [success of each play]} of judged episodes."""
    plays = {}
    for row in rows:
        if "score" in row:
            plays.setdefault(row["task"]["id"], []).append(row["score"]["success"])
    return plays


def pass_at(plays):
    """{"pass@k": probability that at least one of k plays of a task succeeds}, k = 1, 2, 4, .. n;
    {} if n = 1.

    plays: {task id: its n plays' success}. If c of n plays succeed, all of k fail with probability
    C(n - c, k) / C(n, k), an unbiased estimate (arXiv:2107.03374 eq. 1).
    """
    most = min(map(len, plays.values()), default=1)
    sizes = sorted({2**i for i in range(most.bit_length())} | {most}) if most > 1 else []
    counts = [(len(values), int(sum(values))) for values in plays.values()]
    return {f"pass@{k}": mean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts)
            for k in sizes}


def interval(values, least=0.0, rounds=10_000):
    """The 95% bootstrap interval of a mean of shares.

    least: the smallest possible value, -1 for differences.
    """
    import numpy as np

    rng, values = np.random.default_rng(0), np.asarray(values, float)
    draws = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(rounds)]
    return widened(*np.percentile(draws, [2.5, 97.5]), len(values), least)


def widened(low, high, n, least=0.0):
    """A bootstrap interval over n values. If all values are equal, the bootstrap has no width: take
    the width of the binomial interval for 0 successes of n."""
    width = 1 - 0.025 ** (1 / n) if high - low < 1e-12 else 0.0
    return [float(max(least, low - width)), float(min(1.0, high + width))]


def span(low, high, sign=""):
    """An interval of shares in percent."""
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}"


def table(played, world_lines=None):
    """(markdown, {agent: numbers}) of {agent: its episodes}, side by side."""
    plays = {name: plays_of(rows) for name, rows in played.items()}
    wins = {name: {task: mean(values) for task, values in each.items()}
            for name, each in plays.items()}
    report = {name: measure(rows, world_lines) | pass_at(plays[name])
              for name, rows in played.items()}
    lines = dict.fromkeys(line for numbers in report.values() for line, value in numbers.items()
                          if value is not None)
    cells = {line: [show(line, numbers.get(line)) for numbers in report.values()] for line in lines}
    for column, (name, numbers) in enumerate(report.items()):
        if wins[name]:
            numbers["success interval"] = interval(list(wins[name].values()))
            cells["success"][column] += f" ({span(*numbers['success interval'])})"
    last, blank = list(wins)[-1], [""] * (len(played) - 1)
    for other in list(wins)[:-1]:
        both = wins[other].keys() & wins[last].keys()
        if both:
            change = [wins[last][task] - wins[other][task] for task in wins[other] if task in both]
            found = report[last][f"success minus {other}'s"] = [mean(change), *interval(change, -1)]
            cells[f"success of {last} minus {other}"] = [
                *blank, f"{100 * found[0]:+.1f} ({span(*found[1:], '+')})"]
    rows = [["", *played], ["---"] * (len(played) + 1)]
    rows += [[line, *row] for line, row in cells.items()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows), report


def aligned(text):
    """A table of markdown with columns of equal width, for the terminal."""
    rows = [line.split("|") for line in text.splitlines()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("|".join(map(str.ljust, row, widths)) for row in rows)


def show(line, value):
    """A number of the table as text; shares in percent."""
    if value is None:
        return "-"
    if line in COUNTS or line.endswith((" per episode", "seconds")):
        return f"{value:.1f}"
    return str(value) if line == "episodes" else f"{100 * value:.1f}"


def print_episode(row):
    """Print an episode turn by turn, then its verdict."""
    for message in row["messages"]:
        print(f"\n--- {message['role']}\n{message['content']}")
    print_verdict(row)


def print_verdict(row):
    """Print why an episode stopped, and its verdict, check by check."""
    said = f" ({row['refusal']})" if "refusal" in row else ""
    print(f"\n--- the episode stopped: {row['stop']}{said}")
    if "score" not in row:
        return
    if not row.get("plan"):
        print("no plan was read from the answer")
    for name, (passed, reason) in row["score"].get("checks", {}).items() if row.get("plan") else ():
        word = {True: "passed", False: "FAILED"}.get(passed, "does not apply, or was not reached")
        print(f"{name:40} {word}{f': {reason}' if reason else ''}")
    print(f"success {row['score']['success']:g}, reward {row['reward']:g}")


# ------------------------------------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument_group("agent").add_argument
    add("--model", nargs="+", default=[], metavar="[NAME=]PATH",
        help="checkpoint folders, hub names, or model names at --url; NAME= names the table's "
        "column (a path that contains = and exists is taken as a path)")
    add("--agent", choices=("model", "solver", "person"), default="model",
        help="model: --model plays; solver: the world's exact solver; person: you, in the terminal")
    add("--url", type=web_address, metavar="URL",
        help="let an OpenAI-compatible endpoint play instead of vLLM, such as http://host:8000/v1. "
        "Run it without a tool parser; thoughts that a reasoning parser has split off are put back "
        "in front of the reply as <think>...</think>")
    add("--key", metavar="FILE", help="file with the endpoint's API key")
    add("--tp", type=COUNT, default=1, help="GPUs per engine (tensor parallel)")
    add("--processes", type=NATURAL, default=0, help="number of engines that share the tasks; the "
        "results do not depend on it; 0: one per --tp GPUs, or one on a CPU")
    add("--gpu-memory", type=PART, default=0.9, help="share of a GPU's memory that vLLM may fill")
    add = p.add_argument_group("tasks").add_argument
    add("--tasks", metavar="FILE|DIR|HUB_ID", help="tasks, ours or as published; with --split, a "
        "folder of SPLIT.csv or SPLIT.jsonl, or a data set on the hub (osunlp/TravelPlanner)")
    add("--env", default="travel",
        help="the world: travel, tools, or a module or file with a function open_world(args)")
    add("--ask", metavar="QUERY", help="play this query of your own instead of --tasks, and print "
        "the episode; it is not judged, and nothing is written")
    add("--limit", type=COUNT, metavar="N", help="play only the first N tasks")
    add("--samples", type=COUNT, default=1, help="plays per task; several add pass@k")
    add("--split", choices=("train", "validation", "test"), help="part of a data set")
    add = p.add_argument_group("play").add_argument
    add("--temperature", type=AMOUNT, default=0.6, help="sampling temperature [1]")
    add("--top-p", type=PART, default=0.95, help="nucleus sampling [1]")
    add("--max-context", type=COUNT, default=32768, help="most tokens of an episode [1]")
    add("--max-turns", type=COUNT, default=60, help="most tool calls, then an answer [1]")
    add("--max-tokens", type=NATURAL, default=4096, help="most tokens of a reply; 0: no limit "
        "other than the context; a --url is then sent no limit")
    add("--lenient", action="store_true", help="tell the agent about a reply that breaks the "
        "format, and continue; otherwise such a reply ends the episode, as in training and in [1]")
    add("--concurrency", type=COUNT, default=64, help="most episodes that play at a time")
    add("--seed", type=int, default=0, help="seed of the sampling and of the world")
    add = p.add_argument_group("output").add_argument
    add("--check", action="store_true", help="only check the world: load the tasks, play one "
        "scripted reply, and print what came back")
    add("--show", action="store_true", help="print each episode turn by turn, with its verdict")
    add("--out", default="out/eval", help="folder of table.md and of one folder per agent; a rerun "
        "plays only the episodes that it lacks")
    args = runtime.parse_args(p, argv)
    if args.agent != "model" and (args.model or args.url):
        p.error(f"--agent {args.agent} plays by itself; leave out --model and --url")
    if args.ask and args.agent == "solver":
        p.error("--ask: the solver plans tasks, not a query of your own; use --model or --url")
    args.lenient |= args.agent == "person"  # a person may correct a typing error
    return args


def named_paths(specs):
    """{name: path} of [NAME=]PATH; without NAME, the shortest end of the path that is unique.
    ValueError if a name is malformed or occurs twice."""
    named = [(None, spec) if "=" not in spec or Path(spec).exists() else spec.split("=", 1)
             for spec in specs]
    for spec, (name, path) in zip(specs, named, strict=True):
        if not path.strip() or not (name is None or re.fullmatch(r"\w[\w.-]*", name)):
            raise ValueError(f"--model {spec!r} is not [NAME=]PATH with a NAME of letters, digits, "
                             "'.', '_' and '-'")
    parts = [[part for part in Path(path).parts if part not in "/."] for _, path in named]
    found = {}
    for (name, path), own in zip(named, parts, strict=True):
        short = [n for n in range(1, len(own)) if [one[-n:] for one in parts].count(own[-n:]) == 1]
        found[name or "-".join(own[-short[0] :] if short else own)] = path
    if not named or len(found) < len(named):
        raise ValueError("--model needs one or more checkpoints, each with its own name")
    return found


def read_episodes(path, recover=False):
    """{name of the play: its record} of the episodes in a file, each play once; {} without a file.
    ValueError names a row that is not an episode.

    recover: for the writer of the file only, see recover_jsonl; readers leave the file as it is.
    """
    def check(rows):
        for number, row in enumerate(rows, 1):
            complete = isinstance(row, dict) and row.keys() >= {"task", "messages", "stop"}
            if not complete or not isinstance(row["task"], dict) or "id" not in row["task"]:
                raise ValueError(f"{path}, record {number}: not an episode: {str(row)[:60]}; "
                                 "delete the line, and its task is played again")

    if not Path(path).exists():
        return {}
    if recover:
        rows = runtime.recover_jsonl(path, check)
    else:
        check(rows := runtime.read_jsonl(path, torn=True))
    found = {}
    for row in rows:
        found.setdefault(name_of(row["task"]), row)
    return found


def model_settings(path, url=None):
    """What identifies a model in OUT/AGENT/settings.json: the same path may hold new weights."""
    weights = None if url or path is None else runtime.digest(path)
    return {"model": path} | ({"weights": weights[:8]} if weights else {})


def open_folder(out, name, settings, kept="episodes.jsonl"):
    """The folder OUT/name. ValueError if its episodes were played with other settings."""
    folder = Path(out) / name
    file, episodes = folder / "settings.json", folder / kept
    if not episodes.exists() or not episodes.stat().st_size:
        file.unlink(missing_ok=True)  # nothing was played yet: the first play decides the settings
        return folder
    try:
        before = json.loads(file.read_text()) if file.exists() else settings
        changed = [f"{key} was {before.get(key)!r} and is {value!r}"
                   for key, value in settings.items() if before.get(key, value) != value]
    except (ValueError, AttributeError):
        raise ValueError(f"{file} is damaged, so it is unknown how {episodes.name} was played: "
                         f"remove {folder}, or choose another --out") from None
    if changed:
        raise ValueError(f"{folder} was played with other settings ({'; '.join(changed)}): "
                         "choose another --out, or remove the folder")
    return folder


def keep_play(folder, settings, row, kept="episodes.jsonl"):
    """Append an episode to OUT/name; the first one also records the settings of all."""
    if not (folder / "settings.json").exists():
        runtime.write_text(folder / "settings.json", json.dumps(settings, indent=1))
    runtime.append_jsonl(folder / kept, row)


def play_agent(args, folder, settings, tasks):
    """(1) (2) Play the episodes of an agent that OUT/name lacks, and append each as it ends."""
    done = read_episodes(folder / "episodes.jsonl", recover=True)
    left = [task for task in tasks if name_of(task) not in done]
    if any(done.get(name_of(task), {"task": task})["task"] != task for task in tasks):
        raise ValueError(f"{folder}: other tasks with these ids were played; choose another --out")
    if left and args.agent == "model" and not args.url:
        runtime.check_values(settings["model"])
    worked = any(row["stop"] != "refused" for row in done.values())
    rows, wins = partial(play_rows, args, folder.name, settings["model"], worked), []
    if args.agent != "person":  # a person needs this process's terminal
        rows = partial(in_processes, "evaluate.py", rows, args=args)
    bar = None
    for row in rows(left) if left else ():
        bar = bar or runtime.progress(None, folder.name, len(tasks), len(tasks) - len(left))
        if row is None:  # an engine is ready: the bar starts with the play
            continue
        keep_play(folder, settings, row)
        if "score" in row:
            wins.append(row["score"]["success"])
            bar.set_postfix_str(f"success {mean(wins):.3f}", refresh=False)
        bar.update()
    if bar is not None:
        bar.close()


def play_rows(args, name, path, worked, tasks):
    """Yield None when play starts, then the judged record of each task's episode as it ends.
    worked: as in play."""
    world = runtime.open_world(args)
    episodes = player(args, path, world, tasks, worked)
    yield None
    for episode in prepared(world, episodes):
        plan, verdict, strict = world.verdict(episode)
        row = episode.record(name) | {"plan": plan, "tokens": getattr(episode, "tokens", None)}
        if hasattr(episode, "refusal"):
            row["refusal"] = episode.refusal
        if verdict is not None:
            reward = world.reward(verdict, world.kinds[0])
            row |= {"score": verdict, "reward": reward, "strict": strict}
        yield row
    world.close()


def prepared(world, episodes):
    """Yield the episodes in the order in which they end. If the world lets a server read an answer,
    it begins when the episode ends, and the others play on; the episode is yielded once it is read.
    """
    reading, failure = deque(), None
    try:
        for episode in episodes:
            reading.append((episode, world.prepare([episode])))
            while reading and all(future.done() for future in reading[0][1]):
                yield reading.popleft()[0]
    except (OSError, SystemExit, ValueError) as error:
        failure = error  # what has ended is judged all the same
    yield from (episode for episode, _ in reading)
    if failure:
        raise failure


def player(args, path, world, tasks, worked=False):
    """The tasks' episodes as they end, played by the solver, a person, an endpoint or vLLM."""
    def begin(task):
        episode = world.episode(task, f"{args.seed}/{name_of(task)}", args)
        episode.strict = not args.lenient
        return episode

    episodes = map(begin, tasks)
    if args.agent == "solver":
        if not hasattr(world, "solver"):
            raise ValueError(f"--agent solver: the world of --env {args.env} has no solver")
        return map(partial(play_replies, world), episodes)
    if args.agent == "person":
        return play(partial(ask_person, stops=world.stops), episodes, 1)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    if args.url and world.stops:
        raise ValueError("--url cannot play with grammar tags, which put the tools' results inside "
                         "a reply: play the checkpoint in vLLM, without --url")
    generate = args.url and partial(runtime.chat, args.url, path, **sampling,
                                    api_key=runtime.read_key(args.key))
    asks = world.open_helpers(generate) if hasattr(world, "open_helpers") else None
    if args.url:
        return play(generate, episodes, args.concurrency, args.max_context, args.max_tokens,
                    worked)
    llm, template = open_engine(path, args.max_context, args.concurrency, args.tp, args.gpu_memory)
    return play_vllm(llm, template, episodes, args.max_context, **sampling, seed=args.seed,
                     concurrency=args.concurrency, stops=world.stops, slow=world.slow, asks=asks)


def in_processes(program, rows_of, tasks, args):
    """Yield the rows of rows_of(tasks), computed by --processes processes with a share of the tasks
    each. Even one engine needs a process, because only its end frees all of an engine's memory."""
    if args.url:  # there is no engine here
        yield from rows_of(tasks)
        return
    context, gpus = get_context("spawn"), []
    if getattr(args, "agent", "model") == "model":  # the solver needs none
        gpus = runtime.visible_gpus()
    if not gpus:
        # vLLM's CPU build prints its NUMA node; PyTorch reads this variable when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    n = min(args.processes or max(1, len(gpus) // args.tp), len(tasks))
    rows, children = context.Queue(), []
    for i in range(n):
        own = gpus[i * args.tp:(i + 1) * args.tp]
        children.append(context.Process(target=send_rows,
                                        args=(program, rows_of, tasks[i::n], own, rows)))
        with runtime.ignoring_sigint():
            children[-1].start()
    alive, errors = True, []
    try:
        while alive:
            alive = any(child.is_alive() for child in children)
            with contextlib.suppress(Empty):
                while True:
                    row = rows.get(timeout=0.5)
                    if row is None or isinstance(row, dict):
                        yield row
                    else:
                        errors.append(row)
    finally:  # if the caller fails, on a full disk for example, it need not wait for the players
        for child in children:
            child.terminate()
            child.join()
    if errors:  # usually all report the same, such as a broken model folder
        raise SystemExit("\n".join(dict.fromkeys(errors)))
    if any(child.exitcode for child in children):
        raise SystemExit(f"{program}: stopped early; repeat the command to continue")


def send_rows(program, rows_of, tasks, gpus, rows):
    """In a process of its own that sees these GPUs: put the tasks' rows into a queue, and finally
    the line that says what went wrong, if anything did."""
    runtime.die_with_parent()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def work():
        for row in rows_of(tasks):
            rows.put(row)

    try:
        runtime.run(program, work)
    except SystemExit as error:
        rows.put(str(error.code))
        raise SystemExit(1) from None


def evaluate(args):
    """Play, judge, report."""
    world = runtime.open_world(args)
    if args.ask:
        answer_query(args, world)
        return
    tasks = runtime.load_tasks(args.tasks, world.load_task, args.limit, args.split)
    if args.check:
        print("\n".join([f"{args.tasks}: {len(tasks)} tasks",
                         *runtime.check_world(world, tasks[0], args)]))
        return
    if args.agent == "model":  # before an engine starts
        runtime.check_world(world, tasks[0], args)
    world.close()  # the players open their own
    tasks = [task | ({"sample": k} if k else {}) for task in tasks for k in range(args.samples)]
    wanted, played = [name_of(task) for task in tasks], {}
    agents = named_paths(args.model) if args.agent == "model" else {args.agent: None}
    for path in agents.values() if args.agent == "model" and not args.url else ():
        runtime.check_model(path)
    common = {key: getattr(args, key) for key in (*SETTINGS, *args.world_flags)}
    settings = {name: model_settings(path, args.url) | common for name, path in agents.items()}
    runtime.lock_folder(args.out)
    folders = {name: open_folder(args.out, name, chosen) for name, chosen in settings.items()}
    for name, folder in folders.items():
        play_agent(args, folder, settings[name], tasks)
    # (3)
    for name, folder in folders.items():
        rows = read_episodes(folder / "episodes.jsonl")
        played[name] = [rows[task] for task in wanted if task in rows]  # in task order
        if args.show or args.agent == "person":
            for row in played[name]:  # a person has just read the episode: print the verdict only
                (print_episode if args.show else print_verdict)(row)
    text, report = table(played, getattr(world, "lines", None))
    for name, folder in folders.items():
        runtime.write_text(folder / "scores.json", json.dumps(report[name], indent=1))
    runtime.write_text(Path(args.out) / "table.md", text)
    shown = "" if args.agent == "person" else f"\n{aligned(text)}\n\n"
    print(f"{shown}{args.out}/table.md; python -m look.report {args.out} shows each episode")


def answer_query(args, world):
    """Play the query of --ask, and print each agent's episode."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in in_processes
    task = {"id": "ask", "query": args.ask}
    agents = named_paths(args.model) if args.agent == "model" else {args.agent: None}
    for name, path in agents.items():
        for episode in player(args, path, world, [task]):
            print_episode(episode.record(name))
    world.close()


def main(argv=None):
    runtime.run("evaluate.py", evaluate, flags(argv))


if __name__ == "__main__":
    main()
