"""Gateways whose whole-request hosts are gateways: a request that comes back to one is refused.

Each gateway adds its name to the Via header of the whole requests that it sends.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Final

from disagg.errors import RequestLoop

MAX_HOPS: Final = 8

_NAME: Final = re.compile(r"\bdisagg-[0-9a-f]{16}\b")


def new_name() -> str:
    """The name of one gateway, new at each start."""
    return f"disagg-{secrets.token_hex(8)}"


def passed_on(via: Sequence[str], name: str) -> str:
    """The Via header of what a request makes this gateway send. via: those of the request; other programs' entries
    are left out. Raises RequestLoop."""
    hops = _NAME.findall(", ".join(via))
    if name in hops:
        raise RequestLoop("the request has passed through this gateway already: engine.url of a host leads back to it")
    if len(hops) >= MAX_HOPS:
        raise RequestLoop(f"the request has passed through {len(hops)} gateways: at most {MAX_HOPS} may pass it on")
    return ", ".join(f"1.1 {hop}" for hop in (*hops, name))
