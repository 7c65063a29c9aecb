"""The tail of a split, on mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from disagg.api.layout import Layout
from disagg.engines.decoding import Job
from disagg.engines.decoding.tail import Tail
from disagg.engines.mlx.cache import exact
from disagg.engines.mlx.span import Span, Spans
from disagg.kv.arriving import ArrivingKV, Chunk


class MLXTail(Tail):
    """Runs the last layers of the model over mlx-lm's own caches, after what is held of them."""

    def __init__(self, job: Job, arriving: ArrivingKV, spans: Spans, layout: Layout) -> None:
        count = spans.split.layers
        first = count if arriving.layers is None else min(arriving.layers, count)
        super().__init__(arriving, count - first)
        self._tokens = job.request.tokens
        self._span: Span | None = spans(first, count) if self.layers else None
        self._caches: list[Any] = []
        here = Layout(layout.layers[spans.split.count(first) :], layout.dtype)
        self._nbytes = here.nbytes(arriving.tokens)
        if self._span is not None:
            held = job.held.read() if job.held is not None else None
            self._caches = self._span.caches(held, arriving.tokens - arriving.start)

    @property
    def caches(self) -> list[Any]:
        """Those of the layers that are computed here, after `covered` tokens."""
        return [exact(cache) for cache in self._own()]

    @property
    def nbytes(self) -> int:
        """Of the whole prompt: the first piece allocates so much."""
        return self._nbytes

    def _own(self) -> list[Any]:
        return self._span.own(self._caches) if self._span is not None else []

    def _compute(self, chunk: Chunk, begin: int, end: int) -> None:
        assert self._span is not None, "there are layers to compute"
        hidden = self._hidden(chunk)[:, begin - chunk.start : end - chunk.start]
        self._span.run(self._tokens[begin:end], self._caches, hidden)
        mx.eval([cache.state for cache in self._own()])

    def _hidden(self, chunk: Chunk) -> Any:
        """The hidden states of a chunk, [1, tokens, hidden]: a view of the memory into which they were received."""
        assert chunk.hidden is not None, "the transfer has hidden states"
        tokens, width = chunk.end - chunk.start, self.arriving.hidden
        dtype = getattr(mx, self.arriving.layout.dtype)
        states = chunk.hidden.memory.reshape(-1)[: tokens * width * dtype.size].view(dtype)
        return states.reshape(1, tokens, width)
