"""The result of `disagg demo`: answers, figures, the comparison, the servers' health; and what to do next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disagg.cli.views.fleet.health import health_panel
from disagg.cli.views.metrics import footnote, model_panel
from disagg.cli.views.stream import arranged, final_view
from disagg.demo.comparison import Comparison
from disagg.demo.flow import HOSTS_FILE, DemoResult
from disagg.demo.prompt import METHOD_TOKENS, PROMPT_FILE
from disagg.units import seconds, size, speed

_MODEL_PANEL_WIDTH = 60
BRIEF_ROWS = 4  # of each answer


def demo_view(result: DemoResult, width: int, answers: bool, explain: bool) -> RenderableType:
    """From each model's figures to the servers' health. `answers`: the texts too, which a terminal has shown. explain:
    every part of each time, with its formula; without, about a screen in all."""
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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model", "hosts", "prefill\ntok/s", "decode\ntok/s", "first\ntoken", "KV\nsent"):
        table.add_column(name, justify="left" if name in ("model", "hosts") else "right", no_wrap=True)
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
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    grid.add_column(style="dim", overflow="fold")
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
