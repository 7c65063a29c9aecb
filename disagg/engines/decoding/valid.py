"""Which requests a decode engine can compute."""

from __future__ import annotations

from disagg.api.base import InvalidValue
from disagg.api.layout import Layout
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeRequest
from disagg.errors import LayoutMismatch, RequestError
from disagg.kv.received import ReceivedKV


def require_valid(request: DecodeRequest, layout: Layout) -> None:
    """RequestError for invalid sampling values, LayoutMismatch if the KV is not of this layout or not of the tokens
    that it must cover."""
    if not request.tokens:
        raise RequestError("the prompt is empty", "give at least one token")
    require_within_bounds(request.sampling)
    if request.answered and request.answered >= min(len(request.tokens), request.sampling.max_tokens):
        raise RequestError(
            f"{request.answered} tokens of the answer are given: it has at most {request.sampling.max_tokens}",
            "end the request, its answer is complete",
        )
    held = request.held.tokens if request.held is not None else 0
    if request.held is not None and not 0 < held < len(request.tokens):
        raise LayoutMismatch("the held KV is not of this prompt", "take it from find_held of the same engine")
    if request.kv is not None:
        require_fitting(request.kv, layout, len(request.tokens) - 1, held)


def require_fitting(kv: ReceivedKV, layout: Layout, tokens: int, start: int = 0) -> None:
    """LayoutMismatch unless this is KV of tokens [start, tokens) in this layout."""
    kv.layout.require_same(layout, mine="the transfer", theirs="the decode engine")
    if (kv.start, kv.tokens) != (start, tokens):
        raise LayoutMismatch(
            f"the KV covers tokens [{kv.start}, {kv.tokens}), but [{start}, {tokens}) are needed",
            "send the KV of all prompt tokens that are not held, but the last ones",
        )


def require_within_bounds(sampling: Sampling) -> None:
    """Raise RequestError, naming the first value out of the bounds that `Sampling` states. msgspec checks bounds of
    JSON only, not of values that are constructed in Python."""
    try:
        Sampling.from_json(sampling.to_json())
    except InvalidValue as error:
        raise RequestError(str(error), "docs/http-api.md lists the bounds of every sampling parameter") from error
