"""Records are complete, play does not block, the table is right, a killed run resumes."""
import io
import json
import os
import pty
import re
import select
import sys
import threading
from types import SimpleNamespace

import pytest
from conftest import ROOT, SEED, Letters, Scripted, completion, endpoint

import evaluate
import runtime
from evaluate import ChatError, play, table
from format_plan import itinerary
from runtime import Mistake, load_tasks, read_jsonl, write_jsonl
from sandbox import Episode, Sandbox, read_prompt
from travel.constraints import HARD, hard_counts
from travel.world import Travel, load_task

CALL = ('<think>.</think><tool_call>{"name": "SearchCity", "arguments": {"state": "x"}}'
        '</tool_call>')
ANSWER = "<think>.</think><answer>done</answer>"


# ------------------------------------------------------------------------------------------ files

@pytest.mark.parametrize("bad", ['{"a": ', "[" * 100_000, "\xff"])
def test_a_broken_line_is_named(tmp_path, bad):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n\n' + bad.encode("latin-1") + b"\n")
    with pytest.raises(Mistake, match="x.jsonl, line 3: not JSON"):
        read_jsonl(tmp_path / "x.jsonl")


@pytest.mark.parametrize("torn, kept", [
    ('{"id": 1}\n{"id": 2}\n{"id"', 2), ('{"id": 1}\n', 1), ('{"id": 1}\n{"id": 2}', 1),
    ('{"id', 0), (None, 0)])
def test_a_line_that_a_killed_run_did_not_finish_is_cut_off(tmp_path, torn, kept):
    if torn is not None:
        (tmp_path / "x.jsonl").write_text(torn)
    assert [row["id"] for row in runtime.recover_jsonl(tmp_path / "x.jsonl")] == [1, 2][:kept]
    assert torn is None or (tmp_path / "x.jsonl").read_text().count("\n") == kept


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    with pytest.raises(KeyError), runtime.replacing(file) as out:
        out.write("half")
        out.flush()
        raise KeyError
    assert file.read_text() == "old"
    with runtime.replacing(file) as out:
        out.write("new")
    assert file.read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["x"]


# ------------------------------------------------------------------------------------------ tasks

def test_a_published_task_becomes_ours(trip):
    """Of a row of the published csv, with literals as text and large reference information."""
    row = {"org": trip[0]["org"], "dest": trip[0]["dest"], "days": "3", "people_number": 2,
           "date": str(trip[0]["date"]), "constraint": "{'room rule': 'pets'}", "budget": 1700,
           "query": 'Trip "7",\nplease.', "level": "medium", "idx": 7,
           "reference_information": "x" * 200_000}
    task = load_task(row)
    assert (task["id"], task["days"], task["visiting_city_number"]) == ("7", 3, 1)
    assert task["date"] == trip[0]["date"] and "reference_information" not in task
    assert task["local_constraint"] == {
        "house rule": "pets", "cuisine": None, "room type": None, "transportation": None}
    assert load_task(task) == task, "what is ours already stays as it is"


NOTHING = dict.fromkeys(("house rule", "cuisine", "room type", "transportation"))
TWO = NOTHING | {"cuisine": ["Chinese", "Fast Food"]}


@pytest.mark.parametrize("asked, wishes", [
    ({"cuisine": "['Chinese', 'Fast Food']"}, TWO), ({"cuisine": "['Chinese' 'Fast Food']"}, TWO),
    ("{'cuisine': ['Chinese', 'Fast Food'], 'house rule': None}", TWO),
    ({"cuisine": "Chinese"}, NOTHING | {"cuisine": ["Chinese"]}),
    ({"cuisine": "None", "house rule": "None", "room type": "nan", "transportation": ""}, NOTHING),
    ({"cuisine": float("nan"), "house rule": float("nan")}, NOTHING), (float("nan"), NOTHING),
    ({"cuisine": "[]"}, NOTHING), ('{"house rule": null}', NOTHING), ("None", NOTHING),
    ({"room rule": "pets", "cuisine": []}, NOTHING | {"house rule": "pets"})])
def test_wishes_are_read_however_a_file_writes_them(trip, asked, wishes):
    row = trip[0] | {"local_constraint": asked}
    before, task = repr(row), load_task(row)
    assert task["local_constraint"] == wishes and load_task(task) == task
    assert repr(row) == before


@pytest.mark.parametrize("row, key", [
    ({"org": 5}, "'org'"), ({"date": "tomorrow"}, "'date'"), ({"days": None}, "'days'"),
    ({"local_constraint": "[]("}, "'local_constraint'"), ([], "[]")])
def test_a_task_that_cannot_be_read_is_named_with_file_row_and_key(trip, tmp_path, row, key):
    task = trip[0] | {"id": "2"} | row if isinstance(row, dict) else row
    write_jsonl(tmp_path / "x.jsonl", [trip[0] | {"id": "1"}, task])
    with pytest.raises(Mistake, match="^[^\n]*x.jsonl, row 2: .*" + re.escape(key)):
        load_tasks(tmp_path / "x.jsonl", load_task)


def test_the_published_training_queries_ask_105_hard_constraints(test_data):
    """As the leaderboard counts them; those of plans that reach none are asked as well."""
    tasks = load_tasks(test_data / "travelplanner" / "train_45.jsonl", load_task)
    unreached = dict.fromkeys(HARD, [None, None])
    assert [sum(each) for each in zip(*(hard_counts(task, unreached) for task in tasks),
                                      strict=True)] == [0, 105]


def test_the_test_split_is_played_and_not_judged(tmp_path, mini):
    """It says no more than level, days and query."""
    (tmp_path / "test.csv").write_text("level,days,query\neasy,3,Trip 0?\neasy,3,Trip 1?\n")
    world = Travel(mini, test_split=True)
    tasks = load_tasks(evaluate.find_tasks(tmp_path, "test"), world.load_task)
    assert tasks[1] == {"id": "1", "idx": 1, "level": "easy", "days": "3", "query": "Trip 1?"}
    episode = Episode(tasks[0], Sandbox(mini))
    episode.step(ANSWER)
    plan, verdict, strict = Travel(mini).verdict(episode)
    assert plan is verdict is strict is None
    text, report = table({"a": [episode.record() | {"plan": plan}]})
    assert "success" not in text and "reward" not in text and report["a"]["stop: answer"] == 1


# ------------------------------------------------------------------------------------------ world

def test_travel_is_a_world(trip, mini):
    world = Travel(mini)
    args = SimpleNamespace(failure_rate=0.5, max_turns=3, system_prompt="short")
    episode = world.episode(world.load_task(trip[0]), "7/w", args)
    assert (episode.max_turns, episode.messages[0]["content"]) == (3, read_prompt("short"))
    assert (episode.sandbox.failure_rate, episode.sandbox.seed) == (0.5, "7/w")
    assert world.stops == () and world.slow is False and world.close() is None


# ------------------------------------------------------------------------------------------- play

def episode_of(mini, task, world=None, **options):
    return Episode(task, world or Sandbox(mini), system_prompt="s", **options)


def test_play_does_not_wait_for_the_slowest_episode(mini):
    """One episode's first reply comes only after all others have ended."""
    ended, total, finished = threading.Semaphore(0), 9, []

    def generate(messages):
        if messages[1]["content"] == "0" and len(messages) == 2:
            for _ in range(total - 1):
                ended.acquire()  # for ever if the others wait for the slow one
        return CALL if len(messages) == 2 else ANSWER

    episodes = (episode_of(mini, {"query": str(i)}) for i in range(total))
    for episode in play(generate, episodes, concurrency=3):
        finished.append(episode.task["query"])
        ended.release()
        assert episode.stop == "answer" and episode.turns == 2
    assert finished[-1] == "0" and len(finished) == total


def test_a_refused_request_ends_one_play_and_a_server_that_is_down_ends_the_run(mini):
    def generate(messages):
        said = {"full": evaluate.Refused("status 400: no room", "context"),
                "bad": evaluate.Refused("status 400: a policy"), "down": ChatError("status 500")}
        if messages[1]["content"] in said:
            raise said[messages[1]["content"]]
        return ANSWER

    episodes = [episode_of(mini, {"query": query}) for query in ("full", "bad", "good")]
    stops = {episode.task["query"]: episode.stop for episode in play(generate, episodes)}
    assert stops == {"full": "context", "bad": "refused", "good": "answer"}
    assert episodes[1].refusal == "status 400: a policy"
    episodes = [episode_of(mini, {"query": query}) for query in ("down", "good", "late")]
    kept = play(generate, episodes, concurrency=2)
    assert next(kept) is episodes[1], "what played beside it is kept"
    with pytest.raises(ChatError, match="status 500"):
        list(kept)


def replies(text):
    """Replies with as many calls as the query says, then with the answer."""
    asked = int(re.search(r"user\n(\d+)", text)[1])
    return (CALL if text.count("<tool_response>") < asked else ANSWER) + "<|im_end|>"


def numbered(mini, count):
    return [episode_of(mini, {"id": str(i), "query": str(i % 5)}) for i in range(count)]


def test_a_free_place_in_the_engine_is_filled_at_once(mini):
    engine = Scripted(replies)
    done = list(engine.play(numbered(mini, 20), concurrency=4))
    assert len(done) == 20 and all(episode.stop == "answer" for episode in done)
    said = [len(reply) for _, reply, _ in engine.asked]
    longest = 5 * max(said)  # the last episode to start may play on alone
    assert engine.steps < sum(said) / 4 + longest, "a free place is filled in the next step"


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_an_episode_is_the_tokens_of_its_messages_and_of_what_was_said(mini, end, slow):
    """Also where a reply ends by a stop string, without its end token."""
    engine = Scripted(lambda text: replies(text).removesuffix("<|im_end|>") + end)
    (done,) = engine.play([episode_of(mini, {"id": "0", "query": "3"})], slow=slow)
    ids, said, _ = engine.asked[-1]
    assert done.turns == 4 and done.tokens == len(ids) + len(said)
    text = Letters().apply_chat_template(done.messages).removesuffix("\n<|im_start|>assistant\n")
    assert Letters().decode(ids + said) + ("" if end else "<|im_end|>") == text


def test_a_reply_has_a_seed_of_its_own_whoever_else_is_playing(mini):
    def seeds(concurrency, seed):  # two samples of each of five tasks
        engine = Scripted(replies)
        plays = [episode_of(mini, {"id": f"{i % 5}", "sample": i // 5, "query": str(i % 5)})
                 for i in range(10)]
        list(engine.play(plays, concurrency=concurrency, seed=seed))
        return sorted((len(ids), params.seed) for ids, _, params in engine.asked)

    alone = seeds(1, SEED)
    assert seeds(10, SEED) == alone != seeds(1, SEED + 1)
    assert len({seed for _, seed in alone}) == len(alone) == 30


@pytest.mark.parametrize("limit, said, stop", [
    (10, CALL, "length"), (400, "so<|im_end|>", "format"), (len(ANSWER), ANSWER + " ", "answer")])
def test_a_reply_that_max_tokens_cut_is_told_from_one_without_the_format(mini, limit, said, stop):
    task = {"id": "0", "query": "?"}
    (done,) = Scripted(lambda text: said).play([episode_of(mini, task)], max_tokens=limit)
    assert (done.stop, done.turns, done.errors) == (stop, 1, int(stop != "answer"))


def test_an_episode_that_fills_the_context_stops_there(mini):
    engine = Scripted(lambda text: "x" * 500)
    (done,) = engine.play([episode_of(mini, {"id": "0", "query": "?"}, strict=False)], 300)
    assert (done.stop, done.tokens, done.answer) == ("context", 300, None)
    with pytest.raises(Mistake, match="raise --max-context"):
        list(engine.play([Episode({"id": "0", "query": "?"}, Sandbox(mini))], 300))


def test_a_slow_tool_holds_up_neither_engine_nor_others(mini):
    ended = threading.Event()

    class Slow:
        def call(self, name, arguments):
            ended.wait()  # for ever if the others wait for the slow tool
            return "late"

    slow = episode_of(mini, {"id": "slow", "query": "1"}, Slow())
    order = []
    for episode in Scripted(replies).play([slow, *numbered(mini, 4)], concurrency=2, slow=True):
        order.append(episode.task["id"])
        if len(order) == 4:
            ended.set()
    assert order[-1] == "slow" and slow.messages[-2]["content"].startswith("<tool_response>\nlate")


def test_verdicts_that_wait_hold_up_neither_each_other_nor_the_plays():
    """The first of eight ends after all others, which are played meanwhile."""
    class World:
        judges, others = 8, threading.Semaphore(0)

        def verdict(self, episode):
            for _ in range(7 if episode == 0 else 0):
                self.others.acquire()
            self.others.release()
            return threading.current_thread(), 1, 1

    assert [episode for episode, *_ in runtime.judged(World(), iter(range(8)))] == [*range(8)]
    World.judges, World.others = 0, threading.Semaphore(7)
    (_, thread, *_), *_ = runtime.judged(World(), range(8))
    assert thread is threading.current_thread(), "a world need not expect threads"


# -------------------------------------------------------------------------------------- processes

def plays_of(tasks):
    """Stands for an engine's plays, in a process of its own."""
    for task in tasks:
        if task == "bad":
            raise ValueError("a slip")
        yield os.environ.get("CUDA_VISIBLE_DEVICES"), task * 100_000


def shared(file, tasks, gpus, monkeypatch, tp=1):
    monkeypatch.setattr(runtime, "visible_gpus", lambda: gpus)
    evaluate.in_processes(file, "m", plays_of, tasks, SimpleNamespace(tp=tp))


def test_every_engine_has_its_gpus_and_a_share_of_the_tasks(tmp_path, monkeypatch):
    shared(tmp_path / "rows", "abcd" * 50, ["2", "3", "6", "7"], monkeypatch, tp=2)
    rows = sorted((gpus, text[0]) for gpus, text in read_jsonl(tmp_path / "rows"))
    assert rows == [(gpus, task) for gpus, tasks in (("2,3", "ac"), ("6,7", "bd"))
                    for task in tasks for _ in range(50)], "long lines of both stay whole"


def test_an_engine_that_fails_stops_the_run_and_loses_no_row_of_the_others(
        tmp_path, monkeypatch, capfd):
    with pytest.raises(SystemExit, match="stopped early"):
        shared(tmp_path / "rows", ["a", "bad", "c", "d"], ["0", "1"], monkeypatch)
    assert {text[0] for _, text in read_jsonl(tmp_path / "rows")} >= {"a", "c"}
    assert "a slip" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------- report

def rows_of(trip, mini, wins, name="m"):
    """Records of judged episodes, the i-th successful if wins[i]."""
    task, plan, _ = trip
    world, records = Travel(mini), []
    for i, win in enumerate(wins):
        episode = Episode(task | {"id": str(i), "idx": i}, Sandbox(mini))
        episode.step(f"<think>.</think><answer>{itinerary(plan)}</answer>" if win else "no format")
        found, verdict, strict = world.verdict(episode)
        records.append(episode.record(name) | {
            "plan": found, "score": verdict, "strict": strict, "tokens": 7,
            "reward": world.reward(verdict, "sum")})
    return records


def test_the_table_sets_agents_side_by_side(trip, mini):
    played = {"before": rows_of(trip, mini, [1, 0, 0, 0] * 10),
              "after": rows_of(trip, mini, [1, 1, 1, 0] * 10)}
    text, report = table(played, Travel(mini).lines)
    after = report["after"]
    assert report["before"]["success"] == 0.25 and after["stop: format"] == 0.25
    assert after["reward"] == 3.75
    assert after["success, official"] == after["success, strict"] == after["success, easy"] == 0.75
    assert after["hack gauge: star - strict"] == 0 and after["valid_cost"] == 1
    gain, low, high = after["success minus before's"]
    assert gain == 0.5 and [low, high] == evaluate.interval([0, 1, 1, 0] * 10, -1)
    assert len(set(map(len, text.splitlines()))) == 1, "the columns are aligned"
    text = re.sub(" +", " ", text)
    assert "| success | 25.0 (12.5 to " in text
    assert "| success of after minus before | | +50.0 (+" in text
    assert "| episodes | 40 | 40 |" in text and "| tokens | 7.0 | 7.0 |" in text
    shown = evaluate.differing(text)
    assert "| success | 25.0" in shown and "| success, easy" in shown and "episodes" not in shown


def test_pass_at_k_by_hand():
    assert evaluate.pass_at({"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 0, 1]}) == {
        "pass@1": pytest.approx((1 / 4 + 0 + 3 / 4) / 3),
        # of a's 6 pairs 3 miss; every pair of c's holds a success
        "pass@2": pytest.approx((1 - 3 / 6 + 0 + 1) / 3),
        "pass@4": pytest.approx(2 / 3)}
    assert list(evaluate.pass_at({"a": [1.0] * 6})) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert evaluate.pass_at({"a": [1], "b": [0, 0]}) == evaluate.pass_at({}) == {}


def test_the_interval_is_that_of_a_mean():
    low, high = evaluate.interval([0, 1] * 50)
    assert low == pytest.approx(0.5 - 0.098, abs=0.02) and high == pytest.approx(0.598, abs=0.02)
    assert evaluate.interval([1, 1, 1]) == pytest.approx([0.025 ** (1 / 3), 1])
    # 3 of 100 could fail all the same, and a difference may be of either sign
    assert evaluate.interval([0] * 100) == pytest.approx([0, 0.0362], abs=1e-4)
    assert evaluate.interval([0] * 100, -1) == pytest.approx([-0.0362, 0.0362], abs=1e-4)


def test_with_samples_success_is_of_plays_and_its_interval_of_tasks(trip, mini):
    """Of four plays each that all go one way the spread is that of 8 tasks, not of 32 plays."""
    rows = [row | {"task": row["task"] | {"sample": k}}
            for row in rows_of(trip, mini, [1, 0] * 4) for k in range(4)]
    rows[0] = rows[4] | {"task": rows[0]["task"]}  # but for one play
    text, report = table({"m": rows})
    assert report["m"]["success"] == report["m"]["pass@1"] == 15 / 32
    assert report["m"]["pass@2"] == report["m"]["pass@4"] == 0.5 and "pass@4" in text
    low, high = report["m"]["success interval"]
    assert [low, high] == evaluate.interval([0.75] + [0, 1] * 3 + [0])
    assert high - low > 0.5, "32 plays would give 0.35"


# ----------------------------------------------------------------------------------- command line

def test_a_folder_with_other_settings_is_refused(tmp_path):
    chosen = {"model": "x", "top_p": 0.9, "reader": ("http://host", "m")}
    folder = evaluate.open_folder(tmp_path, "m", chosen)
    runtime.append_jsonl(folder / "episodes.jsonl", {"task": {"id": "a"}})
    assert evaluate.open_folder(tmp_path, "m", chosen) == folder
    with pytest.raises(Mistake, match="top_p was 0.9 and is 1.0"):
        evaluate.open_folder(tmp_path, "m", chosen | {"top_p": 1.0})
    assert json.loads((folder / "settings.json").read_text())["top_p"] == 0.9


def test_new_weights_under_the_same_path_are_another_model(tmp_path):
    """zero3.new_model writes config.json last, whenever a model is saved."""
    (tmp_path / "config.json").write_text("{}")
    before = evaluate.model_settings(str(tmp_path))
    assert evaluate.model_settings(str(tmp_path)) == before
    os.utime(tmp_path / "config.json", (1, 1))
    after = evaluate.model_settings(str(tmp_path))
    assert before["model"] == after["model"] and before["saved"] != after["saved"]
    assert evaluate.model_settings("a/name", "http://host/v1") == {"model": "a/name"}


def command(tmp_path, trip, mini, *more):
    """The command line that plays the trip, with --out in tmp_path."""
    write_jsonl(tmp_path / "tasks.jsonl", [trip[0]])
    return ["--tasks", str(tmp_path / "tasks.jsonl"), "--database", str(mini.folder), "--out",
            str(tmp_path / "out"), *more]


@pytest.mark.parametrize("flag", ["--model", "--reader-key"])
def test_a_flag_of_a_model_that_does_not_play_is_refused(flag, tmp_path, trip, mini):
    words = command(tmp_path, trip, mini, "--agent", "solver", flag, str(tmp_path / "tasks.jsonl"))
    with pytest.raises(SystemExit, match=flag):
        evaluate.main(words)
    assert not list(tmp_path.glob("out/*/episodes.jsonl"))


def test_the_solver_plays_through_the_tools_and_wins_and_a_rerun_plays_nothing(
        tmp_path, trip, mini, capsys):
    words = command(tmp_path, trip, mini, "--agent", "solver", "--samples", "2")
    evaluate.main(words)
    file = tmp_path / "out" / "solver" / "episodes.jsonl"
    rows = read_jsonl(file)
    assert [row["task"].get("sample", 0) for row in rows] == [0, 1]
    assert all(row["strict"] == row["score"]["official"] == 1 and row["calls"] for row in rows)
    evaluate.main(words)
    assert read_jsonl(file) == rows and re.search(
        r"another --out[^|]*\|(.|\n)*\| pass@2 +\| 100\.0 +\|", capsys.readouterr().out)
    task, *more = trip
    other = task | {"budget": task["budget"] + 1}
    words = command(tmp_path, (other, *more), mini, "--agent", "solver", "--samples", "2")
    with pytest.raises(SystemExit, match="other tasks with these ids were played"):
        evaluate.main(words)
    assert read_jsonl(file) == rows


def test_a_person_plays_whatever_is_typed_and_ctrl_c_ends_at_once(tmp_path, trip, mini):
    """In a terminal: every nonsense has a prompt after it; an ended play is kept, and judged."""
    words = command(tmp_path, trip, mini, "--agent", "person", "--samples", "2")
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, str(ROOT / "evaluate.py"), *words])

    def shown(until, press=b""):
        """What is shown up to this text. press: a key to press again after each second without."""
        said = b""
        while until not in said:
            if press and not select.select([terminal], [], [], 1)[0]:
                os.write(terminal, press)
            else:
                said += os.read(terminal, 1 << 16)
        return said.decode(errors="replace")

    how = shown(b"\r\n> ")
    assert "SearchFlight departure, destination, date" in how and "begins:\r\n    Day 1: " in how
    for typed, said in ((b"", ""), (b"help", "<tool_call>"), (b"\xff what", '"help" lists all'),
                        (b"searchflight x", "is SearchFlight meant?"), (b"SearchCity {", ""),
                        (b"<nonsense>", "Error: "), (b"SearchCity Nowhere", "Nowhere")):
        os.write(terminal, typed + b"\n")
        assert said in shown(b"\r\n> ")
    os.write(terminal, f"answer\n{itinerary(trip[1])}\nend\n".encode())
    assert "success 1, reward" in shown(b"\r\n> ")
    os.write(terminal, b"\x03")
    # again, because Python sees a signal just before the read that it is to interrupt after it
    shown(b"interrupted; repeat the command to continue", press=b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    (row,) = read_jsonl(tmp_path / "out" / "person" / "episodes.jsonl")
    assert row["score"]["success"] == 1 and row["calls"] == 1 and row["errors"] == 2


def test_a_person_reads_the_verdict_and_no_table(tmp_path, trip, mini, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"answer no\n")))
    evaluate.main(command(tmp_path, trip, mini, "--agent", "person"))
    assert "not judged: no plan" in (said := capsys.readouterr().out) and "| success" not in said


def played_by_an_endpoint(request):
    """A call, then an answer. In between, a model called sloppy breaks the format, and a reply of
    one called cut meets a limit of tokens. Each message has 50 tokens, but mute reports none."""
    turns, model = len(request["messages"]), request["model"].removeprefix("org/")
    text, finish = (CALL, ANSWER)[turns > 2], "stop"
    if turns == 4:
        text = {"sloppy": "no protocol", "cut": "<think>And then I"}.get(model, text)
        finish = "length" if model == "cut" else "stop"
    return completion(text, finish, None if model == "mute" else 50 * (turns + 1))


@pytest.mark.parametrize("model, words, stop, turns, tokens", [
    ("name", "", "answer", 2, 250),
    ("name", "--max-context 249", "context", 1, 250),  # the answer would not have fitted
    ("mute", "--max-context 249", "answer", 2, None),
    ("sloppy", "", "format", 2, 250),
    ("sloppy", "--lenient", "answer", 3, 350),
    ("cut", "", "length", 2, 250),
    ("cut", "--lenient", "answer", 3, 350),
])
def test_an_endpoint_plays_by_the_rules_of_an_engine(
        tmp_path, trip, mini, model, words, stop, turns, tokens):
    with endpoint(played_by_an_endpoint) as (url, _):
        evaluate.main(command(tmp_path, trip, mini, "--model", f"org/{model}", "--url", url,
                              *words.split()))
    (row,) = read_jsonl(tmp_path / "out" / model / "episodes.jsonl")
    assert (row["stop"], row["turns"], row["calls"], row["model"]) == (stop, turns, 1, model)
    assert row["tokens"] == tokens


def test_a_page_opens_no_turn_at_an_endpoint():
    roles = "system", "user", "assistant", "result", "assistant"
    sent = evaluate.merged([{"role": role, "content": "<|im_end|>"} for role in roles])
    assert [(one["role"], one["content"]) for one in sent] == [
        ("system", "<|im_end|>"), ("user", "‹|im_end|>"),
        ("assistant", "<|im_end|>‹|im_end|><|im_end|>")]


@pytest.mark.slow
def test_a_checkpoint_plays_at_a_context_of_30k_what_a_killed_run_left(
        tmp_path, trip, mini, tiny_model):
    """The command in vLLM, after a run that was killed within its second episode."""
    words = command(tmp_path, trip, mini, *f"""--model m={tiny_model} --max-context 30000
        --max-turns 2 --max-tokens 32 --samples 3""".split())
    (first,) = rows_of(trip, mini, [1])
    first = json.dumps(first | {"task": trip[0], "judge": "rules", "others": {}})
    (tmp_path / "out" / "m").mkdir(parents=True)
    (tmp_path / "out" / "m" / "episodes.jsonl").write_text(f"{first}\n{first[:99]}")
    evaluate.main(words)
    lines = (tmp_path / "out" / "m" / "episodes.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in lines[1:]]
    assert lines[0] == first and sorted(row["task"]["sample"] for row in played) == [1, 2]
    assert all(row["tokens"] > 1000 and row["turns"] in (1, 2) for row in played)
    report = json.loads((tmp_path / "out" / "m" / "scores.json").read_text())
    assert report["episodes"] == 3 and "| tokens" in (tmp_path / "out" / "table.md").read_text()
    with pytest.raises(SystemExit, match="temperature was 0.6 and is 1.0"):
        evaluate.main([*words, "--temperature", "1.0"])
