"""
What keeps a run from harm: one writer per folder, no orphans, and errors in one line.

    (1) run              what a person can mend is a sentence, and not a traceback
    (2) COUNT, SHARE ... types of flags, which refuse a number out of bounds
    (3) hold             one writer per OUT, by a lock that the kernel takes back at any death
    (4) die_with_parent  a killed torchrun or evaluate.py leaves nobody training or playing

Every program shares these through evaluate.py. Nothing here knows what is trained or played.
"""
import argparse
import atexit
import contextlib
import ctypes
import errno
import fcntl
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of prctl(2)
MEND = {errno.ENOENT: "is the path right?", errno.EISDIR: "a file is wanted here",
        errno.ENOSPC: "make room, and the same command goes on",
        errno.EDQUOT: "make room, and the same command goes on",
        errno.EACCES: "who may read and write here?", errno.EROFS: "choose another folder"}


# ----------------------------------------------------------------------------------------- errors

def run(program, function, *args):
    """Call it; what the user can mend is one line and not a traceback (STAR_TRACEBACK=1: both).

    Under torchrun the line goes to the file that it shows last, and that run.sh reads, too.
    """
    try:
        return function(*args)
    except SystemExit as error:
        text = error.code
        if not isinstance(text, str):
            raise
    except KeyboardInterrupt:
        text = f"{program}: interrupted; what is saved is kept, and the same command goes on"
    except (KeyError, ValueError, OSError) as error:
        if os.environ.get("STAR_TRACEBACK"):
            raise
        text = f"{program}: {told(error)}"
    if "RANK" in os.environ:
        last_words(text)
    raise SystemExit(text) from None


def told(error):
    """An error as one line: what is wrong with which file, and what mends it."""
    if isinstance(error, KeyError):
        text = " ".join(map(str, error.args))
        # a sentence of ours, or a look-up that failed
        return text if " " in text else f"KeyError {text!r} (STAR_TRACEBACK=1 shows where)"
    if isinstance(error, OSError) and error.filename is not None:
        mend = MEND.get(error.errno)
        return f"{error.filename}: {error.strerror}" + (f"; {mend}" if mend else "")
    return " ".join(str(error).split())


def last_words(text):
    """Have torchrun say this last. Where all ranks meet the same error, the first says it: torchrun
    ends the others meanwhile."""
    if os.environ["RANK"] != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": said}}))


@contextlib.contextmanager
def naming(path):
    """The disk's errors within say which file they are about, as those of a write do not."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and not the usage of all flags; --help shows that."""

    def error(self, message):
        text = f"{self.prog}: {message} ({self.prog} --help lists the flags)"
        if "RANK" in os.environ:
            last_words(text)
        self.exit(2, f"{text}\n")


def bounded(kind, least, most=math.inf, above=None):
    """A type of a flag: an int or float within bounds, both of them allowed; above: more than."""
    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            over = value >= least if above is None else value > above
            if over and value <= most and math.isfinite(value):
                return value
        low = f"more than {above}" if above is not None else f"{least} or more"
        what = {int: "a whole number", float: "a number"}[kind]
        high = "" if most == math.inf else f", at most {most}"
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}, {low}{high}")
    return parse


COUNT, NATURAL = bounded(int, 1), bounded(int, 0)  # from 1, from 0
SHARE, AMOUNT, POSITIVE = bounded(float, 0, 1), bounded(float, 0), bounded(float, 0, above=0)


# ---------------------------------------------------------------------------- one writer, no orphan

def hold(out):
    """Be the one writer of the folder OUT (rank 0) as long as this process lives, or SystemExit.

    The lock is a record lock: the kernel gives it back on any death, and no child inherits it, so
    that none holds it for a writer who is gone. Its file goes at a clean exit.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    file = Path(out) / ".writer"
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            who = os.read(lock, 200).decode(errors="replace").strip() or "of another user"
            raise SystemExit(f"a run ({who}) still writes to {out}: wait until it ends, end it, "
                             "or choose another --out") from None
        except OSError:  # a disk of a cluster that knows no locks: as without them
            return
        # a writer who ended meanwhile has removed the file that is locked here
        if file.exists() and os.fstat(lock).st_ino == file.stat().st_ino:
            break
        os.close(lock)
    os.ftruncate(lock, 0)
    os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    atexit.register(let_go, file, os.getpid())


def let_go(file, owner):
    """At the holder's end: the lock's file goes, and the folder if nothing came of it."""
    if os.getpid() == owner:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.parent.rmdir()


def die_with_parent():
    """Have the kernel kill this process (Linux) when torchrun, or the process that it is a spawned
    child of, dies in whatever way. One that is gone already is told by who has taken its place."""
    child = multiprocessing.parent_process()
    if sys.platform != "linux" or not (child or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()
    if child:
        orphan = parent != child.pid
    else:  # torchrun's process id is told nobody, but it is a Python
        try:
            orphan = not Path(f"/proc/{parent}/exe").readlink().name.startswith("python")
        except OSError:  # nobody that we started
            orphan = True
    if orphan:
        os.kill(os.getpid(), signal.SIGKILL)
