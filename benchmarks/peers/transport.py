"""One KV cache between two processes over loopback TCP: disagg's hand-off beside a bare socket, iperf3, Mooncake, NIXL.

    python -m benchmarks.peers.transport [--mb 805] [--rounds 5] [--only NAME ...]

Prints one JSON object. Every round runs each way of each peer once, in an order that moves on by one each round, so
that a machine's other work hits them alike; each turn has two fresh processes to itself (see pair.py for the clock).
`gb_s` is the median of a peer's best way, GB = 1e9 bytes; `ratio` is disagg's rate over it, from the same rounds. What
is not installed is under `skipped`, by name, with the command that installs it.
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
from benchmarks.peers.pair import Turn, TurnFailed

OURS = "disagg"
Way = Callable[[int], Turn]  # tokens -> one timed transfer of their KV


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that moves bytes, in one or more ways. `absent`: why it cannot run here, None where it can.
    `install`: the one command that mends that."""

    name: str
    ways: Mapping[str, Way]
    version: Callable[[], str]
    absent: Callable[[], str | None] = lambda: None
    install: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 where a peer that is installed failed."""
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
    why_not = {peer.name: peer.absent() for peer in peers}
    here = [peer for peer in peers if why_not[peer.name] is None]
    turns, failed = _measure(here, tokens, rounds)
    rows = {peer.name: summary(turns[peer.name]) | {"version": peer.version()} for peer in here if turns[peer.name]}
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
            peer.name: {"why": why_not[peer.name], "install": peer.install} for peer in peers if why_not[peer.name]
        },
        "failed": failed,
    }


def _measure(
    peers: Sequence[Peer], tokens: int, rounds: int
) -> tuple[dict[str, dict[str, list[Turn]]], dict[str, str]]:
    """Every way's turns, by peer; and the first failure of each way that had one, which is not tried again."""
    turns: dict[str, dict[str, list[Turn]]] = {peer.name: {} for peer in peers}
    failed: dict[str, str] = {}
    ways = [(peer, way) for peer in peers for way in peer.ways]
    for number in range(rounds):
        first = number % max(1, len(ways))
        for peer, way in ways[first:] + ways[:first]:
            if f"{peer.name} {way}" in failed:
                continue
            print(f"round {number + 1} of {rounds}: {peer.name}, {way}", file=sys.stderr)
            try:
                turn = peer.ways[way](tokens)
            except TurnFailed as failure:
                failed[f"{peer.name} {way}"] = str(failure)
                continue
            turns[peer.name].setdefault(way, []).append(turn)
    return turns, failed


def summary(ways: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """A peer's figures: of its best way, and of each."""
    figures = {way: _figures(turns) for way, turns in ways.items()}
    best = max(figures, key=lambda way: figures[way]["gb_s"])
    return {"way": best, **figures[best], "ways": figures}


def _figures(turns: Sequence[Turn]) -> dict[str, Any]:
    rates = [turn.nbytes / turn.seconds / 1e9 for turn in turns]
    return {
        "gb_s": statistics.median(rates),
        "best_gb_s": max(rates),
        "sender_cpu_s_per_gb": statistics.median(turn.sender_cpu_s / turn.nbytes * 1e9 for turn in turns),
        "receiver_cpu_s_per_gb": statistics.median(turn.receiver_cpu_s / turn.nbytes * 1e9 for turn in turns),
        "rates": rates,
    }


def _no_iperf3() -> str | None:
    return None if shutil.which("iperf3") else "there is no iperf3 in PATH"


_EXTRA = "python -m pip install 'disagg[peers]'"
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
