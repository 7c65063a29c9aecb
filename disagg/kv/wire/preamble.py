"""The fixed-size preamble of a connection: version and ticket, checked before anything else is read or parsed."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from disagg.errors import ProtocolError

MAGIC = b"DISAGG"
VERSION = 3
MAX_HEADER_BYTES = 1 << 18  # over twice what 1024 layers need

OPENING = struct.Struct("<6sH")  # magic, version: the same in every version
PREAMBLE = struct.Struct("<6sH32sI")  # magic, version, ticket digest, header length


class Preamble(NamedTuple):
    """ticket_digest: see `ticket_digest`. header_bytes: how many follow."""

    ticket_digest: bytes
    header_bytes: int


def ticket_digest(ticket: str) -> bytes:
    """SHA-256 of a ticket: 32 bytes whatever its length. It opens one connection and says nothing about the ticket."""
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()


def encode_preamble(ticket: str, header_bytes: int) -> bytes:
    """ProtocolError if the header is too long."""
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"the transfer header has {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return PREAMBLE.pack(MAGIC, VERSION, ticket_digest(ticket), header_bytes)


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
    _, _, digest, length = PREAMBLE.unpack(raw)
    if length > MAX_HEADER_BYTES:
        raise ProtocolError(f"the transfer header announces {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return Preamble(digest, int(length))
