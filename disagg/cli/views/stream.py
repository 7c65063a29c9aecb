"""Answers while they arrive and when they are complete: as text, or in one panel per model."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from disagg.cli.common.context import stderr
from disagg.errors import printable
from disagg.inference.several import ModelAnswer, Watcher
from disagg.units import counted, speed

_SIDE_BY_SIDE: Final = 50  # columns of a panel
_LIVE_LINES: Final = 24
_FRAMES_PER_S: Final = 12
_LOCAL_MODES: Final = 3  # the index in the attributes of termios
# While a frame is drawn, the thread that reads the sockets waits at most this long for the interpreter, not 5 ms.
_SWITCH_INTERVAL_S: Final = 0.0005


class AnswersView(Watcher):
    """Shows answers while the block runs. This one shows nothing, as for --json."""

    def __init__(self, answers: Sequence[ModelAnswer]) -> None:
        self.answers = answers
        self.noted_texts: list[str] = []  # the notes that were shown, in full

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def finish(self) -> None:
        """Show what is not shown yet of answers that are complete, failed or interrupted."""


class OneText(AnswersView):
    """The text of one answer on stdout as it arrives. Control characters reach files and pipes, but no terminal."""

    def arrived(self, answer: ModelAnswer, text: str) -> None:
        _write(printable(text) if sys.stdout.isatty() else text)

    def noted(self, answer: ModelAnswer, note: str) -> None:
        self.noted_texts.append(note)
        begun = answer.text and not answer.text.endswith("\n") and sys.stdout.isatty()
        stderr().print(Text(f"{chr(10) if begun else ''}note: {note}", "dim"), soft_wrap=not stderr().is_terminal)

    def finish(self) -> None:
        text = self.answers[0].text
        if text and not text.endswith("\n"):
            _write("\n")


class HeadedTexts(AnswersView):
    """Each text under a header once it is complete, for files and pipes."""

    def __init__(self, answers: Sequence[ModelAnswer]) -> None:
        super().__init__(answers)
        self._written: set[str] = set()

    def arrived(self, answer: ModelAnswer, text: str) -> None:
        if answer.completion is not None:
            self._written.add(answer.model)
            _write(f"== {answer.model} ==\n{answer.text}\n")

    def finish(self) -> None:
        for answer in self.answers:
            if answer.text and answer.model not in self._written:
                _write(f"== {answer.model} (incomplete) ==\n{answer.text}\n")


class Panels(AnswersView):
    """One panel per model on the terminal, and the complete panels at the end. A thread of its own draws them anew
    while the texts arrive. rows: of each complete text, the last so many lines only."""

    def __init__(
        self, answers: Sequence[ModelAnswer], prompt: str, console: Console, *, rows: int | None = None
    ) -> None:
        super().__init__(answers)
        self._prompt, self._console, self._rows = prompt, console, rows
        view = LiveView(prompt, answers)
        self._live = Live(view, console=console, refresh_per_second=_FRAMES_PER_S, transient=True)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(without_echo(self._console))
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            stack.callback(self._live.stop)
            self._live.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def finish(self) -> None:
        self._console.print(final_view(self._prompt, self.answers, self._console.width, self._rows))


@contextmanager
def without_echo(console: Console, *, typed: bool = False) -> Iterator[None]:
    """Keep the terminal from printing ^C, which would move the cursor to the next row and leave a line of the panels.

    typed: nor does it print what is typed; that stays in the terminal's queue for who reads it next.

    Does nothing in the background, where a change of the terminal would stop the program.
    """
    try:
        terminal = console.file.fileno()
        before = termios.tcgetattr(terminal)
        foreground = os.tcgetpgrp(terminal) == os.getpgrp()
    except (OSError, ValueError, termios.error):
        foreground = False
    if not foreground:
        yield
        return
    modes = before.copy()
    modes[_LOCAL_MODES] &= ~(termios.ECHOCTL | (termios.ECHO if typed else 0))
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    try:
        yield
    finally:
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(terminal) == os.getpgrp():
                termios.tcsetattr(terminal, termios.TCSANOW, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class LiveView:
    """The answers as they are now, in the size that the terminal has now."""

    def __init__(self, prompt: str, answers: Sequence[ModelAnswer]) -> None:
        self._prompt, self._answers = prompt, answers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = min(console.height - 2, _LIVE_LINES)
        beside = _fits_beside(self._answers, options.max_width)
        each = lines if beside else lines // len(self._answers)
        yield arranged([_panel(self._prompt, answer, max(1, each - 2)) for answer in self._answers], beside)


def final_view(prompt: str, answers: Sequence[ModelAnswer], width: int, rows: int | None = None) -> RenderableType:
    """The complete texts, side by side if the width allows it. rows: of each, the last so many lines only."""
    return arranged([_panel(prompt, answer, rows) for answer in answers], _fits_beside(answers, width))


def _fits_beside(answers: Sequence[ModelAnswer], width: int) -> bool:
    return len(answers) == 1 or width >= _SIDE_BY_SIDE * len(answers)


def arranged(panels: Sequence[Panel], beside: bool) -> RenderableType:
    """The panels in one row of equal widths, or one below the other."""
    if not beside:
        return Group(*panels)
    grid = Table.grid(*(Column(ratio=1) for _ in panels), expand=True, padding=0)
    grid.add_row(*panels)
    return grid


def _panel(prompt: str, answer: ModelAnswer, rows: int | None) -> Panel:
    """One answer after its prompt; only the last `rows` lines if that is given."""
    text = Text.assemble((printable(prompt), "dim"), printable(answer.text))
    style = "red" if answer.error else "green" if answer.completion else "yellow"
    return Panel(
        text if rows is None else _Tail(text, rows),
        title=Text(answer.model, "bold"),
        title_align="left",
        subtitle=Text(_footer(answer), "dim"),
        subtitle_align="right",
        border_style=style,
        height=None if rows is None else rows + 2,
    )


def _footer(answer: ModelAnswer) -> str:
    """Tokens so far, or how the answer ended."""
    if answer.error is not None:
        return answer.error.message
    if answer.completion is not None:
        metrics = answer.completion.metrics
        tokens, rate = counted(metrics.completion_tokens, "token"), speed(metrics.decode_speed)
        return f"{tokens} · {rate} · {answer.completion.finish_reason}"
    if answer.tokens:
        return counted(answer.tokens, "token")
    return answer.notes[-1] if answer.notes else "waiting for the first token"


class _Tail:
    """The last `rows` lines of a text, wrapped to the width it gets. Wraps no more text than can fit."""

    def __init__(self, text: Text, rows: int) -> None:
        self.text, self.rows = text, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        end = Text("\n").join(self.text.split("\n", allow_blank=True)[-self.rows :])
        lines = end[-self.rows * options.max_width :].wrap(console, options.max_width, overflow="fold", tab_size=4)
        yield Text("\n").join(lines[-self.rows :])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)
