"""A conversation on the terminal: Markdown that grows, one line of figures per answer, and what the commands show."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import indent
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, newline
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from disagg.cli.chat.commands import COMMANDS
from disagg.cli.chat.conversation import Conversation
from disagg.cli.views.metrics import footnote, model_panel
from disagg.cli.views.stream import no_echo_of_control_characters
from disagg.cli.views.units import counted, seconds, speed
from disagg.config import Model
from disagg.errors import DisaggError, printable
from disagg.inference.metrics import Metrics
from disagg.inference.types import Chunk, Completion

_FRAMES_PER_S: Final = 12
_THOUGHT: Final = "dim italic"
_NEARLY_FULL: Final = 0.8  # of the context
_PARSER: Final = MarkdownIt().enable("strikethrough").enable("table").disable(["html_block", "html_inline"])
"""Tags are text: a model that writes `List<int>` means no HTML."""


def _newline(state: StateInline, silent: bool) -> bool:
    """The end of a line. The spaces that begin the next one stay: models write code without fences, too."""
    end = state.pos + 1
    found = newline(state, silent)
    state.pos = end if found else state.pos
    return found


_PARSER.inline.ruler.at("newline", _newline)


def figures_line(metrics: Metrics) -> str:
    """What one answer cost: `3,120 prompt tokens, 3,050 held; TTFT 210 ms; 128 tokens at 85.0 tok/s`."""
    held = f", {metrics.held_tokens:,} held" if metrics.held_tokens else ""
    prompt = f"{metrics.prompt_tokens:,} prompt token{'s' if metrics.prompt_tokens != 1 else ''}{held}"
    rate = f" at {speed(metrics.decode_speed)}" if metrics.decode_speed else ""
    return f"{prompt}; TTFT {seconds(metrics.ttft)}; {counted(metrics.completion_tokens, 'token')}{rate}"


def context_note(completion: Completion, context: int, *, piped: bool = False) -> str:
    """What to know about the context, in tokens, after an answer; empty if nothing. piped: no other turn follows."""
    used, cut = completion.metrics.total_tokens, completion.finish_reason == "length"
    if used >= context and (cut or not piped):
        full = f"The context of {context:,} tokens is full"
        return f"{full}: the answer is cut." if piped else f"{full}: /clear begins a new conversation."
    if cut:
        go_on = "" if piped else 'write "go on", or '
        return f"The answer reached its token limit: {go_on}set a higher --max-tokens."
    if used >= _NEARLY_FULL * context and not piped:
        return f"{used:,} of the {context:,} tokens of the context are used."
    return ""


def whole_blocks(text: str) -> int:
    """How many characters of a Markdown text are blocks that nothing that follows can change: all but the last."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    return sum(len(line) for line in text.splitlines(keepends=True)[: starts[-1]]) if starts else 0


class AnswerMarkdown(Markdown):
    """Markdown as models write it: a line break is one, indentation stays, and tags are text."""

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


class Shown:
    """Shows one answer while it arrives: this one as it is, what the model thinks and notes apart. Control characters
    reach files and pipes, but no terminal."""

    def __init__(self, notes: Console) -> None:
        self._notes = notes
        self._thinks = False
        self._line_open = False

    def add(self, chunk: Chunk) -> None:
        """Show one more piece."""
        if chunk.note:
            self._notes.print(Text(f"note: {printable(chunk.note)}", "dim"))
        if chunk.reasoning:
            self.thought(printable(chunk.reasoning))
        if chunk.text:
            self.text(chunk.text)

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


class ShownMarkdown(Shown):
    """An answer as Markdown. Blocks that are complete are printed once; only the last one is drawn anew, in a thread of
    its own, so that the terminal scrolls and nothing flickers."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._console = console
        self._begun = False
        self._thoughts = ""
        self._rest = ""
        self._live = Live(Text(), console=console, refresh_per_second=_FRAMES_PER_S, transient=True)
        self._live.start()

    def thought(self, text: str) -> None:
        self._thoughts += text
        self._live.update(_Tail(Text(self._thoughts, _THOUGHT)))

    def text(self, text: str) -> None:
        self._end_thoughts()
        self._rest += printable(text)
        if "\n" in text and (whole := whole_blocks(self._rest)):
            done, self._rest = self._rest[:whole], self._rest[whole:]
            self._block(done)
        self._live.update(_Tail(AnswerMarkdown(self._rest)))

    def end(self) -> None:
        self._live.stop()
        self._end_thoughts()
        self._block(self._rest)
        self._rest = ""

    def _end_thoughts(self) -> None:
        if thoughts := self._thoughts.strip():
            self._console.print(Text(thoughts, _THOUGHT))
            self._begun = True
        self._thoughts = ""

    def _block(self, text: str) -> None:
        if text.strip():
            if self._begun:
                self._console.print()
            self._begun = True
            self._console.print(AnswerMarkdown(text))


class _Tail:
    """The last lines of what is not complete, as many as the terminal has."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


class ChatView:
    """What a conversation shows: answers on stdout, everything else on stderr. plain: answers are no Markdown. piped:
    its one message came from a pipe."""

    def __init__(self, out: Console, notes: Console, *, plain: bool, piped: bool = False) -> None:
        self._out, self._notes, self._plain, self._piped = out, notes, plain or piped, piped

    def begin(self, model: str) -> None:
        """The conversation begins."""
        self.note(f"{model}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")

    @contextmanager
    def answering(self) -> Iterator[Shown]:
        """Within the block an answer is shown while it arrives."""
        with no_echo_of_control_characters(self._out):
            shown = Shown(self._notes) if self._plain else ShownMarkdown(self._out)
            try:
                yield shown
            finally:
                shown.end()

    def figures(self, completion: Completion, context: int) -> None:
        """What a complete answer cost, and its warnings. context: of its model, in tokens."""
        for warning in completion.warnings:
            self._notes.print(Text.assemble(("warning: ", "bold yellow"), warning))
        self.note(figures_line(completion.metrics))
        if text := context_note(completion, context, piped=self._piped):
            self._notes.print(Text(text, "yellow"))
        self._notes.print()

    def cut(self) -> None:
        """An answer was stopped or failed after its first token."""
        self.note("[not complete; the conversation has it as far as it came]\n")

    def failed(self, error: DisaggError, hint: str) -> None:
        """A turn or a command failed."""
        more = f" ({hint})" if hint else ""
        self._notes.print(Text.assemble(("error: ", "bold red"), printable(error.message), more))

    def note(self, text: str) -> None:
        """One line that is not an answer."""
        self._notes.print(Text(printable(text), "dim"))

    def help(self) -> None:
        """The commands and the keys."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(style="dim", overflow="fold")
        for name, (form, meaning) in COMMANDS.items():
            grid.add_row(f"/{name} {form}".rstrip(), meaning)
        grid.add_row("Enter", "Send the message; between triple quotes, begin a new line.")
        grid.add_row("Alt-Enter", "Begin a new line.")
        grid.add_row("Ctrl-C", "Stop the answer; it stays in the conversation as far as it came.")
        self._notes.print(grid)

    def models(self, models: Iterable[Model], current: str) -> None:
        """The models of the fleet, and which one answers."""
        for model in models:
            names = ", ".join((model.name, *model.aliases))
            mark = "answers" if model.name == current else ""
            self._notes.print(Text.assemble((f"{names}  ", "bold"), (mark, "green")))

    def stats(self, last: Completion | None, turns: int) -> None:
        """What the last answer cost."""
        self.note(counted(turns, "turn"))
        if last is not None:
            self._notes.print(model_panel(last), footnote())

    def loaded(self, conversation: Conversation) -> None:
        """A conversation was read from a file."""
        self.note(f"{counted(len(conversation.turns), 'turn')} with {conversation.model}.")
