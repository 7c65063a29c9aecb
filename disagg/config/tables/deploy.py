"""The rules of the [deploy] table."""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args
from urllib.parse import urlsplit

from disagg.config.addresses import is_path
from disagg.config.schema import Deploy, Installer
from disagg.config.tables.models import resolved
from disagg.config.toml.table import Table

_INDEX_EXAMPLE: Final = 'index_url = "https://mirror.example/simple"'
_KEYS: Final = ("index_url", "extra_index_urls", "find_links", "wheels", "installer")


def read_deploy(table: Table, folder: Path) -> Deploy:
    """The table as a Deploy. A relative `wheels` starts at `folder`."""
    table.only(_KEYS)
    return Deploy(
        index_url=_index(table) if "index_url" in table else None,
        extra_index_urls=_links(table, "extra_index_urls", paths=False),
        find_links=_links(table, "find_links", paths=True),
        wheels=_wheels(table, folder) if "wheels" in table else None,
        installer=table.choice("installer", get_args(Installer)) if "installer" in table else "auto",
    )


def _index(table: Table) -> str:
    url = table.value("index_url", str, _INDEX_EXAMPLE)
    if fault := _url_fault(url):
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
        if fault := _url_fault(link, ", or the absolute path of a folder on the host" if paths else ""):
            raise table.fault_at_element(key, index, *fault)
    return links


def _url_fault(url: str, otherwise: str = "") -> tuple[str, str] | None:
    """What is wrong with a URL, and the hint; None if nothing is. URLs appear in logs and in pip's arguments, so that
    a password in one is refused."""
    hint = f"it begins with https:// or http://{otherwise}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "this is not a URL", hint
    if not (url.isprintable() and url.isascii()) or " " in url or parts.scheme not in ("http", "https"):
        return "this is not a URL", hint
    if not parts.hostname:
        return "this URL has no host name", 'as in "https://mirror.example/simple"'
    if "@" in parts.netloc:
        return "a password does not belong in this file", "put it into ~/.netrc on the hosts: pip and uv read it there"
    return None


def _wheels(table: Table, folder: Path) -> Path:
    text = table.value("wheels", str, 'wheels = "./wheels"')
    if not text or not text.isprintable():
        raise table.fault_at_value("wheels", "wheels is not a path", 'as in wheels = "./wheels"')
    return Path(resolved(table, "wheels", text if is_path(text) else f"./{text}", folder))
