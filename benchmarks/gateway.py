"""What the gateway adds to a request, compared with disagg's own client in the same run.

    python -m benchmarks.gateway [--requests 20] [--demo]

Simulated: a DGX Spark and an M3 Ultra with Llama-3.1-8B as servers of this machine, whose engines only wait, and a
gateway in front of them. Each prompt is sent both ways, in turn, to the gateway on a bare socket: what a client library
costs is not the gateway's. --demo: the demo fleet instead, whose engines compute, so that on a machine with few cores
the gateway competes with them; there also the CPU time of each token, in the gateway and in a process that uses the
client. One JSON object; times in milliseconds, CPU times in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from benchmarks import gateway_load
from disagg import AsyncClient
from disagg.config import Fleet, load
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State

START_S = 120.0
TOKENS: Final = 64
PROMPT: Final = 512
CPU_TOKENS: Final = (16, 1040)  # of a short and a long answer: their difference is without what a request costs
CPU_REQUESTS: Final = 10
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
    options.add_argument("--demo", action="store_true", help="with the demo models")
    args = options.parse_args()
    print(json.dumps(measure(args.requests, demo=args.demo), indent=2))


@contextmanager
def simulated(folder: Path) -> Iterator[tuple[Fleet, State]]:
    """The simulated pair with a gateway."""
    path = folder / "hosts.toml"
    path.write_text(HOSTS.format(shared=SHARED, ports=PORTS))
    fleet = load(path)
    state = State.of(fleet, folder / "state")
    servers = FleetServers(fleet, state)
    try:
        if failed := [result for result in servers.start(timeout_s=START_S) if not result.ok]:
            raise SystemExit(f"the fleet did not start: {failed}")
        yield fleet, state
    finally:
        servers.stop()


def measure(requests: int, *, demo: bool) -> dict[str, Any]:
    running = gateway_load.running if demo else simulated
    with tempfile.TemporaryDirectory(prefix="disagg-gateway-") as name, running(Path(name)) as (fleet, state):
        return asyncio.run(compare(fleet, state, requests, cpu=demo))


async def compare(fleet: Fleet, state: State, requests: int, *, cpu: bool) -> dict[str, Any]:
    """Medians; the first request of each way warms up."""
    ours: list[Times] = []
    through: list[Times] = []
    model = next(iter(fleet.models))
    async with AsyncClient(fleet, token=state.token()) as client:
        await client.connect()
        caller = await Caller.connected(fleet.hosts["gateway"].url)
        for number in range(requests + 1):
            ours.append(await timed(tokens_of_client(client, model, prompt(2 * number))))
            through.append(await timed(tokens_of_gateway(caller, model, prompt(2 * number + 1))))
        used = await cpu_times(client, caller, model, state) if cpu else {}
    ttft = [1e3 * statistics.median(one.ttft for one in way[1:]) for way in (ours, through)]
    tpot = [1e3 * statistics.median(one.tpot for one in way[1:]) for way in (ours, through)]
    return {
        "requests": requests,
        "client": {"ttft_ms": ttft[0], "tpot_ms": tpot[0]},
        "gateway": {"ttft_ms": ttft[1], "tpot_ms": tpot[1]},
        "added_ttft_ms": ttft[1] - ttft[0],
        "added_tpot": tpot[1] / tpot[0] - 1,
        **used,
    }


def prompt(number: int) -> list[int]:
    return [(7 * at + number) % 900 + 8 for at in range(PROMPT)]


async def cpu_times(client: AsyncClient, caller: Caller, model: str, state: State) -> dict[str, float]:
    """Microseconds per token of an answer."""
    record = state.recorded("gateway")
    assert record is not None
    gateway = psutil.Process(record.pid)

    def used_there() -> float:
        times = gateway.cpu_times()
        return times.user + times.system

    ours = await per_token(lambda tokens: tokens_of_client(client, model, prompt(0), tokens), time.process_time)
    theirs = await per_token(lambda tokens: tokens_of_gateway(caller, model, prompt(1), tokens), used_there)
    return {"client_cpu_us_per_token": 1e6 * ours, "gateway_cpu_us_per_token": 1e6 * theirs}


async def per_token(ask: Callable[[int], AsyncIterator[int]], used: Callable[[], float]) -> float:
    """Seconds of CPU per token. used: seconds so far."""
    seconds = []
    for tokens in CPU_TOKENS:
        before = used()
        for _ in range(CPU_REQUESTS):
            async for _ in ask(tokens):
                pass
        seconds.append(used() - before)
    return (seconds[1] - seconds[0]) / (CPU_REQUESTS * (CPU_TOKENS[1] - CPU_TOKENS[0]))


async def timed(tokens: AsyncIterator[int]) -> Times:
    """tokens: how many tokens there are after each arrival."""
    began = time.perf_counter()
    arrivals = [(time.perf_counter(), count) async for count in tokens]
    first, last = arrivals[0], arrivals[-1]
    return Times(first[0] - began, (last[0] - first[0]) / (last[1] - first[1]))


async def tokens_of_client(
    client: AsyncClient, model: str, prompt: list[int], tokens: int = TOKENS
) -> AsyncIterator[int]:
    count = 0
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    async with client.stream(model, tokens=prompt, **options) as stream:
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


async def tokens_of_gateway(caller: Caller, model: str, prompt: list[int], tokens: int = TOKENS) -> AsyncIterator[int]:
    """Log-probabilities make every token of a chunk countable."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "logprobs": 0}
    count = 0
    async for line in caller.lines("/v1/completions", json.dumps({**body, "temperature": 0}).encode()):
        if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
            new = len((choices[0].get("logprobs") or {}).get("tokens", ()))
            count += new
            if new:
                yield count


if __name__ == "__main__":
    main()
