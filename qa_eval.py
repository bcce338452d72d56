"""
Question answering with a search tool that no stage trained on: what did learning to plan cost?

    (1) a question is an episode with one tool: Search(query) answers with passages of a corpus
    (2) the model plays it by the travel agent's protocol: at most 60 searches and 32K tokens
    (3) exact match (EM): after case, punctuation, articles and blanks are removed, the answer
        equals a gold answer [2]. Also sub-EM (the answer contains a gold answer) and F1 (of shared
        words). An episode without an answer, or cut off by a limit on tokens or replies, is wrong;
        the table counts these cases
    (4) the tax table compares checkpoints per data set and by the unweighted mean of the sets, with
        bootstrap intervals over the questions, and subtracts the first checkpoint from the others

The published rows of [1] are not comparable with each other: those of Search-R1 were made with 3
passages and 4 replies, those of STAR with 5 passages and 60 calls.
[1] STAR, arXiv:2603.21972   [2] Search-R1, arXiv:2503.09516

Reads   HF folders or an API; FlashRAG's DATA/<set>/<split>.jsonl or a DATA/questions.jsonl
Writes  OUT/<model>/episodes.jsonl, OUT/tax.md, OUT/tax.json; plays only the episodes that OUT lacks

laptop  python qa_eval.py --model base=out/tiny/init sft=out/tiny/sft
API     python qa_eval.py --model gpt-x --url http://localhost:9000/v1
full    python qa_eval.py --model base=A sft=B rl=C --data flashrag --retriever http://host:8000
"""
import json
import random
import sys
from collections import Counter, namedtuple
from functools import partial
from itertools import repeat
from pathlib import Path

import runtime  # first: if numpy is missing, it says in one line how to activate .venv

# isort: split
import numpy as np

import evaluate
from runtime import AMOUNT, COUNT, NATURAL, PART, Mistake, Parser, web_address
from sandbox import Episode, parse
from toolstar.retriever import HTTP, QueryError, find_retriever, open_retriever
from toolstar.text import golds_of, normalize, token_f1  # in the order of Search-R1 [2]

# Shapes: n questions, M models, R bootstrap rounds.
SETS = {  # FlashRAG's folder: (split, questions); the test split if there is one, else dev [2]
    "nq": ("test", 3610), "triviaqa": ("test", 11313), "popqa": ("test", 14267),
    "hotpotqa": ("dev", 7405), "2wikimultihopqa": ("dev", 12576), "musique": ("dev", 2417),
    "bamboogle": ("test", 125)}
LOWER_ROWS = (  # of the table: (key in tax.json, label, form)
    ("sub_em", "sub-EM", "{:.1%}"),
    ("f1", "F1", "{:.1%}"),
    ("context", "wrong: out of tokens", "{:,}"),
    ("turns", "wrong: out of replies", "{:,}"),
    ("missing", "wrong: no answer", "{:,}"),
    ("calls", "searches per question", "{:.1f}"))
Verdict = namedtuple("Verdict", "em sub_em f1 stop calls task")  # of an episode
HERE = Path(__file__).parent / "database"
# all episodes of a folder have the same values of these flags, the same model and retriever
SETTINGS = ("corpus", "encoder", "topk", "max_turns", "max_context", "max_tokens", "lenient",
            "temperature", "top_p", "system_prompt", "seed")
QA_PROMPT = (HERE / "prompts" / "search.txt").read_text(encoding="utf-8").strip()
QA_PROMPTS = {"full": QA_PROMPT, "short": (
    'You answer questions with the tool Search(query). Reply <think>...</think><tool_call>{"name": '
    '..., "arguments": ...}</tool_call> or <think>...</think><answer>...</answer>.')}


def qa_prompt(name):
    """The text of --system-prompt: full, short, or a file."""
    return QA_PROMPTS.get(name) or Path(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------- data

def load_questions(args):
    """Tasks {id, set, query, golden_answers} of the chosen sets, in the order of the files.
    A Mistake if there is none, or if an id occurs twice."""
    tasks = []
    for name, path in find_sets(args).items():
        rows = [load_question(row, name, f"{path}, record {i}")
                for i, row in enumerate(runtime.read_jsonl(path), 1)]
        if name in SETS and (path.stem, len(rows)) != SETS[name]:
            print(f"warning: {path} has {len(rows)} questions, not {SETS[name]}", file=sys.stderr)
        if args.sample and args.sample < len(rows):
            draw = random.Random(f"{args.seed}/{name}")
            rows = [rows[i] for i in sorted(draw.sample(range(len(rows)), args.sample))]
        tasks += rows
    if not tasks:
        raise Mistake(f"{args.data} holds no question, of its own or of FlashRAG: see --data")
    name, count = Counter(task["id"] for task in tasks).most_common(1)[0]
    if count > 1:
        raise Mistake(f"{args.data}: the id {name} occurs twice: make ids unique within a set")
    return tasks


def find_sets(args):
    """{set: file}: the folder's own questions.jsonl, or one split of each FlashRAG set."""
    folder, found = Path(args.data), {}
    if (folder / "questions.jsonl").exists():
        return {folder.resolve().name: folder / "questions.jsonl"}
    for name in args.sets:
        for split in ("train", "dev", "test"):  # test if there is one, else dev, else train
            if (folder / name / f"{split}.jsonl").exists():
                found[name] = folder / name / f"{split}.jsonl"
    for name in args.sets if found else ():
        if name not in found:
            print(f"warning: {folder / name} has no test, dev or train.jsonl", file=sys.stderr)
    return found


def load_question(row, name, where):
    """A record of FlashRAG -> task. Sets share ids, so the task's id begins with the set."""
    golds = golds_of(row.get("golden_answers")) if isinstance(row, dict) else []
    if not golds or "id" not in row or not isinstance(row.get("question"), str):
        raise Mistake(f"{where}: id, question and golden_answers are needed, found "
                      f"{str(row)[:100]}")
    return {"id": f"{name}/{row['id']}", "set": name, "query": row["question"],
            "golden_answers": golds}


# ---------------------------------------------------------------- score

def qa_score(episode):
    """{"em", "sub_em", "f1"}: the best over the gold answers; 0 if the episode has no answer."""
    if episode.stop != "answer" or not (episode.answer or "").strip():
        return {"em": 0.0, "sub_em": 0.0, "f1": 0.0}
    answer, golds = normalize(episode.answer), episode.task["golden_answers"]
    em = float(any(answer == normalize(gold) for gold in golds))
    # a gold that normalizes to nothing, such as the choice A, is part of every text
    inside = any(normalize(gold) and normalize(gold) in answer for gold in golds)
    return {"em": em, "sub_em": max(em, float(inside)),
            "f1": token_f1(episode.answer, golds)}


# ---------------------------------------------------------------- play

class SearchSandbox:
    """The world of a question: one tool, no database."""
    tools = ("Search",)

    def __init__(self, retriever, topk=5):
        self.retriever, self.topk, self.failures = retriever, topk, 0

    def call(self, name, arguments):
        """The passages as text, or an error the agent can read."""
        if name != "Search":
            return (f"Error: there is no tool {name}. "
                    "The only tool is Search with one argument, query.")
        query = arguments.get("query") if isinstance(arguments, dict) else None
        if not isinstance(query, str) or not query.strip() or set(arguments) != {"query"}:
            return 'Error: Search takes one argument, {"query": "a few words"}.'
        hits = self.retriever.search([query.strip()], self.topk)[0]
        if isinstance(hits, QueryError):
            return f"Error: the search engine does not answer this query ({hits}). Try other words."
        if isinstance(hits, ConnectionError):
            raise hits
        passages = "\n".join(passage(i, hit["document"]) for i, hit in enumerate(hits, 1))
        return passages or "No passage found. Try other words."


def passage(i, document):
    """One line as Search-R1 shows it: Doc 1(Title: ...) text"""
    title, _, text = document["contents"].partition("\n")
    title = title.strip().strip('"')
    return f"Doc {i}(Title: {title}) {text.strip()}"


def parse_qa(reply):
    """sandbox.parse, except that the last answer counts if a reply has several [2]."""
    thought, end, rest = reply.rpartition("</think>")
    last = rest.rfind("<answer>")
    several = -1 < rest.find("<answer>") < last and "<tool_call>" not in rest
    return parse(thought + end + rest[last:] if several else reply)


def read_verdicts(path):
    """{id: Verdict} of the episodes in a file, read line by line because 50K of them are gigabytes.

    An unfinished last line of a killed run is cut off, so that its question is played again.
    """
    found, end = {}, 0
    if not path.exists():
        return found
    with open(path, "rb+") as file:
        for i, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(line)
            try:
                row = json.loads(line)
                empty = row["stop"] == "answer" and not row["answer"].strip()
                scores = [row["score"][key] for key in ("em", "sub_em", "f1")]
                stop = "empty" if empty else row["stop"]
                verdict = Verdict(*scores, stop, row["calls"], row["task"])
                found.setdefault(row["task"]["id"], verdict)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Mistake(f"{path}, line {i}: not an episode ({error!r:.100}); delete the "
                              "line, and its question is played again") from None
    return found


def play_model(args, folder, settings, tasks):
    """Play the questions that OUT lacks, and append each episode as it ends."""
    done = read_verdicts(folder / "episodes.jsonl")
    if any(task["id"] in done and done[task["id"]].task != task for task in tasks):
        raise Mistake(f"{folder}: other questions had these ids; choose another --out")
    left = [task for task in tasks if task["id"] not in done]
    begun = len(tasks) - len(left)
    print(f"{folder.name}: {begun} of {len(tasks)} questions played", file=sys.stderr)
    played = partial(play_questions, args, folder.name, settings["model"])
    rows = evaluate.in_processes(played, left, args)
    right = 0.0
    bar = runtime.progress(rows if left else (), folder.name, len(tasks), begun)
    for i, row in enumerate(bar, 1):
        evaluate.keep_play(folder, settings, row)
        right += row["score"]["em"]
        bar.set_postfix_str(f"EM since this start {100 * right / i:.1f}", refresh=False)


def play_questions(args, name, path, tasks):
    """Yield the judged record of each question's episode as it ends."""
    prompt = qa_prompt(args.system_prompt)
    play_here = choose_player(args, path)
    # after the engine: vLLM 0.32.0 does not start once numba is imported, and bm25s imports it
    retriever = open_retriever(args.retriever, args.corpus, args.devices, args.encoder,
                               tries=args.tries)
    episodes = (Episode(task, SearchSandbox(retriever, args.topk), args.max_turns, prompt,
                        strict=not args.lenient, parse=parse_qa) for task in tasks)
    for episode in play_here(episodes):
        yield episode.record(name) | {"score": qa_score(episode)}


def choose_player(args, path):
    """Return a function that plays episodes, by an API or by a vLLM engine in this process, and
    yields each as it ends."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    if args.url:
        generate = partial(runtime.chat, args.url, path, **sampling,
                           api_key=runtime.read_key(args.key))
        return partial(evaluate.play, generate, concurrency=args.concurrency,
                       max_context=args.max_context)
    llm, template = evaluate.open_engine(path, args.max_context, args.concurrency, args.tp,
                                         args.gpu_memory)
    return partial(evaluate.play_vllm, llm, template, max_context=args.max_context,
                   seed=args.seed, concurrency=args.concurrency, **sampling)


def play_all(args):
    """Play every checkpoint, then print the table."""
    tasks = load_questions(args)
    find_retriever(args.retriever, args.corpus)
    models = evaluate.named_paths(args.model)
    qa_prompt(args.system_prompt)  # an unreadable file is reported now
    runtime.lock_folder(args.out)
    # a server may come back at another address
    retriever = "a server" if args.retriever.startswith(HTTP) else args.retriever
    common = {key: getattr(args, key) for key in SETTINGS} | {"retriever": retriever}
    settings = [evaluate.model_settings(path, args.url) | common for path in models.values()]
    folders = list(map(evaluate.open_folder, repeat(args.out), models, settings))
    for folder, chosen in zip(folders, settings, strict=True):
        play_model(args, folder, chosen, tasks)
    print(tax_table(args, folders, tasks))


# ---------------------------------------------------------------- table

def bootstrap(scores, rounds, rng):
    """Means of n questions drawn with replacement, equally for all models. (M, n) -> (R, M)"""
    n = scores.shape[1]
    return np.stack([scores[:, rng.integers(n, size=n)].mean(1) for _ in range(rounds)])


def cell(mean, draws, n, sign=""):
    """Percent with its 95% interval, over n questions: 41.2 (39.6 to 42.8)"""
    least = -1.0 if sign else 0.0
    interval = evaluate.widened(*np.percentile(draws, [2.5, 97.5]), n, least)
    return f"{100 * mean:{sign}.1f} ({evaluate.span(*interval, sign)})"


def summarise(found, sets):
    """One model's {id: Verdict} and {set: ids} -> {key: number}: scores are unweighted means over
    the sets."""
    rows = [found[i] for ids in sets.values() for i in ids]
    stops = Counter(row.stop for row in rows)
    means = [np.mean([found[i][:3] for i in ids], axis=0) for ids in sets.values()]
    return dict(zip(("em", "sub_em", "f1"), np.mean(means, axis=0), strict=True)) | {
        "context": stops["context"], "turns": stops["turns"],
        "missing": len(rows) - stops["answer"] - stops["context"] - stops["turns"],
        "calls": sum(row.calls for row in rows) / len(rows),
        "sets": {name: float(np.mean([found[i].em for i in ids])) for name, ids in sets.items()}}


def tax_table(args, folders, tasks):
    """The tax table as markdown; also in OUT/tax.md, and as numbers in OUT/tax.json."""
    names, sets, draws = [folder.name for folder in folders], {}, {}
    for task in tasks:
        sets.setdefault(task["set"], []).append(task["id"])
    found = [read_verdicts(folder / "episodes.jsonl") for folder in folders]
    report = [summarise(verdicts, sets) for verdicts in found]  # a list over models, as those below
    rng = np.random.default_rng(args.seed)
    for name, ids in sets.items():
        scores = np.array([[verdicts[i].em for i in ids] for verdicts in found])  # (M, n)
        draws[name] = bootstrap(scores, args.rounds, rng).T  # (M, R)
    average = np.mean(list(draws.values()), axis=0)  # (M, R)
    means = [numbers["em"] for numbers in report]
    rows = [["EM, %", "questions", *names], ["---"] * (len(names) + 2)]
    for name, ids in sets.items():
        shares = [numbers["sets"][name] for numbers in report]
        cells = map(cell, shares, draws[name], repeat(len(ids)))
        rows.append([name, f"{len(ids):,}", *cells])
    rows.append(["**average**", f"{len(tasks):,}", *map(cell, means, average, repeat(len(tasks)))])
    if len(names) > 1:
        taxes = [cell(mean - means[0], draw - average[0], len(tasks), "+")
                 for mean, draw in zip(means, average, strict=True)]
        rows.append([f"minus {names[0]}", "", "", *taxes[1:]])
    for key, label, form in LOWER_ROWS:
        rows.append([label, "", *(form.format(numbers[key]) for numbers in report)])
    text = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    text += (f"\n{args.topk} passages a search and {args.max_turns} searches at most; "
             "Search-R1's published rows had 3 passages and 4 replies.\n")
    numbers = json.dumps(dict(zip(names, report, strict=True)), indent=1)
    runtime.write_text(folders[0].parent / "tax.json", numbers)
    runtime.write_text(folders[0].parent / "tax.md", text)
    return text


# ---------------------------------------------------------------- main

def flags(argv=None):
    p = Parser(description=__doc__, formatter_class=runtime.Help)
    add = p.add_argument_group("agents and questions").add_argument
    add("--model", nargs="+", default=[], metavar="[NAME=]PATH",
        help="HF folders, hub names, or models of --url; the table compares all with the first")
    add("--url", type=web_address, metavar="URL",
        help="an OpenAI-compatible API, http://host:port/v1; without it vLLM plays here")
    add("--key", metavar="FILE", help="file with the API's key")
    add("--data", default="default", help="folder of FlashRAG, or of a questions.jsonl and "
        "a corpus.jsonl; default means the 64 questions in database/qa")
    add("--sets", nargs="+", default=[*SETS], help="FlashRAG's sets to play")
    add("--sample", type=COUNT, metavar="N", help="play N questions of each set, drawn by --seed; "
        "unset: all")
    add = p.add_argument_group("play").add_argument
    add("--topk", type=COUNT, default=5, help="passages per search [1]")
    add("--max-turns", type=COUNT, default=60, help="most searches, then an answer [1]")
    add("--max-context", type=COUNT, default=32768, help="most tokens of an episode [1]")
    add("--max-tokens", type=NATURAL, default=2048, help="most tokens of a reply; 0: no limit "
        "other than the context; a --url is then sent no limit")
    add("--lenient", action="store_true", help="tell the agent about a reply that breaks the "
        "format, and continue; otherwise such a reply ends the episode, which is then wrong")
    add("--temperature", type=AMOUNT, default=0.6, help="sampling temperature [1]")
    add("--top-p", type=PART, default=0.95, help="nucleus sampling [1]")
    add("--system-prompt", default="full", help="full, short (for tiny models) or a file's name")
    add("--concurrency", type=COUNT, default=64, help="most questions that play at a time")
    add("--tp", type=COUNT, default=1, help="GPUs per engine (tensor parallel)")
    add("--processes", type=NATURAL, default=0, help="number of engines that share the questions; "
        "0: one per --tp GPUs, or one on a CPU")
    add("--gpu-memory", type=PART, default=0.9, help="share of a GPU's memory that vLLM may fill")
    add("--seed", type=NATURAL, default=0, help="seed of sampling, --sample and bootstrap")
    add = p.add_argument_group("retrieval").add_argument
    add("--retriever", default="bm25", help="bm25, an index folder, or a server's address")
    add("--corpus", help="jsonl that bm25 searches; unset: corpus.jsonl in DATA")
    add("--encoder", help="E5-style HF folder or hub name; unset: the encoder of the index")
    add("--devices", nargs="+", default=["cpu"],
        help="torch devices that share an index's vectors")
    add("--tries", type=COUNT, default=4, help="tries per query of a server, after pauses of 1, 2, "
        "4 ... s")
    add = p.add_argument_group("output").add_argument
    add("--out", default="out/qa", help="folder of the table and the episodes; a rerun plays only "
        "the episodes that it lacks")
    add("--rounds", type=COUNT, default=1000, help="R, bootstrap rounds for the 95%% intervals")
    args = p.parse_args(argv)
    args.data = str(HERE / "qa") if args.data == "default" else args.data
    if args.retriever == "bm25":
        args.corpus = args.corpus or str(Path(args.data) / "corpus.jsonl")
    return args


def main(argv=None):
    runtime.run("qa_eval.py", play_all, flags(argv))


if __name__ == "__main__":
    main()
