"""disagg/engines/vllm/sampling.py: what vLLM's sampling cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.api.sampling import Sampling
from disagg.engines.base import AnswerRequest
from disagg.engines.vllm.sampling import parameters
from disagg.errors import CapabilityMissing


@pytest.mark.parametrize("penalty", [{"presence_penalty": 1.0}, {"frequency_penalty": -0.5}, {"bad_words": ("a",)}])
def test_an_answer_whose_beginning_would_have_to_be_penalised_is_left_to_other_hosts(penalty: dict[str, Any]) -> None:
    with pytest.raises(CapabilityMissing, match="penalty cannot be continued by vLLM"):
        parameters(AnswerRequest([1], Sampling(**penalty), 3))
