"""One card: --offload and --lora learn the same numbers, sync, save and resume."""
import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import SEED, SFT, equal, train, train_broken, weights

import zero3
from runtime import read_jsonl

LORA = "--lora 4 --lr 1e-2"


def adapted(policy):
    """A copy of the policy with adapters, which change nothing yet."""
    lm = copy.deepcopy(policy.lm)
    zero3.add_adapters(lm, SimpleNamespace(lora=4, seed=SEED))
    return zero3.Policy(lm)


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(SEED)
    ids = torch.randint(300, (2, 40))
    return ids, torch.arange(40).expand(2, -1), torch.ones(2, 40, dtype=torch.bool)


def test_the_gradients_of_adapters_are_those_of_the_merged_model(policy, batch):
    # in float64: rounding of float32 alone makes 3e-6
    plain = zero3.Policy(copy.deepcopy(policy.lm).double())
    one = adapted(plain)
    with torch.no_grad():
        assert torch.equal(one(*batch)[0], plain(*batch)[0])
        for name, parameter in one.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    plain.lm.load_state_dict(dict(zero3.full_weights(SimpleNamespace(module=one))))
    for each in (one, plain):
        logps, _ = each(*batch)
        (-logps * torch.linspace(0, 1, len(logps))).mean().backward()
    wanted = dict(plain.lm.named_parameters())
    found = {name: layer for name, layer in one.lm.named_modules() if hasattr(layer, "lora_A")}
    assert len(found) == 7 * plain.lm.config.num_hidden_layers
    for name, layer in found.items():
        grad, scale = wanted[f"{name}.weight"].grad, 32 / 4
        a, b = layer.lora_A, layer.lora_B
        for gradient, by_hand in ((a.grad, scale * b.T @ grad), (b.grad, scale * grad @ a.T)):
            assert by_hand.norm() > 0
            assert (gradient - by_hand).norm() <= 1e-6 * by_hand.norm()
    for name, parameter in one.lm.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name), name


def test_merged_weights_in_bfloat16_keep_an_update_that_rounding_to_the_nearest_would_lose():
    torch.manual_seed(SEED)
    layer = torch.nn.Linear(500, 400, bias=False)
    layer.lora_A, layer.lora_B = (torch.nn.Parameter(torch.rand(size) - 0.5)
                                  for size in ((4, 500), (400, 4)))
    for dtype, kept in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        layer.to(dtype)
        weight = layer.weight.detach().clone()
        layer.lora_B.data.zero_()
        assert torch.equal(zero3.merge(layer), weight)
        layer.lora_B.data.normal_(std=2e-6)  # 1 / 20 of a step of most weights
        delta = 32 / 4 * (layer.lora_B.float() @ layer.lora_A.float()).detach()
        moved = zero3.merge(layer).float() - weight.float()
        assert (moved * delta).sum() / (delta * delta).sum() == pytest.approx(1, abs=kept)
        assert torch.equal(zero3.merge(layer), zero3.merge(layer))
    nearest = (weight.float() + delta).bfloat16().float() - weight.float()
    assert (nearest * delta).sum() / (delta * delta).sum() < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_lacks_an_update_is_found_in_any_precision(dtype, policy):
    engine = copy.deepcopy(policy.lm).to(dtype)
    llm = SimpleNamespace(apply_model=lambda look: [look(engine)])
    one = adapted(zero3.Policy(copy.deepcopy(engine)))
    trainer, layer = SimpleNamespace(module=one), one.lm.model.layers[1].mlp.down_proj

    def differ():
        with pytest.raises(RuntimeError, match="down_proj"):
            zero3.check_weights(llm, trainer)

    def sync():
        engine.load_state_dict(dict(zero3.full_weights(trainer)))
        zero3.check_weights(llm, trainer)

    sync()
    layer.lora_B.data.normal_(std=1e-4)  # 1 / 20 of a step of most weights in bfloat16
    differ()  # not synced, or the frozen weights without the adapter
    sync()
    weight = engine.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.flip(0)  # as engines that store heads in another order
    zero3.check_weights(llm, trainer)
    weight.data[3, 4] += weight.data[3, 4].abs() / 64
    differ()
    large = torch.zeros(1 << 23, dtype=dtype)
    assert zero3.checksum(large) != zero3.checksum(torch.cat([large[1:], torch.ones(1).to(large)]))
    llm.apply_model = lambda look: [look(torch.nn.Linear(4, 4))]
    with pytest.warns(UserWarning):  # it compared nothing
        zero3.check_weights(llm, trainer)


def test_an_engine_is_awake_when_its_weights_come_and_forgets_what_it_has_read_before(policy):
    calls = []
    llm = SimpleNamespace(
        wake_up=lambda tags: calls.extend(tags),
        reset_prefix_cache=lambda: not calls.append("reset"),
        apply_model=lambda renew: calls.append(renew.__name__),
        collective_rpc=lambda name, kwargs: calls.extend([name, *dict(kwargs["weights_iterator"])]))
    for device in "cuda", "cpu":
        zero3.sync_weights(llm, SimpleNamespace(module=policy), torch.device(device))
    sent = ["reload_weights", *dict(policy.lm.named_parameters())]
    assert calls == ["weights", *sent, "kv_cache", "reset", *sent, "renew_head", "reset"]


def test_an_update_is_adamws_without_decay_and_its_gradient_is_clipped_to_norm_1(
        policy, monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed, "initialize", lambda **words: [words])
    made = zero3.shard(policy, SimpleNamespace(lr=0.5, zero=3, offload=False), torch.device("cpu"))
    (group,) = made["optimizer"].param_groups
    assert isinstance(made["optimizer"], torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.9, 0.999), 0)
    assert made["config"]["gradient_clipping"] == 1


def whole(folder):
    return torch.cat([tensor.flatten() for _, tensor in sorted(weights(folder).items())])


@pytest.mark.slow
def test_offloaded_updates_are_those_of_adamw_up_to_rounding(
        tiny_model, episodes, student, tmp_path):
    words = SFT, "--model", tiny_model, "--data", episodes  # as student is trained
    train("tests/signal_at.py TERM 2 sft.py", tmp_path / "moved", *words, status=1)
    train("sft.py", tmp_path / "moved", *words, "--offload")  # all but three of its updates
    one, two, start = (whole(folder) for folder in (student, tmp_path / "moved", tiny_model))
    # where a gradient is 0 but for rounding (biases of keys), AdamW makes the rounding visible
    assert (one - two).norm() < 1e-3 * (one - start).norm() > 0
    one, two = ([line["loss"] for line in read_jsonl(folder / "log.jsonl")]
                for folder in (student, tmp_path / "moved"))
    assert len(one) == 16 and two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_a_lora_run_writes_a_plain_model_also_if_it_was_stopped(
        tiny_model, episodes, tmp_path):
    words = SFT, LORA, "--steps 8", "--model", tiny_model, "--data", episodes
    train("sft.py", tmp_path / "one", *words)
    train_broken("sft.py", tmp_path / "two", *words, signals=["TERM"])
    assert equal(tmp_path / "one", tmp_path / "two")
    losses = [line["loss"] for line in read_jsonl(tmp_path / "one" / "log.jsonl")]
    base, after = weights(tiny_model), weights(tmp_path / "one")
    assert base.keys() == after.keys() and losses[-1] < losses[0] - 1
    moved = {name for name in base if not torch.equal(base[name], after[name])}
    assert moved == {name for name in base if "_proj.weight" in name}
    size = (tmp_path / "one" / "model.safetensors").stat().st_size
    assert all(file.stat().st_size < size / 4 for file in tmp_path.rglob("checkpoints/*/*.pt"))


@pytest.mark.slow
def test_after_every_sync_the_engine_has_the_merged_weights(babble, tmp_path):
    train("grpo.py", tmp_path / "rl", babble,
          "--steps 4 --lora 4 --lr 3e-3 --offload --keep-activations 100000")
    lines = [line for line in read_jsonl(tmp_path / "rl" / "log.jsonl") if "reward" in line]
    assert len(lines) == 4 and all(line["dlogp_mean"] <= 1e-4 for line in lines)
    assert any(line["gnorm"] for line in lines)
