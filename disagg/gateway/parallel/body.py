"""The body of POST /v1/parallel. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from disagg.api.base import InvalidValue
from disagg.api.gateway.parallel import MAX_NAME, ParallelBody
from disagg.errors import DisaggError, RequestError
from disagg.gateway.dialects.base import Dialect
from disagg.gateway.dialects.openai.chat import ChatCompletions
from disagg.gateway.dialects.openai.completions import Completions
from disagg.gateway.dialects.request import GatewayRequest

CHAT: Final = ChatCompletions()
COMPLETION: Final = Completions()
_MAX_ID: Final = 64  # characters of a request's id


@dataclass(frozen=True, slots=True)
class RequestedItem:
    """One request of the body. dialect: that of its answer. request: what it asks for, or why it asks for nothing."""

    index: int
    id: str | None
    dialect: Dialect
    request: GatewayRequest | DisaggError


@dataclass(frozen=True, slots=True)
class RequestedItems:
    """What a body asks for."""

    items: Sequence[RequestedItem]
    stream: bool


def read(body: Mapping[str, Any]) -> RequestedItems:
    """The items of a body. Raises RequestError if it is no such body, two items have the same id, or no item can be
    read."""
    try:
        fields = ParallelBody.from_json(body)
    except InvalidValue as error:
        raise RequestError(str(error)) from None
    stream = bool(fields.stream)
    items = [_item(index, given, stream) for index, given in enumerate(fields.requests)]
    names = [item.id for item in items if item.id is not None]
    if len(set(names)) < len(names):
        raise RequestError("requests: two of them have the same id", "give each its own, or none")
    first = items[0].request
    if isinstance(first, DisaggError) and all(isinstance(item.request, DisaggError) for item in items):
        raise type(first)(f"requests[0].{first.message}", first.hint)
    return RequestedItems(items, stream)


def item_id(request_id: str, index: int) -> str:
    """The id of one item, in the history and the logs, as long as ids may be."""
    end = f".{index}"
    return request_id[: _MAX_ID - len(end)] + end


def _item(index: int, given: Mapping[str, Any], stream: bool) -> RequestedItem:
    name = given.get("id")
    fields = {key: value for key, value in given.items() if key not in ("id", "stream")}
    dialect: Dialect = CHAT if "messages" in given else COMPLETION
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_NAME):
        wrong = RequestError(f"id: not a text of 1 to {MAX_NAME} characters")
        return RequestedItem(index, None, dialect, wrong)
    try:
        if ("messages" in given) == ("prompt" in given):
            raise RequestError("messages: a request has either messages or a prompt")
        return RequestedItem(index, name, dialect, replace(dialect.read(fields), stream=stream))
    except DisaggError as error:
        return RequestedItem(index, name, dialect, error)
