"""`python -m disagg.servers --config hosts.toml --host NAME`: the server of one host, until SIGTERM."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from disagg.config import Fleet, Host
from disagg.engines.process import exit_without_cleanup
from disagg.http.program import run_host

MAX_ARENAS: Final = 2
"""Areas of memory that glibc's malloc divides among threads; by default eight per core. On two cores a decode host
had 377 to 387 MB with the default, 355 to 373 MB with two, over 20,000 short requests."""
_M_ARENA_MAX: Final = -8  # of glibc's malloc.h


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, start the server, return the exit code."""
    return run_host("disagg.servers", argv, _serve, serves=lambda host: not (host.gateway or host.keeps), ports=True)


def _serve(fleet: Fleet, host: Host) -> int:
    _limit_threads(host)
    limit_arenas()
    from disagg.servers.run import serve

    return serve(fleet, host)


def _limit_threads(host: Host) -> None:
    """Limit the compute threads. Called before any framework is imported: OpenMP and BLAS read this once."""
    if host.engine.threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(host.engine.threads)


def limit_arenas() -> None:
    """Keep this process's threads to MAX_ARENAS of glibc's arenas. Other C libraries have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, MAX_ARENAS)


if __name__ == "__main__":
    exit_without_cleanup(main())
