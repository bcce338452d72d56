r"""
Compare answers as text, normalised or by the words that they share, and find right answers in data.

    normalize  SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks
    token_f1   the best F1 of shared words over the golds, as in Tool-Star's reward [1]
    same_text  whether an answer equals a gold after normalisation; a gold that normalises to
               nothing, such as the choice A, is compared without normalisation
    golds_of   the right answers in a text, a number, a list, nested lists, or a list that was
               printed with or without commas: ['Paris' 'City of Paris'], ["a", "b"]

Reads and writes nothing.   [1] Tool-Star, arXiv:2505.16410

    python -c "from toolstar.text import token_f1; print(token_f1('New York City', ['New York']))"
"""
import re
import string
from collections import Counter

VERDICTS = {"yes", "no", "noanswer"}  # in token_f1 these count only as the whole answer
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WORDS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
MARKS = re.compile(r"(?<!\\)\\[\[\]()]|(?<!\\)\$")
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
# what a printed list holds between its quoted entries: brackets, missing entries, numpy's words
BETWEEN = re.compile(r"(?:[\s,\[\](){}]|\b(?:None|nan|array|dtype=object)\b)*")



def normalize(text):
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks."""
    text = text.lower().translate(WITHOUT_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", text).split())


def same_text(answer, gold):
    """Whether an answer equals a gold after normalisation."""
    if plain := normalize(gold):
        return normalize(answer) == plain
    return answer.strip(" .()").lower() == gold.strip(" .()").lower()


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
    if isinstance(value, dict):  # Search-R1's {"target": [..]}, TriviaQA's {"value", "aliases"}
        known = [value[key] for key in ("target", "value", "aliases") if key in value]
        value = known or list(value.values())
    if isinstance(value, str):
        inside = printed_list(value.strip())
        return [value] if inside is None and value.strip() not in ("", "nan") else inside or []
    if isinstance(value, list | tuple):
        return [gold for one in value for gold in golds_of(one)]
    known = isinstance(value, int | float) and value == value  # not NaN
    return [str(value)] if known else []


def printed_list(text):
    """The entries of a list of quoted texts that was printed; None if the text is no such list."""
    text = text.removeprefix("array(")
    if text[:1] not in ("[", "{", "(") or not BETWEEN.fullmatch(QUOTED.sub(" ", text)):
        return None
    found = [one or other for one, other in QUOTED.findall(text)]
    # no other escapes: in a list printed by hand, \f and \t begin \frac and \theta
    return [re.sub(r"\\(['\"\\])", r"\1", entry) for entry in found]
