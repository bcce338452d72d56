"""
The interpreter of the tools world: programs that a model wrote run in warm, locked-up Pythons.

    (1) start    a worker is a fresh Python inside bubblewrap [1]: its own namespaces, no network,
                 no capabilities, a read-only view of Python and its libraries and nothing else, a
                 small tmpfs, a seccomp filter; it imports numpy and sympy once
    (2) prove    a program attempts one forbidden thing of each class; if one works, no jail opens
    (3) call     the worker forks; the fork takes limits and a second, stricter filter, and runs
                 the program; the worker waits, then kills whatever else lives in its namespace
    (4) replace  a worker that misbehaves, grows, or has answered CALLS calls is killed; a spare
                 takes its place

Here is the outside; cell.py is the inside. Program, input and output pass the worker by, as
descriptors that go from the caller straight to the fork: a worker never holds a byte of one program
that another could read. Frames, JSON in packets of a socket that forks close, say only how long a
call may last and how it ended.

There are two levels. "jailed" is proved at each start. "unsafe" is a plain process under limits,
which reads and writes what its user can; it has to be asked for.
[1] github.com/containers/bubblewrap   [2] SandboxFusion, arXiv:2412.00535

Reads   the program, and nothing besides       Writes  nothing that outlives the call

    python -m toolstar.jail check              the level, and what was tried to prove it
    python -m toolstar.jail run FILE           a file's program, with this command's input
    python -m toolstar.jail serve --port 8080  POST /run_code as SandboxFusion answers it [2]
"""
import argparse
import contextlib
import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import site
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from errno import ENOSYS, EPERM
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, Popen
from typing import NamedTuple

PRELOAD = ("numpy", "numpy.random", "numpy.linalg", "sympy", "math", "cmath", "fractions",
           "decimal", "itertools", "functools", "collections", "statistics", "random", "re",
           "string", "datetime", "heapq", "bisect", "operator", "typing", "dataclasses")
CELL = Path(__file__).resolve().with_name("cell.py")
SCRATCH = "/jail"  # a program's folder, and the one place where it can write
MIB = 2**20
CALLS = 2000  # of one worker
GROWTH = 1.2  # times the memory of a fresh worker
GRACE = 1.0  # seconds that a worker may answer late
DAY = 86400.0  # seconds; no program has more
LIBSECCOMP = "pip install pyseccomp; apt install libseccomp2"
NAMESPACES = ("sysctl kernel.unprivileged_userns_clone=1 "
              "kernel.apparmor_restrict_unprivileged_userns=0; in docker --security-opt "
              "seccomp=unconfined")


class JailError(ValueError):
    """This machine gives no jail; the text is one line with the cause and the fix."""


class Result(NamedTuple):
    status: str  # ok, error, timeout, memory, output, killed; broken: ours, not the program's
    stdout: str
    stderr: str
    error: str  # "", or the last line of the traceback with the program's line number
    seconds: float  # that it ran


# ---------------------------------------------------------------- the filter
# Calls that are neither allowed nor denied are not implemented, as far as a program can see: so
# libraries fall back. Denied ones raise PermissionError.

ALLOWED = """
    brk mmap munmap mremap mprotect madvise mincore open openat creat close close_range read write
    readv writev pread64 pwrite64 preadv pwritev lseek stat fstat lstat newfstatat statx statfs
    fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir
    mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
    truncate ftruncate fallocate fsync fdatasync umask chmod fchmod fchmodat utime utimes utimensat
    futimesat dup dup2 dup3 pipe pipe2 fcntl flock sendfile copy_file_range fadvise64 clock_gettime
    clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage getitimer setitimer
    alarm pause poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
    epoll_pwait eventfd2 rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait
    rt_sigsuspend sigaltstack tgkill restart_syscall getpid getppid gettid getuid geteuid getgid
    getegid getgroups getpgid getpgrp getsid getresuid getresgid getpriority sched_getaffinity
    sched_yield uname sysinfo getcpu getrandom futex set_robust_list get_robust_list set_tid_address
    rseq arch_prctl membarrier exit exit_group wait4 waitid getrlimit recvfrom sendto shutdown
    getsockopt getsockname getpeername"""
DENIED = """
    clone fork vfork execve execveat socket socketpair connect bind listen accept accept4 sendmsg
    recvmsg setsockopt kill tkill ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd
    pidfd_send_signal mount umount2 pivot_root chroot unshare setns bpf io_uring_setup
    perf_event_open userfaultfd keyctl add_key request_key memfd_create personality seccomp prctl
    prlimit64 setrlimit sched_setaffinity sched_setscheduler setpriority chown fchown lchown
    fchownat mknod mknodat setuid setgid setgroups setreuid setregid setresuid setresgid setpgid
    setsid"""
# a worker is allowed these of them: to start, to fork and to end forks
WORKERS = """
    clone fork execve kill prctl seccomp sendmsg recvmsg pidfd_open prlimit64 setsid"""


def write_filter(threads=None):
    """A seccomp filter as BPF bytes: for a program that may start threads, None: for a worker.

    b"" where libseccomp is missing.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError):  # the package, or the library below it
        return b""
    rules = seccomp.SyscallFilter(seccomp.ERRNO(ENOSYS))

    def add(action, name, *conditions):
        with contextlib.suppress(OSError):  # this architecture has no such call
            rules.add_rule(action, name, *[seccomp.Arg(*each) for each in conditions])

    # asyncio wakes itself through a pair of sockets; a program may lower its own limits
    special = {"socketpair": [(0, seccomp.EQ, socket.AF_UNIX),
                              (1, seccomp.MASKED_EQ, 15, socket.SOCK_STREAM)]}
    free = ALLOWED.split()
    if threads is None:
        free += WORKERS.split()
    else:
        special["prlimit64"] = [(0, seccomp.EQ, 0)]
        special["kill"] = [(0, seccomp.MASKED_EQ, 2**31, 0)]  # who is in reach but the program?
    if threads:
        special["clone"] = [(0, seccomp.MASKED_EQ, 2**16, 2**16)]  # CLONE_THREAD
        add(seccomp.ERRNO(EPERM), "clone", (0, seccomp.MASKED_EQ, 2**16, 0))
    for name in free:
        add(seccomp.ALLOW, name)
    for name, conditions in special.items():
        add(seccomp.ALLOW, name, *conditions)
    for request in 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451:  # is it a terminal? and the like
        add(seccomp.ALLOW, "ioctl", (1, seccomp.EQ, request))
    for name in {*DENIED.split()} - {*free, *special}:
        add(seccomp.ERRNO(EPERM), name)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


# ---------------------------------------------------------------- a worker

class BrokenWorker(OSError):
    """A worker died or did not answer; it is no fault of the program that is known."""


def view():
    """bubblewrap's flags for all that a program sees: Python, its libraries, bare devices."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    places = {"/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", base / "lib",
              prefix / "lib", prefix / "lib64", prefix / "pyvenv.cfg", *site.getsitepackages(),
              "/usr/share/zoneinfo"}
    flags = []
    for place in sorted(map(str, places)):
        if os.path.islink(place) and place.count("/") == 1:
            flags += ["--symlink", os.readlink(place), place]
        elif os.path.exists(place):
            flags += ["--ro-bind", place, place]
    flags += ["--ro-bind", os.path.realpath(sys.executable), sys.executable]
    flags += ["--ro-bind", str(CELL), "/cell.py"]
    for name in "null", "zero", "full", "random", "urandom":
        flags += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    # a tmpfs of its own: a folder in which bubblewrap makes others, such as /tmp where a library
    # lies below it, would keep what a program leaves there
    if not any(f"{place}/".startswith("/tmp/") for place in (prefix, base, sys.executable)):
        flags += ["--symlink", SCRATCH, "/tmp"]
    return [*flags, "--size", str(16 * MIB), "--tmpfs", SCRATCH, "--remount-ro", "/",
            "--chdir", SCRATCH]


def command(settings, control, outer):
    """The words that start a worker; control and outer: descriptors of its socket and filter."""
    told = {**settings, "control": control}
    # not -I, which would ignore PYTHONHASHSEED; the environment is ours all the same
    python = [sys.executable, "-s", "-B"]
    if not settings["jailed"]:
        return [*python, str(CELL), json.dumps(told)]
    jail = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session",
            "--as-pid-1", "--hostname", "jail", "--cap-drop", "ALL", *view(),
            "--setenv", "LD_LIBRARY_PATH", f"{sys.base_prefix}/lib"]
    jail += ["--seccomp", str(outer)] if outer else []
    return [*jail, *python, "/cell.py", json.dumps(told)]


def memory_file(data):
    """A descriptor of these bytes, to be read from their start and not to be changed."""
    fd = os.memfd_create("call", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


class Worker:
    """A warm Python in its jail, seen from outside. One thread at a time may use it."""

    def __init__(self, settings, outer):
        """Start it, and do not wait."""
        self.settings, self.calls, self.fit = settings, 0, True
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.log = os.memfd_create("log")  # what bubblewrap, or an import, complains about
        filters = [memory_file(outer)] if outer else []
        # an unsafe worker has a folder of the host; a jailed one its own tmpfs
        self.folder = None if settings["jailed"] else tempfile.TemporaryDirectory(prefix="unsafe-")
        folder = self.folder.name if self.folder else SCRATCH
        threads = str(settings["threads"] or 1)
        clean = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                 "PYTHONIOENCODING": "utf-8:strict", "OMP_NUM_THREADS": threads,
                 "OPENBLAS_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        words = command(settings, theirs.fileno(), *(filters or [None]))
        try:
            self.process = Popen(words, stdin=DEVNULL, stdout=DEVNULL, stderr=self.log, env=clean,
                                 pass_fds=[theirs.fileno(), *filters], cwd=self.folder and folder,
                                 start_new_session=True)
        except OSError:
            self.control.close()
            os.close(self.log)
            raise
        finally:
            theirs.close()
            for fd in filters:
                os.close(fd)

    def wait(self, seconds=60):
        """Until it is warm; JailError with its last words if it does not come up."""
        self.control.settimeout(seconds)
        try:
            said, kept, _, _ = self.control.recvmsg(4096, 64)
        except TimeoutError:
            said = b""
        if said:
            self.pid = struct.unpack("3i", kept[0][2][:12])[0]  # as this process numbers it
            self.control.settimeout(None)
            self.fresh = self.pages()[1]
            return
        self.process.kill()
        words = os.pread(self.log, MIB, 0).decode(errors="replace").split("\n")
        self.close()
        why = next((line for line in reversed(words) if line.strip()), f"nothing in {seconds} s")
        fix = f": allow user namespaces, {NAMESPACES}" if why.startswith("bwrap") else ""
        raise JailError(f"no worker starts: {why}{fix}")

    def pages(self):
        """(bytes of address space, bytes in memory) of the worker."""
        numbers = Path(f"/proc/{self.pid}/statm").read_text().split()
        return [int(number) * resource.getpagesize() for number in numbers[:2]]

    def call(self, program, stdin, seconds):
        """Run a program -> Result; an OSError (BrokenWorker) if the worker fails."""
        self.calls += 1
        space, memory = self.pages()
        frame = {"call": self.calls, "seconds": seconds,
                 "memory": space + self.settings["memory"] * MIB}
        streams, theirs = {}, []
        try:
            theirs.append(memory_file(stdin))
            for _ in "out", "err":
                end, write_end = os.pipe()
                streams[end] = bytearray()
                theirs.append(write_end)
            theirs.append(memory_file(program))
            socket.send_fds(self.control, [json.dumps(frame).encode()], theirs)
            while theirs:  # from here on a pipe ends when the program has ended
                os.close(theirs.pop())
            answer, size = self.follow(streams, seconds)
        finally:
            for fd in (*theirs, *streams):
                os.close(fd)
        if answer["call"] != self.calls:
            raise BrokenWorker("a worker answered another call")
        # the first calls touch pages that all later ones touch
        self.fresh = max(self.fresh, memory) if self.calls <= 2 else self.fresh
        self.fit = answer["clean"] and self.calls < CALLS and memory <= GROWTH * self.fresh
        limit = self.settings["output"]
        out, err = (mask(text[:limit].decode("utf-8", "replace")) for text in streams.values())
        if size > limit:
            ended = "output", f"more than {limit} bytes of output"
        else:
            ended = read_end(answer, err, seconds)
        return Result(ended[0], out, err, ended[1], answer["seconds"])

    def follow(self, streams, seconds):
        """Fill {descriptor: output} until the worker answers -> (its frame, bytes written)."""
        deadline = time.monotonic() + seconds + GRACE
        poller, answer, size, limit = select.poll(), None, 0, self.settings["output"]
        for fd in (self.control.fileno(), *streams):
            poller.register(fd, select.POLLIN)
        while True:
            left = 0 if answer else max(0, deadline - time.monotonic())
            ready = [fd for fd, _ in poller.poll(left * 1000)]
            if not ready and answer:
                return answer, size
            if not ready and time.monotonic() > deadline:
                raise BrokenWorker(f"a worker did not answer within {seconds + GRACE:g} s")
            for fd in ready:
                data = os.read(fd, MIB)
                if not data or fd == self.control.fileno():
                    poller.unregister(fd)
                if fd in streams:
                    streams[fd] += data[:max(0, limit - len(streams[fd]))]
                    before, size = size, size + len(data)
                    if before <= limit < size and not answer:
                        self.control.send(b'{"stop": 1}')
                elif data:
                    answer = json.loads(data)
                else:
                    raise BrokenWorker("a worker died")

    def close(self):
        """Kill it and all that lives in its namespace."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        os.close(self.log)
        if self.folder:
            self.folder.cleanup()


def read_end(answer, err, seconds):
    """How a call ended: a worker's frame and a program's stderr -> (status, error)."""
    code = os.waitstatus_to_exitcode(answer["status"])
    if answer["why"] == "timeout" or code == -signal.SIGXCPU:
        return "timeout", f"stopped after {seconds:g} s"
    if answer["why"] == "files":
        return "killed", "too many files"
    if code < 0:
        # real-time signals have no name
        named = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        return "killed", f"killed by {named}"
    return read_error(code, err) if code else ("ok", "")


def read_error(code, err):
    """Exit code and stderr of a program that failed -> (status, error)."""
    lines = [line for line in err.splitlines() if line.strip()] or [f"exit code {code}"]
    places = re.findall(r'^ *File "program.py", line (\d+)', err, re.MULTILINE)
    error = f"{lines[-1]} (line {places[-1]})" if places else lines[-1]
    return "memory" if re.match(r"[\w.]*MemoryError\b", error) else "error", error


def mask(text):
    """Addresses in what Python prints of objects differ from run to run."""
    return re.sub(r"(<[^\n]{0,100}? at )0x[0-9a-fA-F]{6,16}\b", r"\g<1>0x0", text)


# ---------------------------------------------------------------- the pool

class Jail(contextlib.AbstractContextManager):
    """A pool of workers for many threads, first come, first served.

    workers: how many programs run at once, one for each core if None; one more stands by
    unsafe: plain processes under limits, which can read and write whatever this user can
    preload: modules that workers import before any call
    seconds, memory, output, files: limits of a program: wall and CPU seconds, MiB above those of a
        warm worker, bytes of stdout and stderr together, bytes of a file
    threads: how many threads a program may start
    display: show the value of a last bare expression, as a notebook does
    Raises JailError where this machine gives no jail.
    """

    def __init__(self, workers=None, unsafe=False, preload=PRELOAD, seconds=5.0, memory=512,
                 output=65536, files=16 * MIB, threads=0, display=True):
        self.workers, self.seconds = workers or len(os.sched_getaffinity(0)), seconds
        self.level = "unsafe" if unsafe else "jailed"
        inner, self.outer = (b"", b"") if unsafe else (write_filter(threads), write_filter())
        if not unsafe and not shutil.which("bwrap"):
            raise JailError("there is no bubblewrap: apt install bubblewrap")
        if not unsafe and os.geteuid() == 0 and not inner:
            raise JailError(f"no seccomp filter as root: {LIBSECCOMP}")
        self.settings = {"preload": list(preload), "memory": memory, "output": output,
                         "files": files, "threads": threads, "display": display,
                         "jailed": not unsafe, "filter": inner.hex()}
        self.lock, self.waiting, self.idle = threading.Lock(), deque(), []
        self.busy = self.alive = 0  # workers at work, and all that are there or ordered
        self.failure, self.orders = "", SimpleQueue()
        # the kernel kills a worker with the thread that started it, so one thread starts them all
        threading.Thread(target=self.supply, name="jail", daemon=True).start()
        try:
            if (first := self.take()) is None:
                raise JailError(self.failure)
            self.put_back(first, True)
            self.proof = {} if unsafe else prove(self)
        except JailError:
            self.close()
            raise

    def __exit__(self, *_):
        self.close()

    def run(self, program, stdin="", seconds=None):
        """Run a program -> Result. It blocks the calling thread alone, and never raises."""
        seconds = min(max(0.0, self.seconds if seconds is None else seconds), DAY)
        # half a surrogate pair is the program's error; in its input it is a question mark
        program, stdin = program.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "replace")
        why = ""
        for _ in "first", "again":  # a call whose worker broke has another try
            if (worker := self.take()) is None:
                why = self.failure
                break
            result = None
            try:
                result = worker.call(program, stdin, seconds)
                return result
            except (OSError, ValueError, KeyError) as error:
                why = str(error)
            finally:
                self.put_back(worker, result is not None and worker.fit)
        return Result("broken", "", "", why, 0.0)

    def take(self):
        """A worker for this thread, when its turn has come; None: there is none to be had."""
        turn = Future()
        with self.lock:
            if self.orders is None:
                return None
            self.waiting.append(turn)
            self.deal()
        return turn.result()

    def put_back(self, worker, fit):
        """End a thread's use of a worker; one that is not fit is killed."""
        with self.lock:
            fit = fit and self.orders is not None
            self.busy -= 1
            self.alive -= not fit
            self.idle += [worker] if fit else []
            self.deal()
        if not fit:
            worker.close()

    def deal(self):
        """With the lock held: order what workers are missing, give idle ones to who waits."""
        missing = self.workers + 1 - self.alive
        if missing > 0 and self.orders:
            self.alive += missing
            self.orders.put(missing)
        while self.waiting and self.idle and self.busy < self.workers:
            self.busy += 1
            self.waiting.popleft().set_result(self.idle.pop())

    def supply(self):
        """The life of the thread that starts workers."""
        orders = self.orders
        while count := orders.get():
            started = []
            for _ in range(count):
                with self.failing():
                    started.append(Worker(self.settings, self.outer))
            for worker in started:  # they warm up side by side
                with self.failing():
                    worker.wait()
                    with self.lock:
                        self.busy += 1
                    self.put_back(worker, True)

    @contextlib.contextmanager
    def failing(self):
        """A worker that was ordered may not come; where none is left, nobody waits for one."""
        try:
            yield
        except (OSError, JailError) as error:
            with self.lock:
                self.failure = str(error)
                self.alive -= 1
                while self.waiting and not self.alive:
                    self.waiting.popleft().set_result(None)

    def close(self):
        """Kill all workers. Calls that wait, or come later, are answered with "broken"."""
        with self.lock:
            orders, self.orders = self.orders, None
            idle, self.idle = self.idle, []
            self.failure = self.failure or "the jail is closed"
            while self.waiting:
                self.waiting.popleft().set_result(None)
        if orders:
            orders.put(0)
        for worker in idle:
            worker.close()


# ---------------------------------------------------------------- the proof

# One forbidden thing of each class, and each harmless where it works. PORT and FILE are of this
# process and exist outside. 0x20000 is CLONE_NEWNS: mounts of its own.
PROBE = """
import ctypes, json, os, socket
found = {}

def fork():
    if os.fork() == 0:
        os._exit(0)

def unshare():
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

for kind, attempt in {
    "memory": lambda: bytearray(2**37),
    "processes": fork,
    "secrets": lambda: open(FILE).close(),
    "accounts": lambda: open("/etc/passwd").close(),
    "files": lambda: open(os.__file__, "a").close(),
    "network": lambda: socket.create_connection(("127.0.0.1", PORT), 1),
    "kernel": unshare,
}.items():
    try:
        attempt()
        found[kind] = "ESCAPED"
    except (OSError, MemoryError) as error:
        found[kind] = f"{type(error).__name__} {error}"
print(json.dumps(found))
"""


# Two calls try to meet: they tell what they find in their own folder, and in which others of which
# they know they could leave something. Harmless where it works
MEET = """
import os, sys
known = ["/tmp/x", "/dev/shm/x", "/var/tmp/x", sys.executable, *sys.path]
folders = {place[:end] or "/" for place in known for end, sign in enumerate(place) if sign == "/"}
own = os.path.realpath(".")
print(*[f"found {name}" for name in os.listdir(own) if name != "program.py"],
      *[f"could write to {folder}" for folder in sorted(folders)
        if os.path.realpath(folder) != own and os.access(folder, os.W_OK)], sep="; ")
open("left", "w").close()
"""


def prove(jail):
    """What became of an attempt of each class, {class: words}; JailError if one succeeded."""
    with socket.create_server(("127.0.0.1", 0)) as canary:
        known = {"PORT": str(canary.getsockname()[1]), "FILE": repr(os.path.abspath(__file__))}
        probe = re.sub("PORT|FILE", lambda name: known[name[0]], PROBE)
        result = jail.run(probe, seconds=10)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        raise JailError(f"the probe of the jail failed: {result.error}") from None
    calls = [jail.run(MEET, seconds=10) for _ in range(3)]  # at least two by the same worker
    met = [call.stdout.strip() or call.error for call in calls if call.stdout.strip() or call.error]
    found["other calls"] = f"ESCAPED {met[0]}" if met else "nothing of the call before is found"
    loops = {"time": ("while True: pass", 0.2), "output": ("while True: print('x' * 9999)", 2)}
    for kind, (program, seconds) in loops.items():
        status = jail.run(program, seconds=seconds).status
        ended = status in ("timeout", "output", "killed")  # which of them, a busy machine decides
        found[kind] = status if ended else f"ESCAPED with status {status}"
    if escaped := [kind for kind, words in found.items() if words.startswith("ESCAPED")]:
        raise JailError(f"this jail does not hold ({', '.join(escaped)}): {LIBSECCOMP}")
    return found


# ---------------------------------------------------------------- commands

def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=["check", "run", "serve"], help="what to do")
    p.add_argument("file", nargs="?", type=Path, help="the program of `run`")
    p.add_argument("--workers", type=int, help="programs that run at once; one for each core")
    p.add_argument("--seconds", type=float, default=10, help="that a program may run, at most")
    p.add_argument("--memory", type=int, default=512, help="MiB that a program may take")
    p.add_argument("--unsafe", action="store_true",
                   help="no jail: programs read and write whatever this user can")
    p.add_argument("--host", default="127.0.0.1", help="address of `serve`")
    p.add_argument("--port", type=int, default=8080, help="port of `serve`")
    args = p.parse_args(argv)
    if args.command == "run" and args.file is None:
        p.error("run: name a file")
    if args.seconds <= 0 or args.memory <= 0 or (args.workers or 1) < 1:
        p.error("--seconds, --memory and --workers must be more than 0")
    if not 0 <= args.port < 65536:
        p.error(f"--port {args.port} is none: name one from 0 to 65535")
    return args


def main(argv=None):
    args = flags(argv)
    try:
        program = args.file.read_text(encoding="utf-8") if args.command == "run" else ""
        workers = 1 if args.command == "run" else args.workers
        jail = Jail(workers, args.unsafe, seconds=args.seconds, memory=args.memory,
                    display=False)
    except (OSError, ValueError) as error:
        raise SystemExit(f"jail.py: {error}") from None
    with jail:
        if args.command == "serve":
            from toolstar.run_code import serve

            serve(jail, args.host, args.port)
        elif args.command == "run":
            result = jail.run(program, "" if sys.stdin.isatty() else sys.stdin.read())
            sys.stdout.write(result.stdout)
            sys.stderr.write(result.stderr)
            if result.status != "ok":
                raise SystemExit(f"jail.py: {result.status}: {result.error}")
        else:
            print(jail.level)
            for kind, words in jail.proof.items():
                print(f"{kind:10} {words}")
            raise SystemExit(int(jail.level != "jailed"))


if __name__ == "__main__":
    main()
