"""
Measure agents: play the tasks of a world with any agent, judge the answers, and compare.

    (1) play     every task to its end, without waiting for other episodes: a checkpoint in vLLM
                 (tokens in, tokens out), an OpenAI-compatible endpoint, the world's solver, or you
    (2) judge    append the world's verdict on each episode to OUT/AGENT/episodes.jsonl. Another
                 --reader judges the kept episodes anew, without playing
    (3) report   one table of all agents: success with its bootstrap interval over tasks, every
                 number of the score, each check, pass@k

[1] STAR, arXiv:2603.21972, app. C.3

Reads   tasks, ours or as published; checkpoints, which are HF folders or hub names
Writes  OUT/AGENT/episodes.jsonl, settings.json, scores.json; OUT/table.md. A rerun plays only the
        episodes that OUT lacks

    python evaluate.py --model base=A sft=out/sft rl=out/rl --tasks data/val.jsonl --out out/eval
    python evaluate.py --model out/rl --tasks data/val.jsonl --limit 1 --show
    python evaluate.py --model out/rl --ask "Plan a trip from Omaha to Denver for ..."
    python evaluate.py --model A --tasks osunlp/TravelPlanner --split validation --database DIR
"""
import argparse
import contextlib
import json
import math
import os
import re
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import runtime
from runtime import AMOUNT, COUNT, NATURAL, PART, Help, Mistake, Parser
from sandbox import final_turn, turn

STOPS = ("answer", "format", "length", "turns", "context")
COUNTS = ("reward", "turns", "calls", "tokens")  # lines of the table that are not percentages
SETTINGS = ("env", "max_turns", "lenient", "seed")  # with a world's own flags they decide a play
SAMPLING = ("temperature", "top_p", "max_context", "max_tokens")  # of a model's play
UNREAD = "answer lines not read"  # a number of the travel world's score
JUDGING = ("reader", "reader_key")  # flags of the travel world that decide no play
HOW = """
Call a tool by its name and its arguments, separated by commas or as JSON. Answer with "answer" and
a text, or with "answer", then any number of lines, then "end". "help" shows what a model reads,
Ctrl-C stops; plays that have ended are kept. The tools are:"""


# ------------------------------------------------------------------------------------- endpoints

LONGEST_REPLY = 200_000  # characters; 32K tokens of English are about 130,000
NO_ROOM = re.compile(r"context.{0,9}(length|size|window|limit)|too long|too many tokens|"
                     r"maximum.{0,20}length", re.IGNORECASE)  # how servers say so


class ChatError(Mistake):
    """An endpoint gave no usable reply, after all retries."""


class Refused(ChatError):
    """An endpoint refused one request, or answered it without text; it may answer others. stop: why
    the request's episode ends: context and length are limits of tokens."""

    def __init__(self, text, stop="refused"):
        super().__init__(text)
        self.stop = stop


class Reply(str):
    """The text of a reply. tokens: of the whole conversation including it, 0 if unknown. cut:
    whether a limit of tokens ended it."""

    tokens, cut = 0, False


@lru_cache(maxsize=64)
def client_of(url, key, retries):
    """The openai package's client of an endpoint; threads may share it."""
    import openai

    base = url.rstrip("/").removesuffix("/chat/completions")
    return openai.OpenAI(base_url=base, api_key=key or "none", max_retries=retries)


def read_key(path):
    """The API key in a file, None without one."""
    return Path(path).read_text(encoding="utf-8").strip() if path else None


def chat(url, model, messages, temperature=1.0, top_p=1.0, max_tokens=None, timeout=1800, retries=6,
         api_key=None, stops=()):
    """The Reply of an OpenAI-compatible endpoint. Refused if this request gets none, ChatError if
    the endpoint is at fault: it answers no short question either, or says so. The openai package
    retries time-outs, broken connections and status 408, 409, 429 and 5xx with growing pauses.

    stops: closing tags that end a reply and belong to it. If the last message is the assistant's,
    the reply continues it. max_tokens: None or 0 leaves the limit to the server.
    """
    import openai

    beyond = {"include_stop_str_in_output": True} if stops else {}  # of vLLM and SGLang
    begun = messages[-1]["role"] == "assistant"
    if begun:
        beyond |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        body = client_of(url, api_key, retries).chat.completions.create(
            model=model, messages=messages, temperature=temperature, top_p=top_p, timeout=timeout,
            max_tokens=max_tokens or openai.omit, stop=list(stops) or openai.omit,
            extra_body=beyond)
    except (openai.APIError, ValueError) as error:  # the latter: half a JSON
        # str(error) has a server's words in one form only
        told = f"{url}: {getattr(error, 'body', None) or error}"
        status = getattr(error, "status_code", None)
        if status in (400, 422) or status not in (401, 404, 429) and answers(url, model, api_key):
            raise Refused(told, "context" if NO_ROOM.search(told) else "refused") from None
        raise ChatError(f"{told}, after {retries} retries, from model {model}") from None
    if not getattr(body, "choices", None):  # a gateway's own message, or a web page
        raise Refused(f"{url}: no reply but {str(body)[:200]}")
    message = body.choices[0].message
    fields = "content", *runtime.THOUGHTS
    text, *thoughts = (getattr(message, field, None) or "" for field in fields)
    if not message or not all(isinstance(said, str) for said in (text, *thoughts)):
        raise Refused(f"{url}: no text but {str(message)[:200]}")
    ended = body.choices[0].finish_reason
    if not text.strip() and not begun:
        stop = "length" if ended == "length" else "refused"  # within a thought that is kept apart
        raise Refused(f"{url}: a reply without text ({ended})", stop)
    for stop in stops if ended == "stop" else ():  # most servers cut it off
        text += stop * (text.rfind(stop.replace("/", "")) > text.rfind(stop))
    if len(text) > LONGEST_REPLY:
        raise Refused(f"{url}: a reply of {len(text):,} characters fits into no context", "context")
    reply = Reply(text if begun else runtime.with_thought(text, next(filter(None, thoughts), None)))
    reply.tokens, reply.cut = body.usage.total_tokens if body.usage else 0, ended == "length"
    return reply


def answers(url, model, key):
    """Whether an endpoint answers a short question."""
    import openai

    with contextlib.suppress(openai.APIError, ValueError):
        body = client_of(url, key, 1).chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=1, timeout=60)
        return bool(getattr(body, "choices", None))
    return False


def spoken(reply):
    """A reply without the thought before it."""
    return reply.rpartition("</think>")[2].strip()


def web_address(text):
    """A flag type: the address of a server."""
    if not re.match(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like http://host:8000/v1")
    return text


def endpoint(text):
    """A flag type: URL=MODEL -> (URL, MODEL)."""
    url, _, model = text.rpartition("=")
    return web_address(url), model


# -------------------------------------------------------------------------------- playing by text

def play(generate, episodes, concurrency=8, max_context=math.inf):
    """Play text-level episodes with generate(messages) -> reply, each in its own thread, and
    yield each as it ends. If the endpoint is down, no other begins, and the exception ends the run
    once those that play have ended; the next run plays the rest."""
    with ThreadPoolExecutor(concurrency) as pool:
        episodes, running, error = iter(episodes), set(), None
        while running or not error:
            free = 0 if error else concurrency - len(running)
            running |= {pool.submit(play_one, generate, episode, max_context)
                        for episode in islice(episodes, free)}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            error = next((future.exception() for future in done if future.exception()), error)
            yield from (future.result() for future in done if not future.exception())
        raise error


def play_one(generate, episode, max_context=math.inf):
    """Play one episode to its end; a refused request ends it. max_context: most tokens of it, as
    the endpoint counts them."""
    while not episode.stop:
        try:
            reply = generate(episode.messages)
        except Refused as error:
            episode.stop, episode.refusal = error.stop, str(error)
            break
        episode.tokens = getattr(reply, "tokens", 0) or None
        if (episode.tokens or 0) > max_context:  # an engine would have cut this reply
            episode.messages.append({"role": "assistant", "content": reply})
            episode.stop = "context"
            break
        episode.step(reply)
        name_length(episode, getattr(reply, "cut", False))
    return episode


def name_length(episode, cut):
    """Tell a reply that a limit of tokens cut from one that broke the protocol by itself."""
    if cut and episode.stop == "format":
        episode.stop = "length"


def play_replies(replies, episode):
    """Play one episode with what replies(task) yields."""
    for reply in replies(episode.task):
        if episode.step(reply) is None:
            break
    return episode


def play_person(episode):
    """Play one episode with what a person types."""
    with contextlib.suppress(ImportError):  # with it, the arrow keys edit and repeat a line
        import readline

        readline.parse_and_bind("set enable-bracketed-paste off")  # a plan arrives line by line
    prompt, query = (message["content"] for message in episode.messages[:2])
    example = getattr(episode.sandbox, "example", lambda tool: {})  # of a tool's arguments
    tools = {tool: example(tool) for tool in sorted(getattr(episode.sandbox, "tools", ()))}
    how = "\n    ".join([HOW, *(f"{tool} {', '.join(tools[tool]) or '{...}'}" for tool in tools)])
    for answer in prompt.split("<answer>\n")[1:]:
        how += "\n    ".join(["\nAn answer begins:", *answer.splitlines()[:3]])
    print(how, query, sep="\n\n")
    episode.strict = False  # a slip of the finger ends nothing
    while not episode.stop:
        try:
            line = input("> ").strip()
            reply = typed_reply(line, tools)
        except EOFError:
            raise Mistake("the input has ended; repeat the command to continue") from None
        if reply:
            print(episode.step(reply) or "")
        elif line == "help":
            print(prompt, how, sep="\n")
        elif line:
            word, names = line.split()[0], {name.lower(): name for name in (*tools, "answer")}
            near = get_close_matches(word.lower(), names, 1)
            print(f"no tool {word}:", f"is {names[near[0]]} meant?" if near else '"help" lists all')
    return episode


def typed_reply(line, tools):
    """The reply that a typed line begins, None if it is neither a call nor an answer. tools: {name:
    an example of its arguments}."""
    word, _, rest = line.partition(" ")
    if word in tools and not rest.startswith("{") and (tools[word] or not rest):
        values = rest.split(",", max(0, len(tools[word]) - 1))
        return turn("", word, {key: typed_value(value.strip(), like) for (key, like), value in
                               zip(tools[word].items(), values, strict=False)})
    if word in tools and rest.startswith("{"):
        line = f'<tool_call>{{"name": "{word}", "arguments": {rest}}}</tool_call>'
    if word == "answer" and rest:
        return final_turn("", rest)
    if word in ("answer", "Day", "day"):
        lines = iter(lambda: input().rstrip(), "end")
        return final_turn("", "\n".join([line.removeprefix("answer"), *lines]))
    return f"<think></think>{line}" if line.startswith("<") else None


def typed_value(text, like):
    """A typed argument: JSON if its example is no text, such as a number."""
    with contextlib.suppress(ValueError):
        return text if isinstance(like, str) else json.loads(text)
    return text


# --------------------------------------------------------------------------------- playing in vLLM

def play_vllm(llm, template, episodes, max_context, temperature=0.6, top_p=0.95, seed=0,
              max_tokens=None, concurrency=64, stops=(), slow=True, questions=None):
    """Play episodes with a vLLM engine in this process; yields each as it ends, with .tokens.

    Each reply has its own seed (seed, task, sample, turn) and does not depend on other plays. slow:
    as in runtime.ToolCalls. questions: a world's own for the engine, or None (toolstar.helpers).
    """
    live, numbers, episodes = {}, count(), iter(episodes)
    sampling = {"temperature": temperature, "top_p": top_p}

    def ask(play):
        episode, ids = play
        number, room = str(next(numbers)), max_context - len(ids)
        live[number] = play
        runtime.add_request(engine, number, ids, template, stops,
                            f"{seed}/{name_of(episode.task)}/{episode.turns}", **sampling,
                            max_tokens=min(room, max_tokens or room))

    joined = (questions.join(llm.llm_engine, template, max_context, seed, **sampling)
              if questions else contextlib.nullcontext(llm.llm_engine))
    with contextlib.closing(runtime.ToolCalls(slow, concurrency)) as calls, joined as engine:
        while True:
            for episode in islice(episodes, max(calls.room(live), 0)):
                ask((episode, prompt_ids(episode, template, max_context)))
            if not live and not calls:
                return
            for output in engine.step() if engine.has_unfinished_requests() else ():
                if output.finished:
                    play = live.pop(output.request_id)
                    action = play_reply(*play, output.outputs[0], template, max_context)
                    calls.start(play, play[0], action)
            for (episode, ids), observation in calls.ready(not engine.has_unfinished_requests()):
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
        raise Mistake(f"task {episode.task.get('id', '?')}: its prompt has {len(ids)} tokens; "
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
    name_length(episode, output.finish_reason == "length")
    episode.tokens = len(ids)  # a helper may read this while the action is answered
    return action


def play_observation(episode, ids, observation, template, max_context):
    """Append an observation's tokens to the episode's: what the agent sees next."""
    episode.finish(observation)
    if episode.rewritten:  # a helper has changed earlier messages
        ids[:] = episode.tokens_again(ids, template)
    else:
        ids += template.between(episode.messages[-1], closed=ids[-1] in template.ends)
    if len(ids) >= max_context and not episode.stop:
        episode.stop = "context"


def name_of(task):
    """The name of a play: its task's id and the number of the sample."""
    return f"{task['id']}/{task.get('sample', 0)}"


# ----------------------------------------------------------------------------------------- report

def mean(values):
    """The mean of the numbers that are not None; None if there are none."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def pooled(values):
    """The mean of numbers; of pairs (passed, asked) the share of all that were asked."""
    pairs = [value for value in values if isinstance(value, tuple)]
    if not pairs:
        return mean(values)
    passed, asked = map(sum, zip(*pairs, strict=True))
    return passed / asked if asked else None


def lines_of(row, world_lines=None):
    """{line of the table: number, pair (passed, asked) or None} of one episode. world_lines(row): a
    world's own lines, which go before the score's of the same name."""
    found = {}
    if "score" in row:
        score = row["score"]
        found = {"success": score["success"], "success, strict": row["strict"]}
        found |= {name: value for name, value in score.items()
                  if isinstance(value, float) and name not in ("success", "official")}
        found |= world_lines(row) if world_lines else {}
        found |= {f"{name} per episode": value for name, value in score.items()
                  if type(value) is int}
        found |= {name: passed for name, (passed, _) in score.get("checks", {}).items()}
    stops = dict.fromkeys((*STOPS, row["stop"]))
    return found | {f"stop: {stop}": row["stop"] == stop for stop in stops}


def measure(rows, world_lines=None):
    """{line of the table: number} over the episodes of one agent."""
    each = [lines_of(row, world_lines) for row in rows]
    lines = dict.fromkeys(line for numbers in each for line in numbers)
    default = {line: 0 if line.startswith("stop: ") else None for line in lines}
    found = {line: pooled([one.get(line, default[line]) for one in each]) for line in lines}
    return {"episodes": len(rows)} | found | {name: mean(row.get(name) for row in rows)
                                              for name in COUNTS}


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


def interval(values, least=0.0):
    """The 95% bootstrap interval of a mean of shares. least: the smallest possible value, -1 for
    differences."""
    import numpy as np

    rng, values = np.random.default_rng(0), np.sort(values)  # in any order the same interval
    draws = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(10_000)]
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
    """(markdown, {agent: numbers}) of {agent: its episodes}, side by side. The last agent is also
    compared with each of the others, on the tasks that both have played."""
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
    last = list(played)[-1]
    for other in list(played)[:-1]:
        change = [win - wins[other][task] for task, win in wins[last].items()
                  if task in wins[other]]
        if change:
            found = report[last][f"success minus {other}'s"] = [mean(change), *interval(change, -1)]
            cells[f"success of {last} minus {other}"] = [""] * (len(played) - 1) + [
                f"{100 * found[0]:+.1f} ({span(*found[1:], '+')})"]
    rows = [["", *played], *([line, *row] for line, row in cells.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * max(width, 3) for width in widths])
    return "".join("| " + " | ".join(map(str.ljust, row, widths)) + " |\n" for row in rows), report


def differing(text):
    """A table without the rows in which several agents agree, apart from success."""
    rows = text.splitlines(keepends=True)
    values = [{cell.strip() for cell in row.split("|")[2:-1]} for row in rows]
    one = rows[0].count("|") < 4
    return "".join(row for row, each in zip(rows, values, strict=True)
                   if one or len(each) != 1 or row.startswith(("| -", "| success ")))


def show(line, value):
    """A number of the table as text; shares in percent."""
    if value is None:
        return "-"
    if line in COUNTS or line.endswith((" per episode", "seconds")):
        return f"{value:.1f}"
    return str(value) if line == "episodes" else f"{100 * value:.1f}"


def print_episode(row):
    """Print an episode turn by turn, then its verdict, check by check."""
    for message in row["messages"]:
        print(f"\n--- {message['role']}\n{message['content']}")
    print(f"\n--- the episode stopped: {row['stop']} {row.get('refusal', '')}")
    print_verdict(row)


def print_verdict(row):
    """Print the verdict on an episode, check by check."""
    if "score" in row:
        for name, (passed, reason) in row["score"].get("checks", {}).items():
            word = {True: "passed", False: "FAILED"}.get(passed, "not judged")
            reason = reason or (passed is None and "an earlier check failed")
            print(f"{name:40} {word}: {reason}" if reason else f"{name:40} {word}")
        print(f"success {row['score']['success']:g}, reward {row['reward']:g}")


# ------------------------------------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
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
    add("--agent", nargs="+", choices=("model", "solver", "careless", "person"), default=["model"],
        help="model: --model plays; solver: the world's exact solver; careless: the same with some "
        "mistakes; person: you, at the terminal")
    add("--check", action="store_true", help="only check the world: load the tasks, call each "
        "tool once, answer, and print what came back")
    play_flags(p, "out/eval", 4096)
    p.idle = [*p.idle, *((name, "beside", "ask") for name in (
                  "tasks", "limit", "split", "samples", "agent", "out")),
              *((name, "beside", "check") for name in (
                  "ask", "model", "url", "samples", "agent", "show", "out"))]
    return runtime.parse_args(p, argv)


def play_flags(p, out, max_tokens):
    """Which models play, and how."""
    p.idle = ("tp", "beside", "url"), ("gpu_memory", "beside", "url"), ("key", "without", "url")
    add = p.add_argument_group("models").add_argument
    add("--model", nargs="+", default=[], metavar="[NAME=]PATH",
        help="checkpoint folders, hub names, or model names at --url; NAME= names the table's "
        "column")
    add("--url", type=web_address, metavar="URL",
        help="let an OpenAI-compatible endpoint play instead of vLLM, such as http://host:8000/v1; "
        "run it without a tool parser")
    add("--key", metavar="FILE", help="file with the endpoint's API key")
    add("--tp", type=COUNT, default=1, help="GPUs per engine (tensor parallel); each --tp GPUs "
        "that are seen run an engine with a share of the tasks")
    add("--gpu-memory", type=PART, default=0.9, help="share of a GPU's memory that vLLM may fill")
    add = p.add_argument_group("play").add_argument
    add("--temperature", type=AMOUNT, default=0.6, help="sampling temperature [1]")
    add("--top-p", type=PART, default=0.95, help="nucleus sampling [1]")
    add("--max-context", type=COUNT, default=32768, help="most tokens of an episode [1]")
    add("--max-turns", type=COUNT, default=60, help="most tool calls, then an answer [1]")
    add("--max-tokens", type=NATURAL, default=max_tokens, help="most tokens of a reply; 0: no "
        "limit other than the context. A reply that it cuts ends the episode: stop length")
    add("--lenient", action="store_true", help="a call or an answer counts without a thought, as "
        "in the authors' code, and the agent is told about any other reply that breaks the format; "
        "otherwise such a reply ends the episode, as in training and in [1]")
    add("--concurrency", type=COUNT, default=64, help="most episodes that play at a time")
    add("--seed", type=NATURAL, default=0, help="seed of the sampling and of the world")
    add = p.add_argument_group("output").add_argument
    add("--show", action="store_true", help="print each episode turn by turn, with its verdict")
    add("--out", default=out, help="folder of the table and of one folder per agent; a rerun plays "
        "only the episodes that it lacks")


def named_paths(specs):
    """{name: path} of [NAME=]PATH; without NAME, the last part of the path."""
    found = {}
    for spec in specs:
        name, equals, path = spec.partition("=")
        path = path if equals else spec
        found[re.sub(r"[^\w.-]", "-", name if equals else Path(path).name)] = path
    if not specs or len(found) < len(specs):
        raise Mistake("--model needs one or more checkpoints, each with its own NAME=PATH")
    return found


def read_episodes(path, recover=False):
    """{name of the play: its record} of the episodes in a file; {} without a file. recover: for the
    writer of the file only, see recover_jsonl; readers leave the file as it is."""
    if not Path(path).exists():
        return {}
    rows = runtime.recover_jsonl(path) if recover else runtime.read_jsonl(path, torn=True)
    return {name_of(row["task"]): row for row in rows}


def model_settings(path, url=None):
    """What identifies a model in OUT/AGENT/settings.json: the same path may hold new weights."""
    config = Path(path or "") / "config.json"
    saved = None if url or not config.exists() else int(config.stat().st_mtime)
    return {"model": path} | ({"saved": saved} if saved else {})


def open_folder(out, name, settings, kept="episodes.jsonl"):
    """The folder OUT/name. A Mistake if its episodes were played with other settings."""
    folder = Path(out) / name
    file, settings = folder / "settings.json", json.loads(json.dumps(settings))  # tuples are lists
    before = settings
    if file.exists() and (folder / kept).exists():
        before = json.loads(file.read_text())
    changed = [f"{key} was {before[key]} and is {value}" for key, value in settings.items()
               if before.get(key, value) != value]
    if changed:
        raise Mistake(f"{folder} was played with other settings: {', '.join(changed)}. Choose "
                      "another --out, or remove the folder")
    runtime.write_text(file, json.dumps(settings, indent=1))
    return folder


def play_agent(args, folder, path, tasks):
    """(1) (2) Play the episodes that OUT/AGENT lacks, append each as it ends, and judge anew those
    of another reader -> the records of all tasks, in their order."""
    file = folder / "episodes.jsonl"
    done = read_episodes(file, recover=True)
    for task in json.loads(json.dumps(tasks)):  # as a file has them: a tuple is a list
        if name_of(task) in done and not task.items() <= done[name_of(task)]["task"].items():
            raise Mistake(f"{folder}: other tasks with these ids were played; choose another --out")
    left = [task for task in tasks if name_of(task) not in done]
    if not left:
        print(f"{folder} has all plays; another --out plays again")
    append = in_processes if path and not args.url else append_rows
    append(file, folder.name, partial(play_rows, args, folder.name, path), left, args)
    done = read_episodes(file)
    anew = [done[name_of(task)] for task in tasks
            if done[name_of(task)].get("judge") != judge_of(args)]
    if anew:  # the later of two records of a play counts
        append = append if judge_of(args) == "policy" else append_rows
        append(file, f"{folder.name}, judged by {judge_of(args)}", partial(judge_rows, args, path),
               anew, args)
        done = read_episodes(file)
        runtime.write_jsonl(file, done.values())
    return [done[name_of(task)] for task in tasks]


def append_rows(file, name, rows_of, tasks, args=None):
    """Append each row of rows_of(tasks) to a file as it comes. name: of the bar, None for none."""
    for row in runtime.progress(rows_of(tasks), name, len(tasks)) if tasks else ():
        runtime.append_jsonl(file, row)


def in_processes(file, name, rows_of, tasks, args):
    """The same in a process per engine (--tp GPUs, or the CPU), each with a share of the tasks; the
    first one's is shown. Even one engine needs a process, because only its end frees all of an
    engine's memory for the next checkpoint."""
    context, gpus = get_context("spawn"), runtime.visible_gpus()
    n = min(max(1, len(gpus) // args.tp), len(tasks))
    children = [context.Process(target=on_gpus, args=(
        gpus[i * args.tp:(i + 1) * args.tp], file, name if i == 0 else None, rows_of, tasks[i::n]))
        for i in range(n)]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            raise SystemExit("stopped early, see above; repeat the command to continue")
    finally:
        for child in children:
            child.kill()


def on_gpus(gpus, *what):
    """append_rows in a process that sees these GPUs."""
    runtime.die_with_parent()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    runtime.run("evaluate.py", append_rows, *what)


def play_agents(args, tasks):
    """(1) (2) -> {agent: the records of all tasks}"""
    if args.model and "model" not in args.agent:
        raise Mistake("--model plays as --agent model")
    agents = named_paths(args.model) if "model" in args.agent else {}
    agents |= {name: None for name in args.agent if name != "model"}
    runtime.lock_folder(args.out)
    folders, played = {}, {}
    for name, path in agents.items():
        keys = (*SETTINGS, *(SAMPLING if path else ()), *args.world_flags)
        keys = [key for key in keys if key not in JUDGING]
        if judge_of(args) == "policy" and not path:
            raise Mistake(f"--reader policy needs a model that plays, and {name} is none")
        settings = model_settings(path, args.url) | {key: getattr(args, key) for key in keys}
        settings |= {f"{key} saved": int(Path(settings[key]).stat().st_mtime) for key in
                     ("system_prompt", "corpus") if Path(settings.get(key) or "").is_file()}
        folders[name] = open_folder(args.out, name, settings)
        done = read_episodes(folders[name] / "episodes.jsonl")
        if path and not args.url and not all(name_of(task) in done for task in tasks):
            runtime.load_template(path)  # a wrong model is found before the others have played
    if judge_of(args) == "rules" and Path(args.system_prompt).is_file():
        print(f"{args.system_prompt} may ask for another format of answers than ours, for which "
              "the rules are made. With --reader policy or --reader URL=MODEL a model reads them, "
              "now or later: kept plays are then judged anew", flush=True)
    for name, path in agents.items():
        played[name] = play_agent(args, folders[name], path, tasks)
        for row in played[name] if args.show else ():
            print_episode(row)
    return played


def play_rows(args, name, path, tasks):
    """Yield the judged record of each task's episode as it ends."""
    world = open_world(args)
    if name == "person":
        world.judges = 0  # the verdict is shown before the next play
    played = player(args, name, path, world, tasks)
    for episode, plan, score, strict in runtime.judged(world, played):
        row = episode.record(name) | {"tokens": episode.tokens or None}
        row |= verdict_of(world, plan, score, strict)
        if hasattr(episode, "refusal"):
            row["refusal"] = episode.refusal
        if judge := judge_of(args):
            row["judge"] = "rules" if judge == "policy" else judge  # which reads afterwards
        if name == "person":
            print_verdict(row)
        yield row
    world.close()


def verdict_of(world, plan, score, strict):
    """The part of a record that a judge decides."""
    judged = {} if score is None else {
        "score": score, "strict": strict, "reward": world.reward(score, world.rewards[0])}
    return {"plan": plan} | judged


def judge_of(args):
    """Who reads answers in the travel world: rules, policy or a model's name; None in others."""
    reader = getattr(args, "reader", None) or "rules"
    return ((reader if isinstance(reader, str) else reader[1]) if hasattr(args, "reader_key")
            else None)


def open_world(args):
    """The world of --env. If the policy is to read the answers, the rules do so until then."""
    by_rules = {"reader": None} if judge_of(args) == "policy" else {}
    return runtime.open_world(argparse.Namespace(**vars(args) | by_rules))


def judge_rows(args, path, rows):
    """Yield the records of kept episodes with another judge's verdicts; nothing is played. "others"
    has those of the judges before."""
    world, episodes = open_world(args), [SimpleNamespace(**row) for row in rows]
    if judge_of(args) == "policy":
        sampling = argparse.Namespace(**vars(args) | {"temperature": 0.0, "max_tokens": 8192})
        episodes = world.reader.read_by(
            partial(play_model, sampling, path, world), episodes,
            None if args.url else fits(path, args.max_context))
    for episode, plan, score, strict in runtime.judged(world, episodes):
        row, verdict = vars(episode), verdict_of(world, plan, score, strict)
        others = {name: each for name, each in row.get("others", {}).items()
                  if name != judge_of(args)}
        if "judge" in row:
            others[row["judge"]] = {key: row[key] for key in verdict}
        yield row | verdict | {"judge": judge_of(args), "others": others}
    world.close()


def fits(path, max_context):
    """A function: whether messages leave room for a reply in a model's context."""
    template = runtime.load_template(path)
    return lambda messages: len(template.prompt(messages)) < max_context


def player(args, name, path, world, tasks):
    """The tasks' episodes as they end, played by the solver, a person, an endpoint or vLLM."""
    def begin(task):
        episode = world.episode(task, f"{args.seed}/{name_of(task)}", args)
        episode.strict = not args.lenient
        return episode

    episodes = map(begin, tasks)
    if not path and name == "person":
        sys.stdin.reconfigure(errors="replace")
        return map(play_person, episodes)
    if not path and not hasattr(world, name):
        raise Mistake(f"{args.env} has no {name}() that could play (docs/environment.md)")
    if not path:
        return map(partial(play_replies, getattr(world, name)), episodes)
    questions = None
    if hasattr(world, "open_helpers"):
        questions = world.open_helpers(args.url and partial(
            chat, args.url, path, temperature=args.temperature, top_p=args.top_p,
            api_key=read_key(args.key)))
    return play_model(args, path, world, episodes, questions)


def play_model(args, path, world, episodes, questions=None, retries=6):
    """The episodes as they end, played by a model at --url, or else in vLLM."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    if args.url:
        generate = partial(chat, args.url, path, **sampling, retries=retries,
                           api_key=read_key(args.key), stops=world.stops)
        return play(lambda messages: generate(merged(messages)), episodes, args.concurrency,
                    args.max_context)
    template = runtime.load_template(path)
    llm = runtime.open_llm(path, args.max_context, args.concurrency, args.tp, args.gpu_memory)
    return play_vllm(llm, template, episodes, args.max_context, **sampling, seed=args.seed,
                     concurrency=args.concurrency, stops=world.stops, slow=world.slow,
                     questions=questions)


def merged(messages):
    """Messages for an endpoint: adjacent replies and results become one assistant message. Marks
    that begin with <| are broken up in queries and results, so that none opens a turn."""
    found = []
    for message in messages:
        role, text = message["role"], message["content"]
        text = text.replace("<|", "‹|") if role in ("user", "result") else text
        if role in ("assistant", "result") and found[-1]["role"] == "assistant":
            found[-1] = {"role": "assistant", "content": found[-1]["content"] + text}
        else:
            found.append(message | {"role": role.replace("result", "assistant"), "content": text})
    return found


def check_world(world, task, args):
    """--check: play a scripted episode that calls each tool and answers -> lines of text that
    describe what came back"""
    episode = world.episode(task, "check", args)
    lines = [f"task {task['id']!r}", *(f"--- {one['role']}\n{one['content']}"
                                       for one in episode.messages), "---"]
    lines += call_tools(world, episode)
    episode.begin("<think>.</think><answer>.</answer>")
    episode.stop = episode.stop or "turns"
    plan, score, strict = world.verdict(episode)
    episode.record("check")
    if not hasattr(world, "solver"):
        lines.append("there is no solver, so the answer is a dot")
    return [*lines, f"the last reply stops the episode: {episode.stop}", f"plan: {plan!r:.80}",
            f"score: {score!r:.200}", f"strict: {strict}",
            *(f"reward {kind}: {world.reward(score, kind):g}" for kind in world.rewards if score)]


def call_tools(world, episode):
    """Call each tool once: as the world's solver does, which also answers; the others with the
    arguments of sandbox.example(name), or with none -> lines of text that show what came back."""
    shown = {}
    try:
        for reply in world.solver(episode.task) if hasattr(world, "solver") else ():
            action = episode.begin(reply)
            if action is None:
                break
            said = episode.finish(episode.act(action))
            shown.setdefault(action.name, f"{action.name} {action.arguments}: {said!r:.80}")
    except Mistake as mistake:  # the solver cannot play this task
        shown["solver"] = f"solver: {mistake}"
    example = getattr(episode.sandbox, "example", lambda name: {})
    for name in sorted({*getattr(episode.sandbox, "tools", ())} - shown.keys()):
        said = episode.sandbox.call(name, example(name))
        shown[name] = f"{name} {example(name)}: {said!r:.80}"
    return shown.values()


def find_tasks(source, split):
    """The path of the tasks. source: a file; or a folder, or a data set on the hub, which has
    SPLIT.csv or (folders only) SPLIT.jsonl."""
    if source is None:
        raise Mistake("--tasks FILE.jsonl is needed; python synth.py tasks writes one")
    path = Path(source)
    if bool(split) == (path.is_file() or bool(path.suffix) and not path.is_dir()):
        raise Mistake(f"{path}: a folder or a data set on the hub needs --split, and a file none")
    if path.is_dir():
        found = [path / f"{split}.{kind}" for kind in ("csv", "jsonl")]
        return next(filter(Path.exists, found), found[0])
    if path.exists() or path.suffix or not split:
        return path
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, f"{split}.csv", repo_type="dataset"))
    except (OSError, ValueError):
        raise Mistake(f"{source} is no file, and neither the hub nor its cache has {split}.csv of "
                      f"it. Where there is a network: hf download {source} --repo-type dataset"
                      ) from None


def try_out(args, world):
    """--check: what a scripted reply to the first task leads to. --ask: each model's episode on a
    query of one's own. Nothing is written."""
    if args.check:
        tasks = runtime.load_tasks(find_tasks(args.tasks, args.split), world.load_task, args.limit)
        print(f"{args.tasks}: {len(tasks)} tasks",
              *check_world(world, tasks[0], args), sep="\n")
        return
    for name, path in named_paths(args.model).items():
        for episode in player(args, name, path, world, [{"id": "ask", "query": args.ask}]):
            print_episode(episode.record(name))


def evaluate(args):
    """Play, judge, report."""
    world = open_world(args)
    if args.ask or args.check:
        try_out(args, world)
        world.close()
        return
    tasks = runtime.load_tasks(find_tasks(args.tasks, args.split), world.load_task, args.limit)
    world.close()  # the players open their own
    played = play_agents(args, [task | ({"sample": k} if k else {}) for task in tasks
                                for k in range(args.samples)])
    # (3)
    columns = {}
    for name, rows in played.items():
        for judge in set.intersection(*(set(row.get("others", ())) for row in rows)):
            columns[f"{name} by {judge}"] = [row | row["others"][judge] for row in rows]
        columns[name] = rows
    text, report = table(columns, getattr(world, "lines", None))
    for name in played:
        numbers = report[name]
        runtime.write_text(f"{args.out}/{name}/scores.json", json.dumps(numbers, indent=1))
        if (numbers.get(UNREAD) or 0) > 0.2 and not getattr(args, "reader", None):
            text += f"\n{name}: {numbers[UNREAD]:.0%} of its answer lines were not read by the " \
                    "rules; with --reader policy or URL=MODEL a model reads the same plays\n"
    runtime.write_text(f"{args.out}/table.md", text)
    if [*played] != ["person"]:  # who played has read the verdict
        print(f"\n{differing(text)}")
    print(f"{args.out}/table.md has all rows; python -m look.report {args.out} shows each episode")


def main(argv=None):
    runtime.run("evaluate.py", evaluate, flags(argv))


if __name__ == "__main__":
    main()
