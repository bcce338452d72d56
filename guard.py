"""
What keeps a run from harm: one writer per folder, no orphans, and errors in one line.

    (1) run              what a person can mend is a sentence, and not a traceback
    (2) COUNT, SHARE ... types of flags, which refuse a number out of bounds
    (3) hold             one writer per OUT, by a lock that the kernel takes back at any death
    (4) die_with_parent  a killed torchrun or evaluate.py leaves nobody training or playing
    (5) watch_sigterm    a run that is asked to leave does so after an update, and all ranks do
    (6) progress         a bar that a log can hold

Programs have these from evaluate.py, as a rule. Nothing here knows what is trained or played.
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
import re
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of prctl(2)
MEND = {  # what a person does about an error of the disk
    errno.ENOENT: "is the path right?",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "a part of it is a file; name a folder",
    errno.EEXIST: "it is a file; name a folder",
    errno.EACCES: "name another, or have its rights changed",
    errno.EROFS: "name another place",
    errno.ENOSPC: "make room, and the same command goes on",
    errno.EDQUOT: "make room, and the same command goes on",
    errno.EADDRINUSE: "another program listens there; choose another --port"}


# ----------------------------------------------------------------------------------------- errors

def run(program, function, *args):
    """Call it; what the user can mend is one line and not a traceback (STAR_TRACEBACK=1: both).

    Under torchrun a rank ends here; its line goes to the file that is shown last, for run.sh, too.
    """
    try:
        found = function(*args)
        with naming("standard output"):
            sys.stdout.flush()  # at Python's own end it would be too late to say anything
        if "TORCHELASTIC_RUN_ID" in os.environ:  # Python's end waits for no thread of gloo's,
            atexit._run_exitfuncs()  # and one that asks for Python then aborts the rank
            ctypes.CDLL(None).exit(0)  # not os._exit, after which vLLM's shared memory would stay
        return found
    except SystemExit as error:
        text = error.code
        if not isinstance(text, str):
            raise
    except (KeyboardInterrupt, EOFError):
        print(f"{program}: interrupted; what is saved is kept, and the same command goes on",
              file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # whoever reads the output, head say, has enough: as `cat` ends
        drop_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (KeyError, ValueError, OSError) as error:
        if os.environ.get("STAR_TRACEBACK"):
            raise
        text = f"{program}: {told(error)}"
        drop_output()
    if "RANK" in os.environ:
        last_words(text)
    raise SystemExit(text) from None


def told(error):
    """An error as one line: the path and its trouble first, then what mends it."""
    if isinstance(error, KeyError):
        text = " ".join(map(str, error.args))
        # a sentence of ours, or a look-up that failed
        return text if " " in text else f"KeyError {text!r} (STAR_TRACEBACK=1 shows where)"
    if isinstance(error, OSError) and error.errno and error.strerror:
        path, mend = error.filename, MEND.get(error.errno)
        return "; ".join(filter(None, (f"{path}: {error.strerror}" if path is not None
                                       else error.strerror, mend)))
    return " ".join(str(error).split())


def drop_output():
    """Where standard output is closed or full, Python must not try it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def last_words(text):
    """Have torchrun say this last. Where all ranks meet the same error, the first says it: torchrun
    ends the others meanwhile."""
    if os.environ["RANK"] != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the disk may be what is full
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": said}}))


@contextlib.contextmanager
def naming(path):
    """The errors within say which file they are about, as those of a write or of text do not."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start}); name "
                         "another file, or write it again") from None


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
PART, PORT = bounded(float, 0, 1, above=0), bounded(int, 0, 65535)


def web_address(text):
    """A type of a flag: where a server listens."""
    if not re.match(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address like http://host:8000/v1")
    return text


# ---------------------------------------------------------------------------- one writer, no orphan

def hold(out, name=".writer"):
    """Be the one writer of the folder OUT (rank 0) as long as this process lives, or SystemExit.

    A record lock: given back on any death, inherited by no child. Its file goes at a clean exit.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    file = Path(out) / name
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


def hold_file(path):
    """Be the one writer of a file, as hold of a folder."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    hold(path.parent, f".{path.name}.writer")


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
        except FileNotFoundError:  # it is gone
            orphan = True
        except OSError:  # it may not be looked at: an init of root's, or alive
            orphan = parent == 1
    if orphan:
        os.kill(os.getpid(), signal.SIGKILL)


def watch_sigterm():
    """-> interrupted(device): whether any rank has got SIGTERM, for the loop to save and leave.

    torchrun kills what has not left 30 s after it: --shutdown-timeout must outlast an update.
    """
    import torch
    import torch.distributed as dist

    got = []
    signal.signal(signal.SIGTERM, lambda *_: got.append(True))

    def interrupted(device):
        flag = torch.tensor(float(bool(got)), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # every rank must reach it
        return bool(flag)
    return interrupted


@contextlib.contextmanager
def deaf():
    """Processes that are started within hear no interrupt: their parent's word on it is enough."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def workers(number):
    """A pool of processes that die with this one. Spawned: SQLite must not cross a fork."""
    with deaf():
        return multiprocessing.get_context("spawn").Pool(number, die_with_parent)


# ---------------------------------------------------------------------------------------- progress

class Lines:
    """Standard error for a bar that is no terminal's: each state a line of its own."""

    def write(self, text):
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self):
        """Each line is flushed."""


def progress(rows, name, total, initial=0, unit="it"):
    """tqdm's bar; in a file or a pipe a line each half minute, where it would be one of MBs."""
    from tqdm import tqdm

    sparse = {"file": Lines(), "mininterval": 30, "delay": 5, "ncols": 100}
    return tqdm(rows, name, total, initial=initial, unit=unit,
                **{} if sys.stderr.isatty() else sparse)
