"""
What every stage runs on: the parts that are needed to train, but teach nothing about training.

    (1) flags and errors     a mistake that you can fix is one line, not a traceback
    (2) processes            one writer per folder, no orphans, saving on SIGTERM, progress bars
    (3) records              jsonl files, written completely or not at all
    (4) grammars             texts drawn from files of alternatives
    (5) the chat template    a conversation as tokens, exactly as the engine sees and samples them
    (6) the engine           vLLM: its settings, its weights, tool calls that run meanwhile
    (7) endpoints            OpenAI-compatible servers
    (8) model folders        checks before training starts; folders that appear only when complete
    (9) checkpoints          resuming from the newest intact one
    (10) worlds and tasks    --env and --tasks

To take a stage home, copy it together with this file; grpo.py and arpo.py also need sandbox.py.
"""
import argparse
import atexit
import contextlib
import csv
import ctypes
import errno
import fcntl
import hashlib
import importlib
import importlib.util
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zipfile
import zlib
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

# ----------------------------------------------------------------------------- (1) flags and errors

FIXES = {  # what to do about an error of the file system
    errno.ENOENT: "is the path right?",
    errno.EISDIR: "this is a folder; name a file",
    errno.ENOTDIR: "a part of this path is a file; name a folder",
    errno.EEXIST: "this is a file; name a folder",
    errno.EACCES: "name another path, or change its permissions",
    errno.EROFS: "name another path",
    errno.ENOSPC: "free some space, then repeat the command",
    errno.EDQUOT: "free some space, then repeat the command",
    errno.EADDRINUSE: "another program listens there; choose another --port"}


def run(program, function, *args):
    """Call function(*args). An error that the user can fix becomes one line instead of a traceback
    (STAR_TRACEBACK=1 shows the traceback). Under torchrun this also ends the rank."""
    if hasattr(sys.stdout, "reconfigure"):  # printing must not fail on a terminal without UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    if "RANK" not in os.environ and not multiprocessing.parent_process():
        signal.signal(signal.SIGTERM, Terminated.stop)
    try:
        found = function(*args)
        with errors_name("standard output"):
            sys.stdout.flush()  # when Python exits, it is too late to report an error
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Skip Python's own shutdown: it does not wait for gloo's threads, and a thread that
            # needs the interpreter after its end aborts the rank. os._exit would skip too much: it
            # leaks vLLM's shared memory.
            atexit._run_exitfuncs()
            ctypes.CDLL(None).exit(0)
        return found
    except SystemExit as error:
        text, code = error.code, 1
        if not isinstance(text, str):
            raise
    except Terminated:
        text, code = f"{program}: stopped by SIGTERM; {KEPT}", 128 + signal.SIGTERM
    except (KeyboardInterrupt, EOFError):
        text, code = f"{program}: interrupted; {KEPT}", 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, such as head, has closed it
        drop_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (KeyError, ValueError, OSError) as error:
        if os.environ.get("STAR_TRACEBACK"):
            raise
        text, code = f"{program}: {one_line(error)}", 1
        drop_output()
    end(text, code)


KEPT = "what was saved is kept, repeat the command to continue"


class Terminated(KeyboardInterrupt):
    """SIGTERM ends a program as Ctrl-C does: its workers stop, and its files stay complete."""

    @classmethod
    def stop(cls, *_):
        raise cls


def end(text, code):
    """Exit with one line on standard error. For a rank, print_last or torchrun() prints it, after
    torchrun's own report, which would bury it. If all ranks fail alike, only rank 0 reports:
    torchrun ends the others while they sleep."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    if "RANK" in os.environ and os.environ.get("STAR_ERROR_FILE"):
        with contextlib.suppress(OSError), open(os.environ["STAR_ERROR_FILE"], "a") as file:
            file.write(f"{text}\n")
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        print_last(text, os.getppid())
    elif code == 1:
        raise SystemExit(text) from None
    else:
        print(text, file=sys.stderr)
    raise SystemExit(code) from None


def print_last(text, pid):
    """Print a line as soon as the process `pid` has ended."""
    program = ("import contextlib, os, select, sys\n"
               "with contextlib.suppress(OSError):\n"
               "    ended = select.poll()\n"
               "    ended.register(os.pidfd_open(int(sys.argv[1])))\n"
               "    ended.poll()\n"
               "print(sys.argv[2], file=sys.stderr)")
    # in a session of its own, because torchrun ends the rank's process group
    subprocess.Popen([sys.executable, "-ISc", program, str(pid), text], start_new_session=True,
                     stdout=subprocess.DEVNULL)


def report_missing_module(kind, error, traceback):
    """A sys.excepthook: if a package is missing, print the command that activates .venv."""
    if issubclass(kind, KeyboardInterrupt):  # during imports; after them run() reports it
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
    elif issubclass(kind, ModuleNotFoundError):
        print(f"{Path(sys.argv[0]).name}: {error}. Type `. .venv/bin/activate` first, or `bash "
              "run.sh test`, which makes .venv", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = report_missing_module


def one_line(error):
    """An exception as one line: path, problem, fix."""
    if isinstance(error, KeyError):
        text = " ".join(map(str, error.args))
        # either a sentence that we wrote, or a failed dictionary look-up
        return text if " " in text else f"KeyError {text!r} (STAR_TRACEBACK=1 shows where)"
    if isinstance(error, OSError) and error.errno and error.strerror:
        path, fix = error.filename, FIXES.get(error.errno)
        problem = error.strerror if path is None else f"{path}: {error.strerror}"
        return f"{problem}; {fix}" if fix else problem
    text = " ".join(str(error).split())
    return text if len(text) < 1000 else f"{text[:500]} ... (STAR_TRACEBACK=1 shows the rest)"


def drop_output():
    """Redirect a closed or full standard output to /dev/null, so that Python can exit cleanly."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def errors_name(path):
    """Add the path to errors that do not name one: failed writes and text that is not UTF-8."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); name "
                         "another file, or save it as UTF-8") from None


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line instead of printing the usage."""

    def __init__(self, prog=None, **words):
        spec = sys.modules["__main__"].__spec__
        if prog is None and spec and spec.origin == sys.argv[0]:  # as Python 3.14 does by itself
            prog = f"python -m {spec.name.removesuffix('.__main__')}"
        super().__init__(prog=prog, **words)

    def error(self, message):
        end(f"{self.prog}: {message} ({self.prog} --help lists the flags)", 2)

    def parse_known_args(self, args=None, namespace=None):
        """Expand the ~ of --out=~/x and of quoted paths, which the shell leaves unchanged."""
        words = sys.argv[1:] if args is None else args
        if "" in words:
            self.error("an argument is empty: is a variable of the shell not set?")
        words = [re.sub(r"^(--[\w-]+=)?~(?=/|$)", lambda found: (found[1] or "") + str(Path.home()),
                        word) for word in words]
        return super().parse_known_args(words, namespace)


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """--help shows the docstring as it is written, and each flag's default if it has one."""

    def _get_help_string(self, action):
        no_default = action.default in (None, []) or action.default is False  # but 0 is shown
        return action.help if no_default else super()._get_help_string(action)


def bounded(kind, least, most=math.inf, above=None):
    """A flag type: an int or float from `least` to `most`, both included, or more than `above`."""
    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            large_enough = value >= least if above is None else value > above
            if large_enough and value <= most and math.isfinite(value):
                return value
        low = f"more than {above}" if above is not None else f"{least} or more"
        what = {int: "a whole number", float: "a number"}[kind]
        high = "" if most == math.inf else f", at most {most}"
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}, {low}{high}")
    return parse


COUNT, NATURAL = bounded(int, 1), bounded(int, 0)  # from 1, from 0
SEED = bounded(int, 0, 2**32 - 1)  # the seeds that NumPy, and therefore vLLM, accepts
SHARE, AMOUNT, POSITIVE = bounded(float, 0, 1), bounded(float, 0), bounded(float, 0, above=0)
PART, PORT = bounded(float, 0, 1, above=0), bounded(int, 0, 65535)


def web_address(text):
    """A flag type: the address of a server."""
    if not re.match(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like http://host:8000/v1")
    return text


def endpoint(text):
    """A flag type: URL=MODEL -> (URL, MODEL)."""
    url, _, model = text.rpartition("=")
    if not re.match(r"https?://[^/\s]+", url) or not model:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://host:8000/v1=MODEL")
    return url, model


# ------------------------------------------------------------------------------------ (2) processes

PR_SET_PDEATHSIG = 1  # of prctl(2)


def lock_folder(out, name=".writer", what=None):
    """Make this process (rank 0) the only writer of the folder `out`; SystemExit if it has another
    one. what: the path to name in that message, if not `out`.

    The kernel releases the record lock whenever the process ends, and no child inherits it.
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
            raise SystemExit(f"another run ({who}) is writing to {what or out}: wait for it, stop "
                             "it, or choose another --out") from None
        except OSError:  # some cluster file systems have no locks: continue without one
            return
        # if the previous writer ended just now, it has removed the file that we locked
        if file.exists() and os.fstat(lock).st_ino == file.stat().st_ino:
            break
        os.close(lock)
    os.ftruncate(lock, 0)
    os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    atexit.register(release, file, os.getpid())


def release(file, owner):
    """When the owner exits: remove the lock file, and its folder if that is empty."""
    if os.getpid() == owner:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.parent.rmdir()


def lock_file(path):
    """Make this process the only writer of a file, as lock_folder does for a folder."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    lock_folder(path.parent, f".{path.name}.writer", path)


def die_with_parent():
    """Have the kernel (Linux) kill this process when torchrun, or the process that spawned it, dies
    in any way. If the parent is dead already, this process kills itself now."""
    child = multiprocessing.parent_process()
    if sys.platform != "linux" or not (child or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()  # the process that adopted us, if our parent is dead
    if child:
        orphan = parent != child.pid
    else:  # nobody tells us torchrun's process id, but we know that torchrun is a Python program
        try:
            orphan = not Path(f"/proc/{parent}/exe").readlink().name.startswith("python")
        except FileNotFoundError:
            orphan = True
        except OSError:  # no permission: the parent is alive, or it is init, which root owns
            orphan = parent == 1
    if orphan:
        os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(main, flags):
    """Run a stage's main as a rank of torchrun. Without torchrun (`python grpo.py`), start torchrun
    with one rank per GPU, or with one rank on a CPU.

    flags: called first, because --help and a wrong flag need no ranks.
    """
    if "RANK" in os.environ:
        run(sys.argv[0], main)
        return
    import torch

    ranks = str(max(1, torch.cuda.device_count()))
    os.environ["WORLD_SIZE"] = ranks
    flags()
    del os.environ["WORLD_SIZE"]
    # after SIGTERM ranks save at the end of their update; by default torchrun kills them after 30 s
    words = ["--standalone", "--shutdown-timeout", "3600", "--nproc_per_node", ranks]
    run(sys.argv[0], torchrun, [*words, *sys.argv])


def torchrun(words):
    """PyTorch's torchrun, but a failure prints one line instead of a report of 35 lines. If
    STAR_ERROR_FILE names a file, the line is written there, and the caller (run.sh) prints it."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    for name in [*logging.root.manager.loggerDict]:  # each of them has a level of its own
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    given = os.environ.get("STAR_ERROR_FILE")
    with tempfile.NamedTemporaryFile("r") as temporary:
        os.environ["STAR_ERROR_FILE"] = file = given or temporary.name
        try:
            main(words)
            return
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code, why = failure.exitcode, f"rank {rank} failed, see above"
            if code < 0:
                code, why = 128 - code, f"rank {rank} was killed by {signal.Signals(-code).name}"
        except SignalException as error:
            code, why = 128 + error.sigval, f"stopped by {signal.Signals(error.sigval).name}"
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    if not lines and given:
        Path(file).write_text(why)
    elif not given:
        print(lines[0] if lines else why, file=sys.stderr)
    raise SystemExit(code)


def prepare_op(op):
    """Remove locks of killed builds. op: one of DeepSpeed's, or None; DeepSpeed compiles it at the
    first use: announce that or wait for a build that runs, and stop if the compiler is missing."""
    venv = os.access(sys.prefix, os.W_OK) and sys.prefix
    os.environ.setdefault("TORCH_EXTENSIONS_DIR",
                          f"{venv or Path.home() / '.cache' / 'star'}/extensions")
    wait_for_builds(op)
    if not op or (Path(os.environ["TORCH_EXTENSIONS_DIR"]) / op / f"{op}.so").exists():
        return
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        raise SystemExit(f"DeepSpeed compiles an op with {compiler}, which is missing; on Debian: "
                         "apt install g++")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("compiling DeepSpeed's op, once: about a minute", file=sys.stderr, flush=True)


def watch_sigterm():
    """Return interrupted(device): whether any rank has received SIGTERM, so that all save and exit.

    torchrun kills ranks that have not exited 30 s after SIGTERM; its --shutdown-timeout must be
    longer than one update.
    """
    import torch
    import torch.distributed as dist

    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    def interrupted(device):
        flag = torch.tensor(float(bool(received)), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # every rank must call this
        return bool(flag)
    return interrupted


def wait_for_builds(needed):
    """Wait while another process compiles the extension of PyTorch that is `needed`. A lock of a
    killed process is removed, because PyTorch would wait for it forever."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    for lock in [*Path(root).glob("*/lock"), *Path(root).glob("*/*/lock")]:
        announced = False
        while is_held(lock):
            if not announced:
                say(f"another process is compiling {lock.parent}")
            announced = True
            if lock.parent.name != needed:
                break
            time.sleep(1)
        else:
            if lock.exists():
                say(f"{lock} was left by a killed process: removing it")
                lock.unlink(missing_ok=True)


def is_held(lock):
    """Whether a process has this build lock open. Processes of other machines are invisible, so a
    lock younger than a minute counts as held."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime < 60:
            return True
        for file in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if file.samefile(lock):
                    return True
    return False


def say(text):
    """Print a line once, not on every rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


@contextlib.contextmanager
def ignoring_sigint():
    """Processes started inside ignore Ctrl-C: their parent handles it for them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start_worker():
    """Put a worker into a process group of its own, which Ctrl-C and other signals to the parent's
    group do not reach. The parent ends its workers; if one died first, the pool would break."""
    os.setpgid(0, 0)
    die_with_parent()


@contextlib.contextmanager
def workers(number):
    """A pool of processes that die with this one. Spawned, because SQLite must not cross a fork.

    ChildProcessError: one of them was killed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(number, context, start_worker) as pool:
        with ignoring_sigint():
            pool.map(int, range(number))  # starts the processes
        try:
            yield pool
        except BrokenProcessPool:
            raise ChildProcessError("a worker process was killed, perhaps because memory "
                                    "ran out; repeat the command with fewer --workers") from None


class Lines:
    """Standard error for progress bars where it is no terminal: each state of a bar is a line."""

    def write(self, text):
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self):
        """Each line is flushed when it is written."""


def progress(rows, name, total, initial=0, unit="it", leave=True):
    """A tqdm bar; in a file or a pipe, one line every half minute. leave: show it at its end."""
    from tqdm import tqdm

    sparse = {"file": Lines(), "mininterval": 30, "delay": 5, "ncols": 100}
    return tqdm(rows, name, total, leave, initial=initial, unit=unit,
                **{} if sys.stderr.isatty() else sparse)


# -------------------------------------------------------------------------------------- (3) records

def read_jsonl(path, torn=False):
    """The records of a jsonl file, blank lines skipped. Errors name the file and the line.

    torn: leave out an unfinished last line, as the file of a live run may have.
    """
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                if torn and not line.endswith(b"\n"):
                    break
                raise ValueError(f"{path}, line {number}: not JSON ({error}); "
                                 f"{json_fix(line, number)}") from None
    return rows


def json_fix(line, number):
    """How to fix a line that is not JSON, guessed from its first bytes if it is the first one."""
    if number == 1 and line.startswith(b"\x1f\x8b"):
        return "the file is compressed: gunzip it"
    if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16: save it as UTF-8"
    if number == 1 and line.strip() in (b"[", b"{"):
        return "the JSON spans lines, but a record is one line: jq -c '.[]' rewrites an array"
    if number == 1 and line.lstrip().startswith(b"<"):
        return "the file is a web page: download the data itself"
    if number == 1 and not line.lstrip(b"\xef\xbb\xbf \t").startswith(b'{"'):
        return 'every line must be an object such as {"id": "a", "query": "..."}'
    return "fix or delete the line"


FIRST_KEYS = (b'{"id": ', b'{"task": ', b'{"play": ')  # beginnings of all appended records


def recover_jsonl(path, check=None):
    """The records that a killed run left in a file, [] if there is no file. Only the writer, which
    holds the file's lock, may call this: it completes the last line or cuts it off, so that the
    next line can be appended.

    ValueError, and an unchanged file, if a line is not a record, if the unfinished line is not the
    beginning of one, or if check(rows) raises it because the rows are not the caller's.
    """
    if not Path(path).exists():
        return []
    rows, text = read_jsonl(path, torn=True), Path(path).read_bytes()
    end = text.rfind(b"\n") + 1
    tail = text[end:]
    if check:  # first: it can name the record and the fix
        check(rows)
    try:
        json.loads(tail)
        cut = False
    except (ValueError, RecursionError):
        cut = bool(tail)
    begins = any(tail.startswith(key) or key.startswith(tail) for key in FIRST_KEYS)
    if cut and not begins or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: not a file of records; choose another --out")
    with open(path, "rb+") as file:
        if cut:
            file.truncate(end)
        elif tail:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")  # an editor may leave out the last newline
    return rows


def append_jsonl(path, row):
    """Add one record and flush it, so that a killed run keeps every finished episode."""
    with errors_name(path), open(path, "a", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_log(line, args):
    """Append the numbers of an update to OUT/log.jsonl, and send them to the tool of --track. If
    the tool raises an error, it is printed and the run continues."""
    append_jsonl(Path(args.out) / "log.jsonl", line)
    if args.track:
        numbers = {key: value for key, value in line.items()
                   if isinstance(value, (int, float)) and key != "step"}
        try:
            send = open_tracker(args.track, args.out, json.dumps(vars(args), default=str))
            send(numbers, line["step"])
        except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            say(f"--track {args.track}: {one_line(error)}; this update is only in log.jsonl")


def tracker(name):
    """A flag type: the name of a tracking tool whose package is installed."""
    if name not in ("wandb", "tensorboard", "trackio"):
        raise argparse.ArgumentTypeError(f"{name!r} is not wandb, tensorboard or trackio")
    spec = importlib.util.find_spec(name)
    if not spec or not spec.origin:  # no origin: a folder of that name, such as wandb's own runs
        raise argparse.ArgumentTypeError(f"{name} is not installed: pip install {name}")
    return name


@lru_cache
def open_tracker(tool, out, flags):
    """Start a run in a tracking tool -> send(numbers, step)

    OUT/track.txt keeps the run's id, so that a resumed run continues its curves.
    """
    file = Path(out) / "track.txt"
    if not file.exists():
        write_text(file, secrets.token_hex(4))
    about = {"project": "star", "name": str(out), "config": json.loads(flags)}
    if tool == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(Path(out) / "tensorboard", flush_secs=10)
        return lambda numbers, step: [writer.add_scalar(name, value, step)
                                      for name, value in numbers.items()]
    if tool == "wandb":
        return open_wandb(out, about | {"id": file.read_text(), "resume": "allow", "dir": out})
    import trackio

    trackio.init(**about | {"name": f"{out} {file.read_text()}", "resume": "allow"})
    return trackio.log


def open_wandb(out, about):
    """Start a run of Weights & Biases -> send(numbers, step); without a key or a connection the run
    is written to OUT/wandb."""
    import wandb

    why = ""
    try:
        if not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False):
            why = "it has no API key (wandb login)"
        run = wandb.init(**about, mode="offline" if why else None)
    except wandb.Error as error:
        why = " ".join(str(error).split())
        run = wandb.init(**about, mode="offline")
    if why:
        say(f"--track wandb: {why}; the run is written to {out}/wandb, and wandb sync uploads it")
    return lambda numbers, step: run.log(numbers, step=step)


def write_jsonl(path, rows):
    """Write a file of records, completely or not at all."""
    with replacing(path) as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_own(path, rows):
    """Write a file of records; ValueError if the file exists with other content."""
    path = Path(path)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.exists() and path.read_bytes() != text.encode(errors="replace"):
        raise ValueError(f"{path} exists with other content: choose another --out, or remove it")
    write_text(path, text)


def write_text(path, text):
    """Write a text file, completely or not at all."""
    with replacing(path) as out:
        out.write(text)


@contextlib.contextmanager
def replacing(path):
    """Open a text file under a temporary name; once complete, it replaces `path`. The temporary
    name is always the same, so that the next writer overwrites the remains of a killed one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    try:
        with errors_name(path), open(temporary, "w", encoding="utf-8", errors="replace") as out:
            yield out
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- (4) grammars

def entries(path):
    """Read a file of lines "name: text" -> {name: text}; an indented line continues the last."""
    lines = re.sub(r"\n +", " ", path.read_text(encoding="utf-8").strip()).split("\n")
    return dict(line.split(":", 1) for line in lines)


def fill(rng, forms, values):
    """Draw one of the alternatives that slashes separate, and fill in its {slots}."""
    form = rng.choice(re.split(r"\s/(?=\s)", forms))
    return " ".join(form.split()).format(**values)


def join_words(words):
    """["a", "b", "c"] -> "a, b and c"."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


def portions(n, weights):
    """Split n by weight into whole numbers that add up to n."""
    marks = [n * part // sum(weights) for part in itertools.accumulate(weights, initial=0)]
    return [end - start for start, end in itertools.pairwise(marks)]


def stable_draw(text):
    """A large pseudo-random number that depends on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


# ---------------------------------------------------------------------------- (5) the chat template
#
#   <|im_start|>system\n S <|im_end|>\n<|im_start|>user\n Q <|im_end|>\n<|im_start|>assistant\n R
#   <|im_end|> \n<|im_start|>user\n O <|im_end|>\n<|im_start|>assistant\n R ...
#      end           before O            after O
#
# Training and play append tokens and never render a conversation again. So a template must put the
# same text around every observation, must keep the thoughts of earlier replies, and must not change
# earlier turns. Any other template is refused with the reason, because the policy would be trained
# on texts that never occur in play.

SYSTEM, QUERY = "probe of a system turn", "probe of a query"
THOUGHTS, ACTS = ("first thought", "next thought"), ("first probe", "next probe")
TAGS = {"<think>", "</think>", "<tool_response>", "</tool_response>"}  # never escaped, see find_end
OBSERVATIONS = tuple(f"<tool_response>\n{n} probe of a tool\n</tool_response>" for n in (1, 2))
# some templates open a thought at the end of the prompt, or put an empty one there; our replies
# bring their own
OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
DATE = time.strptime("2024-07-26", "%Y-%m-%d")  # for templates that print today's date


def inline_reply(thought, act):
    """A reply as a message, its thought in the content."""
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{act}"}


def split_reply(thought, act):
    """A reply as a message, its thought in a field of its own."""
    return {"role": "assistant", "content": act, "reasoning_content": thought}


class Template:
    """A tokenizer, and its chat template taken apart at the borders between turns.

    end: the id that ends a reply in training; ends: all ids that end a sampled reply. role: of the
    turns with observations. before, after: the text around an observation, up to the next reply;
    lead: the part of `after` that a prompt lacks.
    """

    def __init__(self, tokenizer, path, stops=()):
        self.tokenizer, self.path, self.stops = tokenizer, path, stops
        if tokenizer.eos_token_id is None:
            self.refuse("its tokenizer has no end token (eos_token)")
        if not tokenizer.chat_template:
            self.refuse("its tokenizer has no chat template")
        errors = []
        # some templates drop the thoughts before each user turn, but not before a tool's; and some
        # read thoughts only from a field of their own
        for form, role in itertools.product((inline_reply, split_reply), ("user", "tool")):
            try:
                return self.take_apart(role, form)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def take_apart(self, role, form):
        """Find the text around observations in turns of this role; ValueError if it varies.
        form(thought, act): the message of a reply."""
        replies = [form(*reply) for reply in zip(THOUGHTS, ACTS, strict=True)]
        seen = [{"role": role, "content": text} for text in OBSERVATIONS]
        talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUERY},
                replies[0], seen[0], replies[1], seen[1]]
        rendered = self.text(talk)
        query, first, observed, second, last = self.spans(rendered)
        before, again = rendered[first[1]:observed[0]], rendered[second[1]:last[0]]
        after, final = rendered[observed[1]:second[0]], rendered[last[1]:]
        # templates such as GLM's leave the blank between role and reply to the model
        self.lead = rendered[:first[0]].removeprefix(self.opened(self.text(talk[:2])))
        earlier = [self.opened(self.text(talk[:n])) + self.lead for n in (2, 4)]
        same = before == again
        if same and earlier != [rendered[:first[0]], rendered[:second[0]]]:
            self.refuse("its chat template changes earlier turns when new ones come")
        if same and self.lead.strip():
            self.refuse(f"its chat template begins replies with {self.lead!r}, its prompt does not")
        if not same or after != self.opened(final) + self.lead:
            self.refuse("its chat template frames some turns differently from others")
        self.find_end(before)
        self.before, self.after = before.removeprefix(self.end_text), after
        self.role = role
        self.find_anchor(rendered, [rendered[slice(*first)], rendered[slice(*second)]])
        if self.before.endswith("<tool_response>\n"):  # our observations already have these tags
            self.before = self.before.removesuffix("<tool_response>\n")
            self.after = self.after.removeprefix("\n</tool_response>")

    def spans(self, rendered):
        """Where the query, the replies and the observations stand: [start, end] of each, in order.
        A reply starts with its thought."""
        texts = [SYSTEM, QUERY, ACTS[0], OBSERVATIONS[0], ACTS[1], OBSERVATIONS[1]]
        for text in texts:
            if rendered.count(text) != 1:
                self.refuse(f"its chat template renders {text!r} {rendered.count(text)} times")
        found = [[rendered.index(text), rendered.index(text) + len(text)] for text in texts]
        if found != sorted(found):
            self.refuse("its chat template changes the order of the turns")
        for thought, before, reply in zip(THOUGHTS, found[1::2], found[2::2], strict=False):
            if thought not in rendered[before[1]:reply[0]]:
                self.refuse("its chat template strips thoughts from earlier replies")
            reply[0] = rendered.rfind("<think>", before[1], rendered.index(thought))
            if reply[0] < 0:
                self.refuse("its chat template takes the <think> tags from earlier replies")
        return found[1:]

    def find_end(self, before):
        """Set the token that ends a reply, and the special tokens to escape in other turns."""
        marks = {mark.content: id for id, mark in self.tokenizer.added_tokens_decoder.items()}
        found = max((mark for mark in marks if before.startswith(mark)), key=len, default=None)
        if found is None:
            self.refuse(f"its chat template ends a reply with {before[:20]!r}, which is no token")
        self.end, self.end_text = marks[found], found
        self.ends = {self.end, self.tokenizer.eos_token_id, *self.stops}
        # special tokens are escaped: no query, page or program may end or open a turn
        special = {mark.content for mark in self.tokenizer.added_tokens_decoder.values()
                   if mark.special and mark.content.strip()} - TAGS | {found}
        self.forged = re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})"
                                          for text in sorted(special)))

    def find_anchor(self, rendered, replies):
        """Set `anchor`, the text to encode a reply after, so that it gets the same tokens as in a
        conversation: "", or an end token or the text before a reply for tokenizers that begin every
        text with a blank."""
        ids = self.ids_of(self.opened(rendered) + self.lead)
        for anchor in ("", self.end_text, self.after):
            self.anchor = anchor
            laid = self.ids_of(rendered[:rendered.index(replies[0])])
            for reply, observation in zip(replies, OBSERVATIONS, strict=True):
                laid += [*self.encode(reply), self.end]
                laid += self.between({"role": "user", "content": observation})
            if laid == ids:
                return
        self.refuse("its tokenizer joins tokens across the border between two turns")

    def refuse(self, why):
        raise ValueError(f"{self.path}: {why}; copy the folder and give the copy a "
                         "chat_template.jinja that can be cut into turns, such as ChatML's")

    @staticmethod
    def opened(text):
        """The text without a thought that the template has opened at its end."""
        return OPENED.sub("", text)

    def text(self, messages):
        """The conversation as text, up to where the model's next reply begins."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True,
                strftime_now=lambda form: time.strftime(form, DATE))
        except TemplateError as error:
            self.refuse(f"its chat template refuses a {messages[0]['role']} turn ({error})")

    def ids_of(self, text):
        """The ids of this text, without special tokens around it."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode(self, text):
        """The ids of a reply, or a part of one, as it stands in a conversation."""
        anchor, ids = self.ids_of(self.anchor), self.ids_of(self.anchor + text)
        return ids[len(anchor):] if ids[:len(anchor)] == anchor else self.ids_of(text)

    def prompt(self, messages):
        """The ids up to where the model's reply begins. If the last message is the assistant's, the
        model continues it."""
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        turns = [message | {"content": self.escape(message["content"])}
                 if message["role"] == "user" else message
                 for message in (messages[:-1] if begun else messages)]
        ids = self.ids_of(self.opened(self.text(turns)) + self.lead)
        return ids + self.encode(begun) if begun else ids

    def escape(self, text):
        """The text with no special token in it."""
        return self.forged.sub("‹", text)

    def between(self, message, closed=True):
        """The ids from the end of a reply to the beginning of the next, with `message` in between.

        closed: whether the reply brought its own end token; if not, the ids begin with one.
        """
        content = self.escape(message["content"])
        if message["role"] == "result":  # stands inside a reply, which continues after it
            return self.encode(content)
        # encode the end token as well, because some take the blank after them
        return self.ids_of(f"{self.end_text}{self.before}{content}{self.after}")[int(closed):]

    def reply(self, ids):
        """The ids that a model sampled -> (text without its end token, whether it had one)."""
        closed = bool(ids) and ids[-1] in self.ends
        return self.tokenizer.decode(ids[:-1] if closed else ids), closed


def is_talk(messages):
    """Whether the messages are a conversation."""
    return not talk_fault(messages)


def talk_fault(messages):
    """What is wrong with a conversation, "" if nothing is: every message has a role and a text, and
    replies alternate with other turns from the first reply on."""
    expected, begun = ("system", "user"), False
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if role is None or not isinstance(message.get("content"), str):
            return f"message {number} is not a table of a 'role' and a text 'content'"
        if role == "assistant" and not begun:
            begun, expected = True, ("assistant",)
        if role not in expected:
            return f"message {number} has the role {role!r:.30}, not {' or '.join(expected)}"
        if begun:
            expected = ("user", "result") if role == "assistant" else ("assistant",)
    return ""


def load_template(path):
    """The Template of a folder or hub name; ValueError says why it cannot be used."""
    # hide transformers' long report on the weights: check_weights says the same in one line
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer, GenerationConfig

    check_model(path)
    try:
        stops = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # generation_config.json is optional
        stops = None
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except OSError:
        raise ValueError(f"{path} is not a folder here, and the hub does not provide it: name a "
                         f"folder, or download it first (hf download {path})") from None
    return Template(tokenizer, path, stops)


# ----------------------------------------------------------------------------------- (6) the engine

MOST_THREADS = 512
WAITING = 4  # most plays per engine slot: a play that waits for a tool takes no slot


def visible_gpus():
    """Names of the GPUs that this process may use. SystemExit if a CUDA build of PyTorch sees none,
    because it would silently train on the CPU, for weeks."""
    import torch

    # counting must not start CUDA, or vLLM could no longer fork its workers
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if not count and torch.version.cuda and chosen != "":
        raise SystemExit(f"this PyTorch is built for CUDA {torch.version.cuda} but sees no GPU. "
                         "Does nvidia-smi show one, and driver R580 or later, which CUDA 13 needs? "
                         "To run on the CPU on purpose, set CUDA_VISIBLE_DEVICES= (empty)")
    return (chosen.split(",") if chosen else [str(i) for i in range(count)])[:count]


def engine_settings(max_context, concurrency, tp, gpu_memory):
    """The arguments that every vLLM engine here shares: bf16 on GPUs, float32 on a CPU."""
    # hide warnings that vLLM and PyTorch print at each start and that no user can act on
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    settings = {"max_model_len": max_context, "max_num_seqs": concurrency,
                "tensor_parallel_size": tp, "enable_prefix_caching": True}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # FlashInfer's sampler needs nvcc at its first use, and requests with seeds never use it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # a separate engine process would outlive a killed parent and keep the GPU's memory
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if visible_gpus():
        return settings | {"dtype": "bfloat16", "gpu_memory_utilization": gpu_memory}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # No chunked prefill: reading a prompt in pieces would need to rewind the request's seeded
    # generator, which the CPU build cannot do. Small cache blocks (the CPU's default is 128): only
    # full blocks are cached, so each turn computes the rest of its last block again.
    return settings | {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False,
                       "max_num_batched_tokens": max(max_context, 8192), "block_size": 32}


def open_llm(path, **settings):
    """Start vLLM on a checkpoint. An error during the start becomes one line that names the path.
    """
    if os.environ.get("RANK", "0") == "0":
        print("starting vLLM: about a minute", file=sys.stderr, flush=True)
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(str(path), **settings)
        if "compilation_config" in settings:  # some hybrid models fail at their first tokens
            llm.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=2, ignore_eos=True),
                         use_tqdm=False)
        return llm
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        if "Chunked prefill is required" not in text:
            fix = ("; it needs torchvision, on a CPU the build for it (requirements-cpu.txt)"
                   if "failed to be inspected" in text else "")
            raise ValueError(f"{path}: vLLM does not start: {text}{fix}") from error
    say(f"{path}: prompts are not cached, because on a CPU vLLM cannot cache those of this model")
    # vLLM's rotary kernel for CPUs treats each head of LFM2's queries as a token
    return open_llm(path, **settings | {"enable_prefix_caching": False, "compilation_config": {
        "custom_ops": ["-rotary_embedding"]}})


def load_engine(args, device):
    """A trainer's own vLLM engine, or with --tp this rank's part of one."""
    cuda = device.type == "cuda"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer uses the cores too
    settings = engine_settings(args.context, args.concurrency, args.tp, args.gpu_memory)
    llm = open_llm(args.model, **settings, seed=args.seed, enable_sleep_mode=cuda,
                   logprobs_mode="processed_logprobs",  # log pi at the sampling temperature
                   distributed_executor_backend="external_launcher")
    if cuda:
        llm.sleep(level=2)  # drop the weights: they are sent again before every play
    return llm


def renew_head(model):
    """Update the packed copy of the head that vLLM's CPU build multiplies by: a reload does not do
    so if the head is tied to the embedding."""
    head = getattr(model, "lm_head", None) or model.model.embed_tokens
    head.quant_method.process_weights_after_loading(head)


def used_gib(device):
    """GiB in use on this rank's GPU by all processes, PyTorch's cache included; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def add_request(engine, number, ids, template, stops, seed, **sampling):
    """Ask an engine for the reply that follows these tokens. seed: a text. Each reply has its own,
    so that it does not depend on the other requests in the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.add_request(number, {"prompt_token_ids": list(ids)}, SamplingParams(
        **sampling, stop=list(stops), stop_token_ids=sorted(template.ends),
        detokenize=bool(stops), output_kind=RequestOutputKind.FINAL_ONLY,
        seed=random.Random(seed).getrandbits(31)))


class Calls:
    """The plays that wait for an observation. If the world is slow, its tools run in threads, so
    that neither the engine nor another play waits for them; otherwise they are called at once.

    slow: whether to use threads; places: plays that the engine has room for. With --tp, is_leader:
    whether this rank calls the tools (once per engine), and broadcast hands their answers to the
    engine's other ranks.
    """

    def __init__(self, slow, places, is_leader=True, broadcast=None):
        self.pool = ThreadPoolExecutor(min(WAITING * places, MOST_THREADS)) if slow else None
        self.places, self.is_leader, self.broadcast = places, is_leader, broadcast if slow else None
        self.waiting, self.numbers = {}, itertools.count()  # {number: (play, Future)}

    def __len__(self):
        return len(self.waiting)

    def plays(self):
        """The plays that wait for an observation."""
        return [play for play, _ in self.waiting.values()]

    def free(self, live):
        """How many plays may begin while the `live` ones are in the engine. Plays that wait for a
        tool take no engine slot."""
        return min(self.places, WAITING * self.places - len(self)) - len(live)

    def start(self, play, episode, action):
        """Begin to answer an action. Without one the play has ended: ready() yields it with None.
        """
        future = Future()
        if action and self.pool and self.is_leader:
            future = self.pool.submit(self.act, episode, action)
        elif not (action and self.pool):
            future.set_result(self.act(episode, action) if action else None)
        self.waiting[next(self.numbers)] = play, future

    def act(self, episode, action):
        """The observation of an action; a tool that raises is named."""
        with naming_world(f"{type(episode.sandbox).__name__}.call", episode.task):
            return episode.act(action)

    def ready(self, block):
        """Yield (play, observation) for each answered action; block: first wait for a tool, at most
        0.05 s."""
        if self.pool and block and self.is_leader:
            wait([future for _, future in self.waiting.values()], 0.05, FIRST_COMPLETED)
        done = [number for number, (_, future) in self.waiting.items() if future.done()]
        # raise a failure only after all others have been handed over
        done.sort(key=lambda number: self.waiting[number][1].exception() is not None)
        if self.broadcast:
            answers = [(number, self.waiting[number][1].result()) for number in done]
            for number, text in self.broadcast(answers):
                yield self.waiting.pop(number)[0], text
            return
        for number in done:
            play, future = self.waiting.pop(number)
            yield play, future.result()

    def close(self):
        """Wait for the threads; each of them ends at its tool's deadline."""
        if self.pool:
            self.pool.shutdown()


def open_calls(slow, n, group, args, resuming=0):
    """The Calls of a trainer's rank. All engines share n queries of `group` plays each; this one
    also resumes `resuming` plays of its own."""
    engines = int(os.environ.get("WORLD_SIZE", 1)) // args.tp
    # at most an equal share, or the first engine to start would take the plays of all queries
    seats = max(group, min(args.concurrency, -(-n // engines) * group + resuming))
    return Calls(slow, seats, is_tp_leader(args), args.tp > 1 and broadcast_in_tp)


def is_tp_leader(args):
    """Whether this rank is its engine's first. With --tp the others repeat what the leader does."""
    return int(os.environ.get("RANK", 0)) % args.tp == 0


def broadcast_in_tp(value):
    """With --tp: the leader's value, on all ranks of its engine, which must add the same requests
    in the same order."""
    from vllm.distributed import get_tp_group

    return get_tp_group().broadcast_object(value)


def shared_counter(name, n, args):
    """Yield 0 .. n-1, each number to one engine only: a free engine takes the next number. Rank 0
    shows the progress of all engines."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    shown = contextlib.nullcontext() if int(os.environ.get("RANK", 0)) else progress(
        None, f"{name}, queries begun", n, unit="query", leave=False)
    with shown as bar:
        while True:
            i = is_tp_leader(args) and store.add(name, 1) - 1
            i = broadcast_in_tp(i) if args.tp > 1 else i
            if i >= n:
                return
            if bar is not None:
                bar.update(i + 1 - bar.n)
            yield i


# ------------------------------------------------------------------------------------ (7) endpoints

LONGEST_REPLY = 200_000  # characters; 32K tokens of English are about 130,000
LARGEST_BODY = 2**26  # bytes of a server's response
PATIENCE = 600  # seconds for an endpoint that has worked to come back
WORKED = set()  # addresses of the endpoints that have answered
# how servers say that a conversation exceeds the model's context
NO_ROOM = re.compile("|".join([
    r"maximum (model|context|prompt|sequence|input) length",  # vLLM, DeepSeek, Mistral, xAI
    r"context[_ ](length|size|window|limit)",  # OpenAI, SGLang, llama.cpp, LM Studio
    r"(prompt|inputs?|context|request|conversation|messages?) (is|are) too long",  # Anthropic
    r"token count\b.{0,60}\bexceeds",  # Gemini
    r"exceed\w*\b.{0,40}\b(token limit|max\w* (length|tokens|number of tokens))",  # Moonshot, GLM
    r"must have less than \d+ tokens|`inputs` tokens \+",  # TGI
    r"too many (input |prompt |total )?tokens(?! per)",  # Cohere
    r"range of input length|reduce the length",  # Qwen, Cerebras
]), re.IGNORECASE | re.DOTALL)
ABOUT_THE_REQUEST = (400, 413, 422, 451)  # other statuses may be about the key, the model, the load
# reasons to end a reply: a failure of OpenRouter, vLLM, DeepSeek, GLM; a filter of OpenAI, GLM
BROKEN_OFF = ("error", "abort", "insufficient_system_resource", "network_error")
FILTERED = ("content_filter", "sensitive")


class ChatError(ConnectionError):
    """An endpoint gave no usable reply, after all retries."""


class Refused(ChatError):
    """An endpoint refused one request, or answered it without text; it may answer others.

    may_be_length: whether a full context could be the cause."""

    may_be_length = False  # set from the status and the words of the server


class NoRoom(Refused):
    """A request or its reply exceeds the model's context."""


def read_bounded(response):
    """A response hook of httpx2 that reads the body. An httpx2.HTTPError if it exceeds LARGEST_BODY
    or still arrives after four time-outs, since httpx2 restarts its time-out with every byte."""
    import httpx2

    until = time.monotonic() + 4 * response.request.extensions["timeout"]["read"]
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) > LARGEST_BODY or time.monotonic() > until:
            raise httpx2.RemoteProtocolError(f"the body does not end after {len(body):,} bytes")
    response._content = bytes(body)  # response.read() does the same without these limits


@lru_cache(maxsize=64)
def client_of(url, key, retries):
    """The openai package's client of an endpoint; threads may share it."""
    import openai

    def tell(request):
        if request.headers.get("x-stainless-retry-count") == "1" and retries > 2:
            tell_retries(url, retries)

    # use the environment's proxy for https only: it does not reach servers on the local network
    web = openai.DefaultHttpxClient(trust_env=url.startswith("https:"),
                                    event_hooks={"request": [tell], "response": [read_bounded]})
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=retries, http_client=web)
    client.limit = "max_tokens"  # how this server calls the limit of a reply, see post()
    return client


@lru_cache
def tell_retries(url, retries):
    """Print once that an endpoint does not answer: the openai package retries in silence."""
    print(f"{url} does not answer; asking again, up to {retries} times per request",
          file=sys.stderr, flush=True)


def read_key(path):
    """The API key in a file, None without one."""
    if not path:
        return None
    with errors_name(path):
        key = Path(path).read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{path}: not an API key, which is one line of ASCII without spaces")
    return key


class Reply(str):
    """The text of a reply. tokens: of the whole conversation including it, 0 if unknown."""

    tokens = 0


def read_reply(body, stops=(), begun=False):
    """The Reply in a chat completion. If the endpoint left out the stop string, it is put back.
    Refused if the completion says why it has no text; ValueError, LookupError, TypeError or
    AttributeError if it gives no reason, or if the body is not a completion.

    begun: whether the reply continues a message, which may already contain <think>, or its end.
    """
    if body.get("error") and not body.get("choices"):  # gateways send errors with status 200, too
        said = str(body["error"])[:300]
        raise NoRoom(repr(said)) if NO_ROOM.search(said) else ValueError(f"no reply but {said!r}")
    choice, usage = body["choices"][0], body.get("usage")
    message, end = choice["message"], choice.get("finish_reason")
    text = joined(message.get("content"), "text")  # TypeError if it is not a text
    if len(text) > LONGEST_REPLY:
        raise NoRoom(f"a reply of {len(text):,} characters fits into no context")
    if end in FILTERED:
        raise Refused("a content filter took the reply")
    if end in BROKEN_OFF or choice.get("error"):
        cause = str(choice.get("error") or end)[:300]
        raise ValueError(f"the server broke the reply off: {cause!r}")
    if message.get("tool_calls"):
        raise Refused("tool_calls instead of text; run the server without a tool parser")
    thought = (message.get("reasoning_content") or message.get("reasoning")
               or joined(message.get("content"), "thinking"))
    if not text.strip() and not begun:
        if end == "length":
            raise Refused("the limit of tokens cut the thought short, before any text")
        if message.get("refusal"):
            raise Refused(f"the model refused: {str(message['refusal'])[:300]!r}")
        raise ValueError("a thought without a reply" if thought else "a reply without text")
    for stop in stops if end == "stop" else ():
        text += stop * (text.rfind(stop.replace("/", "")) > text.rfind(stop))
    reply = Reply(text if begun else with_thought(text, thought))
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
    reply.tokens = tokens if type(tokens) is int else 0
    return reply


def joined(content, kind):
    """The text of one kind in a message's content, which is a text or a list of parts such as
    {"type": "text", "text": ".."} and, of Mistral, {"type": "thinking", "thinking": [parts]}."""
    if isinstance(content, list):
        return "".join(joined(part[kind], "text") for part in content if part["type"] == kind)
    return "" + (content or "") if kind == "text" else ""


def with_thought(text, thought):
    """A reply with its thought in front, as <think>...</think>. Servers with a reasoning parser
    send the thought in a field of its own; without one, the prompt may have opened the thought."""
    thought = thought.strip() if isinstance(thought, str) else ""
    thought = thought.removeprefix("<think>").removesuffix("</think>")
    if "<think>" in text:
        return text
    if "</think>" in text:
        return f"<think>{thought}{text}"
    return f"<think>{thought}</think>\n{text}" if thought else text


def spoken(reply):
    """A reply without the thought before it."""
    return reply.rpartition("</think>")[2].strip()


def beyond_openai(messages, stops):
    """Arguments of vLLM and SGLang that OpenAI's interface lacks: continue a last message of the
    assistant, and include the stop string in the reply."""
    found = {"include_stop_str_in_output": True} if stops else {}
    if messages[-1]["role"] == "assistant":
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    return found


def post(client, request, max_tokens):
    """The HTTP response to a request. Newer models of OpenAI accept the limit of a reply only as
    max_completion_tokens: if the server asks for that name, the client uses it from then on."""
    import openai

    name, create = client.limit, client.chat.completions.with_raw_response.create
    try:
        return create(**request, **({name: max_tokens} if max_tokens else {})).http_response
    except openai.BadRequestError as error:
        text = error.response.text
        if name != "max_tokens" or "max_completion_tokens" not in text or NO_ROOM.search(text):
            raise
    client.limit = "max_completion_tokens"
    return post(client, request, max_tokens)


def greets(client, model, timeout):
    """Whether the endpoint answers a greeting, so that a failure is about the request alone."""
    import openai

    request = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    with contextlib.suppress(openai.APIError, ValueError, LookupError, TypeError, RecursionError):
        return bool(post(client, request | {"timeout": timeout}, 16).json()["choices"])
    return False


def chat(url, model, messages, temperature=1.0, top_p=1.0, max_tokens=None, timeout=300, retries=6,
         api_key=None, stops=(), patience=None):
    """The Reply of an OpenAI-compatible endpoint. Refused if this request gets none, ChatError if
    the endpoint is at fault.

    stops: closing tags that end a reply and belong to it. If the last message is the assistant's,
    the reply continues it. max_tokens: None or 0 leaves the limit to the server.

    The openai package retries time-outs, broken connections and status 408, 409, 429 and 5xx with
    growing pauses. If these errors persist although the endpoint answers a greeting, the request is
    sent once more and then given up. If it answers none, this function asks again for `patience`
    seconds; None: PATIENCE if it has answered before, so that a restart ends no run, else 0. It
    also retries replies without text (empty, cut, not a chat completion), and refuses replies of
    more than LONGEST_REPLY characters, for which no context has room.
    """
    import openai

    base, key = url.rstrip("/").removesuffix("/chat/completions"), api_key or "none"
    client, quick = client_of(base, key, retries), client_of(base, key, min(retries, 2))
    # a cut reply may end with half an emoji, which cannot be sent
    messages = json.loads(json.dumps(messages, ensure_ascii=False).encode(errors="replace"))
    begun = messages[-1]["role"] == "assistant"
    request = {"model": model, "messages": messages, "temperature": temperature, "top_p": top_p,
               "timeout": timeout, "stop": list(stops) or openai.omit,
               "extra_body": beyond_openai(messages, stops)}
    patience, tried = (PATIENCE if base in WORKED else 0) if patience is None else patience, 0
    until = time.monotonic() + patience
    while tried <= retries:
        try:
            response = post(client, request, max_tokens)
            WORKED.add(base)
        except openai.APIError as error:
            found = failure_of(error, url, model, retries)
            if isinstance(found, Refused):
                raise found from None
            status = getattr(error, "status_code", 500)
            if status != 429 and greets(quick, model, min(timeout, 60)):
                if status < 500 or client is quick:
                    raise Refused(*found.args) from None
                client = quick  # the endpoint answers others: one more try
                continue
            if (status >= 500 or status == 429) and time.monotonic() < until:
                time.sleep(min(1, patience / 10))
                continue
            # a request that alone exceeds a limit per minute gets 429 for good
            alone = status == 429 and patience and greets(quick, model, min(timeout, 60))
            raise (Refused(*found.args) if alone else found) from None
        tried += 1
        try:
            return read_reply(response.json(), stops, begun)
        except Refused as error:
            raise type(error)(f"{url}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = (str(error) if type(error) is ValueError else
                       f"no chat completion but {response.text[:200]!r}")
        time.sleep(min(8, 0.1 * 2 ** tried))
    raise Refused(f"{url}: {problem}, after {retries} retries, from model {model}")


def failure_of(error, url, model, retries):
    """The ChatError of an openai.APIError: NoRoom or Refused if it is about the request."""
    status = getattr(error, "status_code", None)
    if status is None:
        return ChatError(f"{url}: no connection: {error.__cause__ or error}, after {retries} "
                         f"retries, from model {model}")
    said = error.response.text
    problem = f"{url}: status {status} {said[:300]!r}"  # the server's own words
    too_large = status == 429 and "request too large" in said.lower()  # OpenAI; it never fits
    if status >= 500 or status == 429 and not too_large:
        return ChatError(f"{problem}, after {retries} retries, from model {model}")
    if status in (400, 413, 422) and NO_ROOM.search(said):
        return NoRoom(problem)
    found = (Refused if too_large or status in ABOUT_THE_REQUEST else ChatError)(problem)
    found.may_be_length = status in (400, 413, 422) and "filter" not in said.lower()
    return found


# -------------------------------------------------------------------------------- (8) model folders

def check_model(path):
    """Check a model folder's config, tokenizer and weights; ValueError names the broken file."""
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"{path} is a file; name the folder that holds it")
    if not folder.is_dir():
        name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(path))  # that the hub could know
        if not name or name[1] and folder.parent.is_dir():  # but not out/rl, if there is an out/
            raise ValueError(f"{path} is not a folder; is the path right?")
        return
    check_config(folder)
    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json")
    tokenizer = folder / "tokenizer.json"
    others = [{"tokenizer.model"}, {"vocab.json", "merges.txt"}]
    if not tokenizer.exists() and not any(all((folder / name).exists() for name in names)
                                          for names in others):
        raise ValueError(f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json "
                         "of its base model there")
    if tokenizer.exists() and not read_json(tokenizer).keys() >= {"model", "added_tokens"}:
        raise ValueError(f"{tokenizer} has no 'model' or no 'added_tokens'; copy or download it "
                         "again")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = [folder / name for name in sorted({*read_json(index)["weight_map"].values()})]
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise ValueError(f"{index} names {len(missing)} missing files, the first of them "
                             f"{missing[0]}: copy or download them again")
    else:
        shards = [*folder.glob("model*.safetensors")]
    if not shards and not [*folder.glob("*.bin")]:
        raise ValueError(f"{path} has no weights; copy model.safetensors there")
    for shard in shards:
        check_shard(shard)


def check_config(folder):
    """Check a model folder's config.json."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} is an adapter, not a model: --lora saves the merged model in "
                         "the folder around it; merge others with peft's merge_and_unload")
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise ValueError(f"{folder}/config.json has no 'model_type'; copy or download it again")
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{folder} is an encoder-decoder ({config['model_type']}), not a causal "
                         "language model")
    names = config.get("architectures") or []
    if names and not re.search("CausalLM|LMHead|ConditionalGeneration", " ".join(map(str, names))):
        raise ValueError(f"{folder} is a {names[0]}, not a causal language model")


def read_json(path):
    """The dictionary in a model folder's file; ValueError names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a model folder?") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; copy or download it again")
    return found


def check_shard(path):
    """A safetensors file begins with the length of its header (8 bytes), which says how long the
    file must be."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = int.from_bytes(file.read(8), "little")
        try:
            ends = [entry["data_offsets"][1] for name, entry in
                    json.loads(file.read(min(head, size))).items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError):
            ends = None
    if not ends or 8 + head + max(ends) != size:
        raise ValueError(f"{path} is truncated or damaged ({size:,} bytes); copy or download it "
                         "again")


def check_values(path):
    """ValueError if a folder's weights are not all finite: vLLM would play without noticing."""
    from safetensors import safe_open

    for shard in sorted(Path(path).glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                weight = file.get_tensor(name)
                if weight.is_floating_point() and not weight.isfinite().all():
                    raise ValueError(f"{shard}: {name} holds values that are not finite; copy or "
                                     "download it again")


def check_precision(model):
    """ValueError if a folder or hub name holds quantized weights, which cannot be trained."""
    from transformers import AutoConfig

    if about := getattr(AutoConfig.from_pretrained(model), "quantization_config", None):
        raise ValueError(f"{model} is quantized ({about.get('quant_method')}), which the stages do "
                         "not train: name the model in bfloat16 that it was made from")


def check_weights(lm, template, loaded):
    """ValueError if weights are not finite or missing in the model's files (transformers would draw
    them at random), or if the tokenizer has more tokens than the embedding has rows.

    loaded: from_pretrained's loading info, with ignore_mismatched_sizes.
    """
    missing = sorted(loaded["missing_keys"])
    if missing or loaded["mismatched_keys"]:
        bad = [*missing, *(f"{name} in this shape" for name, *_ in loaded["mismatched_keys"])]
        raise ValueError(f"{template.path}: its weights lack {bad[0]} ({len(bad)} tensors in all), "
                         "which config.json asks for; copy or download both again")
    rows, tokens = lm.get_input_embeddings().num_embeddings, len(template.tokenizer)
    if tokens > rows:
        raise ValueError(f"{template.path}: its tokenizer has {tokens} tokens, its embedding "
                         f"{rows} rows: use the tokenizer that the model was saved with")
    for name, weight in lm.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{template.path}: {name} holds values that are not finite; copy or "
                             "download it again")


def use_flash_attention(lm):
    """Switch to flash attention, compiled here or prebuilt (kernels) -> whether the model has it"""
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available(kernels_fallback_ok=True):
        say("no flash attention: flash-attn is not installed, and kernels cannot download one. "
            "Attention is sdpa, rows are padded")
        return False
    before = lm.config._attn_implementation
    try:
        lm.set_attn_implementation("flash_attention_2")
    except (ValueError, ImportError) as error:
        say(f"no flash attention: {one_line(error)}. Attention is {before}, rows are padded")
    return lm.config._attn_implementation != before


def make_repeatable(lm):
    """Turn off what makes two forwards of the same tokens differ (dropout, layer drop, the noise of
    routers), and train every row of the embedding.

    Evaluation mode is enough, except for layers that are recomputed in the backward pass: this
    needs training mode, so their own dropout is set to 0.
    """
    off = {name: value for name, value in lm.config.get_text_config().to_dict().items()
           if re.search("drop|jitter", name) and isinstance(value, float) and value}
    if off:
        say(f"off while training: {', '.join(f'{name} {off[name]}' for name in sorted(off))}")
    lm.eval()
    for module in lm.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if re.search("drop|jitter", name) and isinstance(value, float):
                    setattr(module, name, 0.0)
    # the padding token's row would get no gradient; in some models that token ends a turn
    lm.get_input_embeddings().padding_idx = None


# Bounds on |dlogp| in float32 and bfloat16. ROUNDING: between two forwards that must agree. LEAK:
# the effect of one packed sample on another (shapes are equal there, so nothing is rounded anew).
ROUNDING = {"cpu": 1e-4, "cuda": 0.25}
LEAK = {"cpu": 1e-5, "cuda": 1e-3}
MEASURED = ("The first train to the coast leaves at nine.", "The last bus to the lake is full now.",
            "It stops once.")


def check_forwards(lm, make_policy, collate, template, flash):
    """Compare a few short forwards before training starts -> Policy, whether to pack rows

    ValueError if the model's own log-probabilities are not those of Policy, if they depend on later
    tokens, or if they vary. Rows are packed only with flash attention, and if that changes nothing.
    """
    import torch

    ids = [template.ids_of(text)[:8] for text in MEASURED]
    texts = [types.SimpleNamespace(ids=row, mask=[0] + [1] * (len(row) - 1)) for row in ids]
    device = next(lm.parameters()).device
    try:
        with torch.no_grad():
            own = head_logps(lm, torch.tensor([ids[2]], device=device), template.path)
            policy = make_policy(lm)
            measure = Measure(policy, collate, device)
            measure.check(own, *texts, template.path)
            return policy, flash and measure.packs(*texts, template.path)
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{template.path}: a {type(lm).__name__} cannot be trained here, its "
                         f"forward fails: {one_line(error)}") from error


def head_logps(lm, ids, path):
    """A model's own log-probabilities of a row of tokens, (1, T) -> (T - 1,). ValueError if its
    logits are more than a product of its head and its last hidden states: scaled, capped, with a
    bias. The comparison is repeated with large logits, because a cap hardly changes small ones.
    """
    import torch

    head = lm.get_output_embeddings()
    if head is None or lm.base_model is lm:
        raise ValueError(f"{path}: a {type(lm).__name__} has no head of its own to train")
    hidden = lm.base_model(input_ids=ids, use_cache=False)[0]
    product = (hidden @ head.weight.T).float()
    large = 1000 / product.abs().max().item()
    bound = 0.01 * product.abs().max() if ids.is_cuda else 1e-5 * product.abs().max()
    for factor in (1.0, large):
        hook = head.register_forward_pre_hook(lambda _, inputs, by=factor: (inputs[0] * by,))
        logits = lm(input_ids=ids, use_cache=False).logits.float()
        hook.remove()
        off = logits.shape != product.shape or (
            logits / factor - product).abs().max() > bound
        if off or getattr(head, "bias", None) is not None:
            raise ValueError(f"{path}: its logits are more than a product with its head (scaled, "
                             "capped or with a bias), which is all that the stages compute")
    return torch.log_softmax(product[:, :-1], -1).gather(-1, ids[:, 1:, None]).flatten()


class Measure:
    """Forwards of a Policy on short samples, compared."""

    def __init__(self, policy, collate, device):
        self.policy, self.collate, self.device = policy, collate, device

    def logps(self, samples, packed=False):
        """The log-probabilities of the last sample's tokens."""
        found = self.policy(*self.collate(samples, packed, self.device))[0]
        return found[len(found) - sum(samples[-1].mask):]

    def gap(self, one, other):
        """The largest |dlogp| between two forwards, (N,) each."""
        return (one - other).abs().max().item()

    def check(self, own, one, other, last, path):
        """ValueError unless the forwards agree. own: head_logps of the sample `last`; one, other:
        samples that come after it or before it."""
        alone = self.logps([last])
        bound = ROUNDING[self.device.type]
        tails = [types.SimpleNamespace(ids=last.ids + tail.ids,
                                       mask=last.mask + [0] * len(tail.ids))
                 for tail in (one, other)]
        name = type(self.policy.lm).__name__
        if not self.gap(alone, own) <= bound:
            raise ValueError(f"{path}: the log-probabilities of {name} are not those of its hidden "
                             "states and its head, which the stages compute")
        if not self.gap(*(self.logps([row]) for row in tails)) <= bound or not (
                self.gap(alone, self.logps([one, last])) <= bound):
            raise ValueError(f"{path}: in {name}, later tokens or padding change the "
                             "log-probabilities of earlier ones: it is no causal language model")
        if not self.gap(alone, self.logps([last])) <= bound:
            raise ValueError(f"{path}: two forwards of {name} differ on the same tokens")

    def packs(self, one, other, last, path):
        """Whether samples in one row leave each other unchanged: separated by their positions
        alone, or else by the borders that hybrid layers accept (Policy.borders is set to that)."""
        alone = self.logps([last])
        for self.policy.borders in (False, True):
            rows = [self.logps([first, last], packed=True) for first in (one, other)]
            leak, gap = self.gap(*rows), self.gap(rows[0], alone)
            if leak <= LEAK[self.device.type] and gap <= ROUNDING[self.device.type]:
                return True
        self.policy.borders = False
        say(f"{path}: packed samples would change each other (log-probabilities by {leak:.1g}): "
            "rows are padded")
        return False


def borders(positions):
    """Where the samples of a packed row (1, T) begin and end, as hybrid layers (linear attention,
    convolutions, Mamba) take it."""
    import torch

    first = positions[0] == 0
    ends = torch.cat([first, first.new_ones(1)]).nonzero().flatten().int()
    longest = ends.diff().max().item()
    return {"seq_idx": (first.cumsum(0)[None] - 1).int(), "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def write_model(lm, template, state, folder):
    """Write a plain HF folder. The generation config is copied unchanged, because transformers
    refuses to save some configs that it has loaded."""
    config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
    try:
        lm.save_pretrained(folder, state_dict=state)
    finally:
        lm.generation_config = config
    if config is not None:
        config.to_json_file(Path(folder) / "generation_config.json", keys_to_pop=["compile_config"])
    template.tokenizer.save_pretrained(folder)


def check_saving(lm, template, out):
    """Save the model with its smallest weight alone to OUT.part, and load that folder again, so
    that a model that cannot be saved is refused before it is trained."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    if os.environ.get("RANK", "0") != "0":
        return
    name, weight = min(lm.named_parameters(), key=lambda pair: pair[1].numel())
    part = Path(f"{out}.part")
    shutil.rmtree(part, ignore_errors=True)
    disable_progress_bar()
    try:
        with errors_name(part):
            part.parent.mkdir(parents=True, exist_ok=True)
            write_model(lm, template, {name: weight.detach().cpu()}, part)
            again = load_template(part)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"{template.path} could not be saved after training: {one_line(error)}"
                         ) from error
    finally:
        enable_progress_bar()
        shutil.rmtree(part, ignore_errors=True)
    if (again.ends, again.before, again.after) != (template.ends, template.before, template.after):
        raise ValueError(f"{template.path}: its tokenizer changes when it is saved and loaded")


ALPHA = 32  # as in LoRA Without Regret (thinkingmachines.ai/blog/lora) and TRL's guide to it


def add_adapters(lm, template, args):
    """--lora R: add an adapter to each linear layer but the head, and freeze all other weights.

    A layer of weight W then computes W + ALPHA / R * B A, with A (R, in) random and B (out, R) 0 at
    the start. "LoRA Without Regret" recommends all layers, this ALPHA, a rank of 1 to 32 for RL and
    256 for SFT, and 10 times the learning rate of full fine-tuning.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    plain = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    packed = [f"{name}.{key}" for name, module in lm.named_modules() for key, weight
              in module.named_parameters(recurse=False)
              if weight.dim() > 2 and not isinstance(module, plain)]
    if packed:
        raise ValueError(f"{template.path}: --lora cannot adapt {packed[0]}, which packs several "
                         "layers into one tensor; train this model without --lora")
    torch.manual_seed(args.seed)  # A is equal on all ranks
    config = LoraConfig(r=args.lora, lora_alpha=ALPHA, target_modules="all-linear",
                        base_model_name_or_path=args.model, task_type="CAUSAL_LM")
    try:
        inject_adapter_in_model(config, lm)
    except ValueError as error:
        raise ValueError(f"{template.path}: --lora: {one_line(error)}") from None
    # ZeRO-3 gathers a layer's weights for the backward pass if its input takes a gradient, which
    # the output of the frozen embedding does not
    lm.enable_input_require_grads()


def merge(layer):
    """The weights of a layer with its adapter: W + ALPHA / R * B A.

    In bfloat16 most entries of a small update are less than half a step of W, so rounding to the
    nearest value would give W back, and the engine would play without the update. So an entry is
    rounded up or down at random, with the probabilities that keep its mean. The seed is fixed:
    all ranks, and a resumed run, get the same weights.
    """
    import torch

    with torch.no_grad():
        weight = layer.base_layer.weight
        merged = weight.float() + layer.get_delta_weight("default").float()
        if weight.dtype == torch.bfloat16:  # its bits are the first 16 of those of a float32
            draw = torch.Generator(weight.device).manual_seed(0)
            bits = merged.view(torch.int32)  # of the same memory
            bits += torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=weight.device,
                                  generator=draw)
            bits &= -1 << 16
        return merged.to(weight.dtype)


def adapter_weights(lm):
    """The full weights of all adapters, by the names that peft saves. Every rank takes part."""
    import deepspeed

    adapter = {name: p for name, p in lm.named_parameters() if ".lora_" in name}
    with deepspeed.zero.GatheredParameters([*adapter.values()]):
        return {f"base_model.model.{name.replace('.default', '')}": p.data.to("cpu", copy=True)
                for name, p in adapter.items()}


def write_adapter(lm, adapter, folder):
    """Write a folder that peft.PeftModel.from_pretrained(base model, folder) loads."""
    if adapter:
        from safetensors.torch import save_file

        lm.peft_config["default"].save_pretrained(folder)
        save_file(adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def check_parameters(trainer, out, step):
    """SystemExit on every rank if any weight is not finite, before anything is saved."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()  # the last ranks' shards end in padding, which was never written
    shards = [p.ds_tensor[:max(0, p.ds_numel - rank * p.ds_tensor.numel())]
              for p in trainer.module.parameters()]
    bad = torch.stack([(~shard.isfinite()).any() for shard in shards]).any().float()
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    check_finite(out, step, **{"a weight": math.nan if bad else 0.0})


def check_finite(out, step, **numbers):
    """SystemExit if a number of this update, equal on all ranks, is NaN or infinite."""
    bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if bad:
        good = [mark["step"] for mark in marks(out)]
        kept = (f"{out}/checkpoints/step-{good[0]} is the last good checkpoint: --resume continues "
                "from it" if good else "there is no checkpoint: start again")
        raise SystemExit(f"update {step}: {' and '.join(bad)}; this update was not saved. {kept}, "
                         "with a lower --lr or without the data that caused this")


@contextlib.contextmanager
def new_model(out):
    """OUT.part, a folder to save a model in. Its files move to OUT once all of them are complete.

    config.json marks a complete folder: it is removed first and moved last.
    """
    from safetensors import SafetensorError

    part = Path(f"{out}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with errors_name(part):
            yield part
        mode = (part / "config.json").stat().st_mode  # follows the umask; safetensors' are 0600
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "config.json").unlink(missing_ok=True)
        for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
            if file.is_dir():  # chat templates of a tokenizer that has several
                shutil.rmtree(Path(out) / file.name, ignore_errors=True)
            else:
                file.chmod(mode)
            os.replace(file, Path(out) / file.name)
    except SafetensorError as error:
        raise OSError(f"{part}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


# ---------------------------------------------------------------------------------- (9) checkpoints

TORCH_FULL = "iostream error|unexpected pos|write failed"  # PyTorch's words for a full disk


@contextlib.contextmanager
def new_checkpoint(out, step, rank):
    """The folder to which every rank writes its shard. A checkpoint is valid once all shards and
    its mark.json are written. The newest two checkpoints are kept."""
    import torch.distributed as dist

    tag = Path(out) / "checkpoints" / f"step-{step}"
    try:
        with errors_name(tag):
            yield tag
    except (RuntimeError, OSError) as error:
        shutil.rmtree(tag, ignore_errors=True)
        if isinstance(error, OSError) or not re.search(TORCH_FULL, str(error)):
            raise
        raise OSError(f"{tag} could not be written; free some space, then --resume continues from "
                      "the checkpoint before") from None
    dist.barrier()  # every rank's shard is on disk
    if rank == 0:
        mark = {"step": step, "world": dist.get_world_size(), "files": len([*tag.glob("*.pt")]),
                "log_bytes": (Path(out) / "log.jsonl").stat().st_size}
        write_text(tag / "mark.json", json.dumps(mark) + "\n")
        remove_checkpoints(out, step)
    dist.barrier()


def save_checkpoint(trainer, args, step, rank, last, carried=()):
    """Save a checkpoint every --save-every updates; if this is the `last`, save and exit. carried:
    with --stretch, this rank's plays that the next update resumes."""
    if last or (args.save_every and step % args.save_every == 0):
        import torch

        check_parameters(trainer, args.out, step)
        with new_checkpoint(args.out, step, rank) as folder:
            trainer.save_checkpoint(folder.parent, tag=folder.name, save_latest=False,
                                    exclude_frozen_parameters=True)  # --lora: they are --model's
            if getattr(args, "stretch", 0):
                with naming_world("--stretch: an episode that waits must pickle"):
                    torch.save((args.stretch, carried), plays := io.BytesIO())
                (folder / f"plays-{rank}.pt").write_bytes(plays.getvalue())
    if last:
        sys.exit(f"stopped and saved after update {step}; repeat the command with --resume to "
                 "continue")


MAY_CHANGE = {"out", "resume", "steps", "epochs", "save_every", "val_every", "microscope",
              "pack_tokens", "no_checkpointing", "gpu_memory", "concurrency", "world_flags",
              "track"}
CONTENTS = ("model", "data", "tasks", "val")  # flags that name files: their contents are compared


def keep_settings(args):
    """Keep a run's flags in OUT/settings.json. SystemExit if --resume would continue a run with
    other flags, data or another model; those in MAY_CHANGE may change."""
    file = Path(args.out) / "settings.json"
    if os.environ.get("RANK", "0") != "0":
        return
    flags = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    flags |= {name: [path, digest(path)] for name in CONTENTS if (path := flags.get(name))}
    flags = json.loads(json.dumps(flags, default=str))
    if marks(args.out):
        if not args.resume:
            return  # restore refuses the run
        before = read_json(file) if file.exists() else {}
        changed = [describe_change(name, before[name], flags[name])
                   for name in before.keys() & flags.keys() if differ(before[name], flags[name])]
        if changed:
            sys.exit(f"{args.out} was started with other settings: {'; '.join(sorted(changed))}. "
                     "Resume it with the same ones, or choose another --out")
        if before:
            return
    write_text(file, json.dumps(flags, indent=1) + "\n")


def differ(before, now):
    """Whether a flag's value has changed; files are compared by their contents if there are any."""
    if isinstance(before, list) and isinstance(now, list) and before[-1] and now[-1]:
        return before[-1] != now[-1]
    return before != now


def describe_change(name, before, now):
    flag = f"--{name.replace('_', '-')}"
    if isinstance(before, list) and isinstance(now, list):
        if before[0] == now[0]:
            return f"the contents of {flag} {now[0]} have changed"
        before, now = before[0], now[0]
    return f"{flag} was {before} and is {now}"


def digest(path):
    """A hash of a file, or of samples of the files of a model's folder; None for a hub name."""
    path, found = Path(path), hashlib.sha256()
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    names = ("config.json", "generation_config.json", "tokenizer*", "*.jinja", "*.safetensors")
    files = sorted({file for name in names for file in path.glob(name)})
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for part in range(64):
                opened.seek(size * part // 64)
                found.update(opened.read(1 << 16))
    return found.hexdigest() if files else None


def report_end(args, key, following, rank):
    """Rank 0 prints what was written, how the log's number `key` changed, and the next commands."""
    if rank == 0:
        rows = [row[key] for row in read_jsonl(Path(args.out) / "log.jsonl") if key in row]
        change = f"{key} went from {rows[0]:.3f} to {rows[-1]:.3f}" if rows else "no update"
        print(f"{args.out}: the model after {len(rows)} updates; {change}. Next: {following}; "
              f"python -m look.report {args.out}", flush=True)


def warn_uniform(out, n=10):
    """Print a warning if no group of the last n updates had two different rewards."""
    rows = [row["uniform"] for row in read_jsonl(Path(out) / "log.jsonl") if "uniform" in row]
    if len(rows) % n == 0 and rows[-n:] == [1.0] * n:
        print(f"uniform was 1.00 for {n} updates: all plays of a query earn the same, so there is "
              "nothing to learn from. Try easier tasks, a denser --reward or a higher "
              "--temperature", flush=True)


def restore(trainer, out, resume, rank):
    """The number of updates made so far: 0, or with `resume` those of the checkpoint it loads."""
    step = newest_checkpoint(out, resume, rank)
    if step:
        # save_checkpoint left out the weights that --lora freezes
        whole = all(parameter.requires_grad for parameter in trainer.module.parameters())
        trainer.load_checkpoint(Path(out) / "checkpoints", tag=f"step-{step}",
                                load_module_strict=whole)
        say(f"{out}: resuming after update {step}")
    return step


def restore_plays(out, step, rank, stretch):
    """The plays that this rank carried over in the checkpoint of `step`; SystemExit if it was saved
    with another --stretch. Plays are objects of a world, which only pickle can store; like
    DeepSpeed's shards they are read from OUT only."""
    import torch

    file, saved, carried = Path(out) / "checkpoints" / f"step-{step}" / f"plays-{rank}.pt", 0, []
    if step and file.exists():
        with naming_world(f"{file} does not load; if the world's code has changed, change it back, "
                          f"else remove {file.parent}"):
            saved, carried = torch.load(file, weights_only=False)
    if step and saved != stretch:
        sys.exit(f"{file.parent} was saved with --stretch {saved}: resume with the same, or choose "
                 "another --out")
    return carried


def checkpoint_folders(out):
    """{step: folder} of all checkpoints in OUT, complete or not; renamed copies do not count."""
    tags = Path(out).glob("checkpoints/step-*")
    return {int(tag.name[5:]): tag for tag in tags if tag.name[5:].isdigit()}


def marks(out):
    """The mark.json of each checkpoint in OUT, newest first: step, world (ranks), log_bytes."""
    found = []
    for _, tag in sorted(checkpoint_folders(out).items(), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            mark = json.loads((tag / "mark.json").read_text())
            found.append({key: int(mark[key]) for key in ("step", "world", "files", "log_bytes")})
    return found


def newest_checkpoint(out, resume, rank):
    """The step of the newest intact checkpoint in OUT, 0 if there is none.

    Everything newer is removed, from the log too, so that the log has no repeated updates.
    SystemExit if the checkpoint was saved by another number of ranks, if no checkpoint is intact,
    or if OUT has a run but --resume is missing.
    """
    import torch.distributed as dist

    folder, found = Path(out) / "checkpoints", marks(out)
    begun = found or any(log.stat().st_size for log in Path(out).glob("log.jsonl"))
    if begun and not resume:
        sys.exit(f"{out} already holds a run: --resume continues it; or choose another --out")
    if (Path(out) / "config.json").exists() and not begun:
        sys.exit(f"{out} already holds a model, which was not trained there: choose another --out")
    dist.barrier()  # all ranks have looked before the log is created
    marked = {step for step, tag in checkpoint_folders(out).items() if (tag / "mark.json").exists()}
    for step in marked - {mark["step"] for mark in found}:
        if rank == 0:
            print(f"{folder}/step-{step}/mark.json is damaged: skipping it", flush=True)
    for mark in found:
        damaged = damaged_files(folder / f"step-{mark['step']}", mark, rank)
        if not damaged:
            break
        if rank == 0:
            print(f"{damaged} is damaged: using the checkpoint before it", flush=True)
    else:
        if marked:
            sys.exit(f"{folder}: no checkpoint in it is intact. Remove this folder, and the same "
                     "command starts at the first update")
        mark = {"step": 0, "log_bytes": 0}
    if rank == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
        remove_checkpoints(out, mark["step"])
        truncate_log(Path(out) / "log.jsonl", mark["log_bytes"])
    dist.barrier()
    return mark["step"]


def damaged_files(tag, mark, rank):
    """The damaged files of a checkpoint, "" if there are none; each rank checks a share of them.

    torch.save writes zip archives, whose checksums torch.load does not verify.
    """
    import torch.distributed as dist

    ranks, shards = dist.get_world_size(), sorted(tag.glob("*.pt"))
    if mark["world"] != ranks:
        sys.exit(f"{tag}: saved by {mark['world']} ranks, and its shards load only into the same "
                 f"number of ranks; start {mark['world']} ranks, not {ranks}")
    found = [None] * ranks
    mine = [str(file) for file in shards[rank::ranks] if not zip_is_intact(file)]
    dist.all_gather_object(found, mine)
    lost = [f"{tag} ({len(shards)} of {mark['files']} files)"] * (len(shards) != mark["files"])
    return ", ".join(sum(found, lost))


def zip_is_intact(file):
    """Whether a zip archive's contents match its checksums."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError):
        return False


def remove_checkpoints(out, step):
    """Remove all checkpoints in OUT but that of `step` and the one before it. Later ones are
    damaged, or left by a save that was killed."""
    kept = [mark["step"] for mark in marks(out) if mark["step"] <= step][:2]
    for number, tag in checkpoint_folders(out).items():
        if number not in kept:
            shutil.rmtree(tag)


def truncate_log(log, size):
    """Cut a log to its first `size` bytes, and to complete lines if it has lost some."""
    with open(log, "ab+") as file:
        file.seek(0)
        kept = file.read(size)
        if len(kept) < size:
            print(f"{log} has lost lines; the run continues without them", flush=True)
        file.truncate(kept.rfind(b"\n") + 1)


# ---------------------------------------------------------------------------- (10) worlds and tasks

WORLDS = {"travel": "travel.world", "tools": "toolstar.tools"}  # --env: module


def parse_args(parser, argv=None):
    """Parse the flags of a stage and those of the world that its --env names: a world's module may
    define flags(parser), which adds them. args.world_flags has their names."""
    argv = sys.argv[1:] if argv is None else argv
    before = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    before.add_argument("--env", nargs="?", default=parser.get_default("env"), help="the world")
    env, own = before.parse_known_args(argv)[0].env, {action.dest for action in parser._actions}
    try:
        module = load_world(env)
        if hasattr(module, "flags"):
            module.flags(parser.add_argument_group(f"the world (--env {env})"))
    except ValueError as error:
        if not {"-h", "--help"} & set(argv):
            parser.error(str(error))
    names = [action.dest for action in parser._actions if action.dest not in own]
    parser.set_defaults(world_flags=names)
    return parser.parse_args(argv)


def load_world(env):
    """The module of --env: travel, tools, the name or file of a module with open_world(args), or
    FILE.py:CLASS, a plain environment class (adapters/plain.py)."""
    name, _, class_name = WORLDS.get(env, env).partition(":")
    try:
        module = importlib.import_module(name) if not name.endswith(".py") else load_file(name)
        if class_name:
            from adapters.plain import PlainWorld

            factory = getattr(module, class_name)
            return types.SimpleNamespace(open_world=lambda args: PlainWorld(factory))
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise ValueError(f"--env {env}: {error}; install it, or type `. .venv/bin/activate`"
                             ) from None
        raise ValueError(f"--env {env}: {error}; name travel, tools, or a module or file") from None
    except OSError as error:
        raise ValueError(f"--env {env}: {one_line(error)}") from None
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ValueError(f"--env {env}: {one_line(error)}; name travel, tools, or a module or file "
                         "with a function open_world(args)") from None
    except (ArithmeticError, AssertionError, LookupError, NameError, RuntimeError, SystemExit,
            TypeError, ValueError) as error:
        raise WorldError(f"--env {env}: {type(error).__name__} while it is imported: {error}"
                         ) from error
    if not hasattr(module, "open_world"):
        raise ValueError(f"--env {env}: it has no function open_world(args)")
    return module


def load_file(name):
    """The module in a file; it can import the files beside it."""
    known = name.replace(".", "_")  # a pickle could not find a module with dots in its name
    if known in sys.modules:
        return sys.modules[known]
    sys.path.append(str(Path(name).resolve().parent))
    spec = importlib.util.spec_from_file_location(known, name)
    module = sys.modules[known] = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as failed:
        failed.callback(sys.modules.pop, known)
        spec.loader.exec_module(module)
        failed.pop_all()
    return module


def open_world(args):
    """The world of --env (docs/environment.md); its members are checked whenever they are used."""
    try:
        world = load_world(args.env).open_world(args)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError,
            SystemExit, TypeError) as error:
        raise WorldError(f"--env {args.env}: open_world: {error!r}") from error
    return CheckedWorld(world, args.env)


class naming_world:
    """Turn an exception in a world's code into one line that names the code, the task and the
    error. STAR_TRACEBACK=1 shows the traceback. A SystemExit with a sentence ends the run with it.
    """

    def __init__(self, where, task=None):
        self.where = where
        if isinstance(task, dict) and "id" in task:
            self.where += f", task {task['id']!r}"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        ours = isinstance(error, Exception) and not isinstance(error, (OSError, WorldError))
        if ours or isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise WorldError(f"{self.where}: {type(error).__name__}: {error}") from error


class WorldError(ValueError):
    """A mistake in a world's code."""


class CheckedWorld:
    """A world whose members are checked whenever they are used. Optional members (lines, solver,
    open_helpers) are passed through unchecked."""

    def __init__(self, world, env):
        self.world, self.env = world, env
        members = ("kinds", "parts", "stops", "slow", "load_task", "episode", "verdict", "reward",
                   "close")
        missing = [name for name in members if not hasattr(world, name)]
        if missing:
            raise WorldError(f"--env {env}: {type(world).__name__} has no {missing[0]!r}, see "
                             "docs/environment.md")
        for name in ("kinds", "parts"):
            value = getattr(world, name)
            if not isinstance(value, (tuple, list)) or not value:
                raise WorldError(f"--env {env}: {name!r} is {value!r:.60}; it must be a tuple of "
                                 "names")
        if "success" not in world.parts:
            raise WorldError(f"--env {env}: 'parts' must name 'success', not only {world.parts}")

    def __getattr__(self, name):
        return getattr(self.world, name)

    def load_task(self, row):
        try:
            task = self.world.load_task(row)
        except (KeyError, ValueError):
            raise  # the row is wrong, not the world: load_tasks reports it
        except (TypeError, AttributeError, LookupError, SystemExit) as error:
            raise WorldError(f"--env {self.env}: load_task: {error!r}") from error
        if not isinstance(task, dict) or not isinstance(task.get("id"), (str, int)):
            raise WorldError(f"--env {self.env}: load_task returned {task!r:.60}; a task is a "
                             "dictionary with an 'id'")
        return task

    def prepare(self, episodes):
        """Tell a world which episodes it will judge next, if it has this member -> the Futures that
        their verdicts would have to wait for."""
        if not hasattr(self.world, "prepare"):
            return []
        with naming_world(f"--env {self.env}: prepare"):
            return [future for future in self.world.prepare(episodes) or () if not future.done()]

    def episode(self, task, seed, args):
        with naming_world(f"--env {self.env}: episode", task):
            return self.world.episode(task, seed, args)

    def verdict(self, episode):
        """(plan, score, strict). The score is None or has all parts; its numbers are finite."""
        where = f"--env {self.env}: verdict, task {episode.task.get('id')!r}"
        with naming_world(f"--env {self.env}: verdict", episode.task):
            found = self.world.verdict(episode)
        if not isinstance(found, tuple) or len(found) != 3:
            raise WorldError(f"{where}: it returned {found!r:.60}, not (plan, score, strict)")
        plan, score, strict = found
        if score is None:
            return found
        if not isinstance(score, dict):
            raise WorldError(f"{where}: the score is {score!r:.60}, not a dictionary")
        for name in ("strict", *self.world.parts):
            value = strict if name == "strict" else score.get(name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise WorldError(f"{where}: {name!r} is {value!r:.60}, not a finite number")
        try:
            json.dumps([plan, score])
        except (TypeError, ValueError) as error:
            raise WorldError(f"{where}: it cannot be written as JSON: {error}") from error
        return plan, score, strict

    def reward(self, score, kind):
        with naming_world(f"--env {self.env}: reward of kind {kind!r}"):
            reward = self.world.reward(score, kind)
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise WorldError(f"--env {self.env}: reward of kind {kind!r} is {reward!r:.60}, not a "
                             "finite number")
        return float(reward)


def check_world(world, task, args):
    """Play one scripted reply before an engine starts, so that a mistake in a world shows within
    seconds -> lines of text that describe the results"""
    episode = world.episode(task, "check", args)
    lines = [f"task {task['id']!r}: {str(task.get('query', ''))[:80]!r}"]
    lines += [f"{one['role']}: {one['content'][:80]!r}" for one in episode.messages]
    if "branch" in args:  # arpo.py, whose plays fork
        with naming_world(f"--env {world.env}: fork", task):
            episode.fork("check")
    if getattr(args, "stretch", 0):  # checkpoints hold plays that wait
        with naming_world(f"--env {world.env}: an episode must pickle for --stretch", task):
            copy_by_pickle(episode)
    with naming_world(f"--env {world.env}: begin", task):
        episode.begin("<think>.</think><answer>.</answer>")
    episode.stop = episode.stop or "turns"
    plan, score, strict = world.verdict(episode)
    lines += [f"a scripted answer stops the episode: {episode.stop}", f"plan: {plan!r:.80}",
              f"score: {score!r:.200}", f"strict: {strict}"]
    for kind in world.kinds if score else ():
        lines.append(f"reward {kind}: {world.reward(score, kind):g}")
    return lines


def copy_by_pickle(episode):
    """The episode as it comes out of a checkpoint."""
    import torch

    file = io.BytesIO()
    torch.save(episode, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def find_tasks(source, split):
    """The path of the tasks. source: a file; or a folder, or a data set on the hub, which has
    SPLIT.csv or (folders only) SPLIT.jsonl. ValueError says what is missing."""
    if source is None:
        raise ValueError("--tasks FILE.jsonl is needed; python synth.py tasks writes one")
    path, names = Path(source), (f"{split}.csv", f"{split}.jsonl")
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and path.suffix not in (".csv", ".jsonl")
    if path.is_file() or not (path.is_dir() or on_hub):
        return path
    if not split:
        raise ValueError(f"{source} is a data set: name one of its files, or a part with --split")
    if path.is_dir():
        for name in names:
            if (path / name).exists():
                return path / name
        raise ValueError(f"{source} holds neither {names[0]} nor {names[1]}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(source, names[0], repo_type="dataset"))
    except (OSError, EntryNotFoundError) as error:
        raise ValueError(f"{source} is not a folder here, and the hub provides no {names[0]} of it "
                         f"({type(error).__name__}): download it first (hf download {source} "
                         "--repo-type dataset --local-dir DIR), then name DIR") from None


def read_csv_rows(path):
    """The rows of a csv file as dictionaries, without empty fields."""
    csv.field_size_limit(1 << 30)  # TravelPlanner's reference information takes megabytes
    with errors_name(path), open(path, encoding="utf-8-sig", newline="") as file:
        try:
            return [{key: value for key, value in row.items() if key and value}
                    for row in csv.DictReader(file)]
        except csv.Error as error:
            raise ValueError(f"{path}: not a csv file ({error}); download it again") from None


def load_tasks(source, load, limit=None, split=None):
    """The tasks of a file (jsonl of tasks or of episodes, or csv) or of a data set, each read by
    load(row), a world's load_task. Errors name the file, the row and the key."""
    path, tasks = find_tasks(source, split), []
    rows = read_csv_rows(path) if path.suffix == ".csv" else read_jsonl(path)
    for number, row in enumerate(rows[:limit]):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number + 1}: a task is a JSON object: {row!r:.40}")
        row = row["task"] if isinstance(row.get("task"), dict) else row
        row = row if row.keys() & {"id", "idx"} else row | {"id": str(number), "idx": number}
        try:
            tasks.append(load(row))
        except (KeyError, ValueError) as error:
            why = error.args[0] if " " in str(error.args[0]) else repr(error)
            raise ValueError(f"{path}, row {number + 1}: {why}") from None
    if not tasks:
        raise ValueError(f"{path}: it holds no task; python synth.py tasks writes some")
    ids = Counter(str(task["id"]) for task in tasks)
    twice = next((name for name, times in ids.items() if times > 1), None)
    if twice:
        raise ValueError(f"{path}: two tasks have the id {twice!r}, which must be unique")
    return tasks


if __name__ == "__main__":  # python -m runtime WORDS, as torchrun WORDS
    run("torchrun", torchrun, sys.argv[1:])
