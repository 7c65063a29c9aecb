"""Compare healthy servers: with each other, and with the code and settings here.

Those that differ serve, so they stay healthy; but the fleet is not what hosts.toml says, and the exit code is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from disagg.config import Fleet, served_digest
from disagg.fleet.changes.links import described
from disagg.fleet.lifecycle.status.host_status import Difference, HostStatus
from disagg.fleet.lifecycle.status.verdicts import Verdict
from disagg.fleet.tokens.there import grouped
from disagg.version import code_hash

ROTATE: Final = "disagg token rotate"
LEAST_AGREEING: Final = 0.5
"""The least share of the places in which two hosts agree: with weights of other forms, such as 4 bits, 0.9 is usual;
with a wrong position embedding 0.4 was
seen, and 0 with a window that is ignored."""


def flag_differing(fleet: Fleet, statuses: Sequence[HostStatus]) -> list[HostStatus]:
    """Mark healthy hosts of a model as failed if their disagg or their revision of it differs: a decode host would
    refuse the other's KV. Then mark what else differs (`differs`), with a remark and the command that evens it."""
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

    found = [judged(status) for status in statuses]
    serving = [status for status in found if status.ok and "whole" not in status.roles]
    everywhere = [*_different_code(fleet, serving), *_different_tokens(serving)]

    def flagged(status: HostStatus) -> HostStatus:
        remarks = [*everywhere, *_different_settings(fleet, status)] if status in serving else []
        differs = tuple(what for what, _ in remarks)
        return replace(_remarked(status, [remark for _, remark in remarks]), differs=differs)

    return [flagged(status) for status in found]


class _Remark(NamedTuple):
    why: str
    hint: str


UNFINISHED: Final = _Remark("a rotation of the token is not finished: the one before is still accepted", ROTATE)


def _remarked(status: HostStatus, remarks: Sequence[_Remark]) -> HostStatus:
    """The status with these remarks beside its own. A command that another one ends with is not repeated."""
    whole = [_Remark(status.why, status.hint), *remarks]
    why = "; ".join(dict.fromkeys(one.why for one in whole if one.why))
    hints = list(dict.fromkeys(one.hint for one in whole if one.hint))
    needed = [hint for hint in hints if not any(other != hint and other.endswith(hint) for other in hints)]
    return replace(status, why=why, hint="; then: ".join(needed))


def _different_code(fleet: Fleet, serving: Sequence[HostStatus]) -> Iterator[tuple[Difference, _Remark]]:
    """If hosts run different code, or will with their next restart."""
    runs = {one.host: one.code for one in serving if one.code}
    then = {one.host: code for one in serving if (code := one.pending.code if one.pending else one.code)}
    deploy = "disagg deploy && " if any(fleet.hosts[name].server_kind.deployed for name in runs) else ""
    if len(set(then.values())) > 1:
        differing, what = (runs, "run") if len(set(runs.values())) > 1 else (then, "will run, when they are restarted,")
        yield "code", _Remark(f"hosts {what} different code: {grouped(differing)}", f"{deploy}disagg restart")
    elif len(set(runs.values())) > 1:
        yield "code", _Remark(f"hosts run different code: {grouped(runs)}", "disagg restart")


def _different_tokens(serving: Sequence[HostStatus]) -> Iterator[tuple[Difference, _Remark]]:
    """If hosts accept different tokens."""
    tokens = {one.host: ", ".join(one.tokens) for one in serving if one.tokens}
    if len(set(tokens.values())) > 1:
        yield "token", _Remark(f"hosts accept different tokens: {grouped(tokens)}", ROTATE)


def _different_settings(fleet: Fleet, status: HostStatus) -> Iterator[tuple[Difference, _Remark]]:
    """If a host runs other settings than those of this hosts.toml, or will with its next restart."""
    host, pending = fleet.hosts[status.host], status.pending
    here, restart = served_digest(fleet, host), f"disagg restart --host {host.name}"
    then = pending.config if pending is not None else status.config
    deploy = f"disagg deploy --host {host.name} && " if host.server_kind.deployed else ""
    if then and then != here:
        what = f"its pending release {pending.release[:8]} has" if pending is not None else "it runs"
        yield "settings", _Remark(f"{what} other settings than {fleet.path.name} here", f"{deploy}{restart}")
    elif status.config and status.config != here:
        yield "settings", _Remark(f"it runs other settings than {fleet.path.name} here", restart)


def flag_refuted(statuses: Sequence[HostStatus]) -> list[HostStatus]:
    """Add a remark to healthy prefill hosts whose last KV was refuted by a decode host."""
    decode = [one for one in statuses if one.ok and "decode" in one.roles]

    def flagged(status: HostStatus) -> HostStatus:
        by = [one for one in decode if one.model == status.model and _refutes(one, status.host)]
        if not status.ok or not by:
            return status
        count = sum(one.senders[status.host].refuted for one in by)
        times = "once" if count == 1 else f"{count} times"
        why = f"the KV that it sends is wrong: {', '.join(one.host for one in by)} refuted it {times}"
        return _remarked(status, [_Remark(why, f"disagg verify {status.model}")])

    return [flagged(status) for status in statuses]


def _refutes(decode: HostStatus, sender: str) -> bool:
    found = decode.senders.get(sender)
    return found is not None and found.verdict == "refuted"


def with_remarks(
    fleet: Fleet, statuses: Sequence[HostStatus], verdicts: Sequence[Verdict] = (), rotating: bool = False
) -> list[HostStatus]:
    """Add a remark to healthy servers that do not run what is deployed, or the code that is here, or whose model
    computes something else than that of another host or was verified by nobody; and to all while a rotation of the
    token is not finished. verdicts: of `disagg verify`, for this fleet. rotating: this machine has begun a rotation."""
    rotating = rotating or any(len(status.tokens) > 1 for status in statuses if status.ok)

    def remarked(status: HostStatus) -> HostStatus:
        if not status.ok or "whole" in status.roles:
            return _with_doubt(fleet, status, statuses, verdicts) if status.ok else status
        marked = _remarked(_with_release(fleet, status, statuses, verdicts), list(_of_models(status)))
        return _remarked(marked, [UNFINISHED]) if rotating and "token" not in status.differs else marked

    return [remarked(status) for status in statuses]


def _of_models(status: HostStatus) -> Iterator[_Remark]:
    """What is wrong with models of a host with several."""
    for one in status.models:
        about = f"'{one.model}' --host {status.host}"
        if one.state == "failed":
            yield _Remark(f"{one.model} could not be loaded: {one.reason}", f"disagg models load {about}")
        if one.state == "absent":
            reason = f": {one.reason}" if one.reason else ""
            yield _Remark(f"the files of {one.model} are not there{reason}", f"disagg models pull {about}")
        if one.state in ("loading", "ready", "draining") and one.reason:
            yield _Remark(f"{one.model}: {one.reason}", f"disagg models unload --force {about}")


def _with_release(
    fleet: Fleet, status: HostStatus, statuses: Sequence[HostStatus], verdicts: Sequence[Verdict]
) -> HostStatus:
    """The status with a remark if the host does not run what is deployed, or runs other code than is here; else that of
    `_with_doubt`."""
    host = fleet.hosts[status.host]
    restart = f"disagg restart --host {host.name}"
    if "code" in status.differs:
        return status
    if (newer := status.pending) is not None:
        return _remarked(status, [_Remark(described(newer.release, status.release or "", newer.since), restart)])
    if status.differs:
        return status
    if not status.code or status.code == code_hash():
        return _with_doubt(fleet, status, statuses, verdicts)
    deploy = f"disagg deploy --host {host.name} && " if host.server_kind.deployed else ""
    return replace(status, why="running other code than here", hint=f"{deploy}{restart}")


def _with_doubt(
    fleet: Fleet, status: HostStatus, statuses: Sequence[HostStatus], verdicts: Sequence[Verdict]
) -> HostStatus:
    """The status with a remark if this host and a partner, as a pair not verified by `disagg verify`, find other tokens
    likely, or if disagg's own tests have not compared this model's answers either."""
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
