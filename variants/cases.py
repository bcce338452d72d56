"""
The objectives of the conformance kit by hand, in numpy, and the plays on which it compares them.

    python variants/cases.py     # write cases.json anew

docs/conform.md has the equation of each objective and says what the file holds. Nothing here is
shared with the stages.
"""
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

CASES = Path(__file__).with_name("cases.json")
SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.1, "cap": 1.5, "length": 32}

# What can differ, with GRPO's choice (None: no such term). DEPARTURES in conform.py is in words
GRPO = {"center": "group", "std": "group", "ddof": 0, "eps": 1e-6, "stats": "all", "sign": 1,
        "overlength": "out", "turns": "out", "cut": "in", "uniform": "in", "norm": "group",
        "ratio": "token", "old": "engine", "cap": None, "clip": "stated", "kl": None,
        "tokens": "mask", "shared": "each"}
OBJECTIVES = {name: GRPO | choices for name, choices in {
    "grpo": {}, "grpo-batch": {"norm": "batch"}, "dapo": {"norm": "batch", "uniform": "out"},
    "dr-grpo": {"std": "no", "norm": "length"}, "rloo": {"center": "others", "std": "no"},
    "gspo": {"ratio": "play", "norm": "play of group"}, "cispo": {"clip": "stop"},
    "kl": {"kl": "k3"}, "recompute": {"old": "old", "cap": "stated"},
    "on-policy-distillation": {"center": "teacher", "std": "no"}, "arpo": {}}.items()}


# ---------------------------------------------------------------------------------- the objectives

def compute(case, choices):
    """The loss of a case and its gradient with respect to case["logps"], (plays, tokens)."""
    c, o = SimpleNamespace(**case), SimpleNamespace(**choices)
    groups = [c.group == g for g in np.unique(c.group)]
    fates = {"answer": "in", "format": o.cut, "context": o.overlength,
             "turns": "in" if o.turns == "in" else o.overlength}
    fate = np.array([fates[stop] for stop in c.stop])
    counted = fate != "out"  # plays that are in the denominator
    if o.uniform == "out":
        for g in groups:
            counted[g] &= np.ptp(c.reward[g]) > 0

    place = np.arange(c.mask.shape[1])
    mask = {"mask": c.mask, "left": np.roll(c.mask, -1, 1), "right": np.roll(c.mask, 1, 1),
            "all": place >= c.mask.argmax(1)[:, None]}[o.tokens] * c.real
    if o.shared == "once":
        mask = mask * (place >= c.shared[:, None])
    per_token = (fate == "in") * weights(mask.sum(1), counted, groups, o.norm, c.length)
    weight = mask * per_token[:, None]

    gap = (c.logps - getattr(c, o.old)) * mask
    if o.ratio == "play":
        gap = gap.sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1) * mask
    w = np.exp(gap)
    value, slope = surrogate(w, advantages(c, o, groups), c, o.clip)
    if o.cap:
        of_engine = np.exp(c.old - c.engine).clip(max=c.cap if o.cap == "stated" else np.inf)
        value, slope = value * of_engine, slope * of_engine
    distance, kl_slope = kl(c.reference - c.logps, w, o.kl)
    return (o.sign * (weight * (c.beta * distance - value)).sum(),
            o.sign * weight * (c.beta * kl_slope - slope))


def advantages(c, o, groups):
    """(plays, 1), or (plays, tokens) from a teacher."""
    if o.center == "teacher":
        return c.teacher - c.engine
    in_stats = (o.stats == "all") | ~np.isin(c.stop, ["turns", "context"])
    found = np.zeros(len(c.reward))
    for g in groups:
        of_group, of_batch = c.reward[g & in_stats], c.reward[in_stats]
        if not len(of_group):
            continue
        found[g] = c.reward[g] - (of_batch if o.center == "batch" else of_group).mean()
        if o.center == "others":
            found[g] *= len(of_group) / max(1, len(of_group) - 1)
        if o.std != "no" and len(of_group) > o.ddof:
            found[g] /= (of_group if o.std == "group" else of_batch).std(ddof=o.ddof) + o.eps
    return found[:, None]


def weights(n, counted, groups, norm, length):
    """1 / denominator of each play's tokens, of which it has n: (plays,)"""
    counted, found = counted & (n > 0), np.zeros(len(n))
    useful = [g for g in groups if (g & counted).any()]
    for g in useful:
        found[g] = {"group": 1 / n[g & counted].sum() / len(useful),
                    "batch": 1 / n[counted].sum(),
                    "play": 1 / n[g].clip(1) / counted.sum(),
                    "play of group": 1 / n[g].clip(1) / (g & counted).sum() / len(useful),
                    "sum of play": 1 / counted.sum(),
                    "length": 1 / length / len(n)}[norm]
    return found


def surrogate(w, a, c, clip):
    """What the loss lowers, and its derivative by the log-probability."""
    low, high = {"swapped": (c.clip_high, c.clip_low), "symmetric": (c.clip_low, c.clip_low),
                 "no": (np.inf, np.inf)}.get(clip, (c.clip_low, c.clip_high))
    if clip.startswith("stop"):
        bounded = w.clip(1 - low if clip == "stop both" else 0, 1 + high)
        return bounded * a * c.logps, bounded * a
    value = np.minimum(w * a, w.clip(1 - low, 1 + high) * a)
    value = np.where(a < 0, np.maximum(value, 3 * a), value) if clip == "dual" else value
    return value, np.where(np.isclose(value, w * a, rtol=1e-13), w * a, 0)


def kl(gap, w, kind):
    """An estimate of the distance to the reference, and its derivative. gap: log (pi_ref / pi)"""
    return {None: (0 * gap, 0 * gap), "k1": (-gap, 0 * gap + 1), "k2": (gap**2 / 2, -gap),
            "k3": (np.exp(gap) - gap - 1, 1 - np.exp(gap)),
            "k3 w": (w * (np.exp(gap) - gap - 1), -w * gap),
            "negative": (gap + 1 - np.exp(gap), np.exp(gap) - 1),
            "k3 reverse": (np.exp(-gap) + gap - 1, np.exp(-gap) - 1)}[kind]


# --------------------------------------------------------------------------------------- the plays

# group, reward, stop, place of the first token under the weights of now, parent, tokens in common
# with it; and the tokens: p prompt, a policy's, o observation
PLAYS = """
0 1.0 answer  0 -1 0 ppaaaooaaa
0 0.0 answer  0 -1 0 ppaaooaa
0 0.5 format  0 -1 0 ppaaaaaaa
1 1.0 answer  6 -1 0 pppaaooaaa
1 0.0 context 7 -1 0 pppaaaooaaaooaaaa
1 0.0 answer  0 -1 0 pppaa
2 1.0 answer  0 -1 0 ppaaa
2 1.0 answer  0 -1 0 ppaaooaaa
2 1.0 answer  0 -1 0 ppaaaoaa
3 1.0 turns   0 -1 0 ppaaoaaoaa
3 0.0 context 0 -1 0 ppaaaaaaaaaaaaa
3 0.0 turns   0 -1 0 ppaaaoaaoaaa
4 0.2 answer  5 -1 0 ppaaaooaa
4 0.9 turns   0 -1 0 ppaaoaaoaaoaa
4 0.7 answer  0 -1 0 ppa
5 0.0 answer  6 -1 0 pppaaaooaaoa
5 0.3 answer  4 -1 0 pppa
5 1.0 answer  0 -1 0 pppaaaaaooaaaa
6 0.0 answer  0 -1 0 pppaoooaoa
6 1.0 format  0 -1 0 pppaaaooaaaa
6 0.0 answer  0 -1 0 pppaaooaaa
7 1.0 answer  0 -1 0 pppaaaooaaooaaa
7 0.0 answer  0 21 8 pppaaaooaaa
7 0.2 answer  0 21 8 pppaaaooaaoa
"""
# scale and shift of each policy's formula
MODELS = {"logps": (2.0, 0.0), "engine": (2.0, 0.25), "earlier": (2.2, 0.9), "old": (2.0, -0.2),
          "reference": (1.5, 0.6), "teacher": (2.5, -0.8)}


def log_probabilities(ids, scale, shift):
    """The model: logit of token v at place t after token u = scale sin(v + 0.7 u + 0.3 t + shift)
    -> log-probability of each token; 0 for the first."""
    t = np.arange(1, len(ids))[:, None]
    logits = scale * np.sin(np.arange(11) + 0.7 * np.array(ids[:-1])[:, None] + 0.3 * t + shift)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return np.concatenate([[0], logits[t[:, 0] - 1, ids[1:]]])


def make():
    """Write cases.json."""
    draw, plays = random.Random(0), []
    for line in PLAYS.strip().splitlines():
        group, reward, stop, fresh, parent, shared, kinds = line.split()
        group, fresh, parent, shared = map(int, (group, fresh, parent, shared))
        ids = [draw.randrange(10) for _ in kinds]
        for end in re.finditer("a+", kinds):  # 10 ends a reply, unless it was cut
            if end.end() < len(kinds) or stop in ("answer", "turns"):
                ids[end.end() - 1] = 10
        if parent >= 0:
            ids[:shared] = plays[parent]["ids"][:shared]
        elif plays and plays[-1]["group"] == group:
            ids[:kinds.index("a")] = plays[-1]["ids"][:kinds.index("a")]  # a group has one prompt
        tables = {name: log_probabilities(ids, *model) for name, model in MODELS.items()}
        tables["engine"][:fresh] = tables.pop("earlier")[:fresh]
        mask = [int(kind == "a") for kind in kinds]
        tables["engine"] *= mask
        plays.append({"group": group, "reward": float(reward), "stop": stop, "fresh": fresh,
                      "parent": parent, "shared": shared, "ids": ids, "mask": mask}
                     | {name: rounded(table) for name, table in tables.items()})
    cases = {"about": "Described in docs/conform.md, made by: python variants/cases.py",
             "settings": SETTINGS, "plays": plays, "objectives": {}}
    for name, choices in OBJECTIVES.items():
        cases["objectives"][name] = {"groups": [*range(8 if name == "arpo" else 7)]}
        case = read(cases, name)
        loss, gradient = compute(case, choices)
        rows = zip(rounded(gradient), case["real"].sum(1), strict=True)
        cases["objectives"][name] |= {"loss": rounded(loss), "gradient": [r[:n] for r, n in rows]}
    CASES.write_text(re.sub(r"\[([^][]*)\]", lambda m: f"[{' '.join(m[1].split())}]",
                            json.dumps(cases, indent=1)) + "\n")


def rounded(values):
    return (np.round(values, 12) + 0.0).tolist()  # no -0


def read(cases, objective):
    """cases.json -> the case of an objective, with the lists of its plays padded with zeros."""
    groups = cases["objectives"][objective]["groups"]
    plays = [play for play in cases["plays"] if play["group"] in groups]
    case = {"objective": objective} | cases["settings"]
    for key in plays[0]:
        column = [play[key] for play in plays]
        case[key] = padded(column) if isinstance(column[0], list) else np.array(column)
    return case | {"real": padded([[1] * len(play["ids"]) for play in plays])}


def padded(lists):
    width = max(map(len, lists))
    return np.array([[*values, *[0] * (width - len(values))] for values in lists])


if __name__ == "__main__":
    make()
