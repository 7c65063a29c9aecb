"""Which tokens of a hand-off are computed again, and by how much their KV may differ from what arrived. Pure.

The decode host has the weights, so it can know what a digest cannot show: whether the keys and values are those of this
prompt and this model. What can be computed without reading the whole prompt again depends on the model's caches:

    layers of the model              tokens that run                        what is compared
    full attention, also latent      the last 8, on the rows that arrived   their rows, in every layer
    sliding, the prompt within       the same                               the same
    sliding, the prompt beyond a     the last one, on the rows that arrived its row, in every layer
      window: earlier rows are gone  the first 32, on what was held         their rows, in layers that keep them
    with states, which cannot be     the first 32, on what was held         their rows, in layers that keep them;
      taken back to earlier tokens                                          the states, if those are all tokens

Of the first layer, more is compared, for it depends on token and place only: rows of 256 tokens of the whole prompt, or
the last inputs of its convolution. These find the KV of another prompt that ends, or begins, like this one. Only what
was received counts: after a held prefix, "the first" is the first one that was received. Fewer tokens: all of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Final, Literal

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import AS_IS, INT8, WireForm
from disagg.errors import KVRefuted

LAST: Final = 8
FIRST: Final = 32
SAMPLE: Final = 256
FEW: Final = 5
"""Fewer rows than this have no median that one of them cannot change."""

Measure = Literal["sample", "rows", "few"]
"""sample: the largest deviation of a row in the first layer. rows: the median of several rows of a layer, in the worst
layer. few: the same of fewer than FEW rows, of which one may deviate much with nothing wrong: see BOUNDS."""
MEASURES: Final[tuple[Measure, ...]] = ("sample", "rows", "few")


@dataclass(frozen=True, slots=True)
class AuditPass:
    """Tokens [begin, end), which run through all layers. on_held: they run on top of what was held, else of what
    arrived. rows: the rows of each layer that are compared, by the index of their token. states: whether the states
    after `end` are compared, too."""

    begin: int
    end: int
    on_held: bool
    rows: tuple[range, ...]
    states: bool = False

    @property
    def measure(self) -> Measure:
        return "few" if self.end - self.begin < FEW else "rows"


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """sample: the tokens whose rows are compared in the first layer. inputs: how many of the last tokens have their
    inputs of the first layer's convolution compared."""

    passes: tuple[AuditPass, ...]
    sample: tuple[int, ...]
    inputs: int

    @property
    def tokens(self) -> int:
        """Tokens that run through all layers."""
        return sum(one.end - one.begin for one in self.passes)


def plan(layout: Layout, start: int, tokens: int, seed: str = "") -> AuditPlan:
    """The plan for received KV of tokens [start, tokens), at least one. seed: what the sample's places are drawn
    from."""
    passes = []
    beyond = any(layer.window is not None and layer.window < tokens for layer in layout.layers)
    stateful = any(layer.states for layer in layout.layers)
    if beyond or stateful:
        end = min(tokens, start + FIRST)
        rows = tuple(_kept(layer, tokens, start, end) for layer in layout.layers)
        if any(rows) or stateful:
            passes.append(AuditPass(start, end, True, rows, stateful and end == tokens))
    if not stateful:
        begin = max(start, tokens - (1 if beyond else LAST))
        passes.append(AuditPass(begin, tokens, False, tuple(layer.rows(tokens, begin) for layer in layout.layers)))
    first = layout.layers[0]
    width = next((state.shape[0] for state in first.states if len(state.shape) == 2), 0)
    return AuditPlan(tuple(passes), _sample(first.rows(tokens, start), seed), min(width, tokens - start))


def _kept(layer: LayerLayout, tokens: int, begin: int, end: int) -> range:
    """Rows [begin, end), if the layer keeps all of them after `tokens` tokens."""
    rows = layer.rows(tokens)
    return range(begin, end) if rows and rows.start <= begin else range(0)


def _sample(rows: range, seed: str) -> tuple[int, ...]:
    """SAMPLE of these, one from each of so many stretches."""
    if len(rows) <= SAMPLE:
        return tuple(rows)
    chance, step = random.Random(seed), len(rows) / SAMPLE
    return tuple(rows.start + int((piece + chance.random()) * step) for piece in range(SAMPLE))


@dataclass(frozen=True, slots=True)
class AuditBounds:
    """What each measure may be at most."""

    sample: float
    rows: float
    few: float

    def times(self, factor: float) -> AuditBounds:
        return AuditBounds(*(factor * getattr(self, measure) for measure in MEASURES))


UNBOUNDED: Final = AuditBounds(inf, inf, inf)
"""An audit within these states what it found, and refutes nothing."""
_HALF: Final = AuditBounds(sample=0.05, rows=0.5, few=2.0)
BOUNDS: Final[Mapping[str, AuditBounds]] = MappingProxyType(
    {
        "float32": AuditBounds(sample=3e-3, rows=3e-3, few=3e-2),
        "float16": _HALF,
        "bfloat16": _HALF,
        INT8: AuditBounds(sample=0.1, rows=0.5, few=2.0),
        "other weights": AuditBounds(sample=0.5, rows=1.1, few=2.0),
    }
)
"""The bounds by dtype, or by what rounds more than it: the form on the wire, weights of another form.

Measured with tiny random models of ten families of caches, which amplify rounding more than trained ones do, from torch
to MLX, 2,000 hand-offs of each form (`python -m tests.hostile.audit honest`). The largest sample, rows and few: 5e-6,
1.1e-5 and 6e-5 in float32; 9e-3, 0.38 and 0.15 in bfloat16; 9e-3, 0.043 and 0.88 with int8. The 0.38 is that of one
prompt of 12 tokens with a linear attention; the next is 0.1. Wrong rows deviate by 1 (zeros) to 1.4 (any others). In
half precision a single row can deviate by as much with nothing wrong, where attention chooses between two near equals:
the bound of few rows finds only what is no number, or far too large, until many hand-offs have shown less. In float32,
angles of rotary embeddings differ by 1e-3 at 131,072 tokens.
"""


def bounds(dtype: str, wire: WireForm, *, same_weights: bool) -> AuditBounds:
    """same_weights: both hosts load the same source, and convert nothing."""
    if not same_weights:
        return BOUNDS["other weights"]
    return BOUNDS[dtype if wire == AS_IS else wire]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How much rows differ: the difference over the size of what was computed, both root mean squares. layer: where."""

    measure: Measure
    value: float
    layer: int


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """What an audit found: the largest deviation of each measure that was taken. tokens: how many ran for it."""

    tokens: int
    deviations: tuple[Deviation, ...]

    def over(self, limits: AuditBounds) -> Deviation | None:
        """The first deviation that is over its bound."""
        return next((one for one in self.deviations if one.value > getattr(limits, one.measure)), None)

    def share(self, limits: AuditBounds) -> float:
        """The largest deviation, as a share of its bound."""
        return max((one.value / float(getattr(limits, one.measure)) for one in self.deviations), default=0.0)


def refutation(wrong: Deviation, limits: AuditBounds, tokens: int) -> KVRefuted:
    """The error of KV with this deviation, which is over its bound. tokens: how many ran. Rows of the first layer
    depend on nothing before them; those of others may also differ because held KV before them is wrong."""
    limit = getattr(limits, wrong.measure)
    what = "of the first layer" if wrong.measure == "sample" else f"of layer {wrong.layer}"
    by = "are no numbers" if wrong.value == inf else f"differ by {wrong.value:.2g} from what this model computes"
    error = KVRefuted(f"rows {what} {by} (at most {limit:.2g} is rounding)")
    error.of_received, error.audited_tokens = wrong.measure == "sample", tokens
    return error
