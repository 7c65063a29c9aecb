"""Where the KV of one request's prompt comes from: held, received, or computed here."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.events import RefutedEvent
from disagg.engines.base import HeldKV
from disagg.errors import KVRefuted
from disagg.kv.arena import Reservation
from disagg.kv.arriving import ArrivingKV
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.audits import AuditOrder, Audits
from disagg.servers.decode.handoff import OpenSlot
from disagg.servers.decode.spans import Spans


@dataclass(slots=True)
class PromptKV:
    """memory: reserved for the KV of prompt and answer. held: kept from an earlier request. spans: who computes which
    layers of what is not held; None: this host all. slot: in which that arrives. local: see DoneEvent. audit: see
    DecodeBody. deviation: of received KV that an audit has accepted, None of other; see DoneEvent. refuted: what came
    of received KV that was wrong; refuted_s: see Timing. audited_tokens: that ran to find it out."""

    memory: Reservation | None = None
    held: HeldKV | None = None
    spans: Spans | None = None
    slot: OpenSlot | None = None
    local: str = ""
    audit: bool = False
    deviation: float | None = None
    refuted: RefutedEvent | None = None
    audited_tokens: int = 0
    refuted_s: float = 0.0

    @property
    def held_tokens(self) -> int:
        return self.held.tokens if self.held is not None else 0

    @property
    def arriving(self) -> ArrivingKV | None:
        """What has come and may still come; None if nothing does, or it was refuted."""
        return self.slot.arriving if self.slot is not None and self.refuted is None else None

    @property
    def received(self) -> ReceivedKV | None:
        """The memory of what has come, from its first chunk on."""
        return self.arriving.kv if self.arriving is not None else None

    @property
    def layers(self) -> int | None:
        """Those that a prefill host computes, while this host computes the others; None if one host computes all."""
        divided = self.arriving is not None and self.spans is not None and self.spans.divided
        return self.spans.layers if divided and self.spans is not None else None

    @property
    def whole(self) -> bool:
        """Whether all of it has come, and nothing of the prompt but its last token is left to compute."""
        return self.arriving is not None and self.arriving.outcome == "complete" and self.layers is None

    @property
    def resumed(self) -> int | None:
        """Tokens that had come when the prefill host failed, after which this host goes on; None if it did not fail."""
        return self.slot.resumed if self.slot is not None and self.refuted is None else None

    @property
    def accepted(self) -> float | None:
        """When all had come, or the prefill host had failed; None without KV that was used. By time.monotonic()."""
        if self.slot is None or self.received is None:
            return None
        return self.slot.ended if self.resumed is not None else self.received.timing.accepted

    def order_audit(self, audits: Audits) -> AuditOrder | None:
        """How what was received is audited; None if it is not, or nothing was. What two prefill hosts have sent is
        audited if any is: nothing is known of the second one. Without an audit, no second one may send from now on."""
        if self.slot is None or self.received is None:
            return None
        self.slot.only_sender = True
        order = audits.order(self.received, self.audit or self.slot.senders > 1)
        self.slot.only_sender = order is None and audits.every > 0
        return order

    def refute(self, error: KVRefuted, audits: Audits, hint: str) -> tuple[RefutedEvent, HeldKV | None]:
        """Release the KV that was received, which is wrong. Also returns held KV that may be wrong, too: that of a
        sender that was not audited."""
        assert self.arriving is not None and self.received is not None, "only received KV is refuted"
        sender, doubtful = self.received.sender, None
        held_is_right = self.held is None or audits.all_accepted
        if blamed := error.of_received or held_is_right:
            audits.refuted(sender)
        self.arriving.release(reuse=True)
        self.audited_tokens = error.audited_tokens
        if not held_is_right:
            self.held, doubtful = None, self.held
        self.refuted = RefutedEvent(sender=sender, blamed=blamed, message=wrong(sender, error.message), hint=hint)
        return self.refuted, doubtful


def wrong(sender: str, why: str) -> str:
    """What is said of KV that is wrong."""
    return f"the KV from {sender or 'a prefill host that states no name'} is wrong: {why}"
