"""`python -m disagg.bench.handoff receive|send`: one end of a rehearsed hand-off.

$DISAGG_REHEARSAL says what to do, as JSON: see Order. The receiver prints {"port"} and waits for one sender; the sender
prints the figures. A failure is one JSON line {"error"} and the error's exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from disagg.engines.exit import exit_without_cleanup
from disagg.errors import DisaggError, UsageError

if TYPE_CHECKING:
    from disagg.bench.handoff.control import Control
    from disagg.bench.handoff.way import Shape

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """What is rehearsed. token: the one-time secret of the two ends; host: the receiver's address; port, device: for
    the sender; windows: per layer, None for a full one."""

    token: str
    host: str
    windows: list[int | None]
    kv_heads: int
    head_dim: int
    dtype: str
    tokens: int
    rounds: int
    port: int = 0
    device: str = "auto"


def main(argv: list[str] | None = None) -> int:
    """Play one end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m disagg.bench.handoff", description=__doc__)
    parser.add_argument("end", choices=("receive", "send"))
    end = parser.parse_args(argv).end
    try:
        order = _order(os.environ.pop("DISAGG_REHEARSAL", ""))
        with suppress(KeyboardInterrupt):
            _receive(order) if end == "receive" else _send(order)
    except DisaggError as error:
        _print(error=error.to_json())
        return error.exit_code
    except (OSError, MemoryError, RuntimeError) as error:  # the network's, or a framework's
        _print(error=DisaggError(f"{type(error).__name__}: {error}").to_json())
        return 1
    return 0


def _order(text: str) -> Order:
    try:
        return Order(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(f"$DISAGG_REHEARSAL is no order: {error}", "run `disagg bench handoff`") from error


def _receive(order: Order) -> None:
    from disagg.bench.handoff import control, run

    family = socket.AF_INET6 if ":" in order.host else socket.AF_INET
    with socket.create_server((order.host, 0), family=family) as listener:
        _print(port=listener.getsockname()[1])
        with control.accept(listener, order.token) as words:
            _telling(words, lambda: run.receive(words, _shape(order), order.host, order.rounds))


def _send(order: Order) -> None:
    from disagg.bench.handoff import control, run

    with control.connect(order.host, order.port, order.token) as words:
        figures = _telling(words, lambda: run.send(words, _shape(order), order.device, order.rounds))
    _print(**figures)


def _telling(words: Control, play: Callable[[], T]) -> T:
    """Play, and tell the other end of a failure before this one leaves."""
    try:
        return play()
    except (DisaggError, OSError, MemoryError, RuntimeError) as error:
        with suppress(DisaggError):
            words.say(error=str(error)[:2000])
        raise


def _shape(order: Order) -> Shape:
    from disagg.bench.handoff.way import Shape
    from disagg.engines.simulated.model import layout_of

    return Shape(layout_of(order.windows, order.kv_heads, order.head_dim, order.dtype), order.tokens)


def _print(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    exit_without_cleanup(main())
