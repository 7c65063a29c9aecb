"""nvidia-smi: the fields that disagg queries, and what it prints for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ARGUMENTS: Final = (
    "--query-gpu=name,driver_version,memory.total,memory.free,"
    "ecc.errors.uncorrected.volatile.total,temperature.gpu,utilization.gpu",
    "--format=csv,noheader,nounits",
)
OLDEST_DRIVER: Final = 580
"""PyTorch's packages on PyPI are built for CUDA 13, whose first driver this is."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One card. Bytes, degrees Celsius, utilisation 0 to 1; None for [N/A], which GB10 prints for its memory."""

    name: str
    driver: str
    memory: int | None = None
    free: int | None = None
    ecc_errors: int | None = None
    temperature: int | None = None
    utilisation: float | None = None


def parse(text: str) -> tuple[GPU, ...]:
    """The cards in what `nvidia-smi *ARGUMENTS` printed, one line each. Other lines are ignored."""
    return tuple(_gpu(fields) for line in text.splitlines() if len(fields := line.split(",")) >= 7)


def _gpu(fields: list[str]) -> GPU:
    name, driver, *figures = (field.strip() for field in fields[:7])
    memory, free, ecc_errors, temperature, percent = map(_number, figures)
    share = None if percent is None else percent / 100
    return GPU(name, driver, _mib(memory), _mib(free), ecc_errors, temperature, share)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _mib(number: int | None) -> int | None:
    return None if number is None else number << 20
