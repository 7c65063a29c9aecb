"""Hooks: which will run, and what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rich.console import Console, RenderableType
from rich.text import Text

from disagg.cli.views.items import Hanging
from disagg.errors import printable


def hooks_view(hooks: Mapping[str, str]) -> Iterator[RenderableType]:
    """A line for each hook that a plan runs: its name and its command."""
    for name, line in hooks.items():
        yield Hanging(Text.assemble(("hook ", "dim"), (f"{name} ", "bold")), Text(line))


def hook_output(console: Console) -> Callable[[str, str], None]:
    """Prints what hooks print, each line after the name of its hook."""

    def show(hook: str, line: str) -> None:
        console.print(Text.assemble((f"{hook}: ", "bold"), printable(line)), soft_wrap=True)

    return show
