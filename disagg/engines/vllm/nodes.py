"""Ranks of one vLLM on several machines: what each node states to vLLM, and the end of a worker whose parent has ended.

The head's vLLM schedules for all ranks; the other nodes have workers only (`follower`), which send the KV of their own
heads, as on one machine. All nodes are started at the same time and wait for each other. vLLM's messages between them
are neither encrypted nor authenticated: `head_address` belongs to a network of their own.

vLLM makes a worker's connector when the model is loaded. A worker whose parent is killed before, while it waits for
another node, is not watched: it ends when its process group times out, or with the cgroup of its service.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from typing import Any, Final, NamedTuple

import psutil

from disagg.config import EngineOptions
from disagg.errors import ModelError

_BACKENDS: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Endpoint(NamedTuple):
    """Where the ranks find each other."""

    address: str
    port: int


def head(options: EngineOptions) -> Endpoint:
    """The head's endpoint, of options with several nodes."""
    assert options.head_address is not None
    address, _, port = options.head_address.rpartition(":")
    return Endpoint(address.removeprefix("[").removesuffix("]"), int(port))


def arguments(options: EngineOptions) -> dict[str, Any]:
    """vLLM's EngineArgs of this node; none for a single one."""
    if options.nnodes == 1:
        return {}
    address, port = head(options)
    return {
        "nnodes": options.nnodes,
        "node_rank": options.node_rank,
        "master_addr": address,
        "master_port": port,
        "distributed_executor_backend": "mp",
    }


def prepare_environment(options: EngineOptions) -> None:
    """Set by which address and interface this node reaches the others. ModelError if it cannot reach the head's."""
    if options.nnodes == 1:
        return
    address = head(options).address if options.node_rank == 0 else own_address(head(options))
    os.environ.setdefault("VLLM_HOST_IP", address)
    if (interface := interface_of(address)) is not None:
        for name in _BACKENDS:
            os.environ.setdefault(name, interface)


def own_address(to: Endpoint) -> str:
    """The address of this machine from which `to` is reached. Nothing is sent. ModelError without a route."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(*to, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(place)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ModelError(
            f"the head of the nodes at {to.address} cannot be reached: {error}", "correct engine.head_address"
        ) from error


def interface_of(address: str) -> str | None:
    """The name of the interface with this address; None if there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(one.address == address for one in found)), None)


POLL_S = 1.0


def end_with_parent(poll_s: float = POLL_S) -> None:
    """Kill this process within `poll_s` seconds after its parent has ended. vLLM's own workers end then, too, but one
    that waits for a message of another node goes on to wait, and keeps its GPU (0.32)."""
    threading.Thread(target=_watch, args=(_parent(), poll_s), name="parent", daemon=True).start()


def _parent() -> int:
    """The process that started this one, also if it has ended since."""
    started_by = multiprocessing.parent_process()
    return started_by.pid if started_by is not None and started_by.pid is not None else os.getppid()


def _watch(parent: int, poll_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    os.kill(os.getpid(), signal.SIGKILL)
