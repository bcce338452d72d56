"""
Text as models lay it out, JSON, tables, HTML, markdown, unfolded into plain lines.

format_plan.py reads the lines. Nothing here knows what a trip is, but for the patterns of
wording.py that tell a day's heading or a field's label from any other cell.
"""
import ast
import html
import json
import re
from contextlib import suppress
from itertools import groupby, islice

import wording as w

LONGEST_LINE = 4_000  # characters; what is longer is cut
MOST_LINES = 2001  # out of JSON
EVENT = re.compile(r"(?:\w+ ?[/&] ?)?(?:time|what|category|activit(?:y|ies)|event|item|"
                   "type|details?|description)", re.I)
TYPOGRAPHY = str.maketrans("’‘“”：，；（）【】\u00a0\u202f\u3000\t\r", "''\"\":,;()[]     ", "*`\0")


def unfold(text, names):
    """Yield (kind, plain line), kind "line", "bullet" or "field" (out of JSON or a table).

    names: with .awkward, pairs of a stored name that markup would tear and what stands for it.
    """
    text = w.EMPHASIS.sub("", w.RUN_IN.sub(r"\1:", text).translate(TYPOGRAPHY))
    if w.MARKUP.search(text):  # HTML: its rows become those of a markdown table, its blocks lines
        text = w.CELL.sub(lambda tag: "" if tag[1] else "|", text)
        text = w.ROW.sub(lambda row: re.sub(r"<br ?/?>", "; ", row[0]), text)
        text = html.unescape(w.MARKUP.sub(lambda tag: "" if tag[1] else "\n", text))
        text = re.sub(r"\n\s{0,99}\|", "\n|", text)
    for awkward, key in names.awkward:
        text = text.replace(awkward, key)
    if value := load_json(text):
        for line in islice(json_lines(value), MOST_LINES):
            yield "field", line.replace("\n", " ").strip()
        return
    raws = [raw[:LONGEST_LINE] for raw in w.LINK.sub("]", w.NEW_DAY.sub("\n", text)).split("\n")]
    said = [raw for raw in raws if not raw.lstrip().startswith(">")]  # a quote is a remark
    raws = said if 2 * len(said) > len(raws) else raws
    for is_table, block in groupby(raws, key=lambda raw: raw.lstrip().startswith("|")):
        if is_table:
            yield from (("field", line) for line in table_lines(block))
            continue
        for raw in block:
            line = raw.strip()
            bullet = w.BULLET.match(line).end()
            listed = (bullet or raw.startswith(" ")) and not line.startswith("#")
            yield "bullet" if listed else "line", line[bullet:].strip("_ ").replace(" · ", " | ")


def load_json(text):
    """What a text holds about days as JSON or as a Python literal, or None."""
    start = re.search(r"\[\s*\{|\{\s*[\"']", text)
    text = text[start.start():] if start else ""
    if not re.search(r"[\"'](?:days?|plan)[\"' _\d]", text[:4000], re.I):
        return None
    with suppress(ValueError, RecursionError):
        return json.JSONDecoder(strict=False).raw_decode(text)[0]
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return ast.literal_eval(text[:max(text.rfind("]"), text.rfind("}")) + 1])
    return None


def json_lines(value, key="", depth=0):
    """Yield what load_json gave as lines: "Day N" and "key: value"."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "; ".join(value)
    if depth > 8 or value is None:
        return
    table = value if isinstance(value, dict) else {}
    kinds = [table.get(kind) for kind in ("type", "slot", "category", "meal")]
    key = next((kind for kind in kinds if isinstance(kind, str)), key)
    rest = {str(k).replace("_", " "): v for k, v in table.items() if k not in ("date", "time")}
    names = [k for k in rest if w.NAME_KEY.match(k) and isinstance(rest[k], str)]
    number = next((k for k in ("day", "days", "Day", "day number")
                   if isinstance(rest.get(k), (int, str))), None)
    if isinstance(value, list):
        for item in value:
            yield from json_lines(item, key, depth + 1)
    elif not isinstance(value, dict):
        yield f"{key}: {value}"
    elif names and not number and not w.DAY.match(key) and not rest.keys() & (
            w.LABELS.keys() - {"city", *names}):
        city = value.get("city")
        yield f"{key}: {rest[names[0]]}" + (f", {city}" if isinstance(city, str) else "")
    elif "transport" in key or "flight" in key:
        yield f"{key}: " + ", ".join(f"{k}: {v}" for k, v in rest.items() if k != "type")
    else:
        day = str(rest.pop(number)) if number else key
        if number or w.DAY.match(day):
            yield day if w.DAY.match(day) else f"Day {day}"
        for k, v in rest.items():
            yield from json_lines(v, k, depth + 1)


def table_lines(block):
    """Yield a markdown table's lines. Its days may be rows or columns; else each row is a line."""
    cells = [raw.strip().replace("\\|", "¦").strip("|").split("|") for raw in block]
    rows = [[cell.strip() for cell in row] for row in cells]
    rows = [row for row in rows if not all(re.fullmatch(r":?-*:?", cell) for cell in row)]
    head = rows[0] if rows else [""]
    days = [i for i, cell in enumerate(head) if w.DAY.match(cell)]
    fields = [i for i, cell in enumerate(head) if i and w.LABEL.match(f"{cell}:")]
    by_day = re.match("(days?|dates?)$", head[0], re.I)
    events, told = by_day and len(head) > 2 and any(map(EVENT.fullmatch, head)), ""
    if len(days) > 1:
        for i in days:
            yield head[i]
            yield from (f"{row[0]}: {row[i]}" for row in rows[1:] if i < len(row))
        return
    for row in rows[1:] if by_day or not days else rows:
        label = next((i for i, cell in enumerate(row) if w.LABEL.fullmatch(f"{cell}:")), None)
        day = row[0] if w.DAY.match(row[0]) or w.DATED.match(row[0]) else f"Day {row[0]}"
        if events:  # a row is one of a day's, which may stand in its first row alone
            if row[0] not in ("", told):
                told = row[0]
                yield day
            yield (f"{row[label]}: " if label else "") + " | ".join(row[(label or 0) + 1:])
        elif by_day and not fields:
            yield f"{day}: " + " ".join(row[1:])
        elif by_day or w.DAY.match(row[0]):
            yield day
            for i, cell in enumerate(row[1:len(head)], 1):  # a cell may say itself what it tells
                part = i in fields or w.TIME.match(head[i])  # "Morning"
                if part or w.LABEL.match(cell):
                    yield f"{head[i]}: {cell}" if part else cell
        elif label is None:
            yield " | ".join(row)
        else:
            yield f"{row[label]}: " + " | ".join(row[label + 1:])
