"""Compare healthy servers: with each other, and with the code and settings here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from disagg.config import Fleet, served_digest
from disagg.fleet.changes.pending import described
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.version import code_hash


def flag_differing(statuses: Sequence[HostStatus]) -> list[HostStatus]:
    """Mark healthy hosts of a model as failed if their disagg or their revision of it differs. A decode host would
    refuse the other's KV."""
    first: dict[str, HostStatus] = {}

    def judged(status: HostStatus) -> HostStatus:
        if "whole" in status.roles:  # it states neither
            return status
        reference = first.setdefault(status.model, status) if status.ok else status
        differing = [what for what in ("version", "fingerprint") if getattr(status, what) != getattr(reference, what)]
        if not differing:
            return status
        why = f"its {' and '.join(differing)} of {status.model} differs from {reference.host}'s"
        hint = "put the same disagg and the same revision of the model on both hosts: disagg deploy && disagg restart"
        return replace(status, state="failed", why=why, hint=hint)

    return [judged(status) for status in statuses]


def with_remarks(fleet: Fleet, statuses: Sequence[HostStatus]) -> list[HostStatus]:
    """Add a remark to healthy servers that do not run what is deployed, or what is here. That is another release than
    the one deployed since, or other code or settings than those of this checkout and hosts.toml."""

    def remarked(status: HostStatus) -> HostStatus:
        if not status.ok:
            return status
        host = fleet.hosts[status.host]
        restart = f"disagg restart --host {host.name}"
        if (newer := status.pending) is not None:
            return replace(status, why=described(newer.release, status.release or "", newer.since), hint=restart)
        parts = ((status.code, code_hash(), "code"), (status.config, served_digest(fleet, host), fleet.path.name))
        other = [what for there, here, what in parts if there and there != here]
        if not other:
            return status
        why = f"running other {' and '.join(other)} than here"
        deploy = f"disagg deploy --host {host.name} && " if host.placement.deployed else ""
        return replace(status, why=why, hint=f"{deploy}{restart}")

    return [remarked(status) for status in statuses]
