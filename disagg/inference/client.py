"""The public Python API: `Client` and `AsyncClient`.

with disagg.Client("hosts.toml") as client:
    answer = client.generate("qwen", "def fibonacci(n):", max_tokens=64)
    print(answer.text, answer.metrics.ttft)
"""

from __future__ import annotations

import functools
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from disagg.api.base import InvalidValue, bounds
from disagg.api.requests import GenerateBody, Messages
from disagg.api.sampling import Sampling
from disagg.config import Fleet, load
from disagg.config.search import find_hosts_file
from disagg.errors import RequestError
from disagg.inference import count
from disagg.inference.attempts import execute
from disagg.inference.hosts.affinity import prompt_of
from disagg.inference.hosts.route import Alone, Ranking, candidates
from disagg.inference.hosts.view import FleetView
from disagg.inference.http.connections import Connections
from disagg.inference.policy import OnKVFailure
from disagg.inference.several import ModelAnswer, Together, ask_each, figures
from disagg.inference.stream import AsyncStream, Perform, Stream
from disagg.inference.types import Completion, Watch, unwatched
from disagg.token import fleet_token

T = TypeVar("T")
_OF_THE_BODY = ("cache_salt", "tools", "must_call", "json_schema", "chat_template_kwargs", "hold_prompt")
_NOT_SAMPLING = ("alone", "timeout", "on_kv_failure", "local_prefill", *_OF_THE_BODY)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{0,47}")  # an attempt's own id follows; hosts take 64 characters
CONNECT_S = 0.5  # for `connect`; a host that takes longer is left to the request


class GenerateOptions(TypedDict, total=False):
    """The options of a request: those of `disagg.api.Sampling`, with its defaults and bounds, and eleven more.

    stop: one string or several. logit_bias: token id -> number, or pairs of both. alone: "decode" or "prefill" runs the
    request on one host of that role, without a hand-off, "whole" on a whole-request host; None by default. timeout:
    seconds until the request must have ended; 600 by default. on_kv_failure: what follows if no prefill host delivers
    the KV: "fallback", the default, lets the decode host compute the prompt, "fail" raises a HandoffError.
    local_prefill: whether the decode host may compute a short prompt itself if that takes less time than a hand-off;
    True by default. cache_salt: only requests with the same salt share KV that hosts hold; "" by default.

    The rest are fields of `disagg.api.GenerateBody`. tools: each {"name", "description", "parameters"}. must_call:
    names of tools, one of which the answer calls. json_schema: the answer is JSON that fits it. chat_template_kwargs:
    further variables of the chat template. hold_prompt: more answers to this prompt follow.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    logprobs: int | None
    fit_context: bool
    ignore_eos: bool
    alone: Alone | None
    timeout: float
    on_kv_failure: OnKVFailure
    local_prefill: bool
    cache_salt: str
    tools: Sequence[Mapping[str, Any]]
    must_call: Sequence[str]
    json_schema: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any]
    hold_prompt: bool


class AsyncClient:
    """Runs requests on a fleet from asyncio, any number at a time. Close it, or use `async with`.

    fleet: hosts.toml or what it describes; by default the file that $DISAGG_CONFIG names, else ./hosts.toml. token: the
    fleet's secret, by default read from its token file. Raises ConfigError if either is missing or wrong.
    """

    def __init__(self, fleet: Fleet | str | Path | None = None, *, token: str | None = None) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else load(find_hosts_file(Path(fleet) if fleet else None))
        if token is None:  # whole-request hosts never get it
            token = fleet_token(self.fleet) if self.fleet.engine_hosts else ""
        self._driver = execute.Driver(Connections(token))
        self._process = os.getpid()
        self._next_start = random.getrandbits(32)

    async def connect(self, *models: str) -> None:
        """Open connections to the hosts of these models, or of all, and read how loaded they are, so that no request's
        time includes it.

        A host that does not answer is not an error here: the request that needs it reports it.
        """
        self._require_usable()
        names = {self.fleet.model(model).name for model in models} or self.fleet.models.keys()
        hosts = [host for host in self.fleet.hosts.values() if host.model in names]
        await self._driver.refresher.read(hosts, CONNECT_S)

    def explain(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Ranking:
        """Which hosts this request would try if it were sent now, best first, and why. Sends nothing."""
        request = self._request(model, prompt, messages, tokens, options)
        return execute.ranking(self._driver.view, request, prompt_of(request.body))

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

    async def generate_all(self, requests: Sequence[Mapping[str, Any]]) -> Together:
        """Send several requests at the same time; each has the arguments of `generate`, by name. One that fails has its
        error in its answer, and the others go on."""
        self._require_usable()
        answers = [ModelAnswer(str(request.get("model", ""))) for request in requests]
        given = [{name: value for name, value in request.items() if name != "model"} for request in requests]
        await ask_each(self.stream, list(zip(answers, given, strict=True)))
        return Together(tuple(answers), figures(answers))

    async def count_tokens(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> int:
        """How many tokens the prompt of this request has. A host tokenises it and computes nothing."""
        return await count.count(self._driver, self._request(model, prompt, messages, tokens, options))

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        watch: Watch = unwatched,
        request_id: str = "",
        via: str = "",
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Send the request; its answer can be read while it arrives. Raises RequestError if it is not valid.

        watch: is called on the event loop whenever the request comes to another stage; it must not raise.
        request_id: the beginning of the request's ids in the hosts' logs, at most 47 of letters, digits and `._-`.
        via: the Via header of whole requests, for programs that pass requests on.
        """
        sent = self._perform(model, prompt, messages, tokens, options, watch=watch, request_id=request_id, via=via)
        return AsyncStream(sent)

    @property
    def view(self) -> FleetView:
        """What this client sees of its hosts: who is up, how loaded, who fails."""
        return self._driver.view

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the view of all hosts fresh within the block, which runs on the event loop; without, only hosts of
        models in use are asked."""
        with self._driver.refresher.using(self.fleet.answering_hosts):
            yield

    def _perform(
        self,
        model: str,
        prompt: str | None,
        messages: Messages | None,
        tokens: Sequence[int] | None,
        options: GenerateOptions,
        *,
        watch: Watch = unwatched,
        request_id: str = "",
        via: str = "",
    ) -> Perform:
        """The validated request, to be run by a stream."""
        if not _REQUEST_ID.fullmatch(request_id):
            raise RequestError(f"request_id: at most 47 of letters, digits and ._- (got {request_id!r})")
        request = replace(self._request(model, prompt, messages, tokens, options), via=via)
        self._next_start = random.getrandbits(32)
        return functools.partial(execute.run, self._driver, request, watch=watch, request_id=request_id)

    def _request(
        self,
        model: str,
        prompt: str | None,
        messages: Messages | None,
        tokens: Sequence[int] | None,
        options: GenerateOptions,
    ) -> execute.GenerationRequest:
        called = time.monotonic()
        self._require_usable()
        alone, on_kv_failure = options.get("alone"), options.get("on_kv_failure", "fallback")
        if alone not in (None, "decode", "prefill", "whole"):
            raise RequestError(f'alone: "decode", "prefill", "whole" or None (got {alone!r})')
        if on_kv_failure not in ("fallback", "fail"):
            raise RequestError(f'on_kv_failure: "fallback" or "fail" (got {on_kv_failure!r})')
        hosts = candidates(self.fleet, model, alone)
        body = _body(hosts.model, {"prompt": prompt, "messages": messages, "tokens": tokens}, options)
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
        self._async._require_usable()
        self._portal.call(self._async.connect, *models)

    def explain(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Ranking:
        """Which hosts this request would try if it were sent now; see AsyncClient.explain."""
        return self._async.explain(model, prompt, messages=messages, tokens=tokens, **options)

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

    def generate_all(self, requests: Sequence[Mapping[str, Any]]) -> Together:
        """Send several requests at the same time; see AsyncClient.generate_all."""
        return self._run(functools.partial(self._async.generate_all, requests))

    def count_tokens(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> int:
        """How many tokens the prompt of this request has; see AsyncClient.count_tokens."""
        call = functools.partial(self._async.count_tokens, model, prompt, messages=messages, tokens=tokens, **options)
        return self._run(call)

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
        return Stream(self._portal, self._async._perform(model, prompt, messages, tokens, options))

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The call's result. Whatever interrupts the wait for it, such as Ctrl-C, cancels it."""
        self._async._require_usable()
        running = self._portal.start_task_soon(call)
        try:
            result: T = running.result()
            return result
        except BaseException:
            running.cancel()
            raise

    def close(self) -> None:
        """Close all connections and stop the event loop. In a forked child there is neither."""
        if os.getpid() == self._async._process:
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _body(model: str, prompt: Mapping[str, Any], options: GenerateOptions) -> GenerateBody:
    """The request's body; RequestError names the option that is wrong."""
    fields: dict[str, Any] = {"model": model}
    fields |= {name: _as_json(value) for name, value in prompt.items() if value is not None}
    sampling = {name: _as_json(value) for name, value in options.items() if name not in _NOT_SAMPLING}
    if isinstance(stop := sampling.get("stop"), str):
        sampling["stop"] = [stop]
    if sampling.get("temperature") and sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(63)  # so that any host can go on with the same draws
    if isinstance(bias := sampling.get("logit_bias"), Mapping):
        sampling["logit_bias"] = [list(pair) for pair in bias.items()]
    fields["sampling"] = sampling
    fields |= {name: _as_json(value) for name, value in options.items() if name in _OF_THE_BODY}
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
