"""The rules of the [deploy] and [hooks] tables: how hosts are prepared, and what runs around a change."""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

from disagg.config.addresses import is_path, url_fault
from disagg.config.schema import Deploy, HookName, Hooks, Installer
from disagg.config.table import Table
from disagg.config.tables.models import resolved

_INDEX_EXAMPLE: Final = 'index_url = "https://mirror.example/simple"'
_PASSWORD: Final = "put it into ~/.netrc on the hosts: pip and uv read it there"
_KEYS: Final = ("index_url", "extra_index_urls", "find_links", "wheels", "installer", "cuda_on_cpu")
LONGEST_S: Final = 3600


def read_deploy(table: Table, folder: Path) -> Deploy:
    """The table as a Deploy. A relative `wheels` starts at `folder`."""
    table.only(_KEYS)
    return Deploy(
        index_url=_index(table) if "index_url" in table else None,
        extra_index_urls=_links(table, "extra_index_urls", paths=False),
        find_links=_links(table, "find_links", paths=True),
        wheels=_wheels(table, folder) if "wheels" in table else None,
        installer=table.choice("installer", get_args(Installer)) if "installer" in table else "auto",
        cuda_on_cpu=table.boolean("cuda_on_cpu") if "cuda_on_cpu" in table else False,
    )


def _index(table: Table) -> str:
    url = table.value("index_url", str, _INDEX_EXAMPLE)
    if fault := url_fault(url, _PASSWORD):
        raise table.fault_at_value("index_url", *fault)
    return url


def _links(table: Table, key: str, paths: bool) -> tuple[str, ...]:
    """URLs; with `paths` also absolute paths on the host."""
    if key not in table:
        return ()
    links = table.strings(key, f'{key} = ["https://mirror.example/simple"]')
    for index, link in enumerate(links):
        if paths and link.startswith("/") and link.isprintable():
            continue
        if fault := url_fault(link, _PASSWORD, ", or the absolute path of a folder on the host" if paths else ""):
            raise table.fault_at_element(key, index, *fault)
    return links


def _wheels(table: Table, folder: Path) -> Path:
    text = table.value("wheels", str, 'wheels = "./wheels"')
    if not text or not text.isprintable():
        raise table.fault_at_value("wheels", "wheels is not a path", 'as in wheels = "./wheels"')
    return Path(resolved(table, "wheels", text if is_path(text) else f"./{text}", folder))


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
