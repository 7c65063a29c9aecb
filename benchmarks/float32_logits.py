"""What it costs on a CPU to choose tokens from float32 logits instead of the model's own bfloat16.

    python -m benchmarks.float32_logits [--vocab 151936] [--rows 1 8 32] [--rounds 200]

A step's logits, random and in bfloat16, become log-probabilities and the likeliest tokens, as mlx-lm's BatchGenerator
does it: as they are, and in float32. Both ways alternate; printed are medians of the CPU time of all threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

WARM_UP = 5


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vocab", type=int, default=151_936)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--rounds", type=int, default=200)
    args = options.parse_args()
    mx.set_default_device(mx.cpu)
    print(f"vocabulary of {args.vocab}, CPU time in ms per step, medians of {args.rounds}")
    for rows in args.rows:
        logits = mx.random.normal((rows, args.vocab)).astype(mx.bfloat16)
        mx.eval(logits)
        as_is, float32 = measured(args.rounds, partial(step, logits), partial(step, logits, mx.float32))
        print(f"{rows:>3} rows: bfloat16 {as_is:.2f}, float32 {float32:.2f}, difference {float32 - as_is:+.2f}")


def step(logits: Any, dtype: Any = mx.bfloat16) -> None:
    """What follows the forward pass of greedy requests."""
    logits = logits.astype(dtype)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(mx.argmax(logprobs, axis=-1), list(logprobs))


def measured(rounds: int, *ways: Callable[[], None]) -> list[float]:
    """Milliseconds of each way."""
    spent: list[list[float]] = [[] for _ in ways]
    for _ in range(WARM_UP + rounds):
        for way, times in zip(ways, spent, strict=True):
            began = time.process_time()
            way()
            times.append(1e3 * (time.process_time() - began))
    return [statistics.median(times[WARM_UP:]) for times in spent]


if __name__ == "__main__":
    main()
