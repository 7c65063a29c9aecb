"""An architecture: which layers of a model keep something between tokens, in which shape, and in which order on the
wire; and what its family needs in one framework or another.

The wire has mlx-lm's form: the decode host uses what it receives as it is, and the prefill host converts what
transformers keeps. For keys and values of plain attention the two are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from disagg.api.layout import LayerLayout, StateTensor
from disagg.api.status import PreflightFinding
from disagg.engines.model.profile import MODEL_DTYPE, LayerProfile, ModelProfile, Rope
from disagg.engines.model.rope import reference_rope
from disagg.errors import ModelError

Config = Any  # transformers' configuration of the text model, or of one of its layers
Tensor = Any  # of torch, with the batch in front: [1, ...]
MLXModel = Any  # a class of mlx-lm

# One layer's configuration -> what it keeps.
Shape = Callable[[Config], LayerLayout]
# (the whole configuration, index of the layer, its kind) -> its rotary embedding
RopeOf = Callable[[Config, int, str], Rope | None]
# transformers' convolution states and recurrent states of a layer -> the tensors of its state on the wire
ToStates = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
# configuration -> why the model cannot be divided between hosts; empty if it can
Refusal = Callable[[Config], str]
# keys or values, [1, heads, rows, dim] -> the same in the order of the wire
ToRows = Callable[[Tensor], Tensor]
# (keys of an indexer, [1, 1, rows, dim], how many of their elements are rotated) -> the same in the order of the wire
ToIndex = Callable[[Tensor, int], Tensor]
# (configuration, index of the layer) -> the keys of its indexer, which it keeps beside its rows; None if it has none
Index = Callable[[Config, int], LayerLayout | None]


# Layers that keep nothing: those without attention, in transformers' names.
_WITHOUT_KV = ("mlp", "moe")


def full(config: Config) -> LayerLayout:
    """Plain attention over all tokens."""
    return LayerLayout("full", kv_heads(config), head_dim(config), head_dim(config))


def sliding(config: Config) -> LayerLayout:
    """Plain attention over the last tokens."""
    return LayerLayout(
        "sliding", kv_heads(config), head_dim(config), head_dim(config), window=int(config.sliding_window)
    )


def kv_heads(config: Config) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def plain_rope(config: Config, layer: int, kind: str) -> Rope | None:
    """The rotary embedding that the configuration states for a layer; None if it states none."""
    flags = getattr(config, "no_rope_layers", None)  # 1: this layer rotates, 0: it does not
    thetas = getattr(config, "layer_rope_theta", None)  # 0: it does not
    if (flags and not flags[layer]) or (thetas and not thetas[layer]):
        return None
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return None
    if kind in parameters:  # one set per layer type
        parameters = parameters[kind]
    return reference_rope(parameters, head_dim(config.per_layer_config[layer]), int(config.max_position_embeddings))


def no_rope(config: Config, layer: int, kind: str) -> Rope | None:
    return None


def _as_they_are(rows: Tensor, rotated: int = 0) -> Tensor:
    return rows


def _no_index(config: Config, layer: int) -> None:
    return None


def _layers_without_experts(config: Config) -> Mapping[str, Any]:
    """How many layers come before the first one with experts: of several types transformers reads no such number."""
    kinds = list(getattr(config, "mlp_layer_types", None) or ())
    return {"first_k_dense_replace": [*kinds, "sparse"].index("sparse")} if kinds else {}


def _shares_kv(config: Config) -> str:
    """Whether late layers read what earlier ones keep: of a sliding layer they would need rows that are not sent."""
    return "its late layers read the KV of early ones" if any(_reusing(config)) else ""


def _as_it_is(model: MLXModel) -> MLXModel:
    return model


def _stated_epsilon(config: Config) -> float | None:
    return getattr(config, "rms_norm_eps", None)


@dataclass(frozen=True, slots=True)
class Convolved:
    """What the convolution of a layer with a state reads, in its order: (heads, width of a head) of each part. A token
    adds to the recurrent matrix of each head the outer product of two of these parts, `value` and `key`; neither if
    there is no such matrix. Several heads of values may share one of keys. key: None in Mamba 1, where both are
    computed from `value`, which is then every channel."""

    parts: tuple[tuple[int, int], ...]
    value: int = 0
    key: int | None = 0

    def of_rank(self, ranks: int) -> Convolved:
        """What one of several ranks reads that share the heads. A part with fewer heads than ranks is on each whole."""
        return replace(self, parts=tuple((max(1, heads // ranks), width) for heads, width in self.parts))

    @property
    def widths(self) -> list[int]:
        return [heads * width for heads, width in self.parts]


def _nothing_convolved(config: Config) -> Convolved:
    return Convolved(())


def _without_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is special about the KV of some model types. The defaults are plain attention.

    kinds: the shape of each kind of layer, by transformers' name of the kind.
    index: the keys of a layer's indexer. rope: the rotary embedding of one layer, and of its indexer.
    wire_states, wire_values, wire_index: what transformers keeps -> the wire. convolved: what its states consist of.
    split: why two hosts cannot compute a part of its layers each; empty if they can.
    latent_epsilon: what mlx-lm normalises latent vectors with.
    float32: endings of weights that transformers keeps in float32 whatever the model's dtype, in mlx-lm's names.
    mlx_model: mlx-lm's Model as a class that also loads what mlx-lm 0.32 misreads. mlx_module: the name of mlx-lm's
    module, if it is not the model type's. mlx_arguments: what mlx-lm reads in place of what config.json has for these
    keys, or has not. cache_argument: what transformers' model calls its cache.
    """

    kinds: Mapping[str, Shape] = field(default_factory=dict)
    index: Index = _no_index
    rope: RopeOf = plain_rope
    wire_states: ToStates = _without_states
    convolved: Callable[[Config], Convolved] = _nothing_convolved
    wire_values: ToRows = _as_they_are
    wire_index: ToIndex = _as_they_are
    split: Refusal = _shares_kv
    latent_epsilon: Callable[[Config], float | None] = _stated_epsilon
    float32: tuple[str, ...] = ()
    mlx_model: Callable[[MLXModel], MLXModel] = _as_it_is
    mlx_module: str = ""
    mlx_arguments: Callable[[Config], Mapping[str, Any]] = _layers_without_experts
    cache_argument: str = "past_key_values"

    def layers(self, config: Config) -> tuple[LayerProfile, ...]:
        """What the layers keep, in order, each with its shape and rotary embedding. ModelError for a kind of layer
        that is not known."""
        kinds = layer_kinds(config)
        return tuple(made for index in cached_layers(config) for made in self._layer(config, index, kinds[index]))

    def places(self, config: Config) -> tuple[int, ...]:
        """To which layer of the model each of `layers` belongs."""
        cached = cached_layers(config)
        return tuple(at for at in cached for _ in range(1 if self.index(config, at) is None else 2))

    def _layer(self, config: Config, index: int, kind: str) -> list[LayerProfile]:
        layout, indexer = self._shape(config, kind)(config.per_layer_config[index]), self.index(config, index)
        rope = self.rope(config, index, kind) if layout.kv_heads else None
        return [LayerProfile(one, rope) for one in (layout, indexer) if one is not None]

    def _shape(self, config: Config, kind: str) -> Shape:
        shapes = {"full_attention": full, "sliding_attention": sliding, **self.kinds}
        if kind not in shapes:
            raise ModelError(
                f"model type {config.model_type!r} has layers of the kind {kind!r}, which cannot be handed over",
                f"kinds that can be: {', '.join(sorted(shapes))}",
            )
        return shapes[kind]


@dataclass(frozen=True, slots=True)
class LoadedByMLX:
    """A model that mlx-lm has loaded, and what it was measured to compute. config: config.json as mlx-lm read it.
    text_config: transformers' configuration of the text model. ropes: (layer, parent, attribute, module) of every
    rotary module."""

    model: Any
    config: Mapping[str, Any]
    text_config: Config
    reference: ModelProfile
    measured: Sequence[LayerProfile]
    ropes: Sequence[tuple[int, Any, str, Any]]

    def modules(self, kind: type) -> list[Any]:
        """The modules of exactly this class."""
        return [module for module in self.model.modules() if type(module) is kind]


@dataclass(frozen=True, slots=True)
class LoadedByTransformers:
    """A model that transformers has loaded. text_config: its configuration of the text model."""

    model: Any
    text_config: Config


@dataclass(frozen=True, slots=True)
class ReadByVLLM:
    """A model that vLLM is about to load, in each of its processes. text_config: transformers' configuration of the
    text model. device: "cpu" or "cuda". overrides: what vLLM reads in place of keys of config.json; patches add to
    them."""

    text_config: Config
    device: str
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Patch:
    """Sets right what a framework computes otherwise than the checkpoint's configuration states, and nothing else: the
    preflight refuses a model with any other difference, and the model is measured again. Those of vLLM are applied
    before it loads the model.

    what: the difference, for people. framework, series: where it is. needed_by: the configurations of the tests that
    are answered otherwise, or refused, without it. apply: gets what the framework has loaded, or a ReadByVLLM; one
    finding for each correction, none if the model does not need it.
    """

    what: str
    framework: Literal["mlx-lm", "transformers", "vllm"]
    series: str
    needed_by: tuple[str, ...]
    apply: Callable[[Any], list[PreflightFinding]]


def layer_kinds(config: Config) -> list[str]:
    """One name per layer, by transformers' own rule: layer_types, else one kind for all layers, given by the window."""
    count = int(config.num_hidden_layers)
    given = getattr(config, "layer_types", None)
    if given:
        if len(given) != count:
            raise ModelError(
                f"model type {config.model_type!r} has {count} layers and {len(given)} layer_types",
                "compare config.json with the model's original",
            )
        return list(given)
    if getattr(config, "attention_chunk_size", None):
        return ["chunked_attention"] * count
    return ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"] * count


def cached_layers(config: Config) -> list[int]:
    """Indices of the layers that keep keys, values or a state of their own: not those that have no attention, or read
    what an earlier layer keeps."""
    reusing, kinds = _reusing(config), layer_kinds(config)
    return [i for i, kind in enumerate(kinds) if kind not in _WITHOUT_KV and not reusing[i]]


def _reusing(config: Config) -> list[bool]:
    """Whether each layer reads what an earlier one keeps. transformers 5.19, which vLLM brings, states only how many of
    the last layers do."""
    count = int(config.num_hidden_layers)
    if modes := getattr(config, "kv_sharing_modes", None):
        return [mode == "reuse" for mode in modes]
    shared = int(getattr(config, "num_kv_shared_layers", None) or 0)
    return [layer >= count - shared for layer in range(count)]


def convolution_window(kernel: int, channels: int) -> StateTensor:
    """The last inputs of a convolution, [width - 1, channels]."""
    return StateTensor((int(kernel) - 1, int(channels)), MODEL_DTYPE)


def convolution_rows(convolution: Tensor) -> Tensor:
    """transformers keeps the last K columns of a convolution of width K, [1, channels, K]; mlx-lm the last K - 1 as
    rows."""
    return convolution[..., 1:].transpose(1, 2)
