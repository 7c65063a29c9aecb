"""What the gateway adds to a request, compared with disagg's own client in the same run.

    python -m benchmarks.gateway [--pairs 60] [--demo]

Simulated: a DGX Spark and an M3 Ultra with Llama-3.1-8B as servers of this machine, whose engines only wait, and a
gateway in front of them. --demo: the demo fleet instead, whose engines compute, so that on a machine with few cores the
gateway competes with them; there also the CPU time of each request and token, in the gateway and in a process that uses
the client.

A pair is one prompt both ways, straight after each other; which way is first alternates. The gateway is asked on a bare
socket: what a client library costs is not the gateway's. Every connection is open before the first pair. The client's
requests have a cache_salt each, so that neither way finds KV of the other. The servers are in this program's session,
so that threads that compute give way to the gateway and to this program alike, as those of `disagg demo` do: on few
cores both would wait for a core behind them.

What the gateway adds (`added_`) is the median of the pairs' differences, with its 95 % confidence interval, and whether
that meets the goal: "undecided" if the goal lies within the interval. `own_` is the same without pairs: of each of the
gateway's answers, what its caller measured less what the client within the gateway did; it leaves out what the gateway
costs the engines, and is narrow on a busy machine, too. One JSON object; times in milliseconds, CPU times in
microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from benchmarks import gateway_load
from benchmarks.gateway_ways import Arrival, Caller, Times, timed, tokens_of_client, tokens_of_gateway
from benchmarks.medians import estimate
from disagg import AsyncClient
from disagg.config import Fleet, load
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State

START_S = 120.0
PROMPT: Final = 512
WARM_UP: Final = 3  # pairs
CPU_TOKENS: Final = (16, 272)  # of a short and a long answer: their difference is without what a request costs
CPU_REQUESTS: Final = 6
TTFT_GOAL_MS: Final = 5.0
TPOT_GOAL: Final = 0.03
PORTS = (18111, 18112, 18113, 18114)
HOSTS = """
[fleet]
name = "gateway-benchmark"
[models.model]
context = 4096
sources = {{simulated = "{source}"}}
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


class Pair(NamedTuple):
    """One prompt, both ways."""

    client: Times
    gateway: Times


class Cost(NamedTuple):
    """Microseconds of CPU: of a request without its tokens, and of each token."""

    request: float
    token: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=60)
    options.add_argument("--demo", action="store_true", help="with the demo models")
    args = options.parse_args()
    print(json.dumps(measure(args.pairs, demo=args.demo), indent=2))


@contextmanager
def simulated(folder: Path, source: str = "shape:llama-3.1-8b") -> Iterator[tuple[Fleet, State]]:
    """The simulated pair with a gateway. source: of the model."""
    path = folder / "hosts.toml"
    path.write_text(HOSTS.format(shared=SHARED, ports=PORTS, source=source))
    fleet = load(path)
    state = State.of(fleet, folder / "state")
    servers = FleetServers(fleet, state, own_session=False)
    try:
        if failed := [result for result in servers.start(timeout_s=START_S) if not result.ok]:
            raise SystemExit(f"the fleet did not start: {failed}")
        yield fleet, state
    finally:
        servers.stop()


def measure(count: int, *, demo: bool) -> dict[str, Any]:
    running = gateway_load.running if demo else simulated
    with tempfile.TemporaryDirectory(prefix="disagg-gateway-") as name, running(Path(name)) as (fleet, state):
        return asyncio.run(compare(fleet, state, count, cpu=demo))


async def compare(fleet: Fleet, state: State, count: int, *, cpu: bool) -> dict[str, Any]:
    """So many pairs, after those that warm up."""
    model, methods, pairs, load = next(iter(fleet.models)), Counter[str](), list[Pair](), [os.getloadavg()[0]]
    async with AsyncClient(fleet, token=state.tokens.current) as client:
        await client.connect()
        caller = await Caller.connected(fleet.hosts["gateway"].url)
        for number in range(WARM_UP + count):
            ways = [tokens_of_client(client, model, prompt(number)), tokens_of_gateway(caller, model, prompt(number))]
            order = (0, 1) if number % 2 else (1, 0)
            times = {way: await timed(ways[way], methods) for way in order}
            pairs.append(Pair(times[0], times[1]))
        used = await cpu_times(client, caller, model, state) if cpu else {}
    load.append(os.getloadavg()[0])
    return {**figures(pairs[WARM_UP:]), "methods": dict(methods), **used, "load": load}


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the gateway adds, and the medians of both ways."""
    client, gateway = [pair.client for pair in pairs], [pair.gateway for pair in pairs]
    stated = [(times, times.within) for times in gateway if times.within is not None]
    added_ttft = estimate([1e3 * (pair.gateway.ttft - pair.client.ttft) for pair in pairs])
    added_tpot = estimate([pair.gateway.tpot / pair.client.tpot - 1 for pair in pairs])
    own_ttft = estimate([1e3 * (times.ttft - within.ttft) for times, within in stated])
    own_tpot = estimate([times.tpot / within.tpot - 1 for times, within in stated])
    return {
        "pairs": len(pairs),
        "client": medians(client),
        "gateway": medians(gateway),
        "added_ttft_ms": {**added_ttft._asdict(), "goal": TTFT_GOAL_MS, "is": added_ttft.judged(TTFT_GOAL_MS)},
        "added_tpot": {**added_tpot._asdict(), "goal": TPOT_GOAL, "is": added_tpot.judged(TPOT_GOAL)},
        "own_ttft_ms": own_ttft._asdict(),
        "own_tpot": own_tpot._asdict(),
    }


def medians(times: Sequence[Times]) -> dict[str, float]:
    values = {"ttft_ms": [one.ttft for one in times], "tpot_ms": [one.tpot for one in times]}
    return {name: 1e3 * statistics.median(seconds) for name, seconds in values.items()}


def prompt(number: int) -> list[int]:
    return [(7 * at + number) % 900 + 8 for at in range(PROMPT)]


async def cpu_times(client: AsyncClient, caller: Caller, model: str, state: State) -> dict[str, float]:
    """Microseconds of an answer: of each token, and of the request without its tokens."""
    gateway = state.running_pid("gateway")
    assert gateway is not None
    ours = await cost(lambda tokens: tokens_of_client(client, model, prompt(0), tokens), time.process_time)
    theirs = await cost(lambda tokens: tokens_of_gateway(caller, model, prompt(1), tokens), lambda: cpu_s(gateway))
    return {
        "client_cpu_us_per_token": ours.token,
        "gateway_cpu_us_per_token": theirs.token,
        "client_cpu_us_per_request": ours.request,
        "gateway_cpu_us_per_request": theirs.request,
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far. psutil counts in steps of 10 ms on Linux, whose scheduler counts nanoseconds."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if threads:
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def cost(ask: Callable[[int], AsyncIterator[Arrival]], used: Callable[[], float]) -> Cost:
    """used: CPU seconds so far."""
    seconds = []
    for tokens in CPU_TOKENS:
        before = used()
        for _ in range(CPU_REQUESTS):
            async for _ in ask(tokens):
                pass
        seconds.append((used() - before) / CPU_REQUESTS)
    token = (seconds[1] - seconds[0]) / (CPU_TOKENS[1] - CPU_TOKENS[0])
    return Cost(1e6 * (seconds[0] - CPU_TOKENS[0] * token), 1e6 * token)


if __name__ == "__main__":
    main()
