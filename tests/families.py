"""Tiny random models of many architectures, made from their configurations only."""
from types import SimpleNamespace

import torch

# sizes, under the names that architectures have for them; each takes those that it knows
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "block_ff_dim": 96, "num_hidden_layers": 4,
    "n_layer": 2, "n_layers": 2, "num_layers": 4, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "lru_width": 64,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_d_state": 16,
    "mamba_n_groups": 1, "n_groups": 1, "ssm_state_size": 16, "state_size": 16, "mamba_d_ssm": 128,
    "mamba_expand": 2, "expand": 2, "global_head_dim": 16, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "block_dim": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE = {  # what some need besides, and what some published models have
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 64, "conv_dim_out": 64},
    "falcon_h1, multiplied": {"lm_head_multiplier": 0.25},
    "granite, scaled": {"logits_scaling": 8.0},
    "minicpm3": {"head_dim": 8}, "deepseek_v3": {"head_dim": 8}}
# rules of rotary embeddings whose original context is 30 tokens
RULES = {
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0 + 4 * i for i in range(8)],
                 "short_mscale": 1.0, "long_mscale": 1.2},
    "dynamic": {"factor": 4.0}, "yarn": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}


def rotary(rule):
    """The part of a configuration that sets a rule of RULES."""
    whole = 30 if rule == "dynamic" else 512
    return {"max_position_embeddings": whole, "original_max_position_embeddings": 30,
            "rope_parameters": {"rope_type": rule, "rope_theta": 1e4, **RULES[rule],
                                "original_max_position_embeddings": 30}}


def tiny_lm(name, seed, std=0.2, **more):
    """A random model of about 200,000 parameters, without dropout. name: a model_type of
    transformers, and after a comma the variant; more: of its configuration."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[name.partition(",")[0]]
    known = kind().to_dict().keys() | getattr(kind, "attribute_map", {}).keys()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    torch.manual_seed(seed)
    config = kind(**sizes | MORE.get(name, {}) | more)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.ndim > 1 and std:
                weight.normal_(0, std)
    return lm.eval()


def samples(seed, lengths=(14, 9, 11)):
    """Samples of random tokens for training."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 300, (n,), generator=draw).tolist() for n in lengths]
    return [SimpleNamespace(ids=ids, mask=[0, 0] + [1] * (len(ids) - 2)) for ids in rows]
