"""disagg/engines/vllm/profile.py: what vLLM computes in another way than the checkpoint states."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.api.layout import LayerLayout
from disagg.config import EngineOptions
from disagg.engines.model.profile import LayerProfile, ModelProfile
from disagg.engines.vllm.load import arguments, require_device, version_fits
from disagg.engines.vllm.profile import (
    NO_STATES,
    NormEpsilons,
    norm_epsilons,
    of_all_ranks,
    of_ranks,
    require_angles,
    require_norms,
    tie_of,
    turned_positions,
)
from disagg.errors import ModelError


def model_with(stated: float | None, kind: str = "llama") -> Any:
    """vLLM's ModelConfig of a model whose config.json states this epsilon."""
    return SimpleNamespace(hf_text_config=SimpleNamespace(model_type=kind, rms_norm_eps=stated))


def test_an_epsilon_that_config_json_does_not_have_is_refused() -> None:
    require_norms(NormEpsilons([1e-5], []), model_with(1e-5))
    require_norms(NormEpsilons([1e-5], []), model_with(None))
    require_norms(NormEpsilons([], []), model_with(1e-6))
    with pytest.raises(ModelError, match=r"normalises this model with an epsilon of 1e-05, its config\.json has 1e-06"):
        require_norms(NormEpsilons([1e-5], []), model_with(1e-6))


def worker_of(layer: float, latent: float) -> Any:
    """A worker of vLLM with a model of one layer, whose norms have these epsilons."""
    names = {"input_layernorm": layer, "self_attn.q_a_layernorm": latent, "self_attn.kv_a_layernorm": latent}
    norms = [(f"model.layers.0.{name}", SimpleNamespace(variance_epsilon=one)) for name, one in names.items()]
    return SimpleNamespace(get_model=lambda: SimpleNamespace(named_modules=lambda: norms))


@pytest.mark.parametrize(
    ("kind", "stated", "refused"),
    [("deepseek_v3", 1e-6, False), ("deepseek_v3", 1e-5, True), ("glm4_moe_lite", 1e-5, False)],
)
def test_latent_vectors_that_mlx_lm_normalises_with_another_epsilon_are_refused(
    kind: str, stated: float, refused: bool
) -> None:
    """vLLM's modules have what config.json has."""
    worker = worker_of(stated, stated)
    wrong = pytest.raises(ModelError, match="latent vectors with an epsilon of 1e-05, mlx-lm with 1e-06")
    with wrong if refused else nullcontext():
        require_norms(norm_epsilons(worker), model_with(stated, kind))


def test_a_context_for_which_vllm_has_no_angles_is_refused() -> None:
    modules = [SimpleNamespace(cos_sin_cache=torch.zeros(rows, 4)) for rows in (512, 256)]
    worker = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: [SimpleNamespace(), *modules]))
    require_angles(turned_positions(worker), 256)
    with pytest.raises(ModelError, match="turns the vectors of 256 tokens, the context is 257") as refused:
        require_angles(turned_positions(worker), 257)
    assert refused.value.hint.startswith("set the model's context to 256 or less")
    unturned = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: [SimpleNamespace()]))
    require_angles(turned_positions(unturned), 1 << 20)


def test_the_norms_before_the_layers_and_those_of_latent_vectors_are_distinguished() -> None:
    worker = worker_of(1e-5, 1e-6)
    assert norm_epsilons(worker) == NormEpsilons([1e-5], [1e-6])
    require_norms(NormEpsilons([], []), model_with(1e-6))
    require_norms(NormEpsilons([], [1e-5]), model_with(None))


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.32.0", True), ("0.33.1+cu130", True), ("0.31.9", False), ("0.34.0", False), ("1.0", False)],
)
def test_only_versions_that_the_connector_is_written_for_are_used(version: str, fits: bool) -> None:
    assert version_fits(version) is fits


@pytest.mark.parametrize(
    ("own", "ranks", "model", "found"),
    [(2, 4, 8, 8), (8, 1, 8, 8), (1, 4, 4, 4), (1, 4, 2, 2), (1, 8, 1, 1), (1, 2, 8, 2), (2, 4, 2, 8)],
)
def test_ranks_that_share_a_head_have_it_counted_once(own: int, ranks: int, model: int, found: int) -> None:
    def layer(heads: int) -> LayerProfile:
        return LayerProfile(LayerLayout("full", heads, 4, 4), None)

    reference = ModelProfile("checkpoint", "llama", 9, 99, (layer(model),), "", "", "", frozenset())
    assert [one.layout.kv_heads for one in of_all_ranks([layer(own)], ranks, reference)] == [found]


def test_of_a_multimodal_checkpoint_the_text_model_is_measured() -> None:
    text = SimpleNamespace(model_type="gemma3_text", rms_norm_eps=1e-6)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="gemma3"), hf_text_config=text, get_vocab_size=lambda: 9
    )
    config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    reference = ModelProfile("checkpoint", "gemma3_text", 9, 99, (), "", "", "", frozenset())
    assert of_ranks([], config, reference, NO_STATES, tied=None).architecture == "gemma3_text"
    with pytest.raises(ModelError, match="has 1e-06"):
        require_norms(NormEpsilons([1e-5], []), model)


def test_a_head_that_is_a_copy_of_the_embeddings_is_right_whatever_config_json_states() -> None:
    embeddings, longer = torch.rand(8, 4), torch.rand(9, 4)
    assert tie_of(embeddings, [longer, embeddings]) is True
    assert tie_of(torch.rand(8, 4), [embeddings]) is False
    assert tie_of(embeddings.clone(), [embeddings]) is None
    assert tie_of(torch.zeros(8, 2, dtype=torch.uint8), [embeddings]) is None


@pytest.mark.parametrize(("wanted", "built_for"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "")])
def test_a_device_that_this_build_of_vllm_does_not_compute_on_is_refused(wanted: str, built_for: str) -> None:
    require_device("auto", built_for)
    require_device(wanted, wanted)
    with pytest.raises(ModelError, match=f"device '{wanted}' cannot be used: this build of vLLM computes on"):
        require_device(wanted, built_for)


@pytest.mark.parametrize(("chunk", "context", "longest"), [(2048, 32768, 512), (96, 2048, 24), (8192, 1024, 1024)])
def test_a_long_prompt_beside_others_gets_a_quarter_of_a_step(chunk: int, context: int, longest: int) -> None:
    made = arguments(Path("m"), context, EngineOptions("vllm", chunk_tokens=chunk))
    assert (made["max_num_batched_tokens"], made["long_prefill_token_threshold"]) == (chunk, longest)
