"""The fixed-size first bytes from a sender: version and ticket, then its proof. Each is checked before more is read."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from disagg.errors import ProtocolError

MAGIC = b"DISAGG"
VERSION = 4
MAX_HEADER_BYTES = 1 << 18  # over twice what 1024 layers need

OPENING = struct.Struct("<6sH")  # magic, version: the same in every version
PREAMBLE = struct.Struct("<6sH32s16s")  # magic, version, ticket digest, the sender's nonce
PROOF = struct.Struct("<32sI")  # the sender's proof, header length
NONCE_BYTES = 16


class Preamble(NamedTuple):
    """ticket_digest: see `ticket_digest`. nonce: the sender's."""

    ticket_digest: bytes
    nonce: bytes


class SenderProof(NamedTuple):
    """proof: see `proof.proof`. header_bytes: how many follow."""

    proof: bytes
    header_bytes: int


def ticket_digest(ticket: str) -> bytes:
    """SHA-256 of a ticket: 32 bytes whatever its length. It identifies the ticket and reveals nothing of it."""
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()


def encode_preamble(ticket: str, nonce: bytes) -> bytes:
    """What the sender sends first."""
    return PREAMBLE.pack(MAGIC, VERSION, ticket_digest(ticket), nonce)


def check_opening(raw: bytes) -> None:
    """Refuse what is not a KV transfer, and every other version. raw: the first OPENING.size bytes."""
    magic, version = OPENING.unpack(raw)
    if magic != MAGIC:
        raise ProtocolError(f"not a KV transfer: it begins with {magic!r}", "point the sender at the KV port")
    if version != VERSION:
        raise ProtocolError(
            f"the sender uses KV protocol version {version}, the receiver version {VERSION}",
            "install the same disagg version on both hosts",
        )


def decode_preamble(raw: bytes) -> Preamble:
    """The preamble, whose opening is right."""
    check_opening(raw[: OPENING.size])
    _, _, digest, nonce = PREAMBLE.unpack(raw)
    return Preamble(digest, nonce)


def encode_proof(proof: bytes, header_bytes: int) -> bytes:
    """What the sender sends once the receiver has proven itself; the header follows."""
    return PROOF.pack(proof, header_bytes)


def decode_proof(raw: bytes) -> SenderProof:
    """The sender's proof, not compared yet. ProtocolError if the header would be too long."""
    proof, length = PROOF.unpack(raw)
    if length > MAX_HEADER_BYTES:
        raise ProtocolError(f"the transfer header announces {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return SenderProof(proof, int(length))
