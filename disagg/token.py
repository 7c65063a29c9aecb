"""The fleet's shared secret, and the folder of a fleet's local state.

A token file has one token per line. Callers show the first; servers accept each, so that a token can be replaced host
by host while the fleet serves. The file is that named by $DISAGG_TOKEN_FILE, else by `token_file` in hosts.toml, else
$XDG_STATE_HOME/disagg/NAME/token, which `disagg start` or `disagg deploy` creates. It follows the fleet's name, not the
path of hosts.toml, so that clones of one fleet share it; so do two unrelated fleets of the same name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from disagg.config import Fleet
from disagg.config.addresses import home
from disagg.errors import ConfigError

TOKEN_FILE_VARIABLE = "DISAGG_TOKEN_FILE"
GATEWAY_FOLDER_VARIABLE = "DISAGG_GATEWAY_FOLDER"
MEMORY_FOLDER_VARIABLE = "DISAGG_MEMORY_FOLDER"
MIN_TOKEN = 22
"""Characters: 128 bits in base64. A shorter one could be guessed from the certificate that servers show to anybody."""


def state_folder(fleet: Fleet) -> Path:
    """$XDG_STATE_HOME/disagg/NAME-HASH: pids and logs of this fleet on this machine. ConfigError without a home."""
    return _state() / f"{fleet.name}-{hashlib.sha256(str(fleet.path.resolve()).encode()).hexdigest()[:8]}"


def memory_folder() -> Path:
    """Where the hosts of this machine, of all fleets of this user, state what memory they take (disagg/ledger.py)."""
    return Path(named) if (named := os.environ.get(MEMORY_FOLDER_VARIABLE)) else _state() / "memory"


def _state() -> Path:
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else home() / ".local" / "state") / "disagg"  # as its specification says


def gateway_folder(fleet: Fleet) -> Path:
    """Where the fleet's gateway on this machine keeps its clients' keys and its history."""
    return Path(named) if (named := os.environ.get(GATEWAY_FOLDER_VARIABLE)) else state_folder(fleet)


def keys_path(fleet: Fleet) -> Path:
    """The file that holds the hashes of the keys of the gateway's clients."""
    return gateway_folder(fleet) / "keys.json"


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


class Tokens:
    """The tokens of a fleet. Those of a file are read anew when it changes, so that a rotation needs no restart.

    `current` is what callers show; servers accept each. Safe to use from several threads.
    """

    def __init__(self, *tokens: str, path: Path | None = None) -> None:
        """path: of their file; without one they stay as they are. ConfigError if it has no usable token."""
        self._path = path
        self._read = (_stamp(path), read_tokens(path)) if path is not None else (None, tokens)

    def __repr__(self) -> str:
        return f"Tokens({', '.join(self.digests)})"

    @staticmethod
    def of(fleet: Fleet) -> Tokens:
        """The fleet's tokens on this machine. Raises ConfigError if there are none."""
        return Tokens(path=_present_token_path(fleet))

    @property
    def all(self) -> tuple[str, ...]:
        """Every token, the current one first. A file that cannot be read any more leaves the ones before."""
        if self._path is not None and (stamp := _stamp(self._path)) not in (None, self._read[0]):
            with suppress(ConfigError):
                self._read = (stamp, read_tokens(self._path))
        return self._read[1]

    @property
    def digests(self) -> tuple[str, ...]:
        """What names them in messages: the first 8 digits of each one's hash."""
        return tuple(token_digest(token)[:8] for token in self.all)

    @property
    def current(self) -> str:
        """The token that callers show."""
        return self.all[0]

    def accepts(self, given: str) -> bool:
        """Whether this is one of them, compared in constant time."""
        raw = given.encode("utf-8", "surrogateescape")
        return bool(raw) and True in [hmac.compare_digest(raw, token.encode()) for token in self.all]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes if a file is replaced or written; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def fleet_token(fleet: Fleet) -> str:
    """The fleet's current token. Raises ConfigError if there is none."""
    return read_tokens(_present_token_path(fleet))[0]


def _present_token_path(fleet: Fleet) -> Path:
    """The token's file, unless it was never made: then ConfigError."""
    path = token_path(fleet)
    if not (path.exists() or named_token_path(fleet)):
        local = any(host.server_kind.spawned for host in fleet.hosts.values())
        raise ConfigError(
            f"there is no fleet token in {path}",
            f"run `disagg {'start' if local else 'deploy'}`; on a second machine copy the file, or set token_file",
        )
    return path


def token_digest(token: str) -> str:
    """The SHA-256 of a token's line in its file, as hosts report it. Its first 8 digits name a token."""
    return hashlib.sha256(f"{token}\n".encode()).hexdigest()


def parse_tokens(text: str) -> tuple[str, ...]:
    """The tokens in the text of a token file, in order, each once. Whether they are usable is not checked."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def tokens_text(tokens: Sequence[str]) -> str:
    """The text of the file of these tokens, the current one first."""
    return "".join(f"{token}\n" for token in tokens)


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens in this file, the current one first. Raises ConfigError if there is none, or if other users of this
    machine can read it."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            tokens = parse_tokens(file.read())
    except OSError as error:
        raise ConfigError(
            f"cannot read the fleet token from {path}: {error.strerror}",
            f"put it there; disagg makes one itself if neither token_file nor ${TOKEN_FILE_VARIABLE} names a file"
            if isinstance(error, FileNotFoundError)
            else "check that file and its owner",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users have access to the fleet's token file {path}", f"chmod 600 {path}")
    if not tokens or not all(map(is_usable, tokens)):
        raise ConfigError(
            f"{path} holds no usable token",
            f"each line must be a token of at least {MIN_TOKEN} printable ASCII characters: `openssl rand -hex 16`",
        )
    return tokens


def is_usable(token: str) -> bool:
    """Whether this can be a fleet's token: at least MIN_TOKEN printable ASCII characters."""
    return token.isascii() and token.isprintable() and len(token) >= MIN_TOKEN
