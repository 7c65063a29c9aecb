"""The fleet's shared secret, and the folder of a fleet's local state.

The token comes from the file named by $DISAGG_TOKEN_FILE, else by `token_file` in hosts.toml, else from
$XDG_STATE_HOME/disagg/NAME/token, in which `disagg start` or `disagg deploy` creates one. It follows the fleet's name,
not the path of hosts.toml, so that clones of one fleet share it; so do two unrelated fleets of the same name.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from disagg.config import Fleet
from disagg.errors import ConfigError

TOKEN_FILE_VARIABLE = "DISAGG_TOKEN_FILE"
GATEWAY_FOLDER_VARIABLE = "DISAGG_GATEWAY_FOLDER"
RELEASE_VARIABLE = "DISAGG_RELEASE"  # names the release that a deployed server runs


def state_folder(fleet: Fleet) -> Path:
    """$XDG_STATE_HOME/disagg/NAME-HASH: pids and logs of this fleet on this machine."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "disagg" / f"{fleet.name}-{hashlib.sha256(str(fleet.path.resolve()).encode()).hexdigest()[:8]}"


def gateway_folder(fleet: Fleet) -> Path:
    """Where the fleet's gateway on this machine keeps its clients' keys and its history."""
    return Path(named) if (named := os.environ.get(GATEWAY_FOLDER_VARIABLE)) else state_folder(fleet)


def keys_path(fleet: Fleet) -> Path:
    """The file that holds the hashes of the keys of the gateway's clients."""
    return gateway_folder(fleet) / "keys.json"


def pending_release() -> tuple[str, float] | None:
    """On a deployed host: the release that was deployed since this server started, and when, in seconds since 1970."""
    folder, runs = os.environ.get(GATEWAY_FOLDER_VARIABLE), os.environ.get(RELEASE_VARIABLE)
    if not folder or not runs:
        return None
    link = Path(folder) / "current"
    try:
        release, since = link.readlink().name, link.lstat().st_mtime
    except OSError:  # there is no such link
        return None
    return None if release == runs else (release, since)


def token_path(fleet: Fleet) -> Path:
    """The file that holds the fleet's token."""
    return named_token_path(fleet) or made_token_path(fleet, state_folder(fleet))


def named_token_path(fleet: Fleet) -> Path | None:
    """The token's file if $DISAGG_TOKEN_FILE or hosts.toml names one."""
    named = os.environ.get(TOKEN_FILE_VARIABLE)
    return Path(named) if named else fleet.token_file


def made_token_path(fleet: Fleet, state: Path) -> Path:
    """The file of a token that disagg makes itself. state: the fleet's state folder, where earlier versions put it."""
    earlier = state / "token"
    return earlier if earlier.exists() else state.parent / fleet.name / "token"


def earlier_token_paths(made: Path) -> list[Path]:
    """The files in which earlier versions kept the tokens of fleets of this name, one for each clone. made: the file
    that all clones share now."""
    name = re.compile(re.escape(made.parent.name) + "-[0-9a-f]{8}")
    return sorted(path for path in made.parent.parent.glob("*/token") if name.fullmatch(path.parent.name))


def fleet_token(fleet: Fleet) -> str:
    """The fleet's token. Raises ConfigError if there is none."""
    path = token_path(fleet)
    if not (path.exists() or named_token_path(fleet)):
        raise ConfigError(
            f"this fleet was never deployed or started here: its token file {path} does not exist",
            "run `disagg start` or `disagg deploy`; on a second machine copy the file, or set token_file",
        )
    return read_token(path)


def token_digest(token: str) -> str:
    """The SHA-256 of the file that a token is in on a host, as hosts report it. Its first 8 digits name a token."""
    return hashlib.sha256(f"{token}\n".encode()).hexdigest()


def read_token(path: Path) -> str:
    """The token in this file. Raises ConfigError if there is none, or if other users of this machine can read it."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the fleet token from {path}: {error.strerror}",
            "`disagg deploy` or `disagg start` creates it; on a second machine copy that file, or set token_file",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users have access to the fleet's token file {path}", f"chmod 600 {path}")
    if not is_usable(token):
        raise ConfigError(f"{path} holds no usable token", "it must be at least 16 printable ASCII characters")
    return token


def is_usable(token: str) -> bool:
    """Whether this can be a fleet's token: at least 16 printable ASCII characters."""
    return token.isascii() and token.isprintable() and len(token) >= 16
