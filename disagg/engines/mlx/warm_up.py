"""Small requests to run once after loading, since kernels are compiled on first use."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeEngine, DecodeRequest, DecodeTiming, Token
from disagg.errors import ModelError
from disagg.kv.arena import Arenas
from disagg.kv.received import Placement, ReceivedKV

_PROMPT = [0] * 8
_TOKENS = 4
_DEADLINE_S = 600.0  # a large model's first step on a cold disk


def warm_up(engine: DecodeEngine) -> None:
    """Run one request with KV (zeros) and one that computes its prompt, together in one batch. ModelError if they fail
    or take longer than ten minutes."""
    sampling = Sampling(max_tokens=_TOKENS, ignore_eos=True)
    waiters = []
    for name, kv in (("handed-over", _zero_kv(engine, len(_PROMPT) - 1)), ("alone", None)):
        waiters.append(_Waiter())
        engine.submit(DecodeRequest(f"warm-up-{name}", _PROMPT, sampling, kv), waiters[-1])
    for waiter in waiters:
        waiter.wait()


def _zero_kv(engine: DecodeEngine, tokens: int) -> ReceivedKV:
    """KV of `tokens` tokens, all zeros, in the model's layout."""
    layout = engine.info.layout
    arena = Arenas(engine.allocate).acquire(Placement.of(layout, tokens).nbytes)
    arena.data[:] = 0
    return ReceivedKV(layout, tokens, arena)


class _Waiter:
    """A listener that waits for the end of its request."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        if any(token.finish for token in tokens):
            self._ended.set()

    def on_error(self, error: Exception) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> None:
        if not self._ended.wait(_DEADLINE_S):
            raise ModelError(f"the warm-up did not end in {_DEADLINE_S:.0f} s", "check the host's load and memory")
        if self._error is not None:
            raise ModelError(f"the warm-up failed: {self._error}") from self._error
