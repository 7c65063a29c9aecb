"""The conversation of a command that changes hosts: look, show, ask, finish. What acts states within
`note_if_interrupted` how it leaves them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import RenderableType

from disagg.cli.common.context import confirm, error_console, note_if_interrupted, print_json, stderr, stdout
from disagg.errors import UsageError


class Change:
    """One run of a command. verb: what it does to hosts, as in `deploy asks before it changes anything`. asks: False if
    this run only looks. Raises UsageError unless --yes answers its question, or a person at a terminal can."""

    def __init__(self, command: str, verb: str = "changes", *, yes: bool, as_json: bool, asks: bool = True) -> None:
        self._yes, self._as_json = yes, as_json
        self._untouched = f"nothing was {'removed' if verb == 'removes' else 'changed'}"
        if asks and not yes and (as_json or not sys.stdin.isatty()):
            reason = "--json prints no question" if as_json else "stdin is not a terminal"
            raise UsageError(f"{command} asks before it {verb} anything, and {reason}", f"disagg {command} --yes")

    @contextmanager
    def looking(self, what: str = "reading facts …") -> Iterator[None]:
        """Within the block nothing is changed yet."""
        with note_if_interrupted(self._untouched), stderr().status(what):
            yield

    def ask(self, question: str, *shown: RenderableType) -> None:
        """Unless --yes is given, show what would be done, with --quiet too, and ask. Exits with 1 for a no."""
        if self._yes:
            return
        console = error_console()
        with note_if_interrupted(self._untouched):
            if shown:
                console.print(*shown)
            if confirm(question, console):
                return
        console.print(self._untouched)
        raise typer.Exit(1)

    def finish(self, body: Mapping[str, Any], *shown: RenderableType, code: int) -> NoReturn:
        """Print how it ended, and exit."""
        finish(self._as_json, body, *shown, code=code)


def finish(as_json: bool, body: Mapping[str, Any], *shown: RenderableType, code: int = 0) -> NoReturn:
    """Print the results, with --json as one object, and exit."""
    if as_json:
        print_json(body)
    else:
        for one in shown:
            stdout().print(one)
    raise typer.Exit(code)
