"""
Plan the memory that a stage needs on each GPU, at each moment of an update, without a GPU.

The plan follows the sources of DeepSpeed 0.19.8 (ZeRO-3 with a bucket of 5e8 numbers and up to 1e9
gathered parameters), of Qwen2 in transformers 5.19 with an attention that makes no T x T matrix,
and of the stages' own loss, which never holds more than LOGITS logits.

    python -m look.memory sft  --model Qwen/Qwen2.5-7B-Instruct --gpus 16
    python -m look.memory grpo --model Qwen/Qwen2.5-7B-Instruct --gpus 16 --context 30000

Prints a table, and exits with status 1 if a moment does not fit. The flags are those of the stages.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for python look/memory.py
import runtime
from runtime import COUNT, LOGITS, NATURAL, PART, POSITIVE, Help, Mistake, Parser

MOMENTS = ("play", "logits", "layer")  # the last two: backward through the head, the last layer
# {stage: its default tokens of (the longest episode, a micro-batch)}. dpo.py needs no second model,
# since it computes the log-probabilities of its reference before training
ROOM = {"sft": (20480, 20480), "dpo": (8192, 16384), "grpo": (30000, 32768), "arpo": (30000, 32768)}
GIB = 2**30


def training(config, n, args, tokens):
    """[(what, bytes, moments)] of the trainer of a model with n parameters; tokens: of its largest
    micro-batch. AdamW's step needs no memory of its own, since its kernel is fused."""
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    layers, kv, adapters = config.num_hidden_layers, kv_width(config), adapter_size(config, args)
    trained = adapters or n  # with --lora only the adapters have gradients and moments
    shard = 0 if args.offload else trained / args.gpus
    chunk = max(1, min(1024, LOGITS // v))
    layer = tokens * (20 * h + 4 * kv + 8 * i)  # float32 norms 16 h, query and output 4 h, MLP 8 i
    layer += tokens * 14 * args.lora  # A x in bf16, of 7 linear layers
    head = v * h * (not adapters)
    logits = max(14 * chunk * v, 12 * chunk * v + 4 * head, 6 * chunk * v + 6 * head)
    keep = tokens <= args.keep_activations
    always, backward = MOMENTS, ("logits", "layer")
    return [
        ("parameters, bf16 shard", 2 * (n + adapters) / args.gpus, always),
        ("master weights, fp32 shard", 4 * shard, always),
        ("gradients, fp32 shard", 4 * shard, always),
        ("AdamW's moments, fp32 shards", 8 * shard, always),
        ("gradients' bucket, bf16", 2 * 5e8, always),
        ("bucket's copy to be sent", 2 * min(trained, 5e8), ("layer",)),
        ("gathered parameters, bf16", 2 * min(n, 1e9) * (args.gpus > 1), backward),
        ("activations of all layers" if keep else "inputs of all layers",
         layers * (layer if keep else 2 * tokens * h), backward),
        ("recomputed layer activations", layer * (not keep), ("layer",)),
        ("gradients inside of a layer", tokens * (4 * i + 2 * h), ("layer",)),
        ("last norm and hidden states", tokens * 12 * h, ("logits",)),
        ("logits, head's gradient", logits, ("logits",)),
        ("tied head's gradient", 2 * head * config.tie_word_embeddings, ("layer",)),
        ("CUDA, NCCL, waste (assumed)", 4 * GIB, always)]


def playing(config, n, args):
    """([(what, bytes, moments)] of the engine, the number of contexts that fit its cache)."""
    weights, work = 2 * n / args.tp, 2 * GIB
    cache = args.gpu_memory * args.gpu_gib * GIB - weights - work
    per_token = 4 * config.num_hidden_layers * kv_width(config)
    per_token /= min(args.tp, config.num_key_value_heads)
    rows = [("engine's weights, bf16", weights, ("play",)), ("engine's KV cache", cache, ("play",)),
            ("engine's work (assumed)", work, ("play",))]
    return rows, cache / (per_token * args.context)


def host(config, n, args):
    """The bytes that --offload needs in the memory of all nodes: AdamW's moments, the master
    weights, and the gradients twice, in pinned memory. PyTorch rounds each rank's pinned memory up
    to a power of two."""
    trained = (adapter_size(config, args) or n) / args.gpus
    return args.offload * args.gpus * (12 * trained + 2 * 2 ** math.ceil(math.log2(4 * trained)))


def adapter_size(config, args):
    """The number of parameters in the adapters of --lora R: R times the input and output widths of
    each layer's seven linear layers."""
    h, i, kv = config.hidden_size, config.intermediate_size, kv_width(config)
    heads = config.num_attention_heads * (kv // config.num_key_value_heads)
    widths = 2 * (h + heads) + 2 * (h + kv) + 3 * (h + i)
    return args.lora * config.num_hidden_layers * widths


def kv_width(config):
    """The width of a token's keys in a layer; the values have the same width."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads * width


def load_shape(model):
    """(config, number of parameters) of a model, without loading its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
    except OSError:
        raise Mistake(f"{model} is not a folder here, and the hub does not provide it") from None
    text = config.get_text_config()  # the part of a model that also sees
    if not hasattr(text, "num_attention_heads"):
        raise Mistake(f"{model} has no attention ({text.model_type}): the plan cannot tell its "
                      "memory")
    for name, usual in (("num_key_value_heads", text.num_attention_heads),
                        ("intermediate_size", 4 * text.hidden_size)):  # older models lack them
        if getattr(text, name, None) is None:
            setattr(text, name, usual)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text)
    return text, sum(p.numel() for p in lm.parameters())


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("stage", choices=ROOM, help="stage to plan")
    add("--model", default="Qwen/Qwen2.5-7B-Instruct", help="HF folder or hub name")
    add("--gpus", type=COUNT, default=8, help="GPUs of all nodes together")
    add("--gpu-gib", type=POSITIVE, default=80, help="GiB of a GPU")
    add("--cutoff", type=NATURAL, default=0, help="sft, dpo: tokens of the longest episode; 0: the "
        "stage's default")
    add("--context", type=COUNT, default=ROOM["grpo"][0], help="grpo, arpo: tokens of an episode")
    add("--pack-tokens", type=NATURAL, default=0,
        help="tokens per micro-batch; 0: the stage's default")
    add("--keep-activations", type=NATURAL, default=0, metavar="K", help="micro-batches of at most "
        "K tokens keep their activations")
    add("--offload", action="store_true", help="keep AdamW and its states in the host's memory")
    add("--lora", type=COUNT, default=0, metavar="R", help="train only adapters of rank R")
    add("--tp", type=COUNT, default=1, help="grpo, arpo: ranks that share an engine's weights")
    add("--gpu-memory", type=PART, default=0.6, help="grpo, arpo: share that the engine may fill")
    return p.parse_args(argv)


def plan(args):
    """Print the table; SystemExit if a moment does not fit."""
    config, n = load_shape(args.model)
    plays, (longest, tokens) = args.stage not in ("sft", "dpo"), ROOM[args.stage]
    longest = args.context if plays else args.cutoff or longest
    tokens = max(args.pack_tokens or tokens, longest)  # a longer episode is a micro-batch by itself
    rows, contexts, moments = training(config, n, args, tokens), math.inf, MOMENTS[1:]
    if plays:
        engine, contexts = playing(config, n, args)
        rows, moments = rows + engine, MOMENTS
    rows = [(what, [size / GIB if moment in where else 0 for moment in moments])
            for what, size, where in rows]
    totals = [sum(column) for column in zip(*(sizes for _, sizes in rows), strict=True)]
    print(f"{args.model}: {n:,} parameters on {args.gpus} GPUs, {tokens} tokens at a time")
    print(f"{'GiB on each GPU':30}" + "".join(f"{moment:>8}" for moment in moments))
    for what, sizes in [*rows, (f"of {args.gpu_gib:g} GiB", totals)]:
        if any(sizes):
            print(f"{what:30}" + "".join(f"{size:8.1f}" if size else " " * 8 for size in sizes))
    if args.offload:
        print(f"--offload takes {host(config, n, args) / GIB:.1f} GiB of the host's memory")
    if plays:
        print(f"an engine's KV cache holds {contexts:.1f} contexts of {longest} tokens")
    over = max(totals) - args.gpu_gib
    if over > 0:
        sys.exit(f"this does not fit: {over:.2f} GiB too many on each GPU at the moment "
                 f"{moments[totals.index(max(totals))]!r}. What helps: fewer tokens, a lower "
                 "--gpu-memory, no --keep-activations, --offload, --lora, or more GPUs")
    if contexts < 1:
        sys.exit("this does not fit: the engine's cache holds no whole context. What helps: a "
                 "higher --gpu-memory, --tp, or a smaller --context")


def main(argv=None):
    runtime.run("look.memory", plan, flags(argv))


if __name__ == "__main__":
    main()
