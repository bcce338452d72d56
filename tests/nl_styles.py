"""
Itineraries with known plans, for test_format_plan.py: random honest plans of a database, a third of
them spoilt on purpose, each written the way some language model writes. TEST_SEED (default 0) in
the environment changes all that is drawn.

    python tests/nl_styles.py DATABASE STYLE     one example of a style, and its plan
"""
import datetime
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
from format_plan import FIELDS, MEALS
from sandbox import Database

SLOTS = FIELDS[2:]
TEST_SEED = os.environ.get("TEST_SEED", "0")


def random_of(purpose):
    """The random numbers of one purpose."""
    return random.Random(f"{TEST_SEED} {purpose}")


# ---------------------------------------------------------------- plans
def random_task(database, rng):
    """A task with a round trip that can be served by road; flights are used where some exist."""
    stays = [city for city in database.hotel_cities
             if database.restaurants(city) and len(database.attractions(city)) >= 3]
    while True:
        days = rng.choice((3, 3, 5, 7))
        cities = rng.sample(stays, (days + 1) // 2)
        ways = zip(cities, cities[1:] + cities[:1], strict=True)
        legs = [database.distance(a, b) for a, b in ways]
        if all(leg and leg.km for leg in legs):
            start = datetime.date(2022, 3, rng.randint(1, 24))
            date = [str(start + datetime.timedelta(i)) for i in range(days)]
            return {"org": cities[0], "dest": cities[1], "days": days, "cities": cities[1:],
                    "people_number": rng.randint(1, 5), "date": date, "query": "", "budget": 5000}


def random_plan(task, database, rng):
    """A plan for a task: travel on every other day, no restaurant twice, some slots left empty."""
    stops, plan, eaten = [task["org"], *task["cities"], task["org"]], [], set()
    for i in range(task["days"]):
        travel, last = i % 2 == 0, i == task["days"] - 1
        start, end = stops[i // 2 + (not travel)], stops[i // 2 + 1]
        here = start if last else end
        there = {start, end} - {here}
        day = {"day": i + 1, "current_city": end, "transportation": "-"}
        if travel:
            day["current_city"] = f"from {start} to {end}"
            day["transportation"] = random_ride(start, end, task["date"][i], database, rng)
        for meal in MEALS:
            rows = [row for row in database.restaurants(here)
                    if row.name not in eaten and lone(row.name, database.restaurants, there)]
            skip = travel and rng.random() < 0.4
            row = None if skip or not rows else rng.choice(rows)
            eaten.add(row and row.name)
            day[meal] = f"{row.name.strip()}, {here}" if row else "-"
        rows = [row for row in database.attractions(here)
                if lone(row.name, database.attractions, there) and ";" not in row.name]
        chosen = rng.sample(rows, min(len(rows), rng.choice((0, 1, 1) if travel else (1, 2, 3))))
        day["attraction"] = "".join(f"{row.name.strip()}, {here};" for row in chosen) or "-"
        day["accommodation"] = "-" if last or travel else plan[-1]["accommodation"]
        if travel and not last:
            day["accommodation"] = f"{rng.choice(database.hotels(end)).name.strip()}, {end}"
        plan.append(day)
    return plan


def values_of(day, slot):
    """The venues of a slot."""
    if slot == "attraction":
        return [value for value in day[slot].split(";") if value and value != "-"]
    return [] if day[slot] == "-" else [day[slot]]


def lone(name, list_of, others):
    """No other city has this name: what a venue's city is on a day of travel must be decidable."""
    return not any(row.name == name for city in others for row in list_of(city))


def random_ride(a, b, date, database, rng):
    flights = database.flights(a, b, date)
    if flights and rng.random() < 0.8:
        flight = rng.choice(flights)
        return (f"Flight Number: {flight.number}, from {a} to {b}, "
                f"Departure Time: {flight.departure}, Arrival Time: {flight.arrival}")
    road, taxi = database.distance(a, b), rng.random() < 0.3
    mode, cost = ("Taxi", int(road.km)) if taxi else ("Self-driving", int(road.km * 0.05))
    return (f"{mode}, from {a} to {b}, duration: {road.duration}, distance: {road.distance}, "
            f"cost: {cost}")


INVENTED = ("The Velvet Lantern", "Juniper & Rye", "Old Mill Overlook", "Casa Perdida",
            "Harborlight House", "Museum of Lost Keys")


def spoil(plan, database, rng):
    """Two to four faults: invented or misspelt names, wrong cities and flights, gaps."""
    for _ in range(rng.randint(2, 4)):
        day = rng.choice(plan)
        slot = rng.choice([s for s in (*SLOTS, "transportation") if day[s] != "-"] or ["day"])
        if slot == "transportation":
            day[slot] = re.sub(r"F\d+", lambda number: number[0][:-2] + "00", day[slot])
        if slot in ("transportation", "day"):
            continue
        first, *rest = values_of(day, slot)
        name, city = first.rsplit(", ", 1)
        fault = rng.choice(("invent", "misspell", "omit", "city"))
        if fault == "invent":
            name = rng.choice(INVENTED)
        elif fault == "misspell" and len(name) > 6:
            cut = rng.choice([i for i, c in enumerate(name[1:-2], 1) if c.isalpha()] or [1])
            name = name[:cut] + name[cut + 1:]
        elif fault == "city":
            city = rng.choice([c for c in database.cities if c not in day["current_city"]])
        values = rest if fault == "omit" else [f"{name}, {city}", *rest]
        end = ";" if slot == "attraction" else ""
        day[slot] = "".join(value + end for value in values) or "-"


# ---------------------------------------------------------------- pieces
class Ride(NamedTuple):
    mode: str
    number: str
    start: str
    end: str
    leaves: str
    lands: str
    duration: str
    distance: str
    cost: str


class Writer:
    """What a style needs of a plan. A venue's city is written only where it is not the day's."""

    def __init__(self, task, plan, database, rng):
        self.task, self.plan, self.database, self.rng = task, plan, database, rng

    def ends(self, day):
        start, _, end = day["current_city"].removeprefix("from ").partition(" to ")
        return start, end or start

    def title(self, day):
        start, end = self.ends(day)
        return f"{start} to {end}" if start != end else end

    def date(self, day, form="%B %d"):
        date = datetime.date.fromisoformat(self.task["date"][day["day"] - 1])
        return date.strftime(form).replace(" 0", " ")

    def place(self, day, value, full=False):
        """ "Name, City" -> "Name", or with its city where that must be said."""
        name, city = value.rsplit(", ", 1)
        start, end = self.ends(day)
        here = start if end == self.task["org"] else end
        return f"{name}, {city}" if full or city != here else name

    def cuisine(self, value):
        name, city = value.rsplit(", ", 1)
        row = next((row for row in self.database.restaurants(city) if row.name == name), None)
        return (row.cuisines, row.cost) if row else ("American, Cafe", 31)

    def night(self, value):
        name, city = value.rsplit(", ", 1)
        rows = self.database.hotels(city)
        row = next((row for row in rows if row.name.strip() == name), None)
        return (int(row.price), row.room_type, int(row.minimum_nights)) if row \
            else (88, "Private room", 1)

    def ride(self, day):
        text = day["transportation"]
        start, end = re.search(r"from (.+?) to ([^,]+)", text).groups()
        number = re.search(r"F\d+", text)
        times = re.findall(r"\d\d:\d\d", text) if number else ("", "")
        road = re.search(r"duration: (.*), distance: (.*), cost: (\d+)", text)
        return Ride(re.match(r"[^ ,]+", text)[0], number and number[0], start, end, *times,
                    *(road.groups() if road else ("", "", "120")))

    def ride_text(self, day, form):
        """A ride with pipes, parentheses, an arrow or in prose; "" where there is none."""
        if day["transportation"] == "-":
            return ""
        ride = self.ride(day)
        way = f"from {ride.start} to {ride.end}"
        if ride.number:
            return {
                "pipe": f"Flight {way} [{ride.number}] | ${ride.cost} | "
                        f"Departure: {ride.leaves} | Arrival: {ride.lands}",
                "paren": f"Flight {ride.number} {way} ({ride.leaves} - {ride.lands}), ${ride.cost}",
                "prose": f"take flight {ride.number} {way}, departing at {ride.leaves} and "
                         f"arriving at {ride.lands}",
                "arrow": f"✈️ {ride.start} → {ride.end}, Flight {ride.number}, "
                         f"{ride.leaves}–{ride.lands}"}[form]
        taxi = ride.mode == "Taxi"
        word = "Taxi" if taxi else self.rng.choice(("Drive", "Self-driving"))
        return {
            "pipe": f"{word} {way}" + (f" | Cost: ${ride.cost}" if taxi
                                       else f" ({ride.duration}, ${ride.cost})"),
            "paren": f"{word} {way} ({ride.distance}, {ride.duration}), cost ${ride.cost}",
            "prose": f"{'take a taxi' if taxi else 'drive'} {way} "
                     f"({ride.duration}, about ${ride.cost})",
            "arrow": f"🚗 {word}: {ride.start} → {ride.end}, {ride.duration}, ${ride.cost}"}[form]


NOTES = """
### Cost Summary
- Transportation: $240
- Accommodation: {hotel} x 2 nights = $410
- Meals: {meal} and others, $150
| Day | Cost |
|---|---|
| 1 | $210 |
| 2 | $180 |
**Total: $800**, well within the budget.

**Key highlights**
- Dinner at {meal} is a favourite of ours
- Stay at {hotel} for comfort
Note: Day 1 starts early. Prices are per person. Enjoy your trip!"""


def notes(w):
    """What models add after the last day: tables and remarks that repeat names."""
    meals = [value for day in w.plan for meal in MEALS for value in values_of(day, meal)]
    hotels = [value for day in w.plan for value in values_of(day, "accommodation")]
    meal, hotel = [*meals, "Somewhere, X"][0], [*hotels, "Some Inn, X"][0]
    return NOTES.format(meal=meal.rsplit(", ", 1)[0], hotel=hotel.rsplit(", ", 1)[0])


def table_text(rows, rule):
    """Rows of cells as a markdown table; the first is its head, and the rule stands below it."""
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    head, *lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([head, "|" + f"{rule}|" * len(rows[0]), *lines])


# ---------------------------------------------------------------- styles
def compact(w):
    lines = []
    for day in w.plan:
        lines.append(f"Day {day['day']}: {w.title(day)}")
        if day["transportation"] != "-":
            ride = w.ride(day)
            number = f" [{ride.number}]" if ride.number else ""
            lines.append(f"{ride.mode} from {ride.start} to {ride.end}{number}")
        for slot in SLOTS:
            places = [w.place(day, value) for value in values_of(day, slot)]
            lines += [f"{slot.capitalize()}: [{place}]" for place in places]
    return "\n".join(lines)


def fields(w):
    blocks = ["Travel Plan:"]
    for day in w.plan:
        lines = [f"Day {day['day']}:", f"Current City: {day['current_city']}",
                 f"Transportation: {day['transportation']}"]
        for slot in SLOTS:
            lines.append(f"{slot.capitalize()}: {'; '.join(values_of(day, slot)) or '-'}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def agent(w):
    """Like trained STAR models."""
    lines = [f"# {w.task['days']}-Day Trip, {w.task['date'][0]} (Budget: $5,000)", ""]
    for day in w.plan:
        start, end = w.ends(day)
        travels = start != end
        title = f"Travel from {start} to {end}" if travels else f"Explore {end}"
        lines.append(f"## Day {day['day']}: {w.date(day)} - {title}")
        if ride := w.ride_text(day, "pipe"):
            lines.append(f"- {ride}")
        hotel = []
        for value in values_of(day, "accommodation"):
            price, _, nights = w.night(value)
            verb = "Check into" if travels else "Stay at"
            hotel = [f"- {verb} [{w.place(day, value)}] | ${price}/night | "
                     f"Minimum Nights: {nights}"]
        lines += hotel if travels else []
        for slot in SLOTS[:-1]:
            parts = zip(("Morning", "Afternoon", "Evening"), values_of(day, slot), strict=False)
            for part, value in parts:
                kinds, cost = w.cuisine(value)
                line = f"At {w.place(day, value)} ({kinds}) | Avg. Cost: ${cost}/person"
                visit = f"- {part} Attraction: Visit {w.place(day, value)}"
                lines.append(visit if slot == "attraction" else f"- {slot.capitalize()}: {line}")
        lines += [*([] if travels else hotel), ""]
    return "\n".join(lines) + notes(w)


def bold(w):
    lines = ["Here is your itinerary:", ""]
    for day in w.plan:
        lines += [f"**Day {day['day']} ({w.date(day)}th)**", f"- **City:** {w.title(day)}"]
        if ride := w.ride_text(day, "paren"):
            lines.append(f"- **Transportation:** {ride}")
        for meal in MEALS:
            lines += [f"- **{meal.capitalize()}:** {value} (${w.cuisine(value)[1]} per person)"
                      for value in values_of(day, meal)]
        if sights := values_of(day, "attraction"):
            lines.append("- **Attractions:** " + "; ".join(sights))
        lines += [f"- **Accommodation:** {value} - ${w.night(value)[0]} per night"
                  for value in values_of(day, "accommodation")]
        lines.append("")
    return "\n".join(lines) + notes(w)


def table(w):
    """Days are rows."""
    rows = [["Day", "City", "Transportation", "Breakfast", "Attractions", "Lunch", "Dinner",
             "Accommodation"]]
    for day in w.plan:
        cells = ["; ".join(values_of(day, slot)) or "-" for slot in SLOTS]
        rows.append([str(day["day"]), w.title(day), w.ride_text(day, "paren") or "-", *cells])
    return "Your plan at a glance:\n\n" + table_text(rows, "---") + "\n" + notes(w)


def day_tables(w):
    """One table per day, slots are rows."""
    out = []
    for day in w.plan:
        rows = [["Time", "Activity", "Details", "Cost"]]
        if ride := w.ride_text(day, "paren"):
            rows.append(["07:00", "Transportation", ride, "$50"])
        for clock, slot in (("08:00", "breakfast"), ("12:30", "lunch"), ("19:00", "dinner"),
                            ("14:00", "attraction"), ("21:00", "accommodation")):
            for value in values_of(day, slot):
                cost = "Free" if slot == "attraction" else f"${w.cuisine(value)[1]}"
                cost = f"${w.night(value)[0]}" if slot == "accommodation" else cost
                rows.append([clock, slot.capitalize(), w.place(day, value), cost])
        out += [f"### Day {day['day']} – {w.date(day, '%A, %B %d')}: {w.title(day)}", "",
                table_text(rows, ":---:"), ""]
    return "\n".join(out)


def as_json(w):
    plan = [{**day, "attraction": values_of(day, "attraction")} if w.rng.random() < 0.5 else day
            for day in w.plan]
    value = plan if w.rng.random() < 0.5 else {"plan": plan}
    text = json.dumps(value, indent=w.rng.choice((None, 2)), ensure_ascii=False)
    return f"Sure! Here is the plan:\n```json\n{text}\n```\nLet me know if you need changes."


def prose(w):
    """A paragraph per day."""
    out = ["I have put together the following trip for you."]
    for day in w.plan:
        place = {slot: [w.place(day, value) for value in values_of(day, slot)] for slot in SLOTS}
        parts = [f"Start with breakfast at {name}." for name in place["breakfast"]]
        if ride := w.ride_text(day, "prose"):
            parts.append(f"{'Then' if parts else 'First,'} {ride}.")
        verbs = ("Visit", ", then explore", ", and finally visit")
        sights = zip(verbs, place["attraction"], strict=False)
        if place["attraction"]:
            parts.append("".join(f"{verb} {name}" for verb, name in sights) + ".")
        parts += [f"Have lunch at {name}." for name in place["lunch"]]
        parts += [f"In the evening, enjoy dinner at {name} (${w.cuisine(day['dinner'])[1]})."
                  for name in place["dinner"]]
        parts += [f"Stay overnight at {name}." for name in place["accommodation"]]
        out.append(f"**Day {day['day']} - {w.date(day)} ({w.title(day)})**\n" + " ".join(parts))
    return ("\n\n".join(out)
            + "\n\nPlease note that Day 1 dinner prices may vary. Have a great trip!")


def schedule(w):
    out = []
    numbers = ("One", "Two", "Three", "Four", "Five", "Six", "Seven")
    for number, day in zip(numbers, w.plan, strict=False):
        out.append(f"Day {number}: {w.title(day)}")
        if ride := w.ride_text(day, "paren"):
            out.append(f"* 06:30 AM - {ride}")
        for clock, meal in (("8:00 AM", "breakfast"), ("12:30 PM", "lunch"), ("7:00 PM", "dinner")):
            out += [f"* {clock} - {meal.capitalize()} at {w.place(day, value)} "
                    f"(~${w.cuisine(value)[1]}/person)" for value in values_of(day, meal)]
            if meal == "breakfast":
                out += [f"* {hour}:00 AM – {hour + 1}:00 AM: Visit {w.place(day, value)}"
                        for hour, value in enumerate(values_of(day, "attraction"), 9)]
        out += [f"* 9:30 PM - Stay at {w.place(day, value)} (${w.night(value)[0]}/night)"
                for value in values_of(day, "accommodation")]
    return "\n".join(out) + "\n\nTotal cost: $1,200"


def nested(w):
    out = []
    for day in w.plan:
        date = w.date(day, "%d %B %Y")
        out.append(f"{day['day']}. **Day {day['day']} – {date}: {w.title(day)}**")
        if ride := w.ride_text(day, "paren"):
            out += ["   - **Transportation:**", f"     - {ride.split(',')[0]}",
                    f"     - Cost: ${w.ride(day).cost}"]
        meals = [(meal, value) for meal in MEALS for value in values_of(day, meal)]
        out += ["   - **Meals:**"] if meals else []
        for meal, value in meals:
            kinds, cost = w.cuisine(value)
            out.append(f"     - *{meal.capitalize()}* – {w.place(day, value)} ({kinds}; ${cost})")
        sights = values_of(day, "attraction")
        out += ["   - **Attractions:**"] if sights else []
        out += [f"     - {w.place(day, value)}" for value in sights]
        for value in values_of(day, "accommodation"):
            price, kind, _ = w.night(value)
            out += ["   - **Accommodation:**", f"     - {w.place(day, value)}",
                    f"     - Price: ${price} per night", f"     - Room type: {kind}"]
    return "## Itinerary\n\n" + "\n".join(out) + "\n" + notes(w)


def one_liners(w):
    """A line per day, parts between pipes."""
    out = []
    for day in w.plan:
        parts = [w.ride_text(day, "paren")]
        for slot in SLOTS:
            places = [w.place(day, value) for value in values_of(day, slot)]
            if slot == "attraction" and places:
                links = [f"[{place}](https://example.com/a?b=1)" for place in places]
                parts.append("Attractions: " + ", ".join(links))
            elif places:
                parts.append(f"{slot.capitalize()}: {places[0]}")
        title = f"Day {day['day']} - {w.date(day)} - {w.title(day)}"
        out.append(f"{title}\n" + " | ".join(filter(None, parts)))
    return "\n".join(out)


def emoji(w):
    icons = {"breakfast": "🍳 Breakfast", "attraction": "📍 Attraction", "lunch": "🥗 Lunch",
             "dinner": "🍽️ Dinner", "accommodation": "🏨 Hotel"}
    out = []
    for day in w.plan:
        out += [f"🗓️ Day {day['day']} — {w.title(day)}"]
        out += filter(None, [w.ride_text(day, "arrow")])
        out += [f"{icon}: {w.place(day, value)}"
                for slot, icon in icons.items() for value in values_of(day, slot)]
    return "\n".join(out) + "\n\n💰 Budget breakdown\nHotel: $300\nDinner: $50"


def dated(w):
    """No day numbers; the city once; what is not there is said in words."""
    out = []
    for day in w.plan:
        out += [f"**{w.date(day, '%A, %B %d, %Y')}**", f"Location: {w.title(day)}",
                "Travel: " + (w.ride_text(day, "pipe") or "None")]
        for slot in SLOTS:
            places = "; ".join(w.place(day, value) for value in values_of(day, slot))
            nothing = "" if places else w.rng.choice(("None", "N/A", "-", "Not included"))
            out.append(f"{slot.capitalize()}: {places or nothing}")
        out.append("")
    return "\n".join(out)


def columns(w):
    """Days are columns."""
    rows = [["", *(f"Day {day['day']}" for day in w.plan)],
            ["City", *(w.title(day) for day in w.plan)],
            ["Transport", *(w.ride_text(day, "paren") or "–" for day in w.plan)]]
    for slot in SLOTS:
        cells = ["; ".join(values_of(day, slot)) or "–" for day in w.plan]
        rows.append([slot.capitalize(), *cells])
    return table_text(rows, " --- ")


STYLES = (compact, fields, agent, bold, table, day_tables, as_json, prose, schedule, nested,
          one_liners, emoji, dated, columns)


HOSTILE = {  # texts that a careless pattern would take hours for
    "letters": "a" * 10**6,
    "null bytes": "Day 1\nLunch: \0\0" + "\0" * 10**6,
    "days": "Day 1\n" * 160_000,
    "brackets": "[" * 10**6,
    "nested JSON": '[{"day":' * 120_000,
    "from": "Day 1\n" + "from " * 200_000,
    "legs": "Day 1\n" + "from a to " * 100_000,
    "cues": "Day 1\n" + "visit X, lunch at " * 50_000,
    "pipes": "|" * 10**6,
    "lists": "Day 1\nAttraction: " + "A, B;" * 200_000,
    "rows": "| Day 1 | x |\n" * 70_000,
    "parentheses": "Day 1\nLunch: X" + "(" * 10**6,
    "blanks in HTML": "<b>" + " " * 10**6 + "\n" * 10**6,
    "cells": "<tr><td>" * 120_000 + "\n" * 10**5 + "<br>" * 10**5,
    "bullets": "Day 1\n" + ("•" * 3900 + "\n") * 250,
    "quotes": "> Day 1\n" * 120_000,
    "literal": "[{'day': " + "-" * 10**6,
    "half a pair": "Day 1 \ud800 lunch at \udfff"}


def examples(database, count, purpose, styles=STYLES):
    """[(style name, task, text, plan)], the styles in turn, every third plan spoilt."""
    rng, out = random_of(purpose), []
    for i in range(count):
        style, task = styles[i % len(styles)], random_task(database, rng)
        plan = random_plan(task, database, rng)
        if i % 3 == 2:
            spoil(plan, database, rng)
        out.append((style.__name__, task, style(Writer(task, plan, database, rng)), plan))
    return out


def same(slot, a, b):
    """Do two values say the same, but for attractions' order, blanks and a ride's small print?"""
    a, b = (" ".join(str(value or "-").split()) for value in (a, b))
    if slot == "attraction":
        a, b = (sorted(filter(None, map(str.strip, value.split(";")))) for value in (a, b))
    if slot == "transportation" and "-" not in (a, b):
        a, b = gist(a), gist(b)
    return a == b


def gist(ride):
    """(mode, flight number, from, to) of a transportation text."""
    mode = next((mode for mode in ("flight", "taxi") if mode in ride.lower()), "driving")
    number = re.search(r"Flight Number: ([^,]*)", ride)
    way = re.search(r"from (.+?) to ([^,]+)", ride)
    return mode, number and number[1], way and way.groups()


if __name__ == "__main__":
    for name, _, text, plan in examples(Database(sys.argv[1]), len(STYLES), "show"):
        if name == sys.argv[2]:
            print(text, json.dumps(plan, indent=1), sep="\n\n")
