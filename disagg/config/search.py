"""Which hosts.toml is meant if none is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from disagg.errors import ConfigError

CONFIG_VARIABLE = "DISAGG_CONFIG"
_DEMO: Final = Path("disagg", "demo", "hosts.toml")


def find_hosts_file(named: Path | None = None) -> Path:
    """`named`, else $DISAGG_CONFIG, else ./hosts.toml. ConfigError if that file does not exist."""
    from_environment = os.environ.get(CONFIG_VARIABLE)
    path = named or default_hosts_file()
    if not path.exists():
        chosen = named or from_environment
        if not named and from_environment and not path.is_absolute():
            raise ConfigError(f"there is no {path} here, which $DISAGG_CONFIG names", "write its whole path there")
        hint = "correct --config or $DISAGG_CONFIG" if chosen else "disagg init writes one"
        raise ConfigError(f"there is no {path}", hint + "; `disagg demo` needs none")
    return path


def default_hosts_file() -> Path:
    """The file that is read if none is named, whether or not it exists."""
    return Path(os.environ.get(CONFIG_VARIABLE) or "hosts.toml")


def comes_with_disagg(path: Path) -> bool:
    """Whether this file is part of disagg: the demo fleet, or in a clone, whether or not it is the one that runs, the
    fleet that disagg is made for."""
    whole = path.resolve()
    in_a_clone = whole.name == "hosts.toml" and (whole.parent / _DEMO).is_file()
    return whole.exists() and (in_a_clone or whole.parts[-len(_DEMO.parts) :] == _DEMO.parts)
