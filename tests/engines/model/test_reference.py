"""disagg/engines/model/reference.py: folders found and refused, and the reference profile of every architecture."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from disagg.api.layout import SplitLayout
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.profile import ModelProfile
from disagg.engines.model.reference import Reference, find
from disagg.errors import ModelError
from tests import tiny_models
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import make
from tests.tiny_models import TinyModel

W = tiny_models.WINDOW


def with_config(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a checkpoint with keys of its config.json changed; None removes one."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    tiny_models.write_json(target / "config.json", {k: v for k, v in config.items() if v is not None})
    return target


def windows(profile: ModelProfile) -> list[int | None]:
    return [layer.layout.window for layer in profile.layers]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", [None] * 3),
        ("qwen2", [None] * 3),  # use_sliding_window is false
        ("mistral", [None] * 3),
        ("mistral_windowed", [W] * 3),
        ("gpt_oss", [W, None, W, None]),
        ("gemma3_text", [W, W, None, W]),
        ("cohere2", [W, W, W, None]),
    ],
)
def test_windows_are_those_of_each_layer(tiny: TinyModel, architecture: str, expected: list[int | None]) -> None:
    assert windows(Reference.open(tiny(architecture), 1024).profile) == expected


def test_qwen2_slides_from_max_window_layers_on_if_its_config_states_it(tiny: TinyModel, tmp_path: Path) -> None:
    path = with_config(tiny("qwen2"), tmp_path / "m", use_sliding_window=True, sliding_window=W, max_window_layers=2)
    assert windows(Reference.open(path, 1024).profile) == [None, None, W]


def test_layers_without_rope_have_none(tiny: TinyModel) -> None:
    rotated = {
        name: [layer.rope is not None for layer in Reference.open(tiny(name), 1024).profile.layers]
        for name in ("smollm3", "cohere2", "llama")
    }
    assert rotated == {"smollm3": [True] * 3 + [False], "cohere2": [True] * 3 + [False], "llama": [True] * 3}


def test_gemma3_has_a_rope_for_each_kind_of_layer(tiny: TinyModel) -> None:
    ropes = [layer.rope for layer in Reference.open(tiny("gemma3_text"), 1024).profile.layers]
    assert ropes[0] == ropes[1] == ropes[3] != ropes[2]
    assert ropes[0] is not None and ropes[0].inv_freq[1] == pytest.approx(10_000 ** (-2 / 32))
    assert ropes[2] is not None and ropes[2].inv_freq[1] == pytest.approx(1_000_000 ** (-2 / 32))


def test_partial_rotary_turns_half_of_each_head(tiny: TinyModel) -> None:
    layer = Reference.open(tiny("glm4_moe"), 1024).profile.layers[0]
    assert layer.rope is not None
    assert (layer.layout.key_dim, len(layer.rope.inv_freq)) == (32, 8)


def test_head_dim_defaults_to_hidden_size_over_heads(tiny: TinyModel) -> None:
    assert Reference.open(tiny("phi3"), 1024).profile.layers[0].layout.key_dim == 64 // 4


def test_end_of_sequence_ids_come_from_every_file_that_names_some(tiny: TinyModel) -> None:
    profile = Reference.open(tiny("llama"), 1024).profile
    assert profile.eos_ids == {tiny_models.EOS_ID, tiny_models.END_OF_TURN_ID}


def test_fingerprints_differ_by_what_differs(tiny: TinyModel, tmp_path: Path) -> None:
    def fingerprint(path: Path) -> dict[str, object]:
        return Reference.open(path, 1024).fingerprint.to_json()

    base = fingerprint(tiny("llama"))
    other_theta = fingerprint(with_config(tiny("llama"), tmp_path / "theta", rope_theta=10001.0))
    template = with_config(tiny("llama"), tmp_path / "template")
    (template / "chat_template.jinja").write_text("{{ messages }}")
    other_template = fingerprint(template)
    assert {key for key in base if base[key] != other_theta[key]} == {"rope"}
    assert {key for key in base if base[key] != other_template[key]} == {"chat_template"}


def test_layout_counts_the_bytes_of_the_rows_that_are_kept(tiny: TinyModel) -> None:
    layout = Reference.open(tiny("gpt_oss"), 1024).layout("bfloat16")
    assert layout.nbytes(200) == 2 * (W + 200) * 2 * (32 + 32) * 2  # layers, rows, heads, dims, bytes


def test_a_split_counts_layers_of_the_model_and_names_those_of_the_layout(tmp_path: Path) -> None:
    make(config("nemotron_h"), tmp_path)  # Mamba, attention, and layers that keep nothing
    reference = Reference.open(tmp_path, 1024)
    split, layout = reference.split, reference.layout("float32")
    kinds = reference.text_config.layer_types
    kept = [place for place, kind in enumerate(kinds) if kind in ("linear_attention", "full_attention")]

    assert split == SplitLayout(len(kinds), tuple(kept), reference.text_config.hidden_size)
    assert len(kept) < len(kinds), "all layers keep something: this proves nothing"
    assert [len(split.head(layout, k).layers) for k in range(len(kinds) + 1)] == [
        sum(place < k for place in kept) for k in range(len(kinds) + 1)
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3n", "its layers pass on 4 hidden states per token"),
        ("gemma4_text_shared", "its late layers read the KV of early ones"),
        ("gemma4_text", ""),
        ("kimi_linear", ""),
    ],
)
def test_models_that_two_hosts_cannot_divide_are_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
    tiny_models.write_json(tmp_path / "config.json", config(name))
    text = AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
    assert architecture_of(text).split(text) == reason


@pytest.mark.parametrize(
    ("refusal", "loaded", "layers", "reason"),
    [
        ("", None, None, ""),
        ("", None, 3, ""),
        ("", None, 1, ""),
        ("", None, 0, "the model has 3 layers: its first 0 cannot be computed"),
        ("", None, 4, "the model has 3 layers: its first 4 cannot be computed"),
        ("it has streams", None, 2, "the model cannot be divided between hosts: it has streams"),
        ("it has streams", None, 3, ""),
        ("", 2, 2, ""),
        ("", 2, 3, "only the first 2 of the model's 3 layers are loaded here"),
        ("", 2, None, "only the first 2 of the model's 3 layers are loaded here"),
    ],
)
def test_an_engine_computes_the_layers_that_it_has(
    tiny: TinyModel, refusal: str, loaded: int | None, layers: int | None, reason: str
) -> None:
    reference = Reference.open(tiny("llama"), 1024)
    info = reference.info(reference.profile, (), "float32", backend="", versions={}, loaded=loaded)
    info = replace(info, split=replace(info.split, refusal=refusal))
    assert info.cannot_compute(layers) == reason


def test_profiles_need_neither_torch_nor_mlx(tiny: TinyModel) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['mlx'] = None\n"
        "from disagg.engines.model.reference import Reference\n"
        "print(Reference.open(sys.argv[1], 1024).fingerprint)"
    )
    path = tiny("gpt_oss_yarn")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Reference.open(path, 1024).fingerprint)


def test_a_context_beyond_the_model_is_refused_with_both_numbers(tiny: TinyModel) -> None:
    with pytest.raises(ModelError, match="reads 8192 tokens, not 8193"):
        Reference.open(tiny("llama"), 8193)


def test_yarn_may_take_a_model_beyond_its_trained_positions(tiny: TinyModel, tmp_path: Path) -> None:
    path = with_config(tiny("gpt_oss_yarn"), tmp_path / "m", max_position_embeddings=4096)
    assert Reference.open(path, 32 * 4096).profile.context == 32 * 4096


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "nonesuch"}, "transformers cannot read it: it does not know the model type 'nonesuch'"),
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "code.Own"}}, "does not know the model type 'nonesuch'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers cannot read it: hidden_size is no whole number"),
        ({"model_type": "llama", "hidden_size": 65}, r"transformers cannot read it: [Tt]he hidden size \(65\)"),
        (
            {"layer_types": ["full_attention", "full_attention", 3]},
            "layer_types is no list or null, or has an entry of the wrong kind",
        ),
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "linear_attention"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope type 'spiral' is not known"),
    ],
)
def test_models_whose_kv_cannot_be_handed_over_are_refused_with_the_reason(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = with_config(tiny("qwen3"), tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=reason):
        Reference.open(path, 1024)


def test_latent_attention_of_an_unknown_form_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    path = with_config(tiny("llama"), tmp_path / "m", kv_lora_rank=16)
    with pytest.raises(ModelError, match="MLA"):
        Reference.open(path, 1024)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "minimax"}, "another model of this name, MiniMax-M2"),
        ({"model_type": "recurrent_gemma"}, "keeps the states of one prompt at a time"),
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "time_step_limit": [0.001, 0.1]}, "limits its time"),
        ({"model_type": "minicpm3", "v_head_dim": 8}, "mlx-lm ignores v_head_dim = 8, and has 16"),
        ({"model_type": "deepseek_v32", "index_n_heads": 4}, "its indexers have 4 heads"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "how its config.json scales attention"),
        ({"model_type": "qwen3_5_moe_text", "norm_topk_prob": False}, "transformers ignores norm_topk_prob = false"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0.0}, "without attn_logit_softcapping"),
        ({"model_type": "gptj", "activation_function": "relu"}, "ignores activation_function = 'relu'"),
        ({"model_type": "cohere2", "head_dim": 8}, "its heads have 32 elements, and mlx-lm computes only as many"),
        ({"model_type": "lfm2", "layer_types": ["conv"] * 3}, "none of its layers has attention"),
    ],
)
def test_models_that_the_frameworks_compute_otherwise_are_refused(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = with_config(tiny("llama"), tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=reason):
        Reference.open(path, 1024)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"model_type": "cohere"}, "cuda", "normalises without the mean"),
        ({"model_type": "cohere", "rms_norm_eps": None}, "cuda", ""),
        ({"model_type": "olmoe", "norm_topk_prob": True}, "cuda", "vLLM ignores norm_topk_prob"),
        ({"model_type": "olmoe", "norm_topk_prob": False}, "cuda", ""),
        ({"model_type": "ernie4_5_moe"}, "cpu", "experts without their bias"),
        ({"model_type": "ernie4_5_moe"}, "cuda", ""),
        ({}, "cpu", ""),
    ],
)
def test_models_that_vllm_alone_computes_otherwise_are_refused_for_vllm(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, object], device: str, reason: str
) -> None:
    path = with_config(tiny("llama"), tmp_path / "m", **changes)
    Reference.open(path, 1024)
    if reason:
        with pytest.raises(ModelError, match=reason):
            Reference.open(path, 1024).require_for_vllm(device, 1)
    else:
        Reference.open(path, 1024).require_for_vllm(device, 1)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        find(tmp_path / "nothing")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        find(tmp_path)


def test_a_hub_id_that_is_neither_cached_nor_reachable_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/nothing: not in the local cache and not downloaded"):
        find("nobody/nothing")


def test_a_sound_folder_is_its_own_answer(tiny: TinyModel) -> None:
    assert find(str(tiny("llama"))) == tiny("llama")


def test_a_class_that_vllm_has_put_in_place_of_transformers_own_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_vllm = type("OfVLLM", (PreTrainedConfig,), {"model_type": "kimi_linear"})
    make(config("kimi_linear"), tmp_path)
    before = Reference.open(tmp_path, 1024)
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    AutoConfig.register("kimi_linear", of_vllm, exist_ok=True)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), of_vllm)
    after = Reference.open(tmp_path, 1024)
    assert (after.layout("float32"), after.fingerprint) == (before.layout("float32"), before.fingerprint)


def test_a_damaged_weight_file_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    path = with_config(tiny("llama"), tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        find(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("num_attention_heads", 0, "transformers cannot read it"),
        ("num_hidden_layers", 2**70, "num_hidden_layers is 1.18059e+21, more than 10,000"),
        ("head_dim", 10**9, "heads of 1000000000 elements"),
        ("rope_theta", 0, "its configuration is of an unknown form"),
        ("torch_dtype", "abc", "transformers cannot read it"),
        ("torch_dtype", [], "transformers cannot read it"),
        ("hidden_act", "relu", "mlx-lm ignores hidden_act = 'relu', and computes 'silu'"),
    ],
)
def test_a_value_that_no_model_has_is_refused_in_one_line(
    tiny: TinyModel, tmp_path: Path, key: str, value: object, named: str
) -> None:
    with pytest.raises(ModelError) as refused:
        Reference.open(with_config(tiny("llama"), tmp_path / "m", **{key: value}), 1024)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_name_of_an_activation_function_is_not_refused(tiny: TinyModel, tmp_path: Path) -> None:
    Reference.open(with_config(tiny("llama"), tmp_path / "m", hidden_act="swish"), 1024)
