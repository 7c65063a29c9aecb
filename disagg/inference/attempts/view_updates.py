"""Updates of the client's view of its fleet with what an attempt shows about its hosts, as soon as it shows."""

from __future__ import annotations

import random
import time

from disagg.inference.attempts.answer import AttemptOutcome
from disagg.inference.attempts.retry import Attempt, Failure
from disagg.inference.hosts.view import FleetView


class ViewUpdates:
    """Updates the view of the hosts of one attempt, from its begin. An answer may take minutes: for other requests the
    host that answers works from the first token on, and the prefill host has one prompt less once its KV has been
    sent. tokens: of the prompt."""

    def __init__(self, view: FleetView, attempt: Attempt, tokens: int) -> None:
        self._view = view
        self._attempt = attempt
        self._tokens = tokens
        hosts = (attempt.decode, attempt.prefill)
        self._began = {host.name: view.began(host.name, tokens) for host in hosts if host is not None}

    def first_token(self) -> None:
        """The first token has arrived."""
        name = self._attempt.answering.name
        self._view.began_to_answer(name, self._began[name])

    def not_asked(self, prefill: str) -> None:
        """The decode host computes the prompt itself."""
        self._view.ended(prefill, self._tokens, self._began.pop(prefill))

    def shipped(self, prefill: str) -> None:
        """The prefill host has sent the KV: its part is over."""
        if self._began.pop(prefill, None) is not None:
            self._view.succeeded(prefill, self._tokens)

    def ended(self, failure: Failure | None, outcome: AttemptOutcome | None) -> None:
        """The attempt is over. Without a failure and an outcome it was cancelled."""
        view, tokens, answering = self._view, self._tokens, self._attempt.answering.name
        for name, began_at in self._began.items():
            if outcome is not None and (name == answering or outcome.shipped is not None):
                view.succeeded(name, tokens)
            elif failure is not None and failure.host.name == name:
                now, jitter = time.monotonic(), random.random()
                view.failed(name, tokens, failure.error, now=now, jitter=jitter, began_at=began_at)
            else:
                view.ended(name, tokens, began_at)
