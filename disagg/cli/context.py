"""What commands share: which hosts.toml they mean, and where they write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from disagg.errors import ConfigError, DisaggError

if TYPE_CHECKING:
    from disagg.config import Fleet

CONFIG_VARIABLE = "DISAGG_CONFIG"


@dataclass(frozen=True, slots=True)
class Settings:
    """The global options. `config` is None where --config was not given."""

    config: Path | None = None

    @property
    def path(self) -> Path:
        """--config, else $DISAGG_CONFIG, else ./hosts.toml. ConfigError if that file is not there."""
        named = self.config or (Path(variable) if (variable := os.environ.get(CONFIG_VARIABLE)) else None)
        path = named or Path("hosts.toml")
        if not path.exists():
            hint = "disagg init writes one" if named is None else "correct --config or $DISAGG_CONFIG"
            raise ConfigError(f"there is no {path}", hint + "; `disagg demo` needs none")
        return path

    def fleet(self) -> Fleet:
        """The fleet these options mean."""
        from disagg.config import load

        return load(self.path)


def settings(context: typer.Context) -> Settings:
    """The global options of this command line."""
    found = context.find_root().obj
    return found if isinstance(found, Settings) else Settings()


def stdout() -> Console:
    """For results."""
    return Console(highlight=False)


def stderr() -> Console:
    """For progress, metrics and errors."""
    return Console(stderr=True, highlight=False)


def complain(error: DisaggError) -> None:
    """Show an error on stderr: between words broken for a terminal, each line in one piece for a file."""
    from disagg.cli.views.errors import error_view

    console = stderr()
    console.print(error_view(error), soft_wrap=not console.is_terminal)


@contextmanager
def told_when_interrupted(state: str) -> Iterator[None]:
    """Say in which state an interruption leaves the hosts."""
    try:
        yield
    except KeyboardInterrupt:
        stderr().print(f"interrupted: {state}")
        raise


def agreed(question: str, console: Console) -> bool:
    """Whether a person at the terminal says yes; no is the default. Ctrl-C is a KeyboardInterrupt, as anywhere."""
    try:
        answer = console.input(f"{question} [y/N]: ", markup=False)
    except EOFError:
        answer = ""
    except KeyboardInterrupt:
        console.print()  # what is said next begins a line of its own
        raise
    return answer.strip().lower() in ("y", "yes")
