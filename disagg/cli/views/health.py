"""The fleet's health: a table that fits 80 columns, and what to do about each host that is not healthy."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disagg.api.host_change import HostChange
from disagg.api.keeper import KeptModel, ModelState
from disagg.api.status import SenderAudits
from disagg.cli.views.errors import SharedProblem, host_names, together
from disagg.cli.views.items import plain_table, two_lines
from disagg.errors import printable
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.units import counted, size, uptime

STYLE = {
    "healthy": "green",
    "loading": "yellow",
    "draining": "yellow",
    "silent": "red",
    "stalled": "red",
    "failed": "red",
    "unauthorised": "red",
    "foreign": "red",
    "not running": "dim",
    "unreachable": "magenta",
}

_KEPT_STYLE: Mapping[ModelState, str] = {
    "ready": "green",
    "asleep": "dim",
    "loading": "yellow",
    "draining": "yellow",
    "failed": "red",
    "absent": "red",
}
_STOPPED = re.compile(r"^nothing listens on \S+$")
_WIDE = 72
"""Columns that the whole table needs."""


def health_view(
    statuses: Sequence[HostStatus], all_hosts: Collection[str] = (), *, audits: bool = True
) -> RenderableType:
    """The table, then `host: why` and `→ command` for what is not healthy or worth a remark, then footnotes.

    all_hosts: the names of all hosts of the fleet; a command for all of them names none. audits: with what decode hosts
    found of the KV that they received."""
    states = {status.host: status for status in statuses}
    problems = together([(one.host, _why(one, statuses), one.hint) for one in statuses if one.why], all_hosts)
    hints = [_hint(host_names(one.hosts, all_hosts), one, [states[host] for host in one.hosts]) for one in problems]
    notes = [*_footnotes(statuses), *(_audits(one) for one in statuses if audits and one.senders)]
    return Group(_Table(statuses), *([Text(), *hints] if hints else []), *([Text(), *notes] if notes else []))


def _why(status: HostStatus, statuses: Sequence[HostStatus]) -> str:
    """What is wrong. If several hosts are stopped their ports are left out: it is the same, and stands there once."""
    stopped = [one for one in statuses if one.state == "not running"]
    return _STOPPED.sub("nothing listens on its port", status.why) if len(stopped) > 1 else status.why


def watch_view(statuses: Sequence[HostStatus], all_hosts: Collection[str], every: float) -> RenderableType:
    """The same as of now, and when that was: the time shows whether the view still updates."""
    clock = time.strftime("%H:%M:%S")
    return Group(
        health_view(statuses, all_hosts), Text(), Text(f"{clock}, again every {every:g} s; Ctrl-C ends", "dim")
    )


def health_panel(statuses: Sequence[HostStatus]) -> Panel:
    """The same inside a panel, titled with how many hosts are healthy."""
    healthy = sum(status.ok for status in statuses)
    title = f"Server health: {healthy} of {len(statuses)} healthy"
    return Panel(
        health_view(statuses, audits=False), title=title, border_style="green" if healthy == len(statuses) else "red"
    )


def status_line(status: HostStatus) -> str:
    """One host as one plain line, for output that is no terminal."""
    line = f"{status.host}: {status.state}"
    if not status.ok:
        return f"{line}: {status.why} -> {status.hint}"
    return f"{line} ({', '.join(filter(None, (status.model, status.backend)))})"


def change_line(change: HostChange) -> Text:
    """`12:03:04 mac-studio-1: down: failed: why -> hint`, or `up again after 2m`."""
    clock = time.strftime("%H:%M:%S ", time.localtime(change.time))
    if change.change == "up":
        after = f" after {uptime(change.seconds)}" if change.seconds is not None else ""
        return Text.assemble((clock, "dim"), (f"{change.host}: ", "bold"), (f"up again{after}", "green"))
    why = printable(": ".join(filter(None, (change.state, change.why))))
    hint = Text.assemble(" -> ", (change.hint, "bold cyan")) if change.hint else Text()
    return Text.assemble((clock, "dim"), (f"{change.host}: ", "bold"), ("down: ", "bold red"), why) + hint


class _Table:
    """The table of statuses, with as many columns as there is room for."""

    def __init__(self, statuses: Sequence[HostStatus]) -> None:
        self._statuses = statuses

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self._statuses) if options.max_width >= _WIDE else _narrow_table(self._statuses)


def _narrow_table(statuses: Sequence[HostStatus]) -> Table:
    first, last = "host\nrole", "model\nbackend"
    table = plain_table(first, "health\nup", last, bold=[first], fold=[first, last], whole=["health\nup"])
    for status in statuses:
        host, model, health, *_ = _row(status)
        table.add_row(host, Text.assemble(health, "\n", (uptime(status.uptime_s), "dim")), model)
        for kept in status.models:
            table.add_row("", _kept_state(kept), kept.model)
    return table


def _table(statuses: Sequence[HostStatus]) -> Table:
    fold, state = ("host\nrole", "model\nbackend"), "health\ndevice"
    right = ("run\nwait", "KV used\nheld", "memory\ntotal", "up\nversion")
    table = plain_table(*fold, state, *right, bold=fold[:1], fold=fold, right=right, whole=(state, *right))
    for status in statuses:
        host, model, health, *figures = _row(status)
        table.add_row(host, model, Text.assemble(health, "\n", (_utilisation(status), "dim")), *figures)
        for kept in status.models:
            table.add_row(*_kept_row(kept))
    return table


def _row(status: HostStatus) -> list[Text | str]:
    host = Text.assemble(status.host, "\n", ("\n".join(status.roles), "not bold dim"))
    health = Text(status.state, STYLE[status.state])
    model = two_lines(counted(len(status.models), "model") if status.models else status.model, status.backend or "")
    if not (status.backend or status.models):
        return [host, model, health, *("–" for _ in range(4))]
    memory = status.memory
    return [
        host,
        model,
        health,
        two_lines(_number(status.running), _number(status.queue)),
        two_lines(size(status.kv_bytes), size(status.kv_held_bytes)),
        two_lines(size(status.used_bytes), size(status.budget_bytes))
        if status.models
        else two_lines(size(memory.process if memory else None), size(memory.total if memory else None)),
        two_lines(uptime(status.uptime_s), status.version or ""),
    ]


def _kept_row(kept: KeptModel) -> list[Text | str]:
    """One model of a host with several: memory that it takes, and when it goes."""
    busy = two_lines(_number(kept.running), _number(kept.waiting))
    memory = size(kept.resident_bytes or kept.need_bytes)
    return ["", kept.model, _kept_state(kept), busy, "", memory, _stay(kept)]


def _kept_state(kept: KeptModel) -> Text:
    """Its state; while it loads how far that is, and how long it takes yet."""
    state = Text(kept.state, _KEPT_STYLE[kept.state])
    if kept.state == "loading":
        done = f"{kept.read_bytes / kept.total_bytes:.0%} " if kept.total_bytes else ""
        state.append_text(Text(f"\n{done}{kept.wait_s:.0f} s", "dim"))
    return state


def _stay(kept: KeptModel) -> Text:
    """How long a loaded model stays if nobody uses it."""
    if kept.pinned:
        return Text("pinned", "dim")
    goes = kept.state == "ready" and kept.expires_s is not None
    return Text(f"goes in\n{uptime(kept.expires_s)}" if goes else "", "dim")


def _utilisation(status: HostStatus) -> str:
    """The accelerator's use if the server knows it, else its machine's CPUs'."""
    share, percent = status.device.utilisation, status.device.cpu_percent
    if share is not None:
        return f"{share:.0%} GPU"
    return f"{percent:.0f}% CPU" if percent is not None else ""


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _hint(who: str, shared: SharedProblem, statuses: Sequence[HostStatus]) -> RenderableType:
    worst = next((status for status in statuses if not status.ok), None)
    style = STYLE[worst.state] if worst is not None else "yellow"
    lines = Text.assemble((f"{who}: ", f"bold {style}"), shared.cause)
    if shared.hint:
        lines.append_text(Text.assemble("\n  → ", (shared.hint, "bold cyan")))
    return lines


def _audits(status: HostStatus) -> Text:
    """What a decode host found of the KV of each prefill host."""
    by_sender = (f"{name or 'no name stated'} {_verdict(found)}" for name, found in sorted(status.senders.items()))
    return Text(f"{status.host}: audits of received KV: {'; '.join(by_sender)}", "dim")


def _verdict(found: SenderAudits) -> str:
    """`412 right, at most 3 % of the bound`, or `5 right, 2 wrong`."""
    within = "" if found.highest is None else f" (at most {100 * found.highest:.2g} % of the bound)"
    wrong = f", {found.refuted} wrong" if found.refuted else ""
    return f"{found.accepted} right{within}{wrong}"


def _footnotes(statuses: Sequence[HostStatus]) -> Iterator[RenderableType]:
    for status in statuses:
        if status.last_error:
            ago = uptime(max(0.0, time.time() - status.last_error.time))
            yield Text(f"{status.host}: last failed request {ago} ago: {status.last_error.message}", "dim")
        if status.layers is not None:
            yield Text(f"{status.host}: computes the first {status.layers} layers of prompts, and no answers", "dim")
    decode = {one.model: one.split_refusal for one in statuses if "decode" in one.roles and one.split_refusal}
    for model, refusal in decode.items():
        yield Text(f"{model}: no prompt is computed by two hosts together: {refusal}", "dim")
    running = [status for status in statuses if status.backend]
    unsupervised = [status.host for status in running if status.supervised == "crash"]
    if unsupervised:
        kind, comes = ("plain processes", "they come") if len(unsupervised) > 1 else ("plain process", "it comes")
        who = "All run as" if len(unsupervised) == len(running) > 1 else f"{', '.join(unsupervised)}:"
        yield Text(f"{who} {kind}: {comes} back after a crash, not after a reboot", "dim")
