"""An answer of a whole-request host that is not 200, as an error of ours. Pure.

400, 413, 422   the request is wrong              RequestError, or ContextLengthExceeded
401, 403        the host refuses its key          ServerRefused
404             no such model, or no such path    ServerRefused
508             it leads back to its caller       RequestLoop
429, 503        it is busy                        Overloaded
502, 504        a proxy does not reach it         ServerUnavailable
3xx             its URL has moved                 ServerRefused
not JSON        no server of OpenAI's API         ServerRefused
anything else   it failed                         DisaggError
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from disagg.config import Host
from disagg.errors import (
    ContextLengthExceeded,
    DisaggError,
    Overloaded,
    RequestError,
    RequestLoop,
    ServerRefused,
    ServerUnavailable,
    clipped,
    printable,
)
from disagg.whole.answers import error_in

LONGEST_WAIT_S: Final = 120
"""A Retry-After beyond it counts as this."""
MAX_MESSAGE: Final = 300
_CONTEXT: Final = ("context length", "context_length", "context size", "context window")
_NAMED: Final = 8
_REFUSES_KEY: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_UNREACHED: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
_WRONG: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer. headers: with names in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def message(self) -> str | None:
        """What the server states; None if it is not JSON."""
        text = error_in(self.content)
        return text if text is None or len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 1]}…"


def error_of(reply: Reply, host: Host) -> DisaggError:
    """The error for an answer that is not 200."""
    status, message = reply.status, reply.message
    if status in _WRONG and message is not None:
        text = f"{host.name} refuses the request{_stated(message)}"
        return ContextLengthExceeded(text) if any(word in message.lower() for word in _CONTEXT) else RequestError(text)
    if status in _BUSY and (message is not None or "retry-after" in reply.headers):
        return _busy(reply, host)
    if status == HTTPStatus.LOOP_DETECTED and message is not None:
        hint = f"correct engine.url of {host.name} in hosts.toml"
        return RequestLoop(f"{_where(host)} leads back to a gateway{_stated(message)}", hint)
    if status in _UNREACHED:
        return ServerUnavailable(f"{_where(host)} failed: HTTP {status}{_stated(message)}", "see its log")
    return _refused(reply, host) or DisaggError(
        f"{_where(host)} failed: HTTP {status}{_stated(message)}", "see its log"
    )


def _refused(reply: Reply, host: Host) -> ServerRefused | None:
    status, message, headers = reply.status, reply.message, reply.headers
    if 300 <= status < 400:
        target = printable(headers.get("location", "another address")[:MAX_MESSAGE])
        return ServerRefused(
            f"{_where(host)} redirects to {target}", f"correct engine.url of {host.name} in hosts.toml"
        )
    if status in _REFUSES_KEY:
        return ServerRefused(f"{_where(host)} refuses its key: HTTP {status}{_stated(message)}", _key_hint(host))
    if message is None:
        return not_openai(host, f"HTTP {status}, {clipped(headers.get('content-type', 'no content type'))}")
    if status == HTTPStatus.NOT_FOUND:
        return ServerRefused(f"{host.name} has no model {host.engine.model!r}{_stated(message)}", _model_hint(host))
    return None


def not_openai(host: Host, what: str) -> ServerRefused:
    """The error for a server of another kind. what: it answered."""
    return ServerRefused(
        f"{_where(host)} does not answer as an OpenAI-compatible server: {what}",
        f"correct engine.url of {host.name} in hosts.toml: it usually ends with /v1",
    )


def unknown_model(host: Host, names: tuple[str, ...]) -> ServerRefused | None:
    """The error for a host whose list of models does not have its own; None if it does, or lists none."""
    wanted = host.engine.model
    if not names or wanted in names or f"{wanted}:latest" in names:
        return None
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    known = ", ".join(printable(name[:MAX_MESSAGE]) for name in names[:_NAMED])
    return ServerRefused(f"{host.name} has no model {wanted!r}: it has {known}{more}", _model_hint(host))


def _busy(reply: Reply, host: Host) -> Overloaded:
    error = Overloaded(f"{_where(host)} is busy: HTTP {reply.status}{_stated(reply.message)}", "try again later")
    after = reply.headers.get("retry-after", "")
    if after.isascii() and after.isdecimal():
        error.retry_after_s = max(1, min(LONGEST_WAIT_S, int(after[:9])))
    return error


def _where(host: Host) -> str:
    return f"{host.name} ({host.url})"


def _stated(message: str | None) -> str:
    return f": {message}" if message else ""


def _key_hint(host: Host) -> str:
    engine = host.engine
    if engine.key_file or engine.key_variable:
        return f"check the key in {engine.key_file or '$' + str(engine.key_variable)}"
    return f"name its key in hosts.toml: engine.key_file or engine.key_variable of {host.name}"


def _model_hint(host: Host) -> str:
    return f"correct engine.model of {host.name} in hosts.toml"
