"""One card is enough: --offload and --lora learn the same numbers, sync, save and resume."""
import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import SEED, SFT, train, train_broken, weights

import runtime
import sft
from runtime import read_jsonl

LORA = "--lora 4 --lr 1e-2"


def adapted(policy, template, rank=4):
    """A copy of the policy with adapters that have learnt something."""
    lm = copy.deepcopy(policy.lm)
    runtime.add_adapters(lm, template, SimpleNamespace(lora=rank, seed=SEED, model="base"))
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return sft.Policy(lm)


def merged(policy, template):
    """The adapted policy as a plain model."""
    lm = copy.deepcopy(policy.lm)
    adapted_policy = adapted(policy, template)
    state = dict(sft.full_weights(SimpleNamespace(module=adapted_policy)))
    lm.load_state_dict(state)
    return adapted_policy, sft.Policy(lm)


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(SEED)
    ids = torch.randint(300, (2, 40))
    return ids, torch.arange(40).expand(2, -1), torch.ones(2, 40, dtype=torch.bool)


def test_the_gradients_of_adapters_are_those_of_the_merged_model(policy, template, batch):
    one, other = merged(policy, template)
    for each in (one, other):
        logps, _ = each(*batch)
        (-logps * torch.linspace(0, 1, len(logps))).mean().backward()
    wanted = dict(other.lm.named_parameters())
    found = {name: layer for name, layer in one.lm.named_modules() if hasattr(layer, "lora_A")}
    assert len(found) == 7 * other.lm.config.num_hidden_layers
    for name, layer in found.items():
        grad, scale = wanted[f"{name}.weight"].grad, 32 / 4
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        for gradient, by_hand in ((a.grad, scale * b.T @ grad), (b.grad, scale * grad @ a.T)):
            assert by_hand.norm() > 0
            assert (gradient - by_hand).norm() <= 1e-5 * by_hand.norm() + 1e-7


def test_only_adapters_are_trained_and_the_head_computes_no_gradient(policy, template, batch):
    one = adapted(policy, template)
    one(*batch)[0].sum().backward()
    for name, parameter in one.lm.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name), name
    assert not any("lm_head" in name or "embed" in name for name, p in one.lm.named_parameters()
                   if p.requires_grad)


def test_before_the_first_update_adapters_change_nothing(policy, template, batch):
    lm = copy.deepcopy(policy.lm)
    runtime.add_adapters(lm, template, SimpleNamespace(lora=4, seed=SEED, model="base"))
    with torch.no_grad():
        assert torch.equal(sft.Policy(lm)(*batch)[0], policy(*batch)[0])


def test_offloaded_updates_are_those_of_adamw_up_to_rounding(tiny_model, episodes, tmp_path):
    words = SFT.replace("--steps 16", "--steps 10"), "--model", tiny_model, "--data", episodes
    for name, flag in (("card", ""), ("host", "--offload")):
        train("sft.py", tmp_path / name, *words, flag)
    one, two, start = (weights(folder) for folder in (
        tmp_path / "card", tmp_path / "host", tiny_model))
    for name in one:
        moved = (one[name] - start[name]).abs().max()
        assert moved > 1e-3 and (one[name] - two[name]).abs().max() < 2e-3 * moved, name


@pytest.fixture(scope="module")
def lora_student(tiny_model, episodes, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "sft"
    train("sft.py", out, SFT, LORA, "--model", tiny_model, "--data", episodes)
    return out


def test_out_is_a_plain_model_and_the_adapter_beside_it_makes_it_of_the_base(
        lora_student, tiny_model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    names, losses = set(weights(tiny_model)), read_jsonl(lora_student / "log.jsonl")
    whole = PeftModel.from_pretrained(base, lora_student / "adapter").merge_and_unload()
    for name, tensor in weights(lora_student).items():
        torch.testing.assert_close(whole.state_dict()[name], tensor)
    assert names == set(weights(lora_student)) and losses[-1]["loss"] < losses[0]["loss"] - 1
    assert not torch.equal(weights(lora_student)["model.layers.0.mlp.up_proj.weight"],
                           weights(tiny_model)["model.layers.0.mlp.up_proj.weight"])


def test_a_lora_run_that_was_stopped_and_killed_ends_with_the_same_weights(
        lora_student, tiny_model, episodes, tmp_path):
    train_broken("sft.py", tmp_path / "sft", SFT, LORA, "--model", tiny_model, "--data", episodes)
    for folder in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (lora_student / folder).read_bytes() == (tmp_path / "sft" / folder).read_bytes()


def test_after_every_sync_the_engine_has_the_merged_weights(babble, student, tmp_path):
    train("grpo.py", tmp_path / "rl", babble, "--steps 4 --lora 4 --lr 3e-3 --offload")
    lines = [line for line in read_jsonl(tmp_path / "rl" / "log.jsonl") if "reward" in line]
    assert len(lines) == 4 and all(line["dlogp_mean"] <= 1e-4 for line in lines)
    assert any(line["gnorm"] for line in lines)
    one, two = weights(student), weights(tmp_path / "rl")
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved == {name for name in one if "_proj" in name and "weight" in name}


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("rank", ["0", "-1", "x"])
def test_a_rank_below_one_is_refused(rank, capsys):
    from conftest import flags_of

    with pytest.raises(SystemExit):
        flags_of(sft, f"--lora {rank}")
    assert "--lora" in capsys.readouterr().err.splitlines()[-1]


def test_an_adapter_is_no_model(lora_student):
    with pytest.raises(ValueError, match="is an adapter, not a model; .*in the folder around it"):
        runtime.check_model(lora_student / "adapter")


def test_layers_packed_in_one_tensor_are_refused_by_name(template):
    from transformers import AutoModelForCausalLM, MixtralConfig

    lm = AutoModelForCausalLM.from_config(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2))
    with pytest.raises(ValueError, match="--lora cannot adapt model.layers.0.mlp.experts"):
        runtime.add_adapters(lm, template, SimpleNamespace(lora=4, seed=0, model="moe"))


def test_a_model_without_linear_layers_is_refused(template):
    with pytest.raises(ValueError, match="--lora: "):
        runtime.add_adapters(torch.nn.Sequential(torch.nn.Embedding(3, 3)), template,
                             SimpleNamespace(lora=4, seed=0, model="none"))
