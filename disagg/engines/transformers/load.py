"""Load a causal language model with transformers; every failure becomes a ModelError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils.logging import disable_progress_bar

from disagg.config import EngineOptions
from disagg.engines.model.architectures.experts import BIASES, ROUNDED
from disagg.engines.model.architectures.weights import stated_tie, tie_in_transformers
from disagg.engines.model.reference import configuration
from disagg.errors import ModelError, first_line
from disagg.extras import install
from disagg.planning.checkpoint import packed, read_object

# Model type of a text part -> of the whole, in whose checkpoints transformers transposes experts.
_CONVERTED_AS = {"qwen3_vl_moe_text": "qwen3_vl_moe"}
# Names of weights: those of the text part in a multimodal checkpoint -> those of the text model.
_TEXT_WEIGHTS = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def choose_device(name: str) -> torch.device:
    """The torch device `name`; `auto`: CUDA, else Apple's GPU, else the CPU. ModelError if it is not available."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # "not compiled with CUDA" is an AssertionError
        hint = "use auto, cuda, cuda:N, mps or cpu"
        raise ModelError(f"device {name!r} cannot be used: {first_line(error)}", hint) from error


def load_model(path: Path, options: EngineOptions, device: torch.device, layers: int | None = None) -> Any:
    """The model in `path` on `device`, ready for inference. ModelError if a weight is not in the checkpoint. layers:
    only its first so many are loaded, and it has no output head; None: all."""
    disable_progress_bar()  # the output goes to a log
    torch.backends.cudnn.allow_tf32 = False  # else convolutions in float32 have 10 bits of mantissa, unlike products
    try:
        if options.quantization == "mxfp4":
            require_mxfp4_weights(path)
        text_part = _text_part(path)
        model, info = _model_class(path, layers).from_pretrained(
            path,
            dtype=getattr(torch, options.dtype),
            device_map={"": device},  # straight to the device: no second copy in host memory
            attn_implementation=options.attention,
            output_loading_info=True,
            trust_remote_code=False,
            **text_part,
            **quantization(options.quantization),
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{path}: does not fit on {device}: {first_line(error)}", "quantize it, or use a larger machine"
        ) from error
    except ModelError:
        raise
    except Exception as error:  # which one depends on the architecture
        said = first_line(error)
        if "ignore_mismatched_sizes" in said:  # an option of its own, which is not the user's
            said = "its weights have other shapes than config.json describes"
        raise ModelError(
            f"{path}: transformers cannot load it: {said}", "check the files, and the engine's options"
        ) from error
    _name_decoder(model)
    try:
        tie_in_transformers(model, info["missing_keys"], tied=_stated_tie(path))
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from error
    _require_all_weights(path, info)
    return model.eval()


def _name_decoder(model: Any) -> None:
    """Let llama4 find its decoder: in transformers 5.23 its class names an attribute that it does not have."""
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"


def _text_part(path: Path) -> dict[str, Any]:
    """from_pretrained's arguments for the text part of a multimodal checkpoint. {} for one of text, and if transformers
    itself loads the text part alone. ModelError if it has no class for that."""
    config = configuration(path)
    text = config.get_text_config(decoder=True)
    if text is config or _is_of_text(config):
        return {"config": config}
    text.tie_word_embeddings = _stated_tie(path)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(text) not in MODEL_MAPPING:
        raise ModelError(
            f"{path}: transformers has no class for the text part of model type {config.model_type!r} alone",
            "use a checkpoint that reads text only",
        )
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return {"config": text, "key_mapping": _TEXT_WEIGHTS}


def _stated_tie(path: Path) -> bool:
    return stated_tie(read_object(path / "config.json"), configuration(path))


def _model_class(path: Path, layers: int | None) -> Any:
    """What loads the model, or its first layers."""
    config = configuration(path)
    config = config if _is_of_text(config) else config.get_text_config(decoder=True)
    rounded = config.model_type in ROUNDED
    if layers is None and not rounded and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    model_class = _with_biases_in_float32(causal_class(config)) if rounded else causal_class(config)
    return model_class if layers is None else _first_layers(model_class, layers)


def causal_class(config: Any) -> Any:
    """The class of models that continue text with this configuration of text."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in known:
        return known[type(config)]
    if whole := _CONVERTED_AS.get(config.model_type):
        register_checkpoint_conversion_mapping(
            config.model_type, get_checkpoint_conversion_mapping(whole), overwrite=True
        )
    return _with_head(MODEL_MAPPING[type(config)])


def _with_head(decoder_class: Any) -> Any:
    """A class of models of text over the decoder of a multimodal model, of whose text part alone transformers has no
    such class (qwen3_vl). transformers' class of the whole model has the same head."""

    class TextModel(decoder_class.__base__):
        config_class = decoder_class.config_class
        base_model_prefix = "model"
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder_class(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutputWithPast:
            made = self.model(input_ids=input_ids, **options)
            logits = self.lm_head(made.last_hidden_state) * getattr(self.config, "output_multiplier", 1.0)
            if cap := getattr(self.config, "final_logit_softcapping", None):
                logits = torch.tanh(logits / cap) * cap
            return CausalLMOutputWithPast(logits=logits, past_key_values=made.past_key_values)

    TextModel.__name__ = decoder_class.__name__
    return TextModel


def _with_biases_in_float32(model_class: Any) -> Any:
    """A class of models whose biases by which experts are chosen are not rounded to the model's dtype."""

    class Unrounded(model_class):
        _keep_in_fp32_modules_strict = (*(model_class._keep_in_fp32_modules_strict or ()), *BIASES)

    Unrounded.__name__ = model_class.__name__
    return Unrounded


def _first_layers(model_class: Any, layers: int) -> Any:
    """A class of models without their later layers and without an output head of its own, whose weights are then not
    read. The configuration stays that of the whole model: much of it is stated by layer."""

    class FirstLayers(model_class):
        _keys_to_ignore_on_load_unexpected = (*(model_class._keys_to_ignore_on_load_unexpected or ()), r".*")

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _name_decoder(self)
            decoder, output = self.get_decoder(), self.get_output_embeddings()
            setattr(decoder, _layers_name(decoder), decoder_layers(self)[:layers])
            if not getattr(config, "tie_word_embeddings", False):
                for name in [name for name, module in self.named_children() if module is output]:
                    setattr(self, name, torch.nn.Identity())

    FirstLayers.__name__ = model_class.__name__
    return FirstLayers


def decoder_layers(model: Any) -> Any:
    """The list of the model's layers."""
    decoder = model.get_decoder()
    return getattr(decoder, _layers_name(decoder))


def _layers_name(decoder: Any) -> str:
    return "layers" if hasattr(decoder, "layers") else "h"


def _is_of_text(config: Any) -> bool:
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return known and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__.endswith("ForCausalLM")


class MXFP4Support(NamedTuple):
    """What there is of what MXFP4 weights need. capability: of the CUDA device, (0, 0) without one. triton, kernels:
    these packages, in versions that transformers takes."""

    capability: tuple[int, int]
    triton: bool
    kernels: bool


def mxfp4_support() -> MXFP4Support:
    """That of this machine."""
    from transformers.utils import is_kernels_available, is_triton_available

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return MXFP4Support(capability, is_triton_available("3.4.0"), is_kernels_available())


def quantization(name: str | None, support: Callable[[], MXFP4Support] = mxfp4_support) -> dict[str, Any]:
    """from_pretrained's arguments for weight-only `int8` or `int4` by torchao. {} for None, because
    quantization_config=None would override the checkpoint's own.

    Only linear layers are converted. Mixture-of-experts weights, one fused tensor per layer in transformers, are not:
    serve such a model from a checkpoint that is already quantized, as gpt-oss is. `mxfp4` keeps its weights as they
    are, and is refused if transformers would dequantise them.
    """
    if name is None:
        return {}
    if name == "mxfp4":
        _require_mxfp4(support())
        return {}
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise ModelError(f"quantization {name!r} needs torchao", install("quantize")) from error
    from transformers import TorchAoConfig

    if name == "int8":
        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    if name == "int4":  # bfloat16 on CUDA; this packing uses PyTorch's own kernels, torchao's default another package
        packed = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
        return {"quantization_config": TorchAoConfig(packed)}
    raise ModelError(f"unknown quantization {name!r}", "use int8, int4 or mxfp4")


def require_mxfp4_weights(path: Path) -> None:
    """Raise ModelError unless the checkpoint states that its weights are MXFP4: the option converts none."""
    packing, table = packed(read_object(path / "config.json"))
    if packing != "mxfp4":
        method = table.get("quant_method", "none")
        raise ModelError(
            f"{path}: quantization 'mxfp4' keeps MXFP4 weights as they are, and quant_method here is {method}",
            "leave quantization out, or use a checkpoint in MXFP4",
        )


def _require_mxfp4(support: MXFP4Support) -> None:
    """Raise ModelError if transformers would warn and dequantise MXFP4 to four times its size."""
    missing = {
        "a CUDA device of compute capability 7.5 or newer": support.capability < (7, 5),
        "triton 3.4 or newer": not support.triton,
        "the package kernels in a version that this transformers takes": not support.kernels,
    }
    if lacking := [what for what, is_missing in missing.items() if is_missing]:
        raise ModelError(
            f"quantization 'mxfp4' needs {' and '.join(lacking)}: without it, transformers dequantises the weights",
            f"on a CUDA host, {install('prefill', 'quantize')}; or the engine vllm",
        )


def weight_bytes(model: Any) -> int:
    """Bytes of the model's weights and buffers; of quantized ones, the bytes of their inner tensors."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(_nbytes(tensor) for tensor in tensors.values())


def _nbytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, name)) for name in inner)
    return int(tensor.nbytes)


def _require_all_weights(path: Path, info: dict[str, Any]) -> None:
    """Raise ModelError for missing weights, which transformers fills with random numbers and a warning."""
    wrong = sorted(info["missing_keys"]) or sorted(str(key[0]) for key in info["mismatched_keys"])
    if wrong or info["error_msgs"]:
        raise ModelError(
            f"{path}: the weights do not fit config.json: {len(wrong)} missing or of another shape"
            + (f", {wrong[0]} first" if wrong else f": {info['error_msgs'][0]}"),
            "download the model again, config.json and weights from the same revision",
        )
