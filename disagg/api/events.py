"""The server-sent events of an answer.

POST /decode    slot or local, tokens..., done
POST /generate  tokens..., done
POST /prefill   shipped

`progress` may come at any time; each stream may end with `error` instead.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from disagg.api.base import Contract
from disagg.api.names import WireForm
from disagg.api.requests import KVAddress, ToolCall
from disagg.errors import DisaggError, Overloaded

FinishReason = Literal["stop", "length", "tool_calls"]
ERROR: Final = "error"


class TokenLogprob(Contract, frozen=True, omit_defaults=True):
    """One generated token, its log-probability, and the likeliest alternatives as (id, log-probability). bytes,
    top_bytes: the bytes of the text that the token and each alternative stand for, if alternatives were requested."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    bytes: builtins.bytes = b""
    top_bytes: tuple[builtins.bytes, ...] = ()


class SlotEvent(Contract, frozen=True, kw_only=True):
    """The decode host is ready for KV: deliver it to `kv` with this one-time ticket. That of all prompt tokens but the
    last is due. held_tokens: of its first tokens, those whose KV the host already has and which are not to be sent."""

    event: ClassVar[str] = "slot"
    request_id: str
    ticket: str
    kv: KVAddress
    prompt_tokens: int
    held_tokens: int = 0


class LocalEvent(Contract, frozen=True, kw_only=True):
    """The decode host computes the rest of the prompt itself: no prefill host is needed. held_tokens: see SlotEvent.
    reason: why it does, e.g. "12 tokens: 0.02 s here, 0.31 s on a prefill host"."""

    event: ClassVar[str] = "local"
    request_id: str
    prompt_tokens: int
    held_tokens: int
    reason: str


class ProgressEvent(Contract, frozen=True, kw_only=True):
    """Sent while there is nothing else to send. phase: what the request is doing. beats: counts up whenever the
    host's engine has finished a piece of work, for any request; if it does not change, the engine is stuck."""

    event: ClassVar[str] = "progress"
    phase: str
    beats: int


class TokensEvent(Contract, frozen=True, omit_defaults=True):
    """The tokens of one or more decode steps, and what became certain with them: reasoning, then text, then tool calls.
    Only answers to chats are divided so; all of any other answer is text."""

    event: ClassVar[str] = "tokens"
    text: str
    tokens: tuple[TokenLogprob, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


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
    """The end of an answer. computed_prompt_tokens: prompt tokens that this host ran through the model. local: why the
    prompt's rest was computed here without asking a prefill host, empty if one was asked. held_tokens: prompt tokens
    whose KV the host had from earlier requests. kv_wire: the form in which KV arrived, None if none did. simulated: no
    model ran, the times are predicted. reasoning_tokens: of the answer. stop: the stop string that ended it, empty if
    none did."""

    event: ClassVar[str] = "done"
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    computed_prompt_tokens: int
    timing: Timing
    local: str = ""
    held_tokens: int = 0
    simulated: bool = False
    kv_wire: WireForm | None = None
    reasoning_tokens: int = 0
    stop: str = ""

    @property
    def figures(self) -> dict[str, Any]:
        """What a log may have of it: no text of the caller's."""
        return {name: value for name, value in self.to_json().items() if name != "stop"}


class ShippedEvent(Contract, frozen=True, kw_only=True):
    """The decode host has acknowledged every byte of the KV. Durations in seconds on the prefill host's clock.

    hidden_transfer_s: bytes moved while the prompt was computed. exposed_transfer_s: end of compute -> acknowledgement.
    kv_bytes: as sent, in the form `kv_wire`. held_tokens: prompt tokens whose KV this host had from earlier requests.
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
    held_tokens: int = 0


class ErrorEvent(Contract, frozen=True):
    """A DisaggError: `code` is the name of its class, `hint` what to do about it. retry_after_s: seconds after which
    an Overloaded host may have a place, None for other errors."""

    event: ClassVar[str] = ERROR
    code: str
    message: str
    hint: str = ""
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: DisaggError, retry_after_s: int = 1) -> ErrorEvent:
        """The event that reports this error. retry_after_s: the host's own, for an error that states less."""
        after = max(error.retry_after_s, retry_after_s) if isinstance(error, Overloaded) else None
        return cls(error.code(), error.message, error.hint, after)


class ErrorAnswer(Contract, frozen=True):
    """The body of an HTTP answer that is not 200."""

    error: ErrorEvent


Event = SlotEvent | LocalEvent | ProgressEvent | TokensEvent | DoneEvent | ShippedEvent
EVENTS: Final[Mapping[str, type[Event]]] = {
    kind.event: kind for kind in (SlotEvent, LocalEvent, ProgressEvent, TokensEvent, DoneEvent, ShippedEvent)
}
"""The type of each event but `error`, by its name on the wire."""
