"""`disagg gateway endpoints`: the configuration of what stands in front of gateways."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.common.context import print_json, settings
from disagg.cli.common.options import AsJson, Command, CommandGroup

gateway = typer.Typer(
    name="gateway",
    cls=CommandGroup,
    help="Put the fleet's gateways behind routers and monitors.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class FormName(StrEnum):
    """disagg.gateway.endpoints.Form as a choice on the command line."""

    smg = "smg"
    llm_d = "llm-d"
    litellm = "litellm"
    prometheus = "prometheus"


@gateway.callback()
def options() -> None:
    """The options of `disagg gateway` itself. With one, typer keeps a single command below the group."""


@gateway.command(cls=Command)
def endpoints(
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[HOSTS_TOML]...", help="The fleets; --config without one.")
    ] = None,
    *,
    form: Annotated[FormName, typer.Option("--format", help="Whose configuration.")],
    as_json: AsJson = False,
) -> None:
    """Print the configuration of a router or monitor for the gateways of one fleet or several.

    docs/scale.md shows the set-ups. The other side sends a key of `disagg keys add`, which it finds in the environment
    as DISAGG_API_KEY; Prometheus reads it from the file disagg-api-key.
    """
    from disagg.config import load
    from disagg.gateway.endpoints import endpoints as of
    from disagg.gateway.endpoints import render

    fleets = [load(path) for path in files] if files else [settings(context).fleet()]
    text = render(form.value, of(fleets))
    if as_json:
        print_json({"format": form.value, "configuration": text})
    else:
        typer.echo(text, nl=False)
