"""Which private keys to offer a host, and in which order."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.auth_strategy import AuthSource, AuthStrategy, InMemoryPrivateKey

from disagg.fleet.machine.ssh.settings import HopSettings


class Keys(AuthStrategy):
    """The private keys to offer, in ssh's order: configured keys that the agent holds, key files, other agent keys.

    Never asks for a password. unusable: why identity files could not be used.
    """

    def __init__(self, settings: HopSettings) -> None:
        super().__init__(ssh_config=None)
        self.settings = settings
        self.unusable: list[str] = []

    def get_sources(self) -> Iterator[AuthSource]:
        user = self.settings.user
        agent = paramiko.Agent()
        try:
            held = {key.asbytes(): key for key in agent.get_keys()}
            asked = {path: blob for path in self.settings.identities if (blob := _public_half(path))}
            for blob in asked.values():
                if blob in held:
                    yield InMemoryPrivateKey(user, held[blob])
            for path in self.settings.identities:
                if asked.get(path) not in held and (key := self._load(path)) and key.asbytes() not in held:
                    yield InMemoryPrivateKey(user, key)
            if not self.settings.identities_only:
                for blob, key in held.items():
                    if blob not in asked.values():
                        yield InMemoryPrivateKey(user, key)
        finally:
            agent.close()

    def _load(self, path: Path) -> paramiko.PKey | None:
        try:
            found = path.stat()
            if found.st_uid == os.getuid() and found.st_mode & 0o077:  # as ssh itself does
                self.unusable.append(f"others can read {path}: chmod 600 {path}")
                return None
            return paramiko.PKey.from_path(path)
        except FileNotFoundError:
            if path == self.settings.explicit:
                self.unusable.append(f"{path} does not exist")
        except (paramiko.PasswordRequiredException, TypeError):  # cryptography raises it for a missing passphrase
            self.unusable.append(f"{path} has a passphrase: ssh-add {path}")
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            self.unusable.append(f"cannot read {path}: {error}")
        return None


def _public_half(path: Path) -> bytes | None:
    """The public key file of a private key: to look it up in the agent without the passphrase."""
    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
