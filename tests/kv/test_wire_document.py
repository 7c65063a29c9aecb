"""docs/wire-protocol.md shows the bytes of one small transfer: they are those that this code sends and accepts.

After a deliberate change of the format run this file as a program: it prints the listing to put into the document.
"""

import queue
import re
import sys
import time
from pathlib import Path

import numpy
import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import KV_WHOLE
from disagg.kv import frames
from disagg.kv.blocks import KVBlock
from disagg.kv.fingerprint import Fingerprint, token_hash
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
    body: list[Piece] = []
    for frame, views in frames_of(block, LAYOUT):
        name = frame.kind.name.lower()
        head = frames.encode_frame(frame)
        body.append((f"kind {frame.kind.value} ({name}), layer 0", head[:4]))
        body.append(("tensor 0", head[4:8]))
        body.append(("rows from 0", head[8:12]))
        body.append(("to 2", head[12:16]))
        body.append((f"{frame.length} payload bytes", head[16:]))
        body += [(f"{name} of head {i}: 2 rows", bytes(view)) for i, view in enumerate(views)]
        digest.update(head)
        for view in views:
            digest.update(view)
    end = frames.encode_end(frames.TransferTotals(2, 24, digest.end()))
    for what, first, last in (
        ("kind 4 (end), layer 0", 0, 4),
        ("tensor, from, to: 0", 4, 16),
        ("32 payload bytes", 16, 24),
        ("2 frames", 24, 32),
        ("24 payload bytes in them", 32, 40),
        ("XXH3-128 of the two frames", 40, 56),
    ):
        body.append((what, end[first:last]))
    opening = [
        ("HMAC-SHA256, of the sender", proof(TICKET, "sender", NONCES)),
        (f"{len(header)} header bytes", encode_proof(bytes(PROOF_BYTES), len(header))[PROOF_BYTES:]),
        ("header", header),
    ]
    return opening, body


def preamble_pieces() -> list[Piece]:
    raw = encode_preamble(TICKET, NONCES.sender)
    return [
        ("magic", raw[:6]),
        (f"version {KV_WHOLE}", raw[6:8]),
        ("SHA-256 of the ticket, one-time-ticket", raw[8:40]),
        ("the sender's nonce", raw[40:]),
    ]


def listing() -> str:
    opening, body = sender_pieces()
    identity = frames.encode_identity(NONCES.receiver, proof(TICKET, "receiver", NONCES))
    lines = ["# sender -> receiver: preamble", *rendered(preamble_pieces())]
    lines += ["# receiver -> sender: its nonce and proof", *rendered(reply_pieces(identity))]
    lines += ["# sender -> receiver", *rendered(opening)]
    lines += ["# receiver -> sender: accepted", *rendered(reply_pieces(frames.encode_ok()))]
    lines += ["# sender -> receiver", *rendered(body)]
    lines += ["# receiver -> sender: acknowledged", *rendered(reply_pieces(ACKNOWLEDGEMENT))]
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


def documented() -> str:
    match = re.search(r"```hex\n(.*?)\n```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert match, "the document has no hex listing"
    return match.group(1)


def documented_bytes(direction: str) -> bytes:
    talking, raw = "", b""
    for line in documented().splitlines():
        if line.startswith("#"):
            talking = line
        elif talking == direction:
            raw += bytes.fromhex(line.split("|")[0])
    return raw


def test_the_documented_listing_is_what_the_code_produces() -> None:
    assert documented() == listing()


def test_a_receiver_accepts_the_documented_bytes(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    results: queue.Queue[object] = queue.Queue()
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: TICKET)
    receiver.tickets.issue(EXPECTED, results.put, deadline=time.monotonic() + 10)
    with receiver.dial() as sock:
        monkeypatch.setattr("secrets.token_bytes", lambda size: NONCES.receiver[:size])
        sock.sendall(documented_bytes("# sender -> receiver: preamble") + documented_bytes("# sender -> receiver"))
        identity, accepted, acknowledged = read_replies(sock)
    assert frames.encode_ok(**identity) == documented_bytes("# receiver -> sender: its nonce and proof")
    assert accepted == {"ok": True}
    assert acknowledged["received_bytes"] == 24
    kv = results.get(timeout=30)
    assert isinstance(kv, ReceivedKV)
    assert numpy.array_equal(kv.keys[0][0].view("<f2").reshape(2, 2, 2), KEYS)
    assert numpy.array_equal(kv.values[0][0].view("<f2").reshape(2, 2, 1), VALUES)
    kv.release()


@pytest.mark.parametrize("number", [MAX_HEADER_BYTES, frames.MAX_REPLY_BYTES, frames.MAX_NAME_CHARS, MAX_PARTS])
def test_the_document_states_the_bounds_of_the_code(number: int) -> None:
    assert re.search(rf"\b{number}\b", DOCUMENT.read_text(encoding="utf-8").replace(",", ""))


if __name__ == "__main__":
    sys.stdout.write(listing() + "\n")
