"""The public Python API: `AsyncClient` for asyncio, and `Client`, the same for synchronous code.

async with disagg.AsyncClient("hosts.toml") as client:
    answer = await client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import random
import re
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from disagg.api.events import PromptToken
from disagg.api.sampling import MAX_TOP
from disagg.config import Fleet, Host, load
from disagg.config.hosts_file import find_hosts_file
from disagg.errors import RequestError
from disagg.inference.attempts import execute, question, score
from disagg.inference.attempts.driver import Driver, GenerationRequest, ranking
from disagg.inference.hosts.affinity import prompt_of
from disagg.inference.hosts.route import Ranking, candidates
from disagg.inference.hosts.view import FleetView
from disagg.inference.http.connections import Connections
from disagg.inference.options import RequestOptions, request_body
from disagg.inference.policy import DEFAULT_POLICY, RetryPolicy
from disagg.inference.several import Together, generate_all
from disagg.inference.stream import AsyncStream, Perform, Stream
from disagg.inference.types import Completion, PromptScores, Watch, unwatched
from disagg.token import Tokens

T = TypeVar("T")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{0,47}")  # an attempt's own id follows; hosts take 64 characters
CONNECT_S = 0.5  # for `connect`; a host that takes longer is left to the request


class BaseClient:
    """What both clients share, without their public calls. The coroutines run on the one event loop that has the
    client's connections."""

    def __init__(
        self,
        fleet: Fleet | str | Path | None = None,
        *,
        token: str | None = None,
        policy: RetryPolicy = DEFAULT_POLICY,
        start: int | None = None,
    ) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else load(find_hosts_file(Path(fleet) if fleet else None))
        of_file = token is None and bool(self.fleet.engine_hosts)  # whole-request hosts never get it
        tokens = Tokens.of(self.fleet) if of_file else Tokens(token or "")
        self._keepers = {name: host for name, host in self.fleet.hosts.items() if host.keeps}
        self._driver = Driver(Connections(tokens), policy, self._keepers)
        self._watches: list[ExitStack] = []
        self._process = os.getpid()
        self._start = start
        self._next_start = self._new_start()

    def explain(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Ranking:
        """Which hosts this request would try if it were sent now, best first, and why. Sends nothing."""
        request = self._request(model, prompt, options)
        return ranking(self._driver.view, request, prompt_of(request.body))

    @property
    def view(self) -> FleetView:
        """This client's view of its hosts: which are up, how loaded they are, which fail."""
        return self._driver.view

    @property
    def connections(self) -> Connections:
        """Its connections to hosts, for calls that are not about requests."""
        return self._driver.http

    async def _connect(self, *models: str) -> None:
        names = {self.fleet.model(model).name for model in models} or self.fleet.models.keys()
        hosts = [host for host in self.fleet.served.values() if host.model in names]
        await self._driver.refresher.read(hosts, CONNECT_S)

    async def _load_model(self, model: str) -> Fleet:
        served, driver = self.fleet.model(model).name, self._driver
        hosts = [host for host in self.fleet.served.values() if host.keeper and host.model == served]
        await driver.refresher.read(driver.refresher.stale(hosts), CONNECT_S)
        loaded = await asyncio.gather(*map(driver.loads.ready, hosts), return_exceptions=True)
        for outcome in loaded:
            if isinstance(outcome, BaseException):
                raise outcome
        single = [host for host in self.fleet.hosts.values() if not host.keeps]
        single += [replace(one, keeper="", keeping=None) for one in loaded if isinstance(one, Host)]
        return replace(self.fleet, hosts={host.name: host for host in single})

    async def _count(self, model: str, prompt: str | None, options: RequestOptions) -> int:
        return (await question.count(self._driver, self._request(model, prompt, options))).prompt_tokens

    async def _tokenize(self, model: str, prompt: str | None, options: RequestOptions) -> tuple[PromptToken, ...]:
        found = await question.count(self._driver, self._request(model, prompt, options), list_tokens=True)
        return tuple(PromptToken(id, text) for id, text in zip(found.tokens, found.texts, strict=True))

    async def _score(
        self,
        model: str,
        prompt: str | None,
        top: int,
        options: RequestOptions,
        *,
        watch: Watch = unwatched,
        request_id: str = "",
    ) -> PromptScores:
        if not 0 <= top <= MAX_TOP:
            raise RequestError(f"top: 0 to {MAX_TOP} (got {top!r})")
        _require_request_id(request_id)
        return await score.score(self._driver, self._request(model, prompt, options), top, watch, request_id)

    def _perform(
        self,
        model: str,
        prompt: str | None,
        options: RequestOptions,
        *,
        watch: Watch = unwatched,
        request_id: str = "",
        via: str = "",
    ) -> Perform:
        """The validated request, to be run by a stream."""
        _require_request_id(request_id)
        request = replace(self._request(model, prompt, options), via=via)
        self._next_start = self._new_start()
        return functools.partial(execute.run, self._driver, request, watch=watch, request_id=request_id)

    def _request(self, model: str, prompt: str | None, options: RequestOptions) -> GenerationRequest:
        called = time.monotonic()
        self._require_usable()
        alone, on_kv_failure = options.get("alone"), options.get("on_kv_failure", "fallback")
        if alone not in (None, "decode", "prefill", "whole"):
            raise RequestError(f'alone: "decode", "prefill", "whole" or None (got {alone!r})')
        if on_kv_failure not in ("fallback", "fail"):
            raise RequestError(f'on_kv_failure: "fallback" or "fail" (got {on_kv_failure!r})')
        hosts = candidates(self.fleet, model, alone)
        body = request_body(hosts.model, prompt, options)
        local_prefill = options.get("local_prefill", True)
        if not isinstance(local_prefill, bool):
            raise RequestError(f"local_prefill: True or False (got {local_prefill!r})")
        policy = replace(self._driver.policy, on_kv_failure=on_kv_failure, local_prefill=local_prefill)
        return GenerationRequest(hosts, body, called, policy, self._next_start)

    def _new_start(self) -> int:
        return random.getrandbits(32) if self._start is None else self._start

    @property
    def _forked(self) -> bool:
        """Whether this process is a child of the one that made the client, and so lacks its event loop."""
        return os.getpid() != self._process

    def _require_usable(self) -> None:
        """Raise RequestError if the client is closed, or belongs to the process that this one was forked from."""
        if self._forked:
            raise RequestError("this client was made before the process forked", "make a new one in the child process")
        self._driver.http.require_open()


class AsyncClient(BaseClient):
    """Runs requests on a fleet from asyncio, any number at a time. Close it, or use `async with`. It belongs to the
    event loop of its first request, asyncio's own or uvloop's; trio has none that it runs on.

    fleet: hosts.toml or what it describes; by default the file that $DISAGG_CONFIG names, else ./hosts.toml. token: the
    fleet's secret, by default read from its token file. Raises ConfigError if either is missing or wrong. policy: how
    long requests wait and how often they are tried. start: which of equal hosts gets the requests, counted from the
    first; by default each request begins with another one.
    """

    async def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all, and read their load. No request's time then
        includes it.

        A host that does not answer is not an error here: the request that needs it reports it.
        """
        self._require_usable()
        _require_asyncio()
        await self._connect(*models)

    async def load_model(self, model: str) -> Fleet:
        """Load a model on all of its hosts that load what is asked for, and wait for it. Returns the fleet with hosts
        of this one model in place of those, at the addresses of its processes: for who asks each host by itself."""
        _require_asyncio()
        self._require_usable()
        return await self._load_model(model)

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

    async def tokenize(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> tuple[PromptToken, ...]:
        """The tokens of the prompt of this request, each with its id and the bytes of its text. Given as `tokens`, this
        is how they become text."""
        _require_asyncio()
        return await self._tokenize(model, prompt, options)

    async def score(
        self,
        model: str,
        prompt: str | None = None,
        *,
        top: int = 0,
        watch: Watch = unwatched,
        request_id: str = "",
        **options: Unpack[RequestOptions],
    ) -> PromptScores:
        """The log-probability that the model gives each token of the prompt after those before it. No answer is
        generated. top: the likeliest tokens to report at each place, at most 20. watch, request_id: as of `stream`.
        CapabilityMissing if no host of the model can."""
        _require_asyncio()
        return await self._score(model, prompt, top, options, watch=watch, request_id=request_id)

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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the view of all hosts fresh within the block, which runs on the event loop. Without it, only hosts of
        models in use are asked."""
        watch = ExitStack()
        self._watches.append(watch)
        try:
            watch.enter_context(self._driver.refresher.using(self.fleet.answering_hosts))
            yield
        finally:
            self._watches.remove(watch)
            watch.close()

    def replace_fleet(self, fleet: Fleet) -> None:
        """Use this fleet from the next request on; what runs goes on. It has the same hosts at the same addresses: only
        what it states of models differs, and which of them a host with several has."""
        self.fleet = fleet
        self._keepers.update((name, host) for name, host in fleet.hosts.items() if host.keeps)
        for watch in self._watches:
            watch.close()
            watch.enter_context(self._driver.refresher.using(fleet.answering_hosts))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Client(BaseClient):
    """AsyncClient for synchronous code: the same calls, on an event loop in a thread of its own."""

    def __init__(
        self,
        fleet: Fleet | str | Path | None = None,
        *,
        token: str | None = None,
        policy: RetryPolicy = DEFAULT_POLICY,
        start: int | None = None,
    ) -> None:
        super().__init__(fleet, token=token, policy=policy, start=start)
        self._stack = ExitStack()
        self._portal: BlockingPortal = self._stack.enter_context(
            start_blocking_portal("asyncio", {"use_uvloop": sys.platform != "win32"})
        )
        self._stack.callback(lambda: self._portal.call(self._driver.close))
        # The loop's thread must end before the interpreter does, which would wait for it for ever.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all; see AsyncClient.connect."""
        self._require_usable()
        self._portal.call(self._connect, *models)

    def load_model(self, model: str) -> Fleet:
        """Load a model on all of its hosts that load what is asked for; see AsyncClient.load_model."""
        return self._run(functools.partial(self._load_model, model))

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

    def tokenize(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> tuple[PromptToken, ...]:
        """The tokens of the prompt of this request; see AsyncClient.tokenize."""
        return self._run(functools.partial(self._tokenize, model, prompt, options))

    def score(
        self, model: str, prompt: str | None = None, *, top: int = 0, **options: Unpack[RequestOptions]
    ) -> PromptScores:
        """The log-probability of each token of the prompt; see AsyncClient.score."""
        return self._run(functools.partial(self._score, model, prompt, top, options))

    def stream(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Stream:
        """Send the request; its answer can be read while it arrives. See AsyncClient.stream."""
        return Stream(self._portal, self._perform(model, prompt, options))

    def _open(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> AsyncStream:
        """A stream for the event loop's thread."""
        return AsyncStream(self._perform(model, prompt, options))

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The call's result. Whatever interrupts the wait for it, such as Ctrl-C, cancels it."""
        self._require_usable()
        started = self._portal.start_task_soon(call)
        try:
            result: T = started.result()
            return result
        except BaseException:  # see above
            started.cancel()
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


def _require_request_id(given: str) -> None:
    if not _REQUEST_ID.fullmatch(given):
        raise RequestError(f"request_id: at most 47 of letters, digits and ._- (got {given!r})")


def _require_asyncio() -> None:
    """Raise RequestError if no event loop of asyncio runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RequestError(
            "AsyncClient is called outside of an asyncio event loop",
            "call it from a coroutine that asyncio or uvloop runs, or use Client; trio is not supported",
        ) from None
