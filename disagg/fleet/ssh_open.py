"""An SSH connection to one host, opened with its host key checked; and every way that can fail, as one of our errors.

fabric opens the connection and its gateways. It would accept any host key and try keys blindly, so both decisions are
taken here: `_KeyCheck` and `_Keys`.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fabric
import paramiko
from paramiko.auth_strategy import AuthFailure, AuthSource, AuthStrategy, InMemoryPrivateKey
from paramiko.ssh_exception import BadAuthenticationType, NoValidConnectionsError

from disagg.errors import DisaggError
from disagg.fleet.known_hosts import HostKey, KnownHosts, remove_commands
from disagg.fleet.machine import HostKeyRefused, HostUnreachable, LoginRefused
from disagg.fleet.ssh_settings import Settings

# paramiko prints tracebacks of its threads; what matters of them arrives as exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. connect: until TCP stands, and again until keys are agreed on. banner: until sshd says its version.
    auth: for each answer to a login. dead_link: until a link that carries nothing counts as broken."""

    connect: float = 8.0
    banner: float = 6.0
    auth: float = 15.0
    channel: float = 10.0
    dead_link: float = 8.0


DEFAULT: Final = Timeouts()


def open_connection(name: str, settings: Settings, timeouts: Timeouts = DEFAULT) -> fabric.Connection:
    """Connect and log in. `name`: the host's name in hosts.toml, for messages.

    Raises HostKeyRefused, LoginRefused, HostUnreachable.
    """
    connection = _connection(name, settings, timeouts)
    try:
        connection.open()
    except BaseException as error:
        close_connection(connection)
        if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            raise explain(name, settings, error, timeouts) from error
        raise
    hop: Any = connection
    while isinstance(hop, fabric.Connection):
        if isinstance(hop.transport.sock, socket.socket):  # through a gateway it is a channel
            _tune(hop.transport.sock, timeouts.dead_link)
        hop = hop.gateway
    return connection


def close_connection(connection: fabric.Connection) -> None:
    """Close it and its gateways. fabric leaves both what it could not open and the gateways open."""
    hop: Any = connection
    while isinstance(hop, fabric.Connection):
        hop.client.close()
        hop = hop.gateway


def transport_to(settings: Settings, timeouts: Timeouts, known: KnownHosts) -> paramiko.Transport:
    """A transport that has agreed on keys with the host and not logged in: its host key can be seen. Unchecked: for
    `disagg trust` alone. The caller closes it. Raises what paramiko raises."""
    transport = _transport_factory(known, settings)(
        socket.create_connection((settings.address, settings.port), timeouts.connect)
    )
    transport.banner_timeout = timeouts.banner
    try:
        transport.start_client(timeout=timeouts.connect)
        transport.get_remote_server_key()
    except BaseException:
        transport.close()
        raise
    return transport


def _connection(name: str, settings: Settings, timeouts: Timeouts) -> fabric.Connection:
    known = KnownHosts.read(settings.known_hosts)
    gateway: Any = settings.proxy_command or False
    if settings.jump is not None:
        gateway = _connection(name, settings.jump, timeouts)
    connection = fabric.Connection(
        settings.address,
        user=settings.user,
        port=settings.port,
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),  # read already, into settings
        gateway=gateway,
        connect_timeout=settings.connect_timeout or timeouts.connect,
        connect_kwargs={
            "auth_strategy": _Keys(settings),
            "transport_factory": _transport_factory(known, settings),
            "banner_timeout": timeouts.banner,
            "auth_timeout": timeouts.auth,
            "channel_timeout": timeouts.channel,
        },
    )
    connection.client.set_missing_host_key_policy(_KeyCheck(name, settings, known))
    return connection


def _transport_factory(known: KnownHosts, settings: Settings) -> Any:
    """Makes transports that ask for the kinds of host key we know, before any other."""
    kinds = [entry.key.kind for entry in known.of(settings.known_as) if not entry.revoked]

    def make(sock: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        wanted = [
            kind for kind in security.key_types if kind in kinds or (kind.startswith("rsa-") and "ssh-rsa" in kinds)
        ]
        security.key_types = [*wanted, *(kind for kind in security.key_types if kind not in wanted)]
        return transport

    return make


class _KeyCheck(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko has no types
    """paramiko is given no known hosts, so it asks this about every key."""

    def __init__(self, name: str, settings: Settings, known: KnownHosts) -> None:
        self.name, self.settings, self.known = name, settings, known

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        offered = HostKey(key.get_name(), key.asbytes())
        verdict, entry = self.known.check(self.settings.known_as, offered)
        if verdict != "known":
            client.close()
        if verdict == "unknown":
            raise HostKeyRefused(
                f"{self.name}: the host key of {self.settings.known_as} is unknown ({offered.kind} {offered.fingerprint})",
                f"compare that fingerprint on the machine, then: disagg trust {self.name}",
            )
        if verdict in ("changed", "revoked") and entry is not None:
            raise changed_key(self.name, self.settings, verdict, offered, self.known)


def changed_key(name: str, settings: Settings, verdict: str, offered: HostKey, known: KnownHosts) -> HostKeyRefused:
    """The error about a host that shows another key than the one we know."""
    entries = [entry for entry in known.of(settings.known_as) if not entry.revoked]
    if verdict == "revoked":
        return HostKeyRefused(
            f"{name}: the host key of {settings.known_as} is revoked ({offered.kind} {offered.fingerprint})",
            "somebody may be listening in: give the machine a new host key",
        )
    there = ", ".join(f"{entry.key.kind} {entry.key.fingerprint}" for entry in entries)
    return HostKeyRefused(
        f"{name}: the host key of {settings.known_as} has changed: known is {there}; it now shows "
        f"{offered.kind} {offered.fingerprint}. The machine was set up anew, or somebody is listening in",
        f"if it was set up anew: {remove_commands(entries, settings.known_as)}; then: disagg trust {name}",
    )


class _Keys(AuthStrategy):  # type: ignore[misc]
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
    import base64

    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None


def explain(name: str, settings: Settings, error: BaseException, timeouts: Timeouts = DEFAULT) -> DisaggError:
    """Any error of sockets or paramiko as one of ours."""
    if isinstance(error, DisaggError):
        return error
    where = f"{settings.address}:{settings.port}"
    ssh = (
        f"ssh -p {settings.port} {settings.user}@{settings.address}"
        if settings.port != 22
        else (f"ssh {settings.user}@{settings.address}")
    )
    if isinstance(error, AuthFailure):
        return _login_error(name, settings, error, ssh)
    if isinstance(error, paramiko.AuthenticationException):
        return LoginRefused(f"{name}: {where} does not let {settings.user} in: {error}", f"try: {ssh}")
    if isinstance(error, NoValidConnectionsError):
        error = next(iter(error.errors.values()))
    if isinstance(error, socket.gaierror):
        return HostUnreachable(
            f"{name}: the name {settings.address} cannot be resolved: {error.strerror}",
            "correct `address` in hosts.toml, or HostName in ~/.ssh/config",
        )
    if isinstance(error, TimeoutError):
        return HostUnreachable(f"{name}: {where} does not answer", f"ping {settings.address}")
    if isinstance(error, OSError) and error.errno is not None:
        return _socket_error(name, settings, error, where, ssh)
    text = str(error) or type(error).__name__
    if "banner" in text or "No existing session" in text:
        return HostUnreachable(
            f"{name}: {where} takes the connection, but its sshd says nothing (hung, overloaded, or no sshd)",
            f"on the machine: restart sshd; from here: {ssh} -v",
        )
    return HostUnreachable(f"{name}: the connection to {where} broke: {text}", f"from here: {ssh} -v")


def _socket_error(name: str, settings: Settings, error: OSError, where: str, ssh: str) -> HostUnreachable:
    if error.errno == errno.ECONNREFUSED:
        return HostUnreachable(
            f"{name}: nothing listens on {where}",
            "on the machine, Linux: sudo systemctl enable --now ssh; macOS: sudo systemsetup -setremotelogin on",
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        import sys

        hint = f"ping {settings.address}"
        if sys.platform == "darwin":
            hint = "System Settings > Privacy & Security > Local Network: allow this program; then: " + hint
        return HostUnreachable(f"{name}: {where}: {error.strerror}", hint)
    return HostUnreachable(
        f"{name}: the connection to {where} broke: {error.strerror or error}", f"from here: {ssh} -v"
    )


def _login_error(name: str, settings: Settings, failure: Any, ssh: str) -> DisaggError:
    results = [attempt.result for attempt in failure.result]
    trouble = getattr(failure.result.strategy, "trouble", [])
    broken = next((r for r in results if not isinstance(r, paramiko.AuthenticationException)), None)
    methods = next((r.allowed_types for r in results if isinstance(r, BadAuthenticationType)), None)
    if methods is not None and "publickey" not in methods:
        return LoginRefused(
            f"{name}: takes no keys now, only {', '.join(methods)}: a Mac that restarted with FileVault is locked",
            f"unlock it once with the password: {ssh}; else set PubkeyAuthentication yes in its sshd_config",
        )
    if broken is not None and not trouble:
        return HostUnreachable(
            f"{name}: the connection broke while logging in as {settings.user}: {broken}",
            f"from here: {ssh} -v",
        )
    why = f" ({'; '.join(trouble)})" if trouble else ""
    tried = f"{len(results)} key{'s' * (len(results) != 1)} tried" if results else "there is no key to try"
    copy = (
        f"ssh-copy-id {settings.user}@{settings.address}"
        if settings.port == 22
        else (f"ssh-copy-id -p {settings.port} {settings.user}@{settings.address}")
    )
    return LoginRefused(
        f"{name}: {settings.address} does not let {settings.user} in: {tried}{why}",
        f"{copy}; or correct `user` and `key` in hosts.toml",
    )


def _tune(sock: socket.socket, dead_link_s: float) -> None:
    """No delay for small packets (44 ms a command without), and an end to links that carry nothing.

    paramiko's own keepalive notices no dead peer; the kernel's does.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", int(dead_link_s // 2)),  # Linux
        ("TCP_KEEPALIVE", int(dead_link_s // 2)),  # macOS's name for it
        ("TCP_KEEPINTVL", max(1, int(dead_link_s // 8))),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(dead_link_s * 1000)),  # Linux: also with unacknowledged data under way
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, value))
    import sys

    if sys.platform == "darwin":
        # TCP_RXT_CONNDROPTIME of <netinet/tcp.h>, which Python does not name: macOS' TCP_USER_TIMEOUT, in seconds.
        sock.setsockopt(socket.IPPROTO_TCP, 0x80, max(1, int(dead_link_s)))
