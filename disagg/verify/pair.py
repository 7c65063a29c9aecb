"""A prefill and a decode engine in one process, with a KV transfer over loopback between them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeEngine, DecodeRequest, DecodeTiming, PrefillEngine, Token
from disagg.errors import DisaggError
from disagg.kv.arena import Arenas
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.receive.tickets import Expected, KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.send import Transfer
from disagg.kv.wire.frames import Header

TIMEOUT_S = 3600.0
SAMPLE_MODULES = ("argparse", "tarfile", "typing", "subprocess", "inspect", "turtle", "pydoc", "zipfile", "decimal")


class _Collector:
    """A Listener that collects a whole answer. outcome: its timing, or the error that ended it."""

    def __init__(self) -> None:
        self.outcome: queue.Queue[DecodeTiming | Exception] = queue.Queue()
        self.tokens: list[int] = []

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.tokens += [token.id for token in tokens]
        if tokens[-1].finish:
            self.outcome.put(timing)

    def on_error(self, error: Exception) -> None:
        self.outcome.put(error)


@dataclass(slots=True)
class EnginePair:
    """Both engines of one model, and the KV server between them."""

    prefill: PrefillEngine
    decode_engine: DecodeEngine
    tickets: Tickets
    server: KVServer

    @classmethod
    def load(cls, prefill_source: str, decode_source: str, options: EngineOptions, context: int) -> Self:
        """Load the model in both frameworks. ModelError or PreflightRefused if it cannot be served."""
        from disagg.engines.mlx.engine import MLXDecodeEngine
        from disagg.engines.transformers.engine import TransformersPrefillEngine

        decode_options = dataclasses.replace(options, name="mlx", device="auto")
        decode = MLXDecodeEngine(decode_source, context, decode_options)
        try:
            prefill = TransformersPrefillEngine(prefill_source, context, dataclasses.replace(options, max_held_bytes=0))
            prefill.info.fingerprint.require_same(decode.info.fingerprint, mine="prefill", theirs="decode")
        except BaseException:
            decode.close()
            raise
        tickets = Tickets(Arenas(decode.allocate))
        return cls(prefill, decode, tickets, KVServer("127.0.0.1", 0, tickets))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.server.close()
        self.decode_engine.close()

    def sample_prompts(self, length: int) -> tuple[list[int], list[int]]:
        """Two different prompts of exactly `length` tokens, from source text of the Python standard library."""
        text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in SAMPLE_MODULES)
        tokens = self.prefill.tokenizer.encode(text)
        while len(tokens) < 2 * length + 1:
            tokens += tokens
        # The second is taken from the end, so that the two share no text.
        return tokens[:length], tokens[-length:]

    def hand_over(self, prompt: Sequence[int], chunk: int | None) -> ReceivedKV:
        """The KV of prompt[:-1], computed by the prefill engine and received over TCP."""
        outcomes: queue.Queue[KVOutcome] = queue.Queue()
        info, n = self.prefill.info, len(prompt) - 1
        deadline = time.monotonic() + TIMEOUT_S
        expected = Expected("verify", info.layout, info.fingerprint, token_hash(prompt), n)
        slot = self.tickets.issue(expected, outcomes.put, deadline=deadline)
        header = Header(slot.ticket, "verify", info.fingerprint, info.layout, token_hash(prompt), n)
        with Transfer.open("127.0.0.1", self.server.port, header, deadline=deadline) as transfer:
            self.prefill.prefill(prompt[:-1], transfer.send, chunk_tokens=chunk)
            transfer.finish()
        outcome = outcomes.get(timeout=TIMEOUT_S)
        if isinstance(outcome, DisaggError):
            raise outcome
        return outcome

    def prefill_alone(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The answer of the prefill engine alone."""
        return [token.id for token in self.prefill.generate(prompt, sampling)]

    def decode(self, prompt: Sequence[int], sampling: Sampling, kv: ReceivedKV | None) -> tuple[list[int], int]:
        """The decode engine's answer, with `kv` or alone, and how many prompt tokens it computed."""
        collector = _Collector()
        self.decode_engine.submit(DecodeRequest("verify", prompt, sampling, kv), collector)
        outcome = collector.outcome.get(timeout=TIMEOUT_S)
        if isinstance(outcome, Exception):
            raise outcome
        return collector.tokens, outcome.computed_prompt_tokens
