from collections.abc import Callable
from typing import Any

import pytest

from disagg.api.names import INT8
from disagg.errors import IntegrityError, ProtocolError
from disagg.kv.arena import Arenas
from disagg.kv.frames import Frame, Kind, TransferTotals
from disagg.kv.receive.assembly import Assembly
from disagg.kv.received import ByteRanges, ReceivedKV
from tests.kv.kv_parts import Cache, Parts, groups_layout, mixed_layout, parts_of

CACHE = Cache.random(mixed_layout(), 10)
DIGEST = bytes(16)


def build(parts: Parts, cache: Cache = CACHE, totals: TransferTotals | None = None) -> ReceivedKV:
    arena = Arenas().acquire(ByteRanges.of(cache.layout, cache.tokens, cache.start, cache.wire).nbytes)
    kv = ReceivedKV(cache.layout, cache.tokens, arena, cache.start, cache.wire)
    assembly = Assembly(kv)
    for frame, payload in parts:
        rest = memoryview(payload)
        for view in assembly.place(frame):
            view[:] = rest[: len(view)]
            rest = rest[len(view) :]
        assert not rest
    assembly.finish(totals or TransferTotals(len(parts), sum(len(p) for _, p in parts), DIGEST), DIGEST)
    return kv


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("start", [0, 1, 5, 9])
def test_every_byte_lands_in_its_place(chunk: int, start: int) -> None:
    cache = Cache.random(mixed_layout(), 10, start)
    kv = build(parts_of(cache, chunk), cache)
    assert cache.matches(kv)
    assert kv.nbytes == sum(array.nbytes for arrays in (*kv.keys, *kv.values, *kv.states) for array in arrays)


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
@pytest.mark.parametrize("start", [0, 5])
def test_every_byte_of_every_plane_lands_in_its_place(chunk: int, start: int) -> None:
    cache = Cache.random(groups_layout(), 10, start, wire=INT8)
    assert cache.matches(build(parts_of(cache, chunk), cache))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda parts: [p for p in parts if p[0][:3] != (Kind.KEYS, 1, 0)], "truncated: the keys of layer 1"),
        (
            lambda parts: [p for p in parts if p[0][:3] != (Kind.KEYS, 1, 1)],
            "truncated: plane 1 of the keys of layer 1",
        ),
        (lambda parts: [p for p in parts if p[0][:3] != (Kind.VALUES, 1, 2)], "plane 2 of the values of layer 1"),
        (lambda parts: [(f._replace(tensor=3), p) for f, p in parts], "plane 3 of the keys of layer 0 is not part"),
        (lambda parts: [(f._replace(tensor=0), p) for f, p in parts], "announces|after the last|out of order"),
        (lambda parts: [(f._replace(length=f.length + 1), p) for f, p in parts], "announces"),
        (lambda parts: [parts[1], *parts], "out of order|after the last"),
    ],
)
def test_planes_that_do_not_fit_are_refused(damage: Callable[[Parts], Parts], message: str) -> None:
    cache = Cache.random(groups_layout(), 10, wire=INT8)
    with pytest.raises(ProtocolError, match=message):
        build(damage(parts_of(cache)), cache)


def test_as_is_rows_do_not_pass_for_planes_nor_planes_for_rows() -> None:
    as_is, quantised = Cache.random(groups_layout(), 10), Cache.random(groups_layout(), 10, wire=INT8)
    for sent, wanted in ((as_is, quantised), (quantised, as_is)):
        with pytest.raises(ProtocolError, match="announces"):
            build(parts_of(sent), wanted)


def test_layers_and_kinds_may_interleave_in_any_order() -> None:
    parts = parts_of(CACHE)
    by_layer_backwards = sorted(parts, key=lambda part: (-part[0].layer, -part[0].kind))
    assert CACHE.matches(build(by_layer_backwards))


def test_without_tokens_nothing_is_expected() -> None:
    empty = Cache.random(mixed_layout(), 0)
    kv = build([], empty)
    assert kv.nbytes == 0
    assert kv.states == [[], [], [], []]


def change(index: int, **fields: Any) -> Callable[[Parts], Parts]:
    return lambda parts: [(f._replace(**fields), p) if i == index else (f, p) for i, (f, p) in enumerate(parts)]


FIRST_STATE = next(i for i, (frame, _) in enumerate(parts_of(CACHE)) if frame.kind is Kind.STATE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda parts: [*parts, parts[0]], "after the last expected row"),
        (lambda parts: [parts[0], *parts], "out of order"),
        (lambda parts: parts[3:], "out of order"),
        (lambda parts: parts[:-1], "truncated: state"),
        (lambda parts: [p for p in parts if p[0][:2] != (Kind.VALUES, 1)], "truncated: the values of layer 1"),
        (lambda parts: [*parts, parts[FIRST_STATE]], "was already received"),
        (change(0, end=11), "does not lie within"),
        (change(0, end=0), "does not lie within"),
        (change(0, length=1 << 60), "announces"),
        (change(0, length=0), "announces"),
        (change(0, tensor=1), "not part of the model"),
        (change(0, layer=4), "not part of the model"),
        (change(0, layer=2), "not in this connection's part"),
        (change(0, kind=Kind.STATE), "not expected"),
        (change(FIRST_STATE, tensor=7), "not expected"),
        (change(FIRST_STATE, end=1), "not expected"),
        (change(FIRST_STATE, length=3), "announces"),
    ],
)
def test_a_frame_that_may_not_come_next_is_refused(damage: Callable[[Parts], Parts], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        build(damage(parts_of(CACHE)))


def test_values_of_a_latent_layer_are_refused() -> None:
    with pytest.raises(ProtocolError, match="after the last expected row"):
        build([(Frame(Kind.VALUES, 3, 0, 0, 10, 0), b"")])


def test_totals_and_digest_must_agree() -> None:
    parts = parts_of(CACHE)
    size = sum(len(p) for _, p in parts)
    with pytest.raises(ProtocolError, match="counts"):
        build(parts, totals=TransferTotals(len(parts) + 1, size, DIGEST))
    with pytest.raises(ProtocolError, match="counts"):
        build(parts, totals=TransferTotals(len(parts), size - 1, DIGEST))
    with pytest.raises(IntegrityError):
        build(parts, totals=TransferTotals(len(parts), size, b"x" * 16))
