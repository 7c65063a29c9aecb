"""Whatever a peer sends, the exact bytes arrive or a stated error; no hang, no allocation over the bound."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis
import pytest

from disagg.api.layout import LayerLayout, Layout, SplitLayout, StateTensor
from disagg.api.names import AS_IS, INT8, KV_CHUNKS, KV_WHOLE, WireForm
from disagg.errors import DisaggError, ProtocolError
from disagg.kv import frames
from disagg.kv.frames import Header
from disagg.kv.parts import MAX_HEADS, WHOLE, Part
from disagg.kv.preamble import OPENING, PREAMBLE, PROOF, check_opening, decode_preamble, decode_proof
from disagg.kv.received import ReceivedKV
from tests.kv.chunk_parts import Prompt, frames_for, stream_of
from tests.kv.fuzz import CACHE, PROMPT, STATED, ChunkHost, Host, fuzz_one, seeds, shuffled
from tests.kv.kv_parts import FINGERPRINT, Cache, header_for, parts_of, stream

st = hypothesis.strategies

LAYERS = st.one_of(
    st.builds(
        LayerLayout,
        st.just("full"),
        kv_heads=st.integers(1, 5),
        key_dim=st.sampled_from([1, 6, 64, 128]),
        value_dim=st.sampled_from([0, 3, 64]),
    ),
    st.builds(LayerLayout, st.just("index"), kv_heads=st.just(1), key_dim=st.sampled_from([6, 64])),
    st.builds(
        LayerLayout,
        st.just("sliding"),
        kv_heads=st.integers(1, 3),
        key_dim=st.sampled_from([4, 64]),
        value_dim=st.sampled_from([4, 64]),
        window=st.integers(1, 12),
    ),
    st.builds(
        lambda sizes: LayerLayout("state", states=tuple(StateTensor((size,)) for size in sizes)),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ),
)
LAYOUTS = st.builds(
    lambda layers, dtype: Layout(tuple(layers), dtype),
    st.lists(LAYERS, min_size=1, max_size=5),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
SEEDS = st.integers(0, 1 << 32)
TIMES = int(os.environ.get("EXAMPLES", "1"))
"""`make test EXAMPLES=100` tries so many times as many values."""


def check(holds: Callable[..., None], *strategies: Any, examples: int = 50) -> None:
    """The property holds for random values of these strategies; a failure is printed as its smallest example."""
    settings: Any = hypothesis.settings(max_examples=examples * TIMES, deadline=None, database=None, print_blob=True)
    given: Any = hypothesis.given(*strategies)
    settings(given(holds))()


def split(layout: Layout, chance: random.Random) -> list[Part]:
    """Random parts that are the layout exactly once: groups of layers, each cut between some heads."""
    groups: dict[int, list[int]] = {}
    for layer in range(len(layout.layers)):
        groups.setdefault(chance.randrange(3), []).append(layer)
    parts = []
    for layers in groups.values():
        cuts = sorted({0, MAX_HEADS, *(chance.randrange(1, 5) for _ in range(chance.randrange(3)))})
        parts += [Part(tuple(layers), heads, states=heads[0] == 0) for heads in pairwise(cuts)]
    chance.shuffle(parts)
    return parts if chance.random() < 0.8 else [WHOLE]


def test_random_parts_from_random_starts_arrive_as_the_exact_bytes() -> None:
    def holds(layout: Layout, tokens: int, start: int, wire: WireForm, seed: int) -> None:
        chance = random.Random(seed)
        cache = Cache.random(layout, tokens, min(start, tokens), seed, wire)
        host = Host(cache)
        parts = split(layout, chance)
        for part in parts:
            header = header_for(host.slot, part=part, parts=len(parts))
            assert host.receive(host.sent(stream(header, parts_of(cache, chance.randint(1, 9), part)))) is None
        (kv,) = host.outcomes
        assert isinstance(kv, ReceivedKV) and cache.matches(kv)
        host.require_sound()

    check(holds, LAYOUTS, st.integers(0, 20), st.integers(0, 20), st.sampled_from([AS_IS, INT8]), SEEDS, examples=30)


def test_parts_that_are_left_out_or_doubled_never_complete_a_transfer() -> None:
    def holds(layout: Layout, seed: int) -> None:
        chance = random.Random(seed)
        cache = Cache.random(layout, 9, 2, seed)
        host = Host(cache)
        parts = split(layout, chance)
        carries = [part for part in parts if parts_of(cache, 4, part)]
        if chance.random() < 0.5:
            parts.remove(chance.choice(carries))
        else:
            parts.append(chance.choice(carries))
        for part in parts:
            header = header_for(host.slot, part=part, parts=max(1, len(parts)))
            host.receive(host.sent(stream(header, parts_of(cache, 4, part))))
        assert not any(isinstance(outcome, ReceivedKV) for outcome in host.outcomes)
        host.require_sound()

    check(holds, LAYOUTS, SEEDS)


def test_reordered_doubled_missing_and_changed_frames_arrive_exactly_or_are_refused() -> None:
    def holds(seed: int) -> None:
        chance = random.Random(seed)
        host = Host()
        changed = shuffled(parts_of(CACHE, chance.choice([1, 4, 12])), chance)
        raw = host.sent(stream(header_for(host.slot), changed))
        host.receive(raw[: len(raw) if chance.random() < 0.7 else chance.randrange(len(raw))])
        for outcome in host.outcomes:
            if isinstance(outcome, ReceivedKV):
                assert CACHE.matches(outcome)
            else:
                assert isinstance(outcome, STATED)
        host.require_sound()

    check(holds, SEEDS, examples=100)


def layers_of(layout: Layout, chance: random.Random) -> tuple[SplitLayout, int]:
    """A model in which some layers keep nothing, and how many of its layers a head has."""
    places, place = [], 0
    for _ in layout.layers:
        place += chance.randint(0, 2)
        places.append(place)
        place += 1
    split = SplitLayout(place + chance.randint(0, 2), tuple(places), chance.randint(1, 9))
    return split, chance.randint(places[0] + 1, split.layers)


def test_random_chunks_from_random_starts_arrive_as_the_exact_bytes_and_each_can_be_gone_on_from() -> None:
    def holds(layout: Layout, tokens: int, start: int, wire: WireForm, seed: int) -> None:
        chance = random.Random(seed)
        model, layers = layers_of(layout, chance)
        first = min(start, tokens)
        prompt = Prompt.random(tokens, first, layers, layout=layout, split=model, wire=wire, seed=seed)
        host = ChunkHost(prompt)
        parts = split(prompt.head, chance)
        parts = [replace(part, hidden=part is parts[-1]) for part in parts]  # once all else has come: there is credit
        size = chance.randint(1, 9)

        def exact() -> None:
            come = host.arriving.partial()
            assert come is None or prompt.matches(come)

        host.arriving.watch(exact)
        for part in parts:
            header = prompt.header(host.slot, part=part, parts=len(parts))
            raw = host.sent(stream_of(header, frames_for(prompt, size, part)), KV_CHUNKS)
            assert host.receive(raw) is None
        (kv,) = host.outcomes
        assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
        host.require_sound()

    check(holds, LAYOUTS, st.integers(0, 20), st.integers(0, 20), st.sampled_from([AS_IS, INT8]), SEEDS, examples=40)


def test_reordered_doubled_missing_and_changed_frames_of_chunks_are_exact_or_refused() -> None:
    def holds(seed: int) -> None:
        chance = random.Random(seed)
        host = ChunkHost()
        some = shuffled(frames_for(PROMPT, chance.choice([1, 4, 12])), chance)
        raw = host.sent(stream_of(PROMPT.header(host.slot), some), KV_CHUNKS)
        host.receive(raw[: len(raw) if chance.random() < 0.7 else chance.randrange(len(raw))])
        assert all(isinstance(outcome, (ReceivedKV, *STATED)) for outcome in host.outcomes)
        if (come := host.arriving.partial()) is not None:
            assert PROMPT.matches(come)
        host.require_sound()

    check(holds, SEEDS, examples=100)


def test_damaged_streams_never_break_the_receiver() -> None:
    valid = seeds()

    def holds(index: int, edits: list[tuple[int, int]], cut: int) -> None:
        data = bytearray(valid[index % len(valid)])
        for at, value in edits:
            data[at % len(data)] = value
        fuzz_one(bytes(data[: len(data) - cut]))

    edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)
    check(holds, st.integers(0, 100), edits, st.sampled_from([0, 0, 1, 30, 500]), examples=100)


def test_any_bytes_never_break_the_receiver() -> None:
    check(fuzz_one, st.binary(max_size=400), examples=70)


@pytest.mark.parametrize(
    ("decode", "size"),
    [
        (check_opening, OPENING.size),
        (decode_preamble, PREAMBLE.size),
        (decode_proof, PROOF.size),
        (lambda raw: frames.decode_identity({"nonce": raw.hex(), "proof": raw.hex()}), None),
        (lambda raw: frames.decode_header(raw, "ticket"), None),
        (lambda raw: frames.decode_header(raw, "ticket", KV_CHUNKS), None),
        (frames.decode_frame, frames.FRAME.size),
        (frames.decode_reply_length, frames.REPLY_LENGTH.size),
    ],
)
def test_any_bytes_are_a_value_or_a_protocol_error(decode: Callable[[bytes], object], size: int | None) -> None:
    def holds(raw: bytes) -> None:
        try:
            decode(raw)
        except ProtocolError as error:
            assert len(str(error)) < 500

    check(holds, st.binary(max_size=300) if size is None else st.binary(min_size=size, max_size=size))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["request_id", "tokens", "start", "wire", "part", "parts", "token_hash", "fingerprint", "layout"]
PATHS = [(name,) for name in FIELDS] + [
    ("part", "layers"),
    ("part", "heads"),
    ("part", "states"),
    ("part", "hidden"),
    ("layers",),
    ("hidden",),
    ("layout", "dtype"),
    ("layout", "layers"),
    ("fingerprint", "rope"),
]


def test_a_header_with_any_json_in_any_field_is_a_value_or_a_protocol_error() -> None:
    import json

    whole = frames.encode_header(Header("ticket", "r1", FINGERPRINT, CACHE.layout, "00" * 32, 12, 3))
    chunks = frames.encode_header(PROMPT.header())

    def holds(path: tuple[str, ...], value: object) -> None:
        for valid, version in ((whole, KV_WHOLE), (chunks, KV_CHUNKS)):
            judged(json.loads(valid), path, value, version)

    def judged(body: dict[str, Any], path: tuple[str, ...], value: object, version: int) -> None:
        inner = body
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        try:
            header = frames.decode_header(json.dumps(body).encode(), "ticket", version)
        except ProtocolError as error:
            assert len(str(error)) < 500
            return
        host = Host() if version == KV_WHOLE else ChunkHost()
        try:
            host.slot.expected.require(header)
            host.slot.incoming.join(header)
            host.slot.incoming.leave()
        except DisaggError as error:
            assert isinstance(error, STATED) and len(str(error)) < 1000
        host.require_sound()

    check(holds, st.sampled_from(PATHS), JSON, examples=70)


def test_any_header_survives_the_wire() -> None:
    def holds(layout: Layout, tokens: int, start: int, wire: WireForm, seed: int) -> None:
        part = random.Random(seed).choice(split(layout, random.Random(seed)))
        header = Header("t", "r", FINGERPRINT, layout, "x", tokens, min(start, tokens), wire, part, 1 + seed % 64)
        chunks = replace(
            header,
            chunks=True,
            layers=seed % 1024 or None,
            hidden=seed % 65537,
            part=replace(part, hidden=seed % 2 == 0),
        )
        for one in (header, chunks):
            assert frames.decode_header(frames.encode_header(one), "t", one.version) == one

    tokens = st.integers(0, frames.MAX_TOKENS)
    check(holds, LAYOUTS, tokens, tokens, st.sampled_from([AS_IS, INT8]), SEEDS)
