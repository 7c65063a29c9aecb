"""A hand-off and a split against each machine alone, predicted: when they win, which link they need, how much a pair
serves.

TTFT  = overhead + prefill + exposed transfer + tail + ingest + first decode step
total = overhead + prefill + exposed transfer + tail + ingest + all decode steps

Of a split, prefill is what its prefill host computes, tail what the decode host computes after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from disagg.api.layout import SPLIT_CHUNKS
from disagg.api.names import AS_IS, INT8, WireForm
from disagg.errors import UsageError
from disagg.planning.devices import DEVICES, Device, device
from disagg.planning.shapes import ModelShape
from disagg.planning.sizing import read_size
from disagg.planning.split import PredictedSplit, SplitPair, best_split
from disagg.planning.times import Link, generation, ingest, prefill, ship, step

# A transfer counts as hidden if it adds at most this share of the prefill, or this many seconds.
HIDDEN_SHARE = 0.02
HIDDEN_S = 0.005
# A second HTTP call, a ticket, a TCP connection: assumed. 4 to 40 ms were measured on one busy machine.
HANDOFF_OVERHEAD_S = 0.005
SHORTEST_PROMPT = 16
LINKS_GBIT_S = (0.05, 1600.0)  # range in which `hiding_gbit_s` searches
PRECISION = 0.01

Bound = Literal["prefill", "link", "decode"]


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
    """One model on one pair of machines. split: of the layers that take the least time, `split_layers` of which the
    prefill host computes. hiding_gbit_s, crossover_tokens: None if there is none. context: tokens of the longest
    request. crowded: machines whose memory is too small for this traffic."""

    model: str
    setup: Setup
    traffic: Traffic
    context: int
    disaggregated: Forecast
    decode_alone: Forecast
    prefill_alone: Forecast
    int8: Forecast
    split: Forecast
    split_layers: int
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
        forecasts = ("disaggregated", "decode_alone", "prefill_alone", "int8", "split")
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
            "split_layers": self.split_layers,
            "speedup_over_decode_alone": self.speedup_over_decode,
            "speedup_over_prefill_alone": self.speedup_over_prefill,
            "crossover_prompt_tokens": self.crossover_tokens,
            "transfer_hidden": self.disaggregated.hidden,
            "link_gbit_s_that_hides": self.hiding_gbit_s,
            "throughput": asdict(self.throughput),
            "does_not_fit": list(self.crowded),
        }


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a pair of machines. dtype: of compute and KV. wire: form of KV; int8 is predicted from its bytes, as
    if packing and unpacking took no time."""

    shape: ModelShape
    prefill_device: Device
    decode_device: Device
    link: Link
    dtype: str = "bfloat16"
    chunk_tokens: int = 2048
    wire: WireForm = AS_IS


@dataclass(frozen=True, slots=True)
class Forecast:
    """One predicted request, in seconds. decode_s: all steps, first_step_s included. kv_bytes: on the wire. tail_s:
    from the end of a split's head to that of its tail."""

    prefill_s: float
    decode_s: float
    first_step_s: float
    kv_bytes: float = 0.0
    transfer_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    ingest_s: float = 0.0
    overhead_s: float = 0.0
    tail_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self._before_answer_s + self.first_step_s

    @property
    def total_s(self) -> float:
        return self._before_answer_s + self.decode_s

    @property
    def _before_answer_s(self) -> float:
        return self.overhead_s + self.prefill_s + self.exposed_s + self.tail_s + self.ingest_s

    @property
    def hidden(self) -> bool:
        """Whether the exposed part is too short to notice."""
        return self.exposed_s <= max(HIDDEN_SHARE * self.prefill_s, HIDDEN_S)


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a saturated pair serves. bound: the stage that limits it."""

    batch: int
    decode_tokens_per_s: float
    requests_per_s: float
    bound: Bound


def assess(model: str, setup: Setup, traffic: Traffic, context: int) -> Capacity:
    """Predict one model on one pair of machines. context: tokens of the longest request."""
    prompt, output = traffic.prompt_tokens, traffic.output_tokens
    layers, split = split_prefill(setup, prompt, output)
    return Capacity(
        model=model,
        setup=setup,
        traffic=traffic,
        context=context,
        disaggregated=disaggregated(setup, prompt, output),
        decode_alone=alone(setup, setup.decode_device, prompt, output),
        prefill_alone=alone(setup, setup.prefill_device, prompt, output),
        int8=disaggregated(replace(setup, wire=INT8), prompt, output),
        split=split,
        split_layers=layers,
        crossover_tokens=crossover(setup, output, max(prompt, context - output)),
        hiding_gbit_s=hiding_gbit_s(setup, prompt),
        throughput=throughput(setup, prompt, output, traffic.batch),
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
        needed = memory_gb(setup, context, batch)
        if needed > machine.memory_gb:
            yield f"{machine.name} ({needed:.0f} of {machine.memory_gb:g} GB)"


def _forecast_json(forecast: Forecast) -> dict[str, float]:
    return {**asdict(forecast), "ttft_s": forecast.ttft_s, "total_s": forecast.total_s}


def disaggregated(setup: Setup, prompt: int, output: int) -> Forecast:
    """A request handed over: the prompt but its last token on one machine, the rest on the other."""
    reading = prefill(setup.prefill_device, setup.shape, prompt - 1, setup.dtype, setup.chunk_tokens)
    shipment = ship(reading, setup.shape, setup.dtype, setup.link, setup.wire)
    return replace(
        _decoding(setup, setup.decode_device, prompt, output),
        prefill_s=reading.seconds,
        kv_bytes=shipment.nbytes,
        transfer_s=shipment.busy_s,
        hidden_s=shipment.hidden_s,
        exposed_s=shipment.exposed_s,
        overhead_s=HANDOFF_OVERHEAD_S,
        ingest_s=ingest(setup.shape.layout(setup.dtype).nbytes(prompt - 1)),
    )


def split_prefill(setup: Setup, prompt: int, output: int) -> tuple[int, Forecast]:
    """The same request, its prompt but the last token computed by both machines: how many layers the prefill host
    computes, at the chunk length that takes the least time; and the forecast. 0 and all layers are forecasts of their
    own: the decode host alone, the hand-off."""
    best = min((_best(setup, prompt - 1, chunk) for chunk in SPLIT_CHUNKS), key=lambda one: one.seconds)
    if best.layers == 0:
        return 0, alone(setup, setup.decode_device, prompt, output)
    if best.layers == setup.shape.layers:
        return best.layers, disaggregated(setup, prompt, output)
    forecast = replace(
        _decoding(setup, setup.decode_device, prompt, output),
        prefill_s=best.head_s,
        tail_s=best.seconds - best.head_s,
        kv_bytes=best.nbytes,
        transfer_s=best.nbytes / setup.link.bytes_per_s,
        overhead_s=HANDOFF_OVERHEAD_S,
        ingest_s=ingest(best.nbytes),
    )
    return best.layers, forecast


def _best(setup: Setup, tokens: int, chunk_tokens: int) -> PredictedSplit:
    machines = setup.prefill_device, setup.decode_device
    return best_split(SplitPair(setup.shape, *machines, setup.link, setup.dtype, chunk_tokens), tokens)


def alone(setup: Setup, device: Device, prompt: int, output: int) -> Forecast:
    """The same request, all of it on one machine."""
    reading = prefill(device, setup.shape, prompt - 1, setup.dtype, setup.chunk_tokens)
    return replace(_decoding(setup, device, prompt, output), prefill_s=reading.seconds)


def crossover(setup: Setup, output: int, longest: int) -> int | None:
    """The shortest prompt from which the hand-off is faster than both machines alone. None if there is none up to
    `longest` tokens."""

    def wins(prompt: int) -> bool:
        machines = (setup.decode_device, setup.prefill_device)
        best = min(alone(setup, device, prompt, output).total_s for device in machines)
        return disaggregated(setup, prompt, output).total_s < best

    low, high = SHORTEST_PROMPT, SHORTEST_PROMPT
    while not wins(high):
        if high >= longest:
            return None
        low, high = high, min(2 * high, longest)
    while high - low > max(1, PRECISION * high):
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def hiding_gbit_s(setup: Setup, prompt: int) -> float | None:
    """The slowest link that hides the transfer of this prompt; None if the fastest does not."""

    def hides(gbit_s: float) -> bool:
        faster = replace(setup, link=replace(setup.link, gbit_s=gbit_s))
        return disaggregated(faster, prompt, 1).hidden

    low, high = LINKS_GBIT_S
    if not hides(high):
        return None
    return low if hides(low) else _bisected(hides, low, high)


def throughput(setup: Setup, prompt: int, output: int, batch: int) -> Throughput:
    """Throughput if `batch` requests decode together while the next prompts are computed and sent."""
    one = disaggregated(setup, prompt, output)
    writing = generation(setup.decode_device, setup.shape, prompt, output, dtype=setup.dtype, batch=batch)
    rates: dict[Bound, float] = {
        "prefill": 1 / one.prefill_s if one.prefill_s else float("inf"),
        "link": 1 / one.transfer_s if one.transfer_s else float("inf"),
        "decode": batch / (writing + batch * one.ingest_s),
    }
    bound = min(rates, key=lambda stage: rates[stage])
    return Throughput(batch, batch * output / writing, rates[bound], bound)


def memory_gb(setup: Setup, context: int, batch: int) -> float:
    """Weights, and the KV of `batch` requests of `context` tokens, in 1e9 bytes."""
    return (setup.shape.weight_bytes + batch * setup.shape.layout(setup.dtype).nbytes(context)) / 1e9


def _decoding(setup: Setup, device: Device, prompt: int, output: int) -> Forecast:
    return Forecast(
        prefill_s=0.0,
        decode_s=generation(device, setup.shape, prompt, output, dtype=setup.dtype),
        first_step_s=step(device, setup.shape, prompt, setup.dtype),
    )


def _bisected(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least value for which `holds` is true; it is at `high` and is not at `low`."""
    while high > low * (1 + PRECISION):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
