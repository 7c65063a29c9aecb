"""A machine's memory, GPUs and clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from disagg import nvidia
from disagg.fleet.facts.probe import ProbeOutput, kib, number
from disagg.fleet.machine.base import Machine
from disagg.nvidia import GPU

_CLOCK: Final = (
    'if test -n "$1"; then exec "$1" -I -S -c \'import time; print(time.time())\'; fi\n'
    "exec perl -MTime::HiRes=time -e 'printf \"%.6f\\n\", time' 2>/dev/null\n"
)
_CLOCK_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """Sizes in bytes; None if the machine does not report them.

    available: memory that can be allocated. wired_limit: GPU memory limit of macOS in MiB, 0 for its default. rdma:
    state of RDMA over Thunderbolt. smi: path of nvidia-smi. smi_failed: why nvidia-smi failed. devices: NVIDIA devices
    in /dev and on the PCI bus, which exist without a driver too.
    """

    memory: int | None = None
    available: int | None = None
    wired_limit: int | None = None
    rdma: str = ""
    smi: str = ""
    smi_failed: str = ""
    gpus: tuple[GPU, ...] = ()
    devices: tuple[str, ...] = ()


def parse_hardware(probe: ProbeOutput) -> HardwareFacts:
    """The hardware in what the host probe printed."""
    code, reason = probe.first("smi_failed", 2)
    return HardwareFacts(
        memory=kib(probe.text("memory")) or None,
        available=kib(probe.text("available")),
        wired_limit=number(probe.text("wired_limit")),
        rdma=probe.text("rdma"),
        smi=probe.text("smi"),
        smi_failed=(reason.strip() or f"exit code {code}") if code else "",
        gpus=nvidia.parse("\n".join(line for (line,) in probe.all("gpu", 1))),
        devices=tuple(device for (device,) in probe.all("device", 1)),
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a machine's clock is ahead of this one's, in seconds, +- `error`."""

    ahead: float
    error: float


def read_clock(machine: Machine, python: str | None) -> Clock | None:
    """Compare a machine's clock with this one's: it is read in the middle of the round trip, +- half of it.

    The best of a few tries; None if the machine has neither `python` nor perl to read fractions of a second.
    """
    best: Clock | None = None
    for _ in range(_CLOCK_TRIES):
        before, began = time.time(), time.monotonic()
        result = machine.run([python or ""], script=_CLOCK, timeout=15.0)
        took = time.monotonic() - began
        try:
            there = float(result.stdout.strip())
        except ValueError:
            return None
        if best is None or took / 2 < best.error:
            best = Clock(there - (before + took / 2), took / 2)
    return best
