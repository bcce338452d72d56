"""
Helpers of the tools world: they repair an episode while it is played, at a cost [1].

    (1) debug      after a failed program: a language model gets the program and its error, and its
                   repaired program runs in the same jail; the agent sees that program's result
    (2) rollback   after a failed program, once debug's budget is spent: the call is removed and the
                   agent tries again. In "turns" the whole reply is removed, in "tags" the last
                   sentence before the call and the call
    (3) refine     in a long conversation: the replies and results before the last reply are
                   rewritten as one shorter thought; the prompt, the last reply and its result stay
    (4) summarise  after a page was read: a summary of what helps replaces the best passages
    (5) rewrite    change the messages as (2) and (3) ask for; the prompt and the last result stay
    (6) tokens_again  the token ids of the changed messages. Nowhere else is a text of an episode
                   tokenised a second time

Helpers act only in evaluate.py; training and synthesis never call Tools.open_helpers. Budgets are
per episode. A failed attempt uses up one help, and the agent sees the same as without the helper.
"llm" is "policy", the model that plays, asked in its own engine (Questions), or URL=MODEL.

Reads   database/prompts; "helpers" of tools.json, whose keys --helpers of evaluate.py can change
Writes  "helped" in an episode's record: [{helper, turn, status, tokens, seconds}], where turn is
        the number of the reply, status is "ok" or the reason of the failure (for debug: the status
        of the repaired program), tokens counts question and answer, and dropped, if present,
        counts the tokens that were removed from the conversation (with an endpoint: unknown)
[1] Tool-Star, arXiv:2505.16410

    {"helpers": {"debug": 1, "rollback": 1, "refine": 1, "summarise": 0, "llm": "policy"}}
    python evaluate.py --env tools --helpers debug=1,refine=1 --model out/rl --tasks ...
"""
import re
import time
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Lock

import runtime
from evaluate import ChatError, chat, read_key, spoken
from runtime import Mistake
from sandbox import PROMPTS
from toolstar.text import truncate

NAMES = ("debug", "rollback", "refine", "summarise")
DEFAULTS = dict.fromkeys(NAMES, 0) | {
    "llm": "policy",  # or URL=MODEL
    "key": "",  # file of that endpoint's API key, beside tools.json
    "refine_at": 8192,  # refine a conversation of this many tokens or more [1]
    "reply": 2048}  # the most tokens of a helper's answer
FAILED = ("error", "timeout", "memory", "output", "killed")  # statuses of programs that failed
PAGE, TRIES = 20_000, 2  # characters of a page to summarise; retries of a failing endpoint
URL_MODEL = re.compile(r"(https?://[^/\s=]+[^\s=]*)=(\S+)")

# The text between the tags of a prompt comes from others; `fill` escapes tags in it.
DEBUG, REFINE, SUMMARISE = ((PROMPTS / f"{name}.txt").read_text(encoding="utf-8").strip()
                            for name in ("debug", "refine", "summarise"))
FORGED = re.compile("<(?=/?(?:program|error|question|work|query|page)>)")


def chosen_by(found, flag=""):
    """The settings of all helpers: DEFAULTS, changed by the setting "helpers" and then by the flag
    --helpers, such as debug=1,refine_at=320. A Mistake if a key or a value is wrong."""
    found = dict(found)
    for part in filter(None, flag.split(",")):
        key, _, value = part.partition("=")
        found[key] = int(value) if value.isdigit() else value
    for key, value in found.items():
        if key not in DEFAULTS or type(value) is not type(DEFAULTS[key]) or str(value)[:1] == "-":
            raise Mistake(f"helpers: {key}={value!r} is none of the settings {DEFAULTS}")
    chosen = DEFAULTS | found
    if chosen["llm"] != "policy" and not URL_MODEL.fullmatch(chosen["llm"]):
        raise Mistake("helpers: llm must be policy or like http://host:8000/v1=MODEL")
    return chosen


# ---------------------------------------------------------------- asking a language model

class Questions:
    """Questions from the threads of tools to the engine that plays. A thread waits for its answer.
    An answer is (text, tokens of question and answer, reason if there is no answer).
    """

    def __init__(self):
        self.lock, self.closed, self.queue, self.running = Lock(), False, deque(), {}
        self.numbers = count()

    def ask(self, text, seed, max_tokens):
        """Wait for the answer to a text. Only for threads of tools: the loop would block itself."""
        future = Future()
        with self.lock:
            if self.closed:
                return "", 0, "the play is over"
            self.queue.append((text, seed, max_tokens, future))
        return future.result()

    @contextmanager
    def join(self, engine, template, max_context, seed, temperature, top_p):
        """The engine for a player's loop (evaluate.play_vllm): each step() also takes up waiting
        questions and hands their answers to the threads. On leaving, no thread waits any more."""
        self.engine, self.template = engine, template
        self.max_context, self.seed = max_context, seed
        self.sampling = {"temperature": temperature, "top_p": top_p}
        try:
            yield self
        finally:
            self.close()

    def add_request(self, *request):
        self.engine.add_request(*request)

    def has_unfinished_requests(self):
        return bool(self.queue) or self.engine.has_unfinished_requests()

    def step(self):
        while self.queue:
            self.submit(*self.queue.popleft())
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        return [output for output in outputs if not self.take(output)]

    def submit(self, text, name, max_tokens, future):
        """Pass a question to the engine; one that is too long is answered at once."""
        number = f"ask {next(self.numbers)}"
        self.running[number] = future, 0  # now, so that close() finds it if anything fails
        text = self.template.forged.sub("‹", text)  # a page or a program may hold special tokens
        ids = self.template.prompt([{"role": "user", "content": text}])
        room = min(max_tokens, self.max_context - len(ids))
        if room < 1:
            self.running.pop(number)[0].set_result(("", 0, f"{len(ids)} tokens do not fit"))
            return
        self.running[number] = future, len(ids)
        runtime.add_request(self.engine, number, ids, self.template, (), f"{self.seed}/{name}",
                            max_tokens=room, **self.sampling)

    def take(self, output):
        """Whether an output answers a question; if so, its thread continues."""
        if output.request_id not in self.running:
            return False
        future, asked = self.running.pop(output.request_id)
        said = list(output.outputs[0].token_ids)
        text, closed = self.template.reply(said)
        future.set_result((text, asked + len(said), "" if closed else "cut"))
        return True

    def close(self):
        """Answer all waiting threads with nothing and refuse later questions, so that they end."""
        with self.lock:
            self.closed = True
        for future in [*(entry[-1] for entry in self.queue),
                       *(future for future, _ in self.running.values())]:
            future.set_result(("", 0, "the play is over"))


def asker(chosen, folder, questions, generate):
    """The function ask(text, seed, max_tokens) -> (answer, tokens of both, reason if none).

    chosen: of chosen_by; folder: the world's. questions: those to the policy's engine; generate: a
    function that asks the policy's endpoint. One of the two is None.
    """
    if chosen["llm"] != "policy":
        url, model = URL_MODEL.fullmatch(chosen["llm"]).groups()
        key = read_key(chosen["key"] and folder / chosen["key"])
        generate = partial(chat, url, model, temperature=0.0, retries=TRIES, api_key=key)
    return partial(ask_endpoint, generate) if generate else questions.ask


def ask_endpoint(generate, text, seed, max_tokens):
    """The answer of an endpoint, whose sampling is not seeded."""
    try:
        reply = generate([{"role": "user", "content": text}], max_tokens=max_tokens)
    except ChatError as error:
        return "", 0, str(error)
    return reply, reply.tokens, ""


def fill(form, **values):
    return form.format(**{key: FORGED.sub("‹", text) for key, text in values.items()})


def program_of(reply):
    """The program in a reply: the text between the first and the last fence, else all of it."""
    reply = spoken(reply)
    first, last = reply.find("```"), reply.rfind("```")
    if first == last:
        return reply.strip("`").strip()
    return reply[first + 3:last].partition("\n")[2].strip()


# ---------------------------------------------------------------- helpers

class Helpers:
    """The helpers of one episode. left: {helper: how often it may still act}.

    Runs in the thread of a tool, while nothing else uses the episode. The messages are changed
    later by `rewrite`, in the player's loop.
    """

    def __init__(self, ask, chosen, seed):
        self.ask, self.chosen, self.seed = ask, chosen, seed
        self.left = {name: self.chosen[name] for name in NAMES}

    def after_call(self, episode, observation):
        """The observation that the agent gets, after the helpers. observation: the tool's own."""
        call = episode.sandbox.calls[-1]
        if call["name"] == "Python" and call["status"] in FAILED and (
                isinstance(call["arguments"], dict)):  # with wrong arguments no program has run
            if self.left["debug"]:
                observation = self.debug(episode, call, observation)
            elif self.left["rollback"]:
                self.left["rollback"] -= 1
                episode.change = self.note(episode, "rollback", time.monotonic(), "ok", 0)
                return observation
        if call["name"] == "Browse" and call["status"] == "ok" and self.left["summarise"]:
            observation = self.summarise(episode, call, observation)
        long = (getattr(episode, "tokens", None) or 0) >= self.chosen["refine_at"]
        if long and self.left["refine"] and len(episode.messages) > 3:
            self.refine(episode)
        return observation

    def inquire(self, episode, helper, form, **values):
        """Ask one question -> (answer, tokens, status); status is "ok" if there is an answer."""
        self.left[helper] -= 1
        name = f"{self.seed}/{episode.turns}/{helper}"
        reply, tokens, why = self.ask(fill(form, **values), name, self.chosen["reply"])
        return reply, tokens, why or ("ok" if spoken(reply) else "empty")

    def note(self, episode, helper, began, status, tokens, **more):
        """Add an item to episode.helped, and return it."""
        item = {"helper": helper, "turn": replies(episode.messages), "status": status[:200],
                "tokens": tokens, "seconds": round(time.monotonic() - began, 4)} | more
        episode.helped.append(item)
        return item

    def debug(self, episode, call, observation):
        """(1) The output or error of the repaired program."""
        began, program = time.monotonic(), call["arguments"]["code"]
        reply, tokens, status = self.inquire(episode, "debug", DEBUG, program=program,
                                             error=observation)
        repaired = program_of(reply)
        if status == "ok" and not repaired:
            status = "empty"
        if status == "ok":
            status, text, _ = episode.sandbox.world.answer("Python", {"code": repaired})
            if status != "broken":
                text = episode.sandbox.shown(text)[0]
                call |= {"status": status, "empty": not text.strip()}
                observation = text if text.strip() else "(no output)"
        self.note(episode, "debug", began, status, tokens, program=program, repaired=repaired)
        return observation

    def refine(self, episode):
        """(3) Ask for a shorter form of the work before the last reply; finish() will insert it."""
        began, work = time.monotonic(), talk_of(episode.messages[2:-1])
        reply, tokens, status = self.inquire(episode, "refine", REFINE, work=work,
                                             question=episode.task["query"])
        text = episode.sandbox.shown(spoken(reply))[0]
        if status == "ok" and len(text) >= len(work):
            status = "longer"
        item = self.note(episode, "refine", began, status, tokens, text=text)
        if status == "ok":
            episode.change = item

    def summarise(self, episode, call, observation):
        """(4) A summary of what helps on a page, or its passages if there is no answer."""
        began, world = time.monotonic(), episode.sandbox.world
        url, query = call["arguments"]["url"], call["arguments"].get("query", "")
        status, page = world.browse(url, query, PAGE)
        if status != "ok":  # the passages came from the cache, and the page cannot be read now
            self.left["summarise"] -= 1
            self.note(episode, "summarise", began, page, 0)
            return observation
        reply, tokens, status = self.inquire(
            episode, "summarise", SUMMARISE, question=episode.task["query"], query=query,
            page=page, work=talk_of(episode.messages[2:]))
        self.note(episode, "summarise", began, status, tokens)
        told = truncate(episode.sandbox.shown(spoken(reply))[0], world.settings.page)
        return told if status == "ok" else observation


# ---------------------------------------------------------------- rewriting

def rolled_back(text):
    """The number of characters of a text that the backtracer keeps [1, its code].

    It drops the last <python> and the sentence or line before it; without a <python> it drops
    nothing. A </think> directly before the tag belongs to that sentence.
    """
    start = text.rfind("<python>")
    if start < 0:
        return len(text)
    before = text[:start].removesuffix("</think>").rstrip()
    sentence = before.rfind(". ")
    return max(before.rfind("\n") + 1, sentence + 2 if sentence >= 0 else 0)


def rewrite(episode):
    """Change an episode's messages by episode.rewritten, before the observation is added.

    Returns the helper's name, "rollback" or "refine".
    """
    messages, item = episode.messages, episode.rewritten
    last, calls = messages.pop()["content"], episode.sandbox.calls
    if item["helper"] == "rollback":
        # cut only the last reply, never the prompt or a result
        kept = last[:rolled_back(last)] if episode.tags else ""
        if kept:
            messages.append({"role": "assistant", "content": kept})
        calls[-1]["dropped"] = True
        return "rollback"
    text = item.pop("text")
    folded = (f"<think>{text}</think>\n{last}" if episode.tags or "<think>" not in last else
              last.replace("<think>", f"<think>{text}\n", 1))
    messages[2:] = [{"role": "assistant", "content": folded}]
    for call in calls[:-1]:
        call["dropped"] = True
    for each in episode.helped:
        each["turn"] = 1  # the one reply that is left
    return "refine"


def tokens_again(episode, ids, template):
    """The token ids of a rewritten episode. ids: those before; the helper's item in the record gets
    the number of ids that were dropped."""
    messages, item, episode.rewritten = episode.messages, episode.rewritten, None
    if item["helper"] == "refine":  # the last message does not count, it is the new result
        item["dropped"] = max(0, len(ids) - len(ids_of(messages[:-1], template)))
        return ids_of(messages, template)
    # the ids before the reply stay as they are
    kept = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    again = ids[:episode.prompt_tokens] + encode(kept[episode.begun:], template)
    if len(kept) < episode.begun:  # the cut is before the reply, in text that a rollback had kept
        again = ids_of(messages, template)
    item["dropped"] = max(0, len(ids) - len(again))
    return again


def encode(text, template):
    """Token ids of a text by the policy or a helper, with its special tokens escaped."""
    return template.encode(template.forged.sub("‹", text))


def ids_of(messages, template):
    """The token ids of messages, up to where the model speaks next.

    They are the ids that play has produced, unless a tokenizer has two ways to encode a text.
    """
    ids = template.prompt(messages[:2])
    for i, message in enumerate(messages[2:], 3):
        if message["role"] == "assistant":
            ids += encode(message["content"], template)
        else:
            ids += template.between(message, closed=messages[i - 2]["role"] != "assistant")
    return ids


def replies(messages):
    return sum(message["role"] == "assistant" for message in messages)


def talk_of(messages):
    return "\n".join(message["content"].strip() for message in messages)
