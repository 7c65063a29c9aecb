"""`disagg start`, `stop`, `restart`: the servers of hosts with connector "local"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.completion import complete_host
from disagg.cli.context import Settings, settings, stderr, stdout

if TYPE_CHECKING:
    from disagg.fleet.lifecycle import HostResult, Lifecycle

Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Only this host; may be repeated.",
        show_default=False,
        autocompletion=complete_host,
    ),
]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait for the servers to be healthy.")]


def start(context: typer.Context, host: Hosts = None, timeout: Timeout = 300.0) -> None:
    """Start the fleet's servers. Those that run already are left alone."""
    _finish(_lifecycle(settings(context)).start(host or (), timeout))


def stop(context: typer.Context, host: Hosts = None) -> None:
    """Stop the fleet's servers: requests in progress are finished first."""
    _finish(_lifecycle(settings(context)).stop(host or ()))


def restart(context: typer.Context, host: Hosts = None, timeout: Timeout = 300.0) -> None:
    """Stop the fleet's servers, then start them."""
    lifecycle = _lifecycle(settings(context))
    stopped = lifecycle.stop(host or ())
    if any(not result.ok for result in stopped):
        _finish(stopped)
    _finish(lifecycle.start(host or (), timeout))


def _lifecycle(chosen: Settings) -> Lifecycle:
    from disagg.cli.views.progress import Progress
    from disagg.fleet.lifecycle import Lifecycle
    from disagg.fleet.state import State

    fleet = chosen.fleet()
    return Lifecycle(fleet, State.of(fleet), report=Progress(stderr()).report)


def _finish(results: list[HostResult]) -> None:
    from disagg.cli.views.progress import results_view

    stdout().print(results_view(results))
    if any(not result.ok for result in results):
        raise typer.Exit(1)
