r"""
Compare answers as text, normalised or by the words that they share, and find right answers in data.

    normalize  SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks
    token_f1   the best F1 of shared words over the golds, as in Tool-Star's reward [1]
    same_text  whether an answer equals a gold after normalisation; of a gold that normalises to
               nothing, such as the choice A or a plus sign, articles or all is compared
    golds_of   the right answers in a text, a number, a list, an object, or a list that was printed
               with or without commas: ['Paris' 'City of Paris'], ["a", "b"]

Reads and writes nothing.   [1] Tool-Star, arXiv:2505.16410

    python -c "from toolstar.text import token_f1; print(token_f1('New York City', ['New York']))"
"""
import ast
import json
import math
import re
import string
from collections import Counter

VERDICTS = {"yes", "no", "noanswer"}  # in token_f1 these count only as the whole answer
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WORDS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
MARKS = re.compile(r"(?<!\\)\\[\[\]()]|(?<!\\)\$")
MISSING = {"", "nan", "NaN", "None", "<NA>", "null"}  # how csv files and printed lists say nothing
NO_ENTRY = MISSING | {"...", "NaT", "inf", "-inf", "Infinity", "-Infinity"}
QUOTED = r"[ub]?'(?:[^'\\]|\\.)*+'|[ub]?\"(?:[^\"\\]|\\.)*+\""
ENTRY = re.compile(rf"{QUOTED}|[^\s,'\"()\[\]{{}}]++", re.DOTALL)
LIST = re.compile(rf"[\s,()\[\]{{}}]*+(?:(?:{ENTRY.pattern})(?:[\s,()\[\]{{}}]++|$))*+", re.DOTALL)
WHOLE = re.compile(r"-?\d+\.0*")  # a whole number that was stored as a float


def normalize(text):
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks."""
    text = text.lower().translate(WITHOUT_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", text).split())


def same_text(answer, gold):
    """Whether an answer equals a gold after normalisation."""
    if plain := normalize(gold):
        return normalize(answer) == plain
    said, plain = (text.lower().translate(WITHOUT_PUNCTUATION).strip() for text in (answer, gold))
    return said == plain if plain else answer.strip() == gold.strip()


def token_f1(prediction, golds):
    """The best F1 of shared words over the golds, in [0, 1]; for yes, no and noanswer 0 or 1.

    golds: a text or a list; entries that are no text or number are ignored.
    """
    said, golds = normalize(prediction), golds if isinstance(golds, list | tuple) else [golds]
    golds = [str(gold) for gold in golds if isinstance(gold, str | int | float)]
    golds = [gold for gold in map(normalize, golds) if said == gold or not {said, gold} & VERDICTS]
    return max((words_f1(said, gold) for gold in golds), default=0.0)


def words_f1(said, gold):
    """F1 of the words of two normalised texts."""
    said, gold = said.split(), gold.split()
    same = sum((Counter(said) & Counter(gold)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def untexted(text):
    r"""A text without math delimiters and with \text{...} replaced by its content."""
    return WORDS.sub(r" \1 ", MARKS.sub("", text)).strip()


def truncate(text, limit=400):
    """The text if it has at most `limit` characters, else its first and last limit / 2 characters
    with three dots in between [1]."""
    half = limit // 2
    return text if len(text) <= limit else text[:half] + "..." + text[-half:]


def golds_of(value):
    """The right answers in a value, as a list of texts, which may be empty."""
    if isinstance(value, str) and re.match(r"\{\s*['\"]\w+['\"]\s*:", value):
        value = printed_object(value)
    if isinstance(value, dict):  # of Search-R1, TriviaQA (value, aliases), SQuAD (text)
        known = [value[key] for key in ("target", "value", "aliases", "text") if key in value]
        value = known or list(value.values())
    if isinstance(value, list | tuple):
        return [gold for one in value for gold in golds_of(one)]
    if isinstance(value, str):
        inside = printed_list(value.strip())
        return inside if inside is not None else [value] if value.strip() not in MISSING else []
    known = isinstance(value, int | float) and math.isfinite(value)
    return [unquoted(str(value))] if known else []


def printed_object(text):
    """The dict in a text of JSON or Python; {} if it cannot be read."""
    for load in json.loads, ast.literal_eval:
        try:
            return dict(load(text))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return {}


def printed_list(text):
    """The entries of a list that was printed, by Python, JSON, numpy or hand; None if the text is
    no such list: [1, 2] is an interval, (a, b) a tuple."""
    text = re.sub(r"\barray\(|, *dtype=[^])]*", lambda found: "(" * (found[0][-1] == "("), text)
    if not re.fullmatch(r"\(*\[.*\]\)*|[({]\s*[ub]?['\"].*[)}]", text, re.DOTALL):
        return None
    if not re.search(QUOTED, text, re.DOTALL):
        parts = [part.strip() for part in text.strip("[]()").split(",")]
        number = len(parts) == 1 and re.fullmatch(r"-?\d+(\.\d*)?", parts[0])
        words = re.search(r"[^\W\d_]{3}", text) and not re.search(r"[\\(){}]", text)
        if not (number or words or NO_ENTRY.issuperset(" ".join(parts).split())):
            return None
    elif LIST.fullmatch(text):
        parts = ENTRY.findall(text)
    else:  # an entry holds the quote that ends it
        parts = re.split(r"(?<=['\"])[\s,;]+(?=['\"])", text.strip("[](){} \n"))
        if not all(re.fullmatch(r"(['\"]).*\1", part, re.DOTALL) for part in parts):
            return None
    return [unquoted(part) for part in parts if part not in NO_ENTRY]


def unquoted(entry):
    r"""An entry without its quotes. No other escape than those of quotes is read: in a list that
    was printed by hand, \f and \t begin \frac and \theta."""
    if entry[-1] not in "'\"":
        return entry.partition(".")[0] if WHOLE.fullmatch(entry) else entry
    return re.sub(r"\\(['\"\\])", r"\1", entry.lstrip("ub")[1:-1])
