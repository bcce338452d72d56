"""Search over passages: the retrievers, the index and its interruptions, the server, its client."""
import json
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import ROOT, SEED, answering

from runtime import Mistake
from toolstar import __main__ as star
from toolstar import retriever

CORPUS = ROOT / "database" / "qa" / "corpus.jsonl"


def until(condition):
    """Wait for a condition that must become true."""
    while not condition():
        time.sleep(0.01)


class Recorder:
    """A retriever of fixed hits that records its queries. Its first scan waits for `ready`."""

    def __init__(self, ready=lambda: True):
        self.asked, self.ready = [], ready

    def search(self, queries, k):
        self.asked.append(list(queries))
        if len(self.asked) == 1:
            until(self.ready)
        return [[{"document": {"id": str(i), "contents": f'"{query}"\npassage {i}'},
                  "score": 1.0 / (i + 1)} for i in range(k)] for query in queries]


def contents(hits):
    return [hit["document"]["contents"] for hit in hits]


class Flaky:
    """A retrieval server whose next replies are scripted: a status, or None to hang up."""

    def __init__(self, script):
        self.script, self.seen = script, []

    def __call__(self, request):
        self.seen.append(request)
        status = self.script.pop(0) if self.script else 200
        if status is None:
            return None
        if status != 200:
            return status, {"detail": f"{status} it is"}
        return 200, {"result": [[{"document": {"id": "0", "contents": f'"{query}"\nx'}, "score": 1}]
                                for query in request["queries"]]}


# ---------------------------------------------------------------- documents, BM25

@pytest.mark.parametrize("row, found", [
    ({"id": 3, "contents": '"T"\nx'}, {"id": "3", "contents": '"T"\nx'}),
    ({"id": "a", "title": "T", "text": "x", "more": 1}, {"id": "a", "contents": '"T"\nx'}),
    ({"text": "x"}, {"id": "", "contents": '""\nx'})])
def test_a_row_of_a_corpus_is_search_r1s_or_flashrags(row, found):
    assert retriever.document_of(row) == found


def test_bm25_returns_only_passages_with_a_word_of_the_query():
    bm25 = retriever.BM25(CORPUS)
    fish, *others = bm25.search(["Which fish lives in Lake Morrin?", "", "the", "?!", "zzxy"], 3)
    assert len(fish) == 3 and "blind char" in fish[0]["document"]["contents"]
    assert fish[0]["score"] > fish[1]["score"] > fish[2]["score"] > 0
    assert others == [[], [], [], []]
    assert len(bm25.search(["island"], 1000)[0]) < len(bm25.documents)


# ---------------------------------------------------------------- index

@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random BERT with two layers and a word tokenizer made from the default corpus."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("encoder")
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train([str(CORPUS)], trainers.WordPieceTrainer(vocab_size=800, special_tokens=special))
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]").save_pretrained(folder)
    torch.manual_seed(SEED)
    BertModel(BertConfig(
        vocab_size=words.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=256,
    )).save_pretrained(folder)
    return folder


def test_vectors_are_e5s(encoder):
    model, tokenizer = pair = retriever.load_encoder(str(encoder), "cpu")
    texts = ["Hollin", "the longest river of the Tarn Isles " * 80]  # one is padded, the other cut
    for text, vector in zip(texts, retriever.encode(texts, "passage: ", pair), strict=True):
        ids = tokenizer("passage: " + text, max_length=256, truncation=True, return_tensors="pt")
        with torch.no_grad():
            mean = model(**ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, mean / mean.norm(), atol=1e-5, rtol=0)
    assert ids["input_ids"].shape[1] == 256
    one, other = retriever.encode(["\ud800 eel", "? eel"], "query: ", pair)  # half a character
    assert torch.equal(one, other)
    assert retriever.encode([], "query: ", pair).shape == (0, 32)


@pytest.fixture
def corpus(tmp_path):
    """700 short passages without a line break at the end."""
    words = ["salt", "eel", "lamp", "harbour", "island", "chain", "river", "slate", "seal", "bread"]
    draw = random.Random(SEED)
    texts = [f'"Title {i}"\n' + " ".join(draw.choices(words, k=draw.randrange(3, 30)))
             for i in range(700)]
    lines = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus.jsonl"


def index(corpus, encoder, out, *more):
    """Build an index in blocks of 256 passages; return its matrix."""
    star.main(["index", "--corpus", str(corpus), "--encoder", str(encoder), "--batch", "4",
                    "--out", str(out), *more])
    return (out / "matrix.f16").read_bytes()


def test_an_index_goes_on_after_a_stop_and_is_then_the_same(tmp_path, corpus, encoder, capsys):
    whole = index(corpus, encoder, tmp_path / "whole")
    assert len(whole) == 700 * 32 * 2 and "700 passages of 32" in capsys.readouterr().out
    text, stopped = corpus.read_text(), tmp_path / "stopped"
    corpus.write_text(text.replace('{"id": "400"', '#"id": "400"'))
    with pytest.raises(ValueError):
        index(corpus, encoder, stopped)
    corpus.write_text(text)
    with open(stopped / "matrix.f16", "r+b") as file:
        assert file.read() == whole[:256 * 64]
        file.write(b"\1" * 64 * 10 + b"a block torn in its eleventh row")
        file.seek(0)
        file.write(b"done already")  # marks the first block
    with pytest.raises(Mistake, match="is not complete: run the same `index` again"):
        retriever.Dense(stopped)
    marked = b"done already" + whole[12:]  # the first block was not done again
    assert index(corpus, encoder, stopped) == marked
    with open(stopped / "matrix.f16", "r+b") as file:
        file.write(whole[:12])
        file.seek(-5, os.SEEK_END)
        file.write(b"there")
    assert index(corpus, encoder, stopped) == whole[:-5] + b"there"  # nothing is left to do
    with pytest.raises(SystemExit, match="toolstar index: .* was begun with"):
        index(corpus, encoder, stopped, "--batch", "8")
    retriever.Dense(stopped)
    corpus.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(Mistake, match="corpus.jsonl has changed since"):
        retriever.Dense(stopped)


def test_an_index_is_searched_exactly(tmp_path, corpus, encoder, monkeypatch):
    index(corpus, encoder, tmp_path / "i")
    monkeypatch.setattr(retriever, "CHUNK", 100)
    dense = retriever.Dense(tmp_path / "i", ("cpu", "cpu"))
    texts = [json.loads(line)["contents"] for line in corpus.read_text().splitlines()]
    queries = ["eel and salt", "river"]
    q = retriever.encode(queries, "query: ", dense.encoder).double()
    exact = q @ retriever.encode(texts, "passage: ", dense.encoder).half().double().T
    for hits, scores in zip(dense.search(queries, 5), exact, strict=True):
        found = scores[[texts.index(text) for text in contents(hits)]].tolist()
        assert found == pytest.approx(scores.topk(5).values.tolist(), abs=1e-5)
        assert [hit["score"] for hit in hits] == pytest.approx(found, abs=1e-3)


def test_a_flat_index_of_faiss_is_used_as_it_is_and_no_other(tmp_path):
    vectors = np.random.default_rng(SEED).normal(size=(5, 8)).astype(np.float16)
    head = struct.pack("<4siqqqBiq", b"IxFI", 8, 5, 2**20, 2**20, 1, 0, 40)  # as faiss 1.14 has it
    flat, corpus = tmp_path / "e5_Flat.index", tmp_path / "c.jsonl"
    flat.write_bytes(head + vectors.astype(np.float32).tobytes())
    rows = [json.dumps({"id": str(i), "contents": "x"}) + "\n" for i in range(5)]
    corpus.write_text("".join(rows))
    assert index(corpus, "e5", tmp_path / "i", "--vectors", str(flat)) == vectors.tobytes()
    corpus.write_text(rows[0])
    with pytest.raises(SystemExit, match="5 vectors"):
        index(corpus, "e5", tmp_path / "other", "--vectors", str(flat))
    for broken in flat.read_bytes()[:-4], b"IHNf" + flat.read_bytes()[4:]:
        flat.write_bytes(broken)
        with pytest.raises(Mistake, match="e5_Flat.index"):
            retriever.flat_vectors(flat)


@pytest.mark.slow
def test_serve_answers_as_bm25_does(tmp_path):
    command = [sys.executable, "-m", "toolstar", "serve", "--port", "0"]
    queries, log = ["Which fish lives in Lake Morrin?", "", "the"], tmp_path / "log"
    with open(log, "w") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as server:
        try:
            until(lambda: "running on" in log.read_text() or server.poll() is not None)
            url, = re.findall(r"http://127.0.0.1:\d+", log.read_text())
            found = retriever.Remote(url).search(queries, 3)
        finally:
            server.terminate()
    expected = retriever.BM25(CORPUS).search(queries, 3)
    assert list(map(contents, found)) == list(map(contents, expected))


# ---------------------------------------------------------------- sharing

def test_searches_that_arrive_during_a_scan_share_the_next():
    go = threading.Event()
    slow = Recorder(go.is_set)
    shared, many = retriever.Shared(slow), [f"q{i}" for i in range(130)]
    with ThreadPoolExecutor(131) as pool:
        first = pool.submit(shared.search, ["first"], 1)
        until(lambda: slow.asked)
        found = [pool.submit(shared.search, [query], 1 + i % 3) for i, query in enumerate(many)]
        until(lambda: sum(len(asked) for asked, *_ in shared.waiting) == 130)
        go.set()
    assert contents(first.result()[0]) == ['"first"\npassage 0']
    for i, (query, hits) in enumerate(zip(many, found, strict=True)):
        assert contents(hits.result()[0]) == [f'"{query}"\npassage {j}' for j in range(1 + i % 3)]
    assert list(map(len, slow.asked)) == [1, 64, 64, 2]


def test_a_scan_that_breaks_is_raised_and_leaves_nobody_waiting():
    class Broken(Recorder):
        def search(self, queries, k):
            hits = super().search(queries, k)
            return 1 / 0 if "bad" in queries else hits

    go = threading.Event()
    broken = Broken(go.is_set)
    shared = retriever.Shared(broken)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(shared.search, ["good"], 1)
        until(lambda: broken.asked)
        together = [pool.submit(shared.search, [query], 1) for query in ("good", "bad", "good")]
        until(lambda: sum(len(asked) for asked, *_ in shared.waiting) == 3)
        go.set()
    assert first.exception() is None
    assert all(isinstance(scan.exception(), ZeroDivisionError) for scan in together)
    assert shared.search(["good"], 1)  # and the next one is served


# ---------------------------------------------------------------- the client

def test_the_client_asks_again():
    server = Flaky([503, None, 429, 500])
    with answering(server) as url:
        hits = retriever.Remote(url + "/retrieve/", tries=5, pause=0.01).search(["a\ud800"], 3)
    assert [contents(row) for row in hits] == [['"a\ud800"\nx']]
    asked = {"queries": ["a\ud800"], "topk": 3, "return_scores": True}
    assert server.seen == [asked] * 5


@pytest.mark.parametrize("found", [
    400, 422, 500, None, [], "x", {"result": None}, {"error": "x"}, *(
        {"result": [row]} for row in (None, "x", ["x"], [None], [{"document": None}],
                                      [{"document": {"contents": None}}]))], ids=str)
def test_a_query_that_fails_never_fails_its_neighbours(found):
    def answer(request):
        if "bad" not in request["queries"]:
            return Flaky([])(request)
        failed = found is None or isinstance(found, int)
        return Flaky([found])(request) if failed else (200, found)

    with answering(answer) as url:
        remote = retriever.open_retriever(url, tries=2, pause=0.01)
        hits = remote.search(["a", "bad", "b", "c"], 3)
    assert isinstance(hits[1], retriever.QueryError)
    assert [contents(row) for row in hits[:1] + hits[2:]] == [['"a"\nx'], ['"b"\nx'], ['"c"\nx']]


def test_a_query_that_hangs_holds_up_no_other_and_is_not_asked_again(monkeypatch):
    def answer(request):
        asked.append(queries := request["queries"])
        for query in held.keys() & queries:
            held[query].wait()
        return Flaky([])(request)

    monkeypatch.setattr(retriever, "PATIENCE", 0.1)
    asked, held = [], {"first": threading.Event(), "bad": threading.Event()}
    with answering(answer) as url, ThreadPoolExecutor(4) as pool:
        try:
            shared = retriever.Shared(retriever.Remote(url))
            pool.submit(shared.search, ["first"], 3)
            until(lambda: asked)
            bad, good = (pool.submit(shared.search, [query], 3) for query in ("bad", "a"))
            until(lambda: sum(len(queries) for queries, *_ in shared.waiting) == 2)
            held["first"].set()  # now both go in one request, and then alone
            assert contents(good.result()[0]) == ['"a"\nx'] and not bad.done()
            monkeypatch.setattr(retriever, "SILENCE", 0.1)
            error, = retriever.Remote(url).search(["bad"], 3)
            assert isinstance(error, ConnectionError) and asked.count(["bad"]) == 2
        finally:
            for event in held.values():
                event.set()


@pytest.mark.parametrize("status", [401, 404, 500, None])
def test_a_server_is_at_fault_if_it_fails_on_a_query_that_it_has_answered(status):
    server = Flaky([200])
    with answering(server) as url:
        remote = retriever.Remote(url, tries=2, pause=0.01)
        assert contents(remote.search(["a"], 3)[0]) == ['"a"\nx']
        server.script += [status] * 3
        error, = remote.search(["b"], 3)
        assert isinstance(error, ConnectionError) and not isinstance(error, retriever.QueryError)
        assert server.seen[-1]["queries"] == ["a"]
        server.script.clear()
        assert contents(remote.search(["c"], 3)[0]) == ['"c"\nx']


@pytest.mark.parametrize("size, seconds", [(1000, 300), (2**26, -1)])
def test_a_reply_without_end_takes_neither_memory_nor_time(monkeypatch, size, seconds):
    monkeypatch.setattr(retriever, "BODY_BYTES", size)
    monkeypatch.setattr(retriever, "BODY_SECONDS", seconds)
    reply = {"result": [[{"document": {"contents": "x" * 5000}}]]}
    with answering(lambda request: (200, reply)) as url:
        error, = retriever.Remote(url, tries=1).search(["a"], 3)
    assert isinstance(error, ConnectionError) and "the reply does not end" in str(error)


@pytest.mark.parametrize("address", ["/search", "/batch_search/"])
def test_tool_stars_own_server_is_asked_as_it_wants_to_be(address):
    def answer(request):
        seen.append(request)
        return 200, [[{"id": "7", "contents": f'"{query}"\nx'}] for query in request["query"]]

    seen = []
    with answering(answer) as url:
        hits = retriever.open_retriever(url + address).search(["a", "b"], 3)
    assert seen == [{"query": ["a", "b"], "top_n": 3, "return_score": False}]
    assert [contents(row) for row in hits] == [['"a"\nx'], ['"b"\nx']]


def test_a_web_search_is_asked_as_its_settings_say(tmp_path):
    def answer(request):
        seen.append(request)
        if request["q"] == "nothing":
            return 200, {}
        return 200, {"organic": [{"title": "T", "snippet": f"on {request['q']}", "link": "http://x"},
                                 {}, {"title": "the third"}]}

    seen, file = [], tmp_path / "web.json"
    web = json.loads((ROOT / "database/tool-star/web.json").read_text())
    with answering(answer) as url:
        file.write_text(json.dumps(web | {"url": url, "headers": {"X-API-KEY": "secret"}}))
        retriever.find_retriever(str(file), None)
        hits, none = retriever.open_retriever(str(file)).search(["a lake", "nothing"], 2)
    assert {"q": "a lake", "num": 2, "key": "secret"} in seen
    assert contents(hits) == ['"T"\non a lake http://x', '""\n '] and none == []
