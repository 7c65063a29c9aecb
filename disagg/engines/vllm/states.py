"""The states of a layer in vLLM's pages: the last inputs of a convolution, and a recurrent matrix for each head; in
Mamba 1 a vector for each channel, which are here a single head.

A page of such a layer has no rows: it holds these tensors as they are after the last token of its block, which vLLM
also shows as views of all pages. In which order they lie there differs between devices and settings: inputs by token or
by channel, matrices with values or keys first. It is not assumed: of a prompt of one token the state follows from the
convolution's only input, for it is the outer product of a value and a key that the convolution makes of it (in Mamba 1
projections behind it do, too). `detect` compares the two. Until a prompt has shown it, nothing of the model is sent.

With several ranks each has its heads; the states are put together on all of them, and one sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from disagg.api.layout import LayerLayout, StateTensor
from disagg.engines.model.architectures.base import Convolved
from disagg.errors import ModelError

# A tensor of one rank -> those of all ranks, in order: [ranks, ...].
Gather = Callable[[torch.Tensor], torch.Tensor]
TOLERANCE: Final = 1e-2
"""The part of a matrix, by its squares, that is not that outer product. Measured on CPUs: 1e-13 in float32, 3e-5 in
bfloat16, and above 0.5 if keys and values are taken for each other."""
_HINT: Final = "use the engine transformers for this model, and report this with vLLM's version"


class State(NamedTuple):
    """The state of one prompt in one layer, in the order of the wire: inputs [rows, channels], matrices [heads,
    value_dim, key_dim] or None."""

    inputs: torch.Tensor
    matrices: torch.Tensor | None


@dataclass(slots=True)
class StatePages:
    """The states of one layer on one of several ranks. layer: its layout, with the shapes of the whole model.
    transposed: keys come first in its matrices; None until a prompt has shown it."""

    name: str
    module: Any
    layer: LayerLayout
    parts: Convolved
    ranks: int
    transposed: bool | None = None

    def require_shapes(self) -> None:
        """ModelError unless the pages hold the states of this layer."""
        found = [tuple(int(size) for size in shape) for shape in self.module.get_state_shape()]
        if not in_rank_shapes(found, self.layer.states, self.parts, self.ranks):
            wanted = ", ".join(map(str, rank_shapes(self.layer.states, self.parts, self.ranks)))
            raise ModelError(
                f"vLLM's states of {self.name} have shapes {', '.join(map(str, found))}, not {wanted}",
                "start vLLM without speculative decoding and without ReplaySSM",
            )
        for state in self.module.kv_cache:
            if not state.is_floating_point() or state.element_size() == 1:
                raise ModelError(
                    f"vLLM's states of {self.name} are {state.dtype}",
                    "leave mamba_cache_dtype and mamba_ssm_cache_dtype at auto, or set them to float32",
                )

    def detect(self, block: int) -> None:
        """Find out the order from the state of a prompt of one token. ModelError if it is none that is known."""
        inputs, matrices = self._read(block, transposed=False)
        # Whatever this rank sees: in Mamba 1 the others wait for its part of the product.
        product = None if matrices is None else self._product(inputs[-1])
        if inputs[:-1].any() or not inputs[-1].any():
            raise ModelError(f"vLLM's states of {self.name} hold inputs in an unknown order", _HINT)
        if product is None:
            self.transposed = False
            return
        for transposed in (False, True):
            matrices = self._read(block, transposed=transposed).matrices
            assert matrices is not None
            if _remainder(matrices.float(), product) < TOLERANCE:
                self.transposed = transposed
                return
        raise ModelError(f"vLLM's states of {self.name} hold matrices in an unknown order", _HINT)

    def read(self, block: int, gather: Gather) -> tuple[torch.Tensor, ...]:
        """The layer's states in the form of the wire, with the batch in front. gather: called by all ranks alike; not
        at all for one."""
        assert self.transposed is not None
        inputs, matrices = self._read(block, transposed=self.transposed)
        if self.ranks > 1:
            inputs = whole_inputs(gather(inputs.contiguous()), self.parts)
            matrices = None if matrices is None else gather(matrices.contiguous()).flatten(0, 1)
        widths = [window.shape[1] for window in windows(self.layer.states)]
        whole = () if matrices is None else (matrices.reshape(self.layer.states[-1].shape),)
        return tuple(state[None] for state in (*inputs.split(widths, dim=-1), *whole))

    def _read(self, block: int, *, transposed: bool) -> State:
        """Views of the pages of this rank."""
        states = [state[block] for state in self.module.kv_cache]
        inputs = states[0]
        if inputs.shape[0] != self.layer.states[0].shape[0]:
            inputs = inputs.transpose(0, 1)
        if len(states) == 1:
            return State(inputs, None)
        matrices = states[1] if states[1].ndim == 3 else states[1][None]
        heads, values, keys = matrices.shape
        return State(inputs, matrices.reshape(heads, keys, values).transpose(1, 2) if transposed else matrices)

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        """[heads, value_dim, key_dim]: of the values and keys that the convolution makes of these inputs of one
        token."""
        convolution = self.module.conv1d
        weights = getattr(convolution, "_cpu_unpacked_conv_weight", convolution.weight)
        convolved = inputs.float() * weights.flatten(0, -2)[:, -1].float()
        if getattr(convolution, "bias", None) is not None:
            convolved = convolved + convolution.bias.float()
        own = self.parts.of_rank(self.ranks)
        split = torch.nn.functional.silu(convolved).split(own.widths)
        if own.key is None:
            values, keys = self._projected(split[own.value][None])
        else:
            values, keys = (split[part].view(own.parts[part]) for part in (own.value, own.key))
        keys = keys.repeat_interleave(len(values) // len(keys), dim=0)
        return torch.einsum("hv,hk->hvk", values, keys)

    def _projected(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The value of each channel, by its time step, and the key, [1, width] each, which all ranks compute
        together."""
        steps, keys, _ = self.module._ssm_transform(convolved.to(self.module.x_proj.weight.dtype))
        bias = self.module._time_proj_bias()
        steps = steps[:, 0].float() if bias is None else steps[:, 0].float() + bias
        return convolved * torch.nn.functional.softplus(steps), keys.float()


def _remainder(matrices: torch.Tensor, product: torch.Tensor) -> float:
    """What is left of the matrices without their components along these, as a part of their squares; 1 of nothing."""
    squares = product.square().sum((1, 2)).clamp_min(1e-30)
    along = (matrices * product).sum((1, 2)) / squares
    rest = matrices - along[:, None, None] * product
    total = float(matrices.square().sum())
    return float(rest.square().sum()) / total if total else 1.0


def whole_inputs(shards: torch.Tensor, parts: Convolved) -> torch.Tensor:
    """[rows, channels] of the whole model, from [ranks, rows, channels of one rank]: each part has its heads of all
    ranks, one after the other. Of a part that several ranks have alike, the first one's counts."""
    ranks = len(shards)
    pieces = shards.split(parts.of_rank(ranks).widths, dim=-1)
    whole = []
    for piece, (heads, width) in zip(pieces, parts.parts, strict=True):
        copies = ranks * piece.shape[-1] // (heads * width)
        whole.append(piece[::copies].transpose(0, 1).flatten(1))
    return torch.cat(whole, dim=-1)


def rank_shapes(states: Sequence[StateTensor], parts: Convolved, ranks: int) -> list[tuple[int, ...]]:
    """The shapes that vLLM states for one of several ranks: inputs by token, then matrices."""
    channels = sum(parts.of_rank(ranks).widths)
    matrices = [(state.shape[0] // ranks, *state.shape[1:]) for state in states[len(windows(states)) :]]
    return [(states[0].shape[0], channels), *matrices]


def in_rank_shapes(
    found: Sequence[tuple[int, ...]], states: Sequence[StateTensor], parts: Convolved, ranks: int
) -> bool:
    """Whether these are `rank_shapes`, inputs by token or by channel."""
    inputs, *matrices = rank_shapes(states, parts, ranks)
    return bool(found) and found[0] in (inputs, inputs[::-1]) and list(found[1:]) == matrices


def windows(states: Sequence[StateTensor]) -> Sequence[StateTensor]:
    """The last inputs of convolutions, which are the first ones of a layer and have as many rows."""
    return [state for state in states if len(state.shape) == 2 and state.shape[0] == states[0].shape[0]]
