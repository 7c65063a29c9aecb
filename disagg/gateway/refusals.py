"""In which API's form a request is refused that no dialect has read, and what its clients get."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from disagg.errors import DisaggError
from disagg.gateway.answer import json_response
from disagg.gateway.dialects import anthropic_writer, ollama, openai
from disagg.gateway.dialects.base import Written
from disagg.gateway.dialects.problems import INTERNAL, Problem, not_found, problem_of
from disagg.http.server import ErrorHandlers

_OWN: Final = ("/api/live", "/api/history")
"""Calls below /api that are not Ollama's."""
_LM_STUDIO: Final = "/api/v1/"
"""Calls below are LM Studio's, whose errors have OpenAI's form."""

log = logging.getLogger("disagg.gateway")


def of_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks: it names the API's version with every request."""
    path = request.scope["path"].removeprefix("/v1")
    return "anthropic-version" in request.headers or path == "/messages" or path.startswith("/messages/")


def of_ollama(request: Request) -> bool:
    """Whether a client of Ollama's API asks."""
    path = request.scope["path"]
    return path.startswith("/api/") and not path.startswith(_LM_STUDIO) and path not in _OWN


def respond(request: Request, problem: Problem) -> Response:
    """A problem as the clients read it that make such a request."""
    return json_response(_body(request, problem), problem.status, problem.headers)


def _body(request: Request, problem: Problem) -> Written:
    if of_ollama(request):
        return ollama.error_body(problem)
    return anthropic_writer.error_body(problem) if of_anthropic(request) else openai.error_body(problem)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DisaggError)
    return respond(request, problem_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return respond(request, not_found(request.scope["path"]))
    allowed = (error.headers or {}).get("Allow", "")
    message = f"{request.method} {request.scope['path']} is not served" + (f": use {allowed}" if allowed else "")
    problem = Problem(error.status_code, "invalid_request_error", None, message, headers=error.headers or {})
    return respond(request, problem)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("internal_error", exc_info=error)
    return respond(request, INTERNAL)


HANDLERS: Final[ErrorHandlers] = {DisaggError: _on_error, HTTPException: _on_http_error, Exception: _on_bug}
"""What is answered to an error that no dialect has answered."""
