from __future__ import annotations

import pytest

from tests.faults.flow import Action, Fault, Flow, Needle

TEXT = b"event: slot .. event: tokens A event: tokens B"


def passed(fault: Fault, pieces: list[bytes]) -> tuple[bytes, list[tuple[Action, int]]]:
    """What leaves, and at which byte of it each action was taken."""
    flow, out, actions = Flow(fault, armed=True), bytearray(), []
    for piece in pieces:
        before, action, rest = flow.feed(piece)
        out += before
        if action:
            actions.append((action, len(out)))
        out += rest
    return bytes(out + flow.end()), actions


def cuts(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("fault", "at"),
    [
        (Fault("reset"), 0),
        (Fault("stall", at=10), 10),
        (Fault("close", after=b"event: slot"), 11),
        (Fault("call", after=b"event: tokens", nth=2, at=1), len(TEXT) - 1),
    ],
)
def test_an_action_is_taken_at_its_byte_however_the_stream_is_cut(fault: Fault, at: int, size: int) -> None:
    out, actions = passed(fault, cuts(TEXT, size))
    assert actions == [(fault.kind, at)]
    assert out == TEXT


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("fault", "out"),
    [
        (Fault("corrupt", at=1), b"0\xce23456789"),
        (Fault("corrupt", after=b"34"), b"01234\xca6789"),
        (Fault("duplicate", at=2, size=3), b"0123423456789"),
        (Fault("reorder", at=2, size=3), b"0156723489"),
        (Fault("reorder", at=2, size=30), b"0123456789"),
        (Fault("slow", at=2), b"0123456789"),
        (Fault("corrupt", after=b"x"), b"0123456789"),
    ],
)
def test_bytes_are_changed_at_their_place_however_the_stream_is_cut(fault: Fault, out: bytes, size: int) -> None:
    assert passed(fault, cuts(b"0123456789", size)) == (out, [])


def test_a_flow_that_is_not_armed_lets_everything_pass() -> None:
    assert Flow(Fault("reset")).feed(TEXT) == (TEXT, None, b"")


def test_a_needle_finds_overlapping_cuts_once() -> None:
    needle = Needle(b"abab", 2)
    assert [needle.find(bytes([byte])) for byte in b"xababababab"] == [None] * 8 + [1] + [None] * 2
