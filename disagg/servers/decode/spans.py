"""How the layers of a prompt are divided between a prefill host and this one, by measured speeds. Pure.

The prefill host computes the first k of the model's layers for each chunk, and this host the others while the next
chunk is in work. k = all is a hand-off, k = 0 computes everything here: three ways, one value. A prompt keeps its k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal, NamedTuple

from msgspec import structs

from disagg.api.layout import Layout, SplitLayout, split_chunk
from disagg.api.names import KV_CHUNKS
from disagg.api.requests import PrefillOffer, Split
from disagg.errors import RequestError
from disagg.servers.decode.audits import Fading
from disagg.units import counted, seconds

UNMEASURED_TOKENS: Final = 32
"""While this host's speed is not measured, at most so many tokens are computed here: hardly more than one pass."""
MEASURED_TOKENS: Final = 16
"""Shorter computations do not predict longer ones: their time is that of one pass through the weights."""
LONG_TOKENS: Final = 256
"""A split is planned by the speed of computations of at least so many tokens, and made of no shorter prompts."""
TRIED: Final = 8
"""Until that speed is measured, this host computes one layer in so many of a prompt: at a seventh of the prefill host's
speed it keeps up."""
FRESH_S: Final = 600.0
"""Then it is measured once more: a host may have been slow for a while. By the speed before, that costs no time."""
GAIN: Final = 0.05
"""The share of its time that a split must save a prompt: speeds are known to about that."""
OVERHEAD_S: Final = 0.01
"""What it takes to ask a prefill host, and to open the KV connection. Assumed for a local network."""
SPEED_WEIGHT: Final = 0.7  # of all earlier measurements when a new one comes


class Span(NamedTuple):
    """The layers of a prompt that one of the two hosts computes."""

    host: Literal["prefill", "decode"]
    layers: range


@dataclass(frozen=True, slots=True)
class Spans:
    """A plan for one prompt. layers: k, the layers that the prefill host computes. of: all of the model. reason: why,
    e.g. "12 tokens left to compute: 20 ms here, 0.31 s handed off". seconds: that it is expected to take."""

    layers: int
    of: int
    reason: str
    seconds: float = inf

    @property
    def local(self) -> bool:
        """Whether no prefill host is needed."""
        return self.layers == 0

    @property
    def divided(self) -> bool:
        """Whether both hosts compute the prompt."""
        return 0 < self.layers < self.of

    @property
    def spans(self) -> tuple[Span, ...]:
        """Who computes which layers, in their order."""
        both = Span("prefill", range(self.layers)), Span("decode", range(self.layers, self.of))
        return tuple(span for span in both if span.layers)


class Speeds:
    """Measured tokens/s of all layers of the model on this host, by the length of the prompt: attention makes long ones
    slower, and a pass through the weights short ones."""

    def __init__(self) -> None:
        self._by_length: dict[int, Fading] = {}
        self._measured: dict[int, float] = {}  # when, by length
        self._latest = Fading(SPEED_WEIGHT)

    @property
    def latest(self) -> float | None:
        """The speed of the last prompts, however long they were."""
        return self._latest.value

    def add(self, tokens: int, took_s: float, share: float = 1.0, *, now: float = 0.0) -> None:
        """So many tokens were computed. share: of the layers. now: time.monotonic()."""
        if tokens >= MEASURED_TOKENS and took_s > 0:
            self._measured[tokens.bit_length()] = now
            for speed in (self._latest, self._by_length.setdefault(tokens.bit_length(), Fading(SPEED_WEIGHT))):
                speed.add(tokens * share, took_s)

    def of(self, tokens: int, least: int = 0, since: float = 0.0) -> float | None:
        """The speed for a prompt of so many tokens, from the most alike one of at least `least` that was computed
        `since` then; None if none was."""
        known = self._measured.items()
        lengths = [length for length, at in known if length >= least.bit_length() and at >= since]
        nearest = min(lengths, key=lambda length: (abs(length - tokens.bit_length()), length), default=None)
        return None if nearest is None else self._by_length[nearest].value


@dataclass(frozen=True, slots=True)
class Here:
    """This host, as a plan sees it. tokens_s: its measured speed for such a prompt, of all layers; long_tokens_s: that
    of computations that are long enough to plan a split by; None if not measured. fresh: one was lately. share: of its
    time that it spends on tails; below 1 while answers run. room: a place in the batch is free, so that a tail can
    begin with its first chunk.
    """

    layout: Layout
    split: SplitLayout
    tokens_s: float | None = None
    long_tokens_s: float | None = None
    fresh: bool = True
    share: float = 1.0
    room: bool = True


@dataclass(frozen=True, slots=True)
class Rest:
    """The tokens [start, end) of a prompt, whose KV is missing. wanted: by its caller or hosts.toml."""

    start: int
    end: int
    wanted: Split = "auto"

    @property
    def chunk_tokens(self) -> int:
        """How many of them a split computes at a time."""
        return split_chunk(self.end)

    @property
    def tokens(self) -> int:
        return self.end - self.start


def plan(rest: Rest, offer: PrefillOffer | None, here: Here) -> Spans:
    """Who computes which layers of these tokens. Raises RequestError if that is asked for what the offered prefill host
    cannot do.

    Assumes that the prefill host computes these tokens only, that each layer takes as long as any other, and that rows
    are sent while others are computed.
    """
    of = here.split.layers
    if rest.tokens == 0:
        return Spans(0, of, "no token but the last is left to compute", 0.0)
    if offer is None:
        return Spans(of, of, "no prefill host was offered")
    if isinstance(rest.wanted, int):
        return _wanted(rest.wanted, offer, here)
    return _quickest(rest, structs.replace(offer, tokens_s=offer.speed(rest.tokens)), here)


def _quickest(rest: Rest, offer: PrefillOffer, here: Here) -> Spans:
    """The division that is expected to take the least time, or shows how long one takes."""
    of = here.split.layers
    partial = offer.layers is not None and offer.layers < of
    undivided = _undivided(rest, offer, here)
    left = f"{counted(rest.tokens, 'token')} left to compute"
    if offer.tokens_s is None:
        layers = of if not partial else 0 if undivided else offer.layers or of
        return Spans(layers, of, f"{left}; the prefill host's speed is not measured")
    tried = min(of - _tried(here, offer.tokens_s), offer.layers or of)
    trial = Spans(tried, of, f"{left}; this host's speed is measured with the layers from {tried} on")
    if not undivided and here.share == 1.0 and here.long_tokens_s is None:
        return trial
    ways = [way for way in (_local(rest, offer, here), _whole(rest, offer, here)) if way is not None]
    if here.tokens_s is None:
        few = rest.tokens <= UNMEASURED_TOKENS and offer.alone
        rule = f"until its speed is measured, this host computes up to {UNMEASURED_TOKENS} itself"
        return Spans(0 if few or partial else of, of, f"{left}; {rule}")
    if not ways:
        return Spans(0, of, f"{left}; the prefill host has the first {offer.layers} of {of} layers: {undivided}")
    best = min(ways, key=lambda way: way.seconds)
    if not undivided and here.long_tokens_s is not None:
        divided = min(_divisions(rest, offer, here, here.long_tokens_s), key=lambda way: way.seconds, default=best)
        if divided is not best:
            ways.append(divided)
            best = divided if divided.seconds < (1 - GAIN) * best.seconds else best
        if best.layers == of and here.share == 1.0 and not here.fresh:
            return trial
    return replace(best, reason=f"{left}: {', '.join(f'{seconds(way.seconds)} {way.reason}' for way in ways)}")


def _tried(here: Here, offered_tokens_s: float) -> int:
    """Layers that show the speed of this host: no more than it computed as fast as the prefill host does the others."""
    of, most = here.split.layers, here.split.layers // TRIED
    if here.long_tokens_s is not None:
        most = min(most, int(of * here.long_tokens_s / (here.long_tokens_s + offered_tokens_s)))
    return max(1, most)


def _undivided(rest: Rest, offer: PrefillOffer, here: Here) -> str:
    """Why these tokens are not divided between the hosts; empty if they may be."""
    if rest.wanted == "off":
        return "split is off"
    if here.split.refusal:
        return here.split.refusal
    if not offer.splits or offer.kv_version < KV_CHUNKS:
        return "the prefill host computes whole prompts only"
    if not here.room:
        return "every place in the batch is taken"
    return f"under {LONG_TOKENS} tokens" if rest.tokens < LONG_TOKENS else ""


def _wanted(layers: int, offer: PrefillOffer, here: Here) -> Spans:
    """The plan that a request or hosts.toml asks for; if this model or these hosts cannot divide it, a hand-off if the
    prefill host has all layers."""
    of, asked = here.split.layers, f"split = {layers}"
    undivided = of if offer.layers is None or offer.layers >= of else 0
    if layers == 0:
        return Spans(0, of, asked)
    if offer.layers is not None and layers > offer.layers:
        raise RequestError(
            f"split: {layers} of {of} layers are to be computed by a prefill host that has the first {offer.layers}",
            f'give "auto", or {offer.layers} at most',
        )
    if layers < of and here.split.refusal:
        return Spans(undivided, of, f"{asked}: {here.split.refusal}")
    if layers < of and (not offer.splits or offer.kv_version < KV_CHUNKS):
        return Spans(undivided, of, f"{asked}: the prefill host computes whole prompts only")
    first = here.split.places[0] + 1  # a head of fewer layers keeps nothing that could be sent
    return Spans(min(max(layers, first), of), of, asked)


def _local(rest: Rest, offer: PrefillOffer, here: Here) -> Spans | None:
    """All layers on this host; None if its caller does not want that, or its speed is not measured."""
    partial = offer.layers is not None and offer.layers < here.split.layers
    if here.tokens_s is None or not (offer.alone or partial):
        return None
    return Spans(0, here.split.layers, "here", rest.tokens / here.tokens_s)


def _whole(rest: Rest, offer: PrefillOffer, here: Here) -> Spans | None:
    """A hand-off; None if the prefill host has not all layers, or its speed is not measured."""
    of = here.split.layers
    if offer.tokens_s is None or (offer.layers is not None and offer.layers < of):
        return None
    sending = here.layout.nbytes(rest.end, rest.start) / offer.link_bytes_s if offer.link_bytes_s else 0.0
    took = offer.wait_s + OVERHEAD_S + max(rest.tokens / offer.tokens_s, sending)
    return Spans(of, of, "on a prefill host", took)


def _divisions(rest: Rest, offer: PrefillOffer, here: Here, tokens_s: float) -> Iterator[Spans]:
    """Every division of the layers. Chunks pass through head, link and tail one after the other: the slowest of the
    three takes its time for all of them, and the others for one more."""
    of = here.split.layers
    link = 1 / offer.link_bytes_s if offer.link_bytes_s else 0.0
    chunk = min(rest.chunk_tokens, rest.tokens)
    nbytes, kept = float(here.split.hidden * here.layout.itemsize), 0
    for k in range(1, min(of - 1, offer.layers or of) + 1):
        while kept < here.split.count(k):
            nbytes, kept = nbytes + _bytes_per_token(here.layout, kept, rest), kept + 1
        if kept:
            each = (k / of / (offer.tokens_s or inf), nbytes * link, (of - k) / of / (tokens_s * here.share))
            took = chunk * sum(each) + (rest.tokens - chunk) * max(each)
            reason = f"with the first {k} of {of} layers on a prefill host"
            yield Spans(k, of, reason, offer.wait_s + OVERHEAD_S + took)


def _bytes_per_token(layout: Layout, index: int, rest: Rest) -> float:
    """Bytes of one layer that each token of these adds to a transfer, in the mean. Of each chunk a sliding layer sends
    what it keeps after the chunk."""
    layer = layout.layers[index]
    if layer.kind == "state":
        return layer.state_bytes / rest.tokens
    sent = min(1.0, layer.window / rest.chunk_tokens) if layer.window else 1.0
    return sent * layer.row_bytes(layout.itemsize) + layer.state_bytes / rest.tokens


def in_chunks(rest: Rest, offer: PrefillOffer | None, here: Here) -> bool:
    """Whether a hand-off is to come in chunks, so that it can be gone on with if its sender fails: unless the link is
    slower than the prefill host, and what sliding layers send of each chunk would be more for it."""
    if rest.tokens == 0 or offer is None or offer.kv_version < KV_CHUNKS:
        return False
    count, whole = len(here.layout.layers), here.layout.nbytes(rest.end, rest.start)
    nbytes = rest.tokens * sum(_bytes_per_token(here.layout, index, rest) for index in range(count))
    speed = offer.speed(rest.tokens)
    computing = rest.tokens / speed if speed else inf
    return nbytes <= (1 + GAIN) * whole or nbytes <= computing * (offer.link_bytes_s or inf)


def sooner(*seconds: float | None) -> float | None:
    """The least of these; None if none of them is known."""
    return min((one for one in seconds if one is not None), default=None)
