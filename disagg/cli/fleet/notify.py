"""`disagg status --notify`: report to a command or a URL when a host goes down and when it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from disagg.cli.common.context import CommandOutput, print_error, settings, stderr, stdout
from disagg.errors import DisaggError, UsageError

if TYPE_CHECKING:
    from disagg.api.host_change import HostChange
    from disagg.config import Fleet
    from disagg.fleet.lifecycle.watch import Notifier

URL_VARIABLE = "DISAGG_WATCH_URL"


def notify_changes(
    context: typer.Context, *, run: str, url: str, misses: int, every: float, timeout: float, as_json: bool
) -> None:
    """Print a line when a host goes down or comes back, until interrupted. run: for sh. misses: readings in a row
    without a healthy answer until a host is down."""
    from disagg.cli.common.process import require_reader
    from disagg.fleet.lifecycle.state import State
    from disagg.fleet.lifecycle.status.ask import diagnose, poll
    from disagg.fleet.lifecycle.watch import FleetWatch, explained
    from disagg.units import counted

    fleet = settings(context).fleet()
    state, names = State.of(fleet), settings(context).names(fleet)
    fleet_watch = FleetWatch(fleet.name, misses)

    def look() -> list[HostChange]:
        token = state.tokens.known
        statuses = {one.host: one for one in poll(fleet, token, state, names, timeout)}
        changes = fleet_watch.update(list(statuses.values()), time.time())
        down = [statuses[change.host] for change in changes if change.change == "down"]
        reasons = {one.host: one for one in diagnose(fleet, down, token, timeout)} if down else {}
        return [explained(change, reasons.get(change.host)) for change in changes]

    notifier = _notifier(fleet, run, url)
    CommandOutput.printed_json = as_json  # stdout has nothing but lines of changes, also if it is interrupted
    count = counted(len(names or fleet.hosts), "host")
    stderr().print(f"watching {count} of {fleet.name} every {every:g} s; Ctrl-C ends", style="dim")
    with notifier:
        for changes in _readings(look, every):
            require_reader()  # now, and not at the next change, which would be lost
            for change in changes:
                _show(change, as_json)
                notifier.send(change)


def _readings(look: Callable[[], list[HostChange]], every: float) -> Iterator[list[HostChange]]:
    """What each look found, without end. An error of this machine, such as of its token, is printed once."""
    last = ""
    while True:
        began = time.monotonic()
        found: list[HostChange] = []
        try:
            found, last = look(), ""
        except DisaggError as error:
            if error.message != last:
                print_error(error)
            last = error.message
        yield found
        time.sleep(max(0.0, every - (time.monotonic() - began)))


def _notifier(fleet: Fleet, run: str, url: str) -> Notifier:
    from disagg.fleet.lifecycle.watch import LineRunner, Notifier, Poster

    deliver: list[Callable[[HostChange], None]] = [LineRunner(fleet, run)] if run else []
    if url:
        poster = Poster(_checked(url))
        poster.check()
        deliver.append(poster)
    return Notifier(deliver, lambda why: print_error(DisaggError(why)))


def _checked(url: str) -> str:
    """UsageError if it is no URL. Its path may be a secret, and is not shown."""
    import httpx

    try:
        parts = httpx.URL(url)
        parts.raw_host.decode().encode("idna")  # as it is looked up: of labels of at most 63 characters
        usable = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 1 << 16
    except (httpx.InvalidURL, ValueError):
        usable = False
    if not usable:
        raise UsageError(f"--url or ${URL_VARIABLE} is not a URL", "as in https://alerts.example/hosts")
    return url


def _show(change: HostChange, as_json: bool) -> None:
    """One line, written at once."""
    if as_json:
        typer.echo(change.to_bytes().decode())
        return
    from disagg.cli.views.health import change_line

    stdout().print(change_line(change), soft_wrap=True)
