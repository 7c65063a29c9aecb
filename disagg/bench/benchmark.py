"""A benchmark, from its BenchSpec to its BenchResult: check and plan it, estimate its time, run it, judge it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path

from disagg.api.requests import DEFAULT_DEADLINE_S
from disagg.api.status import Health, Load
from disagg.bench import MAX_REQUESTS, Mode, WorkloadKind, energy, load, workloads
from disagg.bench.beside import RunningAnswers
from disagg.bench.plan import ArrivalPattern, BenchPlan, Point
from disagg.bench.records import MODES, ROLES, TurnResult
from disagg.bench.result import BenchHost, BenchResult, gather, judge
from disagg.bench.workloads import LengthTrace, RandomTokens, Texts, Workload
from disagg.config import Fleet, Host
from disagg.errors import ServerUnavailable, UsageError
from disagg.inference.client import AsyncClient
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.token import Tokens, fleet_token
from disagg.whole.request import MODELS

DEFAULT_PROMPT_TOKENS = (128, 512, 2048, 8192)
DEFAULT_OUTPUT_TOKENS = 64
DEFAULT_REQUESTS = 10
TEXTS: tuple[WorkloadKind, ...] = ("prompts", "sharegpt")
"""The workloads whose prompts are texts."""
_HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """The options of a benchmark. Empty sequences and None: the default. limits: milliseconds. watts: by role."""

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
    timeout: float = DEFAULT_DEADLINE_S
    limits: Mapping[str, float] = field(default_factory=dict)
    watts: Mapping[str, float] = field(default_factory=dict)
    beside: int = 0


async def benchmark(fleet: Fleet, spec: BenchSpec, monitor: load.RunMonitor, token: str | None = None) -> BenchResult:
    """Run a benchmark on the running fleet. token: the fleet's secret; None reads it from its file.

    Raises UsageError or ConfigError before the first request, ServerUnavailable if a host is not ready. `monitor.end`
    stops the run and keeps the records so far.
    """
    model = fleet.model(spec.model).name
    async with AsyncClient(fleet, token=token) as client:  # without a token, it follows a rotation
        loaded = await client.load_model(model)
        servers = await read_servers(loaded, model, token or (fleet_token(fleet) if fleet.engine_hosts else ""))
        vocab_size, splits = min((server.vocabulary for server in servers), default=0), can_split(servers)
        plan, workload, left_out = prepare(fleet, spec, vocab_size, splits=splits)
        hosts = [server.host for server in servers] + (await read_whole(fleet, model) if "whole" in plan.modes else [])
        context = fleet.model(model).context
        answers = partial(RunningAnswers, client.stream, model, plan.beside, timeout=spec.timeout)
        running = partial(answers, vocab_size=vocab_size, context=context) if plan.beside else None
        power = energy.Power(stated=spec.watts)
        timer = asyncio.get_running_loop().call_later(
            spec.max_duration or 1e9, monitor.end, f"after {spec.max_duration or 0:g} s, as asked"
        )
        try:
            seconds = await load.estimate(client.stream, model, plan, workload, monitor, timeout=spec.timeout)
            monitor.estimated(plan, seconds if seconds is None else min(seconds, spec.max_duration or seconds))
            with energy.sampled(power, _local_roles(fleet, model)):
                turn_results = await load.run(
                    client.stream, model, plan, workload, monitor, timeout=spec.timeout, beside=running
                )
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
        hosts=tuple(hosts),
    )


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A host as its server reports it, how many token ids its model knows, and whether it can compute a prompt together
    with another host."""

    host: BenchHost
    vocabulary: int
    splits: bool = False


def can_split(servers: Sequence[ServerUnderTest]) -> bool:
    """Whether a prefill and a decode host of the model can compute a prompt together."""
    return {"prefill", "decode"} <= {server.host.role for server in servers if server.splits}


async def read_servers(fleet: Fleet, model: str, token: str) -> list[ServerUnderTest]:
    """All hosts of the model, prefill first. Raises ServerUnavailable for a host that is not ready."""
    hosts = [(role, host) for role in ROLES["disaggregated"] for host in fleet.serving(model, role)]
    async with Connections(Tokens(token)) as http:
        tasks = [asyncio.create_task(_read_server(http, host, role)) for role, host in hosts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # if one failed, the others must not outlive the client
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def read_whole(fleet: Fleet, model: str) -> list[BenchHost]:
    """The model's whole-request hosts, each of which answers. Raises ServerUnavailable for one that does not."""
    hosts = fleet.serving(model, "whole")
    async with Connections(Tokens()) as http:
        for host in hosts:
            reply = await host_calls.get_whole(http, host, MODELS, _HEALTH_TIMEOUT_S)
            if reply.status != HTTPStatus.OK:
                raise ServerUnavailable(f"{host.name} ({host.url}) answers HTTP {reply.status}", "see its log")
    return [
        BenchHost(host.name, "whole", host.address, host.hardware or "", host.engine.name, simulated=False, versions={})
        for host in hosts
    ]


async def _read_server(http: Connections, host: Host, role: str) -> ServerUnderTest:
    health = Health.received(await host_calls.get(http, host, "/health", timeout=_HEALTH_TIMEOUT_S), host.name)
    if health.status != "ok" or health.fingerprint is None:
        raise ServerUnavailable(f"{host.name} is not ready: {health.status}", "run `disagg status`")
    measured = BenchHost(
        name=host.name,
        role=role,
        address=host.address,
        hardware=host.hardware or "",
        backend=health.backend or "",
        simulated=health.simulated,
        versions={"disagg": health.version, **health.versions},
    )
    load = Load.received(await host_calls.get(http, host, "/load", timeout=_HEALTH_TIMEOUT_S), host.name)
    return ServerUnderTest(measured, health.fingerprint.vocab_size, load.splits)


def prepare(fleet: Fleet, spec: BenchSpec, vocab_size: int, *, splits: bool = False) -> tuple[BenchPlan, Workload, int]:
    """The plan, the workload, and how many items of a trace are over the model's context. splits: the hosts can compute
    a prompt together. Raises UsageError."""
    model = fleet.model(spec.model)
    _check(spec)
    modes = _modes(fleet, model.name, spec, splits=splits)
    workload, left_out = _workload(spec, vocab_size, model.context)
    requests = spec.requests or (len(workload.times) or DEFAULT_REQUESTS)
    if workload.times:
        requests = min(requests, len(workload.times))
    if spec.requests is None:
        requests = max(requests, *(2 * count for count in spec.concurrency), 1)
    plan = BenchPlan(
        points=_points(spec, model.context),
        modes=modes,
        requests=requests,
        rounds=spec.rounds,
        warmup=spec.warmup,
        burstiness=spec.burstiness,
        seed=spec.seed,
        beside=spec.beside,
    )
    if plan.total > MAX_REQUESTS:
        raise UsageError(f"this sweep has {plan.total:,} requests, over {MAX_REQUESTS:,}", "sweep less at once")
    if short := [c for c in spec.concurrency if c > plan.requests]:
        raise UsageError(
            f"--requests {plan.requests} never reaches --concurrency {max(short)}", f"give --requests {2 * max(short)}"
        )
    return plan, workload, left_out


def _check(spec: BenchSpec) -> None:
    """Raise for options that contradict each other."""
    if (spec.kind == "random") != (spec.file is None):
        hint = "give --file FILE" if spec.file is None else "give --workload prompts, sharegpt or mooncake"
        raise UsageError(f"--workload {spec.kind} {'needs a' if spec.file is None else 'reads no'} file", hint)
    if spec.prompt_tokens and spec.kind != "random":
        raise UsageError(f"the prompts of {spec.file} have their own lengths", "remove --prompt-tokens")
    if spec.output_tokens and spec.kind == "mooncake":
        raise UsageError(f"the requests of {spec.file} state their output lengths", "remove --output-tokens")
    if spec.beside and spec.kind != "random":
        raise UsageError("--beside: only beside random prompts", "remove --workload, or --beside")
    if spec.concurrency and spec.rates:
        raise UsageError("--concurrency and --rate exclude each other", "sweep one, then the other")


def _workload(spec: BenchSpec, vocab_size: int, context: int) -> tuple[Workload, int]:
    limit = spec.requests or MAX_REQUESTS
    if spec.file is None:
        return RandomTokens(vocab_size, spec.seed), 0
    label = f"{spec.kind}, {spec.file.name}"
    if spec.kind == "mooncake":
        rows = workloads.read_mooncake(spec.file, limit)
        fitting = [row for row in rows if row.input_length + row.output_length <= context]
        if not fitting:
            raise UsageError(f"no request of {spec.file} fits the context of {context:,} tokens", "raise the context")
        return LengthTrace(fitting, vocab_size, label, spec.seed), len(rows) - len(fitting)
    read = workloads.read_prompts if spec.kind == "prompts" else workloads.read_sharegpt
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


def _loads(spec: BenchSpec) -> list[ArrivalPattern]:
    if spec.rates:
        return [ArrivalPattern(rate=rate) for rate in spec.rates]
    if spec.concurrency:
        return [ArrivalPattern(concurrency=count) for count in spec.concurrency]
    return [ArrivalPattern() if spec.kind == "mooncake" else ArrivalPattern(concurrency=1)]


def _modes(fleet: Fleet, model: str, spec: BenchSpec, *, splits: bool) -> tuple[Mode, ...]:
    """The wanted modes in the order of MODES; by default all that the fleet's own hosts can run. Whole-request hosts
    may be other people's: they are asked if they are named, or if there are no others."""
    prefill = fleet.serving(model, "prefill")
    pair = tuple(mode for mode in MODES if splits or mode != "split")
    if prefill and not any(host.answers for host in prefill):
        pair = tuple(mode for mode in pair if mode not in ("disaggregated", "prefill-alone"))
    own = pair if prefill else ("decode-alone",) if fleet.serving(model, "decode") else ()
    baseline: tuple[Mode, ...] = ("whole",) if fleet.serving(model, "whole") else ()
    possible = own + (baseline if spec.kind in TEXTS else ())
    impossible = [mode for mode in spec.modes if mode not in possible]
    if baseline and ("whole" in impossible or not possible):
        raise UsageError("whole-request hosts take text, not token ids", "give --workload prompts or sharegpt")
    if "split" in impossible and pair == own:
        hint = "`disagg status` states why its layers cannot be divided"
        raise UsageError(f"--mode split: the hosts of {model} do not compute a prompt together", hint)
    if "whole" in impossible:
        raise UsageError(f"--mode whole: no whole-request host serves {model}", "add one to hosts.toml")
    if impossible and prefill:
        hint = f"give --mode {' or '.join(possible)}"
        raise UsageError(f"--mode {impossible[0]}: no prefill host of {model} has all of its layers", hint)
    if impossible:
        missing = "prefill" if "decode-alone" in possible else "prefill or decode"
        hint = f"give --mode {' or '.join(possible)}"
        raise UsageError(f"--mode {impossible[0]}: no {missing} host serves {model}", hint)
    return tuple(mode for mode in possible if mode in (spec.modes or own or possible))


def _local_roles(fleet: Fleet, model: str) -> list[str]:
    """Roles whose only host runs a model on this machine, so that power measured here is theirs."""
    hosts = {role: fleet.serving(model, role) for role in ("prefill", "decode")}
    return [
        role
        for role, serving in hosts.items()
        if len(serving) == 1 and serving[0].server_kind.spawned and not serving[0].simulated
    ]


def _warmup_errors(turn_results: Sequence[TurnResult]) -> Counter[str]:
    return Counter(record.error for turn in turn_results if turn.warmup for record in turn.records if record.error)
