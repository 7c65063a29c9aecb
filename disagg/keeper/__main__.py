"""`python -m disagg.keeper --config hosts.toml --host NAME`: the keeper of one host with several models, until SIGTERM.

SIGHUP, or another content of hosts.toml, is read within a second.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from starlette.types import ASGIApp

from disagg import logs
from disagg.api.names import LOG_FILE_VARIABLE
from disagg.config import Fleet, Host, load
from disagg.errors import DisaggError
from disagg.files import stamp
from disagg.http.program import notify, run_host
from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.http.server import BoundedServer, ListenHints, listen, run
from disagg.keeper.app import build
from disagg.keeper.keeper import Keeper, require_kept
from disagg.keeper.processes import Machine
from disagg.ledger import Ledger, machine_room
from disagg.tls.certificate import ServerTLS
from disagg.token import Tokens, memory_folder, state_folder

LAST_BYTES_S: Final = 1
LOOK_S: Final = 1.0
NOTIFY_S: Final = 5.0
NOTIFIED_S: Final = 90
"""A service manager that the keeper has sent nothing for so long restarts it."""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the keeper, return the exit code."""
    options = argparse.Namespace()
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--state", type=Path, help="folder for logs of the models and what the next start has to know")

    def serve(fleet: Fleet, host: Host) -> int:
        return _run(fleet, host, options.state or _state(fleet, host))

    return run_host(
        "disagg.keeper",
        argv,
        serve,
        kind="host with several models",
        serves=lambda host: host.keeps,
        more=extra,
        into=options,
    )


def _state(fleet: Fleet, host: Host) -> Path:
    """Beside the keeper's log; in the fleet's local state if it has none."""
    log = os.environ.get(LOG_FILE_VARIABLE)
    return Path(log).parent / host.name if log else state_folder(fleet) / host.name


def _run(fleet: Fleet, host: Host, state: Path) -> int:
    tokens = Tokens.of(fleet)
    taken = f"stop the process on it (`ss -ltnp 'sport = :{host.port}'`) or change the port of {host.name}"
    listener = listen(host.address, host.port, ListenHints(taken, "check the address in hosts.toml"))
    try:
        run(_serve(fleet, host, state, tokens, listener))
    finally:
        listener.close()
    return 0


async def _serve(fleet: Fleet, host: Host, state: Path, tokens: Tokens, listener: socket.socket) -> None:
    keeper = Keeper(fleet, host, state, Machine(machine_room(host), Ledger(memory_folder())))
    server = _Server(keeper, build(keeper, tokens), Encryption(ServerTLS(lambda: tokens.all), plain=False))
    looking = asyncio.ensure_future(_follow(keeper, fleet))
    keeping = asyncio.ensure_future(keeper.run())
    keeping.add_done_callback(lambda _: server.leave())
    notify(f"READY=1\nWATCHDOG_USEC={NOTIFIED_S * 1_000_000}")
    logs.info("keeping", host=host.name, models=list(host.models), budget_bytes=keeper.budget)
    try:
        await server.serve(sockets=[listener])
    finally:
        looking.cancel()
        if not keeping.done():
            keeping.cancel()
        await asyncio.wait((keeping, looking))
        keeper.close()
    logs.info("stopped", host=host.name)
    keeping.result()


async def _follow(keeper: Keeper, fleet: Fleet) -> None:
    """Read hosts.toml again when it has changed, and tell the service manager that the keeper runs."""
    loop, hangup = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    seen, notified = stamp(fleet.path), -NOTIFY_S
    while True:
        if time.monotonic() - notified >= NOTIFY_S:
            notified = time.monotonic()
            notify("WATCHDOG=1")
        logs.summarise()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await hangup.wait()
        now = stamp(fleet.path)
        if (hangup.is_set() or now != seen) and not keeper.stopping:
            hangup.clear()
            seen = now
            try:
                changed = load(fleet.path)
                require_kept(changed, keeper.host.name)
                keeper.reload(changed)
            except DisaggError as error:
                logs.event(logging.WARNING, "models_not_changed", **error.to_json())
            else:
                logs.info("models_read", models=list(keeper.host.models))


class _Server(BoundedServer):
    """A signal lets the models' processes finish first; meanwhile the keeper still answers."""

    def __init__(self, keeper: Keeper, app: ASGIApp, encryption: Encryption) -> None:
        super().__init__(app, ConnectionBounds(), LAST_BYTES_S, encryption)
        self._keeper = keeper

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._keeper.stopping:
            self._keeper.stop()

    def leave(self) -> None:
        self.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
