"""No program that the jail runs comes upon an answer, in a hundred plays that look for theirs."""
import json
import os
import secrets
import shutil
import socket
from types import SimpleNamespace

import pytest
from conftest import ROOT

from toolstar import tools

# each program says what it found of any gold, in one way of looking. None spells a gold out
FIND = """
import re
GOLD = re.compile(rb"GO" rb"LD-[0-9a-f]{16}")
found = set()
def look(data):
    found.update(GOLD.findall(data if isinstance(data, bytes) else repr(data).encode()))
def read(path, most=4 << 20):
    try:
        with open(path, "rb") as file:
            look(file.read(most))
    except OSError:
        pass
%s
print(sorted(found)[:4])
"""
WAYS = {
    "its own memory": """
import ctypes, os
libc, (out, into) = ctypes.CDLL(None), os.pipe()
for thing in (look, found, GOLD, os.environ, ctypes):  # the heap around them, page by page
    for page in range(id(thing) // 4096 - 1500, id(thing) // 4096 + 1500):
        # write tells a page that is none by an error, where reading it would end the process
        if libc.write(into, ctypes.c_void_p(page * 4096), 4096) == 4096:
            look(os.read(out, 4096))""",
    "processes": """
import os
for process in range(1, 3000):
    for name in ("environ", "cmdline", "maps", "mem", "cwd/tasks.jsonl", "root/tasks.jsonl"):
        read(f"/proc/{process}/{name}")
    try:
        look(os.pidfd_open(process))
    except OSError:
        pass""",
    "what Python knows": """
import gc, inspect, os, sys
look(sys.argv), look(dict(os.environ))
for frame in inspect.stack():
    look(frame.frame.f_locals), look(frame.code_context)
for thing in gc.get_objects():
    if type(thing) in (dict, list, tuple, set) and len(thing) < 500:
        try:
            look([part for part in thing if type(part) in (str, bytes)])
            if type(thing) is dict:
                look([part for part in thing.values() if type(part) in (str, bytes)])
        except RuntimeError:
            pass""",
    "descriptors": """
import os, socket
for number in range(3, 256):
    read(f"/proc/self/fd/{number}")
    try:
        os.set_blocking(number, False)
        look(os.pread(number, 1 << 20, 0))
    except OSError:
        pass
    try:
        look(socket.socket(fileno=os.dup(number)).recv(1 << 20, socket.MSG_PEEK))
    except OSError:
        pass""",
    "files": """
import os
for folder, inner, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys")) or "site-packages" in folder or "/lib" in folder:
        inner.clear()
    for name in names:
        if os.path.isfile(os.path.join(folder, name)):
            read(os.path.join(folder, name), 1 << 20)""",
    "where the tasks lie": """
import os
for path in %r:
    read(path)
    try:
        look(os.listdir(os.path.dirname(path)))
    except OSError:
        pass""",
    "the network": """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", %r)), (socket.AF_UNIX, "\\0golds")):
    try:
        with socket.socket(family) as line:
            line.settimeout(1)
            line.connect(address)
            look(line.recv(1 << 16))
    except OSError:
        pass"""}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A world of a hundred tasks, each with a secret for its gold, on a jail that has started with
    all of them in its environment, its folder and its parent's memory."""
    if not shutil.which("bwrap") and not os.environ.get("CI"):
        pytest.skip("bubblewrap is not installed")
    golds = [f"GOLD-{secrets.token_hex(8)}" for _ in range(100)]
    rows = [{"id": str(i), "query": f"Question {i}?", "golds": [gold], "check": "qa"}
            for i, gold in enumerate(golds)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tools.json").write_text('{"tools": ["Python"], "workers": 2, "seconds": 20}')
    monkeypatch.setenv("GOLDS", " ".join(golds))
    monkeypatch.chdir(tmp_path)
    world = tools.Tools(tools.read_settings(tmp_path))
    yield world, rows, [str(tmp_path / "tasks.jsonl"), str(ROOT / "database/tools/tools.json")]
    world.close()


def ask(world, task, program):
    """What the world answers to a play's one program."""
    args = SimpleNamespace(failure_rate=0.0, max_turns=3, system_prompt="short")
    episode = world.episode(task, "seed", args)
    call = json.dumps({"name": "Python", "arguments": {"code": program}})
    return episode.step(f"<think>x</think><tool_call>{call}</tool_call>")


def test_a_hundred_plays_look_for_their_gold_in_every_way_and_find_none(world):
    world, rows, paths = world
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0golds")
        unix.listen()
        holes = {"where the tasks lie": (paths,), "the network": server.getsockname()[1]}
        ways = [way % holes[name] if name in holes else way for name, way in WAYS.items()]
        for i, task in enumerate(rows):
            said = ask(world, task, FIND % ways[i % len(ways)])
            assert said == "[]", said


@pytest.mark.parametrize("name", ["its own memory", "what Python knows"])
def test_a_gold_that_a_program_holds_is_found_so_that_looking_is_no_empty_gesture(world, name):
    world, rows, _ = world
    gold = rows[0]["golds"][0]
    held = f"held = {{'a': {gold!r}}}\n" + FIND % WAYS[name]
    assert gold in ask(world, rows[0], held)
