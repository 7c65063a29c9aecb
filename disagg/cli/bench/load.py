"""`disagg bench` without a subcommand: both machines, by a hand-off and by a split, against each of them alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from disagg.api.requests import DEFAULT_DEADLINE_S
from disagg.bench import MAX_REQUESTS, Mode, WorkloadKind
from disagg.cli.bench.checks import numbers, pairs, refuse_subcommand, require_writable
from disagg.cli.bench.result import live, result_view
from disagg.cli.common.completion import complete_device
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, choice_option, model_option, one_of, refuse_options, seconds_option
from disagg.cli.common.process import uninterrupted
from disagg.cli.views.progress import HostProgress
from disagg.cli.words import choose_models
from disagg.errors import UsageError

if TYPE_CHECKING:
    from disagg.bench.benchmark import BenchSpec
    from disagg.bench.result import BenchResult
    from disagg.config import Fleet


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="With --simulate: in place of the hardware in hosts.toml.",
        autocompletion=complete_device,
    ),
]


def load(
    context: typer.Context,
    *,
    model: Annotated[str | None, model_option("Required if the fleet has several models.")] = None,
    mode: Annotated[
        list[str] | None,
        choice_option(
            get_args(Mode),
            metavar="MODE",
            help=f"{one_of(get_args(Mode))}; repeatable. [default: all that the fleet can run]",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        WorkloadKind, typer.Option(metavar="NAME", help=f"The requests to send: {one_of(get_args(WorkloadKind))}.")
    ] = "random",
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
        float, typer.Option(min=0.01, metavar="X", help="With --rate: gamma shape of arrivals; 1: Poisson.")
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--requests",
            min=1,
            max=MAX_REQUESTS,
            metavar="N",
            help="Per mode and point. [default: 10, at least twice the concurrency]",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns that each mode takes at a point.")] = 4,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Unmeasured requests per mode and point.")] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of token ids and arrivals.")] = 0,
    max_duration: Annotated[
        float | None, typer.Option(min=0.1, metavar="S", help="Stop after this many seconds. [default: no limit]")
    ] = None,
    timeout: Annotated[float, seconds_option(0.1, "Seconds per request.")] = DEFAULT_DEADLINE_S,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS ...", help="Limits of a good request: ttft, tpot, itl, e2el.")
    ] = None,
    watts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=W ...", help="Power of the prefill and the decode machine, if it cannot be measured."
        ),
    ] = None,
    beside: Annotated[
        int,
        typer.Option(
            min=0,
            max=1023,
            metavar="N",
            help="Answers that the decode machine writes meanwhile; needs max_batch over N. [default: none]",
            show_default=False,
        ),
    ] = 0,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON to a file.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the fleet on this machine: real servers, predicted times.")
    ] = False,
    prefill_device: Device = None,
    decode_device: Device = None,
) -> None:
    """Compare a hand-off, a split and each of the machines alone.

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
        kind=workload,
        file=file,
        modes=tuple(cast("list[Mode]", mode or ())),
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
        beside=beside,
    )
    for option, path in (("--output", output), ("--report", report)):  # before the run, which may take hours
        refuse_subcommand(context, option, path)
        require_writable(path)
    if output is not None and report is not None and output.absolute() == report.absolute():
        raise UsageError(f"--output and --report both name {report}", "give each a file of its own")
    with _served(fleet, spec.model, simulate, (prefill_device, decode_device)) as (served, token):
        result, signalled = _run(served, spec, token)
    _show(result, as_json, output, report)
    if signalled:
        raise typer.Exit(128 + signalled)
    if any(not cell.figures.completed for cell in result.cells):
        raise typer.Exit(1)


@contextmanager
def _served(
    fleet: Fleet, model: str, simulate: bool, devices: tuple[str | None, str | None]
) -> Iterator[tuple[Fleet, str | None]]:
    """The fleet to measure, and its token; None if that is in the fleet's token file.

    simulate: a copy of the model's hosts that runs on this machine until the end of the block. devices: machines in
    place of those of hosts.toml. Raises UsageError if a host's hardware or the model's size is unknown.
    """
    from disagg.fleet.lifecycle.temporary import Devices, running_simulated

    if not simulate:
        if any(devices):
            raise UsageError("--prefill-device and --decode-device need --simulate", "add --simulate")
        yield fleet, None
        return
    hosts = {
        host.table: replace(host, name=host.table, keeper="", keeping=None)
        for host in fleet.served.values()
        if host.model == model
    }
    if not hosts:
        raise UsageError(f"no host of {fleet.path.name} serves {model}", "there is nothing to simulate")
    only = replace(fleet, hosts=hosts, models={model: fleet.models[model]})
    shown = HostProgress(stderr())
    with running_simulated(
        only,
        Devices(*devices),
        report=lambda host, doing: shown.report(f"simulated {host}", doing),
        ending=uninterrupted,
    ) as (copy, state):
        yield copy, state.tokens.current


def _run(fleet: Fleet, spec: BenchSpec, token: str | None) -> tuple[BenchResult, int]:
    """The result, and the signal that stopped the run, or 0. A second Ctrl-C ends the program at once."""
    import asyncio

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
            # Not uvloop: of a second signal that came 5 ms after the first, the exit code was 1 in one of eight runs.
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

    body = result.to_json()
    if as_json:
        print_json(body)
    else:
        stdout().print(result_view(result))
    texts = dict[Path, str]()
    if output is not None:
        texts[output] = json.dumps(body, indent=2) + "\n"
    if report is not None:
        from disagg.bench.report import page

        texts[report] = page(result)
    _write(texts)


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
