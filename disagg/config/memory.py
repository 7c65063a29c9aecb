"""How a host loads a model, for what it needs of memory: the same for plans, `disagg doctor` and keepers."""

from __future__ import annotations

from typing import Final

from disagg.config.schema import Host, Model
from disagg.planning.memory import Loading

SYSTEM_BYTES: Final = 4 << 30
"""Memory that the system and the server itself take, where the GPU shares it: assumed."""


def loading_of(host: Host, model: Model, device: str, own: bool) -> Loading:
    """How the model is loaded on this host. own: whether each rank has memory of its own; else the machine's has
    to hold what all of them take, and the KV that waits to be sent."""
    engine, memory = host.engine, host.engine.kind.memory
    kv_bytes = getattr(engine, memory.kv_of(host.roles))
    here = kv_bytes * engine.ranks_here
    stages = engine.pipeline_parallel if own else min(engine.pipeline_parallel, engine.nnodes)
    return Loading(
        engine.kind,
        device,
        engine.dtype,
        model.context,
        engine.chunk_tokens,
        kv_bytes if own else here,
        engine.quantization,
        engine.attention,
        engine.tensor_parallel if own else engine.nnodes // stages,
        here if memory.paged and not own else 0,
        stages,
        engine.first_layers,
    )
