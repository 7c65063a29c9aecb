"""The reader of event streams gives the same events, wherever the stream is cut in pieces."""

from __future__ import annotations

import pytest

from disagg.api.event_stream import EventReader

STREAM = b'event: tokens\ndata: {"a": 1}\n\n: a comment\nid: 7\n\ndata:second\r\n\r\nevent: done\r\ndata: {}\r\n\r\n'
EVENTS = [("tokens", b'{"a": 1}'), ("", b"second"), ("done", b"{}")]


@pytest.mark.parametrize("size", [*range(1, 8), len(STREAM)])
def test_events_are_the_same_in_pieces_of_any_size(size: int) -> None:
    reader = EventReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS
    assert reader.unread == 0


def test_an_event_is_given_as_soon_as_its_data_is_there() -> None:
    reader = EventReader()
    assert reader.feed(b"event: x\ndata: 1") == [] and reader.unread == len(b"data: 1")
    assert reader.feed(b"2\n") == [("x", b"12")] and reader.unread == 0


def test_what_has_no_end_is_counted_and_not_looked_at_again() -> None:
    reader = EventReader()
    for number in range(1, 1001):
        assert reader.feed(b"x" * 1000) == [] and reader.unread == 1000 * number
    assert reader.feed(b"\ndata: 1\n") == [("", b"1")]
