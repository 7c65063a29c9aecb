"""`disagg top`: what the fleet is doing now, in the terminal; keys change what is shown."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from disagg.api.gateway import LiveState
from disagg.cli.common.context import print_json, settings, stdout
from disagg.cli.common.options import AsJson
from disagg.cli.gateway.picture import ScreenChoice, keys_of, press, top_view
from disagg.errors import ConfigError, ServerUnavailable, UsageError

GATEWAY = "http://127.0.0.1:8080"
RETRY_S = 1.0
Source = Callable[[], AsyncGenerator[LiveState, None]]


def top(
    context: typer.Context,
    *,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help=f"The gateway. Default: {GATEWAY}, if one answers there.")
    ] = None,
    hosts: Annotated[bool, typer.Option("--hosts", help="Read the hosts themselves, not a gateway.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show live what the fleet is doing: requests in their phase, models and hosts.

    Under a host that is down stands the command that helps. Reads the gateway (a key, if it needs one, from
    $DISAGG_API_KEY; one of `disagg keys add --monitor` sees the requests of all keys). Without --url, and if none
    answers, it reads the hosts of hosts.toml, which do not tell one request from another, and states so. Keys: s sorts,
    m shows one model after the other, d one part, space stops the picture, q ends. Without a terminal, and with --json,
    it shows the present state once.
    """
    if hosts and url is not None:
        raise UsageError("--hosts and --url: which one is to be read?", "give one of them")
    console, gateway = stdout(), full_url(url or GATEWAY)
    asked = "asking the hosts" if hosts else f"asking {gateway}"
    waiting = console.status(asked) if console.is_terminal and not as_json else nullcontext()
    with waiting:
        source, state, caption = asyncio.run(_source(context, gateway, hosts=hosts, only=url is not None))
    if as_json:
        print_json(state.to_json())
    elif not console.is_terminal:
        console.print(top_view(state, ScreenChoice(), caption, keys=False))
    else:
        asyncio.run(follow_states(source, state, console, caption))


def full_url(url: str) -> str:
    """A URL that was typed without its scheme is of http. UsageError if it is of another than http and https."""
    full = url if "://" in url else f"http://{url}"
    if not full.lower().startswith(("http://", "https://")):
        raise UsageError(f"--url: {url} is not a URL of a gateway", "it begins with http:// or https://")
    return full


async def _source(context: typer.Context, url: str, *, hosts: bool, only: bool) -> tuple[Source, LiveState, str]:
    """Where states come from, the first one, and why they are not the gateway's if one was to be asked. only: no other
    gateway and no host is read instead."""
    from disagg.gateway.endpoints import KEY_VARIABLE
    from disagg.gateway.follow import gateway_states, host_states

    caption, gateway = "", partial(gateway_states, url, os.environ.get(KEY_VARIABLE))
    if not hosts:
        try:
            return gateway, await _first(gateway), caption
        except ServerUnavailable as error:
            if only:
                raise
            try:
                fleet = settings(context).fleet()
            except ConfigError:
                raise error from None
            caption = f"{error.message}: these are the hosts' own figures"
    else:
        fleet = settings(context).fleet()
    alone = partial(host_states, fleet)
    return alone, await _first(alone), caption


async def _first(source: Source) -> LiveState:
    states = source()
    try:
        return await anext(states)
    finally:
        await states.aclose()


async def follow_states(source: Source, first: LiveState, console: Console, caption: str = "") -> None:
    """Show states until `q`. source: begins anew whenever it ends because the gateway does not answer. caption: stated
    below them."""
    screen = _Screen(first, caption)
    with Live(screen.picture(), console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(screen.picture(), refresh=True)

        def key(text: str) -> None:
            screen.press(text)
            draw()

        with _pressed_keys(key):
            following = asyncio.ensure_future(_follow(source, screen, draw))
            ended = asyncio.ensure_future(screen.ended.wait())
            try:
                await asyncio.wait((following, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                following.cancel()
                ended.cancel()
                await asyncio.wait((following, ended))
        if not following.cancelled():
            following.result()


class _Screen:
    """What is on the screen."""

    def __init__(self, state: LiveState, caption: str = "") -> None:
        self.ended = asyncio.Event()
        self._state, self._shown, self._note, self._caption = state, ScreenChoice(), "", caption

    def take(self, state: LiveState) -> None:
        if not self._shown.paused:
            self._state, self._note = state, ""

    def warn(self, note: str) -> None:
        self._note = note

    def press(self, text: str) -> None:
        for key in keys_of(text):
            shown = press(self._shown, key, self._state)
            if shown is None:
                self.ended.set()
                return
            self._shown = shown

    def picture(self) -> RenderableType:
        return top_view(self._state, self._shown, self._note or self._caption)


async def _follow(source: Source, screen: _Screen, draw: Callable[[], None]) -> None:
    while True:
        try:
            async with aclosing(source()) as states:
                async for state in states:
                    screen.take(state)
                    draw()
        except ServerUnavailable as error:
            screen.warn(error.message)
            draw()
            await asyncio.sleep(RETRY_S)


@contextmanager
def _pressed_keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` with the keys that are pressed within the block, each at once. Nothing without a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: pressed(os.read(descriptor, 64).decode(errors="ignore")))
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
