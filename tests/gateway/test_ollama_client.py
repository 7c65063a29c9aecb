"""The official ollama client, unchanged, against `disagg serve` in front of real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.fleets import RunningFleet

CHAT: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "def add(a, b):"}]
OPTIONS = {"temperature": 0, "num_predict": 12}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.fixture
def client(gateway: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=gateway, trust_env=False) as client:
        yield client


def test_a_chat_is_answered_as_the_python_api_answers_it_streamed_or_not(
    client: ollama.Client, tiny_fleet: RunningFleet
) -> None:
    whole = client.chat("tiny", CHAT, options=OPTIONS)
    parts = list(client.chat("tiny", CHAT, options=OPTIONS, stream=True))
    with tiny_fleet.client() as direct:
        expected = direct.generate("tiny", messages=CHAT, max_tokens=12)
    assert whole.message.content == "".join(part.message.content for part in parts) == expected.text
    assert (whole.done_reason, whole.eval_count) == (parts[-1].done_reason, parts[-1].eval_count) == ("length", 12)


def test_an_answer_goes_on_with_a_last_message_of_the_assistant(
    client: ollama.Client, tiny_fleet: RunningFleet
) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "def sub("}]
    with tiny_fleet.client() as direct:
        expected = direct.generate("tiny", messages=begun, max_tokens=12, continue_final_message=True)
    assert client.chat("tiny", begun, options=OPTIONS).message.content == expected.text
    with pytest.raises(ollama.ResponseError, match="no tokens for filling in the middle"):
        client.generate("tiny", "def f(", suffix=")")


def test_an_answer_fits_its_format(client: ollama.Client) -> None:
    answer = client.generate("tiny", "a pet", format=SCHEMA, options={"temperature": 0, "num_predict": 60})
    assert json.loads(answer.response)["kind"] in ("cat", "dog")


def test_models_are_listed_described_and_running(client: ollama.Client) -> None:
    assert {model.model for model in client.list().models} == {"tiny", "alias-of-tiny"}
    assert client.show("alias-of-tiny").modelinfo["disagg.context_length"] == 4096
    assert [model.model for model in client.ps().models] == ["tiny"]
    assert client.generate("tiny").done_reason == "load"
    with pytest.raises(ollama.ResponseError) as caught:
        client.show("llama")
    assert caught.value.status_code == 404
