"""`python -m PACKAGE --config hosts.toml --host NAME`: what the processes that serve one host have in common.

The fleet's token and the clients' keys are read from files (see disagg/token.py), never from argv. A failed start
prints one JSON log line and exits with the error's code.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from disagg import logs
from disagg.config import Fleet, Host, load
from disagg.errors import ConfigError, DisaggError
from disagg.extras import explained


def run_host(
    package: str,
    argv: list[str] | None,
    serve: Callable[[Fleet, Host], int],
    *,
    kind: str = "host",
    serves: Callable[[Host], bool] = lambda host: True,
    ports: bool = False,
    more: argparse.ArgumentParser | None = None,
    into: argparse.Namespace | None = None,
) -> int:
    """Parse the command line, call `serve`, return the exit code. kind: what the hosts that it `serves` are called.
    ports: it may also be told the ports of one model of a host with several, which hosts.toml does not state. more:
    further options, whose values are put into `into`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=f"Serve one {kind} until SIGTERM.",
        parents=[] if more is None else [more],
    )
    parser.add_argument("--config", type=Path, required=True, help="hosts.toml")
    parser.add_argument("--host", required=True, help=f"name of the {kind} in hosts.toml that this process serves")
    if ports:
        parser.add_argument("--port", type=int, help="for HTTP, of one model of a host with several: HOST/MODEL")
        parser.add_argument("--kv-port", type=int, help="for KV, if this is a decode host")
    arguments = parser.parse_args(argv, into)
    logs.configure()
    try:
        fleet = load(arguments.config)
        hosts = {host.name: host for host in (*fleet.hosts.values(), *fleet.served.values()) if serves(host)}
        if arguments.host not in hosts:
            raise ConfigError(f"{fleet.path} has no {kind} {arguments.host!r}", f"it has {', '.join(hosts) or 'none'}")
        host = hosts[arguments.host]
        if ports:
            host = _at_ports(host, arguments.port, arguments.kv_port)
        try:
            return serve(fleet, host)
        except ModuleNotFoundError as error:
            raise explained(error) from error
    except DisaggError as error:
        logs.log.error("start_failed", extra={"fields": error.to_json()})
        return error.exit_code


def _at_ports(host: Host, port: int | None, kv_port: int | None) -> Host:
    """The host with these ports, which only one model of a host with several is given, and needs."""
    decodes = host.kv_port is not None
    if host.keeper == "":
        if port is not None or kv_port is not None:
            raise ConfigError(f"{host.name}: hosts.toml states its ports", "leave out --port and --kv-port")
        return host
    if port is None or (kv_port is None) == decodes:
        raise ConfigError(
            f"{host.name}: hosts.toml states no ports for one model of a host with several",
            "give --port and --kv-port" if decodes else "give --port alone",
        )
    of_models = host.keeping.ports if host.keeping is not None else range(0)
    for number in (port, *([kv_port] if kv_port is not None else ())):
        if number not in of_models:
            raise ConfigError(
                f"{host.name}: {number} is not one of the ports of {host.keeper}",
                f"they are {of_models[0]} to {of_models[-1]}",
            )
    if port == kv_port:
        raise ConfigError(f"{host.name}: --port and --kv-port are both {port}", "give two ports")
    return replace(host, port=port, kv_port=kv_port)


def notify(state: str) -> None:
    """Notify systemd, or disagg's supervisor, as in sd_notify(3). Does nothing without $NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:  # it may have ended
        to.settimeout(1.0)
        to.connect("\0" + address[1:] if address.startswith("@") else address)
        to.send(state.encode())
