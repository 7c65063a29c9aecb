"""KV keeps its dtype on the way: the prefill and the decode hosts of a model have one."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.api.names import Role
from disagg.config.schema import Host
from disagg.config.toml.messages import toml_key
from disagg.config.toml.table import Table


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
    engines = {host.name: by_name[host.name].table("engine", 'engine = {name = "mlx"}') for host in (later, earlier)}
    stated, other = (later, earlier) if "dtype" in engines[later.name] else (earlier, later)
    raise engines[stated.name].fault_at_value(
        "dtype",
        f"KV in {stated.engine.dtype} does not fit [hosts.{toml_key(other.name)}], which has {other.engine.dtype}",
        f"one dtype for all prefill and decode hosts of {stated.model}",
    )


_OTHER_SIDE: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}
