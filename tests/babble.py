"""A test world in which any reply is valid, so that its episodes do not depend on a model: --env
FILE

A task {"id", "query", "turns", "success"} takes `turns` replies, of which the last is the answer.
Rewards rise with the digits in the replies; only plays with equal texts have equal rewards. With
SLOW=FOLDER the tool is slow and runs in threads, and FOLDER shows which ranks called it.
"""
import os
import random
import string
import time
import zlib

from sandbox import Action, Episode

SLOW = os.environ.get("SLOW")
# longer than two of the engine's cache blocks (32 tokens each on a CPU), so that all plays share
# cached blocks, and those of an update must not be seen in the next one
PROMPT = "Say digits. " + " ".join(f"After {i} there is {i + 1}, and after that {i + 2}."
                                   for i in range(6))


class Echo:
    """The only tool, for one episode."""
    tools = ("Echo",)

    def __init__(self, seed):
        self.seed = seed

    def call(self, name, arguments):
        if SLOW:
            time.sleep(random.random() / 20)
            with open(os.path.join(SLOW, os.environ["RANK"]), "a") as file:
                file.write("called\n")
        return f"You said {len(arguments)} characters."


class Chat(Episode):
    """An episode whose last reply is the answer; all other replies are calls."""

    def begin(self, reply):
        last = self.turns + 1 == self.task["turns"]
        self.parse = answer if last else call  # functions that a checkpoint can name
        return super().begin(reply)


def answer(reply):
    return Action("answer", text=reply)


def call(reply):
    return Action("call", "Echo", reply)


class Babble:
    rewards = ("digits", "apart")
    logged = ("success", "digits")
    stops = tuple(string.ascii_letters)  # one of them, or the end token, comes soon
    slow = bool(SLOW)

    def load_task(self, row):
        return row

    def episode(self, task, seed, args):
        return Chat(task, Echo(seed), args.max_turns, PROMPT)

    def verdict(self, episode):
        said = "/".join(m["content"] for m in episode.messages if m["role"] == "assistant")
        digits = [int(c) for c in said if c in string.digits] or [0]
        answered = episode.answer is not None
        score = {"success": episode.task["success"], "digits": answered * sum(digits) / len(digits),
                 "apart": zlib.crc32(said.encode()) / 2**32}
        return episode.answer, score, 0.0

    def reward(self, score, name):
        return score["apart"] / 100 + score["digits"] / 9 * (name == "digits")

    def close(self):
        print("babble: closed")


def open_world(args):
    return Babble()
