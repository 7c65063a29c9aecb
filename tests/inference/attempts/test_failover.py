"""Answers that are cut off and go on on another host: one host breaks off on purpose, the others are real."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disagg.config import Fleet
from disagg.errors import ServerUnavailable
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.client import Client
from disagg.inference.types import Completion
from tests.fleets import TOKEN, RunningFleet
from tests.inference.fake_hosts import PATIENT, End, ask_nothing, breaking_off, only, with_first
from tests.values import present

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 7}


def patient(fleet: Fleet) -> Client:
    """A client that begins with the first host, and gives none up for being slow."""
    client = Client(fleet, token=TOKEN, policy=PATIENT, start=0)
    ask_nothing(client)
    return client


def ids(answer: Completion) -> list[int]:
    return [token.id for token in answer.tokens]


@pytest.mark.parametrize(
    ("after", "end", "sampling"),
    [(1, "cut", {}), (7, "cut", SAMPLED), (3, "error", {"repetition_penalty": 1.3}), (24, "cut", SAMPLED)],
)
def test_an_answer_that_is_cut_off_goes_on_as_if_nothing_had_happened(
    tiny_fleet: RunningFleet, after: int, end: End, sampling: dict[str, Any]
) -> None:
    """The last row: every token has arrived, only the end is missing."""
    real = tiny_fleet.fleet.hosts["tiny-decode"]
    with tiny_fleet.client() as client:
        whole = client.generate("tiny", PROMPT, max_tokens=24, ignore_eos=True, **sampling)
    fleet = tiny_fleet.fleet
    with (
        breaking_off(real, after, end) as port,
        patient(with_first(fleet, real.name, port)) as client,
        client.stream("tiny", PROMPT, max_tokens=24, ignore_eos=True, **sampling) as stream,
    ):
        chunks = list(stream)
    answer = stream.completion
    assert ids(answer) == ids(whole) and answer.text == whole.text == stream.text
    assert after <= answer.metrics.resumed_tokens <= 24
    assert answer.metrics.completion_tokens == 24 and answer.metrics.decode_server == "tiny-decode"
    assert answer.metrics.ttft_parts.total == pytest.approx(answer.metrics.ttft)
    (note,) = (chunk.note for chunk in chunks if chunk.note)
    assert "bad-tiny-decode failed after" in note and "goes on on tiny-decode" in note
    assert answer.warnings == (note,)


def test_without_another_decode_host_the_prefill_host_goes_on_alone(tiny_fleet: RunningFleet) -> None:
    real, prefill = tiny_fleet.fleet.hosts["tiny-decode"], tiny_fleet.fleet.hosts["tiny-prefill"]
    with tiny_fleet.client() as client:
        whole = client.generate("tiny", PROMPT, max_tokens=24, **SAMPLED)  # type: ignore[arg-type]  # options of several types
    with breaking_off(real, 5, "cut") as port:
        broken = dataclasses.replace(real, port=port)
        with patient(only(tiny_fleet, broken, prefill)) as client:
            answer = client.generate("tiny", PROMPT, max_tokens=24, **SAMPLED)  # type: ignore[arg-type]  # options of several types
    assert ids(answer) == ids(whole) and answer.text == whole.text
    assert answer.metrics.method == "prefill-alone"
    assert any(warning.startswith(FALLBACK_WARNING) for warning in answer.warnings)


NEW: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-z]{4,9} = [0-9]{4,9};"},
    "grammar": {"grammar": 'start: "[" WORD ("," WORD){3} "]"\nWORD: /[a-z]{2,5}/'},
    "form or call": {
        "json_schema": {"type": "object", "properties": {"a": {"enum": ["one of several"]}}, "required": ["a"]},
        "tools": [{"name": "f", "parameters": {"properties": {"b": {"enum": ["another one"]}}, "required": ["b"]}}],
    },
    "ends": {"min_tokens": 12, "stop_token_ids": list(range(5, 133)), "include_stop_str_in_output": True},
    "bad words": {"bad_words": [" the", "a", "return"], "ignore_eos": True},
}
BEGUN = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "def sub("}]


@pytest.mark.parametrize("name", NEW)
def test_what_an_answer_must_be_is_the_same_after_it_was_cut_off(tiny_fleet: RunningFleet, name: str) -> None:
    """On another decode host, and on the prefill host alone. A message that was begun goes on, too, unless tools are
    given, whose calls no text precedes."""
    options: dict[str, Any] = {**SAMPLED, "max_tokens": 40, **NEW[name]}
    chat = BEGUN[:1] if "tools" in options else BEGUN
    options |= {"messages": chat, "continue_final_message": chat is BEGUN}
    real, prefill = tiny_fleet.fleet.hosts["tiny-decode"], tiny_fleet.fleet.hosts["tiny-prefill"]
    with tiny_fleet.client() as client:
        whole = client.generate("tiny", **options)
    assert len(whole.tokens) > 5
    with breaking_off(real, 5, "cut") as port:
        broken = dataclasses.replace(real, port=port)
        for fleet in (with_first(tiny_fleet.fleet, real.name, port), only(tiny_fleet, broken, prefill)):
            with patient(fleet) as client:
                answer = client.generate("tiny", **options)
            assert ids(answer) == ids(whole) and answer.text == whole.text
            assert answer.finish_reason == whole.finish_reason
            assert [call.arguments for call in answer.tool_calls] == [call.arguments for call in whole.tool_calls]
            assert answer.metrics.resumed_tokens >= 5


def test_when_no_host_is_left_the_error_has_what_had_arrived(tiny_fleet: RunningFleet) -> None:
    real = tiny_fleet.fleet.hosts["tiny-decode"]
    with tiny_fleet.client() as client:
        whole = client.generate("tiny", PROMPT, max_tokens=24)
    with (
        breaking_off(real, 4, "error") as port,
        patient(only(tiny_fleet, dataclasses.replace(real, port=port))) as client,
        pytest.raises(ServerUnavailable, match=r"request failed: out of memory") as raised,
    ):
        client.generate("tiny", PROMPT, max_tokens=24)
    partial = present(raised.value.partial)
    assert 4 <= len(partial.token_ids) < 24
    assert list(partial.token_ids) == ids(whole)[: len(partial.token_ids)]
    assert whole.text.startswith(partial.text)
