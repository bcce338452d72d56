"""
Question answering with a search tool that no stage trained on: what did learning to plan cost?

    (1) a question is an episode with one tool: Search(query) answers with passages of a corpus
    (2) the model plays it by the travel agent's protocol: at most 60 searches and 32K tokens
    (3) exact match (EM): after case, punctuation, articles and blanks are removed, the answer
        equals a gold answer [2]. Also sub-EM (the answer contains a gold answer) and F1 (of shared
        words). An episode without an answer, or cut off by a limit on tokens or replies, is wrong;
        the table counts these cases
    (4) the tax table is evaluate.py's, with a line for each set; success is the exact match of all
        questions. Below it: the unweighted mean of the sets, as in [2], and its difference from
        the first checkpoint, with bootstrap intervals over the questions

(1) to (3) are a world, which evaluate.py plays.
The published rows of [1] are not comparable with each other: those of Search-R1 are taken from Ji
et al. [3], with the limits of Search-R1's protocol, 3 passages and 4 replies; those of STAR were
made with 5 passages and 60 calls. [1] does not name its metric: docs/paper.md.
[1] STAR, arXiv:2603.21972   [2] Search-R1, arXiv:2503.09516   [3] Tree-GRPO, arXiv:2509.21240

Reads   HF folders or an API; FlashRAG's DATA/<set>/<split>.jsonl or a DATA/questions.jsonl
Writes  OUT/<model>/episodes.jsonl, OUT/tax.md, OUT/tax.json; plays only the episodes that OUT lacks

laptop  python qa_eval.py --model base=out/tiny/init sft=out/tiny/sft
API     python qa_eval.py --model gpt-x --url http://localhost:9000/v1
full    python qa_eval.py --model base=A sft=B rl=C --data flashrag --retriever http://host:8000
"""
import json
import random
import sys
from collections import Counter
from pathlib import Path
from threading import Lock

import evaluate
import runtime
from runtime import COUNT, Mistake, Parser
from sandbox import Episode, parse
from toolstar.retriever import HTTP, QueryError, find_retriever, open_retriever
from toolstar.text import golds_of, normalize, token_f1  # in the order of Search-R1 [2]

SETS = {  # FlashRAG's folder: (split, questions); the test split if there is one, else dev [2]
    "nq": ("test", 3610), "triviaqa": ("test", 11313), "popqa": ("test", 14267),
    "hotpotqa": ("dev", 7405), "2wikimultihopqa": ("dev", 12576), "musique": ("dev", 2417),
    "bamboogle": ("test", 125)}
ROUNDS = 1000  # of the bootstrap
HERE = Path(__file__).parent / "database"
QA_PROMPT = (HERE / "prompts" / "search.txt").read_text(encoding="utf-8").strip()
QA_PROMPTS = {"full": QA_PROMPT, "short": (
    'You answer questions with the tool Search(query). Reply <think>...</think><tool_call>{"name": '
    '..., "arguments": ...}</tool_call> or <think>...</think><answer>...</answer>.')}


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


# ---------------------------------------------------------------- world

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
            raise Mistake(hits)  # the server is down
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


class Questions:
    """The world of questions (docs/environment.md)."""

    rewards, logged, stops, slow = ("em",), ("success", "em", "sub_em", "f1"), (), True

    def __init__(self, args):
        prompt = Path(args.system_prompt)
        if args.system_prompt not in QA_PROMPTS and not prompt.is_file():
            raise Mistake(f"--system-prompt {prompt} is neither full nor short nor a file")
        self.prompt = QA_PROMPTS.get(args.system_prompt) or prompt.read_text(encoding="utf-8")
        self.args, self.lock, self.retriever = args, Lock(), None
        find_retriever(args.retriever, args.corpus)

    def episode(self, task, seed, args):
        return Episode(task, SearchSandbox(self, args.topk), args.max_turns, self.prompt,
                       parse=parse_qa)

    def search(self, queries, k):
        """The retriever's passages. It is opened by the first search: bm25s imports numba, after
        which vLLM 0.32.0 does not start."""
        with self.lock:
            self.retriever = self.retriever or open_retriever(
                self.args.retriever, self.args.corpus, self.args.devices)
        return self.retriever.search(queries, k)

    def verdict(self, episode):
        score = qa_score(episode)
        return episode.answer, score | {"success": score["em"]}, score["em"]

    def reward(self, score, name):
        return score[name]

    def close(self):
        """The retriever ends with the process."""


def flags(parser):
    """The flags of the world that decide a play."""
    add = parser.add_argument
    add("--topk", type=COUNT, default=5, help="passages per search [1]")
    add("--corpus", help="jsonl that bm25 searches; unset: corpus.jsonl in DATA")
    add("--system-prompt", default="full", help="full, short (for tiny models) or a file's name")


def open_world(args):
    """The world of questions; the flags are those of qa_eval.py."""
    return Questions(args)


# ---------------------------------------------------------------- table

def set_lines(row):
    """The line that this world adds to evaluate.py's table: the exact match of the row's set."""
    return {f"EM, {row['task']['set']}": row["score"]["em"]}


def over_sets(sets, least=0.0):
    """"41.2 (39.6 to 42.8)": the unweighted mean of the sets in percent, with its 95% bootstrap
    interval over the questions. sets: {set: (n,) numbers}; least: as in evaluate.interval"""
    import numpy as np

    rng = np.random.default_rng(0)
    draws = np.mean([[rng.choice(scores, len(scores)).mean() for _ in range(ROUNDS)]
                     for scores in sets.values()], axis=0)
    average, n = np.mean([scores.mean() for scores in sets.values()]), sum(map(len, sets.values()))
    found = evaluate.widened(*np.percentile(draws, [2.5, 97.5]), n, least)
    return f"{100 * average:.1f} ({evaluate.span(*found)})"


def tax_table(args, played):
    """The tax table as markdown; also in OUT/tax.md, and as numbers in OUT/tax.json. played:
    {model: its records, in the order of the questions}."""
    import numpy as np

    text, report = evaluate.table(played, set_lines)
    first, *_ = played
    for name, rows in played.items():
        sets, taxes = {}, {}
        for row, other in zip(rows, played[first], strict=True):
            key, em = row["task"]["set"], row["score"]["em"]
            sets.setdefault(key, []).append(em)
            taxes.setdefault(key, []).append(em - other["score"]["em"])
        sets, taxes = ({key: np.array(values) for key, values in each.items()}
                       for each in (sets, taxes))
        text += f"\n{name}: {over_sets(sets)} in the mean of the sets"
        text += f", minus {first}: {over_sets(taxes, -1)}" * (name != first)
        means = {key: float(scores.mean()) for key, scores in sets.items()}
        report[name] |= {"em": evaluate.mean(means.values()), "sets": means}
    text += (f"\n\n{args.topk} passages a search and {args.max_turns} searches at most; "
             "the rows of Search-R1 that STAR's paper prints had 3 passages and 4 replies.\n")
    runtime.write_text(f"{args.out}/tax.json", json.dumps(report, indent=1))
    runtime.write_text(f"{args.out}/tax.md", text)
    return text


# ---------------------------------------------------------------- main

def command_flags(argv=None):
    """The flags of the command: the questions, and evaluate.py's of playing."""
    p = Parser(description=__doc__, formatter_class=runtime.Help)
    add = p.add_argument_group("questions").add_argument
    add("--data", default=str(HERE / "qa"), help="folder of FlashRAG, or of a questions.jsonl and "
        "a corpus.jsonl; the default has 64 questions")
    add("--sets", nargs="+", default=[*SETS], help="FlashRAG's sets to play")
    add("--sample", type=COUNT, metavar="N", help="play N questions of each set, drawn by --seed; "
        "unset: all")
    add("--retriever", default="bm25", help="bm25, an index folder, or a server's address")
    add("--devices", nargs="+", default=["cpu"],
        help="torch devices that share an index's vectors")
    evaluate.play_flags(p, "out/qa", 2048)
    p.set_defaults(env="qa_eval", agent=["model"])
    args = runtime.parse_args(p, argv)
    if args.retriever.startswith(HTTP):
        args.corpus = "a server"  # it may come back at another address
    elif args.retriever == "bm25":
        args.corpus = args.corpus or f"{args.data}/corpus.jsonl"
    else:
        args.corpus = args.retriever
    return args


def answer_all(args):
    """Play every checkpoint, then print the table."""
    tasks = load_questions(args)
    runtime.open_world(args)  # a missing file is reported now
    print(tax_table(args, evaluate.play_agents(args, tasks)))


def main(argv=None):
    runtime.run("qa_eval.py", answer_all, command_flags(argv))


if __name__ == "__main__":
    main()
