"""The public Python API: `Client` and `AsyncClient`.

with disagg.Client("hosts.toml") as client:
    answer = client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from disagg.api.requests import Messages
from disagg.config import Fleet, load
from disagg.errors import RequestError
from disagg.inference import execute, http
from disagg.inference.execute import Alone
from disagg.inference.route import Router
from disagg.inference.types import Chunk, Completion
from disagg.token import fleet_token


class GenerateOptions(TypedDict, total=False):
    """What a request may say besides its prompt; the defaults are in brackets.

    max_tokens [256]; temperature [0: greedy]; top_p [1]; top_k [0: off]; min_p [0]; repetition_penalty [1];
    seed [None]; stop [()]: strings that end the answer; logprobs [None]: alternatives to report per token;
    ignore_eos [False]; alone [None]: "decode" or "prefill" to run on that host without a hand-off;
    timeout [600]: seconds until the request must have ended.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    logprobs: int | None
    ignore_eos: bool
    alone: Alone | None
    timeout: float


class AsyncClient:
    """Runs requests on a fleet from asyncio. Several may run at once. Close it, or use `async with`."""

    def __init__(self, fleet: Fleet | str | Path, *, token: str | None = None) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else load(Path(fleet))
        self._router = Router(self.fleet)
        self._http = http.client(token if token is not None else fleet_token(self.fleet))

    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer. Raises a DisaggError that says what failed and how to fix it."""
        async with aclosing(self.stream(model, prompt, messages=messages, tokens=tokens, **options)) as answer:
            async for item in answer:
                if isinstance(item, Completion):
                    return item
        raise AssertionError("a stream ends with its Completion")

    async def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Chunk | Completion, None]:
        """Chunks as the fleet produces them, then the Completion. Closing the stream cancels the request."""
        route = self._router.route(model)
        request, alone = _request(prompt, messages, tokens, options)
        async with aclosing(execute.run(self._http, route, request, alone)) as answer:
            async for item in answer:
                yield item

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Client:
    """AsyncClient for synchronous code: the same calls, on an event loop in a thread of its own."""

    def __init__(self, fleet: Fleet | str | Path, *, token: str | None = None) -> None:
        self._async = AsyncClient(fleet, token=token)
        self.fleet = self._async.fleet
        self._stack = ExitStack()
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
        self._stack.callback(lambda: self._portal.call(self._async.aclose))

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer; see AsyncClient.generate."""
        answer = self.stream(model, prompt, messages=messages, tokens=tokens, **options)
        return next(item for item in answer if isinstance(item, Completion))

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Chunk | Completion]:
        """Chunks, then the Completion; see AsyncClient.stream."""
        arrived: SimpleQueue[Chunk | Completion | Exception | None] = SimpleQueue()

        async def pump() -> None:
            try:
                answer = self._async.stream(model, prompt, messages=messages, tokens=tokens, **options)
                async with aclosing(answer):
                    async for item in answer:
                        arrived.put(item)
                arrived.put(None)
            except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
                arrived.put(error)

        # One task for the whole answer, and a plain queue to wait on: wherever Ctrl-C finds this thread, the task ends.
        running = self._portal.start_task_soon(pump)
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            running.cancel()

    def close(self) -> None:
        """Close all connections and stop the event loop."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _request(
    prompt: str | None, messages: Messages | None, tokens: Sequence[int] | None, options: GenerateOptions
) -> tuple[execute.Request, Alone | None]:
    given: dict[str, Any] = {"prompt": prompt, "messages": messages, "tokens": tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise RequestError("give exactly one of prompt, messages and tokens")
    alone = options.get("alone")
    if alone not in (None, "decode", "prefill"):
        raise RequestError(f'alone is "decode", "prefill" or None, not {alone!r}')
    sampling: dict[str, Any] = {k: v for k, v in options.items() if k not in ("alone", "timeout")}
    if isinstance(stop := sampling.get("stop", ()), str):
        sampling["stop"] = [stop]
    elif stop:
        sampling["stop"] = list(stop)
    try:
        json.dumps([given, sampling], allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # also text that is no Unicode, as a shell can pass on
        raise RequestError(f"the request holds a value that cannot be sent: {error}") from None
    return execute.Request(given, sampling, options.get("timeout", 600.0)), alone
