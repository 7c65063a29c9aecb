"""The lines of earlier conversations, in a file that only this user can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from prompt_toolkit.history import History

from disagg.files import replace_file

KEPT: Final = 1000  # lines; the file has at most twice as many
MAX_LINE: Final = 16 << 10  # characters; a longer one is not kept


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
