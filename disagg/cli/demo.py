"""`disagg demo`: run a fleet on this machine, two models at the same time, and show what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.context import note_interrupt, print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, sampling_option, seconds_option
from disagg.cli.common.signals import uninterrupted
from disagg.cli.words import read_prompt
from disagg.demo.prompt import MAX_TOKENS, PROMPT

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.demo.flow import DemoResult
    from disagg.inference.several import ModelAnswer

_SVG_WIDTH = 100


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
        _print(stdout(), result, answers=not live, explain=explain)
    if svg is not None:
        _save_svg(result, svg)


def _run(config: Path | None, prompt: str, max_tokens: int, timeout: float, *, live: bool, explain: bool) -> DemoResult:
    import asyncio

    from disagg.cli.views.demo import BRIEF_ROWS
    from disagg.cli.views.fleet.progress import HostProgress
    from disagg.cli.views.stream import Panels
    from disagg.demo.flow import compare, demo_fleet

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
            return asyncio.run(compare(running, prompt, max_tokens, shown, note))
        except KeyboardInterrupt:
            note_interrupt("interrupted; stopping the servers")
            raise


def _print(console: Console, result: DemoResult, *, answers: bool, explain: bool) -> None:
    from disagg.cli.views.demo import demo_view, next_steps

    console.print(demo_view(result, console.width, answers, explain))
    console.print()
    console.print(next_steps(), soft_wrap=True)


def _save_svg(result: DemoResult, path: Path) -> None:
    import io

    from rich.console import Console

    from disagg.cli.views.demo import demo_view
    from disagg.errors import UsageError

    console = Console(record=True, file=io.StringIO(), width=_SVG_WIDTH, force_terminal=True, color_system="truecolor")
    console.print(demo_view(result, console.width, True, True))  # not what to type next, which has this machine's paths
    try:
        console.save_svg(str(path), title="disagg demo")
    except OSError as error:
        raise UsageError(f"--svg: cannot write {path}: {error.strerror}") from error
