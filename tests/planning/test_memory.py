"""How much memory the shipped fleet's models take, by engine and by the form of their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.api.engines import MLX, TRANSFORMERS, VLLM
from disagg.planning.checkpoint import StoredWeights, packed, stored_weights
from disagg.planning.memory import Loading, layers_that_fit, need
from disagg.planning.sizing import PUBLISHED, stored
from tests.planning.published_configs import GPT_OSS, GPT_OSS_MLX, QWEN, QWEN_FP8, QWEN_MLX
from tests.values import present


def described(config: dict[str, Any], name: str, nbytes: int | None = None) -> StoredWeights:
    return present(stored_weights(config, name, nbytes))


CUDA = Loading(TRANSFORMERS, "cuda", "bfloat16", 8192, 1024, 0)
GB = 1e9


@pytest.mark.parametrize(
    ("config", "changes", "weights", "form"),
    [
        (QWEN, {}, 61.1, "as stored"),
        (QWEN, {"quantization": "int8"}, 60.1, "int8, experts and embeddings bfloat16"),
        (QWEN, {"quantization": "int4"}, 59.7, "int4, experts and embeddings bfloat16"),
        (QWEN_FP8, {}, 31.2, "FP8"),
        (QWEN_FP8, {"device": "cpu"}, 61.1, "FP8 dequantised to bfloat16"),
        (QWEN_FP8, {"engine": VLLM}, 31.2, "FP8"),
        (QWEN_MLX, {"engine": MLX, "device": "gpu"}, 32.4, "quantized for MLX"),
        (GPT_OSS, {}, 233.6, "MXFP4 dequantised to bfloat16"),
        (GPT_OSS, {"quantization": "mxfp4"}, 65.2, "MXFP4"),
        (GPT_OSS, {"engine": VLLM}, 65.2, "MXFP4"),
        (GPT_OSS_MLX, {"engine": MLX, "device": "gpu"}, 63.2, "quantized for MLX"),
    ],
)
def test_weights_take_what_their_form_in_this_engine_takes(
    config: dict[str, Any], changes: dict[str, Any], weights: float, form: str
) -> None:
    found = need(described(config, "m"), replace(CUDA, **changes))
    assert found.weights / GB == pytest.approx(weights, abs=0.1)
    assert found.form == form


def test_the_size_of_the_files_corrects_what_the_config_says() -> None:
    whole = described(GPT_OSS, "m", nbytes=65_300_000_000)
    assert need(whole, replace(CUDA, engine=VLLM)).weights == pytest.approx(65.3 * GB)
    assert need(whole, CUDA).weights / need(replace(whole, nbytes=None), CUDA).weights == pytest.approx(1.0, abs=0.01)


def test_attention_sinks_make_transformers_compute_all_scores_of_a_chunk() -> None:
    eager, other = (
        need(described(GPT_OSS, "m"), CUDA),
        need(described(GPT_OSS, "m"), replace(CUDA, attention="flex")),
    )
    assert eager.workspace - other.workspace == 1024 * 8192 * 64 * (2 + 4)
    wide = need(described(GPT_OSS, "m"), replace(CUDA, chunk_tokens=2048))
    assert wide.workspace - other.workspace > 2 * (eager.workspace - other.workspace)


def test_kv_is_what_hosts_toml_allows_and_at_least_one_whole_request() -> None:
    found = need(described(QWEN, "m"), replace(CUDA, context=32768, kv_bytes=1 << 30))
    assert (found.one_request, found.kv) == (3 << 30, 3 << 30)
    assert need(described(QWEN, "m"), replace(CUDA, context=32768, kv_bytes=32 << 30)).kv == 32 << 30
    assert found.total == found.least == found.weights + (3 << 30) + found.workspace


def test_ranks_with_memory_of_their_own_share_weights_and_kv_heads() -> None:
    one = replace(CUDA, engine=VLLM, context=32768, kv_bytes=1 << 30)
    alone, shared = (need(described(QWEN_FP8, "m"), replace(one, tensor_parallel=n)) for n in (1, 2))
    assert (shared.weights, shared.one_request) == (alone.weights // 2, alone.one_request // 2)
    assert shared.workspace == alone.workspace


def test_the_stages_of_a_pipeline_share_the_layers() -> None:
    one = replace(CUDA, engine=VLLM, context=32768, tensor_parallel=8)
    alone, shared = (need(described(QWEN_FP8, "m"), replace(one, stages=n)) for n in (1, 2))
    assert (shared.weights, shared.one_request) == (alone.weights // 2, alone.one_request // 2)


def test_the_first_layers_take_their_part_and_the_embedding_but_no_output_head() -> None:
    whole, half = need(described(QWEN, "m"), CUDA), need(described(QWEN, "m"), replace(CUDA, layers=24))
    table = QWEN["vocab_size"] * QWEN["hidden_size"] * 2
    assert half.weights == (whole.weights - 2 * table) // 2 + table
    assert half.one_request == whole.one_request // 2
    assert half.form == "as stored, the first 24 of 48 layers"


@pytest.mark.parametrize("gib", [0, 8, 32, 1024])
def test_as_many_first_layers_fit_as_there_is_room_for(gib: int) -> None:
    stored, room = described(QWEN, "m"), gib << 30
    fitting = layers_that_fit(stored, CUDA, room)
    fit = [need(stored, replace(CUDA, layers=count)).least <= room for count in range(1, 49)]
    assert fit == [True] * fitting + [False] * (48 - fitting)
    assert (fitting == 0) == (gib == 0) and (fitting == 48) == (gib == 1024)


def test_with_more_ranks_than_kv_heads_each_rank_has_a_whole_head() -> None:
    one = replace(CUDA, engine=VLLM, context=32768)
    four, eight = (need(described(QWEN_FP8, "m"), replace(one, tensor_parallel=n)) for n in (4, 8))
    assert (eight.one_request, eight.kv) == (four.one_request, four.kv) == (768 << 20, 768 << 20)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN, "none"),
        (QWEN_FP8, "fp8"),
        (GPT_OSS, "mxfp4"),
        (GPT_OSS_MLX, "mlx"),
        (QWEN | {"quantization_config": {"quant_method": "gptq"}}, "other"),
    ],
)
def test_how_a_checkpoint_packs_its_weights_is_read_from_its_config(config: dict[str, Any], expected: str) -> None:
    assert packed(config)[0] == expected


@pytest.mark.parametrize(
    ("source", "config"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", QWEN),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", QWEN_FP8),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit", QWEN_MLX),
        ("openai/gpt-oss-120b", GPT_OSS),
        ("mlx-community/gpt-oss-120b-MXFP4-Q8", GPT_OSS_MLX),
    ],
)
def test_what_is_known_before_a_download_is_what_the_published_config_says(source: str, config: dict[str, Any]) -> None:
    known, read = PUBLISHED[source], described(config, "m")
    plain = {"name": "", "hub_ids": (), "context": 0, "head_bits": None}
    assert replace(known.shape, **plain) == replace(read.shape, **plain)  # type: ignore[arg-type]  # fields of several types
    assert known.shape.table_bits == read.shape.table_bits
    assert (known.packing, known.sinks) == (read.packing, read.sinks)


def test_a_source_that_is_neither_here_nor_known_has_no_size(tmp_path: Any) -> None:
    assert stored("owner/unknown") is None
    assert stored(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert stored(str(tmp_path)) is None, "an architecture whose size cannot be computed"


def test_a_config_in_a_folder_of_this_machine_is_read(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    found = stored(str(tmp_path))
    assert isinstance(found, StoredWeights) and (found.packing, found.sinks) == ("mxfp4", True)
