"""What our server and connector cost vLLM's prefill, and vLLM beside our transformers engine, on the CPU.

    python -m benchmarks.vllm_prefill [--rounds 18] [--tokens 2048] [--width 1024] [--python .venv-vllm/bin/python]

A llama of 8 layers and 90 million random parameters (--width 512: 25 million), one compute thread each, steps of 512
tokens, new random prompts, in turn:

    bare          vLLM alone, without connector (benchmarks/vllm_bare.py)
    server        our prefill server with vLLM, whose KV a decode server receives
    transformers  TransformersPrefillEngine, its blocks dropped

`bare` and `server` are timed from the prompt's arrival at the engine until its last rows are computed, `server` with
its wait for the engine and until the last byte of its KV is received. Neither has the token that vLLM needs to end:
`bare` ends with the model's last norm, `server` with the worker's report. The order of the three changes each round.

Prints one JSON object: medians in tokens/s; medians of the ratios of each round, their 95 % interval, least
and greatest; where the difference between `server` and `bare` is, in ms a prompt: its wait, its computation beside a
sender, the rest of its transfer; and what the server's process spends in addition to vLLM alone, in CPU milliseconds
per MB of KV. --python: of the environment with vLLM's CPU build, which `make test` sets up. The machine must be idle
and have two cores.

The model has 90 bytes of KV per million floating-point operations; Qwen3-Coder-30B in bfloat16 has 15. So what a byte
costs shows here six times as much as there.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import psutil

from benchmarks.medians import estimate
from benchmarks.peers.mlx_hosts import ONE_THREAD, FleetServer, fleet_server
from benchmarks.prefill import make_model
from benchmarks.turns import turns
from benchmarks.vllm_bare import CACHE_BYTES, CONTEXT, STEP_TOKENS
from disagg import Client
from disagg.config import EngineOptions
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.fleet.lifecycle.status.http_get import get

PYTHON = Path(".venv-vllm/bin/python")
ROOT = Path(__file__).parents[1]
_PREFILL = f"""
python = "{{python}}"
engine = {{{{name = "vllm", dtype = "float32", device = "cpu", threads = 1, chunk_tokens = {STEP_TOKENS},
    kv_cache_memory_bytes = {CACHE_BYTES}, enforce_eager = true}}}}
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=18)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--python", type=Path, default=PYTHON)
    args = options.parse_args()
    if not args.python.exists():
        options.error(f"{args.python}: no environment with vLLM; make .venv-vllm/.ready, or give --python")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    print(json.dumps(compare(args.rounds, args.tokens, args.width, args.python.absolute()), indent=2))


class Spent(NamedTuple):
    """On one prompt. kv_bytes: received. waiting_s, sending_s: of `seconds`, before and after the computation."""

    seconds: float
    cpu_s: float = 0.0
    kv_bytes: int = 0
    waiting_s: float = 0.0
    sending_s: float = 0.0


Round = Mapping[str, Spent]
"""By the name of the way."""


def compare(rounds: int, tokens: int, width: int, python: Path) -> dict[str, Any]:
    """Measure `rounds` rounds after a warm-up."""
    os.environ["PYTHONPATH"] = str(ROOT)  # for servers in vLLM's environment, where disagg is not installed
    with tempfile.TemporaryDirectory(prefix="disagg-vllm-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = make_model(folder / "model", width)
        options = EngineOptions("transformers", dtype="float32", device="cpu", threads=1, max_held_bytes=0)
        engine = TransformersPrefillEngine(model, CONTEXT, options)
        with fleet_server(model, folder, _PREFILL.format(python=python)) as servers, bare(model, python) as alone:
            ways: Mapping[str, Callable[[list[int]], Spent]] = {
                "bare": alone,
                "server": lambda prompt: through_server(servers, prompt),
                "transformers": lambda prompt: by_transformers(engine, prompt),
            }
            chance = numpy.random.default_rng(0)
            measured: Sequence[Round] = [
                {name: ways[name](chance.integers(8, 1000, tokens).tolist()) for name in turns(list(ways), n)}
                for n in range(rounds + 1)
            ][1:]
    return {
        "tokens": tokens,
        "rounds": rounds,
        "width": width,
        "tokens_per_s": {name: tokens / statistics.median(one[name].seconds for one in measured) for name in ways},
        **figures(measured),
    }


def figures(measured: Sequence[Round]) -> dict[str, Any]:
    """Over the rounds, each of which took its figures one after the other."""
    found: dict[str, Any] = {}
    for name, (way, other) in {
        "server_over_bare": ("server", "bare"),
        "vllm_over_transformers": ("server", "transformers"),
    }.items():
        ratios = [one[other].seconds / one[way].seconds for one in measured]
        found[name], *found[f"{name}_interval"] = estimate(ratios)
        found[f"{name}_range"] = [min(ratios), max(ratios)]
    servers = [one["server"] for one in measured]
    computing_s = [one["server"].seconds - one["server"].waiting_s - one["server"].sending_s for one in measured]
    found["server_minus_bare_ms"] = {
        "waiting": 1e3 * statistics.median(one.waiting_s for one in servers),
        "computing": 1e3
        * statistics.median(spent - one["bare"].seconds for spent, one in zip(computing_s, measured, strict=True)),
        "sending": 1e3 * statistics.median(one.sending_s for one in servers),
    }
    more = [1e9 * (one["server"].cpu_s - one["bare"].cpu_s) / one["server"].kv_bytes for one in measured]
    return {**found, "cpu_ms_per_mb": statistics.median(more)}


@contextmanager
def bare(model: Path, python: Path) -> Iterator[Callable[[list[int]], Spent]]:
    """vLLM alone in a process of its own."""
    command = [str(python), "-P", "-m", "benchmarks.vllm_bare", str(model)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **ONE_THREAD})
    assert process.stdin is not None and process.stdout is not None

    def spent(prompt: list[int]) -> Spent:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(prompt) + "\n")
        process.stdin.flush()
        for line in process.stdout:  # vLLM logs there, too
            if line.startswith('{"seconds"'):
                return Spent(**json.loads(line))
        raise ConnectionError("vLLM alone has ended; its output is above")

    try:
        yield spent
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def through_server(servers: FleetServer, prompt: list[int]) -> Spent:
    """A prompt that is handed over: its wait for the engine, its computation and what is sent after that."""
    with Client(servers.fleet, token=servers.token) as client:
        process = psutil.Process(prefill_process(servers))
        before = cpu_s(process)
        answer = client.generate(
            "model", tokens=[*prompt, 8], max_tokens=1, cache_salt=secrets.token_hex(8), local_prefill=False
        )
        after = cpu_s(process)
    if answer.warnings or answer.metrics.method != "disaggregated":
        raise ConnectionError(f"the hand-off failed: {answer.warnings}")
    parts = answer.metrics.ttft_parts
    seconds = parts.queue + parts.prefill + parts.exposed_transfer
    return Spent(seconds, after - before, answer.metrics.kv_bytes, parts.queue, parts.exposed_transfer)


def prefill_process(servers: FleetServer) -> int:
    """The id of the prefill server's process."""
    host = servers.fleet.hosts["prefill"]
    _, status = get(host.address, host.port, "/status", servers.token, 60.0)
    if status is None:
        raise ConnectionError(f"{host.url} answers without a status")
    return int(status["pid"])


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process, in hundredths of a second."""
    times = process.cpu_times()
    return float(times.user + times.system)


def by_transformers(engine: TransformersPrefillEngine, prompt: list[int]) -> Spent:
    """A prefill whose blocks are dropped."""
    began = time.perf_counter()
    engine.prefill(prompt, lambda block: None, chunk_tokens=STEP_TOKENS)
    return Spent(time.perf_counter() - began)


if __name__ == "__main__":
    main()
