"""The options of `disagg bench`: what is sent, how often, where the figures go; and their checks before a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from disagg.bench import MAX_REQUESTS
from disagg.cli.common.completion import complete_device, complete_model
from disagg.cli.common.options import CommandGroup, one_of, seconds_option
from disagg.errors import UsageError


class ModeName(StrEnum):
    """The values of --mode."""

    disaggregated = "disaggregated"
    decode_alone = "decode-alone"
    prefill_alone = "prefill-alone"
    whole = "whole"


class KindName(StrEnum):
    """The values of --workload."""

    random = "random"
    prompts = "prompts"
    sharegpt = "sharegpt"
    mooncake = "mooncake"


ModelName = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="NAME",
        help="Required if the fleet has several models.",
        autocompletion=complete_model,
    ),
]
Modes = Annotated[
    list[ModeName] | None,
    typer.Option(
        metavar="MODE",
        help=f"{one_of(ModeName)}; repeatable. [default: all that the fleet can run]",
        show_default=False,
    ),
]
WorkloadKind = Annotated[KindName, typer.Option(metavar="NAME", help=f"The requests to send: {one_of(KindName)}.")]
WorkloadFile = Annotated[
    Path | None,
    typer.Option("-f", "--file", metavar="FILE", help="Prompts or a trace; all workloads but random need one."),
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="Prompt lengths to sweep, of --workload random. [default: 128,512,2048,8192 as far as they fit]",
    ),
]
OutputTokens = Annotated[str | None, typer.Option(metavar="N,N", help="Output lengths to sweep. [default: 64]")]
Concurrency = Annotated[str | None, typer.Option(metavar="N,N", help="Concurrent requests to sweep. [default: 1]")]
Rate = Annotated[
    str | None, typer.Option(metavar="R,R", help="Requests per second to sweep, in place of --concurrency.")
]
Burstiness = Annotated[
    float, typer.Option(min=0.01, metavar="X", help="With --rate: gamma shape of arrivals; 1: Poisson.")
]
Requests = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--requests",
        min=1,
        max=MAX_REQUESTS,
        metavar="N",
        help="Per mode and point. [default: 10, at least twice the concurrency]",
    ),
]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Turns that each mode takes at a point.")]
Warmup = Annotated[int, typer.Option(min=0, metavar="N", help="Unmeasured requests per mode and point.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of token ids and arrivals.")]
MaxDuration = Annotated[
    float | None, typer.Option(min=0.1, metavar="S", help="Stop after this many seconds. [default: no limit]")
]
Timeout = Annotated[float, seconds_option(0.1, "Seconds per request.")]
Goodput = Annotated[
    list[str] | None, typer.Option(metavar="NAME:MS ...", help="Limits of a good request: ttft, tpot, itl, e2el.")
]
Watts = Annotated[
    list[str] | None,
    typer.Option(metavar="ROLE=W ...", help="Power of the prefill and the decode machine, if it cannot be measured."),
]
OutputFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON to a file.")]
ReportFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots.")]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Simulate the fleet on this machine: real servers, predicted times.")
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="With --simulate: in place of the hardware in hosts.toml.",
        autocompletion=complete_device,
    ),
]


T = TypeVar("T", int, float)


class Group(CommandGroup):
    """A command whose --goodput and --watts take several pairs: `--goodput ttft:500 tpot:50`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return list(super().parse_args(ctx, spread_pairs(args)))


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


def refuse_subcommand(context: typer.Context, option: str, path: Path | None) -> None:
    """Raise UsageError if an option took a subcommand or another option as its FILE: `bench --output link`."""
    if str(path).startswith("-"):
        raise UsageError(f"{option} {path}: not the name of a file", f"{option} FILE; ./{path} for this name")
    commands = getattr(context.command, "commands", {})
    if str(path) in commands:
        raise UsageError(
            f"{option} {path}: this is also the name of a command",
            f"disagg bench {path} {option}; or {option} ./{path} for a file",
        )


def numbers(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    """The numbers of a comma-separated sweep. Raises UsageError unless all are positive."""
    if text is None:
        return ()
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < number < 1e9 for number in values):
        raise UsageError(f"{option} {text}: not a list of positive numbers", f"as in {option} 1,2,4")
    return tuple(dict.fromkeys(values))


def pairs(option: str, words: Sequence[str] | None, known: Sequence[str]) -> dict[str, float]:
    """`name:number` or `name=number` pairs. Raises UsageError for an unknown name or a number that is not positive."""
    values: dict[str, float] = {}
    for word in (part for text in words or () for part in text.replace(",", " ").split()):
        pair = re.fullmatch(r"([a-z0-9]+)[:=]([0-9]*\.?[0-9]+)", word)
        if not pair or pair[1] not in known or float(pair[2]) <= 0:
            raise UsageError(
                f"{option} {word}: not understood", f"NAME and a positive number; NAME: {', '.join(known)}"
            )
        values[pair[1]] = float(pair[2])
    return values


def require_two_files(output: Path | None, report: Path | None) -> None:
    """Raise UsageError if one would overwrite the other."""
    if output is not None and report is not None and output.absolute() == report.absolute():
        raise UsageError(f"--output and --report both name {report}", "give each a file of its own")


def require_writable(path: Path | None) -> None:
    """Raise UsageError if this file cannot be written: before the run, not after it."""
    if path is None:
        return
    target = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}", "name a file in a folder that exists and is writable")
