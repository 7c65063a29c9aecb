"""Everything that is predicted about one model on one pair of machines, and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from disagg.api.names import INT8
from disagg.errors import UsageError
from disagg.planning import plan
from disagg.planning.devices import DEVICES, device
from disagg.planning.link import Link
from disagg.planning.plan import Forecast, Setup, Throughput
from disagg.planning.sizing import read_size


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests to plan for. batch: how many decode together."""

    prompt_tokens: int = 8192
    output_tokens: int = 256
    batch: int = 16


def traffic_within(context: int, prompt_tokens: int | None, output_tokens: int, batch: int) -> Traffic:
    """Requests of these lengths. Without one for the prompt: as long as Traffic's, if the context has room for it."""
    if prompt_tokens is None:
        prompt_tokens = max(2, min(Traffic().prompt_tokens, context - output_tokens))
    return Traffic(prompt_tokens, output_tokens, batch)


@dataclass(frozen=True, slots=True)
class Capacity:
    """One model on one pair of machines. hiding_gbit_s, crossover_tokens: None if there is none. context: tokens of the
    longest request. crowded: machines whose memory is too small for this traffic."""

    model: str
    setup: Setup
    traffic: Traffic
    context: int
    disaggregated: Forecast
    decode_alone: Forecast
    prefill_alone: Forecast
    int8: Forecast
    crossover_tokens: int | None
    hiding_gbit_s: float | None
    throughput: Throughput
    crowded: tuple[str, ...]

    @property
    def speedup_over_decode(self) -> float:
        return self.decode_alone.total_s / self.disaggregated.total_s

    @property
    def speedup_over_prefill(self) -> float:
        return self.prefill_alone.total_s / self.disaggregated.total_s

    @property
    def over_context(self) -> bool:
        """Whether these requests are longer than the context."""
        return self.traffic.prompt_tokens + self.traffic.output_tokens > self.context

    def to_json(self) -> dict[str, Any]:
        """Everything, seconds and bytes; `predicted` is always true."""
        setup = self.setup
        forecasts = ("disaggregated", "decode_alone", "prefill_alone", "int8")
        return {
            "predicted": True,
            "model": self.model,
            "shape": setup.shape.name,
            "prefill_device": {"name": setup.prefill_device.name, "basis": setup.prefill_device.basis},
            "decode_device": {"name": setup.decode_device.name, "basis": setup.decode_device.basis},
            "link_gbit_s": setup.link.gbit_s,
            "kv_dtype": setup.dtype,
            "chunk_tokens": setup.chunk_tokens,
            **asdict(self.traffic),
            "context": self.context,
            **{name: _forecast_json(getattr(self, name)) for name in forecasts},
            "speedup_over_decode_alone": self.speedup_over_decode,
            "speedup_over_prefill_alone": self.speedup_over_prefill,
            "crossover_prompt_tokens": self.crossover_tokens,
            "transfer_hidden": self.disaggregated.hidden,
            "link_gbit_s_that_hides": self.hiding_gbit_s,
            "throughput": asdict(self.throughput),
            "does_not_fit": list(self.crowded),
        }


def assess(model: str, setup: Setup, traffic: Traffic, context: int) -> Capacity:
    """Predict one model on one pair of machines. context: tokens of the longest request."""
    prompt, output = traffic.prompt_tokens, traffic.output_tokens
    return Capacity(
        model=model,
        setup=setup,
        traffic=traffic,
        context=context,
        disaggregated=plan.disaggregated(setup, prompt, output),
        decode_alone=plan.alone(setup, setup.decode_device, prompt, output),
        prefill_alone=plan.alone(setup, setup.prefill_device, prompt, output),
        int8=plan.disaggregated(replace(setup, wire=INT8), prompt, output),
        crossover_tokens=plan.crossover(setup, output, max(prompt, context - output)),
        hiding_gbit_s=plan.hiding_gbit_s(setup, prompt),
        throughput=plan.throughput(setup, prompt, output, traffic.batch),
        crowded=tuple(_crowded(setup, traffic)),
    )


def hypothetical(name: str, link: Link, prefill: str | None, decode: str | None) -> tuple[str, Setup, int]:
    """(name, setup, context) for a size on two named machines, without a hosts.toml."""
    sizes = read_size(name)
    if prefill is None or decode is None:
        raise UsageError(
            f"{name} needs two machines",
            f"give --prefill-device and --decode-device, of {', '.join(DEVICES)}",
        )
    return name, Setup(sizes, device(prefill), device(decode), link), sizes.context


def _crowded(setup: Setup, traffic: Traffic) -> Iterator[str]:
    context = traffic.prompt_tokens + traffic.output_tokens
    for machine, batch in ((setup.prefill_device, 1), (setup.decode_device, traffic.batch)):
        needed = plan.memory_gb(setup, context, batch)
        if needed > machine.memory_gb:
            yield f"{machine.name} ({needed:.0f} of {machine.memory_gb:g} GB)"


def _forecast_json(forecast: Forecast) -> dict[str, float]:
    return {**asdict(forecast), "ttft_s": forecast.ttft_s, "total_s": forecast.total_s}
