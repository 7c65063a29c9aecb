"""disagg/api/base.py: what a value looks like as JSON, and the one-line reason for a value that does not fit."""

from __future__ import annotations

import json

import pytest

from disagg.api.base import Bounds, InvalidValue, bounds, without_value
from disagg.api.events import EVENTS, ErrorAnswer, ErrorEvent, TokenLogprob, TokensEvent
from disagg.api.requests import DecodeBody, PromptBody
from disagg.api.sampling import Sampling
from disagg.api.status import Health
from disagg.errors import Overloaded, ProtocolError, RequestError

PROMPT = {"model": "m", "prompt": "x"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON: Input data was truncated"),
        (b"prompt=x", "not JSON: invalid character (byte 0)"),
        (b"[1]", "expected object, got array"),
        (b'{"model": "m", "chat_template_kwargs": {"a": %b}}' % (b"[" * 10_000 + b"]" * 10_000), "nested too deeply"),
        (b'{"model": "m"}', "give exactly one of prompt, messages and tokens"),
        (b'{"prompt": "x"}', "model: missing"),
        (b'{"model": "m", "tokens": [1, -1]}', "tokens[1]: expected int >= 0 (got -1)"),
        (b'{"model": "m", "prompt": "x", "sampling": {"top_p": 0}}', "sampling.top_p: expected float > 0.0 (got 0)"),
        (b'{"model": "m", "prompt": "x", "sampling": {"topp": 0}}', "sampling.topp: unknown field"),
        (b'{"model": "m", "messages": [{"role": "", "content": ""}]}', "messages[0].role: must not be empty (got '')"),
        (b'{"model": "m", "prompt": "\xff"}', "not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"model": 1, "tokens": ' + b"[" * 100_000, "model: expected str, got int (got None)"),
    ],
)
def test_a_value_that_does_not_fit_is_one_line_with_field_reason_and_value(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        DecodeBody.from_bytes(body)
    assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(InvalidValue) as caught:
        DecodeBody.from_json({**PROMPT, "deadline_s": "x" * 1000})
    assert len(str(caught.value)) < 130 and str(caught.value).endswith("...)")


def test_json_and_bytes_round_trip() -> None:
    event = TokensEvent("a", (TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))),))
    text = '{"text":"a","tokens":[{"id":1,"logprob":-0.5,"top":[[1,-0.5],[2,-1.0]]}]}'
    assert event.to_bytes().decode() == text and json.loads(json.dumps(event.to_json())) == json.loads(text)
    assert TokensEvent.from_json(event.to_json()) == TokensEvent.from_bytes(event.to_bytes()) == event


def test_requests_forbid_unknown_fields_and_answers_ignore_them() -> None:
    with pytest.raises(InvalidValue, match="newer: unknown field"):
        PromptBody.from_json({**PROMPT, "newer": 1})
    health = {"status": "ok", "model": "m", "role": "decode", "host": "h", "newer": 1}
    assert Health.from_json(health).host == "h"


def test_a_malformed_answer_names_its_sender_and_type() -> None:
    with pytest.raises(ProtocolError, match="mac-1 sent a malformed TokensEvent: tokens: missing"):
        TokensEvent.received({"text": "a"}, "mac-1")


def test_an_error_event_carries_a_disagg_error() -> None:
    event = ErrorEvent.of(Overloaded("full", "wait"))
    body = {"error": {"code": "Overloaded", "message": "full", "hint": "wait", "retry_after_s": 1}}
    assert ErrorAnswer(event).to_json() == body
    assert ErrorEvent.of(RequestError("bad")).retry_after_s is None
    assert {kind.event for kind in EVENTS.values()} == set(EVENTS) and ErrorEvent.event == "error"


def test_bounds_are_read_from_the_type() -> None:
    description = "Sample from this share of the probability."
    assert bounds(Sampling, "top_p") == Bounds(0, 1, exclusive_minimum=True, description=description)
    assert bounds(Sampling, "seed").maximum == (1 << 63) - 1  # also of a field that may be None
    assert bounds(Sampling, "ignore_eos").minimum is None


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("top_p: expected float > 0.0 (got 'secret')", "top_p: expected float > 0.0"),
        ("tools[0].type: 'secret' is no type of tool", "tools[0].type"),
        ("messages[0].role: invalid enum value 'secret'", "messages[0].role: invalid enum value"),
        ("tools[0].secret: unknown field", "unknown field"),
        ("no full answer by the request's deadline", "no full answer by the request's deadline"),
    ],
)
def test_what_history_and_logs_have_of_an_error_quotes_nothing_of_a_request(text: str, left: str) -> None:
    assert without_value(text) == left
