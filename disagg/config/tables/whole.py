"""The rules of whole-request hosts: servers of OpenAI's API, which disagg asks and does not manage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from disagg.config.addresses import is_label, url_fault
from disagg.config.toml.table import Table

OPENAI_URL: Final = "http://10.0.0.9:11434/v1"
SERVER_URL: Final = "http://127.0.0.1:8100"
"""Examples."""


def unmanaged_models(tables: Table) -> set[str]:
    """The models of whole-request hosts: they need no source."""
    hosts = (table for table in tables.data.values() if isinstance(table, dict) and _has_role(table))
    return {name for host in hosts if isinstance(name := host.get("model"), str)}


def is_whole(table: Table) -> bool:
    """Whether this is the table of a whole-request host, valid or not."""
    return _has_role(table.data)


def _has_role(table: Mapping[str, Any]) -> bool:
    roles = table.get("roles")
    return isinstance(roles, list) and "whole" in roles


def _url(table: Table, key: str) -> str:
    url = table.value(key, str, f'url = "{OPENAI_URL}"').rstrip("/")
    fault = url_fault(url, "put the key into a file and name that: key_file")
    if fault is None and ("?" in url or "#" in url):
        fault = "this URL has a query or fragment", f'it ends with a path, as in "{OPENAI_URL}"'
    if fault is not None:
        raise table.fault_at_value(key, *fault)
    return url


def read_server_url(table: Table, key: str) -> str:
    """The URL of a server whose paths disagg knows."""
    url = table.value(key, str, f'url = "{SERVER_URL}"').rstrip("/")
    fault = url_fault(url, "this server is asked without one")
    if fault is None and urlsplit(url)._replace(scheme="", netloc="").geturl():
        fault = "this URL has a path", f'it ends with the port, as in "{SERVER_URL}"'
    if fault is not None:
        raise table.fault_at_value(key, *fault)
    return url


def read_name_there(table: Table, key: str) -> str:
    """A model's name at the server that is asked."""
    name = table.value(key, str, 'model = "qwen3-coder:30b"')
    if not is_label(name):
        raise table.fault_at_value(key, "this is not a model's name", "as the server's GET /models lists it")
    return name


def _variable(table: Table, key: str) -> str:
    name = table.value(key, str, 'key_variable = "OPENAI_API_KEY"')
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name):
        raise table.fault_at_value(key, "this is not the name of an environment variable", "not the key itself")
    if "key_file" in table:
        raise table.fault_at_key(key, "the key has two places", "keep key_file or key_variable")
    return name


def _key_file(table: Table, key: str) -> str:
    path = table.value(key, str, 'key_file = "~/.config/disagg/ollama.key"')
    if not path.startswith(("/", "~/")) or not path.isprintable():
        raise table.fault_at_value(key, "key_file is not an absolute path", "a file with the key: begin with / or ~/")
    return path


KEY_OPTIONS: Final[Mapping[str, Callable[[Table, str], Any]]] = {"key_file": _key_file, "key_variable": _variable}
"""Readers of the keys that state where a server's key is."""
OPENAI_OPTIONS: Final[Mapping[str, Callable[[Table, str], Any]]] = {
    "url": _url,
    "model": read_name_there,
    **KEY_OPTIONS,
}
"""Readers of the keys of an engine table with name = "openai"."""
