"""The hooks of a command line: which will run, and what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from disagg.cli.common.context import stderr
from disagg.cli.views.items import Hanging
from disagg.errors import printable

if TYPE_CHECKING:
    from disagg.config import Fleet
    from disagg.fleet.changes.hooks import HookRunner


def hook_runner(fleet: Fleet, command: str) -> HookRunner:
    """Runs the hooks of a command of disagg; stderr shows what they print."""
    from disagg.fleet.changes.hooks import HookRunner

    return HookRunner(fleet, command, hook_output(stderr()))


def hooks_view(hooks: Mapping[str, str]) -> Iterator[RenderableType]:
    """A line for each hook that a plan runs: its name and its command."""
    for name, line in hooks.items():
        yield Hanging(Text.assemble(("hook ", "dim"), (f"{name} ", "bold")), Text(line))


def hook_output(console: Console) -> Callable[[str, str], None]:
    """Prints what hooks print, each line after the name of its hook."""

    def show(hook: str, line: str) -> None:
        console.print(Text.assemble((f"{hook}: ", "bold"), printable(line)), soft_wrap=True)

    return show
