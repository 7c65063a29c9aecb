"""The long runs of the fault harness.

    python -m tests.faults matrix [--only TEXT] [--write docs/faults.md] [--resume]
    python -m tests.faults kept [--only TEXT] [--write docs/faults.md] [--resume]
    python -m tests.faults chaos [--requests 1000] [--concurrency 16] [--seed 1] ...
    python -m tests.faults heads [--times 40] ...
    python -m tests.faults soak [--requests 20000] ...
    python -m tests.faults turns [--architecture gpt_oss] ...
    python -m tests.faults mixed
    python -m tests.faults poison [--times 10]
    python -m tests.faults fuzz [--minutes 10]

Each starts its own servers on free ports of this machine and prints what it measured. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from tests import tiny_models
from tests.engines.architectures import configs
from tests.faults import chaos, fuzz, heads, kept, linked, mixed, poison, record, soak, turns
from tests.faults import fleet as fleets
from tests.faults.cells import cells
from tests.faults.fleet import FaultFleet
from tests.faults.linked import LinkedFleet
from tests.faults.matrix import SAMPLINGS, Matrix, broken
from tests.faults.report import line, page

RESULTS = Path("build/faults.jsonl")
KEPT_RESULTS = Path("build/faults-of-models.jsonl")
S = TypeVar("S", chaos.Settings, heads.Settings, soak.Settings, turns.Settings, mixed.Settings, poison.Settings)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = options.add_subparsers(required=True)
    matrix = runs.add_parser("matrix", help="every fault at every state")
    matrix.add_argument("--only", default="", help="cells whose name contains this")
    matrix.add_argument("--write", type=Path, help="write the table there")
    matrix.add_argument("--resume", action="store_true", help=f"go on after the results in {RESULTS}")
    matrix.set_defaults(run=run_matrix)
    models = runs.add_parser("kept", help="hosts with several models")
    models.add_argument("--only", default="", help="rows whose name contains this")
    models.add_argument("--write", type=Path, help="write the table there")
    models.add_argument("--resume", action="store_true", help=f"go on after the rows that hold in {KEPT_RESULTS}")
    models.set_defaults(run=run_kept)
    settings = {
        "chaos": chaos.Settings,
        "heads": heads.Settings,
        "soak": soak.Settings,
        "turns": turns.Settings,
        "mixed": mixed.Settings,
        "poison": poison.Settings,
    }
    for name, kind in settings.items():
        run = runs.add_parser(name, help=(sys.modules[kind.__module__].__doc__ or "").strip())
        for field in fields(kind):
            run.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
        run.set_defaults(run=_RUNS[name])
        if name == "turns":
            run.add_argument(
                "--architecture", default="qwen3", help="of docs/architectures.md, e.g. gpt_oss, qwen3_next"
            )
    random_bytes = runs.add_parser("fuzz", help="random bytes to the KV receiver")
    random_bytes.add_argument("--minutes", type=float, default=10.0)
    random_bytes.set_defaults(run=lambda args: fuzz.run(args.minutes))
    args = options.parse_args()
    sys.exit(args.run(args))


def run_matrix(args: argparse.Namespace) -> int:
    rows = [(cell, sampling) for cell in cells() for sampling in SAMPLINGS if args.only in cell.id]
    results = record.Results(RESULTS, resume=args.resume)
    began = time.monotonic()
    for on_cables in (False, True):
        missing = [row for row in rows if row[0].linked is on_cables and row not in results]
        while missing := _some_rows(on_cables, missing, results):
            pass
    done = [results[row] for row in rows]
    write(f"{len(done)} requests, {sum(bool(one.problems) for one in done)} bad; {time.monotonic() - began:.0f} s")
    if args.write:
        before = args.write.read_text(encoding="utf-8") if args.write.exists() else ""
        args.write.write_text(kept.with_part(page(done), kept.part_of(before)), encoding="utf-8")
    return int(any(result.problems for result in done))


def _some_rows(on_cables: bool, rows: list[record.Row], results: record.Results) -> list[record.Row]:
    """Run rows on one fleet; the rest, if the fleet does not heal after a row, which is then a bad one."""
    if not rows:
        return []
    with linked_fleet() if on_cables else small_fleet() as fleet:
        matrix = Matrix(fleet)
        for number, row in enumerate(rows, 1):
            began = time.monotonic()
            try:
                result = matrix.run(*row)
            except Exception as error:  # noqa: BLE001 - whatever the harness meets is a bad row, not the end of the run
                results.add(broken(*row, error))
                return rows[number:]
            results.add(result)
            write(f"{line(result)} [{number} of {len(rows)}, {time.monotonic() - began:.1f} s with healing]")
    return []


def run_kept(args: argparse.Namespace) -> int:
    known = kept.read(KEPT_RESULTS) if args.resume else {}
    KEPT_RESULTS.parent.mkdir(exist_ok=True)
    if not args.resume:
        KEPT_RESULTS.unlink(missing_ok=True)
    cells = [cell for cell in kept.cells() if args.only in cell.id]
    if missing := [cell for cell in cells if cell.id not in known]:
        with tempfile.TemporaryDirectory() as name, kept.kept_faults(Path(name)) as faults:
            for cell in missing:
                known[cell.id] = result = faults.run(cell)
                write(kept.line(result))
                with KEPT_RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    done = [known[cell.id] for cell in cells]
    if args.write:
        page_before = args.write.read_text(encoding="utf-8")
        args.write.write_text(kept.with_part(page_before, kept.part(done)), encoding="utf-8")
    return int(any(result.problems for result in done))


def run_chaos(args: argparse.Namespace) -> int:
    with small_fleet(proxied=False) as fleet:
        report = chaos.run(fleet, _settings(chaos.Settings, args))
    write("\n".join(chaos.table(report)))
    return int(bool(report.problems))


def run_heads(args: argparse.Namespace) -> int:
    with small_fleet(proxied=False, roles={"prefill": 1, "decode": 1}) as fleet:
        report = asyncio.run(heads.run(fleet, _settings(heads.Settings, args)))
    write("\n".join(heads.table(report)))
    return int(report.wrong > 0)


def run_soak(args: argparse.Namespace) -> int:
    with small_fleet(proxied=False, max_kv_bytes=soak.MAX_KV_BYTES) as fleet:
        report = asyncio.run(soak.run(fleet, _settings(soak.Settings, args), write))
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


def run_poison(args: argparse.Namespace) -> int:
    with small_fleet(proxied=False, max_kv_bytes=soak.MAX_KV_BYTES) as fleet:
        report = asyncio.run(poison.run(fleet, _settings(poison.Settings, args)))
    write("\n".join(poison.table(report)))
    return int(bool(report.problems))


def _settings(kind: type[S], args: argparse.Namespace) -> S:
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


_RUNS = {
    "chaos": run_chaos,
    "heads": run_heads,
    "soak": run_soak,
    "turns": run_turns,
    "mixed": run_mixed,
    "poison": run_poison,
}


def checkpoint(architecture: str, folder: Path) -> Path:
    """The tiny model of this architecture, written into `folder`."""
    if architecture in tiny_models.ARCHITECTURES:
        return tiny_models.make(architecture, folder)
    return tiny_models.make_from(configs.config(architecture), folder)


@contextmanager
def small_fleet(architecture: str = "qwen3", **options: Any) -> Iterator[FaultFleet]:
    """Two prefill and two decode servers of a tiny model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = checkpoint(architecture, folder / "model")
        with fleets.running(folder, model, **options) as fleet:
            yield fleet


@contextmanager
def linked_fleet() -> Iterator[LinkedFleet]:
    """The same on cables that can be cut, with clocks that can jump."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with linked.running(folder, tiny_models.make("qwen3", folder / "model")) as fleet:
            yield fleet


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
