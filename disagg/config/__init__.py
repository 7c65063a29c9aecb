"""hosts.toml as frozen, validated values.

schema     the values: Fleet, Host, Model, EngineOptions, Deploy
validate   load: path -> Fleet; the [fleet] table
hosts      the rules of [hosts.*] tables
models     the rules of [models.*] tables
deploy     the rules of the [deploy] table
table      one TOML table, read key by key; errors point at the key or value
reader     path -> Document: bytes, UTF-8, TOML
locate     line and column of each key and value of a TOML text
search     which hosts.toml is meant if none is named
addresses  which names, addresses and model sources are valid
messages   error text: source line with caret, nearest words, printable user text
render     Fleet -> the text of a hosts.toml for another machine, and its hash
starter    the file that `disagg init` writes
convert    a JSON list of servers -> the text of a hosts.toml
"""

from disagg.config.render import served_digest
from disagg.config.schema import (
    Connector,
    Deploy,
    DType,
    EngineName,
    EngineOptions,
    Fleet,
    Host,
    Installer,
    KVWire,
    Model,
    ServiceManager,
)
from disagg.config.validate import load

__all__ = [
    "Connector",
    "DType",
    "Deploy",
    "EngineName",
    "EngineOptions",
    "Fleet",
    "Host",
    "Installer",
    "KVWire",
    "Model",
    "ServiceManager",
    "load",
    "served_digest",
]
