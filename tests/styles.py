"""
Itineraries as GPT, Claude, Qwen, Llama, DeepSeek and Gemini write them, with known plans, a third
of the venues invented: nl_styles.py's plans in more than forty further styles.

A style is a table of forms: how a day is headed, and how a ride, a meal, the sights and a hotel
are told; those that no table can hold are functions. Names that are invented look like names:
some go on where a known one ends, some hold words that announce something else.

    python tests/styles.py DATABASE STYLE     one example of a style, and its plan
"""
import functools
import html
import json
import random
import sys

from nl_styles import MEALS, SLOTS, Writer, notes, random_of, random_plan, random_task, values_of

from sandbox import Database

INVENTED = {  # {}: a name of the database, which the invented one is not
    "restaurant": (
        "The Velvet Lantern", "Juniper & Rye", "Casa Perdida", "Sr. Pepe's Hideaway",
        "No. 9 Noodle Bar", "The Dinner Club", "Café Señor Zorro", "Ocean's 11 Grill",
        "{} - Rooftop Annex", "{}: the Secret Cellar", "{} and Dragon Palace", "{} II", "New {}",
        "The Breakfast Republic", "Dr. Vane's Kitchen", "Taxi Stand Tacos", "{} Express"),
    "attraction": (
        "Museum of Lost Keys", "Old Mill Overlook", "St. Agnes Garden", "Mt. Hollow Lookout",
        "Gallery of Modern Glass", "{} - West Wing", "{} Annex", "The Hidden {}", "Fort Nowhere",
        "Valley Farm & Dinner Theatre", "{}: the Night Walk", "Ft. Ember State Park"),
    "hotel": (
        "Harborlight House", "Entire Room at a Cozy Cottage", "Private room in the Old Mill",
        "{} by the Lake", "{} II", "Sunny Loft w/ Rooftop - Near Everything", "The Overnight Inn",
        "Charming 2BR Apt with Parking!", "{} - Garden Suite", "Room 4 You, Near the Station")}
TABLES = {**dict.fromkeys(MEALS, "restaurant"), "attraction": "attraction",
          "accommodation": "hotel"}
WORDS = ("One", "Two", "Three", "Four", "Five", "Six", "Seven")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
ICONS = dict(zip(SLOTS, "🥐📸🥗🍷🛏", strict=True))
CLOCKS = dict(zip(SLOTS, ("8:00 AM", "10:00 AM", "12:30 PM", "7:00 PM", "9:30 PM"), strict=True))


def invent(plan, database, rng):
    """Put an invented name in a third of a plan's places; returns those names with their places."""
    made, spoilt = [], {}
    for day in plan:
        for slot in SLOTS:
            values = []
            for value in values_of(day, slot):
                name, city = value.rsplit(", ", 1)
                stay = slot == "accommodation" and value in spoilt  # one hotel, one name
                if stay or slot == "accommodation" and rng.random() < 0.5 or rng.random() < 1 / 3:
                    fresh = rng.choice(INVENTED[TABLES[slot]]).format(name)
                    fresh = spoilt.setdefault(value, fresh) if slot == "accommodation" else fresh
                    known = getattr(database, f"{TABLES[slot]}s")(city)
                    if not any(fresh.lower() == row.name.strip().lower() for row in known):
                        name = fresh
                        made.append((day["day"], slot, f"{name}, {city}"))
                values.append(f"{name}, {city}")
            end = ";" if slot == "attraction" else ""
            day[slot] = "".join(value + end for value in dict.fromkeys(values)) or "-"
    return made


# ---------------------------------------------------------------- forms
class Form(dict):
    """What may stand in the braces of a form."""

    def __missing__(self, key):
        raise KeyError(f"no {key!r} in a form; there are {sorted(self)}")


def day_words(w, day):
    start, end = w.ends(day)
    n = day["day"]
    return Form(
        n=n, word=WORDS[n - 1], date=w.date(day), short=w.date(day, "%b %d"), title=w.title(day),
        full=w.date(day, "%A, %B %d, %Y"), iso=w.task["date"][n - 1], start=start, end=end,
        arrow=w.title(day).replace(" to ", " → "), current=day["current_city"],
        nth="final" if n == w.task["days"] and n > 1 else ORDINALS[n - 1])


def ride_words(w, day):
    ride = w.ride(day)
    return Form(ride._asdict(), mode={"Flight": "Flight", "Taxi": "Taxi"}.get(ride.mode, ride.mode),
                number=ride.number or "", price=ride.cost,
                icon={"Flight": "✈️", "Taxi": "🚕"}.get(ride.mode, "🚗"))


def venue_words(w, day, slot, value):
    name, city = value.rsplit(", ", 1)
    kinds, cost = w.cuisine(value)
    price, room, nights = w.night(value)
    return Form(
        name=name, city=city, place=w.place(day, value), full=value, slot=slot, Slot=slot.title(),
        cuisine=kinds, price=price if slot == "accommodation" else cost, room=room, nights=nights,
        state=w.database.cities.get(city, "Ohio"), icon=ICONS[slot], clock=CLOCKS[slot])


def tell(w, form):
    """A plan in a form: a table with head, flight, road, meal, sight(s), hotel, none, foot."""
    blocks = [form["top"]] if "top" in form else []
    for day in w.plan:
        words = day_words(w, day)
        lines = [form["head"].format_map(words)]
        if day["transportation"] != "-":
            ride = ride_words(w, day)
            lines.append(form["flight" if ride["number"] else "road"].format_map(ride))
        elif "no_ride" in form:
            lines.append(form["no_ride"])
        for slot in form.get("order", SLOTS):
            values = [venue_words(w, day, slot, value) for value in values_of(day, slot)]
            kind = {"attraction": "sight", "accommodation": "hotel"}.get(slot, "meal")
            if values and "sights" in form and slot == "attraction":
                joint = form.get("joint", "; ")
                sights = joint.join(form.get("each", "{place}").format_map(v) for v in values)
                lines.append(form["sights"].format(sights=sights))
            elif values:
                lines += [form[kind].format_map(value) for value in values]
            elif "none" in form:
                lines.append(form["none"].format(slot=slot, Slot=slot.title(), icon=ICONS[slot]))
        blocks.append(form.get("glue", "\n").join(filter(None, lines)) + form.get("tail", ""))
    if form.get("notes"):
        blocks.append(notes(w))
    return form.get("between", "\n\n").join(blocks) + form.get("foot", "")


FIELDS = {  # what most forms share
    "flight": "Transportation: Flight Number: {number}, from {start} to {end}, Departure Time: "
              "{leaves}, Arrival Time: {lands}",
    "road": "Transportation: {mode}, from {start} to {end}, duration: {duration}, distance: "
            "{distance}, cost: {cost}",
    "meal": "{Slot}: {full}", "sights": "Attraction: {sights}", "each": "{full}",
    "hotel": "Accommodation: {full}", "none": "{Slot}: -"}
BULLETS = {
    "flight": "- **Transportation:** Flight {number} from {start} to {end} ({leaves} – {lands}), "
              "${cost} per person",
    "road": "- **Transportation:** {mode} from {start} to {end} ({distance}, {duration}, ${cost})",
    "meal": "- **{Slot}:** {place} ({cuisine}) – ${price}/person",
    "sight": "- **Attraction:** {place}", "hotel": "- **Accommodation:** {place} – ${price}/night"}
ONE_LINE = FIELDS | {"head": "Day {n}: City: {current}"}
FORMS = {
    "semicolons": ONE_LINE | {"glue": "; "}, "full_stops": ONE_LINE | {"glue": ". ", "none": ""},
    "bars": ONE_LINE | {"glue": " | "}, "hyphens": FIELDS | {"head": "Day-{n}: {title}"},
    # headings
    "days_colon": FIELDS | {"head": "Days: {n}\nCurrent City: {current}"},
    "day_colon": FIELDS | {"head": "Day: {n}\nCurrent City: {current}"},
    "day_date": BULLETS | {"head": "Day {n} ({short})\n- **City:** {title}"},
    "day_word": BULLETS | {"head": "**Day {word}**\n- **Current City:** {current}"},
    "day_word_title": BULLETS | {"head": "**Day {word}: {title}**", "notes": True},
    "emoji_heading": BULLETS | {"head": "🌅 **Day {n} – {date}: {arrow}**"},
    "hash_emoji": BULLETS | {"head": "### 🧭 Day {n} | {date} | {title}", "notes": True},
    "keycap": BULLETS | {"head": "## 📅 DAY {n}: {title} ({full})"},
    "numbered": BULLETS | {"head": "{n}. Day {n} - {title}"},
    "underlined": FIELDS | {"head": "Day {n} — {date}\n==============\nCurrent City: {current}"},
    "dated_headings": BULLETS | {"head": "### {full}\n- **City:** {title}"},
    "iso": FIELDS | {"head": "Day {n} ({iso}):\nCurrent City: {current}"},
    "boxed": FIELDS | {"head": "--- Day {n} ---\nCurrent City: {current}", "between": "\n"},
    # attributes
    "phones": BULLETS | {"head": "## Day {n}: {title}",
                         "sight": "- **Attraction:** {place} (Phone: (410) 576-3800)"},
    "states": FIELDS | {"head": "Day {n}:\nCurrent City: {current}", "none": "{Slot}: None",
                        "meal": "{Slot}: {full}, {state}",
                        "hotel": "Accommodation: {full}, {state}",
                        "each": "{full}, {state}"},
    "attributes": FIELDS | {
        "head": "Day {n}: {title}",
        "meal": "{Slot}: {place}. Cost: ${price}. Cuisine: {cuisine}.",
        "sights": "Attractions: {sights}", "each": "{place}. Phone: (410) 576-3800",
        "hotel": "Accommodation: {place}. Price: ${price} per night. Room type: {room}."},
    "parentheses": FIELDS | {
        "head": "Day {n} - {title}", "meal": "{Slot}: {name} ({city}) - Avg. cost ${price}",
        "each": "{name} ({city})", "hotel": "Hotel: {name} ({city}) - ${price}/night, {room}"},
    "dashes": FIELDS | {
        "head": "**Day {n}: {title}**", "meal": "* {Slot} — {place} — {cuisine} — ${price}",
        "sight": "* Sightseeing — {place} — free",
        "hotel": "* Stay — {place} — ${price}/night"},
    "at_times": {
        "head": "### Day {n}: {title}",
        "flight": "- **{leaves}** – Flight {number} from {start} to "
        "{end} (arrives {lands})", "road": "- **7:00 AM** – {mode} from {start} to {end} "
        "({duration})", "meal": "- **{clock}** – {Slot} at {place} (~${price})",
        "sight": "- **{clock}** – Visit {place}",
        "hotel": "- **{clock}** – Check in at {place} "
        "(${price}/night)"},
    "dayparts": {
        "head": "## Day {n} – {title}",
        "flight": "**Morning:** Take Flight {number} from {start} to "
        "{end}, departing {leaves}, arriving {lands}",
        "road": "**Morning:** {mode} from {start} to "
        "{end} ({duration})", "meal": "**{Slot}:** {place}",
        "sight": "**Afternoon:** Visit {place}",
        "hotel": "**Overnight:** {place} (${price}/night)"},
    # nested labels
    "nested_restaurant": {
        "head": "### Day {n}: {title}",
        "flight": "- **Transportation:**\n  - Flight: {number}\n"
        "  - Route: {start} to {end}\n  - Departure: {leaves}\n  - Arrival: {lands}",
        "road": "- **Transportation:**\n  - {mode} from {start} to {end}\n  - Cost: ${cost}",
        "meal": "- **{Slot}:**\n  - Restaurant: {name}\n  - City: {city}\n  - Cuisine: {cuisine}\n"
        "  - Cost: ${price}", "sight": "- **Attraction:**\n  - Name: {place}\n  - Entry: Free",
        "hotel": "- **Accommodation:**\n  - Hotel: {place}\n  - Price: ${price}/night\n"
        "  - Room Type: {room}"},
    "nested_name": {
        "head": "**Day {n} ({date})**\n* **Location:** {title}",
        "flight": "* **Travel:** Flight "
        "{number}: {start} → {end}\n    * Departs: {leaves}\n    * Arrives: {lands}",
        "road": "* **Travel:** {mode}: {start} → {end}\n    * Duration: {duration}\n    * Cost: "
        "${cost}", "meal": "* **{Slot}**\n    * **Name:** {name}\n    * **Location:** {city}\n"
        "    * **Average cost:** ${price}",
        "sight": "* **Sightseeing**\n    * **Place:** {place}",
        "hotel": "* **Accommodation**\n    * **Name:** {place}\n    * **House rules:** No parties"},
    "venue_lines": {
        "head": "Day {n}: {title}", "flight": "Flight: {number} ({start} to {end})",
        "road": "{mode}: {start} to {end}",
        "meal": "{Slot}:\n- Venue: {place}\n- Price: ${price}",
        "sights": "Attractions:\n- {sights}", "joint": "\n- ",
        "hotel": "Lodging:\n- Place: {place}"},
    # rides
    "rides_without_cities": FIELDS | {
        "head": "Day {n}:\nCurrent City: {current}",
        "flight": "Transportation: Flight {number}",
        "road": "Transportation: {mode}"},
    "ride_labels": BULLETS | {
        "head": "## Day {n}: {title}", "flight": "- **Flight:** {number}, {leaves} → {lands}",
        "road": "- **{mode}:** {duration}, {distance}, ${cost}"},
    "ride_costs": BULLETS | {
        "head": "Day {n}: {title}", "flight": "- Getting there: flight {number}, ${cost}",
        "road": "- Getting there: {mode} (${cost}, {duration})",
        "no_ride": "- Getting there: None"},
    # notes
    "quotes": BULLETS | {
        "head": "### Day {n}: {title}",
        "tail": "\n> Note: dinner at The Quoted Grill is optional.\n"
        "> Tip: visit The Quoted Tower early, and stay at The Quoted Inn.", "notes": True},
    "costs_everywhere": BULLETS | {
        "head": "# DAY {n}: {title}",
        "tail": "\n**Daily total: $310**\n*Note: breakfast is included.*",
        "foot": "\n\n## Budget\n| Item | Cost |\n|---|---|\n| Dinner: The Quoted Grill | $40 |"},
    # emoji
    "icons": {
        "head": "📍 Day {n}: {arrow}",
        "flight": "✈️ Flight {number}: {start} → {end} | 🕐 {leaves} - "
        "{lands} | 💵 ${cost}",
        "road": "{icon} {mode}: {start} → {end} | ⏱ {duration} | 💵 ${cost}",
        "meal": "{icon} {Slot}: {place} | 💵 ${price}", "sight": "{icon} Sightseeing: {place}",
        "hotel": "{icon} Stay: {place} | 💵 ${price}/night"},
    "bare_icons": {
        "head": "**🗓 Day {n} · {date} · {title}**",
        "flight": "✈️ **Flight {number}** · {start} ➜ "
        "{end} · {leaves}–{lands}", "road": "{icon} **{mode}** · {start} ➜ {end} · {duration}",
        "meal": "{icon} **{Slot}** · {place} · ${price}", "sight": "{icon} **Visit** · {place}",
        "hotel": "{icon} **Accommodation** · {place} · ${price}/night"},
    # brackets
    "brackets": FIELDS | {
        "head": "Day {n}: {title}", "flight": "Flight from {start} to {end} [{number}]",
        "road": "{mode} from {start} to {end}", "meal": "{Slot}: [{place}] (${price})",
        "sights": "Attractions: {sights}", "each": "[{place}]", "joint": ", ",
        "hotel": "Accommodation: [{place}] - ${price}/night"},
    "quoted": FIELDS | {
        "head": "Day {n}: {title}", "meal": '{Slot}: "{name}", {city}',
        "each": '"{name}", {city}',
        "hotel": 'Accommodation: "{name}", {city}'},
    "links": BULLETS | {
        "head": "### Day {n}: {title}",
        "sight": "- **Attraction:** [{place}](https://example.com/x)",
        "meal": "- **{Slot}:** [{place}](https://example.com/a_(b)) – ${price}"},
    # HTML
    "html_br": FIELDS | {"head": "<b>Day {n}: {title}</b>", "glue": "<br>",
        "between": "<br/><br/>"},
    "html_list": {
        "head": "<h3>Day {n}: {title}</h3>\n<ul>",
        "flight": "<li><b>Flight:</b> {number} from {start} "
        "to {end}</li>", "road": "<li><b>Transportation:</b> {mode} from {start} to {end}</li>",
        "meal": "<li><strong>{Slot}:</strong> {place} (${price})</li>",
        "sight": "<li><strong>Attraction:</strong> {place}</li>",
        "hotel": "<li><strong>Hotel:</strong> {place}</li>", "tail": "\n</ul>"},
    # prose
    "ordinal_prose": {
        "head": "On the {nth} day,",
        "flight": "take flight {number} from {start} to {end}, leaving at "
        "{leaves} and landing at {lands}.",
        "road": "take the road: {mode} from {start} to {end} "
        "({duration}).", "meal": "Have {slot} at {place} (${price}).",
        "sight": "Visit {place}.",
        "hotel": "Stay overnight at {place}.", "glue": " "},
    "dated_prose": {
        "head": "On {date}, the plan is simple.",
        "flight": "Take flight {number} from {start} to {end} "
        "({leaves}-{lands}).", "road": "Set out early by {mode} from {start} to {end}.",
        "meal": "Enjoy {slot} at {place}, about ${price} per person.",
        "sight": "Then visit {place}.",
        "hotel": "Spend the night at {place} (${price}).", "glue": " "},
}


# ---------------------------------------------------------------- functions
def cells(w, day, joint="<br>"):
    """The day's places, one text a slot."""
    return [joint.join(values_of(day, slot)) or "-" for slot in SLOTS]


def br_table(w):
    """A table with <br> inside its cells."""
    rows = ["| Day | City | Transport | Breakfast | Attractions | Lunch | Dinner | Accommodation |",
            "|---|---|---|---|---|---|---|---|"]
    for day in w.plan:
        ride = w.ride_text(day, "paren") or "-"
        rows.append(f"| **Day {day['day']}**<br>{w.date(day)} | {w.title(day)} | {ride} | "
                    + " | ".join(cell.replace("|", "\\|") for cell in cells(w, day)) + " |")
    return "\n".join(rows)


def html_table(w):
    head = "".join(f"<th>{name}</th>" for name in ("Day", "City", "Transportation", "Breakfast",
                                                    "Attractions", "Lunch", "Dinner", "Hotel"))
    rows = [f"<tr>{head}</tr>"]
    for day in w.plan:
        told = [str(day["day"]), w.title(day), w.ride_text(day, "paren") or "-",
                *(html.escape(cell, quote=False) for cell in cells(w, day, "; "))]
        rows.append("<tr>\n" + "\n".join(f"  <td>{cell}</td>" for cell in told) + "\n</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def two_columns(w):
    """A table per day, a field a row, times in a column before it."""
    out = []
    for day in w.plan:
        out += [f"#### Day {day['day']} ({w.date(day)}) — {w.title(day)}", "",
                "| Time | Plan | Cost |", "|:---|:---|---:|"]
        if ride := w.ride_text(day, "paren"):
            out.append(f"| 6:30 AM | **Transportation:** {ride} | $50 |")
        for slot in SLOTS:
            out += [f"| {CLOCKS[slot]} | **{slot.title()}:** {w.place(day, value)} | ${i} |"
                    .replace(" | $0", " | Free") for i, value in enumerate(values_of(day, slot))
                    if "|" not in value]
        out.append("")
    return "\n".join(out)


def json_days(w):
    days = {f"Day {day['day']}": {
        "date": w.task["date"][day["day"] - 1], "city": w.title(day),
        "transportation": w.ride_text(day, "paren") or None,
        "meals": {meal: {"name": day[meal].rsplit(", ", 1)[0],
        "city": day[meal].rsplit(", ", 1)[1],
                         "cost": 20} if day[meal] != "-" else None for meal in MEALS},
        "attractions": [{"name": value.rsplit(", ", 1)[0], "city": value.rsplit(", ", 1)[1]}
                        for value in values_of(day, "attraction")],
        "accommodation": {"name": day["accommodation"].rsplit(", ", 1)[0], "price": 80}
        if day["accommodation"] != "-" else None} for day in w.plan}
    return f"```json\n{json.dumps({'itinerary': days}, indent=2, ensure_ascii=False)}\n```"


def json_activities(w):
    days = []
    for day in w.plan:
        acts = [{"time": "07:00", "type": "transportation", "description": ride}
                for ride in [w.ride_text(day, "paren")] if ride]
        acts += [{"time": CLOCKS[slot], "type": slot, "name": value}
                 for slot in SLOTS for value in values_of(day, slot)]
        days.append({"day": day["day"], "current_city": day["current_city"], "activities": acts})
    return json.dumps({"days": days}, ensure_ascii=False)


def next_day(w):
    """A story without headings; its first day is not announced at all."""
    out = []
    for day in w.plan:
        last = day["day"] == w.task["days"]
        lead = "The trip starts early." if day["day"] == 1 else "On the last day, pack." if last \
            else "The next day, sleep in."
        said = [lead]
        if ride := w.ride_text(day, "prose"):
            said.append(f"You {ride}.")
        for slot in SLOTS:
            for value in values_of(day, slot):
                verb = {"attraction": "visit", "accommodation": "spend the night at"}
                said.append(f"You {verb.get(slot, f'have {slot} at')} {w.place(day, value)}.")
        out.append(" ".join(said))
    return "\n\n".join(out)


def weekdays(w):
    """A letter: its days are weekdays, the first of them in mid-sentence."""
    out = []
    for day in w.plan:
        lead = f"Your trip begins on {w.date(day, '%A')}" if day["day"] == 1 \
            else f"{w.date(day, '%A')} starts well"
        said = [f"{lead}." if not (ride := w.ride_text(day, "prose")) else f"{lead}: {ride}."]
        for slot in SLOTS:
            for value in values_of(day, slot):
                verb = {"attraction": "Explore", "accommodation": "Stay overnight at"}
                said.append(f"{verb.get(slot, f'Have {slot} at')} {w.place(day, value)}.")
        out.append(" ".join(said))
    return "\n\n".join(out)


def one_sentence_each(w):
    """A line a day, without a title."""
    verb = {"attraction": "Visit", "accommodation": "Stay at"}
    out = []
    for day in w.plan:
        ride = w.ride_text(day, "prose")
        said = [f"{ride[0].upper()}{ride[1:]}."] if ride else [f"Wake up in {w.ends(day)[1]}."]
        said += [f"{verb.get(slot, f'{slot.title()} at')} {w.place(day, value)}."
                 for slot in SLOTS for value in values_of(day, slot)]
        out.append(f"Day {day['day']}: {' '.join(said)}")
    return "\n".join(out)


def meals_in_a_cell(w):
    """A table whose meals share a cell."""
    rows = ["| Day | Route | Transportation | Meals | Attractions | Stay |",
            "|---|---|---|---|---|---|"]
    for day in w.plan:
        meals = "<br>".join(f"{meal.title()}: {day[meal]}" for meal in MEALS if day[meal] != "-")
        told = [f"Day {day['day']}", w.title(day).replace(" to ", " → "),
                w.ride_text(day, "paren") or "—", meals or "—",
                "<br>".join(values_of(day, "attraction")) or "—",
                "—" if day["accommodation"] == "-" else day["accommodation"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in told) + " |")
    return "\n".join(rows)


def json_restaurants(w):
    """JSON whose places are tables with keys of their own."""
    def place(kind, value):
        name, city = value.rsplit(", ", 1)
        return {f"{kind}_name" if w.task["days"] > 3 else kind: name, "city": city, "cost": 20}

    days = []
    for day in w.plan:
        told = {meal: place("restaurant", day[meal]) if day[meal] != "-" else None
                for meal in MEALS}
        told["attractions"] = [place("attraction", value) for value in values_of(day, "attraction")]
        hotel = day["accommodation"]
        told["accommodation"] = place("hotel", hotel) if hotel != "-" else None
        days.append({"day_number": day["day"], "city": day["current_city"],
                     "transportation": day["transportation"], **told})
    return f"Here you go:\n```json\n{json.dumps({'days': days}, indent=1)}\n```"


def thoughtful(w):
    """A recap and doubts first, then the plan, and a question last."""
    plan = tell(w, BULLETS | {"head": "**Day {n}: {title}**"})
    return ("Let me think about Day 1 first: a taxi is too dear, so I looked at other ways.\n\n"
            f"Here's the final itinerary for {w.task['people_number']} people:\n\n{plan}\n\n"
            "**Why this works**\n- Dinner at The Quoted Grill was too dear.\n\n"
            "Would you like me to change anything?")


def label_lists(w):
    """Headings of the slots, with numbered names below."""
    out = []
    for day in w.plan:
        out.append(f"## Day {day['day']}: {w.title(day)}")
        if ride := w.ride_text(day, "paren"):
            out += ["### Transportation", f"1. {ride}"]
        for slot in SLOTS:
            values = values_of(day, slot)
            out += [f"### {slot.title()}"] if values else []
            out += [f"{i}. **{w.place(day, value)}**" for i, value in enumerate(values, 1)]
    return "\n".join(out)


def dated_columns(w):
    """A table whose rows are dates."""
    rows = ["| Date | City | Transportation | Breakfast | Attractions | Lunch | Dinner | Stay |",
            "|---|---|---|---|---|---|---|---|"]
    for day in w.plan:
        told = [w.date(day), day["current_city"], w.ride_text(day, "paren") or "-", *cells(w, day)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in told) + " |")
    return "\n".join(rows)


def events_of(w, day):
    """[(label, clock, text)] of a day."""
    ride = w.ride_text(day, "paren")
    return [("Transportation", "6:30 AM", ride)] * bool(ride) + [
        (slot.title(), CLOCKS[slot], w.place(day, value).replace("|", "\\|"))
        for slot in SLOTS for value in values_of(day, slot)]


def timed_rows(w):
    """A table of events whose day stands in its first row alone."""
    rows = ["| Day | Time | Activity | Cost |", "|---|---|---|---|"]
    for day in w.plan:
        told = f"Day {day['day']}: {w.title(day)}"
        for label, clock, text in events_of(w, day) or [("City", "", w.title(day))]:
            rows.append(f"| {told} | {clock} | {label}: {text} | $12 |")
            told = ""
    return "\n".join(rows)


def categories(w):
    """A table of events, each with its day and its category."""
    rows = ["| Day | Category | Details |", "|---|---|---|"]
    for day in w.plan:
        rows += [f"| {day['day']} | {label} | {text} |" for label, _, text in [
            ("City", "", w.title(day)), *events_of(w, day)]]
    return "\n".join(rows)


STYLES = {name: functools.partial(tell, form=form) for name, form in FORMS.items()}
STYLES |= {style.__name__: style for style in (
    br_table, html_table, two_columns, json_days, json_activities, json_restaurants, next_day,
    weekdays, one_sentence_each, meals_in_a_cell, thoughtful, label_lists,
    timed_rows, categories, dated_columns)}


def examples(database, count, purpose, names=tuple(STYLES)):
    """[(style name, task, text, plan, invented)], the styles in turn."""
    rng, out = random_of(purpose), []
    for i in range(count):
        name, task = names[i % len(names)], random_task(database, rng)
        plan = random_plan(task, database, rng)
        made = invent(plan, database, rng)
        out.append((name, task, STYLES[name](Writer(task, plan, database, rng)), plan, made))
    return out


def mutate(text, rng):
    """A text with one to six pieces cut, doubled, swapped, or put in from elsewhere."""
    for _ in range(rng.randint(1, 6)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.choice((1, 3, 30, 300)))
        piece = rng.choice(("", text[a:b] * 2, text[a:b][::-1], rng.choice(PIECES),
                            text[a:b].upper(), "".join(random.Random(a).sample(text[a:b], b - a))))
        text = text[:a] + piece + text[b:]
    return text


PIECES = ("\n", "|", "[", "]", "(", ")", "**", "<br>", "<td>", "</tr>", "Day 2", "Days: ", "Lunch:",
          " at ", "from ", " to ", ", ", ": ", " - ", "> ", "{", '"', "\\", "\0", "\ud800", "₂",
          "²", "Restaurant: ", "the next day", "&amp;", "$", "F123", "Hotel", "🍷", "3:40 PM",
          "[{'day':")


if __name__ == "__main__":
    for name, _, text, plan, made in examples(Database(sys.argv[1]), len(STYLES), "show"):
        if name == sys.argv[2]:
            print(text, json.dumps(plan, indent=1), made, sep="\n\n")
