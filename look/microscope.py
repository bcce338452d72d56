"""
What an update of grpo.py or arpo.py saw of every token, for report.py to show.

    (1) learn keeps, of each micro-batch, the tensors that the loss was made of, as they are
    (2) write_tokens gathers them from the ranks that learnt, after the update, and rank 0 writes a
        line per play, in the order of OUT/rollouts/<step>.jsonl, so that line n is of that play

Nothing is computed that the update needs: a run with --microscope has the weights of one without.
A line: name, query, parent and shared (of arpo.py's forks: whose first tokens it took over, and how
many), reward, advantage, tokens (texts, which joined are the play's), mask (1 where the policy
spoke), engine (its log-probability of each policy token, null where a tool said it), clip (the
bounds of w); and if the play was in the loss, of each policy token: trainer (the trainer's
log-probability), w (the importance weight, before it is clipped), side (-1 clipped from below, 1
from above, else 0), gain (its advantage), entropy (nats). `group` is the tree of its query: of each
play name, parent, shared, length, where its prompt ends, reward, advantage and stop.

Reads   what the stage hands over
Writes  OUT/microscope/<step>.jsonl, whole or not at all

    torchrun --standalone grpo.py --model out/sft --tasks data/rl.jsonl --out out/rl --microscope 10
    python -m look.report out/rl
"""
import torch
import torch.distributed as dist

from runtime import write_jsonl

UNFINISHED = "\ufffd"  # what a tokenizer says of bytes that are no whole letter


def write_tokens(path, samples, seen, template, args):
    """Write a line per play of an update. Every rank takes part; rank 0 writes.

    samples: of all ranks. seen: [((sample, weight) of a micro-batch, trainer's log pi, pi_old's,
    advantage, entropy, side, each (N,) over its policy tokens)], what this rank learnt from.
    """
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, columns_of(seen))
    if dist.get_rank():
        return
    learnt = {name: columns for part in parts for name, columns in part.items()}
    trees = {}
    for s in samples:
        trees.setdefault(s.query, []).append(branch_of(s))
    clip = [1 - args.clip_low, 1 + args.clip_high]
    write_jsonl(path, ({**line_of(s, template.tokenizer), **learnt.get(s.name, {}),
                        "clip": clip, "group": trees[s.query]} for s in samples))


def columns_of(seen):
    """{name of a play: its columns} of the micro-batches of a rank."""
    found = {}
    for batch, logps, old_logps, advantage, entropy, side in seen:
        w = torch.exp((logps - old_logps).clamp(max=20))  # as in policy_loss
        counts = [sum(s.mask) for s, _ in batch]
        parts = [tensor.cpu().split(counts) for tensor in (logps, w, side, advantage, entropy)]
        for (s, _), *columns in zip(batch, *parts, strict=True):
            trainer, ratio, clipped, gain, nats = (column.tolist() for column in columns)
            found[s.name] = {"trainer": short(trainer), "w": short(ratio),
                             "side": [int(value) for value in clipped], "gain": short(gain, 4),
                             "entropy": short(nats, 4)}
    return found


def line_of(s, tokenizer):
    """A play as the engine saw it."""
    engine = [x if x < 1 else None for x, said in zip(s.logps, s.mask, strict=True) if said]
    return {"name": s.name, "query": s.query, "parent": getattr(s, "parent", ""),
            "shared": getattr(s, "shared", 0), "reward": s.reward, "advantage": s.advantage,
            "tokens": pieces(list(s.ids), tokenizer), "mask": list(s.mask), "engine": short(engine)}


def branch_of(s):
    """A play's place in the tree of its query."""
    mask = list(s.mask)
    return {"name": s.name, "parent": getattr(s, "parent", ""), "shared": getattr(s, "shared", 0),
            "length": len(mask), "prompt": mask.index(1) if 1 in mask else len(mask),
            "reward": s.reward, "advantage": s.advantage, "stop": s.stop}


def short(values, digits=7):
    """Numbers at the digits that a reader can use; float32 has seven."""
    return [value and float(f"{value:.{digits}g}") for value in values]


def pieces(ids, tokenizer):
    """The text of each token. A letter of several tokens stands at its last, "" at the others."""
    texts, held, decode = [], [], tokenizer.decode
    for token in ids:
        held.append(token)
        texts.append("")
        text = decode(held)
        if not text.endswith(UNFINISHED):
            texts[-1], held = text, []
        elif len(held) == 4:  # no letter has more bytes: some are of none, and one may begin later
            cut = next((i for i in (1, 2, 3) if decode(held[:i]) + decode(held[i:]) == text), 4)
            texts[cut - 5], held = decode(held[:cut]), held[cut:]
    if held:
        texts[-1] = decode(held)
    return texts
