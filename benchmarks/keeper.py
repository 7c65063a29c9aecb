"""What a keeper costs a model that is loaded: hosts with one model and hosts with several, in turn.

    python -m benchmarks.keeper [--pairs 5] [--requests 20] [--tokens 300]

Two fleets of a prefill and a decode host each stand side by side on this machine with the same tiny model: one as
`model = ...`, the other as `models = [...]` with the model preloaded. Each turn of a pair sends so many requests of one
token to one fleet, and one answer of so many tokens. Prints medians of the turns as one JSON object, and of the ratios
of the pairs with their least and greatest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from disagg.inference.client import AsyncClient
from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, running, write_hosts, write_kept_hosts

MODEL = "qwen3"
PROMPT_TOKENS = 256


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--requests", type=int, default=20)
    options.add_argument("--tokens", type=int, default=300)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-keeper-") as name:
        folder = Path(name)
        paths = {MODEL: tiny_models.make(MODEL, folder / MODEL)}
        for kind in ("one", "several"):
            (folder / kind).mkdir()
        single = write_hosts(folder / "one", paths, context=4096)
        kept = write_kept_hosts(folder / "several", paths, prefill=1, decode=1, preload=[MODEL])
        with running(single) as one, running(kept) as several:
            wait_until(lambda: loaded(several), 120, "the preloaded models to be ready")
            print(json.dumps(asyncio.run(measure({"one": one, "several": several}, args)), indent=2))


def loaded(fleet: RunningFleet) -> bool:
    return all(model["state"] == "ready" for name in fleet.fleet.hosts for model in fleet.status(name)["models"])


async def measure(fleets: dict[str, RunningFleet], args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, dict[str, list[float]]] = {name: {"TTFT ms": [], "tokens/s": []} for name in fleets}
    async with (
        AsyncClient(fleets["one"].fleet, token=TOKEN) as one,
        AsyncClient(fleets["several"].fleet, token=TOKEN) as several,
    ):
        clients = {"one": one, "several": several}
        for client in clients.values():
            await turn(client, args)  # warms up
        for pair in range(args.pairs):
            for name in list(clients)[:: 1 if pair % 2 == 0 else -1]:
                ttft_ms, tokens_s = await turn(clients[name], args)
                figures[name]["TTFT ms"].append(ttft_ms)
                figures[name]["tokens/s"].append(tokens_s)
    found: dict[str, Any] = {}
    for figure in ("TTFT ms", "tokens/s"):
        pairs = zip(figures["several"][figure], figures["one"][figure], strict=True)
        ratios = sorted(several / one for several, one in pairs)
        found[figure] = {
            **{name: round(statistics.median(figures[name][figure]), 2) for name in fleets},
            "several / one": [round(ratio, 3) for ratio in (statistics.median(ratios), ratios[0], ratios[-1])],
        }
    return found


async def turn(client: AsyncClient, args: argparse.Namespace) -> tuple[float, float]:
    """The median TTFT in ms, and the tokens per second of the long answer."""
    seconds = list[float]()
    for number in range(args.requests):
        completion = await client.generate(MODEL, tokens=prompt(number), max_tokens=1, local_prefill=False)
        seconds.append(completion.metrics.ttft)
    answer = await client.generate(MODEL, tokens=prompt(0), max_tokens=args.tokens, ignore_eos=True)
    assert answer.metrics.decode_speed is not None
    return statistics.median(seconds) * 1e3, answer.metrics.decode_speed


def prompt(number: int) -> list[int]:
    """One that no host holds KV of."""
    begins = time.time_ns() % 1000
    return [5 + (begins + number * 31 + at * 7) % 200 for at in range(PROMPT_TOKENS)]


if __name__ == "__main__":
    main()
