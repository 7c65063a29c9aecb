"""A conversation on the terminal: answers, one line of figures for each, and what the commands show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from disagg.cli.chat.answer import ShownAnswer, ShownMarkdown
from disagg.cli.chat.commands import COMMANDS
from disagg.cli.views.metrics import footnote, model_panel
from disagg.cli.views.stream import without_echo
from disagg.errors import DisaggError, printable
from disagg.units import counted, seconds, speed

if TYPE_CHECKING:
    from disagg.cli.chat.conversation import Conversation
    from disagg.config import Model
    from disagg.inference.metrics import Metrics
    from disagg.inference.types import Completion


_NEARLY_FULL: Final = 0.8  # of the context


def figures_line(metrics: Metrics) -> str:
    """What one answer cost: `3,120 prompt tokens, 3,050 held; TTFT 210 ms; 128 tokens at 85.0 tok/s`."""
    held = f", {metrics.held_tokens:,} held" if metrics.held_tokens else ""
    prompt = counted(metrics.prompt_tokens, "prompt token") + held
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


class ChatView:
    """What a conversation shows: answers on stdout, everything else on stderr. plain: answers are no Markdown. piped:
    its one message came from a pipe."""

    def __init__(self, out: Console, notes: Console, *, plain: bool, piped: bool = False) -> None:
        self._out, self._notes, self._plain, self._piped = out, notes, plain or piped, piped
        self._noted: list[str] = []  # of the last answer, while it arrived

    def begin(self, model: str) -> None:
        """The conversation begins."""
        self.note(f"{model}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")

    @contextmanager
    def answering(self) -> Iterator[ShownAnswer]:
        """Within the block an answer is shown while it arrives."""
        with without_echo(self._out, typed=True):
            shown = ShownAnswer(self._notes) if self._plain else ShownMarkdown(self._out)
            self._noted = shown.noted_texts
            try:
                yield shown
            finally:
                shown.end()

    def figures(self, completion: Completion, context: int) -> None:
        """What a complete answer cost, and its warnings that were not shown yet. context: of its model, in tokens."""
        for warning in (one for one in completion.warnings if one not in self._noted):
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
        grid = Table.grid(Column(style="bold", no_wrap=True), Column(style="dim", overflow="fold"), padding=(0, 2))
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

    def stats(self, last: Completion | None, conversation: Conversation) -> None:
        """What the last answer cost. last: None if it is not complete, or there is none."""
        turns = conversation.turns
        cut = "; the last answer is not complete, and has no figures" if turns and turns[-1].cut else ""
        self.note(f"{counted(len(turns), 'turn')}{cut}")
        if last is not None:
            self._notes.print(model_panel(last), footnote())

    def loaded(self, conversation: Conversation) -> None:
        """A conversation was read from a file."""
        self.note(f"{counted(len(conversation.turns), 'turn')} with {conversation.model}.")
