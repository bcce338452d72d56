"""The interpreter: what programs can do, what they cannot, and how a broken worker is replaced."""
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import hostile
import pytest
from conftest import ROOT, need

from toolstar import jail as jail_module
from toolstar.jail import Jail, JailError


@pytest.fixture(scope="module", autouse=True)
def bubblewrap():
    need("bubblewrap", shutil.which("bwrap"))


@pytest.fixture(scope="module")
def jail(host):  # whose secrets are there when the worker starts
    with closing(Jail(1, seconds=20)) as one:
        yield one


@pytest.fixture(scope="module")
def plain():
    """A jail that starts quickly because it imports nothing."""
    with closing(Jail(2, preload=(), seconds=20)) as one:
        yield one


def wait_for(what):
    while not what():
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------- results

def test_a_program_prints_and_reads_its_input(plain):
    result = plain.run("print(input()[::-1], end='')", "abc\n")
    assert result[:4] == ("ok", "cba", "", "")
    assert 0 < result.seconds < 20


def test_an_error_is_the_last_line_and_the_line_of_the_program(plain):
    result = plain.run("x = 1\n\nx / 0\n")
    assert result.status == "error"
    assert result.error == "ZeroDivisionError: division by zero (line 3)"
    assert result.stderr.startswith("Traceback (most recent call last):\n"
                                    '  File "program.py", line 3, in <module>\n    x / 0\n')


@pytest.mark.parametrize("program, status, error", [
    ("import sys\nsys.exit(0)", "ok", ""),
    ("import sys\nsys.exit(3)", "error", "exit code 3"),
    ("import sys\nsys.exit('no')", "error", "no"),
    ("raise KeyboardInterrupt", "error", "KeyboardInterrupt (line 1)"),
    ("x = ", "error", "SyntaxError: invalid syntax (line 1)"),
    ("bytearray(10**12)", "memory", "MemoryError (line 1)"),
    ("import os\nos.abort()", "killed", "killed by SIGABRT"),
    ("print('x' * 10**6)", "output", "more than 65536 bytes of output"),
])
def test_a_status_says_how_it_ended(plain, program, status, error):
    result = plain.run(program)
    assert (result.status, result.error) == (status, error)


def test_a_program_out_of_time_keeps_what_it_said(plain):
    result = plain.run("import time\nprint('begun', flush=True)\ntime.sleep(1000)", seconds=3)
    assert result[:4] == ("timeout", "begun\n", "", "stopped after 3 s")


def test_a_flood_of_output_is_stopped_before_its_end(plain):
    result = plain.run("import sys\nfor _ in range(10**6):\n    sys.stdout.write('x' * 1000)\n"
                       "print('the end', file=sys.stderr)")
    assert (result.status, result.stdout, result.stderr) == ("output", "x" * 65536, "")


def test_invalid_text_is_the_programs_error(plain):
    assert plain.run("a\0b").status == "error"
    assert "surrogates not allowed" in plain.run("print('\ud800')").error
    assert plain.run("\ufeffprint(1)").stdout == "1\n"
    assert plain.run("input()", "\ud800\n").stdout == "'?'\n"
    shown = plain.run("import sys\nsys.stdout.buffer.write(b'\\xff')\nNone")
    assert shown.stdout == "\ufffd"


def test_addresses_are_masked_and_numbers_are_not(plain):
    result = plain.run("print(object(), hex(2**60))\nraise ValueError(object())")
    assert result.stdout == "<object object at 0x0> 0x1000000000000000\n"
    assert result.error == "ValueError: <object object at 0x0> (line 2)"
    shown = plain.run("print(lambda: 0, (i for i in [1]), 'at 0x7ffad8bf0d60')").stdout
    assert shown == ("<function <lambda> at 0x0> <generator object <genexpr> at 0x0> "
                     "at 0x7ffad8bf0d60\n")


def test_equal_programs_say_the_same(jail):
    program = ("import random, numpy, sympy.core.random as s\n"
               "print(random.random(), numpy.random.rand(), s.random(), {'a', 'b', 'c', 'd'})")
    first = jail.run(program)
    assert first.status == "ok"
    assert jail.run(program).stdout == first.stdout
    with closing(Jail(1)) as other:
        assert other.run(program).stdout == first.stdout


def test_programs_print_the_same_as_in_plain_python(jail, test_data):
    path = test_data / "parity" / "toolstar_programs.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    assert len(cases) == 310
    for case in cases:
        result = jail.run(case["p"])
        shown = case["b"][0] + "\n" if case.get("b") else ""
        error = re.sub(r" \(line \d+\)$", "", result.error)
        expected = case.get("e", "")
        suggests = sys.version_info[:2] == (3, 11)  # other versions word their errors differently
        assert result.stdout == case["out"] + shown, case
        assert error == expected if suggests else bool(error) == bool(expected), case


# ---------------------------------------------------------------------------------------- hostile

@pytest.fixture(scope="module")
def host(tmp_path_factory):
    one = hostile.Host(tmp_path_factory.mktemp("host"))
    yield one
    one.close()


@pytest.mark.parametrize("attack", hostile.PROGRAMS, ids=lambda each: f"{each[0]}, {each[1]}")
def test_a_hostile_program_has_no_effect(jail, host, attack):
    assert hostile.attack(jail, host, *attack) == []


def open_to_all(path):
    """bubblewrap's flags that show a folder to every user, even below a closed folder."""
    closed = [folder for folder in path.parents if not folder.stat().st_mode & 1]
    if not closed:
        return []
    inner = path.relative_to(closed[-1]).parents
    folders = [closed[-1] / part for part in reversed(inner) if str(part) != "."]
    made = [flag for folder in folders for flag in ("--dir", str(folder))]
    return ["--tmpfs", str(closed[-1]), *made, "--ro-bind", str(path), str(path)]


@pytest.mark.slow
def test_hostile_programs_come_to_nothing_as_an_ordinary_user():
    if os.geteuid():
        pytest.skip("this user is an ordinary one")
    need("setpriv", shutil.which("setpriv"))
    flags = [flag for place in (sys.base_prefix, sys.prefix, ROOT)
             for flag in open_to_all(Path(place).resolve())]
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        ["bwrap", "--cap-add", "ALL", "--dev-bind", "/", "/", *flags, *user, sys.executable, "-B",
         str(ROOT / "tests" / "hostile.py")], capture_output=True, text=True, timeout=300)
    words = f"{len(hostile.PROGRAMS)} programs as user 65534, jailed: 0 wrong\n"
    assert done.stdout == words, done.stdout + done.stderr


# ----------------------------------------------------------------------------------------- broken

def kill(worker):
    os.kill(worker.pid, signal.SIGKILL)
    worker.process.wait()


def idle(one):
    """The warm workers of a jail that run no program."""
    return list(filter(None, list(one.idle.queue)))


def test_a_worker_that_was_killed_between_calls_or_has_grown_old_is_replaced(plain, monkeypatch):
    plain.run("1")
    kill(idle(plain)[-1])
    assert [plain.run(f"print({i})").stdout for i in range(4)] == ["0\n", "1\n", "2\n", "3\n"]
    old = idle(plain)[-1]
    monkeypatch.setattr(jail_module, "CALLS", 0)
    assert plain.run("1").status == "ok" and old.process.poll() is not None


def test_a_call_whose_worker_is_killed_is_repeated_once(monkeypatch):
    made, wait = [], jail_module.Worker.wait
    monkeypatch.setattr(jail_module.Worker, "wait", lambda one: (wait(one), made.append(one)))
    with closing(Jail(1, preload=(), seconds=1000)) as one, ThreadPoolExecutor(1) as pool:
        for deaths, seconds, status in (1, 1, "ok"), (2, 1000, "broken"):
            call = pool.submit(one.run, f"import time\ntime.sleep({seconds})\nprint(5)")
            for _ in range(deaths):  # once the program runs
                wait_for(lambda call=call: call.done() or made[-1].process.poll() is None
                         and len(hostile.below(made[-1].process.pid)) == 2)
                kill(made[-1])
            result = call.result()
            assert result.status == status, result
            assert "died" in result.error if deaths == 2 else result.stdout == "5\n"
            assert one.run("print(6)").stdout == "6\n"


def test_a_program_inherits_nothing_of_a_parent_with_many_open_files():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    with closing(Jail(1, preload=(), seconds=20)) as one:
        found = one.run("import os\nfor fd in range(3, 999):\n    try:\n        os.fstat(fd)\n"
                        "        print(fd)\n    except OSError:\n        pass")
    for fd in opened:
        os.close(fd)
    assert (found.status, found.stdout) == ("ok", ""), "not the socket that its answers go through"


def test_a_worker_that_does_not_answer_is_broken_and_replaced():
    with closing(Jail(1, preload=(), seconds=20)) as one:
        stopped, = idle(one)
        os.kill(stopped.pid, signal.SIGSTOP)
        one.run("print(1)", seconds=0)  # another worker takes it, and may have no time for it
        assert stopped.process.poll() is not None, "it is killed"
        assert one.run("print(2)").stdout == "2\n"


def test_an_interrupted_caller_leaves_the_pool_whole(plain):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            plain.run("while True: pass")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert plain.run("print(3)").stdout == "3\n"
    assert plain.idle.qsize() == plain.workers


# ------------------------------------------------------------------------------------------- pool

def test_128_callers_get_their_own_answers(plain):
    with ThreadPoolExecutor(128) as pool:
        results = list(pool.map(lambda i: plain.run("print(input())", f"{i}"), range(256)))
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(256)]


def test_nothing_is_left_after_a_jail():
    descriptors = len(os.listdir("/proc/self/fd"))
    before = hostile.below(os.getpid())
    with closing(Jail(2, preload=(), seconds=20)) as one:
        for i in range(50):
            one.run("while True: pass" if i % 10 == 0 else "print(1)", seconds=0.1)
        busy = len(os.listdir("/proc/self/fd"))
        assert busy <= descriptors + 3 * 3, "a socket, a log and a process for each worker"
    wait_for(lambda: hostile.below(os.getpid()) <= before)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_workers_end_with_their_process():
    script = ("import os, signal\nfrom toolstar.jail import Jail\njail = Jail(1, preload=())\n"
              "print(jail.idle.queue[0].pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


# ---------------------------------------------------------------------------------------- command

def test_a_worker_starts_with_these_flags_and_no_other():
    words = jail_module.command({}, 5, 6)
    flags = {word for word in words if word.startswith("--")} - {"--symlink"}
    assert flags == {"--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1",
                     "--hostname", "--cap-drop", "--ro-bind", "--dev-bind", "--size", "--tmpfs",
                     "--remount-ro", "--chdir", "--seccomp", "--setenv"}
    assert words[words.index("--cap-drop") + 1] == "ALL"


def test_the_proof_sees_what_a_call_left_and_folders_that_are_writable(monkeypatch):
    whole = jail_module.view
    monkeypatch.setattr(jail_module, "view", lambda: ["--tmpfs", "/var/tmp", *whole()])
    with pytest.raises(JailError, match="other calls"):
        Jail(1, preload=())
