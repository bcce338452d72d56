"""
Published files as others have written them: their rows, and the right answers in a row.

    read_rows  jsonl, json (a list, one object, or one list in an object), csv or parquet, each also
               as .gz; NaN is None. A row that cannot be read is a ValueError in its place, for the
               caller to count
    splits_of  the files of a folder of the Hugging Face hub by split
    golds_of   right answers from a text, a number, a list, nested lists, or a list that somebody
               printed, with or without commas: ['Paris' 'City of Paris'], ["a", "b"], [a, b]

It imports the standard library alone, and pyarrow where a file is parquet.

Reads   the files that it is asked for
"""
import ast
import csv
import gzip
import io
import json
import re
import zlib
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
SPLITS = ("test", "main", "validation", "dev", "val")  # the order in which they are preferred
MISSING = ("None", "nan", "NaN", "null", "<NA>", "...")  # bare words of a printed list
QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
PRINTED = re.compile(rf"\s*+({QUOTED}|[^\s,'\"]++)\s*+,?", re.DOTALL)
ASKING = ("question", "problem", "query", "prompt", "instruction", "messages", "conversations")


# ---------------------------------------------------------------- rows

def suffix_of(path):
    """The suffix that says what a file is, .gz left out."""
    return Path(str(path).lower().removesuffix(".gz")).suffix


def read_rows(path):
    """[(number, row)] of a published file, numbered by lines, or by rows where there are none.

    A line that is no JSON is a ValueError in the row's place. ValueError if the whole file is none.
    """
    kind = suffix_of(path)
    if kind == ".parquet":
        rows = enumerate(read_parquet(path), 1)
    elif kind == ".csv":
        rows = enumerate(read_csv(path), 1)
    else:
        rows = read_json(path)
    return [(number, without_nan(row)) for number, row in rows]


def read_text(path):
    """The text of a file, unpacked if it ends in .gz."""
    try:
        content = Path(path).read_bytes()
        content = gzip.decompress(content) if str(path).lower().endswith(".gz") else content
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error})") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: {error}; download it again") from None


def read_json(path):
    """[(number, row)] of a list, of the one list in an object, of an object, or of lines."""
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip()[:1] == "[" and text.lstrip()[1:].lstrip()[:1] == "{":
            raise ValueError(f"{path}: not JSON ({error}); download it again") from None
        return list(read_lines(text))
    if isinstance(found, dict) and not {key.lower() for key in found} & {*ASKING}:
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else found  # {"data": [...]}
    return list(enumerate(found if isinstance(found, list) else [found], 1))


def read_lines(text):
    """Yield (line, row); a line that is no JSON is a ValueError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, ValueError("not JSON")


def read_csv(path):
    """The rows of a csv as tables."""
    csv.field_size_limit(2**30)
    try:
        return list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}: {error}; download it again") from None


def read_parquet(path):
    """The rows of a parquet file, where pyarrow is installed."""
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise ValueError(f"{path}: parquet takes pyarrow (pip install pyarrow); or make it jsonl "
                         "elsewhere: pandas.read_parquet('x.parquet').to_json('x.jsonl', "
                         "orient='records', lines=True)") from None
    try:
        return parquet.read_table(path).to_pylist()
    except (ValueError, lib.ArrowException) as error:
        raise ValueError(f"{path}: {error}; download it again") from None


def without_nan(value):
    """A value in which each NaN, at any depth, is None."""
    if isinstance(value, dict):
        return {key: without_nan(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [without_nan(inside) for inside in value]
    return None if value != value else value


def splits_of(folder):
    """(lists of a folder's files, one for each split in the order of SPLITS, last all others that
    are not for training; the files for training)."""
    words = {path: set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower()))
             for path in sorted(Path(folder).rglob("*")) if suffix_of(path) in SUFFIXES}
    lists = [[path for path in words if split in words[path]] for split in SPLITS]
    lists.append([path for path in words if "train" not in words[path]])
    return [files for files in lists if files], [path for path in words if "train" in words[path]]


# ---------------------------------------------------------------- values

def opened(value):
    """A table or list that was written as text, as JSON's or Python's; else what it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        for load in json.loads, ast.literal_eval:
            try:
                return load(value.strip())
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    return value


def golds_of(value):
    """The right answers that a value names, as texts; [] if it names none."""
    if isinstance(value, str):
        inside = printed(value.strip())
        return [value] if inside is None and value.strip() else inside or []
    if isinstance(value, dict):
        value = value.get("target", list(value.values()))
    if isinstance(value, list | tuple):
        return [gold for one in value for gold in golds_of(one)]
    known = isinstance(value, int | float) and value == value
    return [str(value)] if known else []


def printed(text):
    """The texts in a list that was printed; None if the text is no such list.

    [1, 2] and (a, b) are an interval and a tuple: a list has quotes, or words in square brackets.
    """
    text = re.sub(r"^array\((.*?)(?:, *dtype=\w+)?\)$", r"\1", text, flags=re.DOTALL)
    if not re.fullmatch(r"\[.*\]|\{\s*['\"].*\}|\(\s*['\"].*\)", text, re.DOTALL):
        return None
    inside = text[1:-1].strip()
    quoted = re.search(QUOTED, inside, re.DOTALL)
    if not quoted and inside.strip(" []") and (re.search(r"[\\()]", inside)
                                               or not re.search(r"[^\W\d_]{3}", inside)):
        return None
    if not quoted:
        parts = re.split(r"[,\n]", inside)
    else:
        flat = re.sub(rf"({QUOTED})|array\(|, *dtype=\w+|[\[\]()]", lambda found: found[1] or " ",
                      inside, flags=re.DOTALL)
        whole = re.fullmatch(rf"(?:{PRINTED.pattern})*\s*", flat, re.DOTALL)
        # ['O'Brien', 'x']: a quote in quotes
        parts = PRINTED.findall(flat) if whole else re.split(r"(?<=['\"])[\s,]+(?=['\"])", flat)
    parts = [part.strip() for part in parts]
    return [unquoted(part) for part in parts if part and part not in MISSING]


def unquoted(text):
    """What a quoted text says."""
    try:
        return str(ast.literal_eval(text)) if text[0] in "'\"" else text
    except (ValueError, SyntaxError, MemoryError):
        return text[1:-1]
