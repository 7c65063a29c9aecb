"""Held KV of a simulated engine: counted, not stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.api.layout import Layout
from disagg.engines.model.held import PrefixCache


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Rows of this many tokens. token_bytes: of one, in the layers that keep every row."""

    tokens: int
    token_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def split(self, at: int) -> tuple[CountedRows, CountedRows]:
        return replace(self, tokens=at), replace(self, tokens=self.tokens - at)


@dataclass(frozen=True, slots=True)
class CountedSnapshot:
    """A snapshot of the layers that do not keep every row."""

    nbytes: int
    usable_from: int


class CountedKV:
    """A PrefixCache for KV of `layout`. hold: by one thread at a time."""

    def __init__(self, layout: Layout, limit: int) -> None:
        self._others = replace(layout, layers=tuple(at for at in layout.layers if at.kind != "full"))
        self._token_bytes = layout.nbytes(1) - self._others.nbytes(1)
        self._rewindable = min((layer.window or 0 for layer in self._others.layers), default=None)
        self.store: PrefixCache[CountedRows, CountedSnapshot] = PrefixCache(limit, self._rewindable)

    def hold(self, prompt: Sequence[int], answer: Sequence[int], salt: str) -> None:
        """Hold the KV of a request that has ended."""
        tokens = [*prompt, *answer]
        snapshots = {at: self._snapshot(at) for at in (len(prompt) - 1, len(tokens))}
        self.store.add(tokens, salt, lambda start, end: CountedRows(end - start, self._token_bytes), snapshots)

    def _snapshot(self, tokens: int) -> CountedSnapshot:
        complete = tokens <= (self._rewindable or 0)
        return CountedSnapshot(self._others.nbytes(tokens), 0 if complete else tokens)
