"""How to connect to a host: hosts.toml first, then ~/.ssh/config, then /etc/ssh/ssh_config, as the ssh command does.

Implements what paramiko's parser lacks: `Include`, `ProxyJump none`, `IdentitiesOnly`, files of known hosts.
"""

from __future__ import annotations

import getpass
import io
import os
import pwd
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from disagg.config import Host
from disagg.config.addresses import expanded, home
from disagg.errors import FleetError, UsageError
from disagg.fleet.machine.ssh.known_hosts import host_name

if TYPE_CHECKING:
    import paramiko


SYSTEM_CONFIG: Final = Path("/etc/ssh/ssh_config")
_MAX_DEPTH = 16
_MAX_JUMPS = 8
SHORTEST_S: Final = 0.2
"""No step of connecting gets less time."""


@dataclass(frozen=True, slots=True)
class HopSettings:
    """One hop. address, port: to connect to. known_as: its name in known_hosts.

    identities: private key files to try, in order. explicit: the one that hosts.toml names, whose absence is reported.
    jump: the hop to go through. proxy_command: a command that carries the connection instead of a socket.
    """

    address: str
    port: int
    user: str
    known_as: str
    identities: tuple[Path, ...]
    identities_only: bool
    known_hosts: tuple[Path, ...]
    connect_timeout: float | None = None
    jump: HopSettings | None = None
    proxy_command: str | None = None
    explicit: Path | None = None


@dataclass(frozen=True, slots=True)
class SSHTimeouts:
    """Seconds. connect: for TCP, and again for the key exchange. banner: until sshd sends its version. auth: for each
    reply during login. channel: for opening one. dead_link: until a connection without traffic counts as broken."""

    connect: float = 8.0
    banner: float = 6.0
    auth: float = 15.0
    channel: float = 10.0
    dead_link: float = 8.0

    def within(self, seconds: float) -> SSHTimeouts:
        """The same, with no step of connecting longer than this."""
        limit = max(SHORTEST_S, seconds)
        connect, banner, auth, channel = (
            min(step, limit) for step in (self.connect, self.banner, self.auth, self.channel)
        )
        return SSHTimeouts(connect, banner, auth, channel, self.dead_link)


DEFAULT_TIMEOUTS: Final = SSHTimeouts()


def settings_for(host: Host) -> HopSettings:
    """The settings of a host of hosts.toml. Raises FleetError if ssh_config cannot be read."""
    import paramiko

    try:
        config = paramiko.SSHConfig.from_text("\n".join(_config_lines()))
        return _hop(config, host.address, user=host.user, port=host.ssh_port, key=host.key)
    # ValueError: an unbalanced quote, a port that is not a number.
    except (paramiko.ssh_exception.ConfigParseError, paramiko.ssh_exception.CouldNotCanonicalize, ValueError) as error:
        raise FleetError(
            f"{host.name}: ~/.ssh/config cannot be read: {error}", "ssh -G HOST prints how ssh reads it"
        ) from error


def ssh_command(host: Host, command: Sequence[str] = (), *, terminal: bool = False) -> list[str]:
    """argv of the system's ssh. A single word of `command` is a line for the remote shell; several are quoted for it.

    ssh reads its own configuration too, so gateways work as usual; hosts.toml takes precedence. terminal: allocate a
    terminal for the command, so that sudo can ask for a password. Raises UsageError for a local host.
    """
    if host.server_kind.spawned:
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


def _hop(
    config: paramiko.SSHConfig,
    name: str,
    *,
    user: str | None = None,
    port: int | None = None,
    key: str | None = None,
    depth: int = 0,
) -> HopSettings:
    """The hop to a host, with what ssh_config has for it."""
    if depth > _MAX_JUMPS:
        raise FleetError(f"ProxyJump in ~/.ssh/config is circular at {name}", f"ssh -G {name}")
    own_name = _own_name()  # without one, paramiko fails to look anything up
    options = config.lookup(name)
    address = options.get("hostname", name)
    number = port or _number(options, "port", 22)
    explicit = expanded(key) if key else None
    jump = options.get("proxyjump", "none")
    proxy_command = options.get("proxycommand", "none")
    named = tuple(expanded(path) for path in options.get("identityfile", ()))
    return HopSettings(
        address=address,
        port=number,
        user=user or options.get("user") or own_name,
        known_as=options["hostkeyalias"].lower() if "hostkeyalias" in options else host_name(address, number),
        identities=(explicit,) if explicit else named or _default_identities(),
        identities_only=explicit is not None or options.get("identitiesonly", "no").lower() == "yes",
        known_hosts=_known_hosts_files(options),
        connect_timeout=float(_number(options, "connecttimeout", 0)) or None,
        jump=None if jump.lower() == "none" else _jump(config, jump, address, depth),
        proxy_command=proxy_command if proxy_command.lower() != "none" and jump.lower() == "none" else None,
        explicit=explicit,
    )


def _jump(config: paramiko.SSHConfig, jump: str, towards: str, depth: int) -> HopSettings | None:
    """The last hop of a ProxyJump list; each hop goes through the previous one. towards: the address behind it."""
    before: HopSettings | None = None
    for hop in jump.split(","):
        user, _, place = hop.strip().removeprefix("ssh://").rpartition("@")
        bracketed = re.fullmatch(r"\[(.+)\](?::([0-9]+))?", place)
        name, port = bracketed.groups() if bracketed else (place, None)
        if not bracketed and place.count(":") == 1:
            name, port = place.split(":")
        if config.lookup(name).get("hostname", name) == towards:
            return before  # a wildcard in the file makes the gateway its own gateway
        settings = _hop(config, name, user=user or None, port=int(port) if port else None, depth=depth + 1)
        before = replace(settings, jump=before, proxy_command=None) if before else settings
    return before


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise FleetError("this user has no name to log in with", "set USER to one") from error


def _number(options: dict[str, Any], key: str, default: int) -> int:
    try:
        return int(options.get(key, default))
    except ValueError:
        raise FleetError(f"{key} in ~/.ssh/config is {options[key]!r}, not a number", "correct that line") from None


def _default_identities() -> tuple[Path, ...]:
    folder = home() / ".ssh"
    return tuple(folder / f"id_{kind}" for kind in ("ed25519", "ecdsa", "rsa"))


def _known_hosts_files(options: dict[str, Any]) -> tuple[Path, ...]:
    """The user's files first: `disagg trust` writes to the first one."""
    user = shlex.split(options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))
    everyone = shlex.split(options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"))
    return tuple(expanded(path) for path in (*user, *everyone) if path.lower() != "none")


def _config_lines() -> Iterator[str]:
    for path in (home() / ".ssh/config", SYSTEM_CONFIG):
        yield "Host *"
        yield from _lines(path, "Host *", 0)


def _lines(path: Path, block: str, depth: int) -> Iterator[str]:
    """The file's lines, with Include lines replaced by the lines of those files, in the same Host block."""
    if depth > _MAX_DEPTH:
        raise FleetError(f"{path}: Include is circular", "correct ~/.ssh/config")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error.strerror}", f"ls -l {path}") from error
    for line in io.StringIO(text):
        keyword, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if keyword.lower() in ("host", "match"):
            block = line.strip()
        if keyword.lower() != "include":
            yield line.rstrip("\n")
            continue
        base = path.parent if path.is_relative_to("/etc") else home() / ".ssh"
        for pattern in shlex.split(rest):
            for included in _glob(pattern, base):
                yield from _lines(included, block, depth + 1)
                yield block


def _glob(pattern: str, base: Path) -> list[Path]:
    path = base / expanded(pattern)
    return sorted(Path("/").glob(str(path.relative_to("/"))))


def ssh_line(host: Host) -> str:
    """The ssh command to the host with a terminal, for a hint: with what hosts.toml states about it."""
    port = ["-p", str(host.ssh_port)] if host.ssh_port is not None else []
    key = ["-i", str(expanded(host.key))] if host.key is not None else []
    place = f"{host.user}@{host.address}" if host.user is not None else host.address
    return " ".join(["ssh", "-t", *map(shlex.quote, (*port, *key, place))])


def _configuration() -> list[str]:
    """ssh takes the account's home folder, not $HOME: name the file if they differ."""
    own = home() / ".ssh" / "config"
    return ["-F", str(own)] if own.is_file() and str(home()) != _home_of_account() else []


def _home_of_account() -> str:
    with suppress(KeyError):  # ssh itself refuses a user without an account
        return pwd.getpwuid(os.getuid()).pw_dir
    return ""
