"""`.venv-vllm/bin/python -m tests.engines.vllm.state_shapes states`: the shapes that vLLM calculates for the states of
the tiny models in tests/engines/architectures/configs, as JSON: kind -> ranks -> shapes."""

from __future__ import annotations

import json
import sys
from typing import Any

from disagg.engines.process import exit_without_cleanup
from tests.engines.architectures.configs import config


def shapes() -> dict[str, dict[int, Any]]:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Calculator

    names = ("qwen3_next", "kimi_linear", "nemotron_h", "falcon_mamba", "lfm2")
    delta, kda, mamba, channels, short = map(config, names)
    linear = kda["linear_attn_config"]
    return {
        "gated delta": {
            ranks: Calculator.gated_delta_net_state_shape(
                ranks,
                delta["linear_num_key_heads"],
                delta["linear_num_value_heads"],
                delta["linear_key_head_dim"],
                delta["linear_value_head_dim"],
                delta["linear_conv_kernel_dim"],
            )
            for ranks in (1, 2)
        },
        "kda": {
            ranks: Calculator.kda_state_shape(
                ranks, linear["num_heads"], linear["head_dim"], conv_kernel_size=linear["short_conv_kernel_size"]
            )
            for ranks in (1, 2)
        },
        "mamba 2": {
            ranks: Calculator.mamba2_state_shape(
                ranks,
                mamba["mamba_num_heads"] * mamba["mamba_head_dim"],
                mamba["n_groups"],
                mamba["mamba_num_heads"],
                mamba["mamba_head_dim"],
                mamba["ssm_state_size"],
                mamba["conv_kernel"],
            )
            for ranks in (1, 2)
        },
        "mamba 1": {
            ranks: Calculator.mamba1_state_shape(
                ranks, channels["intermediate_size"], channels["state_size"], channels["conv_kernel"]
            )
            for ranks in (1, 2)
        },
        "short": {
            ranks: Calculator.short_conv_state_shape(ranks, short["hidden_size"], short["conv_L_cache"])
            for ranks in (1, 2)
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(shapes()) + "\n")
    sys.stdout.flush()
    exit_without_cleanup(0)
