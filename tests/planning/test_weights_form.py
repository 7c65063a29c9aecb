from __future__ import annotations

from typing import Any

import pytest

from disagg.planning.checkpoint import weights_form
from tests.planning.published_configs import GPT_OSS, GPT_OSS_MLX, QWEN, QWEN_FP8, QWEN_MLX


@pytest.mark.parametrize(
    ("config", "quantization", "expected"),
    [
        (QWEN, None, "bfloat16"),
        (QWEN, "int8", "int8"),
        (QWEN_FP8, None, "fp8"),
        (QWEN_MLX, None, "8-bit, groups of 64"),
        (GPT_OSS, None, "mxfp4"),
        (GPT_OSS, "mxfp4", "mxfp4"),
        (GPT_OSS_MLX, None, "8-bit, groups of 64 and mxfp4"),
        (QWEN | {"quantization_config": {"quant_method": "awq", "bits": 4}}, None, "4-bit awq"),
        (QWEN | {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, None, "mxfp4"),
    ],
)
def test_the_form_of_the_weights_is_read_from_config_json(
    config: dict[str, Any], quantization: str | None, expected: str
) -> None:
    assert weights_form(config, "bfloat16", quantization) == expected
