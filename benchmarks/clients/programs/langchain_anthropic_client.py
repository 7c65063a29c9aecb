"""LangChain's ChatAnthropic."""

from __future__ import annotations

from typing import Literal

from checks import KEY, MODEL, QUESTION, URL, need, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

chat = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=24)
long = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=200)


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    tame: bool


@tool
def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def invoke() -> None:
    answer = chat.invoke(QUESTION)
    need(answer.content and answer.usage_metadata, "no text or no usage")


def stream() -> None:
    need(len(list(chat.stream(QUESTION))) > 4, "no pieces")


def structured() -> None:
    need(isinstance(long.with_structured_output(Pet).invoke("A cat."), Pet), "no Pet")


def json_schema() -> None:
    need(isinstance(long.with_structured_output(Pet, method="json_schema").invoke("A cat."), Pet), "no Pet")


def forced_tool() -> None:
    need(long.bind_tools([weather], tool_choice="any").invoke(QUESTION).tool_calls, "no call")


def one_call() -> None:
    need(chat.bind_tools([weather], parallel_tool_calls=False).invoke(QUESTION), "no answer")


def count() -> None:
    need(chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]), "no count")


run(
    invoke=invoke,
    stream=stream,
    structured=structured,
    json_schema=json_schema,
    forced_tool=forced_tool,
    one_call=one_call,
    count_tokens=count,
)
