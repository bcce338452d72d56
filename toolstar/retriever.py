"""
Search over passages: BM25 in memory, exact search of E5 vectors, a server, clients of others.

    (1) index    a folder with the vectors of a corpus; a build that was stopped goes on
    (2) search   BM25 matches words; Dense scans all vectors, shared out over GPUs or CPU cores
    (3) share    searches that arrive during a scan go together into the next one
    (4) serve    POST /retrieve as Search-R1's own server answers it [1]
    (5) ask      such servers, Tool-Star's [3], and paid web search (Remote, Web)

A retriever has search(queries, k) -> the hits of each query, best first. A hit is
{"document": {"id", "contents"}, "score"}; contents is the quoted title, a new line, the text.
[1] Search-R1, arXiv:2503.09516   [2] E5, arXiv:2212.03533   [3] Tool-Star, arXiv:2505.16410

Reads   a corpus: jsonl, {"id", "contents"} per line; the HF folder of an E5-style encoder [2]
Writes  OUT/meta.json, OUT/starts.npy, OUT/matrix.f16

    python -m toolstar.retriever index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \
        --out index
    python -m toolstar.retriever serve --retriever index --port 8000
"""
import argparse
import asyncio
import json
import os
import socket
import struct
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import runtime  # first: it words Ctrl-C while torch loads

# isort: split
import numpy as np
import torch

from runtime import COUNT, PORT, Parser, errors_name, lock_folder, progress, write_text

# Shapes: n queries, N passages, D numbers in a vector, L tokens of a text, k hits.

HTTP = ("http://", "https://")
MAX_QUERIES = 64  # per scan; one for sixteen queries takes hardly longer than one for a single one
IN_A_ROW = 20  # queries that fail: more, and it is not they that are wrong, but the server
SPARE = 8  # candidates beyond k, scored again in float64: float32 rounding cannot change the top k
CHUNK = {"cpu": 2048, "cuda": 65536}  # passages made float32 at a time; has to fit a CPU's cache
Batch = namedtuple("Batch", "queries ks hits")  # searches that share a scan: k of each, a Future


# ---------------------------------------------------------------- search

def load_document(line, where):
    """A corpus line -> {"id", "contents"}; FlashRAG's older form has title and text apart."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if isinstance(row, dict) and "contents" not in row and "text" in row:
        row["contents"] = f'"{row.get("title", "")}"\n{row["text"]}'
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str):
        raise ValueError(f"{where}: want id and contents, found {str(row)[:100]}")
    return {"id": str(row.get("id", "")), "contents": row["contents"]}


class BM25:
    """Word matching in memory: for a laptop, and for corpora of up to about a million passages."""

    def __init__(self, path):
        import bm25s
        with errors_name(path), open(path, encoding="utf-8-sig") as file:
            lines = enumerate(file, 1)
            self.documents = [load_document(line, f"{path}, line {i}") for i, line in lines]
        self.words = partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self.index = bm25s.BM25()
        self.index.index(self.words([d["contents"] for d in self.documents]), show_progress=False)

    def search(self, queries, k):
        """Hits of each query, best first; fewer than k when fewer share a word with it."""
        k = min(k, len(self.documents))
        found = self.index.retrieve(self.words(queries), k=k, show_progress=False)  # 2 x (n, k)
        return [[{"document": self.documents[i], "score": float(s)}
                 for i, s in zip(*hits, strict=True) if s > 0] for hits in zip(*found, strict=True)]


def read_meta(folder):
    """What an index folder says it is made of."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta.keys() >= {"corpus", "bytes", "encoder", "dim", "batch"}:
            return meta
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{folder}/meta.json is broken; remove {folder} and run `index` again")


class Dense:
    """Exact search of an index folder."""

    def __init__(self, folder, devices=("cpu",), encoder=None):
        folder = Path(folder)
        meta = read_meta(folder)
        # passages are read when they are found: the text of 21M is 14 GB
        self.path, self.corpus = meta["corpus"], os.open(meta["corpus"], os.O_RDONLY)
        self.starts = np.load(folder / "starts.npy", mmap_mode="r")  # (N + 1,) offsets of the lines
        total = len(self.starts) - 1
        done = os.path.getsize(folder / "matrix.f16") // (2 * meta["dim"])
        if done != total:
            raise ValueError(f"{folder} has {done} of {total} passages: run the same `index` again")
        if os.path.getsize(self.path) != meta["bytes"]:
            raise ValueError(f"{self.path} has changed since {folder} was made: run `index` again")
        self.matrix = Matrix(folder / "matrix.f16", total, meta["dim"], devices)
        self.encoder = load_encoder(encoder or meta["encoder"], devices[0])

    def document(self, row):
        start, end = self.starts[row:row + 2].tolist()
        line = os.pread(self.corpus, end - start, start)
        return load_document(line, f"{self.path}, line {row + 1}")

    def search(self, queries, k):
        rows, scores = self.matrix.nearest(encode(queries, "query: ", self.encoder), k)
        return [[{"document": self.document(i), "score": s} for i, s in zip(*hits, strict=True)]
                for hits in zip(rows.tolist(), scores.tolist(), strict=True)]


class Matrix:
    """N vectors of D fp16 numbers in shards: one per GPU, or memory-mapped and one per CPU core."""

    def __init__(self, path, size, dim, devices=("cpu",)):
        threads = torch.get_num_threads()
        places = [d for device in devices for d in [device] * (threads if device == "cpu" else 1)]
        matrix = torch.from_file(str(path), shared=False, size=size * dim, dtype=torch.float16)
        parts = matrix.view(size, dim).split(-(-size // len(places)))  # (N / places, D) each
        self.shards = [part.to(place) for part, place in zip(parts, places, strict=False)]
        self.firsts = range(0, size, len(parts[0]))
        # A thread per shard, undivided: threads that meet after each step wait for the slowest.
        # They start now, since torch hands each new thread the number of threads that was set last.
        self.pool = ThreadPoolExecutor(len(places), "scan", torch.set_num_threads, (1,))
        list(self.pool.map(time.sleep, [0.01] * len(places)))
        torch.set_num_threads(threads)

    def nearest(self, q, k):
        """As nearest below, over all shards. (n, D) float32 -> (n, k) int64, (n, k) float64"""
        found = self.pool.map(nearest, repeat(q), self.shards, repeat(k), self.firsts)
        rows, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        return rows.gather(1, order), scores.gather(1, order)


@torch.inference_mode()
def nearest(q, matrix, k, first=0):
    """Rows with the largest inner product, ties by row; the matrix begins with row first.

    (n, D) float32, (N, D) fp16 -> (n, k) int64, (n, k) float64, both on the CPU
    """
    q = q.to(matrix.device)
    step, keep, found = CHUNK[q.device.type], min(k + SPARE, len(matrix)), []
    # reused for every chunk: fresh memory costs as much time as the product
    part = torch.empty((step, matrix.shape[1]), device=q.device)  # float32
    scores = torch.empty((len(q), step), device=q.device)
    for start in range(0, len(matrix), step):
        # fp16 products are slow on a CPU and round the scores everywhere: first make it float32
        chunk = matrix[start:start + step]
        torch.mm(q, part[:len(chunk)].copy_(chunk).T, out=scores[:, :len(chunk)])
        best, where = scores[:, :len(chunk)].topk(min(keep, len(chunk)))  # (n, keep)
        found.append((best, where + start))
    best, rows = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    rows = rows.gather(1, best.topk(keep).indices).sort(dim=1).values
    exact = torch.einsum("nd,nkd->nk", q.double(), matrix[rows].double())
    order = exact.argsort(dim=1, descending=True, stable=True)[:, :k]
    return rows.gather(1, order).cpu() + first, exact.gather(1, order).cpu()


class QueryError(ConnectionError):
    """A server answers, but not this query: it is refused, or fails although it is asked alone."""


class Remote:
    """Client of a search server: Search-R1's /retrieve, or Tool-Star's /batch_search.

    A query that fails is a QueryError in the place of its hits, and never fails its neighbours. A
    server that is gone is waited for; once it has not come back, later searches do not wait for
    it, but use it again when it is there.
    """

    def __init__(self, url, tries=4, pause=1.0, patience=300.0):
        """tries: of a query, with pauses that double; patience: seconds for a server to restart."""
        import httpx2
        self.tries, self.pause, self.patience = tries, pause, patience
        self.gone, self.row = False, 0  # row: queries that failed since the last one that did not
        self.client = httpx2.Client(timeout=120, headers={"Content-Type": "application/json"})
        self.failures = httpx2.HTTPError, ValueError  # ValueError: the reply is no JSON
        self.pool = ThreadPoolExecutor(16)
        plain = url.rstrip("/")
        self.tool_star = plain.endswith(("/search", "/batch_search"))
        if self.tool_star:
            self.url = plain.removesuffix("/search").removesuffix("/batch_search") + "/batch_search"
        else:
            self.url = plain.removesuffix("/retrieve") + "/retrieve"

    def search(self, queries, k):
        """The hits of each query, or its QueryError; ConnectionError when the server is gone."""
        if len(queries) > 1:
            try:
                hits, self.row = self.ask(queries, k, 1), 0
                return hits
            except QueryError:  # one of them may be the cause
                return list(self.pool.map(self.alone, queries, repeat(k)))
        return [self.alone(query, k) for query in queries]

    def alone(self, query, k):
        try:
            hits, self.row = self.ask([query], k, self.tries)[0], 0
            return hits
        except QueryError as error:
            self.row += 1
            if self.row < IN_A_ROW:
                return error
            raise ConnectionError(f"{self.url} has answered none of the last {self.row} queries, "
                                  f"{error}; see to it, then repeat this command: what is done is "
                                  "not done again") from None

    def ask(self, queries, k, tries):
        """The hits of queries in one request. QueryError where it is refused, or all tries fail."""
        failed, since = 0, time.monotonic()
        while True:
            try:
                reply = self.send(queries, k)
            except self.failures as error:
                why, lost = repr(error), type(error).__name__ == "ConnectError"
            else:
                self.gone = False
                if isinstance(reply, list):
                    return reply
                why, lost = f"{reply.status_code} {' '.join(reply.text[:300].split())}", False
                if reply.status_code < 500 and reply.status_code != 429:
                    raise QueryError(why)  # asking again will not help
            failed += not lost
            if failed >= tries:
                raise QueryError(f"try {failed} of {tries}: {why}")
            if lost and (self.gone or time.monotonic() > since + self.patience):
                self.gone = True
                raise ConnectionError(f"{self.url} is not there: {why}; start it, then repeat this "
                                      "command: what is done is not done again")
            time.sleep(self.pause * 2 ** max(0, failed - 1))

    def send(self, queries, k):
        """The hits of each query in the server's reply, or a response that is no success."""
        body = {"queries": queries, "topk": k, "return_scores": True}  # which Search-R1's needs
        if self.tool_star:
            body = {"query": queries, "top_n": k, "return_score": False}
        reply = self.client.post(self.url, content=json.dumps(body))
        if reply.status_code != 200:
            return reply
        found = reply.json()
        if self.tool_star and isinstance(found, list):
            found = {"result": [[{"document": document, "score": None} for document in row]
                                for row in found if isinstance(row, list)]}
        return read_hits(found, len(queries), self.url)


class Web(Remote):
    """Client of a web search that is paid for, as a file of settings describes it.

    {"url": "https://...", "method": "POST", "headers": {"X-API-KEY": "{key}"}, "key": "key.txt",
     "body": {"q": "{query}", "num": "{k}"}, "results": "organic", "title": "title",
     "text": "snippet", "link": "link"}

    key: a file beside this one. body: the JSON of a POST, or the parameters of a GET. results:
    where the hits are in the reply, names with dots between them; title, text, link: of a hit.
    """

    def __init__(self, path, tries=4, pause=1.0, patience=300.0):
        super().__init__("http://", tries, pause, patience)
        with errors_name(path):
            self.chosen = json.loads(Path(path).read_text(encoding="utf-8"))
            if missing := {"url", "body", "results", "text"} - self.chosen.keys():
                raise ValueError(f"{path}: {', '.join(sorted(missing))} must be there")
            key = self.chosen.get("key")
            self.key = Path(path).with_name(key).read_text().strip() if key else ""
        self.url = self.chosen["url"]

    def search(self, queries, k):
        return list(self.pool.map(self.alone, queries, repeat(k)))

    def send(self, queries, k):
        chosen, values = self.chosen, {"{key}": self.key, "{query}": queries[0], "{k}": k}
        body, headers = (filled(chosen.get(name, {}), values) for name in ("body", "headers"))
        method = chosen.get("method", "POST")
        where = {"params": body} if method == "GET" else {"json": body}
        reply = self.client.request(method, self.url, headers=headers, **where)
        if reply.status_code != 200:
            return reply
        found = reply.json()
        for name in chosen["results"].split("."):
            found = found.get(name) if isinstance(found, dict) else None
        hits = [hit for hit in found or [] if isinstance(hit, dict)][:k]
        names = [chosen.get(name, name) for name in ("title", "text", "link")]
        texts = [[str(hit.get(name) or "") for name in names] for hit in hits]
        return [[{"document": {"id": link, "contents": f'"{title}"\n{text} {link}'.strip()},
                  "score": None} for title, text, link in texts]]


def filled(value, values):
    """A table of settings, each {key}, {query} and {k} replaced by its value."""
    if isinstance(value, dict):
        return {name: filled(inside, values) for name, inside in value.items()}
    return values.get(value, value) if isinstance(value, str) else value


def read_hits(reply, count, url):
    """The hits in a server's reply, checked once here so that nothing later stumbles over them."""
    try:
        hits = reply["result"]
        texts = [hit["document"]["contents"] for row in hits for hit in row]
        if len(hits) == count and all(isinstance(text, str) for text in texts):
            return hits
    except (KeyError, TypeError):
        pass
    raise ConnectionError(f"{url} is no server of Search-R1 or Tool-Star: {str(reply)[:200]} for "
                          f"{count} queries")


class Shared:
    """One retriever for many threads: searches that arrive during a scan share the next one."""

    def __init__(self, retriever):
        self.retriever, self.lock = retriever, threading.Lock()
        self.worker = ThreadPoolExecutor(1)  # one scan after the other
        self.waiting = []  # batches whose scan has not begun

    def search(self, queries, k):
        """As the retriever's own, from any thread."""
        scan, place = self.join(queries, k)
        return [hits if isinstance(hits, QueryError) else hits[:k] for hits in scan.result()[place]]

    def join(self, queries, k):
        """Put queries into a scan to come: the Future of its hits, and where theirs will be."""
        with self.lock:
            if not self.waiting or len(self.waiting[-1].queries) + len(queries) > MAX_QUERIES:
                self.waiting.append(Batch([], [], self.worker.submit(self.scan)))
            batch = self.waiting[-1]
            start = len(batch.queries)
            batch.queries.extend(queries)
            batch.ks.append(k)
        return batch.hits, slice(start, start + len(queries))

    def scan(self):
        """The hits of the batch in front, which nobody can join any more."""
        with self.lock:
            queries, ks, _ = self.waiting.pop(0)
        parts = [queries[i:i + MAX_QUERIES] for i in range(0, len(queries), MAX_QUERIES)]
        return [hits for part in parts for hits in self.retriever.search(part, max(ks))]


def find_retriever(name, corpus):
    """Say at once, and not after an engine has started, that --retriever's files are not there."""
    needed = (Path(corpus) if name == "bm25" else Path(name) if name.endswith(".json") else
              Path(name) / "meta.json")
    if not name.startswith(HTTP) and not needed.is_file():
        raise FileNotFoundError(f"{needed} is missing: see --corpus, or run python -m "
                                "toolstar.retriever index")
    if name == "bm25":
        check_corpus(corpus)


def check_corpus(path):
    """Look at a corpus's first line before an engine or an encoder is loaded."""
    with errors_name(path), open(path, encoding="utf-8-sig") as file:
        line = file.readline()
    if not line:
        raise ValueError(f"{path} is empty; want a line of id and contents per passage")
    load_document(line, f"{path}, line 1")


def open_retriever(name, corpus=None, devices=("cpu",), encoder=None, **more):
    """bm25, an index folder, a server's address or a web search's settings (name.json) as a
    retriever for many threads. more: tries and so on of a Remote."""
    if name.startswith(HTTP):
        return Shared(Remote(name, **more))
    if name.endswith(".json"):
        return Shared(Web(name, **more))
    return Shared(BM25(corpus) if name == "bm25" else Dense(name, devices, encoder))


# ---------------------------------------------------------------- index

def load_encoder(folder, device):
    """An E5-style model (fp16 on GPUs) and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    try:
        model = AutoModel.from_pretrained(folder, dtype=dtype)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)
    except OSError:
        raise ValueError(f"--encoder {folder} is no model's folder here, and the hub does not give "
                         "it: name a folder") from None


@torch.inference_mode()
def encode(texts, prefix, encoder, batch=512):
    """E5's unit vectors, (n, D) float32 on the CPU; texts of like length share a batch."""
    model, tokenizer = encoder
    vectors = torch.empty((len(texts), model.config.hidden_size))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(texts), batch):
        rows = order[start:start + batch]
        # half a surrogate pair, which JSON can hold, would make the tokenizer refuse all
        part = [(prefix + texts[i]).encode("utf-8", "replace").decode() for i in rows]
        tokens = tokenizer(part, max_length=256, truncation=True, padding=True, return_tensors="pt")
        hidden = model(**tokens.to(model.device)).last_hidden_state.float()  # (rows, L, D)
        mask = tokens["attention_mask"].unsqueeze(-1)  # (rows, L, 1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors[rows] = torch.nn.functional.normalize(mean, dim=1).cpu()
    return vectors


def begin_index(args, out, dim):
    """Note what the index is made of and where the corpus's lines start; never mix two indexes."""
    encoder = str(Path(args.encoder).resolve()) if Path(args.encoder).exists() else args.encoder
    meta = {"corpus": str(Path(args.corpus).resolve()), "bytes": os.path.getsize(args.corpus),
            "encoder": encoder, "dim": dim, "batch": args.batch}
    if (out / "meta.json").exists():
        begun = read_meta(out)
        if begun != meta:
            raise ValueError(f"{out} was begun with {begun}, not {meta}: choose another --out")
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(args.corpus, "rb") as lines:
        np.save(out / "starts.npy", np.fromiter(chain([0], map(len, lines)), np.int64).cumsum())
    # last: where it is found, starts.npy is whole
    write_text(out / "meta.json", json.dumps(meta, indent=1))


def flat_vectors(path):
    """The vectors of a flat faiss index, FlashRAG's e5_Flat.index say: (N, D) float32 on disk."""
    with errors_name(path), open(path, "rb") as file:
        head = file.read(45)
    kind = head[:4].decode("ascii", "replace")
    if kind not in ("IxFI", "IxF2") or len(head) < 45:
        raise ValueError(f"{path} is no flat index of faiss, but {kind!r}: other kinds do not hold "
                         "whole vectors; leave --vectors out, and the corpus is encoded here")
    # its kind, D, N, 16 bytes without meaning, whether it is trained, its metric, count of numbers
    dim, total, _, _, _, _, count = struct.unpack("<iqqqBiq", head[4:])
    if count != dim * total or os.path.getsize(path) != 45 + 4 * count:
        raise ValueError(f"{path} is cut short: {os.path.getsize(path):,} bytes for {total:,} "
                         f"vectors of {dim} numbers; download it again")
    return np.memmap(path, np.float32, "r", 45, (total, dim))


def import_index(args):
    """Make an index of vectors that others have computed: nothing is encoded."""
    lock_folder(args.out)
    check_corpus(args.corpus)
    vectors, out = flat_vectors(args.vectors), Path(args.out)
    begin_index(args, out, vectors.shape[1])
    total = len(np.load(out / "starts.npy", mmap_mode="r")) - 1
    if total != len(vectors):
        raise ValueError(f"{args.vectors} has {len(vectors):,} vectors, {args.corpus} {total:,} "
                         "passages: they do not belong together")
    with open(out / "matrix.f16", "wb") as file:
        starts = range(0, total, CHUNK["cuda"])
        for start in progress(starts, "index", len(starts)):
            file.write(vectors[start:start + CHUNK["cuda"]].astype(np.float16).tobytes())
    print(f"{out}: {total:,} passages of {vectors.shape[1]} numbers, as they are in {args.vectors}")


def build_index(args):
    """Encode block by block and append; after a stop, whole blocks on disk are not done again."""
    lock_folder(args.out)
    check_corpus(args.corpus)
    encoders = [load_encoder(args.encoder, device) for device in args.devices]
    out, dim, block = Path(args.out), encoders[0][0].config.hidden_size, 64 * args.batch
    begin_index(args, out, dim)
    starts = np.load(out / "starts.npy", mmap_mode="r")
    total, pool = len(starts) - 1, ThreadPoolExecutor(len(encoders))
    with open(args.corpus, "rb") as lines, open(out / "matrix.f16", "ab") as file:
        done = file.tell() // (2 * dim)
        if done != total:
            done -= done % block
        file.truncate(2 * dim * done)
        lines.seek(starts[done])
        texts = (load_document(line, f"{args.corpus}, line {i}")["contents"]
                 for i, line in enumerate(lines, done + 1))
        bar = progress(None, "index", total, done, " passages")
        # a block per device at a time, because a tokenizer serves only one thread
        while any(blocks := [list(islice(texts, block)) for _ in encoders]):
            parts = pool.map(encode, blocks, repeat("passage: "), encoders, repeat(args.batch))
            for vectors in parts:
                file.write(vectors.half().numpy().tobytes())
                bar.update(len(vectors))
            file.flush()
            os.fsync(file.fileno())  # a block counts once it is on disk
        bar.close()
    print(f"{out}: {total:,} passages of {dim} numbers")


# ---------------------------------------------------------------- serve

def make_app(retriever, topk=5):
    """Search-R1's API for uvicorn: POST /retrieve {"queries", "topk", "return_scores"}."""
    from fastapi import FastAPI, HTTPException, Request, Response
    from pydantic import BaseModel, Field

    class Search(BaseModel):
        queries: list
        topk: int | None = Field(None, ge=1, le=100)
        return_scores: bool = False

    app = FastAPI(openapi_url=None)

    @app.post("/retrieve")
    @app.post("/retrieve/")
    async def retrieve(request: Request):
        size = request.headers.get("content-length", "")
        if not size.isdecimal() or int(size) > 2**24:
            raise HTTPException(413, "want a Content-Length, of 16 MiB at most")
        try:
            asked = Search.model_validate(json.loads(await request.body()))
        except (ValueError, RecursionError) as error:  # pydantic writes details in brackets
            raise HTTPException(400, " ".join(str(error).split("[")[0].split())) from None
        k, texts = asked.topk or topk, [q for q in asked.queries if isinstance(q, str)]
        scan, place = retriever.join(texts, k)
        found = iter((await asyncio.wrap_future(scan))[place])
        result = [next(found)[:k] if isinstance(q, str) else [] for q in asked.queries]
        if not asked.return_scores:
            result = [[hit["document"] for hit in hits] for hits in result]
        return Response(json.dumps({"result": result}), media_type="application/json")

    return app


def find_port(host, port):
    """Say that a port is taken before an index is read, and in a line, as uvicorn does not."""
    with errors_name(f"{host}:{port}"), socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind((host, port))


def serve(args):
    """Answer /retrieve until interrupted."""
    import uvicorn
    find_retriever(args.retriever, args.corpus)
    find_port(args.host, args.port)
    app = make_app(open_retriever(args.retriever, args.corpus, args.devices), args.topk)
    # backlog: clients that arrive at the same moment and have to wait, instead of being refused
    uvicorn.run(app, host=args.host, port=args.port, access_log=False, backlog=2048)


def device(text):
    """A type of a flag: a device of torch's."""
    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device like cpu or cuda:0") from None
    return text


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    add = commands.add_parser("index", help="make an index folder").add_argument
    add("--corpus", required=True, help="jsonl file, {id, contents} per line")
    add("--encoder", required=True, help="E5-style HF folder or hub name")
    add("--out", required=True, help="folder of the index; a build that was stopped goes on there")
    add("--vectors", metavar="FILE", help="take the vectors from a flat faiss index of the same "
        "corpus and encoder, such as FlashRAG's e5_Flat.index, instead of encoding the corpus")
    add("--batch", type=COUNT, default=512, help="passages per forward pass of the encoder (512)")
    add("--devices", nargs="+", type=device,
        help="torch devices that share the work (all GPUs, or cpu)")
    add = commands.add_parser("serve", help="answer POST /retrieve").add_argument
    add("--retriever", default="bm25", help="bm25, or an index folder (bm25)")
    add("--corpus", default="database/qa/corpus.jsonl", help="jsonl for bm25 (%(default)s)")
    add("--devices", nargs="+", type=device,
        help="torch devices that share the vectors (all GPUs, or cpu)")
    add("--topk", type=COUNT, default=5,
        help="passages per query where a request names no topk (5)")
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1); 0.0.0.0 is all")
    add("--port", type=PORT, default=8000, help="port to listen at (8000); 0 takes a free one")
    args = p.parse_args(argv)
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    args.devices = args.devices or gpus or ["cpu"]
    return args


def main(argv=None):
    args = flags(argv)
    command = {"index": build_index, "serve": serve}[args.command]
    runtime.run("toolstar.retriever",
                import_index if getattr(args, "vectors", None) else command, args)


if __name__ == "__main__":
    main()
