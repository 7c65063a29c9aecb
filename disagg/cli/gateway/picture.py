"""What `disagg top` shows, and what its keys change. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from disagg.api.gateway import LiveHost, LiveModel, LiveRequest, LiveState
from disagg.cli.gateway.history import HistoryView, hosts
from disagg.cli.views.items import plain_table
from disagg.units import seconds, size, speed

T = TypeVar("T")
Order = Literal["time", "tokens", "model"]
Part = Literal["all", "requests", "hosts", "last"]

ORDERS: Final[Sequence[Order]] = ("time", "tokens", "model")
PARTS: Final[Sequence[Part]] = ("all", "requests", "hosts", "last")
FEW: Final = 8  # rows of a part beside the others
CUT: Final = "…"
ONE_PART: Final = "… d shows one part at a time"
KEYS: Final = "s sort · m model · d part · space pause · q quit"
_SEQUENCE: Final = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O?[^\x1b])")
_WIDE: Final = 60  # columns, below which tables leave some out
_PHASES: Final[Mapping[str, tuple[int, str]]] = {
    "queue": (1, "bright_black"),
    "loading": (1, "yellow"),
    "prefill": (2, "blue"),
    "transfer": (3, "yellow"),
    "decode": (4, "green"),
}
_STATES: Final[Mapping[str, str]] = {
    "up": "green",
    **dict.fromkeys(("loading", "draining", "failing"), "yellow"),
    "asleep": "dim",
}
_NONE_ENDED: Final = Text("no request has ended yet", style="dim")
_UNKNOWN: Final = Text("requests and answers are known to gateways only: disagg serve", style="dim")


@dataclass(frozen=True, slots=True)
class ScreenChoice:
    """What is shown: the requests' order, one model or all (None), one part or all, and whether it stands still."""

    order: Order = "time"
    model: str | None = None
    part: Part = "all"
    paused: bool = False


def keys_of(read: str) -> str:
    """The keys in what one read of the terminal gave. Arrow and function keys, which begin with an escape, are none."""
    return _SEQUENCE.sub("", read)


def press(shown: ScreenChoice, key: str, state: LiveState) -> ScreenChoice | None:
    """What is shown after this key; None: end. Other keys change nothing."""
    if key in ("q", "Q", "\x1b"):
        return None
    changes: Mapping[str, Callable[[], ScreenChoice]] = {
        "s": lambda: replace(shown, order=_next(ORDERS, shown.order)),
        "d": lambda: replace(shown, part=_next(PARTS, shown.part)),
        "m": lambda: replace(shown, model=_next((None, *(model.name for model in state.models)), shown.model)),
        " ": lambda: replace(shown, paused=not shown.paused),
    }
    change = changes.get(key.lower())
    return change() if change else shown


def top_view(state: LiveState, shown: ScreenChoice, note: str = "", *, keys: bool = True) -> RenderableType:
    """The whole picture. note: stated below it, such as that the gateway does not answer. keys: whether some work; then
    it is one screen, and what has no place on it is left out above the note."""
    models = [model for model in state.models if shown.model in (None, model.name)]
    requests = [one for one in state.requests if shown.model in (None, one.model)]
    seen = [host for host in state.hosts if shown.model in (None, host.model)]
    last = [entry for entry in state.last if shown.model in (None, entry.model)]
    many = None if shown.part != "all" else FEW
    unknown = state.source == "hosts"
    parts: dict[Part, RenderableType] = {
        "requests": _UNKNOWN if unknown else _requests(_sorted(requests, shown.order)[:many], shown.order),
        "hosts": _hosts(seen),
        "last": HistoryView(last[:many]) if last else _UNKNOWN if unknown else _NONE_ENDED,
    }
    everything = [part for name, part in parts.items() if not (unknown and name == "last")]
    chosen = everything if shown.part == "all" else [parts[shown.part]]
    spaced = [piece for part in chosen for piece in (Text(), part)]
    lines = [Text(line, style) for line, style in ((note, "yellow"), (KEYS if keys else "", "dim")) if line]
    foot = Group(Text(), *lines) if lines else Group()
    body = Group(_head(state, shown), Text(), _models(models, unknown=unknown), *spaced)
    return _OneScreen(body, foot, ONE_PART if shown.part == "all" else CUT) if keys else Group(body, foot)


@dataclass(frozen=True, slots=True)
class _OneScreen:
    """The body, and the foot, which is always seen. cut: in place of the lines that the terminal has no rows for."""

    body: RenderableType
    foot: RenderableType
    cut: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body, foot, cut = (
            console.render_lines(one, options, pad=False) for one in (self.body, self.foot, Text(self.cut, "dim"))
        )
        rows = options.size.height - len(foot)
        if len(body) > rows:
            body = [*body[: max(0, rows - len(cut))], *cut]
        for line in (*body, *foot):
            yield from line
            yield Segment.line()


def _next(values: Sequence[T], value: T) -> T:
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]


def _head(state: LiveState, shown: ScreenChoice) -> Text:
    totals = state.totals
    filtered = f" · {shown.model}" if shown.model else ""
    counted = f"{totals.completion_tokens_s:,.0f} tok/s, {totals.ok:,} answers, {totals.failed:,} failed, "
    if state.source == "hosts":
        counted = ""
    return Text.assemble(
        (state.fleet, "bold"),
        (filtered, "bold"),
        f"  {totals.running} running, {totals.waiting} waiting, {counted}{size(totals.kv_bytes)} of KV",
        ("  paused" if shown.paused else "", "yellow"),
    )


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A table; on a narrow terminal without the columns `drop`."""

    table: Table
    drop: Collection[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = copy(self.table)
        if options.max_width < _WIDE:
            kept = [column for column in table.columns if column.header not in self.drop]
            table.columns = [replace(column, _index=index) for index, column in enumerate(kept)]
            table.caption = None
        yield table


def _models(models: Sequence[LiveModel], *, unknown: bool) -> RenderableType:
    """Each model now, and its last answer: seconds @ tokens per second. unknown: its speed and its answers are."""
    right = ("run", "wait", "tok/s", "prefill", "decode", "TTFT", "total")
    table = plain_table("model", *right, right=right, whole=("model", *right))
    if not unknown:
        table.caption, table.caption_justify = "last answer: prefill, decode: time @ tokens per second", "left"
    for model in models:
        last, totals = model.last, model.totals
        table.add_row(
            Text(model.name),
            str(totals.running),
            str(totals.waiting),
            "–" if unknown else f"{totals.completion_tokens_s:,.0f}",
            _at(last.prefill_time or None, last.prefill_speed) if last else "–",
            _at(last.decode_time or None, last.decode_speed) if last else "–",
            seconds(last.ttft) if last else "–",
            seconds(last.total_time) if last else "–",
        )
    return _Fitting(table, ("wait", "prefill", "decode", "total"))


def _sorted(requests: Sequence[LiveRequest], order: Order) -> list[LiveRequest]:
    keys: Mapping[Order, Callable[[LiveRequest], object]] = {
        "time": lambda one: -one.seconds,
        "tokens": lambda one: -one.tokens,
        "model": lambda one: one.model,
    }
    key = keys[order]
    return sorted(requests, key=lambda one: (key(one), one.number))


def _requests(requests: Sequence[LiveRequest], order: Order) -> RenderableType:
    if not requests:
        return Text("no request runs", style="dim")
    right = ("prompt", "answer", "time")
    whole = ("model", "phase", *right)
    table = plain_table(*whole, "hosts", "caller", right=right, whole=(*whole, "caller"), gap=2)
    table.title = f"requests by {order}"
    table.title_justify = "left"
    for one in requests:
        reached, colour = _PHASES[one.phase]
        phase = Text.assemble(("━" * 2 * reached, colour), ("─" * 2 * (4 - reached), "dim"), f" {one.phase}")
        table.add_row(
            Text(one.model),
            phase,
            f"{one.prompt_tokens:,}" if one.prompt_tokens else "–",
            f"{one.tokens:,}",
            seconds(one.seconds),
            Text(hosts(one.prefill_server, one.decode_server)),
            Text(one.key or one.api),
        )
    return _Fitting(table, ("prompt", "answer", "hosts", "caller"))


def _hosts(seen: Sequence[LiveHost]) -> RenderableType:
    """The table, then what is wrong with a host and the command that helps."""
    right = ("running", "waiting", "KV", "speed")
    names = ("host", "role", "state", *right)
    table = plain_table(*names, right=right, whole=names, gap=2)
    notes = []
    for host in seen:
        measured = host.prefill_tokens_s if host.role == "prefill" else host.decode_tokens_s
        table.add_row(
            Text(host.name),
            host.role,
            Text(host.state, style=_STATES.get(host.state, "red")),
            str(host.running),
            str(host.queue),
            "–" if host.role == "whole" else size(host.kv_bytes + host.kv_held_bytes),
            speed(measured),
        )
        if host.reason and host.state != "asleep":
            hint = (f"\n  → {host.hint}" if host.hint else "", "bold cyan")
            notes.append(Text.assemble((f"{host.name}: ", "bold"), host.reason, hint))
    return Group(_Fitting(table, ("role", "waiting", "KV")), *notes)


def _at(time: float | None, rate: float | None) -> str:
    return seconds(time) + (f" @ {rate:,.0f}" if rate else "")
