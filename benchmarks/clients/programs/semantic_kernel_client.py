"""Semantic Kernel's OpenAI connector."""

from __future__ import annotations

from typing import Any, Literal

from checks import KEY, MODEL, QUESTION, V1, need, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool


class Weather:
    @kernel_function(description="The weather of a city.")
    def weather(self, city: str) -> str:
        return f"sunny in {city}"


def asked(**settings: Any) -> Any:
    async def feature() -> None:
        service = OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0))
        kernel = Kernel()
        kernel.add_plugin(Weather(), "w")
        history = ChatHistory()
        history.add_user_message(QUESTION)
        given = OpenAIChatPromptExecutionSettings(**{"max_tokens": 24, **settings})
        answers = await service.get_chat_message_contents(history, given, kernel=kernel)
        need(answers[0].items, "no answer")
        if "response_format" in settings:
            Pet.model_validate_json(str(answers[0]))

    return feature


async def stream() -> None:
    service = OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0))
    history = ChatHistory()
    history.add_user_message(QUESTION)
    pieces = service.get_streaming_chat_message_contents(history, OpenAIChatPromptExecutionSettings(max_tokens=24))
    need([piece async for piece in pieces], "no pieces")


AUTO = FunctionChoiceBehavior.Auto(auto_invoke=False)
REQUIRED = FunctionChoiceBehavior.Required(auto_invoke=False)
run(
    chat=asked(),
    stream=stream,
    tools=asked(function_choice_behavior=AUTO),
    forced_tool=asked(function_choice_behavior=REQUIRED, max_tokens=400),
    one_call=asked(function_choice_behavior=AUTO, parallel_tool_calls=False),
    json_schema=asked(response_format=Pet, max_tokens=200),
)
