"""hosts.toml as frozen, validated values.

schema     the values: Fleet, Host, Model, EngineOptions, Deploy
placement  what follows from a host's connector
validate   load: path -> Fleet; the [fleet] table
tables/    the rules of [hosts.*], [models.*], [deploy] and [hooks]
toml/      TOML read key by key, with errors that point at line and column
search     which hosts.toml is meant if none is named
key        the key of a server that somebody else runs
home       the home folders of users
addresses  which names, addresses and model sources are valid
render     Fleet -> the text of a hosts.toml for another machine, and its hash
starter    the file that `disagg init` writes
convert    a JSON list of servers -> the text of a hosts.toml
"""

from disagg.config.placement import Connector
from disagg.config.render import served_digest
from disagg.config.schema import (
    MAX_TOLERANCE,
    MIN_TOLERANCE,
    Deploy,
    DType,
    EngineOptions,
    Fleet,
    HookName,
    Hooks,
    Host,
    Installer,
    KVAudit,
    Model,
    ServiceManager,
)
from disagg.config.validate import load

__all__ = [
    "MAX_TOLERANCE",
    "MIN_TOLERANCE",
    "Connector",
    "DType",
    "Deploy",
    "EngineOptions",
    "Fleet",
    "HookName",
    "Hooks",
    "Host",
    "Installer",
    "KVAudit",
    "Model",
    "ServiceManager",
    "load",
    "served_digest",
]
