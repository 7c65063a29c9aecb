"""The public Python API for asyncio: `AsyncClient`. `Client` is the same for synchronous code.

async with disagg.AsyncClient("hosts.toml") as client:
    answer = await client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

from disagg.config import Fleet, load
from disagg.config.search import find_hosts_file
from disagg.errors import RequestError
from disagg.inference import count
from disagg.inference.attempts import execute
from disagg.inference.hosts.affinity import prompt_of
from disagg.inference.hosts.route import Ranking, candidates
from disagg.inference.hosts.view import FleetView
from disagg.inference.http.connections import Connections
from disagg.inference.options import RequestOptions, request_body
from disagg.inference.several import ModelAnswer, Together, ask_each, figures
from disagg.inference.stream import AsyncStream, Perform
from disagg.inference.types import Completion, Watch, unwatched
from disagg.token import Tokens

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{0,47}")  # an attempt's own id follows; hosts take 64 characters
CONNECT_S = 0.5  # for `connect`; a host that takes longer is left to the request


class AsyncClient:
    """Runs requests on a fleet from asyncio, any number at a time. Close it, or use `async with`.

    fleet: hosts.toml or what it describes; by default the file that $DISAGG_CONFIG names, else ./hosts.toml. token: the
    fleet's secret, by default read from its token file. Raises ConfigError if either is missing or wrong.
    """

    def __init__(self, fleet: Fleet | str | Path | None = None, *, token: str | None = None) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else load(find_hosts_file(Path(fleet) if fleet else None))
        of_file = token is None and bool(self.fleet.engine_hosts)  # whole-request hosts never get it
        tokens = Tokens.of(self.fleet) if of_file else Tokens(token or "")
        self._driver = execute.Driver(Connections(tokens))
        self._process = os.getpid()
        self._next_start = random.getrandbits(32)

    async def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all, and read their load. No request's time then
        includes it.

        A host that does not answer is not an error here: the request that needs it reports it.
        """
        self._require_usable()
        names = {self.fleet.model(model).name for model in models} or self.fleet.models.keys()
        hosts = [host for host in self.fleet.hosts.values() if host.model in names]
        await self._driver.refresher.read(hosts, CONNECT_S)

    def explain(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Ranking:
        """Which hosts this request would try if it were sent now, best first, and why. Sends nothing."""
        request = self._request(model, prompt, options)
        return execute.ranking(self._driver.view, request, prompt_of(request.body))

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
        answers = [ModelAnswer(str(request.get("model", ""))) for request in requests]
        given = [{name: value for name, value in request.items() if name != "model"} for request in requests]
        await ask_each(self.stream, list(zip(answers, given, strict=True)))
        return Together(tuple(answers), figures(answers))

    async def count_tokens(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> int:
        """How many tokens the prompt of this request has. A host tokenises it and computes nothing."""
        return await count.count(self._driver, self._request(model, prompt, options))

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
        sent = self._perform(model, prompt, options, watch=watch, request_id=request_id, via=via)
        return AsyncStream(sent)

    @property
    def view(self) -> FleetView:
        """What this client sees of its hosts: who is up, how loaded, who fails."""
        return self._driver.view

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the view of all hosts fresh within the block, which runs on the event loop. Without it, only hosts of
        models in use are asked."""
        with self._driver.refresher.using(self.fleet.answering_hosts):
            yield

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
        if not _REQUEST_ID.fullmatch(request_id):
            raise RequestError(f"request_id: at most 47 of letters, digits and ._- (got {request_id!r})")
        request = replace(self._request(model, prompt, options), via=via)
        self._next_start = random.getrandbits(32)
        return functools.partial(execute.run, self._driver, request, watch=watch, request_id=request_id)

    def _request(self, model: str, prompt: str | None, options: RequestOptions) -> execute.GenerationRequest:
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
        return execute.GenerationRequest(hosts, body, called, policy, self._next_start)

    def _require_usable(self) -> None:
        """Raise RequestError if the client is closed, or belongs to the process that this one was forked from."""
        if os.getpid() != self._process:
            raise RequestError("this client was made before the process forked", "make a new one in the child process")
        self._driver.http.require_open()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
