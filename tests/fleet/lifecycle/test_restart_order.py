"""The order of a restart: hosts of a model follow each other; the nodes of one vLLM do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.config import EngineOptions, Host
from disagg.fleet.lifecycle.fleet_servers import rows


def host(name: str, model: str = "m", head: str | None = None) -> Host:
    return Host(name, "10.0.0.1", ("prefill",), model, EngineOptions("vllm", head_address=head), 8000)


HOSTS = [host("a"), host("n0", head="h:1"), host("b", "other"), host("n1", head="h:1"), host("p0", head="p:1")]


@pytest.mark.parametrize(
    ("at_once", "names"),
    [
        (False, [[["a"], ["n0", "n1"], ["p0"]], [["b"]]]),
        (True, [[["a"]], [["n0"]], [["b"]], [["n1"]], [["p0"]]]),
    ],
)
def test_the_nodes_of_one_vllm_are_restarted_together(at_once: bool, names: list[list[list[str]]]) -> None:
    assert [[[one.name for one in turn] for turn in row] for row in rows(HOSTS, at_once)] == names


def test_a_host_with_several_models_follows_all_others_of_these() -> None:
    both = replace(host("k", ""), models=("m", "other"))
    assert [[turn[0].name for turn in row] for row in rows([*HOSTS[:3], both, host("z", "third")], False)] == [
        ["a", "n0", "b", "k"],
        ["z"],
    ]
