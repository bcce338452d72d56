"""
What STAR's numbers can tell: its takeaways, and the pairs of cells in its tables, with intervals.

    (1) paper      a cell is the share of 1,000 test queries that one run solved. The 95% interval
                   of a difference is 1.96 standard errors of two independent binomials. For the
                   mean of the seven sets of questions it counts the 125 of Bamboogle alone, so it
                   is too narrow. More seeds, and that many pairs are looked at, would make all
                   intervals wider; that both cells have the same queries would make them narrower
    (2) takeaways  in our words, each as statements about two cells, A > B or A = B. A > B holds if
                   the interval is above 0. Numbers cannot show that A = B: an interval without 0
                   speaks against it
    (3) pairs      of Tables 1, 3 and 4: that the larger cell is the better setting holds if the
                   interval leaves 0 out
    (4) misfits    places in which the paper's own numbers do not fit each other
    (5) ours       with --runs: the difference of our runs of the two settings, on the tasks that
                   both have played, with its bootstrap interval over tasks (recipes/axes.py)

Reads   docs/paper.json; of each of --runs OUT/eval/rl/episodes.jsonl
Writes  tables on the terminal

    python -m recipes.claims
    python -m recipes.claims --size 3b --runs curriculum=out/3b/eval/rl \\
        sum=out/3b/axis/runs/grpo-sum-rl-fail-00-s0/eval/rl
"""
import itertools
import math

import runtime
from evaluate import interval, mean, span
from recipes.axes import AXES, KNOWN, TABLES, gaps, numbers_at, read_runs
from runtime import Help, Parser

UNKNOWN = "cannot be told"
PAIRS = {"reward": "Table 1", "data": "Table 3, Figure 5", "algorithm": "Table 4"}
SETS = [name.removeprefix("ood-") for name in TABLES
        if name.startswith("ood-") and not name.startswith("ood-data")]


def papers_gap(a, b):
    """(difference, low, high) of two cells, as shares."""
    change, parts, n = share(a) - share(b), 1, TABLES["queries"]["rows"]["test"][0]
    if a.startswith("ood"):
        a, b = (where.replace("/", "-bamboogle/", 1) for where in (a, b))
        parts, n = len(SETS), TABLES["sets"]["rows"]["bamboogle"][1]
    spread = 1.96 * math.sqrt(sum(p * (1 - p) for p in (share(a), share(b))) / n) / parts
    return change, change - spread, change + spread


def share(where):
    """The number at AXIS/SETTING/SIZE or TABLE/ROW/COLUMN of docs/paper.json."""
    axis, setting, *column = where.split("/")
    found = AXES.get(axis, {}).get(setting, f"{axis}/{setting}")
    return numbers_at("/".join([found, *column]) if found.count("/") == 1 else found)[0] / 100


def our_gap(a, b, runs):
    """The same of our runs of two settings; None without them."""
    change = gaps(runs[a], runs[b])[0] if runs.get(a) and runs.get(b) else []
    return (change.mean(), *interval(change, -1)) if len(change) else None


def cell(gap, relation):
    """A difference, its interval, and whether the relation between the two, > or < or =, holds."""
    if gap is None:
        return ""
    change, low, high = gap
    seen = ">" if low > 0 else "<" if high < 0 else None
    verdict = UNKNOWN if seen is None else "holds" if seen == relation else "against"
    return f"{100 * change:+.1f} ({span(low, high, '+')}) {verdict}"


def takeaways(runs, size=None):
    """Rows: what the paper says, its statements, and what its numbers and ours say of them."""
    yield ["takeaway", "statement", "paper, difference (95%)", *(["ours"] if runs else [])]
    for number, claim in enumerate(KNOWN["takeaways"], 1):
        what = f"{number}. {claim['what']}"
        for says in claim["says"]:
            a, relation, b = says.split()
            table, first, *column = a.split("/")
            second, apart = b.split("/")[1], table.startswith("ood")
            where = "".join(f" at {name.upper()}" for name in column) + ", out of domain" * apart
            paper = cell(papers_gap(a, b), relation) if table != "noise" else "in words"
            fits = not apart and (not column or size in (None, *column))
            ours = cell(our_gap(first, second, runs) if fits else None, relation)
            yield [what, f"{first} {relation} {second}{where}", paper, *([ours] if runs else [])]
            what = ""


def pairs(name, runs, size=None):
    """Rows: for each pair of a table's rows the difference of success, a column for each size."""
    table = TABLES[name]
    sizes = [column for column in table["columns"] if size in (None, column)]
    yield [PAIRS[name], *(f"{column.upper()}: paper, difference (95%)" for column in sizes),
           *(["ours"] if runs else [])]
    for b, a in itertools.combinations(table["rows"], 2):
        found = [papers_gap(f"{name}/{a}/{column}", f"{name}/{b}/{column}") for column in sizes]
        order = [">" if change > 0 else "<" for change, *_ in found]
        ours = cell(our_gap(a, b, runs), order[0]) if len(set(order)) == 1 else ""
        yield [f"{a} - {b}", *map(cell, found, order), *([ours] if runs else [])]


def misfits():
    """A line for each kind of place in which the paper's own numbers do not fit each other."""
    rows, gpus = TABLES["minutes"]["rows"], TABLES["gpus"]["rows"]["gpus"]
    steps = {(name, size): 60 * hours / minutes / count for name in rows
             for size, hours, minutes, count in zip(
                 TABLES["minutes"]["columns"], TABLES["gpu-hours"]["rows"][name], rows[name], gpus,
                 strict=True)}
    usual = sorted(steps.values())[len(steps) // 2]
    for (name, size), n in steps.items():
        if abs(n / usual - 1) > 0.05:
            yield (f"Table 4: the GPU hours and minutes of {name} at {size.upper()} are those of "
                   f"{n:.0f} updates; all others are those of {usual:.0f}, within 2")
    each = 100 / TABLES["sets"]["rows"]["bamboogle"][1]
    for table in "ood-bamboogle", "ood-data-bamboogle":
        for name, values in TABLES[table]["rows"].items():
            for value in values:
                if abs(value - each * round(value / each)) > 0.051:
                    yield (f"Table 9: {value} of {name} on Bamboogle is no share of its 125 "
                           "questions")
    for table in "ood", "ood-data":
        for name, values in TABLES[table]["rows"].items():
            for i, (size, value) in enumerate(zip(TABLES[table]["columns"], values, strict=True)):
                found = mean(TABLES[f"{table}-{one}"]["rows"][name][i] for one in SETS)
                if abs(found - value) > 0.051:
                    yield (f"{TABLES[table]['where']}: the mean of {name} at {size.upper()} is "
                           f"{value}, and that of its seven cells {found:.2f}")
    for name, n in ("synthetic", 200), ("validation", 180):
        value = numbers_at(f"reliability/{name}/success")[0]
        if abs(value - 100 / n * round(value * n / 100)) > 0.051:
            yield f"C.1: {value}% is no share of {n} queries"


def markdown(rows):
    head, *rows = rows
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *rows))


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help, prog="python -m recipes.claims")
    p.add_argument("--runs", nargs="+", default=[], metavar="NAME=OUT/eval/rl",
                   help="our runs, as of recipes/axes.py; repeat a name per seed")
    p.add_argument("--size", choices=TABLES["reward"]["columns"],
                   help="the size of our runs, beside whose numbers they are printed; unset: all")
    return p.parse_args(argv)


def page(runs, size=None):
    """All of it as markdown. runs: {setting: its seeds}, as of recipes.axes.read_runs."""
    tables = [takeaways(runs, size), *(pairs(name, runs, size) for name in PAIRS)]
    return "\n".join([*map(markdown, tables), "".join(f"- {line}.\n" for line in misfits())])


def tabulate(args):
    print(page(read_runs(args.runs) if args.runs else {}, args.size), end="")


def main(argv=None):
    runtime.run("recipes.claims", tabulate, flags(argv))


if __name__ == "__main__":
    main()
