"""What views are made of: plain tables, lists that are broken between their items only, text beside a mark."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Names = Collection[str]


def plain_table(
    *names: str, bold: Names = (), dim: Names = (), right: Names = (), fold: Names = (), whole: Names = (), gap: int = 1
) -> Table:
    """A table with a line below its head and no other. bold, dim, right, fold, whole: the columns that are so; `whole`
    ones are never wrapped. gap: blanks behind a column; without one they are in front, too."""
    padding = (0, gap, 0, 0) if gap else (0, 1)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for name in names:
        table.add_column(
            name,
            style="bold" if name in bold else "dim" if name in dim else "",
            justify="right" if name in right else "left",
            overflow="fold" if name in fold else "ellipsis",
            no_wrap=name in whole,
        )
    return table


def two_lines(above: str, below: str) -> Text:
    """A cell; what is below is dimmed."""
    return Text.assemble(above, "\n", (below, "dim"))


class Items:
    """`head`, then the items. Further lines are indented; an item that is longer than a line is folded."""

    def __init__(self, head: Text, items: Sequence[str], separator: str = ", ") -> None:
        self._head, self._items, self._separator = head, items, separator

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, empty = self._head.copy(), True
        for index, item in enumerate(self._items):
            text = item + (self._separator.rstrip() if index < len(self._items) - 1 else "")
            if not empty and line.cell_len + 1 + len(text) > options.max_width:
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
