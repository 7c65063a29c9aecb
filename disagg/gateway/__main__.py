"""`python -m disagg.gateway --config hosts.toml --host NAME`: the gateway of a fleet, until SIGTERM.

The fleet's token and the clients' keys are read from files (see disagg/token.py), never from argv. A failed start
prints one JSON log line and exits with the error's code.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from disagg import logs
from disagg.config import Fleet, Host, load
from disagg.errors import ConfigError, DisaggError


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, serve, return the exit code."""
    arguments = _parser().parse_args(argv)
    logs.configure()
    try:
        fleet = load(arguments.config)
        host = _host(fleet, arguments.host)
        from disagg.gateway.serve import serve

        serve(fleet, host.address, host.port, lambda url: logs.info("ready", host=host.name, url=url), host=host)
    except DisaggError as error:
        logs.log.error("start_failed", extra={"fields": error.to_json()})
        return error.exit_code
    logs.info("stopped", host=host.name)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.gateway", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="hosts.toml")
    parser.add_argument("--host", required=True, help="name of the gateway in hosts.toml")
    return parser


def _host(fleet: Fleet, name: str) -> Host:
    gateways = [host.name for host in fleet.hosts.values() if host.gateway]
    if name not in gateways:
        raise ConfigError(f"{fleet.path} has no gateway {name!r}", f"it has {', '.join(gateways) or 'none'}")
    return fleet.hosts[name]


if __name__ == "__main__":
    raise SystemExit(main())
