"""Log lines for people: time, host in a colour of its own, event, and the line's other fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich.text import Text

from disagg.errors import printable
from disagg.fleet.lifecycle.loglines import entry
from disagg.fleet.lifecycle.logs import LogLine

_COLOURS: Final = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
_LEVELS: Final = {"error": "bold red", "critical": "bold red", "warning": "yellow"}
_SHOWN: Final = frozenset({"time", "level", "event", "traceback"})


def coloured(hosts: Sequence[str]) -> dict[str, Text]:
    """The names of these hosts, of one width, each in a colour of its own."""
    width = max(map(len, hosts), default=0)
    return {host: Text(f"{host:<{width}}", _COLOURS[index % len(_COLOURS)]) for index, host in enumerate(hosts)}


class LogView:
    """Lines of these hosts, their names in one column. dated: with the day, for lines that are rare."""

    def __init__(self, hosts: Sequence[str], *, dated: bool = False) -> None:
        self._clock = "%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S.%f"
        self._names = coloured(hosts)

    def line(self, line: LogLine) -> Text:
        """One line of a log; a traceback in it goes on below."""
        clock = datetime.fromtimestamp(line.time).strftime(self._clock) if line.time else " " * 12
        clock = clock[:-3] if self._clock.endswith("%f") and line.time else clock
        head = Text.assemble((clock, "dim"), " ", self._names.get(line.host, Text(line.host)), " ")
        if line.notice:
            return head.append(printable(line.text), "italic yellow")
        fields = line.fields
        if fields is not None and fields.get("host") == line.host:  # it is already in front
            fields = {key: value for key, value in fields.items() if key != "host"}
        return head.append_text(message(fields, line.text))


def raw_line(text: str) -> Text:
    """One line as it stands in a log, without its time."""
    return message(entry(text), text)


def message(fields: Mapping[str, Any] | None, text: str) -> Text:
    """`event key=value ...`; a line that is not JSON unchanged."""
    if fields is None or ("event" not in fields and "message" not in fields):
        return Text(printable(text))
    shown = Text(
        printable(str(fields.get("event", fields.get("level", "")))), _LEVELS.get(str(fields.get("level")), "bold")
    )
    for key, value in fields.items():
        if key not in _SHOWN and value not in ("", None):
            _append(shown, key, value)
    if isinstance(fields.get("traceback"), str):
        shown.append("\n" + printable(fields["traceback"]), "red")
    return shown


def _append(shown: Text, key: str, value: object) -> None:
    """` key=value`; of an object, ` key(name=value ...)`; of a measured number, what a person reads of it."""
    shown.append(f" {printable(key)}", "dim")
    if isinstance(value, dict):
        parts = Text()
        for name, part in value.items():
            _append(parts, str(name), part)
        shown.append_text(Text.assemble(("(", "dim"), parts[1:], (")", "dim")))
        return
    number = f"{value:.3g}" if isinstance(value, float) else None
    shown.append("=", "dim")
    shown.append(printable(value if isinstance(value, str) else number or json.dumps(value)))
