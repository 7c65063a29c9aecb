"""Open an SSH connection to one host: its host key checked, the right private keys offered.

fabric opens the connection and its gateways. By default it would accept any host key and try every private key; here
`_KeyCheck` decides about host keys and `Keys` about private keys. `errors` converts the exceptions.
"""

from __future__ import annotations

import base64
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.auth_strategy import AuthSource, AuthStrategy, InMemoryPrivateKey

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.machine import interruption
from disagg.fleet.machine.ssh import known_hosts
from disagg.fleet.machine.ssh.errors import explain, refused_key
from disagg.fleet.machine.ssh.known_hosts import HostKey, KeyStatus, KnownHosts
from disagg.fleet.machine.ssh.settings import DEFAULT_TIMEOUTS, SHORTEST_S, HopSettings, SSHTimeouts, settings_for

# paramiko logs tracebacks of its threads; the relevant ones are raised as exceptions too.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)

_UNSENT_BYTES = 1 << 17
"""The most that waits in the kernel to be sent. A message to the guard waits behind an upload, and must not come too
late for it: on a link of 10 kB/s this is 13 s. Not limited is what is under way, much of it on a long fast link."""


def open_connection(name: str, settings: HopSettings, timeouts: SSHTimeouts = DEFAULT_TIMEOUTS) -> fabric.Connection:
    """Connect and log in. `name`: the host's name in hosts.toml, for messages.

    Raises HostKeyRefused, LoginRefused, HostUnreachable.
    """
    connection = _connection(name, settings, timeouts.within(interruption.left()))
    try:
        connection.open()
    except BaseException as error:  # also an interruption: leave no connection half open
        close_connection(connection)
        if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            raise explain(name, settings, error) from error
        raise
    hop: Any = connection
    while isinstance(hop, fabric.Connection):
        if isinstance(hop.transport.sock, socket.socket):  # through a gateway it is a channel
            _tune(hop.transport.sock, timeouts.dead_link)
        hop = hop.gateway
    return connection


def close_connection(connection: fabric.Connection) -> None:
    """Close a connection and its gateways. fabric closes neither gateways nor connections that failed to open."""
    hop: Any = connection
    while isinstance(hop, fabric.Connection):
        hop.client.close()
        hop = hop.gateway


@dataclass(frozen=True, slots=True)
class HostKeyOffer:
    """A host key that a machine, or a gateway on the way to it, offers. known_as: its name in known_hosts."""

    host: str
    known_as: str
    key: HostKey
    verdict: KeyStatus
    path: Path

    def accept(self) -> None:
        """Add the key to known_hosts. Raises FleetError if that cannot be written."""
        known_hosts.add(self.path, self.known_as, self.key)


def offers(host: Host) -> Iterator[HostKeyOffer]:
    """The key of every hop to a host, gateways first; a gateway must be accepted before the next hop is reachable.

    Raises HostKeyRefused for a key that changed or is revoked, HostUnreachable, LoginRefused (of a gateway).
    """
    for hop in _hops(settings_for(host)):
        if not hop.known_hosts:
            raise FleetError(f"{host.name}: ssh_config names no known_hosts file", "remove UserKnownHostsFile none")
        key = offered_key(host.name, hop)
        known = KnownHosts.read(hop.known_hosts)
        verdict = known.check(hop.known_as, key)
        if verdict in ("changed", "revoked"):
            raise refused_key(host.name, hop, verdict, key, known)
        yield HostKeyOffer(host.name, hop.known_as, key, verdict, hop.known_hosts[0])


def offered_key(name: str, settings: HopSettings, timeouts: SSHTimeouts = DEFAULT_TIMEOUTS) -> HostKey:
    """The host key that a host offers, unchecked and without a login. Keys of its gateways, if any, are checked.

    Raises HostKeyRefused, LoginRefused (of a gateway), HostUnreachable.
    """
    known = KnownHosts.read(settings.known_hosts)
    gateway: fabric.Connection | None = None
    timeouts = timeouts.within(interruption.left())
    try:
        sock: Any
        if settings.jump is not None:
            gateway = open_connection(name, settings.jump, timeouts)
            place = (settings.address, settings.port)
            sock = gateway.transport.open_channel("direct-tcpip", place, ("", 0), timeout=timeouts.channel)
        elif settings.proxy_command is not None:
            sock = paramiko.ProxyCommand(settings.proxy_command)
        else:
            sock = socket.create_connection((settings.address, settings.port), timeouts.connect)
        transport = _transport_factory(known, settings)(sock)
        try:
            transport.banner_timeout = timeouts.banner
            transport.start_client(timeout=timeouts.connect)
            key = transport.get_remote_server_key()
            return HostKey(key.get_name(), key.asbytes())
        finally:
            transport.close()
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise explain(name, settings, error) from error
    finally:
        if gateway is not None:
            close_connection(gateway)


def _hops(settings: HopSettings) -> list[HopSettings]:
    return [*(_hops(settings.jump) if settings.jump else []), settings]


def _connection(name: str, settings: HopSettings, timeouts: SSHTimeouts) -> fabric.Connection:
    known = KnownHosts.read(settings.known_hosts)
    gateway: Any = settings.proxy_command or False
    if settings.jump is not None:
        gateway = _connection(name, settings.jump, timeouts)
    connection = fabric.Connection(
        settings.address,
        user=settings.user,
        port=settings.port,
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),  # already read, into settings
        gateway=gateway,
        connect_timeout=min(settings.connect_timeout or timeouts.connect, max(SHORTEST_S, interruption.left())),
        connect_kwargs={
            "auth_strategy": Keys(settings),
            "transport_factory": _transport_factory(known, settings),
            "banner_timeout": timeouts.banner,
            "auth_timeout": timeouts.auth,
            "channel_timeout": timeouts.channel,
        },
    )
    connection.client.set_missing_host_key_policy(_KeyCheck(name, settings, known))
    return connection


def _transport_factory(known: KnownHosts, settings: HopSettings) -> Any:
    """A factory of transports that prefer the kinds of host key listed in known_hosts."""
    kinds = [entry.key.kind for entry in known.of(settings.known_as) if not entry.revoked]

    def make(sock: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        rsa = "ssh-rsa" in kinds  # the key's kind; what is negotiated is the signature algorithm
        wanted = [kind for kind in security.key_types if kind in kinds or (rsa and kind.startswith("rsa-"))]
        security.key_types = [*wanted, *(kind for kind in security.key_types if kind not in wanted)]
        return transport

    return make


class _KeyCheck(paramiko.MissingHostKeyPolicy):
    """Checks every host key: paramiko itself gets no known_hosts, so it calls this for each."""

    def __init__(self, name: str, settings: HopSettings, known: KnownHosts) -> None:
        self.name, self.settings, self.known = name, settings, known

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        offered = HostKey(key.get_name(), key.asbytes())
        verdict = self.known.check(self.settings.known_as, offered)
        if verdict != "known":
            client.close()
            raise refused_key(self.name, self.settings, verdict, offered, self.known)


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
            in_agent = {key.asbytes(): key for key in agent.get_keys()}
            asked = {path: blob for path in self.settings.identities if (blob := _public_half(path))}
            for blob in asked.values():
                if blob in in_agent:
                    yield InMemoryPrivateKey(user, in_agent[blob])
            for path in self.settings.identities:
                if asked.get(path) not in in_agent and (key := self._load(path)) and key.asbytes() not in in_agent:
                    yield InMemoryPrivateKey(user, key)
            if not self.settings.identities_only:
                for blob, key in in_agent.items():
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


def _tune(sock: socket.socket, dead_link_s: float) -> None:
    """Set TCP_NODELAY (without it a command takes 44 ms longer) and detect dead connections.

    paramiko's own keepalive does not notice a dead peer; the kernel's does.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", int(dead_link_s // 2)),  # Linux
        ("TCP_KEEPALIVE", int(dead_link_s // 2)),  # macOS's name for it
        ("TCP_KEEPINTVL", max(1, int(dead_link_s // 8))),
        ("TCP_KEEPCNT", 3),
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
        ("TCP_USER_TIMEOUT", int(dead_link_s * 1000)),  # Linux: also while data is unacknowledged
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, value))
    if sys.platform == "darwin":
        # TCP_RXT_CONNDROPTIME of <netinet/tcp.h>, not defined by Python: like TCP_USER_TIMEOUT, in seconds.
        sock.setsockopt(socket.IPPROTO_TCP, 0x80, max(1, int(dead_link_s)))
