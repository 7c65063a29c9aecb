"""What a greedy key costs the others: their TTFT beside it, and alone.

    python -m benchmarks.fair_shares [--answers 20]

Simulated: a DGX Spark and an M3 Ultra as servers of this machine, whose engines only wait, and a gateway in front of
them. The model has 17 billion parameters and one small KV head, so that the machine is not busy with moving KV. Three
modest keys stream one answer after another; first alone, then beside a greedy key that has 16 requests of 32 answers
each under way all the time, by /v1/parallel. Every answer has 64 tokens, every prompt is another one of 512.

`ratio` compares the modest keys' TTFT beside the greedy key with that alone; the goal is at most 2, for p50 and p95.
`greedy`: answers of the greedy key meanwhile, by status, and complete ones per second. One JSON object; times in
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.gateway import simulated
from disagg.gateway.clients.keys import KeyFile
from disagg.token import GATEWAY_FOLDER_VARIABLE

MODEST: Final = 3
REQUESTS: Final = 16
ITEMS: Final = 32
TOKENS: Final = 64
PROMPT: Final = 512
GOAL: Final = 2.0
TIMEOUT_S: Final = 600.0
QUEUE: Final = 384  # answers of the greedy key that wait before the modest keys begin
SETTLED_S: Final = 5.0  # after which what the burst of the greedy key's requests costs is over
STANDS_S: Final = 120.0

MODEL: Final = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 20,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float16",
}

_numbers = itertools.count()


@dataclass
class Greedy:
    """What became of the greedy key's answers, by status."""

    statuses: Counter[int] = field(default_factory=Counter)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--answers", type=int, default=20, help="of each modest key, alone and beside the greedy one")
    args = options.parse_args()
    print(json.dumps(measure(args.answers), indent=2))


def measure(answers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="disagg-shares-") as name:
        os.environ[GATEWAY_FOLDER_VARIABLE] = name
        (Path(name) / "config.json").write_text(json.dumps(MODEL))
        with simulated(Path(name), f"{name}/config.json") as (fleet, _):
            file = KeyFile.of(fleet)
            keys = [file.add(f"modest {number}") for number in range(MODEST)]
            greedy, watching = file.add("greedy"), file.add("watching", monitor=True)
            return asyncio.run(compare(fleet.hosts["gateway"].url, keys, greedy, watching, answers))


async def compare(url: str, modest: Sequence[str], greedy: str, watching: str, answers: int) -> dict[str, Any]:
    load = [os.getloadavg()[0]]
    await ask(url, modest, 2)  # warm up
    alone = await ask(url, modest, answers)
    counted = Greedy()
    harm = [asyncio.ensure_future(be_greedy(url, greedy, counted)) for _ in range(REQUESTS)]
    try:
        await queue_stands(url, watching)
        before, began = counted.statuses.copy(), time.monotonic()
        beside = await ask(url, modest, answers)
        seconds = time.monotonic() - began
    finally:
        for task in harm:
            task.cancel()
        await asyncio.wait(harm)
    found = counted.statuses - before
    load.append(os.getloadavg()[0])
    return {
        **figures(alone, beside),
        "greedy": {"statuses": dict(found), "answers_s": found[httpx.codes.OK] / seconds},
        "load": load,
    }


def figures(alone: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """The TTFTs of both, and how they compare."""
    ttft = {"alone": percentiles(alone), "beside": percentiles(beside)}
    ratio = {name: ttft["beside"][name] / ttft["alone"][name] for name in ttft["alone"]}
    return {
        "answers": {"alone": len(alone), "beside": len(beside)},
        "ttft_s": ttft,
        "ratio": {**ratio, "goal": GOAL, "met": max(ratio.values()) <= GOAL},
        "longest_s": max(beside),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[min(len(ordered) - 1, share * len(ordered) // 100)] for share in (50, 95)}


async def ask(url: str, keys: Sequence[str], answers: int) -> list[float]:
    """The TTFT of so many answers of each key, one after the other; all keys at the same time."""

    async def one(key: str) -> list[float]:
        async with http(url, key) as client:
            return [await first_token_s(client) for _ in range(answers)]

    return [ttft for of_key in await asyncio.gather(*map(one, keys)) for ttft in of_key]


async def first_token_s(client: httpx.AsyncClient) -> float:
    """Seconds to the first token of an answer, which is read to its end."""
    began, first, last = time.perf_counter(), 0.0, ""
    async with client.stream("POST", "/v1/completions", json={**body(), "stream": True}) as answer:
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"a modest key was answered {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                first, last = first or time.perf_counter() - began, line
    if last != "data: [DONE]":
        raise SystemExit(f"an answer of a modest key was cut: {last}")
    return first


async def be_greedy(url: str, key: str, counted: Greedy) -> None:
    """One request after the other, each for many answers."""
    async with http(url, key) as client:
        while True:
            results = (await client.post("/v1/parallel", json={"requests": [body() for _ in range(ITEMS)]})).json()
            counted.statuses.update(one["status"] for one in results["results"])


async def queue_stands(url: str, key: str) -> None:
    """Wait until many answers of the greedy key wait."""
    async with http(url, key) as client, asyncio.timeout(STANDS_S):
        while waiting(await client.get("/metrics")) < QUEUE:
            await asyncio.sleep(0.2)
    await asyncio.sleep(SETTLED_S)


def waiting(answer: httpx.Response) -> float:
    lines = (line for line in answer.text.splitlines() if line.startswith("vllm:num_requests_waiting{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def http(url: str, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)


def body() -> dict[str, Any]:
    return {"model": "model", "prompt": next(prompts()), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


def prompts() -> Iterator[list[int]]:
    """Prompts that no host has seen."""
    while True:
        number = next(_numbers)
        yield [number % 900 + 8, number // 900 % 900 + 8, *((7 * at + number) % 900 + 8 for at in range(PROMPT - 2))]


if __name__ == "__main__":
    main()
