"""The clients' keys: a file in the fleet's state folder that holds their hashes, and the gateway's view of it.

A key is shown once, when it is made. The fleet's own token is never one of them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, TypedDict, Unpack

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from disagg.api.base import Contract, InvalidValue
from disagg.api.requests import Parallel, PerMinute, Weight
from disagg.config import Fleet
from disagg.errors import ConfigError, UsageError
from disagg.files import drafted
from disagg.token import keys_path

PREFIX: Final = "sk-disagg-"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
MAX_NAME: Final = 64


class Grants(TypedDict, total=False):
    """What a key may be given, and what may be changed later; see Key."""

    models: Sequence[str] | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel: int | None
    weight: int
    monitor: bool
    admin: bool
    load: bool
    keep_alive_s: float | None


class Key(Contract, frozen=True, kw_only=True):
    """One client's key. id: random, the cache_salt of its requests. sha256: of the secret, which has 256 random bits:
    a slow hash would protect nothing. created, changed, revoked: seconds since 1970. models: canonical names, None for
    all. The limits are None if there are none; parallel: answers at a time. weight: of its share of gateways and hosts.
    monitor: it sees the requests of all keys, not only its own. admin: it may pull, delete and pin models, too. load:
    it may load and unload them; without, its requests are answered by those that are loaded. keep_alive_s: the longest
    that its requests keep a model loaded, None: as long as they like."""

    id: str
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    sha256: str
    created: float
    models: tuple[str, ...] | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    parallel: Parallel | None = None
    weight: Weight = 1
    monitor: bool = False
    admin: bool = False
    load: bool = True
    keep_alive_s: Annotated[float, Meta(ge=0)] | None = None
    changed: float | None = None
    revoked: float | None = None


class _File(Contract, frozen=True):
    keys: tuple[Key, ...] = ()


class KeyFile:
    """The keys on disk. Commands and the gateway may use the file at the same time. Beside it, an empty file states
    that there have been keys: if the keys are lost, nobody gets in, instead of everybody."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, fleet: Fleet) -> KeyFile:
        """The file of this fleet's keys on this machine."""
        return cls(keys_path(fleet))

    def read(self) -> tuple[Key, ...]:
        """All keys, also revoked ones; none if the file does not exist. Raises ConfigError if it cannot be used."""
        try:
            with self.path.open("rb") as file:
                mode, data = os.fstat(file.fileno()).st_mode, file.read()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigError(f"cannot read the keys from {self.path}: {error.strerror}") from error
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"other users can write to the file of keys {self.path}", f"chmod 600 {self.path}")
        return parsed(data or b" ", str(self.path))  # an empty file is a damaged one

    @property
    def required(self) -> bool:
        """Whether there has been a key."""
        return self._marker.exists()

    def require(self) -> None:
        """State that there has been a key. Raises OSError."""
        self._marker.touch(0o600)

    @property
    def _marker(self) -> Path:
        return self.path.with_suffix(".required")

    def add(self, name: str, **grants: Unpack[Grants]) -> str:
        """Add a key with these grants; the key itself, which is not kept.

        Raises UsageError if there is a key of that name, or if it cannot be one.
        """
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise UsageError(f"the name of a key has 1 to {MAX_NAME} printable characters", "name who uses it")
        secret = PREFIX + secrets.token_urlsafe(32)
        key = Key(id=secrets.token_hex(8), name=name, sha256=_hash(secret), created=time.time())
        with self._locked():
            keys = self.read()
            if any(one.name == name and one.revoked is None for one in keys):
                raise UsageError(f"there is a key named {name}", "choose another name, or revoke that key")
            self._write((*keys, _granted(key, grants)))
        return secret

    def edit(self, name: str, **grants: Unpack[Grants]) -> Key:
        """Change what the key of this name has been granted, and leave the rest and its secret; the key as it is now.
        Raises UsageError if there is none."""
        with self._locked():
            keys = self.read()
            key = _named(keys, name)
            edited = _granted(key, grants)
            if edited != key:  # newer than any earlier change, also one of a machine whose clock is ahead
                edited = replace(edited, changed=max(time.time(), _version(key) + 0.001))
                self._write(tuple(edited if one.id == key.id else one for one in keys))
        return edited

    def revoke(self, name: str) -> None:
        """End the key of this name. It stays in the file. Raises UsageError if there is none."""
        with self._locked():
            keys = self.read()
            key = _named(keys, name)
            self._write(tuple(replace(one, revoked=time.time()) if one.id == key.id else one for one in keys))

    def join(self, others: Sequence[Sequence[Key]]) -> tuple[Key, ...]:
        """Add the keys of other files to this one; all keys."""
        with self._locked():
            keys = self.read()
            together = joined([keys, *others])
            if together != keys:
                self._write(together)
        return together

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock. Raises ConfigError, also for an OSError of the block: nothing was changed then."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            hint = "free space on that disk" if error.errno in _FULL else "check that folder and its owner"
            raise ConfigError(f"cannot write the keys to {self.path}: {error.strerror}", hint) from error

    def _write(self, keys: tuple[Key, ...]) -> None:
        with drafted(self.path, written(keys)) as (draft, target):
            self.require()
            draft.replace(target)


def parsed(data: bytes, name: str) -> tuple[Key, ...]:
    """The keys of a file; none of an empty one. Raises ConfigError, which names it, if it is damaged."""
    try:
        return _File.from_bytes(data).keys if data else ()
    except InvalidValue as error:
        raise ConfigError(f"{name} is damaged: {error}", "restore it, or remove it and add the keys again") from None


def written(keys: Sequence[Key]) -> bytes:
    """The content of a file of these keys."""
    return msgspec.json.format(_File(tuple(keys)).to_bytes())


def joined(files: Sequence[Sequence[Key]]) -> tuple[Key, ...]:
    """The keys of several files in the order in which they were added, each as it was changed last. One that is revoked
    in any file is revoked."""
    found: dict[str, Key] = {}
    for key in itertools.chain(*files):
        known = found.get(key.id, key)
        latest = max(known, key, key=_version)
        found[key.id] = replace(latest, revoked=known.revoked if known.revoked is not None else key.revoked)
    return tuple(sorted(found.values(), key=lambda key: key.created))


def _version(key: Key) -> float:
    """When the key was changed last."""
    return key.created if key.changed is None else key.changed


def _named(keys: Sequence[Key], name: str) -> Key:
    """The key of this name that is not revoked. Raises UsageError if there is none."""
    valid = {key.name: key for key in keys if key.revoked is None}
    if name not in valid:
        raise UsageError(f"there is no key named {name}", f"there are: {', '.join(valid)}" if valid else "")
    return valid[name]


def _granted(key: Key, grants: Grants) -> Key:
    """The key with these grants. Raises UsageError for one that is out of bounds."""
    body = {**key.to_json(), **grants}
    body["models"] = list(grants.get("models", key.models) or ()) or None
    try:
        return Key.from_json(body)
    except InvalidValue as error:
        raise UsageError(str(error)) from None


class KeyRing:
    """The keys that count now: the file is read again whenever it has changed."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._version: tuple[int, ...] | None = None
        self._valid: dict[str, Key] = {}
        self._required = file.required

    @property
    def empty(self) -> bool:
        """Whether no key was ever added. Neither revoking the last one nor the loss of the file opens anything."""
        self._refresh()
        return not self._required

    @property
    def usable(self) -> bool:
        """Whether there is a key that is not revoked."""
        self._refresh()
        return bool(self._valid)

    def find(self, secret: str) -> Key | None:
        """The key with this secret, None if there is none or it is revoked. Raises ConfigError for a damaged file."""
        self._refresh()
        return self._valid.get(_hash(secret))

    def _refresh(self) -> None:
        version = self._file_version()
        if version != self._version:
            keys = self._file.read()
            self._valid = {key.sha256: key for key in keys if key.revoked is None}
            if keys and not self._file.required:  # they were brought here without it
                with suppress(OSError):
                    self._file.require()
            self._required = self._required or bool(keys) or self._file.required
            self._version = version

    def _file_version(self) -> tuple[int, ...]:
        try:
            found = self._file.path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
