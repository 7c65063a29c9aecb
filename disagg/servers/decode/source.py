"""Where the KV of one request's prompt comes from."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.events import RefutedEvent
from disagg.engines.base import HeldKV
from disagg.kv.arena import Reservation
from disagg.kv.received import ReceivedKV


@dataclass(slots=True)
class PromptKV:
    """memory: reserved for the KV of prompt and answer. held: kept from an earlier request. received: of the tokens
    after those. The engine computes the rest. local: see DoneEvent. audit: see DecodeBody. deviation: of received KV
    that an audit has accepted, None of other; see DoneEvent. refuted: what came of received KV that was wrong;
    refuted_s: see Timing. audited_tokens: that ran to find it out."""

    memory: Reservation | None = None
    held: HeldKV | None = None
    received: ReceivedKV | None = None
    local: str = ""
    audit: bool = False
    deviation: float | None = None
    refuted: RefutedEvent | None = None
    audited_tokens: int = 0
    refuted_s: float = 0.0

    @property
    def held_tokens(self) -> int:
        return self.held.tokens if self.held is not None else 0
