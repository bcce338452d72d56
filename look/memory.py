"""
Plan the memory that a stage needs on each GPU, at each moment of an update, without a GPU.

The plan follows the sources of DeepSpeed 0.19.8 (ZeRO-3 with a bucket of 5e8 numbers and up to 1e9
gathered parameters), of Qwen2 in transformers 5.19 with an attention that makes no T x T matrix,
and of the stages' own loss, which never holds more than LOGITS logits.

    python -m look.memory sft  --model Qwen/Qwen2.5-7B-Instruct --gpus 16
    python -m look.memory grpo --model Qwen/Qwen2.5-7B-Instruct --gpus 16 --context 30000

Prints a table. If a moment does not fit, it prints the missing GiB and the flags that help, and
exits with status 1.
"""
import math
import re
import sys

import runtime
from runtime import COUNT, NATURAL, PART, POSITIVE, SHARE, Help, Mistake, Parser
from sft import LOGITS

MOMENTS = {  # {moment of an update: what lowers its memory}
    "play": "a lower --gpu-memory, --offload, --lora, or more GPUs",
    "logits": "a smaller --pack-tokens or {longest}, no --no-checkpointing, --offload, --lora, or "
              "more GPUs",
    "layer": "a smaller --pack-tokens or {longest}, no --no-checkpointing, --offload, --lora, or "
             "more GPUs",
}
# {stage: its default tokens of (the longest episode, a micro-batch)}. dpo.py needs no second model,
# since it computes the log-probabilities of its reference before training
ROOM = {"sft": (20480, 20480), "dpo": (8192, 16384), "grpo": (30000, 32768), "arpo": (30000, 32768)}
GIB = 2**30


def training(config, n, args, tokens):
    """[(what, bytes, moments)] of the trainer of a model with n parameters.

    tokens: of a micro-batch. The moments are play, logits (the backward pass through the head) and
    layer (the backward pass through the last layer). AdamW's step needs no memory of its own, since
    its kernel is fused.
    """
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    layers, kv, adapters = config.num_hidden_layers, kv_width(config), adapter_size(config, args)
    trained = adapters or n  # with --lora only the adapters have gradients and moments
    shard = 0 if args.offload else trained / args.gpus
    chunk = max(1, min(1024, LOGITS // v))
    layer = tokens * (20 * h + 4 * kv + 8 * i)  # float32 norms 16 h, query and output 4 h, MLP 8 i
    layer += tokens * 14 * args.lora  # A x in bf16, of 7 linear layers
    head = v * h * (not adapters)
    logits = max(14 * chunk * v, 12 * chunk * v + 4 * head, 6 * chunk * v + 6 * head)
    # number of layers that keep all their activations
    whole = layers - round((1 - args.no_checkpointing) * layers)
    kept = layer * whole + 2 * tokens * h * (layers - whole)
    always, backward = ("play", "logits", "layer"), ("logits", "layer")
    return [
        ("parameters, bf16 shard", 2 * (n + adapters) / args.gpus, always),
        ("master weights, fp32 shard", 4 * shard, always),
        ("gradients, fp32 shard", 4 * shard, always),
        ("AdamW's moments, fp32 shards", 8 * shard, always),
        ("gradients' bucket, bf16", 2 * 5e8, always),
        ("bucket's copy to be sent", 2 * min(trained, 5e8), ("layer",)),
        ("gathered parameters, bf16", 2 * min(n, 1e9) * (args.gpus > 1), backward),
        ("inputs (or more) of all layers", kept, backward),
        ("recomputed layer activations", layer * (whole < layers), ("layer",)),
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
    """The number of parameters in the adapters of --lora R."""
    return args.lora * config.num_hidden_layers * widths(config)


def widths(config):
    """The sum of the input and output widths of a layer's seven linear layers."""
    h, i, kv = config.hidden_size, config.intermediate_size, kv_width(config)
    heads = config.num_attention_heads * (kv // config.num_key_value_heads)
    return 2 * (h + heads) + 2 * (h + kv) + 3 * (h + i)


def kv_width(config):
    """The width of a token's keys in a layer; the values have the same width."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads * width


def load_shape(model):
    """(config, number of parameters) of a model, without loading its weights."""
    from transformers import AutoConfig

    known = re.fullmatch(r"Qwen/Qwen2\.5-(0\.5|1\.5|3|7)B(-Instruct)?", str(model))
    if known:
        config = qwen(f"{known[1]}b")  # known without a hub
        config.max_position_embeddings = 32768
        return config, count(config)
    try:
        config = AutoConfig.from_pretrained(model)
    except OSError:
        raise Mistake(f"{model} is not a folder here, and the hub does not provide it: name a "
                      f"folder, or download it first (hf download {model})") from None
    text = config.get_text_config()  # the part of a model that also sees
    if not hasattr(text, "num_attention_heads"):
        raise Mistake(f"{model} has no attention ({text.model_type}): the plan cannot tell its "
                      "memory; run sft.py for an update with a long episode instead")
    for name, usual in (("num_key_value_heads", text.num_attention_heads),
                        ("intermediate_size", 4 * text.hidden_size),
                        ("max_position_embeddings", math.inf)):  # older models do not name them
        if getattr(text, name, None) is None:
            setattr(text, name, usual)
    return text, count(config)


def count(config):
    """The number of parameters of a model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in lm.parameters())


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("stage", choices=ROOM, help="stage to plan, with the flags that it takes")
    add("--model", default="Qwen/Qwen2.5-7B-Instruct", help="HF folder or hub name")
    add("--gpus", type=COUNT, default=8, help="GPUs of all nodes together")
    add("--gpu-gib", type=POSITIVE, default=80, help="GiB of a GPU")
    add("--cutoff", type=NATURAL, default=0, help="sft, dpo: tokens of the longest episode; 0: the "
        "stage's default")
    add("--context", type=COUNT, default=ROOM["grpo"][0], help="grpo, arpo: tokens of an episode")
    add("--pack-tokens", type=NATURAL, default=0,
        help="tokens per micro-batch; 0: the stage's default")
    add("--no-checkpointing", type=SHARE, nargs="?", const=1.0, default=0.0, metavar="SHARE",
        help="keep the activations of this fraction of the layers; without a number, of all")
    add("--offload", action="store_true", help="keep AdamW and its states in the host's memory")
    add("--lora", type=COUNT, default=0, metavar="R", help="train only adapters of rank R")
    add("--host-gib", type=POSITIVE, default=math.inf, help="free memory of the host in GiB, for "
        "--offload")
    add("--tp", type=COUNT, default=1, help="grpo, arpo: ranks that share an engine's weights")
    add("--gpu-memory", type=PART, default=0.6, help="grpo, arpo: share that the engine may fill")
    return p.parse_args(argv)


class Plan:
    """The memory of a stage's update.

    rows: [(what, bytes, moments)]. totals: {moment: GiB}. contexts: how many fit the engine's
    cache. host: GiB of the host's memory.
    """

    def __init__(self, config, n, args):
        plays, (longest, tokens) = args.stage not in ("sft", "dpo"), ROOM[args.stage]
        self.flag = "--context" if plays else "--cutoff"
        self.longest = args.context if plays else args.cutoff or longest
        self.tokens = max(args.pack_tokens or tokens, self.longest)
        self.rows, self.contexts = training(config, n, args, self.tokens), math.inf
        if plays:
            engine, self.contexts = playing(config, n, args)
            self.rows += engine
        self.totals = {moment: sum(size for _, size, where in self.rows if moment in where) / GIB
                       for moment in MOMENTS if plays or moment != "play"}
        self.host = host(config, n, args) / GIB


def plan(args):
    """Print the table; SystemExit if a moment does not fit."""
    config, n = load_shape(args.model)
    found = Plan(config, n, args)
    positions, heads = config.max_position_embeddings, config.num_attention_heads
    totals, longest = found.totals, found.longest
    if longest > positions:
        sys.exit(f"{args.model} has {positions} positions, {found.flag} asks for {longest}: "
                 "lower it")
    if heads % args.tp or args.gpus % args.tp:
        sys.exit(f"--tp {args.tp} does not divide {heads} attention heads and {args.gpus} GPUs")
    print(f"{args.model}: {n:,} parameters on {args.gpus} GPUs, {found.tokens} tokens at a time\n"
          f"{'GiB on each GPU':30}" + "".join(f"{moment:>8}" for moment in totals))
    for what, size, where in found.rows:
        if size and set(where) & set(totals):
            sizes = (f"{size / GIB:.1f}" if moment in where else "" for moment in totals)
            print(f"{what:30}" + "".join(f"{cell:>8}" for cell in sizes))
    print(f"{f'of {args.gpu_gib:g} GiB':30}" + "".join(f"{size:8.1f}" for size in totals.values()))
    if found.host:
        print(f"--offload takes {found.host:.1f} GiB of the host's memory")
    if found.contexts < math.inf:
        print(f"an engine's KV cache holds {found.contexts:.1f} contexts of {longest} tokens")
    fullest = max(totals, key=totals.get)
    if totals[fullest] > args.gpu_gib:
        over = totals[fullest] - args.gpu_gib
        sys.exit(f"this does not fit: {over:.2f} GiB too many on each GPU at the moment "
                 f"{fullest!r}; what lowers it: {MOMENTS[fullest].format(longest=found.flag)}")
    if found.host > args.host_gib:
        sys.exit(f"this does not fit: --offload takes {found.host:.1f} GiB of the host's memory, "
                 f"{args.host_gib:g} are free; use --lora instead")
    if found.contexts < 1:
        sys.exit("this does not fit: the engine's cache holds no whole context; what helps: a "
                 "higher --gpu-memory, --tp, or a smaller --context")


# Qwen2.5: hidden size, layers, heads, key heads, intermediate size, vocabulary, tied embeddings
QWEN = {"0.5b": (896, 24, 14, 2, 4864, 151936, True), "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
        "3b": (2048, 36, 16, 2, 11008, 151936, True), "7b": (3584, 28, 28, 4, 18944, 152064, False)}


def qwen(size):
    """The config of a Qwen2.5 model."""
    from transformers import Qwen2Config

    hidden, layers, heads, of_keys, intermediate, vocabulary, tied = QWEN[size]
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=of_keys, intermediate_size=intermediate, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=1 << 18)


def main(argv=None):
    runtime.run("look.memory", plan, flags(argv))


if __name__ == "__main__":
    main()
