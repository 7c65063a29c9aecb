"""vLLM's KV equals transformers', in an environment with vLLM: see `program`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.fleets import HAS_VLLM, VLLM_PYTHON

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="no environment with vLLM: make .venv-vllm/.ready"),
    pytest.mark.timeout(1500),
]

ROOT = Path(__file__).parents[3]
LARGEST = 1e-3
"""Of keys and values of a size of 1 to 100, in float32."""
NOTHING_HELD = dict.fromkeys(("requests", "orders", "blocks", "reports", "tickets"), 0)


def run(folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [str(VLLM_PYTHON), "-m", "tests.engines.vllm.program", str(folder)]
    answer = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1400
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return dict(json.loads(next(line for line in answer.stdout.splitlines() if line.startswith("{"))))


def test_the_kv_is_that_of_transformers_and_cancelled_prompts_leave_nothing(tmp_path: Path) -> None:
    """Prompts shorter and longer than the window, in chunks, with cached prefixes, eight at once; one with eight bits,
    for which heads of 64 are needed."""
    found = run(tiny_models.make("gemma3_text", tmp_path / "model", head_dim=64))
    assert {case: worst for case, worst in found["worst"].items() if worst > LARGEST} == {}, found
    assert {case for case, tokens in found["prefix tokens"].items() if tokens} == {"prefix", "whole prefix"}
    assert max(found["logits"]) <= LARGEST, "log-probabilities, the prompt whole and in pieces"
    assert 0.1 < found["steps of int8"] < 1, "rounded to the nearest step, and a value of either side may be next to it"
    assert found["held"] == NOTHING_HELD
    assert found["beats"] > 0, "of layers: a step itself does not beat here"
