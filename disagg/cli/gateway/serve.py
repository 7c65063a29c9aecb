"""`disagg serve`: the gateway, for clients that speak the OpenAI API."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from disagg.cli.common.context import CommandOutput, settings, stderr
from disagg.errors import PortInUse, UsageError

_PACKAGES = ("prometheus_client", "starlette", "uvicorn")


def serve(
    context: typer.Context,
    *,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0: any that is free.")] = 8080,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", help="Keep prompts and answers in the history, not only their figures.")
    ] = False,
) -> None:
    """Serve the fleet to clients of the OpenAI API, until Ctrl-C.

    Point them at the address that it prints; docs/gateway.md says what they can use. Until `disagg keys add` has made a
    key, programs of this machine need none, and other machines cannot use it.
    """
    try:
        from disagg.gateway.serve import serve as run
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise UsageError(f"{error.name} is not installed here", "pip install 'disagg[gateway]'") from None

    fleet = settings(context).fleet()
    _log_requests()

    def ready(url: str) -> None:
        stderr().print(f"Serving {', '.join(fleet.models)} at {url}/v1. Ctrl-C stops it.", soft_wrap=True)

    try:
        run(fleet, host, port, ready, keep_text=keep_text)
    except PortInUse as error:
        from disagg.fleet.machine.process import port_holder

        raise PortInUse(f"{error.message} by {port_holder(port)}", error.hint) from error


def _log_requests() -> None:
    """One line on stderr for each request that has ended; with --quiet only what went wrong in the gateway itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line())
    logger = logging.getLogger("disagg.gateway")
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if CommandOutput.quiet else logging.INFO)


class _Line(logging.Formatter):
    """The time, the event, and its fields as NAME=VALUE."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])
