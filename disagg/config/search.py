"""Which hosts.toml is meant if none is named."""

from __future__ import annotations

import os
from pathlib import Path

from disagg.errors import ConfigError

CONFIG_VARIABLE = "DISAGG_CONFIG"


def find_hosts_file(named: Path | None = None) -> Path:
    """`named`, else $DISAGG_CONFIG, else ./hosts.toml. ConfigError if that file does not exist."""
    from_environment = os.environ.get(CONFIG_VARIABLE)
    path = named or (Path(from_environment) if from_environment else Path("hosts.toml"))
    if not path.exists():
        chosen = named or from_environment
        if not named and from_environment and not path.is_absolute():
            raise ConfigError(f"there is no {path} here, which $DISAGG_CONFIG names", "write its whole path there")
        hint = "correct --config or $DISAGG_CONFIG" if chosen else "disagg init writes one"
        raise ConfigError(f"there is no {path}", hint + "; `disagg demo` needs none")
    return path
