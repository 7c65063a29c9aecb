"""Tests do not leave this machine. A pytest plugin, loaded by tests/conftest.py.

On Linux the whole run, with every program that it starts, is moved into a network namespace that has loopback alone.
That needs root, or leave to make user namespaces. Elsewhere connections of the tests' own processes are refused; those
of programs that they start are not.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.preloaded import enter_network

NETWORK_VARIABLE = "DISAGG_TESTS_NETWORK"
"""The file of the network that this run was started in, for the processes of the run. Set where they have left it."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CAPABILITY_VERSION_3 = 0x20080522


def pytest_configure() -> None:
    if NETWORK_VARIABLE in os.environ:  # a process of pytest-xdist
        return
    if sys.platform == "linux" and _succeeds_in_a_fork():
        os.environ[NETWORK_VARIABLE] = _file_of_this_network()
        _leave_network()
    else:
        sys.addaudithook(_refuse_to_connect)


@contextmanager
def outside() -> Iterator[None]:
    """Within, this thread is in the network that the run was started in. Needs root."""
    if NETWORK_VARIABLE not in os.environ:
        yield
        return
    own = Path("/proc/thread-self/ns/net")
    with own.open("rb") as inside, Path(os.environ[NETWORK_VARIABLE]).open("rb") as started_in:
        enter_network(started_in.fileno())
        try:
            yield
        finally:
            enter_network(inside.fileno())


def _file_of_this_network() -> str:
    """That of a thread that stays in it. Another user than root cannot come back, and may make no thread before it
    leaves."""
    if os.geteuid() != 0:
        return "/dev/null"
    stays = threading.Thread(target=signal.pause, daemon=True)
    stays.start()
    return f"/proc/{os.getpid()}/task/{stays.native_id}/ns/net"


def _succeeds_in_a_fork() -> bool:
    """Whether the system lets us leave. Some allow a new namespace and then nothing in it."""
    pid = os.fork()
    if not pid:
        try:
            _leave_network()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _leave_network() -> None:
    """Move this thread, and what it starts, into a network with loopback alone."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWNET | (_CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    if user:  # in a namespace of its own a user may do what root may, such as read a file that nobody may read
        _call("capset", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def _refuse_to_connect(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        if isinstance(address, tuple) and not _is_here(str(address[0])):
            raise PermissionError(f"a test may not connect to {address[0]}: it is not this machine")


def _is_here(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address in ("localhost", "")
