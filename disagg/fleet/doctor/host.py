"""Findings about one host, from its readings. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

from disagg.config import Model
from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.doctor.hardware import disk, gpu, memory, wired_limit
from disagg.fleet.facts.findings import Finding, fault, note, ok, warning
from disagg.fleet.facts.python import deployed_python
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.token import token_digest
from disagg.units import size

OLDEST_PYTHON: Final = (3, 11)
_LINUX_NO_ROUTE: Final = errno.EHOSTUNREACH
_MAC_NO_ROUTE: Final = 65


def findings(
    readings: HostReadings, model: Model | None, status: HostStatus | None, token: str | None
) -> list[Finding]:
    """The findings about a host that answers.

    model: None for a gateway. status: of its server over HTTP, None if not polled.
    """
    placement = readings.host.placement
    account = f"{readings.latency * 1e3:.0f} ms as {readings.facts.user}"
    return [
        ok("ssh", account if placement.ssh else "this machine"),
        *(_python(readings) if placement.deployed else ()),
        *disk(readings),
        *memory(readings, model),
        *gpu(readings, model),
        *wired_limit(readings, model),
        *(_model(readings, model) if model is not None and not readings.host.simulated else ()),
        *(_service(readings) if placement.deployed else ()),
        *(_token(readings, token) if placement.deployed else ()),
        *_server(readings, status),
        *_local_network(readings),
        *_thunderbolt(readings),
        *(fault("probe", error.message, error.hint) for error in readings.errors),
    ]


def _python(readings: HostReadings) -> Iterator[Finding]:
    facts, host = readings.facts, readings.host
    if deployed := deployed_python(facts):
        yield ok("python", f"env {deployed.split('/')[-3][:8]}")
        return
    install = "brew install python@3.12" if facts.os == "Darwin" else "sudo apt install python3 python3-venv"
    there = f'disagg ssh {host.name} -- "{install}"'
    if facts.no_python:
        yield fault("python", f"{facts.no_python} of hosts.toml does not run", f"correct python in [hosts.{host.name}]")
        return
    new = [python for python in facts.pythons if python.version[:2] >= OLDEST_PYTHON]
    if facts.uv:
        yield ok("python", "by uv")
    elif not facts.pythons:
        yield fault("python", "there is no Python", there)
    elif not new:
        best = max(facts.pythons, key=lambda python: python.version)
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield fault("python", f"{best.path} is {_dotted(best.version)}, older than {wanted}", there)
    elif not any(python.makes_venvs for python in new):
        version = _dotted(new[0].version[:2])
        venv = f'disagg ssh {host.name} -- "sudo apt install python{version}-venv"'
        yield fault("python", f"{new[0].path} has no venv module", venv)
    else:
        yield ok("python", _dotted(next(python for python in new if python.makes_venvs).version))


def _model(readings: HostReadings, model: Model) -> Iterator[Finding]:
    held, wanted = readings.model, readings.required
    if held is None or wanted is None:
        return
    pull = f"disagg models pull '{model.name}' --host {readings.host.name}"
    if held.complete:
        revision = f" {held.revision[:8]}" if held.revision else ""
        yield ok("model", f"{size(held.bytes)}{revision}")
    elif wanted.carried:
        yield warning("model", f"{model.name} is not there yet", f"disagg deploy --host {readings.host.name}")
    elif held.state == "partial":
        yield fault("model", f"{wanted.source} is partial: {held.missing or f'{size(held.bytes)} of it'}", pull)
    else:
        yield fault("model", f"{wanted.source} is not there", pull)


def _service(readings: HostReadings) -> Iterator[Finding]:
    facts, host = readings.facts, readings.host
    otherwise = f'service = "process" in [hosts.{host.name}]'
    if host.service == "systemd":
        if facts.systemd is None:
            yield fault("service", "systemd does not run there", otherwise)
        elif not facts.systemd.linger:
            linger = f"disagg ssh {host.name} -- sudo loginctl enable-linger {facts.user}"
            yield warning("service", f"{facts.user} does not linger: its services end when nobody is logged in", linger)
        elif not facts.systemd.usable:
            start = f"disagg ssh {host.name} -- sudo systemctl start user@{facts.uid}.service"
            yield fault("service", f"the systemd of {facts.user} does not answer", start)
        else:
            yield ok("service", "systemd, lingers")
    elif host.service == "launchd":
        if not facts.launchd:
            yield fault("service", "there is no launchd", otherwise)
        elif not facts.sudo:
            sudo = f"disagg ssh {host.name}; there: sudo visudo -f /etc/sudoers.d/disagg"
            yield warning("service", "a launchd daemon belongs to root, and sudo asks for a password", sudo)
        else:
            yield ok("service", "launchd")
    else:
        yield ok("service", "a plain process, gone after a reboot")


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
    if host.placement.deployed and not facts.current:
        yield warning("disagg", "nothing is deployed", f"disagg deploy --host {host.name}")
        return
    serving = facts.serving
    if serving is not None and serving.alive and serving.release != facts.current:
        yield warning(
            "disagg",
            f"release {serving.release[:8]} still runs, and {facts.current[:8]} is deployed",
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


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
