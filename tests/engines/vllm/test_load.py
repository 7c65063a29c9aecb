"""disagg/engines/vllm/load.py: what vLLM cannot be used with, and what it fails with: one message each, with a hint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from disagg.config import EngineOptions
from disagg.engines.model.architectures.base import ReadByVLLM
from disagg.engines.model.architectures.patches import VLLM_PATCHES
from disagg.engines.vllm import load
from disagg.errors import ModelError

VLLM = EngineOptions("vllm", device="cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a test sets are gone after it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_an_environment_without_vllm_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match="vLLM cannot be imported") as refused:
        load.require_version()
    assert "'.[vllm]' in a clone" in refused.value.hint


def test_a_version_that_the_connector_is_not_written_for_is_named_with_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.2"))
    with pytest.raises(ModelError, match=r"vLLM 0\.31\.2 is not supported") as refused:
        load.require_version()
    assert refused.value.hint == "install vllm>=0.32,<0.34"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("setting", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments:true"])
def test_expandable_segments_are_refused_before_vllm_is_imported(name: str, setting: str) -> None:
    os.environ[name] = setting
    with pytest.raises(ModelError, match=f"{name} has expandable_segments:True, which vLLM refuses") as refused:
        load.prepare_environment(VLLM)
    assert refused.value.hint == "take it out of the server's environment"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ValueError("Model architectures ['X'] are not supported for now.\nSupported: ..."), "see the server's log"),
        (ValueError("No available memory for the cache blocks."), "raise kv_cache_memory_bytes or lower context"),
        (
            ValueError("2 GiB KV cache is needed, which is larger than the available KV cache memory (1 GiB)."),
            "raise kv_cache_memory_bytes or lower context",
        ),
        (RuntimeError("CUDA out of memory."), "lower kv_cache_memory_bytes or context, or use smaller weights"),
        (ImportError("X requires the timm library but it was not found in your environment."), "install it in the env"),
        (RuntimeError(""), "see the server's log"),
    ],
    ids=["unsupported", "no KV", "too little KV", "memory", "a library", "without a text"],
)
def test_what_vllm_fails_with_is_one_line_with_the_model_and_a_hint(error: Exception, hint: str) -> None:
    reason = (str(error).splitlines() or [repr(error)])[0]
    with pytest.raises(ModelError) as failed, load._failures_of(Path("/models/m")):
        raise error
    assert failed.value.message == f"/models/m: vLLM cannot serve it: {reason}"
    assert failed.value.hint.startswith(hint)


def test_vllm_runs_its_scheduler_in_this_process_whatever_the_environment_has() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    load.prepare_environment(VLLM)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_refusal_of_our_own_keeps_its_message() -> None:
    with pytest.raises(ModelError, match=r"^known$"), load._failures_of(Path("/models/m")):
        raise ModelError("known")


@pytest.mark.parametrize(
    ("device", "latent", "hybrid", "in_pieces", "longest", "operations"),
    [
        ("cpu", True, False, False, 0, ["-rotary_embedding"]),
        ("cpu", True, False, True, 512, ["-rotary_embedding"]),
        ("cpu", False, True, True, 512, ["-rotary_embedding"]),
        ("cpu", False, False, True, 512, []),
        ("cuda", True, True, True, 512, []),
    ],
)
def test_models_are_computed_as_vllms_cpu_build_can(
    device: str, latent: bool, hybrid: bool, in_pieces: bool, longest: int, operations: list[str]
) -> None:
    scheduler = SimpleNamespace(enable_chunked_prefill=in_pieces, long_prefill_token_threshold=512)
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=latent, is_hybrid=hybrid, is_attention_free=False),
        scheduler_config=scheduler,
        compilation_config=SimpleNamespace(custom_ops=[]),
    )
    load.adapt_to_cpu(config, device)
    assert scheduler.long_prefill_token_threshold == longest
    assert config.compilation_config.custom_ops == operations


@pytest.mark.parametrize(("device", "kept"), [("cpu", (False, "none", 2048)), ("cuda", (True, "align", 16))])
def test_vllms_cpu_build_caches_no_prefixes_of_models_of_states_alone(device: str, kept: tuple[bool, str, int]) -> None:
    cache = SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="align", mamba_block_size=16)
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, is_hybrid=False, is_attention_free=True, max_model_len=2048),
        cache_config=cache,
    )
    load.adapt_to_cpu(config, device)
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode, cache.mamba_block_size) == kept


def test_what_pydantic_found_wrong_is_named_and_not_how_many_errors_it_found() -> None:
    error = ValueError("1 validation error for ModelConfig\n  Value error, no such part [type=value_error, input=1]\n")
    with (
        pytest.raises(ModelError, match="the model: vLLM cannot serve it: Value error, no such part") as refused,
        load._failures_of(Path("the model")),
    ):
        raise error
    assert "type=" not in refused.value.message


def test_vllm_starts_beside_other_programs_that_have_most_of_the_gpus_memory() -> None:
    made = load.arguments(Path("m"), 64, VLLM)
    assert (made["kv_cache_memory_bytes"], made["gpu_memory_utilization"]) == (VLLM.kv_cache_memory_bytes, 0.01)


def test_vllm_reads_another_window_of_cohere2_to_which_it_adds_one() -> None:
    read = ReadByVLLM(CONFIG_MAPPING["cohere2"].from_dict({"sliding_window": 64, "layer_types": None}), "cuda")
    found = [finding.status for patch in VLLM_PATCHES for finding in patch.apply(read)]
    assert (read.overrides, found) == ({"sliding_window": 63}, ["patched"])
    assert load.arguments(Path("m"), 64, VLLM, read.overrides)["hf_overrides"] == {"sliding_window": 63}
