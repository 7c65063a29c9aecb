"""What a receiver refuses of a transfer in chunks: one clear error each, nothing accepted, nothing held."""

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from disagg.api.layout import Layout
from disagg.api.names import KV_CHUNKS, KV_WHOLE
from disagg.errors import (
    DisaggError,
    FingerprintMismatch,
    IntegrityError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
)
from disagg.kv import frames
from disagg.kv.arriving import CREDIT_CHUNKS
from disagg.kv.frames import FRAME, TOTALS, Frame, Kind
from disagg.kv.preamble import NONCE_BYTES, PROOF_BYTES, Nonces, encode_preamble, proof
from disagg.kv.received import ReceivedKV
from tests.deadlines import wait_until
from tests.kv.chunk_parts import HIDDEN, Awaited, Parts, Prompt, frames_for, stream_of
from tests.kv.kv_parts import Cache, Receiver, header_for, mixed_layout, opened, parts_of, read_reply, stream

PROMPT = Prompt.random(15)
CHUNK = 5
NONCE = bytes(NONCE_BYTES)
FRAMES = 6  # of a chunk: keys and values of two layers, hidden states, its end


def refused(receiver: Receiver, parts: Parts, prompt: Prompt = PROMPT, whole: int = 0, **changes: Any) -> DisaggError:
    """The error to a transfer with these frames, of which tokens [0, whole) are accepted before it; nothing is held."""
    awaited = Awaited.by(receiver.tickets, prompt)
    header = prompt.header(awaited.slot, **changes)
    replies = receiver.exchange(stream_of(header, parts), awaited.slot.ticket, version=header.version)
    outcome = awaited.outcome()
    assert isinstance(outcome, DisaggError)
    assert replies[-1]["error"]["code"] == type(outcome).__name__
    wait_until(lambda: awaited.arriving.outcome is not None)
    assert awaited.arriving.whole == whole
    awaited.arriving.release()
    receiver.require_serving()
    assert not awaited.memory.in_use
    return outcome


def changed(index: int, payload: Callable[[bytes], bytes] = bytes, **fields: Any) -> Parts:
    """The frames of the prompt, one of them changed."""
    parts = frames_for(PROMPT, CHUNK)
    frame, raw = parts[index]
    parts[index] = frame._replace(**fields), payload(raw)
    return parts


def without(index: int) -> Parts:
    parts = frames_for(PROMPT, CHUNK)
    return parts[:index] + parts[index + 1 :]


def twice(index: int) -> Parts:
    parts = frames_for(PROMPT, CHUNK)
    return parts[: index + 1] + parts[index:]


KEYS, VALUES, SLIDING_KEYS, SLIDING_VALUES, STATES, END = range(FRAMES)
ROW = 3 * 8 * 4  # bytes of one token's keys in the first layer


def test_the_frames_are_accepted_as_they_are(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    raw = stream_of(PROMPT.header(awaited.slot), frames_for(PROMPT, CHUNK))
    *credits, acknowledged = receiver.exchange(raw, awaited.slot.ticket, version=KV_CHUNKS)
    assert [(one["chunks"], one["credit"]) for one in credits] == [(n, CREDIT_CHUNKS) for n in range(4)]
    assert "received_bytes" in acknowledged
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and PROMPT.matches(kv)
    awaited.arriving.release()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param(without(KEYS), "rows of the chunk that ends at 5 are missing", id="no keys"),
        pytest.param(without(SLIDING_VALUES), "rows of the chunk that ends at 5 are missing", id="no values"),
        pytest.param(without(STATES), "the hidden states of tokens \\[0, 5\\) are missing", id="no hidden states"),
        pytest.param(twice(KEYS), "already received", id="rows twice"),
        pytest.param(twice(STATES), "already received", id="hidden states twice"),
        pytest.param(without(END), "out of order: rows \\[0, 5\\) are those of the chunk|not expected", id="no end"),
        pytest.param(changed(KEYS, lambda raw: raw[:-ROW], end=4, length=4 * ROW), "out of order", id="short keys"),
        pytest.param(changed(VALUES, start=1), "out of order", id="rows that do not follow"),
        pytest.param(changed(KEYS, length=5 * ROW - 4), "announces 476 payload bytes, the layout has 480", id="length"),
        pytest.param(changed(STATES, length=5 * HIDDEN * 4 + 4), "announces 124 payload bytes", id="hidden length"),
        pytest.param(changed(STATES, end=6), "are not those of the chunk", id="hidden states of other tokens"),
        pytest.param(changed(END, end=6), "the end of chunk \\[0, 6\\) comes", id="the end of another chunk"),
        pytest.param(changed(KEYS, layer=2), "not part of the model", id="a layer that is not the head's"),
        pytest.param(changed(KEYS, tensor=1), "not part of the model", id="a plane that is none"),
        pytest.param(
            changed(KEYS, end=16, length=16 * ROW), "a chunk of tokens \\[0, 16\\) of a prompt of 15", id="long"
        ),
        pytest.param(changed(KEYS, end=0, length=0), "a chunk of tokens \\[0, 0\\)", id="an empty chunk"),
        pytest.param(changed(STATES, lambda raw: bytes(4 * 29) + b"\0\0\xc0\x7f"), "not all numbers", id="NaN"),
        pytest.param(changed(STATES, lambda raw: b"\0\0\x80\xff" + bytes(4 * 29)), "not all numbers", id="infinite"),
    ],
)
def test_a_chunk_that_is_not_as_it_must_be_is_refused(receiver: Receiver, parts: Parts, message: str) -> None:
    error = refused(receiver, parts)
    assert isinstance(error, ProtocolError)
    assert re.search(message, error.message), error.message


@pytest.mark.parametrize("parts", [twice(END), [*frames_for(PROMPT, CHUNK)[:FRAMES], *frames_for(PROMPT, CHUNK)]])
def test_a_chunk_that_comes_twice_is_refused(receiver: Receiver, parts: Parts) -> None:
    assert isinstance(refused(receiver, parts, whole=5), ProtocolError)


def test_a_wrong_digest_of_a_chunk_is_found_at_its_end(receiver: Receiver) -> None:
    parts = frames_for(PROMPT, CHUNK)
    parts[FRAMES + END] = parts[FRAMES + END][0], bytes(16)
    error = refused(receiver, parts, whole=5)
    assert isinstance(error, IntegrityError) and "the KV of tokens [5, 10) was damaged" in error.message


def test_a_wrong_digest_of_what_follows_the_chunks_is_found_at_the_end(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    raw = bytearray(stream_of(PROMPT.header(awaited.slot), frames_for(PROMPT, CHUNK)))
    raw[-1] ^= 1
    receiver.exchange(bytes(raw), awaited.slot.ticket, version=KV_CHUNKS)
    assert isinstance(awaited.outcome(), IntegrityError)
    awaited.arriving.release()


def test_chunks_that_never_come_leave_the_transfer_truncated(receiver: Receiver) -> None:
    error = refused(receiver, frames_for(PROMPT, CHUNK)[: 2 * FRAMES], whole=10)
    assert isinstance(error, ProtocolError) and "the last chunk ends at 10 of 15" in error.message


def test_a_chunk_before_its_credit_is_refused(receiver: Receiver) -> None:
    prompt = Prompt.random(CREDIT_CHUNKS + 1)
    error = refused(receiver, frames_for(prompt, 1), prompt, whole=CREDIT_CHUNKS)
    assert isinstance(error, ProtocolError) and "chunk 4 comes before it may be sent" in error.message


def test_a_chunk_with_hidden_states_has_a_bound(receiver: Receiver) -> None:
    prompt = Prompt.random(600)
    error = refused(receiver, frames_for(prompt, 513)[:1], prompt)
    assert isinstance(error, ProtocolError) and "513 tokens with hidden states: at most 512 may" in error.message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"layers": 2},
            LayoutMismatch,
            "layers [0, 2), with hidden states of 6 elements, this ticket is for layers",
        ),
        ({"layers": None}, LayoutMismatch, "send all layers"),
        ({"hidden": 8}, LayoutMismatch, "with hidden states of 8 elements, this ticket is for layers [0, 4), with"),
        ({"hidden": 0}, LayoutMismatch, "send layers [0, 4), this ticket is for layers [0, 4), with hidden states"),
        ({"chunks": False}, LayoutMismatch, "send all layers, this ticket is for layers [0, 4)"),
        ({"layout": PROMPT.layout}, LayoutMismatch, "number of layers: decode has 2, prefill has 4"),
        ({"layout": Layout(PROMPT.head.layers, "float16")}, LayoutMismatch, "dtype: decode has float32"),
        ({"token_hash": "00" * 32}, FingerprintMismatch, "token_hash"),
    ],
)
def test_a_header_that_is_not_the_tickets_is_refused(
    receiver: Receiver, changes: dict[str, Any], error: type[DisaggError], message: str
) -> None:
    refusal = refused(receiver, frames_for(PROMPT, CHUNK), **changes)
    assert type(refusal) is error and message in refusal.message


def test_chunks_and_hidden_states_without_a_split_agreed_are_refused(receiver: Receiver) -> None:
    whole = Prompt.random(15, layers=None)
    error = refused(receiver, frames_for(PROMPT, CHUNK), whole, hidden=HIDDEN)
    assert isinstance(error, LayoutMismatch) and "this ticket is for all layers" in error.message
    cache = Cache.random(mixed_layout(), 15)
    slot = receiver.issue(cache)
    raw = stream(header_for(slot, chunks=True), parts_of(cache))
    (reply,) = receiver.exchange(raw, slot.ticket, version=KV_CHUNKS)
    assert reply["error"]["code"] == "ProtocolError" and "chunks" in reply["error"]["message"]
    receiver.require_serving()


@pytest.mark.parametrize("kind", [Kind.CHUNK, Kind.HIDDEN])
def test_a_transfer_without_chunks_has_no_frames_of_them(receiver: Receiver, kind: Kind) -> None:
    cache = Cache.random(mixed_layout(), 15)
    slot = receiver.issue(cache)
    frame = (Frame(kind, 0, 0, 0, 5, 16), bytes(16))
    *_, reply = receiver.exchange(stream(header_for(slot), [frame]), slot.ticket)
    assert reply["error"]["code"] == "ProtocolError" and "a transfer without chunks" in reply["error"]["message"]
    receiver.require_serving()


def test_hidden_states_where_all_layers_are_sent_are_refused(receiver: Receiver) -> None:
    whole = Prompt.random(15, layers=None)
    frame = (Frame(Kind.HIDDEN, 0, 0, 0, 5, 16), bytes(16))
    error = refused(receiver, [frame, *frames_for(whole, CHUNK)], whole)
    assert isinstance(error, ProtocolError) and "hidden states of tokens [0, 5) are not expected" in error.message


@pytest.mark.parametrize("fields", [{"layers": 0}, {"layers": 5000}, {"layers": "4"}, {"hidden": -1}, {"hidden": None}])
def test_a_header_with_layers_that_are_none_is_refused(receiver: Receiver, fields: dict[str, Any]) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    body = {**json.loads(frames.encode_header(PROMPT.header(awaited.slot))), **fields}
    (reply,) = receiver.exchange(opened(json.dumps(body).encode()), awaited.slot.ticket, version=KV_CHUNKS)
    assert reply["error"]["code"] == "ProtocolError" and "must be a whole number" in reply["error"]["message"]
    awaited.arriving.release()


def test_a_version_that_is_not_the_one_that_is_proven_is_refused(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    header = PROMPT.header(awaited.slot)
    with receiver.dial() as sock:
        sock.sendall(encode_preamble(awaited.slot.ticket, NONCE, KV_CHUNKS))
        nonces = Nonces(NONCE, frames.decode_identity(read_reply(sock))[0], KV_WHOLE)
        sock.sendall(proof(awaited.slot.ticket, "sender", nonces) + opened(header)[PROOF_BYTES:])
        assert read_reply(sock)["error"]["code"] == "TicketRefused"
    assert awaited.slot.state == "issued"
    awaited.arriving.release()


def test_a_sender_of_chunks_is_lost_and_how_much_of_a_chunk_had_come_is_logged(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    awaited = Awaited.by(receiver.tickets, PROMPT)
    raw = stream_of(PROMPT.header(awaited.slot), frames_for(PROMPT, CHUNK)[: FRAMES + 2])
    receiver.exchange(raw[: -FRAME.size - TOTALS.size], awaited.slot.ticket, hang_up=True, version=KV_CHUNKS)
    assert isinstance(awaited.outcome(), PeerLost)
    assert awaited.arriving.whole == 5
    awaited.arriving.release()
    sizes = [len(raw) for _, raw in frames_for(PROMPT, CHUNK)[FRAMES:][: FRAMES - 1]]
    assert f"in the chunk of tokens [5, 10), with {sum(sizes[:2])} of its {sum(sizes)} bytes" in caplog.text
