"""The time to the first token beyond the models' own work, on real servers of this machine.

    python -m benchmarks.ttft [--requests 30]

Prompts of several lengths through both servers, one at a time. `beyond_ms`: time to first token without prefill
compute, exposed transfer and one decode step: HTTP, scheduling, tokenising, ingest. One JSON object, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import same_model
from benchmarks.peers.mlx_hosts import FleetServer, fleet_server
from disagg import Client
from disagg.inference.metrics import Metrics

LENGTHS = (64, 1000, 3000)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=30, help="of each length")
    args = options.parse_args()
    print(json.dumps(measure(args.requests), indent=2))


def measure(requests: int) -> dict[str, Any]:
    """By prompt length."""
    with tempfile.TemporaryDirectory(prefix="disagg-ttft-") as name:
        folder = Path(name)
        same_model.write(same_model.DEMO_MODEL, folder / "model")
        with fleet_server(folder / "model", folder) as servers:
            return {
                "requests": requests,
                "prompt_tokens": {str(length): one(servers, length, requests) for length in LENGTHS},
            }


def one(servers: FleetServer, length: int, requests: int) -> dict[str, float]:
    """Medians in milliseconds; the first request warms up."""
    with Client(servers.fleet, token=servers.token) as client:
        answers = [
            client.generate(
                "model", tokens=[(7 * i + k) % 900 + 8 for i in range(length)], max_tokens=4, cache_salt=f"{k}"
            )
            for k in range(requests + 1)
        ]
    measured = [answer.metrics for answer in answers[1:]]
    return {
        "ttft_ms": 1e3 * statistics.median(m.ttft for m in measured),
        "prefill_ms": 1e3 * statistics.median(m.ttft_parts.prefill for m in measured),
        "beyond_ms": 1e3 * statistics.median(beyond(m) for m in measured),
    }


def beyond(metrics: Metrics) -> float:
    """Seconds."""
    parts = metrics.ttft_parts
    return metrics.ttft - parts.prefill - parts.exposed_transfer - parts.first_step


if __name__ == "__main__":
    main()
