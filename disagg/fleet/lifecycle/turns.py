"""The order in which a restart takes the hosts."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.config import Host

Row = Sequence[Sequence[Host]]
"""Turns that follow each other. The hosts of one turn are restarted at the same time."""


def rows(hosts: Sequence[Host], at_once: bool) -> list[Row]:
    """A row for each model; they are taken at the same time. The nodes of one vLLM have one turn, since each waits for
    the others to start. at_once: a row for each host."""
    if at_once:
        return [[[host]] for host in hosts]
    models: dict[str, dict[str, list[Host]]] = {}
    for host in hosts:
        together = host.engine.head_address or host.name
        models.setdefault(host.model, {}).setdefault(together, []).append(host)
    return [list(turns.values()) for turns in models.values()]
