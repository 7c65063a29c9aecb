"""The server-sent events of an answer.

POST /decode    slot, tokens..., done
POST /generate  tokens..., done
POST /prefill   shipped

Each stream may end with `error` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from disagg.api.base import Contract
from disagg.api.names import WireForm
from disagg.api.requests import KVAddress
from disagg.errors import DisaggError

FinishReason = Literal["stop", "length"]
ERROR: Final = "error"


class TokenLogprob(Contract, frozen=True):
    """One generated token, its log-probability, and the likeliest alternatives as (id, log-probability)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SlotEvent(Contract, frozen=True, kw_only=True):
    """The decode host is ready for the KV of all prompt tokens but the last: deliver it to `kv` with this one-time
    ticket. held_tokens: tokens of this prompt whose KV the host already has."""

    event: ClassVar[str] = "slot"
    request_id: str
    ticket: str
    kv: KVAddress
    prompt_tokens: int
    held_tokens: int = 0


class TokensEvent(Contract, frozen=True):
    """The tokens of one or more decode steps, and the text that became certain with them."""

    event: ClassVar[str] = "tokens"
    text: str
    tokens: tuple[TokenLogprob, ...]


class Timing(Contract, frozen=True):
    """One host's parts of a request, in seconds on its own clock.

    kv_wait_s: slot sent -> KV accepted. queue_s: waiting for a place in the batch and for the engine's thread.
    ingest_s: received bytes -> engine cache. compute_s: the prompt, if this host computed it. first_step_s: the last
    prompt token through the model. decode_s: first token -> last token.
    """

    tokenise_s: float = 0.0
    kv_wait_s: float = 0.0
    queue_s: float = 0.0
    ingest_s: float = 0.0
    compute_s: float = 0.0
    first_step_s: float = 0.0
    decode_s: float = 0.0


class DoneEvent(Contract, frozen=True, kw_only=True):
    """The end of an answer. computed_prompt_tokens: prompt tokens that this host ran through the model. fallback: why
    the prompt was recomputed here, empty if it was not. kv_wire: the form in which KV arrived, None if none did.
    simulated: no model ran, the times are predicted."""

    event: ClassVar[str] = "done"
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    computed_prompt_tokens: int
    timing: Timing
    fallback: str = ""
    simulated: bool = False
    kv_wire: WireForm | None = None


class ShippedEvent(Contract, frozen=True, kw_only=True):
    """The decode host has acknowledged every byte of the KV. Durations in seconds on the prefill host's clock.

    hidden_transfer_s: bytes moved while the prompt was computed. exposed_transfer_s: end of compute -> acknowledgement.
    kv_bytes: as sent, in the form `kv_wire`.
    """

    event: ClassVar[str] = "shipped"
    prompt_tokens: int
    computed_tokens: int
    kv_bytes: int
    kv_wire: WireForm
    tokenise_s: float
    queue_s: float
    compute_s: float
    hidden_transfer_s: float
    exposed_transfer_s: float


class ErrorEvent(Contract, frozen=True):
    """A DisaggError: `code` is the name of its class, `hint` what to do about it."""

    event: ClassVar[str] = ERROR
    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: DisaggError) -> ErrorEvent:
        """The event that reports this error."""
        return cls(error.code(), error.message, error.hint)


class ErrorAnswer(Contract, frozen=True):
    """The body of an HTTP answer that is not 200."""

    error: ErrorEvent


Event = SlotEvent | TokensEvent | DoneEvent | ShippedEvent
EVENTS: Final[Mapping[str, type[SlotEvent | TokensEvent | DoneEvent | ShippedEvent]]] = {
    kind.event: kind for kind in (SlotEvent, TokensEvent, DoneEvent, ShippedEvent)
}
"""The type of each event but `error`, by its name on the wire."""
