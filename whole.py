"""
Whether what a run reads and writes is whole: model folders, numbers of an update, checkpoints.

A model's folder is looked at before anything is spent, nothing is learnt from a loss that is no
number, and a run goes on from the newest checkpoint that is as it was written.
"""
import contextlib
import json
import math
import zipfile
import zlib
from pathlib import Path

# ----------------------------------------------------------------------------------------- models

def check_model(path):
    """Look at a model's folder: config, tokenizer and weights; ValueError names the broken file."""
    folder = Path(path)
    if not folder.is_dir():
        return  # a name on the hub
    config, tokenizer = read_json(folder / "config.json"), folder / "tokenizer.json"
    if "model_type" not in config:
        raise ValueError(f"{folder}/config.json says no 'model_type'; copy or download it again")
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


# -------------------------------------------------------------------------------------- checkpoints

def marks(out):
    """What the checkpoints in OUT say of themselves, the newest first: step, world, log_bytes."""
    found = {}
    for file in Path(out).glob("checkpoints/step-*/mark.json"):
        with contextlib.suppress(ValueError, KeyError):
            mark = json.loads(file.read_text())
            found[mark["step"]] = mark
    return [found[step] for step in sorted(found, reverse=True)]


def broken_shard(folder, rank, ranks):
    """The first of this rank's files of a checkpoint that is not what was written, or "".

    torch.save writes zip archives, whose checksums torch.load does not look at.
    """
    for file in sorted(Path(folder).glob("*.pt"))[rank::ranks]:
        try:
            with zipfile.ZipFile(file) as archive:
                if archive.testzip():
                    return str(file)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError):
            return str(file)
    return ""
