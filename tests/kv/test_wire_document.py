"""docs/wire-protocol.md shows the bytes of two small transfers: they are those that this code sends and accepts.

After a deliberate change of the format run this file as a program: it prints the listings to put into the document.
"""

import queue
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from disagg.api.layout import SPLIT_CHUNKS, LayerLayout, Layout, SplitLayout
from disagg.api.names import KV_CHUNKS, KV_WHOLE
from disagg.kv import frames
from disagg.kv.arriving import CREDIT_CHUNKS, ArrivingKV
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Credit
from disagg.kv.outbox import frames_of
from disagg.kv.parts import MAX_PARTS
from disagg.kv.preamble import MAX_HEADER_BYTES, PROOF_BYTES, Nonces, encode_preamble, encode_proof, proof
from disagg.kv.receive.incoming import Expected
from disagg.kv.received import ReceivedKV
from tests.kv.kv_parts import Receiver, read_replies

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-protocol.md"
TICKET = "one-time-ticket"
NONCES = Nonces(bytes(range(16)), bytes(range(16, 32)))
LAYOUT = Layout((LayerLayout("full", kv_heads=2, key_dim=2, value_dim=1),), "float16")
EXPECTED = Expected("req-1", LAYOUT, Fingerprint("tiny", 8, "aa", "bb", "cc", "dd"), token_hash([5, 6]), tokens=2)
KEYS = numpy.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "<f2")  # [heads, rows, dim]
VALUES = numpy.array([[[9], [10]], [[11], [12]]], "<f2")
NONCES_5 = NONCES._replace(version=KV_CHUNKS)
HIDDEN = numpy.array([[13, 14, 15], [16, 17, 18]], "<f2")  # [tokens, elements]
CHUNKED = replace(
    EXPECTED, layout=Layout(LAYOUT.layers * 2, "float16"), layers=1, split=SplitLayout(2, (0, 1), 3), chunks=True
)
ACKNOWLEDGEMENT = frames.encode_ok(received_bytes=24, receive_s=0.001)

Piece = tuple[str, bytes]


def sender_pieces() -> tuple[list[Piece], list[Piece]]:
    """(proof and header), (frames and end frame), each piece with what it is."""
    e = EXPECTED
    header = frames.encode_header(
        frames.Header(TICKET, e.request_id, e.fingerprint, e.layout, e.token_hash, e.tokens, e.start)
    )
    block = KVBlock(0, 0, 2, [head.data for head in KEYS], [head.data for head in VALUES])
    digest = frames.Digest()
    body = framed([block], LAYOUT, digest)
    return opening(header, NONCES), body + end(frames.TransferTotals(2, 24, digest.end()), "of the two frames")


def opening(header: bytes, nonces: Nonces) -> list[Piece]:
    return [
        ("HMAC-SHA256, of the sender", proof(TICKET, "sender", nonces)),
        (f"{len(header)} header bytes", encode_proof(bytes(PROOF_BYTES), len(header))[PROOF_BYTES:]),
        ("header", header),
    ]


def framed(blocks: list[Block], layout: Layout, digest: frames.Digest, hidden_bytes: int = 0) -> list[Piece]:
    """The frames of blocks, piece by piece."""
    body: list[Piece] = []
    for block in blocks:
        for frame, views in frames_of(block, layout, hidden_bytes=hidden_bytes):
            name, head = frame.kind.name.lower(), frames.encode_frame(frame)
            body.append((f"kind {frame.kind.value} ({name}), layer 0", head[:4]))
            body.append(("tensor 0", head[4:8]))
            body.append((f"rows from {frame.start}", head[8:12]))
            body.append((f"to {frame.end}", head[12:16]))
            body.append((f"{frame.length} payload bytes", head[16:]))
            if frame.kind is frames.Kind.CHUNK:
                body.append(("XXH3-128 of the frames before it", digest.chunk(head)))
                continue
            of = [f"of token {row}" for row in range(frame.start, frame.end)]
            if frame.kind is not frames.Kind.HIDDEN:
                of = [f"of head {i}: {frame.end - frame.start} rows" for i in range(len(views))]
                parts = [bytes(view) for view in views]
            else:
                name = "hidden state"
                parts = [bytes(views[0][i * hidden_bytes :][:hidden_bytes]) for i in range(len(of))]
            body += [(f"{name} {what}", part) for what, part in zip(of, parts, strict=True)]
            digest.update(head)
            for view in views:
                digest.update(view)
    return body


def end(totals: frames.TransferTotals, of_what: str) -> list[Piece]:
    raw = frames.encode_end(totals)
    return [
        (what, raw[first:last])
        for what, first, last in (
            ("kind 4 (end), layer 0", 0, 4),
            ("tensor, from, to: 0", 4, 16),
            ("32 payload bytes", 16, 24),
            (f"{totals.frames} frames", 24, 32),
            (f"{totals.payload_bytes} payload bytes in them", 32, 40),
            (f"XXH3-128 {of_what}", 40, 56),
        )
    ]


def chunk_pieces() -> tuple[list[Piece], list[Piece]]:
    """As `sender_pieces`, in version 5: the same keys of the first of two layers, in two chunks, with hidden states."""
    e = CHUNKED
    header = frames.Header(
        TICKET,
        e.request_id,
        e.fingerprint,
        e.head,
        e.token_hash,
        e.tokens,
        chunks=True,
        layers=1,
        hidden=HIDDEN.shape[1],
    )
    digest = frames.Digest()
    blocks: list[Block] = []
    for row in range(2):
        keys = [head[row : row + 1].reshape(-1).view(numpy.uint8).data for head in KEYS]
        blocks.append(
            KVBlock(0, row, row + 1, keys, [head[row : row + 1].reshape(-1).view(numpy.uint8).data for head in VALUES])
        )
        blocks += [HiddenBlock(row, row + 1, HIDDEN[row].view(numpy.uint8).data), ChunkEnd(row, row + 1)]
    body = framed(blocks, e.head, digest, header.hidden_bytes)
    totals = frames.TransferTotals(6, 36, digest.end())
    return opening(frames.encode_header(header), NONCES_5), body + end(totals, "of the chunk frames and of nothing")


def preamble_pieces(version: int) -> list[Piece]:
    raw = encode_preamble(TICKET, NONCES.sender, version)
    return [
        ("magic", raw[:6]),
        (f"version {version}", raw[6:8]),
        ("SHA-256 of the ticket, one-time-ticket", raw[8:40]),
        ("the sender's nonce", raw[40:]),
    ]


def listing() -> str:
    opening, body = sender_pieces()
    identity = frames.encode_identity(NONCES.receiver, proof(TICKET, "receiver", NONCES))
    lines = ["# sender -> receiver: preamble", *rendered(preamble_pieces(KV_WHOLE))]
    lines += ["# receiver -> sender: its nonce and proof", *rendered(reply_pieces(identity))]
    lines += ["# sender -> receiver", *rendered(opening)]
    lines += ["# receiver -> sender: accepted", *rendered(reply_pieces(frames.encode_ok()))]
    lines += ["# sender -> receiver", *rendered(body)]
    lines += ["# receiver -> sender: acknowledged", *rendered(reply_pieces(ACKNOWLEDGEMENT))]
    return "\n".join(lines)


def chunked_listing() -> str:
    opening, body = chunk_pieces()
    identity = frames.encode_identity(NONCES.receiver, proof(TICKET, "receiver", NONCES_5))
    lines = ["# sender -> receiver: preamble", *rendered(preamble_pieces(KV_CHUNKS))]
    lines += ["# receiver -> sender: its nonce and proof", *rendered(reply_pieces(identity))]
    lines += ["# sender -> receiver", *rendered(opening)]
    lines += ["# receiver -> sender: accepted", *rendered(reply_pieces(frames.encode_credit(Credit(0, 4))))]
    lines += ["# sender -> receiver", *rendered(body)]
    return "\n".join(lines)


def reply_pieces(raw: bytes) -> list[Piece]:
    return [(f"{len(raw) - 4} reply bytes", raw[:4]), ("reply", raw[4:])]


def rendered(pieces: list[Piece]) -> list[str]:
    """16 bytes a line; long JSON is annotated with its own text."""
    lines = []
    for what, raw in pieces:
        for first in range(0, len(raw), 16):
            part = raw[first : first + 16]
            text = part.decode("ascii") if what in ("header", "reply", "magic") else what if first == 0 else ""
            lines.append(f"{part.hex(' '):<47}  | {text}".rstrip(" "))
    return lines


def documented(listing: int = 0) -> str:
    listings: list[str] = re.findall(r"```hex\n(.*?)\n```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return listings[listing]


def documented_bytes(direction: str, listing: int = 0) -> bytes:
    talking, raw = "", b""
    for line in documented(listing).splitlines():
        if line.startswith("#"):
            talking = line
        elif talking == direction:
            raw += bytes.fromhex(line.split("|")[0])
    return raw


def test_the_documented_listings_are_what_the_code_produces() -> None:
    assert documented(0) == listing()
    assert documented(1) == chunked_listing()


def replies_to(
    receiver: Receiver, listing: int, expected: Expected, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tuple[list[dict[str, Any]], ReceivedKV]:
    """What a receiver that expects this says to the bytes of a listing, and what it has then."""
    results: queue.Queue[object] = queue.Queue()
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: TICKET)
    receiver.tickets.issue(expected, results.put, deadline=time.monotonic() + 10, **more)
    with receiver.dial() as sock:
        monkeypatch.setattr("secrets.token_bytes", lambda size: NONCES.receiver[:size])
        sock.sendall(documented_bytes("# sender -> receiver: preamble", listing))
        sock.sendall(documented_bytes("# sender -> receiver", listing))
        identity, *replies = read_replies(sock)
    assert frames.encode_ok(**identity) == documented_bytes("# receiver -> sender: its nonce and proof", listing)
    assert replies[-1]["received_bytes"] > 0
    kv = results.get(timeout=30)
    assert isinstance(kv, ReceivedKV)
    assert numpy.array_equal(kv.keys[0][0].view("<f2").reshape(2, 2, 2), KEYS)
    assert numpy.array_equal(kv.values[0][0].view("<f2").reshape(2, 2, 1), VALUES)
    return replies, kv


def test_a_receiver_accepts_the_documented_bytes(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    (accepted, acknowledged), kv = replies_to(receiver, 0, EXPECTED, monkeypatch)
    assert accepted == {"ok": True} and acknowledged["received_bytes"] == 24
    kv.release()


def test_a_receiver_accepts_the_documented_chunks(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    e = CHUNKED
    arriving = ArrivingKV(e.head, e.tokens, arenas=receiver.tickets.arenas, layers=1, hidden=e.hidden)
    replies, _ = replies_to(receiver, 1, e, monkeypatch, arriving=arriving)
    assert [frames.decode_credit(reply) for reply in replies] == [(0, 4), (1, 4), (2, 4), None]
    chunks = [arriving.take(), arriving.take()]
    states = [chunk.hidden.data[:6].view("<f2") for chunk in chunks if chunk is not None and chunk.hidden is not None]
    assert numpy.array_equal(states, HIDDEN)
    arriving.release()


@pytest.mark.parametrize(
    "number",
    [
        MAX_HEADER_BYTES,
        frames.MAX_REPLY_BYTES,
        frames.MAX_NAME_CHARS,
        frames.MAX_HIDDEN,
        *SPLIT_CHUNKS,
        MAX_PARTS,
        CREDIT_CHUNKS,
    ],
)
def test_the_document_states_the_bounds_of_the_code(number: int) -> None:
    assert re.search(rf"\b{number}\b", DOCUMENT.read_text(encoding="utf-8").replace(",", ""))


if __name__ == "__main__":
    sys.stdout.write(f"{listing()}\n\n{chunked_listing()}\n")
