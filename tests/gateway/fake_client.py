"""AsyncClient's part of what the gateway uses, with answers made up by the test; and the application around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self, cast

import httpx
from starlette.types import ASGIApp

from disagg.api.events import PromptToken, TokenLogprob
from disagg.api.status import Load
from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import RequestError
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.clients.origins import Origins
from disagg.gateway.health import GatewayHealth
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.view import UNKNOWN, FleetView
from disagg.inference.metrics import Metrics, TTFTParts
from disagg.inference.types import Chunk, Completion, PromptScores, Stage, Watch

Step = str | Exception | float | asyncio.Barrier
"""What a fake answer does next: one token of text, an error, so many seconds of nothing, or waiting at a barrier."""


def completion(text: str, *, prompt_tokens: int = 5, held_tokens: int = 0, **fields: Any) -> Completion:
    """A finished answer, one token per word."""
    tokens = tokens_of(text)
    metrics = Metrics(
        method="disaggregated",
        model="m",
        prefill_server="m-prefill",
        decode_server="m-decode",
        prompt_tokens=prompt_tokens,
        completion_tokens=len(tokens),
        total_tokens=prompt_tokens + len(tokens),
        prefill_time=0.2,
        decode_time=0.1,
        total_time=0.5,
        prefill_speed=25.0,
        decode_speed=20.0,
        ttft=0.4,
        ttft_parts=TTFTParts(prefill=0.2, network=0.2),
        hidden_transfer=0.1,
        exposed_transfer=0.0,
        kv_bytes=1000,
        decode_computed_tokens=1,
        held_tokens=held_tokens,
    )
    return Completion(text, tokens, fields.pop("finish_reason", "stop"), metrics, **fields)


def tokens_of(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(number, -0.5, ((number, -0.5), (99, -2.0))) for number, _ in enumerate(text.split()))


SCORED = (
    PromptToken(7, b"H"),
    PromptToken(8, b"\xc3", -1.5, 2, ((9, -1.0), (7, -2.0)), (b"i", b"H")),
    PromptToken(10, b"\xa4y", -0.25, 1, ((10, -0.25), (9, -3.0)), (b"\xa4y", b"i")),
)
"""What every prompt is found to be."""


class FakeStream:
    """One answer: the steps in turn."""

    close_s = 0.0
    """How long closing it takes."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = steps
        self.closed = False
        self.completion = completion("".join(step for step in steps if isinstance(step, str)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(self.close_s)
        self.closed = True

    def waiting(self) -> list[Chunk]:
        return []

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                yield Chunk(step, tokens_of(step))
            elif isinstance(step, asyncio.Barrier):
                await step.wait()
            else:
                await asyncio.sleep(step)


class FakeClient:
    """Answers every request with the same steps, and remembers what it was asked."""

    def __init__(self, *steps: Step) -> None:
        models = [Model("m", {}, 4096, ("alias-of-m",)), Model("other", {}, 2048)]
        host = Host("m-decode", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 1)
        self.fleet = Fleet("test", Path("hosts.toml"), {model.name: model for model in models}, {host.name: host})
        self.view = FleetView({host.name: UNKNOWN.answered(Load("ok", boot_id="1", fingerprint="c0ffee"))})
        self.steps = steps
        self.asked: list[dict[str, Any]] = []
        self.streams: list[FakeStream] = []
        self.stages = [Stage("prefill", "disaggregated", "m-prefill", "m-decode", prompt_tokens=5)]

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, *, watch: Watch, request_id: str, via: str, **arguments: Any) -> FakeStream:
        if arguments.get("top_p") == 2:
            raise RequestError("top_p: over 0, at most 1 (got 2)")
        self.asked.append(arguments)
        for stage in self.stages:
            watch(stage)
        self.streams.append(FakeStream(self.steps))
        return self.streams[-1]

    async def score(self, *, watch: Watch, request_id: str, **arguments: Any) -> PromptScores:
        self.asked.append(arguments)
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
        return PromptScores(SCORED, completion("", prompt_tokens=len(SCORED)).metrics)

    async def count_tokens(self, **arguments: Any) -> int:
        self.asked.append(arguments)
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
        return 42

    async def tokenize(self, **arguments: Any) -> tuple[PromptToken, ...]:
        await self.count_tokens(**arguments)
        given = arguments.get("tokens") or range(2)
        return tuple(PromptToken(token, f"t{token} ".encode()) for token in given)


NO_KEYS = Path("/nonexistent/keys.json")


def app(
    client: FakeClient,
    keys: Path = NO_KEYS,
    watch: GatewayWatch | None = None,
    origins: Collection[str] = (),
    **bounds: Any,
) -> ASGIApp:
    """The gateway in front of this client, for programs of this machine. origins: of pages that may ask it. bounds: see
    `build`."""
    fake = cast(AsyncClient, client)
    access = Access(KeyRing(KeyFile(keys)), public=False, origins=Origins(origins))
    return build(fake, access, GatewayHealth(fake), watch, **bounds)


def http(application: ASGIApp, **headers: str) -> httpx.AsyncClient:
    """An HTTP client that calls the application without a socket."""
    transport = httpx.ASGITransport(application)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", headers=headers)
