"""LlamaIndex' OpenAILike."""

from typing import Any, Literal

from checks import KEY, MODEL, QUESTION, V1, need, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

GATEWAY: dict[str, Any] = {
    "model": MODEL,
    "api_base": V1,
    "api_key": KEY,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "context_window": 4096,
    "max_retries": 0,
}
llm = OpenAILike(**GATEWAY, max_tokens=24)
long = OpenAILike(**GATEWAY, max_tokens=200, temperature=0, should_use_structured_outputs=True)


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    tame: bool


def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat() -> None:
    need(llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content, "no text")


def stream() -> None:
    need(list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)])), "no pieces")


def complete() -> None:
    need(llm.complete("def add(a, b):").text, "no text")


def tools() -> None:
    for more in ({}, {"allow_parallel_tool_calls": False}):
        answer = long.chat_with_tools(
            [FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True, **more
        )
        need(long.get_tool_calls_from_response(answer), "no call")


def structured() -> None:
    answer = long.as_structured_llm(Pet).chat([ChatMessage(role="user", content="A cat.")])
    need(isinstance(answer.raw, Pet), "no Pet")


run(chat=chat, stream=stream, complete=complete, forced_tool=tools, structured=structured)
