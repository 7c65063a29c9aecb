"""hosts.toml as frozen, validated models.

schema     what a fleet is: Fleet, Host, Model, EngineOptions
reader     path -> Document: bytes, UTF-8, TOML
locate     where each key and value of a TOML text stands
excerpt    the source line with a caret under the fault
table      one TOML table, read key by key; faults point at the key or value
addresses  names, addresses and model sources: what is safe
words      nearest words, text that is safe to show, TOML keys and strings
deploy     the rules of the [deploy] table
validate   load: path -> Document -> Fleet
render     Fleet -> the text of a hosts.toml for another machine
digest     what of a host its server heeds, as a short hash
starter    the files that `disagg init` writes
"""

from disagg.config.digest import served_digest
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
    Role,
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
    "Role",
    "ServiceManager",
    "load",
    "served_digest",
]
