"""
Whether what a run reads and writes is whole: model folders, numbers of an update, checkpoints.

A model's folder is looked at before anything is spent, nothing is learnt from a loss that is no
number, and a run goes on from the newest checkpoint that is as it was written.
"""
import contextlib
import json
import math
import os
import re
import shutil
import sys
import zipfile
import zlib
from pathlib import Path

from guard import naming
from records import write_text

TORCH_FULL = "iostream error|unexpected pos|write failed"  # its words for a disk that is full

# ----------------------------------------------------------------------------------------- models

def check_model(path):
    """Look at a model's folder: config, tokenizer and weights; ValueError names the broken file."""
    folder = Path(path)
    if not folder.is_dir():
        if "=" in str(path):  # which no name on the hub has
            raise ValueError(f"{path} is no folder; is the path right?")
        return  # a name on the hub
    check_config(folder)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists() and not (folder / "tokenizer.model").exists():
        raise ValueError(f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json "
                         "of its base there")
    if tokenizer.exists():
        read_json(tokenizer)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = [folder / name for name in sorted({*read_json(index)["weight_map"].values()})]
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise ValueError(f"{index} names {len(missing)} files that are missing, {missing[0]} "
                             "first: copy or download them again")
    else:
        shards = [*folder.glob("model*.safetensors")]
    if not shards and not [*folder.glob("*.bin")]:
        raise ValueError(f"{path} has no weights; copy model.safetensors there")
    for shard in shards:
        check_shard(shard)


def check_config(folder):
    """Look at a model folder's config.json."""
    if "model_type" not in read_json(folder / "config.json"):
        raise ValueError(f"{folder}/config.json says no 'model_type'; copy or download it again")


def read_json(path):
    """The table in a model's file; ValueError names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a model's folder?") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy or download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no table of keys; copy or download it again")
    return found


def check_shard(path):
    """A safetensors file is as long as its head says: 8 bytes, the head's length, come first."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = int.from_bytes(file.read(8), "little")
        try:
            ends = [entry["data_offsets"][1] for name, entry in
                    json.loads(file.read(min(head, size))).items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError):
            ends = None
    if not ends or 8 + head + max(ends) != size:
        raise ValueError(f"{path} is cut short or broken ({size:,} bytes); copy or download it "
                         "again")


def check_finite(out, step, **numbers):
    """SystemExit where a number of an update, which is the same on all ranks, is no number."""
    bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if bad:
        good = [mark["step"] for mark in marks(out)]
        kept = (f"{out}/checkpoints/step-{good[0]} is the last good checkpoint: --resume goes on "
                "with it" if good else "there is no checkpoint: begin again")
        raise SystemExit(f"update {step}: {' and '.join(bad)}, and nothing of it is saved. {kept}, "
                         "with a lower --lr, or data without what broke it")


def check_parameters(engine, out, step):
    """SystemExit on every rank where a weight is no number, before it is saved."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()  # the last ranks' tails are padding, which nobody has written
    shards = [p.ds_tensor[:max(0, p.ds_numel - rank * p.ds_tensor.numel())]
              for p in engine.module.parameters()]
    bad = torch.stack([(~shard.isfinite()).any() for shard in shards]).any().float()
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    check_finite(out, step, **{"a weight": math.nan if bad else 0.0})


# -------------------------------------------------------------------------------------- checkpoints

@contextlib.contextmanager
def new_model(out):
    """OUT.part, to save a model in, whose files take their place in OUT once all are whole.

    config.json marks the folder as whole: it goes first, and comes back last.
    """
    from safetensors import SafetensorError

    part = Path(f"{out}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with naming(part):
            yield part
        mode = (part / "config.json").stat().st_mode  # as the umask says; safetensors' are 0600
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "config.json").unlink(missing_ok=True)
        for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
            if file.is_dir():  # chat templates, of a tokenizer that has several
                shutil.rmtree(Path(out) / file.name, ignore_errors=True)
            else:
                file.chmod(mode)
            os.replace(file, Path(out) / file.name)
    except SafetensorError as error:
        raise OSError(f"{part}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def new_checkpoint(out, step, rank):
    """The folder that every rank writes its shard of a checkpoint to; it counts once all are there
    and it has its mark.json. It and the one before it are kept."""
    import torch.distributed as dist

    tag = Path(out) / "checkpoints" / f"step-{step}"
    try:
        with naming(tag):
            yield tag
    except (RuntimeError, OSError) as error:
        shutil.rmtree(tag, ignore_errors=True)
        if isinstance(error, OSError) or not re.search(TORCH_FULL, str(error)):
            raise
        raise OSError(f"{tag} could not be written; make room, and the same command goes on from "
                      "the checkpoint before") from None
    dist.barrier()  # every rank's shard is on disk
    if rank == 0:
        mark = {"step": step, "world": dist.get_world_size(), "files": len([*tag.glob("*.pt")]),
                "log_bytes": (Path(out) / "log.jsonl").stat().st_size}
        write_text(tag / "mark.json", json.dumps(mark) + "\n")
        tidy(out, step)
    dist.barrier()


def save_checkpoint(engine, args, step, rank, last):
    """Save what it takes to go on, every --save-every updates; and leave after the last one."""
    if last or (args.save_every and step % args.save_every == 0):
        check_parameters(engine, args.out, step)
        with new_checkpoint(args.out, step, rank) as folder:
            engine.save_checkpoint(folder.parent, tag=folder.name, save_latest=False)
    if last:
        sys.exit(f"stopped and saved after update {step}; the same command with --resume goes on")


def restore(engine, out, resume, rank):
    """The number of updates made so far: 0, or with `resume` those of the checkpoint it loads."""
    step = newest_whole(out, resume, rank)
    if step:
        engine.load_checkpoint(Path(out) / "checkpoints", tag=f"step-{step}")
    return step


def tags_of(out):
    """{step: folder} of the checkpoints in OUT, whole or not; a copy under another name is none."""
    tags = Path(out).glob("checkpoints/step-*")
    return {int(tag.name[5:]): tag for tag in tags if tag.name[5:].isdigit()}


def marks(out):
    """What the checkpoints in OUT say of themselves, the newest first: step, world, log_bytes."""
    found = []
    for _, tag in sorted(tags_of(out).items(), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            mark = json.loads((tag / "mark.json").read_text())
            found.append({key: int(mark[key]) for key in ("step", "world", "files", "log_bytes")})
    return found


def newest_whole(out, resume, rank):
    """The updates made until the newest checkpoint in OUT that is as it was written, 0 of none.

    What came after it is removed, of the log too, so that it reads as unbroken. SystemExit where
    the checkpoint is another number of ranks', where none is whole, and where there is a run in OUT
    that it is not asked to resume.
    """
    import torch.distributed as dist

    folder, found = Path(out) / "checkpoints", marks(out)
    if not resume and (found or any(log.stat().st_size for log in Path(out).glob("log.jsonl"))):
        sys.exit(f"{out} holds a run already: --resume goes on with it; or choose another --out")
    dist.barrier()  # all have looked before the log is made
    marked = {step for step, tag in tags_of(out).items() if (tag / "mark.json").exists()}
    for step in marked - {mark["step"] for mark in found}:
        if rank == 0:
            print(f"{folder}/step-{step}/mark.json is damaged: it is left out", flush=True)
    for mark in found:
        damaged = broken_part(folder / f"step-{mark['step']}", mark, rank)
        if not damaged:
            break
        if rank == 0:
            print(f"{damaged} is damaged: the checkpoint before it is taken", flush=True)
    else:
        if marked:
            sys.exit(f"{folder}: no checkpoint in it is whole. Remove this folder, and the same "
                     "command begins at the first update")
        mark = {"step": 0, "log_bytes": 0}
    if rank == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
        tidy(out, mark["step"])
        cut_back(Path(out) / "log.jsonl", mark["log_bytes"])
    dist.barrier()
    return mark["step"]


def broken_part(tag, mark, rank):
    """What is damaged of a checkpoint, "" if nothing is; each rank looks at a share of its files.

    torch.save writes zip archives, whose checksums torch.load does not look at.
    """
    import torch.distributed as dist

    ranks, shards = dist.get_world_size(), sorted(tag.glob("*.pt"))
    if mark["world"] != ranks:
        sys.exit(f"{tag}: saved by {mark['world']} ranks, and ZeRO-3 shards load only into as "
                 f"many; start {mark['world']} ranks, not {ranks}")
    found = [None] * ranks
    dist.all_gather_object(found, [str(file) for file in shards[rank::ranks] if not sound(file)])
    lost = [f"{tag} ({len(shards)} of {mark['files']} files)"] * (len(shards) != mark["files"])
    return ", ".join(sum(found, lost))


def sound(file):
    """Whether a zip archive's checksums are those of its contents."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError):
        return False


def tidy(out, step):
    """Remove all checkpoints in OUT but those of `step` and the one before it."""
    kept = [mark["step"] for mark in marks(out) if mark["step"] <= step][:2]
    for number, tag in tags_of(out).items():  # a later one is damaged, or half of a killed save
        if number not in kept:
            shutil.rmtree(tag)


def cut_back(log, size):
    """Cut a log to its first `size` bytes, and to whole lines where it has lost some."""
    with open(log, "ab+") as file:
        file.seek(0)
        whole = file.read(size)
        if len(whole) < size:
            print(f"{log} has lost lines; the run goes on without them", flush=True)
        file.truncate(whole.rfind(b"\n") + 1)
