"""The fleet's token on this machine: a file that disagg makes once unless a setting names one.

Beside it are `token.next` with the token that a rotation is about to make current, `token.DIGEST` with those that an
adoption has replaced, and `token.lock`, kept by a rotation.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from disagg.config import Fleet, Host
from disagg.errors import ConfigError
from disagg.fleet.changes.state_files import locked_file, reported, write_private
from disagg.token import (
    TOKEN_FILE_VARIABLE,
    earlier_token_paths,
    made_token_path,
    named_token_path,
    parse_tokens,
    read_tokens,
    token_digest,
    token_path,
    tokens_text,
)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The tokens of a fleet in their file here. made: by disagg itself, since no setting names the file."""

    path: Path
    made: bool = False

    @staticmethod
    def of(fleet: Fleet, state: Path | None = None) -> OwnTokens:
        """The tokens of this fleet. Creates nothing. state: a state folder to use instead of the user's."""
        if state is None:
            return OwnTokens(token_path(fleet), named_token_path(fleet) is None)
        return OwnTokens(fleet.token_file or made_token_path(fleet, state), fleet.token_file is None)

    @property
    def all(self) -> tuple[str, ...]:
        """Every token, the current one first; ConfigError if there is none."""
        if self.made and not self.exists():
            raise ConfigError(
                f"there is no fleet token in {self.path}",
                "disagg start makes one for local hosts, disagg deploy for others; on a second machine copy the file",
            )
        return read_tokens(self.path)

    @property
    def current(self) -> str:
        """The token that callers show; ConfigError if there is none."""
        return self.all[0]

    @property
    def known(self) -> str | None:
        """The current token; None if there is no file."""
        return self.current if self.exists() else None

    def exists(self) -> bool:
        """Whether the file exists, usable or not."""
        with reported(self.path):
            return self.path.exists()

    def ensure(self) -> tuple[str, ...]:
        """The tokens; one is made first unless there is one or a setting names a file for it. ConfigError if other
        users can read them."""
        if self.made and not self.exists():
            # Several may be of different fleets that have this name.
            earlier = self._earlier
            self._write(read_tokens(earlier[0]) if len(earlier) == 1 else (secrets.token_hex(32),), once=True)
        return self.all

    def for_plan(self, dry: bool) -> tuple[str, ...]:
        """The tokens that a plan deploys; none if one would have to be made for it. dry: the file is not made either
        from that of an earlier version."""
        if not self.exists() and (dry or (self.made and len(self._earlier) != 1)):
            return ()
        return self.ensure()

    @property
    def _earlier(self) -> list[Path]:
        return earlier_token_paths(self.path)

    def require_made(self) -> None:
        """ConfigError if the file is not disagg's own, and so must not be overwritten."""
        if not self.made:
            hint = f"put the token there yourself, or leave out token_file and ${TOKEN_FILE_VARIABLE}"
            raise ConfigError(f"{self.path} was named for the fleet's token, and is not overwritten", hint)

    def adopt(self, tokens: Sequence[str]) -> None:
        """Make these the fleet's tokens on this machine. The file of those before stays beside it, as token.DIGEST with
        the first 8 digits of the hash of the first one."""
        self.require_made()
        if self.exists():
            with reported(self.path), suppress(FileExistsError):
                before = parse_tokens(self.path.read_text(encoding="utf-8", errors="replace"))
                os.link(self.path, self._beside(token_digest(before[0] if before else "")[:8]))
        self.write(tokens)

    def write(self, tokens: Sequence[str]) -> None:
        """Replace the tokens on this machine, the current one first."""
        self._write(tokens, once=False)

    def _write(self, tokens: Sequence[str], once: bool) -> None:
        with reported(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.path, tokens_text(tokens), once)

    @contextmanager
    def locked(self, why: str) -> Iterator[None]:
        """Hold the lock of the file, which all clones of the fleet share. HostLocked if another command has it."""
        with locked_file(self._beside("lock"), why):
            yield

    @property
    def next(self) -> str | None:
        """The token that a rotation is about to make current, if one has begun and has not come so far."""
        path = self._beside("next")
        return read_tokens(path)[0] if path.exists() else None

    @property
    def rotating(self) -> bool:
        """Whether a rotation has begun on this machine and is not finished."""
        return self.exists() and (self.next is not None or len(self.all) > 1)

    def ensure_next(self) -> str | None:
        """The token that a rotation makes current; a new one if none has begun. None if it is current already, and the
        one before has only to be removed."""
        tokens, new = self.all, self.next
        if new == tokens[0]:
            self.drop_next()
            return None
        if new is None and len(tokens) == 1:
            write_private(self._beside("next"), f"{secrets.token_hex(32)}\n", once=True)
            return self.next
        return new

    def drop_next(self) -> None:
        """The next token is current now."""
        path = self._beside("next")
        with reported(path):
            path.unlink(missing_ok=True)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def missing_hint(self, host: Host) -> str:
        """How this machine gets the token that a host has. A server that runs takes over what is put into its file."""
        if host.server_kind.spawned:
            return "disagg start" if self.made else f"put the fleet's token into {self.path}"
        return "disagg deploy --adopt-token" if self.made else f"copy the host's token to {self.path}"
