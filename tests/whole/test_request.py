"""Requests to whole-request hosts, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.api.requests import ChatMessage, GenerateBody, Tool
from disagg.api.sampling import Sampling
from disagg.errors import CapabilityMissing
from disagg.whole.request import openai_request

CHAT = (ChatMessage("user", "x" * 300),)
F, G = (Tool(name, "", {"type": "object"}) for name in "fg")


def asked(**fields: Any) -> dict[str, Any]:
    return dict(openai_request(GenerateBody(model="m", messages=CHAT, **fields), "there", 1000).body)


@pytest.mark.parametrize(
    ("fit", "given", "least", "most"),
    [
        (True, 4096, 800, 900),  # a prompt of 300 bytes and its JSON
        (True, 7, 7, 7),
        (False, 4096, 4096, 4096),
    ],
)
def test_a_bound_that_may_be_lowered_fits_the_context(fit: bool, given: int, least: int, most: int) -> None:
    assert least <= asked(sampling=Sampling(max_tokens=given, fit_context=fit))["max_tokens"] <= most


@pytest.mark.parametrize(("given", "sent"), [(62, 62), (63, None), (4096, None)])
def test_a_prompt_that_may_fill_the_context_is_sent_with_a_small_bound_only(given: int, sent: int | None) -> None:
    body = GenerateBody(model="m", prompt="x" * 9000, sampling=Sampling(max_tokens=given, fit_context=True))
    assert openai_request(body, "there", 1000).body.get("max_tokens") == sent


@pytest.mark.parametrize(
    ("must_call", "fields"),
    [
        ((), {}),
        (("f",), {"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False}),
        (("f", "g"), {"tool_choice": "required", "parallel_tool_calls": False}),
    ],
)
def test_a_forced_answer_is_one_call(must_call: tuple[str, ...], fields: dict[str, Any]) -> None:
    body = asked(tools=(F, G), must_call=must_call)
    assert {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body} == fields


def test_one_call_at_most_is_asked_for_if_there_are_tools() -> None:
    assert asked(tools=(F,), parallel_tool_calls=False)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in asked(tools=(F,)) | asked(parallel_tool_calls=False)


TEXT = {"type": "string"}
CLOSED = {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (TEXT, True),
        (CLOSED, True),
        ({"type": "array", "items": CLOSED}, True),
        ({**CLOSED, "required": []}, False),
        ({**CLOSED, "additionalProperties": True}, False),
        ({"anyOf": [CLOSED, {"type": "object"}]}, False),
    ],
)
def test_a_schema_is_strict_if_openai_would_take_it_as_one(schema: dict[str, Any], strict: bool) -> None:
    assert asked(json_schema=schema)["response_format"]["json_schema"]["strict"] is strict


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"regex": "a"}, "regex"),
        ({"choice": ("a",)}, "choice"),
        ({"grammar": "start: x"}, "grammar"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"sampling": Sampling(min_tokens=1)}, "min_tokens"),
        ({"sampling": Sampling(stop_token_ids=(1,))}, "stop_token_ids"),
        ({"sampling": Sampling(bad_words=("a",))}, "bad_words"),
        ({"sampling": Sampling(include_stop_str_in_output=True)}, "include_stop_str_in_output"),
    ],
)
def test_what_openai_s_api_cannot_state_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CapabilityMissing, match=f"^{named}: "):
        asked(**fields)


def test_a_message_that_was_begun_is_refused_and_a_gap_is_asked_for_by_its_suffix() -> None:
    begun = (*CHAT, ChatMessage("assistant", "It"))
    with pytest.raises(CapabilityMissing, match=r"^continue_final_message: "):
        openai_request(GenerateBody(model="m", messages=begun, continue_final_message=True), "there", 1000)
    assert openai_request(GenerateBody(model="m", prompt="a", suffix="b"), "there", 1000).body["suffix"] == "b"
