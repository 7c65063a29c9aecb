"""The server-sent events of an answer.

POST /decode    slot or local, tokens..., done; before the tokens refuted, if the KV that came was wrong, and another
                slot or local, if the prefill host failed in mid-prompt
POST /generate  tokens..., done
POST /prefill   shipped
POST /score     scores..., scored

`progress` may come at any time; each stream may end with `error` instead.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta

from disagg.api.base import BoundShare, Contract, Count
from disagg.api.names import KV_WHOLE, WireForm
from disagg.api.requests import KVAddress, KVVersion, Layers, ToolCall
from disagg.errors import DisaggError, Overloaded

FinishReason = Literal["stop", "length", "tool_calls"]
ERROR: Final = "error"
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Name = Annotated[str, Meta(max_length=256)]
MAX_REASON_CHARS: Final = 1024
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class TokenLogprob(Contract, frozen=True, omit_defaults=True, gc=False):
    """One generated token, its log-probability, and the likeliest alternatives as (id, log-probability). bytes,
    top_bytes: the bytes of the text that the token and each alternative stand for, if alternatives were requested."""

    id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()
    bytes: builtins.bytes = b""
    top_bytes: tuple[builtins.bytes, ...] = ()


class SlotEvent(Contract, frozen=True, kw_only=True):
    """The decode host is ready for KV: deliver it to `kv` with this one-time ticket. That of all prompt tokens but the
    last is due. held_tokens: of its first tokens, those whose KV the host already has and which are not to be sent.
    layers: the model's first so many are due, with the hidden states after the last of them; None: all, without hidden
    states. kv_version: that of the KV protocol to send it by. kv_wire: the form to send it in, None if the sender
    chooses. reason: why so many, as of LocalEvent.

    A second one, before the first token: the prefill host of the first has failed, and the KV from held_tokens on is
    due from another."""

    event: ClassVar[str] = "slot"
    request_id: Name
    ticket: Name
    kv: KVAddress
    prompt_tokens: Count
    held_tokens: Count = 0
    layers: Layers | None = None
    kv_version: KVVersion = KV_WHOLE
    kv_wire: WireForm | None = None
    reason: Reason = ""


class LocalEvent(Contract, frozen=True, kw_only=True):
    """The decode host computes the rest of the prompt itself: no prefill host is needed. held_tokens: KV of so many
    first tokens is here already. reason: why it does, e.g. "12 tokens: 0.02 s here, 0.31 s on a prefill host"."""

    event: ClassVar[str] = "local"
    request_id: Name
    prompt_tokens: Count
    held_tokens: Count
    reason: Reason


class RefutedEvent(Contract, frozen=True, kw_only=True):
    """The KV that arrived is not that of this prompt and model. The decode host computes the prompt itself, and the
    answer follows. sender: the prefill host's name, empty if it stated none. blamed: its KV is wrong for certain; else
    KV that was held may be. message, hint: as of an error."""

    event: ClassVar[str] = "refuted"
    sender: Name
    blamed: bool
    message: Reason
    hint: Name = ""


class ProgressEvent(Contract, frozen=True, kw_only=True):
    """Sent while there is nothing else to send. phase: what the request is doing. beats: counts up whenever the
    host's engine has finished a piece of work, for any request; if it does not change, the engine is stuck."""

    event: ClassVar[str] = "progress"
    phase: Name
    beats: Count


class TokensEvent(Contract, frozen=True, omit_defaults=True, gc=False):
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
    ingest_s: received bytes -> engine cache, and its audit; audit_s: this alone. refuted_s: slot sent -> the KV was
    refuted, but for the wait for a place. compute_s: the prompt, if this host computed it. first_step_s: the last
    prompt token through the model. decode_s: first token -> last token. tail_compute_s: this host's layers of a prompt
    whose first ones a prefill host computed; tail_s: of it, what followed the last KV that was accepted.
    """

    tokenise_s: float = 0.0
    kv_wait_s: float = 0.0
    queue_s: float = 0.0
    ingest_s: float = 0.0
    compute_s: float = 0.0
    first_step_s: float = 0.0
    decode_s: float = 0.0
    audit_s: float = 0.0
    refuted_s: float = 0.0
    tail_s: float = 0.0
    tail_compute_s: float = 0.0


class DoneEvent(Contract, frozen=True, kw_only=True):
    """The end of an answer. computed_prompt_tokens: prompt tokens that this host ran through the model for it.
    audited_tokens: those that it ran to audit the KV that arrived. deviation: what this KV differed by, as a share of
    the bound for its dtypes, None if it was not audited. refuted: why that KV was not used and the prompt
    computed here, empty if it was. local: why the prompt's rest was computed here without asking a prefill host, empty
    if one was asked. held_tokens: prompt tokens whose KV the host had from earlier requests. kv_wire: the form in which
    KV arrived, None if none did. simulated: no model ran, the times are predicted. reasoning_tokens: of the answer.
    stop: the stop string that ended it, empty if none did. layers: of the model, computed by a prefill host; None: all
    or none. resumed_at: prompt tokens that had arrived when the prefill host failed, after which this host went on;
    None if it did not fail."""

    event: ClassVar[str] = "done"
    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count
    computed_prompt_tokens: Count
    timing: Timing
    local: Reason = ""
    held_tokens: Count = 0
    simulated: bool = False
    kv_wire: WireForm | None = None
    reasoning_tokens: Count = 0
    stop: str = ""
    audited_tokens: Count = 0
    deviation: BoundShare | None = None
    refuted: Reason = ""
    layers: Layers | None = None
    resumed_at: Count | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """What a log may have of it: no text of the caller's."""
        return {name: value for name, value in self.to_json().items() if name != "stop"}


class ShippedEvent(Contract, frozen=True, kw_only=True):
    """The decode host has acknowledged every byte of the KV. Durations in seconds on the prefill host's clock.

    hidden_transfer_s: sending while the prompt was computed. exposed_transfer_s: the prompt waited for the link and was
    not computed, and end of compute -> acknowledgement. starved_s: it was not computed because the decode host's own
    layers of it were behind. queue_s: the rest of the time until the end of compute.
    kv_bytes: as sent, in the form `kv_wire`. held_tokens: prompt tokens whose KV this host had from earlier requests.
    layers: of the model, that it computed; None: all.
    """

    event: ClassVar[str] = "shipped"
    prompt_tokens: Count
    computed_tokens: Count
    kv_bytes: Count
    kv_wire: WireForm
    tokenise_s: float
    queue_s: float
    compute_s: float
    hidden_transfer_s: float
    exposed_transfer_s: float
    held_tokens: Count = 0
    layers: Layers | None = None
    starved_s: float = 0.0


class PromptToken(Contract, frozen=True, omit_defaults=True, gc=False):
    """One token of a prompt, with its log-probability after those before it, and the likeliest tokens there as (id,
    log-probability). rank: 1 if it is the likeliest itself. The first token has none of these. bytes, top_bytes: the
    bytes of the text that the token and each alternative stand for."""

    id: TokenId
    bytes: builtins.bytes
    logprob: float | None = None
    rank: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    top: tuple[tuple[TokenId, float], ...] = ()
    top_bytes: tuple[builtins.bytes, ...] = ()


class ScoresEvent(Contract, frozen=True):
    """The next tokens of the prompt."""

    event: ClassVar[str] = "scores"
    tokens: tuple[PromptToken, ...]


class ScoredEvent(Contract, frozen=True, kw_only=True):
    """The end of a prompt's scores. Durations in seconds on this host's clock. queue_s: waiting for a turn and for the
    engine, also between the prompt's chunks."""

    event: ClassVar[str] = "scored"
    prompt_tokens: Count
    tokenise_s: float
    queue_s: float
    compute_s: float


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


Event = (
    SlotEvent
    | LocalEvent
    | RefutedEvent
    | ProgressEvent
    | TokensEvent
    | DoneEvent
    | ShippedEvent
    | ScoresEvent
    | ScoredEvent
)
EVENTS: Final[Mapping[str, type[Event]]] = {
    kind.event: kind
    for kind in (
        SlotEvent,
        LocalEvent,
        RefutedEvent,
        ProgressEvent,
        TokensEvent,
        DoneEvent,
        ShippedEvent,
        ScoresEvent,
        ScoredEvent,
    )
}
"""The type of each event but `error`, by its name on the wire."""
