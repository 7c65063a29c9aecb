"""The public Python API: `Client` and `AsyncClient`.

with disagg.Client("hosts.toml") as client:
    answer = client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from disagg.api.base import InvalidValue, bounds
from disagg.api.requests import GenerateBody, Messages
from disagg.api.sampling import Sampling
from disagg.config import Fleet, Host, load
from disagg.config.search import find_hosts_file
from disagg.errors import DisaggError, RequestError
from disagg.inference import execute, http
from disagg.inference.route import Alone, Router
from disagg.inference.stream import AsyncStream, Perform, Stream
from disagg.inference.types import Completion
from disagg.token import fleet_token

CONNECT_S = 0.5  # for `connect`; a host that takes longer is left to the request


class GenerateOptions(TypedDict, total=False):
    """The options of a request: those of `disagg.api.Sampling`, with its defaults and bounds, and two more.

    stop: one string or several. alone: "decode" or "prefill" runs the request on one host of that role, without a
    hand-off; None by default. timeout: seconds until the request must have ended; 600 by default.
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
    """Runs requests on a fleet from asyncio, any number at a time. Close it, or use `async with`.

    fleet: hosts.toml or what it describes; by default the file that $DISAGG_CONFIG names, else ./hosts.toml. token: the
    fleet's secret, by default read from its token file. Raises ConfigError if either is missing or wrong.
    """

    def __init__(self, fleet: Fleet | str | Path | None = None, *, token: str | None = None) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else load(find_hosts_file(Path(fleet) if fleet else None))
        self._router = Router(self.fleet)
        self._http = http.client(token if token is not None else fleet_token(self.fleet))

    async def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all, so that no request's time includes it.

        A host that does not answer is not an error here: the request that needs it reports it.
        """
        http.require_open(self._http)
        names = {self.fleet.model(model).name for model in models} or self.fleet.models.keys()
        hosts = [host for host in self.fleet.hosts.values() if host.model in names]

        async def open_connection(host: Host) -> None:
            with suppress(DisaggError):
                await http.get(self._http, host, "/health", timeout=CONNECT_S)

        await asyncio.gather(*map(open_connection, hosts))

    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer. Raises a DisaggError that says what failed and what to do about it."""
        async with self.stream(model, prompt, messages=messages, tokens=tokens, **options) as stream:
            async for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Send the request; its answer can be read while it arrives. Raises RequestError if it is not valid."""
        http.require_open(self._http)
        return AsyncStream(self._perform(model, prompt, messages, tokens, options))

    def _perform(
        self,
        model: str,
        prompt: str | None,
        messages: Messages | None,
        tokens: Sequence[int] | None,
        options: GenerateOptions,
    ) -> Perform:
        """The validated request, to be run by a stream."""
        called = time.monotonic()
        alone = options.get("alone")
        if alone not in (None, "decode", "prefill"):
            raise RequestError(f'alone: "decode", "prefill" or None (got {alone!r})')
        route = self._router.route(model, alone)
        body = _body(route.model, {"prompt": prompt, "messages": messages, "tokens": tokens}, options)
        return functools.partial(execute.run, self._http, execute.Request(route, body, called))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Client:
    """AsyncClient for synchronous code: the same calls, on an event loop in a thread of its own."""

    def __init__(self, fleet: Fleet | str | Path | None = None, *, token: str | None = None) -> None:
        self._async = AsyncClient(fleet, token=token)
        self.fleet = self._async.fleet
        self._stack = ExitStack()
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
        self._stack.callback(lambda: self._portal.call(self._async.aclose))

    def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all; see AsyncClient.connect."""
        http.require_open(self._async._http)
        self._portal.call(self._async.connect, *models)

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
        with self.stream(model, prompt, messages=messages, tokens=tokens, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Send the request; its answer can be read while it arrives. See AsyncClient.stream."""
        http.require_open(self._async._http)
        return Stream(self._portal, self._async._perform(model, prompt, messages, tokens, options))

    def close(self) -> None:
        """Close all connections and stop the event loop."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _body(model: str, prompt: Mapping[str, Any], options: GenerateOptions) -> GenerateBody:
    """The request's body; RequestError names the option that is wrong."""
    fields: dict[str, Any] = {"model": model}
    fields |= {name: _as_json(value) for name, value in prompt.items() if value is not None}
    fields["sampling"] = {k: _as_json(v) for k, v in options.items() if k not in ("alone", "timeout")}
    if isinstance(stop := fields["sampling"].get("stop"), str):
        fields["sampling"]["stop"] = [stop]
    if "timeout" in options:
        fields["deadline_s"] = _as_json(options["timeout"])
    try:
        body = GenerateBody.from_json(fields)
        msgspec.json.encode(body)
    except InvalidValue as error:
        message = str(error).removeprefix("sampling.").replace("deadline_s:", "timeout:", 1)
        raise RequestError(message, _option_hint(message)) from None
    except UnicodeEncodeError as error:  # such as a file name that a shell passed on
        raise RequestError(f"the request holds text that is not Unicode: {error.reason}") from None
    return body


def _option_hint(message: str) -> str:
    """The range of the option that the message of a validation error begins with; all names if it is unknown."""
    option, _, reason = message.partition(": ")
    known = GenerateOptions.__annotations__
    if reason == "unknown field":
        return f"the options are {', '.join(known)}"
    if option not in (*Sampling.__struct_fields__, "timeout"):
        return ""
    kind, field = (GenerateBody, "deadline_s") if option == "timeout" else (Sampling, option)
    text = bounds(kind, field).text
    return f"{option}: {text}" if text else ""


def _as_json(value: object) -> object:
    """Any sequence as a list and any kind of float, such as numpy's, as a float. Validation does the rest."""
    if isinstance(value, float):
        return float(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
