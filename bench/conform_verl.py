"""
verl's advantages and losses for variants/conform.py (docs/conform.md has the table).

    pip install --no-deps --target /tmp/verl verl==0.9.1 tensordict pyvers orjson cloudpickle ray \\
        omegaconf hydra-core antlr4-python3-runtime==4.9.3 codetiming torchdata datasets pyarrow \\
        pandas multiprocess xxhash dill
    PYTHONPATH=/tmp/verl python variants/conform.py bench/conform_verl.py:loss

Its functions are put together as its ppo_loss does. pi_old is the engine's (bypass_mode), but for
recompute. verl leaves overlength plays to the reward, so none is taken out here.
"""
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

# advantage, whether it is divided by the std, loss, aggregation
CONFIG = {"grpo": ("grpo", True, "vanilla", "token-mean"),
          "grpo-batch": ("grpo", True, "vanilla", "token-mean"),
          "dapo": ("grpo", True, "vanilla", "token-mean"),
          "dr-grpo": ("grpo", False, "vanilla", "seq-mean-token-sum-norm"),
          "rloo": ("rloo", None, "vanilla", "token-mean"),
          "gspo": ("grpo", True, "gspo", "seq-mean-token-mean"),
          "cispo": ("grpo", True, "cispo", "token-mean"),
          "kl": ("grpo", True, "vanilla", "token-mean"),
          "recompute": ("grpo", True, "vanilla", "token-mean"),
          "arpo": ("grpo", True, "vanilla", "token-mean")}


def loss(case):
    name = case["objective"]
    if name not in CONFIG:
        return None
    kind, by_std, loss_mode, mean = CONFIG[name]
    tables = {key: torch.tensor(case[key]) for key in ("logps", "engine", "old", "reference")}
    logps, mask = tables["logps"].requires_grad_(), torch.tensor(case["mask"], dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = torch.tensor(case["reward"])
    words = {} if by_std is None else {"norm_adv_by_std_in_grpo": by_std}
    advantages, _ = core_algos.get_adv_estimator_fn(kind)(rewards, mask, case["group"], **words)
    config = ActorConfig(
        strategy="fsdp", rollout_n=3, use_dynamic_bsz=True, clip_ratio_low=case["clip_low"],
        clip_ratio_high=case["clip_high"], loss_agg_mode=mean, loss_scale_factor=case["length"])
    config.global_batch_info.update(dp_size=1, batch_num_tokens=mask.sum(),
                                    global_batch_size=len(mask), loss_scale_factor=case["length"])
    weights, old = None, tables["engine"]
    if name == "recompute":
        old = tables["old"]
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            old - tables["engine"], mask, "token", case["cap"])
    found, _ = core_algos.get_policy_loss_fn(loss_mode)(
        old_log_prob=old, log_prob=logps, advantages=advantages, response_mask=mask,
        loss_agg_mode=mean, config=config, rollout_is_weights=weights)
    if name == "kl":
        distance = core_algos.kl_penalty(logps, tables["reference"], "low_var_kl")
        found = found + case["beta"] * core_algos.agg_loss(distance, mask, mean,
                                                           **config.global_batch_info)
    return found.item(), torch.autograd.grad(found, logps)[0]
