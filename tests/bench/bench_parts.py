"""Records and results with known figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from disagg.bench import Mode
from disagg.bench.energy import Power
from disagg.bench.plan import ArrivalPattern, BenchPlan, Point
from disagg.bench.records import MODES, Record, TurnResult
from disagg.bench.result import BenchHost, BenchResult, gather, judge
from disagg.inference.metrics import Metrics, TTFTParts
from tests.cli.answers import metrics as cli_metrics

METHODS = {"split": "disaggregated", "decode-alone": "decode-alone", "prefill-alone": "prefill-alone"}
WITHOUT_SPLIT: tuple[Mode, ...] = tuple(mode for mode in MODES if mode != "split")


def bench_host(name: str, role: str, backend: str, hardware: str = "", simulated: bool = False) -> BenchHost:
    return BenchHost(name, role, "10.0.0.1", hardware, backend, simulated, {"disagg": "0.1.0"})


GPUS = (
    bench_host("spark", "prefill", "transformers/cuda", "dgx-spark"),
    bench_host("mac", "decode", "mlx/gpu", "m4-max"),
)
CPUS = (
    bench_host("spark", "prefill", "transformers/cpu", "dgx-spark"),
    bench_host("mac", "decode", "mlx/gpu", "m4-max"),
)


def metrics(ttft: float = 0.1, e2e: float = 0.5, prompt: int = 100, output: int = 5, **changed: Any) -> Metrics:
    parts = TTFTParts(prefill=ttft * 0.75, network=ttft * 0.25)
    values = {
        "ttft": ttft,
        "total_time": e2e,
        "ttft_parts": parts,
        "prompt_tokens": prompt,
        "completion_tokens": output,
    }
    return cli_metrics("tiny", **{**values, **changed})


def record(
    ttft: float = 0.1, e2e: float = 0.5, index: int = 0, itl: Iterable[float] = (0.1,) * 4, **changed: Any
) -> Record:
    return Record(index, 0.0, 0.0, metrics(ttft, e2e, **changed), tuple(itl))


def failed(kind: str = "ServerUnavailable", message: str = "gone", index: int = 0) -> Record:
    return Record(index, 0.0, 0.0, error=kind, message=message)


def point(
    prompt: int | None = 100, output: int | None = 5, concurrency: int | None = 1, rate: float | None = None
) -> Point:
    return Point(prompt, output, ArrivalPattern(concurrency, rate))


def plan(
    points: tuple[Point, ...], modes: tuple[Mode, ...] = WITHOUT_SPLIT, requests: int = 6, **changed: Any
) -> BenchPlan:
    return BenchPlan(points, modes, requests, **{"rounds": 4, **changed})


def result(
    latencies: Mapping[int, tuple[float, ...]],
    loads: tuple[int, ...] = (1,),
    modes: tuple[Mode, ...] = WITHOUT_SPLIT,
    **changed: Any,
) -> BenchResult:
    """A run over prompt lengths: E2E seconds of each mode, plus or minus two percent."""
    points = tuple(point(length, concurrency=load) for load in loads for length in latencies)
    turn_results = []
    for number, place in enumerate(points):
        for mode, e2e in zip(modes, latencies[place.prompt_tokens or 0], strict=True):
            records = tuple(
                record(e2e * scale / 2, e2e * scale, prompt=place.prompt_tokens or 0, method=METHODS.get(mode, mode))
                for scale in (0.98, 0.99, 1.0, 1.0, 1.01, 1.02)
            )
            turn_results.append(TurnResult(number, mode, warmup=False, began=0.0, ended=6 * e2e, records=records))
    made = plan(points, modes)
    cells = gather(made, turn_results, Power(stated={"prefill": 200.0, "decode": 100.0}), changed.get("limits", {}))
    values: dict[str, Any] = {
        "fleet": "test",
        "model": "tiny",
        "workload": "random token ids",
        "date": "2026-01-02T03:04:05+0000",
    }
    return BenchResult(**values, plan=made, cells=cells, verdict=judge(cells), **changed)
