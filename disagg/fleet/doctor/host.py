"""Findings about one host, from its readings: conditions that it does not meet, and what is as it should be. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Final

from disagg.config import Fleet
from disagg.fleet.conditions import table
from disagg.fleet.conditions.table import RELEASE_BYTES, Subject, dotted, environment_bytes, uses_cuda
from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.facts.findings import Finding, fault, note, ok, warning
from disagg.fleet.facts.python import deployed_python
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.token import token_digest
from disagg.units import size

_LITTLE_DISK: Final = 10 << 30
_MAC_SHARE: Final = 0.75
"""The approximate share of its memory that a Mac wires for the GPU if iogpu.wired_limit_mb is 0."""
_LINUX_NO_ROUTE: Final = errno.EHOSTUNREACH
_MAC_NO_ROUTE: Final = 65


def findings(fleet: Fleet, readings: HostReadings, status: HostStatus | None, token: str | None) -> list[Finding]:
    """The findings about a host that answers. status: of its server over HTTP, None if not polled."""
    host, placement = readings.host, readings.host.server_kind
    subject = _subject(fleet, readings)
    unmet = [_then_deploy(readings, one) for one in table.unmet(subject)]
    account = f"{readings.latency * 1e3:.0f} ms as {readings.facts.user}"

    def about(*checks: str) -> list[Finding]:
        return [one for one in unmet if one.check in checks]

    return [
        ok("ssh", account if placement.ssh else "this machine"),
        *about("system", "engine", "nodes"),
        *((about("python") or [_python(readings)]) if placement.deployed else ()),
        *(about("disk") or _disk(readings)),
        *(about("memory") or [_memory(readings)]),
        *_gpu(readings, about("gpu")),
        *_wired_limit(subject),
        *(one for name in host.all_models if not host.simulated for one in _model(readings, name)),
        *about("verdict"),
        *((about("service") or [_service(readings)]) if placement.deployed else ()),
        *(_token(readings, token) if placement.deployed else ()),
        *_server(readings, status),
        *_local_network(readings),
        *_thunderbolt(readings),
        *(fault("probe", error.message, error.hint) for error in readings.errors),
    ]


def _subject(fleet: Fleet, readings: HostReadings) -> Subject:
    """A model that is complete there is judged by its files. The first deployment needs room for an environment."""
    host, facts, stored = readings.host, readings.facts, readings.stored
    extras = host.engine.kind.extras_for(host.roles)
    first = host.server_kind.deployed and not facts.current and not any(facts.environments.values())
    disk = RELEASE_BYTES + environment_bytes(extras, host.site_packages) if first else 0
    files = {name: (one.config, one.bytes) for name, one in stored.items() if one.complete}
    return Subject(fleet, host, facts, files, disk)


def _then_deploy(readings: HostReadings, found: Finding) -> Finding:
    if not found.hint:
        return found
    again = f"; then: disagg deploy --host {readings.host.name}" if readings.host.server_kind.deployed else ""
    return Finding(found.check, found.level, found.text, found.hint + again)


def _python(readings: HostReadings) -> Finding:
    facts = readings.facts
    if deployed := deployed_python(facts):
        return ok("python", f"env {deployed.split('/')[-3][:8]}")
    if facts.uv:
        return ok("python", "by uv")
    return ok("python", dotted(next(python for python in facts.pythons if python.makes_venvs).version))


def _disk(readings: HostReadings) -> Iterator[Finding]:
    facts = readings.facts
    if facts.disk_free is not None:
        text = f"{size(facts.disk_free)} free"
        du = f"disagg exec --host {readings.host.name} -- 'du -sh ~/.disagg/* ~/.cache/huggingface'"
        yield warning("disk", f"{text} in {facts.home}", du) if facts.disk_free < _LITTLE_DISK else ok("disk", text)


def _memory(readings: HostReadings) -> Finding:
    total = readings.facts.hardware.memory
    return note("memory", "the amount of memory is unknown") if total is None else ok("memory", size(total))


def _gpu(readings: HostReadings, unmet: Sequence[Finding]) -> Iterator[Finding]:
    hardware, host = readings.facts.hardware, readings.host
    broken = [card for card in hardware.gpus if card.ecc_errors]
    yield from unmet
    if not uses_cuda(host, readings.facts):
        return
    for card in broken:
        text = f"{card.name}: {card.ecc_errors} uncorrected memory errors since it started"
        look = f"disagg ssh {host.name} -- nvidia-smi -q -d ECC,ROW_REMAPPER; restart, replace it if they return"
        yield fault("gpu", text, look)
    if not unmet and not broken:
        if not hardware.gpus:
            yield note("gpu", "no NVIDIA card: prefill runs on the CPU")
            return
        shared = "" if hardware.gpus[0].memory is not None else ", shared memory"
        yield ok("gpu", f"{hardware.gpus[0].name}, driver {hardware.gpus[0].driver}{shared}")


def _wired_limit(subject: Subject) -> Iterator[Finding]:
    """The part of a Mac's memory that its GPU may wire, compared with model and KV."""
    limit, host, facts = subject.facts.hardware.wired_limit, subject.host, subject.facts
    if facts.os != "Darwin" or host.engine.device == "cpu" or limit is None:
        return
    own = host.wired_limit_mb
    if own is not None and own != limit:
        again = f"disagg ssh {host.name} -- sudo launchctl kickstart -k system/disagg.{host.name}.wired-limit"
        yield warning("wired limit", f"iogpu.wired_limit_mb is {limit}, not the {own} of hosts.toml", again)
        return
    total = facts.hardware.memory or 0
    room = limit << 20 if limit else int(total * _MAC_SHARE)
    text = f"{size(room)}" + ("" if limit else " (macOS' own)")
    found = max(table.fits(subject) if subject.files else [], key=lambda one: one.need.total, default=None)
    needed = 0 if found is None else found.need.total
    fitting = (needed + (4 << 30)) >> 20
    # A limit that makes it fit may not exist: `memory` reports that.
    if needed <= room or not room or fitting << 20 > total * 0.95:
        yield ok("wired limit", text)
        return
    yield warning(
        "wired limit",
        f"the GPU may wire {text}, and {found.host.model if found else ''} with max_kv_bytes takes {size(needed)}",
        f"wired_limit_mb = {fitting} in [hosts.{host.name}], then: disagg deploy --host {host.name}; until the next "
        f"restart: disagg ssh {host.name} -- sudo sysctl iogpu.wired_limit_mb={fitting}",
    )


def _model(readings: HostReadings, model: str) -> Iterator[Finding]:
    stored, wanted = readings.stored.get(model), readings.required.get(model)
    if stored is None or wanted is None:
        return
    pull = f"disagg models pull '{model}' --host {readings.host.name}"
    if stored.complete:
        revision = f" {stored.revision[:8]}" if stored.revision else ""
        name = f"{model} " if readings.host.keeps else ""
        yield ok("model", f"{name}{size(stored.bytes)}{revision}")
    elif wanted.carried:
        yield warning("model", f"{model} is not there yet", f"disagg deploy --host {readings.host.name}")
    elif stored.state == "partial":
        yield fault("model", f"{wanted.source} is partial: {stored.missing or f'{size(stored.bytes)} of it'}", pull)
    else:
        yield fault("model", f"{wanted.source} is not there", pull)


def _service(readings: HostReadings) -> Finding:
    facts, host = readings.facts, readings.host
    if host.service == "systemd":
        if facts.systemd is None or facts.systemd.linger:
            return ok("service", "systemd, lingers")
        linger = f"disagg ssh {host.name} -- sudo loginctl enable-linger {facts.user}"
        return warning("service", f"{facts.user} does not linger: its services end when nobody is logged in", linger)
    if host.service == "launchd":
        if facts.sudo:
            return ok("service", "launchd")
        sudo = f"disagg ssh {host.name}; there: sudo visudo -f /etc/sudoers.d/disagg"
        return warning("service", "a launchd daemon belongs to root, and sudo asks for a password", sudo)
    return ok("service", "a plain process, gone after a reboot")


def _token(readings: HostReadings, token: str | None) -> Iterator[Finding]:
    facts, deploy = readings.facts, f"disagg deploy --host {readings.host.name}"
    if not facts.current or token is None:
        return
    if not facts.token_digests:
        yield fault("token", "the fleet's token is not there", deploy)
    elif facts.token_mode != "-rw-------":
        path = facts.paths.token
        yield fault(
            "token",
            f"others can read {path} ({facts.token_mode})",
            f"disagg exec --host {readings.host.name} -- chmod 600 {path}",
        )
    elif token_digest(token) not in facts.token_digests:
        yield fault(
            "token",
            "its token differs from the one on this machine",
            f"{deploy} --adopt-token, or --replace-token and disagg restart --host {readings.host.name}",
        )
    else:
        yield ok("token", "0600")


def _server(readings: HostReadings, status: HostStatus | None) -> Iterator[Finding]:
    facts, host = readings.facts, readings.host
    if host.server_kind.deployed and not facts.current:
        yield warning("disagg", "nothing is deployed", f"disagg deploy --host {host.name}")
        return
    if facts.pid is not None and facts.release != facts.current:
        yield warning(
            "disagg",
            f"release {facts.release[:8]} still runs, and {facts.current[:8]} is deployed",
            f"disagg restart --host {host.name}",
        )
    if status is None:
        return
    if status.ok:
        yield ok("server", f"{status.version} healthy")
    elif status.state == "not running":
        taken = host.kv_port if host.kv_port in facts.listening else None
        if taken is not None:
            who = f"disagg ssh {host.name} -- " + (
                "sudo lsof -iTCP -sTCP:LISTEN -P" if facts.os == "Darwin" else "sudo ss -ltnp"
            )
            yield fault("server", f"it does not run, and another program uses its kv_port {taken}", who)
        else:
            yield fault("server", "it does not run", f"disagg start --host {host.name}")
    elif status.state in ("loading", "draining"):
        yield note("server", status.why, "disagg status --watch")
    else:
        yield fault("server", status.why, status.hint)


def _local_network(readings: HostReadings) -> Iterator[Finding]:
    """macOS may deny a program the local network: connecting then fails with errno 65. Daemons and SSH are exempt."""
    if readings.facts.os != "Darwin":
        return
    refused = [place for place, number in readings.reach.items() if number in (_MAC_NO_ROUTE, _LINUX_NO_ROUTE)]
    if readings.facts.errno_65 and not refused:
        yield fault(
            "local network",
            f"the server's log has errno 65 (no route to host) {readings.facts.errno_65} times, though the same "
            "addresses answer over SSH: macOS' Local Network Privacy denies the server these connections",
            _daemon(readings),
        )
    elif refused:
        address = refused[0].partition(" ")[0]
        yield fault(
            "local network",
            f"no route from here to {address} (errno 65)",
            f"disagg exec --host {readings.host.name} -- ping -c 3 {address}",
        )
    elif readings.host.service == "launchd" and f"launchd:{readings.host.name}" in readings.facts.installed:
        yield ok("local network", "open")
    elif readings.reach:
        yield ok("local network", "open over SSH")


def _daemon(readings: HostReadings) -> str:
    name = readings.host.name
    if readings.host.service == "launchd":
        again = f"disagg deploy --host {name} && disagg restart --host {name}"
        return f"{again}; else there: System Settings > Privacy & Security > Local Network"
    return f'service = "launchd" in [hosts.{name}], whose daemons are exempt; then: disagg deploy --host {name}'


def _thunderbolt(readings: HostReadings) -> Iterator[Finding]:
    """RDMA over Thunderbolt 5 connects only Macs: it is reported and not used."""
    if readings.facts.os != "Darwin" or not readings.facts.hardware.rdma:
        return
    yield ok("thunderbolt", f"RDMA {readings.facts.hardware.rdma}")
