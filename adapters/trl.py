"""
The travel world for people who train in TRL: TravelEnv for environment_factory, and its reward.

    from adapters.trl import TravelEnv, travel_reward
    trainer = GRPOTrainer(model=..., train_dataset=rows, reward_funcs=travel_reward,
                          environment_factory=TravelEnv, args=GRPOConfig(...))

A row of the data set has a "prompt" (messages) and a "task", from synth.py or as published. TRL
makes the tools' schemas from the methods of TravelEnv: they are made here from our own schemas, in
the system prompt, of the six tools of the benchmark.
"""
import json
from functools import cache
from inspect import Parameter, Signature

from sandbox import Sandbox, open_database, read_prompt
from travel.constraints import judge, reward
from travel.world import load_task

SCHEMAS = [json.loads(line)["function"] for line in read_prompt().splitlines()
           if line.startswith('{"type": "function"')]
database = cache(open_database)


class TravelEnv:
    """One episode: TRL calls reset with the row's columns; the other methods are the tools."""

    def reset(self, task, **columns):
        self.task = load_task(task)
        self.sandbox = Sandbox(database().of(self.task))


def tool(name, description, parameters):
    """A method with the docstring and the type hints that TRL makes this schema of."""
    def call(self, **arguments: str) -> str:
        return self.sandbox.call(name, arguments)

    told = parameters["properties"]
    call.__name__, call.__annotations__ = name, dict.fromkeys([*told, "return"], str)
    call.__doc__ = "\n".join([description, "", "Args:", *(
        f"    {key}: {hint['description']}" for key, hint in told.items())])
    call.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *(
        Parameter(key, Parameter.KEYWORD_ONLY, annotation=str,
                  default=Parameter.empty if key in parameters["required"] else "")
        for key in told)], return_annotation=str)
    return call


for schema in SCHEMAS:
    setattr(TravelEnv, schema["name"], tool(**schema))


def travel_reward(completions, environments, kind="sum", **columns):
    """A reward function for GRPOTrainer: the last message of each completion is the plan."""
    return [reward(judge(env.task, messages[-1]["content"], env.sandbox.database)[1], kind)
            for env, messages in zip(environments, completions, strict=True)]
