"""An answer while it arrives: as it is, or as Markdown that grows."""

from __future__ import annotations

import sys
import threading
import time
from queue import Empty, SimpleQueue
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, emphasis, newline
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from disagg.errors import printable

if TYPE_CHECKING:
    from disagg.inference.types import Chunk


_FRAME_S: Final = 1 / 12
_REST_PER_WORK: Final = 3
_THOUGHT: Final = "dim italic"
_PARSER: Final = MarkdownIt().enable("strikethrough").enable("table").disable(["html_block", "html_inline"])
"""Tags are text: a model that writes `List<int>` means no HTML."""
_BLOCKS: Final = MarkdownIt().enable("table").disable("html_block")
"""Finds where blocks begin, and does not parse what is in them: that costs the most by far."""
_HEADS: Final = {"fence": 1, "table_open": 2}  # lines without which the others are no part of such a block
_LISTS: Final = ("bullet_list_open", "ordered_list_open")


def pause_after(work_s: float) -> float:
    """Seconds from the end of a frame to the next one. A frame that took long is followed by a pause that is longer:
    the thread that draws never has more than a quarter of the time, and the client that reads the sockets the rest."""
    return max(_FRAME_S, _REST_PER_WORK * work_s)


class ShownAnswer:
    """Shows one answer while it arrives: this one as it is, what the model thinks and notes apart. Control characters
    reach files and pipes, but no terminal."""

    def __init__(self, notes: Console) -> None:
        self._notes = notes
        self.noted_texts: list[str] = []
        self._thinks = False
        self._line_open = False

    def add(self, chunk: Chunk) -> None:
        """Show one more piece."""
        if chunk.note:
            self.noted_texts.append(chunk.note)
            self.note(printable(chunk.note))
        if chunk.reasoning:
            self.thought(printable(chunk.reasoning))
        if chunk.text:
            self.text(chunk.text)

    def note(self, text: str) -> None:
        self._notes.print(Text(f"note: {text}", "dim"))

    def thought(self, text: str) -> None:
        self._thinks = True
        self._notes.print(Text(text, _THOUGHT), end="", soft_wrap=True)

    def text(self, text: str) -> None:
        if self._thinks:
            self._thinks = False
            self._notes.print("\n")
        self._line_open = not text.endswith("\n")
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def end(self) -> None:
        """The answer has ended."""
        if self._line_open or self._thinks:
            self.text("\n")


class _Piece(NamedTuple):
    kind: Literal["note", "thought", "text"]
    text: str


class ShownMarkdown(ShownAnswer):
    """An answer as Markdown. Blocks that are complete are printed once; only the last one is drawn anew, so that the
    terminal scrolls and nothing flickers. A thread of its own parses and draws: the caller's event loop, which extends
    the request's lease, only puts pieces into a queue."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._page = _Page(console)
        self._thread = threading.Thread(target=self._run, name="markdown", daemon=True)
        self._thread.start()

    def note(self, text: str) -> None:
        self._put(_Piece("note", text))

    def thought(self, text: str) -> None:
        self._put(_Piece("thought", text))

    def text(self, text: str) -> None:
        self._put(_Piece("text", printable(text)))

    def end(self) -> None:
        self._ended.set()
        self._pieces.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _put(self, piece: _Piece) -> None:
        if self._error is not None:
            raise self._error
        self._pieces.put(piece)

    def _run(self) -> None:
        try:
            with self._page:
                while self._take():
                    began = time.monotonic()
                    self._page.draw()
                    self._ended.wait(pause_after(time.monotonic() - began))
        except Exception as error:  # noqa: BLE001 - raised where the next piece is added
            self._error = error

    def _take(self) -> bool:
        """Put all that has arrived on the page, at least one piece; False at the answer's end."""
        piece = self._pieces.get()
        try:
            while piece is not None:
                self._page.add(piece)
                piece = self._pieces.get_nowait()
        except Empty:
            return True
        return False


class _Page:
    """What one answer has on the terminal. Leaving the block prints what is not complete as it is then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False
        self._thoughts: list[str] = []
        self._rest: list[str] = []
        self._live = Live(Text(), console=console, auto_refresh=False, transient=True)
        self._live.start()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._end_thoughts()
        self._print_whole_blocks()
        self._block("".join(self._rest))

    def add(self, piece: _Piece) -> None:
        if piece.kind == "note":
            self._console.print(Text(f"note: {piece.text}", "dim"))
        elif piece.kind == "thought":
            self._thoughts.append(piece.text)
        else:
            self._end_thoughts()
            self._rest.append(piece.text)

    def draw(self) -> None:
        """Print the blocks that are complete, and draw the end of the last one."""
        lines, columns = max(1, self._console.height - 2), self._console.width
        if self._thoughts:
            thoughts = "".join(self._thoughts)[-lines * columns :]
            tail: RenderableType = Text(thoughts, _THOUGHT)
        else:
            self._print_whole_blocks()
            tail = AnswerMarkdown(end_of_block("".join(self._rest), lines, columns))
        self._live.update(_LastLines(tail), refresh=True)

    def _print_whole_blocks(self) -> None:
        text = "".join(self._rest)
        if whole := whole_blocks(text):
            self._rest = [text[whole:]]
            self._block(text[:whole])

    def _end_thoughts(self) -> None:
        if thoughts := "".join(self._thoughts).strip():
            self._console.print(Text(thoughts, _THOUGHT))
            self._begun = True
        self._thoughts = []

    def _block(self, text: str) -> None:
        if text.strip():
            if self._begun:
                self._console.print()
            self._begun = True
            self._console.print(AnswerMarkdown(text))


class _LastLines:
    """The last lines of what is not complete, as many as the terminal has."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


_BLOCKS.core.ruler.disable("inline")


def _newline(state: StateInline, silent: bool) -> bool:
    """The end of a line. The spaces that begin the next one stay: models write code without fences, too."""
    end = state.pos + 1
    found = newline(state, silent)
    state.pos = end if found else state.pos
    return found


def _emphasis(state: StateInline, silent: bool) -> bool:
    """Only stars emphasize: in what models write, `__init__` and `_rest` are names."""
    return state.src[state.pos] != "_" and emphasis.tokenize(state, silent)


_PARSER.inline.ruler.at("newline", _newline)
_PARSER.inline.ruler.at("emphasis", _emphasis)


def whole_blocks(text: str) -> int:
    """How many characters of a Markdown text are blocks that nothing that follows can change: all but the last."""
    starts = [token.map[0] for token in _BLOCKS.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    return sum(len(line) for line in text.splitlines(keepends=True)[: starts[-1]]) if starts else 0


def end_of_block(text: str, lines: int, columns: int) -> str:
    """The end of an unfinished block, as much of it as a screen of this size shows, so that to draw it costs the same
    however long the block is. The end of a code block or of a table keeps its head."""
    rows = text.splitlines(keepends=True)
    if len(rows) <= lines and len(text) <= lines * columns:
        return text
    cut = max(0, len(rows) - lines)
    tokens, head = _BLOCKS.parse(text), ""
    for token in tokens:
        if token.map and token.type in _HEADS and token.map[0] < len(rows) <= token.map[1]:
            begin, size = token.map[0], _HEADS[token.type]
            head = dedent("".join(rows[begin : begin + size]))
            cut = max(cut, begin + size)
    end = "".join(rows[cut:])[-lines * columns :]
    return head + (dedent(end) if tokens[0].type in _LISTS else end)


class AnswerMarkdown(Markdown):
    """Markdown as models write it: a line break is one, indentation stays, and tags and underscores are text."""

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            _keep_lines(token)


def _keep_lines(token: Token) -> None:
    if token.type == "code_block":  # Markdown takes four spaces from each of its lines
        token.content = indent(token.content, " " * 4)
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
