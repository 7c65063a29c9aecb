"""How the hosts of one attempt are called."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from disagg.api.events import SlotEvent
from disagg.api.requests import GenerateBody
from disagg.config import Host
from disagg.errors import DisaggError
from disagg.inference.attempts.answer import ArrivingAnswer
from disagg.inference.attempts.view_updates import ViewUpdates
from disagg.inference.hosts.background import Heartbeat
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import OnKVFailure, QueueExit, Timeouts, longest_wait_s


@dataclass(frozen=True, slots=True)
class HostCaller:
    """How the hosts of one attempt are called. deadline: the request's, by time.monotonic(). elsewhere: whether
    another host of this one's role gets requests now. claim: takes a free place for the request
    at another host of this one's role, False if there is none. on_kv_failure: what follows if no prefill host delivers.
    divides: whether a host knows the field `split`; earlier versions refuse it.
    next_head: the prefill host that goes on with a slot's prompt after these have failed, None if there is none.
    sent: the last call of each host, by its name."""

    http: Connections
    heartbeat: Heartbeat
    timeouts: Timeouts
    deadline: float
    elsewhere: Callable[[Host], bool]
    claim: Callable[[Host], bool]
    updates: ViewUpdates
    on_kv_failure: OnKVFailure
    divides: Callable[[Host], bool]
    next_head: Callable[[SlotEvent, Collection[str]], Host | None]
    sent: dict[str, host_calls.EventCall] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def waits(self, host: Host) -> Timeouts:
        """The waits for this host from now on."""
        return self.timeouts.within(self.left_s) if self.elsewhere(host) else self.timeouts

    def call(
        self,
        host: Host,
        path: str,
        body: msgspec.Struct,
        leases: ExitStack,
        *,
        request_id: str,
        reported: Callable[[str], None],
    ) -> host_calls.EventCall:
        """A POST whose lease is extended until `leases` is closed. reported: gets the phases that the host states."""
        if isinstance(body, GenerateBody) and not self.divides(host):
            body = msgspec.structs.replace(body, split="auto")
        leases.enter_context(self.heartbeat.lease(host, request_id))
        queue_exit = QueueExit(longest_wait_s(self.left_s), partial(self.claim, host))
        call = host_calls.EventCall(
            host, path, body, request_id, self.waits(host), reported=reported, queue_exit=queue_exit
        )
        self.sent[host.name] = call
        return call


class PrefillFailed(Exception):
    """The KV does not reach the decode host because of `error`. Never leaves `inference`."""

    def __init__(self, error: DisaggError) -> None:
        self.error = error


def new_id(answer: ArrivingAnswer) -> str:
    """The id of one attempt, which is unique on every host."""
    return ".".join(filter(None, (answer.request_id, secrets.token_hex(8))))
