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
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import httpx2
import numpy as np
import pytest
import torch
from conftest import ROOT

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


class Weather:
    """A retrieval server with typical trouble: it refuses one query in twenty for good, fails one
    request in five for a while, and is gone once before it returns at the same address. A query
    fails three times at most, one less than Remote tries; else chance would refuse one in 600."""

    def __init__(self, bad=120, gone_after=40, seconds=0.5):
        self.draw, self.lock, self.seconds = random.Random(SEED), threading.Lock(), seconds
        self.asked, self.bad, self.gone_after, self.back = 0, bad, gone_after, threading.Event()
        self.answered, self.failed = [], Counter()

    @staticmethod
    def refuses(query):
        return zlib.crc32(query.encode()) % 20 == 0

    def __call__(self, request):
        queries = request["queries"]
        with self.lock:
            self.asked += 1
            fails = (self.asked < self.bad and self.draw.random() < 0.2
                     and max(self.failed[query] for query in queries) < 3)
            self.failed.update(queries if fails else ())
            if self.asked == self.gone_after:
                self.back.set()
        refused = [query for query in queries if self.refuses(query)]
        if refused:
            return (400, 500)[zlib.crc32(refused[0].encode()) // 20 % 2], {"detail": "refused"}
        if fails:
            return 503, {"detail": "busy"}
        self.answered += queries
        return Flaky([])(request)

    @contextlib.contextmanager
    def served(self):
        """The address of a server that restarts once after some requests."""
        def life():
            with answering(self, self.port):
                up.set()
                while not (self.back.wait(0.05) or over.is_set()):
                    pass  # the start of a trainer may take minutes
            time.sleep(self.seconds)
            if not over.is_set():
                with answering(self, self.port):
                    over.wait()

        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        up, over = threading.Event(), threading.Event()
        thread = threading.Thread(target=life)
        thread.start()
        assert up.wait(60)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            over.set()
            thread.join()


# ---------------------------------------------------------------- documents, BM25

@pytest.mark.parametrize("line, found", [
    ('{"id": 3, "contents": "\\"T\\"\\nx"}', {"id": "3", "contents": '"T"\nx'}),
    ('{"id": "a", "title": "T", "text": "x", "more": 1}', {"id": "a", "contents": '"T"\nx'}),
    ('{"text": "x"}', {"id": "", "contents": '""\nx'}),
])
def test_a_corpus_line_is_search_r1s_or_flashrags(line, found):
    assert retriever.load_document(line, "c") == found


@pytest.mark.parametrize("line, said", [
    ("{", "not JSON"), ("[1]", "it must have id and contents"),
    ("{}", "it must have id and contents"),
    ('{"contents": 3}', "it must have id and contents")])
def test_a_bad_corpus_line_is_named(tmp_path, line, said):
    (tmp_path / "c.jsonl").write_text('{"id": 0, "contents": "x"}\n' + line)
    with pytest.raises(ValueError, match=f"c.jsonl, line 2: {said}"):
        retriever.BM25(tmp_path / "c.jsonl")


def test_bm25_returns_only_passages_with_a_word_of_the_query():
    bm25 = retriever.BM25(CORPUS)
    fish, *others = bm25.search(["Which fish lives in Lake Morrin?", "", "the", "?!", "zzxy"], 3)
    assert len(fish) == 3 and "blind char" in fish[0]["document"]["contents"]
    assert fish[0]["score"] > fish[1]["score"] > fish[2]["score"] > 0
    assert others == [[], [], [], []]
    assert len(bm25.search(["island"], 1000)[0]) < len(bm25.documents)


# ---------------------------------------------------------------- exact search

@pytest.fixture(scope="module")
def vectors():
    """50K random unit vectors in fp16, ten of them exact duplicates, and 40 queries."""
    generator = torch.Generator().manual_seed(SEED)
    matrix = torch.randn(50_000, 256, generator=generator)
    matrix = torch.nn.functional.normalize(matrix).half()
    matrix[40_000:40_010] = matrix[100:110]
    q = torch.nn.functional.normalize(torch.randn(40, 256, generator=generator))
    q[:10] = matrix[100:110].float()  # the best two hits of these are an exact tie
    return q, matrix


def test_search_equals_brute_force_in_float64(vectors):
    q, matrix = vectors
    exact = q.double().numpy() @ matrix.double().numpy().T
    order = np.argsort(-exact, axis=1, kind="stable")[:, :6]
    best = np.take_along_axis(exact, order, 1)
    rows, scores = retriever.nearest(q, matrix, 5)
    np.testing.assert_allclose(scores.numpy(), best[:, :5], atol=1e-12)
    # identical rows, but where float64 itself cannot tell two passages apart
    clear = -np.diff(best, axis=1).max(1) > 1e-12
    assert clear.sum() >= 25
    np.testing.assert_array_equal(rows.numpy()[clear], order[clear, :5])
    for i in range(10):
        assert rows[i, :2].tolist() == [100 + i, 40_000 + i]  # ties by row
    # a question's passages do not depend on who else asks
    alone = torch.cat([retriever.nearest(q[i:i + 1], matrix, 5)[0] for i in range(6, 14)])
    assert torch.equal(alone, rows[6:14])


def test_passages_that_float32_cannot_tell_apart_are_in_the_right_order(vectors):
    q, matrix = vectors[0][10:11].clone(), vectors[1][:3000].clone()  # no row is its double
    q[0, 0] = 1e-5
    best = (q[0] / q[0].norm()).half()
    for i in range(12):  # scores that differ by 1e-8, where one float32 step near 1 is 6e-8
        matrix[200 * i] = best
        matrix[200 * i, 0] = 0.001 * ((5 * i) % 12)
    order = sorted(range(12), key=lambda i: -matrix[200 * i, 0].item())
    assert retriever.nearest(q, matrix, 5)[0].tolist() == [[200 * i for i in order[:5]]]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_find_what_one_matrix_finds(vectors, tmp_path, shards):
    q, matrix = vectors
    (tmp_path / "matrix.f16").write_bytes(matrix.numpy().tobytes())
    threads = torch.get_num_threads()
    torch.set_num_threads(shards)
    found = retriever.Matrix(tmp_path / "matrix.f16", *matrix.shape)
    torch.set_num_threads(threads)
    assert len(found.shards) == shards
    whole = retriever.nearest(q, matrix, 5)
    (ids, scores), (wanted, exact) = found.nearest(q, 5), whole
    # the order in which a product is summed depends on the width of its block
    assert torch.equal(ids, wanted) and torch.allclose(scores, exact, rtol=0, atol=1e-12)


def test_fewer_passages_than_k(vectors):
    q, matrix = vectors
    rows, _ = retriever.nearest(q, matrix[:3], 5)
    assert rows.shape == (40, 3) and rows.sort().values.tolist() == [[0, 1, 2]] * 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_the_cpu_finds(vectors):
    q, matrix = vectors
    rows, _ = retriever.nearest(q, matrix.cuda(), 5)
    assert torch.equal(rows, retriever.nearest(q, matrix, 5)[0])


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
    with pytest.raises(SystemExit, match="corpus.jsonl, line 401: not JSON"):
        index(corpus, encoder, stopped)
    corpus.write_text(text)
    with open(stopped / "matrix.f16", "r+b") as file:
        assert file.read() == whole[:256 * 64]
        file.write(b"\1" * 64 * 10 + b"a block torn in its eleventh row")
        file.seek(0)
        file.write(b"done already")  # marks the first block
    with pytest.raises(ValueError, match="has 266 of 700 passages: run the same `index` again"):
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
    with pytest.raises(ValueError, match="corpus.jsonl has changed since"):
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
    shared = retriever.Shared(slow)
    shared.join(["first"], 1)
    until(lambda: slow.asked)
    many = [f"q{i}" for i in range(130)]
    joined = [shared.join([query], 1 + i % 3) for i, query in enumerate(many)]
    go.set()
    for query, (scan, place) in zip(many, joined, strict=True):
        (hits,) = scan.result()[place]
        assert contents(hits) == [f'"{query}"\npassage {i}' for i in range(3)]
    assert slow.asked == [["first"], many[:64], many[64:128], many[128:]]


def test_many_threads_use_one_retriever():
    recorder = Recorder()
    shared = retriever.Shared(recorder)
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(shared.search, [[f"q{i}"] for i in range(40)],
                              [1 + i % 3 for i in range(40)]))
    for i, (hits,) in enumerate(found):
        assert contents(hits) == [f'"q{i}"\npassage {j}' for j in range(1 + i % 3)]
    assert sorted(sum(recorder.asked, [])) == sorted(f"q{i}" for i in range(40))
    many = [str(i) for i in range(150)]  # one big request is scanned in parts
    assert [contents(hits)[0].split('"')[1] for hits in shared.search(many, 2)] == many
    assert max(map(len, recorder.asked)) == retriever.MAX_QUERIES
    assert shared.search([], 5) == []


def test_a_scan_that_breaks_is_raised_and_leaves_nobody_waiting():
    class Broken(Recorder):
        def search(self, queries, k):
            hits = super().search(queries, k)
            return 1 / 0 if "bad" in queries else hits

    go = threading.Event()
    broken = Broken(go.is_set)
    shared = retriever.Shared(broken)
    first = shared.join(["good"], 1)[0]
    until(lambda: broken.asked)
    together = [shared.join([query], 1)[0] for query in ("good", "bad", "good")]
    go.set()
    assert first.exception() is None
    assert all(isinstance(scan.exception(), ZeroDivisionError) for scan in together)
    assert shared.search(["good"], 1)  # and the next one is served


# ---------------------------------------------------------------- the client

def test_the_client_asks_again_until_the_server_is_back():
    server = Flaky([503, None, 429, 500])
    with answering(server) as url:
        hits = retriever.Remote(url, tries=5, pause=0.01).search(["a\ud800"], 3)
    assert [contents(row) for row in hits] == [['"a\ud800"\nx']]
    asked = {"queries": ["a\ud800"], "topk": 3, "return_scores": True}
    assert server.seen == [asked] * 5


@pytest.mark.parametrize("script, said, requests", [
    ([400], "400 .*400 it is", 2), ([500, 422], "422 .*422 it is", 3),
    ([500, 500, 500, 200, 500], "try 3 of 3: 500 .*500 it is", 6),
    ([None, None, None, 200, None], "try 3 of 3: RemoteProtocolError", 6)])
def test_a_query_that_fails_alone_is_an_error_of_its_own(script, said, requests):
    server = Flaky(script)
    with answering(server) as url:
        remote = retriever.Remote(url + "/retrieve/", tries=3, pause=0.01)
        error, = remote.search(["a"], 3)
        assert isinstance(error, retriever.QueryError) and re.match(said, str(error))
        assert len(server.seen) == requests, "at last whether another query is answered"
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


def test_a_server_that_answers_no_other_query_is_reported():
    with answering(lambda request: Flaky([400] * (request["queries"] != ["a"]))(request)) as url:
        remote = retriever.Remote(url, tries=1)
        for _ in range(retriever.IN_A_ROW - 1):
            assert isinstance(remote.search(["b"], 3)[0], retriever.QueryError)
        with pytest.raises(ConnectionError, match="none of the last 20 queries, .*repeat this"):
            remote.search(["b"], 3)


@pytest.mark.parametrize("status", [401, 404, 502, 503])
def test_no_query_fails_while_the_server_answers_none(status):
    server = Flaky([200, *[status] * 4])
    with answering(server) as url:
        remote = retriever.Remote(url, tries=1, pause=0.01, patience=60)
        hits = [contents(remote.search([query], 3)[0]) for query in "ab"]
        assert hits == [['"a"\nx'], ['"b"\nx']] and len(server.seen) == 2 + 4
    with answering(Flaky([status] * 999)) as url:
        remote = retriever.Remote(url, tries=1, pause=0.01, patience=0.05)
        with pytest.raises(ConnectionError, match=f"answers no query: {status}.*repeat this"):
            remote.search(["a"], 3)


def test_a_server_that_restarts_is_waited_for_and_used_again():
    with answering(Flaky([])) as url:
        remote = retriever.Remote(url, tries=1, pause=0.02, patience=0.1)
        assert contents(remote.search(["a"], 3)[0]) == ['"a"\nx']
    with pytest.raises(ConnectionError, match="answers no query: ConnectError.*repair it"):
        remote.search(["a"], 3)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="answers no query"):
        remote.search(["a"], 3)
    assert time.monotonic() - began < 60, "it is not waited for again"
    port = int(url.rpartition(":")[2])
    with answering(Flaky([]), port):
        assert contents(remote.search(["b"], 3)[0]) == ['"b"\nx']
    remote.patience = 60.0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(remote.search, ["c"], 3)
        time.sleep(0.1)
        with answering(Flaky([]), port):
            assert contents(waiting.result()[0]) == ['"c"\nx']


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


WEB = {"headers": {"X-API-KEY": "{key}"}, "key": "web.key", "body": {"q": "{query}", "num": "{k}"},
       "results": "web.results", "text": "description"}


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_web_search_is_asked_as_its_settings_say(tmp_path, method):
    def answer(request):
        seen.append(request)
        hits = [{"title": "T", "description": f"on {request['q']}", "link": "http://x"}, 3, {}]
        return 200, {"web": {"results": hits}}

    seen = []
    (tmp_path / "web.key").write_text("secret\n")
    with answering(answer) as url:
        chosen = WEB | {"url": url, "method": method, "headers": {"X-API-KEY": "a {key}!"}}
        (tmp_path / "web.json").write_text(json.dumps(chosen))
        retriever.find_retriever(str(tmp_path / "web.json"), None)
        web = retriever.open_retriever(str(tmp_path / "web.json"))
        hits = web.search(["a lake"], 2)[0]
    asked, = seen
    assert asked.pop("key") == "a secret!"
    assert asked == {"q": "a lake", "num": 2 if method == "POST" else "2"}
    assert contents(hits) == ['"T"\non a lake http://x', '""']


def test_a_web_search_without_hits_finds_nothing_and_bad_settings_are_named(tmp_path):
    path = tmp_path / "web.json"
    with answering(lambda request: (200, {"web": None})) as url:
        path.write_text(json.dumps(WEB | {"url": url, "key": ""}))
        assert retriever.Web(path).search(["a"], 2) == [[]]
    with answering(lambda request: (200, {"web": {"results": {"x": 1}}})) as url:
        path.write_text(json.dumps(WEB | {"url": url, "key": ""}))
        with pytest.raises(ConnectionError, match="web.results in the reply is not a list"):
            retriever.Web(path).search(["a"], 2)
    path.write_text(json.dumps(WEB | {"url": 5}))
    with pytest.raises(ValueError, match="web.json: 'url' is 5, which has the wrong type"):
        retriever.Web(path)
    path.write_text(json.dumps({"url": "http://x"}))
    with pytest.raises(ValueError, match="web.json has no body, results, text"):
        retriever.Web(path)


@pytest.mark.parametrize("reply", [
    [], {}, 3, {"result": []}, {"result": [[], []]}, {"result": [3]}, {"result": None},
    {"result": [[{"contents": "x"}]]}, {"result": [[{"document": {"contents": 3}}]]}])
def test_another_server_at_the_address_is_reported(reply):
    with (answering(lambda request: (200, reply)) as url,
          pytest.raises(ConnectionError, match="is not a server of Search-R1 or Tool-Star")):
        retriever.Remote(url).search(["a"], 1)


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
    assert (matrix == vectors).all() and "5 vectors of 8 numbers" in capsys.readouterr().out
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(SystemExit, match="5 vectors, .*c.jsonl 1 passages"):
        retriever.main([*words[:-1], str(tmp_path / "other")])


@pytest.mark.parametrize("kind, cut, said", [
    (b"IHNf", 0, "is not a flat index of faiss, but 'IHNf'.*to encode the corpus"),
    (b"IxFI", 4, "is cut short"), (b"Ix", 10**4, "is not a flat index")])
def test_an_unusable_index_is_reported_with_the_reason(tmp_path, kind, cut, said):
    write_flat(tmp_path / "x.index", np.zeros((3, 4)), kind)
    content = (tmp_path / "x.index").read_bytes()
    (tmp_path / "x.index").write_bytes(content[:max(2, len(content) - cut)])
    with pytest.raises(ValueError, match=f"x.index {said}"):
        retriever.flat_vectors(tmp_path / "x.index")


# ---------------------------------------------------------------- /retrieve

@pytest.fixture(scope="module")
def retrieve():
    """POST to our server with fixed hits: (status, reply)."""
    import uvicorn
    app = retriever.make_app(retriever.Shared(Recorder()))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()

    def post(body, path="/retrieve", **options):
        address = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
        reply = httpx2.post(address, content=body, timeout=60, **options)
        return reply.status_code, reply.json()

    yield post
    server.should_exit = True
    thread.join()


def test_retrieve_answers_with_and_without_scores(retrieve):
    status, scored = retrieve(b'{"queries": ["a", "b"], "topk": 2, "return_scores": true}')
    assert status == 200
    assert [contents(hits) for hits in scored["result"]] == [
        ['"a"\npassage 0', '"a"\npassage 1'], ['"b"\npassage 0', '"b"\npassage 1']]
    assert scored["result"][0][1]["score"] == 0.5
    status, plain = retrieve(b'{"queries": ["a", "b"], "topk": 2, "return_scores": false}')
    assert status == 200
    assert plain["result"] == [[hit["document"] for hit in hits] for hits in scored["result"]]
    assert retrieve(b'{"queries": []}') == (200, {"result": []})


def test_retrieve_says_in_a_sentence_that_the_server_behind_it_fails(retrieve, monkeypatch):
    monkeypatch.setattr(Recorder, "search", lambda *_: [[], retriever.QueryError("400 no\n")])
    status, reply = retrieve(b'{"queries": ["a", "b"]}')
    assert (status, reply) == (502, {"detail": "400 no"})


@pytest.mark.parametrize("topk, count", [
    ("2", 2), ("100", 100), ('"3"', 3), ("3.0", 3), ('"3.0"', 3), ("null", 5), (None, 5)])
def test_topk_is_taken_as_search_r1_takes_it(retrieve, topk, count):
    body = '{"queries": ["a"]}' if topk is None else f'{{"queries": ["a"], "topk": {topk}}}'
    status, reply = retrieve(body)
    assert status == 200 and len(reply["result"][0]) == count


@pytest.mark.parametrize("bad", ['""', '" "', "1", "null", "true", '["x"]', "{}", '"\\ud800"'])
def test_a_bad_query_does_not_harm_its_neighbours(retrieve, bad):
    status, reply = retrieve(f'{{"queries": ["a", {bad}, {bad}, "b"], "topk": 1}}')
    assert status == 200 and len(reply["result"]) == 4
    a, *others, b = reply["result"]
    assert [a[0]["contents"], b[0]["contents"]] == ['"a"\npassage 0', '"b"\npassage 0']
    found = 1 if bad.startswith('"') else 0  # whatever text there is, the retriever looks for it
    assert [len(hits) for hits in others] == [found, found]


@pytest.mark.parametrize("body, said", [
    (b"", "Expecting value"), (b"{", "Expecting"), (b"\xff\xfe\xfd", ""), (b"[" * 99_999, "depth"),
    (b"[]", "valid dictionary"), (b"{}", "queries"), (b'{"queries": "a"}', "queries"),
    (b'{"queries": null}', "queries"), (b'{"queries": ["a"], "topk": 0}', "topk"),
    (b'{"queries": ["a"], "topk": "five"}', "topk"), (b'{"queries": ["a"], "topk": 2.5}', "topk"),
    (b'{"queries": ["a"], "topk": 1e9}', "topk"), (b'{"queries": ["a"], "topk": NaN}', "topk"),
    (b'{"queries": ["a"], "return_scores": 3}', "return_scores"),
    (b'{"queries": ["' + b"a" * 2**24 + b'"]}', "16 MiB"),
])
def test_retrieve_refuses_unreadable_requests_in_a_sentence(retrieve, body, said):
    status, reply = retrieve(body)
    assert 400 <= status < 500
    assert said in reply["detail"] and "\n" not in reply["detail"] and len(reply["detail"]) < 200
    assert retrieve(b'{"queries": ["a"]}')[0] == 200  # and goes on


def test_a_body_whose_length_is_not_said_is_refused(retrieve):
    status, reply = retrieve(iter([b'{"queries": ', b'["a"]}']))
    assert status == 413 and "Content-Length" in reply["detail"]


def test_retrieve_lives_at_one_address(retrieve):
    assert retrieve(b'{"queries": ["a"]}', "/search")[0] == 404
    assert retrieve(b'{"queries": ["a"]}', "/retrieve/")[0] == 200
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # curl says so unless told
    assert retrieve(b'{"queries": ["a"]}', headers=form)[0] == 200


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
