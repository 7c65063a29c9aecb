"""The long runs of the fault harness.

    python -m tests.faults matrix [--only TEXT] [--write docs/faults.md]
    python -m tests.faults chaos [--requests 1000] [--concurrency 16] [--seed 1] ...
    python -m tests.faults soak [--requests 20000] ...
    python -m tests.faults turns [--architecture gpt_oss] ...
    python -m tests.faults mixed
    python -m tests.faults fuzz [--minutes 10]

Each starts its own servers on free ports of this machine and prints what it measured. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from tests import tiny_models
from tests.faults import chaos, fuzz, mixed, soak, turns
from tests.faults import fleet as fleets
from tests.faults.cells import cells
from tests.faults.fleet import FaultFleet
from tests.faults.matrix import SAMPLINGS, undisturbed
from tests.faults.report import line, page

S = TypeVar("S", chaos.Settings, soak.Settings, turns.Settings, mixed.Settings)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = options.add_subparsers(required=True)
    matrix = runs.add_parser("matrix", help="every fault at every state")
    matrix.add_argument("--only", default="", help="cells whose name contains this")
    matrix.add_argument("--write", type=Path, help="write the table there")
    matrix.set_defaults(run=run_matrix)
    settings = {"chaos": chaos.Settings, "soak": soak.Settings, "turns": turns.Settings, "mixed": mixed.Settings}
    for name, kind in settings.items():
        run = runs.add_parser(name, help=(sys.modules[kind.__module__].__doc__ or "").strip())
        for field in fields(kind):
            run.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
        run.set_defaults(run=_RUNS[name])
        if name == "turns":
            run.add_argument("--architecture", default="qwen3", help="of tests.tiny_models, e.g. gpt_oss")
    random_bytes = runs.add_parser("fuzz", help="random bytes to the KV receiver")
    random_bytes.add_argument("--minutes", type=float, default=10.0)
    random_bytes.set_defaults(run=lambda args: fuzz.run(args.minutes))
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
    with small_fleet(proxied=False) as fleet:
        report = chaos.run(fleet, _settings(chaos.Settings, args))
    write("\n".join(chaos.table(report)))
    return int(bool(report.problems))


def run_soak(args: argparse.Namespace) -> int:
    with small_fleet(proxied=False, max_kv_bytes=soak.MAX_KV_BYTES) as fleet:
        report = asyncio.run(soak.run(fleet, _settings(soak.Settings, args)))
    write("\n".join(soak.table(report)))
    return int(bool(report.problems))


def run_turns(args: argparse.Namespace) -> int:
    with small_fleet(args.architecture, proxied=False) as fleet:
        done = asyncio.run(turns.run(fleet, _settings(turns.Settings, args)))
    write("\n".join(turns.table(done)))
    return int(bool(turns.problems(done)))


def run_mixed(args: argparse.Namespace) -> int:
    with small_fleet(proxied=False, roles={"prefill": 1, "decode": 1}) as fleet:
        report = asyncio.run(mixed.run(fleet, _settings(mixed.Settings, args)))
    write("\n".join(mixed.table(report)))
    return int(report.ratio > mixed.ALLOWED)


def _settings(kind: type[S], args: argparse.Namespace) -> S:
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


_RUNS = {"chaos": run_chaos, "soak": run_soak, "turns": run_turns, "mixed": run_mixed}


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
