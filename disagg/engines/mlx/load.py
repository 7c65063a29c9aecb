"""Load a checkpoint with mlx-lm's own loader, with corrections for what mlx-lm 0.32 misreads, and check that it
computes what the checkpoint describes.

Each correction is one function, without effect on checkpoints that do not need it:
- `stated_defaults`: a key that config.json leaves out has transformers' default, whatever mlx-lm's own is.
- `stated_arguments`: what mlx-lm reads otherwise than transformers.
- `flat_config`: checkpoints saved by transformers >= 5 nest the rotary settings under `rope_parameters` and rename
  `num_experts`; many mlx-lm models read only the flat names and silently fall back to a default theta.
- `_with_fixed_ropes`: a rope that changes for prompts that are longer than any that is served is the default one.
- `_without_rejected_scaling`: some models reject every rope_scaling that they do not know, even one without effect.
- `_model_classes`: what the model's architecture needs (`Architecture.mlx_model`), the output head and the biases that
  the checkpoint has (`with_stated_weights`).
- `_cast`: weights in the dtype of the host's engine options.

Must run on the thread that will run the model: rotary modules have arrays outside the parameters, which stay lazy and
belong to the stream of the thread that created them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import _get_classes, load_config, load_model

from disagg.config import DType, EngineOptions
from disagg.engines.mlx.profile import measure, rope_modules
from disagg.engines.mlx.span import first_layers
from disagg.engines.model.architectures import architecture_of, float32_weights, mlx_model, mlx_module
from disagg.engines.model.architectures.base import LoadedByMLX, Patch, head_dim
from disagg.engines.model.architectures.weights import with_stated_weights
from disagg.engines.model.profile import verdict
from disagg.engines.model.reference import EngineInfo, Reference
from disagg.engines.model.text import HFTokenizer
from disagg.errors import ModelError
from disagg.planning.checkpoint import weights_form
from disagg.planning.refusals import known_as, rope_type

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")

_BESIDE_ROTATION = ("mscale_all_dim", "llama_4_scaling_beta")
"""Keys of rope_scaling that some models also scale attention with."""
DTYPES: Mapping[str, Any] = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An mlx-lm model in memory. config: config.json as mlx-lm read it, with `flat_config` and generation_config's eos.
    memory_bytes: the size of all weights that are loaded. active_bytes: the size of those that one token is multiplied
    with. mixture: whether it has experts."""

    model: Any
    config: Mapping[str, Any]
    memory_bytes: int
    active_bytes: int
    mixture: bool


def prepare(
    source: str | Path, options: EngineOptions, *, context: int, device: Any, patches: Sequence[Patch]
) -> tuple[LoadedModel, EngineInfo, HFTokenizer]:
    """Load `source`, patch it and compare it with its checkpoint. Raises ModelError if it cannot be loaded, and
    PreflightRefused, with every reason, if mlx-lm computes something else."""
    reference = Reference.open(source, context)
    reference.require_readable("mlx")
    layers = reference.loaded(options)
    described = reference.described(layers)
    stated = {"defaults": stated_defaults(reference), "arguments": stated_arguments(reference)}
    loaded = load(reference.path, dtype=options.dtype, device=device, layers=layers, **stated)
    measured = measure(loaded.model, len(described.layers))
    ropes = tuple(rope for rope in rope_modules(loaded.model) if layers is None or rope[0] < layers)
    by_mlx = LoadedByMLX(loaded.model, loaded.config, reference.text_config, described, measured.layers, ropes)
    patched = [finding for patch in patches for finding in patch.apply(by_mlx)]
    if patched:
        measured = measure(loaded.model, len(described.layers))
    # Tokenizer and end-of-sequence ids are those of the checkpoint, which this engine uses.
    actual = replace(
        described,
        source="mlx-lm",
        architecture=_text_type(loaded.config),
        vocab_size=measured.vocab_size,
        layers=measured.layers,
        tied=measured.tied if layers is None else described.tied,
    )
    info = reference.info(
        actual,
        verdict(described, actual, patched),
        measured.dtype,
        backend=f"mlx/{'cpu' if device == mx.cpu else 'gpu'}",
        versions={name: version(name) for name in ("mlx", "mlx-lm", "transformers")},
        memory_bytes=loaded.memory_bytes,
        weights=weights_form(loaded.config, options.dtype),
        mixture=loaded.mixture,
        loaded=layers,
    )
    return loaded, info, reference.tokenizer


def require_one_thread(options: EngineOptions) -> None:
    """ModelError if more threads are asked for than mlx has."""
    if options.threads not in (None, 1):
        raise ModelError(
            f"threads = {options.threads}: mlx's CPU backend computes on one thread and has no setting for more",
            "remove threads from this host's engine options",
        )


def select_device(name: str) -> Any:
    """The mlx device called auto, gpu or cpu. ModelError if this machine does not have it."""
    has_gpu = mx.device_count(mx.gpu) > 0
    if name == "auto":
        return mx.gpu if has_gpu else mx.cpu
    if name not in ("gpu", "cpu"):
        raise ModelError(f"mlx has no device {name!r}", "use device = auto, gpu or cpu")
    if name == "gpu" and not has_gpu:
        raise ModelError("device = gpu, but mlx finds no GPU on this machine", "use device = auto or cpu")
    return mx.gpu if name == "gpu" else mx.cpu


def load(
    path: Path,
    *,
    dtype: DType,
    device: Any,
    layers: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load the checkpoint folder `path` into memory as `dtype`; quantized weights stay packed. layers: only the first
    so many, without the output head; None: all. Of the part of config.json that reads text, defaults: of keys that it
    leaves out, arguments: in place of what it has.

    Raises ModelError for a missing, corrupt or unsupported checkpoint, or a dtype that the device cannot compute.
    """
    config = _read_config(path)
    overrides = flat_config(config)
    _add(overrides, config, defaults or {}, arguments or {})
    overrides |= _with_fixed_ropes({**config, **overrides})
    overrides |= _without_rejected_scaling({**config, **overrides})
    try:
        model, config = load_model(path, lazy=True, model_config=overrides, get_model_classes=_model_classes)
        _cast(model, DTYPES[dtype], float32_weights(_text_type(config)))
        weights = _weights(model, layers)
        mx.eval(weights)
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from error
    except FileNotFoundError as error:
        raise ModelError(f"no model*.safetensors in {path}", "download the weights again") from error
    except RuntimeError as error:  # mlx's only exception: unreadable or truncated safetensors
        raise ModelError(f"the weights in {path} cannot be read: {error}", "download them again") from error
    except Exception as error:
        # Which one depends on the architecture: unknown model_type, keys missing from config.json, tensors missing,
        # left over or of another shape.
        hint = "compare config.json and the weights with the model's original, or use another model"
        raise ModelError(f"mlx-lm cannot load {path}: {_in_words(error)}", hint) from error
    _require_computable(model, dtype, device)
    nbytes = sum(array.nbytes for array in weights)
    first = model if layers is None else first_layers(model, layers)
    return LoadedModel(first, config, nbytes, _active_bytes(model, config), _is_mixture(model))


def stated_defaults(reference: Reference) -> dict[str, Any]:
    """Numbers, words and flags of transformers' configuration of the text model."""
    config, stated = reference.text_config, reference.text_config.to_dict()
    stated = {"rope_theta": (stated.get("rope_parameters") or {}).get("rope_theta"), **stated}
    plain = {key: value for key, value in stated.items() if isinstance(value, bool | int | float | str)}
    if "num_attention_heads" in plain and "kv_lora_rank" not in plain and not hasattr(type(config), "head_dim"):
        plain["head_dim"] = head_dim(config)
    return {"rope_scaling": None, **plain}


def stated_arguments(reference: Reference) -> dict[str, Any]:
    """What its architecture states for mlx-lm; and its kinds of layers, of which transformers changes some, unless
    config.json has other names for them."""
    kinds = getattr(reference.text_config, "layer_types", None) or ["other"]
    own = (reference.config.get("text_config") or reference.config).get("layer_types") or ()
    known = {"full_attention", "sliding_attention"}.issuperset([*kinds, *own])
    layers = {"layer_types": _Kinds(kinds)} if known else {}
    own_words = architecture_of(reference.text_config).mlx_arguments(reference.text_config)
    return layers | {key: _Kinds(one) if isinstance(one, list) else one for key, one in own_words.items()}


class _Kinds(list[Any]):
    """Kinds of layers, in which mlx-lm's models look for the first of each kind, for its mask. If there is none of a
    kind, no layer uses its mask."""

    def index(self, kind: Any, *bounds: Any) -> int:
        return super().index(kind, *bounds) if kind in self else 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _Kinds(found) if isinstance(at, slice) else found


def _add(
    overrides: dict[str, Any], config: Mapping[str, Any], defaults: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Add the defaults of what neither has, and the arguments, to the part that reads text."""
    text = config.get("text_config")
    into = overrides.setdefault("text_config", dict(text)) if text else overrides
    known = into.keys() | (text or config).keys()
    into.update({key: value for key, value in defaults.items() if key not in known} | dict(arguments))


def _with_fixed_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that put the default rope in place of a dynamic one, with which mlx-lm computes other frequencies for each
    length, or fails; not of Hunyuan's, which is called dynamic and is not."""
    text = config.get("text_config") or config
    ropes = {key: one for key in ("rope_scaling", "rope_parameters") if isinstance(one := text.get(key), Mapping)}
    if not any(rope_type(one) == "dynamic" and not one.get("alpha") for one in ropes.values()):
        return {}
    fixed = {key: {**one, "rope_type": "default"} if key == "rope_parameters" else None for key, one in ropes.items()}
    return {"text_config": {**text, **fixed}} if text is not config else fixed


def _without_rejected_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that take a rope_scaling away which mlx-lm's class for the model does not take, if it has an effect on
    rotary frequencies alone: these are set from the reference afterwards (`architectures/plain.py`)."""
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not scaling.keys().isdisjoint(_BESIDE_ROTATION) or _can_be_made(config):
        return {}
    without: dict[str, Any] = {"rope_scaling": None}
    without = {"text_config": {**text, **without}} if text is not config else without
    return without if _can_be_made({**config, **without}) else {}


def _can_be_made(config: Mapping[str, Any]) -> bool:
    try:
        model_class, args_class = _model_classes(dict(config))
        model_class(args_class.from_dict(config))  # lazy arrays, which take no memory
    except Exception:  # noqa: BLE001 - which one depends on the architecture; load_model raises it again
        return False
    return True


def _weights(model: Any, layers: int | None) -> list[Any]:
    """The arrays of the model, or of its first layers and what comes before them. What is never read of a checkpoint
    takes no memory."""
    known = tree_flatten(model.parameters())
    if layers is None:
        return [array for _, array in known]
    others = {id(array) for layer in model.layers[layers:] for _, array in tree_flatten(layer.parameters())}
    return [array for name, array in known if id(array) not in others and not {"lm_head", "head"} & {*name.split(".")}]


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys to add to config.json so that mlx-lm reads what transformers reads; usually {} for a hub checkpoint."""
    flat = {**_flat_rope(config), **_flat_pattern(config)}
    if "num_local_experts" in config:
        flat["num_experts"] = config["num_local_experts"]
    text = config.get("text_config") or {}
    inner = {"text_config": {**text, **flat_config(text)}} if text else {}
    if "vocab_size" in text:  # gemma3 and gemma4 have that of the published models if it does not stand here
        flat["vocab_size"] = text["vocab_size"]
    return {key: value for key, value in flat.items() if key not in config} | inner


def _flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling, partial_rotary_factor (and gemma3's rope_local_base_freq) from rope_parameters."""
    nested = config.get("rope_parameters") or {}
    local = nested.get("sliding_attention")
    main = nested.get("full_attention", nested if local is None else local)
    flat = {key: main[key] for key in ("rope_theta", "partial_rotary_factor") if key in main}
    if main:
        kind = main.get("rope_type", "default")
        scaling = {key: value for key, value in main.items() if key != "rope_theta"}
        flat["rope_scaling"] = None if kind == "default" else {**scaling, "type": kind}
    if local is not None and "rope_theta" in local:
        flat["rope_local_base_freq"] = local["rope_theta"]
    return flat


def _flat_pattern(config: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window_pattern (every n-th layer is full) from layer_types, which transformers >= 5 saves instead."""
    kinds = list(config.get("layer_types") or ())
    if "full_attention" not in kinds or "sliding_attention" not in kinds:
        return {}
    return {"sliding_window_pattern": kinds.index("full_attention") + 1}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = load_config(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "give a folder with config.json, or the id of a model that has been downloaded"
        raise ModelError(f"no model in {path}: there is no config.json", hint) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path / 'config.json'} is not JSON: {error}", "download the file again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{path / 'config.json'} names no model_type", "give a language model's folder")
    return config


def _model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's Model, with what its architecture needs, and ModelArgs."""
    model_class, args_class = _get_classes({**config, "model_type": mlx_module(config["model_type"])})
    text = config.get("text_config") or config
    model_class = mlx_model(known_as(config["model_type"]), model_class)
    if text.get("num_nextn_predict_layers"):
        model_class = _without_drafts(model_class)
    return with_stated_weights(model_class, tied=bool(text.get("tie_word_embeddings"))), args_class


def _without_drafts(model_class: Any) -> Any:
    """The same, without the weights of layers behind the last one (MTP), which draft tokens. mlx-lm's deepseek_v3
    leaves out those of layer 61 only."""

    class WithoutDrafts(model_class):
        def sanitize(self, weights: dict[str, Any]) -> Any:
            last = len(self.layers)
            kept = {name: one for name, one in weights.items() if not (at := _LAYER.search(name)) or int(at[1]) < last}
            return super().sanitize(kept) if hasattr(model_class, "sanitize") else kept

    return WithoutDrafts


def _cast(model: Any, dtype: Any, float32: tuple[str, ...]) -> None:
    """Floating weights to `dtype`, but those with these endings to float32. Packed weights and uint8 scales, which are
    integers, stay."""
    kept = [(name, array) for name, array in tree_flatten(model.parameters()) if name.endswith(float32)]
    model.set_dtype(dtype)
    floats = [(name, array.astype(mx.float32)) for name, array in kept if mx.issubdtype(array.dtype, mx.floating)]
    model.load_weights(floats, strict=False)


def _require_computable(model: Any, dtype: DType, device: Any) -> None:
    """mlx's CPU GatherMM, the matmul of float experts, supports float32 only (mlx 0.32); it would fail mid-request."""
    if device != mx.cpu or dtype == "float32":
        return
    if any(isinstance(module, SwitchLinear) for module in _modules(model)):
        raise ModelError(
            f"a mixture-of-experts model cannot run in {dtype} on mlx's CPU backend, which multiplies experts in "
            "float32 only",
            "set dtype = float32 for this host, or run it on a GPU",
        )


def _is_mixture(model: Any) -> bool:
    return any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for module in _modules(model))


def _active_bytes(model: Any, config: Mapping[str, Any]) -> int:
    """Bytes of the weights that one token is multiplied with. Of a mixture only its chosen experts (all, if config.json
    does not state their number in a known way); of the embeddings none unless they are also the output head."""
    chosen = config.get("num_experts_per_tok") or config.get("num_experts_per_token")
    total, has_head = _nbytes(model), "lm_head" in model and _nbytes(model["lm_head"]) > 0
    for module in _modules(model):
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear) and chosen:
            total -= round(_nbytes(module) * (1 - chosen / module.num_experts))
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and has_head:
            total -= _nbytes(module)
    return total


def _nbytes(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Module)]


_WORDS: Final = (
    (r"Missing (\d+) parameters: ([^,. ][^, ]*[^,. ])", r"\1 weights that config.json describes are missing, \2 first"),
    (
        r"Received (\d+) parameters not in model: ([^,. ][^, ]*[^,. ])",
        r"its model has no place for \1 weights, \2 first",
    ),
    (r"Expected shape .* for parameter (\S+)", r"the weight \1 has another shape than config.json describes"),
    (r"Model type (\S+) not supported\.", r"it does not know the model type \1"),
    (r".*missing \d+ required positional arguments?: (.*)", r"config.json leaves out \1"),
    (r"'?(\w+)'? is not in list", r"it expects a layer of the kind \1, and none is"),
)
"""What mlx-lm says when it does not load a model, and that in plain words."""


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    for said, words in _WORDS:
        if found := re.match(said, text):
            return found.expand(words).replace("'", "")
    if isinstance(error, KeyError):
        return f"neither config.json nor the weights have {text.strip(chr(39))}"
    by_author = isinstance(error, ValueError | AssertionError | ImportError | NotImplementedError)
    return "it does not take what config.json states" + (f": {text[:300]}" if text and by_author else ", or leaves out")


def _text_type(config: Mapping[str, Any]) -> str:
    """The model type of the part that reads text."""
    return known_as(str((config.get("text_config") or {}).get("model_type") or config["model_type"]))
