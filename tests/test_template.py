"""What chat templates look like, and that training and play follow the model's own."""
import json
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, SEED

from runtime import Template, load_template, read_jsonl, write_jsonl
from sandbox import parse

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# a system turn of its own where the talk has none; thoughts of finished questions are dropped
QWEN = """{% if messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}""" + CHATML
QWEN3 = """{% set ns = namespace(asked=0) %}{% for m in messages %}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set text = m.content %}{% set thought = '' %}
{%- if m.role == 'assistant' and '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- text + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{{ '<|begin_of_text|>' }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{ '<s>' }}{% for m in messages %}{% if m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}
{{- '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"""
GEMMA3 = """{{ '<bos>' }}{% set first = messages[0].content + '\\n\\n' %}{% for m in messages[1:] %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}
{{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FORMS = {  # name: (template, special tokens, the tokenizer's end token, what ends a turn)
    "Qwen2.5": (QWEN, IM, "<|im_end|>", "<|im_end|>"),
    "Qwen3": (QWEN3, IM, "<|im_end|>", "<|im_end|>"),
    "Qwen3 thinking": (QWEN3.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}"
                                     "{% endif %}"), IM, "<|im_end|>", "<|im_end|>"),
    "SmolLM2": (QWEN, IM, "<|im_end|>", "<|im_end|>"),
    "Llama 3": (LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                         "<|end_header_id|>", "<|eot_id|>"], "<|end_of_text|>", "<|eot_id|>"),
    "Mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]",
                          "[/SYSTEM_PROMPT]"], "</s>", "</s>"),
    "Gemma 3": (GEMMA3, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>",
                "<end_of_turn>")}
TALK = [{"role": "system", "content": "You plan."}, {"role": "user", "content": "Where to?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n<tool_call>{}</tool_call>"},
        {"role": "user", "content": "<tool_response>\nSeen 1.</tool_response>"},
        {"role": "assistant", "content": "<think>\naha\n</think>\n\n<answer>there</answer>"}]


def tokenizer_of(chat_template, special=IM, eos="<|im_end|>"):
    """A tokenizer of one token a byte, and these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*special, *alphabet])}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    bpe.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, pad_token=special[0],
                                   chat_template=chat_template, clean_up_tokenization_spaces=False)


@pytest.fixture(params=FORMS)
def form(request):
    template, special, eos, end = FORMS[request.param]
    return Template(tokenizer_of(template, special, eos), request.param), end


def test_turns_laid_end_to_end_are_what_the_models_own_template_renders(form):
    template, end = form
    ids = template.prompt(TALK[:2])
    for message in TALK[2:]:
        said = message["role"] == "assistant"
        ids += [*template.encode(message["content"]), template.end] if said else (
            template.between(message))
    whole = template.tokenizer.apply_chat_template(TALK, tokenize=False)
    laid = template.tokenizer.decode(ids)
    assert whole.startswith(laid) and whole[len(laid):] in ("", "\n") and end in laid


def test_a_reply_ends_with_any_end_token_and_is_read_without_it(form):
    template, end = form
    for ending in {template.end, template.tokenizer.eos_token_id}:
        text, closed = template.reply([*template.encode(TALK[4]["content"]), ending])
        assert closed and parse(text).kind == "answer" and text == TALK[4]["content"]
    assert template.reply(template.encode("cut sh")) == ("cut sh", False)
    assert template.tokenizer.convert_ids_to_tokens(template.end) == end


def test_what_was_cut_short_gets_its_end_from_the_template(form):
    template, _ = form
    message = TALK[3]
    assert template.between(message, closed=False) == [template.end, *template.between(message)]


def test_a_reply_opens_its_thought_itself(form):
    template, _ = form
    assert "think" not in template.tokenizer.decode(template.prompt(TALK[:2]))


@pytest.mark.parametrize("text, reason", [
    (None, "no chat template"),
    (CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
     "strips thoughts from earlier replies"),
    (CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' "
                                       "else m.content[:3] }}"), "renders 'first probe' 0 times"),
    ("{{ raise_exception('no system turn') if messages[0].role == 'system' }}" + CHATML,
     "refuses a system turn"),
    ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "which is no token"),
    ("{% for m in messages | reverse %}{{ m.content }}<|im_end|>{% endfor %}",
     "order of the turns"),
    ("{% set system = messages[0].content %}{% for m in messages[1:] %}<|im_start|>"
     "{{ system if loop.last }}{{ m.content }}<|im_end|>{% endfor %}", "order of the turns"),
    (CHATML.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}"), "frames some turns differently"),
    (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ messages | length if loop.first }}"),
     "changes earlier turns")])
def test_a_template_that_cannot_be_cut_is_refused_in_one_sentence(text, reason):
    with pytest.raises(ValueError, match=f"^here: .*{reason}.*chat_template.jinja") as error:
        Template(tokenizer_of(text), "here")
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(ValueError, match="no end token"):
        Template(tokenizer_of(CHATML, eos=None), "here")


def random_model(folder, name, seed=SEED):
    """A folder with a random model of a form's own architecture, its embeddings tied."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    text, special, eos, end = FORMS[name]
    tokenizer = tokenizer_of(text, special, eos)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
             "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(seed)
    if name == "Gemma 3":
        lm = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, query_pre_attn_scalar=32))
    else:
        lm = LlamaForCausalLM(LlamaConfig(**sizes))
    lm.generation_config.eos_token_id = [tokenizer.eos_token_id,
                                         tokenizer.convert_tokens_to_ids(end)]
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama 3", "Gemma 3"])
def test_a_foreign_tied_model_is_trained_and_its_engine_follows_at_every_update(name, tmp_path):
    model = random_model(tmp_path / "model", name)
    write_jsonl(tmp_path / "sums.jsonl", [{"id": str(i), "query": "?", "sum": i} for i in range(4)])
    words = f"""grpo.py --env tests/calculator.py --model {model} --tasks {tmp_path}/sums.jsonl
        --steps 4 --prompts 2 --group 4 --context 300 --turn-tokens 24 --max-turns 2 --lr 1e-2
        --no-checkpointing --out {tmp_path}/rl""".split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run([*torchrun, *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    log = read_jsonl(tmp_path / "rl" / "log.jsonl")
    assert len(log) == 4 and all(line["dlogp_mean"] < 1e-4 for line in log), log
    assert load_template(tmp_path / "rl").ends == load_template(model).ends


def no_number(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def one_token_more(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one>", "<more>"])
    tokenizer.save_pretrained(folder)


def no_shard(folder):
    weights = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def scaled_logits(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))


@pytest.mark.parametrize("spoil, words", [
    (scaled_logits, r"its logits are more than a product with its head \(logits_scaling\)"),
    (no_number, "model.norm.weight holds values that are not finite; copy or download"),
    (one_token_more, "tokens, its embedding .* rows: use the tokenizer that the model was saved with"),
    (no_shard, "names 1 missing files, the first of them model-00001-of-00002.safetensors"),
    (no_tokenizer, "has no tokenizer; copy tokenizer.json")])
def test_a_broken_model_is_refused_before_anything_is_spent(spoil, words, tiny_model, tmp_path):
    import sft

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    spoil(folder)
    args = Namespace(model=str(folder), no_checkpointing=True)
    with pytest.raises(ValueError, match=f"^{folder}.*{words}") as error:
        sft.load(args, load_template(folder), torch.device("cpu"))
    assert "\n" not in str(error.value)
