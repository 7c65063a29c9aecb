"""quantization = "mxfp4": the checkpoint's own weights are kept, or the host is refused before it loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers.utils

from disagg.engines.transformers.load import quantization, require_mxfp4_weights
from disagg.errors import ModelError


def test_without_cuda_or_kernels_mxfp4_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(transformers.utils, "is_triton_available", lambda version: True)
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: False)
    with pytest.raises(ModelError) as caught:
        quantization("mxfp4")
    assert "needs a CUDA device of compute capability 7.5 or newer and the package kernels" in caught.value.message
    assert "triton" not in caught.value.message
    assert "'.[prefill,quantize]' in a clone" in caught.value.hint


def test_where_transformers_keeps_mxfp4_it_loads_the_checkpoint_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 1))
    monkeypatch.setattr(transformers.utils, "is_triton_available", lambda version: True)
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: True)
    assert quantization("mxfp4") == {}


@pytest.mark.parametrize("config", ["{}", '{"quantization_config": {"quant_method": "fp8"}}'])
def test_a_checkpoint_that_is_not_mxfp4_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="quantization 'mxfp4' keeps MXFP4 weights as they are, and quant_method here"):
        require_mxfp4_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    require_mxfp4_weights(tmp_path)
