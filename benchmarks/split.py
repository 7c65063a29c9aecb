"""A prompt that two processes of this machine compute, each with one thread, through real servers.

    python -m benchmarks.split [--rounds 5] [--tokens 4000]

    mlx    MLX in front of MLX, after half of the layers: tokens/s of the split / those of both ends alone, added
    torch  transformers in front of MLX, 32 thin layers, after a half, three quarters and all but one of them: time of
           the split / what its slower end computes. (MLX's CPU backend multiplies at a fiftieth of torch's speed: what
           the two gain together cannot be shown on a CPU.)

The ways take turns. One JSON object, medians. The machine must be idle and have two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.mlx_hosts import TRANSFORMERS, FleetServer, fleet_server
from benchmarks.prefill import make_model
from disagg import Client
from disagg.inference.metrics import Metrics

MLX: Final = 'engine = {name = "mlx", dtype = "float32", device = "cpu", threads = 1, max_held_bytes = 0}'
WIDTH: Final = 128
LAYERS: Final = 16
THIN_WIDTH: Final = 64
THIN_LAYERS: Final = 32
WARM_UP: Final = 2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=4000)
    args = options.parse_args()
    load = os.getloadavg()[0]
    result = {"mlx": mlx(args.rounds, args.tokens), "torch": torch(args.rounds, args.tokens)}
    print(json.dumps({"tokens": args.tokens, "rounds": args.rounds, "load": load, **result}, indent=2))


def mlx(rounds: int, tokens: int) -> dict[str, Any]:
    """The sum of two ends of one kind."""
    ways: dict[str, dict[str, Any]] = {
        "split": {"split": LAYERS // 2, "local_prefill": False},
        "prefill": {"alone": "prefill"},
        "decode": {"alone": "decode"},
    }
    found = measured(MLX, (WIDTH, LAYERS), ways, rounds, tokens)
    speeds = {way: [tokens / until_all_layers(one) for one in metrics] for way, metrics in found.items()}
    added = [sum(pair) for pair in zip(speeds["prefill"], speeds["decode"], strict=True)]
    return {
        "layers": [one.layers for one in found["split"]],
        "tokens_per_s": {way: statistics.median(values) for way, values in speeds.items()},
        "split_over_sum": statistics.median(one / both for one, both in zip(speeds["split"], added, strict=True)),
    }


def torch(rounds: int, tokens: int) -> dict[str, Any]:
    """How long the pipe takes, beside its slower end."""
    heads = THIN_LAYERS // 2, THIN_LAYERS * 3 // 4, THIN_LAYERS - 1
    ways: dict[str, dict[str, Any]] = {str(head): {"split": head, "local_prefill": False} for head in heads}
    found = measured(TRANSFORMERS, (THIN_WIDTH, THIN_LAYERS), ways, rounds, tokens)
    return {
        way: {
            "wall_s": statistics.median(together(one) for one in metrics),
            "head_s": statistics.median(one.ttft_parts.prefill for one in metrics),
            "tail_s": statistics.median(one.tail_time for one in metrics),
            "over_slower_end": statistics.median(
                together(one) / max(one.ttft_parts.prefill, one.tail_time) for one in metrics
            ),
        }
        for way, metrics in found.items()
    }


def measured(
    prefill: str, size: tuple[int, int], ways: dict[str, dict[str, Any]], rounds: int, tokens: int
) -> dict[str, list[Metrics]]:
    """The metrics of each way's rounds. prefill: the engine's line of hosts.toml. size: width and layers of the
    model."""
    with tempfile.TemporaryDirectory(prefix="disagg-split-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_model(folder / "model", *size)
        with fleet_server(folder / "model", folder, prefill) as servers:
            return in_turns(servers, ways, rounds, tokens)


def in_turns(
    servers: FleetServer, ways: dict[str, dict[str, Any]], rounds: int, tokens: int
) -> dict[str, list[Metrics]]:
    found: dict[str, list[Metrics]] = {way: [] for way in ways}
    with Client(servers.fleet, token=servers.token) as client:
        for number in range(WARM_UP + rounds):
            for way, options in ways.items():
                prompt = _prompt(tokens, number)
                salt = f"{way}-{number}"
                answer = client.generate("model", tokens=prompt, max_tokens=2, cache_salt=salt, **options)
                found[way].append(answer.metrics)
    return {way: metrics[WARM_UP:] for way, metrics in found.items()}


def until_all_layers(metrics: Metrics) -> float:
    """Seconds from the request to the KV of all layers of its prompt."""
    return metrics.ttft - metrics.ttft_parts.first_step


def together(metrics: Metrics) -> float:
    """Seconds from the head's beginning to the tail's end."""
    parts = metrics.ttft_parts
    return parts.prefill + parts.exposed_transfer + parts.tail


def _prompt(tokens: int, number: int) -> Sequence[int]:
    return [(7 * place + number) % 900 + 8 for place in range(tokens)]


if __name__ == "__main__":
    main()
