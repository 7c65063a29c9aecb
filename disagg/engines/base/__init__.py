"""The interfaces of engines, and the values that cross them. Nothing here imports a framework.

prefill   EmittingEngine: tokens -> stream of layer KV; SendingEngine: the same, and it sends the KV itself
decode    DecodeEngine: KV and the last token -> stream of tokens
audit     which tokens of received KV are computed again, and by how much it may differ
values    a token
"""

from disagg.engines.base.decode import DecodeEngine, DecodeRequest, DecodeTiming, HeldKV, Listener
from disagg.engines.base.prefill import (
    ONE_TOKEN,
    EmittingEngine,
    PrefillEngine,
    PrefillRun,
    PrefillTiming,
    PromptAndAnswer,
    SendingEngine,
    SendingRun,
)
from disagg.engines.base.values import Token
from disagg.engines.model.reference import EngineInfo

__all__ = [
    "ONE_TOKEN",
    "DecodeEngine",
    "DecodeRequest",
    "DecodeTiming",
    "EmittingEngine",
    "EngineInfo",
    "HeldKV",
    "Listener",
    "PrefillEngine",
    "PrefillRun",
    "PrefillTiming",
    "PromptAndAnswer",
    "SendingEngine",
    "SendingRun",
    "Token",
]
