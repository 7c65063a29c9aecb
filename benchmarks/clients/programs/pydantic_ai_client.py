"""pydantic-ai, with its models for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any, Literal

from checks import KEY, MODEL, QUESTION, URL, V1, need, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=V1, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
SHORT: Any = {"max_tokens": 24}
LONG: Any = {"max_tokens": 200, "temperature": 0}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool


def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat() -> None:
    need(Agent(model, model_settings=SHORT).run_sync(QUESTION).output, "no text")


async def stream() -> None:
    async with Agent(model, model_settings=SHORT).run_stream(QUESTION) as answer:
        need([text async for text in answer.stream_text(delta=True)], "no pieces")


def tools() -> None:
    need(Agent(model, tools=[weather], model_settings=SHORT).run_sync(QUESTION).output, "no text")


def structured(kind: Any, used: Any = model) -> Any:
    def feature() -> None:
        agent = Agent(used, output_type=kind(Pet), model_settings=LONG, retries=0)
        need(isinstance(agent.run_sync("A cat.").output, Pet), "no Pet")

    return feature


def form_and_tools() -> None:
    agent = Agent(model, output_type=NativeOutput(Pet), tools=[weather], model_settings=LONG, retries=0)
    need(isinstance(agent.run_sync("A cat.").output, Pet), "no Pet")


def one_call() -> None:
    agent = Agent(model, tools=[weather], model_settings=SHORT | {"parallel_tool_calls": False})
    need(agent.run_sync(QUESTION).output, "no text")


def responses() -> None:
    used = OpenAIResponsesModel(MODEL, provider=provider)
    need(Agent(used, model_settings=SHORT).run_sync(QUESTION).output, "no text")


anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(api_key=KEY, base_url=URL))


def messages() -> None:
    need(Agent(anthropic, model_settings=SHORT).run_sync(QUESTION).output, "no text")


run(
    chat=chat,
    stream=stream,
    tools=tools,
    tool_output=structured(ToolOutput),
    native_output=structured(NativeOutput),
    form_and_tools=form_and_tools,
    one_call=one_call,
    responses=responses,
    anthropic_form=messages,
    anthropic_tool_output=structured(ToolOutput, anthropic),
)
