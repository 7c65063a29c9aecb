"""What each node states to vLLM: where the ranks find each other, and by which address and interface it is reached."""

from __future__ import annotations

import os
import socket
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
