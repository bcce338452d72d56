"""
The tools world: one policy that searches, runs programs and browses while it reasons [1].

    (1) settings  read DATABASE/tools.json and check each key: tools, grammar, budget, limits
    (2) call      Search finds passages (retriever.py), Python runs a program in a jail (jail.py),
                  Browse reads a web page (browse.py); all ranks share a cache of results on disk
    (3) observe   a result is cut to size and its tags are escaped; a broken tool is counted apart
                  from a program that fails, and if tools break too often the run stops
    (4) judge     verdict.py scores the episode from the recorded calls, not from its text alone

There are two grammars. In "turns", ours, a reply holds a thought and either one JSON call or the
answer, and the result is the next message. In "tags", Tool-Star's, the whole episode is one
message: the engine stops after </search>, </python> or </browse>, and a <result> is appended. The
published checkpoints and data use "tags".
[1] Tool-Star, arXiv:2505.16410

Reads   DATABASE/tools.json and the corpus that it names
Writes  the cache, DATABASE/cache.sqlite by default (+ .nodes if the ranks are on several hosts)

    python -m toolstar.tools check --database database/tools
    python evaluate.py --env tools --agent person --tasks database/tools/questions.jsonl
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

# the functions of the judge that programs outside of this repository call
math_equal, qa_metrics, reward = mathematics.math_equal, verdict.qa_metrics, verdict.reward
SETTINGS = {  # key of tools.json: (type, default)
    "grammar": (str, "turns"),  # "turns" or "tags"
    "tools": (list, ["Search", "Python", "Browse"]),
    "max_calls": (int, 6),  # per episode; the next call is refused, the one after ends the episode
    "retriever": (str, "bm25"),  # or an index folder, the URL of a server, or a .json file with
                                 # the settings of a web search (retriever.py)
    "corpus": (str, "corpus.jsonl"),  # file of bm25's passages, beside tools.json
    "top_k": (int, 5),  # passages per search
    "python": (str, "jail"),  # or the URL of a /run_code server (run_code.Remote)
    "unsafe_python": (bool, False),  # True: no jail, programs can do whatever you can
    "workers": (int, 0),  # programs that run at once; 0: one per core of a rank, at most 16
    "seconds": (float, 5.0),  # time limit of a program
    "memory": (int, 512),  # MiB per program
    "output": (int, 400),  # characters of a program's output that are shown: its start and its end
    "allow": (list, []),  # "host:port" of non-public servers that Browse may visit
    "page": (int, 2000),  # characters of a page that are shown
    "cache": (str, "cache.sqlite"),  # file beside tools.json; "" for no cache
    "cache_python": (bool, False),  # True: also cache what programs print
    "helpers": (dict, {}),  # budgets per episode and the model that helps; only in evaluation
}
ANSWERING = ("retriever", "corpus", "top_k", "python", "seconds", "memory", "output", "allow",
             "page")  # the settings on which a tool's answer depends
DECLARED = {  # for the prompt: (what the tool does, {argument: description})
    "Search": ("Find passages that answer a query.", {"query": "A few words"}),
    "Python": ("Run a Python program, numpy and sympy at hand; what it prints comes back.",
               {"code": "The program"}),
    "Browse": ("Read the parts of a web page that fit a query.",
               {"url": "Address of the page", "query": "What to look for"}),
}
OPTIONAL = {"query"}  # of Browse
TAGS = {"search": "Search", "python": "Python", "browse": "Browse"}
TAG_OF = {name: tag for tag, name in TAGS.items()}
# tags of the grammars and of chat templates, which a tool's result must not contain
FORGED = re.compile(r"<(?=\||/?(?:think|tool_call|tool_response|answer|result|search|python|browse)"
                    r"\b)")
# the run stops after more than MOST_BROKEN broken calls of the last OF_LAST, or IN_A_ROW in a row
MOST_BROKEN, IN_A_ROW, OF_LAST = 10, 20, 1000
KEEP_FAILURE = 600  # seconds for which the cache keeps a page that could not be read
UNANSWERED = "Error: the search engine does not answer this query ({}). Try other words."
NOT_AVAILABLE = "Error: Current tool {} is not available."  # also the text of injected failures
SHORT = {"turns": 'You answer questions with tools. Reply <think>...</think><tool_call>{"name": '
                  '..., "arguments": {...}}</tool_call> or <think>...</think><answer>...</answer>.',
         "tags": "You answer questions with <search>, <python> and <browse>. End with <answer>."}


# ---------------------------------------------------------------- settings

def read_settings(folder):
    """Read FOLDER/tools.json into a namespace, with defaults for missing keys.

    Raises ValueError, which names the file and the key, for anything that is wrong.
    """
    path = Path(folder) / "tools.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there: --database needs a folder with a tools.json, such "
                         "as database/tools") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: it must hold one JSON object of settings")
    settings = {key: default for key, (_, default) in SETTINGS.items()}
    for key, value in found.items():
        if key not in SETTINGS:
            raise ValueError(f"{path}: unknown setting {key!r}; the settings are {list(SETTINGS)}")
        kind = SETTINGS[key][0]
        whole = kind is float and type(value) is int
        if type(value) is not kind and not whole:
            raise ValueError(f"{path}: {key} is {value!r:.80}, it must be {kind.__name__}")
        settings[key] = value
    for key, wrong in wrong_values(settings):
        raise ValueError(f"{path}: {key} {wrong}, not {settings[key]!r:.80}")
    return SimpleNamespace(**settings, folder=Path(folder))


def wrong_values(settings):
    """Yield (key, requirement) for each value that is out of range."""
    for key, (kind, _) in SETTINGS.items():
        if key != "workers" and kind in (int, float) and not 0 < settings[key] < 1e9:
            yield key, "must be above 0"
    if settings["workers"] < 0:
        yield "workers", "must be 0 or more"
    if settings["grammar"] not in ("turns", "tags"):
        yield "grammar", "must be turns or tags"
    if not settings["tools"] or not all(name in DECLARED for name in map(str, settings["tools"])):
        yield "tools", f"must be some of {', '.join(DECLARED)}"
    if not all(re.fullmatch(r"[^/:]+:\d+", str(place)) for place in settings["allow"]):
        yield "allow", 'must be a list of "host:port"'
    if not re.match("jail$|https?://", settings["python"]):
        yield "python", "must be jail or http://..."
    if why := helpers.settings_fault(settings["helpers"]):
        yield "helpers", why


def system_prompt(name, settings):
    """The system prompt. name: "full", "short" or a file, in which {tools} and {calls} are filled.

    settings: the namespace of read_settings.
    """
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

# strict=False: a program in JSON may contain raw line breaks
parse_turn = partial(parse, load=partial(json.loads, strict=False))


def parse_tags(reply):
    """The Action of one segment of Tool-Star's message. Never raises; takes linear time."""
    text = reply.rstrip()  # the token that ends a stop string may also hold blanks after it
    if "<result>" in text or "</result>" in text:
        return Action("error", why="only the tools write results")
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
    """The arguments of a call from the text in its tag. For Browse the first line is the URL, the
    rest the query."""
    if name == "Browse":
        url, _, query = inside.partition("\n")
        return {"url": url.strip(), "query": query.strip()}
    return {next(iter(DECLARED[name][1])): inside}


def as_tags(messages, tags=False):
    """An episode's replies and results as one message in Tool-Star's grammar.

    tags: whether the messages are in that grammar already.
    """
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
    """Tool results in a SQLite file that ranks share: {key of a call: (status, text)}.

    most: characters of text; above it, the results that were not used for longest are deleted. A
    damaged file is renamed. If the file breaks during the run, a message says so and the cache is
    off.
    """

    def __init__(self, path, most=2**30):
        # SQLite's WAL works between processes of one host only, and switching a file that others
        # have open to another journal fails: so runs on several hosts use a file of their own
        alone = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        path, self.journal = (path, "WAL") if alone else (f"{path}.nodes", "DELETE")
        self.path, self.most, self.lock, self.file = path, most, threading.Lock(), None
        try:
            self.open()
        except sqlite3.OperationalError as error:
            raise ValueError(f'{path}: {error}; "cache" in tools.json names another place, or "" '
                             "for none") from None
        except sqlite3.DatabaseError:
            with contextlib.suppress(FileNotFoundError):  # another rank has renamed it already
                os.replace(path, f"{path}.damaged")
            print(f"{path} was damaged, and is {path}.damaged now", file=sys.stderr)
            self.open()

    def open(self):
        self.file = sqlite3.connect(self.path, timeout=30, check_same_thread=False,
                                    isolation_level=None)
        self.file.execute(f"PRAGMA journal_mode = {self.journal}")
        self.file.execute("PRAGMA synchronous = OFF")  # a lost result is only computed again
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
                print(f"{self.path}: {error}; the run continues without it", file=sys.stderr)
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
        if self.size > self.most:  # self.size counts this rank's additions; now count all ranks'
            self.size = self.count()
        while self.size > self.most:
            self.ask("DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY used "
                     "LIMIT max(1, (SELECT count(*) FROM answers) / 10))")
            self.size = self.count()

    def count(self):
        """The number of characters of all results. Reads the whole file."""
        return (self.ask("SELECT total(length(text)) FROM answers") or [(0,)])[0][0]

    def close(self):
        with self.lock:
            if self.file:
                self.file.close()
            self.file = None


# ---------------------------------------------------------------- tools

class Faults:
    """Counts calls whose tool was broken, and stops the run when they are too many: an agent that
    trains with broken tools learns not to use them, and nobody would notice."""

    def __init__(self):
        self.lock, self.last, self.row = threading.Lock(), deque(maxlen=OF_LAST), 0

    def note(self, name, cause):
        """Count one call of the tool `name`. cause: why the tool broke, "" if it answered.

        Raises SystemExit when too many calls have broken.
        """
        with self.lock:
            self.last.append(bool(cause))
            self.row = self.row + 1 if cause else 0
            count = sum(self.last) if cause else 0
        if count > MOST_BROKEN or self.row >= IN_A_ROW:
            raise SystemExit(f"{name} has failed in {count} of the last {len(self.last)} calls, "
                             f"{self.row} in a row: {cause}. Repair it, then use --resume")


class ToolSandbox(Sandbox):
    """The tools of one episode. calls: a record of each call, from which verdict.py scores."""

    def __init__(self, world, failure_rate=0.0, seed=0):
        super().__init__(None, failure_rate, seed)
        self.world, self.tools, self.calls = world, frozenset(world.settings.tools), []

    def call(self, name, arguments):
        """The observation of a call, a str. Raises only the SystemExit of Faults."""
        if name not in self.tools:
            known = ", ".join(self.world.settings.tools)
            return FORGED.sub("‹", f"Error: there is no tool {name!r:.80}. The tools are {known}.")
        began = time.monotonic()
        if self.failure_rate and self._fails():
            status, text, cached = "injected", NOT_AVAILABLE.format(name), False
        else:
            status, text, cached = self.world.answer(name, arguments)
        text, escaped = self.shown(text)
        if check_arguments(name, arguments):  # they may be any JSON value, deeply nested
            arguments = repr(arguments)[:400]
        made = [(call["name"], call["arguments"]) for call in self.calls
                if call["status"] not in ("injected", "broken")]
        self.calls.append({
            "name": name, "arguments": arguments, "status": status, "empty": not text.strip(),
            "repeated": (name, arguments) in made, "cached": cached, "escaped": escaped,
            "seconds": round(time.monotonic() - began, 4)})
        return text if text.strip() else "(no output)"

    def shown(self, text):
        """(the text with all tags escaped, the number of tags that were escaped)."""
        # a passage may hold half a surrogate pair, which cannot be tokenised
        return FORGED.subn("‹", text.encode("utf-8", "replace").decode())


class ToolEpisode(Episode):
    """An episode of one question, in either grammar. Too many calls end it with stop "calls"."""

    seen = 0  # tokens of the last observation

    def __init__(self, task, sandbox, max_turns, prompt):
        settings = sandbox.world.settings
        self.tags = settings.grammar == "tags"
        self.most, self.refused = settings.max_calls, False
        # helpers: None in training. helped: items for the record. change: the item with which the
        # next finish() rewrites the messages. rewritten: the item with which the last one did
        self.helpers, self.helped, self.change, self.rewritten = None, [], None, None
        self.ahead = None  # Future: the comparison of its answer, which runs while others play
        super().__init__(task, sandbox, max_turns, prompt,
                         parse=parse_tags if self.tags else parse_turn)

    def begin(self, reply):
        self.tokens = getattr(reply, "tokens", None)  # of the conversation, if an endpoint says so
        self.made = len(self.sandbox.calls)  # calls before this reply
        self.begun = 0  # characters of the reply that existed before: of a hint or after a rollback
        if not self.stop and self.messages[-1]["role"] == "assistant":
            self.begun = len(self.messages[-1]["content"])
            reply = self.messages.pop()["content"] + reply
        self.strict = self.strict or self.tags  # one message has no place for an error's feedback
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
            return observation  # the rollback has removed the call, so its result is dropped
        if not self.tags:
            return super().finish(observation)
        self.messages.append({"role": "result", "content": f" <result>\n{observation}\n</result>"})
        return observation

    @property
    def observation_tokens(self):
        """Tokens of the last observation with its chat template markup; the player sets it."""
        return self.seen

    @observation_tokens.setter
    def observation_tokens(self, tokens):
        self.seen = tokens
        for call in self.sandbox.calls[self.made:]:  # empty after a format error or a refusal
            call["tokens"] = tokens

    def __getstate__(self):
        """The state for the checkpoints of --stretch; a running Future cannot be pickled."""
        return self.__dict__ | {"ahead": None}

    def fork(self, seed):
        twin = super().fork(seed)
        twin.sandbox.calls = list(self.sandbox.calls)
        return twin

    def tokens_again(self, ids, template):
        """The token ids of the messages after a helper has rewritten them.

        ids: the token ids before that, without the observation.
        """
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
            self.cache = Cache(settings.folder / settings.cache)
        if "Search" in settings.tools:
            self.find_corpus()
        if "Python" in settings.tools:
            self.open_python()
        if "Browse" in settings.tools:
            self.open_browser()

    def find_corpus(self):
        """Check the retriever's files, or send its server one query, before anything is spent."""
        from toolstar.retriever import HTTP, find_retriever, load_document, open_retriever

        chosen, corpus = self.settings.retriever, self.settings.folder / self.settings.corpus
        if chosen.startswith(HTTP):
            open_retriever(chosen, patience=0).search(["a"], 1)
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
        # the first search opens it: bm25s imports numba, after which vLLM 0.32.0 does not start
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
        """A pickled episode refers to its world by folder; unpickling uses the one that is open."""
        return find_opened, (str(self.settings.folder),)

    @property
    def level(self):
        """How programs are isolated: "jailed", "unsafe" or "remote"; "off" without Python."""
        return self.jail.level if self.jail else "off"

    def judge_ahead(self, episode):
        """Start to compare an answer with the golds in a thread, since mathematics can be slow.

        verdict() then finds the outcome in the cache of verify.compared. Returns a Future or None.
        """
        said = verdict.bare(episode.answer)
        return self.judging.submit(verdict.is_right, said, episode.task) if said else None

    def close(self):
        """Stop the workers and close the files."""
        self.judging.shutdown(wait=False, cancel_futures=True)
        for held in self.jail, self.browser and self.browser.jail, self.browser, self.cache:
            if held:
                held.close()

    def load_task(self, row):
        """A task {id, query, golds, check, needs?, family?}; ValueError names what is wrong."""
        if not isinstance(row, dict):
            raise ValueError(f"a task must be a JSON object, not a {type(row).__name__}")
        for key in ("query", "golds", "check"):
            if key not in row:
                raise ValueError(f"a task needs a {key!r}; this one has {list(row)}")
        if not isinstance(row["query"], str):
            raise ValueError(f"'query' must be a text, not {row['query']!r:.60}")
        golds = row["golds"]
        if not (isinstance(golds, list) and golds and all(isinstance(g, str) for g in golds)):
            raise ValueError(f"'golds' must be a list of right answers, not {golds!r:.60}")
        if row["check"] not in ("math", "qa"):
            raise ValueError(f"'check' must be math or qa, not {row['check']!r:.60}")
        needs = row.get("needs", [])
        if not (isinstance(needs, list) and all(need in list(TAGS) for need in needs)):
            raise ValueError(f"'needs' must be some of {list(TAGS)}, not {needs!r:.60}")
        return row | {"id": str(row.get("id", row.get("idx", "?")))}

    def episode(self, task, seed, args):
        """A new ToolEpisode. seed: of the events that the world draws at random."""
        prompt = system_prompt(args.system_prompt, self.settings)
        sandbox = ToolSandbox(self, args.failure_rate, seed)
        episode = ToolEpisode(task, sandbox, args.max_turns, prompt)
        if self.ask:
            episode.helpers = helpers.Helpers(self.ask, self.settings.helpers, f"{seed}")
        return episode

    def open_helpers(self, generate=None):
        """Turn the settings' helpers on for all later episodes. Only evaluate.py calls this;
        training and synthesis never do.

        generate: a function of messages that asks the policy's endpoint. None: the policy runs in
        vLLM, and the player must answer the questions in the Asks that this returns.
        """
        asks = None if generate else helpers.Asks()
        if any(map(self.settings.helpers.get, helpers.NAMES)):
            self.ask = helpers.asker(self.settings, asks, generate)
        return asks

    def lines(self, row):
        """The lines that this world adds to evaluate.py's table: success and use of the needed
        tools, by family of tasks. row: the record of a judged episode."""
        task, success = row["task"], row["score"]["success"]
        if "family" not in task:
            return {}
        used = {call["name"].lower() for call in row.get("tools", ())}
        needs = set(task.get("needs", ()))
        return {f"success, {task['family']}": success,
                f"tools as needed, {task['family']}": used >= needs if needs else not used}

    def verdict(self, episode):
        """(answer, score, strict success) of an episode that has ended.

        Strict success: the answer is right, the format is kept (in "tags" as the released code
        checks it), and no tool was broken.
        """
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
            score["unsafe"] = 1.0  # shown in every log and table
        if episode.helpers:
            score["helpers"] = len(episode.helped)
            score["helpers' tokens"] = sum(item["tokens"] for item in episode.helped)
        broken = any(call["status"] == "broken" for call in calls)
        return episode.answer, score, score["success"] * (whole and not broken)

    # ------------------------------------------------------------ calls

    def answer(self, name, arguments):
        """(status, text, whether it came from the cache) of a call.

        status: "ok"; "error", "timeout", "memory", "output" or "killed" if the agent's call or
        program is at fault; "broken" if the tool is; "refused" if the search engine answers other
        queries, but not this one.
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
            return status, NOT_AVAILABLE.format(name), False
        if kept and status in ("ok", "error"):
            missed = status == "error" and name == "Browse"
            self.cache.put(key, status, text, time.time() + KEEP_FAILURE if missed else 2.0**40)
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
    """An error message on a call's arguments, "" if they are right."""
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
    """The open world of this folder, for unpickled episodes; ValueError if there is none."""
    if folder not in Tools.opened:
        raise ValueError(f"the checkpoint's plays need --database {folder}: resume with that one")
    return Tools.opened[folder]


def open_world(args):
    """The world of args.database, a folder with tools.json; database/tools by default."""
    folder = args.database or Path(__file__).resolve().parent.parent / "database" / "tools"
    world = Tools(read_settings(folder))
    if os.environ.get("RANK", "0") == "0" and parent_process() is None:
        chosen = {key: getattr(world.settings, key) for key in SETTINGS}
        print(f"tools {world.identity}, Python {world.level}: {json.dumps(chosen)}")
    return world


# ---------------------------------------------------------------- main

TRIED = {"Search": {"query": "the tallest tower"}, "Python": {"code": "print(6 * 7)"},
         "Browse": {"url": "http://127.0.0.1:9/"}}  # must be refused; needs no network
AT_ONCE = 64  # calls in flight while a tool's speed is measured


def pace(world, name):
    """The speed of a tool without the cache: (median seconds of a single call, calls per second
    with AT_ONCE in flight, the number of broken ones among the latter)."""
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
    """Call each tool once; print its answer and its speed. Returns the exit status."""
    world, rates = open_world(args), []
    print(f"\nPython: {world.level}")
    for what, outcome in getattr(world.jail, "proof", {}).items():
        print(f"    {what:40} {outcome}")
    statuses = []
    for name in world.settings.tools:
        status, text, cached = world.answer(name, TRIED[name])
        statuses.append(status)
        # Browse is given an address that it must refuse
        told = "refused, as it must be" if (name, status) == ("Browse", "error") else status
        print(f"\n{name} {json.dumps(TRIED[name])} -> {told}{', cached' * cached}\n{text}")
        if status == "ok":  # the speed of Browse depends on the page's server
            alone, rate, broken = pace(world, name)
            rates.append(rate)
            statuses += ["broken"] * broken
            print(f"{1000 * alone:.1f} ms a call; {AT_ONCE} at once: {rate:.0f} calls/s, "
                  f"{broken} broken")
    (plays, tokens), calls = args.update, world.settings.max_calls
    if plays and rates:
        print(f"\nan update: up to {plays} plays x {calls} calls = {plays * calls} calls and "
              f"{plays * tokens:,} tokens; if all calls go to the slowest tool, about "
              f"{plays * calls / min(rates):.0f} s of waiting")
    world.close()
    return int("broken" in statuses)


def prompt(args):
    """Print the system prompt of a world, followed by --principles, and write it to --out."""
    text = system_prompt(args.system_prompt, read_settings(args.database))
    if args.principles:
        text += "\n\n" + Path(args.principles).read_text(encoding="utf-8").strip()
    write_text(args.out, text + "\n")
    print(text)


def command_flags(argv=None):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    words = "call each tool once; exit with status 1 if one is broken"
    add = commands.add_parser("check", help=words).add_argument
    add("--database", help="folder with tools.json (database/tools)")
    add("--update", type=int, nargs=2, default=(0, 0), metavar=("PLAYS", "TOKENS"),
        help="estimate the tools' time in an update of PLAYS plays with TOKENS tokens each")
    add = commands.add_parser("prompt", help="write the system prompt of a world").add_argument
    add("--database", required=True, help="folder with tools.json")
    add("--system-prompt", default="full", help="full, short, or a file")
    add("--principles", metavar="FILE", help="append this text: the principles of the reward, "
        "which toolstar.pairs --principles removes again")
    add("--out", required=True, help="file to write the prompt into")
    return p.parse_args(argv)


def main(argv=None):
    args = command_flags(argv)
    return run("toolstar.tools", check if args.command == "check" else prompt, args)


if __name__ == "__main__":
    sys.exit(main())
