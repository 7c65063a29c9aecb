"""The hooks of a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagg.cli.common.context import stderr

if TYPE_CHECKING:
    from disagg.config import Fleet
    from disagg.fleet.changes.hooks import HookRunner


def hook_runner(fleet: Fleet, command: str) -> HookRunner:
    """Runs the hooks of a command of disagg; stderr shows what they print."""
    from disagg.cli.views.fleet.hooks import hook_output
    from disagg.fleet.changes.hooks import HookRunner

    return HookRunner(fleet, command, hook_output(stderr()))
