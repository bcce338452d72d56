"""
Read published data files in whatever form their authors wrote them: rows and right answers.

    read_rows  the rows of a jsonl, json (a list, an object, or an object that holds one list), csv
               or parquet file, each also gzipped; NaN becomes None. In place of a row that cannot
               be read there is a ValueError, which the caller counts
    splits_of  the files of a data set's folder from the Hugging Face hub, by split
    golds_of   the right answers in a text, a number, a list, nested lists, or a list that was
               printed with or without commas: ['Paris' 'City of Paris'], ["a", "b"], [a, b]

It needs only the standard library, and pyarrow for parquet.

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
SPLITS = ("test", "main", "validation", "dev", "val")  # in order of preference
MISSING = ("None", "nan", "NaN", "null", "<NA>", "...")  # unquoted entries that are no answers
QUOTED = r"(?:\b[ub])?(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
PRINTED = re.compile(rf"\s*+({QUOTED}|[^\s,'\"]++)\s*+,?", re.DOTALL)
ANSWERS = ("target", "text", "value", "aliases")  # in an answer of SQuAD, TriviaQA, Search-R1
# what Python makes of \alpha, \beta, \theta, \vec, \frac, \right in a list printed by hand
LATEX = {7: "\\a", 8: "\\b", 9: "\\t", 11: "\\v", 12: "\\f", 13: "\\r"}
ASKING = ("question", "problem", "query", "prompt", "instruction", "messages", "conversations")


# ---------------------------------------------------------------- rows

def suffix_of(path):
    """The suffix of a path in lower case, without .gz."""
    return Path(str(path).lower().removesuffix(".gz")).suffix


def read_rows(path):
    """[(number, row)] of a published file; the number is the line, or counts rows if the file does
    not have one row per line.

    In place of a line that is not JSON there is a ValueError. Raises ValueError if the whole file
    cannot be read.
    """
    kind = suffix_of(path)
    if kind == ".parquet":
        rows = enumerate(read_parquet(path), 1)
    elif kind == ".csv":
        rows = enumerate(read_csv(path), 1)
    else:
        rows = read_json(path)
    return [(number, plain(row)) for number, row in rows]


def read_bytes(path):
    """The content of a file, decompressed if it is gzip, whatever its name."""
    content = Path(path).read_bytes()
    try:
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: {error}; download it again") from None


def read_text(path):
    """The text of a file."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error})") from None


def read_json(path):
    """[(number, row)] of a JSON list, of the one list in an object, of an object, or of lines."""
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
    """Yield (line number, row), with a ValueError in place of a line that is not JSON."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, ValueError("not JSON")


def read_csv(path):
    """The rows of a csv file as dicts."""
    csv.field_size_limit(2**30)
    try:
        return list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}: {error}; download it again") from None


def read_parquet(path):
    """The rows of a parquet file as dicts; ValueError if pyarrow is not installed."""
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise ValueError(f"{path}: reading parquet needs pyarrow (pip install pyarrow); or convert "
                         "it to jsonl elsewhere: pandas.read_parquet('x.parquet').to_json("
                         "'x.jsonl', orient='records', lines=True)") from None
    try:
        return parquet.read_table(io.BytesIO(read_bytes(path))).to_pylist()
    except (ValueError, lib.ArrowException) as error:
        raise ValueError(f"{path}: {error}; download it again") from None


def plain(value):
    """A value as JSON can hold it: at any depth NaN becomes None; bytes, dates and decimals of
    parquet become texts."""
    if isinstance(value, dict):
        return {key: plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    known = value is None or isinstance(value, str | int | float | ValueError)
    return (value if value == value else None) if known else str(value)


def splits_of(folder):
    """(lists of files, the files for training) of a folder.

    There is a list for each split in the order of SPLITS, then one of all files that are not for
    training. Empty lists are left out.
    """
    words = {path: set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower()))
             for path in sorted(Path(folder).rglob("*")) if suffix_of(path) in SUFFIXES}
    lists = [[path for path in words if split in words[path]] for split in SPLITS]
    lists.append([path for path in words if "train" not in words[path]])
    return [files for files in lists if files], [path for path in words if "train" in words[path]]


# ---------------------------------------------------------------- values

def parsed(value):
    """The dict or list in a text of JSON or Python; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        for load in json.loads, ast.literal_eval:
            try:
                return load(value.strip())
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    return value


def golds_of(value):
    """The right answers in a value, as a list of texts, which may be empty."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        value = found if isinstance(found := parsed(value), dict) and found else value
    if isinstance(value, str):
        inside = [] if value.strip() in ("", "nan", "NaN") else printed_list(value.strip())
        return [value] if inside is None else inside
    if isinstance(value, dict):
        value = [value[key] for key in ANSWERS if key in value] or list(value.values())
    if isinstance(value, list | tuple):
        return [gold for one in value for gold in golds_of(one)]
    known = isinstance(value, int | float) and value == value
    return [str(value)] if known else []


def printed_list(text):
    """The entries of a printed list as texts; None if the text is not a printed list.

    A printed list has quotes, or words in square brackets; [1, 2] is an interval, (a, b) a tuple.
    """
    text = re.sub(r"^array\((.*?)(?:, *dtype=[^])]+)?\)$", r"\1", text, flags=re.DOTALL)
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
        flat = re.sub(rf"({QUOTED})|array\(|, *dtype=[^])]+|[\[\]()]",
                      lambda found: found[1] or " ", inside, flags=re.DOTALL)
        whole = re.fullmatch(rf"(?:{PRINTED.pattern})*\s*", flat, re.DOTALL)
        # not whole if an entry holds its own quote, as in ['O'Brien', 'x']
        parts = PRINTED.findall(flat) if whole else re.split(r"(?<=['\"])[\s,]+(?=['\"])", flat)
    parts = [part.strip() for part in parts]
    return [unquoted(part) for part in parts if part and part not in MISSING]


def unquoted(text):
    """The text in a Python string literal; a text without quotes as it is."""
    try:
        text = text.lstrip("ub") if text[-1] in "'\"" else text
        return ast.literal_eval(text).translate(LATEX) if text[0] in "'\"" else text
    except (ValueError, SyntaxError, MemoryError):
        return text[1:-1]
