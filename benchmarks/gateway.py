"""What the gateway adds to a request, compared with disagg's own client in the same run.

    python -m benchmarks.gateway [--requests 20]

Simulated: a DGX Spark and an M3 Ultra with Llama-3.1-8B as servers of this machine, whose engines only wait, and a
gateway in front of them. Each prompt is sent both ways, in turn, to the gateway on a bare socket: what a client library
costs is not the gateway's. One JSON object; times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from disagg import AsyncClient
from disagg.config import load
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State

START_S = 120.0
TOKENS = 64
PROMPT = 512
PORTS = (18111, 18112, 18113, 18114)
HOSTS = """
[fleet]
name = "gateway-benchmark"
[models.model]
context = 4096
sources = {{simulated = "shape:llama-3.1-8b"}}
[hosts.prefill]
{shared}
roles = ["prefill"]
port = {ports[0]}
model = "model"
hardware = "dgx-spark"
engine = {{name = "simulated"}}
[hosts.decode]
{shared}
roles = ["decode"]
port = {ports[1]}
kv_port = {ports[2]}
model = "model"
hardware = "m3-ultra"
engine = {{name = "simulated"}}
[hosts.gateway]
{shared}
roles = ["gateway"]
port = {ports[3]}
"""
SHARED = 'address = "127.0.0.1"\nconnector = "local"\nservice = "process"'


class Times(NamedTuple):
    """Seconds: to the first token, and per token after it."""

    ttft: float
    tpot: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=20)
    args = options.parse_args()
    print(json.dumps(measure(args.requests), indent=2))


def measure(requests: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="disagg-gateway-") as name:
        path = Path(name) / "hosts.toml"
        path.write_text(HOSTS.format(shared=SHARED, ports=PORTS))
        fleet = load(path)
        state = State.of(fleet, Path(name) / "state")
        servers = FleetServers(fleet, state)
        try:
            if failed := [result for result in servers.start(timeout_s=START_S) if not result.ok]:
                raise SystemExit(f"the fleet did not start: {failed}")
            return asyncio.run(compare(path, state.token(), fleet.hosts["gateway"].url, requests))
        finally:
            servers.stop()


async def compare(path: Path, token: str, url: str, requests: int) -> dict[str, Any]:
    """Medians; the first request of each way warms up."""
    ours: list[Times] = []
    through: list[Times] = []
    async with AsyncClient(path, token=token) as client:
        await client.connect()
        caller = await Caller.connected(url)
        for number in range(requests + 1):
            prompts = [[(7 * at + number * 2 + way) % 900 + 8 for at in range(PROMPT)] for way in range(2)]
            ours.append(await timed(tokens_of_client(client, prompts[0])))
            through.append(await timed(tokens_of_gateway(caller, prompts[1])))
    ttft = [1e3 * statistics.median(one.ttft for one in way[1:]) for way in (ours, through)]
    tpot = [1e3 * statistics.median(one.tpot for one in way[1:]) for way in (ours, through)]
    return {
        "requests": requests,
        "client": {"ttft_ms": ttft[0], "tpot_ms": tpot[0]},
        "gateway": {"ttft_ms": ttft[1], "tpot_ms": tpot[1]},
        "added_ttft_ms": ttft[1] - ttft[0],
        "added_tpot": tpot[1] / tpot[0] - 1,
    }


async def timed(tokens: AsyncIterator[int]) -> Times:
    """tokens: how many tokens there are after each arrival."""
    began = time.perf_counter()
    arrivals = [(time.perf_counter(), count) async for count in tokens]
    first, last = arrivals[0], arrivals[-1]
    return Times(first[0] - began, (last[0] - first[0]) / (last[1] - first[1]))


async def tokens_of_client(client: AsyncClient, prompt: list[int]) -> AsyncIterator[int]:
    count = 0
    options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    async with client.stream("model", tokens=prompt, **options) as stream:
        async for chunk in stream:
            if chunk.tokens:
                count += len(chunk.tokens)
                yield count


class Caller:
    """An HTTP client of the gateway that costs next to nothing itself: one connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def connected(cls, url: str) -> Caller:
        host = url.removeprefix("http://")
        address, port = host.rsplit(":", 1)
        return cls(*await asyncio.open_connection(address, int(port)), host)

    async def lines(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The lines of the answer to a POST, to the end of its stream."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: "
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


async def tokens_of_gateway(caller: Caller, prompt: list[int]) -> AsyncIterator[int]:
    """Log-probabilities make every token of a chunk countable."""
    body = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 0}
    count = 0
    async for line in caller.lines("/v1/completions", json.dumps({**body, "temperature": 0}).encode()):
        if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
            new = len((choices[0].get("logprobs") or {}).get("tokens", ()))
            count += new
            if new:
                yield count


if __name__ == "__main__":
    main()
