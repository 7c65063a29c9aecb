"""Errors as HTTP clients expect them: status, kind, code, the field that is wrong, and when to try again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from disagg.api.gateway import ENDED_HOSTS
from disagg.errors import (
    BodyTooLarge,
    CapabilityMissing,
    ContextLengthExceeded,
    DeadlineExceeded,
    DisaggError,
    ModelBusy,
    ModelError,
    ModelNotAllowed,
    Overloaded,
    RequestEndedHosts,
    RequestError,
    RequestLoop,
    SchemaTooComplex,
    ServerUnavailable,
    Unauthorized,
    UnknownModel,
)

RETRY_AFTER_S = 5  # if no host is up

_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ")


@dataclass(frozen=True, slots=True)
class Problem:
    """An error for a client. kind and code: as OpenAI names them. param: the field that is wrong, None if it is no
    field's fault. headers: what the answer carries beside its status."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_TABLE: Mapping[type[DisaggError], tuple[int, str, str | None]] = {
    Unauthorized: (401, "authentication_error", "invalid_api_key"),
    ModelNotAllowed: (403, "permission_error", "model_not_allowed"),
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    ContextLengthExceeded: (400, "invalid_request_error", "context_length_exceeded"),
    RequestEndedHosts: (400, "invalid_request_error", ENDED_HOSTS),
    SchemaTooComplex: (400, "invalid_request_error", "schema_too_complex"),
    BodyTooLarge: (413, "invalid_request_error", None),
    RequestError: (400, "invalid_request_error", None),
    CapabilityMissing: (400, "invalid_request_error", "not_supported"),
    Overloaded: (429, "rate_limit_error", "rate_limit_exceeded"),
    ModelBusy: (409, "invalid_request_error", "model_busy"),
    ModelError: (503, "server_error", "model_not_loaded"),
    RequestLoop: (508, "server_error", "request_loop"),
    ServerUnavailable: (503, "server_error", "no_host_available"),
    DeadlineExceeded: (504, "server_error", "timeout"),
    DisaggError: (500, "server_error", "internal_error"),
}
"""Status, kind and code by error; the first line that fits. Hand-off errors and the like are DisaggErrors."""
FAILURES: Final = tuple(
    code for status, _, code in _TABLE.values() if code and (status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500)
)
"""Codes of errors that are not the request's own fault."""


def problem_of(error: DisaggError) -> Problem:
    """The error as a client gets it."""
    status, kind, code = next(row for known, row in _TABLE.items() if isinstance(error, known))
    return Problem(status, kind, code, str(error), _param(error), _headers(error, status))


def not_found(path: str) -> Problem:
    """The answer for a path that the gateway does not have."""
    return Problem(HTTPStatus.NOT_FOUND, "invalid_request_error", None, f"there is no {path}; see docs/gateway.md")


INTERNAL = Problem(500, "server_error", "internal_error", "internal error in the gateway (its log has the traceback)")


def _param(error: DisaggError) -> str | None:
    """The field that the message of an error of the request begins with: `top_p: expected ...`."""
    if isinstance(error, UnknownModel | ModelNotAllowed):
        return "model"
    named = _FIELD.match(error.message) if isinstance(error, RequestError | CapabilityMissing) else None
    return named[1] if named else None


def _headers(error: DisaggError, status: int) -> dict[str, str]:
    """x-should-retry: the official clients obey it. A failure was already retried here on other hosts."""
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded):
        return {"Retry-After": str(error.retry_after_s)}
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        retry = {"Retry-After": str(RETRY_AFTER_S)} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
        return {**retry, "x-should-retry": "false"}
    return {} if error.may_repeat else {"x-should-retry": "false"}
