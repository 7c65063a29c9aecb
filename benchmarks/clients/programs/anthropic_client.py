"""Anthropic's Python client."""

from __future__ import annotations

from typing import Any, Literal

from anthropic import Anthropic
from checks import KEY, MODEL, PET, QUESTION, URL, WEATHER, is_pet, need, refused, run
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SHORT: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 24}
LONG = SHORT | {"max_tokens": 200}
TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool


def chat() -> None:
    answer = client.messages.create(**SHORT, system="Be short.")
    need(answer.content[0].text and answer.usage.output_tokens, "no text or no usage")


def stream() -> None:
    with client.messages.stream(**SHORT) as events:
        for _ in events.text_stream:
            pass
        final = events.get_final_message()
    need(final.usage.input_tokens and final.stop_reason in ("max_tokens", "end_turn"), "no usage or no reason")


def count_tokens() -> None:
    need(client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens, "no count")


def stop() -> None:
    answer = client.messages.create(**LONG, stop_sequences=["e"])
    need(answer.stop_reason in ("stop_sequence", "max_tokens", "end_turn"), "another reason")


def forced_tool() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        answer = client.messages.create(**LONG, tools=[TOOL], tool_choice=choice)
        need(answer.content[-1].type == "tool_use" and set(answer.content[-1].input) == {"city", "unit"}, "no call")


def tool_loop() -> None:
    answer = client.messages.create(**LONG, tools=[TOOL], tool_choice={"type": "any"})
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "sunny"}
    turns = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    need(client.messages.create(**SHORT | {"messages": turns}, tools=[TOOL]).content, "no answer to the result")


def json_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": PET}}
    answer = client.messages.create(**LONG, output_config=form)
    need(is_pet(answer.content[0].text), "not of the form")


def parse() -> None:
    answer = client.messages.parse(**LONG | {"max_tokens": 400}, output_format=Pet)
    need(isinstance(answer.parsed_output, Pet), "no Pet")


def prefilled() -> None:
    turns = [*ASKED, {"role": "assistant", "content": "The answer is"}]
    need(client.messages.create(**SHORT | {"messages": turns}).content, "no answer")


def thinking() -> None:
    answer = client.messages.create(**SHORT | {"max_tokens": 1100}, thinking={"type": "enabled", "budget_tokens": 1024})
    need(answer.content, "no answer")


def web_search() -> None:
    client.messages.create(**SHORT, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def models() -> None:
    need(MODEL in {model.id for model in client.models.list()}, "the model is not listed")


def batches() -> None:
    refused(lambda: client.messages.batches.create(requests=[{"custom_id": "a", "params": SHORT}]), "NotFoundError")
    client.messages.batches.create(requests=[{"custom_id": "a", "params": SHORT}])


def errors() -> None:
    refused(lambda: client.messages.create(**SHORT | {"model": "claude-9"}), "NotFoundError", "claude-9")


def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    client.messages.create(**SHORT | {"messages": turns})


run(
    chat=chat,
    stream=stream,
    count_tokens=count_tokens,
    stop=stop,
    forced_tool=forced_tool,
    tool_loop=tool_loop,
    json_schema=json_schema,
    parse=parse,
    prefilled=prefilled,
    thinking=thinking,
    web_search=web_search,
    models=models,
    batches=batches,
    errors=errors,
    image=image,
)
