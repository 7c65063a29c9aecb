"""Which hosts.toml is meant, from its path to a Fleet, and the rules of the [fleet] and [groups] tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from disagg.config.addresses import NAME_RULE, is_name, is_path
from disagg.config.document import Document, nearest, on_one_line, one_of, parse, read
from disagg.config.schema import Deploy, Fleet, Hooks, Model, served_hosts
from disagg.config.table import Table
from disagg.config.tables.agree import require_layers_of_splits, require_one_kv_dtype
from disagg.config.tables.deploy import read_deploy, read_hooks
from disagg.config.tables.engine import unmanaged_models
from disagg.config.tables.hosts import read_hosts
from disagg.config.tables.models import read_models, require_sources, resolved
from disagg.errors import ConfigError

_GROUP: Final = 'rack-1 = ["dgx-spark-1", "mac-*"]'
CONFIG_VARIABLE = "DISAGG_CONFIG"
_DEMO: Final = Path("disagg", "demo", "hosts.toml")


def load(path: Path) -> Fleet:
    """Read and validate hosts.toml. Raises ConfigError. Does not check that model files exist."""
    return build(parse(read(path, "`disagg init` writes an example"), str(path)), path)


def build(document: Document, path: Path) -> Fleet:
    """The fleet that a document describes. Relative paths in it start at the folder of `path`."""
    root = Table(document, (), document.data)
    root.only(("fleet", "models", "hosts", "deploy", "groups", "hooks"))
    head = root.table("fleet", '[fleet] with name = "studio"')
    head.only(("name", "token_file", "default_model"))
    name = _name(head, "name")
    tables = root.table("models", '[models."qwen3-coder:30b"]')
    models = read_models(tables, path.parent)
    host_tables = root.table("hosts", "[hosts.dgx-spark-1]")
    require_sources(tables, models, unmanaged_models(host_tables))
    hosts = read_hosts(host_tables, models)
    served = served_hosts(hosts, models)
    require_one_kv_dtype(host_tables, served)
    require_layers_of_splits(host_tables, served)
    deploy = read_deploy(root.table("deploy", "[deploy]"), path.parent) if "deploy" in root else Deploy()
    groups = _groups(root.table("groups", _GROUP), hosts) if "groups" in root else {}
    hooks = read_hooks(root.table("hooks", "[hooks]")) if "hooks" in root else Hooks()
    token_file, default = _token_file(head, path.parent), _default_model(head, models)
    return Fleet(name, path.absolute(), models, hosts, token_file, deploy, groups, hooks, default)


def _default_model(head: Table, models: Mapping[str, Model]) -> str | None:
    """The name of the default model, which may be given as an alias."""
    if "default_model" not in head:
        return None
    given = head.value("default_model", str, 'default_model = "qwen3-coder:30b"')
    names = {name: model.name for model in models.values() for name in (model.name, *model.aliases)}
    if given in names:
        return names[given]
    raise head.fault_at_value(
        "default_model", f'no model "{on_one_line(given)}"', nearest(given, names) or one_of(list(names))
    )


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


def find_hosts_file(named: Path | None = None) -> Path:
    """`named`, else $DISAGG_CONFIG, else ./hosts.toml. ConfigError if that file does not exist."""
    from_environment = os.environ.get(CONFIG_VARIABLE)
    path = named or default_hosts_file()
    if not path.exists():
        chosen = named or from_environment
        if not named and from_environment and not path.is_absolute():
            raise ConfigError(f"there is no {path} here, which $DISAGG_CONFIG names", "write its whole path there")
        hint = "correct --config or $DISAGG_CONFIG" if chosen else "disagg init writes one"
        raise ConfigError(f"there is no {path}", hint + "; `disagg demo` needs none")
    return path


def default_hosts_file() -> Path:
    """The file that is read if none is named, whether or not it exists."""
    return Path(os.environ.get(CONFIG_VARIABLE) or "hosts.toml")


def comes_with_disagg(path: Path) -> bool:
    """Whether this file is part of disagg: the demo fleet, or in a clone, whether or not it is the one that runs, the
    fleet that disagg is made for."""
    whole = path.resolve()
    in_a_clone = whole.name == "hosts.toml" and (whole.parent / _DEMO).is_file()
    return whole.exists() and (in_a_clone or whole.parts[-len(_DEMO.parts) :] == _DEMO.parts)
