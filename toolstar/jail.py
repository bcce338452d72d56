"""
The interpreter of the tools world: run a model's programs in warm Python processes in a jail.

    (1) start    a worker is a new Python inside bubblewrap [1]. It has its own namespaces, no
                 network, no capabilities, a small tmpfs, a seccomp filter, and a read-only view of
                 Python and its libraries and of no other files. It imports numpy and sympy once
    (2) prove    a probe tries one forbidden action of each class; if one succeeds, JailError
    (3) call     the worker forks; the fork sets limits and a second, stricter filter, and runs the
                 program; then the worker kills all other processes in its namespace
    (4) replace  a worker that failed or has answered CALLS calls is killed and replaced

This file is the outside of the jail, cell.py the inside. Program, input and output do not pass
through the worker: the caller sends descriptors of them that only the fork opens, so no program can
read another one's data in the worker. Frames, packets of JSON on a socket that forks close, hold
only limits and how a call ended.

A machine without user namespaces has no jail: name a SandboxFusion server instead (tools.py).
[1] github.com/containers/bubblewrap

Reads   only the program       Writes  nothing that outlives the call

    Jail(seconds=5).run("print(6 * 7)")
"""
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
import time
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSYS, EPERM
from pathlib import Path
from queue import Empty, LifoQueue
from subprocess import DEVNULL, Popen
from typing import NamedTuple

from runtime import Mistake

PRELOAD = ("numpy", "numpy.random", "numpy.linalg", "sympy", "math", "cmath", "fractions",
           "decimal", "itertools", "functools", "collections", "statistics", "random", "re",
           "string", "datetime", "heapq", "bisect", "operator", "typing", "dataclasses")
CELL = Path(__file__).resolve().with_name("cell.py")
SCRATCH = "/jail"  # a program's folder, the only place where it can write
MIB = 2**20
CALLS = 2000  # after which a worker is replaced
GRACE = 1.0  # seconds that a worker may take beyond the program's limit
DAY = 86400.0  # seconds, the highest limit of a program
LIBSECCOMP = "pip install pyseccomp; apt install libseccomp2"
NAMESPACES = ("sysctl kernel.unprivileged_userns_clone=1 "
              "kernel.apparmor_restrict_unprivileged_userns=0; in docker --security-opt "
              "seccomp=unconfined")


class JailError(Mistake):
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


def write_filter(worker):
    """A seccomp filter as BPF bytes, for a worker or for a program."""
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:  # the package or its library is missing
        raise JailError(f"a jail needs a seccomp filter ({error}): {LIBSECCOMP}") from None
    rules = seccomp.SyscallFilter(seccomp.ERRNO(ENOSYS))

    def add(action, name, *conditions):
        with contextlib.suppress(OSError):  # not a call of this architecture
            rules.add_rule(action, name, *[seccomp.Arg(*each) for each in conditions])

    # asyncio needs a pair of sockets; with prlimit64 a program may lower its own limits
    special = {"socketpair": [(0, seccomp.EQ, socket.AF_UNIX),
                              (1, seccomp.MASKED_EQ, 15, socket.SOCK_STREAM)]}
    free = ALLOWED.split()
    if worker:
        free += WORKERS.split()
    else:
        special["prlimit64"] = [(0, seccomp.EQ, 0)]
        special["kill"] = [(0, seccomp.MASKED_EQ, 2**31, 0)]  # it can reach only itself
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


def inside(place):
    """The path of a file in the jail. A virtual environment moves to /python, so that a program
    sees the same wherever this repository is."""
    place = os.path.abspath(place)  # Python may have been called by a path with ".."
    moves = sys.prefix != sys.base_prefix and Path(place).is_relative_to(sys.prefix)
    return f"/python/{Path(place).relative_to(sys.prefix)}" if moves else place


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
            flags += ["--ro-bind", place, inside(place)]
    flags += ["--ro-bind", os.path.realpath(sys.executable), inside(sys.executable)]
    flags += ["--ro-bind", str(CELL), "/cell.py"]
    for name in "null", "zero", "full", "random", "urandom":
        flags += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    # SCRATCH is a tmpfs of its own, and /tmp a link to it, unless Python itself is below /tmp: then
    # bubblewrap makes folders there, in which a program could leave files for the next one
    if not any(place.startswith("/tmp/") for place in flags[2::3]):
        flags += ["--symlink", SCRATCH, "/tmp"]
    return [*flags, "--size", str(16 * MIB), "--tmpfs", SCRATCH, "--remount-ro", "/",
            "--chdir", SCRATCH]


def command(settings, control, outer):
    """The command line of a worker. control, outer: descriptors of its socket and its filter."""
    # not -I, which would ignore PYTHONHASHSEED; Worker sets the whole environment
    python = [inside(sys.executable), "-s", "-B", "/cell.py",
              json.dumps(settings | {"control": control})]
    return [shutil.which("bwrap"), "--unshare-all", "--die-with-parent", "--new-session",
            "--as-pid-1", "--hostname", "jail", "--cap-drop", "ALL", *view(), "--seccomp",
            str(outer), "--setenv", "LD_LIBRARY_PATH", f"{sys.base_prefix}/lib", *python]


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
        filters = memory_file(outer)
        clean = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                 "PYTHONIOENCODING": "utf-8:strict", "OMP_NUM_THREADS": "1",
                 "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = Popen(command(settings, theirs.fileno(), filters), stdin=DEVNULL, env=clean,
                             stdout=DEVNULL, stderr=self.log, start_new_session=True,
                             pass_fds=[theirs.fileno(), filters])
        theirs.close()
        os.close(filters)

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
            return
        words = os.pread(self.log, MIB, 0).decode(errors="replace").strip().rpartition("\n")[2]
        self.close()
        fix = f": allow user namespaces, {NAMESPACES}" if words.startswith("bwrap") else ""
        raise JailError(f"no worker starts: {words or f'nothing in {seconds} s'}{fix}")

    def call(self, program, stdin, seconds):
        """Run a program -> Result; an OSError (BrokenWorker) if the worker fails."""
        self.calls += 1
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])  # its address space
        frame = {"call": self.calls, "seconds": seconds,
                 "memory": pages * resource.getpagesize() + self.settings["memory"] * MIB}
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
        self.fit = answer["clean"] and self.calls < CALLS
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


def read_end(answer, err, seconds):
    """(status, error) of a call, from the worker's frame and the program's stderr."""
    code = answer["status"]
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

class Jail:
    """A pool of workers for many threads.

    workers: how many programs run at once; None: one per core
    preload: modules that workers import before any call
    seconds, memory, output, files: limits of a program: wall and CPU seconds, MiB above those of a
        warm worker, bytes of stdout and stderr together, bytes of a file
    Raises JailError if this machine cannot run a jail.
    """
    level = "jailed"

    def __init__(self, workers=None, preload=PRELOAD, seconds=5.0, memory=512, output=65536,
                 files=16 * MIB):
        self.workers, self.seconds = workers or len(os.sched_getaffinity(0)), seconds
        if not shutil.which("bwrap"):
            raise JailError("bubblewrap is missing: apt install bubblewrap")
        self.outer = write_filter(worker=True)
        self.settings = {"preload": list(preload), "memory": memory, "output": output,
                         "files": files, "filter": write_filter(worker=False).hex()}
        self.idle, self.open = LifoQueue(), True
        # the kernel kills a worker when the thread that started it ends, so one thread starts all
        self.starter = ThreadPoolExecutor(1, "jail")
        for _ in range(self.workers):
            self.idle.put(None)  # started when it is first needed
        try:
            self.put_back(self.take(), True)
            self.proof = prove(self)
        except JailError:
            self.close()
            raise

    def run(self, program, stdin="", seconds=None):
        """Run a program -> Result. Blocks only the calling thread, and never raises."""
        seconds = min(max(0.0, self.seconds if seconds is None else seconds), DAY)
        # half a surrogate pair makes the program fail; in its input it becomes a question mark
        program, stdin = program.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "replace")
        why = ""
        for _ in "first", "again":  # if a worker breaks, try once more
            worker, fit = None, False
            try:
                worker = self.take()
                result = worker.call(program, stdin, seconds)
                fit = worker.fit
                return result
            except (OSError, ValueError, KeyError, RuntimeError, JailError) as error:
                why = str(error) or repr(error)  # some have no text
            finally:
                if worker:
                    self.put_back(worker, fit)
        return Result("broken", "", "", why, 0.0)

    def take(self):
        """Wait for a worker; JailError if none can be started."""
        worker = self.idle.get()
        try:
            if not self.open:
                raise JailError("the jail is closed")
            return worker or self.starter.submit(self.start).result()
        except BaseException:
            self.idle.put(None)
            raise

    def start(self):
        worker = Worker(self.settings, self.outer)
        worker.wait()
        return worker

    def put_back(self, worker, fit):
        """Return a worker to the pool, or kill it if it is not fit."""
        fit = fit and self.open
        if not fit:
            worker.close()
        self.idle.put(worker if fit else None)

    def close(self):
        """Kill the idle workers; busy ones end with their call. Later calls return "broken"."""
        self.open, held = False, []
        with contextlib.suppress(Empty):
            while True:
                held.append(self.idle.get_nowait())
        for worker in held:
            if worker:
                worker.close()
            self.idle.put(None)


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
    if escaped := [kind for kind, words in found.items() if words.startswith("ESCAPED")]:
        raise JailError(f"this jail does not hold ({', '.join(escaped)}): {LIBSECCOMP}")
    return found
