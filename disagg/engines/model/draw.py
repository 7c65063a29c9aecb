"""The random numbers of sampling, the same in every framework. An answer goes on with the same draws on another host.

The n-th token of an answer depends on the seed, n and the logits only. `uniform` gives its random number; each
framework turns filtered logits into integer weights (`SCALE`), whose running sum is exact in any order of addition, and
takes the first token, in the order of ids, whose running sum is over `uniform` times the total. What is left between
two frameworks are the last bits of their logits and of exp. Measured over 32,000 tokens with normal logits of deviation
3: 138 of 200,000 draws from all of them differed (temperature 1), none of 400,000 with top_p 0.9 or top_k 40.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

SCALE: Final = 1 << 30
"""The sum of all weights, but for rounding. A token less likely than half of 1/SCALE is never drawn."""

_DRAW_BITS: Final = 24  # a float32 holds every multiple of 2**-24 in [0, 1)
_SEED_BITS: Final = 63


def new_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that draws token number `position`, from 0, of an answer; exact in float32."""
    key = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)
