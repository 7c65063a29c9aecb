"""benchmarks/vllm_prefill.py: what it computes of its rounds."""

from __future__ import annotations

import pytest

from benchmarks.vllm_prefill import Spent, figures


def test_ratios_are_of_each_round_and_cpu_time_is_what_the_server_adds_per_megabyte() -> None:
    rounds = [
        {"bare": Spent(2.0, 1.9), "server": Spent(2.0 / ratio, 2.0, 50_000_000), "transformers": Spent(4.0)}
        for ratio in (0.9, 0.98, 1.0)
    ]
    found = figures(rounds)
    assert found["server_over_bare"] == pytest.approx(0.98)
    assert found["server_over_bare_range"] == pytest.approx([0.9, 1.0])
    assert found["server_over_bare_interval"] == pytest.approx([0.9, 1.0])
    assert found["vllm_over_transformers"] == pytest.approx(1.96)
    assert found["cpu_ms_per_mb"] == pytest.approx(2.0)
