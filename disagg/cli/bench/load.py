"""`disagg bench` without a subcommand: the fleet, disaggregated, against each of its machines alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from disagg.api.requests import DEFAULT_DEADLINE_S
from disagg.cli.bench.options import (
    Burstiness,
    Concurrency,
    Device,
    Goodput,
    KindName,
    MaxDuration,
    ModelName,
    Modes,
    OutputFile,
    OutputTokens,
    PromptTokens,
    Rate,
    ReportFile,
    Requests,
    Rounds,
    Seed,
    Simulate,
    Timeout,
    Warmup,
    Watts,
    WorkloadFile,
    WorkloadKind,
    numbers,
    pairs,
    refuse_subcommand,
    require_two_files,
    require_writable,
)
from disagg.cli.bench.result import live, result_view
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, refuse_options
from disagg.cli.common.process import uninterrupted
from disagg.cli.views.progress import HostProgress
from disagg.cli.words import choose_models
from disagg.errors import UsageError

if TYPE_CHECKING:
    from disagg.bench.benchmark import BenchSpec
    from disagg.bench.result import BenchResult
    from disagg.config import Fleet


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def load(
    context: typer.Context,
    *,
    model: ModelName = None,
    mode: Modes = None,
    workload: WorkloadKind = KindName.random,
    file: WorkloadFile = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    requests: Requests = None,
    rounds: Rounds = 4,
    warmup: Warmup = 1,
    seed: Seed = 0,
    max_duration: MaxDuration = None,
    timeout: Timeout = DEFAULT_DEADLINE_S,
    goodput: Goodput = None,
    watts: Watts = None,
    as_json: AsJson = False,
    output: OutputFile = None,
    report: ReportFile = None,
    simulate: Simulate = False,
    prefill_device: Device = None,
    decode_device: Device = None,
) -> None:
    """Compare the fleet, disaggregated, with each of its machines alone.

    The modes alternate in one run. Ctrl-C stops it and reports what was measured (exit code 130).
    """
    if context.invoked_subcommand is not None:
        refuse_options(context, "bench", "the benchmark")
        return
    from disagg.bench.benchmark import BenchSpec
    from disagg.bench.stats import LIMITS

    fleet = settings(context).fleet()
    spec = BenchSpec(
        model=choose_models(fleet, [model] if model else [], "name one with -m")[0],
        kind=workload.value,
        file=file,
        modes=tuple(one.value for one in mode or ()),
        prompt_tokens=numbers("--prompt-tokens", prompt_tokens, int),
        output_tokens=numbers("--output-tokens", output_tokens, int),
        concurrency=numbers("--concurrency", concurrency, int),
        rates=numbers("--rate", rate, float),
        requests=requests,
        rounds=rounds,
        warmup=warmup,
        burstiness=burstiness,
        seed=seed,
        max_duration=max_duration,
        timeout=timeout,
        limits=pairs("--goodput", goodput, LIMITS),
        watts=pairs("--watts", watts, ("prefill", "decode")),
    )
    files = Files(output, report)
    _check(context, files)
    result, signalled = _measure(fleet, spec, simulate, (prefill_device, decode_device))
    _show(result, as_json, files)
    _exit(result, signalled)


class Files(NamedTuple):
    """Where the figures are written, besides stdout."""

    output: Path | None
    report: Path | None


def _check(context: typer.Context, files: Files) -> None:
    """Raise UsageError if the files cannot be written: before the run, which may take hours."""
    for option, path in (("--output", files.output), ("--report", files.report)):
        refuse_subcommand(context, option, path)
        require_writable(path)
    require_two_files(files.output, files.report)


def _measure(
    fleet: Fleet, spec: BenchSpec, simulate: bool, devices: tuple[str | None, str | None]
) -> tuple[BenchResult, int]:
    """The result, of the fleet or of a simulated copy, and the signal that stopped the run, or 0."""
    with _served(fleet, spec.model, simulate, devices) as (served, token):
        return _run(served, spec, token)


@contextmanager
def _served(
    fleet: Fleet, model: str, simulate: bool, devices: tuple[str | None, str | None]
) -> Iterator[tuple[Fleet, str | None]]:
    """The fleet to measure, and its token; None if it is in the fleet's token file."""
    if not simulate:
        if any(devices):
            raise UsageError("--prefill-device and --decode-device need --simulate", "add --simulate")
        yield fleet, None
        return

    with simulated(fleet, model, *devices) as (copy, token):
        yield copy, token


def _run(fleet: Fleet, spec: BenchSpec, token: str | None) -> tuple[BenchResult, int]:
    """See `_measure`. A second Ctrl-C ends the program at once."""
    import asyncio

    import uvloop

    from disagg.bench.benchmark import benchmark
    from disagg.bench.load import RunMonitor

    monitor, signals = RunMonitor(), list[int]()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    async def run() -> BenchResult:
        loop = asyncio.get_running_loop()

        def interrupt(number: int, frame: object) -> None:
            signals.append(number)
            loop.call_soon_threadsafe(monitor.end, "interrupted")
            _handle(before)

        # asyncio would leave SIGTERM at its default, which ends disagg but not the servers that it started.
        _handle(dict.fromkeys(_SIGNALS, interrupt))
        return await benchmark(fleet, spec, monitor, token)

    try:
        with live(monitor, stderr(), any(one.simulated for one in fleet.hosts.values() if one.model == spec.model)):
            result = uvloop.run(run())
    finally:
        _handle(before)
    return result, signals[0] if signals else 0


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _show(result: BenchResult, as_json: bool, files: Files) -> None:
    """Print the result, as tables or as JSON, and write the files."""
    import json

    body = result.to_json()
    if as_json:
        print_json(body)
    else:
        stdout().print(result_view(result))
    texts = dict[Path, str]()
    if files.output is not None:
        texts[files.output] = json.dumps(body, indent=2) + "\n"
    if files.report is not None:
        from disagg.bench.report import page

        texts[files.report] = page(result)
    _write(texts)


def _exit(result: BenchResult, signalled: int) -> None:
    """With 128 + the signal that stopped the run; with 1 if no request of a mode and point has completed."""
    if signalled:
        raise typer.Exit(128 + signalled)
    if any(not cell.figures.completed for cell in result.cells):
        raise typer.Exit(1)


def _write(texts: Mapping[Path, str]) -> None:
    """Write all files that can be written, then raise UsageError for the others: the run cannot be repeated."""
    faults = []
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
            stderr().print(f"wrote {path}", style="dim", soft_wrap=True)
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
    if faults:
        raise UsageError(f"cannot write {' and '.join(faults)}")


@contextmanager
def simulated(fleet: Fleet, model: str, prefill: str | None, decode: str | None) -> Iterator[tuple[Fleet, str]]:
    """The simulated fleet with running servers, and its token. prefill, decode: machines in place of hosts.toml's.

    The servers are stopped at the end of the block. Raises UsageError if a host's hardware or the model's size is
    unknown.
    """
    from disagg.fleet.lifecycle.temporary import Devices, running_simulated

    hosts = {name: host for name, host in fleet.hosts.items() if host.model == model}
    if not hosts:
        raise UsageError(f"no host of {fleet.path.name} serves {model}", "there is nothing to simulate")
    only = replace(fleet, hosts=hosts, models={model: fleet.models[model]})
    shown = HostProgress(stderr())
    with running_simulated(
        only,
        Devices(prefill, decode),
        report=lambda host, doing: shown.report(f"simulated {host}", doing),
        ending=uninterrupted,
    ) as (copy, state):
        yield copy, state.tokens.current
