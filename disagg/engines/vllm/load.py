"""vLLM as hosts.toml asks for it. Every failure becomes a ModelError."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.config import EngineOptions
from disagg.engines.model.architectures.base import Patch, ReadByVLLM
from disagg.engines.model.architectures.patches import VLLM_PATCHES
from disagg.engines.model.reference import Reference
from disagg.engines.vllm import nodes
from disagg.errors import ModelError, first_line
from disagg.extras import install

VERSIONS = ((0, 32), (0, 34))
"""The connector's interface is marked experimental: from the first one on, and before the second."""
CONNECTOR = "DisaggConnector"
CONNECTOR_MODULE = "disagg.engines.vllm.connector"
MAX_RUNNING = 64
"""Requests in one step. More of them fill no larger a step."""
LONG_SHARE = 4
"""A prompt that is not alone gets this part of a step's tokens at most: vLLM serves prompts in order of arrival, and a
long one would take whole steps until its end."""
LEAST_SHARE = 0.01
"""Of the GPU's memory that vLLM requires to be free before it loads: 92 % by default, so that it would not start beside
other programs. How much it takes follows from kv_cache_memory_bytes whatever this is."""
OUT_OF_MEMORY = ("out of memory", "allocate memory", "alloc_failed")
"""What the errors of torch, CUDA and its libraries contain if memory does not suffice."""

TEXT_ALONE: Mapping[str, Any] = {"skip_tokenizer_init": True, "language_model_only": True}
"""Prompts are token ids: no tokenizer, and of a multimodal model no parts that read images or sounds, and no
processors of these."""

# vLLM sends no usage statistics, and logs warnings only.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare_environment(options: EngineOptions) -> None:
    """Set what vLLM reads when it is imported. ModelError for settings that cannot be used with a connector."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its scheduler has to run in this process
    nodes.prepare_environment(options)
    if options.device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ModelError(
                f"{name} has expandable_segments:True, which vLLM refuses with a KV connector",
                "take it out of the server's environment",
            )


def require_version() -> str:
    """vLLM's version. ModelError if it is not installed, or not one that the connector is written for."""
    try:
        import vllm
    except ImportError as error:
        hint = f"in an environment of its own on this host, {install('vllm')}"
        raise ModelError(f"vLLM cannot be imported: {error}", hint) from error
    version = str(vllm.__version__)
    if not version_fits(version):
        raise ModelError(
            f"vLLM {version} is not supported", f"install vllm>={_text(VERSIONS[0])},<{_text(VERSIONS[1])}"
        )
    return version


def version_fits(version: str) -> bool:
    """Whether `version` is in the range of VERSIONS."""
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdecimal())
    return VERSIONS[0] <= numbers < VERSIONS[1]


def arguments(
    path: Path, context: int, options: EngineOptions, overrides: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """vLLM's EngineArgs. overrides: what vLLM is to read in config.json in place of what is there."""
    step = max(options.chunk_tokens, MAX_RUNNING)
    return {
        "model": str(path),
        "dtype": options.dtype,
        "max_model_len": context,
        "max_num_batched_tokens": step,
        "long_prefill_token_threshold": min(step // LONG_SHARE, context),
        "max_num_seqs": MAX_RUNNING,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "gpu_memory_utilization": LEAST_SHARE,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "mamba_ssm_cache_dtype": "float32",  # of recurrent states, as transformers and mlx-lm have them
        "async_scheduling": False,
        "disable_log_stats": True,
        "generation_config": "vllm",
        **TEXT_ALONE,
        "max_logprobs": -1,
        "trust_remote_code": False,
        "hf_overrides": dict(overrides),
        **nodes.arguments(options),
    }


def read(
    reference: Reference, options: EngineOptions, patches: Sequence[Patch] = VLLM_PATCHES
) -> tuple[ReadByVLLM, list[PreflightFinding]]:
    """The checkpoint as vLLM is to read it, and what is set right by that. patches: those to try. ModelError if it
    cannot be prefilled with the installed build."""
    from vllm.platforms import current_platform

    require_device(options.device, current_platform.device_type)
    made = ReadByVLLM(reference.text_config, current_platform.device_type)
    reference.require_for_vllm(made.device, options.tensor_parallel)
    return made, [finding for patch in patches for finding in patch.apply(made)]


def make(reference: Reference, context: int, options: EngineOptions, to_read: ReadByVLLM) -> Any:
    """vLLM's LLMEngine of this checkpoint, with the connector. ModelError if vLLM cannot make it."""
    from vllm.v1.engine.llm_engine import LLMEngine

    with _failures_of(reference.path):
        config = _engine_args(reference, context, options, to_read).create_engine_config()
        adapt_to_cpu(config, to_read.device)
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        if options.pipeline_parallel > 1 and to_read.device == "cpu":
            engine.collective_rpc(_prepare_stage)
        return engine


def make_workers(reference: Reference, context: int, options: EngineOptions, to_read: ReadByVLLM) -> Any:
    """The executor of a node that is not the head, whose workers the head's engine uses. ModelError as of `make`."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with _failures_of(reference.path):
        config = _engine_args(reference, context, options, to_read).create_engine_config(headless=True)
        adapt_to_cpu(config, to_read.device)
        return MultiprocExecutor(config)


def _prepare_stage(worker: Any) -> None:
    """The buffer for what the stage before computes. vLLM's CPU build (0.32) makes it when it warms up, which it leaves
    out with enforce_eager. Called in a worker."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def adapt_to_cpu(config: Any, device: str) -> None:
    """What vLLM's CPU build (0.32) needs. Its own rotary operation turns the second head of a query as the first one of
    the next token if heads are a dimension of their own, as with latent attention and in lfm2. With latent attention it
    computes no prompt in pieces, but would cut a long one that is not alone all the same. Of models of states alone it
    would cache the states within a prompt, which its scan does not give. config: a VllmConfig."""
    if device != "cpu":
        return
    model = config.model_config
    if model.use_mla or model.is_hybrid:
        config.compilation_config.custom_ops.append("-rotary_embedding")
    if model.is_attention_free:
        cache = config.cache_config
        cache.enable_prefix_caching, cache.mamba_cache_mode = False, "none"
        cache.mamba_block_size = model.max_model_len
    if model.use_mla and not config.scheduler_config.enable_chunked_prefill:
        config.scheduler_config.long_prefill_token_threshold = 0


def _engine_args(reference: Reference, context: int, options: EngineOptions, to_read: ReadByVLLM) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector=CONNECTOR, kv_connector_module_path=CONNECTOR_MODULE, kv_role="kv_producer"
    )
    whole = "text_config" in reference.config
    overrides = {"text_config": to_read.overrides} if whole else to_read.overrides
    made = arguments(reference.path, context, options, overrides)
    if to_read.device == "cpu" and getattr(to_read.text_config, "kv_lora_rank", None):
        # The CPU build (0.32) turns it off itself, after it has set what layers with a state need with it, and then
        # fails for kimi_linear.
        made["enable_prefix_caching"] = False
    return EngineArgs(**made, kv_transfer_config=transfer)


@contextmanager
def _failures_of(path: Path) -> Iterator[None]:
    """What goes wrong in vLLM as a ModelError: it raises anything, at the latest a RuntimeError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # see above
        raise ModelError(f"{path}: vLLM cannot serve it: {_reason(error)}", _hint(str(error))) from error


def require_device(wanted: str, built_for: str) -> None:
    """ModelError unless this build of vLLM computes on `wanted`. "auto": on whatever it does."""
    if wanted not in ("auto", built_for):
        raise ModelError(
            f"device {wanted!r} cannot be used: this build of vLLM computes on {built_for or 'no device'}",
            f"install vLLM's build for {wanted}, or set device to auto",
        )


def worker_connector() -> Any:
    """The worker's side of the connector, if the worker is in this process: a DisaggConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def refusal_of_states(worker: Any) -> dict[str, str] | None:
    """Why nothing of this model is sent from this worker, as JSON. Called in it."""
    refusal = worker_connector().worker.refusal
    return None if refusal is None else dict(refusal.to_json())


def cannot_compute(error: Exception) -> ModelError:
    """The error for what vLLM raised for its first prompts: anything, and of a rank in another process the text
    only."""
    reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY):
        return ModelError(
            f"vLLM has too little memory to compute a prompt: {reason}",
            "lower kv_cache_memory_bytes or chunk_tokens, or use smaller weights",
        )
    return ModelError(f"vLLM cannot compute this model: {reason}", "use the engine transformers for this model")


def _reason(error: Exception) -> str:
    """The first line, or of errors of pydantic, whose first line is their number, the second without its end."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and "validation error" in lines[0]:
        return lines[1].strip().partition(" [type=")[0]
    return first_line(error)


def _hint(text: str) -> str:
    text = text.lower()
    if "kv cache" in text or "cache blocks" in text:  # there is room for too few of them
        return "raise kv_cache_memory_bytes or lower context"
    if "memory" in text:
        return "lower kv_cache_memory_bytes or context, or use smaller weights"
    if "no module named" in text or "but it was not found in your environment" in text:
        return "install it in the environment of vLLM, or use the engine transformers for this model"
    return "see the server's log; `vllm serve` with the same model shows the same error"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
