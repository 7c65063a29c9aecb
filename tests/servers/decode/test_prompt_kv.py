"""disagg/servers/decode/prompt_kv.py: where the rest of a prompt is computed, as a table."""

from __future__ import annotations

import pytest

from disagg.api.requests import PrefillOffer
from disagg.servers.decode.audits import Fading
from disagg.servers.decode.prompt_kv import SPEED_WEIGHT, UNMEASURED_TOKENS, choose_prefill

FAST = PrefillOffer(tokens_s=5000, link_bytes_s=1e9)


@pytest.mark.parametrize(
    ("rest", "offer", "tokens_s", "rest_bytes", "local", "reason"),
    [
        (12, None, 1000.0, 0, False, "no prefill host was offered"),
        (0, FAST, None, 0, True, "no token but the last is left to compute"),
        (0, None, None, 0, True, "no token but the last is left to compute"),
        (UNMEASURED_TOKENS, FAST, None, 0, True, "32 tokens left to compute; until its speed is measured"),
        (UNMEASURED_TOKENS + 1, FAST, None, 0, False, "33 tokens left to compute; until its speed is measured"),
        (13, FAST, 1000.0, 0, False, "13 tokens left to compute: 13 ms here, 13 ms on a prefill host"),
        (11, FAST, 1000.0, 0, True, "11 tokens left to compute: 11 ms here, 12 ms on a prefill host"),
        (1, FAST, 1720.0, 0, True, "1 token left to compute: 0.58 ms here, 10 ms on a prefill host"),
        (
            1,
            FAST,
            None,
            0,
            True,
            "1 token left to compute; until its speed is measured, this host computes up to 32",
        ),
        (1000, FAST, 1000.0, 0, False, "1,000 tokens left to compute: 1.00 s here, 210 ms on a prefill host"),
        (1000, FAST, 1000.0, 2 * 10**9, True, "1,000 tokens left to compute: 1.00 s here, 2.01 s on a prefill host"),
        (
            1000,
            PrefillOffer(wait_s=3, tokens_s=5000),
            1000.0,
            9**9,
            True,
            "1,000 tokens left to compute: 1.00 s here, 3.21 s",
        ),
    ],
)
def test_the_rest_is_computed_where_it_is_expected_to_be_faster(
    rest: int, offer: PrefillOffer | None, tokens_s: float | None, rest_bytes: int, local: bool, reason: str
) -> None:
    choice = choose_prefill(rest, offer, tokens_s, rest_bytes)
    assert choice.local == local and choice.reason.startswith(reason)


def test_a_speed_follows_the_latest_measurements_by_their_tokens() -> None:
    speed = Fading(SPEED_WEIGHT)
    assert speed.value is None
    speed.add(1000, 1.0)
    assert speed.value == 1000
    speed.add(10, 1.0)
    assert speed.value == pytest.approx(710 / 1.7)
    for _ in range(30):
        speed.add(500, 1.0)
    assert speed.value == pytest.approx(500, rel=0.01)
