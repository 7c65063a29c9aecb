"""gpt-oss: float experts that transformers stores transposed, and YaRN whose ramp is not rounded to whole pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, LoadedByMLX, MLXModel
from disagg.engines.model.profile import rope_differences


def with_float_experts(model_class: MLXModel) -> MLXModel:
    """mlx-lm's gpt_oss Model, as a class that also takes float experts; MXFP4 ones are what mlx-lm expects."""

    class GptOss(model_class):
        def sanitize(self, weights: dict[str, Any]) -> Any:
            return super().sanitize(transposed_experts(weights))

    return GptOss


def transposed_experts(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Float gpt_oss experts, [experts, in, out] as transformers saves them, as [experts, out, in] `.weight`s.

    MXFP4 checkpoints name theirs `_blocks` and `_scales`; they are returned unchanged.
    """
    from mlx import core as mx

    suffixes = ("experts.gate_up_proj", "experts.down_proj")
    return {
        f"{name}.weight" if name.endswith(suffixes) else name: mx.contiguous(array.swapaxes(-1, -2))
        if name.endswith(suffixes)
        else array
        for name, array in weights.items()
    }


ARCHITECTURES = {"gpt_oss": Architecture(mlx_model=with_float_experts)}


def untruncated_yarn(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Set the frequencies of YaRN ropes from the reference if the checkpoint has `truncate: false`.

    mlx-lm 0.32 always rounds the ends of YaRN's ramp to whole pairs. The gpt-oss checkpoints do not: one of their
    frequencies is off by 43 % in unpatched mlx-lm, and after 6,000 tokens only 38 % of the top-1 tokens agree.
    """
    from mlx import core as mx
    from mlx_lm.models.rope_utils import YarnRoPE

    scaling, reference, measured = loaded.config.get("rope_scaling") or {}, loaded.reference, loaded.measured
    if scaling.get("truncate") is not False or len(measured) != len(reference.layers):
        return []
    layers_by_difference: dict[str, int] = {}
    for index, _, _, rope in loaded.ropes:
        want, have = reference.layers[index].rope, measured[index].rope
        if not isinstance(rope, YarnRoPE) or want is None or rope._freqs.shape != (len(want.inv_freq),):
            continue
        for difference in rope_differences(want, have, reference.source, "mlx-lm"):
            layers_by_difference[difference] = layers_by_difference.get(difference, 0) + 1
            rope._freqs = 1.0 / mx.array(want.inv_freq, dtype=mx.float32)
            mx.eval(rope._freqs)
    return [
        PreflightFinding(
            "rope", "patched", f"on {count} layers {what}: it ignores YaRN's truncate: false; set from the reference"
        )
        for what, count in layers_by_difference.items()
    ]
