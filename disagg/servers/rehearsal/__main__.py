"""`python -m disagg.servers.rehearsal receive|send`: one end of a rehearsed hand-off.

The receiver prints {"port"} and waits for one sender; the sender prints the figures. $DISAGG_REHEARSAL_TOKEN is the
one-time secret between them. A failure is one JSON line {"error"} and the error's exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any, get_args

from disagg.config import DType
from disagg.config.sizing import read_size
from disagg.errors import DisaggError, Unauthorized


def main(argv: list[str] | None = None) -> int:
    """Play one end; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        token = os.environ.pop("DISAGG_REHEARSAL_TOKEN", "")
        if not token:
            raise Unauthorized("there is no DISAGG_REHEARSAL_TOKEN", "run `disagg bench handoff`")
        with suppress(KeyboardInterrupt):
            _receive(arguments, token) if arguments.end == "receive" else _send(arguments, token)
    except DisaggError as error:
        _print(error=error.to_json())
        return error.exit_code
    except (OSError, MemoryError, RuntimeError) as error:  # the network's, or a framework's
        _print(error=DisaggError(f"{type(error).__name__}: {error}").to_json())
        return 1
    return 0


def _receive(arguments: argparse.Namespace, token: str) -> None:
    from disagg.servers.rehearsal import control, run

    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    with socket.create_server((arguments.host, 0), family=family) as listener:
        _print(port=listener.getsockname()[1])
        with control.accept(listener, token) as words:
            _telling(words, run.receive, words, _shape(arguments), arguments.host, arguments.rounds)


def _send(arguments: argparse.Namespace, token: str) -> None:
    from disagg.engines.transformers_load import choose_device
    from disagg.servers.rehearsal import control, run

    device = choose_device(arguments.device)
    with control.connect(arguments.host, arguments.port, token) as words:
        figures = _telling(words, run.send, words, _shape(arguments), device, arguments.rounds)
    _print(device=device.type, **figures)


def _telling(words: Any, play: Any, *rest: Any) -> Any:
    """Play, and tell the other end of a failure before this one leaves."""
    try:
        return play(*rest)
    except (DisaggError, OSError, MemoryError, RuntimeError) as error:
        with suppress(DisaggError):
            words.say(error=str(error))
        raise


def _shape(arguments: argparse.Namespace) -> Any:
    from disagg.engines.simulated_model import layout_of
    from disagg.servers.rehearsal.way import Shape

    return Shape(layout_of(read_size(arguments.model), arguments.dtype), arguments.tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.servers.rehearsal", description=__doc__)
    ends = parser.add_subparsers(dest="end", required=True)
    receive, send = ends.add_parser("receive"), ends.add_parser("send")
    send.add_argument("--port", type=int, required=True)
    send.add_argument("--device", default="auto")
    for end in (receive, send):
        end.add_argument("--host", required=True, help="the receiver's address")
        end.add_argument("--model", required=True, help="shape:NAME, or the path of a config.json")
        end.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
        end.add_argument("--tokens", type=int, required=True)
        end.add_argument("--rounds", type=int, required=True)
    return parser


def _print(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
