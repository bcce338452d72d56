"""
Judge episodes of the tools world: find the answer, score it, and pay one of five rewards [1].

    (1) answer   the content of the last <answer>, without its \\boxed{}; else of the last \\boxed{}
    (2) right    mathematics.py compares mathematics, other questions need an exact match; an
                 answer is right if it matches any of the golds
    (3) score    a dict of numbers: success, F1, working calls, the released reward
    (4) reward   a number computed from the score alone, by one of these kinds:

    strict     -1 for a broken format or an episode that was cut off, else accuracy (mathematics: 0
               or 1, questions: F1); + 0.1 if accuracy is at least 0.9 and both Search and Python
               returned something in a call that was not a repetition
    paper      like strict, but + 0.1 for any accuracy above 0 and any call of both [1, section 3]
    needed     like strict, but + 0.1 only if the task needs several tools and all of them gave
               something, and - 0.05 for each call of a tool that it does not need; if the needs are
               unknown, strict
    released   what Tool-Star's released code computes, bit for bit: token F1 for every task, + 0.1
               if the closing tags of both tools occur anywhere in the text
    answer     accuracy alone, the ablation of [1]

released - strict is what a policy can gain without being right; the log shows its mean as `gap`.
`undecided` is 1 for a play whose answer reached a limit of mathematics.py: it is not right.
The text of a model may be hostile: nothing here raises because of it, and nothing executes it.

Reads and writes nothing.   [1] Tool-Star, arXiv:2505.16410

    python -c "from toolstar import verdict; print(verdict.released('...', ['42']))"
"""
import re
from collections import Counter

from runtime import Mistake
from toolstar.mathematics import math_equal
from toolstar.text import golds_of, normalize, same_text, token_f1, untexted, words_f1

REWARDS = ("strict", "paper", "released", "needed", "answer")
LOGGED = ("success", "f1", "em", "format_ok", "python", "search", "browse", "both", "errors",
         "decorative", "gap", "undecided")  # the numbers of a score whose means are logged
END, BONUS, UNNEEDED = "<|im_end|>", 0.1, 0.05
HEADER = "<|im_start|>assistant\n"  # the released code reads a response up to here
ENOUGH = 0.9  # the least accuracy that earns the bonus of strict
ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


# ---------------------------------------------------------------- answers

def last_box(text):
    r"""The last \boxed{...} or \fbox{...} of a text, up to its matching brace; None if none.

    Like the released code: if `\boxed ` with a blank occurs, the box is the text after the last of
    them, up to the next dollar sign.
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
    r"""The content of a box; None for what the released code cannot open either, such as \fbox."""
    if box is None:
        return None
    if "\\boxed " in box:
        return box.removeprefix("\\boxed ") if box.startswith("\\boxed ") else None
    if box.startswith("\\boxed{") and box.endswith("}"):
        return box.removeprefix("\\boxed{")[:-1]
    return None


def answer_of(text):
    """The answer in a text: from the last <answer>, else from the last box, else None."""
    answers = ANSWER.findall(text)
    if answers:
        return bare(answers[-1])
    return unboxed(text)


def bare(answer):
    """An answer without its box and surrounding blanks."""
    opened = unboxed(answer)
    return answer.strip() if opened is None else opened


def unboxed(text):
    r"""The content of a text's last \boxed{x}, \boxed {x}, \fbox{x} or \boxed x; None if none."""
    text = re.sub(r"\\boxed\s+\{", r"\\boxed{", text).replace("\\fbox{", "\\boxed{")
    opened = open_box(last_box(text))
    return None if opened is None else opened.strip()


# ---------------------------------------------------------------- questions

def qa_metrics(prediction, golds):
    """{"em", "f1", "acc"}, each in [0, 1] and the best over all golds.

    prediction: a text, or None for no answer. acc: 1 if the prediction contains a gold. Tool-Star's
    evaluator differs: it keeps the metrics of the last gold.
    """
    said = normalize(prediction or "")
    if not (isinstance(golds, list) and all(isinstance(gold, str) for gold in golds)):
        golds = golds_of(golds)
    rows = [normalize(gold) for gold in golds]
    equal = any(same_text(prediction or "", gold) for gold in golds)
    return {
        "em": float(equal),
        "f1": max((words_f1(said, gold) for gold in rows), default=0.0),
        # a gold that normalises to nothing, such as the choice A, would be part of every text
        "acc": float(equal or any(gold in said for gold in rows if gold)),
    }


# ---------------------------------------------------------------- the released reward

def released_format(text):
    """Whether the released code finds the format of a response right."""
    thoughts, answers = text.count("<think>"), text.count("<answer>")
    if thoughts == 0 or thoughts != text.count("</think>"):
        return False
    if answers != 1 or text.count("</answer>") != 1:
        return False
    if not (calls_are_answered(text, "search") and calls_are_answered(text, "python")):
        return False
    # an empty text if </answer> comes first
    answer = text[text.index("<answer>"):text.index("</answer>")]
    return "\\boxed{" in answer and "}" in answer


def calls_are_answered(text, name):
    """Whether every opening tag is followed by its closing tag and then by a result.

    Like the released code: the search continues after each result, so a doubled opening tag passes,
    and one result may serve both a search and a program.
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

    text: the response, which is read up to the next assistant header. The released code raises on
    golds that are not texts; here they are converted to text.
    """
    text = text.partition(HEADER)[0]
    if not released_format(text):
        return -1.0
    if text.endswith(end):
        text = text[:-len(end)] if end else ""  # the released text[:-0] is empty
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    answer = open_box(last_box(found[1])) if found else None
    if answer is None:
        return -1.0
    best = token_f1(answer, golds)
    both = "</search>" in text and "</python>" in text
    return best + BONUS if best > 0 and both else best


# ---------------------------------------------------------------- score and rewards

def compare(answer, task):
    """Whether an answer matches each of the task's golds, by the task's check (math or qa); None
    where that is undecided."""
    equal = math_equal if task["check"] == "math" else same_text
    return [equal(answer, gold) for gold in task["golds"]] if answer else []


def is_right(answer, task):
    """Whether an answer matches one of the task's golds."""
    return any(compare(answer, task))


def score(task, answer, calls, format_ok, tags_text):
    """The score of an episode: {name: number}; shares are floats, counts are ints.

    task: {golds: list of texts, check: "math" or "qa", needs: tools in lower case, may be missing}.
    answer: a text or None. calls: the environment's records {name, status, empty, repeated}; the
    policy's own claims do not count. format_ok: whether the episode kept the format and ended
    with an answer. tags_text: the episode in the tags grammar, for the released reward.
    """
    said = bare(answer or "")
    if task["check"] == "qa":
        said = untexted(said).strip()
    matches = compare(said, task)
    right = any(matches)
    metrics = qa_metrics(said, task["golds"]) if said else dict.fromkeys(("em", "f1", "acc"), 0.0)
    graded = token_f1(said, task["golds"]) if task["check"] == "qa" else 0.0
    row = {
        "success": float(right),
        "undecided": float(not right and None in matches),
        "em": metrics["em"],
        "f1": metrics["f1"],
        "acc": max(graded, float(right)),  # token_f1: words_f1 would pay "yes no" for a "yes"
        "format_ok": float(bool(format_ok)),
        "released": released(tags_text, task["golds"]),
        **count_calls(calls, task.get("needs")),
    }
    row["gap"] = row["released"] - reward_of(row, "strict")
    return row


def count_calls(calls, needs):
    """The numbers of a score about calls. needs: the tools a task needs; None: unknown."""
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
        "called": float({"search", "python"} <= {*names}),  # even if the calls failed
        "earned": float({"search", "python"} <= gave),
        "needs_known": float(needs is not None),
        "needed": float(needs is not None and len({*needs}) >= 2 and {*needs} <= gave),
        "unneeded": unneeded,
        "decorative": float(unneeded > 0),
    }


def reward_of(score, kind):
    """The reward for a score, a float. kind: one of REWARDS, else a Mistake."""
    if kind not in REWARDS:
        raise Mistake(f"--reward {kind}: the rewards are {', '.join(REWARDS)}")
    if kind == "released":
        return score["released"]
    accuracy = score["acc"]
    if kind == "answer":
        return accuracy
    if not score["format_ok"]:
        return -1.0
    if kind == "paper":
        return accuracy + BONUS * (accuracy > 0 and score["called"])
    if kind == "strict" or not score["needs_known"]:
        return accuracy + BONUS * (accuracy >= ENOUGH and score["earned"])
    return accuracy + BONUS * (accuracy >= ENOUGH and score["needed"]) \
        - UNNEEDED * score["unneeded"]
