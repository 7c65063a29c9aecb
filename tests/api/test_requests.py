"""disagg/api/requests.py: which fields of a request go together."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.api.base import InvalidValue
from disagg.api.requests import GenerateBody, PromptBody

ASKED = {"role": "user", "content": "x"}
BEGUN = {"role": "assistant", "content": "It"}


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "begun"),
        ({"add_generation_prompt": False}, "closed"),
        ({"continue_final_message": True}, "within"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "within"),
    ],
)
def test_how_the_prompt_of_a_chat_ends(fields: dict[str, Any], ending: str) -> None:
    assert PromptBody.from_json({"model": "m", "messages": [ASKED, BEGUN], **fields}).ending == ending


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message: the last message is none of"),
        ({"messages": [ASKED], "continue_final_message": True}, "continue_final_message: the last message is none of"),
        (
            {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
            "continue_final_message: the last message is none of",
        ),
        (
            {"messages": [{**BEGUN, "tool_calls": [{"name": "f"}]}], "continue_final_message": True},
            "continue_final_message: the last message has tool calls",
        ),
        (
            {"messages": [BEGUN], "continue_final_message": True, "tools": [{"name": "f"}], "must_call": ["f"]},
            "must_call: the answer goes on with a text",
        ),
        ({"messages": [ASKED], "suffix": "y"}, "suffix: it follows a prompt of text"),
        ({"tokens": [1], "suffix": "y"}, "suffix: it follows a prompt of text"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason):
        GenerateBody.from_json({"model": "m", **fields})
