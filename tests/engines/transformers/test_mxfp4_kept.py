"""quantization = "mxfp4": the checkpoint's own weights are kept, or the host is refused before it loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disagg.engines.transformers.load import MXFP4Support, quantization, require_mxfp4_weights
from disagg.errors import ModelError


def test_without_cuda_or_kernels_mxfp4_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ModelError) as caught:
        quantization("mxfp4", lambda: MXFP4Support((0, 0), triton=True, kernels=False))
    assert "needs a CUDA device of compute capability 7.5 or newer and the package kernels" in caught.value.message
    assert "triton" not in caught.value.message
    assert "'.[prefill,quantize]' in a clone" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_refuses_mxfp4() -> None:
    with pytest.raises(ModelError, match="needs a CUDA device"):
        quantization("mxfp4")


def test_where_transformers_keeps_mxfp4_it_loads_the_checkpoint_as_it_is() -> None:
    assert quantization("mxfp4", lambda: MXFP4Support((12, 1), triton=True, kernels=True)) == {}


@pytest.mark.parametrize("config", ["{}", '{"quantization_config": {"quant_method": "fp8"}}'])
def test_a_checkpoint_that_is_not_mxfp4_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="quantization 'mxfp4' keeps MXFP4 weights as they are, and quant_method here"):
        require_mxfp4_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    require_mxfp4_weights(tmp_path)
