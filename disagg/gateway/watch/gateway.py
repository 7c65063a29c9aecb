"""The observers of one gateway: metrics, live view and history, and what they are read from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest

from disagg.api.base import without_value
from disagg.api.gateway import LiveHost
from disagg.gateway.watch.board import Board, contexts
from disagg.gateway.watch.feed import Feed, FeedBounds
from disagg.gateway.watch.host_metrics import LiveCollector
from disagg.gateway.watch.hosts import live_hosts
from disagg.gateway.watch.metrics import HarmfulRequests, RequestMetrics
from disagg.gateway.watch.recorder import Recorder
from disagg.gateway.watch.request import ObservedRequest, Observer, Observers
from disagg.inference.client import AsyncClient

log = logging.getLogger("disagg.gateway")

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class GatewayWatch:
    """Everything that watches the requests of one gateway. recorder: None if finished requests are not recorded.

    keep_text: whether the history has prompts and answers.
    """

    def __init__(
        self,
        client: AsyncClient,
        recorder: Recorder | None = None,
        *,
        keep_text: bool = False,
        feed: FeedBounds = FeedBounds(),  # noqa: B008 - frozen
    ) -> None:
        self._client = client
        self.recorder = recorder
        self._registry = CollectorRegistry()
        models = tuple(client.fleet.models)
        self.board = Board(client.fleet.name, contexts(client.fleet))
        self.feed = Feed(self.board, self.hosts, feed)
        self._registry.register(LiveCollector(lambda: client.fleet.models, self.hosts, self.board.requests))
        harmful = HarmfulRequests()
        self._of_keys = CollectorRegistry()
        self._of_keys.register(harmful)
        self._of_requests = RequestMetrics(self._registry, models, harmful)
        watching: list[Observer] = [self._of_requests, self.board, RequestLog()]
        self.observers = Observers(
            [*watching, recorder] if recorder else watching,
            recorder.settle if recorder else None,
            keep_text=keep_text,
        )

    def hosts(self) -> tuple[LiveHost, ...]:
        """The hosts as the client sees them now."""
        return live_hosts(self._client.fleet, self._client.view, time.monotonic())

    def read_models(self) -> None:
        """Show the models that the client's fleet has now."""
        models = contexts(self._client.fleet)
        self.board.lists(models)
        self._of_requests.begin(models)

    def metrics(self, *, of_keys: bool = False) -> bytes:
        """The figures in Prometheus' text format. of_keys: with those that name keys and their requests."""
        figures = bytes(generate_latest(self._registry))
        return figures + bytes(generate_latest(self._of_keys)) if of_keys else figures

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Within the block the view of the hosts is kept fresh, and the plots get their points."""
        sampling = asyncio.ensure_future(self.feed.sample())
        try:
            with self._client.watching():
                yield
        finally:
            self.feed.stop()
            await sampling
            if self.recorder is not None:
                await asyncio.to_thread(self.recorder.close)


class RequestLog(Observer):
    """One line of log about each request that has ended, with none of its text."""

    def ended(self, request: ObservedRequest) -> None:
        head, problem = request.head, request.problem
        fields = {
            "request_id": head.request_id,
            "key": request.key,
            "api": request.api,
            "model": head.model,
            "state": request.state,
            "prompt_tokens": request.prompt_tokens,
            "tokens": request.tokens,
            "seconds": round(time.time() - head.created, 3),
            "error_code": (problem.code or str(problem.status)) if problem else None,
            "error": without_value(problem.message) if problem else None,
        }
        log.info(
            "request_ended", extra={"fields": {name: value for name, value in fields.items() if value is not None}}
        )
