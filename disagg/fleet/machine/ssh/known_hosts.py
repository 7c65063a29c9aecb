"""known_hosts files as OpenSSH reads them: hashed names, patterns, ports, revoked keys. Uses no SSH library."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from disagg.errors import FleetError

KeyStatus = Literal["known", "unknown", "changed", "revoked"]


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public host key. `kind`: as known_hosts spells it, ssh-ed25519; `blob`: the key in wire form."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the key as `ssh-keygen -l` shows it: SHA256:..."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode("ascii").rstrip("=")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a known_hosts file."""

    names: tuple[str, ...]
    key: HostKey
    path: Path
    line: int
    revoked: bool = False

    def matches(self, name: str) -> bool:
        """Whether the line applies to this host; name: as `host_name` returns it."""
        matched = False
        for pattern in self.names:
            negated = pattern.startswith("!")
            if _matches(pattern.removeprefix("!"), name):
                if negated:
                    return False
                matched = True
        return matched


@dataclass(frozen=True, slots=True)
class KnownHosts:
    """The lines of several files, in order."""

    entries: tuple[Entry, ...]

    @staticmethod
    def read(paths: Iterable[Path]) -> KnownHosts:
        """Read the files that exist. Malformed lines are skipped, as ssh does. FleetError if a file cannot be read."""
        entries: list[Entry] = []
        for path in paths:
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise FleetError(f"cannot read {path}: {error.strerror}", f"ls -l {path}") from error
            for number, line in enumerate(text.splitlines(), 1):
                if (entry := _entry(line, path, number)) is not None:
                    entries.append(entry)
        return KnownHosts(tuple(entries))

    def of(self, name: str) -> list[Entry]:
        """The lines that apply to a host."""
        return [entry for entry in self.entries if entry.matches(name)]

    def check(self, name: str, key: HostKey) -> KeyStatus:
        """Compare the key that a host offers with the known ones.

        "changed" also if only keys of other kinds are known: an attacker chooses which kind to offer.
        """
        entries = self.of(name)
        matching = [entry for entry in entries if entry.key == key]
        if any(entry.revoked for entry in matching):
            return "revoked"
        if matching:
            return "known"
        return "changed" if any(not entry.revoked for entry in entries) else "unknown"


def host_name(address: str, port: int = 22) -> str:
    """A host's name in known_hosts: the address in lower case, in brackets with its port if that is not 22."""
    address = address.lower()
    return address if port == 22 else f"[{address}]:{port}"


def add(path: Path, name: str, key: HostKey) -> None:
    """Append one line with one write; a missing folder (0700) and file (0600) are created. Raises FleetError."""
    line = f"{name} {key.kind} {base64.b64encode(key.blob).decode('ascii')}\n".encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            cut_short = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if cut_short else b"") + line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FleetError(f"cannot add to {path}: {error.strerror}", f"ls -ld {path.parent} {path}") from error


def remove_commands(entries: Sequence[Entry], name: str) -> str:
    """The shell commands that remove a host from the files of these entries."""
    files = dict.fromkeys(entry.path for entry in entries)
    return "; ".join(f"ssh-keygen -R '{name}' -f '{path}'" for path in files)


def _entry(line: str, path: Path, number: int) -> Entry | None:
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked"):
        return None  # @cert-authority: host certificates are not supported, so such a host counts as unknown
    names, kind, encoded = fields[:3]
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    return Entry(tuple(names.split(",")), HostKey(kind, blob), path, number, marker == "@revoked")


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in pattern[3:].split("|"))
        except ValueError:
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    # Brackets are literal in known_hosts; fnmatch would read a set of characters.
    return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))
