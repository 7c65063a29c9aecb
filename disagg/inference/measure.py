"""From what a request's two hosts and its caller saw to its Metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disagg.inference.metrics import Method, Metrics, TTFTParts


@dataclass(slots=True)
class Trace:
    """One request while it runs. Times are the caller's time.monotonic(); `began` is when the attempt that succeeded
    began, `sent` when the first did. The dicts are the servers' own accounts: `slot` and `done` from the answering
    host, `shipment` from the prefill host of a hand-off."""

    method: Method
    model: str
    sent: float
    began: float
    prefill_server: str | None = None
    decode_server: str | None = None
    first_token: float = 0.0
    last_token: float = 0.0
    slot: Mapping[str, Any] = field(default_factory=dict)
    shipment: Mapping[str, Any] = field(default_factory=dict)
    done: Mapping[str, Any] = field(default_factory=dict)

    def saw_tokens(self, now: float) -> None:
        self.first_token = self.first_token or now
        self.last_token = now


def metrics(trace: Trace) -> Metrics:
    """The request's figures. TTFT's parts come from the hosts' clocks, `network` is the rest."""
    timing: Mapping[str, float] = trace.done["timing"]
    ship = trace.shipment
    ttft = trace.first_token - trace.sent
    decode_s = timing["decode_s"]  # the host's: events that arrive in one packet would give speeds no engine has
    prefill_s = float(ship["compute_s"] if ship else timing["compute_s"])
    prompt, completion = trace.done["prompt_tokens"], trace.done["completion_tokens"]
    exposed_s = _exposed(ship, timing) if ship else 0.0
    known = {
        "failed_attempts": trace.began - trace.sent,
        "queue": timing["queue_s"] + ship.get("queue_s", 0.0),
        "tokenise": timing["tokenise_s"] + ship.get("tokenise_s", 0.0),
        "prefill": prefill_s,
        "exposed_transfer": exposed_s,
        "ingest": timing["ingest_s"],
        "first_step": timing["first_step_s"],
    }
    return Metrics(
        method=trace.method,
        model=trace.model,
        prefill_server=trace.prefill_server,
        decode_server=trace.decode_server,
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prefill_time=prefill_s,
        decode_time=decode_s,
        total_time=trace.last_token - trace.sent,
        prefill_speed=_rate(prompt, prefill_s),
        decode_speed=_rate(completion - 1, decode_s),
        ttft=ttft,
        ttft_parts=TTFTParts(**known, network=ttft - sum(known.values())),
        hidden_transfer=ship.get("hidden_transfer_s", 0.0),
        exposed_transfer=exposed_s,
        kv_bytes=ship.get("kv_bytes", 0),
        decode_computed_tokens=trace.done["computed_prompt_tokens"] if trace.decode_server else 0,
        kv_wire=trace.done.get("kv_wire"),
        simulated=bool(trace.done.get("simulated")),
    )


def _exposed(ship: Mapping[str, Any], timing: Mapping[str, float]) -> float:
    """End of prefill compute -> KV accepted, of which either host sees one end only: the smaller of two upper bounds.

    The prefill host's includes the way of the acknowledgement back to it, during which the decode host already works
    (48 ms were seen on a busy machine); the decode host's includes the way of the order to the prefill host.
    """
    order_to_end_of_compute = ship["tokenise_s"] + ship["queue_s"] + ship["compute_s"]
    return float(min(ship["exposed_transfer_s"], timing["kv_wait_s"] - order_to_end_of_compute))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
