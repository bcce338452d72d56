"""No program that the jail runs comes upon an answer, in plays that look for theirs.

Each way of looking is tried twice: in the jail, where it finds nothing, and where a gold lies open
to it, so that a look which could not find anything would be noticed.
"""
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolstar import tools

# each program says what it found of any gold, in one way of looking. None spells a gold out
FIND = """
import re
GOLD = re.compile(rb"GO" rb"LD-[0-9a-f]{16}")
found = set()
def look(data):
    found.update(GOLD.findall(data if isinstance(data, bytes) else repr(data).encode()))
def read(path, at=0, most=4 << 20):
    try:
        with open(path, "rb", 0) as file:
            file.seek(at)
            look(file.read(most))
    except (OSError, OverflowError):
        pass
%s
print(sorted(found)[:4])
"""
WAYS = {
    # the collector hides what the worker froze, and what refers to it does not. A page that is none
    # write tells by an error, where reading it would end the process
    "its own memory": """
import ctypes, gc, os, sys
libc, (out, into) = ctypes.CDLL(None), os.pipe()
libc.sbrk.restype = ctypes.c_void_p
seen, left = set(), [sys.modules, sys._getframe(), gc.get_objects()]
while left:
    thing = left.pop()
    if id(thing) not in seen:
        seen.add(id(thing))
        left += gc.get_referents(thing)
places, top = {each >> 20 for each in seen}, libc.sbrk(0) >> 20
for place in sorted({*places, *range(top - 64, top + 1), id(found) >> 20}):
    kept = b""
    for page in range(place << 8, place + 1 << 8):
        if libc.write(into, ctypes.c_void_p(page << 12), 4096) == 4096:
            kept = kept[-32:] + os.read(out, 4096)
            look(kept)""",
    "processes": """
import ctypes, os
libc, kept = ctypes.CDLL(None), ctypes.create_string_buffer(4096)
ours, theirs = ((ctypes.c_void_p * 2)(place, 4096) for place in (ctypes.addressof(kept), @ADDRESS@))
libc.process_vm_readv(@PID@, ours, 1, theirs, 1, 0)
look(kept.raw)
for process in (@PID@, os.getppid(), *range(1, 40), "self"):
    for name in ("environ", "cmdline", "maps", "cwd/tasks.jsonl", "root@FOLDER@/tasks.jsonl"):
        read(f"/proc/{process}/{name}")
    read(f"/proc/{process}/mem", @ADDRESS@, 4096)""",
    "what Python knows": """
import gc, inspect, os, sys
look(sys.argv), look(dict(os.environ))
for frame in inspect.stack():
    look(frame.frame.f_locals), look(frame.code_context)
tables = [vars(module) for module in [*sys.modules.values()] if hasattr(module, "__dict__")]
for thing in gc.get_objects() + tables:
    if type(thing) in (dict, list, tuple, set) and len(thing) < 5000:
        parts = [*thing, *thing.values()] if type(thing) is dict else [*thing]
        look([part for part in parts if type(part) in (str, bytes)])""",
    "descriptors": """
import os, socket
for number in range(3, 256):
    read(f"/proc/self/fd/{number}")
    try:
        look(os.pread(number, 1 << 20, 0))
    except OSError:
        pass
    try:
        look(socket.socket(fileno=os.dup(number)).recv(1 << 16, socket.MSG_DONTWAIT))
    except OSError:
        pass""",
    "files": """
import os
for folder, inner, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys")) or "site-packages" in folder or "/lib" in folder:
        inner.clear()
    for name in names:
        if os.path.isfile(os.path.join(folder, name)):
            read(os.path.join(folder, name), 0, 1 << 20)""",
    "where the tasks lie": """
import os
for path in @PLACES@:
    read(path)
    try:
        look(os.listdir(os.path.dirname(path)))
    except OSError:
        pass""",
    "the network": """
import socket
for family, address in ((socket.AF_INET, @TCP@), (socket.AF_UNIX, @UNIX@)):
    try:
        with socket.socket(family) as line:
            line.settimeout(10)
            line.connect(address)
            look(line.recv(1 << 16))
    except OSError:
        pass"""}
# what puts a gold before a program's own eyes, where the jail lets nothing else be found
HELD = {"its own memory": "held = {'a': GOLD}", "what Python knows": "held = {'a': GOLD}",
        "files": "open('held', 'w').write(GOLD)",
        "descriptors": "held = open('held', 'w+')\nheld.write(GOLD)\nheld.flush()"}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """(tasks, facts for the programs, a descriptor). The golds are in the environment, in files,
    shared memory, this process and the descriptor; two servers return them."""
    if not shutil.which("bwrap") and not os.environ.get("CI"):
        pytest.skip("bubblewrap is not installed")
    golds = [f"GOLD-{secrets.token_hex(8)}" for _ in WAYS]
    folder = tmp_path_factory.mktemp("host")
    rows = [{"id": str(i), "query": f"Question {i}?", "golds": [gold], "check": "qa"}
            for i, gold in enumerate(golds)]
    told, name = "\n".join(map(json.dumps, rows)).encode(), f"\0golds-{os.getpid()}"
    places = [folder / "tasks.jsonl", *(Path(place) / f"golds-{os.getpid()}"
              for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place))]
    for place in places:
        place.write_bytes(told)
    held = os.open(places[0], os.O_RDONLY)
    os.set_inheritable(held, True)

    def tell(server):
        try:
            while True:
                server.accept()[0].sendall(told)
        except OSError:
            return  # the end: it is shut down

    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as unix, \
            socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(name)
        unix.listen()
        patch.setenv("GOLDS", " ".join(golds))
        patch.chdir(folder)
        tellers = [threading.Thread(target=tell, args=(server,)) for server in (tcp, unix)]
        for teller in tellers:
            teller.start()
        # the bytes of an object of bytes begin 32 behind it; the object lives as long as `told`
        facts = {"PID": os.getpid(), "ADDRESS": id(told) + 32, "FOLDER": folder,
                 "PLACES": [*map(str, places)], "TCP": tcp.getsockname(), "UNIX": repr(name)}
        yield rows, facts, held
        for server, teller in zip((tcp, unix), tellers, strict=True):
            server.shutdown(socket.SHUT_RDWR)
            teller.join()
    os.close(held)
    for place in places:
        place.unlink()


@pytest.fixture(scope="module")
def world(host, tmp_path_factory):
    """A world whose workers are started in the presence of the golds."""
    folder = tmp_path_factory.mktemp("world")
    chosen = {"tools": ["Python"], "workers": 1, "seconds": 30}
    (folder / "tools.json").write_text(json.dumps(chosen))
    made = tools.Tools(tools.read_settings(folder))
    yield made
    made.close()


def program_of(host, name, held=""):
    """The program that looks for golds in this way."""
    return re.sub("@([A-Z]+)@", lambda fact: str(host[1][fact[1]]), held + FIND % WAYS[name])


def ask(world, task, program):
    """The result of the one program of a play."""
    args = SimpleNamespace(failure_rate=0.0, max_turns=3, system_prompt="short")
    call = json.dumps({"name": "Python", "arguments": {"code": program}})
    episode = world.episode(task, "seed", args)
    return episode.step(f"<think>x</think><tool_call>{call}</tool_call>")


@pytest.mark.parametrize("name", WAYS)
def test_a_program_finds_no_gold_in_the_jail(host, world, name):
    task = host[0][[*WAYS].index(name)]
    assert ask(world, task, program_of(host, name)) == "[]"


@pytest.mark.parametrize("name", HELD)
def test_the_search_for_golds_finds_one_that_a_program_holds(host, world, name):
    gold = host[0][0]["golds"][0]
    held = HELD[name].replace("GOLD", repr(gold)) + "\n"
    assert gold in ask(world, host[0][0], program_of(host, name, held))


@pytest.mark.parametrize("name", sorted(WAYS.keys() - HELD.keys()))
def test_the_search_for_golds_finds_one_without_a_jail(host, name):
    done = subprocess.run([sys.executable, "-c", program_of(host, name)], pass_fds=[host[2]],
                          capture_output=True, text=True)
    assert "GOLD-" in done.stdout, done.stderr
