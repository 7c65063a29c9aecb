"""Measure what a loaded vLLM model computes: windows, heads, and the rotary frequencies of its modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from disagg.api.layout import LayerKind, LayerLayout, StateTensor
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import Convolved
from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope
from disagg.engines.vllm.states import in_rank_shapes
from disagg.errors import ModelError

NO_STATES: Final = Convolved(())


def measure(engine: Any, reference: ModelProfile, convolved: Convolved) -> ModelProfile:
    """The profile of the model in vLLM's LLMEngine. Tokenizer and context, which vLLM does not change, are
    `reference`'s. The ranks of a stage have the same modules; the first one of each is asked, for its share of the
    heads."""
    ranks = engine.vllm_config.parallel_config.tensor_parallel_size
    for found in engine.collective_rpc(norm_epsilons)[::ranks]:
        require_norms(found, engine.model_config)
    require_angles(min(engine.collective_rpc(turned_positions)), reference.context)
    stages: list[list[LayerProfile]] = engine.collective_rpc(layer_profiles)[::ranks]
    tied = next((found for found in engine.collective_rpc(tied_head) if found is not None), None)
    layers = [layer for stage in stages for layer in stage]
    return of_ranks(layers, engine.vllm_config, reference, convolved, tied=tied)


def of_ranks(
    layers: Sequence[LayerProfile], config: Any, reference: ModelProfile, convolved: Convolved, *, tied: bool | None
) -> ModelProfile:
    """The profile of a whole model, from the layers of one rank, or of one rank of each stage. config: a VllmConfig.
    convolved: what the states of the whole model consist of. tied: as of `tied_head`."""
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    return replace(
        reference,
        tied=tied,
        source="vllm",
        architecture=str(model.hf_text_config.model_type),
        vocab_size=int(model.get_vocab_size()),
        layers=tuple(of_all_ranks(layers, ranks, reference, convolved)),
    )


def of_all_ranks(
    layers: Sequence[LayerProfile], ranks: int, reference: ModelProfile, convolved: Convolved = NO_STATES
) -> Iterator[LayerProfile]:
    """The layers of one of `ranks` ranks, each with the heads that all ranks have together. With more ranks than the
    model has heads, each has one, and some the same: then there are as many as in `reference`, a number that no rank
    has. States that are a rank's share of those in `reference` are these."""
    expected = [layer.layout.kv_heads for layer in reference.layers]
    for index, layer in enumerate(layers):
        own = layer.layout.kv_heads
        replicated = own == 1 and index < len(expected) and expected[index] < ranks
        heads = expected[index] if replicated else own * ranks
        states = layer.layout.states
        whole = reference.layers[index].layout.states if states and index < len(expected) else ()
        if whole and in_rank_shapes([state.shape for state in states], whole, convolved, ranks):
            states = whole
        yield replace(layer, layout=replace(layer.layout, kv_heads=heads, states=states))


class NormEpsilons(NamedTuple):
    """The epsilons of the norms before the layers, and of the norms of latent vectors."""

    layers: list[float]
    latent: list[float]


def norm_epsilons(worker: Any) -> NormEpsilons:
    """The epsilons that one rank's norms have. Called in a worker."""
    modules = list(worker.get_model().named_modules())

    def found(*names: str) -> list[float]:
        norms = [module for name, module in modules if name.endswith(names)]
        return sorted({float(norm.variance_epsilon) for norm in norms if hasattr(norm, "variance_epsilon")})

    return NormEpsilons(found(".input_layernorm"), found(".q_a_layernorm", ".kv_a_layernorm"))


def require_norms(found: NormEpsilons, model: Any) -> None:
    """Raise ModelError if layers normalise with another epsilon than the checkpoint states, or latent vectors than
    mlx-lm. vLLM's gpt-oss has 1e-5, whatever config.json has. model: vLLM's ModelConfig."""
    config = model.hf_text_config
    stated, latent = getattr(config, "rms_norm_eps", None), architecture_of(config).latent_epsilon(config)
    for epsilons, wanted, what, whose in (
        (found.layers, stated, "this model", "its config.json has"),
        (found.latent, latent, "this model's latent vectors", "mlx-lm with"),
    ):
        if wanted is not None and (other := [one for one in epsilons if one != wanted]):
            raise ModelError(
                f"vLLM normalises {what} with an epsilon of {other[0]:g}, {whose} {wanted:g}",
                "use the engine transformers for this checkpoint",
            )


def turned_positions(worker: Any) -> float:
    """For how many tokens the rotary modules of this rank have angles; infinity without any. Called in a worker."""
    tables = (getattr(module, "cos_sin_cache", None) for module in worker.get_model().modules())
    return min((float(len(table)) for table in tables if table is not None), default=math.inf)


def require_angles(positions: float, context: int) -> None:
    """ModelError if there are too few: vLLM reads behind them. With YaRN it has original_max_position_embeddings times
    the factor, whatever max_position_embeddings is."""
    if positions < context:
        raise ModelError(
            f"vLLM turns the vectors of {positions:g} tokens, the context is {context}",
            f"set the model's context to {positions:g} or less, or use the engine transformers",
        )


def weight_bytes(engine: Any) -> int:
    """Bytes of the weights on all ranks."""
    return sum(engine.collective_rpc(rank_weight_bytes))


def rank_weight_bytes(worker: Any) -> int:
    """Bytes of one rank's weights. Called in a worker."""
    tensors = {id(t): t for t in worker.get_model().parameters()}
    return sum(int(tensor.nbytes) for tensor in tensors.values())


def tied_head(worker: Any) -> bool | None:
    """As of `tie_of`, of what this worker has loaded; None if it has no head. Called in it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    heads, embeddings = list[Any](), list[Any]()
    for name, module in worker.get_model().named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if weight is None or weight.is_meta:  # llava has embeddings that vLLM never loads
            continue
        if isinstance(module, ParallelLMHead) or name.rpartition(".")[2] == "lm_head":
            heads.append(weight)
        elif isinstance(module, VocabParallelEmbedding):
            embeddings.append(weight)
    return tie_of(heads[0], embeddings) if heads else None


def tie_of(head: Any, embeddings: Sequence[Any]) -> bool | None:
    """Whether the output head is the embeddings, as tensors. None if it is packed, or a copy of them: that computes the
    same whatever config.json states."""
    alike = [one for one in embeddings if (one.shape, one.dtype) == (head.shape, head.dtype)]
    if any(one.data_ptr() == head.data_ptr() for one in alike):
        return True
    return False if alike and not any(one.equal(head) for one in alike) else None


def layer_profiles(worker: Any) -> list[LayerProfile]:
    """Every layer as this worker's modules compute it, with its own heads. Called in a worker."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    modules = dict(worker.get_model().named_modules())
    shared = [one for name, one in modules.items() if name.endswith("rotary_emb") and _turns(one)]
    found: list[tuple[str, LayerProfile]] = []
    for name, module in modules.items():
        number = next((part for part in name.split(".") if part.isdecimal()), "")
        if isinstance(module, MambaBase):
            states = tuple(StateTensor(tuple(map(int, shape))) for shape in module.get_state_shape())
            beside = found.pop()[1] if found and found[-1][0] == number else LayerProfile(LayerLayout("state"), None)
            found.append((number, replace(beside, layout=replace(beside.layout, states=states))))
        elif isinstance(module, Attention | MLAAttention):
            if getattr(module, "kv_sharing_target_layer_name", None) is not None:
                continue  # it reads what an earlier layer keeps
            around = modules.get(name.rpartition(".")[0])
            if isinstance(module, MLAAttention):
                require_alike_heads(getattr(around, "rotary_emb", None), module.qk_rope_head_dim)
            elif type(around).__name__.startswith("Lfm2"):  # its heads are a dimension of their own, too
                require_alike_heads(getattr(around, "rotary_emb", None), module.head_size)
            layout = _layout(module)
            if found and found[-1][0] == number and found[-1][1].layout.kind == "state":
                layout = replace(layout, states=found.pop()[1].layout.states)
            found.append((number, LayerProfile(layout, rope_of(around, shared))))
    return [layer for _, layer in found]


def _layout(module: Any) -> LayerLayout:
    if hasattr(module, "kv_lora_rank"):
        return LayerLayout("full", 1, int(module.kv_lora_rank), int(module.qk_rope_head_dim))
    window = getattr(module, "sliding_window", None)
    kind: LayerKind = "full" if window is None else "sliding"
    heads, dim = int(module.num_kv_heads), int(module.head_size)
    return LayerLayout(kind, heads, dim, int(getattr(module, "head_size_v", dim)), window=window)


def rope_of(attention: Any, shared: Sequence[Any]) -> Rope | None:
    """The frequencies and scale in the rotary module beside the attention, or in the only one that all layers share, as
    in transformers' own modules, which vLLM runs if it has none of its own. None if this layer does not rotate."""
    if attention is None or not _rotates(attention):
        return None
    if not hasattr(attention, "rotary_emb"):
        return _inverse_frequencies(shared[0], attention) if len(shared) == 1 else None
    if (module := attention.rotary_emb) is None:
        return None
    try:
        cos, sin = _turned_first(module).double().chunk(2)
        angles, scale = sin.atan2(cos), cos.hypot(sin).mean()
        return Rope(tuple(float(angle) for angle in angles), float(scale))
    except Exception as error:  # which one depends on the class
        raise ModelError(
            f"the rotary module {type(module).__name__} of vLLM cannot be measured",
            "use the engine transformers for this model",
        ) from error


def _turned_first(module: Any) -> Any:
    """The cosines and sines by which a rotary module turns the vectors of position 1. A longrope has two sets, of which
    vLLM uses the one for all prompts of the context."""
    if (long := getattr(module, "use_long_rope", None)) is None:
        return module._compute_cos_sin_cache()[1]
    factors, scale = (module.long_factor, module.long_mscale) if long else (module.short_factor, module.short_mscale)
    return module._compute_cos_sin_cache(2, factors, scale)[1]


def require_alike_heads(rotary: Any, width: int) -> None:
    """Raise ModelError if the rotary module turns equal heads differently if heads are a dimension of their own. The
    own operation of vLLM's CPU build does (0.32), in which `load` turns it off; a `vllm serve` has it with
    --enforce-eager."""
    import torch

    if rotary is None:
        return
    table = rotary.cos_sin_cache
    with torch.inference_mode():
        positions = torch.arange(2, device=table.device)
        heads = torch.ones(2, 2, width, device=table.device, dtype=table.dtype)
        turned, _ = rotary(positions, heads, heads[:, :1].clone())
    if not torch.equal(turned[:, 0], turned[:, 1]):
        raise ModelError(
            "vLLM's rotary operation is wrong for this model on this device",
            'start it without --enforce-eager, or with --compilation-config \'{"custom_ops": ["-rotary_embedding"]}\'',
        )


def _rotates(attention: Any) -> bool:
    """Whether this layer uses its rotary module. Some of vLLM's classes make one for each layer, and pass over those
    without a window (exaone4, cohere2) or without `use_rope` (exaone_moe, step3p5)."""
    everywhere = getattr(attention, "apply_rope_all_layers", True) and getattr(attention, "v1", True)
    return bool((everywhere or getattr(attention, "sliding_window", None)) and getattr(attention, "use_rope", True))


def _turns(module: Any) -> bool:
    """Whether it is a rotary module of transformers, with frequencies for all layers, or for each kind of them."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _inverse_frequencies(module: Any, attention: Any) -> Rope | None:
    """The frequencies and scale of a rotary module of transformers in the layer of this attention."""
    kind = getattr(attention, "attention_type", None)
    prefix = "" if hasattr(module, "inv_freq") else f"{kind}_"
    if (frequencies := getattr(module, f"{prefix}inv_freq", None)) is None:
        return None
    scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return Rope(tuple(float(one) for one in frequencies.double().cpu()), scale)
