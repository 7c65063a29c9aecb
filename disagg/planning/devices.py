"""The roofline of machines: peaks as their makers publish them, and the fraction that a model reaches.

`basis` states the source of each figure. Fractions marked "fitted" reproduce a published measurement; those marked
"assumed" were not measured and depend on software.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from disagg.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One machine. tflops: peak dense TFLOP/s by dtype, accumulating in float32. bandwidth_gb_s, memory_gb: 1e9 bytes.

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


_EXO = "fitted to exo's Llama-3.1-8B FP16 table (8192-token prompt, 32 tokens generated)"
_GB10_EXPERTS = "experts fitted to llama.cpp's benches/dgx-spark.md (Qwen3-Coder-30B Q8_0, gpt-oss MXFP4, 2048 tokens)"
_MLX_EXPERTS = "experts fitted to mlx-lm pull request 406 (M4 Max, Qwen3-30B-A3B and gpt-oss-20b, 2048 tokens)"
_MLX_STEP = (
    "0.1 ms per mixture layer and decode step: between 0.08 (Qwen3.5-35B-A3B 4-bit, 133 tok/s, M5 Max) and 0.2 "
    "(8-bit, 71.8 tok/s, M2 Ultra), as published"
)
_AS_M3 = "Fractions assumed to be the M3 Ultra's"
_NVIDIA_ASSUMED = "fractions assumed, not measured"


def _apple(name: str, title: str, *, tflops: float, bandwidth: float, memory: float, basis: str) -> Device:
    """An Apple GPU, on which float16 and float32 run at the same speed."""
    return Device(
        name,
        title,
        tflops=dict.fromkeys(("float32", "float16", "bfloat16"), tflops),
        bandwidth_gb_s=bandwidth,
        memory_gb=memory,
        prefill_fraction=_M3_PREFILL,
        expert_fraction=0.50,
        bandwidth_fraction=_M3_BANDWIDTH,
        basis=f"{basis}; {_MLX_EXPERTS}; {_MLX_STEP}",
        expert_overhead_s=100e-6,
    )


def _nvidia(
    name: str, title: str, *, half: float, single: float, bandwidth: float, memory: float, basis: str
) -> Device:
    return Device(
        name,
        title,
        tflops={"float32": single, "float16": half, "bfloat16": half},
        bandwidth_gb_s=bandwidth,
        memory_gb=memory,
        prefill_fraction=0.55,
        expert_fraction=0.15,
        bandwidth_fraction=0.75,
        basis=f"{basis}; {_NVIDIA_ASSUMED}",
    )


_M3_PREFILL: Final = 0.836
_M3_BANDWIDTH: Final = 0.757

DEVICES: Final[Mapping[str, Device]] = {
    entry.name: entry
    for entry in (
        Device(
            "dgx-spark",
            "DGX Spark (GB10)",
            tflops={"float32": 31.0, "float16": 125.0, "bfloat16": 125.0},
            bandwidth_gb_s=273.0,
            memory_gb=128.0,
            prefill_fraction=0.721,
            expert_fraction=0.12,
            bandwidth_fraction=0.661,
            basis="NVIDIA: 1 PFLOP sparse FP4, hence 500 dense and a quarter of that in 16 bits; 31 TFLOP/s FP32; "
            f"273 GB/s, 128 GB. Fractions {_EXO}; {_GB10_EXPERTS}",
        ),
        _apple(
            "m3-ultra",
            "Mac Studio M3 Ultra (80-core GPU)",
            tflops=28.4,
            bandwidth=819.0,
            memory=512.0,
            basis=f"Apple: 819 GB/s, up to 512 GB; 80 cores x 128 lanes x 2 x 1.39 GHz. Fractions {_EXO}",
        ),
        _apple(
            "m4-max",
            "M4 Max (40-core GPU)",
            tflops=18.0,
            bandwidth=546.0,
            memory=128.0,
            basis=f"Apple: 546 GB/s, up to 128 GB; 40 cores x 128 lanes x 2 x 1.76 GHz. {_AS_M3}",
        ),
        _apple(
            "m2-ultra",
            "Mac Studio M2 Ultra (76-core GPU)",
            tflops=27.2,
            bandwidth=800.0,
            memory=192.0,
            basis=f"Apple: 800 GB/s, up to 192 GB, 27.2 TFLOP/s. {_AS_M3}",
        ),
        _nvidia(
            "rtx-4090",
            "GeForce RTX 4090",
            half=165.2,
            single=82.6,
            bandwidth=1008.0,
            memory=24.0,
            basis="NVIDIA's Ada white paper",
        ),
        _nvidia(
            "rtx-5090",
            "GeForce RTX 5090",
            half=209.5,
            single=104.8,
            bandwidth=1792.0,
            memory=32.0,
            basis="NVIDIA's RTX Blackwell white paper",
        ),
        _nvidia(
            "a100-80gb",
            "A100 SXM 80 GB",
            half=312.0,
            single=19.5,
            bandwidth=2039.0,
            memory=80.0,
            basis="NVIDIA's A100 data sheet",
        ),
        _nvidia(
            "h100-sxm",
            "H100 SXM",
            half=989.0,
            single=67.0,
            bandwidth=3350.0,
            memory=80.0,
            basis="NVIDIA's H100 data sheet, without sparsity",
        ),
        _nvidia(
            "h200-sxm",
            "H200 SXM",
            half=989.0,
            single=67.0,
            bandwidth=4800.0,
            memory=141.0,
            basis="NVIDIA's H200 data sheet, without sparsity",
        ),
    )
}
