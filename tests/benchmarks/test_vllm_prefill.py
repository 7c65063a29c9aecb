"""benchmarks/vllm_prefill.py: the order of its rounds."""

from __future__ import annotations

from benchmarks.vllm_prefill import turns


def test_every_way_comes_first_second_and_last_equally_often() -> None:
    rounds = [turns(["bare", "server", "transformers"], number) for number in range(3)]
    assert [sorted(names) for names in zip(*rounds, strict=True)] == [["bare", "server", "transformers"]] * 3
