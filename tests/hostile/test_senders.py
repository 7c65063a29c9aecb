"""A prefill host that sends next to nothing costs one attempt, and is counted against it."""

from __future__ import annotations

import pytest

from tests.fleets import RunningFleet
from tests.hostile.senders import PROMPT, TOKENS, WAYS, client_of_liar


@pytest.mark.parametrize("way", WAYS)
def test_the_next_prefill_host_sends_what_one_that_trickles_or_idles_does_not(
    tiny_fleet: RunningFleet, way: str
) -> None:
    """Without a bound the request would end at its deadline."""
    prompt = [list(WAYS).index(way) + 20, *PROMPT[1:TOKENS]]
    with tiny_fleet.client() as client:
        right = client.generate("tiny", tokens=prompt, max_tokens=8, alone="prefill")
    with client_of_liar(tiny_fleet, "tiny-prefill", WAYS[way]) as client:
        answer = client.generate("tiny", tokens=prompt, max_tokens=8, timeout=60, local_prefill=False, split="off")
        breaker = client.view.of("bad-tiny-prefill").breaker
    assert [token.id for token in answer.tokens] == [token.id for token in right.tokens]
    assert (answer.metrics.method, answer.metrics.prefill_server) == ("disaggregated", "tiny-prefill")
    assert breaker.failures == 1
    status = tiny_fleet.status("tiny-decode")
    assert status["kv_bytes"] == 0 and status["last_error"]["code"] == "SenderTooSlow"
