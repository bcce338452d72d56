"""What tests share: the repository on the path, the two databases, a tiny model.

The official tables and the reference's answers are not in the repository. STAR_TEST_DATA names a folder that holds
travelplanner/ and parity/; tests that need them skip, saying so, where it is unset.
"""
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# for this process and those it starts; the engine reads them when it is imported
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=str(ROOT))
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # torchrun, DeepSpeed's ninja
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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random Qwen2 of 2M parameters and a tokenizer; it says nothing sensible, quickly."""
    from sandbox import SHORT_PROMPT
    from tiny import make_tiny
    folder = tmp_path_factory.mktemp("tiny")
    tables = sorted((ROOT / "database" / "mini").glob("*.csv"))
    texts = [SHORT_PROMPT] + [path.read_text(encoding="utf-8")[:20_000] for path in tables]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    make_tiny([folder / "corpus.jsonl"], folder / "model", seed=0, vocabulary=1024)
    return folder / "model"
