"""
Compare the update step of grpo.py with that of TRL's GRPOTrainer, in tokens/s, on the same model,
samples and advantages.

An update is one batch of plays: forward pass, log-probabilities and entropy, loss, backward pass,
clipping, AdamW. Ours is learn() with grpo.py's DeepSpeed trainer. Theirs is GRPOTrainer.train() in
an environment of TRL's own, from on_step_begin to on_step_end, without the time in which it reads
and scores the plays, which its rollout_func supplies. Both use float32 on one rank without gradient
checkpointing, and take turns. Tokens do not include padding. Rewards are random, because learn()
skips a group of equal rewards, which TRL would compute. The learning rate is 0, so that all rounds
make the same update; the first round is a warm-up in which the gradients are compared. CPU seconds,
which other work disturbs less, are in brackets.

    shipped  GRPOTrainer as it runs on a CPU: each row is as long as the batch's longest prompt plus
             its longest completion, and its fused head is applied to all positions
    compact  that head is applied only to the completions, as on GPUs; compare with this variant
    vllm     compact, with the old log-probabilities recomputed, TRL's default if vLLM plays

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install --no-deps torch==2.13.0+cpu \\
        --extra-index-url https://download.pytorch.org/whl/cpu
    /tmp/trl/bin/pip install trl==1.16.0 transformers==5.19.0 accelerate datasets setuptools \\
        sympy networkx jinja2
    python bench/bench_trl.py --model out/tiny/sft --rollouts out/tiny/rl/rollouts/00032.jsonl \\
        --trl /tmp/trl/bin/python
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
GROUP = 8  # plays of a query
VARIANTS = "shipped", "compact", "vllm"  # of TRL
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29502"}  # what torchrun sets for a single rank


def flags():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--model", default="out/tiny/sft", help="HF folder of the policy")
    add("--rollouts", default="out/tiny/rl/rollouts/00032.jsonl", help="plays, groups in order")
    add("--trl", help="python of an environment with TRL")
    add("--plays", type=int, default=64, help="samples per update, in groups of 8")
    add("--rounds", type=int, default=5, help="timed updates of each side; medians are printed")
    add("--side", metavar="FOLDER", help="(internal) run TRL's side on the samples in FOLDER")
    add("--threads", type=int, help="(internal) number of torch's threads")
    return p.parse_args()


def samples_of(path, template, n):
    """The first n plays of a file in tokens: [{"ids", "mask", "prompt", "query", "reward"}], where
    "prompt" is the number of prompt tokens. Each play is cut, or its turns are repeated, to a
    log-normal length of median 500 and log-deviation 0.5 within 200 to 1000."""
    import runtime

    draw, samples = random.Random(0), []
    for i, row in enumerate(runtime.read_jsonl(path)[:n]):
        ids, mask = runtime.render(row["messages"], template)
        prompt, wanted = mask.index(1), 0
        while not 200 <= wanted <= 1000:
            wanted = round(500 * math.exp(draw.gauss(0, 0.5)))
        times = math.ceil((wanted - prompt) / (len(ids) - prompt))
        ids, mask = ((x[:prompt] + x[prompt:] * times)[:wanted] for x in (ids, mask))
        samples.append({"ids": ids, "mask": mask, "prompt": prompt, "query": i // GROUP,
                        "reward": draw.random()})
    return samples


def clocks():
    """(seconds of the clock, CPU seconds of this process)."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


# ------------------------------------------------------------------------------------------- ours


class Ours:
    """Our side: update() makes grpo.py's update -> (seconds, CPU seconds)."""

    def __init__(self, args):
        import grpo
        import runtime
        import zero3

        os.environ.update(ALONE)
        sys.argv = f"""grpo.py --model {args.model} --keep-activations 100000 --lr 0
            --loss-norm batch --pack-tokens 4096""".split()
        self.grpo, self.args = grpo, grpo.flags()
        _, _, self.device = zero3.setup()
        self.template = runtime.load_template(self.args.model)
        policy, self.packed = zero3.load(self.args, self.template, self.device)
        self.engine = zero3.shard(policy, self.args, self.device)
        self.collate = zero3.collate

    @torch.no_grad()
    def take(self, samples):
        """Set the samples, with the model's own log-probabilities in place of an engine's, and with
        TRL's simplest advantages: the reward minus the mean of its group."""
        self.engine.optimizer.optimizer.state.clear()
        self.samples = []
        for i, s in enumerate(samples):
            taken = self.grpo.Sample(None, s["query"], f"{i:03}", s["ids"], s["mask"],
                                     stop="answer", reward=s["reward"])
            flat, _ = self.engine(*self.collate([taken], False, self.device))
            values = iter(flat.tolist())
            s["logps"] = taken.logps = [next(values) if m else 0.0 for m in s["mask"]]
            self.samples.append(taken)
        for group in self.grpo.by_group(self.samples).values():
            for s in group:
                s.advantage = s.reward - sum(t.reward for t in group) / len(group)

    def update(self):
        began = clocks()
        weighted = self.grpo.token_weights(self.grpo.by_group(self.samples), self.args)
        assert len(weighted) == len(self.samples), "tokens that are counted but not trained on"
        self.grpo.learn(self.engine, weighted, self.packed, 0, 1, self.device, self.args)
        return clocks() - began

    def gradient(self):
        """{name: clipped gradient} of the only update since take(), computed from AdamW's first
        moment, which is the gradient times 1 - beta1."""
        from deepspeed.utils import safe_get_full_optimizer_state

        return {name.removeprefix("lm."): safe_get_full_optimizer_state(p, "exp_avg") / 0.1
                for name, p in self.engine.module.named_parameters()}


# -------------------------------------------------------------------------------------------- TRL


class Theirs:
    """TRL's side: a process of the other environment that makes an update on request."""

    def __init__(self, args, data):
        ours = {*ALONE, "DS_ACCELERATOR", "PYTHONPATH"}
        words = ["--side", data, "--model", args.model, "--plays", args.plays, "--threads",
                 torch.get_num_threads()]
        self.process = subprocess.Popen(
            [args.trl, __file__, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={name: v for name, v in os.environ.items() if name not in ours})

    def update(self, variant):
        """(seconds, CPU seconds) of an update; it writes the clipped gradient to FOLDER/variant."""
        print(variant, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("# seconds"):
                return torch.tensor([float(word) for word in line.split()[2:]])
        raise RuntimeError("TRL's side ended, its words are above")


def trl_side(args):
    """Run GRPOTrainer.train() on FOLDER/samples.json; stdin names the variant of each update."""
    import trl
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    torch.set_num_threads(args.threads)
    print(f"TRL {trl.__version__}", file=sys.stderr)
    outside = torch.zeros(2, dtype=torch.float64)  # seconds that do not belong to the update

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
            # whether to leave positions out
            trl.trainer.utils._use_triton = lambda device: self.variant != "shipped"
            trainer.use_vllm = self.variant == "vllm"
            outside.zero_()
            self.began = clocks()

        def on_pre_optimizer_step(self, *_, model, **__):
            self.gradient = {name: p.grad for name, p in model.named_parameters()}

        def on_step_end(self, *_, **__):
            seconds = clocks() - self.began - outside
            save_file(self.gradient, f"{args.side}/{self.variant}")
            print("# seconds", *seconds.tolist(), flush=True)

    trainer = trl_trainer(Timed, Turns(), args)
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
    trainer.train()


def trl_trainer(kind, callback, args):
    """A GRPOTrainer with the same update as ours: DAPO's loss norm, no KL term, one optimiser step
    per batch of plays."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def rollout(prompts, trainer):
        """All samples, in the order in which TRL's sampler asks for their groups."""
        samples = json.loads((Path(args.side) / "samples.json").read_text())
        places = {query: iter([s for s in samples if str(s["query"]) == query])
                  for query in set(prompts)}
        batch = [next(places[query]) for query in prompts]
        columns = {"prompt_ids": [s["ids"][: s["prompt"]] for s in batch],
                   "reward": [s["reward"] for s in batch]}
        for name, key in (("completion_ids", "ids"), ("logprobs", "logps"), ("env_mask", "mask")):
            columns[name] = [s[key][s["prompt"] :] for s in batch]
        return columns

    config = trl.GRPOConfig(
        output_dir=f"{args.side}/trl", use_cpu=True, bf16=False, gradient_checkpointing=False,
        learning_rate=0.0, per_device_train_batch_size=4,
        gradient_accumulation_steps=args.plays // 4, num_generations=GROUP,
        max_steps=10**6, beta=0.0, loss_type="dapo", scale_rewards="none", epsilon=0.2,
        epsilon_high=0.28, max_grad_norm=1.0, weight_decay=0.0, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True)
    return kind(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32,
                                                   attn_implementation="sdpa"),
        reward_funcs=lambda reward, **_: reward, args=config, rollout_func=rollout,
        callbacks=[callback], processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list([{"prompt": str(query)}
                                         for query in range(args.plays // GROUP)]))


# ------------------------------------------------------------------------------------------- main


def compare(ours, path):
    """(cosine of two gradients, ratio of their norms)."""
    from safetensors.torch import load_file

    theirs = load_file(path)
    assert ours.keys() == theirs.keys()
    a, b = (torch.cat([side[name].double().flatten() for name in sorted(ours)])
            for side in (ours, theirs))
    return torch.dot(a, b).item() / (a.norm() * b.norm()).item(), (a.norm() / b.norm()).item()


def measure(ours, theirs, folder, args):
    """Print the tokens/s of both sides, and the agreement of their gradients."""
    samples = samples_of(args.rollouts, ours.template, args.plays)
    ours.take(samples)
    (Path(folder) / "samples.json").write_text(json.dumps(samples))
    tokens = sum(len(s["ids"]) for s in samples)
    print(f"{len(samples)} samples, {tokens} tokens; {torch.get_num_threads()} threads", flush=True)
    seconds = {name: [] for name in ["ours", *VARIANTS]}
    for i in range(args.rounds + 1):
        for name in seconds:
            seconds[name].append(ours.update() if name == "ours" else theirs.update(name))
            if i == 0 and name != "ours":
                cosine, norm = compare(ours.gradient(), f"{folder}/{name}")
                print(f"  ours against {name}: cosine of the gradients {cosine:.7f}, norm "
                      f"{norm:.5f} x", flush=True)
    for name in seconds:
        times = torch.stack(seconds[name][1:])
        wall, cpu = (times / torch.stack(seconds["ours"][1:])).median(0).values.tolist()
        speed = tokens / times.median(0).values[0]
        print(f"  {name:8} {speed:6.0f} tokens/s, ours is {wall:.2f} x (CPU time {cpu:.2f} x)",
              flush=True)


def main():
    args = flags()
    if args.side:
        return trl_side(args)
    sys.path.insert(0, str(ROOT))
    ours = Ours(args)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(args, folder)
        measure(ours, theirs, folder, args)
        theirs.process.stdin.close()
        theirs.process.wait()


if __name__ == "__main__":
    main()
