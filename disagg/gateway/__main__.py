"""`python -m disagg.gateway --config hosts.toml --host NAME`: the gateway of a fleet, until SIGTERM."""

from __future__ import annotations

from disagg import logs
from disagg.config import Fleet, Host
from disagg.http.program import run_host


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, serve, return the exit code."""
    return run_host("disagg.gateway", argv, _serve, kind="gateway", serves=lambda host: host.gateway)


def _serve(fleet: Fleet, host: Host) -> int:
    from disagg.gateway.serve import Listening, serve

    def ready(at: Listening) -> None:
        logs.info("ready", host=host.name, url=at.url, certificate=at.fingerprint)

    serve(fleet, host.address, host.port, ready, host=host, settings=host.settings)
    logs.info("stopped", host=host.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
