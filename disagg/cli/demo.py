"""`disagg demo`: a whole fleet on this machine, two models at once, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.context import settings, stderr, stdout
from disagg.cli.signals import uninterrupted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from disagg.config import Fleet
    from disagg.demo.comparison import Comparison
    from disagg.errors import DisaggError
    from disagg.fleet.lifecycle.fleet_servers import FleetServers, ServerResult
    from disagg.fleet.lifecycle.health import HostStatus
    from disagg.fleet.lifecycle.state import State
    from disagg.inference.several import Answer

PROMPT = '''class Account:
    """Money that belongs to somebody."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError('amount must be positive')
        self.balance += amount

    def withdraw(self, amount):
'''
_REPETITION_PENALTY = 1.25  # models of 1.7 million parameters repeat themselves without
_GRACE_S = 5.0
_OTHER_PORTS = 2  # how often the packaged fleet moves to other ports before the demo gives up
_SVG_WIDTH = 120
_MODEL_PANEL_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Run:
    """What the demo did: all models at once, then each by itself, and how the servers fared meanwhile."""

    prompt: str
    together: Sequence[Answer]
    by_itself: Sequence[Answer]
    comparison: Comparison
    health: Sequence[HostStatus]

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "together": [answer.to_json() for answer in self.together],
            "by_itself": [answer.to_json() for answer in self.by_itself],
            "comparison": self.comparison.to_json(),
            "health": [status.to_json() for status in self.health],
        }


def demo(
    context: typer.Context,
    *,
    prompt: Annotated[
        str, typer.Option(help="What both models continue.", show_default="the beginning of a class")
    ] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 128,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for the servers to start.")] = 180.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the panels as an image.")] = None,
) -> None:
    """Start the demo fleet here, run all its models at once, show what it cost, stop everything."""
    import json
    import tempfile

    from disagg.cli.generate import read_prompt

    read_prompt(prompt, None)
    with (
        tempfile.TemporaryDirectory(prefix="disagg-demo-") as folder,
        _running(settings(context).config, Path(folder), timeout) as (fleet, state),
    ):
        run = _compare(fleet, state, prompt, max_tokens, live=not as_json)
    if as_json:
        typer.echo(json.dumps(run.to_json(), indent=2))
    else:
        _show(run, stdout(), answers=not stdout().is_terminal)
    if svg is not None:
        _save_svg(run, svg)


def _demo_fleet(config: Path | None, folder: Path) -> Fleet:
    """--config's fleet as it is; else the package's, on free ports."""
    import disagg
    from disagg.config import load
    from disagg.fleet.lifecycle.ports import on_free_ports

    if config is not None:
        return load(config)
    fleet, moved = on_free_ports(load(Path(disagg.__file__).parent / "demo" / "hosts.toml"), folder)
    for port, other in moved.items():
        stderr().print(f"port {port} is in use here; using {other}", style="dim")
    return fleet


@contextmanager
def _running(config: Path | None, folder: Path, timeout: float) -> Iterator[tuple[Fleet, State]]:
    """The fleet's servers, healthy; stopped on every way out. The first host's error if not all come up.

    Another program, such as a second demo, may take a port between the look at it and the server's own: the
    package's fleet then tries again elsewhere.
    """
    from disagg.fleet.lifecycle.state import State

    fleet = _demo_fleet(config, folder)
    for tries_left in range(_OTHER_PORTS, -1, -1):
        state = State.of(fleet, folder / "state")
        with _stopped_after(fleet, state) as lifecycle:
            error = _first_error(lifecycle.start(timeout_s=timeout), timeout)
            if error is None:
                yield fleet, state
                return
        if config is not None or not tries_left or not _lost_a_port(fleet, error):
            raise error
        fleet = _elsewhere(fleet, folder)


@contextmanager
def _stopped_after(fleet: Fleet, state: State) -> Iterator[FleetServers]:
    from disagg.cli.views.fleet.progress import Progress
    from disagg.fleet.lifecycle import fleet_servers

    servers = fleet_servers.FleetServers(fleet, state, report=Progress(stderr()).report, grace_s=_GRACE_S)
    try:
        yield servers
    finally:
        with uninterrupted():
            servers.stop()


def _first_error(results: Sequence[ServerResult], timeout: float) -> DisaggError | None:
    """The first host's error. A slow one is not left running here, as its own words would have it."""
    from disagg.errors import FleetError

    for result in results:
        if result.outcome == "slow":
            message = f"{result.host} was not ready after {timeout:g} s; the demo has stopped its servers again"
            return FleetError(message, f"give it longer: disagg demo --timeout {max(180, 2 * timeout):g}")
        if result.error is not None:
            return result.error
    return None


def _lost_a_port(fleet: Fleet, error: DisaggError) -> bool:
    """Whether a start failed for a port that another program has, or had: ours are all stopped."""
    from disagg.errors import PortInUse
    from disagg.fleet.lifecycle.ports import taken_ports

    return isinstance(error, PortInUse) or bool(taken_ports(fleet))


def _elsewhere(fleet: Fleet, folder: Path) -> Fleet:
    """The same fleet, every port one that the kernel chooses."""
    from disagg.fleet.lifecycle.ports import on_free_ports

    stderr().print("another program took a port meanwhile; trying again on other ports", style="dim")
    return on_free_ports(fleet, folder, everywhere=True)[0]


def _compare(fleet: Fleet, state: State, prompt: str, max_tokens: int, live: bool) -> Run:
    import asyncio

    from disagg.demo.comparison import Comparison
    from disagg.fleet.lifecycle.health import poll
    from disagg.inference.client import AsyncClient
    from disagg.inference.several import Answer, ask

    together = [Answer(model) for model in fleet.models]
    by_itself = [Answer(model) for model in fleet.models]
    request = {"prompt": prompt, "max_tokens": max_tokens, "repetition_penalty": _REPETITION_PENALTY}

    async def run() -> float:
        async with AsyncClient(fleet, token=state.token()) as client:
            # One token first: what this program's own first request costs (imports, connections) is not the fleet's.
            await ask(client.stream, warmup := [Answer(model) for model in fleet.models], {**request, "max_tokens": 1})
            _raise_first(warmup)
            with _live(prompt, together, live):
                wall = await ask(client.stream, together, request)
            _raise_first(together)
            for answer in by_itself:
                stderr().print(f"{answer.model} by itself …", style="dim")
                await ask(client.stream, [answer], request)
            _raise_first(by_itself)
            return wall

    wall = asyncio.run(run())
    comparison = Comparison(
        parallel_wall=wall,
        own={answer.model: answer.wall for answer in by_itself},
        completion_tokens=sum(a.completion.metrics.completion_tokens for a in together if a.completion),
        same_text=[answer.text for answer in together] == [answer.text for answer in by_itself],
    )
    return Run(prompt, together, by_itself, comparison, poll(fleet, state.token(), state))


def _raise_first(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


@contextmanager
def _live(prompt: str, answers: Sequence[Answer], wanted: bool) -> Iterator[None]:
    """Panels that fill while the block runs, where there is a terminal to show them."""
    from rich.live import Live

    from disagg.cli.views.stream import LiveView

    console = stdout()
    if not wanted or not console.is_terminal:
        yield
        return
    with Live(LiveView(prompt, answers), console=console, refresh_per_second=12):
        yield


def _show(run: Run, console: Console, answers: bool) -> None:
    """The panels; the answers too where no live panels have shown them."""
    from disagg.cli.views.stream import final_view

    if answers:
        console.print(final_view(run.prompt, run.together, console.width))
    for part in _panels(run, console.width):
        console.print(part)


def _panels(run: Run, width: int) -> list[RenderableType]:
    from disagg.cli.views.fleet.health import health_panel
    from disagg.cli.views.metrics import combined_panel, footnote, model_panel
    from disagg.cli.views.stream import arranged

    models = [model_panel(answer.completion) for answer in run.together if answer.completion]
    models_view = arranged(models, beside=width >= _MODEL_PANEL_WIDTH * len(models))
    return [models_view, combined_panel(run.comparison), health_panel(run.health), footnote()]


def _save_svg(run: Run, path: Path) -> None:
    import io

    from rich.console import Console

    from disagg.errors import UsageError

    console = Console(record=True, file=io.StringIO(), width=_SVG_WIDTH, force_terminal=True, color_system="truecolor")
    _show(run, console, answers=True)
    try:
        console.save_svg(str(path), title="disagg demo")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
