"""Compare healthy servers: with each other, and with the code and settings here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from disagg.config import Fleet, served_digest
from disagg.fleet.changes.pending import described
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.verdicts import Verdict
from disagg.version import code_hash

LEAST_AGREEING: Final = 0.5
"""Of the places: with weights of other forms, such as 4 bits, 0.9 is usual; with a wrong position embedding 0.4 was
seen, and 0 with a window that is ignored."""


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


def with_remarks(fleet: Fleet, statuses: Sequence[HostStatus], verdicts: Sequence[Verdict] = ()) -> list[HostStatus]:
    """Add a remark to healthy servers that do not run what is deployed, or what is here, or whose model computes
    something else than that of another host or was verified by nobody. The first two: another release than the one
    deployed since, or other code or settings than those of this checkout and hosts.toml. verdicts: of `disagg verify`,
    for this fleet."""

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
            return _with_doubt(fleet, status, statuses, verdicts)
        why = f"running other {' and '.join(other)} than here"
        deploy = f"disagg deploy --host {host.name} && " if host.placement.deployed else ""
        return replace(status, why=why, hint=f"{deploy}{restart}")

    return [remarked(status) for status in statuses]


def _with_doubt(
    fleet: Fleet, status: HostStatus, statuses: Sequence[HostStatus], verdicts: Sequence[Verdict]
) -> HostStatus:
    """With a remark if this host and a partner, as a pair not verified by `disagg verify`, find other tokens likely, or
    if disagg's own tests have not compared this model's answers either."""
    host = fleet.hosts[status.host]
    own = [verdict for verdict in verdicts if verdict.covers(status, host)]
    partners = [one for one in statuses if one.ok and _hand_over(status, one)]
    others = [one for one in partners if not any(verdict.covers(one, fleet.hosts[one.host]) for verdict in own)]
    if own and not others:
        return status
    why = _disagreement(status, others)
    if not why and not status.verified:
        kind = f"model type {status.fingerprint.architecture}" if status.fingerprint else "this model"
        partner = f" with {others[0].host}" if own else ""
        why = f"{kind} is not verified{partner}: its answers were not compared with those of each framework alone"
    return replace(status, why=why, hint=f"disagg verify {host.model}") if why else status


def _hand_over(one: HostStatus, other: HostStatus) -> bool:
    """Whether one of the two prefills for the other."""
    return one.model == other.model and {*one.roles, *other.roles} == {"prefill", "decode"}


def _disagreement(status: HostStatus, others: Sequence[HostStatus]) -> str:
    """How the host differs from the first one that it hardly agrees with; "" if from none."""
    if status.evidence is None:
        return ""
    places = len(status.evidence.likeliest)
    for other in others:
        if other.evidence is None:
            continue
        same = status.evidence.agreeing(other.evidence)
        if same is not None and same < LEAST_AGREEING * places:
            return f"after a fixed text its likeliest tokens are those of {other.host} in {same} of {places} places"
    return ""
