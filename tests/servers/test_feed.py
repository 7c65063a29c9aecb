"""From an engine's thread to the event loop: one wake-up per step, nothing lost, and what came together
goes out together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from disagg.api.events import FinishReason
from disagg.engines.base import DecodeTiming, Token
from disagg.engines.simulated.model import ByteTokenizer
from disagg.errors import DeadlineExceeded, ModelError
from disagg.servers.answer import Answer, Step
from disagg.servers.feed import Handover, TokenFeed

TIMING = DecodeTiming()
PATIENCE_S = 20.0


def token(letter: str, finish: FinishReason | None = None) -> tuple[Token]:
    return (Token(ord(letter), -0.5, finish=finish),)


def on_a_thread(work: Callable[[], None]) -> None:
    """Run work on a thread of its own, the event loop standing still the while."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def everything(feed: TokenFeed, patience_s: float = PATIENCE_S) -> list[Sequence[Step]]:
    return [came async for came in feed.steps(time.monotonic() + patience_s)]


def ids(came: Sequence[Step]) -> str:
    return "".join(chr(one.id) for tokens, _, _ in came for one in tokens)


@pytest.fixture
async def wakes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every wake-up of the event loop by another thread."""
    loop, counted = asyncio.get_running_loop(), list[None]()
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: counted.append(None) or wake(call))  # type: ignore[func-returns-value]
    return counted


async def test_a_step_wakes_the_event_loop_once_for_all_its_requests(wakes: list[None]) -> None:
    handover = Handover()
    feeds = [TokenFeed(handover) for _ in range(16)]

    def steps() -> None:
        for feed in feeds:
            feed.on_tokens(token("a", "length"), TIMING)
        assert not wakes
        handover.flush()

    on_a_thread(steps)
    assert [ids(came) for feed in feeds for came in await everything(feed)] == ["a"] * 16
    assert len(wakes) == 1


async def test_steps_that_came_while_the_loop_was_busy_come_together_in_one_event(wakes: list[None]) -> None:
    handover = Handover()
    feed, answer = TokenFeed(handover), Answer(ByteTokenizer(256).stream())

    def steps() -> None:
        for letter in "abcd":
            feed.on_tokens(token(letter, "length" if letter == "d" else None), TIMING)
            handover.flush()

    before = time.monotonic()
    on_a_thread(steps)
    ((name, data),) = [event async for event in answer.events(feed.steps(before + PATIENCE_S))]
    assert (name, data["text"], len(data["tokens"])) == ("tokens", "abcd", 4)
    assert (answer.finish_reason, answer.completion_tokens, len(wakes)) == ("length", 4, 1)
    assert before <= answer.first_at < answer.last_at


async def test_tokens_behind_a_stop_string_in_one_event_are_not_part_of_the_answer() -> None:
    answer = Answer(ByteTokenizer(256).stream(["b"]))

    async def steps() -> AsyncIterator[Any]:
        yield [(token(letter), TIMING, float(at)) for at, letter in enumerate("xabcd", 1)]

    ((_, data),) = [event async for event in answer.events(steps())]
    assert (data["text"], answer.finish_reason, answer.completion_tokens, answer.last_at) == ("xa", "stop", 3, 3.0)


async def test_tokens_said_before_an_error_are_heard_before_it(wakes: list[None]) -> None:
    feed, heard = TokenFeed(Handover()), ""

    def steps() -> None:
        feed.on_tokens(token("a"), TIMING)
        feed.on_error(ModelError("it broke"))

    on_a_thread(steps)
    with pytest.raises(ModelError, match="it broke"):
        async for came in feed.steps(time.monotonic() + PATIENCE_S):
            heard += ids(came)
    assert heard == "a" and len(wakes) == 1


async def test_an_answer_that_is_late_ends_with_the_deadline() -> None:
    feed, heard = TokenFeed(Handover()), ""

    def steps() -> None:
        feed.on_tokens(token("a"), TIMING)
        feed.flush()

    on_a_thread(steps)
    with pytest.raises(DeadlineExceeded, match="not complete by the request's deadline"):
        async for came in feed.steps(time.monotonic() + 0.05):
            heard += ids(came)
    assert heard == "a"


async def test_nothing_is_lost_or_reordered_between_a_fast_engine_and_a_listening_loop() -> None:
    handover = Handover()
    feeds, count = [TokenFeed(handover) for _ in range(4)], 3000

    def steps() -> None:
        for index in range(count):
            for feed in feeds:
                feed.on_tokens((Token(index, 0.0, finish="length" if index + 1 == count else None),), TIMING)
            handover.flush()

    engine = threading.Thread(target=steps)
    engine.start()
    for came in await asyncio.gather(*map(everything, feeds)):
        assert [one.id for step in came for tokens, _, _ in step for one in tokens] == list(range(count))
    engine.join()
