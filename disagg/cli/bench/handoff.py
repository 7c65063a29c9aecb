"""`disagg bench handoff`: how fast KV becomes ready caches, beside a bare socket and base64 in JSON."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.completion import complete_host
from disagg.cli.context import settings, stderr, stdout
from disagg.errors import UsageError

if TYPE_CHECKING:
    from disagg.config import Fleet, Host
    from disagg.fleet.link.handoff import Place
    from disagg.planning.shapes import ModelShape


class DTypeName(StrEnum):
    """disagg.config.DType as a choice on the command line."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def handoff(
    context: typer.Context,
    *,
    sender: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST", help="The prefill host that KV leaves.", autocompletion=complete_host),
    ] = None,
    receiver: Annotated[
        str | None,
        typer.Option("--to", metavar="HOST", help="The decode host that KV reaches.", autocompletion=complete_host),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME", help="Whose KV: a known model, or the path of a config.json."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Prompt tokens of one hand-off.")] = 8192,
    dtype: Annotated[DTypeName, typer.Option(help="Of the KV.")] = DTypeName.bfloat16,
    device: Annotated[str, typer.Option(help="Where the prefill host holds it: auto, cpu, cuda, mps.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of each way, taken in turn; one more warms up.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for all of it.")] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Hand over KV that no model computed, from torch tensors to ready MLX caches, in the deployed code itself.

    Between two hosts with --from and --to, else between two processes of this machine. Models need not be there and
    servers need not run. The same processes then move the same bytes over a bare socket and as base64 in JSON.
    """
    from disagg.fleet.link import handoff as rehearsal

    if (sender is None) != (receiver is None):
        raise UsageError("--from and --to go together", "give both hosts, or neither to stay on this machine")
    fleet = settings(context).fleet() if sender is not None else None
    size = _shape(shape, fleet, sender)
    order = rehearsal.Order(size.windows, size.kv_heads, size.head_dim, dtype.value, tokens, rounds, device, timeout)
    with stderr().status("connecting …") as status:
        ends = _place(fleet, sender, "prefill"), _place(fleet, receiver, "decode")
        try:
            status.update(f"handing over {tokens} tokens of {size.name}, {rounds} rounds of three ways …")
            figures = rehearsal.rehearse(*ends, order)
        finally:
            for end in ends:
                end.machine.close()
    report: dict[str, Any] = {
        "from": sender or "this machine",
        "to": receiver or "this machine",
        "address": ends[1].address,
        "shape": size.name,
        "tokens": tokens,
        "dtype": dtype.value,
        **figures,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        from disagg.cli.views.handoff import handoff_view

        stdout().print(handoff_view(report))


def _place(fleet: Fleet | None, name: str | None, end: str) -> Place:
    from disagg.fleet.link import handoff as rehearsal

    return rehearsal.here(f"this machine ({end})") if fleet is None else rehearsal.at(_host(fleet, name))


def _host(fleet: Fleet, name: str | None) -> Host:

    return fleet.select([name or ""])[0]


def _shape(name: str | None, fleet: Fleet | None, sender: str | None) -> ModelShape:
    """The one that was asked for, else that of the sender's model, else Qwen3-Coder-30B's."""
    from pathlib import Path

    from disagg.bench.capacity import is_size
    from disagg.planning.sizing import SHAPE, read_size, size_source

    if name is not None:
        return read_size(name if is_size(name) or Path(name).exists() else f"{SHAPE}{name}")
    if fleet is not None:
        model = fleet.models[_host(fleet, sender).model]
        return read_size(size_source(model.name, model.sources.values()))
    return read_size(f"{SHAPE}qwen3-coder-30b")
