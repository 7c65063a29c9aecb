"""The official anthropic client, unchanged, against `disagg serve` in front of real servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.fleets import RunningFleet

if TYPE_CHECKING:  # 4 s, which only the process that runs these tests spends
    import anthropic

ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "extra_body": {"temperature": 0},  # no parameter of this client any more
    "system": "be short",
    "messages": [{"role": "user", "content": "def add(a, b):"}],
}
TOOL: dict[str, Any] = {
    "name": "feed",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(gateway: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=gateway, api_key="unused", max_retries=0) as client:
        yield client


def test_a_message_is_answered_as_the_python_api_answers_it_streamed_or_not(
    client: anthropic.Anthropic, tiny_fleet: RunningFleet
) -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    chat = [{"role": "system", "content": "be short"}, *ASKED["messages"]]
    with tiny_fleet.client() as direct:
        expected = direct.generate("tiny", messages=chat, max_tokens=12)
    assert whole.content[0].text == "".join(pieces) == expected.text
    assert streamed.stop_reason == whole.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == expected.metrics.completion_tokens
    read = whole.usage.cache_read_input_tokens or 0
    assert whole.usage.input_tokens + read == expected.metrics.prompt_tokens
    begun: Any = next(iter(client.messages.create(**ASKED, stream=True)))
    counted = begun.message.usage
    assert counted.input_tokens + counted.cache_read_input_tokens == expected.metrics.prompt_tokens


def test_an_answer_goes_on_with_a_last_message_of_the_assistant(
    client: anthropic.Anthropic, tiny_fleet: RunningFleet
) -> None:
    begun: list[Any] = [*ASKED["messages"], {"role": "assistant", "content": "def sub("}]
    whole = client.messages.create(**{**ASKED, "messages": begun})
    with client.messages.stream(**{**ASKED, "messages": begun}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    chat = [{"role": "system", "content": "be short"}, *begun]
    with tiny_fleet.client() as direct:
        expected = direct.generate("tiny", messages=chat, max_tokens=12, continue_final_message=True)
        closed = direct.generate("tiny", messages=chat, max_tokens=12)
        alone = direct.generate("tiny", messages=chat, max_tokens=12, continue_final_message=True, alone="prefill")
    assert whole.content[0].text == expected.text == alone.text != closed.text
    counted = client.messages.count_tokens(model="tiny", system="be short", messages=begun).input_tokens
    assert counted == expected.metrics.prompt_tokens < closed.metrics.prompt_tokens


def test_a_tool_that_must_be_called_is_called(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "feed"}}
    (whole,) = client.messages.create(**asked).content
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert (whole.type, whole.name) == ("tool_use", "feed") and whole.input["kind"] in ("cat", "dog")
    assert streamed.input == whole.input


def test_an_answer_is_parsed_as_the_client_s_structured_output(client: anthropic.Anthropic) -> None:
    import pydantic

    class Pet(pydantic.BaseModel):
        kind: Literal["cat", "dog"]

    answer = client.messages.parse(**{**ASKED, "max_tokens": 60}, output_format=Pet)
    assert answer.parsed_output is not None
    assert answer.parsed_output.kind in ("cat", "dog")


def test_models_are_listed_as_the_client_reads_them(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, client.models.retrieve("alias-of-tiny").id) == ("tiny", "tiny")


def test_errors_are_the_client_s_own(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "a b " * 4096}]})


def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "tools": [TOOL], "max_tokens": 1, "tool_choice": {"type": "any"}}
    usage = client.messages.create(**asked).usage
    del asked["max_tokens"], asked["extra_body"]
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
