"""A prefill engine in a process of its own and a decode engine in this one.

KV crosses from one to the other over loopback.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from disagg.api.events import TokenLogprob
from disagg.api.requests import KVAddress
from disagg.api.sampling import Sampling
from disagg.api.verify import PrefillReady
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, DecodeTiming, Token
from disagg.engines.base.audit import AuditBounds
from disagg.engines.base.decode import Collector
from disagg.engines.decoding import DecodeEngine
from disagg.engines.model.reference import Reference
from disagg.engines.opening import open_decode
from disagg.errors import DisaggError
from disagg.kv.arena import Arenas
from disagg.kv.arriving import ArrivingKV
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.verify.hosts import sample_text
from disagg.verify.prefill import TIMEOUT_S, PrefillProcess, PrefillSpec


class DecodedAnswer(Collector):
    """likeliest: the tokens so far, each with the likeliest in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.likeliest: list[TokenLogprob] = []

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.likeliest += [TokenLogprob(token.id, token.logprob, token.top) for token in tokens]
        super().on_tokens(tokens, timing)


@dataclass(slots=True)
class EnginePair:
    """Both engines of one model, and the KV server between them. prefill_info: what the prefill engine states."""

    prefill: PrefillProcess
    prefill_info: PrefillReady
    decode_engine: DecodeEngine
    tickets: Tickets
    server: KVServer

    @classmethod
    @contextmanager
    def load(
        cls, spec: PrefillSpec, reference: Reference, decode_source: str, options: EngineOptions
    ) -> Iterator[Self]:
        """Load the model in both engines, at the same time, and end them. reference: what `spec.source` describes.
        options: those of the decode engine. ModelError or PreflightRefused if it cannot be served, FingerprintMismatch
        if the two are not forms of one model."""
        with PrefillProcess(spec) as prefill, closing(open_decode(options, decode_source, spec.context)) as decode:
            reference.fingerprint.require_same(decode.info.fingerprint, mine="prefill", theirs="decode")
            ready = prefill.ready()
            tickets = Tickets(Arenas(decode.allocate))
            with closing(KVServer("127.0.0.1", 0, tickets)) as server:
                yield cls(prefill, ready, decode, tickets, server)

    @property
    def split_refusal(self) -> str:
        """Why no prompt is computed by both engines; empty if it can be."""
        return self.decode_engine.info.split.refusal or self.prefill_info.split_refusal

    def sample_prompts(self, length: int) -> tuple[list[int], list[int]]:
        """Two different prompts of exactly `length` tokens, from `sample_text`."""
        tokens = self.decode_engine.tokenizer.encode(sample_text())
        while len(tokens) < 2 * length + 1:
            tokens += tokens
        # The second is taken from the end, so that the two share no text.
        return tokens[:length], tokens[-length:]

    def hand_over(self, prompt: Sequence[int], chunk: int | None) -> ReceivedKV:
        """The KV of prompt[:-1], computed by the prefill engine and received over TCP."""
        outcomes: queue.Queue[KVOutcome] = queue.Queue()
        info = self.decode_engine.info
        expected = Expected("verify", info.layout, info.fingerprint, token_hash(prompt), len(prompt) - 1)
        slot = self.tickets.issue(expected, outcomes.put, deadline=time.monotonic() + TIMEOUT_S)
        self.prefill.send(prompt, KVAddress("127.0.0.1", self.server.port), slot.ticket, chunk)
        outcome = outcomes.get(timeout=TIMEOUT_S)
        if isinstance(outcome, DisaggError):
            raise outcome
        return outcome

    def decode(
        self, prompt: Sequence[int], sampling: Sampling, kv: ReceivedKV | None, audit: AuditBounds | None = None
    ) -> DecodedAnswer:
        """The decode engine's answer, with `kv` or alone. audit: the bounds that `kv` is audited with."""
        collector = DecodedAnswer()
        self.decode_engine.submit(DecodeRequest("verify", prompt, sampling, kv, audit=audit), collector)
        collector.timing.result(TIMEOUT_S)
        return collector

    def split(self, prompt: Sequence[int], sampling: Sampling, layers: int, chunk: int | None) -> DecodedAnswer:
        """The decode engine's answer to a prompt of which the prefill engine computes the first `layers` layers, and
        the decode engine the others, meanwhile."""
        info, count, deadline = self.decode_engine.info, len(prompt) - 1, time.monotonic() + TIMEOUT_S
        expected = Expected("verify", info.layout, info.fingerprint, token_hash(prompt), count)
        expected = replace(expected, layers=layers, split=info.split, chunks=True)
        arriving = ArrivingKV(expected.head, count, arenas=self.tickets.arenas, layers=layers, hidden=expected.hidden)
        slot = self.tickets.issue(expected, lambda outcome: None, deadline=deadline, arriving=arriving)
        answer = DecodedAnswer()
        try:
            self.decode_engine.submit(DecodeRequest("verify", prompt, sampling, arriving=arriving), answer)
            self.prefill.send(prompt, KVAddress("127.0.0.1", self.server.port), slot.ticket, chunk, layers)
            answer.timing.result(TIMEOUT_S)
        finally:
            self.decode_engine.cancel("verify")
            arriving.release()
        return answer

    def decode_logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, chunk_tokens: int | None = None
    ) -> Any:
        return self.decode_engine.logits(tokens, last, kv, chunk_tokens=chunk_tokens)
