"""`disagg bench` without a subcommand: the fleet, disaggregated, against each of its machines alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.api.requests import DEFAULT_DEADLINE_S, MAX_DEADLINE_S
from disagg.cli.bench.arguments import (
    numbers,
    pairs,
    refuse_options,
    refuse_subcommand,
    require_two_files,
    require_writable,
)
from disagg.cli.completion import complete_device, complete_model
from disagg.cli.context import print_json, settings, stderr, stdout
from disagg.cli.options import AsJson
from disagg.errors import UsageError

if TYPE_CHECKING:
    from disagg.bench.benchmark import BenchSpec
    from disagg.bench.result import BenchResult
    from disagg.config import Fleet

MAX_REQUESTS = 100_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ModeName(StrEnum):
    """The values of --mode."""

    disaggregated = "disaggregated"
    decode_alone = "decode-alone"
    prefill_alone = "prefill-alone"


class KindName(StrEnum):
    """The values of --workload."""

    random = "random"
    prompts = "prompts"
    sharegpt = "sharegpt"
    mooncake = "mooncake"


def load(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="Required if the fleet has several models.",
            autocompletion=complete_model,
        ),
    ] = None,
    mode: Annotated[
        list[ModeName] | None,
        typer.Option(help="Repeatable. [default: all that the fleet can run]", show_default=False),
    ] = None,
    workload: Annotated[KindName, typer.Option(help="The requests to send.")] = KindName.random,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="Prompts or a trace; all workloads but random need one."),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Prompt lengths to sweep, of --workload random. [default: 128,512,2048,8192 as far as they fit]",
        ),
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(metavar="N,N", help="Output lengths to sweep. [default: 64]")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N", help="Concurrent requests to sweep. [default: 1]")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,R", help="Requests per second to sweep, in place of --concurrency.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="With --rate: gamma shape of arrivals; 1: Poisson.")
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--requests",
            min=1,
            max=MAX_REQUESTS,
            help="Per mode and point. [default: 10, at least twice the concurrency]",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each mode takes at a point.")] = 4,
    warmup: Annotated[int, typer.Option(min=0, help="Unmeasured requests per mode and point.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of token ids and arrivals.")] = 0,
    max_duration: Annotated[
        float | None, typer.Option(min=0.1, metavar="S", help="Stop after this many seconds. [default: no limit]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=MAX_DEADLINE_S, metavar="S", help="Seconds per request.")
    ] = DEFAULT_DEADLINE_S,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS ...", help="Limits of a good request: ttft, tpot, itl, e2el.")
    ] = None,
    watts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=W ...", help="Power of the prefill and the decode machine, if it cannot be measured."
        ),
    ] = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON to a file.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the fleet on this machine: real servers, predicted times.")
    ] = False,
    prefill_device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="With --simulate: in place of the hardware in hosts.toml.",
            autocompletion=complete_device,
        ),
    ] = None,
    decode_device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="With --simulate: in place of the hardware in hosts.toml.",
            autocompletion=complete_device,
        ),
    ] = None,
) -> None:
    """Compare the fleet, disaggregated, with each of its machines alone.

    The modes alternate in one run. Ctrl-C stops it and reports what was measured (exit code 130).
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    from disagg.bench.benchmark import BenchSpec
    from disagg.bench.stats import LIMITS

    fleet = settings(context).fleet()
    spec = BenchSpec(
        model=_model(fleet, model),
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
    for option, path in (("--output", output), ("--report", report)):
        refuse_subcommand(context, option, path)
        require_writable(path)
    require_two_files(output, report)
    with _served(fleet, spec.model, simulate, (prefill_device, decode_device)) as (served, token):
        result, signalled = _run(served, spec, token)
    _show(result, as_json, output, report)
    if signalled:
        raise typer.Exit(128 + signalled)
    if any(not cell.figures["completed"] for cell in result.cells):
        raise typer.Exit(1)


def _model(fleet: Fleet, name: str | None) -> str:
    if name is None and len(fleet.models) > 1:
        raise UsageError(f"which model? {fleet.path.name} has {', '.join(fleet.models)}", "name one with -m")
    return fleet.model(name or next(iter(fleet.models))).name


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
    from disagg.cli.bench.simulate import simulated

    with simulated(fleet, model, *devices) as (copy, token):
        yield copy, token


def _run(fleet: Fleet, spec: BenchSpec, token: str | None) -> tuple[BenchResult, int]:
    """The result, and the signal that stopped the run, or 0. A second Ctrl-C ends the program at once."""
    import asyncio

    from disagg.bench.benchmark import benchmark
    from disagg.bench.load import RunMonitor
    from disagg.cli.views.bench import live

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
            result = asyncio.run(run())
    finally:
        _handle(before)
    return result, signals[0] if signals else 0


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _show(result: BenchResult, as_json: bool, output: Path | None, report: Path | None) -> None:
    """Print the result, as tables or as JSON, and write the files."""
    import json

    from disagg.cli.views.bench import result_view

    body = result.to_json()
    if as_json:
        print_json(body)
    else:
        stdout().print(result_view(result))
    files = dict[Path, str]()
    if output is not None:
        files[output] = json.dumps(body, indent=2) + "\n"
    if report is not None:
        from disagg.bench.report import page

        files[report] = page(result)
    _write(files)


def _write(files: Mapping[Path, str]) -> None:
    """Write all files that can be written, then raise UsageError for the others: the run cannot be repeated."""
    faults = []
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
            stderr().print(f"wrote {path}", style="dim", soft_wrap=True)
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
    if faults:
        raise UsageError(f"cannot write {' and '.join(faults)}")
