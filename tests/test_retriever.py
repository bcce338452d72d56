"""Search over passages: the retrievers, the index and its interruptions, the server, its client."""
import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
import torch
from conftest import ROOT

from runtime import Mistake
from toolstar import retriever

SEED = int(os.environ.get("TEST_SEED", 0))
CORPUS = ROOT / "database" / "qa" / "corpus.jsonl"


def until(condition):
    """Wait for a condition that must become true."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("a minute has passed in vain")


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


@contextlib.contextmanager
def answering(answer, port=0):
    """The address of a server that answers by answer(request) = (status, reply), or None to hang
    up."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Content-Type"] != "application/json":  # FastAPI would not look at it
                self.say((415, {"detail": "want JSON"}))
            self.say(answer(self.keyed(asked)))

        def do_GET(self):
            self.say(answer(self.keyed(dict(parse_qsl(urlsplit(self.path).query)))))

        def keyed(self, asked):
            key = self.headers["X-API-KEY"]
            return asked | {"key": key} if key else asked

        def say(self, said):
            if said:
                body = json.dumps(said[1]).encode()
                self.send_response(said[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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


@pytest.mark.parametrize("line, said", [
    ("{", "c.jsonl, line 2: not JSON"), ('{"id": 1, "contents": 3}', "needs an id and contents")])
def test_a_bad_row_of_a_corpus_is_named(tmp_path, line, said):
    (tmp_path / "c.jsonl").write_text('{"id": 0, "contents": "x"}\n' + line)
    with pytest.raises(Mistake, match=said):
        retriever.BM25(tmp_path / "c.jsonl")


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
    retriever.main(["index", "--corpus", str(corpus), "--encoder", str(encoder), "--batch", "4",
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
    with pytest.raises(SystemExit, match="toolstar.retriever: .* was begun with"):
        index(corpus, encoder, stopped, "--batch", "8")
    retriever.Dense(stopped)
    corpus.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(Mistake, match="corpus.jsonl has changed since"):
        retriever.Dense(stopped)


def test_an_index_has_one_writer(tmp_path, corpus, encoder):
    code = (f"import runtime; runtime.lock_folder({str(tmp_path / 'i')!r})\n"
            "print(1, flush=True); input()")
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    assert other.stdout.readline()
    with pytest.raises(SystemExit, match="is writing to"):
        index(corpus, encoder, tmp_path / "i")
    other.communicate(b"\n", timeout=60)
    index(corpus, encoder, tmp_path / "i")


def test_devices_share_the_work_and_make_the_same_index(tmp_path, corpus, encoder):
    alone = index(corpus, encoder, tmp_path / "alone")
    assert index(corpus, encoder, tmp_path / "shared", "--devices", "cpu", "cpu") == alone


def test_an_index_is_searched_exactly(tmp_path, corpus, encoder):
    index(corpus, encoder, tmp_path / "i")
    dense = retriever.Dense(tmp_path / "i")
    texts = [json.loads(line)["contents"] for line in corpus.read_text().splitlines()]
    queries = ["eel and salt", "river"]
    q = retriever.encode(queries, "query: ", dense.encoder).double()
    exact = q @ retriever.encode(texts, "passage: ", dense.encoder).half().double().T
    for hits, scores in zip(dense.search(queries, 5), exact, strict=True):
        best = scores.topk(5).values.tolist()
        assert [hit["score"] for hit in hits] == pytest.approx(best, abs=1e-3)
        assert contents(hits) == [texts[int(hit["document"]["id"])] for hit in hits]


@pytest.mark.parametrize("more", [["--retriever", "FOLDER"], ["--corpus", "FOLDER/corpus.jsonl"]])
def test_a_missing_index_or_corpus_is_one_line(tmp_path, more):
    missing = r"^toolstar.retriever: .*(meta.json|corpus.jsonl) is missing"
    with pytest.raises(SystemExit, match=missing):
        retriever.main(["serve", *(word.replace("FOLDER", str(tmp_path)) for word in more)])


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


def test_many_threads_use_one_retriever():
    recorder = Recorder()
    shared = retriever.Shared(recorder)
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(shared.search, [[f"q{i}"] for i in range(40)],
                              [1 + i % 3 for i in range(40)]))
    for i, (hits,) in enumerate(found):
        assert contents(hits) == [f'"q{i}"\npassage {j}' for j in range(1 + i % 3)]
    assert sorted(sum(recorder.asked, [])) == sorted(f"q{i}" for i in range(40))
    assert shared.search([], 5) == []


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


def test_twenty_five_refused_queries_in_a_row_are_errors_of_their_own():
    def answer(request):
        bad = "bad" in request["queries"][0]
        return (400, {"detail": "no"}) if bad else Flaky([])(request)

    with answering(answer) as url:
        remote = retriever.Remote(url, pause=0.01)
        for number in range(25):
            error, = remote.search([f"bad {number}"], 3)
            assert isinstance(error, retriever.QueryError) and "status 400" in str(error)
        assert [contents(row) for row in remote.search(["b"], 3)] == [['"b"\nx']]


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
        remote = retriever.Remote(url, tries=2, pause=0.01)
        shared = retriever.Shared(remote)
        hits = shared.search(["a", "bad", "b", "c"], 3)
    assert isinstance(hits[1], retriever.QueryError)
    assert [contents(row) for row in hits[:1] + hits[2:]] == [['"a"\nx'], ['"b"\nx'], ['"c"\nx']]


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


@pytest.mark.parametrize("address", ["/search", "/batch_search", "/batch_search/"])
@pytest.mark.parametrize("scores", [False, True])
def test_tool_stars_own_server_is_asked_as_it_wants_to_be(address, scores):
    def answer(request):
        seen.append(request)
        return 200, [[{"id": "7", "contents": f'"{query}"\nx'}] for query in request["query"]]

    seen = []
    with answering(answer) as url:
        hits = retriever.Remote(url + address).search(["a", "b"], 3)
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


# ---------------------------------------------------------------- vectors of others

def write_flat(path, vectors, kind=b"IxFI"):
    """A flat index as faiss 1.14 writes it."""
    total, dim = vectors.shape
    head = struct.pack("<iqqqBiq", dim, total, 2**20, 2**20, 1, 0, total * dim)
    path.write_bytes(kind + head + vectors.astype(np.float32).tobytes())


def test_a_flat_index_of_faiss_is_used_as_it_is(tmp_path, capsys):
    vectors = np.random.default_rng(SEED).normal(size=(5, 8)).astype(np.float16)
    write_flat(tmp_path / "e5_Flat.index", vectors)
    rows = [{"id": str(i), "contents": f'"T{i}"\nx'} for i in range(5)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["index", "--corpus", str(tmp_path / "c.jsonl"), "--encoder", "e5", "--vectors",
             str(tmp_path / "e5_Flat.index"), "--out", str(tmp_path / "index")]
    retriever.main(words)
    matrix = np.fromfile(tmp_path / "index" / "matrix.f16", np.float16).reshape(5, 8)
    assert (matrix == vectors).all() and "5 passages of 8 numbers" in capsys.readouterr().out
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(SystemExit, match="5 vectors, .*c.jsonl 1 passages"):
        retriever.main([*words[:-1], str(tmp_path / "other")])


@pytest.mark.parametrize("kind, cut", [(b"IHNf", 0), (b"IxFI", 4), (b"Ix", 10**4)])
def test_an_index_that_is_not_flat_or_not_whole_is_refused(tmp_path, kind, cut):
    write_flat(tmp_path / "x.index", np.zeros((3, 4)), kind)
    content = (tmp_path / "x.index").read_bytes()
    (tmp_path / "x.index").write_bytes(content[:max(2, len(content) - cut)])
    with pytest.raises(Mistake, match="x.index is not a whole flat index of faiss"):
        retriever.flat_vectors(tmp_path / "x.index")


# ---------------------------------------------------------------- /retrieve

def test_serve_is_one_command_and_holds_two_hundred_clients_at_once(tmp_path):
    """They come while the server is stopped, so that all of them wait at the same moment."""
    rows = (CORPUS.parent / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(row)["question"] for row in rows]
    expected = [contents(hits) for hits in retriever.BM25(CORPUS).search(questions, 3)]
    command = [sys.executable, "-m", "toolstar.retriever", "serve", "--port", "0"]
    log = tmp_path / "log"
    with open(log, "w") as out, subprocess.Popen(command, cwd=ROOT, stderr=out) as server:
        try:
            until(lambda: "running on" in log.read_text() or server.poll() is not None)
            url, port = re.search(r"(http://127.0.0.1:(\d+))", log.read_text()).groups()
            hits = retriever.Remote(url).search([questions[0], "", "the"], 3)
            assert [contents(row) for row in hits] == [expected[0], [], []]
            server.send_signal(signal.SIGSTOP)
            clients = [socket.create_connection(("127.0.0.1", int(port)), 60) for _ in range(200)]
            for i, client in enumerate(clients):
                body = json.dumps({"queries": ["", questions[i % 64]], "topk": 3}).encode()
                client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                               b"Content-Type: application/json\r\n"
                               b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            server.send_signal(signal.SIGCONT)
            for i, client in enumerate(clients):
                with client, client.makefile("rb") as reply:
                    head, _, body = reply.read().partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                found = [[document["contents"] for document in row]
                         for row in json.loads(body)["result"]]
                assert found == [[], expected[i % 64]]
        finally:
            server.send_signal(signal.SIGCONT)
            server.terminate()
