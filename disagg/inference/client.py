"""The public Python API for asyncio: `AsyncClient`. `Client` is the same for synchronous code.

async with disagg.AsyncClient("hosts.toml") as client:
    answer = await client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack

from disagg.errors import RequestError
from disagg.inference.base import BaseClient
from disagg.inference.hosts.view import FleetView
from disagg.inference.options import RequestOptions
from disagg.inference.several import Together, generate_all
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Completion, Watch, unwatched


class AsyncClient(BaseClient):
    """Runs requests on a fleet from asyncio, any number at a time. Close it, or use `async with`. It belongs to the
    event loop of its first request, asyncio's own or uvloop's; trio has none that it runs on.

    fleet: hosts.toml or what it describes; by default the file that $DISAGG_CONFIG names, else ./hosts.toml. token: the
    fleet's secret, by default read from its token file. Raises ConfigError if either is missing or wrong.
    """

    async def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all, and read their load. No request's time then
        includes it.

        A host that does not answer is not an error here: the request that needs it reports it.
        """
        self._require_usable()
        _require_asyncio()
        await self._connect(*models)

    async def generate(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Completion:
        """The whole answer. Raises a DisaggError that says what failed and what to do about it."""
        async with self.stream(model, prompt, **options) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def generate_all(self, requests: Sequence[Mapping[str, Any]]) -> Together:
        """Send several requests at the same time; each has the arguments of `generate`, by name. One that fails has its
        error in its answer, and the others go on."""
        self._require_usable()
        _require_asyncio()
        return await generate_all(self.stream, requests)

    async def count_tokens(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> int:
        """How many tokens the prompt of this request has. A host tokenises it and computes nothing."""
        _require_asyncio()
        return await self._count(model, prompt, options)

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        watch: Watch = unwatched,
        request_id: str = "",
        via: str = "",
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Send the request; its answer can be read while it arrives. Raises RequestError if it is not valid.

        watch: is called on the event loop whenever the request comes to another stage; it must not raise.
        request_id: the beginning of the request's ids in the hosts' logs, at most 47 of letters, digits and `._-`.
        via: the Via header of whole requests, for programs that pass requests on.
        """
        _require_asyncio()
        sent = self._perform(model, prompt, options, watch=watch, request_id=request_id, via=via)
        return AsyncStream(sent)

    @property
    def view(self) -> FleetView:
        """This client's view of its hosts: which are up, how loaded they are, which fail."""
        return self._driver.view

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the view of all hosts fresh within the block, which runs on the event loop. Without it, only hosts of
        models in use are asked."""
        with self._driver.refresher.using(self.fleet.answering_hosts):
            yield

    async def aclose(self) -> None:
        """Close all connections."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _require_asyncio() -> None:
    """Raise RequestError if no event loop of asyncio runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RequestError(
            "AsyncClient is called outside of an asyncio event loop",
            "call it from a coroutine that asyncio or uvloop runs, or use Client; trio is not supported",
        ) from None
