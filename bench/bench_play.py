r"""
Simulate the seconds of play per update on a cluster, to choose --stretch and --tp.

    barrier  all plays of an update end in it (--stretch 0)
    stretch  a play waits once it has sampled K tokens in an update (--stretch K)
    clock    1.5 times --prompts groups are in flight, and the update ends when --prompts groups are
             complete. Asynchronous systems work like this; grpo.py does not, because which groups
             are learnt would depend on the speed of the replies

Lengths are log-normal with the log-deviations --sigma. An engine's step takes --step-ms, plus
--token-ns for each token of context in flight; reading a token takes 1 / --prefill seconds. The
defaults are estimates for a 7B model on 16 A100 with one engine each. For --tp 4 set --engines 4
and the speeds that bench/gpu.py measures. Seconds are per --prompts learnt groups, after a warm-up;
ages are those of the learnt tokens, in updates.

With --model a real engine plays such lengths in a world that cuts its replies, and its steps are
printed beside the simulation's. --hours prints the table of docs/gpus.md, which states its
assumptions.

    python bench/bench_play.py --hours
    python bench/bench_play.py --stretch 2500 3500
    python bench/bench_play.py --engines 4 --step-ms 5 --token-ns 12 --prefill 40000
    python bench/bench_play.py --model out/tiny/sft --prompts 8 --group 4 --tokens 96 --most 400 \
        --reply 16 --updates 8 --stretch 48 96
"""
import argparse
import math
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runtime import AMOUNT, COUNT, POSITIVE, Parser, bounded, run  # noqa: E402


def flags():
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--prompts", type=COUNT, default=32, help="P, queries that start per update")
    add("--group", type=COUNT, default=8, help="G, plays per query")
    add("--tokens", type=COUNT, default=2500, help="mean number of sampled tokens per play")
    add("--most", type=COUNT, default=7500, help="maximum number of them, which --context implies")
    add("--reply", type=COUNT, default=180, help="tokens per reply")
    add("--read", type=AMOUNT, default=3.1, help="tokens of observations per token of a reply")
    add("--sigma", type=AMOUNT, nargs="+", default=[0.3, 0.5, 0.8], help="log-deviations of "
        "lengths")
    add("--stretch", type=COUNT, nargs="+", help="values of K; default: 1 and 1.4 times --tokens")
    add("--engines", type=COUNT, default=16, help="number of engines: ranks divided by --tp")
    add("--step-ms", type=AMOUNT, default=11, help="milliseconds of a step with an empty context")
    add("--token-ns", type=AMOUNT, default=36, help="nanoseconds per step for each token in flight")
    add("--prefill", type=POSITIVE, default=11_000, help="tokens per second that an engine reads")
    add("--updates", type=bounded(int, 2), default=24, help="simulated updates; the first quarter "
        "is warm-up")
    add("--flight", type=COUNT, default=10**9, help="most plays that fit an engine's cache")
    add("--model", help="tiny model whose real engine plays such lengths")
    add("--hours", action="store_true", help="print the estimated disk and hours of run.sh's sizes")
    args = p.parse_args()
    args.stretch = args.stretch or [args.tokens, round(1.4 * args.tokens)]
    return args


def replies_of(name, sigma, args):
    """The number of replies of a play. It depends only on the name, so that all rules and the real
    engine play the same lengths."""
    draw = random.Random(f"{sigma}/{name}").gauss(-sigma * sigma / 2, sigma)
    return max(1, round(min(args.most, args.tokens * math.exp(draw)) / args.reply))


# ------------------------------------------------------------------------------------- simulation


@dataclass
class Play:
    query: str
    replies: int  # that are left
    context: float = 0.0  # tokens
    left: int = 0  # tokens of this reply
    fresh: int = 0  # tokens sampled in this update
    sampled: Counter = field(default_factory=Counter)  # {update: tokens}


class Engine:
    """A simulated engine: its clock, the plays in flight and the waiting ones."""

    def __init__(self, args):
        self.args, self.clock, self.busy = args, 0.0, 0.0
        self.live, self.waiting = [], []

    def spend(self, seconds):
        self.clock += seconds
        self.busy += seconds

    def ask(self, play, reading):
        play.left = self.args.reply
        self.spend(reading / self.args.prefill)
        self.live.append(play)

    def advance(self, update):
        """Advance to the end of the next reply; return the plays whose replies have ended."""
        steps, n = min(play.left for play in self.live), len(self.live)
        context = steps * sum(play.context for play in self.live) + n * steps * (steps - 1) / 2
        self.spend(steps * self.args.step_ms / 1e3 + context * self.args.token_ns / 1e9)
        for play in self.live:
            play.left -= steps
            play.context += steps
            play.fresh += steps
            play.sampled[update] += steps
        ended = [play for play in self.live if not play.left]
        self.live = [play for play in self.live if play.left]
        return ended


def start(engine, queries, plays, update, sigma, args):
    """Start the plays of the next query, if there is one and the engine has room."""
    share = -(-args.prompts // args.engines) * args.group
    room = max(args.group, min(args.flight, share + len(plays)))  # as runtime.open_calls has it
    while queries and len(engine.live) + args.group <= room:
        query = queries.pop(0)
        for g in range(args.group):
            engine.ask(Play(query, replies_of(f"{query}/{g}", sigma, args)), 0)


def play_update(engines, queries, update, over, stretch, clock, sigma, args):
    """Run until all engines are idle; return the queries whose plays have all ended."""
    whole, carried = [], {id(engine): engine.waiting for engine in engines}
    for engine in engines:
        engine.waiting = []
        for play in carried[id(engine)]:
            engine.ask(play, play.context)  # its KV cache was computed by older weights
        start(engine, queries, carried[id(engine)], update, sigma, args)
    while any(engine.live for engine in engines):
        engine = min((each for each in engines if each.live), key=lambda each: each.clock)
        for play in engine.advance(update):
            play.replies -= 1
            if not play.replies:
                over[play.query].append(play)
                whole += [play.query] * (len(over[play.query]) == args.group)
            elif stretch and play.fresh >= stretch or clock and len(whole) >= args.prompts:
                engine.waiting.append(play)
            else:
                play.context += args.read * args.reply
                engine.ask(play, args.read * args.reply)
        start(engine, queries, carried[id(engine)], update, sigma, args)
    return whole


def simulate(sigma, args, stretch=0, clock=False):
    """(seconds per --prompts groups, share of the time in which engines are busy, mean and highest
    age of tokens, fewest and most groups per update)."""
    engines, over = [Engine(args) for _ in range(args.engines)], {}
    seconds, groups, ages, busy, begun = [], [], Counter(), 0.0, 0
    for update in range(args.updates - 1):
        flying = sum(len(plays) < args.group for plays in over.values())
        new = round(1.5 * args.prompts) - flying if clock else args.prompts
        queries = [f"{begun + i}" for i in range(new)]
        begun += new
        over |= {query: [] for query in queries}
        for engine in engines:
            engine.clock = engine.busy = 0.0
            for play in engine.waiting:
                play.fresh = 0
        whole, round_ = [], 1
        while round_ == 1 or stretch and not whole:
            whole += play_update(engines, queries, update, over, round_ * stretch, clock, sigma,
                                 args)
            round_ += 1
        if update >= args.updates // 4:
            seconds.append(max(engine.clock for engine in engines))
            busy += sum(engine.busy for engine in engines) / args.engines
            groups.append(len(whole))
            for play in (play for query in whole for play in over[query]):
                for then, tokens in play.sampled.items():
                    ages[update - then] += tokens
    age = sum(age * tokens for age, tokens in ages.items()) / ages.total()
    return (sum(seconds) * args.prompts / sum(groups), busy / sum(seconds), age, max(ages),
            min(groups), max(groups))


def print_table(args):
    rules = {"barrier": {}} | {f"stretch {k}": {"stretch": k} for k in args.stretch}
    print(f"{'':14}{'sigma':>6}{'seconds':>9}{'busy':>6}{'age mean, max':>15}{'groups':>9}")
    for name, rule in (rules | {"clock": {"clock": True}}).items():
        for sigma in args.sigma:
            spent, busy, age, oldest, least, most = simulate(sigma, args, **rule)
            print(f"{name:14}{sigma:6}{spent:9.1f}{busy:6.2f}{age:9.2f}, {oldest:4}"
                  f"{f'{least}-{most}':>9}", flush=True)


# ------------------------------------------------------------------------------------------ hours

CARDS = {"RTX 4090": (22, 1.0, 165), "A100-80G": (79, 2.0, 312)}  # GiB, TB/s, TFLOP/s in bf16
ROWS = (("0.5b", 1, "RTX 4090"), ("0.5b", 1, "A100-80G"), ("1.5b", 1, "A100-80G"),
        ("1.5b", 8, "A100-80G"), ("3b", 1, "A100-80G"), ("3b", 8, "A100-80G"),
        ("7b", 8, "A100-80G"), ("7b", 16, "A100-80G"))
PROMPT, MFU, UPDATES = 1200, 0.3, 5 * 1000 / 32  # tokens of a prompt, 5 epochs of 1,000 tasks
SFT = {"0.5b": 6, "1.5b": 6, "3b": 4, "7b": 4}  # epochs of 1,198 episodes


def print_hours(args):
    """Print disk and hours of run.sh's sizes, by the memory plan and this simulation."""
    from look import memory

    lines = [line.split() for line in (ROOT / "recipes/cards.txt").read_text().splitlines()
             if line[0] != "#"]
    print("| size | GPUs | disk, GB | SFT, h | play, s | learn, s | RL, h |\n" + "| --- " * 7 + "|")
    for size, gpus, card in ROWS:
        gib, bandwidth, flops = CARDS[card]
        config = memory.qwen(size)
        n = memory.count(config)
        *_, context, tp, share = next(
            line[:7] for line in lines if line[0] == size and int(line[1]) <= gpus
            and int(line[2]) <= gib and line[3] == "0" and gpus % int(line[5]) == 0)
        plan = memory.Plan(config, n, memory.flags(
            f"grpo --gpus {gpus} --gpu-gib {gib} --context {context} --tp {tp} "
            f"--gpu-memory {share}".split()))
        length = PROMPT + args.tokens * (1 + args.read)  # tokens of a whole play
        args.engines = gpus // int(tp)
        args.flight = max(args.group, int(plan.contexts * int(context) / (length / 2)))
        args.step_ms = max(5, 2 * n / int(tp) / (0.7 * bandwidth * 1e9))
        kv = 4 * config.num_hidden_layers * memory.kv_width(config) / int(tp)
        args.token_ns, args.prefill = kv / (0.8 * bandwidth * 1e3), 0.5e12 * flops / (2 * n)
        play = simulate(0.5, args)[0]
        # forward pass, recomputation, and twice as much backward; half of the attention is masked
        work = 8 * n + 8 * config.num_hidden_layers * config.hidden_size * length
        speed = MFU * flops * 1e12 * gpus / work  # tokens/s
        learn = args.prompts * args.group * length / speed
        print(f"| {size} | {gpus} x {card} | {90 * n / 1e9:.0f} "
              f"| {SFT[size] * 1198 * 10300 / speed / 3600:.1f} | {play:.0f} | {learn:.0f} "
              f"| {UPDATES * (play + learn) / 3600:.0f} |")


# ------------------------------------------------------------------------------------- real engine


class Paced:
    """vLLM's engine with a given number of tokens per reply; it counts its steps."""

    def __init__(self, engine, reply):
        self.engine, self.reply, self.steps = engine, reply, 0

    def add_request(self, name, prompt, params):
        params.ignore_eos, params.max_tokens, params.min_tokens = True, self.reply, self.reply
        params.stop_token_ids, params.stop = [], []
        self.engine.add_request(name, prompt, params)

    def step(self):
        self.steps += 1
        outputs = self.engine.step()
        for output in outputs:
            output.outputs[0].stop_reason = "paced"  # so that the reply counts as closed
        return outputs


def make_world(sigma, args):
    """A world in which each play has as many replies as the simulated play of its name."""
    from runtime import CheckedWorld
    from sandbox import Action, Episode

    class Play(Episode):
        def begin(self, reply):
            last = self.turns + 1 == self.replies
            self.parse = lambda _: Action("answer" if last else "call", "Wait", text=".")
            return super().begin(reply)

    class Wait:
        def call(self, name, arguments):
            return "."

    class World:
        kinds, parts, stops, slow = ("success",), ("success",), (), False

        def episode(self, task, seed, flags):
            episode = Play(task, Wait(), 10**6, "Go on.")
            update, query, place = seed.removeprefix("failures/play/").split("/")
            number = int(update) % args.updates * args.prompts + int(query)
            episode.replies = replies_of(f"{number}/{place}", sigma, args)
            return episode

        def verdict(self, episode):
            return episode.answer, {"success": 1.0}, 1.0

        def reward(self, score, kind):
            return 1.0

        def load_task(self, row):
            return row

        def close(self):
            """Nothing to close."""

    return CheckedWorld(World(), "bench_play")


def open_engine(args):
    """(flags, template, engine) of grpo.py, in this process."""
    import grpo
    import runtime
    from bench.bench_grpo import ALONE

    os.environ.update(ALONE)
    sys.argv = f"""grpo.py --model {args.model} --prompts {args.prompts} --group {args.group}
        --context 2048 --turn-tokens {args.reply} --concurrency 256 --system-prompt short""".split()
    own = grpo.flags()
    _, _, device = grpo.setup()
    template, llm = runtime.load_template(own.model), runtime.load_engine(own, device)
    llm.llm_engine = Paced(llm.llm_engine, args.reply)
    return own, template, llm


def check_real(args):
    """Print the steps per learnt token of a real engine and of the simulation."""
    from grpo import play_batch

    own, template, llm = open_engine(args)
    tasks = [{"id": f"{i}", "query": "Go on."} for i in range(args.prompts * args.updates)]
    args.engines, args.step_ms, args.token_ns, args.prefill = 1, 1e3, 0, math.inf
    begun, first = 0, args.updates // 4
    for sigma in args.sigma:
        world, barrier = make_world(sigma, args), None
        for own.stretch in (0, *args.stretch):
            waiting, steps, learnt = [], 0, []
            for update in range(args.updates - 1):
                before = llm.llm_engine.steps
                samples, _ = play_batch(llm, template, world, tasks, begun + update, 10**6,
                                        "success", waiting, own)
                if update >= first:
                    steps += llm.llm_engine.steps - before
                    learnt += [sum(s.mask) for s in samples]
            begun += args.updates  # the name of an update can be used only once
            update = steps * args.prompts * args.group / len(learnt)
            barrier = barrier or steps / sum(learnt)
            print(f"sigma {sigma}, --stretch {own.stretch}: {update:.1f} steps for --prompts groups"
                  f", {simulate(sigma, args, own.stretch)[0]:.1f} simulated; per token learnt "
                  f"{steps / sum(learnt) / barrier:.3f} of the barrier's", flush=True)


def main():
    args = flags()
    if args.hours:
        print_hours(args)
    elif args.model:
        check_real(args)
    else:
        print_table(args)


if __name__ == "__main__":
    run("bench_play.py", main)
