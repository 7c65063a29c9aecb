"""`python -m PACKAGE --config hosts.toml --host NAME`: what the processes that serve one host have in common.

The fleet's token and the clients' keys are read from files (see disagg/token.py), never from argv. A failed start
prints one JSON log line and exits with the error's code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
) -> int:
    """Parse the command line, call `serve`, return the exit code. kind: what the hosts that it `serves` are called."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=f"Serve one {kind} until SIGTERM.")
    parser.add_argument("--config", type=Path, required=True, help="hosts.toml")
    parser.add_argument("--host", required=True, help=f"name of the {kind} in hosts.toml that this process serves")
    arguments = parser.parse_args(argv)
    logs.configure()
    try:
        fleet = load(arguments.config)
        names = [host.name for host in fleet.hosts.values() if serves(host)]
        if arguments.host not in names:
            raise ConfigError(f"{fleet.path} has no {kind} {arguments.host!r}", f"it has {', '.join(names) or 'none'}")
        try:
            return serve(fleet, fleet.hosts[arguments.host])
        except ModuleNotFoundError as error:
            raise explained(error) from error
    except DisaggError as error:
        logs.log.error("start_failed", extra={"fields": error.to_json()})
        return error.exit_code
