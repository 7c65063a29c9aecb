"""How much memory a server takes: weights as its engine holds them, KV, and workspace. Pure.

Weights follow from the model's config.json. Workspace is an estimate: what it counts is stated beside each figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from disagg.api.engines import Engine
from disagg.api.names import DTYPE_BYTES
from disagg.planning.checkpoint import Packing, StoredWeights
from disagg.planning.shapes import ModelShape

Weights = Literal["as stored", "dequantised", "int8", "int4"]

_TITLES: Final[Mapping[Packing, str]] = {"fp8": "FP8", "mxfp4": "MXFP4", "mlx": "quantized for MLX", "other": "packed"}
_ONLY_LINEAR: Final[Mapping[str, float]] = {"int8": 8.0, "int4": 4.25}
"""torchao's bits per parameter of linear layers; int4 has a scale and a zero point for 128 weights."""
_LIVE_ACTIVATIONS: Final = 8
"""Tensors of [chunk, widest] that live at the same time within a layer: assumed."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is loaded on a host. engine: one that loads models. device: "cuda", "mps", "gpu" or "cpu".
    kv_bytes: what hosts.toml allows its KV. context: tokens of the longest request. tensor_parallel: devices with
    memory of their own that share weights and KV heads. stages: of as many devices each, that share the layers.
    layers: only the model's first so many are loaded, without the output head; None: all. kv_bytes and all results are
    of one device. to_send_bytes: as in Need."""

    engine: Engine
    device: str
    dtype: str
    context: int
    chunk_tokens: int
    kv_bytes: int
    quantization: str | None = None
    attention: str | None = None
    tensor_parallel: int = 1
    to_send_bytes: int = 0
    stages: int = 1
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of memory. one_request: KV of one request of the whole context. form: of the weights, in words. to_send:
    the most KV that has been copied out of a paged cache and waits to be sent, if it takes the same memory."""

    weights: int
    kv: int
    workspace: int
    one_request: int
    form: str = "as stored"
    to_send: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.to_send + self.workspace

    @property
    def least(self) -> int:
        """What it takes to serve one request of the whole context."""
        return self.weights + self.one_request + self.workspace


def need(stored: StoredWeights, loading: Loading) -> Need:
    """The memory that one host takes to serve a model."""
    how = weights(stored.packing, loading)
    scale = stored.nbytes / stored.shape.weight_bytes if stored.nbytes else 1.0
    loaded = stored.shape if loading.layers is None else stored.shape.first(loading.layers)
    shape = in_memory(loaded, how, loading.dtype)
    one_request = loaded.layout(loading.dtype).nbytes(loading.context)
    ranks = loading.tensor_parallel
    sharing = min(ranks, stored.shape.kv_heads)  # with more ranks than heads, each has a whole head
    one_request //= sharing * loading.stages
    return Need(
        int(shape.weight_bytes * scale / (ranks * loading.stages)),
        max(one_request, loading.kv_bytes),
        workspace(stored, loading),
        one_request,
        _title(stored.packing, how, loading.dtype) + _of_layers(stored, loading),
        loading.to_send_bytes,
    )


def layers_that_fit(stored: StoredWeights, loading: Loading, room: int) -> int:
    """The most of the model's first layers that a host with room for so many bytes serves; 0: not even one."""

    def fits(layers: int) -> bool:
        return need(stored, replace(loading, layers=layers)).least <= room

    return sum(fits(layers) for layers in range(1, stored.shape.layers + 1))


def weights(packing: Packing, loading: Loading) -> Weights:
    """The form that the weights of a checkpoint have in an engine's memory.

    Engines that dequantise do so with MXFP4 unless hosts.toml states `quantization = "mxfp4"`, and with FP8 without a
    CUDA device.
    """
    if not loading.engine.memory.dequantises:
        return "as stored"
    if packing == "none" and loading.quantization in _ONLY_LINEAR:
        return "int8" if loading.quantization == "int8" else "int4"
    if packing == "mxfp4" and loading.quantization != "mxfp4":
        return "dequantised"
    if packing == "fp8" and loading.device != "cuda":
        return "dequantised"
    return "as stored"


def in_memory(shape: ModelShape, how: Weights, dtype: str) -> ModelShape:
    """The shape with the bits per parameter that the weights have in memory.

    torchao converts linear layers only: embeddings, output head and the fused experts of a mixture keep `dtype`.
    """
    plain = 8.0 * DTYPE_BYTES[dtype]
    if how == "dequantised":
        return replace(shape, weight_bits=plain, expert_bits=plain, head_bits=plain)
    if how in _ONLY_LINEAR:
        return replace(shape, weight_bits=_ONLY_LINEAR[how], expert_bits=plain, head_bits=plain)
    return shape


def workspace(stored: StoredWeights, loading: Loading) -> int:
    """Estimated bytes for activations of one chunk and for the framework, on one device."""
    shape = stored.shape
    item = DTYPE_BYTES[loading.dtype]
    widest = max(shape.hidden, shape.feed_forward, shape.experts_per_token * shape.expert_width)
    chunk = min(loading.chunk_tokens, loading.context)
    nbytes = _LIVE_ACTIVATIONS * chunk * widest * item
    eager = loading.attention or ("eager" if stored.sinks else "")
    if "attention" in loading.engine.options and eager == "eager":
        # Scores of every head, in the model's dtype and once more in float32 for the softmax.
        nbytes += chunk * loading.context * shape.heads * (item + 4)
    return nbytes + loading.engine.memory.framework.get(loading.device, 0)


def _of_layers(stored: StoredWeights, loading: Loading) -> str:
    return "" if loading.layers is None else f", the first {loading.layers} of {stored.shape.layers} layers"


def _title(packing: Packing, how: Weights, dtype: str) -> str:
    """The form of the weights in words: `FP8`, `MXFP4 dequantised to bfloat16`, `bfloat16`."""
    if how == "dequantised":
        return f"{_TITLES[packing]} dequantised to {dtype}"
    if how in _ONLY_LINEAR:
        return f"{how}, experts and embeddings {dtype}"
    return _TITLES.get(packing, "as stored")
