"""The laptop's world: tables byte for byte, drills that can be copied, many worlds."""
import re
from argparse import Namespace

import pytest
from conftest import ROOT, SEED

import synth
from evaluate import play_replies
from runtime import load_tasks, read_jsonl
from sandbox import open_database, parse
from tiny import worlds
from tiny.__main__ import main
from travel.world import Travel


def made(path, *words):
    """The rows that a command has written."""
    main([str(word) for word in (*words, "--out", path)])
    return read_jsonl(path)


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    """(question, answer) of 200 exercises from two worlds."""
    path = tmp_path_factory.mktemp("drills") / "drills.jsonl"
    made(path, "drills", "--worlds", 2, "--n", 200, "--seed", SEED)
    return [[each["content"] for each in row["messages"]] for row in read_jsonl(path)]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """780 episodes from 13 worlds."""
    path = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    return made(path, "drills", "--episodes", "--worlds", 13, "--n", 780, "--seed", SEED)


# ---------------------------------------------------------------- world

def test_the_small_world_that_ships_is_seed_0_byte_for_byte(tmp_path):
    main(["world", "--out", str(tmp_path)])
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")
               if path.is_file() and path.name != ".writer"}  # which goes when this process ends
    assert written == {*map(type(tmp_path), worlds.make_world(0))}
    for name in written:
        assert (ROOT / "database" / "mini" / name).read_bytes() == (tmp_path / name).read_bytes()


# ---------------------------------------------------------------- drills

@pytest.mark.parametrize("more", [("--tours",), ("--episodes",), ("--episodes", "--tours")])
def test_the_same_seed_gives_the_same_drills_with_any_number_of_workers(more, tmp_path):
    words = "drills", "--worlds", 3, "--n", 40, "--seed", SEED, *more
    one, two = (made(tmp_path / str(n), *words, "--workers", n) for n in (1, 2))
    assert one == two and len(one) == 40


def test_the_answer_of_a_drill_can_be_copied_from_its_question(drills):
    assert len(drills) == 200
    for shown, said in drills:
        assert all(name in shown for name in re.findall(r"(?:\d+\. )?\[[^\]]+\]", said))
        assert "<tool_response>" in shown or parse(said).kind == "call"


def test_episodes_are_successes_in_the_short_form(episodes):
    assert len(episodes) == 780
    for row in episodes:
        assert row["stop"] == "answer" and row["score"]["success"] == 1
        assert re.search(r"(?m)^Breakfast: \d+\. \[", row["answer"])


def test_episodes_to_learn_from_keep_clear_of_what_is_held_out(episodes, mini):
    held_out = {date for date in synth.MARCH if synth.stable_draw(f"from {date}") % 5 == 0}
    assert held_out and held_out.isdisjoint(row["task"]["date"][0] for row in episodes)
    for row in episodes:
        assert worlds.HOME.isdisjoint((row["task"]["org"], row["task"]["dest"]))
    assert {*mini.cities} == worlds.HOME


# ---------------------------------------------------------------- many worlds

@pytest.fixture(scope="module")
def country(tmp_path_factory):
    """A folder with three worlds, and their tasks."""
    folder = tmp_path_factory.mktemp("country")
    main(["world", "--worlds", "3", "--seed", str(SEED), "--out", str(folder)])
    path = folder / "tasks.jsonl"
    synth.main(["tasks", "--database", str(folder), "--days", "3", "--n", "30", "--seed",
                str(SEED), "--out", str(path)])
    return folder, path


def test_no_city_of_many_worlds_is_one_of_the_world_that_ships(country, mini):
    worlds = open_database(country[0]).worlds
    assert list(worlds) == ["world-00", "world-01", "world-02"]
    cities = [set(world.cities) for world in worlds.values()]
    assert all(len(names) == 48 and names.isdisjoint(mini.cities) for names in cities)
    assert cities[0] != cities[1] != cities[2]


def test_a_task_of_many_worlds_is_played_and_judged_in_its_own(country):
    folder, path = country
    world, args = Travel(open_database(folder)), Namespace(
        failure_rate=0.0, max_turns=20, system_prompt="short")
    tasks = load_tasks(path, world.load_task)
    assert {task["world"] for task in tasks} == set(world.database.worlds)
    for task in tasks:
        assert task["org"] in world.database.worlds[task["world"]].cities
        episode = play_replies(world.solver, world.episode(task, 0, args))
        assert world.verdict(episode)[2] == 1
