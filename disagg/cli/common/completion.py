"""What the shell completes: names of hosts, models, roles, devices and model shapes.

A key press waits for it, so hosts.toml is the only file that is read; if it cannot be read, nothing is offered.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, get_args

import typer

from disagg.api.names import Role
from disagg.cli.common.context import settings
from disagg.errors import DisaggError

if TYPE_CHECKING:
    from disagg.config import Fleet

VARIABLE = "_DISAGG_COMPLETE"
"""Set by the shell's completion function when it asks for candidates."""


def complete_host(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Host names, each with its roles and its model."""
    fleet = _fleet(context)
    hosts = fleet.hosts.values() if fleet is not None else ()
    return [(one.name, f"{', '.join(one.roles)} {one.model}") for one in hosts if one.name.startswith(incomplete)]


def complete_model(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Aliases of models first, then their names."""
    fleet = _fleet(context)
    models = fleet.models.values() if fleet is not None else ()
    offered = [(alias, model.name) for model in models for alias in model.aliases]
    offered += [(model.name, "") for model in models]
    return [pair for pair in offered if pair[0].startswith(incomplete)]


def complete_group(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Groups of hosts, each with its hosts."""
    fleet = _fleet(context)
    groups = fleet.groups.items() if fleet is not None else ()
    return [(name, " ".join(hosts)) for name, hosts in groups if name.startswith(incomplete)]


def complete_role(context: typer.Context, incomplete: str) -> list[str]:
    """The roles that a host can have."""
    return [role for role in get_args(Role) if role.startswith(incomplete)]


def complete_device(context: typer.Context, incomplete: str) -> list[str]:
    """The machines that disagg knows, as `hardware` in hosts.toml and --prefill-device take them."""
    from disagg.planning.devices import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete)]


def complete_shape(context: typer.Context, incomplete: str) -> list[str]:
    """The model shapes that disagg knows."""
    from disagg.planning.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def _fleet(context: typer.Context) -> Fleet | None:
    try:
        return settings(context).fleet()
    except (DisaggError, OSError):
        return None


@contextmanager
def names_with_colons() -> Iterator[None]:
    """While the block completes for bash, make names such as `qwen3-coder:30b` one word.

    bash breaks words at colons: it passes `qwen3-coder : 3`, and replaces only what follows the last colon.
    """
    words = os.environ.get("COMP_WORDS", "")
    if os.environ.get(VARIABLE) != "complete_bash" or ":" not in words:
        yield
        return
    joined, position = join_at_colons(re.split(r"[\n ]", words), int(os.environ["COMP_CWORD"]))
    os.environ.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(position))
    current = joined[position] if position < len(joined) else ""
    head = current[: current.rfind(":") + 1]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            sys.stdout.write(line.removeprefix(head) + "\n")


def join_at_colons(words: list[str], position: int) -> tuple[list[str], int]:
    """Words that bash separated at colons, joined again, and the new position of the word at `position`."""
    joined: list[str] = []
    moved = position
    for index, word in enumerate(words):
        after_colon = bool(joined) and joined[-1].endswith(":") and word
        if joined and (word == ":" or after_colon):
            joined[-1] += word
            moved -= index <= position
        else:
            joined.append(word)
    return joined, moved
