"""What one request cost, and where the time went.

TTFT = failed_attempts + queue + tokenise + prefill + exposed_transfer + ingest + first_step + network, every part >= 0.
All parts but `failed_attempts` and `network` are measured on one server's monotonic clock, `failed_attempts` on the
caller's; `network` is the rest: wire latency, HTTP and scheduling.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

AS_IS = "as-is"
Method = Literal["disaggregated", "decode-alone", "prefill-alone", "fallback"]


@dataclass(frozen=True, slots=True)
class TTFTParts:
    """Seconds. They add up to `Metrics.ttft`."""

    failed_attempts: float = 0.0  # hosts that were tried before the one that served
    queue: float = 0.0  # waiting for the prefill engine, and for a place in the decode batch
    tokenise: float = 0.0  # on both hosts
    prefill: float = 0.0  # compute
    exposed_transfer: float = 0.0  # end of prefill compute -> last KV byte accepted
    ingest: float = 0.0  # received bytes -> engine cache
    first_step: float = 0.0  # the last prompt token through the model
    network: float = 0.0  # everything else

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, slots=True)
class Metrics:
    """One request. Times in seconds, speeds in tokens per second.

    prefill_time: prefill compute. decode_time: first token -> last token, where they
    are made. total_time: sent -> last token (E2E).
    prefill_speed = prompt_tokens / prefill_time. decode_speed = (completion_tokens - 1) / decode_time.
    hidden_transfer: seconds in which bytes moved while prefill still computed.
    decode_computed_tokens: prompt tokens that the decode host ran through the model itself.
    kv_wire: the form in which the decode host got the KV, "as-is" (exact) or "int8-g64"; None where it got none.
    simulated: no model ran; the servers played times that were predicted.
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
    prefill_speed: float
    decode_speed: float
    ttft: float
    ttft_parts: TTFTParts
    hidden_transfer: float
    exposed_transfer: float
    kv_bytes: int
    decode_computed_tokens: int
    kv_wire: str | None = None
    simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
