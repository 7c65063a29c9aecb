"""The key of a server that somebody else runs. It is read for each request, so that a new one needs no restart, and
appears in no log and no argument."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from disagg.config.addresses import expanded
from disagg.config.schema import EngineOptions
from disagg.errors import ConfigError

MAX_KEY_BYTES: Final = 4096


def key_of(engine: EngineOptions, server: str) -> str:
    """The API key of this server, empty if it needs none. Raises ConfigError if it cannot be read."""
    if engine.key_variable:
        place, key = f"${engine.key_variable}", os.environ.get(engine.key_variable, "").strip()
    elif engine.key_file:
        place, key = engine.key_file, _read(server, expanded(engine.key_file))
    else:
        return ""
    if not key:
        raise ConfigError(f"{place} holds no key for {server}", "put the key there, alone")
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > MAX_KEY_BYTES:
        raise ConfigError(f"{place} holds no usable key for {server}", "a key is one word of printable ASCII")
    return key


def _read(server: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_KEY_BYTES + 2).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key of {server} from {path}: {error.strerror}", "write the key into that file"
        ) from error
