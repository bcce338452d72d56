r"""
Answers as text: the form in which they are compared, and the words that two of them share.

    normalize  SQuAD's form: lower case, no ASCII punctuation, no articles, single blanks
    token_f1   the best F1 of shared words over the golds, as Tool-Star's reward has it [1]
    same_text  is the answer this gold, once both are normalized? A gold that normalizes to nothing,
               such as the choice A, is compared as it stands

Reads and writes nothing.   [1] Tool-Star, arXiv:2505.16410

    python -c "from toolstar.text import token_f1; print(token_f1('New York City', ['New York']))"
"""
import re
import string
from collections import Counter

VERDICTS = ("yes", "no", "noanswer")  # count only as a whole in token F1
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WORDS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
MARKS = re.compile(r"(?<!\\)\\[\[\]()]|(?<!\\)\$")


def normalize(text):
    """SQuAD's form of an answer: lower case, no ASCII punctuation, no articles, single blanks."""
    text = text.lower().translate(WITHOUT_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", text).split())


def same_text(answer, gold):
    """Is this answer the gold?"""
    if plain := normalize(gold):
        return normalize(answer) == plain
    return answer.strip(" .()").lower() == gold.strip(" .()").lower()


def token_f1(prediction, golds):
    """The best F1 of shared words over the golds; yes, no and noanswer count only when equal."""
    said, golds = normalize(prediction), golds if isinstance(golds, list | tuple) else [golds]
    golds = [str(gold) for gold in golds if isinstance(gold, str | int | float)]
    return max((strict_f1(said, normalize(gold)) for gold in golds), default=0.0)


def strict_f1(said, gold):
    """F1 of two normalized texts, where a verdict is not shared in part."""
    if said != gold and (said in VERDICTS or gold in VERDICTS):
        return 0.0
    return words_f1(said, gold)


def words_f1(said, gold):
    """F1 of the words of two normalized texts."""
    said, gold = said.split(), gold.split()
    same = sum((Counter(said) & Counter(gold)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def untexted(text):
    r"""A text without marks of mathematics, the words of its \text{...} bare."""
    return WORDS.sub(r" \1 ", MARKS.sub("", text)).strip()


def truncate(text, limit=400):
    """Text of at most limit characters and three dots: its first and its last half [1]."""
    half = limit // 2
    return text if len(text) <= limit else text[:half] + "..." + text[-half:]
