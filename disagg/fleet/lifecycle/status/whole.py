"""The state of a whole-request host, from its list of models."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlsplit

from disagg.api.base import InvalidValue
from disagg.config import Host
from disagg.config.key import key_of
from disagg.errors import ConfigError, DisaggError
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.http_get import fetch
from disagg.whole.answers import MAX_REPLY_BYTES, models
from disagg.whole.refusals import Reply, error_of, not_openai, unknown_model
from disagg.whole.request import MODELS


def poll_whole(host: Host, blank: HostStatus, timeout_s: float) -> HostStatus:
    """The host's state. Raises OSError if it does not answer, other than for want of TLS."""
    try:
        path = f"{urlsplit(host.url).path}{MODELS}"
        reply = fetch(_connection(host, timeout_s), path, key_of(host.engine, host.name), timeout_s, MAX_REPLY_BYTES)
    except ConfigError as error:
        return _failed(blank, error)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason
        return replace(blank, state="failed", why=f"no TLS connection: {reason}", hint="correct its URL in hosts.toml")
    except http.client.HTTPException as error:
        return replace(_failed(blank, not_openai(host, type(error).__name__)), state="foreign")
    if reply.too_long:
        why = f"HTTP {reply.status}, over {MAX_REPLY_BYTES} bytes"
        return replace(_failed(blank, not_openai(host, why)), state="foreign")
    return judged(blank, host, Reply(reply.status, reply.headers, reply.content))


def judged(blank: HostStatus, host: Host, reply: Reply) -> HostStatus:
    """The state that follows from the answer to GET /models."""
    if reply.status != HTTPStatus.OK:
        return _failed(blank, error_of(reply, host))
    try:
        unknown = unknown_model(host, models(reply.content))
    except InvalidValue as error:
        return replace(_failed(blank, not_openai(host, str(error))), state="foreign")
    return (
        _failed(blank, unknown) if unknown else replace(blank, state="healthy", backend=f"openai: {host.engine.model}")
    )


def _failed(blank: HostStatus, error: DisaggError) -> HostStatus:
    return replace(blank, state="failed", why=error.message, hint=error.hint)


def _connection(host: Host, timeout_s: float) -> http.client.HTTPConnection:
    if urlsplit(host.url).scheme == "https":
        return http.client.HTTPSConnection(host.address, host.port, timeout=timeout_s)
    return http.client.HTTPConnection(host.address, host.port, timeout=timeout_s)
