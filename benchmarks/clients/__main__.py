"""python -m benchmarks.clients: see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import clients, gateway_load
from benchmarks.clients.measure import Measured, measured
from benchmarks.clients.page import page
from benchmarks.clients.table import CLIENTS, MeasuredClient

CONTEXT: Final = 32768
"""Tokens of both models: agents begin with thousands."""


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.clients",
        description=clients.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("clients", nargs="*", metavar="CLIENT", help="only these")
    options.add_argument("--again", action="store_true", help="also those that were measured before")
    options.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "disagg" / "clients")
    options.add_argument("--page", type=Path, help="write the table of all that were measured there")
    args = options.parse_args()
    known = {client.name: client for client in CLIENTS}
    if unknown := set(args.clients) - known.keys():
        options.error(f"there is no client {min(unknown)}: they are {', '.join(known)}")
    wanted = [known[name] for name in args.clients] or list(CLIENTS)
    measure([one for one in wanted if args.again or not _result(args.cache, one).exists()], args.cache)
    if args.page is not None:
        found = [_result(args.cache, one) for one in CLIENTS]
        before = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
        text = page([Measured.from_bytes(one.read_bytes()) for one in found if one.exists()], before)
        args.page.write_text(text, encoding="utf-8")


def measure(wanted: Sequence[MeasuredClient], cache: Path) -> None:
    """Measure these clients, and keep what came of each."""
    if not wanted:
        return
    with (
        tempfile.TemporaryDirectory(prefix="disagg-clients-") as name,
        gateway_load.running(Path(name), CONTEXT) as (fleet, _),
    ):
        url, model = fleet.hosts["gateway"].url, next(iter(fleet.models))
        for client in wanted:
            came = measured(client, cache, url, model)
            result = _result(cache, client)
            result.parent.mkdir(parents=True, exist_ok=True)
            result.write_bytes(came.to_bytes())
            works = sum(one.works for one in came.features)
            print(f"{came.name} {came.version}: {works} of {len(came.features)} in {came.seconds} s {came.problem}")
            for feature in came.features:
                if not feature.works:
                    print(f"  {feature.feature}: {feature.note}")
            sys.stdout.flush()


def _result(cache: Path, client: MeasuredClient) -> Path:
    return cache / "results" / f"{client.name}.json"


if __name__ == "__main__":
    main()
