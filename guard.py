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
import fcntl
import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of prctl(2)


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
        text = f"{program}: {error.args[0] if isinstance(error, KeyError) else error}"
    if "RANK" in os.environ:
        last_words(text)
    raise SystemExit(text) from None


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


def bounded(kind, least, most=math.inf, above=None):
    """A type of a flag: an int or float within bounds, both of them allowed; above: more than."""
    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most and math.isfinite(value) and (above is None or value > above):
                return value
        low = f"more than {above}" if above is not None else f"{least} or more"
        what = {int: "a whole number", float: "a number"}[kind]
        high = "" if most == math.inf else f", at most {most}"
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}, {low}{high}")
    return parse


COUNT, NATURAL = bounded(int, 1), bounded(int, 0)  # from 1, from 0
SHARE, POSITIVE = bounded(float, 0, 1), bounded(float, 0, above=0)


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
    """Have the kernel kill this process (Linux) when the one that started it dies, in whatever way.

    A torchrun that was gone before this call is known by its place being taken by no Python.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    orphan = os.getppid() != parent
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            orphan |= not Path(f"/proc/{parent}/exe").readlink().name.startswith("python")
        except OSError:  # it is gone, or nobody that we started
            orphan = True
    if orphan:
        os.kill(os.getpid(), signal.SIGKILL)
