"""The state of every server, from its /health and /status over HTTP, all hosts at once, each with a deadline.

For hosts reached by SSH, `diagnose` adds what HTTP cannot show.
"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from disagg.api.base import InvalidValue
from disagg.api.status import Health, Status
from disagg.config import Fleet, Host
from disagg.errors import FleetError
from disagg.fleet.lifecycle.state import State, started_elsewhere
from disagg.fleet.lifecycle.status.comparison import flag_differing, flag_refuted, with_remarks
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.http_get import ReplyTimeout, get
from disagg.fleet.lifecycle.status.verdicts import kept
from disagg.fleet.lifecycle.status.whole import poll_whole
from disagg.fleet.machine import process as local
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.version import VERSION, code_hash

TIMEOUT_S = 3.0
_SLACK_S = 0.5
_OTHER_TOKEN = "put the same token file on both machines, or stop a server that another fleet file started"


def poll(
    fleet: Fleet, token: str | None, state: State, names: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> list[HostStatus]:
    """All named hosts (every host by default) at once, in file order, in about `timeout_s` at most.

    token: None if this machine has none; servers then report only that they are up."""
    statuses = flag_differing(fleet, _poll_all(fleet.select(names), token, state, timeout_s))
    return flag_refuted(with_remarks(fleet, statuses, kept(state.folder), token is not None and state.tokens.rotating))


def poll_host(host: Host, token: str, state: State, timeout_s: float = TIMEOUT_S) -> HostStatus:
    """The state of one host."""
    return _poll_all([host], token, state, timeout_s)[0]


def refusal(host: Host, status: HostStatus, state: State) -> FleetError | None:
    """Why a host's server does not show that it accepts the token with which it was polled; None if it does, or if it
    is a server that this machine starts and that does not run."""
    if status.version is not None or (host.placement.spawned and state.running_pid(host.name) is None):
        return None  # strangers see no version
    if status.state != "unauthorised":
        return FleetError(
            f"{host.name}: its server runs, and this machine cannot see whether it accepts the new token: {status.why}",
            status.hint,
        )
    deploy = "" if host.placement.spawned else f"disagg deploy --host {host.name} && "
    return FleetError(
        f"{host.name}: its server does not accept a token that was added to its file: it runs an earlier disagg, which "
        "reads the file only when it starts",
        f"{deploy}disagg restart --host {host.name}",
    )


def exit_code(statuses: Sequence[HostStatus]) -> int:
    """0 if all are healthy and none differs, 1 if all are healthy, 4 if a machine does not answer, else 3."""
    if all(status.ok for status in statuses):
        return int(any(status.differs for status in statuses))
    return 4 if any(status.state == "unreachable" for status in statuses) else 3


def _poll_all(hosts: Sequence[Host], token: str | None, state: State, timeout_s: float) -> list[HostStatus]:
    """All at once. A host that hangs beyond every timeout, as a name look-up may, is silent if a process of it that was
    started on this machine runs, else unreachable."""

    def status(outcome: HostOutcome[HostStatus]) -> HostStatus:
        if outcome.timed_out:
            return _without_answer(_blank(outcome.host), outcome.host, state, TimeoutError(), timeout_s)
        if outcome.value is None:
            raise outcome.error or AssertionError("an outcome has a value or an error")
        return outcome.value

    outcomes = each(hosts, lambda host: _poll(host, token, state, timeout_s), timeout=timeout_s + _SLACK_S)
    return [status(outcome) for outcome in outcomes]


def _blank(host: Host) -> HostStatus:
    return HostStatus(host.name, host.roles, host.model, host.url, "failed", supervised=_supervised(host))


def _poll(host: Host, token: str | None, state: State, timeout_s: float) -> HostStatus:
    blank, deadline = _blank(host), time.monotonic() + timeout_s
    try:
        if host.whole:
            return poll_whole(host, blank, timeout_s)
        code, answer = get(host.address, host.port, "/health", token, timeout_s)
        if answer is not None and "model" in answer and answer.get("status") != "loading" and not host.gateway:
            _, status = get(host.address, host.port, "/status", token, max(0.01, deadline - time.monotonic()))
            answer = status if status is not None else answer
    except OSError as error:
        return _without_answer(blank, host, state, error, timeout_s)
    except http.client.HTTPException:
        code, answer = 0, None
    if code == 401 or _bare(answer):
        return _unauthorised(blank, host, state, token, answer)
    if answer is None or "status" not in answer:
        return replace(
            blank,
            state="foreign",
            why=f"port {host.port} answers, but not as a disagg server{_holder(host)}",
            hint=_free_port(host, state),
        )
    try:
        report = Status.from_json(answer) if "queue" in answer else Health.from_json(answer)
    except InvalidValue as error:
        return _unreadable(blank, host, state, answer, error)
    return _judge(_filled(blank, report), host, state, report)


def _holder(host: Host) -> str:
    """Which process has the host's port, if that is a port of this machine; else empty."""
    return f": {local.port_holder(host.port)}" if host.placement.spawned else ""


def _stop_other(host: Host, state: State) -> str:
    """The command that stops what has the host's port, if another fleet of this user has started it here."""
    other = started_elsewhere(state, host)
    return other.stop_command if other is not None else ""


def _free_port(host: Host, state: State) -> str:
    return _stop_other(host, state) or f"stop that process, or give {host.name} another port in hosts.toml"


def _upgrade(host: Host) -> str:
    return f"deploy --host {host.name} && disagg restart" if host.placement.deployed else f"restart --host {host.name}"


def _bare(answer: Any) -> bool:
    """Whether this is a Liveness: all that a server of disagg reports to a caller without its token."""
    return isinstance(answer, dict) and set(answer) == {"status"}


def _unauthorised(
    blank: HostStatus, host: Host, state: State, token: str | None, answer: Mapping[str, Any] | None
) -> HostStatus:
    """The state of a server that reports only that it lives, because it was shown no token or another one."""
    liveness = f"reports only that it is {answer['status']}" if answer and "status" in answer else "reports nothing"
    if token is None:
        why = f"it {liveness}: there is no fleet token in {state.tokens.path}"
        return replace(blank, state="unauthorised", why=why, hint=state.tokens.missing_hint(host))
    why = f"{host.url} does not accept the token in {state.tokens.path}, and {liveness}"
    return replace(blank, state="unauthorised", why=why, hint=_OTHER_TOKEN)


def _unreadable(
    blank: HostStatus, host: Host, state: State, answer: Mapping[str, Any], error: InvalidValue
) -> HostStatus:
    """The state of a server whose answer does not fit the types of this version."""
    version, code = answer.get("version"), answer.get("code")
    other = ""
    if isinstance(version, str) and version not in ("", VERSION):
        other = f"disagg {version}, whose answers disagg {VERSION} cannot read"
    elif isinstance(code, str) and code not in ("", code_hash()):
        other = "other code of disagg, whose answers the code here cannot read"
    if other:
        return replace(
            blank,
            state="failed",
            version=version if isinstance(version, str) else None,
            why=f"it runs {other} ({error})",
            hint="put the same disagg on all hosts: disagg deploy && disagg restart",
        )
    return replace(
        blank,
        state="foreign",
        why=f"port {host.port} answers, but not as a disagg server ({error})",
        hint=_free_port(host, state),
    )


def _filled(blank: HostStatus, report: Health) -> HostStatus:
    """The status with everything that the server reported."""
    status = replace(
        blank,
        backend=report.backend,
        version=report.version,
        versions=report.versions,
        fingerprint=report.fingerprint,
        preflight=report.preflight,
        verified=report.verified,
        evidence=report.evidence,
        uptime_s=report.uptime_s,
        pid=report.pid,
        simulated=report.simulated,
        code=report.code,
        config=report.config,
        release=report.release,
        pending=report.pending,
        tokens=report.tokens,
    )
    if not isinstance(report, Status):
        return status
    return replace(
        status,
        queue=report.queue,
        running=report.running,
        kv_bytes=report.kv_bytes,
        kv_held_bytes=report.kv_held_bytes,
        memory=report.memory,
        device=report.device,
        counters=report.counters,
        last_error=report.last_error,
        audit_every=report.audit_every,
        senders=report.senders,
    )


def _judge(status: HostStatus, host: Host, state: State, report: Health) -> HostStatus:
    """The state of a server that answered as one of ours."""
    if report.status in ("ok", "loading") and (report.host, report.model) != (host.name, host.model):
        return replace(
            status,
            state="foreign",
            why=f"{host.url} is {_served(report.host, report.model)}, not {_served(host.name, host.model)}",
            hint=_stop_other(host, state) or "stop that server, or correct address and port in hosts.toml",
        )
    if report.status == "ok":
        return replace(status, state="healthy")
    if report.status in ("loading", "no_host"):
        return _waiting(replace(status, state="loading" if report.status == "loading" else "failed"), host)
    if report.status == "draining":
        return replace(status, state="draining", why="it is shutting down", hint=_start_command(host, "start"))
    if report.status == "stalled":
        why = "its engine has work and makes no progress; it restarts itself if that lasts for a minute"
        return replace(status, state="stalled", why=why, hint=_start_command(host, "restart"))
    failure = f": {status.last_error.message}" if status.last_error else ""
    hint = f"read its log: {_log(host, state)}"
    return replace(status, state="failed", why=f"its engine does not work{failure}", hint=hint)


def _waiting(status: HostStatus, host: Host) -> HostStatus:
    """The state of a server whose model is not there yet, or of a gateway without a host that is up."""
    if host.gateway:
        return replace(status, why="none of its models has a host that is up", hint="disagg start")
    return replace(status, why="the model is still loading", hint="disagg status --watch")


def _served(host: str, model: str) -> str:
    return f"{host} serving {model}" if model else f"the gateway {host}"


def _without_answer(blank: HostStatus, host: Host, state: State, error: OSError, timeout_s: float) -> HostStatus:
    """The state of a host that gave no HTTP answer."""
    if isinstance(error, ssl.SSLError):
        return _unproven(blank, host, state, error)
    try:
        recorded = _recorded(blank, host, state, error, timeout_s) if host.placement.spawned else None
    except FleetError as damaged:  # one host's damaged record must not hide the other hosts
        return replace(blank, state="failed", why=damaged.message, hint=damaged.hint)
    return recorded or _unanswered(blank, host, state, error, timeout_s)


def _unproven(blank: HostStatus, host: Host, state: State, error: ssl.SSLError) -> HostStatus:
    """The state of what is at the server's address and is not known to be it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"{host.url} does not prove that it has the token in {state.tokens.path}{_holder(host)}"
        return replace(blank, state="unauthorised", why=why, hint=_stop_other(host, state) or _OTHER_TOKEN)
    why = f"port {host.port} answers without the fleet's TLS: another program, or an older disagg{_holder(host)}"
    hint = _stop_other(host, state) or f"stop that process; disagg {_upgrade(host)}"
    return replace(blank, state="foreign", why=why, hint=hint)


def _recorded(blank: HostStatus, host: Host, state: State, error: OSError, timeout_s: float) -> HostStatus | None:
    """The state of the process that was started on this machine; None if there is no record of one."""
    record = state.recorded(host.name)
    if record is None:
        return None
    if record.runs:
        return _running(replace(blank, pid=record.pid), error, timeout_s)
    reason, log = state.end_of_run(host.name), _log(host, state)
    why = f"its process has ended: {reason}; see {log}" if reason else f"its process was killed: no reason in {log}"
    return replace(blank, state="failed", why=why, hint=_start_command(host, "start"))


def _unanswered(blank: HostStatus, host: Host, state: State, error: OSError, timeout_s: float) -> HostStatus:
    """The state that follows from the network error, for a server without a process record here."""
    where = f"{host.address}:{host.port}"
    if host.whole:
        why = (
            f"{where} did not answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else f"{where}: {error}"
        )
        refused = isinstance(error, ConnectionRefusedError)
        hint = "start that server: disagg does not manage it" if refused else f"ping {host.address}"
        return replace(blank, state="not running" if refused else "unreachable", why=why, hint=hint)
    if isinstance(error, (ReplyTimeout, ConnectionResetError, BrokenPipeError)):
        why = f"{where} accepts connections, but did not answer within {timeout_s:g} s{_holder(host)}"
        if host.placement.spawned:  # it has no record: another program has the port
            return replace(blank, state="foreign", why=why, hint=_free_port(host, state))
        return replace(blank, state="silent", why=why, hint=_start_command(host, "restart"))
    if isinstance(error, ConnectionRefusedError):
        hint = _start_command(host, "start")
        return replace(blank, state="not running", why=f"nothing listens on {where}", hint=hint)
    if isinstance(error, TimeoutError) and error.errno is None:
        why = f"{where} did not answer within {timeout_s:g} s"
        return replace(blank, state="unreachable", why=why, hint=_network_hint(host, None))
    code = None if isinstance(error, socket.gaierror) else error.errno
    why = f"{where}: {error.strerror or error}"
    return replace(blank, state="unreachable", why=why, hint=_network_hint(host, code))


def _running(status: HostStatus, error: OSError, timeout_s: float) -> HostStatus:
    """The state of a host whose process was started on this machine and runs."""
    if isinstance(error, ConnectionRefusedError):
        why = f"process {status.pid} runs but does not listen yet"
        return replace(status, state="loading", why=why, hint="disagg status --watch")
    why = f"process {status.pid} runs but did not answer within {timeout_s:g} s"
    return replace(status, state="silent", why=why, hint=f"disagg restart --host {status.host}")


def _network_hint(host: Host, code: int | None) -> str:
    if code == errno.EHOSTUNREACH and os.uname().sysname == "Darwin":
        return "System Settings > Privacy & Security > Local Network: allow this program; then: ping " + host.address
    return f"ping {host.address}"


def _start_command(host: Host, verb: str) -> str:
    return f"disagg {verb} --host {host.name}"


def _supervised(host: Host) -> Literal["", "crash", "crash, reboot"]:
    if not host.placement.deployed:
        return ""
    return "crash" if host.service == "process" else "crash, reboot"


def _log(host: Host, state: State) -> str:
    return str(state.log_with_reason(host.name)) if host.placement.spawned else f"disagg logs --host {host.name}"
