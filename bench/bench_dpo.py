"""
What an update of dpo.py costs beside one of sft.py on the same rows: tokens/s, side by side.

    update     learn_pairs(): a pass without gradients, one with them, AdamW's step
    reference  the pass by the starting weights, once in training, so in an epoch's every update
    sft        sft.py's loop over the same episodes in the same micro-batches, AdamW's step

All under ZeRO-3 on one rank, at a learning rate of 0, in turns; medians are printed. Three forwards
and a backward stand beside one of each, so that 0.6 is to be had where a backward takes as long as
two forwards. The goal is 0.5.

    python -m toolstar.pairs --episodes out/tiny/rl/rollouts --by success --out out/pairs
    python bench/bench_dpo.py --model out/tiny/rl --data out/pairs/train.jsonl
"""
import os
import sys

import torch
from bench_grpo import clocks, ratio  # which puts the repository on the path, too

import dpo

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29503"}  # what torchrun sets for a single rank


def flags():
    p = dpo.Parser(description=__doc__, formatter_class=dpo.Help)
    add = p.add_argument
    add("--model", required=True, help="HF folder of the policy")
    add("--data", required=True, help="pairs, of python -m toolstar.pairs")
    add("--pairs", type=int, default=16, help="of an update")
    add("--rounds", type=int, default=5, help="timed updates of each, after one that warms up")
    add("--pack-tokens", type=int, default=4096, help="as in both stages")
    return p.parse_args()


def sft_update(engine, rows, packed, device, args):
    """sft.py's (3) and (4), on one rank."""
    tokens = sum(sum(row.mask) for row in rows)
    for micro in dpo.deal([len(row.ids) for row in rows], 1, args.pack_tokens, packed)[0]:
        logps, _ = engine(*dpo.collate([rows[i] for i in micro], packed, device))
        engine.backward(-logps.sum() / tokens)
    engine.step()


def main():
    ours = flags()
    os.environ.update(ALONE)
    sys.argv = f"""dpo.py --model {ours.model} --lr 0 --no-checkpointing
        --pack-tokens {ours.pack_tokens}""".split()
    args = dpo.flags()
    rank, ranks, device = dpo.setup()
    template = dpo.evaluate.load_template(args.model)
    pairs = dpo.load_pairs(ours.data, template, args.cutoff, rank)[:ours.pairs]
    policy, packed = dpo.load(args, template, device)
    engine, rows = dpo.zero3(policy, args.lr, device), dpo.episodes_of(pairs)
    machine, seconds = (packed, rank, ranks, device, args), {}
    for _ in range(ours.rounds + 1):
        for name in ("reference", "update", "sft"):
            began = clocks()
            if name == "reference":
                reference = dpo.sum_logps(engine, rows, *machine)
            elif name == "update":
                dpo.learn_pairs(engine, rows, reference, *machine)
            else:
                sft_update(engine, rows, packed, device, args)
            seconds.setdefault(name, []).append(clocks() - began)
    reference, update, sft = (spent[1:] for spent in seconds.values())
    whole = [a + b for a, b in zip(reference, update, strict=True)]
    tokens = sum(len(row.ids) for row in rows)
    speeds = [tokens / torch.stack(spent).median(0).values[0] for spent in (whole, sft)]
    print(f"{len(pairs)} pairs, {tokens} tokens, {torch.get_num_threads()} threads: dpo.py "
          f"{speeds[0]:.0f} tokens/s, {ratio(whole, sft)} of sft.py's {speeds[1]:.0f}; without the "
          f"reference {ratio(update, sft)}", flush=True)


if __name__ == "__main__":
    main()
