"""KV while it arrives, without a connection: what its engine and its server see."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest

from disagg.api.layout import LayerLayout, Layout, SplitLayout
from disagg.errors import Cancelled, HandoffError, PeerLost, ProtocolError
from disagg.kv import arriving as module
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.arriving import CREDIT_CHUNKS, ArrivingKV, Chunk, beside_bytes
from disagg.kv.frames import Credit
from disagg.kv.receive.chunks import Chunks
from disagg.kv.received import ByteRanges, Window
from tests.kv.chunk_parts import HEAD, Prompt

PROMPT = Prompt.random(40)
LOST = PeerLost("the prefill host has gone")


def arriving(freed: list[int] | None = None, **changes: Any) -> ArrivingKV:
    e = PROMPT.expected
    memory = Reservation(1, (freed if freed is not None else []).append)
    more = {"arenas": Arenas(keep_bytes=1 << 20), "memory": memory, "layers": HEAD, "hidden": e.hidden, **changes}
    return ArrivingKV(e.head, e.tokens, e.start, **more)


def begun(freed: list[int] | None = None) -> ArrivingKV:
    """With memory, and a connection that writes."""
    kv = arriving(freed)
    kv.begin(0)
    kv.place(0, PROMPT.header())
    return kv


def put(kv: ArrivingKV, start: int, end: int, attempt: int = 0) -> None:
    rows = Window.rows_of(kv.layout, range(start, end), kv.tokens)
    ranges = ByteRanges.over(kv.layout, rows, "as-is")
    window = Window(rows, ranges, kv.arenas.acquire(ranges.nbytes)) if any(rows) else None
    kv.put(attempt, Chunk(start, end, kv.arenas.acquire(64)), window)


def test_chunks_are_taken_in_their_order_and_give_credit_when_they_are_done_with() -> None:
    kv = begun()
    assert kv.progress == Credit(0, CREDIT_CHUNKS)
    for first in range(0, 12, 4):
        put(kv, first, first + 4)
    assert kv.whole == 12 and kv.progress == Credit(3, CREDIT_CHUNKS)
    chunks = [kv.take() for _ in range(4)]
    assert [chunk.start for chunk in chunks if chunk] == [0, 4, 8] and chunks[3] is None
    assert kv.progress == Credit(3, CREDIT_CHUNKS)
    for chunk in chunks[:2]:
        assert chunk is not None
        kv.taken(chunk)
    assert kv.progress == Credit(3, CREDIT_CHUNKS + 2)


def test_credit_that_is_asked_for_while_a_chunk_is_put_is_not_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = begun()
    asked: list[Credit] = []

    def ask() -> None:
        asked.append(kv.progress)

    thread = threading.Thread(target=ask)

    class AskedMeanwhile(ArrivingKV):
        @property
        def _unread(self) -> int:
            return int(vars(self)["unread"])

        @_unread.setter
        def _unread(self, count: int) -> None:
            thread.start()
            thread.join(0.05)  # it may wait for the end of `put`
            vars(self)["unread"] = count

    vars(kv)["unread"] = vars(kv).pop("_unread")
    monkeypatch.setattr(kv, "__class__", AskedMeanwhile)
    put(kv, 0, 4)
    thread.join()
    assert asked == [Credit(1, CREDIT_CHUNKS)]


def test_whoever_watches_is_told_of_every_chunk_and_of_the_end() -> None:
    kv = begun()
    told: list[int] = []
    kv.watch(lambda: told.append(kv.whole))
    assert told == []
    put(kv, 0, 4)
    put(kv, 4, 8)
    kv.end(0, LOST)
    assert told == [4, 8, 8] and kv.outcome is LOST
    kv.watch(lambda: told.append(-1))  # at once: there is something already
    assert told[-1] == -1


def test_only_the_first_outcome_counts() -> None:
    kv = begun()
    kv.end(0, LOST)
    kv.end(0, "complete")
    assert kv.outcome is LOST and kv.whole == 0


def test_the_transfer_before_a_reopening_changes_nothing_any_more() -> None:
    kv = begun()
    put(kv, 0, 4)
    kv.reopen()
    kv.end(0, LOST)
    assert kv.outcome is None and kv.attempt == 1
    with pytest.raises(Cancelled):
        put(kv, 4, 8)
    with pytest.raises(Cancelled):
        kv.begin(0)
    with pytest.raises(Cancelled):
        kv.place(0, PROMPT.header())
    put(kv, 4, 8, attempt=1)
    assert kv.whole == 8


def test_chunks_of_the_transfer_before_count_against_the_credit_of_the_next() -> None:
    kv = begun()
    for first in range(0, 12, 4):
        put(kv, first, first + 4)
    kv.reopen()
    assert kv.progress == Credit(0, 1)
    chunk = kv.take()
    assert chunk is not None and chunk.start == 0
    kv.taken(chunk)
    assert kv.progress == Credit(0, 2)


def test_another_sender_writes_only_after_the_one_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = begun()
    kv.reopen()
    kv.begin(1)
    placed = threading.Event()

    def place() -> None:
        kv.place(1, PROMPT.header())
        placed.set()

    thread = threading.Thread(target=place)
    thread.start()
    time.sleep(0.05)  # it must still wait
    assert not placed.is_set()
    kv.leave(0)
    assert placed.wait(30)
    thread.join()
    kv.reopen()
    kv.begin(2)
    monkeypatch.setattr(module, "WRITERS_S", 0.05)
    with pytest.raises(HandoffError, match="does not end"):
        kv.place(2, PROMPT.header())


def test_another_sender_uses_the_form_of_the_one_before_it() -> None:
    kv = begun()
    kv.leave(0)
    kv.reopen()
    kv.begin(1)
    with pytest.raises(ProtocolError, match="as as-is, and would go on as int8-g64"):
        kv.place(1, PROMPT.header(wire="int8-g64"))


@pytest.mark.parametrize("first", ["release", "leave"])
def test_the_memory_is_in_use_until_it_is_released_and_nothing_writes(first: str) -> None:
    freed: list[int] = []
    kv = begun(freed)
    ends: list[Callable[[], None]] = [kv.release, partial(kv.leave, 0)]
    one, other = ends if first == "release" else reversed(ends)
    one()
    assert freed == []
    other()
    assert freed == [1]
    kv.release()
    assert freed == [1]


def test_an_arena_that_is_still_written_is_not_used_again() -> None:
    for written in (True, False):
        kv = begun()
        assert kv.kv is not None and kv.kv.arena is not None
        arena = kv.kv.arena
        if not written:
            kv.leave(0)
        kv.release(reuse=True)
        again = kv.arenas.acquire(arena.data.nbytes)
        assert (again is arena) == (not written)


def test_release_ends_the_transfer_and_what_comes_after_it() -> None:
    kv = begun()
    stopped: list[None] = []
    kv.expect(lambda: stopped.append(None))
    put(kv, 0, 4)
    kv.release()
    kv.release()
    assert len(stopped) == 1
    assert kv.take() is None and kv.partial() is None
    with pytest.raises(Cancelled):
        put(kv, 4, 8)
    with pytest.raises(Cancelled):
        kv.begin(0)
    with pytest.raises(Cancelled):
        kv.expect(print)
    kv.end(0, LOST)
    assert kv.outcome is None


def test_rows_that_only_sliding_layers_keep_for_a_while_are_let_go_of() -> None:
    """Two windows of 7 rows at most, and their memory serves the chunks that follow."""
    kv = begun()
    for first in range(0, 32, 4):
        put(kv, first, first + 4)
        come = kv.partial()
        assert come is not None and len(come.windows) <= 2
        rows = [row for piece in come.rows(1) for row in piece.wanted]
        assert rows == list(range(max(0, first + 4 - 7), first + 4))
        assert [list(piece.wanted) for piece in come.rows(0)] == [list(range(first + 4))]
    assert kv.arenas.idle_bytes > 0


@pytest.mark.parametrize("chunk", [2, 5, 7, 16])
def test_what_chunks_take_beside_the_kv_is_bounded_by_what_is_reserved_for_it(chunk: int) -> None:
    layout = Layout((LayerLayout("full", 1, 4, 4), LayerLayout("sliding", 8, 64, 64, window=7)), "float32")
    prompt = Prompt.random(200, layers=2, layout=layout, split=SplitLayout(3, (0, 1), 256))
    sizes: dict[int, int] = {}  # of what is allocated, by its identity
    least = ByteRanges.of(prompt.head, 200).nbytes

    def allocate(nbytes: int) -> Any:
        array = numpy.empty(nbytes, numpy.uint8)
        sizes[id(array)] = nbytes
        weakref.finalize(array, sizes.pop, id(array))
        return array

    e = prompt.expected
    kv = ArrivingKV(e.head, 200, arenas=Arenas(allocate), layers=2, hidden=e.hidden)
    kv.begin(0)
    kv.place(0, prompt.header())
    chunks = Chunks(kv, 0, prompt.header())
    most = 0
    for number, first in enumerate(range(0, 200, chunk)):
        if number >= CREDIT_CHUNKS:
            done = kv.take()
            assert done is not None
            kv.taken(done)
            del done
        coming = chunks.open(number, first, min(first + chunk, 200))
        chunks.hidden(coming)
        most = max(most, sum(sizes.values()) - least)
        chunks.come(coming)
        del coming
    reserved = beside_bytes(prompt.head, 200, chunk, e.hidden)
    assert reserved / 2 < most < 1.2 * reserved  # sizes are rounded up


def test_without_tokens_there_is_an_empty_piece_of_each_layer() -> None:
    kv = ArrivingKV(PROMPT.head, 0, 0, arenas=Arenas())
    kv.begin(0)
    empty = kv.place(0, PROMPT.header(tokens=0))
    assert [len(piece.wanted) for layer in range(2) for piece in empty.rows(layer)] == [0, 0]
    assert numpy.all([piece.memory is not None for piece in empty.rows(0)])
