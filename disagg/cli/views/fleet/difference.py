"""What a plan changes on a host: settings as a unified diff, files, packages, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from disagg.cli.views.items import Hanging
from disagg.errors import printable
from disagg.fleet.deploy.compare import Difference, PackageChange
from disagg.units import size

MAX_NAMES: Final = 6
"""Of files and of packages of one host; `--json` has all."""
MAX_LINES: Final = 60
"""Of one host's settings."""
_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}


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
        yield _line("files", f"{what}: {_some([*found.files])}")
    if found.packages:
        yield _line("packages", _packages(found.packages))
    yield _line("bytes", _bytes(found))


def _line(name: str, text: str) -> RenderableType:
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
