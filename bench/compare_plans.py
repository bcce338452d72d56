"""
Where two readers of the same itineraries differ, slot by slot, blanks and case apart.

    python format_plan.py FILE > rules.jsonl
    python format_plan.py FILE --llm-url URL --llm-model M > llm.jsonl
    python bench/compare_plans.py rules.jsonl llm.jsonl
"""
import argparse
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from format_plan import FIELDS  # noqa: E402


def bare(value):
    return re.sub(r"[\s;.]+", " ", value or "-").strip().lower()


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs=2, type=Path, help="two outputs of format_plan.py")
    files = p.parse_args().files
    rows = [[json.loads(line)["plan"] for line in path.open()] for path in files]
    agree = total = 0
    for line, plans in enumerate(zip(*rows, strict=True), 1):
        days = zip_longest(*(plan or [] for plan in plans), fillvalue={})
        for number, pair in enumerate(days, 1):
            for field in FIELDS:
                values = [day.get(field) for day in pair]
                same = len(set(map(bare, values))) == 1
                agree, total = agree + same, total + 1
                if not same:
                    print(f"line {line}, day {number}, {field}")
                    for path, value in zip(files, values, strict=True):
                        print(f"  {path.name}: {value}")
    print(f"{agree} of {total} slots agree ({agree / max(total, 1):.1%})")


if __name__ == "__main__":
    main()
