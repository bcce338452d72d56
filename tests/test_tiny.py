"""The laptop's world: tables byte for byte, drills that can be copied, a model wired for copying.

    python -m pytest tests/test_tiny.py
"""
import csv
import io
import itertools
import json
import os
import random
import re
from argparse import Namespace
from collections import Counter

import pytest

import runtime
import synth
from evaluate import play_replies
from runtime import Mistake, load_tasks, read_jsonl, write_jsonl
from sandbox import open_database, parse
from tiny import worlds
from tiny.__main__ import main
from tiny.drills import drill_weighing, is_possible
from travel.world import LEVELS, Travel

SEED = int(os.environ.get("TEST_SEED", "0"))
TABLES = {"clean_accommodations_2022.csv": ("NAME", "city"),
          "clean_restaurant_2022.csv": ("Name", "City"), "attractions.csv": ("Name", "City")}


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


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


# ---------------------------------------------------------------- world

def test_the_small_world_that_ships_is_seed_0_byte_for_byte(root, tmp_path):
    main(["world", "--out", str(tmp_path)])
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")
               if path.is_file() and path.name != ".writer"}  # which goes when this process ends
    assert written == {*map(type(tmp_path), worlds.make_world(0))}
    for name in written:
        assert (root / "database" / "mini" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_no_word_means_two_kinds_of_place():
    assert max(Counter(word for pool in worlds.POOLS.values() for word in pool).values()) == 1


@pytest.fixture(params=range(3), scope="module")
def world(request):
    """The tables of a world, and {city: state}."""
    world = worlds.make_world(request.param + 1000 * SEED)
    lines = world["background/citySet_with_states.txt"].split("\n")
    return world, dict(line.split("\t") for line in lines)


def test_no_two_places_of_a_kind_in_a_state_share_their_first_word(world):
    tables, state = world
    for table, (name, city) in TABLES.items():
        words = Counter((state[row[city]], row[name].split()[0]) for row in rows(tables[table]))
        assert max(words.values()) == 1, table


def test_every_noun_names_two_cities_so_that_no_reserved_city_has_a_word_of_its_own(world):
    _, state = world
    cities = {}
    for city in state:
        cities.setdefault(city.split()[1], []).append(city)
    assert {len(same) for same in cities.values()} == {2}


def test_flights_shown_together_differ_in_the_first_digits_of_their_numbers(world):
    blocks, flights = {}, rows(world[0]["clean_Flights_2022.csv"])
    for row in flights:
        key = row["OriginCityName"], row["DestCityName"], row["FlightDate"]
        blocks.setdefault(key, []).append(row["Flight Number"][:3])
    assert all(len(set(found)) == len(found) for found in blocks.values())
    numbers = [row["Flight Number"] for row in flights]
    assert numbers == sorted(set(numbers))
    assert all(re.fullmatch(r"F\d{4}", number) for number in numbers)


def test_a_small_world_has_the_quirks_of_the_official_one(world):
    tables, state = world
    assert "" in {row["house_rules"] for row in rows(tables["clean_accommodations_2022.csv"])}
    roads = rows(tables["distance.csv"])
    pairs = [(row["origin"], row["destination"]) for row in roads]
    assert len(pairs) > len(set(pairs)) and len(set(pairs)) < 48 * 47
    times = {re.sub(r"\d+ ", "", row["duration"]) for row in roads}
    assert times >= {"", "day hours", "hours mins"}
    flown = {(row["OriginCityName"], row["DestCityName"]): set()
             for row in rows(tables["clean_Flights_2022.csv"])}
    for row in rows(tables["clean_Flights_2022.csv"]):
        flown[row["OriginCityName"], row["DestCityName"]].add(row["FlightDate"])
    assert all(0 < len(dates) < 31 for dates in flown.values())


# ---------------------------------------------------------------- drills

@pytest.mark.parametrize("more", [(), ("--episodes",)])
def test_the_same_seed_gives_the_same_drills_with_any_number_of_workers(more, tmp_path):
    words = "drills", "--worlds", 3, "--n", 40, "--seed", SEED, *more
    one, two = (made(tmp_path / str(n), *words, "--workers", n) for n in (1, 2))
    assert one == two and len(one) == 40


def test_the_answer_of_a_drill_can_be_copied_from_its_question(drills):
    assert len(drills) == 200
    for shown, said in drills:
        assert all(name in shown for name in re.findall(r"(?:\d+\. )?\[[^\]]+\]", said))
        assert "<tool_response>" in shown or parse(said).kind == "call"


def test_a_drill_shows_the_way_out_when_it_asks_for_the_way_back_by_air_and_by_road(drills):
    back = set()
    for shown, said in drills:
        if (call := parse(said)).kind == "call":
            query, *seen = shown.split("<tool_response>")
            here, there = call.arguments["departure"], call.arguments["destination"]
            if re.search(rf" from {there} to {here}\b", query):
                back.add(call.name)
                assert re.search(rf" {there} to {here}\b", seen[-1])
            else:
                assert re.search(rf" from {here} to {there}\b", query)
    assert back == {"SearchFlight", "GoogleDistanceMatrix"}


def test_a_drill_names_a_hotel_for_two_nights_at_most_out_of_lists_that_hold_others_too(drills):
    named = others = 0
    for shown, said in drills:
        found = re.findall(r"\[([^\]]+)\] \$.*Minimum Nights: ([\d.]+)", shown)
        nights = {name: float(least) for name, least in found}
        if choice := re.search(r"Accommodation: (?:\d+\. )?\[([^\]]+)\]", said):
            assert nights[choice[1]] <= 2
            named, others = named + 1, others + (max(nights.values()) > 2)
        else:
            assert not nights or min(nights.values()) > 2
    assert named > 40 and others > 20


def test_the_plan_of_a_drill_takes_the_meals_and_the_hotel_that_were_taken_before_it(drills):
    plans = [said.split("\n") for _, said in drills if "Attraction: " in said]
    assert len(plans) > 40
    for lines in plans:
        named = [line for line in lines if not line.startswith("Attraction: ")]
        half = len(named) // 2
        assert sorted(named[:half]) == sorted(named[half:]) and named[:half] == lines[:half]
        assert {"Breakfast", "Lunch", "Dinner"} <= {line.split(":")[0] for line in named[:half]}


def test_episodes_are_successes_in_the_short_form(episodes):
    assert len(episodes) == 780
    for row in episodes:
        assert row["stop"] == "answer" and row["score"]["success"] == 1
        assert re.search(r"(?m)^Breakfast: \d+\. \[", row["answer"])


def test_worlds_to_learn_from_differ_in_their_month_so_that_trips_start_on_all_its_days(episodes):
    starts = [row["task"]["date"][0] for row in episodes]
    months = {f"{month:02d}": 60 + 60 * (month == 1) for month in range(1, 13)}
    assert Counter(start[5:7] for start in starts) == months
    assert {start[-2:] for start in starts} >= {f"{day:02d}" for day in range(1, 28)}


def test_episodes_to_learn_from_keep_clear_of_what_is_held_out(episodes, mini):
    held_out = {date for date in synth.MARCH if runtime.stable_draw(f"from {date}") % 5 == 0}
    assert held_out and held_out.isdisjoint(row["task"]["date"][0] for row in episodes)
    for row in episodes:
        assert worlds.HOME.isdisjoint((row["task"]["org"], row["task"]["dest"]))
    assert {*mini.cities} == worlds.HOME


# ---------------------------------------------------------------- model

@pytest.fixture(scope="module")
def model(drills, tmp_path_factory):
    """(folder, tokenizer) of a model made from the drills."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    talks = [{"messages": [{"role": "user", "content": shown},
                           {"role": "assistant", "content": said}]} for shown, said in drills]
    lines = "".join(json.dumps(talk) + "\n" for talk in talks)
    (folder / "drills.jsonl").write_text(lines, encoding="utf-8")
    main(["model", "--corpus", str(folder / "drills.jsonl"), "--out", str(folder / "model")])
    return folder / "model", AutoTokenizer.from_pretrained(folder / "model")


def test_a_name_has_the_same_tokens_everywhere(model, drills):
    _, tokenizer = model
    for shown, said in drills[:50]:
        for text, name in itertools.product((shown, said), re.findall(r"\[([^\]]+)\]", said)):
            if f" [{name}]" in text:
                ids = tokenizer.encode(text, add_special_tokens=False)
                part = tokenizer.encode(f" [{name}]", add_special_tokens=False)[1:-1]
                assert any(ids[i:i + len(part)] == part for i in range(len(ids)))


def test_tokenised_text_is_decoded_unchanged(model, drills):
    _, tokenizer = model
    for text in itertools.chain(*drills[:50]):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_random_model_has_heads_that_look_back_and_heads_that_find_what_followed(model):
    """100 random tokens, then 50 of them again: one head of each key is wired, in both layers."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model[0], attn_implementation="eager")
    torch.manual_seed(SEED)
    ids = torch.randperm(len(model[1]))[None, :100]
    with torch.no_grad():
        seen = lm(torch.cat([ids, ids[:, :50]], dim=1), output_attentions=True).attentions
    wired, others = [0, 3], [1, 2, 4, 5]
    before = seen[0][0, :, torch.arange(1, 150), torch.arange(149)].mean(-1)
    assert before[wired].min() > 0.8 > 0.2 > before[others].max()
    again = torch.arange(50)
    followed = seen[1][0, :, 100 + again, 1 + again].mean(-1)
    assert followed[wired].min() > 3 * followed[others].max()


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


@pytest.mark.parametrize("name", [None, "world-99", ["world-00"], "../mini"])
def test_a_task_of_no_world_of_the_folder_is_refused_by_file_and_row(country, name, tmp_path):
    folder, path = country
    rows = read_jsonl(path)
    rows[1]["world"] = name
    write_jsonl(tmp_path / "tasks.jsonl", rows)
    with pytest.raises(Mistake, match=r"tasks.jsonl, row 2: 'world' is .*world-00 to world-02"):
        load_tasks(tmp_path / "tasks.jsonl", Travel(open_database(folder)).load_task)


def test_a_task_that_starts_in_no_city_of_the_tables_is_refused(trip, mini):
    task, _, _ = trip
    assert Travel(mini).load_task(task)["org"] == task["org"]
    with pytest.raises(Mistake, match="'org' is 'Reno', which is no city of .*mini: --data"):
        Travel(mini).load_task(task | {"org": "Reno"})


# ---------------------------------------------------------------- weighing

HOTEL = re.compile(r"(?m)^(\d\. \[[^\]]+\] \$[\d.]+ Room Type: ([^,]+)), House Rules: ([^,]+), "
                   r"Minimum Nights: (\d)")
MEAL = re.compile(r"(?m)^((\d\. \[[^\]]+\]) Avg\. Cost \$\d+\. Cuisines: )(.+)\. Rating")
ROOMS = {"entire room": {"Entire home/apt"}, "private room": {"Private room"},
         "shared room": {"Shared room"}, None: {"Entire home/apt", "Private room", "Shared room"},
         "not shared room": {"Entire home/apt", "Private room"}}


def check_hotels(wish, shown, said):
    """Check a thought on hotels against the list; return the line that takes one."""
    wanted = said.pop(0).removeprefix("wanted: ")
    if wish["room type"] or wish["house rule"]:
        words = wanted.split(", ")
        rooms = {word.removesuffix(" ok") for word in words if word.endswith(" ok")}
        assert rooms == (ROOMS[wish["room type"]] if wish["room type"] else set())
        assert [word for word in words if word.endswith(" no")] == (
            [f"No {wish['house rule']} no"] if wish["house rule"] else [])
    else:
        assert wanted == "any"
    for i, (quote, room, rules, nights) in enumerate(HOTEL.findall(shown)):
        wrong = [room not in ROOMS[wish["room type"]],
                 f"No {wish['house rule']}" in rules.split(" & "), int(nights) > 2]
        line = said[i]
        assert line.startswith(quote) and line.endswith(" no" if any(wrong) else " ok")
        assert line.count(" no") == any(wrong)  # the first of them ends it
        assert ("House Rules" in line) == (not wrong[0])
        assert ("Nights" in line) == (not any(wrong[:2]))
        if not any(wrong):
            assert all(ban in line for ban in rules.split(" & ")) and f"Nights: {nights} ok" in line
            assert said[i + 1:] == [f"Accommodation: {quote[:quote.index(']') + 1]}"]
            return said[-1]
    raise AssertionError("nothing taken")


def check_meals(wish, shown, said):
    """Check a thought on restaurants against the list; return the lines that take three."""
    wishes = wish["cuisine"] or ()
    missing, taken, rows = [*wishes], [], MEAL.findall(shown)
    labels, done = iter(("Breakfast: ", "Lunch: ", "Dinner: ")), []

    def state():
        return "wanted: " + (", ".join(f"{kind} {'ok' if kind in missing else 'done'}"
                                       for kind in wishes) or "any")

    lines = [state()]
    for quote, name, kinds in rows:
        if not missing:
            break
        words = {kind: "ok" if kind in missing else "done" if kind in done else "no"
                 for kind in kinds.split(", ")}
        lines.append(quote + ", ".join(f"{kind} {word}" for kind, word in words.items()))
        if "ok" in words.values():
            done += [kind for kind in missing if kind in words]
            missing = [kind for kind in missing if kind not in words]
            taken.append(next(labels) + name)
            lines += [taken[-1], state()]
    others = [name for _, name, _ in rows if all(name not in line for line in taken)]
    fill, names = said[len(lines):], [line.split(": ")[1] for line in said[len(lines):]]
    assert said[:len(lines)] == lines and len(taken + fill) == 3
    assert fill == [next(labels) + name for name in others if name in names]
    return taken + fill


def test_careful_episodes_weigh_rows_rightly_and_answer_with_what_they_took(tmp_path):
    rows = made(tmp_path / "e.jsonl", "drills", "--episodes", "--careful", "0.5",
                "--worlds", 12, "--n", 240, "--seed", SEED)
    careful = [row for row in rows if row["model"] == "solver, careful"]
    assert 80 < len(careful) < 160 and len(rows) == 240
    meals = 0
    for row in rows:
        thoughts = [message["content"].split("</think>")[0].removeprefix("<think>").split("\n")
                    for message in row["messages"] if message["role"] == "assistant"]
        shown = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert row["score"]["success"] == 1
        if row not in careful:
            assert all(len(lines) == 1 for lines in thoughts)
            numbers = re.findall(r"(?:Breakfast|Lunch|Dinner): (\d)", row["answer"])
            assert len(numbers) == 3 and sorted(numbers) == numbers
            continue
        wish = row["task"]["local_constraint"]
        after = {list_: lines[:-1] for list_, lines in zip(shown[1:], thoughts[1:], strict=True)}
        for list_, said in after.items():
            taken = []
            if "SearchAccommodation" in list_:
                taken = [check_hotels(wish, list_, said)]
            elif "SearchRestaurant" in list_:
                taken = check_meals(wish, list_, said)
                meals += wish["cuisine"] is not None
            else:
                assert said == []
            assert all(f"\n{line}\n" in row["answer"] + "\n" for line in taken)
    assert meals > 10


@pytest.mark.parametrize("kind", ["rooms", "rules", "meals"])
def test_a_drill_in_weighing_is_right_about_every_row(kind, mini):
    rng, done = random.Random(SEED), 0
    while done < 40:
        task = synth.sample_task(rng, mini, 3, rng.choice(LEVELS), "tiny", synth.MARCH)
        if task and is_possible(kind, task, mini):
            shown, said = drill_weighing(rng, task | {"budget": 500}, kind, mini)
            check = check_meals if kind == "meals" else check_hotels
            assert check(task["local_constraint"], shown, said.split("\n"))
            done += 1


def test_all_exercises_of_a_careful_share_of_one_say_wishes_or_weigh_rows(tmp_path):
    rows = made(tmp_path / "d.jsonl", "drills", "--careful", "1", "--worlds", 2, "--n", 80,
                "--seed", SEED)
    kinds = Counter("Avg. Cost" in shown["content"] or "Room Type" in shown["content"]
                    for shown, _ in (row["messages"] for row in rows))
    assert min(kinds.values()) > 6 and len(kinds) == 2
    for row in rows:
        said = row["messages"][1]["content"].split("\n")
        assert any(re.search(" (ok|no|done)$", line) for line in said)
