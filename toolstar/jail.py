"""
The interpreter of the tools world: run a model's programs in warm Python processes in a jail.

    (1) start    a worker is a new Python inside bubblewrap [1]. It has its own namespaces, no
                 network, no capabilities, a small tmpfs, a seccomp filter, and a read-only view of
                 Python and its libraries and of no other files. It imports numpy and sympy once
    (2) prove    a probe tries one forbidden action of each class; if one succeeds, JailError
    (3) call     the worker forks; the fork sets limits and a second, stricter filter, and runs the
                 program; then the worker kills all other processes in its namespace
    (4) replace  a worker that failed, has grown, or has answered CALLS calls is killed and replaced
                 by a spare one

This file is the outside of the jail, cell.py the inside. Program, input and output do not pass
through the worker: the caller sends descriptors of them that only the fork opens, so no program can
read another one's data in the worker. Frames, packets of JSON on a socket that forks close, hold
only limits and how a call ended.

There are two levels. "jailed" is proved at each start. "unsafe" must be asked for: a plain process
under limits, which can read and write whatever its user can.
[1] github.com/containers/bubblewrap   [2] SandboxFusion, arXiv:2412.00535

Reads   only the program       Writes  nothing that outlives the call

    python -m toolstar.jail check              print the level and the proof
    python -m toolstar.jail run FILE           run a program, with this command's input
    python -m toolstar.jail serve --port 8080  answer POST /run_code, with SandboxFusion's API [2]
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
SCRATCH = "/jail"  # a program's folder, the only place where it can write
MIB = 2**20
CALLS = 2000  # after which a worker is replaced
GROWTH = 1.2  # factor of a new worker's memory above which a worker is replaced
GRACE = 1.0  # seconds that a worker may take beyond the program's limit
DAY = 86400.0  # seconds, the highest limit of a program
LIBSECCOMP = "pip install pyseccomp; apt install libseccomp2"
NAMESPACES = ("sysctl kernel.unprivileged_userns_clone=1 "
              "kernel.apparmor_restrict_unprivileged_userns=0; in docker --security-opt "
              "seccomp=unconfined")


class JailError(ValueError):
    """This machine cannot run a jail; the message is one line with the cause and the remedy."""


class Result(NamedTuple):
    status: str  # ok, error, timeout, memory, output, killed; broken: the jail failed
    stdout: str
    stderr: str
    error: str  # "", or the last line of the traceback with the program's line number
    seconds: float  # how long it ran


# ---------------------------------------------------------------- the filter
# A denied system call raises PermissionError. One that is neither allowed nor denied looks as if it
# were not implemented, so that libraries use another one. Modes and times of files are denied,
# because the devices are the host's: as root, a program could make /dev/null unusable for all.

ALLOWED = """
    brk mmap munmap mremap mprotect madvise mincore open openat creat close close_range read write
    readv writev pread64 pwrite64 preadv pwritev lseek stat fstat lstat newfstatat statx statfs
    fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir
    mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
    truncate ftruncate fallocate fsync fdatasync umask dup dup2 dup3 pipe pipe2 sendfile
    copy_file_range fadvise64 clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
    times getrusage getitimer setitimer alarm pause poll ppoll select pselect6 epoll_create
    epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 rt_sigaction rt_sigprocmask rt_sigreturn
    rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack tgkill restart_syscall getpid getppid
    gettid getuid geteuid getgid getegid getgroups getpgid getpgrp getsid getresuid getresgid
    getpriority sched_getaffinity sched_yield uname sysinfo getcpu getrandom futex set_robust_list
    get_robust_list set_tid_address rseq arch_prctl membarrier exit exit_group wait4 waitid
    getrlimit recvfrom sendto shutdown getsockopt getsockname getpeername"""
DENIED = """
    clone fork vfork execve execveat socket socketpair connect bind listen accept accept4 sendmsg
    recvmsg setsockopt kill tkill ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd
    pidfd_send_signal mount umount2 pivot_root chroot unshare setns bpf io_uring_setup
    perf_event_open userfaultfd keyctl add_key request_key memfd_create personality seccomp prctl
    prlimit64 setrlimit sched_setaffinity sched_setscheduler setpriority chown fchown lchown
    fchownat chmod fchmod fchmodat utime utimes utimensat futimesat flock mknod mknodat setuid
    setgid setgroups setreuid setregid setresuid setresgid setpgid setsid"""
# commands of fcntl: duplicate a descriptor, read and set its flags, the size of a pipe, and the
# locks that SQLite needs (5, 6, 7); but no leases on the host's files, no watches of its folders
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)
# of the denied calls, a worker may use these: to start, to fork and to end forks
WORKERS = """
    clone fork execve kill prctl seccomp sendmsg recvmsg pidfd_open prlimit64 setsid"""


def write_filter(threads=None):
    """A seccomp filter as BPF bytes; b"" if libseccomp is missing.

    threads: the number of threads that a program may start; None: the filter is for a worker.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError):  # the package or its library is missing
        return b""
    rules = seccomp.SyscallFilter(seccomp.ERRNO(ENOSYS))

    def add(action, name, *conditions):
        with contextlib.suppress(OSError):  # not a call of this architecture
            rules.add_rule(action, name, *[seccomp.Arg(*each) for each in conditions])

    # asyncio needs a pair of sockets; with prlimit64 a program may lower its own limits
    special = {"socketpair": [(0, seccomp.EQ, socket.AF_UNIX),
                              (1, seccomp.MASKED_EQ, 15, socket.SOCK_STREAM)]}
    free = ALLOWED.split()
    if threads is None:
        free += WORKERS.split()
    else:
        special["prlimit64"] = [(0, seccomp.EQ, 0)]
        special["kill"] = [(0, seccomp.MASKED_EQ, 2**31, 0)]  # it can reach only itself
    if threads:
        special["clone"] = [(0, seccomp.MASKED_EQ, 2**16, 2**16)]  # CLONE_THREAD
        add(seccomp.ERRNO(EPERM), "clone", (0, seccomp.MASKED_EQ, 2**16, 0))
    for name in free:
        add(seccomp.ALLOW, name)
    for name, conditions in special.items():
        add(seccomp.ALLOW, name, *conditions)
    for request in 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451:  # of isatty() and the like
        add(seccomp.ALLOW, "ioctl", (1, seccomp.EQ, request))
    for request in FCNTL:
        add(seccomp.ALLOW, "fcntl", (1, seccomp.EQ, request))
    for name in {*DENIED.split()} - {*free, *special}:
        add(seccomp.ERRNO(EPERM), name)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


# ---------------------------------------------------------------- a worker

class BrokenWorker(OSError):
    """A worker died or did not answer; the program is not known to be at fault."""


def view():
    """bubblewrap's flags for the files that programs see: Python, its libraries, a few devices."""
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
    # SCRATCH is a tmpfs of its own, and /tmp a link to it, unless Python is below /tmp: then
    # bubblewrap makes folders there, in which a program could leave files for the next one
    if not any(f"{place}/".startswith("/tmp/") for place in (prefix, base, sys.executable)):
        flags += ["--symlink", SCRATCH, "/tmp"]
    return [*flags, "--size", str(16 * MIB), "--tmpfs", SCRATCH, "--remount-ro", "/",
            "--chdir", SCRATCH]


def command(settings, control, outer):
    """The command line of a worker. control, outer: descriptors of its socket and its filter."""
    told = {**settings, "control": control}
    # not -I, which would ignore PYTHONHASHSEED; Worker sets the whole environment
    python = [sys.executable, "-s", "-B"]
    if not settings["jailed"]:
        return [*python, str(CELL), json.dumps(told)]
    jail = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session",
            "--as-pid-1", "--hostname", "jail", "--cap-drop", "ALL", *view(),
            "--setenv", "LD_LIBRARY_PATH", f"{sys.base_prefix}/lib"]
    jail += ["--seccomp", str(outer)] if outer else []
    return [*jail, *python, "/cell.py", json.dumps(told)]


def memory_file(data):
    """The descriptor of a read-only file in memory with these bytes."""
    fd = os.memfd_create("call", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


class Worker:
    """A handle to a warm Python in its jail. One thread at a time may use it."""

    def __init__(self, settings, outer):
        """Start the process without waiting for it. outer: BPF bytes of the worker's filter."""
        self.settings, self.calls, self.fit = settings, 0, True
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.log = os.memfd_create("log")  # error messages of bubblewrap and of imports
        filters = [memory_file(outer)] if outer else []
        # an unsafe worker uses a folder of the host, a jailed one its own tmpfs
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
        """Wait until it is warm; JailError with its last message if it does not start."""
        self.control.settimeout(seconds)
        try:
            said, kept, _, _ = self.control.recvmsg(4096, 64)
        except TimeoutError:
            said = b""
        if said:
            self.pid = struct.unpack("3i", kept[0][2][:12])[0]  # in the namespace of this process
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
        """(bytes of address space, bytes of resident memory) of the worker."""
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
            while theirs:  # once they are closed here, the pipes end when the program ends
                os.close(theirs.pop())
            answer, size = self.follow(streams, seconds)
        finally:
            for fd in (*theirs, *streams):
                os.close(fd)
        if answer["call"] != self.calls:
            raise BrokenWorker("a worker answered another call")
        # the first two calls still add pages that all calls need
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
        """Collect output in {descriptor: bytes} until the worker answers -> (frame, bytes seen)."""
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
    """(status, error) of a call, from the worker's frame and the program's stderr."""
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
    """(status, error) of a program that failed, from its exit code and stderr."""
    lines = [line for line in err.splitlines() if line.strip()] or [f"exit code {code}"]
    places = re.findall(r'^ *File "program.py", line (\d+)', err, re.MULTILINE)
    error = f"{lines[-1]} (line {places[-1]})" if places else lines[-1]
    return "memory" if re.match(r"[\w.]*MemoryError\b", error) else "error", error


def mask(text):
    """A text with the addresses in Python's reprs set to 0, since they differ between runs."""
    return re.sub(r"(<[^\n]{0,100}? at )0x[0-9a-fA-F]{6,16}\b", r"\g<1>0x0", text)


# ---------------------------------------------------------------- the pool

class Jail(contextlib.AbstractContextManager):
    """A pool of workers for many threads, which are served in their order of arrival.

    workers: how many programs run at once; None: one per core. One more worker stands by
    unsafe: use plain processes under limits, which can read and write whatever this user can
    preload: modules that workers import before any call
    seconds, memory, output, files: limits of a program: wall and CPU seconds, MiB above those of a
        warm worker, bytes of stdout and stderr together, bytes of a file
    threads: how many threads a program may start
    display: show the value of a last bare expression, as a notebook does
    Raises JailError if this machine cannot run a jail.
    """

    def __init__(self, workers=None, unsafe=False, preload=PRELOAD, seconds=5.0, memory=512,
                 output=65536, files=16 * MIB, threads=0, display=True):
        self.workers, self.seconds = workers or len(os.sched_getaffinity(0)), seconds
        self.level = "unsafe" if unsafe else "jailed"
        inner, self.outer = (b"", b"") if unsafe else (write_filter(threads), write_filter())
        if not unsafe and not shutil.which("bwrap"):
            raise JailError("bubblewrap is missing: apt install bubblewrap")
        if not unsafe and os.geteuid() == 0 and not inner:
            raise JailError(f"a jail needs a seccomp filter when run by root: {LIBSECCOMP}")
        self.settings = {"preload": list(preload), "memory": memory, "output": output,
                         "files": files, "threads": threads, "display": display,
                         "jailed": not unsafe, "filter": inner.hex()}
        self.lock, self.waiting, self.idle = threading.Lock(), deque(), []
        self.busy = self.alive = 0  # workers in use; workers that exist or are ordered
        self.failure, self.orders = "", SimpleQueue()
        # the kernel kills a worker when the thread that started it ends, so one thread starts all
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
        """Run a program -> Result. Blocks only the calling thread, and never raises."""
        seconds = min(max(0.0, self.seconds if seconds is None else seconds), DAY)
        # half a surrogate pair makes the program fail; in its input it becomes a question mark
        program, stdin = program.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "replace")
        why = ""
        for _ in "first", "again":  # if a worker breaks, try once more
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
        """Wait for a worker; None if there is none and none can be started."""
        turn = Future()
        with self.lock:
            if self.orders is None:
                return None
            self.waiting.append(turn)
            self.deal()
        return turn.result()

    def put_back(self, worker, fit):
        """Return a worker to the pool, or kill it if it is not fit."""
        with self.lock:
            fit = fit and self.orders is not None
            self.busy -= 1
            self.alive -= not fit
            self.idle += [worker] if fit else []
            self.deal()
        if not fit:
            worker.close()

    def deal(self):
        """Order the missing workers and give idle ones to waiting threads. Call with the lock."""
        missing = self.workers + 1 - self.alive
        if missing > 0 and self.orders:
            self.alive += missing
            self.orders.put(missing)
        while self.waiting and self.idle and self.busy < self.workers:
            self.busy += 1
            self.waiting.popleft().set_result(self.idle.pop())

    def supply(self):
        """Start the workers that are ordered, in a thread of its own."""
        orders = self.orders
        while count := orders.get():
            started = []
            for _ in range(count):
                with self.failing():
                    started.append(Worker(self.settings, self.outer))
            for worker in started:  # they warm up at the same time
                with self.failing():
                    worker.wait()
                    with self.lock:
                        self.busy += 1
                    self.put_back(worker, True)

    @contextlib.contextmanager
    def failing(self):
        """Note that an ordered worker did not start; if none is left, waiting threads get None."""
        try:
            yield
        except (OSError, JailError) as error:
            with self.lock:
                self.failure = str(error)
                self.alive -= 1
                while self.waiting and not self.alive:
                    self.waiting.popleft().set_result(None)

    def close(self):
        """Kill all workers. Waiting and later calls return "broken"."""
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

# Tries one forbidden action of each class; none does harm if it works. PORT and FILE are replaced
# by a port and a file of the process outside. 0x20000 is CLONE_NEWNS.
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


# Looks for traces of an earlier call: prints the files in its own folder and all other folders in
# which it could leave a file, then leaves one in its own.
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
    """The proof, {class: outcome of its forbidden action}; JailError if one succeeded."""
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
        ended = status in ("timeout", "output", "killed")  # which one depends on the machine's load
        found[kind] = status if ended else f"ESCAPED with status {status}"
    if escaped := [kind for kind, words in found.items() if words.startswith("ESCAPED")]:
        raise JailError(f"this jail does not hold ({', '.join(escaped)}): {LIBSECCOMP}")
    return found


# ---------------------------------------------------------------- commands

def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=["check", "run", "serve"], help="what to do")
    p.add_argument("file", nargs="?", type=Path, help="run: file of the program")
    p.add_argument("--workers", type=int, help="programs that run at once; default: one per core")
    p.add_argument("--seconds", type=float, default=10, help="time limit of a program (10)")
    p.add_argument("--memory", type=int, default=512, help="memory limit of a program in MiB (512)")
    p.add_argument("--unsafe", action="store_true",
                   help="no jail: programs can read and write whatever this user can")
    p.add_argument("--host", default="127.0.0.1", help="serve: address to listen on (127.0.0.1)")
    p.add_argument("--port", type=int, default=8080, help="serve: port to listen on (8080)")
    args = p.parse_args(argv)
    if args.command == "run" and args.file is None:
        p.error("run needs the name of a file")
    if args.seconds <= 0 or args.memory <= 0 or (args.workers or 1) < 1:
        p.error("--seconds, --memory and --workers must be more than 0")
    if not 0 <= args.port < 65536:
        p.error(f"--port {args.port} must be from 0 to 65535")
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
