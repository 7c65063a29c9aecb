"""Read streamed answers and the arrival times of their tokens; the same client for all servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.tls.certificate import ClientTLS

TIMEOUT_S = 120.0
LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """sent, times: time.monotonic() when the request was sent and when each piece of its answer arrived. cached: prompt
    tokens that the server neither computed for this request nor received as KV."""

    sent: float
    times: Sequence[float]
    prompt_tokens: int
    tokens: int
    cached: int = 0

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    def between(self, start: float, end: float) -> float:
        """Tokens that arrived after `start`, up to `end`, estimated from pieces: some servers send no piece for a token
        that completes no character."""
        return sum(start < time <= end for time in self.times) * self.tokens / len(self.times)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of requests that ran together.

    decode_tok_s: tokens after the first one / time from the first token of all to the last; includes late joining.
    steady_tok_s: tokens / time while all requests were decoding; decode steps only.
    tpot_ms: mean over the requests of (last - first) / (tokens - 1)."""

    decode_tok_s: float
    steady_tok_s: float
    tpot_ms: float


def figures(answers: Sequence[Answer]) -> Figures:
    """The figures of answers that ran together. ValueError if one was served from a prompt cache."""
    if any(answer.cached for answer in answers):
        raise ValueError("a prompt was served from a prompt cache: the servers did not do the same work")
    first, last = min(answer.first for answer in answers), max(answer.last for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    each = [(answer.last - answer.first) / (answer.tokens - 1) for answer in answers]
    return Figures((tokens - 1) / (last - first), _steady(answers), sum(each) / len(each) * 1e3)


def _steady(answers: Sequence[Answer]) -> float:
    start, end = max(answer.first for answer in answers), min(answer.last for answer in answers)
    if start >= end:
        raise ValueError("the answers were never all decoding at the same time: request more tokens")
    return sum(answer.between(start, end) for answer in answers) / (end - start)


class Events:
    """Collects the times of one answer's server-sent events. piece: call for each event with a part of the answer."""

    def __init__(self) -> None:
        self.sent = time.monotonic()
        self.times: list[float] = []

    def piece(self) -> None:
        self.times.append(time.monotonic())


def read_openai(events: Events, data: Mapping[str, Any]) -> Answer | None:
    """Read one event of mlx_lm.server; returns the answer at the event with its usage."""
    if data.get("usage"):
        usage = data["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return Answer(events.sent, events.times, *counts, cached)
    if any(choice.get("text") for choice in data["choices"]):
        events.piece()
    return None


def read_disagg(events: Events, data: Mapping[str, Any]) -> Answer | None:
    """Read one event of a disagg server; returns the answer at its `done` event."""
    if "computed_prompt_tokens" in data:
        counts = data["prompt_tokens"], data["completion_tokens"]
        return Answer(events.sent, events.times, *counts, counts[0] - data["computed_prompt_tokens"])
    if "tokens" not in data:
        raise ConnectionError(f"the server answered {json.dumps(data)}")
    events.piece()
    return None


Read = Callable[[Events, Mapping[str, Any]], Answer | None]


async def post_all(
    port: int,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    read: Read,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ClientTLS | None = None,
) -> list[Answer]:
    """POST every body to this machine at once, and read server-sent events until `read` returns each answer.

    tls: for a server of a fleet; without it, HTTP in clear.

    The connections are opened first, one after the other: mlx_lm.server's backlog is five, and a sixth connection would
    be retried a second later.
    """
    async with asyncio.timeout(TIMEOUT_S):
        secured: dict[str, Any] = {"ssl": tls.context, "server_hostname": tls.server_name} if tls else {}
        connections = [await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES, **secured) for _ in bodies]
        try:
            requests = (
                _post(*connection, _request(path, body, headers or {}), read)
                for connection, body in zip(connections, bodies, strict=True)
            )
            return await asyncio.gather(*requests)
        finally:
            for _, writer in connections:
                writer.close()


def _request(path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, read: Read) -> Answer:
    events = Events()
    writer.write(request)
    async for line in reader:  # chunk sizes and event names are skipped
        if line.startswith(b"data: {") and (answer := read(events, json.loads(line[6:]))):
            return answer
    raise ConnectionError("the server closed the stream before the answer was complete")
