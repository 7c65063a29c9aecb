"""`load`: from a path to a Fleet, and the rules of the [fleet] table."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from disagg.config.addresses import NAME_RULE, is_name, is_path
from disagg.config.schema import Deploy, Fleet, Hooks
from disagg.config.tables.deploy import read_deploy
from disagg.config.tables.dtypes import require_one_kv_dtype
from disagg.config.tables.hooks import read_hooks
from disagg.config.tables.hosts import read_hosts
from disagg.config.tables.models import read_models, require_sources, resolved
from disagg.config.tables.whole import unmanaged_models
from disagg.config.toml.messages import nearest, on_one_line
from disagg.config.toml.reader import Document, parse, read
from disagg.config.toml.table import Table

_GROUP: Final = 'rack-1 = ["dgx-spark-1", "mac-*"]'


def load(path: Path) -> Fleet:
    """Read and validate hosts.toml. Raises ConfigError. Does not check that model files exist."""
    return build(parse(read(path, "`disagg init` writes an example"), str(path)), path)


def build(document: Document, path: Path) -> Fleet:
    """The fleet that a document describes. Relative paths in it start at the folder of `path`."""
    root = Table(document, (), document.data)
    root.only(("fleet", "models", "hosts", "deploy", "groups", "hooks"))
    head = root.table("fleet", '[fleet] with name = "studio"')
    head.only(("name", "token_file"))
    name = _name(head, "name")
    tables = root.table("models", '[models."qwen3-coder:30b"]')
    models = read_models(tables, path.parent)
    host_tables = root.table("hosts", "[hosts.dgx-spark-1]")
    require_sources(tables, models, unmanaged_models(host_tables))
    hosts = read_hosts(host_tables, models)
    require_one_kv_dtype(host_tables, hosts)
    deploy = read_deploy(root.table("deploy", "[deploy]"), path.parent) if "deploy" in root else Deploy()
    groups = _groups(root.table("groups", _GROUP), hosts) if "groups" in root else {}
    hooks = read_hooks(root.table("hooks", "[hooks]")) if "hooks" in root else Hooks()
    return Fleet(name, path.absolute(), models, hosts, _token_file(head, path.parent), deploy, groups, hooks)


def _groups(table: Table, hosts: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Names of hosts, or patterns of names, by group."""
    groups = {}
    for group in table.data:
        if not is_name(group):
            raise table.fault_at_key(group, "this name is not usable", NAME_RULE)
        groups[group] = table.strings(group, _GROUP)
        for index, name in enumerate(groups[group]):
            if not any(fnmatchcase(host, name) for host in hosts):
                raise table.fault_at_element(group, index, f'no host fits "{on_one_line(name)}"', nearest(name, hosts))
    return groups


def _token_file(head: Table, folder: Path) -> Path | None:
    if "token_file" not in head:
        return None
    text = head.value("token_file", str, 'token_file = "~/.config/disagg/token"')
    if not text or not text.isprintable():
        raise head.fault_at_value("token_file", "token_file is not a path")
    return Path(resolved(head, "token_file", text if is_path(text) else f"./{text}", folder))


def _name(table: Table, key: str) -> str:
    name = table.value(key, str, f'{key} = "studio"')
    if not is_name(name):
        raise table.fault_at_value(key, "this name is not usable", NAME_RULE)
    return name
