r"""
Are two answers the same mathematics? 1/2 and 0.50, x=5 and 5, (1,2] and 1 < x \le 2, 5 m and 5 cm?

    (1) numbers  fractions exactly, irrational numbers as floats; expressions with letters at
                 several points (expression.py)
    (2) forms    sets, bare lists (any order), tuples, intervals and inequalities, matrices, ratios,
                 equations, numbers with units: compared part by part, a form with its like
    (3) words    compared as words
    (4) the rest what cannot be read here goes to math-verify, in a process that is killed after
                 SECONDS: it can hang, and its own time-out works in no thread [1]

Conventions: a unit, a degree sign or `x =` that only one side has is no difference, a percent sign
is (25% is 1/4). A rounded decimal is not the number it rounds; where the gold is a decimal, noise
of floating point (1e-9) is forgiven. Nothing here raises for any text or takes long for it.

Reads and writes nothing.   [1] github.com/huggingface/open-r1/issues/420

    python -c "from toolstar.mathematics import math_equal; print(math_equal('0.5', '1/2'))"
"""
import json
import math
import re
import warnings
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

from toolstar.expression import (
    BRACKETS,
    CLOSE,
    CLOSING,
    CONSTANTS,
    DEEPEST,
    GREEK,
    NAMES,
    POINTS,
    UNREADABLE,
    Expression,
    Setting,
    TooLarge,
    Unreadable,
    bounded,
    divide,
    letter,
    rational,
    tokens_of,
    unit_of,
    unmarked,
    untexted,
    words_of,
)

LONGEST, LONGEST_ASKED = 1000, 500  # characters of what is read here, and by math-verify
NOISE = 1e-9  # forgiven where the gold is a decimal
SIMPLE = 10**6  # denominators up to this are not the print of a float
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9,
          "trillion": 10**12}
SECONDS = 3  # for math-verify
RELATIONS = {"=": "=", "<": "<", r"\lt": "<", ">": ">", r"\gt": ">", "<=": "<=", r"\le": "<=",
             r"\leq": "<=", r"\leqslant": "<=", ">=": ">=", r"\ge": ">=", r"\geq": ">=",
             r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", "!=": "!=", r"\in": "in",
             r"\approx": "="}
# x, abc, \theta, x_1, f(x), f^{-1}(x), (x, y): what a side of an equation may merely name
HEAD = re.compile(r"\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?(?:\([^()]*\))?|"
                  r"\([a-z](?:,[a-z])+\)")
CLOCK = re.compile(r"\d{1,2}(?::\d\d\W*[ap]\.? ?| [ap]\.?)m\b|\d{4}-\d\d-\d\d$|\d\d?/\d\d?/\d{4}$")
CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])[.)])\s+\S")  # (A) 5, and what it says
GROUPS = ("(", "[", "{", r"\{", r"\langle", r"\begin")  # brackets that make a form
COMMA = re.compile(r"\d,\d{3}")
DEGREE = re.compile(r"\\circ|\u00b0|degree")


class Form(NamedTuple):
    """What was read, if it is more than a number; parts are numbers or forms."""
    kind: str  # list, set, tuple, union, matrix, row, ratio, quantity, =, <, <=, !=
    parts: tuple
    note: object = None  # a tuple's brackets, a quantity's dimensions, names of an equation's sides


# ---------------------------------------------------------------- forms
def parts_of(tokens, marks):
    """Tokens between marks that stand in no bracket -> (parts, the marks)."""
    parts, found, depth = [[]], [], 0
    for token in tokens:
        depth += (token in BRACKETS) - (token in CLOSING)
        if depth == 0 and token in marks:
            found.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


def statement(tokens, setting, depth=0):
    """What all of an answer says: relations with commas between them, or one."""
    if depth > DEEPEST:
        raise Unreadable
    items, commas = parts_of(tokens, {",", "\\\\", r"\lor", r"\vee", r"\land", r"\wedge"})
    if not commas:
        return relation(tokens, setting, depth)
    return Form("list", flat(relation(item, setting, depth) for item in items if item))


def flat(parts):
    """Parts, where a list among them (of a plus-minus) is its own parts."""
    return tuple(inner for part in parts
                 for inner in (part.parts if kind_of(part) == "list" else (part,)))


def kind_of(value):
    return value.kind if isinstance(value, Form) else "number"


def relation(tokens, setting, depth):
    """An equation, or an inequality; one that bounds a letter alone is the interval of it."""
    parts, marks = parts_of(tokens, RELATIONS)
    kinds = [RELATIONS[mark] for mark in marks]
    if not kinds:
        return union(tokens, setting, depth)
    if "in" in kinds:
        return union(parts[-1], setting, depth)
    names = ["".join(part) if is_name(part) else "" for part in parts]
    values = [letter(name, setting.point) if name else union(part, setting, depth)
              for name, part in zip(names, parts, strict=True)]
    if set(kinds) == {"="}:
        return Form("=", (values[0], values[-1]), (names[0], names[-1]))
    if ">" in kinds[0]:
        values, names = values[::-1], names[::-1]
        kinds = [kind.replace(">", "<") for kind in kinds[::-1]]
    if kinds == ["!="] and names[0] and not names[1]:
        return Form("union", (Form("tuple", (-math.inf, values[1]), "()"),
                              Form("tuple", (values[1], math.inf), "()")))
    if len(kinds) == 1 and kinds[0] != "!=" and bool(names[0]) != bool(names[1]):
        # x < 5 is -oo < x < 5
        if names[0]:
            values, names, kinds = [-math.inf, *values], ["", *names], ["<", *kinds]
        else:
            values, names, kinds = [*values, math.inf], [*names, ""], [*kinds, "<"]
    if len(kinds) == 2 and set(kinds) <= {"<", "<="} and names[1] and not names[0] + names[2]:
        brackets = ("[" if kinds[0] == "<=" else "(") + ("]" if kinds[1] == "<=" else ")")
        return Form("tuple", (values[0], values[2]), brackets)
    return Form(" ".join(kinds), tuple(values), tuple(names))


def is_name(part):
    """Is this side of a relation a letter, a word or the head of a function, as f(x)?"""
    text = "".join(part).replace('"', "")
    name = re.split(r"[(_'^]", text)[0].lstrip("\\")
    return bool(HEAD.fullmatch(text)) and name not in NAMES and name not in CONSTANTS


def union(tokens, setting, depth):
    """Intervals or sets with a cup between them, or one."""
    parts, marks = parts_of(tokens, {r"\cup"})
    if not marks:
        return group(tokens, setting, depth)
    return Form("union", tuple(group(part, setting, depth) for part in parts))


def group(tokens, setting, depth):
    """What one pair of brackets holds: a set, a tuple or interval, a matrix; else a number."""
    if tokens and tokens[0] in GROUPS and enclosed(tokens):
        first, inner, last = tokens[0], tokens[1:-1], tokens[-1]
        items = [item for item in parts_of(inner, {","})[0] if item]
        if first == r"\begin":
            return matrix(inner, setting, depth)
        if "{" in first and is_name(inner[:1]) and "".join(inner[1:2]) in ("|", r"\mid", ":"):
            return statement(inner[2:], setting, depth + 1)  # {x | x > 2}
        if first == r"\{" or first == "{" and len(items) > 1:
            return Form("set", flat(statement(item, setting, depth + 1) for item in items))
        one = len(items) == 1 and (first in ("(", "{") and last != "]" or items[0][0] == r"\begin")
        if not one:
            entries = tuple(statement(item, setting, depth + 1) for item in items)
            if entries and first == "[" and all(
                    kind_of(each) == "tuple" and each.note == "[]" for each in entries):
                return Form("matrix", tuple(Form("row", each.parts) for each in entries))
            return Form("tuple", entries, "()" if first == r"\langle" else first + last)
        if r"\over" not in inner:
            return statement(inner, setting, depth + 1)
    ratio, colons = parts_of(tokens, {":"})
    if colons:
        numbers = [quantity(part, setting) for part in ratio]
        if len(numbers) == 2:
            return divide(*numbers)
        return Form("ratio", tuple(divide(number, numbers[0]) for number in numbers))
    if r"\pm" in tokens or r"\mp" in tokens:
        return Form("list", (quantity(tokens, setting),
                             quantity(tokens, setting._replace(sign=-1))))
    return quantity(tokens, setting)


def enclosed(tokens):
    """Does the first bracket close with the last token? An interval's may differ: (1, 2]."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token in BRACKETS) - (token in CLOSING)
        if depth == 0:
            return at == len(tokens) - 1
    return False


def matrix(tokens, setting, depth):
    """Rows of cells, whatever the brackets around them."""
    rows = [row for row in parts_of(tokens, {"\\\\"})[0] if row]
    return Form("matrix", tuple(
        Form("row", tuple(statement(cell, setting, depth + 1) for cell in parts_of(row, {"&"})[0]))
        for row in rows))


def quantity(tokens, setting):
    """An expression, and behind it perhaps words of a unit."""
    end = next((at for at, token in enumerate(tokens) if at and token[0] == '"'), len(tokens))
    value = Expression(tokens[:end], setting).value()
    if end == len(tokens):
        return value
    words = [token.strip('"') for token in tokens[end:] if token not in "{}"]
    if not all(re.fullmatch(r"[A-Za-z.'-]+|[/^23*]", word) for word in words):
        raise Unreadable
    while words and words[0].lower() in SCALES:
        value = bounded(value * SCALES[words.pop(0).lower()])
    if not words:
        return value
    factor, dimensions = unit_of(words)
    return Form("quantity", (value, value * factor), dimensions)


# ---------------------------------------------------------------- equality
class Manner(NamedTuple):
    """How numbers are held against each other."""
    decimal: bool  # is the gold one, so that floats' noise is forgiven?
    letters: bool  # do the numbers stem from a point?


def same_number(a, b, manner):
    """Rational numbers exactly, others within the error of a few operations."""
    if rational(a) and rational(b):
        return a == b or manner.decimal and abs(a - b) <= NOISE * max(abs(a), abs(b))
    for value in (a, b):
        simple = not rational(value) or Fraction(value).denominator <= SIMPLE
        if not (simple or manner.letters or manner.decimal):
            return False  # 1.4142135623730951 is not the root of two
    if math.inf in (a, b) or -math.inf in (a, b):
        return a == b
    size = max(abs(complex(a)), abs(complex(b)))
    error = abs(complex(a) - complex(b))
    return error <= (NOISE if manner.decimal else CLOSE) * size or (0 in (a, b) and size < 1e-12)


def same(a, b, manner):
    """Are two readings at one point the same?"""
    kinds = {kind_of(a), kind_of(b)}
    if kinds == {"number"}:
        return same_number(a, b, manner)
    if len(kinds) == 2:
        for one, other in ((a, b), (b, a)):
            less = without_form(one)
            if less is not None and kind_of(other) not in ("=", kind_of(one)):
                return same(less, other, manner) if one is a else same(other, less, manner)
    if kinds == {"quantity"}:
        return a.note == b.note and same_number(a.parts[1], b.parts[1], manner)
    if kinds <= {"list", "set", "union"}:
        return same_bag(a, b, manner)
    plain = kinds == {"list", "tuple"} and not {"(]", "[)"} & {a.note, b.note}
    if len(kinds) == 2 and not plain or len(a.parts) != len(b.parts):
        return False
    if kinds == {"tuple"} and a.note != b.note:
        return False
    return all(same(x, y, manner) for x, y in zip(a.parts, b.parts, strict=True))


def without_form(value):
    """What remains when `x =`, a unit or the braces around one number go; None if nothing can."""
    kind = kind_of(value)
    if kind == "=":
        left, right = value.note
        whole = left or value.parts[0] == value.parts[1]  # 2^3 = 8
        return value.parts[1] if whole else value.parts[0] if right else None
    if kind == "quantity" or kind in ("set", "list") and len(value.parts) == 1:
        return value.parts[0]
    return None


def same_bag(a, b, manner):
    """Lists in any order, each part as often; sets without regard to repeats."""
    if "set" in (a.kind, b.kind):
        pairs = ((a.parts, b.parts, False), (b.parts, a.parts, True))
        return all(any(same(y, x, manner) if turned else same(x, y, manner) for y in others)
                   for these, others, turned in pairs for x in these)
    rest = list(b.parts)
    for x in a.parts:
        at = next((at for at, y in enumerate(rest) if same(x, y, manner)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def same_relation(a, b, manner):
    """Relations as functions of the point: one side less the other, up to a constant factor."""
    first = [left - right for left, right in (form.parts for form in a)]
    second = [left - right for left, right in (form.parts for form in b)]
    if 0 in (first[0], second[0]):
        return False
    ratio = divide(first[0], second[0])
    positive = a[0].kind in ("=", "!=") or complex(ratio).real > 0
    return positive and all(same_number(x, y * ratio, manner)
                            for x, y in zip(first[1:], second[1:], strict=True))


@lru_cache(4096)
def readings(text, commas, radians):
    """The forms of a text at every point (one point where it has no letters)."""
    tokens = tokens_of(text, commas)
    letters = any(token.strip('"').isalpha() or token[1:] in GREEK for token in tokens)
    return [statement(tokens, Setting(point, radians))
            for point in range(POINTS if letters else 1)]


def same_as_read(a, b, commas, radians):
    """Are both equal if read in this way? Raises what UNREADABLE names."""
    decimal = re.fullmatch(r"[-+]?\d*\.\d+", unmarked(b)) is not None
    a, b = readings(a, commas, radians), readings(b, commas, radians)
    points = max(len(a), len(b))
    manner = Manner(decimal, points > 1)
    a, b = (forms if len(forms) == points else forms * points for forms in (a, b))
    kind = kind_of(a[0])
    # an equation may be turned and multiplied, which shows at several points only
    if kind in RELATIONS.values() and all(
            kind_of(form) == kind and {*map(kind_of, form.parts)} == {"number"} for form in a + b):
        return same_relation(a, b, manner)
    return all(same(x, y, manner) for x, y in zip(a, b, strict=True))


def squeezed(text):
    """A text without blanks and what is around it."""
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(unmarked(text).split()))


def clock_of(text):
    """A time or date, which is no ratio and no difference; else None."""
    text = untexted(text).lower().strip()
    return re.sub(r"[\s.]", "", text) if CLOCK.match(text) else None


def same_tokens(a, b):
    """Are two texts the same but for spelling, and a name that only one gives its value?"""
    a, b = tokens_of(a, commas=True), tokens_of(b, commas=True)
    if ("=" in a) != ("=" in b):
        a, b = (tokens[tokens.index("=") + 1:] if "=" in tokens
                and is_name(tokens[:tokens.index("=")]) else tokens for tokens in (a, b))
    return folded(a) == folded(b)


def folded(tokens):
    """Tokens as one text, their words in lower case."""
    text = " ".join(token.lower() if token[0] == '"' else token for token in tokens)
    return re.sub(r"mod \{ (\S+) \}", r"mod \1", text)  # as TeX reads it


def same_words(a, b):
    """True or False where one of the texts is words alone; None where letters may be numbers."""
    first, second = words_of(a), words_of(b)
    for text, other in ((a, second), (b, first)):
        chosen = CHOICE.match(untexted(text).strip())
        if chosen and other and len(other) == 1:
            return (chosen[1] or chosen[2]).lower() == other
    one_letter = first and len(first) == 1 and a.isalpha() and b.isalpha()  # x is not X
    if first and first == second and not one_letter:
        return True
    # beside another word three letters are one, too: ten is not net
    word = r"[^\W\d_]{3}" if first and second else r"[^\W\d_]{4}"
    return False if any(re.search(word, words or "") for words in (first, second)) else None


def exactly_equal(a, b):
    """Two texts: True or False by the rules of this file, None where one cannot be read."""
    if max(len(a), len(b)) > LONGEST:
        return a.strip() == b.strip()
    if squeezed(a) == squeezed(b):
        return True
    if not squeezed(a) or not squeezed(b):
        return False
    if same_tokens(a, b):
        return True
    if clock_of(a) or clock_of(b):
        return clock_of(a) == clock_of(b)
    verdict = same_words(a, b)
    if verdict is not None:
        return verdict
    both = a + b
    for commas in (True, False) if COMMA.search(both) else (True,):
        for radians in (False, True) if DEGREE.search(both) else (False,):
            try:
                if same_as_read(a, b, commas, radians):
                    return True
                verdict = False
            except TooLarge:
                return False
            except UNREADABLE:
                continue
    return False if words_of(a) and words_of(b) else verdict


def readable(text):
    """Can this text be read here?"""
    try:
        return len(text) <= LONGEST and bool(readings(text, commas=True, radians=False))
    except UNREADABLE:
        return False


def is_mathematics(text):
    """Is this gold mathematics, and no word, date or time?"""
    return readable(text) and not words_of(text) and not clock_of(text)


def math_equal(a, b):
    """Is answer a the mathematics of gold b? Texts, numbers or None -> bool; raises for none."""
    if a is None or b is None:
        return a is b
    a, b = str(a), str(b)
    verdict = exactly_equal(a, b)
    if verdict is not None:
        return verdict
    return all(worth_asking(text) for text in (a, b) if not readable(text)) and verified(a, b)


def worth_asking(text):
    """Might math-verify read this? It takes its time, which prose and torn braces are not worth."""
    whole = len(text) <= LONGEST_ASKED and text.count("{") == text.count("}")
    return whole and "\\" in untexted(text)


# ---------------------------------------------------------------- math-verify
# What a model wrote comes as data: a LaTeX parser reads it, and nothing runs it.
PROGRAM = """
import json, sys
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
texts = json.load(sys.stdin)
read = [parse("$" + text.strip("$ ") + "$", [LatexExtractionConfig()], parsing_timeout=None)
        for text in texts]
same = all(read) and verify(read[1], read[0], float_rounding=10, timeout_seconds=None)
print("true" if same else "false")
"""


@cache
def verifier():
    """A jail with math-verify in it, opened when it is first needed; None where there is none.

    Without bubblewrap a plain process does, for all that is asked of it is that it can be killed.
    """
    from toolstar.jail import Jail, JailError

    for unsafe in (False, True):
        try:
            return Jail(workers=1, preload=("math_verify",), unsafe=unsafe, seconds=SECONDS)
        except JailError as error:
            cause = error
    warnings.warn(f"no math-verify, so what cannot be read is wrong: {cause}", stacklevel=2)
    return None


@lru_cache(4096)
def verified(a, b):
    """What math-verify says; False where it fails, is killed or is not there."""
    jail = verifier()
    result = jail and jail.run(PROGRAM, stdin=json.dumps([a, b]))
    return bool(result) and result.status == "ok" and result.stdout.strip() == "true"
