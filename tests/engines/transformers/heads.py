"""What a head emits, put together, and what it should be by one pass of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.engines.transformers.load import decoder_layers
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock


@dataclass
class Emitted:
    """Blocks as they come. held: tokens that the run had not to compute."""

    blocks: list[Block] = field(default_factory=list)
    held: int = 0

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return [(block.start, block.end) for block in self.blocks if isinstance(block, ChunkEnd)]

    def hidden(self, dtype: torch.dtype) -> torch.Tensor:
        """The hidden states, one after the other."""
        return torch.cat([tensor(block.rows, dtype) for block in self.blocks if isinstance(block, HiddenBlock)])

    def rows(self, layer: int) -> dict[int, list[tuple[int, bytes]]]:
        """By the first token after them: each block of this layer, as its first token and its bytes."""
        out: dict[int, list[tuple[int, bytes]]] = {}
        for block in self.blocks:
            if isinstance(block, KVBlock) and block.layer == layer:
                out.setdefault(block.end, []).append((block.start, b"".join((*block.keys, *block.values))))
        return out

    @property
    def layers(self) -> set[int]:
        return {block.layer for block in self.blocks if isinstance(block, KVBlock | StateBlock)}

    @property
    def states(self) -> list[bytes]:
        return [bytes(view) for block in self.blocks if isinstance(block, StateBlock) for view in block.tensors]


def computed(engine: TransformersPrefillEngine, tokens: Sequence[int], layers: int | None, **options: Any) -> Emitted:
    """All that a run emits. Blocks are read once it has ended."""
    emitted = Emitted()
    run = engine.start(tokens, emitted.blocks.append, layers=layers, **options)
    emitted.held = run.held
    while not run.done:
        run.step()
    run.close()
    for block in emitted.blocks:
        if not isinstance(block, ChunkEnd) and block.wait is not None:
            block.wait()
    return emitted


def hidden_states(engine: TransformersPrefillEngine, tokens: Sequence[int], layers: int) -> torch.Tensor:
    """What the layer `layers` of the whole model gets, in one pass without a cache."""
    given: list[torch.Tensor] = []
    model = engine._model
    hook = decoder_layers(model)[layers].register_forward_pre_hook(lambda module, args: given.append(args[0][0]))
    with torch.inference_mode():
        model.base_model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    hook.remove()
    return given[0]


def tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(view), dtype=dtype)
