"""
Run math-verify [1] in processes that can be killed, since it can hang on hostile text, and its own
time limit works in the main thread only.

    (1) serve    a process imports math-verify once and forks; the fork compares pair after pair
    (2) bound    each pair has a limit of CPU seconds, at which the kernel kills the fork: the pair
                 counts as unequal and a new fork takes over. CPU time, not clock time, so a busy
                 machine changes hardly any verdict
    (3) allow    the limit is LONG seconds. Once slow and killed pairs have used ALLOWANCE seconds
                 (of which REFILL come back every second) it is BRIEF, enough for nearly all
                 honest pairs, so that many hostile answers do not hold up an update

A LaTeX parser reads the model's text as data; nothing executes it.
[1] github.com/huggingface/Math-Verify, huggingface/open-r1 issue 420

Reads and writes nothing.
"""
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

LONG, BRIEF = 0.3, 0.1  # seconds; an honest pair takes up to 0.07, on a busy machine 0.15
ALLOWANCE, REFILL = 0.6, 0.02  # seconds; seconds per second
LONGEST = 1000  # characters; a longer text equals only an identical one
MEMORY = 2 * 2**30  # bytes of a process
# one pair of each kind, compared before the first fork: the first of a kind takes longer
WARM = [(r"\sin^2 x", r"1-\cos^2 x"), (r"\ln x^2+\sqrt{x}", r"2\ln x+\sqrt{y}"), (r"\log_2 8", "3"),
        ("x<1", r"(-\infty,1)"), (r"x\ne 3", r"(-\infty,3)\cup(3,\infty)"), ("2x+y=6", "4x+2y=12"),
        (r"\begin{pmatrix}1\end{pmatrix}", r"\begin{bmatrix}2\end{bmatrix}"), (r"e^{i\pi}", "-1"),
        (r"\frac{n^2+n}{2}", r"\binom{n}{2}"), (r"|x|+\lfloor x\rfloor", r"\lceil x\rceil"),
        (r"2^{x}\cdot 3^{-x}", r"\frac{2^x}{3^x}"), (r"\frac{1}{\sqrt3}+\pi", r"\frac{\sqrt3}{3}"),
        (r"1\le x<3", "[1,3)"), ("[0,2]", r"0\le x\le 2"), ("(x+1)^2", "x^2+2x+1"),
        ("(x-2)(x+3)", "x(x+3)-2(x+3)"), (r"2(1-\cos^2 x)", r"2\sin^2(x)"), ("y=2x+1", "2x-y+1=0"),
        (r"\sin^{2} x", r"\cos^2 x"), (r"\frac{1}{x}", "x^{-1}"), ("x>4", r"(4,\infty)")]
WAIT = 60.0  # seconds of the clock, after which a silent process is replaced


# ---------------------------------------------------------------- inside of a process

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


def equal(a, b):
    """Whether math-verify finds two LaTeX texts equal.

    If both sides have letters in roots or logarithms, the letters count as positive:
    \\sqrt{50x^2} is 5x\\sqrt{2}.
    """
    from math_verify import verify
    from sympy import Expr, Symbol, expand_log, simplify

    a, b = expression(a), expression(b)
    if not a or not b:
        return False
    if verify(b, a, float_rounding=10, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    a, b = a[0], b[0]
    if not (isinstance(a, Expr) and isinstance(b, Expr) and has_roots(a) and has_roots(b)):
        return False
    positive = {letter: Symbol(letter.name, positive=True) for letter in a.free_symbols}
    return simplify(expand_log(a.subs(positive) - b.subs(positive), force=True)) == 0


def has_roots(value):
    """Whether a value has letters and a root or a logarithm."""
    from sympy import Pow, log

    return bool(value.free_symbols) and (
        value.has(log) or any(not one.exp.is_integer for one in value.atoms(Pow)))


def alone(a, b):
    """math-verify's own verdict on answer a and gold b, with its default settings."""
    from math_verify import parse, verify

    a, b = (parse(f"${text.strip('$ ')}$", parsing_timeout=None) for text in (a, b))
    return verify(b, a, timeout_seconds=None)


def serve(control):
    """Fork a process that compares pairs; whenever one was killed, fork the next.

    control: the socket on which the pairs come and the verdicts go.
    """
    from toolstar.mathematics import answers_equal

    kinds = {"equal": lambda a, b: answers_equal(a, b, equal), "alone": alone}
    for a, b in WARM:
        equal(a, b)
    for end in signal.SIGINT, signal.SIGTERM:  # the stage ends this process
        signal.signal(end, signal.SIG_IGN)
    control.send(b"1")
    while True:
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            while asked := control.recv(2**16):
                kind, seconds, a, b = json.loads(asked)
                began = time.process_time()
                signal.setitimer(signal.ITIMER_PROF, seconds)
                try:
                    verdict = bool(kinds[kind](a, b))
                except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError,
                        RuntimeError, TypeError, ValueError):  # sympy's, on hostile text
                    verdict = False
                signal.setitimer(signal.ITIMER_PROF, 0)
                control.send(json.dumps([verdict, time.process_time() - began]).encode())
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            return  # the fork has ended because the other end of the socket is closed
        control.send(b"[false, null]")


# ---------------------------------------------------------------- outside of it

class Process:
    """A handle to a process that compares pairs. One thread at a time may use it."""

    def __init__(self):
        if find_spec("math_verify") is None:
            raise ValueError("math-verify, which judges mathematics, is missing: pip install "
                             "math-verify")
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(WAIT)
        program = ("import socket, sys; sys.path[0] = sys.argv[1]; from toolstar.verify import "
                   "serve; serve(socket.socket(fileno=int(sys.argv[2])))")
        root, fd = Path(__file__).resolve().parent.parent, theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-c", program, str(root), str(fd)], pass_fds=[fd],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
        theirs.close()
        self.hear()

    def hear(self):
        """The process's next message; OSError if it has ended or is silent for WAIT seconds."""
        if not (said := self.control.recv(64)):
            raise ConnectionResetError("the process of math-verify has ended")
        return json.loads(said)

    def ask(self, *question):
        self.control.send(json.dumps(question).encode())
        return self.hear()

    def close(self):
        self.control.close()
        self.process.kill()
        self.process.wait()


class Pool:
    """Processes that many threads share, each started when it is first needed."""

    def __init__(self, size):
        self.idle, self.lock = queue.LifoQueue(), threading.Lock()
        self.left, self.since = ALLOWANCE, time.monotonic()
        for _ in range(size):
            self.idle.put(None)

    def seconds(self, spent=0.0):
        """The CPU seconds that the next pair may take. spent: those of a pair that was killed or
        slow."""
        with self.lock:
            now = time.monotonic()
            back = REFILL * (now - self.since)
            self.left, self.since = max(0.0, min(ALLOWANCE, self.left + back) - spent), now
            return max(BRIEF, min(LONG, self.left))

    def ask(self, kind, a, b):
        """The verdict on a pair; False if it takes too long, or if two processes fail on it."""
        for _ in "first", "again":
            process = self.idle.get()
            try:
                process, limit = process or Process(), self.seconds()
                verdict, spent = process.ask(kind, limit, a, b)
                if spent is None or spent >= LONG / 2:  # None: it was killed
                    self.seconds(spent or limit)
                return verdict
            except OSError:
                if process:
                    process.close()
                process = None
            finally:
                self.idle.put(process)
        return False


@cache
def pool(pid):
    """The Pool of this process. pid: a fork of this process gets a Pool of its own."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Pool(max(1, min(8, len(os.sched_getaffinity(0)) // ranks)))


@lru_cache(2**14)
def compared(a, b, kind="equal"):
    """Whether answer a equals gold b: with "equal" by mathematics.answers_equal, with "alone" by
    math-verify's own verdict."""
    if max(len(a), len(b)) > LONGEST:
        return a == b
    return pool(os.getpid()).ask(kind, a, b)
