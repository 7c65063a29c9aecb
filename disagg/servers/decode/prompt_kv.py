"""Where the KV of one request's prompt comes from: held, received, or computed here, by measured speeds."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.events import RefutedEvent
from disagg.api.requests import PrefillOffer
from disagg.engines.base import HeldKV
from disagg.errors import KVRefuted
from disagg.kv.arena import Reservation
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.audits import Audits
from disagg.units import counted, seconds

UNMEASURED_TOKENS = 32
"""While this host's speed is not measured, at most so many tokens are computed here: hardly more than one pass."""
MEASURED_TOKENS = 16
"""Shorter computations do not predict longer ones: their time is that of one pass through the weights."""
OVERHEAD_S = 0.01
"""What it takes to ask a prefill host, and to open the KV connection. Assumed for a local network."""
SPEED_WEIGHT = 0.7  # of all earlier measurements when a new one comes


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


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """local: compute here. reason: why, or why not."""

    local: bool
    reason: str


def choose_prefill(
    rest: int, offer: PrefillOffer | None, local_tokens_s: float | None, rest_bytes: int
) -> PrefillChoice:
    """Where to compute the `rest` tokens of a prompt whose KV is missing, of `rest_bytes` bytes.

    local_tokens_s: this host's speed, None if not measured. Assumes that the prefill host computes the rest only, and
    sends while it computes.
    """
    if rest == 0:
        return PrefillChoice(True, "no token but the last is left to compute")
    if offer is None:
        return PrefillChoice(False, "no prefill host was offered")
    if local_tokens_s is None:
        few = rest <= UNMEASURED_TOKENS
        rule = f"until its speed is measured, this host computes up to {UNMEASURED_TOKENS} itself"
        return PrefillChoice(few, f"{counted(rest, 'token')} left to compute; {rule}")
    here = rest / local_tokens_s
    sending = rest_bytes / offer.link_bytes_s if offer.link_bytes_s else 0.0
    there = offer.wait_s + OVERHEAD_S + max(rest / offer.tokens_s, sending)
    times = f"{seconds(here)} here, {seconds(there)} on a prefill host"
    return PrefillChoice(here <= there, f"{counted(rest, 'token')} left to compute: {times}")


def sooner(*seconds: float | None) -> float | None:
    """The least of these; None if none of them is known."""
    return min((one for one in seconds if one is not None), default=None)
