"""
Score the plays of Tool-Star's twelve sets in a table beside the paper's numbers [1].

    (1) answer   find the answer of a play in the policy's own replies (verdict.answer_of)
    (2) judge    a language model says Correct or Incorrect of the answer; any other reply counts as
                 unread, and the answer as not right
    (3) score    an answer is right if it equals a gold (verdict.is_right) or the judge finds it
                 correct; for sets of facts the paper reports the F1 of shared words instead, and
                 the judge is not asked
    (4) table    for each set the mean over plays with an interval over questions

evaluate.py's own table has TE, calls and tokens. The paper plays WebWalker, GAIA and HLE
with web search and a browser: its numbers of these sets are comparable only with such tools.

Reads   tasks.jsonl of sets.py, folders of episodes of evaluate.py
Writes  OUT/table.md, OUT/table.json, OUT/judged-NAME.jsonl; verdicts in OUT are not asked again
[1] Tool-Star, arXiv:2505.16410

    python evaluate.py --env tools --database database/tool-star/eval --model rl=out/rl \\
        --tasks data/sets/tasks.jsonl --samples 4 --out out/eval
    python -m toolstar scores --tasks data/sets/tasks.jsonl --runs out/eval/rl \\
        --judge http://localhost:8000/v1=Qwen2.5-72B-Instruct --out out/scores
"""
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import evaluate
import runtime
from evaluate import mean, name_of, spoken
from runtime import read_jsonl
from sandbox import PROMPTS
from toolstar import verdict
from toolstar.sets import PAPER_MEAN, SETS, TEN
from toolstar.text import truncate, untexted

AT_ONCE, TRIES = 50, 3  # the judge: 50 questions at a time, 3 tries each [1]
JUDGE = (PROMPTS / "judge.txt").read_text(encoding="utf-8").strip()
FORGED = re.compile("<(?=/?(?:question|correct|answer)>)")  # tags that an answer must not hold


# ---------------------------------------------------------------- scores

def said_in(row):
    """The answer in an episode's replies (results are not searched), or None."""
    replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    answer = verdict.answer_of("\n".join(replies)) or ""
    return (untexted(answer).strip() if row["task"]["check"] == "qa" else answer) or None


def ask_judge(generate, task, said):
    """("correct", "incorrect" or "unread", the judge's words) on an answer."""
    golds, said = "\n".join(task["golds"]), FORGED.sub("‹", truncate(said, 2000))
    text = JUDGE.format(query=task["query"], golds=golds, said=said)
    try:
        reply = generate([{"role": "user", "content": text}])
    except evaluate.Refused as error:
        return "unread", str(error)[-400:]
    word = re.fullmatch(r"\W*(correct|incorrect)\W*", spoken(reply), re.IGNORECASE)
    return word[1].lower() if word else "unread", reply[-400:]


def judge_plays(args, name, rows):
    """(2) {play: verdict} of an agent's episodes; verdicts in OUT are not asked again.

    Answers that equal a gold are judged too, so that the file shows how far both agree.
    """
    (url, model), verdicts = args.judge, {}
    generate = partial(evaluate.chat, url, model, temperature=0, max_tokens=2048,
                       retries=TRIES - 1, api_key=evaluate.read_key(args.judge_key))
    file = Path(args.out) / f"judged-{name}.jsonl"
    known = {(one["play"], one["said"]): one["verdict"] for one in runtime.recover_jsonl(file)
             if one["judge"] == model}
    said = {name_of(row["task"]): said_in(row) for row in rows}
    left = [row["task"] for row in rows if said[name_of(row["task"])]
            and (name_of(row["task"]), said[name_of(row["task"])]) not in known]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(ask_judge, generate, task, said[name_of(task)]) for task in left]
        try:
            for task, future in zip(left, asked, strict=True):
                play, (found, reply) = name_of(task), future.result()
                verdicts[play] = found
                runtime.append_jsonl(file, {"play": play, "said": said[play], "judge": model,
                                            "verdict": found, "reply": reply})
        finally:
            pool.shutdown(cancel_futures=True)  # after an error
    # a play without an answer is wrong without asking
    return {play: known.get((play, said[play]), "incorrect") for play in said} | verdicts


def score_of(row, found):
    """The score of a play by the metric of its set, in [0, 1]. found: the judge's verdict, or None.
    """
    task, said = row["task"], said_in(row)
    if SETS[task["set"]].score == "f1":
        metrics = verdict.qa_metrics(said, task["golds"])
        return max(metrics["em"], metrics["f1"])
    return float(found == "correct" or bool(said) and verdict.is_right(said, task))


# ---------------------------------------------------------------- table

def write_table(args):
    """Score the episodes of --runs and print the table."""
    wanted, report, notes = {}, {}, ""
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for task in read_jsonl(args.tasks):
        wanted.setdefault(task["set"], set()).add(task["id"])
    for name, folder in evaluate.named_paths(args.runs).items():
        rows = [row for row in evaluate.read_episodes(Path(folder) / "episodes.jsonl").values()
                if row["task"]["id"] in wanted.get(row["task"].get("set"), ())]
        right = [row for row in rows if SETS[row["task"]["set"]].score == "right"]
        verdicts, plays = judge_plays(args, name, right) if args.judge else {}, {}
        for row in rows:
            task = row["task"]
            score = score_of(row, verdicts.get(name_of(task)))
            plays.setdefault(task["set"], {}).setdefault(task["id"], []).append(score)
        report[name] = {one: summarise(plays[one]) for one in SETS if one in plays}
        unread = [*verdicts.values()].count("unread")
        notes += f"\n{name}: {unread} replies of the judge were not read\n" if unread else ""
    text = compare(wanted, report) + notes
    for file, content in (("table.md", text), ("table.json", json.dumps(report, indent=1))):
        runtime.write_text(Path(args.out) / file, content)
    print(text)


def summarise(plays):
    """The numbers of a set. plays: {task id: [score of each play]}."""
    scores = [mean(each) for each in plays.values()]
    return {"score": mean(scores), "interval": evaluate.interval(scores), "questions": len(plays),
            "plays": sum(map(len, plays.values()))}


def compare(wanted, report):
    """The table of all agents beside the paper's numbers; an unknown number is left empty."""
    rows = [["%, avg@k", "score", "questions", "the paper's", "paper, 3B", *report]]
    for name, one in SETS.items():
        cells = [f"{100 * found[name]['score']:.1f} ({evaluate.span(*found[name]['interval'])})"
                 if name in found else "-" for found in report.values()]
        rows.append([name, one.score, str(len(wanted.get(name, ()))), str(one.n),
                     f"{one.paper:.1f}" if one.paper else "", *cells])
    whole = [f"{100 * mean(found[name]['score'] for name in TEN):.1f}"
             if found.keys() >= {*TEN} else "-" for found in report.values()]
    rows.append(["mean of the first ten", "", "", "", f"{PAPER_MEAN}", *whole])
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
