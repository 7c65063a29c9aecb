"""A benchmark from what was asked for to its BenchResult: plan it, check it, play it, judge it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from disagg.bench import datasets, energy, load
from disagg.bench.plan import MAX_REQUESTS, Load, Plan, Point
from disagg.bench.records import MODES, Mode, TurnResult
from disagg.bench.result import BenchResult, gather, judge
from disagg.bench.workloads import RandomTokens, Texts, Trace, Workload
from disagg.config import Fleet, Host
from disagg.errors import ServerUnavailable, UsageError
from disagg.inference import http
from disagg.inference.client import AsyncClient
from disagg.token import fleet_token

if TYPE_CHECKING:
    import httpx

WorkloadKind = Literal["random", "prompts", "sharegpt", "mooncake"]
DEFAULT_PROMPT_TOKENS = (128, 512, 2048, 8192)
DEFAULT_OUTPUT_TOKENS = 64
DEFAULT_REQUESTS = 10
_HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """What was asked for. Empty sequences and None: the default. `limits`: milliseconds; `watts` by role."""

    model: str
    kind: WorkloadKind = "random"
    file: Path | None = None
    modes: Sequence[Mode] = ()
    prompt_tokens: Sequence[int] = ()
    output_tokens: Sequence[int] = ()
    concurrency: Sequence[int] = ()
    rates: Sequence[float] = ()
    requests: int | None = None
    rounds: int = 4
    warmup: int = 1
    burstiness: float = 1.0
    seed: int = 0
    max_duration: float | None = None
    timeout: float = 600.0
    limits: Mapping[str, float] = field(default_factory=dict)
    watts: Mapping[str, float] = field(default_factory=dict)


async def benchmark(fleet: Fleet, spec: BenchSpec, monitor: load.RunMonitor, token: str | None = None) -> BenchResult:
    """Carry out the order on the running fleet; `token`: its secret, where that is not in its file.

    UsageError or ConfigError before the first request where it cannot be; ServerUnavailable where a host is not ready.
    `monitor.end` stops it and keeps what there is."""
    model = fleet.model(spec.model).name
    token = token or fleet_token(fleet)
    async with AsyncClient(fleet, token=token) as client:
        plan, workload, left_out = prepare(fleet, spec, await vocabulary(fleet, model, token))
        power = energy.Power(stated=spec.watts)
        timer = asyncio.get_running_loop().call_later(
            spec.max_duration or 1e9, monitor.end, f"after {spec.max_duration or 0:g} s, as asked"
        )
        try:
            with energy.sampled(power, _local_roles(fleet, model)):
                turn_results = await load.run(client.stream, model, plan, workload, monitor, timeout=spec.timeout)
        finally:
            timer.cancel()
    cells = gather(plan, turn_results, power, spec.limits)
    return BenchResult(
        fleet=fleet.name,
        model=model,
        workload=workload.label,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        plan=plan,
        cells=cells,
        verdict=judge(cells),
        limits=spec.limits,
        stopped=monitor.reason,
        unfinished=sum(turn.unfinished for turn in turn_results if not turn.warmup),
        left_out=left_out,
        warmup_errors=_warmup_errors(turn_results),
        simulated=_simulated(fleet, model),
    )


async def vocabulary(fleet: Fleet, model: str, token: str) -> int:
    """How many token ids all hosts of the model know. ServerUnavailable for a host that is not ready."""
    hosts = [host for role in ("decode", "prefill") for host in fleet.serving(model, role)]
    async with http.client(token) as client:
        asked = [asyncio.create_task(_vocabulary(client, host)) for host in hosts]
        try:
            return min(await asyncio.gather(*asked))
        finally:  # one failed: the others must not outlive the client
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def _vocabulary(client: httpx.AsyncClient, host: Host) -> int:
    health = await http.get(client, host, "/health", timeout=_HEALTH_TIMEOUT_S)
    fingerprint = health.get("fingerprint")
    if health.get("status") != "ok" or not isinstance(fingerprint, dict):
        raise ServerUnavailable(f"{host.name} is not ready: {health.get('status')}", "run `disagg status`")
    return int(fingerprint["vocab_size"])


def prepare(fleet: Fleet, spec: BenchSpec, vocab_size: int) -> tuple[Plan, Workload, int]:
    """The plan, the workload, and how many items of a trace do not fit the model's context."""
    model = fleet.model(spec.model)
    _check(spec)
    workload, left_out = _workload(spec, vocab_size, model.context)
    requests = spec.requests or (len(workload.times) or DEFAULT_REQUESTS)
    if workload.times:
        requests = min(requests, len(workload.times))
    if spec.requests is None:
        requests = max(requests, *(2 * count for count in spec.concurrency), 1)
    plan = Plan(
        points=_points(spec, model.context),
        modes=_modes(fleet, model.name, spec.modes),
        requests=requests,
        rounds=spec.rounds,
        warmup=spec.warmup,
        burstiness=spec.burstiness,
        seed=spec.seed,
    )
    if plan.total > MAX_REQUESTS:
        raise UsageError(f"this sweep has {plan.total:,} requests, over {MAX_REQUESTS:,}", "sweep less at once")
    if short := [c for c in spec.concurrency if c > plan.requests]:
        raise UsageError(
            f"{plan.requests} requests never reach a concurrency of {max(short)}", f"give --requests {2 * max(short)}"
        )
    return plan, workload, left_out


def _check(spec: BenchSpec) -> None:
    """Refuse what would have no effect or no meaning."""
    if (spec.kind == "random") != (spec.file is None):
        hint = "give --file FILE" if spec.file is None else "give --workload prompts, sharegpt or mooncake"
        raise UsageError(f"the workload {spec.kind} {'needs a' if spec.file is None else 'reads no'} file", hint)
    if spec.prompt_tokens and spec.kind != "random":
        raise UsageError(f"the prompts of {spec.file} have their own lengths", "leave --prompt-tokens out")
    if spec.output_tokens and spec.kind == "mooncake":
        raise UsageError(f"the requests of {spec.file} state their output lengths", "leave --output-tokens out")
    if spec.concurrency and spec.rates:
        raise UsageError("--concurrency and --rate are two ways to offer load", "sweep one, then the other")


def _workload(spec: BenchSpec, vocab_size: int, context: int) -> tuple[Workload, int]:
    limit = spec.requests or MAX_REQUESTS
    if spec.file is None:
        return RandomTokens(vocab_size, spec.seed), 0
    label = f"{spec.kind}, {spec.file.name}"
    if spec.kind == "mooncake":
        rows = datasets.read_mooncake(spec.file, limit)
        fitting = [row for row in rows if row.input_length + row.output_length <= context]
        if not fitting:
            raise UsageError(f"no request of {spec.file} fits the context of {context:,} tokens", "raise the context")
        return Trace(fitting, vocab_size, label, spec.seed), len(rows) - len(fitting)
    read = datasets.read_prompts if spec.kind == "prompts" else datasets.read_sharegpt
    return Texts(read(spec.file, limit), label), 0


def _points(spec: BenchSpec, context: int) -> tuple[Point, ...]:
    outputs: Sequence[int | None] = spec.output_tokens or (DEFAULT_OUTPUT_TOKENS,)
    prompts: Sequence[int | None] = (None,)
    if spec.kind == "mooncake":
        outputs = (None,)
    elif spec.kind == "random":
        longest = max(one for one in outputs if one is not None)
        prompts = spec.prompt_tokens or [n for n in DEFAULT_PROMPT_TOKENS if n + longest <= context]
    points = [Point(prompt, output, one) for output in outputs for one in _loads(spec) for prompt in prompts]
    for point in points:
        if (point.prompt_tokens or 0) + (point.output_tokens or 0) > context:
            raise UsageError(f"{point.label}: over the model's context of {context:,} tokens", "sweep shorter ones")
    if not points:
        raise UsageError(f"no default prompt fits a context of {context:,} tokens", "give --prompt-tokens")
    return tuple(points)


def _loads(spec: BenchSpec) -> list[Load]:
    if spec.rates:
        return [Load(rate=rate) for rate in spec.rates]
    if spec.concurrency:
        return [Load(concurrency=count) for count in spec.concurrency]
    return [Load() if spec.kind == "mooncake" else Load(concurrency=1)]


def _modes(fleet: Fleet, model: str, wanted: Sequence[Mode]) -> tuple[Mode, ...]:
    """The modes asked for, in the usual order; by default all that the model's hosts allow."""
    if fleet.serving(model, "prefill"):
        return tuple(mode for mode in MODES if not wanted or mode in wanted)
    if needy := [mode for mode in wanted if mode != "decode-alone"]:
        raise UsageError(f"no prefill host serves {model}: {needy[0]} cannot run", "give --mode decode-alone")
    return ("decode-alone",)


def _local_roles(fleet: Fleet, model: str) -> list[str]:
    """Roles whose only host is this machine: the power read here is theirs. A simulated host's is not."""
    hosts = {role: fleet.serving(model, role) for role in ("prefill", "decode")}
    return [
        role for role, found in hosts.items() if [(host.local, host.simulated) for host in found] == [(True, False)]
    ]


def _simulated(fleet: Fleet, model: str) -> dict[str, str]:
    """The machine that each host of this model plays; hosts that run a model are not in it."""
    hosts = (host for role in ("prefill", "decode") for host in fleet.serving(model, role))
    return {host.name: host.hardware or "" for host in hosts if host.simulated}


def _warmup_errors(turn_results: Sequence[TurnResult]) -> Counter[str]:
    return Counter(record.error for turn in turn_results if turn.warmup for record in turn.records if record.error)
