"""Which requests have ended hosts, known by marks that say nothing of their text. Pure.

A request that makes its host's process end must not do so to the next one. Two parties see to it:

    a host     keeps the marks of what it computes in a file (`servers/host/record.py`). If it starts again, the
               requests that it computed without a token so far get a strike. GET /load states the strikes.
    a caller   lets a request whose host's process has ended go on alone, as a suspect, on one more host
               (`inference/attempts/suspects.py`), and adds up the strikes of all hosts.

Two strikes refuse a request for a while, at that host and at callers. An honest request that is sent often is caught in
a crash now and then, but is computed far more often, and what ends every host that computes it never is. So each time
that a request was computed takes one strike back: those of a host at that host, those of all hosts at a caller that got
the answer. A host that has computed a request with strikes elsewhere acquits its marks, at all callers, as long as it
has not ended as often with them. What was computed stands in the file, too: a host that is killed knows it afterwards.
"""

from __future__ import annotations

import hmac
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec

from disagg.api.requests import GenerateBody, PromptBody
from disagg.api.sampling import Sampling
from disagg.errors import RequestEndedHosts

MARK_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class StrikePolicy:
    """strikes: after which a request is refused. refused_s: for which it is, and for which a strike counts, and what
    was computed. kept, computed: strikes and computed marks of one host, the latest."""

    strikes: int = 2
    refused_s: float = 300.0
    kept: int = 256
    computed: int = 4096


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


class Tally:
    """How often something was noted of each mark lately. Times in seconds, of whatever clock the caller has."""

    def __init__(self, kept: int, seconds: float, known: Iterable[tuple[str, float]] = ()) -> None:
        """kept: notes, the latest. seconds: for which one counts. known: marks with their times, in order."""
        self.all = deque(known, maxlen=kept)
        self._seconds = seconds

    def add(self, marks: Iterable[str], now: float) -> None:
        """One note for each of these marks."""
        self.all.extend((mark, now) for mark in marks)

    def counts(self, of: Collection[str], now: float) -> Counter[str]:
        """The notes of these marks."""
        while self.all and now - self.all[0][1] >= self._seconds:
            self.all.popleft()
        return Counter(mark for mark, at in self.all if mark in of and self.lasts(at, now))

    def lasts(self, at: float, now: float) -> bool:
        """Whether what was noted at this time still counts, also if the clock was set back a little."""
        return math.isfinite(at) and -60.0 <= now - at < self._seconds


class Strikes:
    """The strikes of one host, and what it has computed. Times in seconds since 1970, as both outlive the process."""

    def __init__(
        self,
        policy: StrikePolicy = POLICY,
        ended: Iterable[tuple[str, float]] = (),
        computed: Iterable[tuple[str, float]] = (),
        suspects: Iterable[tuple[str, float]] = (),
    ) -> None:
        """ended, computed: marks with the times at which the host ended with them, and computed them. suspects: what of
        these had strikes elsewhere."""
        self.policy = policy
        self.ended = Tally(policy.kept, policy.refused_s, ended)
        self._computed = Tally(policy.computed, policy.refused_s, computed)
        self._suspects: dict[str, float] = {}
        for mark, at in suspects:
            self._suspect([mark], at)

    def add(self, struck: Iterable[str], now: float) -> None:
        """One strike for each of these marks."""
        self.ended.add(struck, now)

    def computed(self, innocent: Iterable[str], now: float, *, suspect: bool = False) -> None:
        """This host has computed a request with these marks. suspect: it has strikes elsewhere."""
        marks = list(innocent)
        self._computed.add(marks, now)
        if suspect:
            self._suspect(marks, now)

    def stated(self, now: float) -> dict[str, int]:
        """How many strikes each mark has now: how much more often this host has ended with it than computed it."""
        left = self._ended_more({mark for mark, _ in self.ended.all}, now)
        return {mark: count for mark, count in left.items() if count > 0}

    def acquitted(self, now: float) -> tuple[str, ...]:
        """The marks of suspects that it has computed lately, and more often than it has ended with them."""
        lately = {mark: at for mark, at in self._suspects.items() if self.ended.lasts(at, now)}
        return tuple(mark for mark, count in self._ended_more(lately, now).items() if count < 0)

    def _ended_more(self, marks: Collection[str], now: float) -> dict[str, int]:
        """How much more often this host has ended with each than computed it."""
        if not marks:
            return {}
        ended, computed = self.ended.counts(marks, now), self._computed.counts(marks, now)
        return {mark: ended[mark] - computed[mark] for mark in marks}

    def _suspect(self, marks: Iterable[str], at: float) -> None:
        for mark in marks:
            self._suspects.pop(mark, None)
            self._suspects[mark] = at
        for mark in list(self._suspects)[: -self.policy.kept]:
            del self._suspects[mark]


def require_innocent(
    of: Marks,
    stated: Sequence[Verdicts],
    policy: StrikePolicy,
    hosts: str,
    computed: Mapping[str, int] = MappingProxyType({}),
) -> bool:
    """Whether a request has strikes. Raises RequestEndedHosts if they are too many. stated: by one host, or by each.
    hosts: in words. computed: how often hosts have computed it for this caller, by mark."""
    acquitted = {mark for one in stated for mark in one.acquitted}

    def strikes(mark: str) -> int:
        return sum(one.strikes.get(mark, 0) for one in stated)

    if (
        of.strikes(lambda mark: 0 if mark in acquitted else max(0, strikes(mark) - computed.get(mark, 0)))
        >= policy.strikes
    ):
        raise RequestEndedHosts(
            f"{hosts} ended while computing this request: it is refused for {policy.refused_s:.0f} s"
        )
    return any(map(strikes, of.all))
