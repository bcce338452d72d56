"""
The solver as a teacher: plays from which a model learns to search and to turn back.

    (1) draft   draw a random journey that satisfies every wish and the budget
    (2) lesson  make the searches for it in an agent's order: cities, hotels, rides, meals. If asked
                to, the teacher first runs into a dead end of the task, and turns back
    (3) argue   before each search, write a thought on the last result: prices for the group,
                minimum nights, room type, house rule, missing cuisines, dollars spent

Every thought is true and uses only what the query and the results have shown so far: the solver
decides where to look, but never gives a reason that an agent could not have. Sums are spelled out.

Reads   database/prompts/thoughts.txt: the wordings, of which one between slashes is drawn
"""
import math

import numpy as np

from sandbox import PROMPTS, entries, fill, join_words
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
    results. dear: {city: a hotel of a dead end, which is planned with until it proves too dear}.
    """

    def __init__(self, rng, task, database, journey):
        self.rng, self.task, self.database, self.journey = rng, task, database, journey
        self.steps, self.notes, self.dear = [], [], {}
        self.wish, self.people = task["local_constraint"], task["people_number"]
        people = "1 person" if self.people == 1 else f"{self.people} people"
        self.place = {"city": journey.route[0], "people": people}
        self.longest = task["days"] - task["visiting_city_number"]  # nights in one city

    def say(self, slot, **values):
        self.notes.append(fill(self.rng, FORMS[slot], values))

    def ask(self, slot, search, **values):
        self.say(slot, **values)
        text = " ".join(self.notes)
        self.steps.append(search._replace(thought=text[0].upper() + text[1:]))
        self.notes = []

    def teach(self, exploring):
        """(searches, last thought, style): "exploring", by way of a dead end, if that is wanted and
        the task has one; else "direct"."""
        ends, route = self.dead_ends() if exploring else {}, self.journey.route
        kind = self.rng.choice(list(ends)) if ends else None
        end = self.rng.choice(ends[kind]) if ends else None
        self.open()
        if kind == "budget":
            self.dear = dict([end])
        elif kind:
            self.run_into(kind, *end)
        if len(route) > 1:
            self.beds("survey")
            self.say("choose", route=join_words(route))
        self.go("out road" if self.wish.get("transportation") == "no flight" else "out",
                self.journey.ways[0])
        self.go("home", self.journey.ways[-1])
        if len(route) == 1:
            self.beds("beds")
        else:
            self.split()
        for way in self.journey.ways[1:-1]:
            self.go("hop", way)
        self.say("so far", **self.settle(meals=False))
        for i, stay in enumerate(self.journey.stays):
            self.eat_and_see(i, stay)
        self.say("final", **self.settle())
        if any(self.wish.values()):
            self.say("kept")
        return self.steps, " ".join(self.notes), "exploring" if ends else "direct"

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

    def beds(self, slot):
        """Search the hotels of the cities, and say which ones are planned with."""
        for stay in self.journey.stays:
            self.ask(slot, self.look("hotels", stay.city), **self.place | {"city": stay.city})
            bed = self.taken(stay)
            row = self.row_of(bed, stay.city)
            self.say("hotel", city=stay.city, bed=bed.name, cost=self.night(row),
                     least=counted(bed.nights, "night") + " at least")
            self.fits(row)

    def taken(self, stay):
        return self.dear.get(stay.city, stay.bed)

    # ------------------------------------------------------------ ways

    def units(self, way):
        """The number of tickets or cars for a way."""
        return self.people if way.flight else math.ceil(
            self.people / (5 if self.journey.mode == "road" else 4))

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
            self.say("flight", number=way.flight.number, leaves=way.flight.departure,
                     cost=spelled((way.flight.price, self.people), noun=" people"))
            return
        units, duration = self.units(way), self.database.distance(way.a, way.b).duration
        self.say(f"by {kind}", duration=duration,
                 cost=spelled((way.cost / units, units), noun=" cars"))
        if slot == "driving" and found and way.cost < least.price * self.people:
            self.say("less", other=money(least.price * self.people))

    def split(self):
        stays = self.journey.stays
        self.say("split", sum=" + ".join(str(stay.nights) for stay in stays)
                 + f" = {sum(stay.nights for stay in stays)}",
                 shares=join_words([f"{stay.nights} in {stay.city}" for stay in stays]))
        longest = max(map(self.taken, stays), key=lambda bed: bed.nights)
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
        beds = [(self.taken(stay).cost, stay.nights) for stay in journey.stays]
        eaten = [(sum(meal.cost for meal in stay.meals), self.people)
                 for stay in journey.stays if stay.meals]
        return [("ways", ways), ("nights", beds)] + [("meals", eaten)] * meals

    def settle(self, meals=True):
        """The bill in words. If it exceeds the budget, first give up the dear hotel."""
        bill, budget = self.bill(meals), self.task["budget"]
        sums = [sum(cost * n for cost, n in terms) for _, terms in bill]
        said = {what: spelled(*terms) for what, terms in bill}
        values = said | {"sum": spelled(*((cost, 1) for cost in sums)), "budget": money(budget),
                         "spent": money(sum(sums)), "left": f"${money(budget - sum(sums))}"}
        if sum(sums) <= budget:
            return values
        city, dear = self.dear.popitem()
        bed = next(stay.bed for stay in self.journey.stays if stay.city == city)
        row = self.row_of(bed, city)
        self.say("over", city=city, dear=dear.name, bed=bed.name, cost=self.night(row),
                 least=counted(bed.nights, "night"),
                 parts=join_words([f"{what} {text}" for what, text in said.items()]), **values)
        self.fits(row)
        return self.settle(meals)

    # ------------------------------------------------------------ dead ends

    def dead_ends(self):
        """{kind: [dead end]}: "way", a city without a ride there or home; "hotel", a city where no
        hotel fits; "budget", only without these, a hotel that is too dear."""
        task, database, journey = self.task, self.database, self.journey
        home, first, last = task["org"], task["date"][0], task["date"][-1]
        spare = [city for city in solver.stop_cities(task, database) if city not in journey.route]
        ways = [(city, *leg) for city in spare for leg in ((home, city, first), (city, home, last))
                if not solver.goes(task, database, *leg)]
        hotels = [(city,) for city in spare if self.why_none(city)]
        if ways or hotels:
            return {kind: ends for kind, ends in (("way", ways), ("hotel", hotels)) if ends}
        total = sum(cost * n for _, terms in self.bill() for cost, n in terms)
        dear = [(stay.city, bed) for stay in journey.stays
                for bed in solver.lodgings(task, database, stay.city)
                if bed.nights <= stay.nights
                and total + (bed.cost - stay.bed.cost) * stay.nights > task["budget"]
                and means_one(database, "hotels", stay.city, bed.name)]
        return {"budget": dear} if dear else {}

    def run_into(self, kind, city, *leg):
        """Make the searches that show a city to be a dead end."""
        if kind == "hotel":
            self.ask("try hotel", self.look("hotels", city), city=city)
            return self.say("no bed", city=city, why=self.why_none(city))
        (a, b, _), kinds = leg, []
        slot = "try way out" if b == city else "try way home"
        for search in solver.way_searches(self.task, self.journey.mode, *leg, False):
            self.ask(slot, search, a=a, b=b, city=city)
            if search.tool == "SearchFlight":
                self.say("no flight that day", a=a, b=b)
            slot = "driving" if self.journey.mode == "road" else "taxi"
            kinds.append("air" if search.tool == "SearchFlight" else "road")
        return self.say("no way", a=a, b=b, city=city, kinds=" or by ".join(kinds))
