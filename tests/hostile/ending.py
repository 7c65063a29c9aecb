"""Servers whose process ends when their engine begins with one prompt, as a bug in a GPU's kernel may have it.

As a program (`python -m tests.hostile.ending --config hosts.toml --host NAME`) it serves a simulated host as `python -m
disagg.servers` does. A prompt that has the token ENDS_DECODE ends decode hosts, and prefill hosts that answer alone;
one with ENDS_PREFILL ends prefill hosts when they compute it for a decode host. One with ENDLESS is never computed by
decode hosts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final

from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.engines.simulated.prefill import SimulatedPrefillEngine

ENDLESS: Final = 31_997
ENDS_DECODE: Final = 31_998
ENDS_PREFILL: Final = 31_999


def _ending(call: Callable[..., Any], token: int, tokens_of: Callable[[Any], Sequence[int]]) -> Callable[..., Any]:
    def ends(engine: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        if token in tokens_of(request):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(engine, request, *arguments, **options)

    return ends


def _endless(submit: Callable[..., Any]) -> Callable[..., Any]:
    def submits(engine: Any, request: Any, *arguments: Any) -> Any:
        return None if ENDLESS in request.tokens else submit(engine, request, *arguments)

    return submits


def _main() -> int:
    decode, prefill = SimulatedDecodeEngine, SimulatedPrefillEngine
    decode.submit = _endless(decode.submit)  # type: ignore[method-assign]
    decode.submit = _ending(decode.submit, ENDS_DECODE, lambda request: request.tokens)  # type: ignore[method-assign]
    answer = _ending(prefill.start_answer, ENDS_DECODE, lambda request: request.tokens)
    prefill.start_answer = answer  # type: ignore[method-assign]
    prefill.start = _ending(prefill.start, ENDS_PREFILL, list)  # type: ignore[method-assign]
    from disagg.servers.__main__ import main

    return main()


if __name__ == "__main__":
    raise SystemExit(_main())
