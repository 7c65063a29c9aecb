"""One way to run a request: by which method, on which hosts, and why it is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from disagg.config import Host

Method = Literal["disaggregated", "local", "decode-alone", "prefill-alone", "fallback", "whole"]
Alone = Literal["decode", "prefill", "whole"]
"""The role of the one host that runs a request by itself, without a hand-off."""
Reason = Literal[
    "first choice",
    "prefill failed",
    "no prefill host is up",
    "decode host failed",
    "no decode host is left",
    "prefill host is loading",
    "decode host is loading",
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to run a request. `reason`: why this one is tried. decode: the host that generates the answer, also a
    whole-request host; None if a prefill host does, alone."""

    method: Method
    decode: Host | None
    prefill: Host | None
    reason: Reason = "first choice"

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that it needs."""
        return tuple(host for host in (self.decode, self.prefill) if host is not None)

    @property
    def answering(self) -> Host:
        """The host that generates the answer."""
        host = self.decode or self.prefill
        assert host is not None, "an attempt names a host"
        return host
