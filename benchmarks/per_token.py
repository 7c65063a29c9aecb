"""What a token of a streamed answer costs beside the model's step: microseconds of CPU in the client, in the event loop
of the decode server and on its engine's thread.

    python -m benchmarks.per_token [--streams 1 4 16 32] [--models simulated demo] [--rounds 5] [--against DIR] [--json]

simulated: no model runs, a step takes 4 ms. demo: the demo model with MLX on a CPU, whose own computing is on the
engine's thread and in `rest`, all else that the server's process uses. The client is `disagg.AsyncClient`, whose
answers are read as they arrive, over TLS. Requests that begin or end are not counted. Wall time is of no use here: on
shared cores it varies by more than all of this.

--against: another checkout of disagg with its own .venv; both run in turns, so that load of others meets both.
Medians of rounds; [low, high] is the 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.medians import estimate
from benchmarks.turns import turns

STREAMS: Final = (1, 4, 16, 32)
TOKENS: Final = {"simulated": 800, "demo": 240}
PARTS: Final = ("client", "loop", "engine", "rest")
WIDTH: Final = 150
RUN: Final = Path(__file__).with_name("per_token_run.py")
HERE: Final = Path(__file__).parents[1]

Runs = dict[tuple[str, str, int], list[dict[str, float]]]
"""By checkout, model and number of streams."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    options.add_argument("--models", nargs="+", choices=tuple(TOKENS), default=list(TOKENS))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, help="of an answer")
    options.add_argument("--against", type=Path, help="another checkout, with its own .venv")
    options.add_argument("--json", action="store_true")
    args = options.parse_args()
    checkouts = {"here": HERE, **({"against": args.against.resolve()} if args.against else {})}
    load = [os.getloadavg()[0]]
    runs = measure(checkouts, args.models, args.streams, args.rounds, args.tokens)
    load.append(os.getloadavg()[0])
    figures = summary(runs)
    if args.json:
        print(
            json.dumps(
                {"cores": os.cpu_count(), "load": load, "rounds": args.rounds, "us_per_token": figures}, indent=2
            )
        )
        return
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table(figures, f"us of CPU per token; {os.cpu_count()} cores, load {load[0]:.1f} to {load[1]:.1f}"))


def measure(
    checkouts: dict[str, Path], models: Sequence[str], streams: Sequence[int], rounds: int, tokens: int | None
) -> Runs:
    runs: Runs = {}
    for model in models:
        with ExitStack() as stack:
            clients = {name: stack.enter_context(client(path, model)) for name, path in checkouts.items()}
            for number in range(rounds):
                for together in streams:
                    for name in turns(list(clients), number):
                        print(f"round {number + 1} of {rounds}: {model}, {together}, {name}", file=sys.stderr)
                        measured = ask(clients[name], together, tokens or TOKENS[model])
                        runs.setdefault((name, model, together), []).append(measured)
    return runs


@contextmanager
def client(checkout: Path, model: str) -> Iterator[subprocess.Popen[str]]:
    """The client of a checkout, with a server, ready."""
    with tempfile.TemporaryDirectory(prefix="disagg-per-token-") as folder:
        python = checkout / ".venv/bin/python"
        argv = [str(python) if python.exists() else sys.executable, "-P", str(RUN), "client", folder, model]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        started = subprocess.Popen(
            argv, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with started as process:  # closes its stdin, which ends it, and waits
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"{checkout}: the client or its server did not start")
            yield process


def ask(process: subprocess.Popen[str], streams: int, tokens: int) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{streams} {tokens}\n")
    process.stdin.flush()
    found: dict[str, float] = json.loads(process.stdout.readline())
    return found


def summary(runs: Runs) -> list[dict[str, Any]]:
    """One row for each model, number of streams and checkout. total: client, loop and engine."""
    rows = []
    for (name, model, streams), measured in sorted(runs.items(), key=lambda one: (one[0][1], one[0][2], one[0][0])):
        row: dict[str, Any] = {"model": model, "streams": streams, "checkout": name}
        for part in PARTS:
            row[part] = estimate([one[part] for one in measured])._asdict()
        row["total"] = estimate([sum(one[part] for part in PARTS[:3]) for one in measured])._asdict()
        row["tokens per chunk"] = estimate([one["chunk"] for one in measured]).median
        row["ms"] = estimate([one["ms"] for one in measured]).median
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], heading: str) -> Table:
    shown = Table(title=heading)
    for name in ("model", "streams", "checkout", *PARTS, "client + loop + engine", "tokens per chunk", "ms"):
        shown.add_column(name)
    for row in rows:
        costs = (row[part] for part in (*PARTS, "total"))
        shown.add_row(
            row["model"],
            str(row["streams"]),
            row["checkout"],
            *(f"{cost['median']:.0f} [{cost['low']:.0f}, {cost['high']:.0f}]" for cost in costs),
            f"{row['tokens per chunk']:.2f}",
            f"{row['ms']:.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
