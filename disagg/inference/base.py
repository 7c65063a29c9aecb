"""What `AsyncClient` and `Client` share: the fleet, the connections to its hosts, and the checks of a request."""

from __future__ import annotations

import functools
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from disagg.config import Fleet, load
from disagg.config.search import find_hosts_file
from disagg.errors import RequestError
from disagg.inference import count
from disagg.inference.attempts import execute
from disagg.inference.hosts.affinity import prompt_of
from disagg.inference.hosts.route import Ranking, candidates
from disagg.inference.http.connections import Connections
from disagg.inference.options import RequestOptions, request_body
from disagg.inference.stream import Perform
from disagg.inference.types import Watch, unwatched
from disagg.token import Tokens

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{0,47}")  # an attempt's own id follows; hosts take 64 characters
CONNECT_S = 0.5  # for `connect`; a host that takes longer is left to the request


class BaseClient:
    """A client without its public calls. The coroutines run on the one event loop that has the client's connections."""

    def __init__(self, fleet: Fleet | str | Path | None = None, *, token: str | None = None) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else load(find_hosts_file(Path(fleet) if fleet else None))
        of_file = token is None and bool(self.fleet.engine_hosts)  # whole-request hosts never get it
        tokens = Tokens.of(self.fleet) if of_file else Tokens(token or "")
        self._driver = execute.Driver(Connections(tokens))
        self._process = os.getpid()
        self._next_start = random.getrandbits(32)

    def explain(self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Ranking:
        """Which hosts this request would try if it were sent now, best first, and why. Sends nothing."""
        request = self._request(model, prompt, options)
        return execute.ranking(self._driver.view, request, prompt_of(request.body))

    async def _connect(self, *models: str) -> None:
        names = {self.fleet.model(model).name for model in models} or self.fleet.models.keys()
        hosts = [host for host in self.fleet.hosts.values() if host.model in names]
        await self._driver.refresher.read(hosts, CONNECT_S)

    async def _count(self, model: str, prompt: str | None, options: RequestOptions) -> int:
        return await count.count(self._driver, self._request(model, prompt, options))

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

    @property
    def _forked(self) -> bool:
        """Whether this process is a child of the one that made the client, and so lacks its event loop."""
        return os.getpid() != self._process

    def _require_usable(self) -> None:
        """Raise RequestError if the client is closed, or belongs to the process that this one was forked from."""
        if self._forked:
            raise RequestError("this client was made before the process forked", "make a new one in the child process")
        self._driver.http.require_open()
