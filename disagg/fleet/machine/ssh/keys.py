"""Which private keys to offer a host, and in which order."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.auth_strategy import AuthSource, AuthStrategy, InMemoryPrivateKey

from disagg.fleet.machine.ssh.settings import Settings


class Keys(AuthStrategy):  # type: ignore[misc]
    """Which keys to offer, in ssh's order: the agent's that are asked for, the files', then the agent's others.

    No password is ever asked for. `trouble`: why an identity file could not be used.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(ssh_config=None)
        self.settings = settings
        self.trouble: list[str] = []

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
            return paramiko.PKey.from_path(path)
        except FileNotFoundError:
            if path == self.settings.explicit:
                self.trouble.append(f"there is no {path}")
        except (paramiko.PasswordRequiredException, TypeError):  # cryptography's word for a missing passphrase
            self.trouble.append(f"{path} has a passphrase: ssh-add {path}")
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            self.trouble.append(f"cannot read {path}: {error}")
        return None


def _public_half(path: Path) -> bytes | None:
    """The public key beside a private one, so that an agent can be asked for it without its passphrase."""
    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
