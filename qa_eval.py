"""
Question answering with a search tool no stage trained on: what does learning to plan trips cost elsewhere?

    (1) a question becomes an episode with one tool, Search(query), which answers with the top passages of a corpus
    (2) play it by the travel agent's protocol: at most 60 replies and 32K tokens, <answer> ends it
    (3) exact match: the answer equals a gold answer once case, punctuation, articles and blanks are gone [2]; beside
        it sub-EM (a gold answer is contained) and F1 (shared words). An episode that ran out of tokens or replies, or
        has no answer, is wrong and counted apart
    (4) the tax table: checkpoints side by side, per data set and as the unweighted mean of the sets, with bootstrap
        intervals over the questions, and the difference to the first checkpoint on the same questions

Retrieval: a Search-R1 server (http://...), an index folder (exact inner products of E5 vectors [3]), or BM25 in memory.
Not like for like: the Search-R1 rows that [1] prints were made with 3 passages and 4 replies, STAR's with 5 and 60.
[1] STAR, arXiv:2603.21972   [2] Search-R1, arXiv:2503.09516   [3] E5, arXiv:2212.03533

Reads   HF folders or an API; FlashRAG's DATA/<set>/<split>.jsonl or a DATA/questions.jsonl; a corpus.jsonl
Writes  OUT/<model>/episodes.jsonl, OUT/tax.md, OUT/tax.json; plays only what OUT lacks

laptop  python qa_eval.py --model base=out/tiny/init sft=out/tiny/sft
API     python qa_eval.py --model gpt-x --url http://localhost:9000/v1
index   python qa_eval.py index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 --out index
serve   python qa_eval.py serve --retriever index --port 8000         for training jobs and others, as Search-R1's
full    python qa_eval.py --model base=A sft=B rl=C --data flashrag --retriever http://localhost:8000
"""
import argparse, json, multiprocessing, random, re, string, sys, time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch

from evaluate import ChatError, api_generate, append_jsonl, engine, play, play_vllm, read_jsonl
from retriever import HTTP, build_index, find_retriever, open_retriever, progress, serve
from sandbox import Episode, parse

# Shapes: n queries, N passages, D vector size, L tokens of a text, k hits, M models, R bootstrap rounds.
# A hit is Search-R1's {"document": {"id", "contents"}, "score"}; contents is the quoted title, a new line, the text.

SETS = {  # FlashRAG's folder: (split, questions); the test split if there is one, else dev [2]
    "nq": ("test", 3610), "triviaqa": ("test", 11313), "popqa": ("test", 14267), "hotpotqa": ("dev", 7405),
    "2wikimultihopqa": ("dev", 12576), "musique": ("dev", 2417), "bamboogle": ("test", 125),
}
BESIDE = (("sub_em", "sub-EM", "{:.1%}"), ("f1", "F1", "{:.1%}"), ("context", "wrong: out of tokens", "{:,}"),
          ("turns", "wrong: out of replies", "{:,}"), ("missing", "wrong: no answer", "{:,}"),
          ("calls", "searches per question", "{:.1f}"))  # the table's lower rows: key in tax.json, label, form
DEFAULT_DATA = Path(__file__).parent / "database" / "qa"
SETTINGS = ("corpus", "encoder", "topk", "max_turns", "max_context", "max_tokens", "temperature", "top_p",
            "system_prompt", "seed")  # a folder of episodes holds one choice of these, model and retriever
TOOL = {"type": "function", "function": {
    "name": "Search", "description": "Find the passages of an encyclopedia that fit a query best.",
    "parameters": {"type": "object", "required": ["query"],
                   "properties": {"query": {"type": "string", "description": "what to look for, in a few words"}}}}}
QA_PROMPT = f"""You answer questions with the help of a search tool.

A reply has one of two forms and holds nothing else.
To search:
<think>what is known, what is still missing</think>
<tool_call>{{"name": "Search", "arguments": {{"query": "river through the capital of Norway"}}}}</tool_call>
To finish:
<think>which passage settles the question</think>
<answer>Akerselva</answer>

<tools>
{json.dumps(TOOL)}
</tools>

One search per reply; the passages come back between <tool_response> tags. A question with several steps takes a search
for each; where the passages do not help, search again with other words. Believe the passages more than your memory.
The answer is only the name, date, number, or yes or no that was asked for, in as few words as possible."""
PROMPTS = {"full": QA_PROMPT, "short": (
    'You answer questions with the tool Search(query). Reply <think>...</think><tool_call>{"name": ..., "arguments": '
    '...}</tool_call> or <think>...</think><answer>...</answer>.')}


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and behind each flag its default."""


def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    p.add_argument("command", nargs="?", choices=("play", "index", "serve"), default="play", help="first of all")
    add = p.add_argument_group("play").add_argument
    add("--model",       nargs="+", metavar="NAME=PATH",
        help="checkpoints, or models of --url; the first is the yardstick")
    add("--url",         help="an OpenAI-compatible API, http://host:port/v1; without it vLLM plays here")
    add("--data",        default=str(DEFAULT_DATA), help="folder of FlashRAG, or of a questions.jsonl")
    add("--sets",        nargs="+", help=f"of {', '.join(SETS)}; default: all")
    add("--sample",      type=int, metavar="N", help="N questions per set, always the same; 500: +-2 points")
    add("--out",         default="out/qa", help="folder of the episodes and the table; with index: the index")
    add("--resume",      action=argparse.BooleanOptionalAction, default=True,
        help="--no-resume drops OUT's episodes first")
    add("--topk",        type=int,   default=5,     help="passages per search [1]; serve: if a request names none")
    add("--max-turns",   type=int,   default=60,    help="replies per question [1]")
    add("--max-context", type=int,   default=32768, help="tokens per question [1]")
    add("--max-tokens",  type=int,   default=2048,  help="tokens per reply")
    add("--temperature", type=float, default=0.6,   help="of the sampling [1]")
    add("--top-p",       type=float, default=0.95,  help="of the sampling [1]")
    add("--concurrency", type=int,   default=64,    help="questions played at the same time")
    add("--tp",          type=int,   default=1,     help="GPUs a vLLM engine is split over; for more engines use --url")
    add("--gpu-memory",  type=float, default=0.9,   help="fraction of each GPU that vLLM takes")
    add("--system-prompt", default="full", help="full, short (for tiny models), or a file with other words")
    add("--seed",        type=int,   default=0,     help="of the sampling, of --sample and of the bootstrap")
    add("--rounds",      type=int,   default=1000,  help="R, bootstrap rounds behind the 95%% intervals")
    add = p.add_argument_group("retrieval (play and serve)").add_argument
    add("--retriever",   default="bm25", help="bm25, an index folder, or the address of a Search-R1 server")
    add("--corpus",      help="jsonl of {id, contents} for bm25 and index; default for bm25: corpus.jsonl in DATA")
    add("--encoder",     help="E5-style HF folder or hub name; default for play and serve: the one of the index")
    add("--devices",     nargs="+", help="e.g. cuda:0 cuda:1, each takes its share; default: play cpu, else all GPUs")
    add("--tries",       type=int,   default=6,     help="of a call to the server, 1, 2, 4 ... s apart")
    add = p.add_argument_group("index and serve").add_argument
    add("--batch",       type=int,   default=512,   help="passages per forward of the encoder")
    add("--host",        default="127.0.0.1", help="0.0.0.0 lets other machines in")
    add("--port",        type=int,   default=8000,  help="0 takes a free one and prints it")
    a = p.parse_args(argv)
    gpus = [] if a.command == "play" else range(torch.cuda.device_count())  # while playing they are vLLM's
    a.devices = a.devices or [f"cuda:{i}" for i in gpus] or ["cpu"]
    a.data = str(DEFAULT_DATA) if a.data == "default" else a.data
    if a.retriever == "bm25" and a.command != "index":
        a.corpus = a.corpus or str(Path(a.data) / "corpus.jsonl")
    return a


# ---------------------------------------------------------------- data


def load_questions(a):
    """Tasks {id, set, query, golden_answers} of the chosen sets; warns where a set is not what the papers used."""
    folder = Path(a.data)
    files = {name: [folder / name / f"{split}.jsonl" for split in ("test", "dev", "train")] for name in a.sets or SETS}
    if (folder / "questions.jsonl").exists():
        files = {folder.resolve().name: [folder / "questions.jsonl"]}
    tasks = []
    for name, places in files.items():
        path = next((place for place in places if place.exists()), None)
        if path is None:
            print(f"warning: no {places[0]}, nor dev.jsonl nor train.jsonl: {name} is left out", file=sys.stderr)
            continue
        rows = [load_question(row, name, f"{path}, record {i}") for i, row in enumerate(read_jsonl(path), 1)]
        if name in SETS and (path.stem, len(rows)) != SETS[name]:
            print(f"warning: {path} has {len(rows):,} questions, the papers use {SETS[name]}", file=sys.stderr)
        if a.sample and a.sample < len(rows):
            rows = [rows[i] for i in sorted(random.Random(f"{a.seed}/{name}").sample(range(len(rows)), a.sample))]
        tasks += rows
    twice = [task_id for task_id, count in Counter(task["id"] for task in tasks).items() if count > 1]
    if twice or not tasks:
        raise ValueError(f"{folder}: " + (f"the id {twice[0]} occurs twice: make ids unique within a set" if twice else
                                          "no questions.jsonl and no <set>/<split>.jsonl of FlashRAG: see --data"))
    return tasks


def load_question(row, name, where):
    """FlashRAG's line -> task. Ids repeat between sets, so the set goes in front."""
    gold = row.get("golden_answers") if isinstance(row, dict) else None
    gold = [gold] if isinstance(gold, str) else gold
    if not isinstance(gold, list) or not gold or "id" not in row or not isinstance(row.get("question"), str):
        raise ValueError(f"{where}: want id, question and a non-empty golden_answers, found {str(row)[:100]}")
    return {"id": f"{name}/{row['id']}", "set": name, "query": row["question"], "golden_answers": [*map(str, gold)]}


# ---------------------------------------------------------------- score


def normalise(text):
    """Search-R1's order: lower case, ASCII punctuation deleted, a/an/the as words, then blanks [2]."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(answer, gold):
    """Harmonic mean of word precision and recall, 0 to 1; yes, no and noanswer count only when equal."""
    answer, gold = normalise(answer), normalise(gold)
    if answer != gold and {answer, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    same = sum((Counter(answer.split()) & Counter(gold.split())).values())
    return 2 * same / (len(answer.split()) + len(gold.split())) if same else 0.0


def qa_score(episode):
    """{"em", "sub_em", "f1"}: the best over the gold answers; all 0 unless the episode ended with an answer."""
    golds = episode.task["golden_answers"]
    if episode.stop != "answer" or not (episode.answer or "").strip():
        return {"em": 0.0, "sub_em": 0.0, "f1": 0.0}
    answer = normalise(episode.answer)
    return {"em": float(any(answer == normalise(g) for g in golds)),
            "sub_em": float(any(normalise(g) in answer for g in golds)),
            "f1": max(f1(episode.answer, g) for g in golds)}


# ---------------------------------------------------------------- play


class SearchSandbox:
    """The world of a question: one tool, no database."""
    tools = ("Search",)

    def __init__(self, retriever, topk=5):
        self.retriever, self.topk, self.failures = retriever, topk, 0

    def call(self, name, arguments):
        """The passages as text, or an error the agent can read."""
        if name != "Search":
            return f"Error: there is no tool {name}. The only tool is Search with one argument, query."
        query = arguments.get("query") if isinstance(arguments, dict) else None
        if not isinstance(query, str) or not query.strip() or set(arguments) != {"query"}:
            return 'Error: Search takes one argument, {"query": "a few words"}.'
        hits = self.retriever.search([query.strip()], self.topk)[0]
        return "\n".join(passage(i + 1, hit) for i, hit in enumerate(hits)) or "No passage found. Try other words."


def passage(i, hit):
    """One line as Search-R1 shows it: Doc 1(Title: ...) text"""
    title, _, text = hit.get("document", hit)["contents"].partition("\n")
    return f"Doc {i}(Title: {title.strip().strip(chr(34))}) {text.strip()}"


def parse_qa(reply):
    """sandbox.parse, but of several answers in a reply the last one counts [2]."""
    thought, end, rest = reply.rpartition("</think>")
    last = rest.rfind("<answer>")
    several = -1 < rest.find("<answer>") < last and "<tool_call>" not in rest
    return parse(thought + end + rest[last:] if several else reply)


def verdicts(path):
    """{id: (em, sub_em, f1, stop, calls)} of the episodes in a file. Reads line by line, since 50K episodes are
    gigabytes, and cuts off a last line torn by a kill: that question is played again."""
    found, end = {}, 0
    path.touch()
    with open(path, "rb+") as file:
        for i, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(line)
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {i}: not JSON ({error}); delete the line to play it again") from None
            stop = row["stop"] if row["stop"] != "answer" or row["answer"].strip() else "empty"
            found[row["task"]["id"]] = (*(row["score"][key] for key in ("em", "sub_em", "f1")), stop, row["calls"])
    return found


def open_folder(a, name, path):
    """OUT/<name>: one folder holds one way of playing, so refuse to go on in another."""
    folder = Path(a.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    if not a.resume:
        for file in ("episodes.jsonl", "settings.json"):
            (folder / file).unlink(missing_ok=True)
    retriever = "a server" if a.retriever.startswith(HTTP) else a.retriever  # which may come back at another address
    new = {"model": path, "retriever": retriever} | {key: getattr(a, key) for key in SETTINGS}
    file = folder / "settings.json"
    old = json.loads(file.read_text()) if file.exists() else new
    changed = [f"{key} was {old.get(key)!r} and is {new[key]!r}" for key in new if old.get(key) != new[key]]
    if changed:
        raise ValueError(f"{folder} was played otherwise ({'; '.join(changed)}): choose another --out, or --no-resume")
    file.write_text(json.dumps(new, indent=1))
    return folder


def play_model(a, folder, path, tasks):
    """Play the tasks that OUT lacks and append each episode as it ends; memory holds only the live ones."""
    done = verdicts(folder / "episodes.jsonl")
    tasks, total = [task for task in tasks if task["id"] not in done], len(tasks)
    prompt = PROMPTS.get(a.system_prompt) or Path(a.system_prompt).read_text(encoding="utf-8")
    play_here = player(a, path)
    retriever = open_retriever(a)  # second: vLLM 0.32.0 does not start once numba is imported, and bm25s imports it
    episodes = (Episode(task, SearchSandbox(retriever, a.topk), a.max_turns, prompt, strict=False, parse=parse_qa)
                for task in tasks)
    clock = said = time.time()
    right = 0.0
    for i, episode in enumerate(play_here(episodes), 1):
        score = qa_score(episode)
        append_jsonl(folder / "episodes.jsonl", {**episode.record(folder.name), "score": score})
        right += score["em"]
        if time.time() - said > 10 or i == len(tasks):
            said, first = time.time(), total - len(tasks)
            progress(folder.name, first + i, total, first, clock, f" | EM {100 * right / i:.1f} of this start's")


def player(a, path):
    """episodes -> the same in the order they end, played by an API or by a vLLM engine that starts here."""
    if a.url:
        generate = api_generate(a.url, path, temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens)
        return partial(play, generate, concurrency=a.concurrency)
    llm, tokenizer = engine(path, a.max_context, a.concurrency, a.tp, a.gpu_memory)
    return partial(play_vllm, llm, tokenizer, max_context=a.max_context, temperature=a.temperature, top_p=a.top_p,
                   seed=a.seed, max_tokens=a.max_tokens, concurrency=a.concurrency)


def play_all(a):
    """Play every checkpoint, then print the table."""
    tasks = load_questions(a)
    models = [spec.split("=", 1) if "=" in spec else [spec.strip("/").replace("/", "-"), spec]
              for spec in a.model or ()]
    if not models or len({name for name, _ in models}) < len(models):
        raise ValueError("--model wants checkpoints, each with a name of its own: --model base=PATH sft=PATH")
    find_retriever(a)
    folders = [open_folder(a, name, path) for name, path in models]
    for folder, (name, path) in zip(folders, models):
        done = verdicts(folder / "episodes.jsonl")
        missing = sum(task["id"] not in done for task in tasks)
        print(f"{name}: {len(tasks) - missing:,} of {len(tasks):,} questions are played", file=sys.stderr)
        if missing and a.url:
            play_model(a, folder, path, tasks)
        elif missing:  # only the end of its process gives back all of an engine's memory
            child = multiprocessing.get_context("spawn").Process(target=run, args=(play_model, a, folder, path, tasks))
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"qa_eval.py: {name} stopped early; the same command goes on where it was")
    print(table(a, folders, tasks))


# ---------------------------------------------------------------- table


def bootstrap(scores, rounds, rng):
    """Means of n questions drawn with replacement, the same draw for every model. (M, n) -> (R, M)"""
    n = scores.shape[1]
    return np.stack([scores[:, rng.integers(n, size=n)].mean(1) for _ in range(rounds)])


def cell(mean, draws, sign=""):
    """Percent with its 95% interval: 41.2 (39.6 to 42.8)"""
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{100 * mean:{sign}.1f} ({100 * low:{sign}.1f} to {100 * high:{sign}.1f})"


def summarise(found, sets):
    """One model's {id: verdict} and the sets' ids -> its numbers: fractions as means of the sets' means, and counts."""
    rows = [found[i] for ids in sets.values() for i in ids]
    stops = Counter(row[3] for row in rows)
    means = np.mean([np.mean([found[i][:3] for i in ids], axis=0) for ids in sets.values()], axis=0)
    return {"em": means[0], "sub_em": means[1], "f1": means[2], "context": stops["context"], "turns": stops["turns"],
            "missing": len(rows) - stops["answer"] - stops["context"] - stops["turns"],
            "calls": sum(row[4] for row in rows) / len(rows),
            "sets": {name: float(np.mean([found[i][0] for i in ids])) for name, ids in sets.items()}}


def table(a, folders, tasks):
    """The tax table as markdown; also in OUT/tax.md, and as numbers in OUT/tax.json."""
    names, sets, draws = [folder.name for folder in folders], {}, {}
    for task in tasks:
        sets.setdefault(task["set"], []).append(task["id"])
    found = [verdicts(folder / "episodes.jsonl") for folder in folders]
    report = {name: summarise(f, sets) for name, f in zip(names, found)}
    rng = np.random.default_rng(a.seed)
    for name, ids in sets.items():
        draws[name] = bootstrap(np.array([[f[i][0] for i in ids] for f in found]), a.rounds, rng)  # (R, M)
    average = np.mean(list(draws.values()), axis=0)  # (R, M)
    rows = [["EM, %", "questions", *names], ["---"] * (len(names) + 2)]
    for name, ids in sets.items():
        cells = [cell(report[model]["sets"][name], draw) for model, draw in zip(names, draws[name].T)]
        rows.append([name, f"{len(ids):,}", *cells])
    rows.append(["**average**", f"{len(tasks):,}", *(cell(report[m]["em"], draw) for m, draw in zip(names, average.T))])
    if len(names) > 1:
        first = report[names[0]]["em"]
        taxes = [cell(report[m]["em"] - first, draw - average[:, 0], "+") for m, draw in zip(names, average.T)]
        rows.append([f"minus {names[0]}", "", "", *taxes[1:]])
    rows += [[label, "", *(form.format(report[name][key]) for name in names)] for key, label, form in BESIDE]
    text = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    text += f"\n{a.topk} passages a search and {a.max_turns} replies at most; Search-R1's published rows had 3 and 4.\n"
    (folders[0].parent / "tax.json").write_text(json.dumps(report, indent=1))
    (folders[0].parent / "tax.md").write_text(text)
    return text


# ---------------------------------------------------------------- main


def run(function, *args):
    """Call it; what the user can mend is one line and not a traceback."""
    try:
        function(*args)
    except (ChatError, ConnectionError, FileNotFoundError, ValueError) as error:
        raise SystemExit(f"qa_eval.py: {error}") from None


def main(argv=None):
    a = flags(argv)
    run({"play": play_all, "index": build_index, "serve": serve}[a.command], a)


if __name__ == "__main__":
    main()
