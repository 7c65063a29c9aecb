"""Findings about a host's disk, memory and GPU, compared with its model and KV. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.facts.findings import Finding, fault, note, ok, warning
from disagg.nvidia import GPU

OLDEST_DRIVER: Final = 580
"""PyTorch's packages on PyPI are built for CUDA 13, whose first driver this is."""
_LITTLE_DISK: Final = 10 << 30
_MAC_SHARE: Final = 0.75
"""The approximate share of its memory that a Mac wires for the GPU if iogpu.wired_limit_mb is 0."""
_QUANTIZED: Final = {"int8": 0.5, "int4": 0.25}
"""Share of a 16-bit checkpoint's size, if it is quantized while loading."""


def disk(readings: HostReadings) -> Iterator[Finding]:
    facts = readings.facts
    if not facts.writable:
        mount = f"disagg exec --host {readings.host.name} -- mount"
        yield fault("disk", f"{facts.home} cannot be written to by {facts.user}", mount)
    elif facts.disk_free is not None:
        text = f"{size(facts.disk_free)} free"
        du = f"disagg exec --host {readings.host.name} -- 'du -sh ~/.disagg/* ~/.cache/huggingface'"
        yield warning("disk", f"{text} in {facts.home}", du) if facts.disk_free < _LITTLE_DISK else ok("disk", text)


def memory(readings: HostReadings) -> Iterator[Finding]:
    """System memory compared with model and KV. A card with memory of its own is checked in `gpu`."""
    total = readings.facts.hardware.memory
    if total is None:
        yield note("memory", "the amount of memory is unknown")
        return
    separate = any(gpu.memory for gpu in readings.facts.hardware.gpus) and readings.host.engine.device.startswith(
        ("cuda", "auto")
    )
    needed = None if separate else _needed(readings)
    if needed is None or needed <= total:
        yield ok("memory", size(total))
        return
    yield _too_large("memory", readings, f"the machine has {size(total)}", total)


def _needed(readings: HostReadings) -> int | None:
    """Bytes that the model and its KV take; None if the model is not there."""
    weights = _weights(readings)
    if weights is None:
        return None
    return weights + (readings.host.engine.max_kv_bytes if "decode" in readings.host.roles else 0)


def _weights(readings: HostReadings) -> int | None:
    if readings.model is None or not readings.model.complete:
        return None
    return int(readings.model.bytes * _QUANTIZED.get(readings.host.engine.quantization or "", 1.0))


def _too_large(check: str, readings: HostReadings, limit: str, room: int) -> Finding:
    weights, host = _weights(readings) or 0, readings.host
    if weights > room:
        return fault(
            check, f"{host.model} takes {size(weights)}, and {limit}", "serve a smaller or quantized model there"
        )
    kv = host.engine.max_kv_bytes
    room_for_kv = max(1 << 30, (room - weights) * 9 // 10 >> 30 << 30)
    return warning(
        check,
        f"{host.model} takes {size(weights)} and max_kv_bytes is {size(kv)}, but {limit}",
        f"max_kv_bytes = {room_for_kv} in [hosts.{host.name}.engine]; then: disagg deploy --host {host.name}",
    )


def gpu(readings: HostReadings) -> Iterator[Finding]:
    device, hardware, name = readings.host.engine.device, readings.facts.hardware, readings.host.name
    if readings.facts.os != "Linux" or readings.host.engine.name != "transformers" or device == "cpu":
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
    healthy = True
    for card in hardware.gpus:
        for finding in _card(readings, card, install):
            healthy = False
            yield finding
    if healthy:
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
    if card.memory is not None and (_weights(readings) or 0) > card.memory:
        yield _too_large("gpu", readings, f"{card.name} has {size(card.memory)}", card.memory)


def wired_limit(readings: HostReadings) -> Iterator[Finding]:
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
    needed = _needed(readings)
    if needed is None or needed <= room or not room:
        yield ok("wired limit", text)
        return
    fitting = (needed + (4 << 30)) >> 20
    if fitting << 20 > memory * 0.95:
        yield _too_large("wired limit", readings, f"the GPU may wire {text} of {size(memory)}", int(memory * 0.95))
        return
    yield warning(
        "wired limit",
        f"the GPU may wire {text}, and {host.model} with max_kv_bytes takes {size(needed)}",
        f"wired_limit_mb = {fitting} in [hosts.{host.name}], then: disagg deploy --host {host.name}; until the next "
        f"restart: disagg ssh {host.name} -- sudo sysctl iogpu.wired_limit_mb={fitting}",
    )


def size(count: int) -> str:
    """Bytes: 512 MiB, 75.7 GiB, 1.8 TiB."""
    if count >= 1 << 40:
        return f"{count / (1 << 40):.1f} TiB"
    return f"{count / (1 << 30):.3g} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
