"""
The interpreter of the tools world: programs that a model wrote run in warm, locked-up Pythons.

    (1) start    a worker is a fresh Python inside bubblewrap [1]: namespaces of its own, no network,
                 no capabilities, a read-only view of Python and its libraries and of nothing else,
                 a small tmpfs, and a seccomp filter; it imports numpy and sympy once
    (2) prove    a program attempts one forbidden thing of each class; unless all fail, no jail opens
    (3) call     the worker forks; the fork takes limits and a second, stricter filter, and runs the
                 program; the worker waits, then kills whatever else lives in its namespace
    (4) replace  a worker that misbehaves, grows, or has answered CALLS calls is killed, and a spare
                 takes its place

Program, input and output pass the worker by, as descriptors that go from the caller straight to the
fork: a worker never holds a byte that one program could read of another. Frames, JSON in packets
of a socket that forks close, say only how long a call may last and how it ended.

There are two levels. "jailed" is proved at each start. "unsafe" is a plain process under limits,
which reads and writes what its user can; it has to be asked for.
[1] github.com/containers/bubblewrap   [2] SandboxFusion, arXiv:2412.00535, its POST /run_code

Reads   the program, and nothing besides       Writes  nothing that outlives the call

    python -m toolstar.jail check              the level, and what was tried to prove it
    python -m toolstar.jail run FILE           a file's program, with this command's input
    python -m toolstar.jail serve --port 8080  POST /run_code as SandboxFusion answers it [2]
"""
import argparse
import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import linecache
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
import traceback
import types
from collections import deque
from concurrent.futures import Future
from errno import EPERM, ENOSYS
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, Popen
from typing import NamedTuple

PRELOAD = ("numpy", "numpy.random", "numpy.linalg", "sympy", "math", "cmath", "fractions",
           "decimal", "itertools", "functools", "collections", "statistics", "random", "re",
           "string", "datetime", "heapq", "bisect", "operator", "typing", "dataclasses")
NAME = "program.py"  # in tracebacks
MIB = 2**20
CALLS = 2000  # of one worker
GROWTH = 1.2  # times the memory of a fresh worker
GRACE = 1.0  # seconds that a worker may answer late
INODES = 2000  # files that a program may make
TICK = 0.05  # seconds between two looks at them
RESERVE = 32 * MIB  # beyond the limit, for the traceback of a MemoryError
FIX = ("pip install pyseccomp and apt install libseccomp2 (root's processes are bound by seccomp "
       "alone)")


class JailError(ValueError):
    """This machine gives no jail; the text is one line with the cause and the fix."""


class Result(NamedTuple):
    status: str  # ok, error, timeout, memory, output, killed; broken: ours, not the program's
    stdout: str
    stderr: str
    error: str  # "", or the last line of the traceback with the program's line number
    seconds: float  # that it ran


# ---------------------------------------------------------------- inside: the program

class Ending:
    """Whatever ends the program stops here: shown on stderr as Python shows it, made a code."""
    code = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            return True
        # what a program took of the memory it still holds: the report needs some more
        resource.setrlimit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1:] * 2)
        if issubclass(kind, SystemExit):
            plain = error.code is None or isinstance(error.code, int)
            self.code = (error.code or 0) & 0xff if plain else 1
            lines = [] if plain else [f"{error.code}\n"]
        else:
            self.code = 1
            while trace and trace.tb_frame.f_code.co_filename != NAME:
                trace = trace.tb_next  # our own frames
            lines = traceback.format_exception(kind, error, trace)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        view = memoryview("".join(lines).encode("utf-8", "backslashreplace"))
        while view:
            view = view[os.write(2, view):]
        return True


def play(source, display):
    """Run a program as `python program.py` would; show the value of a last bare expression.

    The one place of the house that compiles and executes text.
    """
    program = source.decode("utf-8-sig", "surrogatepass")
    linecache.cache[NAME] = len(program), None, program.splitlines(True), NAME
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = NAME
    tree = ast.parse(program, NAME)
    last = tree.body[-1] if tree.body else None
    if display and isinstance(last, ast.Expr):
        shown = ast.parse("__import__('sys').displayhook(0)", mode="eval").body
        for node in ast.walk(shown):
            ast.copy_location(node, last.value)
        shown.args = [last.value]
        last.value = shown
    exec(compile(tree, NAME, "exec", dont_inherit=True), module.__dict__)


def set_limits(frame, settings):
    """The limits of the process that will run the program."""
    seconds = int(frame["seconds"]) + 1
    limits = {"CPU": (seconds, seconds + 1), "AS": (frame["memory"], frame["memory"] + RESERVE),
              "FSIZE": settings["files"], "NOFILE": 64, "CORE": 0, "STACK": 64 * MIB,
              "MEMLOCK": 0, "MSGQUEUE": 0}
    # root is not bound by it, and threads are processes to it
    limits["NPROC"] = settings["threads"] + 2 if settings["threads"] else 0
    if not settings["jailed"]:
        del limits["NPROC"]  # it would count all that this user runs
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        soft, hard = limit if isinstance(limit, tuple) else (limit, limit)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def bind_filter(code):
    """Put a seccomp filter, the bytes of a BPF program, on this process."""
    if not code:
        return
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions of 8 bytes, then where they are
    program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8,
                                                      ctypes.addressof(buffer)))
    if ctypes.CDLL(None, use_errno=True).prctl(22, 2, program, 0, 0):  # PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "the filter is refused")


def run_fork(frame, fds, settings):
    """The whole life of a fork; never returns."""
    code = 70
    try:
        os.setsid()
        program, *streams = fds
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        with open(program, "rb", closefd=False) as file:
            source = file.read()
        os.closerange(3, 256)  # among them the socket of the frames
        sys.path[0] = os.getcwd()
        sys.argv = [NAME]
        for name in "random", "numpy.random", "sympy.core.random":
            if name in sys.modules:
                sys.modules[name].seed(0)
        set_limits(frame, settings)
        bind_filter(bytes.fromhex(settings["filter"]))
        with Ending() as ending:
            play(source, settings["display"])
        with Ending() as late:  # as an interpreter that ends: atexit, then the globals' __del__
            atexit._run_exitfuncs()
            sys.modules["__main__"].__dict__.clear()
            for stream in sys.stdout, sys.__stdout__:
                if stream is not None and not stream.closed:
                    stream.flush()
        code = ending.code or late.code
    finally:
        os._exit(code)


# ---------------------------------------------------------------- inside: the worker

def receive(control):
    """A frame and the descriptors that came with it; leaves when nobody is there to ask."""
    data, fds, _, _ = socket.recv_fds(control, 65536, 4)
    if not data:
        os._exit(0)
    return json.loads(data), fds


def watch(pid, control, seconds, scratch):
    """Wait for a fork, and end it when it has to be -> (why it was ended or "", wait status)."""
    deadline, why = time.monotonic() + seconds, ""
    child = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(child, select.POLLIN)
    poller.register(control, select.POLLIN)
    while not why:
        left = max(0, deadline - time.monotonic())
        ready = [fd for fd, _ in poller.poll(min(left, TICK) * 1000)]
        if child in ready:
            break
        if ready:
            receive(control)
            why = "output"
        elif not left:
            why = "timeout"
        else:
            room = os.statvfs(scratch)
            if os.getpid() == 1 and room.f_files - room.f_ffree > INODES:
                why = "files"
    os.close(child)
    with contextlib.suppress(ProcessLookupError):
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # all of the namespace but this process
        else:
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if os.getpid() == 1 else os.WNOHANG)[0]:
            pass
    return why, status


def sweep(scratch, keep):
    """Empty the scratch folder; False where something stays."""
    for entry in os.scandir(scratch):
        if entry.name in keep:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            else:
                os.unlink(entry)
        except (OSError, RecursionError):
            return False
    return True


def work(settings):
    """A worker: import, say so, then fork for every frame."""
    control = socket.socket(fileno=settings["control"])
    control.set_inheritable(False)
    scratch = os.getcwd()
    keep = set(os.listdir(scratch))  # where a library folder lies below the scratch folder
    for name in settings["preload"]:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: forks can neither trace nor read this process
    gc.collect()
    gc.freeze()  # the collector of a fork would write to all pages
    control.send(b"{}")
    while True:
        frame, fds = receive(control)
        if "stop" in frame:  # it came after the end
            continue
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            run_fork(frame, fds, settings)
        for fd in fds:
            os.close(fd)
        why, status = watch(pid, control, frame["seconds"], scratch)
        answer = {"call": frame["call"], "why": why, "status": status,
                  "seconds": time.monotonic() - began, "clean": sweep(scratch, keep)}
        control.send(json.dumps(answer).encode())


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
    getsockopt getsockname getpeername""".split()
DENIED = """
    clone fork vfork execve execveat socket socketpair connect bind listen accept accept4 sendmsg
    recvmsg sendmmsg recvmmsg setsockopt kill tkill rt_sigqueueinfo rt_tgsigqueueinfo ptrace
    process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal
    mount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsmount bpf
    io_uring_setup io_uring_enter io_uring_register perf_event_open userfaultfd keyctl add_key
    request_key memfd_create memfd_secret personality seccomp prctl prlimit64 setrlimit
    sched_setaffinity sched_setscheduler setpriority ioprio_set chown fchown lchown fchownat mknod
    mknodat setuid setgid setgroups setreuid setregid setresuid setresgid setfsuid setfsgid capset
    setpgid setsid sethostname setdomainname swapon swapoff reboot init_module finit_module
    delete_module kexec_load acct quotactl syslog fanotify_init inotify_init1 name_to_handle_at
    open_by_handle_at settimeofday clock_settime adjtimex setxattr shmget semget msgget""".split()
# a worker is allowed these besides: to start, to fork and to end forks
WORKERS = ("clone", "fork", "execve", "kill", "prctl", "seccomp", "sendmsg", "recvmsg",
           "pidfd_open", "prlimit64", "setsid")


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

    denied = [name for name in DENIED if threads is not None or name not in WORKERS]
    for name in ALLOWED + (list(WORKERS) if threads is None else []):
        add(seccomp.ALLOW, name)
    # asyncio wakes itself through a pair of sockets; a program may lower its own limits
    special = {"socketpair": [((0, seccomp.EQ, socket.AF_UNIX),
                               (1, seccomp.MASKED_EQ, 15, socket.SOCK_STREAM))]}
    if threads is not None:
        special["prlimit64"] = [((0, seccomp.EQ, 0),)]
        special["kill"] = [((0, seccomp.MASKED_EQ, 2**31, 0),)]  # no process but it is in reach
        special["clone"] = [((0, seccomp.MASKED_EQ, 2**16, 2**16),)] if threads else []
    for request in 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451:  # is it a terminal? and the like
        add(seccomp.ALLOW, "ioctl", (1, seccomp.EQ, request))
    for name in denied:
        for conditions in special.get(name, ()):
            add(seccomp.ALLOW, name, *conditions)
        if not special.get(name):
            add(seccomp.ERRNO(EPERM), name)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


# ---------------------------------------------------------------- outside: a worker

class BrokenWorker(OSError):
    """A worker died or did not answer; it is no fault of the program that is known."""


def view(scratch="/tmp"):
    """bubblewrap's flags for all that a program sees: Python, its libraries, bare devices."""
    base = Path(sys.base_prefix)
    places = {"/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", base / "lib",
              *(Path(sys.prefix) / name for name in ("lib", "lib64", "pyvenv.cfg")),
              *site.getsitepackages(), "/usr/share/zoneinfo"}
    flags = ["--size", str(16 * MIB), "--tmpfs", scratch]
    for place in sorted(map(str, places)):
        if os.path.islink(place) and place.count("/") == 1:
            flags += ["--symlink", os.readlink(place), place]
        elif os.path.exists(place):
            flags += ["--ro-bind", place, place]
    flags += ["--ro-bind", os.path.realpath(sys.executable), sys.executable]
    flags += ["--ro-bind", os.path.abspath(__file__), "/jail.py"]
    for name in "null", "zero", "full", "random", "urandom":
        flags += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*flags, "--remount-ro", "/", "--chdir", scratch]


def memory_file(data):
    """A descriptor of these bytes, to be read from their start and not to be changed."""
    import fcntl
    fd = os.memfd_create("call", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


class Worker:
    """A warm Python in its jail, seen from outside. One thread at a time may use it."""

    def __init__(self, settings):
        """Start it, and do not wait. settings: those of a Jail, with both filters as bytes."""
        self.settings, self.calls, self.fit = settings, 0, True
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.log = tempfile.TemporaryFile()  # what bubblewrap, or an import, complains about
        jailed, threads = settings["jailed"], str(settings["threads"] or 1)
        clean = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                 "PYTHONIOENCODING": "utf-8:strict", "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib",
                 "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
                 "MKL_NUM_THREADS": threads}
        given, self.scratch, command = [theirs.fileno()], None, []
        told = {name: settings[name] for name in
                ("preload", "threads", "display", "files", "jailed")}
        told |= {"control": theirs.fileno(), "filter": settings["inner"].hex()}
        # not -I: it would ignore PYTHONHASHSEED; the environment is ours
        python = [sys.executable, "-s", "-B", "/jail.py" if jailed else os.path.abspath(__file__)]
        if jailed:
            command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1",
                       "--hostname", "jail", "--cap-drop", "ALL", *view(), "--clearenv"]
            for name, value in clean.items():
                command += ["--setenv", name, value]
            if settings["outer"]:
                given.append(memory_file(settings["outer"]))
                command += ["--seccomp", str(given[1])]
        else:
            self.scratch = tempfile.TemporaryDirectory(prefix="unsafe-")
        folder = self.scratch.name if self.scratch else "/"
        self.process = Popen([*command, *python, "work", json.dumps(told)], stdin=DEVNULL,
                             stdout=DEVNULL, stderr=self.log, pass_fds=given, cwd=folder,
                             env=clean | {"PATH": os.environ.get("PATH", os.defpath)} if jailed
                             else clean | {"HOME": folder}, start_new_session=True)
        theirs.close()
        for fd in given[1:]:
            os.close(fd)

    def wait(self, seconds=60):
        """Until it is warm; JailError with its last words if it does not come up."""
        self.control.settimeout(seconds)
        try:
            said, kept, _, _ = self.control.recvmsg(4096, 64)
        except OSError as error:
            said, kept = b"", str(error)
        if not said:
            self.close()
            self.log.seek(0)
            words = self.log.read().decode(errors="replace").strip() or str(kept)
            raise JailError(explain(words.splitlines()[-1]))
        self.pid = struct.unpack("3i", kept[0][2][:12])[0]  # as seen from here
        self.control.settimeout(None)
        self.fresh = self.pages()[1]

    def pages(self):
        """(bytes of address space, bytes in memory) of the worker."""
        numbers = Path(f"/proc/{self.pid}/statm").read_text().split()
        return [int(number) * resource.getpagesize() for number in numbers[:2]]

    def call(self, program, stdin, seconds):
        """Run a program -> Result; BrokenWorker (an OSError) if the worker fails."""
        self.calls += 1
        space, memory = self.pages()
        frame = {"call": self.calls, "seconds": seconds,
                 "memory": space + self.settings["memory"] * MIB}
        streams, theirs = {}, []
        try:
            for text in program, stdin:
                theirs.append(memory_file(text))
            for _ in "out", "err":
                end, write_end = os.pipe()
                streams[end] = bytearray()
                theirs.append(write_end)
            socket.send_fds(self.control, [json.dumps(frame).encode()], theirs)
            while theirs:
                os.close(theirs.pop())  # theirs alone now: when they have ended, so have the pipes
            answer, size = self.follow(streams, seconds)
        finally:
            for fd in (*theirs, *streams):
                os.close(fd)
        if answer.get("call") != self.calls:
            raise BrokenWorker("a worker answered another call")
        # the first call touches pages that all later ones touch
        self.fresh = max(self.fresh, memory) if self.calls <= 2 else self.fresh
        self.fit = (answer["clean"] and self.calls < CALLS and memory <= GROWTH * self.fresh)
        out, err = (text[:self.settings["output"]] for text in streams.values())
        return read_result(answer, out, err, size, seconds, self.settings)

    def follow(self, streams, seconds):
        """Fill {descriptor: output} until the worker answers -> (its frame, bytes written)."""
        deadline = time.monotonic() + seconds + GRACE
        poller, answer, size = select.poll(), None, 0
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
                if fd == self.control.fileno():
                    data = self.control.recv(4096)
                    if not data:
                        raise BrokenWorker("a worker died")
                    answer = json.loads(data)
                    poller.unregister(fd)
                    continue
                data = os.read(fd, MIB)
                if not data:
                    poller.unregister(fd)
                before, size = size, size + len(data)
                streams[fd] += data[:max(0, self.settings["output"] - len(streams[fd]))]
                if before <= self.settings["output"] < size and not answer:
                    self.control.send(b'{"stop": 1}')

    def close(self):
        """Kill it and all that lives in its namespace."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        if self.scratch:
            self.scratch.cleanup()


def explain(words):
    """One line on why a worker did not start, with the fix."""
    if "namespace" in words or "uid map" in words or "Operation not permitted" in words:
        return (f"bubblewrap cannot make a jail here ({words}): allow user namespaces (sysctl "
                "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0;"
                " docker: --security-opt seccomp=unconfined)")
    return f"no worker starts: {words}"


def read_result(answer, out, err, size, seconds, settings):
    """A worker's frame and the streams of a call -> Result."""
    out, err = (mask(text.decode("utf-8", "replace")) for text in (out, err))
    code, limit = os.waitstatus_to_exitcode(answer["status"]), settings["output"]
    status, error = "ok", ""
    if size > limit:
        status, error = "output", f"more than {limit} bytes of output"
    elif answer["why"] == "timeout" or code == -signal.SIGXCPU:
        status, error = "timeout", f"stopped after {seconds:g} s"
    elif answer["why"] == "files":
        status, error = "killed", f"more than {INODES} files"
    elif code < 0:
        status, error = "killed", f"killed by {signal.Signals(-code).name}"
    elif code:
        status, error = "error", last_line(err) or f"exit code {code}"
        if re.match(r"[\w.]*MemoryError\b", error):
            status = "memory"
    return Result(status, out, err, error, answer["seconds"])


def last_line(err):
    """The last line of a traceback, with the line of the program that it is about."""
    lines = [line for line in err.splitlines() if line.strip()]
    places = re.findall(rf'^ *File "{NAME}", line (\d+)', err, re.MULTILINE)
    return lines[-1] + (f" (line {places[-1]})" if places else "") if lines else ""


def mask(text):
    """Addresses in what Python prints of objects differ from run to run."""
    return re.sub(r"(<[^<>\n]* at )0x[0-9a-fA-F]{6,16}\b", r"\g<1>0x0", text)


# ---------------------------------------------------------------- outside: the pool

class Jail:
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
        inner, outer = (b"", b"") if unsafe else (write_filter(threads), write_filter())
        if not unsafe and not shutil.which("bwrap"):
            raise JailError("there is no bubblewrap: apt install bubblewrap")
        if not unsafe and os.geteuid() == 0 and not inner:
            raise JailError(f"no seccomp filter as root: {FIX}")
        self.settings = {"preload": list(preload), "memory": memory, "output": output,
                         "files": files, "threads": threads, "display": display,
                         "jailed": not unsafe, "inner": inner, "outer": outer}
        self.lock, self.waiting, self.idle = threading.Lock(), deque(), []
        self.busy = self.alive = 0
        self.closed, self.failure, self.orders = False, None, SimpleQueue()
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, program, stdin="", seconds=None):
        """Run a program -> Result. It blocks the calling thread alone, and never raises."""
        seconds, why = float(seconds or self.seconds), ""
        # half a surrogate pair is the program's error; in its input it is a question mark
        program, stdin = (program.encode("utf-8", "surrogatepass"),
                          stdin.encode("utf-8", "replace"))
        for _ in "first", "again":  # a call whose worker broke has another try
            if (worker := self.take()) is None:
                why = self.failure or "the jail is closed"
                continue
            result = None
            try:
                result = worker.call(program, stdin, seconds)
                return result
            except (OSError, ValueError) as error:
                why = str(error)
            finally:
                self.put_back(worker, result is not None and worker.fit)
        return Result("broken", "", "", why, 0.0)

    def take(self):
        """A worker for this thread, when its turn has come; None: there is none to be had."""
        turn = Future()
        with self.lock:
            if self.closed:
                return None
            self.waiting.append(turn)
            self.deal()
        return turn.result()

    def put_back(self, worker, fit):
        """End a thread's use of a worker; one that is not fit is killed."""
        if not fit:
            worker.close()
        with self.lock:
            self.busy -= 1
            self.alive -= not fit
            if fit and not self.closed:
                self.idle.append(worker)
            elif fit:
                worker.close()
            self.deal()

    def deal(self):
        """With the lock held: order what workers are missing, give idle ones to who waits."""
        missing = self.workers + 1 - self.alive
        if missing > 0 and not self.closed:
            self.alive += missing
            self.orders.put(missing)
        while self.waiting and self.idle and self.busy < self.workers:
            self.busy += 1
            self.waiting.popleft().set_result(self.idle.pop())

    def supply(self):
        """The life of the thread that starts workers."""
        while count := self.orders.get():
            started = []
            try:
                started = [Worker(self.settings) for _ in range(count)]
            except OSError as error:
                self.fail(count, str(error))
            for worker in started:
                try:
                    worker.wait()
                except (JailError, OSError) as error:
                    self.fail(1, str(error))
                    continue
                with self.lock:
                    self.idle.append(worker)
                    self.deal()
                    late = self.closed
                if late:
                    worker.close()

    def fail(self, count, why):
        """Workers that were ordered do not come; nobody waits for them."""
        with self.lock:
            self.failure = why
            self.alive -= count
            while self.waiting and not self.alive:
                self.waiting.popleft().set_result(None)

    def close(self):
        """Kill all workers. Calls that wait are answered with "broken"."""
        with self.lock:
            self.closed = True
            idle, self.idle = self.idle, []
            while self.waiting:
                self.waiting.popleft().set_result(None)
        self.orders.put(0)
        for worker in idle:
            worker.close()


# ---------------------------------------------------------------- the proof

# one forbidden thing of each class; PORT and FILE are of this process and exist outside
PROBE = """
import ctypes, json, os, socket
libc, found = ctypes.CDLL(None, use_errno=True), {}

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def fork():
    if os.fork() == 0:
        os._exit(0)

for kind, attempt in {
    "memory": lambda: bytearray(2**37),
    "processes": fork,
    "secrets": lambda: open(FILE).read(),
    "accounts": lambda: open("/etc/passwd").read(),
    "files": lambda: open(os.__file__, "a").close(),
    "network": lambda: socket.create_connection(("127.0.0.1", PORT), 1),
    "kernel": lambda: call("ptrace", 16, 1, None, None),
    "mounts": lambda: call("mount", b"x", b"/tmp", b"tmpfs", 0, None),
}.items():
    try:
        attempt()
        found[kind] = "ESCAPED"
    except (OSError, MemoryError) as error:
        found[kind] = f"{type(error).__name__} {error}"
print(json.dumps(found))
"""


def prove(jail):
    """What became of an attempt of each class, {class: words}; JailError where one succeeded."""
    with socket.create_server(("127.0.0.1", 0)) as canary:
        known = {"PORT": str(canary.getsockname()[1]), "FILE": repr(os.path.abspath(__file__))}
        probe = re.sub("PORT|FILE", lambda name: known[name[0]], PROBE)
        result = jail.run(probe, seconds=10)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        raise JailError(f"the probe of the jail failed: {result.error}") from None
    loops = {"time": ("while True: pass", "timeout"),
             "output": ("while True: print('x' * 9999)", "output")}
    for kind, (program, wanted) in loops.items():
        status = jail.run(program, seconds=0.2).status
        found[kind] = status if status == wanted else f"ESCAPED with status {status}"
    if escaped := [kind for kind, words in found.items() if words.startswith("ESCAPED")]:
        raise JailError(f"this jail does not hold ({', '.join(escaped)}): {FIX}")
    return found


# ---------------------------------------------------------------- elsewhere

class Remote:
    """A SandboxFusion server in the place of a Jail. It shows no value of a bare expression."""
    level = "remote"

    def __init__(self, url, seconds=5.0):
        import httpx2
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds, self.client = seconds, httpx2.Client(trust_env=False)
        self.failure = httpx2.HTTPError

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, program, stdin="", seconds=None):
        """As a Jail's: two tries, then "broken"."""
        seconds, why = float(seconds or self.seconds), ""
        body = {"code": program, "language": "python", "stdin": stdin, "run_timeout": seconds}
        content = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        for _ in "first", "again":
            try:
                reply = self.client.post(self.url, content=content, headers=headers,
                                         timeout=seconds + 30)
                return read_reply(reply.json(), seconds)
            except (self.failure, ValueError, KeyError, TypeError) as error:
                why = f"{self.url}: {error!r}"
        return Result("broken", "", "", why, 0.0)

    def close(self):
        self.client.close()


def read_reply(reply, seconds):
    """SandboxFusion's JSON -> Result; ValueError, KeyError or TypeError where it is none."""
    if reply["status"] == "SandboxError":
        raise ValueError(reply.get("message") or "SandboxError")
    done = reply["run_result"]
    out, err = done["stdout"] or "", done["stderr"] or ""
    took = float(done.get("execution_time") or 0)
    if done["status"] == "TimeLimitExceeded":
        return Result("timeout", out, err, f"stopped after {seconds:g} s", took)
    if reply["status"] == "Success":
        return Result("ok", out, err, "", took)
    error = last_line(err) or f"exit code {done.get('return_code')}"
    memory = re.match(r"[\w.]*MemoryError\b", error)
    return Result("memory" if memory else "error", out, err, error, took)


def answer_request(jail, body):
    """The JSON of a POST /run_code -> the JSON of its answer."""
    reply = {"status": "SandboxError", "message": "", "compile_result": None, "run_result": None,
             "executor_pod_name": None, "files": {}}
    code, stdin = body.get("code"), body.get("stdin") or ""
    if not isinstance(code, str) or not isinstance(stdin, str):
        return reply | {"message": "want code and stdin as text"}
    if body.get("language", "python") != "python" or body.get("files"):
        return reply | {"message": "python alone runs here, without files"}
    try:
        seconds = min(float(body.get("run_timeout") or jail.seconds), jail.seconds)
    except (TypeError, ValueError):
        return reply | {"message": "want run_timeout in seconds"}
    result = jail.run(code, stdin, seconds)
    if result.status == "broken":
        return reply | {"message": result.error}
    good, late = result.status == "ok", result.status == "timeout"
    stderr = result.stderr if result.status in ("ok", "error") else result.stderr + result.error
    return reply | {"status": "Success" if good else "Failed", "run_result": {
        "status": "TimeLimitExceeded" if late else "Finished", "execution_time": result.seconds,
        "return_code": None if late else int(not good), "stdout": result.stdout, "stderr": stderr}}


def serve(args, jail):
    """Answer POST /run_code until stopped."""
    import fastapi
    import uvicorn
    app = fastapi.FastAPI()

    @app.post("/run_code")
    def run_code(body: dict):
        return answer_request(jail, body)

    print(f"jail.py: {jail.level}, http://{args.host}:{args.port}/run_code", file=sys.stderr)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


# ---------------------------------------------------------------- commands

def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=["check", "run", "serve"], help="what to do")
    p.add_argument("file", nargs="?", type=Path, help="the program of `run`")
    p.add_argument("--workers", type=int, help="programs that run at once; one for each core")
    p.add_argument("--seconds", type=float, default=10, help="that a program may run, at most")
    p.add_argument("--memory", type=int, default=512, help="MiB that a program may take")
    p.add_argument("--display", action="store_true",
                   help="show the value of a last bare expression, as a notebook does")
    p.add_argument("--unsafe", action="store_true",
                   help="no jail: programs read and write whatever this user can")
    p.add_argument("--host", default="127.0.0.1", help="address of `serve`")
    p.add_argument("--port", type=int, default=8080, help="port of `serve`")
    args = p.parse_args(argv)
    if args.command == "run" and args.file is None:
        p.error("run: name a file")
    return args


def main(argv=None):
    args = flags(argv)
    try:
        program = args.file.read_text(encoding="utf-8") if args.command == "run" else ""
        workers = 1 if args.command == "run" else args.workers
        jail = Jail(workers, args.unsafe, seconds=args.seconds, memory=args.memory,
                    display=args.display)
    except (OSError, ValueError) as error:
        raise SystemExit(f"jail.py: {error}") from None
    with jail:
        if args.command == "serve":
            serve(args, jail)
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
    if sys.argv[1:2] == ["work"]:
        work(json.loads(sys.argv[2]))
    main()
