"""
A world made of a plain class, as TRL's environment_factory takes it: --env my_env.py:MyEnv

    class MyEnv:
        def reset(self, **row):         # a row of --tasks; may return the first observation
        def guess(self, number: int):   # public methods are the tools; their docstrings and type
            '''Guess a number.          # hints become the schemas that the model reads

            Args:
                number: Your guess.
            '''
        def get_reward(self):           # a number; 1 or more counts as success. Or with the answer,
                                        # None if there is none: get_reward(self, answer)
        def close(self):                # optional
        @staticmethod
        def solver(**row):              # optional: yields the replies of an exact solver

The model reads the row's "query" or "prompt", then what reset() returns. A prompt is a text or, as
TRL has it, messages: a user's, and perhaps a system message, which goes before ours. A method may
be async. A tool returns a text or a number, and may end the episode by self.done = True. The tools
run in threads, one environment per episode. A tool reports a model's mistake by a ValueError,
LookupError or ArithmeticError, whose text the model reads; any other exception is a slip in the
class, and ends the program with its traceback.
"""
import asyncio
import copy
import inspect
import json
import sys
import traceback
from functools import lru_cache
from numbers import Number
from threading import Thread

from pydantic import ValidationError, validate_call

from runtime import Mistake, import_file
from sandbox import Episode

PROMPT = """\
Think first, then call one tool or answer. Reply in one of two forms and write nothing else:
<think>...</think><tool_call>{"name": "...", "arguments": {...}}</tool_call>
<think>...</think><answer>...</answer>

<tools>
%s
</tools>"""
NO_TOOLS = ("reset", "get_reward", "close", "solver")
EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
told = set()  # the errors whose traceback was printed
checked = lru_cache(None)(validate_call)  # a function that first checks arguments by its type hints


def as_text(name, said):
    """What a method has told the model."""
    if isinstance(said, (str, Number)):
        return str(said)
    raise TypeError(f"{name}() returned {said!r:.80}, which is neither a text nor a number")


class Methods:
    """The public methods of one environment, as the tools of an Episode."""

    def __init__(self, env, loop):
        self.env, self.loop = env, loop
        self.methods = {name: method for name, method in inspect.getmembers(env, inspect.ismethod)
                        if name[0] != "_" and name not in NO_TOOLS}
        self.tools = frozenset(self.methods)

    def settled(self, value):
        """What a method has returned or, of an async method, what it returns at its end."""
        async def wait():
            return await value

        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()
        return value

    def call(self, name, arguments):
        """The observation of a call. The text of an exception that reports a model's mistake may
        be that of a slip in the method, so the first of each kind is also printed."""
        if not isinstance(arguments, dict):
            return "Error: the arguments of a tool call are a JSON object"
        try:
            method = self.methods[name]
            said = self.settled(checked(method.__func__)(method.__self__, **arguments))
            return as_text(name, said)
        except ValidationError as error:
            return "Error: " + "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
                                         for one in error.errors())
        except (ValueError, LookupError, ArithmeticError) as error:
            kind = name, type(error), traceback.extract_tb(error.__traceback__)[-1].lineno
            if kind not in told:
                told.add(kind)
                print(f"{name} raised, for {arguments}:", traceback.format_exc(), file=sys.stderr)
            return f"Error: {error}"

    def schema(self, name):
        """What the model reads about a tool."""
        from transformers.utils import get_json_schema

        return get_json_schema(self.methods[name])

    def example(self, name):
        """Arguments of the right types, for evaluate.py --check."""
        hints = self.schema(name)["function"]["parameters"]["properties"]
        return {key: hint.get("enum", [EXAMPLES.get(str(hint.get("type")), "a")])[0]
                for key, hint in hints.items()}

    def __copy__(self):
        raise Mistake(f"{type(self.env).__name__} cannot be copied in the middle of an episode, "
                      "which arpo.py needs to fork: train it with grpo.py")


class PlainEpisode(Episode):
    """An episode that ends where its environment is done, and closes it when it is recorded."""

    def finish(self, observation):
        if "done" not in self.sandbox.tools and getattr(self.sandbox.env, "done", False):
            self.stop = "done"
        return super().finish(observation)

    def record(self, model=""):
        self.sandbox.settled(getattr(self.sandbox.env, "close", lambda: None)())
        return super().record(model)


def open_world(args):
    """The world of --env FILE.py:CLASS."""
    file, _, name = args.env.partition(":")
    factory = getattr(import_file(file), name, None)
    if factory is None:
        raise Mistake(f"--env {args.env}: {file} has no class {name}")
    return PlainWorld(factory)


def asked_of(task):
    """(system message, query) of a row, each "" if it has none."""
    asked = task.get("query") or task.get("prompt") or ""
    if isinstance(asked, str):
        return "", asked
    said = [(message["role"], message["content"]) for message in asked]
    roles, texts = zip(*said, strict=True)
    if roles not in (("user",), ("system", "user")) or not all(isinstance(t, str) for t in texts):
        raise Mistake(f"task {task['id']}: 'prompt' is a text, or the messages of a user or of a "
                      f"system and a user, each with a text; here they are of {', '.join(roles)}")
    return texts[0] if len(texts) == 2 else "", texts[-1]


class PlainWorld:
    """The world of an environment class (docs/environment.md)."""

    rewards, logged, stops, slow = ("reward",), ("success", "reward"), (), True

    def __init__(self, factory):
        missing = [name for name in ("reset", "get_reward") if not hasattr(factory, name)]
        if missing:
            raise Mistake(f"{factory.__name__} has no method {missing[0]}(): its methods are those "
                          "of adapters/plain.py. Of a gymnasium environment, make step() a tool "
                          "that returns the observation and keeps the reward for get_reward()")
        self.factory = factory
        if hasattr(factory, "solver"):
            self.solver = lambda task: factory.solver(**task)
        # one event loop for all episodes, so that a connection may outlive the call that opened it
        self.loop = asyncio.new_event_loop()
        Thread(target=self.loop.run_forever, daemon=True).start()

    def load_task(self, row):
        return row | {"id": str(row["id"])}

    def episode(self, task, seed, args):
        methods = Methods(self.factory(), self.loop)
        system, asked = asked_of(task)
        first = methods.settled(methods.env.reset(**copy.deepcopy(task)))
        first = "" if first is None else as_text("reset", first)
        query = "\n".join(filter(None, (asked, first)))
        if not query:
            raise Mistake(f"task {task['id']} has no 'query', and reset() returned no text")
        schemas = "\n".join(json.dumps(methods.schema(name)) for name in methods.methods)
        episode = PlainEpisode({"query": query}, methods, args.max_turns,
                               "\n\n".join(filter(None, (system, PROMPT % schemas))))
        episode.task = task  # recorded as it was loaded
        return episode

    def verdict(self, episode):
        get_reward = episode.sandbox.env.get_reward
        asks = "answer" in inspect.signature(get_reward).parameters
        reward = get_reward(answer=episode.answer) if asks else get_reward()
        reward = float(episode.sandbox.settled(reward))
        success = float(reward >= 1)
        return episode.answer, {"success": success, "reward": reward}, success

    def reward(self, score, name):
        return score["reward"]

    def close(self):
        """Each episode closes its own environment."""
