"""
Draw the pictures of docs/why.md from real plays, as --microscope writes them.

    python -m look.pictures out/grpo/microscope/00001.jsonl out/arpo/microscope/00001.jsonl
"""
import sys
from itertools import groupby

from runtime import read_jsonl

PROMPT, RESULT, GOOD, BAD = "#d9d9d9", "#a6bddb", "#41ab5d", "#ef6548"


def bar(axis, y, play, begin=0, left=0):
    """A play from token `begin` on: prompt, tool results, and the policy's replies."""
    at = 0
    for policy, run in groupby(play["mask"]):
        n = len(list(run))
        color = (GOOD if play["advantage"] > 0 else BAD) if policy else RESULT if at else PROMPT
        start = max(at, begin)
        axis.barh(y, max(0, at + n - start), left=left + start, color=color, height=0.7)
        at += n


def group(axis, plays):
    for y, play in enumerate(plays):
        bar(axis, y, play)
        axis.text(len(play["mask"]) + 8, y, va="center", fontsize=8, s="r = {:.2f}   A = {:+.2f}"
                  .format(play["reward"], play["advantage"]))


def mask(axis, plays, rows=14, width=110):
    play = plays[0]
    pairs = list(zip(play["tokens"], play["mask"], strict=True))[play["mask"].index(1) - 12:]
    letters = [(letter, policy) for text, policy in pairs for letter in text.replace("\n", " ")]
    for i, (letter, policy) in enumerate(letters[:rows * width]):
        axis.text(i % width / width, -(i // width), letter, family="monospace", fontsize=7,
                  color=GOOD if policy else "#999999", weight="bold" if policy else "normal")
    axis.set_ylim(-rows, 1)


def packed(axis, plays):
    at = 0
    for play in plays[:4]:
        bar(axis, 1, play, left=at)
        axis.plot([at, at + len(play["mask"])], [-1, 0.4], color="black")  # positions
        at += len(play["mask"])


def forks(axis, plays):
    rows = {play["name"]: y for y, play in enumerate(plays)}
    for y, play in enumerate(plays):
        bar(axis, y, play, begin=play["shared"])
        if play["parent"]:
            axis.plot([play["shared"]] * 2, [rows[play["parent"]], y], color="black")


if __name__ == "__main__":
    import matplotlib.pyplot as plt

    grpo, arpo = sys.argv[1:]
    for draw, path, height in ((group, grpo, 2.6), (mask, grpo, 3), (packed, grpo, 1.3),
                               (forks, arpo, 2.6)):
        queries = [list(plays) for _, plays in groupby(read_jsonl(path), lambda row: row["query"])]
        figure, axis = plt.subplots(figsize=(8.4, height), layout="constrained")
        # the query whose plays differ most, or fork most
        draw(axis, max(queries, key=lambda plays: len({(p["reward"], p["shared"]) for p in plays})))
        axis.axis("off")
        figure.savefig(f"docs/{draw.__name__}.png", dpi=120)
