"""What several hosts must have in common: the nodes of one vLLM, the dtype of the KV that they hand over, and the
layers of which one computes the first and another the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from disagg.api.names import Role
from disagg.config.document import toml_key
from disagg.config.schema import Fleet, Host
from disagg.config.table import Table
from disagg.errors import ConfigError

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


def require_all_nodes(fleet: Fleet, host: Host) -> None:
    """ConfigError if the host is a node of a vLLM on several machines, and another node is no host here. On a deployed
    host that is no fault: its hosts.toml has it alone."""
    engine = host.engine
    nodes = [one.engine for one in fleet.hosts.values() if one.engine.head_address == engine.head_address]
    here = {node.node_rank for node in (engine, *nodes)}
    missing = next((rank for rank in range(engine.nnodes) if rank not in here), None)
    if missing is not None:
        raise ConfigError(
            f"{host.name} is one of {engine.nnodes} nodes, and no host is the one of node_rank {missing}",
            f'add a host whose engine has head_address = "{engine.head_address}" and node_rank = {missing}',
        )


def _disagreement(host: Host, other: Host) -> str:
    """What two nodes of one head cannot both be, "" if they fit together."""
    if host.engine.node_rank == other.engine.node_rank:
        return f"{other.name} has this head and node_rank = {other.engine.node_rank} too"
    if host.model != other.model:
        return f"{other.name} has this head and another model"
    key = next((key for key in _ALIKE if getattr(host.engine, key) != getattr(other.engine, key)), "")
    return f"{other.name} has this head and another {key}" if key else ""


def require_one_kv_dtype(tables: Table, hosts: Mapping[str, Host]) -> None:
    """Raise for two hosts of a model, one per role, whose KV differs in dtype. Any prefill host may send to any decode
    host of its model, which would refuse each such transfer. The error is at the later host that states its dtype."""
    first: dict[tuple[str, Role], dict[str, Host]] = {}  # of each dtype
    for host in hosts.values():
        for role, other in _OTHER_SIDE.items():
            if role not in host.roles:
                continue
            first.setdefault((host.model, role), {}).setdefault(host.engine.dtype, host)
            peers = first.get((host.model, other), {})
            if peer := next((peer for dtype, peer in peers.items() if dtype != host.engine.dtype), None):
                _refuse(tables, host, peer)


def _refuse(tables: Table, later: Host, earlier: Host) -> None:
    by_name = dict(tables.tables("[hosts.dgx-spark-1]"))
    engines = {host.name: by_name[host.table].table("engine", 'engine = {name = "mlx"}') for host in (later, earlier)}
    stated, other = (later, earlier) if "dtype" in engines[later.name] else (earlier, later)
    raise engines[stated.name].fault_at_value(
        "dtype",
        f"KV in {stated.engine.dtype} does not fit [hosts.{toml_key(other.table)}], which has {other.engine.dtype}",
        f"one dtype for all prefill and decode hosts of {stated.model}",
    )


def require_layers_of_splits(tables: Table, hosts: Mapping[str, Host]) -> None:
    """Raise for a decode host that asks for more layers than a prefill host of its model has loaded, or would ask that
    for nothing."""
    by_name = dict(tables.tables("[hosts.dgx-spark-1]"))
    for host in hosts.values():
        split = host.engine.split
        if "decode" not in host.roles or split == "auto":
            continue
        for head in hosts.values():
            first = head.engine.first_layers
            if head.model != host.model or first is None or (isinstance(split, int) and 0 < split <= first):
                continue
            wanted = f"split = {split}" if isinstance(split, int) else f'split is "{split}"'
            raise (
                by_name[host.table]
                .table("engine", 'engine = {name = "mlx"}')
                .fault_at_value(
                    "split",
                    f"{wanted}, and [hosts.{toml_key(head.table)}] has the first {first} layers alone",
                    f'"auto", or from 1 to {first}',
                )
            )


_OTHER_SIDE: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}
