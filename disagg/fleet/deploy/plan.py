"""Facts and target state -> ordered steps. Pure: no I/O but the sizes of files.

The order makes an interrupted deployment harmless: new files go beside the running release, under names made from
their content, and the `current` link is switched to them in one step near the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from disagg.config import Host
from disagg.extras import IMPORTED
from disagg.fleet.changes.links import Move, described, move_argv
from disagg.fleet.conditions.table import RELEASE_BYTES, disk, environment_bytes
from disagg.fleet.deploy.environment import Environment
from disagg.fleet.deploy.release import LIST, ModelSource, TargetState, config_file, digest
from disagg.fleet.deploy.steps import Plan, PutTree, Refusal, ServiceAction, Step, WriteFile
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HASH
from disagg.fleet.machine.machine import script
from disagg.fleet.machine.ssh.settings import ssh_line
from disagg.fleet.machine.upload import split
from disagg.fleet.services import launchd, program, systemd
from disagg.fleet.services.base import RunScript
from disagg.token import token_digest, tokens_text
from disagg.units import size

_BUILD_S: Final = 3600.0
_BUILD_HINT: Final = "is the package index reachable there? [deploy] in hosts.toml takes index_url, find_links, wheels"
_LOCKED_BUILD_HINT: Final = (
    "is the package index reachable there, and are its files those of the public one? [deploy] in hosts.toml takes "
    "index_url for a mirror, extra_index_urls and find_links for other builds of torch"
)
EARLIER_RELEASES: Final = 3
"""Kept for `disagg rollback --to`, the newest, beside the current one: those for which no environment has to be kept
that neither the current release nor the previous one nor the one that runs needs, because environments are large."""


def plan(desired: TargetState, facts: HostFacts) -> Plan:
    """The steps from the facts to the target state; none if the host is in it."""
    refused = tuple(map(Refusal.of, disk(desired.host, facts, _bytes_needed(desired, facts))))
    steps = () if refused else tuple(_steps(desired, facts))
    return Plan(
        desired.host.name,
        desired.hash,
        steps,
        refused,
        _needs(desired, facts),
        tuple(_notes(desired, facts)),
        {name: one.version for name, one in desired.environment.packages.items()},
        sum(one.nbytes for one in desired.environment.packages.values()),
        _down(facts),
        restarts_at_once(facts, desired.hash),
        len(facts.token_digests) > 1,
    )


def refused(host: Host, *refusals: Refusal) -> Plan:
    """The plan for a host that cannot be deployed."""
    return Plan(host.name, "", refusals=refusals)


def _notes(desired: TargetState, facts: HostFacts) -> Iterator[str]:
    if facts.runs and facts.runs != facts.current == desired.hash:
        yield f"{described(facts.current, facts.runs, facts.switched)}: disagg restart --host {facts.host}"
    if desired.host.service == "process" and desired.hash != facts.current:
        yield 'its server does not start by itself after a reboot: service = "systemd" or "launchd" does'
    if desired.host.service == "launchd" and not facts.sudo and _missing_definitions(desired, facts):
        yield "its launchd daemon needs root, and sudo asks for a password there: you will have to run one command"
    if desired.host.server_kind.deployed:
        for name, path in desired.key_files.items():
            yield f"the key of {name} is not deployed: write it there into {path}, and run: chmod 600 {path}"
        settings = desired.host.settings
        if settings.tls_cert is not None:
            where = f"write it there into {settings.tls_cert}, its key into {settings.tls_key}"
            yield f"its certificate is not deployed: {where}, and run: chmod 600 {settings.tls_key}"
    wanted = {definition.key for definition in desired.definitions}
    for name in sorted(key.partition(":")[2] for key in facts.installed.keys() - wanted if key.startswith("launchd:")):
        yield f"launchd still has a daemon that hosts.toml no longer asks for: sudo rm {launchd.plist_path(name)}"


def _bytes_needed(desired: TargetState, facts: HostFacts) -> int:
    """What has to be free on the disk."""
    if facts.current == desired.hash:
        return 0
    files = [path for one in _to_carry(desired, facts) for path in one.files.values()]
    need = RELEASE_BYTES + sum(path.stat().st_size for path in files if isinstance(path, Path))
    wanted = desired.environment
    if not facts.environments.get(wanted.hash):
        need += environment_bytes(wanted.extras, wanted.site_packages)
        need += sum(wheel.path.stat().st_size for wheel in wanted.wheels)
    return need - sum(facts.uploads.values())  # parts that go on, and others, which are removed first


# Steps


def _steps(desired: TargetState, facts: HostFacts) -> Iterator[Step]:
    steps = [*_service_link(facts), *_preparation(desired, facts), *_content(desired, facts)]
    switched = [*_service_steps(desired, facts)]
    if facts.current != desired.hash or desired.hash not in facts.intact_releases:
        switched.insert(0, _check(desired, facts))
    if facts.current != desired.hash:
        switched.append(switch(facts, desired.hash, "switch to the new release"))
    surplus = list(_surplus(desired, facts))
    leftovers = _leftovers(steps, facts)
    if steps or switched or surplus or leftovers:
        yield _prepare(facts, leftovers)
        yield from steps
        yield from switched
        yield _tidy(facts, surplus)


def _leftovers(steps: Sequence[Step], facts: HostFacts) -> tuple[str, ...]:
    """Paths of what interrupted deployments left, except for the parts with which uploads of these steps go on."""
    paths = facts.paths
    puts = [step.action for step in steps if isinstance(step.action, PutTree) and step.action.parts and facts.uploads]
    kept = {file.part for put in puts for file in split(put.files)[1]}
    stale = (f"{paths.uploads}/{part}" for part in facts.uploads if part not in kept)
    return (*(f"{paths.folder}/{name}" for name in facts.leftovers), *stale)


def _prepare(facts: HostFacts, leftovers: tuple[str, ...]) -> Step:
    paths = facts.paths
    what = "remove what an interrupted deployment left" if leftovers else "make folders"
    argv = (paths.root, paths.folder, *leftovers)
    return Step("prepare", what, RunScript(script("prepare.sh"), argv))


def _service_link(facts: HostFacts) -> Iterator[Step]:
    """Before anything else changes: a deployment that breaks off must not change what a crash starts."""
    if moves := service_moves(facts):
        what = f"point the host's service at release {moves[0][1]}"
        yield Step("link", what, RunScript(script("move_links.sh"), move_argv(facts.paths, moves)))


def _preparation(desired: TargetState, facts: HostFacts) -> Iterator[Step]:
    if desired.host.service == "systemd" and facts.systemd is not None and not facts.systemd.linger:
        yield Step(
            "linger",
            f"let the services of {facts.user} run without a login",
            RunScript(script("linger.sh"), (facts.user,)),
            f"run there: sudo loginctl enable-linger {facts.user}",
        )
    if not facts.environments.get(desired.environment.hash):
        yield from _build(desired.environment, facts)


def _build(environment: Environment, facts: HostFacts) -> Iterator[Step]:
    paths = facts.paths
    spec, target = f"{paths.incoming}/spec", paths.environment(environment.hash)
    wheels = f" and {len(environment.wheels)} wheels" if environment.wheels else ""
    yield Step(
        "requirements",
        f"send requirements{wheels}",
        PutTree(spec, environment.files, paths.uploads),
    )
    python = environment.python.path if environment.python is not None else environment.version
    tool = "uv" if environment.uv else "pip"
    argv = (
        f"{paths.incoming}/environment",
        target,
        spec,
        python,
        environment.uv,
        "1" if environment.site_packages else "0",
        *environment.options,
        *(("--find-links", f"{spec}/wheels") if environment.wheels else ()),  # a path of this host: not in the hash
        *(("--require-hashes",) if environment.all_hashed else ()),
    )
    platform = {"MACOSX_DEPLOYMENT_TARGET": "14.0"} if facts.os == "Darwin" else {}
    yield Step(
        "environment",
        f"build the Python {environment.version} environment {environment.hash} with {tool}{_download(environment)}",
        RunScript(script("environment.sh"), argv, _BUILD_S, platform),
        _LOCKED_BUILD_HINT if environment.all_hashed else _BUILD_HINT,
    )


def _download(environment: Environment) -> str:
    """How much that is, by the lock; of a vendor's own packages it is not known what they spare."""
    packages = environment.packages
    if not packages or environment.site_packages:
        return ""
    total = sum(one.nbytes for one in packages.values())
    return f": disagg[{','.join(environment.extras)}], {len(packages)} packages, {size(total)} to download"


def _content(desired: TargetState, facts: HostFacts) -> Iterator[Step]:
    paths = facts.paths
    for source in _to_carry(desired, facts):
        place, target = f"{paths.incoming}/model", paths.carried(source.name)
        yield Step("model", f"send the model {source.name}", PutTree(place, source.files, paths.uploads))
        yield Step(
            "adopt",
            f"move the model {source.name} into place",
            RunScript(script("adopt.sh"), (place, target)),
        )
    ours, known = set(map(token_digest, desired.tokens)), facts.token_digests
    if not ours.issubset(known) or facts.token_mode != "-rw-------":  # it may have more while tokens are rotated
        write = WriteFile(paths.token, tokens_text(desired.tokens).encode(), 0o600)
        what = "write the fleet's token" if _shared(desired, facts) else f"replace the token {known[0][:8]}"
        yield Step("token", what, write)
    if desired.keys and not facts.keys_digest:  # from then on they change there: `disagg keys`
        keys = WriteFile(paths.keys, desired.keys, 0o600)
        yield Step("keys", "write the keys of the gateway's clients", keys)
    if desired.hash not in facts.intact_releases:
        target = paths.release(desired.hash)
        put = PutTree(target, desired.files)
        yield Step("release", f"send release {desired.hash}", put)
    there = facts.lists.get(desired.hash) if desired.hash in facts.intact_releases else None
    if desired.listed and there != digest(desired.listed):
        write = WriteFile(f"{paths.release(desired.hash)}/{LIST}", desired.listed)
        yield Step("list", "write which models there are", write)


def _to_carry(desired: TargetState, facts: HostFacts) -> list[ModelSource]:
    """The models that are copied to the host, each once."""
    return list({one.name: one for one in desired.sources if one.name and one.name not in facts.carried}.values())


def _check(desired: TargetState, facts: HostFacts) -> Step:
    release = facts.paths.release(desired.hash)
    python = f"{facts.paths.environment(desired.environment.hash)}/bin/python"
    modules = dict.fromkeys(module for extra in desired.environment.extras for module in IMPORTED.get(extra, ()))
    action = RunScript(
        script("check_release.sh"),
        (python, release, config_file(desired.host), desired.host.name, program(desired.host), *modules),
    )
    hint = f"install what is missing into its environment: {python} -m pip install ..."
    what = "check that the release loads in its environment"
    return Step("check", what, action, hint if desired.environment.site_packages else "")


def _service_steps(desired: TargetState, facts: HostFacts) -> Iterator[Step]:
    unit = facts.installed.get("systemd")
    if desired.host.service != "systemd" and unit is not None and unit.enabled:
        disable = systemd.command(facts.paths, "disable")
        yield Step("retire", "disable its start at boot by systemd", disable)
    missing = _missing_definitions(desired, facts)
    if not missing:
        return
    if desired.host.service == "launchd":
        installer = f"{facts.paths.release(desired.hash)}/service/install"
        hint = f"run this, then deploy again: {ssh_line(desired.host)} \"sudo sh '{installer}'\""
        install = RunScript(script("install_daemons.sh"), (installer,))
        yield Step("service", "install the launchd daemon", install, hint)
        return
    for definition in desired.definitions:
        write = WriteFile(definition.path, definition.content)
        yield Step("unit", f"write {definition.path}", write)
    enable = systemd.command(facts.paths, "enable")
    hint = f"look there: systemctl --user status; does {facts.user} linger? loginctl show-user {facts.user}"
    yield Step("service", "enable the systemd unit", enable, hint)


def _missing_definitions(desired: TargetState, facts: HostFacts) -> list[tuple[str, str]]:
    """Key and path of the service files that are not in place as they should be."""
    return [
        (definition.key, definition.path)
        for definition in desired.definitions
        if (there := facts.installed.get(definition.key)) is None
        or there.digest != definition.digest
        or not there.enabled
    ]


def switch(facts: HostFacts, release: str, what: str) -> Step:
    """The step that makes a release current."""
    action = RunScript(script("move_links.sh"), move_argv(facts.paths, switch_moves(facts, release)))
    return Step("switch", what, action)


def _tidy(facts: HostFacts, surplus: list[str]) -> Step:
    what = f"remove {len(surplus)} old releases and environments" if surplus else "remove temporary files"
    argv = (facts.paths.incoming, facts.paths.uploads, *surplus)
    return Step("tidy", what, RunScript(script("tidy.sh"), argv, 600.0))


def _surplus(desired: TargetState, facts: HostFacts) -> Iterator[str]:
    """Folders that nothing needs once the release is current: older releases, then environments of no release.

    A server that has not been restarted still uses its own release and environment."""
    ran = facts.release if facts.release in facts.own_releases - {desired.hash} else ""
    kept = {desired.hash, facts.previous if facts.current == desired.hash else ran or facts.current}
    if desired.returns and facts.current:
        kept.add(facts.current)
    if facts.release:  # its service manager starts it again after a crash
        kept.add(service_release(facts))
    if facts.runs:
        kept.add(facts.runs)
    kept |= set(_earlier(desired, facts, kept))
    for hash in sorted(facts.own_releases - kept):
        if HASH.fullmatch(hash):
            yield facts.paths.release(hash)
    used = {release.environment for release in facts.releases if release.host != facts.host or release.hash in kept}
    if facts.others_deploy:  # an environment may be for the other host
        return
    for hash in sorted(facts.environments.keys() - used - {desired.environment.hash}):
        if HASH.fullmatch(hash):
            yield facts.paths.environment(hash)


def _earlier(desired: TargetState, facts: HostFacts, kept: set[str]) -> Sequence[str]:
    """The releases that stay for `disagg rollback --to`, besides those that are `kept` anyway."""
    environments = {desired.environment.hash, *(facts.environment_of(hash) for hash in kept)}
    possible = [hash for hash in facts.intact_releases - kept if facts.environment_of(hash) in environments]
    possible.sort(key=lambda hash: (facts.sent.get(hash, 0), hash), reverse=True)
    return possible[: max(0, EARLIER_RELEASES - len(kept - {desired.hash}))]


# What the service needs afterwards


def _down(facts: HostFacts) -> str:
    """Why the server does not run, if it should: it has run, and the last command was not to stop it."""
    if not facts.release or facts.runs or facts.last_command not in ("start", "restart", "rollout"):
        return ""
    ended = f": `disagg {facts.last_command}` has not ended there" if facts.cut_off else ""
    return f"its server does not run, and nobody has stopped it{ended}"


def restarts_at_once(facts: HostFacts, release: str) -> bool:
    """Whether what runs is from before TLS, and this release is not."""
    return facts.runs in facts.before_tls and release not in facts.before_tls


def _needs(desired: TargetState, facts: HostFacts) -> ServiceAction:
    outdated = desired.hash in facts.damaged or not _shared(desired, facts)
    if facts.pid is not None and outdated:
        return "restart"
    return needed_after(facts, desired.hash)


def _shared(desired: TargetState, facts: HostFacts) -> bool:
    """Whether the host has no token yet, or one of this machine's."""
    return not facts.token_digests or not set(facts.token_digests).isdisjoint(map(token_digest, desired.tokens))


def needed_after(facts: HostFacts, release: str) -> ServiceAction:
    """What makes the server run this release once it is current."""
    if facts.pid is None:
        return "start"
    return "" if facts.runs == release else "restart"


# The links to releases, see `changes.links`


def service_release(facts: HostFacts) -> str:
    """The release that a host's service manager must start after a crash or a reboot, until the next `disagg start`.

    That is what runs. If nothing does, it is what `running` points at; without one, the release that ran last, or else
    the deployed one. Earlier versions of disagg have no such link, and do not move one that is there.
    """
    alive = facts.pid is not None
    candidates = (facts.release, facts.service) if alive else (facts.service, facts.release)
    return next((one for one in (*candidates, facts.current) if one in facts.own_releases), "")


def service_moves(facts: HostFacts) -> tuple[Move, ...]:
    """The move of `running` that a host needs, whatever else changes there. Not to files that have changed, which may
    lack what starts them."""
    wanted = service_release(facts)
    return (("running", wanted),) if wanted in facts.intact_releases - {facts.service} else ()


def switch_moves(facts: HostFacts, release: str) -> tuple[Move, ...]:
    """The moves that make a release current. A host on which none ever ran starts with it."""
    moves: list[Move] = []
    if not facts.release and facts.service != release:
        moves.append(("running", release))
    if facts.current != release:
        last = facts.release if facts.release in facts.own_releases - {release} else facts.current
        if last in facts.intact_releases:
            moves.append(("previous", last))
        moves.append(("current", release))
    return tuple(moves)
