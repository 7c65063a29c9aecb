"""What our server and connector cost vLLM's prefill, and vLLM beside our transformers engine, on the CPU.

    python -m benchmarks.vllm_prefill [--rounds 9] [--tokens 2048] [--python .venv-vllm/bin/python]

A llama of 25 million random parameters, one compute thread each, steps of 512 tokens, new random prompts, in turn:

    bare          vLLM alone, without connector (benchmarks/vllm_bare.py)
    server        our prefill server with vLLM, whose KV a decode server receives
    transformers  TransformersPrefillEngine, its blocks dropped

Each is timed from the prompt's arrival at the engine until it is computed: `server` with its wait for the engine and
until the last byte of its KV is received, `bare` with the token that vLLM cannot do without. The order of the three
changes each round. Prints one JSON object: medians in tokens/s, and medians of the ratios of each round. --python: of
the environment with vLLM's CPU build, which `make test` sets up. The machine must be idle and have two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from benchmarks.peers.mlx_hosts import ONE_THREAD, FleetServer, fleet_server
from benchmarks.prefill import make_model
from benchmarks.vllm_bare import CACHE_BYTES, CONTEXT, STEP_TOKENS
from disagg import Client
from disagg.config import EngineOptions
from disagg.engines.transformers.engine import TransformersPrefillEngine

PYTHON = Path(".venv-vllm/bin/python")
ROOT = Path(__file__).parents[1]
_PREFILL = f"""
python = "{{python}}"
engine = {{{{name = "vllm", dtype = "float32", device = "cpu", threads = 1, chunk_tokens = {STEP_TOKENS},
    kv_cache_memory_bytes = {CACHE_BYTES}, enforce_eager = true}}}}
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--python", type=Path, default=PYTHON)
    args = options.parse_args()
    if not args.python.exists():
        options.error(f"{args.python}: no environment with vLLM; make .venv-vllm/.ready, or give --python")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    print(json.dumps(compare(args.rounds, args.tokens, args.python.absolute()), indent=2))


def compare(rounds: int, tokens: int, python: Path) -> dict[str, Any]:
    """Measure `rounds` rounds after a warm-up."""
    os.environ["PYTHONPATH"] = str(ROOT)  # for servers in vLLM's environment, where disagg is not installed
    with tempfile.TemporaryDirectory(prefix="disagg-vllm-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = make_model(folder / "model")
        options = EngineOptions("transformers", dtype="float32", device="cpu", threads=1, max_held_bytes=0)
        engine = TransformersPrefillEngine(model, CONTEXT, options)
        with fleet_server(model, folder, _PREFILL.format(python=python)) as servers, bare(model, python) as alone:
            ways: Mapping[str, Callable[[list[int]], float]] = {
                "bare": alone,
                "server": lambda prompt: through_server(servers, prompt),
                "transformers": lambda prompt: by_transformers(engine, prompt),
            }
            chance = numpy.random.default_rng(0)
            measured = [
                {name: tokens / ways[name](chance.integers(8, 1000, tokens).tolist()) for name in turns(list(ways), n)}
                for n in range(rounds + 1)
            ][1:]
    return {
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_s": {name: statistics.median(one[name] for one in measured) for name in ways},
        **ratios(measured),
    }


def turns(names: list[str], number: int) -> list[str]:
    """The order of a round: each name comes first, second and last equally often."""
    first = number % len(names)
    return names[first:] + names[:first]


def ratios(measured: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds, each of which took its figures one after the other."""
    return {
        "server_over_bare": statistics.median(one["server"] / one["bare"] for one in measured),
        "vllm_over_transformers": statistics.median(one["server"] / one["transformers"] for one in measured),
    }


@contextmanager
def bare(model: Path, python: Path) -> Iterator[Callable[[list[int]], float]]:
    """vLLM alone in a process of its own: tokens -> seconds."""
    command = [str(python), "-P", "-m", "benchmarks.vllm_bare", str(model)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **ONE_THREAD})
    assert process.stdin is not None and process.stdout is not None

    def seconds(prompt: list[int]) -> float:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(prompt) + "\n")
        process.stdin.flush()
        for line in process.stdout:  # vLLM logs there, too
            if line.startswith("seconds "):
                return float(line.removeprefix("seconds "))
        raise ConnectionError("vLLM alone has ended; its output is above")

    try:
        yield seconds
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def through_server(servers: FleetServer, prompt: list[int]) -> float:
    """Seconds that a prompt which is handed over waits for the engine, is computed and is sent."""
    with Client(servers.fleet, token=servers.token) as client:
        answer = client.generate(
            "model", tokens=[*prompt, 8], max_tokens=1, cache_salt=secrets.token_hex(8), local_prefill=False
        )
    if answer.warnings or answer.metrics.method != "disaggregated":
        raise ConnectionError(f"the hand-off failed: {answer.warnings}")
    parts = answer.metrics.ttft_parts
    return parts.queue + parts.prefill + parts.exposed_transfer


def by_transformers(engine: TransformersPrefillEngine, prompt: list[int]) -> float:
    """Seconds of a prefill whose blocks are dropped."""
    began = time.perf_counter()
    engine.prefill(prompt, lambda block: None, chunk_tokens=STEP_TOKENS)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
