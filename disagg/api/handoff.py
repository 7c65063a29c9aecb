"""The hand-off benchmark: what `disagg bench handoff` asks of its two ends, and what they print.

Each end is a process, `python -m disagg.bench.handoff receive|send`. It reads an EndTask from $DISAGG_HANDOFF_BENCH.
The receiver prints Listening; the sender prints HandoffFigures. A failure is {"error": a DisaggError's JSON}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from disagg.api.base import Contract

ENVIRONMENT_VARIABLE: Final = "DISAGG_HANDOFF_BENCH"


class HandoffSpec(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is moved: KV of `tokens` tokens of a model with these layers, `rounds` times by each transport.

    windows: per layer, None for full attention. device: where the prefill host has the KV.
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    tokens: int
    rounds: int
    device: str = "auto"


class EndTask(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One end's part. token: the one-time secret of the two ends. host: the receiver's address. port: where the
    receiver listens, for the sender."""

    spec: HandoffSpec
    token: str
    host: str
    port: int = 0


class Listening(Contract, frozen=True):
    """The receiver accepts the sender's connection on this port."""

    port: int


class TransportFigures(Contract, frozen=True):
    """One transport, over all rounds. GB are 1e9 bytes; medians, except for best_gb_s."""

    gb_s: float
    best_gb_s: float
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float


class HandoffFigures(Contract, frozen=True, kw_only=True):
    """The measurement. device: where the KV was. bytes: moved per round. transports: "handoff", "raw_socket" and
    "base64_json"; ratio_to_raw, ratio_to_base64_json: the hand-off's rate divided by theirs."""

    device: str
    bytes: int
    rounds: int
    handoff_gb_s: float
    raw_socket_gb_s: float
    base64_json_gb_s: float
    ratio_to_raw: float
    ratio_to_base64_json: float
    transports: Mapping[str, TransportFigures]
