"""Networks inside this machine: a bridge in a namespace of its own, the hub, and cables from it to other namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deadlines import LONG_S
from tests.preloaded import enter_network

HUB = "169.254.150.1"


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    flags = ["--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
    return subprocess.run(["unshare", *flags, "true"], check=False, capture_output=True).returncode == 0


@contextmanager
def inside(hub: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """Within, this thread is in the hub's network namespace. Threads and processes inherit it from their maker."""
    if hub is None:
        yield
        return
    with Path("/proc/thread-self/ns/net").open("rb") as outside, Path(f"/proc/{hub.pid}/ns/net").open("rb") as inside:
        enter_network(inside.fileno())
        try:
            yield
        finally:
            enter_network(outside.fileno())


@contextmanager
def hub() -> Iterator[subprocess.Popen[bytes]]:
    """A network with a bridge at HUB, held by a process that ends with this one."""
    commands = (
        f"ip link set lo up && ip link add bridge0 type bridge && ip addr add {HUB}/24 dev bridge0"
        " && ip link set bridge0 up && echo ready && exec cat"
    )
    with child(["unshare", "--net", "sh", "-c", commands]) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.fail("the test bed could not make a bridge")
        yield process


def wire(hub: subprocess.Popen[bytes], process: subprocess.Popen[bytes], link: str, address: str) -> None:
    """A cable from the hub's bridge to the host's eth0."""
    own, deadline = namespace("self", "net"), time.monotonic() + LONG_S
    while namespace(process.pid, "net") == own:
        assert time.monotonic() < deadline and process.poll() is None, "a host of the test bed did not start"
        time.sleep(0.002)
    for target, command in (
        (hub, f"ip link add {link} type veth peer name eth0 netns {process.pid}"),
        (hub, f"ip link set {link} master bridge0 up"),
        (process, f"ip addr add {address}/24 dev eth0"),
        (process, "ip link set eth0 up"),
    ):
        in_network(target, *command.split())


def namespace(pid: int | str, kind: str) -> int:
    """Which one a process is in; 0 for a process that has ended or is not ours to ask about."""
    try:
        return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def in_network(process: subprocess.Popen[bytes], *argv: str) -> None:
    """Run a tool of this machine in the network namespace of that process."""
    subprocess.run(["nsenter", "-t", str(process.pid), "-n", *argv], check=True, capture_output=True)


@contextmanager
def child(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when this block does."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
