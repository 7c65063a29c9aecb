"""`disagg serve`: the gateway, for clients that speak the OpenAI API; `serve endpoints`: the configuration of what
stands in front of gateways."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.context import CommandOutput, print_json, settings, stderr
from disagg.cli.common.options import AsJson, Command, CommandGroup, refuse_options
from disagg.config.addresses import origin_fault
from disagg.config.document import on_one_line
from disagg.config.tables.hosts import MAX_RESPONSES
from disagg.errors import PortInUse, UsageError
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
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin", metavar="ORIGIN", help="Web pages of this origin may ask it; repeat it for more."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Speak TLS, with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key (PEM).")] = None,
    tls_self_signed: Annotated[
        bool, typer.Option("--tls-self-signed", help="Speak TLS, with a certificate that is made once and kept.")
    ] = False,
    keep_responses: Annotated[
        int,
        typer.Option(min=0, max=MAX_RESPONSES, metavar="N", help="Keep so many responses for previous_response_id."),
    ] = 0,
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
    from disagg.config import GatewaySettings
    from disagg.gateway.serve import serve as run

    fleet = settings(context).fleet()
    offered = GatewaySettings(
        _origins(cors_origin or ()), *_certificate(tls_cert, tls_key, tls_self_signed), keep_responses
    )
    _log_requests()

    def ready(at: Listening) -> None:
        for line in _announced(fleet, at):
            stderr().print(line, soft_wrap=True)

    try:
        run(fleet, host, port, ready, settings=offered, keep_text=keep_text)
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


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """The origins, each once. Raises UsageError."""
    for origin in given:
        if hint := origin_fault(origin):
            raise UsageError(f'--cors-origin: "{on_one_line(origin)}" is not an origin', hint)
    return tuple(dict.fromkeys(given))


def _certificate(certificate: Path | None, key: Path | None, self_signed: bool) -> tuple[str | None, str | None, bool]:
    """The files of the certificate, if there are any, and whether one is made. Raises UsageError."""
    if (certificate is None) is not (key is None):
        missing = "--tls-key" if key is None else "--tls-cert"
        raise UsageError(f"{missing} is missing: a certificate is of use with its key only", "name both files")
    if certificate is not None and self_signed:
        raise UsageError("--tls-cert and --tls-self-signed: only one of them", "leave out one of the two")
    named = [None if path is None else str(path.absolute()) for path in (certificate, key)]
    return named[0], named[1], self_signed


def _announced(fleet: Fleet, at: Listening) -> Iterator[str]:
    """What is served where, and what is missing for it."""
    elsewhere = f", from other machines at {at.public_url}/v1" if at.public_url else ""
    yield f"Serving {', '.join(fleet.models)} at {at.url}/v1{elsewhere}. Ctrl-C stops it."
    yield f"Dashboard: {at.public_url or at.url}/"
    if at.certificate is not None:
        yield f"TLS certificate: {at.certificate}, SHA-256 {at.fingerprint}"
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
