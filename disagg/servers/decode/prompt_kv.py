"""Where the KV of one request's prompt comes from: held, received, or computed here."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.events import RefutedEvent
from disagg.engines.base import HeldKV
from disagg.errors import KVRefuted
from disagg.kv.arena import Reservation
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.audits import Audits


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

    def refute(self, error: KVRefuted, audits: Audits, hint: str) -> tuple[RefutedEvent, HeldKV | None]:
        """Release the KV that was received, which is wrong. Also returns held KV that may be wrong, too: that of a
        sender that was not audited."""
        assert self.received is not None, "only received KV is refuted"
        sender, doubtful = self.received.sender, None
        held_is_right = self.held is None or audits.all_accepted
        if blamed := error.of_received or held_is_right:
            audits.refuted(sender)
        self.received.release(reuse=True)
        self.received, self.audited_tokens = None, error.audited_tokens
        if not held_is_right:
            self.held, doubtful = None, self.held
        self.refuted = RefutedEvent(sender=sender, blamed=blamed, message=wrong(sender, error.message), hint=hint)
        return self.refuted, doubtful


def wrong(sender: str, why: str) -> str:
    """What is said of KV that is wrong."""
    return f"the KV from {sender or 'a prefill host that states no name'} is wrong: {why}"
