"""
TRL's GRPOTrainer for variants/conform.py (docs/conform.md has the table), in the environment whose
commands are in bench_trl.py:

    /tmp/trl/bin/python variants/conform.py bench/conform_trl.py:loss

A trainer of a small model takes the plays from its rollout_func, and computes advantages, masks and
loss by its own code. Only the log-probabilities are the case's: its forward is replaced. TRL takes
pi_old from the trainer, never from the engine, so pi_old is told to be the engine's, but for
recompute.
"""
import tempfile
from types import SimpleNamespace

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

CONFIG = {
    "grpo": {"loss_type": "grpo"}, "grpo-batch": {"loss_type": "dapo"},
    "dapo": {"loss_type": "dapo"}, "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"}, "kl": {"loss_type": "grpo"},
    "recompute": {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_truncate"},
    "arpo": {"loss_type": "grpo"}}
WORDS = [str(i) for i in range(10)] + ["<end>"]


def trainer_of(case, rollout):
    """A GRPOTrainer with the case's settings, whose batch is all its plays."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="0"))
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, eos_token_id=10))
    config = GRPOConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", num_generations=3,
        per_device_train_batch_size=len(case["ids"]), gradient_accumulation_steps=1,
        max_completion_length=case["length"], mask_truncated_completions=True,
        epsilon=case["clip_low"], epsilon_high=case["clip_high"] + (case["objective"] == "cispo"),
        vllm_importance_sampling_clip_max=case["cap"], **CONFIG[case["objective"]])
    return GRPOTrainer(
        model, reward_funcs=lambda reward, **_: reward, args=config, rollout_func=rollout,
        train_dataset=Dataset.from_list([{"prompt": "0"}]), processing_class=
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"))


def loss(case):
    if case["objective"] not in CONFIG:
        return None
    prompts, ends = case["mask"].argmax(1), case["real"].sum(1)

    def completions(key):
        return [row[n:end].tolist() for row, n, end in zip(case[key], prompts, ends, strict=True)]

    def rollout(_, trainer):
        rows = zip(case["ids"], prompts, strict=True)
        return {"prompt_ids": [row[:n].tolist() for row, n in rows],
                "completion_ids": completions("ids"), "logprobs": completions("engine"),
                "env_mask": completions("mask"), "reward": case["reward"].tolist()}

    def forward(model, *_, **__):  # instead of a model's
        recompute = case["objective"] == "recompute"
        chosen = "reference" if model is trainer.ref_model else "old" if recompute else "engine"
        values = logps if torch.is_grad_enabled() else torch.tensor(case[chosen])
        rows = [values[i, n:end] for i, (n, end) in enumerate(zip(prompts, ends, strict=True))]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return padded, torch.zeros_like(padded), None

    trainer = trainer_of(case, rollout)
    logps = torch.tensor(case["logps"], requires_grad=True)
    trainer._get_per_token_logps_and_entropies = forward
    if case["objective"] == "kl":  # only now, or it loads a reference by name
        trainer.beta, trainer.ref_model = case["beta"], "reference"
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([{"prompt": "0"} for _ in ends])
    found = trainer._compute_loss(trainer.model, inputs)
    return found.item(), torch.autograd.grad(found, logps)[0]
