"""Each end of a KV connection proves that it has the ticket, before it is sent anything that another may not have.

The ticket itself never crosses the connection: its SHA-256 names it, and both proofs are HMACs under it of two fresh
nonces. A program that has taken the receiver's port learns a digest and a nonce.
"""

from __future__ import annotations

import hmac
from typing import Literal, NamedTuple

from disagg.kv.wire.preamble import VERSION, ticket_digest

End = Literal["sender", "receiver"]
PROOF_BYTES = 32


class Nonces(NamedTuple):
    """Of one connection: what each end has drawn at random."""

    sender: bytes
    receiver: bytes


def proof(ticket: str, end: End, nonces: Nonces) -> bytes:
    """HMAC-SHA256 under the ticket, PROOF_BYTES: this end of the connection with these nonces has it."""
    text = f"disagg kv {VERSION} {end}".encode() + ticket_digest(ticket) + nonces.sender + nonces.receiver
    return hmac.digest(ticket.encode("utf-8", "surrogatepass"), text, "sha256")


def proves(given: bytes, ticket: str, end: End, nonces: Nonces) -> bool:
    """Whether this is that end's proof, compared in constant time."""
    return hmac.compare_digest(given, proof(ticket, end, nonces))
