"""disagg/servers/host/feed.py: one wake-up of the event loop per step, nothing lost, steps in their order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from disagg.api.events import FinishReason
from disagg.engines.base import DecodeTiming, Token
from disagg.engines.simulated.model import ByteTokenizer
from disagg.errors import DeadlineExceeded, ModelError
from disagg.servers.host.feed import StepTokens, TokenBridge, TokenFeed
from disagg.servers.output.answer import GrowingAnswer
from disagg.servers.output.part import Plain

TIMING = DecodeTiming()
PATIENCE_S = 60.0


def token(letter: str, finish: FinishReason | None = None) -> tuple[Token]:
    return (Token(ord(letter), -0.5, finish=finish),)


def on_a_thread(work: Callable[[], None]) -> None:
    """Run `work` on another thread while the event loop is blocked."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def all_steps(feed: TokenFeed) -> list[Sequence[StepTokens]]:
    """What each call of `steps` returned, up to the last token."""
    received: list[Sequence[StepTokens]] = []
    while not received or not received[-1][-1].tokens[-1].finish:
        received.append(await feed.steps())
    feed.close()
    return received


def new_feed(bridge: TokenBridge, seconds: float = PATIENCE_S) -> TokenFeed:
    return TokenFeed(bridge, time.monotonic() + seconds)


def text(steps: Sequence[StepTokens]) -> str:
    return "".join(chr(token.id) for step in steps for token in step.tokens)


@pytest.fixture
async def wakes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every wake-up of the event loop by another thread."""
    loop, counted = asyncio.get_running_loop(), list[None]()
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: counted.append(None) or wake(call))  # type: ignore[func-returns-value]  # None, then the call
    return counted


async def test_a_step_wakes_the_event_loop_once_for_all_its_requests(wakes: list[None]) -> None:
    bridge = TokenBridge()
    feeds = [new_feed(bridge) for _ in range(16)]

    def steps() -> None:
        for feed in feeds:
            feed.on_tokens(token("a", "length"), TIMING)
        assert not wakes
        bridge.flush()

    on_a_thread(steps)
    assert [text(steps) for feed in feeds for steps in await all_steps(feed)] == ["a"] * 16
    assert len(wakes) == 1


async def test_steps_that_arrive_while_the_loop_is_busy_become_one_event(wakes: list[None]) -> None:
    bridge = TokenBridge()
    feed, answer = new_feed(bridge), GrowingAnswer(Plain(ByteTokenizer(256).stream()))

    def steps() -> None:
        for letter in "abcd":
            feed.on_tokens(token(letter, "length" if letter == "d" else None), TIMING)
            bridge.flush()

    before = time.monotonic()
    on_a_thread(steps)
    (event,) = answer.add(await feed.steps())
    feed.close()
    assert (event.text, len(event.tokens)) == ("abcd", 4)
    assert (answer.finish_reason, answer.completion_tokens, len(wakes)) == ("length", 4, 1)
    assert before <= answer.first_at < answer.last_at


async def test_tokens_before_an_error_are_received_before_it(wakes: list[None]) -> None:
    feed = new_feed(TokenBridge())

    def steps() -> None:
        feed.on_tokens(token("a"), TIMING)
        feed.on_error(ModelError("it broke"))

    on_a_thread(steps)
    assert text(await feed.steps()) == "a"
    with pytest.raises(ModelError, match="it broke"):
        await feed.steps()
    feed.close()
    assert len(wakes) == 1


async def test_an_answer_that_is_late_ends_with_the_deadline() -> None:
    feed = new_feed(TokenBridge(), 0.3)

    def steps() -> None:
        feed.on_tokens(token("a"), TIMING)
        feed.flush()

    on_a_thread(steps)
    assert text(await feed.steps()) == "a"
    with pytest.raises(DeadlineExceeded, match="not complete by the request's deadline"):
        await feed.steps()


async def test_nothing_is_lost_or_reordered_between_a_fast_engine_and_the_event_loop() -> None:
    bridge = TokenBridge()
    feeds, count = [new_feed(bridge) for _ in range(4)], 3000

    def steps() -> None:
        for index in range(count):
            for feed in feeds:
                feed.on_tokens((Token(index, 0.0, finish="length" if index + 1 == count else None),), TIMING)
            bridge.flush()

    engine = threading.Thread(target=steps)
    engine.start()
    for received in await asyncio.gather(*map(all_steps, feeds)):
        assert [token.id for steps in received for step in steps for token in step.tokens] == list(range(count))
    engine.join()
