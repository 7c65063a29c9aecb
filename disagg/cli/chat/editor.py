"""Reads what a person types: several lines at once, completion, and the lines of earlier conversations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

from disagg.cli.chat.commands import complete, is_open
from disagg.files import replace_file

_PLACEHOLDER = FormattedText([("fg:ansibrightblack", "a message; /help lists the commands")])
KEPT: Final = 1000  # lines; the file has at most twice as many
MAX_LINE: Final = 16 << 10  # characters; a longer one is not kept


class Editor:
    """Enter sends; Alt-Enter, and Enter between triple quotes, begin a new line. models: to complete."""

    def __init__(
        self,
        history: History,
        models: Callable[[], Sequence[str]],
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=[("bold", ">>> ")],
            multiline=True,
            prompt_continuation=[("fg:ansibrightblack", "... ")],
            placeholder=_PLACEHOLDER,
            history=history,
            key_bindings=_keys(),
            completer=_Completer(models),
            complete_while_typing=Condition(self._is_command),
            reserve_space_for_menu=4,
            input=input,
            output=output,
        )

    async def read(self) -> str:
        """What was typed. Raises EOFError for Ctrl-D on an empty line, KeyboardInterrupt for Ctrl-C."""
        return await self._session.prompt_async()

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


class _Completer(Completer):
    def __init__(self, models: Callable[[], Sequence[str]]) -> None:
        self._models = models

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        for word, typed, meaning in complete(document.text_before_cursor, self._models()):
            yield Completion(word, -len(typed), display_meta=meaning)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Recall(History):
    """One JSON string per line. A file that cannot be read or written is left alone, and nothing is kept."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()
        if len(lines) > 2 * KEPT:
            with suppress(OSError):
                replace_file(self._path, "".join(f"{line}\n" for line in lines[-KEPT:]).encode())
        return [text for line in reversed(lines[-KEPT:]) if (text := _text(line))]

    def store_string(self, string: str) -> None:
        if len(string) <= MAX_LINE:
            with suppress(OSError):
                self._append(json.dumps(string) + "\n")

    def _append(self, text: str) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(os.open(self._path, how, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(text)


def _text(line: str) -> str:
    try:
        text = json.loads(line)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""
