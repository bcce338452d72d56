"""
The house's one way to read and write records: jsonl, a record per line, whole or not at all.

    read_jsonl, write_jsonl       a whole file
    append_jsonl, recover_jsonl   a file that grows with a run, and what a killed run left of it
    write_text, replacing         any text file, which takes its path's place once it is whole

Every program shares these through evaluate.py.
"""
import contextlib
import json
import os
from pathlib import Path

from guard import naming


def read_jsonl(path):
    """The records of a jsonl file, blank lines skipped. Errors name the file and the line."""
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); "
                                 "mend or delete the line") from None
    return rows


def recover_jsonl(path):
    """The records a killed run left, [] without a file; a line it did not finish is cut off."""
    if not Path(path).exists():
        return []
    with open(path, "rb+") as file:
        text = file.read()
        end = text.rfind(b"\n") + 1
        try:
            json.loads(text[end:])
            file.write(b"\n")  # it lacks no more than its end, as an editor's last line may
        except (ValueError, RecursionError):
            file.truncate(end)
    return read_jsonl(path)


def append_jsonl(path, row):
    """Add one record and flush it, so that a killed run keeps every episode that ended."""
    with naming(path), open(path, "a", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_jsonl(path, rows):
    """Write a whole file of records."""
    with replacing(path) as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_text(path, text):
    """Write a whole text file."""
    with replacing(path) as out:
        out.write(text)


@contextlib.contextmanager
def replacing(path):
    """A text file under a temporary name, which takes the path's place once it is whole. The name
    is always the same: the next writer overwrites what a killed one left, and OUT has but one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    try:
        with naming(path), open(temporary, "w", encoding="utf-8", errors="replace") as out:
            yield out
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
