"""One card: --offload and --lora learn the same numbers, sync, save and resume."""
import copy
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SEED, flags_of, train, train_broken, weights
from peft import LoraConfig, inject_adapter_in_model

import runtime
import sft
from runtime import Mistake, read_jsonl

LORA = "--lora 4 --lr 1e-2"
SFT = "--batch 4 --steps 8 --lr 1e-3 --save-every 1 --resume --pack-tokens 400"


def adapted(policy, template, rank=4):
    """A copy of the policy with trained adapters."""
    lm = copy.deepcopy(policy.lm)
    runtime.add_adapters(lm, template, SimpleNamespace(lora=rank, seed=SEED, model="base"))
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return sft.Policy(lm)


def merged(policy, template):
    """The adapted policy as a model without adapters."""
    lm = copy.deepcopy(policy.lm)
    adapted_policy = adapted(policy, template)
    state = dict(runtime.full_weights(SimpleNamespace(module=adapted_policy)))
    lm.load_state_dict(state)
    return adapted_policy, sft.Policy(lm)


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(SEED)
    ids = torch.randint(300, (2, 40))
    return ids, torch.arange(40).expand(2, -1), torch.ones(2, 40, dtype=torch.bool)


def test_the_gradients_of_adapters_are_those_of_the_merged_model(policy, template, batch):
    # in float64: rounding of float32 alone makes 3e-6
    one, other = merged(sft.Policy(copy.deepcopy(policy.lm).double()), template)
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
            assert (gradient - by_hand).norm() <= 1e-6 * by_hand.norm()


def test_only_adapters_are_trained_and_the_head_computes_no_gradient(policy, template, batch):
    one = adapted(policy, template)
    one(*batch)[0].sum().backward()
    for name, parameter in one.lm.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name), name
    assert not any("lm_head" in name or "embed" in name for name, p in one.lm.named_parameters()
                   if p.requires_grad)


def test_merged_weights_in_bfloat16_keep_an_update_that_rounding_to_the_nearest_would_lose():
    torch.manual_seed(SEED)
    lm = torch.nn.ModuleDict({"layer": torch.nn.Linear(500, 400, bias=False)})
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["layer"]), lm)
    layer = lm["layer"]
    for dtype, kept in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        layer.to(dtype)
        weight = layer.weight.detach().clone()
        layer.lora_B["default"].weight.data.zero_()
        assert torch.equal(runtime.merge(layer), weight)
        layer.lora_B["default"].weight.data.normal_(std=1e-4)  # 1 / 20 of a step of most weights
        delta = layer.get_delta_weight("default").detach().float()
        moved = runtime.merge(layer).float() - weight.float()
        assert (moved * delta).sum() / (delta * delta).sum() == pytest.approx(1, abs=kept)
        assert torch.equal(runtime.merge(layer), runtime.merge(layer))
    nearest = (weight.float() + delta).bfloat16().float() - weight.float()
    assert (nearest * delta).sum() / (delta * delta).sum() < 0.5


def test_before_the_first_update_adapters_change_nothing(policy, template, batch):
    lm = copy.deepcopy(policy.lm)
    runtime.add_adapters(lm, template, SimpleNamespace(lora=4, seed=SEED, model="base"))
    with torch.no_grad():
        assert torch.equal(sft.Policy(lm)(*batch)[0], policy(*batch)[0])


def whole(folder):
    return torch.cat([tensor.flatten() for _, tensor in sorted(weights(folder).items())])


@pytest.mark.slow
def test_offloaded_updates_are_those_of_adamw_up_to_rounding(tiny_model, episodes, tmp_path):
    words = SFT.replace("--steps 8", "--steps 10"), "--model", tiny_model, "--data", episodes
    for name, flag in (("card", ""), ("host", "--offload")):
        train("sft.py", tmp_path / name, *words, flag)
    one, two, start = (whole(folder) for folder in (
        tmp_path / "card", tmp_path / "host", tiny_model))
    # where a gradient is 0 but for rounding (biases of keys), AdamW makes the rounding visible
    assert (one - two).norm() < 1e-3 * (one - start).norm() > 0
    one, two = ([line["loss"] for line in read_jsonl(tmp_path / name / "log.jsonl")]
                for name in ("card", "host"))
    assert len(one) == 10 and two == pytest.approx(one, rel=1e-5)


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


@pytest.mark.slow
def test_a_lora_run_that_was_stopped_and_killed_ends_with_the_same_weights(
        lora_student, tiny_model, episodes, tmp_path):
    train_broken("sft.py", tmp_path / "sft", SFT, LORA, "--model", tiny_model, "--data", episodes)
    for folder in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (lora_student / folder).read_bytes() == (tmp_path / "sft" / folder).read_bytes()
    whole = (lora_student / "model.safetensors").stat().st_size
    assert all(file.stat().st_size < whole / 4 for file in tmp_path.rglob("checkpoints/*/*.pt"))


@pytest.mark.slow
def test_after_every_sync_the_engine_has_the_merged_weights(babble, student, tmp_path):
    train("grpo.py", tmp_path / "rl", babble,
          "--steps 4 --lora 4 --lr 3e-3 --offload --keep-activations 100000")
    lines = [line for line in read_jsonl(tmp_path / "rl" / "log.jsonl") if "reward" in line]
    assert len(lines) == 4 and all(line["dlogp_mean"] <= 1e-4 for line in lines)
    assert any(line["gnorm"] for line in lines)
    one, two = weights(student), weights(tmp_path / "rl")
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved == {name for name in one if "_proj" in name and "weight" in name}


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("rank", ["0", "-1", "x"])
def test_a_rank_below_one_is_refused(rank, capsys):
    with pytest.raises(SystemExit):
        flags_of(sft, f"--lora {rank}")
    assert "--lora" in capsys.readouterr().err.splitlines()[-1]


def test_layers_packed_in_one_tensor_are_refused_by_name(template):
    from transformers import AutoModelForCausalLM, MixtralConfig

    lm = AutoModelForCausalLM.from_config(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2))
    with pytest.raises(Mistake, match="--lora cannot adapt model.layers.0.mlp.experts"):
        runtime.add_adapters(lm, template, SimpleNamespace(lora=4, seed=0, model="moe"))


def test_a_model_without_linear_layers_is_refused(template):
    with pytest.raises(Mistake, match="--lora: "):
        runtime.add_adapters(torch.nn.Sequential(torch.nn.Embedding(3, 3)), template,
                             SimpleNamespace(lora=4, seed=0, model="none"))


# -------------------------------------------------------------------------------------- tracking


class Board:
    """A stand-in for the package wandb that keeps what it is given."""

    class Error(Exception):
        pass

    def __init__(self, key, reachable=True):
        self.key, self.reachable = key, reachable
        self.runs, self.rows = [], []

    def login(self, prompt):
        return bool(self.key)

    def init(self, **settings):
        if settings["mode"] != "offline" and not self.reachable:
            raise self.Error("the server\ndoes not answer")
        self.runs.append(settings)
        return SimpleNamespace(log=lambda numbers, step: self.rows.append((step, numbers)))


@pytest.fixture
def board(monkeypatch):
    """board(key, reachable) -> a Board in the place of wandb"""
    def board(*about):
        made = Board(*about)
        monkeypatch.setitem(sys.modules, "wandb", made)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec",
                            lambda name: SimpleNamespace(origin=name))
        runtime.open_tracker.cache_clear()
        return made
    yield board
    runtime.open_tracker.cache_clear()


def test_numbers_of_the_log_are_tracked_and_a_resumed_run_keeps_its_id(board, tmp_path, capsys):
    ids = []
    for step in (1, 2):  # two processes
        made = board("key")
        args = flags_of(sft, f"--track wandb --out {tmp_path}")
        for loss in (0.25, 0.5):
            runtime.write_log({"step": step, "loss": loss, "kind": "sum", "later": []}, args)
        assert made.rows == [(step, {"loss": loss}) for loss in (0.25, 0.5)]
        (run,) = made.runs
        assert run["mode"] is None and run["resume"] == "allow" and run["config"]["lr"] == 5e-6
        ids.append(run["id"])
    assert ids[0] == ids[1] == (tmp_path / "track.txt").read_text() and not capsys.readouterr().out
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 4


@pytest.mark.parametrize("key, reachable, why", [
    (None, True, "it has no API key"), ("key", False, "the server does not answer")])
def test_without_a_key_or_a_server_a_run_is_kept_offline_in_one_line(
        key, reachable, why, board, tmp_path, capsys):
    made = board(key, reachable)
    runtime.write_log({"step": 1, "loss": 1.0}, flags_of(sft, f"--track wandb --out {tmp_path}"))
    (line,) = capsys.readouterr().out.splitlines()
    assert why in line and "wandb sync" in line and str(tmp_path) in line
    assert [run["mode"] for run in made.runs] == ["offline"] and len(made.rows) == 1


def test_a_tracker_that_fails_costs_a_line_and_not_the_run(board, tmp_path, capsys):
    made, args = board("key"), flags_of(sft, f"--track wandb --out {tmp_path}")
    made.login = None  # a TypeError, not one of the package's own errors
    runtime.write_log({"step": 1, "loss": 1.0}, args)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("--track wandb: ") and "only in log.jsonl" in line
    del made.login
    runtime.write_log({"step": 2, "loss": 0.5}, args)
    assert made.rows == [(2, {"loss": 0.5})] and len(read_jsonl(tmp_path / "log.jsonl")) == 2


@pytest.mark.parametrize("tool, why", [
    ("excel", "'excel' is not wandb, tensorboard or trackio"),
    ("trackio", "trackio is not installed: pip install trackio"),
    ("wandb", "wandb is not installed: pip install wandb")])
def test_a_tool_that_cannot_track_is_refused_before_anything_starts(
        tool, why, monkeypatch, capsys):
    folder = SimpleNamespace(origin=None)  # Python imports any folder as a package
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "wandb" and folder)
    with pytest.raises(SystemExit):
        flags_of(sft, f"--track {tool}")
    assert why in capsys.readouterr().err.splitlines()[-1]
