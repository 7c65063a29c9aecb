"""The rules of [hosts.*] tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, get_args
from urllib.parse import urlsplit

from disagg.api.keeper import MAX_KEPT
from disagg.api.names import Role
from disagg.config.addresses import NAME_RULE, USER_RULE, address_fault, is_name, is_user, origin_fault, same_machine
from disagg.config.document import nearest, on_one_line, toml_key
from disagg.config.schema import Connector, EngineOptions, Host, Model, ServiceManager
from disagg.config.settings import GatewaySettings, KeeperSettings
from disagg.config.table import Table
from disagg.config.tables.agree import require_nodes_agree
from disagg.config.tables.engine import (
    Reader,
    absolute_path,
    is_whole,
    nodes_fit,
    one_of,
    read_engine,
    read_ports,
    read_seconds,
    within,
)
from disagg.planning.devices import DEVICES as HARDWARE

MAX_RESPONSES: Final = 10_000
"""The most responses that a gateway keeps."""


def read_hosts(tables: Table, models: Mapping[str, Model]) -> dict[str, Host]:
    """The hosts by name, in file order."""
    hosts: dict[str, Host] = {}
    ports: dict[tuple[str, int], str] = {}
    for name, table in tables.tables("[hosts.dgx-spark-1]"):
        hosts[name] = _host(name, table, models)
        if not hosts[name].whole:  # its port is its machine's affair, and several may share a server
            _claim_ports(hosts[name], table, ports)
    if not hosts:
        raise tables.document.fault_at_value(tables.path, "no host is defined", "add [hosts.dgx-spark-1]")
    _require_keys_in_files(tables, hosts)
    require_nodes_agree(tables, hosts)
    return hosts


def _require_keys_in_files(tables: Table, hosts: Mapping[str, Host]) -> None:
    """Refuse the key of another server that is in a variable, if a deployed gateway or server is to read it: a service
    manager starts these without the variables of anyone's shell."""
    gateway = next((host.name for host in hosts.values() if host.gateway and host.server_kind.deployed), None)
    for name, table in tables.tables("[hosts.dgx-spark-1]"):
        host = hosts[name]
        asks = f"the gateway {gateway}" if host.whole and gateway else f"the server {name}"
        deployed = gateway is not None if host.whole else host.server_kind.deployed
        if deployed and host.engine.key_variable:
            raise table.table("engine", 'engine = {name = "openai"}').fault_at_key(
                "key_variable", f"{asks} has no such variable", "name a file on its machine: key_file"
            )


def _host(name: str, table: Table, models: Mapping[str, Model]) -> Host:
    if not is_name(name):
        raise table.document.fault_at_key(table.path, "this host name is not usable", NAME_RULE)
    known, given = (*_HOST_REQUIRED, "models", *_HOST_OPTIONS), table.data.get("roles")
    of_gateways = dict.fromkeys(GATEWAY_OPTIONS, "this is a key of gateways, which clients ask")
    of_keepers = dict.fromkeys(_KEEPER_OPTIONS, _SEVERAL)
    if isinstance(given, list) and "gateway" in given:
        table.only((*known, *GATEWAY_OPTIONS), of_keepers)
    elif "models" in table:
        table.only((*known, *_KEEPER_OPTIONS), of_gateways)
    else:
        table.only(known, {**of_gateways, **of_keepers})
    if is_whole(table):
        return _whole(name, table, models)
    for key in ("address", "roles"):
        table.require(key, f"add {_HOST_REQUIRED[key]}")
    roles = _roles(table)
    if "gateway" in roles:
        return _gateway(name, table, roles)
    keeps = "models" in table
    for key, example in _HOST_REQUIRED.items():
        if not (keeps and key == "model"):
            table.require(key, f"add {example}")
    if not keeps:
        _kv_port_fits(table, roles)
    _options_fit(table)
    engine_table = table.table("engine", 'engine = {name = "transformers"}')
    engine = read_engine(engine_table, roles)
    if engine.kind.simulated:
        hint = f'the engine "{engine.name}" predicts the times of a machine: add hardware = "dgx-spark"'
        table.require("hardware", hint)
    host = Host(
        name=name,
        address=_address(table, "address"),
        roles=roles,
        model="" if keeps else _served_model(table, models, engine.name),
        engine=engine,
        port=_port(table, "port"),
        **{key: reader(table, key) for key, reader in _HOST_OPTIONS.items() if key in table},
    )
    if keeps:
        return _keeper(host, table, models)
    host = replace(host, engine=models[host.model].run_by(engine, roles))
    nodes_fit(engine_table, host.engine)
    return host


def _keeper(host: Host, table: Table, models: Mapping[str, Model]) -> Host:
    """The host as one with several models."""
    for key, hint in (("model", "keep model or models"), ("kv_port", "ports has those for KV: remove this line")):
        if key in table:
            raise table.fault_at_key(key, f"a host with models has no {key}", hint)
    if host.engine.url is not None or host.engine.nnodes > 1:
        what = "the engine's model is loaded by another server" if host.engine.url else "its nodes run one model"
        raise table.fault_at_key("models", f"{what}: this host has one", 'write model = "..."')
    names = table.strings("models", 'models = ["qwen3-coder:30b"]')
    if not names:
        raise table.fault_at_value("models", "models is empty", "name at least one")
    if len(names) > MAX_KEPT:
        raise table.fault_at_value("models", f"models names {len(names)}", f"at most {MAX_KEPT}")
    for index, name in enumerate(names):
        if fault := _model_fault(name, models, host.engine.name):
            raise table.fault_at_element("models", index, *fault)
    table.require("ports", 'its models\' processes listen there: add ports = "8100-8131"')
    ports, each = read_ports(table, "ports"), 2 if "decode" in host.roles else 1
    if len(ports) < each * len(names):
        what = f"these are {len(ports)} ports, and {len(names)} models take {each * len(names)}"
        raise table.fault_at_value("ports", what, f"{each} for each model")
    settings = {key: reader(table, key) for key, reader in _KEEPER_OPTIONS.items() if key in table}
    for key in ("preload", "pin"):
        for index, name in enumerate(settings.get(key, ())):
            if name not in names:
                hint = nearest(name, names) or f"models has {', '.join(names)}"
                raise table.fault_at_element(key, index, f'"{on_one_line(name)}" is not in models', hint)
        if (count := len(settings.get(key, ()))) > (most := settings.get("max_loaded", count)):
            raise table.fault_at_value(key, f"{key} names {count} models, and max_loaded is {most}", "raise max_loaded")
    keeping = KeeperSettings(**{f"{key}_s" if key in _TIMES else key: value for key, value in settings.items()})
    return replace(host, models=names, keeping=keeping)


def _gateway(name: str, table: Table, roles: tuple[Role, ...]) -> Host:
    if key := next((key for key in table.data if key not in _GATEWAY_KEYS | set(GATEWAY_OPTIONS)), None):
        raise table.fault_at_key(key, f"{key} is for hosts that run a model", "a gateway runs none: remove this line")
    table.require("port", "add port = 8080")
    options = {key: reader(table, key) for key, reader in _HOST_OPTIONS.items() if key in table}
    settings = _read_settings(table)
    address, port = _address(table, "address"), _port(table, "port")
    return Host(name, address, roles, "", EngineOptions("none"), port, **options, settings=settings)


def _whole(name: str, table: Table, models: Mapping[str, Model]) -> Host:
    roles = _roles(table)
    if key := next((key for key in table.data if key not in ("roles", "model", "engine")), None):
        hint = "engine.url has the address, and the server is not disagg's: remove this line"
        raise table.fault_at_key(key, f"{key} is for servers of disagg", hint)
    engine = read_engine(table.table("engine", 'engine = {name = "openai", url = "http://10.0.0.9:11434/v1"}'), roles)
    model = _known_model(table, models)
    parts = urlsplit(engine.url or "")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    engine = replace(engine, model=engine.model or model)
    return Host(name, parts.hostname or "", roles, model, engine, port)


def _roles(table: Table) -> tuple[Role, ...]:
    roles = table.choices("roles", get_args(Role))
    if "prefill" in roles and "decode" in roles:
        raise table.fault_at_value(
            "roles",
            "one host cannot prefill and decode: the two need different engines",
            _TWO_HOSTS,
        )
    if "whole" in roles and len(roles) > 1:
        raise table.fault_at_value(
            "roles", "a whole-request host has no other role", "it runs prefill and decode itself"
        )
    if "gateway" in roles and len(roles) > 1:
        raise table.fault_at_value("roles", "a gateway is a server of its own and runs no model", _TWO_HOSTS)
    return roles


def _kv_port_fits(table: Table, roles: tuple[Role, ...]) -> None:
    if "decode" in roles:
        table.require("kv_port", "prefill hosts deliver KV to this port of a decode host: add kv_port = 9001")
    elif "kv_port" in table:
        raise table.fault_at_key("kv_port", "kv_port is for decode hosts", "only they receive KV: remove this line")


def _options_fit(table: Table) -> None:
    """Options that are only valid together with another one."""
    if "site_packages" in table and "python" not in table:
        raise table.fault_at_key("site_packages", "site_packages needs python", 'as in python = "/usr/bin/python3"')
    if "wired_limit_mb" in table and table.data.get("service") != "launchd":
        raise table.fault_at_key("wired_limit_mb", "wired_limit_mb is for Macs", 'it needs service = "launchd"')


def _known_model(table: Table, models: Mapping[str, Model]) -> str:
    return _served_model(table, models, None)


def _served_model(table: Table, models: Mapping[str, Model], engine: str | None) -> str:
    name = table.value("model", str, 'model = "qwen3-coder:30b"')
    if fault := _model_fault(name, models, engine):
        raise table.fault_at_value("model", *fault)
    return name


def _model_fault(name: str, models: Mapping[str, Model], engine: str | None) -> tuple[str, str] | None:
    """Why a host with this engine cannot have this model, and a hint; None if it can. engine: None for one that disagg
    does not run."""
    if name not in models:
        owner = next((model.name for model in models.values() if name in model.aliases), None)
        hint = f'this is an alias: write "{owner}"' if owner else nearest(name, models)
        there = ", ".join(f'"{model}"' for model in models)
        return f'no model "{on_one_line(name)}"', hint or f"there are {there}"
    if engine is not None and engine not in models[name].sources:
        return (
            f'model "{name}" has no source for the engine "{engine}" of this host',
            f'add {engine} = "owner/model" to [models.{toml_key(name)}.sources]',
        )
    return None


def _claim_ports(host: Host, table: Table, ports: dict[tuple[str, int], str]) -> None:
    """Raise for a port that another server on the same machine has. The KV listener may bind either address."""
    of_models = host.keeping.ports if host.keeping is not None else ()
    for key, numbers, addresses in (
        ("port", (host.port,), {host.address}),
        ("ports" if host.keeps else "kv_port", of_models or host.kv_ports, {host.address, host.kv_address}),
    ):
        sockets = [(same_machine(address), port) for port in numbers for address in sorted(addresses)]
        if taken := next((socket for socket in sockets if socket in ports), None):
            what = f"{taken[1]} of {key}" if key == "ports" else f"{key} {taken[1]}"
            hint = "choose others" if key == "ports" else "choose another port"
            raise table.fault_at_value(key, f"{what} is already {ports[taken]}", hint)
        owner = f"the {key} of" if key != "ports" else "one of the ports of"
        ports.update(dict.fromkeys(sockets, f"{owner} [hosts.{toml_key(host.name)}] on {host.address}"))


def _address(table: Table, key: str) -> str:
    address = table.value(key, str, f'{key} = "10.0.0.1"')
    if hint := address_fault(address):
        raise table.fault_at_value(key, f'"{on_one_line(address)}" is not an address', hint)
    return address


def _port(table: Table, key: str) -> int:
    return table.integer(key, 1, 65535, f"{key} = {22 if key == 'ssh_port' else 8000}")


def _user(table: Table, key: str) -> str:
    user = table.value(key, str, f'{key} = "ubuntu"')
    if not is_user(user):
        raise table.fault_at_value(key, f'"{on_one_line(user)}" is not a user name', USER_RULE)
    return user


def _key(table: Table, key: str) -> str:
    path = absolute_path("~/.ssh/id_ed25519", "a private key file on this machine")(table, key)
    if path.endswith(".pub"):
        raise table.fault_at_value(key, f"{key} is a public key", "name the private one, without .pub")
    return str(path)


_TWO_HOSTS: Final = "describe the machine as two hosts with the same address and different ports"
_GATEWAY_KEYS: Final = frozenset(
    {"address", "roles", "port", "connector", "service", "python", "site_packages", "user", "ssh_port", "key"}
)
_HOST_REQUIRED: Final[Mapping[str, str]] = {
    "address": 'address = "10.0.0.1"',
    "roles": 'roles = ["prefill"]',
    "model": 'model = "qwen3-coder:30b"',
    "port": "port = 8000",
    "engine": 'engine = {name = "transformers"}',
}
_HOST_OPTIONS: Final[Mapping[str, Reader]] = {
    "kv_port": _port,
    "data_address": _address,
    "connector": one_of(get_args(Connector)),
    "service": one_of(get_args(ServiceManager)),
    "python": absolute_path("/opt/homebrew/bin/python3", "PATH is short over ssh"),
    "site_packages": lambda table, key: table.boolean(key),
    "wired_limit_mb": within(1024, 1 << 24),
    "queue_size": within(1, 1 << 16),
    "user": _user,
    "ssh_port": _port,
    "key": _key,
    "hardware": one_of(tuple(HARDWARE)),
}


def _read_settings(table: Table) -> GatewaySettings:
    """What the gateway of this table offers its clients."""
    settings = GatewaySettings(**{key: reader(table, key) for key, reader in GATEWAY_OPTIONS.items() if key in table})
    for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if key in table and other not in table:
            raise table.fault_at_key(key, f"{key} needs {other}", "name both, or none")
    if settings.tls_self_signed and settings.tls_cert:
        raise table.fault_at_key("tls_self_signed", "there is a certificate already: tls_cert", "remove one of the two")
    return settings


def _origins(table: Table, key: str) -> tuple[str, ...]:
    origins = table.strings(key, 'cors_origins = ["https://chat.example.org"]')
    for index, origin in enumerate(origins):
        if hint := origin_fault(origin):
            raise table.fault_at_element(key, index, f'"{on_one_line(origin)}" is not an origin', hint)
    return origins


_SEVERAL: Final = 'this is a key of hosts with several models: models = ["qwen3-coder:30b"] in place of model'
_TIMES: Final = ("idle_ttl", "min_stay")
_KEEPER_OPTIONS: Final[Mapping[str, Reader]] = {
    "ports": read_ports,
    "preload": lambda table, key: table.strings(key, 'preload = ["qwen3-coder:30b"]'),
    "pin": lambda table, key: table.strings(key, 'pin = ["qwen3-coder:30b"]'),
    "max_loaded": within(1, 1024),
    "idle_ttl": lambda table, key: read_seconds(table, key, None),
    "min_stay": lambda table, key: read_seconds(table, key, 0.0),
    "memory_bytes": within(1, 1 << 50),
}
GATEWAY_OPTIONS: Final[Mapping[str, Reader]] = {
    "cors_origins": _origins,
    "tls_cert": absolute_path("/etc/ssl/gateway.pem", "a file on the gateway's machine"),
    "tls_key": absolute_path("/etc/ssl/gateway.key", "a file on the gateway's machine"),
    "tls_self_signed": lambda table, key: table.boolean(key),
    "keep_responses": within(0, MAX_RESPONSES),
}
