"""Requests for four tiny models on hosts that have room for some of them: what is loaded, beside an offline optimum.

    python -m benchmarks.models_trace [--requests 400] [--concurrency 8] [--run-length 20] [--hosts 2] [--room 2]
                                      [--min-stay 0] [--timeout 120] [--seed 1]

Hosts of both roles, each with a keeper, on this machine. Requests name the same model in runs of this mean length, as
many at a time as `concurrency` says, in order. Every answer is compared with that of the decode host alone. The optimum
knows the whole trace and loads, of each role, as few models as any order of evictions needs in the fleet's room. Memory
is the resident memory of the model processes of a host, read all the time, beside its budget. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from disagg.api.keeper import KeptModel
from disagg.config import Host
from disagg.inference.client import AsyncClient
from disagg.inference.http import keeper_calls
from disagg.inference.http.connections import Connections
from disagg.token import Tokens
from tests.faults.kept import unloaded
from tests.fleets import KEPT_MODELS, TOKEN, RunningFleet, running, write_kept_hosts

PROMPTS = 4  # different ones of each model
TOKENS = 16
SAMPLE_S = 0.25


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=400)
    options.add_argument("--concurrency", type=int, default=8)
    options.add_argument("--run-length", type=float, default=20.0)
    options.add_argument("--hosts", type=int, default=2, help="of each role")
    options.add_argument("--room", type=int, default=2, help="models that each host may load")
    options.add_argument("--min-stay", type=int, default=0)
    options.add_argument("--timeout", type=float, default=120.0)
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    from tests import tiny_models  # imports torch

    with tempfile.TemporaryDirectory(prefix="disagg-trace-") as name:
        folder = Path(name)
        models = {model: tiny_models.make(model, folder / model) for model in KEPT_MODELS}
        keys = {"max_loaded": args.room, "min_stay": args.min_stay}
        path = write_kept_hosts(folder, models, prefill=args.hosts, decode=args.hosts, **keys)
        with running(path) as fleet:
            print(json.dumps(asyncio.run(measure(fleet, args)), indent=2))


def trace(models: Sequence[str], requests: int, run_length: float, seed: int) -> list[str]:
    """The model of each request: runs of one model whose lengths have this mean, each of another one than the last."""
    draw, found = random.Random(seed), list[str]()
    while len(found) < requests:
        others = [model for model in models if not found or model != found[-1]]
        model = draw.choice(others)
        found.append(model)
        while draw.random() >= 1 / run_length:
            found.append(model)
    return found[:requests]


def optimum(models: Sequence[str], room: int) -> int:
    """The fewest loads with which these requests, one after the other, find their models: the model goes whose next
    request is last (Belady)."""
    loaded, loads = set[str](), 0
    for at, model in enumerate(models):
        if model in loaded:
            continue
        if len(loaded) == room:
            rest = models[at:]
            loaded.remove(max(loaded, key=lambda one: rest.index(one) if one in rest else len(rest)))
        loaded.add(model)
        loads += 1
    return loads


async def measure(fleet: RunningFleet, args: argparse.Namespace) -> dict[str, Any]:
    keepers = list(fleet.fleet.hosts.values())
    asked = trace(KEPT_MODELS, args.requests, args.run_length, args.seed)
    async with AsyncClient(fleet.fleet, token=TOKEN) as client, Connections(Tokens(TOKEN)) as http:
        expected = await references(client)
        await unload_all(http, keepers)
        before = await stated(http, keepers)
        began = time.monotonic()
        async with sampled(fleet, keepers) as memory:
            seconds, failures, wrong = await run(client, asked, expected, args)
        took_s = time.monotonic() - began
        after = await stated(http, keepers)
        counted = {host.name: {one.model: one.loads for one in before[host.name]} for host in keepers}
        loads = Counter[str]()
        for host in keepers:
            loads[host.roles[0]] += sum(one.loads - counted[host.name][one.model] for one in after[host.name])
        await unload_all(http, keepers)
        left = {host.name: len(processes(fleet, host)) for host in keepers}
    fewest = optimum(asked, args.hosts * args.room)
    budgets = {host.name: host.keeping.memory_bytes for host in keepers if host.keeping}
    return {
        "requests": len(asked),
        "runs": 1 + sum(one != two for one, two in pairwise(asked)),
        "failed": len(failures),
        "failures": failures[:3],
        "not exact": wrong,
        "seconds": {name: round(value, 2) for name, value in quantiles(seconds).items()},
        "deadline": args.timeout,
        "took": round(took_s, 1),
        "loads": dict(loads),
        "optimum of each role": fewest,
        "loads / optimum": {role: round(count / fewest, 2) for role, count in loads.items()},
        "loads per minute and host": round(sum(loads.values()) / len(keepers) / took_s * 60, 1),
        "most memory of models": memory,
        "budget": budgets,
        "memory of keepers": {host.name: keeper(fleet, host).memory_info().rss for host in keepers},
        "processes left": left,
    }


async def run(
    client: AsyncClient, asked: Sequence[str], expected: dict[tuple[str, int], list[int]], args: argparse.Namespace
) -> tuple[list[float], list[str], int]:
    """The seconds of each request, the errors of those that failed, and how many answers were not as expected."""
    seconds, failures, wrong = list[float](), list[str](), 0
    turns = iter(enumerate(asked))

    async def ask_in_turn() -> None:
        nonlocal wrong
        for number, model in turns:
            began = time.monotonic()
            try:
                found = await answer(client, model, number % PROMPTS, timeout=args.timeout)
            except Exception as error:  # noqa: BLE001 - counted
                failures.append(f"{type(error).__name__}: {error}")
            else:
                wrong += found != expected[model, number % PROMPTS]
            seconds.append(time.monotonic() - began)

    await asyncio.gather(*(ask_in_turn() for _ in range(args.concurrency)))
    return seconds, failures, wrong


async def answer(client: AsyncClient, model: str, number: int, **options: Any) -> list[int]:
    prompt = [5 + (number * 31 + at * 7) % 200 for at in range(48)]
    completion = await client.generate(model, tokens=prompt, max_tokens=TOKENS, ignore_eos=True, **options)
    return [token.id for token in completion.tokens]


async def references(client: AsyncClient) -> dict[tuple[str, int], list[int]]:
    """What a decode host alone answers."""
    return {
        (model, number): await answer(client, model, number, alone="decode", timeout=300.0)
        for model in KEPT_MODELS
        for number in range(PROMPTS)
    }


async def unload_all(http: Connections, keepers: Sequence[Host]) -> None:
    for host in keepers:
        for model in host.models:
            await unloaded(http, host, model)


async def stated(http: Connections, keepers: Sequence[Host]) -> dict[str, tuple[KeptModel, ...]]:
    return {host.name: await keeper_calls.models(http, host) for host in keepers}


@asynccontextmanager
async def sampled(fleet: RunningFleet, keepers: Sequence[Host]) -> AsyncIterator[dict[str, int]]:
    """The most resident memory that the model processes of each host had together within the block."""
    most = {host.name: 0 for host in keepers}

    async def sample() -> None:
        while True:
            for host in keepers:
                most[host.name] = max(most[host.name], sum(map(resident, processes(fleet, host))))
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.ensure_future(sample())
    try:
        yield most
    finally:
        task.cancel()
        await asyncio.wait((task,))


def keeper(fleet: RunningFleet, host: Host) -> psutil.Process:
    return psutil.Process(fleet.processes[host.name].pid)


def processes(fleet: RunningFleet, host: Host) -> list[psutil.Process]:
    return keeper(fleet, host).children(recursive=True)


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "most": max(seconds)}


if __name__ == "__main__":
    main()
