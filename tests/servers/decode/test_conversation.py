"""A conversation over a hand-off: only what is new at a turn is sent, and every answer is that of a fresh prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from tests.fleets import RunningFleet
from tests.servers.test_resume import Received

TURNS = 4
NEW_TOKENS = 60
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "ignore_eos": True}


def answer_of_the_prefill_host(fleet: RunningFleet, tokens: Sequence[int]) -> list[int]:
    """The answer of the other engine alone, to a prompt that shares KV with no other."""
    body = {"model": "tiny", "tokens": tokens, "sampling": SAMPLING, "cache_salt": secrets.token_hex(8)}
    with fleet.http("tiny-prefill") as http:
        return Received(http.post("/generate", json=body).text).ids


def test_a_turn_sends_or_computes_only_what_is_new(tiny_fleet: RunningFleet) -> None:
    conversation, row_bytes = list(range(100, 200)), 0
    with tiny_fleet.client() as client:
        for turn in range(TURNS):
            conversation += [(turn * 7 + token * token) % 300 for token in range(NEW_TOKENS)]
            answer = client.generate("tiny", tokens=conversation, **SAMPLING)
            ids = [token.id for token in answer.tokens]
            assert ids == answer_of_the_prefill_host(tiny_fleet, conversation)
            metrics = answer.metrics
            rest = len(conversation) - 1 - metrics.held_tokens
            row_bytes = row_bytes or metrics.kv_bytes // rest
            assert metrics.kv_bytes == (0 if metrics.local else rest * row_bytes)
            assert metrics.decode_computed_tokens == (rest + 1 if metrics.local else 1)
            assert turn == 0 or rest <= NEW_TOKENS + 1
            conversation += ids
