"""Bodies that no client should send: whatever they hold, the answer is 200 or says what is wrong with them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/v1/parallel",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 2**70, 1e308, -0.5, 16, 17),
    *("", "x", "\ud800", "\0", "x" * 300, "m", [], [[]], [1, "x"], [[1], [2]], {}, {"type": "text"}),
    *([{}], [{"role": "user"}], [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}]),
    {"include_usage": True},
)
FIELDS = (
    *("model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "stop"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "best_of", "options", "tools"),
    *(
        "response_format",
        "system",
        "raw",
        "format",
        "echo",
        "unknown",
        "tool_choice",
        "thinking",
        "input",
        "think",
        "text",
        "reasoning",
        "output_config",
        "requests",
    ),
)


@pytest.mark.parametrize("seed", range(4))
async def test_any_body_is_answered_or_refused_with_a_reason(seed: int) -> None:
    chance = random.Random(seed)
    async with fake_client.http(fake_client.app(FakeClient("text "))) as http:
        for _ in range(150):
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
            body |= {"input": "x", "max_tokens": 5} if chance.random() < 0.8 else {}
            body |= {chance.choice(FIELDS): chance.choice(VALUES) for _ in range(chance.randrange(4))}
            response = await http.post(chance.choice(PATHS), content=json.dumps(body).encode())
            assert response.status_code in (200, 400, 404), (body, response.text)
            assert response.status_code == 200 or response.json()["error"], body
