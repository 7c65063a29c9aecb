"""One value per engine: all that the rest of disagg knows of it. A new engine is this value and one folder below
disagg/engines; nothing else names it.

"openai" and "none", which hosts.toml or `Host.engine` name as well, are no engines: the first is any server of OpenAI's
API, the second stands for the model that a gateway does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from disagg.api.names import Role

System = Literal["Linux", "Darwin"]

_CUDA_BYTES: Final = 1 << 30
"""CUDA's context, kernels and cuBLAS' workspace: assumed."""
_VLLM_BYTES: Final = 4 << 30
"""vLLM's CUDA graphs, compiled kernels and its buffers for sampling: assumed."""
_MLX_BYTES: Final = 1 << 30
"""What mlx keeps of freed memory (`engines/mlx`)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How an engine uses the memory of its host.

    kv: the option that bounds the bytes of its KV; prefill_kv: that of its prefill hosts, if it is another. paged: it
    takes all of that when it starts, as pages of a cache out of which KV is copied to be sent; else it takes what
    requests need. dequantises: it computes with packed weights in another form than they are stored in, unless told
    otherwise. framework: bytes that it takes beside all that follows from the model, by device.
    """

    kv: Literal["max_kv_bytes", "max_held_bytes", "kv_cache_memory_bytes"]
    paged: bool = False
    dequantises: bool = False
    framework: Mapping[str, int] = field(default_factory=dict)
    prefill_kv: Literal["max_held_bytes"] | None = None

    def kv_of(self, roles: tuple[Role, ...]) -> str:
        """The option that bounds the bytes of KV of a host with these roles."""
        return self.prefill_kv if self.prefill_kv and "prefill" in roles else self.kv


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to run a model: what is the same of it on every host. What hosts.toml states for one host is its
    EngineOptions.

    name: in hosts.toml. title: in messages. prefill, decode, follower: the class that its hosts of a role run, and
    those of node_rank 1 and more, as `module:name`, called with source, context and options; a simulated one also with
    the name of a machine. options: the keys of [hosts.*.engine] that it has, fields of EngineOptions.
    devices: values of `device`. numbered: whether `cuda:1` is one. systems, apple_silicon: what it runs on: on a Mac,
    only one with Apple silicon.
    extras: of disagg in pyproject.toml, installed on its hosts; that of the host's role if empty. needs: those without
    which it does not start, if they are others.
    loads: whether it loads a model into its own process; else another server has it (`url`), or it is simulated.
    simulated: it runs no model. Its times are predicted, its bytes and tokens are noise, and its source is a size.
    """

    name: str
    title: str = ""
    prefill: str = ""
    decode: str = ""
    follower: str = ""
    options: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    numbered: bool = False
    systems: tuple[System, ...] = ("Linux", "Darwin")
    apple_silicon: bool = False
    extras: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    memory: Memory = Memory("max_kv_bytes")
    loads: bool = True
    simulated: bool = False

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that its hosts may have."""
        runs: dict[Role, str] = {"prefill": self.prefill, "decode": self.decode}
        return tuple(role for role, engine in runs.items() if engine)

    def options_for(self, roles: tuple[Role, ...]) -> tuple[str, ...]:
        """The options of its hosts with these roles."""
        return tuple(one for one in self.options if OF_ONE_ROLE.get(one) in (None, *roles))

    def extras_for(self, roles: tuple[Role, ...]) -> tuple[str, ...]:
        """The extras of its hosts with these roles."""
        return self.extras or roles

    def needs_for(self, roles: tuple[Role, ...]) -> tuple[str, ...]:
        """The extras without which the server of such a host does not start."""
        return self.needs or self.extras_for(roles)


def engine(name: str) -> Engine:
    """The engine of this name; for a name that is none, a value without roles and options."""
    return ENGINES.get(name) or Engine(name, loads=False)


def engines_for(role: Role, *, loads: bool = False) -> list[Engine]:
    """The engines that hosts with this role may have. loads: only those that load a model in their own process."""
    return [one for one in ENGINES.values() if role in one.roles and (one.loads or not loads)]


_COMPUTES: Final = ("dtype", "device", "chunk_tokens", "threads")
_HOLDS: Final = ("kv_wire", "max_held_bytes", "layers")
_BATCHES: Final = ("max_batch", "max_kv_bytes", "split")
_AUDITS: Final = ("kv_audit", "kv_audit_tolerance")
OF_ONE_ROLE: Final[Mapping[str, Role]] = {
    **dict.fromkeys(_HOLDS, "prefill"),
    **dict.fromkeys((*_BATCHES, *_AUDITS), "decode"),
}
"""Options that only hosts with this role have."""

TRANSFORMERS: Final = Engine(
    "transformers",
    title="transformers",
    prefill="disagg.engines.transformers.engine:TransformersPrefillEngine",
    options=(*_COMPUTES, *_HOLDS, "attention", "quantization"),
    devices=("auto", "cuda", "mps", "cpu"),
    numbered=True,
    memory=Memory("max_held_bytes", dequantises=True, framework={"cuda": _CUDA_BYTES}),
)
VLLM: Final = Engine(
    "vllm",
    title="vLLM",
    prefill="disagg.engines.vllm.engine:VLLMEngine",
    follower="disagg.engines.vllm.follower:VLLMFollower",
    options=(
        *_COMPUTES,
        "kv_wire",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "tensor_parallel",
        "pipeline_parallel",
        "nnodes",
        "node_rank",
        "head_address",
    ),
    devices=("auto", "cuda", "cpu"),
    systems=("Linux",),
    extras=("vllm",),
    memory=Memory("kv_cache_memory_bytes", paged=True, framework={"cuda": _CUDA_BYTES + _VLLM_BYTES}),
)
VLLM_SERVER: Final = Engine(
    "vllm-server",
    title="vllm serve",
    prefill="disagg.engines.vllm.served.engine:ServedEngine",
    options=("dtype", "kv_wire", "kv_cache_memory_bytes", "url", "model", "key_file", "key_variable"),
    # With the environment of the `vllm serve` as `python` and site_packages nothing of that is installed again.
    extras=("vllm",),
    needs=("server",),
    loads=False,
)
MLX: Final = Engine(
    "mlx",
    title="MLX",
    prefill="disagg.engines.mlx.prefill:MLXPrefillEngine",
    decode="disagg.engines.mlx.engine:MLXDecodeEngine",
    options=(*_COMPUTES, *_HOLDS, *_BATCHES, *_AUDITS),
    devices=("auto", "gpu", "cpu"),
    apple_silicon=True,
    extras=("decode",),
    memory=Memory("max_kv_bytes", framework={"gpu": _MLX_BYTES, "cpu": _MLX_BYTES}, prefill_kv="max_held_bytes"),
)
SIMULATED: Final = Engine(
    "simulated",
    title="simulated",
    prefill="disagg.engines.simulated.prefill:SimulatedPrefillEngine",
    decode="disagg.engines.simulated.decode:SimulatedDecodeEngine",
    options=("dtype", "chunk_tokens", *_HOLDS, *_BATCHES),
    needs=("server",),
    loads=False,
    simulated=True,
)
ENGINES: Final[dict[str, Engine]] = {one.name: one for one in (TRANSFORMERS, VLLM, VLLM_SERVER, MLX, SIMULATED)}
"""The engines by name. The first one of a role is what hints suggest for it."""
