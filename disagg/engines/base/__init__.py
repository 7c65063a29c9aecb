"""The interfaces of engines, and the values that cross them. Nothing here imports a framework.

prefill   EmittingEngine: tokens -> stream of layer KV; SendingEngine: the same, and it sends the KV itself
decode    a request to a decode engine, and the tokens that its listener hears
scores    what a model gives the tokens of a prompt
audit     which tokens of received KV are computed again, and by how much it may differ
"""

from disagg.engines.base.decode import DecodeRequest, DecodeTiming, HeldKV, Listener, Token
from disagg.engines.base.prefill import (
    ONE_TOKEN,
    AnswerRequest,
    EmittingEngine,
    Logits,
    PrefillEngine,
    PrefillRun,
    PrefillTiming,
    PromptAndAnswer,
    PromptRun,
    SendingEngine,
    SendingRun,
)
from disagg.engines.base.scores import ChunkScores
from disagg.engines.model.reference import EngineInfo

__all__ = [
    "ONE_TOKEN",
    "AnswerRequest",
    "ChunkScores",
    "DecodeRequest",
    "DecodeTiming",
    "EmittingEngine",
    "EngineInfo",
    "HeldKV",
    "Listener",
    "Logits",
    "PrefillEngine",
    "PrefillRun",
    "PrefillTiming",
    "PromptAndAnswer",
    "PromptRun",
    "SendingEngine",
    "SendingRun",
    "Token",
]
