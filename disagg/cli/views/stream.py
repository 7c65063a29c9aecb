"""Answers while they arrive: one panel per model, of equal height, showing the latest lines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disagg.cli.views.units import speed
from disagg.inference.types import Completion

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SIDE_BY_SIDE = 50  # columns per panel


class LiveAnswer:
    """One model's answer so far."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.text = ""
        self.tokens = 0
        self.seconds = 0.0
        self.completion: Completion | None = None
        self.failure = ""

    @property
    def footer(self) -> str:
        """The line under the panel: tokens and speed so far, or how it ended."""
        if self.failure:
            return self.failure
        if self.completion is not None:
            metrics = self.completion.metrics
            return f"{metrics.completion_tokens} tokens, {speed(metrics.decode_speed)}, {self.completion.finish_reason}"
        return f"{self.tokens} tokens" if self.tokens else "waiting for the first token"


def printable(text: str) -> str:
    """Model output without control characters, which could drive the terminal; newlines and tabs stay."""
    return _CONTROL.sub("\ufffd", text)


def stream_view(prompt: str, answers: Mapping[str, LiveAnswer], width: int, height: int) -> RenderableType:
    """The panels side by side where the width allows it, stacked otherwise. `height`: lines for all of it."""
    beside = len(answers) == 1 or width >= _SIDE_BY_SIDE * len(answers)
    rows = max(3, (height - 2) if beside else (height - 2) // max(1, len(answers)) - 2)
    panels = [_panel(prompt, answer, rows) for answer in answers.values()]
    if not beside:
        return Group(*panels)
    grid = Table.grid(expand=True, padding=0)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _panel(prompt: str, answer: LiveAnswer, rows: int) -> Panel:
    text = Text.assemble((printable(prompt), "dim"), printable(answer.text))
    done = answer.completion is not None
    style = "red" if answer.failure else "green" if done else "yellow"
    return Panel(
        _Tail(text, rows),
        title=f"[bold]{answer.model}[/]",
        title_align="left",
        subtitle=f"[dim]{answer.footer}[/]",
        subtitle_align="right",
        border_style=style,
        height=rows + 2,
    )


class _Tail:
    """The last `rows` lines of a text, as wrapped to the width it gets."""

    def __init__(self, text: Text, rows: int) -> None:
        self.text, self.rows = text, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, options.max_width, overflow="fold", tab_size=4)
        yield Text("\n").join(lines[-self.rows :])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)
