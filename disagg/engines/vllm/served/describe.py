"""A description of a `vllm serve` with the connector, made inside its processes for the prefill host beside it.

Every rank measures its own loaded model, as the engine of this process does by itself; the scheduler's side adds what
they share.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from disagg.api.delivery import ConnectorInfo
from disagg.api.status import PreflightFinding
from disagg.engines.model.profile import ModelProfile, compare
from disagg.engines.model.reference import Reference
from disagg.engines.vllm.rows import Sharding
from disagg.errors import DisaggError, ModelError
from disagg.version import VERSION


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank: its findings about the loaded model, and the bytes of its weights."""

    preflight: tuple[PreflightFinding, ...]
    memory_bytes: int


def rank_info(config: Any, reference: ModelProfile, attention: Sequence[Any]) -> RankInfo:
    """This rank, in a worker. config: a VllmConfig. reference: with the layers of its stage. attention: the attention
    module of each of them. What cannot be measured is a refused finding: raised here, it would end vLLM."""
    from disagg.engines.vllm import profile

    try:
        model = model_around(attention)
        worker = SimpleNamespace(get_model=lambda: model)
        actual = profile.of_ranks(profile.layer_profiles(worker), config, reference)
        profile.require_norms(profile.norm_epsilons(worker), profile.stated_epsilon(config.model_config))
        latent = profile.latent_epsilon(config.model_config)
        profile.require_latent_norms(profile.latent_norm_epsilons(worker), latent)
        return RankInfo(compare(reference, actual), profile.rank_weight_bytes(worker))
    except DisaggError as error:
        return RankInfo((PreflightFinding("model", "refused", str(error)),), 0)
    except Exception as error:  # noqa: BLE001 - see above
        return RankInfo((PreflightFinding("model", "refused", f"it cannot be measured: {error!r}"),), 0)


def model_around(attention: Sequence[Any]) -> Any:
    """The loaded model that these modules belong to, of which vLLM shows a connector only those. Looked for among all
    objects, as modules have no link to what holds them."""
    import torch

    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    holders = {id(child): one for one in modules for child in one._modules.values() if child is not None}
    model = attention[0]
    for _ in range(len(modules)):
        if (holder := holders.get(id(model))) is None:
            break
        model = holder
    if not {id(one) for one in attention} <= {id(one) for one in model.modules()}:
        raise ModelError("the loaded model is not found in vLLM's process", "use a version of vLLM in the stated range")
    return model


def connector_info(config: Any, kv_cache_config: Any, ranks: Sequence[RankInfo]) -> ConnectorInfo:
    """All ranks, on the scheduler's side. If each computes its layers as the checkpoint describes them, all together
    compute the model. Raises ModelError for a checkpoint that cannot be handed over."""
    import torch
    import vllm

    model = config.model_config
    reference = Reference.open(model.model, model.max_model_len)
    refused = [one for rank in ranks for one in rank.preflight if one.status == "refused"]
    paged = sum(one.size for one in kv_cache_config.kv_cache_tensors)
    parallel, dtype = config.parallel_config, str(model.dtype).removeprefix("torch.")
    layout = reference.layout(dtype)
    sharding = Sharding.of(layout, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return ConnectorInfo(
        version=VERSION,
        vllm=str(vllm.__version__),
        torch=str(torch.__version__),
        device=str(config.device_config.device_type),
        context=model.max_model_len,
        ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        layout=layout.to_json(),
        fingerprint=reference.fingerprint.to_json(),
        kv_bytes=sharding.kv_bytes(paged),
        memory_bytes=sum(rank.memory_bytes for rank in ranks),
        preflight=tuple(refused) or compare(reference.profile, replace(reference.profile, source="vllm")),
    )
