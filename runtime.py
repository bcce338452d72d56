"""
What every stage runs on: the parts that are needed to train, but teach nothing about training.

    (1) flags              a Mistake, which you can fix, is one line; all else is a traceback
    (2) processes          one writer per folder, saving on SIGTERM, pools of workers
    (3) records            jsonl files and the log
    (4) grammars           texts drawn from files of alternatives
    (5) the chat template  a conversation as tokens, exactly as the engine sees and samples them
    (6) the engine         vLLM: its settings, tool calls that run meanwhile, tensor parallelism
    (7) endpoints          OpenAI-compatible servers
    (8) the trainer        a model under DeepSpeed ZeRO-3: load, shard, gather, save, resume
    (9) worlds and tasks   --env and --tasks

To take a stage home, copy it together with this file; grpo.py and arpo.py also need sandbox.py.
"""
import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"Python 3.11 is needed, and this is {sys.version.split()[0]}. "
             "PYTHON=/path/to/python3.11 bash run.sh ... makes a .venv with it")

import argparse
import contextlib
import csv
import ctypes
import datetime
import fcntl
import hashlib
import importlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
import types
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

# ---------------------------------------------------------------------------------------- (1) flags


class Mistake(Exception):
    """What the user of a command can fix: a flag, a path, a row of data. Its text says how."""


def run(program, function, *args):
    """Call function(*args). A Mistake ends the program with one line; any other exception keeps its
    traceback, which names the file and the line."""
    try:
        return function(*args)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; repeat the command to continue", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Mistake as mistake:
        raise SystemExit(f"{program}: {mistake}") from None


def run_ranks(main):
    """Run a stage's main as a rank of torchrun. Without torchrun (`python grpo.py`), start torchrun
    with one rank per GPU, or with one rank on a CPU."""
    if "RANK" in os.environ:
        run(sys.argv[0], main)
        return
    import torch

    # after SIGTERM ranks save at the end of their update; by default torchrun kills them after 30 s
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--shutdown-timeout",
             "3600", "--nproc_per_node", str(max(1, torch.cuda.device_count())), *sys.argv]
    os.execv(words[0], words)


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line instead of printing the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """--help shows the docstring as it is written, and each flag's default."""


def bounded(kind, least, most=math.inf, above=None):
    """A flag type: an int or float from `least` to `most`, both included, or more than `above`."""
    def parse(text):
        value = kind(text)
        low = value >= least if above is None else value > above
        if not (low and value <= most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value
    parse.__name__ = kind.__name__  # argparse names the type in its message
    return parse


COUNT, NATURAL = bounded(int, 1), bounded(int, 0)  # from 1, from 0
SEED = bounded(int, 0, 2**32 - 1)  # the seeds that NumPy, and therefore vLLM, accepts
SHARE, AMOUNT, POSITIVE = bounded(float, 0, 1), bounded(float, 0), bounded(float, 0, above=0)
PART, PORT = bounded(float, 0, 1, above=0), bounded(int, 0, 65535)


def web_address(text):
    """A flag type: the address of a server."""
    if not re.match(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like http://host:8000/v1")
    return text


def endpoint(text):
    """A flag type: URL=MODEL -> (URL, MODEL)."""
    url, _, model = text.rpartition("=")
    return web_address(url), model


def trainer_flags(p, tokens):
    """The flags that all trainers share: memory and running -> what adds a flag to the latter.
    tokens: default of --pack-tokens."""
    add = p.add_argument_group("memory (python -m look.memory estimates it)").add_argument
    add("--pack-tokens", type=COUNT, default=tokens, help="most tokens of a micro-batch, padding "
        "included; a longer episode is a micro-batch of its own")
    add("--keep-activations", type=NATURAL, default=0, metavar="K", help="keep the activations of "
        "micro-batches of at most K tokens, padding included, for the backward pass; those of "
        "larger ones are recomputed, which takes a fourth longer but less memory")
    add("--offload", action="store_true", help="run AdamW on the CPU and keep its states in the "
        "host's memory: the same updates, slower")
    add("--lora", type=COUNT, default=0, metavar="R", help="train adapters of rank R at all linear "
        "layers instead of all weights; use about 10 times the --lr (add_adapters)")
    add = p.add_argument_group("running").add_argument
    add("--save-every", type=NATURAL, default=0, help="updates between two checkpoints; 0: none")
    add("--resume", action="store_true", help="resume from the last checkpoint in OUT, if any")
    add("--track", choices=("wandb", "trackio"), help="also log to this package")
    return add


# ------------------------------------------------------------------------------------ (2) processes


def rank():
    return int(os.environ.get("RANK", 0))


def say(text):
    """Print a line once, not on every rank."""
    if rank() == 0:
        print(text, flush=True)


def lock_folder(out, name=".writer"):
    """Make this process (rank 0) the only writer of a folder. The kernel releases the lock when the
    process ends."""
    if rank() == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
        lock = os.open(Path(out) / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"another run is writing to {out}: wait for it, stop it, or choose "
                          "another --out") from None


def lock_file(path):
    """Make this process the only writer of a file."""
    lock_folder(Path(path).parent, f".{Path(path).name}.writer")


def die_with_parent():
    """Have the kernel (Linux) kill this process when its parent dies in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def watch_sigterm():
    """Return interrupted(device): whether any rank has received SIGTERM, so that all save and exit.

    torchrun kills ranks that have not exited 30 s after SIGTERM; its --shutdown-timeout must be
    longer than one update.
    """
    import torch
    import torch.distributed as dist

    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    def interrupted(device):
        flag = torch.tensor(float(bool(received)), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # every rank must call this
        return bool(flag)
    return interrupted


def start_worker():
    """Of a worker: end with the parent, which also handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


def workers(number):
    """A pool of processes. Spawned, because SQLite must not cross a fork."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), start_worker)


def progress(rows, name, total, initial=0, unit="it"):
    """A tqdm bar; in a file or a pipe, a line every half minute."""
    from tqdm import tqdm

    sparse = {} if sys.stderr.isatty() else {"mininterval": 30, "ncols": 100}
    return tqdm(rows, name, total, initial=initial, unit=unit, **sparse)


# -------------------------------------------------------------------------------------- (3) records


def read_jsonl(path, torn=False):
    """The records of a jsonl file.

    torn: leave out an unfinished last line, as the file of a live run may have.
    """
    rows = []
    if not Path(path).is_file():
        raise Mistake(f"{path} is not a file")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                if torn and not line.endswith(b"\n"):
                    break
                raise Mistake(f"{path}, line {number}: not JSON ({error})") from None
    return rows


def recover_jsonl(path, check=None):
    """The records that a killed run left in a file, [] if there is no file. Only the writer may
    call this: it cuts off an unfinished last line, unless check(rows) raises an exception."""
    if not Path(path).exists():
        return []
    rows = read_jsonl(path, torn=True)
    if check:
        check(rows)
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return read_jsonl(path)


def append_jsonl(path, row):
    """Add one record and flush it, so that a killed run keeps every finished episode."""
    with open(path, "a", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_jsonl(path, rows):
    """Write a file of records, completely or not at all."""
    with replacing(path) as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_text(path, text):
    """Write a text file, completely or not at all."""
    with replacing(path) as out:
        out.write(text)


@contextlib.contextmanager
def replacing(path):
    """Open a text file under a temporary name; once complete, it replaces `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8", errors="replace") as out:
        yield out
    os.replace(temporary, path)


def write_log(line, args):
    """Append the numbers of an update to OUT/log.jsonl, and send them to the package of --track."""
    append_jsonl(Path(args.out) / "log.jsonl", line)
    if args.track:
        numbers = {key: value for key, value in line.items() if isinstance(value, (int, float))}
        open_tracker(args.track, args.out).log(numbers, step=line["step"])


@lru_cache
def open_tracker(tool, out):
    """Start, or continue, a run of wandb or trackio, which have the same interface."""
    package, file = importlib.import_module(tool), Path(out) / "wandb-id"
    if tool == "wandb" and not file.exists():  # another folder of this name is another run
        write_text(file, os.urandom(8).hex())
    package.init(project="star", name=str(out), resume="allow",
                 **{"id": file.read_text()} if tool == "wandb" else {})
    return package


# ------------------------------------------------------------------------------------- (4) grammars


def entries(path):
    """Read a file of lines "name: text" -> {name: text}; an indented line continues the last."""
    lines = re.sub(r"\n +", " ", path.read_text(encoding="utf-8").strip()).split("\n")
    return dict(line.split(":", 1) for line in lines)


def fill(rng, forms, values):
    """Draw one of the alternatives that slashes separate, and fill in its {slots}."""
    form = rng.choice(re.split(r"\s/(?=\s)", forms))
    return " ".join(form.split()).format(**values)


def join_words(words):
    """["a", "b", "c"] -> "a, b and c"."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


def portions(n, weights):
    """Split n by weight into whole numbers that add up to n."""
    marks = [n * part // sum(weights) for part in itertools.accumulate(weights, initial=0)]
    return [end - start for start, end in itertools.pairwise(marks)]


def stable_draw(text):
    """A large pseudo-random number that depends on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


# ---------------------------------------------------------------------------- (5) the chat template
#
#   <|im_start|>system\n S <|im_end|>\n<|im_start|>user\n Q <|im_end|>\n<|im_start|>assistant\n R
#   <|im_end|> \n<|im_start|>user\n O <|im_end|>\n<|im_start|>assistant\n R ...
#      end           before O            after O
#
# Training and play append tokens and never render a conversation again. A template that would
# render a longer conversation as other tokens (it drops earlier thoughts, or frames some turns
# differently) is refused, because the policy would be trained on texts that never occur in play.

# some templates open a thought at the end of the prompt; our replies bring their own
OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
TAGS = {"<think>", "</think>", "<tool_response>", "</tool_response>"}  # observations have these
DATE = time.strptime("2024-07-26", "%Y-%m-%d")  # for templates that print today's date
PROBE = re.compile(r"(.*?)(<think>\s*thought 1.*?call 1)(.*?)<tool_response>\nresult 1\n"
                   r"</tool_response>(.*?)(<think>\s*thought 2.*?call 2).*?result 2\n"
                   r"</tool_response>(.*)", re.DOTALL)


class Template:
    """A tokenizer, and the text that its chat template puts around an observation.

    end: the id that ends a reply in training; ends: all ids that end a sampled reply. before,
    after: the text around an observation, from the end token to the next reply. lead: the part of
    `after` that a prompt lacks.
    """

    def __init__(self, tokenizer, path, stops=()):
        self.tokenizer, errors = tokenizer, []
        # some templates keep thoughts only before a tool's turn, or only from a field of their own
        for in_content, role in itertools.product((True, False), ("user", "tool")):
            try:
                self.take_apart(role, in_content)
                break
            except Exception as error:  # whatever a template raises: jinja2 runs the model's code
                errors.append(error)
        else:
            raise Mistake(f"{path}: its chat template cannot be continued turn by turn: "
                          f"{errors[0]}. Copy the folder and give the copy a "
                          "chat_template.jinja that can, such as ChatML's")
        self.ends = {self.end, tokenizer.eos_token_id, *stops} - {None}

    def take_apart(self, role, in_content):
        """Find what stands around observations; ValueError if appending is not rendering."""
        talk = [{"role": "system", "content": "probe"}, {"role": "user", "content": "query"}]
        for n in "12":
            thought, call = f"thought {n}", f"call {n}"
            reply = ({"content": f"<think>\n{thought}\n</think>\n\n{call}"} if in_content else
                     {"content": call, "reasoning_content": thought})
            seen = f"<tool_response>\nresult {n}\n</tool_response>"
            talk += [{"role": "assistant", **reply}, {"role": role, "content": seen}]
        whole = self.text(talk)
        found = PROBE.fullmatch(whole)
        if not found:
            raise ValueError("it drops, repeats or moves thoughts or turns")
        prompt, one, before, self.after, two, final = found.groups()
        self.lead = prompt.removeprefix(self.opened(self.text(talk[:2])))
        if self.lead.strip():
            raise ValueError(f"its replies begin with {self.lead!r}, its prompt does not")
        special = {mark.content: id for id, mark in self.tokenizer.added_tokens_decoder.items()}
        end_text = max((mark for mark in special if before.startswith(mark)), key=len, default="")
        if not end_text:
            raise ValueError(f"a reply ends with {before[:20]!r}, which is no token")
        self.end, self.end_text, self.before = special[end_text], end_text, before[len(end_text):]
        # no query, page or program may end or open a turn: its special tokens are broken up
        marks = {mark.content for mark in self.tokenizer.added_tokens_decoder.values()
                 if mark.special} | {end_text, self.before.strip(), self.after.strip()}
        self.forged = re.compile("|".join(f"{re.escape(mark[0])}(?={re.escape(mark[1:])})"
                                          for mark in sorted(filter(str.strip, marks - TAGS))))
        ids = self.prompt(talk[:2])
        for reply, turn in ((one, talk[3]), (two, talk[5])):
            ids += [*self.encode(reply), self.end, *self.between(turn)]
        if ids != self.encode(self.opened(whole) + self.lead):
            raise ValueError("it frames some turns differently, or changes earlier ones")
        if self.before.endswith("<tool_response>\n"):  # our observations already have these tags
            self.before = self.before.removesuffix("<tool_response>\n")
            self.after = self.after.removeprefix("\n</tool_response>")

    @staticmethod
    def opened(text):
        """The text without a thought that the template has opened at its end."""
        return OPENED.sub("", text)

    def text(self, messages):
        """The conversation as text, up to where the model's next reply begins."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True,
            strftime_now=lambda form: time.strftime(form, DATE))

    def encode(self, text):
        """The ids of this text, without special tokens around it."""
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # half a character of a cut escape
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, messages):
        """The ids up to where the model's reply begins. If the last message is the assistant's, the
        model continues it."""
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        turns = [message | {"content": self.escape(message["content"])}
                 if message["role"] == "user" else message
                 for message in (messages[:-1] if begun else messages)]
        return self.encode(self.opened(self.text(turns)) + self.lead) + self.encode(begun)

    def escape(self, text):
        """The text without special tokens and headers of turns."""
        return self.forged.sub("‹", text)

    def between(self, message, closed=True):
        """The ids from the end of a reply to the beginning of the next, with `message` in between.

        closed: whether the reply brought its own end token; if not, the ids begin with one.
        """
        content = self.escape(message["content"])
        if message["role"] == "result":  # stands inside a reply, which continues after it
            return self.encode(content)
        # encode the end token as well, because some take the blank after them
        return self.encode(f"{self.end_text}{self.before}{content}{self.after}")[int(closed):]

    def reply(self, ids):
        """The ids that a model sampled -> (text without its end token, whether it had one)."""
        closed = bool(ids) and ids[-1] in self.ends
        return self.tokenizer.decode(ids[:-1] if closed else ids), closed


def is_talk(messages):
    """Whether messages are a conversation: each has a role and a text, only the first is of the
    system, and from the first reply on, replies alternate with other turns."""
    if not isinstance(messages, list) or not all(
            isinstance(message, dict) and isinstance(message.get("content"), str)
            and message.get("role") in ("user", "assistant", "result") + ("system",) * (i == 0)
            for i, message in enumerate(messages)):
        return False
    said = [message["role"] == "assistant" for message in messages]
    first = said.index(True) if True in said else len(said)
    return all(one != other for one, other in itertools.pairwise(said[first:]))


THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields that hold a reply's thought
UNTRAINED = ("weight", "loss_mask", "trainable", "train")  # 0 or false: not in the loss


def read_talk(messages, template, tools=None):
    """A conversation of training data, with each thought in front of its reply, and "untrained" at
    the replies that its author took out of the loss. ValueError if it is no conversation, or if
    training would leave out a part of it. tools: what the row has under this name."""
    if not messages or not is_talk(messages) or messages[0]["role"] == "assistant":
        raise ValueError("its 'messages' are not a conversation: system and user, each with a text "
                         "as 'content', then assistant alternates with user or result")
    if any("status" not in tool for tool in tools or ()):  # an episode's are calls that were made
        raise ValueError("its 'tools' would be left out: write them into the system message")
    talk = []
    for message in messages:
        role, content = message["role"], message["content"]
        others = [key for key, value in message.items() if value and key not in (
            "role", "content", *THOUGHTS, *UNTRAINED)]
        if others:
            raise ValueError(f"a message has {others}, which would be left out: write it into the "
                             "content, as the model is to say it, or remove it")
        thoughts = [message[key] for key in THOUGHTS if message.get(key)]
        marks = [message[key] for key in UNTRAINED if message.get(key) is not None]
        if any(mark not in (0, 1) for mark in marks):
            raise ValueError(f"a message has a weight of {marks}: 0 and 1 are read")
        if role == "assistant":
            content = content.removesuffix(template.end_text)  # some data sets write it
            content = with_thought(content, thoughts[0]) if thoughts else content
            if template.escape(content) != content:
                raise ValueError(f"a reply contains a mark of the template: {content!r:.200}")
        talk.append({"role": role, "content": content, "untrained": 0 in marks})
    return talk


def load_template(path):
    """The Template of a folder or hub name; a Mistake says why it cannot be used."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer, GenerationConfig

    try:
        stops = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # generation_config.json is optional
        stops = None
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        why = next(iter(str(error).splitlines()), "")
        fetch = f" Where there is a network: hf download {path}" if not Path(path).is_dir() else ""
        raise Mistake(f"{path} is no folder or hub name of a model: {why}{fetch}") from None
    return Template(tokenizer, path, stops)


# ----------------------------------------------------------------------------------- (6) the engine

WAITING = 4  # most plays per engine slot: a play that waits for a tool takes no slot


def visible_gpus():
    """Names of the GPUs that this process may use. A Mistake if a CUDA build of PyTorch sees none,
    because it would silently train on the CPU, for weeks."""
    import torch

    # counting must not start CUDA, or vLLM could no longer fork its workers
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if not count and torch.version.cuda and chosen != "":
        raise Mistake("PyTorch sees no GPU (nvidia-smi). To run on the CPU on purpose, set "
                      "CUDA_VISIBLE_DEVICES= (empty)")
    return (chosen.split(",") if chosen else [str(i) for i in range(count)])[:count]


def open_llm(path, max_context, concurrency, tp, gpu_memory, **settings):
    """Start vLLM on a checkpoint: in bf16 on GPUs, in float32 on a CPU."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # FlashInfer's sampler needs nvcc at its first use, and requests with seeds never use it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # a separate engine process would outlive a killed parent and keep the GPU's memory
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    settings |= {"max_model_len": max_context, "max_num_seqs": concurrency,
                 "tensor_parallel_size": tp, "enable_prefix_caching": True}
    if visible_gpus():
        settings |= {"dtype": "bfloat16", "gpu_memory_utilization": gpu_memory}
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a trainer uses them too
        # no chunked prefill: the CPU build cannot rewind a request's seeded generator
        settings |= {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False,
                     "max_num_batched_tokens": max(max_context, 8192), "block_size": 32}
    from vllm import LLM

    return LLM(str(path), **settings)


def load_engine(args, device):
    """A trainer's own vLLM engine, or with --tp this rank's part of one."""
    llm = open_llm(args.model, args.context, args.concurrency, args.tp, args.gpu_memory,
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


def renew_head(model):
    """Update the packed copy of the head that vLLM's CPU build multiplies by: a reload does not do
    so if the head is tied to the embedding."""
    head = getattr(model, "lm_head", None) or model.model.embed_tokens
    head.quant_method.process_weights_after_loading(head)


def add_request(engine, number, ids, template, stops, seed, **sampling):
    """Ask an engine for the reply that follows these tokens. seed: a text. Each reply has its own,
    so that it does not depend on the other requests in the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.add_request(number, {"prompt_token_ids": list(ids)}, SamplingParams(
        **sampling, stop=list(stops), stop_token_ids=sorted(template.ends),
        detokenize=bool(stops), output_kind=RequestOutputKind.FINAL_ONLY,
        seed=random.Random(seed).getrandbits(31)))


class ToolCalls:
    """The plays that wait for an observation. If the world is slow, its tools run in threads, so
    that neither the engine nor another play waits for them; otherwise they are called at once.

    slow: whether to use threads; places: plays that the engine has room for. With --tp, is_leader:
    whether this rank calls the tools (once per engine), and broadcast hands their answers to the
    engine's other ranks.
    """

    def __init__(self, slow, places, is_leader=True, broadcast=None):
        self.pool = ThreadPoolExecutor(min(WAITING * places, 512)) if slow else None
        self.places, self.is_leader, self.broadcast = places, is_leader, broadcast if slow else None
        self.waiting, self.numbers = {}, itertools.count()  # {number: (play, Future)}

    def __len__(self):
        return len(self.waiting)

    def plays(self):
        """The plays that wait for an observation."""
        return [play for play, _ in self.waiting.values()]

    def room(self, live):
        """How many plays may begin while the `live` ones are in the engine."""
        return min(self.places, WAITING * self.places - len(self)) - len(live)

    def start(self, play, episode, action):
        """Begin to answer an action. Without one the play has ended: ready() yields it with None.
        """
        future = Future()
        if action and self.pool and self.is_leader:
            future = self.pool.submit(episode.act, action)
        elif not (action and self.pool):
            future.set_result(episode.act(action) if action else None)
        self.waiting[next(self.numbers)] = play, future

    def ready(self, block):
        """Yield (play, observation) for each answered action; block: first wait for a tool, at most
        0.05 s."""
        if self.pool and block and self.is_leader:
            wait([future for _, future in self.waiting.values()], 0.05, FIRST_COMPLETED)
        done = [(number, future.result()) for number, (_, future) in self.waiting.items()
                if future.done()]
        for number, text in self.broadcast(done) if self.broadcast else done:
            yield self.waiting.pop(number)[0], text

    def close(self):
        """Wait for the threads; each of them ends at its tool's deadline."""
        if self.pool:
            self.pool.shutdown()


def open_calls(slow, n, group, args):
    """The ToolCalls of a trainer's rank. All engines share n queries of `group` plays each."""
    engines = int(os.environ.get("WORLD_SIZE", 1)) // args.tp
    # at most an equal share, or the first engine to start would take the plays of all queries
    seats = max(group, min(args.concurrency, -(-n // engines) * group))
    return ToolCalls(slow, seats, is_tp_leader(args), args.tp > 1 and broadcast_in_tp)


def is_tp_leader(args):
    """Whether this rank is its engine's first. With --tp the others repeat what the leader does."""
    return rank() % args.tp == 0


def broadcast_in_tp(value):
    """With --tp: the leader's value, on all ranks of its engine, which must add the same requests
    in the same order."""
    from vllm.distributed import get_tp_group

    return get_tp_group().broadcast_object(value)


def shared_counter(name, n, args):
    """Yield 0 .. n-1, each number to one engine only: a free engine takes the next number."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    while True:
        i = is_tp_leader(args) and store.add(name, 1) - 1
        i = broadcast_in_tp(i) if args.tp > 1 else i
        if i >= n:
            return
        yield i


# ------------------------------------------------------------------------------------ (7) endpoints

LONGEST_REPLY = 200_000  # characters; 32K tokens of English are about 130,000
NO_ROOM = re.compile(r"context.{0,9}(length|size|window|limit)|too long|too many tokens|"
                     r"maximum.{0,20}length", re.IGNORECASE)  # how servers say so


class ChatError(Mistake):
    """An endpoint gave no usable reply, after all retries."""


class Refused(ChatError):
    """An endpoint refused one request, or answered it without text; it may answer others. stop: why
    the request's episode ends: context and length are limits of tokens."""

    def __init__(self, text, stop="refused"):
        super().__init__(text)
        self.stop = stop


class Reply(str):
    """The text of a reply. tokens: of the whole conversation including it, 0 if unknown. cut:
    whether a limit of tokens ended it."""

    tokens, cut = 0, False


@lru_cache(maxsize=64)
def client_of(url, key, retries):
    """The openai package's client of an endpoint; threads may share it."""
    import openai

    base = url.rstrip("/").removesuffix("/chat/completions")
    return openai.OpenAI(base_url=base, api_key=key or "none", max_retries=retries)


def read_key(path):
    """The API key in a file, None without one."""
    return Path(path).read_text(encoding="utf-8").strip() if path else None


def chat(url, model, messages, temperature=1.0, top_p=1.0, max_tokens=None, timeout=1800, retries=6,
         api_key=None, stops=()):
    """The Reply of an OpenAI-compatible endpoint. Refused if this request gets none, ChatError if
    the endpoint is at fault. The openai package retries time-outs, broken connections and status
    408, 409, 429 and 5xx with growing pauses.

    stops: closing tags that end a reply and belong to it. If the last message is the assistant's,
    the reply continues it. max_tokens: None or 0 leaves the limit to the server.
    """
    import openai

    beyond = {"include_stop_str_in_output": True} if stops else {}  # of vLLM and SGLang
    begun = messages[-1]["role"] == "assistant"
    if begun:
        beyond |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        body = client_of(url, api_key, retries).chat.completions.create(
            model=model, messages=messages, temperature=temperature, top_p=top_p, timeout=timeout,
            max_tokens=max_tokens or openai.omit, stop=list(stops) or openai.omit,
            extra_body=beyond)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        # str(error) has a server's words in one form only
        told = f"{url}: status {error.status_code}: {error.body or error}"
        raise Refused(told, "context" if NO_ROOM.search(told) else "refused") from None
    except openai.APIError as error:
        raise ChatError(f"{url}: {error.body or error}, after {retries} retries, from model {model}"
                        ) from None
    if not getattr(body, "choices", None):  # a gateway's own message, or a web page
        raise Refused(f"{url}: no reply but {str(body)[:200]}")
    message = body.choices[0].message
    text, thought = message.content or "", getattr(message, "reasoning_content", None)
    ended = body.choices[0].finish_reason
    if not text.strip() and not begun:
        stop = "length" if ended == "length" else "refused"  # within a thought that is kept apart
        raise Refused(f"{url}: a reply without text ({ended})", stop)
    for stop in stops if ended == "stop" else ():  # most servers cut it off
        text += stop * (text.rfind(stop.replace("/", "")) > text.rfind(stop))
    if len(text) > LONGEST_REPLY:
        raise Refused(f"{url}: a reply of {len(text):,} characters fits into no context", "context")
    reply = Reply(text if begun else with_thought(text, thought))
    reply.tokens, reply.cut = body.usage.total_tokens if body.usage else 0, ended == "length"
    return reply


def with_thought(text, thought):
    """A reply with its thought in front, as <think>...</think>. Servers with a reasoning parser
    send the thought in a field of its own; without one, the prompt may have opened the thought."""
    thought = (thought or "").strip()
    if "<think>" in text:
        return text
    if "</think>" in text:
        return f"<think>{thought}{text}"
    return f"<think>{thought}</think>\n{text}" if thought else text


def spoken(reply):
    """A reply without the thought before it."""
    return reply.rpartition("</think>")[2].strip()


# ---------------------------------------------------------------------------------- (8) the trainer

ALPHA = 32  # as in LoRA Without Regret (thinkingmachines.ai/blog/lora) and TRL's guide to it
# bounds on the |dlogp| of two forwards, in float32 and bfloat16: of different shapes, of equal ones
ROUNDING, LEAK = {"cpu": 1e-4, "cuda": 0.25}, {"cpu": 1e-5, "cuda": 1e-3}
MEASURED = ("The first train to the coast leaves at nine.", "The last bus to the lake is full now.",
            "A ferry stops here only once on Sundays.")


LOGITS = 30_000_000  # at most this many logits are computed at a time (120 MB in float32)


@lru_cache
def chunked_logps():
    """The function (hidden, weight, targets, temperature) -> log pi and entropy of the targets, of
    shapes (N, H), (V, H), (N,) and a number -> (N,), (N,), that never holds (N, V) logits.

    Forward and backward process a chunk of tokens at a time, and backward recomputes the chunk's
    logits. With p = softmax(h W^T / t): d logp_y / d logits = (onehot_y - p) / t. The gradient of
    the weight is summed over chunks in float32: in bfloat16, which torch.utils.checkpoint would sum
    in, 171 chunks lose 2.8 % of it, and 0.3 % in float32. No gradient flows through the entropy.
    """
    import torch

    class ChunkedLogps(torch.autograd.Function):
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
            ctx.mark_non_differentiable(entropy)
            return logps, entropy

        @staticmethod
        def backward(ctx, grad, _):
            hidden, weight, targets = ctx.saved_tensors
            grad_hidden, grad_weight = torch.empty_like(hidden), None
            if ctx.needs_input_grad[1]:  # not with --lora
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            for i in range(0, len(hidden), ctx.chunk):
                some = slice(i, i + ctx.chunk)
                g = grad[some, None].float()
                logits = (hidden[some] @ weight.T).float().div_(ctx.temperature)
                d = torch.softmax(logits, -1).mul_(-g).scatter_add_(-1, targets[some, None], g)
                d = d.div_(ctx.temperature).to(hidden.dtype)
                grad_hidden[some] = d @ weight
                if grad_weight is not None:
                    grad_weight += d.T @ hidden[some]
            if grad_weight is not None:
                grad_weight = grad_weight.to(weight.dtype)
            return grad_hidden, grad_weight, None, None

    return ChunkedLogps.apply


def setup():
    """Join the ranks that torchrun has started -> rank, ranks, device"""
    import torch
    import torch.distributed as dist

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

        compile_op(build_shm_op)
    # Create the process group before DeepSpeed does, and DeepSpeed uses it. It would bind a group
    # of its own to a device, and NCCL would then create vLLM's groups by splits that need all
    # ranks, which is known to hang.
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=4))  # longer than any play
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def compile_op(build):
    """Have DeepSpeed compile one of its C++ ops, at its first use.

    A killed build leaves a lock, for which PyTorch would wait for ever. So build under a lock of
    ours, which the kernel releases, and remove PyTorch's, which nobody holds meanwhile.
    """
    # each environment has headers of its own: with one folder for all, every switch would compile
    own = Path.home() / ".cache" / "torch_extensions" / sys.prefix.replace("/", "-")
    builds = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own)))
    builds.mkdir(parents=True, exist_ok=True)
    with open(builds / ".ours", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        for lock in builds.glob("**/lock"):
            lock.unlink(missing_ok=True)
        build()


def load(args, template, device, make_policy, collate):
    """Load --model, in bfloat16 on a GPU and float32 on a CPU -> Policy, whether to pack rows"""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available

    config = AutoConfig.from_pretrained(args.model)
    text = config.get_text_config()
    for name in vars(text):  # two forwards of the same tokens must be equal
        if "drop" in name and isinstance(getattr(text, name, None), float):
            setattr(text, name, 0.0)
    lm, loaded = AutoModelForCausalLM.from_pretrained(
        args.model, config=config, output_loading_info=True,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    if loaded["missing_keys"]:  # transformers would draw them at random
        raise Mistake(f"{args.model} lacks weights: {sorted(loaded['missing_keys'])[:3]} ..")
    # the padding token's row would get no gradient; in some models that token ends a turn
    lm.get_input_embeddings().padding_idx = None
    if args.lora:
        add_adapters(lm, args)
    flash = device.type == "cuda" and is_flash_attn_2_available(kernels_fallback_ok=True)
    if flash:
        lm.set_attn_implementation("flash_attention_2")
    lm.eval()  # routers of experts draw at random in training mode
    recompute_large(lm, args)
    longest = args.context if "context" in args else args.cutoff
    policy, packed = check_forwards(lm.to(device), make_policy, collate, template, flash, longest)
    if torch.distributed.is_initialized():  # ranks that pack differ from others in their batches
        agreed = torch.tensor(int(packed), device=device)
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN)
        packed = bool(agreed)
    return policy, packed


def recompute_large(lm, args):
    """Have the backward pass recompute the layers of micro-batches of more than --keep-activations
    tokens on any rank; it keeps the activations of the others."""
    import torch
    import torch.distributed as dist
    from transformers.modeling_layers import GradientCheckpointingLayer

    if lm.supports_gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    layers = [each for each in lm.modules() if isinstance(each, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True  # needed to recompute it; its parts stay in evaluation mode

    def choose(model, positional, named):
        ids = named["input_ids"] if "input_ids" in named else positional[0]
        most = torch.tensor(ids.numel(), device=ids.device)
        # of all ranks: a recomputed layer runs twice, and ZeRO-3 needs the same order on each
        if torch.is_grad_enabled() and dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        recompute = most.item() > args.keep_activations
        for layer in layers:
            layer.gradient_checkpointing = recompute
    lm.base_model.register_forward_pre_hook(choose, with_kwargs=True)


def check_forwards(lm, make_policy, collate, template, flash, longest):
    """Compare a few short forwards -> Policy, whether to pack rows

    Rows are packed with flash attention, unless that lets samples change each other, as in some
    models with linear attention. A Mistake if the model's logits are more than a product with its
    head (scaled, capped, with a bias), which is what Policy computes, or if a sample of `longest`
    tokens changes the rotary embeddings of the others in its micro-batch.
    """
    import torch

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
        policy = make_policy(lm)

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
    import torch

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


def add_adapters(lm, args):
    """--lora R: add an adapter to each linear layer but the head, and freeze all other weights.

    A layer of weight W then computes W + ALPHA / R * B A, with A (R, in) random and B (out, R) 0 at
    the start. "LoRA Without Regret" recommends all layers, this ALPHA, a rank of 1 to 32 for RL and
    256 for SFT, and 10 times the learning rate of full fine-tuning.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(args.seed)  # A is equal on all ranks
    inject_adapter_in_model(LoraConfig(r=args.lora, lora_alpha=ALPHA, target_modules="all-linear",
                                       task_type="CAUSAL_LM"), lm)
    # ZeRO-3 gathers a layer's weights for the backward pass if its input takes a gradient, which
    # the output of the frozen embedding does not
    lm.enable_input_require_grads()


def merge(layer):
    """The weights of a layer with its adapter: W + ALPHA / R * B A.

    In bfloat16 most entries of a small update are less than half a step of W, so rounding to the
    nearest value would give W back, and the engine would play without the update. So an entry is
    rounded up or down at random, with the probabilities that keep its mean. The seed is fixed:
    all ranks, and a resumed run, get the same weights.
    """
    import torch

    with torch.no_grad():
        weight = layer.base_layer.weight
        merged = weight.float() + layer.get_delta_weight("default").float()
        if weight.dtype == torch.bfloat16:  # its bits are the first 16 of those of a float32
            draw = torch.Generator(weight.device).manual_seed(0)
            bits = merged.view(torch.int32)  # of the same memory
            bits += torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=weight.device,
                                  generator=draw)
            bits &= -1 << 16
        return merged.to(weight.dtype)


def zero3(policy, args, device):
    """Shard parameters, gradients and AdamW's moments over all ranks -> the trainer, which is a
    DeepSpeed engine. With --offload AdamW runs on the CPU, whose memory then holds gradients,
    moments and master weights.

    Gradients accumulate over any number of trainer.backward calls until trainer.step.
    """
    import deepspeed
    import torch

    cuda = device.type == "cuda"
    trained = [p for p in policy.parameters() if p.requires_grad]  # with --lora only the adapters
    # both in a group: a run may be resumed with or without --offload
    groups = [{"params": trained, "fused": cuda or None, "bias_correction": True}]
    if args.offload:
        compile_op(deepspeed.ops.op_builder.CPUAdamBuilder().load)
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=args.lr, weight_decay=0.0)
    else:
        # fused: one kernel, which needs no temporary copies of the moments (8 bytes a parameter)
        optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.0, fused=cuda or None)
    config = {
        "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False,
        # gather whole layers: hooks on each of their modules cost time (docs/results.md)
        "zero_optimization": {"stage": 3, "overlap_comm": cuda, "leaf_module": {
            "classes": sorted(policy.lm._no_split_modules or ())}, "offload_optimizer": {
                "device": "cpu" if args.offload else "none", "pin_memory": cuda}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda}, "data_types": {"grad_accum_dtype": "fp32"}}
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def full_weights(trainer):
    """Yield (HF name, full tensor), one by one. All ranks must iterate together, to the end.

    With --lora R, the adapters are merged into the layers' weights.
    """
    import deepspeed

    lm = trainer.module.lm
    adapted = {f"{name}.base_layer.weight": layer for name, layer in lm.named_modules()
               if hasattr(layer, "get_delta_weight")}
    for name, parameter in lm.named_parameters():
        layer = adapted.get(name)
        if ".lora_" not in name:
            with deepspeed.zero.GatheredParameters([*layer.parameters()] if layer else [parameter]):
                weight = merge(layer) if layer else parameter.data
                yield name.replace(".base_layer", ""), weight
    saved = lm.state_dict()  # some models keep constants of routers or layers in buffers
    yield from ((name, buffer) for name, buffer in lm.named_buffers() if name in saved)


def save_model(trainer, template, out):
    """Write a plain HF folder. Every rank takes part."""
    import torch.distributed as dist

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
    import torch.distributed as dist

    if last or (args.save_every and step % args.save_every == 0):
        folder = Path(args.out) / "checkpoints"
        trainer.save_checkpoint(folder, tag=f"step-{step}", save_latest=False,
                                exclude_frozen_parameters=True)  # --lora: they are --model's
        dist.barrier()  # every rank's shard is on disk
        if rank() == 0:
            size = (Path(args.out) / "log.jsonl").stat().st_size
            write_text(folder / "latest", json.dumps(
                {"step": step, "log_bytes": size, "ranks": dist.get_world_size()}))
            for other in {*folder.glob("step-*")} - {folder / f"step-{step}"}:
                shutil.rmtree(other)
        dist.barrier()
    if last:
        sys.exit(f"stopped and saved after update {step}; repeat the command with --resume to "
                 "continue")


def restore(trainer, args):
    """The number of updates made so far: 0, or with --resume those of the checkpoint it loads. What
    the log says of later updates is cut off, because they are repeated."""
    import torch.distributed as dist

    out = Path(args.out)
    latest, log, settings = out / "checkpoints" / "latest", out / "log.jsonl", out / "settings.json"
    if log.exists() and not args.resume:
        raise Mistake(f"{out} already holds a run: --resume continues it; or choose another --out")
    if (out / "config.json").exists() and not latest.exists():
        raise Mistake(f"{out} holds a model and no checkpoint to resume: choose another --out")
    ranks = dist.get_world_size()
    mark = {"step": 0, "log_bytes": 0, "ranks": ranks}
    if latest.exists():
        mark = json.loads(latest.read_text())
    if mark["ranks"] != ranks:
        raise Mistake(f"{out} was trained by {mark['ranks']} ranks and its checkpoint is split "
                      f"into as many parts: resume with --nproc_per_node {mark['ranks']}")
    dist.barrier()  # all ranks have looked
    if rank() == 0:
        flags = json.loads(json.dumps(vars(args), default=str))
        before = json.loads(settings.read_text()) if mark["step"] else flags
        changed = [name for name in flags if before.get(name) != flags[name] and name != "resume"]
        if changed:
            print(f"{out}: resuming with another {', '.join(changed)} than before", flush=True)
        if args.track:  # now, so that a package that is missing ends the run here
            open_tracker(args.track, args.out)
        write_text(settings, json.dumps(flags, indent=1) + "\n")
        with open(log, "ab") as file:
            file.truncate(mark["log_bytes"])
    if mark["step"]:
        # save_checkpoint left out the weights that --lora freezes
        trainer.load_checkpoint(out / "checkpoints", tag=f"step-{mark['step']}",
                                load_module_strict=not args.lora)
        say(f"{out}: resuming after update {mark['step']}")
    dist.barrier()
    return mark["step"]


# ----------------------------------------------------------------------------- (9) worlds and tasks

WORLDS = {"travel": "travel.world", "tools": "toolstar.tools"}  # --env: module


def parse_args(parser, argv=None):
    """Parse the flags of a stage and those of the world that its --env names: a world's module may
    define flags(parser), which adds them. args.world_flags has their names."""
    argv = sys.argv[1:] if argv is None else argv
    before = argparse.ArgumentParser(add_help=False)
    before.add_argument("--env", default=parser.get_default("env"))
    env, own = before.parse_known_args(argv)[0].env, {action.dest for action in parser._actions}
    module = None
    try:
        module = load_world(env)
    except Mistake as mistake:
        if not {"-h", "--help"} & {*argv}:
            parser.error(mistake)
    if hasattr(module, "flags"):
        module.flags(parser.add_argument_group(f"the world (--env {env})"))
    parser.set_defaults(world_flags=[action.dest for action in parser._actions
                                     if action.dest not in own])
    return parser.parse_args(argv)


def load_world(env):
    """The module of --env: travel, tools, the name or file of a module with open_world(args), or
    FILE.py:CLASS, a plain environment class (adapters/plain.py)."""
    name, _, class_name = WORLDS.get(env, env).partition(":")
    if name.endswith(".py"):  # it can import the files beside it
        sys.path.append(str(Path(name).resolve().parent))
        name = Path(name).stem
    try:
        module = importlib.import_module(name)
        if class_name:
            from adapters.plain import PlainWorld

            factory = getattr(module, class_name)
            return types.SimpleNamespace(open_world=lambda args: PlainWorld(factory))
    except ModuleNotFoundError as error:
        if error.name not in ("adapters", name.partition(".")[0]):
            raise  # a package that the world imports
        raise Mistake(f"--env {env} needs {error.name}, which is not here: copy the folder "
                      f"{error.name}/ too, or name another module or file") from None
    return module


def open_world(args):
    """The world of --env (docs/environment.md)."""
    return load_world(args.env).open_world(args)


def prepare(world, episodes):
    """Tell a world which episodes it will judge next, if it has this member -> the Futures that
    their verdicts would have to wait for."""
    found = world.prepare(episodes) if hasattr(world, "prepare") else ()
    return [future for future in found or () if not future.done()]


def check_world(world, task, args):
    """Play a scripted episode before an engine starts, so that a mistake in a world shows within
    seconds; evaluate.py --check also calls its tools -> lines of text that describe the results"""
    episode = world.episode(task, "check", args)
    lines = [f"task {task['id']!r}: {str(task.get('query', ''))[:80]!r}"]
    lines += [f"{one['role']}: {one['content'][:80]!r}" for one in episode.messages]
    if "branch" in args:  # arpo.py, whose plays fork
        episode.fork("check")
    if getattr(args, "check", False):
        lines += call_tools(world, episode)
    episode.begin("<think>.</think><answer>.</answer>")
    episode.stop = episode.stop or "turns"
    plan, score, strict = world.verdict(episode)
    episode.record("check")
    return [*lines, f"the last reply stops the episode: {episode.stop}", f"plan: {plan!r:.80}",
            f"score: {score!r:.200}", f"strict: {strict}",
            *(f"reward {kind}: {world.reward(score, kind):g}" for kind in world.kinds if score)]


def call_tools(world, episode):
    """Call each tool once: as the world's solver does, which also answers; the others with the
    arguments of sandbox.example(name), or with none -> lines of text that show what came back."""
    shown = {}
    try:
        for reply in world.solver(episode.task) if hasattr(world, "solver") else ():
            action = episode.begin(reply)
            if action is None:
                break
            said = episode.finish(episode.act(action))
            shown.setdefault(action.name, f"{action.name} {action.arguments}: {said!r:.80}")
    except Mistake as mistake:  # the solver cannot play this task
        shown["solver"] = f"solver: {mistake}"
    example = getattr(episode.sandbox, "example", lambda name: {})
    for name in sorted({*getattr(episode.sandbox, "tools", ())} - shown.keys()):
        said = episode.sandbox.call(name, example(name))
        shown[name] = f"{name} {example(name)}: {said!r:.80}"
    return shown.values()


def find_tasks(source, split):
    """The path of the tasks. source: a file; or a folder, or a data set on the hub, which has
    SPLIT.csv or (folders only) SPLIT.jsonl."""
    if source is None:
        raise Mistake("--tasks FILE.jsonl is needed; python synth.py tasks writes one")
    path = Path(source)
    if path.is_dir():
        found = [path / f"{split}.{kind}" for kind in ("csv", "jsonl")]
        return next(filter(Path.exists, found), found[0])
    if path.exists() or path.suffix or not split:
        return path
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, f"{split}.csv", repo_type="dataset"))
    except (OSError, ValueError):
        raise Mistake(f"{source} is no file, and neither the hub nor its cache has {split}.csv of "
                      f"it. Where there is a network: hf download {source} --repo-type dataset"
                      ) from None


def read_csv_rows(path):
    """The rows of a csv file as dictionaries, without empty fields."""
    csv.field_size_limit(1 << 30)  # TravelPlanner's reference information takes megabytes
    with open(path, encoding="utf-8-sig", newline="") as file:
        return [{key: value for key, value in row.items() if key and value}
                for row in csv.DictReader(file)]


def load_tasks(source, load, limit=None, split=None):
    """The tasks of a file (jsonl of tasks or of episodes, or csv) or of a data set, each read by
    load(row), a world's load_task. Errors name the file and the row."""
    path, tasks = find_tasks(source, split), []
    if not path.is_file():
        raise Mistake(f"{path} is not a file; a folder or a data set on the hub needs --split")
    rows = read_csv_rows(path) if path.suffix == ".csv" else read_jsonl(path)
    for number, row in enumerate(rows[:limit]):
        if not isinstance(row, dict):
            raise Mistake(f"{path}, row {number + 1}: a task is a JSON object, not {row!r:.60}")
        row = row["task"] if isinstance(row.get("task"), dict) else row
        row = row if "id" in row else {"id": str(row.get("idx", number)), "idx": number} | row
        try:
            tasks.append(load(row))
        except Mistake as mistake:
            raise Mistake(f"{path}, row {number + 1}: {mistake}") from None
        except Exception as error:
            error.add_note(f"in {path}, row {number + 1}")
            raise
    if len({str(task["id"]) for task in tasks}) < len(tasks) or not tasks:
        raise Mistake(f"{path}: it holds no task, or two tasks with the same id")
    return tasks
