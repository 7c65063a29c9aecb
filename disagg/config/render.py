"""A Fleet as the text of a hosts.toml that loads as the same fleet on another machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from disagg.config.schema import EngineOptions, Fleet, Host, Model
from disagg.config.words import toml_key, toml_string

KEPT = frozenset(
    {"address", "roles", "model", "port", "kv_port", "data_address", "connector", "service", "queue_size", "hardware"}
)
"""Of a host: what its own server reads. The rest is for the machine that deploys."""


def render(fleet: Fleet, hosts: Collection[str], sources: Mapping[str, Mapping[str, str]]) -> str:
    """hosts.toml with these hosts and their models alone; `sources`: model -> engine -> source, as they are there."""
    chosen = [host for host in fleet.hosts.values() if host.name in hosts]
    served = {host.model for host in chosen}
    parts = [_table(("fleet",), {"name": fleet.name})]
    for model in fleet.models.values():
        if model.name in served:
            parts += _model(model, sources[model.name])
    parts += [part for host in chosen for part in _host(host)]
    return "\n".join(parts)


def _model(model: Model, sources: Mapping[str, str]) -> list[str]:
    head: dict[str, Any] = {"context": model.context}
    if model.aliases:
        head["aliases"] = model.aliases
    return [_table(("models", model.name), head), _table(("models", model.name, "sources"), sources)]


def _host(host: Host) -> list[str]:
    values = {name: value for name, value in _set(host) if name in KEPT}
    usual = EngineOptions(host.engine.name)  # an engine refuses the other's options, even as they usually are
    engine = {name: value for name, value in _set(host.engine) if name == "name" or value != getattr(usual, name)}
    return [_table(("hosts", host.name), values), _table(("hosts", host.name, "engine"), engine)]


def _set(values: Host | EngineOptions) -> Iterator[tuple[str, Any]]:
    """The fields that are not None: TOML has no word for that."""
    for field in fields(values):
        if (value := getattr(values, field.name)) is not None:
            yield field.name, value


def _table(path: Sequence[str], values: Mapping[str, Any]) -> str:
    header = ".".join(map(toml_key, path))
    return "\n".join([f"[{header}]", *(f"{toml_key(key)} = {_value(value)}" for key, value in values.items()), ""])


def _value(value: Any) -> str:
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
