from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_random_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine makes some at first, 64 MiB of them if a hand-off is to be measured."""
    monkeypatch.setattr("disagg.engines.simulated.prefill.NOISE_BYTES", 1 << 20)
