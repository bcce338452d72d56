"""
What an episode with tools is judged by: answers, the rewards of Tool-Star [1], and its hack gauge.

    (1) answer   what the last <answer> holds, its box opened; without one, the last box
    (2) right    mathematics is judged as mathematics (mathematics.py), questions by exact match;
                 the best over all aliases counts
    (3) score    a dict of numbers: success, F1, calls that worked, the reference's own reward
    (4) reward   of one of the kinds below, from the score alone

    strict     -1 for a broken format or a cut episode, else accuracy (mathematics: right or not,
               questions: F1); + 0.1 where accuracy is at least 0.9 and Search and Python each
               gave something, in a call that was no repetition
    paper      the same, but + 0.1 for any accuracy above 0 and any call of both [1, section 3]
    needed     strict, but + 0.1 only for the two tools that the task needs, and - 0.05 for every
               call of a kind that it does not need; where needs are unknown, strict
    released   what the released code does, bit for bit: token F1 for every task, + 0.1 for the
               closing tags of both tools anywhere in the text
    answer     accuracy alone, the ablation of [1]

released - strict is what a policy can gain by looking right: its mean is the log's `gap`.
The text of a model is hostile: nothing here raises for it, and nothing runs it.

Reads and writes nothing.   [1] Tool-Star, arXiv:2505.16410

    python -c "from toolstar import verdict; print(verdict.reward('...', ['42'], 'released'))"
"""
import re
from collections import Counter

from toolstar.files import golds_of
from toolstar.mathematics import is_mathematics, math_equal
from toolstar.text import normalize, same_text, token_f1, untexted, words_f1

KINDS = ("strict", "paper", "released", "needed", "answer")
PARTS = ("success", "f1", "em", "format_ok", "python", "search", "browse", "both", "errors",
         "decorative", "gap")  # whose means are logged
END, BONUS, UNNEEDED = "<|im_end|>", 0.1, 0.05
HEADER = "<|im_start|>assistant\n"  # where the reference ends a response
ENOUGH = 0.9  # accuracy that earns the strict bonus
ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


# ---------------------------------------------------------------- answers

def last_box(text):
    r"""The last \boxed{...} or \fbox{...} of a text, braces matched; None if there is none.

    As the reference: a `\boxed ` with a blank anywhere takes what follows the last of them, up to
    a dollar sign.
    """
    if "\\boxed " in text:
        return "\\boxed " + text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if brace[0] == "}" and depth == 0:
            return text[start:start + brace.end()]
    return None


def open_box(box):
    r"""What a box holds, as the reference opens it; None for what it cannot open (\fbox too)."""
    if box is None:
        return None
    if "\\boxed " in box:
        return box.removeprefix("\\boxed ") if box.startswith("\\boxed ") else None
    if box.startswith("\\boxed{") and box.endswith("}"):
        return box.removeprefix("\\boxed{")[:-1]
    return None


def answer_of(text):
    """The answer in a text: of the last <answer>, box opened; else of the last box; else None."""
    answers = ANSWER.findall(text)
    if answers:
        return bare(answers[-1])
    return unboxed(text)


def bare(answer):
    """An answer without its box and the blanks around it."""
    opened = unboxed(answer)
    return answer.strip() if opened is None else opened


def unboxed(text):
    r"""What the last box of a text holds: \boxed{x}, \boxed {x}, \fbox{x} or \boxed x; or None."""
    text = re.sub(r"\\boxed\s+\{", r"\\boxed{", text).replace("\\fbox{", "\\boxed{")
    opened = open_box(last_box(text))
    return None if opened is None else opened.strip()


# ---------------------------------------------------------------- questions

def qa_metrics(prediction, golds):
    """{"em", "f1", "acc"} in [0, 1], each the best over all golds; acc: a gold is contained.

    prediction: a text, or None for no answer. The reference's evaluator keeps the last gold's.
    """
    said = normalize(prediction or "")
    rows = [normalize(gold) for gold in golds_of(golds)]
    return {
        "em": float(said in rows),
        "f1": max((words_f1(said, gold) for gold in rows), default=0.0),
        "acc": float(any(gold in said for gold in rows)),
    }


# ---------------------------------------------------------------- the released reward

def released_format(text):
    """Is this response's format right, as the reference sees it? -> bool"""
    thoughts, answers = text.count("<think>"), text.count("<answer>")
    if thoughts == 0 or thoughts != text.count("</think>"):
        return False
    if answers != 1 or text.count("</answer>") != 1:
        return False
    if not (calls_are_answered(text, "search") and calls_are_answered(text, "python")):
        return False
    # nothing if </answer> comes first
    answer = text[text.index("<answer>"):text.index("</answer>")]
    return "\\boxed{" in answer and "}" in answer


def calls_are_answered(text, name):
    """Has every opening tag its closing tag and a result, in this order?

    The walk goes on behind each result, so that a doubled opening passes, and one result may
    serve a search and a program.
    """
    start = text.find(f"<{name}>")
    while start >= 0:
        close, result = text.find(f"</{name}>", start), text.find("<result>", start)
        end = text.find("</result>", max(result, 0))
        if min(close, result, end) < 0 or not close < result < end:
            return False
        start = text.find(f"<{name}>", end)
    return True


def released(text, golds, end=END):
    """The reward of the released code: -1, or the best F1, + 0.1 if both tools' tags occur.

    text: the response. It is read up to the next assistant header, as the reference reads it.
    Golds that are no texts make the reference raise; here they are read as text.
    """
    text = text.partition(HEADER)[0]
    if not released_format(text):
        return -1.0
    if text.endswith(end):
        text = text[:-len(end)] if end else ""  # a slice up to -0 leaves nothing
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    answer = open_box(last_box(found[1])) if found else None
    if answer is None:
        return -1.0
    best = token_f1(answer, golds)
    both = "</search>" in text and "</python>" in text
    return best + BONUS if best > 0 and both else best


# ---------------------------------------------------------------- score and rewards

def is_right(answer, task):
    """Does this answer hit a gold of the task, by the task's check? -> bool"""
    equal = math_equal if task["check"] == "math" else same_text
    return any(equal(answer, gold) for gold in task["golds"])


def score(task, answer, calls, format_ok, cut, tags_text):
    """What an episode is worth, as numbers whose means can be logged: shares are float, counts int.

    task: golds (list of text), check ("math" or "qa"), needs (tools in lower case; may be missing).
    answer: text or None. calls: records {name, status, empty, repeated} of what the environment
    ran, the policy's own claims are none. cut: did a limit end the episode? tags_text: the
    episode in the tags grammar, which the released reward reads.
    """
    said = bare(answer or "")
    if task["check"] == "qa":
        said = untexted(said).strip()
    right = bool(said) and is_right(said, task)
    metrics = qa_metrics(said, task["golds"]) if said else dict.fromkeys(("em", "f1", "acc"), 0.0)
    graded = token_f1(said, task["golds"]) if task["check"] == "qa" else 0.0
    row = {
        "success": float(right),
        "em": metrics["em"],
        "f1": metrics["f1"],
        "acc": max(graded, float(right)),  # the evaluators' F1 would pay "yes no" for a yes
        "format_ok": float(bool(format_ok)),
        "cut": float(bool(cut)),
        "released": released(tags_text, task["golds"]),
        **count_calls(calls, task.get("needs")),
    }
    row["gap"] = row["released"] - reward_of(row, "strict")
    return row


def count_calls(calls, needs):
    """The part of a score that tells of calls. needs: the tools a task needs; None: unknown."""
    names = [call["name"].lower() for call in calls]
    done = [call["status"] == "ok" for call in calls]
    worked = Counter(name for name, ok in zip(names, done, strict=True) if ok)
    gave = {name for name, ok, call in zip(names, done, calls, strict=True)
            if ok and not call["empty"] and not call["repeated"]}
    unneeded = 0 if needs is None else sum(name not in needs for name in names)
    return {
        "errors": done.count(False),
        **{name: worked[name] for name in ("python", "search", "browse")},
        "both": float({"search", "python"} <= worked.keys()),
        "called": float({"search", "python"} <= {*names}),  # whatever came of it
        "earned": float({"search", "python"} <= gave),
        "needs_known": float(needs is not None),
        "needed": float(needs is not None and len({*needs}) >= 2 and {*needs} <= gave),
        "unneeded": unneeded,
        "decorative": float(unneeded > 0),
    }


def reward_of(score, kind):
    """The reward of one of KINDS for a score."""
    if kind not in KINDS:
        raise ValueError(f"--reward {kind}: there are {', '.join(KINDS)}")
    if kind == "released":
        return score["released"]
    accuracy = score["acc"]
    if kind == "answer":
        return accuracy
    if score["cut"] or not score["format_ok"]:
        return -1.0
    if kind == "paper":
        return accuracy + BONUS * (accuracy > 0 and score["called"])
    if kind == "strict" or not score["needs_known"]:
        return accuracy + BONUS * (accuracy >= ENOUGH and score["earned"])
    return accuracy + BONUS * (accuracy >= ENOUGH and score["needed"]) \
        - UNNEEDED * score["unneeded"]


def reward(text, golds, kind, check=None):
    """The reward of a response alone, for the kinds that need no record of calls.

    kind: "released", "paper" or "answer". check: "math" or "qa"; None: mathematics where every
    gold is mathematics. `paper` takes tags outside of results for calls.
    """
    if kind not in ("released", "paper", "answer"):
        raise ValueError(f"a text alone has no reward {kind!r}: released, paper or answer")
    text = text or ""
    if kind == "released":
        return released(text, golds)
    golds = golds_of(golds)
    check = check or ("math" if golds and all(map(is_mathematics, golds)) else "qa")
    said = without_results(text)
    calls = [{"name": name, "status": "ok", "empty": False, "repeated": False}
             for name in ("search", "python") if f"<{name}>" in said and f"</{name}>" in said]
    row = score({"golds": golds, "check": check}, answer_of(text), calls, released_format(text),
                False, text)
    return reward_of(row, kind)


def without_results(text):
    """What the policy said of a text: its results are left out."""
    said, at, start = [], 0, text.find("<result>")
    while start >= 0 and (end := text.find("</result>", start)) >= 0:
        said.append(text[at:start])
        at = end + len("</result>")
        start = text.find("<result>", at)
    return "".join(said) + text[at:]
