"""What must be equal on both hosts for a hand-off, beyond the KV layout.

Both hosts compute each component from their own files with the same code. Weights are not part of it: one host may
hold bf16 and the other an 8-bit conversion of the same checkpoint.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Self

from disagg.api.status import ModelFingerprint
from disagg.errors import FingerprintMismatch, ProtocolError, clipped


class Fingerprint(ModelFingerprint, frozen=True):
    """Identifies a model."""

    def require_same(self, other: Fingerprint, *, mine: str, theirs: str) -> None:
        """Raise FingerprintMismatch naming every component that differs."""
        differing = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        if differing:
            pairs = "; ".join(
                f"{n}: {mine} {clipped(getattr(self, n))}, {theirs} {clipped(getattr(other, n))}" for n in differing
            )
            raise FingerprintMismatch(
                f"the hosts have different models ({pairs})",
                "put the same revision of the model, with the same tokenizer files, on both hosts",
            )

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """The fingerprint that a peer sent. ProtocolError if it is malformed."""
        try:
            return cls(**{name: body[name] for name in cls.__struct_fields__})
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"malformed fingerprint in the transfer header: {clipped(repr(error))}") from error


def short_hash(data: bytes) -> str:
    """The first 16 hex digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def token_hash(tokens: Sequence[int]) -> str:
    """SHA-256 (hex) of token ids as little-endian uint32: equal if both hosts tokenised the prompt alike."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()
