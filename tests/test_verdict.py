"""Verdicts of the tools world: parity with the reference, mathematics, rewards, hostile text."""
import gzip
import json
import math
import os
import random
import time
from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies as st

from toolstar import expression, mathematics, verdict

SEED = int(os.environ.get("TEST_SEED", 0))
HEADER = verdict.HEADER


def cases(test_data, name):
    with gzip.open(test_data / "parity" / f"toolstar_{name}.jsonl.gz", "rt", "utf-8") as file:
        return [json.loads(line) for line in file]


def close(values, others):
    return all(abs(x - y) <= 1e-12 for x, y in zip(values, others, strict=True))


# ---------------------------------------------------------------- parity

def response(case):
    """The response that the reference reads, or None where it finds none."""
    if "r" in case:
        return case["r"]
    pieces = case["s"].split(HEADER if HEADER in case["s"] else "Assistant:")
    return pieces[1] if len(pieces) > 1 else None


def test_the_released_reward_is_the_references_bit_for_bit(test_data):
    rows = cases(test_data, "reward")
    for case in rows:
        text = response(case)
        if text is None:
            assert case["x"] == "IndexError"  # a rollout always has a response
            continue
        value = verdict.released(text, case["g"], case.get("e", verdict.END))
        # where golds are no texts the reference raises, and ours finds the answer wrong
        assert abs(value - case.get("v", 0.0)) <= 1e-12, case
        if "e" not in case:
            assert verdict.reward(text, case["g"], "released") == value
    assert len(rows) == 2400


def test_the_format_is_judged_as_the_reference_judges_it(test_data):
    rows = cases(test_data, "format")
    assert [verdict.released_format(case["t"]) for case in rows] == [bool(c["v"]) for c in rows]
    assert len(rows) == 500


def test_boxes_are_found_and_opened_as_the_reference_does_it(test_data):
    rows = cases(test_data, "box")
    for case in rows:
        box = verdict.last_box(case["t"])
        found = box, verdict.open_box(box), verdict.open_box(case["t"])
        assert found == (case["l"], case.get("v"), case.get("o")), case
    assert len(rows) == 500


def test_token_f1_and_normalization_are_the_references(test_data):
    rows = cases(test_data, "f1")
    for case in rows:
        assert abs(verdict.token_f1(case["p"], case["g"]) - case["v"]) <= 1e-12, case
        golds = [case["g"]] if isinstance(case["g"], str) else case["g"]
        said = [verdict.normalize(case["p"]), [verdict.normalize(gold) for gold in golds]]
        assert said == case["n"]
    assert len(rows) == 500


def test_text_is_cut_as_the_reference_cuts_it(test_data):
    rows = cases(test_data, "truncate")
    for case in rows:
        assert verdict.truncate(case["s"], case.get("m", 400)) == case["v"]
    assert len(rows) == 100


def test_qa_metrics_are_the_references_but_the_best_alias_counts(test_data):
    rows, better, odd = cases(test_data, "qa"), 0, 0
    for case in rows:
        ours = verdict.qa_metrics(case.get("a"), case["g"])
        ours = [ours["em"], ours["acc"], ours["f1"]]
        golds, last = case["g"], case.get("v", [0, 0, 0])
        if "best" in case:
            assert close(ours, case["best"]), case
        elif isinstance(golds, str) and golds[:1] != "[":
            assert close(ours, last), case
        elif isinstance(golds, str) and golds[-1] == "]" and len(golds) > 2:
            # a printed list, of which the reference keeps the last part
            assert all(x >= y - 1e-12 for x, y in zip(ours, last, strict=True)), case
        else:  # no gold, a gold that is no text, or an interval that the reference splits
            odd += not close(ours, last)
        better += not close(ours, last)
    print(f"the best alias is not the last in {better} of {len(rows)}; {odd} of them are odd golds")
    assert len(rows) == 520 and odd <= 10


def test_mathematics_is_judged_right_and_without_math_verify(test_data):
    rows = cases(test_data, "matheq")
    wrong, undecided, start = [], 0, time.process_time()
    for case in rows:
        equal = mathematics.math_equal(case["a"], case["b"])
        if equal != bool(case["j"]):
            wrong.append((case["k"], case["a"], case["b"]))
    seconds = time.process_time() - start
    for case in rows:
        texts = case["a"], case["b"]
        undecided += None not in texts and mathematics.exactly_equal(*map(str, texts)) is None
    reference = sum(bool(case["v"]) != bool(case["j"]) for case in rows)
    print(f"wrong {len(wrong)} of {len(rows)} (the reference {reference}), to math-verify "
          f"{undecided}, {len(rows) / seconds:,.0f} pairs/s")
    assert len(rows) == 1049 and len(wrong) <= 10, wrong
    assert undecided <= 20


def test_the_speed_of_the_released_reward_is_printed(test_data):
    rows = [case for case in cases(test_data, "reward") if "r" in case]
    start = time.process_time()
    for case in rows:
        verdict.reward(case["r"], case["g"], "released")
    print(f"released: {len(rows) / (time.process_time() - start):,.0f} rewards/s")


# ---------------------------------------------------------------- mathematics

EQUAL = r"""
1,000 ~ 1000
−5 ~ -5
5 % ~ 5\%
{1,2} ~ \{2,1\}
sqrt(2)/2 ~ \frac{1}{\sqrt2}
3**2 ~ 9
x=3 or x=-3 ~ \pm 3
x<1 or x>5 ~ (-\infty,1)\cup(5,\infty)
(1,2)U(3,4) ~ (3,4)\cup(1,2)
\frac{1\pm\sqrt{5}}{2} ~ \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
\sqrt[3]{-8} ~ -2
e^{i\pi} ~ -1
\log_{10} 1000 ~ 3
\binom{5}{2} ~ 10
\sin 30^\circ ~ \frac12
\sin^{-1}(1) ~ \frac{\pi}{2}
\sin 2x ~ 2\sin x\cos x
5 m ~ 500 cm
3\text{ feet} ~ 36\text{ inches}
1\text{ m}^2 ~ 10000\text{ cm}^2
60\text{ km/h} ~ 60\text{ km per hour}
50 cents ~ \$0.50
18 eggs ~ 18
60 mph ~ 60 miles per hour
2 sin x ~ 2\sin(x)
3:00 \text{ p.m.} ~ 3:00 pm
\text{(A) }5 ~ A
B. 12 ~ (B)
\langle 1,2\rangle ~ (1,2)
7\frac{1}{2}\% ~ 0.075
x \ne 3 ~ (-\infty,3)\cup(3,\infty)
2^3=8 ~ 8
\text{Area} = 12\pi ~ 12\pi
\left[\begin{array}{c}1\\2\end{array}\right] ~ \begin{pmatrix}1\\2\end{pmatrix}
\lceil 2.1 \rceil ~ 3
3\cdot 4^{n-1} ~ \frac34 4^n
\text{A and B} ~ B, A
\textbf{(B) } ~ B
\text{(-1, 2)} ~ (-1,2)
\left(\begin{array}{cc}1&2\\3&4\end{array}\right) ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
2x+3y=6 ~ 4x+6y=12
y-2=3(x-1) ~ y=3x-1
(x,y)=(1,2) ~ (1,2)
0.1\overline{6} ~ 1/6
1:2:3 ~ 2:4:6
x \ge 3 ~ [3,\infty)
x \in \mathbb{R} ~ (-\infty,\infty)
\varnothing ~ \{\}
10!/8! ~ 90
\frac{x^2-1}{x-1} ~ x+1
\sqrt{x^2} ~ |x|
(1,234) ~ (1, 234)
1 1/2 ~ 3/2
-1\frac{1}{2} ~ -1.5
|3+4i| ~ 5
10_2 ~ 2
\boxed{5} ~ 5
8\pi\text{ square units} ~ 8\pi
\text{ellipse} ~ Ellipse
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{bmatrix} 1.0 \\ 2 \end{bmatrix}
1e-3 ~ 0.001
x = \text{east} ~ \text{East}
3.5 million ~ 3500000
abc ~ a \cdot b \cdot c
May ~ may
2 dozen ~ 24
f^{-1}(x)=\frac{x-1}{2} ~ \frac{x-1}{2}
[[1, 2], [3, 4]] ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
1+2i ~ 1+2\mathrm{i}
1/e ~ \frac{1}{\mathrm{e}}
x=5 \quad x=6 ~ 5,6
x_1=5 \quad x_2=6 ~ 5,6
x=5 \lor x=6 ~ 5,6
5 m/s ~ 5
9.8 m/s^2 ~ 9.8\,\text{m/s}^2
9.8\,\mathrm{m/s^2} ~ 9.8 \mathrm{~m} / \mathrm{s}^{2}
2 g/cm^3 ~ 2\ \text{g/cm}^3
\{x \mid x > 2\} ~ (2,\infty)
\{x|-1<x<2\} ~ (-1,2)
\{x : x > 2\} ~ x>2
5 PM ~ 5 p.m.
p\equiv 1\pmod 4 ~ p\equiv 1\pmod{4}
"""
UNEQUAL = r"""
-5 ~ 5
1/2 ~ 12
25 ~ 25\%
5\text{ cm} ~ 5\text{ m}
x=5 ~ y=5
\frac{22}{7} ~ \pi
0.333 ~ \frac13
(1,2) ~ (2,1)
(1,2) ~ \{1,2\}
[1,2] ~ [1,2)
1,1,2 ~ 1,2,2
1,2 ~ 1,2,3
\pm 3 ~ 3
x<3 ~ x>3
y<2x+1 ~ y>2x+1
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}1&2\end{pmatrix}
\sqrt{x^2} ~ x
x ~ X
10^{100} ~ 10^{100}+1
30^\circ ~ \frac{\pi}{3}
1969-07-20 ~ 1942
12:30 p.m. ~ 12:30
\text{Monday} ~ \text{Tuesday}
yes ~ no
(A) 5 ~ B
2^3=9 ~ 9
2 3 ~ 6
ten ~ net
May ~ Amy
1 1/2 ~ 11/2
-1 1/2 ~ -11/2
3 4 ~ 34
5 million ~ 5
2 dozen ~ 2
[3,4) ~ 3,4
(3,4] ~ 3,4
[[1, 2], [3, 4]] ~ \begin{pmatrix}1&3\\2&4\end{pmatrix}
5x ~ 5
0\cdot\infty ~ 0
2 ~ 2\mathrm{i}
3 ~ 3\mathrm{e}
x=5 \quad x=6 ~ 6
x=5 \lor x=6 ~ 6
x=5 \\ x=6 ~ 6
5 PM ~ 5 AM
\{x \mid x > 2\} ~ (3,\infty)
p\equiv 1\pmod 4 ~ p\equiv 1\pmod{5}
"""


def pairs(table):
    return [line.split(" ~ ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("a, b", pairs(EQUAL))
def test_equal_mathematics(a, b):
    assert mathematics.exactly_equal(a, b) and mathematics.exactly_equal(b, a)


@pytest.mark.parametrize("a, b", pairs(UNEQUAL))
def test_unequal_mathematics(a, b):
    assert not mathematics.exactly_equal(a, b) and not mathematics.exactly_equal(b, a)


def test_only_a_decimal_gold_forgives_the_noise_of_floats():
    assert mathematics.math_equal("0.30000000000000004", "0.3")
    assert not mathematics.math_equal("0.30000000000000004", "3/10")
    assert not mathematics.math_equal("0.3001", "0.3")
    assert not mathematics.math_equal("1.4142135623730951", r"\sqrt{2}")


def test_no_answer_equals_no_gold_but_another_none():
    assert mathematics.math_equal(None, None) and mathematics.math_equal(5, "5")
    assert not mathematics.math_equal(None, "5") and not mathematics.math_equal("5", None)
    assert not mathematics.math_equal("", "5") and not mathematics.math_equal("$", "5")


def number_forms(value):
    """Spellings of a rational number."""
    sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
    forms = [rf"{sign}\frac{{{top}}}{{{bottom}}}", rf"\left({sign}{top}/{bottom}\right)",
             rf"\( {sign}\dfrac{{{3 * top}}}{{{3 * bottom}}} \)", rf"{sign}{{{top}\over {bottom}}}",
             f"x = {sign}{top}/{bottom}", f"${sign}{top} / {bottom}$."]
    if bottom == 1:
        commas = f"{int(value):,}"
        forms += [f"{value}", f"{value}.0", commas, commas.replace(",", r",\!"),
                  rf"{sign}\sqrt{{{top * top}}}", rf"{value}\text{{ cm}}", rf"{value}^\circ"]
    elif top > bottom:
        forms.append(rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}")
    if 100 % bottom == 0:
        forms += [f"{float(value)}", rf"{100 * value}\%"]
    return forms


def test_every_spelling_of_a_number_equals_every_other_and_none_of_its_neighbours():
    rng = random.Random(SEED)
    for _ in range(300):
        value = Fraction(rng.randint(-9999, 9999), rng.choice((1, 1, 1, 2, 3, 4, 7, 25, 100)))
        other = value + rng.choice((1, -1, 10, Fraction(1, 7)))
        a, b = rng.sample(number_forms(value), 2)
        assert mathematics.exactly_equal(a, b), (a, b)
        wrong = rng.choice(number_forms(other))
        assert not mathematics.exactly_equal(a, wrong), (a, wrong)


def test_every_order_of_a_set_but_one_of_a_tuple():
    rng = random.Random(SEED)
    for _ in range(200):
        values = rng.sample(range(-30, 30), rng.randint(2, 5))
        turned = values[1:] + values[:1]
        one, two = (", ".join(map(str, row)) for row in (values, turned))
        assert mathematics.exactly_equal(rf"\{{{one}\}}", rf"\left\{{{two}\right\}}")
        assert mathematics.exactly_equal(one, two)
        assert not mathematics.exactly_equal(f"({one})", rf"\left({two}\right)")
        assert mathematics.exactly_equal(f"({one})", one)
        assert not mathematics.exactly_equal(rf"\{{{one}\}}", rf"\{{{one}, 31\}}")


def test_a_product_of_radicals_is_its_value():
    rng = random.Random(SEED)
    for _ in range(200):
        a, b, c = rng.randint(2, 12), rng.choice((2, 3, 5, 6, 7, 10, 11)), rng.randint(1, 6)
        forms = [rf"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}", rf"\frac{{{a}}}{{{c}}}\sqrt{{{b}}}",
                 f"{a}*sqrt({b})/{c}", rf"\frac{{{a * b}}}{{{c}\sqrt{{{b}}}}}",
                 rf"\frac{{\sqrt{{{a * a * b}}}}}{{{c}}}"]
        one, two = rng.sample(forms, 2)
        assert mathematics.exactly_equal(one, two), (one, two)
        assert not mathematics.exactly_equal(one, f"{a * math.sqrt(b) / c:.3f}")
        assert not mathematics.exactly_equal(one, rf"\frac{{{a}\sqrt{{{b + 1}}}}}{{{c}}}")


def test_what_is_not_readable_goes_to_math_verify_and_only_that():
    pytest.importorskip("math_verify")
    assert mathematics.exactly_equal(r"\int_0^1 x\,dx", r"\frac12") is None
    assert mathematics.math_equal(r"\int_0^1 x\,dx", r"\frac12")
    assert not mathematics.math_equal(r"\int_0^1 x\,dx", r"\frac13")


def test_math_verify_that_hangs_is_killed():
    pytest.importorskip("math_verify")
    start = time.monotonic()
    assert not mathematics.verified("2^{2^{2^{2^{2^{2}}}}}", "7")
    assert time.monotonic() - start < 60
    assert mathematics.verified(r"\frac{2}{4}", r"\frac12"), "the next call has a worker again"


@pytest.mark.parametrize("text", [
    "(" * 1000, "-" * 1000, r"\sin" * 250, r"\sqrt" * 200, "9^9^9^9^9", "10**10**8", "1e999999999",
    "(10^5000)" * 110, "1000!" * 199, "x^{999}" * 140, "(x+1)^{500}" * 80, "[[" * 400,
    "1," * 499 + "1", r"\text{" * 160, r"0.\overline{" + "3" * 900 + "}", "2^{1/999999999}",
    r"\binom{1000}{500}" * 58, r"\pm1" * 240, "1\\over" * 160 + "1", "{" * 10**6, "$" * 10**6,
    r"\boxed{" * 10**5, r"\boxed " * 10**5, "<answer>" * 10**5, "<result>" * 10**5,
    "<search></search><result></result>" * 20_000, "a " * 10**5, "\ud800\x00", "²", "①", "x_" * 300,
])
def test_no_text_raises_or_takes_long(text):
    start = time.monotonic()
    for gold in ("5", text[:-1] + "1"):
        mathematics.exactly_equal(text, gold)
        mathematics.exactly_equal(gold, text)
        for kind in ("released", "paper", "answer"):
            verdict.reward(text, [gold[:100]], kind, check="qa")
        verdict.qa_metrics(text, gold)
    assert time.monotonic() - start < 60


PIECES = r"""\frac { } ( ) [ ] \sqrt ^ _ 1 12 999 0. x y e i \pi \sin \log + - * / = < \le \in
\infty \cup , ; : ! % ° | \pm \begin{pmatrix} \end{pmatrix} & \\ \text{cm} \text{a} $ \$ . \boxed{
\{ \} \overline \over \left \lfloor \rfloor 10^ 1e9 \binom degrees ' ß 東 <answer> </answer>
<search> </search> <python> </python> <result> </result> <think> </think> <|im_end|>"""
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES.split()), st.text(max_size=4)),
                 max_size=40).map("".join)


@hypothesis.seed(SEED)
@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(TEXTS, TEXTS)
def test_any_two_texts_have_a_verdict(a, b):
    equal = mathematics.exactly_equal(a, b)
    assert equal in (True, False, None) and mathematics.exactly_equal(a, a)
    if "." not in a + b:  # a decimal gold forgives more than a decimal answer
        assert {equal, mathematics.exactly_equal(b, a)} in ({True}, {False}, {None}, {None, False})
    assert -1 <= verdict.reward(a, [b], "released") <= 1.1
    assert -1 <= verdict.reward(a, [b], "paper", check="qa") <= 1.1
    verdict.answer_of(a), verdict.qa_metrics(a, b), mathematics.is_mathematics(a)


# ---------------------------------------------------------------- answers

@pytest.mark.parametrize("text, answer", [
    (r"<answer>\boxed{5}</answer>", "5"),
    (r"<answer>\[ \boxed {\frac{1}{2}} \]</answer>", r"\frac{1}{2}"),
    ("<answer> Hollin </answer>", "Hollin"),
    ("<answer>A</answer> or <answer>B</answer>", "B"),
    (r"so it is \boxed{3}, no, \boxed{4}.", "4"),
    (r"<answer>5 \boxed{3}", "3"),
    (r"\boxed 7$ then", "7"),
    ("I do not know", None),
    (r"\boxed{4", None),
])
def test_the_answer_of_a_text(text, answer):
    assert verdict.answer_of(text) == answer


@pytest.mark.parametrize("golds, read", [
    ("Hollin", ["Hollin"]), (["a b", "c"], ["a b", "c"]), (5, ["5"]), (None, []), ([0], ["0"]),
    ("['New York', 'NYC']", ["New York", "NYC"]), ("[New York, NYC]", ["New York", "NYC"]),
    ("[1, 2]", ["[1, 2]"]), ("[1,2)", ["[1,2)"]), ("['1', '2']", ["1", "2"]), ("[]", []),
    ("[1, 'Paris']", ["1", "Paris"]), ("['Paris', None]", ["Paris"]), ("[{{1}}]", ["[{{1}}]"]),
])
def test_golds_are_read_in_all_their_forms(golds, read):
    assert verdict.aliases(golds) == read


# ---------------------------------------------------------------- rewards

def call(name, status="ok", empty=False, repeated=False):
    return {"name": name, "arguments": {}, "status": status, "empty": empty, "repeated": repeated}


BOTH = [call("Search"), call("Python")]
TASK = {"golds": ["1/2"], "check": "math", "needs": ["search", "python"]}


def rewards(answer="0.5", calls=(), task=TASK, format_ok=True, cut=False, text=""):
    row = verdict.score(task, answer, list(calls), format_ok, cut, text)
    counts = {"errors", "python", "search", "browse", "unneeded"}
    assert {key for key, value in row.items() if type(value) is int} == counts
    assert {type(row[key]) for key in row.keys() - counts} == {float}
    return [verdict.reward_of(row, kind) for kind in ("strict", "paper", "needed", "answer")]


@pytest.mark.parametrize("what, values", [
    ({"calls": BOTH}, [1.1, 1.1, 1.1, 1]),
    ({"calls": []}, [1, 1, 1, 1]),
    ({"answer": "2", "calls": BOTH}, [0, 0, 0, 0]),
    ({"answer": None, "calls": BOTH}, [0, 0, 0, 0]),
    ({"calls": BOTH, "format_ok": False}, [-1, -1, -1, 1]),
    ({"calls": BOTH, "cut": True}, [-1, -1, -1, 1]),
    # calls that gave nothing: the paper pays for them
    ({"calls": [call("Search"), call("Python", "error")]}, [1, 1.1, 1, 1]),
    ({"calls": [call("Search", empty=True), call("Python")]}, [1, 1.1, 1, 1]),
    ({"calls": [call("Search"), call("Python", repeated=True)]}, [1, 1.1, 1, 1]),
    ({"calls": [call("Search"), call("Python", repeated=True), call("Python")]}, [1.1] * 3 + [1]),
    # a tool that is not needed costs
    ({"calls": BOTH, "task": {**TASK, "needs": ["python"]}}, [1.1, 1.1, 0.95, 1]),
    ({"calls": BOTH * 2, "task": {**TASK, "needs": []}}, [1.1, 1.1, 0.8, 1]),
    ({"calls": [call("Search"), call("Browse")], "task": {**TASK, "needs": ["search", "browse"]}},
     [1, 1, 1.1, 1]),
    ({"calls": BOTH, "task": {"golds": ["1/2"], "check": "math"}}, [1.1, 1.1, 1.1, 1]),
    # questions: F1 2/3 is paid by the paper, the strict bonus asks for 0.9
    ({"answer": "New York City", "calls": BOTH,
      "task": {"golds": ["New York"], "check": "qa", "needs": ["search", "python"]}},
     [0.8, 0.9, 0.8, 0.8]),
    # both of two answers is half of none
    ({"answer": "yes no", "task": {"golds": ["yes"], "check": "qa"}}, [0, 0, 0, 0]),
    ({"answer": "Yes.", "task": {"golds": ["yes"], "check": "qa"}}, [1, 1, 1, 1]),
])
def test_rewards_are_those_of_the_table(what, values):
    assert rewards(**what) == pytest.approx(values)


def test_a_score_tells_the_calls_and_the_gap():
    text = (r"<think>a</think><search>q</search><result>r</result><python>1</python>"
            r"<result>1</result><answer>\boxed{12}</answer>")
    row = verdict.score({**TASK, "needs": ["python"]}, "12",
                        [call("Search", empty=True), call("Python", "error")], True, False, text)
    # token F1 takes 12 for 1/2, and pays for the tags
    assert row["released"] == pytest.approx(1.1) and row["gap"] == pytest.approx(1.1)
    told = {name: row[name] for name in ("success", "search", "python", "both", "errors",
                                         "decorative", "called")}
    assert told == {"success": 0, "search": 1, "python": 0, "both": 0, "errors": 1,
                    "decorative": 1, "called": 1}
    assert {*verdict.PARTS} <= {*row}


def test_questions_count_over_all_aliases_and_a_choice_is_no_article():
    task = {"golds": ["NYC", "New York"], "check": "qa"}
    assert verdict.score(task, r"\boxed{\text{the New York}}", [], True, False, "")["success"] == 1
    choice = {"golds": ["A"], "check": "qa"}
    assert verdict.score(choice, "(A)", [], True, False, "")["acc"] == 1
    for wrong in ("B", "the", "", None):
        assert verdict.score(choice, wrong, [], True, False, "")["acc"] == 0


def test_a_response_alone_has_the_papers_reward():
    text = (r"<think>a</think><search>q</search><result>r</result>{}"
            r"<answer>\boxed{{\frac12}}</answer>")
    program = "<python>1</python><result>1</result>"
    assert verdict.reward(text.format(program), ["0.5"], "paper") == pytest.approx(1.1)
    assert verdict.reward(text.format(""), ["0.5"], "paper") == 1
    assert verdict.reward(text.format("<think>"), ["0.5"], "paper") == -1
    assert verdict.reward(text.format("<think>"), ["0.5"], "answer") == 1
    forged = text.format("").replace("<result>r", "<result><python></python>")
    assert verdict.reward(forged, ["0.5"], "paper") in (-1, 1), "tags in a result are no calls"
    with pytest.raises(ValueError, match="released, paper or answer"):
        verdict.reward(text, ["0.5"], "strict")
    with pytest.raises(ValueError, match="there are strict"):
        verdict.reward_of({}, "best")


def test_a_numbers_size_is_bounded():
    setting = expression.Setting()
    with pytest.raises(expression.TooLarge):
        expression.Expression(expression.tokens_of("10^{10^8}", True), setting).value()
    value = expression.Expression(expression.tokens_of(r"2^{100}\cdot 3", True), setting).value()
    assert value == 3 * 2**100
