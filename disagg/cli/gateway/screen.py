"""The live screen of `disagg top`: states in, a picture out, keys in between."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

from disagg.api.live import LiveState
from disagg.cli.views.gateway.top import ScreenChoice, keys_of, press, top_view
from disagg.errors import ServerUnavailable

RETRY_S = 1.0

Source = Callable[[], AsyncGenerator[LiveState, None]]


async def run(source: Source, first: LiveState, console: Console, caption: str = "") -> None:
    """Show states until `q`. source: begins anew whenever it ends because the gateway does not answer. caption: stated
    below them."""
    screen = _Screen(first, caption)
    with Live(screen.picture(), console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(screen.picture(), refresh=True)

        def key(text: str) -> None:
            screen.press(text)
            draw()

        with _keys(key):
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
def _keys(pressed: Callable[[str], None]) -> Iterator[None]:
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
