"""
Write what an update of grpo.py or arpo.py did to every token, for look.report to show.

    (1) learn() keeps, for each micro-batch, the tensors that the loss was computed from
    (2) after the update write_tokens() gathers them from all ranks; rank 0 writes a line per play,
        in the order of OUT/rollouts/<step>.jsonl, so that line n of both files is the same play

It computes nothing that the update needs: a run with --microscope ends with the same weights.

Keys of a line: name, query; parent and shared (for arpo.py's forks: the play it was forked from,
and how many first tokens it took over); reward, advantage; tokens (their texts, which joined are
the play's); mask (1 for the policy's tokens); clip (the bounds of w); group (the tree of its query:
name, parent, shared, length, end of the prompt, reward, advantage and stop of each play).
For each policy token: engine (log-probability in vLLM). If the play was in the loss, also trainer
(log-probability in the trainer), w (importance weight before it is clipped), side (-1 clipped from
below, 1 from above, else 0), gain (advantage), entropy (in nats).

Reads   the samples and tensors that the stage passes in
Writes  OUT/microscope/<step>.jsonl, whole or not at all

    torchrun --standalone grpo.py --model out/sft --tasks data/rl.jsonl --out out/rl --microscope 10
    python -m look.report out/rl
"""
import torch
import torch.distributed as dist

from runtime import write_jsonl

UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete character to


def write_tokens(path, samples, micros, template, args):
    """Write a line per play of an update. Every rank must call this; rank 0 writes.

    samples: of all ranks. micros: of what this rank learnt, [([(sample, weight)] of a micro-batch,
    log pi of the trainer, log pi_old, advantage, entropy, clipped, each (N,) over policy tokens)].
    """
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, columns_of(micros))
    if dist.get_rank():
        return
    learnt = {name: columns for part in parts for name, columns in part.items()}
    trees = {}
    for s in samples:
        trees.setdefault(s.group, []).append(branch_of(s))
    clip = [1 - getattr(args, "clip_low", 1), 1 + args.clip_high]  # cispo has no lower bound
    write_jsonl(path, ({**line_of(s, template.tokenizer), **learnt.get(s.seed_name, {}),
                        "clip": clip, "group": trees[s.group]} for s in samples))


def columns_of(micros):
    """{name of a play: its columns} for the micro-batches of a rank."""
    found = {}
    for batch, logps, old_logps, advantage, entropy, clipped in micros:
        w = torch.exp((logps - old_logps).clamp(max=20))  # the same bound as in policy_loss
        counts = [sum(s.mask) for s, _ in batch]
        parts = [tensor.cpu().split(counts) for tensor in (logps, w, clipped, advantage, entropy)]
        for (s, _), *columns in zip(batch, *parts, strict=True):
            trainer, ratio, side, gain, nats = (column.tolist() for column in columns)
            found[s.seed_name] = {"trainer": short(trainer), "w": short(ratio),
                             "side": [int(value) for value in side], "gain": short(gain, 4),
                             "entropy": short(nats, 4)}
    return found


def line_of(s, tokenizer):
    """The part of a play's line that is known from sampling."""
    engine = [x for x, said in zip(s.logps, s.mask, strict=True) if said]
    return {"name": s.seed_name, "query": s.group, "parent": getattr(s, "parent", ""),
            "shared": getattr(s, "shared", 0), "reward": s.reward, "advantage": s.advantage,
            "tokens": pieces(list(s.ids), tokenizer), "mask": list(s.mask), "engine": short(engine)}


def branch_of(s):
    """A play's entry in the tree of its query."""
    mask = list(s.mask)
    return {"name": s.seed_name, "parent": getattr(s, "parent", ""),
            "shared": getattr(s, "shared", 0), "length": len(mask),
            "prompt": mask.index(1) if 1 in mask else len(mask), "reward": s.reward,
            "advantage": s.advantage, "stop": s.stop}


def short(values, digits=7):
    """Round numbers to significant digits; float32 has seven."""
    return [value and float(f"{value:.{digits}g}") for value in values]


def pieces(ids, tokenizer):
    """The text of each token. A character made of several tokens is the text of the last one; the
    others have an empty text."""
    texts, held, decode = [], [], tokenizer.decode
    for token in ids:
        held.append(token)
        texts.append("")
        text = decode(held)
        if not text.endswith(UNFINISHED):
            texts[-1], held = text, []
        elif len(held) == 4:  # UTF-8 has at most 4 bytes: some are invalid, a character may follow
            cut = next((i for i in (1, 2, 3) if decode(held[:i]) + decode(held[i:]) == text), 4)
            texts[cut - 5], held = decode(held[:cut]), held[cut:]
    if held:
        texts[-1] = decode(held)
    return texts
