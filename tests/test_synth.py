"""Synthesis: tasks with a witness, complete queries, files that survive a kill."""
import contextlib
import json
import random
import re
from collections import Counter
from threading import Event

import pytest
from conftest import SEED, endpoint, witness
from test_solver import cost_of

import synth
from recipes import axes
from runtime import read_jsonl, write_jsonl
from sandbox import parse, turn
from travel import solver
from travel.constraints import judge, score
from travel.dead_ends import count_dead_ends
from travel.world import Travel


def run(*words):
    """Run a command of synth.py in this process."""
    synth.main([str(word) for word in words])


def made(path, *words):
    """The rows that a command has written."""
    run(*words, "--out", path)
    return read_jsonl(path)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory):
    """120 tasks of the small world, of all levels and lengths."""
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    run("tasks", "--n", 120, "--seed", SEED, "--workers", 2, "--out", path)
    return path


@pytest.fixture(scope="module")
def tasks(tasks_file):
    return read_jsonl(tasks_file)


@pytest.fixture(scope="module")
def episodes(tasks_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("episodes") / "out.jsonl"
    return made(path, "episodes", "--tasks", tasks_file, "--seed", SEED, "--exploring", 0.75)


def cut_off(path, rng):
    """Cut a file as a kill at a random moment does: whole lines, perhaps half a line."""
    data = path.read_bytes()
    path.write_bytes(data[:rng.randrange(len(data))])


# ---------------------------------------------------------------- tasks

@pytest.mark.slow
def test_the_same_seed_gives_the_same_tasks_with_any_number_of_workers(tasks, out):
    assert made(out, "tasks", "--n", 120, "--seed", SEED, "--workers", 1) == tasks


def test_every_task_has_a_plan_within_its_budget(tasks, mini):
    for task in tasks:
        report, plan = solver.solve_report(task, mini), solver.solve(task, mini)
        assert score(task, plan, mini, "strict")["success"] == 1
        assert cost_of(task, plan, mini) == report.cost == task["tightness"]["least_cost"]


def test_levels_have_their_shares_and_their_wishes(tasks):
    assert Counter(task["level"] for task in tasks) == {"easy": 48, "medium": 36, "hard": 36}
    assert Counter(task["days"] for task in tasks) == {3: 40, 5: 40, 7: 40}
    for task in tasks:
        wishes = [name for name, value in task["local_constraint"].items() if value]
        assert len(wishes) == {"easy": 0, "medium": 1, "hard": 3}[task["level"]]
        assert (task["level"] == "easy") == (task["people_number"] == 1)
        assert ("transportation" in wishes) == (task["level"] == "hard")
        assert 0.25 < task["tightness"]["ratio"] <= 0.8


def test_training_and_validation_share_no_places_and_no_dates(mini, tmp_path):
    words = "tasks", "--seed", SEED, "--like", "tiny"
    train = made(tmp_path / "train", *words, "--split", "train", "--n", 200)
    val = made(tmp_path / "val", *words, "--split", "val", "--n", 100, "--days", 3)
    pairs = [{frozenset((task["org"], task["dest"])) for task in part} for part in (train, val)]
    starts = [{task["date"][0] for task in part} for part in (train, val)]
    assert pairs[0].isdisjoint(pairs[1]) and starts[0].isdisjoint(starts[1])
    reserved = synth.reserved(mini)
    assert 5 <= len(reserved) <= 8
    for task in train:
        assert reserved.isdisjoint([task["org"], *solver.stop_cities(task, mini)])
    assert {task["dest"] in reserved for task in val} == {True, False}


def test_the_benchmarks_wishes_are_in_the_proportions_of_its_public_queries(test_data, out):
    def shares(tasks):
        """{(level, the kinds of its wishes): per cent of that level}, the numbers of cuisines."""
        wishes = [(task["level"], task["local_constraint"]) for task in tasks]
        kinds = [(level, tuple(filter(wish.get, synth.WISHES))) for level, wish in wishes]
        levels = Counter(level for level, _ in kinds)
        cuisines = {(level, len(wish["cuisine"])) for level, wish in wishes if wish["cuisine"]}
        return {kind: 100 * n / levels[kind[0]] for kind, n in Counter(kinds).items()}, cuisines

    published = [task for file in ("train_45", "val_102")
                 for task in read_jsonl(test_data / "travelplanner" / f"{file}.jsonl")]
    (theirs, cuisines), (ours, drawn_cuisines) = shares(published), shares(made(
        out, "tasks", "--like", "benchmark", "--n", 120, "--levels", 1, 2, 3, "--seed", SEED))
    assert len(published) == 147 and ours.keys() == theirs.keys()
    assert all(abs(ours[kind] - share) < 3 for kind, share in theirs.items())
    assert drawn_cuisines == cuisines == {("medium", 2), ("hard", 4)}


@pytest.mark.parametrize("other", [("--seed", SEED + 1), ("--like", "paper"), ("--split", "val"),
                                   ("--prefix", "mine")])
def test_a_file_of_other_flags_is_not_gone_on_with(other, out):
    before = made(out, "tasks", "--seed", SEED, "--n", 6, "--workers", 1, "--split", "train")
    for n in 6, 12:
        with pytest.raises(SystemExit, match="--out"):
            run("tasks", "--seed", SEED, "--split", "train", "--n", n, *other, "--out", out)
    assert read_jsonl(out) == before


def test_excluded_tasks_do_not_come_again_and_none_comes_twice(tasks, tasks_file, out):
    again = made(out, "tasks", "--n", 120, "--seed", SEED, "--exclude", tasks_file)
    keys = [synth.key_of(task) for task in [*tasks, *again]]
    assert len(keys) == len(set(keys)) == 240


def greedy(ask, task):
    """The cities of a traveller who goes by what the tools show: the first that it can get to."""
    taken, flies = [], task["local_constraint"]["transportation"] != "no flight"
    for city in re.search(r"cities:\n(.+)</", ask("SearchCity", state=task["dest"]))[1].split(", "):
        if len(taken) == 2:
            break
        ride = {"departure": task["org"], "destination": city}
        flight = flies and "found the" in ask("SearchFlight", **ride, date=task["date"][0])
        if flight or "cost: $" in ask("GoogleDistanceMatrix", **ride):
            ask("SearchAccommodation", city=city)
            taken.append(city)
    return taken


def test_a_greedy_traveller_meets_the_dead_ends_which_a_plan_leaves_or_keeps(mini, out):
    def ask(tool, **arguments):
        episode.step(turn(thought, tool, arguments))
        return episode.messages[-1]["content"]

    def told(plan, success=1.0):
        rows.append({"task": episode.task, "messages": episode.messages, "plan": plan,
                     "score": {"success": success}})
        return [name[10:] for name, value in count_dead_ends(rows[-1], mini).items() if value]

    rows, args = [], synth.flags(["episodes", "--tasks", "none", "--out", "none"])
    words = "tasks", "--levels", 0, 0, 1, "--dead-ends", 1, 2, "--n", 20, "--seed", SEED, "--days"
    with pytest.raises(SystemExit, match="--dead-ends 2: .* is 1 in hard trips of 7 days"):
        made(out, *words, 7)
    for task in made(out, *words, 5):
        episode, plan = Travel(mini).episode(task, 0, args), solver.solve(task, mini)
        beds = [mini.hotels(city)[0].name for city in solver.stop_cities(task, mini)]
        thought = " ".join(beds) * (task["dead_ends"] - 1)  # it quotes the lists where K is 2
        city = greedy(ask, task)[0]
        assert told(plan) == ["met", "left by another city"]
        stay = plan[0] | {"current_city": f"from {task['org']} to {city}",  # the paper's case 4
                          "accommodation": f"{mini.hotels(city)[0].name}, {city}"}
        assert told([stay, *plan[1:]], 0.0) == ["met", "kept"]
    half = " | 50.0 (50.0)"
    row = f"{half} | 100.0 (100.0){half} | 0.0 (0.0){half}"
    table = axes.dead_ends_table({"rl": [(rows, [])], "not run": []}, mini)
    assert f"| rl | K = 2 | 20{row}{half * 2} | 100.0 (100.0) |\n" in table, "two visits each"
    assert f"| rl | hard | 40{row} | 25.0 (25.0){half} | 75.0 (75.0) |\n" in table
    task, plan = witness(mini)
    episode = Travel(mini).episode(task, 0, args)
    for date in task["date"]:  # on one of three days there is no flight
        ask("SearchFlight", departure=task["org"], destination=task["dest"], date=date)
    assert told(plan) == ["met", "left by another hotel or ride"]


# ---------------------------------------------------------------- queries

def test_every_query_states_every_element(tasks):
    for task in tasks:
        rng = random.Random(f"{SEED}/{task['id']}")
        for query in task["query"], synth.write_query(rng, task, synth.GRAMMARS["paper"]):
            assert synth.unstated(query, task) == []
            assert not re.search(r"[{}]| /|  ", query)


WRONG = {"org": "Port Nowhere", "dest": "Lake Nowhere", "budget": 12345, "people_number": 9,
         "days": 6}
OMITTED = {"cuisine": ["Martian"], "house rule": "visitors", "room type": "private room",
           "transportation": "no self-driving"}


def test_an_element_that_is_wrong_or_a_wish_that_is_left_out_is_noticed(tasks):
    for task in tasks:
        query = synth.write_query(random.Random(f"{SEED}/{task['id']}"), task,
                                  synth.GRAMMARS["paper"])
        for name, value in WRONG.items():
            assert name.removesuffix("_number") in synth.unstated(query, task | {name: value})
        said = set(map(int, re.findall(r"\d+", query)))  # days that no number of it can be
        first, *_, last = (day for day in range(1, 31) if day not in said)
        for month in (3, 4):
            dates = [f"2022-{month:02d}-{day:02d}" for day in (first, last)]
            assert "dates" in synth.unstated(query, task | {"date": dates}), query
        wishes = task["local_constraint"]
        for name in [name for name in OMITTED if not wishes[name]]:
            found = synth.unstated(query, task | {"local_constraint": wishes | {
                name: OMITTED[name]}})
            assert found == ["Martian" if name == "cuisine" else OMITTED[name]]


def test_a_place_states_no_wish(tasks):
    free = dict.fromkeys(tasks[0]["local_constraint"])
    for place, wish in (("Indianapolis", {"cuisine": ["Indian"]}), ("Saint Petersburg", {
            "house rule": "pets"}), ("Fairbanks", {"transportation": "no flight"})):
        task = tasks[0] | {"org": place, "local_constraint": free}
        query = synth.write_query(random.Random(SEED), task, synth.GRAMMARS["paper"])
        (wished,) = wish.values()
        missing = wished if isinstance(wished, list) else [wished]
        assert synth.unstated(query, task | {"local_constraint": free | wish}) == missing


@pytest.fixture
def serve():
    """serve(reply, rate) -> (address, requests so far). reply(model, messages) -> a text, or a
    status; rate: the probability that the server fails."""
    with contextlib.ExitStack() as servers:
        def start(reply, rate=0.3):
            draw = random.Random(SEED)

            def answer(request):
                failed = draw.random() < rate
                return draw.choice((429, 500)) if failed else reply(
                    request["model"], request["messages"])

            return servers.enter_context(endpoint(answer))

        yield start


def paraphrase(model, messages):
    """A task in the grammar's words; the model "one" leaves the origin out three times in ten."""
    text = messages[0]["content"]
    task = json.loads(text[text.index('{"org"'):])
    query = synth.write_query(random.Random(text + model), task, synth.GRAMMARS["paper"])
    careless = model == "one" and random.Random(text).random() < 0.3
    return query.replace(task["org"], "home") if careless else query


def test_queries_from_endpoints_that_fail_are_neither_lost_nor_doubled(serve, tasks, tmp_path, out):
    """Thoughts are no part of a query, and a task that an endpoint refuses is left out."""
    lost, rng = f'"org": {json.dumps(tasks[2]["org"])}', random.Random(SEED)

    def reply(model, messages):
        if lost in messages[0]["content"]:
            return 400
        return f"I think, {messages[0]['content']}</think>{paraphrase(model, messages)}"

    write_jsonl(tmp_path / "tasks.jsonl", tasks[:30])
    url, asked = serve(reply)
    words = ("queries", "--tasks", tmp_path / "tasks.jsonl", "--tries", 9,
             "--endpoint", f"{url}=one", f"{url}=two")
    said = made(out, *words)
    assert {request["model"] for request in asked} == {"one", "two"} and len(asked) > 30
    told = [task for task in tasks[:30] if task["org"] != tasks[2]["org"]]
    for before, after in zip(told, said, strict=True):
        assert before | {"query": ""} == after | {"query": ""} and "I think" not in after["query"]
        assert not synth.unstated(after["query"], after)
    assert len(read_jsonl(f"{out}.refused")) == 30 - len(told)
    for _ in range(3):
        cut_off(out, rng)
        assert made(out, *words) == said


# ---------------------------------------------------------------- episodes

def test_every_episode_keeps_the_protocol_and_is_a_success(episodes, tasks, mini):
    assert len(episodes) >= 0.98 * len(tasks)
    for row in episodes:
        said = [parse(each["content"]).kind for each in row["messages"]
                if each["role"] == "assistant"]
        assert said == ["call"] * row["calls"] + ["answer"] and row["calls"] <= 60
        plan, verdict = judge(row["task"], row["answer"], mini)
        assert plan == row["plan"] and verdict["success"] == verdict["strict"] == 1
        assert row["score"] == {name: verdict[name] for name in row["score"]}
        assert row["score"].keys() == verdict.keys() - {"strict"}


def test_an_answer_names_only_places_that_were_seen(episodes):
    for row in episodes:
        seen = "\n".join(each["content"] for each in row["messages"] if each["role"] == "user")
        assert all(name in seen for name in re.findall(r"\[[^\]]+\]", row["answer"]))


def test_a_task_without_a_plan_is_refused_with_the_reason(tasks, tmp_path, out):
    write_jsonl(tmp_path / "tasks.jsonl", [tasks[0] | {"budget": 1}, tasks[1]])
    assert len(made(out, "episodes", "--tasks", tmp_path / "tasks.jsonl")) == 1
    assert "over the budget 1" in read_jsonl(f"{out}.refused")[0]["refused"][0]
    out.unlink()  # another run, whose tasks have the same ids
    write_jsonl(tmp_path / "tasks.jsonl", tasks[:2])
    assert len(made(out, "episodes", "--tasks", tmp_path / "tasks.jsonl")) == 2
    other = [task | {"budget": task["budget"] + 1} for task in read_jsonl(tmp_path / "tasks.jsonl")]
    write_jsonl(tmp_path / "tasks.jsonl", other)
    with pytest.raises(SystemExit):
        run("episodes", "--tasks", tmp_path / "tasks.jsonl", "--out", out)


def test_a_teacher_behind_a_failing_endpoint_is_kept_where_it_succeeds(
        serve, tasks, mini, tmp_path, out):
    tasks = [task for task in tasks if task["days"] == 3][:12]
    write_jsonl(tmp_path / "tasks.jsonl", tasks)
    lost, broken = {task["query"] for task in tasks[::5]}, tasks[1]["query"]
    turns = {task["query"]: solver.solver_replies(task, mini) for task in tasks}

    def play(_, messages):
        query = messages[1]["content"]
        if query == broken:
            return 400
        return "No idea." if query in lost else turns[query][len(messages) // 2 - 1]

    url, asked = serve(play, rate=0.1)
    words = "episodes", "--tasks", tmp_path / "tasks.jsonl", "--endpoint", f"{url}=teacher"
    kept = made(out, *words)
    assert [row["task"] for row in kept] == [
        task for task in tasks if task["query"] not in (*lost, broken)]
    assert all(row["model"] == "teacher" and row["score"]["success"] == 1 for row in kept)
    refused = {row["id"]: row["refused"] for row in read_jsonl(f"{out}.refused")}
    assert refused == {task["id"]: ["format" if task["query"] in lost else "refused"]
                       for task in tasks if task["query"] in (*lost, broken)}
    before = len(asked)
    assert made(out, *words) == kept and len(asked) == before  # none is asked again


def test_a_play_that_runs_when_an_endpoint_goes_down_is_kept(
        serve, tasks, mini, tmp_path, out):
    first, second = tasks[:2]
    write_jsonl(tmp_path / "tasks.jsonl", [first, second])
    turns, playing, down = solver.solver_replies(second, mini), Event(), Event()

    def play(_, messages):
        if messages[1]["content"] == first["query"]:
            playing.wait(60)
            down.set()
            return 401
        playing.set()
        down.wait(60)
        return turns[len(messages) // 2 - 1]

    url, _ = serve(play, rate=0)
    with pytest.raises(SystemExit, match="401|status"):
        run("episodes", "--tasks", tmp_path / "tasks.jsonl", "--endpoint", f"{url}=teacher",
            "--out", out)
    assert [row["task"] for row in read_jsonl(out)] == [second]


# ---------------------------------------------------------------- files

@pytest.mark.slow
@pytest.mark.parametrize("command", ["tasks", "episodes"])
def test_a_run_killed_again_and_again_ends_with_the_unbroken_run(command, tasks_file, out):
    rng = random.Random(f"{SEED}/{command}")
    words = {"tasks": ("tasks", "--n", 40, "--days", 3, "--seed", SEED),
             "episodes": ("episodes", "--tasks", tasks_file)}[command]
    whole = made(out, *words)
    for _ in range(2):
        cut_off(out, rng)
        assert made(out, *words) == whole


def test_subsets_are_within_the_base_or_around_it_and_contain_each_other(
        tasks, tasks_file, tmp_path):
    base = [task for level, n in (("easy", 24), ("medium", 18), ("hard", 18))
            for task in [task for task in tasks if task["level"] == level][:n]]
    write_jsonl(tmp_path / "rl.jsonl", [{"task": task} for task in base])
    words = "subsets", "--base", tmp_path / "rl.jsonl", "--out", tmp_path / "sets"
    run(*words, "--tasks", tasks_file, "--sizes", 10, 20, 90)
    mixed = {n: read_jsonl(tmp_path / "sets" / f"mixed-{n}.jsonl") for n in (10, 20, 90)}
    for n in 10, 20:
        counts = Counter(task["level"] for task in mixed[n])
        assert counts == {"easy": n * 4 // 10, "medium": n * 3 // 10, "hard": n * 3 // 10}
    small, middle, large = ({task["id"] for task in part} for part in mixed.values())
    assert small < middle < {task["id"] for task in base} < large and len(large) == 90
    with pytest.raises(SystemExit, match="--tasks"):
        run(*words, "--sizes", 90)
