"""The gateway's records of finished requests: GET /api/history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta

from disagg.api.base import Contract

ENDED_HOSTS: Final = "request_ended_hosts"
"""The error_code of a request that ended the processes of hosts."""
MAX_ENTRIES: Final = 1000
"""Entries of one answer."""
MAX_ID: Final = (1 << 63) - 1

EntryState = Literal["ok", "failed", "cancelled"]


class HistoryQuery(Contract, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The query of GET /api/history; all fields are optional. model: name or alias. since: seconds since 1970. before:
    an id, for the next page."""

    model: str | None = None
    state: EntryState | None = None
    since: float | None = None
    before: Annotated[int, Meta(ge=0, le=MAX_ID)] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] = 100


class HistoryEntry(Contract, frozen=True, kw_only=True):
    """One answer: complete, or with `state` why it is not. A request for several answers has an entry for each that is
    complete, and one more if it failed or was cancelled.

    Times in seconds, speeds in tokens per second, those that are not known are None. id: counts up. time: when the
    request began, seconds since 1970. api: the dialect. key, key_id: name and id of the caller's key; the name
    may have been that of another key, which is revoked. choice: number of the answer. reason: why these hosts and this
    method were tried. ttft_parts: see Metrics. prompt, answer: only if the gateway keeps texts.
    """

    time: float
    request_id: str
    api: str
    model: str
    state: EntryState
    total_time: float
    id: int = 0
    key: str | None = None
    key_id: str | None = None
    choice: int = 0
    method: str | None = None
    prefill_server: str | None = None
    decode_server: str | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    held_tokens: int = 0
    completion_tokens: int = 0
    ttft: float | None = None
    ttft_parts: Mapping[str, float] = {}
    prefill_time: float | None = None
    decode_time: float | None = None
    prefill_speed: float | None = None
    decode_speed: float | None = None
    kv_bytes: int = 0
    hidden_transfer: float = 0.0
    exposed_transfer: float = 0.0
    simulated: bool = False
    error_code: str | None = None
    error: str | None = None
    prompt: str | None = None
    answer: str | None = None


class HistoryAnswer(Contract, frozen=True):
    """GET /api/history. entries: newest first. stopped: why nothing is recorded any more; None if it is."""

    entries: tuple[HistoryEntry, ...] = ()
    stopped: str | None = None
