"""What one request cost, and where the time went.

TTFT = failed_attempts + client + queue + tokenise + prefill + exposed_transfer + ingest + first_step + whole + network,
with every part >= 0. `failed_attempts`, `client` and `whole` are measured on the caller's monotonic clock, `network` is
the rest, and every other part is measured on one server's clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from disagg.api.names import WireForm

Method = Literal["disaggregated", "local", "decode-alone", "prefill-alone", "fallback", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TTFTParts:
    """Seconds. They add up to `Metrics.ttft`."""

    failed_attempts: float = 0.0  # hosts tried before the one that served, KV that was refuted, waits for busy hosts
    client: float = 0.0  # this program: from the call, and from the slot event, until the request is written
    queue: float = 0.0  # waiting for the prefill engine, and for a place in the decode batch
    tokenise: float = 0.0  # on both hosts
    prefill: float = 0.0  # compute
    exposed_transfer: float = 0.0  # the prefill waited for the link, and its end -> last KV byte accepted
    ingest: float = 0.0  # received bytes -> engine cache, and its audit
    first_step: float = 0.0  # the last prompt token through the model
    whole: float = 0.0  # a whole-request host, which states no parts: request written -> first piece of the answer
    network: float = 0.0  # the rest: wire latency, HTTP and scheduling

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, slots=True)
class Metrics:
    """One request. Times in seconds, speeds in tokens per second.

    prefill_time: prefill compute. decode_time: first token -> last token, on the host that generates them; 0 if a
    whole-request host's answer arrived in one burst.
    total_time: sent -> last token (E2E).
    prefill_speed = computed prompt tokens / prefill_time; None if no host computed more than the last, or it is
    unknown.
    decode_speed = (completion_tokens - 1) / decode_time; None if there is one token only, or decode_time is 0.
    hidden_transfer: seconds of sending while this prompt's prefill computed, at most prefill_time.
    decode_computed_tokens: prompt tokens that the decode host ran through the model itself, for the answer.
    audited_tokens: those that it ran to audit the KV that it received. deviation: what that KV differed by, as a share
    of the bound beyond which it is refuted; None if it was not audited.
    decode_server: the host that generated the answer, also a whole-request host; None if a prefill host did, alone.
    kv_wire: the form in which the decode host received the KV, "as-is" or "int8-g64"; None if it received none.
    simulated: no model ran; the times are predicted.
    local: why the decode host computed the rest of the prompt without a hand-off; empty if it did not.
    held_tokens: prompt tokens whose KV the decode host had from earlier requests.
    resumed_tokens: tokens of the answer that came from hosts that failed before its end. If there are any, ttft and its
    parts are those of the attempt that brought the first token; what its answering host would have stated is lost with
    it and part of `network`. The other figures are those of the attempt that ended the answer.
    """

    method: Method
    model: str
    prefill_server: str | None
    decode_server: str | None
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prefill_time: float
    decode_time: float
    total_time: float
    prefill_speed: float | None
    decode_speed: float | None
    ttft: float
    ttft_parts: TTFTParts
    hidden_transfer: float
    exposed_transfer: float
    kv_bytes: int
    decode_computed_tokens: int
    kv_wire: WireForm | None = None
    simulated: bool = False
    local: str = ""
    held_tokens: int = 0
    resumed_tokens: int = 0
    audited_tokens: int = 0
    deviation: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
