"""Several requests at the same time, with answers made up by the test."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from disagg.errors import RequestError, ServerUnavailable
from disagg.inference.client import AsyncClient
from disagg.inference.several import Together
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Completion
from tests.gateway.fake_client import FakeStream, Step


class Made(AsyncClient):
    """Answers by model, without a fleet."""

    def __init__(self, **steps: tuple[Step, ...]) -> None:
        self.steps, self.asked = steps, list[dict[str, Any]]()

    def stream(self, model: str, *arguments: Any, **options: Any) -> AsyncStream:
        if model not in self.steps:
            raise RequestError(f"no model {model!r}")
        self.asked.append({"model": model, **options})
        return cast(AsyncStream, Texts(self.steps[model]))

    def _require_usable(self) -> None:
        pass


class Texts(FakeStream):
    """A stream with the text that has arrived."""

    @property
    def text(self) -> str:
        return "".join(step for step in self._steps if isinstance(step, str))


async def test_requests_of_their_own_run_at_the_same_time_and_keep_their_order() -> None:
    client = Made(slow=(0.05, "late"), fast=("soon",))
    together: Together = await asyncio.wait_for(
        client.generate_all([{"model": "slow", "prompt": "a", "top_p": 0.5}, {"model": "fast", "prompt": "b"}]), 30
    )
    texts = [answer.completion.text if answer.completion else None for answer in together.answers]
    assert texts == ["late", "soon"]
    assert client.asked[0] == {"model": "slow", "prompt": "a", "top_p": 0.5}
    slow, fast = together.answers
    assert together.figures.wall == slow.wall > fast.wall
    assert together.figures.sequential_sum == slow.wall + fast.wall
    assert together.figures.efficiency == pytest.approx((slow.wall + fast.wall) / (2 * slow.wall))


async def test_a_request_that_fails_has_its_error_and_the_others_their_answers() -> None:
    client = Made(ok=("text",), down=("cut ", ServerUnavailable("gone")))
    together = await client.generate_all([{"model": "down"}, {"model": "ok"}, {"model": "none"}, {"prompt": "x"}])
    assert [type(answer.error) for answer in together.answers] == [ServerUnavailable, type(None), *[RequestError] * 2]
    assert isinstance(together.answers[1].completion, Completion)
    assert together.figures.complete == 1 and together.figures.efficiency == 1
