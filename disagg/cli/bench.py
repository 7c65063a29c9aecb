"""`disagg bench`: what disaggregating this fleet gains, and where it loses.

Without a subcommand the group runs the benchmark; other measurements are its subcommands.
"""

from __future__ import annotations

import os
import re
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from typer.core import TyperGroup

from disagg.cli.context import settings, stderr, stdout
from disagg.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from disagg.bench.benchmark import Order
    from disagg.bench.result import Result
    from disagg.config import Fleet

T = TypeVar("T", int, float)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ModeName(StrEnum):
    """Where requests run."""

    disagg = "disagg"
    decode_alone = "decode-alone"
    prefill_alone = "prefill-alone"


class KindName(StrEnum):
    """What is sent."""

    random = "random"
    prompts = "prompts"
    sharegpt = "sharegpt"
    mooncake = "mooncake"


class Group(TyperGroup):
    """Lets --goodput and --watts take several pairs at once: `--goodput ttft:500 tpot:50`."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        return list(super().parse_args(ctx, spread_pairs(args)))  # type: ignore[arg-type]


def spread_pairs(args: Sequence[str]) -> list[str]:
    """`--watts a=1 b=2` as `--watts a=1 --watts b=2`."""
    spread: list[str] = []
    option = ""
    for word in args:
        if option and re.fullmatch(r"[a-z0-9]+[:=][0-9.]+", word):
            if spread[-1] != option:
                spread.append(option)
        else:
            option = word if word in ("--goodput", "--watts") else ""
        spread.append(word)
    return spread


app = typer.Typer(cls=Group, invoke_without_command=True, no_args_is_help=False)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    *,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="NAME", help="Needed where there are several.")
    ] = None,
    mode: Annotated[
        list[ModeName] | None, typer.Option(help="Repeatable; by default all three.", show_default=False)
    ] = None,
    workload: Annotated[KindName, typer.Option(help="What is sent.")] = KindName.random,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="Of prompts, or a trace.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(metavar="N,N", help="Prompt lengths to sweep.")] = None,
    output_tokens: Annotated[str | None, typer.Option(metavar="N,N", help="Output lengths to sweep.")] = None,
    concurrency: Annotated[str | None, typer.Option(metavar="N,N", help="Requests at a time, to sweep.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="R,R", help="Requests per second, to sweep.")] = None,
    burstiness: Annotated[float, typer.Option(min=0.01, help="Gamma shape of arrivals; 1: Poisson.")] = 1.0,
    requests: Annotated[int | None, typer.Option("-n", "--requests", min=1, help="Per mode and point. [10]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns each mode takes at a point.")] = 4,
    warmup: Annotated[int, typer.Option(min=0, help="Unmeasured requests per mode and point.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of token ids and arrivals.")] = 0,
    max_duration: Annotated[float | None, typer.Option(min=0.1, metavar="S", help="Stop after this long.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds per request.")] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS ...", help="Limits: ttft, tpot, itl, e2el.")
    ] = None,
    watts: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=W ...", help="Of prefill and decode machine.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Figures; - is stdout.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="A page with plots.")] = None,
) -> None:
    """Compare the fleet, disaggregated, with each of its machines alone.

    The modes take turns in one run. Ctrl-C keeps what was measured until then (exit code 130).
    """
    if context.invoked_subcommand is not None:
        return
    from disagg.bench.benchmark import Order
    from disagg.bench.stats import LIMITS

    fleet = settings(context).fleet()
    order = Order(
        model=_model(fleet, model),
        kind=workload.value,
        file=file,
        modes=tuple(one.value for one in mode or ()),
        prompt_tokens=_numbers("--prompt-tokens", prompt_tokens, int),
        output_tokens=_numbers("--output-tokens", output_tokens, int),
        concurrency=_numbers("--concurrency", concurrency, int),
        rates=_numbers("--rate", rate, float),
        requests=requests,
        rounds=rounds,
        warmup=warmup,
        burstiness=burstiness,
        seed=seed,
        max_duration=max_duration,
        timeout=timeout,
        limits=_pairs("--goodput", goodput, LIMITS),
        watts=_pairs("--watts", watts, ("prefill", "decode")),
    )
    for path in (json_file, report):
        _require_writable(path)
    result, signalled = _run(fleet, order)
    _show(result, json_file, report)
    if signalled:
        raise typer.Exit(128 + signalled)
    if any(not cell.figures["completed"] for cell in result.cells):
        raise typer.Exit(1)


def _model(fleet: Fleet, name: str | None) -> str:
    from disagg.cli.generate import choose_models

    return choose_models(fleet, [name] if name else [])[0]


def _numbers(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    """A comma-separated sweep. UsageError for what is no positive number."""
    if text is None:
        return ()
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 1e9 for number in numbers):
        raise UsageError(f"{option} {text}: not a list of positive numbers", f"as in {option} 1,2,4")
    return tuple(dict.fromkeys(numbers))


def _pairs(option: str, words: Sequence[str] | None, known: Sequence[str]) -> dict[str, float]:
    """`name:number` or `name=number` pairs. UsageError for an unknown name or no positive number."""
    pairs = {}
    for word in (part for text in words or () for part in text.replace(",", " ").split()):
        found = re.fullmatch(r"([a-z0-9]+)[:=]([0-9]*\.?[0-9]+)", word)
        if not found or found[1] not in known or float(found[2]) <= 0:
            raise UsageError(
                f"{option} {word}: not understood", f"NAME and a positive number; NAME: {', '.join(known)}"
            )
        pairs[found[1]] = float(found[2])
    return pairs


def _require_writable(path: Path | None) -> None:
    """Find out before the run, not after it."""
    if path is None or str(path) == "-":
        return
    target = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}", "name a file in a folder that exists and is yours")


def _run(fleet: Fleet, order: Order) -> tuple[Result, int]:
    """The result, and the signal that ended the run early, or 0. A second Ctrl-C ends it at once."""
    import asyncio

    from disagg.bench.benchmark import benchmark
    from disagg.bench.load import Watch
    from disagg.cli.views.bench import live

    watch, signals = Watch(), list[int]()

    async def run() -> Result:
        loop = asyncio.get_running_loop()

        def interrupt(number: int) -> None:
            signals.append(number)
            watch.end("interrupted")
            for one in _SIGNALS:
                loop.remove_signal_handler(one)

        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupt, number)
        return await benchmark(fleet, order, watch)

    with live(watch, stderr()):
        result = asyncio.run(run())
    return result, signals[0] if signals else 0


def _show(result: Result, json_file: Path | None, report: Path | None) -> None:
    import json

    from disagg.cli.views.bench import result_view

    body = json.dumps(result.to_json(), indent=2) + "\n"
    if str(json_file) == "-":
        typer.echo(body, nl=False)
    else:
        stdout().print(result_view(result))
        _write(json_file, body)
    if report is not None:
        from disagg.bench.report import page

        _write(report, page(result))


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    stderr().print(f"wrote {path}", style="dim", soft_wrap=True)
