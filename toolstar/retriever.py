"""
Search passages: by BM25 in memory, by exact search of E5 vectors, or by another server.

    (1) index    compute the vectors of a corpus into a folder; an interrupted build resumes
    (2) search   BM25 matches words; Dense compares all vectors, divided among GPUs or CPU cores
    (3) share    searches that arrive during a scan are answered together by the next scan
    (4) serve    answer POST /retrieve with the API of Search-R1's server [1]
    (5) ask      Remote is a client of such servers and of Tool-Star's [3], Web of paid web search

A retriever has search(queries, k), which returns the hits of each query, best first. A hit is
{"document": {"id", "contents"}, "score"}; contents is the quoted title, a line break and the text.
[1] Search-R1, arXiv:2503.09516   [2] E5, arXiv:2212.03533   [3] Tool-Star, arXiv:2505.16410

Reads   a corpus: jsonl, {"id", "contents"} per line; the HF folder of an E5-style encoder [2]
Writes  OUT/meta.json, OUT/starts.npy, OUT/matrix.f16

    python -m toolstar.retriever index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \
        --out index
    python -m toolstar.retriever serve --retriever index --port 8000
"""
import argparse
import asyncio
import contextlib
import json
import os
import re
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
MAX_QUERIES = 64  # per scan; sixteen queries take hardly longer than one
IN_A_ROW = 20  # after so many failed queries in a row the server counts as broken
SPARE = 8  # candidates beyond k, scored again in float64: float32 rounding cannot change the top k
CHUNK = {"cpu": 2048, "cuda": 65536}  # passages converted to float32 at a time; fits a CPU's cache
Batch = namedtuple("Batch", "queries ks hits")  # searches that share a scan; hits: a Future


# ---------------------------------------------------------------- search

def load_document(line, where):
    """The {"id", "contents"} of a line of a corpus. FlashRAG's older form has "title" and "text".

    where: names the line in the ValueError that is raised if it is no passage.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if isinstance(row, dict) and "contents" not in row and "text" in row:
        row["contents"] = f'"{row.get("title", "")}"\n{row["text"]}'
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str):
        raise ValueError(f"{where}: it must have id and contents, but is {str(row)[:100]}")
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
        """The hits of each query, best first: at most k, all with a word of the query."""
        k = min(k, len(self.documents))
        found = self.index.retrieve(self.words(queries), k=k, show_progress=False)  # 2 x (n, k)
        return [[{"document": self.documents[i], "score": float(s)}
                 for i, s in zip(*hits, strict=True) if s > 0] for hits in zip(*found, strict=True)]


def read_meta(folder):
    """The meta.json of an index folder: the corpus, encoder and sizes that it was made with."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta.keys() >= {"corpus", "bytes", "encoder", "dim", "batch"}:
            return meta
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{folder}/meta.json is broken; remove {folder} and run `index` again")


class Dense:
    """Exact search in an index folder. encoder: in place of the one in meta.json."""

    def __init__(self, folder, devices=("cpu",), encoder=None):
        folder = Path(folder)
        meta = read_meta(folder)
        # passages are read from disk when they are found: the text of 21M passages is 14 GB
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
    """N vectors of D fp16 numbers in shards: one per GPU, or memory-mapped with one per core."""

    def __init__(self, path, size, dim, devices=("cpu",)):
        threads = torch.get_num_threads()
        places = [d for device in devices for d in [device] * (threads if device == "cpu" else 1)]
        matrix = torch.from_file(str(path), shared=False, size=size * dim, dtype=torch.float16)
        parts = matrix.view(size, dim).split(-(-size // len(places)))  # (N / places, D) each
        self.shards = [part.to(place) for part, place in zip(parts, places, strict=False)]
        self.firsts = range(0, size, len(parts[0]))
        # One thread computes a whole shard, because threads that divide each step wait for the
        # slowest one. They start here, since torch gives a new thread the thread count set last.
        self.pool = ThreadPoolExecutor(len(places), "scan", torch.set_num_threads, (1,))
        list(self.pool.map(time.sleep, [0.01] * len(places)))
        torch.set_num_threads(threads)

    def nearest(self, q, k):
        """As `nearest` below, over all shards. (n, D) float32 -> (n, k) int64, (n, k) float64"""
        found = self.pool.map(nearest, repeat(q), self.shards, repeat(k), self.firsts)
        rows, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        return rows.gather(1, order), scores.gather(1, order)


@torch.inference_mode()
def nearest(q, matrix, k, first=0):
    """The k rows with the largest inner products, and these; the lower row wins a tie.

    q (n, D) float32, matrix (N, D) fp16 -> (n, k) int64, (n, k) float64, both on the CPU.
    first: number of the matrix's first row.
    """
    q = q.to(matrix.device)
    step, keep, found = CHUNK[q.device.type], min(k + SPARE, len(matrix)), []
    # reused for all chunks: new memory would take as much time as the product
    part = torch.empty((step, matrix.shape[1]), device=q.device)  # float32
    scores = torch.empty((len(q), step), device=q.device)
    for start in range(0, len(matrix), step):
        # convert to float32: fp16 products are slow on a CPU, and round the scores everywhere
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
    """The server works but refuses this query, or fails on it even if it is sent alone."""


class Remote:
    """Client of a search server: Search-R1's /retrieve, or Tool-Star's /batch_search.

    If a query fails, a QueryError is in the place of its hits, and the other queries are answered.
    A query that was answered before shows whether the query or the server is at fault. While the
    server is, the client waits up to `patience` seconds; after that, searches do not wait until the
    server is back.
    """

    def __init__(self, url, tries=4, pause=1.0, patience=300.0):
        """tries: per query, with pauses that double. patience: seconds for a server to restart."""
        import httpx2
        self.tries, self.pause, self.patience = tries, pause, patience
        self.gone, self.row = False, 0  # row: number of failed queries in a row
        self.known = None  # a query that was answered
        self.client = httpx2.Client(timeout=120, headers={"Content-Type": "application/json"},
                                    event_hooks={"response": [runtime.read_bounded]})
        # the last two: the reply is not JSON
        self.failures = httpx2.HTTPError, ValueError, RecursionError
        self.pool = ThreadPoolExecutor(16)
        plain = url.rstrip("/")
        self.tool_star = plain.endswith(("/search", "/batch_search"))
        if self.tool_star:
            self.url = plain.removesuffix("/search").removesuffix("/batch_search") + "/batch_search"
        else:
            self.url = plain.removesuffix("/retrieve") + "/retrieve"

    def search(self, queries, k):
        """The hits of each query, or its QueryError; ConnectionError if the server is gone."""
        if len(queries) > 1:
            try:
                return self.ask(queries, k)
            except QueryError:  # one query may have failed all: send each alone
                return list(self.pool.map(self.alone, queries, repeat(k)))
        return [self.alone(query, k) for query in queries]

    def alone(self, query, k):
        try:
            return self.ask([query], k)[0]
        except QueryError as error:
            self.row += 1
            if self.row < IN_A_ROW:
                return error
            raise ConnectionError(f"{self.url} has answered none of the last {self.row} queries, "
                                  f"{error}; repair it, then repeat this command, which skips what "
                                  "is done") from None

    def is_up(self):
        """Whether the server answers a query that it has answered before."""
        query = self.known or "a"
        with contextlib.suppress(QueryError, *self.failures):
            if isinstance(self.send([query], 1), list):
                self.known = query
                return True
        return False

    def ask(self, queries, k):
        """The hits of queries in one request. QueryError if it is refused or all tries fail, and
        the server answers another query; several queries are tried once, without asking another."""
        tries = 1 if len(queries) > 1 else self.tries
        failed, up, since = 0, False, time.monotonic()
        while True:
            lost = refused = False
            try:
                reply = self.send(queries, k)
                if isinstance(reply, list):
                    self.gone, self.row, self.known = False, 0, queries[0]
                    return reply
                why = f"{reply.status_code} {' '.join(reply.text[:300].split())}"
                refused = reply.status_code < 500 and reply.status_code != 429
            except QueryError as error:
                why, refused = str(error), True
            except self.failures as error:
                why, lost = repr(error), type(error).__name__ == "ConnectError"
            failed += not lost
            if refused or failed >= tries:  # asking again will not help
                failure = QueryError(why if refused else f"try {failed} of {tries}: {why}")
                if len(queries) > 1:
                    raise failure
                before, up = up, self.is_up()
                if up and (before or refused):
                    raise failure
                # a server that came back just now is asked once more
                failed, lost = (tries - 1, False) if up else (0, True)
            late = time.monotonic() > since + self.patience or refused and not self.known
            if lost and (self.gone or late):
                self.gone = True
                raise ConnectionError(f"{self.url} answers no query: {why}; repair it, then repeat "
                                      "this command, which skips what is done")
            time.sleep(self.pause * 2 ** max(0, failed - 1))

    def send(self, queries, k):
        """The hits of each query in the server's reply; the response if its status is not 200."""
        body = {"queries": queries, "topk": k, "return_scores": True}
        if self.tool_star:
            body = {"query": queries, "top_n": k, "return_score": False}
        reply = self.client.post(self.url, content=json.dumps(body))
        if reply.status_code != 200:
            return reply
        found = reply.json()
        if self.tool_star and isinstance(found, list):
            found = {"result": [[{"document": document, "score": None} for document in row]
                                for row in found if isinstance(row, list)]}
        return read_hits(found, len(queries))


class Web(Remote):
    """Client of a paid web search, which a json file of settings describes:

    {"url": "https://...", "method": "POST", "headers": {"X-API-KEY": "{key}"}, "key": "key.txt",
     "body": {"q": "{query}", "num": "{k}"}, "results": "organic", "title": "title",
     "text": "snippet", "link": "link"}

    key: name of a file beside this one that holds the API key. body: the JSON of a POST, or the
    parameters of a GET. results: the path of the hits in the reply, names joined by dots. title,
    text, link: names of a hit's parts.
    """

    def __init__(self, path, tries=4, pause=1.0, patience=300.0):
        super().__init__("http://", tries, pause, patience)
        with errors_name(path):
            self.chosen = runtime.read_json(Path(path))
            if missing := {"url", "body", "results", "text"} - self.chosen.keys():
                raise ValueError(f"{path} has no {', '.join(sorted(missing))}")
            for name, value in self.chosen.items():
                if not isinstance(value, dict if name in ("headers", "body") else str):
                    raise ValueError(f"{path}: {name!r} is {value!r:.60}, which has the wrong type")
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
        if not isinstance(found, list | None):
            raise QueryError(f"{chosen['results']} in the reply is not a list: {str(found)[:200]}")
        hits = [hit for hit in found or [] if isinstance(hit, dict)][:k]
        names = [chosen.get(name, name) for name in ("title", "text", "link")]
        texts = [[str(hit.get(name) or "") for name in names] for hit in hits]
        return [[{"document": {"id": link, "contents": f'"{title}"\n{text} {link}'.strip()},
                  "score": None} for title, text, link in texts]]


def filled(value, values):
    """Settings in which each "{key}", "{query}" and "{k}" is replaced by its value."""
    if isinstance(value, dict):
        return {name: filled(inside, values) for name, inside in value.items()}
    if isinstance(value, list):
        return [filled(inside, values) for inside in value]
    if not isinstance(value, str) or value in values:
        return values[value] if isinstance(value, str) else value
    return re.sub(r"\{\w+\}", lambda found: str(values.get(found[0], found[0])), value)


def read_hits(reply, count):
    """The hits in a server's reply; QueryError if it does not have the right form."""
    try:
        hits = reply["result"]
        texts = [hit["document"]["contents"] for row in hits for hit in row]
        if len(hits) == count and all(isinstance(text, str) for text in texts):
            return hits
    except (KeyError, TypeError):
        pass
    raise QueryError("it is not a server of Search-R1 or Tool-Star, but sent "
                     f"{str(reply)[:200]} for {count} queries")


class Shared:
    """A retriever for many threads: searches that arrive during a scan share the next scan."""

    def __init__(self, retriever):
        self.retriever, self.lock = retriever, threading.Lock()
        self.worker = ThreadPoolExecutor(1)  # one scan after the other
        self.waiting = []  # batches whose scan has not begun

    def search(self, queries, k):
        """The retriever's search, for any thread."""
        scan, place = self.join(queries, k)
        return [hits if isinstance(hits, QueryError) else hits[:k] for hits in scan.result()[place]]

    def join(self, queries, k):
        """Add queries to the next scan -> (Future of its hits, slice of these queries' hits)."""
        with self.lock:
            if not self.waiting or len(self.waiting[-1].queries) + len(queries) > MAX_QUERIES:
                self.waiting.append(Batch([], [], self.worker.submit(self.scan)))
            batch = self.waiting[-1]
            start = len(batch.queries)
            batch.queries.extend(queries)
            batch.ks.append(k)
        return batch.hits, slice(start, start + len(queries))

    def scan(self):
        """The hits of the first batch, which no search can join any more."""
        with self.lock:
            queries, ks, _ = self.waiting.pop(0)
        parts = [queries[i:i + MAX_QUERIES] for i in range(0, len(queries), MAX_QUERIES)]
        return [hits for part in parts for hits in self.retriever.search(part, max(ks))]


def find_retriever(name, corpus):
    """Raise an error before an engine starts if the files of --retriever are not there."""
    needed = (Path(corpus) if name == "bm25" else Path(name) if name.endswith(".json") else
              Path(name) / "meta.json")
    if not name.startswith(HTTP) and not needed.is_file():
        raise FileNotFoundError(f"{needed} is missing: see --corpus, or run python -m "
                                "toolstar.retriever index")
    if name == "bm25":
        check_corpus(corpus)


def check_corpus(path):
    """Check a corpus's first line before an engine or an encoder is loaded."""
    with errors_name(path), open(path, encoding="utf-8-sig") as file:
        line = file.readline()
    if not line:
        raise ValueError(f"{path} is empty; it must have a line with id and contents per passage")
    load_document(line, f"{path}, line 1")


def open_retriever(name, corpus=None, devices=("cpu",), encoder=None, **more):
    """A retriever for many threads. name: "bm25" (of a corpus), an index folder, the URL of a
    server, or a .json file with settings of a web search. more: arguments of Remote or Web."""
    if name.startswith(HTTP):
        return Shared(Remote(name, **more))
    if name.endswith(".json"):
        return Shared(Web(name, **more))
    return Shared(BM25(corpus) if name == "bm25" else Dense(name, devices, encoder))


# ---------------------------------------------------------------- index

def load_encoder(folder, device):
    """(an E5-style model, in fp16 on GPUs; its tokenizer)."""
    from transformers import AutoModel, AutoTokenizer
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    try:
        model = AutoModel.from_pretrained(folder, dtype=dtype)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)
    except OSError:
        raise ValueError(f"--encoder {folder} is not the folder of a model, and cannot be loaded "
                         "from the hub: name a folder") from None


@torch.inference_mode()
def encode(texts, prefix, encoder, batch=512):
    """E5's unit vectors of texts, (n, D) float32 on the CPU. Texts of similar length share a batch.

    prefix: "query: " or "passage: " [2]. encoder: from load_encoder.
    """
    model, tokenizer = encoder
    vectors = torch.empty((len(texts), model.config.hidden_size))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(texts), batch):
        rows = order[start:start + batch]
        # the tokenizer refuses half a surrogate pair, which JSON can hold
        part = [(prefix + texts[i]).encode("utf-8", "replace").decode() for i in rows]
        tokens = tokenizer(part, max_length=256, truncation=True, padding=True, return_tensors="pt")
        hidden = model(**tokens.to(model.device)).last_hidden_state.float()  # (rows, L, D)
        mask = tokens["attention_mask"].unsqueeze(-1)  # (rows, L, 1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors[rows] = torch.nn.functional.normalize(mean, dim=1).cpu()
    return vectors


def begin_index(args, out, dim):
    """Write meta.json and the offsets of the corpus's lines; refuse to mix two indexes."""
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
    # written last, so that starts.npy is complete if meta.json exists
    write_text(out / "meta.json", json.dumps(meta, indent=1))


def flat_vectors(path):
    """The vectors of a flat faiss index such as FlashRAG's e5_Flat.index: (N, D) float32."""
    with errors_name(path), open(path, "rb") as file:
        head = file.read(45)
    kind = head[:4].decode("ascii", "replace")
    if kind not in ("IxFI", "IxF2") or len(head) < 45:
        raise ValueError(f"{path} is not a flat index of faiss, but {kind!r}; other kinds do not "
                         "hold whole vectors: leave out --vectors to encode the corpus")
    # kind, D, N, 16 unused bytes, whether it is trained, metric, count of numbers
    dim, total, _, _, _, _, count = struct.unpack("<iqqqBiq", head[4:])
    if count != dim * total or os.path.getsize(path) != 45 + 4 * count:
        raise ValueError(f"{path} is cut short: {os.path.getsize(path):,} bytes for {total:,} "
                         f"vectors of {dim} numbers; download it again")
    return np.memmap(path, np.float32, "r", 45, (total, dim))


def import_index(args):
    """Make an index from the vectors of --vectors, without encoding the corpus."""
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
    print(f"{out}: {total:,} vectors of {vectors.shape[1]} numbers from {args.vectors}")


def build_index(args):
    """Encode the corpus block by block; a rerun continues after the last block on disk."""
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
        # one block per device, because a tokenizer serves only one thread
        while any(blocks := [list(islice(texts, block)) for _ in encoders]):
            parts = pool.map(encode, blocks, repeat("passage: "), encoders, repeat(args.batch))
            for vectors in parts:
                file.write(vectors.half().numpy().tobytes())
                bar.update(len(vectors))
            file.flush()
            os.fsync(file.fileno())  # a block is done once it is on disk
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
            raise HTTPException(413, "the request needs a Content-Length of at most 16 MiB")
        try:
            asked = Search.model_validate(json.loads(await request.body()))
        except (ValueError, RecursionError) as error:  # drop pydantic's details in brackets
            raise HTTPException(400, " ".join(str(error).split("[")[0].split())) from None
        k, texts = asked.topk or topk, [q for q in asked.queries if isinstance(q, str)]
        scan, place = retriever.join(texts, k)
        try:
            hits = (await asyncio.wrap_future(scan))[place]
            if failed := [one for one in hits if isinstance(one, QueryError)]:
                raise failed[0]
        except ConnectionError as error:  # the server that this one asks fails
            raise HTTPException(502, " ".join(str(error).split())) from None
        found = iter(hits)
        result = [next(found)[:k] if isinstance(q, str) else [] for q in asked.queries]
        if not asked.return_scores:
            result = [[hit["document"] for hit in hits] for hits in result]
        return Response(json.dumps({"result": result}), media_type="application/json")

    return app


def find_port(host, port):
    """Raise a one-line error if a port is taken, before an index is read."""
    with errors_name(f"{host}:{port}"), socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind((host, port))


def serve(args):
    """Answer /retrieve until interrupted."""
    import uvicorn
    find_retriever(args.retriever, args.corpus)
    find_port(args.host, args.port)
    app = make_app(open_retriever(args.retriever, args.corpus, args.devices), args.topk)
    # backlog: the number of clients that may wait for a connection before others are refused
    uvicorn.run(app, host=args.host, port=args.port, access_log=False, backlog=2048)


def device(text):
    """The type of a flag: a torch device."""
    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a device such as cpu, cuda:0") from None
    return text


def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    add = commands.add_parser("index", help="make an index folder").add_argument
    add("--corpus", required=True, help="jsonl file, {id, contents} per line")
    add("--encoder", required=True, help="E5-style HF folder or hub name")
    add("--out", required=True, help="folder of the index; an interrupted build resumes from it")
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
        help="passages per query if a request has no topk (5)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); 0.0.0.0: all")
    add("--port", type=PORT, default=8000, help="port to listen on (8000); 0: any free port")
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
