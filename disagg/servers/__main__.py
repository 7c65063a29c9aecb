"""`python -m disagg.servers --config hosts.toml --host NAME`: the server of one host, until SIGTERM."""

from __future__ import annotations

import os

from disagg.config import Fleet, Host
from disagg.engines.exit import exit_without_cleanup
from disagg.http.program import run_host


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, start the server, return the exit code."""
    return run_host("disagg.servers", argv, _serve)


def _serve(fleet: Fleet, host: Host) -> int:
    _limit_threads(host)
    from disagg.servers.run import serve

    return serve(fleet, host)


def _limit_threads(host: Host) -> None:
    """Limit the compute threads. Called before any framework is imported: OpenMP and BLAS read this once."""
    if host.engine.threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(host.engine.threads)


if __name__ == "__main__":
    exit_without_cleanup(main())
