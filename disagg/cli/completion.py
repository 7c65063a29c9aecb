"""What the shell offers behind --host and -m. A key press waits for it: nothing but hosts.toml is read, and a file
that cannot be read offers nothing, silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from disagg.cli.context import Settings
from disagg.errors import DisaggError

if TYPE_CHECKING:
    from disagg.config import Fleet


def complete_host(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Host names, each with what it does."""
    fleet = _fleet(context)
    hosts = fleet.hosts.values() if fleet is not None else ()
    return [(one.name, f"{', '.join(one.roles)} {one.model}") for one in hosts if one.name.startswith(incomplete)]


def complete_model(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Aliases and names of models: an alias is what one types."""
    fleet = _fleet(context)
    models = fleet.models.values() if fleet is not None else ()
    offered = [(alias, model.name) for model in models for alias in model.aliases]
    offered += [(model.name, "") for model in models]
    return [pair for pair in offered if pair[0].startswith(incomplete)]


def complete_role(context: typer.Context, incomplete: str) -> list[str]:
    return [role for role in ("prefill", "decode") if role.startswith(incomplete)]


def _fleet(context: typer.Context) -> Fleet | None:
    config = context.find_root().params.get("config")
    try:
        return Settings(config).fleet()
    except (DisaggError, OSError):
        return None
