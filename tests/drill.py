"""
Drills: kill every stage at random moments, fill its disk, spoil its files; count what was lost.

    (1) each stage runs once undisturbed, with a tiny model, for reference
    (2) then it is killed: torchrun or the program itself, a single rank or player, while it saves;
        or it gets SIGTERM; the same command runs again, is killed again, and at last ends
    (3) what is in its folder then must be what an undisturbed run leaves, byte for byte; timings
        apart; no episode or update lost or there twice, no process and no temporary file left
    (4) more drills: two commands on one folder, a disk that is full, spoilt checkpoints, logs,
        settings and indices, an endpoint that fails a third of the time

    python tests/drill.py --kills 60              all of it: an hour or more on two cores
    python tests/drill.py --kills 4 --stages data sft --no-more        what the tests run

Prints a table of the kills and one of the other drills; status 1 where anything was lost.
"""
import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PATIENCE = 600  # seconds; what takes longer hangs
TOKEN = f"drill-{uuid.uuid4()}"  # in the environment of all that is started here
TIMES = re.compile(r"seconds|time|.*_(s|tps|gib)$")  # keys of a log that no two runs share
KINDS = ("parent", "one", "saving", "term")


class Stage(NamedTuple):
    """A command that is finished when it exits with 0, and resumes when it is run again."""
    words: str  # {out}: its folder
    ranks: int = 0  # 0: it is no torchrun's


# ---------------------------------------------------------------------------------------- material

def make(folder):
    """Make a tiny model that writes digits, episodes, tasks and pairs: {name: path}."""
    from conftest import BABBLE, SFT

    from runtime import write_jsonl
    from tiny.model import make_tiny

    draw, rows, pairs = random.Random(0), [], []
    for i in range(48):
        talk = [{"role": "system", "content": "Say digits."},
                {"role": "user", "content": f"Go on, {i}."}]
        said = [{"role": "assistant", "content": " ".join(draw.choices("0123456789", k=3))}
                for _ in range(2)]
        rows.append({"messages": [*talk, said[0]]})
        pairs.append({"prompt": talk, "chosen": said[:1], "rejected": said[1:],
                      "rewards": [1.0, 0.0]})
    files = {name: folder / f"{name}.jsonl" for name in ("episodes", "pairs", "tasks", "trips")}
    write_jsonl(files["episodes"], rows)
    write_jsonl(files["pairs"], pairs)
    write_jsonl(files["tasks"], [{"id": f"b{i}", "query": f"Go on, {i}.", "turns": 1 + i % 3,
                                  "success": 0.5} for i in range(24)])
    make_tiny([files["episodes"]], folder / "model", seed=0, vocabulary=320)
    trips = f"synth.py tasks --like tiny --days 3 --n 40 --workers 1 --out {files['trips']}"
    end(start(Stage(trips), folder, folder / "trips.log"))
    files = {name: str(path) for name, path in files.items()} | {"model": str(folder / "model")}
    play = "--max-turns 3 --max-context 400 --max-tokens 16 --concurrency 8"
    learn = BABBLE.replace("\n", " ") + f" --model {files['model']} --tasks {files['tasks']}"
    learn += f" --val-every 4 --val {files['tasks']}"
    found = {
        "data": Stage("synth.py tasks --like tiny --days 3 --n 1500 --seed 5 --workers 2 "
                      "--out {out}/tasks.jsonl"),
        "sft": Stage(f"sft.py {SFT} --model {files['model']} --data {files['episodes']} "
                     "--out {out}", 2),
        "dpo": Stage(f"dpo.py {SFT} --model {files['model']} --data {files['pairs']} "
                     "--out {out}", 1),
        "grpo": Stage(f"grpo.py {learn} --out {{out}}", 1),
        "stretch": Stage(f"grpo.py {learn} --stretch 4 --out {{out}}", 1),
        "arpo": Stage(f"arpo.py {learn} --out {{out}}", 1),
        "evaluate": Stage(f"evaluate.py --model a={files['model']} --tasks {files['tasks']} --env "
                          f"tests/babble.py {play} --out {{out}}"),
        "qa_eval": Stage(f"qa_eval.py --model a={files['model']} --system-prompt short --topk 1 "
                         f"--sample 16 {play} --out {{out}}"),
    }
    return files, {name: stage for name, stage in found.items()
                   if (ROOT / stage.words.split()[0]).exists()}


# --------------------------------------------------------------------------------------- processes

def start(stage, out, log, prefix=()):
    """Start a stage's command in a process group of its own, with its output appended to `log`."""
    command = [sys.executable, *stage.words.format(out=out).split()]
    if stage.ranks:
        command[1:1] = ["-m", "torch.distributed.run", "--shutdown-timeout", "300", "--standalone",
                        "--nproc_per_node", str(stage.ranks)]
    variables = os.environ | {"DRILL": TOKEN, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                              "TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR",
                              "PYTHONPATH": str(ROOT)}
    with open(log, "a") as file:
        return subprocess.Popen([*prefix, *command], cwd=ROOT, env=variables, stdout=file,
                                stderr=subprocess.STDOUT, start_new_session=True)


def end(child):
    """The exit status of a stage, or "hangs"; processes that are left then count as orphans."""
    try:
        return child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return "hangs"


def ours():
    """The ids of all processes that the drill has started, directly or not."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"DRILL={TOKEN}".encode() in (folder / "environ").read_bytes() and \
                    int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def orphans(seconds=60):
    """The number of processes that outlive their parents; they are printed and killed."""
    until = time.time() + seconds
    while ours() and time.time() < until:
        time.sleep(0.2)
    left = ours()
    for pid in left:
        try:
            words = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
            print(f"still there: {words.decode(errors='replace')[:200]}", flush=True)
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            continue
    return len(left)


def saving(out):
    """Whether a checkpoint without its mark, or a part of a model, is being written."""
    tags = [tag for tag in out.glob("checkpoints/step-*") if not (tag / "mark.json").exists()]
    return bool(tags or [*out.parent.glob(f"{out.name}*.part")] or [*out.glob("**/.*.[0-9]*")])


def strike(child, kind, out, moment, draw):
    """Wait for the moment and kill; return whether there was a process to kill."""
    until = time.time() + moment
    while child.poll() is None and time.time() < until:
        time.sleep(0.02)
    while kind == "saving" and child.poll() is None and not saving(out):
        time.sleep(0.005)
    if child.poll() is not None:
        return False
    others = [pid for pid in ours() if pid != child.pid]
    target = draw.choice(others) if kind in ("one", "saving") and others else child.pid
    try:
        os.kill(target, signal.SIGTERM if kind == "term" else signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# --------------------------------------------------------------------------------------- comparing

def plain(row):
    """A record without its times."""
    if isinstance(row, dict):
        return {key: plain(value) for key, value in row.items() if not TIMES.fullmatch(key)}
    return [plain(value) for value in row] if isinstance(row, list) else row


def keys_of(row):
    """The keys that identify a record."""
    task = row.get("task", row)
    return str(task.get("id", ("val " if "val_success" in row else "") + str(row.get("step"))))


def contents(out):
    """({file: its unchanging content}, {file: keys of its records}, temporary files) of a folder.
    """
    found, keys, litter = {}, {}, [path.name for path in out.parent.glob(f"{out.name}*.part")]
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name.startswith(".") or path.suffix in (".part", ".tmp"):
            litter.append(name)
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            keys[name] = Counter(map(keys_of, rows)) if "rollouts" not in name else Counter()
            texts = [json.dumps(plain(row), sort_keys=True) for row in rows]
            # whoever ended first
            found[name] = sorted(texts) if path.name == "episodes.jsonl" else texts
        elif path.is_file() and not name.startswith("checkpoints"):
            text = path.read_bytes().replace(str(out).encode(), b"OUT")
            found[name] = hashlib.sha256(text).hexdigest()
    return found, keys, litter


def compare(out, reference):
    """Compare a folder with the reference: {equal, lost, doubled, litter, words}."""
    found, keys, litter = contents(out)
    whole, whole_keys, _ = contents(reference)
    unlike = [name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)]
    lost = sum((whole_keys[name] - keys.get(name, Counter())).total() for name in whole_keys)
    doubled = sum((keys[name] - whole_keys.get(name, Counter())).total() for name in keys)
    return {"equal": not unlike, "lost": lost, "doubled": doubled, "litter": len(litter),
            "words": f"unlike: {sorted(unlike)[:3]}" * bool(unlike) + f" left: {litter}" * bool(
                litter)}


# ------------------------------------------------------------------------------------------- kills

def trial(name, stage, folder, reference, seconds, kills, draw):
    """Kill a run several times, let it finish, and compare: a Counter for a line of the table."""
    out, log, counts, words = folder / "out", folder / "log.txt", Counter(), []
    folder.mkdir(parents=True)
    for _ in range(kills):
        kind = draw.choice(KINDS)
        moment = draw.uniform(0.02, 0.9) * seconds
        child = start(stage, out, log)
        hit = strike(child, kind, out, moment, draw)
        code = end(child)
        counts["tried"] += hit
        counts["orphans"] += orphans()
        words.append(f"{kind}@{moment:.0f}s={code}")
        if not hit and code == 0:
            break
    for _ in range(3):
        code = end(start(stage, out, log))
        counts["orphans"] += orphans()
        if code == 0:
            break
    verdict = compare(out, reference)
    tried = counts["tried"]
    counts["recovered"] += tried * (code == 0)
    counts["equal"] += tried * verdict["equal"]
    for key in ("lost", "doubled", "litter"):
        counts[key] += verdict[key]
    print(f"{name}: {' '.join(words)} then {code}; {verdict['words'] or 'equal'}", flush=True)
    return counts


def kill_all(stages, references, folder, args):
    """Distribute args.kills over the stages: {stage: Counter}."""
    draw, table, number = random.Random(args.seed), {name: Counter() for name in stages}, 0
    while number < 3 * args.kills:
        left = args.kills - sum(counts["tried"] for counts in table.values())
        if left <= 0:
            break
        name = [*stages][number % len(stages)]
        reference, seconds = references[name]
        table[name] += trial(name, stages[name], folder / f"{name}-{number}", reference, seconds,
                             min(left, args.per_run), draw)
        shutil.rmtree(folder / f"{name}-{number}" / "out", ignore_errors=args.keep)
        number += 1
    return table


# ------------------------------------------------------------------------------------- more drills

def last_line(log):
    """The last line of a program's output, without torchrun's own lines."""
    lines = Path(log).read_text().splitlines()
    lines = [line.strip().removeprefix("traceback : ") for line in lines if line.strip(" =-")]
    return lines[-1] if lines else ""


def finish(stage, out, log, reference):
    """Whether the same command ends well, with the results of an undisturbed run."""
    code = end(start(stage, out, log))
    verdict = compare(out, reference)
    return code == 0 and verdict["equal"] and not verdict["litter"], f"{code} {verdict['words']}"


def begun(stage, out, log, rows=5):
    """Start a run and kill it after some updates."""
    child = start(stage, out, log)
    mark = out / "checkpoints" / f"step-{rows}" / "mark.json"
    while child.poll() is None and not mark.exists():
        time.sleep(0.02)
    child.kill()
    child.wait()
    orphans()


def drill_two(stages, references, folder):
    """Run two commands on one folder: the second is refused in one line, the first is not
    disturbed."""
    stage, out = stages["sft"], folder / "out"
    one = start(stage, out, folder / "one.txt")
    while one.poll() is None and not (out / "log.jsonl").exists():
        time.sleep(0.05)
    pids = ours()
    for pid in pids:  # it waits meanwhile, so that it does not end first
        os.kill(pid, signal.SIGSTOP)
    two = end(start(stage, out, folder / "two.txt"))
    refused = two == 1 and "is writing to" in last_line(folder / "two.txt")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    one, verdict = end(one), compare(out, references["sft"][0])
    return refused and one == 0 and verdict["equal"], last_line(folder / "two.txt")


def drill_disk(stages, references, folder):
    """Fill the disk after a checkpoint: one line names it, and the run resumes once there is room.
    """
    disk, stage = folder / "disk", stages["sft"]
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)],
                             capture_output=True).returncode == 0
    try:
        limit = () if mounted else ("bash", "-c", 'ulimit -f 2000; exec "$@"', "drill")
        code, said = end(start(stage, disk / "out", folder / "log.txt", limit)), None
        said = last_line(folder / "log.txt")
        named = code == 1 and str(disk) in said and not orphans()
        litter = contents(disk / "out")[2]
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        well, words = finish(stage, disk / "out", folder / "log.txt", references["sft"][0])
        return named and well and not litter, f"{said} {litter or ''}; then {words}"
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


def flip(file):
    """Change a byte in the middle."""
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)


def drill_checkpoint(stages, references, folder):
    """Damage the newest checkpoint: the one before is used, and a line says so."""
    stage, out, log = stages["sft"], folder / "out", folder / "log.txt"
    begun(stage, out, log)
    flip(max(out.glob("checkpoints/step-5/*optim*")))
    well, words = finish(stage, out, log, references["sft"][0])
    return well and "is damaged" in log.read_text(), words


def drill_checkpoints(stages, references, folder):
    """Damage both checkpoints: a line names the folder to remove; without it the run starts again.
    """
    stage, out, log = stages["sft"], folder / "out", folder / "log.txt"
    begun(stage, out, log)
    for file in out.glob("checkpoints/step-*/*optim*"):
        os.truncate(file, 1000)
    code = end(start(stage, out, log))
    said = last_line(log)
    shutil.rmtree(out / "checkpoints")
    well, words = finish(stage, out, log, references["sft"][0])
    return code == 1 and "Remove this folder" in said and well, f"{said}; then {words}"


def drill_log(stages, references, folder):
    """Cut the end of a log: the weights are equal, and a line reports the lost lines."""
    stage, out, log = stages["sft"], folder / "out", folder / "log.txt"
    begun(stage, out, log)
    os.truncate(out / "log.jsonl", (out / "log.jsonl").stat().st_size // 3)
    code = end(start(stage, out, log))
    unlike = compare(out, references["sft"][0])["words"]
    said = "has lost lines" in log.read_text()
    return code == 0 and said and unlike == "unlike: ['log.jsonl']", unlike


def drill_settings(stages, references, folder):
    """Make settings invalid: a line names them; without that agent's folder the command continues.
    """
    stage, out = stages["evaluate"], folder / "out"
    shutil.copytree(references["evaluate"][0], out)
    (out / "a" / "settings.json").write_text('{"mod')
    code = end(start(stage, out, folder / "log.txt"))
    said = last_line(folder / "log.txt")
    shutil.rmtree(out / "a")
    well, words = finish(stage, out, folder / "log.txt", references["evaluate"][0])
    return code == 1 and "settings.json" in said and well, f"{said}; then {words}"


def drill_index(stages, references, folder):
    """Damage the index of the database: it is built again."""
    data = shutil.copytree(ROOT / "database" / "mini", folder / "mini",
                           ignore=shutil.ignore_patterns("*.index"))
    before = {*data.rglob("*")}
    stage = Stage(f"synth.py tasks --like tiny --days 3 --n 20 --workers 1 --database {data} "
                  "--out {out}/tasks.jsonl")
    codes = [end(start(stage, folder / "one", folder / "log.txt"))]
    made = [path for path in data.rglob("*") if path not in before and path.is_file()]
    for path in made:
        path.write_bytes(b"no index" * 100)
    codes.append(end(start(stage, folder / "two", folder / "log.txt")))
    equal = compare(folder / "two", folder / "one")["equal"]
    return codes == [0, 0] and equal, f"{len(made)} files damaged"


class Hostile(BaseHTTPRequestHandler):
    """An endpoint that breaks three in ten replies: by the server, the connection or the text."""
    draw = random.Random(0)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        chance, text = self.draw.random(), "<think>no</think><answer>none</answer>"
        if chance < 0.08:
            return self.send_error(self.draw.choice((429, 500, 503)))
        if chance < 0.16:  # hangs, and hangs up
            return time.sleep(self.draw.random() * 3)
        if chance < 0.20:
            text = "7" * 3_000_000
        elif chance < 0.24:
            text = ""
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        if 0.24 < chance < 0.30:
            body = body[: len(body) // 2]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """The drill says enough."""


def drill_endpoint(stages, references, folder, files):
    """Use a hostile endpoint: every task is played once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stage = Stage(f"evaluate.py --url http://127.0.0.1:{server.server_port}/v1 --model a=x --tasks "
                  f"{files['trips']} --concurrency 8 --out {{out}}")
    codes = []
    while codes[-1:] != [0] and len(codes) < 4:
        codes.append(end(start(stage, folder / "out", folder / "log.txt")))
    server.shutdown()
    played = contents(folder / "out")[1].get("a/episodes.jsonl", Counter())
    wanted = Counter(map(keys_of, map(json.loads, Path(files["trips"]).read_text().splitlines())))
    return codes[-1] == 0 and played == wanted, f"status {codes}, {played.total()} episodes"


# -------------------------------------------------------------------------------------------- main

def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--kills", type=int, default=60, help="over all stages")
    add("--per-run", type=int, default=2, help="kills of a run, before it may end")
    add("--stages", nargs="+", help="data, sft, dpo, grpo, stretch (plays wait), arpo, evaluate, "
        "qa_eval, if unset")
    add("--more", nargs="*", help="of two, disk, checkpoint, checkpoints, log, settings, index, "
        "endpoint; all if unset")
    add("--no-more", action="store_true", help="kills alone")
    add("--seed", type=int, default=0, help="of the moments and the kinds")
    add("--keep", action="store_true", help="keep the folders of the runs")
    add("--out", help="folder to work in; unset: a temporary one, removed at the end")
    return p.parse_args()


def reference_of(name, stage, folder):
    """(folder, seconds) of an undisturbed run."""
    folder.mkdir(parents=True)
    began = time.time()
    code = end(start(stage, folder / "out", folder / "log.txt"))
    if code != 0:
        sys.exit(f"{name} does not run undisturbed: {last_line(folder / 'log.txt')}")
    print(f"{name}: {time.time() - began:.0f} s undisturbed", flush=True)
    return folder / "out", time.time() - began


def main():
    args = flags()
    folder = Path(args.out or tempfile.mkdtemp(prefix="drill-"))
    folder.mkdir(parents=True, exist_ok=True)
    files, stages = make(folder)
    stages = {name: stages[name] for name in args.stages or stages}
    references = {name: reference_of(name, stage, folder / f"{name}-reference")
                  for name, stage in stages.items()}
    table = kill_all(stages, references, folder, args)
    heads = ("tried", "recovered", "equal", "lost", "doubled", "orphans", "litter")
    lines = ["".join(f"{head:>11}" for head in ("stage", *heads))]
    total = sum(table.values(), Counter())
    lines += ["".join(f"{cell:>11}" for cell in (name, *(counts[head] for head in heads)))
              for name, counts in [*table.items(), ("all", total)]]
    more = {name[6:]: drill for name, drill in globals().items() if name.startswith("drill_")}
    bad = total["tried"] - total["equal"] + sum(total[head] for head in heads[3:])
    for name in [] if args.no_more else args.more or more:
        needed = {"settings": {"evaluate"}, "index": set(), "endpoint": set()}.get(name, {"sft"})
        if needed <= stages.keys():
            (folder / name).mkdir()
            extra = (files,) if name == "endpoint" else ()
            well, words = more[name](stages, references, folder / name, *extra)
            bad += not well
            lines.append(f"{name:>11} {'held' if well else 'FAILED'}: {words[:300]}")
            print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    if not args.out:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
