"""What requests cost: a table for `generate`, panels for `demo`. Footnotes state each figure's formula."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from disagg.api.gateway import ParallelFigures
from disagg.api.names import AS_IS
from disagg.cli.views.items import Items, plain_table, two_lines
from disagg.inference.metrics import Metrics, TTFTParts
from disagg.inference.types import Completion
from disagg.units import counted, duration_steps, seconds, size, speed

NOTES = """\
prefill tok/s: computed prompt tokens / prefill time.
decode tok/s: (output tokens - 1) / decode time.
TTFT: request sent → first token here; its parts add up to it.
loading: the model was loaded. client: time in this program. network: the rest of TTFT."""
_PART_STYLE = {
    "failed_attempts": "red",
    "loading": "bright_yellow",
    "client": "bright_cyan",
    "queue": "bright_black",
    "tokenise": "white",
    "prefill": "blue",
    "tail": "bright_blue",
    "exposed_transfer": "magenta",
    "ingest": "yellow",
    "first_step": "green",
    "whole": "blue",
    "network": "cyan",
}
_PART_NAME = {
    "failed_attempts": "failed attempts",
    "exposed_transfer": "exposed transfer",
    "first_step": "first step",
    "whole": "whole-request host",
}
_BAR_CELLS = 36


def metrics_view(
    completions: Sequence[Completion], noted: Collection[str] = (), *, formulas: bool = False
) -> RenderableType:
    """One row per answer, then each route, the parts of its TTFT and its warnings. noted: warnings that were printed
    while the answer arrived. formulas: of the figures, below."""
    figures = ("tokens", "prefill", "decode", "TTFT", "total")
    table = plain_table("model", *figures, bold=["model"], fold=["model"], right=figures, gap=0)
    for completion in completions:
        metrics = completion.metrics
        table.add_row(
            metrics.model,
            two_lines(f"{metrics.prompt_tokens} in", f"{metrics.completion_tokens} out"),
            two_lines(_known(metrics.prefill_time), speed(metrics.prefill_speed)),
            two_lines(_known(metrics.decode_time), speed(metrics.decode_speed)),
            seconds(metrics.ttft),
            seconds(metrics.total_time),
        )
    notes = [line for completion in completions for line in (_route(completion.metrics), _parts(completion.metrics))]
    return Group(table, Text(), *notes, *_warnings(completions, noted), *([Text(NOTES, "dim")] if formulas else []))


def together_view(figures: ParallelFigures, *, formulas: bool = False) -> RenderableType:
    """What several answers at the same time were worth. formulas: as for `metrics_view`."""
    if figures.efficiency is None:
        return Text()
    head = Text.assemble(
        ("together: ", "bold"),
        f"{seconds(figures.wall)} for {seconds(figures.sequential_sum)} of answers, ",
        f"{100 * figures.efficiency:.0f} % parallel efficiency",
    )
    formula = "parallel efficiency: sum of the answers' times / (time of the longest x their number)."
    return Group(head, *([Text(formula, "dim")] if formulas else []))


def model_panel(completion: Completion) -> Panel:
    """One answer's cost: prefill, decode and total, the KV transfer, then the parts of TTFT."""
    metrics = completion.metrics
    time, rate = Column(justify="right", style="bold"), Column(justify="right", style="bold")
    grid = Table.grid(Column(style="dim"), time, rate, Column(style="dim", overflow="fold"), padding=(0, 2))
    tokens = counted(metrics.completion_tokens, "token")
    prompt = counted(metrics.prompt_tokens, "token")
    grid.add_row("prefill", _known(metrics.prefill_time), speed(metrics.prefill_speed), _at(prompt, metrics, True))
    grid.add_row("decode", _known(metrics.decode_time), speed(metrics.decode_speed), _at(tokens, metrics, False))
    grid.add_row("total", seconds(metrics.total_time), "", f"finished by {completion.finish_reason}")
    parts: list[RenderableType] = [grid, _transfer(metrics), Text(), ttft_view(metrics), *_warnings([completion])]
    return Panel(Group(*parts), title=Text(metrics.model, "bold"), title_align="left", border_style="blue")


def ttft_view(metrics: Metrics) -> RenderableType:
    """TTFT as a bar of its parts, and a legend with each part's time. The printed parts add up to the printed TTFT."""
    parts = _ttft_parts(metrics)
    bar = Text.assemble(*(("█" * cells, _PART_STYLE[name]) for name, cells in _shares(parts, _BAR_CELLS).items()))
    steps, unit = duration_steps(metrics.ttft)
    legend = [
        Text.assemble(("■ ", _PART_STYLE[name]), (f"{_PART_NAME.get(name, name)} ", "dim"), unit(count))
        for name, count in _shares(parts, steps).items()
        if count > 0
    ]
    return Group(
        Text.assemble(("TTFT  ", "dim"), (unit(steps), "bold"), "  ", bar),
        Columns(legend, padding=(0, 2), column_first=False),
    )


def _ttft_parts(metrics: Metrics) -> dict[str, float]:
    return {field.name: getattr(metrics.ttft_parts, field.name) for field in fields(TTFTParts)}


def _parts(metrics: Metrics) -> Items:
    """`TTFT 31.0 ms: client 0.4 ms, queue 2.1 ms`. The printed parts add up to the printed TTFT."""
    steps, unit = duration_steps(metrics.ttft)
    shares = _shares(_ttft_parts(metrics), steps).items()
    named = [f"{_PART_NAME.get(name, name)} {unit(count)}" for name, count in shares if count > 0]
    return Items(Text.assemble((f"{metrics.model}: ", "bold"), f"TTFT {unit(steps)}: "), named)


def footnote() -> Text:
    """The formulas of the panels' figures."""
    transfer = "transfer: hidden while prefill computed; exposed while the answer waited for it."
    return Text(f"{NOTES}\n{transfer}", "dim")


def _known(value: float) -> str:
    """A duration; a dash if there is none, or it is not known."""
    return seconds(value) if value else "–"


def _at(what: str, metrics: Metrics, prefill: bool) -> str:
    server = metrics.prefill_server if prefill else metrics.decode_server
    return f"{what} on {server}" if server else what


def _route(metrics: Metrics) -> Items:
    servers = " → ".join(filter(None, (metrics.prefill_server, metrics.decode_server)))
    items = [f"{metrics.method}, {servers}"]
    if metrics.kv_bytes:
        transfer = f"transfer {seconds(metrics.hidden_transfer)} hidden, {seconds(metrics.exposed_transfer)} exposed"
        items += [f"{_kv(metrics)} {size(metrics.kv_bytes)}", transfer]
    items += filter(None, (_divided(metrics), _held(metrics), metrics.local))
    return Items(Text(f"{metrics.model}: ", "bold"), items, "; ")


def _divided(metrics: Metrics) -> str:
    """Which layers of the prompt each host computed; empty if it was not divided."""
    if metrics.layers is None:
        return ""
    until = "" if metrics.resumed_at is None else f", of the first {counted(metrics.resumed_at, 'token')}"
    head = f"{counted(metrics.layers, 'layer')} on {metrics.prefill_server}"
    return f"{head}, the others on {metrics.decode_server}{until}"


def _held(metrics: Metrics) -> str:
    """How much of the prompt's KV the decode host had from earlier requests; empty if none."""
    return f"held KV of {metrics.held_tokens} of {metrics.prompt_tokens} prompt tokens" if metrics.held_tokens else ""


def _quantised(metrics: Metrics) -> str:
    """How the KV was quantised for the transfer; empty if it was not."""
    return "int8 on the wire" if metrics.kv_wire not in (None, AS_IS) else ""


def _kv(metrics: Metrics) -> str:
    return f"KV {_quantised(metrics)}," if _quantised(metrics) else "KV"


def _transfer(metrics: Metrics) -> Text:
    """What the hand-off transferred, and how many prompt tokens the decode host computed itself."""
    recomputed = f"{metrics.decode_computed_tokens} of {metrics.prompt_tokens}"
    more = "".join(f"\n      {part}" for part in (_divided(metrics), _held(metrics)) if part)
    if not metrics.kv_bytes:
        return Text.assemble(("KV    ", "dim"), f"no hand-off: {metrics.local or metrics.method}", (more, "dim"))
    return Text.assemble(
        ("KV    ", "dim"),
        (size(metrics.kv_bytes), "bold"),
        (f"; {_quantised(metrics)}" if _quantised(metrics) else "", "yellow"),
        ("; transfer ", "dim"),
        f"{seconds(metrics.hidden_transfer)} hidden, {seconds(metrics.exposed_transfer)} exposed",
        ("\n      decode host computed ", "dim"),
        recomputed,
        (" prompt tokens", "dim"),
        (more, "dim"),
    )


def _warnings(completions: Sequence[Completion], noted: Collection[str] = ()) -> list[RenderableType]:
    lines = [f"{c.metrics.model}: {warning}" for c in completions for warning in c.warnings if warning not in noted]
    return [Text.assemble(("warning: ", "bold yellow"), line) for line in lines]


def _shares(parts: dict[str, float], whole: int) -> dict[str, int]:
    """`whole` steps divided in proportion to the parts. The edges between parts are rounded, so the sum is exact."""
    total = sum(parts.values()) or 1.0
    shares, before, edge = {}, 0, 0.0
    for name, value in parts.items():
        edge += value
        now = round(whole * edge / total)
        shares[name], before = now - before, now
    return shares
