"""
The inside of the jail: a worker, a warm Python that forks for every program. jail.py starts it.

    (1) work     import the modules that programs often use, then wait for frames: packets of JSON
    (2) fork     for each frame, fork; the fork takes over the program's descriptors, sets limits
                 and a seccomp filter, and closes the socket, so it cannot forge a frame
    (3) play     compile and execute the program, show the value of a last bare expression, and end
                 as Python ends
    (4) watch    the worker waits for the fork's end, its time limit, too many files, or a stop from
                 the caller; then it kills all other processes of its namespace and empties the
                 scratch folder

This file uses only the standard library. It is the only file of this repository that programs in
the jail can see.
"""
import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import types

NAME = "program.py"  # in tracebacks
INODES = 2000  # the most files that a program may make
TICK = 0.05  # seconds between two counts of them
MIB = 2**20
RESERVE = 32 * MIB  # beyond the memory limit, to print the traceback of a MemoryError
LIBC = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- the program

def code_of(program, *arguments):
    """Call the program -> its exit code. Whatever ends it is printed as Python prints it."""
    try:
        program(*arguments)
        return 0
    except BaseException as error:
        # the program may have used up its memory limit, and printing the error needs some more
        resource.setrlimit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1:] * 2)
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xff
            print(error.code, file=sys.stderr)
            return 1
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next  # skip our own frames
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1


def play(fd):
    """Run a program as `python program.py` would; show the value of a last bare expression.

    fd: descriptor of the program's source. This is the only place in the repository that compiles
    and executes text.
    """
    with open(fd, "rb") as file:
        source = file.read()
    with open(NAME, "wb") as file:
        file.write(source)  # tracebacks quote its lines
    program = source.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = NAME
    tree = ast.parse(program, NAME)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
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
              "MEMLOCK": 0, "MSGQUEUE": 0, "NPROC": 0}
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        soft, hard = limit if isinstance(limit, tuple) else (limit, limit)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def run_fork(frame, fds, settings):
    """Everything that a fork does; never returns."""
    code = 70
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(len(fds), max(256, settings["control"] + 1))  # also the frames' socket
        sys.path[0], sys.argv = os.getcwd(), [NAME]
        random.seed(0)  # Python reseeds it in every fork
        set_limits(frame, settings)
        if LIBC.prctl(22, 2, settings["rules"], 0, 0):  # PR_SET_SECCOMP
            raise OSError(ctypes.get_errno(), "the filter is refused")
        code = code_of(play, len(fds) - 1)
        code = code_of(end) or code
    finally:
        os._exit(code)


def end():
    """What an interpreter does at its end: threads, atexit, __del__ of the globals."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    for stream in sys.stdout, sys.stderr, sys.__stdout__:
        if stream is not None and not stream.closed:
            stream.flush()


# ---------------------------------------------------------------- the worker

def receive(control):
    """(frame, the descriptors that came with it); exits when the caller has closed the socket."""
    data, fds, _, _ = socket.recv_fds(control, 65536, 4)
    if not data:
        os._exit(0)
    return json.loads(data), fds


def watch(pid, control, seconds, scratch):
    """Wait for a fork, or kill it at a limit -> (the limit's name or "", wait status)."""
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
            if room.f_files - room.f_ffree > INODES:
                why = "files"
    os.close(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all other processes of the namespace
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
    return why, os.waitstatus_to_exitcode(status)


def sweep(scratch):
    """Empty the scratch folder; False if something is left."""
    try:
        for entry in os.scandir(scratch):  # fails if the program has locked the folder
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            else:
                os.unlink(entry)
    except (OSError, RecursionError):
        return False
    return True


def work(settings):
    """The life of a worker: import, report that it is ready, then fork for every frame."""
    control = socket.socket(fileno=settings["control"])
    control.set_inheritable(False)
    scratch = os.getcwd()
    for name in settings["preload"]:
        importlib.import_module(name)
    for name in "numpy.random", "sympy.core.random":
        if name in sys.modules:
            sys.modules[name].seed(0)
    # the filter denies to set modes and times: a copy goes without
    shutil.copymode = shutil.copystat = lambda *_, **__: None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    LIBC.prctl(4, 0)  # PR_SET_DUMPABLE: forks can neither trace nor read this process
    code = ctypes.create_string_buffer(bytes.fromhex(settings["filter"]))
    # struct sock_fprog: the number of 8-byte instructions, then their address
    settings["rules"] = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
    ast.parse("x", NAME)  # its first call is slow: once here instead of in every fork
    gc.collect()
    # a fork copies the page tables, which are much smaller for pages of 2 MiB than of 4 KiB
    for block in {id(each) >> 21 for each in gc.get_objects()}:
        LIBC.madvise(ctypes.c_void_p(block << 21), ctypes.c_size_t(2**21), 25)  # MADV_COLLAPSE
    gc.freeze()  # else the garbage collector of a fork would write to, and so copy, all pages
    control.send(b"{}")
    while True:
        frame, fds = receive(control)
        if "stop" in frame:  # it came after the program had ended
            continue
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            run_fork(frame, fds, settings)
        for fd in fds:
            os.close(fd)
        why, status = watch(pid, control, frame["seconds"], scratch)
        answer = {"call": frame["call"], "why": why, "status": status,
                  "seconds": time.monotonic() - began, "clean": sweep(scratch)}
        control.send(json.dumps(answer).encode())


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
