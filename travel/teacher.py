"""
The solver as a teacher: plays from which a model learns to search and to compare.

    (1) draft   draw a random journey that satisfies every wish and the budget
    (2) lesson  make the searches for it in an agent's order: cities, hotels, rides, meals. The
                teacher also looks at other cities if asked to
    (3) argue   before each search, write a thought on the last result: prices for the group,
                minimum nights, room type, house rule, missing cuisines, dollars spent

Every thought is true and uses only what the query and the results have shown so far: the solver
decides where to look, but never gives a reason that an agent could not have. Sums are spelled out.

Reads   database/prompts/thoughts.txt: the wordings, of which one between slashes is drawn
"""
import math
import re

import numpy as np

from runtime import entries, fill, join_words
from sandbox import PROMPTS
from travel import constraints, solver

FORMS = entries(PROMPTS / "thoughts.txt")


# ---------------------------------------------------------------- (1) draft

class Teacher:
    """Draws journeys for a task that are not always the cheapest."""

    def __init__(self, rng, task, database):
        self.rng, self.task, self.database = rng, task, database
        self.costs, self.cities = solver.least_costs(task, database)
        self.mode = next(mode for mode in self.costs if self.costs[mode].min() <= task["budget"])

    def pick(self, options, greed):
        return options[0] if self.rng.random() < greed else self.rng.choice(options)

    def draft(self, greed):
        """A random Journey that satisfies the wishes; None if the choices do not fit together.

        Each choice is the cheapest one with probability greed. It flies if that is within the
        budget, like an agent that searches flights first.
        """
        task, database, rng, mode = self.task, self.database, self.rng, self.mode
        route = rng.choice(np.argwhere(self.costs[mode] <= task["budget"]).tolist())
        route, nights = [self.cities[i] for i in route], rng.choice(solver.splits(task))
        ways, beds, sights = [], [], []
        for leg in solver.legs(task, route, nights):
            options = solver.ways(task, database, mode, *leg)
            ways.append([way for way in options if way.flight] or options)
        for city, n in zip(route, nights, strict=True):
            options = solver.lodgings(task, database, city)
            beds.append([bed for bed in options if bed.nights <= n])
            sights.append(list(solver.places(database, "attractions", city)))
        meals = self.draft_meals(route, nights, greed)
        enough = all(len(names) >= n - 1 for names, n in zip(sights, nights, strict=True))
        if not (meals and enough and all(beds) and all(ways)):
            return None
        ways = [self.pick(options, greed) for options in ways]
        sights = [rng.sample(names, n - 1) for names, n in zip(sights, nights, strict=True)]
        beds = [self.pick(options, greed) for options in beds]
        stays = map(solver.Stay, route, nights, beds, meals, sights)
        return solver.Journey(mode, route, list(stays), ways)

    def draft_meals(self, route, nights, greed):
        """The meals in each city: a restaurant for each wanted cuisine, then others; half of the
        stays also have a dinner on arrival. None if a city has too few restaurants."""
        wanted, served, chosen = solver.cuisines(self.task), 0, [[] for _ in route]
        menus = [list(solver.menu(self.database, city, wanted)) for city in route]
        for i in range(len(wanted)):
            serving = [[meal for meal in options if meal.mask >> i & 1] for options in menus]
            where = [c for c, options in enumerate(serving) if options]
            if where and not served >> i & 1:
                c = self.rng.choice(where)
                chosen[c].append(self.pick(serving[c], greed))
                menus[c].remove(chosen[c][-1])
                served |= chosen[c][-1].mask
        for meals, options, n in zip(chosen, menus, nights, strict=True):
            need = max(3 * (n - 1) + (self.rng.random() < 0.5), len(meals))
            if len(meals) + len(options) < need:
                return None
            while len(meals) < need:
                first = self.rng.random() < greed
                meals.append(options.pop(0 if first else self.rng.randrange(len(options))))
            self.rng.shuffle(meals)
        return chosen

    def good_draft(self):
        """The first of 40 drafts that succeeds, with rising greed; else the solver's journey."""
        for i in range(40):
            found = self.draft(0.3 + 0.6 * i / 40)
            plan = found and solver.lay_out(self.task, found)
            if plan and not faults(constraints.score(self.task, plan, self.database, "strict")):
                return found
        return solver.solve_report(self.task, self.database).journey

    def sensible_draft(self):
        """A good draft that does not use only taxis if self-driving is possible, and in which each
        name means one place; None if none of five good drafts is like this."""
        by_car = self.costs.get("road", np.array(math.inf)).min() <= self.task["budget"]
        for _ in range(5):
            journey = self.good_draft()
            if journey.mode == "air" and by_car and not any(way.flight for way in journey.ways):
                self.mode = "road"
            elif all(map(self.is_plain, journey.stays)):
                stays = [stay._replace(bed=self.better(stay)) for stay in journey.stays]
                return journey._replace(stays=stays)
        return None

    def is_plain(self, stay):
        names = [("restaurants", meal.name) for meal in stay.meals]
        return all(means_one(self.database, table, stay.city, name)
                   for table, name in [("hotels", stay.bed.name), *names])

    def better(self, stay):
        """The hotel with the best review that costs no more than the stay's; of several the
        cheapest."""
        rows = solver.places(self.database, "hotels", stay.city)
        return min((bed for bed in solver.lodgings(self.task, self.database, stay.city)
                    if bed.nights <= stay.nights and bed.cost <= stay.bed.cost
                    and means_one(self.database, "hotels", stay.city, bed.name)),
                   key=lambda bed: -min(row.review for row in rows[bed.name]))


def means_one(database, table, city, name):
    """Whether all rows that a judge may take a name for are equal."""
    return len({row[1:] for row in solver.places(database, table, city)[name]}) == 1


def faults(verdict):
    return [name for name, (passed, _) in verdict["checks"].items() if passed is False]


# ---------------------------------------------------------------- (2) lesson

def money(dollars):
    """An amount of dollars as text, without the sign: 12.50 or 12."""
    return f"{dollars:.2f}".removesuffix(".00")


def spelled(*terms, noun=""):
    """Terms (dollars, times) as a spelled-out sum, such as "$80 x 2 nights + $35 = $195"."""
    said = " + ".join(f"${money(cost)}" + f" x {n}{noun}" * (n != 1) for cost, n in terms)
    total = sum(cost * n for cost, n in terms)
    return f"{said} = ${money(total)}" if len(terms) > 1 or terms[0][1] != 1 else said


def counted(n, noun):
    return f"{n:g} {noun}{'s' * (n != 1)}"


class Lesson:
    """A journey, played as an agent would play it.

    steps: the searches with their thoughts. notes: sentences for the next thought, on the last
    results. further: whether the agent has looked at more than the journey needs.
    """

    def __init__(self, rng, task, database, journey):
        self.rng, self.task, self.database, self.journey = rng, task, database, journey
        self.steps, self.notes, self.further = [], [], False
        self.wish, self.people = task["local_constraint"], task["people_number"]
        people = "1 person" if self.people == 1 else f"{self.people} people"
        self.place = {"city": journey.route[0], "people": people}
        self.longest = task["days"] - task["visiting_city_number"]  # nights in one city
        cities = solver.stop_cities(task, database)
        self.spare = [city for city in cities if city not in journey.route]

    def say(self, slot, **values):
        self.notes.append(fill(self.rng, FORMS[slot], values))

    def ask(self, slot, search, **values):
        self.say(slot, **values)
        text = " ".join(self.notes)
        self.steps.append(search._replace(thought=text[0].upper() + text[1:]))
        self.notes = []

    def teach(self, style):
        """(searches, last thought, the style that was possible). style: "direct" or "exploring",
        which becomes direct if there is nothing else to look at."""
        self.open()
        if len(self.journey.route) > 1:
            self.survey({"direct": 1, "exploring": 3}[style])
        self.go_out_and_home(style)
        if len(self.journey.route) == 1:
            self.ask("beds", self.look("hotels", *self.journey.route), **self.place)
            self.hotel(self.journey.stays[0])
        self.hops()
        self.say("so far", **self.settle(meals=False))
        for i, stay in enumerate(self.journey.stays):
            self.eat_and_see(i, stay)
        self.say("final", **self.settle())
        if any(self.wish.values()):
            self.say("kept")
        style = "direct" if style == "exploring" and not self.further else style
        return self.steps, " ".join(self.notes), style

    def look(self, table, city):
        return solver.Search("", solver.SEARCHES[table], {"city": city})

    def open(self):
        task, many = self.task, len(self.journey.route) > 1
        wishes = [fill(self.rng, FORMS[name if name == "cuisine" else wish],
                       {"cuisines": join_words(wish) if name == "cuisine" else ""})
                  for name, wish in self.wish.items() if wish]
        values = self.place | {
            "days": task["days"], "number": task["visiting_city_number"], "dest": task["dest"],
            "budget": money(task["budget"]), "wishes": "".join(f"; {wish}" for wish in wishes)}
        if not many:
            return self.say("opening one", **values)
        self.ask("opening many", solver.state_search(task["dest"]), **values)
        return self.say("cities", found=len(self.database.states[task["dest"]]))

    # ------------------------------------------------------------ beds

    def rooms(self, row):
        return math.ceil(self.people / max(1, row.maximum_occupancy))

    def night(self, row):
        """The spelled-out cost of a night for the group."""
        return spelled((row.price, self.rooms(row)), noun=" rooms")

    def why_not(self, row):
        """Why a hotel does not fit, in words; "" if it does."""
        if solver.has_rule(self.wish, row):
            return FORMS["forbids"].strip().format(rule=self.wish["house rule"])
        if solver.has_other_room(self.wish, row):
            return FORMS["is no"].strip().format(kind=row.room_type)
        if row.minimum_nights > self.longest:
            least = counted(row.minimum_nights, "night")
            return FORMS["too long"].strip().format(least=least)
        return ""

    def why_none(self, city):
        """Why no hotel of a city fits, in words; "" if one does or the city has none."""
        rows, rule = self.database.hotels(city), self.wish.get("house rule")
        if not rows or not all(map(self.why_not, rows)):
            return ""
        right = [row for row in rows if not solver.has_other_room(self.wish, row)]
        banned = [row for row in rows if solver.has_rule(self.wish, row)]
        allowed = [row for row in right if row not in banned]
        least = min((row.minimum_nights for row in allowed), default=0)
        slot = ("all too long" if allowed else "none is" if not right else
                "all forbid" if len(banned) == len(rows) else "none is both")
        return " ".join(FORMS[slot].split()).format(
            rule=rule, least=counted(least, "night"), days=self.task["days"],
            number=self.task["visiting_city_number"], longest=self.longest)

    def row_of(self, bed, city):
        return solver.places(self.database, "hotels", city)[bed.name][0]

    def fits(self, row):
        if self.wish.get("room type"):
            self.say("fits room", kind=row.room_type)
        if self.wish.get("house rule"):
            self.say("fits rule", rule=self.wish["house rule"])

    def hotel(self, stay):
        """Say what a list of hotels showed: the hotel that is taken, and another one."""
        bed, row = stay.bed, self.row_of(stay.bed, stay.city)
        self.say("hotel", city=stay.city, bed=bed.name, cost=self.night(row),
                 least=counted(bed.nights, "night") + " at least")
        self.fits(row)
        others = [other for other in self.database.hotels(stay.city)
                  if other.name.strip() != bed.name and not re.search(r"[][\n]", other.name)]
        cost = {other: other.price * self.rooms(other) for other in others}
        same = [other for other in others if cost[other] <= bed.cost and not self.why_not(other)
                and other.minimum_nights <= stay.nights]
        if same and all(other.review < row.review for other in same):
            self.say("rated", review=f"{row.review:g}")
        unfit = [other for other in others if cost[other] < bed.cost and self.why_not(other)]
        dear = [other for other in others if cost[other] > bed.cost]
        if unfit or dear:
            other = self.rng.choice(unfit or dear)
            self.say("unfit" if unfit else "dearer", other=other.name, cost=self.night(other),
                     why=self.why_not(other))

    def survey(self, extras):
        """Search the hotels of the journey's cities and of `extras` others."""
        stays = {stay.city: stay for stay in self.journey.stays}
        most = max(stay.bed.cost for stay in stays.values())
        spare = {city: self.cheapest(city) for city in self.spare}
        likely = [city for city, row in spare.items()
                  if row is None or row.price * self.rooms(row) > most]
        others = self.rng.sample(likely, min(len(likely), extras))
        others = others or self.rng.sample(list(spare), min(len(spare), 1))
        order, dearer, self.further = [*stays, *others], [], bool(others)
        self.rng.shuffle(order)
        for city in order:
            self.ask("survey", self.look("hotels", city), **self.place | {"city": city})
            if city in stays:
                self.hotel(stays[city])
            elif row := spare[city]:
                self.say("else fits", city=city, bed=row.name, cost=self.night(row))
                dearer.append(city)
            elif self.database.hotels(city):
                self.say("none fits", city=city, why=self.why_none(city))
            else:
                self.say("nothing", city=city)
        route = join_words(self.journey.route)
        for city in dearer:
            worse = spare[city].review < min(self.row_of(stay.bed, stay.city).review
                                             for stay in stays.values())
            slot = "choose dearer" if city in likely else "choose rated" if worse else "spare"
            self.say(slot, city=city, route=route, bed=spare[city].name,
                     review=f"{spare[city].review:g}")
        self.say("choose", route=route)

    def cheapest(self, city):
        """The cheapest hotel of a city that fits, a row; None if none fits."""
        rows = [row for row in self.database.hotels(city) if not self.why_not(row)]
        return min(rows, key=lambda row: row.price * self.rooms(row), default=None)

    # ------------------------------------------------------------ ways

    def units(self, way):
        """The number of tickets or cars for a way."""
        return self.people if way.flight else math.ceil(
            self.people / (5 if self.journey.mode == "road" else 4))

    def go_out_and_home(self, style):
        by_road = self.wish.get("transportation") == "no flight"
        looked = style != "exploring"
        for slot, way in ("out road" if by_road else "out", self.journey.ways[0]), (
                "home", self.journey.ways[-1]):
            self.go(slot, way)
            looked = looked or self.compare(way)
        self.further = self.further or looked

    def go(self, slot, way):
        """Make the searches for a ride, and state their results."""
        found = self.database.flights(way.a, way.b, way.date)
        kind = "driving" if self.journey.mode == "road" else "taxi"
        for search in solver.way_searches(self.task, self.journey.mode, way.a, way.b, way.date,
                                          way.flight):
            self.ask(slot, search, a=way.a, b=way.b)
            if search.tool == "SearchFlight" and not way.flight:
                slot = kind
                if found:
                    least = min(found, key=lambda row: row.price)
                    self.say("flights dear", number=least.number,
                             cost=spelled((least.price, self.people), noun=" people"))
                else:
                    self.say("no flight that day", a=way.a, b=way.b)
        if way.flight:
            self.flight(way, found)
            return
        units, duration = self.units(way), self.database.distance(way.a, way.b).duration
        self.say(f"by {kind}", duration=duration,
                 cost=spelled((way.cost / units, units), noun=" cars"))
        if slot == "driving" and found and way.cost < least.price * self.people:
            self.say("less", other=money(least.price * self.people))

    def flight(self, way, found):
        """Say what a list of flights showed: the flight that is taken, and another one."""
        number = way.words[15:].split(",")[0]
        row = next(row for row in found if row.number == number)
        self.say("flight", number=number, leaves=row.departure,
                 cost=spelled((row.price, self.people), noun=" people"))
        for other in found:
            slot = "cheaper" if other.price > row.price else (
                "later" if other.departure < row.departure else "earlier")
            if other.price != row.price and other.departure != row.departure:
                self.say(f"flight {slot}", other=other.number, price=money(other.price),
                         leaves=other.departure)
                break

    def compare(self, way):
        """Search another way without taking it; False if there is none to search."""
        by_air = self.journey.mode == "air"
        if by_air and not way.flight:
            return False
        by_taxi = not by_air or bool(self.wish.get("transportation"))
        words, per_km, seats = ("a taxi", 1, 4) if by_taxi else ("driving", 0.05, 5)
        self.ask("compare", solver.Search("", "GoogleDistanceMatrix", {
            "departure": way.a, "destination": way.b, "mode": words.removeprefix("a ")}),
            kind=words, a=way.a, b=way.b)
        if road := solver.drive(self.database, way.a, way.b):
            cost, cars = int(road.km * per_km), math.ceil(self.people / seats)
            self.say("compare less" if cost * cars < way.cost else "compare more",
                     kind=words.capitalize(), cost=spelled((cost, cars), noun=" cars"),
                     duration=self.database.distance(way.a, way.b).duration)
        else:
            self.say("compare none", a=way.a, b=way.b)
        return True

    def hops(self):
        """Split the nights, then search the ways between the cities."""
        journey = self.journey
        if len(journey.route) > 1:
            self.split([stay.nights for stay in journey.stays])
        for way in journey.ways[1:-1]:
            self.go("hop", way)

    def split(self, nights):
        shares = [f"{n} in {city}" for n, city in zip(nights, self.journey.route, strict=True)]
        total = " + ".join(map(str, nights)) + f" = {sum(nights)}"
        self.say("split", sum=total, shares=join_words(shares))
        longest = max((stay.bed for stay in self.journey.stays), key=lambda bed: bed.nights)
        if longest.nights > 1:
            self.say("minimum", bed=longest.name, least=counted(longest.nights, "night"))

    # ------------------------------------------------------------ meals, sights, sums

    def eat_and_see(self, i, stay):
        wanted = solver.cuisines(self.task)
        served = [meal.mask for before in self.journey.stays[:i] for meal in before.meals]
        missing = self.unserved(served)
        if stay.meals:
            self.ask("restaurants wanted" if missing else "restaurants",
                     self.look("restaurants", stay.city), city=stay.city,
                     cuisines=join_words(missing or [""]))
            self.say("meals", city=stay.city, count=counted(len(stay.meals), "meal"),
                     cost=spelled(*((meal.cost, 1) for meal in stay.meals)))
            for meal in stay.meals:
                new = [name for name in missing if meal.mask >> wanted.index(name) & 1]
                if new:
                    self.say("serves", meal=meal.name, cuisines=join_words(new))
                    missing = [name for name in missing if name not in new]
            if missing:
                self.say("missing", cuisines=join_words(missing))
            elif self.unserved(served):
                self.say("covered")
        if stay.sights:
            self.ask("attractions", self.look("attractions", stay.city), city=stay.city)
            self.say("sights", sights=join_words([f"[{name}]" for name in stay.sights]))

    def unserved(self, masks):
        """The wanted cuisines that no meal with one of these masks serves."""
        return [name for i, name in enumerate(solver.cuisines(self.task))
                if not any(mask >> i & 1 for mask in masks)]

    def bill(self, meals=True):
        """[(kind of cost, terms)] of the plan so far."""
        journey = self.journey
        ways = [(way.cost / self.units(way), self.units(way)) for way in journey.ways]
        beds = [(stay.bed.cost, stay.nights) for stay in journey.stays]
        eaten = [(sum(meal.cost for meal in stay.meals), self.people)
                 for stay in journey.stays if stay.meals]
        return [("ways", ways), ("nights", beds)] + [("meals", eaten)] * meals

    def settle(self, meals=True):
        """The bill in words."""
        bill = self.bill(meals)
        sums = [sum(cost * n for cost, n in terms) for _, terms in bill]
        return {what: spelled(*terms) for what, terms in bill} | {
            "sum": spelled(*((cost, 1) for cost in sums)), "budget": money(self.task["budget"]),
            "spent": money(sum(sums)), "left": f"${money(self.task['budget'] - sum(sums))}"}
