"""What `disagg status --notify` posts to a URL."""

from __future__ import annotations

from typing import Literal

from disagg.api.base import Contract


class HostChange(Contract, frozen=True):
    """A host has gone down or has come back. time: seconds since 1970. state: as `disagg status` has it. why, hint:
    of a host that is down. seconds: how long it was up or down before; null if that is not known."""

    fleet: str
    host: str
    change: Literal["down", "up"]
    state: str
    time: float
    roles: tuple[str, ...] = ()
    model: str = ""
    why: str = ""
    hint: str = ""
    seconds: float | None = None
