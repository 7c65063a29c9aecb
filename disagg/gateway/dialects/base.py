"""What a dialect is: how it reads a body and how it writes an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from disagg.api.base import Contract, InvalidValue
from disagg.errors import RequestError
from disagg.gateway.dialects.events import AnswerPiece, Finished
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.request import GatewayRequest
from disagg.inference.types import Completion


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer repeats. model: as the caller has named it. created: seconds since 1970. via: the
    gateways that have passed the request on, this one included, as the Via header names them."""

    request: GatewayRequest
    request_id: str
    created: float
    via: str = ""

    @property
    def model(self) -> str:
        return self.request.model


class Writer(Protocol):
    """Writes one answer. `piece`, `finished` and `end` are the parts of a stream; `whole` is everything at once."""

    def piece(self, piece: AnswerPiece) -> bytes: ...

    def finished(self, finished: Finished) -> bytes: ...

    def end(self, completions: Sequence[Completion]) -> bytes: ...

    def error(self, problem: Problem) -> bytes:
        """The last part of a stream that is cut."""
        ...

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]: ...


class Dialect(Protocol):
    """One API. media_type: of its streams. keep_alive: sent while there is nothing else to send; may be empty."""

    name: ClassVar[str]
    media_type: ClassVar[str]
    keep_alive: ClassVar[bytes]

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        """The request that this body makes. Raises RequestError, which begins with the name of a wrong field."""
        ...

    def writer(self, head: Head) -> Writer: ...

    def error(self, problem: Problem) -> Mapping[str, Any]:
        """The body of an answer that is an error."""
        ...


Body = TypeVar("Body", bound=Contract)


def read_fields(kind: type[Body], body: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> Body:
    """The fields of a body that its dialect honours; all others are ignored, except those that would change the answer.

    unsupported: those, each with the values besides null that change nothing. Raises RequestError for one with another
    value, and for a field of the wrong type.
    """
    for name, values in unsupported.items():
        if (value := body.get(name)) is not None and value not in values:
            raise RequestError(f"{name}: not supported by this gateway", f"leave out {name}")
    try:
        return kind.from_json(body)
    except InvalidValue as error:
        raise RequestError(str(error)) from None
