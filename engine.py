"""
The vLLM engine: its settings on GPUs and on a CPU, and text-level episodes played token by token.

Tokens in, tokens out: what an engine said is never tokenised again, and no episode waits for
another. The trainers share the settings, and write their own rollouts.
"""
import os
import random
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count, islice

from template import load_template


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
    settings = {"max_model_len": max_context, "max_num_seqs": concurrency,
                "tensor_parallel_size": tp, "enable_prefix_caching": True}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # its sampler is compiled by nvcc at the first use, and requests with a seed never use it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if visible_gpus():
        return settings | {"dtype": "bfloat16", "gpu_memory_utilization": gpu_memory}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
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


def play_vllm(llm, template, episodes, max_context, temperature=0.6, top_p=0.95, seed=0,
              max_tokens=None, concurrency=64, stops=(), slow=True):
    """Play episodes with a vLLM engine in this process; yields each as it ends, with .tokens.

    Tokens in, tokens out: what the engine said is never tokenised again, and the answer to a turn
    joins the very next step. Every reply has a seed of its own (seed, task, sample, turn), whoever
    else is playing. slow: tools answer in threads and hold up neither engine nor other episodes.
    """
    live, turns, numbers, episodes = {}, {}, count(), iter(episodes)
    ask = partial(request, llm.llm_engine, template, max_context, max_tokens,
                  {"temperature": temperature, "top_p": top_p}, stops, seed)
    with ThreadPoolExecutor(concurrency) as pool:
        start = pool.submit if slow else call_now
        while True:
            for episode in islice(episodes, concurrency - len(live)):
                number = str(next(numbers))
                live[number] = episode, prompt_ids(episode, template, max_context)
                ask(number, *live[number])
            if not live:
                return
            stepping = len(live) > len(turns)  # nothing to step while all wait for tools
            for output in llm.llm_engine.step() if stepping else ():
                if output.finished:
                    turns[output.request_id] = start(
                        take_turn, *live[output.request_id], output.outputs[0], template,
                        max_context)
            wait(turns.values(), timeout=0.001)  # seconds; most tools take microseconds
            answered = [number for number, turn in turns.items() if turn.done()]
            answered.sort(key=lambda number: turns[number].exception() is not None)  # failures last
            for number in answered:
                turns.pop(number).result()
                episode, ids = live[number]
                if not episode.stop:
                    ask(number, episode, ids)
                    continue
                del live[number]
                episode.tokens = len(ids)
                yield episode


def call_now(function, *args):
    """As a pool's submit, but without a thread."""
    future = Future()
    future.set_result(function(*args))
    return future


def prompt_ids(episode, template, max_context):
    """The ids of system prompt, query and the head of the first reply."""
    ids = template.prompt(episode.messages)
    if len(ids) >= max_context:
        name = episode.task.get("id", "?")
        raise ValueError(f"task {name}: its prompt has {len(ids)} tokens; "
                         f"raise --max-context above {max_context}")
    return ids


def request(engine, template, max_context, max_tokens, sampling, stops, seed, number, episode,
            ids):
    """Ask the engine for the next reply of an episode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room, name = max_context - len(ids), f"{seed}/{name_of(episode.task)}/{episode.turns}"
    engine.add_request(number, {"prompt_token_ids": list(ids)}, SamplingParams(
        **sampling, max_tokens=min(room, max_tokens or room), stop=list(stops),
        stop_token_ids=sorted(template.ends), detokenize=bool(stops),
        output_kind=RequestOutputKind.FINAL_ONLY, seed=random.Random(name).getrandbits(31)))


def take_turn(episode, ids, output, template, max_context):
    """Play a reply's tokens and append them, and the observation's, to the episode's ids."""
    said = list(output.token_ids)
    reply, closed = template.reply(said)
    ids += said
    if not closed and len(ids) >= max_context:
        episode.messages.append({"role": "assistant", "content": reply})
        episode.stop = "context"
        return
    if episode.step(reply) is not None:
        ids += template.between(episode.messages[-1], closed)
        if len(ids) >= max_context:
            episode.stop = "context"


def name_of(task):
    """What tells a play from the others: the task's id, and which sample of it."""
    return f"{task['id']}/{task.get('sample', 0)}"
