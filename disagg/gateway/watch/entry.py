"""The record of one answer, made from its request. Pure."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Final

from msgspec.structs import replace

from disagg.api.base import without_value
from disagg.api.gateway import HistoryEntry
from disagg.gateway.watch.request import ObservedRequest
from disagg.inference.metrics import Metrics
from disagg.inference.types import Stage

MAX_TEXT: Final = 64 << 10  # characters of a prompt or an answer, if texts are kept
_OF_METRICS: Final = {one.name for one in fields(Metrics)} & set(HistoryEntry.__struct_fields__) - {
    "model",
    "ttft_parts",
}
_OF_STAGE: Final = ("method", "prefill_server", "decode_server", "prompt_tokens", "held_tokens")


def entry_of_completion(request: ObservedRequest, choice: int) -> HistoryEntry:
    """The entry of a complete answer."""
    answer = request.answers[choice]
    metrics = answer.done.metrics
    return HistoryEntry(
        **_head(request, choice),
        **{name: getattr(metrics, name) for name in _OF_METRICS},
        state="ok",
        choice=choice,
        reason=answer.stage.reason if answer.stage else "",
        warnings=answer.done.warnings,
        finish_reason=answer.done.finish_reason,
        ttft_parts=asdict(metrics.ttft_parts),
        answer=None if request.prompts is None else answer.done.text[:MAX_TEXT],
    )


def entry_of_end(request: ObservedRequest) -> HistoryEntry | None:
    """The entry of a request that failed or was cancelled; None if its answers are complete. One that was wrong
    names no hosts: they have not failed."""
    if (state := request.state) is None or state == "ok":
        return None
    stage = None if request.refused else next((one.stage for one in request.open if one.stage), None)
    began = [one.began for one in request.open if one.began is not None]
    return HistoryEntry(
        **_head(request, 0),
        **of_stage(stage),
        state=state,
        reason=stage.reason if stage else "",
        completion_tokens=sum(one.tokens for one in request.open),
        ttft=min(began) - request.began if began else None,
        total_time=request.seconds,
        error_code=(problem.code or str(problem.status)) if (problem := request.problem) else None,
        error=without_value(problem.message) if problem else None,
    )


def without_texts(entry: HistoryEntry) -> HistoryEntry:
    """The entry with neither prompt nor answer."""
    return replace(entry, prompt=None, answer=None)


def of_stage(stage: Stage | None) -> dict[str, Any]:
    """The fields of an entry or a request that a stage knows."""
    return {name: getattr(stage, name) for name in _OF_STAGE} if stage else {}


def _head(request: ObservedRequest, choice: int) -> dict[str, Any]:
    return {
        "time": request.head.created,
        "request_id": request.head.request_id,
        "api": request.api,
        "model": request.model,
        "key": request.key,
        "key_id": request.key_id,
        "prompt": request.prompts[choice // request.head.request.n][:MAX_TEXT] if request.prompts else None,
    }
