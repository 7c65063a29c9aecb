"""What this host knows when it plans who computes a prompt: its speeds, and what it computes already."""

from __future__ import annotations

import time

from disagg.api.layout import split_chunk
from disagg.api.names import KV_CHUNKS
from disagg.api.requests import DecodeBody, GenerateBody
from disagg.config import Split
from disagg.engines.base import DecodeTiming, EngineInfo
from disagg.engines.decoding.tail import TailPolicy
from disagg.kv.arriving import beside_bytes
from disagg.servers.decode.handoff import SlotTerms
from disagg.servers.decode.prompt_kv import PromptKV
from disagg.servers.decode.spans import FRESH_S, LONG_TOKENS, Here, Rest, Speeds, in_chunks, plan
from disagg.servers.host.admission import Admission
from disagg.servers.host.request import ActiveRequest


class Planner:
    """split: of hosts.toml. admission: of the requests in the batch. speeds: as measured on this host."""

    def __init__(self, split: Split, admission: Admission) -> None:
        self._split = split
        self._admission = admission
        self._tails: set[str] = set()  # requests some of whose layers are being computed here
        self.speeds = Speeds()

    def plan(
        self, request: ActiveRequest, kv: PromptKV, body: DecodeBody, info: EngineInfo, *, answers: bool
    ) -> SlotTerms:
        """Who computes which layers of what is not held of the prompt. answers: some are being generated, which tails
        leave most of the time. Raises RequestError; see `spans.plan`."""
        speeds = self.speeds
        wanted = self._split if body.split == "auto" else body.split
        rest = Rest(kv.held_tokens, len(request.tokens) - 1, wanted)
        speed = speeds.of(rest.tokens)
        here = Here(
            info.layout,
            info.split,
            speed,
            speeds.of(rest.tokens, LONG_TOKENS),
            fresh=speeds.of(rest.tokens, LONG_TOKENS, time.monotonic() - FRESH_S) is not None,
            share=(TailPolicy().share if answers else 1.0) / (1 + len(self._tails)),
            room=self._admission.running < self._admission.running_limit,
        )
        spans = plan(rest, body.prefill, here)
        if spans.divided:
            self._tails.add(request.key)
            request.cleanup.callback(self.end_tail, request)
        return SlotTerms(
            kv.held_tokens,
            spans,
            chunks=spans.divided or in_chunks(rest, body.prefill, here),
            here_s=rest.tokens / speed if speed else None,
            elsewhere_s=body.elsewhere_s,
        )

    def room(self, body: GenerateBody, tokens: int, info: EngineInfo) -> int:
        """Bytes beside the KV that a prompt of so many tokens may need while it arrives in chunks. Those of a hand-off
        may have any length."""
        offer = body.prefill if isinstance(body, DecodeBody) else None
        if offer is None or offer.kv_version < KV_CHUNKS:
            return 0
        whole = beside_bytes(info.layout, tokens, tokens, 0)
        if not offer.splits or info.split.refusal:
            return whole
        return max(whole, beside_bytes(info.layout, tokens, split_chunk(tokens), info.split.hidden))

    def computed(self, kv: PromptKV, timing: DecodeTiming) -> None:
        """The engine has computed what was left of a prompt."""
        now = time.monotonic()
        if kv.arriving is None:
            self.speeds.add(timing.computed_prompt_tokens, timing.first_token - timing.ingested, now=now)
        elif (layers := kv.layers) is not None and kv.resumed is None and kv.spans is not None:
            tokens, share = kv.arriving.tokens - kv.arriving.start, 1 - layers / kv.spans.of
            self.speeds.add(tokens, timing.tail_compute_s, share, now=now)

    def end_tail(self, request: ActiveRequest) -> None:
        """Nothing of this prompt is left to compute, or its request has ended. May be called twice."""
        self._tails.discard(request.key)
