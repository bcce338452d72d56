"""The memory plan agrees with real models without storage, and with its page."""
import os
import re
import subprocess
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import zero3
from look import memory
from zero3 import add_adapters


def config_of(size):
    from transformers import Qwen2Config

    shape = dict(zip(memory.NAMES, memory.SHAPES[size], strict=True))
    return Qwen2Config(**shape, max_position_embeddings=1 << 18)


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Tracks the most bytes that tensors have used at once."""

    def __init__(self, parameters):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in parameters}
        self.now = self.peak = 0

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out


def blockwise(module, q, k, v, *_, **__):
    """An attention that makes no T x T matrix."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out.transpose(1, 2), None


def peak_of(size, tokens, keep, rank):
    """The most bytes of a forward and backward in bfloat16, on the device "meta", whose tensors
    have no storage. keep: the activations; rank: of adapters"""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("blockwise", blockwise)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16,
                                              attn_implementation="blockwise")
        ids = torch.zeros(1, tokens, dtype=torch.long)
        if rank:
            add_adapters(lm, SimpleNamespace(lora=rank, seed=0, model=""))
    lm.to(torch.bfloat16)  # as ZeRO-3 makes adapters
    (lm.train(), keep or lm.gradient_checkpointing_enable())
    trained = [p for p in lm.parameters() if p.requires_grad]
    for p in trained:
        # ZeRO-3 takes a gradient away as soon as it is there
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    policy, mask = zero3.Policy(lm), {"full_attention": None}
    with Peak(lm.parameters()) as peak:
        out = lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        out = policy.head(out[0, :-1], ids[0, 1:], 1.0)[0]  # nobody holds the hidden states now
        out.sum().backward()
    return peak.peak


@pytest.mark.slow
@pytest.mark.parametrize("size, tokens, keep, moment, rank", [
    ("1.5b", 4096, False, "logits", 0), ("7b", 30000, True, "logits", 32),
    ("7b", 30000, False, "layer", 32)])
def test_planned_activations_are_those_of_the_real_model(size, tokens, keep, moment, rank):
    args = memory.flags(["grpo", "--keep-activations", str(keep * tokens)])
    args.lora = rank
    rows = memory.training(memory.Shape(config_of(size), 0, rank), args, tokens)
    deepspeeds = re.compile("shard|bucket|gathered|CUDA")
    planned = {moment: sum(n for row, n, where in rows if moment in where
                           and not deepspeeds.search(row)) for moment in ("logits", "layer")}
    assert rank or max(planned, key=planned.get) == moment
    assert max(planned.values()) == pytest.approx(peak_of(size, tokens, keep, rank),
                                                  rel=0.1 if rank else 0.01)


def plan(words):
    """{moment: GiB of each GPU} for a 7B model."""
    args = memory.flags(words.split())
    found = memory.by_moment(memory.load_shape(args.model), args)[0]
    return {moment: memory.total(rows) for moment, rows in found.items()}


@pytest.mark.parametrize("words, moment, changed", [
    ("grpo --gpus 2", "play", "grpo --gpus 4"),
    ("arpo --gpu-memory 0.9", "play", "arpo --gpu-memory 0.7"),
    ("grpo --pack-tokens 150000", "layer", "grpo --pack-tokens 9000"),
    ("sft --keep-activations 20480", "logits", "sft")])
def test_a_plan_that_does_not_fit_names_the_fullest_moment(words, moment, changed):
    found = plan(words)
    assert found[moment] == max(found.values()) > max(80, plan(changed)[moment])
    with pytest.raises(SystemExit, match=f"'{moment}'"):
        memory.main(words.split())


def test_a_moment_is_planned_for_the_micro_batch_that_needs_most():
    largest, kept, alone = (plan(f"grpo --gpus 16 {words}") for words in (
        "", "--keep-activations 9216",
        "--context 9216 --pack-tokens 9216 --keep-activations 9216"))
    assert kept["logits"] == pytest.approx(alone["logits"], abs=0.06)
    assert kept["logits"] > largest["logits"]
    assert kept["play"] == largest["play"]


def test_zero_2_holds_all_weights_and_two_buckets_and_gradients_while_it_learns_only():
    two, three = (memory.by_moment(memory.load_shape("Qwen/Qwen2.5-3B-Instruct"), memory.flags(
        ["grpo", "--gpus", "8", "--zero", zero]))[0] for zero in "23")
    n, more = 3085938688, {moment: memory.total(two[moment]) * 2**30 - memory.total(rows) * 2**30
                           for moment, rows in three.items()}
    weights = 2 * n - 2 * n / 8
    assert more["play"] == pytest.approx(weights - 4 * n / 8 - 1e9)  # no gradients, no bucket
    assert more["layer"] == pytest.approx(weights + 1e9 - 2e9)  # another bucket, nothing gathered
    with pytest.raises(SystemExit):
        memory.flags(["sft", "--zero", "2", "--offload"])


@pytest.mark.parametrize("words, enough, lacking, needed", [  # 7B on 8 GPUs: weights 14.2 GiB,
    ({"gpu_memory": 0.6}, 63, 60, 60.8),  # master weights and moments 10.6, and an engine's 0.6
    ({}, 29, 28, 28.4), ({"lora": 32}, 15, 14, 14.2)])  # or gradients 3.5; none of them with LoRA
def test_zero_2_is_refused_before_loading_what_surely_does_not_fit(words, enough, lacking, needed):
    args = SimpleNamespace(**{"lora": 0, "offload": False} | words)
    zero3.check_room(7_615_616_512, enough * 2**30, 8, args)
    with pytest.raises(zero3.Mistake, match=f"takes {needed} GiB .* {lacking}.0 .*--zero 3"):
        zero3.check_room(7_615_616_512, lacking * 2**30, 8, args)


def test_the_table_of_the_page_is_what_the_command_prints_for_run_shs_own_settings():
    page = (ROOT / "docs" / "gpus.md").read_text()
    assert "\n".join(memory.cards()) in page
    for size, (context, share, keep, zero) in memory.RECIPES.items():
        words = subprocess.run(["bash", "run.sh", size], cwd=ROOT, capture_output=True, text=True,
                               env=os.environ | {"DRY": "1"}).stdout
        for flag, setting in (("context", context), ("gpu-memory", share),
                              ("keep-activations", keep), ("zero", zero)):
            assert f" --{flag} {setting} " in words, size
