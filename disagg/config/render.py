"""A Fleet as the text of another hosts.toml, and as a short hash."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Final

import tomli_w

from disagg.config.schema import EngineOptions, Fleet, Host
from disagg.config.settings import GatewaySettings, KeeperSettings

SERVER_KEYS: Final = frozenset(
    {
        "address",
        "roles",
        "model",
        "port",
        "kv_port",
        "data_address",
        "connector",
        "service",
        "queue_size",
        "hardware",
        "settings",
    }
)
"""The keys of a host that its own server reads. All others are for the machine that deploys."""


def render(fleet: Fleet, hosts: Collection[str], sources: Mapping[str, Mapping[str, str]]) -> str:
    """A hosts.toml of these hosts and their models, which loads as the same fleet on another machine.

    `sources`: model -> engine -> source, as the models are stored there.
    """
    chosen = [host for host in fleet.hosts.values() if host.name in hosts]
    served = {model for host in chosen for model in host.all_models}
    default = {"default_model": fleet.default_model} if fleet.default_model in served else {}
    return tomli_w.dumps(
        {
            "fleet": {"name": fleet.name, **default},
            "models": {
                model.name: {
                    "context": model.context,
                    "aliases": list(model.aliases),
                    **({"sources": dict(of_model)} if (of_model := sources.get(model.name)) else {}),
                    **({"engine": {name: dict(it) for name, it in model.engine.items()}} if model.engine else {}),
                }
                for model in fleet.models.values()
                if model.name in served
            },
            "hosts": {host.name: _host(host) for host in chosen},
        }
    )


def served_digest(fleet: Fleet, host: Host) -> str:
    """12 hexadecimal digits: a hash of what hosts.toml states about a host for its server, the same on every machine.

    Model sources do not count: their paths differ between machines, and the model's fingerprint covers the content. Of
    a host with several models its list does not count, which its keeper reads again, nor the ports that this gives to
    each. A gateway reads all but `tables_digest` again.
    """
    own = _own(host)
    if host.keeping is not None and host.keeps:
        text = repr((host.name, own, host.engine, host.keeping.ports))
    elif host.gateway:
        text = repr((host.name, own, tables_digest(fleet)))
    else:
        model = fleet.models[host.model]
        text = repr((host.name, own, host.engine, model.name, model.context, model.aliases))
    return _digest(text)


def tables_digest(fleet: Fleet) -> str:
    """12 hexadecimal digits: a hash of what hosts.toml states about the hosts that requests may use, without what it
    states about models and about which of them a host with several has."""
    tables = [host for host in fleet.hosts.values() if not (host.gateway or host.follower)]
    ports = [host.keeping.ports if host.keeping is not None else None for host in tables]
    return _digest(repr([(one.name, _own(one), one.engine, of) for one, of in zip(tables, ports, strict=True)]))


def _own(host: Host) -> list[tuple[str, Any]]:
    """The keys of a host that its server reads. A keeper gives its models their ports."""
    given = ("port", "kv_port") if host.keeper else ()
    return [(name, getattr(host, name)) for name in sorted(SERVER_KEYS) if name not in given]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _host(host: Host) -> dict[str, Any]:
    table = {name: value for name, value in _set_fields(host).items() if name in SERVER_KEYS}
    if host.gateway:
        table = {name: value for name, value in table.items() if name not in ("model", "queue_size", "settings")}
        return table | _changed(host.settings, GatewaySettings())
    if host.whole:
        table = {name: value for name, value in table.items() if name in ("roles", "model")}
    if host.keeping is not None:
        del table["model"]
        table |= {"models": list(host.models)} | _keeping(host.keeping)
    engine = {"name": host.engine.name, **_changed(host.engine, EngineOptions(host.engine.name))}
    return {**{name: value for name, value in table.items() if name != "settings"}, "engine": engine}


def _keeping(keeping: KeeperSettings) -> dict[str, Any]:
    """The keys of a host with several models, beside these."""
    times: dict[str, int | str] = {"min_stay": int(keeping.min_stay_s), "idle_ttl": "off"}
    if keeping.idle_ttl_s is not None:
        times["idle_ttl"] = int(keeping.idle_ttl_s)
    others = {name: getattr(keeping, name) for name in ("max_loaded", "memory_bytes")}
    return {
        "ports": f"{keeping.ports[0]}-{keeping.ports[-1]}",
        "preload": list(keeping.preload),
        "pin": list(keeping.pin),
        **times,
        **{name: value for name, value in others.items() if value is not None},
    }


def _changed(options: EngineOptions | GatewaySettings, defaults: EngineOptions | GatewaySettings) -> dict[str, Any]:
    """Only what differs from the defaults: an engine refuses the options of another engine, whatever their value."""
    set_fields = _set_fields(options).items()
    return {name: value for name, value in set_fields if value != getattr(defaults, name)}


def _set_fields(values: Host | EngineOptions | GatewaySettings) -> dict[str, Any]:
    """The fields that are not None, which TOML cannot express."""
    named = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: value for name, value in named.items() if value is not None}
