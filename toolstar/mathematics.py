r"""
Decide whether two answers are the same mathematics: a normaliser in front of math-verify [1].

    (1) tidy     bring signs, brackets and numbers of both texts into one spelling
    (2) refuse   an answer that is costly to compute where its gold is not, such as 9^{9^9}
    (3) answers  compare choices (C: 5 equals both C and 5), words and times
    (4) same     compare lists, sets, tuples, intervals and ratios part by part, quantities in the
                 same unit, and plain numbers as fractions
    (5) verify   math-verify compares all other parts
    (6) fork     all this happens in a process of its own for each pair, forked from a server that
                 has read no other pair: no verdict depends on another one. The only limit is CPU
                 time, far above what honest pairs need on any machine

A unit, a degree sign or `x =` that only one side has is ignored. A percent sign is not: 25% equals
1/4, not 25. A rounded decimal does not equal the number that it rounds, but if the gold is a
decimal, a difference of 1e-9 (the noise of floating point) is ignored.

Reads and writes nothing.   [1] github.com/huggingface/Math-Verify

    python -c "from toolstar.mathematics import math_equal; print(math_equal('0.5', '1/2'))"
"""
import gc
import json
import logging
import os
import queue
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path

SECONDS = 5.0  # of CPU time for a pair; honest ones need up to 0.2, on a busy machine 0.5
MEMORY = 2 * 2**30  # bytes for a pair
LONGEST = 1000  # characters; a longer text equals only an identical one
NOISE = Fraction(1, 10**9)  # relative difference that is ignored if the gold is a decimal

# ---------------------------------------------------------------- (1) one spelling
SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "∈": r"\in ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "√": r"\sqrt ", "∅": r"\{\}", "²": "^2", "³": "^3", "~": " ",
    "\u00a0": " ", "\u202f": " ", "\u3000": " "} | {
        chr(0xff01 + i): chr(0x21 + i) for i in range(93)})  # full-width signs and digits
COMMANDS = {"langle": "(", "rangle": ")", "lbrace": r"\{", "rbrace": r"\}", "mid": "|", "vert": "|",
            "lvert": "|", "rvert": "|", "emptyset": r"\{\}", "varnothing": r"\{\}", "degree": "°",
            "dfrac": r"\frac", "tfrac": r"\frac", "times": r"\cdot", "lor": ";",
            "land": ";", "displaystyle": "", "limits": ""}
FORMS = [(re.compile(pattern), new) for pattern, new in (
    (r"(?s)^[\s$]*\\boxed\s*\{(.*)\}[\s$.]*$", r"\1"),
    (r"\\([a-z]+)", lambda found: COMMANDS.get(found[1], found[0])),
    (r"\\\\\s*\[[^\]]*\]", r"\\\\"),  # a line break with a height: \\[4pt]
    (r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|[mh]box|operatorname) *\{([^{}]*)\}", r" \1 "),
    (r"(?<!\\)\\[\[\]()!]|(?<!\\)\$|\\(?:left|right|[bB]igg?[lr]?|boxed)(?![a-z])\.?", ""),
    (r"\\q?quad(?=[^=]*=)|\b(?:and|or)\b", ";"),  # x=5 \quad x=6
    (r"(?<!\\)\\[,;: ]|\\q?quad\b", " "),
    (r"\\mathbb *\{?R\}?", r"(-\\infty ,\\infty )"),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),  # (1,2)U(3,4)
    (r"\*\*", "^"), (r"\*", r"\\cdot "),
    (r"\^ *\{? *\\circ *\}?|(?<=[\d}) ])degrees?\b", "°"),
    (r"(\\(?:sin|cos|tan|cot|sec|csc) *)\(?(\d+) *° *\)?", r"\1{\\frac{\2\\pi }{180}}"),
    (r"\\?%|\bper ?cent(?:age)?\b|(?<=[\d}]) +(?:dozen|(?:hundred|thousand|[mbt]r?illion)s?)\b",
     lambda found: SCALES.get(found[0].strip().rstrip("s"), r"\cdot \frac{1}{100} ")),
    (r"(?<![\\a-zA-Z])(sin|cos|tan|ln|log|exp|pi)(?![a-z])", r"\\\1 "),
    (r"(?<![a-zA-Z])oo(?![a-zA-Z])", r"\\infty "),  # infinity as sympy prints it
    (r"(?i)^\s*(?:so )?the (?:final )?answer is:?", ""),
    (r"\\?(?<![a-z])sqrt *\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt *\[3\] *\{ *-", r"-\\sqrt[3]{"),  # the real root
    (r"\\pmod *(\d+)", r"\\pmod{\1}"),
    (r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),  # 10{,}000
    (r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d.,/]?\d)", lambda found: found[0].replace(" ", "")),
    (r"(?<![\w.])(\d+\.?\d*)[eE]([+-]?\d{1,3})(?!\w)", r"\1\\cdot 10^{\2}"),  # 1e-3
    (r"(?<![\d./^_])(\d+) +(\d+) ?/ ?(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"\(?(?<![\w}])([\dA-F]+) *\)?_ *\{? *\(?(\w+)\)? *\}?(?!\w)", lambda found: based(found)),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot) *\{?(\d+)\}?", lambda found: recurring(*found.groups())),
    (r"(?:[Mm]atrix\()?\[((?:\[[^\[\]]*\],? *)+)\]\)?", lambda found: matrix(found[1])),
)]
SCALES = {name: rf"\cdot {size} " for name, size in (
    ("dozen", 12), ("hundred", 100), ("thousand", 1000), ("million", 10**6), ("billion", 10**9),
    ("trillion", 10**12))}
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}


def tidy(text):
    r"""A text in one spelling, with \text{...} replaced by its content."""
    text = text.translate(SIGNS)
    for pattern, new in FORMS:
        text = pattern.sub(new, text)
    return " ".join(text.split()).rstrip(" .")


def based(found):
    """The decimal number of a match such as 1010_2; the match itself if it is not one."""
    digits, base = found[1], BASES.get(found[2], found[2])
    try:
        return str(int(digits, int(base))) if re.search(r"\d|\w\w", digits) else found[0]
    except ValueError:
        return found[0]


def recurring(ones, fixed, digits):
    """The fraction of a recurring decimal: ones "0", fixed "1" and digits "6" are 0.1666..."""
    nines = 10 ** len(digits) - 1
    top = int(ones + fixed or 0) * nines + int(digits)
    return rf"\frac{{{top}}}{{{nines * 10 ** len(fixed)}}}"


def matrix(rows):
    """The LaTeX of a matrix, from rows as Python prints them: [1, 2], [3, 4]."""
    rows = r"\\ ".join(row.replace(",", "&") for row in re.findall(r"\[([^\]]*)\]", rows))
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"


def without_blanks(text):
    """A text without blanks, except those between two digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


# ---------------------------------------------------------------- (2) what is costly
COSTLY = [re.compile(pattern) for pattern in (
    r"\^[{( -]*\d+ *\^[{( -]*\d",  # towers of powers: 9^{9^9}
    r"\^[{( -]*\d{4}",  # long exponents: x^{2024}
    r"\d{4}[)} ]*!|![)} ]*!",  # large factorials: 9999!, (9!)!
    r"\\binom *\{?[^{}]*(?:\^|\d{5})",  # \binom{10^9}{10^8}
    r"\\(?:sum|prod|i*nt|oint|lim)(?![a-z])",
    r"(?:\{[^{}]*){9}|(?:[(\[][^()\[\]]*){13}",  # deep nesting
    r"(?:\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp)[ {(]*){4}")]  # \sin\sin\sin\sin x


# ---------------------------------------------------------------- (3) answers
CLOCK = re.compile(r"\d{1,2}(?::\d\d\W*[ap]\.? ?| [ap]\.?)m\b|\d{4}-\d\d-\d\d$|\d\d?/\d\d?/\d{4}$",
                   re.IGNORECASE)
CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:、]\)?) *(.*)|([A-J])", re.DOTALL)
WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")


def answers_equal(a, b):
    """Whether answer a equals gold b, as a choice, words, a time or mathematics."""
    a, b = tidy(a), tidy(b)
    if not a or not b:
        return False
    (letter, text), (other, gold) = choice(a), choice(b)
    if letter and other:
        return letter == other and (not text or not gold or answers_equal(text, gold))
    if text != a and text or gold != b and gold:
        return answers_equal(text or a, gold or b)
    if CLOCK.match(a) or CLOCK.match(b):
        return re.sub(r"[\s.]", "", a.lower()) == re.sub(r"[\s.]", "", b.lower())
    words = [WORDS.fullmatch(text.rpartition("=")[2].strip(" ().")) for text in (a, b)]
    if all(words) and max(len(found[0]) for found in words) > 1:
        first, second = ([word[0].lower() + word[1:] for word in found[0].split()]
                         for found in words)
        return first == second  # Tuesday is tuesday; AB is not ab
    if any(each.search(a) and not each.search(b) for each in COSTLY):
        return False
    merged = [COMMAS.sub(lambda found: found[0].replace(",", ""), text) for text in (a, b)]
    return same(*merged) or merged != [a, b] and same(a, b)


def choice(text):
    """(letter, text after it) of a choice such as "(C) 5"; ("", text) of any other text."""
    found = CHOICE.fullmatch(text)
    return (found[1] or found[3], found[2] or "") if found else ("", text)


# ---------------------------------------------------------------- (4) numbers and units
NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?: ?/ ?(\d+))?")
UNITS = {name: (dimension, Fraction(size)) for dimension, sizes in {
    "length": "mm 1 cm 10 dm 100 m 1000 km 1000000 centimeter 10 meter 1000 kilometer 1000000 "
              "in 25.4 inch 25.4 ft 304.8 foot 304.8 feet 304.8 yard 914.4 mi 1609344 mile 1609344",
    "time": "s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800",
    "mass": "mg 1 g 1000 gram 1000 kg 1000000 kilogram 1000000 lb 453592.37 pound 453592.37",
    "volume": "ml 1 mL 1 l 1000 L 1000 liter 1000", "money": "cent 1 dollar 100", "angle": "° 1",
    }.items() for name, size in re.findall(r"(\S+) ([\d.]+)", sizes)}
ANGLE = {"angle": 1}
WORD = r"([a-zA-Z]++|[°/])\.?(?: ?\^ ?\{?(-?\d)\}?)?(?: ?\\cdot)?"
TAIL = re.compile(rf"(?:(?<=[\d)}}}}|]) ?|(?<=[a-z]) )((?:{WORD} ?)+)$")


def number(text):
    """The Fraction of a plain number; None for any other text."""
    found = NUMBER.fullmatch(text.strip("(){} "))
    return Fraction(found[1]) / int(found[2] or 1) if found and int(found[2] or 1) else None


def quantity(text):
    """(value, size, dimensions) of a text: 5 km^2 is "5", 10^12, {"length": 2}.

    An unknown word is a unit with a dimension of its own.
    """
    text = re.sub(r"^(-?) ?\\\$ ?(.*)$", r"\1\2 dollar", text).replace("mph", "mile / h")
    found = TAIL.search(text)
    words = re.findall(WORD, found[1]) if found else []
    short = {word for word, _ in words if len(word) < 3 and word not in UNITS} - {*"C/", "sq", "of"}
    if not words or short or found[0][0] != " " and re.fullmatch("[a-zA-Z]", words[0][0]):
        return text, 1, {}
    size, dimensions, sign, power = Fraction(1), Counter(), 1, 1
    for word, exponent in words:
        if word in ("/", "per"):
            sign = -1
        elif word in ("square", "sq", "cubic") and len(words) > 1:
            power = 3 if word == "cubic" else 2
        else:
            names = [name for name in (word, word.removesuffix("s"), word.removesuffix("es"))
                     if name in UNITS]
            dimension, one = UNITS[names[0]] if names else (word.lower().removesuffix("s"), 1)
            times, power = sign * int(exponent or power), 1
            dimensions[dimension] += times
            size *= Fraction(one) ** times
    return text[:found.start()], size, {name: times for name, times in dimensions.items() if times}


# ---------------------------------------------------------------- (4) parts
SET = "{}"
TOKEN = re.compile(r"\\begin *\{\w+\}|\\end *\{\w+\}|\\[a-zA-Z]+ ?|\\.|.", re.DOTALL)
RELATION = re.compile(r"[<>|]|\\(?:l|g|n)eq?\b|\\(?:[lg]eqslant|[lg]t|in)\b")
# the left side of a definition: x, \theta, x_1, f(x), f^{-1}(x), (x, y), the area
NAME = re.compile(r"\\?[A-Za-z]+'*(?:_ ?\{?[^{}=]+\}?)?(?:\^\{-1\})?(?: ?\([^()]*\))?|[A-Za-z ]*|"
                  r"\([a-z](?:, ?[a-z])+\)")


def levels(text):
    """Yield each token of a text with the number of brackets that are open after it."""
    depth = 0
    for token in TOKEN.findall(text):
        depth += token.startswith(("(", "[", "{", "\\{", "\\begin"))
        depth -= token.startswith((")", "]", "}", "\\}", "\\end"))
        yield token, depth


def split(text, *marks):
    """The parts of a text between marks; marks inside of brackets do not count."""
    parts = [""]
    for token, depth in levels(text):
        if depth == 0 and token.strip() in marks:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def items(text):
    """The entries of a list without brackets."""
    return [part for part in split(text, ",", ";", "\\\\") if part]


def kind_and_parts(text):
    r"""(kind, parts) of a text: kind "list", SET, ":" for a ratio, the brackets of a tuple or an
    interval such as "(]", or "" for anything else."""
    if len(parts := items(text)) > 1:
        return "list", parts
    text = "".join(parts)
    if re.search(r"\\pm\b", text):
        return "list", [re.sub(r"\\pm\b ?", sign, text) for sign in "+-"]
    tokens = list(levels(text))
    if tokens and tokens[0][1] > 0 == tokens[-1][1] and all(depth for _, depth in tokens[:-1]):
        first, last = tokens[0][0], tokens[-1][0]
        inside = text[len(first):-len(last)].strip()
        if first == "\\{" and len(defined := split(inside, "|", ":")) == 2:
            return kind_and_parts(defined[1])  # {x | x > 2}
        if first.endswith("{") and len(items(inside)) != 1:  # a set of one tuple is that tuple
            return SET, items(inside)
        if not first.startswith("\\begin"):
            many = len(items(inside)) > 1 or first == "[" and not inside.startswith("\\begin")
            return (first + last, items(inside)) if many else kind_and_parts(inside)
    if len(ratio := split(text, ":")) > 1:
        return ":", [rf"\frac{{{part}}}{{{ratio[-1]}}}" for part in ratio[:-1]]
    return "", [text]


def value_of(text, loose):
    r"""The value in x = 5, 5 = x, x \approx 5 or x \in 5. loose: the last side of any equation."""
    before, *after = re.split(r"\\(?:approx|simeq) ?", text)
    text = after[0] if after and NAME.fullmatch(before.strip()) else before
    sides = split(text, "=") if "=" in text or "|" in text else split(text, "\\in")
    named = NAME.fullmatch(sides[0]) or loose and not RELATION.search(text)
    return sides[-1] if named else text


# ---------------------------------------------------------------- (4) equality
def same(a, b):
    """Whether answer a equals gold b. Both are tidy."""
    if without_blanks(a) == without_blanks(b):
        return True
    if max(len(items(a)), len(items(b))) < 2:
        left, right = split(a, "="), split(b, "=")
        if min(len(left), len(right)) > 1 and left[0] != right[0]:
            return verify(a, b)  # two equations
        plain = [not re.search(r"[a-zA-Z]", re.sub(r"\\(?:frac|sqrt|cdot|pi)", "", text))
                 for text in (a, b)]
        if any(number and len(sides) > 1 and not same(sides[0], sides[-1])
               for number, sides in zip(plain, (left, right), strict=True)):
            return False  # 2^3 = 9
        a, b = value_of(a, len(right) == 1), value_of(b, plain[1])
    (kind, parts), (other, others) = kind_and_parts(a), kind_and_parts(b)
    a, b, kinds = a if kind else parts[0], b if other else others[0], {kind, other}
    if kinds == {""}:
        return same_part(a, b)
    if "" in kinds and "list" not in kinds and RELATION.search(a + b):
        return verify(a, b)  # 1 < x < 2 and (1, 2)
    if kinds <= {"list", SET, ""}:
        return same_in_any_order(parts, others, SET in kinds)
    named = "=" in "".join(parts if kind == "list" else others)  # x = 1, y = 2 is (1, 2)
    alike = len(kinds) == 1 or kinds == {":", ""} or kinds == {"list", "()"} and named
    return alike and len(parts) == len(others) and all(map(same, parts, others))


def same_in_any_order(parts, others, sets):
    """Whether two lists have the same parts in any order; sets ignore how often a part occurs."""
    # a union of intervals is a list of them: x < 1 or x > 2
    parts, others = (row if len(row) > 1 else split(row[0], "\\cup") if row else []
                     for row in (parts, others))
    if sets:
        return (all(any(same(x, y) for y in others) for x in parts)
                and all(any(same(x, y) for x in parts) for y in others))
    rest = list(others)
    for x in parts:
        found = next((y for y in rest if same(x, y)), None)
        if found is None:
            return False
        rest.remove(found)
    return not rest


def same_part(a, b):
    """Whether two parts are the same number, expression, relation or quantity."""
    (a, size, unit), (b, other_size, other_unit) = quantity(a), quantity(b)
    if unit and other_unit and unit != other_unit:
        return False
    ratio = size / other_size if unit and other_unit else 1
    first, second = number(a), number(b)
    if first is not None and second is not None:
        first *= ratio
        return first == second or "." in b and abs(first - second) <= NOISE * abs(second)
    if "\\pi" in a + b and ANGLE in (unit, other_unit) and unit != other_unit:
        a, b = (text + r"\cdot\frac{\pi}{180}" * (each == ANGLE)
                for text, each in ((a, unit), (b, other_unit)))
    if without_blanks(a).lower() == without_blanks(b).lower():
        return without_blanks(a) == without_blanks(b) and ratio == 1  # R is not r
    if ratio != 1:
        a = rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}\cdot({a})"
    return verify(without_decimals(a), without_decimals(b))


def without_decimals(text):
    """A text with its decimals as fractions, which math-verify does not round."""
    return re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}"
                  rf"{{1{'0' * len(found[2])}}}", text)


# ---------------------------------------------------------------- (5) math-verify
WARM = [  # what the first comparison of a kind imports and computes
    (r"\sin^2 x", r"1-\cos^2 x"), (r"\ln x^2+\sqrt{x}", r"2\ln x+\sqrt{y}"), ("2x+y=6", "x=3"),
    ("x<1", r"(-\infty,1)\cup(5,\infty)"), (r"1\le x<3", "[1,3)"), ("(x+1)^{2}", "x^2+2x+3"),
    (r"\begin{pmatrix}1\end{pmatrix}", "2"), (r"\frac{n^2+n}{2}", r"\binom{n}{2}"),
    ("(x+1)(x-2)", "x(x-2)+x-2"), (r"\frac{1}{\sqrt3}+\frac{3\pi}{2}", r"\frac{\sqrt3}{3}"),
    (r"2^{x}\cdot x^{-1}", r"\frac{1}{x}")]


def expression(text):
    """The list of values that math-verify reads in LaTeX, with the letter i as sympy's I."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig
    from sympy import Basic, I

    # units=False, since its removal of units also removes letters: a \cdot b \cdot c loses c
    form = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    found = parse(f"${text}$", [LatexExtractionConfig(normalization_config=form)],
                  fallback_mode="no_fallback", parsing_timeout=None)
    return [one.subs({letter: I for letter in one.free_symbols if letter.name == "i"})
            if isinstance(one, Basic) else one for one in found]


def verify(a, b):
    """Whether math-verify finds two LaTeX texts equal.

    If both sides have letters in roots or logarithms, the letters count as positive:
    \\sqrt{50x^2} is 5x\\sqrt{2}.
    """
    import math_verify
    from sympy import Expr, Pow, Symbol, expand_log, log, simplify

    a, b = expression(a), expression(b)
    if not a or not b:
        return False
    if math_verify.verify(b, a, float_rounding=10, allow_set_relation_comp=True,
                          timeout_seconds=None):
        return True
    rooted = [one[0] for one in (a, b) if isinstance(one[0], Expr) and one[0].free_symbols and (
        one[0].has(log) or any(not power.exp.is_integer for power in one[0].atoms(Pow)))]
    if len(rooted) < 2:
        return False
    a, b = (one.subs({letter: Symbol(letter.name, positive=True) for letter in one.free_symbols})
            for one in rooted)
    return simplify(expand_log(a - b, force=True)) == 0


# ---------------------------------------------------------------- (6) a process for each pair
UNEQUAL, EQUAL, MUCH = 0, 1, 2  # exit statuses of a fork; MUCH: it took too much memory
VERDICTS = {UNEQUAL: False, EQUAL: True, MUCH: None, -signal.SIGPROF: None}


def serve():
    """Compare the pairs that come as lines, each in a fork, and print the forks' exit statuses."""
    from sympy.core.random import seed

    for end in signal.SIGINT, signal.SIGTERM:  # the stage ends this process
        signal.signal(end, signal.SIG_IGN)
    logging.disable()
    for a, b in WARM:
        verify(a, b)
    seed(0)
    gc.freeze()  # the forks share this memory
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            os._exit(status_of(*json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def status_of(a, b):
    """The exit status of a fork."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # at its end the kernel kills the fork
    try:
        return EQUAL if answers_equal(a, b) else UNEQUAL
    except MemoryError:
        return MUCH
    except Exception:  # sympy raises anything on hostile text
        return UNEQUAL


@cache
def servers(pid):
    """A queue of servers, of None where none has started. pid: a fork of a process has its own."""
    import math_verify  # noqa: F401  an ImportError here names the missing package

    idle, ranks = queue.LifoQueue(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for _ in range(max(1, min(8, len(os.sched_getaffinity(0)) // ranks))):
        idle.put(None)
    return idle


def ask(a, b):
    """The exit status of a fork that has compared a pair; None if its server was killed."""
    idle = servers(os.getpid())
    server, said = idle.get(), ""
    try:
        server = server or subprocess.Popen(
            [sys.executable, "-c", "from toolstar.mathematics import serve; serve()"],
            cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"PYTHONHASHSEED": "0"})  # the order of sympy's sets
        print(json.dumps([a, b]), file=server.stdin, flush=True)
        said = server.stdout.readline()
        return int(said) if said else None
    except BrokenPipeError:
        return None
    finally:
        if not said and server:
            server.kill()
        idle.put(server if said else None)


@lru_cache(2**14)
def math_equal(a, b):
    """Whether answer a is mathematically equal to gold b: True, False, or None if the comparison
    reached a limit. Both are texts, numbers or None."""
    if a is None or b is None:
        return a is b
    a, b = str(a).strip(" $"), str(b).strip(" $")
    if a == b or max(len(a), len(b)) > LONGEST:
        return a == b != ""
    for _ in range(3):  # what something else has killed is asked again
        if (status := ask(a, b)) in VERDICTS:
            return VERDICTS[status]
    return None
