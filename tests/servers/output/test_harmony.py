"""disagg/servers/output/harmony.py: gpt-oss' channels by their tokens."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from disagg.engines.model.format import HARMONY
from disagg.servers.output.forced import Forced
from disagg.servers.output.harmony import MAX_HEADER_CHARS, Harmony
from disagg.servers.output.part import Plain
from disagg.servers.output.tool_calls import MAX_CALL_CHARS
from tests.servers.output.texts import Texts, cuts, run

MARKS = {name: 1000 + number for number, name in enumerate(HARMONY)}
FINAL = "<|channel|>final<|message|>It is 42.<|return|>"
ANALYSIS = "<|channel|>analysis<|message|>6 * 7 < 50<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'


def found(text: str, cut: int, stop: str = "", *, with_tools: bool = True) -> list[tuple[str, str]]:
    """The parts of an answer whose text between two marks is cut in the way number `cut`."""
    texts: list[str] = []
    tokens: list[int] = []
    for piece in re.split(r"(<\|[a-z]+\|>)", text):
        if (name := piece[2:-2]) in MARKS and piece.startswith("<|"):
            tokens.append(MARKS[name])
        elif piece:
            ways = len(piece) + 3
            for part in next(islice(cuts(piece), cut % ways, None)):
                tokens.append(len(texts))
                texts.append(part)
    one = Harmony(lambda _: Texts(texts, [stop] if stop else []), MARKS, with_tools=with_tools)
    return [(part.kind, part.text) for part in run(one, tokens)]


@pytest.mark.parametrize("cut", range(12))
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FINAL, [("text", "It is 42.")]),
        (ANALYSIS + FINAL, [("reasoning", "6 * 7 < 50"), ("text", "It is 42.")]),
        (ANALYSIS + CALL, [("reasoning", "6 * 7 < 50"), ("call", "weather {'city': 'Ulm'}")]),
        (" to=functions.weather<|channel|>commentary<|message|>{}<|call|>", [("call", "weather {}")]),
        ("<|channel|>commentary<|message|>First, I look.<|end|><|start|>assistant" + CALL,
         [("text", "First, I look."), ("call", "weather {'city': 'Ulm'}")]),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", [("text", "{}")]),
        ("<|channel|>analysis<|message|>cut", [("reasoning", "cut")]),
        ("<|channel|>commentary to=functions.weather<|message|>{\"ci", [("text", '{"ci')]),
        ("<|channel|>ana", []),
    ],
)  # fmt: skip
def test_channels_are_separated_wherever_their_text_is_cut(
    text: str, expected: list[tuple[str, str]], cut: int
) -> None:
    assert found(text, cut) == expected


def test_without_tools_the_arguments_of_a_call_are_text() -> None:
    assert found(CALL, 0, with_tools=False) == [("text", '{"city": "Ulm"}')]


def test_stop_strings_count_in_messages_and_not_in_their_headers() -> None:
    assert found(FINAL, 0, stop="final") == [("text", "It is 42.")]
    assert found(FINAL, 1, stop=" 42") == [("text", "It is")]


def test_arguments_beyond_the_limit_are_text_and_no_longer_held_back() -> None:
    for chars, kind in ((MAX_CALL_CHARS, "call"), (MAX_CALL_CHARS + 1, "text")):
        arguments = '{"city": "Ulm"'.ljust(chars - 1) + "}"
        assert [part[0] for part in found(CALL.replace('{"city": "Ulm"}', arguments), 0)] == [kind]


def test_an_answer_that_goes_on_with_a_message_is_text_from_its_first_token() -> None:
    one = Harmony(lambda _: Texts([" 42."]), MARKS, with_tools=True, within=True)
    assert [(part.kind, part.text) for part in run(one, [0, MARKS["return"]])] == [("text", " 42.")]


def test_a_header_that_goes_on_for_ever_is_cut() -> None:
    one = Harmony(lambda _: Texts(["x" * MAX_HEADER_CHARS]), MARKS, with_tools=True)
    assert [part for _ in range(3) for part in one.push(0)] == [] and len(one._header) == MAX_HEADER_CHARS


def test_a_forced_call_beyond_the_limit_is_text_and_no_longer_held_back() -> None:
    for chars, kind in ((MAX_CALL_CHARS, "call"), (MAX_CALL_CHARS + 1, "text")):
        text = '{"name": "f", "arguments": {}'.ljust(chars - 1) + "}"
        assert [part.kind for part in run(Forced(Plain(Texts([text]))), [0])] == [kind]
