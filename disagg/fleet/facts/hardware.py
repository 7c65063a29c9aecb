"""How a machine fares, beyond the facts of a deployment."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from disagg.errors import FleetError
from disagg.fleet.machine.base import Machine

SCRIPT: Final = Path(__file__).with_name("hardware.sh")
_CLOCK: Final = (
    'if test -n "$1"; then exec "$1" -I -S -c \'import time; print(time.time())\'; fi\n'
    "exec perl -MTime::HiRes=time -e 'printf \"%.6f\\n\", time' 2>/dev/null\n"
)
_CLOCK_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class GPU:
    """A card as nvidia-smi tells; None where it says [N/A], as GB10 does of its memory. Bytes, degrees Celsius."""

    name: str
    driver: str
    memory: int | None = None
    free: int | None = None
    ecc_errors: int | None = None
    temperature: int | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a machine's clock is ahead of this one's, in seconds, and how sure that is: within +- `error`."""

    ahead: float
    error: float


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """available: memory that could be had, bytes. wired_limit: MiB as macOS has it, 0 for its own rule. smi: where
    nvidia-smi is. smi_failed: its words. devices: signs of an NVIDIA card. errno_65: lines of the server's log."""

    available: int | None = None
    wired_limit: int | None = None
    rdma: str = ""
    smi: str = ""
    smi_failed: str = ""
    gpus: tuple[GPU, ...] = ()
    devices: tuple[str, ...] = ()
    version: str = ""
    errno_65: int = 0
    clock: Clock | None = None


def read_hardware_facts(machine: Machine, python: str | None) -> HardwareFacts:
    """Read them on a machine. HostUnreachable where it does not answer, FleetError where the script fails."""
    result = machine.run([machine.name], script=SCRIPT.read_text(encoding="utf-8"), timeout=30.0)
    return replace(parse(machine.name, result.stdout), clock=clock(machine, python))


def parse(host: str, text: str) -> HardwareFacts:
    """What the script printed. FleetError if it did not reach its end."""
    lines = [line.split("\t") for line in text.splitlines()]
    if ["end"] not in lines:
        raise FleetError(f"{host}: how it fares cannot be read: the script ended early", f"disagg ssh {host}")
    said = {line[0]: line[1] for line in lines if len(line) > 1}
    failed = next((line for line in lines if line[0] == "smi_failed"), None)
    available = _int(said.get("available", ""))
    return HardwareFacts(
        available=available << 10 if available is not None else None,
        wired_limit=_int(said.get("wired_limit", "")),
        rdma=said.get("rdma", ""),
        smi=said.get("smi", ""),
        smi_failed=(failed[2].strip() or f"exit code {failed[1]}") if failed else "",
        gpus=tuple(_gpu(line[1]) for line in lines if line[0] == "gpu" and len(line) > 1),
        devices=tuple(line[1] for line in lines if line[0] == "device" and len(line) > 1),
        version=said.get("version", ""),
        errno_65=_int(said.get("errno_65", "")) or 0,
    )


def clock(machine: Machine, python: str | None) -> Clock | None:
    """The machine's clock against this one's: it was read in the middle of the round trip, give or take half of it.
    The best of a few tries; None where the machine has nothing that reads fractions of a second."""
    best: Clock | None = None
    for _ in range(_CLOCK_TRIES):
        before, began = time.time(), time.monotonic()
        result = machine.run([python or ""], script=_CLOCK, timeout=15.0)
        took = time.monotonic() - began
        try:
            read = float(result.stdout.strip())
        except ValueError:
            return None
        if best is None or took / 2 < best.error:
            best = Clock(read - (before + took / 2), took / 2)
    return best


def _gpu(line: str) -> GPU:
    fields = [*(field.strip() for field in line.split(",")), *[""] * 6]
    memory, free, ecc, degrees = (_int(field) for field in fields[2:6])
    return GPU(fields[0], fields[1], _mib(memory), _mib(free), ecc, degrees)


def _mib(number: int | None) -> int | None:
    return None if number is None else number << 20


def _int(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
