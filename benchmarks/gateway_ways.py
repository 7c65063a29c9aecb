"""The two ways of asking that benchmarks.gateway compares: disagg's own client, and a bare socket to the gateway."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

from disagg import AsyncClient

TOKENS: Final = 64


class Times(NamedTuple):
    """Seconds: to the first token, and per token after it. within: as the client within the gateway measured them."""

    ttft: float
    tpot: float
    within: Times | None = None


class Arrival(NamedTuple):
    """How many tokens of an answer have arrived. At its end method: how it came about; disagg: the gateway's object
    of that name."""

    tokens: int
    method: str = ""
    disagg: Mapping[str, Any] | None = None


async def timed(tokens: AsyncIterator[Arrival], methods: Counter[str]) -> Times:
    """methods: counts by which method each answer came about."""
    began = time.perf_counter()
    arrivals = [(time.perf_counter(), arrival) async for arrival in tokens]
    end = arrivals.pop()[1]
    methods[end.method] += 1
    first, last = arrivals[0], arrivals[-1]
    tpot = (last[0] - first[0]) / (last[1].tokens - first[1].tokens)
    return Times(first[0] - began, tpot, within(end.disagg, end.tokens) if end.disagg else None)


def within(disagg: Mapping[str, Any], tokens: int) -> Times:
    """The gateway's own figures of an answer of so many tokens. Its total_time ends with the last of them."""
    return Times(disagg["ttft"], (disagg["total_time"] - disagg["ttft"]) / (tokens - 1))


async def tokens_of_client(
    client: AsyncClient, model: str, prompt: list[int], tokens: int = TOKENS
) -> AsyncIterator[Arrival]:
    count = 0
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    async with client.stream(model, tokens=prompt, cache_salt=secrets.token_hex(8), **options) as stream:
        async for chunk in stream:
            if chunk.tokens:
                count += len(chunk.tokens)
                yield Arrival(count)
    yield Arrival(count, f"client: {stream.completion.metrics.method}")


class Caller:
    """An HTTP client of the gateway that costs next to nothing itself: one connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, key: str) -> None:
        self._reader, self._writer, self._host, self._key = reader, writer, host, key

    @classmethod
    async def connected(cls, url: str, key: str = "") -> Caller:
        host = url.removeprefix("http://")
        address, port = host.rsplit(":", 1)
        return cls(*await asyncio.open_connection(address, int(port)), host, key)

    def close(self) -> None:
        self._writer.close()

    async def lines(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The lines of the answer to a POST, to the end of its stream."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self._key}\r\nContent-Length: "
        self._writer.write(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
        if not (status := await self._reader.readline()).startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the gateway answers {status!r}")
        while (await self._reader.readline()).strip():
            pass
        while size := int(await self._reader.readline(), 16):
            for line in (await self._reader.readexactly(size)).splitlines():
                yield line
            await self._reader.readline()
        await self._reader.readline()


async def tokens_of_gateway(
    caller: Caller, model: str, prompt: list[int], tokens: int = TOKENS
) -> AsyncIterator[Arrival]:
    """Log-probabilities make every token of a chunk countable."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "logprobs": 0}
    count, disagg = 0, dict[str, Any]()
    async for line in caller.lines("/v1/completions", json.dumps({**body, "temperature": 0}).encode()):
        if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
            new = len((choices[0].get("logprobs") or {}).get("tokens", ()))
            count += new
            disagg = choices[0].get("disagg", disagg)
            if new:
                yield Arrival(count)
    yield Arrival(count, f"gateway: {disagg.get('method')}", disagg)
