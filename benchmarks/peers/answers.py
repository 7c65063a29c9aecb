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
    """time.monotonic() of the request and of the first and the last piece of its answer. `cached`: prompt tokens that
    the server did not compute for this request and that nobody handed to it."""

    sent: float
    first: float
    last: float
    prompt_tokens: int
    tokens: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of requests that ran together. `decode_tok_s`: tokens after the first one, by the time from that one to the last
    of all. `tpot_ms`: mean over the requests of (last - first) / (tokens - 1)."""

    decode_tok_s: float
    tpot_ms: float


def figures(answers: Sequence[Answer]) -> Figures:
    """What the answers say together; ValueError where one was served from a cache, which the others have not."""
    if any(answer.cached for answer in answers):
        raise ValueError("a prompt came out of a prompt cache: the servers did not do the same work")
    first, last = min(answer.first for answer in answers), max(answer.last for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    each = [(answer.last - answer.first) / (answer.tokens - 1) for answer in answers]
    return Figures((tokens - 1) / (last - first), sum(each) / len(each) * 1e3)


class Events:
    """Collects one answer's server-sent events. `piece`: whether an event brought a part of the answer."""

    def __init__(self) -> None:
        self.sent = time.monotonic()
        self.first = 0.0
        self.last = 0.0

    def piece(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last


def read_openai(events: Events, data: Mapping[str, Any]) -> Answer | None:
    """One event of mlx_lm.server; the answer once its usage came."""
    if data.get("usage"):
        usage = data["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return Answer(events.sent, events.first, events.last, *counts, cached)
    if any(choice.get("text") for choice in data["choices"]):
        events.piece()
    return None


def read_disagg(events: Events, data: Mapping[str, Any]) -> Answer | None:
    """One event of a disagg server; the answer once it is done."""
    if "computed_prompt_tokens" in data:
        counts = data["prompt_tokens"], data["completion_tokens"]
        return Answer(events.sent, events.first, events.last, *counts, counts[0] - data["computed_prompt_tokens"])
    if "tokens" not in data:
        raise ConnectionError(f"the server answered {json.dumps(data)}")
    events.piece()
    return None


async def post(
    port: int,
    path: str,
    body: Mapping[str, Any],
    read: Callable[[Events, Mapping[str, Any]], Answer | None],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """POST JSON to this machine and read server-sent events until `read` has the answer."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES)
        try:
            content = json.dumps(body).encode()
            lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
            lines += [
                f"Content-Length: {len(content)}",
                *(f"{name}: {value}" for name, value in (headers or {}).items()),
            ]
            events = Events()
            writer.write("\r\n".join([*lines, "", ""]).encode() + content)
            async for line in reader:  # chunk sizes and event names come between, and say nothing here
                if line.startswith(b"data: {") and (answer := read(events, json.loads(line[6:]))):
                    return answer
        finally:
            writer.close()
    raise ConnectionError(f"port {port} closed the stream of {path} before the answer was complete")
