"""The rules of [hosts.*.engine] tables: of engines, and of whole-request hosts, which are servers of OpenAI's API that
disagg asks and does not manage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from disagg.api.engines import ENGINES, OF_ONE_ROLE, engines_for
from disagg.api.layout import MAX_LAYERS
from disagg.api.names import Role, SplitWord
from disagg.config.addresses import address_fault, is_hub_id, is_label, url_fault
from disagg.config.schema import (
    MAX_TOLERANCE,
    MIN_TOLERANCE,
    DType,
    EngineOptions,
    KVAudit,
    KVWire,
    Split,
)
from disagg.config.table import Table

T = TypeVar("T")
Reader = Callable[[Table, str], Any]
"""Returns the checked value of a key."""

ATTENTION: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
AUDITS: Final[tuple[Literal["auto", "always", "off"], ...]] = ("auto", "always", "off")
MAX_AUDIT_EVERY: Final = 1000
MAX_RANKS: Final = 64
"""The most ranks of an engine: each opens a connection for its part of a transfer, which has as many at most."""
OPENAI_URL: Final = "http://10.0.0.9:11434/v1"
SERVER_URL: Final = "http://127.0.0.1:8100"
"""Examples."""
MAX_SECONDS: Final = 366 * 86400
"""The longest time that hosts.toml takes."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_OF_ONE_HOST: Final = frozenset({"url", "model", "key_file", "key_variable", "nnodes", "node_rank", "head_address"})
"""Options that cannot be the same on every host of a model."""
_DOES: Final = {"whole": "answer whole requests"}


def read_engine(table: Table, roles: tuple[Role, ...]) -> EngineOptions:
    """How a host with these roles runs its model."""
    example = "openai" if "whole" in roles else next(iter(ENGINES))
    name = table.choice("name", (*ENGINES, "openai"), f'name = "{example}"')
    for role in roles:
        if name not in (suitable := ["openai"] if role == "whole" else [one.name for one in engines_for(role)]):
            hint = f'{role} needs name = "{suitable[0]}"'
            raise table.fault_at_value("name", f'the engine "{name}" cannot {_DOES.get(role, role)}', hint)
    known = _readers(name, roles)
    others = {
        key: f'this is an option of the engine "{other}"'
        for other in (*reversed(ENGINES), "openai")
        for key in _readers(other)
    }
    own = {key: f"this is an option of {OF_ONE_ROLE[key]} hosts" for key in _readers(name) if key in OF_ONE_ROLE}
    table.only(("name", *known), {**others, **own})
    if "url" in known:
        table.require("url", f'add url = "{OPENAI_URL if name == "openai" else SERVER_URL}"')
    options = EngineOptions(name, **{key: reader(table, key) for key, reader in known.items() if key in table})
    nodes_fit(table, options)
    return options


def read_overrides(table: Table, name: str) -> dict[str, Any]:
    """The options that every host of this engine runs a model with."""
    fixed = dict.fromkeys(_OF_ONE_HOST, "this is an option of one host: write it into its engine table")
    known = {key: reader for key, reader in _readers(name).items() if key not in _OF_ONE_HOST}
    table.only(tuple(known), fixed)
    named = Table(table.document, table.path, {**table.data, "name": name})
    return {key: reader(named, key) for key, reader in known.items() if key in table}


def _readers(name: str, roles: tuple[Role, ...] | None = None) -> Mapping[str, Reader]:
    """The options of an engine, or of its hosts with these roles."""
    if name == "openai":
        return _OPENAI_OPTIONS
    engine = ENGINES[name]
    return {key: _OPTIONS[key] for key in (engine.options if roles is None else engine.options_for(roles))}


def nodes_fit(table: Table, options: EngineOptions) -> None:
    """Ranks that are spread over machines find each other, and each machine has as many."""
    if options.ranks > MAX_RANKS:
        hint = f"tensor_parallel * pipeline_parallel is at most {MAX_RANKS}"
        raise table.fault_at_value("pipeline_parallel", f"these are {options.ranks} ranks", hint)
    if options.nnodes > 1:
        table.require("head_address", 'add head_address = "192.168.100.1:29500", an address of the host of node_rank 0')
        if options.ranks % options.nnodes:
            hint = f"tensor_parallel * pipeline_parallel = {options.nnodes}, or a multiple of it"
            raise table.fault_at_value("nnodes", "the ranks do not divide among so many nodes", hint)
    elif options.head_address is not None:
        hint = "add nnodes = 2, or remove this line"
        raise table.fault_at_key("head_address", "head_address is for several nodes", hint)
    if options.node_rank >= options.nnodes:
        raise table.fault_at_value("node_rank", "there is no such node", f"from 0 to {options.nnodes - 1}")


def _head_address(table: Table, key: str) -> str:
    """An address and a port."""
    text = table.value(key, str, 'head_address = "192.168.100.1:29500"')
    address, _, port = text.rpartition(":")
    fault = address_fault(address.removeprefix("[").removesuffix("]")) if address else "this is no address with a port"
    if fault is None and not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        fault = "this is no address with a port"
    if fault is not None:
        raise table.fault_at_value(key, fault, 'address:port, as in "192.168.100.1:29500"')
    return text


def _device(table: Table, key: str) -> str:
    engine = ENGINES[table.data["name"]]
    device = table.value(key, str, f'{key} = "auto"')
    if engine.numbered and re.fullmatch(r"cuda:[0-9]{1,3}", device):
        return device
    return table.choice(key, engine.devices)


def _attention(table: Table, key: str) -> str:
    """The name of an attention of transformers, or of a kernel on the hub, `owner/name`."""
    attention = table.value(key, str, f'{key} = "sdpa"')
    return attention if "/" in attention and is_hub_id(attention) else table.choice(key, ATTENTION)


def _kv_audit(table: Table, key: str) -> KVAudit:
    """A word, or a number: one hand-off in so many."""
    if type(table.data[key]) is int:
        return table.integer(key, 1, MAX_AUDIT_EVERY)
    return table.choice(key, AUDITS, number="a number: one hand-off in so many")


def _layers(table: Table, key: str) -> str:
    """`0:N`: the first N layers."""
    text = table.value(key, str, f'{key} = "0:24"')
    if not (found := re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})", text)):
        raise table.fault_at_value(key, "these are no layers", '"0:24" for the first 24')
    first, end = (int(number) for number in found.groups())
    if first:
        raise table.fault_at_value(key, "a prefill host computes the first layers", f'"0:{end or 24}"')
    if not 0 < end <= MAX_LAYERS:
        raise table.fault_at_value(key, f"{key} is out of range", f'from "0:1" to "0:{MAX_LAYERS}"')
    return f"0:{end}"


def _split(table: Table, key: str) -> Split:
    """A word, or a number of layers."""
    if type(table.data[key]) is int:
        return table.integer(key, 0, MAX_LAYERS)
    word: SplitWord = table.choice(key, get_args(SplitWord), number=f"a number of layers from 0 to {MAX_LAYERS}")
    return word


def _factor(table: Table, key: str) -> float:
    if type(table.data[key]) is int:
        return float(table.integer(key, 1, MAX_TOLERANCE))
    number = table.value(key, float, f"{key} = 1.5")
    if not MIN_TOLERANCE <= number <= MAX_TOLERANCE:  # also false for what is no number
        raise table.fault_at_value(key, f"{key} is out of range", f"from {MIN_TOLERANCE} to {MAX_TOLERANCE}")
    return number


def within(low: int, high: int) -> Reader:
    """Reads an integer of this range."""
    return lambda table, key: table.integer(key, low, high)


def one_of(allowed: tuple[str, ...]) -> Reader:
    """Reads one of these words."""
    return lambda table, key: table.choice(key, allowed)


def absolute_path(example: str, hint: str) -> Reader:
    """Reads a path that begins with / or ~/."""

    def read(table: Table, key: str) -> str:
        path = table.value(key, str, f'{key} = "{example}"')
        if not path.startswith(("/", "~/")) or not path.isprintable():
            raise table.fault_at_value(key, f"{key} is not an absolute path", f"{hint}: begin with / or ~/")
        return path

    return read


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
    url = _checked_url(table, key, OPENAI_URL, "put the key into a file and name that: key_file")
    if "?" in url or "#" in url:
        raise table.fault_at_value(
            key, "this URL has a query or fragment", f'it ends with a path, as in "{OPENAI_URL}"'
        )
    return url


def _server_url(table: Table, key: str) -> str:
    """The URL of a server whose paths disagg knows."""
    url = _checked_url(table, key, SERVER_URL, "this server is asked without one")
    if urlsplit(url)._replace(scheme="", netloc="").geturl():
        raise table.fault_at_value(key, "this URL has a path", f'it ends with the port, as in "{SERVER_URL}"')
    return url


def _checked_url(table: Table, key: str, example: str, password: str) -> str:
    url = table.value(key, str, f'url = "{example}"').rstrip("/")
    if fault := url_fault(url, password):
        raise table.fault_at_value(key, *fault)
    return url


def _name_there(table: Table, key: str) -> str:
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


def read_seconds(table: Table, key: str, off: T) -> float | T:
    """A length of time: seconds, or a number with s, m, h or d; `off` for "off"."""
    example = f'{key} = "30m"'
    if type(table.data[key]) is int:
        return float(table.integer(key, 0, MAX_SECONDS, example))
    text = table.value(key, str, example)
    if text == "off":
        return off
    found = re.fullmatch(r"([0-9]{1,8})([smhd])", text)
    if found is None:
        raise table.fault_at_value(key, "this is no length of time", 'seconds, or as in "90s", "30m", "2h" or "off"')
    seconds = int(found[1]) * _SECONDS[found[2]]
    if seconds > MAX_SECONDS:
        raise table.fault_at_value(key, f"{key} is out of range", f"at most {MAX_SECONDS} seconds")
    return float(seconds)


def read_ports(table: Table, key: str) -> range:
    """Two ports, and all between them."""
    text = table.value(key, str, f'{key} = "8100-8131"')
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise table.fault_at_value(key, "these are no ports", 'the first and the last, as in "8100-8131"')
    return range(first, last + 1)


_KEY_OPTIONS: Final[Mapping[str, Reader]] = {
    "key_file": absolute_path("~/.config/disagg/ollama.key", "a file with the key"),
    "key_variable": _variable,
}
_OPENAI_OPTIONS: Final[Mapping[str, Reader]] = {"url": _url, "model": _name_there, **_KEY_OPTIONS}
_OPTIONS: Final[Mapping[str, Reader]] = {
    "dtype": one_of(get_args(DType)),
    "device": _device,
    "chunk_tokens": within(1, 1 << 17),
    "threads": within(1, 1024),
    "layers": _layers,
    "kv_wire": one_of(get_args(KVWire)),
    "max_held_bytes": within(0, 1 << 50),
    "attention": _attention,
    "quantization": one_of(("int8", "int4", "mxfp4")),
    "kv_cache_memory_bytes": within(1 << 20, 1 << 50),
    "enforce_eager": lambda table, key: table.boolean(key),
    "tensor_parallel": within(1, 64),
    "pipeline_parallel": within(1, 64),
    "nnodes": within(1, 64),
    "node_rank": within(0, 63),
    "head_address": _head_address,
    "max_batch": within(1, 1024),
    "max_kv_bytes": within(1, 1 << 50),
    "split": _split,
    "kv_audit": _kv_audit,
    "kv_audit_tolerance": _factor,
    "url": _server_url,
    "model": _name_there,
    **_KEY_OPTIONS,
}
"""All options of all engines: which engine has which is in its value."""
