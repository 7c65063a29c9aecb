"""Plans of deployments: their steps, what they change, and one table of how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from disagg.cli.views.errors import error_views, host_names, host_options, together
from disagg.cli.views.items import Hanging, plain_table
from disagg.errors import printable
from disagg.fleet.deploy.compare import Difference, PackageChange
from disagg.fleet.deploy.deployment import DeployResult
from disagg.fleet.lifecycle.status.compare import UNFINISHED
from disagg.units import counted, seconds, size

_START = "disagg start --host "
_STYLE = {"changed": "green", "unchanged": "dim", "planned": "cyan", "failed": "bold red"}
MAX_NAMES: Final = 6
"""The most names of files, and of packages, that are shown of one host; `--json` has all."""
MAX_LINES: Final = 60
"""The most lines that are shown of one host's settings."""
_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}


def plan_view(reports: Sequence[DeployResult], all_hosts: Collection[str] = ()) -> RenderableType:
    """Every host's steps, or why there are none. `all_hosts`: the names of all hosts of the fleet."""
    steps = [line for report in reports for line in _plan_lines(report)]
    return Group(*steps, *_errors(reports, all_hosts), Text(), _summary(reports))


def question(verb: str, changing: Sequence[DeployResult], hosts: int) -> str:
    """What is asked after the plan: `Deploy on 2 of 4 hosts (they download 5.2 GiB of packages)?`."""
    plans = [report.plan for report in changing if report.plan is not None]
    building = [plan for plan in plans if any(step.name == "environment" for step in plan.steps)]
    nbytes = sum(plan.package_bytes for plan in building)
    who = "it downloads" if len(changing) == 1 else "they download"
    download = f" ({who} {size(nbytes)} of packages)" if nbytes else ""
    return f"{verb} on {len(changing)} of {counted(hosts, 'host')}{download}?"


def _errors(reports: Sequence[DeployResult], all_hosts: Collection[str]) -> Iterator[RenderableType]:
    return error_views([(report.host, report.error) for report in reports if report.error is not None], all_hosts)


def _plan_lines(report: DeployResult) -> Iterator[RenderableType]:
    plan = report.plan
    release = f"  release {plan.release}" if plan is not None and plan.release else ""
    if report.error is not None:
        yield Text.assemble((report.host, "bold"), "  ", ("cannot be deployed", "bold red"))
        return
    steps = plan.steps if plan is not None else ()
    count = counted(len(steps), "step") if steps else "unchanged"
    yield Text.assemble((report.host, "bold"), f"  {count}", (release, "dim"))
    for number, step in enumerate(steps, 1):
        yield Hanging(Text(f"  {number:2} ", "dim"), Text(step.what))
    for note in plan.notes if plan else ():
        yield Hanging(Text("   ! ", "yellow"), Text(note))
    if plan is not None and plan.down:
        yield Hanging(Text("   ! ", "bold red"), Text(f"{plan.down}: disagg start --host {report.host}", "red"))
    if report.difference is not None:
        yield from difference_lines(report.difference)


def reports_view(
    reports: Sequence[DeployResult],
    all_hosts: Collection[str] = (),
    pulling: Collection[str] = (),
    words: Mapping[str, str] = MappingProxyType({}),
) -> RenderableType:
    """One row per host, then each failure with its last lines and its hint, then what to do next.

    `all_hosts`: the names of all hosts of the fleet. `pulling`: hosts whose models are pulled, not deployed. `words`:
    other words for results, as for uninstalling.
    """
    right, first = ("steps", "sent", "took"), ["host"]
    table = plain_table(
        "host", "result", "release", *right, right=right, bold=first, fold=first, dim=["release"], gap=0
    )
    for report in reports:
        table.add_row(*_row(report, words))
    summary = _summary(reports, words)
    return Group(table, *_errors(reports, all_hosts), Text(), summary, *_next(reports, all_hosts, pulling))


def _row(report: DeployResult, words: Mapping[str, str]) -> tuple[RenderableType, ...]:
    plan = report.plan
    changed = report.result == "changed"
    return (
        report.host,
        Text(words.get(report.result, report.result), _STYLE[report.result]),
        plan.release[:8] if plan is not None and report.ok else "",
        str(len(plan.steps)) if plan is not None and changed else "–",
        size(report.sent) if changed else "–",
        seconds(report.seconds),
    )


def _summary(reports: Sequence[DeployResult], words: Mapping[str, str] = MappingProxyType({})) -> Text:
    """`2 changed, 1 unchanged, 1 failed`."""
    counts: Counter[str] = Counter(report.result for report in reports)
    parts = [Text(f"{counts[one]} {words.get(one, one)}", style) for one, style in _STYLE.items() if counts[one]]
    return Text(", ").join(parts)


def _next(reports: Sequence[DeployResult], all_hosts: Collection[str], pulling: Collection[str]) -> Iterator[Text]:
    """What is down, though it should serve; then the command that starts serving what was deployed."""
    plans = [one.plan for one in reports if one.result in ("changed", "unchanged") and one.plan is not None]
    for shared in together([(plan.host, plan.down, _START + plan.host) for plan in plans if plan.down], all_hosts):
        who = f"{host_names(shared.hosts, all_hosts)}: {shared.cause}"
        yield Text.assemble(("down: ", "bold red"), (who, "red"), "\n  → ", (shared.hint, "bold cyan"))
    for needs in ("start", "restart"):
        waiting = [plan for plan in plans if plan.needs == needs and not plan.down]
        names = [plan.host for plan in waiting]
        if waiting:
            without_model = [name for name in names if name in pulling] if needs == "start" else []
            pull = f"disagg models pull{host_options(without_model, all_hosts)} && " if without_model else ""
            at_once = " --all-at-once" if any(plan.at_once for plan in waiting) and needs == "restart" else ""
            command = f"{pull}disagg {needs}{at_once}{host_options(names, all_hosts)}"
            yield Text.assemble(("next: ", "bold cyan"), command)


def rotation_view() -> RenderableType:
    """What is shown while a rotation of the token is not finished."""
    return Text.assemble(("token: ", "bold yellow"), UNFINISHED.why, "\n  → ", (UNFINISHED.hint, "bold cyan"))


def difference_lines(found: Difference) -> Iterator[RenderableType]:
    """Below a host's steps. Nothing for what does not change."""
    shown = found.settings[:MAX_LINES]
    if shown:
        yield Hanging(Text("   ~ ", "cyan"), Text("settings"))
    for line in shown:
        yield Hanging(Text("     "), Text(printable(line), _STYLES.get(line[:1], "")))
    if len(found.settings) > MAX_LINES:
        yield Text(f"     and {len(found.settings) - MAX_LINES} more lines: --json", "dim")
    if found.files:
        counts = Counter(found.files.values())
        what = ", ".join(f"{count} {change}" for change, count in sorted(counts.items()))
        yield _changed_line("files", f"{what}: {_some([*found.files])}")
    if found.packages:
        yield _changed_line("packages", _packages(found.packages))
    yield _changed_line("bytes", _bytes(found))


def _changed_line(name: str, text: str) -> RenderableType:
    return Hanging(Text("   ~ ", "cyan"), Text(printable(f"{name}  {text}")))


def _packages(changes: Sequence[PackageChange]) -> str:
    """`1 added, 2 changed: torch 2.12.0 -> 2.13.0, ...`."""
    counts = Counter("changed" if one.before and one.after else "added" if one.after else "removed" for one in changes)
    what = ", ".join(f"{count} {change}" for change, count in sorted(counts.items()))
    return f"{what}: {_some([_package(one) for one in changes])}"


def _package(change: PackageChange) -> str:
    if not change.before:
        return f"+{change.name} {change.after}"
    return f"{change.name} {change.before} -> {change.after}" if change.after else f"-{change.name} {change.before}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _bytes(found: Difference) -> str:
    download = f", {size(found.to_download)} to download at most" if found.to_download else ""
    return f"{size(found.to_send)} to send, before compression{download}"
