import json
from typing import Any

import pytest

from disagg.api.names import AS_IS, INT8, KV_WHOLE, WireForm
from disagg.errors import DisaggError, LayoutMismatch, Overloaded, ProtocolError
from disagg.kv import frames
from disagg.kv.blocks import KVBlock, StateBlock
from disagg.kv.outbox import frames_of
from disagg.kv.parts import Part
from disagg.kv.preamble import (
    MAGIC,
    MAX_HEADER_BYTES,
    OPENING,
    PREAMBLE,
    PROOF_BYTES,
    End,
    Nonces,
    check_opening,
    decode_preamble,
    decode_proof,
    encode_preamble,
    encode_proof,
    proof,
    proves,
    ticket_digest,
)
from tests.kv.kv_parts import FINGERPRINT, Cache, groups_layout, mixed_layout

HEADER = frames.Header(
    "ticket",
    "request",
    FINGERPRINT,
    mixed_layout(),
    "ab" * 32,
    tokens=9,
    start=2,
    wire=INT8,
    part=Part((0, 2), (1, 2), states=False),
    parts=3,
)

NONCES = Nonces(bytes(range(16)), bytes(range(16, 32)))


def test_a_header_survives_the_wire() -> None:
    assert frames.decode_header(frames.encode_header(HEADER), "ticket") == HEADER


def test_what_a_sender_sends_first_names_its_ticket_and_contains_no_part_of_it() -> None:
    raw = encode_preamble("one-time-ticket", bytes(range(16)))
    assert len(raw) == PREAMBLE.size and b"one-time" not in raw
    assert decode_preamble(raw) == (ticket_digest("one-time-ticket"), bytes(range(16)), KV_WHOLE)


@pytest.mark.parametrize(
    ("ticket", "end", "nonces", "valid"),
    [
        ("ticket", "sender", NONCES, True),
        ("ticket", "receiver", NONCES, False),
        ("ticke", "sender", NONCES, False),
        ("ticket", "sender", Nonces(NONCES.receiver, NONCES.sender), False),
        ("ticket", "sender", NONCES._replace(receiver=bytes(16)), False),
    ],
)
def test_a_proof_holds_for_one_ticket_one_end_and_one_pair_of_nonces(
    ticket: str, end: End, nonces: Nonces, valid: bool
) -> None:
    assert proves(proof("ticket", "sender", NONCES), ticket, end, nonces) is valid


@pytest.mark.parametrize(
    "body", [{}, {"nonce": "00" * 16}, {"nonce": "00" * 15, "proof": "00"}, {"nonce": "zz", "proof": 1}]
)
def test_a_receivers_first_reply_without_nonce_and_proof_is_a_protocol_error(body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="no nonce or no proof"):
        frames.decode_identity(body)


def test_a_header_over_the_bound_is_neither_sent_nor_read() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        frames.encode_header(frames.Header("t", "r" * MAX_HEADER_BYTES, FINGERPRINT, mixed_layout(), "x", 1))
    with pytest.raises(ProtocolError, match="at most"):
        decode_proof(encode_proof(bytes(PROOF_BYTES), MAX_HEADER_BYTES + 1))


def test_wrong_magic_and_wrong_version_are_different_errors() -> None:
    with pytest.raises(ProtocolError, match="not a KV transfer"):
        check_opening(b"GET / HTTP/1"[: OPENING.size])
    with pytest.raises(ProtocolError, match="version 3, the receiver version 4") as caught:
        check_opening(OPENING.pack(MAGIC, 3))
    assert caught.value.hint == "install the same disagg version on both hosts"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", []),
        ("request_id", None),
        ("request_id", ""),
        ("request_id", "é"),
        ("request_id", "\ud800"),
        ("request_id", "x" * 257),
        ("part", None),
        ("part", [1]),
        ("part", {"layers": [0, 0], "heads": None, "states": True}),
        ("part", {"layers": [1, 0], "heads": None, "states": True}),
        ("part", {"layers": [-1], "heads": None, "states": True}),
        ("part", {"layers": [1024], "heads": None, "states": True}),
        ("part", {"layers": 5, "heads": None, "states": True}),
        ("part", {"layers": None, "heads": [1], "states": True}),
        ("part", {"layers": None, "heads": [1, 1], "states": True}),
        ("part", {"layers": None, "heads": [0, 1.0], "states": True}),
        ("part", {"layers": None, "heads": [0, 1 << 17], "states": True}),
        ("part", {"layers": None, "heads": None, "states": 1}),
        ("parts", 0),
        ("parts", 65),
        ("parts", None),
        ("token_hash", {}),
        ("tokens", -1),
        ("tokens", 1.0),
        ("tokens", True),
        ("tokens", "9"),
        ("tokens", 1 << 32),
        ("start", 10),
        ("start", -1),
        ("fingerprint", None),
        ("layout", {"dtype": "bfloat16"}),
        ("wire", None),
        ("wire", "int4-g64"),
        ("wire", ["as-is"]),
    ],
)
def test_each_malformed_header_field_is_a_protocol_error(field: str, value: Any) -> None:
    body = json.loads(frames.encode_header(HEADER))
    with pytest.raises(ProtocolError):
        frames.decode_header(json.dumps({**body, field: value}).encode(), "ticket")


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b"[]", b"{", b"null", b"[" * 100_000, b'{"tokens":' + b"9" * 5000 + b"}"]
)
def test_a_header_that_is_no_json_object_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_header(raw, "ticket")


def read_reply(raw: bytes) -> dict[str, Any]:
    size = frames.decode_reply_length(raw[: frames.REPLY_LENGTH.size])
    assert len(raw) == frames.REPLY_LENGTH.size + size
    return frames.decode_reply(raw[frames.REPLY_LENGTH.size :])


def test_a_good_reply_carries_its_facts() -> None:
    assert read_reply(frames.encode_ok(received_bytes=5, receive_s=0.25)) == {
        "ok": True,
        "received_bytes": 5,
        "receive_s": 0.25,
    }


def test_a_bad_reply_raises_the_error_that_was_sent() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        read_reply(frames.encode_error(LayoutMismatch("dtype differs", "fix it")))
    assert (caught.value.message, caught.value.hint) == ("dtype differs", "fix it")


def test_an_error_message_of_any_length_fits_a_reply() -> None:
    with pytest.raises(Overloaded):
        read_reply(frames.encode_error(Overloaded("\ud800" * 1_000_000, "h" * 1_000_000)))


@pytest.mark.parametrize("raw", [b"{}", b'{"ok": 1}', b'{"ok": false, "error": "no"}', b"[true]", b"\x00"])
def test_a_malformed_reply_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_reply(raw)


def test_an_oversized_reply_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        frames.decode_reply_length(frames.REPLY_LENGTH.pack(frames.MAX_REPLY_BYTES + 1))


def test_an_unknown_error_code_becomes_a_plain_error() -> None:
    with pytest.raises(DisaggError, match="odd"):
        frames.decode_reply(b'{"ok": false, "error": {"code": "Nonsense", "message": "odd"}}')


def test_a_frame_head_survives_the_wire() -> None:
    frame = frames.Frame(frames.Kind.VALUES, 3, 0, 5, 9, 1 << 40)
    assert frames.decode_frame(frames.encode_frame(frame)) == frame
    assert frames.FRAME.size == 24


def test_the_end_frame_carries_totals() -> None:
    totals = frames.TransferTotals(3, 99, bytes(range(16)))
    raw = frames.encode_end(totals)
    assert frames.decode_frame(raw[: frames.FRAME.size]).kind is frames.Kind.END
    assert frames.decode_totals(raw[frames.FRAME.size :]) == totals


@pytest.mark.parametrize(
    "fields",
    [
        (0, 0, 0, 0, 0, 0),
        (8, 0, 0, 0, 0, 0),
        (6, 1, 0, 0, 4, 32),
        (7, 0, 0, 0, 4, 15),
        (5, 0, 0, 0, 0, 1),
        (4, 1, 0, 0, 0, 32),
        (4, 0, 0, 0, 0, 33),
    ],
)
def test_unknown_kinds_and_odd_end_frames_are_protocol_errors(fields: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_frame(frames.FRAME.pack(*fields))


def test_a_block_becomes_one_frame_for_keys_and_one_for_values() -> None:
    cache = Cache.random(mixed_layout(), 3)
    block = next(cache.blocks(2))
    (keys, key_views), (values, value_views) = frames_of(block, cache.layout)
    assert keys == (frames.Kind.KEYS, 0, 0, 0, 2, 3 * 2 * 8 * 2)
    assert values == (frames.Kind.VALUES, 0, 0, 0, 2, 3 * 2 * 4 * 2)
    assert (len(key_views), len(value_views)) == (3, 3)


def test_a_quantised_tensor_becomes_one_frame_per_plane() -> None:
    layout = groups_layout()
    block = next(Cache.random(layout, 3, wire=INT8).blocks(2))
    sent = [(frame, [len(view) for view in views]) for frame, views in frames_of(block, layout, INT8)]
    assert sent == [
        ((frames.Kind.KEYS, 0, 0, 0, 2, 2 * 2 * 64), [128, 128]),
        ((frames.Kind.KEYS, 0, 1, 0, 2, 2 * 2 * 2), [4, 4]),
        ((frames.Kind.KEYS, 0, 2, 0, 2, 2 * 2 * 2), [4, 4]),
        ((frames.Kind.VALUES, 0, 0, 0, 2, 2 * 2 * 80), [160, 160]),  # 40 elements make no group of 64
    ]


@pytest.mark.parametrize(("made", "sent"), [(AS_IS, INT8), (INT8, AS_IS)])
def test_a_block_of_the_other_form_is_refused(made: WireForm, sent: WireForm) -> None:
    layout = groups_layout()
    block = next(Cache.random(layout, 3, wire=made).blocks(2))
    with pytest.raises(ProtocolError, match="the keys of layer 0"):
        frames_of(block, layout, sent)


def test_views_of_any_item_type_are_sent_as_bytes() -> None:
    view = memoryview(bytearray(2 * 6 * 2)).cast("H")
    ((_, views),) = frames_of(KVBlock(3, 0, 2, [view], []), mixed_layout())
    assert [len(v) for v in views] == [24]


@pytest.mark.parametrize(
    "block",
    [
        KVBlock(9, 0, 1, [], []),
        KVBlock(-1, 0, 1, [], []),
        KVBlock(3, 1, 1, [memoryview(b"")], []),
        KVBlock(3, 0, 1, [memoryview(bytes(11))], []),
        KVBlock(3, 0, 1, [memoryview(bytes(12))] * 2, []),
        StateBlock(2, [memoryview(bytes(120))]),
        StateBlock(0, [memoryview(bytes(1))]),
    ],
)
def test_a_block_that_does_not_fit_the_layout_is_refused(block: KVBlock | StateBlock) -> None:
    with pytest.raises(ProtocolError):
        frames_of(block, mixed_layout())
