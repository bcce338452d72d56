"""
The travel world for people who train in TRL: TravelEnv for environment_factory, and its reward.

    from adapters.trl import TravelEnv, travel_reward
    trainer = GRPOTrainer(model=..., train_dataset=rows, reward_funcs=travel_reward,
                          environment_factory=TravelEnv, args=GRPOConfig(...))

A row of the data set has a "prompt" (messages) and a "task", from synth.py or as published. TRL
makes the tools' schemas from the methods below, which are the six tools of the benchmark.
"""
from functools import cache

from sandbox import Sandbox, open_database
from travel.constraints import judge, reward
from travel.world import load_task

database = cache(open_database)


class TravelEnv:
    """One episode: TRL calls reset with the row's columns; the other methods are the tools."""

    def reset(self, task, **columns):
        self.task = load_task(task)
        self.sandbox = Sandbox(database().of(self.task))

    def SearchCity(self, state: str) -> str:
        """List the cities of a state.

        Args:
            state: The name of the state.
        """
        return self.sandbox.call("SearchCity", {"state": state})

    def SearchFlight(self, departure: str, destination: str, date: str) -> str:
        """List the flights between two cities on a date.

        Args:
            departure: The city to fly from.
            destination: The city to fly to.
            date: The date of the flight, as YYYY-MM-DD.
        """
        ends = {"departure": departure, "destination": destination}
        return self.sandbox.call("SearchFlight", ends | {"date": date})

    def GoogleDistanceMatrix(self, departure: str, destination: str, mode: str) -> str:
        """Estimate the distance, time and cost of a road trip between two cities.

        Args:
            departure: The city to start from.
            destination: The city to go to.
            mode: How to travel, driving or taxi.
        """
        ends = {"departure": departure, "destination": destination}
        return self.sandbox.call("GoogleDistanceMatrix", ends | {"mode": mode})

    def SearchRestaurant(self, city: str) -> str:
        """List the restaurants of a city.

        Args:
            city: The name of the city.
        """
        return self.sandbox.call("SearchRestaurant", {"city": city})

    def SearchAttraction(self, city: str) -> str:
        """List the attractions of a city.

        Args:
            city: The name of the city.
        """
        return self.sandbox.call("SearchAttraction", {"city": city})

    def SearchAccommodation(self, city: str) -> str:
        """List the accommodations of a city.

        Args:
            city: The name of the city.
        """
        return self.sandbox.call("SearchAccommodation", {"city": city})


def travel_reward(completions, environments, kind="sum", **columns):
    """A reward function for GRPOTrainer: the last message of each completion is the plan."""
    return [reward(judge(env.task, messages[-1]["content"], env.sandbox.database)[1], kind)
            for env, messages in zip(environments, completions, strict=True)]
