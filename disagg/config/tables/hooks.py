"""The rules of the [hooks] table."""

from __future__ import annotations

from typing import Final, get_args

from disagg.config.schema import HookName, Hooks
from disagg.config.toml.table import Table

LONGEST_S: Final = 3600


def read_hooks(table: Table) -> Hooks:
    """The table as Hooks."""
    names: tuple[HookName, ...] = get_args(HookName)
    table.only((*names, "timeout_s"))
    commands = {name: _command(table, name) for name in names if name in table}
    if "timeout_s" in table:
        return Hooks(commands, table.integer("timeout_s", 1, LONGEST_S))
    return Hooks(commands)


def _command(table: Table, name: HookName) -> str:
    text = table.value(name, str, f'{name} = "./hooks/{name}.sh"')
    if not text.strip() or not text.isprintable():
        raise table.fault_at_value(name, f"{name} is not a command", f'as in {name} = "./hooks/{name}.sh"')
    return text
