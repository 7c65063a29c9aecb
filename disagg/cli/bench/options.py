"""The options of `disagg bench`: what is sent, how often, and where the figures go."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from disagg.bench import MAX_REQUESTS
from disagg.cli.common.completion import complete_device, complete_model
from disagg.cli.common.options import one_of, seconds_option


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
