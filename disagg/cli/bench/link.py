"""`disagg bench link`: the path that KV takes from a prefill host to a decode host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.completion import complete_host
from disagg.cli.common.context import print_json, settings, stderr, stdout

if TYPE_CHECKING:
    from disagg.config import Fleet, Host


def link(
    context: typer.Context,
    *,
    sender: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST", help="The host that KV leaves.", autocompletion=complete_host),
    ] = None,
    receiver: Annotated[
        str | None,
        typer.Option("--to", metavar="HOST", help="The host that KV reaches.", autocompletion=complete_host),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure the links between hosts the way KV goes: by default every prefill host to each decode host of its model.

    At most 2 s or 512 MiB a link, over SSH; the servers need not run.

    Exit code 0: nothing is at fault; 1: something is; 4: a host cannot be reached.
    """
    from disagg.fleet.link import exit_code, pairs_between, survey

    fleet = settings(context).fleet()
    pairs = pairs_between(fleet, _host(fleet, sender), _host(fleet, receiver))
    with stderr().status("measuring …") as status:
        surveyed = survey(fleet, pairs, on_step=lambda what: status.update(f"measuring {what} …"))
    code = exit_code(surveyed)
    if as_json:
        links = [one.to_json() for one in surveyed]
        print_json({"fleet": fleet.name, "ok": code == 0, "links": links})
    else:
        from disagg.cli.views.bench.link import links_view

        stdout().print(links_view(surveyed))
    raise typer.Exit(code)


def _host(fleet: Fleet, name: str | None) -> Host | None:
    return None if name is None else fleet.select([name], managed=True)[0]
