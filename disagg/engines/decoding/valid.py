"""Which requests a decode engine can compute."""

from __future__ import annotations

from disagg.api.base import InvalidValue
from disagg.api.layout import Layout
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeRequest, EngineInfo
from disagg.errors import LayoutMismatch, RequestError
from disagg.kv.arriving import ArrivingKV
from disagg.kv.received import ReceivedKV


def require_valid(request: DecodeRequest, info: EngineInfo) -> None:
    """RequestError for invalid sampling values, LayoutMismatch if the KV is not of this model or not of the tokens that
    it must cover."""
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
        require_fitting(request.kv, info.layout, len(request.tokens) - 1, held)
    if request.arriving is not None:
        _require_fitting_head(request.arriving, info)
        _require_tokens(request.arriving, len(request.tokens) - 1, held)


def require_fitting(kv: ReceivedKV, layout: Layout, tokens: int, start: int = 0) -> None:
    """LayoutMismatch unless this is KV of tokens [start, tokens) in this layout."""
    kv.layout.require_same(layout, mine="the transfer", theirs="the decode engine")
    _require_tokens(kv, tokens, start)


def _require_fitting_head(arriving: ArrivingKV, info: EngineInfo) -> None:
    """LayoutMismatch unless this is KV of the model's first layers, and its other layers can be computed here."""
    split = info.split
    layers = split.layers if arriving.layers is None else arriving.layers
    head = split.head(info.layout, layers)
    arriving.layout.require_same(head, mine="the transfer", theirs="the decode engine")
    if not 0 < layers <= split.layers:
        raise LayoutMismatch(f"layers [0, {layers}) are sent, but the model has {split.layers}")
    if layers < split.layers and split.refusal:
        raise LayoutMismatch(f"this model is not split: {split.refusal}", "hand over the KV of all layers")
    hidden = split.hidden if layers < split.layers else 0
    if arriving.hidden != hidden:
        raise LayoutMismatch(f"the hidden states have {arriving.hidden} elements, but {hidden} are needed")


def _require_tokens(kv: ReceivedKV | ArrivingKV, tokens: int, start: int) -> None:
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
