"""OpenAI's agents SDK, over Chat Completions and Responses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MODEL, QUESTION, V1, need, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool


@function_tool
def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def asked(kind: Any, **fields: Any) -> Any:
    def feature() -> None:
        model = kind(MODEL, AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0))
        settings = fields.pop("settings", ModelSettings(max_tokens=24))
        agent = Agent(name="a", instructions="Be short.", model=model, model_settings=settings, **fields)
        with suppress(MaxTurnsExceeded):  # this model calls its tool again and again
            need(Runner.run_sync(agent, QUESTION, max_turns=2).final_output is not None, "no output")

    return feature


LONG = ModelSettings(max_tokens=200, temperature=0)
ONE_LONG = ModelSettings(max_tokens=200, temperature=0, parallel_tool_calls=False)
WHOLE = ModelSettings(max_tokens=200, extra_body={"stop": ["\n", ".", " "]})
"""Of an answer that ends: this client takes no response that is incomplete."""
ONE = ModelSettings(max_tokens=24, parallel_tool_calls=False)


async def stream() -> None:
    own = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0))
    settings = ModelSettings(max_tokens=24, include_usage=True)
    result = Runner.run_streamed(Agent(name="a", model=own, model_settings=settings), QUESTION)
    need([event.type async for event in result.stream_events()], "no events")


run(
    chat=asked(OpenAIChatCompletionsModel),
    stream=stream,
    tools=asked(OpenAIChatCompletionsModel, tools=[weather]),
    one_call=asked(OpenAIChatCompletionsModel, tools=[weather], settings=ONE),
    output_type=asked(OpenAIChatCompletionsModel, output_type=Pet, settings=LONG),
    form_and_tools=asked(OpenAIChatCompletionsModel, output_type=Pet, tools=[weather], settings=ONE_LONG),
    responses=asked(OpenAIResponsesModel, settings=WHOLE),
    responses_tools=asked(OpenAIResponsesModel, tools=[weather], settings=WHOLE),
    responses_output_type=asked(OpenAIResponsesModel, output_type=Pet, settings=LONG),
    responses_form_and_tools=asked(OpenAIResponsesModel, output_type=Pet, tools=[weather], settings=ONE_LONG),
)
