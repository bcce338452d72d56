"""Search over passages: BM25, exact E5, its index, /retrieve and its client.
"""
import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

HTTP = ("http://", "https://")
MAX_QUERIES = 64  # per scan of the matrix; a scan for one query takes nearly as long as for sixteen
SPARE = 8  # candidates beyond k that are scored again in float64, so that float32 rounding cannot change the top k
CHUNK = {"cpu": 2048, "cuda": 65536}  # passages turned into float32 at a time; on the CPU they have to fit the cache
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


# ---------------------------------------------------------------- retrieval


class Corpus:
    """Documents by row, read from the file when asked for: the text of 21M passages is 14 GB."""

    def __init__(self, path, starts):
        self.path, self.file = path, open(path, "rb")
        self.starts = np.load(starts, mmap_mode="r")  # (N + 1,) byte offsets of the lines

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, row):
        start, end = int(self.starts[row]), int(self.starts[row + 1])
        return load_document(os.pread(self.file.fileno(), end - start, start), f"{self.path}, line {row + 1}")


class BM25:
    """Word matching in memory: for a laptop, and for corpora of up to about a million passages."""

    def __init__(self, path):
        import bm25s
        with open(path, encoding="utf-8") as file:
            self.documents = [load_document(line, f"{path}, line {i}") for i, line in enumerate(file, 1)]
        self.tokenize, self.index = bm25s.tokenize, bm25s.BM25()
        self.index.index(self.words([d["contents"] for d in self.documents]), show_progress=False)

    def words(self, texts):
        return self.tokenize(texts, stopwords="en", show_progress=False)

    def search(self, queries, k):
        """Hits of each query, best first; fewer than k when fewer share a word with it."""
        k = min(k, len(self.documents))
        found = self.index.retrieve(self.words(queries), k=k, show_progress=False)  # rows and scores, (n, k) each
        return [[{"document": self.documents[i], "score": float(s)} for i, s in zip(*hits) if s > 0]
                for hits in zip(*found)]


class Dense:
    """Exact search of an index folder: what the corpus says about the rows the matrix finds."""

    def __init__(self, folder, devices=("cpu",), encoder=None):
        folder = Path(folder)
        meta = json.loads((folder / "meta.json").read_text())
        self.corpus = Corpus(meta["corpus"], folder / "starts.npy")
        size = (folder / "matrix.f16").stat().st_size // (2 * meta["dim"])
        if size != len(self.corpus):
            raise ValueError(f"{folder} has {size} of {len(self.corpus)} passages: run the same `index` command again")
        self.matrix = Matrix(folder / "matrix.f16", size, meta["dim"], devices)
        self.model, self.tokenizer = load_encoder(encoder or meta["encoder"], devices[0])

    def search(self, queries, k):
        """The k best hits of each query, best first."""
        rows, scores = self.matrix.nearest(encode(queries, "query: ", self.model, self.tokenizer), k)
        return [[{"document": self.corpus[i], "score": s} for i, s in zip(*hits)]
                for hits in zip(rows.tolist(), scores.tolist())]


class Matrix:
    """N vectors of D fp16 numbers, in shards: one per GPU, or memory-mapped and one per CPU core."""

    def __init__(self, path, size, dim, devices=("cpu",)):
        threads = torch.get_num_threads()
        devices = [one for device in devices for one in [device] * (threads if device == "cpu" else 1)]
        matrix = torch.from_file(str(path), shared=False, size=size * dim, dtype=torch.float16)
        share = -(-size // len(devices))
        parts = matrix.view(size, dim).split(share)  # (share, D) each
        self.shards = [(i * share, part.to(device)) for i, (part, device) in enumerate(zip(parts, devices))]
        # a thread per shard, undivided: threads that meet after each small step wait for the slowest, 10 times as long
        # on a busy machine. Started here, because torch hands the number set last to every new thread
        self.pool = ThreadPoolExecutor(len(devices), initializer=torch.set_num_threads, initargs=(1,))
        list(self.pool.map(time.sleep, [0.01] * len(devices)))
        torch.set_num_threads(threads)

    def nearest(self, q, k):
        """As nearest below, over all shards. (n, D) float32 -> (n, k) int64, (n, k) float64"""
        found = list(self.pool.map(nearest_in_shard, self.shards, repeat(q), repeat(k)))
        rows, scores = torch.cat([rows for rows, _ in found], 1), torch.cat([scores for _, scores in found], 1)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        return rows.gather(1, order), scores.gather(1, order)


def nearest_in_shard(shard, q, k):
    """nearest in (first row, vectors), its rows counted from the start of the matrix."""
    start, part = shard
    rows, scores = nearest(q.to(part.device), part, k)
    return rows.cpu() + start, scores.cpu()


@torch.inference_mode()
def nearest(q, matrix, k):
    """Rows with the largest inner product, ties by row. (n, D) float32, (N, D) fp16 -> (n, k) int64, (n, k) float64"""
    step, keep, found = CHUNK[q.device.type], min(k + SPARE, len(matrix)), []
    part = torch.empty((step, matrix.shape[1]), device=q.device)  # float32
    scores = torch.empty((len(q), step), device=q.device)  # reused: fresh memory costs as much time as the product
    for start in range(0, len(matrix), step):
        # fp16 products are slow on a CPU and round the scores everywhere, so a chunk becomes float32 first
        chunk = matrix[start:start + step]
        torch.mm(q, part[:len(chunk)].copy_(chunk).T, out=scores[:, :len(chunk)])
        best, where = scores[:, :len(chunk)].topk(min(keep, len(chunk)))  # (n, keep)
        found.append((best, where + start))
    order = torch.cat([best for best, _ in found], 1).topk(keep).indices
    rows = torch.cat([rows for _, rows in found], 1).gather(1, order).sort(dim=1).values
    exact = torch.einsum("nd,nkd->nk", q.double(), matrix[rows].double())
    order = exact.argsort(dim=1, descending=True, stable=True)[:, :k]
    return rows.gather(1, order), exact.gather(1, order)


class Remote:
    """Client of a Search-R1 retrieval server."""

    def __init__(self, url, tries=6, pause=1.0):
        self.url, self.tries, self.pause = url.rstrip("/").removesuffix("/retrieve") + "/retrieve", tries, pause

    def search(self, queries, k):
        """Hits of each query; ConnectionError when the server refuses, or stays silent through all tries."""
        # Search-R1's own server fails without return_scores
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for i in range(self.tries):
            try:
                with urllib.request.urlopen(request, timeout=120) as response:
                    reply = json.load(response)
                break
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:  # the request is wrong: asking again will not help
                    said = error.read(500).decode(errors="replace")
                    raise ConnectionError(f"{self.url} refused the request: {error.code} {said}") from None
                why = error
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                why = error
            if i + 1 == self.tries:
                raise ConnectionError(f"the retriever {self.url} gave no answer in {self.tries} tries ({why}): "
                                      "start it again, then repeat this command; finished episodes are kept")
            time.sleep(self.pause * 2**i)
        return read_hits(reply, len(queries), self.url)


def read_hits(reply, count, url):
    """The hits in a server's reply, checked once here so that nothing later stumbles over them."""
    result = reply.get("result") if isinstance(reply, dict) else None
    fits = isinstance(result, list) and len(result) == count and all(isinstance(hits, list) for hits in result)
    if not fits or not all(isinstance(hit, dict) and isinstance(hit.get("document"), dict)
                           and isinstance(hit["document"].get("contents"), str) for hits in result for hit in hits):
        raise ConnectionError(f"{url} is no Search-R1 server: want {count} lists of hits, found {str(reply)[:200]}")
    return result


class Shared:
    """One retriever for many threads: searches that arrive during a scan go together into the next one."""

    def __init__(self, retriever):
        self.retriever, self.waiting, self.broken = retriever, [], None
        self.lock, self.scan = threading.Lock(), threading.Lock()

    def search(self, queries, k):
        """As the retriever's own, from any thread."""
        mine = Future()
        with self.lock:
            self.waiting.append((queries, k, mine))
        with self.scan:  # whoever gets in first searches for all who wait behind
            while not mine.done():
                self.search_waiting()
        return mine.result()

    def search_waiting(self):
        """One call of the retriever for the requests in front of the queue, MAX_QUERIES at most unless one has more."""
        with self.lock:
            batch = [self.waiting.pop(0)]
            while self.waiting and sum(len(b[0]) for b in [*batch, self.waiting[0]]) <= MAX_QUERIES:
                batch.append(self.waiting.pop(0))
        queries, most, hits = [q for b in batch for q in b[0]], max(k for _, k, _ in batch), []
        try:
            for i in range(0, 0 if self.broken else len(queries), MAX_QUERIES):
                hits += self.retriever.search(queries[i:i + MAX_QUERIES], most)
        except ConnectionError as error:  # it has given up: nobody else has to wait for the same
            self.broken = error
        finally:
            for own, k, future in batch:
                if len(hits) < len(own) or self.broken:
                    future.set_exception(self.broken or RuntimeError("the search failed in another thread, see there"))
                    continue
                future.set_result([h[:k] for h in hits[:len(own)]])
                hits = hits[len(own):]


def find_retriever(a):
    """Say at once, and not after an engine has started, that what --retriever names is not there."""
    if a.retriever == "bm25":
        if not Path(a.corpus).is_file():
            raise FileNotFoundError(f"bm25 finds no {a.corpus}: --corpus names the jsonl of {{id, contents}} to search")
    elif not a.retriever.startswith(HTTP) and not (Path(a.retriever) / "meta.json").exists():
        raise FileNotFoundError(f"{a.retriever} is no index folder (no meta.json): make one with `qa_eval.py index`")


def open_retriever(a):
    """What --retriever names, ready to be shared by threads."""
    if a.retriever.startswith(HTTP):
        return Shared(Remote(a.retriever, a.tries))
    return Shared(BM25(a.corpus) if a.retriever == "bm25" else Dense(a.retriever, a.devices, a.encoder))


# ---------------------------------------------------------------- index


def load_encoder(folder, device):
    """An E5-style model (fp16 on GPUs) and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    return AutoModel.from_pretrained(folder, dtype=dtype).to(device).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def encode(texts, prefix, model, tokenizer):
    """E5's unit vectors: prefix, at most 256 tokens, mean over the real ones. n texts -> (n, D) float32 on the CPU"""
    texts = [prefix + text for text in texts]
    batch = tokenizer(texts, max_length=256, truncation=True, padding=True, return_tensors="pt").to(model.device)
    hidden = model(**batch).last_hidden_state.float()  # (n, L, D)
    mask = batch["attention_mask"].unsqueeze(-1)  # (n, L, 1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).cpu()


def encode_share(batches, encoder):
    """One device's batches, one after the other: a tokenizer serves only one thread."""
    return [encode(texts, "passage: ", *encoder) for texts in batches]


def encode_block(texts, encoders, batch):
    """Passages -> (len(texts), D) fp16. Texts of like length share a batch; batches are dealt out over the devices."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    batches = [[texts[i] for i in order[j:j + batch]] for j in range(0, len(order), batch)]
    devices = len(encoders)
    with ThreadPoolExecutor(devices) as pool:
        shares = list(pool.map(encode_share, [batches[d::devices] for d in range(devices)], encoders))
    vectors = torch.cat([shares[j % devices][j // devices] for j in range(len(batches))])
    return vectors[torch.tensor(order).argsort()].half()


def begin_index(a, out, dim):
    """Note down what the index is made of and where each line of the corpus starts; refuse to mix two indexes."""
    encoder = str(Path(a.encoder).resolve()) if Path(a.encoder).exists() else a.encoder  # or a name on the hub
    meta = {"corpus": str(Path(a.corpus).resolve()), "bytes": Path(a.corpus).stat().st_size, "encoder": encoder,
            "dim": dim, "batch": a.batch}
    if (out / "meta.json").exists():
        begun = json.loads((out / "meta.json").read_text())
        if begun != meta:
            raise ValueError(f"{out} was begun with {begun}, not {meta}: repeat that command or choose another --out")
        return
    out.mkdir(parents=True, exist_ok=True)
    starts = array("q", [0])
    with open(a.corpus, "rb") as file:
        for line in file:
            starts.append(starts[-1] + len(line))
    np.save(out / "starts.npy", np.asarray(starts))
    (out / "meta.json").write_text(json.dumps(meta, indent=1))  # last: its presence says that starts.npy is whole


def build_index(a):
    """Encode block by block and append; after a stop the whole blocks on disk count and the rest is encoded."""
    if not (a.corpus and a.encoder):
        raise ValueError("index wants --corpus FILE --encoder FOLDER --out INDEX_DIR")
    encoders = [load_encoder(a.encoder, device) for device in a.devices]
    out, row, block = Path(a.out), 2 * encoders[0][0].config.hidden_size, 64 * a.batch  # row: bytes of a passage
    begin_index(a, out, row // 2)
    corpus = Corpus(a.corpus, out / "starts.npy")
    with open(out / "matrix.f16", "ab") as file:
        size = file.tell() // row
        done = first = size if size == len(corpus) else size // block * block
        file.truncate(done * row)
        clock = time.time()
        while done < len(corpus):
            texts = [corpus[i]["contents"] for i in range(done, min(done + block, len(corpus)))]
            file.write(encode_block(texts, encoders, a.batch).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())  # a block counts once it is on disk
            done += len(texts)
            progress("index", done, len(corpus), first, clock)
    print(f"{out}: {len(corpus):,} passages of {row // 2} numbers")


def progress(what, done, total, first, clock, more=""):
    """One line on stderr: done of total, rate since this start, time left."""
    rate = (done - first) / max(time.time() - clock, 1e-9)
    left = (total - done) / max(rate, 1e-9)
    print(f"{what} {done}/{total} | {rate:.1f}/s | {left / 60:.0f} min left{more}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- serve


class Handler(BaseHTTPRequestHandler):
    """Search-R1's API: POST /retrieve {"queries": [...], "topk": int or null, "return_scores": bool}"""

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if self.path.rstrip("/") != "/retrieve" or not length.isdecimal() or int(length) > 2**24:
            return self.reply(400, {"error": "POST a body of at most 16 MiB, with its Content-Length, to /retrieve"})
        try:
            request = read_request(self.rfile.read(int(length)))
        except ValueError as error:
            return self.reply(400, {"error": str(error)})
        hits = self.server.retriever.search(request["queries"], request.get("topk") or self.server.topk)
        if not request.get("return_scores"):
            hits = [[hit["document"] for hit in row] for row in hits]
        self.reply(200, {"result": hits})

    def reply(self, code, body):
        body = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):  # one line per request would be the bulk of the log
        pass


def read_request(body):
    """The request, checked; ValueError says what is wrong with it."""
    request = json.loads(body)
    if not isinstance(request, dict) or not isinstance(request.get("queries"), list):
        raise ValueError('want a JSON object with a list "queries"')
    if not all(isinstance(query, str) and query.strip() for query in request["queries"]):
        raise ValueError("every query must be a non-empty string")
    topk, scores = request.get("topk"), request.get("return_scores", False)
    if topk is not None and (type(topk) is not int or not 1 <= topk <= 100):
        raise ValueError(f"topk must be a whole number from 1 to 100 or null, not {topk!r:.40}")
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores must be true or false, not {scores!r:.40}")
    return request


def serve(a):
    """Answer /retrieve until interrupted; requests that arrive together share a scan."""
    find_retriever(a)
    server = ThreadingHTTPServer((a.host, a.port), Handler)
    server.daemon_threads, server.topk, server.retriever = True, a.topk, open_retriever(a)
    print(f"POST http://{a.host}:{server.server_port}/retrieve answers from {a.retriever}", flush=True)
    server.serve_forever()
