"""`disagg serve`: the gateway, for clients that speak the OpenAI API; `serve endpoints`: the configuration of what
stands in front of gateways."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.context import CommandOutput, print_json, settings, stderr
from disagg.cli.common.options import AsJson, Command, CommandGroup, refuse_options
from disagg.errors import PortInUse
from disagg.extras import require
from disagg.gateway.endpoints import Form, render
from disagg.gateway.endpoints import endpoints as for_fleets

if TYPE_CHECKING:
    from disagg.config import Fleet
    from disagg.gateway.serve import Listening


app = typer.Typer(name="serve", cls=CommandGroup, invoke_without_command=True)


@app.callback(invoke_without_command=True)
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
    if context.invoked_subcommand is not None:
        refuse_options(context, "serve", "the gateway")
        return
    require("gateway")
    from disagg.gateway.serve import serve as run

    fleet = settings(context).fleet()
    _log_requests()

    def ready(at: Listening) -> None:
        for line in _announced(fleet, at):
            stderr().print(line, soft_wrap=True)

    try:
        run(fleet, host, port, ready, keep_text=keep_text)
    except PortInUse as error:
        from disagg.fleet.machine.process import port_holder

        raise PortInUse(f"{error.message} by {port_holder(port)}", error.hint) from error


@app.command(cls=Command)
def endpoints(
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[HOSTS_TOML]...", help="The fleets; --config without one.")
    ] = None,
    *,
    form: Annotated[Form, typer.Option("--format", help="Whose configuration.")],
    as_json: AsJson = False,
) -> None:
    """Print the configuration of a router or monitor for the gateways of one fleet or several.

    docs/scale.md shows the set-ups. The other side sends a key of `disagg keys add`, which it finds in the environment
    as DISAGG_API_KEY; Prometheus reads it from the file disagg-api-key.
    """
    from disagg.config import load

    fleets = [load(path) for path in files] if files else [settings(context).fleet()]
    text = render(form, for_fleets(fleets))
    if as_json:
        print_json({"format": form, "configuration": text})
    else:
        typer.echo(text, nl=False)


def _announced(fleet: Fleet, at: Listening) -> Iterator[str]:
    """What is served where, and what is missing for it."""
    elsewhere = f", from other machines at {at.public_url}/v1" if at.public_url else ""
    yield f"Serving {', '.join(fleet.models)} at {at.url}/v1{elsewhere}. Ctrl-C stops it."
    yield f"Dashboard: {at.public_url or at.url}/"
    if missing := [name for name in fleet.models if name not in at.live]:
        which = "any model" if len(missing) == len(fleet.models) else " or ".join(missing)
        yield f"No host of {which} is up yet: `disagg status` says why, `disagg start` starts what is stopped."


def _log_requests() -> None:
    """One line on stderr for each request that has ended, and for each that could not be read; with --quiet only what
    went wrong in the gateway itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("%(asctime)s %(message)s"))
    logger = logging.getLogger("disagg")
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if CommandOutput.quiet else logging.INFO)


class _Line(logging.Formatter):
    """The time, the event, and its fields as NAME=VALUE."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])
