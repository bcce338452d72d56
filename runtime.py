"""
What every script runs on, and what needs no torch.

    (1) flags              a Mistake, which you can fix, is one line; all else is a traceback
    (2) processes          one writer per folder, pools of workers
    (3) records            jsonl files and the log
    (4) the chat template  a conversation as tokens, exactly as the engine sees and samples them
    (5) the engine         vLLM: its settings, and tool calls that run meanwhile
    (6) worlds and tasks   --env and --tasks

What needs torch is in zero3.py. To take a stage home, copy it together with these two files.
"""
import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"Python 3.11 is needed, and this is {sys.version.split()[0]}. "
             "PYTHON=/path/to/python3.11 bash run.sh ... makes a .venv with it")

import argparse
import atexit
import contextlib
import csv
import ctypes
import fcntl
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import select
import signal
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import ProcessPoolExecutor
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

# ---------------------------------------------------------------------------------------- (1) flags


class Mistake(Exception):
    """What the user of a command can fix: a flag, a path, a row of data. Its text says how."""


def run(program, function, *args):
    """Call function(*args). A Mistake ends the program with one line; any other exception keeps its
    traceback, which names the file and the line."""
    sys.excepthook = explain
    try:
        return function(*args)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; repeat the command to continue", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Mistake as mistake:
        raise SystemExit(f"{program}: {mistake}") from None


def need_files(*paths):
    """A Mistake if one of the paths, None apart, is not a file."""
    for path in filter(None, paths):
        if not Path(path).is_file():
            raise Mistake(f"{path} is not a file")


def explain(kind, error, trace):
    """sys.excepthook: a line in the wrong Python, nothing after `| head`, else the traceback."""
    if kind is ModuleNotFoundError and Path(sys.prefix).name != ".venv":
        print(f"{error}. `. .venv/bin/activate` enters the environment that run.sh makes; in "
              f"another, pip install {error.name}", file=sys.stderr)
    elif kind is not BrokenPipeError or not reader_gone():
        sys.__excepthook__(kind, error, trace)


@atexit.register
def reader_gone():
    """Whether nobody reads our output any more (`| head`). If so, the rest of it goes nowhere."""
    with contextlib.suppress(BrokenPipeError, ValueError):  # the latter: a closed file
        sys.stdout.flush()
    output = select.poll()
    output.register(1, 0)  # 0: tell errors only
    if gone := bool(output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return gone


def run_ranks(main):
    """Run a stage's main as a rank of torchrun. Without torchrun (`python grpo.py`), start torchrun
    with one rank per GPU, or with one rank on a CPU."""
    if "LOCAL_RANK" in os.environ:
        run(sys.argv[0], main)
        return
    import torch

    # after SIGTERM ranks save at the end of their update; by default torchrun kills them after 30 s
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--shutdown-timeout",
             "3600", "--nproc_per_node", str(max(1, torch.cuda.device_count())), *sys.argv]
    os.execv(words[0], words)


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line instead of printing the usage. idle: its
    (flag, "beside" or "without", other): the flag has no effect then, so giving it is an error."""
    idle = ()

    def __init__(self, **words):
        super().__init__(allow_abbrev=False, **words)

    def parse_known_args(self, *words):
        args, rest = super().parse_known_args(*words)
        for name, when, other in self.idle:
            if bool(getattr(args, other)) == (when == "beside") and \
                    getattr(args, name) != self.get_default(name):
                self.error(f"--{name} has no effect {when} --{other}".replace("_", "-"))
        return args, rest

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


def trainer_flags(p, tokens):
    """The flags that all trainers share: memory and running -> what adds a flag to the latter.
    tokens: default of --pack-tokens."""
    add = p.add_argument_group("memory (python -m look.memory estimates it)").add_argument
    add("--pack-tokens", type=COUNT, default=tokens, help="most tokens of a micro-batch, padding "
        "included; a longer episode is a micro-batch of its own")
    add("--keep-activations", type=NATURAL, default=0, metavar="K", help="keep the activations of "
        "micro-batches of at most K tokens, padding included, for the backward pass; those of "
        "larger ones are recomputed, which takes a fourth longer but less memory")
    add("--zero", type=int, choices=(2, 3), default=3, help="2: every GPU holds all weights, which "
        "are then never gathered; gradients and AdamW's states are sharded. 3: weights as well")
    add("--offload", action="store_true", help="run AdamW on the CPU and keep its states in the "
        "host's memory: the same updates, slower")
    add("--lora", type=COUNT, default=0, metavar="R", help="train adapters of rank R at all linear "
        "layers but the head, experts and routers; use about 10 times the --lr (add_adapters)")
    add = p.add_argument_group("running").add_argument
    add("--save-every", type=NATURAL, default=20, help="updates between two checkpoints; 0: none. "
        "One takes 12 to 14 bytes of disk a trained parameter; it stays until the next is complete")
    add("--resume", action="store_true", help="resume from the last checkpoint in OUT, if any")
    add("--track", choices=("wandb", "trackio"), help="also log to this package")
    return add


# ------------------------------------------------------------------------------------ (2) processes


def rank():
    # torchrun sets both; some clusters set RANK, for a node
    return int(os.environ["RANK"]) if "LOCAL_RANK" in os.environ else 0


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


def start_worker():
    """Of a worker: end with the parent, which also handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


def workers(number):
    """A pool of processes. Spawned, because SQLite must not cross a fork."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), start_worker)


def progress(rows, name, total, initial=0, unit="it"):
    """A tqdm bar, none without a name; in a file or a pipe, a line every half minute."""
    from tqdm import tqdm

    sparse = {} if sys.stderr.isatty() else {"mininterval": 30, "ncols": 100}
    return tqdm(rows, name, total, disable=not name, initial=initial, unit=unit, **sparse)


# -------------------------------------------------------------------------------------- (3) records


def read_jsonl(path, torn=False):
    """The records of a jsonl file. torn: without an unfinished last line, as a live run has it."""
    rows = []
    need_files(path)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                if torn and not line.endswith(b"\n"):
                    break
                raise Mistake(f"{path}, line {number}: not JSON ({error})") from None
    return rows


@contextlib.contextmanager
def at_row(path, number):
    """Whatever goes wrong in this block names the file and the row."""
    try:
        yield
    except Mistake as mistake:
        raise Mistake(f"{path}, row {number}: {mistake}") from None
    except Exception as error:
        error.add_note(f"in {path}, row {number}")
        raise


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
    """Add one record and flush it, so that a killed run keeps every finished episode. Processes
    that add to the same file wait for each other."""
    with open(path, "a", encoding="utf-8", errors="replace") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
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


# ---------------------------------------------------------------------------- (4) the chat template
#
#   <|im_start|>system\n S <|im_end|>\n<|im_start|>user\n Q <|im_end|>\n<|im_start|>assistant\n R
#   <|im_end|> \n<|im_start|>user\n O <|im_end|>\n<|im_start|>assistant\n R ...
#      end           before O            after O
#
# Training and play append tokens and never render a conversation again. A template that would
# render a longer conversation as other tokens (it drops earlier thoughts, or frames some turns
# differently) is refused, because the policy would be trained on texts that never occur in play.

# some templates open a thought at the end of the prompt: cut off, because our replies have theirs
OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
TAGS = {"<think>", "</think>", "<tool_response>", "</tool_response>"}  # observations have these
PROMPT = "<think>a</think> <tool_call>b</tool_call> <answer>c</answer>"  # what ours has, in brief
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
        talk = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "query"}]
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
        if PROMPT not in prompt:
            raise ValueError("it edits the system message")
        self.lead = prompt.removeprefix(OPENED.sub("", self.text(talk[:2])))
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
        if ids != self.encode(OPENED.sub("", whole) + self.lead):
            raise ValueError("it frames some turns differently, or changes earlier ones")
        if self.before.endswith("<tool_response>\n"):  # our observations already have these tags
            self.before = self.before.removesuffix("<tool_response>\n")
            self.after = self.after.removeprefix("\n</tool_response>")

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
        return self.encode(OPENED.sub("", self.text(turns)) + self.lead) + self.encode(begun)

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


THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields that hold a reply's thought
# of a reply: 0 or false takes it out of the loss
UNTRAINED = ("weight", "loss_weight", "loss", "loss_mask", "trainable", "train")
UNREAD = ("system", "functions", "chat_template_kwargs", "mask")  # of a row; "tools" as well
EMPTY = (None, "", [], {})
ROLES = {"system": "s", "user": "u", "result": "u", "assistant": "a"}  # letters, for the order


def read_talk(messages, template, row):
    """A conversation of training data, with each thought in front of its reply, and "untrained" at
    the replies that its author took out of the loss. A Mistake if it is no conversation, or if
    training would leave out a part of it or of its row."""
    if not isinstance(messages, list):
        raise Mistake(f"it has no list of 'messages', but {[*row]}: docs/models.md converts it")
    unread = [key for key in UNREAD if row.get(key) not in EMPTY]
    unread += [key for key in UNTRAINED if row.get(key) not in (*EMPTY, 1)]
    # an episode's tools are calls that were made
    unread += ["tools"] * any("status" not in tool for tool in row.get("tools") or ())
    if unread:
        raise Mistake(f"its {unread} would be left out: write what the model reads into a system "
                      "message, mark what is not trained on in its message, and remove the field")
    talk = []
    for number, message in enumerate(messages, 1):
        unread = [key for key, value in message.items() if value not in EMPTY
                  and key not in ("role", "content", *THOUGHTS, *UNTRAINED)]
        if unread:
            raise Mistake(f"message {number} has {unread}, which would be left out: write it into "
                          "the content, as the model is to say it, or remove it")
        role, content = message.get("role"), message.get("content")
        thoughts = [message[key] for key in THOUGHTS if message.get(key)]
        marks = [message[key] for key in UNTRAINED if message.get(key) is not None]
        if role not in ROLES or not all(isinstance(text, str) for text in (content, *thoughts)):
            raise Mistake(f"message {number}: 'role' is {role!r:.40}, which must be one of "
                          f"{[*ROLES]}, and 'content' is {content!r:.40}, which must be a text, "
                          "as a thought")
        if any(mark not in (0, 1) for mark in marks):
            raise Mistake(f"message {number} has a weight of {marks}: 0 and 1 are read")
        if role != "assistant" and (thoughts or 1 in marks):
            raise Mistake(f"message {number}, the {role}'s, has a thought or a weight of 1: only "
                          "replies are trained on")
        if role == "assistant":
            content = content.removesuffix(template.end_text)  # some data sets write it
            content = with_thought(content, thoughts[0]) if thoughts else content
            if not all(thought.strip() in content for thought in thoughts):
                raise Mistake(f"message {number} has two thoughts, and one would be left out")
            if template.escape(content) != content:
                raise Mistake(f"a reply contains a mark of the template: {content!r:.200}")
        talk.append({"role": role, "content": content, "untrained": 0 in marks})
    if not re.fullmatch("[su]u*(au)*a?", "".join(ROLES[one["role"]] for one in talk)):
        raise Mistake(f"the roles of its 'messages' are {[one['role'] for one in talk]}: system "
                      "and user come first, then assistant alternates with user or result")
    return talk


def with_thought(text, thought):
    """A reply with its thought in front, as <think>...</think>. Servers with a reasoning parser
    send the thought in a field of its own; without one, the prompt may have opened the thought."""
    thought = (thought or "").strip()
    if "<think>" in text:
        return text
    if "</think>" in text:
        return f"<think>{thought}{text}"
    return f"<think>{thought}</think>\n{text}" if thought else text


class Rendered(NamedTuple):
    """An episode as tokens."""
    ids: list  # prompt, replies, observations
    mask: list  # 1 on the policy's tokens, 0 elsewhere


def render(messages, template):
    """Messages -> (ids, mask), with exactly the tokens that playing this conversation would give.

    Each reply is tokenised by itself, like sampled tokens: no token spans a template boundary. The
    end token belongs to the reply (mask 1), the newline after it to the template (mask 0):

        <|im_start|>assistant\n  think  call  <|im_end|>  \n<|im_start|>user\n ...
              0                    1     1        1            0
    """
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    rendered = Rendered(template.prompt(messages[:first]), [])
    rendered.mask.extend([0] * len(rendered.ids))
    for message, following in zip_longest(messages[first:], messages[first + 1:]):
        is_reply = message["role"] == "assistant"
        if is_reply:
            # the role "result" stands within a reply, which continues after it: no end token yet
            continues = following and following["role"] == "result"
            tokens = template.encode(message["content"]) + [template.end] * (not continues)
        else:
            tokens = template.between(message)
        rendered.ids.extend(tokens)
        in_loss = is_reply and not message.get("untrained")
        rendered.mask.extend([int(in_loss)] * len(tokens))
    return rendered


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


# ----------------------------------------------------------------------------------- (5) the engine

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
        # eager leaves one function of the sampler, for which Inductor would start C++ compilers
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # no chunked prefill: the CPU build cannot rewind a request's seeded generator
        settings |= {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False,
                     "max_num_batched_tokens": max(max_context, 8192), "block_size": 32}
    import torch

    # vLLM's import switches cuDNN's attention off for the whole process, and so for the trainer
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    from vllm import LLM

    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return LLM(str(path), **settings)


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

    places: plays that the engine has room for.
    """

    def __init__(self, slow, places):
        self.pool = ThreadPoolExecutor(min(WAITING * places, 512)) if slow else None
        self.places, self.waiting = places, {}  # {Future: play}

    def __len__(self):
        return len(self.waiting)

    def plays(self):
        """The plays that wait for an observation."""
        return list(self.waiting.values())

    def room(self, live):
        """How many plays may begin while the `live` ones are in the engine."""
        return min(self.places, WAITING * self.places - len(self)) - len(live)

    def start(self, play, episode, action):
        """Begin to answer an action. Without one the play is over: ready() yields it with None."""
        future = Future()
        if action and self.pool:
            future = self.pool.submit(episode.act, action)
        else:
            future.set_result(episode.act(action) if action else None)
        self.waiting[future] = play

    def ready(self, block):
        """Yield (play, observation) for each answered action; block: first wait for a tool, at most
        0.05 s, since a tool may itself ask the engine."""
        if self.pool and block:
            wait(self.waiting, 0.05, FIRST_COMPLETED)
        for future in [each for each in self.waiting if each.done()]:
            yield self.waiting.pop(future), future.result()

    def close(self):
        """Wait for the threads; each of them ends at its tool's deadline."""
        if self.pool:
            self.pool.shutdown()


def tool_calls_of_rank(slow, n, group, args):
    """The ToolCalls of a trainer's rank. All engines share n queries of `group` plays each."""
    engines = int(os.environ.get("WORLD_SIZE", 1))
    # at most an equal share, or the first engine to start would take the plays of all queries
    return ToolCalls(slow, max(group, min(args.concurrency, -(-n // engines) * group)))


def shared_counter(name, n):
    """Yield 0 .. n-1, each number to one engine only: a free engine takes the next number."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    while (i := store.add(name, 1) - 1) < n:
        yield i


# ----------------------------------------------------------------------------- (6) worlds and tasks

# --env: module; ":" stands for FILE.py:CLASS
WORLDS = {"travel": "travel.world", "tools": "toolstar.tools", ":": "adapters.plain"}


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
    name = WORLDS.get(env, env).partition(":")[0]
    need_files(name if name.endswith(".py") else None)
    try:
        module = import_file(name)
        module = importlib.import_module(WORLDS[":"]) if ":" in env else module
    except ModuleNotFoundError as error:
        if error.name not in ("adapters", Path(name).name.partition(".")[0]):
            raise  # a package that the world imports
        raise Mistake(f"--env {env} needs {error.name}, which is not here: copy the folder "
                      f"{error.name}/ too, or name another module or file") from None
    if not hasattr(module, "open_world"):
        raise Mistake(f"--env {env}: it has no function open_world(args); --env FILE.py:CLASS "
                      "names a plain class")
    return module


def import_file(name):
    """The module of this name or file; it can import the files beside it."""
    if name.endswith(".py"):
        sys.path.append(str(Path(name).resolve().parent))
        name = Path(name).stem
    return importlib.import_module(name)


def open_world(args):
    """The world of --env (docs/environment.md)."""
    return load_world(args.env).open_world(args)


def judged(world, episodes):
    """Yield (episode, plan, score, strict), the world's verdict on each episode, in their order.

    If verdicts wait for a server or another process, the world's `judges` says how many threads
    compute them: then none holds up another, nor the episodes that still play.
    """
    if not getattr(world, "judges", 0):
        yield from ((episode, *world.verdict(episode)) for episode in episodes)
        return
    pool, waiting = ThreadPoolExecutor(world.judges), deque()
    try:
        for episode in episodes:
            waiting.append((episode, pool.submit(world.verdict, episode)))
            while waiting and waiting[0][1].done():
                episode, verdict = waiting.popleft()
                yield episode, *verdict.result()
        for episode, verdict in waiting:
            yield episode, *verdict.result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_csv_rows(path):
    """The rows of a csv file as dictionaries, without empty fields."""
    csv.field_size_limit(1 << 30)  # TravelPlanner's reference information takes megabytes
    with open(path, encoding="utf-8-sig", newline="") as file:
        return [{key: value for key, value in row.items() if key and value}
                for row in csv.DictReader(file)]


def load_tasks(path, load, limit=None):
    """The tasks of a file (jsonl of tasks or of episodes, or csv), each read by load(row), which is
    a world's load_task. Errors name the file and the row."""
    path, tasks = Path(path), []
    need_files(path)
    rows = read_csv_rows(path) if path.suffix == ".csv" else read_jsonl(path)
    for number, row in enumerate(rows[:limit]):
        if not isinstance(row, dict):
            raise Mistake(f"{path}, row {number + 1}: a task is a JSON object, not {row!r:.60}")
        row = row["task"] if isinstance(row.get("task"), dict) else row
        row = row if "id" in row else {"id": str(row.get("idx", number)), "idx": number} | row
        with at_row(path, number + 1):
            tasks.append(load(row))
    if len({str(task["id"]) for task in tasks}) < len(tasks) or not tasks:
        raise Mistake(f"{path}: " + ("two tasks have the same id" if tasks else "it has no task"))
    return tasks
