"""hosts.toml as frozen, validated values.

schema      the values: Fleet, Host, Model, EngineOptions, Deploy; what follows from a host's connector
settings    what gateways and hosts with several models are told beside that
memory      how a host loads a model, for what it needs
hosts_file  which hosts.toml is meant; load: path -> Fleet; the [fleet] table
tables/     the rules of [hosts.*], [models.*], [deploy] and [hooks]
document    a TOML text, parsed, and error messages about it; locate: line and column of each key and value
table       one TOML table, read key by key, with errors that point at it
key         the key of a server that somebody else runs
addresses   which names, addresses and model sources are valid; home folders
render      Fleet -> the text of a hosts.toml for another machine, and its hash
starter     the file that `disagg init` writes
convert     a JSON list of servers -> the text of a hosts.toml
"""

from disagg.config.hosts_file import load
from disagg.config.render import served_digest, tables_digest
from disagg.config.schema import (
    MAX_TOLERANCE,
    MIN_TOLERANCE,
    Connector,
    Deploy,
    DType,
    EngineOptions,
    Fleet,
    HookName,
    Hooks,
    Host,
    Installer,
    KVAudit,
    KVWire,
    Model,
    ServiceManager,
    Split,
)
from disagg.config.settings import GatewaySettings, KeeperSettings, slug

__all__ = [
    "MAX_TOLERANCE",
    "MIN_TOLERANCE",
    "Connector",
    "DType",
    "Deploy",
    "EngineOptions",
    "Fleet",
    "GatewaySettings",
    "HookName",
    "Hooks",
    "Host",
    "Installer",
    "KVAudit",
    "KVWire",
    "KeeperSettings",
    "Model",
    "ServiceManager",
    "Split",
    "load",
    "served_digest",
    "slug",
    "tables_digest",
]
