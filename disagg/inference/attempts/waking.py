"""Models that have to be loaded before a request can begin: both hosts of a hand-off load at the same time, and while
only one is ready it answers alone if that takes less time. Requests of one client share one load per host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from disagg.api.keeper import KeptModel, LoadEvent
from disagg.config import Host
from disagg.errors import (
    DisaggError,
    InvalidAnswer,
    Overloaded,
    RequestError,
    ServerRefused,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.caller import PrefillFailed
from disagg.inference.hosts.background import Refresher
from disagg.inference.hosts.route import DECODE_TOKENS_S, PREFILL_TOKENS_S, RouteRequest
from disagg.inference.hosts.view import LASTING, FleetView, HostView
from disagg.inference.http import keeper_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import Timeouts, longest_wait_s

OTHER_ROLE: Final = 0.25
"""How fast a host is at the other role's work, as a share of a host of that role, if it has not measured it."""
STATED_EVERY_S: Final = 10.0
"""A caller that waits is told what is left of the load at its begin, and so often."""
UNKNOWN_S: Final = 3600.0
"""A keeper that expects a load to take longer does not know when there will be room for it."""
OVERDUE: Final = 2.0
"""A load that takes longer than what was expected times this is given up if another host may load the model, unless it
has not yet taken the share of the request's time that one host may take."""
LASTING_ERRORS: Final = (ServerSilent, ServerRefused, InvalidAnswer)


@dataclass(slots=True, eq=False)
class _Load:
    """One load that requests of this client wait for. event: what the keeper stated last. first_s: what was left of the
    load when it stated that first. changed: is set at each event and at the end, and then replaced."""

    host: Host
    changed: asyncio.Future[None]
    task: asyncio.Task[None] | None = None
    event: LoadEvent | None = None
    first_s: float = 0.0
    waiting: int = 0

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()

    def tell(self) -> None:
        if not self.changed.done():
            self.changed.set_result(None)
        self.changed = asyncio.get_running_loop().create_future()

    def require_ready(self) -> None:
        """Raise what the load has failed with."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()


class Loads:
    """The loads that one client waits for. keepers: the hosts with several models, by name."""

    def __init__(self, http: Connections, view: FleetView, keepers: Mapping[str, Host], timeouts: Timeouts) -> None:
        self._http, self.view, self._keepers, self._timeouts = http, view, keepers, timeouts
        self._loads: dict[str, _Load] = {}

    @asynccontextmanager
    async def joined(self, host: Host) -> AsyncIterator[_Load]:
        """Wait for the host's model within the block; its load is asked for unless it is. The last one that leaves
        gives the place in the keeper's queue up."""
        load = self._loads.get(host.name)
        if load is None:
            loop = asyncio.get_running_loop()
            self._loads[host.name] = load = _Load(host, loop.create_future())
            load.task = loop.create_task(self._follow(load))
            load.task.add_done_callback(_retrieve)
        load.waiting += 1
        self.view.wakes(host, 1)
        try:
            yield load
        finally:
            load.waiting -= 1
            if not load.ended:
                self.view.wakes(host, -1)
                if not load.waiting:
                    await self._end(load)

    async def ready(self, host: Host) -> Host:
        """The host, with the address of its model's process, once the model is loaded. Raises what its load fails
        with."""
        seen = self.view.of(host.name)
        if host.keeper and seen.kept is None:
            why = self.view.obstacle(host, time.monotonic())
            raise ServerUnavailable(f"{host.name} is not up: {why}", "run `disagg status`")
        if seen.must_load:
            async with self.joined(host) as load:
                while not load.ended:
                    await asyncio.wait((load.changed,))
                load.require_ready()
        return self.view.addressed(host)

    async def stop(self) -> None:
        for load in list(self._loads.values()):
            await self._end(load)

    async def _end(self, load: _Load) -> None:
        self._forget(load)
        if load.task is not None:
            load.task.cancel()
            await asyncio.wait((load.task,))

    async def _follow(self, load: _Load) -> None:
        """Read what the keeper states until the model is ready."""
        host = load.host
        keeper, model = self._keepers[host.keeper], host.model
        try:
            async with aclosing(keeper_calls.load(self._http, keeper, model, timeouts=self._timeouts)) as events:
                async for event in events:
                    load.first_s = event.left_s if load.event is None else load.first_s
                    load.event = event
                    self.view.load_event(host, event)
                    load.tell()
        finally:
            self._forget(load)
            self.view.wakes(host, -load.waiting)
            load.tell()

    def _forget(self, load: _Load) -> None:
        """Who comes after this begins another one."""
        if self._loads.get(load.host.name) is load:
            del self._loads[load.host.name]


def _retrieve(task: asyncio.Task[None]) -> None:
    """Perhaps nobody waits any more for what the load has failed with, which asyncio would log."""
    if not task.cancelled():
        task.exception()


@dataclass(slots=True)
class Waker:
    """Wakes the hosts of one request's attempts. loads: those that the request waits for, or has left to go on until it
    ends: they are given up with `stack`. alone: whether one host may answer alone. elsewhere: whether another host of
    this one's role gets requests now. stated: is called with what is left of a load, in words, for the caller; entered:
    when a wait begins. waited_s: for loads, in all."""

    loads: Loads
    stack: AsyncExitStack
    alone: bool
    elsewhere: Callable[[Host], bool]
    stated: Callable[[str], None]
    entered: Callable[[Attempt], None]
    waited_s: float = 0.0
    _joined: dict[str, _Load] = field(default_factory=dict)
    _stated_at: float = 0.0

    async def ready(self, attempt: Attempt, request: RouteRequest, left_s: float) -> Attempt:
        """The attempt once its models are loaded, with the addresses of their processes; or one of its hosts alone, if
        that answers sooner. Raises what a load fails with: PrefillFailed if it is that of the prefill host. left_s:
        of the request's time."""
        view = self.loads.view
        if asleep := [host for host in attempt.hosts if view.of(host.name).must_load]:
            began = time.monotonic()
            self.entered(attempt)
            try:
                attempt = await self._awake(attempt, asleep, request, longest_wait_s(left_s))
            finally:
                self.waited_s += time.monotonic() - began
        return _addressed(attempt, view)

    async def _awake(
        self, attempt: Attempt, asleep: Sequence[Host], request: RouteRequest, longest_s: float
    ) -> Attempt:
        began = time.monotonic()
        loads = [await self._join(host) for host in asleep]
        while loading := [load for load in loads if not load.ended]:
            changed = [load.changed for load in loading]
            self._require_ready(attempt, loads)
            if len(loading) < len(attempt.hosts) and (one := self._sooner_alone(attempt, loading[0], request)):
                return one
            self._state(loading)
            waited_s = time.monotonic() - began
            for load in loading:
                if waited_s > max(longest_s, OVERDUE * load.first_s) and self.elsewhere(load.host):
                    self._fail(attempt, load.host, _overdue(load, waited_s))
            await asyncio.wait(changed, return_when=asyncio.FIRST_COMPLETED)
        self._require_ready(attempt, loads)
        return attempt

    async def _join(self, host: Host) -> _Load:
        load = self._joined.get(host.name)
        if load is None or load.ended:
            self._joined[host.name] = load = await self.stack.enter_async_context(self.loads.joined(host))
        return load

    def _require_ready(self, attempt: Attempt, loads: Sequence[_Load]) -> None:
        """Raise what one of the loads has failed with. What a keeper finds wrong, another one may not."""
        for load in loads:
            try:
                load.require_ready()
            except DisaggError as error:
                wrong = isinstance(error, RequestError)
                self._fail(attempt, load.host, ServerUnavailable(error.message, error.hint) if wrong else error)

    def _fail(self, attempt: Attempt, host: Host, error: DisaggError) -> NoReturn:
        if attempt.decode is None or host.name == attempt.decode.name:
            raise error
        raise PrefillFailed(error) from error

    def _sooner_alone(self, attempt: Attempt, loading: _Load, request: RouteRequest) -> Attempt | None:
        """The attempt on the one host that is ready, if that answers before the other's model is loaded."""
        decode, prefill = attempt.decode, attempt.prefill
        if not self.alone or decode is None or prefill is None or loading.event is None:
            return None
        seen = self.loads.view.of(decode.name), self.loads.view.of(prefill.name)
        together_s = loading.event.left_s + paired_s(*seen, request)
        if loading.host.name == decode.name:
            if prefill.answers and prefill_alone_s(*seen, request) <= together_s:
                return Attempt("prefill-alone", None, prefill, "decode host is loading")
            return None
        if decode_alone_s(*seen, request) > together_s:
            return None
        if attempt.reason == "prefill failed":
            return Attempt("fallback", decode, None, attempt.reason)
        return Attempt("decode-alone", decode, None, "prefill host is loading")

    def _state(self, loading: Sequence[_Load]) -> None:
        """Tell the caller what is waited for, at the begin and every STATED_EVERY_S."""
        events = [load.event for load in loading if load.event is not None]
        now = time.monotonic()
        if len(events) == len(loading) and now - self._stated_at >= STATED_EVERY_S:
            names = " and ".join(dict.fromkeys(load.host.keeper for load in loading))
            left_s, more = max(event.left_s for event in events), " more" if self._stated_at else ""
            where = f"{loading[0].host.model} on {names}"
            known = left_s < UNKNOWN_S
            self.stated(f"loading {left_s:.0f} s{more}: {where}" if known else f"waiting for memory: {where}")
            self._stated_at = now


def _overdue(load: _Load, waited_s: float) -> ServerUnavailable:
    host = load.host
    return ServerUnavailable(
        f"{host.keeper} has not loaded {host.model} in {waited_s:.0f} s, and expected {load.first_s:.0f}",
        f"see `disagg logs --host {host.keeper} --model {host.model}`",
    )


async def was_unloaded(
    refresher: Refresher, view: FleetView, host: Host, error: DisaggError, before: KeptModel, *, sent: bool
) -> bool:
    """Whether a host failed so because its model has been unloaded, and has to be loaded again. before: what its keeper
    stated when the request came to it. sent: the request was. Then the keeper must have ended the process itself: it
    does that to none that has a request, so the request has ended none."""
    if not isinstance(error, ServerUnavailable | Overloaded) or isinstance(error, LASTING_ERRORS):
        return False
    await refresher.ask_keeper(host)
    kept = view.of(host.name).kept
    if kept is None or kept.state in ("ready", *LASTING):
        return False
    unloaded = sum(kept.evictions.values()) > sum(before.evictions.values())
    return unloaded or not sent or isinstance(error, Overloaded)


def decode_alone_s(decode: HostView, prefill: HostView, request: RouteRequest) -> float:
    """Seconds in which a decode host answers without a hand-off."""
    speed = _measured(decode, "prefill_tokens_s") or OTHER_ROLE * (
        _measured(prefill, "prefill_tokens_s") or PREFILL_TOKENS_S
    )
    return request.prompt_tokens / speed + _answer_s(decode, request)


def prefill_alone_s(decode: HostView, prefill: HostView, request: RouteRequest) -> float:
    """Seconds in which a prefill host answers without a hand-off."""
    speed = _measured(prefill, "decode_tokens_s") or OTHER_ROLE * (
        _measured(decode, "decode_tokens_s") or DECODE_TOKENS_S
    )
    return _prompt_s(prefill, request) + request.answer_tokens / speed


def paired_s(decode: HostView, prefill: HostView, request: RouteRequest) -> float:
    """Seconds in which both hosts answer by a hand-off, once both are ready."""
    return _prompt_s(prefill, request) + _answer_s(decode, request)


def _prompt_s(prefill: HostView, request: RouteRequest) -> float:
    return request.prompt_tokens / (_measured(prefill, "prefill_tokens_s") or PREFILL_TOKENS_S)


def _answer_s(decode: HostView, request: RouteRequest) -> float:
    return request.answer_tokens / (_measured(decode, "decode_tokens_s") or DECODE_TOKENS_S)


def _measured(seen: HostView, name: str) -> float | None:
    speed: float | None = getattr(seen.load, name) if seen.load is not None else None
    return speed


def _addressed(attempt: Attempt, view: FleetView) -> Attempt:
    decode, prefill = attempt.decode, attempt.prefill
    return replace(
        attempt,
        decode=view.addressed(decode) if decode is not None else None,
        prefill=view.addressed(prefill) if prefill is not None else None,
    )
