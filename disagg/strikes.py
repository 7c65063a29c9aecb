"""Which requests have ended hosts, known by marks that say nothing of their text. Pure.

A request that makes its host's process end must not do so to the next one. Two parties see to it:

    a host     keeps the marks of what it computes in a file (`servers/host/record.py`). If it starts again, the
               requests that it computed without a token so far get a strike. GET /load states the strikes.
    a caller   lets a request whose host's process has ended go on alone, as a suspect, on one more host
               (`inference/attempts/suspects.py`), and adds up the strikes of all hosts.

Two strikes refuse a request for a while, at that host and at callers. An honest request that is sent often is caught in
a crash now and then: a host that has computed a suspect acquits its marks for as long, at all callers, and a host takes
its own strikes back if it computes the request.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from disagg.api.requests import GenerateBody, PromptBody
from disagg.api.sampling import Sampling
from disagg.errors import RequestEndedHosts

MARK_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class StrikePolicy:
    """strikes: after which a request is refused. refused_s: for which it is, and for which a strike counts. kept: of
    one host, the latest."""

    strikes: int = 2
    refused_s: float = 300.0
    kept: int = 256


POLICY: Final = StrikePolicy()


@dataclass(frozen=True, slots=True)
class Marks:
    """HMACs of a request under the fleet's token, in hex. request: of all that decides what a host computes; empty of
    POST /prefill, which has the prompt alone. prompt: of the prompt. form: of the form that the answer must have, empty
    if it needs none."""

    request: str
    prompt: str
    form: str = ""

    @property
    def computed(self) -> tuple[str, ...]:
        """What a host notes down that computes this request."""
        return tuple(filter(None, (self.request or self.prompt, self.form)))

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.request, self.prompt, self.form)))

    def strikes(self, count: Callable[[str], int]) -> int:
        """Strikes of this request. count: those of one mark."""
        of_request = sum(count(mark) for mark in (self.request, self.prompt) if mark)
        return max(of_request, count(self.form) if self.form else 0)


def marks(body: PromptBody, token: str) -> Marks:
    """The marks of a request. Equal on every host and caller that has the same token, whatever the request's deadline,
    seed or place in a conversation of hosts. Takes about as long as reading the body."""
    given = (body.model, body.prompt, body.messages, body.tokens, body.suffix)
    prompt = _mark("prompt", (given, body.tools, body.chat_template_kwargs, body.ending), token)
    if not isinstance(body, GenerateBody):
        return Marks("", prompt)
    called = [tool.parameters for tool in body.tools_of_form]
    form = _mark("form", (body.form, called), token) if body.form is not None or called else ""
    return Marks(_mark("request", (prompt, form, _seedless(body.sampling)), token), prompt, form)


def _seedless(sampling: Sampling) -> Sampling:
    """The sampling without its seed, as every process reads it from JSON: a caller may have 1 where a host has 1.0."""
    return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(sampling, seed=None)), type=Sampling)


def _mark(kind: str, value: Any, token: str) -> str:
    text = kind.encode() + b"\0" + msgspec.json.encode(value)
    return hmac.digest(token.encode(), text, "sha256")[:MARK_BYTES].hex()


class Verdicts(Protocol):
    """What a host states of requests, as in Load."""

    @property
    def strikes(self) -> Mapping[str, int]: ...

    @property
    def acquitted(self) -> Collection[str]: ...


class Strikes:
    """The strikes of one host, and what it has acquitted. Times in seconds since 1970, as strikes outlive the
    process."""

    def __init__(self, policy: StrikePolicy = POLICY, known: Iterable[tuple[str, float]] = ()) -> None:
        """known: marks with the times of their strikes."""
        self.policy = policy
        self.all = list(known)
        self._acquitted: dict[str, float] = {}

    def add(self, struck: Iterable[str], now: float) -> None:
        """One strike for each of these marks."""
        self.all += [(mark, now) for mark in struck]
        self.forget((), now)

    def forget(self, innocent: Iterable[str], now: float) -> bool:
        """Drop the strikes of these marks, and what is too old. Returns whether there were any."""
        before, names = len(self.all), set(innocent)
        self.all = [one for one in self.all if one[0] not in names and self._counts(one[1], now)][-self.policy.kept :]
        return len(self.all) < before

    def stated(self, now: float) -> dict[str, int]:
        """How many strikes each mark has now."""
        found: dict[str, int] = {}
        for mark, at in self.all:
            if self._counts(at, now):
                found[mark] = found.get(mark, 0) + 1
        return found

    def acquit(self, innocent: Iterable[str], now: float) -> None:
        """This host has computed a suspect with these marks."""
        for mark in innocent:
            self._acquitted.pop(mark, None)
            self._acquitted[mark] = now
        for mark in list(self._acquitted)[: -self.policy.kept]:
            del self._acquitted[mark]

    def acquitted(self, now: float) -> tuple[str, ...]:
        """The marks that it has acquitted lately."""
        return tuple(mark for mark, at in self._acquitted.items() if self._counts(at, now))

    def _counts(self, at: float, now: float) -> bool:
        """Whether what was stated at this time still counts, also if the clock was set back a little."""
        return math.isfinite(at) and -60.0 <= now - at < self.policy.refused_s


def require_innocent(of: Marks, stated: Sequence[Verdicts], policy: StrikePolicy, hosts: str) -> bool:
    """Whether a request has strikes. Raises RequestEndedHosts if they are too many. stated: by one host, or by each.
    hosts: in words."""
    acquitted = {mark for one in stated for mark in one.acquitted}

    def count(mark: str) -> int:
        return sum(one.strikes.get(mark, 0) for one in stated)

    if of.strikes(lambda mark: 0 if mark in acquitted else count(mark)) >= policy.strikes:
        raise RequestEndedHosts(
            f"{hosts} ended while computing this request: it is refused for {policy.refused_s:.0f} s"
        )
    return any(map(count, of.all))
