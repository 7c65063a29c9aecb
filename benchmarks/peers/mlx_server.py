"""Decode tokens per second of disagg's decode server and of mlx_lm.server, on the same model and prompts.

    python -m benchmarks.peers.mlx_server [--model FOLDER] [--tokens 256] [--rounds 5] [--concurrency 1 4 16]

Prints one JSON object. Measured one at a time, in an order that is rotated by one each round:

    bare            BatchGenerator alone in a process: no server, no client
    mlx_lm.server   POST /v1/completions
    disagg          POST /generate of the decode server, read by the same client as the peer's
    disagg-client   the same through disagg's own Client
    handed-over     through Client, the prompt computed by a prefill server

All servers use one compute thread and the same float32 folder (see same_model.py), and stream exactly --tokens greedy
tokens. Every prompt is new, and mlx_lm.server has no prompt cache (--prompt-cache-size 0). disagg
holds the KV of finished prompts, which no other prompt begins like. An answer from a cache fails the run. Figures are
medians, explained at Figures in answers.py. `ratio`: disagg / mlx_lm.server by decode_tok_s, `steady_ratio`: by
steady_tok_s. They differ if requests arrive together: mlx_lm.server
accepts new ones every 0.5 s. `added_ms`: time per output token through Client at concurrency 1, less that of `bare`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import bare_decode, same_model
from benchmarks.peers.answers import Answer, Figures, figures
from benchmarks.peers.installed import import_error, package
from benchmarks.peers.mlx_hosts import ONE_THREAD, fleet_server, peer_server
from benchmarks.turns import turns
from disagg.extras import install

PEER, OURS, CLIENT, BARE = "mlx_lm.server", "disagg", "disagg-client", "bare"
INSTALL = install("decode")
Contender = Callable[[Sequence[str], int], Awaitable[Sequence[Answer]]]  # prompts, tokens -> their answers


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 0, also if mlx-lm is not installed, which the output states."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, default=same_model.DEMO_MODEL, help="a folder with safetensors")
    options.add_argument("--tokens", type=int, default=256, help="output tokens per request")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    args = options.parse_args(argv)
    print(json.dumps(compare(args.model, args.tokens, args.rounds, args.concurrency), indent=2))
    return 0


def compare(model: Path, tokens: int, rounds: int, concurrency: Sequence[int]) -> dict[str, Any]:
    """What `python -m benchmarks.peers.mlx_server` prints."""
    missing = import_error("mlx_lm.server")
    if missing:
        return {"skipped": {PEER: {"why": missing, "install": INSTALL}}}
    with tempfile.TemporaryDirectory(prefix="disagg-peers-") as name, ExitStack() as stack:
        folder = Path(name)
        same_model.write(model, folder / "model")
        bare = stack.enter_context(bare_decode.running(folder / "model", ONE_THREAD))
        peer = stack.enter_context(peer_server(folder / "model", folder))
        fleet = stack.enter_context(fleet_server(folder / "model", folder))

        async def alone(prompts: Sequence[str], tokens: int) -> Sequence[Answer]:
            return await asyncio.to_thread(bare.decode, prompts, tokens)

        contenders: dict[str, Contender] = {
            BARE: alone,
            PEER: peer.answers,
            OURS: fleet.answers,
            CLIENT: fleet.client_answers,
            "handed-over": fleet.handed_over_answers,
        }
        measured = asyncio.run(_measure(contenders, tokens, rounds, concurrency))
    return {
        "model": model.name,
        "tokens": tokens,
        "rounds": rounds,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "versions": [package(name) for name in ("mlx", "mlx-lm", "disagg")],
        **summary(measured),
    }


async def _measure(
    contenders: Mapping[str, Contender], tokens: int, rounds: int, concurrency: Sequence[int]
) -> dict[int, dict[str, list[Figures]]]:
    measured: dict[int, dict[str, list[Figures]]] = {c: {name: [] for name in contenders} for c in concurrency}
    for number in range(-1, rounds):  # the first one is a warm-up and is not counted
        for together in concurrency:
            for name in turns(list(contenders), number):
                print(f"round {number + 1} of {rounds}: {together} x {name}", file=sys.stderr)
                answers = await contenders[name](prompts(number, name, together), tokens)
                _require_same(name, answers, together, tokens)
                if number >= 0:
                    measured[together][name].append(figures(answers))
    return measured


def prompts(number: int, name: str, together: int) -> list[str]:
    """Prompts of equal length that differ between rounds, contenders and requests from their first characters on."""
    seed = sum(name.encode()) * 1000 + (number + 1) * 20
    return [f"{(seed + index) * 7919 % 1_000_000:06d} = limit\ndef first(items, limit):\n" for index in range(together)]


def _require_same(name: str, answers: Sequence[Answer], together: int, tokens: int) -> None:
    if [answer.tokens for answer in answers] != [tokens] * together:
        raise ValueError(f"{name} returned {[answer.tokens for answer in answers]} tokens, not {together} x {tokens}")


def summary(measured: Mapping[int, Mapping[str, Sequence[Figures]]]) -> dict[str, Any]:
    """Medians and bests, the ratios, and the time that server and client add to a token."""
    table = {str(together): {name: _row(runs) for name, runs in rows.items()} for together, rows in measured.items()}
    added = {c: rows[CLIENT]["tpot_ms"] - rows[BARE]["tpot_ms"] for c, rows in table.items() if c == "1"}
    return {
        "concurrency": table,
        "ratio": {c: rows[OURS]["decode_tok_s"] / rows[PEER]["decode_tok_s"] for c, rows in table.items()},
        "steady_ratio": {c: rows[OURS]["steady_tok_s"] / rows[PEER]["steady_tok_s"] for c, rows in table.items()},
        "added_ms": added.get("1"),
    }


def _row(runs: Sequence[Figures]) -> dict[str, Any]:
    return {
        "decode_tok_s": statistics.median(run.decode_tok_s for run in runs),
        "best_tok_s": max(run.decode_tok_s for run in runs),
        "steady_tok_s": statistics.median(run.steady_tok_s for run in runs),
        "tpot_ms": statistics.median(run.tpot_ms for run in runs),
        "best_tpot_ms": min(run.tpot_ms for run in runs),
        "runs": [asdict(run) for run in runs],
    }


if __name__ == "__main__":
    sys.exit(main())
