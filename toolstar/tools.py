"""
The tools world: one policy that searches, runs programs and browses while it reasons [1].

    (1) settings  read DATABASE/tools.json and check each key: tools, grammar, budget, limits
    (2) call      Search finds passages (retriever.py), Python runs a program in a jail (jail.py),
                  Browse reads a web page (browse.py); a process keeps the results of both
    (3) observe   a result is cut to size and its tags are escaped; a broken tool is counted apart
                  from a program that fails, and if tools break too often the run stops
    (4) judge     verdict.py scores the episode from the recorded calls, not from its text alone

There are two grammars. In "turns", ours, a reply holds a thought and either one JSON call or the
answer, and the result is the next message. In "tags", Tool-Star's, the whole episode is one
message: the engine stops after </search>, </python> or </browse>, and a <result> is appended. The
published checkpoints and data use "tags".
[1] Tool-Star, arXiv:2505.16410

Reads   DATABASE/tools.json and the corpus that it names

    python evaluate.py --env tools --tasks database/tools/questions.jsonl --check
    python evaluate.py --env tools --tasks database/tools/questions.jsonl --agent person
    torchrun --standalone grpo.py --env tools --database database/tools --tasks data/rl.jsonl
"""
import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace

from runtime import SHARE, Mistake, rank
from sandbox import PROMPTS, Action, Episode, Sandbox, parse
from toolstar import helpers, mathematics, verdict
from toolstar.browse import Browser, BrowserBroken, PageError
from toolstar.jail import Jail, Result, read_error
from toolstar.text import truncate

# the functions of the judge that programs outside of this repository call
math_equal, qa_metrics = mathematics.math_equal, verdict.qa_metrics
SETTINGS = {  # key of tools.json: default; a value must have its type
    "grammar": "turns",  # "turns" or "tags"
    "tools": ["Search", "Python", "Browse"],
    "max_calls": 6,  # per episode; the next call is refused, the one after ends the episode
    "retriever": "bm25",  # or an index folder, the URL of a server, the json of a web search
    "corpus": "corpus.jsonl",  # file of bm25's passages, beside tools.json
    "top_k": 5,  # passages per search
    "python": "jail",  # or the URL of a SandboxFusion server
    "workers": 0,  # programs that run at once; 0: one per core of a rank, at most 16
    "seconds": 5.0,  # time limit of a program
    "memory": 512,  # MiB per program
    "output": 400,  # characters of a program's output that are shown: its start and its end
    "allow": [],  # "host:port" of non-public servers that Browse may visit
    "page": 2000,  # characters of a page, or of a passage, that are shown
    "helpers": {},  # budgets per episode and the model that helps; only in evaluation
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
NEEDED = {"Search": ["query"], "Python": ["code"], "Browse": ["url"]}  # of these
EXAMPLES = {"Search": {"query": "the tallest tower"}, "Python": {"code": "print(6 * 7)"},
            "Browse": {"url": "http://127.0.0.1:9/"}}  # an error, as it must be; needs no network
TAGS = {"search": "Search", "python": "Python", "browse": "Browse"}
TAG_OF = {name: tag for tag, name in TAGS.items()}
# tags of the grammars and marks of chat templates, which a tool's result must not contain
FORGED = re.compile(r"<(?=[|｜]|/?(?:think|tool_call|tool_response|answer|result|search|python|"
                    r"browse)\b|/?(?:s|bos|eos|(?:start|end)_of_turn)>)|\[(?=/?INST\])")
MOST_BROKEN, OF_LAST = 10, 1000  # the run stops if more of so many calls were broken
KEPT = 2**14  # results of Search and Browse that a process keeps
UNANSWERED = "Error: the search engine does not answer this query ({}). Try other words."
NOT_AVAILABLE = "Error: Current tool {} is not available."  # also the text of injected failures
SHORT = {"turns": 'You answer questions with tools. Reply <think>...</think><tool_call>{"name": '
                  '..., "arguments": {...}}</tool_call> or <think>...</think><answer>...</answer>.',
         "tags": "You answer questions with <search>, <python> and <browse>. End with <answer>."}


# ---------------------------------------------------------------- settings

def read_settings(folder):
    """Read FOLDER/tools.json into a namespace, with defaults for missing keys. A Mistake names
    a key that is wrong."""
    path = Path(folder) / "tools.json"
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise Mistake(f"{path} must hold one JSON object: {error}") from None
    for key, value in found.items():
        if key not in SETTINGS:
            raise Mistake(f"{path}: unknown setting {key!r}; the settings are {list(SETTINGS)}")
        kind = type(SETTINGS[key])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise Mistake(f"{path}: {key} is {value!r:.80}, it must be {kind.__name__}")
        if kind in (int, float) and not value >= (0 if key in ("workers", "max_calls") else 0.1):
            raise Mistake(f"{path}: {key} is {value}, which is too small")
    chosen = SimpleNamespace(**SETTINGS | found, folder=Path(folder))
    if chosen.grammar not in ("turns", "tags"):
        raise Mistake(f"{path}: grammar must be turns or tags, not {chosen.grammar!r}")
    if chosen.python != "jail" and not chosen.python.startswith("http"):
        raise Mistake(f"{path}: python must be jail or http://..., not {chosen.python!r}")
    if not chosen.tools or not {*chosen.tools} <= DECLARED.keys():
        raise Mistake(f"{path}: tools must be some of {', '.join(DECLARED)}")
    chosen.helpers = helpers.chosen_by(chosen.helpers)
    return chosen


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
    parameters = {"type": "object", "required": NEEDED[name], "properties": fields}
    function = {"name": name, "description": what, "parameters": parameters}
    return json.dumps({"type": "function", "function": function})


def declare_tag(name):
    what, arguments = DECLARED[name]
    inside = "\n".join(text.lower() for text in arguments.values())
    return f"<{TAG_OF[name]}>{inside}</{TAG_OF[name]}> {what}"


# ---------------------------------------------------------------- grammars

# strict=False: a program in JSON may contain raw line breaks
parse_turn = partial(parse, load=partial(json.loads, strict=False))


def parse_tags(reply, stops=tuple(f"</{tag}>" for tag in TAGS)):
    """The Action of one segment of Tool-Star's message. Never raises; takes linear time.

    stops: the stop strings of the engine, which ends a reply at the first of them. Its last token
    may hold more, as "><" in Qwen's vocabulary, so what follows the stop string is not read.
    """
    if "<result>" in reply or "</result>" in reply:
        return Action("error", why="only the tools write results")
    ends = [reply.find(stop) + len(stop) for stop in stops if stop in reply]
    text = reply[:min(ends)] if ends else reply.rstrip()
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


# ---------------------------------------------------------------- tools

class Faults:
    """Counts calls whose tool was broken, and stops the run when they are too many: an agent that
    trains with broken tools learns not to use them, and nobody would notice."""

    def __init__(self):
        self.lock, self.last, self.most = threading.Lock(), deque(maxlen=OF_LAST), MOST_BROKEN

    def note(self, name, cause):
        """Count one call of the tool `name`. cause: why the tool broke, "" if it answered."""
        with self.lock:
            self.last.append(bool(cause))
            count = sum(self.last) if cause else 0
        if count > self.most:
            raise SystemExit(f"{name} has failed in {count} of the last {len(self.last)} calls: "
                             f"{cause}. Repair it, then repeat the command (training: --resume)")


class Remote:
    """Runs programs on a SandboxFusion server (POST /run_code), with the methods of a Jail."""
    level = "remote"

    def __init__(self, url, seconds):
        import httpx2

        from toolstar.retriever import post
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds, self.client = seconds, httpx2.Client(trust_env=False, timeout=seconds + 30)
        self.post = partial(post, self.client, self.url)

    def run(self, program, stdin="", seconds=None):
        body = {"code": program.encode("utf-8", "replace").decode(), "language": "python",
                "stdin": stdin, "run_timeout": seconds or self.seconds}
        for pause in 1, 4, 16, 64, 0:  # a server may restart
            try:
                reply = self.post(body)
                done = reply["run_result"]
                out, err = done["stdout"] or "", done["stderr"] or ""
                status, error = "ok", ""
                if done["status"] == "TimeLimitExceeded":
                    status = "timeout"
                elif reply["status"] != "Success":
                    status, error = read_error(done.get("return_code"), err)
                return Result(status, out, err, error, float(done.get("execution_time") or 0))
            except Exception as failure:  # httpx2's, or a reply of another form
                why = f"{self.url}: {failure!r}"
                time.sleep(pause)
        return Result("broken", "", "", why, 0.0)

    def close(self):
        self.client.close()


class ToolSandbox(Sandbox):
    """The tools of one episode. calls: a record of each call, from which verdict.py scores."""

    def __init__(self, world, failure_rate=0.0, seed=0):
        super().__init__(None, failure_rate, seed)
        self.world, self.tools, self.calls = world, frozenset(world.settings.tools), []

    def example(self, name):
        return dict.fromkeys(DECLARED[name][1], "") | EXAMPLES[name]

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

    def __init__(self, task, sandbox, max_turns, prompt):
        settings = sandbox.world.settings
        self.tags, stops = settings.grammar == "tags", sandbox.world.stops
        self.most, self.refused = settings.max_calls, False
        # helpers: None in training. helped: items for the record. change: the item with which the
        # next finish() rewrites the messages. rewritten: the item with which the last one did
        self.helpers, self.helped, self.change, self.rewritten = None, [], None, None
        super().__init__(task, sandbox, max_turns, prompt,
                         parse=partial(parse_tags, stops=stops) if self.tags else parse_turn)

    def begin(self, reply):
        self.tokens = getattr(reply, "tokens", None)  # of the conversation, if an endpoint says so
        self.begun = 0  # characters of the reply that existed before: of a hint or after a rollback
        if not self.stop and self.messages[-1]["role"] == "assistant":
            self.begun = len(self.messages[-1]["content"])
            reply = self.messages.pop()["content"] + reply
        self.strict = self.strict or self.tags  # one message has no place for an error's feedback
        action = super().begin(reply)
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
        if self.rewritten and helpers.rewrite(self) == "rollback":
            return observation  # the rollback has removed the call, so its result is dropped
        if not self.tags:
            return super().finish(observation)
        self.messages.append({"role": "result", "content": f" <result>\n{observation}\n</result>"})
        return observation

    def fork(self, seed):
        twin = super().fork(seed)
        twin.sandbox.calls = list(self.sandbox.calls)
        return twin

    def tokens_again(self, ids, template):
        """The token ids of the messages after a helper has rewritten them.

        ids: the token ids before that, without the observation.
        """
        return helpers.tokens_again(self, ids, template)

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

    rewards, slow = verdict.REWARDS, True
    judges = 8  # mathematics is compared in other processes
    reward = staticmethod(verdict.reward_of)

    def __init__(self, settings):
        self.settings, self.faults = settings, Faults()
        self.stops = tuple(f"</{TAG_OF[name]}>" for name in settings.tools
                           if settings.grammar == "tags")
        self.lock, self.retriever, self.kept = threading.Lock(), None, {}
        self.jail = self.browser = self.ask = None
        chosen = json.dumps([getattr(settings, key) for key in ANSWERING])
        self.hash = hashlib.sha256(chosen.encode()).hexdigest()[:12]
        self.logged = verdict.LOGGED + ("cached", "tool_seconds")
        if "Search" in settings.tools:
            self.find_corpus()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = settings.workers or max(1, min(16, len(os.sched_getaffinity(0)) // ranks))
        if "Python" in settings.tools and settings.python == "jail":
            self.jail = Jail(workers, seconds=settings.seconds, memory=settings.memory)
        elif "Python" in settings.tools:
            self.jail = Remote(settings.python, settings.seconds)
        if "Browse" in settings.tools:
            jail = Jail(workers, ("trafilatura",), output=2**22)
            self.browser = Browser(jail, settings.allow, passages=settings.page)
        self.level = self.jail.level if self.jail else "off"  # or jailed, remote

    def find_corpus(self):
        """Check the retriever's files, or send its server one query, before anything is spent."""
        from toolstar.retriever import HTTP, find_retriever, open_retriever

        chosen, corpus = self.settings.retriever, self.settings.folder / self.settings.corpus
        if chosen != "bm25" and not chosen.startswith(HTTP):
            chosen = str(self.settings.folder / chosen)
        find_retriever(chosen, corpus)
        if chosen.startswith(HTTP) or chosen.endswith(".json"):
            hits = open_retriever(chosen, tries=1).search(["a"], 1)[0]
            if isinstance(hits, ConnectionError):
                raise Mistake(f"the setting retriever: {hits}")
        # the first search opens it: bm25s imports numba, after which vLLM 0.32.0 does not start
        self.open_search = partial(open_retriever, chosen, corpus)

    def close(self):
        """Stop the workers and close the files."""
        for held in self.jail, self.browser and self.browser.jail, self.browser:
            if held:
                held.close()

    def load_task(self, row):
        """A task {id, query, golds, check, needs?, family?}; a Mistake names what is wrong."""
        golds, needs = row.get("golds"), row.get("needs") or []
        if not isinstance(row.get("query"), str) or row.get("check") not in ("math", "qa"):
            raise Mistake(f"a task needs a 'query' and a 'check', math or qa: {str(row)[:80]}")
        if not (isinstance(golds, list) and golds and all(isinstance(g, str) for g in golds)):
            raise Mistake(f"'golds' must be a list of right answers, not {golds!r:.60}")
        if not (isinstance(needs, list) and all(need in TAG_OF.values() for need in needs)):
            raise Mistake(f"'needs' must be some of {list(TAGS)}, not {needs!r:.60}")
        return row | {"id": str(row["id"])}

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
        vLLM, and the player must answer the questions in the Questions that this returns.
        """
        questions = None if generate else helpers.Questions()
        if any(map(self.settings.helpers.get, helpers.NAMES)):
            self.ask = helpers.asker(self.settings.helpers, self.settings.folder, questions,
                                     generate)
        return questions

    def lines(self, row):
        """The lines that this world adds to evaluate.py's table: TE, success where a tool was used
        [1]; what the helpers did; success and use of the needed tools, by family of tasks.

        row: the record of a judged episode."""
        task, success = row["task"], row["score"]["success"]
        told = {"TE": success} if row["calls"] else {}
        for item in row.get("helped", ()):
            told[f"{item['helper']} helped"] = item["status"] == "ok"
        if "family" not in task:
            return told
        used = {call["name"].lower() for call in row.get("tools", ())}
        needs = set(task.get("needs") or ())
        return told | {f"success, {task['family']}": success,
                       f"tools as needed, {task['family']}": used >= needs if needs else not used}

    def verdict(self, episode):
        """(answer, score, strict success) of an episode that has ended.

        Strict success: the answer is right, the format is kept (in "tags" as the released code
        checks it), and no tool was broken.
        """
        calls, stop = episode.sandbox.calls, episode.stop
        said = as_tags(episode.messages, episode.tags)
        kept = not episode.tags or verdict.released_format(said)
        whole = stop == "answer" and kept and not episode.errors  # --lenient lets errors pass
        score = verdict.score(episode.task, episode.answer or "", calls, whole, said)
        score["tool_seconds"] = sum((call["seconds"] for call in calls), 0.0)
        score["cached"] = sum(call["cached"] for call in calls) / max(1, len(calls))
        if episode.helpers:
            score["helpers"] = len(episode.helped)
            score["helpers' tokens"] = sum(item["tokens"] for item in episode.helped)
        broken = any(call["status"] == "broken" for call in calls)
        return episode.answer, score, score["success"] * (whole and not broken)

    # ------------------------------------------------------------ calls

    def answer(self, name, arguments):
        """(status, text, whether the result was kept from an earlier call) of a call.

        status: "ok"; "error", "timeout", "memory", "output" or "killed" if the agent's call or
        program is at fault; "broken" if the tool is; "refused" if the search engine answers other
        queries, but not this one.
        """
        wrong = check_arguments(name, arguments)
        if wrong:
            return "error", wrong, False
        key = name, *sorted(arguments.items())
        if found := self.kept.get(key):
            return *found, True
        status, text = getattr(self, name.lower())(**arguments)
        self.faults.note(name, text if status == "broken" else "")
        if status == "broken":
            return status, NOT_AVAILABLE.format(name), False
        if status == "ok" and name != "Python" and len(self.kept) < KEPT:
            self.kept[key] = status, text
        return status, text, False

    def search(self, query):
        from toolstar.retriever import QueryError

        with self.lock:
            self.retriever = self.retriever or self.open_search()
        hits = self.retriever.search([query], self.settings.top_k)[0]
        if isinstance(hits, QueryError):
            return "refused", UNANSWERED.format(hits)
        if isinstance(hits, ConnectionError):
            return "broken", str(hits)
        texts = [hit["document"]["contents"].strip()[:self.settings.page] for hit in hits]
        return "ok", "\n".join(f"Doc {i} {text}" for i, text in enumerate(texts, 1))

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
        try:
            return "ok", self.browser.read(url, query, passages)
        except PageError as error:
            return "error", f"Error: {error}"
        except BrowserBroken as error:
            return "broken", str(error)


def check_arguments(name, arguments):
    """An error message on a call's arguments, "" if they are right."""
    wanted = DECLARED[name][1]
    whole = isinstance(arguments, dict) and {*NEEDED[name]} <= arguments.keys() <= wanted.keys()
    if not whole or not all(isinstance(value, str) for value in arguments.values()):
        return f"Error: {name} takes texts: {', '.join(wanted)}."
    empty = [key for key in NEEDED[name] if not arguments[key].strip()]
    return f"Error: {name} needs a {empty[0]}." if empty else ""


def flags(parser):
    """The world's own flags, in addition to those of a stage."""
    add = parser.add_argument
    add("--database", metavar="FOLDER", help="folder with tools.json; database/tools by default")
    add("--system-prompt", default="full", metavar="NAME",
        help="full, short, or a file; evaluate a checkpoint with the prompt of its training")
    add("--failure-rate", type=SHARE, default=0.0,
        help="probability that a tool call is made to fail")
    add("--helpers", default="", metavar="NAME=N,..", help="in evaluation: how often an "
        "episode may be helped by debug, rollback, refine, summarise (toolstar/helpers.py)")


def open_world(args):
    """The world of args.database, a folder with tools.json; database/tools by default."""
    folder = args.database or Path(__file__).resolve().parent.parent / "database" / "tools"
    settings = read_settings(folder)
    settings.helpers = helpers.chosen_by(settings.helpers, getattr(args, "helpers", ""))
    world = Tools(settings)
    if getattr(args, "check", False):  # of evaluate.py: one broken tool ends it
        world.faults.most = 0
    if rank() == 0 and parent_process() is None:
        chosen = {key: getattr(settings, key) for key in SETTINGS}
        print(f"tools {world.hash}, Python {world.level}: {json.dumps(chosen)}")
    return world
