"""Requests that harm whoever works on them, by every API of the gateway, beside four clients that stream."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import psutil

from tests.faults.fleet import MODEL, FaultFleet
from tests.hostile.schemas import POISONS, Schema
from tests.served_gateway import served_gateway

ALLOWED_GAP_S: Final = 1.0
SETTLED_S: Final = 10.0
ALLOWED_BYTES: Final = 64 << 20
"""By which the memory of all processes may be larger SETTLED_S after the last request: warm allocators."""
STREAMS: Final = 4
TIMEOUT_S: Final = 120.0
SAY: Final = [{"role": "user", "content": "say"}]

Body = dict[str, Any]


def _tool(schema: Schema) -> Body:
    return {"name": "f", "description": "", "parameters": schema}


DIALECTS: Final[Mapping[str, tuple[str, Callable[[Schema], Body]]]] = {
    "chat, response_format": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": SAY,
            "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}},
        },
    ),
    "chat, tools": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": SAY,
            "tools": [{"type": "function", "function": _tool(schema)}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {
            "input": "say",
            "text": {"format": {"type": "json_schema", "name": "f", "schema": schema, "strict": True}},
        },
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {
            "messages": SAY,
            "max_tokens": 32,
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
    ),
    "ollama chat": ("/api/chat", lambda schema: {"messages": SAY, "stream": False, "format": schema}),
    "ollama generate": ("/api/generate", lambda schema: {"prompt": "say", "stream": False, "format": schema}),
}
"""Where each API takes a schema: its path, and a body without the model."""


@dataclass(frozen=True, slots=True)
class Settings:
    """times: each poison by each API, at the same time. tokens: of each answer that is streamed meanwhile. warm:
    answers of each stream before."""

    times: int = 10
    tokens: int = 200
    warm: int = 12


@dataclass(slots=True)
class Report:
    """statuses: of the poisons' answers, by poison. gaps: the longest between two pieces of each stream, seconds.
    failed: what went wrong with streams. ended: hosts whose processes ended. before, after: bytes of memory of all
    processes. seconds: that the poisons took."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended: Sequence[str] = ()
    before: int = 0
    after: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        found = [*self.failed, *(f"{name} ended" for name in self.ended)]
        found += [f"a gap of {gap:.2f} s" for gap in self.gaps if gap > ALLOWED_GAP_S]
        for name, counts in self.statuses.items():
            found += [f"{name}: {count} answers with {status}" for status, count in counts.items() if status >= 500]
        if self.after > self.before + ALLOWED_BYTES:
            found.append(f"{(self.after - self.before) >> 20} MiB more memory {SETTLED_S:g} s later")
        return found


Dialects = Mapping[str, tuple[str, Callable[[Schema], Body]]]


async def run(fleet: FaultFleet, settings: Settings, dialects: Dialects = DIALECTS) -> Report:
    """All poisons by these APIs, beside the streams."""
    report, stop = Report(), asyncio.Event()
    pids = {name: fleet.pid(name) for name in fleet.names()}
    with served_gateway(fleet.seen) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S, trust_env=False) as http:
            processes = [*pids.values(), gateway.process.pid]
            # First until held KV and allocators have what they keep, so that what is left of the poisons shows.
            await asyncio.gather(*_streams(http, settings, Report(), lambda turn: turn < settings.warm))
            await _poison(http, Report(), {"harmless": {"type": "object"}}, dialects, 1)
            report.before = memory(processes)
            streams = asyncio.gather(*_streams(http, settings, report, lambda turn: not stop.is_set()))
            began = time.monotonic()
            await _poison(http, report, POISONS, dialects, settings.times)
            report.seconds = time.monotonic() - began
            stop.set()
            await streams
            report.ended = [name for name, pid in pids.items() if not psutil.pid_exists(pid) or fleet.ended(name)]
            ends = time.monotonic() + SETTLED_S
            while (after := memory(processes)) > report.before + ALLOWED_BYTES and time.monotonic() < ends:
                await asyncio.sleep(0.2)
            report.after = after
    return report


async def _poison(
    http: httpx.AsyncClient, report: Report, poisons: Mapping[str, Schema], dialects: Dialects, times: int
) -> None:
    for (name, schema), (path, body) in itertools.product(poisons.items(), dialects.values()):
        posts = (http.post(path, json={"model": MODEL, **body(schema)}) for _ in range(times))
        answers = await asyncio.gather(*posts)
        report.statuses.setdefault(name, Counter()).update(answer.status_code for answer in answers)


def _streams(
    http: httpx.AsyncClient, settings: Settings, report: Report, goes_on: Callable[[int], bool]
) -> list[Coroutine[Any, Any, None]]:
    return [_stream(http, settings.tokens, number, goes_on, report) for number in range(STREAMS)]


async def _stream(
    http: httpx.AsyncClient, tokens: int, number: int, goes_on: Callable[[int], bool], report: Report
) -> None:
    """Stream one answer after the other, as long as `goes_on` after so many."""
    for turn in itertools.takewhile(goes_on, itertools.count()):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{number} {turn} {time.monotonic()}"}],
            "stream": True,
        }
        last, longest, finished = 0.0, 0.0, ""
        async with http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": tokens}) as answer:
            async for line in answer.aiter_lines():
                if '"content"' in line:
                    now = time.monotonic()
                    longest, last = max(longest, now - last if last else 0.0), now
                finished = line.removeprefix("data: ") or finished
        if answer.status_code != httpx.codes.OK or finished != "[DONE]":
            report.failed.append(f"a stream ended with {answer.status_code} {finished[:200]}")
        report.gaps.append(longest)


def memory(pids: Sequence[int]) -> int:
    """Bytes of memory of these processes and their children."""
    return sum(_family(psutil.Process(pid)) for pid in pids if psutil.pid_exists(pid))


def _family(process: psutil.Process) -> int:
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += int(one.memory_info().rss)
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


def table(report: Report) -> list[str]:
    rows = [
        f"{name}: {', '.join(f'{count} x {status}' for status, count in sorted(counts.items()))}"
        for name, counts in report.statuses.items()
    ]
    longest = max(report.gaps, default=0.0)
    return [
        *rows,
        f"{len(report.gaps)} streams meanwhile ({report.seconds:.0f} s): {len(report.failed)} failed, "
        f"longest gap {longest:.2f} s",
        f"hosts that ended: {', '.join(report.ended) or 'none'}",
        f"memory of all processes: {report.before >> 20} MiB, at the end {report.after >> 20} MiB",
        *(f"PROBLEM: {problem}" for problem in report.problems),
    ]
