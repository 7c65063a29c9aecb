"""`python -m disagg.bench.handoff receive|send`: one end of the hand-off benchmark; see disagg.api.handoff.

A failure is one JSON line {"error"} and the error's exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from disagg.api.handoff import ENVIRONMENT_VARIABLE, EndTask, HandoffSpec, Listening
from disagg.api.layout import uniform
from disagg.engines.process import exit_without_cleanup
from disagg.errors import DisaggError, UsageError

if TYPE_CHECKING:
    from disagg.bench.handoff.channel import MessageChannel
    from disagg.bench.handoff.transports import RandomKV

T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Run one end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m disagg.bench.handoff", description=__doc__)
    parser.add_argument("end", choices=("receive", "send"))
    end = parser.parse_args(argv).end
    try:
        task = _task(os.environ.pop(ENVIRONMENT_VARIABLE, ""))
        with suppress(KeyboardInterrupt):
            _receive(task) if end == "receive" else _send(task)
    except DisaggError as error:
        _print({"error": error.to_json()})
        return error.exit_code
    except (OSError, MemoryError, RuntimeError) as error:  # of the network or a framework
        _print({"error": DisaggError(f"{type(error).__name__}: {error}").to_json()})
        return 1
    return 0


def _task(text: str) -> EndTask:
    try:
        return EndTask.from_json(json.loads(text))
    except ValueError as error:
        raise UsageError(f"${ENVIRONMENT_VARIABLE} is not a task: {error}", "run `disagg bench handoff`") from error


def _receive(task: EndTask) -> None:
    from disagg.bench.handoff import run
    from disagg.bench.handoff.channel import MessageChannel, address_family

    with socket.create_server((task.host, 0), family=address_family(task.host)) as listener:
        _print(Listening(listener.getsockname()[1]).to_json())
        with MessageChannel.accept(listener, task.token) as channel:
            _reporting(channel, lambda: run.receive(channel, _shape(task.spec), task.host, task.spec.rounds))


def _send(task: EndTask) -> None:
    from disagg.bench.handoff import run
    from disagg.bench.handoff.channel import MessageChannel

    spec = task.spec
    with MessageChannel.connect(task.host, task.port, task.token) as channel:
        figures = _reporting(channel, lambda: run.send(channel, _shape(spec), spec.device, spec.rounds))
    _print(figures.to_json())


def _reporting(channel: MessageChannel, run: Callable[[], T]) -> T:
    """Run, and send the other end the error if it fails."""
    try:
        return run()
    except (DisaggError, OSError, MemoryError, RuntimeError) as error:
        with suppress(DisaggError):
            channel.send_error(error)
        raise


def _shape(spec: HandoffSpec) -> RandomKV:
    from disagg.bench.handoff.transports import RandomKV

    rows = tuple(window for window in spec.windows if window != 0)  # a state instead of rows is small
    return RandomKV(uniform(rows, spec.kv_heads, spec.head_dim, spec.dtype), spec.tokens)


def _print(body: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    exit_without_cleanup(main())
