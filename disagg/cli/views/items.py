"""Texts over several lines: a list that is broken between its items only, and a text that stays beside its mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text


class Items:
    """`head`, then the items. Further lines are indented; an item that is longer than a line is folded."""

    def __init__(self, head: Text, items: Sequence[str], separator: str = ", ") -> None:
        self._head, self._items, self._separator = head, items, separator

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._lines(options.max_width)

    def _lines(self, width: int) -> Iterator[Text]:
        line, empty = self._head.copy(), True
        for index, item in enumerate(self._items):
            text = item + (self._separator.rstrip() if index < len(self._items) - 1 else "")
            if not empty and line.cell_len + 1 + len(text) > width:
                yield line
                line, empty = Text("  "), True
            line.append(text if empty else f" {text}")
            empty = False
        yield line


class Hanging:
    """A text after its mark, with further lines below its beginning."""

    def __init__(self, mark: Text, text: Text) -> None:
        self._mark, self._text = mark, text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - len(self._mark))
        for number, line in enumerate(self._text.wrap(console, width)):
            line.rstrip()
            yield (Text(" " * len(self._mark)) if number else self._mark) + line
