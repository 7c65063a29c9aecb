"""The long runs of the fault harness.

    python -m tests.faults matrix [--only TEXT] [--write docs/faults.md]
    python -m tests.faults chaos [--requests N] [--seed N] ...

Each starts its own servers on free ports of this machine and prints what it measured. Linux only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests import tiny_models
from tests.faults import chaos
from tests.faults import fleet as fleets
from tests.faults.cells import cells
from tests.faults.fleet import FaultFleet
from tests.faults.matrix import SAMPLINGS, undisturbed
from tests.faults.report import line, page


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = options.add_subparsers(required=True)
    matrix = runs.add_parser("matrix", help="every fault at every state")
    matrix.add_argument("--only", default="", help="cells whose name contains this")
    matrix.add_argument("--write", type=Path, help="write the table there")
    matrix.set_defaults(run=run_matrix)
    wild = runs.add_parser("chaos", help="many requests while hosts are killed and frozen")
    for name, value in asdict(chaos.Settings()).items():
        wild.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    wild.set_defaults(run=run_chaos)
    args = options.parse_args()
    sys.exit(args.run(args))


def run_matrix(args: argparse.Namespace) -> int:
    results = []
    with small_fleet() as fleet:
        matrix = undisturbed(fleet)
        for cell in cells():
            for sampling in SAMPLINGS:
                if args.only in cell.id:
                    results.append(matrix.run(cell, sampling))
                    write(line(results[-1]))
    if args.write:
        args.write.write_text(page(results), encoding="utf-8")
    return int(any(result.problems for result in results))


def run_chaos(args: argparse.Namespace) -> int:
    settings = chaos.Settings(**{name: getattr(args, name) for name in asdict(chaos.Settings())})
    with small_fleet(proxied=False) as fleet:
        report = chaos.run(fleet, settings)
    write("\n".join(chaos.table(report)))
    return int(bool(report.problems))


@contextmanager
def small_fleet(architecture: str = "qwen3", **options: Any) -> Iterator[FaultFleet]:
    """Two prefill and two decode servers of a tiny model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_models.make(architecture, folder / "model")
        with fleets.running(folder, model, **options) as fleet:
            yield fleet


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
