"""quantization = "mxfp4": the checkpoint's own weights are kept, or the host is refused before it loads them."""

from __future__ import annotations

import pytest
import torch
import transformers.utils

from disagg.engines.transformers.load import quantization
from disagg.errors import ModelError


def test_without_cuda_or_kernels_mxfp4_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(transformers.utils, "is_triton_available", lambda version: True)
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: False)
    with pytest.raises(ModelError) as caught:
        quantization("mxfp4")
    assert "needs a CUDA device of compute capability 7.5 or newer and the package kernels" in caught.value.message
    assert "triton" not in caught.value.message
    assert "disagg[prefill,quantize]" in caught.value.hint


def test_where_transformers_keeps_mxfp4_it_loads_the_checkpoint_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 1))
    monkeypatch.setattr(transformers.utils, "is_triton_available", lambda version: True)
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: True)
    assert quantization("mxfp4") == {}
