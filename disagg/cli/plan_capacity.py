"""`disagg plan-capacity`: what a fleet could do, from its machines' arithmetic and memory speed. Nothing is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.context import settings, stdout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.bench.capacity import Capacity, Traffic
    from disagg.cli.context import Settings
    from disagg.planning.link import Link


def plan_capacity(
    context: typer.Context,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m", "--model", metavar="NAME", help="A model of hosts.toml, shape:NAME or a path; all by default."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, max=1 << 20, help="Length of the prompt.")] = 8192,
    output_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Length of the answer.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Requests that decode together.")] = 16,
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Speed of the link between the machines, in Gb/s.")] = 10,
    link_latency_ms: Annotated[float, typer.Option(min=0, help="Its latency, one way.")] = 0.05,
    prefill_device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Instead of hosts.toml's.")] = None,
    decode_device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Instead of hosts.toml's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict the hand-off against each machine alone, for hosts.toml as it is or as it might be."""
    import json

    from disagg.bench.capacity import Traffic
    from disagg.cli.views.capacity import capacity_view
    from disagg.planning.link import Link

    traffic = Traffic(prompt_tokens, output_tokens, batch)
    link = Link(link_gbps, link_latency_ms / 1e3)
    results = _assess(settings(context), model or (), link, traffic, (prefill_device, decode_device))
    if as_json:
        typer.echo(json.dumps({"predicted": True, "results": [result.to_json() for result in results]}, indent=2))
        return
    console = stdout()
    for result in results:
        console.print(capacity_view(result))


def _assess(
    chosen: Settings, names: Sequence[str], link: Link, traffic: Traffic, devices: tuple[str | None, str | None]
) -> list[Capacity]:
    """Every named model; those that are no model of the fleet are sizes alone, which need no hosts.toml."""
    from disagg.bench.capacity import assess, hypothetical, is_size, setups
    from disagg.cli.generate import choose_models

    found = [hypothetical(name, link, *devices) for name in names if is_size(name)]
    served = [name for name in names if not is_size(name)]
    if served or not names:
        fleet = chosen.fleet()
        found += setups(fleet, choose_models(fleet, served or list(fleet.models)), link, *devices)
    return [assess(name, setup, traffic, context) for name, setup, context in found]
