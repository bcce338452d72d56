"""
A model under DeepSpeed ZeRO-3: what sft.py, dpo.py, grpo.py and arpo.py share in training.

    (1) rows       samples become micro-batches, the same number on every rank, and these become
                   tensors, packed or padded
    (2) the policy log-probabilities of chosen tokens, without the logits of all of them
    (3) ranks      join them, save on SIGTERM
    (4) load       a HF folder -> a Policy, checked against the model's own logits; LoRA
    (5) shard      parameters, gradients and AdamW's moments over all ranks -> the trainer
    (6) weights    gather them: into the engine before every play, into a HF folder at the end
    (7) resume     checkpoints

The words: the engine is vLLM's, the trainer is DeepSpeed's. runtime.py has what needs no torch.
"""
import atexit
import contextlib
import datetime
import fcntl
import hashlib
import heapq
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import threading
import types
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from runtime import (
    Mistake,
    die_with_parent,
    open_llm,
    open_tracker,
    rank,
    say,
    visible_gpus,
    write_text,
)

# Shapes: B rows of a micro-batch, T tokens of a row, N policy tokens of a micro-batch, H hidden
# size, V vocabulary.

# ----------------------------------------------------------------------------------------- (1) rows

def batch_of(step, n, size, seed):
    """Indices of the samples of update `step`. They depend on the arguments alone, so a resumed run
    draws the same batches.

    Every epoch shuffles all n samples anew, and each update takes the next `size` of them.
    """
    places = range(step * size, (step + 1) * size)
    epochs = {place // n for place in places}
    order = {epoch: random.Random(f"{seed}/{epoch}").sample(range(n), n) for epoch in epochs}
    return [order[place // n][place % n] for place in places]


def micro_batches(lengths, ranks, budget, packed):
    """Split a batch into micro-batches of at most `budget` tokens, padding included, and deal them
    to the ranks: [rank][micro-batch] -> indices. A longer sample is a micro-batch of its own.

    Every rank gets the same number of micro-batches, else ZeRO-3 hangs. At each one all ranks wait
    for the slowest, so they shall be equal. Packed: the longest sample first, each goes into the
    smallest micro-batch. Padded: samples of neighbouring lengths, which need little padding.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)

    def size(micro):
        chosen = [lengths[i] for i in micro] or [0]
        return sum(chosen) if packed else max(chosen) * len(micro)

    def neighbours(most):
        micros = []
        for i in order:
            if micros and lengths[micros[-1][0]] * (len(micros[-1]) + 1) <= most:
                micros[-1].append(i)
            else:
                micros.append([i])
        return micros

    count = ranks * max(1, math.ceil(min(sum(lengths) / budget, len(lengths)) / ranks))
    while True:
        if packed:
            micros, heap = [[] for _ in range(count)], [(0, k) for k in range(count)]
            for i in order:
                used, k = heap[0]
                micros[k].append(i)
                heapq.heapreplace(heap, (used + lengths[i], k))
        else:
            most = sum(lengths) / count
            while len(micros := neighbours(most)) > count:
                most *= 1.005
            # a 7B model spends as much time on attention as on all else in a row of 40K tokens
            micros.sort(key=lambda m: size(m) * (1 + lengths[m[0]] / 40_000), reverse=True)
            micros += [[]] * (count - len(micros))
        if all(len(micro) < 2 or size(micro) <= budget for micro in micros):
            return [micros[rank::ranks] for rank in range(ranks)]
        count += ranks


def collate(samples, packed, device):
    """A micro-batch of samples, which have ids and a mask -> ids, positions, keep, each (B, T).

    Packed: all samples in one row. Positions restart at each sample, and the attention separates
    samples where they do. Padded: one row per sample, with the padding on the right: under causal
    attention no real token sees it. No samples: two dummy tokens, because a rank without work still
    has to run a forward, or ZeRO-3 hangs; the caller multiplies their loss by 0.
    """
    rows = [(s.ids, s.mask) for s in samples] or [([0, 0], [0, 1])]
    ids, masks = ([torch.from_numpy(np.array(each)) for each in column]
                  for column in zip(*rows, strict=True))
    positions = [torch.arange(len(each)) for each in ids]
    if packed:
        ids, masks, positions = ([torch.cat(each)] for each in (ids, masks, positions))
    ids, keep = (pad_sequence(each, batch_first=True).to(device) for each in (ids, masks))
    positions = max(positions, key=len).to(device).expand(len(ids), -1)
    return ids.long(), positions, keep.bool()


# ----------------------------------------------------------------------------------- (2) the policy

LOGITS = 30_000_000  # at most this many logits are computed at a time (120 MB in float32)


class ChunkedLogps(torch.autograd.Function):
    """hidden, weight, targets, temperature -> log pi and entropy of the targets; of shapes (N, H),
    (V, H), (N,) and a number -> (N,), (N,). It never holds (N, V) logits.

    Forward and backward process a chunk of tokens at a time, and backward recomputes the chunk's
    logits. With p = softmax(h W^T / t): d logp_y / d logits = (onehot_y - p) / t, and for the
    entropy E: dE / d logits = -p (log p + E) / t. The gradient of the weight is summed over chunks
    in float32: in bfloat16, which torch.utils.checkpoint would sum in, 171 chunks lose 2.8 % of it,
    and 0.3 % in float32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.chunk = max(1, min(1024, LOGITS // len(weight)))
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, targets)
        logps, entropy = torch.empty(2, len(hidden), dtype=torch.float32, device=hidden.device)
        for i in range(0, len(hidden), ctx.chunk):
            some = slice(i, i + ctx.chunk)
            logits = (hidden[some] @ weight.T).float().div_(temperature)  # (chunk, V)
            total = logits.logsumexp(-1)
            logps[some] = logits.gather(-1, targets[some, None]).squeeze(-1) - total
            p = (logits - total[:, None]).exp_()
            entropy[some] = total - logits.mul_(p).sum(-1)  # - sum p log p
        ctx.set_materialize_grads(False)  # an output that no loss uses has None
        return logps, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets = ctx.saved_tensors
        grad = torch.zeros_like(grad_entropy) if grad is None else grad
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:  # not with --lora
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), ctx.chunk):
            some = slice(i, i + ctx.chunk)
            g = grad[some, None].float()
            logits = (hidden[some] @ weight.T).float().div_(ctx.temperature)
            d = torch.softmax(logits, -1).mul_(-g).scatter_add_(-1, targets[some, None], g)
            if grad_entropy is not None:
                log_p = logits.log_softmax(-1)
                p = log_p.exp()
                d -= grad_entropy[some, None] * p * (log_p - (p * log_p).sum(-1, keepdim=True))
            d = d.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[some] = d @ weight
            if grad_weight is not None:
                grad_weight += d.T @ hidden[some]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


class Policy(torch.nn.Module):
    """A causal language model that returns log-probabilities of chosen tokens instead of logits."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        # replace the head's forward: ZeRO-3 then gathers its weight once per pass, not per chunk
        lm.get_output_embeddings().forward = self.head

    def head(self, hidden, targets, temperature):
        """(N, H), (N,) -> log pi and entropy of the targets, (N,) each, without (N, V) logits."""
        weight = self.lm.get_output_embeddings().weight  # (V, H)
        return ChunkedLogps.apply(hidden, weight, targets, temperature)

    def forward(self, ids, positions, keep, temperature=1.0):
        """ids, positions, keep, (B, T) each -> logps, entropy of the tokens to keep, (N,) each"""
        # use_cache=False is needed: otherwise packed samples attend to each other under sdpa
        hidden = self.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        head, kept = self.lm.get_output_embeddings(), keep[:, 1:]
        return head(hidden[:, :-1][kept], ids[:, 1:][kept], temperature)


# ---------------------------------------------------------------------------------------- (3) ranks

def setup():
    """Join the ranks that torchrun has started -> rank, ranks, device"""
    die_with_parent()
    cuda = bool(visible_gpus())
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    # row shapes vary, and blocks of fixed size would leave unused gaps in the memory
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # DeepSpeed compiles with ninja, which is installed there
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    if not cuda:
        from deepspeed.comm.torch import build_shm_op

        compile_op("deepspeed_shm_comm", build_shm_op)
    # Create the process group before DeepSpeed does, and DeepSpeed uses it. It would bind a group
    # of its own to a device, and NCCL would then create vLLM's groups by splits that need all
    # ranks, which is known to hang.
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=4))  # longer than any play
    if dist.get_world_size() > 1:
        watch_ranks()
    if dist.get_world_size() > int(os.environ["LOCAL_WORLD_SIZE"]):
        try:  # as vLLM does, but before the weights are loaded
            dist.new_group(backend="gloo")
        except RuntimeError as error:
            raise Mistake("the nodes do not reach each other by gloo, which takes the address "
                          f"of the host's name: {error}. export GLOO_SOCKET_IFNAME and "
                          "NCCL_SOCKET_IFNAME, the name that `ip -brief address` shows") from None
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


LEFT = threading.Event()  # set where this rank waits for no other any more


def watch_ranks():
    """End this process within a minute of another rank's early end, or it would wait in vain: NCCL
    does not notice a dead rank, and torchrun waits as long as --shutdown-timeout says.

    A thread looks every few seconds whether the processes of this node exist, and tells the other
    nodes in the store; of a node that is lost as a whole, nobody tells. A rank that leaves in order
    sets LEFT or ends its process group, and so must all others within a few seconds.
    """
    store = dist.distributed_c10d._get_default_store().clone()  # nothing else waits for the clone
    first = dist.get_rank() - int(os.environ["LOCAL_RANK"])
    node = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    store.set(f"pid/{dist.get_rank()}", str(os.getpid()))

    def lost():
        try:
            pids = [store.get(f"pid/{other}").decode() for other in node]
            if not (threading.main_thread().is_alive()  # else it hangs while Python ends
                    and all(Path("/proc", pid).exists() for pid in pids)):
                store.set("lost", "")
            return store.check(["lost"])
        except RuntimeError:  # the store is lost, too
            return True

    def watch():
        while not LEFT.wait(5):
            # at the end of a run the others soon end their groups, too
            if dist.is_initialized() and lost() and not LEFT.wait(10) and dist.is_initialized():
                print("a rank of this run has ended early; this one ends, too", file=sys.stderr,
                      flush=True)
                os._exit(1)

    def end():
        if dist.is_initialized() and not LEFT.is_set():
            lost()  # tells it: a process can still hang after this, while NCCL ends
        LEFT.set()
        thread.join(10)  # Python aborts if it ends while a thread is in a call of the store
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    atexit.register(end)


def compile_op(name, build):
    """Have DeepSpeed compile the C++ op of this name, at its first use.

    A killed build leaves a lock, for which PyTorch would wait for ever, and may leave half a file,
    with which each later start would compile again. So build under a lock of ours, which the kernel
    releases, and begin anew where PyTorch's is left, which nobody holds meanwhile.
    """
    # each environment has headers of its own: with one folder for all, every switch would compile
    own = Path.home() / ".cache" / "torch_extensions" / sys.prefix.replace("/", "-")
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own))) / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.ours", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        if (folder / "lock").exists():
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        build()


def watch_sigterm():
    """Return interrupted(device): whether any rank has received SIGTERM, so that all save and exit.

    torchrun kills ranks that have not exited 30 s after SIGTERM; its --shutdown-timeout must be
    longer than one update.
    """
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    def interrupted(device):
        flag = torch.tensor(float(bool(received)), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # every rank must call this
        return bool(flag)
    return interrupted


# ----------------------------------------------------------------------------------------- (4) load

ALPHA = 32  # as in LoRA Without Regret (thinkingmachines.ai/blog/lora) and TRL's guide to it
# bounds on the |dlogp| of two forwards, in float32 and bfloat16: of different shapes, of equal ones
ROUNDING, LEAK = {"cpu": 1e-4, "cuda": 0.25}, {"cpu": 1e-5, "cuda": 1e-3}
MEASURED = ("The first train to the coast leaves at nine.", "The last bus to the lake is full now.",
            "A ferry stops here only once on Sundays.")


def load(args, template, device):
    """Load --model, in bfloat16 on a GPU and float32 on a CPU -> Policy, whether to pack rows"""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available

    try:
        config = AutoConfig.from_pretrained(args.model)
        text = config.get_text_config()
        for name in vars(text):  # two forwards of the same tokens must be equal
            if "drop" in name and isinstance(getattr(text, name, None), float):
                setattr(text, name, 0.0)
        if device.type == "cuda" and args.zero == 2:
            with torch.device("meta"):
                n = AutoModelForCausalLM.from_config(config).num_parameters()
            check_room(n, torch.cuda.mem_get_info(device)[1], dist.get_world_size(), args)
        lm, loaded = AutoModelForCausalLM.from_pretrained(
            args.model, config=config, output_loading_info=True,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    except ValueError as error:  # of a type that is none of its language models
        raise Mistake(f"{args.model} is no causal language model of transformers: "
                      f"{str(error).partition(chr(10))[0]} docs/models.md says which are") from None
    if loaded["missing_keys"]:  # transformers would draw them at random
        raise Mistake(f"{args.model} lacks weights: {sorted(loaded['missing_keys'])[:3]} ..")
    # the padding token's row would get no gradient; in some models that token ends a turn
    lm.get_input_embeddings().padding_idx = None
    fuse_norms(lm)
    if args.lora:
        add_adapters(lm, args)
    flash = device.type == "cuda" and is_flash_attn_2_available(kernels_fallback_ok=True)
    if flash:
        lm.set_attn_implementation("flash_attention_2")
    lm.eval()  # routers of experts draw at random in training mode
    recompute_large(lm, args)
    longest = args.context if "context" in args else args.cutoff
    policy, packed = check_forwards(lm.to(device), template, flash, longest)
    if args.lora:
        tell_adapted(lm)
    if dist.is_initialized():  # ranks that pack differ from others in their batches
        agreed = torch.tensor(int(packed), device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        packed = bool(agreed)
    return policy, packed


def check_room(n, room, ranks, args):
    """A Mistake if n parameters cannot be trained with --zero 2 on GPUs of `room` bytes, by what is
    certain: weights, AdamW's states, and either gradients or, while it plays, the engine."""
    shard = 0 if args.lora or args.offload else n / ranks
    needed = 2 * n + 12 * shard + max(4 * shard, room * getattr(args, "gpu_memory", 0))
    if needed > room:
        raise Mistake(f"--zero 2 takes {needed / 2**30:.1f} GiB or more of a GPU's "
                      f"{room / 2**30:.1f} (look.memory plans all): --zero 3 splits the weights")


def fuse_norms(lm):
    """Have PyTorch's rms_norm, on a GPU one kernel in place of six, compute those norms whose own
    forward gives the same for random numbers: not those of groups. Those with a gate stay, too."""
    def fused(norm, x):
        return torch.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    draw = torch.Generator().manual_seed(0)
    for norm in lm.modules():
        if hasattr(norm, "variance_epsilon") and norm.forward.__code__.co_argcount == 2:
            weight, x = torch.randn(2, len(norm.weight), generator=draw)
            given = {"weight": weight}, x / 1000  # so small that epsilon matters
            own = torch.func.functional_call(norm, *given)
            norm.forward = types.MethodType(fused, norm)
            if not torch.allclose(torch.func.functional_call(norm, *given), own):
                del norm.forward


def recompute_large(lm, args):
    """Have the backward pass recompute the layers of micro-batches of more than --keep-activations
    tokens on any rank; it keeps the activations of the others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if lm.supports_gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    layers = [each for each in lm.modules() if isinstance(each, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True  # needed to recompute it; its parts stay in evaluation mode

    def choose(model, positional, named):
        ids = named["input_ids"] if "input_ids" in named else positional[0]
        most = ids.numel()
        # of all ranks: a recomputed layer runs twice, and ZeRO-3 needs the same order on each
        if torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
            most = torch.tensor(most, device=ids.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
        recompute = bool(most > args.keep_activations)  # on a GPU this waits for the ranks
        for layer in layers:
            layer.gradient_checkpointing = recompute
    lm.base_model.register_forward_pre_hook(choose, with_kwargs=True)


def check_forwards(lm, template, flash, longest):
    """Compare a few short forwards -> Policy, whether to pack rows

    Rows are packed with flash attention, unless that lets samples change each other, as in some
    models with linear attention. A Mistake if the model's logits are more than a product with its
    head (scaled, capped, with a bias), which is what Policy computes, or if a sample of `longest`
    tokens changes the rotary embeddings of the others in its micro-batch.
    """
    head, device, name = lm.get_output_embeddings(), lm.device, type(lm).__name__
    if head is None or lm.base_model is lm:
        raise Mistake(f"a {name} cannot be trained: it has no head, or transformers does not say "
                      "which of its modules computes the head's input")
    one, other, sample = (types.SimpleNamespace(ids=ids, mask=[0] + [1] * (len(ids) - 1))
                          for ids in (template.encode(text)[:8] for text in MEASURED))
    n, bound = len(sample.ids) - 1, ROUNDING[device.type]
    with torch.no_grad():
        ids, own = torch.tensor([sample.ids], device=device), {}
        largest = lm(input_ids=ids, use_cache=False).logits.abs().max().item()
        for factor in (1, 1000 / largest):  # a cap hardly changes small logits
            hook = head.register_forward_pre_hook(lambda _, hidden, by=factor: (hidden[0] * by,))
            logits = lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
            hook.remove()
            own[factor] = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        policy = Policy(lm)

        def gap(logps, reference):
            return (logps[-n:] - reference[-n:]).abs().max().item()

        alone = collate([sample], False, device)
        if getattr(head, "bias", None) is not None or not all(
                gap(policy(*alone, 1 / factor)[0], logps) <= bound * factor
                for factor, logps in own.items()):
            raise Mistake(f"the log-probabilities of a {name} are not those of its hidden states "
                          "and its head, which is all that the stages compute: its logits are "
                          "scaled, capped or have a bias")
        check_rotary(policy, alone, longest)
        if not flash:
            return policy, False
        after_one, after_other = (policy(*collate([first, sample], True, device))[0]
                                  for first in (one, other))
        return policy, (gap(after_one, after_other) <= LEAK[device.type]
                        and gap(after_one, policy(*alone)[0]) <= bound)


def check_rotary(policy, alone, longest):
    """A Mistake if the rotary embeddings of a sample change beside one of `longest` tokens: some
    rules (longrope, dynamic) choose their frequencies by the largest position of the batch.

    alone: the collated sample. For the long one, positions suffice: it consists of the last few.
    """
    text, seen = policy.lm.config.get_text_config(), []
    ids, positions, keep = alone
    if not getattr(text, "rope_parameters", None) or longest <= len(ids[0]):
        return
    far = positions + longest - len(ids[0])
    hooks = [module.register_forward_hook(lambda _, inputs, turns: seen.append(turns[0][0]))
             for module in policy.lm.modules() if "Rotary" in type(module).__name__]
    policy(*alone)
    policy(torch.cat([ids, ids]), torch.cat([positions, far]), torch.cat([keep, keep]))
    for hook in hooks:
        hook.remove()
    half = len(seen) // 2
    if not all(torch.allclose(*pair, atol=1e-3)
               for pair in zip(seen[:half], seen[half:], strict=True)):
        limit = getattr(text, "original_max_position_embeddings", None) or text.rope_parameters.get(
            "original_max_position_embeddings", text.max_position_embeddings)
        raise Mistake(f"a sample of {longest} tokens (--context or --cutoff) would change how this "
                      f"model reads the others in its micro-batch, because its rotary embeddings "
                      f"depend on the longest one; use at most {limit}, its original length")


class Adapted(torch.nn.Linear):
    """A linear layer of weight W (out, in) that computes x (W + ALPHA / R * B A)^T, with an adapter
    of A (R, in) and B (out, R)."""
    called = False

    def forward(self, x):
        self.called = True
        by_adapter = torch.nn.functional.linear(x, self.lora_A) @ self.lora_B.T
        return super().forward(x) + by_adapter * (ALPHA / len(self.lora_A))


def add_adapters(lm, args):
    """--lora R: add an adapter to each linear layer but the head, experts and routers, and freeze
    all other weights. A is random and B 0 at the start.

    "LoRA Without Regret" recommends all layers, this ALPHA, a rank of 1 to 32 for RL and 256 for
    SFT, and 10 times the learning rate of full fine-tuning.
    """
    torch.manual_seed(args.seed)  # A is equal on all ranks
    lm.requires_grad_(False)
    head = lm.get_output_embeddings()
    owners = Counter(id(weight) for _, weight in lm.named_parameters(remove_duplicate=False))
    for name, layer in lm.named_modules():
        # a subclass computes something else; a weight of two layers cannot get two adapters
        if (type(layer) is torch.nn.Linear and layer is not head and owners[id(layer.weight)] == 1
                and not {"experts", "router", "gate"} & {*name.split(".")}):
            outputs, inputs = layer.weight.shape
            A, B = torch.empty(args.lora, inputs), torch.zeros(outputs, args.lora)
            torch.nn.init.kaiming_uniform_(A, a=math.sqrt(5))
            layer.lora_A = torch.nn.Parameter(A.to(layer.weight))
            layer.lora_B = torch.nn.Parameter(B.to(layer.weight))
            layer.__class__ = Adapted
    # ZeRO-3 gathers a layer's weights for the backward pass if its input takes a gradient, which
    # the output of the frozen embedding does not
    lm.enable_input_require_grads()


def tell_adapted(lm):
    """After a forward, take the adapters off layers that it has not called, and say which share of
    the weights has one. Some models read a layer's weight themselves, or have layers for images."""
    for layer in lm.modules():
        if isinstance(layer, Adapted) and not layer.called:
            layer.__class__ = torch.nn.Linear
            del layer.lora_A, layer.lora_B
    weights = {name: each for name, each in lm.named_parameters() if ".lora_" not in name}
    adapted = {name for name in weights
               if isinstance(lm.get_submodule(name.rpartition(".")[0]), Adapted)}
    if not adapted:
        raise Mistake(f"--lora: a {type(lm).__name__} has no linear layers to adapt")
    share = sum(weights[name].numel() for name in adapted) / sum(map(torch.numel, weights.values()))
    frozen = {name.split(".")[-2] for name in weights.keys() - adapted if weights[name].ndim > 1}
    say(f"--lora: {share:.1%} of the weights get an adapter; frozen: {', '.join(sorted(frozen))}")


def merge(layer):
    """The weight of an Adapted layer: W + ALPHA / R * B A.

    In bfloat16 most entries of a small update are less than half a step of W, so rounding to the
    nearest value would give W back, and the engine would play without the update. So an entry is
    rounded up or down at random, with the probabilities that keep its mean. The seed is fixed:
    all ranks, and a resumed run, get the same weights.
    """
    with torch.no_grad():
        weight, A, B = layer.weight, layer.lora_A.float(), layer.lora_B.float()
        merged = weight.float() + ALPHA / len(A) * B @ A
        if weight.dtype == torch.bfloat16:  # its bits are the first 16 of those of a float32
            draw = torch.Generator(weight.device).manual_seed(0)
            bits = merged.view(torch.int32)  # of the same memory
            bits += torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=weight.device,
                                  generator=draw)
            bits &= -1 << 16
        return merged.to(weight.dtype)


# ---------------------------------------------------------------------------------------- (5) shard

def shard(policy, args, device):
    """Shard parameters (not with --zero 2), gradients and AdamW's moments over all ranks -> the
    trainer, which is a DeepSpeed engine. With --offload AdamW runs on the CPU, whose memory then
    holds gradients, moments and master weights.

    Gradients accumulate over any number of trainer.backward calls until trainer.step.
    """
    import deepspeed

    cuda = device.type == "cuda"
    trained = [p for p in policy.parameters() if p.requires_grad]  # with --lora only the adapters
    # both in a group: a run may be resumed with or without --offload
    groups = [{"params": trained, "fused": cuda or None, "bias_correction": True}]
    if args.offload:
        compile_op("cpu_adam", deepspeed.ops.op_builder.CPUAdamBuilder().load)
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=args.lr, weight_decay=0.0)
    else:
        # fused: one kernel, which needs no temporary copies of the moments (8 bytes a parameter)
        optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.0, fused=cuda or None)
    config = {
        "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False,
        # gather whole layers: hooks on each of their modules cost time (docs/results.md)
        "zero_optimization": {"stage": args.zero, "overlap_comm": cuda, "leaf_module": {
            "classes": sorted(policy.lm._no_split_modules or ())}, "offload_optimizer": {
                "device": "cpu" if args.offload else "none", "pin_memory": cuda}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda}, "data_types": {"grad_accum_dtype": "fp32"}}
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


# -------------------------------------------------------------------------------------- (6) weights

def gathered(lm, chosen=None):
    """Yield (HF name, gathered parameter, its layer if that is Adapted), of all parameters but
    adapters', or of those named in `chosen`. All ranks must iterate together, to the end."""
    import deepspeed

    adapted = {f"{name}.weight": layer for name, layer in lm.named_modules()
               if isinstance(layer, Adapted)}
    for name, parameter in lm.named_parameters():
        layer = adapted.get(name)
        if ".lora_" not in name and (chosen is None or name in chosen):
            with deepspeed.zero.GatheredParameters([*layer.parameters()] if layer else [parameter]):
                yield name, parameter, layer


def full_weights(trainer):
    """Yield (HF name, full tensor), one by one. All ranks must iterate together, to the end.

    With --lora R, the adapters are merged into the layers' weights.
    """
    lm = trainer.module.lm
    for name, parameter, layer in gathered(lm):
        yield name, merge(layer) if layer else parameter.data
    saved = lm.state_dict()  # some models keep constants of routers or layers in buffers
    yield from ((name, buffer) for name, buffer in lm.named_buffers() if name in saved)


def load_engine(args, device):
    """A rank's own vLLM engine."""
    llm = open_llm(args.model, args.context, args.concurrency, 1, args.gpu_memory,
                   seed=args.seed, enable_sleep_mode=device.type == "cuda",
                   logprobs_mode="processed_logprobs",  # log pi at the sampling temperature
                   distributed_executor_backend="external_launcher")
    if device.type == "cuda":
        llm.sleep(level=2)  # drop the weights: they are sent again before every play
    return llm


def sync_weights(llm, trainer, device):
    """Copy the trainer's weights into the engine, tensor by tensor. Every rank takes part.

    The order matters on a GPU: weights written before the engine's memory is awake are lost.
    Without the iterator, reload_weights would read the folder on disk again and the policy would
    never change.
    """
    if device.type == "cuda":
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": full_weights(trainer)})
    if device.type == "cuda":
        llm.wake_up(tags=["kv_cache"])
    else:
        llm.apply_model(renew_head)
    if not llm.reset_prefix_cache():  # cached keys and values belong to the old weights
        raise RuntimeError("the engine did not drop the cached blocks of its old weights")


def check_weights(llm, trainer):
    """A RuntimeError unless the engine's weights are exactly the trainer's. Every rank takes part.

    In bfloat16 log-probabilities hardly show that the engine missed an update. This compares what
    both hold under one name, with one shape and type: projections back into the hidden state,
    norms, embeddings. The engine fuses the others, and repacks all linear layers on a CPU.
    """
    (engine,) = llm.apply_model(lambda model: dict(model.named_parameters()))
    compared, wrong = 0, []
    for name, parameter, layer in gathered(trainer.module.lm, engine):
        ours, theirs = merge(layer) if layer else parameter.data, engine[name]
        if (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            compared += 1
            wrong += [name] * (checksum(ours) != checksum(theirs))
    if not compared:  # as in models that are published inside an image model
        warnings.warn("no weight has one name in engine and trainer: only log-probabilities are "
                      "compared", stacklevel=2)
    if wrong:
        raise RuntimeError(f"the engine does not have the trainer's weights: {len(wrong)} of "
                           f"{compared} compared tensors differ, {wrong[:3]}")


def checksum(tensor):
    """A number of a tensor's values, bit by bit, in any order: some engines permute a weight."""
    bits = tensor.detach().flatten()
    bits = bits.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    return sum((part.long() ** 2).sum() for part in bits.split(1 << 22)).item()


def renew_head(model):
    """Update the packed copy of the head that vLLM's CPU build multiplies by: a reload does not do
    so if the head is tied to the embedding."""
    head = getattr(model, "lm_head", None) or model.model.embed_tokens
    head.quant_method.process_weights_after_loading(head)


def save_model(trainer, template, out):
    """Write a plain HF folder. Every rank takes part."""
    state = {name: tensor.to("cpu", copy=True) if rank() == 0 else None
             for name, tensor in full_weights(trainer)}
    if rank() == 0:
        lm = trainer.module.lm
        # copied unchanged, because transformers refuses to save some configs that it has loaded
        config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
        config.eos_token_id = sorted(template.ends)  # so that other engines stop there too
        with new_model(out) as part:
            lm.save_pretrained(part, state_dict=state)
            template.tokenizer.save_pretrained(part)
            config.to_json_file(part / "generation_config.json", keys_to_pop=["compile_config"])
            for file in Path(lm.name_or_path).glob("*processor*.json"):  # of images, for vLLM
                shutil.copy(file, part)
        lm.generation_config = config
    dist.barrier()


@contextlib.contextmanager
def new_model(out):
    """OUT.part, a folder to save a model in. Its files move to OUT once all of them are complete,
    config.json last: it marks a complete folder."""
    part = Path(f"{out}.part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    Path(out).mkdir(parents=True, exist_ok=True)
    for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
        shutil.rmtree(Path(out) / file.name, ignore_errors=True)  # a folder of chat templates
        os.replace(file, Path(out) / file.name)
    part.rmdir()


# --------------------------------------------------------------------------------------- (7) resume

def check_finite(out, step, **numbers):
    """A Mistake if a number of this update, equal on all ranks, is NaN or infinite."""
    bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if bad:
        raise Mistake(f"update {step}: {' and '.join(bad)}; this update was not saved. --resume "
                      f"continues {out} from its last checkpoint; lower --lr")


def save_checkpoint(trainer, args, step, last):
    """Save a checkpoint every --save-every updates; if this is the `last`, save and exit.

    Every rank writes its shard into checkpoints/step-N. Then rank 0 names this folder in `latest`,
    so that a killed save is never resumed, and removes the one before.
    """
    if last or (args.save_every and step % args.save_every == 0):
        folder = Path(args.out) / "checkpoints"
        trainer.save_checkpoint(folder, tag=f"step-{step}", save_latest=False,
                                exclude_frozen_parameters=True)  # --lora: they are --model's
        dist.barrier()  # every rank's shard is on disk
        if rank() == 0:
            size = (Path(args.out) / "log.jsonl").stat().st_size
            write_text(folder / "latest", json.dumps(
                {"step": step, "log_bytes": size, "ranks": dist.get_world_size(),
                 "zero": args.zero}))
            for other in {*folder.glob("step-*")} - {folder / f"step-{step}"}:
                shutil.rmtree(other)
        dist.barrier()
    if last:
        LEFT.set()
        sys.exit(f"stopped and saved after update {step}; repeat the command with --resume to "
                 "continue")


def restore(trainer, args):
    """The number of updates made so far: 0, or with --resume those of the checkpoint it loads. What
    the log says of later updates is cut off, because they are repeated."""
    out = Path(args.out)
    latest, log, settings = out / "checkpoints" / "latest", out / "log.jsonl", out / "settings.json"
    if log.exists() and not args.resume:
        raise Mistake(f"{out} already holds a run: --resume continues it; or choose another --out")
    if (out / "config.json").exists() and not latest.exists():
        raise Mistake(f"{out} holds a model and no checkpoint to resume: choose another --out")
    ranks = dist.get_world_size()
    mark = {"step": 0, "log_bytes": 0, "ranks": ranks, "zero": args.zero}
    if latest.exists():
        mark |= json.loads(latest.read_text())
    if mark["ranks"] != ranks:
        raise Mistake(f"{out} was trained by {mark['ranks']} ranks and its checkpoint is split "
                      f"into as many parts: resume with --nproc_per_node {mark['ranks']}")
    if mark["zero"] != args.zero:
        raise Mistake(f"{out} was trained with --zero {mark['zero']}, and so is its checkpoint "
                      "split: resume with the same")
    if rank() == 0:
        flags = json.loads(json.dumps(vars(args), default=str))
        for name in {"data", "tasks", "val"} & {key for key in flags if flags[key]}:
            with open(flags[name], "rb") as file:
                flags[f"content of --{name}"] = hashlib.file_digest(file, "sha256").hexdigest()
        before = json.loads(settings.read_text()) if mark["step"] else flags
        changed = [name for name in flags if before.get(name) != flags[name] and name != "resume"]
        if changed:
            print(f"{out}: resuming with another {', '.join(changed)} than before", flush=True)
        if args.track:  # now, so that a package that is missing ends the run here
            open_tracker(args.track, args.out)
    if mark["step"]:
        # save_checkpoint left out the weights that --lora freezes
        trainer.load_checkpoint(out / "checkpoints", tag=f"step-{mark['step']}",
                                load_module_strict=not args.lora)
        say(f"{out}: resuming after update {mark['step']}")
    dist.barrier()  # all ranks have looked, and loaded
    if rank() == 0:
        write_text(settings, json.dumps(flags, indent=1) + "\n")
        with open(log, "ab") as file:
            file.truncate(mark["log_bytes"])
    dist.barrier()
    return mark["step"]
