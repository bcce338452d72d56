"""The tools' words, an index that damage cannot make wrong, a protocol that no reply breaks."""
import functools
import hashlib
import json
import os
import random
import shutil
from multiprocessing import get_context

import pytest
from conftest import ROOT, SEED
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import sandbox
from sandbox import TABLES, Database, Episode, Sandbox, find_sources, parse

TASK = {"id": "t", "query": "Plan a trip."}
CALL = ('<think>x</think><tool_call>{"name": "SearchCity", "arguments": {"state": "Nowhere"}}'
        '</tool_call>')
ANSWER = "<think>x</think><answer>Day 1: home</answer>"
DOZEN = ROOT / "tests" / "dozen"  # a world of a dozen rows
CALLS = [
    ("SearchFlight", {"departure": "Ash", "destination": "Elm", "date": "2022-03-03"}),
    ("SearchAccommodation", {"city": "Elm"}), ("SearchRestaurant", {"city": "Elm"}),
    ("SearchAttraction", {"city": "Elm"}), ("SearchCity", {"state": "South"}),
    *[("GoogleDistanceMatrix", dict(zip(("departure", "destination"), pair.split(), strict=True)))
      for pair in ("Ash Elm", "Elm Oak", "Oak Elm", "Oak Ash")]]
SAID = [
    "A SearchFlight for Ash to Elm on 2022-03-03 found the following 2 flights:\n"
    "1. [F1] $420. Departure: 12:14, Arrival: 13:56, Actual Elapsed Time: 1 hours 42 minutes, "
    "Distance: 907.0 miles\n\n"
    "2. [F2] $99. Departure: 08:00, Arrival: 09:00, Actual Elapsed Time: 1 hours 0 minutes, "
    "Distance: 907.0 miles\n",
    "A SearchAccommodation for Elm found the following 2 accommodations:\n"
    "1. [Big, bright] $131.0. Room Type: Private room, House Rules: No pets, Minimum Nights: 1.0, "
    "Maximum Occupancy: 1, Review Rate Number: 2.0\n\n"
    "2. [Nest] $60.0. Room Type: Shared room, House Rules: No parties & No pets, "
    "Minimum Nights: 3.0, Maximum Occupancy: 2, Review Rate Number: 4.0\n",
    "A SearchRestaurant for city Elm found the following 1 restaurants:\n"
    "1. [Chez Ann] Avg. Cost $46. Cuisines: Tea, Indian. Rating: 4.8\n",
    "A SearchAttraction for city Elm found the following 1 attractions:\n"
    "1. [Old Mill](http://mill) Address: 1 Mill Rd. Contact: 555\n",
    "A SearchCity for state South found the following 2 cities:\nElm, Oak",
    "A GoogleDistanceMatrix found the following information:\n"
    "driving, from Ash to Elm, duration: 1 hour 4 mins, distance: 98.6 km, cost: $4",
    "The required time exceeds a single day, we cannot provide the cost. "
    "Please consider an alternative transportation instead.",
    "Sorry, we cannot find the distance between Oak and Elm.",
    "No valid information found. Please rethink your distance search and try again.",
    ("F4", 70, "12:00", "13:00", "1 hours 0 minutes", 100.0, "Ash", "Oak", "2022-03-04"), None,
    ("2022-03-01", "2022-03-03"), ["Elm", "Oak"], ["Elm", "Ash"], ["Elm"], ["Elm"]]
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = plain | st.lists(plain | st.lists(plain), max_size=3)
values |= st.dictionaries(st.text(max_size=8), plain, max_size=3)
deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
values |= st.sampled_from([10 ** 5000, [deep], {"city": deep}, "\ud800", "\x00", "Ash\x00", "%"])
keys = "city", "state", "departure", "destination", "date", "mode"
names = st.sampled_from([*Sandbox.tools, *keys])


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Keep the tests from writing to the user's own cache."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def world(tmp_path):
    return shutil.copytree(DOZEN, tmp_path / "world")


def answers(database):
    """The tools' results in the little world."""
    world = Sandbox(database)
    return [world.call(*call) for call in CALLS] + [
        database.flight("F4"), database.flight("F5"),
        database.flight_dates("Ash", "Elm"), database.flight_destinations("Ash"),
        database.hotel_cities, database.restaurant_cities, database.attraction_cities]


# ------------------------------------------------------------------------------------------ tools

def test_every_recorded_call_of_the_reference_is_answered_byte_for_byte(official, test_data):
    """Where a list stands for a text the reference shows an error of pandas, which we do not."""
    wrong, equal = [], 0
    with open(test_data / "parity" / "tool_outputs.jsonl", encoding="utf-8") as file:
        for case in map(json.loads, file):
            arguments = case["arguments"]
            said = Sandbox(official).call(case["tool"], arguments)
            same = hashlib.sha256(said.encode()).hexdigest() == case["sha256"]
            equal += same
            lists = isinstance(arguments, dict) and any(
                isinstance(value, list) for value in arguments.values())
            if not same and not lists:
                wrong.append((case["tool"], arguments, said[:200], case["head"]))
    assert not wrong, f"{len(wrong)} differ, the first ones: {wrong[:3]}"
    assert equal >= 1638


def test_each_tool_reports_what_it_finds_and_what_is_missing(world):
    assert answers(Database(world)) == SAID


@seed(SEED)
@settings(max_examples=300, deadline=None)
@given(name=names | values, arguments=values | st.dictionaries(names, values, max_size=4))
def test_a_call_never_raises_whatever_it_is_given(mini, name, arguments):
    assert isinstance(Sandbox(mini).call(name, arguments), str)


def test_the_prompt_lists_exactly_the_tools_that_exist(mini):
    inside = sandbox.read_prompt().split("<tools>\n")[1].split("\n</tools>")[0]
    schemas = [json.loads(line)["function"] for line in inside.split("\n")]
    assert {each["name"] for each in schemas} == Sandbox.tools
    for each in schemas:
        wanted = dict.fromkeys(each["parameters"]["required"], "?")
        assert "Invalid parameters" not in Sandbox(mini).call(each["name"], wanted)
        for key in wanted:
            some = {other: "?" for other in wanted if other != key}
            assert Sandbox(mini).call(each["name"], some).startswith("Invalid parameters")
        assert each["name"] in Sandbox(mini).call("searchcity", {}), "there is no such tool"


def test_failures_follow_their_own_seed_and_are_counted(mini):
    def failed(seed, rate=0.3):
        world = Sandbox(mini, rate, seed)
        said = [world.call("SearchCity", {"state": "x"}) for _ in range(200)]
        marks = [text == "Error: Current tool SearchCity is not available." for text in said]
        assert sum(marks) == world.failures
        return marks

    first = failed(SEED)
    random.seed(SEED + 1)  # which nothing of this draws from
    assert failed(SEED) == first != failed(SEED + 1)
    assert 20 < sum(first) < 100 and not any(failed(SEED, 0.0)) and all(failed(SEED, 1.0))


# ------------------------------------------------------------------------------------------ index

def test_the_nested_layout_says_the_same(world, tmp_path):
    for name, path in find_sources(world).items():
        (tmp_path / "nested" / TABLES[name].subfolder).mkdir(parents=True)
        shutil.copy(path, tmp_path / "nested" / TABLES[name].subfolder)
    assert answers(Database(tmp_path / "nested")) == SAID


def test_the_index_is_built_again_when_the_flights_change_and_only_then(world):
    before, file = Database(world), world / "clean_Flights_2022.csv"
    built, changed = before.index.stat().st_ino, file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("F1,", "F9,"))  # of the same size
    os.utime(file, ns=(changed, changed))
    assert Database(world).flight("F1") and before.index.stat().st_ino == built
    os.utime(file, (1, 1))
    assert Database(world).flight("F9") and not Database(world).flight("F1")
    # who has the old index open keeps it whole
    assert answers(before) == SAID


def test_an_index_that_is_cut_off_or_overwritten_is_built_again(world):
    database, rng = Database(world), random.Random(SEED)
    whole, page = database.index.read_bytes(), 4096
    damaged = [whole[:page], b"", b"garbage", rng.randbytes(len(whole))]
    damaged += [whole[:rng.randrange(len(whole))] for _ in range(8)]
    for data in damaged:
        database.index.write_bytes(data)
        assert answers(Database(world)) == SAID


def test_a_folder_without_write_permission_gets_its_index_in_the_cache(world, home):
    world.chmod(0o555)
    try:
        database = Database(world)
        assert database.index.parent == home / ".cache" / "star"
        assert not (world / "flights.index").exists()
        built = database.index.stat().st_ino
        assert Database(world).index.stat().st_ino == built
    finally:
        world.chmod(0o755)


def open_and_answer(folder, barrier, queue):
    barrier.wait()
    database = Database(folder)
    queue.put((answers(database), database.index.stat().st_ino))


def test_processes_that_build_at_once_share_one_index(world):
    context = get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    started = [context.Process(target=open_and_answer, args=(world, barrier, queue))
               for _ in range(3)]
    for process in started:
        process.start()
    found = [queue.get() for _ in started]
    for process in started:
        process.join()
    assert found == [(SAID, (world / "flights.index").stat().st_ino)] * 3
    assert [path.name for path in world.glob("flights.index*")] == ["flights.index"]


@pytest.mark.parametrize("file, old, new", [
    ("attractions.csv", "Phone", "Fone"),
    ("background/citySet_with_states.txt", "\tNorth", " North")])
def test_a_damaged_table_is_told_with_its_line_and_no_index_is_left(world, file, old, new):
    (world / file).write_text((world / file).read_text().replace(old, new))
    with pytest.raises(ValueError, match=f"{file}, line 1"):
        Database(world)
    assert not list(world.glob("flights.index*"))


# --------------------------------------------------------------------------------------- protocol

@pytest.mark.parametrize("reply", [
    ANSWER, f"\n {ANSWER} \n", "<think></think>\n\n<answer></answer>",
    "<think>a < b and <b> are fine</think><answer>x > y</answer>"])
def test_a_thought_and_a_closed_answer_is_an_answer(reply):
    assert parse(reply).kind == "answer"


def test_a_thought_and_one_call_is_a_call():
    action = parse('<think>x</think>\n<tool_call>\n{"name": "Tool", "arguments": '
                   '{"a": [1, "\\u6771"]}}\n</tool_call>')
    assert (action.kind, action.name, action.arguments) == ("call", "Tool", {"a": [1, "東"]})


CALLED = [  # what is no call
    "{}", "[]", "", '{"name": "A"}', '{"name": 5, "arguments": {}}', '{"name": "A", "arguments": ',
    '{"name": "A", "arguments": {}} {"name": "B", "arguments": {}}',
    '{"name": "A", "arguments": {"city": "\\ud800"}}', "[" * 100_000 + "]" * 100_000,
    f'{{"name": "A", "arguments": {"9" * 10_000}}}',
    '{"name": "A", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001]
BROKEN = [
    "", "\x00", "I would rather talk.", None, 5, ANSWER * 2, CALL * 2, CALL + ANSWER, ANSWER + CALL,
    "x" + ANSWER, ANSWER + "x", "<answer>no thought</answer>", "<think>open<answer>a</answer>",
    "<think>x</think>", "<think>x</think><answer>open", "<think>x<answer>a</answer></think>",
    "<think>x</think><answer>twice</answer></answer>", "</think><think><answer>a</answer>",
    "<think>x</think>between<answer>a</answer>",
    "<think>x</think><answer><tool_call>a</tool_call></answer>",
    *(f"<think>x</think><tool_call>{text}</tool_call>" for text in CALLED),
    *((text * 1_000_000)[:1_000_000] for text in (  # in linear time, or this would take for ever
        "<think>", "</think>", "<think>x</think><tool_call>{", "<", '{"a":', "\\"))]


@pytest.mark.parametrize("reply", BROKEN, ids=range(len(BROKEN)))
def test_anything_else_is_an_error_that_says_why(reply):
    action = parse(reply)
    assert action.kind == "error" and action.why and len(action.why) < 300


pieces = st.text(max_size=10) | st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", CALL, ANSWER,
    '{"name": "SearchCity", "arguments": {"state": "Texas"}}', '{"name": ', "\\ud800", "[[["])
turns = st.lists(st.lists(pieces, max_size=8).map("".join), max_size=6)


@seed(SEED)
@settings(max_examples=1000, deadline=None)
@given(replies=turns, strict=st.booleans())
def test_no_reply_breaks_an_episode(mini, replies, strict):
    episode = Episode(TASK, Sandbox(mini, 0.2, SEED), max_turns=4, strict=strict)
    for reply in replies:
        said = episode.step(reply)
        assert (said is None) == bool(episode.stop)
    assert episode.stop in ("", "answer", "format", "turns") and episode.turns <= 5
    assert (episode.answer is None) == (episode.stop != "answer")
    roles = [message["role"] for message in episode.messages]
    assert roles == (["system", "user"] + ["assistant", "user"] * 5)[:len(roles)]
    json.dumps(episode.record(), ensure_ascii=False).encode()


@pytest.mark.parametrize("reply", ["no protocol", CALL.replace("SearchCity", "BookHotel")])
def test_a_broken_protocol_or_an_unknown_tool_ends_training_but_not_evaluation(mini, reply):
    strict, patient = (Episode(TASK, Sandbox(mini), strict=strict) for strict in (True, False))
    assert strict.step(reply) is None and strict.stop == "format" and strict.answer is None
    assert patient.step(reply).startswith("Error: ") and not patient.stop and not patient.calls
    assert patient.step(ANSWER) is None and patient.stop == "answer"


@pytest.mark.parametrize("reply, called, answer", [
    (CALL.split("</think>")[1], 1, None), (ANSWER.split("</think>")[1], 0, "Day 1: home"),
    (f"{CALL}{CALL}", 1, None), (f"{ANSWER} {CALL}", 1, None),
    ("So: <answer>Day 1: home", 0, "Day 1: home"), ("<tool_call>{}</tool_call>", 0, None),
    ("<think>home</think>", 0, None)])
def test_a_lenient_evaluation_takes_calls_and_answers_as_the_authors_code_does(
        mini, reply, called, answer):
    """With or without a thought, the first call goes before an answer, which may lack its end."""
    strict, lenient = (Episode(TASK, Sandbox(mini), strict=strict) for strict in (True, False))
    assert strict.step(reply) is None and strict.stop == "format" and strict.errors == 1
    said = lenient.step(reply)
    assert (lenient.calls, lenient.answer, lenient.errors) == (called, answer, 1)
    assert (said or "").startswith("Error: ") == (not called and not answer)


def test_so_many_turns_are_so_many_calls_and_the_reply_after_them_may_only_answer(mini):
    late, last = (Episode(TASK, Sandbox(mini), max_turns=3) for _ in range(2))
    for episode in late, last:
        assert [episode.step(CALL) is None for _ in range(3)] == [False, False, False]
    assert late.step(CALL) is None and last.step(ANSWER) is None
    assert (late.stop, late.calls, late.messages[-1]["role"]) == ("turns", 3, "assistant")
    assert (last.stop, last.calls, last.turns) == ("answer", 3, 4)


def test_a_fork_shares_the_past_and_has_its_own_seed_afterwards(mini):
    episode = Episode(TASK, Sandbox(mini, 0.5, SEED), max_turns=200)
    for _ in range(5):
        episode.step(CALL)
    same, other, before = episode.fork(SEED), episode.fork(SEED + 1), episode.record()
    said = [same.step(CALL) for _ in range(90)]
    assert episode.record() == before and len(episode.messages) == 12 and same.calls == 95
    assert [other.step(CALL) for _ in range(90)] != said
    assert other.messages[:12] == same.messages[:12] == episode.messages
    assert [episode.step(CALL) for _ in range(90)] == said
