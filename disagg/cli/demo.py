"""`disagg demo`: run a fleet on this machine, two models at the same time, and show what it cost."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from disagg.cli.common.context import note_interrupt, print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, sampling_option, seconds_option
from disagg.cli.common.process import uninterrupted
from disagg.cli.views.health import health_panel
from disagg.cli.views.items import plain_table
from disagg.cli.views.metrics import footnote, model_panel
from disagg.cli.views.progress import HostProgress
from disagg.cli.views.stream import Panels, arranged, final_view
from disagg.cli.words import read_prompt
from disagg.demo.flow import (
    HOSTS_FILE,
    MAX_TOKENS,
    METHOD_TOKENS,
    PROMPT,
    PROMPT_FILE,
    Comparison,
    DemoResult,
    compare,
    demo_fleet,
)
from disagg.errors import UsageError
from disagg.inference.several import ModelAnswer
from disagg.units import seconds, size, speed

_SVG_WIDTH = 100
_MODEL_PANEL_WIDTH = 60
BRIEF_ROWS = 4  # of each answer


def demo(
    context: typer.Context,
    *,
    prompt: Annotated[
        str, typer.Option(help="What both models continue.", show_default="the beginning of a class")
    ] = PROMPT,
    max_tokens: Annotated[int, sampling_option("max_tokens")] = MAX_TOKENS,
    timeout: Annotated[float, seconds_option(1, "Seconds for the servers to become healthy.")] = 180.0,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every part of each time, with its formula, and the servers.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the output as an SVG image.")] = None,
) -> None:
    """Start four servers on this machine, run two models at the same time, print the figures, stop the servers.

    With --config, the servers of that file, which must be local.
    """
    prompt = read_prompt(prompt, None, context=0)
    live = not as_json and stdout().is_terminal
    result = _run(settings(context).config, prompt, max_tokens, timeout, live=live, explain=explain)
    if as_json:
        print_json(result.to_json())
    else:
        console = stdout()
        console.print(demo_view(result, console.width, not live, explain), "")
        console.print(next_steps(), soft_wrap=True)
    if svg is not None:
        _save_svg(result, svg)


def _run(config: Path | None, prompt: str, max_tokens: int, timeout: float, *, live: bool, explain: bool) -> DemoResult:
    import uvloop

    def note(text: str) -> None:
        stderr().print(text, style="dim")

    @contextmanager
    def shown(answers: Sequence[ModelAnswer]) -> Iterator[None]:
        if not live:
            yield
            return
        panels = Panels(answers, prompt, stdout(), rows=None if explain else BRIEF_ROWS)
        try:
            with panels:
                yield
        finally:
            panels.finish()

    progress = HostProgress(stderr(), brief=not explain)
    with demo_fleet(config, timeout_s=timeout, report=progress.report, note=note, ending=uninterrupted) as running:
        try:
            return uvloop.run(compare(running, prompt, max_tokens, shown, note))
        except KeyboardInterrupt:
            note_interrupt("interrupted; stopping the servers")
            raise


def _save_svg(result: DemoResult, path: Path) -> None:
    import io

    console = Console(record=True, file=io.StringIO(), width=_SVG_WIDTH, force_terminal=True, color_system="truecolor")
    console.print(demo_view(result, console.width, True, True))  # not what to type next, which has this machine's paths
    try:
        console.save_svg(str(path), title="disagg demo")
    except OSError as error:
        raise UsageError(f"--svg: cannot write {path}: {error.strerror}") from error


def demo_view(result: DemoResult, width: int, answers: bool, explain: bool) -> RenderableType:
    """The result of a demo, from each model's figures to the servers' health. `answers`: the texts too, which a
    terminal has shown. explain: every part of each time, with its formula; without, about a screen in all."""
    if not explain:
        return _brief(result, width, answers)
    models = [model_panel(answer.completion) for answer in result.together if answer.completion]
    return Group(
        *([final_view(result.prompt, result.together, width)] if answers else []),
        arranged(models, beside=width >= _MODEL_PANEL_WIDTH * len(models)),
        comparison_panel(result.comparison),
        health_panel(result.health),
        footnote(),
    )


def _brief(result: DemoResult, width: int, answers: bool) -> RenderableType:
    figures = ("prefill\ntok/s", "decode\ntok/s", "first\ntoken", "KV\nsent")
    table = plain_table("model", "hosts", *figures, right=figures, whole=("model", "hosts", *figures))
    for answer in result.together:
        if answer.completion is not None:
            it = answer.completion.metrics
            hosts = f"{it.prefill_server} → {it.decode_server}"
            rates = ("–" if rate is None else f"{rate:,.0f}" for rate in (it.prefill_speed, it.decode_speed))
            table.add_row(it.model, hosts, *rates, seconds(it.ttft), size(it.kv_bytes))
    same = Text("same answers", "green") if result.comparison.same_text else Text("other answers", "bold red")
    healthy = sum(status.ok for status in result.health)
    return Group(
        *([final_view(result.prompt, result.together, width, rows=BRIEF_ROWS)] if answers else []),
        table,
        Text.assemble(_worth(result.comparison), ", ", same, "."),
        Text(f"{healthy} of {len(result.health)} servers healthy. All figures and what they mean: --explain.", "dim"),
    )


def _worth(it: Comparison) -> str:
    """`at the same time 217 ms, one after the other 337 ms: 1.55 x`; and why it may be less than 1."""
    why = "" if it.speedup >= 1 else " (the machine is busy)"
    both = f"At the same time {seconds(it.parallel_wall)}, one after the other {seconds(it.sequential_sum)}"
    return f"{both}: {it.speedup:.2f} x{why}"


def comparison_panel(comparison: Comparison) -> Panel:
    """The models at the same time against one after the other, each figure with its formula."""
    figure, formula = Column(justify="right", style="bold"), Column(style="dim", overflow="fold")
    grid = Table.grid(Column(style="dim"), figure, formula, padding=(0, 2))
    own = " + ".join(f"{name} {seconds(wall)}" for name, wall in comparison.own.items())
    slower = max(comparison.own, key=lambda name: comparison.own[name])
    grid.add_row("at the same time", seconds(comparison.parallel_wall), "from the first request to the last token")
    grid.add_row("one after the other", seconds(comparison.sequential_sum), own)
    grid.add_row("speedup", f"{comparison.speedup:.2f} x", "one after the other / at the same time")
    grid.add_row("cost of sharing", f"{comparison.over_slower:.2f} x", f"at the same time / {slower} by itself")
    grid.add_row("throughput", speed(comparison.throughput), "output tokens / at the same time")
    same = Text("All runs gave the same answers.", "green")
    differ = Text("The answers of the runs differ.", "bold red")
    median = Text(f"Times are medians of {comparison.rounds} rounds.", "dim")
    busy = [Text("Other programs use this machine: at the same time is slower.", "yellow")]
    body = Group(grid, same if comparison.same_text else differ, median, *(busy if comparison.speedup < 1 else []))
    title = "All models at the same time, against one after the other"
    return Panel(body, title=f"[bold]{title}[/]", title_align="left", border_style="green")


def next_steps() -> Text:
    """The commands to type next, each on a line of its own, and what to expect of the demo's models.

    Print it with `soft_wrap`: a command that were wrapped between words could not be copied.
    """
    keep = [f"export DISAGG_CONFIG={shlex.quote(str(HOSTS_FILE))}", "disagg start"]  # whole: for every folder
    activate = Path(sys.prefix, "bin", "activate")
    if shutil.which("disagg") is None and activate.exists():
        keep.insert(0, f"source {_short(activate)}")
    ask = f"disagg generate qwen -f {_short(PROMPT_FILE)} --max-tokens {METHOD_TOKENS}"
    text = Text()
    for title, commands in (
        ("next: keep these servers", keep),
        ("ask one model", [ask]),
        ("your own machines", ["disagg init --prefill ADDRESS --decode ADDRESS"]),
    ):
        text.append(f"{title}\n", "dim")
        for command in commands:
            text.append(f"  {command}\n", "bold cyan")
    tiny = "The demo's models are tiny: they continue a pattern like the one above,\nand answer no questions."
    return text.append(f"\n{tiny}", "dim")


def _short(path: Path) -> str:
    """The path for a shell, relative to the current folder if it lies in it and is shorter so."""
    relative = os.path.relpath(path)
    within = len(relative) < len(str(path)) and not relative.startswith("..")
    return shlex.quote(relative if within else str(path))
