"""Ask every server for its state over HTTP, all at once, each with a deadline; and the machines of those that do not
serve, over SSH. `disagg status` of a healthy fleet opens no SSH connection."""

from __future__ import annotations

import http.client
import os
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from disagg.config import Fleet, Host
from disagg.config.key import key_of
from disagg.errors import ConfigError, DisaggError, FleetError, HostUnreachable
from disagg.fleet.facts.server import ServerFacts, read_server_facts
from disagg.fleet.lifecycle.state import State, started_elsewhere
from disagg.fleet.lifecycle.status.compare import flag_differing, flag_refuted, with_remarks
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.http_get import fetch, get
from disagg.fleet.lifecycle.status.judge import Asked, blank, explained, failed, judge, judge_whole
from disagg.fleet.lifecycle.status.verdicts import known_verdicts
from disagg.fleet.machine import process as local
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.fleet.machine.machine import Machine
from disagg.whole.answers import MAX_REPLY_BYTES
from disagg.whole.refusals import Reply, not_openai
from disagg.whole.request import MODELS

TIMEOUT_S: Final = 3.0
_SLACK_S: Final = 0.5
_NOT_SERVING: Final = ("not running", "unreachable", "silent", "foreign", "unauthorised")
ConnectWithin = Callable[[Host, float], Machine]
"""The machine of a host, with a connection timeout in seconds."""


def poll(
    fleet: Fleet, token: str | None, state: State, names: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> list[HostStatus]:
    """All named hosts (every host by default) at once, in file order, in about `timeout_s` at most.

    token: None if this machine has none; servers then report only that they are up."""
    statuses = flag_differing(fleet, _poll_all(fleet.select(names), token, state, timeout_s))
    rotating = token is not None and state.tokens.rotating
    return flag_refuted(with_remarks(fleet, statuses, known_verdicts(state.folder), rotating))


def poll_host(host: Host, token: str, state: State, timeout_s: float = TIMEOUT_S) -> HostStatus:
    """The state of one host."""
    return _poll_all([host], token, state, timeout_s)[0]


def _poll_all(hosts: Sequence[Host], token: str | None, state: State, timeout_s: float) -> list[HostStatus]:
    """All at once. A host that hangs beyond every timeout, as a name look-up may, is silent if a process of it that was
    started on this machine runs, else unreachable."""

    def status(outcome: HostOutcome[HostStatus]) -> HostStatus:
        if outcome.timed_out:
            late = Asked(outcome.host, timeout_s, token is not None, error=TimeoutError())
            return judge(late, _Here(outcome.host, state))
        if outcome.value is None:
            raise outcome.error or AssertionError("an outcome has a value or an error")
        return outcome.value

    outcomes = each(hosts, lambda host: _poll(host, token, state, timeout_s), timeout=timeout_s + _SLACK_S)
    return [status(outcome) for outcome in outcomes]


def _poll(host: Host, token: str | None, state: State, timeout_s: float) -> HostStatus:
    asked, deadline = Asked(host, timeout_s, token is not None), time.monotonic() + timeout_s
    try:
        if host.whole:
            return poll_whole(host, timeout_s)
        code, answer = get(host.address, host.port, "/health", token, timeout_s)
        if answer is not None and "model" in answer and answer.get("status") != "loading" and not host.gateway:
            _, status = get(host.address, host.port, "/status", token, max(0.01, deadline - time.monotonic()))
            answer = status if status is not None else answer
        asked = replace(asked, code=code, answer=answer)
    except OSError as error:
        asked = replace(asked, error=error)
    except http.client.HTTPException:
        pass  # what answers speaks no HTTP
    return judge(asked, _Here(host, state))


@dataclass(frozen=True, slots=True)
class _Here:
    """What this machine knows of a host's server. state: of its fleet."""

    host: Host
    state: State

    @property
    def token_file(self) -> Path:
        return self.state.tokens.path

    @property
    def missing_token(self) -> str:
        return self.state.tokens.missing_hint(self.host)

    @property
    def holder(self) -> str:
        return f": {local.port_holder(self.host.port)}" if self.host.server_kind.spawned else ""

    @property
    def stop_other(self) -> str:
        other = started_elsewhere(self.state, self.host)
        return other.stop_command if other is not None else ""

    @property
    def log(self) -> str:
        name = self.host.name
        return str(self.state.log_with_reason(name)) if self.host.server_kind.spawned else f"disagg logs --host {name}"

    @property
    def process(self) -> tuple[int, bool, str] | None:
        record = self.state.recorded(self.host.name)
        if record is None:
            return None
        runs = record.runs
        return record.pid, runs, "" if runs else self.state.end_of_run(self.host.name)

    @property
    def failed_start(self) -> DisaggError | None:
        return self.state.failed_start(self.host.name) if self.host.server_kind.spawned else None

    @property
    def on_mac(self) -> bool:
        return os.uname().sysname == "Darwin"


def poll_whole(host: Host, timeout_s: float) -> HostStatus:
    """The state of a whole-request host, by its list of models. Raises OSError if it does not answer, other than for
    want of TLS."""
    at = urlsplit(host.url)
    connect = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    try:
        key, connection = key_of(host.engine, host.name), connect(host.address, host.port, timeout=timeout_s)
        reply = fetch(connection, f"{at.path}{MODELS}", key, timeout_s, MAX_REPLY_BYTES)
    except ConfigError as error:
        return failed(host, error)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason
        return replace(blank(host), why=f"no TLS connection: {reason}", hint="correct its URL in hosts.toml")
    except http.client.HTTPException as error:
        return failed(host, not_openai(host, type(error).__name__), "foreign")
    if reply.too_long:
        return failed(host, not_openai(host, f"HTTP {reply.status}, over {MAX_REPLY_BYTES} bytes"), "foreign")
    return judge_whole(host, Reply(reply.status, reply.headers, reply.content))


def diagnose(
    fleet: Fleet,
    statuses: Sequence[HostStatus],
    token: str | None,
    seconds: float,
    connect: ConnectWithin = machine_for,
) -> list[HostStatus]:
    """The statuses, with reasons from the machines of hosts that are not serving, read within `seconds`."""

    def read(host: Host) -> ServerFacts:
        with closing(connect(host, seconds)) as machine:
            return read_server_facts(machine, host.name, host)

    hosts = [fleet.hosts[status.host] for status in statuses if status.state in _NOT_SERVING]
    answers: dict[str, ServerFacts | DisaggError] = {}
    for outcome in each([host for host in hosts if host.server_kind.ssh], read, timeout=seconds):
        late = HostUnreachable(f"SSH did not answer within {seconds:.1f} s either")
        error = late if outcome.timed_out else outcome.error
        answers[outcome.host.name] = error or outcome.value or late
    return [
        explained(status, fleet.hosts[status.host], answers[status.host], token) if status.host in answers else status
        for status in statuses
    ]


def refusal(host: Host, status: HostStatus, state: State) -> FleetError | None:
    """Why a host's server does not show that it accepts the token with which it was polled; None if it does, or if it
    is a server that this machine starts and that does not run."""
    if status.version is not None or (host.server_kind.spawned and state.running_pid(host.name) is None):
        return None  # strangers see no version
    if status.state != "unauthorised":
        return FleetError(
            f"{host.name}: its server runs, and this machine cannot see whether it accepts the new token: {status.why}",
            status.hint,
        )
    deploy = "" if host.server_kind.spawned else f"disagg deploy --host {host.name} && "
    return FleetError(
        f"{host.name}: its server does not accept a token that was added to its file: it runs an earlier disagg, which "
        "reads the file only when it starts",
        f"{deploy}disagg restart --host {host.name}",
    )
