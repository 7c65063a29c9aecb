"""Prefill with a `vllm serve` that runs beside this server, as a process of its own: asked by HTTP.

engine    the SendingEngine: orders to it, and answers of it
check     what is asked of a `vllm serve` before it gets orders, and every reason to refuse it
forms     bodies and answers of its HTTP interface; pure
calls     HTTP requests that can be ended at any time
prompt    the run of a prompt whose KV is sent
request   how long a request may be silent
pulse     whether it answers at all
describe  what it is, from inside its processes: the connector's side of `check`
"""

from __future__ import annotations

from disagg.config import EngineOptions
from disagg.engines.base import PrefillEngine


def prefill_engine(source: str, context: int, options: EngineOptions, hardware: str) -> PrefillEngine:
    """For engines/opening.py."""
    from disagg.engines.vllm.served.engine import ServedEngine

    return ServedEngine(source, context, options)
