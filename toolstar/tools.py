"""
The tools world: one policy that searches, runs programs and browses while it reasons [1].

    (1) settings  DATABASE/tools.json, each key checked: tools, grammar, budget, limits
    (2) call      Search in passages (retriever.py), Python in a jail (jail.py), Browse a page
                  (browse.py); a cache on disk, shared by all ranks, remembers what was found
    (3) observe   a result is cut to size, and cannot forge a tag of the grammar; a tool that fails
                  is told from a program that fails, and where tools fail often the run stops
    (4) judge     by verdict.py, from the calls that were made and not from the text alone

Two grammars. "turns", ours: one thought and one JSON call or the answer in a reply, the result in a
turn of its own. "tags", Tool-Star's: one message, in which <search>, <python> or <browse> stop the
engine and a <result> follows; for the published checkpoints and data.
[1] Tool-Star, arXiv:2505.16410

Reads   DATABASE/tools.json and the corpus that it names
Writes  DATABASE/cache.sqlite, or where tools.json says; ranks of several hosts that + .nodes

    python -m toolstar.tools check --database database/tools
    python -m toolstar.tools play --tasks database/tools/questions.jsonl
    torchrun --standalone grpo.py --env tools --database database/tools --tasks data/rl.jsonl
"""
import argparse
import contextlib
import hashlib
import json
import os
import re
import sqlite3
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import parent_process
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from runtime import SHARE, Parser, run, write_text
from sandbox import PROMPTS, Action, Episode, Sandbox, parse
from toolstar import helpers, mathematics, rewrite, verdict
from toolstar.text import truncate

# the judge, for callers that hold this module
math_equal, qa_metrics, reward = mathematics.math_equal, verdict.qa_metrics, verdict.reward
SETTINGS = {  # keys of tools.json: kind and default
    "grammar": (str, "turns"),  # or tags
    "tools": (list, ["Search", "Python", "Browse"]),
    "max_calls": (int, 6),  # of an episode; one more is refused, the next one ends it
    "show_budget": (bool, False),  # whether results say how many calls are left
    "retriever": (str, "bm25"),  # or an index folder, a server's address, settings of a web search
                                 # in a .json beside tools.json (retriever.py)
    "corpus": (str, "corpus.jsonl"),  # of bm25, beside tools.json
    "top_k": (int, 5),  # passages of a search
    "python": (str, "jail"),  # or the address of a /run_code (run_code.Remote)
    "unsafe_python": (bool, False),  # without a jail: programs can do whatever you can
    "workers": (int, 0),  # programs that run at once; 0: one for each core of a rank, at most 16
    "seconds": (float, 5.0),  # of a program
    "memory": (int, 512),  # MiB of a program
    "output": (int, 400),  # characters of a program's output that are shown, both ends of it
    "allow": (list, []),  # "host:port" that Browse may visit although it is no public address
    "page": (int, 2000),  # characters of a page that are shown
    "cache": (str, "cache.sqlite"),  # beside tools.json; "" for none
    "cache_python": (bool, False),  # for programs that depend on nothing but themselves
    "cache_mib": (int, 1024),
    "helpers": (dict, {}),  # budgets of an episode, and who helps (helpers.py); never in training
}
ANSWERING = ("retriever", "corpus", "top_k", "python", "seconds", "memory", "output", "allow",
             "page")  # what an answer depends on
DECLARED = {  # for the prompt: what it does, its arguments with whether they are needed
    "Search": ("Find passages that answer a query.", {"query": "A few words"}),
    "Python": ("Run a Python program, numpy and sympy at hand; what it prints comes back.",
               {"code": "The program"}),
    "Browse": ("Read the parts of a web page that fit a query.",
               {"url": "Address of the page", "query": "What to look for"}),
}
OPTIONAL = {"query"}  # of Browse
TAGS = {"search": "Search", "python": "Python", "browse": "Browse"}
TAG_OF = {name: tag for tag, name in TAGS.items()}
# what could pass for the grammar's own, or a chat template's, in what a tool says
FORGED = re.compile(r"<(?=\||/?(?:think|tool_call|tool_response|answer|result|search|python|browse)"
                    r"\b)")
MOST_BROKEN, IN_A_ROW, OF_LAST = 10, 20, 1000  # calls: more, and the run stops
MISSED = 600  # seconds that an error of the network is remembered
UNANSWERED = "Error: the search engine does not answer this query ({}). Try other words."
GONE = "Error: Current tool {} is not available."  # as injected failures read
SHORT = {"turns": 'You answer questions with tools. Reply <think>...</think><tool_call>{"name": '
                  '..., "arguments": {...}}</tool_call> or <think>...</think><answer>...</answer>.',
         "tags": "You answer questions with <search>, <python> and <browse>. End with <answer>."}


# ---------------------------------------------------------------- settings

def read_settings(folder):
    """DATABASE/tools.json as a namespace, defaults filled in. ValueError names file and key."""
    path = Path(folder) / "tools.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there: --database names a folder with tools.json, like "
                         "database/tools") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: want one object of settings")
    settings = {key: default for key, (_, default) in SETTINGS.items()}
    for key, value in found.items():
        if key not in SETTINGS:
            raise ValueError(f"{path}: no setting is called {key!r}; there are {list(SETTINGS)}")
        kind = SETTINGS[key][0]
        whole = kind is float and type(value) is int
        if type(value) is not kind and not whole:
            raise ValueError(f"{path}: {key} is {value!r:.80}, want {kind.__name__}")
        settings[key] = value
    for key, wrong in wrong_values(settings):
        raise ValueError(f"{path}: {key} {wrong}, not {settings[key]!r:.80}")
    return SimpleNamespace(**settings, folder=Path(folder))


def wrong_values(settings):
    """Yield (key, what it should be) of the values that cannot be."""
    for key, (kind, _) in SETTINGS.items():
        if key != "workers" and kind in (int, float) and not 0 < settings[key] < 1e9:
            yield key, "must be above 0"
    if settings["workers"] < 0:
        yield "workers", "must be 0 or more"
    if settings["grammar"] not in ("turns", "tags"):
        yield "grammar", "knows turns, tags"
    if not settings["tools"] or not all(name in DECLARED for name in map(str, settings["tools"])):
        yield "tools", f"knows {', '.join(DECLARED)}"
    if not all(re.fullmatch(r"[^/:]+:\d+", str(place)) for place in settings["allow"]):
        yield "allow", 'wants "host:port" each'
    if not re.match("jail$|https?://", settings["python"]):
        yield "python", "wants jail or http://..."
    if why := helpers.wrong(settings["helpers"]):
        yield "helpers", why


def system_prompt(name, settings):
    """The text behind --system-prompt: full, short, or the content of a file."""
    if name == "short":
        return SHORT[settings.grammar]
    file = {"turns": "tools.txt", "tags": "tags.txt"}[settings.grammar]
    text = (PROMPTS / file if name == "full" else Path(name)).read_text(encoding="utf-8").strip()
    declare = declare_call if settings.grammar == "turns" else declare_tag
    tools = "\n".join(declare(name) for name in settings.tools)
    return text.replace("{tools}", tools).replace("{calls}", str(settings.max_calls))


def declare_call(name):
    what, arguments = DECLARED[name]
    fields = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    needed = [key for key in arguments if len(arguments) == 1 or key not in OPTIONAL]
    parameters = {"type": "object", "required": needed, "properties": fields}
    function = {"name": name, "description": what, "parameters": parameters}
    return json.dumps({"type": "function", "function": function})


def declare_tag(name):
    what, arguments = DECLARED[name]
    inside = "\n".join(text.lower() for text in arguments.values())
    return f"<{TAG_OF[name]}>{inside}</{TAG_OF[name]}> {what}"


# ---------------------------------------------------------------- grammars

# a program's line breaks may stand in the JSON as they are
parse_turn = partial(parse, load=partial(json.loads, strict=False))


def parse_tags(reply):
    """What a segment of Tool-Star's message does -> Action. Never raises; takes linear time."""
    text = reply.rstrip()  # a stop may end inside a token, with blanks behind it
    if "<result>" in text or "</result>" in text:
        return Action("error", why="results are written by the tools alone")
    for tag, name in TAGS.items():
        if text.endswith(f"</{tag}>"):
            before, opening, inside = text[:-len(tag) - 3].rpartition(f"<{tag}>")
            if not opening:
                return Action("error", why=f"</{tag}> has no <{tag}>")
            return Action("call", name, arguments_of(name, inside.strip()))
    if text.count("<answer>") == text.count("</answer>") == 1 and text.endswith("</answer>"):
        return Action("answer", text=text[:-9].rpartition("<answer>")[2].strip())
    return Action("error", why="a message ends with one <answer>...</answer>")


def arguments_of(name, inside):
    """The arguments in a tag. Browse: the address in the first line, the query in the others."""
    if name == "Browse":
        url, _, query = inside.partition("\n")
        return {"url": url.strip(), "query": query.strip()}
    return {next(iter(DECLARED[name][1])): inside}


def as_tags(messages, tags=False):
    """An episode's replies and results as Tool-Star's one message. tags: it is one as it stands."""
    return "".join(said["content"] if tags else one_as_tags(said) for said in messages[2:])


def one_as_tags(message):
    text = message["content"]
    if message["role"] == "user":
        text = text.removeprefix("<tool_response>\n").removesuffix("</tool_response>")
        return f" <result>\n{text}\n</result>"
    action = parse_turn(text) if message["role"] == "assistant" else Action("error")
    if action.kind == "error":
        return text
    thought = text.partition("</think>")[0].strip() + "</think>\n"
    if action.kind == "answer":
        boxed = action.text if "\\boxed" in action.text else f"\\boxed{{{action.text}}}"
        return f"{thought}<answer>{boxed}</answer>"
    tag, values = TAG_OF.get(action.name, action.name), action.arguments
    inside = "\n".join(map(str, values.values())) if isinstance(values, dict) else str(values)
    return f"{thought}<{tag}>{inside}</{tag}>"


# ---------------------------------------------------------------- cache

class Cache:
    """What tools answered, in a SQLite file that ranks share: (status, text) by what was asked.

    Over `most` bytes the answers longest unused go. A damaged file is put aside; one that breaks
    while it is used is done without, and said.
    """

    def __init__(self, path, most):
        # WAL is for processes of one host; a change of journal waits for no lock: hence two files
        alone = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        path, self.journal = (path, "WAL") if alone else (f"{path}.nodes", "DELETE")
        self.path, self.most, self.lock, self.file = path, most, threading.Lock(), None
        try:
            self.open()
        except sqlite3.OperationalError as error:
            raise ValueError(f'{path}: {error}; "cache" in tools.json names another place, or "" '
                             "for none") from None
        except sqlite3.DatabaseError:
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                os.replace(path, f"{path}.damaged")
            print(f"{path} was damaged, and is {path}.damaged now", file=sys.stderr)
            self.open()

    def open(self):
        self.file = sqlite3.connect(self.path, timeout=30, check_same_thread=False,
                                    isolation_level=None)
        self.file.execute(f"PRAGMA journal_mode = {self.journal}")
        self.file.execute("PRAGMA synchronous = OFF")  # a lost answer is asked for again
        self.file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, status TEXT, "
                          "text TEXT, used REAL, until REAL)")
        self.size = self.count()

    def ask(self, query, *values):
        with self.lock:
            if self.file is None:
                return []
            try:
                return self.file.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                print(f"{self.path}: {error}; the run goes on without it", file=sys.stderr)
                self.file.close()
                self.file = None
                return []

    def get(self, key):
        rows = self.ask("SELECT status, text, until FROM answers WHERE key = ?", key)
        now = time.time()
        if not rows or rows[0][2] < now:
            return None
        self.ask("UPDATE answers SET used = ? WHERE key = ?", now, key)
        return rows[0][:2]

    def put(self, key, status, text, until):
        text = text.encode("utf-8", "replace").decode()
        self.ask("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", key, status, text,
                 time.time(), until)
        self.size += len(text)
        if self.size > self.most:  # of what this rank knows; now all of it is counted
            self.size = self.count()
        while self.size > self.most:
            self.ask("DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY used "
                     "LIMIT max(1, (SELECT count(*) FROM answers) / 10))")
            self.size = self.count()

    def count(self):
        """Characters of all answers. It reads the whole file."""
        return (self.ask("SELECT total(length(text)) FROM answers") or [(0,)])[0][0]

    def close(self):
        with self.lock:
            if self.file:
                self.file.close()
            self.file = None


# ---------------------------------------------------------------- tools

class Faults:
    """Counts calls whose tool failed, and stops the run where that is no accident any more: an
    agent that learns from broken tools learns not to use them, and nobody would see it."""

    def __init__(self):
        self.lock, self.last, self.row = threading.Lock(), deque(maxlen=OF_LAST), 0

    def note(self, name, cause):
        """cause: "" of a call that the tool answered. SystemExit where it is too much."""
        with self.lock:
            self.last.append(bool(cause))
            self.row = self.row + 1 if cause else 0
            count = sum(self.last) if cause else 0
        if count > MOST_BROKEN or self.row >= IN_A_ROW:
            raise SystemExit(f"{name} has failed in {count} of the last {len(self.last)} calls, "
                             f"{self.row} in a row: {cause}. Repair it; --resume goes on")


class ToolSandbox(Sandbox):
    """The tools, for one episode. calls: a record of each, which verdict.py judges by."""

    def __init__(self, world, failure_rate=0.0, seed=0):
        super().__init__(None, failure_rate, seed)
        self.world, self.tools, self.calls = world, frozenset(world.settings.tools), []

    def call(self, name, arguments):
        """The observation of a call. Raises nothing but the SystemExit of Faults."""
        if name not in self.tools:
            known = ", ".join(self.world.settings.tools)
            return FORGED.sub("‹", f"Error: there is no tool {name!r:.80}. The tools are {known}.")
        began = time.monotonic()
        if self.failure_rate and self._fails():
            status, text, cached = "injected", GONE.format(name), False
        else:
            status, text, cached = self.world.answer(name, arguments)
        text, escaped = self.shown(text)
        if check_arguments(name, arguments):  # anything at all, nested as deep as JSON goes
            arguments = repr(arguments)[:400]
        made = [(call["name"], call["arguments"]) for call in self.calls
                if call["status"] not in ("injected", "broken")]
        self.calls.append({
            "name": name, "arguments": arguments, "status": status, "empty": not text.strip(),
            "repeated": (name, arguments) in made, "cached": cached, "escaped": escaped,
            "seconds": round(time.monotonic() - began, 4)})
        return text if text.strip() else "(no output)"

    def shown(self, text):
        """(what of a text the agent may see, escaped places): it forges no tag."""
        # half a surrogate pair, which a passage may hold, cannot be tokenised
        return FORGED.subn("‹", text.encode("utf-8", "replace").decode())


class ToolEpisode(Episode):
    """A play of a question, in either grammar. Too many calls end it with the stop "calls"."""

    seen = 0  # tokens of the last observation

    def __init__(self, task, sandbox, max_turns, prompt):
        settings = sandbox.world.settings
        self.tags, self.show = settings.grammar == "tags", settings.show_budget
        self.most, self.refused = settings.max_calls, False
        # none in training; what they did; what finish is to do, and has done, to the messages
        self.helpers, self.helped, self.change, self.rewritten = None, [], None, None
        self.ahead = None  # the judgement on its answer, while others still play
        super().__init__(task, sandbox, max_turns, prompt,
                         parse=parse_tags if self.tags else parse_turn)

    def begin(self, reply):
        self.tokens = getattr(reply, "tokens", None)  # as an endpoint counts them
        self.made = len(self.sandbox.calls)  # before this reply
        self.begun = 0  # characters of the reply that stood there: a hint's (tir.py), or cut back
        if not self.stop and self.messages[-1]["role"] == "assistant":
            self.begun = len(self.messages[-1]["content"])
            reply = self.messages.pop()["content"] + reply
        self.strict = self.strict or self.tags  # within a message nobody can be told of an error
        action = super().begin(reply)
        if self.stop == "answer" and self.task["check"] == "math":
            self.ahead = self.sandbox.world.judge_ahead(self)
        if not action or action.kind != "call" or self.calls <= self.most:
            return action
        self.calls -= 1
        if self.refused:
            self.stop = "calls"
            return None
        self.refused = True
        return Action("over")

    def act(self, action):
        if action.kind == "over":
            return f"Error: all {self.most} calls are spent. Answer with what is known."
        observation = super().act(action)
        if self.helpers and action.kind == "call" and action.name in self.sandbox.tools:
            return self.helpers.after_call(self, observation)
        return observation

    def finish(self, observation):
        self.rewritten, self.change = self.change, None
        if self.rewritten and rewrite.rewrite(self) == "rollback":
            return observation  # it went with the call
        if self.show:
            observation += f"\n({max(0, self.most - self.calls)} calls are left)"
        if not self.tags:
            return super().finish(observation)
        self.messages.append({"role": "result", "content": f" <result>\n{observation}\n</result>"})
        return observation

    @property
    def observation_tokens(self):
        """Tokens of the last observation with its frame, as the player sets them."""
        return self.seen

    @observation_tokens.setter
    def observation_tokens(self, tokens):
        self.seen = tokens
        for call in self.sandbox.calls[self.made:]:  # none: an error of the grammar, or a refusal
            call["tokens"] = tokens

    def __getstate__(self):
        """For the checkpoints of --stretch: a judgement that is on its way cannot be pickled."""
        return self.__dict__ | {"ahead": None}

    def fork(self, seed):
        twin = super().fork(seed)
        twin.sandbox.calls = list(self.sandbox.calls)
        return twin

    def tokens_again(self, ids, template):
        """The ids of what a helper has rewritten. ids: those of before, without the observation."""
        return rewrite.tokens_again(self, ids, template)

    def record(self, model=""):
        world = self.sandbox.world
        made = {"tools": self.sandbox.calls,
                "world": {"settings": world.hash, "python": world.level,
                          "tools": world.settings.tools, "search": world.settings.retriever}}
        if self.helpers:
            made["helped"] = self.helped
        return super().record(model) | made


# ---------------------------------------------------------------- world

class Tools:
    """The world as the stages see it (docs/environment.md)."""

    kinds, slow = verdict.KINDS, True
    reward = staticmethod(verdict.reward_of)
    opened = {}  # {folder: world} of this process

    def __init__(self, settings):
        self.settings, self.faults = settings, Faults()
        self.opened[str(settings.folder)] = self
        self.stops = tuple(f"</{TAG_OF[name]}>" for name in settings.tools
                           if settings.grammar == "tags")
        self.lock, self.retriever, self.cache = threading.Lock(), None, None
        self.judging = ThreadPoolExecutor(8, "judging")
        self.jail = self.browser = self.ask = None
        chosen = json.dumps([getattr(settings, key) for key in ANSWERING])
        self.identity = self.hash = hashlib.sha256(chosen.encode()).hexdigest()[:12]
        self.parts = verdict.PARTS + ("cached", "tool_seconds")
        self.parts += ("unsafe",) * settings.unsafe_python
        if settings.cache:
            self.cache = Cache(settings.folder / settings.cache, settings.cache_mib * 2**20)
        if "Search" in settings.tools:
            self.find_corpus()
        if "Python" in settings.tools:
            self.open_python()
        if "Browse" in settings.tools:
            self.open_browser()

    def find_corpus(self):
        """Look for the retriever's files, or ask its server for a word, before all else."""
        from toolstar.retriever import (
            HTTP,
            QueryError,
            find_retriever,
            load_document,
            open_retriever,
        )

        chosen, corpus = self.settings.retriever, self.settings.folder / self.settings.corpus
        if chosen.startswith(HTTP):
            found = open_retriever(chosen, patience=0).search(["a"], 1)[0]
            if isinstance(found, QueryError):
                raise ConnectionError(f"{chosen} answers no query: {found}")
        else:
            chosen = chosen if chosen == "bm25" else str(self.settings.folder / chosen)
            find_retriever(chosen, corpus)
            if chosen == "bm25":
                with open(corpus, encoding="utf-8") as lines:
                    for number, line in enumerate(lines, 1):
                        load_document(line, f"{corpus}, line {number}")
            found = os.stat(corpus if chosen == "bm25" else chosen if chosen.endswith(".json") else
                            Path(chosen) / "matrix.f16")
            self.identity += f"/{found.st_size}/{found.st_mtime_ns}"
        # opened by the first search: vLLM 0.32.0 does not start once numba is imported, by bm25s
        self.open_search = partial(open_retriever, chosen, corpus)

    def open_python(self):
        from toolstar.jail import Jail
        from toolstar.run_code import Remote

        chosen = self.settings
        if chosen.python != "jail":
            self.jail = Remote(chosen.python, seconds=chosen.seconds)
            return
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = chosen.workers or max(1, min(16, len(os.sched_getaffinity(0)) // ranks))
        self.jail = Jail(workers, chosen.unsafe_python, seconds=chosen.seconds,
                           memory=chosen.memory)

    def open_browser(self):
        from toolstar.browse import Browser
        from toolstar.jail import Jail

        jail = Jail(1, self.settings.unsafe_python, ("trafilatura",), output=2**22)
        self.browser = Browser(jail, self.settings.allow, passages=self.settings.page)

    def __reduce__(self):
        """An episode in a checkpoint names its world: the one that is open then, with its tools."""
        return find_opened, (str(self.settings.folder),)

    @property
    def level(self):
        """How programs are locked up: jailed, unsafe, or elsewhere."""
        return getattr(self.jail, "level", "elsewhere" if self.jail else "off")

    def judge_ahead(self, episode):
        """Compare an answer with the golds in the background, since mathematics can take its time:
        the verdict will find the outcome in the cache of verify.py."""
        said = verdict.bare(episode.answer)
        return self.judging.submit(verdict.is_right, said, episode.task) if said else None

    def close(self):
        """Give back workers and files."""
        self.judging.shutdown(wait=False, cancel_futures=True)
        for held in self.jail, self.browser and self.browser.jail, self.browser, self.cache:
            if held:
                held.close()

    def load_task(self, row):
        """A question {id, query, golds, check, needs?, family?}; ValueError names what is wrong."""
        if not isinstance(row, dict):
            raise ValueError(f"a task is a table of keys, not a {type(row).__name__}")
        for key in ("query", "golds", "check"):
            if key not in row:
                raise ValueError(f"a task of this world has a {key!r}; this one: {list(row)}")
        if not isinstance(row["query"], str):
            raise ValueError(f"'query' must be a text, not {row['query']!r:.60}")
        golds = row["golds"]
        if not (isinstance(golds, list) and golds and all(isinstance(g, str) for g in golds)):
            raise ValueError(f"'golds' must be a list of texts that are right, not {golds!r:.60}")
        if row["check"] not in ("math", "qa"):
            raise ValueError(f"'check' must be math or qa, not {row['check']!r:.60}")
        needs = row.get("needs", [])
        if not (isinstance(needs, list) and all(need in list(TAGS) for need in needs)):
            raise ValueError(f"'needs' must be some of {list(TAGS)}, not {needs!r:.60}")
        return row | {"id": str(row.get("id", row.get("idx", "?")))}

    def episode(self, task, seed, args):
        """An Episode, ready to be played."""
        prompt = system_prompt(args.system_prompt, self.settings)
        sandbox = ToolSandbox(self, args.failure_rate, seed)
        episode = ToolEpisode(task, sandbox, args.max_turns, prompt)
        if self.ask:
            episode.helpers = helpers.Helpers(self.ask, self.settings.helpers, f"{seed}")
        return episode

    def open_helpers(self, generate=None):
        """Turn the settings' helpers on for the episodes that begin from now on. Only evaluate.py
        calls this, training and synthesis never. generate(messages): asks the policy, if it is an
        endpoint; else the player has to answer what the returned Asks collect.
        """
        asks = None if generate else helpers.Asks()
        if any(map(self.settings.helpers.get, helpers.NAMES)):
            self.ask = helpers.asker(self.settings, asks, generate)
        return asks

    def lines(self, row):
        """Lines that this world adds to evaluate.py's table: success and tools by task family."""
        task, success = row["task"], row["score"]["success"]
        if "family" not in task:
            return {}
        used = {call["name"].lower() for call in row.get("tools", ())}
        needs = set(task.get("needs", ()))
        return {f"success, {task['family']}": success,
                f"tools as needed, {task['family']}": used >= needs if needs else not used}

    def verdict(self, episode):
        """(answer, score, strict success): right, whole (tags: as released), by working tools."""
        calls, stop = episode.sandbox.calls, episode.stop
        if episode.ahead:
            episode.ahead.result()
        said = as_tags(episode.messages, episode.tags)
        whole = stop == "answer" and (not episode.tags or verdict.released_format(said))
        score = verdict.score(episode.task, episode.answer or "", calls, whole,
                              stop in ("turns", "context"), said)
        score["tool_seconds"] = sum((call["seconds"] for call in calls), 0.0)
        score["cached"] = sum(call["cached"] for call in calls) / max(1, len(calls))
        if self.settings.unsafe_python:
            score["unsafe"] = 1.0  # in every log and table
        if episode.helpers:
            score["helpers"] = len(episode.helped)
            score["helpers' tokens"] = sum(item["tokens"] for item in episode.helped)
        broken = any(call["status"] == "broken" for call in calls)
        return episode.answer, score, score["success"] * (whole and not broken)

    # ------------------------------------------------------------ calls

    def answer(self, name, arguments):
        """(status, text, whether from the cache) of a call.

        status: ok; error, timeout, memory, output, killed: the agent's own; broken: the tool's;
        refused: the search engine answers other queries, but not this one.
        """
        wrong = check_arguments(name, arguments)
        if wrong:
            return "error", wrong, False
        kept = self.cache and (name != "Python" or self.settings.cache_python)
        key = json.dumps([name, arguments, self.identity], sort_keys=True)
        if kept and (found := self.cache.get(key)):
            return *found, True
        status, text = getattr(self, name.lower())(**arguments)
        self.faults.note(name, text if status == "broken" else "")
        if status == "broken":
            return status, GONE.format(name), False
        if kept and status in ("ok", "error"):
            missed = status == "error" and name == "Browse"
            self.cache.put(key, status, text, time.time() + MISSED if missed else 2.0**40)
        return status, text, False

    def search(self, query):
        with self.lock:
            self.retriever = self.retriever or self.open_search()
        try:
            hits = self.retriever.search([query], self.settings.top_k)[0]
        except ConnectionError as error:
            return "broken", str(error)
        if isinstance(hits, ConnectionError):
            return "refused", UNANSWERED.format(hits)
        return "ok", "\n".join(f"Doc {i} {hit['document']['contents'].strip()}"
                               for i, hit in enumerate(hits, 1))

    def python(self, code):
        done, chosen = self.jail.run(code), self.settings
        if done.status == "broken":
            return "broken", done.error
        why = {"ok": "", "error": done.error,
               "timeout": f"Error: the program took more than {chosen.seconds:g} s",
               "memory": f"Error: the program took more than {chosen.memory} MiB",
               "output": "Error: the program printed too much"}.get(
                   done.status, f"Error: the program was ended ({done.error})")
        shown = truncate(done.stdout.strip("\n"), chosen.output)
        why = truncate(why, chosen.output)
        return done.status, "\n".join(filter(None, (shown, why)))

    def browse(self, url, query="", passages=None):
        from toolstar.browse import BrowserBroken, PageError

        try:
            return "ok", self.browser.read(url, query, passages)
        except PageError as error:
            return "error", f"Error: {error}"
        except BrowserBroken as error:
            return "broken", str(error)


def check_arguments(name, arguments):
    """What is wrong with a call's arguments, "" if nothing is."""
    wanted = DECLARED[name][1]
    needed = {key for key in wanted if len(wanted) == 1 or key not in OPTIONAL}
    whole = isinstance(arguments, dict) and needed <= arguments.keys() <= wanted.keys()
    if not whole or not all(isinstance(value, str) for value in arguments.values()):
        return f"Error: {name} takes texts: {', '.join(wanted)}."
    empty = [key for key in needed if not arguments[key].strip()]
    return f"Error: {name} needs a {empty[0]}." if empty else ""


def flags(parser):
    """The world's own flags, in addition to those of a stage."""
    add = parser.add_argument
    add("--database", metavar="FOLDER", help="folder with tools.json; database/tools by default")
    add("--system-prompt", default="full", metavar="NAME",
        help="full, short, or a file; evaluate a checkpoint with the prompt of its training")
    add("--failure-rate", type=SHARE, default=0.0,
        help="probability that a tool call is made to fail")


def find_opened(folder):
    """The world of this folder, which must be open."""
    if folder not in Tools.opened:
        raise ValueError(f"the plays that wait are of --database {folder}: resume with that one")
    return Tools.opened[folder]


def open_world(args):
    """The world of --database, a folder with tools.json; database/tools unless it is set."""
    folder = args.database or Path(__file__).resolve().parent.parent / "database" / "tools"
    world = Tools(read_settings(folder))
    if os.environ.get("RANK", "0") == "0" and parent_process() is None:
        chosen = {key: getattr(world.settings, key) for key in SETTINGS}
        print(f"tools {world.identity}, Python {world.level}: {json.dumps(chosen)}")
    return world


# ---------------------------------------------------------------- main

TRIED = {"Search": {"query": "the tallest tower"}, "Python": {"code": "print(6 * 7)"},
         "Browse": {"url": "http://127.0.0.1:9/"}}  # refused, which takes no network
AT_ONCE = 64  # calls in flight, when a tool's pace is taken


def pace(world, name):
    """(seconds of a call by itself, calls per second with AT_ONCE in flight, how many of these
    broke) of a tool, past the cache."""
    key, text = next(iter(TRIED[name].items()))

    def call(number):
        return getattr(world, name.lower())(**{key: f"{text} # {number}"})[0]

    times = [time.monotonic()]
    for number in range(5):
        call(number)
        times.append(time.monotonic())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = list(pool.map(call, range(AT_ONCE)))
    rate = AT_ONCE / (time.monotonic() - times[-1])
    return median(b - a for a, b in pairwise(times)), rate, statuses.count("broken")


def check(args):
    """Print what the settings say, what each tool answers, how fast -> exit status."""
    world, rates = open_world(args), []
    print(f"\nPython: {world.level}")
    for what, outcome in getattr(world.jail, "proof", {}).items():
        print(f"    {what:40} {outcome}")
    statuses = []
    for name in world.settings.tools:
        status, text, cached = world.answer(name, TRIED[name])
        statuses.append(status)
        # Browse is asked for an address that it has to refuse
        told = "refused, as it must be" if (name, status) == ("Browse", "error") else status
        print(f"\n{name} {json.dumps(TRIED[name])} -> {told}{', cached' * cached}\n{text}")
        if status == "ok":  # a page's pace is its server's
            alone, rate, broken = pace(world, name)
            rates.append(rate)
            statuses += ["broken"] * broken
            print(f"{1000 * alone:.1f} ms a call; {AT_ONCE} at once: {rate:.0f} calls/s, "
                  f"{broken} broken")
    (plays, tokens), calls = args.update, world.settings.max_calls
    if plays and rates:
        print(f"\nan update: up to {plays} plays x {calls} calls = {plays * calls} calls and "
              f"{plays * tokens:,} tokens, about {plays * calls / min(rates):.0f} s of tools where "
              "all go to the slowest")
    world.close()
    return int("broken" in statuses)


def prompt(args):
    """Print what episodes of a world are told, with a text behind it; --out gets it, too."""
    text = system_prompt(args.system_prompt, read_settings(args.database))
    if args.principles:
        text += "\n\n" + Path(args.principles).read_text(encoding="utf-8").strip()
    write_text(args.out, text + "\n")
    print(text)


def command_flags(argv=None):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    for name, what in (("check", "call each tool once; exits with 1 where one is broken"),
                       ("play", "you are the agent: answer a file's questions in the terminal")):
        add = commands.add_parser(name, help=what).add_argument
        add("--database", help="folder with tools.json (database/tools)")
        if name == "check":
            add("--update", type=int, nargs=2, default=(0, 0), metavar=("PLAYS", "TOKENS"),
                help="say what the tools of an update of such plays take, at most")
        if name == "play":
            add("--tasks", required=True, help="jsonl, {id, query, check, golds} a line")
            add("--out", default="out/play", help="folder of the episodes (out/play)")
    add = commands.add_parser("prompt", help="write the system prompt of a world").add_argument
    add("--database", required=True, help="folder with tools.json")
    add("--system-prompt", default="full", help="full, short, or a file")
    add("--principles", metavar="FILE", help="text to stand behind it: the reward's principles, "
        "which toolstar.pairs --principles takes out again")
    add("--out", required=True, help="file of the prompt")
    return p.parse_args(argv)


def main(argv=None):
    args = command_flags(argv)
    if args.command == "play":
        import evaluate

        words = ["--env", "tools", "--agent", "person", "--tasks", args.tasks, "--out", args.out]
        return evaluate.main(words + (["--database", args.database] if args.database else []))
    return run("toolstar.tools", check if args.command == "check" else prompt, args)


if __name__ == "__main__":
    sys.exit(main())
