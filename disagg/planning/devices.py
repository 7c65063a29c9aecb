"""The roofline of machines: peaks as their makers publish them, and the fraction that a model reaches. The figures are
in devices.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomli

from disagg.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One machine. tflops: peak dense TFLOP/s by dtype, accumulating in float32. bandwidth_gb_s, memory_gb: 1e9 bytes.
    basis: the source of each figure.

    prefill_fraction: of the peak, reached by attention and dense layers over a long chunk. expert_fraction: the same
    for a mixture's experts, whose matrices each see few tokens. bandwidth_fraction: of the bandwidth, while decoding.
    layer_overhead_s: added per layer and pass. expert_overhead_s: the same per mixture layer, at decode.
    """

    name: str
    title: str
    tflops: Mapping[str, float]
    bandwidth_gb_s: float
    memory_gb: float
    prefill_fraction: float
    expert_fraction: float
    bandwidth_fraction: float
    basis: str
    layer_overhead_s: float = 20e-6
    expert_overhead_s: float = 0.0

    def flops(self, dtype: str) -> float:
        """FLOP/s that dense layers reach in prefill."""
        return self.tflops[dtype] * 1e12 * self.prefill_fraction

    def expert_flops(self, dtype: str) -> float:
        """FLOP/s that a mixture's experts reach in prefill."""
        return self.tflops[dtype] * 1e12 * self.expert_fraction

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that decoding reaches."""
        return self.bandwidth_gb_s * 1e9 * self.bandwidth_fraction


def device(name: str) -> Device:
    """The machine of this name. Raises UsageError, which lists the known ones."""
    if name in DEVICES:
        return DEVICES[name]
    raise UsageError(f"unknown device {name!r}", f"known: {', '.join(DEVICES)}")


def _read(text: str) -> dict[str, Device]:
    """The machines of a file, each with what its maker's have in common; the basis of that follows its own."""
    tables = tomli.loads(text)
    devices = {}
    for name, own in tables["devices"].items():
        common = tables["makers"].get(own.pop("maker", ""), {})
        basis = "; ".join(part for part in (own["basis"], common.get("basis")) if part)
        devices[name] = Device(name, **{**common, **own, "basis": basis})
    return devices


DEVICES: Final[Mapping[str, Device]] = _read(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
