"""Exceptions of sockets and paramiko, converted to disagg's: which host, what failed, and a command as the hint."""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any

import paramiko
from paramiko.auth_strategy import AuthFailure
from paramiko.ssh_exception import BadAuthenticationType, NoValidConnectionsError

from disagg.errors import DisaggError, HostKeyRefused, HostUnreachable, LoginRefused
from disagg.fleet.machine.ssh.known_hosts import HostKey, KeyStatus, KnownHosts, remove_commands
from disagg.fleet.machine.ssh.settings import HopSettings
from disagg.units import counted

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_SILENT = ("banner", "No existing session")
"""In paramiko's messages if sshd sends nothing; the second one stands for a key exchange that timed out."""


def explain(name: str, settings: HopSettings, error: BaseException) -> DisaggError:
    """Convert any error of opening or using a connection. name: the host's name in hosts.toml."""
    if isinstance(error, NoValidConnectionsError):
        error = next(iter(error.errors.values()))
    if isinstance(error, DisaggError):
        return error
    if isinstance(error, AuthFailure):
        return _login_error(name, settings, error)
    if isinstance(error, paramiko.AuthenticationException):
        return _refused(name, settings, str(error))
    if isinstance(error, OSError):
        return _socket_error(name, settings, error)
    return _protocol_error(name, settings, error)


def refused_key(
    name: str, settings: HopSettings, verdict: KeyStatus, offered: HostKey, known: KnownHosts
) -> HostKeyRefused:
    """The error about a host key that is unknown, changed or revoked."""
    shown = f"{offered.kind} {offered.fingerprint}"
    if verdict == "unknown":
        return HostKeyRefused(
            f"{name}: the host key of {settings.known_as} is unknown: {shown}",
            f"disagg trust {name}, if that fingerprint is the machine's own",
        )
    if verdict == "revoked":
        return HostKeyRefused(
            f"{name}: the host key of {settings.known_as} is revoked in known_hosts: {shown}",
            "the connection may be intercepted: create a new host key on the machine",
        )
    entries = [entry for entry in known.of(settings.known_as) if not entry.revoked]
    before = ", ".join(f"{entry.key.kind} {entry.key.fingerprint}" for entry in entries)
    return HostKeyRefused(
        f"{name}: the host key of {settings.known_as} has changed from {before} to {shown}: "
        "the machine was reinstalled, or the connection is intercepted",
        f"only if it was reinstalled: {remove_commands(entries, settings.known_as)}; then: disagg trust {name}",
    )


def _protocol_error(name: str, settings: HopSettings, error: BaseException) -> HostUnreachable:
    text = str(error) or type(error).__name__
    if isinstance(error, paramiko.ChannelException):
        return HostUnreachable(
            f"{name}: sshd at {_where(settings)} allows too few sessions on one connection: {error.text}",
            "disagg needs up to 4: in its /etc/ssh/sshd_config, MaxSessions 10 (the default), then restart sshd",
        )
    if any(part in text for part in _SILENT):
        return HostUnreachable(
            f"{name}: {_where(settings)} accepts connections, but sshd sends nothing: hung, overloaded, or no sshd",
            f"on this machine: {_ssh(settings)} -v; on that one: restart sshd",
        )
    return HostUnreachable(f"{name}: the connection to {_where(settings)} broke: {text}", f"{_ssh(settings)} -v")


def _socket_error(name: str, settings: HopSettings, error: OSError) -> HostUnreachable:
    where, ping = _where(settings), f"ping {settings.address}"
    words = error.strerror or str(error) or type(error).__name__
    if isinstance(error, socket.gaierror):
        return HostUnreachable(
            f"{name}: the name {settings.address} cannot be resolved: {words}",
            "correct `address` in hosts.toml, or HostName in ~/.ssh/config",
        )
    if isinstance(error, TimeoutError):
        return HostUnreachable(f"{name}: {where} does not answer", ping)
    if error.errno == errno.ECONNREFUSED:
        return HostUnreachable(
            f"{name}: nothing listens on {where}",
            "on the machine, Linux: sudo systemctl enable --now ssh; macOS: sudo systemsetup -setremotelogin on; "
            f"or correct `ssh_port` of {name} in hosts.toml",
        )
    if error.errno in _NO_ROUTE and sys.platform == "darwin":
        ping = f"System Settings > Privacy & Security > Local Network: allow this program; then: {ping}"
    return HostUnreachable(f"{name}: {where}: {words}", ping if error.errno in _NO_ROUTE else f"{_ssh(settings)} -v")


def _login_error(name: str, settings: HopSettings, failure: Any) -> DisaggError:
    """Why no private key was accepted."""
    results = [attempt.result for attempt in failure.result]
    unusable = failure.result.strategy.unusable
    methods = next((result.allowed_types for result in results if isinstance(result, BadAuthenticationType)), None)
    if methods and "publickey" not in methods:
        return LoginRefused(
            f"{name}: accepts no keys now, only {', '.join(methods)}: a Mac that restarted with FileVault is locked",
            f"unlock it with the password: {_ssh(settings)}; on Linux: PubkeyAuthentication yes in sshd_config",
        )
    broken = [result for result in results if not isinstance(result, paramiko.AuthenticationException)]
    if broken:
        return HostUnreachable(
            f"{name}: the connection to {_where(settings)} broke while {settings.user} logged in: {broken[0]}",
            f"{_ssh(settings)} -v",
        )
    tried = f"{counted(len(results), 'key')} tried" if results else "there is no private key to try"
    return _refused(name, settings, "; ".join([tried, *unusable]))


def _refused(name: str, settings: HopSettings, why: str) -> LoginRefused:
    copy = _ssh(settings).replace("ssh ", "ssh-copy-id ", 1)
    return LoginRefused(
        f"{name}: {settings.address} refuses the login of {settings.user}: {why}",
        f"{copy}; or correct `user` and `key` of {name} in hosts.toml",
    )


def _where(settings: HopSettings) -> str:
    return f"{settings.address}:{settings.port}"


def _ssh(settings: HopSettings) -> str:
    port = "" if settings.port == 22 else f"-p {settings.port} "
    return f"ssh {port}{settings.user}@{settings.address}"
