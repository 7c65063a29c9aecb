"""`disagg bench predict`: the speed of a fleet, predicted from its machines' arithmetic and memory speed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.completion import complete_device
from disagg.cli.common.context import print_json, settings, stdout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from disagg.cli.common.context import Settings
    from disagg.config import Fleet, Host
    from disagg.planning.capacity import Capacity, Traffic
    from disagg.planning.link import Link
    from disagg.planning.plan import Setup


def predict(
    context: typer.Context,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m", "--model", metavar="NAME", help="A model of hosts.toml, shape:NAME or a path; all by default."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1 << 20,
            metavar="N",
            help="Prompt length in tokens. Default: 8192, or what the context leaves beside the answer.",
            show_default=False,
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="Answer length in tokens.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Requests decoded together.")] = 16,
    link_gbps: Annotated[
        float, typer.Option(min=0.001, metavar="GBPS", help="Speed of the link between the machines, in Gb/s.")
    ] = 10,
    link_latency_ms: Annotated[float, typer.Option(min=0, metavar="MS", help="One-way latency of the link.")] = 0.05,
    prefill_device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="In place of the hardware in hosts.toml.", autocompletion=complete_device),
    ] = None,
    decode_device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="In place of the hardware in hosts.toml.", autocompletion=complete_device),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict the hand-off against each machine alone, for the fleet of hosts.toml or for other machines."""
    from disagg.cli.views.capacity import capacity_view
    from disagg.planning.capacity import traffic_within
    from disagg.planning.link import Link

    traffic = partial(traffic_within, prompt_tokens=prompt_tokens, output_tokens=output_tokens, batch=batch)
    link = Link(link_gbps, link_latency_ms / 1e3)
    results = _assess(settings(context), model or (), link, traffic, (prefill_device, decode_device))
    if as_json:
        print_json({"predicted": True, "results": [result.to_json() for result in results]})
        return
    console = stdout()
    for result in results:
        console.print(capacity_view(result))


def _assess(
    chosen: Settings,
    names: Sequence[str],
    link: Link,
    traffic: Callable[[int], Traffic],
    devices: tuple[str | None, str | None],
) -> list[Capacity]:
    """The named models. `shape:NAME` and paths need no hosts.toml, but both devices. traffic: by context."""
    from disagg.cli.words import choose_models
    from disagg.planning.capacity import assess, hypothetical
    from disagg.planning.sizing import is_size

    setups_ = [hypothetical(name, link, *devices) for name in names if is_size(name)]
    served = [name for name in names if not is_size(name)]
    if served or not names:
        fleet = chosen.fleet()
        setups_ += setups(fleet, choose_models(fleet, served or list(fleet.models)), link, *devices)
    return [assess(name, setup, traffic(context), context) for name, setup, context in setups_]


def setups(
    fleet: Fleet, models: Sequence[str], link: Link, prefill: str | None, decode: str | None
) -> Iterator[tuple[str, Setup, int]]:
    """(model, setup, context) for each model, by canonical name, on each pair of different machines that serve it.

    prefill, decode: devices in place of those of hosts.toml. Raises UsageError if a host has neither.
    """
    from disagg.planning.devices import device
    from disagg.planning.plan import Setup
    from disagg.planning.sizing import hardware_of, read_size, size_source

    for name in models:
        model = fleet.models[name]
        seen: set[tuple[str, str]] = set()
        for source, sink in _pairs(fleet, name):
            reader = device(hardware_of(source.name, source.hardware, prefill))
            writer = device(hardware_of(sink.name, sink.hardware, decode))
            if (reader.name, writer.name) not in seen:
                seen.add((reader.name, writer.name))
                options = source.engine
                setup = Setup(
                    read_size(size_source(model.name, model.sources.values())),
                    reader,
                    writer,
                    link,
                    options.dtype,
                    options.chunk_tokens,
                )
                yield name, setup, model.context


def _pairs(fleet: Fleet, model: str) -> list[tuple[Host, Host]]:
    from disagg.errors import UsageError

    pairs = [(a, b) for a in fleet.serving(model, "prefill") for b in fleet.serving(model, "decode")]
    if not pairs:
        raise UsageError(
            f"{model} has no pair of a prefill and a decode host in {fleet.path.name}", "add the missing one"
        )
    return pairs
