"""
Conformance kit: which objective does a trainer compute? Needs Python, numpy and cases.json only.

    python variants/conform.py FILE.py:FUNCTION     # a row for each objective
    python variants/conform.py --make               # write cases.json anew

FUNCTION(case) -> (loss, gradient), or None for an objective that the trainer does not have. The
gradient is that of the loss with respect to case["logps"], in its shape. docs/conform.md describes
the case, has the equation of each objective, and shows what TRL and verl compute.

A row says "equal" if loss and gradient are right to 1e-5 of their size. If not, it gives the factor
and the cosine between the gradient and the right one, and the departures from the objective that
give exactly this loss and gradient. The exit status is 1 if a row departs.
"""
import argparse
import json
import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

CASES = Path(__file__).with_name("cases.json")
OVERLENGTH = ("turns", "context")
TOLERANCE, MOST, WIDTH = 1e-5, 6, 30  # MOST departures at a time; the WIDTH nearest are kept
SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.1, "cap": 1.5, "length": 32}

# What can differ between two objectives; GRPO's choice of each
GRPO = {"center": "group", "std": "group", "ddof": 0, "eps": 1e-6, "stats": "all", "sign": 1,
        "overlength": "out", "turns": "out", "cut": "in", "uniform": "in", "norm": "group",
        "ratio": "token", "old": "engine", "cap": "no", "clip": "stated", "kl": "no",
        "tokens": "mask", "shared": "each"}
OBJECTIVES = {  # docs/conform.md has their equations
    "grpo": {}, "grpo-batch": {"norm": "batch"}, "dapo": {"norm": "batch", "uniform": "out"},
    "dr-grpo": {"std": "no", "norm": "length"}, "rloo": {"center": "others", "std": "no"},
    "gspo": {"ratio": "play", "norm": "play of group"}, "cispo": {"clip": "stop"},
    "kl": {"kl": "k3"}, "recompute": {"old": "old", "cap": "yes"},
    "on-policy-distillation": {"center": "teacher", "std": "no"}, "arpo": {}}
DEPARTURES = {
    "std with ddof 1": {"ddof": 1},
    "std + 1e-4": {"eps": 1e-4},
    "advantages not divided by the std": {"std": "no"},
    "advantages divided by the std of the group": {"std": "group"},
    "std of the batch": {"std": "batch"},
    "mean and std of the batch": {"center": "batch", "std": "batch"},
    "baseline is the mean of the other plays": {"center": "others"},
    "baseline is the mean of the group": {"center": "group"},
    "overlength plays left out of mean and std": {"stats": "kept"},
    "overlength plays kept in the denominator": {"overlength": "counted"},
    "overlength plays trained on": {"overlength": "in"},
    "plays stopped by the turn limit trained on": {"turns": "in"},
    "plays with a cut reply left out": {"cut": "out"},
    "left out is what has no end token": {"turns": "in", "cut": "out"},
    "left out, but kept in the denominator, is what has no end token":
        {"turns": "in", "cut": "counted", "overlength": "counted"},
    "groups of equal reward left out of the denominator": {"uniform": "out"},
    "groups of equal reward kept in the denominator": {"uniform": "in"},
    "divided by the tokens of each group": {"norm": "group"},
    "divided by the tokens of the batch": {"norm": "batch"},
    "mean over the tokens of each play, then over plays": {"norm": "play"},
    "mean over the tokens of each play, then over its group": {"norm": "play of group"},
    "sum over the tokens of each play, then mean over plays": {"norm": "sum of play"},
    "divided by a constant length": {"norm": "length"},
    "ratio of the whole play": {"ratio": "play"},
    "ratio of each token": {"ratio": "token"},
    "pi_old is the policy itself": {"old": "logps"},
    "pi_old is the trainer's": {"old": "old"},
    "pi_old is the engine's": {"old": "engine"},
    "no weight for the engine's gap": {"cap": "no"},
    "the engine's gap is not capped": {"cap": "uncapped"},
    "clip sides swapped": {"clip": "swapped"},
    "no clip": {"clip": "no"},
    "clip by the lower bound on both sides": {"clip": "symmetric"},
    "w at most 3 where the advantage is negative (dual clip)": {"clip": "dual"},
    "clip without stop-gradient": {"clip": "stated"},
    "w bounded below, too": {"clip": "stop both"},
    "no KL": {"kl": "no"},
    "KL of the other side": {"kl": "k3 reverse"},
    "KL subtracted": {"kl": "negative"},
    "KL by k1": {"kl": "k1"},
    "KL by k2": {"kl": "k2"},
    "KL times w": {"kl": "k3 w"},
    "mask shifted to the right": {"tokens": "right"},
    "mask shifted to the left": {"tokens": "left"},
    "observations trained on": {"tokens": "all"},
    "shared tokens counted once": {"shared": "once"},
    "sign of the loss": {"sign": -1}}


# ---------------------------------------------------------------------------------- the objectives

def compute(case, choices):
    """The loss of a case and its gradient (plays, tokens), by hand, in float64."""
    c, o = SimpleNamespace(**case), SimpleNamespace(**GRPO | choices)
    groups = [c.group == g for g in np.unique(c.group)]
    over, cut = np.isin(c.stop, OVERLENGTH), c.stop == "format"
    long = over & ~((c.stop == "turns") & (o.turns == "in"))
    in_stats = ~over if o.stats == "kept" else np.full(len(over), True)
    advantage = advantages(c, o, groups, in_stats)

    mask = {"mask": c.mask, "left": np.roll(c.mask, -1, 1), "right": np.roll(c.mask, 1, 1),
            "all": np.arange(c.mask.shape[1]) >= c.mask.argmax(1)[:, None]}[o.tokens] * c.real
    if o.shared == "once":
        mask = mask * (np.arange(mask.shape[1]) >= c.shared[:, None])
    trained, counted = np.full((2, len(over)), True)  # plays in the sum, and in its denominator
    for plays, choice in (long, o.overlength), (cut, o.cut):
        trained[plays] &= choice == "in"
        counted[plays] &= choice != "out"
    if o.uniform == "out":
        for g in groups:
            counted[g] &= np.ptp(c.reward[g]) > 0
    weight = mask * (trained * weights(mask.sum(1), counted, groups, o.norm, c.length))[:, None]

    old = getattr(c, o.old)
    gap = (c.logps - old) * mask
    if o.ratio == "play":
        gap = gap.sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1) * mask
    w = np.exp(gap)
    value, slope = surrogate(w, advantage, c.logps, o.clip, c)
    if o.cap != "no":
        of_engine = np.exp(c.old - c.engine).clip(max=np.inf if o.cap == "uncapped" else c.cap)
        value, slope = value * of_engine, slope * of_engine
    distance, kl_slope = kl(c.logps, c.reference, o.kl, w)
    return (o.sign * (weight * (c.beta * distance - value)).sum(),
            o.sign * weight * (c.beta * kl_slope - slope))


def advantages(c, o, groups, in_stats):
    """(plays, 1), or (plays, tokens) from a teacher."""
    if o.center == "teacher":
        return c.teacher - c.engine
    found = np.zeros(len(c.reward))
    for g in groups:
        of_group, of_batch = c.reward[g & in_stats], c.reward[in_stats]
        if not len(of_group):
            continue
        center = (of_batch if o.center == "batch" else of_group).mean()
        found[g] = c.reward[g] - center
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


def surrogate(w, a, logps, clip, c):
    """What the loss lowers, and its derivative by the log-probability."""
    low, high = {"swapped": (c.clip_high, c.clip_low), "symmetric": (c.clip_low, c.clip_low),
                 "no": (np.inf, np.inf)}.get(clip, (c.clip_low, c.clip_high))
    if clip.startswith("stop"):
        bounded = w.clip(1 - low if clip == "stop both" else 0, 1 + high)
        return bounded * a * logps, bounded * a
    value = np.minimum(w * a, w.clip(1 - low, 1 + high) * a)
    value = np.where(a < 0, np.maximum(value, 3 * a), value) if clip == "dual" else value
    return value, np.where(np.isclose(value, w * a, rtol=1e-13), w * a, 0)


def kl(logps, reference, kind, w):
    """An estimate of the distance to the reference, and its derivative by the log-probability."""
    gap = reference - logps
    return {"no": (0 * gap, 0 * gap), "k1": (-gap, 0 * gap + 1), "k2": (gap**2 / 2, -gap),
            "k3": (np.exp(gap) - gap - 1, 1 - np.exp(gap)),
            "k3 w": (w * (np.exp(gap) - gap - 1), -w * gap),
            "negative": (gap + 1 - np.exp(gap), np.exp(gap) - 1),
            "k3 reverse": (np.exp(-gap) + gap - 1, np.exp(-gap) - 1)}[kind]


# --------------------------------------------------------------------------------------- the cases

# group, reward, stop, place of the first token under the weights of now, parent, tokens in common
# with it; and the tokens: p prompt, a policy's, o observation
PLAYS = """
0 1.0 answer  0 - 0  ppaaaooaaa
0 0.0 answer  0 - 0  ppaaooaa
0 0.5 format  0 - 0  ppaaaaaaa
1 1.0 answer  6 - 0  pppaaooaaa
1 0.0 context 7 - 0  pppaaaooaaaooaaaa
1 0.0 answer  0 - 0  pppaa
2 1.0 answer  0 - 0  ppaaa
2 1.0 answer  0 - 0  ppaaooaaa
2 1.0 answer  0 - 0  ppaaaoaa
3 1.0 turns   0 - 0  ppaaoaaoaa
3 0.0 context 0 - 0  ppaaaaaaaaaaaaa
3 0.0 turns   0 - 0  ppaaaoaaoaaa
4 0.2 answer  5 - 0  ppaaaooaa
4 0.9 turns   0 - 0  ppaaoaaoaaoaa
4 0.7 answer  0 - 0  ppa
5 0.0 answer  6 - 0  pppaaaooaaoa
5 0.3 answer  4 - 0  pppa
5 1.0 answer  0 - 0  pppaaaaaooaaaa
6 0.0 answer  0 - 0  pppaoooaoa
6 1.0 format  0 - 0  pppaaaooaaaa
6 0.0 answer  0 - 0  pppaaooaaa
7 1.0 answer  0 - 0  pppaaaooaaooaaa
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


def rounded(values):
    return [float(f"{value:.12g}") + 0.0 for value in values]  # no -0


def make():
    """Write cases.json."""
    draw, plays = random.Random(0), []
    for line in PLAYS.split("\n")[1:-1]:
        group, reward, stop, fresh, parent, shared, kinds = line.split()
        fresh, shared = int(fresh), int(shared)
        ids = [draw.randrange(10) for _ in kinds]
        for end in re.finditer("a+", kinds):  # 10 ends a reply, unless it was cut
            if end.end() < len(kinds) or stop in ("answer", "turns"):
                ids[end.end() - 1] = 10
        if parent != "-":
            ids[:shared] = plays[int(parent)]["ids"][:shared]
        elif plays and plays[-1]["group"] == int(group):
            ids[:kinds.index("a")] = plays[-1]["ids"][:kinds.index("a")]  # a group has one prompt
        tables = {name: log_probabilities(ids, *model) for name, model in MODELS.items()}
        tables["engine"][:fresh] = tables.pop("earlier")[:fresh]
        mask = [int(kind == "a") for kind in kinds]
        tables["engine"] *= mask
        plays.append({"group": int(group), "reward": float(reward), "stop": stop, "fresh": fresh,
                      "parent": None if parent == "-" else int(parent), "shared": shared,
                      "ids": ids, "mask": mask} | {k: rounded(v) for k, v in tables.items()})
    cases = {"about": "Described in docs/conform.md, made by: python variants/conform.py --make",
             "settings": SETTINGS, "plays": plays, "objectives": {}}
    for name, choices in OBJECTIVES.items():
        groups = range(8 if name == "arpo" else 7)
        cases["objectives"][name] = {"groups": [*groups]}
        case = read(cases, name)
        loss, gradient = compute(case, choices)
        cases["objectives"][name] |= {"loss": rounded([loss])[0], "gradient": [
            rounded(row[:n]) for row, n in zip(gradient + 0.0, case["real"].sum(1), strict=True)]}
    text = re.sub(r"\[([^][]*)\]", lambda m: f"[{' '.join(m[1].split())}]",
                  json.dumps(cases, indent=1))
    CASES.write_text(text.replace(".0,", ",").replace(".0]", "]") + "\n")


def read(cases, objective):
    """cases.json -> the case of an objective, with the lists of its plays padded with zeros."""
    expected = cases["objectives"][objective]
    plays = [play for play in cases["plays"] if play["group"] in expected["groups"]]
    case = {"objective": objective} | cases["settings"]
    for key in plays[0]:
        column = [play[key] for play in plays]
        case[key] = padded(column) if isinstance(column[0], list) else np.array(column)
    return case | {"real": padded([[1] * len(play["ids"]) for play in plays])}


def padded(lists):
    width = max(map(len, lists))
    return np.array([[*values, *[0] * (width - len(values))] for values in lists])


# -------------------------------------------------------------------------------------- the verdict

def far(found, expected):
    """How far a loss and its gradient are from others, relative to their size."""
    (loss, gradient), (right, slope) = found, expected
    return max(np.linalg.norm(gradient - slope) / np.linalg.norm(slope),
               abs(loss - right) / max(abs(right), np.linalg.norm(slope)))


def explain(found, case, choices):
    """The fewest departures that give this loss and gradient -> their names, or ""."""
    nearest = [((), choices)]
    without = {key for key in ("kl", "cap") if choices[key] == "no"}
    for _ in range(MOST):
        tried = {}
        for names, made in nearest:
            for name, change in DEPARTURES.items():
                if not without & {*change} and all(
                        change[key] != made[key] == choices[key] for key in change):
                    new = made | change
                    tried[frozenset([*names, name])] = (
                        far(compute(case, new), found), (*names, name), new)
        ranked = sorted(tried.values(), key=lambda t: t[0])
        if equal := [" + ".join(name for name in DEPARTURES if name in names)
                     for gap, names, _ in ranked if gap < TOLERANCE]:
            return " OR ".join(equal)
        nearest = [(names, made) for _, names, made in ranked[:WIDTH]]
    return ""


def judge(function, cases, objective):
    """One row: (verdict, factor, cosine); the last two are None unless the gradient is another."""
    case, expected = read(cases, objective), cases["objectives"][objective]
    if (answer := function(read(cases, objective))) is None:
        return "not offered", None, None
    found = float(answer[0]), np.asarray(answer[1], dtype=float)
    right = expected["loss"], padded(expected["gradient"])
    if found[1].shape != right[1].shape:
        raise ValueError(f"{objective}: the gradient has the shape {found[1].shape}, and "
                         f"case['logps'] has {right[1].shape}")
    if far(found, right) < TOLERANCE:
        return "equal", None, None
    if not np.linalg.norm(found[1]) > 0:
        return "the gradient is 0 or not a number", 0.0, 0.0
    size, dot = np.linalg.norm(right[1]), (found[1] * right[1]).sum()
    factor, cosine = dot / size**2, dot / size / np.linalg.norm(found[1])
    verdict = explain(found, case, GRPO | OBJECTIVES[objective])
    if not verdict and far((right[0], found[1]), right) < TOLERANCE:
        verdict = "the gradient is equal, the loss is another number"
    if not verdict and cosine > 1 - TOLERANCE**2:
        verdict = "the right gradient times this factor"
    return verdict or "unknown departure", factor, cosine


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("function", nargs="?", metavar="FILE.py:FUNCTION")
    p.add_argument("--only", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES),
                   metavar="NAME", help=f"some of the objectives: {', '.join(OBJECTIVES)}")
    p.add_argument("--make", action="store_true", help="write cases.json anew")
    args = p.parse_args()
    if args.make:
        return make()
    file, _, name = (args.function or "").rpartition(":")
    if not file:
        p.error("which function? FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(file).resolve().parent))
    function, cases = runpy.run_path(file)[name], json.loads(CASES.read_text())
    print(f"{'objective':24}{'factor':>9}{'cosine':>9}  verdict")
    departs = False
    for objective in args.only:
        verdict, *numbers = judge(function, cases, objective)
        departs |= verdict not in ("equal", "not offered")
        cells = "".join(f"{'' if x is None else format(x, '.4f'):>9}" for x in numbers)
        print(f"{objective:24}{cells}  {verdict}", flush=True)
    sys.exit(departs)


if __name__ == "__main__":
    main()
