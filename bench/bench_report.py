"""
How long the report takes: writing its page from many episodes, and opening it in a browser.

    python bench/bench_report.py                     # 5,000 episodes of 20 messages
    python bench/bench_report.py --episodes 500

Printed are the seconds that write_report takes, the size of the page, and the milliseconds after
which the page has drawn itself in headless Chromium, as it says itself (data-ready-ms).
"""
import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def records(number):
    """Episodes of 20 messages, each judged by two checks."""
    for i in range(number):
        roles = ["system", "user", *["assistant", "user"] * 9]
        messages = [{"role": role, "content": f"{i} {role} " * 80} for role in roles]
        yield {"task": {"id": f"t{i}", "level": "easy", "query": f"Trip {i}?"}, "stop": "answer",
               "messages": messages, "plan": None, "turns": 9, "calls": 8, "tokens": 4000,
               "score": {"success": i % 2, "checks": {"is_not_absent": [bool(i % 2), None],
                                                      "valid_cost": [None, None]}},
               "reward": 1.0, "strict": 0}


def ready_ms(page, profile):
    """What the page says of itself in a headless browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if not browser:
        raise SystemExit("no chromium here: apt-get install chromium")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={profile}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r'data-ready-ms="(\d+)"', dom)[1])


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--episodes", type=int, default=5000, help="episodes in the page")
    p.add_argument("--rounds", type=int, default=3, help="times that the page is opened")
    args = p.parse_args()
    sys.path.insert(0, str(ROOT))
    from look.report import write_report
    from runtime import write_jsonl

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_jsonl(run / "many" / "episodes.jsonl", records(args.episodes))
        begun = time.perf_counter()
        write_report(run, run, args.episodes)
        seconds = time.perf_counter() - begun
        page = run / "report.html"
        ready = [ready_ms(page, run / f"profile{i}") for i in range(args.rounds)]
        print(json.dumps({"episodes": args.episodes, "write_s": round(seconds, 2),
                          "page_mb": round(page.stat().st_size / 1e6, 1), "ready_ms": ready}))


if __name__ == "__main__":
    main()
