"""The ssh command line that connects to a host as `SSHMachine` does."""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Sequence
from contextlib import suppress

from disagg.config import Host
from disagg.config.home import home
from disagg.errors import UsageError
from disagg.fleet.machine.ssh.settings import settings_for


def ssh_command(host: Host, command: Sequence[str] = (), *, terminal: bool = False) -> list[str]:
    """argv of the system's ssh. A single word of `command` is a line for the remote shell; several are quoted for it.

    ssh reads its own configuration too, so gateways work as usual; hosts.toml takes precedence. terminal: allocate a
    terminal for the command, so that sudo can ask for a password. Raises UsageError for a local host.
    """
    if host.placement.spawned:
        raise UsageError(f'{host.name} is this machine: its connector is "local"', "run the command in this terminal")
    settings = settings_for(host)
    argv = ["ssh", "-l", settings.user, "-p", str(settings.port)]
    if settings.identities_only:
        argv += ["-o", "IdentitiesOnly=yes"]
    for path in settings.identities:
        if path == settings.explicit or path.is_file():
            argv += ["-i", str(path)]
    argv += ["-o", "UserKnownHostsFile=" + " ".join(f'"{path}"' for path in settings.known_hosts)]
    argv += ["-t"] if terminal and command else []
    argv += _configuration()
    line = command[0] if len(command) == 1 else shlex.join(command)
    return [*argv, "--", host.address, *([line] if command else [])]


def _configuration() -> list[str]:
    """ssh takes the account's home folder, not $HOME: name the file if they differ."""
    own = home() / ".ssh" / "config"
    return ["-F", str(own)] if own.is_file() and str(home()) != _home_of_account() else []


def _home_of_account() -> str:
    with suppress(KeyError):  # ssh itself refuses a user without an account
        return pwd.getpwuid(os.getuid()).pw_dir
    return ""
