"""A world of sums, which shows that the stages work with a second world: --env tests/calculator.py
"""
from runtime import Mistake
from sandbox import Episode

PROMPT = ('You add with the tool Add(a, b). Reply <think>...</think><tool_call>{"name": "Add", '
          '"arguments": {"a": 1, "b": 2}}</tool_call> or <think>...</think><answer>3</answer>.')


class Adder:
    """One tool, for one episode."""
    tools = ("Add",)

    def __init__(self, seed):
        self.seed = seed

    def call(self, name, arguments):
        try:
            return str(arguments["a"] + arguments["b"])
        except (TypeError, KeyError):
            return "Error: Add takes two numbers, a and b."


class Calculator:
    rewards = ("talk", "success")
    logged = ("success", "called", "words")
    stops = ()
    slow = False

    def load_task(self, row):
        if not isinstance(row.get("sum"), int):
            raise Mistake("'sum' must be a whole number")
        return row

    def episode(self, task, seed, args):
        return Episode(task, Adder(seed), args.max_turns, PROMPT)

    def verdict(self, episode):
        said = " ".join(m["content"] for m in episode.messages if m["role"] == "assistant")
        right = float(episode.answer == str(episode.task["sum"]))
        called = float(episode.calls > 0)
        score = {"success": right, "called": called, "words": min(1.0, len(said.split()) / 99)}
        return episode.answer, score, right * called

    def reward(self, score, name):
        return score["success"] if name == "success" else score["words"]

    def close(self):
        print("calculator: closed")


def open_world(args):
    return Calculator()
