r"""
Whether two answers are the same mathematics: a few rules in front of math-verify [1].

    (1) tidy    one spelling of signs, numbers and brackets
    (2) rules   choices, words, lists, intervals, percent and units, which math-verify confuses
    (3) verify  all else, in a process that can be killed: the kernel ends a pair after SECONDS of
                CPU time. What no honest answer holds (COSTLY) is refused before it is computed, so
                the limit can be far above what any honest pair needs, whatever the machine's load

Reads and writes nothing.   [1] github.com/huggingface/Math-Verify

    python -c "from toolstar.mathematics import math_equal; print(math_equal('0.5', '1/2'))"
"""
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path

SECONDS, LONGEST, MEMORY = 1.0, 1000, 2 * 2**30  # CPU seconds, characters, bytes of a pair
COSTLY = re.compile(  # towers of powers, long exponents, factorials, calculus, deep nesting
    r"\^[^\^]*\^[^\^]*\^[^\^]*\^|\^ *\{? *\(?-?\d{4}|\d{3,}\)? *\}?!|!!|"
    r"\\(?:sum|prod|o?i*nt|lim)(?![a-z])|"
    r"\\binom.*?(?:\^|\d{4})|(?:\{[^{}]*){9}|(?:[(\[][^()\[\]]*){15}|(?:\\(?:log|frac).*?){9}")
SIGNS = str.maketrans({"−": "-", "–": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ",
                       "÷": "/", "π": r"\pi ", "∞": r"\infty ", "∈": r"\in ", "±": r"\pm ",
                       "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "√": r"\sqrt ",
                       "²": "^2", "³": "^3", "~": " ", "\u00a0": " ", "\u202f": " "})
FORMS = [(re.compile(pattern), new) for pattern, new in (
    (r"\\\\\s*\[[^\]]*\]", r"\\\\"),  # a line break with a height: \\[4pt]
    (r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|[mh]box|operatorname) *\{([^{}]*)\}", r" \1 "),
    (r"^\s*\$*\s*\\boxed\s*\{(.*)\}[\s$.]*$", r"\1"),
    (r"(?<!\\)\\[\[\]()!]|(?<!\\)\$|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-z])\.?", ""),
    (r"(?<!\\)\\[,;: ]|\\q?quad\b", " "), (r"\b(?:and|or)\b|\\(?:lor|vee|land)\b", ","),
    (r"\\(?:emptyset|varnothing)\b", r"\\{\\}"), (r"\*\*", "^"), (r"\*|\\times\b", r"\\cdot "),
    (r"\\[dt]frac", r"\\frac"), (r"\\?%|\bper ?cent\b", " % "),
    (r"\^ *\{? *\\circ *\}?|\\degree\b|(?<=\d) *degrees?\b", "°"),
    (r"(\\(?:sin|cos|tan) *)\(?(\d+) *° *\)?", r"\1{\\frac{\2\\pi }{180}}"),
    (r"(?<![\\a-zA-Z])(sin|cos|tan|ln|log|exp|pi|sqrt)(?![a-z])", r"\\\1 "),
    (r"\\sqrt *\(([^()]*)\)", r"\\sqrt{\1}"), (r"(?i)^(?:so )?the (?:final )?answer is:?", ""),
    (r"\\sqrt *\[3\] *\{ *-", r"-\\sqrt[3]{"),  # the real root
    (r"(?<=\d)\{,\}(?=\d{3}(?!\d))|(?<=\d) (?=\d{3}(?![\d/]))", ""),
    (r"(?<![\w.])(\d+\.?\d*)[eE]([+-]?\d{1,3})(?!\w)", r"\1\\cdot 10^{\2}"),
    (r"(?<![\d./^_])(\d+) +(\d+) ?/ ?(\d+)", r"(\1+\\frac{\2}{\3})"),
    (r"(?<![\d./^_}])(\d+) *(\\frac *\{\d+\} *\{\d+\})", r"(\1+\2)"),
    (r"\(?(?<![\w}])([\dA-F]+) *\)?_ *\{? *\(?(\d+)\)? *\}?(?!\w)", lambda m: based(m)),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot) *\{?(\d+)\}?", lambda m: recurring(*m.groups())),
    (r"^(-?) ?\\\$ ?(.*)$", r"\1\2 dollar"))]
UNITS = {"mm": 1, "cm": 10, "m": 1000, "km": 10**6, "g": 1, "kg": 1000, "minute": 60, "second": 1,
         "hour": 3600, "day": 86400, "cent": 1, "dollar": 100, "meter": 1000, "inch": 1,
         "foot": 12, "feet": 12}
UNIT = re.compile(r"(.*[\d})]) *((?:[a-zA-Z]{2,}|[mgsh°])\.?(?: ?\^ ?\{?\d\}?)?"
                  r"(?: ?(?:/|per) ?[a-z]+)?(?: [a-z]+){0,3})", re.DOTALL)
CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:]\)?) *(.*)|([A-J])", re.DOTALL)
WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
NUMBER = re.compile(r"([+-]?) ?(?:\\frac *\{(-?\d+)\} *\{(-?\d+)\}|"
                    r"(\d+\.?\d*|\.\d+)(?: ?/ ?(\d+))?)")
NAME = re.compile(r"\\?[A-Za-z]\w*'?(?: ?\([a-z]\))?|[A-Za-z ]*|\|?[A-Z]+\|?|"
                  r"\([a-z](?:, ?[a-z])+\)")


# ---------------------------------------------------------------- rules

def tidy(text):
    text = text.translate(SIGNS)
    for pattern, new in FORMS:
        text = pattern.sub(new, text)
    return " ".join(text.split()).rstrip(" .")


def based(found):
    """The decimal number of a match such as 1010_2; the match itself if it is not one."""
    try:
        return str(int(found[1], int(found[2])))
    except ValueError:
        return found[0]


def recurring(ones, fixed, digits):
    nines = 10 ** len(digits) - 1
    top = int(ones + fixed or 0) * nines + int(digits)
    return rf"\frac{{{top}}}{{{nines * 10 ** len(fixed)}}}"


def bare(text):
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def number(text):
    """The Fraction of a plain number, or None."""
    text = re.sub(r"^\((.*)\)$", r"\1", text.strip())
    found = NUMBER.fullmatch(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
    if not found:
        return None
    sign, top, bottom, decimal, under = found.groups()
    bottom = int(bottom or under or 1)
    return int(sign + "1") * Fraction(top or decimal) / bottom if bottom else None


def split(text, marks):
    """The parts of a text between marks; marks inside of brackets do not count."""
    parts, depth = [""], 0
    for token in re.findall(r"\\(?:begin|end) *\{\w+\}|\\[a-zA-Z]+ ?|\\.|.", text, re.DOTALL):
        depth += token.startswith(("(", "[", "{", "\\{", "\\begin"))
        depth -= token.startswith((")", "]", "}", "\\}", "\\end"))
        if depth == 0 and token.strip() in marks:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def parts_of(text):
    r"""(brackets, parts): "," for a bare list, "{}" for a set, "()", "[)" and so on; ("", [text])
    for anything else."""
    if len(parts := split(text, (",", ";", "\\cup"))) > 1:
        return ",", parts
    if re.search(r"\\pm\b", text):
        return ",", [re.sub(r"\\pm\b ?", sign, text) for sign in "+-"]
    found = re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text, re.DOTALL)
    if found and len(split(text, ())) == 1 and len(split(found[2], (",", ";"))) > (
            found[1] != "\\{"):
        return (found[1] + found[3]).replace("\\", ""), split(found[2], (",", ";"))
    return "", [text]


def with_unit(text):
    """(value, size, dimension or "") of a quantity: 5 km is ("5", 10^6, "km")."""
    if text.endswith("%"):
        return text[:-1].strip(), Fraction(1, 100), ""
    found = UNIT.fullmatch(text)
    if not found or found[2].startswith(("if", "for")):
        return text, 1, ""
    word, power = re.fullmatch(r"([a-zA-Z°]+).*?(\d?)\}?", found[2]).groups() if re.fullmatch(
        r"[a-zA-Z°]+\.?(?: ?\^ ?\{?\d\}?)?", found[2]) else (found[2], "")
    word = word if word in UNITS else word.removesuffix("es") if word.endswith("ches") else \
        word.removesuffix("s") or word
    return found[1], Fraction(UNITS.get(word, 1)) ** int(power or 1), word


def same(a, b, verify, depth=0):
    """Whether tidy answer a equals tidy gold b; verify(a, b) asks math-verify."""
    if bare(a) == bare(b) or depth > 9:
        return bare(a) == bare(b)
    if a.count("=") == 1 and "=" not in b or b.count("=") == 1 and "=" not in a:
        (left, right), b, swap = (a.split("="), b, False) if "=" in a else (b.split("="), a, True)
        if NAME.fullmatch(left.strip()) or not swap and not re.search("[<>|]", a):
            a, b = (b, right.strip()) if swap else (right.strip(), b)
            return same(a, b, verify, depth + 1)
        a, b = (b, "=".join((left, right))) if swap else (a, b)
    (kind, parts), (other, others) = parts_of(a), parts_of(b)
    if {kind, other} <= {",", "{}"} and kind or kind == other != "":
        if len(parts) != len(others) and kind + other != "{}{}":
            return False
        if kind not in (",", "{}"):  # tuples and intervals
            return all(same(x, y, verify, depth + 1) for x, y in zip(parts, others, strict=True))
        rest = list(others)
        for x in dict.fromkeys(parts) if kind + other == "{}{}" else parts:
            if (y := next((y for y in rest if same(x, y, verify, depth + 1)), None)) is None:
                return False
            rest.remove(y)
        return not rest or kind + other == "{}{}" and len({*others}) == len({*parts})
    if kind and other and {kind, other} != {",", "()"}:
        return False  # [1,2] and (1,2); a list is no tuple
    if {kind, other} == {",", "()"}:  # x=1, y=2 is (1, 2)
        named = parts if kind == "," else others
        values = [part.rpartition("=")[2].strip() for part in named]
        return all("=" in part for part in named) and len(parts) == len(others) and all(
            same(x, y, verify, depth + 1) for x, y in
            zip(*((values, others) if kind == "," else (parts, values)), strict=True))
    if "°" in a + b and r"\pi" in a + b:
        return verify(*(text.replace("°", r"\cdot\frac{\pi}{180}") for text in (a, b)))
    (a, times, unit), (b, others, other) = with_unit(a), with_unit(b)
    if unit and other and unit != other and not {unit, other} <= UNITS.keys():
        return False
    if not (unit and other):  # a unit that only one side has is ignored
        times, others = (1 if unit else times), (1 if other else others)
    first, second = number(a), number(b)
    if first is not None and second is not None:
        first, second = first * times, second * others
        return first == second or "." in b and abs(first - second) <= abs(second) / 10**9
    return times == others and verify(a, b)


def answers_equal(a, b, verify):
    """Whether answer a equals gold b, as a choice, words or mathematics."""
    a, b = tidy(a), tidy(b)
    if not a or not b:
        return False
    (letter, text), (other, gold) = choice(a), choice(b)
    if letter and other:
        return letter == other and (not text or not gold or answers_equal(text, gold, verify))
    if text != a and text or gold != b and gold:
        return answers_equal(text or a, gold or b, verify)
    words = [WORDS.fullmatch(text.rpartition("=")[2].strip(" ().")) for text in (a, b)]
    if all(words) and max(len(found[0]) for found in words) > 1:
        return bare(words[0][0].lower()) == bare(words[1][0].lower())
    if any(found and re.search(r"[^\W\d_]{4}", found[0]) for found in words):
        return False
    merged = [re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)", lambda m: m[0].replace(",", ""), x)
              for x in (a, b)]
    return same(*merged, verify) or merged != [a, b] and same(a, b, verify)


def choice(text):
    found = CHOICE.fullmatch(text)
    return (found[1] or found[3], found[2] or "") if found else ("", text)


def math_equal(a, b):
    """Whether answer a is mathematically equal to gold b: texts, numbers or None. Never raises."""
    if a is None or b is None:
        return a is b
    a, b = str(a).strip(" $"), str(b).strip(" $")
    return compared(a, b) if a != b else a != ""


# ---------------------------------------------------------------- math-verify

def library(a, b):
    """math-verify's verdict on two LaTeX texts."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    # units=False: its removal of units also removes letters; a \cdot b \cdot c loses c
    form = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    a, b = (parse(f"${text}$", [LatexExtractionConfig(normalization_config=form)],
                  fallback_mode="no_fallback", parsing_timeout=None) for text in (a, b))
    return bool(a and b) and verify(b, a, float_rounding=10, allow_set_relation_comp=True,
                                    timeout_seconds=None)


def serve(control):
    """Fork a process that compares the pairs from a socket; if one was killed, fork the next."""
    library(r"\frac{x}{2}+\sqrt2", r"x<1")  # what a first pair needs
    for end in signal.SIGINT, signal.SIGTERM:  # the stage ends this process
        signal.signal(end, signal.SIG_IGN)
    while True:
        if (pid := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            while asked := control.recv(2**16):
                a, b = json.loads(asked)
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    verdict = answers_equal(a, b, library)
                except Exception:  # sympy raises anything on hostile text
                    verdict = False
                signal.setitimer(signal.ITIMER_PROF, 0)
                control.send(b"true" if verdict else b"false")
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            return  # the other end of the socket is closed
        control.send(b"false")


def start():
    """(process, socket) of a new server."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(60)
    program = ("import socket, sys; sys.path[0] = sys.argv[1]; from toolstar.mathematics import "
               "serve; serve(socket.socket(fileno=int(sys.argv[2])))")
    process = subprocess.Popen(
        [sys.executable, "-s", "-c", program, str(Path(__file__).resolve().parent.parent),
         str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    theirs.close()
    return process, control


@cache
def pool(pid):
    """A queue of servers, or None for each that is not started. pid: a fork has its own."""
    import math_verify  # noqa: F401  an ImportError here names the missing package
    idle = queue.LifoQueue()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for _ in range(max(1, min(8, len(os.sched_getaffinity(0)) // ranks))):
        idle.put(None)
    return idle


@lru_cache(2**14)
def compared(a, b):
    """Whether answer a equals gold b, decided by one of the servers."""
    if max(len(a), len(b)) > LONGEST or COSTLY.search(a) and not COSTLY.search(b):
        return a == b
    idle = pool(os.getpid())
    for _ in "first", "again":  # if a server was killed from outside, ask another one
        held = idle.get()
        try:
            held = held or start()
            held[1].send(json.dumps([a, b]).encode())
            if said := held[1].recv(64):
                return json.loads(said)
            raise ConnectionResetError
        except OSError:
            if held:
                held[0].kill(), held[0].wait(), held[1].close()
            held = None
        finally:
            idle.put(held)
    return False
