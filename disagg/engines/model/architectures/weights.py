"""Weights that a framework does not take as a checkpoint has them, of any model: output heads that are the embeddings,
or are not, and biases. They are set right while the model is loaded.

config.json states whether the output head is the embeddings (`tie_word_embeddings`). Some classes of either framework
have one form only, whatever it states. Biases are those that the checkpoint has: a linear layer with one, or without,
can mean only one thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Config, LoadedByMLX, LoadedByTransformers, MLXModel
from disagg.errors import ModelError

_HEADS: Final = ("lm_head", "embed_out", "output")
_LAYER: Final = re.compile(r"\.\d+\.")
_DIFFERENT: Final = (
    "config.json states that the output head is the embeddings (tie_word_embeddings), and the weights have another one",
    "set tie_word_embeddings to false if the head among the weights is right, else remove it from them",
)


def stated_tie(config: Mapping[str, Any], whole: Config) -> bool:
    """Whether the output head is the embeddings. config: config.json, of which the part that reads text counts first.
    whole: transformers' configuration of the same, which has the defaults of its type."""
    for part in (config.get("text_config") or {}, config):
        if "tie_word_embeddings" in part:
            return bool(part["tie_word_embeddings"])
    parts = (whole.get_text_config(decoder=True), whole)
    return next((bool(part.tie_word_embeddings) for part in parts if hasattr(part, "tie_word_embeddings")), False)


def tied_in_transformers(model: Any) -> bool | None:
    """Whether the output head of transformers' model is its embeddings; None if it has no head, or a packed one."""
    head: Any = getattr(model.get_output_embeddings(), "weight", None)
    embeddings = model.get_input_embeddings().weight
    if type(head) is not type(embeddings) or head.shape != embeddings.shape or head.dtype != embeddings.dtype:
        return None
    return head is embeddings


def tie_in_transformers(model: Any, missing: set[str], *, tied: bool) -> None:
    """Let the embeddings be the output head if `tied`. Some of transformers' classes never do. missing: weights that
    the checkpoint does not have, from which the head is removed. ModelError if the checkpoint has another head."""
    if not tied or tied_in_transformers(model) is not False:
        return
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    if name not in missing and not bool((head.weight == embeddings.weight).all()):
        raise ModelError(*_DIFFERENT)
    missing.discard(name)
    head.weight = embeddings.weight


def tied_heads(loaded: LoadedByTransformers) -> list[PreflightFinding]:
    """Report a head that `tie_in_transformers` has tied."""
    known = getattr(loaded.model, "all_tied_weights_keys", None)
    if known or known is None or not tied_in_transformers(loaded.model):
        return []
    detail = "transformers ignores tie_word_embeddings=true; its head is the embeddings here"
    return [PreflightFinding("output head", "patched", detail)]


def with_stated_weights(model_class: MLXModel, *, tied: bool) -> MLXModel:
    """mlx-lm's Model as a class that has the output head and the biases that the checkpoint has. tied: config.json
    states that the head is the embeddings."""

    class WithStatedWeights(model_class):
        def sanitize(self, weights: dict[str, Any]) -> Any:
            heads = {name: array for name, array in weights.items() if _of_head(name)}
            if tied:
                weights = _without_head(weights, heads)
            if hasattr(model_class, "sanitize"):
                weights = super().sanitize(weights)
            set_right = [*_fit_head(self, weights, heads, tied=tied), *_fit_biases(self, weights)]
            object.__setattr__(self, "set_right", set_right)
            return weights

    return WithStatedWeights


def stated_weights(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Report what `with_stated_weights` has set right."""
    return list(getattr(loaded.model, "set_right", ()))


def has_head(model: Any) -> bool:
    """Whether mlx-lm's model has an output head beside its embeddings."""
    from mlx import nn

    heads = (one for kind in (nn.Linear, nn.QuantizedLinear) for one in _outside_layers(model, kind))
    return any(_of_head(f"{path}.weight") for path, *_ in heads)


def _of_head(name: str) -> bool:
    """Whether a weight is the head's, packed or not. A bias of it stays, whatever the head is."""
    module, kind = ("", *name.split("."))[-2:]
    return module in _HEADS and kind != "bias" and not _LAYER.search(name)


def _without_head(weights: Mapping[str, Any], heads: Mapping[str, Any]) -> dict[str, Any]:
    """The weights without a head that is the same as the embeddings. ModelError if it is another one."""
    from mlx import core as mx

    others = [array for name, array in weights.items() if name not in heads]
    for head in heads.values():
        alike = [array for array in others if array.shape == head.shape and array.dtype == head.dtype]
        if alike and not any(bool(mx.array_equal(array, head)) for array in alike):
            raise ModelError(*_DIFFERENT)
    return {name: array for name, array in weights.items() if name not in heads}


def _outside_layers(model: Any, kind: type) -> Iterator[tuple[str, Any, str, Any]]:
    """(path, parent, name, module) of every module of this kind that is in no list."""
    for path, parent in model.named_modules():
        for name, child in parent.items():
            if isinstance(child, kind) and not _LAYER.search(f".{path}."):
                yield f"{path}.{name}".removeprefix("."), parent, name, child


def _fit_head(model: Any, weights: dict[str, Any], heads: Mapping[str, Any], *, tied: bool) -> list[PreflightFinding]:
    from mlx import nn

    linear = next((one for one in _outside_layers(model, nn.Linear) if _of_head(f"{one[0]}.weight")), None)
    shape = linear[3].weight.shape if linear else next((array.shape for array in heads.values()), None)
    embeddings = next((one for one in _outside_layers(model, nn.Embedding) if one[3].weight.shape == shape), None)
    if embeddings is None:
        return []
    if linear and tied:
        linear[1][linear[2]] = _tied_head(embeddings[1], embeddings[2], linear[3].get("bias"))
        return [PreflightFinding("output head", "patched", "mlx-lm ignores tie_word_embeddings=true; applied")]
    if linear:  # which some classes look for under another name than the checkpoint has
        for name in [name for name in weights if _of_head(name)]:
            weights[f"{linear[0]}.{name.rpartition('.')[2]}"] = weights.pop(name)
        return []
    stored = next((array for name, array in heads.items() if name.endswith(".weight")), None)
    if not tied and stored is not None:
        embeddings[3].__class__ = _embedding_with_head()
        embeddings[3].head = nn.Linear(stored.shape[1], stored.shape[0], bias=False)
        for name in [name for name in weights if _of_head(name)]:
            del weights[name]
        weights[f"{embeddings[0]}.head.weight"] = stored
        return [PreflightFinding("output head", "patched", "mlx-lm ignores tie_word_embeddings=false; applied")]
    return []


def _tied_head(parent: Any, name: str, bias: Any) -> Any:
    """A head that has no weights of its own but a bias. The embeddings are looked up in their parent, where packed ones
    may take their place."""
    from mlx import nn

    class TiedHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "_parent", parent)
            if bias is not None:
                self.bias = bias

        def __call__(self, x: Any) -> Any:
            logits = self._parent[name].as_linear(x)
            return logits + self.bias if "bias" in self else logits

    return TiedHead()


def _embedding_with_head() -> Any:
    from mlx import nn

    class EmbeddingWithHead(nn.Embedding):
        """In place of embeddings that mlx-lm uses as the head: the head is another module."""

        def as_linear(self, x: Any) -> Any:
            return self.head(x)

    return EmbeddingWithHead


def _fit_biases(model: Any, weights: Mapping[str, Any]) -> list[PreflightFinding]:
    """Give linear layers the biases that the checkpoint has and mlx-lm's class leaves out, and take away those that the
    checkpoint has in no layer."""
    from mlx import core as mx
    from mlx import nn
    from mlx_lm.models.switch_layers import SwitchLinear

    kinds = (nn.Linear, nn.Conv1d, nn.LayerNorm, SwitchLinear)
    known = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    stored = {name.removesuffix(".bias"): array for name, array in weights.items() if name.endswith(".bias")}
    stored_kinds = {_kind(path) for path in stored}
    added = [path for path, module in known.items() if path in stored and "bias" not in module]
    removed = [path for path, module in known.items() if "bias" in module and _kind(path) not in stored_kinds]
    for path in added:
        known[path].bias = mx.zeros(stored[path].shape)
    for path in removed:
        known[path].pop("bias")
    return [*_biases(added, "leaves out the bias of", "added"), *_biases(removed, "expects a bias of", "taken away")]


def _kind(path: str) -> str:
    """The name of a module without the number of its layer."""
    return _LAYER.sub(".N.", path)


def _biases(paths: list[str], what: str, done: str) -> list[PreflightFinding]:
    names = sorted({path.rpartition(".")[2] for path in paths})
    detail = f"in {len(paths)} modules mlx-lm {what} {', '.join(names)}, of which the checkpoint has "
    detail += "one" if done == "added" else "none"
    return [PreflightFinding("biases", "patched", f"{detail}; {done}")] if paths else []
