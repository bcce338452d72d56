"""
The vLLM engine: its settings on GPUs and on a CPU, and text-level episodes played token by token.

Tokens in, tokens out: what an engine said is never tokenised again, and no episode waits for
another. The trainers share the settings, and write their own rollouts.
"""
import contextlib
import logging
import os
import random
import time
import warnings
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, islice
from threading import Lock

from template import load_template

MOST_THREADS = 512
WAITING = 4  # times as many episodes may be in flight as the engine has places


def visible_gpus():
    """Names of the GPUs that this process may use. SystemExit where a build for GPUs sees none: by
    itself it would go on, on the CPU, for weeks."""
    import torch

    # a look must not start CUDA: vLLM's workers could no longer be forked
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if not count and torch.version.cuda and chosen != "":
        raise SystemExit(f"this PyTorch is built for CUDA {torch.version.cuda} and sees no GPU. "
                         "Does nvidia-smi show one, and a driver of R580 or later, as CUDA 13 "
                         "needs? CUDA_VISIBLE_DEVICES= (empty) says that the CPU is meant")
    return (chosen.split(",") if chosen else [str(i) for i in range(count)])[:count]


def engine_settings(max_context, concurrency, tp, gpu_memory):
    """What every vLLM engine of the house is made with: bf16 on GPUs, float32 on a CPU."""
    # what vLLM and PyTorch say of each other at each start, and nobody here can act on
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    settings = {"max_model_len": max_context, "max_num_seqs": concurrency,
                "tensor_parallel_size": tp, "enable_prefix_caching": True}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # its sampler is compiled by nvcc at the first use, and requests with a seed never use it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # in this process: an engine of its own would outlive one that is killed, and keep the GPU
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if visible_gpus():
        return settings | {"dtype": "bfloat16", "gpu_memory_utilization": gpu_memory}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # a prompt read in pieces would have to rewind its request's seeded generator, which a CPU's
    # cannot; and the cache holds whole blocks, of 128 on a CPU unless told: each turn would read
    # the rest of its last one again
    return settings | {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False,
                       "max_num_batched_tokens": max(max_context, 8192), "block_size": 32}


def open_engine(path, max_context, concurrency=64, tp=1, gpu_memory=0.9):
    """(vLLM engine, Template) of a checkpoint folder or hub name."""
    template = load_template(path)
    settings = engine_settings(max_context, concurrency, tp, gpu_memory)
    from vllm import LLM

    return LLM(str(path), **settings), template


def load_engine(args, device):
    """A trainer's own vLLM engine, or with --tp this rank's part of one."""
    cuda = device.type == "cuda"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer has the cores too
    settings = engine_settings(args.context, args.concurrency, args.tp, args.gpu_memory)
    from vllm import LLM

    llm = LLM(args.model, **settings, seed=args.seed, enable_sleep_mode=cuda,
              logprobs_mode="processed_logprobs",  # log pi at the sampling temperature
              distributed_executor_backend="external_launcher")
    if cuda:
        llm.sleep(level=2)  # its weights are sent again before every play
    return llm


def renew_head(model):
    """vLLM's CPU build multiplies by a packed copy of the head, which a reload leaves as it was
    where the head is tied to the embedding."""
    head = getattr(model, "lm_head", None) or model.model.embed_tokens
    head.quant_method.process_weights_after_loading(head)


def used_gib(device):
    """GiB of this rank's GPU in use by whomever, what PyTorch keeps for later too; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


class Calls:
    """Plays between a reply and its observation. Tools answer in threads, so that neither the
    engine nor another play waits for them; or, where a world answers in microseconds, at once.

    slow: whether in threads; places: plays that the engine has room for. With --tp, leads: whether
    this rank calls the tools, so that nobody pays twice; agreed: what hands its answers on.
    """

    def __init__(self, slow, places, leads=True, agreed=None):
        self.pool = ThreadPoolExecutor(min(WAITING * places, MOST_THREADS)) if slow else None
        self.places, self.leads, self.agreed = places, leads, agreed if slow else None
        self.waiting, self.numbers = {}, count()  # {number: (play, Future)}

    def __len__(self):
        return len(self.waiting)

    def plays(self):
        return [play for play, _ in self.waiting.values()]

    def free(self, live):
        """Plays that may begin beside those that live in the engine: who waits holds no place."""
        return min(self.places, WAITING * self.places - len(self)) - len(live)

    def start(self, play, episode, action):
        """Have an action answered; a play without one has ended, and comes back with None."""
        future = Future()
        if action and self.pool and self.leads:
            future = self.pool.submit(episode.act, action)
        elif not (action and self.pool):
            future.set_result(episode.act(action) if action else None)
        self.waiting[next(self.numbers)] = play, future

    def ready(self, block):
        """Yield (play, observation) of those that are answered; block: give the tools a moment."""
        if self.pool and block and self.leads:
            wait([future for _, future in self.waiting.values()], 0.05, FIRST_COMPLETED)
        done = [number for number, (_, future) in self.waiting.items() if future.done()]
        # a failure is raised when all others are handed over
        done.sort(key=lambda number: self.waiting[number][1].exception() is not None)
        if self.agreed:
            told = self.agreed([(number, self.waiting[number][1].result()) for number in done])
            for number, text in told:
                yield self.waiting.pop(number)[0], text
            return
        for number in done:
            play, future = self.waiting.pop(number)
            yield play, future.result()

    def close(self):
        """Wait for the threads, each of which ends by its tool's deadline."""
        if self.pool:
            self.pool.shutdown()


def open_calls(slow, n, group, args):
    """The Calls of a trainer's rank: each engine takes its share of n queries, group plays each."""
    engines = int(os.environ.get("WORLD_SIZE", 1)) // args.tp
    # the first engine may not take those of all queries
    seats = max(group, min(args.concurrency, -(-n // engines) * group))
    return Calls(slow, seats, leads(args), args.tp > 1 and agreed)


def leads(args):
    """Whether this rank is its engine's first. With --tp the others play along and keep quiet."""
    return int(os.environ.get("RANK", 0)) % args.tp == 0


def agreed(value):
    """With --tp: what its engine's first rank has. All must ask for the same turns in one order."""
    from vllm.distributed import get_tp_group

    return get_tp_group().broadcast_object(value)


def shared_counter(name, n, args):
    """Yield 0 .. n-1, each number to one engine only: whoever is free takes the next."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    while True:
        i = leads(args) and store.add(name, 1) - 1
        i = agreed(i) if args.tp > 1 else i
        if i >= n:
            return
        yield i


class Asks:
    """Questions that threads of tools put to the engine that plays: who asks waits, and the loop
    hands them over between two steps. An answer is (text, tokens of both, why there is none).

    patience: seconds after which a loop that has not come by is gone. Python waits for its threads
    before it ends, and one whose player has failed without a word would keep it for ever.
    """

    def __init__(self, patience=300):
        self.lock, self.closed, self.queue, self.running = Lock(), False, deque(), {}
        self.numbers, self.patience, self.seen = count(), patience, time.monotonic()

    def ask(self, text, seed, max_tokens):
        """The answer to a text. For a tool's thread: the loop itself would wait for ever."""
        future = Future()
        with self.lock:
            if self.closed:
                return "", 0, "the play is over"
            self.queue.append((text, seed, max_tokens, future))
        while not wait([future], self.patience).done:
            if time.monotonic() - self.seen > self.patience:
                return "", 0, "nobody plays any longer"
        return future.result()

    def submit(self, engine, template, max_context, seed, temperature, top_p):
        """Hand what was asked to the engine; one that does not fit is answered at once."""
        self.seen = time.monotonic()
        while self.queue:
            text, name, max_tokens, future = self.queue.popleft()
            number = f"ask {next(self.numbers)}"
            self.running[number] = future, 0  # whatever fails from here on, close finds it
            # a page or a program may hold what ends a turn
            text = template.forged.sub("‹", text)
            ids = template.prompt([{"role": "user", "content": text}])
            room = min(max_tokens, max_context - len(ids))
            if room < 1:
                self.running.pop(number)[0].set_result(("", 0, f"{len(ids)} tokens do not fit"))
                continue
            self.running[number] = future, len(ids)
            add_request(engine, number, ids, template, (), f"{seed}/{name}",
                        temperature=temperature, top_p=top_p, max_tokens=room)

    def take(self, output, template):
        """Whether an output answers a question; who asked goes on."""
        if output.request_id not in self.running:
            return False
        future, asked = self.running.pop(output.request_id)
        said = list(output.outputs[0].token_ids)
        text, closed = template.reply(said)
        future.set_result((text, asked + len(said), "" if closed else "cut"))
        return True

    def close(self):
        """Nobody waits any longer, and nobody asks again: the threads can end."""
        with self.lock:
            self.closed = True
        for future in [*(entry[-1] for entry in self.queue),
                       *(future for future, _ in self.running.values())]:
            future.set_result(("", 0, "the play is over"))


def play_vllm(llm, template, episodes, max_context, temperature=0.6, top_p=0.95, seed=0,
              max_tokens=None, concurrency=64, stops=(), slow=True, asks=None):
    """Play episodes with a vLLM engine in this process; yields each as it ends, with .tokens.

    Every reply has a seed of its own (seed, task, sample, turn), whoever else is playing.
    slow, asks: as Calls and Asks have it.
    """
    live, numbers, episodes, asks = {}, count(), iter(episodes), asks or Asks()

    def ask(play):
        episode, ids = play
        number, room = str(next(numbers)), max_context - len(ids)
        live[number] = play
        add_request(llm.llm_engine, number, ids, template, stops,
                    f"{seed}/{name_of(episode.task)}/{episode.turns}", temperature=temperature,
                    top_p=top_p, max_tokens=min(room, max_tokens or room))

    # asks are closed first: a thread that waits for an answer would keep the calls from closing
    with contextlib.closing(Calls(slow, concurrency)) as calls, contextlib.closing(asks):
        while True:
            for episode in islice(episodes, max(calls.free(live), 0)):
                ask((episode, prompt_ids(episode, template, max_context)))
            if not live and not calls:
                return
            asks.submit(llm.llm_engine, template, max_context, seed, temperature, top_p)
            for output in llm.llm_engine.step() if live or asks.running else ():
                if output.finished and not asks.take(output, template):
                    play = live.pop(output.request_id)
                    action = play_reply(*play, output.outputs[0], template, max_context)
                    calls.start(play, play[0], action)
            for (episode, ids), observation in calls.ready(not (live or asks.running)):
                if observation is not None:
                    play_observation(episode, ids, observation, template, max_context)
                if not episode.stop:
                    ask((episode, ids))
                    continue
                episode.tokens = len(ids)
                yield episode


def prompt_ids(episode, template, max_context):
    """The ids of system prompt, query and the head of the first reply."""
    ids = template.prompt(episode.messages)
    if len(ids) >= max_context:
        raise ValueError(f"task {episode.task.get('id', '?')}: its prompt has {len(ids)} tokens; "
                         f"raise --max-context above {max_context}")
    return ids


def add_request(engine, number, ids, template, stops, seed, **sampling):
    """Ask an engine for the reply that follows these tokens. seed: a text of its own, so that the
    reply does not depend on who else is playing."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.add_request(number, {"prompt_token_ids": list(ids)}, SamplingParams(
        **sampling, stop=list(stops), stop_token_ids=sorted(template.ends),
        detokenize=bool(stops), output_kind=RequestOutputKind.FINAL_ONLY,
        seed=random.Random(seed).getrandbits(31)))


def play_reply(episode, ids, output, template, max_context):
    """Append a reply's tokens to the episode's and play it -> the Action to answer, or None."""
    said, episode.asked = list(output.token_ids), len(ids)
    reply, closed = template.reply(said)
    ids += said
    if not closed and len(ids) >= max_context:
        episode.messages.append({"role": "assistant", "content": reply})
        episode.stop = "context"
        return None
    action = episode.begin(reply)
    episode.tokens = len(ids)  # which a helper looks at while the action is answered
    return action


def play_observation(episode, ids, observation, template, max_context):
    """Append an observation's tokens to the episode's: what the agent sees next."""
    episode.finish(observation)
    if getattr(episode, "rewritten", None):  # a helper has changed what was said
        ids[:] = episode.tokens_again(ids, template)
    else:
        told = template.between(episode.messages[-1], closed=ids[-1] in template.ends)
        episode.heard = len(told)
        ids += told
    if len(ids) >= max_context:
        episode.stop = "context"


def name_of(task):
    """What tells a play from the others: the task's id, and which sample of it."""
    return f"{task['id']}/{task.get('sample', 0)}"
