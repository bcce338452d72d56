"""What tests share: the repository on the path, the two databases, a trip, a tiny model.

The official tables and the reference's answers are not in the repository. STAR_TEST_DATA names a
folder that holds travelplanner/ and parity/; tests that need them skip, saying so, where it is
unset. TEST_SEED is the seed of whatever a test draws; the tests pass for every number.
"""
import copy
import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEED = int(os.environ.get("TEST_SEED", "0"))
sys.path.insert(0, str(ROOT))
# for this process and those it starts; the engine reads them when it is imported
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=str(ROOT))
# torchrun, and DeepSpeed's ninja
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.pop("STAR_DATABASE", None)  # a test says which database it means


@pytest.fixture(scope="session")
def root():
    """The repository's folder."""
    return ROOT


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
    """The official database, its flights table in part."""
    from sandbox import Database

    return Database(test_data / "travelplanner" / "database")


@cache
def witness(database, days=3):
    """(task, plan) of a trip by air in the small world that passes every rule set."""
    from solver import solve

    rng = random.Random(SEED)
    pairs = [(org, city) for org in database.cities for city in database.flight_destinations(org)
             if database.cities.get(city) != database.cities[org]]
    for org, city in rng.sample(pairs, len(pairs)):
        stays = {row.minimum_nights for row in database.hotels(city)}
        first = rng.randrange(1, 32 - days)
        task = {"id": "w", "query": "?", "level": "easy", "org": org, "days": days,
                "dest": city if days == 3 else database.cities[city], "people_number": 2,
                "date": [f"2022-03-{first + day:02d}" for day in range(days)], "budget": 99999,
                "visiting_city_number": days // 2, "local_constraint": {
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
    """A tokenizer of one token a character; the end of a turn is one token, 0."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens=False):
        return [0 if c == "\0" else ord(c) for c in text.replace("<|im_end|>", "\0")]

    def decode(self, ids):
        return "".join(map(chr, ids)).replace("\0", "<|im_end|>")

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True):
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n"


class Scripted:
    """An engine that says a token a step, of script(the text so far) what max_tokens allows."""

    def __init__(self, script):
        self.llm_engine, self.script, self.tokenizer = self, script, Letters()
        self.running, self.steps, self.asked = {}, 0, []  # asked: (ids, reply's ids, params)

    def add_request(self, name, prompt, params):
        ids = prompt["prompt_token_ids"]
        said = self.tokenizer.encode(self.script(self.tokenizer.decode(ids)))[:params.max_tokens]
        self.running[name] = [len(said), said]
        self.asked.append((ids, said, params))

    def step(self):
        self.steps += 1
        for entry in self.running.values():
            entry[0] -= 1
        done = [name for name, (left, _) in self.running.items() if left <= 0]
        return [SimpleNamespace(request_id=name, finished=True, outputs=[
            SimpleNamespace(token_ids=self.running.pop(name)[1])]) for name in done]

    def play(self, episodes, max_context=4000, **options):
        from evaluate import play_vllm

        return play_vllm(self, self.tokenizer, episodes, max_context, **options)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random Qwen2 of 2M parameters and a tokenizer; it says nothing sensible."""
    from sandbox import SHORT_PROMPT
    from tiny import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    tables = sorted((ROOT / "database" / "mini").glob("*.csv"))
    texts = [SHORT_PROMPT] + [path.read_text(encoding="utf-8")[:20_000] for path in tables]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    make_tiny([folder / "corpus.jsonl"], folder / "model", seed=0, vocabulary=1024)
    return folder / "model"
