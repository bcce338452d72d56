r"""
The number that an expression is: of LaTeX, of what Python prints, of plain text.

    (1) tokens   one spelling for \dfrac and \frac, 1{,}000 and 1000, 75 percent and 75\%; a word of
                 a unit stays a token in quotes: 5\text{ m} is 5 "m"
    (2) value    an expression is evaluated while it is read: rational numbers exactly, as integers
                 and fractions, others as complex floats. A letter is a number of the point that
                 is asked for, so that two expressions are equal if they are so at several points

The texts are a model's: nothing is run, and what is no mathematics raises Unreadable or an error of
arithmetic (UNREADABLE names all). Nesting and the size of numbers are bounded, so that no text
takes long: 10**10**8 is TooLarge, not a day's work.

Reads and writes nothing.
"""
import cmath
import math
import re
import zlib
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

DEEPEST, MOST_BITS = 40, 50_000  # nested things; bits of a number
POINTS = 3  # where letters are tried
CLOSE = 1e-10  # relative error of floats over a few operations
UNREADABLE = (ValueError, ArithmeticError, IndexError, KeyError, TypeError)


class Unreadable(ValueError):
    """This text is no mathematics that is known here."""


class TooLarge(Unreadable):
    """A number of more than MOST_BITS."""


class Setting(NamedTuple):
    """How a text is read."""
    point: int = 0  # which values letters have
    radians: bool = False  # are 30 degrees pi/6, or 30?
    sign: int = 1  # of a plus-minus


# ---------------------------------------------------------------- units
UNITS = {  # dimension: names, each with how many of the dimension's base it is
    "length": """mm 1/1000 millimeter 1/1000 cm 1/100 centimeter 1/100 centimetre 1/100 dm 1/10 m 1
        meter 1 metre 1 km 1000 kilometer 1000 kilometre 1000 in 127/5000 inch 127/5000
        ft 381/1250 foot 381/1250 feet 381/1250 yd 1143/1250 yard 1143/1250 mi 201168/125
        mile 201168/125""",
    "time": """s 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800""",
    "months": """month 1 year 12""",
    "mass": """mg 1/1000 g 1 gram 1 kg 1000 kilogram 1000 oz 45359237/1600000
        ounce 45359237/1600000 lb 45359237/100000 pound 45359237/100000""",
    "volume": """l 1 liter 1 litre 1 ml 1/1000 milliliter 1/1000""",
    "money": """dollar 1 cent 1/100""",
    "angle": """radian 1 rad 1""",
    "unit": """unit 1""",
}
UNITS = {name: (dimension, Fraction(size)) for dimension, row in UNITS.items()
         for name, size in zip(row.split()[::2], row.split()[1::2], strict=True)}
PLAIN = {name for name in UNITS if len(name) > 1}  # these need no \text around them


def unit_of(words):
    """Words of a unit -> (factor, frozenset of (dimension, power)); a word not known is its own.

    ["square", "cm"], ["km", "/", "h"], ["m", "^", "2"]
    """
    factor, powers, sign, exponent = Fraction(1), Counter(), 1, 1
    dimension = size = None
    words = " ".join(words).lower().replace("mph", "mile / hour").split()
    for word in words:
        name = word.strip(".")
        if name in ("/", "per"):
            sign = -1
        elif name in ("square", "sq", "cubic") and len(words) > 1:
            exponent = 3 if name == "cubic" else 2
        elif name.isdigit() and size:  # the exponent of what stands before
            powers[dimension] += sign * (int(name) - 1)
            factor *= size ** (sign * (int(name) - 1))
        elif name not in ("^", "*", ""):
            dimension, size = UNITS.get(name) or UNITS.get(singular(name)) or (name, Fraction(1))
            powers[dimension] += sign * exponent
            factor *= size ** (sign * exponent)
            exponent = 1
    return factor, frozenset(item for item in powers.items() if item[1])


def singular(name):
    """inches -> inch, hours -> hour."""
    short = name[:-2] if name.endswith("es") and name[:-2] in UNITS else name
    return short[:-1] if short.endswith("s") else short


# ---------------------------------------------------------------- tokens
SPELLINGS = (  # in this order
    ("\u2212", "-"), ("\u2013", "-"), ("\u00d7", "*"), ("\u00f7", "/"), ("\u03c0", r"\pi "),
    ("\u221a", r"\sqrt "), ("\u221e", r"\infty "), ("\u2264", r"\le "), ("\u2265", r"\ge "),
    ("\u2260", r"\ne "), ("\u222a", r"\cup "), ("\u2208", r"\in "), ("\u00b1", r"\pm "),
    ("\u00b7", "*"), ("\u22c5", "*"), ("\u00b2", "^2"), ("\u00b3", "^3"), ("\u00bd", r"\frac12 "),
    ("\u00bc", r"\frac14 "), ("\u00be", r"\frac34 "), ("\u00a0", " "), ("\u2009", " "),
    ("\u202f", " "), ("\u03b8", r"\theta "), (r"\degree", "\u00b0"), (r"^{\circ}", "\u00b0"),
    (r"^\circ", "\u00b0"), (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"),
    (r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\lvert", "|"), (r"\rvert", "|"), (r"\vert", "|"),
    (r"\cdot", "*"), (r"\times", "*"), (r"\ast", "*"), (r"\div", "/"), ("**", "^"), (r"\%", "%"),
    (r"\displaystyle", ""), (r"\limits", ""), (r"\!", ""), (r"\boxed", ""), (r"\angle", ""),
    ("~", " "),
    (r"\emptyset", r"\{\}"), (r"\varnothing", r"\{\}"), ("\u2205", r"\{\}"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
)
# the marks around mathematics, and the size of a bracket; `\\[` breaks a line
MARKS = re.compile(r"(?<!\\)\\[\[\]()]|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?")
BOX = re.compile(r"\\boxed\s*\{(.*)\}", re.DOTALL)
SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?= *\")")
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)"
                  r"\s*\{([^{}]*)\}")
ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{(?:[pbB]?matrix|array)\}(?:\s*\{[lcr| ]*\})?")
SEPARATOR = re.compile(r"(?<=\d)(?:,\s?\\!\s?|\{,\}|\\,|\\ )(?=\d{3}(?!\d))")  # 1{,}000
BLANKS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d.,/]?\d)")
COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
MIXED = re.compile(r"(?<![\d./^_])(\d{1,9}) +(\d{1,9}) ?/ ?(\d{1,9})(?![\d.])")
MONEY = re.compile(r"(?:\\\$|[$\u20ac\u00a3]) *(\d[\d.]*)")
LETTER_UNIT = re.compile(r"(?<=\d) +[mgshL](?:/(?:s|h|c?m))?(?:\^?\{?[23]\}?)?\s*$")  # 5 m, no 5m
BEHIND = re.compile(r"(?<=[\d}]) ([A-Za-z]{3,})(?: [A-Za-z]+)*$")  # 18 eggs
DEGREES = re.compile(r'"degrees?"|(?<=\d) ?degrees?\b')
PERCENT = re.compile(r'"(?:percent|%)"|\bpercent\b')
UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
AND = re.compile(r"\b(?:and|or)\b|;|\\q?quad(?![a-zA-Z])")
TOKEN = re.compile(r'"[^"]*"|\\[a-zA-Z]+|\\.|<=|>=|!=|\d+\.?\d*[eE][+-]?\d+|\d+\.?\d*|\.\d+'
                   r"|[a-zA-Z]+|\S", re.DOTALL)
WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")


@lru_cache(4096)
def unmarked(text):
    """A text without what is around it: dollars, brackets of display, a box, a full stop."""
    text = MARKS.sub("", text).strip().rstrip(".").strip()
    for mark in ("$$", "$"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark):-len(mark)].strip()
    box = BOX.fullmatch(text)
    return (box[1] if box else text).rstrip(".").strip()


def quoted(match):
    r"""What \text{...} says: mathematics in it is bare, each word a token in quotes."""
    inside = match[1].replace('"', "").strip()
    if inside in FUNCTIONS:
        return f"\\{inside} "
    if not re.search("[a-zA-Z%]", inside) or re.search(r"^[ei]$|[\\=^\d(]", inside):
        return f" {inside} "
    words = re.findall(r"[^\s/,]+|[/,]", inside)
    return " ".join("," if word in ("and", "or", ",") else f' "{word}" ' for word in words)


def words_behind(match):
    """The words behind a number, as a unit; a function stays one."""
    return match[0] if match[1] in NAMES else "".join(f' "{word}"' for word in match[0].split())


@lru_cache(4096)
def tokens_of(text, commas):
    """Text -> tuple of tokens. commas: is 1,234 one number, or are these two?"""
    text = SEPARATOR.sub("", unmarked(text))
    for old, new in SPELLINGS:
        text = text.replace(old, new)
    text = SPACING.sub(" ", TEXT.sub(quoted, ENVIRONMENT.sub(r"\\\1 ", text)))
    text = BLANKS.sub(lambda match: match[0].replace(" ", ""), text)
    if commas:
        text = COMMAS.sub(lambda match: match[0].replace(",", ""), text)
    text = MONEY.sub(r'\1 "dollar" ', text).replace("\\$", "").replace("$", "").strip()
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = LETTER_UNIT.sub(lambda match: re.sub("[a-zA-Z]+", r' "\g<0>" ', match[0]), text)
    text = BEHIND.sub(words_behind, text)
    text = AND.sub(",", UNION.sub(r"\\cup ", PERCENT.sub("%", DEGREES.sub("\u00b0", text))))
    tokens = []
    for token in TOKEN.findall(text):
        if token.isalpha() and tokens and (token in PLAIN or singular(token) in PLAIN):
            tokens.append(f'"{token}"')
        elif token.isalpha() and token.isascii() and len(token) <= 3 and token not in NAMES:
            tokens.extend(token)  # a product of letters
        else:
            tokens.append(token)
    return tuple(tokens)


def untexted(text):
    r"""A text with the words of its \text{...} bare."""
    return TEXT.sub(r" \1 ", unmarked(text))


def words_of(text):
    r"""The words of an answer that is nothing else, in lower case: \text{No solution}, (B)."""
    text = untexted(text).strip(" ().")
    return " ".join(text.lower().split()) if WORDS.fullmatch(text) else None


# ---------------------------------------------------------------- numbers
def rational(value):
    """Is this number exact? Others are complex floats, or an infinity."""
    return isinstance(value, int | Fraction)


def bounded(value):
    """The value; raises TooLarge for an exact number of more than MOST_BITS."""
    if rational(value):
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > MOST_BITS:
            raise TooLarge
    return value


def divide(a, b):
    """a / b, exact where both are. Raises ZeroDivisionError."""
    return bounded(Fraction(a) / b) if rational(a) and rational(b) else a / b


def power(base, exponent):
    """base ** exponent, exact where it is rational, and never larger than MOST_BITS."""
    if not rational(base) or not rational(exponent):
        return complex(base) ** complex(exponent)
    base, exponent = Fraction(base), Fraction(exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MOST_BITS and abs(base) not in (0, 1):
        raise TooLarge
    if exponent.denominator == 1:
        return base ** exponent.numerator
    if base < 0 and exponent.denominator % 2:  # the real root, as of school
        return (-1) ** exponent.numerator * power(-base, exponent)
    top, bottom = (whole_root(n, exponent.denominator) for n in (base.numerator, base.denominator))
    if top is None or bottom is None:
        return complex(base) ** complex(exponent)
    return Fraction(top, bottom) ** exponent.numerator


def whole_root(number, degree):
    """The integer whose power of this degree is number, or None."""
    if number < 0:
        return None
    root = math.isqrt(number) if degree == 2 else round(number ** (1 / degree))
    return root if root ** degree == number else None


def whole(value, most=1000):
    """A number as an integer from 0 to most."""
    if not rational(value) or value != int(value) or not 0 <= value <= most:
        raise Unreadable
    return int(value)


def letter(name, point):
    """What a letter stands for at a point: a fraction of its own, negative at the last point."""
    size = zlib.crc32(f"{name}/{point}".encode()) % 1999 + 500
    return Fraction(-size if point == POINTS - 1 else size, 1024)


def inverse(function):
    return lambda value: 1 / function(value)


FUNCTIONS = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "cot": inverse(cmath.tan),
    "sec": inverse(cmath.cos), "csc": inverse(cmath.sin), "arcsin": cmath.asin,
    "arccos": cmath.acos, "arctan": cmath.atan, "asin": cmath.asin, "acos": cmath.acos,
    "atan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "ln": cmath.log, "log": cmath.log, "lg": cmath.log10, "exp": cmath.exp,
}
TURNED = {"sin": cmath.asin, "cos": cmath.acos, "tan": cmath.atan}  # of \sin^{-1}
CONSTANTS = {"pi": complex(math.pi), "infty": math.inf, "inf": math.inf, "oo": math.inf,
             "infinity": math.inf, "e": complex(math.e), "i": 1j, "I": 1j}
NAMES = {*FUNCTIONS, "sqrt", "abs", "pi", "inf", "oo"}
GREEK = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi
rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell hbar"""
GREEK = {*GREEK.split()}
BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor",
            r"\lceil": r"\rceil", r"\langle": r"\rangle", r"\begin": r"\end"}
CLOSING = {*BRACKETS.values()}
FACTORS = {"\\" + name for name in {*FUNCTIONS, *CONSTANTS, *GREEK, "sqrt", "frac", "binom"}}


# ---------------------------------------------------------------- expressions
class Expression:
    """A reader of the tokens of one expression, which evaluates as it goes: Setting says where."""

    def __init__(self, tokens, setting):
        self.tokens, self.at = list(tokens), 0
        self.point, self.radians, self.sign = setting
        self.depth = self.bars = 0  # atoms and | that are open
        self.numbered = 0  # where the last number ended

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted=None):
        token = self.peek()
        if not token or wanted not in (None, token):
            raise Unreadable
        self.at += 1
        return token

    def value(self):
        """The number that all of the tokens make. Raises what UNREADABLE names."""
        value = self.sum()
        if self.peek() or value != value:  # infinity less infinity is no number
            raise Unreadable
        return value

    def sum(self):
        """Terms; and a fraction that is written {1 \\over 2}."""
        signs = {"+": 1, "-": -1, r"\pm": self.sign, r"\mp": -self.sign}
        total = 0 if self.peek() in signs else self.product()
        while self.peek() in signs:
            total = bounded(total + signs[self.take()] * self.product())
        if self.peek() == r"\over":
            self.take()
            total = divide(total, self.sum())
        return total

    def product(self):
        """Factors from left to right: 3/2x is (3/2)x."""
        start, value = self.at, self.signed()
        while self.peek() in ("*", "/", "%") or self.begins_factor(self.peek()):
            if self.peek() == "*":
                self.take()
                value = bounded(value * self.signed())
            elif self.peek() == "%":  # of all before it: 7\frac{1}{2}\%
                self.take()
                value = divide(value, 100)
            elif self.peek() == "/":
                self.take()
                value = divide(value, self.signed())
            else:
                value = self.beside(value, start)
        return value

    def beside(self, value, start):
        r"""value with the factor beside it: 2x is a product, 5\frac{1}{2} is five and a half."""
        begin, before = self.at, self.tokens[self.at - 1]
        if self.numbered == self.at and self.peek()[0].isdigit():
            raise Unreadable
        factor, span = self.power(), self.tokens[begin:self.at]
        plain = span[0] == r"\frac" and all(t.isdigit() or t in ("{", "}") for t in span[1:])
        if plain and begin == start + 1 and before.isdigit() and 0 < factor < 1:
            return value + factor
        return bounded(value * factor)

    def begins_factor(self, token):
        """May a factor begin here, without a sign of multiplication?"""
        if token == "|":
            return not self.bars
        return token[:1].isalnum() or token[:1] == "." or token in BRACKETS or token in FACTORS

    def signed(self):
        sign = 1
        while self.peek() in ("+", "-"):
            sign = sign if self.take() == "+" else -sign
        return sign * self.power()

    def power(self):
        base = self.suffixed(self.atom())
        if self.peek() != "^":
            return base
        self.take()
        return self.suffixed(power(base, self.exponent()))

    def exponent(self):
        if self.peek() in ("+", "-"):
            return -self.atom() if self.take() == "-" else self.atom()
        return self.atom()

    def suffixed(self, value):
        """A value with a factorial or degrees behind it."""
        while self.peek() in ("!", "\u00b0"):
            if self.take() == "!":
                value = math.factorial(whole(value))
            elif self.radians:
                value = value * math.pi / 180
        return value

    def atom(self):
        """A number, a letter, a bracket, a function with its arguments."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable
        value = self.atom_of(self.take())
        self.depth -= 1
        return value

    def atom_of(self, token):
        if token[0].isdigit() or token[0] == ".":
            value, self.numbered = self.number(token), self.at
            return value
        if token in BRACKETS:
            return self.bracket(token)
        if token == "|":
            self.bars += 1
            value = abs(self.sum())
            self.bars -= 1
            self.take("|")
            return value
        name = token.strip('\\"')
        special = {"frac": self.fraction, "sqrt": self.root, "binom": self.binomial}.get(name)
        if special:
            return special()
        if name in FUNCTIONS:
            return self.function(name, token)
        if name == "abs":
            return abs(self.atom())
        if name in CONSTANTS and self.peek() != "_":
            return CONSTANTS[name]
        if not (name in GREEK or len(name) == 1 and name.isalpha()):
            raise Unreadable
        return letter(name + self.subscript(), self.point)

    def subscript(self):
        """What stands below a letter or a number, as text."""
        if self.peek() != "_":
            return ""
        self.take()
        begin = self.at
        if self.take() == "{":
            while self.take() != "}":
                pass
        return "".join(self.tokens[begin:self.at]).strip("{}")

    def number(self, token):
        r"""12, .5, 1e3, 1010_2, 0.\overline{3}."""
        if self.peek() == "_":
            return int(token, int(self.subscript()))
        if self.peek() in (r"\overline", r"\bar"):
            self.take()
            digits = "".join(char for char in self.repeated() if char.isdigit())
            places = len(token.partition(".")[2])
            return Fraction(token) + Fraction(int(digits), 10 ** places * (10 ** len(digits) - 1))
        mantissa, _, exponent = token.lower().partition("e")
        value = int(mantissa) if mantissa.isdigit() else Fraction(mantissa)
        return value * power(10, int(exponent)) if exponent else value

    def repeated(self):
        begin = self.at
        if self.take() == "{":
            self.take()
            self.take("}")
        return self.tokens[begin:self.at]

    def bracket(self, token):
        r"""What a bracket holds, and \lfloor and \lceil make of it."""
        value = self.sum()
        self.take(BRACKETS[token])
        if token in (r"\lfloor", r"\lceil"):
            real = value if rational(value) else value.real
            near = round(real)
            if abs(real - near) < CLOSE:
                return near
            return math.floor(real) if token == r"\lfloor" else math.ceil(real)
        if token not in ("(", "[", "{"):
            raise Unreadable
        return value

    def argument(self):
        r"""An argument of \frac: braces, or one digit, or one thing."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at:self.at + 1] = [token[0], token[1:]]
        if token in FUNCTIONS or token[:1] == "-":
            raise Unreadable
        self.take()
        if token.isdigit():
            return int(token[0])
        self.at -= 1
        return self.atom()

    def fraction(self):
        top = self.argument()
        return divide(top, self.argument())

    def binomial(self):
        top = whole(self.argument())
        return math.comb(top, whole(self.argument()))

    def root(self):
        degree = 2
        if self.peek() == "[":
            degree = whole(self.atom(), 100)
        return power(self.atom(), Fraction(1, degree))

    def function(self, name, token):
        r"""A function with its base or exponent: \log_2 8, \sin^2 x, \cos 60^\circ."""
        # in print \log has the base 10, in programs log is natural
        base, exponent = 10 if token == r"\log" else None, None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                base = self.atom()
            else:
                exponent = self.exponent()
        function = FUNCTIONS[name]
        if exponent == -1 and name in TURNED:
            function, exponent = TURNED[name], None
        before, self.radians = self.radians, True
        value = function(complex(self.function_argument()))
        self.radians = before
        if base is not None:
            value = value / cmath.log(complex(base))
        return value if exponent is None else power(value, exponent)

    def function_argument(self):
        """What a function is of: brackets, or the factors up to a sign or the next function."""
        if self.peek() in ("(", "{"):
            return self.suffixed(self.atom())
        value = self.signed()
        while self.begins_factor(self.peek()) and self.peek() not in ("(", "|"):
            if self.peek().strip("\\") in FUNCTIONS:
                break
            value = bounded(value * self.power())
        return value
