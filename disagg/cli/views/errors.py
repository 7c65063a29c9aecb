"""How an error looks: what failed, then how to fix it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from disagg.errors import DisaggError


def error_view(error: DisaggError) -> RenderableType:
    """Two lines: `error: <message>` and, if it has one, `hint: <hint>`."""
    lines = [Text.assemble(("error: ", "bold red"), error.message)]
    if error.hint:
        lines.append(Text.assemble((" hint: ", "bold cyan"), error.hint))
    return Group(*lines)
