"""
Plan the memory that a stage needs on each GPU, at each moment of an update, without a GPU.

The plan follows the sources of DeepSpeed 0.19.8 (ZeRO-3 with a bucket of 5e8 numbers and up to 1e9
gathered parameters; ZeRO-2 with two buckets and nothing to gather), of Qwen2 in transformers 5.19
with an attention that makes no T x T matrix, and of the stages' own loss, which never holds more
than LOGITS logits.

    python -m look.memory sft  --model Qwen/Qwen2.5-7B-Instruct --gpus 16
    python -m look.memory grpo --model Qwen/Qwen2.5-7B-Instruct --gpus 16 --context 30000
    python -m look.memory cards        # the table of docs/gpus.md

Prints a table, and exits with status 1 if a moment does not fit. The flags are those of the stages.
"""
import itertools
import math
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for python look/memory.py
import runtime
from runtime import COUNT, NATURAL, PART, POSITIVE, Help, Mistake, Parser

sys.excepthook = runtime.explain  # where torch is missing
from zero3 import LOGITS, add_adapters  # noqa: E402

# logits, layer: backward through the head, through the last layer, of the largest micro-batch
MOMENTS = ("play", "logits", "layer")
# {stage: its default tokens of (the longest episode, a micro-batch)}. dpo.py needs no second model,
# since it computes the log-probabilities of its reference before training
ROOM = {"sft": (20480, 20480), "dpo": (8192, 16384), "grpo": (30000, 32768), "arpo": (30000, 32768)}
GIB = 2**30
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "tie_word_embeddings")
SHAPES = {  # of Qwen2.5
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False)}


class Shape(NamedTuple):
    """What the plan needs to know of a model: its config, and its numbers of parameters."""
    config: object
    n: int  # without adapters
    adapters: int  # those of --lora


def training(shape, args, tokens):
    """[(what, bytes, moments)] of the trainer; tokens: of a micro-batch. AdamW's step needs no
    memory of its own, since its kernel is fused."""
    config, n, adapters = shape
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    layers, kv = config.num_hidden_layers, kv_width(config)
    trained = adapters or n  # with --lora only the adapters have gradients and moments
    shard = 0 if args.offload else trained / args.gpus
    chunk = max(1, min(1024, LOGITS // v))
    layer = tokens * (20 * h + 4 * kv + 8 * i)  # float32 norms 16 h, query and output 4 h, MLP 8 i
    layer += tokens * 14 * args.lora  # A x in bf16, of 7 linear layers
    head = v * h * (not adapters)
    logits = max(14 * chunk * v, 12 * chunk * v + 4 * head, 6 * chunk * v + 6 * head)
    keep, whole = tokens <= args.keep_activations, args.zero == 2
    always, backward = MOMENTS, ("logits", "layer")
    return [
        (f"parameters, bf16 {'whole' if whole else 'shard'}",
         2 * (n + adapters) / (1 if whole else args.gpus), always),
        ("master weights, fp32 shard", 4 * shard, always),
        ("AdamW's moments, fp32 shards", 8 * shard, always),
        # ZeRO-3 has its gradients' memory for good; ZeRO-2 from backward to step, of which a pass
        # through the layers has two buckets, one that fills while the other is sent
        ("gradients, fp32 shard", 4 * shard, backward if whole else always),
        ("gradients' buckets, bf16", 2 * 5e8 * (1 + whole), ("layer",) if whole else always),
        ("bucket's copy to be sent", 2 * min(trained, 5e8), ("layer",)),
        ("gathered parameters, bf16", 2 * min(n, 1e9) * (args.gpus > 1 and not whole), backward),
        ("activations of all layers" if keep else "inputs of all layers",
         layers * (layer if keep else 2 * tokens * h), backward),
        ("recomputed layer activations", layer * (not keep), ("layer",)),
        ("gradients inside of a layer", tokens * (4 * i + 2 * h), ("layer",)),
        ("last norm and hidden states", tokens * 12 * h, ("logits",)),
        ("logits, head's gradient", logits, ("logits",)),
        ("tied head's gradient", 2 * head * config.tie_word_embeddings, ("layer",)),
        ("CUDA, NCCL, waste (assumed)", max(4 if adapters else 5, args.gpu_gib / 10) * GIB, always)]


def playing(shape, args):
    """([(what, bytes, moments)] of the engine, the number of contexts that fit its cache)."""
    weights, work = 2 * shape.n, 2 * GIB
    cache = args.gpu_memory * args.gpu_gib * GIB - weights - work
    per_token = 4 * shape.config.num_hidden_layers * kv_width(shape.config)
    rows = [("engine's weights, bf16", weights, ("play",)), ("engine's KV cache", cache, ("play",)),
            ("engine's work (assumed)", work, ("play",))]
    return rows, cache / (per_token * args.context)


def host(shape, args):
    """The bytes that --offload needs in the memory of all nodes: AdamW's moments, the master
    weights, and the gradients twice, in pinned memory. PyTorch rounds each rank's pinned memory up
    to a power of two."""
    trained = (shape.adapters or shape.n) / args.gpus
    return args.offload * args.gpus * (12 * trained + 2 * 2 ** math.ceil(math.log2(4 * trained)))


def kv_width(config):
    """The width of a token's keys in a layer; the values have the same width."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads * width


def load_shape(model, lora=0):
    """The Shape of a model with adapters of rank `lora`, without loading its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = re.fullmatch(r"Qwen/Qwen2\.5-(.+)B(-Instruct)?", str(model))
    try:
        config = (qwen(f"{known[1]}b") if known and f"{known[1]}b" in SHAPES else
                  AutoConfig.from_pretrained(model))
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
        n = sum(p.numel() for p in lm.parameters())
        if lora:
            add_adapters(lm, SimpleNamespace(lora=lora, seed=0))
    return Shape(text, n, sum(p.numel() for p in lm.parameters()) - n)


def qwen(size):
    """The config of a Qwen2.5, without a hub."""
    from transformers import Qwen2Config

    return Qwen2Config(**dict(zip(NAMES, SHAPES[size], strict=True)), max_position_embeddings=32768)


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=Help)
    add = p.add_argument
    add("stage", choices=(*ROOM, "cards"), help="stage to plan")
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
    add("--zero", type=int, choices=(2, 3), default=3, help="3: each GPU holds a shard of the "
        "weights and gathers layers; 2: all weights, which is faster")
    add("--offload", action="store_true", help="keep AdamW and its states in the host's memory; "
        "planned for --zero 3")
    add("--lora", type=COUNT, default=0, metavar="R", help="train only adapters of rank R")
    add("--gpu-memory", type=PART, default=0.6, help="grpo, arpo: share that the engine may fill")
    args = p.parse_args(argv)
    if args.offload and args.zero == 2:  # whose gradients then stay on the GPU
        p.error("--offload is planned for --zero 3 alone")
    return args


def by_moment(shape, args):
    """({moment: [(what, bytes)]} of an update, tokens of (the longest episode, the largest
    micro-batch), the number of contexts in the engine's cache). The rows of a moment are those of
    the largest micro-batch or, where it needs more, of the largest that keeps its activations."""
    plays, (longest, tokens) = args.stage not in ("sft", "dpo"), ROOM[args.stage]
    longest = args.context if plays else args.cutoff or longest
    tokens = max(args.pack_tokens or tokens, longest)  # a longer episode is a micro-batch by itself
    engine, contexts = playing(shape, args) if plays else ([], math.inf)
    found = {}
    for moment in MOMENTS[not plays:]:
        batches = [[(what, size) for what, size, where in training(shape, args, each) + engine
                    if moment in where] for each in (tokens, min(tokens, args.keep_activations))]
        found[moment] = max(batches, key=total)
    return found, longest, tokens, contexts


def total(rows):
    """The GiB of [(what, bytes)]."""
    return sum(size for _, size in rows) / GIB


def most_kept(shape, args):
    """The most tokens, a multiple of 1024, that --keep-activations has room for; 0 if there is no
    room for 4096, because hardly any play is as short as that."""
    for tokens in range(32768, 4095, -1024):
        tried = args.__class__(**vars(args) | {"keep_activations": tokens, "pack_tokens": tokens})
        if all(total(rows) <= args.gpu_gib for rows in by_moment(shape, tried)[0].values()):
            return tokens
    return 0


def plan(args):
    """Print the table; SystemExit if a moment does not fit."""
    if args.stage == "cards":
        return print(*cards(), sep="\n")
    shape = load_shape(args.model, args.lora)
    found, longest, tokens, contexts = by_moment(shape, args)
    totals = {moment: total(rows) for moment, rows in found.items()}
    print(f"{args.model}: {shape.n:,} parameters on {args.gpus} GPUs, {tokens} tokens at a time")
    print("play: the engine; logits, layer: backward through the head, through the last layer")
    print(f"{'GiB on each GPU':30}" + "".join(f"{moment:>8}" for moment in found))
    for what in dict.fromkeys(what for rows in found.values() for what, _ in rows):
        sizes = [dict(rows).get(what, 0) / GIB for rows in found.values()]
        if any(sizes):
            print(f"{what:30}" + "".join(f"{size:8.1f}" if size else " " * 8 for size in sizes))
    print(f"{f'of {args.gpu_gib:g} GiB':30}" + "".join(f"{size:8.1f}" for size in totals.values()))
    if args.offload:
        print(f"--offload takes {host(shape, args) / GIB:.1f} GiB of the host's memory")
    if contexts < math.inf:
        print(f"an engine's KV cache holds {contexts:.1f} contexts of {longest} tokens")
    worst = max(totals, key=totals.get)
    if totals[worst] > args.gpu_gib:
        sys.exit(f"this does not fit: {totals[worst] - args.gpu_gib:.2f} GiB too many on each GPU "
                 f"at the moment {worst!r}. What helps: fewer tokens, a lower --gpu-memory, no "
                 "--keep-activations, --zero 3, --offload, --lora, or more GPUs")
    if contexts < 1:
        sys.exit("this does not fit: the engine's cache holds no whole context. What helps: a "
                 "higher --gpu-memory, or a smaller --context")
    if tokens := most_kept(shape, args):
        print(f"micro-batches of up to {tokens} tokens fit with --keep-activations {tokens}")


# --------------------------------------------------------------------- the table of docs/gpus.md

# run.sh's settings: tokens of an episode, the engine's share, most tokens of the micro-batches that
# keep their activations, and --zero, which is 3 with --offload
RECIPES = {"0.5b": (16384, 0.35, 4096, 2), "1.5b": (30000, 0.5, 14336, 2),
           "3b": (30000, 0.6, 10240, 2), "7b": (30000, 0.6, 8192, 3)}
CARDS = {24: 22, 48: 44, 80: 79}  # {GB of a card: GiB that the smallest such card reports}
PLAYS = 256  # in flight: 32 queries x 8


def cards():
    """The lines of the table: for each card and size, the first choice that fits. The order of the
    choices: --zero 3 and --offload, which do not change learning, then --lora; a shorter context
    last."""
    yield f"| GPUs | {' | '.join(RECIPES)} |"
    yield "| --- " * (len(RECIPES) + 1) + "|"
    for gb, gpus in itertools.product(CARDS, (1, 2, 4, 8)):
        cells = []
        for size in RECIPES:
            best = choose(size, gpus, CARDS[gb], ("", "--zero 3", "--offload", "--lora 32",
                                                  "--lora 32 --zero 3", "--lora 32 --offload"))
            if best and "--offload" in best:  # the host may lack the memory
                other = choose(size, gpus, CARDS[gb], ("--lora 32", "--lora 32 --zero 3"))
                best = " or ".join(filter(None, (best, other)))
            cells.append(best or "-")
        yield f"| {gpus} x {gb} GB | {' | '.join(cells)} |"


def choose(size, gpus, gib, ways):
    """A cell of the table: the variables of run.sh, "" if none of the ways fits."""
    longest, usual, keep, zero = RECIPES[size]
    contexts = [tokens for tokens in (30000, 16384, 8192) if tokens <= longest]
    shares = sorted({usual, *(s for s in (0.5, 0.4, 0.3, 0.25, 0.2) if s < usual)}, reverse=True)
    for context, way in itertools.product(contexts, ways):
        words = f"--zero {3 if '--offload' in way else zero} {way} --context {context}"
        words += f" --gpus {gpus} --gpu-gib {gib}"
        pack = "32768" if context == 30000 else str(context)  # with KEEP=0; the preflight's in SFT
        rl = flags(["grpo", *words.split(), "--pack-tokens", pack])
        sft = flags(["sft", *words.split(), "--cutoff", pack])
        shape, fitting = shape_of(size, rl.lora), {}
        for rl.gpu_memory in shares:
            stages = [by_moment(shape, args) for args in (sft, rl)]
            fits = all(total(rows) <= gib for found, *_ in stages for rows in found.values())
            if fits and stages[1][3] >= 2:  # whole contexts; few plays need one
                fitting[rl.gpu_memory] = stages[1][3]
        if fitting:
            # a cache that holds all plays of an engine is enough
            enough = [share for share in fitting if fitting[share] >= PLAYS / gpus]
            share = min(enough, default=max(fitting))
            rl.gpu_memory = share
            kept = min(most_kept(shape, args) for args in (sft, rl))
            told = {"HOW": f'"{way}"' if " " in way else way,
                    "CONTEXT": context if context != longest else "",
                    "SHARE": share if share != usual else "", "KEEP": kept if kept < keep else ""}
            cell = " ".join(f"{name}={value}" for name, value in told.items() if value != "")
            memory = f" ({math.ceil(host(shape, rl) / GIB)})" if rl.offload else ""
            return f"`{cell}`{memory}" if cell else "as it is"
    return ""


@lru_cache
def shape_of(size, lora):
    return load_shape(f"Qwen/Qwen2.5-{size.upper()}", lora)


def main(argv=None):
    runtime.run("look.memory", plan, flags(argv))


if __name__ == "__main__":
    main()
