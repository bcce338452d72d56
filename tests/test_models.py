"""Every architecture trains right, or is refused with the reason before anything is spent.

docs/models.md holds the table that these tests measure.
"""
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SEED, Plain, flags_of
from families import rotary, samples, tiny_lm
from test_runtime_template import CHATML, tokenizer_of

import sft
import zero3
from runtime import Mistake, Template, load_template

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \| `([^`]+)` \| (packed|padded|refused[^|]*?) \|$", PAGE, re.M)
TABLE = {name: outcome for _, name, outcome in ROWS}
TRAINED = [name for name in TABLE if not TABLE[name].startswith("refused")]
QUICK = ("qwen2", "qwen3", "gemma3_text", "gpt2", "glm4_moe", "qwen3_5_text", "lfm2")
LORA = [*TRAINED, "granitemoe", "qwen3_5_moe_text", "kimi_linear", "deepseek_v3", "ernie4_5_moe"]
QUICK_LORA = ("gpt2", "mamba", "glm4_moe", "gpt_oss")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain():
    """A template with the tiny models' tokens, of a base model: its own end token ends no turn."""
    return Template(tokenizer_of(CHATML, eos="<|endoftext|>"), "tiny")


def logps_of(lm, sample):
    """The model's own log-probabilities of a sample's replies, each from all logits."""
    ids = torch.tensor([sample.ids])
    with torch.no_grad():
        whole = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[:, :-1], -1)
    found = whole.gather(-1, ids[:, 1:, None]).flatten()
    return found[torch.tensor(sample.mask[1:]).bool()]


def checked(lm, template, longest=400):
    """-> Policy, whether it packs: what a GPU with flash attention would decide, in float32"""
    return zero3.check_forwards(lm, template, True, longest)


def load(folder, template, words=""):
    """The Policy that a stage trains."""
    args = flags_of(sft, f"--model {folder} {words}")
    return zero3.load(args, template, CPU)[0]


def save(policy, template, out):
    zero3.save_model(SimpleNamespace(module=policy), template, out)


# --------------------------------------------------------------------------------- architectures

def test_the_table_is_long():
    assert len(TABLE) == len(ROWS) >= 50, len(TABLE)
    assert {"packed", "padded"} < set(TABLE.values())


def some_quick(names, quick):
    """The names as parameters; those that are not in `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def trained_and_saved(policy, batch, template, folder, rounding):
    """Whether a saved model has all that training may have changed, its buffers too."""
    for name, buffer in policy.lm.named_buffers():
        if name in policy.lm.state_dict() and buffer.is_floating_point():
            buffer.mul_(1.5)
    save(policy, template, folder)
    return (load(folder, template)(*batch)[0] - policy(*batch)[0]).abs().max() <= rounding


@pytest.mark.parametrize("name", [name for name in TABLE if name not in TRAINED])
def test_an_architecture_that_would_be_trained_wrong_is_refused(name, plain):
    for std in (0, 0.2):  # as it is initialised, and with larger weights
        with pytest.raises(Mistake, match="logits|no head"):
            checked(tiny_lm(name, SEED, std), plain)


@pytest.mark.parametrize("name", some_quick(TRAINED, QUICK))
def test_an_architecture_trains_right(name, plain, one_rank, tmp_path):
    lm, rows = tiny_lm(name, SEED), samples(SEED)
    lm.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")  # of an image model
    own = torch.cat([logps_of(lm, row) for row in rows])
    _, packed = checked(lm, plain)
    assert packed == (TABLE[name] == "packed"), packed
    policy = load(tmp_path / "model", plain)
    batches = {packed: zero3.collate(rows, packed, "cpu") for packed in {False, packed}}
    # float32 rounding: 3e-5 in MiniMax's experts, where the batch decides the order of sums
    assert all((policy(*batch)[0] - own).abs().max() <= 5e-5 for batch in batches.values())
    wanted, found = (gradient(each, [batches[False]]) for each in (zero3.Policy(lm), policy))
    assert (found - wanted).norm() <= 1e-6 * wanted.norm(), "with the model's own norms"
    policy.zero_grad()
    before = [weight.detach().clone() for weight in policy.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    (-policy(*batches[packed])[0].mean()).backward()
    optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2
    assert trained_and_saved(policy, batches[False], plain, tmp_path / "out", 1e-4)
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"


@pytest.mark.parametrize("name", some_quick(LORA, QUICK_LORA))
def test_adapters_are_saved_as_they_are_trained_or_refused(name, plain, one_rank, tmp_path):
    tiny_lm(name, SEED).save_pretrained(tmp_path / "model")
    if name in ("gpt2", "falcon"):
        with pytest.raises(Mistake, match="--lora"):
            load(tmp_path / "model", plain, "--lora 4")
        return
    policy, batch = (load(tmp_path / "model", plain, "--lora 4"),
                     zero3.collate(samples(SEED), False, "cpu"))
    before = policy(*batch)[0].detach()
    with torch.no_grad():
        for weight, parameter in policy.named_parameters():
            if "lora_B" in weight:
                parameter.normal_(0, 0.05)
    after = policy(*batch)[0]
    after.sum().backward()
    trained = {weight for weight, parameter in policy.named_parameters()
               if parameter.grad is not None}
    assert trained == {weight for weight, _ in policy.named_parameters() if ".lora_" in weight}
    assert (after - before).abs().max() > 0.1
    # log-probabilities are about 10
    assert trained_and_saved(policy, batch, plain, tmp_path / "out", 3e-4)


def gradient(policy, batches):
    engine = Plain(policy)
    for batch in batches:
        engine.backward(-engine(*batch)[0].sum())
    return engine.gradient()


def test_norms_of_llamas_kind_are_pytorchs_and_those_that_add_1_to_the_weight_stay(plain, tmp_path):
    for name, changed in ("qwen2", 9), ("gemma3_text", 0):
        tiny_lm(name, SEED).save_pretrained(tmp_path / name)
        norms = load(tmp_path / name, plain).lm.model.modules()
        assert sum("forward" in vars(norm) for norm in norms) == changed


@pytest.mark.parametrize("rule, names", [
    ("longrope", ["phi3", "phimoe", "llama"]), ("dynamic", ["llama", "qwen2", "mistral"]),
    ("yarn", ["llama", "qwen2", "qwen3"]), ("llama3", ["llama", "smollm3", "olmo2"])])
def test_rotary_embeddings_that_depend_on_the_longest_row_are_refused_beyond_their_context(
        rule, names, plain):
    for name in names:
        refused = rule in ("longrope", "dynamic")
        if refused:
            with pytest.raises(Mistake, match="at most 30, "):
                checked(tiny_lm(name, SEED, **rotary(rule)), plain, 31)
        longest = 30 if refused else 60
        policy, packed = checked(tiny_lm(name, SEED, **rotary(rule)), plain, longest)
        rows = samples(SEED, (longest, 9, 17))
        alone = gradient(policy, [zero3.collate([row], False, "cpu") for row in rows])
        assert packed, name
        for packs in (False, True):
            together = gradient(policy, [zero3.collate(rows, packs, "cpu")])
            assert (together - alone).norm() <= 1e-5 * alone.norm(), (name, packs)


def test_logits_that_only_large_ones_show_to_be_capped_are_refused(plain):
    lm = tiny_lm("gemma2", SEED, 0.02, final_logit_softcapping=None)
    assert checked(lm, plain)[1]
    lm = tiny_lm("gemma2", SEED, 0.02, final_logit_softcapping=300.0)
    with torch.no_grad():
        assert lm(input_ids=torch.tensor([[3, 4, 5]])).logits.abs().max() < 3
    with pytest.raises(Mistake, match="capped"):
        checked(lm, plain)


def test_dropout_is_off_and_the_row_of_the_padding_token_gets_a_gradient(plain, tmp_path):
    for name in ("gpt2", "seed_oss", "opt"):
        lm = tiny_lm(name, SEED)
        assert any("drop" in key and value for key, value in vars(lm.config).items()), name
        lm.save_pretrained(tmp_path / name)
        policy = load(tmp_path / name, plain)
        rows = [SimpleNamespace(ids=[5, 0, 7, 8], mask=[0, 0, 1, 1])]
        one, two = (policy(*zero3.collate(rows, False, "cpu"))[0] for _ in range(2))
        assert torch.equal(one, two), name
        one.sum().backward()
        assert policy.lm.get_input_embeddings().weight.grad[0].abs().max() > 0, name


def test_weights_that_are_missing_are_not_drawn_at_random(plain, tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_lm("qwen2", SEED).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Mistake, match="lacks weights: .*layers.1.mlp.up_proj"):
        load(tmp_path, plain)


def test_an_image_model_that_transformers_does_not_load_as_text_is_refused(plain, tmp_path):
    from transformers import Mistral3Config

    Mistral3Config().save_pretrained(tmp_path)  # as Ministral 3 is published
    with pytest.raises(Mistake, match="Mistral3Config.*docs/models.md"):
        load(tmp_path, plain)


@pytest.mark.parametrize("words", ["", "--lora 4"])
def test_kept_activations_change_no_gradient(words, tiny_model, template):
    rows = samples(SEED, (40, 12, 30))
    batches = [zero3.collate(rows[:1], False, "cpu"), zero3.collate(rows[1:], False, "cpu")]
    found, saved = {}, {}
    for keep in (0, 40, 60):  # the micro-batches have 40 and 60 tokens
        policy = load(tiny_model, template, f"--keep-activations {keep} {words}")
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.data.fill_(0.01)
        policy.zero_grad()
        calls = []
        layer = policy.lm.model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, to=calls: to.append(1))
        for batch in batches:
            (-policy(*batch)[0].sum()).backward()
        found[keep] = [p.grad for p in policy.parameters() if p.requires_grad]
        saved[keep] = len(calls)  # once for each forward, once more where it was computed again
    assert saved == {0: 4, 40: 3, 60: 2}
    for keep in (40, 60):
        assert all(map(torch.equal, found[keep], found[0]))


# ------------------------------------------------------------------------------ the saved folder

@pytest.mark.parametrize("flags", [
    {"do_sample": False, "temperature": 0.7}, {"num_beams": 1, "early_stopping": True},
    {"do_sample": True, "temperature": 0.6, "max_new_tokens": 64}])
def test_a_models_settings_of_sampling_are_saved_as_they_were(
        flags, tiny_model, one_rank, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    file = model / "generation_config.json"
    file.write_text(json.dumps(flags | {"eos_token_id": [2, 7]}))
    own = load_template(model)
    save(load(model, own), own, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {key: saved[key] for key in flags} == flags
    assert own.ends == load_template(tmp_path / "out").ends >= {2, 7}


def test_the_saved_folder_names_all_tokens_that_end_a_reply(plain, one_rank, tmp_path):
    lm = tiny_lm("qwen2", SEED)
    lm.generation_config.eos_token_id = 0  # as the configuration of a base model has it
    save(zero3.Policy(lm), plain, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 2] == sorted(plain.ends)
    assert load_template(tmp_path / "out").ends == plain.ends
