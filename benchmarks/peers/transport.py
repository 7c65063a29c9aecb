"""Move one KV cache between two processes over loopback TCP: disagg's hand-off, a bare socket, iperf3, Mooncake, NIXL.

    python -m benchmarks.peers.transport [--mb 805] [--rounds 5] [--only NAME ...]

Prints one JSON object. Every round runs each way of each peer once, in an order that is rotated by one each round, so
that the machine's other load affects all alike; each transfer has two new processes (see pair.py for the clock).
`gb_s` is the median of a peer's best way, GB = 1e9 bytes; `ratio` is disagg's rate divided by it, from the same rounds.
`skipped` has the peers that are not installed, with the command that installs each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.peers import bare_socket, handoff, iperf, memory, mooncake_tcp, nixl_tcp, pair
from benchmarks.peers.installed import import_error, package
from benchmarks.peers.pair import TimedTransfer, TransferFailed
from benchmarks.turns import turns
from disagg.extras import install

OURS = "disagg"
Way = Callable[[int], TimedTransfer]  # tokens -> one timed transfer of their KV


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that moves bytes, in one or more ways. absent: why it cannot run here, None if it can. install: the
    command that installs it."""

    name: str
    ways: Mapping[str, Way]
    version: Callable[[], str]
    absent: Callable[[], str | None] = lambda: None
    install: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a peer that is installed failed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mb", type=float, default=memory.DEFAULT_MB, help="megabytes per transfer")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", nargs="+", choices=[peer.name for peer in PEERS], help="these peers alone")
    args = options.parse_args(argv)
    chosen = [peer for peer in PEERS if args.only is None or peer.name in args.only]
    result = compare(chosen, memory.tokens_of(args.mb), args.rounds)
    print(json.dumps(result, indent=2))
    return 1 if result["failed"] else 0


def compare(peers: Sequence[Peer], tokens: int, rounds: int) -> dict[str, Any]:
    """What `python -m benchmarks.peers.transport` prints."""
    absent = {peer.name: peer.absent() for peer in peers}
    here = [peer for peer in peers if absent[peer.name] is None]
    transfers, failed = _measure(here, tokens, rounds)
    rows = {
        peer.name: summary(transfers[peer.name]) | {"version": peer.version()} for peer in here if transfers[peer.name]
    }
    ours = rows.get(OURS)
    for name, row in rows.items():
        if ours is not None and name != OURS:
            row["ratio"] = ours["gb_s"] / row["gb_s"]
    return {
        "bytes": memory.nbytes_of(tokens),
        "rounds": rounds,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "peers": rows,
        "skipped": {
            peer.name: {"why": absent[peer.name], "install": peer.install} for peer in peers if absent[peer.name]
        },
        "failed": failed,
    }


def _measure(
    peers: Sequence[Peer], tokens: int, rounds: int
) -> tuple[dict[str, dict[str, list[TimedTransfer]]], dict[str, str]]:
    """Every way's transfers, by peer, and the error of each way that failed; a failed way is not run again."""
    transfers: dict[str, dict[str, list[TimedTransfer]]] = {peer.name: {} for peer in peers}
    failed: dict[str, str] = {}
    ways = [(peer, way) for peer in peers for way in peer.ways]
    for number in range(rounds):
        for peer, way in turns(ways, number):
            if f"{peer.name} {way}" in failed:
                continue
            print(f"round {number + 1} of {rounds}: {peer.name}, {way}", file=sys.stderr)
            try:
                transfer = peer.ways[way](tokens)
            except TransferFailed as failure:
                failed[f"{peer.name} {way}"] = str(failure)
                continue
            transfers[peer.name].setdefault(way, []).append(transfer)
    return transfers, failed


def summary(ways: Mapping[str, Sequence[TimedTransfer]]) -> dict[str, Any]:
    """A peer's figures: of its best way, and of each."""
    figures = {way: _figures(transfers) for way, transfers in ways.items()}
    best = max(figures, key=lambda way: figures[way]["gb_s"])
    return {"way": best, **figures[best], "ways": figures}


def _figures(transfers: Sequence[TimedTransfer]) -> dict[str, Any]:
    rates = [transfer.nbytes / transfer.seconds / 1e9 for transfer in transfers]
    return {
        "gb_s": statistics.median(rates),
        "best_gb_s": max(rates),
        "sender_cpu_s_per_gb": statistics.median(
            transfer.sender_cpu_s / transfer.nbytes * 1e9 for transfer in transfers
        ),
        "receiver_cpu_s_per_gb": statistics.median(
            transfer.receiver_cpu_s / transfer.nbytes * 1e9 for transfer in transfers
        ),
        "rates": rates,
    }


def _no_iperf3() -> str | None:
    return None if shutil.which("iperf3") else "iperf3 is not in PATH"


_EXTRA = install("peers")
PEERS = (
    Peer(OURS, {"push": partial(pair.run, handoff.TRANSPORT)}, partial(package, "disagg")),
    Peer("bare-socket", {"push": partial(pair.run, bare_socket.TRANSPORT)}, lambda: "Python's socket module"),
    Peer(
        "iperf3",
        {"push": lambda tokens: iperf.run(memory.nbytes_of(tokens))},
        lambda: f"iperf3 {iperf.version()}",
        _no_iperf3,
        "sudo apt-get install -y iperf3",
    ),
    Peer(
        "mooncake",
        {"write": partial(pair.run, mooncake_tcp.WRITE), "read": partial(pair.run, mooncake_tcp.READ)},
        partial(
            package,
            "mooncake-transfer-engine-non-cuda",
            "mooncake-transfer-engine",
            "mooncake-transfer-engine-cuda13",
        ),
        partial(import_error, "mooncake.engine"),
        f"sudo apt-get install -y libibverbs1 libnuma1 libcurl4 && {_EXTRA}",
    ),
    Peer(
        "nixl",
        {
            "read": partial(pair.run, nixl_tcp.READ),
            "write": partial(pair.run, nixl_tcp.WRITE),
            "write-spinning": partial(pair.run, nixl_tcp.WRITE_SPINNING),
        },
        partial(package, "nixl"),
        partial(import_error, "nixl._api"),
        _EXTRA,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
