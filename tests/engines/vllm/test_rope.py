"""disagg/engines/vllm/profile.py: what a layer's rotary module turns by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.engines.vllm.profile import require_alike_heads, rope_of
from disagg.errors import ModelError


class Rotary:
    """vLLM's rotary module, of two pairs."""

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        angles = torch.tensor([[0.0, 0.0], [1.0, 0.5]])
        return 2.0 * torch.cat([angles.cos(), angles.sin()], -1)


class LongRope:
    """The same with two sets of frequencies."""

    short_factor, long_factor, short_mscale, long_mscale = (1.0, 2.0), (4.0, 8.0), 1.5, 3.0

    def __init__(self, *, use_long_rope: bool) -> None:
        self.use_long_rope = use_long_rope

    def _compute_cos_sin_cache(self, positions: int, factors: tuple[float, ...], scale: float) -> torch.Tensor:
        angles = torch.arange(positions)[:, None] / torch.tensor(factors)
        return scale * torch.cat([angles.cos(), angles.sin()], -1)


SHARED = SimpleNamespace(inv_freq=torch.tensor([1.0, 0.25]), attention_scaling=1.5)
"""transformers' rotary module, which vLLM runs as it is for models that it has no class for."""
OF_KINDS = SimpleNamespace(
    sliding_attention_inv_freq=torch.tensor([0.5, 0.1]),
    full_attention_inv_freq=torch.tensor([0.4, 0.2]),
    full_attention_attention_scaling=3.0,
)
"""The same with frequencies for each kind of layer (olmo3)."""


@pytest.mark.parametrize(
    ("attention", "shared", "found"),
    [
        ({"rotary_emb": Rotary()}, [], ((1.0, 0.5), 2.0)),
        ({"rotary_emb": LongRope(use_long_rope=False)}, [], ((1.0, 0.5), 1.5)),
        ({"rotary_emb": LongRope(use_long_rope=True)}, [], ((0.25, 0.125), 3.0)),
        ({"rotary_emb": None}, [], None),
        ({"rotary_emb": None}, [SHARED], None),
        ({"rotary_emb": Rotary(), "use_rope": False}, [], None),
        ({"rotary_emb": Rotary(), "use_rope": True}, [], ((1.0, 0.5), 2.0)),
        ({"rotary_emb": Rotary(), "apply_rope_all_layers": False, "sliding_window": None}, [], None),
        ({"rotary_emb": Rotary(), "apply_rope_all_layers": False, "sliding_window": 64}, [], ((1.0, 0.5), 2.0)),
        ({"rotary_emb": Rotary(), "apply_rope_all_layers": True, "sliding_window": None}, [], ((1.0, 0.5), 2.0)),
        ({"rotary_emb": Rotary(), "v1": False, "sliding_window": None}, [], None),
        ({"rotary_emb": Rotary(), "v1": True, "sliding_window": None}, [], ((1.0, 0.5), 2.0)),
        ({}, [SHARED], ((1.0, 0.25), 1.5)),
        ({"attention_type": "sliding_attention"}, [OF_KINDS], ((0.5, 0.1), 1.0)),
        ({"attention_type": "full_attention"}, [OF_KINDS], ((0.4, 0.2), 3.0)),
        ({}, [OF_KINDS], None),
        ({"use_rope": 0}, [SHARED], None),
        ({}, [], None),
        ({}, [SHARED, SHARED], None),
    ],
)
def test_the_rope_of_a_layer_is_that_of_the_module_that_it_uses(
    attention: dict[str, Any], shared: list[Any], found: tuple[tuple[float, ...], float] | None
) -> None:
    rope = rope_of(SimpleNamespace(**attention), shared)
    if found is None:
        assert rope is None
    else:
        assert rope is not None and rope.inv_freq == pytest.approx(found[0]) and rope.scale == pytest.approx(found[1])


@pytest.mark.parametrize("module", [SimpleNamespace(), Rotary])
def test_a_rotary_module_that_cannot_be_measured_is_refused(module: Any) -> None:
    with pytest.raises(ModelError, match="of vLLM cannot be measured"):
        rope_of(SimpleNamespace(rotary_emb=module), [])


class TurnsHeads:
    """A rotary module that turns each head by these angles at position 1."""

    cos_sin_cache = torch.zeros(4, 8)

    def __init__(self, *angles: float) -> None:
        self._angles = angles

    def __call__(
        self, positions: torch.Tensor, heads: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return heads * (1 + positions[:, None, None] * torch.tensor(self._angles)[:, None]), key


def test_a_rotary_operation_that_turns_equal_heads_differently_is_refused() -> None:
    require_alike_heads(None, 8)
    require_alike_heads(TurnsHeads(0.5, 0.5), 8)
    with pytest.raises(ModelError, match="rotary operation is wrong for this model") as refused:
        require_alike_heads(TurnsHeads(0.5, 0.0), 8)
    assert "-rotary_embedding" in refused.value.hint
