"""The laptop's world: word pools, tables, drills, the 2M model with its tokenizer and induction heads.
"""
import argparse
import csv
import io
import itertools
import math
import os
import random
import re
import sys
import tempfile
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from evaluate import read_jsonl, write_jsonl
from sandbox import SHORT_PROMPT, Episode, Sandbox, open_database
from sft import render  # noqa
from solver import ROOM_TYPES, SEARCHES, drive, legs, modes, turn, venues, way_searches
from synth import (BRIEF, CUISINES, FILLERS, LEVELS, MARCH, MONTHS, RULES, cut, make_episode, make_task, mean_words,
                   numbered, open_once, reserved, sample_task, write_query)

# The word pools of the small worlds. They share no word, so that a word says what kind of place it names, and every
# world draws on the same ones: a tiny model that can copy them copies the names of cities it has never seen.
PREFIXES = "Port Lake Fort North South East West Mount Old Glen".split()
NOUNS = """Marble Fern Harbor Cedar Stone Raven Willow Copper Falcon Maple Ridge Salmon Pepper Anchor Birch
    Canyon Thunder Meadow Saddle Bishop Hollow Juniper Lantern Orchard Badger Prairie Timber Violet Walnut Beacon
    Cobble Dover Ember Foster Garnet Hazel Iron Jasper Keller Linden Mason Nutmeg Otter Parker Quarry Rocket Summit
    Tanner Union Vernon Weaver Yarrow Acorn Barrel Candle Dagger Elder Fiddle Ginger Marlin""".split()
STATES = """Norland Westmark Ardenia Calvara Dorwin Estora Falmont Galdor Helmsey Istmark Jorvale Kelvany Lorwick
    Mandova Navarra Orvale Pelham Quillon Rosmere Sundal""".split()
HOTEL_WORDS = """Quiet Cozy Sunny Royal Modern Rustic Grand Humble Charming Elegant Spacious Peaceful Secluded
    Historic Urban Simple Bright Shady Lofty Snug Tidy Gentle Noble Stately Breezy Comfy Dreamy Homely Mellow Pretty
    Restful Serene Tranquil Upscale Vintage Welcome Leafy Placid Polished Regal""".split()
HOTEL_NOUNS = "Inn Lodge House Suites Loft Cabin Hotel Manor Villa Rooms".split()
MEAL_WORDS = """Amber Golden Spicy Smoky Salty Sweet Hungry Lucky Crispy Rusty Savory Tasty Zesty Buttery Creamy
    Toasted Roasted Grilled Juicy Peppery Saucy Steamy Sizzling Tangy Velvet Crimson Scarlet Jolly Merry Happy
    Hearty Busy Plump Cheery Fresh Frosty Honey Garlic Sesame Basil""".split()
MEAL_NOUNS = "Grill Kitchen Cafe Diner Bistro Tavern Table Spoon Oven Plate".split()
SIGHT_WORDS = """Silver Ancient Crystal Emerald Hidden Sacred Marine Floral Botanic Solar Lunar Cosmic Civic
    Coastal Arctic Alpine Tropical Wild Giant Tiny Famous Mystic Misty Mossy Sandy Rocky Windy Snowy Starry Stormy
    Painted Carved Wooden Bronze Ivory Sapphire Cobalt Indigo Jade Pearl""".split()
SIGHT_NOUNS = "Park Museum Tower Garden Bridge Zoo Gallery Fountain Market Theatre".split()
WINDING = 1.25  # km by road per km as the crow flies, in the small worlds
# ---- world --------------------------------------------------------------------------------------------------------
def make_world(seed, dates=MARCH):
    """The tables of a small world as {path in the database folder: text}. The same seed gives the same bytes."""
    rng = random.Random(f"world/{seed}")
    states, where = make_map(rng)
    hotels, meals, sights = make_places(rng, states, where)
    roads, flights = make_roads(rng, where), make_flights(rng, states, where, dates)
    lines = [f"{city}\t{state}" for state, cities in states.items() for city in cities]
    return {
        "background/citySet_with_states.txt": "\n".join(lines),
        "clean_accommodations_2022.csv": to_csv(",NAME,room type,price,minimum nights,review rate number,"
                                                "house_rules,maximum occupancy,city", hotels),
        "clean_restaurant_2022.csv": to_csv(",Name,City,Cuisines,Average Cost,Aggregate Rating", meals),
        "attractions.csv": to_csv("Name,Latitude,Longitude,Address,Phone,Website,City", sights),
        "distance.csv": to_csv("origin,destination,cost,duration,distance", roads),
        "clean_Flights_2022.csv": to_csv("Flight Number,Price,DepTime,ArrTime,ActualElapsedTime,FlightDate,"
                                         "OriginCityName,DestCityName,Distance", flights),
    }


def to_csv(head, rows):
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head.split(","), *rows])
    return out.getvalue()


def make_map(rng):
    """14 states of 3 or 4 cities on a plane: {state: [city]}, {city: (x, y) in km}.

    Every noun names two cities of different states, so that a reserved city's words are met in training all the same.
    """
    nouns = rng.sample(NOUNS, 24)
    sizes = [4] * 6 + [3] * 8  # 48 cities
    rng.shuffle(sizes)
    names = []
    for noun in nouns + rng.sample(nouns, 24):
        used = {name.split()[0] for name in names if name.endswith(noun)} | {name.split()[0] for name in names[-2:]}
        names.append(f"{rng.choice([p for p in PREFIXES if p not in used])} {noun}")
    states, where = {}, {}
    for state, size in zip(rng.sample(STATES, 14), sizes):
        x, y = rng.uniform(0, 5200), rng.uniform(0, 2600)
        states[state] = [names.pop() for _ in range(size)]
        for city in states[state]:
            where[city] = (x + rng.uniform(-180, 180), y + rng.uniform(-180, 180))
    return states, where


def make_places(rng, states, where):
    """The rows of hotels, of restaurants and of attractions."""
    hotels, meals, sights = [], [], []
    for cities in states.values():
        # no two cities of a state share a first word: what an observation says cannot be mixed up with the next one
        beds, foods, views = (rng.sample(pool, len(pool)) for pool in (HOTEL_WORDS, MEAL_WORDS, SIGHT_WORDS))
        for city in cities:
            base = rng.choice((60, 80, 100, 130))  # dollars a night
            hotels += [make_hotel(rng, beds.pop(), base, city) for _ in range(rng.choice((3, 4, 4)))]
            for _ in range(rng.choice((6, 6, 6, 7))):
                kinds = rng.sample(CUISINES, 2) if rng.random() < 0.4 else [rng.choice(CUISINES), rng.choice(FILLERS)]
                meals.append([f"{foods.pop()} {rng.choice(MEAL_NOUNS)}", city, ", ".join(kinds), rng.randint(10, 70),
                              rng.randint(20, 49) / 10])
            x, y = (round(km / 100, 2) for km in where[city])
            for _ in range(3):
                noun, address = rng.choice(SIGHT_NOUNS), f"{rng.randint(1, 9)} {rng.choice(NOUNS)} St"
                sights.append([f"{views.pop()} {noun}", x, y, address, rng.randint(100, 999),
                               f"{noun.lower()}.org" if rng.random() > 0.03 else "", city])
    for rows in (hotels, meals, sights):
        rng.shuffle(rows)
    return [[i, *row] for i, row in enumerate(hotels)], [[i, *row] for i, row in enumerate(meals)], sights


def make_hotel(rng, word, base, city):
    room = rng.choices(tuple(ROOM_TYPES.values()), (5, 5, 2))[0]
    rules = " & ".join(f"No {rule}" for rule in rng.sample(RULES, rng.choice((1, 1, 2))))
    if rng.random() < 0.04:
        rules = ""  # an incomplete row, which the sandbox drops as it does the official ones
    price = 10.0 * round(base * rng.uniform(0.5, 2.2) * (0.6 if room == "Shared room" else 1) / 10)
    nights, people = float(rng.choice((1, 1, 2, 2, 3, 3))), rng.choice((1, 2, 2, 3, 4, 6))
    return [f"{word} {rng.choice(HOTEL_NOUNS)}", room, price, nights, float(rng.randint(1, 5)), rules, people, city]


def make_roads(rng, where):
    """Rows of distance.csv: most pairs, some with no row, some empty, some of more than a day, one of them twice."""
    rows = []
    for i, a in enumerate(where):
        for b in list(where)[i + 1:]:
            fate, km = rng.random(), max(20, round(WINDING * math.dist(where[a], where[b])))
            if fate < 0.04:
                continue
            for origin, destination, length in ((a, b, km), (b, a, km + rng.randint(-3, 3))):
                row = [origin, destination, "", road_hours(length), f"{length:,} km"]
                rows.append(row if fate > 0.07 else [origin, destination, "", "", ""])
    rng.shuffle(rows)
    # the official table repeats pairs too, and the first row of a pair counts
    twice = next(row for row in rows if row[3] and "day" not in row[3])
    return rows + [[*twice[:3], "9 mins", "9 km"]]


def road_hours(km):
    """The time of a drive at 90 km/h, in the words of the official table."""
    hours, minutes = divmod(round(km / 90 * 60), 60)
    if hours >= 24:
        return f"{hours // 24} day {hours % 24} hours"
    return f"{hours} hours {minutes} mins" if hours else f"{minutes} mins"


def make_flights(rng, states, where, dates):
    """Rows of the flights table, in the order of their numbers.

    A city flies to all cities of another state, on every second date with some gaps, so that a trip of 3, 5 or 7
    days can fly out and back. Flights shown together differ in the first two digits of their numbers.
    """
    free = {block: rng.sample(range(100), 100) for block in range(10, 100)}  # unused numbers by their first two digits
    rows = []
    for a, b, odd in make_links(rng, states, where):
        km, fare = math.dist(where[a], where[b]), rng.uniform(0.05, 0.09)
        for (origin, destination), date in itertools.product(((a, b), (b, a)), dates[odd::2]):
            if rng.random() < 0.1:
                continue
            for block in rng.sample([b for b in free if free[b]], rng.choice((2, 2, 2, 3))):
                minutes, start = round(30 + km / 13 + rng.randint(-9, 9)), rng.randrange(300, 1200, 5)
                price = round(30 + fare * km * rng.uniform(0.5, 1.8))
                clock = [f"{time // 60 % 24:02d}:{time % 60:02d}" for time in (start, start + minutes)]
                rows.append([f"F{block}{free[block].pop():02d}", price, *clock,
                             f"{minutes // 60} hours {minutes % 60} minutes", date, origin, destination,
                             float(round(km / 1.609))])
    return sorted(rows)


def make_links(rng, states, where):
    """Which cities have flights: [(city, city, parity of their dates)]. Nearly all of them are too far to drive."""
    links, degree = [], dict.fromkeys(where, 0)
    for city in rng.sample(list(where), 33):
        least = 2160 if len(links) % 9 else 600  # km by road
        far = [s for s in states if city not in states[s]
               and min(WINDING * math.dist(where[city], where[c]) for c in states[s]) > least]
        if not far:
            continue
        state = min(rng.sample(far, len(far)), key=lambda s: max(degree[c] for c in states[s]))
        odd = rng.randrange(2)
        for other in states[state]:
            if not any({city, other} == {a, b} for a, b, _ in links):
                links.append((city, other, odd))
                degree[city], degree[other] = degree[city] + 1, degree[other] + 1
    return links


def write_world(folder, seed, dates=MARCH):
    for name, text in make_world(seed, dates).items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def world(a):
    write_world(a.out, a.seed)


# ---- drills -------------------------------------------------------------------------------------------------------
def drills(a):
    """What a tiny model learns from in place of a pre-trained one's knowledge: short exercises, or whole episodes, of
    worlds other than the one it will play in. In a single world it would learn names by heart and not copy them."""
    a.like, a.prompt, a.days, a.levels, a.split = "tiny", SHORT_PROMPT, [3], [4, 3, 3], "train"
    a.styles = {"direct": 1}
    with get_context("fork").Pool(a.workers) as pool:
        rows = [row for part in pool.imap(partial(world_rows, a), range(a.worlds)) for row in part]
    random.Random(a.seed).shuffle(rows)
    write_jsonl(a.out, rows)
    print(f"{len(rows)} {'episodes' if a.episodes else 'drills'} from {a.worlds} worlds, "
          f"{mean_words(row['messages'] for row in rows):.0f} words each")


def world_rows(a, w):
    """World w's share of a.n rows. Its episodes, all successful, keep clear of the pairs and the dates of the small
    world's held-out tasks, and of the cities that stand for the unseen ones there. Worlds differ in their month: of one
    alone, the days on which no trip may start would never be learnt as such."""
    a.dates = MONTHS[w % 12]
    with tempfile.TemporaryDirectory() as folder:
        write_world(folder, f"{a.seed}.{w}", a.dates)
        if a.episodes:
            own = {"database": folder, "prefix": f"world-{w}", "seed": f"{a.seed}.{w}"}
            here = argparse.Namespace(**(vars(a) | own))
            unseen, drawn = reserved(open_once(None)), (make_task(here, index) for index in itertools.count())
            rows = (make_episode(here, task) for task in drawn if task and not unseen & {task["org"], task["dest"]})
            rows = (row for row in rows if "messages" in row)
        else:
            rng, database = random.Random(f"drills/{a.seed}/{w}"), open_database(folder)
            rows = (make_drill(rng, database, a.dates) for _ in itertools.count())
        return list(itertools.islice(rows, cut(a.n, w, w + 1, a.worlds)))


def make_drill(rng, database, dates):
    """One exercise in copying what is shown: a query's next search for its way out or back, flights out and back, or
    the lists of a city in another order."""
    kind, can = rng.choices(("air", "road", "flights", "lists"), (2, 1, 1, 6))[0], False
    while not can:
        if task := sample_task(rng, database, rng.choice(LEVELS), 3, "tiny", dates):
            city, ends = task["dest"], legs(task, [task["dest"]], [2])
            can = {"air": "air" in modes(task) and all(database.flights(*end) for end in ends),
                   "road": "road" in modes(task) and all(drive(database, a, b) for a, b, _ in ends),
                   "flights": all(database.flight_dates(a, b) for a, b, _ in ends), "lists": True}[kind]
    task["budget"] = 10 * rng.randint(20, 300)
    see = lambda tool, **arguments: Episode.observation_message(Sandbox(database).call(tool, arguments))
    if kind in ("air", "road"):
        if kind == "road" and database.flights(*ends[0]):
            task["local_constraint"]["transportation"] = "no flight"  # else it would be gone by air
        way = {"air": "Flight", "road": "Self-driving"}[kind]
        steps = [step for a, b, date in ends for step in way_searches(task, kind, a, b, date, way)]
        done = rng.randrange(len(steps))
        shown = "\n".join([write_query(rng, task, BRIEF), *(see(tool, **words) for _, tool, words in steps[:done])])
        said = turn(*steps[done])
    elif kind == "flights":
        rides = [(a, b, rng.choice(database.flight_dates(a, b))) for a, b, _ in rng.sample(ends, 2)]
        shown = "\n".join(see("SearchFlight", departure=a, destination=b, date=date) for a, b, date in rides)
        said = "\n".join(f"Flight from {a} to {b} [{rng.choice(database.flights(a, b, date)).number}]"
                         for a, b, date in rng.sample(rides, 2))
    else:
        lists = rng.sample(list(SEARCHES.items()), len(SEARCHES))
        shown = "\n".join(see(tool, city=city) for _, (tool, _) in lists)
        lines = [f"{rng.choice(labels)}: [{name}]" for table, (_, labels) in lists if table != "hotels"
                 for name in venues(database, table, city)]
        hotels = [name for name, rows in venues(database, "hotels", city).items()
                  if all(row.minimum_nights <= 2 for row in rows)]  # of a trip of three days
        lines += [f"Accommodation: [{rng.choice(hotels)}]"] if hotels else []
        said = numbered("\n".join(rng.sample(lines, len(lines))), shown)
    return {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]}


# ------------------------------------------------------------------------------------------------------------ tiny

# What the tools and the protocol say over and over, and the pairs of digits: a token each, so that episodes are short.
# " [" stands before every name, in observations and answers alike: there induction heads find all names at once.
PHRASES = [f"{i:02d}" for i in range(100)] + [f"{to}2022-{i:02d}-" for to in ("", " to ") for i in range(1, 13)] + """
system
user
assistant
<think>@</think>@<tool_call>@</tool_call>@<tool_response>@</tool_response>@<answer>@</answer>@"}}
{"name": "SearchFlight", "arguments": {"departure": "
{"name": "SearchAccommodation", "arguments": {"city": "
{"name": "SearchRestaurant", "arguments": {"city": "
{"name": "SearchAttraction", "arguments": {"city": "
{"name": "SearchCity", "arguments": {"state": "
{"name": "GoogleDistanceMatrix", "arguments": {"departure": "
", "destination": "@", "date": "@", "mode": "
A SearchFlight for@A SearchAccommodation for@A SearchRestaurant for city@A SearchAttraction for city
There is no available flight from@found the following @ flights:@ accommodations:@ restaurants:@ attractions:
. Please rethink your flight search and try again.
A GoogleDistanceMatrix found the following information:@, duration: @, distance: @, cost: $
. Departure: @, Arrival: @, Actual Elapsed Time: @ hours @ minutes, Distance: @.0 miles
.0. Room Type: @Entire home/apt@Private room@Shared room@, House Rules: @, Minimum Nights:@.0, Maximum Occupancy:
, Review Rate Number:@No pets@No smoking@No parties@No visitors@No children under 10
] Avg. Cost $@. Cuisines: @. Rating: @) Address: @. Contact: @] $@ [@](@Flight from@Self-driving from@Taxi from
Breakfast:@Attraction:@Lunch:@Dinner:@Accommodation:""".strip("\n").replace("\n", "@").split("@")
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


@torch.no_grad()
def embed_classes(lm, rows, rank=32):
    """Embed tokens half at random and half by their neighbours in the rows of ids: tokens of a kind (names of hotels,
    digits) start alike, as in any trained model. Positive pointwise mutual information with the token before and the
    token after, and its largest singular vectors (Levy and Goldberg, 2014)."""
    size, width = lm.model.embed_tokens.weight.shape
    counts = torch.zeros(size, 2 * size)
    for ids in map(torch.tensor, rows):
        counts.index_put_((ids[1:], ids[:-1]), torch.ones(1), accumulate=True)
        counts.index_put_((ids[:-1], size + ids[1:]), torch.ones(1), accumulate=True)
    chance = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    u, s, _ = torch.svd_lowrank((counts / chance.clamp(min=1e-9)).clamp(min=1).log(), q=rank)
    kinds = torch.nn.functional.normalize(u * s.sqrt(), dim=-1) @ torch.linalg.qr(torch.randn(width, rank))[0].T
    lm.model.embed_tokens.weight.copy_(0.1 * 0.5**0.5 * (torch.randn(size, width) + kinds * width**0.5))


@torch.no_grad()
def wire_induction(lm):
    """Give a random tiny Qwen2 what every pre-trained model has: induction heads, which find the last place where the
    current token stood and say what came after it (arXiv:2209.11895). Training would spend most of its budget on it.

    Heads of layer 0 look one token back, by their biases: b and b turned by one position meet at distance 1 under RoPE,
    and its fast frequencies make that sharp. What they read they write into a subspace Q, in which heads of layer 1
    look for the current token; its slow frequencies leave the meeting alone at any distance. The token found is written
    out as it was embedded, which the head, starting as the embedding, reads as that token.
    """
    config = lm.config
    lm.lm_head.weight.copy_(lm.model.embed_tokens.weight)
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    back, find = lm.model.layers[0].self_attn, lm.model.layers[1].self_attn
    d = config.hidden_size // config.num_attention_heads
    share = config.num_attention_heads // config.num_key_value_heads  # queries of one key
    angle = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2) / d)  # radians per token, (d / 2,)
    fast, slow = 6.0 * (angle > 0.02), 2.0 * (angle < 0.002).repeat(2)[:, None]
    subspace = lambda: torch.linalg.qr(torch.randn(config.hidden_size, d))[0]  # (H, d), orthonormal columns
    for key in range(config.num_key_value_heads):
        q, kv = slice(key * share * d, (key * share + 1) * d), slice(key * d, (key + 1) * d)
        previous, written, said = subspace(), subspace(), subspace()
        back.q_proj.bias[q] = torch.cat([fast, 0 * fast])
        back.k_proj.bias[kv] = torch.cat([fast * angle.cos(), fast * angle.sin()])
        back.v_proj.weight[kv], back.o_proj.weight[:, q] = 0.3 * previous.T, written
        find.q_proj.weight[q], find.k_proj.weight[kv] = slow * previous.T, slow * written.T
        find.v_proj.weight[kv], find.o_proj.weight[:, q] = 8.0 * said.T, said  # loud: it may find many tokens at once


def make_tiny(corpus, out, seed, width=192, vocabulary=2048):
    """Write a random Qwen2 of 4 layers (untied embeddings) and a byte-level BPE made from jsonl files of messages.

    Made for copying: words are split from their punctuation and numbers into pairs of digits, so that a name, a flight
    number or a date is the same few tokens wherever it stands.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    conversations = [row["messages"] for path in corpus for row in read_jsonl(path)]
    texts = [message["content"] for messages in conversations for message in messages]
    bpe = Tokenizer(models.BPE())
    # Qwen's own split (transformers puts it into every Qwen2 tokenizer it loads)
    pieces = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                   r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pieces, "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    without = re.compile("|".join(map(re.escape, sorted(PHRASES, key=len, reverse=True))))
    texts = [piece for text in texts for piece in without.split(text)]  # the merges see what the phrases leave
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special,
        show_progress=False))
    bpe.add_special_tokens(special)
    bpe.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        chat_template=CHATML, clean_up_tokenization_spaces=False)
    torch.manual_seed(seed)
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64, num_hidden_layers=4,
        num_attention_heads=width // 32, num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=False,  # tied weights go stale in vLLM's CPU build
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None))
    embed_classes(lm, [render(messages, tokenizer)[0] for messages in conversations[:3000]])
    wire_induction(lm)
    lm.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in lm.parameters()) / 1e6:.1f}M random parameters, {len(tokenizer)} tokens")


# -------------------------------------------------------------------------------------------------------- main


def model(a):
    make_tiny(a.corpus, a.out, a.seed, a.width)


def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    add = {}
    for function, words in ((world, "the tables of a small world"), (drills, "exercises or episodes from other worlds"),
                            (model, "a random Qwen2 of 2M parameters and its tokenizer")):
        command = commands.add_parser(function.__name__, help=words)
        command.set_defaults(run=function)
        command.add_argument("--seed", type=int, default=0, help="the same seed gives the same files")
        command.add_argument("--out", required=True, help="what is written")
        add[function] = command.add_argument
    add[drills]("--n", type=int, default=4000, help="how many")
    add[drills]("--worlds", type=int, default=8, help="drawn from this many worlds")
    add[drills]("--episodes", action="store_true", help="whole episodes of the solver, not short exercises")
    add[drills]("--workers", type=int, default=os.cpu_count(), help="processes; what is written does not depend on it")
    add[model]("--corpus", nargs="+", required=True, metavar="JSONL", help="files of messages to make the tokenizer of")
    add[model]("--width", type=int, default=192, help="hidden size, in heads of 32; 192: 2M parameters")
    return p.parse_args(argv)


def main(argv=None):
    a = flags(argv)
    a.run(a)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"tiny.py: {error}")
