"""`python -m disagg.servers --config hosts.toml --host NAME`: the server of one host, until SIGTERM."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from disagg.api.engines import TRANSFORMERS
from disagg.config import EngineOptions, Fleet, Host
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
    prepare_environment(host.engine)
    limit_arenas()
    from disagg.servers.run import serve

    return serve(fleet, host)


def prepare_environment(engine: EngineOptions) -> None:
    """Set what frameworks read once, before any is imported: the number of compute threads, which OpenMP and BLAS read;
    and that PyTorch's memory of a CUDA device grows in place. A prompt of 32,768 tokens, each of whose chunks needs
    larger temporaries, took 11.4 GB of an H200 without it and 7.6 GB with it, of which 7.5 GB were used. vLLM refuses
    it beside a connector."""
    if engine.threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(engine.threads)
    if engine.kind is TRANSFORMERS:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def limit_arenas() -> None:
    """Keep this process's threads to MAX_ARENAS of glibc's arenas. Other C libraries have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, MAX_ARENAS)


if __name__ == "__main__":
    exit_without_cleanup(main())
