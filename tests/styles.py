"""
Itineraries in the styles of language models, with known plans, for tests/test_format_plan.py.

STATED are natural variants of the format that database/prompts/system.txt states, which the rules
must read; they may not make a good plan out of a spoilt one. TEST_SEED (default 0) changes what is
drawn.
"""
import copy
import datetime
import functools
import json
import os
import random
import re

from format_plan import MEALS, SLOTS, itinerary
from travel.solver import solve

TEST_SEED = os.environ.get("TEST_SEED", "0")
TABLES = {**dict.fromkeys(MEALS, "restaurants"), "attraction": "attractions",
          "accommodation": "hotels"}
INVENTED = {  # {}: a name of the database, which the invented one is not
    "restaurants": (
        "The Velvet Lantern", "Sr. Pepe's Hideaway", "No. 9 Noodle Bar", "The Dinner Club",
        "{} - Rooftop Annex", "{}: the Secret Cellar", "{} and Dragon Palace", "New {}",
        "Taxi Stand Tacos", "{} (Upper Side)", "Same Old Diner", "None Better Grill"),
    "attractions": (
        "St. Agnes Garden", "{} - West Wing", "The Hidden {}", "{} at Night",
        "Valley Farm & Dinner Theatre", "{}: the Night Walk", "Free {}"),
    "hotels": (
        "Harborlight House", "Entire Room at a Cozy Cottage", "{} by the Lake", "{} II",
        "The Overnight Inn", "Same Day Suites", "The {}", "Room 4 You, Near the Station")}


def random_of(purpose):
    """A random generator for one purpose."""
    return random.Random(f"{TEST_SEED} {purpose}")


# ---------------------------------------------------------------- plans
def solved(database, count, purpose):
    """[(task, plan)] of the exact solver for random tasks, which all succeed."""
    rng, found = random_of(purpose), []
    while len(found) < count:
        days, org, dest = rng.choice((3, 3, 5)), *rng.sample(sorted(database.cities), 2)
        start = datetime.date(2022, 3, rng.randint(1, 24))
        task = {"id": str(len(found)), "query": "", "org": org, "days": days, "budget": 9_999,
                "dest": dest if days == 3 else database.cities[dest], "people_number": 2,
                "date": [str(start + datetime.timedelta(i)) for i in range(days)],
                "visiting_city_number": days // 2, "local_constraint": {}, "level": "easy"}
        plan = database.cities[org] != database.cities[dest] and solve(task, database)
        if plan:
            found.append((task, plan))
    return found


def values_of(day, slot):
    """The venues of a slot, each as "Name, City"."""
    return [value for value in day[slot].split(";") if value and value != "-"] \
        if slot == "attraction" else [day[slot]] * (day[slot] != "-")


# ---------------------------------------------------------------- pieces
class Writer:
    """Writes the fields of a plan for a style, with a venue's city only if it is not the day's."""

    def __init__(self, task, plan, database):
        self.task, self.plan, self.database = task, plan, database

    def ends(self, day):
        start, _, end = day["current_city"].removeprefix("from ").partition(" to ")
        return start, end or start

    def date(self, day):
        date = datetime.date.fromisoformat(self.task["date"][day["day"] - 1])
        return date.strftime("%B %d").replace(" 0", " ")

    def title(self, day):
        start, end = self.ends(day)
        return f"{start} to {end}" if start != end else end

    def day_words(self, day):
        start, end = self.ends(day)
        return {"n": day["day"], "date": self.date(day), "start": start,
                "title": self.title(day), "end": end, "current": day["current_city"]}

    def ride_words(self, day):
        text, (start, end) = day["transportation"], self.ends(day)
        number = re.search(r"F\d+", text)
        row = self.database.flight(number[0]) if number else None
        road = self.database.distance(start, end)
        mode = text.split(",")[0].split(" ")[0]
        if row:
            return {"number": row.number, "start": start, "end": end, "leaves": row.departure,
                    "lands": row.arrival, "cost": row.price, "mode": "Flight", "icon": "✈️"}
        taxi = mode == "Taxi"
        return {"number": "", "start": start, "end": end, "duration": road.duration, "mode": mode,
                "cost": int(road.km * (1 if taxi else 0.05)), "distance": road.distance,
                "icon": "🚕" if taxi else "🚗"}

    def venue_words(self, day, slot, value):
        name, city = value.rsplit(", ", 1)
        start, end = self.ends(day)
        rows = getattr(self.database, TABLES[slot])(city)
        row = next((row for row in rows if row.name.strip() == name), rows[0])
        hotel = slot == "accommodation"
        return {
            "name": name, "city": city, "full": value, "slot": slot, "Slot": slot.title(),
            "place": name if city == (start if end == self.task["org"] else end) else value,
            "icon": ICONS[slot], "cuisine": getattr(row, "cuisines", ""),
            "price": int(row.price) if hotel else getattr(row, "cost", 0),
            "other": next(one.name.strip() for one in rows[::-1]
                       if one.name.strip() != name and "~" not in one.name)}


ICONS = dict(zip(SLOTS, "🥐📸🥗🍷🛏", strict=True))
NOTES = """
### Cost Summary
- Transportation: $240
- Accommodation: {hotel} x 2 nights = $410
- Meals: {meal} and others, $150
| Day | Cost |
|---|---|
| 1 | $210 |
**Total: $800**, well within the budget.

**Key highlights**
- Dinner at {meal} is a favourite of ours
- Accommodation: {hotel}, for comfort
Note: Day 1 starts early. Prices are per person. Enjoy your trip!"""


def notes(w):
    """Text that models add after the last day: tables and remarks that repeat names."""
    names = {kind: next((value.rsplit(", ", 1)[0] for day in w.plan for slot in slots
                         for value in values_of(day, slot)), "Somewhere")
             for kind, slots in (("meal", MEALS), ("hotel", ("accommodation",)))}
    return NOTES.format(**names)


def tell(w, form):
    """A plan in a form: a dict of head, flight, road, meal, sight(s), hotel, none and tail."""
    blocks = [form["top"]] if "top" in form else []
    for day in w.plan:
        lines = [form["head"].format_map(w.day_words(day))]
        if day["transportation"] != "-":
            ride = w.ride_words(day)
            lines.append(form["flight" if ride["number"] else "road"].format_map(ride))
        elif "no_ride" in form:
            lines.append(form["no_ride"])
        for slot in SLOTS:
            values = [w.venue_words(day, slot, value) for value in values_of(day, slot)]
            kind = {"attraction": "sight", "accommodation": "hotel"}.get(slot, "meal")
            if values and "sights" in form and slot == "attraction":
                sights = form.get("joint", "; ").join(
                    form["each"].format_map(value) for value in values)
                lines.append(form["sights"].format(sights=sights))
            elif values:
                lines += [form[kind].format_map(value) for value in values]
            elif "none" in form:
                lines.append(form["none"].format(Slot=slot.title()))
        blocks.append("\n".join(lines) + form.get("tail", ""))
    if form.get("notes"):
        blocks.append(notes(w))
    return "\n\n".join(blocks)


# ---------------------------------------------------------------- forms
FIELDS_FORM = {  # TravelPlanner's own lines
    "head": "Day {n}:\nCurrent City: {current}",
    "flight": "Transportation: Flight Number: {number}, from {start} to {end}, Departure Time: "
              "{leaves}, Arrival Time: {lands}",
    "road": "Transportation: {mode}, from {start} to {end}, duration: {duration}, distance: "
            "{distance}, cost: {cost}",
    "no_ride": "Transportation: -", "meal": "{Slot}: {full}", "sights": "Attraction: {sights}",
    "each": "{full}", "hotel": "Accommodation: {full}", "none": "{Slot}: -"}
BRACKETS = {  # what the system prompt states
    "head": "Day {n}: {title}", "flight": "Flight from {start} to {end} [{number}] | ${cost} | "
    "Departure: {leaves} | Arrival: {lands}", "road": "{mode} from {start} to {end} | ${cost}",
    "meal": "{Slot}: [{name}], {city}", "sight": "Attraction: [{name}], {city}",
    "hotel": "Accommodation: [{name}], {city}"}
BULLETS = {
    "head": "### Day {n}: {title}",
    "flight": "- **Transportation:** Flight {number} from {start} to {end} ({leaves} – {lands}), "
              "${cost} per person",
    "road": "- **Transportation:** {mode} from {start} to {end} ({distance}, {duration}, ${cost})",
    "meal": "- **{Slot}:** {place} ({cuisine}) – ${price}/person",
    "sight": "- **Attraction:** {place}", "hotel": "- **Accommodation:** {place} – ${price}/night"}
FORMS = {
    "fields": FIELDS_FORM, "brackets": BRACKETS, "bullets": BULLETS | {"notes": True},
    "no_city": BRACKETS | {"meal": "{Slot}: [{place}]", "sight": "Attraction: [{place}]",
                           "hotel": "Accommodation: [{place}]"},
    # labels and rides
    "getting_there": {
        "head": "## Day {n}: {title}",
        "flight": "- **Getting there:** Flight {number} from {start} to {end}",
        "road": "- **Getting there:** {mode} from {start} to {end}",
        "meal": "- **{Slot}:** {place}", "sights": "- **See:** {sights}", "each": "{place}",
        "hotel": "- **Stay:** {place}"},
    "agent": {  # as trained STAR models write
        "top": "# Trip plan, budget $5,000", "notes": True,
        "head": "## Day {n}: {date} - {title}",
        "flight": "- Flight from {start} to {end} [{number}] | ${cost} | Departure: {leaves} | "
        "Arrival: {lands}", "road": "- {mode} from {start} to {end} ({duration}, ${cost})",
        "meal": "- {Slot}: At {place} ({cuisine}) | Avg. Cost: ${price}/person",
        "sight": "- Morning Attraction: Visit {place}",
        "hotel": "- Check into [{place}] | ${price}/night | Minimum Nights: 1"},
    "middle_dots": {
        "head": "**🗓 Day {n} · {date} · {title}**",
        "flight": "✈️ **Flight {number}** · {start} ➜ {end} · {leaves}–{lands}",
        "road": "{icon} **{mode}** · {start} ➜ {end} · {duration}",
        "meal": "{icon} **{Slot}** · {place} · ${price}", "sight": "{icon} **Visit** · {place}",
        "hotel": "{icon} **Accommodation** · {place} · ${price}/night"},
    "label_lists": {
        "head": "## Day {n}: {title}",
        "flight": "### Transportation\n1. Flight {number} from {start} to {end}",
        "road": "### Transportation\n1. {mode} from {start} to {end}",
        "meal": "### {Slot}\n1. **{place}**", "sights": "### Attractions\n1. {sights}",
        "each": "**{place}**", "joint": "\n2. ", "hotel": "### Accommodation\n1. **{place}**"},
    # marks around names
    "sights_in_brackets": BRACKETS | {"sights": "Attractions: {sights}", "each": "[{place}]",
                                      "joint": ", "},
    "quoted": FIELDS_FORM | {"meal": '{Slot}: "{name}", {city}', "each": '"{name}", {city}',
                             "hotel": 'Accommodation: "{name}", {city}'},
    # corrections and alternatives
    "instead": BRACKETS | {"hotel": "Accommodation: [{name}], {city} instead of [{other}]",
                           "meal": "{Slot}: {full} instead of {other}"},
    "struck": BRACKETS | {"hotel": "Accommodation: ~~{other}~~ {full}",
                          "meal": "{Slot}: ~~[{other}]~~ [{name}], {city}"},
    "revised_label": BRACKETS | {"hotel": "Accommodation: [{other}], {city}\n"
                                          "Revised Accommodation: [{name}], {city}",
                                 "meal": "{Slot}: {full}\nNew price: ${price}"},
    "quoted_lines": BULLETS | {
        "tail": "\n> Note: dinner at The Quoted Grill is optional.\n"
        "> Tip: visit The Quoted Tower early, and stay at The Quoted Inn.", "notes": True},
}

# ---------------------------------------------------------------- functions
def stated(w):
    """The format that itinerary() writes."""
    return itinerary(w.plan)


def ride_text(w, day):
    """A ride as the text of a value."""
    form = BULLETS["flight" if "Flight" in day["transportation"] else "road"]
    return "-" if day["transportation"] == "-" else form.partition(":** ")[2].format_map(
        w.ride_words(day))


def json_of(w, shape):
    """Days as JSON, in one of several shapes."""
    days = [day | {"attraction": values_of(day, "attraction")} for day in w.plan]
    unnumbered = [{key: value for key, value in day.items() if key != "day"} for day in days]
    if shape == "lines":
        return "\n".join(json.dumps(day, ensure_ascii=False) for day in days)
    value = {"list": w.plan, "unnumbered": unnumbered,
             "alternatives": {"alternative": days[:1], "plan": days}}[shape]
    return f"Sure!\n```json\n{json.dumps(value, indent=1, ensure_ascii=False)}\n```\nEnjoy."


def json_places(w):
    """Days as JSON with places as objects and the meals in one of them."""
    def place(value):
        name, city = value.rsplit(", ", 1)
        return {"name": name, "city": city, "cost": 20}

    days = {f"Day {day['day']}": {
        "date": w.task["date"][day["day"] - 1], "city": w.title(day),
        "transportation": ride_text(w, day),
        "meals": {meal: place(day[meal]) if day[meal] != "-" else None for meal in MEALS},
        "attractions": [place(value) for value in values_of(day, "attraction")],
        "accommodation": place(day["accommodation"]) if day["accommodation"] != "-" else None}
        for day in w.plan}
    return json.dumps({"itinerary": days}, indent=2, ensure_ascii=False)


STATED = {name: functools.partial(tell, form=form) for name, form in FORMS.items()} | {
    function.__name__: function for function in (stated, json_places)} | {
    f"json_{shape}": functools.partial(json_of, shape=shape)
    for shape in ("list", "lines", "unnumbered", "alternatives")}


def texts(database, plans, style):
    """Yield (task, text, plan) for every plan in a style."""
    for task, plan in plans:
        yield task, STATED[style](Writer(task, plan, database)), plan


def spoilt(database, plans, purpose):
    """[(task, plan)] with a third of the names, at least one, replaced by invented ones."""
    rng, out = random_of(purpose), []
    for task, plan in plans:
        plan, stays = copy.deepcopy(plan), {}
        places = [(day, slot) for day in plan for slot in SLOTS if day[slot] != "-"]
        for day, slot in rng.sample(places, max(1, len(places) // 3)):
            old, *rest = values_of(day, slot)
            name, city = old.rsplit(", ", 1)
            known = {row.name.strip().lower() for row in getattr(database, TABLES[slot])(city)}
            forms = [form for form in INVENTED[TABLES[slot]]
                     if form.format(name).lower() not in known]
            fresh = f"{stays.setdefault(old, rng.choice(forms)).format(name)}, {city}"
            end = ";" if slot == "attraction" else ""
            day[slot] = "".join(value + end for value in (fresh, *rest))
        out.append((task, plan))
    return out
