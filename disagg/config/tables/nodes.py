"""The rules of hosts that are nodes of one vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from disagg.config.schema import Host
from disagg.config.toml.table import Table

_ALIKE: Final = ("nnodes", "tensor_parallel", "pipeline_parallel", "dtype")


def require_nodes_agree(tables: Table, hosts: Mapping[str, Host]) -> None:
    """Nodes with one head have one rank each and the same of all else, or vLLM's wait for each other until the start
    ends. A missing one is no fault: the hosts.toml of a deployed host has it alone."""
    heads: dict[str, list[Host]] = {}
    for name, table in tables.tables("[hosts.dgx-spark-1]"):
        host = hosts[name]
        if host.engine.head_address is None:
            continue
        others = heads.setdefault(host.engine.head_address, [])
        for other in others:
            if fault := _disagreement(host, other):
                hint = "the nodes of one head differ in node_rank alone; another vLLM has another head_address"
                raise table.table("engine", 'engine = {name = "vllm"}').fault_at_value("head_address", fault, hint)
        others.append(host)


def _disagreement(host: Host, other: Host) -> str:
    """What two nodes of one head cannot both be, "" if they fit together."""
    if host.engine.node_rank == other.engine.node_rank:
        return f"{other.name} has this head and node_rank = {other.engine.node_rank} too"
    if host.model != other.model:
        return f"{other.name} has this head and another model"
    key = next((key for key in _ALIKE if getattr(host.engine, key) != getattr(other.engine, key)), "")
    return f"{other.name} has this head and another {key}" if key else ""
