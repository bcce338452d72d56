"""The map of the tests, and what several of them share.

Read in this order: test_grpo.py (the algorithm, each number by hand), test_variants.py (ten losses
as ten equations), test_arpo.py, test_sft.py and test_dpo.py; test_runtime_template.py and
test_talk.py (which tokens are trained); test_evaluate.py and test_endpoints.py (plays and tables);
test_constraints.py (the rules of travel as tables), test_solver.py, test_teacher.py, test_synth.py;
test_jail.py with hostile.py and test_verdict.py (the tools world); test_run.py (the recipes).
test_house.py holds the floor plan: who may import whom, and what must not be called.

What stands for what. Nothing else is a stand-in: jails, browsers, databases and processes are real.

    Letters     a tokenizer, one token per character      Plain     DeepSpeed's engine on one rank
    Scripted    vLLM's engine in evaluation, a token a step; Replies in training, which reports
                log-probabilities and ends its requests in random order
    endpoint    a server in OpenAI's form; answering: any other server
    tiny_model  a random model of 2M parameters; student: after SFT; trained: after RL
    babble.py   a world in which every reply is valid, so that no outcome hangs on what a tiny
                model says; calculator.py: a second world, with a tool and a right answer
    families.py random models of many architectures      smollm2.py   a real one
    styles.py   answers in the styles of language models, with the plans that they state
    signal_at.py    sends a run its signal at a chosen moment

The official tables and the reference's answers are not in the repository. STAR_TEST_DATA names a
folder with travelplanner/ and parity/; without it the tests that need them are skipped. TEST_SEED
seeds everything that tests draw; they must pass with any seed.
"""
import contextlib
import copy
import fcntl
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import parse_qsl, urlsplit

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
SEED = int(os.environ.get("TEST_SEED", "0"))
hypothesis.core.global_force_seed = SEED  # what --hypothesis-seed sets; no examples are kept
hypothesis.settings.register_profile("star", deadline=None)
hypothesis.settings.load_profile("star")
# a job in the background ignores Ctrl-C, and would start deaf programs
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(ROOT))
# for this process and those it starts; the engine reads them when it is imported
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=str(ROOT))
# torchrun, and DeepSpeed's ninja
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.pop("STAR_DATABASE", None)  # a test says which database it means


@pytest.fixture(scope="session")
def mini():
    """The small world that ships with the repository."""
    from sandbox import Database

    return Database(ROOT / "database" / "mini")


@pytest.fixture(scope="session")
def test_data():
    """The folder of the official tables and of the reference's answers."""
    folder = os.environ.get("STAR_TEST_DATA")
    if not folder:
        pytest.skip("STAR_TEST_DATA is unset: it names a folder with travelplanner/ and parity/")
    missing = [name for name in ("travelplanner", "parity") if not (Path(folder) / name).is_dir()]
    assert not missing, f"STAR_TEST_DATA={folder} holds no {' and no '.join(missing)}"
    return Path(folder)


@pytest.fixture(scope="session")
def official(test_data):
    """The official database with a part of its flights."""
    from sandbox import Database

    return Database(test_data / "travelplanner" / "database")


@cache
def witness(database):
    """(task, plan) of a trip by air in the small world that passes every rule set."""
    from travel.solver import solve

    rng = random.Random(SEED)
    pairs = [(org, city) for org in database.cities for city in database.flight_destinations(org)
             if database.cities.get(city) != database.cities[org]]
    for org, city in rng.sample(pairs, len(pairs)):
        stays = {row.minimum_nights for row in database.hotels(city)}
        first = rng.randrange(1, 29)
        task = {"id": "w", "query": "?", "level": "easy", "org": org, "days": 3,
                "dest": city, "people_number": 2, "budget": 99999, "visiting_city_number": 1,
                "date": [f"2022-03-{first + day:02d}" for day in range(3)], "local_constraint": {
                    "house rule": None, "cuisine": None, "room type": None,
                    "transportation": "no self-driving"}}
        plan = solve(task, database) if stays >= {1, 2} else None
        if plan and all(plan[day]["transportation"].startswith("Flight") for day in (0, -1)):
            return task, plan
    raise AssertionError("the small world has no trip by air")


@pytest.fixture
def trip(mini):
    """A fresh copy of the witness: (task, plan, city visited)."""
    task, plan = copy.deepcopy(witness(mini))
    return task, plan, plan[1]["current_city"]


class Letters:
    """A tokenizer with one token per character; token 0 ends a turn."""

    eos_token_id, chat_template = 0, "ChatML"
    added_tokens_decoder = {0: SimpleNamespace(content="<|im_end|>", special=True)}

    def encode(self, text, add_special_tokens=False):
        return [0 if c == "\0" else ord(c) for c in text.replace("<|im_end|>", "\0")]

    def decode(self, ids):
        return "".join(map(chr, ids)).replace("\0", "<|im_end|>")

    def apply_chat_template(self, messages, **_):
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n"


class Scripted:
    """An engine that emits one token per step. script(text so far) is the reply, cut at max_tokens.
    """

    def __init__(self, script):
        from runtime import Template

        self.llm_engine, self.script = self, script
        self.template = Template(Letters(), "letters")
        self.running, self.steps, self.asked = {}, 0, []  # asked: (ids, reply's ids, params)

    def add_request(self, name, prompt, params):
        ids = prompt["prompt_token_ids"]
        whole = self.template.encode(self.script(Letters().decode(ids)))
        said = whole[:params.max_tokens]
        ended = "stop" if said == whole else "length"
        self.running[name] = [len(said), SimpleNamespace(token_ids=said, finish_reason=ended)]
        self.asked.append((ids, said, params))

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.steps += 1
        for entry in self.running.values():
            entry[0] -= 1
        done = [name for name, (left, _) in self.running.items() if left <= 0]
        return [SimpleNamespace(request_id=name, finished=True,
                                outputs=[self.running.pop(name)[1]]) for name in done]

    def play(self, episodes, max_context=4000, **options):
        from evaluate import play_vllm

        return play_vllm(self, self.template, episodes, max_context, **options)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make) -> a folder that make(folder) has filled, once for all of xdist's workers:
    the first that asks for it makes it, under a lock, and the others wait."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name, make):
        folder, made = base / name, base / f"{name}.made"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                make(folder)
                made.touch()
        return folder
    return once


def make_model(folder):
    from sandbox import read_prompt
    from tiny.model import make_tiny

    tables = sorted((ROOT / "database" / "mini").glob("*.csv"))
    texts = [read_prompt("short")] + [path.read_text(encoding="utf-8")[:20_000] for path in tables]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    make_tiny([folder / "corpus.jsonl"], folder / "model", seed=SEED, vocabulary=1024)


@pytest.fixture(scope="session")
def tiny_model(once):
    """A folder with a tokenizer and a random Qwen2 of 2M parameters, which writes nonsense."""
    return once("tiny", make_model) / "model"


# ------------------------------------------------------------------------------- servers, the jail

class Server(ThreadingHTTPServer):
    request_queue_size = 256  # the usual 5 would refuse connections; TCP waits a second after that


@contextlib.contextmanager
def answering(answer, port=0):
    """The address of a server that answers by answer(request) = (status, reply: JSON or a text), or
    None to hang up. A header X-API-KEY becomes the request's "key", Authorization its "bearer"."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            json_sent = self.headers["Content-Type"].startswith("application/json")
            self.say(answer(self.keyed(asked)) if json_sent else (415, {"detail": "want JSON"}))

        def do_GET(self):
            self.say(answer(self.keyed(dict(parse_qsl(urlsplit(self.path).query)))))

        def keyed(self, asked):
            keys = {"key": self.headers["X-API-KEY"], "bearer": self.headers["Authorization"]}
            return asked | {name: key for name, key in keys.items() if key}

        def say(self, said):
            if said:
                body = (said[1] if isinstance(said[1], str) else json.dumps(said[1])).encode()
                self.send_response(said[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Retry-After-Ms", "1")  # the client's own pauses are longer
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with Server(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def completion(text, finish="stop", tokens=77, **message):
    """The body of a chat completion; text None is null, tokens None leaves out the usage."""
    choice = {"index": 0, "finish_reason": finish,
              "message": {"role": "assistant", "content": text} | message}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [choice]} | ({"usage": {"total_tokens": tokens}} if tokens else {})


@contextlib.contextmanager
def endpoint(reply):
    """(URL of an OpenAI-compatible server, its requests so far). reply(request) -> a text, a body,
    or a status."""
    asked = []

    def answer(request):
        asked.append(request)
        said = reply(request)
        if isinstance(said, int):
            return said, {"error": {"message": f"status {said}"}}
        return 200, completion(said) if isinstance(said, str) else said

    with answering(answer) as url:
        yield f"{url}/v1", asked


@pytest.fixture(scope="session")
def jail():
    """A jail that the worlds of all tests share, since a new one takes a second to start."""
    need("bubblewrap", shutil.which("bwrap"))
    from toolstar.jail import Jail

    with contextlib.closing(Jail(2)) as one:
        yield one


# ------------------------------------------------------------------------------------------ stages
# What grpo, arpo, sft and memory share. No outcome hangs on what a tiny model happens to say: the
# world of babble.py takes any reply, and Replies is an engine that says what a test tells it to.

SFT = "--batch 4 --steps 16 --lr 1e-3 --save-every 1 --resume --pack-tokens 600"
BABBLE = """--env tests/babble.py --prompts 2 --group 8 --steps 8 --lr 3e-4 --decay 0.5 --resume
            --context 400 --max-turns 3 --turn-tokens 16 --concurrency 16 --save-every 1"""


def need(what, found):
    """Skip a test where something is missing; with CI set, fail."""
    if not found:
        assert not os.environ.get("CI"), f"{what} is missing"
        pytest.skip(f"{what} is missing")


def free_port():
    """A free port below the range from which the kernel picks ports, so that no one takes it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def flags_of(stage, words=""):
    """The parsed flags of a stage for a command line."""
    with patch.object(sys, "argv", ["stage", *words.split()]):
        return stage.flags()


def train(stage, out, *words, ranks=1, status=0):
    """Run a stage as a user does and return its output. words: its flags, in any number of strings.

    A run with one rank starts without torchrun, which saves two seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command, variables = [*command, str(ranks)], dict(os.environ)
    if ranks == 1:
        command = [sys.executable]  # port 0: whichever is free when the stage listens, not before
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command += [*stage.split(), *" ".join(map(str, words)).split(), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    assert status or "Traceback" not in done.stderr, done.stderr[-4000:]
    return done.stdout + done.stderr


def train_broken(stage, out, *words, signals=("TERM", "KILL")):
    """Run a stage that is stopped by SIGTERM in its third update, or killed while it saves its
    third checkpoint, or both in turn, then resume it to its end. words have --save-every 1."""
    if "TERM" in signals:
        said = train(f"tests/signal_at.py TERM 2 {stage}", out, *words, status=1)
        assert "saved after update 3; repeat the command with --resume" in said
    if "KILL" in signals:
        train(f"tests/signal_at.py KILL 3 {stage}", out, *words, status=-9)
        latest = json.loads((out / "checkpoints" / "latest").read_text())
        last = 6 if "TERM" in signals else 3
        assert (out / "checkpoints" / f"step-{last}").exists() and latest["step"] == last - 1
    return train(stage, out, *words)


def numbers(out):
    """The log of a run without its times."""
    from runtime import read_jsonl

    return [{key: value for key, value in line.items()
             if key != "seconds" and not key.endswith(("_s", "_tps"))}
            for line in read_jsonl(out / "log.jsonl")]


def equal(one, other, *folders):
    """Whether two runs have the same log and the same weights, bit for bit."""
    from torch import equal

    return numbers(one) == numbers(other) and all(
        equal(tensor, weights(other / folder)[name])
        for folder in ("", *folders) for name, tensor in weights(one / folder).items())


def last_rate(out):
    """The learning rate with which the optimiser made the last update of a run, from its
    checkpoint."""
    from torch import load

    (file,) = out.glob("checkpoints/*/*optim_states.pt")
    state = load(file, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]
    return state["param_groups"][0]["lr"]


def weights(folder):
    """{name: tensor} of a model's folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def said(template, reply, doubt=0.8, closed=True):
    """The output of an engine for a reply. It reports two candidates per token: the reply's token
    with probability 1 - doubt / 2, and another one."""
    ids = template.encode(reply) + [template.end] * closed
    one, two = (SimpleNamespace(logprob=math.log(max(p, 1e-9))) for p in (1 - doubt / 2, doubt / 2))
    return SimpleNamespace(token_ids=ids, logprobs=[{i: one, -1: two} for i in ids],
                           stop_reason=None)


class Replies:
    """An engine that replies by script(request's name, prompt's text) -> (reply, doubt); its
    requests end in random order."""

    def __init__(self, template, script):
        self.llm_engine, self.template, self.script = self, template, script
        self.draw, self.running, self.asked = random.Random(SEED), {}, {}

    def add_request(self, name, prompt, params):
        assert name not in self.asked, f"{name} is asked for twice"
        self.running[name] = self.asked[name] = prompt["prompt_token_ids"], params

    def step(self):
        name = self.draw.choice(sorted(self.running))
        ids, _ = self.running.pop(name)
        reply = said(self.template, *self.script(name, self.template.tokenizer.decode(ids)))
        return [SimpleNamespace(finished=True, request_id=name, outputs=[reply])]


class Plain:
    """The parts of DeepSpeed's engine that an update needs, on one rank; it keeps the gradient."""

    def __init__(self, policy):
        self.module, self.steps = policy, 0
        policy.zero_grad()

    def __call__(self, *batch):
        return self.module(*batch)

    def backward(self, loss):
        loss.backward()

    def step(self):
        """The weights stay."""
        self.steps += 1

    def gradient(self):
        from torch import cat

        return cat([p.grad.flatten() for p in self.module.parameters()])

    def get_global_grad_norm(self):
        return self.gradient().norm()


@pytest.fixture
def one_rank():
    """Make this process the only rank, for the functions of a stage that use collectives."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def template(tiny_model):
    """The tiny model's tokenizer and chat template."""
    from runtime import load_template

    return load_template(tiny_model)


@pytest.fixture(scope="session")
def policy(tiny_model):
    """The tiny model as stages train it. Tests share it: copy it before changing its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    import zero3

    torch.manual_seed(SEED)
    return zero3.Policy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


def make_episodes(folder):
    from babble import Babble

    from runtime import write_jsonl

    draw, rows = random.Random(SEED), []
    for i in range(48):
        task = {"query": f"Go on, {i}.", "turns": 2}
        episode = Babble().episode(task, "", SimpleNamespace(max_turns=3))
        while not episode.stop:
            episode.step(" ".join(draw.choices("0123456789", k=3)))
        rows.append({"messages": episode.messages})
    write_jsonl(folder / "episodes.jsonl", rows)
    write_jsonl(folder / "tasks.jsonl", [
        {"id": f"b{i}", "query": f"Go on, {i}.", "turns": 1 + i % 3, "success": 0.5}
        for i in range(6)])


@pytest.fixture(scope="session")
def episodes(once):
    """A file of episodes with two replies of three digits, which a tiny model learns quickly."""
    return once("episodes", make_episodes) / "episodes.jsonl"


@pytest.fixture(scope="session")
def student(tiny_model, episodes, once):
    """The tiny model after sft.py on these episodes: it writes digits."""
    return once("student", lambda folder: train(
        "sft.py", folder / "sft", SFT, "--model", tiny_model, "--data", episodes)) / "sft"


@pytest.fixture(scope="session")
def babble(student, episodes):
    """The flags of a run in which the student learns to write high digits."""
    return f"{BABBLE} --model {student} --tasks {episodes.with_name('tasks.jsonl')}"


@pytest.fixture(scope="session")
def trained(babble, episodes, once):
    """trained(name) -> the folder of one of two equal trainings: "grpo", or "broken" (killed while
    it saved, and resumed)."""
    words = babble, "--val-every 4 --val", episodes.with_name("tasks.jsonl")

    def make(out, name):
        if name == "broken":
            train_broken("grpo.py", out, *words, signals=["KILL"])
        else:
            train("grpo.py", out, *words)

    return lambda name: once(name, lambda folder: make(folder / "rl", name)) / "rl"


@pytest.fixture
def unbroken(trained):
    """The folder of an uninterrupted run of grpo.py."""
    return trained("grpo")
