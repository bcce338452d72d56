"""
A random Qwen2 with induction heads, and a tokenizer made for copying.
"""
import re
from pathlib import Path

import runtime
from runtime import Mistake
from tiny.worlds import WORDS


def read_phrases(file):
    """The phrases of a file, which "@" and line breaks separate."""
    return re.split("[@\n]", Path(file).read_text(encoding="utf-8").strip("\n"))


# Frequent phrases of the tools and the protocol, and the pairs of digits, are one token each, so
# that episodes are short. "3. [" precedes the name of a row both in results and in answers, where
# induction heads find it.
PHRASES = [
    *(f"{i:02d}" for i in range(100)),
    *(f"{i}. [" for i in range(1, 10)),
    *(f"{to}2022-{month:02d}-" for to in ("", " to ") for month in range(1, 13)),
    *read_phrases(WORDS / "phrases.txt")]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def embed_classes(lm, rows, rank=32):
    """Set embeddings half at random and half by the tokens' neighbours in the rows of ids, so that
    tokens of a kind (names of hotels, digits) are similar, as in any trained model.

    Uses the largest singular vectors of the positive pointwise mutual information with the tokens
    before and after (Levy and Goldberg, 2014). rank: the number of these vectors.
    """
    import torch

    size, width = lm.model.embed_tokens.weight.shape
    counts = torch.zeros(size, 2 * size)
    for ids in map(torch.tensor, rows):
        counts.index_put_((ids[1:], ids[:-1]), torch.ones(1), accumulate=True)
        counts.index_put_((ids[:-1], size + ids[1:]), torch.ones(1), accumulate=True)
    chance = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    information = (counts / chance.clamp(min=1e-9)).clamp(min=1).log()
    u, s, _ = torch.svd_lowrank(information, q=rank)
    turned = torch.linalg.qr(torch.randn(width, rank))[0].T  # into the model's width
    kinds = torch.nn.functional.normalize(u * s.sqrt(), dim=-1) @ turned
    mixed = torch.randn(size, width) + kinds * width**0.5
    lm.model.embed_tokens.weight.copy_(0.1 * 0.5**0.5 * mixed)


def wire_induction(lm):
    """Give a random tiny Qwen2 the induction heads that every pre-trained model has. They find the
    last occurrence of the current token and predict the token after it (arXiv:2209.11895). Training
    would need most of its time to learn them.

    Heads of layer 0 attend to the previous token: the bias of their queries is b, that of their
    keys is b rotated by one position, so that under RoPE the product is largest at distance 1; b
    uses the fast frequencies, which make this sharp. They write the previous token into a subspace.
    Heads of layer 1 look for the current token in that subspace; they use the slow frequencies,
    which hardly depend on the distance. They write the embedding of the token that they found,
    which the LM head, a copy of the embedding at the start, reads as that token.
    """
    import torch

    config = lm.config
    lm.lm_head.weight.copy_(lm.model.embed_tokens.weight)
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    back, find = lm.model.layers[0].self_attn, lm.model.layers[1].self_attn
    d = config.hidden_size // config.num_attention_heads
    share = config.num_attention_heads // config.num_key_value_heads  # query heads per key head
    # radians per token, (d / 2,)
    angle = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2) / d)
    fast, slow = 6.0 * (angle > 0.02), 2.0 * (angle < 0.002).repeat(2)[:, None]

    def subspace():
        return torch.linalg.qr(torch.randn(config.hidden_size, d))[0]  # (H, d), orthonormal columns

    for key in range(config.num_key_value_heads):
        q, kv = slice(key * share * d, (key * share + 1) * d), slice(key * d, (key + 1) * d)
        previous, written, said = subspace(), subspace(), subspace()
        back.q_proj.bias[q] = torch.cat([fast, 0 * fast])
        back.k_proj.bias[kv] = torch.cat([fast * angle.cos(), fast * angle.sin()])
        back.v_proj.weight[kv], back.o_proj.weight[:, q] = 0.3 * previous.T, written
        find.q_proj.weight[q], find.k_proj.weight[kv] = slow * previous.T, slow * written.T
        # a large factor, since attention may be divided among many tokens
        find.v_proj.weight[kv], find.o_proj.weight[:, q] = 8.0 * said.T, said


def make_tokenizer(texts, vocabulary, phrases=PHRASES):
    """A byte-level BPE tokenizer made for copying: it splits words from punctuation and numbers
    into pairs of digits, so that a name or a date has the same tokens everywhere."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # Qwen's pattern, which transformers sets for every Qwen2 tokenizer that it loads
    pieces = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                   r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special, show_progress=False)
    # the merges are learnt from the text between the phrases
    phrase = re.compile("|".join(map(re.escape, sorted(phrases, key=len, reverse=True))))
    bpe.train_from_iterator((piece for text in texts for piece in phrase.split(text)), trainer)
    bpe.add_special_tokens(special)
    bpe.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHATML, clean_up_tokenization_spaces=False)


def make_tiny(corpus, out, seed, width=192, vocabulary=2048, phrases=PHRASES):
    """Write a random Qwen2 of 4 layers and a tokenizer made from jsonl files of messages."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from zero3 import new_model

    talks = [row["messages"] for path in corpus for row in runtime.read_jsonl(path)]
    texts = [message["content"] for talk in talks for message in talk]
    tokenizer = make_tokenizer(texts, vocabulary, phrases)
    torch.manual_seed(seed)
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=4,
        intermediate_size=width * 8 // 3 // 64 * 64, num_attention_heads=width // 32,
        num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=False,  # vLLM's CPU build does not update tied weights
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    rows = []
    for talk in talks[:3000]:
        asks = talk[-1]["role"] == "user"
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=asks)
        rows.append(tokenizer.encode(text if asks else text.removesuffix("\n")))
    with torch.no_grad():
        embed_classes(lm, rows)
        wire_induction(lm)
    with new_model(out) as part:
        lm.save_pretrained(part)
        tokenizer.save_pretrained(part)
    count = sum(weight.numel() for weight in lm.parameters())
    print(f"{out}: {count / 1e6:.1f}M random parameters, {len(tokenizer)} tokens")


def model(args):
    if (Path(args.out) / "config.json").exists():
        raise Mistake(f"{args.out} already holds a model: choose another --out, or remove it")
    runtime.lock_folder(args.out)
    phrases = read_phrases(args.phrases) if args.phrases else PHRASES
    make_tiny(args.corpus, args.out, args.seed, args.width, phrases=phrases)
