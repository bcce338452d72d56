"""
GRPO's update step here and in TRL's GRPOTrainer: the same model, samples and advantages, tokens/s side by side.

An update is one batch of plays: forward, log-probabilities and entropy, loss, backward, clipping, AdamW. Ours is
learn() through the DeepSpeed engine that grpo.py makes. Theirs is GRPOTrainer.train() in TRL's own environment, from
on_step_begin to on_step_end less the time in which it takes in and scores the plays, which enter by its rollout_func.
Both run float32 on one rank without gradient checkpointing and take turns, a round each. Tokens are those of the
samples, padding not counted. The learning rate is 0, so that each round makes the same update; the first round warms
up and compares the gradients. Seconds are the clock's and, in brackets, of CPU time: other work disturbs them less.

    shipped  GRPOTrainer as it runs on a CPU: every row as long as the batch's longest prompt and longest completion
             together, the head applied to all positions
    compact  with the head applied to the completions' positions only, as it is on GPUs: the one to compare with
    vllm     compact, with the old log-probabilities that it recomputes when vLLM plays (its default)

Lengths: `played`, those of the rollouts; else a log-normal of median 500 and that log-deviation within 200..1000.
0.3 is the spread of direct plays of the 102 official queries (14K to 40K characters); 0.5 adds what stops early or
wanders.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install --no-deps torch==2.13.0+cpu \\
        --extra-index-url https://download.pytorch.org/whl/cpu
    /tmp/trl/bin/pip install trl==1.16.0 transformers==5.19.0 accelerate datasets setuptools sympy networkx jinja2
    python tests/bench_trl.py --model out/tiny/sft --rollouts out/tiny/rl/rollouts/00032.jsonl --trl /tmp/trl/bin/python
"""
import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent


def flags():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--model", default="out/tiny/sft", help="HF folder of the policy")
    add("--rollouts", default="out/tiny/rl/rollouts/00032.jsonl", help="plays of it, groups in order")
    add("--trl", help="python of an environment with TRL")
    add("--lengths", nargs="+", default=["0.3", "0.5"], help="played, or the log-deviation of a log-normal")
    add("--variants", nargs="+", default=["shipped", "compact", "vllm"], help="of TRL, see above")
    add("--plays", type=int, default=64, help="samples of an update, in groups of 8")
    add("--batch", type=int, default=4, help="TRL's per_device_train_batch_size")
    add("--pack-tokens", type=int, default=4096, help="ours, as in grpo.py")
    add("--rounds", type=int, default=5, help="timed updates of each; medians are printed")
    add("--side", metavar="FOLDER", help="(inner use) be TRL's side, with the samples in FOLDER")
    add("--threads", type=int, help="(inner use) of torch")
    return p.parse_args()


def samples_of(path, tokenizer, lengths, n):
    """The first n plays of `path`, tokenised -> [{"ids", "mask", "prompt", "query", "reward"}], `prompt` in tokens.

    A play is cut, or its turns are repeated, to the length drawn for it. Queries are groups of 8.
    """
    sys.path.insert(0, str(ROOT))
    import sft
    from evaluate import read_jsonl

    draw, samples = random.Random(0), []
    for i, row in enumerate(read_jsonl(path)[:n]):
        ids, mask = sft.render(row["messages"], tokenizer)
        prompt = mask.index(1)
        if lengths != "played":
            wanted = 0
            while not 200 <= wanted <= 1000:
                wanted = round(500 * math.exp(draw.gauss(0, float(lengths))))
            times = math.ceil(wanted / (len(ids) - prompt))
            ids, mask = ((x[:prompt] + x[prompt:] * times)[:wanted] for x in (ids, mask))
        samples.append({"ids": ids, "mask": mask, "prompt": prompt, "query": i // 8, "reward": row["reward"]})
    return samples


def clocks():
    """Seconds of the clock and of this process's CPU time."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ ours


class Ours:
    """grpo.py's update of the samples, behind update() -> seconds, CPU seconds."""

    def __init__(self, a):
        sys.path.insert(0, str(ROOT))
        import grpo

        sys.argv = f"""grpo.py --model {a.model} --no-checkpointing --pack-tokens {a.pack_tokens} --lr 0 --no-std
            --loss-norm batch""".split()
        self.grpo, self.a = grpo, grpo.flags()
        self.rank, self.world, self.device = grpo.setup()
        self.tokenizer, policy, self.packed = grpo.load(self.a, self.device)
        self.engine = grpo.zero3(policy, self.a, self.world, self.device)

    @torch.no_grad()
    def take(self, samples):
        """Samples with the log-probabilities of the model itself, as an engine reports them."""
        self.engine.optimizer.optimizer.state.clear()
        self.samples = []
        for i, s in enumerate(samples):
            flat, _ = self.engine(*self.grpo.collate([s], False, self.device))
            logps, values = [0.0] * len(s["ids"]), iter(flat.tolist())
            s["logps"] = [next(values) if m else zero for m, zero in zip(s["mask"], logps)]
            self.samples.append(self.grpo.Sample(None, s["query"], f"{i:03}", s["ids"], s["mask"], s["logps"],
                                                 stop="answer", reward=s["reward"]))

    def update(self):
        began = clocks()
        weighted = self.grpo.token_weights(self.grpo.group_advantages(self.samples, self.a), self.a)
        self.line = self.grpo.learn(self.engine, weighted, self.packed, self.rank, self.world, self.device, self.a)
        return clocks() - began

    def padding(self):
        """The share of our rows that is padding."""
        sizes = [len(s.ids) for s in self.samples]
        rows = sum(len(micro) * max(sizes[i] for i in micro)
                   for micro in self.grpo.cut(sizes, 1, self.a.pack_tokens, self.packed)[0])
        return 1 - sum(sizes) / rows

    def gradient(self):
        """{name: clipped gradient} of the only update since take(): AdamW's first moment / (1 - beta1)"""
        from deepspeed.utils import safe_get_full_optimizer_state

        return {name.removeprefix("lm."): safe_get_full_optimizer_state(p, "exp_avg") / 0.1
                for name, p in self.engine.module.named_parameters()}


# ------------------------------------------------------------------------------------------------------------- TRL


class Theirs:
    """A process of the other environment, which makes an update when told to."""

    def __init__(self, a, data):
        ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")  # setup()'s
        self.process = subprocess.Popen(
            [a.trl, __file__, "--side", data, "--model", a.model, "--plays", str(a.plays), "--batch", str(a.batch),
             "--threads", str(torch.get_num_threads())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={name: value for name, value in os.environ.items() if name not in ours})

    def update(self, variant):
        """-> seconds, CPU seconds; the clipped gradient is in FOLDER/variant."""
        print(variant, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("# seconds"):
                return torch.tensor([float(word) for word in line.split()[2:]])
        raise RuntimeError("TRL's side ended, its words are above")


def trl_side(a):
    """GRPOTrainer.train() over the samples of FOLDER/samples.json; before each update stdin names its variant."""
    from safetensors.torch import save_file
    from transformers import TrainerCallback
    import trl

    torch.set_num_threads(a.threads)
    outside = torch.zeros(2, dtype=torch.float64)  # what is not the update's

    class Timed(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            began = clocks()
            result = super()._generate_and_score_completions(inputs)
            outside.add_(clocks() - began)
            return result

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            began = clocks()
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if not torch.is_grad_enabled():  # the old log-probabilities are part of the update
                outside.sub_(clocks() - began)
            return result

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.variant = sys.stdin.readline().strip() or sys.exit()
            trl.trainer.utils._use_triton = lambda device: self.variant != "shipped"  # whether to leave positions out
            trainer.use_vllm = self.variant == "vllm"
            outside.zero_()
            self.began = clocks()

        def on_pre_optimizer_step(self, *_, model, **__):
            self.gradient = {name: p.grad for name, p in model.named_parameters()}

        def on_step_end(self, *_, **__):
            seconds = clocks() - self.began - outside
            save_file(self.gradient, f"{a.side}/{self.variant}")
            print("# seconds", *seconds.tolist(), flush=True)

    trainer = trl_trainer(Timed, Turns(), a)
    trainer.vllm_generation, trainer._last_loaded_step = SimpleNamespace(sync_weights=lambda: None), -1
    trainer.train()


def trl_trainer(kind, callback, a):
    """A GRPOTrainer whose update is ours: DAPO's loss norm, no KL term, one optimiser step per batch of plays."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    import trl

    def rollout(prompts, trainer):
        """All samples, in the order in which the sampler asks for their groups."""
        samples = json.loads((Path(a.side) / "samples.json").read_text())
        places = {q: iter([s for s in samples if str(s["query"]) == q]) for q in set(prompts)}
        batch = [next(places[q]) for q in prompts]
        rest = lambda key: [s[key][s["prompt"]:] for s in batch]
        return {"prompt_ids": [s["ids"][:s["prompt"]] for s in batch], "completion_ids": rest("ids"),
                "logprobs": rest("logps"), "env_mask": rest("mask"), "reward": [s["reward"] for s in batch]}

    config = trl.GRPOConfig(
        output_dir=f"{a.side}/trl", use_cpu=True, bf16=False, gradient_checkpointing=False, learning_rate=0.0,
        per_device_train_batch_size=a.batch, gradient_accumulation_steps=a.plays // a.batch, num_generations=8,
        max_steps=10**6, beta=0.0, loss_type="dapo", scale_rewards="none", epsilon=0.2, epsilon_high=0.28,
        max_grad_norm=1.0, weight_decay=0.0, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True)
    return kind(
        model=AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=lambda reward, **_: reward, args=config, rollout_func=rollout, callbacks=[callback],
        train_dataset=Dataset.from_list([{"prompt": str(q)} for q in range(a.plays // 8)]),
        processing_class=AutoTokenizer.from_pretrained(a.model))


# ------------------------------------------------------------------------------------------------------------ main


def compare(ours, path):
    """Cosine of two gradients, and the ratio of their norms."""
    from safetensors.torch import load_file

    theirs = load_file(path)
    assert ours.keys() == theirs.keys()
    a, b = (torch.cat([g[name].double().flatten() for name in sorted(ours)]) for g in (ours, theirs))
    return torch.dot(a, b).item() / (a.norm() * b.norm()).item(), (a.norm() / b.norm()).item()


def measure(ours, theirs, lengths, folder, a):
    """Print tokens/s of both sides over samples of these lengths, and how far their gradients agree."""
    samples = samples_of(a.rollouts, ours.tokenizer, lengths, a.plays)
    ours.take(samples)
    (Path(folder) / "samples.json").write_text(json.dumps(samples))
    sizes = [len(s["ids"]) for s in samples]
    rows = len(sizes) * (max(s["prompt"] for s in samples) + max(len(s["ids"]) - s["prompt"] for s in samples))
    print(f"lengths {lengths}: {len(sizes)} samples, {sum(sizes)} tokens, {min(sizes)} to {max(sizes)}, "
          f"{sum(sum(s['mask']) for s in samples) / sum(sizes):.0%} the policy's; {1 - sum(sizes) / rows:.0%} of TRL's "
          f"rows is padding, {ours.padding():.0%} of ours; {torch.get_num_threads()} threads", flush=True)
    seconds = {name: [] for name in ["ours", *a.variants]}
    for i in range(a.rounds + 1):
        for name in seconds:
            seconds[name].append(ours.update() if name == "ours" else theirs.update(name))
            if i == 0 and name != "ours":
                cosine, norm = compare(ours.gradient(), f"{folder}/{name}")
                print(f"  ours against {name}: cosine of the gradients {cosine:.7f}, norm {norm:.5f} x", flush=True)
    for name in seconds:
        times = torch.stack(seconds[name][1:])
        ratio = (times / torch.stack(seconds["ours"][1:])).median(0).values.tolist()
        print(f"  {name:8} {sum(sizes) / times.median(0).values[0]:6.0f} tokens/s, ours is {ratio[0]:.2f} x (CPU time "
              f"{ratio[1]:.2f} x); seconds {' '.join(f'{wall:.2f} ({cpu:.2f})' for wall, cpu in times)}", flush=True)


def main():
    a = flags()
    if a.side:
        return trl_side(a)
    ours = Ours(a)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(a, folder)
        for lengths in a.lengths:
            measure(ours, theirs, lengths, folder, a)
        theirs.process.stdin.close()
        theirs.process.wait()


if __name__ == "__main__":
    main()
