"""
Convert Tool-Star's published data [1]: 54K chains for SFT and 10K tasks for RL.

    (1) SFT     a row has instruction, input and output, or a conversation; it becomes an episode in
                the grammar "tags". The assistant's text also holds the results of tools: these
                become messages of their own, which sft.py masks. Joined, the messages are the text
    (2) RL      a row has data_source, prompt or question, ability and reward_model; it becomes a
                task with golds and a check, math or qa, chosen by the ability. A gold that is a
                printed list is split, and the list is kept as ground_truth
    (3) count   no row is lost silently: report.json counts the rows that cannot be used by cause,
                with the first lines, and the odd rows that are kept; repeated ids get a number
    (4) sets    a row whose question occurs in an evaluation set is dropped and listed by its id

If a row has both instruction and input, the instruction is the system prompt and the input the
question. OUT/system.txt is the system prompt of most rows; give it to later stages as
--system-prompt, so that they use the prompt that SFT has trained on.

Reads   json, jsonl or parquet (with pyarrow); --sets, a folder of evaluation sets (sets.py)
Writes  OUT/sft.jsonl, rl.jsonl, system.txt, report.json

    python -m toolstar.tir convert --from tool-star --sft final_sft.json --rl rl.jsonl --out data

[1] Tool-Star, arXiv:2505.16410
"""
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from runtime import write_jsonl, write_text
from toolstar.files import golds_of, parsed, read_rows
from toolstar.sets import contaminated, questions_of
from toolstar.text import normalize
from toolstar.verdict import answer_of, without_results

SHOWN = 5  # lines that the report names per cause
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant",
         "assistant": "assistant", "observation": "result", "tool": "result"}
CALL_ENDS = ("</search>", "</python>", "</browse>")
ABILITIES = {"math": ("math",), "qa": ("qa", "question", "fact", "search", "wiki", "knowledge")}
QUESTIONS = ("question", "query", "problem", "Question", "Problem", "prompt")


class Refused(ValueError):
    """A row cannot be used; the message is the cause under which it is counted."""


def tally(lines):
    """{cause: line numbers} -> {cause: {"count", "lines": the first SHOWN}}, in order of count."""
    ordered = sorted(lines.items(), key=lambda item: -len(item[1]))
    return {cause: {"count": len(lines), "lines": lines[:SHOWN]} for cause, lines in ordered}


# ---------------------------------------------------------------- columns

def name_in(row, key, otherwise):
    """The value of a column as text, or `otherwise` if there is none."""
    value = row.get(key)
    return str(otherwise if value is None else value)


def columns(row):
    return ", ".join(sorted(map(str, row)))[:120] or "none"


# ---------------------------------------------------------------- SFT

def conversation_of(row):
    """[(role, text)] of a row in the format of Alpaca or ShareGPT; Refused for any other."""
    turns = parsed(row.get("conversations", row.get("messages")))
    if isinstance(turns, list):
        found = [("system", row["system"])] if is_text(row.get("system")) else []
        for turn in turns:
            turn = turn if isinstance(turn, dict) else {}
            role = ROLES.get(str(turn.get("from", turn.get("role"))))
            text = turn.get("value", turn.get("content"))
            if role is None or not isinstance(text, str):
                raise Refused("a turn with an unknown role, or without text")
            found.append((role, text))
        return found
    if "instruction" not in row or "output" not in row:
        raise Refused(f"neither instruction and output nor conversations; columns: {columns(row)}")
    if row.get("history"):
        raise Refused("it has a history of earlier turns")
    system, question = row.get("system"), row["instruction"]
    if not isinstance(row.get("input"), str | None):
        raise Refused("an input that is not text")
    if is_text(row.get("input")):
        given = [text for text in (system, question) if is_text(text)]
        system, question = "\n".join(given), row["input"]
    head = [("system", system)] if is_text(system) else []
    return [*head, ("user", question), ("assistant", row["output"])]


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


def oddities(messages, answer):
    """[what is odd about a chain that is kept], in words."""
    parts = [(message["role"], message["content"]) for message in messages[2:]]
    said = [text for role, text in parts if role == "assistant"]
    results = sum(role == "result" for role, _ in parts)
    callers = [text for (role, text), after in zip(parts, parts[1:], strict=False)
               if after[0] == "result" and role == "assistant"]
    odd = {"no answer": answer is None,
           "the numbers of results and calls differ":
               results != sum(text.count(end) for text in said for end in CALL_ENDS),
           "a result without a call": not all(text.endswith(CALL_ENDS) for text in callers)}
    return [name for name, found in odd.items() if found]


def episode_of(row, line, prompt):
    """(episode, [what is odd about it]) of a row for SFT; Refused if there is no episode in it.

    prompt: the system prompt if the row has none.
    """
    if not isinstance(row, dict):
        raise Refused("it is not an object with columns")
    turns = conversation_of(row)
    system = next((text for role, text in turns if role == "system"), "")
    parts = [turn for turn in turns if turn[0] != "system"]
    if not parts or parts[0][0] != "user" or not is_text(parts[0][1]):
        raise Refused("no question")
    talk = [("system", system or prompt), parts[0]]
    for role, text in parts[1:]:
        if not isinstance(text, str):
            raise Refused("a reply that is not text")
        talk += split_results(text) if role == "assistant" else [(role, text)]
    if len(talk) < 3 or talk[2][0] != "assistant":
        raise Refused("no reply before the first result")
    messages = [{"role": role, "content": text} for role, text in talk]
    counts = Counter(role for role, _ in talk)
    answer = answer_of(without_results("".join(text for _, text in talk[2:])))
    episode = {"task": {"id": name_in(row, "id", f"sft-{line}"), "query": talk[1][1]},
               "model": "tool-star", "messages": messages, "answer": answer,
               "stop": "format" if answer is None else "answer", "calls": counts["result"],
               "turns": counts["assistant"], "failures": 0}
    return episode, oddities(messages, answer)


# ---------------------------------------------------------------- RL

def question_of(row):
    """The question of a row for RL, from one of QUESTIONS or the user's message in its prompt."""
    for key in QUESTIONS:
        value = parsed(row[key]) if key == "prompt" and key in row else row.get(key)
        if isinstance(value, list):
            value = next((turn.get("content") for turn in reversed(value)
                          if isinstance(turn, dict) and turn.get("role") == "user"), None)
        if is_text(value):
            return value
    raise Refused(f"no question; columns: {columns(row)}")


def check_of(row):
    """"math" or "qa", by a row's ability."""
    ability = str(row.get("ability", "")).lower()
    for check, words in ABILITIES.items():
        if any(word in ability for word in words):
            return check
    raise Refused(f"ability {row.get('ability')!r:.60} is neither of {' nor of '.join(ABILITIES)}")


def golds_in(row):
    """([golds as texts], the published value) of a row."""
    truth, model = None, parsed(row.get("reward_model"))
    if isinstance(model, dict):
        truth = model.get("ground_truth")
    for key in ("ground_truth", "golden_answers", "answers", "answer"):
        truth = row.get(key) if truth is None else truth
    if isinstance(truth, dict):
        truth = truth.get("target", truth)
    golds = [gold for gold in golds_of(truth) if gold.strip()]
    if not golds:
        raise Refused("no gold")
    return golds, truth


def task_of(row, line):
    """(task, [what is odd about it]) of a row for RL; Refused if there is no task in it."""
    if not isinstance(row, dict):
        raise Refused("it is not an object with columns")
    query, check = question_of(row), check_of(row)
    golds, truth = golds_in(row)
    source, more = name_in(row, "data_source", "rl"), parsed(row.get("extra_info"))
    index = name_in(more if isinstance(more, dict) else {}, "index", line)
    task = {"id": name_in(row, "id", f"{source}-{index}"), "query": query, "golds": golds,
            "check": check, "data_source": source, "ability": row["ability"]}
    inside = truth if isinstance(truth, list) else [truth]
    if truth not in (golds, golds[0]):
        task["ground_truth"] = truth
    printed = any(isinstance(gold, str) and gold.strip() and golds_of(gold) != [gold]
                  for gold in inside)
    torn = check == "math" and any(gold.count("{") != gold.count("}") for gold in golds)
    return task, [note for note, true in (("golds are a printed list", printed),
                                          ("a gold with unbalanced braces", torn)) if true]


# ---------------------------------------------------------------- convert

def make_unique(tasks):
    """Add a number to each repeated id, such as "7-2"; return how many ids were repeated."""
    taken, met, numbers, twice = {task["id"] for task in tasks}, set(), Counter(), 0
    for task in tasks:
        name = task["id"]
        if name in met:
            twice += 1
            while task["id"] in taken:
                numbers[name] += 1
                task["id"] = f"{name}-{numbers[name] + 1}"
            taken.add(task["id"])
        met.add(task["id"])
    return twice


def convert_file(path, make, sets):
    """(records, report) of a published file; make(row, line) converts a row.

    sets: the tasks of evaluation sets, whose questions are dropped.
    """
    rows, records, odd, refused, asked = read_rows(path), [], {}, {}, {}
    for line, row in rows:
        try:
            if isinstance(row, ValueError):
                raise Refused(str(row))
            record, notes = make(row, line)
        except Refused as cause:
            refused.setdefault(str(cause), []).append(line)
            continue
        records.append(record)
        if "golds" in record:  # note a repeated question
            query = normalize(record["query"])
            if query and query in asked:
                notes = [*notes, "a repeated question" if asked[query] == record["golds"] else
                         "a repeated question with other golds"]
            asked.setdefault(query, record["golds"])
        for note in notes:
            odd.setdefault(note, []).append(line)
    if not records:
        why = next((f"{cause}, first in line {found['lines'][0]}" for cause, found
                    in tally(refused).items()), "it is empty")
        raise ValueError(f"{path}: none of its {len(rows)} rows can be used: {why}")
    twice = make_unique([record.get("task", record) for record in records])
    kept, dropped = contaminated(records, sets)
    return kept, {"rows": len(rows), "kept": len(kept), "refused": tally(refused),
                  "odd, and kept": tally(odd), "duplicated ids": twice,
                  "in an evaluation set": len(dropped), "contaminated": dropped}


def our_prompt():
    """The system prompt of an episode whose row has none: that of a world of grammar "tags"."""
    from toolstar.tools import SETTINGS, system_prompt

    defaults = {key: default for key, (_, default) in SETTINGS.items()}
    settings = defaults | {"grammar": "tags", "tools": ["Search", "Python"]}
    return system_prompt("full", SimpleNamespace(**settings))


def convert(args):
    """Convert the files of --sft and --rl."""
    if not (args.sft or args.rl):
        raise ValueError("name the file to convert by --sft FILE, --rl FILE or both")
    out, made, report, sets = Path(args.out), {}, {}, []
    if args.sets:
        sets, missing = questions_of(args.sets)
        report["sets"] = {"questions": len(sets), "missing": missing}
    if args.sft:
        prompt = our_prompt()
        made["sft"], report["sft"] = convert_file(
            args.sft, lambda row, line: episode_of(row, line, prompt), sets)
    if args.rl:
        made["rl"], report["rl"] = convert_file(args.rl, task_of, sets)
    if "sft" in made:
        said = Counter(row["messages"][0]["content"] for row in made["sft"]).most_common()
        report["sft"]["system prompts"] = len(said)
        write_text(out / "system.txt", (said[0][0] if said else "") + "\n")
    for part, records in made.items():
        write_jsonl(out / f"{part}.jsonl", records)
        told = report[part]
        print(f"{out / part}.jsonl: {told['kept']} of {told['rows']} rows; refused: "
              f"{ {cause: found['count'] for cause, found in told['refused'].items()} }; "
              f"duplicated ids: {told['duplicated ids']}; "
              f"in an evaluation set: {told['in an evaluation set']}")
    write_text(out / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
