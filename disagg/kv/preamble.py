"""How a KV connection begins: the sender names its ticket, and each end proves that it has it, before it is sent
anything that another may not have.

Everything here has a fixed size and is checked before more is read. The ticket itself never crosses the connection: its
SHA-256 names it, and both proofs are HMACs under it of two fresh nonces. A program that has taken the receiver's port
learns a digest and a nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal, NamedTuple

from disagg.api.names import KV_CHUNKS, KV_WHOLE
from disagg.errors import ProtocolError

MAGIC = b"DISAGG"
VERSIONS = (KV_WHOLE, KV_CHUNKS)
MAX_HEADER_BYTES = 1 << 18  # over twice what 1024 layers need

OPENING = struct.Struct("<6sH")  # magic, version: the same in every version
PREAMBLE = struct.Struct("<6sH32s16s")  # magic, version, ticket digest, the sender's nonce
PROOF = struct.Struct("<32sI")  # the sender's proof, header length
NONCE_BYTES = 16
PROOF_BYTES = 32

End = Literal["sender", "receiver"]


class Preamble(NamedTuple):
    """What a sender sends first. ticket_digest: names its ticket. nonce: the sender's own, drawn for this
    connection. version: of the protocol that it uses."""

    ticket_digest: bytes
    nonce: bytes
    version: int = KV_WHOLE


class SenderProof(NamedTuple):
    """What a sender sends once the receiver has proven itself. header_bytes: how many bytes of header follow."""

    proof: bytes
    header_bytes: int


def ticket_digest(ticket: str) -> bytes:
    """SHA-256 of a ticket: 32 bytes whatever its length. It identifies the ticket and reveals nothing of it."""
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()


def encode_preamble(ticket: str, nonce: bytes, version: int = KV_WHOLE) -> bytes:
    """What the sender sends first."""
    return PREAMBLE.pack(MAGIC, version, ticket_digest(ticket), nonce)


def check_opening(raw: bytes) -> None:
    """Refuse what is not a KV transfer, and every other version. raw: the first OPENING.size bytes."""
    magic, version = OPENING.unpack(raw)
    if magic != MAGIC:
        raise ProtocolError(f"not a KV transfer: it begins with {magic!r}", "point the sender at the KV port")
    if version not in VERSIONS:
        raise ProtocolError(
            f"the sender uses KV protocol version {version}, the receiver version {' or '.join(map(str, VERSIONS))}",
            "install the same disagg version on both hosts",
        )


def decode_preamble(raw: bytes) -> Preamble:
    """The preamble, whose opening is right."""
    check_opening(raw[: OPENING.size])
    _, version, digest, nonce = PREAMBLE.unpack(raw)
    return Preamble(digest, nonce, version)


def encode_proof(proof: bytes, header_bytes: int) -> bytes:
    """What the sender sends once the receiver has proven itself; the header follows."""
    return PROOF.pack(proof, header_bytes)


def decode_proof(raw: bytes) -> SenderProof:
    """The sender's proof, not compared yet. ProtocolError if the header would be too long."""
    proof, length = PROOF.unpack(raw)
    if length > MAX_HEADER_BYTES:
        raise ProtocolError(f"the transfer header announces {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return SenderProof(proof, int(length))


class Nonces(NamedTuple):
    """What each end of one connection has drawn at random, and the version that both use on it."""

    sender: bytes
    receiver: bytes
    version: int = KV_WHOLE


def proof(ticket: str, end: End, nonces: Nonces) -> bytes:
    """HMAC-SHA256 under the ticket, PROOF_BYTES: this end of the connection with these nonces has it."""
    text = f"disagg kv {nonces.version} {end}".encode() + ticket_digest(ticket) + nonces.sender + nonces.receiver
    return hmac.digest(ticket.encode("utf-8", "surrogatepass"), text, "sha256")


def proves(given: bytes, ticket: str, end: End, nonces: Nonces) -> bool:
    """Whether this is that end's proof, compared in constant time."""
    return hmac.compare_digest(given, proof(ticket, end, nonces))
