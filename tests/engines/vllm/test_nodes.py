"""disagg/engines/vllm/nodes.py: what each node of several states to vLLM."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from disagg.config import EngineOptions
from disagg.engines.vllm.nodes import Endpoint, arguments, head, interface_of, own_address, prepare_environment
from disagg.errors import ModelError

SECOND = EngineOptions("vllm", tensor_parallel=2, nnodes=2, node_rank=1, head_address="127.0.0.1:29500")
VARIABLES = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those of before afterwards, also if they were not set."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_node_states_its_rank_and_where_the_ranks_find_each_other() -> None:
    assert arguments(SECOND) == {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "distributed_executor_backend": "mp",
    }
    assert arguments(EngineOptions("vllm", tensor_parallel=2)) == {}


@pytest.mark.parametrize(("text", "address"), [("10.0.0.1:29500", "10.0.0.1"), ("[fe80::1]:29500", "fe80::1")])
def test_the_head_has_an_address_and_a_port(text: str, address: str) -> None:
    assert head(EngineOptions("vllm", nnodes=2, head_address=text)) == Endpoint(address, 29500)


def test_a_node_is_reached_by_the_address_and_interface_that_reach_the_head() -> None:
    prepare_environment(SECOND)
    assert [os.environ[name] for name in VARIABLES] == ["127.0.0.1", *[interface_of("127.0.0.1")] * 2]


def test_what_the_environment_states_about_interfaces_stays() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    prepare_environment(SECOND)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_single_node_leaves_the_environment_alone() -> None:
    prepare_environment(EngineOptions("vllm", tensor_parallel=2))
    assert not any(name in os.environ for name in VARIABLES)


def test_a_head_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ModelError, match="the head of the nodes at spark cannot be reached"):
        own_address(Endpoint("spark", 29500))


def test_an_address_of_no_interface_has_none() -> None:
    assert interface_of("203.0.113.7") is None
