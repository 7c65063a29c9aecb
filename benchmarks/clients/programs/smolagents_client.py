"""smolagents' OpenAI model and its agent that calls tools."""

from __future__ import annotations

from typing import Any

from checks import KEY, MODEL, PET, QUESTION, V1, is_pet, need, run
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=24)
long = OpenAIModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=600)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name (choices: ["Bern", "Rome"])
    """
    return f"sunny in {city}"


def generate() -> None:
    need(model.generate(ASKED).content, "no text")


def stream() -> None:
    need(list(model.generate_stream(ASKED)), "no pieces")


def form() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
    need(is_pet(model.generate(ASKED, response_format=schema, max_tokens=200).content), "not of the form")


def tools() -> None:
    answer = long.generate(ASKED, tools_to_call_from=[weather])
    need(answer.tool_calls, "no call")


def agent() -> None:
    ToolCallingAgent(tools=[], model=long).run(QUESTION, max_steps=1)


run(generate=generate, stream=stream, json_schema=form, forced_tool=tools, agent=agent)
