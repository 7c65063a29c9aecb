"""The state of a server: judged by what came of asking it and, if it does not serve, by its machine, too.

Pure: `ask` asks. What this machine knows beside the answer is read only where it matters, through `Here`.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from disagg.api.base import InvalidValue
from disagg.api.status import Health, Status
from disagg.config import Host
from disagg.errors import DisaggError, FleetError
from disagg.fleet.facts.server import ServerFacts
from disagg.fleet.lifecycle.loglines import (
    failed_to_start,
    last_error,
    last_plain_line,
    since_ready,
    since_start,
    stopped,
)
from disagg.fleet.lifecycle.status.host_status import HealthState, HostStatus
from disagg.fleet.lifecycle.status.http_get import ReplyTimeout
from disagg.token import token_digest
from disagg.version import VERSION, code_hash
from disagg.whole.answers import models
from disagg.whole.refusals import Reply, error_of, not_openai, unknown_model

_OTHER_TOKEN: Final = "put the same token file on both machines, or stop a server that another fleet file started"
_REPORTED: Final = tuple(
    field.name
    for field in fields(HostStatus)
    if field.name in Status.__struct_fields__ and field.name not in ("host", "model")
)
"""What a host's status has from the server's own report."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of asking a server. code, answer: of its reply, whose body is no JSON object if `answer` is None.
    error: why there was none within timeout_s. shown: whether this machine has a token to show."""

    host: Host
    timeout_s: float
    shown: bool
    code: int = 0
    answer: Mapping[str, Any] | None = None
    error: OSError | None = None


class Here(Protocol):
    """What this machine knows of a server beside its answer."""

    @property
    def token_file(self) -> Path: ...

    @property
    def missing_token(self) -> str:
        """How this machine gets the token."""
        ...

    @property
    def holder(self) -> str:
        """`: ` and the process that has the host's port, if that is a port of this machine; else empty."""
        ...

    @property
    def stop_other(self) -> str:
        """The command that stops what has the host's port, if another fleet of this user has started it here."""
        ...

    @property
    def log(self) -> str:
        """Where the log of the server is, or the command that shows it."""
        ...

    @property
    def process(self) -> tuple[int, bool, str] | None:
        """The process that was started here for the host: its pid, whether it runs, and why it has ended if that is
        known. None without a record of one. FleetError if the record is damaged."""
        ...

    @property
    def failed_start(self) -> DisaggError | None:
        """Why the server could not start when this machine started it last; None if it could."""
        ...

    @property
    def on_mac(self) -> bool: ...


def blank(host: Host) -> HostStatus:
    """The status of a host of which nothing is known yet."""
    supervised: Literal["", "crash", "crash, reboot"] = ""
    if host.server_kind.deployed:
        supervised = "crash" if host.service == "process" else "crash, reboot"
    return HostStatus(host.name, host.roles, host.model, host.url, "failed", supervised=supervised)


def judge(asked: Asked, here: Here) -> HostStatus:
    """The state of a server."""
    return _Case(asked, here, blank(asked.host)).judged()


@dataclass(frozen=True, slots=True)
class _Case:
    """One server, and what is known of it."""

    asked: Asked
    here: Here
    status: HostStatus

    @property
    def host(self) -> Host:
        return self.asked.host

    def _is(self, state: HealthState, why: str, hint: str) -> HostStatus:
        return replace(self.status, state=state, why=why, hint=hint)

    def judged(self) -> HostStatus:
        answer = self.asked.answer
        if self.asked.error is not None:
            return self._without_answer(self.asked.error)
        if self.asked.code == HTTPStatus.UNAUTHORIZED or (answer is not None and set(answer) == {"status"}):
            return self._unauthorised(answer)  # a Liveness: all that a server reports to a caller without its token
        if answer is None or "status" not in answer:
            return self._foreign(self.here.holder)
        try:
            report = Status.from_json(answer) if "queue" in answer else Health.from_json(answer)
        except InvalidValue as error:
            return self._unreadable(answer, error)
        reported = {name: getattr(report, name) for name in _REPORTED if hasattr(report, name)}
        return replace(self, status=replace(self.status, **reported))._reporting(report)

    def _foreign(self, reason: str) -> HostStatus:
        why = f"port {self.host.port} answers, but not as a disagg server{reason}"
        return self._is("foreign", why, self._free_port())

    def _free_port(self) -> str:
        other = f"stop that process, or give {self.host.name} another port in hosts.toml"
        return self.here.stop_other or other

    def _unauthorised(self, answer: Mapping[str, Any] | None) -> HostStatus:
        """A server that reports only that it lives, because it was shown no token or another one."""
        liveness = f"reports only that it is {answer['status']}" if answer and "status" in answer else "reports nothing"
        if not self.asked.shown:
            why = f"it {liveness}: there is no fleet token in {self.here.token_file}"
            return self._is("unauthorised", why, self.here.missing_token)
        why = f"{self.host.url} does not accept the token in {self.here.token_file}, and {liveness}"
        return self._is("unauthorised", why, _OTHER_TOKEN)

    def _unreadable(self, answer: Mapping[str, Any], error: InvalidValue) -> HostStatus:
        """A server whose answer does not fit the types of this version."""
        version, code = answer.get("version"), answer.get("code")
        if isinstance(version, str) and version not in ("", VERSION):
            other = f"disagg {version}, whose answers disagg {VERSION} cannot read"
        elif isinstance(code, str) and code not in ("", code_hash()):
            other = "other code of disagg, whose answers the code here cannot read"
        else:
            return self._foreign(f" ({error})")
        hint = "put the same disagg on all hosts: disagg deploy && disagg restart"
        found = self._is("failed", f"it runs {other} ({error})", hint)
        return replace(found, version=version if isinstance(version, str) else None)

    def _reporting(self, report: Health) -> HostStatus:
        """A server that answered as one of ours."""
        host = self.host
        if report.status in ("ok", "loading") and (report.host, report.model) != (host.name, host.model):
            there = _served(report.host, report.model, gateway=report.role == "gateway")
            why = f"{host.url} is {there}, not {_served(host.name, host.model, gateway=host.gateway)}"
            other = "stop that server, or correct address and port in hosts.toml"
            return self._is("foreign", why, self.here.stop_other or other)
        if report.status == "ok":
            return replace(self.status, state="healthy")
        if report.status in ("loading", "no_host"):
            state: HealthState = "loading" if report.status == "loading" else "failed"
            why, hint = "the model is still loading", "disagg status --watch"
            if host.gateway:
                why, hint = "none of its models has a host that is up", "disagg start"
            return self._is(state, why, hint)
        if report.status == "draining":
            return self._is("draining", "it is shutting down", self._command("start"))
        if report.status == "stalled":
            why = "its engine has work and makes no progress; it restarts itself if that lasts for a minute"
            return self._is("stalled", why, self._command("restart"))
        failure = f": {self.status.last_error.message}" if self.status.last_error else ""
        return self._is("failed", f"its engine does not work{failure}", f"read its log: {self.here.log}")

    def _without_answer(self, error: OSError) -> HostStatus:
        """A host that gave no HTTP answer."""
        if isinstance(error, ssl.SSLError):
            return self._unproven(error)
        try:
            process = self.here.process if self.host.server_kind.spawned else None
        except FleetError as damaged:  # one host's damaged record must not hide the other hosts
            return self._is("failed", damaged.message, damaged.hint)
        if process is None:
            return self._unanswered(error)
        pid, runs, reason = process
        if not runs:
            log = self.here.log
            ended = f"has ended: {reason}; see {log}" if reason else f"was killed: no reason in {log}"
            return self._is("failed", f"its process {ended}", self._command("start"))
        if isinstance(error, ConnectionRefusedError):
            found = self._is("loading", f"process {pid} runs but does not listen yet", "disagg status --watch")
        else:
            why = f"process {pid} runs but did not answer within {self.asked.timeout_s:g} s"
            found = self._is("silent", why, self._command("restart"))
        return replace(found, pid=pid)

    def _unproven(self, error: ssl.SSLError) -> HostStatus:
        """What is at the server's address and is not known to be it."""
        host, holder = self.host, self.here.holder
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"{host.url} does not prove that it has the token in {self.here.token_file}{holder}"
            return self._is("unauthorised", why, self.here.stop_other or _OTHER_TOKEN)
        deployed = host.server_kind.deployed
        upgrade = f"deploy --host {host.name} && disagg restart" if deployed else f"restart --host {host.name}"
        why = f"port {host.port} answers without the fleet's TLS: another program, or an older disagg{holder}"
        return self._is("foreign", why, self.here.stop_other or f"stop that process; disagg {upgrade}")

    def _unanswered(self, error: OSError) -> HostStatus:
        """The state of a server without a process record here, by the network error alone."""
        host, at = self.host, f"{self.host.address}:{self.host.port}"
        in_time = f"did not answer within {self.asked.timeout_s:g} s"
        if host.whole:
            refused = isinstance(error, ConnectionRefusedError)
            why = f"{at} {in_time}" if isinstance(error, TimeoutError) else f"{at}: {error}"
            hint = "start that server: disagg does not manage it" if refused else f"ping {host.address}"
            return self._is("not running" if refused else "unreachable", why, hint)
        if isinstance(error, (ReplyTimeout, ConnectionResetError, BrokenPipeError)):
            why = f"{at} accepts connections, but {in_time}{self.here.holder}"
            if host.server_kind.spawned:  # it has no record: another program has the port
                return self._is("foreign", why, self._free_port())
            return self._is("silent", why, self._command("restart"))
        if isinstance(error, ConnectionRefusedError):
            return self._stopped(at)
        if isinstance(error, TimeoutError) and error.errno is None:
            return self._is("unreachable", f"{at} {in_time}", self._network_hint(None))
        return self._is("unreachable", f"{at}: {error.strerror or error}", self._network_hint(error.errno))

    def _stopped(self, at: str) -> HostStatus:
        start, failure = self._command("start"), self.here.failed_start
        if failure is None:
            return self._is("not running", f"nothing listens on {at}", start)
        hint = f"{failure.hint}; then: {start}" if failure.hint else start
        return self._is("failed", f"it did not start: {failure.message}", hint)

    def _network_hint(self, code: int | None) -> str:
        ping = f"ping {self.host.address}"
        if code == errno.EHOSTUNREACH and self.here.on_mac:
            return f"System Settings > Privacy & Security > Local Network: allow this program; then: {ping}"
        return ping

    def _command(self, verb: str) -> str:
        return f"disagg {verb} --host {self.host.name}"


def _served(host: str, model: str, *, gateway: bool) -> str:
    return f"{host} serving {model}" if model else f"the {'gateway' if gateway else 'keeper'} {host}"


def judge_whole(host: Host, reply: Reply) -> HostStatus:
    """The state of a whole-request host, by its answer to GET /models."""
    if reply.status != HTTPStatus.OK:
        return failed(host, error_of(reply, host))
    try:
        unknown = unknown_model(host, models(reply.content))
    except InvalidValue as error:
        return failed(host, not_openai(host, str(error)), "foreign")
    if unknown:
        return failed(host, unknown)
    return replace(blank(host), state="healthy", backend=f"openai: {host.engine.model}")


def failed(host: Host, error: DisaggError, state: HealthState = "failed") -> HostStatus:
    """The state that an error states."""
    return replace(blank(host), state=state, why=error.message, hint=error.hint)


def explained(status: HostStatus, host: Host, server: ServerFacts | DisaggError, token: str | None) -> HostStatus:
    """The status of a host that does not serve, from both HTTP and its machine."""
    if isinstance(server, DisaggError):
        reason = server.message.removeprefix(f"{host.name}: ")
        return replace(status, why=f"{status.why}; {reason}", hint=server.hint or status.hint)
    status = replace(status, restarts=server.restarts, release=status.release or server.release or None)
    if not server.current:
        return replace(
            status, state="not running", why="nothing is deployed there", hint=f"disagg deploy --host {host.name}"
        )
    if (port_conflict := server.port_conflict) is not None:
        port, holder = port_conflict
        why = f"port {port} there is in use by {holder}, so its server cannot start"
        hint = f"end that program: disagg ssh {host.name}; or give the host another port in hosts.toml: disagg deploy"
        return replace(status, state="foreign", why=why, hint=f"{hint} && disagg restart --host {host.name}")
    if status.state == "unauthorised":
        return _token(status, host, server, token)
    if server.pid is not None:
        return _alive(replace(status, pid=server.pid), host)
    return _dead(status, host, server)


def _token(status: HostStatus, host: Host, server: ServerFacts, token: str | None) -> HostStatus:
    ours = token_digest(token) if token else None
    restart = f"disagg restart --host {host.name}"
    if ours in server.token_digests:
        return replace(status, why="it was started with an earlier token than the deployed one", hint=restart)
    why = "its token differs from the one here" if ours else "there is no token here"
    adopt = f"disagg deploy --adopt-token --host {host.name} uses its token here"
    return replace(status, why=why, hint=f"{adopt}; or --replace-token, then {restart}")


def _alive(status: HostStatus, host: Host) -> HostStatus:
    if status.state == "not running":
        why = f"process {status.pid} runs there but does not listen yet"
        return replace(status, state="loading", why=why, hint=f"disagg logs -f --host {host.name}")
    if status.state == "silent":
        why = f"process {status.pid} runs there; {status.why}: it is loading or hangs"
        return replace(status, why=why, hint=f"disagg logs -f --host {host.name}")
    if status.state == "unreachable":
        why = f"process {status.pid} runs there, but from here {status.why}"
        hint = (
            status.hint if "Local Network" in status.hint else f"a firewall on {host.name} may close port {host.port}"
        )
        return replace(status, state="silent", why=why, hint=hint)
    return status


def _dead(status: HostStatus, host: Host, server: ServerFacts) -> HostStatus:
    start, logs = f"disagg start --host {host.name}", f"disagg logs --host {host.name}"
    last = since_start(server.log)
    # A server that failed to start may have been retried and stopped during that start: that is no ordinary stop.
    if not server.supervised and (not last or stopped(last)) and not failed_to_start(server.log):
        return replace(status, state="not running", why="SSH is fine; no server process runs there", hint=start)
    lines = since_ready(server.log)  # the last run may have ended before it logged anything
    error = last_error(lines)
    reason = error.message if error is not None else last_plain_line(lines) or "it logged no reason"
    hint = error.hint if error is not None else ""
    if server.supervised:
        times = f"{server.restarts} times" if server.restarts > 1 else "once"
        return replace(
            status, state="failed", why=f"it ended {times} and is being restarted: {reason}", hint=hint or logs
        )
    why = f"its process ended and nothing starts it again: {reason}"
    return replace(status, state="failed", why=why, hint=f"{hint}; then: {start}" if hint else f"{logs}; {start}")
