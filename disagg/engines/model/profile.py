"""What a framework computes for a model, as values, and whether two of them compute the same. Pure.

The *reference* profile comes from the checkpoint's files alone (`reference.py`); each engine also measures an *actual*
profile from its loaded modules. `compare` returns one finding per component that agrees and one per difference;
`verdict` raises if any difference is left. Differences with a known patch are corrected by the engine before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from disagg.api.layout import LayerLayout, Layout
from disagg.api.status import PreflightFinding
from disagg.errors import ModelError, PreflightRefused, first_line

MODEL_DTYPE = "model"
"""The dtype of a state tensor that has the dtype of the model, whichever that is."""
# Relative. Over thirteen architectures, a rope measured in float32 was within 1e-6 of the formula if both agreed. The
# difference to detect, gpt-oss without `truncate: false`, is 27 to 43 %.
FREQUENCY_TOLERANCE = 1e-4
# Relative. 1e-8 was measured if both agreed; a missing attention factor is a difference of 35 % for gpt-oss.
SCALE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one layer. inv_freq: radians per token, one per rotated pair, fastest first.
    scale: factor of cos and sin (YaRN's attention factor), 1.0 for other ropes."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: its cache layout and its rotary embedding (None if it has none)."""

    layout: LayerLayout
    rope: Rope | None


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model as one framework computes it or as the checkpoint's files describe it.

    source: "checkpoint", "transformers", "vllm", "mlx-lm" or "simulated". tied: the output head is the embeddings; None
    if it is not known.
    """

    source: str
    architecture: str
    vocab_size: int
    context: int
    layers: tuple[LayerProfile, ...]
    tokenizer: str  # short hash
    chat_template: str  # short hash
    special_tokens: str  # short hash
    eos_ids: frozenset[int]
    tied: bool | None = None

    def first(self, layers: int) -> ModelProfile:
        """The profile of the first so many of these layers."""
        return replace(self, layers=self.layers[:layers])


def layout_of(layers: Iterable[LayerProfile], dtype: str) -> Layout:
    """The KV layout of these layers with keys and values in `dtype`."""
    return Layout(tuple(_in_dtype(layer.layout, dtype) for layer in layers), dtype)


def _in_dtype(layer: LayerLayout, dtype: str) -> LayerLayout:
    states = (replace(state, dtype=dtype) if state.dtype == MODEL_DTYPE else state for state in layer.states)
    return replace(layer, states=tuple(states))


# The dtypes of states are not compared: the reference does not have those of the model.
_SHAPES: Mapping[str, Callable[[LayerLayout], Any]] = {
    "kv_heads": lambda layout: layout.kv_heads,
    "key_dim": lambda layout: layout.key_dim,
    "value_dim": lambda layout: layout.value_dim,
    "states": lambda layout: [state.shape for state in layout.states],
}


def compare(reference: ModelProfile, actual: ModelProfile) -> tuple[PreflightFinding, ...]:
    """Findings on every component, in the order of ModelProfile's fields; status "ok" or "refused"."""
    findings = [
        *_field(reference, actual, "architecture", "architecture"),
        *_field(reference, actual, "vocab_size", "vocabulary"),
        *_layers(reference, actual),
        *_heads(reference, actual),
        *_field(reference, actual, "tokenizer", "tokenizer"),
        *_field(reference, actual, "chat_template", "chat template"),
        *_field(reference, actual, "special_tokens", "special tokens"),
        *_field(reference, actual, "eos_ids", "eos"),
    ]
    return tuple(findings)


def verdict(
    reference: ModelProfile, actual: ModelProfile, patched: Sequence[PreflightFinding] = ()
) -> tuple[PreflightFinding, ...]:
    """The findings about a loaded model. Raises PreflightRefused, with every reason, if it computes anything but what
    the reference describes. patched: differences that were corrected, instead of the "ok" of what agrees only because
    of that."""
    components = {finding.component for finding in patched}
    found = compare(reference, actual)
    findings = (*(one for one in found if not (one.status == "ok" and one.component in components)), *patched)
    require(findings)
    return findings


_HINT: Final = "use another checkpoint of this model, or serve it with one framework alone (docs/architectures.md)"
_FILES: Final = "give all hosts the same files: disagg models pull, or disagg deploy for a model that is a folder"
_HINTS: Final[Mapping[str, str]] = {
    "layer kinds": "set context to no more tokens than the window has, or use another checkpoint of this model",
    "tokenizer": _FILES,
    "chat template": _FILES,
    "special tokens": _FILES,
    "eos": _FILES,
}
"""How to go on if a component differs."""


def require(findings: Iterable[PreflightFinding]) -> None:
    """Raise PreflightRefused if any finding is refused; the message has all of them."""
    refused = [finding for finding in findings if finding.status == "refused"]
    if refused:
        reasons = "; ".join(f"{finding.component}: {finding.detail}" for finding in refused)
        hints = dict.fromkeys(_HINTS.get(finding.component, _HINT) for finding in refused)
        raise PreflightRefused(f"the frameworks disagree about this model: {reasons}", "; ".join(hints))


def cannot_compute(framework: str, error: Exception) -> ModelError:
    """That a framework fails on one token. Which error it raises depends on the architecture."""
    sizes = re.search(r"shape|size|dimension|broadcast", first_line(error))
    why = (
        "sizes in config.json do not fit together"
        if sizes
        else "it does not take what config.json states, or leaves out"
    )
    hint = "compare config.json with the model's original, or use another model"
    return ModelError(f"{framework} cannot compute a token with this model: {why}", hint)


def _field(reference: ModelProfile, actual: ModelProfile, name: str, component: str) -> Iterator[PreflightFinding]:
    want, have = getattr(reference, name), getattr(actual, name)
    if want == have:
        yield PreflightFinding(component, "ok", _shown(want))
    else:
        yield PreflightFinding(
            component, "refused", f"{reference.source} has {_shown(want)}, {actual.source} has {_shown(have)}"
        )


def _shown(value: Any) -> str:
    return ", ".join(str(v) for v in sorted(value)) if isinstance(value, frozenset) else str(value)


def _heads(reference: ModelProfile, actual: ModelProfile) -> Iterator[PreflightFinding]:
    """Nothing if it is not known of one of them."""
    if reference.tied is None or actual.tied is None:
        return
    want, have = ("the embeddings" if one.tied else "weights of its own" for one in (reference, actual))
    if want == have:
        yield PreflightFinding("output head", "ok", want)
    else:
        yield PreflightFinding("output head", "refused", f"{reference.source} has {want}, {actual.source} has {have}")


def _layers(reference: ModelProfile, actual: ModelProfile) -> Iterator[PreflightFinding]:
    want, have = len(reference.layers), len(actual.layers)
    if want != have:
        detail = f"{reference.source} has {want}, {actual.source} has caches for {have}"
        yield PreflightFinding("number of layers", "refused", detail)
        return
    yield PreflightFinding("number of layers", "ok", str(want))
    yield from _kinds(reference, actual)
    yield from _dims(reference, actual)
    yield from _ropes(reference, actual)


def _kinds(reference: ModelProfile, actual: ModelProfile) -> Iterator[PreflightFinding]:
    """Kind and window of each layer. A window no shorter than the context has no effect."""
    differing: dict[str, list[int]] = {}
    for index, (want, have) in enumerate(_pairs(reference, actual)):
        if _span(want, reference.context) != _span(have, reference.context):
            differing.setdefault(_kind_difference(want, have, reference, actual), []).append(index)
    for what, indices in differing.items():
        yield PreflightFinding("layer kinds", "refused", f"{what} on {_ranges(indices)}")
    if not differing:
        yield PreflightFinding("layer kinds", "ok", _summary([_kind(layer) for layer in reference.layers]))


def _kind_difference(want: LayerProfile, have: LayerProfile, reference: ModelProfile, actual: ModelProfile) -> str:
    if want.layout.kind == "sliding" and have.layout.kind == "full":
        return (
            f"{actual.source} ignores sliding_window={want.layout.window}, which the checkpoint sets and "
            f"{_applier(reference)} applies,"
        )
    if want.layout.kind == "full" and have.layout.kind == "sliding":
        return f"{actual.source} applies sliding_window={have.layout.window}, which {_applier(reference)} does not,"
    return f"{reference.source} has {_kind(want)}, {actual.source} has {_kind(have)},"


def _applier(reference: ModelProfile) -> str:
    """The framework behind the reference: a checkpoint's profile is computed with transformers' config classes."""
    return "transformers" if reference.source == "checkpoint" else reference.source


def _span(layer: LayerProfile, context: int) -> tuple[str, int | None]:
    """Kind and window of the layer, as far as they matter for prompts within the context."""
    layout = layer.layout
    if layout.kind == "sliding" and layout.window is not None and layout.window < context:
        return "sliding", layout.window
    return ("full" if layout.kind == "sliding" else layout.kind), None


def _dims(reference: ModelProfile, actual: ModelProfile) -> Iterator[PreflightFinding]:
    """KV heads, key and value width, and the shapes of states."""
    differing = False
    for name, shape in _SHAPES.items():
        bad = [i for i, (a, b) in enumerate(_pairs(reference, actual)) if shape(a.layout) != shape(b.layout)]
        if bad:
            want, have = (shape(p.layers[bad[0]].layout) for p in (reference, actual))
            detail = f"{name} is {want} in {reference.source} and {have} in {actual.source} on {_ranges(bad)}"
            yield PreflightFinding("KV shape", "refused", detail)
            differing = True
    if not differing:
        yield PreflightFinding("KV shape", "ok", _summary([_shape(layer.layout) for layer in reference.layers]))


def _shape(layout: LayerLayout) -> str:
    rows = [f"{layout.kv_heads} heads x {layout.key_dim}/{layout.value_dim}"] if layout.kv_heads else []
    return " and ".join([*rows, *("x".join(map(str, state.shape)) for state in layout.states)])


def _ropes(reference: ModelProfile, actual: ModelProfile) -> Iterator[PreflightFinding]:
    differing: dict[str, list[int]] = {}
    for index, (want, have) in enumerate(_pairs(reference, actual)):
        for what in rope_differences(want.rope, have.rope, reference.source, actual.source):
            differing.setdefault(what, []).append(index)
    for what, indices in differing.items():
        yield PreflightFinding("rope", "refused", f"{what} on {_ranges(indices)}")
    if not differing:
        worst = max((_worst(w.rope, h.rope)[0] for w, h in _pairs(reference, actual) if w.rope and h.rope), default=0.0)
        yield PreflightFinding("rope", "ok", f"frequencies within {worst:.0e} of the reference")


def rope_differences(want: Rope | None, have: Rope | None, reference: str, actual: str) -> Iterator[str]:
    """Sentences on how two ropes differ, without the layer's name; none if they agree within the tolerances."""
    if want is None or have is None:
        if want is not have:
            yield f"{reference} has {'no rope' if want is None else 'a rope'} and {actual} has " + (
                "none" if have is None else "one"
            )
        return
    if len(_turning(want)) != len(_turning(have)):
        yield f"{reference} rotates {len(_turning(want))} pairs and {actual} {len(_turning(have))}"
        return
    error, pair = _worst(want, have)
    if error > FREQUENCY_TOLERANCE:
        expected, measured = _turning(want)[pair], _turning(have)[pair]
        yield (
            f"{actual} turns pair {pair} by {measured:.6g} radians per token instead of {expected:.6g} "
            f"({100 * error:.3g} % off, the worst of {len(_turning(want))} frequencies)"
        )
    if abs(have.scale - want.scale) > SCALE_TOLERANCE * abs(want.scale):
        yield f"{actual} scales rotated vectors by {have.scale:.6g} instead of {want.scale:.6g}"


def _worst(want: Rope, have: Rope) -> tuple[float, int]:
    """(relative error, pair) of the frequency with the largest error."""
    pairs = zip(_turning(want), _turning(have), strict=True)
    return max((abs(b - a) / a, index) for index, (a, b) in enumerate(pairs))


def _turning(rope: Rope) -> list[float]:
    """Frequencies without zeros: one framework lists pairs that do not turn as zeros, another leaves them out."""
    return [frequency for frequency in rope.inv_freq if frequency != 0.0]


def _pairs(reference: ModelProfile, actual: ModelProfile) -> list[tuple[LayerProfile, LayerProfile]]:
    return list(zip(reference.layers, actual.layers, strict=True))


def _kind(layer: LayerProfile) -> str:
    layout = layer.layout
    if layout.kind in ("state", "index"):
        return "a state" if layout.kind == "state" else "the keys of an indexer"
    return f"a window of {layout.window}" if layout.kind == "sliding" else f"{layout.kind} attention"


def _summary(items: Sequence[str]) -> str:
    return ", ".join(f"{count} x {item}" for item, count in Counter(items).items())


def _ranges(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(indices) == 1 else f"layers {text}"
