"""
Convert Tool-Star's published data [1]: 54K chains for SFT and 10K tasks for RL.

    (1) SFT    {instruction, input, output} becomes an episode of the grammar "tags". The results of
               tools become messages of their own, which sft.py masks; joined, the messages are the
               published text. With an input, the instruction is the system prompt
    (2) RL     {question or prompt, ability, reward_model, data_source} becomes a task with golds
               and a check, math or qa, by its ability
    (3) count  rows that cannot be used are counted by cause in report.json; so are rows whose
               question occurs in an evaluation set (--sets), which are dropped

OUT/system.txt is the system prompt of most rows; give it to later stages as --system-prompt.

Reads   json, jsonl or parquet (with pyarrow); --sets, a folder of evaluation sets (sets.py)
Writes  OUT/sft.jsonl, rl.jsonl, system.txt, report.json

    python -m toolstar convert --sft final_sft.json --rl rl.jsonl --out data

[1] Tool-Star, arXiv:2505.16410
"""
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from runtime import Mistake, write_jsonl, write_text
from toolstar.sets import contaminated, questions_of, read_rows
from toolstar.text import golds_of
from toolstar.verdict import answer_of

ABILITIES = {"math": ("math",), "qa": ("qa", "question", "fact", "search", "wiki", "knowledge")}


class Refused(ValueError):
    """A row cannot be used; the message is the cause under which it is counted."""


def is_text(value):
    return isinstance(value, str) and bool(value.strip())


def split_results(text):
    """[(role, text)] of an assistant's text, split into replies and results; joined, they are the
    text. Blanks before a result belong to it, as in the messages that ToolEpisode writes."""
    parts, at = [], 0
    while (start := text.find("<result>", at)) >= 0 and (end := text.find("</result>", start)) >= 0:
        said = text[at:start].rstrip()
        at, start = end + len("</result>"), at + len(said)
        parts += [("assistant", said), ("result", text[start:at])]
    parts.append(("assistant", text[at:]))
    if any("<result>" in said or "</result>" in said for role, said in parts if role != "result"):
        raise Refused("a <result> without its </result>, or the reverse")
    return [(role, said) for role, said in parts if said.strip()]


def episode_of(row, line, prompt):
    """The episode of a row for SFT. prompt: the system prompt if the row has none."""
    system, question, output = row.get("system"), row.get("instruction"), row.get("output")
    if is_text(row.get("input")):
        system, question = "\n".join(filter(is_text, (system, question))), row["input"]
    if not is_text(question) or not is_text(output) or row.get("history"):
        raise Refused("not an instruction, an input and an output without a history")
    talk = [("system", system or prompt), ("user", question), *split_results(output)]
    if talk[2][0] != "assistant":
        raise Refused("no reply before the first result")
    counts = Counter(role for role, _ in talk)
    answer = answer_of("".join(text for role, text in talk[2:] if role == "assistant"))
    return {"task": {"id": str(row.get("id", f"sft-{line}")), "query": question},
            "model": "tool-star", "answer": answer, "calls": counts["result"],
            "messages": [{"role": role, "content": text} for role, text in talk],
            "stop": "format" if answer is None else "answer", "turns": counts["assistant"],
            "failures": 0}


def task_of(row, line):
    """The task of a row for RL."""
    query = row.get("question", row.get("prompt"))
    if isinstance(query, list):
        query = next((turn.get("content") for turn in reversed(query)
                      if isinstance(turn, dict) and turn.get("role") == "user"), None)
    ability = str(row.get("ability", "")).lower()
    check = next((check for check, words in ABILITIES.items()
                  if any(word in ability for word in words)), None)
    model = row.get("reward_model", row)
    golds = golds_of(model.get("ground_truth")) if isinstance(model, dict) else []
    for wrong, cause in ((not is_text(query), "no question"), (not golds, "no gold"),
                         (not check, f"ability {ability!r:.40} is neither mathematics nor a fact")):
        if wrong:
            raise Refused(cause)
    source = row.get("data_source", "rl")
    return {"id": str(row.get("id", f"{source}-{line}")), "query": query, "golds": golds,
            "check": check, "data_source": source, "ability": row["ability"]}


def convert_file(path, make, sets):
    """(records, report) of a published file; make(row, line) converts a row."""
    rows, records, refused, ids = read_rows(path), [], {}, Counter()
    for line, row in enumerate(rows, 1):
        try:
            records.append(make(row, line))
        except Refused as cause:
            refused.setdefault(str(cause), []).append(line)
            continue
        task = records[-1].get("task", records[-1])
        ids[task["id"]] += 1
        task["id"] += f"-{ids[task['id']]}" * (ids[task["id"]] > 1)
    told = {cause: {"count": len(lines), "first lines": lines[:5]}
            for cause, lines in refused.items()}
    if not records:
        raise Mistake(f"{path}: none of its {len(rows)} rows can be used: {told}")
    kept, dropped = contaminated(records, sets)
    print(f"{path}: {len(kept)} of {len(rows)} rows; refused: {told}; in an evaluation set: "
          f"{len(dropped)}")
    return kept, {"rows": len(rows), "kept": len(kept), "refused": told, "contaminated": dropped}


def convert(args):
    """Convert the files of --sft and --rl."""
    from toolstar.tools import SETTINGS, system_prompt

    out, report = Path(args.out), {}
    sets = questions_of(args.sets) if args.sets else []
    if not (args.sft or args.rl):
        raise Mistake("name the file to convert by --sft FILE, --rl FILE or both")
    if args.sft:
        ours = SETTINGS | {"grammar": "tags", "tools": ["Search", "Python"]}
        prompt = system_prompt("full", SimpleNamespace(**ours))
        kept, report["sft"] = convert_file(
            args.sft, lambda row, line: episode_of(row, line, prompt), sets)
        said = Counter(row["messages"][0]["content"] for row in kept).most_common(1)
        write_text(out / "system.txt", said[0][0] + "\n")
        write_jsonl(out / "sft.jsonl", kept)
    if args.rl:
        kept, report["rl"] = convert_file(args.rl, task_of, sets)
        write_jsonl(out / "rl.jsonl", kept)
    write_text(out / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
