"""The record of one answer, made from the events of its request. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TypedDict

import msgspec

from disagg.api.base import without_value
from disagg.api.history import HistoryEntry
from disagg.gateway.watch.events import Accepted, Completed, Ended

MAX_TEXT = 64 << 10  # characters of a prompt or an answer, if texts are kept


class _Head(TypedDict):
    time: float
    request_id: str
    api: str
    model: str
    key: str | None
    key_id: str | None


def entry_of_completion(event: Completed) -> HistoryEntry:
    """The entry of a complete answer."""
    metrics, completion, request = event.completion.metrics, event.completion, event.request
    return HistoryEntry(
        **_head(request),
        state="ok",
        choice=event.choice,
        method=metrics.method,
        prefill_server=metrics.prefill_server,
        decode_server=metrics.decode_server,
        reason=event.stage.reason if event.stage else "",
        warnings=completion.warnings,
        finish_reason=completion.finish_reason,
        prompt_tokens=metrics.prompt_tokens,
        held_tokens=metrics.held_tokens,
        completion_tokens=metrics.completion_tokens,
        ttft=metrics.ttft,
        ttft_parts=asdict(metrics.ttft_parts),
        prefill_time=metrics.prefill_time,
        decode_time=metrics.decode_time,
        total_time=metrics.total_time,
        prefill_speed=metrics.prefill_speed,
        decode_speed=metrics.decode_speed,
        kv_bytes=metrics.kv_bytes,
        hidden_transfer=metrics.hidden_transfer,
        exposed_transfer=metrics.exposed_transfer,
        simulated=metrics.simulated,
        prompt=_prompt(request, event.choice),
        answer=None if request.prompts is None else completion.text[:MAX_TEXT],
    )


def without_texts(entry: HistoryEntry) -> HistoryEntry:
    """The entry with neither prompt nor answer."""
    return msgspec.structs.replace(entry, prompt=None, answer=None)


def entry_of_end(event: Ended) -> HistoryEntry | None:
    """The entry of a request that failed or was cancelled; None if its answers are complete. One that was wrong
    names no hosts: they have not failed."""
    if event.state == "ok":
        return None
    stage, problem = None if event.refused else event.stage, event.problem
    return HistoryEntry(
        **_head(event.request),
        state=event.state,
        method=stage.method if stage else None,
        prefill_server=stage.prefill_server if stage else None,
        decode_server=stage.decode_server if stage else None,
        reason=stage.reason if stage else "",
        prompt_tokens=stage.prompt_tokens if stage else 0,
        held_tokens=stage.held_tokens if stage else 0,
        completion_tokens=event.tokens,
        ttft=event.ttft,
        total_time=event.seconds,
        error_code=(problem.code or str(problem.status)) if problem else None,
        error=without_value(problem.message) if problem else None,
        prompt=_prompt(event.request, 0),
    )


def _head(request: Accepted) -> _Head:
    return {
        "time": request.at,
        "request_id": request.request_id,
        "api": request.api,
        "model": request.model,
        "key": request.key,
        "key_id": request.key_id,
    }


def _prompt(request: Accepted, choice: int) -> str | None:
    """The prompt of an answer, cut at MAX_TEXT. Answers are numbered prompt by prompt, the same number for each."""
    if not request.prompts:
        return None
    return request.prompts[choice * len(request.prompts) // request.choices][:MAX_TEXT]
