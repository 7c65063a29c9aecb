"""Checks of the options of `disagg bench`, before anything is measured."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from disagg.cli.common.options import CommandGroup
from disagg.errors import UsageError

T = TypeVar("T", int, float)


class Group(CommandGroup):
    """A command whose --goodput and --watts take several pairs: `--goodput ttft:500 tpot:50`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return list(super().parse_args(ctx, spread_pairs(args)))


def spread_pairs(args: Sequence[str]) -> list[str]:
    """`--watts a=1 b=2` as `--watts a=1 --watts b=2`."""
    spread: list[str] = []
    option = ""
    for word in args:
        if option and re.fullmatch(r"[a-z0-9]+[:=][0-9.]+", word):
            if spread[-1] != option:
                spread.append(option)
        else:
            option = word if word in ("--goodput", "--watts") else ""
        spread.append(word)
    return spread


def refuse_subcommand(context: typer.Context, option: str, path: Path | None) -> None:
    """Raise UsageError if an option took a subcommand or another option as its FILE: `bench --output link`."""
    if str(path).startswith("-"):
        raise UsageError(f"{option} {path}: not the name of a file", f"{option} FILE; ./{path} for this name")
    commands = getattr(context.command, "commands", {})
    if str(path) in commands:
        raise UsageError(
            f"{option} {path}: this is also the name of a command",
            f"disagg bench {path} {option}; or {option} ./{path} for a file",
        )


def numbers(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    """The numbers of a comma-separated sweep. Raises UsageError unless all are positive."""
    if text is None:
        return ()
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < number < 1e9 for number in values):
        raise UsageError(f"{option} {text}: not a list of positive numbers", f"as in {option} 1,2,4")
    return tuple(dict.fromkeys(values))


def pairs(option: str, words: Sequence[str] | None, known: Sequence[str]) -> dict[str, float]:
    """`name:number` or `name=number` pairs. Raises UsageError for an unknown name or a number that is not positive."""
    values: dict[str, float] = {}
    for word in (part for text in words or () for part in text.replace(",", " ").split()):
        pair = re.fullmatch(r"([a-z0-9]+)[:=]([0-9]*\.?[0-9]+)", word)
        if not pair or pair[1] not in known or float(pair[2]) <= 0:
            raise UsageError(
                f"{option} {word}: not understood", f"NAME and a positive number; NAME: {', '.join(known)}"
            )
        values[pair[1]] = float(pair[2])
    return values


def require_writable(path: Path | None) -> None:
    """Raise UsageError if this file cannot be written: before the run, not after it."""
    if path is None:
        return
    target = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}", "name a file in a folder that exists and is writable")
