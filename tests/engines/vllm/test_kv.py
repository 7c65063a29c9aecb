"""vLLM's KV equals transformers', in an environment with vLLM: see `program`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.fleets import needs_vllm, vllm_process

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(1500),
]

LARGEST = 1e-3
"""Of keys and values of a size of 1 to 100, in float32."""
NOTHING_HELD = dict.fromkeys(("requests", "orders", "blocks", "reports", "tickets"), 0)


def run(model: Path, folder: Path) -> dict[str, Any]:
    answer, errors = folder / "answer", folder / "errors"
    program = vllm_process().start(
        [str(model)], os.environ, answer, program="tests.engines.vllm.program", errors=errors
    )
    try:
        assert program.wait(1400) == 0, errors.read_text()[-4000:]
    finally:
        program.kill()
    return dict(json.loads(next(line for line in answer.read_text().splitlines() if line.startswith("{"))))


def test_the_kv_is_that_of_transformers_and_cancelled_prompts_leave_nothing(tmp_path: Path) -> None:
    """Prompts shorter and longer than the window, in chunks, with cached prefixes, eight at once; one with eight bits,
    for which heads of 64 are needed."""
    found = run(tiny_models.make("gemma3_text", tmp_path / "model", head_dim=64), tmp_path)
    assert {case: worst for case, worst in found["worst"].items() if worst > LARGEST} == {}, found
    assert {case for case, tokens in found["prefix tokens"].items() if tokens} == {"prefix", "whole prefix"}
    assert max(found["logits"]) <= LARGEST, "log-probabilities, the prompt whole and in pieces"
    assert 0.1 < found["steps of int8"] < 1, "rounded to the nearest step, and a value of either side may be next to it"
    assert found["held"] == NOTHING_HELD
    assert found["beats"] > 0, "of layers: a step itself does not beat here"
