"""Updates of the client's view of its fleet with what an attempt shows about its hosts, as soon as it shows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from disagg.api.events import RefutedEvent
from disagg.api.requests import Share
from disagg.config import Host
from disagg.errors import DisaggError, KVRefuted, Overloaded
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import AttemptOutcome
from disagg.inference.attempts.retry import Failure
from disagg.inference.hosts.places import HostPlace
from disagg.inference.hosts.view import FleetView


class ViewUpdates:
    """Updates the view of the hosts of one attempt, from its begin. An answer may take minutes: for other requests the
    host that answers works from the first token on, and the prefill host has one prompt less once its KV has been
    sent, which is audited after that. tokens: the prompt's. share: whose share of the hosts the request counts for.
    starts: the boot id of each host's server when it was asked, empty if it is not known. on_sent: called when a
    prefill host has sent the KV."""

    def __init__(
        self,
        view: FleetView,
        attempt: Attempt,
        tokens: int,
        share: Share = Share(),  # noqa: B008 - frozen
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._view, self._share, self._on_sent = view, share, on_sent
        self._attempt = attempt
        self._tokens = tokens
        hosts = (attempt.decode, attempt.prefill)
        self.starts = {host.name: view.of(host.name).boot_id for host in attempt.hosts}
        self._places: dict[str, HostPlace] = {}
        self._began = {host.name: view.began(host.name, tokens) for host in hosts if host is not None}
        self._sent: dict[str, float] = {}  # as `_began`, of a prefill host whose KV was sent and is not judged

    def take_place(self, host: Host) -> Overloaded | None:
        """Take a place at a host of the attempt, until it has no more to do with the request; why there is none."""
        load = self._view.of(host.name).load
        try:
            place = self._view.places.enter(host, load, self._share, self._tokens, time.monotonic())
        except Overloaded as error:
            return error
        self._places[host.name] = place
        return None

    def first_token(self) -> None:
        """The first token has arrived."""
        for name, ejection in (self._began | self._sent).items():
            if name == self._attempt.answering.name or name in self._sent:
                self._view.judged(name, self._view.of(name).breaker.began_to_answer(ejection))

    def not_asked(self, prefill: str) -> None:
        """The decode host computes the prompt itself."""
        self._leave(prefill)
        self._view.ended(prefill, self._tokens, self._view.of(prefill).breaker.ended(self._began.pop(prefill)))

    def shipped(self, prefill: str) -> None:
        """The prefill host has sent the KV: its part is over."""
        self._leave(prefill)
        if (ejection := self._began.pop(prefill, None)) is not None:
            self._sent[prefill] = ejection
            self._view.sent(prefill, self._tokens)
            self._on_sent()

    def head_failed(self, prefill: str, error: DisaggError) -> None:
        """The prefill host has failed in mid-prompt, and the request goes on without it."""
        self._leave(prefill)
        if (ejection := self._began.pop(prefill, None)) is not None:
            breaker = self._view.of(prefill).breaker.failed(error, time.monotonic(), random.random(), ejection)
            self._view.ended(prefill, self._tokens, breaker)

    def head_asked(self, prefill: Host) -> bool:
        """Another prefill host goes on with the prompt; False if it has no place."""
        if self.take_place(prefill) is not None:
            return False
        self.starts[prefill.name] = self._view.of(prefill.name).boot_id
        self._began[prefill.name] = self._view.began(prefill.name, self._tokens)
        return True

    def refuted(self, event: RefutedEvent, elsewhere: bool) -> bool:
        """The decode host found the KV wrong. Returns whether it is to blame itself. elsewhere: another decode host
        could answer."""
        attempt = self._attempt
        assert attempt.prefill is not None and attempt.decode is not None, "a hand-off has two hosts"
        name = attempt.prefill.name
        self.shipped(name)
        if (ejection := self._sent.pop(name, None)) is None:
            return False
        alone = elsewhere and self._view.refutes_alone(attempt.decode.name, name)
        breaker = self._view.of(name).breaker
        if event.blamed and not alone:
            error, now = KVRefuted(event.message, event.hint), time.monotonic()
            self._view.judged(name, breaker.failed(error, now, random.random(), ejection))
        else:
            self._view.judged(name, breaker.ended(ejection))
        return alone

    def ended(self, failure: Failure | None, outcome: AttemptOutcome | None) -> None:
        """The attempt is over. Without a failure and an outcome it was cancelled."""
        view, tokens, answering = self._view, self._tokens, self._attempt.answering.name
        for name in self._places:
            self._leave(name)
        if outcome is not None and outcome.shipped is not None and self._attempt.prefill is not None:
            self.shipped(self._attempt.prefill.name)
        audited = outcome is not None and outcome.done.audited_tokens > 0 and not outcome.done.refuted
        for name, ejection in (self._sent | self._began).items():
            breaker = view.of(name).breaker
            if failure is not None and failure.host.name == name:
                breaker = breaker.failed(failure.error, time.monotonic(), random.random(), ejection)
            elif outcome is not None and (name == answering or name in self._sent):
                breaker = breaker.succeeded(audited=audited)
            else:
                breaker = breaker.ended(ejection)
            if name in self._sent:
                view.judged(name, breaker)
            else:
                view.ended(name, tokens, breaker)

    def _leave(self, name: str) -> None:
        if name in self._places:
            self._view.places.leave(self._places[name], time.monotonic())
