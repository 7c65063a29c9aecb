"""The pieces of a whole-request host's answer as events."""

from __future__ import annotations

import json

from disagg.whole.answers import WholeAnswer
from tests.whole.fake_openai import ended, said


def test_a_call_is_given_once_though_its_end_is_stated_twice() -> None:
    part = {"index": 0, "id": "c", "function": {"name": "add", "arguments": "{}"}}
    last, usage = ended("tool_calls")
    answer = WholeAnswer("ollama")
    events = [answer.take(json.dumps(one).encode()) for one in (said("", tool_calls=[part]), last, last, usage)]
    assert [call.id for event in events if event for call in event.tool_calls] == ["c"]
    assert answer.done().finish_reason == "tool_calls"


def test_a_second_call_is_left_out_of_an_answer_that_has_one_at_most() -> None:
    parts = [{"index": at, "id": f"c{at}", "function": {"name": "add", "arguments": "{}"}} for at in range(2)]
    answer = WholeAnswer("ollama", one_call=True)
    events = [answer.take(json.dumps(one).encode()) for one in (said("", tool_calls=parts), *ended("tool_calls"))]
    assert [call.id for event in events if event for call in event.tool_calls] == ["c0"]
    assert answer.done().finish_reason == "tool_calls"
    assert answer.warnings[0] == "ollama sent 2 tool calls, and one was asked for: the first is used"
