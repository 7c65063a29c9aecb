"""From JSON, `{"prefill_servers": [{"host", "port", "model", "name"}], "decode_servers": [...]}`, to a hosts.toml.

What the JSON does not state (sources, context, KV ports) gets a likely value and a CHECK comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import tomli
import tomli_w

from disagg.config.addresses import address_fault, is_hub_id, is_label, is_loopback, same_machine
from disagg.config.document import fault, nearest, on_one_line
from disagg.errors import ConfigError

T = TypeVar("T")
Section = Literal["prefill_servers", "decode_servers"]
_SECTIONS: tuple[Section, ...] = ("prefill_servers", "decode_servers")
_KEYS = ("host", "port", "model", "name")
_ENGINES = {"prefill_servers": "transformers", "decode_servers": "mlx"}
_KV_PORT = 9001
_KNOWN_MODELS: Final = Path(__file__).with_name("known_models.toml")


@dataclass(frozen=True, slots=True)
class Converted:
    """`text`: of the hosts.toml. `ignored`: messages about keys of the JSON that are not in it."""

    text: str
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Server:
    section: Section
    name: str
    host: str
    port: int
    model: str
    kv_port: int | None


def from_json(text: str, name: str) -> Converted:
    """The hosts.toml for a JSON text. `name`: of the text in messages. Raises ConfigError, which names the value."""
    body = _parse(text, name)
    if not isinstance(body, dict) or not any(section in body for section in _SECTIONS):
        raise ConfigError(
            f'{name}: neither "prefill_servers" nor "decode_servers" is in it',
            'the form is {"prefill_servers": [{"host": "10.0.0.1", "port": 8000, "model": "...", "name": "..."}], '
            '"decode_servers": [...]}',
        )
    ignored = [_unknown(key, "", _SECTIONS) for key in body if key not in _SECTIONS]
    drafts = [draft for section in _SECTIONS for draft in _drafts(body.get(section, []), section, name, ignored)]
    if not drafts:
        raise ConfigError(f"{name}: lists no servers", "a fleet has at least one")
    _refuse_shared_ports(drafts, name)
    servers = _with_kv_ports(_with_names(drafts))
    return Converted(_render(servers), tuple(ignored))


# From JSON to servers


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise fault(name, text, (error.pos, error.pos + 1), f"not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists nested thousands deep
        raise ConfigError(f"{name}: not usable JSON: {error}") from error


def _drafts(entries: Any, section: Section, name: str, ignored: list[str]) -> Iterator[_Server]:
    if not isinstance(entries, list):
        raise ConfigError(f"{name}: {section} is not a list", f'as in "{section}": [{{"host": "10.0.0.1", ...}}]')
    for index, entry in enumerate(entries):
        where = f"{section}[{index}]"
        if not isinstance(entry, dict):
            raise ConfigError(f"{name}: {where} is not an object", 'as in {"host": "10.0.0.1", "port": 8000, ...}')
        ignored += [_unknown(key, f"{where}.", _KEYS) for key in entry if key not in _KEYS]
        yield _draft(entry, section, f"{name}: {where}")


def _draft(entry: dict[str, Any], section: Section, where: str) -> _Server:
    host = _value(entry, "host", str, where)
    if hint := address_fault(host):
        raise ConfigError(f'{where}.host: "{on_one_line(host)}" is not an address', hint)
    port = _value(entry, "port", int, where)
    if not 1 <= port <= 65535:
        raise ConfigError(f"{where}.port: out of range", "from 1 to 65535")
    model = _value(entry, "model", str, where)
    if not is_label(model):
        raise ConfigError(f"{where}.model: not usable as a name", "printable characters, no blank at either end")
    name = "" if entry.get("name") is None else _value(entry, "name", str, where)
    return _Server(section, name, host, port, model, None)


def _value(entry: dict[str, Any], key: str, kind: type[T], where: str) -> T:
    if key not in entry:
        raise ConfigError(f'{where}: missing "{key}"', 'a server needs "host", "port" and "model"')
    value = entry[key]
    if type(value) is not kind:  # not isinstance: true is no port number
        raise ConfigError(f"{where}.{key}: must be {'a string' if kind is str else 'an integer'}")
    return value


def _unknown(key: str, where: str, known: Sequence[str]) -> str:
    hint = nearest(key, known)
    return f"{where}{on_one_line(key)}: unknown, ignored{f' ({hint})' if hint else ''}"


def _refuse_shared_ports(servers: list[_Server], name: str) -> None:
    taken: set[tuple[str, int]] = set()
    for server in servers:
        place = (same_machine(server.host), server.port)
        if place in taken:
            raise ConfigError(f"{name}: two servers have port {server.port} on {server.host}", "give one another port")
        taken.add(place)


def _with_names(servers: list[_Server]) -> list[_Server]:
    """Servers with usable, unique names: unsafe characters replaced, duplicates numbered, missing names made."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for index, server in sorted(enumerate(servers), key=lambda numbered: not numbered[1].name):
        given = re.sub(r"[^A-Za-z0-9._-]+", "-", server.name).strip("-._")[:56]
        role = server.section.removesuffix("_servers")
        candidates = (f"{given or role}-{number}" for number in count(2 if given else 1))
        names[index] = given if given and given not in taken else next(name for name in candidates if name not in taken)
        taken.add(names[index])
    return [replace(server, name=names[index]) for index, server in enumerate(servers)]


def _with_kv_ports(servers: list[_Server]) -> list[_Server]:
    """Decode servers with a KV port that no other server on the machine has."""
    taken = {(same_machine(server.host), server.port) for server in servers}
    for index, server in enumerate(servers):
        if server.section == "decode_servers":
            machine = same_machine(server.host)
            kv_port = next(port for port in range(_KV_PORT, 65536) if (machine, port) not in taken)
            taken.add((machine, kv_port))
            servers[index] = replace(server, kv_port=kv_port)
    return servers


# From servers to TOML


def _render(servers: list[_Server]) -> str:
    engines: dict[str, list[str]] = {}
    for server in servers:
        of_model = engines.setdefault(server.model, [])
        if (engine := _ENGINES[server.section]) not in of_model:
            of_model.append(engine)
    head = "# Converted from JSON by `disagg init`. Lines marked CHECK hold what the JSON did not state.\n"
    tables = [tomli_w.dumps({"fleet": {"name": "fleet"}})]
    tables += [_model_table(model, names) for model, names in engines.items()]
    tables += [_host_table(server) for server in servers]
    return "\n".join([head, *tables])


def _model_table(model: str, engines: list[str]) -> str:
    if known := tomli.loads(_KNOWN_MODELS.read_text(encoding="utf-8"))["models"].get(model):
        return tomli_w.dumps({"models": {model: known}})
    hub = "/" in model and is_hub_id(model)
    source = model if hub else "./models/" + (re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "model")
    text = tomli_w.dumps({"models": {model: {"context": 8192, "sources": dict.fromkeys(engines, source)}}})
    checks = {"context": "prompt and answer together, in tokens", **dict.fromkeys(engines, "hub id or path")}
    return _with_checks(text, checks)


def _host_table(server: _Server) -> str:
    local = is_loopback(server.host)
    host: dict[str, Any] = {
        "address": server.host,
        "roles": [server.section.removesuffix("_servers")],
        "model": server.model,
        "port": server.port,
    }
    if server.kv_port is not None:
        host["kv_port"] = server.kv_port
    host["connector"] = "local" if local else "ssh"
    host["service"] = "process" if local else "systemd" if server.section == "prefill_servers" else "launchd"
    host["engine"] = {"name": _ENGINES[server.section]}
    return _with_checks(tomli_w.dumps({"hosts": {server.name: host}}), {"kv_port": "prefill hosts deliver KV here"})


def _with_checks(text: str, checks: Mapping[str, str]) -> str:
    """TOML text with a comment behind each of these keys."""
    lines = text.splitlines()
    keys = [line.partition(" = ")[0] for line in lines]
    marked = [
        f"{line} # CHECK: {checks[key]}" if key in checks else line for key, line in zip(keys, lines, strict=True)
    ]
    return "\n".join([*marked, ""])
