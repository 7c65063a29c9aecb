"""How the KV of one model is spread over vLLM's ranks. Pure; imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.api.layout import LayerLayout, Layout
from disagg.errors import ModelError
from disagg.kv.parts import Part


@dataclass(frozen=True, slots=True)
class Sharding:
    """ranks: tensor-parallel ones, which share the heads. heads: the most KV heads of a layer, 1 if all layers keep
    only states. stages: how many a pipeline has, each with layers of its own and as many ranks."""

    ranks: int
    heads: int
    stages: int = 1

    @staticmethod
    def of(layout: Layout, ranks: int, stages: int = 1) -> Sharding:
        """ModelError if the layers cannot be divided alike."""
        counts = {layer.kv_heads for layer in layout.layers if layer.kv_heads}
        heads = max(counts, default=1)
        if ranks > 1 and len(counts) > 1:
            raise ModelError(
                f"the layers of this model have different numbers of KV heads: {', '.join(map(str, sorted(counts)))}",
                "set tensor_parallel = 1, or use the engine transformers for this model",
            )
        if max(heads, ranks) % min(heads, ranks):
            raise ModelError(
                f"tensor_parallel = {ranks} does not divide the model's {heads} KV heads",
                f"use a divisor or a multiple of {heads}",
            )
        if stages > len(layout.layers):
            raise ModelError(
                f"pipeline_parallel = {stages} is more than the model's {len(layout.layers)} layers",
                f"set pipeline_parallel to {len(layout.layers)} or less",
            )
        return Sharding(ranks, heads, stages)

    def heads_of(self, layer: LayerLayout) -> int:
        """How many KV heads of a layer with rows one rank has."""
        return max(1, layer.kv_heads // self.ranks)

    def kv_bytes(self, of_a_rank: int) -> int:
        """Bytes of different KV that all ranks have room for, of so many each: copies of a head count once."""
        return of_a_rank * self.parts

    @property
    def parts(self) -> int:
        """How many ranks send. Of each stage, with more ranks than heads, the first one of those that have the same
        head; latent attention has one."""
        return min(self.ranks, self.heads) * self.stages

    def part(self, rank: int, layers: Sequence[int]) -> Part | None:
        """What one rank of a stage with these layers sends; None if it has only what another one sends."""
        part = self._heads_part(rank)
        return part if part is None or self.stages == 1 else replace(part, layers=tuple(sorted(layers)))

    def _heads_part(self, rank: int) -> Part | None:
        if min(self.ranks, self.heads) == 1:
            return Part() if rank == 0 else None
        if self.ranks > self.heads:
            copies = self.ranks // self.heads
            return None if rank % copies else Part(heads=(rank // copies, rank // copies + 1), states=rank == 0)
        each = self.heads // self.ranks
        return Part(heads=(rank * each, (rank + 1) * each), states=rank == 0)
