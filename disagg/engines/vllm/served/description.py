"""What a `vllm serve` with the connector is: described inside its processes, and checked by the prefill host beside it
before it gets orders.

Every rank measures its own loaded model, as the engine of this process does by itself; the scheduler's side adds what
they share.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

from disagg.api.delivery import DESCRIBE, STATES, ConnectorInfo
from disagg.api.layout import Layout
from disagg.api.status import PreflightFinding
from disagg.engines.model import profile
from disagg.engines.model.architectures.base import Convolved
from disagg.engines.model.profile import ModelProfile, compare
from disagg.engines.model.reference import Reference
from disagg.engines.vllm.served.calls import VLLMServer
from disagg.engines.vllm.served.forms import COMPLETIONS, MODELS, START_COMMAND, model_names, order_answer, prompt_body
from disagg.engines.vllm.sharding import Sharding
from disagg.errors import DisaggError, FingerprintMismatch, LayoutMismatch, ModelError
from disagg.extras import install
from disagg.kv.fingerprint import Fingerprint
from disagg.version import VERSION

PATIENCE_S: Final = 60.0
"""How long the one token that describes a server may take: it may be computing long prompts of other callers."""


def describe(
    server: VLLMServer, wanted: str | None, token: int = 0, *, states: bool = False
) -> tuple[str, ConnectorInfo]:
    """The model's name at this server, and what its connector is; it computes this token for each question. wanted: the
    name, if hosts.toml has one. states: the model has layers with some, which the first prompt shows and the next
    answer states. ModelError if it cannot be ordered anything."""
    names = model_names(server.ask("GET", MODELS, None, PATIENCE_S))
    name = served_name(names, wanted, server.url)
    found = _asked(server, name, token)
    if states and not any(one.component == STATES for one in found.preflight):
        found = _asked(server, name, token)
    return name, found


def _asked(server: VLLMServer, name: str, token: int) -> ConnectorInfo:
    content = server.ask("POST", COMPLETIONS, prompt_body(name, [token], "", DESCRIBE), PATIENCE_S)
    answer = order_answer(content)
    if answer is None:
        raise ModelError(
            f"the vllm serve at {server.url} has no connector of disagg", f"start it as in {START_COMMAND}"
        )
    if answer.error is not None:
        raise DisaggError.from_json(answer.error)
    if answer.connector is None:
        raise ModelError(
            f"the connector at {server.url} knows nothing of its ranks",
            "start vllm serve without VLLM_ENABLE_V1_MULTIPROCESSING=0",
        )
    return answer.connector


def served_name(names: list[str], wanted: str | None, url: str) -> str:
    """The model's name in requests. ModelError if the server has none of that name."""
    if wanted is not None and wanted not in names:
        message = f"the vllm serve at {url} serves {', '.join(names)}, not {wanted}"
        raise ModelError(message, "correct engine.model; an adapter (LoRA) is refused: decode hosts do not have it")
    if not names:
        raise ModelError(f"the vllm serve at {url} serves no model", "start it with one")
    return wanted or names[0]


def require(found: ConnectorInfo, url: str, layout: Layout, fingerprint: Fingerprint, context: int) -> None:
    """Raise ModelError unless orders to this server give KV of this layout and fingerprint, for so many tokens."""
    if found.version != VERSION:
        raise ModelError(
            f"the vllm serve at {url} has disagg {found.version}, this host {VERSION}",
            f"{install('server')}, in vLLM's environment, and start it again",
        )
    try:
        theirs = Fingerprint.from_json(found.fingerprint)
        fingerprint.require_same(theirs, mine="hosts.toml", theirs="vllm serve")
        layout.require_same(Layout.from_json(found.layout), mine="hosts.toml", theirs="vllm serve")
    except FingerprintMismatch as error:
        raise ModelError(f"the vllm serve at {url} serves another model: {error.message}", error.hint) from error
    except LayoutMismatch as error:
        raise ModelError(f"the vllm serve at {url} has other KV: {error.message}", _DTYPE) from error
    if found.context < context:
        raise ModelError(
            f"the vllm serve at {url} serves {found.context} tokens, the model's context in hosts.toml is {context}",
            f"start it with --max-model-len {context}",
        )
    profile.require(found.preflight)


_DTYPE: Final = "start it with the --dtype of hosts.toml, or state its dtype in the engine's table"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank: its findings about the loaded model, and the bytes of its weights."""

    preflight: tuple[PreflightFinding, ...]
    memory_bytes: int


def rank_info(config: Any, reference: ModelProfile, convolved: Convolved, attention: Sequence[Any]) -> RankInfo:
    """This rank, in a worker. config: a VllmConfig. reference: that of the checkpoint, with the layers of this stage.
    convolved: what the states of the whole model consist of. attention: the attention module of each layer. What cannot
    be measured is a refused finding: raised here, it would end vLLM."""
    from disagg.engines.vllm import profile

    try:
        model = model_around(attention)
        worker = SimpleNamespace(get_model=lambda: model)
        tied = profile.tied_head(worker)
        actual = profile.of_ranks(profile.layer_profiles(worker), config, reference, convolved, tied=tied)
        profile.require_norms(profile.norm_epsilons(worker), config.model_config)
        profile.require_angles(profile.turned_positions(worker), reference.context)
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
