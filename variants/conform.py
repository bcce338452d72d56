"""
Conformance kit: which objective does a trainer compute? Copy conform.py, cases.py and cases.json;
they need numpy.

    python variants/conform.py FILE.py:FUNCTION     # a row for each objective

FUNCTION(case) -> (loss, gradient), or None for an objective that the trainer does not have. The
gradient is that of the loss with respect to case["logps"], in its shape. docs/conform.md describes
the case, has the equation of each objective, and shows what TRL and verl compute.

A row says "equal" if loss and gradient are right to 1e-5 of their size. If not, it gives the factor
and the cosine between the gradient and the right one, and the departures from the objective that
give exactly this loss and gradient. The exit status is 1 if a row departs.
"""
import argparse
import json
import runpy
import sys
from pathlib import Path

import numpy as np
from cases import CASES, OBJECTIVES, compute, padded, read

TOLERANCE, MOST, WIDTH = 1e-5, 6, 30  # MOST departures at a time; the WIDTH nearest are kept
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
    "no weight for the engine's gap": {"cap": None},
    "the engine's gap is not capped": {"cap": "uncapped"},
    "clip sides swapped": {"clip": "swapped"},
    "no clip": {"clip": "no"},
    "clip by the lower bound on both sides": {"clip": "symmetric"},
    "w at most 3 where the advantage is negative (dual clip)": {"clip": "dual"},
    "clip without stop-gradient": {"clip": "stated"},
    "w bounded below, too": {"clip": "stop both"},
    "no KL": {"kl": None},
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


def far(found, expected):
    """How far a loss and its gradient are from others, relative to their size."""
    (loss, gradient), (right, slope) = found, expected
    return max(np.linalg.norm(gradient - slope) / np.linalg.norm(slope),
               abs(loss - right) / max(abs(right), np.linalg.norm(slope)))


def explain(found, case, choices):
    """The fewest departures that give this loss and gradient -> their names, or ""."""
    usable = {name: change for name, change in DEPARTURES.items()
              if all(choices[key] not in (None, value) for key, value in change.items())}
    nearest = [()]
    for _ in range(MOST):
        larger = {tuple(name for name in usable if name in (*names, more))
                  for names in nearest for more in usable if more not in names}
        gaps = {}
        for names in sorted(larger):
            changes = [change for name in names for change in usable[name].items()]
            if len(dict(changes)) == len(changes):  # else two of them change the same
                gaps[names] = far(compute(case, choices | dict(changes)), found)
        nearest = sorted(gaps, key=gaps.get)[:WIDTH]
        if equal := [" + ".join(names) for names in nearest if gaps[names] < TOLERANCE]:
            return " OR ".join(equal)
    return ""


def judge(function, cases, objective):
    """One row: (verdict, factor, cosine); the last two are None unless the gradient is another."""
    case, expected = read(cases, objective), cases["objectives"][objective]
    if (answer := function(read(cases, objective))) is None:
        return "not offered", None, None
    loss, gradient = float(answer[0]), np.asarray(answer[1], dtype=float)
    right = expected["loss"], padded(expected["gradient"])
    if gradient.shape != right[1].shape:
        raise ValueError(f"{objective}: the gradient has the shape {gradient.shape}, and "
                         f"case['logps'] has {right[1].shape}")
    if far((loss, gradient), right) < TOLERANCE:
        return "equal", None, None
    size, norm = np.linalg.norm(right[1]), np.linalg.norm(gradient)
    if not norm > 0:
        return "the gradient is 0 or not a number", 0.0, 0.0
    factor = (gradient * right[1]).sum() / size**2
    cosine = factor * size / norm
    verdict = explain((loss, gradient), case, OBJECTIVES[objective])
    if not verdict and far((right[0], gradient), right) < TOLERANCE:
        verdict = "the gradient is equal, the loss is another number"
    if not verdict and cosine > 1 - TOLERANCE**2:
        verdict = "the right gradient times this factor"
    return verdict or "unknown departure", factor, cosine


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("function", metavar="FILE.py:FUNCTION")
    p.add_argument("--only", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES),
                   metavar="NAME", help=f"some of the objectives: {', '.join(OBJECTIVES)}")
    args = p.parse_args()
    file, _, name = args.function.rpartition(":")
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
