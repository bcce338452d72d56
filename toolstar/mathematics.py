r"""
Are two answers the same mathematics? 1/2 and 0.50, x=5 and 5, (1,2] and 1 < x \le 2, 5 m and 500 cm.

    (1) tidy     one spelling of LaTeX, of what Python prints and of plain text, as tokens
    (2) read     an expression is evaluated while it is read: rational numbers exactly, as fractions;
                 others as complex floats; letters stand for numbers, and two expressions are equal
                 if they are so at several points
    (3) forms    sets, bare lists (any order), tuples, intervals and inequalities, matrices, ratios,
                 equations, numbers with units: compared part by part, a form with its like
    (4) words    compared as words
    (5) the rest what neither side can be read as goes to math-verify, in a process that is killed
                 after SECONDS: it can hang, and its own time-out works in no thread [1]

Conventions: a unit, a degree sign or `x =` that only one side has is no difference, a percent sign
is (25% is 1/4). A rounded decimal is not the number it rounds; where the gold is a decimal, noise
of floating point (1e-9) is forgiven. Nothing here raises for any text or takes long for it: length,
nesting and the size of numbers are bounded, and what is beyond is equal only letter by letter.

Reads and writes nothing.   [1] open-r1#420

    python -c "from toolstar.mathematics import math_equal; print(math_equal('0.5', '1/2'))"
"""
import cmath
import json
import math
import re
import zlib
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

LONGEST, DEEPEST, MOST_BITS = 1000, 40, 20_000  # characters, brackets, bits of a number
POINTS = 3  # where letters are tried
CLOSE = 1e-10  # relative error of floats over a few operations
NOISE = 1e-9  # forgiven where the gold is a decimal
SIMPLE = 10**6  # denominators up to this are not the print of a float
SECONDS = 3
UNREADABLE = (ValueError, ArithmeticError, IndexError, KeyError, TypeError)


class Unreadable(ValueError):
    """This text is no mathematics that is known here."""


class TooLarge(Unreadable):
    """A number of more than MOST_BITS."""


class Form(NamedTuple):
    """What was read, if it is more than a number; parts are numbers or forms."""
    kind: str  # "list", "set", "tuple", "union", "matrix", "ratio", "quantity", "="; "<", ...
    parts: tuple
    note: object = None  # tuple: its brackets; quantity: its dimensions; relation: names of sides


# ---------------------------------------------------------------- units
# name: dimension, then how many of the dimension's base it is
UNITS = """
mm length 1/1000; millimeter length 1/1000; cm length 1/100; centimeter length 1/100; dm length 1/10
m length 1; meter length 1; metre length 1; centimetre length 1/100; km length 1000
kilometer length 1000; kilometre length 1000; inch length 127/5000; in length 127/5000
foot length 381/1250; feet length 381/1250; ft length 381/1250; yard length 1143/1250
yd length 1143/1250; mile length 201168/125; mi length 201168/125
s time 1; sec time 1; second time 1; min time 60; minute time 60; h time 3600; hr time 3600
hour time 3600; day time 86400; week time 604800; month months 1; year months 12
mg mass 1/1000; g mass 1; gram mass 1; kg mass 1000; kilogram mass 1000
oz mass 28349523125/1000000000; ounce mass 28349523125/1000000000
lb mass 45359237/100000; pound mass 45359237/100000; dollar money 1; cent money 1/100
buck money 1; euro euro 1; unit unit 1; radian angle 1; rad angle 1
liter litre 1; litre litre 1; l litre 1; ml litre 1/1000; milliliter litre 1/1000
"""
UNITS = {row.split()[0]: (row.split()[1], Fraction(row.split()[2]))
         for line in UNITS.strip().splitlines() for row in line.split(";")}
PLAIN = {name for name in UNITS if len(name) > 1} - {"sec"}  # units without a \\text


def unit_of(words):
    """Words of a unit -> (factor, frozenset of (dimension, power)); a word not known is its own.

    ["square", "cm"], ["km", "/", "h"], ["m", "^", "2"]
    """
    factor, powers, sign, exponent, last = Fraction(1), {}, 1, 1, None
    for word in words:
        name = word.lower().strip(".")
        if name in ("/", "per"):
            sign = -1
        elif name in ("square", "sq", "cubic") and len(words) > 1:
            exponent = 3 if name == "cubic" else 2
        elif name.isdigit() and last:  # of a ^
            dimension, size, used = last
            powers[dimension] += sign * (int(name[:1]) - 1)
            factor *= size ** (used * (int(name[:1]) - 1))
        elif name not in ("^", ""):
            dimension, size = UNITS.get(name) or UNITS.get(singular(name)) or (name, Fraction(1))
            powers[dimension] = powers.get(dimension, 0) + sign * exponent
            factor *= size ** (sign * exponent)
            last, exponent = (dimension, size, sign), 1
    return factor, frozenset(item for item in powers.items() if item[1])


def singular(name):
    """inches -> inch, hours -> hour."""
    short = name[:-2] if name.endswith("es") and name[:-2] in UNITS else name
    return short[:-1] if short.endswith("s") else short


# ---------------------------------------------------------------- tidy
SPELLINGS = (  # in this order
    ("\u2212", "-"), ("\u2013", "-"), ("\u00d7", "*"), ("\u00f7", "/"), ("\u03c0", r"\pi "),
    ("\u221a", r"\sqrt "), ("\u221e", r"\infty "), ("\u2264", r"\le "), ("\u2265", r"\ge "),
    ("\u2260", r"\ne "), ("\u222a", r"\cup "), ("\u2208", r"\in "), ("\u00b1", r"\pm "),
    ("\u00b7", "*"), ("\u22c5", "*"), ("\u00b2", "^2"), ("\u00b3", "^3"), ("\u00bd", r"\frac12 "),
    ("\u00bc", r"\frac14 "), ("\u00be", r"\frac34 "), ("\u00a0", " "), ("\u2009", " "),
    ("\u202f", " "), ("\u03b8", r"\theta "), (r"\degree", "\u00b0"), (r"^{\circ}", "\u00b0"),
    (r"^\circ", "\u00b0"), (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"),
    (r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\lvert", "|"), (r"\rvert", "|"), (r"\vert", "|"),
    (r"\cdot", "*"), (r"\times", "*"), (r"\div", "/"), ("**", "^"), (r"\%", "%"), ("~", " "),
    (r"\displaystyle", ""), (r"\limits", ""), (r"\!", ""), (r"\boxed", ""),
    (r"\emptyset", r"\{\}"), (r"\varnothing", r"\{\}"), ("\u2205", r"\{\}"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
)
# the marks around mathematics, and the size of a bracket; `\\[` breaks a line
MARKS = re.compile(r"(?<!\\)\\[\[\]()]|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?")
SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])")
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)"
                  r"\s*\{([^{}]*)\}")
ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{(?:[pbB]?matrix|array)\}(?:\s*\{[lcr| ]*\})?")
SEPARATOR = re.compile(r"(?<=\d)(?:,\s?\\!|\{,\}|\\,|\\ )(?=\d{3}(?!\d))")  # 1{,}000 is one number
BLANKS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d.,/]?\d)")
COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
MIXED = re.compile(r"(?<![\d./^_])(\d{1,9}) +(\d{1,9}) ?/ ?(\d{1,9})(?![\d.])")
MONEY = re.compile(r"(?:\\\$|[$\u20ac\u00a3]) *(\d[\d.]*)")
LETTER_UNIT = re.compile(r"(?<=\d) ([mgshL])(?:\^?\{?([23])\}?)?$")  # 5 m; 5m is a product
DEGREES = re.compile(r'"degrees?"|(?<=\d) ?degrees?\b')
PERCENT = re.compile(r'"(?:percent|%)"|\bpercent\b')
AND = re.compile(r"\b(?:and|or)\b|;")
TOKEN = re.compile(r'"[^"]*"|\\[a-zA-Z]+|\\.|<=|>=|!=|\d+\.?\d*[eE][+-]?\d+|\d+\.?\d*|\.\d+'
                   r"|[a-zA-Z]+|\S", re.DOTALL)
WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
CLOCK = re.compile(r"\d{1,2}:\d\d\W*[ap]\.?m\b|\d{4}-\d\d-\d\d$|\d\d?/\d\d?/\d{4}$", re.IGNORECASE)


def unmarked(text):
    """A text without the marks around it: dollars, brackets of display, a full stop."""
    text = MARKS.sub("", text).strip().rstrip(".").strip()
    for mark in ("$$", "$"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark):-len(mark)].strip()
    return text.rstrip(".").strip()


def quoted(match):
    r"""What \text{...} says: mathematics in it is bare, each word a token in quotes."""
    inside = match[1].replace('"', "").strip()
    if inside in ("and", "or", ","):
        return ","
    if not re.search("[a-zA-Z%]", inside) or re.search(r"[\\=^\d(]", inside):
        return f" {inside} "
    return " ".join(f' "{word}" ' for word in re.findall(r"[^\s/]+|/", inside))


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
    text = LETTER_UNIT.sub(lambda match: f' "{match[1]}"' + f"^{match[2]}" * bool(match[2]), text)
    text = AND.sub(",", PERCENT.sub("%", DEGREES.sub("\u00b0", text)))
    tokens = []
    for token in TOKEN.findall(text):
        if token.isalpha() and tokens and (token in PLAIN or singular(token) in PLAIN):
            tokens.append(f'"{token}"')
        elif token.isalpha() and token.isascii() and len(token) <= 3 and token not in NAMES:
            tokens += token  # a product of letters
        else:
            tokens.append(token)
    return tuple(tokens)


def words_of(text):
    r"""The words of an answer that is nothing else, in lower case: \text{No solution}, (B)."""
    text = TEXT.sub(r" \1 ", unmarked(text)).strip(" ().")
    return " ".join(text.lower().split()) if WORDS.fullmatch(text) else None


# ---------------------------------------------------------------- numbers
def rational(value):
    """Is this number exact? Others are complex floats, or an infinity."""
    return isinstance(value, int | Fraction)


def divide(a, b):
    return Fraction(a) / b if rational(a) and rational(b) else a / b


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
             "infinity": math.inf, "e": complex(math.e), "i": 1j}
NAMES = {*FUNCTIONS, "sqrt", "abs", "pi", "inf", "oo"}
GREEK = set("alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu "
            "xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi "
            "Omega ell hbar".split())
BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor",
            r"\lceil": r"\rceil", r"\langle": r"\rangle", r"\begin": r"\end"}
CLOSING = {*BRACKETS.values()}
RELATIONS = {"=": "=", "<": "<", r"\lt": "<", ">": ">", r"\gt": ">", "<=": "<=", r"\le": "<=",
             r"\leq": "<=", r"\leqslant": "<=", ">=": ">=", r"\ge": ">=", r"\geq": ">=",
             r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", "!=": "!=", r"\in": "in"}
HEAD = re.compile(r"\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\([^()]*\))?|\([a-z](?:,[a-z])+\)")  # x, abc, \theta, x_1, f(x), (x,y)


# ---------------------------------------------------------------- expressions
class Expression:
    """A reader of the tokens of one expression, which evaluates as it goes.

    point: which values letters have. sign: what \\pm is. radians: is 30 degrees pi/6, or 30?
    """

    def __init__(self, tokens, point=0, sign=1, radians=False):
        self.tokens, self.at = list(tokens), 0
        self.point, self.sign, self.radians = point, sign, radians
        self.depth, self.bars = 0, 0

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted=None):
        token = self.peek()
        if not token or wanted not in (None, token):
            raise Unreadable
        self.at += 1
        return token

    def value(self):
        """The number that all of the tokens make."""
        value = self.sum()
        if self.peek():
            raise Unreadable
        return value

    def sum(self):
        signs = {"+": 1, "-": -1, r"\pm": self.sign, r"\mp": -self.sign}
        total = 0 if self.peek() in signs else self.product()
        while self.peek() in signs:
            total = total + signs[self.take()] * self.product()
        if self.peek() == r"\over":
            self.take()
            total = divide(total, self.sum())
        return total

    def product(self):
        """Factors from left to right; 3/2x is (3/2)x, and 5\\frac{1}{2} is five and a half."""
        start = self.at
        value = self.signed()
        while True:
            token = self.peek()
            if token in ("*", "/"):
                self.take()
                value = value * self.signed() if token == "*" else divide(value, self.signed())
            elif self.begins_factor(token):
                mixed = token == r"\frac" and self.at == start + 1 and self.tokens[start].isdigit()
                if token[0].isdigit() and self.tokens[self.at - 1][-1].isdigit():
                    raise Unreadable
                begin, factor = self.at, self.power()
                plain = {*self.tokens[begin + 1:self.at]} <= {"{", "}"} | self.digits(begin)
                proper = plain and rational(factor) and 0 < factor < 1
                value = value + factor if mixed and proper else value * factor
            else:
                return value

    def digits(self, begin):
        return {token for token in self.tokens[begin:self.at] if token.isdigit()}

    def begins_factor(self, token):
        """May a factor begin here, without a sign of multiplication?"""
        if token == "|":
            return not self.bars
        return token in BRACKETS or token[:1].isalnum() or token[:1] == "." or (
            token[:1] == "\\" and token not in CLOSING and token not in RELATIONS
            and token not in (r"\over", r"\pm", r"\mp", r"\cup", "\\\\"))

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
        while self.peek() in ("!", "%", "\u00b0"):
            mark = self.take()
            if mark == "!":
                value = math.factorial(whole(value))
            elif mark == "%":
                value = divide(value, 100)
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
            return self.number(token)
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
            return self.function(name)
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

    def function(self, name):
        """A function with its base or exponent: \\log_2 8, \\sin^2 x, \\cos 60 degrees."""
        base = exponent = None
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
        if self.peek() in ("(", "{"):
            return self.suffixed(self.atom())
        value = self.signed()
        while self.begins_factor(self.peek()) and self.peek() not in ("(", "|"):
            if self.peek().strip("\\") in FUNCTIONS:
                break
            value = value * self.power()
        return value


# ---------------------------------------------------------------- forms
class Setting(NamedTuple):
    """How a text is read: where letters are, and whether degrees count as radians."""
    point: int = 0
    radians: bool = False


def split(tokens, marks):
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
    items, commas = split(tokens, {","})
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
    parts, marks = split(tokens, RELATIONS)
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
    text = "".join(part)
    name = re.split(r"[(_']", text)[0].lstrip("\\")
    return bool(HEAD.fullmatch(text)) and name not in NAMES and name not in CONSTANTS


def union(tokens, setting, depth):
    parts, marks = split(tokens, {r"\cup"})
    if not marks:
        return group(tokens, setting, depth)
    return Form("union", tuple(group(part, setting, depth) for part in parts))


def group(tokens, setting, depth):
    """What one pair of brackets holds: a set, a tuple or interval, a matrix; else a number."""
    inner = tokens[1:-1]
    if len(tokens) > 1 and tokens[0] in BRACKETS and enclosed(tokens):
        first, last = tokens[0], tokens[-1]
        items = [item for item in split(inner, {","})[0] if item]
        if first == r"\{" or first == "{" and len(items) > 1:
            return Form("set", flat(statement(item, setting, depth + 1) for item in items))
        if first == r"\begin":
            return matrix(inner, setting, depth)
        if len(items) > 1 or first == "[" or last == "]" or first == r"\langle":
            brackets = first + last if first in "([" else "()"
            return Form("tuple", tuple(statement(item, setting, depth + 1) for item in items),
                        brackets)
        if first in "({":
            return statement(inner, setting, depth + 1) if r"\over" not in inner else (
                Expression(tokens, *setting_of(setting)).value())
    parts, marks = split(tokens, {":"})
    if marks:
        numbers = [quantity(part, setting) for part in parts]
        ratio = tuple(divide(number, numbers[0]) for number in numbers[1:])
        return divide(1, ratio[0]) if len(ratio) == 1 else Form("ratio", ratio)
    if r"\pm" in tokens or r"\mp" in tokens:
        return Form("list", (quantity(tokens, setting, 1), quantity(tokens, setting, -1)))
    return quantity(tokens, setting)


def setting_of(setting, sign=1):
    return setting.point, sign, setting.radians


def enclosed(tokens):
    """Does the first bracket close with the last token? An interval's may differ: (1, 2]."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token in BRACKETS) - (token in CLOSING)
        if depth == 0:
            return at == len(tokens) - 1
    return False


def matrix(tokens, setting, depth):
    rows = [row for row in split(tokens, {"\\\\"})[0] if row]
    return Form("matrix", tuple(
        Form("row", tuple(statement(cell, setting, depth + 1) for cell in split(row, {"&"})[0]))
        for row in rows))


def quantity(tokens, setting, sign=1):
    """An expression, and behind it perhaps words of a unit."""
    end = next((at for at, token in enumerate(tokens) if at and token[0] == '"'), len(tokens))
    value = Expression(tokens[:end], *setting_of(setting, sign)).value()
    if end == len(tokens):
        return value
    words = [token.strip('"') for token in tokens[end:] if token not in "{}"]
    if not all(re.fullmatch(r"[A-Za-z.'-]+|[/^23*]", word) for word in words):
        raise Unreadable
    factor, dimensions = unit_of(words)
    return Form("quantity", (value, value * factor), dimensions)


# ---------------------------------------------------------------- equality
class Manner(NamedTuple):
    """How numbers are held against each other."""
    decimal: bool  # is the gold one, so that floats' noise is forgiven?
    letters: bool  # do the numbers stem from a point?


def same_number(a, b, manner):
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
    if len(kinds) == 2 and kinds != {"list", "tuple"} or len(a.parts) != len(b.parts):
        return False
    if kinds == {"tuple"} and a.note != b.note:
        return False
    return all(same(x, y, manner) for x, y in zip(a.parts, b.parts, strict=True))


def without_form(value):
    """What remains when `x =`, a unit or the braces around one number go; None if nothing can."""
    kind = kind_of(value)
    if kind == "=":
        left, right = value.note
        return value.parts[1] if left else value.parts[0] if right else None
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
    letters = any(token.isalpha() or token[1:] in GREEK for token in tokens)
    return [statement(tokens, Setting(point, radians))
            for point in range(POINTS if letters else 1)]


def same_as_read(a, b, commas, radians):
    """One way of reading both: equal? Raises Unreadable and what arithmetic raises."""
    decimal = re.fullmatch(r"[-+]?\d*\.\d+", unmarked(b)) is not None
    a, b = readings(a, commas, radians), readings(b, commas, radians)
    manner = Manner(decimal, max(len(a), len(b)) > 1)
    a, b = (forms * (POINTS if len(forms) < max(len(a), len(b)) else 1) for forms in (a, b))
    forms = a + b
    related = kind_of(forms[0]) in {*RELATIONS.values()}
    numeric = related and all(kind_of(form) == kind_of(forms[0]) and len(form.parts) == 2
                              and {*map(kind_of, form.parts)} == {"number"} for form in forms)
    if numeric:
        return same_relation(a, b, manner)
    return all(same(x, y, manner) for x, y in zip(a, b, strict=True))


def exactly_equal(a, b):
    """True or False by the rules of this file; None where one of the texts cannot be read."""
    if squeezed(a) == squeezed(b):
        return True
    if max(len(a), len(b)) > LONGEST or CLOCK.match(unmarked(a)) or CLOCK.match(unmarked(b)):
        return False
    words = words_of(a), words_of(b)
    if words[0] and words[0] == words[1] and (len(words[0]) > 1 or not a.isalpha()
                                              or not b.isalpha()):
        return True
    if any(re.search(r"[^\W\d_]{4}", word or "") for word in words):
        return False
    verdict = False if all(words) or not (squeezed(a) and squeezed(b)) else None
    both = a + b
    for commas in (True, False) if COMMAS.search(both) else (True,):
        degrees = re.search(r"\\circ|\u00b0|degree", both)
        for radians in (False, True) if degrees else (False,):
            try:
                if same_as_read(a, b, commas, radians):
                    return True
                verdict = False
            except TooLarge:
                return False
            except UNREADABLE:
                continue
    return verdict


def squeezed(text):
    return re.sub(r"\s+", "", unmarked(text))


# ---------------------------------------------------------------- math-verify, killable
# Both texts were written by others, so they come as data. A LaTeX parser reads them; nothing runs.
PROGRAM = """
import json, sys
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
texts = json.load(sys.stdin)
read = [parse("$" + text.strip("$ ") + "$", [LatexExtractionConfig()], parsing_timeout=None)
        for text in texts]
print("true" if all(read) and verify(read[1], read[0], timeout_seconds=None) else "false")
"""


@cache
def verifier():
    """A process with math-verify in it, opened when it is first needed.

    unsafe: where there is no bubblewrap, a process that can be killed will do, for the program is
    fixed and what a model wrote is only parsed as LaTeX.
    """
    from toolstar.jail import Jail

    return Jail(workers=1, preload=("math_verify",), unsafe=True, seconds=SECONDS)


@lru_cache(4096)
def verified(a, b):
    """What math-verify says; False where it fails or is killed."""
    result = verifier().run(PROGRAM, stdin=json.dumps([a, b]))
    return result.status == "ok" and result.stdout.strip() == "true"


def math_equal(a, b):
    """Is answer a the mathematics of gold b? Texts, numbers or None -> bool; raises for none."""
    if a is None or b is None:
        return a is b
    a, b = str(a), str(b)
    exact = exactly_equal(a, b)
    if exact is not None:
        return exact
    digits = all(re.search(r"[\d\\]", text) for text in (a, b))
    return digits and max(len(a), len(b)) <= LONGEST // 2 and verified(a, b)


def is_mathematics(text):
    """Can this gold be read as mathematics, and is it no word?"""
    if words_of(text) or CLOCK.match(unmarked(text)) or len(text) > LONGEST:
        return False
    try:
        return bool(readings(text, True, False))
    except UNREADABLE:
        return False
