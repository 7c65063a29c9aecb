"""Output of many hosts, line by line, each line behind the name of its host in that host's colour."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from rich.console import Console
from rich.text import Text

from disagg.errors import printable

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


class Prefixed:
    """Prints whole lines only; `line` may be called from several threads."""

    def __init__(self, console: Console, hosts: Sequence[str]) -> None:
        self._console = console
        self._lock = Lock()
        width = max(map(len, hosts), default=0)
        self._names = {
            host: Text(f"{host:<{width}} │ ", _COLOURS[number % len(_COLOURS)]) for number, host in enumerate(hosts)
        }

    def line(self, host: str, text: str) -> None:
        """One line of a host's output, without control characters: what a file has is shown on a terminal later."""
        with self._lock:
            self._console.print(Text.assemble(self._names[host], printable(text)), soft_wrap=True)
