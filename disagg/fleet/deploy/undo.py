"""Back to an earlier release, or off the machine altogether: facts -> steps. Pure: no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import get_args

from disagg.config import Host, ServiceManager
from disagg.fleet.deploy.plan import needed_after, refused, restarts_at_once, switch
from disagg.fleet.deploy.steps import Plan, Refusal, RunScript, Step
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.machine.shell import script
from disagg.fleet.services import command


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
    if target in facts.before_tls and not _runs(facts, target):
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
    if facts.serving is not None and facts.serving.alive:
        links.setdefault(facts.serving.release, []).append("runs")
    shown = []
    for hash in sorted(facts.own_releases, key=lambda hash: (facts.sent.get(hash, 0), hash), reverse=True):
        at = time.strftime(" of %Y-%m-%d %H:%M", time.localtime(facts.sent[hash])) if facts.sent.get(hash) else ""
        words = [*links.get(hash, []), *(["changed since"] if hash in facts.damaged else [])]
        words += ["before TLS"] if hash in facts.before_tls else []
        shown.append(f"{hash[:8]}{at}" + (f" ({', '.join(words)})" if words else ""))
    return f"it has {', '.join(shown) or 'no release'}"


def _runs(facts: HostFacts, release: str) -> bool:
    return facts.serving is not None and facts.serving.alive and facts.serving.release == release


def _what_runs(facts: HostFacts, target: str) -> str:
    """What a rollback to this release leaves running."""
    serving = facts.serving
    if serving is None or not serving.alive:
        return f"nothing runs there: disagg start --host {facts.host} runs {target[:8]}"
    if serving.release == target:
        return f"{target[:8]} runs already: {facts.current[:8]} was deployed and never started"
    return f"{serving.release[:8]} runs until: disagg restart --host {facts.host}"


def uninstall(host: Host, facts: HostFacts, models: bool) -> Plan:
    """Remove everything of this host from its machine; models only if `models`, and if no command changes another host
    of the machine, which may need them."""
    steps: list[Step] = []
    notes: tuple[str, ...] = ()
    if models and facts.others_deploy:
        cause = f"models stay: a command changes another host of {facts.host}'s machine and may need them"
        models, notes = False, (f"{cause}; afterwards: disagg uninstall --models --host {facts.host}",)
    for manager in _managers(facts):
        remove = command(manager, facts, "remove")
        what = "stop the server" + (f" and remove it from {manager}" if manager != "process" else "")
        hint = "a daemon belongs to root: give the account sudo without a password for as long as this takes"
        action = RunScript(remove.script, remove.argv, 90.0)
        hint = hint if manager == "launchd" else ""
        steps.append(Step("service", what, action, hint))
    if facts.serving is not None and facts.serving.alive:
        action = RunScript(script("end_group.sh"), (str(facts.serving.pid),), 90.0)
        what = "end the server " + ("if it still runs" if steps else "that no service manager has")
        steps.append(Step("end", what, action))
    if facts.folder or (models and facts.carried):
        kept = {release.environment for release in facts.releases if release.host != host.name}
        free = [] if facts.others_deploy else [name for name in facts.environments if name not in kept]
        gone = [facts.paths.environment(name) for name in free]
        argv = (facts.paths.root, host.name, "1" if models else "0", *gone)
        what = f"remove {facts.paths.folder} and its environments" + (", and the models" if models else "")
        steps.append(Step("remove", what, RunScript(script("uninstall.sh"), argv, 600.0)))
    return Plan(host.name, "", tuple(steps), notes=notes)


def _managers(facts: HostFacts) -> list[ServiceManager]:
    """Service managers that have a server of this host, also from before hosts.toml named another one."""
    known: tuple[ServiceManager, ...] = get_args(ServiceManager)
    installed = {name.partition(":")[0] for name in facts.installed}
    return [manager for manager in known if manager in installed]
