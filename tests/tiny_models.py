"""Random-weight checkpoints of real architectures, a few hundred kilobytes each, in the form hub checkpoints have.

`make(architecture, folder)` writes config.json (flat `rope_theta`, `rope_scaling`, `num_experts`, ... as on the hub:
mlx-lm reads only those), model.safetensors, tokenizer files with a chat template, and generation_config.json. Both
transformers and mlx-lm load the folder through their ordinary loaders, except that float gpt_oss experts are stored in
transformers' form and mlx-lm wants them transposed.

Weights are wide enough that greedy text keeps changing, and no model ever prefers an end-of-sequence token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported by the functions that use them, for many tests need names and sizes only
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TinyModel = Callable[[str], Path]  # architecture -> folder: what the fixture `tiny` is

WINDOW = 64
VOCAB = 640

_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_VALUES = (*_HALF, *(-value for value in _HALF))

BOS, EOS, PAD, TURN, END_OF_TURN = SPECIALS = ("<s>", "</s>", "<pad>", "<|turn|>", "<|end|>")
BOS_ID, EOS_ID, PAD_ID, TURN_ID, END_OF_TURN_ID = range(len(SPECIALS))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "float32",
}

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16, "mlp_bias": False}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": _SLIDING_THEN_FULL,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
}

# What each config.json adds to COMMON.
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 8192},
    "mistral": {**_MISTRAL, "sliding_window": None},
    "mistral_windowed": {**_MISTRAL, "sliding_window": WINDOW},
    # without rope_scaling transformers would give gpt_oss its own default, YaRN
    "gpt_oss": {**_GPT_OSS, "rope_scaling": {"rope_type": "default"}},
    "gpt_oss_yarn": {
        **_GPT_OSS,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
        "rope_theta": 50000.0,
        "tie_word_embeddings": True,
    },
}

_ADD_BOS = {"llama", "llama3", "mistral", "mistral_windowed", "gemma3_text", "cohere2"}


def make(architecture: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the checkpoint into `folder` (made if missing) and return it. `overrides` replace keys of config.json."""
    config = {**COMMON, **ARCHITECTURES[architecture], **overrides}
    return make_from(config, folder, seed=seed, add_bos=architecture in _ADD_BOS)


def make_from(config: Mapping[str, Any], folder: Path, *, seed: int = 0, add_bos: bool = False) -> Path:
    """Write a checkpoint with this config.json into `folder`, made if missing, and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils.logging import disable_progress_bar

    from disagg.engines.transformers.load import causal_class

    disable_progress_bar()
    torch.set_num_threads(1)  # tests share the cores with the servers that they start
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    made = AutoConfig.from_pretrained(folder)
    known = type(made) in MODEL_FOR_CAUSAL_LM_MAPPING
    model = (AutoModelForCausalLM.from_config if known else causal_class(made)._from_config)(made, dtype=torch.float32)
    _randomise(model, seed)
    model.save_pretrained(folder)
    write_json(folder / "config.json", config)  # save_pretrained wrote its own, with nested rope_parameters
    tokenizer(add_bos=add_bos).save_pretrained(folder)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_OF_TURN_ID], "pad_token_id": PAD_ID}
    write_json(folder / "generation_config.json", generation)
    return folder


def pack_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a float gpt_oss checkpoint in place as the hub's are: experts in MXFP4, blocks of 32 along the inputs.
    Returns all weights with the experts' rounded to what was stored."""
    import torch
    from safetensors.torch import load_file, save_file

    fp4 = torch.tensor(FP4_VALUES)
    weights = load_file(folder / "model.safetensors")
    rounded = dict(weights)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = weights.pop(name).transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
        scaled = groups / exponents.exp2()[..., None]
        codes = (scaled[..., None] - fp4).abs().argmin(-1)
        weights[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        weights[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        values = fp4[codes] * exponents.exp2()[..., None]
        rounded[name] = values.flatten(-2).transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    return rounded


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


@lru_cache
def tokenizer(*, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """`tokenizer_backend` as transformers wraps it, which takes seconds to import."""
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizer_backend(add_bos=add_bos)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    wrapped.add_special_tokens({"additional_special_tokens": [TURN, END_OF_TURN]})
    wrapped.chat_template = CHAT_TEMPLATE
    assert len(wrapped) == VOCAB, len(wrapped)
    return wrapped


@lru_cache
def tokenizer_backend(*, add_bos: bool = False) -> Tokenizer:
    """A byte-level BPE of exactly VOCAB tokens, trained on this file's own sample text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([SAMPLE_TEXT], trainer)
    if add_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    bpe.add_special_tokens([*SPECIALS])
    return bpe


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Matrices: variance-preserving or wider; norms around their neutral value; small biases and sinks."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        if not tensor.is_floating_point() or "inv_freq" in name or name.endswith("embed_scale"):
            continue
        noise = torch.empty_like(tensor).normal_(generator=generator)
        with torch.no_grad():
            if tensor.dim() >= 2:
                fan_in = _text(model).hidden_size if "embed" in name or "lm_head" in name else tensor.shape[-1]
                tensor.copy_(noise * 2.0 / fan_in**0.5)
            elif ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                tensor.mul_(1.0 + 0.2 * noise).add_(0.1 * noise)
            elif name.endswith("A_log"):
                tensor.copy_(0.5 * noise - 3.0)  # a state that forgets slowly
            else:
                tensor.copy_(0.3 * noise)
            if "embed_tokens" in name or "lm_head" in name:
                tensor[[EOS_ID, END_OF_TURN_ID]] = 0.0
    _liven(model)


_LAST_NORMS = ("embedding_norm", "norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")


def _text(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _liven(model: Any) -> None:
    """Loud embeddings make a tied model repeat the token it has just read; flat attention makes gemma3 run in circles
    (it normalises what attention finds, so only sharper scores make the text depend on the context). gemma4 does not
    divide scores by the root of the width: norms of random vectors make attention so sharp that one rounding of the
    embeddings in float32 changes log-probabilities by 1e-3, and norms as trained ones 2e-5."""
    import torch

    gemma = _text(model).model_type == "gemma3_text"  # multiplies embeddings by 8, adds one to its norms' weights
    with torch.no_grad():
        if getattr(_text(model), "tie_word_embeddings", False):
            factor = 16.0 if gemma else 4.0
            model.get_input_embeddings().weight.div_(factor)
            decoder = model.get_decoder()
            norm = next(getattr(decoder, name) for name in _LAST_NORMS if hasattr(decoder, name)).weight
            norm.copy_(norm + factor - 1.0 if gemma else norm * factor)
        for name, weight in model.named_parameters():
            if gemma and name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.add_(1.0)
            if _text(model).model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
                weight.div_(weight.numel() ** 0.5)


SAMPLE_TEXT = '''
def read_rows(path, limit=None):
    """Return the rows of a table, at most `limit` of them, as a list of dictionaries."""
    rows = []
    with open(path, encoding="utf-8") as source:
        header = source.readline().strip().split(",")
        for number, line in enumerate(source):
            if limit is not None and number >= limit:
                break
            values = [value.strip() for value in line.split(",")]
            if len(values) != len(header):
                raise ValueError(f"line {number + 2}: expected {len(header)} values, found {len(values)}")
            rows.append(dict(zip(header, values)))
    return rows


class Window:
    """The last `size` items of a stream, oldest first."""

    def __init__(self, size):
        self.size = size
        self.items = []

    def push(self, item):
        self.items.append(item)
        if len(self.items) > self.size:
            self.items.pop(0)
        return self.items[-1]

The harbour lay quiet before sunrise. Two boats had come in during the night, and their crews slept on deck under
sheets of grey canvas while the tide turned. A boy walked along the wall with a bucket and counted the lamps that were
still burning: seven, eight, nine. At the end of the wall he stopped, because somebody had written a question there in
white chalk, and underneath it, in another hand, an answer that did not fit. He read both twice, put the bucket down,
and began to laugh. Café, naïve, Zürich, 東京, привет, 🙂.
user assistant system tool
'''
