"""Back to an earlier release: facts -> steps. Pure: no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from disagg.config import Host
from disagg.fleet.deploy.plan import needed_after, refused, restarts_at_once, switch
from disagg.fleet.deploy.steps import Plan, Refusal
from disagg.fleet.facts.host import HostFacts


def rollback(host: Host, facts: HostFacts, to: str = "") -> Plan:
    """Back to the release before the current one, or to the one that is named. No steps if that is current."""
    target = to or facts.previous
    if not target or target not in facts.own_releases:
        hint = f"disagg deploy --host {host.name}"
        if facts.current:
            hint = f"only the current one is there; check out the code you want, then: {hint}"
        return refused(host, Refusal("there is no release to go back to", hint))
    environment = facts.environment_of(target)
    if not facts.environments.get(environment):
        cause = f"release {target} needs the environment {environment or '(unknown)'}, which no longer exists"
        return refused(host, Refusal(cause, f"disagg deploy --host {host.name}"))
    if target in facts.damaged:
        cause = f"the files of release {target} have changed"
        return refused(host, Refusal(cause, f"disagg deploy --host {host.name}"))
    if target in facts.before_tls and facts.runs != target:
        cause = f"release {target} is of a disagg from before TLS, and this disagg could not reach its server"
        hint = "with the disagg of that release, in its checkout: disagg rollback && disagg restart --all-at-once"
        return refused(host, Refusal(cause, hint))
    steps = (switch(facts, target, f"go back to release {target}"),) if facts.current != target else ()
    return Plan(
        host.name,
        target,
        steps,
        needs=needed_after(facts, target),
        notes=(_what_runs(facts, target),),
        at_once=restarts_at_once(facts, target),
    )


def rollback_to(wanted: Sequence[str]) -> Callable[[Host, HostFacts], Plan]:
    """Plans the way back to the one of these releases that a host has. wanted: beginnings of their names."""

    def decide(host: Host, facts: HostFacts) -> Plan:
        found = [hash for hash in sorted(facts.own_releases) if hash.startswith(tuple(wanted))]
        if len(found) == 1:
            return rollback(host, facts, found[0])
        named = " or ".join(wanted)
        cause = f"{named} is the beginning of {len(found)} releases" if found else f"it has no release {named}"
        return refused(host, Refusal(cause, releases_there(facts)))

    return decide


def list_releases(host: Host, facts: HostFacts) -> Plan:
    """A plan without steps whose note is `releases_there`."""
    return Plan(host.name, facts.current, notes=(releases_there(facts),))


def releases_there(facts: HostFacts) -> str:
    """`it has 3f2a11bc of 2026-03-01 14:05 (current, runs), ...`, the newest first."""
    links = {facts.current: ["current"], facts.previous: ["previous"]}
    if facts.pid is not None:
        links.setdefault(facts.release, []).append("runs")
    shown = []
    for hash in sorted(facts.own_releases, key=lambda hash: (facts.sent.get(hash, 0), hash), reverse=True):
        at = time.strftime(" of %Y-%m-%d %H:%M", time.localtime(facts.sent[hash])) if facts.sent.get(hash) else ""
        words = [*links.get(hash, []), *(["changed since"] if hash in facts.damaged else [])]
        words += ["before TLS"] if hash in facts.before_tls else []
        shown.append(f"{hash[:8]}{at}" + (f" ({', '.join(words)})" if words else ""))
    return f"it has {', '.join(shown) or 'no release'}"


def _what_runs(facts: HostFacts, target: str) -> str:
    """What a rollback to this release leaves running."""
    if facts.pid is None:
        return f"nothing runs there: disagg start --host {facts.host} runs {target[:8]}"
    if facts.release == target:
        return f"{target[:8]} runs already: {facts.current[:8]} was deployed and never started"
    return f"{facts.release[:8]} runs until: disagg restart --host {facts.host}"
