"""
Search passages: by BM25 in memory, by exact search of E5 vectors, or by a server.

    (1) index   compute the vectors of a corpus into a folder; an interrupted build resumes
    (2) search  BM25 matches words; Dense compares all vectors
    (3) serve   answer POST /retrieve with the API of Search-R1's server [1]
    (4) ask     Remote is a client of such servers, of Tool-Star's [2] and of a web search

A retriever has search(queries, k): for each query its hits, best first, or its error. A hit is
{"document": {"id", "contents"}, "score"}; contents is the quoted title, a line break and the text.
[1] Search-R1, arXiv:2503.09516   [2] Tool-Star, arXiv:2505.16410

Reads   a corpus: jsonl, {"id", "contents"} per line; the HF folder of an E5-style encoder
Writes  OUT/meta.json, OUT/starts.npy, OUT/matrix.f16

    python -m toolstar index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 --out index
    python -m toolstar serve --retriever index --port 8000
"""
import json
import math
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch

import runtime
from runtime import Mistake, progress, write_text

HTTP = ("http://", "https://")
CHUNK = 65536  # passages whose vectors are converted to float32 at a time
MAX_QUERIES = 64  # of concurrent searches that share a scan
REQUESTS = 8  # to a server at once
SILENCE = 120  # seconds that a server may say nothing
PATIENCE = 10  # seconds for a request of several queries, or 4 times the pace of the last answer
BODY_BYTES, BODY_SECONDS = 2**26, 300  # the most that a server's reply may have and take
FLAT = 45  # bytes of the head of a flat faiss index, before its float32 vectors


# ---------------------------------------------------------------- search

def document_of(row):
    """The {"id", "contents"} of a row of a corpus."""
    text = row.get("contents")
    if text is None and "text" in row:  # FlashRAG's older form
        text = f'"{row.get("title", "")}"\n{row["text"]}'
    if not isinstance(text, str):
        raise Mistake(f"a passage needs an id and contents: {str(row)[:80]}")
    return {"id": str(row.get("id", "")), "contents": text}


class BM25:
    """Word matching in memory, for corpora of up to about a million passages."""

    def __init__(self, path):
        import bm25s
        self.documents = list(map(document_of, runtime.read_jsonl(path)))
        self.words = partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self.index = bm25s.BM25()
        self.index.index(self.words([d["contents"] for d in self.documents]), show_progress=False)

    def search(self, queries, k):
        k = min(k, len(self.documents))
        found = self.index.retrieve(self.words(queries), k=k, show_progress=False)
        return [[{"document": self.documents[i], "score": float(s)}
                 for i, s in zip(*hits, strict=True) if s > 0] for hits in zip(*found, strict=True)]


class Dense:
    """Exact search in an index folder."""

    def __init__(self, folder, devices=("cpu",)):
        folder = Path(folder)
        meta = json.loads((folder / "meta.json").read_text())
        self.path, self.corpus = meta["corpus"], os.open(meta["corpus"], os.O_RDONLY)
        self.starts = np.load(folder / "starts.npy", mmap_mode="r")  # offsets of the lines
        total = len(self.starts) - 1
        if os.path.getsize(folder / "matrix.f16") != 2 * total * meta["dim"]:
            raise Mistake(f"{folder} is not complete: run the same `index` again")
        if os.path.getsize(self.path) != meta["bytes"]:
            raise Mistake(f"{self.path} has changed since {folder} was made: run `index` again")
        matrix = torch.from_file(str(folder / "matrix.f16"), size=total * meta["dim"],
                                 dtype=torch.float16).view(total, meta["dim"])
        parts = matrix.split(-(-total // len(devices)))
        self.shards = [part.to(device) for part, device in zip(parts, devices, strict=False)]
        self.encoder = load_encoder(meta["encoder"], devices[0])

    def document(self, row):
        start, end = self.starts[row:row + 2].tolist()
        return document_of(json.loads(os.pread(self.corpus, end - start, start)))

    @torch.inference_mode()
    def search(self, queries, k):
        q, found, first = encode(queries, "query: ", self.encoder), [], 0
        for shard in self.shards:
            here = q.to(shard.device)
            for start in range(0, len(shard), CHUNK):
                scores = here @ shard[start:start + CHUNK].float().T  # (n, CHUNK)
                best, rows = scores.topk(min(k, scores.shape[1]))
                found.append((best.cpu(), rows.cpu() + start + first))
            first += len(shard)
        scores, rows = (torch.cat(part, 1) for part in zip(*found, strict=True))
        best, where = scores.topk(min(k, scores.shape[1]))
        return [[{"document": self.document(i), "score": s} for i, s in zip(*hits, strict=True)]
                for hits in zip(rows.gather(1, where).tolist(), best.tolist(), strict=True)]


# ---------------------------------------------------------------- servers

def post(client, url, body, headers=None, seconds=math.inf):
    """The JSON of a server's reply, which may take BODY_BYTES, and BODY_SECONDS or `seconds`: the
    time-out of httpx2 begins anew with every byte, and a small packed body may become a large one.
    """
    until, data = time.monotonic() + min(BODY_SECONDS, seconds), bytearray()
    content = json.dumps(body)  # half a surrogate pair would fail in httpx2's own
    headers = {"Content-Type": "application/json"} | (headers or {})
    with client.stream("POST", url, content=content, headers=headers,
                       timeout=min(SILENCE, seconds)) as reply:
        for part in reply.iter_bytes():
            data += part
            if len(data) > BODY_BYTES or time.monotonic() > until:
                raise ValueError(f"the reply does not end after {len(data):,} bytes")
    if reply.status_code != 200:
        raise ValueError(f"status {reply.status_code} {data[:200].decode(errors='replace')}")
    return json.loads(data)


class QueryError(ConnectionError):
    """The server works, but has no answer to this query."""


class Remote:
    """Client of a search server, in one of three protocols: Search-R1's POST /retrieve, Tool-Star's
    POST /search or /batch_search, and a web search, whose json file describes the request and where
    the hits are in its reply (database/tool-star/web.json).

    A query that gets no hits in `tries` tries has an error in their place: a QueryError if the
    server still answers a query that it has answered before, else a ConnectionError.
    """

    def __init__(self, name, tries=4, pause=1.0):
        import httpx2
        self.tries, self.pause, self.pool = tries, pause, ThreadPoolExecutor(16)
        self.known, self.pace = "a", 0.0  # a query that was answered; seconds a query, lately
        self.failures = (httpx2.HTTPError, ValueError, RecursionError, LookupError, TypeError,
                         AttributeError)  # the last three: the reply has another form
        self.web = None if name.startswith(HTTP) else json.loads(Path(name).read_text())
        plain = self.web["url"] if self.web else name.rstrip("/")
        self.tool_star = not self.web and plain.endswith(("/search", "/batch_search"))
        self.url = (plain if self.web else plain.rpartition("/")[0] + "/batch_search" if
                    self.tool_star else plain.removesuffix("/retrieve") + "/retrieve")
        self.post = partial(post, httpx2.Client(), self.url)

    def search(self, queries, k):
        return list(self.pool.map(self.alone, queries, repeat(k)))

    def together(self, queries, k):
        """The same in one request; None if that fails or takes long, which may be the fault of one
        query."""
        if len(queries) == 1:
            return self.search(queries, k)
        try:
            return self.send(queries, k, max(PATIENCE, 4 * self.pace * len(queries)))
        except self.failures:
            return None

    def alone(self, query, k):
        """The hits of a query, or its error."""
        for tried in range(self.tries):
            try:
                hits = self.send([query], k)[0]
                self.known = query
                return hits
            except self.failures as error:
                why = repr(error)[:300]
            if re.search(r"status 4(?!29)\d\d|ReadTimeout|does not end", why):
                break  # asking again will not help
            time.sleep(self.pause * 2**tried)
        try:
            self.send([self.known], k)
        except self.failures:
            return ConnectionError(f"{self.url} does not answer: {why}")
        return QueryError(why)

    def send(self, queries, k, seconds=math.inf):
        """The hits of each query; one of self.failures if there are none."""
        began = time.monotonic()
        if self.web:
            return [self.ask_web(queries[0], k)]
        if self.tool_star:
            body = {"query": queries, "top_n": k, "return_score": False}
            found = self.post(body, seconds=seconds)
            hits = [[{"document": one, "score": None} for one in row] for row in found]
        else:
            body = {"queries": queries, "topk": k, "return_scores": True}
            hits = self.post(body, seconds=seconds)["result"]
        texts = [hit["document"]["contents"] for row in hits for hit in row]
        if len(hits) != len(queries) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"not a server of Search-R1 or Tool-Star: {str(hits)[:200]}")
        self.pace = (time.monotonic() - began) / len(queries)
        return hits

    def ask_web(self, query, k):
        names = [self.web[name] for name in ("title", "text", "link")]
        body = {key: {"{query}": query, "{k}": k}.get(value, value)
                for key, value in self.web["body"].items()}
        found = self.post(body, self.web["headers"])
        found = found.get(self.web["results"], [])  # without hits there is no such key
        texts = [[str(hit.get(name, "")) for name in names] for hit in found[:k]]
        return [{"document": {"id": link, "contents": f'"{title}"\n{text} {link}'}, "score": None}
                for title, text, link in texts]


class Shared:
    """A retriever for many threads: searches that arrive while all workers are busy share the next
    scan. workers: how many scans run at once."""

    def __init__(self, retriever, workers=1):
        self.retriever, self.lock, self.waiting = retriever, threading.Lock(), []
        self.together = getattr(retriever, "together", retriever.search)
        self.workers = ThreadPoolExecutor(workers)

    def search(self, queries, k):
        with self.lock:
            if not self.waiting or len(self.waiting[-1][0]) + len(queries) > MAX_QUERIES:
                self.waiting.append(([], [], self.workers.submit(self.scan)))
            asked, ks, scan = self.waiting[-1]
            start = len(asked)
            asked.extend(queries)
            ks.append(k)
        found = scan.result()
        if found is None:  # each alone, so that nobody waits for the query that has failed all
            return self.retriever.search(queries, k)
        return [hits if isinstance(hits, ConnectionError) else hits[:k]
                for hits in found[start:start + len(queries)]]

    def scan(self):
        with self.lock:
            asked, ks, _ = self.waiting.pop(0)
        return self.together(asked, max(ks)) if asked else []


def find_retriever(name, corpus):
    """A Mistake, before an engine starts, if the files of --retriever are not there."""
    needed = (Path(corpus) if name == "bm25" else Path(name) if name.endswith(".json") else
              Path(name) / "meta.json")
    if not name.startswith(HTTP) and not needed.is_file():
        raise Mistake(f"{needed} is missing: see --corpus, or run python -m toolstar index")


def open_retriever(name, corpus=None, devices=("cpu",), **more):
    """A retriever for many threads. name: "bm25" (of a corpus), an index folder, the URL of a
    server, or the json file of a web search. more: arguments of Remote."""
    if name.endswith(".json"):
        return Remote(name, **more)
    if name.startswith(HTTP):
        # most servers scan once per request, so queries go together
        return Shared(Remote(name, **more), REQUESTS)
    return Shared(BM25(corpus) if name == "bm25" else Dense(name, devices))


# ---------------------------------------------------------------- index

def all_devices():
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def load_encoder(folder, device):
    """(an E5-style model, in fp16 on GPUs; its tokenizer)."""
    from transformers import AutoModel, AutoTokenizer
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    model = AutoModel.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def encode(texts, prefix, encoder, batch=512):
    """E5's unit vectors of texts, (n, D) float32 on the CPU. prefix: "query: " or "passage: "."""
    model, tokenizer = encoder
    vectors = torch.empty((len(texts), model.config.hidden_size))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # alike lengths share a batch
    for start in range(0, len(texts), batch):
        rows = order[start:start + batch]
        # the tokenizer refuses half a surrogate pair, which JSON can hold
        part = [(prefix + texts[i]).encode("utf-8", "replace").decode() for i in rows]
        tokens = tokenizer(part, max_length=256, truncation=True, padding=True, return_tensors="pt")
        hidden = model(**tokens.to(model.device)).last_hidden_state.float()  # (rows, L, D)
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors[rows] = torch.nn.functional.normalize(mean, dim=1).cpu()
    return vectors


def build_index(args):
    """Encode the corpus block by block; a rerun continues after the last block on disk. With
    --vectors the vectors come from a flat faiss index instead."""
    out, models, block = Path(args.out), [], 64 * args.batch
    if args.vectors:
        given = flat_vectors(args.vectors)
        dim = given.shape[1]
    else:
        models = [load_encoder(args.encoder, device) for device in args.devices or all_devices()]
        dim = models[0][0].config.hidden_size
    meta = {"corpus": str(Path(args.corpus).resolve()), "bytes": os.path.getsize(args.corpus),
            "encoder": args.encoder, "dim": dim, "batch": args.batch}
    if (out / "meta.json").exists() and json.loads((out / "meta.json").read_text()) != meta:
        raise Mistake(f"{out} was begun with other settings than {meta}: choose another --out")
    with open(args.corpus, "rb") as lines:
        starts = np.fromiter(chain([0], map(len, lines)), np.int64).cumsum()
    total = len(starts) - 1
    if args.vectors and len(given) != total:
        raise Mistake(f"{args.vectors} has {len(given):,} vectors, {args.corpus} {total:,} "
                      "passages: they do not belong together")
    runtime.lock_folder(out)
    np.save(out / "starts.npy", starts)
    write_text(out / "meta.json", json.dumps(meta, indent=1))
    with open(args.corpus, "rb") as lines, open(out / "matrix.f16", "ab") as file:
        done = file.tell() // (2 * dim)
        done -= done % block if done != total else 0
        file.truncate(2 * dim * done)
        lines.seek(starts[done])
        texts = (document_of(json.loads(line))["contents"] for line in lines)
        bar, pool = progress(None, "index", total, done, " passages"), ThreadPoolExecutor()
        while done < total:
            if args.vectors:
                parts = [torch.from_numpy(given[done:done + block].copy())]
            else:  # one block per device, because a tokenizer serves only one thread
                blocks = [list(islice(texts, block)) for _ in models]
                parts = pool.map(encode, blocks, repeat("passage: "), models, repeat(args.batch))
            for vectors in parts:
                file.write(vectors.half().numpy().tobytes())
                done += len(vectors)
                bar.update(len(vectors))
            file.flush()
            os.fsync(file.fileno())  # a block is done once it is on disk
        bar.close()
    print(f"{out}: {total:,} passages of {dim} numbers")


def flat_vectors(path):
    """The vectors of a flat faiss index such as FlashRAG's e5_Flat.index: (N, D) float32."""
    with open(path, "rb") as file:
        head = file.read(FLAT)
    dim, total = (int.from_bytes(head[at:at + size], "little") for at, size in ((4, 4), (8, 8)))
    if head[:4] not in (b"IxFI", b"IxF2") or os.path.getsize(path) != FLAT + 4 * dim * total:
        raise Mistake(f"{path} is not a whole flat index of faiss; other kinds do not hold the "
                      "vectors: leave out --vectors to encode the corpus")
    return np.memmap(path, np.float32, "r", FLAT, (total, dim))


# ---------------------------------------------------------------- serve

def serve(args):
    """Answer POST /retrieve {"queries", "topk", "return_scores"} until interrupted."""
    import fastapi
    import pydantic
    import uvicorn

    class Search(pydantic.BaseModel):
        queries: list[str]
        topk: int = pydantic.Field(args.topk, ge=1, le=100)
        return_scores: bool = False

    find_retriever(args.retriever, args.corpus)
    devices, app = args.devices or all_devices(), fastapi.FastAPI()
    retriever = open_retriever(args.retriever, args.corpus, devices)

    @app.post("/retrieve")
    def retrieve(asked: Search):
        result = retriever.search(asked.queries, asked.topk)
        return {"result": result if asked.return_scores else
                [[hit["document"] for hit in hits] for hits in result]}

    uvicorn.run(app, host=args.host, port=args.port, access_log=False, backlog=2048)
