"""Where the KV of one request's prompt comes from."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engines.base import HeldKV
from disagg.kv.arena import Reservation
from disagg.kv.received import ReceivedKV


@dataclass(slots=True)
class PromptKV:
    """memory: reserved for the KV of prompt and answer. held: kept from an earlier request. received: of the tokens
    after those. The engine computes the rest. local: see DoneEvent."""

    memory: Reservation | None = None
    held: HeldKV | None = None
    received: ReceivedKV | None = None
    local: str = ""

    @property
    def held_tokens(self) -> int:
        return self.held.tokens if self.held is not None else 0
