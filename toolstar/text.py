r"""
Compare answers as text: normalised, or by the words that they share.

    normalize  SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks
    token_f1   the best F1 of shared words over the golds, as in Tool-Star's reward [1]
    same_text  whether an answer equals a gold after normalisation; a gold that normalises to
               nothing, such as the choice A, is compared without normalisation

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
