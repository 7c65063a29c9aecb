"""`.venv-vllm/bin/python -m tests.engines.vllm.unpatched FOLDER`: what vLLM itself does where disagg has a patch.

Prints JSON: what is patched -> whether the patch is needed, and whether it is of use. FOLDER: for the meeting point of
its process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from disagg.engines.model.architectures.base import ReadByVLLM
from disagg.engines.model.architectures.patches import VLLM_PATCHES
from disagg.engines.process import exit_without_cleanup
from tests.surveys.tables import known

WINDOW = 64


def window_of(stated: int, folder: Path) -> int:
    """The window of a layer of cohere2 as vLLM computes it."""
    from transformers import CONFIG_MAPPING
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import commandr

    cohere = CONFIG_MAPPING["cohere2"].from_dict({**known()["cohere2"], "sliding_window": stated})
    with set_current_vllm_config(VllmConfig()), patch.object(commandr, "Attention"):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'met'}", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        sliding = cohere.layer_types.index("sliding_attention")
        return int(commandr.CohereAttention(cohere, prefix=f"model.layers.{sliding}.self_attn").sliding_window)


def convolves_one_token() -> bool:
    """Whether the convolution of a gated delta net takes a prompt of one token whose row is part of a wider tensor."""
    import torch
    from vllm import _custom_ops as operations
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    states = torch.zeros(2, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    try:
        gdn_attention._causal_conv1d_fwd_cpu(
            x=torch.ones(1, 96, dtype=torch.bfloat16)[:, :64].T,
            weight=operations.causal_conv1d_weight_pack(torch.ones(64, 4, dtype=torch.bfloat16)),
            bias=None,
            conv_states=states,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            cache_indices=torch.tensor([1], dtype=torch.int32),
            has_initial_state=torch.tensor([False]),
            silu_activation=True,
            is_weight_packed=True,
        )
    except RuntimeError:
        return False
    return bool(states[1, :, -1].all())


def scales_queries(stated: dict[str, Any]) -> bool:
    """Whether ministral3 scales the queries of far tokens if config.json also has this."""
    from transformers import CONFIG_MAPPING
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models import llama, mistral

    text = CONFIG_MAPPING["ministral3"].from_dict({**known()["ministral3"], **stated})
    with set_current_vllm_config(VllmConfig()), patch.object(llama, "Attention"):
        attention = mistral.MistralAttention(text, text.hidden_size, 4, 2, prefix="model.layers.0.self_attn")
    return bool(attention.do_llama_4_scaling) and attention.llama_4_scaling_beta == 0.1


def examine(folder: Path) -> dict[str, list[bool]]:
    from transformers import CONFIG_MAPPING

    windows, queries, convolutions = VLLM_PATCHES
    cohere = ReadByVLLM(CONFIG_MAPPING["cohere2"].from_dict({"sliding_window": WINDOW, "layer_types": None}), "cpu")
    without: Any = window_of(WINDOW, folder)
    windows.apply(cohere)
    found = {windows.what: [without != WINDOW, window_of(cohere.overrides["sliding_window"], folder) == WINDOW]}
    ministral = ReadByVLLM(CONFIG_MAPPING["ministral3"].from_dict(dict(known()["ministral3"])), "cpu")
    queries.apply(ministral)
    found |= {queries.what: [not scales_queries({}), scales_queries(ministral.overrides)]}
    needed = not convolves_one_token()
    convolutions.apply(ReadByVLLM(CONFIG_MAPPING["qwen3_5"]().get_text_config(decoder=True), "cpu"))
    return found | {convolutions.what: [needed, convolves_one_token()]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(examine(Path(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    exit_without_cleanup(0)
