"""Answers while they arrive, one panel per model, and when they are whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disagg.cli.views.units import speed
from disagg.inference.several import Answer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SIDE_BY_SIDE = 50  # columns a panel needs
_LIVE_LINES = 24


def printable(text: str) -> str:
    """Model output without control characters, which could drive the terminal; newlines and tabs stay."""
    return _CONTROL.sub("\ufffd", text)


class LiveView:
    """The answers as they are now, in the space the terminal has now."""

    def __init__(self, prompt: str, answers: Sequence[Answer]) -> None:
        self._prompt, self._answers = prompt, answers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = min(console.height - 2, _LIVE_LINES)
        beside = _fits_beside(self._answers, options.max_width)
        each = lines if beside else lines // len(self._answers)
        yield arranged([_panel(self._prompt, answer, max(1, each - 2)) for answer in self._answers], beside)


def final_view(prompt: str, answers: Sequence[Answer], width: int) -> RenderableType:
    """The whole answers, side by side where the width allows it."""
    return arranged([_panel(prompt, answer, None) for answer in answers], _fits_beside(answers, width))


def _fits_beside(answers: Sequence[Answer], width: int) -> bool:
    return len(answers) == 1 or width >= _SIDE_BY_SIDE * len(answers)


def arranged(panels: Sequence[Panel], beside: bool) -> RenderableType:
    """The panels in one row of equal widths, or one below the other."""
    if not beside:
        return Group(*panels)
    grid = Table.grid(expand=True, padding=0)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _panel(prompt: str, answer: Answer, rows: int | None) -> Panel:
    """One answer after its prompt; only the last `rows` lines if that is given."""
    text = Text.assemble((printable(prompt), "dim"), printable(answer.text))
    style = "red" if answer.error else "green" if answer.completion else "yellow"
    return Panel(
        text if rows is None else _Tail(text, rows),
        title=f"[bold]{answer.model}[/]",
        title_align="left",
        subtitle=Text(_footer(answer), "dim"),
        subtitle_align="right",
        border_style=style,
        height=None if rows is None else rows + 2,
    )


def _footer(answer: Answer) -> str:
    """Tokens so far, or how it ended."""
    if answer.error is not None:
        return answer.error.message
    if answer.completion is not None:
        metrics = answer.completion.metrics
        return f"{metrics.completion_tokens} tokens · {speed(metrics.decode_speed)} · {answer.completion.finish_reason}"
    return f"{answer.tokens} tokens" if answer.tokens else "waiting for the first token"


class _Tail:
    """The last `rows` lines of a text, as wrapped to the width it gets."""

    def __init__(self, text: Text, rows: int) -> None:
        self.text, self.rows = text, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, options.max_width, overflow="fold", tab_size=4)
        yield Text("\n").join(lines[-self.rows :])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)
