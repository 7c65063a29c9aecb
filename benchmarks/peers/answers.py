"""One streamed answer as a client sees it, and when its tokens came. One reader for all servers: it favours none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 120.0
LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """time.monotonic() when the request was sent and when each piece of its answer came. `cached`: prompt tokens that
    the server did not compute for this request and that nobody handed to it."""

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
        """Tokens that came after `start`, up to `end`. Pieces stand for tokens: some servers send none for a token
        that completes no character."""
        return sum(start < time <= end for time in self.times) * self.tokens / len(self.times)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of requests that ran together.

    decode_tok_s: tokens after the first one, by the time from that one to the last of all: late joining counts.
    steady_tok_s: tokens by time while every request decoded: nothing but decode steps counts.
    tpot_ms: mean over the requests of (last - first) / (tokens - 1)."""

    decode_tok_s: float
    steady_tok_s: float
    tpot_ms: float


def figures(answers: Sequence[Answer]) -> Figures:
    """What the answers say together; ValueError where one was served from a cache, which the others have not."""
    if any(answer.cached for answer in answers):
        raise ValueError("a prompt came out of a prompt cache: the servers did not do the same work")
    first, last = min(answer.first for answer in answers), max(answer.last for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    each = [(answer.last - answer.first) / (answer.tokens - 1) for answer in answers]
    return Figures((tokens - 1) / (last - first), _steady(answers), sum(each) / len(each) * 1e3)


def _steady(answers: Sequence[Answer]) -> float:
    start, end = max(answer.first for answer in answers), min(answer.last for answer in answers)
    if start >= end:
        raise ValueError("the answers were never all under way at once: ask for more tokens")
    return sum(answer.between(start, end) for answer in answers) / (end - start)


class Events:
    """Collects one answer's server-sent events; `piece`: one that brought a part of the answer has come."""

    def __init__(self) -> None:
        self.sent = time.monotonic()
        self.times: list[float] = []

    def piece(self) -> None:
        self.times.append(time.monotonic())


def read_openai(events: Events, data: Mapping[str, Any]) -> Answer | None:
    """One event of mlx_lm.server; the answer once its usage came."""
    if data.get("usage"):
        usage = data["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return Answer(events.sent, events.times, *counts, cached)
    if any(choice.get("text") for choice in data["choices"]):
        events.piece()
    return None


def read_disagg(events: Events, data: Mapping[str, Any]) -> Answer | None:
    """One event of a disagg server; the answer once it is done."""
    if "computed_prompt_tokens" in data:
        counts = data["prompt_tokens"], data["completion_tokens"]
        return Answer(events.sent, events.times, *counts, counts[0] - data["computed_prompt_tokens"])
    if "tokens" not in data:
        raise ConnectionError(f"the server answered {json.dumps(data)}")
    events.piece()
    return None


Read = Callable[[Events, Mapping[str, Any]], Answer | None]


async def post_all(
    port: int, path: str, bodies: Sequence[Mapping[str, Any]], read: Read, headers: Mapping[str, str] | None = None
) -> list[Answer]:
    """POST every body to this machine at once, and read server-sent events until `read` has each answer.

    The connections are opened before, one after the other: mlx_lm.server lets five wait, and a sixth would be tried
    again a second later.
    """
    async with asyncio.timeout(TIMEOUT_S):
        connections = [await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES) for _ in bodies]
        try:
            asking = (
                _ask(*connection, _request(path, body, headers or {}), read)
                for connection, body in zip(connections, bodies, strict=True)
            )
            return await asyncio.gather(*asking)
        finally:
            for _, writer in connections:
                writer.close()


def _request(path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, read: Read) -> Answer:
    events = Events()
    writer.write(request)
    async for line in reader:  # chunk sizes and event names come between, and say nothing here
        if line.startswith(b"data: {") and (answer := read(events, json.loads(line[6:]))):
            return answer
    raise ConnectionError("the server closed the stream before the answer was complete")
