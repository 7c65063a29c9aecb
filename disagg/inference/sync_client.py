"""The public Python API for synchronous code: `Client`.

with disagg.Client("hosts.toml") as client:
    answer = client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from disagg.config import Fleet
from disagg.inference.base import BaseClient
from disagg.inference.options import RequestOptions
from disagg.inference.several import Together, generate_all
from disagg.inference.stream import AsyncStream, Stream
from disagg.inference.types import Completion

T = TypeVar("T")


class Client(BaseClient):
    """AsyncClient for synchronous code: the same calls, on an event loop in a thread of its own."""

    def __init__(self, fleet: Fleet | str | Path | None = None, *, token: str | None = None) -> None:
        super().__init__(fleet, token=token)
        self._stack = ExitStack()
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
        self._stack.callback(lambda: self._portal.call(self._driver.close))
        # The loop's thread must end before the interpreter does, which would wait for it for ever.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all; see AsyncClient.connect."""
        self._require_usable()
        self._portal.call(self._connect, *models)

    def generate(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Completion:
        """The whole answer; see AsyncClient.generate."""
        with self.stream(model, prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def generate_all(self, requests: Sequence[Mapping[str, Any]]) -> Together:
        """Send several requests at the same time; see AsyncClient.generate_all."""
        return self._run(functools.partial(generate_all, self._open, requests))

    def count_tokens(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> int:
        """How many tokens the prompt of this request has; see AsyncClient.count_tokens."""
        return self._run(functools.partial(self._count, model, prompt, options))

    def stream(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Stream:
        """Send the request; its answer can be read while it arrives. See AsyncClient.stream."""
        return Stream(self._portal, self._perform(model, prompt, options))

    def _open(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> AsyncStream:
        """A stream for the event loop's thread."""
        return AsyncStream(self._perform(model, prompt, options))

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The call's result. Whatever interrupts the wait for it, such as Ctrl-C, cancels it."""
        self._require_usable()
        running = self._portal.start_task_soon(call)
        try:
            result: T = running.result()
            return result
        except BaseException:  # see above
            running.cancel()
            raise

    def close(self) -> None:
        """Close all connections and stop the event loop. In a forked child there is neither."""
        atexit.unregister(self._at_exit)
        if not self._forked:
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(client: weakref.ref[Client]) -> None:
    if (left_open := client()) is not None:
        left_open.close()
