"""Findings about a host's disk, memory and GPU, compared with its model and KV. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from disagg.config import Host, Model
from disagg.fleet.deploy.fit import Fit, fit, notes, refusals, too_few_cards
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.facts.findings import Finding, fault, note, ok, warning
from disagg.nvidia import GPU, OLDEST_DRIVER
from disagg.units import size

_LITTLE_DISK: Final = 10 << 30
_MAC_SHARE: Final = 0.75
"""The approximate share of its memory that a Mac wires for the GPU if iogpu.wired_limit_mb is 0."""


def disk(readings: HostReadings) -> Iterator[Finding]:
    facts = readings.facts
    if not facts.writable:
        mount = f"disagg exec --host {readings.host.name} -- mount"
        yield fault("disk", f"{facts.home} cannot be written to by {facts.user}", mount)
    elif facts.disk_free is not None:
        text = f"{size(facts.disk_free)} free"
        du = f"disagg exec --host {readings.host.name} -- 'du -sh ~/.disagg/* ~/.cache/huggingface'"
        yield warning("disk", f"{text} in {facts.home}", du) if facts.disk_free < _LITTLE_DISK else ok("disk", text)


def memory(readings: HostReadings, model: Model | None) -> Iterator[Finding]:
    """System memory compared with model, KV and workspace. A card with memory of its own is checked in `gpu`."""
    total = readings.facts.hardware.memory
    if total is None:
        yield note("memory", "the amount of memory is unknown")
        return
    found = _fit(readings, model)
    findings = [] if found is None or found.own else [*_fitting("memory", found)]
    yield from findings or [ok("memory", size(total))]


def _fit(readings: HostReadings, model: Model | None) -> Fit | None:
    """None if the model is not there: what is known before that, `disagg deploy --dry-run` compares."""
    held = readings.model
    if model is None or held is None or not held.complete:
        return None
    facts = readings.facts
    return fit(readings.host, model, facts.hardware, facts.os, config=held.config, nbytes=held.bytes)


def _fitting(check: str, found: Fit) -> Iterator[Finding]:
    yield from _faults(check, found.host, refusals(found))
    for text in notes(found):
        cause, _, hint = text.rpartition(": ")
        yield warning(check, cause, hint + _deploy(found.host))


def _faults(check: str, host: Host, refused: Iterable[Refusal]) -> Iterator[Finding]:
    for refusal in refused:
        yield fault(check, refusal.cause, refusal.hint + _deploy(host))


def _deploy(host: Host) -> str:
    return f"; then: disagg deploy --host {host.name}"


def gpu(readings: HostReadings, model: Model | None) -> Iterator[Finding]:
    device, hardware, name = readings.host.engine.device, readings.facts.hardware, readings.host.name
    if readings.facts.os != "Linux" or "cuda" not in readings.host.engine.kind.devices or device == "cpu":
        return
    install = f'disagg ssh {name} -- "sudo apt install nvidia-driver-{OLDEST_DRIVER}-open"; then restart the machine'
    if not hardware.smi:
        if hardware.devices or device.startswith("cuda"):
            what = (
                "there is an NVIDIA card and no"
                if hardware.devices
                else f'engine.device is "{device}", and there is no'
            )
            yield fault("gpu", f"{what} driver: nvidia-smi is missing", install)
        else:
            yield note("gpu", "no NVIDIA card: prefill runs on the CPU")
        return
    if hardware.smi_failed or not hardware.gpus:
        reload = "restart the machine; if it stays: " + install.partition(";")[0]
        yield fault("gpu", f"nvidia-smi: {hardware.smi_failed or 'finds no card'}", reload)
        return
    found = _fit(readings, model)
    findings = [finding for card in hardware.gpus for finding in _card(readings, card, install)]
    findings += _faults("gpu", readings.host, too_few_cards(readings.host, hardware, readings.facts.os))
    findings += _fitting("gpu", found) if found is not None and found.own else ()
    yield from findings
    if not findings:
        shared = "" if hardware.gpus[0].memory is not None else ", shared memory"
        yield ok("gpu", f"{hardware.gpus[0].name}, driver {hardware.gpus[0].driver}{shared}")


def _card(readings: HostReadings, card: GPU, install: str) -> Iterator[Finding]:
    driver = int(found[0]) if (found := re.match(r"\d+", card.driver)) else None
    if driver is not None and driver < OLDEST_DRIVER:
        yield fault(
            "gpu",
            f"driver {card.driver} of {card.name} is older than {OLDEST_DRIVER}, which CUDA 13 needs",
            install,
        )
    if card.ecc_errors:
        yield fault(
            "gpu",
            f"{card.name}: {card.ecc_errors} uncorrected memory errors since it started",
            f"disagg ssh {readings.host.name} -- nvidia-smi -q -d ECC,ROW_REMAPPER; restart, replace it if they return",
        )


def wired_limit(readings: HostReadings, model: Model | None) -> Iterator[Finding]:
    """The part of a Mac's memory that its GPU may wire, compared with model and KV."""
    limit, host, facts = readings.facts.hardware.wired_limit, readings.host, readings.facts
    if facts.os != "Darwin" or host.engine.device == "cpu" or limit is None:
        return
    own = host.wired_limit_mb
    if own is not None and own != limit:
        again = f"disagg ssh {host.name} -- sudo launchctl kickstart -k system/disagg.{host.name}.wired-limit"
        yield warning("wired limit", f"iogpu.wired_limit_mb is {limit}, not the {own} of hosts.toml", again)
        return
    memory = facts.hardware.memory or 0
    room = limit << 20 if limit else int(memory * _MAC_SHARE)
    text = f"{size(room)}" + ("" if limit else " (macOS' own)")
    found = _fit(readings, model)
    needed = 0 if found is None else found.need.total
    fitting = (needed + (4 << 30)) >> 20
    # A limit that makes it fit may not exist: `memory` reports that.
    if needed <= room or not room or fitting << 20 > memory * 0.95:
        yield ok("wired limit", text)
        return
    yield warning(
        "wired limit",
        f"the GPU may wire {text}, and {host.model} with max_kv_bytes takes {size(needed)}",
        f"wired_limit_mb = {fitting} in [hosts.{host.name}], then: disagg deploy --host {host.name}; until the next "
        f"restart: disagg ssh {host.name} -- sudo sysctl iogpu.wired_limit_mb={fitting}",
    )
