"""What all commands share: which hosts.toml they use, where they write, and how an error is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console

from disagg.config.hosts_file import find_hosts_file
from disagg.errors import DisaggError

if TYPE_CHECKING:
    from disagg.config import Fleet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of every command, and of those that act on hosts. `config`: None without --config. selection: which
    hosts, by the names of the arguments of Fleet.select; empty without such an option. parallel, host_s: see
    FanOutLimits."""

    config: Path | None = None
    selection: Mapping[str, Any] = field(default_factory=dict)
    parallel: int | None = None
    host_s: float | None = None

    @property
    def path(self) -> Path:
        """--config, else $DISAGG_CONFIG, else ./hosts.toml. ConfigError if that file does not exist."""
        return find_hosts_file(self.config)

    def fleet(self) -> Fleet:
        """The fleet that this file describes."""
        from disagg.config import load

        return load(self.path)

    def names(self, fleet: Fleet, managed: bool = False) -> list[str]:
        """The names of the selected hosts; none if all are meant, because no option selects any."""
        return [host.name for host in fleet.select(**self.selection, managed=managed)] if self.selection else []


def settings(context: typer.Context) -> Settings:
    """The settings of this command line."""
    stored = context.find_root().obj
    return stored if isinstance(stored, Settings) else Settings()


class CommandOutput:
    """State of one command's output. `quiet`: nothing but errors on stderr. `printed_json`: stdout has its object.
    `noted_interrupt`: stderr has a line about the Ctrl-C."""

    quiet = False
    printed_json = False
    noted_interrupt = False


class _Stdout(Console):
    """A console that raises BrokenPipeError if its reader is gone; rich's own exits with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """The console for results. What is in square brackets is text here and below: extras, names of models."""
    return _Stdout(highlight=False, markup=False)


def stderr() -> Console:
    """The console for progress, metrics and notes. Prints nothing with --quiet."""
    return Console(stderr=True, highlight=False, markup=False, quiet=CommandOutput.quiet)


def error_console() -> Console:
    """The console for errors and questions, with --quiet too."""
    return Console(stderr=True, highlight=False, markup=False)


def print_json(body: Mapping[str, Any]) -> None:
    """Print the one JSON object of --json on stdout."""
    CommandOutput.printed_json = True
    typer.echo(json.dumps(body, indent=2))


def print_error(error: DisaggError) -> None:
    """Show an error on stderr: wrapped between words on a terminal, unwrapped in a file."""
    from disagg.cli.views.errors import error_view

    console = error_console()
    console.print(error_view(error), soft_wrap=not console.is_terminal)


@contextmanager
def note_if_interrupted(state: str) -> Iterator[None]:
    """Print in which state the hosts are left if the block ends with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        note_interrupt(f"interrupted: {state}")
        raise


@contextmanager
def note_if_interrupted_after(begun: AbstractContextManager[T], state: str) -> Iterator[T]:
    """Print the state that the hosts are left in if the block ends with Ctrl-C: unchanged as long as `begun` is
    entered, as its hook runs before the change."""
    with note_if_interrupted(state), ExitStack() as stack:
        with note_if_interrupted("nothing was changed"):
            entered = stack.enter_context(begun)
        yield entered


def note_interrupt(text: str) -> None:
    """Print on stderr that Ctrl-C ended the command; only the first call of a command prints."""
    if not CommandOutput.noted_interrupt:
        CommandOutput.noted_interrupt = True
        error_console().print(text, style="bold")


def confirm(question: str, console: Console) -> bool:
    """Ask a yes-or-no question on the terminal; no is the default. Ctrl-C raises KeyboardInterrupt."""
    try:
        answer = console.input(f"{question} [y/N]: ", markup=False)
    except EOFError:
        answer = ""
    except KeyboardInterrupt:
        console.print()  # the next message starts on its own line
        raise
    return answer.strip().lower() in ("y", "yes")
