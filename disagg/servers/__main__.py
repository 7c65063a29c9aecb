"""`python -m disagg.servers --config hosts.toml --host NAME`: the server of one host, until SIGTERM.

The fleet's token is read from a file (see disagg/token.py), never from argv. A failed start prints one JSON log line
and exits with the error's code.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from disagg import logs
from disagg.config import Fleet, Host, load
from disagg.engines.exit import exit_without_cleanup
from disagg.errors import ConfigError, DisaggError


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, start the server, return the exit code."""
    arguments = _parser().parse_args(argv)
    logs.configure()
    try:
        fleet = load(arguments.config)
        host = _host(fleet, arguments.host)
        _limit_threads(host)
        from disagg.servers.run import serve

        return serve(fleet, host)
    except DisaggError as error:
        logs.log.error("start_failed", extra={"fields": error.to_json()})
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.servers", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="hosts.toml")
    parser.add_argument("--host", required=True, help="name of the host in hosts.toml that this process serves")
    return parser


def _host(fleet: Fleet, name: str) -> Host:
    if name not in fleet.hosts:
        raise ConfigError(f"{fleet.path} has no host {name!r}", f"it has {', '.join(fleet.hosts)}")
    return fleet.hosts[name]


def _limit_threads(host: Host) -> None:
    """Limit the compute threads. Called before any framework is imported: OpenMP and BLAS read this once."""
    if host.engine.threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(host.engine.threads)


if __name__ == "__main__":
    exit_without_cleanup(main())
