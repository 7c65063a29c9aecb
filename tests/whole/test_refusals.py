"""What a whole-request host may answer instead of an answer, as a table."""

from __future__ import annotations

import json

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import Overloaded, clipped
from disagg.whole.refusals import Reply, error_of, unknown_model

HOST = Host("mini", "h", ("whole",), "m", EngineOptions("openai", url="http://h/v1", model="llama"), 80)


@pytest.mark.parametrize(
    ("status", "headers", "content", "code", "message"),
    [
        (400, {}, b'{"error": {"message": "no"}}', "RequestError", "mini refuses the request: no"),
        (422, {}, b'{"detail": "no"}', "RequestError", "mini refuses the request: no"),
        (400, {}, b'{"error": "the context window"}', "ContextLengthExceeded", "the context window"),
        (401, {}, b"", "ServerRefused", "refuses its key: HTTP 401"),
        (404, {}, b'{"error": "no"}', "ServerRefused", "mini has no model 'llama': no"),
        (404, {"content-type": "text/html"}, b"<p>", "ServerRefused", "OpenAI-compatible server: HTTP 404, text/html"),
        (301, {"location": "/v2"}, b"", "ServerRefused", "redirects to /v2"),
        (502, {}, b"<p>", "ServerUnavailable", "failed: HTTP 502"),
        (500, {}, b'{"error": {"message": "x"}}', "DisaggError", "failed: HTTP 500: x"),
        (503, {}, b'{"error": {"message": "Loading model"}}', "Overloaded", "is busy: HTTP 503: Loading model"),
    ],
)
def test_each_refusal_is_one_line_of_its_kind(
    status: int, headers: dict[str, str], content: bytes, code: str, message: str
) -> None:
    error = error_of(Reply(status, headers, content), HOST)
    assert error.code() == code and message in error.message and "\n" not in error.message


@pytest.mark.parametrize(("header", "seconds"), [("7", 7), ("99999", 120), ("soon", 1), ("", 1)])
def test_the_wait_that_a_busy_host_asks_for_is_bounded(header: str, seconds: int) -> None:
    error = error_of(Reply(429, {"retry-after": header}, b""), HOST)
    assert isinstance(error, Overloaded) and error.retry_after_s == seconds


def test_a_model_that_is_missing_is_named_with_those_that_are_there() -> None:
    found = unknown_model(HOST, ("a", "b"))
    assert found is not None and found.message == "mini has no model 'llama': it has a, b"
    assert unknown_model(HOST, ("llama:latest",)) is None and unknown_model(HOST, ()) is None


ESCAPES = "\u001b]0;x\u0007\u001b[2J"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(500, {}, json.dumps({"error": {"message": f"{ESCAPES}no"}}).encode()),
        Reply(400, {}, json.dumps({"detail": f"{ESCAPES}no"}).encode()),
        Reply(302, {"location": f"/{ESCAPES}no"}, b""),
        Reply(404, {"content-type": f"{ESCAPES}no"}, b"<p>"),
    ],
)
def test_no_text_of_such_a_host_can_drive_the_terminal(reply: Reply) -> None:
    message = error_of(reply, HOST).message
    assert "no" in message and message.isprintable()


def test_no_name_of_a_model_and_no_reason_to_end_can_drive_the_terminal() -> None:
    found = unknown_model(HOST, (f"{ESCAPES}a",))
    assert found is not None and found.message.endswith("[2Ja") and found.message.isprintable()
    assert clipped(ESCAPES).isprintable()
